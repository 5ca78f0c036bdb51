"""The ring emptied into a file: what is taken is what was made, with the native core and without."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cores import cores_here, running
from tests.support.waiting import wait_until
from tracepipe.tracer.bpf.maps import Ring
from tracepipe.tracer.engines import drain
from tracepipe.tracer.engines.drain import Drain
from tracepipe.tracer.records.record import RECORD, RECORD_BYTES

RING_BYTES = 4 * mmap.PAGESIZE
FULL = RING_BYTES // RECORD_BYTES  # records
_PATIENCE_S = 60.0


class Kernel:
    """The other end of a ring: memory that is laid out as the kernel's is."""

    def __init__(self) -> None:
        page = mmap.PAGESIZE
        self.map_fd = os.memfd_create("ring")
        os.truncate(self.map_fd, 2 * page + 2 * RING_BYTES)
        self._memory = mmap.mmap(self.map_fd, 0)
        view = memoryview(self._memory)
        self.consumer, self._producer = view[:8].cast("Q"), view[page : page + 8].cast("Q")
        self._data = 2 * page
        self.made = b""

    def make(self, count: int, *, busy: int = -1) -> None:
        """Records; the one at `busy` is still being written."""
        for at in range(count):
            number = len(self.made) // RECORD_BYTES
            record = (56).to_bytes(4, "little") + number.to_bytes(8, "little") * 7 + bytes(4)
            self.made += record
            self._put(number, record if at != busy else record[:3] + b"\x80" + record[4:])
        self._producer[0] += count * RECORD_BYTES

    def overtake(self, times: int) -> None:
        """Be ahead by so many rings, as whoever looks at both positions sees it that waits between them."""
        self._producer[0] += times * RING_BYTES

    def complete(self, number: int) -> None:
        self._put(number, self.made[number * RECORD_BYTES :][:RECORD_BYTES])

    def _put(self, number: int, record: bytes) -> None:
        at = self._data + number * RECORD_BYTES % RING_BYTES
        for place in (at, at + RING_BYTES):  # the kernel has it twice by mapping it twice
            self._memory[place : place + RECORD_BYTES] = record


@pytest.fixture(params=cores_here())
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with running(request.param):
        yield Kernel()


def all_of(ring: Drain) -> bytes:
    return b"".join(iter(ring.read, b""))


def test_records_arrive_in_order_however_often_the_ring_is_filled(kernel: Kernel) -> None:
    ring = Drain(kernel.map_fd, RING_BYTES)
    taken = b""
    for count in (0, 1, FULL, 7, FULL - 1):
        kernel.make(count)
        taken += all_of(ring)
        assert taken == kernel.made
        assert kernel.consumer[0] == len(kernel.made)
    assert ring.read() == b""
    ring.close()


