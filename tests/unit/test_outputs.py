"""Outputs get their names only when they are complete, and recordings are kept whatever happens."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tracepipe.errors import OutputError, TracepipeError
from tracepipe.recording import files, outputs
from tracepipe.recording.outputs import free_of, rename_new, replacing, replacing_folder, written_recording

LINES = b"line\n" * 1000


def test_a_recording_has_its_name_when_it_ends(tmp_path: Path) -> None:
    target = tmp_path / "run.jsonl"
    with written_recording(str(target), force=False) as out:
        out.write(b"line\n")
        assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl.part"]
    assert target.read_bytes() == b"line\n"
    with pytest.raises(OutputError, match="exists"):
        written_recording(str(target), force=False).__enter__()


def test_a_recording_that_was_never_begun_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "run.jsonl"
    target.write_text("old")
    with pytest.raises(ValueError), written_recording(str(target), force=True):
        raise ValueError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_recording_goes_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with written_recording(str(pipe), force=True) as out:
        out.write(b"line\n")
    reader.join()
    assert read == [b"line\n"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_is_not_a_recording(force: bool, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a directory"):
        written_recording(str(tmp_path), force=force).__enter__()
    assert not Path(f"{tmp_path}.part").exists()


# The name is lost --------------------------------------------------------------------------------------


def lose(change: Callable[[], object], target: Path, *, force: bool = False) -> OutputError:
    """What a recording ends with when something changes while it is written."""
    with pytest.raises(OutputError) as caught, written_recording(str(target), force=force) as out:
        out.write(LINES)
        out.flush()
        change()
        out.write(LINES)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_deleted_recording_is_written_anew(suffix: str, force: bool, tmp_path: Path) -> None:
    target = tmp_path / f"run.jsonl{suffix}"
    error = lose(Path(f"{target}.part").unlink, target, force=force)
    saved = tmp_path / f"run-2.jsonl{suffix}"
    assert f"content is in {saved}" in error.message
    assert list(tmp_path.iterdir()) == [saved]
    with files.open_input(str(saved)) as stream:
        assert b"".join(iter(lambda: stream.read(1 << 20), b"")) == 2 * LINES


def test_a_recording_whose_folder_is_deleted_is_where_the_capture_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = tmp_path / "runs"
    folder.mkdir()
    lose(lambda: shutil.rmtree(folder), folder / "run.jsonl")
    assert Path("run-2.jsonl").read_bytes() == 2 * LINES


def test_with_all_folders_deleted_it_is_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, folder = tmp_path / "temporary", tmp_path / "runs"
    temporary.mkdir()
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    error = lose(lambda: shutil.rmtree(folder), Path("run.jsonl"))
    assert str(temporary / "run-2.jsonl") in error.message
    assert (temporary / "run-2.jsonl").read_bytes() == 2 * LINES


def test_with_no_place_left_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    error = lose(lambda: shutil.rmtree(folder), Path("run.jsonl"))
    assert "cannot be saved: No such file or directory" in error.message


def test_a_recording_whose_folder_is_moved_goes_with_it(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    error = lose(lambda: before.rename(after), before / "run.jsonl")
    assert str(after / "run-2.jsonl") in error.message
    assert [path.name for path in after.iterdir()] == ["run-2.jsonl"]
    assert (after / "run-2.jsonl").read_bytes() == 2 * LINES


def test_a_recording_that_is_renamed_keeps_the_name_that_it_was_given(tmp_path: Path) -> None:
    target, theirs = tmp_path / "run.jsonl", tmp_path / "mine"
    error = lose(lambda: Path(f"{target}.part").rename(theirs), target)
    assert str(theirs) in error.message
    assert theirs.read_bytes() == 2 * LINES
    assert list(tmp_path.iterdir()) == [theirs]


def test_another_file_under_the_recordings_name_is_left_alone(tmp_path: Path) -> None:
    target, part = tmp_path / "run.jsonl", tmp_path / "run.jsonl.part"

    def exchange() -> None:
        part.unlink()
        part.write_text("theirs")

    lose(exchange, target)
    assert part.read_text() == "theirs"
    assert not target.exists()
    assert (tmp_path / "run-2.jsonl").read_bytes() == 2 * LINES


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_another_file_that_took_the_name_keeps_it(make: Callable[[Path], None], tmp_path: Path) -> None:
    target = tmp_path / "run.jsonl"
    (tmp_path / "run-2.jsonl").write_text("older")
    error = lose(lambda: make(target), target)
    assert "was made by another program meanwhile" in error.message
    assert os.path.lexists(target)
    assert (tmp_path / "run-2.jsonl").read_text() == "older"
    assert (tmp_path / "run-3.jsonl").read_bytes() == 2 * LINES


def test_what_ended_a_capture_is_raised_and_the_other_name_reported(tmp_path: Path) -> None:
    target = tmp_path / "run.jsonl"
    messages: list[str] = []
    with pytest.raises(KeyError), written_recording(str(target), force=False, notify=messages.append) as out:
        out.write(LINES)
        Path(f"{target}.part").unlink()
        raise KeyError
    assert (tmp_path / "run-2.jsonl").read_bytes() == LINES
    assert "run-2.jsonl" in messages[0]


# The name is in use ------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
def test_two_captures_do_not_write_one_recording(force: bool, tmp_path: Path) -> None:
    target = tmp_path / "run.jsonl"
    with written_recording(str(target), force=True) as out:
        for written in (b"", LINES):  # also before the first line
            out.write(written)
            out.flush()
            with pytest.raises(OutputError, match=r"run\.jsonl is being recorded by another capture"):
                written_recording(str(target), force=force).__enter__()
    assert target.read_bytes() == LINES


def test_a_default_name_is_not_that_of_a_running_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with written_recording(outputs.free_name("run", ".jsonl"), force=False):
        assert outputs.free_name("run", ".jsonl") == "run-2.jsonl"


@pytest.mark.parametrize("force", [False, True])
def test_an_empty_file_of_a_killed_capture_is_nothing(force: bool, tmp_path: Path) -> None:
    target = tmp_path / "run.jsonl"
    Path(f"{target}.part").touch()
    with written_recording(str(target), force=force) as out:
        out.write(LINES)
    assert target.read_bytes() == LINES


def test_records_of_a_killed_capture_are_not_thrown_away(tmp_path: Path) -> None:
    target, part = tmp_path / "run.jsonl", tmp_path / "run.jsonl.part"
    part.write_text("records")
    with pytest.raises(OutputError, match="a killed capture left it") as caught:
        written_recording(str(target), force=False).__enter__()
    assert "rename or remove it" in caught.value.hint
    messages: list[str] = []
    with written_recording(str(target), force=True, notify=messages.append) as out:
        out.write(LINES)
    assert target.read_bytes() == LINES
    assert (tmp_path / "run-2.jsonl").read_text() == "records"
    assert messages == [f"{part}, which a killed capture left, is {tmp_path}/run-2.jsonl now"]


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/passwd")], ids=["dir", "fifo", "link"]
)
@pytest.mark.parametrize("force", [False, True])
def test_files_that_are_not_of_a_capture_are_left_alone(
    make: Callable[[Path], None], force: bool, tmp_path: Path
) -> None:
    part = tmp_path / "run.jsonl.part"
    make(part)
    with pytest.raises(OutputError, match="exists") as caught:
        written_recording(str(tmp_path / "run.jsonl"), force=force).__enter__()
    assert caught.value.hint == "Remove it, or name another file with -o."
    assert os.path.lexists(part)


def test_a_file_that_another_capture_takes_away_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, part = tmp_path / "run.jsonl", tmp_path / "run.jsonl.part"
    lock, taken = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not taken:
            taken.append(part.unlink())
        lock(fd, how)

    monkeypatch.setattr(outputs.fcntl, "flock", flock)
    with written_recording(str(target), force=False) as out:
        out.write(LINES)
    assert target.read_bytes() == LINES


def test_a_file_system_without_locks_can_be_recorded_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(outputs.fcntl, "flock", flock)
    with written_recording(str(tmp_path / "run.jsonl"), force=False) as out:
        out.write(LINES)
    assert (tmp_path / "run.jsonl").read_bytes() == LINES


@pytest.mark.skipif(os.geteuid() != 0, reason="is what root under sudo meets")
@pytest.mark.parametrize(
    "ids", [("abc", "0"), ("1000", "-1"), ("99999999999", "1"), ("²", "1"), ("4294967295", "1")]
)
def test_a_wrong_sudo_user_is_an_error_and_leaves_nothing(
    ids: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_UID", ids[0])
    monkeypatch.setenv("SUDO_GID", ids[1])
    with pytest.raises(TracepipeError, match="SUDO_") as caught:
        written_recording(str(tmp_path / "run.jsonl"), force=False).__enter__()
    assert "env -u SUDO_UID" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_names_near_the_one_that_was_asked_for() -> None:
    names = {"run.jsonl": "run-2.jsonl", "run.jsonl.zst": "run-2.jsonl.zst", "a.b.jsonl": "a.b-2.jsonl",
             "run": "run-2", ".run": ".run-2"}  # fmt: skip
    assert {name: str(next(free_of(Path(name)))) for name in names} == names


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


def test_a_signal_while_the_file_is_made_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = outputs._begun

    def interrupted(*names: Path, **how: Any) -> int:
        made = begun(*names, **how)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # other tests have left threads
        return made

    monkeypatch.setattr(outputs, "_begun", interrupted)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with pytest.raises(SystemExit), outputs.written_recording(str(tmp_path / "run.jsonl"), force=False):
            pytest.fail("the signal came before")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == []
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
