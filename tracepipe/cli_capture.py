"""The commands that record: their options, and what they print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tracepipe.capture import ENGINES
from tracepipe.capture.engine import ALL_LAYERS, RING_BYTES
from tracepipe.capture.gpu import GPU_ENGINES
from tracepipe.converters import CONVERTERS
from tracepipe.errors import OutputError, TracepipeError
from tracepipe.files import STANDARD, default_output, free_name, keeping
from tracepipe.live_table import SORTS
from tracepipe.terminal import choices, say, text_of
from tracepipe.units import duration_ns, size_bytes

Method = choices("Method", ["auto", *ENGINES])

WHO, WHAT, WHEN, GPU_PANEL = "Whose events", "Which events", "When it ends", "GPUs"


def _read(text: str, parse: Callable[[str], int], option: str) -> int | None:
    """A duration or size as an option gives it; None where it was not given."""
    if not text:
        return None
    try:
        return parse(text)
    except TracepipeError as error:
        raise typer.BadParameter(f"{error.message} {error.hint}", param_hint=option) from None


Command = Annotated[
    list[str] | None, typer.Argument(help="The command to run and record.", metavar="-- COMMAND")
]
Layers = Annotated[
    str,
    typer.Option(
        "--layers",
        help=f"Comma-separated: {', '.join(ALL_LAYERS)}; all; or none, for --hook alone. "
        "By default all, without kernel where the NVIDIA driver cannot be probed.",
        rich_help_panel=WHAT,
    ),
]
Libraries = Annotated[
    list[str] | None,
    typer.Option(
        "--library",
        help="A libcuda, libcudart or other library to trace instead of the one it loads.",
        rich_help_panel=WHAT,
    ),
]
Hooks = Annotated[
    list[str] | None,
    typer.Option(
        "--hook",
        help="uprobe:LIBRARY:FUNCTION, kprobe:FUNCTION, tracepoint:GROUP:NAME, with arguments and a "
        "condition if wanted; a shipped set (tracepipe hooks list); or a file.toml. Repeat for more.",
        rich_help_panel=WHAT,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="Record these functions only: a pattern.", rich_help_panel=WHAT),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", help="Do not record these functions: a pattern.", rich_help_panel=WHAT),
]
MinDuration = Annotated[
    str,
    typer.Option(
        "--min-duration",
        metavar="TIME",
        help="Leave shorter calls out: 10us.",
        rich_help_panel=WHAT,
    ),
]
Sample = Annotated[
    int,
    typer.Option(
        "--sample", min=1, metavar="N", help="Record one call in N of each function.", rich_help_panel=WHAT
    ),
]
Pids = Annotated[
    list[int] | None,
    typer.Option("--pid", help="A running process, all its threads. Repeat for more.", rich_help_panel=WHO),
]
Comm = Annotated[
    str, typer.Option("--comm", help="Every process of this name, running or to come.", rich_help_panel=WHO)
]
System = Annotated[bool, typer.Option("--system", help="Everything on this machine.", rich_help_panel=WHO)]
Children = Annotated[
    bool, typer.Option("--children/--no-children", help="Also what they fork.", rich_help_panel=WHO)
]
Duration = Annotated[
    str,
    typer.Option("--duration", metavar="TIME", help="End after so long: 10s.", rich_help_panel=WHEN),
]
MaxEvents = Annotated[
    int | None,
    typer.Option("--max-events", min=1, metavar="N", help="End after so many events.", rich_help_panel=WHEN),
]
MaxSize = Annotated[
    str,
    typer.Option(
        "--max-size", metavar="SIZE", help="End when the events fill so much: 1G.", rich_help_panel=WHEN
    ),
]
MethodOption = Annotated[
    Method,  # type: ignore[valid-type]
    typer.Option("--method", help="How it is recorded; auto takes the best that works here."),
]
Gpu = choices("Gpu", ["off", *GPU_ENGINES])
GpuOption = Annotated[
    Gpu,  # type: ignore[valid-type]
    typer.Option(
        "--gpu",
        help="What the command's GPUs do, without root: kernels and copies (near no cost), or every warp.",
        rich_help_panel=GPU_PANEL,
    ),
]
Kernel = Annotated[
    str,
    typer.Option(
        "--kernel",
        metavar="REGEX",
        help="With --gpu warps: kernels whose demangled name has this.",
        rich_help_panel=GPU_PANEL,
    ),
]
Launches = Annotated[
    str,
    typer.Option(
        "--launches",
        metavar="RANGE",
        help="With --gpu warps: which of their launches, from 1: 10, 10-20, 10-.",
        rich_help_panel=GPU_PANEL,
    ),
]
RingBytes = Annotated[
    str,
    typer.Option(
        "--ring-bytes",
        metavar="SIZE",
        help=f"Room for events that are not on disk yet, from 4K; {RING_BYTES >> 20}M by default.",
    ),
]


def capture(
    command: Command = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Recording; by default PROGRAM.jsonl, numbered if taken.")
    ] = "",
    layers: Layers = "",
    hook: Hooks = None,
    only: Only = None,
    exclude: Exclude = None,
    min_duration: MinDuration = "",
    sample: Sample = 1,
    library: Libraries = None,
    pid: Pids = None,
    comm: Comm = "",
    system: System = False,
    children: Children = True,
    duration: Duration = "",
    max_events: MaxEvents = None,
    max_size: MaxSize = "",
    method: MethodOption = "auto",
    gpu: GpuOption = "off",
    kernel: Kernel = "",
    launches: Launches = "",
    ring_bytes: RingBytes = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    then_open: Annotated[bool, typer.Option("--open", help="Convert the recording and open it.")] = False,
    local: Annotated[bool, typer.Option("--local", help="With --open: a UI found on this machine.")] = False,
) -> None:
    """Run a command, or watch what runs, and record what it, the driver and the kernel do."""
    from tracepipe.capture import capture as run_capture

    request = request_of(
        command, layers, hook, only, exclude, min_duration, sample, library, pid, comm, system, children,
        duration, max_events, max_size, method, ring_bytes, gpu, kernel, launches,
    )  # fmt: skip
    target = output or free_name(_title(request), ".jsonl")
    trace = default_output(target, CONVERTERS["perfetto"].suffix)
    if then_open and target == STANDARD:
        raise typer.BadParameter("a recording on standard output cannot be opened", param_hint="--open")
    if then_open and not force and Path(trace).exists():  # said now, not when the capture is over
        raise OutputError(f"{trace} exists", "--force overwrites it, -o names another recording")
    with keeping(target, force=force) as sink:
        summary = run_capture(request, sink, notify=say)
    from tracepipe.report_text import captured_lines

    for line in captured_lines(target, summary):
        say(line)
    if then_open:
        from tracepipe.cli import convert_file
        from tracepipe.convert import ConvertOptions
        from tracepipe.open_ui import open_trace

        convert_file(target, "perfetto", trace, force, ConvertOptions())
        open_trace(Path(trace), local=local, browser=True, notify=say)


Sort = choices("Sort", SORTS)


def live(
    command: Command = None,
    output: Annotated[str, typer.Option("--output", "-o", help="Also write the recording.")] = "",
    sort: Annotated[Sort, typer.Option("--sort", help="What the functions are ordered by.")] = "total",  # type: ignore[valid-type]
    top: Annotated[int | None, typer.Option("--top", min=1, metavar="N", help="So many functions.")] = None,
    interval: Annotated[
        str,
        typer.Option("--interval", metavar="TIME", help="Time between two views; on a terminal 250ms."),
    ] = "",
    layers: Layers = "",
    hook: Hooks = None,
    only: Only = None,
    exclude: Exclude = None,
    min_duration: MinDuration = "",
    sample: Sample = 1,
    library: Libraries = None,
    pid: Pids = None,
    comm: Comm = "",
    system: System = False,
    children: Children = True,
    duration: Duration = "",
    method: MethodOption = "auto",
    ring_bytes: RingBytes = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
) -> None:
    """Run a command, or watch what runs, and show counts, rates, latencies and losses as they come."""
    from tracepipe.capture import capture as run_capture
    from tracepipe.capture.live_sink import LiveSink
    from tracepipe.live_view import live_view

    request = request_of(
        command, layers, hook, only, exclude, min_duration, sample, library, pid, comm, system, children,
        duration, None, "", method, ring_bytes,
    )  # fmt: skip
    interval_ns = _read(interval, duration_ns, "--interval")
    totals = LiveSink()
    view = live_view(
        totals,
        sys.stderr if request.command else sys.stdout,  # what the command writes stays as it is
        " ".join(request.command) or _title(request),
        sort=text_of(sort),
        top=top,
        interval_s=interval_ns / 1e9 if interval_ns else None,
    )
    if output:
        with keeping(output, force=force) as sink, view:
            summary = run_capture(request, sink, notify=say, watchers=[totals])
    else:
        with view:
            summary = run_capture(request, totals, notify=say)
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)


def request_of(
    command: list[str] | None,
    layers: str,
    hook: list[str] | None,
    only: list[str] | None,
    exclude: list[str] | None,
    min_duration: str,
    sample: int,
    library: list[str] | None,
    pid: list[int] | None,
    comm: str,
    system: bool,
    children: bool,
    duration: str,
    max_events: int | None,
    max_size: str,
    method: Any,
    ring_bytes: str,
    gpu: Any = "off",
    kernel: str = "",
    launches: str = "",
) -> Any:
    """The request that the options say. Raises BadParameter."""
    from tracepipe.capture.engine import CaptureRequest, Filters, Limits

    if sum((bool(command), bool(pid), bool(comm), system)) != 1:
        raise typer.BadParameter(
            "give one of: a command after --, --pid, --comm, --system", param_hint="whose events"
        )
    return CaptureRequest(
        command=command or [],
        layers=_layers(layers),
        method=text_of(method),
        gpu=text_of(gpu),
        gpu_kernels=kernel,
        gpu_launches=launches,
        pids=tuple(pid or ()),
        comm=comm,
        system=system,
        children=children,
        hooks=tuple(hook or ()),
        only=tuple(only or ()),
        exclude=tuple(exclude or ()),
        libraries=tuple(library or ()),
        filters=Filters(_read(min_duration, duration_ns, "--min-duration") or 0, sample),
        limits=Limits(
            _read(duration, duration_ns, "--duration"),
            max_events,
            _read(max_size, size_bytes, "--max-size"),
        ),
        ring_bytes=_read(ring_bytes, size_bytes, "--ring-bytes") or RING_BYTES,
    )


def _layers(text: str) -> tuple[str, ...]:
    """Layers by name; none given: all that this machine can have."""
    from tracepipe.capture.planning import layers_here

    named = tuple(name.strip() for name in text.split(",") if name.strip())
    if named == ("none",):  # what hooks ask for, and nothing else
        return ()
    asked = ALL_LAYERS if named == ("all",) else named or layers_here()
    if unknown := [name for name in asked if name not in ALL_LAYERS]:
        raise typer.BadParameter(
            f"no layer is called {unknown[0]!r}; there are: {', '.join(ALL_LAYERS)}, or all",
            param_hint="--layers",
        )
    return asked


def _title(request: Any) -> str:
    """What a recording is called after."""
    if request.command:
        return Path(request.command[0]).name
    return request.comm or ("system" if request.system else f"pid-{request.pids[0]}")
