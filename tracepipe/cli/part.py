"""The command that writes a part of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracepipe.cli.groups import with_groups
from tracepipe.cli.input_options import ReadingTimes, Recording
from tracepipe.cli.output_options import COMPRESSED, TO_STANDARD, Force, output_option
from tracepipe.cli.values import SECONDS, Misuse
from tracepipe.readers import READERS
from tracepipe.recording.files import STANDARD
from tracepipe.terminal.messages import progress
from tracepipe.terminal.output import say

app = typer.Typer()


@app.command()
@with_groups
def cut(
    *,
    file: Recording,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            "--start",
            metavar="TIME",
            help="Keep events from this time on: 1.5ms or 2s after the start of the run, or @NS on the "
            f"trace's clock. {SECONDS} Default: the start.",
        ),
    ] = "",
    end: Annotated[
        str,
        typer.Option(
            "--to",
            "--end",
            metavar="TIME",
            help="Keep events before this time, in the same forms. Default: the end.",
        ),
    ] = "",
    output: Annotated[str, output_option(f"Write this event file, {COMPRESSED}; {TO_STANDARD}")],
    force: Force = False,
    how: ReadingTimes,
) -> None:
    """Write the events of a stretch of time as a separate recording."""
    from tracepipe.api.cut import cut as cut_recording
    from tracepipe.api.options import ReadOptions
    from tracepipe.errors import FormatError

    if not start and not end:
        raise Misuse("There is no stretch of time to cut.", "Give --from, --to or both.")
    if start in READERS:
        raise Misuse(f"{start} is not a time.", "--source names the input format.", option="--from")
    try:
        with progress(f"cut {Path(file).name}") as bar:
            account = cut_recording(
                file,
                output,
                ReadOptions(**how.fields()),
                start=start,
                end=end,
                force=force,
                progress=bar,
            )
    except FormatError as error:
        raise FormatError(error.message, error.hint.replace("--from", "--source")) from error
    from tracepipe.recording.account import account_lines

    for line in account_lines(account):
        say(line)
    if output != STANDARD:
        say(f"wrote {output}")
