"""Renders records of probes.bpf.c as lines of an event file."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tracepipe.event.vocabulary import OFF_CPU, ON_CPU, PREEMPTED, RUNNING, SAMPLED, state_text
from tracepipe.hooks.hook import HOST_SAMPLE, Probe
from tracepipe.hooks.slots import Texts
from tracepipe.tracer.records.calls import Calls, teller
from tracepipe.tracer.records.line import BEGAN_AT, BEGAN_BEFORE, COMM, STACK, Head, Lines, Where, joined
from tracepipe.tracer.records.record import (
    CALL_ENTER,
    CALL_RETURN,
    EVENT,
    LAYER_OF_KIND,
    MET_RUNNING,
    MIGRATE,
    MORE,
    OF_WINDOWS,
    ON_CPU_SAMPLE,
    RECORD,
    SERVED,
    SWITCH_IN,
    SWITCH_OUT,
    SYSCALL_ENTER,
    SYSCALL_EXIT,
    TEXT,
    THREAD_END,
    THREAD_IDS,
    THREAD_NAME,
    THREAD_NEW,
    UNREPORTED,
    WAKEUP,
    WINDOW,
)
from tracepipe.tracer.records.syscalls import ENDED, syscall_arguments, syscall_result
from tracepipe.tracer.records.unrendered import Carried, RecordCarry, kinds_and_functions

_SWITCHES = frozenset({SWITCH_OUT, SWITCH_IN})
_STATEFUL = frozenset({*_SWITCHES, SYSCALL_ENTER, SYSCALL_EXIT, CALL_ENTER, CALL_RETURN})
_PREEMPTED = 0x100  # in prev_state
_BEGAN_BEFORE = '"began":"before the window"'
_ENDED_AFTER = '"ended":"after the window"'
_OPEN_CALLS_MAX = 512
"""The most open calls of a thread; deeper ones were left by a jump (longjmp), and did not return."""
_NOT_REPORTED = '"prev_state":"not reported"'
_BEGIN_NOT_REPORTED = '"began":"not reported"'


class HostStackNumbers(Protocol):
    """What is known of the stacks that records refer to. `is_alone`: the scheduler's events make no lines."""

    is_alone: bool

    def record_of(self, number: int) -> dict[str, Any] | None:
        """The record of a stack, with its id in the file; None where it is not known."""


