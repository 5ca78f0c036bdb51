"""Opens inputs, plain or compressed, and writes outputs so that a half-written one never takes a name."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from tracepipe.errors import InputError, OutputError
from tracepipe.recording.compression import DamageError, compressing, decompressed

STANDARD = "-"
HEAD_BYTES = 1 << 16


class InputStream:
    """A decompressed input that can look ahead.

    Damage in compressed data ends the stream instead of raising: what came before it is good. `damage`
    then says what was wrong, and `is_cut` whether only the rest is missing.
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
            # read1, as read would throw away what came before the damage.
            return bytes(self._from.read1(size))
        except DamageError as e:
            self.damage, self.is_cut = str(e), e.is_cut
        except OSError as e:
            self.damage = str(e)
        return b""

    def head(self) -> bytes:
        """The first `HEAD_BYTES`, which `read` will give again."""
        while len(self._ahead) < HEAD_BYTES and (more := self._pull(HEAD_BYTES)):
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
    def again(self) -> Iterator[InputStream]:
        """The same input from its start, read independently."""
        # Through /proc, as the copy of standard input has no name.
        with Path(f"/proc/self/fd/{self._raw.fileno()}").open("rb") as raw:
            yield InputStream(raw, self.name)


def _unreadable(error: OSError, path: str) -> InputError:
    return InputError(f"cannot be read: {error.strerror}", "check the path", path=path)


@contextmanager
def open_input(path: str) -> Iterator[InputStream]:
    """Open a path or `-`, plain, gzip or zstd by content. Raises InputError."""
    if path == STANDARD:
        if sys.stdin is None:
            raise InputError("is closed", "name a file, or pipe the recording", path=path)
        with _spooled(sys.stdin.buffer, path) as spool:
            yield InputStream(spool, "<stdin>")
        return
    try:
        raw = Path(path).open("rb")  # noqa: SIM115 - closed below; only the opening is translated
    except OSError as e:
        raise _unreadable(e, path) from e
    with raw:
        if Path(path).is_dir():  # on some systems a directory opens
            raise InputError("is a directory", "name a file in it", path=path)
        if raw.seekable():
            yield InputStream(raw, path)
        else:
            with _spooled(raw, path) as spool:
                yield InputStream(spool, path)


@contextmanager
def _spooled(pipe: BinaryIO, path: str) -> Iterator[BinaryIO]:
    """A copy of a pipe on disk, as a recording whose clocks need pairs is read twice."""
    with tempfile.TemporaryFile() as spool:
        try:
            shutil.copyfileobj(pipe, spool)
            spool.seek(0)
        except OSError as e:
            hint = f"it is copied to {tempfile.gettempdir()}: free some space there, or set TMPDIR"
            raise InputError(f"cannot be copied: {e.strerror}", hint, path=path) from e
        yield cast(BinaryIO, spool)


def default_output(path: str, suffix: str) -> str:
    """Where the output of `path` goes: beside it, with `suffix` in place of its own."""
    if path == STANDARD:
        return STANDARD
    out = Path(path)
    if out.suffix in (".gz", ".zst"):
        out = out.with_suffix("")
    if out.suffix in (".jsonl", ".json", ".txt", ".ndjson"):
        out = out.with_suffix("")
    if Path(f"{out}{suffix}") == Path(path):  # run.json becomes run.trace.json, never itself
        suffix = f".trace{suffix}"
    return f"{out}{suffix}"


@contextmanager
def _writing(what: str) -> Iterator[None]:
    """Turn what the system says of a write into an OutputError; whoever closed a pipe needs no message."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        # One with a file name is of another file.
        if e.errno is None or e.filename not in (None, what):
            raise
        raise OutputError(f"cannot write {what}: {e.strerror}", "free some space, or use -o") from e


def _give_to_caller(fd: int) -> None:
    """What is made under sudo belongs to the user who called it."""
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdigit():
        os.fchown(fd, int(os.environ["SUDO_UID"]), int(os.environ.get("SUDO_GID", "-1")))


def _kind(path: Path) -> int:
    """What stands there, as `stat.S_IFMT` says it; 0 for nothing. Raises OutputError if it cannot be seen."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as e:
        raise OutputError(f"cannot write {path}: {e.strerror}", "name another place with -o") from e


def _is_same_file(target: Path, source: str) -> bool:
    try:
        return target.samefile(source)
    except OSError:  # no such source: whoever reads it says so
        return False


