"""Reads when threads run and who wakes them from a Perfetto trace: ftrace's events, and task states.

    FtraceEventBundle   1 cpu  2 event…  3 lost_events  4 compact_sched  5 clock  6 time on it
                        7 CLOCK_BOOTTIME  10 end of the bundle before
    FtraceEvent         1 timestamp  2 pid  3 print {2 text}  235, 236, 240 begins, names and ends of tasks
                        4 sched_switch {2 prev_pid  4 prev_state  5 next_comm  6 next_pid  7 next_prio}
                        17 sched_wakeup, 20 sched_waking, 114 sched_wakeup_new {2 pid  5 target_cpu}
    CompactSched        5 names…  columns, times as differences: 1 times of switches  2 prev_state  3 next_pid
                        4 next_prio  6 next name;  7 times of wakings  8 pid  9 target_cpu
    GenericKernelTaskStateEvent   1 cpu  2 comm  3 tid  4 state

A compact switch does not state which thread leaves: it is the one that ran before on that processor. Who woke
whom, and what a state of a thread means after the one before, is known when rows are in the order of time.
Source: protos/perfetto/trace/ftrace/ftrace_event_bundle.proto, sched.proto,
generic_kernel/generic_task_state.proto.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Final

import orjson

from tracepipe.event.model import ID_LIMIT, TIME_LIMIT_NS, cut_text
from tracepipe.event.tables import packed
from tracepipe.event.vocabulary import RUNNABLE, RUNNING, WAKEUP, state_text
from tracepipe.readers.perfetto_lives import END, NEW_PROCESS, NEW_THREAD, RENAME
from tracepipe.readers.perfetto_tracks import CPUS_MAX, Tracks
from tracepipe.readers.sorted_rows import Cache, SortedRow, SortedRows
from tracepipe.readers.wire_fields import BYTES, signed, tagged, text, varints

LEAVES, WOKEN, BEGINS = range(3)
"""The order of events at the same time. Where a processor switches again at that time, those of the second
switch come after those of the first, and so on.
"""
_CPU, _EVENT, _LOST, _COMPACT, _FTRACE_CLOCK = 1 << 3, 2 << 3 | BYTES, 3 << 3, 4 << 3 | BYTES, 5 << 3
_FTRACE_TIME, _BOOT_TIME, _LAST_END = 6 << 3, 7 << 3, 10 << 3
_TIME, _BY = 1 << 3, 2 << 3
_SWITCH, _WAKEUP, _WAKING, _WAKEUP_NEW = (field << 3 | BYTES for field in (4, 17, 20, 114))
_TID, _TARGET = 2 << 3, 5 << 3
_NEW, _RENAMED, _FREED = (field << 3 | BYTES for field in (235, 236, 240))
_ONE, _COMM, _NEW_COMM, _CLONED = 1 << 3, 2 << 3 | BYTES, 3 << 3 | BYTES, 3 << 3
# From the kernel's sched.h.
_CLONE_THREAD: Final = 0x10000
_PRINT, _TEXT = 3 << 3 | BYTES, 2 << 3 | BYTES
_PREV_STATE, _NEXT_COMM, _NEXT, _NEXT_PRIO = 4 << 3, 5 << 3 | BYTES, 6 << 3, 7 << 3
BY_WHO_RUNS, AGAIN, STATE = "by who runs", "again", "state"
"""Phases of rows whose meaning depends on the rows before them in time."""
# Rank, phase and name of rows.
_LEAVING, _BEGINNING = (LEAVES, "E", RUNNING), (BEGINS, "B", RUNNING)
_STATED, _WAKING_BY_WHO_RUNS = (WOKEN, STATE, RUNNING), (WOKEN, BY_WHO_RUNS, WAKEUP)
_Bundle = tuple[int, int]
"""The processor, and how far CLOCK_BOOTTIME is ahead of the bundle's clock."""


