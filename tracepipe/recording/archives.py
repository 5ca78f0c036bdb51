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
# The first is in the archives that `convert` writes, and tells Perfetto how their traces belong together.
_NO_TRACES: Final = ("perfetto_manifest.json", ".DS_Store")


class _Frugal:
    """A file of which an archive's directory cannot make the libraries read much at once into memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, _READ_MAX_BYTES + 1) if size >= 0 else _READ_MAX_BYTES + 1)
        if len(data) > _READ_MAX_BYTES:
            raise BadZipFile(f"its directory or a header takes more than {_READ_MAX_BYTES:,} bytes")
        return data

    @staticmethod
    def seekable() -> bool:
        return True


class Archive:
    """The traces in an archive by name, as what opens each. Raises InputError if it is damaged."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._path = path
        self.traces: dict[str, Callable[[], IO[bytes]]] = {}
        frugal = _Frugal(file)
        try:
            for stated, opened in self._of_zip(frugal) if file.read(2) == b"PK" else self._of_tar(frugal):
                name = str(PurePath("/", stated)).lstrip("/")
                if name in self.traces:
                    raise BadZipFile(f"two files in it are called {name}")
                if PurePath(name).name not in _NO_TRACES and not name.startswith("__MACOSX/"):
                    self.traces[name] = opened
        except (BadZipFile, tarfile.TarError, NotImplementedError) as e:
            raise self._damaged(e) from e
        if not self.traces:
            raise InputError("is an archive without a trace", "Name a recording.", path=path)

    def copy(self, name: str, copied: BinaryIO) -> None:
        """Write a trace to a file. Raises InputError, and OSError where the file cannot be written."""
        try:
            with self.traces[name]() as trace:
                while piece := trace.read(1 << 16):
                    copied.write(piece)
        except (BadZipFile, tarfile.TarError, NotImplementedError, RuntimeError, EOFError, zlib.error) as e:
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
    def _of_zip(file: _Frugal) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
        archive = ZipFile(cast(IO[bytes], file))
        for info in archive.infolist():
            # What these two give from a piece of the file is bounded.
            if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                raise NotImplementedError(f"{info.filename} is compressed by method {info.compress_type}")
            if not info.filename.endswith("/"):
                yield info.filename, partial(archive.open, info)

    @staticmethod
    def _of_tar(file: _Frugal) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
        file.seek(0)
        archive = tarfile.open(fileobj=cast(IO[bytes], file), mode="r:")  # noqa: SIM115 - the caller's file
        count = 0
        while info := archive.next():
            count += 1
            if count > _FILES_MAX:
                raise tarfile.ReadError(f"it has more than {_FILES_MAX:,} files")
            if info.issparse():  # some bytes of it stand for any number of zeros
                raise tarfile.ReadError(f"{info.name} has holes")
            if info.isreg():
                yield info.name, cast(Callable[[], IO[bytes]], partial(archive.extractfile, info))
        file.seek(archive.offset)
        if not file.read(1):  # it ends with a block of zeros
            raise tarfile.ReadError("it is cut off")

    def _damaged(self, error: Exception, name: str = "") -> InputError:
        path = f"{self._path}/{name}" if name else self._path
        return InputError(f"cannot be read: {error}", "Unpack it, and name a file of it.", path=path)
