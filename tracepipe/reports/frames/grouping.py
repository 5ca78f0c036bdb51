"""Groups rows by numbers, sorts them, and numbers equal rows. All columns have the shape `(rows,)`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from tracepipe.event.columns import Bools, Int32s, Int64s
from tracepipe.reports.frames.arrays import AnyArray, Ints, T
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import ROWS_AT_ONCE, empty, flagged, made, parts, release, stored, taken

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BITS = 63


def grouped(numbers: Ints) -> Iterator[tuple[int, Int64s]]:
    """Yield each distinct non-negative number, sorted, with the rows that have it, in their order."""
    if not len(numbers):
        return
    order, bounds = sorted_by(numbers)
    for first, last in pairwise(bounds.tolist()):
        yield int(numbers[order[first]]), order[first:last]


def each(numbers: Ints) -> Iterator[int]:
    """Yield the numbers of a column as Python integers."""
    for part in parts(len(numbers)):
        yield from numbers[part].tolist()


class Grouped:
    """Rows by a non-negative number that each has. The rows of a number keep their order, and are a part of a
    column.
    """

    def __init__(self, numbers: Ints, rows: Ints) -> None:
        self._rows, self._bounds = rows, np.zeros(1, np.int64)
        self._numbers: Ints = np.empty(0, np.int64)
        if len(numbers):
            order, self._bounds = sorted_by(numbers)
            self._numbers = taken(numbers, order[self._bounds[:-1]])
            self._rows = taken(rows, order)
            self._bounds = stored(self._bounds)

    def of(self, number: int) -> Ints:
        """The rows that have a number."""
        at = int(np.searchsorted(self._numbers, number))
        if at == len(self._numbers) or self._numbers[at] != number:
            return self._rows[:0]
        return self._rows[self._bounds[at] : self._bounds[at + 1]]

    def __iter__(self) -> Iterator[tuple[int, Ints]]:
        for part in parts(len(self._numbers)):
            bounds = self._bounds[part.start : part.stop + 1].tolist()
            for number, (first, last) in zip(self._numbers[part].tolist(), pairwise(bounds), strict=True):
                yield number, self._rows[first:last]


def sorted_by(numbers: Ints) -> tuple[Int64s, Int64s]:
    """The indices that sort non-negative numbers, and the first index of each distinct number, with the end
    of the last. Equal numbers keep their order.
    """
    # Sorting 16-bit numbers takes a twentieth of the time.
    narrow = numbers.astype(np.uint16) if int(numbers.max(initial=0)) < 1 << 16 else numbers
    order = np.argsort(narrow, kind="stable")
    ordered = narrow[order]
    starts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return order, np.concatenate([[0], starts, [len(ordered)]])


def in_buckets(numbers: Ints, count: int, *columns: NDArray[T]) -> tuple[Int64s, list[NDArray[T]]]:
    """Sort columns by a number below `count` that each row has. Return the first row of each number, with the
    end of the last, shape `(count + 1,)`, and the sorted columns. Equal rows keep their order.
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


def distinct(column: NDArray[T]) -> NDArray[T]:
    """The sorted distinct values of a column, shape `(values,)`."""
    # np.unique of some versions of numpy makes a hash table, whose memory is not returned to the system.
    ordered = np.sort(column)
    return taken(ordered, starts_of(ordered))


def numbered(column: NDArray[T]) -> tuple[NDArray[T], Int32s]:
    """The sorted distinct values of a column, and for each row the index of its value."""
    values = distinct(column)
    return values, made(len(column), np.int32, lambda part: np.searchsorted(values, column[part]))


def batches(bounds: Ints) -> Iterator[slice]:
    """Yield slices of groups with few rows together, or single groups. `bounds` has the first row of each
    group, and the end of the last.
    """
    first, last = 0, len(bounds) - 1
    while first < last:
        enough = int(np.searchsorted(bounds, bounds[first] + ROWS_AT_ONCE, "right")) - 1
        yield slice(first, enough := max(enough, first + 1))
        first = enough
        release()


def reduced(how: np.ufunc, column: NDArray[T], starts: Ints) -> NDArray[T]:
    """Reduce the rows of a column from each start to the next with a ufunc such as `np.minimum`. Shape
    `(starts,)`.
    """
    found = empty(len(starts), column.dtype)
    for part in parts(len(column)):
        first, last = np.searchsorted(starts, [part.start, part.stop])
        if first == len(starts) or starts[first] > part.start:
            # The rows before the first start belong to the last group of the part before.
            until = min(int(starts[first]) if first < len(starts) else part.stop, part.stop)
            rest = how.reduce(column[part.start : until])
            found[first - 1] = how(found[first - 1], rest)
        if last > first:
            found[first:last] = how.reduceat(column[part], starts[first:last] - part.start)
    return found


