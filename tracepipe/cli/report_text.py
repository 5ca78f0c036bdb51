"""How the result of a report is printed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracepipe.terminal.output import has_colours, put

if TYPE_CHECKING:
    from tracepipe.reports.frames.run import Facts
    from tracepipe.reports.report import Result


def put_lines(recordings: Sequence[Facts], result: Result, full_names: bool) -> None:
    """Print a result as text, as wide and in as many letters as standard output takes."""
    from tracepipe.reports.writing.rendering import report_lines

    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    width, colours = shutil.get_terminal_size().columns, has_colours(sys.stdout)
    for line in report_lines(
        recordings, result, width=width, colours=colours, ascii_only=plain, full_names=full_names
    ):
        put(line, colours=colours)
