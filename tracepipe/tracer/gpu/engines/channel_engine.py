"""The base of engines whose records come through a channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.gpu.engines.channel import CHANNEL_BYTES, Channel
from tracepipe.tracer.gpu.engines.channel_renderer import ChannelRenderer
from tracepipe.tracer.gpu.engines.transport import STACKS_VARIABLE
from tracepipe.tracer.records.record import Loss

_NONE: Final[Mapping[int, str]] = MappingProxyType({})


class ChannelEngine(ABC):
    """A channel that a command finds by its environment, and the records in it."""

    name: str
    layers: frozenset[str]
    clocks: Sequence[str]
    """Clocks other than CLOCK_MONOTONIC that its times can be on."""
    gpus: Sequence[Mapping[str, Any]]
    """The GPUs of the machine, in the form of a header."""
    counters: Sequence[Mapping[str, Any]] = ()
    """The sampled hardware counters, in the form of a header."""
    sees: Mapping[str, Path] = MappingProxyType({})
    """Kind of trigger that a library in the command sees → the library."""

    def __init__(
        self,
        owner: tuple[int, int] | None,
        *,
        ring_bytes: int = CHANNEL_BYTES,
        stacks: str = "python",
        lost_layers: Mapping[int, str] = _NONE,
        lost_why: Mapping[int, str] = _NONE,
    ) -> None:
        """`owner` (user, group): whom the command runs as. `stacks`: of STACKS. `lost_layers`: kind of record
        → layer; `lost_why`: kind → reason, for kinds that are lost for other reasons than a full channel.
        Raises CaptureUnavailable.
        """
        self._channel = Channel(ring_bytes, owner=owner)
        self._stacks = stacks
        self._lost_layers, self._lost_why = lost_layers, lost_why
        self._waited_for: dict[str, str] = {}

    def environment(self) -> dict[str, str]:
        """Variables for the command's environment."""
        return {STACKS_VARIABLE: self._stacks} | self._channel.environment() | self._waited_for

    def enter(self, pids: Sequence[int]) -> None:
        """Record processes that run already. Raises CaptureUnavailable, as most engines are there from a
        program's start; TracepipeError where there is no such process.
        """
        raise CaptureUnavailable(
            f"{self.name} cannot record process {pids[0]}, which is already running.",
            "Give a command after --.",
        )

    def collect(self, *, is_final: bool = False) -> bytes:
        """Complete records since the last call; never waits. `is_final`: the command has ended."""
        return self._channel.collect(is_final=is_final)

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        return self._channel.losses(self._lost_layers, self._lost_why)

    def expect_windows(self, waited_for: Mapping[str, str]) -> None:
        """Record events only in windows, which begin and end by the triggers `waited_for`, as the environment
        states them. Call it before a process starts.
        """
        self._waited_for = dict(waited_for)
        self._channel.expect_windows()

    def arm(self, windows: int) -> None:
        """From now on let processes begin and end this number of windows, by the triggers."""
        self._channel.arm(windows)

    def set_window(self, *, is_open: bool) -> None:
        """Begin a window, or end the open one, unless a process has already done so."""
        self._channel.set_window(is_open=is_open)

    def hits(self) -> int:
        """How often the trigger that begins a window was seen since `arm`, or since the last one began."""
        return self._channel.hits()

    def turns(self) -> list[Turn]:
        """The begins and ends of windows by processes since the last call."""
        return self._channel.turns()

    def turned(self, turn: Turn) -> None:  # noqa: B027
        """Called when a window of the recording begins or ends, which the processes notice themselves."""

    @abstractmethod
    def renderer(self) -> ChannelRenderer:
        """The decoder of what `collect` returns; used on another thread."""

    def stop(self) -> None:
        """Ask the processes to send their remaining records, which `collect` returns, and to record no
        more.
        """
        self._channel.stop()

    def is_over(self) -> bool:
        """Whether all processes have done so, or have ended."""
        return self._channel.is_over()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
