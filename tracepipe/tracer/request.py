"""The request for a capture, and the plan that is made of it for an engine.

Triggers begin and end windows. The command line writes them as `profiler`, `call:FUNCTION#N`, `signal`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Final, Literal, Protocol

from tracepipe.errors import CaptureUnavailable, OutputError, TracepipeError
from tracepipe.hooks.calls import call_rule
from tracepipe.hooks.hook import HOST_SAMPLE, PROBED_LAYERS, FilePlace, Probe
from tracepipe.hooks.names import did_you_mean

RING_BYTES = 16 << 20
"""The default ring: 262 144 events of 64 bytes, a fifth of a second at the highest measured rate."""
LAST_BYTES = 256 << 20
"""The default memory of a flight recorder: 4 million records of 64 bytes."""
AUTO_WARPS = 2_000_000
"""How many warps `auto` records of an unbounded run: about 120 MB of the file."""
BUDGET_LAUNCHES = 3
"""How many launches of each kernel share a budget of warps: otherwise the first kernels use all of it."""
ANNOTATION = "annotation"
"""The layer of the annotations that programs make, through a library that is loaded into them."""
DEFAULT_LAYERS = ("userspace", "syscall", "scheduler")
"""Layers that every machine which can capture records."""
CALL_LAYERS = ("memory", "transfer")
"""Layers of what calls did, derived from the calls of `userspace`."""
GPU_LAYERS = {"gpu_kernel": "kernels", "gpu_warp": "warps", "gpu_thread": "warps"}
"""Layers that only engines for GPUs record → the engine that records it at the least cost."""
RING_LEAST_BYTES = 4096
"""The smallest buffer between the kernel and this process: a page."""
API: Final = "api"
"""The trigger of a window for a program that uses the library to record itself or a command."""
_ANY_NUMBER = 2**31 - 1
STACKS = ("python", "off")
"""The kinds of stacks that can be recorded with calls."""
LAYER_NAMES = (*PROBED_LAYERS, HOST_SAMPLE, *CALL_LAYERS, *GPU_LAYERS, ANNOTATION)
"""All layers that can be recorded, by their names in the file."""

SIGNAL: Final = "signal"
PROFILER: Final = "profiler"
TriggerKind = Literal["profiler", "signal", "call", "nvtx", "kernel", "api"]
_FORMS: dict[TriggerKind, str] = {
    PROFILER: PROFILER,
    SIGNAL: SIGNAL,
    "call": "call:FUNCTION#N",
    "nvtx": "nvtx:RANGE#N",
    "kernel": "kernel:REGEX#N",
    API: API,
}
TRIGGER_FORMS = tuple(form for kind, form in _FORMS.items() if kind != API)
"""The forms that the command line accepts."""
_PAIRED = {PROFILER, "nvtx", SIGNAL, API}
"""Kinds that come in pairs: where no other end is given, the counterpart of the begin ends a window."""

Notify = Callable[[str], None]


def check_layers(layers: tuple[str, ...]) -> None:
    """Raise TracepipeError for a name that is not a layer of a capture."""
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
    """The choice of calls that applies: those that `only` names are recorded, query-only calls too. Raises
    TracepipeError for an unknown rule.
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
    """The bounds of a flight recorder; None without `--last`. Raises TracepipeError."""
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
    """Raise TracepipeError for a name that is not in STACKS."""
    if stacks not in STACKS:
        raise TracepipeError(f"Unknown stacks: {stacks!r}.", f"Choose from: {', '.join(STACKS)}.")


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """A program's request that a window begins or ends now."""

    begins: bool
    name: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an order: empty if it was obeyed, else the message and hint of an error."""

    message: str = ""
    hint: str = ""


ENDED = Answer("The recording has ended.", "The command ended, or a limit or the last window was reached.")
"""The answer to an order after the end of the recording."""


class Control(Protocol):
    """The link to the process that started a capture and may end it."""

    asked: int
    """How often a flight recorder was asked to write, as by SIGUSR2; up to date after `is_over`."""

    def began(self) -> None:
        """Called when the recording starts: everything from now on is recorded."""

    def ended(self) -> None:
        """Called when the recording ends: nothing more is recorded, and no window can begin."""

    def order(self) -> WindowOrder | None:
        """The next window that is to begin or to end now; up to date after `is_over`."""

    def answer(self, answer: Answer) -> None:
        """Called with the answer to the last `order`."""

    def is_over(self) -> bool:
        """Whether the recording is to end; called every 2 ms."""

    def wrote(self, asked: int, path: str, error: OutputError | None) -> None:
        """Called when a flight recorder has written a recording, after `asked` requests so far. `path` is ""
        where no file could be made, and `error` states why the file is not complete.
        """


@dataclass(frozen=True, slots=True)
class Filters:
    """Which of the calls that the probes see are recorded; the others are counted as filtered.

    `min_duration_ns` applies to calls of functions and to system calls. `sample` N records every Nth call of
    each function on each processor, the first one included. Calls that allocate, free or name something are
    always recorded.
    """

    min_duration_ns: int = 0
    sample: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """When a recording ends while its target runs; None: no limit. `duration_ns` is that of a window."""

    duration_ns: int | None = None
    events: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Windows:
    """Which stretches of a recording's time are recorded: all of it, unless one of these is given.

    A window begins `delay_ns` after the start of the recording or the end of the last window; where
    `start_on` is given, at the first such trigger after that. It ends at `stop_on`, after the duration of
    `Limits`, or with the recording. The recording ends with the `repeat`th window: by default the first one,
    or no fixed number where the program begins them by `API`. Both triggers are texts as `trigger_of` takes
    them.
    """

    delay_ns: int = 0
    start_on: str = ""
    stop_on: str = ""
    repeat: int | None = None

    @property
    def are_asked(self) -> bool:
        """Whether the request asks for windows."""
        return bool(self.delay_ns or self.start_on or self.stop_on) or self.limit > 1

    @property
    def limit(self) -> int:
        """The largest number of windows."""
        return self.repeat or (_ANY_NUMBER if self.start_on == API else 1)


@dataclass(frozen=True, slots=True)
class Last:
    """The bounds of a flight recorder: it keeps the events of the last `duration_ns` that fit into
    `size_bytes`.

    It writes them when the recording ends, when it is asked to, and when a condition of `when` is met.
    """

    duration_ns: int
    size_bytes: int = LAST_BYTES
    when: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """A request to record the events of a command that is started, or of running processes.

    `layers` are names of LAYER_NAMES; those of GPU_LAYERS ask for an engine for GPUs. `calls` is a name of
    CALL_RULES: it selects the recorded CUDA calls. Functions that `hooks` name are always recorded. `stacks`,
    of STACKS, is whether libraries in a command read the Python stacks of its calls. `hooks` are texts as the
    command line takes them. `only` and `exclude` are patterns of function names. `gpu` is the engine for the
    command's GPU work, and `auto` chooses one. For `warps`, `gpu_kernels` is a regular expression of kernel
    names, `gpu_launches` a range of their launches and `gpu_blocks` of blocks in those,
    `gpu_launches_per_kernel` how many launches of each kernel are recorded (0: all; None: all, or the first
    few where there is a budget and no range), and `gpu_memory_bytes` the memory for records on each GPU.
    After `gpu_warps` warps no further launch is recorded. `gpu_thread_exits` also writes a line for each
    thread's exit, as the layer `gpu_thread` does. `gpu_warp_marks` are patterns of kernels and of device
    functions whose calls are recorded. With `gpu_stalls` what warps wait for is sampled, by the engine
    `kernels` or, where `gpu` is `off`, alone. `gpu_counters_ns` is the interval at which the GPUs' hardware
    counters are sampled, with any engine. `libraries` are files to probe instead of those that the command
    would load. With `last`, only the last events are kept. `ring_bytes` is rounded up to a power of two. The
    command's standard output is the descriptor `stdout`. With `wait_children` a recording of a command or of
    `pids` ends when the processes that those started have ended too.
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
    wait_children: bool = False
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
    process). `children`: the processes that they fork are recorded too.
    """

    kind: Literal["command", "pids", "comm", "system"]
    pids: tuple[int, ...] = ()
    comm: str = ""
    children: bool = True

    @property
    def comm_bytes(self) -> bytes:
        """The name as the kernel keeps it: at most 15 bytes, which need not be UTF-8."""
        return os.fsencode(self.comm)[:15]


class Cause(IntEnum):
    """Why a window begins or ends: an index into `WindowPlan.causes`."""

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
    """The functions that begin and end windows, at the `begin_at`th call and the `end_at`th return. `causes`
    has the text for each `Cause`. `is_begin_followed`, `is_end_followed`: libraries in the command do not see
    the function, so its call waits until they have followed.
    """

    places: tuple[TriggerPlace, ...] = ()
    begin_at: int = 1
    end_at: int = 1
    causes: tuple[str, ...] = ()
    is_begin_followed: bool = False
    is_end_followed: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for an engine: the probes, and for the layers of `own` (`syscall`, `scheduler`) the layer's
    tracepoints.

    `values` names the values of the argument kinds in the probes' signatures. Without `windows`, everything
    from the start to the end is recorded.
    """

    layers: tuple[str, ...]
    own: tuple[str, ...]
    probes: list[Probe]
    scope: Scope
    filters: Filters
    ring_bytes: int
    values: dict[str, dict[int, str]] = field(default_factory=dict)
    windows: WindowPlan | None = None


