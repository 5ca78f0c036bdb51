"""Processes and threads as /proc shows them, the namespaces of this process, and its priorities: the thread
that empties the ring gets processors first, the recorded program keeps its memory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import select
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tracepipe.errors import TracepipeError
from tracepipe.tracer.request import Scope

_PROC = Path("/proc")
_INITIAL_PID_NAMESPACE = 4026531836  # PROC_PID_INIT_INO of include/linux/proc_ns.h, the same on every kernel

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# include/uapi/linux/sched/types.h:
#   size u32 │ policy u32 │ flags u64 │ nice i32 │ priority u32 │ runtime_ns u64 │ deadline u64 │ period u64
_ATTRIBUTES = struct.Struct("<IIQiIQQQ")
_SCHED_OTHER = 0
_RESET_ON_FORK = 1  # threads and processes that it starts have nice 0
_NICE = -5
_SLICE_NS = 100_000
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_ENDED_FIRST = "1000"  # outweighs any use of memory; proc_pid_oom_score_adj(5)


class Thread(NamedTuple):
    """The ids of a thread and its process."""

    tid: int
    pid: int


def online_processors() -> list[int]:
    """The numbers of the processors that run now."""
    parts = (
        part.split("-") for part in Path("/sys/devices/system/cpu/online").read_text().strip().split(",")
    )
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]


def own_namespace() -> tuple[int, int] | None:
    """Device and inode of this pid namespace; None for the initial one, whose ids are the kernel's."""
    status = (_PROC / "self/ns/pid").stat()
    return None if status.st_ino == _INITIAL_PID_NAMESPACE else (status.st_dev, status.st_ino)


def clock_ahead_ns() -> int:
    """The offset of this time namespace to the kernel's CLOCK_MONOTONIC, which BPF programs read."""
    with suppress(OSError):  # Linux before 5.6 has no time namespaces
        for line in (_PROC / "self/timens_offsets").read_text().splitlines():
            clock, seconds, nanoseconds = line.split()
            if clock == "monotonic":
                return int(seconds) * 1_000_000_000 + int(nanoseconds)
    return 0


def running_threads(scope: Scope) -> Iterator[Thread]:
    """The running threads of a scope, without those of this process."""
    everyone = (int(path.name) for path in _PROC.iterdir() if path.name.isdigit())
    for pid in scope.pids if scope.kind == "pids" else everyone:
        if pid == os.getpid() or (scope.kind == "comm" and _comm_bytes(pid) != scope.comm_bytes):
            continue
        try:
            tids = [int(path.name) for path in (_PROC / str(pid) / "task").iterdir()]
        except OSError:  # it ended
            continue
        yield from (Thread(tid, pid) for tid in tids)


def all_threads(scope: Scope) -> Iterator[Thread]:
    """The running threads of a scope, also those that begin while the first ones are used."""
    known: set[Thread] = set()
    while found := set(running_threads(scope)) - known:
        yield from found
        known |= found


def comm_of(pid: int, tid: int = 0) -> str:
    """The name of a thread, or of the process's first thread without a `tid`; "" if it has ended."""
    return _comm_bytes(pid, tid).decode(errors="replace")


def _comm_bytes(pid: int, tid: int = 0) -> bytes:
    try:
        return (_PROC / f"{pid}/task/{tid or pid}/comm").read_bytes()[:-1]  # without the line end after it
    except OSError:
        return b""


def stat_of(pid: int) -> list[str]:
    """The fields of a process's stat from its state, the third of proc(5), on. Raises OSError."""
    return (_PROC / f"{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def has_process(pid: int) -> bool:
    """Whether a process runs: it is there, and is not a zombie."""
    try:
        return stat_of(pid)[0] not in ("Z", "X")
    except OSError:
        return False


def runs_first() -> None:
    """Let this thread, which collects records, run before the recorded programs, as far as that is allowed.
    The threads that it starts do not get this priority: they render lines, which can wait.

    It runs soon because its time slice is short (from Linux 6.12 on), rather than because of its weight. The
    kernel spreads threads over processors by weight. With the weight of nine threads, this thread would get a
    processor of its own, although it sleeps most of the time, and two threads of a program would share one.
    """
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, _SCHED_OTHER, _RESET_ON_FORK, _NICE, 0, _SLICE_NS, 0, 0)
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def runs_at_once() -> bool:
    """Let this thread, which does little work but often, run as soon as it wakes, before all threads without
    a real-time priority (SCHED_FIFO). Returns whether that is allowed; otherwise it does what `runs_first`
    does.

    Where 64 threads compete for two processors, a thread with `runs_first` waits up to 0.8 s for its turn.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        runs_first()
        return False
    return True


@contextmanager
def ended_first() -> Iterator[None]:
    """Make the kernel end this process, and those that it starts from now on, before all others when memory
    runs out. Otherwise it would end the largest one: the recorded program.
    """
    before = ""
    with suppress(OSError):
        before = _OOM_SCORE.read_text()
        _OOM_SCORE.write_text(_ENDED_FIRST)
    try:
        yield
    finally:
        with suppress(OSError):
            _OOM_SCORE.write_text(before)


class Processes:
    """A pidfd of each process. Raises TracepipeError where one has already ended."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._opened: dict[int, int] = {}
        for pid in pids:
            try:
                self._opened[pid] = os.pidfd_open(pid)
            except OSError as error:
                self.close()
                if error.errno == errno.ESRCH:
                    raise TracepipeError(f"No such process: {pid}", "Look for it with ps or pgrep.") from None
                raise TracepipeError(f"Process {pid} cannot be recorded: {error.strerror}.") from None

    def have_ended(self) -> bool:
        """Whether there are processes, and all have ended."""
        poller = select.poll()
        for descriptor in self._opened.values():
            poller.register(descriptor, select.POLLIN)
        return bool(self._opened) and len(poller.poll(0)) == len(self._opened)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self._opened.values():
            os.close(descriptor)
        self._opened.clear()
