"""Opens inputs, plain or compressed, and writes outputs so that a half-written one never takes a name."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from tracepipe.errors import InputError, OutputError

STANDARD = "-"
HEAD_BYTES = 1 << 16
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class InputStream:
    """A decompressed input that can look ahead.

    Damage in compressed data ends the stream instead of raising: what came before it is good. `damage`
    then says what was wrong.
    """

    def __init__(self, raw: BinaryIO, name: str) -> None:
        self.name, self._raw = name, raw
        self.size_bytes = os.fstat(raw.fileno()).st_size if raw.seekable() else 0
        self.damage = ""
        self._ahead = b""
        magic = raw.peek(4)[:4] if hasattr(raw, "peek") else b""
        self._from: Any = raw
        if magic.startswith(_GZIP):
            self._from = gzip.GzipFile(fileobj=raw)
        elif magic.startswith(_ZSTD):
            import zstandard  # here, as most inputs need it not

            self._from = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)

    def _pull(self, size: int) -> bytes:
        try:
            # read1, as read would throw away what came before the damage.
            return bytes(self._from.read1(size))
        except (EOFError, OSError, zlib.error) as e:
            self.damage = str(e)
        except Exception as e:
            if type(e).__name__ != "ZstdError":
                raise
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


@contextmanager
def open_input(path: str) -> Iterator[InputStream]:
    """Open a path or `-`, plain, gzip or zstd by content. Raises InputError."""
    if path == STANDARD:
        # Kept on disk, as a recording whose clocks need pairs is read twice.
        with tempfile.TemporaryFile() as spool:
            shutil.copyfileobj(sys.stdin.buffer, spool)
            spool.seek(0)
            yield InputStream(cast(BinaryIO, spool), "<stdin>")
        return
    try:
        raw = Path(path).open("rb")  # noqa: SIM115 - closed below; only the opening is translated
    except OSError as e:
        raise InputError(f"cannot be read: {e.strerror}", "check the path", path=path) from e
    with raw:
        if Path(path).is_dir():  # on some systems a directory opens
            raise InputError("is a directory", "name a file in it", path=path)
        yield InputStream(raw, path)


def default_output(path: str, suffix: str) -> str:
    """Where the output of `path` goes: beside it, with `suffix` in place of its own."""
    if path == STANDARD:
        return STANDARD
    out = Path(path)
    if out.suffix in (".gz", ".zst"):
        out = out.with_suffix("")
    return str(
        out.with_suffix(suffix) if out.suffix in (".jsonl", ".json", ".txt", ".ndjson") else f"{out}{suffix}"
    )


@contextmanager
def replacing(path: str, *, force: bool) -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is whole. Raises OutputError if it is there already."""
    if path == STANDARD:
        if sys.stdout.isatty():
            raise OutputError("a trace is not for a terminal", "name a file with -o, or pipe the output")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    if target.exists() and not force and target.is_file():
        raise OutputError(f"{path} exists", "--force overwrites it, -o names another")
    if target.exists() and not target.is_file():  # /dev/null, a pipe: nothing to replace
        with target.open("wb") as out:
            yield out
        return
    try:
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as e:
        raise OutputError(
            f"cannot write to {target.parent}: {e.strerror}", "name another place with -o"
        ) from e
    try:
        with os.fdopen(fd, "wb") as out:
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(out.fileno(), 0o666 & ~umask)
            yield out
        Path(name).replace(target)
    except BaseException as e:
        Path(name).unlink(missing_ok=True)
        if isinstance(e, OSError) and e.filename is None and e.errno is not None:
            raise OutputError(f"cannot write {path}: {e.strerror}", "free some space, or use -o") from e
        raise


def free_name(stem: str, suffix: str) -> str:
    """`stem` with `suffix` in the current folder, numbered if that is taken."""
    number = 1
    while Path(name := f"{stem}{'' if number == 1 else f'-{number}'}{suffix}").exists():
        number += 1
    return name


@contextmanager
def keeping(path: str, *, force: bool) -> Iterator[BinaryIO]:
    """Write a recording, under `path` + ".part" until it ends; what was written stays, whatever happened.

    Raises OutputError if either file is there already. A recording made under sudo belongs to the caller.
    """
    if path == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target, part = Path(path), Path(f"{path}.part")
    if target.exists() and not force:
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
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdigit():
        os.fchown(fd, int(os.environ["SUDO_UID"]), int(os.environ.get("SUDO_GID", "-1")))
    try:
        with os.fdopen(fd, "wb") as out:
            yield out
    finally:
        if part.exists() and part.stat().st_size:
            part.replace(target)
        else:
            part.unlink(missing_ok=True)
