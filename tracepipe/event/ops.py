"""Operations: what the nesting makes of events, and what is drawn and reported.

There are millions of them. A single one is a plain tuple, and many are columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tracepipe.event.columns import NONE, Ints, Rows
from tracepipe.native.signatures import Ops

if TYPE_CHECKING:
    from ctypes import Structure

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
NO_MARK, UNCLOSED, NO_BEGIN, FROM_DURATION = range(4)
MARKS = ("", "unclosed", "no_begin", "from_duration")
"""What did not go as it should with a slice: the argument that marks it, by number."""

Op = tuple[int, int, int, int, int, int, int, int, int, int]
"""An operation: kind, row, ts_ns, name, event, mark, flow, flow2, value, parent.

`event` is the place of its event, NONE without one, or less than NONE where it has arguments of its own, as a
counter whose `value` is not an integer. `flow` and `flow2` are the numbers of flows, 0 for none and negative
where one starts. A `flow2` from MORE_FLOWS on counts pairs of further flows: one, and what `flow2` was
before. `value` is the value of a counter, or the id of a slice, which counts over the whole
recording. `parent` is the id of the slice around a begin or an instant, or NONE.
"""
MORE_FLOWS: Final = 1 << 60
OP_COLUMNS: Final = ("kind", "row", "ts", "name", "event", "mark", "flow", "flow2", "slice_id", "parent")
"""The columns in the order of an `Op`."""
_KINDS: Final = {
    "kind": np.uint8, "mark": np.uint8, "row": np.int32, "name": np.int32, "event": np.int32,
    "ts": np.int64, "flow": np.int64, "flow2": np.int64, "slice_id": np.int64, "parent": np.int64,
}  # fmt: skip


def op_of(kind: int, row: int, ts_ns: int, name: int, event: int, value: int = NONE) -> Op:
    """An operation without flows."""
    return (kind, row, ts_ns, name, event, NO_MARK, 0, 0, value, NONE)


class OpColumns:
    """Operations as arrays, of which the first `count` values are used."""

    def __init__(self) -> None:
        self.count = 0
        self.columns: dict[str, Any] = {name: np.empty(0, kind) for name, kind in _KINDS.items()}
        self._view = Ops()

    def reserve(self, more: int) -> Structure:
        """Make room for `more` operations and return the core's view of the columns."""
        if self.count + more > len(self.columns["ts"]):
            size = max(self.count + more, 2 * self.count)
            for name, column in self.columns.items():
                self.columns[name] = larger = np.empty(size, column.dtype)
                larger[: self.count] = column[: self.count]
            self._view = Ops(*(column.ctypes.data for column in self.columns.values()))
        return self._view

    def used(self) -> dict[str, Any]:
        """The used part of each column, of the shape `(count,)`, by its name."""
        return {name: column[: self.count] for name, column in self.columns.items()}

    def add(self, *ops: Op) -> None:
        """Add operations."""
        self.reserve(len(ops))
        size = len(OP_COLUMNS)
        rows = np.fromiter(chain.from_iterable(ops), np.int64, size * len(ops)).reshape(-1, size)
        for at, name in enumerate(OP_COLUMNS):
            self.columns[name][self.count : self.count + len(ops)] = rows[:, at]
        self.count += len(ops)

    def extend(self, others: OpColumns) -> None:
        """Add all operations of others."""
        self.reserve(others.count)
        end = self.count + others.count
        for name, column in others.used().items():
            self.columns[name][self.count : end] = column
        self.count = end

    def take(self, order: Ints) -> OpColumns:
        """The operations of some places, in that order, as new columns."""
        taken = OpColumns()
        taken.count = len(order)
        taken.columns = {name: column[order] for name, column in self.columns.items()}
        return taken

    def rows(self, order: Rows) -> Iterator[Op]:
        """The operations of some places, in that order."""
        return zip(*(self.columns[name][order].tolist() for name in OP_COLUMNS), strict=True)

    def op(self, at: int) -> Op:
        """One of the operations."""
        return next(self.rows(np.array([at])))
