"""Inputs open however they are packed, and keep what came before damage; outputs are whole or not there."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tracepipe.errors import InputError, OutputError
from tracepipe.recording import outputs
from tracepipe.recording.files import HEAD_BYTES, open_input
from tracepipe.recording.outputs import default_output, replacing, written_recording

said_by_command = partial(outputs.named_at_once, option="--command-output")

TEXT = b"".join(b'{"line":%d}\n' % n for n in range(40_000))


def zstd(data: bytes) -> bytes:
    # The checksum is what the zstd command writes too.
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def zstd_of_unknown_size(data: bytes) -> bytes:
    out = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
        writer.write(data)
    return out.getvalue()


def read_all(path: Path | str) -> tuple[bytes, str]:
    """The content as `read` gives it, and what was damaged."""
    out = []
    with open_input(str(path)) as stream:
        while piece := stream.read(10_000):
            assert len(piece) <= 10_000
            out.append(piece)
        return b"".join(out), stream.damage


half = len(TEXT) // 2
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\0\0\0" + b"size"


@pytest.mark.parametrize(
    "packed",
    [
        TEXT,
        gzip.compress(TEXT),
        gzip.compress(TEXT[:half]) + gzip.compress(TEXT[half:]),
        zstd(TEXT),
        zstd_of_unknown_size(TEXT),
        zstd(TEXT[:half]) + zstd(b"") + zstd(TEXT[half:]),
        SKIPPABLE + zstd(TEXT[:half]) + SKIPPABLE + zstd(TEXT[half:]),
    ],
    ids=["plain", "gzip", "gzip of two members", "zstd", "streamed zstd", "zstd of three frames", "pzstd"],
)
@pytest.mark.parametrize("name", ["run.jsonl", "run.gz"])
def test_content_decides_how_an_input_is_unpacked(packed: bytes, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(packed)
    assert read_all(path) == (TEXT, "")


@pytest.mark.parametrize("pack", [gzip.compress, zstd, zstd_of_unknown_size])
@pytest.mark.parametrize("cut_bytes", [1, 9, 3_000])
def test_a_cut_file_gives_what_came_before_and_is_reported(pack: Any, cut_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(pack(TEXT)[:-cut_bytes])
    read, damage = read_all(path)
    assert TEXT.startswith(read)
    assert len(read) > len(TEXT) // 3 or pack is not gzip.compress
    assert damage != ""


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_what_follows_damage_is_lost_and_what_precedes_it_is_not(pack: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    packed = bytearray(pack(TEXT))
    packed[len(packed) // 2] ^= 0xFF
    path.write_bytes(pack(TEXT) + bytes(packed))
    read, damage = read_all(path)
    assert read.startswith(TEXT)
    assert damage != ""


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_bytes_after_the_compressed_data_are_damage(pack: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(pack(TEXT) + b"a line that somebody appended\n")
    read, damage = read_all(path)
    assert read == TEXT
    assert damage != ""


def test_an_input_whose_first_byte_cannot_be_read_is_an_error() -> None:
    with pytest.raises(InputError, match="/proc/self/mem: cannot be read: Input/output error"):
        read_all("/proc/self/mem")


def test_standard_streams_that_are_closed_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="-: is closed"):
        read_all("-")
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(OutputError, match="standard output is closed"):
        replacing("-", force=False).__enter__()


def test_a_head_that_was_examined_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(gzip.compress(TEXT))
    with open_input(str(path)) as stream:
        assert stream.head() == stream.head() == TEXT[:HEAD_BYTES]
        assert stream.read(10) == TEXT[:10]
        rest = b"".join(iter(lambda: stream.read(99_999), b""))
    assert TEXT[:10] + rest == TEXT


def test_an_input_can_be_read_twice_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(zstd(TEXT))
    with open_input(str(path)) as stream:
        assert stream.read(5) == TEXT[:5]
        with stream.again() as other:
            assert other.read(20) == TEXT[:20]
        assert stream.read(5) == TEXT[5:10]


def test_the_position_is_that_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(TEXT)
    with open_input(str(path)) as stream:
        assert stream.size_bytes == len(TEXT)
        before = 0
        while stream.read(1 << 18):
            assert before < stream.position_bytes() <= len(TEXT)
            before = stream.position_bytes()
        assert stream.position_bytes() == len(TEXT)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
def test_a_pipe_with_a_name_can_be_read_twice(pack: Any, tmp_path: Path) -> None:
    # `tracepipe convert <(zcat run.jsonl.gz)`: what is read from a pipe is gone.
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(pack(TEXT),))
    writer.start()
    with open_input(str(path)) as stream, stream.again() as other:
        assert stream.read(30) == other.read(30) == TEXT[:30]
    writer.join()


def test_for_a_file_that_is_missing_the_newest_of_its_kind_is_named(tmp_path: Path) -> None:
    for at, name in enumerate(("old.jsonl", "new.jsonl", "newer.txt")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    with pytest.raises(InputError) as caught, open_input(str(tmp_path / "run.jsonl")):
        pass
    named = tmp_path / "new.jsonl"
    assert caught.value.hint == f"Check the path. The newest file there with this ending is {named}."


@pytest.mark.parametrize(("name", "why"), [("missing", "No such file"), ("", "Is a directory")])
def test_what_cannot_be_opened_is_an_input_error(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=why) as caught, open_input(str(tmp_path / name)):
        pass
    assert caught.value.path == str(tmp_path / name)
    assert caught.value.hint == "Check the path."


# Outputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "suffix", "want"),
    [
        ("run.jsonl", ".pftrace", "run.pftrace"),
        ("a.b/run.jsonl.gz", ".pftrace", "a.b/run.pftrace"),
        ("run.jsonl.zst", ".json", "run.json"),
        ("run", ".pftrace", "run.pftrace"),
        ("run.2026", ".pftrace", "run.2026.pftrace"),
        ("probe.txt", ".json", "probe.json"),
        ("run.json", ".json", "run.trace.json"),
        ("./run.json", ".json", "run.trace.json"),
        ("-", ".pftrace", "-"),
    ],
)
def test_the_output_goes_next_to_the_input_and_never_over_it(path: str, suffix: str, want: str) -> None:
    assert default_output(path, suffix) == want


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with replacing(str(target), force=False) as out:
        out.write(b"half")
        out.flush()
        assert not target.exists()
        out.write(b" and half")
    assert target.read_bytes() == b"half and half"
    assert list(tmp_path.iterdir()) == [target]
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which needs root")
@pytest.mark.parametrize("opened", [outputs.replacing, written_recording, said_by_command])
def test_files_that_are_made_under_sudo_belong_to_the_caller(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_UID", "4321")
    monkeypatch.setenv("SUDO_GID", "8765")
    with opened(str(tmp_path / "out"), force=False) as out:
        (os.fdopen(out, "wb", 0, closefd=False) if isinstance(out, int) else out).write(b"x")
    made = (tmp_path / "out").stat()
    assert (made.st_uid, made.st_gid) == (4321, 8765)


def test_an_output_that_exists_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("precious")
    with pytest.raises(OutputError, match="exists") as caught, replacing(str(target), force=False):
        pytest.fail("was opened")
    assert "--force" in caught.value.hint
    assert target.read_text() == "precious"


def test_force_replaces_it(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("old")
    with replacing(str(target), force=True) as out:
        out.write(b"new")
    assert target.read_text() == "new"


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError, InputError("bad")])
def test_a_failure_leaves_the_old_file_and_no_other(failure: Any, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("old")
    with (
        pytest.raises(failure if isinstance(failure, type) else type(failure)),
        replacing(str(target), force=True) as out,
    ):
        out.write(b"half")
        raise failure
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_for_others_to_write_has_its_name_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with said_by_command(str(out), force=False) as fd:
        os.write(fd, b"one")
        assert out.read_bytes() == b"one"
    with pytest.raises(OutputError, match="exists"), said_by_command(str(out), force=False):
        pass
    with said_by_command(str(out), force=True) as fd:
        assert out.read_bytes() == b""
    with pytest.raises(ValueError), said_by_command(str(tmp_path / "other"), force=False):
        raise ValueError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with said_by_command("/dev/null", force=False) as fd:
        os.write(fd, b"one")


def test_a_file_for_others_is_never_opened_through_a_link(tmp_path: Path) -> None:
    aim, link = tmp_path / "aim", tmp_path / "link"
    aim.write_bytes(b"kept")
    link.symlink_to(aim)
    with said_by_command(str(link), force=True) as fd:
        os.write(fd, b"new")
    assert (aim.read_bytes(), link.read_bytes()) == (b"kept", b"new")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="missing: No such file") as caught:
        replacing(str(tmp_path / "missing" / "out"), force=False).__enter__()
    assert caught.value.hint == "Name another place with -o."


@pytest.mark.parametrize(
    "opened", [outputs.replacing, written_recording, outputs.replacing_folder, said_by_command]
)
def test_a_name_that_nothing_can_have_is_an_output_error(opened: Any, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="File name too long") as caught:
        opened(str(tmp_path / ("x" * 300)), force=False).__enter__()
    option = "--command-output" if opened is said_by_command else "-o"
    assert caught.value.hint == f"Name another place with {option}."


@pytest.mark.parametrize("opened", [outputs.replacing, written_recording, said_by_command])
@pytest.mark.parametrize("force", [False, True])
def test_a_directory_is_refused_as_output(force: bool, opened: Any, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a directory"):
        opened(str(tmp_path), force=force).__enter__()


@pytest.mark.parametrize("opened", [outputs.replacing, written_recording, said_by_command])
@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_is_not_a_file_stays(force: bool, opened: Any, tmp_path: Path) -> None:
    place = tmp_path / "out"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(place))
        with pytest.raises(OutputError, match="is not a file"):
            opened(str(place), force=force).__enter__()
    assert place.is_socket()


@pytest.mark.parametrize("opened", [outputs.replacing, written_recording, said_by_command])
@pytest.mark.parametrize("force", [False, True])
def test_a_link_to_standard_output_stays(force: bool, opened: Any, tmp_path: Path) -> None:
    link = tmp_path / "stdout"
    with (tmp_path / "redirected").open("w") as out:
        link.symlink_to(f"/proc/self/fd/{out.fileno()}")
        with pytest.raises(OutputError, match="is a file that is open"):
            opened(str(link), force=force).__enter__()
    assert link.is_symlink()


def test_a_device_is_written_and_not_replaced() -> None:
    with replacing("/dev/null", force=False) as out:
        out.write(b"gone")
    assert Path("/dev/null").is_char_device()


def test_a_device_that_is_full_is_an_output_error() -> None:
    with (
        pytest.raises(OutputError, match="cannot write /dev/full: No space left on device"),
        replacing("/dev/full", force=False) as out,
    ):
        out.write(b"x" * 100)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_an_output_error_and_leaves_nothing(small_disk: Path) -> None:
    target = small_disk / "out"
    with (
        pytest.raises(OutputError, match="No space left on device") as caught,
        replacing(str(target), force=False) as out,
    ):
        out.write(b"x" * 200_000)
    assert "Free some space" in caught.value.hint
    assert list(small_disk.iterdir()) == []


def test_a_pipe_that_fills_the_temporary_folder_is_an_input_error(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError):
            fifo.write_bytes(TEXT)

    feeding = threading.Thread(target=feed)
    feeding.start()
    with pytest.raises(InputError, match="fifo: cannot be copied: No space left on device") as caught:
        read_all(fifo)
    feeding.join()
    assert str(small_disk) in caught.value.hint


def test_an_error_of_another_file_is_not_attributed_to_the_output(tmp_path: Path) -> None:
    other = FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere")
    with pytest.raises(FileNotFoundError), replacing(str(tmp_path / "out"), force=False):
        raise other
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_closed_the_pipe_needs_no_message(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), replacing(str(tmp_path / "out"), force=False):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_names_stay_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = []
    for _ in range(3):
        made.append(outputs.free_name("vec_add", ".jsonl"))
        Path(made[-1]).touch()
    assert made == ["vec_add.jsonl", "vec_add-2.jsonl", "vec_add-3.jsonl"]


def test_a_full_disk_keeps_what_was_recorded(small_disk: Path) -> None:
    target = small_disk / "run.jsonl"
    with (
        pytest.raises(OutputError, match=r"run.jsonl: No space left on device"),
        written_recording(str(target), force=False) as out,
    ):
        out.write(b"x" * 60_000)
        out.flush()
        out.write(b"x" * 7000)  # still waits when it ends
    assert target.stat().st_size == 60_000


@pytest.mark.parametrize("write", [written_recording, replacing])
def test_a_place_that_cannot_be_read_is_named(write: Any, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="x: File name too long") as caught:
        write(str(tmp_path / ("x" * 300)), force=False).__enter__()
    assert caught.value.hint == "Name another place with -o."
