"""A batch of warps as columns, in source time and in trace time, and how the ranges of warps nest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from tracepipe.event.model import Record
from tracepipe.native import library

if TYPE_CHECKING:
    from tracepipe.event.columns import Int32s

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
    record: the kernel's name, its launch, GPU, grid, … `ranges` are the names of ranges.
    """

    launched: Record
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
    """Warps on the clock that they were recorded with: `ts_ns` is the base of `entry_ns`."""

    ts_ns: int


@dataclass(slots=True, kw_only=True)
class PlacedWarps(WarpColumns):
    """Warps on the trace's clock. `source_ns` has the source clock's reading at each warp's entry, None where
    that clock is the trace's own. `bound_ns` is by how much times may be wrong.
    """

    ts_ns: int
    clock: str
    bound_ns: int = 0
    source_ns: Int64s | None = None
    offset_ns: int = 0
    """A reading of the source clock is the time in the trace plus this and a small correction, see
    `Clocks`."""
    range_ns: Int64s | None = None
    """When each range began, after its warp's entry. None where no warp has a range."""
    range_dur_ns: Int64s | None = None


Batch = TypeVar("Batch", bound=WarpColumns)
T = TypeVar("T", bound=np.generic)
"""The type of the values of an array."""


def at_once(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Group batches that are processed together: several small ones with warps and no ranges, or a single
    one.
    """
    some: list[Batch] = []
    size = 0
    for batch in batches:
        count = len(batch.warp)
        is_small = 0 < count <= SMALL_MAX and batch.range_count is None
        if some and (not is_small or size + count > AT_ONCE_MAX):
            yield some
            some, size = [], 0
        if is_small:
            some.append(batch)
            size += count
        else:
            yield [batch]
    if some:
        yield some


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


def joined_column(batches: Sequence[WarpColumns], name: str, missing: int) -> Int64s | None:
    """Join a column of several batches, with `missing` where one lacks it; None where all lack it."""
    columns = [getattr(one, name) for one in batches]
    there = [column for column in columns if column is not None]
    if len(there) in (0, len(columns)):  # as a rule
        return np.concatenate(there) if there else None
    of = "exit_ns" if name in EACH_EXIT else "warp"
    sizes = (len(getattr(one, of)) for one in batches)
    return joined_optional(zip(columns, sizes, strict=True), missing)


def joined_warps(batches: Sequence[PlacedWarps], missing: Mapping[str, int]) -> PlacedWarps:
    """The warps of batches without ranges as one batch, without the record of a launch. `missing` has the
    values of columns that some of them may lack. A single batch is returned as it is.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    optional: dict[str, Any] = {name: joined_column(batches, name, value) for name, value in missing.items()}
    return PlacedWarps(
        launched={},
        clock=first.clock,
        ts_ns=first.ts_ns,
        offset_ns=first.offset_ns,
        warp=np.concatenate([batch.warp for batch in batches]),
        entry_ns=np.concatenate([batch.entry_ns + (batch.ts_ns - first.ts_ns) for batch in batches]),
        exit_ns=np.concatenate([batch.exit_ns for batch in batches]),
        **optional,
    )


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
