"""Columns that are too long for memory: they lie in files without names, and are looked at by parts.

A file is mapped, so that its column is a numpy array like any other. Its pages count as the process's memory
once they are looked at; given back they are in the system's cache of files, which has what memory is free.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tracepipe.errors import OutputError
from tracepipe.event.columns import Bools
from tracepipe.reports.frames.libraries import np

# Shorter columns are in memory: a file costs some system calls.
_LARGE_BYTES = 1 << 20
# What a file grows by.
_STEP_BYTES = 1 << 22
# What is looked at before it is given back.
_MAPPED_BYTES = 1 << 23
_ROOM_AT_FIRST = 1 << 7
# What is looked at for a row of all columns together, at most.
_ROW_BYTES = 1 << 8
# Rows that take as long to be divided into parts as to be copied.
_FEW = 1 << 10
# <malloc.h>: from which size on memory has a mapping of its own.
_M_MMAP_THRESHOLD = -3
ROWS_AT_ONCE = 1 << 16
"""Rows of a part: what is made of them is small, and to go on to the next takes no time by comparison."""

_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_touched_bytes = 0


def give_back_at_once() -> None:
    """Have the memory of arrays given back to the system when they are freed.

    The C library keeps up to 32 MB of each for the next one, which is seldom as large.
    """
    # musl has no such function, and keeps nothing.
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def release() -> None:
    """Give back the pages of all columns. They come again where they are looked at."""
    global _touched_bytes
    _touched_bytes = 0
    for one in _maps:
        one.madvise(mmap.MADV_DONTNEED)


def touched(size_bytes: int) -> None:
    """Say that so much of columns was looked at: now and then it is given back."""
    global _touched_bytes
    _touched_bytes += size_bytes
    if _touched_bytes > _MAPPED_BYTES:
        release()


def parts(count: int, at_once: int = ROWS_AT_ONCE) -> Iterator[slice]:
    """So many rows, some at a time. What was looked at is given back after a large part or many small."""
    for start in range(0, count, at_once):
        stop = min(start + at_once, count)
        yield slice(start, stop)
        touched((stop - start) * _ROW_BYTES)


def empty(count: int, dtype: Any, width: tuple[int, ...] = ()) -> Any:
    """A column of so many values, which are not set. Raises OutputError."""
    size_bytes = count * _row_bytes(dtype, width)
    if size_bytes < _LARGE_BYTES:
        return np.empty((count, *width), dtype)
    return _File().column(size_bytes, dtype, width)


def zeros(count: int, dtype: Any, width: tuple[int, ...] = ()) -> Any:
    """A column of so many zeros. Raises OutputError."""
    column = empty(count, dtype, width)
    for part in parts(count):
        column[part] = 0
    return column


def made(count: int, dtype: Any, make: Callable[[slice], Any]) -> Any:
    """A column of what is made of each part of the rows. Raises OutputError."""
    column = empty(count, dtype)
    for part in parts(count):
        column[part] = make(part)
    return column


def put_away(values: Any) -> memoryview:
    """What an array of Python holds, as a column whose values are Python's. Raises OutputError."""
    return memoryview(stored(np.asarray(memoryview(values))))


def stored(values: Any) -> Any:
    """An array as a column. Raises OutputError."""
    return made(len(values), values.dtype, lambda part: values[part])


def taken(column: Any, rows: Any) -> Any:
    """The values of some rows, as a column; one value that stands for all still does. Raises OutputError."""
    if len(column) and not column.strides[0]:
        return np.broadcast_to(column[0], (len(rows), *column.shape[1:]))
    if len(rows) <= _FEW:
        touched(len(rows) * _ROW_BYTES)
        return column[rows]
    values = empty(len(rows), column.dtype, column.shape[1:])
    for part in parts(len(rows)):
        values[part] = column[rows[part]]
    return values


def flagged(count: int, which: Callable[[slice], Bools]) -> Any:
    """The rows that are flagged, of so many, as a column. Raises OutputError."""
    rows = Growing(np.int32)
    for part in parts(count):
        found = np.flatnonzero(which(part))
        rows.extend(found + part.start, len(found))
    return rows.whole()


def unnamed_file() -> int:
    """A file that is gone with this process however that ends. Raises OSError."""
    with tempfile.TemporaryFile(prefix="tracepipe-", buffering=0) as file:
        return os.dup(file.fileno())


def no_room(what: str, error: OSError) -> OutputError:
    """What to say where something cannot be kept in such a file."""
    return OutputError(
        f"cannot keep {what} in {tempfile.gettempdir()}: {error.strerror}",
        "name a folder with room in TMPDIR",
    )


def _row_bytes(dtype: Any, width: tuple[int, ...]) -> int:
    return int(np.dtype(dtype).itemsize) * math.prod(width)


class _File:
    """The file of a column."""

    def __init__(self) -> None:
        self._file: int | None = None
        self.size_bytes = 0

    def column(self, size_bytes: int, dtype: Any, width: tuple[int, ...]) -> Any:
        """What it holds, which has so many bytes from now on. Raises OutputError."""
        try:
            if self._file is None:
                self._file = unnamed_file()
                weakref.finalize(self, os.close, self._file)
            # To write to a page that then finds no room on the disk would end the process.
            os.posix_fallocate(self._file, self.size_bytes, size_bytes - self.size_bytes)
            whole = mmap.mmap(self._file, size_bytes)
        except OSError as e:
            raise no_room("the events of a recording", e) from e
        self.size_bytes = size_bytes
        _maps.add(whole)
        rows = size_bytes // _row_bytes(dtype, width)
        values = np.frombuffer(whole, dtype, rows * math.prod(width))
        return values.reshape(rows, *width)


class Growing:
    """A column of `count` values that grows."""

    def __init__(self, dtype: Any, width: tuple[int, ...] = ()) -> None:
        self.count, self._width = 0, width
        self._values = np.empty((0, *width), dtype)
        self._file = _File()

    def extend(self, values: Any, count: int) -> None:
        """Add `count` values, or one value `count` times. Raises OutputError."""
        last = self.count + count
        if last > len(self._values):
            self._grow(last)
        self._values[self.count : last] = values
        self.count = last
        touched(count * self._values.strides[0])

    def _grow(self, count: int) -> None:
        """Make room for so many."""
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

    def so_far(self, count: int) -> Any:
        """The first `count` values."""
        return self._values[:count]

    def whole(self) -> Any:
        """All values. The column is not to be used any more."""
        return self._values[: self.count]


def joined(columns: Iterable[Any], dtype: Any) -> Any:
    """Columns one after the other, as one. Raises OutputError."""
    whole = Growing(dtype)
    for column in columns:
        for part in parts(len(column)):
            whole.extend(column[part], part.stop - part.start)
    return whole.whole()
