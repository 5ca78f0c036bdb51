"""Priorities: the thread that empties the ring gets processors first, the recorded program keeps its
memory.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
    runs out.

    Otherwise it would end the largest one: the recorded program.
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
