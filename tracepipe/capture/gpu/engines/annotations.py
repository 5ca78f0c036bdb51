"""The engine of annotations: what a program says of itself through NVTX, alone or with its GPUs' engine.

NVTX loads the library into the command (`native/annotations.cpp`). Its records come through the channel of
the engine for the GPUs, or through one of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from tracepipe.capture.engines.engine import DeviceEngine, DeviceRenderer
from tracepipe.capture.gpu.engines.annotation_lines import AnnotationLines
from tracepipe.capture.gpu.engines.annotation_records import EVENT_KINDS, KINDS
from tracepipe.capture.gpu.engines.channel_engine import ChannelEngine
from tracepipe.capture.gpu.engines.transport import NVTX_VARIABLE, GpuRecord, packed, records
from tracepipe.capture.gpu.engines.untrusted import REFUSALS, Kept, Malformed, Refused, whole_records
from tracepipe.capture.records.line import Lines
from tracepipe.capture.records.loss import Loss

_LAYER: Final = "annotation"


class AnnotationsEngine:
    """An engine for a command's GPUs that records annotations too."""

    def __init__(self, library: Path, device: DeviceEngine) -> None:
        """`library` is the built native code, `device` has the channel."""
        self._library, self._device = library, device
        self.name = ", ".join(name for name in (device.name, "nvtx") if name)
        self.layers = device.layers | {_LAYER}
        self.clocks, self.gpus = device.clocks, device.gpus
        self._renderer = AnnotationsRenderer(device.renderer())

    def environment(self) -> dict[str, str]:
        """What the command's environment needs."""
        return self._device.environment() | {NVTX_VARIABLE: str(self._library.absolute())}

    def collect(self, *, is_final: bool = False) -> bytes:
        """Whole records since the last call; never waits. `is_final`: the command has ended."""
        return self._device.collect(is_final=is_final)

    def lost(self) -> list[Loss]:
        """What found no room in the channel since the last call."""
        return self._device.lost()

    def renderer(self) -> AnnotationsRenderer:
        """The decoder of what `collect` gives; used on another thread."""
        return self._renderer

    def stop(self) -> None:
        """Ask the processes to record no more; what they still send is collected until `is_over`."""
        self._device.stop()

    def is_over(self) -> bool:
        """Whether every process records no more, or is gone."""
        return self._device.is_over()

    def close(self) -> None:
        """Give the channel back."""
        self._device.close()


class AnnotationsRenderer:
    """Turns chunks of records into lines; those that are no annotations by the renderer of the GPUs."""

    def __init__(self, device: DeviceRenderer) -> None:
        self._device = device
        self._losses: dict[str, int] = {}
        self._kept, self._refused = Kept(), Refused()
        self._lines = AnnotationLines(self._kept)

    @property
    def notes(self) -> list[str]:
        """What the user should know."""
        return self._device.notes

    @property
    def losses(self) -> dict[str, int]:
        """Losses that were found in what was collected."""
        both = dict(self._device.losses)
        for layer, count in self._losses.items():
            both[layer] = both.get(layer, 0) + count
        return both

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that were met, as a header has them."""
        return self._device.gpus

    def counts(self, chunk: bytes) -> dict[str, int]:
        """Layer → events of the records in a chunk, which is not rendered."""
        own, others = _divided(chunk)
        count = sum(record.kind in EVENT_KINDS for record in records(own))
        return {_LAYER: count, **self._device.counts(others)}

    def render(self, chunk: bytes) -> Lines:
        """Lines of one chunk."""
        own, others = _divided(chunk)
        lines = self._device.render(others)
        for record in whole_records(own, self._refused):
            self._add(lines, record)
        for loss in self._refused.take_losses(self._losses):
            lines.record(loss)
        return lines

    def rest(self) -> Iterator[Lines]:
        """What the renderer of the GPUs has yet of the last chunk."""
        return self._device.rest()

    def _add(self, lines: Lines, record: GpuRecord) -> None:
        try:
            for event in self._lines.events(record):
                lines.record(event)
        except REFUSALS as refusal:
            self._refused.take(refusal)


def _divided(chunk: bytes) -> tuple[bytes, bytes]:
    """The records of annotations, and the others."""
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    start = 0
    for is_own, some in groupby(records(chunk), key=lambda record: record.kind in KINDS):
        stop = start + sum(packed(record) for record in some)
        parts[is_own].append(chunk[start:stop])
        start = stop
    return b"".join(parts[True]), b"".join(parts[False])


class NoGpus(ChannelEngine):
    """In the place of an engine for GPUs where nothing is recorded of them: the channel alone."""

    name = ""
    layers: frozenset[str] = frozenset()
    clocks: Sequence[str] = ()
    gpus: Sequence[Mapping[str, Any]] = ()

    def renderer(self) -> NoRecords:
        """A decoder that knows no record."""
        return NoRecords()


class NoRecords:
    """Refuses every record: no library that writes it was loaded by us."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.losses: dict[str, int] = {}
        self.gpus: list[dict[str, Any]] = []

    def counts(self, chunk: bytes) -> dict[str, int]:
        """No events."""
        return {}

    def render(self, chunk: bytes) -> Lines:
        """Losses alone."""
        refused, lines = Refused(), Lines()
        for _ in records(chunk):
            refused.take(Malformed())
        for loss in refused.take_losses(self.losses):
            lines.record(loss)
        return lines

    def rest(self) -> Iterator[Lines]:
        """None."""
        return iter(())
