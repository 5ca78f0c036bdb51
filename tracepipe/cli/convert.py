"""The commands for files: convert a recording, validate it, open a trace."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from tracepipe import seen
from tracepipe.api.convert import convert as convert_recording
from tracepipe.api.convert import output_of
from tracepipe.api.options import ConvertOptions, RankOptions
from tracepipe.cli.input_options import (
    READING,
    SOURCE_HELP,
    AssumeOffset,
    Force,
    Reading,
    Source,
    SourceOption,
    Strict,
    UndatedOption,
    reading,
)
from tracepipe.cli.values import Misuse, file_offsets
from tracepipe.cli.values import ranks as rank_numbers
from tracepipe.converters import CONVERTERS
from tracepipe.errors import OutputError
from tracepipe.layout.options import WARP_TRACKS
from tracepipe.readers import READERS, UNDATED
from tracepipe.recording.files import STANDARD
from tracepipe.terminal.messages import choices, progress, text_of
from tracepipe.terminal.output import put, say

app = typer.Typer()

Format = choices("Format", CONVERTERS)
WarpTracks = choices("WarpTracks", WARP_TRACKS)


class _Drawn(Reading):
    """The fields that the options for recordings and for datasets have."""

    compress: bool
    warp_tracks: str
    thread_exits: bool


@app.command()
def convert(
    files: Annotated[
        list[str],
        typer.Argument(
            help="A recording: a path, or - for standard input. Several become one timeline. Or a dataset.",
            metavar="FILE...",
        ),
    ],
    to: Annotated[
        Format | None,  # type: ignore[valid-type]
        typer.Option(
            "--format",
            "-f",
            help="Write this format. Default: the one that the output is named after, or perfetto.",
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write to this file; - is standard output. Default: named after the recording.",
        ),
    ] = "",
    archive: Annotated[
        str,
        typer.Option(
            "--archive",
            metavar="FILE",
            help="Write a ZIP with a Perfetto trace of each recording, all on one clock.",
        ),
    ] = "",
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            metavar="N,N-N",
            help="Of a dataset: convert the recordings of these ranks. Default: all.",
        ),
    ] = "",
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Of a dataset: begin at this time, 1.5ms or 2s after the start of the first rank, or @NS on "
            "the clock of the dataset. A number without a unit is in seconds. Of a recording: as --source.",
            autocompletion=lambda: list(READERS),
        ),
    ] = "",
    end: Annotated[
        str,
        typer.Option("--to", metavar="TIME", help="Of a dataset: end before this time, in the same forms."),
    ] = "",
    source: Annotated[
        Source | None,
        typer.Option("--source", metavar="FORMAT", help=SOURCE_HELP, rich_help_panel=READING),
    ] = None,
    force: Force = False,
    strict: Strict = False,
    compress: Annotated[
        bool, typer.Option("--compress", help="Compress the packets (perfetto only).")
    ] = False,
    warp_tracks: Annotated[
        WarpTracks,  # type: ignore[valid-type]
        typer.Option(
            "--warp-tracks",
            help="Draw a track for each hardware slot (slot) or each warp of the grid (logical), a count "
            "for each SM (sm), or no warps (off).",
        ),
    ] = "auto",
    thread_exits: Annotated[
        bool, typer.Option("--thread-exits", help="Draw the exits of a warp's threads as instants.")
    ] = False,
    assume_offset: AssumeOffset = None,
    undated: UndatedOption = UNDATED[0],
    offset: Annotated[
        list[str] | None,
        typer.Option(
            "--offset",
            metavar="FILE=NS",
            help="With several recordings: add this many nanoseconds to the times of one. Repeat for more.",
        ),
    ] = None,
) -> None:
    """Turn a recording, several of the same time, or ranks of a dataset, into a timeline."""
    asked = text_of(to) if to else ""
    if archive:
        if output or asked not in ("", "archive"):
            raise Misuse(
                "It names the output and its format: -o and --format do so too.",
                "Leave them out.",
                option="--archive",
            )
        output, asked = archive, "archive"
    kind = _kind(asked, output)
    if compress and not CONVERTERS[kind].can_compress:
        raise Misuse(f"{kind} has no compressed form.", "Pipe it through gzip.", option="--compress")
    is_dataset = len(files) == 1 and _is_dataset(files[0])
    if not is_dataset:
        source = source or _source_in(start, ranks, end)
    drawn: _Drawn = {
        **reading(source, strict, assume_offset, undated),
        "compress": compress,
        "warp_tracks": text_of(warp_tracks),
        "thread_exits": thread_exits,
    }
    if is_dataset:
        if offset or not output:
            named = "--offset is for recordings." if offset else "The timeline of a dataset has no name."
            raise Misuse(named, "Leave it out." if offset else "Name it with -o.")
        target, options = output, RankOptions(**drawn, ranks=rank_numbers(ranks), start=start, end=end)
        _convert_ranks(files[0], kind, output, options, force=force)
    else:
        options_of_files = ConvertOptions(**drawn, offset=file_offsets(offset or []))
        target = convert_file(files, kind, output, options_of_files, force=force)
    if target != STANDARD:
        say(f"wrote {target}" + _how_to_open(target, kind))


def _is_dataset(path: str) -> bool:
    if not seen.is_folder(path):
        return False
    from tracepipe.dataset.places import Dataset

    return Dataset.is_at(path)


def _source_in(start: str, ranks: str, end: str) -> str:
    """The input format that `--from` names, of a recording. Raises Misuse for what is for datasets."""
    if ranks or end or (start and start not in READERS):
        given = "--ranks" if ranks else "--to" if end else f"--from {start}"
        hint = f"tracepipe cut makes a part of a recording. Formats are {', '.join(READERS)}."
        raise Misuse(f"{given} is for a dataset, which this is not.", hint)
    return start


def _convert_ranks(folder: str, kind: str, output: str, options: RankOptions, *, force: bool) -> None:
    from tracepipe.api.convert_ranks import convert_ranks
    from tracepipe.recording.account_text import account_lines

    with progress(f"convert {Path(folder).name}") as bar:
        account = convert_ranks(folder, output, kind, options, force=force, progress=bar)
    for line in account_lines(account):
        say(line)


def _kind(asked: str, output: str) -> str:
    """The requested format, or the one of the output's name. Raises OutputError if the name is of another
    format.
    """
    name = Path(output)
    ending = (name.with_suffix("") if name.suffix in (".gz", ".zst") else name).suffix
    fitting = [kind for kind, of in CONVERTERS.items() if of.suffix == ending]
    if asked and fitting and asked not in fitting:
        raise OutputError(
            f"{output} has the ending of {' and '.join(fitting)}, and {asked} is asked for",
            f"Name it {name.name.removesuffix(ending)}{CONVERTERS[asked].suffix}, or leave out --format.",
        )
    return asked or (fitting[0] if fitting else "perfetto")


def _how_to_open(target: str, to: str) -> str:
    if not CONVERTERS[to].takes_several or CONVERTERS[to].on_terminal:
        return ""
    where = "ui.perfetto.dev" if to != "chrome" else "ui.perfetto.dev, chrome://tracing or speedscope.app"
    return f": open it in {where}, or run tracepipe open {target}"


def convert_file(
    files: list[str],
    to: str,
    output: str = "",
    options: ConvertOptions | None = None,
    *,
    force: bool = False,
    states_losses: bool = True,
) -> str:
    """Convert and report; returns the path of the output.

    Without `states_losses`, losses are not printed, as the capture has done that.
    """
    target = output or output_of(files, to)
    # A bar would mix with output to the terminal.
    is_shown = target == STANDARD and sys.stdout.isatty()
    with contextlib.nullcontext() if is_shown else progress(f"convert {Path(files[0]).name}") as bar:
        account = convert_recording(files, target, to, options, force=force, progress=bar)
    from tracepipe.recording.account_text import LOST, account_lines

    for line in account_lines(account):
        if states_losses or not line.startswith(LOST):
            say(line)
    return target


@app.command()
def validate(
    file: Annotated[
        str, typer.Argument(help="A recording: a path, or - for standard input.", metavar="FILE")
    ],
    source: SourceOption = None,
) -> None:
    """Check every line of a recording, and name the line and field of each error."""
    from tracepipe.recording.convert import check

    with progress(f"validate {Path(file).name}") as bar:
        account = check(file, text_of(source) if source else "", put, bar)
    total = sum(account.counts.values())
    found = f"{total} events, {account.skipped} bad lines, {account.ambiguous} unclear"
    say(f"{account.path}: {account.source}, {found}")
    for note in account.notes:
        say(f"note: {note}")
    if account.skipped:
        raise typer.Exit(1)


@app.command("open")
def open_command(
    file: Annotated[Path, typer.Argument(help="A converted trace.", metavar="FILE")],
    local: Annotated[
        bool, typer.Option("--local", help="Serve a UI found on this machine, without a network.")
    ] = False,
    browser: Annotated[bool, typer.Option(help="Open a browser, or only print the address.")] = True,
) -> None:
    """Open a converted trace in the Perfetto UI. It is served from this machine to this machine only."""
    from tracepipe.ui.serve import open_trace

    open_trace(file, local=local, browser=browser, notify=say)
