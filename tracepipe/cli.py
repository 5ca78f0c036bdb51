"""The command line: the one place that prints and exits."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from tracepipe import __version__
from tracepipe.cli_capture import capture, live
from tracepipe.cli_hooks import hooks_app
from tracepipe.cli_reports import add_reports
from tracepipe.converters import CONVERTERS
from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.files import STANDARD, default_output, replacing
from tracepipe.layout.options import WARP_TRACKS, LayoutOptions
from tracepipe.readers import READERS
from tracepipe.terminal import choices, offsets, progress, say, status, text_of

app = typer.Typer(
    name="tracepipe",
    help="One timeline from the CUDA call to the warp.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Format = choices("Format", CONVERTERS)
Source = choices("Source", READERS)
WarpTracks = choices("WarpTracks", WARP_TRACKS)


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
        source_format=text_of(source) if source else "",
        strict=strict,
        compress=compress,
        assumed=offsets(assume_offset or []),
        layout=LayoutOptions(text_of(warp_tracks), thread_exits),
    )
    target = convert_file(file, text_of(to), output, force, options)
    if target != STANDARD:
        say(f"wrote {target}" + _how_to_open(target, text_of(to)))


def _how_to_open(target: str, to: str) -> str:
    if CONVERTERS[to].on_terminal:
        return ""
    where = "ui.perfetto.dev" if to == "perfetto" else "ui.perfetto.dev, chrome://tracing or speedscope.app"
    return f": open it in {where}, or run tracepipe open {target}"


def convert_file(file: str, to: str, output: str, force: bool, options: Any) -> str:
    """Convert and report; returns the path of the output."""
    from tracepipe.convert import Conversion

    form = CONVERTERS[to]
    if options.compress and not form.can_compress:
        raise typer.BadParameter(f"{to} has no compressed form; pipe it through gzip")
    target = output or (STANDARD if form.on_terminal else default_output(file, form.suffix))
    conversion = Conversion(file, form, options)
    opened = replacing(target, force=force, source=file, on_terminal=form.on_terminal)
    # A bar would run into what is written to the terminal itself.
    is_shown = target == STANDARD and sys.stdout.isatty()
    shown = contextlib.nullcontext() if is_shown else progress(f"convert {Path(file).name}")
    with opened as out, shown as bar:
        report = conversion.run(out, bar)
    from tracepipe.report_text import lines

    for line in lines(report):
        say(line)
    return target


@app.command()
def validate(
    file: Annotated[str, typer.Argument(help="Recording: a path, or - for standard input.", metavar="FILE")],
    source: Annotated[Source | None, typer.Option("--from", help="Input format, if not by content.")] = None,  # type: ignore[valid-type]
) -> None:
    """Check every line of a recording, and name the line and field of each that is wrong."""
    from tracepipe.convert import check

    with progress(f"validate {Path(file).name}") as bar:
        report = check(file, text_of(source) if source else "", lambda text: print(text), bar)
    total = sum(report.counts.values())
    found = f"{total} events, {report.skipped} bad lines, {report.ambiguous} unclear"
    say(f"{report.path}: {report.source}, {found}")
    for note in report.notes:
        say(f"note: {note}")
    if report.skipped:
        raise typer.Exit(1)


app.command(context_settings={"allow_interspersed_args": False})(capture)
app.command(context_settings={"allow_interspersed_args": False})(live)
app.add_typer(hooks_app)
add_reports(app)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Try what capture needs on this machine: what works, what does not and why, and what mends it."""
    from tracepipe import doctor as examination

    with status(sys.stderr) as notify:
        findings = examination.examine(notify=notify)
    if as_json:
        print(examination.as_json(findings))
    else:
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else 0
        plain = not (sys.stdout.encoding or "").lower().startswith("utf")
        for line in examination.report(findings, width=width, colours=is_terminal, ascii_only=plain):
            print(line)
    if not examination.can_capture(findings):
        raise typer.Exit(CaptureUnavailable.exit_code)


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

    open_trace(file, local=local, browser=browser, notify=say)


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


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> None:
    """Run the command line and exit with its code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Half-written output goes, as at Ctrl-C. What nohup has the process ignore stays ignored.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    code = _exit_code()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as e:
        # The interpreter must not flush there again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0 if isinstance(e, BrokenPipeError) else 1
        if code:
            say(f"tracepipe: cannot write standard output: {e.strerror}")
            say("  free some space, or write elsewhere")
    sys.exit(code)


def _exit_code() -> int | str | None:
    """Of the command; errors that are not bugs have become two lines."""
    try:
        app(prog_name="tracepipe")
    except TracepipeError as e:
        say(f"tracepipe: {e}")
        if e.hint:
            say(f"  {e.hint}")
        return e.exit_code
    except SystemExit as e:
        # Whoever read standard output and left has what it wanted; Typer makes exit 1 of that.
        return 0 if isinstance(e.__context__, BrokenPipeError) else e.code
    return 0


if __name__ == "__main__":
    main()
