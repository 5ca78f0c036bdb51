"""Files and folders at paths, as far as this process can see them.

A folder may be closed to root too, as a user's home on NFS is, and a name may be too long: nothing is there
then. The methods of `Path` raise an OSError instead, up to Python 3.13.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SQLITE_SIDECARS: Final = ("-wal", "-journal")
"""The endings of the files that SQLite has next to a database while it writes: `run.sqlite-wal`."""
Identity = tuple[tuple[int, int, int, int] | None, ...]


def is_file(path: str | Path) -> bool:
    """Whether a regular file is there."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """Whether a folder is there."""
    return os.path.isdir(path)  # noqa: PTH112


def is_there(path: str | Path) -> bool:
    """Whether anything is there."""
    return os.path.exists(path)  # noqa: PTH110


def is_same(path: str | Path, other: str | Path) -> bool:
    """Whether both are there, and are one."""
    try:
        return os.path.samefile(path, other)  # noqa: PTH121
    except OSError:
        return False


def identity_of(status: os.stat_result) -> tuple[int, int, int, int]:
    """Device, inode, size and time of a file. One of these numbers changes when the content does."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def identity(path: str | Path) -> Identity:
    """What identifies a file, and each of `SQLITE_SIDECARS` next to it, None for one that is not there.
    Raises OSError.
    """
    found: list[tuple[int, int, int, int] | None] = []
    for ending in ("", *SQLITE_SIDECARS):
        try:
            found.append(identity_of(Path(f"{path}{ending}").stat()))
        except FileNotFoundError:
            if not ending:
                raise
            found.append(None)
    return tuple(found)


def fitting(folder: Path, pattern: str) -> list[Path]:
    """The paths in a folder that fit a pattern, sorted."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []
