"""The events of a whole recording in columns that grow in place."""

from __future__ import annotations

from typing import Any

from tracepipe.event.columns import NONE, Bools, TraceColumns
from tracepipe.event.order import order_of
from tracepipe.event.tables import Tables
from tracepipe.reports.frames.libraries import np

# What most recordings have no use for is not kept until an event has it.
_ZERO_FOR_NONE = ("dur_ns", "launch")
_NULL_FOR_NONE = ("source_ns", "bound_ns", "index")
_ROOM_AT_FIRST = 1 << 12


class Growing:
    """A column of `count` values with room for an eighth more: the allocator moves it without copying it, so
    that it is not in memory twice.
    """

    def __init__(self, dtype: Any, width: tuple[int, ...] = ()) -> None:
        self.count, self._width = 0, width
        self._values = np.empty((0, *width), dtype)

    def extend(self, values: Any, count: int) -> None:
        """Add `count` values, or one so many times."""
        last = self.count + count
        if last > len(self._values):
            room = max(last, self.count + self.count // 8, _ROOM_AT_FIRST)
            self._values.resize((room, *self._width), refcheck=False)
        self._values[self.count : last] = values
        self.count = last

    def whole(self) -> Any:
        """All values. The column is not to be used any more."""
        self._values.resize((self.count, *self._width), refcheck=False)
        return self._values


class Collected:
    """Events on the trace's clock, in file order."""

    def __init__(self) -> None:
        self._count = 0
        self._columns = {"ts_ns": Growing(np.int64), "shape": Growing(np.int32), "args": Growing(np.int32)}

    def add(self, events: TraceColumns) -> None:
        """Add the events of a batch."""
        for name in _ZERO_FOR_NONE:
            if name not in self._columns and bool(getattr(events, name).any()):
                self._columns[name] = self._late(np.int64, 0)
        for name in _NULL_FOR_NONE:
            values = getattr(events, name)
            if name not in self._columns and values is not None:
                self._columns[name] = self._late(values.dtype, NONE, values.shape[1:])
        for name, column in self._columns.items():
            values = getattr(events, name)
            column.extend(NONE if values is None else values, len(events))
        self._count += len(events)

    def _late(self, dtype: Any, missing: int, width: tuple[int, ...] = ()) -> Growing:
        """A column that no event had so far."""
        column = Growing(dtype, width)
        column.extend(missing, self._count)
        return column

    def in_order(self, tables: Tables) -> TraceColumns:
        """All of them in the order in which they are nested; nothing is left here then."""
        columns = {name: column.whole() for name, column in self._columns.items()}
        self.__init__()  # type: ignore[misc]
        for name in _ZERO_FOR_NONE:
            # Zeros that nobody wrote take no memory.
            columns.setdefault(name, np.zeros(len(columns["ts_ns"]), np.int64))
        whole: Bools = tables.are_whole()[columns["shape"]]
        order = order_of(columns["ts_ns"], columns["dur_ns"], whole)
        if order is not None:
            for name in columns:  # one by one, so that one alone is in memory twice
                columns[name] = columns[name][order]
        return TraceColumns(**columns)
