"""Prints the result of a report, and finds the format of the file that it writes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracepipe.errors import OutputError
from tracepipe.recording.files import STANDARD
from tracepipe.terminal.output import has_colours, put

if TYPE_CHECKING:
    from tracepipe.reports.frames.run import Facts
    from tracepipe.reports.report import Result


def ending_of(target: str, endings: Sequence[str]) -> str:
    """The ending of a file to write, one of `endings`, which decides its kind. Raises OutputError."""
    if target == STANDARD:
        return endings[0]
    ending = Path(target).suffix.lower()
    if ending not in endings:
        raise OutputError(f"{target} has no known ending", f"Name a file ending with {', '.join(endings)}.")
    return ending


def put_lines(recordings: Sequence[Facts], result: Result, full_names: bool) -> None:
    """Print a result as text, as wide and in as many letters as standard output takes."""
    from tracepipe.present.writing.rendering import report_lines

    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    width, colours = shutil.get_terminal_size().columns, has_colours(sys.stdout)
    for line in report_lines(
        recordings, result, width=width, colours=colours, ascii_only=plain, full_names=full_names
    ):
        put(line, colours=colours)
