"""`tracepipe.load`: a recording as the reports use it, a polars frame for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracepipe.recording.reading import Progress
    from tracepipe.reports.frames.run import Run


def load(
    path: str | PathLike[str],
    *,
    source_format: str = "",
    strict: bool = False,
    assume_offset: Mapping[str, int | str] | None = None,
    undated: str = "skip",
    progress: Progress | None = None,
) -> Run:
    """Read a recording of any input format into columns, with begins and ends matched and nested.

    Parameters are those of `tracepipe.open`. The whole recording is kept in memory. Raises InputError,
    FormatError, ClockError, and LibraryMissing where polars cannot be imported.
    """
    from tracepipe.reports.frames.run import load_run

    return load_run(fspath(path), source_format, strict, assume_offset, progress, undated)
