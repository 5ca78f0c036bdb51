"""Opens inputs, plain or compressed, and writes outputs that get their names only when they are complete."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from tracepipe import paths
from tracepipe.errors import InputError, OutputError
from tracepipe.recording import remote
from tracepipe.recording.compression import DamageError, decompressed
from tracepipe.recording.naming import (
    free_of,
    give_to_caller,
    is_file,
    is_taken,
    kind_of,
    moved_aside,
    output_kind,
    rename_new,
    settle,
    taken,
    writing,
)

STANDARD = "-"
HEAD_BYTES = 1 << 16
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")


class InputStream:
    """A decompressed input that can look ahead.

    Damage in compressed data ends the stream and does not raise, as what came before it is good. `damage`
    then states what was wrong, and `is_cut` whether only the rest is missing.
    """

    def __init__(self, raw: BinaryIO, name: str) -> None:
        self.name, self._raw = name, raw
        self.size_bytes = os.fstat(raw.fileno()).st_size if raw.seekable() else 0
        self.damage, self.is_cut = "", False
        self._ahead = b""
        try:
            magic = raw.peek(4)[:4] if hasattr(raw, "peek") else b""
        except OSError as e:
            raise _unreadable(e, name) from e
        self._from: Any = decompressed(raw, magic) or raw

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
        return self._pull(size)

    def position_bytes(self) -> int:
        """How far into the file on disk the reading is."""
        return self._raw.tell() if self._raw.seekable() else 0

    @contextmanager
    def as_file(self) -> Iterator[BinaryIO]:
        """The input as a file with a name, for readers that cannot use a stream: the file itself, or a
        copy.
        """
        is_plain = self._from is self._raw and self._raw.seekable()
        if is_plain and paths.is_there(f"/proc/self/fd/{self._raw.fileno()}"):
            yield self._raw
            return
        with tempfile.NamedTemporaryFile(prefix="tracepipe-") as copy:
            try:
                while some := self.read(HEAD_BYTES):
                    copy.write(some)
                copy.flush()
            except OSError as e:
                raise _not_copied(e, self.name) from e
            yield cast(BinaryIO, copy)

    @contextmanager
    def again(self) -> Iterator[InputStream]:
        """The same input from its start, read independently."""
        # It is opened through /proc, as the copy of standard input has no name.
        with Path(f"/proc/self/fd/{self._raw.fileno()}").open("rb") as raw:
            yield InputStream(raw, self.name)


def _unreadable(error: OSError, path: str) -> InputError:
    return InputError(f"cannot be read: {error.strerror}", "Check the path.", path=path)


def _not_copied(error: OSError, path: str) -> InputError:
    hint = f"Free some space in {tempfile.gettempdir()}, to which it is copied, or set TMPDIR."
    return InputError(f"cannot be copied: {error.strerror}", hint, path=path)


@contextmanager
def open_input(path: str, *, is_growing: bool = False) -> Iterator[InputStream]:
    """Open a path, a URL or `-`. Plain text, gzip and zstd are recognized by content. Raises InputError.

    A pipe and what is at a URL are copied first, so that they can be read twice. A pipe that `is_growing` is
    read once, as it comes.
    """
    if path == STANDARD:
        if sys.stdin is None:
            raise InputError("is closed", "Name a file, or pipe the recording.", path=path)
        if is_growing:
            yield InputStream(sys.stdin.buffer, "<stdin>")
            return
        with _spooled(sys.stdin.buffer, path) as spool:
            yield InputStream(spool, "<stdin>")
        return
    if remote.is_url(path):
        with remote.fetched(path) as copy:
            yield InputStream(copy, path)
        return
    try:
        raw = Path(path).open("rb")  # noqa: SIM115 - closed below; only the opening is translated
    except OSError as e:
        raise _unreadable(e, path) from e
    with raw:
        if paths.is_folder(path):  # some systems can open a directory
            raise InputError("is a directory", "Name a file in it.", path=path)
        if is_growing or raw.seekable():
            yield InputStream(raw, path)
        else:
            with _spooled(raw, path) as spool:
                yield InputStream(spool, path)


@contextmanager
def _spooled(pipe: BinaryIO, path: str) -> Iterator[BinaryIO]:
    """Copy a pipe to disk, as a recording whose clocks need pairs is read twice."""
    with tempfile.TemporaryFile() as spool:
        try:
            shutil.copyfileobj(pipe, spool)
            spool.seek(0)
        except OSError as e:
            raise _not_copied(e, path) from e
        yield cast(BinaryIO, spool)


@contextmanager
def opened_again(path: str) -> Iterator[str]:
    """A path that can be opened more than once: that of the input, or of a copy of a pipe."""
    if path != STANDARD and paths.is_file(path):
        yield path
        return
    with open_input(path) as stream, stream.as_file() as file:
        yield f"/proc/self/fd/{file.fileno()}"


def default_output(path: str, suffix: str) -> str:
    """The path for the output of `path`: next to it, or in this folder for a URL, with `suffix` in place of
    its own.
    """
    if path == STANDARD:
        return STANDARD
    out = Path(remote.name_of(path) if remote.is_url(path) else path)
    if out.suffix in (".gz", ".zst"):
        out = out.with_suffix("")
    if out.suffix in (".jsonl", ".json", ".txt", ".ndjson"):
        out = out.with_suffix("")
    if Path(f"{out}{suffix}") == Path(path):  # run.json becomes run.trace.json, never itself
        suffix = f".trace{suffix}"
    return f"{out}{suffix}"


def trace_names(paths: Sequence[str]) -> list[str]:
    """The names of the traces of recordings in an archive: like those of the recordings, all different, in
    characters that every reader supports. Perfetto ignores names that begin with a dot.
    """
    names: list[str] = []
    for path in paths:
        plain = _UNUSUAL.sub("_", Path(default_output(path, ".pftrace")).name).lstrip("._-")
        first = Path(plain if path != STANDARD else "stdin.pftrace")
        names.append(next(name for one in chain([first], free_of(first)) if (name := str(one)) not in names))
    return names


@contextmanager
def replacing(
    path: str, *, force: bool, sources: Sequence[str] = (), on_terminal: bool = False
) -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is complete, or a copy at a URL. Raises OutputError if the name
    exists already.

    The file must not be one of `sources`, from which it is made. `on_terminal` is for output that people can
    read.
    """
    if path == STANDARD:
        if sys.stdout is None:
            raise OutputError("standard output is closed", "Name a file with -o.")
        if sys.stdout.isatty() and not on_terminal:
            raise OutputError("the output is not for a terminal", "Name a file with -o, or pipe the output.")
        with writing("standard output"):
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    if remote.is_url(path):
        if path in sources:
            raise OutputError(f"{path} is the recording itself", "Name another file with -o.")
        with remote.sending(path, force=force) as out, writing(path):
            yield out
        return
    target = Path(path)
    kind = output_kind(path, force=force)
    made_of = [source for source in sources if source != STANDARD]
    if kind == stat.S_IFREG and any(paths.is_same(target, source) for source in made_of):
        raise OutputError(f"{path} is the recording itself", "Name another file with -o.")
    if kind not in (0, stat.S_IFREG):  # /dev/null, a pipe: nothing to replace
        with writing(path), target.open("wb") as out:
            yield out
        return
    try:
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as e:
        raise OutputError(
            f"cannot write to {target.parent}: {e.strerror}", "Name another place with -o."
        ) from e
    made = Path(name)
    try:
        try:
            with writing(path), os.fdopen(fd, "wb", closefd=False) as out:
                umask = os.umask(0)
                os.umask(umask)
                os.fchmod(fd, 0o666 & ~umask)
                give_to_caller(fd)
                yield out
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        settle(fd, made, target, force=force)
    finally:
        os.close(fd)


