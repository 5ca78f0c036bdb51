"""Writes warps, their exits and their ranges as rows."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

import numpy as np

from tracepipe.event.columns import NONE, Int64s
from tracepipe.event.warps import PlacedWarps, joined_warps, nested
from tracepipe.kernel_names import short_kernel_name
from tracepipe.store.numbered import Numbered
from tracepipe.store.tables import Writer

WARP_LANES: Final = 32
FULL_MASK: Final = (1 << WARP_LANES) - 1
_LARGEST_NS: Final = 1 << 61
_INT64_MAX: Final = (1 << 63) - 1
# The columns that a batch may lack, with the largest value of each.
_OPTIONAL: Final = {"sm": (1 << 31) - 1, "slot": (1 << 31) - 1, "entry_mask": (1 << 32) - 1}
# A launch: its kernel, its id and whether it has one, then `_OF_LAUNCH`.
_LAUNCH: Final = Struct("<iQ?3q")
_OF_LAUNCH: Final = ("stream", "warps_per_block", "bound_ns")
_LAUNCHES: Final = np.dtype(
    [("kernel", "<i4"), ("launch", "<i8"), ("has_launch", "?"), *((name, "<i8") for name in _OF_LAUNCH)]
)
# What some of several batches lack. A missing number is -1, and a warp without a number of exits has one.
_MISSING: Final = {
    "sm": NONE, "slot": NONE, "entry_mask": NONE, "exit_count": 1, "exit_clk": NONE, "exit_mask": NONE,
}  # fmt: skip
# The rows that are written at a time: a launch may have a single warp.
_ROWS_AT_ONCE: Final = 1 << 15


class WarpRows:
    """Writes batches of warps. Call `add` with all of them, then `finish`."""

    def __init__(self, trace_clock: str, writer: Writer) -> None:
        self._trace_clock, self._writer = trace_clock, writer
        self._kernels: dict[tuple[Any, ...], int] = {}
        self._launches, self._names = Numbered(), Numbered()
        self._waiting: dict[str, list[dict[str, Any]]] = {}
        self._count = 0
        self.first_ns: int | None = None
        """The first entry of any warp."""

    @property
    def range_names(self) -> list[str]:
        """The names of ranges by their numbers."""
        return [self._names[at].decode("utf-8", "replace") for at in range(len(self._names))]

    def add(self, batches: Sequence[PlacedWarps]) -> int:
        """Add several batches without ranges, or a single one; return the end of their last warp.

        Raises OutputError, and OverflowError where numbers are too large.
        """
        times_ns = [max(abs(one.ts_ns), int(one.entry_ns.max())) for one in batches if len(one)]
        if max(times_ns, default=0) > _LARGEST_NS:
            raise OverflowError
        warps = joined_warps(batches, _MISSING)
        _check(warps)
        entry_ns = warps.entry_ns + warps.ts_ns
        first_ns, last_ns = _first_and_last(warps, entry_ns)
        self._add_exits(warps, entry_ns)
        self._add_ranges(warps)
        count = len(warps)
        none = np.full(count, NONE, np.int64)
        launches = [self._launch(one) for one in batches]
        cycles = none
        if warps.exit_clk is not None:
            lacks = np.repeat([one.exit_clk is None for one in batches], [len(one.warp) for one in batches])
            cycles = np.where(lacks, NONE, warps.last_of_exits(warps.exit_clk).clip(0))
        values: dict[str, Any] = {
            "launch_number": np.repeat(np.array(launches, np.int32), [len(one.warp) for one in batches]),
            "warp": warps.warp,
            "entry_ns": entry_ns,
            "first_exit_ns": first_ns,
            "last_exit_ns": last_ns,
            "exits": np.ones(count, np.int32) if warps.exit_count is None else warps.exit_count,
            "cycles": cycles,
            **{name: none if getattr(warps, name) is None else getattr(warps, name) for name in _OPTIONAL},
        }
        self._put("warps", values)
        self._count += count
        if count:
            began_ns = int(entry_ns.min())
            self.first_ns = began_ns if self.first_ns is None else min(began_ns, self.first_ns)
        return int(max(entry_ns.max(initial=warps.ts_ns), last_ns.max(initial=warps.ts_ns)))

    def _put(self, table: str, values: dict[str, Any]) -> None:
        waiting = self._waiting.setdefault(table, [])
        waiting.append(values)
        if sum(len(next(iter(one.values()))) for one in waiting) >= _ROWS_AT_ONCE or len(waiting) > 1_000:
            self._flush(table)

    def _flush(self, table: str) -> None:
        some = self._waiting.pop(table)
        self._writer.put(table, {name: np.concatenate([one[name] for one in some]) for name in some[0]})

    def _launch(self, warps: PlacedWarps) -> int:
        """The number of the launch of a batch."""
        launched = warps.launched
        sizes = [launched.get(name) for name in ("grid", "block")]
        name, block = launched.get("name"), sizes[1]
        kernel = (
            None if name is None else short_kernel_name(name),
            *(_fitting(launched.get(key)) for key in ("gpu", "pid")),
            *(
                NONE if size is None else min(side, _INT64_MAX)
                for size in sizes
                for side in size or (0, 0, 0)
            ),
        )
        # A time that was recorded on the trace's clock has no error from an alignment.
        bound_ns = None if warps.clock == self._trace_clock else warps.bound_ns
        per_block = _fitting(-(-block[0] * block[1] * block[2] // WARP_LANES)) if block else None
        launch = launched.get("launch")
        own = (_fitting(launched.get("stream")), per_block, bound_ns)
        packed = _LAUNCH.pack(
            self._kernels.setdefault(kernel, len(self._kernels)),
            launch or 0,
            launch is not None,
            *(NONE if value is None else value for value in own),
        )
        return self._launches.number(packed)

    def _add_exits(self, warps: PlacedWarps, entry_ns: Int64s) -> None:
        """Add the exits of warps with several exits, or with one exit of not all lanes."""
        exits = np.ones(len(warps), np.int64) if warps.exit_count is None else warps.exit_count
        masks, several = warps.exit_mask, exits > 1
        if masks is not None:
            one = warps.last_of_exits(masks)
            several = several | ((exits == 1) & (one != FULL_MASK) & (one != NONE))
        if several.any():
            of_exit = np.repeat(np.arange(len(exits)), exits)
            of_several = several[of_exit]
            ns = (entry_ns[of_exit] + warps.exit_ns)[of_several]
            mask = np.full(len(ns), NONE, np.int64) if masks is None else masks[of_several]
            self._put(
                "warp_exits", {"warp_row": of_exit[of_several] + self._count, "exit_ns": ns, "mask": mask}
            )

    def _add_ranges(self, warps: PlacedWarps) -> None:
        if warps.range_ns is None or warps.range_name is None or warps.range_dur_ns is None:
            return
        of = warps.of_ranges()
        numbers = [self._names.number(name.encode("utf-8", "surrogatepass")) for name in warps.ranges]
        self_ns, inside = warps.range_dur_ns.copy(), nested(warps).inside
        inner = inside >= 0
        np.subtract.at(self_ns, inside[inner], warps.range_dur_ns[inner])
        open_ = warps.range_open
        self._put(
            "warp_ranges",
            {
                "warp_row": of + self._count,
                "name_text": np.array(numbers, np.int32)[warps.range_name],
                "start_ns": warps.ts_ns + warps.entry_ns[of] + warps.range_ns,
                "dur_ns": warps.range_dur_ns,
                "self_ns": self_ns,
                "cycles": warps.range_dur_clk,
                "open": np.zeros(len(of), np.bool_) if open_ is None else open_ == 1,
            },
        )

    def finish(self) -> None:
        """Write what is left. Raises OutputError."""
        for table in list(self._waiting):
            self._flush(table)
        self._writer.put_rows("warp_kernels", list(self._kernels))
        launches = np.frombuffer(self._launches.data(), _LAUNCHES)
        self._writer.put("warp_launches", {name: launches[name] for name in _LAUNCHES.names or ()})


def _fitting(value: int | None) -> int | None:
    """A number that fits a column, else None."""
    return value if value is not None and value <= _INT64_MAX else None


def _check(warps: PlacedWarps) -> None:
    """Raise OverflowError where numbers do not fit their columns."""
    if int(warps.exit_ns.max(initial=0)) > _LARGEST_NS:
        raise OverflowError
    for name, most in _OPTIONAL.items():
        values = getattr(warps, name)
        if values is not None and int(values.max(initial=0)) > most:
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
