"""Keeps the tables of recordings in the user's cache, so that a second question does not read the recording
again.

    $TRACEPIPE_CACHE, else $XDG_CACHE_HOME/tracepipe/recordings, else ~/.cache/tracepipe/recordings
        <key>/         the tables of a recording: the key is its path, size and time, and how it was read
        building-…/    tables that are being written, or were when a process was killed

The folder is the user's alone (0700). The tables that were not used for the longest time are removed when
there is more than 2 GB. Nothing is kept of a pipe, an object in remote storage, or a small file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tracepipe import __version__, paths
from tracepipe.recording.remote import is_url
from tracepipe.store.schema import VERSION

LIMIT_BYTES: Final = 2 << 30
# A smaller file is read again as fast as its tables are found.
_LEAST_BYTES: Final = 1 << 18
_BUILDING: Final = "building-"
_KEY: Final = re.compile("[0-9a-f]{32}")
# A process that still builds after a day was killed.
_ABANDONED_S: Final = 86_400


def cache_folder() -> Path | None:
    """The folder of the cache, which is made where it is missing; None where there is none that is the user's
    alone, or where TRACEPIPE_CACHE is empty.
    """
    named = os.environ.get("TRACEPIPE_CACHE")
    if named == "":
        return None
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        folder = Path(named) if named else base / "tracepipe" / "recordings"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError):  # RuntimeError of a user without a home
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return folder if is_own else None


def key_of(path: str, how: Mapping[str, object]) -> str | None:
    """The key of a recording that is read with these options; None for one that is not kept."""
    try:
        found, identity = Path(path).stat(), paths.identity(path)
    except (OSError, ValueError):
        return None
    if is_url(path) or not stat.S_ISREG(found.st_mode) or found.st_size < _LEAST_BYTES:
        return None
    parts = [__version__, VERSION, os.path.realpath(path), path, *identity, sorted(how.items())]
    return hashlib.sha256(json.dumps(parts, default=str).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def kept_or_built(path: str, how: Mapping[str, object], build: Callable[[Path], None]) -> tuple[Path, bool]:
    """The folder with the tables of a recording, and whether it is kept: one that is not is the caller's to
    remove. `build` writes the tables into a new folder; its errors are raised.
    """
    folder, key = cache_folder(), key_of(path, how)
    if folder is None or key is None:
        return _built(Path(tempfile.mkdtemp(prefix="tracepipe-")), build), False
    kept = folder / key
    if kept.is_dir():
        try:
            os.utime(kept)  # the time of its last use
            return kept, True
        except OSError:
            pass  # removed by another process meanwhile
    _remove_abandoned(folder)
    made = _built(Path(tempfile.mkdtemp(prefix=_BUILDING, dir=folder)), build)
    size_bytes = _size_bytes(made)
    # A recording that grew meanwhile has other tables.
    if key_of(path, how) != key or size_bytes > LIMIT_BYTES:
        return made, False
    try:
        made.rename(kept)
    except OSError:  # another process was faster
        shutil.rmtree(made, ignore_errors=True)
    _make_room(folder, kept)
    return kept, True


def forget(folder: Path) -> None:
    """Remove tables that cannot be read."""
    shutil.rmtree(folder, ignore_errors=True)


def _built(folder: Path, build: Callable[[Path], None]) -> Path:
    try:
        build(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _size_bytes(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


def _remove_abandoned(folder: Path) -> None:
    for one in folder.glob(f"{_BUILDING}*"):
        try:
            if time.time() - one.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(one, ignore_errors=True)
        except OSError:
            continue


def _make_room(folder: Path, newest: Path) -> None:
    """Remove the tables that were not used for the longest time, until the rest fits. Those that a process
    reads stay on the disk until it ends.
    """
    found = []
    for one in folder.iterdir():
        try:
            if _KEY.fullmatch(one.name) and one.is_dir():
                found.append((one.stat().st_mtime, _size_bytes(one), one))
        except OSError:
            continue
    total = sum(size_bytes for _, size_bytes, _ in found)
    for _, size_bytes, one in sorted(found):
        if total <= LIMIT_BYTES:
            break
        if one != newest:
            shutil.rmtree(one, ignore_errors=True)
            total -= size_bytes
