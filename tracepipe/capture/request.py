"""What a capture is asked for, and the plan that an engine gets of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from tracepipe.errors import OutputError, TracepipeError
from tracepipe.hooks.calls import call_rule
from tracepipe.hooks.hook import PROBED_LAYERS, FilePlace, Probe

RING_BYTES = 16 << 20
"""Default ring: 262 144 events of 64 bytes, a fifth of a second at the highest rate that was measured."""
LAST_BYTES = 256 << 20
"""Default memory of a flight recorder: 4 million records of 64 bytes."""
AUTO_WARPS = 2_000_000
"""How many warps `auto` records of a run that nobody bounded: about 120 MB of the file."""
BUDGET_LAUNCHES = 3
"""How many launches of each kernel a budget of warps is for: else what is launched first takes all of it."""
ANNOTATION = "annotation"
"""The layer of what programs say of themselves, through a library that is loaded into them."""
DEFAULT_LAYERS = ("userspace", "syscall", "scheduler")
"""What every machine that can capture has."""
CALL_LAYERS = ("memory", "transfer")
"""What calls did, made of those of `userspace`."""
GPU_LAYERS = {"gpu_kernel": "kernels", "gpu_warp": "warps", "gpu_thread": "warps"}
"""Layers that only engines for GPUs record → the engine that records it at the least cost."""
RING_LEAST_BYTES = 4096
"""The smallest buffer between the kernel and this process: a page."""
API = "api"
"""What begins windows, or ends them: the program that records itself or a command, by the library."""
_ANY_NUMBER = 2**31 - 1
STACKS = ("python", "off")
"""What is recorded of where calls are made."""
LAYER_NAMES = (*PROBED_LAYERS, *CALL_LAYERS, *GPU_LAYERS, ANNOTATION)
"""All layers that can be asked for, by the names that the file has."""

Notify = Callable[[str], None]


def check_layers(layers: tuple[str, ...]) -> None:
    """Raise TracepipeError for a name that no layer of a capture has."""
    if unknown := [name for name in layers if name not in LAYER_NAMES]:
        raise TracepipeError(
            f"There is no layer {unknown[0]!r} to record.",
            f"Choose from: {', '.join(LAYER_NAMES)}.",
        )


def ring_size(size_bytes: int | None) -> int:
    """The size of the ring buffer that is asked for, or the default. Raises TracepipeError."""
    if size_bytes is not None and size_bytes < RING_LEAST_BYTES:
        raise TracepipeError(
            f"A ring buffer of {size_bytes} bytes is too small.",
            f"Give {RING_LEAST_BYTES >> 10}K or more; {RING_BYTES >> 20}M is the default.",
        )
    return size_bytes or RING_BYTES


def calls_of(calls: str, only: object) -> str:
    """The choice of calls that holds: functions that `only` names are recorded, also if they only ask.

    Raises TracepipeError for a name that no rule has.
    """
    call_rule(calls)
    return "all" if calls == "default" and only else calls


def last_of(
    duration_ns: int | None,
    size_bytes: int | None,
    when: tuple[str, ...],
    limits: Limits,
    windows: Windows,
) -> Last | None:
    """What a flight recorder is asked to keep; None where there is none. Raises TracepipeError."""
    if duration_ns is None:
        if size_bytes is not None:
            raise TracepipeError("--last-size bounds what --last keeps.", "Give --last 10s too.")
        if when:
            raise TracepipeError("--when writes what --last keeps.", "Give --last 10s too.")
        return None
    if limits.events is not None or limits.size_bytes is not None:
        raise TracepipeError(
            "--max-events and --max-size end a recording that keeps everything.",
            "--last-size bounds what --last keeps in memory.",
        )
    if windows.are_asked:
        raise TracepipeError(
            "--last records all the time, and cannot be combined with windows.",
            "Give --last alone, or --delay, --start-on and --stop-on alone.",
        )
    return Last(duration_ns, size_bytes or LAST_BYTES, when)


def check_stacks(stacks: str) -> None:
    """Raise TracepipeError for a name that is none of STACKS."""
    if stacks not in STACKS:
        raise TracepipeError(f"There is no kind of stacks {stacks!r}.", f"Choose from: {', '.join(STACKS)}.")


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """A program says that a window begins now, or ends."""

    begins: bool
    name: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an order: done, or why not and what to do, as an error has it."""

    message: str = ""
    hint: str = ""


ENDED = Answer("The recording has ended.", "The command ended, or a limit or the last window was reached.")
"""To an order that comes too late."""


