"""Writes a recording so that nothing of it is lost: not by its end, nor by another capture or program.

    run.jsonl.part    while it is recorded; locked (flock), so that it is known to be in use
    run.jsonl         when it is over, however it ended

A .part that nobody has locked was left by a capture that was killed.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tracepipe.errors import OutputError
from tracepipe.recording.compression import compressing
from tracepipe.recording.files import STANDARD
from tracepipe.recording.naming import give_to_caller, is_file, moved_aside, output_kind, settle, writing

_ATTEMPTS = 20  # as often as another capture may make and remove the same name meanwhile

Notify = Callable[[str], None]


@contextmanager
def keeping(path: str, *, force: bool, notify: Notify = lambda _: None) -> Iterator[BinaryIO]:
    """Write a recording, under `path` + ".part" until it ends; what was written stays, whatever happened.

    `flush` ends a part of it. Raises OutputError if there is such a file already, if a capture is writing it,
    and, at the end, if the recording has another name than `path`. `force` replaces the file `path` alone:
    `notify` is called with the new name of what a killed capture left.
    """
    if path == STANDARD:
        if sys.stdout is None:
            raise OutputError("standard output is closed", "name a file with -o")
        sys.stdout.flush()
        out = compressing(getattr(sys.stdout.buffer, "raw", sys.stdout.buffer), "", is_ours=False)
        yield out
        out.flush()
        return
    target = Path(path)
    kind = output_kind(path, force=force)
    if kind in (stat.S_IFCHR, stat.S_IFIFO):  # /dev/null, a pipe: nothing to replace, least of all by root
        with writing(path):
            device = compressing(target.open("wb", buffering=0), path, is_ours=False)
        with _closed(path, device):
            yield device
        return
    part = Path(f"{path}.part")
    fd = _begun(part, target, force=force, notify=notify)
    try:
        give_to_caller(fd)
        with _closed(path, compressing(os.fdopen(fd, "r+b", buffering=0, closefd=False), path)) as out:
            yield out
    except BaseException:
        try:
            _end(fd, part, target, force=force)
        except OutputError as error:  # what came first is what is raised
            notify(f"{error.message}")
        raise
    else:
        _end(fd, part, target, force=force)
    finally:
        os.close(fd)


@contextmanager
def _closed(path: str, out: BinaryIO) -> Iterator[BinaryIO]:
    """The file, closed at the end. That writes the rest of it, and may find the disk full."""
    try:
        yield out
    finally:
        with writing(path):
            out.close()


def _end(fd: int, part: Path, target: Path, *, force: bool) -> None:
    """Give a recording its name. One that never began has none, and leaves what has it."""
    if os.fstat(fd).st_size:
        settle(fd, part, target, force=force)
    elif is_file(part, fd):
        part.unlink(missing_ok=True)


def _begun(part: Path, target: Path, *, force: bool, notify: Notify) -> int:
    """A new file that no other capture writes to, nor takes for one that was left. Raises OutputError."""
    for _ in range(_ATTEMPTS):
        try:
            # Root may be writing into another user's folder: follow no link and open nothing that is there.
            fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            _clear(part, target, force=force, notify=notify)
            continue
        except OSError as e:
            raise OutputError(f"cannot write {part}: {e.strerror}", "name another place with -o") from e
        # Before it was locked, another capture may have taken it for one that was left.
        if _is_locked_by_us(fd) and is_file(part, fd):
            return fd
        os.close(fd)
    raise OutputError(f"{part} is made and removed again and again", "name another file with -o")


def _is_locked_by_us(fd: int) -> bool:
    """Lock an open file. False where another process has; a file system without locks has none that does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _clear(part: Path, target: Path, *, force: bool, notify: Notify) -> None:
    """Make room where a killed capture left its file: an empty one goes, records never do.

    Raises OutputError if it is in use, or has records and `force` does not give it another name.
    """
    try:
        # To write, as NFS locks nothing else; nothing is written.
        fd = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as e:
        raise OutputError(f"{part} exists: {e.strerror}", "remove it, or name another file with -o") from e
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OutputError(f"{part} exists and is no file", "remove it, or name another file with -o")
        if not _is_locked_by_us(fd):
            raise OutputError(f"{target} is being recorded by another capture", "name another file with -o")
        if not is_file(part, fd):  # it got its name meanwhile
            return
        if not status.st_size:
            part.unlink()
        elif force:
            place = moved_aside(part, target)
            notify(f"{part}, which a killed capture left, is {place} now")
        else:
            raise OutputError(
                f"{part} exists: a killed capture left it",
                "read it as it is, and rename or remove it; -o names another file",
            )
    except OSError as e:
        raise OutputError(f"{part} exists: {e.strerror}", "remove it, or name another file with -o") from e
    finally:
        os.close(fd)
