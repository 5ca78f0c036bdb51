"""What a capture is asked for, and what an engine must do to answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tracepipe.hooks.hook import Probe

RING_BYTES = 16 << 20
"""Default ring: 262 144 events of 64 bytes, a fifth of a second at the highest rate that was measured."""
AUTO_WARPS = 2_000_000
"""How many warps `auto` records of a run that nobody bounded: about 120 MB of the file."""
DEFAULT_LAYERS = ("userspace", "syscall", "scheduler")
"""What every machine that can capture has."""
ALL_LAYERS = ("userspace", "syscall", "kernel", "scheduler")

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Filters:
    """Which calls are recorded of those that the probes see; the others are counted as filtered.

    `min_duration_ns` holds for calls of functions and of the kernel; `sample` N records every Nth call of
    each function on each processor, the first one included. Calls that allocate, free or give names are kept.
    """

    min_duration_ns: int = 0
    sample: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """When a recording ends although what is recorded goes on; None: never."""

    duration_ns: int | None = None
    events: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What to record, and of whom: a command that is run, or what runs already.

    `hooks` are texts as the command line takes them. `only` and `exclude` are patterns of function names.
    `gpu` is the engine for what the command's GPUs do, `auto` one that suits it. For `warps`, `gpu_kernels`
    is a regular expression of kernel names, `gpu_launches` a range of their launches and `gpu_blocks` of
    blocks in those, `gpu_memory_bytes` the room for records on each GPU, and after `gpu_warps` warps no
    further launch is recorded. `libraries` are files to take instead of those that the command would load.
    `ring_bytes` is rounded up to a power of two.
    """

    command: list[str] = field(default_factory=list)
    layers: tuple[str, ...] = DEFAULT_LAYERS
    method: str = "auto"
    gpu: str = "off"
    gpu_kernels: str = ""
    gpu_launches: str = ""
    gpu_blocks: str = ""
    gpu_memory_bytes: int | None = None
    gpu_warps: int | None = None
    pids: tuple[int, ...] = ()
    comm: str = ""
    system: bool = False
    children: bool = True
    hooks: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    filters: Filters = Filters()
    limits: Limits = Limits()
    ring_bytes: int = RING_BYTES


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """What was recorded: counts, losses and filtered events by layer, how it ended, wall time, engine.

    `cpu_losses` are the losses of a layer by processor, as far as it is known. `exit_code` is the target's as
    a shell gives it: its own, or 128 + the signal that ended it.
    """

    counts: dict[str, int]
    losses: dict[str, int]
    cpu_losses: dict[str, dict[int, int]]
    filtered: dict[str, int]
    ended_by: str
    exit_code: int
    wall_ns: int
    attach_ns: int
    detach_ns: int
    engine: str


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose events are recorded.

    `kind` is `command` (process `pids[0]`, held, from its next exec on), `pids` (running processes, all their
    threads), `comm` (every process of that name, running or executed later) or `system` (everything but this
    process). `children`: what those processes fork is recorded too.
    """

    kind: str
    pids: tuple[int, ...] = ()
    comm: str = ""
    children: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine has to attach: the probes, and for those of `own` (`syscall`, `scheduler`) the layer's
    own tracepoints.

    `values` has the names of the values of the kinds that the probes' signatures use.
    """

    layers: tuple[str, ...]
    own: tuple[str, ...]
    probes: list[Probe]
    scope: Scope
    filters: Filters
    ring_bytes: int
    values: dict[str, dict[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loss:
    """Events of a layer (None: of any) on a processor (None: unknown) that were lost between two instants.

    Times on CLOCK_MONOTONIC.
    """

    layer: str | None
    count: int
    start_ns: int
    end_ns: int
    reason: str
    cpu: int | None = None


class Collector(Protocol):
    """Takes what a recording collects, in order."""

    def begin(self, plan: Plan, start_ns: int) -> None:
        """What will come: records of this plan, from `start_ns` on CLOCK_MONOTONIC. Before all else."""
        ...

    def put(self, chunk: bytes) -> None:
        """Take whole records."""
        ...

    def put_loss(self, loss: Loss) -> None:
        """Take a loss, after the records that came before it."""
        ...

    def finish(self) -> None:
        """No more comes."""
        ...


@runtime_checkable
class Store(Collector, Protocol):
    """A collector that can tell of all that it took, when it is done."""

    error: OSError | None
    cpu_losses: dict[str, dict[int, int]]

    @property
    def size_bytes(self) -> int:
        """What has been written, or will be."""
        ...

    @property
    def counts(self) -> dict[str, int]:
        """Layer → events."""
        ...

    @property
    def losses(self) -> dict[str, int]:
        """Layer → events lost."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Whether all is done, after waiting for it for at most `timeout_s`."""
        ...

    def abandon(self) -> None:
        """Leave out what is not done yet, and count it."""
        ...

    def raise_if_failed(self) -> None:
        """Raise OutputError if something could not be written."""
        ...

    def close(self) -> None:
        """End it, done or not."""
        ...


class Renderer(Protocol):
    """Turns what a recording collected into lines of an event file; `losses` are those that it found
    itself.
    """

    losses: dict[str, int]

    def learn(self, chunk: bytes) -> None:
        """Take from a chunk what lines before it need; for recordings that are unordered."""
        ...

    def render(self, chunk: bytes) -> bytes:
        """JSON lines of one chunk; chunks come in the order in which they were collected."""
        ...

    def count(self, chunk: bytes) -> int:
        """Events in a chunk."""
        ...


class DeviceRenderer(Protocol):
    """Turns what a GPU's recording collected into lines of an event file.

    `gpus` are the GPUs that were met, as the header has them; `notes` what the user should know; `losses`
    those that it found itself.
    """

    notes: list[str]
    losses: dict[str, int]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that were met, as a header has them."""
        ...

    def render(self, chunk: bytes) -> bytes:
        """JSON lines of one chunk; chunks come whole and in the order in which they were collected."""
        ...

    def count(self, chunk: bytes) -> int:
        """Events in a chunk."""
        ...


class DeviceRecording(Protocol):
    """A library in the target's processes that tells what their GPUs do."""

    name: str
    layers: frozenset[str]
    """What it records; `userspace` among them: its calls are taken, and no probes set for them."""
    clocks: Sequence[str]
    """Clocks that its times can be on beside CLOCK_MONOTONIC."""
    gpus: Sequence[Mapping[str, Any]]
    """The GPUs that there are, as a header has them: index, name, uuid, sm_count."""

    def environment(self) -> dict[str, str]:
        """What the target must find in its environment."""
        ...

    def collect(self, *, is_final: bool = False) -> bytes:
        """Records since the last call; never waits. `is_final`: the target has ended."""
        ...

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        ...

    def renderer(self) -> DeviceRenderer:
        """The decoder of what `collect` gives; used on another thread."""
        ...

    def close(self) -> None:
        """Give the memory back; what the target still tells is left."""
        ...


@dataclass(slots=True)
class Coverage:
    """Layers that a recording gets, and why it does not get the others."""

    got: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


class Recording(Protocol):
    """Attached probes that record nothing until they are started."""

    coverage: Coverage
    filtered: dict[str, int]
    """Layer → events that a filter left out; complete after `stop`."""

    @property
    def is_unordered(self) -> bool:
        """Whether records can stand after later ones, or need what comes after them."""
        ...

    def start(self) -> None:
        """Record what the plan's scope says, from now on; a command from its exec on."""
        ...

    def collect(self) -> bytes:
        """Whole records since the last call; never waits."""
        ...

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        ...

    def renderer(self) -> Renderer:
        """The decoder of what `collect` gives, for a started recording; used on another thread."""
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
