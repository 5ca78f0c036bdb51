"""Who goes first: this process where processors are few, the recorded program where memory is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NICE = -10
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_ENDED_FIRST = "1000"  # more than any share of the memory counts; proc_pid_oom_score_adj(5)


def runs_first() -> None:
    """Let this thread, which empties the ring, go before the programs that fill it, as far as that is
    allowed.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


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
