"""The events of a whole recording in columns."""

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
# The first lines of a recording may be unlike the rest.
_GROWS_BY_MOST = 16


class Growing:
    """A column of `count` values with room for what the rest of the input is likely to have: memory that is
    not written to is not taken.
    """

    def __init__(self, dtype: Any, width: tuple[int, ...] = ()) -> None:
        self.count, self._width = 0, width
        self._values = np.empty((0, *width), dtype)

    def extend(self, values: Any, count: int, share: float) -> None:
        """Add `count` values, or one so many times. `share` is how much of the input has been read, 0 where
        that is not known.
        """
        last = self.count + count
        if last > len(self._values):
            times = min(1.05 / share, _GROWS_BY_MOST) if share > 0 else 2
            room = max(int(last * times), last + last // 8, _ROOM_AT_FIRST)
            larger = np.empty((room, *self._width), self._values.dtype)
            larger[: self.count] = self._values[: self.count]
            self._values = larger
        self._values[self.count : last] = values
        self.count = last

    def so_far(self, count: int) -> Any:
        """The first `count` values."""
        return self._values[:count]

    def whole(self) -> Any:
        """All values. The column is not to be used any more."""
        self._values.resize((self.count, *self._width), refcheck=False)
        return self._values


class Collected:
    """Events on the trace's clock, in file order."""

    def __init__(self) -> None:
        self._count = 0
        self._columns = {"ts_ns": Growing(np.int64), "shape": Growing(np.int32), "args": Growing(np.int32)}

    def add(self, events: TraceColumns, share: float) -> None:
        """Add the events of a batch; `share` is how much of the input has been read, 0 where unknown."""
        for name in _ZERO_FOR_NONE:
            if name not in self._columns and bool(getattr(events, name).any()):
                self._columns[name] = self._late(share, np.int64, 0)
        for name in _NULL_FOR_NONE:
            values = getattr(events, name)
            if name not in self._columns and values is not None:
                self._columns[name] = self._late(share, values.dtype, NONE, values.shape[1:])
        for name, column in self._columns.items():
            values = getattr(events, name)
            column.extend(NONE if values is None else values, len(events), share)
        self._count += len(events)

    def _late(self, share: float, dtype: Any, missing: int, width: tuple[int, ...] = ()) -> Growing:
        """A column that no event had so far."""
        column = Growing(dtype, width)
        column.extend(missing, self._count, share)
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
