"""What numbers a recording has, found by reading it once before it is merged with others."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tracepipe.event.columns import SPECIAL, SourceBatch
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Tables
from tracepipe.event.warps import WarpColumns
from tracepipe.recording.open import OpenRecording
from tracepipe.recording.reading import Progress, Reading

# So many processes are known of a recording; a machine has some thousand.
_PROCESSES_MAX = 1 << 16


@dataclass(slots=True)
class Survey:
    """The processes and GPUs of a recording, how many processors it names, and its highest launch."""

    pids: set[int] = field(default_factory=set)
    gpus: set[int] = field(default_factory=set)
    cpus: int = 0
    launches: int = 0

    def _meet(self, tables: Tables) -> None:
        for shape in tables.shapes:
            if shape is not None:
                self._meet_shape(shape)

    def _meet_shape(self, shape: Shape) -> None:
        if shape.pid is not None and len(self.pids) < _PROCESSES_MAX:
            self.pids.add(shape.pid)
        if shape.gpu is not None or shape.on_stream:
            self.gpus.add(shape.gpu or 0)
        if shape.cpu is not None:
            self.cpus = max(self.cpus, shape.cpu + 1)

    def _take(self, batch: SourceBatch, tables: Tables) -> None:
        events = batch.events
        launched = [shape is not None and shape.has_launch for shape in tables.shapes]
        if any(launched):
            shapes = np.maximum(events.shape, 0)
            has = np.array(launched, np.bool_)[shapes] & (events.shape >= 0)
            self.launches = max(self.launches, int(events.launch[has].max(initial=0)))
        for at in np.flatnonzero(events.shape == SPECIAL).tolist() if batch.others else ():
            other = batch.others[int(events.args[at])]
            if isinstance(other, WarpColumns):
                self.gpus.add(other.launched.get("gpu", 0))
                self.launches = max(self.launches, other.launched.get("launch", 0))


def surveyed(opened: OpenRecording, path: str, progress: Progress | None = None) -> Survey:
    """Read a recording for its numbers."""
    survey, tables = Survey(), opened.recording.tables
    nothing = np.empty(0, np.int32)

    def relieve() -> None:
        survey._meet(tables)
        tables.keep(nothing, nothing)

    reading = Reading(opened, path, progress=progress, relieve=relieve)
    for batch in reading.source():
        survey._take(batch, tables)
    survey._meet(tables)
    return survey
