"""The engine of annotations, which a program makes with NVTX: alone, or with a GPU engine.

NVTX loads the library into the command (`native/annotations.cpp`). Its records come through the channel of
the GPU engine, or through a separate one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tracepipe.tracer.gpu.engines.annotation_lines import AnnotationLines
from tracepipe.tracer.gpu.engines.annotation_records import EVENT_KINDS, KINDS
from tracepipe.tracer.gpu.engines.carries import AnnotationsCarry, ChannelCarry
from tracepipe.tracer.gpu.engines.channel_engine import ChannelEngine
from tracepipe.tracer.gpu.engines.channel_renderer import ChannelRenderer
from tracepipe.tracer.gpu.engines.over import EngineOver, RendererOver
from tracepipe.tracer.gpu.engines.spans import ChannelSpans, RangesSpans
from tracepipe.tracer.gpu.engines.transport import NVTX_VARIABLE, GpuRecord
from tracepipe.tracer.gpu.engines.untrusted import Malformed
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.unrendered import Wanted

_LAYER: Final = "annotation"


class AnnotationsEngine(EngineOver):
    """A GPU engine that also records annotations."""

    def __init__(self, library: Path, device: ChannelEngine | EngineOver) -> None:
        """`library` is the built native code, `device` has the channel."""
        renderer = AnnotationsRenderer(device.renderer())
        super().__init__(device, renderer, name="nvtx", layers=frozenset({_LAYER}), sees={"nvtx": library})
        self._library = library

    def environment(self) -> dict[str, str]:
        """Variables for the command's environment."""
        return super().environment() | {NVTX_VARIABLE: str(self._library.absolute())}


class AnnotationsRenderer(RendererOver):
    """Turns annotations into lines; the GPU engine's renderer takes the other records."""

    def __init__(self, device: ChannelRenderer) -> None:
        super().__init__(device)
        self._lines = AnnotationLines(self._kept)

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """The layer of a record's events, and their number."""
        return (_LAYER, record.kind in EVENT_KINDS) if record.kind in KINDS else self._device.counted(record)

    def spans(self, wanted: Wanted) -> RangesSpans:
        """A finder of long ranges, and of long calls and kernels among the GPU engine's records."""
        return RangesSpans(wanted, self._device.spans(wanted))

    def anew(self) -> AnnotationsRenderer:
        """A renderer like this one that has taken nothing."""
        return AnnotationsRenderer(self._device.anew())

    def carry(self) -> AnnotationsCarry:
        """A keeper of what such a renderer needs from evicted records."""
        return AnnotationsCarry(self._device.carry())

    def is_own(self, record: GpuRecord) -> bool:
        """Whether the record is an annotation."""
        return record.kind in KINDS

    def add(self, lines: Lines, record: GpuRecord) -> None:
        """Add the events of a record. Raises one of REFUSALS."""
        for event in self._lines.events(record):
            lines.record(event if self._resumed_ns is None else _begun(event, self._resumed_ns))


def _begun(event: dict[str, Any], start_ns: int) -> dict[str, Any]:
    """An event that began before `start_ns`: it begins there, and its arguments state the real begin."""
    began = {"began": "before the recording", "began_ns": event["ts_ns"]}
    args = {"args": event.get("args", {}) | began} if event["phase"] == "B" else {}
    return event | {"ts_ns": start_ns} | args


class NoGpus(ChannelEngine):
    """Only the channel, for recordings without a GPU engine."""

    name = ""
    layers: frozenset[str] = frozenset()
    clocks: Sequence[str] = ()
    gpus: Sequence[Mapping[str, Any]] = ()

    def enter(self, pids: Sequence[int]) -> None:
        """Do nothing, as no GPU work is recorded."""

    def renderer(self) -> NoRecords:
        """A decoder that refuses all records."""
        return NoRecords()


class NoRecords(ChannelRenderer):
    """Refuses every record, as no library that writes it was loaded."""

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """No events."""
        return "", 0

    def spans(self, wanted: Wanted) -> ChannelSpans:
        """A finder that finds nothing."""
        return ChannelSpans(wanted)

    def anew(self) -> NoRecords:
        """A renderer like this one that has taken nothing."""
        return NoRecords()

    def carry(self) -> ChannelCarry:
        """A keeper of nothing, as nothing is needed from evicted records."""
        return ChannelCarry(frozenset())

    def _rendered(self, some: Iterable[GpuRecord]) -> Lines:
        for _ in some:
            self._refused.take(Malformed())
        return Lines()
