"""Puts batches of warps on the trace clock, with times that the cycles of their SMs make finer.

Exits count from their warp's entry. There may be very many small batches: several are placed together, with
the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

import numpy as np

from tracepipe.clocks.maps import ClockMap, Method
from tracepipe.clocks.sm_clock import HAS_CLOCKS, HAS_COUNTS, HAS_SLOT, NativeSmClocks, SmClocks, WarpReadings
from tracepipe.event.columns import Bools, Bytes, Int64s, Ints
from tracepipe.event.model import SourceNs
from tracepipe.event.warps import WARP_COLUMNS, PlacedWarps, Warps, at_once, joined_column
from tracepipe.native import library

# Readings are written as differences from a time this far before the first one, so that they stay positive:
# the drift of a second is some µs.
_OFFSET_ROOM_NS: Final = 1 << 20
_AS_READ: Final = tuple(name for name in WARP_COLUMNS if name not in ("entry_ns", "exit_ns"))
_as_read = attrgetter(*_AS_READ)


class WarpTimes:
    """Computes the times of warps on the clocks of GPUs, in the order of the file."""

    def __init__(self) -> None:
        self._sm_clocks: dict[str, SmClocks | NativeSmClocks] = {}
        self.offsets_ns: dict[str, int] = {}
        """By clock: a reading is the time in the trace plus this and a small correction, see
        `PlacedWarps`."""

    def place(self, clock_map: ClockMap, batches: Sequence[Warps]) -> Iterator[PlacedWarps]:
        """Batches of one clock on the trace clock."""
        for some in at_once(batches):
            if len(some[0]):
                yield from self._place_run(clock_map, _Run(some))
                continue
            (empty,) = some
            base_ns = SourceNs(empty.ts_ns)
            time = clock_map.place(base_ns), clock_map.bound_at(base_ns)
            yield self._placed(clock_map, empty, time, empty.entry_ns, empty.exit_ns, is_finer=False)

    def _placed(
        self,
        clock_map: ClockMap,
        warps: Warps,
        time: tuple[int, int],
        entry: Int64s,
        exits: Int64s,
        *,
        is_finer: bool,
    ) -> PlacedWarps:
        """A batch whose times are known. `time` is the time of the batch and its bound."""
        clock, (start_ns, bound_ns) = clock_map.clock, time
        placed = PlacedWarps(
            launched=warps.launched,
            ranges=warps.ranges,
            ts_ns=start_ns,
            clock=clock,
            entry_ns=entry,
            exit_ns=exits,
            **dict(zip(_AS_READ, _as_read(warps), strict=True)),
        )
        if clock_map.method != Method.SAME:
            placed.bound_ns, placed.source_ns = bound_ns, warps.ts_ns + warps.entry_ns
            placed.offset_ns = self.offsets_ns.setdefault(clock, warps.ts_ns - start_ns - _OFFSET_ROOM_NS)
        elif is_finer:
            placed.source_ns = warps.ts_ns + warps.entry_ns
            placed.offset_ns = self.offsets_ns.setdefault(clock, -_OFFSET_ROOM_NS)
        place_ranges(placed)
        return placed

    def _place_run(self, clock_map: ClockMap, run: _Run) -> Iterator[PlacedWarps]:
        is_finer, entry, exits = self._refined_run(clock_map.clock, run)
        first_ns = np.where(is_finer, np.minimum.reduceat(entry, run.first), 0)
        start_ns = clock_map.place_all(run.base_ns + first_ns)
        longest_ns = np.maximum(np.maximum.reduceat(entry, run.first), 0) + run.longest(exits)
        off_ns = clock_map.place_all(run.base_ns + longest_ns) - start_ns - longest_ns + first_ns
        moves = off_ns != 0
        after = entry - np.repeat(first_ns, run.warps)
        if moves.any():
            of, warps = run.warp_of_exits(), np.repeat(moves, run.warps)
            base_ns, leaves = np.repeat(run.base_ns, run.warps), warps[of]
            entered_ns = clock_map.place_all((base_ns + entry)[warps])
            left_ns = clock_map.place_all(((base_ns + entry)[of] + exits)[leaves])
            placed_ns = np.zeros(len(entry), np.int64)
            placed_ns[warps] = entered_ns
            exits[leaves] = left_ns - placed_ns[of][leaves]
            after[warps] = entered_ns - np.repeat(start_ns, run.warps)[warps]
        bound_ns = clock_map.bounds_at(run.base_ns)
        times = zip(start_ns.tolist(), bound_ns.tolist(), strict=True)
        last, last_exit = np.cumsum(run.warps).tolist(), np.cumsum(run.exits).tolist()
        rows = zip(run.batches, times, is_finer.tolist(), last, last_exit, strict=True)
        for one, time, finer, to, to_exit in rows:
            own = after[to - len(one.warp) : to], exits[to_exit - len(one.exit_ns) : to_exit]
            yield self._placed(clock_map, one, time, *own, is_finer=finer)

    def _refined_run(self, clock: str, run: _Run) -> tuple[Bools, Int64s, Int64s]:
        """Which batches have finer times, and the entries and exits of all."""
        has = run.has()
        if not (has & HAS_CLOCKS).any():
            return np.zeros(len(has), np.bool_), run.entry_ns, run.exit_ns
        sm_clocks = self._sm_clocks.get(clock)
        if sm_clocks is None:
            core = library()
            sm_clocks = self._sm_clocks[clock] = SmClocks() if core is None else NativeSmClocks(core)
        if isinstance(sm_clocks, NativeSmClocks) and len(run.batches) > 1:
            others = ("sm", "slot", "entry_clk", "exit_clk", "exit_count")
            joined = (joined_column(run.batches, name, 0) for name in others)
            columns = run.entry_ns, run.exit_ns, *joined
            return sm_clocks.refine_all(run.base_ns, run.warps, run.exits, has, columns)
        finer = [
            sm_clocks.refine(
                warps.ts_ns, WarpReadings(*(getattr(warps, name) for name in WarpReadings._fields))
            )
            if flags & HAS_CLOCKS
            else None
            for warps, flags in zip(run.batches, has.tolist(), strict=True)
        ]
        as_read = ((warps.entry_ns, warps.exit_ns) for warps in run.batches)
        best = [read if found is None else found for found, read in zip(finer, as_read, strict=True)]
        entry, exits = (np.concatenate(column) for column in zip(*best, strict=True))
        return np.array([found is not None for found in finer], np.bool_), entry, exits


class _Run:
    """Batches as columns, one after the other; by batch, its time, its warps and exits, its first warp."""

    def __init__(self, batches: Sequence[Warps]) -> None:
        self.batches = batches
        self.entry_ns: Int64s = np.concatenate([warps.entry_ns for warps in batches])
        self.exit_ns: Int64s = np.concatenate([warps.exit_ns for warps in batches])
        self.base_ns: Int64s = np.array([warps.ts_ns for warps in batches], np.int64)
        self.warps: Int64s = np.array([len(warps.warp) for warps in batches], np.int64)
        self.exits: Int64s = np.array([len(warps.exit_ns) for warps in batches], np.int64)
        self.first: Int64s = np.cumsum(self.warps) - self.warps

    def has(self) -> Bytes:
        """By batch: which columns for finer times it has, as flags of `NativeSmClocks`."""
        return np.array(
            [
                HAS_CLOCKS * all(column is not None for column in (one.sm, one.entry_clk, one.exit_clk))
                | HAS_SLOT * (one.slot is not None)
                | HAS_COUNTS * (one.exit_count is not None)
                for one in self.batches
            ],
            np.uint8,
        )

    def longest(self, exits: Int64s) -> Int64s:
        """The longest stay of each batch, 0 without stays."""
        longest = np.zeros(len(self.batches), np.int64)
        left = self.exits > 0
        if left.any():
            at = (np.cumsum(self.exits) - self.exits)[left]
            longest[left] = np.maximum(np.maximum.reduceat(exits, at), 0)
        return longest

    def warp_of_exits(self) -> Ints | slice:
        """The warp of each exit."""
        count = joined_column(self.batches, "exit_count", 1)
        return slice(None) if count is None else np.repeat(np.arange(len(self.entry_ns)), count)


# Numbers are split into halves of this many bits, so that products are below 2⁶².
_HALF_BITS = 20
_BITS = 2 * _HALF_BITS


def place_ranges(warps: PlacedWarps) -> None:
    """Set the times of the ranges of a batch, whose warps have theirs."""
    if warps.range_clk is None or warps.range_dur_clk is None or not len(warps.range_clk):
        return
    assert warps.exit_clk is not None  # without it a batch has no ranges
    of = warps.of_ranges()
    life_ns, life_clk = (warps.last_of_exits(column)[of] for column in (warps.exit_ns, warps.exit_clk))
    begin_ns, end_ns = (
        _share(clk, life_clk, np.maximum(life_ns, 0))
        for clk in (warps.range_clk, warps.range_clk + warps.range_dur_clk)
    )
    warps.range_ns, warps.range_dur_ns = begin_ns, end_ns - begin_ns


def _share(clk: Int64s, life_clk: Int64s, life_ns: Int64s) -> Int64s:
    """`life_ns` × `clk` ÷ `life_clk`, rounded down; `clk` is `life_clk` at most.

    It is exact below 2⁴⁰ cycles, nine minutes. Beyond that, the last bits of the cycles are ignored.
    """
    whole_ns, rest_ns = np.divmod(life_ns, np.maximum(life_clk, 1))
    shift = np.maximum(np.frexp(life_clk.astype(np.float64))[1] - _BITS, 0).astype(np.int64)
    of, rest, part = np.maximum(life_clk >> shift, 1), rest_ns >> shift, clk >> shift
    high, low = part >> _HALF_BITS, part & ((1 << _HALF_BITS) - 1)
    quotient, remainder = np.divmod(high * rest, of)
    share_ns = (quotient << _HALF_BITS) + ((remainder << _HALF_BITS) + low * rest) // of
    shared: Int64s = clk * whole_ns + (share_ns << shift)
    return shared