@contextmanager
def named_at_once(path: str, *, force: bool, option: str) -> Iterator[int]:
    """The descriptor of a new file, given with `option`, that others write and read while it is open. Raises
    OutputError.

    If an exception ends the context and the file is empty, it is removed.
    """
    _refuse_url(path, option)
    target = Path(path)
    kind = output_kind(path, force=force, option=option)
    is_new = kind in (0, stat.S_IFREG)
    try:
        if kind == stat.S_IFREG:
            target.unlink()
        # Root may write into another user's folder: links are not followed, and existing files are not
        # opened.
        new = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW if is_new else 0
        fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC | new, 0o666)
    except OSError as e:
        raise OutputError(f"cannot write {path}: {e.strerror}", f"Name another file with {option}.") from e
    try:
        if is_new:
            give_to_caller(fd)
        yield fd
    except BaseException:
        if is_new and is_file(target, fd) and not os.fstat(fd).st_size:
            target.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


@contextmanager
def replacing_folder(path: str, *, force: bool) -> Iterator[Path]:
    """Fill a folder that gets its name when it is complete. Raises OutputError if the name exists already.

    With `force`, a folder that has only files with the same names is replaced. One that has anything else
    stays.
    """
    _refuse_url(path, "-o")
    target = Path(path).resolve()
    if path == STANDARD:
        raise OutputError("a folder cannot go to standard output", "Name it with -o.")
    if kind_of(target) and (not force or not paths.is_folder(target)):
        is_folder = paths.is_folder(target)
        hint = f"{'Overwrite it with --force, or name' if is_folder else 'Name'} another with -o."
        raise OutputError(f"{path} exists", hint)
    try:
        name = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as e:
        raise OutputError(
            f"cannot write to {target.parent}: {e.strerror}", "Name another place with -o."
        ) from e
    made = Path(name)
    try:
        umask = os.umask(0)
        os.umask(umask)
        made.chmod(0o777 & ~umask)
        with writing(path):
            yield made
        _give_name(made, target, force=force)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _refuse_url(path: str, option: str) -> None:
    """Raise OutputError for a URL, where others write and read the output while it is made, or it is several
    files.
    """
    if remote.is_url(path):
        raise OutputError(
            f"{path} is a URL, to which this output cannot go",
            f"Name a place on a file system with {option}, and copy it.",
        )


