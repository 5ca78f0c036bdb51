"""A GPU engine is a channel to the processes of a command, and the streams of records that it collects.

libraries in the command ──▶ Channel ──────┬─▶ GpuEngine ──▶ chunks ──▶ GpuRenderer
samplers of the GPUs ──▶ CounterStream ────┘

KernelStream, StallStream, WarpStream and AnnotationStream are of what comes through the channel. A stream
states the layers that it adds, what the command's environment needs, and the decoders of its kinds of
records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.gpu.engines.channel import CHANNEL_BYTES, Channel
from tracepipe.tracer.gpu.engines.renderer import GpuRenderer, MakeDecoder
from tracepipe.tracer.records.record import Loss

STACKS_VARIABLE: Final = "TRACEPIPE_GPU_STACKS"
"""The variable that is `off` if the libraries are to read no Python frames."""
_NONE: Final[Mapping[int, str]] = MappingProxyType({})


class RecordStream:
    """Records of one origin: a library in the command's processes, or processes of tracepipe."""

    name: str
    layers: frozenset[str]
    decoders: Sequence[MakeDecoder]
    """The functions that make the decoders of its records."""
    clocks: Sequence[str] = ()
    """Clocks other than CLOCK_MONOTONIC that its times can be on."""
    counters: Sequence[Mapping[str, Any]] = ()
    """The sampled hardware counters, in the form of a header."""
    sees: Mapping[str, Path] = MappingProxyType({})
    """Kind of trigger that a library in the command sees → the library."""
    lost_layers: Mapping[int, str] = _NONE
    """Kind of record → the layer of its losses."""
    lost_reasons: Mapping[int, str] = _NONE
    """Kind of record → reason, for kinds that are lost for other reasons than a full channel."""

    def environment(self) -> dict[str, str]:
        """Variables for the command's environment."""
        return {}

    def enter(self, pids: Sequence[int], settings: Mapping[str, str], meanwhile: Callable[[], None]) -> None:
        """Record running processes, as far as it can; `settings` are those of the engine, and `meanwhile` is
        to be called while it waits for a process. Raises CaptureUnavailable, TracepipeError.
        """

    def expect_windows(self) -> None:
        """Called before a process starts: events are recorded only in windows."""

    def turned(self, turn: Turn) -> None:
        """Called when a window of the recording begins or ends, or the recording itself if it has none."""

    def collect(self, news: list[str], *, is_final: bool) -> bytes:
        """Records that do not come through the channel, since the last call; never waits. Messages for the
        user are added to `news`.
        """
        return b""

    def lost(self) -> list[Loss]:
        """Losses of such records since the last call."""
        return []

    def stop(self) -> None:
        """Record no more; what is still sent is collected until `is_over`."""

    def is_over(self) -> bool:
        """Whether nothing more comes, besides what is in the channel."""
        return True

    def close(self) -> None:
        """Free what it uses."""


class GpuEngine:
    """Records what the GPUs of a command do: a channel that its processes find by their environment, and the
    streams of records in it and beside it.
    """

    def __init__(
        self,
        streams: Sequence[RecordStream] = (),
        *,
        owner: tuple[int, int] | None = None,
        stacks: str = "python",
        gpus: Sequence[Mapping[str, Any]] = (),
        ring_bytes: int = CHANNEL_BYTES,
    ) -> None:
        """`owner` (user, group): whom the command runs as. `stacks`: of STACKS. `gpus`: those of the machine,
        in the form of a header. The streams are closed with the engine. Raises CaptureUnavailable.
        """
        self.streams: list[RecordStream] = []
        self.name, self.gpus = "", gpus
        self.layers: frozenset[str] = frozenset()
        """The layers that it records; with `userspace` it records calls, and no probes are attached for them.
        """
        self.clocks: Sequence[str] = ()
        self.counters: Sequence[Mapping[str, Any]] = ()
        self.sees: Mapping[str, Path] = {}
        self._stacks, self._waited_for = stacks, dict[str, str]()
        self._lost_layers, self._lost_reasons = dict[int, str](), dict[int, str]()
        self._renderer: GpuRenderer | None = None
        try:
            self.channel = Channel(ring_bytes, owner=owner)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        for stream in streams:
            self.add(stream)

    def add(self, stream: RecordStream) -> None:
        """Add a stream, before `renderer` is called."""
        self.streams.append(stream)
        self.name = ", ".join(one.name for one in self.streams)
        self.layers |= stream.layers
        self.clocks = [*self.clocks, *stream.clocks]
        self.counters = [*self.counters, *stream.counters]
        self.sees = {**self.sees, **stream.sees}
        self._lost_layers |= stream.lost_layers
        self._lost_reasons |= stream.lost_reasons

    def environment(self) -> dict[str, str]:
        """The variables to add to the command's environment."""
        own = {STACKS_VARIABLE: self._stacks} | self.channel.environment() | self._waited_for
        return own | {name: text for stream in self.streams for name, text in stream.environment().items()}

    def enter(self, pids: Sequence[int]) -> None:
        """Record running processes from now on. Raises CaptureUnavailable, TracepipeError."""
        settings = {STACKS_VARIABLE: self._stacks} | self.channel.environment() | self._waited_for
        for stream in self.streams:
            stream.enter(pids, settings, self.channel.accept)

    def collect(self, *, is_final: bool = False) -> bytes:
        """The records since the last call; never waits. `is_final`: the command has ended."""
        chunks = [self.channel.collect(is_final=is_final)]
        chunks += (stream.collect(self.renderer().news, is_final=is_final) for stream in self.streams)
        return b"".join(chunks)

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        losses = self.channel.losses(self._lost_layers, self._lost_reasons)
        return losses + [loss for stream in self.streams for loss in stream.lost()]

    def renderer(self) -> GpuRenderer:
        """The decoder of what `collect` returns; used on another thread."""
        if self._renderer is None:
            numbers = {gpu["uuid"]: gpu["index"] for gpu in self.gpus if "uuid" in gpu}
            self._renderer = GpuRenderer(
                [make for stream in self.streams for make in stream.decoders], numbers
            )
        return self._renderer

    def expect_windows(self, waited_for: Mapping[str, str]) -> None:
        """Called before a process begins: events are recorded only in windows, whose begin and end the
        environment describes.
        """
        self._waited_for = dict(waited_for)
        self.channel.expect_windows()
        for stream in self.streams:
            stream.expect_windows()

    def arm(self, windows: int) -> None:
        """From now on, processes begin and end windows at their triggers, at most this many."""
        self.channel.arm(windows)

    def set_window(self, *, is_open: bool) -> None:
        """Begin a window, or end the open one, unless a process has already done so."""
        self.channel.set_window(is_open=is_open)

    def hits(self) -> int:
        """How often a trigger that the library sees happened since `arm`, or since the last window began."""
        return self.channel.hits()

    def turns(self) -> list[Turn]:
        """The begins and ends of windows by processes since the last call."""
        return self.channel.turns()

    def turned(self, turn: Turn) -> None:
        """Called in order of time when a window begins or ends, or a recording without windows."""
        for stream in self.streams:
            stream.turned(turn)

    def stop(self) -> None:
        """Ask the processes to stop recording and to undo what the library did; never waits. Their last
        records are collected until `is_over`.
        """
        for stream in self.streams:
            stream.stop()
        self.channel.stop()

    def is_over(self) -> bool:
        """Whether every process has sent its last records and stopped, or has ended."""
        return self.channel.is_over() and all(stream.is_over() for stream in self.streams)

    def close(self) -> None:
        """Free the memory; what the processes still send is not read."""
        for stream in self.streams:
            stream.close()
        self.channel.close()