def greatest(numbers: AnyArray, places: NDArray[T], most: int) -> tuple[NDArray[T], NDArray[T]]:
    """The places with the greatest numbers, fewer than `most`, and the places whose equal numbers compete for
    the rest of `most`.
    """
    values = numbers[places]
    if len(places) <= most:
        return places, places[:0]
    least = np.partition(values, len(values) - most)[len(values) - most]
    return places[values > least], places[values == least]


def runs(*columns: AnyArray) -> tuple[Int32s, Int64s]:
    """The indices that sort rows by some columns, the first column first, and the starts of equal rows among
    them.
    """
    order: Int32s = np.lexsort(columns[::-1]).astype(np.int32)
    differs = np.zeros(len(order), np.bool_)
    differs[:1] = True
    for column in columns:
        ordered = column[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(differs)


def equal(*columns: AnyArray) -> tuple[Int32s, Int32s]:
    """A number for each row, equal for equal rows and in their sort order, and the first row of
    each number.
    """
    values, of = numbered(one_number(*columns))
    count, first = len(of), empty(len(values), np.int32)
    for part in parts(count):
        # In reverse, so the first of equal rows is written last, and stays.
        rows = np.arange(count - part.start, count - part.stop, -1, dtype=np.int32) - 1
        first[of[rows]] = rows
    return of, first


def sort_within(numbers: Ints, values: Int64s) -> Int64s:
    """Non-negative values, sorted by the number of their rows, then by value."""
    count = len(numbers)
    most = max((int(values[part].max()) for part in parts(count)), default=0)
    highest = max((int(numbers[part].max()) for part in parts(count)), default=0)
    bits = most.bit_length()
    if highest.bit_length() + bits > _BITS:
        in_order: Int64s = values[np.lexsort((values, numbers))]
        return in_order
    # Both in one integer, which is sorted in place.
    both = np.empty(count, np.int64)
    for part in parts(count):
        both[part] = numbers[part] << bits | values[part]
    both.sort()
    ordered: Int64s = made(count, np.int64, lambda part: both[part] & ((1 << bits) - 1))
    return ordered


def starts_of(*columns: AnyArray) -> Int32s:
    """The rows in which any of the columns differs from the row before, and the first row. Shape `(n,)`."""

    def differs(part: slice) -> Bools:
        before = slice(max(part.start - 1, 0), part.stop)
        changes = np.zeros(before.stop - before.start - 1, np.bool_)
        for column in columns:
            changes |= np.diff(column[before]) != 0
        return changes if part.start else np.r_[True, changes]

    return flagged(columns[0].size, differs)


def in_order(*columns: AnyArray) -> Int64s:
    """The row numbers sorted by some columns, the first column first; equal rows keep their order."""
    return sort_within(one_number(*columns), np.arange(columns[0].size, dtype=np.int64))


def one_number(*columns: AnyArray) -> Ints:
    """A non-negative number for each row, whose order is that of some columns, the first column first."""
    count, bits = columns[0].size, 0
    number: Ints = np.broadcast_to(np.int64(0), count)
    for column in columns:
        least, width = _range(column)
        if bits + width > _BITS:
            # Indices of distinct values have at most half as many bits.
            values, column = numbered(column)
            least, width = 0, len(values).bit_length()
        if bits + width > _BITS:
            values, number = numbered(number)
            bits = len(values).bit_length()
        if width:
            number = made(count, np.int64, partial(_packed, number, column, least, width))
            bits += width
    return number


def _range(column: AnyArray) -> tuple[int, int]:
    """The least value of a column, and the number of bits of the differences to it."""
    ends = [(int(column[part].min()), int(column[part].max())) for part in parts(column.size)]
    least = min((low for low, _ in ends), default=0)
    return least, (max((high for _, high in ends), default=0) - least).bit_length()


def _packed(number: Ints, column: AnyArray, least: int, width: int, part: slice) -> Int64s:
    """A part of the numbers, each with the value of a column in its low bits."""
    above = number[part].astype(np.int64) << width
    return above | (column[part].astype(np.int64) - least)
