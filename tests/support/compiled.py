"""What compilers make for the tests: it is kept in build/compiled until a source or the compiler changes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build/compiled"
_SUFFIXES = {".h", ".map"}
_KEPT_S = 7 * 24 * 3600
# What the sources include of the repository. They themselves are words of the command.
_INCLUDED = ("tracepipe/tracer/gpu/native", "tracepipe/marks/include", "tests/gpu")


def compiled(command: Sequence[str], output: Path) -> Path:
    """Run a compiler, whose last words this adds, `-o OUTPUT`; or copy what it made of the same before.

    An output that is to be kept must not have its folder in it: libraries are found by `$ORIGIN`.
    """
    kept = KEPT / f"{_digest(command, output.parent)}-{output.name}"
    KEPT.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the same run may be compiling it
        if kept.exists():
            os.utime(kept)
        else:
            made = kept.with_suffix(".made")
            subprocess.run([*command, "-o", str(made)], check=True)
            made.rename(kept)
            _forget_old()
        shutil.copy(kept, output)
    return output


def _digest(command: Sequence[str], folder: Path) -> str:
    """Of the command, the compiler, and the files that it reads."""
    compiler = Path(shutil.which(command[0]) or command[0])
    found = hashlib.sha256(repr((_states(compiler), _included())).encode())
    for word in command[1:]:
        found.update(word.replace(str(folder), "").encode() + b"\0")
        path = Path(word.removeprefix("-isystem"))
        if path.is_file():
            found.update(path.read_bytes())
        elif path.is_dir():
            found.update(repr(_states(path)).encode())
    return found.hexdigest()[:32]


def _states(path: Path) -> tuple[str, int, int]:
    """What shows without reading a file that it is the same: its name, size and time."""
    state = path.resolve().stat()
    return str(path), state.st_size, state.st_mtime_ns


@cache
def _included() -> str:
    found = hashlib.sha256()
    for path in sorted(path for folder in _INCLUDED for path in (ROOT / folder).rglob("*.*")):
        if path.suffix in _SUFFIXES:
            found.update(str(path).encode() + path.read_bytes())
    return found.hexdigest()


def _forget_old() -> None:
    for path in KEPT.iterdir():
        if path.stat().st_mtime < time.time() - _KEPT_S:
            path.unlink()
