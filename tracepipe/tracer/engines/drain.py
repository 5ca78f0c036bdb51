"""The ring of a capture, which a thread empties into a file when its content is not collected in time.

    kernel ─▶ ring ───────────────────────────────────▶ chunks, when they are taken
                └─▶ temporary file without a name ─▶┘

That thread waits for neither the interpreter nor a processor. Where a program keeps all processors busy, the
thread that renders lines holds the interpreter while it waits for a processor, and every other Python thread
waits as long. Without the file the ring would overflow meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from tracepipe import disk_space, native
from tracepipe.tracer.bpf.maps import Ring
from tracepipe.tracer.machine.processes import runs_at_once
from tracepipe.tracer.records.record import RECORD, RECORD_BYTES

_CHUNK_BYTES = (1 << 16) * RECORD_BYTES  # taken in one call
_LEAST_BYTES = 1 << 16  # where memory is short
_GIVE_BACK_BYTES = 4 << 20  # of the file, freed in one call
# How many threads empty the ring where none may have priority: one of this many gets a processor in time.
_THREADS = 8

SHORT_S: Final = 0.002
"""At 1.3 million events a second, 170 kB arrive in this time."""
_LONG_S: Final = 0.016  # at low rates: each look at the ring takes a processor at least 20 µs
_LONG_RING_BYTES: Final = 1 << 24  # a smaller ring is looked at more often
_LITTLE: Final = 64  # a tick with less than this fraction of the ring is a quiet one


class Unread(NamedTuple):
    """Records that were moved to the file and cannot be read back; the time of the record before them."""

    records: int
    since_ns: int
    error: OSError


class Drain:
    """The records of a ring, in order; only the ring holds them without the core or a place for the file."""

    def __init__(self, map_fd: int, ring_bytes: int) -> None:
        self._longest_s = Tick(ring_bytes, is_short=False).longest_s
        self._core: Any = native.library()
        self._file = -1
        self._threads: list[threading.Thread] = []
        self.taken_bytes = self._given_back_bytes = 0
        self._last_ns, self._chunk_bytes = 0, _CHUNK_BYTES
        self._unread: Unread | None = None
        if self._core is not None:
            with suppress(OSError):  # the backlog reports that there is no place for a file
                self._file = _without_name()
            self._there = self._core.tp_ring_new(map_fd, ring_bytes, self._file) or 0
        self._ring = Ring(map_fd, ring_bytes) if self._core is None or not self._there else None

    def start(self) -> None:
        """From now on keep records that are not taken in time."""
        if self._ring is None and self._file >= 0:
            self._add_thread(self._follow)

    def _add_thread(self, follow: Callable[[], None]) -> None:
        thread = threading.Thread(target=follow, name="tracepipe-ring", daemon=True)
        with suppress(RuntimeError):  # no more threads are allowed: those that exist must be enough
            thread.start()
            self._threads.append(thread)

    @property
    def made_bytes(self) -> int:
        """The size of all records that have come into the ring so far."""
        return self._ring.made_bytes if self._ring is not None else int(self._core.tp_ring_made(self._there))

    def read(self, until_bytes: int | None = None) -> bytes:
        """The next whole records, at most some megabytes; b"" if there are none. `until_bytes`: only records
        that had arrived when `made_bytes` had this value.
        """
        try:
            return self._read(until_bytes)
        except MemoryError:
            self._chunk_bytes = _LEAST_BYTES
            return self._read(until_bytes)

    def _read(self, until_bytes: int | None) -> bytes:
        while True:
            most_bytes = self._chunk_bytes
            if until_bytes is not None:
                most_bytes = min(until_bytes - self.taken_bytes, most_bytes)
            if self._ring is not None:
                return self._noted(self._ring.read(most_bytes))
            moved_bytes = min(self._core.tp_ring_left(self._there) - self.taken_bytes, most_bytes)
            if moved_bytes:
                try:
                    chunk = os.pread(self._file, moved_bytes, self.taken_bytes)
                    if len(chunk) < RECORD_BYTES:  # another process has truncated it
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    return self._noted(chunk[: len(chunk) // RECORD_BYTES * RECORD_BYTES])
                except OSError as error:  # they are skipped
                    before = self._unread or Unread(0, self._last_ns, error)
                    self._unread = before._replace(records=before.records + moved_bytes // RECORD_BYTES)
                    self._leave(moved_bytes)
                continue
            most_bytes = min(self.made_bytes - self.taken_bytes, most_bytes)
            if not most_bytes:
                return b""
            there = ctypes.create_string_buffer(most_bytes)
            size_bytes = self._core.tp_ring_copy(self._there, self.taken_bytes, there, most_bytes)
            if size_bytes >= 0:
                # If this raises MemoryError, the records are still in the ring.
                chunk = ctypes.string_at(there, size_bytes)
                if self._core.tp_ring_leave(self._there, self.taken_bytes, size_bytes):
                    return self._noted(chunk)

    def unread(self) -> Unread | None:
        """The records that could not be read back since the last call."""
        unread, self._unread = self._unread, None
        return unread

    def stop(self) -> None:
        """Stop after the last record; `read` still returns the rest. A second call does nothing."""
        if self._threads:
            self._core.tp_ring_end(self._there)
        while self._threads:
            self._threads.pop().join()

    def close(self) -> None:
        """Free the file and the memory."""
        self.stop()
        if self._ring is not None:
            self._ring.close()
        elif self._there:
            self._core.tp_ring_free(self._there)
            self._there = 0
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _noted(self, chunk: bytes) -> bytes:
        if chunk:
            self._last_ns = RECORD.unpack_from(chunk, len(chunk) - RECORD_BYTES)[0]
            self._leave(len(chunk))
        return chunk

    def _leave(self, size_bytes: int) -> None:
        self.taken_bytes += size_bytes
        if self._file >= 0 and self.taken_bytes - self._given_back_bytes >= _GIVE_BACK_BYTES:
            disk_space.give_back(
                self._file, self._given_back_bytes, self.taken_bytes - self._given_back_bytes
            )
            self._given_back_bytes = self.taken_bytes

    def _follow(self) -> None:
        if not runs_at_once():
            for _ in range(_THREADS - 1):
                self._add_thread(self._move)
        self._move()

    def _move(self) -> None:
        self._core.tp_ring_follow(self._there, int(SHORT_S * 1e9), int(self._longest_s * 1e9))


def _without_name() -> int:
    """A temporary file that leaves nothing behind, however this process ends. Raises OSError."""
    with tempfile.TemporaryFile(prefix="tracepipe-", buffering=0) as file:
        return os.dup(file.fileno())


class Tick:
    """The time between two looks at the ring: it grows while few records arrive, and is short again when many
    do. `wait_s` is the time until the next look.
    """

    def __init__(self, ring_bytes: int, *, is_short: bool) -> None:
        """`is_short`: keep the time short at any rate."""
        self.wait_s = SHORT_S
        self._ring_bytes = ring_bytes
        self.longest_s = max(SHORT_S, _LONG_S * min(ring_bytes / _LONG_RING_BYTES, 1))
        if is_short:
            self.longest_s = SHORT_S

    def adapt(self, size_bytes: int) -> None:
        """Adapt `wait_s` to the bytes that the last look found."""
        is_little = size_bytes * _LITTLE <= self._ring_bytes
        self.wait_s = min(2 * self.wait_s, self.longest_s) if is_little else SHORT_S
