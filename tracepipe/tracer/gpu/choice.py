"""Which engine `--gpu auto` chooses for a command, and why; and which options each engine takes.

    --layers with gpu_kernel, gpu_warp or gpu_thread      kernels or warps, as if --gpu named it
    --gpu-stalls                                          kernels, likewise
    no NVIDIA GPU, or no command                          off, without a message: a library is loaded into
                                                          a process of --pid only if an engine is named
    another library is injected                           off
    --kernel, --launches, --launches-per-kernel,
    --blocks, --gpu-memory, --gpu-warps,
    --thread-exits, --warp-marks                          warps
    windows: --delay, --start-on, --stop-on, --repeat     off: they concern only the host
    only some calls are wanted: --layers, --only, …       off: the engines take all calls from the probes
    --last                                                kernels
    windows: --delay, --start-on, --repeat                kernels
    --duration of up to 10 s                              warps
    an interpreter, or a program that starts others       kernels: at almost no cost
    any other program                                     warps

The first row that applies decides. Warps then have a budget, as the length of the run is unknown; a budget
without a range of launches covers the first few launches of each kernel.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tracepipe.errors import InputError, TracepipeError
from tracepipe.hooks.calls import call_rule
from tracepipe.tracer.find.foreign import ForeignFile, found_at
from tracepipe.tracer.find.library import find_program, interpreter_of
from tracepipe.tracer.gpu.engines.channel import INJECTION_VARIABLE
from tracepipe.tracer.request import ANNOTATION, AUTO_WARPS, BUDGET_LAUNCHES, GPU_LAYERS, CaptureRequest
from tracepipe.units import duration_text

# Names of programs, also jupyter-lab, mpirun.openmpi and python3.13t. A script counts as its interpreter.
_LAUNCHERS: Final = re.compile(
    r"(python|pypy|ipython|jupyter(-\w+)?|torchrun|accelerate|deepspeed|horovodrun"
    r"|mpirun|mpiexec|orterun|prterun|srun|jsrun"
    r"|uv|uvx|conda|mamba|micromamba|pixi|poetry|pytest"
    r"|sh|bash|dash|zsh|ksh|fish|make|ninja|parallel|xargs"
    r"|julia|R|Rscript|node|deno|bun|java|ruby|perl|lua|luajit|octave|matlab)"
    r"([\d.]+t?|\.\w+)?"
)
# Programs that replace themselves with the program in their arguments, which follows their own options.
_WRAPPERS: Final = {
    "chrt", "env", "ionice", "nice", "nohup", "numactl", "prlimit", "setarch", "setsid", "stdbuf", "taskset",
    "time", "timeout",
}  # fmt: skip


def launcher_of(command: list[str]) -> str:
    """The name of the command's program if it interprets or starts others, also after `env` and similar.

    "" for any other program. Raises TracepipeError if the command is not a program.
    """
    program, rest = find_program(command), command[1:]
    while True:
        interpreter = interpreter_of(program)
        names = {Path(path).name for path in (program, Path(program).resolve(), interpreter)}
        if any(_LAUNCHERS.fullmatch(name) for name in names):
            return Path(program).name
        if Path(program).name not in _WRAPPERS:
            return ""
        while rest and (rest[0].startswith("-") or shutil.which(rest[0]) is None):
            rest = rest[1:]
        if not rest:
            return ""
        program, rest = shutil.which(rest[0]) or "", rest[1:]


CALLS_VARIABLE: Final = "TRACEPIPE_GPU_CALLS"
NO_CALLS: Final = "none"
"""No calls at all; the other values are the names of rules."""


def calls_text(calls: str) -> str:
    """The variable's value. Raises TracepipeError."""
    return calls if calls == NO_CALLS else call_rule(calls).text()


LAST: Final = (1 << 63) - 1
"""The end of a range without an end: no grid has so many blocks, and it fits into C++'s integer."""
MEMORY_LEAST_BYTES: Final = 1 << 20
# The first colon of `--warp-marks` that is not part of `::`, `(?:` or `[[:` is between its patterns.
_COLON: Final = re.compile(r"(?<![:?\[]):(?![:\]])")
_RANGE: Final = re.compile(r"([0-9]{1,19})(?:(-)([0-9]{,19}))?")


