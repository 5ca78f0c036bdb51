"""What waits to become lines: in order of time whatever its size, and in little memory."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.errors import OutputError
from tracepipe.tracer import spool
from tracepipe.tracer.records.record import Loss
from tracepipe.tracer.spool import Backlog, Span, Waiting

A_LOSS = Loss("userspace", 1, 0, 1, "the ring buffer was full", 0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "_RUN_BYTES", 4 * 64)
    monkeypatch.setattr(spool, "_BLOCK_BYTES", 2 * 64)


def records(times: list[int]) -> bytes:
    """Records of these times, numbered in the order of their collection."""
    return b"".join(struct.pack("<8xQQ40x", time_ns, at) for at, time_ns in enumerate(times))


def seen(pieces: Iterator[bytes]) -> list[tuple[int, int]]:
    return [(time_ns, at) for time_ns, at in struct.iter_unpack("<8xQQ40x", b"".join(pieces))]


def none_lost(size_bytes: int, error: OSError) -> None:
    raise AssertionError("nothing is lost") from error


def filled(data: bytes) -> Backlog:
    kept = Backlog()
    kept.append(data[:64])
    kept.append(data[64:])
    return kept


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1)), max_size=40))
def test_records_come_by_time_and_those_of_one_time_as_they_were_collected(times: list[int]) -> None:
    kept, learnt = filled(records(times)), bytearray()
    order = seen(kept.in_order(learnt.extend, lambda: False, none_lost))
    assert order == sorted((time_ns, at) for at, time_ns in enumerate(times))
    assert learnt == records(times)
    kept.close()


def test_blocks_are_read_when_their_time_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each record stands one place too late: as disorder is in recordings.
    times = [at ^ 1 for at in range(400)]
    kept = filled(records(times))
    sizes = [len(piece) for piece in kept.in_order(lambda data: None, lambda: False, none_lost)]
    assert sum(sizes) == 400 * 64
    assert max(sizes) <= 2 * spool._RUN_BYTES
    kept.close()


def test_all_that_was_kept_still_comes_at_the_end() -> None:
    kept = filled(records([5, 4, 3, 2, 1, 0, 9, 8, 7]))
    over = iter([False, True, True])
    found = seen(kept.in_order(lambda data: None, lambda: next(over), none_lost))
    assert sorted(at for _, at in found) == list(range(9))
    kept.close()


@pytest.mark.parametrize(("cut", "is_sorted"), [(6, False), (6, True), (5, True)])
def test_what_cannot_be_read_back_is_lost_and_the_rest_comes(cut: int, is_sorted: bool) -> None:
    """Runs of four records and blocks of two: cut before runs are sorted, or while they are read again."""
    kept, lost = filled(records([3, 2, 1, 0, 7, 6, 5, 4, 8])), list[tuple[int, int | None]]()
    pieces = kept.in_order(
        lambda data: None, lambda: False, lambda size_bytes, error: lost.append((size_bytes, error.errno))
    )
    found = list[tuple[int, int]]()
    if is_sorted:
        found += seen(iter([next(pieces)]))
    os.truncate(kept._file.fileno(), cut * 64)
    found += seen(pieces)
    unread = [128, 64] if is_sorted and cut == 6 else [128, 128, 64] if is_sorted else [256, 64]
    assert lost == [(size_bytes, errno.EIO) for size_bytes in unread]
    assert [time_ns for time_ns, _ in found] == list(range(9 - sum(unread) // 64))
    kept.close()


def test_a_run_that_cannot_be_written_in_order_is_lost() -> None:
    kept, lost = filled(records([3, 2, 1, 0, 4])), list[int]()
    descriptor = kept._file.fileno()
    read_only = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.dup2(read_only, descriptor)
    os.close(read_only)
    pieces = kept.in_order(lambda data: None, lambda: False, lambda size_bytes, _: lost.append(size_bytes))
    assert (seen(pieces), lost) == ([], [256, 64])
    kept.close()


def full(descriptor: int, start: int, size_bytes: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("why", ["full", "gone"])
def test_what_is_in_memory_needs_no_disk(why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if why == "full":
        monkeypatch.setattr("tracepipe.disk_space.reserve", full)
    else:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
        with pytest.raises(OutputError, match="No temporary file can be made: No such file"):
            Backlog()
    Backlog(0).close()
    kept = Backlog(128)
    assert os.readlink(f"/proc/self/fd/{kept._file.fileno()}").startswith("/memfd:tracepipe")
    kept.append(records([1, 2]))
    assert kept.read(64, 64) == records([1, 2])[64:]
    kept.close()


def test_what_has_room_on_a_disk_leaves_memory() -> None:
    kept = Backlog(1 << 20)
    descriptor = kept._file.fileno()
    assert "memfd" not in os.readlink(f"/proc/self/fd/{descriptor}")
    kept.close()


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EFBIG, "ulimit -f unlimited"), (errno.ENOSPC, "Set TMPDIR to a folder with free space.")],
)
def test_what_cannot_be_kept_is_reported(number: int, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    kept = Backlog()
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OutputError, match=f"cannot be kept in .*: {os.strerror(number)}") as refused:
        kept.append(bytes(64))
    assert refused.value.hint == hint
    kept.close()


def test_chunks_that_follow_each_other_wait_as_one() -> None:
    waiting = Waiting()
    for at in range(1000):
        waiting.put(Span(64 * at, 64))
    waiting.put(A_LOSS)
    waiting.put(Span(64_000, 64))
    for at in range(2):  # a GPU's are decoded one by one
        waiting.put(Span(64 * at, 64, of_device=True))
    waiting.put(None)
    assert list(iter(lambda: waiting.get(0), None)) == [
        Span(0, 64_000),
        A_LOSS,
        Span(64_000, 64),
        Span(0, 64, of_device=True),
        Span(64, 64, of_device=True),
    ]
    with pytest.raises(TimeoutError):
        waiting.get(0)


def test_a_span_has_a_size_that_is_read_before_long() -> None:
    waiting = Waiting()
    for at in range(3):
        waiting.put(Span(at * spool._SPAN_BYTES, spool._SPAN_BYTES))
    assert waiting.get(0) == Span(0, spool._SPAN_BYTES)


def test_the_disk_space_of_written_records_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = mmap.PAGESIZE
    monkeypatch.setattr(spool, "_GIVE_BACK_BYTES", 2 * page)
    given: list[tuple[int, int]] = []
    monkeypatch.setattr("tracepipe.disk_space.give_back", lambda _, start, size: given.append((start, size)))
    kept = filled(records([1, 2, 3]))
    for end in (page, 2 * page + 1, 3 * page, 4 * page - 1):
        kept.give_back(end)
    assert given == [(0, 2 * page)]  # whole pages: of one that is given back in two parts, nothing is
    monkeypatch.setattr(os, "pwrite", lambda *_: full(0, 0, 0))
    with pytest.raises(OutputError):
        kept.append(bytes(64))
    kept.give_back(5 * page)  # from now on what there is
    assert given == [(0, 2 * page), (2 * page, page), (3 * page, 2 * page)]
    kept.close()
