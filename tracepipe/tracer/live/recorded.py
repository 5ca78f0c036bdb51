"""Totals of a recording that is read, also while it is written: its events become rows for `Totals`."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, replace

from tracepipe.event.columns import SPECIAL, SourceBatch
from tracepipe.event.model import Header
from tracepipe.event.tables import Tables
from tracepipe.event.vocabulary import RUNNING
from tracepipe.event.warps import Warps
from tracepipe.tracer.live.totals import WHOLE, Function, Row, Snapshot, Totals
from tracepipe.tracer.records import record
from tracepipe.tracer.records.record import RECORD_BYTES, Loss
from tracepipe.tracer.records.syscalls import state_of_text

_OF_PHASE = {"B": record.CALL_ENTER, "E": record.CALL_RETURN, "I": record.EVENT, "X": WHOLE}
_OF_SYSCALLS = {"B": record.SYSCALL_ENTER, "E": record.SYSCALL_EXIT}
_OF_SCHEDULER = {
    (RUNNING, "B"): record.SWITCH_IN, (RUNNING, "E"): record.SWITCH_OUT,
    ("wakeup", "I"): record.WAKEUP, ("migrate", "I"): record.MIGRATE,
}  # fmt: skip
# Events in these layers are effects of calls, which are counted themselves.
_OF_MEMORY = frozenset({"memory", "transfer"})


@dataclass(slots=True)
class _Rule:
    """The events of a shape become rows with this kind and id, of a thread, which `comm` names if it is not
    empty. `is_dated`: their times are of the recording's own clock. `operation` is the name of the
    operation on memory. `kind` is None for events that are not calls.
    """

    tid: int
    pid: int
    comm: str
    is_dated: bool
    operation: str = ""
    is_copy: bool = False
    kind: int | None = None
    number: int = 0


class RecordedTotals:
    """Takes batches in order; `snapshot` gives the totals at any time, on any thread. The present time is
    that of the last event plus the time since it was read.
    """

    def __init__(self, header: Header) -> None:
        self._lock = threading.Lock()
        self._layers = tuple(header.layers.got)
        self._start_ns = header.start_ns(header.default_clock)
        self._totals: Totals | None = None
        self._numbers: dict[Function, int] = {}
        self._syscalls: dict[int, str] = {}
        self._syscall_numbers: dict[str, int] = {}
        self._rules: dict[int, _Rule] = {}
        self._rounds = 0
        self._counts: Counter[str] = Counter()
        self._last_ns = self._start_ns or 0
        self._read_at_ns = time.monotonic_ns()
        self._has_ended = False

    def add(self, batch: SourceBatch, tables: Tables) -> None:
        """Add the events of a batch."""
        if self._rounds != tables.rounds:
            self._rules, self._rounds = {}, tables.rounds
        events = batch.events
        with self._lock:
            if self._totals is None:  # they begin with the recording, or with its first event
                if self._start_ns is None:
                    self._start_ns = self._last_ns = min(events.ts_ns.tolist(), default=0)
                self._totals = Totals(
                    (), self._syscalls, self._start_ns, self._layers, name_of=lambda pid, tid: ""
                )
            totals, rows = self._totals, list[Row]()
            columns = (events.ts_ns, events.shape, events.args, events.dur_ns)
            for ts_ns, number, args, dur_ns in zip(*(one.tolist() for one in columns), strict=True):
                if number == SPECIAL:
                    other = batch.others[args]
                    if isinstance(other, Warps):
                        self._counts["gpu_warp"] += len(other)
                    elif other["type"] == "loss":  # it ends the open calls
                        totals.add_rows(rows, len(rows) * RECORD_BYTES)
                        rows.clear()
                        totals.lose(Loss(other.get("layer"), other["count"], 0, 0, ""))
                    continue
                rule = self._rules.get(number) or self._add_rule(number, tables, totals)
                if rule.is_dated and ts_ns > self._last_ns:
                    self._last_ns = ts_ns
                if rule.comm:
                    totals.scheduler.name(rule.tid, rule.pid, rule.comm)
                if rule.operation:  # with its call, if the event names it
                    given = tables.args(args)
                    call = self._numbers.get(Function("userspace", str(given.get("call"))))
                    size = given.get("size", given.get("size_bytes"))
                    size_bytes = size if isinstance(size, int) else 0
                    totals.memory.add(rule.operation, size_bytes, is_copy=rule.is_copy, number=call)
                if rule.kind is None:
                    continue
                a0 = dur_ns
                if rule.kind == record.SWITCH_OUT:
                    a0 = state_of_text(tables.args(args).get("prev_state"))
                rows.append((ts_ns, rule.tid, rule.pid, rule.number, rule.kind, a0, 0, 0, 0))
            totals.add_rows(rows, len(rows) * RECORD_BYTES)
            self._read_at_ns = time.monotonic_ns()
            for number, count in Counter(events.shape.tolist()).items():
                if number != SPECIAL and (shape := tables.shapes[number]) is not None:
                    self._counts[shape.type] += count

    def finish(self, end_ns: int | None) -> None:
        """Called at the end. `end_ns` is when the recording ended, if it states that."""
        with self._lock:
            self._has_ended = True
            self._last_ns = max(self._last_ns, end_ns or 0)

    def snapshot(self) -> Snapshot:
        """The totals of everything that was added."""
        with self._lock:
            passed_ns = 0 if self._has_ended else time.monotonic_ns() - self._read_at_ns
            now_ns = self._last_ns + passed_ns
            if self._totals is None:
                return Snapshot(now_ns, self._start_ns or now_ns, self._layers)
            return replace(self._totals.snapshot(now_ns), counts=dict(self._counts))

    def _add_rule(self, number: int, tables: Tables, totals: Totals) -> _Rule:
        """The rule for the events of a shape."""
        shape = tables.shapes[number]
        assert shape is not None
        comm = "" if shape.on_stream else shape.comm or ""
        rule = _Rule(shape.tid or 0, shape.pid or 0, comm, shape.clock is None)
        if shape.type in _OF_MEMORY and shape.phase != "E":
            rule.operation = shape.name + " (GPU)" * shape.on_stream
            rule.is_copy = shape.type == "transfer"
        is_call = shape.type != "gpu_thread" and (shape.type not in _OF_MEMORY or shape.on_stream)
        if shape.type == "scheduler" and (kind := _OF_SCHEDULER.get((shape.name, shape.phase))):
            rule.kind = kind
        elif shape.type == "syscall" and (kind := _OF_SYSCALLS.get(shape.phase)):
            rule.kind = kind
            rule.number = self._syscall_numbers.setdefault(shape.name, len(self._syscall_numbers))
            self._syscalls[rule.number] = shape.name
        elif is_call:
            if shape.on_stream:  # each stream is a thread, with a negative id
                rule.tid, rule.pid = -1 - (shape.stream or 0), -1 - (shape.gpu or 0)
            function = Function(shape.type, shape.name, shape.phase == "I", shape.layer or "")
            if function not in self._numbers:
                self._numbers[function] = totals.add_function(function)
            rule.kind, rule.number = _OF_PHASE[shape.phase], self._numbers[function]
        self._rules[number] = rule
        return rule
