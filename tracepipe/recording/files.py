"""Opens inputs: paths, URLs and standard input, plain or compressed, and traces in archives."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from tracepipe import paths
from tracepipe.errors import InputError
from tracepipe.options import STANDARD
from tracepipe.recording import remote
from tracepipe.recording.compression import DamageError, decompressed

if TYPE_CHECKING:
    from tracepipe.recording.archives import Archive

HEAD_BYTES = 1 << 16
Progress = Callable[[int, int], None]
"""Called with the bytes read and the bytes in all, 0 where they are not known."""


class InputStream:
    """A decompressed input that can look ahead.

    Damage in compressed data ends the stream and does not raise, as what came before it is good. `damage`
    then states what was wrong, and `is_cut` whether only the rest is missing. `progress` is called as it is
    read.
    """

    def __init__(self, raw: BinaryIO, name: str, *, is_growing: bool = False) -> None:
        self.name, self._raw = name, raw
        self.size_bytes = os.fstat(raw.fileno()).st_size if raw.seekable() else 0
        self.damage, self.is_cut = "", False
        self.progress: Progress | None = None
        self._ahead = b""
        try:
            magic = raw.peek(4)[:4] if hasattr(raw, "peek") else b""
        except OSError as e:
            raise _unreadable(e, name) from e
        self._from: Any = decompressed(raw, magic) or raw
        self._is_in_pieces = self._from is not raw and not is_growing

    def _pull(self, size: int) -> bytes:
        try:
            # read1, as read would discard the data before the damage.
            return bytes(self._from.read1(size))
        except DamageError as e:
            self.damage, self.is_cut = str(e), e.is_cut
        except OSError as e:
            self.damage = str(e)
        return b""

    def head(self, is_enough: Callable[[bytes], bool] = lambda head: False) -> bytes:
        """The first `HEAD_BYTES`, or as many as are enough. `read` returns them again."""
        while (
            len(self._ahead) < HEAD_BYTES and not is_enough(self._ahead) and (more := self._pull(HEAD_BYTES))
        ):
            self._ahead += more
        return self._ahead[:HEAD_BYTES]

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        if self._ahead:
            out, self._ahead = self._ahead[:size], self._ahead[size:]
            return out
        out = b"" if self.damage else self._pull(size)
        if self._is_in_pieces and out:
            # A step of the decompression gives some KB, and each text that is read costs work of its own.
            pieces, left = [out], size - len(out)
            while left > 0 and not self.damage and (piece := self._pull(left)):
                pieces.append(piece)
                left -= len(piece)
            out = b"".join(pieces)
        if self.progress and out:
            self.progress(self.position_bytes(), self.size_bytes)
        return out

    def position_bytes(self) -> int:
        """The position of the reading in the file on disk."""
        return self._raw.tell() if self._raw.seekable() else 0

    @contextmanager
    def as_file(self) -> Iterator[BinaryIO]:
        """The input as a file with a name, for readers that need one: itself, or a copy."""
        is_plain = self._from is self._raw and self._raw.seekable()
        if is_plain and paths.is_there(f"/proc/self/fd/{self._raw.fileno()}"):
            yield self._raw
            return
        with tempfile.NamedTemporaryFile(prefix="tracepipe-") as copy:
            yield _filled(cast(BinaryIO, copy), self, self.name)

    @contextmanager
    def again(self) -> Iterator[InputStream]:
        """The same input from its start, read independently."""
        # It is opened through /proc, as the copy of standard input has no name.
        with Path(f"/proc/self/fd/{self._raw.fileno()}").open("rb") as raw:
            yield InputStream(raw, self.name)


def _unreadable(error: OSError, path: str) -> InputError:
    hint, ending = "Check the path.", Path(path).suffix
    if isinstance(error, FileNotFoundError) and ending:
        with suppress(OSError):
            there = [one for one in Path(path).parent.iterdir() if one.suffix == ending]
            if there:
                newest = max(there, key=lambda one: one.stat().st_mtime)
                hint += f" The newest file there with this ending is {newest}."
    return InputError(f"cannot be read: {error.strerror}", hint, path=path)


def _filled(copy: BinaryIO, source: BinaryIO | InputStream, path: str) -> BinaryIO:
    """The temporary file `copy` with the content of a source, to be read from its start."""
    try:
        shutil.copyfileobj(source, copy)
        copy.flush()
        copy.seek(0)
    except OSError as e:
        raise remote.not_copied(e, path) from e
    return copy


@contextmanager
def open_input(path: str, *, is_growing: bool = False) -> Iterator[InputStream]:
    """Open a path, a URL or `-`. Plain text, gzip, zstd and archives are recognized by content. Of an
    archive, the only trace is opened, or the one that the path names: `all.zip/run.pftrace`. Raises
    InputError.

    A pipe and what is at a URL are copied first, so that they can be read twice. A pipe that `is_growing` is
    read once, as it comes.
    """
    file, name = _in_archive(path)
    with ExitStack() as stack:
        found = _found_at(file, name, stack, is_growing=is_growing)
        if isinstance(found, InputStream):
            yield found
            return
        name = found.name_of(name)
        copy = cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile()))
        try:
            found.copy(name, copy)
            copy.flush()
            copy.seek(0)
        except OSError as e:
            raise remote.not_copied(e, f"{file}/{name}") from e
        yield InputStream(copy, f"{file}/{name}")


_kept: ContextVar[tuple[dict[str, Archive], ExitStack] | None] = ContextVar("kept", default=None)


@contextmanager
def archives_kept() -> Iterator[None]:
    """Keep each archive open that is opened from now on, so that its directory is read once, and it is
    decompressed once.
    """
    with ExitStack() as stack:
        before = _kept.set(({}, stack))
        try:
            yield
        finally:
            _kept.reset(before)


def _found_at(path: str, name: str, stack: ExitStack, *, is_growing: bool = False) -> InputStream | Archive:
    """What is at a path, open until the stack ends, or for longer where it is an archive that is kept. It
    must be one if a name in it is asked for. Raises InputError.
    """
    archives, keeping = _kept.get() or ({}, stack)
    if path in archives:
        return archives[path]
    with ExitStack() as own:
        stream = own.enter_context(_opened(path, is_growing=is_growing))
        head = b"" if is_growing else stream.head()
        if not (head.startswith((b"PK\x03\x04", b"PK\x05\x06")) or head.startswith(b"ustar", 257)):
            if name:
                raise InputError("is not an archive", "Name a file.", path=path)
            stack.push(own.pop_all())
            return stream
        from tracepipe.recording.archives import Archive  # here, as few inputs are archives

        file = own.enter_context(stream.as_file())
        if stream.damage:
            raise InputError(f"cannot be read: {stream.damage}", "Copy or record it again.", path=path)
        file.seek(0)
        archives[path] = Archive(file, path)
        keeping.push(own.pop_all())
    return archives[path]


def _in_archive(path: str) -> tuple[str, str]:
    """The file at a path, and the name of a trace in it: a path that goes on behind a file."""
    if path != STANDARD and not remote.is_url(path) and not paths.is_there(path):
        for file in Path(path).parents:
            if paths.is_file(file):
                return str(file), str(Path(path).relative_to(file))
    return path, ""


def archive_of(path: str) -> str:
    """The archive in which the trace at a path is, or ""."""
    file, name = _in_archive(path)
    return file if name else ""


def refuse_missing(given: Iterable[str]) -> None:
    """Raise an InputError if no file is at one of these paths."""
    for path in given:
        if path != STANDARD and not remote.is_url(path):
            try:
                Path(archive_of(path) or path).stat()
            except OSError as e:
                raise _unreadable(e, path) from e
            except ValueError:
                pass  # a path that no file can have, which the reading says


def unpacked(path: str) -> str:
    """The path of a trace if its archive were unpacked where it is."""
    file, name = _in_archive(path)
    return str(Path(file).parent / name) if name else path


def traces_of(path: str) -> list[str]:
    """The path of an input, or of each trace in it if it is an archive. Raises InputError."""
    file, name = _in_archive(path)
    if not (name or paths.is_file(path)):
        return [path]
    with ExitStack() as stack:
        found = _found_at(file, name, stack)
        if isinstance(found, InputStream):
            return [path]
        return [f"{file}/{one}" for one in ([found.name_of(name)] if name else found.traces)]


_folders: ContextVar[Sequence[Path]] = ContextVar("folders", default=())


@contextmanager
def only_below(folders: Sequence[Path]) -> Iterator[None]:
    """Open only regular files below these folders, which have no links in their paths."""
    before = _folders.set(folders)
    try:
        yield
    finally:
        _folders.reset(before)


def open_file(path: str | Path) -> BinaryIO:
    """A file that is open to be read. Raises OSError, InputError for one that is not below `only_below`."""
    folders = _folders.get()
    if not folders:
        return Path(path).open("rb")
    # What was looked at may be another file now, and to open a pipe would wait for its writer.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    real = Path(f"/proc/self/fd/{file.fileno()}").readlink()
    is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    if not is_regular or not any(map(real.is_relative_to, folders)):
        file.close()
        raise InputError("may not be read", "Name a file below the folders.", path=str(path))
    return file


@contextmanager
def _opened(path: str, *, is_growing: bool = False) -> Iterator[InputStream]:
    if path == STANDARD:
        if sys.stdin is None:
            raise InputError("is closed", "Name a file, or pipe the recording.", path=path)
        if is_growing:
            yield InputStream(sys.stdin.buffer, "<stdin>", is_growing=True)
            return
        with tempfile.TemporaryFile() as copy:
            yield InputStream(_filled(cast(BinaryIO, copy), sys.stdin.buffer, path), "<stdin>")
        return
    if remote.is_url(path):
        with remote.fetched(path) as copy:
            yield InputStream(copy, path)
        return
    try:
        raw = open_file(path)  # closed below; only the opening is translated
    except OSError as e:
        raise _unreadable(e, path) from e
    with raw:
        if paths.is_folder(path):  # some systems can open a directory
            raise InputError("is a directory", "Name a file in it.", path=path)
        if is_growing or raw.seekable():
            yield InputStream(raw, path, is_growing=is_growing)
        else:
            with tempfile.TemporaryFile() as copy:
                yield InputStream(_filled(cast(BinaryIO, copy), raw, path), path)


@contextmanager
def opened_again(path: str) -> Iterator[str]:
    """A path that can be opened more than once: that of the input, or of a copy of a pipe."""
    if path != STANDARD and paths.is_file(path):
        with open_file(path) as file:
            yield f"/proc/self/fd/{file.fileno()}" if _folders.get() else path
        return
    with open_input(path) as stream, stream.as_file() as file:
        yield f"/proc/self/fd/{file.fileno()}"
