"""`tracepipe.load`: a recording as the reports use it, a polars frame for each layer."""

from __future__ import annotations

from os import PathLike, fspath
from typing import TYPE_CHECKING

from tracepipe.api.options import ReadOptions

if TYPE_CHECKING:
    from tracepipe.recording.reading import Progress
    from tracepipe.reports.frames.run import Run


def load(
    path: str | PathLike[str],
    options: ReadOptions | None = None,
    *,
    progress: Progress | None = None,
) -> Run:
    """Read a recording of any input format into columns, with begins and ends matched and nested.

    The whole recording is kept in memory. `progress` is called with bytes read and bytes in all. Raises
    InputError, FormatError, ClockError, and LibraryMissing where polars cannot be imported.
    """
    from tracepipe.reports.frames.run import load_run

    how = options or ReadOptions()
    return load_run(fspath(path), how.source_format, how.strict, how.assume_offset, progress, how.undated)
