"""The command that writes a part of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracepipe.readers import READERS, UNDATED
from tracepipe.recording.files import STANDARD
from tracepipe.terminal.messages import UNDATED_HELP, choices, offsets, progress, text_of
from tracepipe.terminal.output import say

app = typer.Typer()

Source = choices("Source", READERS)
Undated = choices("Undated", UNDATED)


@app.command()
def cut(
    file: Annotated[str, typer.Argument(help="Recording: a path, or - for standard input.", metavar="FILE")],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="Event file, compressed if named .zst or .gz; - is standard output."
        ),
    ],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            "--start",
            metavar="TIME",
            help="From this time after the start of the run: 1.5ms, 2s; or @NS on the trace's clock.",
        ),
    ] = "",
    end: Annotated[str, typer.Option("--to", "--end", metavar="TIME", help="Until this time.")] = "",
    source: Annotated[
        Source | None,  # type: ignore[valid-type]
        typer.Option("--source", help="Input format, if not by content (elsewhere --from)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse input with a bad line.")] = False,
    assume_offset: Annotated[
        list[str] | None,
        typer.Option(
            "--assume-offset",
            metavar="CLOCK=NS",
            help="Place a clock without clock pairs: ns to add, or a host clock (globaltimer:0=realtime).",
        ),
    ] = None,
    undated: Annotated[Undated, typer.Option("--undated", help=UNDATED_HELP)] = UNDATED[0],  # type: ignore[valid-type]
) -> None:
    """Write what happened in a stretch of a recording's time as a recording of its own."""
    from tracepipe.api.cut import cut as cut_recording
    from tracepipe.errors import FormatError

    if not start and not end:
        raise typer.BadParameter("give --from, --to or both", param_hint="the stretch of time")
    if start in READERS:
        raise typer.BadParameter(f"{start} is no time; --source names the input format", param_hint="--from")
    try:
        with progress(f"cut {Path(file).name}") as bar:
            account = cut_recording(
                file,
                output,
                start=start,
                end=end,
                force=force,
                strict=strict,
                assume_offset=offsets(assume_offset or []),
                source_format=text_of(source) if source else "",
                undated=text_of(undated),
                progress=bar,
            )
    except FormatError as error:
        raise FormatError(error.message, error.hint.replace("--from", "--source")) from error
    from tracepipe.recording.account_text import account_lines

    for line in account_lines(account):
        say(line)
    if output != STANDARD:
        say(f"wrote {output}")
