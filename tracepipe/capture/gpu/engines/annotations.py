"""The engine of annotations: what a program says of itself through NVTX, alone or with its GPUs' engine.

NVTX loads the library into the command (`native/annotations.cpp`). Its records come through the channel of
the engine for the GPUs, or through one of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tracepipe.capture.engines.engine import Turn
from tracepipe.capture.gpu.engines.annotation_lines import AnnotationLines
from tracepipe.capture.gpu.engines.annotation_records import EVENT_KINDS, KINDS
from tracepipe.capture.gpu.engines.carries import AnnotationsCarry, ChannelCarry
from tracepipe.capture.gpu.engines.channel_engine import ChannelEngine
from tracepipe.capture.gpu.engines.channel_renderer import ChannelRenderer
from tracepipe.capture.gpu.engines.spans import ChannelSpans, RangesSpans
from tracepipe.capture.gpu.engines.transport import NVTX_VARIABLE, GpuRecord
from tracepipe.capture.gpu.engines.untrusted import REFUSALS, Malformed
from tracepipe.capture.records.line import Lines
from tracepipe.capture.records.loss import Loss
from tracepipe.capture.records.spans import Wanted

_LAYER: Final = "annotation"


class AnnotationsEngine:
    """An engine for a command's GPUs that records annotations too."""

    def __init__(self, library: Path, device: ChannelEngine) -> None:
        """`library` is the built native code, `device` has the channel."""
        self._library, self._device = library, device
        self.name = ", ".join(name for name in (device.name, "nvtx") if name)
        self.layers = device.layers | {_LAYER}
        self.clocks, self.gpus = device.clocks, device.gpus
        self.sees: Mapping[str, Path] = {**device.sees, "nvtx": library}
        self._renderer = AnnotationsRenderer(device.renderer())

    def environment(self) -> dict[str, str]:
        """What the command's environment needs."""
        return self._device.environment() | {NVTX_VARIABLE: str(self._library.absolute())}

    def enter(self, pids: Sequence[int]) -> None:
        """As the engine for GPUs; annotations are recorded from a program's start."""
        self._device.enter(pids)

    def collect(self, *, is_final: bool = False) -> bytes:
        """Whole records since the last call; never waits. `is_final`: the command has ended."""
        return self._device.collect(is_final=is_final)

    def lost(self) -> list[Loss]:
        """What found no room in the channel since the last call."""
        return self._device.lost()

    def expect_windows(self, waited_for: Mapping[str, str]) -> None:
        """Before a process begins: events are recorded in windows alone, which begin and end by what the
        environment says.
        """
        self._device.expect_windows(waited_for)

    def arm(self, windows: int) -> None:
        """From now on processes begin windows, so many, and end them, by what they wait for."""
        self._device.arm(windows)

    def set_window(self, *, is_open: bool) -> None:
        """Begin a window, or end the one that is open, unless a process has done that."""
        self._device.set_window(is_open=is_open)

    def hits(self) -> int:
        """How often what begins a window came since `arm`, or since the last one began."""
        return self._device.hits()

    def turns(self) -> list[Turn]:
        """Windows that processes began and ended since the last call."""
        return self._device.turns()

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


class AnnotationsRenderer(ChannelRenderer):
    """Turns chunks of records into lines; those that are no annotations by the renderer of the GPUs."""

    def __init__(self, device: ChannelRenderer) -> None:
        super().__init__()
        self._device = device
        self._lines = AnnotationLines(self._kept)

    @property
    def news(self) -> list[str]:
        """The device's."""
        return self._device.news

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

    def begin_at(self, start_ns: int | None) -> None:
        """What is rendered from now on began before that; None: no more."""
        super().begin_at(start_ns)
        self._device.begin_at(start_ns)

    def rest(self) -> Iterator[Lines]:
        """What the renderer of the GPUs has yet of the last chunk."""
        return self._device.rest()

    def last(self) -> Lines:
        """What waited in the renderer of the GPUs."""
        return self._device.last()

    def _rendered(self, some: Iterable[GpuRecord]) -> Lines:
        own = Lines()
        lines = self._device.lines(self._others(some, own))
        lines.extend(own)
        return lines

    def _others(self, some: Iterable[GpuRecord], own: Lines) -> Iterator[GpuRecord]:
        """The records that are no annotations; the lines of those that are one are added to `own`."""
        for record in some:
            if record.kind in KINDS:
                self._add(own, record)
            else:
                yield record

    def _add(self, lines: Lines, record: GpuRecord) -> None:
        try:
            for event in self._lines.events(record):
                lines.record(event if self._resumed_ns is None else _begun(event, self._resumed_ns))
        except REFUSALS as refusal:
            self._refused.take(refusal)


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
