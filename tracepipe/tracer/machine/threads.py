"""The running threads, as /proc shows them, and the namespaces of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tracepipe.tracer.request import Scope

_PROC = Path("/proc")
_INITIAL_PID_NAMESPACE = 4026531836  # PROC_PID_INIT_INO of include/linux/proc_ns.h, the same on every kernel


class Thread(NamedTuple):
    """The ids of a thread and its process."""

    tid: int
    pid: int


def own_namespace() -> tuple[int, int] | None:
    """Device and inode of this process's pid namespace; None for the initial one, whose ids are those of the
    kernel.
    """
    status = (_PROC / "self/ns/pid").stat()
    return None if status.st_ino == _INITIAL_PID_NAMESPACE else (status.st_dev, status.st_ino)


def clock_ahead_ns() -> int:
    """The offset that this process's time namespace adds to the kernel's CLOCK_MONOTONIC, which BPF programs
    read.
    """
    with suppress(OSError):  # Linux before 5.6 has no time namespaces
        for line in (_PROC / "self/timens_offsets").read_text().splitlines():
            clock, seconds, nanoseconds = line.split()
            if clock == "monotonic":
                return int(seconds) * 1_000_000_000 + int(nanoseconds)
    return 0


def running_threads(scope: Scope) -> Iterator[Thread]:
    """The running threads of a scope, without those of this process."""
    for pid in scope.pids if scope.kind == "pids" else _processes():
        if pid == os.getpid() or (scope.kind == "comm" and comm_of(pid) != scope.comm[:15]):
            continue
        try:
            tids = [int(path.name) for path in (_PROC / str(pid) / "task").iterdir()]
        except OSError:  # it ended
            continue
        yield from (Thread(tid, pid) for tid in tids)


def comm_of(pid: int, tid: int = 0) -> str:
    """The name of a thread, or of the process's first thread without a `tid`; "" if it has ended."""
    try:
        return (_PROC / f"{pid}/task/{tid or pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def _processes() -> list[int]:
    return [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()]
