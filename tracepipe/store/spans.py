"""Makes the rows of a layer's table: slices and instants, from the events of a group of layers that nest.

    events in file order ──▶ Spool (a file) ──▶ in the order of time ──▶ Nesting ──▶ rows, as they are
    complete

The rules of nesting are in `event/nesting.py`, which the timeline uses too: a report and a timeline agree on
calls without an end, and on ends without a begin. Memory does not grow with the number of events, but with
how many slices are open at a time, and with how late events come in the file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, Final

import numpy as np

from tracepipe.errors import OutputError
from tracepipe.event import ops as op
from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, Ints, TraceColumns, joined
from tracepipe.event.model import TIME_LIMIT_NS
from tracepipe.event.nesting import NO_ROW, OVERLAP_ROWS_MAX, AnyNesting
from tracepipe.event.ops import BEGIN, END
from tracepipe.event.tables import order_of
from tracepipe.store.schema import FROM_DURATION, INSTANT, NO_BEGIN, SPAN, UNCLOSED

Rows = dict[str, Any]
"""Columns of one length `(rows,)` by their names."""

# The events that are nested at a time.
_AT_ONCE: Final = 1 << 15
# A column of fewer bytes stays in memory.
_IN_MEMORY_BYTES: Final = 1 << 18
# The columns of events that are spooled, with their types, and the values of events without them.
_SPOOLED: Final = {
    "ts_ns": ("i8", 0), "shape": ("i4", 0), "args": ("i4", NONE), "dur_ns": ("i8", 0), "launch": ("i8", 0),
    "stack": ("i4", NONE), "source_ns": ("i8", NONE), "bound_ns": ("i8", NONE), "index": ("6i4", NONE),
}  # fmt: skip
# The columns that a row takes from the event that began it.
_OF_EVENT: Final = ("shape", "args", "launch", "stack", "source_ns", "bound_ns")
# The end of open slices, while they are open.
_OPEN_NS: Final = (1 << 63) - 1


class _Column:
    """A column in a file. Nothing is written for the values before the first that is not `missing`."""

    def __init__(self, kind: str, missing: int) -> None:
        self._kind, self._missing = np.dtype(kind), missing
        self._file: IO[bytes] | None = None
        self._count = self._first = 0

    def append(self, values: Any, count: int) -> None:
        """Append `count` values; None stands for missing ones. Raises OSError."""
        if self._file is None and (values is None or not bool((values != self._missing).any())):
            self._count += count
            return
        if self._file is None:
            self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, prefix="tracepipe-")  # noqa: SIM115
            self._first = self._count
        if values is None:
            values = np.full((count, *self._kind.shape), self._missing, self._kind.base)
        assert self._file is not None
        self._file.write(np.ascontiguousarray(values, self._kind.base).data)
        self._count += count

    def is_empty(self) -> bool:
        """Whether no value was given."""
        return self._file is None

    def read(self, start: int, stop: int) -> Any:
        """The values of some rows. Raises OSError."""
        if self._file is None or stop <= self._first:
            return np.full((stop - start, *self._kind.shape), self._missing, self._kind.base)
        first = max(start, self._first)
        self._file.seek((first - self._first) * self._kind.itemsize)
        data = self._file.read((stop - first) * self._kind.itemsize)
        values = np.frombuffer(data, self._kind.base).reshape(stop - first, *self._kind.shape)
        if first == start:
            return values
        missing = np.full((first - start, *self._kind.shape), self._missing, self._kind.base)
        return np.concatenate([missing, values])


class Spool:
    """The events of a group of layers, in file order."""

    def __init__(self) -> None:
        self._columns = {name: _Column(*how) for name, how in _SPOOLED.items()}
        self._count, self._latest_ns, self._late_ns = 0, -TIME_LIMIT_NS, 0

    def __len__(self) -> int:
        return self._count

    def add(self, events: TraceColumns) -> None:
        """Add events. Raises OutputError."""
        try:
            for name, column in self._columns.items():
                column.append(getattr(events, name), len(events))
        except OSError as error:
            raise cannot_keep("the events of a recording", error) from error
        self._count += len(events)
        latest_ns = np.maximum.accumulate(events.ts_ns)
        np.maximum(latest_ns, self._latest_ns, out=latest_ns)
        self._late_ns = max(self._late_ns, int((latest_ns - events.ts_ns).max(initial=0)))
        self._latest_ns = int(latest_ns[-1]) if len(latest_ns) else self._latest_ns

    def has(self, name: str) -> bool:
        """Whether any event has a value in a column."""
        return not self._columns[name].is_empty()

    def _read(self, start: int, stop: int) -> TraceColumns:
        values = {
            name: column.read(start, stop)
            for name, column in self._columns.items()
            if name in ("ts_ns", "shape", "args", "dur_ns", "launch") or not column.is_empty()
        }
        return TraceColumns(**values)

    def in_order(self, is_whole: Bools) -> Iterator[TraceColumns]:
        """Yield all events in the order in which they nest; `is_whole` flags the shapes of whole slices (X).

        An event comes at most `_late_ns` after one that is later than it, so what is earlier than that is
        complete.
        """
        waiting, start = self._read(0, 0), 0
        while start < self._count:
            # Where much waits, more is read at a time: what waits is copied each time.
            stop = min(start + max(_AT_ONCE, len(waiting)), self._count)
            events, start = joined([waiting, self._read(start, stop)]), stop
            waiting = events.take(slice(0, 0))
            if stop < self._count:
                is_complete = events.ts_ns < int(events.ts_ns.max()) - self._late_ns
                if not is_complete.all():
                    waiting, events = events.take(~is_complete), events.take(is_complete)
            if len(events):
                order = order_of(events.ts_ns, events.dur_ns, is_whole[events.shape])
                yield events if order is None else events.take(order)


def cannot_keep(what: str, error: OSError) -> OutputError:
    """The error for data that cannot be written to a temporary file."""
    return OutputError(
        f"cannot keep {what} in {tempfile.gettempdir()}: {error.strerror}",
        "Name a folder with room in TMPDIR.",
    )


class Kinds:
    """How the shapes of a group nest, by the number of a shape: `row`, its row among those of the group,
    `name`, the number of its name, `phase` and `has_dur`. `row_count` is the number of rows.
    """

    def __init__(self, own: Bools, row: Int64s, name: Int32s, phase: Any, has_dur: Bools) -> None:
        numbers = np.flatnonzero(own)
        of_group, local = np.unique(row[numbers], return_inverse=True)
        self.row_count = len(of_group)
        self.row = np.full(len(own), NO_ROW, np.int32)
        self.row[numbers] = local
        self.name, self.phase, self.has_dur = name, phase, has_dur


class SpanRows:
    """Nests the events of one group and gives the complete rows to `put`.

    The columns are `id` (from 0, in the order of start, then depth, where `is_sorted`), `start_ns`, `end_ns`,
    `kind`, `depth`, `parent` and `top` (the ids of the innermost and the outermost slice around it; NONE and
    its own id without one), `lane` (0, or the number of the overlap track), `end_args`, `end_source_ns`, and
    those of `_OF_EVENT`.
    """

    def __init__(self, nesting: AnyNesting, kinds: Kinds, put: Callable[[Rows], None]) -> None:
        self._nesting, self._kinds, self._put = nesting, kinds, put
        self._window: Rows = {}
        """The rows that are open, or that may enclose what comes, in the order in which they began."""
        self.count = 0
        self.is_sorted = True
        """Whether the ids are in the order of starts, then depths."""
        self._last = (-TIME_LIMIT_NS, 0)
        self._lanes: Int32s = np.zeros(kinds.row_count + 1, np.int32)
        """The overlap track of each row of the nesting. The last place is for "no row"."""
        self.overlaps: dict[int, int] = {}
        """The number of overlap tracks of each row of the group that has any."""
        nesting.forget_shapes()
        nesting.set_shapes(kinds.row, kinds.name, kinds.phase, kinds.has_dur)
        for _ in range(kinds.row_count):
            nesting.add_row()

    def nest(self, events: TraceColumns) -> None:
        """Nest some events, which are in the order of time."""
        self._nesting.events(events, 0, len(events))
        self._take(events)
        is_done = (self._window["end_ns"] < int(events.ts_ns[-1])) & ~self._window["open"]
        self._flush(is_done)

    def finish(self, end_ns: int) -> None:
        """Close what is open at the end of the recording, and give the last rows."""
        if self._window:
            for row in range(self._kinds.row_count) if self._window["open"].any() else ():
                self._nesting.close(row, end_ns)
            self._take(None)
            self._flush(np.ones(len(self._window["id"]), np.bool_))
        self._nesting.forget_rows()

    def _flush(self, is_done: Bools) -> None:
        if is_done.any():
            done = {name: column[is_done] for name, column in self._window.items()}
            self._window = {name: column[~is_done] for name, column in self._window.items()}
            del done["open"], done["slice"]
            self._put(done)

    def _take(self, events: TraceColumns | None) -> None:
        """Add the operations that the nesting made of the last events."""
        ops = self._nesting.take_ops().used()
        if not len(ops["kind"]):
            return
        self._number_lanes()
        made = np.flatnonzero(ops["kind"] != END)
        before = len(self._window["id"]) if self._window else 0
        # The slices that may be parents or may end: those of the window, and the new ones, which are
        # consecutive. `place_of` has their places in the window.
        begins = np.flatnonzero(ops["kind"][made] == BEGIN)
        slices = ops["slice_id"][made[begins]]
        first_slice = int(slices[0]) if len(slices) else _OPEN_NS
        earlier = self._window["slice"] if self._window else np.empty(0, np.int64)

        def places_of(wanted: Int64s) -> Int64s:
            new = np.clip(wanted - first_slice, 0, max(len(begins) - 1, 0))
            old = np.searchsorted(earlier_slices, wanted)
            of_new = begins[new] + before if len(begins) else new
            of_old = earlier_places[np.minimum(old, len(earlier_slices) - 1)] if len(earlier_slices) else old
            return np.where(wanted >= first_slice, of_new, of_old)

        earlier_places = np.flatnonzero(earlier != NONE)
        earlier_slices = earlier[earlier_places]
        if len(made):
            assert events is not None
            self._append(ops, made, events)
            parent = np.full(len(made), NONE, np.int64)
            nested = np.flatnonzero(ops["parent"][made] != NONE)
            if len(nested):
                parent[nested] = places_of(ops["parent"][made[nested]])
            self._nest_in(parent, before)
        ended = np.flatnonzero(ops["kind"] == END)
        if not len(ended):
            return
        at, window, event = places_of(ops["slice_id"][ended]), self._window, ops["event"][ended]
        window["end_ns"][at] = ops["ts"][ended]
        window["open"][at] = False
        closed = at[ops["mark"][ended] == op.NO_MARK]
        window["kind"][closed[window["kind"][closed] == UNCLOSED]] = SPAN
        if events is not None:
            by_event = np.flatnonzero(event != NONE)
            window["end_args"][at[by_event]] = events.args[event[by_event]]
            if events.source_ns is not None:
                window["end_source_ns"][at[by_event]] = events.source_ns[event[by_event]]

    def _append(self, ops: Rows, made: Int64s, events: TraceColumns) -> None:
        """Append the rows that begin with these operations, without their parents."""
        count, mark, begins = len(made), ops["mark"][made], ops["kind"][made] == BEGIN
        start_ns, event = ops["ts"][made], ops["event"][made]
        new: Rows = {
            "id": np.arange(self.count, self.count + count, dtype=np.int32),
            "start_ns": start_ns,
            "end_ns": start_ns.copy(),
            "kind": np.where(
                begins,
                np.where(mark == op.FROM_DURATION, FROM_DURATION, UNCLOSED),
                np.where(mark == op.NO_BEGIN, NO_BEGIN, INSTANT),
            ).astype(np.uint8),
            "depth": np.zeros(count, np.int32),
            "parent": np.full(count, NONE, np.int32),
            "top": np.arange(self.count, self.count + count, dtype=np.int32),
            "lane": self._lanes[ops["row"][made]].astype(np.uint8),
            "end_args": np.full(count, NONE, np.int32),
            "end_source_ns": np.full(count, NONE, np.int64),
            # A slice for which there are too many overlap tracks has no end.
            "open": begins & (ops["row"][made] != NO_ROW),
            "slice": np.where(begins, ops["slice_id"][made], NONE),
        }
        for name in _OF_EVENT:
            column = getattr(events, name)
            kind, missing = _SPOOLED[name]
            new[name] = np.full(count, missing, kind) if column is None else column[event]
        self.count += count
        if self._window:
            new = {name: np.concatenate([column, new[name]]) for name, column in self._window.items()}
        self._window = new

    def _nest_in(self, parent: Int64s, before: int) -> None:
        """Set parent, depth and top of the rows of the window from place `before` on; `parent` has the place
        of the slice around each, or NONE.
        """
        window = self._window
        nested = np.flatnonzero(parent != NONE)
        if len(nested):
            around, nested = parent[nested], nested + before
            window["parent"][nested] = window["id"][around]
            above = np.arange(before + len(parent))
            above[nested] = around
            steps = np.zeros(len(above), np.int32)
            steps[nested] = 1
            # Each round doubles the distance to the slice above, so a deep stack needs few rounds. A row
            # without a parent ends it, and one that was there before, whose depth is known.
            while bool((more := steps[above[nested]]).any()):
                further = above[above[nested]]
                steps[nested] += more
                above[nested] = further
            outermost = above[nested]
            window["depth"][nested] = steps[nested] + window["depth"][outermost]
            window["top"][nested] = window["top"][outermost]
        start_ns, depth = window["start_ns"][before:], window["depth"][before:]
        order = np.lexsort((depth, start_ns))
        first = int(start_ns[order[0]]), int(depth[order[0]])
        self.is_sorted &= first >= self._last
        self._last = int(start_ns[order[-1]]), int(depth[order[-1]])
        # Rows that begin together are numbered by depth: the events of one time are all nested at once.
        first_id = self.count - len(parent)
        new_ids = np.empty(len(order), np.int32)
        new_ids[order] = np.arange(first_id, self.count, dtype=np.int32)
        window["id"][before:] = new_ids
        for name in ("parent", "top"):
            ids = window[name][before:]
            ids[ids >= first_id] = new_ids[ids[ids >= first_id] - first_id]

    def _number_lanes(self) -> None:
        """Number the overlap tracks that the nesting has added."""
        known = len(self._lanes) - 1
        count = self._nesting.row_count
        if count == known:
            return
        lanes = np.zeros(count + 1, np.int32)
        lanes[:known] = self._lanes[:-1]
        for row in range(known, count):
            base = self._nesting.base(row)
            lanes[row] = self.overlaps[base] = self.overlaps.get(base, 0) + 1
        self._lanes = lanes


def parents_by_time(start_ns: Int64s, end_ns: Int64s, lasts: Bools) -> Int64s:
    """For each slice the innermost of the last `OVERLAP_ROWS_MAX` open ones that encloses it, else NONE.

    While a slice is open, it is not known what it encloses, so slices that cross it get overlap tracks. When
    all ends are known, some of them nest after all: those that were recorded as an end and a duration.
    Slices are sorted by start, the longer first; `lasts` flags those that can be around others. Shapes
    `(n,)`.
    """
    parent = np.full(len(start_ns), NONE, np.int64)
    around: list[tuple[int, int]] = []
    """The ends and places of the slices that may enclose what comes."""
    for first in range(0, len(parent), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        slices = zip(start_ns[part].tolist(), end_ns[part].tolist(), lasts[part].tolist(), strict=True)
        for at, (begin_ns, until_ns, encloses) in enumerate(slices, first):
            while around and around[-1][0] <= begin_ns:
                around.pop()
            for ends_ns, one in around[: -OVERLAP_ROWS_MAX - 1 : -1]:
                if ends_ns >= until_ns and ends_ns > begin_ns:
                    parent[at] = one
                    break
            if encloses:
                around.append((until_ns, at))
    return parent


def depths_and_tops(parent: Ints) -> tuple[Int32s, Int32s]:
    """How many slices are around each, and the outermost of them, itself without one. Shapes `(n,)`."""
    above: Int32s = np.where(parent == NONE, np.arange(len(parent)), parent).astype(np.int32)
    depth: Int32s = (parent != NONE).astype(np.int32)
    while bool((more := depth[above]).any()):
        depth, above = depth + more, above[above]
    return depth, above
