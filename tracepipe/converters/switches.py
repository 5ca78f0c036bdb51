"""Writes when threads run, as the packets from which Perfetto makes its tables `sched` and `thread_state`.

    TracePacket   117 generic_kernel_task_state_event: 1 cpu  3 tid  4 state
                    1 ftrace_events: 1 cpu  2 event: 1 timestamp  2 pid of the waker
                                                     20 sched_waking: 2 pid  5 target_cpu

A task state is about one thread, so it needs nothing about threads that were not recorded; ftrace's
sched_switch would name the next thread too. A wakeup is sched_waking, the only event with the waker. Its time
is on CLOCK_BOOTTIME, as ftrace's bundles have no CLOCK_MONOTONIC. Threads get their names from the
descriptors of their tracks. The native core does the same in `perfetto.c`. Source:
protos/perfetto/trace/generic_kernel/generic_task_state.proto, ftrace/ftrace_event_bundle.proto,
ftrace/sched.proto.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tracepipe.converters.native_packets import NativeStream
from tracepipe.converters.packet_stream import PacketStream
from tracepipe.converters.wire import delimited, number
from tracepipe.event.columns import NONE, Bytes, Int32s, TraceColumns, distinct, grown
from tracepipe.event.model import ID_LIMIT
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, Tables
from tracepipe.event.vocabulary import WAKEUP
from tracepipe.native.signatures import Switches as SwitchColumns

FTRACE_EVENTS: Final = 1
TASK_STATE: Final = 117
UNKNOWN, RUNS, LEAVES, WOKEN = range(4)
"""What the events of a shape are: nothing that is known, a thread runs, leaves its processor, or is woken."""
_RUNNABLE, _RUNNING, _SLEEPS, _WAITS, _STOPPED, _DESTROYED = 2, 3, 4, 5, 6, 8
# A zombie is written as destroyed. DEAD would end the thread in the trace processor's table, and for a main
# thread its process, which may have more events.
_STATES: Final = {
    "runnable": _RUNNABLE,
    "preempted": _RUNNABLE,
    "disk": _WAITS,
    "parked": _WAITS,
    "idle": _WAITS,
    "stopped": _STOPPED,
    "traced": _STOPPED,
    "dead": _DESTROYED,
    "zombie": _DESTROYED,
}


def _kind(shape: Shape) -> int:
    if shape.name == WAKEUP:
        return WOKEN
    return RUNS if shape.phase == "B" else LEAVES


def _id(value: object) -> int | None:
    """A thread's id or a processor's number; None for anything else."""
    return value if type(value) is int and 0 <= value <= ID_LIMIT else None


@dataclass(frozen=True, slots=True)
class SwitchClock:
    """The clock of a sequence, the base that its first packet states, and how far CLOCK_BOOTTIME is ahead of
    it.
    """

    clock: int
    base_ns: int
    boottime_ahead_ns: int


class Switches:
    """The packets of one sequence, whose number is `id`."""

    def __init__(self, id: int, clock: SwitchClock) -> None:
        self._stream: Any = PacketStream(id, clock.clock, clock.base_ns)
        self._clock = clock
        self._kind: Bytes = np.zeros(0, np.uint8)
        self._cpu: Int32s = np.zeros(0, np.int32)
        self._tid: Int32s = np.zeros(0, np.int32)
        """By the number of a shape: what its events are, its processor and its thread."""

    def _add_shapes(self, events: TraceColumns, tables: Tables) -> None:
        size = int(events.shape.max()) + 1
        self._kind = grown(self._kind, size, 0)
        self._cpu, self._tid = grown(self._cpu, size, 0), grown(self._tid, size, 0)
        for at in distinct(events.shape[self._kind[events.shape] == UNKNOWN]).tolist():
            shape = tables.shapes[at]
            assert shape is not None
            self._kind[at], self._cpu[at], self._tid[at] = _kind(shape), shape.cpu, shape.tid

    def forget(self) -> None:
        """Forget all shapes: they have new numbers now."""
        self._kind[:] = UNKNOWN

    def write(self, events: TraceColumns, tables: Tables) -> bytes:
        """The packets of events, which are in the order of time."""
        self._add_shapes(events, tables)
        self._write(events, tables)
        made: bytes = self._stream.take()
        return made

    def _write(self, events: TraceColumns, tables: Tables) -> None:
        made = [self.field_and_body(events, tables, at) for at in range(len(events))]
        self._stream.put_messages(events.ts_ns, [delimited(field, body) for field, body in made])

    def field_and_body(self, events: TraceColumns, tables: Tables, at: int) -> tuple[int, bytes]:
        """The message of one event, and its field of a packet."""
        shape, number_of_args = int(events.shape[at]), int(events.args[at])
        args = tables.args(number_of_args) if number_of_args != NONE else {}
        kind, cpu, tid = (int(column[shape]) for column in (self._kind, self._cpu, self._tid))
        waker = _id(args.get("by_tid")) if kind == WOKEN else None
        if waker is not None:
            return FTRACE_EVENTS, self._waking(int(events.ts_ns[at]), cpu, tid, waker, args)
        state = _RUNNING if kind == RUNS else _RUNNABLE
        if kind == LEAVES:
            left = args.get("prev_state")
            state = _STATES.get(left, _SLEEPS) if isinstance(left, str) else _SLEEPS
        return TASK_STATE, number(1, cpu) + number(3, tid) + number(4, state)

    def _waking(self, ts_ns: int, cpu: int, tid: int, waker: int, args: Args) -> bytes:
        target = _id(args.get("target_cpu"))
        waking = number(2, tid) + (number(5, target) if target is not None else b"")
        when = max(0, ts_ns + self._clock.boottime_ahead_ns)
        return number(1, cpu) + delimited(2, number(1, when) + number(2, waker) + delimited(20, waking))


class NativeSwitches(Switches):
    """As `Switches`, by the native core."""

    def __init__(self, core: ctypes.CDLL, id: int, clock: SwitchClock) -> None:
        super().__init__(id, clock)
        self._stream = NativeStream(core, id, clock.clock, clock.base_ns)

    def _write(self, events: TraceColumns, tables: Tables) -> None:
        columns = (events.ts_ns, events.shape, events.args, self._kind, self._cpu, self._tid)
        view = SwitchColumns(*(column.ctypes.data for column in columns))
        at = 0
        while at < len(events):
            at = self._stream.switches(view, tables.reader, self._clock.boottime_ahead_ns, at, len(events))
            if at < len(events):
                self._stream.packet(int(events.ts_ns[at]), *self.field_and_body(events, tables, at))
                at += 1
