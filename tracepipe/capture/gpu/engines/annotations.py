"""The engine of annotations: what a program says of itself through NVTX, alone or with its GPUs' engine.

NVTX loads the library into the command (`native/annotations.cpp`). Its records come through the channel of
the engine for the GPUs, or through one of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tracepipe.capture.gpu.engines.annotation_lines import AnnotationLines
from tracepipe.capture.gpu.engines.annotation_records import EVENT_KINDS, KINDS
from tracepipe.capture.gpu.engines.carries import AnnotationsCarry, ChannelCarry
from tracepipe.capture.gpu.engines.channel_engine import ChannelEngine
from tracepipe.capture.gpu.engines.channel_renderer import ChannelRenderer
from tracepipe.capture.gpu.engines.over import EngineOver, RendererOver
from tracepipe.capture.gpu.engines.spans import ChannelSpans, RangesSpans
from tracepipe.capture.gpu.engines.transport import NVTX_VARIABLE, GpuRecord
from tracepipe.capture.gpu.engines.untrusted import Malformed
from tracepipe.capture.records.line import Lines
from tracepipe.capture.records.spans import Wanted

_LAYER: Final = "annotation"


class AnnotationsEngine(EngineOver):
    """An engine for a command's GPUs that records annotations too."""

    def __init__(self, library: Path, device: ChannelEngine | EngineOver) -> None:
        """`library` is the built native code, `device` has the channel."""
        renderer = AnnotationsRenderer(device.renderer())
        super().__init__(device, renderer, name="nvtx", layers=frozenset({_LAYER}), sees={"nvtx": library})
        self._library = library

    def environment(self) -> dict[str, str]:
        """What the command's environment needs."""
        return super().environment() | {NVTX_VARIABLE: str(self._library.absolute())}


class AnnotationsRenderer(RendererOver):
    """Turns chunks of records into lines; those that are no annotations by the renderer of the GPUs."""

    def __init__(self, device: ChannelRenderer) -> None:
        super().__init__(device)
        self._lines = AnnotationLines(self._kept)

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """The layer of a record's events, and how many it has."""
        return (_LAYER, record.kind in EVENT_KINDS) if record.kind in KINDS else self._device.counted(record)

    def spans(self, wanted: Wanted) -> RangesSpans:
        """What finds ranges that took long, and among the records of the GPUs calls and kernels."""
        return RangesSpans(wanted, self._device.spans(wanted))

    def anew(self) -> AnnotationsRenderer:
        """A renderer like this one that has taken nothing."""
        return AnnotationsRenderer(self._device.anew())

    def carry(self) -> AnnotationsCarry:
        """What keeps of dropped records what such a renderer needs of them."""
        return AnnotationsCarry(self._device.carry())

    def is_own(self, record: GpuRecord) -> bool:
        """Whether it is of an annotation."""
        return record.kind in KINDS

    def add(self, lines: Lines, record: GpuRecord) -> None:
        """Add its events. Raises one of REFUSALS."""
        for event in self._lines.events(record):
            lines.record(event if self._resumed_ns is None else _begun(event, self._resumed_ns))


def _begun(event: dict[str, Any], start_ns: int) -> dict[str, Any]:
    """An event of what began before: it begins at `start_ns`, and says when it did."""
    began = {"began": "before the recording", "began_ns": event["ts_ns"]}
    args = {"args": event.get("args", {}) | began} if event["phase"] == "B" else {}
    return event | {"ts_ns": start_ns} | args


class NoGpus(ChannelEngine):
    """In the place of an engine for GPUs where nothing is recorded of them: the channel alone."""

    name = ""
    layers: frozenset[str] = frozenset()
    clocks: Sequence[str] = ()
    gpus: Sequence[Mapping[str, Any]] = ()

    def enter(self, pids: Sequence[int]) -> None:
        """Nothing is recorded of what they have their GPUs do."""

    def renderer(self) -> NoRecords:
        """A decoder that knows no record."""
        return NoRecords()


class NoRecords(ChannelRenderer):
    """Refuses every record: no library that writes it was loaded by us."""

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """No events."""
        return "", 0

    def spans(self, wanted: Wanted) -> ChannelSpans:
        """What finds nothing."""
        return ChannelSpans(wanted)

    def anew(self) -> NoRecords:
        """A renderer like this one that has taken nothing."""
        return NoRecords()

    def carry(self) -> ChannelCarry:
        """Nothing is needed of what is dropped."""
        return ChannelCarry(frozenset())

    def _rendered(self, some: Iterable[GpuRecord]) -> Lines:
        for _ in some:
            self._refused.take(Malformed())
        return Lines()
