"""Writes a recording so that no part of it is lost, when the capture dies or another program writes there.

    run.jsonl.part    while it is recorded; locked (flock), so that it is known to be in use
    run.jsonl         when the capture has ended for any reason

A .part that no process has locked was left by a capture that was killed.
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

_ATTEMPTS = 20  # tries, where another capture makes and removes the same name again and again

Notify = Callable[[str], None]


@contextmanager
def keeping(path: str, *, force: bool, notify: Notify = lambda _: None) -> Iterator[BinaryIO]:
    """Write a recording, as `path` + ".part" until it ends. What was written stays in every case.

    `flush` ends a part of it. Raises OutputError if such a file exists already, if a capture is writing it,
    and, at the end, if the recording has a name other than `path`. `force` replaces only the file `path`; a
    file that a killed capture left is renamed, and `notify` is called with its new name.
    """
    if path == STANDARD:
        if sys.stdout is None:
            raise OutputError("standard output is closed", "Name a file with -o.")
        sys.stdout.flush()
        out = compressing(getattr(sys.stdout.buffer, "raw", sys.stdout.buffer), "", is_ours=False)
        yield out
        out.flush()
        return
    target = Path(path)
    kind = output_kind(path, force=force)
    if kind in (stat.S_IFCHR, stat.S_IFIFO):  # /dev/null, a pipe: it must stay, above all as root
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
        except OutputError as error:  # an earlier error is raised first
            notify(f"{error.message}")
        raise
    else:
        _end(fd, part, target, force=force)
    finally:
        os.close(fd)


@contextmanager
def _closed(path: str, out: BinaryIO) -> Iterator[BinaryIO]:
    """The file, which is closed at the end. Closing writes the rest, and may find the disk full."""
    try:
        yield out
    finally:
        with writing(path):
            out.close()


def _end(fd: int, part: Path, target: Path, *, force: bool) -> None:
    """Give a recording its name. One that never began is removed, and a file of that name stays."""
    if os.fstat(fd).st_size:
        settle(fd, part, target, force=force)
    elif is_file(part, fd):
        part.unlink(missing_ok=True)


def _begun(part: Path, target: Path, *, force: bool, notify: Notify) -> int:
    """Open a new file that no other capture writes to or takes for one that was left. Raises OutputError."""
    for _ in range(_ATTEMPTS):
        try:
            # Root may write into another user's folder: links are not followed, and existing files are not
            # opened.
            fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            _clear(part, target, force=force, notify=notify)
            continue
        except OSError as e:
            raise OutputError(f"cannot write {part}: {e.strerror}", "Name another place with -o.") from e
        # Before it was locked, another capture may have taken the file for one that was left.
        if _is_locked_by_us(fd) and is_file(part, fd):
            return fd
        os.close(fd)
    raise OutputError(f"{part} is made and removed again and again", "Name another file with -o.")


def _is_locked_by_us(fd: int) -> bool:
    """Lock an open file. Return False where another process has locked it. Without locks in the file system,
    none has.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _clear(part: Path, target: Path, *, force: bool, notify: Notify) -> None:
    """Free the name of a file that a killed capture left. An empty file is removed, records never are.

    Raises OutputError if the file is in use, or if it has records and `force` is not set, with which it is
    renamed.
    """
    try:
        # It is opened for writing, as NFS locks no other files. Nothing is written.
        fd = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as e:
        raise OutputError(f"{part} exists: {e.strerror}", "Remove it, or name another file with -o.") from e
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OutputError(f"{part} exists and is not a file", "Remove it, or name another file with -o.")
        if not _is_locked_by_us(fd):
            raise OutputError(f"{target} is being recorded by another capture", "Name another file with -o.")
        if not is_file(part, fd):  # its capture has given it its name meanwhile
            return
        if not status.st_size:
            part.unlink()
        elif force:
            place = moved_aside(part, target)
            notify(f"{part}, which a killed capture left, is {place} now")
        else:
            raise OutputError(
                f"{part} exists: a killed capture left it",
                "Read it as it is and rename or remove it, or name another file with -o.",
            )
    except OSError as e:
        raise OutputError(f"{part} exists: {e.strerror}", "Remove it, or name another file with -o.") from e
    finally:
        os.close(fd)
