"""A whole file gets its name over no other one, on every file system."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tracepipe.errors import OutputError
from tracepipe.recording import outputs
from tracepipe.recording.outputs import rename_new, replacing, replacing_folder


class NoFlag:
    """A C library or file system that does not know renameat2's flag."""

    def renameat2(self, *_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1


def without_links(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.fixture(params=["renameat2", "no renameat2", "no flag", "no links"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a file is renamed over no other one."""
    if request.param != "renameat2":
        library: Any = object() if request.param == "no renameat2" else NoFlag()
        monkeypatch.setattr(outputs.ctypes, "CDLL", lambda *_, **__: library)
    if request.param == "no links":
        monkeypatch.setattr(outputs.os, "link", without_links)
    return str(request.param)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_a_free_name_is_taken(make: Callable[[Path], None], way: str, tmp_path: Path) -> None:
    make(tmp_path / "made")
    rename_new(tmp_path / "made", tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("other", [Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")])
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_a_name_that_something_has_is_not(
    make: Callable[[Path], None], other: Callable[[Path], None], way: str, tmp_path: Path
) -> None:
    make(tmp_path / "made")
    other(tmp_path / "target")
    with pytest.raises(FileExistsError):
        rename_new(tmp_path / "made", tmp_path / "target")
    assert (tmp_path / "made").exists()
    assert os.path.lexists(tmp_path / "target")


def test_an_output_that_was_made_meanwhile_stays(way: str, tmp_path: Path) -> None:
    target = tmp_path / "run.pftrace"
    with pytest.raises(OutputError, match="was made by another program meanwhile") as caught:  # noqa: SIM117
        with replacing(str(target), force=False) as out:
            out.write(b"ours")
            target.write_text("theirs")
    assert caught.value.hint
    assert target.read_text() == "theirs"
    assert (tmp_path / "run-2.pftrace").read_bytes() == b"ours"
    assert len(list(tmp_path.iterdir())) == 2


def test_with_force_it_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "run.pftrace"
    with replacing(str(target), force=True) as out:
        out.write(b"ours")
        target.write_text("theirs")
    assert target.read_bytes() == b"ours"


def test_an_output_whose_half_written_file_is_deleted_is_written_anew(tmp_path: Path) -> None:
    target = tmp_path / "run.pftrace"
    with pytest.raises(OutputError, match=r"content is in .*/run-2.pftrace"):  # noqa: SIM117
        with replacing(str(target), force=False) as out:
            out.write(b"ours")
            next(tmp_path.iterdir()).unlink()
    assert (tmp_path / "run-2.pftrace").read_bytes() == b"ours"


def test_a_folder_that_was_made_meanwhile_stays(way: str, tmp_path: Path) -> None:
    target = tmp_path / "tables"
    with pytest.raises(OutputError, match="was made by another program meanwhile"):  # noqa: SIM117
        with replacing_folder(str(target), force=False) as folder:
            (folder / "a.csv").write_text("ours")
            target.mkdir()
            (target / "a.csv").write_text("theirs")
    assert (target / "a.csv").read_text() == "theirs"
    assert (tmp_path / "tables-2" / "a.csv").read_text() == "ours"
