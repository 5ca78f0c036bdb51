"""Events as columns: some thousands at a time, in source time as readers give them, or in trace time.

Only `clocks` makes the second of the first, and what comes after it takes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from tracepipe.event.model import Problem
from tracepipe.event.warps import Others, PlacedWarps, T, Warps, joined_optional

Int64s = np.ndarray[Any, np.dtype[np.int64]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
"""Whole numbers of any width, such as the numbers of rows."""
Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
AnyArray = np.ndarray[Any, np.dtype[Any]]
Rows = Ints | Bools | slice
"""Which rows: their numbers, a flag for each, or a range."""

NONE = -1
"""No arguments, no shape, no reading of another clock."""
SPECIAL = -2
"""The shape of a row that is not an event: `args` is its place among the batch's `others`."""
UNDATED_NS = -1
"""The time of a loss that its writer could not date. Its place in the file is all that is known."""
_U64 = 1 << 64

Three = tuple[int, int, int]
Index = tuple[int, int, int, int, int, int]
"""The index of a block and that of a thread in it, x, y and z each; NONE where it is not recorded."""
NO_INDEX: Index = (NONE, NONE, NONE, NONE, NONE, NONE)
Row = tuple[int, int, int, int, int, Index | None, int]
"""Time, shape, arguments, duration, launch, index, stack."""


@dataclass(slots=True)
class Texts:
    """A column of texts: `data` has one after the other, and `ends` has where each ends."""

    data: bytes
    ends: Int64s

    @staticmethod
    def of(texts: Sequence[bytes]) -> Texts:
        """A column of these texts."""
        return Texts(b"".join(texts), np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts))))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, at: int) -> bytes:
        return self.data[int(self.ends[at - 1]) if at else 0 : int(self.ends[at])]

    def __iter__(self) -> Iterator[bytes]:
        start = 0
        for end in self.ends.tolist():
            yield self.data[start:end]
            start = end


Events = TypeVar("Events", bound="EventColumns")


@dataclass(slots=True)
class EventColumns:
    """A row for each event, in file order.

    `shape` and `args` are numbers in the recording's tables; `dur_ns` and `launch` are 0 where the shape has
    none. A launch of 64 bits is kept as its two's complement; an end of a flow has the flow's number there.
    `index` has six columns, those of `Index`, and is None where no event is of a thread of a GPU: a million
    events of such threads may differ in their index alone. `stack` is a number among the recording's stacks,
    NONE for an event without one, and None where no event has one.
    """

    ts_ns: Int64s
    shape: Int32s
    args: Int32s
    dur_ns: Int64s
    launch: Int64s
    index: Int32s | None = field(default=None, kw_only=True)
    stack: Int64s | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.ts_ns)

    def thread_of(self, at: int) -> tuple[Three | None, Three | None]:
        """The block and the thread of an event, None each where it is not recorded."""
        if self.index is None:
            return None, None
        block, thread = self.index[at].reshape(2, 3).tolist()
        return tuple(block) if block[0] != NONE else None, tuple(thread) if thread[0] != NONE else None

    def shared(self, kind: type[Events], **more: AnyArray) -> Events:
        """The same columns, which are not copied, and more of them, as another kind."""
        return kind(**{one.name: getattr(self, one.name) for one in fields(self)}, **more)

    def take(self: Events, places: Rows) -> Events:
        """The events of some places, in that order."""
        columns: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        taken: dict[str, Any] = {name: None if of is None else of[places] for name, of in columns.items()}
        return type(self)(**taken)


@dataclass(slots=True)
class SourceBatch:
    """Some thousands of records in file order, on the clocks that they were recorded with, and the problems
    among them. `others` are the records that are not events: warps, losses, clock pairs, the footer.

    `foreign_lines` has the lines, with their numbers, that are not of the format: those of a log or of
    another format. `printed` has those that a script or the traced program printed, or of another format.
    `text_bytes` is the length of the text, where it matters.
    """

    events: EventColumns
    others: Others[Warps] = field(default_factory=Others)
    problems: list[Problem] = field(default_factory=list)
    foreign_lines: list[tuple[int, bytes]] = field(default_factory=list)
    printed: list[tuple[int, bytes]] = field(default_factory=list)
    text_bytes: int = 0


@dataclass(slots=True)
class TraceColumns(EventColumns):
    """Events on the trace's clock. `source_ns` is the reading of the clock of the recording, NONE where that
    is the trace's clock. `bound_ns` is by how much the time may be wrong. Both are None where no event has
    them.
    """

    source_ns: Int64s | None = None
    bound_ns: Int64s | None = None


@dataclass(slots=True)
class TraceBatch:
    """Events on the trace's clock, in file order, and `others`, which are not events. A loss has its time in
    its row.

    `places` are the places of its rows in the source batch, None where all of that batch's rows are here.
    """

    events: TraceColumns
    others: Others[PlacedWarps] = field(default_factory=Others)
    text_bytes: int = 0
    places: Int64s | None = None


def no_events() -> EventColumns:
    """Columns without rows."""
    return event_columns([])


def event_columns(rows: Sequence[Row]) -> EventColumns:
    """Columns of rows."""
    columns = zip(*rows, strict=True) if rows else ([] for _ in range(7))
    ts_ns, shape, args, dur_ns, launch, index, stack = columns
    return EventColumns(
        np.array(ts_ns, np.int64),
        np.array(shape, np.int32),
        np.array(args, np.int32),
        np.array(dur_ns, np.int64),
        np.array(launch, np.int64),
        index=np.array([one or NO_INDEX for one in index], np.int32) if any(index) else None,
        stack=np.array(stack, np.int64) if any(one != NONE for one in stack) else None,
    )


def no_indices(count: int) -> Int32s:
    """A column of `count` indices that are not recorded, of the shape `(count, 6)`."""
    return np.full((count, len(NO_INDEX)), NONE, np.int32)


def signed(launch: int) -> int:
    """The launch id as a signed integer of 64 bits, as columns have it."""
    return launch - _U64 if launch >= _U64 >> 1 else launch


def unsigned(launch: int) -> int:
    """The launch id as an unsigned integer, as records have it."""
    return launch + _U64 if launch < 0 else launch


def joined(parts: Sequence[Events]) -> Events:
    """The events of several parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {
        one.name: joined_optional(
            ((getattr(part, one.name), len(part)) for part in parts), 0 if one.name == "bound_ns" else NONE
        )
        for one in fields(parts[0])
    }
    return type(parts[0])(**columns)


def distinct(values: np.ndarray[Any, np.dtype[T]]) -> np.ndarray[Any, np.dtype[T]]:
    """Each value once, in order. np.unique would load the module of masked arrays: 2 MB of memory."""
    values = np.sort(values)
    found: np.ndarray[Any, np.dtype[T]] = values[np.diff(values, prepend=values[:1] - 1) != 0]
    return found


def grown(column: np.ndarray[Any, np.dtype[T]], size: int, fill: int) -> np.ndarray[Any, np.dtype[T]]:
    """A side table by number with room for `size` numbers; new places have `fill`."""
    if size <= len(column):
        return column
    more = np.full(max(size, 2 * len(column), 64) - len(column), fill, column.dtype)
    return np.concatenate([column, more])
