"""Collects warp batches as columns: a row for each warp, and one for each exit of warps whose lanes did not
exit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.event.model import Record
from tracepipe.event.warps import PlacedWarps, joined_column
from tracepipe.reports.frames.arrays import Ints, Rows
from tracepipe.reports.frames.eager import where
from tracepipe.reports.frames.launch_columns import OF_KERNEL, OF_LAUNCH, WARP_LANES, LaunchTable
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.range_columns import RangeTable
from tracepipe.reports.frames.stored import Growing, made, parts, release

FULL_MASK = (1 << WARP_LANES) - 1
_LARGEST_NS = 1 << 61
# The types of columns that are as narrow as those of the frame.
_NARROW = {"sm": "int32", "slot": "int32", "entry_mask": "uint32"}
_KINDS = {
    "warp": "int64", "entry_ns": "int64", "last_exit_ns": "int64", "first_exit_ns": "int64", "exits": "int32",
    "cycles": "int64", **_NARROW,
}  # fmt: skip
_ALWAYS = ("warp", "entry_ns", "last_exit_ns")
_OPTIONAL = ("cycles", *_NARROW)
"""The columns that a batch may lack. Without `exits` each warp exited once, and `first_exit_ns` is its last
exit."""
_MISSING = {"sm": 0, "slot": 0, "entry_mask": 0, "exit_count": 1, "exit_clk": 0, "exit_mask": NONE}
"""The values of columns that some of several batches lack."""
_OF_BOTH = ("block_index", "warp_in_block")
COLUMNS = (
    "launch", "name", "gpu", "stream", "pid", "grid", "block", "warps_per_block", "bound_ns", "warp",
    "entry_ns", "first_exit_ns", "last_exit_ns", "exits", "cycles", "sm", "slot", "entry_mask", *_OF_BOTH,
)  # fmt: skip
_OF_BATCH = ("_launch_of", "_lacks_of", "_lasts")
_EXITS = {"warp_row": "int64", "exit_ns": "int64", "mask": "int64"}


class WarpTable:
    """Warps on the trace clock. Call `add` with all batches, then `finish`, then the other methods.

    Columns have the shape `(warps,)`.
    """

    def __init__(self, trace_clock: str) -> None:
        self._trace_clock = trace_clock
        self.launches = LaunchTable()
        # For each batch: its launch, the columns that it lacks, the row after its last one.
        self._launch_of: Any = Growing(np.int32)
        self._lacks_of: Any = Growing(np.uint8)
        self._lasts: Any = Growing(np.int64)
        self._columns: dict[str, Any] = {}
        self._exits: dict[str, Any] = {}
        self._growing: dict[str, Growing[Any]] = {name: Growing(_KINDS[name]) for name in _ALWAYS}
        self._growing_exits: dict[str, Growing[Any]] = {
            name: Growing(dtype) for name, dtype in _EXITS.items()
        }
        self.ranges = RangeTable()
        self._count = 0
        self.first_ns: int | None = None
        """The first entry of any warp."""

    def __len__(self) -> int:
        return self._count

    def add(self, batches: Sequence[PlacedWarps]) -> int:
        """Add several batches without ranges, or a single one; return the end of their last warp.

        Raises OutputError, and OverflowError where numbers are too large.
        """
        warps = _joined(batches)
        _check(warps)
        entry_ns = warps.entry_ns + warps.ts_ns
        first_ns, last_ns = _first_and_last(warps, entry_ns)
        self._add_exits(warps, entry_ns)
        self.ranges.add(warps, self._count)
        values: dict[str, Any] = {"warp": warps.warp, "entry_ns": entry_ns, "last_exit_ns": last_ns}
        values |= {name: getattr(warps, name) for name in _NARROW}
        values["cycles"] = None if warps.exit_clk is None else warps.last_of_exits(warps.exit_clk).clip(0)
        if warps.exit_count is not None or "exits" in self._growing:
            values["exits"] = 1 if warps.exit_count is None else warps.exit_count
            values["first_exit_ns"] = first_ns
        self._put(values, len(warps))
        self._put_batches(batches)
        if len(warps):
            began_ns = int(entry_ns.min())
            self.first_ns = began_ns if self.first_ns is None else min(began_ns, self.first_ns)
        return int(max(entry_ns.max(initial=warps.ts_ns), last_ns.max(initial=warps.ts_ns)))

    def _put_batches(self, batches: Sequence[PlacedWarps]) -> None:
        """Add the columns with a row for each batch. The warps of the batches were added just before."""
        launches, lacks = [], []
        for one in batches:
            # A time that was recorded on the trace's clock has no error from an alignment.
            bound_ns = None if one.clock == self._trace_clock else one.bound_ns
            launches.append(self.launches.number(one, bound_ns))
            columns = one.exit_clk, *(getattr(one, name) for name in _NARROW)
            lacks.append(sum(1 << at for at, column in enumerate(columns) if column is None))
        count = np.cumsum([len(one.warp) for one in batches])
        self._launch_of.extend(np.array(launches, np.int32), len(batches))
        self._lacks_of.extend(np.array(lacks, np.uint8), len(batches))
        self._lasts.extend(self._count - int(count[-1]) + count, len(batches))

    def _put(self, values: dict[str, Any], count: int) -> None:
        """Add the columns of a batch; None where it lacks one."""
        for name, column in values.items():
            if name not in self._growing and column is not None:
                late = self._growing[name] = Growing(_KINDS[name])
                before: dict[str, Any] = {
                    "exits": 1,
                    "first_exit_ns": self._growing["last_exit_ns"].so_far(self._count),
                }
                for part in parts(self._count):
                    of = before.get(name, 0)
                    late.extend(of[part] if isinstance(of, np.ndarray) else of, part.stop - part.start)
            if name in self._growing:
                self._growing[name].extend(0 if column is None else column, count)
        self._count += count

    def _add_exits(self, warps: PlacedWarps, entry_ns: Int64s) -> None:
        """Add the exits of warps with several exits, or with one exit of not all lanes."""
        exits = np.ones(len(warps), np.int64) if warps.exit_count is None else warps.exit_count
        masks, several = warps.exit_mask, exits > 1
        if masks is not None:
            one = warps.last_of_exits(masks)
            several = several | ((exits == 1) & (one != FULL_MASK) & (one != NONE))
        if not several.any():
            return
        of_exit = np.repeat(np.arange(len(exits)), exits)
        kept = several[of_exit]
        values = (of_exit[kept] + self._count, (entry_ns[of_exit] + warps.exit_ns)[kept])
        mask = -1 if masks is None else masks[kept]
        for name, part in zip(_EXITS, (*values, mask), strict=True):
            self._growing_exits[name].extend(part, int(kept.sum()))

    def finish(self) -> None:
        """Make the columns. No batch may be added afterwards. Raises OutputError."""
        self.launches.put_away()
        for name in _OF_BATCH:
            setattr(self, name, getattr(self, name).whole())
        self._columns = {name: column.whole() for name, column in self._growing.items()}
        self._exits = {name: column.whole() for name, column in self._growing_exits.items()}
        self._growing, self._growing_exits = {}, {}

    def stays_ns(self) -> Int64s:
        """The time from entry to exit of each warp that exited. Shape `(n,)`."""
        entry_ns, last_ns = self._columns["entry_ns"], self._columns["last_exit_ns"]
        stays_ns: Int64s = made(self._count, np.int64, lambda part: last_ns[part] - entry_ns[part])
        return stays_ns[self._columns["exits"] > 0] if "exits" in self._columns else stays_ns

    def frame(self, *columns: str, rows: Ints | None = None) -> pl.DataFrame:
        """A row for each warp, in the order of the file, or for some `rows`; with all columns, or a few.

        launch, name, gpu, stream, pid, grid, block, bound_ns: of the launch. warp: the linear index on the
        grid. block_index, warp_in_block: null where the size of a block is not known. sm, slot, entry_mask:
        null where not recorded. entry_ns; first_exit_ns, last_exit_ns: null for a warp that was running when
        the recording ended. exits: how many. cycles: of the SM's clock, from entry to the last exit.
        """
        if rows is not None:
            return self._frame(columns or COLUMNS, rows)
        release()
        return self._frame(columns or COLUMNS, slice(0, self._count))

    def frames(self, *columns: str, rows: Ints | None = None) -> Iterator[pl.DataFrame]:
        """Like `frame`, of all rows or of `rows`, a part at a time."""
        for part in parts(self._count if rows is None else len(rows)):
            yield self._frame(columns, part if rows is None else rows[part])

    def part(self, rows: slice, *columns: str) -> pl.DataFrame:
        """Like `frame`, for successive rows."""
        return self._frame(columns, rows)

    def _frame(self, columns: Sequence[str], rows: Rows) -> pl.DataFrame:
        """The frame of some rows."""
        return pl.DataFrame([self._series(name, rows) for name in columns])

    def _series(self, name: str, rows: Rows) -> pl.Series:
        """A column of the frame, null where a value is not known."""
        if name == "name":
            return self.launches.series(name, self.launch_of(rows))
        values, known = self.column(name, rows)
        series = pl.Series(name, values)
        return series if known.all() else where(known, series)

    def column(self, name: str, rows: Rows | None = None) -> tuple[Any, Bools]:
        """A column of all or some rows (names by their numbers in `launches`), and flags for known values;
        the columns are those of `frame`. Shapes `(n,)`, those of grids and blocks `(n, 3)`.
        """
        rows = slice(0, self._count) if rows is None else rows
        if name in _OF_BOTH:
            (warp, _), (size, known) = (self.column(of, rows) for of in ("warp", "warps_per_block"))
            known, size = known & (size > 0), np.maximum(size, 1)
            return warp // size if name == "block_index" else warp % size, known
        batch = self._batch_of(rows)
        if name in OF_KERNEL or name in OF_LAUNCH:
            return self.launches.column(name, self._launch_of[batch])
        if name == "exits" and name not in self._columns:
            return np.ones(len(batch), np.int32), np.ones(len(batch), np.bool_)
        if name == "first_exit_ns" and name not in self._columns:
            return self.column("last_exit_ns", rows)
        if name not in self._columns:
            return np.zeros(len(batch), _KINDS[name]), np.zeros(len(batch), np.bool_)
        values = self._columns[name][rows]
        bit = 1 << _OPTIONAL.index(name) if name in _OPTIONAL else 0
        known = self._lacks_of[batch] & bit == 0
        if name.endswith("_exit_ns") and "exits" in self._columns:
            known &= self._columns["exits"][rows] > 0
        return values, known

    def _batch_of(self, rows: Rows) -> Int32s:
        """The batch of each of some rows. Shape `(n,)`."""
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        batch: Int32s = np.searchsorted(self._lasts, numbers, "right").astype(np.int32)
        return batch

    def times_ns(self, rows: slice, end_ns: int) -> tuple[Int64s, Int64s]:
        """The entries and the last exits of successive rows; `end_ns` for a warp that never exited."""
        entry_ns, last_ns = self._columns["entry_ns"][rows], self._columns["last_exit_ns"][rows]
        if "exits" in self._columns:
            last_ns = np.where(self._columns["exits"][rows] > 0, last_ns, end_ns)
        return entry_ns, last_ns

    def launch_of(self, rows: Rows) -> Int32s:
        """The number, in `launches`, of the launch of each of some rows. Shape `(n,)`."""
        of: Int32s = self._launch_of[self._batch_of(rows)]
        return of

    def kernels(self) -> tuple[list[Record], Int32s]:
        """The distinct kernels, as records of `OF_KERNEL`, and for each warp the index of its kernel."""
        of_launch = self.launches.kernel_of
        of_warp: Int32s = made(self._count, np.int32, lambda part: of_launch[self.launch_of(part)])
        return self.launches.kernels(), of_warp

    def exit_columns(self) -> tuple[Int64s, Int64s, Int64s]:
        """The columns of `exits`, sorted by warp: warp_row, exit_ns and mask, which is negative where it was
        not recorded. Shapes `(exits,)`."""
        return self._exits["warp_row"], self._exits["exit_ns"], self._exits["mask"]

    def exits(self, rows: slice = slice(None)) -> pl.DataFrame:
        """A row for each exit of warps with several exits, or with one exit of not all lanes: warp_row (in
        `warps`), exit_ns, mask (null where not recorded).
        """
        frame = pl.DataFrame({name: column[rows] for name, column in self._exits.items()})
        return frame.with_columns(pl.when(pl.col("mask") >= 0).then("mask").alias("mask"))


def _joined(batches: Sequence[PlacedWarps]) -> PlacedWarps:
    """The warps of several batches as one batch, without the values of launches. Raises OverflowError where
    times are too large to be added.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    base_ns = np.array([one.ts_ns for one in batches], np.int64)
    entry_ns = np.concatenate([one.entry_ns for one in batches])
    if max(int(entry_ns.max()), int(np.abs(base_ns).max())) > _LARGEST_NS:
        raise OverflowError
    optional: dict[str, Any] = {
        name: joined_column(batches, name, missing) for name, missing in _MISSING.items()
    }
    return PlacedWarps(
        launched={},
        clock=first.clock,
        ts_ns=first.ts_ns,
        warp=np.concatenate([one.warp for one in batches]),
        entry_ns=entry_ns + np.repeat(base_ns - first.ts_ns, [len(one.warp) for one in batches]),
        exit_ns=np.concatenate([one.exit_ns for one in batches]),
        **optional,
    )


