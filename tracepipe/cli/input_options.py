"""Defines the options of commands that read a recording, each once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypedDict

import typer
from typer.models import OptionInfo

from tracepipe.cli.values import offsets
from tracepipe.readers import READERS, UNDATED
from tracepipe.terminal.messages import UNDATED_HELP, choices, text_of

Source = choices("Source", READERS)
Undated = choices("Undated", UNDATED)

READING = "Reading"
"""The panel of the options for reading a recording."""
RECORDING = "A recording: a path, a URL, or - for standard input."
"""The help of an argument that names one."""


def _source_option(name: str) -> OptionInfo:
    option: OptionInfo = typer.Option(
        name,
        metavar="FORMAT",
        help=f"Read the input as this format: {', '.join(READERS)}. Default: recognised by its content.",
        rich_help_panel=READING,
    )
    return option


Recording = Annotated[str, typer.Argument(help=RECORDING, metavar="FILE")]
SourceOption = Annotated[
    Source | None,  # type: ignore[valid-type]
    _source_option("--from"),
]


class ReadFields(TypedDict):
    """The fields of `ReadOptions`, which the options of `convert` have too."""

    source_format: str
    strict: bool
    assume_offset: dict[str, int | str]
    undated: str


@dataclass(frozen=True, slots=True)
class Reading:
    """How a recording is read."""

    source: SourceOption = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Fail at the first line that cannot be used. Otherwise such lines are skipped and counted.",
            rich_help_panel=READING,
        ),
    ] = False
    assume_offset: Annotated[
        list[str] | None,
        typer.Option(
            "--assume-offset",
            metavar="CLOCK=NS",
            help="Place a clock that has no clock pairs: CLOCK=NS adds nanoseconds to its times; "
            "globaltimer:0=realtime takes it as equal to that clock of the host. Repeat for more.",
            rich_help_panel=READING,
        ),
    ] = None
    undated: Annotated[
        Undated,  # type: ignore[valid-type]
        typer.Option("--undated", help=UNDATED_HELP, rich_help_panel=READING),
    ] = UNDATED[0]

    def fields(self) -> ReadFields:
        """The fields of the library's options for reading. Raises Misuse."""
        return {
            "source_format": text_of(self.source) if self.source else "",
            "strict": self.strict,
            "assume_offset": offsets(self.assume_offset or []),
            "undated": text_of(self.undated),
        }


@dataclass(frozen=True, slots=True)
class ReadingTimes(Reading):
    """The same, of a command whose `--from` is a time."""

    source: Annotated[
        Source | None,  # type: ignore[valid-type]
        _source_option("--source"),
    ] = None
