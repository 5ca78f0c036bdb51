"""A batch of warps as columns, in source time and in trace time, and how the ranges of warps nest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from tracepipe.event.model import Record
from tracepipe.native import library

if TYPE_CHECKING:
    from tracepipe.event.columns import Bools, Int32s, Ints

Int64s = np.ndarray[Any, np.dtype[np.int64]]

EACH_WARP = ("warp", "sm", "slot", "entry_ns", "entry_clk", "entry_mask", "exit_count", "range_count")
"""Columns with a value for each warp."""
EACH_EXIT = ("exit_ns", "exit_clk", "exit_mask")
"""Columns with a value for each exit, warp after warp."""
EACH_RANGE = ("range_name", "range_clk", "range_dur_clk", "range_open")
"""Columns with a value for each range, warp after warp."""
WARP_COLUMNS = EACH_WARP + EACH_EXIT + EACH_RANGE
# A batch with more warps is processed alone. Smaller ones are processed together, up to this many warps.
SMALL_MAX, AT_ONCE_MAX = 1 << 10, 1 << 13


@dataclass(slots=True, kw_only=True)
class WarpColumns:
    """Columns as in `model.WarpBatch`, None where the recording lacks one. `launched` is the rest of the
    record: the kernel's name, its launch, GPU, grid, … `ts_ns` is the base of `entry_ns`. `ranges` are the
    names of ranges.
    """

    launched: Record
    ts_ns: int
    warp: Int64s
    entry_ns: Int64s
    exit_ns: Int64s
    sm: Int64s | None = None
    slot: Int64s | None = None
    entry_clk: Int64s | None = None
    entry_mask: Int64s | None = None
    exit_count: Int64s | None = None
    exit_clk: Int64s | None = None
    exit_mask: Int64s | None = None
    ranges: list[str] = field(default_factory=list)
    range_count: Int64s | None = None
    range_name: Int64s | None = None
    range_clk: Int64s | None = None
    range_dur_clk: Int64s | None = None
    range_open: Int64s | None = None

    def __len__(self) -> int:
        return len(self.warp)

    def first_exits(self) -> Int64s:
        """Where each warp's exits start in the columns of exits, of the shape `(warps,)`."""
        if self.exit_count is None:
            return np.arange(len(self.warp))
        return np.concatenate(([0], np.cumsum(self.exit_count)))[:-1]

    def last_of_exits(self, values: Int64s) -> Int64s:
        """The largest value of each warp's exits, of the shape `(warps,)`; -1 for a warp without exits."""
        if self.exit_count is None:
            return values
        out = np.full(len(self.warp), -1, np.int64)
        left = self.exit_count > 0
        if left.any():
            out[left] = np.maximum.reduceat(values, self.first_exits()[left])
        return out

    def of_ranges(self) -> Int64s:
        """The place of each range's warp, of the shape `(ranges,)`."""
        assert self.range_count is not None
        return np.repeat(np.arange(len(self.warp)), self.range_count)


@dataclass(slots=True, kw_only=True)
class Warps(WarpColumns):
    """Warps on the clock that they were recorded with."""


@dataclass(slots=True, kw_only=True)
class PlacedWarps(WarpColumns):
    """Warps on the trace's clock. `source_ns` has the source clock's reading at each warp's entry, None where
    that clock is the trace's own. `bound_ns` is by how much times may be wrong.
    """

    clock: str
    bound_ns: int = 0
    source_ns: Int64s | None = None
    offset_ns: int = 0
    """A reading of the source clock is the time in the trace plus this and a small correction, see
    `Clocks`."""
    range_ns: Int64s | None = None
    """When each range began, after its warp's entry. None where no warp has a range."""
    range_dur_ns: Int64s | None = None


T = TypeVar("T", bound=np.generic)
"""The type of the values of an array."""


def joined_optional(
    parts: Iterable[tuple[np.ndarray[Any, np.dtype[T]] | None, int]], missing: int
) -> np.ndarray[Any, np.dtype[T]] | None:
    """Join columns, with `missing` in place of those that are None; None where all are."""
    columns = list(parts)
    known = next((column for column, _ in columns if column is not None), None)
    if known is None:
        return None
    return np.concatenate(
        [
            np.full((size, *known.shape[1:]), missing, known.dtype) if column is None else column
            for column, size in columns
        ]
    )


