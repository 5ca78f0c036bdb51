"""The command line: the one place that prints and exits."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from tracepipe import __version__
from tracepipe.capture import ENGINES
from tracepipe.capture.engine import ALL_LAYERS, RING_BYTES
from tracepipe.converters import CONVERTERS
from tracepipe.errors import OutputError, TracepipeError
from tracepipe.files import STANDARD, default_output, free_name, keeping, replacing
from tracepipe.layout.options import WARP_TRACKS, LayoutOptions
from tracepipe.readers import READERS

app = typer.Typer(
    name="tracepipe",
    help="One timeline from the CUDA call to the warp.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _choices(name: str, values: Any) -> Any:
    """An Enum of strings, which is what Typer makes choices from."""
    return Enum(name, {value.replace("-", "_"): value for value in values}, type=str)


Format = _choices("Format", CONVERTERS)
Source = _choices("Source", READERS)
WarpTracks = _choices("WarpTracks", WARP_TRACKS)
Engine = _choices("Engine", ["auto", *ENGINES])


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _offsets(values: list[str]) -> dict[str, int | str]:
    """`CLOCK=NS` or `CLOCK=HOSTCLOCK` options."""
    out: dict[str, int | str] = {}
    for value in values:
        clock, equals, offset = value.partition("=")
        if not equals or not clock or not offset:
            raise typer.BadParameter(f"{value!r} is not CLOCK=NANOSECONDS or CLOCK=realtime")
        try:
            out[clock] = int(offset)
        except ValueError:
            out[clock] = offset
    return out


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal for what takes over a second; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    import time

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    begun_s = time.monotonic()
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, visible=False)

        def update(done_bytes: int, total_bytes: int) -> None:
            if time.monotonic() - begun_s > 1:
                bar.update(task, completed=done_bytes, total=total_bytes or None, visible=True)

        yield update


@app.command()
def convert(
    file: Annotated[str, typer.Argument(help="Recording: a path, or - for standard input.", metavar="FILE")],
    to: Annotated[Format, typer.Option("--format", "-f", help="Output format.")] = "perfetto",  # type: ignore[valid-type]
    output: Annotated[str, typer.Option("--output", "-o", help="Output; - is standard output.")] = "",
    source: Annotated[Source | None, typer.Option("--from", help="Input format, if not by content.")] = None,  # type: ignore[valid-type]
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse input with a bad line.")] = False,
    compress: Annotated[bool, typer.Option("--compress", help="Compress the packets (perfetto).")] = False,
    warp_tracks: Annotated[
        WarpTracks,  # type: ignore[valid-type]
        typer.Option(
            "--warp-tracks",
            help="A track for each hardware slot, each warp of the grid, a count for each SM, or none.",
        ),
    ] = "auto",
    thread_exits: Annotated[
        bool, typer.Option("--thread-exits", help="Draw each exit of a warp's threads as an instant.")
    ] = False,
    assume_offset: Annotated[
        list[str] | None,
        typer.Option(
            "--assume-offset",
            metavar="CLOCK=NS",
            help="Place a clock without clock pairs: ns to add, or a host clock (globaltimer:0=realtime).",
        ),
    ] = None,
) -> None:
    """Turn a recording into a timeline."""
    from tracepipe.convert import ConvertOptions

    options = ConvertOptions(
        source_format=_text(source) if source else "",
        strict=strict,
        compress=compress,
        assumed=_offsets(assume_offset or []),
        layout=LayoutOptions(_text(warp_tracks), thread_exits),
    )
    target = _convert(file, _text(to), output, force, options)
    if target != STANDARD:
        _say(f"wrote {target}" + _how_to_open(target, _text(to)))


def _text(choice: Any) -> str:
    """The text of a choice."""
    return str(getattr(choice, "value", choice))


def _how_to_open(target: str, to: str) -> str:
    if CONVERTERS[to].on_terminal:
        return ""
    where = "ui.perfetto.dev" if to == "perfetto" else "ui.perfetto.dev, chrome://tracing or speedscope.app"
    return f": open it in {where}, or run tracepipe open {target}"


def _convert(file: str, to: str, output: str, force: bool, options: Any) -> str:
    """Convert and report; returns the path of the output."""
    from tracepipe.convert import Conversion

    form = CONVERTERS[to]
    if options.compress and not form.can_compress:
        raise typer.BadParameter(f"{to} has no compressed form; pipe it through gzip")
    target = output or (STANDARD if form.on_terminal else default_output(file, form.suffix))
    conversion = Conversion(file, form, options)
    opened = replacing(target, force=force, source=file, on_terminal=form.on_terminal)
    with opened as out, _progress(f"convert {Path(file).name}") as progress:
        report = conversion.run(out, progress)
    from tracepipe.report_text import lines

    for line in lines(report):
        _say(line)
    return target


@app.command()
def validate(
    file: Annotated[str, typer.Argument(help="Recording: a path, or - for standard input.", metavar="FILE")],
    source: Annotated[Source | None, typer.Option("--from", help="Input format, if not by content.")] = None,  # type: ignore[valid-type]
) -> None:
    """Check every line of a recording, and name the line and field of each that is wrong."""
    from tracepipe.convert import check

    with _progress(f"validate {Path(file).name}") as progress:
        report = check(file, _text(source) if source else "", lambda text: print(text), progress)
    total = sum(report.counts.values())
    found = f"{total} events, {report.skipped} bad lines, {report.ambiguous} unclear"
    _say(f"{report.path}: {report.source}, {found}")
    for note in report.notes:
        _say(f"note: {note}")
    if report.skipped:
        raise typer.Exit(1)


@app.command(context_settings={"allow_interspersed_args": False})
def capture(
    command: Annotated[
        list[str], typer.Argument(help="The command to run and record.", metavar="-- COMMAND")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="Recording; by default PROGRAM.jsonl, numbered if taken.")
    ] = "",
    layers: Annotated[
        str,
        typer.Option(
            "--layers",
            help=f"Comma-separated: {', '.join(ALL_LAYERS)}; or all. "
            "By default all, without kernel where the NVIDIA driver cannot be probed.",
        ),
    ] = "",
    library: Annotated[
        str | None, typer.Option("--library", help="The libcuda to trace, if not the one it loads.")
    ] = None,
    engine: Annotated[Engine, typer.Option("--engine", help="Capture engine.")] = "auto",  # type: ignore[valid-type]
    ring_bytes: Annotated[
        int, typer.Option("--ring-bytes", min=4096, help="Room for events that are not on disk yet.")
    ] = RING_BYTES,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    then_open: Annotated[bool, typer.Option("--open", help="Convert the recording and open it.")] = False,
    local: Annotated[bool, typer.Option("--local", help="With --open: a UI found on this machine.")] = False,
) -> None:
    """Run a command and record what it, the driver and the kernel do."""
    from tracepipe.capture import CaptureRequest
    from tracepipe.capture import capture as run_capture
    from tracepipe.capture.driver import layers_here

    named = tuple(name.strip() for name in layers.split(",") if name.strip())
    asked = ALL_LAYERS if named == ("all",) else named or layers_here()
    if unknown := [name for name in asked if name not in ALL_LAYERS]:
        raise typer.BadParameter(
            f"no layer is called {unknown[0]!r}; there are: {', '.join(ALL_LAYERS)}, or all",
            param_hint="--layers",
        )
    request = CaptureRequest(command, asked, library, _text(engine), ring_bytes)
    target = output or free_name(Path(command[0]).name, ".jsonl")
    trace = default_output(target, CONVERTERS["perfetto"].suffix)
    if then_open and target == STANDARD:
        raise typer.BadParameter("a recording on standard output cannot be opened", param_hint="--open")
    if then_open and not force and Path(trace).exists():  # said now, not when the capture is over
        raise OutputError(f"{trace} exists", "--force overwrites it, -o names another recording")
    with keeping(target, force=force) as sink:
        summary = run_capture(request, sink, notify=_say)
    from tracepipe.report_text import captured_lines

    for line in captured_lines(target, summary):
        _say(line)
    if then_open:
        from tracepipe.convert import ConvertOptions
        from tracepipe.open_ui import open_trace

        _convert(target, "perfetto", trace, force, ConvertOptions())
        open_trace(Path(trace), local=local, browser=True, notify=_say)


@app.command("open")
def open_command(
    file: Annotated[Path, typer.Argument(help="A converted trace.", metavar="FILE")],
    local: Annotated[
        bool, typer.Option("--local", help="Serve a UI found on this machine, for work offline.")
    ] = False,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Open a converted trace in the Perfetto UI, served from this machine to this machine only."""
    from tracepipe.open_ui import open_trace

    open_trace(file, local=local, browser=browser, notify=_say)


def _version(asked: bool) -> None:
    if asked:
        print(f"tracepipe {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """One timeline from the CUDA call to the warp."""


def main() -> None:
    """Run the command line; errors that are not bugs become two lines and an exit code."""
    try:
        app(prog_name="tracepipe")
    except TracepipeError as e:
        _say(f"tracepipe: {e}")
        if e.hint:
            _say(f"  {e.hint}")
        sys.exit(e.exit_code)
    except BrokenPipeError:
        # Whoever read standard output has what it wanted; the interpreter must not flush there again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
