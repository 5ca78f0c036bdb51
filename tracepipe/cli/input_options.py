"""The options of the commands that read a recording, each defined once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tracepipe.cli.values import offsets
from tracepipe.readers import READERS, UNDATED
from tracepipe.terminal.messages import UNDATED_HELP, choices, text_of

Source = choices("Source", READERS)
Undated = choices("Undated", UNDATED)

SourceOption = Annotated[
    Source | None,  # type: ignore[valid-type]
    typer.Option("--from", help="Input format, if not by content."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse input with a bad line.")]
AssumeOffset = Annotated[
    list[str] | None,
    typer.Option(
        "--assume-offset",
        metavar="CLOCK=NS",
        help="Place a clock without clock pairs: ns to add, or a host clock (globaltimer:0=realtime).",
    ),
]
UndatedOption = Annotated[
    Undated,  # type: ignore[valid-type]
    typer.Option("--undated", help=UNDATED_HELP),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output.")]


def reading(source: Any, strict: bool, assume_offset: list[str] | None, undated: Any) -> dict[str, Any]:
    """How a recording is read, as the functions of the library take it. Raises Misuse."""
    return {
        "source_format": text_of(source) if source else "",
        "strict": strict,
        "assume_offset": offsets(assume_offset or []),
        "undated": text_of(undated),
    }
