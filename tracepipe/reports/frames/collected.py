"""The events of a whole recording in columns that grow in place."""

from __future__ import annotations

from typing import Any

from tracepipe.event.columns import NONE, Bools, TraceColumns
from tracepipe.event.order import order_of
from tracepipe.event.tables import Tables
from tracepipe.reports.frames.libraries import np

# What most recordings have no use for is not kept until an event has it: column → what stands for none.
_OPTIONAL = {"dur_ns": 0, "launch": 0, "source_ns": NONE, "bound_ns": NONE}
_ROOM_AT_FIRST = 1 << 12


class Growing:
    """A column of `count` values with room for an eighth more: the allocator moves it without copying it, so
    that it is not in memory twice.
    """

    def __init__(self, dtype: Any, count: int = 0, missing: int = 0) -> None:
        self.count = count
        # Zeros that nobody wrote take no memory.
        self._values = np.full(count, missing, dtype) if missing else np.zeros(count, dtype)

    def extend(self, values: Any, count: int) -> None:
        """Add `count` values, or one so many times."""
        last = self.count + count
        if last > len(self._values):
            room = max(last, self.count + self.count // 8, _ROOM_AT_FIRST)
            self._values.resize(room, refcheck=False)
        self._values[self.count : last] = values
        self.count = last

    def whole(self) -> Any:
        """All values. The column is not to be used any more."""
        self._values.resize(self.count, refcheck=False)
        return self._values


class Collected:
    """Events on the trace's clock, in file order."""

    def __init__(self) -> None:
        self._count = 0
        self._columns = {"ts_ns": Growing(np.int64), "shape": Growing(np.int32), "args": Growing(np.int32)}

    def add(self, events: TraceColumns) -> None:
        """Add the events of a batch."""
        more = len(events)
        for name, missing in _OPTIONAL.items():
            values = getattr(events, name)
            # A bound of 0 is one.
            if name not in self._columns and values is not None and (missing or bool(values.any())):
                self._columns[name] = Growing(np.int64, self._count, missing)
        for name, column in self._columns.items():
            values = getattr(events, name)
            column.extend(_OPTIONAL[name] if values is None else values, more)
        self._count += more

    def in_order(self, tables: Tables) -> TraceColumns:
        """All of them in the order in which they are nested; nothing is left here then."""
        columns = {name: column.whole() for name, column in self._columns.items()}
        self.__init__()  # type: ignore[misc]
        for name in ("dur_ns", "launch"):
            columns.setdefault(name, np.zeros(len(columns["ts_ns"]), np.int64))
        whole: Bools = tables.are_whole()[columns["shape"]]
        order = order_of(columns["ts_ns"], columns["dur_ns"], whole)
        if order is not None:
            for name in columns:  # one by one, so that one alone is in memory twice
                columns[name] = columns[name][order]
        return TraceColumns(**columns)
