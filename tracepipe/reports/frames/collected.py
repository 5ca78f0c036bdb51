"""Collects the events of a whole recording as columns."""

from __future__ import annotations

from typing import Any

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, TraceColumns
from tracepipe.event.model import NO_SLICES
from tracepipe.event.order import order_of
from tracepipe.event.tables import KEPT_BYTES_MAX, Tables
from tracepipe.reports.frames.arrays import T
from tracepipe.reports.frames.grouping import grouped
from tracepipe.reports.frames.kept_args import KeptArgs
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.shapes import FRAMES, ShapeTable
from tracepipe.reports.frames.stored import ROWS_AT_ONCE, Growing, parts, release, taken

# Columns that are only kept once an event has a value, and the values of the events before it.
_MISSING = {"args": NONE, "dur_ns": 0, "launch": 0}
_OF_MOVED = ("source_ns", "bound_ns")
# The most shapes that stay in the tables: adding a shape again takes as long as reading fifty events.
_SHAPES_MAX, _SHAPES_BYTES_MAX = 1 << 14, 4 * KEPT_BYTES_MAX
# Values of counters and ends of flows are in no frame.
_NO_SPANS = [ord(phase) for phase in NO_SLICES]


class Collected:
    """Events on the trace's clock, in file order."""

    def __init__(self) -> None:
        self._count = 0
        self._columns: dict[str, Growing[Any]] = {"ts_ns": Growing(np.int64), "shape": Growing(np.int32)}

    def add(self, events: TraceColumns) -> None:
        """Add the events of a batch. Raises OutputError."""
        for name, missing in _MISSING.items():
            values = getattr(events, name)
            if name not in self._columns and bool((values != missing).any()):
                self._columns[name] = self._late(values.dtype, missing)
        is_moved = events.source_ns is not None and bool((events.source_ns != NONE).any())
        for name in _OF_MOVED if is_moved else ():
            if name not in self._columns:
                self._columns[name] = self._late(np.int64, NONE)
        if "stack" not in self._columns and events.stack is not None and bool((events.stack != NONE).any()):
            self._columns["stack"] = self._late(np.int32, NONE)
        if events.index is not None and "index" not in self._columns:
            self._columns["index"] = self._late(np.int32, NONE, events.index.shape[1:])
        for name, column in self._columns.items():
            values = getattr(events, name)
            column.extend(NONE if values is None else values, len(events))
        self._count += len(events)

    def _late(self, dtype: type[T], missing: int, width: tuple[int, ...] = ()) -> Growing[T]:
        """A column that no event has had so far."""
        column = Growing(dtype, width)
        for part in parts(self._count):
            column.extend(missing, part.stop - part.start)
        return column

    def in_order(self, is_whole: Bools) -> TraceColumns:
        """Return all events, sorted as they are nested; `is_whole` flags the shapes of whole slices (X). No
        event may be added afterwards.
        """
        columns = {name: column.whole() for name, column in self._columns.items()}
        self._columns = {}
        count = len(columns["ts_ns"])
        for name, missing in _MISSING.items():
            # A broadcast array keeps one value in memory.
            one = np.int32(missing) if name == "args" else np.int64(missing)
            columns.setdefault(name, np.broadcast_to(one, count))
        order = _order(columns["ts_ns"], columns["dur_ns"], columns["shape"], is_whole)
        if order is not None:
            columns = {name: taken(column, order) for name, column in columns.items()}
        return TraceColumns(**columns)


def _order(ts_ns: Int64s, dur_ns: Int64s, shape: Int32s, is_whole: Bools) -> Int64s | None:
    """The same as `order_of`. Most recordings are sorted, and checking that part by part takes no memory."""
    start = 0
    while start < len(ts_ns):
        stop = start + ROWS_AT_ONCE
        while stop < len(ts_ns) and ts_ns[stop] == ts_ns[stop - 1]:
            stop += 1
        # With the first event after the part, which must not be earlier.
        part = slice(start, stop + 1)
        if order_of(ts_ns[part], dur_ns[part], is_whole[shape[part]]) is not None:
            return order_of(ts_ns, dur_ns, is_whole[shape])
        start = stop
        release()
    return None


class CollectedLayers:
    """The events of each group of layers that nest together, and of the layers that do not nest. Shapes and
    arguments get permanent numbers, so the recording's tables can drop them.
    """

    def __init__(self, tables: Tables, shapes: ShapeTable, args: KeptArgs) -> None:
        self._tables, self._shapes, self._args = tables, shapes, args
        self._numbers: Int32s = np.empty(0, np.int32)
        """By the number of a shape in the tables, its number in `shapes`."""
        self._last = np.empty(0, np.int32)
        """The shapes of the last batch, as the tables number them."""
        self._collected: dict[int, Collected] = {}

    def add(self, events: TraceColumns) -> None:
        """Add the events of a batch. Raises OutputError."""
        new = self._tables.shapes[len(self._numbers) :]
        if new:
            numbers = np.array([self._shapes.number(shape) for shape in new], np.int32)
            self._numbers = np.concatenate([self._numbers, numbers])
        self._last = events.shape
        events.shape = self._numbers[events.shape]
        if self._args.put_away:
            events.args = np.where(events.args == NONE, NONE, events.args + self._args.put_away)
        is_span = ~np.isin(self._shapes.column("phase", events.shape), _NO_SPANS)
        if not is_span.all():
            events = events.take(is_span)
        if not len(events):
            return
        groups = self._shapes.groups(events.shape)
        if bool((groups == groups[0]).all()):
            self._collected.setdefault(int(groups[0]), Collected()).add(events)
            return
        for group, places in grouped(groups):
            self._collected.setdefault(group, Collected()).add(events.take(places))

    def relieve(self) -> None:
        """Free memory of the tables: if there are many shapes, only those of the last batch stay."""
        self._args.put_all_away()
        if len(self._tables.shapes) <= _SHAPES_MAX:
            self._keep(np.arange(len(self._numbers), dtype=np.int32))
        if len(self._tables.shapes) > _SHAPES_MAX or self._tables.text_bytes() > _SHAPES_BYTES_MAX:
            self._keep(self._last)

    def _keep(self, shapes: Int32s) -> None:
        """Keep these shapes in the tables."""
        turned, _ = self._tables.keep(shapes, np.empty(0, np.int32))
        numbers = np.full(len(self._tables.shapes), NONE, np.int32)
        stays = turned[: len(self._numbers)] >= 0
        numbers[turned[: len(self._numbers)][stays]] = self._numbers[stays]
        self._numbers = numbers

    def forget_shapes(self) -> None:
        """Drop everything except arguments from the tables. No event may be added afterwards."""
        self._tables.keep(np.empty(0, np.int32), np.arange(self._tables.args_count, dtype=np.int32))

    def take(self, name: str) -> TraceColumns:
        """Remove and return the sorted events of a group."""
        return self._collected.pop(FRAMES.index(name), Collected()).in_order(self._shapes.is_whole)
