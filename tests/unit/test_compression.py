"""Recordings are compressed as their names say, in parts that can be read wherever the file ends."""

from __future__ import annotations

import errno
import gzip
import io
import itertools
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import zstandard

from tests.support.waiting import wait_until
from tracepipe.errors import InputError, OutputError, TracepipeError
from tracepipe.recording.compression import compressing
from tracepipe.recording.convert import check
from tracepipe.recording.files import open_input
from tracepipe.recording.outputs import written_recording
from tracepipe.tracer.engines.engine import Chunk
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.request import Limits, Plan, Scope
from tracepipe.tracer.spool import PART_BYTES, Spool

SUFFIXES = [".gz", ".zst"]
HEADER = {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "start": {"monotonic_ns": 1000}}
FOOTER = {"type": "footer", "counts": {"userspace": 12}, "losses": {}}


def line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def event(number: int) -> bytes:
    phase = "BE"[number % 2]
    return line(
        {"ts_ns": 2000 + number, "type": "userspace", "name": "cuInit", "phase": phase, "pid": 1, "tid": 1}
    )


PARTS = [line(HEADER), *(event(n) + event(n + 1) + event(n + 2) for n in range(0, 12, 3)), line(FOOTER)]


EVENTS = re.compile(rb'"phase".*}')


def write(path: Path, parts: list[bytes]) -> list[int]:
    """A recording of these parts; returns the sizes in bytes that the file had after each."""
    ends = []
    with written_recording(str(path), force=True) as out:
        for part in parts:
            out.write(part)
            out.flush()
            ends.append(Path(f"{path}.part").stat().st_size)
    return ends


def read(path: Path) -> tuple[bytes, str, bool]:
    """The content, what was wrong with the rest, and whether it was cut off."""
    with open_input(str(path)) as stream:
        content = b"".join(iter(lambda: stream.read(1 << 20), b""))
        return content, stream.damage, stream.is_cut


