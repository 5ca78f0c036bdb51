"""The command that writes a part of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracepipe.cli.input_options import (
    READING,
    SOURCE_HELP,
    AssumeOffset,
    Force,
    Source,
    Strict,
    UndatedOption,
    reading,
)
from tracepipe.cli.values import Misuse
from tracepipe.readers import READERS, UNDATED
from tracepipe.recording.files import STANDARD
from tracepipe.terminal.messages import progress
from tracepipe.terminal.output import say

app = typer.Typer()


@app.command()
def cut(
    file: Annotated[
        str, typer.Argument(help="A recording: a path, or - for standard input.", metavar="FILE")
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write this event file, compressed if its name ends with .zst or .gz; - is standard output.",
        ),
    ],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            "--start",
            metavar="TIME",
            help="Keep the time from here on: 1.5ms or 2s after the start of the run, or @NS on the "
            "trace's clock. A number without a unit is in seconds. Default: the start.",
        ),
    ] = "",
    end: Annotated[
        str,
        typer.Option(
            "--to",
            "--end",
            metavar="TIME",
            help="Keep the time before this, in the same forms. Default: the end.",
        ),
    ] = "",
    source: Annotated[
        Source | None,
        typer.Option("--source", metavar="FORMAT", help=SOURCE_HELP, rich_help_panel=READING),
    ] = None,
    force: Force = False,
    strict: Strict = False,
    assume_offset: AssumeOffset = None,
    undated: UndatedOption = UNDATED[0],
) -> None:
    """Write a stretch of a recording's time as a separate recording."""
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
                ReadOptions(**reading(source, strict, assume_offset, undated)),
                start=start,
                end=end,
                force=force,
                progress=bar,
            )
    except FormatError as error:
        raise FormatError(error.message, error.hint.replace("--from", "--source")) from error
    from tracepipe.recording.account_text import account_lines

    for line in account_lines(account):
        say(line)
    if output != STANDARD:
        say(f"wrote {output}")