class Scheduling:
    """Reads bundles and states. `counted` counts what was not read, by kind."""

    def __init__(
        self,
        rows: SortedRows,
        tracks: Tracks,
        on_trace: Callable[[int], int | None],
        mark: Callable[[int, int, str], bool],
    ) -> None:
        self._rows, self._tracks, self._on_trace, self._mark = rows, tracks, on_trace, mark
        self.counted: Counts[str] = Counts()
        self._running: dict[int, int] = {}
        """By processor: the thread that runs there."""
        self._end_ns: dict[int, int] = {}
        self._turns: dict[int, tuple[int, int]] = {}
        """By processor: the time of its last event, and how many switches after others it had then."""

    # ftrace ---------------------------------------------------------------------------------------------

    def add_bundle(self, data: bytes) -> tuple[int, int, int] | None:
        """Add an FtraceEventBundle. If events before it were lost, return between which times, and on which
        processor. Raises WireError.
        """
        fields = tagged(data)
        of = dict(fields)
        cpu = of.get(_CPU, 0)
        if cpu >= CPUS_MAX:
            self.counted["bundle|bundles of ftrace has|have an impossible processor"] += 1
            return None
        cpu = self._tracks.own_cpu(cpu)
        ahead_ns = 0
        if of.get(_FTRACE_CLOCK, 0):
            if _FTRACE_TIME not in of or _BOOT_TIME not in of:
                self.counted["bundle|bundles of ftrace is|are on a clock that is not related"] += 1
                return None
            ahead_ns = signed(of[_BOOT_TIME]) - signed(of[_FTRACE_TIME])
        first_ns, before_ns = TIME_LIMIT_NS, self._end_ns.get(cpu, of.get(_LAST_END, 0))
        bundle = cpu, ahead_ns
        for ts_ns in self._events(fields, bundle):
            first_ns = min(first_ns, ts_ns)
            self._end_ns[cpu] = ts_ns
        if not of.get(_LOST, 0) or first_ns == TIME_LIMIT_NS:
            return None
        start_ns = self._on_trace(before_ns) if before_ns else first_ns
        return min(first_ns, max(0, first_ns if start_ns is None else start_ns)), first_ns, cpu

    def _events(self, fields: list[tuple[int, Any]], bundle: _Bundle) -> Iterator[int]:
        """Add the events of a bundle, and yield the times of those that are read."""
        for tag, value in fields:
            if tag == _COMPACT:
                yield from self._compact(value, bundle)
            elif tag == _EVENT:
                of = dict(tagged(value))
                ts_ns = self._time(of.get(_TIME, 0), bundle)
                if ts_ns is not None and self._event(of, ts_ns, bundle[0]):
                    yield ts_ns

    def _time(self, ns: int, bundle: _Bundle) -> int | None:
        placed = self._on_trace(signed(ns) + bundle[1])
        if placed is None or not 0 <= placed <= TIME_LIMIT_NS:
            self.counted["event|events of ftrace is|are at a time that cannot be placed"] += 1
            return None
        return placed

    def _event(self, of: dict[int, Any], ts_ns: int, cpu: int) -> bool:
        """Add an event. Return whether its kind is read."""
        if _SWITCH in of:
            switch = dict(tagged(of[_SWITCH]))
            self._running[cpu] = signed(switch.get(_TID, 0))
            comm = text(switch.get(_NEXT_COMM, b""))
            prev_state, prio = signed(switch.get(_PREV_STATE, 0)), signed(switch.get(_NEXT_PRIO, 0))
            self._switch(ts_ns, cpu, prev_state, signed(switch.get(_NEXT, 0)), prio, comm)
            return True
        for tag in (_WAKING, _WAKEUP_NEW, _WAKEUP):
            if tag in of:
                woken = dict(tagged(of[tag]))
                args: dict[str, Any] = {"by_tid": signed(of.get(_BY, 0)), "target_cpu": woken.get(_TARGET, 0)}
                if tag == _WAKEUP_NEW:
                    args["is_new"] = True
                phase = AGAIN if tag == _WAKEUP else "I"
                self._add(ts_ns, signed(woken.get(_TID, 0)), cpu, (WOKEN, phase, WAKEUP), args)
                return True
        if self._task(of, ts_ns):
            return True
        if _PRINT in of and self._mark(
            ts_ns, signed(of.get(_BY, 0)), text(dict(tagged(of[_PRINT])).get(_TEXT, b""))
        ):
            return True
        self.counted["event|events of ftrace is|are not of a kind that is read"] += 1
        return False

    def _task(self, of: dict[int, Any], ts_ns: int) -> bool:
        """Note that a task begins, ends or gets a name. Return whether it does."""
        for tag, id, comm in ((_NEW, _ONE, _COMM), (_RENAMED, _ONE, _NEW_COMM), (_FREED, _TID, 0)):
            if tag not in of:
                continue
            task = dict(tagged(of[tag]))
            kind = END if tag == _FREED else RENAME
            if tag == _NEW:
                kind = NEW_THREAD if task.get(_CLONED, 0) & _CLONE_THREAD else NEW_PROCESS
            if 0 < (tid := signed(task.get(id, 0))) <= ID_LIMIT:
                name = cut_text(text(task.get(comm, b"")))
                self._tracks.note(ts_ns, kind, tid, signed(of.get(_BY, 0)), name)
            return True
        return False

    def _compact(self, data: bytes, bundle: _Bundle) -> Iterator[int]:
        """Add the events of a CompactSched, and yield the times of its events."""
        columns: dict[int, list[int]] = {}
        names: list[str] = []
        for tag, value in tagged(data):
            if tag == 5 << 3 | BYTES:
                names.append(text(value))
            elif tag & 7 == BYTES:
                columns.setdefault(tag >> 3, []).extend(map(signed, varints(value)))
        nothing: list[int] = []
        get = columns.get
        switches = (accumulate(get(1, nothing)), *(get(field, nothing) for field in (2, 3, 4, 6)))
        for ns, prev_state, tid, prio, name in zip(*switches, strict=False):
            if (ts_ns := self._time(ns, bundle)) is not None:
                comm = names[name] if 0 <= name < len(names) else ""
                self._switch(ts_ns, bundle[0], prev_state, tid, prio, comm)
                yield ts_ns
        wakings = (accumulate(get(7, nothing)), get(8, nothing), get(9, nothing))
        for ns, tid, target in zip(*wakings, strict=False):
            if (ts_ns := self._time(ns, bundle)) is not None:
                self._add(ts_ns, tid, bundle[0], _WAKING_BY_WHO_RUNS, {"target_cpu": target})
                yield ts_ns

    def _switch(self, ts_ns: int, cpu: int, prev_state: int, tid: int, prio: int, comm: str) -> None:
        """Add a context switch: one thread leaves a processor, and another gets it."""
        last_ns, turn = self._turns.get(cpu, (ts_ns - 1, 0))
        self._turns[cpu] = ts_ns, turn + 1 if last_ns == ts_ns else 0
        prev = self._running.get(cpu)
        if prev:
            self._add(ts_ns, prev, cpu, _LEAVING, {"prev_state": state_text(max(0, prev_state))})
        if tid:
            self._add(ts_ns, tid, cpu, _BEGINNING, {"prio": prio}, comm)
        self._running[cpu] = tid

    # States ---------------------------------------------------------------------------------------------

    def add_state(self, data: bytes, ts_ns: int) -> None:
        """Add a GenericKernelTaskStateEvent. Raises WireError."""
        of = dict(tagged(data))
        comm = text(of.get(2 << 3 | BYTES, b""))
        cpu, tid = signed(of.get(1 << 3, 0)), signed(of.get(3 << 3, 0))
        if not 0 <= cpu < CPUS_MAX or not 0 <= ts_ns <= TIME_LIMIT_NS:
            self.counted["state|states of threads has|have an impossible processor or time"] += 1
            return
        cpu = self._tracks.own_cpu(cpu)
        self._add(ts_ns, tid, cpu, _STATED, {"state": of.get(4 << 3, 0)}, comm)
        if of.get(4 << 3) == _IS_DEAD and 0 < tid <= ID_LIMIT:
            self._tracks.note(ts_ns, END, tid)

    # Rows -----------------------------------------------------------------------------------------------

    def _add(
        self, ts_ns: int, tid: int, cpu: int, kind: tuple[int, str, str], args: dict[str, Any], comm: str = ""
    ) -> None:
        """Add a row. `kind` is its rank among those of its time, its phase and its name."""
        if not 0 < tid <= ID_LIMIT:
            self.counted["event|events of the scheduler has|have an impossible thread"] += 1
            return
        rank, phase, name = kind
        self._tracks.lives.see(self._tracks.machine, tid, ts_ns)
        if 0 <= args.get("target_cpu", CPUS_MAX) < CPUS_MAX:
            self._tracks.own_cpu(args["target_cpu"])
        if phase != STATE:
            last_ns, turn = self._turns.setdefault(cpu, (ts_ns, 0))
            if last_ns != ts_ns:
                turn = 0
                self._turns[cpu] = ts_ns, turn
            rank += turn * (BEGINS + 1)
        record = {"type": "scheduler", "name": name, "phase": phase, "tid": tid, "cpu": cpu}
        if comm:
            record["comm"] = cut_text(comm)
        self._rows.add(SortedRow(ts_ns, rank, 0, 0, packed(record), packed(args)))


