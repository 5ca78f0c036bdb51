"""Takes traces out of ZIP and TAR archives: several that are in one are read as several files are.

The name of a trace in an archive is the path of the archive and its name there: `all.zip/run.pftrace`.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import PurePath
from typing import IO, BinaryIO, Final, cast
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

from tracepipe.errors import InputError

_FILES_MAX: Final = 10_000
_READ_MAX_BYTES: Final = 1 << 20
# A TAR has headers before each file, and some that hold for all files after them.
_TAR_READ_MAX_BYTES: Final = 1 << 16
_ALL: Final = 1 << 62
_TAR_SHARED_MAX: Final = 1_000
# The libraries turn many damages into errors of Python's own.
_DAMAGES: Final = (
    BadZipFile, tarfile.TarError, RuntimeError, ValueError, OverflowError, EOFError, zlib.error,
)  # fmt: skip
# The first is in the archives that `convert` writes, and tells Perfetto how their traces belong together.
_NO_TRACES: Final = ("perfetto_manifest.json", ".DS_Store")


class _Frugal:
    """A file of which an archive's directory cannot make the libraries read much into memory: they may read
    `left` bytes of it.
    """

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file, self.left = file, left
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, self.left + 1) if size >= 0 else self.left + 1)
        self.left -= len(data)
        if self.left < 0:
            raise BadZipFile("its directory, or what stands before a file, is too long")
        return data

    @staticmethod
    def seekable() -> bool:
        return True


class Archive:
    """The traces in an archive by name, as what opens each. Raises InputError if it is damaged."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._path = path
        self.traces: dict[str, Callable[[], IO[bytes]]] = {}
        try:
            for stated, opened in self._of_zip(file) if file.read(2) == b"PK" else self._of_tar(file):
                name = str(PurePath("/", stated)).lstrip("/")
                if name in self.traces:
                    raise BadZipFile(f"two files in it are called {name}")
                if PurePath(name).name not in _NO_TRACES and not name.startswith("__MACOSX/"):
                    self.traces[name] = opened
        except _DAMAGES as e:
            raise self._damaged(e) from e
        if not self.traces:
            raise InputError("is an archive without a trace", "Name a recording.", path=path)

    def copy(self, name: str, copied: BinaryIO) -> None:
        """Write a trace to a file. Raises InputError, and OSError where the file cannot be written."""
        try:
            with self.traces[name]() as trace:
                while piece := trace.read(1 << 16):
                    copied.write(piece)
        except _DAMAGES as e:
            raise self._damaged(e, name) from e

    def name_of(self, asked: str = "") -> str:
        """The name of the trace that is asked for, or of the only one. Raises InputError."""
        if asked in self.traces or (not asked and len(self.traces) == 1):
            return asked or next(iter(self.traces))
        names = [f"{self._path}/{name}" for name in self.traces]
        listed = ", ".join(names[:5] + ["…"] * (len(names) > 5))
        message = f"has no {asked}" if asked else f"has {len(names)} traces"
        raise InputError(message, f"Name one of: {listed}.", path=self._path)

    @staticmethod
    def _of_zip(file: BinaryIO) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
        frugal = _Frugal(file, _READ_MAX_BYTES)
        archive = ZipFile(cast(IO[bytes], frugal))
        frugal.left = _ALL
        for info in archive.infolist():
            # What these two give from a piece of the file is bounded.
            if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                raise NotImplementedError(f"{info.filename} is compressed by method {info.compress_type}")
            if info.flag_bits & 1:
                raise NotImplementedError(f"{info.filename} is encrypted")
            if info.header_offset < 0:
                raise BadZipFile(f"{info.filename} begins before the archive")
            if not info.filename.endswith("/"):
                yield info.filename, partial(archive.open, info)

    @staticmethod
    def _of_tar(file: BinaryIO) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
        file.seek(0)
        frugal = _Frugal(file, _TAR_READ_MAX_BYTES)
        # The file is the caller's.
        archive = tarfile.open(fileobj=cast(IO[bytes], frugal), mode="r:")  # noqa: SIM115
        count = names_bytes = 0
        while info := archive.next():
            frugal.left = _TAR_READ_MAX_BYTES
            # Each has all that the headers before it say.
            archive.members.clear()  # type: ignore[attr-defined]
            count, names_bytes = count + 1, names_bytes + len(info.name)
            if count > _FILES_MAX:
                raise tarfile.ReadError(f"it has more than {_FILES_MAX:,} files")
            if names_bytes > _READ_MAX_BYTES or len(archive.pax_headers) > _TAR_SHARED_MAX:
                raise tarfile.ReadError("its files have names that are too long, or too much stands for all")
            if info.issparse():  # some bytes of it stand for any number of zeros
                raise tarfile.ReadError(f"{info.name} has holes")
            if info.isreg():
                kept = tarfile.TarInfo()
                kept.offset_data, kept.size = info.offset_data, info.size
                yield info.name, cast(Callable[[], IO[bytes]], partial(archive.extractfile, kept))
        frugal.left = _ALL
        file.seek(archive.offset)
        if not file.read(1):  # it ends with a block of zeros
            raise tarfile.ReadError("it is cut off")

    def _damaged(self, error: Exception, name: str = "") -> InputError:
        path = f"{self._path}/{name}" if name else self._path
        return InputError(f"cannot be read: {error}", "Unpack it, and name a file of it.", path=path)
