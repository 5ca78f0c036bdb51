"""The base of the writers that write trace events as lines, as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, ClassVar

import numpy as np

from tracepipe.converters.open_calls import OpenCalls
from tracepipe.converters.writer import TraceInfo, without_form
from tracepipe.event.columns import SPECIAL, TraceBatch
from tracepipe.event.model import NO_SLICES
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Tables
from tracepipe.event.warps import PlacedWarps
from tracepipe.units import counted

if TYPE_CHECKING:
    from tracepipe.event.model import Record


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

    @abstractmethod
    def _left_out(self, shape: Shape) -> str:
        """The name of the events of a shape, if the format has no form for them; else ""."""

    def finish(self) -> None:
        """Write lines that are left."""
        self._flush()

    def remarks(self) -> list[str]:
        """Remarks on events for which the format has no form, and on those before the start of the trace."""
        words = f"{self.what} before the start of the trace is|are written at 0"
        moved = counted(self._before_start, words)
        return without_form(self._unwritten) + [moved] * bool(self._before_start)

    def _rows(self, batch: TraceBatch, tables: Tables) -> Iterator[tuple[int, int, int, Shape, int]]:
        """Place in the batch, time, length, shape and arguments of each event. Records that are not events
        are handled before the event that follows them.
        """
        events = batch.events
        self._count_unwritten(batch, tables)
        columns = (events.ts_ns, events.dur_ns, events.shape, events.args)
        rows = zip(*(one.tolist() for one in columns), strict=True)
        for at, (ts_ns, dur_ns, number, args) in enumerate(rows):
            if number == SPECIAL:
                self._other(batch.others[args])
                continue
            shape = tables.shapes[number]
            assert shape is not None
            if shape.phase in NO_SLICES:
                continue
            yield at, ts_ns, dur_ns, shape, args

    def _count_unwritten(self, batch: TraceBatch, tables: Tables) -> None:
        numbers, counts = np.unique(batch.events.shape, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            shape = tables.shapes[number] if number >= 0 else None
            if shape is not None and (what := self._no_span(shape) or self._left_out(shape)):
                self._unwritten[what] += count

    @staticmethod
    def _no_span(shape: Shape) -> str:
        return "value|values of counters or end|ends of flows" if shape.phase in NO_SLICES else ""

    def _other(self, other: Record | PlacedWarps) -> None:
        """Write a loss, after which no call is known to be open, or count warps."""
        if isinstance(other, PlacedWarps):
            self._unwritten["gpu_warp event|events"] += len(other)
        elif other["type"] == "loss":
            self._calls.forget()
            self._lines.append(self.loss % other["count"])

    def _after_start_ns(self, ts_ns: int) -> int:
        """A time since the start of the trace, at least 0."""
        if ts_ns < self._start_ns:
            self._before_start += 1
            return 0
        return ts_ns - self._start_ns

    def _flush(self) -> None:
        self._out.write(b"".join(self._lines))
        self._lines.clear()
