"""`tracepipe.capture`: records a command, running processes or this one while a block of Python runs. Its
options are those of the command `tracepipe capture`, which `live` and `hooks test` have a part of.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

from tracepipe.api.options import OUTPUT
from tracepipe.errors import TracepipeError
from tracepipe.hooks.calls import CALL_RULES
from tracepipe.hooks.hook import HOST_SAMPLE, PROBED_LAYERS
from tracepipe.options import SECONDS, SIZE, TIME, Option, about, quantities
from tracepipe.tracer import ENGINES
from tracepipe.tracer.gpu import GPU_ENGINES
from tracepipe.tracer.request import (
    ANNOTATION,
    AUTO_WARPS,
    BUDGET_LAUNCHES,
    GPU_LAYERS,
    LAST_BYTES,
    LAYER_NAMES,
    RING_BYTES,
    RING_LEAST_BYTES,
    STACKS,
    TRIGGER_FORMS,
    CaptureRequest,
    Filters,
    Limits,
    Notify,
    Windows,
    calls_of,
    check_layers,
    check_stacks,
    check_windows,
    last_of,
    ring_size,
)

if TYPE_CHECKING:
    from tracepipe.api.capture_block import Capture
    from tracepipe.api.record import Order

T = TypeVar("T", bound="str | int | PathLike[str]")

WHO, WHAT, WHEN = "Whose events", "Which events", "When"
LAST, GPUS = "Flight recorder", "GPUs"
_LIVE: Final = ("live",)
_PROBING: Final = ("live", "hooks test")


def complete_layers(incomplete: str) -> list[str]:
    """The lists of layers that complete an incomplete one, without repetition."""
    given, comma, last = incomplete.rpartition(",")
    others = set(given.split(","))
    words = LAYER_NAMES if comma else ("all", "none", *LAYER_NAMES)
    return [f"{given}{comma}{word}" for word in words if word.startswith(last) and word not in others]


def complete_sets(incomplete: str) -> list[str]:
    """The shipped sets of hooks whose names begin with a text."""
    from tracepipe.hooks.sets import shipped_sets

    return [name for name in shipped_sets() if name.startswith(incomplete)]


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """The options of `tracepipe.capture`. Times and sizes are texts such as "10s" and "1G".

    A text that is no time, no size or no such choice raises TracepipeError when `capture` is called.
    """

    comm: Annotated[str, Option(
        "Record every process of this name, running now or started later.",
        "NAME", panel=WHO, also=_PROBING)] = ""
    system: Annotated[bool, Option("Record all processes of this machine.", panel=WHO, also=_PROBING)] = False
    """The process that records is left out."""
    children: Annotated[bool, Option(
        "Also record the child processes of these, or not.", panel=WHO, also=_PROBING)] = True
    wait_children: Annotated[bool, Option(
        "Do not stop when the command or the processes of --pid end, but when all processes that they "
        "started have ended too.",
        panel=WHO, also=_LIVE)] = False

    layers: Annotated[str | Sequence[str] | None, Option(
        f"Record these layers, separated by commas: {', '.join(LAYER_NAMES)}. all: the first five, and "
        "annotation if a command is run; none: none of these, only what other options name. Default: all, "
        "without kernel where the NVIDIA driver cannot be probed.",
        "LAYER,...", complete=complete_layers, panel=WHAT, also=_LIVE)] = None
    hooks: Annotated[str | Sequence[str], Option(
        "Also record these functions: uprobe:LIBRARY:FUNCTION, kprobe:FUNCTION or tracepoint:GROUP:NAME, "
        "with arguments and a condition if wanted; a shipped set (see tracepipe hooks list); or FILE.toml.",
        "HOOK", flags=("--hook",), repeats=True, complete=complete_sets, panel=WHAT, also=_LIVE)] = ()
    only: Annotated[str | Sequence[str], Option(
        "Record only functions that fit this shell pattern.",
        "PATTERN", repeats=True, panel=WHAT, also=_LIVE)] = ()
    exclude: Annotated[str | Sequence[str], Option(
        "Do not record functions that fit this shell pattern.",
        "PATTERN", repeats=True, panel=WHAT, also=_LIVE)] = ()
    calls: Annotated[str, Option(
        "Record these CUDA calls: all; default: all but query-only calls (cudaGetDevice), unless --only "
        "names functions; launches: only launches, copies, memsets and synchronisations.",
        choices=tuple(CALL_RULES), panel=WHAT, also=_LIVE)] = "default"
    min_duration: Annotated[str, Option(
        f"Leave out calls that are shorter than this: 10us, 1.5ms. {SECONDS}",
        TIME, panel=WHAT, also=_LIVE)] = ""
    sample: Annotated[int, Option(
        "Record one in N calls of each function, N from 1.", "N", least=1, panel=WHAT, also=_LIVE)] = 1
    """The calls are counted on each processor."""
    libraries: Annotated[str | Sequence[str], Option(
        "Trace this libcuda, libcudart or other library instead of the one that the program loads.",
        "PATH", flags=("--library",), repeats=True, panel=WHAT, also=(*_PROBING, "hooks list"))] = ()

    delay: Annotated[str, Option(
        f"Begin to record this time after the start: 5s, 500ms. {SECONDS}", TIME, panel=WHEN)] = ""
    start_on: Annotated[str, Option(
        f"Begin a window when this happens: {', '.join(TRIGGER_FORMS)}. With --duration, each window is that "
        "long.",
        "TRIGGER", panel=WHEN)] = ""
    """"api" is `Capture.begin_window`."""
    stop_on: Annotated[str, Option(
        "End the window when this happens, in the same forms. By default, profiler and signal end what they "
        "began.",
        "TRIGGER", panel=WHEN)] = ""
    """"api" is `Capture.end_window`."""
    repeat: Annotated[int | None, Option(
        "Record up to N windows, each as above. Default: 1.", "N", least=1, panel=WHEN)] = None
    """With "api" there may be any number of windows by default."""
    duration: Annotated[str, Option(
        f"Stop after this time: 10s, 500ms, 2m. {SECONDS}", TIME, least=1, panel=WHEN, also=_PROBING)] = ""
    max_events: Annotated[int | None, Option(
        "Stop after this many events, from 1.", "N", least=1, panel=WHEN)] = None
    max_size: Annotated[str, Option(
        "Stop when the events reach this size, before compression: 100M, 1G.",
        SIZE, least=1, panel=WHEN)] = ""

    last: Annotated[str, Option(
        "Keep only the events of the last 10s, 2m, … in memory. Write them at the end and on SIGUSR2, each "
        f"time to a separate file. {SECONDS}",
        TIME, least=1, panel=LAST)] = ""
    last_size: Annotated[str, Option(
        f"With --last: keep at most this much in memory. Default: {LAST_BYTES >> 20}M.",
        SIZE, least=1, panel=LAST)] = ""
    when: Annotated[str | Sequence[str], Option(
        "With --last: also write when a call took too long: 'cudaStreamSynchronize > 50ms', 'syscall:NAME > "
        "50ms', 'nvtx:RANGE > 200ms' or 'kernel:REGEX > 5ms'.",
        "CONDITION", repeats=True, panel=LAST)] = ()

    method: Annotated[str, Option(
        "Record events of the host by this method. auto chooses the best one that works on this machine.",
        choices=("auto", *ENGINES), also=_PROBING)] = "auto"
    ring_bytes: Annotated[str, Option(
        f"Use a buffer of this size between the kernel and the file, from {RING_LEAST_BYTES >> 10}K. "
        f"Default: {RING_BYTES >> 20}M.",
        SIZE, also=_LIVE)] = ""

    gpu: Annotated[str, Option(
        "Record what the command does on the GPUs, without root: kernels and copies (kernels; it costs "
        "almost nothing), or every warp (warps). auto chooses by the command, and says which. For a process "
        "of --pid, only kernels is possible.",
        choices=("auto", "off", *GPU_ENGINES), panel=GPUS)] = "auto"
    kernel: Annotated[str, Option(
        "Record the warps of kernels whose name, mangled or demangled, contains a match.",
        "REGEX", read=str, panel=GPUS)] = ""
    launches: Annotated[str, Option(
        "Record the warps of these launches, counted from 1 among the launches of the chosen kernels: 10, "
        "10-20, 10-.",
        "RANGE", panel=GPUS)] = ""
    launches_per_kernel: Annotated[int | None, Option(
        "Record the warps of the first N launches of each kernel; 0: of all launches. Default: "
        f"{BUDGET_LAUNCHES} with a limit of warps (by --gpu-warps or auto) and without --launches; otherwise "
        "all.",
        "N", panel=GPUS)] = None
    blocks: Annotated[str, Option(
        "Record the warps of these blocks of each grid, counted from 0: 5, 0-131, 100-.",
        "RANGE", panel=GPUS)] = ""
    gpu_memory: Annotated[str, Option(
        "Record warps, with a buffer of this size on each GPU, from 1M. Default: a size that suits the GPU.",
        SIZE, panel=GPUS)] = ""
    gpu_warps: Annotated[int | None, Option(
        f"Record warps, and after N warps record no further launch. Default: no limit; with "
        f"auto, {AUTO_WARPS}.",
        "N", least=1, panel=GPUS)] = None
    gpu_stalls: Annotated[bool, Option(
        "Sample why warps wait (stall reasons): with --gpu kernels, which auto then chooses, or alone, with "
        "--gpu off.",
        panel=GPUS)] = False
    stacks: Annotated[str, Option(
        "Record the Python stack of each launch, copy and allocation (python), or no stacks (off).",
        choices=STACKS, panel=GPUS)] = "python"
    thread_exits: Annotated[bool, Option(
        "Record warps, and write a line for the exit of each thread too: 32 times as many lines.",
        panel=GPUS)] = False
    warp_marks: Annotated[str, Option(
        "Record the warps of kernels that match the first expression, and in them the calls of device "
        "functions that match the second. This slows both down.",
        "REGEX:REGEX", panel=GPUS)] = ""
    gpu_counters: Annotated[str, Option(
        "Sample the hardware counters of all GPUs (SMs, tensor cores, DRAM, PCIe, clocks) at this interval: "
        "1ms, 200us. The interval is from 100us to 1s.",
        TIME, panel=GPUS)] = ""

    command_output: Annotated[str | PathLike[str], Option(
        "Write the command's standard output to this file. Without this option it is not changed; with -o - "
        "it goes to standard error.",
        "FILE", panel=OUTPUT)] = ""
    """TracepipeError without a command."""
# fmt: on


def capture(
    command: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    options: CaptureOptions | None = None,
    *,
    pids: int | Sequence[int] = (),
    output: str | PathLike[str] = "",
    force: bool = False,
    notify: Notify | None = None,
) -> Capture:
    """Record a command, running processes, or this process, in a `with` statement.

    One of `command`, `pids`, and `comm` and `system` of the options chooses whose events are recorded.
    Without any, these are the events of this process, with the threads and processes that it starts. A
    command is a program with its arguments; it is not run by a shell. `output` is the file, or `-`; by
    default it has the name of the program. It replaces another only with `force`. `notify` is called with
    notes on the capture. Raises TracepipeError for an option that has no meaning. Entering the block raises
    CaptureUnavailable, whose hint states how to fix it, OutputError, and TracepipeError for a command that
    cannot be run.
    """
    from tracepipe.api.capture_block import Capture

    options = options or CaptureOptions()
    program, *rest = _several(command) or ("",)
    if isinstance(program, PathLike) and "/" not in fspath(program):
        program = f"./{fspath(program)}"  # a path is not searched for in $PATH
    words = [fspath(part) for part in (program, *rest)] if program else []
    if options.command_output and not words:
        raise TracepipeError("There is no command whose output could be written.", "Name a command.")
    own = not (words or pids or options.comm or options.system)
    return Capture(order_of(words, (os.getpid(),) if own else _several(pids), options, output, force), notify)


def order_of(
    command: list[str],
    pids: tuple[int, ...],
    options: CaptureOptions,
    output: str | PathLike[str] = "",
    force: bool = False,
) -> Order:
    """What to record, and the names of its outputs, whose folders are made. Raises TracepipeError, with the
    name of the option where it is about one.
    """
    from tracepipe.api.record import Order, OutputNames

    request = request_of(command, pids, options)
    names = OutputNames(request)
    with about("output"):
        recording = names.recording(fspath(output))
    with about("command_output"):
        written = names.command_output(fspath(options.command_output))
    return Order(request, recording, force, written)


def request_of(
    command: list[str], pids: tuple[int, ...], options: CaptureOptions, *, has_gpus: bool = True
) -> CaptureRequest:
    """The request that the options make; without `has_gpus`, nothing is recorded that a library in the
    command would report. Raises TracepipeError, with the name of the option where it is about one.
    """
    from tracepipe.tracer.gpu.choice import check
    from tracepipe.tracer.records.unrendered import Conditions

    read = quantities(options)
    limits = Limits(read["duration"], options.max_events, read["max_size"])
    windows = Windows(read["delay"] or 0, options.start_on, options.stop_on, options.repeat)
    when, only = _several(options.when), _several(options.only)
    with about("layers"):
        layers = _layers(options.layers, of_command=bool(command) and has_gpus)
    with about("when"):
        Conditions(when)
    if options.wait_children and not ((command or pids) and options.children):
        with about("wait_children"):
            raise TracepipeError(
                "There are no children to wait for.", "Give a command or --pid, and record its children."
            )
    with about("last"):
        last = last_of(read["last"], read["last_size"], when, limits, windows)
    with about("ring_bytes"):
        ring_bytes = ring_size(read["ring_bytes"])
    check_stacks(options.stacks)
    check_windows(windows, limits)
    request = CaptureRequest(
        command=command,
        layers=layers,
        method=options.method,
        gpu=options.gpu if has_gpus else "off",
        gpu_kernels=options.kernel,
        gpu_launches=options.launches,
        gpu_launches_per_kernel=options.launches_per_kernel,
        gpu_blocks=options.blocks,
        gpu_memory_bytes=read["gpu_memory"],
        gpu_warps=options.gpu_warps,
        gpu_thread_exits=options.thread_exits,
        gpu_stalls=options.gpu_stalls,
        stacks=options.stacks,
        gpu_warp_marks=options.warp_marks,
        gpu_counters_ns=read["gpu_counters"],
        pids=pids,
        comm=options.comm,
        system=options.system,
        children=options.children,
        wait_children=options.wait_children,
        calls=calls_of(options.calls, only),
        hooks=_several(options.hooks),
        only=only,
        exclude=_several(options.exclude),
        libraries=_several(options.libraries),
        filters=Filters(read["min_duration"] or 0, options.sample),
        windows=windows,
        limits=limits,
        last=last,
        ring_bytes=ring_bytes,
    )
    injected = [layer for layer in (*GPU_LAYERS, ANNOTATION) if layer in layers]
    if injected and not has_gpus:
        with about("layers"):
            raise TracepipeError(f"Only tracepipe capture records {injected[0]}.")
    if has_gpus:
        check(request)
    return request


def _layers(given: str | Sequence[str] | None, *, of_command: bool) -> tuple[str, ...]:
    """The layers that are named, as one text too, or all that this machine allows. Raises TracepipeError."""
    from tracepipe.tracer.plan import layers_here

    if isinstance(given, str):
        given = tuple(filter(None, (name.strip() for name in given.split(",")))) or None
    if given is None:
        return layers_here(of_command=of_command)
    named = tuple(given)
    if named == ("none",):  # only hooks
        return ()
    if named == ("all",):
        every = (*PROBED_LAYERS, HOST_SAMPLE)
        named = (ANNOTATION, *every) if of_command else every
    check_layers(named)
    return named


def _several(given: T | Sequence[T]) -> tuple[T, ...]:
    """One or more values as a tuple. A text is a single value."""
    return (given,) if isinstance(given, (str, int, PathLike)) else tuple(given)
