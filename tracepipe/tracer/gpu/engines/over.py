"""An engine around another one, whose own records are in the same chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.gpu.engines.channel_engine import ChannelEngine
from tracepipe.tracer.gpu.engines.channel_renderer import ChannelRenderer
from tracepipe.tracer.gpu.engines.transport import GpuRecord
from tracepipe.tracer.gpu.engines.untrusted import REFUSALS
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.record import Loss


class EngineOver:
    """A GPU engine that adds records to those of an inner engine. Other methods call the inner engine."""

    name: str
    layers: frozenset[str]
    clocks: Sequence[str]
    gpus: Sequence[Mapping[str, Any]]
    counters: Sequence[Mapping[str, Any]]
    sees: Mapping[str, Path]

    def __init__(
        self,
        device: ChannelEngine | EngineOver,
        renderer: RendererOver,
        *,
        name: str,
        layers: frozenset[str],
        sees: Mapping[str, Path] | None = None,
    ) -> None:
        """`renderer` decodes the records of both; `layers` and `sees` are what this engine adds."""
        self._device, self._renderer = device, renderer
        self.name = ", ".join(one for one in (device.name, name) if one)
        self.layers = device.layers | layers
        self.clocks, self.gpus, self.counters = device.clocks, device.gpus, device.counters
        self.sees = {**device.sees, **(sees or {})}

    def environment(self) -> dict[str, str]:
        """Variables for the command's environment."""
        return self._device.environment()

    def enter(self, pids: Sequence[int]) -> None:
        """Record running processes as far as the inner engine can."""
        self._device.enter(pids)

    def collect(self, *, is_final: bool = False) -> bytes:
        """Complete records since the last call; never waits. `is_final`: the command has ended."""
        return self._device.collect(is_final=is_final)

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        return self._device.lost()

    def expect_windows(self, waited_for: Mapping[str, str]) -> None:
        """Record events only in windows, which begin and end by the triggers `waited_for`, as the environment
        states them. Call it before a process starts.
        """
        self._device.expect_windows(waited_for)

    def arm(self, windows: int) -> None:
        """From now on let processes begin and end this number of windows, by the triggers."""
        self._device.arm(windows)

    def set_window(self, *, is_open: bool) -> None:
        """Begin a window, or end the open one, unless a process has already done so."""
        self._device.set_window(is_open=is_open)

    def hits(self) -> int:
        """How often the trigger that begins a window was seen since `arm`, or since the last one began."""
        return self._device.hits()

    def turns(self) -> list[Turn]:
        """The begins and ends of windows by processes since the last call."""
        return self._device.turns()

    def turned(self, turn: Turn) -> None:
        """Called when a window of the recording begins or ends, or the recording itself if it has none."""
        self._device.turned(turn)

    def renderer(self) -> RendererOver:
        """The decoder of what `collect` returns; used on another thread."""
        return self._renderer

    def stop(self) -> None:
        """Ask the processes to record no more; what they still send is collected until `is_over`."""
        self._device.stop()

    def is_over(self) -> bool:
        """Whether all processes have stopped recording, or have ended."""
        return self._device.is_over()

    def close(self) -> None:
        """Close the channel."""
        self._device.close()


class RendererOver(ChannelRenderer):
    """Turns records of some kinds into lines; the inner engine's renderer takes the others."""

    def __init__(self, device: ChannelRenderer) -> None:
        super().__init__()
        self._device = device

    @property
    def news(self) -> list[str]:
        """The inner renderer's news."""
        return self._device.news

    @property
    def notes(self) -> list[str]:
        """Messages for the user."""
        return self._device.notes

    @property
    def losses(self) -> dict[str, int]:
        """Layer → losses that were found in what was collected."""
        both = dict(self._device.losses)
        for layer, count in self._losses.items():
            both[layer] = both.get(layer, 0) + count
        return both

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that processes reported, in the form of a header."""
        return self._device.gpus

    @property
    def sampling(self) -> list[dict[str, Any]]:
        """The processor time of processes that sample GPUs, in the form of a footer."""
        return self._device.sampling

    @property
    def stall_samples(self) -> int:
        """Samples of what warps wait for, which are not counted as events."""
        return self._device.stall_samples

    def begin_at(self, start_ns: int | None) -> None:
        """Records rendered from now on began before `start_ns`; None ends that."""
        super().begin_at(start_ns)
        self._device.begin_at(start_ns)

    def rest(self) -> Iterator[Lines]:
        """The remaining lines of the last chunk, which the inner renderer has."""
        return self._device.rest()

    def last(self) -> Lines:
        """Lines that waited in the inner renderer."""
        return self._device.last()

    @abstractmethod
    def is_own(self, record: GpuRecord) -> bool:
        """Whether a record is of a kind that this renderer takes."""

    @abstractmethod
    def add(self, lines: Lines, record: GpuRecord) -> None:
        """Add the lines of such a record. Raises one of REFUSALS."""

    def _rendered(self, some: Iterable[GpuRecord]) -> Lines:
        own = Lines()
        lines = self._device.lines(self._others(some, own))
        lines.extend(own)
        return lines

    def _others(self, some: Iterable[GpuRecord], own: Lines) -> Iterator[GpuRecord]:
        """The records of other kinds. Lines of this renderer's own kinds are added to `own`."""
        for record in some:
            if not self.is_own(record):
                yield record
                continue
            try:
                self.add(own, record)
            except REFUSALS as refusal:
                self._refused.take(refusal)
