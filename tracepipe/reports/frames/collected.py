"""The events of a whole recording in columns."""

from __future__ import annotations

from typing import Any

from tracepipe.event.columns import NONE, Bools, TraceColumns
from tracepipe.event.order import order_of
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Tables
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.shapes import FRAMES, group_of

# What most recordings have no use for is not kept until an event has it.
_ZERO_FOR_NONE = ("dur_ns", "launch")
_OF_MOVED = ("source_ns", "bound_ns")
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
        is_moved = events.source_ns is not None and bool((events.source_ns != NONE).any())
        for name in _OF_MOVED if is_moved else ():
            if name not in self._columns:
                self._columns[name] = self._late(share, np.int64, NONE)
        if events.index is not None and "index" not in self._columns:
            self._columns["index"] = self._late(share, np.int32, NONE, events.index.shape[1:])
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
        """All of them in the order in which they are nested. Nothing is to be added any more."""
        columns = {name: column.whole() for name, column in self._columns.items()}
        self._columns = {}
        for name in _ZERO_FOR_NONE:
            # One zero in memory stands for all.
            columns.setdefault(name, np.broadcast_to(np.int64(0), len(columns["ts_ns"])))
        whole: Bools = tables.are_whole()[columns["shape"]]
        order = order_of(columns["ts_ns"], columns["dur_ns"], whole)
        for name, column in columns.items() if order is not None else ():
            # One by one, so that one alone is in memory twice.
            if column.ndim == 1:
                columns[name] = column[order]
            else:
                for axis in range(column.shape[1]):
                    column[:, axis] = column[order, axis]
        return TraceColumns(**columns)


class CollectedLayers:
    """The events of each group of layers that nest together, and of those that do not nest."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._groups = np.empty(0, np.uint8)
        """By the number of a shape, the place of its group in `FRAMES`."""
        self._collected: dict[int, Collected] = {}

    def add(self, events: TraceColumns, share: float) -> None:
        """Add the events of a batch, as `Collected` has it."""
        shapes = self._tables.shapes
        if len(self._groups) < len(shapes):
            new = np.array([group_of(shape) for shape in shapes[len(self._groups) :]], np.uint8)
            self._groups = np.concatenate([self._groups, new])
        of = self._groups[events.shape]
        present = np.flatnonzero(np.bincount(of)).tolist()
        for group in present:
            own = events if len(present) == 1 else events.take(np.flatnonzero(of == group))
            self._collected.setdefault(group, Collected()).add(own, share)

    def take(self, name: str) -> TraceColumns:
        """The events of a group in order. They are not kept here any more."""
        return self._collected.pop(FRAMES.index(name), Collected()).in_order(self._tables)

    def shapes_of(self, name: str) -> list[tuple[int, Shape]]:
        """The shapes of a group with their numbers."""
        numbers = np.flatnonzero(self._groups == FRAMES.index(name)).tolist()
        return [(number, shape) for number in numbers if (shape := self._tables.shapes[number]) is not None]
