"""Recovers databases of SQLite whose writer was killed, or still runs.

    run.sqlite           may lack what was committed, or have what never was
    run.sqlite-wal       pages of transactions that are not in the database yet
    run.sqlite-journal   pages as they were before a transaction that did not end: a hot journal

SQLite recovers such a database when it opens it, which writes to it. A recording is never changed, so this is
done with a private copy of all its files.
"""

from __future__ import annotations

import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO, Final

from tracepipe.errors import InputError

_SIDECARS: Final = ("-wal", "-journal")
# A journal of a transaction of several databases ends with this, and names a file with their names before it:
# SQLite would look for that file, and remove it.
_MAGIC: Final = bytes.fromhex("d9d505f920a163d7")
_TRIES: Final = 3
_AGAIN: Final = "Wait until the exporter has ended, or export it again."
Identity = tuple[tuple[int, int, int, int] | None, ...]


def recovered(file: Path) -> Path | None:
    """The copy of a database that SQLite will recover, removed when this process ends; None for a database
    that was closed.

    Raises InputError where its files cannot be copied.
    """
    try:
        left = [one for one in _SIDECARS if _is_left(file, one)]
        for _ in range(_TRIES if left else 0):
            before = _identity(file)
            folder = _copied(file, before)
            if _identity(file) == before:
                return Path(folder.name, file.name)
    except OSError as e:
        raise InputError(f"cannot be recovered: {e.strerror}: {e.filename}", _AGAIN) from e
    if left:
        raise InputError("changes while it is read: its exporter still writes it", _AGAIN)
    return None


def _is_left(file: Path, sidecar: str) -> bool:
    """Whether a file beside the database has pages of a transaction. Raises OSError and InputError."""
    try:
        with _opened(Path(f"{file}{sidecar}")) as opened:
            first = opened.read(1)
            # Where a transaction has ended, its journal is empty, or begins with zeros.
            if sidecar == "-wal" or first in (b"", b"\0"):
                return sidecar == "-wal" and first != b""
            opened.seek(-min(len(_MAGIC), os.fstat(opened.fileno()).st_size), os.SEEK_END)
            if opened.read() == _MAGIC:
                raise InputError(f"cannot be recovered: {file.name}{sidecar} is of several databases", _AGAIN)
            return True
    except FileNotFoundError:
        return False


def _opened(path: Path) -> BinaryIO:
    """A file, which is no link, pipe or device. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a file", str(path))
    return os.fdopen(descriptor, "rb")


def _identity(file: Path) -> Identity:
    """Device, inode, size and time of each file: one of them changes when a file does."""
    found: list[tuple[int, int, int, int] | None] = []
    for ending in ("", *_SIDECARS):
        try:
            one = Path(f"{file}{ending}").stat()
            found.append((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns))
        except FileNotFoundError:
            found.append(None)
    return tuple(found)


# A database is opened twice: to look what it is, and to read it.
@lru_cache(maxsize=2)
def _copied(file: Path, identity: Identity) -> tempfile.TemporaryDirectory[str]:
    """A folder with copies of the files that are there. Raises OSError."""
    folder = tempfile.TemporaryDirectory(prefix="tracepipe-")
    for ending, found in zip(("", *_SIDECARS), identity, strict=True):
        if found is not None:
            with (
                _opened(Path(f"{file}{ending}")) as source,
                Path(folder.name, file.name + ending).open("wb") as out,
            ):
                copyfileobj(source, out)
    return folder
