"""Who goes first: who empties the ring where processors are few, the recorded program where memory is."""

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
_RESET_ON_FORK = 1  # threads and processes that come later have nice 0
_NICE = -5
_SLICE_NS = 100_000
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_ENDED_FIRST = "1000"  # more than any share of the memory counts; proc_pid_oom_score_adj(5)


def runs_first() -> None:
    """Let this thread, which collects what is recorded, go before the programs that make it, as far as that
    is allowed, but not those that it starts: they make lines, for which there is time.

    It runs soon for its turns are short (from Linux 6.12 on), rather than for its weight: the kernel spreads
    threads over processors by weight, and would put two of a program on one to leave the other to a thread
    that weighs as much as nine and sleeps most of the time.
    """
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, _SCHED_OTHER, _RESET_ON_FORK, _NICE, 0, _SLICE_NS, 0, 0)
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def runs_at_once() -> bool:
    """Let this thread, which does little but often, run when it wakes, before all without a real-time
    priority: SCHED_FIFO; whether that is allowed. If not, as `runs_first` has it.

    Where 64 threads wait for two processors, a turn of `runs_first` comes up to 0.8 s late.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        runs_first()
        return False
    return True


@contextmanager
def ended_first() -> Iterator[None]:
    """When memory runs out, the kernel ends this process and what it starts from now on before all others.

    Else it would end the largest: the program that is recorded.
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
