"""What the engines share whose records come through a channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tracepipe.capture.engines.engine import Turn
from tracepipe.capture.gpu.engines.channel import CHANNEL_BYTES, Channel
from tracepipe.capture.gpu.engines.channel_renderer import ChannelRenderer
from tracepipe.capture.gpu.engines.transport import STACKS_VARIABLE
from tracepipe.capture.records.loss import Loss
from tracepipe.errors import CaptureUnavailable

_NONE: Final[Mapping[int, str]] = MappingProxyType({})


class ChannelEngine(ABC):
    """A channel that a command finds by its environment, and what comes through it."""

    name: str
    layers: frozenset[str]
    clocks: Sequence[str]
    """Clocks that its times can be on other than CLOCK_MONOTONIC."""
    gpus: Sequence[Mapping[str, Any]]
    """The GPUs that there are, as a header has them."""
    counters: Sequence[Mapping[str, Any]] = ()
    """What is sampled of the GPUs' hardware, as a header has it."""
    sees: Mapping[str, Path] = MappingProxyType({})
    """What begins and ends windows, by its kind, that a library in the command sees → the library."""

    def __init__(
        self,
        owner: tuple[int, int] | None,
        *,
        ring_bytes: int = CHANNEL_BYTES,
        stacks: str = "python",
        lost_layers: Mapping[int, str] = _NONE,
        lost_why: Mapping[int, str] = _NONE,
    ) -> None:
        """`owner` (user, group): who the command runs as. `stacks`: of STACKS. `lost_layers`: kind of record
        → layer; `lost_why`: kind → reason, of kinds that are lost for another than a full channel. Raises
        CaptureUnavailable.
        """
        self._channel = Channel(ring_bytes, owner=owner)
        self._stacks = stacks
        self._lost_layers, self._lost_why = lost_layers, lost_why
        self._waited_for: dict[str, str] = {}

    def environment(self) -> dict[str, str]:
        """What the command's environment needs."""
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
        """Whole records since the last call; never waits. `is_final`: the command has ended."""
        return self._channel.collect(is_final=is_final)

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        return self._channel.losses(self._lost_layers, self._lost_why)

    def expect_windows(self, waited_for: Mapping[str, str]) -> None:
        """Before a process begins: events are recorded in windows alone, which begin and end by what the
        environment says.
        """
        self._waited_for = dict(waited_for)
        self._channel.expect_windows()

    def arm(self, windows: int) -> None:
        """From now on processes begin windows, so many, and end them, by what they wait for."""
        self._channel.arm(windows)

    def set_window(self, *, is_open: bool) -> None:
        """Begin a window, or end the one that is open, unless a process has done that."""
        self._channel.set_window(is_open=is_open)

    def hits(self) -> int:
        """How often what begins a window came since `arm`, or since the last one began."""
        return self._channel.hits()

    def turns(self) -> list[Turn]:
        """Windows that processes began and ended since the last call."""
        return self._channel.turns()

    def turned(self, turn: Turn) -> None:  # noqa: B027
        """A window of the recording began or ended: the processes see to that themselves."""

    @abstractmethod
    def renderer(self) -> ChannelRenderer:
        """The decoder of what `collect` gives; used on another thread."""

    def stop(self) -> None:
        """Ask the processes to send what they have yet, and to record no more; `collect` gives it."""
        self._channel.stop()

    def is_over(self) -> bool:
        """Whether they have."""
        return self._channel.is_over()

    def close(self) -> None:
        """Give the channel back."""
        self._channel.close()
