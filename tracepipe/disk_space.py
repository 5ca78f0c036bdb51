"""Room on a disk: asked for before it is needed, and given back in the middle of a file."""

from __future__ import annotations

import ctypes
import errno
import os

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*
_FULL = (errno.ENOSPC, errno.EDQUOT)


def reserve(descriptor: int, start: int, size_bytes: int) -> None:
    """Make sure that these bytes of a file can be written; its size stays. Raises OSError on a full disk.

    A file system that cannot promise it is taken at its word when it writes.
    """
    number = _fallocate(descriptor, _KEEP_SIZE, start, size_bytes)
    if number in _FULL:
        raise OSError(number, os.strerror(number))


def give_back(descriptor: int, start: int, size_bytes: int) -> None:
    """Give the room of these bytes back, which read as zeros then; where that is not possible, keep it."""
    _fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, start, size_bytes)


def is_full(error: BaseException | None) -> bool:
    """Whether an error says that a disk has no room, or its user no more of it: others may give some back."""
    return isinstance(error, OSError) and error.errno in _FULL


def _fallocate(descriptor: int, mode: int, start: int, size_bytes: int) -> int:
    """The error number, 0 for none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return errno.ENOSYS
    done = libc.fallocate(descriptor, mode, ctypes.c_int64(start), ctypes.c_int64(size_bytes))
    return ctypes.get_errno() if done else 0