@pytest.mark.parametrize(
    ("suffix", "unpack"), [(".gz", gzip.decompress), (".zst", zstandard.decompress), (".jsonl", bytes)]
)
def test_a_recording_is_what_its_name_says(
    suffix: str, unpack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / f"run.jsonl{suffix}"
    lines = b"".join(map(event, range(1000)))
    with written_recording(str(path), force=False) as out:
        for some in lines.splitlines(keepends=True):
            out.write(some)
    assert unpack(path.read_bytes()) == lines
    assert read(path) == (lines, "", False)
    assert (path.stat().st_size < len(lines) // 5) == (suffix != ".jsonl")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_parts_follow_each_other_and_none_is_empty(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"run{suffix}"
    ends = write(path, PARTS)
    assert ends == sorted(set(ends))
    write(path, [part for part in PARTS for part in (b"", part, b"")])
    assert (read(path)[0], path.stat().st_size) == (b"".join(PARTS), ends[-1])


class SmallDisk(io.BytesIO):
    """A file of which the disk has room for some bytes alone, and does not say so before."""

    def __init__(self, room_bytes: int) -> None:
        super().__init__()
        self.room_bytes = room_bytes
        self._real = tempfile.TemporaryFile()  # noqa: SIM115, closed with this

    def fileno(self) -> int:
        return self._real.fileno()

    def write(self, some: Any) -> int:
        room_bytes = self.room_bytes - self.tell()
        if not room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(bytes(some)[:room_bytes])


@pytest.mark.parametrize("suffix", [".jsonl", *SUFFIXES])
def test_a_part_that_the_disk_has_no_room_for_is_taken_back(suffix: str) -> None:
    file = SmallDisk(1000)
    out = compressing(file, f"run{suffix}")
    out.write(event(1))
    out.flush()
    size_bytes = len(file.getvalue())
    out.write(b"".join(event(n) for n in range(2000)))
    with pytest.raises(OSError, match="No space left"):
        out.flush()
    assert len(file.getvalue()) == size_bytes
    out.write(event(2))  # for which there is room again
    out.close()
    assert file.closed


def test_what_the_disk_did_not_take_in_the_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As network file systems say it, and disks that fail.
    def fsync(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("tracepipe.recording.compression.os.fsync", fsync)
    path = tmp_path / "run.jsonl"
    with (
        pytest.raises(OutputError, match="Input/output error"),
        written_recording(str(path), force=False) as out,
    ):
        out.write(event(1))
    assert path.read_bytes() == event(1)


def test_text_of_other_writers_is_not_removed() -> None:
    file = SmallDisk(1000)
    file.write(b"theirs\n")
    out = compressing(file, "", is_ours=False)
    out.write(bytes(2000))
    with pytest.raises(OSError, match="No space left"):
        out.flush()
    assert file.getvalue().startswith(b"theirs\n")


def test_a_pipe_that_does_not_wait_is_waited_for() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    content = b"".join(event(n) for n in range(5000))
    read: list[bytes] = []

    def read_all() -> None:
        with open(reading, "rb") as pipe:
            read.append(pipe.read())

    reader = threading.Thread(target=read_all)
    out = compressing(open(writing, "wb", buffering=0), "", is_ours=False)  # noqa: SIM115, closed below
    out.write(content)
    reader.start()
    out.close()
    reader.join()
    assert read == [content]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_off_at_any_byte_lacks_only_the_rest(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"run.jsonl{suffix}"
    ends = write(path, PARTS)
    whole = path.read_bytes()
    for size in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:size])
        content, damage, is_cut = read(path)
        complete = b"".join(part for part, end in zip(PARTS, ends, strict=True) if end <= size)
        assert content.startswith(complete)
        assert b"".join(PARTS).startswith(content)
        assert is_cut == (size not in ends)
        assert damage.startswith("was cut off in the middle of a ") == is_cut
        messages: list[str] = []
        account = check(str(path), "", messages.append)
        assert account.counts["userspace"] == len(EVENTS.findall(content))
        assert (account.skipped > 0) == is_cut
        assert all("was cut off" in text for text in messages)
        has_footer = content.rstrip().endswith(PARTS[-1].rstrip())
        assert account.notes == ([] if has_footer else ["the file has no footer: the capture was cut off"])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_ends_in_its_header_is_an_error_with_a_hint(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"run.jsonl{suffix}"
    end = write(path, PARTS)[0]
    whole = path.read_bytes()
    for size in range(end):
        path.write_bytes(whole[:size])
        if read(path)[0].rstrip() == PARTS[0].rstrip():  # all but its end or its checksum
            assert check(str(path), "", print).skipped == 1
            continue
        with pytest.raises(TracepipeError) as caught:
            check(str(path), "", print)
        assert caught.value.hint
        if suffix == ".zst" and size >= 4:
            assert isinstance(caught.value, InputError)
            assert "was cut off in the middle of a zstd frame" in caught.value.message


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_part_that_was_never_written_is_damage(suffix: str, tmp_path: Path) -> None:
    # After a power loss a file may have its size and not its data.
    path = tmp_path / f"run.jsonl{suffix}"
    ends = write(path, PARTS)
    whole = path.read_bytes()
    path.write_bytes(whole[: ends[2] + 20] + bytes(len(whole) - ends[2] - 20))
    content, damage, is_cut = read(path)
    assert content.startswith(b"".join(PARTS[:3]))
    assert damage
    assert not is_cut


def test_zeros_behind_a_member_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    path.write_bytes(gzip.compress(b"a\n") + bytes(20_000) + gzip.compress(b"b\n") + bytes(3))
    assert read(path) == (b"a\nb\n", "", False)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_disk_that_is_full_when_the_recording_ends_is_an_error(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"run{suffix}"
    os.symlink("/dev/full", path)
    with (
        pytest.raises(OutputError, match="No space left on device"),
        written_recording(str(path), force=False) as out,
    ):
        out.write(event(1))


# Lines that records become ------------------------------------------------------------------------------


class OneLineEach:
    """A renderer of records that are numbers."""

    losses: dict[str, int] = {}  # noqa: RUF012 - none, ever

    def render(self, chunk: bytes) -> Lines:
        lines = Lines()
        for at in range(len(chunk) // 64):
            lines.record(json.loads(event(at)))
        return lines

    def counts(self, chunk: bytes) -> dict[str, int]:
        return {"userspace": len(chunk) // 64}


def spooled(sink: BinaryIO, records: int, **options: Any) -> Spool:
    """A spool that was given so many records and has not ended."""
    spool = Spool(sink, OneLineEach(), **options)
    spool.begin(Plan((), (), [], Scope("command"), cast(Any, None), 0), 0)
    spool.put(Chunk(bytes(64 * records)))
    return spool


@pytest.mark.parametrize("suffix", [".jsonl", *SUFFIXES])
def test_a_size_is_that_of_the_lines_before_they_are_compressed(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"run{suffix}"
    size_bytes = 100 * len(event(0)) + 7
    with written_recording(str(path), force=False) as sink:
        spool = spooled(sink, 5_000, limits=Limits(size_bytes=size_bytes))
        spool.finish()
        assert spool.wait(60)
        spool.close()
    assert read(path)[0] == b"".join(map(event, range(100)))
    assert spool.counts == {"userspace": 100}


@pytest.mark.parametrize("suffix", [".jsonl", *SUFFIXES])
def test_lines_are_in_the_file_soon_though_no_more_come(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracepipe.tracer.spool._FLUSH_S", 0.05)
    path = tmp_path / f"run{suffix}"

    def has(lines: int) -> bool:
        return read(Path(f"{path}.part"))[0].count(b"\n") >= lines

    with written_recording(str(path), force=False) as sink:
        spool = spooled(sink, 1)
        for lines in (1, 2):  # the second time by the same clock
            wait_until(partial(has, lines))
            spool.put(Chunk(bytes(64)))
        spool.close()


class Output(io.BytesIO):
    """A file that notes where its parts ended, and has room for a number of them."""

    def __init__(self, parts: int = 1 << 30) -> None:
        super().__init__()
        self.parts, self.ends = parts, [0]

    def flush(self) -> None:
        if self.tell() == self.ends[-1]:
            return
        if len(self.ends) > self.parts:
            self.seek(self.ends[-1])
            self.truncate()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.ends.append(self.tell())


def run(spool: Spool) -> None:
    """The end of a spool's recording."""
    spool.finish()
    assert spool.wait(60)
    spool.close()


def test_a_part_that_is_full_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracepipe.tracer.spool._FLUSH_S", 1000)
    output = Output()
    run(spooled(output, 20_000))
    sizes = [end - start for start, end in itertools.pairwise(output.ends)]
    assert len(sizes) > 4
    assert all(size >= PART_BYTES for size in sizes[:-1])


def test_what_the_disk_has_no_room_for_is_counted_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracepipe.tracer.spool._FLUSH_S", 1000)
    output = Output(parts=2)
    spool = spooled(output, 20_000)
    output.parts = 3  # as a part that was taken back leaves room for the last lines
    run(spool)
    assert isinstance(spool.error, OutputError)
    assert "No space left on device" in spool.error.message
    assert spool.error.hint
    lines = [json.loads(text) for text in output.getvalue().splitlines()]
    written = sum(line["type"] == "userspace" for line in lines)
    assert spool.counts["userspace"] == written > 0
    assert spool.counts["userspace"] + spool.losses["userspace"] == 20_000
    spool.put(Chunk(bytes(64 * 5)))
    assert spool.counts["userspace"] == written


@pytest.mark.slow
def test_a_full_folder_of_temporary_files_ends_the_recording_and_loses_no_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = Output()
    spool = spooled(output, 100)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tracepipe.tracer.spool.os.pwrite", full)
    spool.put(Chunk(bytes(64 * 7)))
    spool.put(Chunk(bytes(64 * 4)))
    run(spool)
    assert isinstance(spool.error, OutputError)
    assert "TMPDIR" in spool.error.hint
    assert (spool.counts, spool.losses) == ({"userspace": 100}, {"userspace": 11})
    last = json.loads(output.getvalue().splitlines()[-1])
    assert (last["type"], last["count"], last["reason"]) == (
        "loss",
        11,
        "not written: No space left on device",
    )


@pytest.mark.parametrize(("error", "why"), [(ValueError("x"), "a bug"), (MemoryError(), "no memory")])
@pytest.mark.parametrize("is_unordered", [False, True])
def test_where_no_lines_can_be_made_the_rest_is_counted(
    error: Exception, why: str, is_unordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(OneLineEach):
        def learn(self, chunk: bytes) -> None:
            """All is known."""

        def render(self, chunk: bytes) -> Lines:
            rendered.append(chunk)
            if len(rendered) == 2:
                raise error
            return super().render(chunk)

    rendered, output = list[bytes](), io.BytesIO()
    monkeypatch.setattr("tracepipe.tracer.spool._PIECE_BYTES", 2 * 64)
    monkeypatch.setattr("tracepipe.tracer.spool._RUN_BYTES", 2 * 64)
    spool = Spool(output, Broken(), is_unordered=is_unordered)
    spool.begin(Plan((), (), [], Scope("command"), cast(Any, None), 0), 0)
    spool.put(Chunk(bytes(10 * 64)))
    run(spool)
    assert spool.error is error
    lines = len(rendered[0]) // 64
    assert (spool.counts, spool.losses) == ({"userspace": lines}, {"userspace": 10 - lines})
    last = json.loads(output.getvalue().splitlines()[-1])
    assert (last["count"], last["reason"]) == (10 - lines, f"not written: {why}")


def test_what_can_neither_be_written_nor_counted_is_a_loss_of_an_unknown_layer() -> None:
    class Broken(OneLineEach):
        def render(self, chunk: bytes) -> Lines:
            raise MemoryError

        def counts(self, chunk: bytes) -> dict[str, int]:
            raise MemoryError

    output = io.BytesIO()
    spool = Spool(output, Broken())
    spool.begin(Plan((), (), [], Scope("command"), cast(Any, None), 0), 0)
    spool.put(Chunk(bytes(10 * 64)))
    run(spool)
    assert isinstance(spool.error, MemoryError)
    assert (spool.counts, spool.losses) == ({}, {"unknown": 10})
    (loss,) = map(json.loads, output.getvalue().splitlines())
    assert (loss["count"], loss["reason"]) == (10, "at most: not written: no memory")


@pytest.mark.slow
def test_the_temporary_file_has_no_room_for_what_has_become_lines() -> None:
    spool = spooled(io.BytesIO(), 0)
    chunk = bytes(64 * 16384)
    for _ in range(16):
        spool.put(Chunk(chunk))
    spool.finish()
    assert spool.wait(60)
    status = os.fstat(spool._backlog._file.fileno())
    assert status.st_size == 16 * len(chunk)
    assert 512 * status.st_blocks < 7 * len(chunk)
    spool.close()
    assert spool.counts == {"userspace": 16 * 16384}
