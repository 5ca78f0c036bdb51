"""Rows by a number that they have, and numbers for rows that are equal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from tracepipe.event.columns import Int32s, Int64s
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import ROWS_AT_ONCE, empty, flagged, made, parts, release, stored, taken

_BITS = 63


def grouped(numbers: Any) -> Iterator[tuple[int, Int64s]]:
    """Each number from 0 on that there is, in order, and its places, in theirs."""
    if not len(numbers):
        return
    order, bounds = sorted_by(numbers)
    for first, last in pairwise(bounds.tolist()):
        yield int(numbers[order[first]]), order[first:last]


def each(numbers: Any) -> Iterator[int]:
    """Numbers of a column one by one, as Python's."""
    for part in parts(len(numbers)):
        yield from numbers[part].tolist()


class Grouped:
    """Rows by the number from 0 on that they have, in their order, as parts of a column."""

    def __init__(self, numbers: Any, rows: Any) -> None:
        self._rows, self._bounds, self._numbers = rows, np.zeros(1, np.int64), np.empty(0, np.int64)
        if len(numbers):
            order, self._bounds = sorted_by(numbers)
            self._numbers = taken(numbers, order[self._bounds[:-1]])
            self._rows = taken(rows, order)
            self._bounds = stored(self._bounds)

    def of(self, number: int) -> Any:
        """The rows that have a number."""
        at = int(np.searchsorted(self._numbers, number))
        if at == len(self._numbers) or self._numbers[at] != number:
            return self._rows[:0]
        return self._rows[self._bounds[at] : self._bounds[at + 1]]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for part in parts(len(self._numbers)):
            bounds = self._bounds[part.start : part.stop + 1].tolist()
            for number, (first, last) in zip(self._numbers[part].tolist(), pairwise(bounds), strict=True):
                yield number, self._rows[first:last]


def sorted_by(numbers: Any) -> tuple[Int64s, Int64s]:
    """The places of numbers from 0 on in the order of these, and where each begins, and the last ends."""
    # Sorting by two bytes takes a twentieth of the time.
    narrow = numbers.astype(np.uint16) if int(numbers.max(initial=0)) < 1 << 16 else numbers
    order = np.argsort(narrow, kind="stable")
    ordered = narrow[order]
    starts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return order, np.concatenate([[0], starts, [len(ordered)]])


def in_buckets(numbers: Any, count: int, *columns: Any) -> tuple[Int64s, list[Any]]:
    """The values of columns by the number below `count` that their rows have, as columns; and where those of
    each number begin, and the last end. Equal rows keep their order.
    """
    bounds = np.zeros(count + 1, np.int64)
    for part in parts(len(numbers)):
        bounds[1:] += np.bincount(numbers[part], minlength=count)
    np.cumsum(bounds, out=bounds)
    free, found = bounds[:-1].copy(), [empty(len(column), column.dtype) for column in columns]
    for part in parts(len(numbers)):
        order, starts = sorted_by(numbers[part])
        of, counts = numbers[part][order[starts[:-1]]], np.diff(starts)
        places = np.repeat(free[of] - starts[:-1], counts) + np.arange(len(order))
        free[of] += counts
        for values, column in zip(found, columns, strict=True):
            values[places] = column[part][order]
    return bounds, found


def distinct(column: Any) -> Any:
    """The values of a column, each once and in order, as a column."""
    # np.unique of some versions makes a table of hashes, whose memory is not given back.
    ordered = np.sort(column)
    return taken(ordered, starts_of(ordered))


def numbered(column: Any) -> tuple[Any, Any]:
    """The values of a column, each once and in order; and for each row the place of its value there."""
    values = distinct(column)
    return values, made(len(column), np.int32, lambda part: np.searchsorted(values, column[part]))


def batches(bounds: Int64s) -> Iterator[slice]:
    """Groups of rows some at a time, so that they have few rows together, or are one. `bounds` is where the
    rows of each group begin, and those of the last end.
    """
    first, last = 0, len(bounds) - 1
    while first < last:
        enough = int(np.searchsorted(bounds, bounds[first] + ROWS_AT_ONCE, "right")) - 1
        yield slice(first, enough := max(enough, first + 1))
        first = enough
        release()


