"""Collected records that are not rendered to lines yet: bytes in a temporary file, and the queue of them.

However large the backlog is, memory holds only a few spans of the files, and one block of each of a few runs.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from tracepipe import disk_space
from tracepipe.errors import OutputError
from tracepipe.tracer.records.record import RECORD_BYTES, Loss

_GIVE_BACK_BYTES = 4 << 20  # of a temporary file, freed in one call
_SPAN_BYTES = 4 << 20  # the longest span, however many chunks it joins
_RUN_BYTES = (1 << 16) * RECORD_BYTES  # sorted in memory, in one pass
_BLOCK_BYTES = (1 << 12) * RECORD_BYTES  # of a run, read back in one call


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk in a temporary file, or several adjacent ones."""

    offset: int
    size_bytes: int
    of_device: bool = False


class Waiting:
    """A queue of spans and losses in the order of their arrival; None marks the end."""

    def __init__(self) -> None:
        self._items: deque[Span | Loss | None] = deque()
        self._changed = threading.Condition()

    def put(self, item: Span | Loss | None) -> None:
        """Add an item. Records that follow the last span extend it, so hours of records are only a
        few spans.
        """
        with self._changed:
            last = self._items[-1] if self._items else None
            if (
                isinstance(item, Span)
                and isinstance(last, Span)
                and not item.of_device  # a device's chunks are decoded one by one
                and not last.of_device
                and last.size_bytes + item.size_bytes <= _SPAN_BYTES
            ):
                self._items[-1] = Span(last.offset, last.size_bytes + item.size_bytes)
            else:
                self._items.append(item)
            self._changed.notify()

    def get(self, timeout_s: float | None) -> Span | Loss | None:
        """Wait for the next item, and remove it. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout_s):
                raise TimeoutError
            return self._items.popleft()


class Backlog:
    """A temporary file that leaves nothing behind, however this process ends. Raises OutputError."""

    def __init__(self, size_bytes: int | None = None) -> None:
        """`size_bytes`: reserve this much; where the disk has no room for it, the file is in memory."""
        try:
            self._file = _without_name() if size_bytes is None else _with_room(size_bytes)
        except OSError as error:
            raise OutputError(
                f"No temporary file can be made: {error.strerror}.",
                "Set TMPDIR to a writable folder with free space.",
            ) from error
        self.size_bytes = self._done_bytes = self._given_back_bytes = 0
        self._at_once_bytes = _GIVE_BACK_BYTES
        self._giving_back = threading.Lock()

    def append(self, chunk: bytes) -> int:
        """Append a chunk, and return its offset. Raises OutputError."""
        offset = self.size_bytes
        try:
            self._write(offset, chunk)
        except OSError as error:
            if disk_space.is_full(error):
                self._at_once_bytes = 1
                self.give_back(self._done_bytes)
            raise OutputError(
                f"The events cannot be kept in {tempfile.gettempdir()}: {error.strerror}.",
                "ulimit -f unlimited"
                if error.errno == errno.EFBIG
                else "Set TMPDIR to a folder with free space.",
            ) from error
        self.size_bytes += len(chunk)
        return offset

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Read `size_bytes` at an offset. Raises OSError."""
        parts = []
        while size_bytes and (part := os.pread(self._file.fileno(), size_bytes, offset)):
            parts.append(part)
            offset, size_bytes = offset + len(part), size_bytes - len(part)
        if size_bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def give_back(self, end: int) -> None:
        """Free the disk space before `end`, as a capture may last for days. It is freed some megabytes at a
        time, or immediately once the disk was full.
        """
        end -= end % mmap.PAGESIZE  # a page that is freed in two parts is not freed at all
        with self._giving_back:
            self._done_bytes = end
            if end - self._given_back_bytes >= self._at_once_bytes:
                disk_space.give_back(
                    self._file.fileno(), self._given_back_bytes, end - self._given_back_bytes
                )
                self._given_back_bytes = end

    def in_order(
        self,
        learn: Callable[[bytes], object],
        is_over: Callable[[], bool],
        lose: Callable[[int, OSError], object],
    ) -> Iterator[bytes]:
        """All records in order of time; records of the same time keep their order. `learn` gets every record
        first. `lose` gets the number of bytes that cannot be read back or written in order, and the error.

        Runs are sorted in place, then merged. Records are out of order by milliseconds, rarely by more, so a
        run is opened only when the merge reaches the time of its first record, and few runs are open
        together. Once `is_over`, the records are returned unsorted.
        """
        runs: list[_Run] = []
        for offset in range(0, self.size_bytes, _RUN_BYTES):
            size_bytes = min(_RUN_BYTES, self.size_bytes - offset)
            try:
                data = self.read(offset, size_bytes)
                if is_sorted := not is_over():
                    learn(data)
                    data = _by_time(data)
                    self._write(offset, data)
            except OSError as error:
                lose(size_bytes, error)
                continue
            if is_sorted:
                runs.append(_Run(self, offset, size_bytes, _times(data)[0], len(runs), lose))
            else:
                yield data
        yield from _merged(runs)

    def close(self) -> None:
        """Free the file."""
        self._file.close()

    def _write(self, offset: int, data: bytes) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._file.fileno(), data[written:], offset + written)


