"""The commands for files: convert a recording, open a trace, validate a recording, cut a part of it."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tracepipe.api.convert import (
    FORMATS,
    account_lines,
    can_compress,
    convert_ranks,
    format_of,
    open_trace,
    output_of,
    where_to_open,
)
from tracepipe.api.convert import convert as convert_recording
from tracepipe.api.convert import cut as cut_recording
from tracepipe.api.convert import validate as validate_recording
from tracepipe.api.dataset import is_dataset
from tracepipe.api.options import OUTPUT, SOURCES, ConvertOptions, RankOptions, ReadOptions
from tracepipe.cli.options import (
    AS_RECORDING,
    COMPRESSED,
    TO_STANDARD,
    Changed,
    Force,
    Misuse,
    Recording,
    local_option,
    output_option,
    with_options,
)
from tracepipe.errors import FormatError
from tracepipe.options import SECONDS, STANDARD, TIME, Option
from tracepipe.terminal.messages import progress
from tracepipe.terminal.output import put, say
from tracepipe.units import counted

app = typer.Typer()
_FROM_IS_A_TIME = Changed(flags={"source_format": ("--source",)})


@app.command()
@with_options
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
        str,
        Option(
            "Write this format. Default: the format of the output's ending, or perfetto.",
            choices=FORMATS,
            flags=("--format", "-f"),
            panel=OUTPUT,
        ),
    ] = "",
    output: Annotated[str, output_option(f"Write to this file; {TO_STANDARD} {AS_RECORDING}")] = "",
    archive: Annotated[
        str,
        Option(
            "Write a ZIP with a Perfetto trace of each recording, all on one clock.", "FILE", panel=OUTPUT
        ),
    ] = "",
    force: Force = False,
    part: Annotated[RankOptions, _FROM_IS_A_TIME],
    options: Annotated[ConvertOptions, _FROM_IS_A_TIME],
) -> None:
    """Convert recordings or a dataset."""
    if archive:
        if output or to not in ("", "archive"):
            raise Misuse(
                "It names the output and its format: -o and --format do so too.",
                "Leave them out.",
                option="--archive",
            )
        output, to = archive, "archive"
    kind = format_of(to, output)
    if options.compress and not can_compress(kind):
        raise Misuse(f"{kind} has no compressed form.", "Pipe it through gzip.", option="--compress")
    if len(files) == 1 and is_dataset(files[0]):
        of_recordings = "--offset" if options.offset else "--whatif" if options.whatif else ""
        if of_recordings or not output:
            named = (
                f"{of_recordings} is for recordings."
                if of_recordings
                else "The timeline of a dataset has no name."
            )
            raise Misuse(named, "Leave it out." if of_recordings else "Name it with -o.")
        target = output
        with progress(f"convert {Path(files[0]).name}") as bar:
            account = convert_ranks(files[0], output, kind, part, force=force, progress=bar)
        for line in account_lines(account):
            say(line)
    else:
        if part.ranks or part.end or (part.start and part.start not in SOURCES):
            given = "--ranks" if part.ranks else "--to" if part.end else f"--from {part.start}"
            hint = f"Use tracepipe cut for a part of a recording. Formats are {', '.join(SOURCES)}."
            raise Misuse(f"{given} is for a dataset, and this is a recording.", hint)
        options = replace(options, source_format=options.source_format or part.start)
        target = convert_file(files, kind, output, options, force=force)
    if target != STANDARD:
        where = where_to_open(target, kind)
        say(f"wrote {target}" + (f": open it in {where}, or run tracepipe open {target}" if where else ""))


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
    for line in account_lines(account, states_losses=states_losses):
        say(line)
    return target


@app.command()
@with_options
def validate(*, file: Recording, options: Annotated[ReadOptions, Changed("validate")]) -> None:
    """Print the errors of a recording."""
    with progress(f"validate {Path(file).name}") as bar:
        account = validate_recording(file, options.source_format, put, bar)
    bad = counted(account.skipped, "bad line|lines")
    events = counted(sum(account.counts.values()), "event|events")
    say(f"{account.path}: {account.source}, {events}, {bad}, {account.ambiguous} unclear")
    for note in account.notes:
        say(f"note: {note}")
    if account.skipped:
        raise typer.Exit(1)


@app.command("open")
@with_options
def open_command(
    *,
    file: Annotated[str, typer.Argument(help="A trace, a recording, or a folder of them.", metavar="FILE")],
    local: Annotated[bool, local_option("Serve")] = False,
    browser: Annotated[bool, Option("Open a browser, or only print the address.")] = True,
) -> None:
    """Open a trace."""
    open_trace(file, local=local, browser=browser, notify=say, showing=progress)


@app.command()
@with_options
def cut(
    *,
    file: Recording,
    start: Annotated[
        str,
        Option(
            "Keep events from this time on: 1.5ms or 2s after the start of the run, or @NS on the trace's "
            f"clock. {SECONDS} Default: the start.",
            TIME,
            flags=("--from", "--start"),
            read=str,
        ),
    ] = "",
    end: Annotated[
        str,
        Option(
            "Keep events before this time, in the same forms. Default: the end.",
            TIME,
            flags=("--to", "--end"),
            read=str,
        ),
    ] = "",
    output: Annotated[str, output_option(f"Write this event file, {COMPRESSED}; {TO_STANDARD}")],
    force: Force = False,
    options: Annotated[ReadOptions, _FROM_IS_A_TIME],
) -> None:
    """Cut a recording."""
    if not start and not end:
        raise Misuse("There is no stretch of time to cut.", "Give --from, --to or both.")
    if start in SOURCES:
        raise Misuse(f"{start} is not a time.", "--source names the input format.", option="--from")
    try:
        with progress(f"cut {Path(file).name}") as bar:
            account = cut_recording(file, output, options, start=start, end=end, force=force, progress=bar)
    except FormatError as error:
        raise FormatError(error.message, error.hint.replace("--from", "--source")) from error
    for line in account_lines(account):
        say(line)
    if output != STANDARD:
        say(f"wrote {output}")
