"""The base of the writers that write trace events as lines, as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import numpy as np

from tracepipe.converters.writer import TraceInfo, without_form
from tracepipe.event.bounded import put_bounded
from tracepipe.event.columns import SPECIAL, TraceBatch
from tracepipe.event.model import NO_SLICES
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Tables
from tracepipe.event.warps import PlacedWarps
from tracepipe.units import counted

# Beyond these, the outermost calls of a thread, and the threads that came first, are forgotten.
_DEPTH_MAX = 512
_THREADS_MAX = 1 << 14


@dataclass(slots=True)
class OpenCall:
    """An open call, with `depth` calls around it. `pending` is still to be written for it."""

    name: str
    ts_ns: int
    depth: int
    pending: Any = None


class OpenCalls:
    """The open calls of threads, separately for each layer."""

    def __init__(self) -> None:
        self._stacks = OrderedDict[Hashable, list[OpenCall]]()

    def begin(self, thread: Hashable, name: str, ts_ns: int) -> OpenCall:
        """Note that a thread enters a call."""
        stack = self._stacks.get(thread)
        if stack is None:
            put_bounded(self._stacks, thread, stack := [], _THREADS_MAX)
        elif len(stack) >= _DEPTH_MAX:
            del stack[0]
        stack.append(call := OpenCall(name, ts_ns, len(stack)))
        return call

    def end(self, thread: Hashable, name: str) -> OpenCall | None:
        """End a call of a thread, and the calls inside it. Return None where its begin is not known."""
        stack = self._stacks.get(thread, [])
        for place in range(len(stack) - 1, -1, -1):
            if stack[place].name == name:
                call = stack[place]
                del stack[place:]
                if not stack:
                    del self._stacks[thread]
                return call
        return None

    def around(self, thread: Hashable) -> OpenCall | None:
        """The innermost call that a thread is in."""
        stack = self._stacks.get(thread)
        return stack[-1] if stack else None

    def forget(self) -> None:
        """Forget all calls after a loss, as their ends may be lost."""
        self._stacks.clear()


class LineWriter(ABC):
    """Writes the lines that a subclass makes of events. Times count from the start of the trace."""

    loss: ClassVar[bytes]
    """The line of a loss, with a `%d` for the number of events."""
    what: ClassVar[str]
    """The name of the events that are written, for remarks."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out = out
        self._start_ns = info.start.get("trace_ns", 0)
        self._unwritten: Counter[str] = Counter()
        self._before_start = 0
        self._calls = OpenCalls()
        self._lines: list[bytes] = []

    @abstractmethod
    def write_events(self, batch: TraceBatch, tables: Tables) -> None:
        """Write the events of a batch, on the trace's clock."""

    def _warps(self, batch: PlacedWarps) -> bool:
        """Write warps, and return whether that is possible."""
        return False

    @abstractmethod
    def _left_out(self, shape: Shape) -> str:
        """The name of the events of a shape, if the format has no form for them; else ""."""

    def finish(self) -> None:
        """Write lines that are left."""
        self._flush()

    def remarks(self) -> list[str]:
        """Remarks on events for which the format has no form, and on those before the start of the trace."""
        words = f"{self.what} before the start of the trace is|are written at 0"
        early = counted(self._before_start, words)
        return without_form(self._unwritten) + [early] * bool(self._before_start)

    def _rows(self, batch: TraceBatch, tables: Tables) -> Iterator[tuple[int, int, int, Shape, int]]:
        """Place, time, length, shape and arguments of each event. Other records are handled on the way."""
        events = batch.events
        numbers, counts = np.unique(events.shape, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            shape = tables.shapes[number] if number >= 0 else None
            if shape is not None:
                is_slice = shape.phase not in NO_SLICES
                what = self._left_out(shape) if is_slice else "value|values of counters or end|ends of flows"
                self._unwritten[what] += count * bool(what)
        columns = (events.ts_ns, events.dur_ns, events.shape, events.args)
        rows = zip(*(one.tolist() for one in columns), strict=True)
        for at, (ts_ns, dur_ns, number, args) in enumerate(rows):
            if number == SPECIAL:
                other = batch.others[args]
                if isinstance(other, PlacedWarps):
                    if not self._warps(other):
                        self._unwritten["gpu_warp event|events"] += len(other)
                elif other["type"] == "loss":
                    self._calls.forget()  # their ends may be lost
                    self._lines.append(self.loss % other["count"])
                continue
            shape = tables.shapes[number]
            assert shape is not None
            if shape.phase in NO_SLICES:
                continue
            yield at, ts_ns, dur_ns, shape, args

    def _after_start_ns(self, ts_ns: int) -> int:
        """A time since the start of the trace, at least 0."""
        if ts_ns < self._start_ns:
            self._before_start += 1
            return 0
        return ts_ns - self._start_ns

    def _flush(self) -> None:
        self._out.write(b"".join(self._lines))
        self._lines.clear()
