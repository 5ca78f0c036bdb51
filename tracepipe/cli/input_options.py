"""Defines the options of commands that read a recording, each once."""

from __future__ import annotations

from typing import Annotated, TypedDict

import typer

from tracepipe.cli.values import offsets
from tracepipe.readers import READERS, UNDATED
from tracepipe.terminal.messages import UNDATED_HELP, choices, text_of

Source = choices("Source", READERS)
Undated = choices("Undated", UNDATED)

READING = "Reading"
"""The panel of the options for reading a recording."""
SOURCE_HELP = f"Read the input as this format: {', '.join(READERS)}. Default: recognised by its content."

SourceOption = Annotated[
    Source | None,  # type: ignore[valid-type]
    typer.Option("--from", metavar="FORMAT", help=SOURCE_HELP, rich_help_panel=READING),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Fail at the first line that cannot be used, which is skipped otherwise.",
        rich_help_panel=READING,
    ),
]
AssumeOffset = Annotated[
    list[str] | None,
    typer.Option(
        "--assume-offset",
        metavar="CLOCK=NS",
        help="Place a clock that has no clock pairs, by nanoseconds to add or by a clock of the host that it "
        "equals: globaltimer:0=realtime. Repeat for more.",
        rich_help_panel=READING,
    ),
]
UndatedOption = Annotated[
    Undated,  # type: ignore[valid-type]
    typer.Option("--undated", help=UNDATED_HELP, rich_help_panel=READING),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output if it exists.")]


class Reading(TypedDict):
    """The fields of `ReadOptions`, which the options of `convert` have too."""

    source_format: str
    strict: bool
    assume_offset: dict[str, int | str]
    undated: str


def reading(source: object, strict: bool, assume_offset: list[str] | None, undated: object) -> Reading:
    """The fields of the library's options for reading. Raises Misuse."""
    return {
        "source_format": text_of(source) if source else "",
        "strict": strict,
        "assume_offset": offsets(assume_offset or []),
        "undated": text_of(undated),
    }
