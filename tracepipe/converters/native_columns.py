"""Drawings in the structures of the native core's writers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracepipe.event.ops import Op
from tracepipe.layout.timeline import Drawn, WarpChanges
from tracepipe.native.signatures import Changes, Given, Slices
from tracepipe.native.signatures import Drawn as DrawnColumns

_OPS = ("kind", "mark", "row", "name", "event", "ts", "flow", "flow2", "slice_id")


class DrawnView:
    """Pointers to the columns of operations, in their order, and of the events that they draw."""

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn.ops
        self.order = np.ascontiguousarray(drawn.order, np.int64)
        self._columns = [drawn.ops.columns[name] for name in _OPS]
        columns = (self.order, *self._columns, drawn.book.more_flows)
        self.ops = DrawnColumns(*(column.ctypes.data for column in columns))
        self.given = Given()
        self._events = events = drawn.events
        if events is not None:
            source = None if events.source_ns is None else events.source_ns.ctypes.data
            self._lines = drawn.lines()
            line = None if self._lines is None else self._lines.ctypes.data
            given = (column.ctypes.data for column in (events.shape, events.args, events.launch))
            self.given = Given(*given, source, line)

    def op(self, at: int) -> Op:
        """The operation at a place of the order."""
        return self._drawn.op(int(self.order[at]))


class WarpsView:
    """Pointers to the columns of changes of one GPU's warps, and of their slices."""

    def __init__(self, changes: WarpChanges) -> None:
        some = (changes.ts_ns, changes.value, changes.mask, changes.slice, changes.kind)
        self.changes = Changes(*self._pointers(some))
        slices = changes.slices
        columns = (slices.number, slices.cycles, slices.source_ns, slices.exits, slices.lanes, slices.flow,
                   slices.row, slices.kernel, slices.unclosed)  # fmt: skip
        self.slices = Slices(*self._pointers(columns))

    def _pointers(self, columns: tuple[Any, ...]) -> list[int]:
        kept = [np.ascontiguousarray(column) for column in columns]
        self._kept = [*getattr(self, "_kept", ()), *kept]
        return [column.ctypes.data for column in kept]
