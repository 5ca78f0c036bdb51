"""What a capture is asked for, and what an engine must do to answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

RING_BYTES = 16 << 20
"""Default ring: 262 144 events of 64 bytes, a fifth of a second at the highest rate that was measured."""
DEFAULT_LAYERS = ("userspace", "syscall", "scheduler")
"""What every machine that can capture has."""
ALL_LAYERS = ("userspace", "syscall", "kernel", "scheduler")

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """A command to run and the layers to record of it and its children.

    `library` is the shared library whose `cu*` functions are the userspace layer; None: the libcuda that the
    command would load. `ring_bytes` is rounded up to a power of two.
    """

    command: list[str]
    layers: tuple[str, ...] = DEFAULT_LAYERS
    library: str | None = None
    engine: str = "auto"
    ring_bytes: int = RING_BYTES


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """What was recorded: counts and losses by layer, how the target ended, wall time, engine and version.

    `exit_code` is the target's as a shell gives it: its own, or 128 + the signal that ended it.
    """

    counts: dict[str, int]
    losses: dict[str, int]
    ended_by: str
    exit_code: int
    wall_ns: int
    detach_ns: int
    engine: str


@dataclass(frozen=True, slots=True)
class Function:
    """An exported function and where its first instruction is in the library's file, bytes."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class DriverFunction:
    """A function of the NVIDIA driver's kernel modules.

    `address` is 0 where the kernel hides addresses. `arguments` names the first ones, three at most,
    `_` for those that are not recorded; `has_result` says that it returns a 32-bit status.
    """

    name: str
    module: str
    address: int
    arguments: tuple[str, ...] = ()
    has_result: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine has to attach. Without a library there is no userspace layer."""

    layers: tuple[str, ...]
    library: str | None
    functions: list[Function]
    ring_bytes: int
    driver: list[DriverFunction] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Loss:
    """Events of a layer (None: of any) that were lost between two instants on CLOCK_MONOTONIC."""

    layer: str | None
    count: int
    start_ns: int
    end_ns: int
    reason: str


class Renderer(Protocol):
    """Turns what a recording collected into lines of an event file, counting them by layer."""

    counts: dict[str, int]

    def render(self, chunk: bytes) -> bytes:
        """JSON lines of one chunk; chunks come in the order in which they were collected."""
        ...

    def count(self, chunk: bytes) -> int:
        """Records in a chunk that will not be rendered."""
        ...


@dataclass(slots=True)
class Coverage:
    """Layers that a recording gets, and why it does not get the others."""

    got: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


class Recording(Protocol):
    """Attached probes that record nothing until a process is armed."""

    coverage: Coverage

    def arm(self, pid: int) -> None:
        """Record process `pid` and its children from its next exec on."""
        ...

    def collect(self) -> bytes:
        """Whole records since the last call; never waits."""
        ...

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        ...

    def renderer(self) -> Renderer:
        """The decoder of what `collect` gives; used on another thread."""
        ...

    def stop(self) -> None:
        """Detach every probe; `collect` and `lost` still give what was recorded before."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class Engine(Protocol):
    """A way to attach probes: one file, and one line in `ENGINES`."""

    name: str
    layers: frozenset[str]

    def check(self) -> str:
        """The engine's version. Raises CaptureUnavailable where it cannot work."""
        ...

    def attach(self, plan: Plan, notify: Notify) -> Recording:
        """Attach every probe of the plan. Raises CaptureUnavailable."""
        ...
