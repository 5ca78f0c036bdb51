"""Finds the files that a running process has mapped, with paths that this process can open.

A process in a container has another root and other mounts: its files are found under /proc/PID/root. A file
that was deleted or replaced since then is found under /proc/PID/map_files, by the address of its mapping. So
is a file whose path is wrong under that root (chroot in a separate mount namespace).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_PROC = Path("/proc")
# `7f1c2a000000-7f1c2a021000 r-xp 00002000 fe:01 1573 /usr/lib/libcuda.so.550.54.14 (deleted)`
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S\Sx\S [0-9a-f]+ \S+ ([1-9]\d*) +(/.*)")
_DELETED = " (deleted)"


def mapped_files(pid: int) -> list[tuple[str, str]]:
    """The file name and the path to open of each file that `pid` has mapped as executable; empty if the
    process has ended.
    """
    try:
        lines = (_PROC / str(pid) / "maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    root = _root(pid)
    found: dict[str, tuple[str, str]] = {}
    for line in lines:
        match = _MAPPING.fullmatch(line)
        if match is None or match[4] in found:
            continue
        start, end, inode, path = match.groups()
        mapping = f"{_PROC}/{pid}/map_files/{start.lstrip('0')}-{end.lstrip('0')}"  # not padded
        opened = root + path
        if _inode(opened) != int(inode) and _inode(mapping):
            opened = mapping
        found[path] = (Path(path.removesuffix(_DELETED)).name, opened)
    return list(found.values())


def program_of(pid: int) -> str:
    """A path to open the program that `pid` runs; "" if the process has ended."""
    link = _PROC / str(pid) / "exe"
    try:
        path = str(link.readlink())
    except OSError:
        return ""
    return str(link) if path.endswith(_DELETED) or _root(pid) else path


def _root(pid: int) -> str:
    """The prefix for the paths of `pid` in this process; "" where both see the same files."""
    ours, theirs = _PROC / "self", _PROC / str(pid)
    try:
        same = (ours / "ns" / "mnt").readlink() == (theirs / "ns" / "mnt").readlink()
        if same and os.path.samestat((ours / "root").stat(), (theirs / "root").stat()):
            return ""
    except OSError:
        return ""
    return str(theirs / "root")


def _inode(path: str) -> int:
    try:
        return Path(path).stat().st_ino
    except OSError:
        return 0