def _give_name(made: Path, target: Path, *, force: bool) -> None:
    """Rename a complete folder to its name. With `force`, it replaces an older folder, which is removed
    afterwards.
    """
    if not force or not paths.is_there(target):
        try:
            rename_new(made, target)
        except FileExistsError:
            raise taken(target, moved_aside(made, target)) from None
        return
    others = sorted({one.name for one in target.iterdir()} - {one.name for one in made.iterdir()})
    if others:
        raise OutputError(
            f"{target} holds other files: {', '.join(others[:3])}", "Name another folder with -o."
        )
    older = made.with_name(f"{made.name}.old")
    target.replace(older)
    try:
        made.replace(target)
    except OSError:
        older.replace(target)
        raise
    shutil.rmtree(older)


def made_folder(folder: Path) -> Path:
    """Make a folder and its parents where they do not exist, and return it. Raises OutputError."""
    for part in (*reversed(folder.parents), folder):
        try:
            part.mkdir()
            fd = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileExistsError:
            continue  # if it is not a folder, writing into it will report that
        except OSError as e:
            raise OutputError(f"cannot make the folder {part}: {e.strerror}", "Name another with -o.") from e
        try:
            give_to_caller(fd)
        finally:
            os.close(fd)
    return folder


def free_name(stem: str, suffix: str, folder: Path = Path()) -> str:
    """`stem` with `suffix` in a folder, with a number if that name is taken or is being recorded."""
    first = folder / f"{stem}{suffix}"
    return str(next(name for name in chain([first], free_of(first)) if not is_taken(name)))