@contextmanager
def replacing(path: str, *, force: bool, source: str = "", on_terminal: bool = False) -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is whole. Raises OutputError if it is there already.

    It is never `source`, what it is made of. `on_terminal` is for output that people can read.
    """
    if path == STANDARD:
        if sys.stdout is None:
            raise OutputError("standard output is closed", "name a file with -o")
        if sys.stdout.isatty() and not on_terminal:
            raise OutputError("the output is not for a terminal", "name a file with -o, or pipe the output")
        with _writing("standard output"):
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    target = Path(path)
    kind = _kind(target)
    if kind == stat.S_IFDIR:
        raise OutputError(f"{path} is a directory", "name a file in it with -o")
    if kind == stat.S_IFREG and not force:
        raise OutputError(f"{path} exists", "--force overwrites it, -o names another")
    if source not in ("", STANDARD) and kind == stat.S_IFREG and _is_same_file(target, source):
        raise OutputError(f"{path} is the recording itself", "name another file with -o")
    if kind not in (0, stat.S_IFREG):  # /dev/null, a pipe: nothing to replace
        with _writing(path), target.open("wb") as out:
            yield out
        return
    try:
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as e:
        raise OutputError(
            f"cannot write to {target.parent}: {e.strerror}", "name another place with -o"
        ) from e
    try:
        with _writing(path), os.fdopen(fd, "wb") as out:
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(out.fileno(), 0o666 & ~umask)
            _give_to_caller(out.fileno())
            yield out
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(path: str, *, force: bool) -> Iterator[Path]:
    """Fill a folder that gets its name when it is whole. Raises OutputError if it is there already.

    With `force` a folder of files with the same names goes; one that holds anything else stays.
    """
    target = Path(path).resolve()
    if path == STANDARD:
        raise OutputError("a folder cannot go to standard output", "name it with -o")
    if _kind(target) and (not force or not target.is_dir()):
        hint = "-o names another" if not target.is_dir() else "--force overwrites it, -o names another"
        raise OutputError(f"{path} exists", hint)
    try:
        name = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as e:
        raise OutputError(
            f"cannot write to {target.parent}: {e.strerror}", "name another place with -o"
        ) from e
    made = Path(name)
    try:
        umask = os.umask(0)
        os.umask(umask)
        made.chmod(0o777 & ~umask)
        with _writing(path):
            yield made
        _give_name(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _give_name(made: Path, target: Path) -> None:
    """Put a whole folder in the place of an older one, which is removed once it stands there."""
    if not target.exists():
        made.replace(target)
        return
    others = sorted({one.name for one in target.iterdir()} - {one.name for one in made.iterdir()})
    if others:
        raise OutputError(
            f"{target} holds other files: {', '.join(others[:3])}", "name another folder with -o"
        )
    older = made.with_name(f"{made.name}.old")
    target.replace(older)
    try:
        made.replace(target)
    except OSError:
        older.replace(target)
        raise
    shutil.rmtree(older)


def free_name(stem: str, suffix: str) -> str:
    """`stem` with `suffix` in the current folder, numbered if that is taken."""
    number = 1
    while Path(name := f"{stem}{'' if number == 1 else f'-{number}'}{suffix}").exists():
        number += 1
    return name


@contextmanager
def _closed(path: str, out: BinaryIO) -> Iterator[BinaryIO]:
    """The file, closed at the end. That writes the rest of it, and may find the disk full."""
    try:
        yield out
    finally:
        with _writing(path):
            out.close()


@contextmanager
def keeping(path: str, *, force: bool) -> Iterator[BinaryIO]:
    """Write a recording, under `path` + ".part" until it ends; what was written stays, whatever happened.

    Raises OutputError if either file is there already.
    """
    if path == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target, part = Path(path), Path(f"{path}.part")
    kind = _kind(target)
    if kind == stat.S_IFDIR:
        raise OutputError(f"{path} is a directory", "name a file in it with -o")
    if kind in (stat.S_IFCHR, stat.S_IFIFO):  # /dev/null, a pipe: nothing to replace, least of all by root
        with _writing(path):
            device = compressing(target.open("wb"), path)
        with _closed(path, device) as out:
            yield out
        return
    if kind and not force:
        raise OutputError(f"{path} exists", "--force overwrites it, -o names another")
    if force:
        part.unlink(missing_ok=True)
    try:
        # Root may be writing into another user's folder: follow no link and open nothing that is there.
        fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except FileExistsError as e:
        hint = "it is what a killed capture left, and can be read; --force overwrites it"
        raise OutputError(f"{part} exists", hint) from e
    except OSError as e:
        raise OutputError(f"cannot write {part}: {e.strerror}", "name another place with -o") from e
    _give_to_caller(fd)
    try:
        with _closed(path, compressing(os.fdopen(fd, "wb"), path)) as out:
            yield out
    finally:
        if part.exists() and part.stat().st_size:
            part.replace(target)
        else:
            part.unlink(missing_ok=True)