class Control(Protocol):
    """Whoever started a capture from another process, and may end it."""

    asked: int
    """How often a flight recorder was asked to write, as SIGUSR2 asks it; known after `is_over`."""

    def began(self) -> None:
        """Everything from now on is recorded."""
        ...

    def ended(self) -> None:
        """Nothing is recorded any more, and no window can begin."""
        ...

    def order(self) -> WindowOrder | None:
        """A window that is to begin or to end now, each time another; known after `is_over`."""
        ...

    def answer(self, answer: Answer) -> None:
        """What became of the last `order`."""
        ...

    def is_over(self) -> bool:
        """Whether the recording shall end; asked every 2 ms."""
        ...

    def wrote(self, asked: int, path: str, error: OutputError | None) -> None:
        """A flight recorder wrote what it had been asked for, `asked` times by then; `path` is "" where no
        file could be made, and `error` says why it is not whole.
        """
        ...


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
    """When a recording ends although what is recorded goes on; None: never. `duration_ns` is of a window."""

    duration_ns: int | None = None
    events: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Windows:
    """When is recorded, of all that the recording lasts: all of it, unless one of these is given.

    A window begins `delay_ns` after the recording, or the window before it; at `start_on` where that is
    given, which is looked for from then on. It ends at `stop_on`, after the duration of `Limits`, and with
    the recording, which goes on to the end of the `repeat`th: the first one unless that is given, or any
    number where the program begins them by `API`. Both are texts as `trigger_of` takes them.
    """

    delay_ns: int = 0
    start_on: str = ""
    stop_on: str = ""
    repeat: int | None = None

    @property
    def are_asked(self) -> bool:
        """Whether anything is said of windows."""
        return bool(self.delay_ns or self.start_on or self.stop_on) or self.limit > 1

    @property
    def limit(self) -> int:
        """How many windows there are at most."""
        return self.repeat or (_ANY_NUMBER if self.start_on == API else 1)


@dataclass(frozen=True, slots=True)
class Last:
    """What a flight recorder keeps: what came in the last `duration_ns`, as far as `size_bytes` hold it.

    It writes that when the recording ends, when it is asked to, and when one of `when` comes true.
    """

    duration_ns: int
    size_bytes: int = LAST_BYTES
    when: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What to record, and of whom: a command that is run, or what runs already.

    `layers` are names of LAYER_NAMES; those of GPU_LAYERS ask for an engine for GPUs. `calls` is which calls
    of CUDA's are recorded, by a name of CALL_RULES; functions that `hooks` name are in any case. `stacks`,
    of STACKS, is whether libraries in a command read where in a Python program its calls are made. `hooks`
    are texts as the command line takes them. `only` and `exclude` are patterns of function names.
    `gpu` is the engine for what the command's GPUs do, `auto` one that suits it. For `warps`, `gpu_kernels`
    is a regular expression of kernel names, `gpu_launches` a range of their launches and `gpu_blocks` of
    blocks in those, `gpu_launches_per_kernel` how many launches of each kernel there are (0: all; None: all,
    or the first few where there is a budget and no range), `gpu_memory_bytes` the room for records on each
    GPU, and after `gpu_warps` warps no further launch is recorded; `gpu_thread_exits` writes a line for each
    thread's exit too, as the layer `gpu_thread` does, and `gpu_warp_marks` are patterns of kernels and of
    device functions whose calls are recorded. With `gpu_stalls` what warps wait for is sampled, by the engine
    `kernels` or, where `gpu` is `off`, alone. `gpu_counters_ns` is how often the counters of the GPUs'
    hardware are sampled, whatever the engine. `libraries` are files to take instead of those that the
    command would load. With `last`, what came last is kept alone. `ring_bytes` is rounded up to a power of
    two. The command's standard output is the descriptor `stdout`.
    """

    command: list[str] = field(default_factory=list)
    layers: tuple[str, ...] = DEFAULT_LAYERS
    method: str = "auto"
    gpu: str = "off"
    gpu_kernels: str = ""
    gpu_launches: str = ""
    gpu_launches_per_kernel: int | None = None
    gpu_blocks: str = ""
    gpu_memory_bytes: int | None = None
    gpu_warps: int | None = None
    gpu_thread_exits: bool = False
    gpu_warp_marks: str = ""
    gpu_counters_ns: int | None = None
    gpu_stalls: bool = False
    pids: tuple[int, ...] = ()
    comm: str = ""
    system: bool = False
    children: bool = True
    calls: str = "all"
    stacks: str = "python"
    hooks: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    filters: Filters = Filters()
    limits: Limits = Limits()
    windows: Windows = Windows()
    last: Last | None = None
    ring_bytes: int = RING_BYTES
    stdout: int = 1


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


class Cause(IntEnum):
    """Why a window begins or ends: a place in `WindowPlan.causes`."""

    START = 0
    STOP = 1
    DURATION = 2
    END = 3


@dataclass(frozen=True, slots=True)
class TriggerPlace:
    """A function of a program that begins windows when it is called, or ends them when it returns."""

    place: FilePlace
    begins: bool


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """What begins and ends windows: functions, at the `begin_at`th call and the `end_at`th return. `causes`
    are the words for each `Cause`. `is_begin_followed`, `is_end_followed`: libraries in the command do not
    see what does it, so that the call waits for them.
    """

    places: tuple[TriggerPlace, ...] = ()
    begin_at: int = 1
    end_at: int = 1
    causes: tuple[str, ...] = ()
    is_begin_followed: bool = False
    is_end_followed: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine has to attach: the probes, and for those of `own` (`syscall`, `scheduler`) the layer's
    own tracepoints.

    `values` has the names of the values of the kinds that the probes' signatures use. Without `windows` all
    is recorded from the start to the end.
    """

    layers: tuple[str, ...]
    own: tuple[str, ...]
    probes: list[Probe]
    scope: Scope
    filters: Filters
    ring_bytes: int
    values: dict[str, dict[int, str]] = field(default_factory=dict)
    windows: WindowPlan | None = None
