"""How threads spend their time: running, waiting for a processor, and waiting for another reason.

switch-in ──running──▶ switch-out ──reason──▶ wakeup ──for a processor──▶ switch-in
                                  └──────── preempted ───────────────────▶
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from tracepipe.event.vocabulary import state_text
from tracepipe.tracer.records.record import (
    MET_RUNNING,
    SWITCH_IN,
    SWITCH_OUT,
    THREAD_IDS,
    UNREPORTED,
    WAKEUP,
)

_RUNNABLE, _ENDED = (0, 0x100), 0x30  # prev_state: not waiting; EXIT_DEAD or EXIT_ZOMBIE
_ENDED_KEPT = 1024  # about how many threads are kept before those that ended are summed up
_THREADS_MAX = 65536  # as many as the BPF programs follow; beyond that, ends were lost

PREEMPTED = "preempted"
FOR_A_PROCESSOR = "for a processor"
"""The wait from the wakeup to the switch-in."""


@dataclass(frozen=True, slots=True)
class ThreadTotal:
    """A thread's time. `waits`: reason → ns; `switches`: how often it left a processor.

    `tid` is 0 for the sum of `ended` threads, which are not kept separately.
    """

    tid: int
    pid: int
    name: str
    running_ns: int
    switches: int
    waits: dict[str, int]
    ended: int = 0


@dataclass(slots=True)
class _Thread:
    pid: int
    shown_tid: int
    name: str = ""
    running_ns: int = 0
    switches: int = 0
    waits: dict[str, int] = field(default_factory=dict)
    in_ns: int | None = None
    out_ns: int | None = None
    woken_ns: int | None = None
    reason: str = ""
    has_ended: bool = False

    def wait(self, reason: str, duration_ns: int) -> None:
        if duration_ns > 0:
            self.waits[reason] = self.waits.get(reason, 0) + duration_ns


class SchedulerTotals:
    """Adds up switches and wakeups by thread."""

    def __init__(self, start_ns: int, name_of: Callable[[int, int], str]) -> None:
        self.events = 0
        self._start_ns, self._name_of = start_ns, name_of
        self._threads: dict[int, _Thread] = {}
        self._rest = _Thread(0, 0)
        self._rest_count = 0
        self._sum_up_at = _ENDED_KEPT

    def add(self, kind: int, ts_ns: int, tid: int, tgid: int, a0: int, a1: int) -> bool:
        """Take a switch, wakeup or migration; returns whether the thread ended with it."""
        self.events += 1
        thread = self._threads.get(tid)
        if thread is None or thread.has_ended:
            thread = self._new(tid, tgid)
        if kind == SWITCH_OUT:
            self._leave(thread, ts_ns, a0, a1)
            thread.has_ended = bool(a0 & _ENDED)
            return thread.has_ended
        if kind == SWITCH_IN:
            if a1 != UNREPORTED and thread.out_ns is not None:
                woken_ns = thread.woken_ns
                thread.wait(thread.reason, (ts_ns if woken_ns is None else woken_ns) - thread.out_ns)
                if woken_ns is not None:
                    thread.wait(FOR_A_PROCESSOR, ts_ns - woken_ns)
            thread.in_ns, thread.out_ns, thread.woken_ns = ts_ns, None, None
        elif kind == WAKEUP and thread.out_ns is not None and thread.woken_ns is None:
            thread.woken_ns = ts_ns
        return False

    def learn(self, kind: int, tid: int, tgid: int, a0: int, a1: int) -> None:
        """Take a thread's start, name, or ids in the capture's pid namespace."""
        thread = self._threads.get(tid)
        if thread is None or thread.has_ended:
            thread = self._new(tid, tgid)
        if kind == THREAD_IDS:
            thread.pid, thread.shown_tid = a0 >> 32, a0 & 0xFFFFFFFF
        else:
            thread.name = struct.pack("<QQ", a0, a1).split(b"\0", 1)[0].decode(errors="replace")

    def name(self, tid: int, tgid: int, name: str) -> None:
        """Take a thread's name."""
        thread = self._threads.get(tid)
        if thread is None or thread.has_ended:
            thread = self._new(tid, tgid)
        thread.name = name

    def forget(self) -> None:
        """Forget which threads run and which wait."""
        for thread in self._threads.values():
            thread.in_ns = thread.out_ns = thread.woken_ns = None

    def threads(self, now_ns: int) -> list[ThreadTotal]:
        """Every thread that had a switch; running threads are counted until now."""
        totals = []
        for thread in self._threads.values():
            if not thread.switches and thread.in_ns is None:
                continue
            if not thread.name:
                thread.name = self._name_of(thread.pid, thread.shown_tid)
            running_ns = thread.running_ns
            if thread.in_ns is not None:
                running_ns += max(0, now_ns - thread.in_ns)
            totals.append(_total(thread, running_ns))
        if self._rest_count:
            totals.append(_total(self._rest, self._rest.running_ns, self._rest_count))
        return totals

    def _leave(self, thread: _Thread, ts_ns: int, state: int, note: int) -> None:
        thread.switches += 1
        if note == MET_RUNNING:
            thread.running_ns += max(0, ts_ns - self._start_ns)
        elif note != UNREPORTED and thread.in_ns is not None:
            thread.running_ns += max(0, ts_ns - thread.in_ns)
        thread.in_ns, thread.out_ns, thread.woken_ns = None, ts_ns, None
        thread.reason = PREEMPTED if state in _RUNNABLE else state_text(state)

    def _new(self, tid: int, tgid: int) -> _Thread:
        old = self._threads.pop(tid, None)
        if old is not None:
            self._sum_up(old)
        elif len(self._threads) >= self._sum_up_at:
            gone = [known for known, thread in self._threads.items() if thread.has_ended]
            if len(self._threads) - len(gone) >= _THREADS_MAX:
                gone = list(self._threads)[: _THREADS_MAX // 2]
            for known in gone:
                self._sum_up(self._threads.pop(known))
            self._sum_up_at = max(_ENDED_KEPT, min(2 * len(self._threads), _THREADS_MAX))
        thread = self._threads[tid] = _Thread(tgid, tid)
        return thread

    def _sum_up(self, thread: _Thread) -> None:
        rest = self._rest
        rest.running_ns += thread.running_ns
        rest.switches += thread.switches
        for reason, duration_ns in thread.waits.items():
            rest.wait(reason, duration_ns)
        self._rest_count += 1


def _total(thread: _Thread, running_ns: int, ended: int = 0) -> ThreadTotal:
    name = "threads that ended" if ended else thread.name
    waits = dict(thread.waits)
    return ThreadTotal(thread.shown_tid, thread.pid, name, running_ns, thread.switches, waits, ended)
