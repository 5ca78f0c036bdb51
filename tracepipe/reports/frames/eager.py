"""Columns that polars makes at once.

Its `repeat`, `when` and `gather` build a query each, which takes longer than the rows where they are few,
and a frame has dozens of columns.
"""

from __future__ import annotations

from tracepipe.event.columns import Bools
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.libraries import pl


def nulls(name: str, count: int, dtype: pl.DataType) -> pl.Series:
    """A column without values."""
    return pl.Series(name, [None], dtype=dtype).new_from_index(0, count)


def where(known: Bools | pl.Series, values: pl.Series) -> pl.Series:
    """The values, and null where `known` (numpy booleans, or a series of them) is False. Shapes `(n,)`."""
    return values.zip_with(pl.Series(known, dtype=pl.Boolean), nulls(values.name, 1, values.dtype))


def picked(values: pl.Series, places: Ints) -> pl.Series:
    """The values at some places, shape `(n,)`."""
    found: pl.Series = values[places]
    return found
