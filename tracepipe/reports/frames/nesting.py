"""Who is inside whom among the rows of a frame."""

from __future__ import annotations

from typing import Any

from tracepipe.reports.frames.libraries import np, pl

NOBODY = -1


def outermost(frame: pl.DataFrame) -> pl.DataFrame:
    """The spans that are in no other of their thread and layer: their lengths may be added up."""
    return frame.filter(pl.col("parent").is_null() & (pl.col("kind") != "instant"))


def nearest(frame: pl.DataFrame, wanted: Any) -> Any:
    """For each row the wanted one that it is or is in, the innermost; -1 without one.

    `wanted` are numpy booleans, one for each row, as `flagged` is below.
    """
    count = len(frame)
    above = frame["parent"].fill_null(count).to_numpy()
    # The last place stands for nobody. Each round looks twice as far up: a deep recursion needs few.
    to = np.append(np.where(wanted, np.arange(count), above), count)
    while not np.array_equal(further := to[to], to):
        to = further
    return np.where(to[:-1] == count, NOBODY, to[:-1])


def has_ancestor(frame: pl.DataFrame, flagged: Any) -> Any:
    """For each row, whether one of those around it is flagged."""
    inside = np.append(nearest(frame, flagged) != NOBODY, False)
    return inside[frame["parent"].fill_null(len(frame)).to_numpy()]


def first_of_their_kind(frame: pl.DataFrame, flagged: Any) -> pl.DataFrame:
    """The flagged rows that are in no other flagged one: a runtime's call, and not the driver's inside it."""
    return frame.filter(pl.Series(flagged & ~has_ancestor(frame, flagged), dtype=pl.Boolean))