def places_of(first: Int64s, sizes: Int64s) -> Int64s:
    """The places of parts that begin at `first`, one part after the other."""
    end = np.cumsum(sizes)
    return np.arange(int(sizes.sum())) + np.repeat(first - end + sizes, sizes)


Batch = TypeVar("Batch", bound=WarpColumns)
HAS: Final = {name: 1 << at for at, name in enumerate((*WARP_COLUMNS, "source_ns"))}
"""The flags of the columns that a batch has."""
# The columns that are joined, and the values where a batch lacks one. Without a number of exits, a warp has
# one.
_JOINED: Final = (*EACH_WARP[:-1], *EACH_EXIT, "source_ns")
MISSING: Final = {name: 1 if name == "exit_count" else -1 for name in _JOINED}


def are_small(sizes: Int64s) -> Bools:
    """Whether batches of these sizes are processed together, unless they have ranges."""
    small: Bools = (sizes > 0) & (sizes <= SMALL_MAX)
    return small


@dataclass(slots=True, eq=False)
class WarpGroup(Generic[Batch]):
    """Batches that are processed as one: several small ones with warps and no ranges, or a single one.

    `whole` has the columns of all, batch after batch, with values of `MISSING` where some lack a column. By
    batch, `kind` is the place of its record in `records`, `launch` the launch where that differs from the one
    in the record, `base_ns` its time, `sizes` and `exits` how many warps and exits it has, `has` the flags of
    its columns, and `bound_ns` by how much times may be wrong, once they are placed.
    """

    whole: Batch
    records: list[Record]
    kind: Int64s
    launch: list[int | None]
    base_ns: Int64s
    sizes: Int64s
    exits: Int64s
    has: Int64s
    bound_ns: Int64s

    @classmethod
    def of(cls, one: Batch) -> WarpGroup[Batch]:
        """A single batch."""
        has = sum(flag for name, flag in HAS.items() if getattr(one, name, None) is not None)
        numbers = 0, one.ts_ns, len(one.warp), len(one.exit_ns), has, getattr(one, "bound_ns", 0)
        kind, *more = (np.array([number], np.int64) for number in numbers)
        return cls(one, [one.launched], kind, [None], *more)

    def __len__(self) -> int:
        return len(self.base_ns)

    @property
    def first(self) -> Int64s:
        """By batch: the place of its first warp."""
        return np.cumsum(self.sizes) - self.sizes

    def launched(self, at: int) -> Record:
        """The record of a batch."""
        record, launch = self.records[int(self.kind[at])], self.launch[at]
        return record if launch is None else record | {"launch": launch}

    def launches(self) -> list[int | None]:
        """By batch: its launch, None without one."""
        of_record = [record.get("launch") for record in self.records]
        each = zip(self.launch, self.kind.tolist(), strict=True)
        return [of_record[kind] if launch is None else launch for launch, kind in each]

    def by_kind(self, value: Callable[[Record], T | int]) -> Int64s:
        """By batch: a value that depends on the record alone. It is asked for in the order of batches."""
        kinds = self.kind.tolist()
        found = np.zeros(len(self.records), np.int64)
        for kind in dict.fromkeys(kinds):
            found[kind] = value(self.records[kind])
        return found[self.kind]

    def take(self, at: Int64s) -> WarpGroup[Batch]:
        """Some of the batches, in this order."""
        if len(at) == len(self) and bool((at == np.arange(len(at))).all()):
            return self
        each = {False: places_of(self.first[at], self.sizes[at])}
        each[True] = places_of((np.cumsum(self.exits) - self.exits)[at], self.exits[at])
        columns = {name: getattr(self.whole, name, None) for name in _JOINED}
        some: dict[str, Any] = {
            name: column[each[name in EACH_EXIT]] for name, column in columns.items() if column is not None
        }
        more = (column[at] for column in (self.base_ns, self.sizes, self.exits, self.has, self.bound_ns))
        launch = [self.launch[one] for one in at.tolist()]
        return WarpGroup(replace(self.whole, **some), self.records, self.kind[at], launch, *more)

    def __getitem__(self, at: int) -> Batch:
        """A batch alone."""
        one = self if len(self) == 1 else self.take(np.array([at]))
        lacks: dict[str, Any] = {
            name: None
            for name in _JOINED
            if not int(one.has[0]) & HAS[name] and getattr(one.whole, name, None) is not None
        }
        if isinstance(one.whole, PlacedWarps):
            lacks["bound_ns"] = int(one.bound_ns[0])
            lacks["offset_ns"] = one.whole.offset_ns if int(one.has[0]) & HAS["source_ns"] else 0
        launched = dict(one.launched(0))
        return replace(one.whole, launched=launched, ts_ns=int(one.base_ns[0]), **lacks)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))

    @property
    def is_small(self) -> bool:
        """Whether it can be joined with others."""
        return self.whole.range_count is None and bool(are_small(self.sizes).all())

    def joins(self, other: WarpGroup[Batch]) -> bool:
        """Whether batches of another group can be added to these."""
        of_clock = [
            (getattr(of, "clock", ""), getattr(of, "offset_ns", 0)) for of in (self.whole, other.whole)
        ]
        return of_clock[0] == of_clock[1] and self.is_small and other.is_small


