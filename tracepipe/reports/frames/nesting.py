"""Who is inside whom among the rows of a frame, or of a layer's numpy columns."""

from __future__ import annotations

from typing import Any

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.reports.frames.libraries import np, pl

NOBODY = NONE
# Callers that are climbed to one after the other: most calls have few.
_CLIMBED_MAX = 32


def outermost(frame: pl.DataFrame) -> pl.DataFrame:
    """The spans that are in no other of their thread and layer: their lengths may be added up."""
    return frame.filter(pl.col("parent").is_null() & (pl.col("kind") != "instant"))


def nearest(frame: pl.DataFrame, wanted: Any) -> Any:
    """For each row the wanted one that it is or is in, the innermost; -1 without one.

    `wanted` are numpy booleans, one for each row, as `flagged` is below.
    """
    return nearest_of(_parents(frame), wanted)


def has_ancestor(frame: pl.DataFrame, flagged: Any) -> Any:
    """For each row, whether one of those around it is flagged."""
    return has_flagged_around(_parents(frame), flagged)


def first_of_their_kind(frame: pl.DataFrame, flagged: Any) -> pl.DataFrame:
    """The flagged rows that are in no other flagged one: a runtime's call, and not the driver's inside it."""
    return frame.filter(pl.Series(flagged & ~has_ancestor(frame, flagged), dtype=pl.Boolean))


def _parents(frame: pl.DataFrame) -> Any:
    return frame["parent"].fill_null(NOBODY).cast(pl.Int32).to_numpy()


def nearest_of(parents: Int32s, wanted: Bools) -> Int32s:
    """As `nearest`, for the rows of parents, NOBODY for none."""
    count = len(parents)
    # The last place stands for nobody. Each round looks twice as far up: a deep recursion needs few.
    to: Int32s = np.empty(count + 1, np.int32)
    to[:-1] = np.where(parents == NOBODY, count, parents)
    to[-1] = count
    rows = np.flatnonzero(wanted)
    to[rows] = rows
    while not np.array_equal(further := to[to], to):
        to = further
    return np.where(to[:-1] == count, np.int32(NOBODY), to[:-1])


def nearest_of_some(parents: Int32s, wanted: Bools, rows: Any) -> Int64s:
    """As `nearest_of`, for some rows alone."""
    found: Int64s = rows.astype(np.int64)
    climbing = np.flatnonzero(~wanted[found])
    for _ in range(_CLIMBED_MAX):
        found[climbing] = parents[found[climbing]]
        climbing = climbing[found[climbing] != NOBODY]
        climbing = climbing[~wanted[found[climbing]]]
        if not len(climbing):
            return found
    found[climbing] = nearest_of(parents, wanted)[found[climbing]]
    return found


def has_flagged_around(parents: Int32s, flagged: Bools) -> Bools:
    """As `has_ancestor`, for the rows of parents."""
    return np.append(nearest_of(parents, flagged) != NOBODY, False)[parents]


def first_flagged(parents: Int32s, flagged: Bools) -> Bools:
    """As `first_of_their_kind`, for the rows of parents."""
    rows = np.flatnonzero(flagged)
    above = parents[rows]
    rows, above = rows[above != NOBODY], above[above != NOBODY]
    first = flagged.copy()
    first[rows[nearest_of_some(parents, flagged, above) != NOBODY]] = False
    return first