@dataclass(frozen=True, slots=True)
class Trigger:
    """An event whose `number`th time begins or ends a window; `name` is its function, range or kernel."""

    kind: TriggerKind
    name: str = ""
    number: int = 1

    @property
    def text(self) -> str:
        """The trigger as the command line writes it."""
        named = f"{self.kind}:{self.name}" if self.name else self.kind
        return named if self.number == 1 else f"{named}#{self.number}"

    @property
    def is_probed(self) -> bool:
        """Whether it is seen by probes on functions."""
        return self.kind in (PROFILER, "call")

    @property
    def is_sent(self) -> bool:
        """Whether it is sent to the capture process itself."""
        return self.kind in (SIGNAL, API)

    def hook(self, library: Path | None, *, begins: bool) -> str:
        """The functions that it waits for, as a hook's text. `library` is the library in the command that
        sees this trigger, if there is one.
        """
        if not self.is_probed:
            return f"uprobe:{library}:tracepipe_window_{'begins' if begins else 'ends'}"
        if self.kind == PROFILER:
            what = "Start" if begins else "Stop"
            return f"uprobe:libcuda.so.1:cuProfiler{what},uprobe:libcudart.so:cudaProfiler{what}"
        if ":" in self.name:
            return f"uprobe:{self.name}"
        return ",".join(f"uprobe:{library}:{self.name}" for library in ("", "libcuda.so.1", "libcudart.so"))


