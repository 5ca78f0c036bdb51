"""Columns that are too long for memory: they are in files without names, and are read by parts.

A file is mapped, so its column is an ordinary numpy array. Its pages count as the process's memory once they
are touched. After `release` they are in the kernel's page cache, which uses the memory that is free.

All functions that make a column raise OutputError where a file cannot be written.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic

from tracepipe.errors import OutputError
from tracepipe.event.columns import Bools, Int32s
from tracepipe.reports.frames.arrays import AnyArray, Ints, T
from tracepipe.reports.frames.libraries import np

if TYPE_CHECKING:
    from array import array

    from numpy.typing import ArrayLike, NDArray

    DType = type[T] | np.dtype[T] | str

# Shorter columns are in memory: a file costs some system calls.
_LARGE_BYTES = 1 << 20
# The least growth of a file.
_STEP_BYTES = 1 << 22
# The bytes that are touched before all pages are released.
_MAPPED_BYTES = 1 << 23
_ROOM_AT_FIRST = 1 << 7
# The most bytes that are touched for a row, in all columns together.
_ROW_BYTES = 1 << 8
# Up to this number of rows, dividing them into parts takes longer than copying them.
_FEW = 1 << 10
# <malloc.h>: the option for the size from which an allocation has a separate mapping.
_M_MMAP_THRESHOLD = -3
ROWS_AT_ONCE = 1 << 16
"""The rows of a part: their results take little memory, and the overhead for each part is negligible."""

_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_touched_bytes = 0


def give_back_at_once() -> None:
    """Make the C library return the memory of arrays to the system as soon as they are freed.

    By default it keeps up to 32 MB of each for the next one, which is seldom as large.
    """
    # musl has no such function, and keeps no memory.
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def release() -> None:
    """Release the pages of all columns. They are mapped again when they are touched."""
    global _touched_bytes
    _touched_bytes = 0
    for one in _maps:
        one.madvise(mmap.MADV_DONTNEED)


def touched(size_bytes: int) -> None:
    """Count bytes of columns that were touched, and release all pages once there are many."""
    global _touched_bytes
    _touched_bytes += size_bytes
    if _touched_bytes > _MAPPED_BYTES:
        release()


def parts(count: int, at_once: int = ROWS_AT_ONCE) -> Iterator[slice]:
    """Yield slices of `count` rows, a part at a time. Pages are released after a large part or many
    small ones.
    """
    for start in range(0, count, at_once):
        stop = min(start + at_once, count)
        yield slice(start, stop)
        touched((stop - start) * _ROW_BYTES)


def empty(count: int, dtype: DType[T], width: tuple[int, ...] = ()) -> NDArray[T]:
    """A column of `count` values that are not set; its shape is `(count, *width)`."""
    size_bytes = count * _row_bytes(dtype, width)
    if size_bytes < _LARGE_BYTES:
        return np.empty((count, *width), dtype)
    return _File().column(size_bytes, dtype, width)


def zeros(count: int, dtype: DType[T], width: tuple[int, ...] = ()) -> NDArray[T]:
    """A column of zeros; its shape is `(count, *width)`."""
    column = empty(count, dtype, width)
    for part in parts(count):
        column[part] = 0
    return column


def made(count: int, dtype: DType[T], make: Callable[[slice], ArrayLike]) -> NDArray[T]:
    """A column of shape `(count,)`; `make` returns its values for a part of the rows."""
    column = empty(count, dtype)
    for part in parts(count):
        column[part] = make(part)
    return column


def put_away(values: array[int]) -> memoryview:
    """The values of an `array.array` as a column; a memoryview, as its items are Python integers."""
    return stored(np.asarray(memoryview(values))).data


def stored(values: NDArray[T]) -> NDArray[T]:
    """An array as a column."""
    return made(len(values), values.dtype, lambda part: values[part])


def taken(column: NDArray[T], rows: Ints) -> NDArray[T]:
    """The values of some rows as a column of shape `(rows,)`. A broadcast column stays broadcast."""
    if len(column) and not column.strides[0]:
        return np.broadcast_to(column[0], (len(rows), *column.shape[1:]))
    if len(rows) <= _FEW:
        touched(len(rows) * _ROW_BYTES)
        return column[rows]
    values = empty(len(rows), column.dtype, column.shape[1:])
    for part in parts(len(rows)):
        values[part] = column[rows[part]]
    return values


def flagged(count: int, which: Callable[[slice], Bools]) -> Int32s:
    """The numbers of the rows for which `which` returns True, as a column of shape `(n,)`. `which` is called
    with parts of `count` rows.
    """
    rows = Growing(np.int32)
    for part in parts(count):
        found = np.flatnonzero(which(part))
        rows.extend(found + part.start, len(found))
    return rows.whole()


def unnamed_file() -> int:
    """The descriptor of a file that disappears with this process, however it ends. Raises OSError."""
    with tempfile.TemporaryFile(prefix="tracepipe-", buffering=0) as file:
        return os.dup(file.fileno())


def no_room(what: str, error: OSError) -> OutputError:
    """The error for data that cannot be written to such a file."""
    return OutputError(
        f"cannot keep {what} in {tempfile.gettempdir()}: {error.strerror}",
        "Name a folder with room in TMPDIR.",
    )


def _row_bytes(dtype: DType[T], width: tuple[int, ...]) -> int:
    return int(np.dtype(dtype).itemsize) * math.prod(width)


class _File:
    """The file of a column."""

    def __init__(self) -> None:
        self._file: int | None = None
        self.size_bytes = 0

    def column(self, size_bytes: int, dtype: DType[T], width: tuple[int, ...]) -> NDArray[T]:
        """Resize the file to `size_bytes`, and return its content as a column. Raises OutputError."""
        try:
            if self._file is None:
                self._file = unnamed_file()
                weakref.finalize(self, os.close, self._file)
            # Without this, writing to a page on a full disk would end the process (SIGBUS).
            os.posix_fallocate(self._file, self.size_bytes, size_bytes - self.size_bytes)
            whole = mmap.mmap(self._file, size_bytes)
        except OSError as e:
            raise no_room("the events of a recording", e) from e
        self.size_bytes = size_bytes
        _maps.add(whole)
        rows = size_bytes // _row_bytes(dtype, width)
        values = np.frombuffer(whole, dtype, rows * math.prod(width))
        return values.reshape(rows, *width)


class Growing(Generic[T]):
    """A column that grows; it has `count` values."""

    def __init__(self, dtype: DType[T], width: tuple[int, ...] = ()) -> None:
        self.count, self._width = 0, width
        self._values = np.empty((0, *width), dtype)
        self._file = _File()

    def extend(self, values: ArrayLike, count: int) -> None:
        """Append `count` values, or one value `count` times."""
        last = self.count + count
        if last > len(self._values):
            self._grow(last)
        self._values[self.count : last] = values
        self.count = last
        touched(count * self._values.strides[0])

    def _grow(self, count: int) -> None:
        """Make room for `count` values."""
        before, dtype = self._values[: self.count], self._values.dtype
        size_bytes = count * _row_bytes(dtype, self._width)
        if size_bytes < _LARGE_BYTES:
            self._values = np.empty((max(2 * count, _ROOM_AT_FIRST), *self._width), dtype)
        else:
            was_in_file = self._file.size_bytes > 0
            self._values = self._file.column(size_bytes + _STEP_BYTES, dtype, self._width)
            if was_in_file:
                return
        self._values[: self.count] = before

    def so_far(self, count: int) -> NDArray[T]:
        """The first `count` values."""
        return self._values[:count]

    def whole(self) -> NDArray[T]:
        """All values. Nothing may be appended afterwards."""
        return self._values[: self.count]


def joined(columns: Iterable[AnyArray], dtype: DType[T]) -> NDArray[T]:
    """The concatenation of columns as one column."""
    whole = Growing(dtype)
    for column in columns:
        for part in parts(len(column)):
            whole.extend(column[part], part.stop - part.start)
    return whole.whole()
