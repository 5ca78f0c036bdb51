"""Turns sorted rows of the scheduler into records of events: who woke whom, and what a state of a thread
means after the one before.
"""

from __future__ import annotations

from collections import Counter as Counts
from typing import Any, Final

import orjson

from tracepipe.event.tables import packed
from tracepipe.event.vocabulary import RUNNABLE, RUNNING, WAKEUP
from tracepipe.readers.known import Known
from tracepipe.readers.perfetto_sched import AGAIN, BY_WHO_RUNS, STATE
from tracepipe.readers.perfetto_tracks import Tracks

_RUNNABLE, _RUNNING = 2, 3
# States of GenericKernelTaskStateEvent in which a thread has left its processor.
_LEFT: Final = {_RUNNABLE: RUNNABLE, 4: "sleeping", 5: "disk", 6: "stopped", 7: "dead", 8: "dead"}
_THREADS_MAX: Final = 1 << 16


class ThreadsInOrder:
    """Takes rows of `Scheduling`. `counted` counts those without a meaning."""

    def __init__(self, tracks: Tracks) -> None:
        self._tracks = tracks
        self.counted: Counts[str] = Counts()
        self._on: dict[int, int] = {}
        """By processor: the thread that runs there."""
        self._runs: dict[int, int] = {}
        """By thread: the processor on which it runs."""
        self._is_woken = False
        self._records = Known[bytes, bytes]()

    def event(self, of: dict[str, Any], second: bytes) -> tuple[bytes, bytes] | None:
        """The record of a row and its arguments; None where it changes nothing."""
        tid, cpu, phase = of["tid"], of["cpu"], of["phase"]
        args: dict[str, Any] | None = None
        if phase == STATE:
            stated = self._state(tid, orjson.loads(second)["state"])
            if stated is None:
                return None
            phase, name, args = stated
            of = {**of, "name": name}
        elif phase == BY_WHO_RUNS:
            phase, args = "I", {"by_tid": self._on.get(cpu, 0), **orjson.loads(second)}
        elif phase == AGAIN:
            # The thread is on a queue now. sched_waking has shown who woke it.
            if self._is_woken:
                return None
            phase = "I"
        if phase == "B":
            self._begin(tid, cpu)
        elif phase == "E":
            self._on.pop(self._runs.pop(tid, cpu), None)
        elif of["phase"] != AGAIN:
            self._is_woken = True
        if args is not None:
            # The bytes that orjson returns hold at least 4 KB of memory. A copy holds no more than its size.
            second = bytes(memoryview(orjson.dumps(args))) if args else b""
        return self._record({**of, "phase": phase}), second

    def _begin(self, tid: int, cpu: int) -> None:
        if len(self._runs) >= _THREADS_MAX:
            self._runs.clear()
        self._on[cpu], self._runs[tid] = tid, cpu

    def _state(self, tid: int, state: int) -> tuple[str, str, dict[str, Any]] | None:
        """The phase, the name and the arguments for a state."""
        if state == _RUNNING and tid not in self._runs:
            return "B", RUNNING, {}
        if state == _RUNNABLE and tid not in self._runs:
            return "I", WAKEUP, {}
        if state in _LEFT:  # if the thread is not known to run, its begin was not recorded
            return "E", RUNNING, {"prev_state": _LEFT[state]}
        self.counted["state|states of threads changes|change nothing in a timeline"] += 1
        return None

    def _record(self, of: dict[str, Any]) -> bytes:
        """The record with the thread's process, where that is known."""
        text = orjson.dumps(of)
        record = self._records.get(text)
        if record is None:
            pid = self._tracks.process_of(of["tid"])
            whole = of if pid is None else {**of, **self._tracks.thread_fields(pid, of["tid"])}
            record = packed(whole)
            self._records.keep(text, record, len(record))
        return record