def reduced(how: Any, column: Any, starts: Any) -> Any:
    """What a ufunc as `np.minimum` makes of the rows of a column from each start to the next, the last to its
    end; as a column.
    """
    found = empty(len(starts), column.dtype)
    for part in parts(len(column)):
        first, last = np.searchsorted(starts, [part.start, part.stop])
        if first == len(starts) or starts[first] > part.start:
            # The rows before the first start here go on with those of the part before.
            until = min(int(starts[first]) if first < len(starts) else part.stop, part.stop)
            rest = how.reduce(column[part.start : until])
            found[first - 1] = how(found[first - 1], rest)
        if last > first:
            found[first:last] = how.reduceat(column[part], starts[first:last] - part.start)
    return found


def greatest(numbers: Any, places: Any, most: int) -> tuple[Any, Any]:
    """The places with the greatest numbers, at most so many, and those that are as good as the next."""
    values = numbers[places]
    if len(places) <= most:
        return places, places[:0]
    least = np.partition(values, len(values) - most)[len(values) - most]
    return places[values > least], places[values == least]


def runs(*columns: Any) -> tuple[Int32s, Int64s]:
    """The places of rows in the order of some columns, the first first, and where equal rows start."""
    order: Int32s = np.lexsort(columns[::-1]).astype(np.int32)
    differs = np.zeros(len(order), np.bool_)
    differs[:1] = True
    for column in columns:
        ordered = column[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(differs)


def equal(*columns: Any) -> tuple[Int32s, Int32s]:
    """A number for each row, the same for equal ones and in their order; and the first row of each number.
    Columns.
    """
    values, of = numbered(one_number(*columns))
    count, first = len(of), empty(len(values), np.int32)
    for part in parts(count):
        # From the last row on: of equal ones the first stays.
        rows = np.arange(count - part.start, count - part.stop, -1, dtype=np.int32) - 1
        first[of[rows]] = rows
    return of, first


def sort_within(numbers: Int64s, values: Int64s) -> Int64s:
    """The values of rows, none below 0, in the order of the numbers of these, and then in theirs; columns."""
    count = len(numbers)
    most = max((int(values[part].max()) for part in parts(count)), default=0)
    highest = max((int(numbers[part].max()) for part in parts(count)), default=0)
    bits = most.bit_length()
    if highest.bit_length() + bits > _BITS:
        in_order: Int64s = values[np.lexsort((values, numbers))]
        return in_order
    # Both in one integer: that sorts where it stands.
    both = np.empty(count, np.int64)
    for part in parts(count):
        both[part] = numbers[part] << bits | values[part]
    both.sort()
    ordered: Int64s = made(count, np.int64, lambda part: both[part] & ((1 << bits) - 1))
    return ordered


def starts_of(*columns: Any) -> Any:
    """The rows in which one of the columns is not as in the row before, and the first row."""

    def differs(part: slice) -> Any:
        before = slice(max(part.start - 1, 0), part.stop)
        changes = np.zeros(before.stop - before.start - 1, np.bool_)
        for column in columns:
            changes |= np.diff(column[before]) != 0
        return changes if part.start else np.r_[True, changes]

    return flagged(columns[0].size, differs)


def in_order(*columns: Any) -> Any:
    """The rows in the order of some columns, the first first, equal ones in theirs."""
    return sort_within(one_number(*columns), np.arange(columns[0].size, dtype=np.int64))


def one_number(*columns: Any) -> Any:
    """A number for each row, from 0 on, that is in the order of some columns, the first first."""
    count, bits = columns[0].size, 0
    number = np.broadcast_to(np.int64(0), count)
    for column in columns:
        least, width = _range(column)
        if bits + width > _BITS:
            # Places among all values have half as many bits at most.
            values, column = numbered(column)
            least, width = 0, len(values).bit_length()
        if bits + width > _BITS:
            values, number = numbered(number)
            bits = len(values).bit_length()
        if width:
            number = made(count, np.int64, partial(_packed, number, column, least, width))
            bits += width
    return number


def _range(column: Any) -> tuple[int, int]:
    """The least value of a column, and how many bits the others take above it."""
    ends = [(int(column[part].min()), int(column[part].max())) for part in parts(column.size)]
    least = min((low for low, _ in ends), default=0)
    return least, (max((high for _, high in ends), default=0) - least).bit_length()


def _packed(number: Any, column: Any, least: int, width: int, part: slice) -> Any:
    """Numbers, and the values of a column behind them."""
    above: Any = number[part].astype(np.int64) << width
    return above | (column[part].astype(np.int64) - least)
