"""Sorts the rows of columns, and groups those that are equal. All columns have the shape `(rows,)`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import numpy as np

from tracepipe.event.columns import NONE, AnyArray, Int32s, Int64s, Ints


def sorted_rows(*columns: AnyArray) -> Int32s:
    """The indices that sort rows by some columns, the first column first. Equal rows keep their order."""
    return np.lexsort([_narrow(column) for column in columns[::-1]]).astype(np.int32)


def sorted_runs(*columns: AnyArray) -> tuple[Int32s, Int64s]:
    """The indices that sort rows, as in `sorted_rows`, and the first index of each run of equal rows among
    them.
    """
    order = sorted_rows(*columns)
    return order, run_starts(*(column[order] for column in columns))


def run_starts(*columns: AnyArray) -> Int64s:
    """The rows in which any of the columns differs from the row before, and the first row."""
    differs = np.zeros(len(columns[0]), np.bool_)
    differs[:1] = True
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(differs)


def number_rows(*columns: AnyArray) -> tuple[Int32s, Int32s]:
    """A number for each row, the same for equal rows and in their sort order, and the first row of each
    number.
    """
    order, starts = sorted_runs(*columns)
    numbers = np.empty(len(order), np.int32)
    numbers[order] = np.repeat(np.arange(len(starts), dtype=np.int32), np.diff(starts, append=len(order)))
    return numbers, order[starts]


def count_earlier(*columns: AnyArray) -> Int32s:
    """For each row, how many of the rows before it are equal to it."""
    order, starts = sorted_runs(*columns)
    earlier = np.empty(len(order), np.int32)
    earlier[order] = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    return earlier


def sums_by(numbers: Ints, values: Ints, count: int) -> Int64s:
    """The sum of the values of each number below `count`, exactly. Shape `(count,)`."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, numbers, values)
    return sums


class RowsByNumber:
    """Rows by a number that each has; the rows of a number keep their order. By default `rows` are 0, 1, …"""

    def __init__(self, numbers: Ints, rows: Ints | None = None) -> None:
        order, starts = sorted_runs(numbers)
        self.numbers = numbers[order[starts]]
        """The numbers that occur, sorted."""
        self._rows: Int64s = (order if rows is None else rows[order]).astype(np.int64)
        self._bounds = np.append(starts, len(order))

    def of(self, number: int) -> Int64s:
        """The rows that have a number."""
        at = int(np.searchsorted(self.numbers, number))
        if at == len(self.numbers) or self.numbers[at] != number:
            return self._rows[:0]
        return self._rows[self._bounds[at] : self._bounds[at + 1]]

    def last_before(
        self, times_ns: Int64s, numbers: Ints, at_ns: Int64s, side: Literal["left", "right"]
    ) -> Int64s:
        """For events with some numbers, the last row of the same number whose time is before the event's
        (`left`), or not after it (`right`); else -1. `times_ns` has the times of all rows; those of a number
        are sorted. Shapes `(events,)`.
        """
        found = np.full(len(numbers), NONE, np.int64)
        for number, events in RowsByNumber(numbers):
            own = self.of(number)
            found[events] = np.append(NONE, own)[np.searchsorted(times_ns[own], at_ns[events], side)]
        return found

    def __iter__(self) -> Iterator[tuple[int, Int64s]]:
        for number, (first, last) in zip(self.numbers.tolist(), pairwise(self._bounds.tolist()), strict=True):
            yield number, self._rows[first:last]


def largest(values: AnyArray, rows: Ints, most: int) -> tuple[Ints, Ints]:
    """The rows with the largest values, fewer than `most`, and the rows whose equal values compete for the
    rest of `most`.
    """
    own = values[rows]
    if len(rows) <= most:
        return rows, rows[:0]
    least = np.partition(own, len(own) - most)[len(own) - most]
    return rows[own > least], rows[own == least]


def _narrow(column: AnyArray) -> AnyArray:
    """The column in 16 bits where its values fit: sorting these takes a twentieth of the time."""
    is_wide = column.dtype.kind in "iu" and column.itemsize > 2 and len(column) > 0
    return column.astype(np.uint16) if is_wide and column.min() >= 0 and column.max() < 1 << 16 else column
