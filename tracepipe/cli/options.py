"""Defines the options of commands that record, each once; a group of them is a panel of the help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

from tracepipe.cli.completion import complete_layers, complete_sets
from tracepipe.cli.output_options import OUTPUT
from tracepipe.cli.values import SECONDS, Misuse, misuse_of, read, whole
from tracepipe.errors import OutputError, TracepipeError
from tracepipe.hooks.calls import CALL_RULES
from tracepipe.hooks.hook import PROBED_LAYERS
from tracepipe.terminal.messages import choices, text_of
from tracepipe.tracer import ENGINES, CaptureRequest
from tracepipe.tracer.request import (
    ANNOTATION,
    GPU_LAYERS,
    LAYER_NAMES,
    RING_BYTES,
    RING_LEAST_BYTES,
    calls_of,
    check_layers,
    ring_size,
)
from tracepipe.units import duration_ns, size_bytes

Method = choices("Method", ["auto", *ENGINES])
Calls = choices("Calls", list(CALL_RULES))

COMMAND_LAST = {"allow_interspersed_args": False}
"""The settings of a command that runs another: what follows the first argument is not for it."""

WHO, WHAT, WHEN = "Whose events", "Which events", "When"
_DURATION = "Stop after this time: 10s, 500ms, 2m."

Command = Annotated[
    list[str] | None, typer.Argument(help="The command to run and record, after --.", metavar="-- COMMAND")
]
Libraries = Annotated[
    list[str] | None,
    typer.Option(
        "--library",
        metavar="PATH",
        help="Trace this libcuda, libcudart or other library instead of the one that the program loads. "
        "Repeat for more.",
        rich_help_panel=WHAT,
    ),
]
CommandOutput = Annotated[
    str,
    typer.Option(
        "--command-output",
        metavar="FILE",
        help="Write the command's standard output to this file. Without this option it is not changed; "
        "with -o - it goes to standard error.",
        rich_help_panel=OUTPUT,
    ),
]
MethodOption = Annotated[
    Method,  # type: ignore[valid-type]
    typer.Option(
        "--method",
        help="Record events of the host by this method. auto chooses the best one that works on this "
        "machine.",
    ),
]
RingBytes = Annotated[
    str,
    typer.Option(
        "--ring-bytes",
        metavar="SIZE",
        help="Use a buffer of this size between the kernel and the file, from "
        f"{RING_LEAST_BYTES >> 10}K. Default: {RING_BYTES >> 20}M.",
    ),
]


@dataclass(frozen=True, slots=True)
class Which:
    """Which events."""

    layers: Annotated[
        str,
        typer.Option(
            "--layers",
            metavar="LAYER,...",
            autocompletion=complete_layers,
            help=f"Record these layers, separated by commas: {', '.join(LAYER_NAMES)}. all: the first "
            "four, and annotation if a command is run; none: none of these, only what other options name. "
            "Default: all, without kernel where the NVIDIA driver cannot be probed.",
            rich_help_panel=WHAT,
        ),
    ] = ""
    hook: Annotated[
        list[str] | None,
        typer.Option(
            "--hook",
            metavar="HOOK",
            autocompletion=complete_sets,
            help="Also record these functions: uprobe:LIBRARY:FUNCTION, kprobe:FUNCTION or "
            "tracepoint:GROUP:NAME, with arguments and a condition if wanted; a shipped set (see "
            "tracepipe hooks list); or FILE.toml. Repeat for more.",
            rich_help_panel=WHAT,
        ),
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PATTERN",
            help="Record only functions that fit this shell pattern. Repeat for more.",
            rich_help_panel=WHAT,
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="PATTERN",
            help="Do not record functions that fit this shell pattern. Repeat for more.",
            rich_help_panel=WHAT,
        ),
    ] = None
    calls: Annotated[
        Calls,  # type: ignore[valid-type]
        typer.Option(
            "--calls",
            help="Record these CUDA calls: all; default: all but query-only calls (cudaGetDevice), unless "
            "--only names functions; launches: only launches, copies, memsets and synchronisations.",
            rich_help_panel=WHAT,
        ),
    ] = "default"
    min_duration: Annotated[
        str,
        typer.Option(
            "--min-duration",
            metavar="TIME",
            help=f"Leave out calls that are shorter than this: 10us, 1.5ms. {SECONDS}",
            rich_help_panel=WHAT,
        ),
    ] = ""
    sample: Annotated[
        int,
        typer.Option(
            "--sample",
            parser=whole(1),
            metavar="N",
            help="Record one in N calls of each function, N from 1.",
            rich_help_panel=WHAT,
        ),
    ] = 1
    library: Libraries = None


@dataclass(frozen=True, slots=True)
class Whose:
    """Whose events are recorded, if not those of a command."""

    pid: Annotated[
        list[int] | None,
        typer.Option(
            "--pid",
            parser=whole(1),
            metavar="PID",
            help="Record this running process with all its threads. Repeat for more.",
            rich_help_panel=WHO,
        ),
    ] = None
    comm: Annotated[
        str,
        typer.Option(
            "--comm",
            metavar="NAME",
            help="Record every process of this name, running now or started later.",
            rich_help_panel=WHO,
        ),
    ] = ""
    system: Annotated[
        bool, typer.Option("--system", help="Record all processes of this machine.", rich_help_panel=WHO)
    ] = False
    children: Annotated[
        bool,
        typer.Option(
            "--children/--no-children",
            help="Also record the child processes of these, or not.",
            rich_help_panel=WHO,
        ),
    ] = True


@dataclass(frozen=True, slots=True)
class Until:
    """When a command ends that writes no file."""

    duration: Annotated[
        str, typer.Option("--duration", metavar="TIME", help=f"{_DURATION} {SECONDS}", rich_help_panel=WHEN)
    ] = ""


@dataclass(frozen=True, slots=True)
class UntilFull(Until):
    """When a command ends that writes a file."""

    duration: Annotated[
        str,
        typer.Option(
            "--duration",
            metavar="TIME",
            help=f"{_DURATION} With windows, each is this long. {SECONDS}",
            rich_help_panel=WHEN,
        ),
    ] = ""
    max_events: Annotated[
        int | None,
        typer.Option(
            "--max-events",
            parser=whole(1),
            metavar="N",
            help="Stop after this many events, from 1.",
            rich_help_panel=WHEN,
        ),
    ] = None
    max_size: Annotated[
        str,
        typer.Option(
            "--max-size",
            metavar="SIZE",
            help="Stop when the events reach this size, before compression: 100M, 1G.",
            rich_help_panel=WHEN,
        ),
    ] = ""


def request_of(
    command: list[str] | None,
    which: Which,
    whose: Whose,
    until: Until,
    *,
    method: object,
    ring_bytes: str = "",
    has_gpus: bool = False,
) -> CaptureRequest:
    """The request that the options make; without `has_gpus` no GPU work is recorded. Raises Misuse."""
    from tracepipe.tracer.request import Filters, Limits

    if sum((bool(command), bool(whose.pid), bool(whose.comm), whose.system)) != 1:
        given = bool(command) or whose.pid or whose.comm or whose.system
        raise Misuse(
            "More than one source of events is given." if given else "There is nothing to record.",
            "Give one of: a command after --, --pid, --comm, --system.",
        )
    limits = Limits(read(until.duration, duration_ns, "--duration", least=1))
    if isinstance(until, UntilFull):
        size = read(until.max_size, size_bytes, "--max-size", least=1)
        limits = Limits(limits.duration_ns, until.max_events, size)
    request = CaptureRequest(
        command=command or [],
        layers=_layers(which.layers, of_command=bool(command) and has_gpus),
        method=text_of(method),
        pids=tuple(whose.pid or ()),
        comm=whose.comm,
        system=whose.system,
        children=whose.children,
        calls=calls_of(text_of(which.calls), which.only),
        hooks=tuple(which.hook or ()),
        only=tuple(which.only or ()),
        exclude=tuple(which.exclude or ()),
        libraries=tuple(which.library or ()),
        filters=Filters(read(which.min_duration, duration_ns, "--min-duration") or 0, which.sample),
        limits=limits,
        ring_bytes=_ring_bytes(ring_bytes),
    )
    injected = [layer for layer in (*GPU_LAYERS, ANNOTATION) if layer in request.layers]
    if injected and not has_gpus:
        raise Misuse(f"Only tracepipe capture records {injected[0]}.", option="--layers")
    return request


def _ring_bytes(text: str) -> int:
    """The size of the ring buffer. Raises Misuse."""
    try:
        return ring_size(read(text, size_bytes, "--ring-bytes"))
    except TracepipeError as error:
        raise misuse_of(error, "--ring-bytes") from None


def named(name_of: Callable[[str], str], given: str, option: str) -> str:
    """The name of an output from an option's value. Raises Misuse, OutputError."""
    try:
        return name_of(given)
    except OutputError:
        raise
    except TracepipeError as error:
        raise misuse_of(error, option) from None


def _layers(text: str, *, of_command: bool) -> tuple[str, ...]:
    """Read names of layers; without any, all that can be recorded on this machine. Raises Misuse."""
    from tracepipe.tracer.plan import layers_here

    named = tuple(name.strip() for name in text.split(",") if name.strip())
    if named == ("none",):  # only hooks
        return ()
    known = (ANNOTATION, *PROBED_LAYERS) if of_command else PROBED_LAYERS
    asked = known if named == ("all",) else named or layers_here(of_command=of_command)
    try:
        check_layers(asked)
    except TracepipeError as error:
        raise misuse_of(error, "--layers") from None
    return asked
