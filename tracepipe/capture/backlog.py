"""What was collected and has not become lines yet: bytes on a disk, and the order in which their turn comes.

However far the lines are behind, memory holds some spans of the files and a block of each of a few of them.
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

from tracepipe import room
from tracepipe.capture.records.loss import Loss
from tracepipe.capture.records.record import RECORD_BYTES
from tracepipe.errors import OutputError

_GIVE_BACK_BYTES = 4 << 20  # of a temporary file at once
_SPAN_BYTES = 4 << 20  # what waits as one span, however many chunks it was
_RUN_BYTES = (1 << 16) * RECORD_BYTES  # sorted at once, in memory
_BLOCK_BYTES = (1 << 12) * RECORD_BYTES  # of a run that is read again at once


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk in a temporary file, or several that follow each other."""

    offset: int
    size_bytes: int
    of_device: bool = False


class Waiting:
    """Spans and losses in the order in which they came; None is the end."""

    def __init__(self) -> None:
        self._items: deque[Span | Loss | None] = deque()
        self._changed = threading.Condition()

    def put(self, item: Span | Loss | None) -> None:
        """Add an item. Records that follow the last span lengthen it: hours of them are some spans."""
        with self._changed:
            last = self._items[-1] if self._items else None
            if (
                isinstance(item, Span)
                and isinstance(last, Span)
                and not item.of_device  # whose chunks are decoded one by one
                and not last.of_device
                and last.size_bytes + item.size_bytes <= _SPAN_BYTES
            ):
                self._items[-1] = Span(last.offset, last.size_bytes + item.size_bytes)
            else:
                self._items.append(item)
            self._changed.notify()

    def get(self, timeout_s: float | None) -> Span | Loss | None:
        """The next item. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout_s):
                raise TimeoutError
            return self._items.popleft()


class Backlog:
    """A temporary file of which nothing is left, however this process ends. Raises OutputError."""

    def __init__(self, size_bytes: int | None = None) -> None:
        """`size_bytes`: this much comes from memory, and stays there where a disk has no room."""
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
        """Keep a chunk; where it begins. Raises OutputError."""
        offset = self.size_bytes
        try:
            self._write(offset, chunk)
        except OSError as error:
            if room.is_full(error):
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
        """Some of it. Raises OSError."""
        parts = []
        while size_bytes and (part := os.pread(self._file.fileno(), size_bytes, offset)):
            parts.append(part)
            offset, size_bytes = offset + len(part), size_bytes - len(part)
        if size_bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def give_back(self, end: int) -> None:
        """Give back the room of all before `end`: a capture may last for days. Some megabytes at once, or all
        that there is once the disk was full.
        """
        end -= end % mmap.PAGESIZE  # of a page that is given back in two parts, nothing is
        with self._giving_back:
            self._done_bytes = end
            if end - self._given_back_bytes >= self._at_once_bytes:
                room.give_back(self._file.fileno(), self._given_back_bytes, end - self._given_back_bytes)
                self._given_back_bytes = end

    def in_order(
        self,
        learn: Callable[[bytes], object],
        is_over: Callable[[], bool],
        lose: Callable[[int, OSError], object],
    ) -> Iterator[bytes]:
        """All records by time, those of one time as they came; `learn` is given all of them before. `lose` is
        given how many bytes cannot be read back, or written in order, and why.

        Runs are sorted where they lie, then merged. Records are out of order by milliseconds, seldom by more:
        a run is opened when the time has come to its first record, and a few are open at once. When it is
        over, they come as they lie.
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
        """Give all of it back."""
        self._file.close()

    def _write(self, offset: int, data: bytes) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._file.fileno(), data[written:], offset + written)


def _without_name() -> BinaryIO:
    return tempfile.TemporaryFile(prefix="tracepipe-", buffering=0)


def _with_room(size_bytes: int) -> BinaryIO:
    """A temporary file that has so much room on its disk, or one in memory. Raises OSError."""
    with suppress(OSError):
        file = _without_name()
        try:
            room.reserve(file.fileno(), 0, size_bytes)
        except OSError:
            file.close()
        else:
            return file
    return os.fdopen(os.memfd_create("tracepipe"), "w+b", buffering=0)


class _Run:
    """Records that are sorted, read a block at a time. `number` says how early it was collected."""

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
        """Read on if all that was read is taken; False at the end."""
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
        """Time of the last record that was read, and the run's number, which orders those of one time."""
        return _times(self._block)[-1], self.number

    def take(self, until: tuple[int, int]) -> bytes:
        """What was read up to this place in the order."""
        bisect = bisect_right if self.number <= until[1] else bisect_left
        size_bytes = bisect(_times(self._block), until[0]) * RECORD_BYTES
        taken, self._block = self._block[:size_bytes], self._block[size_bytes:]
        return taken


def _merged(runs: list[_Run]) -> Iterator[bytes]:
    """Records in order, of runs that are each in order."""
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
    """The time of each: the second word of its eight, behind the ring's own."""
    return memoryview(records).cast("Q")[1 :: RECORD_BYTES // 8]


def _by_time(records: bytes) -> bytes:
    """Sorted; records of one time stay as they were."""
    times = _times(records).tolist()
    order = sorted(range(len(times)), key=times.__getitem__)
    return b"".join([records[at * RECORD_BYTES : (at + 1) * RECORD_BYTES] for at in order])