@pytest.mark.parametrize("is_moved", [False, True])
def test_where_memory_is_short_all_is_taken_in_smaller_chunks(
    is_moved: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(function: Callable[..., bytes], size_at: int) -> Callable[..., bytes]:
        def limited(*given: Any) -> bytes:
            if given[size_at] > 2 * RECORD_BYTES:
                raise MemoryError
            return function(*given)

        return limited

    monkeypatch.setattr(drain, "_LEAST_BYTES", 2 * RECORD_BYTES)
    monkeypatch.setattr("ctypes.string_at", short(ctypes.string_at, 1))  # of the ring, after it is copied
    monkeypatch.setattr(os, "pread", short(os.pread, 1))
    monkeypatch.setattr(Ring, "read", short(Ring.read, 1))
    if is_moved:
        ring = moving(kernel)
    else:
        ring = Drain(kernel.map_fd, RING_BYTES)
        kernel.make(7)
    assert all_of(ring) == kernel.made
    assert ring.unread() is None
    ring.close()


def test_what_follows_a_record_that_is_being_written_waits_for_it(kernel: Kernel) -> None:
    ring = Drain(kernel.map_fd, RING_BYTES)
    kernel.make(5, busy=2)
    assert all_of(ring) == kernel.made[: 2 * RECORD_BYTES]
    kernel.complete(2)
    assert all_of(ring) == kernel.made[2 * RECORD_BYTES :]
    ring.close()


def test_the_ring_is_emptied_though_nothing_is_taken_and_taken_in_chunks(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_CHUNK_BYTES", 3 * RECORD_BYTES)
    monkeypatch.setattr(drain, "_GIVE_BACK_BYTES", RECORD_BYTES)
    ring = Drain(kernel.map_fd, RING_BYTES)
    ring.start()
    is_native = bool(ring._threads)
    for _ in range(5):
        kernel.make(FULL)
        if is_native:
            wait_until(lambda: kernel.consumer[0] == len(kernel.made))
            continue
        assert all_of(ring) == kernel.made[-RING_BYTES:]
    kernel.make(2)
    ring.stop()
    chunks = list(iter(ring.read, b""))
    if is_native:
        assert max(map(len, chunks)) == 3 * RECORD_BYTES
    assert b"".join(chunks) == kernel.made[-len(b"".join(chunks)) :]
    assert len(b"".join(chunks)) == (5 * RING_BYTES if is_native else 0) + 2 * RECORD_BYTES
    ring.close()


def test_the_ring_is_emptied_while_another_thread_has_the_interpreter(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Drain(kernel.map_fd, RING_BYTES)
    ring.start()
    if not ring._threads:
        pytest.skip("without the native core it is not")
    kernel.make(FULL)
    wait_until(lambda: kernel.consumer[0] == len(kernel.made))
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(10 * _PATIENCE_S)  # this thread gives it to no other
    try:
        kernel.make(FULL)
        give_up_s = time.monotonic() + _PATIENCE_S
        while kernel.consumer[0] != len(kernel.made):
            assert time.monotonic() < give_up_s
    finally:
        sys.setswitchinterval(before_s)
    ring.close()


@pytest.mark.parametrize("has_priority", [True, False])
def test_what_is_taken_while_it_is_moved_comes_once_and_in_order(
    has_priority: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "runs_at_once", lambda: has_priority)
    monkeypatch.setattr(drain, "SHORT_S", 0.0)  # each thread all the time
    ring = Drain(kernel.map_fd, RING_BYTES)
    ring.start()
    taken = b""
    for count in (FULL, 1, FULL // 2, 3, FULL // 3) * 20:
        room = FULL - (len(kernel.made) - kernel.consumer[0]) // RECORD_BYTES
        kernel.make(min(count, room))
        taken += ring.read()
    ring.stop()
    assert taken + all_of(ring) == kernel.made
    ring.close()


@pytest.mark.parametrize("has_priority", [True, False])
def test_without_a_priority_several_threads_move_large_amounts(
    has_priority: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "runs_at_once", lambda: has_priority)
    ring = Drain(kernel.map_fd, RING_BYTES)
    ring.start()
    if not ring._threads:
        pytest.skip("without the native core nothing is moved")
    wait_until(lambda: len(ring._threads) == (1 if has_priority else drain._THREADS))
    kernel.make(FULL)
    wait_until(lambda: kernel.consumer[0] == len(kernel.made))
    ring.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "tracepipe-ring"]
    assert all_of(ring) == kernel.made
    ring.close()


class Late:
    """The core as one sees it whose first look at what is moved comes just before all is moved."""

    def __init__(self, ring: Drain, kernel: Kernel) -> None:
        self._ring, self._core, self._kernel = ring, ring._core, kernel

    def tp_ring_left(self, there: int) -> int:
        seen: int = self._core.tp_ring_left(there)
        if not self._ring._threads:
            self._ring.start()
            wait_until(lambda: self._kernel.consumer[0] == len(self._kernel.made))
        return seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def test_records_that_move_between_two_looks_are_taken(kernel: Kernel) -> None:
    ring = Drain(kernel.map_fd, RING_BYTES)
    if ring._core is None:
        pytest.skip("without the native core nothing is moved")
    ring._core = Late(ring, kernel)
    kernel.make(FULL)
    assert ring.read() == kernel.made
    ring.close()


def test_no_more_is_read_at_once_than_the_ring_holds(kernel: Kernel) -> None:
    ring = Drain(kernel.map_fd, RING_BYTES)
    if ring._core is None:
        pytest.skip("without the native core nothing is moved")
    os.truncate(kernel.map_fd, 2 * mmap.PAGESIZE + RING_BYTES)  # what is read behind it ends this process
    kernel.overtake(100)
    ring.start()
    wait_until(lambda: kernel.consumer[0] == 100 * RING_BYTES)
    ring.stop()
    ring.close()


def test_where_the_file_is_full_the_ring_is_taken_from(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_without_name", lambda: os.open("/dev/full", os.O_RDWR))
    ring = Drain(kernel.map_fd, RING_BYTES)
    ring.start()
    kernel.make(9)
    assert all_of(ring) == kernel.made
    kernel.make(FULL)
    ring.stop()
    assert all_of(ring) == kernel.made[9 * RECORD_BYTES :]
    ring.close()


def test_records_before_an_instant_are_taken_before_the_rest(kernel: Kernel) -> None:
    ring = Drain(kernel.map_fd, RING_BYTES)
    kernel.make(7)
    until = ring.made_bytes
    kernel.make(5)
    assert ring.read(until) == kernel.made[:until]
    assert (ring.read(until), ring.taken_bytes) == (b"", until)
    assert ring.read() == kernel.made[until:]
    ring.close()


def moving(kernel: Kernel) -> Drain:
    """A ring of which all was moved to the file."""
    ring = Drain(kernel.map_fd, RING_BYTES)
    ring.start()
    if not ring._threads:
        ring.close()
        pytest.skip("without the native core nothing is moved")
    kernel.make(FULL)
    wait_until(lambda: kernel.consumer[0] == len(kernel.made))
    return ring


def time_of(kernel: Kernel, number: int) -> int:
    time_ns: int = RECORD.unpack_from(kernel.made, number * RECORD_BYTES)[0]
    return time_ns


def replace(descriptor: int, path: str, flags: int = os.O_RDWR) -> None:
    """Let a descriptor that is open be one of another file."""
    other = os.open(path, flags)
    os.dup2(other, descriptor)
    os.close(other)


def test_more_is_moved_when_there_is_room_again(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drain, "_without_name", lambda: os.open("/dev/full", os.O_RDWR))
    ring = Drain(kernel.map_fd, RING_BYTES)
    ring.start()
    if not ring._threads:
        pytest.skip("without the native core nothing is moved")
    kernel.make(FULL)
    wait_until(lambda: calls_of_write(ring._threads[0]) > 0)  # in vain
    replace(ring._file, str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    wait_until(lambda: kernel.consumer[0] == len(kernel.made))
    assert all_of(ring) == kernel.made
    assert ring.unread() is None
    ring.close()


def calls_of_write(thread: threading.Thread) -> int:
    """How often a thread of this process has tried to write."""
    lines = Path(f"/proc/self/task/{thread.native_id}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["syscw"])


def test_what_cannot_be_read_back_is_counted_and_the_rest_is_taken(kernel: Kernel) -> None:
    ring = moving(kernel)
    first = ring.read(2 * RECORD_BYTES)
    replace(ring._file, "/proc/self/mem")  # where there is nothing at so low an address: EIO
    kernel.make(3)
    assert first + all_of(ring) == kernel.made[: 2 * RECORD_BYTES] + kernel.made[-3 * RECORD_BYTES :]
    unread = ring.unread()
    assert unread is not None
    assert (unread.records, unread.since_ns) == (FULL - 2, time_of(kernel, 1))
    assert unread.error.errno == errno.EIO
    assert ring.unread() is None
    ring.close()


def test_a_file_that_somebody_cut_is_read_as_far_as_it_goes(kernel: Kernel) -> None:
    ring = moving(kernel)
    os.truncate(ring._file, 2 * RECORD_BYTES + 1)
    assert all_of(ring) == kernel.made[: 2 * RECORD_BYTES]
    unread = ring.unread()
    assert unread is not None
    assert (unread.records, unread.since_ns) == (FULL - 2, time_of(kernel, 1))
    ring.close()


def test_without_a_place_for_files_the_ring_is_taken_from(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise OSError

    monkeypatch.setattr(drain, "_without_name", refuse)
    ring = Drain(kernel.map_fd, RING_BYTES)
    ring.start()
    kernel.make(9)
    assert ring.read() == kernel.made
    ring.close()


def test_nothing_stays_open(kernel: Kernel) -> None:
    gc.collect()  # what other tests left open
    before = set(os.listdir("/proc/self/fd"))
    ring = Drain(kernel.map_fd, RING_BYTES)
    ring.start()
    ring.close()
    ring.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_without_room_for_a_thread_the_ring_is_taken_from(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ring = Drain(kernel.map_fd, RING_BYTES)
    ring.start()
    kernel.make(9)
    ring.stop()
    assert all_of(ring) == kernel.made
    ring.close()