def trigger_of(text: str, option: str) -> Trigger | None:
    """The trigger that an option names; None if the option is not given. Raises TracepipeError."""
    if not text:
        return None
    kind, colon, name = text.partition(":")
    if kind not in _FORMS:
        hint = did_you_mean(kind, _FORMS) or f"Choose from: {', '.join(TRIGGER_FORMS)}."
        raise TracepipeError(f"{option} {text}: {kind!r} is not a known trigger.", hint)
    takes_name = _FORMS[kind] != kind
    counted = re.fullmatch(r"(.+)#(\d{1,9})", name, re.DOTALL)
    name, number = (counted[1], int(counted[2])) if counted else (name, 1)
    if takes_name != bool(name) or bool(colon) != takes_name or number < 1:
        raise TracepipeError(f"{option} {text} cannot be understood.", f"Write {_FORMS[kind]}, N from 1.")
    return Trigger(kind, name, number)


def triggers_of(windows: Windows) -> tuple[Trigger | None, Trigger | None]:
    """The triggers that begin and end windows. Raises TracepipeError."""
    begins, ends = trigger_of(windows.start_on, "--start-on"), trigger_of(windows.stop_on, "--stop-on")
    if ends is None and begins is not None and begins.kind in _PAIRED:
        ends = replace(begins, number=1)  # the counterpart of the one that begins it
    return begins, ends


def window_environment(request: CaptureRequest) -> dict[str, str]:
    """The environment that describes the windows to libraries in the command; `native/windows.h` reads it."""
    names = ("TRACEPIPE_WINDOW_BEGIN", "TRACEPIPE_WINDOW_END")
    return {
        name: f"{trigger.number} {trigger.kind} {trigger.name}"
        for name, trigger in zip(names, triggers_of(request.windows), strict=True)
        if trigger is not None
    }


def check_windows(windows: Windows, limits: Limits) -> None:
    """Raise TracepipeError for windows that cannot be understood, and for repeated windows that never end."""
    begins, ends = triggers_of(windows)
    if begins is not None and begins.kind == API and windows.delay_ns:
        raise TracepipeError(
            "begin_window() begins the windows, so a delay has no effect.",
            "Leave out the delay, or start_on.",
        )
    if windows.limit > 1 and ends is None and limits.duration_ns is None:
        raise TracepipeError(
            f"--repeat {windows.repeat} is given, but nothing ends the first window.",
            "Give --duration or --stop-on.",
        )


def check_triggers(windows: Windows, visible: Container[str], *, has_probes: bool) -> None:
    """Raise CaptureUnavailable for a trigger that nothing sees. `visible`: kinds that a library sees."""
    hints = {
        "call": "Run it as root.",
        PROFILER: "Run it as root, or with --gpu kernels on a machine with a GPU.",
        "nvtx": "Record the layer annotation, of a command.",
        "kernel": "Use --gpu kernels on a machine with a GPU; for --gpu warps, --launches selects launches.",
    }
    for trigger in triggers_of(windows):
        if trigger is None or trigger.kind not in hints or trigger.kind in visible:
            continue
        if not (trigger.is_probed and has_probes):
            raise CaptureUnavailable(
                f"Nothing in this recording can see {trigger.text}.", hints[trigger.kind]
            )
