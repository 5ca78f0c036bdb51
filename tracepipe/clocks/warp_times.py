"""Puts batches of warps on the trace clock, with times that the cycles of their SMs make finer.

Exits count from their warp's entry. There may be very many small batches: several are placed together, with
the same result.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final

import numpy as np

from tracepipe.clocks.maps import ClockMap, Method
from tracepipe.clocks.sm_clock import HAS_CLOCKS, HAS_COUNTS, HAS_SLOT, NativeSmClocks, SmClocks, WarpReadings
from tracepipe.event.columns import NONE, Bools, Int64s
from tracepipe.event.warps import HAS, WARP_COLUMNS, PlacedWarps, WarpGroup, Warps
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

    def place(self, clock_map: ClockMap, group: WarpGroup[Warps]) -> WarpGroup[PlacedWarps]:
        """Batches of one clock on the trace clock."""
        clock, read, sizes, first = clock_map.clock, group.whole, group.sizes, group.first
        base_ns, has = np.repeat(group.base_ns, sizes), group.has
        if len(read):
            is_finer, entry, exits = self._refined(clock, group)
            first_ns = np.where(is_finer, np.minimum.reduceat(entry, first), 0)
            start_ns = clock_map.place_all(group.base_ns + first_ns)
            longest_ns = np.maximum(np.maximum.reduceat(entry, first), 0) + _longest(group, exits)
            off_ns = clock_map.place_all(group.base_ns + longest_ns) - start_ns - longest_ns + first_ns
            after = entry - np.repeat(first_ns, sizes)
            if (moves := off_ns != 0).any():
                warps = np.repeat(moves, sizes)
                count = read.exit_count
                of = slice(None) if count is None else np.repeat(np.arange(len(entry)), count)
                leaves = warps[of]
                entered_ns = clock_map.place_all((base_ns + entry)[warps])
                left_ns = clock_map.place_all(((base_ns + entry)[of] + exits)[leaves])
                placed_ns = np.zeros(len(entry), np.int64)
                placed_ns[warps] = entered_ns
                exits[leaves] = left_ns - placed_ns[of][leaves]
                after[warps] = entered_ns - np.repeat(start_ns, sizes)[warps]
        else:
            is_finer, after, exits = np.zeros(1, np.bool_), read.entry_ns, read.exit_ns
            start_ns = clock_map.place_all(group.base_ns)
        source_ns, offset_ns, bound_ns = None, 0, np.zeros(len(group), np.int64)
        moved = is_finer
        if clock_map.method != Method.SAME:
            moved, bound_ns = np.ones(len(group), np.bool_), clock_map.bounds_at(group.base_ns)
        if moved.any():
            source_ns = np.where(np.repeat(moved, sizes), base_ns + read.entry_ns, NONE)
            has = np.where(moved, has | HAS["source_ns"], has)
            off_ns = group.base_ns - start_ns if clock_map.method != Method.SAME else np.zeros(1, np.int64)
            offset_ns = self.offsets_ns.setdefault(clock, int(off_ns[0]) - _OFFSET_ROOM_NS)
        placed = PlacedWarps(
            launched={},
            ranges=read.ranges,
            ts_ns=int(start_ns[0]),
            clock=clock,
            entry_ns=after,
            exit_ns=exits,
            source_ns=source_ns,
            offset_ns=offset_ns,
            **dict(zip(_AS_READ, _as_read(read), strict=True)),
        )
        place_ranges(placed)
        return WarpGroup(
            placed, group.records, group.kind, group.launch, start_ns, sizes, group.exits, has, bound_ns
        )

    def _refined(self, clock: str, group: WarpGroup[Warps]) -> tuple[Bools, Int64s, Int64s]:
        """Which batches have finer times, and the entries and exits of all."""
        read, own = group.whole, np.zeros(len(group), np.uint8)
        for flag, names in _NEEDED.items():
            needed = sum(HAS[name] for name in names)
            own |= np.where(group.has & needed == needed, flag, 0).astype(np.uint8)
        if not (own & HAS_CLOCKS).any():
            return np.zeros(len(group), np.bool_), read.entry_ns, read.exit_ns.copy()
        sm_clocks = self._sm_clocks.get(clock)
        if sm_clocks is None:
            core = library()
            sm_clocks = self._sm_clocks[clock] = SmClocks() if core is None else NativeSmClocks(core)
        if isinstance(sm_clocks, NativeSmClocks):
            columns = [getattr(read, name) for name in WarpReadings._fields]
            return sm_clocks.refine_all(group.base_ns, group.sizes, group.exits, own, columns)
        finer: list[bool] = []
        entries: list[Int64s] = []
        exits: list[Int64s] = []
        for warps, flags in zip(group, own.tolist(), strict=True):
            readings = WarpReadings(*(getattr(warps, name) for name in WarpReadings._fields))
            found = sm_clocks.refine(warps.ts_ns, readings) if flags & HAS_CLOCKS else None
            finer.append(found is not None)
            for column, best in zip((entries, exits), found or (warps.entry_ns, warps.exit_ns), strict=True):
                column.append(best)
        return np.array(finer, np.bool_), np.concatenate(entries), np.concatenate(exits)


_NEEDED: Final = {
    HAS_CLOCKS: ("sm", "entry_clk", "exit_clk"),
    HAS_SLOT: ("slot",),
    HAS_COUNTS: ("exit_count",),
}  # fmt: skip


def _longest(group: WarpGroup[Warps], exits: Int64s) -> Int64s:
    """The longest stay of each batch, 0 without stays."""
    longest = np.zeros(len(group), np.int64)
    left = group.exits > 0
    if left.any():
        at = (np.cumsum(group.exits) - group.exits)[left]
        longest[left] = np.maximum(np.maximum.reduceat(exits, at), 0)
    return longest


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
    """`life_ns` × `clk` ÷ `life_clk`, rounded down; `clk` is `life_clk` at most."""
    # In Python integers, as the products may have more than 64 bits.
    shared: Int64s = (clk.astype(object) * life_ns // np.maximum(life_clk, 1)).astype(np.int64)
    return shared