def _check(warps: PlacedWarps) -> None:
    """Raise OverflowError where numbers do not fit their columns."""
    longest_ns = int(warps.entry_ns.max(initial=0)), int(warps.exit_ns.max(initial=0))
    if len(warps) and max(*longest_ns, abs(warps.ts_ns)) > _LARGEST_NS:
        raise OverflowError
    for name, dtype in _NARROW.items():
        values = getattr(warps, name)
        if values is not None and int(values.max(initial=0)) > np.iinfo(dtype).max:
            raise OverflowError


def _first_and_last(warps: PlacedWarps, entry_ns: Int64s) -> tuple[Int64s, Int64s]:
    """The first and the last exit of each warp, -1 without an exit."""
    if warps.exit_count is None:
        at_ns = entry_ns + warps.exit_ns
        return at_ns, at_ns
    first_ns = last_ns = np.full(len(warps), -1, np.int64)
    left = warps.exit_count > 0
    if left.any():
        # The exits of a warp are successive: they reach from its first one to that of the next warp.
        places = warps.first_exits()[left]
        first_ns, last_ns = first_ns.copy(), last_ns.copy()
        first_ns[left] = entry_ns[left] + np.minimum.reduceat(warps.exit_ns, places)
        last_ns[left] = entry_ns[left] + np.maximum.reduceat(warps.exit_ns, places)
    return first_ns, last_ns