_IS_RUNNABLE, _IS_RUNNING, _IS_DEAD = 2, 3, 7
# States of GenericKernelTaskStateEvent in which a thread has left its processor.
_LEFT: Final = {_IS_RUNNABLE: RUNNABLE, 4: "sleeping", 5: "disk", 6: "stopped", 7: "dead", 8: "dead"}
_THREADS_MAX: Final = 1 << 16


class ThreadsInOrder:
    """Reads rows of `Scheduling`. `counted` counts those without a meaning."""

    def __init__(self, tracks: Tracks) -> None:
        self._tracks = tracks
        self.counted: Counts[str] = Counts()
        self._on: dict[int, int] = {}
        """By processor: the thread that runs there."""
        self._runs: dict[tuple[int, int], int] = {}
        """By machine and thread: the processor on which it runs."""
        self._is_woken = False
        self._records = Cache[bytes, bytes]()

    def event(self, of: dict[str, Any], second: bytes, ts_ns: int) -> tuple[bytes, bytes] | None:
        """The record of a row at a time and its arguments; None where it changes nothing."""
        tid, cpu, phase = of["tid"], of["cpu"], of["phase"]
        machine = cpu // CPUS_MAX
        thread_key = machine, tid
        args: dict[str, Any] | None = None
        thread = self._tracks.lives.thread(machine, tid, ts_ns)
        if of["name"] == WAKEUP and (machine or self._tracks.lives.threads):
            args = orjson.loads(second)
            if 0 <= args["target_cpu"] < CPUS_MAX:
                args["target_cpu"] = self._tracks.cpu(args["target_cpu"] + machine * CPUS_MAX)
            if "by_tid" in args:
                args["by_tid"] = self._tracks.waker(machine, args["by_tid"], ts_ns)
        if phase == STATE:
            state = orjson.loads(second)["state"]
            if state in (_IS_RUNNING, _IS_RUNNABLE) and thread_key not in self._runs:
                phase, name, args = ("B", RUNNING, {}) if state == _IS_RUNNING else ("I", WAKEUP, {})
            elif state in _LEFT:  # if the thread is not known to run, its begin was not recorded
                phase, name, args = "E", RUNNING, {"prev_state": _LEFT[state]}
            else:
                self.counted["state|states of threads changes|change nothing in a timeline"] += 1
                return None
            of = {**of, "name": name}
        elif phase == BY_WHO_RUNS:
            waker = self._tracks.waker(machine, self._on.get(cpu, 0), ts_ns)
            phase, args = "I", {"by_tid": waker, **(args or orjson.loads(second))}
        elif phase == AGAIN:
            # The thread is on a queue now. sched_waking has shown who woke it.
            if self._is_woken:
                return None
            phase = "I"
        if phase == "B":
            if len(self._runs) >= _THREADS_MAX:
                self._runs.clear()
            self._on[cpu], self._runs[thread_key] = tid, cpu
        elif phase == "E":
            self._on.pop(self._runs.pop(thread_key, cpu), None)
        elif of["phase"] != AGAIN:
            self._is_woken = True
        if args is not None:
            # The bytes that orjson returns hold at least 4 KB of memory. A copy holds no more than its size.
            second = bytes(memoryview(orjson.dumps(args))) if args else b""
        name = of.get("comm") or self._tracks.task(machine, tid)
        if thread is not None and (not name or ts_ns < thread.renamed_ns):
            name = thread.name
        key = orjson.dumps({**of, "phase": phase, "comm": name, "nth": 0 if thread is None else thread.nth})
        record = self._records.get(key)
        if record is None:
            ids = self._tracks.scheduled(machine, tid, thread)
            made = {**of, "phase": phase, **ids, "cpu": self._tracks.cpu(cpu)}
            made.pop("comm", None)
            if name and not self._tracks.named_apart(ids, name):
                made["comm"] = name
            record = packed(made)
            self._records.keep(key, record, len(record))
        return record, second