def check_warps(request: CaptureRequest) -> None:
    """Raise TracepipeError for options that the library of `warps` could not use."""
    kernels, called = marked(request)
    if request.gpu_kernels and kernels:
        raise TracepipeError(
            f"--kernel {request.gpu_kernels!r} and --warp-marks {request.gpu_warp_marks!r} both name "
            "kernels.",
            f"Name them once: --warp-marks ':{called}' uses those of --kernel.",
        )
    for pattern, option, example in (
        (request.gpu_kernels, "--kernel", "attn.*fwd"),
        (kernels, "--warp-marks", "attn.*fwd:softmax"),
        (called, "--warp-marks", "attn.*fwd:softmax"),
    ):
        try:
            re.compile(pattern)
        except re.error as error:
            raise TracepipeError(
                f"{option} {pattern!r} is not a regular expression: {error}.", f"Example: '{example}'."
            ) from None
    if request.gpu_launches:
        read_range(request.gpu_launches, "--launches", "launches", 1)
    warp_defines(request)
    if request.gpu_memory_bytes is not None and request.gpu_memory_bytes < MEMORY_LEAST_BYTES:
        raise TracepipeError(
            f"--gpu-memory of {request.gpu_memory_bytes} bytes has no room for a launch's records.",
            "Give at least 1M, or leave it out: the size is then chosen for the GPU.",
        )
    if request.gpu_warps is not None and request.gpu_warps < 1:
        raise TracepipeError(f"--gpu-warps {request.gpu_warps} leaves no warp.", "Give 1 or more.")
    if (request.gpu_launches_per_kernel or 0) < 0:
        raise TracepipeError(
            f"--launches-per-kernel {request.gpu_launches_per_kernel} leaves no launch.",
            "Give 1 or more, or 0 for all.",
        )
    calls_text(request.calls)


def marked(request: CaptureRequest) -> tuple[str, str]:
    """The patterns of kernels and of functions in `gpu_warp_marks`, "" for none. Raises TracepipeError."""
    marks = request.gpu_warp_marks
    colon = _COLON.search(marks)
    if marks and (colon is None or colon.end() == len(marks)):
        raise TracepipeError(
            f"--warp-marks {marks!r} names no device function.",
            "Give two regular expressions, KERNEL:FUNCTION: 'attn.*fwd:softmax', or only ':softmax'.",
        )
    return (marks[: colon.start()], marks[colon.end() :]) if colon else ("", "")


def kernel_pattern(request: CaptureRequest) -> str:
    """The pattern of the kernels whose warps are recorded, from either option; "" for all. It is a regular
    expression (ECMAScript's), searched in demangled names with their parameters.
    """
    return request.gpu_kernels or marked(request)[0]


def has_thread_exits(request: CaptureRequest) -> bool:
    """Whether a line for each thread's exit is written, after its warp's record."""
    return request.gpu_thread_exits or "gpu_thread" in request.layers


def warp_environment(request: CaptureRequest) -> dict[str, str]:
    """The variables that the library of `warps` reads."""
    asked = {
        "TRACEPIPE_GPU_KERNELS": kernel_pattern(request),
        "TRACEPIPE_GPU_CALLED": marked(request)[1],
        "TRACEPIPE_GPU_LAUNCHES": request.gpu_launches,
        "TRACEPIPE_GPU_BLOCKS": "-".join(map(str, warp_defines(request).values())),
        "TRACEPIPE_GPU_MEMORY": str(request.gpu_memory_bytes or ""),
        "TRACEPIPE_GPU_BUDGET": str(request.gpu_warps or ""),
        "TRACEPIPE_GPU_PER_KERNEL": str(request.gpu_launches_per_kernel or ""),
        CALLS_VARIABLE: calls_text(request.calls),
    }
    return {name: value for name, value in asked.items() if value}


def warp_defines(request: CaptureRequest) -> dict[str, int]:
    """The macros with which the device code of `warps` is compiled. Raises TracepipeError."""
    if not request.gpu_blocks:
        return {}
    first, last = read_range(request.gpu_blocks, "--blocks", "blocks", 0)
    return {"TRACEPIPE_FIRST_BLOCK": first, "TRACEPIPE_LAST_BLOCK": last}


