"""Measures what each thread did, by which processes and threads are put in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from tracepipe.event.columns import NONE, Bools, Bytes, Int32s, Int64s, TraceColumns, grown
from tracepipe.event.model import HOST_LAYERS
from tracepipe.event.shape import Shape
from tracepipe.event.vocabulary import RUNNING
from tracepipe.layout.loads import CpuUse
from tracepipe.layout.rows import Rows
from tracepipe.layout.tree import Work

_OTHER, _RUNS, _LEAVES = range(3)
_NEVER: Final = -(1 << 63)


class Standing:
    """Measures the work of threads, with memory for each thread but none for an event. Threads have the
    numbers of their tracks. `cpu_use` gets each stretch in which a thread has a processor.
    """

    def __init__(self, rows: Rows, cpu_use: CpuUse | None) -> None:
        self._rows, self._cpu_use = rows, cpu_use
        self._thread: Int32s = np.zeros(0, np.int32)
        self._kind: Bytes = np.zeros(0, np.uint8)
        self._calls: Bools = np.zeros(0, np.bool_)
        """By the number of a shape: its thread, NONE without one; whether its events are those of `running`;
        whether they are calls that may launch."""
        self._launches: Int64s = np.zeros(0, np.int64)
        self._ran_ns: Int64s = np.zeros(0, np.int64)
        self._since_ns: Int64s = np.zeros(0, np.int64)
        """By thread: since when it has a processor."""

    def add_shape(self, number: int, shape: Shape) -> None:
        """Look at a shape that is new; its row is made."""
        self._thread = grown(self._thread, number + 1, NONE)
        self._kind = grown(self._kind, number + 1, _OTHER)
        self._calls = grown(self._calls, number + 1, 0)
        of_host = shape.type in HOST_LAYERS and not shape.on_stream
        thread = self._rows.threads.get((shape.pid, shape.tid)) if of_host else None
        self._thread[number], self._kind[number] = NONE if thread is None else thread.track.id, _OTHER
        self._calls[number] = shape.has_launch and shape.phase != "E"
        if thread is None:
            return
        if shape.type == "scheduler" and shape.name == RUNNING:
            self._kind[number] = {"B": _RUNS, "E": _LEAVES}.get(shape.phase, _OTHER)
            if self._cpu_use is not None:
                self._cpu_use.add_thread(thread.track)
        size = thread.track.id + 1
        self._launches, self._ran_ns = grown(self._launches, size, 0), grown(self._ran_ns, size, 0)
        self._since_ns = grown(self._since_ns, size, _NEVER)

    def take(self, events: TraceColumns) -> None:
        """Take events, which are in the order of time."""
        if not len(self._thread):
            return
        shapes = np.maximum(events.shape, 0)
        thread = np.where(events.shape >= 0, self._thread[shapes], NONE)
        launched = np.bincount(thread[(thread >= 0) & self._calls[shapes] & (events.launch != 0)])
        self._launches[: len(launched)] += launched
        switches = np.flatnonzero((thread >= 0) & (self._kind[shapes] != _OTHER))
        if len(switches):
            runs = self._kind[shapes[switches]] == _RUNS
            self._run(thread[switches], events.ts_ns[switches], runs)

    def _run(self, thread: Int32s, ts_ns: Int64s, runs: Bools) -> None:
        """Take events at which threads get a processor or leave it."""
        order = np.argsort(thread, kind="stable")
        thread, ts_ns, runs = thread[order], ts_ns[order], runs[order]
        first = np.append(True, thread[1:] != thread[:-1])
        since_ns = np.where(np.append(False, runs[:-1]), np.append(_NEVER, ts_ns[:-1]), _NEVER)
        since_ns = np.where(first, self._since_ns[thread], since_ns)
        ran = ~runs & (since_ns != _NEVER)
        self._add(thread[ran], since_ns[ran], ts_ns[ran])
        last = np.append(first[1:], True)
        self._since_ns[thread[last]] = np.where(runs[last], ts_ns[last], _NEVER)

    def _add(self, thread: Int32s, begin_ns: Int64s, end_ns: Int64s) -> None:
        np.add.at(self._ran_ns, thread, end_ns - begin_ns)
        if self._cpu_use is not None:
            self._cpu_use.add(thread, begin_ns, end_ns)

    def finish(self, end_ns: int) -> Callable[[int], Work]:
        """Return the function that gives a thread's work by its number. Threads that have a processor keep it
        until the end.
        """
        thread = np.flatnonzero(self._since_ns != _NEVER).astype(np.int32)
        since_ns = self._since_ns[thread]
        self._add(thread, since_ns, np.maximum(since_ns, end_ns))
        return self._work

    def _work(self, thread: int) -> Work:
        if thread >= len(self._launches):
            return Work()
        return Work(int(self._launches[thread]), int(self._ran_ns[thread]))