def joined_groups(groups: Sequence[WarpGroup[Batch]]) -> WarpGroup[Batch]:
    """The batches of several groups as one."""
    if len(groups) == 1:
        return groups[0]
    columns: dict[str, Any] = {}
    for name, missing in MISSING.items():
        of = "exit_ns" if name in EACH_EXIT else "warp"
        parts = ((getattr(one.whole, name, None), len(getattr(one.whole, of))) for one in groups)
        if (column := joined_optional(parts, missing)) is not None:
            columns[name] = column
    starts: dict[int, int] = {}
    records: list[Record] = []
    for one in groups:
        if id(one.records) not in starts:
            starts[id(one.records)] = len(records)
            records += one.records
    numbers = ((one.base_ns, one.sizes, one.exits, one.has, one.bound_ns) for one in groups)
    return WarpGroup(
        replace(groups[0].whole, **columns),
        records,
        np.concatenate([one.kind + starts[id(one.records)] for one in groups]),
        [*chain.from_iterable(one.launch for one in groups)],
        *map(np.concatenate, zip(*numbers, strict=True)),
    )


class Others(Generic[Batch]):
    """The records of a batch that are not events, by number. Batches of warps are kept in groups."""

    def __init__(self, some: Iterable[Record | Batch] = ()) -> None:
        self.parts: list[Record | WarpGroup[Batch]] = []
        self._starts: list[int] = []
        self._left: list[int] = []
        self._end = 0
        for one in some:
            self.append(one)

    def __len__(self) -> int:
        return self._end

    def __iter__(self) -> Iterator[Record | Batch]:
        return map(self.__getitem__, range(self._end))

    def __getitem__(self, number: int) -> Record | Batch:
        at = bisect_right(self._starts, number) - 1
        part = self.parts[at]
        return part[number - self._starts[at]] if isinstance(part, WarpGroup) else part

    def __setitem__(self, number: int, record: Record) -> None:
        self.parts[bisect_right(self._starts, number) - 1] = record

    def append(self, one: Record | Batch) -> None:
        """Add a record or a batch."""
        self.add(WarpGroup.of(one) if isinstance(one, WarpColumns) else one)

    def add(self, part: Record | WarpGroup[Batch]) -> Int64s:
        """Add a record or a group, and return the numbers that it gets."""
        count = len(part) if isinstance(part, WarpGroup) else 1
        self.parts.append(part)
        self._starts.append(self._end)
        self._left.append(count)
        self._end += count
        return np.arange(self._end - count, self._end)

    @property
    def warps(self) -> list[WarpGroup[Batch]]:
        """All batches of warps."""
        return [part for part in self.parts if isinstance(part, WarpGroup)]

    def are_warps(self, numbers: Ints) -> Bools:
        """By number: whether it is that of a batch of warps."""
        of = [isinstance(part, WarpGroup) for part in self.parts]
        return np.array(of, np.bool_)[self._at(numbers)] if of else np.zeros(len(numbers), np.bool_)

    def _at(self, numbers: Ints) -> Int64s:
        return np.searchsorted(np.array(self._starts, np.int64), numbers, "right") - 1

    def stretches(self, numbers: Ints) -> Iterator[tuple[int, int, WarpGroup[Batch], Int64s]]:
        """The groups of some batches of warps, each with the stretch of `numbers` that are of it, and the
        places of these batches in it.
        """
        of = self._at(numbers)
        at = numbers - np.array(self._starts, np.int64)[of]
        for first, last in pairwise(np.flatnonzero(np.diff(of, prepend=-1, append=-1)).tolist()):
            part = self.parts[int(of[first])]
            assert isinstance(part, WarpGroup)
            yield first, last, part, at[first:last]

    def groups(self, numbers: Ints) -> Iterator[tuple[slice, WarpGroup[Batch]]]:
        """Some batches of warps in their order as few groups, with the stretch of `numbers` of each."""
        some: list[WarpGroup[Batch]] = []
        start = size = 0
        for first, _, part, places in self.stretches(numbers):
            group = part.take(places)
            if some and not (size + len(group.whole) <= AT_ONCE_MAX and some[-1].joins(group)):
                yield slice(start, first), joined_groups(some)
                some, start, size = [], first, 0
            some.append(group)
            size += len(group.whole)
        if some:
            yield slice(start, len(numbers)), joined_groups(some)

    def sizes(self, numbers: Ints) -> Int64s:
        """How many warps some batches have."""
        return np.concatenate(
            [np.empty(0, np.int64), *(of.sizes[at] for _, _, of, at in self.stretches(numbers))]
        )

    def drop(self, numbers: Ints) -> None:
        """Forget some records and batches, whose numbers must not be used any more."""
        gone = np.bincount(self._at(numbers), minlength=len(self.parts)).tolist()
        self._left = [left - count for left, count in zip(self._left, gone, strict=True)]
        kept = [at for at, left in enumerate(self._left) if left]
        self.parts = [self.parts[at] for at in kept]
        self._starts = [self._starts[at] for at in kept]
        self._left = [self._left[at] for at in kept]