def _without_name() -> BinaryIO:
    return tempfile.TemporaryFile(prefix="tracepipe-", buffering=0)


def _with_room(size_bytes: int) -> BinaryIO:
    """A temporary file with that much space reserved on its disk, or one in memory. Raises OSError."""
    with suppress(OSError):
        file = _without_name()
        try:
            disk_space.reserve(file.fileno(), 0, size_bytes)
        except OSError:
            file.close()
        else:
            return file
    return os.fdopen(os.memfd_create("tracepipe"), "w+b", buffering=0)


class _Run:
    """Sorted records, read a block at a time. `number` is the run's place in the order of collection."""

    def __init__(
        self,
        backlog: Backlog,
        offset: int,
        size_bytes: int,
        first_ns: int,
        number: int,
        lose: Callable[[int, OSError], object],
    ) -> None:
        self._backlog, self._offset, self._unread_bytes = backlog, offset, size_bytes
        self.first_ns, self.number, self._lose = first_ns, number, lose
        self._block = b""

    def fill(self) -> bool:
        """Read the next block if the last one is used up. Returns False at the end."""
        while self._unread_bytes and not self._block:
            size_bytes = min(_BLOCK_BYTES, self._unread_bytes)
            try:
                self._block = self._backlog.read(self._offset, size_bytes)
            except OSError as error:
                self._lose(size_bytes, error)
            self._offset += size_bytes
            self._unread_bytes -= size_bytes
        return bool(self._block)

    def last(self) -> tuple[int, int]:
        """The time of the last record that was read, and the run's number, which orders records of the same
        time.
        """
        return _times(self._block)[-1], self.number

    def take(self, until: tuple[int, int]) -> bytes:
        """Remove and return the records that were read, up to this place in the order."""
        bisect = bisect_right if self.number <= until[1] else bisect_left
        size_bytes = bisect(_times(self._block), until[0]) * RECORD_BYTES
        taken, self._block = self._block[:size_bytes], self._block[size_bytes:]
        return taken


def _merged(runs: list[_Run]) -> Iterator[bytes]:
    """Merge sorted runs into records in order."""
    unopened = sorted(runs, key=lambda run: (run.first_ns, run.number), reverse=True)
    opened: list[_Run] = []
    while True:
        opened = [run for run in opened if run.fill()]
        until = min((run.last() for run in opened), default=None)
        if unopened and (until is None or (unopened[-1].first_ns, unopened[-1].number) <= until):
            opened.append(unopened.pop())
        elif until is None:
            return
        else:
            yield _by_time(b"".join(run.take(until) for run in sorted(opened, key=lambda run: run.number)))


def _times(records: bytes) -> memoryview:
    """The time of each record: the second of its eight words, after the ring's header."""
    return memoryview(records).cast("Q")[1 :: RECORD_BYTES // 8]


def _by_time(records: bytes) -> bytes:
    """The records sorted by time; those of the same time keep their order."""
    times = _times(records).tolist()
    order = sorted(range(len(times)), key=times.__getitem__)
    return b"".join([records[at * RECORD_BYTES : (at + 1) * RECORD_BYTES] for at in order])