def read_range(text: str, option: str, what: str, least: int) -> tuple[int, int]:
    """First and last, both included, of `10`, `10-20` or `10-`, at least `least`. Raises TracepipeError."""
    match = _RANGE.fullmatch(text)
    if match:
        first = int(match[1])
        last = int(match[3]) if match[3] else LAST if match[2] else first
        if least <= first <= last <= LAST:
            return first, last
    raise TracepipeError(
        f"{option} {text!r} is not a range of {what}.",
        f"Count from {least}, both ends included: {least + 9}, {least + 9}-{least + 19} or {least + 9}-.",
    )


CONTROL_DEVICE: Final = Path("/dev/nvidiactl")
"""The file that every program which uses an NVIDIA GPU opens."""
SHORT_NS: Final = 10 * 10**9
COUNTERS_LEAST_NS: Final = 100_000
"""Decoding one sample takes a host processor a good part of this time."""
COUNTERS_MOST_NS: Final = 10**9

# Options that only the warps engine takes, and options that only probes take: field of a request → option.
_OF_WARPS: Final = {
    "gpu_kernels": "--kernel",
    "gpu_launches": "--launches",
    "gpu_launches_per_kernel": "--launches-per-kernel",
    "gpu_blocks": "--blocks",
    "gpu_memory_bytes": "--gpu-memory",
    "gpu_warps": "--gpu-warps",
    "gpu_thread_exits": "--thread-exits",
    "gpu_warp_marks": "--warp-marks",
}
_OF_PROBES: Final = {"only": "--only", "exclude": "--exclude", "libraries": "--library"}
_MARKS: Final = b"14tracepipe_mark15tracepipe_marks"  # the registered name of a variable of the header
_CHEAPER: Final = "--gpu kernels costs next to nothing"


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine or `off`, why it was chosen, and an alternative to suggest; "" for no message."""

    engine: str
    why: str = ""
    instead: str = ""


def named_engine(request: CaptureRequest) -> str:
    """The engine that the request names, directly or by its layers; `auto` if it names none."""
    if request.gpu != "auto":
        return request.gpu
    if request.gpu_stalls:
        return "kernels"
    engines = {GPU_LAYERS[layer] for layer in request.layers if layer in GPU_LAYERS}
    if not engines:
        return "auto"
    return "warps" if "warps" in engines or given_for_warps(request) else "kernels"


def check(request: CaptureRequest) -> None:
    """Raise TracepipeError if the options for GPUs cannot be combined or used."""
    given = given_for_warps(request)
    for layer in GPU_LAYERS:
        beyond_kernels = request.gpu == "kernels" and GPU_LAYERS[layer] == "warps"
        if layer in request.layers and (request.gpu == "off" or beyond_kernels):
            raise TracepipeError(
                f"--gpu {request.gpu} does not record {layer}, which --layers asks for.",
                f"Use --gpu {GPU_LAYERS[layer]}.",
            )
    if given and request.gpu not in ("auto", "warps"):
        does = "records nothing of the GPUs" if request.gpu == "off" else "records every kernel, and no warps"
        raise TracepipeError(
            f"--gpu {request.gpu} {does}: it cannot be used with {given}.", f"Use {given} with --gpu warps."
        )
    check_warps(request)
    interval_ns = request.gpu_counters_ns
    if interval_ns is not None and not COUNTERS_LEAST_NS <= interval_ns <= COUNTERS_MOST_NS:
        raise TracepipeError(
            f"--gpu-counters takes intervals from {duration_text(COUNTERS_LEAST_NS)} to "
            f"{duration_text(COUNTERS_MOST_NS)}.",
            "Write --gpu-counters 1ms or 200us.",
        )
    of_warps_layers = [layer for layer in request.layers if GPU_LAYERS.get(layer) == "warps"]
    by = "--gpu warps" if request.gpu == "warps" else given or ", ".join(of_warps_layers)
    if request.gpu_stalls and by:
        raise TracepipeError(
            f"CUPTI samples stall reasons, and cannot be used together with {by}.",
            "Make two recordings: one with --gpu-stalls, and one of the warps.",
        )
    if request.gpu_stalls and interval_ns is not None:
        raise TracepipeError(
            "A GPU's hardware has one sampler: --gpu-counters and --gpu-stalls exclude each other.",
            "Make two recordings, one with each.",
        )
    if request.gpu_stalls and not request.command:
        raise TracepipeError(
            "Stall reasons can be sampled only from a program's start.", "Give a command after --."
        )
    if not request.command and ANNOTATION in request.layers:
        raise TracepipeError(
            "Annotations can be recorded only from a program's start.",
            "Give a command after --, or other layers.",
        )
    if not request.command and (given or named_engine(request) == "warps"):
        raise TracepipeError(
            "Warps can be recorded only from a program's start, when its code is loaded.",
            "Give a command after --; --gpu kernels records the kernels of --pid.",
        )
    if not (request.command or request.pids) and named_engine(request) == "kernels":
        raise TracepipeError(
            "GPU work can be recorded only for a command, or for processes given by number.",
            "Give a command after --, or --pid; or --gpu off without GPU layers.",
        )


def choose(request: CaptureRequest, environment: Mapping[str, str], *, has_device: bool) -> Choice:
    """The engine for a request with `auto`. Raises TracepipeError if its command is not a program."""
    given = given_for_warps(request)
    if not request.command:
        return Choice("off")
    if not has_device:
        return Choice("off", f"this machine has no NVIDIA GPU, so {given} selects nothing" if given else "")
    if INJECTION_VARIABLE in environment:
        return Choice(
            "off", f"{INJECTION_VARIABLE} is set", "--gpu kernels or warps loads tracepipe's library instead"
        )
    if given:
        return Choice("warps", f"by {given}")
    # Only probes can select calls.
    options = [option for name, option in _OF_PROBES.items() if getattr(request, name)]
    options += ["--min-duration"] if request.filters.min_duration_ns else []
    options += ["--sample"] if request.filters.sample > 1 else []
    if options or "userspace" not in request.layers:
        why = f"{' and '.join(options)} need probes"
        why = why if "userspace" in request.layers else "--layers leaves out userspace"
        return Choice("off", why, "--gpu kernels or warps records every call")
    if request.last is not None:
        return Choice("kernels", "for a flight recorder that stays on", "--gpu warps records every warp")
    if request.windows.are_asked:
        return Choice(
            "kernels", "as it costs nothing between windows", "--gpu warps records every warp in them"
        )
    duration_ns = request.limits.duration_ns
    if duration_ns is not None and duration_ns <= SHORT_NS:
        return Choice("warps", "every warp, as --duration is short", _CHEAPER)
    launcher = launcher_of(request.command)
    if launcher:
        return Choice("kernels", f"{launcher} may start a long run", "--gpu warps records every warp")
    return Choice("warps", f"every warp of {Path(request.command[0]).name}", _CHEAPER)


def with_engine(request: CaptureRequest, engine: str) -> CaptureRequest:
    """The request with an engine instead of `auto`: warps get a budget, others no selection."""
    if engine == "warps":
        # A line for each thread makes 32 times as many lines.
        budget = AUTO_WARPS // 32 if request.gpu_thread_exits else AUTO_WARPS
        return with_fair_budget(replace(request, gpu=engine, gpu_warps=request.gpu_warps or budget))
    usual = CaptureRequest()
    return replace(request, gpu=engine, **{name: getattr(usual, name) for name in _OF_WARPS})


def with_fair_budget(request: CaptureRequest) -> CaptureRequest:
    """The request, whose warp budget is for the first launches of each kernel unless it selects launches."""
    if not request.gpu_warps or request.gpu_launches or request.gpu_launches_per_kernel is not None:
        return request
    return replace(request, gpu_launches_per_kernel=BUDGET_LAUNCHES)


def has_marks(command: list[str]) -> bool:
    """Whether the program's own file shows that it was built with `tracepipe/mark.h`."""
    path = shutil.which(command[0]) if command else None
    try:
        with ForeignFile(path or "") as file:
            return found_at(file, _MARKS) >= 0
    except InputError:  # the file is empty, may not be read, or changes
        return False


def given_for_warps(request: CaptureRequest) -> str:
    """The options in the request that only the warps engine takes, as text."""
    usual = CaptureRequest()
    given = [name for name in _OF_WARPS if getattr(request, name) != getattr(usual, name)]
    return " and ".join(_OF_WARPS[name] for name in given)
