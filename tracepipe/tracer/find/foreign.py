"""Reads files of other users: programs and libraries of their processes, which change while they are read.

Nothing is mapped: access behind the end of a mapped file, which its owner may truncate at any time, ends the
process (SIGBUS). Every read has its bound, and a file that is another one at the end gives no answer.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol

from tracepipe import paths
from tracepipe.errors import InputError

_FIRST_PIECE_BYTES, _PIECE_BYTES = 1 << 7, 1 << 20
_BYTES_MAX = 1 << 36
"""Files that are larger, as sparse ones may be, are refused: to search one takes minutes."""

_pread = os.pread  # tests change the file before one of the calls


class Readable(Protocol):
    """Bytes that are read in parts."""

    size: int

    def read(self, offset: int, size: int) -> bytes:
        """Exactly these bytes. Raises IndexError where they are not all there, and InputError."""


class Content:
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, offset: int, size: int) -> bytes:
        """Exactly these bytes. Raises IndexError where they are not all there."""
        if offset + size > self.size:
            raise IndexError
        return self._data[offset : offset + size]


class ForeignFile:
    """A regular file, open while in use as a context. `status` and `size` are those of the opened
    file, `bytes_read` is what was read of it.

    Raises InputError if it cannot be opened or is no regular file, and at the end of the context if it was
    changed, replaced or removed since then.
    """

    def __init__(self, path: str, hint: str = "Give a shared library.") -> None:
        self.path = path
        # The open of a pipe waits, and that of a device may do anything. O_PATH does not open; what it found
        # is opened by its number, so that nothing can be put in its place in between.
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                if not stat.S_ISREG(os.fstat(place).st_mode):
                    raise InputError("not a file", hint, path=path)
                self._file = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            finally:
                os.close(place)
        except OSError as error:
            message = f"cannot be read: {error.strerror}"
            raise InputError(message, "Check the path.", path=path) from None
        self.status, self.bytes_read = os.fstat(self._file), 0
        self.size = self.status.st_size
        if not 0 < self.size <= _BYTES_MAX:
            os.close(self._file)
            raise InputError("empty file" if not self.size else "larger than 64 GiB", hint, path=path)

    def __enter__(self) -> ForeignFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        os.close(self._file)
        if (kind is None or issubclass(kind, InputError)) and not self._is_same():
            raise self._changed() from None

    def read(self, offset: int, size: int) -> bytes:
        """Exactly these bytes. Raises IndexError where the file did not have them, InputError where it was
        cut since then.
        """
        if offset + size > self.size:
            raise IndexError
        parts, end = list[bytes](), offset + size
        while offset < end:
            try:
                part = _pread(self._file, end - offset, offset)
            except OSError as error:
                raise InputError(
                    f"cannot be read: {error.strerror}", "Check the disk.", path=self.path
                ) from None
            if not part:
                raise self._changed()
            parts.append(part)
            offset += len(part)
            self.bytes_read += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _is_same(self) -> bool:
        try:
            now = Path(self.path).stat()
        except OSError:
            return False
        return paths.identity_of(now) == paths.identity_of(self.status)

    def _changed(self) -> InputError:
        return InputError("it was changed while it was read", "Try again.", path=self.path)


def found_at(file: Readable, text: bytes, start: int = 0, end: int | None = None) -> int:
    """Where the bytes `text` are first in a part of a file; -1 if they are not. Raises InputError."""
    end, size = file.size if end is None else end, _FIRST_PIECE_BYTES
    while start < end:
        piece = file.read(start, min(size + len(text) - 1, end - start))
        if (found := piece.find(text)) >= 0:
            return start + found
        start, size = start + size, min(2 * size, _PIECE_BYTES)
    return -1


def head_of(path: str, size: int) -> bytes:
    """The first bytes of a file; empty if it cannot be read."""
    try:
        with ForeignFile(path) as file:
            return file.read(0, min(size, file.size))
    except InputError:
        return b""
