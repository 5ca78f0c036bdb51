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

from tracepipe import paths
from tracepipe.errors import InputError

# A journal of a transaction of several databases ends with this, and names a file with their names before it:
# SQLite would look for that file, and remove it.
_MAGIC: Final = bytes.fromhex("d9d505f920a163d7")
_TRIES: Final = 3
_AGAIN: Final = "Wait until the exporter has ended, or export it again."


def recovered(file: Path) -> Path | None:
    """The copy of a database that SQLite will recover, removed when this process ends; None for a database
    that was closed.

    Raises InputError where its files cannot be copied.
    """
    try:
        # After a transaction a journal is empty, or begins with zeros.
        if not _first_byte(file, "-wal") and _first_byte(file, "-journal") in (b"", b"\0"):
            return None
        for _ in range(_TRIES):
            before = paths.identity(file)
            folder = _copied(file, before)
            if paths.identity(file) == before:
                return Path(folder.name, file.name)
    except OSError as e:
        raise InputError(f"cannot be recovered: {e.strerror}: {e.filename}", _AGAIN) from e
    raise InputError("changes while it is read: its exporter still writes it", _AGAIN)


def _first_byte(file: Path, ending: str) -> bytes:
    """The first byte of a file next to the database, empty where there is none. Raises OSError."""
    try:
        with _opened(Path(f"{file}{ending}")) as opened:
            return opened.read(1)
    except FileNotFoundError:
        return b""


def _opened(path: Path) -> BinaryIO:
    """A file, which is no link, pipe or device. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a file", str(path))
    return os.fdopen(descriptor, "rb")


# A database is opened twice: to look what it is, and to read it.
@lru_cache(maxsize=2)
def _copied(file: Path, identity: paths.Identity) -> tempfile.TemporaryDirectory[str]:
    """A folder with copies of the files that are there. Raises OSError, and InputError for a journal of
    several databases.
    """
    folder = tempfile.TemporaryDirectory(prefix="tracepipe-")
    for ending, found in zip(("", *paths.SQLITE_SIDECARS), identity, strict=True):
        if found is None:
            continue
        with (
            _opened(Path(f"{file}{ending}")) as source,
            Path(folder.name, file.name + ending).open("w+b") as copy,
        ):
            copyfileobj(source, copy)
            # The copy is examined, as its owner may replace the journal at any time.
            copy.seek(-min(len(_MAGIC), copy.tell()), os.SEEK_END)
            if ending == "-journal" and copy.read() == _MAGIC:
                raise InputError(f"cannot be recovered: {file.name}-journal is of several databases", _AGAIN)
    return folder