class RecordRenderer:
    """Writes records as JSON lines: probes by index, system calls by number.

    `start_ns` is when the recording began: what was open then begins at that time in the file. `names` are
    those of the threads that ran before, by their ids in the capture's pid namespace. `causes` are those of
    windows: with them, only events in windows are written, and what is open at the end of a window ends
    there.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        syscalls: Mapping[int, str],
        values: Mapping[str, Mapping[int, str]],
        start_ns: int = 0,
        names: Mapping[int, str] | None = None,
        causes: Sequence[str] = (),
        host_stacks: HostStackNumbers | None = None,
    ) -> None:
        self._probes = probes
        self._stacks = host_stacks
        self._with_scheduler = host_stacks is None or not host_stacks.is_alone
        self._off: dict[int, tuple[Head, Where]] = {}
        self._written: set[int] = set()
        self._causes, self._windows = causes, 0
        self._window_name: dict[str, str] = {}
        self._is_open = not causes
        self._calls = Calls(probes, values)
        self._start_ns = start_ns
        self._syscall_enter = {n: Head("syscall", name, "B") for n, name in syscalls.items()}
        self._syscall_exit = {n: Head("syscall", name, "E") for n, name in syscalls.items()}
        self._syscall_arguments = {n: syscall_arguments(name) for n, name in syscalls.items()}
        self._switch_in = Head("scheduler", RUNNING, "B")
        self._switch_out = Head("scheduler", RUNNING, "E")
        self._samples = [Head(HOST_SAMPLE, name, "I") for name in (ON_CPU, SAMPLED)]
        self._waits, self._preempted = (Head(HOST_SAMPLE, name, "B") for name in (OFF_CPU, PREEMPTED))
        self._wakeup = Head("scheduler", "wakeup", "I")
        self._migrate = Head("scheduler", "migrate", "I")
        self._states = Texts(lambda state: f'"prev_state":"{state_text(state)}"')
        self._running: dict[int, Where] = {}
        self._in_syscall: dict[int, tuple[Head, Where] | None] = {}
        self._in_calls: dict[int, list[tuple[Head, Where]]] = {}
        self._names: dict[int, str] = {}
        self._unwritten_names = {tid: json.dumps(name) for tid, name in (names or {}).items() if name}
        self._ids: dict[int, tuple[int, int]] = {}

    def learn(self, chunk: bytes) -> None:
        """Read from a chunk what earlier lines need: the ids of threads in the capture's pid namespace."""
        for _, tid, _, _, kind, _, _, ids, _, _, _ in RECORD.iter_unpack(chunk):
            if kind == THREAD_IDS:
                shown_tid = ids & 0xFFFFFFFF
                self._ids[tid] = ids >> 32, shown_tid
                if shown_tid in self._unwritten_names:
                    self._unwritten_names[tid] = self._unwritten_names.pop(shown_tid)

    def carry(self) -> RecordCarry:
        return RecordCarry(self._probes)

    def resume(self, carried: Carried, start_ns: int) -> Lines:
        """Start after evicted records: returns the lines of what is open, which begins at `start_ns` and has
        an argument with its true begin.
        """
        names = dict(self._unwritten_names)
        self.learn(carried.known)
        self.render(carried.known)
        for tid, name in names.items():  # the lines above, which are not written, have taken them
            self._unwritten_names.setdefault(tid, name)
        if self._start_ns:
            self._start_ns = start_ns
        lines, calls, unwritten = Lines(), self._calls, self._unwritten_names
        for began_ns, tid, tgid, number, kind, torn, cpu, *a in RECORD.iter_unpack(carried.under_way):
            if kind == CALL_ENTER:
                head, args = calls.enter(start_ns, tid, tgid, number, torn, *a)
            elif kind == SYSCALL_ENTER:
                head, args = self._syscall_enter[number], self._syscall_arguments[number](*a)
            elif kind == SWITCH_IN:
                head, args = self._switch_in, ""
            else:
                self._belongs(kind, tid, tgid, cpu, number, *a)
                continue
            pid, shown_tid = self._ids.get(tid, (tgid, tid))
            if self._start_ns:
                self._continue(Lines(), kind, start_ns, tid, 0, head, (pid, shown_tid, cpu))
            comm = COMM % unwritten.pop(tid) if tid in unwritten else ""
            lines.event(start_ns, head, pid, shown_tid, cpu, joined(args, BEGAN_AT % began_ns), comm)
        return lines

    def render(self, chunk: bytes) -> Lines:
        lines = Lines()
        add, calls, ids, unwritten = lines.event, self._calls, self._ids, self._unwritten_names
        for ts_ns, tid, tgid, number, kind, torn, cpu, a0, a1, a2, a3 in RECORD.iter_unpack(chunk):
            if kind == CALL_ENTER:
                head, args = calls.enter(ts_ns, tid, tgid, number, torn, a0, a1, a2, a3)
            elif kind == CALL_RETURN:
                head, args = calls.leave(tid, tgid, number, torn, a0, a1)
            elif kind == SYSCALL_ENTER:
                head, args = self._syscall_enter[number], self._syscall_arguments[number](a0, a1, a2, a3)
            elif kind == SYSCALL_EXIT:
                head, args = self._syscall_exit[number], syscall_result(a0)
            elif kind == SWITCH_IN:
                head, args = self._switch_in, ""
            elif kind == SWITCH_OUT:
                head, args = self._switch_out, self._states[a0]
                if a1 == UNREPORTED:
                    args = f"{args},{_BEGIN_NOT_REPORTED}"
            elif kind == ON_CPU_SAMPLE:
                head, args = self._samples[min(a1, 1)], ""
            elif kind == WAKEUP:
                # A thread outside of the namespace is 0, as the kernel shows it too.
                by_tid = ids.get(number, (0, 0))[1] if ids else number
                head, args = self._wakeup, f'"by_tid":{by_tid},"target_cpu":{a0}'
            elif kind == MIGRATE:
                head, args = self._migrate, f'"from_cpu":{a0},"to_cpu":{a1}'
            elif kind == EVENT:
                head, args = calls.hit(number, teller(tid, cpu), torn, a0, a1, a2, a3)
            elif kind == WINDOW:
                self._turn(lines, ts_ns, number, a0, a1, (tgid, tid, cpu))
                continue
            else:
                self._belongs(kind, tid, tgid, cpu, number, a0, a1, a2, a3)
                continue
            if not self._is_open:
                if kind == SWITCH_OUT and a0 & ENDED:
                    self._forget(tid)
                continue
            pid, shown_tid = ids.get(tid, (tgid, tid)) if ids else (tgid, tid)
            is_drawn = kind not in _SWITCHES or self._with_scheduler
            if is_drawn and kind in _STATEFUL and (self._start_ns or (a1 and kind in _SWITCHES)):
                self._continue(lines, kind, ts_ns, tid, a1, head, (pid, shown_tid, cpu))
            comm = COMM % unwritten.pop(tid) if tid in unwritten else ""
            if is_drawn:
                more = comm + self._stack(lines, a0) if kind == ON_CPU_SAMPLE else comm
                add(ts_ns, head, pid, shown_tid, cpu, args, more)
                comm = ""
            if self._stacks is not None and kind in _SWITCHES:
                self._add_off(lines, kind, ts_ns, tid, (a0, a2), (pid, shown_tid, cpu), comm)
            if kind == SWITCH_OUT:
                if a0 & ENDED:
                    self._forget(tid)
            elif kind == CALL_RETURN and number in calls.effective:
                calls.effect(lines, ts_ns, tid, (pid, shown_tid, cpu), number, a0, a1)
        return lines

    def _stack(self, lines: Lines, number: int) -> str:
        """The field of an event that refers to a stack, whose line is added if it is new."""
        record = None if self._stacks is None else self._stacks.record_of(number)
        if record is None:
            return ""
        if record["id"] not in self._written:
            self._written.add(record["id"])
            lines.record(record)
        return str(STACK % record["id"])

    def _add_off(
        self, lines: Lines, kind: int, ts_ns: int, tid: int, words: tuple[int, int], where: Where, comm: str
    ) -> None:
        """Add the line where a thread leaves its processor, with its stack there, or gets one again."""
        state, word = words
        left = self._off.pop(tid, None)
        if kind == SWITCH_IN and left is not None:
            by_tid = self._ids.get(word - 1, (0, word - 1 if not self._ids else 0))[1]
            lines.event(ts_ns, left[0], *where, f'"woken_by_tid":{by_tid}' if word else "", comm)
        elif kind == SWITCH_OUT:
            if left is not None:  # the switch between was not reported
                lines.event(ts_ns, left[0], *where, '"ended":"not reported"')
            if not state & ENDED:
                head = self._waits if state and not state & _PREEMPTED else self._preempted
                self._off[tid] = head.ended(), where
                more = comm + self._stack(lines, word)
                lines.event(ts_ns, head, *where, f'"state":"{state_text(state)}"', more)

    def counts(self, chunk: bytes) -> dict[str, int]:
        counts: Counter[str] = Counter()
        by_kind, by_function = kinds_and_functions(chunk, len(self._calls))
        for kind, layer in LAYER_OF_KIND.items():
            counts[layer] += by_kind[kind]
        for number, times in enumerate(by_function):
            counts[self._calls.layer(number)] += times
        return {layer: times for layer, times in counts.items() if times}

    def _continue(
        self, lines: Lines, kind: int, ts_ns: int, tid: int, note: int, head: Head, where: Where
    ) -> None:
        """Follow what threads are in; before a record that does not fit, add the missing begin or end."""
        if kind == CALL_ENTER:
            if head.phase == "B":
                calls = self._in_calls.setdefault(tid, [])
                calls.append((head, where))
                if len(calls) > _OPEN_CALLS_MAX:
                    del calls[0]
        elif kind == CALL_RETURN:
            if calls := self._in_calls.get(tid, []):
                calls.pop()
            else:
                self._began_before(lines, head, where)
        elif kind == SYSCALL_ENTER:
            self._in_syscall[tid] = head, where
        elif kind == SYSCALL_EXIT:
            if tid not in self._in_syscall:
                self._began_before(lines, head, where)
            self._in_syscall[tid] = None
        elif kind == SWITCH_IN and note != UNREPORTED:
            self._running[tid] = where
        elif kind == SWITCH_OUT and note != MET_RUNNING:
            self._running.pop(tid, None)
        elif note == MET_RUNNING:
            self._began_before(lines, self._switch_in, where)
        elif note == UNREPORTED and kind == SWITCH_IN:
            self._running[tid] = where
            lines.event(ts_ns, self._switch_out, *where, _NOT_REPORTED)

    def _began_before(self, lines: Lines, head: Head, where: Where) -> None:
        before = _BEGAN_BEFORE if self._causes else BEGAN_BEFORE
        lines.event(self._start_ns, head.begun(), *where, before)

    def _turn(self, lines: Lines, ts_ns: int, cause: int, begins: int, waited_ns: int, where: Where) -> None:
        """Begin or end a window. If two programs begin one at the same time, it is a single window."""
        if bool(begins) == self._is_open:
            return
        self._is_open = bool(begins)
        if begins:
            self._windows += 1
            text = b"".join(self._calls.texts.pop(teller(0, OF_WINDOWS), ())).rstrip(b"\0").decode()
            self._window_name = {"name": text} if text else {}
            self._start_ns = ts_ns
        else:  # end everything that is open, the inner slices before the outer ones
            for entered in self._in_syscall.values():
                if entered is not None:
                    lines.event(ts_ns, entered[0].ended(), *entered[1], _ENDED_AFTER)
            for calls in self._in_calls.values():
                for head, call_where in reversed(calls):
                    lines.event(ts_ns, head.ended(), *call_where, _ENDED_AFTER)
            for thread_where in self._running.values():
                lines.event(ts_ns, self._switch_out, *thread_where, _ENDED_AFTER)
            self._in_calls.clear()
            for head, left_where in self._off.values():
                lines.event(ts_ns, head, *left_where, _ENDED_AFTER)
            self._running.clear()
            self._off.clear()
            self._calls.effects.forget()  # no thread is in a call that was seen
        self._in_syscall.clear()  # also at the begin: threads may have entered one since they were found
        record = {"ts_ns": ts_ns, "type": "window", "window": self._windows, "phase": "B" if begins else "E"}
        pid, tid = self._ids.get(where[1], where[:2])
        by = {"pid": pid, "tid": tid} if pid else {}
        waited = {"waited_ns": waited_ns} if waited_ns else {}
        lines.record(record | self._window_name | by | {"cause": self._causes[cause]} | waited)

    def _belongs(self, kind: int, tid: int, tgid: int, cpu: int, number: int, *a: int) -> None:
        """Keep a record that belongs to a later one."""
        if kind in (THREAD_NEW, THREAD_NAME):
            name = json.dumps(struct.pack("<QQ", *a[:2]).split(b"\0", 1)[0].decode(errors="replace"))
            if self._names.get(tid) != name:
                self._names[tid] = self._unwritten_names[tid] = name
            self._in_syscall.setdefault(tid, None)
            self._calls.kernels.add_thread(tid, tgid, number if kind == THREAD_NEW else 0)
        elif kind == THREAD_END:
            self._forget(tid)
        elif kind == MORE:
            self._calls.more[tid] = number, a
        elif kind == TEXT:
            self._calls.texts.setdefault(teller(tid, cpu), []).append(struct.pack("<4Q", *a))
        elif kind == SERVED:
            self._calls.served[tid] = a[0]

    def _forget(self, tid: int) -> None:
        """Forget a thread that has ended: in a capture of days, millions of threads end."""
        for kept in (
            self._in_calls,
            self._names,
            self._unwritten_names,
            self._in_syscall,
            self._running,
            self._off,
        ):
            kept.pop(tid, None)
        self._calls.forget(tid)
        self._calls.kernels.forget(tid)
