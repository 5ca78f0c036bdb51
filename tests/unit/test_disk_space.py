"""Room on a disk, asked for and given back, on a file system that does either."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tracepipe import disk_space
from tracepipe.recording.compression import compressing


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 256 KiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_what_is_reserved_can_be_written_when_the_disk_is_full(disk: Path) -> None:
    with (disk / "ours").open("wb", buffering=0) as ours, (disk / "theirs").open("wb", buffering=0) as theirs:
        disk_space.reserve(ours.fileno(), 0, 100_000)
        assert (disk / "ours").stat().st_size == 0
        assert theirs.write(bytes(300_000)) < 180_000
        with pytest.raises(OSError, match="No space left"):
            disk_space.reserve(ours.fileno(), 0, 200_000)
        assert ours.write(b"x" * 100_000) == 100_000


def test_freed_space_can_be_written_by_others(disk: Path) -> None:
    with (
        (disk / "ours").open("w+b", buffering=0) as ours,
        (disk / "theirs").open("wb", buffering=0) as theirs,
    ):
        ours.write(b"x" * 262_144)
        disk_space.give_back(ours.fileno(), 0, 131_072)
        assert theirs.write(bytes(100_000)) == 100_000
        assert (disk / "ours").stat().st_size == 262_144
        assert ours.seek(131_071) and ours.read(2) == b"\0x"


def test_reserving_does_nothing_where_the_system_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/null").open("wb") as device:
        disk_space.reserve(device.fileno(), 0, 100)
        disk_space.give_back(device.fileno(), 0, 100)
    monkeypatch.setattr(disk_space.ctypes, "CDLL", lambda *_, **__: object())
    disk_space.reserve(-1, 0, 100)


@pytest.mark.parametrize("suffix", [".jsonl", ".gz", ".zst"])
def test_a_full_disk_has_room_for_a_last_line(suffix: str, disk: Path) -> None:
    path = disk / f"run{suffix}"
    out = compressing(path.open("wb", buffering=0), str(path))
    out.write(b"header\n")
    out.flush()
    numbers = iter(range(10**9))
    with pytest.raises(OSError) as caught:
        while True:
            out.write(b"".join(b"%d\n" % (next(numbers) * 7919 % 10**9) for _ in range(3000)))
            out.flush()
    assert caught.value.errno == errno.ENOSPC
    (disk / "theirs").write_bytes(b"")
    with (disk / "theirs").open("wb", buffering=0) as theirs, pytest.raises(OSError):
        while theirs.write(bytes(100_000)):  # what is left
            pass
    size_bytes = path.stat().st_size
    out.write(b"footer\n")
    out.flush()
    assert path.stat().st_size > size_bytes
    out.close()
