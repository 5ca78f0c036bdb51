"""The commands for files: convert a recording, validate it, open a trace."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from tracepipe import paths
from tracepipe.api.convert import convert as convert_recording
from tracepipe.api.convert import output_of
from tracepipe.api.options import ConvertOptions, RankOptions
from tracepipe.cli.groups import with_groups
from tracepipe.cli.input_options import ReadFields, ReadingTimes, Recording, SourceOption
from tracepipe.cli.output_options import (
    AS_RECORDING,
    OUTPUT,
    TO_STANDARD,
    Force,
    local_option,
    output_option,
)
from tracepipe.cli.values import SECONDS, Misuse, file_offsets
from tracepipe.cli.values import ranks as rank_numbers
from tracepipe.converters import CONVERTERS
from tracepipe.errors import InputError, OutputError
from tracepipe.layout import WARP_TRACKS
from tracepipe.readers import READERS
from tracepipe.recording.files import STANDARD
from tracepipe.recording.remote import is_url
from tracepipe.terminal.messages import choices, progress, text_of
from tracepipe.terminal.output import put, say
from tracepipe.units import counted

app = typer.Typer()

Format = choices("Format", CONVERTERS)
WarpTracks = choices("WarpTracks", WARP_TRACKS)


class _Drawn(ReadFields):
    """The fields that the options for recordings and for datasets have."""

    compress: bool
    warp_tracks: str
    thread_exits: bool


@dataclass(frozen=True, slots=True)
class _OfDataset:
    """The part of a dataset to convert."""

    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            metavar="N,N-N",
            help="With a dataset: convert the recordings of these ranks. Default: all.",
        ),
    ] = ""
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="TIME",
            help="With a dataset: begin at this time, 1.5ms or 2s after the start of the first rank, or @NS "
            f"on the clock of the dataset. {SECONDS} With a recording: the same as --source.",
            autocompletion=lambda: list(READERS),
        ),
    ] = ""
    end: Annotated[
        str,
        typer.Option("--to", metavar="TIME", help="With a dataset: end before this time, in the same forms."),
    ] = ""


@dataclass(frozen=True, slots=True)
class _Drawing:
    """How warps are drawn."""

    warp_tracks: Annotated[
        WarpTracks,  # type: ignore[valid-type]
        typer.Option(
            "--warp-tracks",
            help="Draw a track for each hardware slot (slot) or each warp of the grid (logical), a count "
            "for each SM (sm), or no warps (off).",
        ),
    ] = "auto"
    thread_exits: Annotated[
        bool, typer.Option("--thread-exits", help="Draw the exits of a warp's threads as instants.")
    ] = False


@app.command()
@with_groups
def convert(
    *,
    files: Annotated[
        list[str],
        typer.Argument(
            help="A recording, several for one timeline, or a dataset: paths, or - for standard input.",
            metavar="FILE...",
        ),
    ],
    to: Annotated[
        Format | None,  # type: ignore[valid-type]
        typer.Option(
            "--format",
            "-f",
            help="Write this format. Default: the format of the output's ending, or perfetto.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    output: Annotated[str, output_option(f"Write to this file; {TO_STANDARD} {AS_RECORDING}")] = "",
    archive: Annotated[
        str,
        typer.Option(
            "--archive",
            metavar="FILE",
            help="Write a ZIP with a Perfetto trace of each recording, all on one clock.",
            rich_help_panel=OUTPUT,
        ),
    ] = "",
    compress: Annotated[
        bool,
        typer.Option("--compress", help="Compress the packets (perfetto only).", rich_help_panel=OUTPUT),
    ] = False,
    force: Force = False,
    part: _OfDataset,
    drawing: _Drawing,
    offset: Annotated[
        list[str] | None,
        typer.Option(
            "--offset",
            metavar="FILE=NS",
            help="With several recordings: add this many nanoseconds to the times of one. Repeat for more.",
        ),
    ] = None,
    how: ReadingTimes,
) -> None:
    """Convert a recording, several recordings, or ranks of a dataset to one timeline."""
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
        how = replace(how, source=how.source or _source_in(part))
    drawn: _Drawn = {
        **how.fields(),
        "compress": compress,
        "warp_tracks": text_of(drawing.warp_tracks),
        "thread_exits": drawing.thread_exits,
    }
    if is_dataset:
        if offset or not output:
            named = "--offset is for recordings." if offset else "The timeline of a dataset has no name."
            raise Misuse(named, "Leave it out." if offset else "Name it with -o.")
        numbers = rank_numbers(part.ranks)
        target, options = output, RankOptions(**drawn, ranks=numbers, start=part.start, end=part.end)
        _convert_ranks(files[0], kind, output, options, force=force)
    else:
        options_of_files = ConvertOptions(**drawn, offset=file_offsets(offset or []))
        target = convert_file(files, kind, output, options_of_files, force=force)
    if target != STANDARD:
        say(f"wrote {target}" + _how_to_open(target, kind))


def _is_dataset(path: str) -> bool:
    if not paths.is_folder(path):
        return False
    from tracepipe.dataset.places import Dataset

    return Dataset.is_at(path)


def _source_in(part: _OfDataset) -> str:
    """The input format that `--from` names, of a recording. Raises Misuse for what is for datasets."""
    if part.ranks or part.end or (part.start and part.start not in READERS):
        given = "--ranks" if part.ranks else "--to" if part.end else f"--from {part.start}"
        hint = f"Use tracepipe cut for a part of a recording. Formats are {', '.join(READERS)}."
        raise Misuse(f"{given} is for a dataset, and this is a recording.", hint)
    return part.start


def _convert_ranks(folder: str, kind: str, output: str, options: RankOptions, *, force: bool) -> None:
    from tracepipe.api.convert_ranks import convert_ranks
    from tracepipe.recording.account import account_lines

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
            f"{output} has the ending of {' and '.join(fitting)}, but --format is {asked}",
            f"Name it {name.name.removesuffix(ending)}{CONVERTERS[asked].suffix}, or leave out --format.",
        )
    return asked or (fitting[0] if fitting else "perfetto")


def _how_to_open(target: str, to: str) -> str:
    if not CONVERTERS[to].takes_several or CONVERTERS[to].on_terminal:
        return ""
    if is_url(target):
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
    from tracepipe.recording.account import LOST, account_lines

    for line in account_lines(account):
        if states_losses or not line.startswith(LOST):
            say(line)
    return target


@app.command()
def validate(
    file: Recording,
    source: SourceOption = None,
) -> None:
    """Check every line of a recording, and name the line and field of each error."""
    from tracepipe.recording.convert import check

    with progress(f"validate {Path(file).name}") as bar:
        account = check(file, text_of(source) if source else "", put, bar)
    total = sum(account.counts.values())
    bad = counted(account.skipped, "bad line|lines")
    found = f"{counted(total, 'event|events')}, {bad}, {account.ambiguous} unclear"
    say(f"{account.path}: {account.source}, {found}")
    for note in account.notes:
        say(f"note: {note}")
    if account.skipped:
        raise typer.Exit(1)


@app.command("open")
def open_command(
    file: Annotated[str, typer.Argument(help="A converted trace.", metavar="FILE")],
    local: Annotated[bool, local_option("Serve")] = False,
    browser: Annotated[bool, typer.Option(help="Open a browser, or only print the address.")] = True,
) -> None:
    """Open a converted trace in the Perfetto UI. It is served from this machine to this machine only."""
    from tracepipe.ui.serve import open_trace

    if is_url(file):
        raise InputError("is a URL, and the UI gets a trace from a file", "Copy it here first.", path=file)
    open_trace(Path(file), local=local, browser=browser, notify=say)