def warps_of(record: Record) -> Warps:
    """The columns of a good record of warps, which are taken out of `record`."""
    columns = {name: np.array(record.pop(name), np.int64) for name in WARP_COLUMNS if name in record}
    ranges = record.pop("ranges", [])
    return Warps(launched=record, ts_ns=record.pop("ts_ns"), ranges=ranges, **columns)


OUTER: Final = -1
CROSSING: Final = -2
RANGE_DEPTH_MAX: Final = 64
"""A range inside this many others counts as crossing them."""


class Nested(NamedTuple):
    """The nesting of a batch's ranges. `inside` has for each range the place of the one around it, OUTER for
    none, or CROSSING. `steps` are the begins and ends of all that do not cross, in their order, warp after
    warp: twice the range's place, plus 1 for its end.
    """

    inside: Int32s
    steps: Int64s


def nested(warps: WarpColumns) -> Nested:
    """Nest the ranges of a batch."""
    assert warps.range_count is not None and warps.range_clk is not None and warps.range_dur_clk is not None
    counts, begin, dur = warps.range_count, warps.range_clk, warps.range_dur_clk
    core = library()
    if core is None:
        return _nested(counts.tolist(), begin.tolist(), dur.tolist())
    inside, steps = np.empty(len(begin), np.int32), np.empty(2 * len(begin), np.int64)
    pointers = (column.ctypes.data for column in (counts, begin, dur, inside, steps))
    count = core.tp_ranges_nest(len(counts), *pointers)
    return Nested(inside, steps[:count])


def _nested(counts: list[int], begin: list[int], dur: list[int]) -> Nested:
    inside: list[int] = []
    steps: list[int] = []
    for count in counts:
        around: list[int] = []
        for at in range(len(inside), len(inside) + count):
            while around and begin[around[-1]] + dur[around[-1]] <= begin[at]:
                steps.append(2 * around.pop() + 1)
            is_beyond = around and begin[around[-1]] + dur[around[-1]] < begin[at] + dur[at]
            if is_beyond or len(around) == RANGE_DEPTH_MAX:
                inside.append(CROSSING)
                continue
            inside.append(around[-1] if around else OUTER)
            around.append(at)
            steps.append(2 * at)
        steps += (2 * one + 1 for one in reversed(around))
    return Nested(np.array(inside, np.int32), np.array(steps, np.int64))
