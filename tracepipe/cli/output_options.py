"""Defines the options for what a command writes and prints, each once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.models import OptionInfo

OUTPUT = "Output"
"""The panel of these options."""
COMPRESSED = "compressed if its name ends with .zst or .gz"
TO_STANDARD = "- is standard output."
AS_RECORDING = "Default: named after the recording."


def output_option(what: str, metavar: str = "FILE") -> OptionInfo:
    """The option that names the output; `what` is its help."""
    option: OptionInfo = typer.Option("--output", "-o", metavar=metavar, help=what, rich_help_panel=OUTPUT)
    return option


def json_option(what: str, more: str = "") -> OptionInfo:
    """The option that prints `what` as JSON."""
    option: OptionInfo = typer.Option("--json", help=f"Print {what} as JSON{more}.", rich_help_panel=OUTPUT)
    return option


def local_option(what: str) -> OptionInfo:
    """The option that opens a trace in a UI of this machine; `what` says so."""
    option: OptionInfo = typer.Option(
        "--local", help=f"{what} a UI found on this machine, without a network."
    )
    return option


Force = Annotated[
    bool, typer.Option("--force", help="Overwrite the output if it exists.", rich_help_panel=OUTPUT)
]


@dataclass(frozen=True, slots=True)
class Shown:
    """How a command prints its tables."""

    as_json: Annotated[bool, json_option("the tables", ", with units in the names of the keys")] = False
    full_names: Annotated[
        bool,
        typer.Option(
            "--full-names",
            help="Print names in full; lines may become longer than the terminal is wide.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
