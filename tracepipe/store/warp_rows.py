"""Writes warps, their exits and their ranges as rows."""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

import numpy as np

from tracepipe.event.columns import NONE, Int32s, Int64s
from tracepipe.event.model import Record
from tracepipe.event.warps import HAS, PlacedWarps, WarpGroup, nested
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

    def add(self, group: WarpGroup[PlacedWarps]) -> int:
        """Add batches of warps; return the end of their last warp.

        Raises OutputError, and OverflowError where numbers are too large.
        """
        warps, sizes = group.whole, group.sizes
        count = len(warps)
        base_ns = np.repeat(group.base_ns, sizes)
        if count and max(int(np.abs(base_ns).max()), int(warps.entry_ns.max())) > _LARGEST_NS:
            raise OverflowError
        _check(warps)
        entry_ns = warps.entry_ns + base_ns
        first_ns, last_ns = _first_and_last(warps, entry_ns)
        self._add_exits(warps, entry_ns)
        self._add_ranges(warps, entry_ns)
        none = np.full(count, NONE, np.int64)
        cycles = none
        if warps.exit_clk is not None:
            lacks = np.repeat(group.has & HAS["exit_clk"] == 0, sizes)
            cycles = np.where(lacks, NONE, warps.last_of_exits(warps.exit_clk).clip(0))
        values: dict[str, Any] = {
            "launch_number": np.repeat(self._launch_numbers(group), sizes),
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
        least_ns = int(group.base_ns[0])
        return int(max(entry_ns.max(initial=least_ns), last_ns.max(initial=least_ns)))

    def _put(self, table: str, values: dict[str, Any]) -> None:
        waiting = self._waiting.setdefault(table, [])
        waiting.append(values)
        if sum(len(next(iter(one.values()))) for one in waiting) >= _ROWS_AT_ONCE or len(waiting) > 1_000:
            self._flush(table)

    def _flush(self, table: str) -> None:
        some = self._waiting.pop(table)
        self._writer.put(table, {name: np.concatenate([one[name] for one in some]) for name in some[0]})

    def _launch_numbers(self, group: WarpGroup[PlacedWarps]) -> Int32s:
        """By batch: the number of its launch."""
        of_record: dict[int, tuple[int, int, int]] = {}
        # A time that was recorded on the trace's clock has no error from an alignment.
        is_aligned = group.whole.clock != self._trace_clock
        numbers = []
        each = group.kind.tolist(), group.launches(), group.bound_ns.tolist()
        for kind, launch, bound_ns in zip(*each, strict=True):
            if kind not in of_record:
                of_record[kind] = self._of_record(group.records[kind])
            kernel, *own = of_record[kind]
            bound_ns = bound_ns if is_aligned else NONE
            packed = _LAUNCH.pack(kernel, launch or 0, launch is not None, *own, bound_ns)
            numbers.append(self._launches.number(packed))
        return np.array(numbers, np.int32)

    def _of_record(self, launched: Record) -> tuple[int, int, int]:
        """What a launch has of its record: the number of its kernel, its stream, and the warps of a block."""
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
        per_block = _fitting(-(-block[0] * block[1] * block[2] // WARP_LANES)) if block else None
        stream, per_block = (
            NONE if one is None else one for one in (_fitting(launched.get("stream")), per_block)
        )
        return self._kernels.setdefault(kernel, len(self._kernels)), stream, per_block

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

    def _add_ranges(self, warps: PlacedWarps, entry_ns: Int64s) -> None:
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
                "start_ns": entry_ns[of] + warps.range_ns,
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
