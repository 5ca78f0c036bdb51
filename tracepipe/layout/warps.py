"""Lays out warp batches: a slice for each warp on its hardware slot, and how many run at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tracepipe.event.model import SLOT_LIMIT, Record
from tracepipe.layout.host import HostLayout
from tracepipe.layout.launches import Launches
from tracepipe.layout.options import LayoutOptions
from tracepipe.layout.rows import Row
from tracepipe.layout.timeline import BEGIN_ONCE, COUNTER, END, INSTANT, Args, Flows, Op, Track
from tracepipe.layout.tree import Tree

WARP_LANES = 32
FULL_MASK = (1 << WARP_LANES) - 1
# Warps laid out at a time: a batch of 10⁵ must not stand in memory as operations all at once.
WARPS_AT_ONCE = 4096
# So many warps of one slot are remembered for those of batches that overlap theirs.
SPANS_KEPT = 1024
# Order under a GPU: the count of warps, streams, SMs, kernels whose warps' slots are not known.
RANK_STREAM, RANK_SM, RANK_LOGICAL = 1, 100_000, 200_000
# At the top GPUs stand behind the processes, which come in the order in which they are met.
RANK_GPU = 1 << 22
# Kernels of different sizes whose warps' names are kept.
KERNELS_KEPT = 4
# A key holds SM and slot in one number.
_SLOTS_MAX = SLOT_LIMIT + 1
# Which warp of a batch an arrow goes to, and the arrow.
Arrow = tuple[int, "Flows | None"]


@dataclass(slots=True, eq=False)
class ActiveWarps:
    """A counter of running warps. Its changes wait until nothing earlier can come."""

    track: Track
    value: int = 0
    _entries: Counter[int] = field(default_factory=Counter)
    _exits: Counter[int] = field(default_factory=Counter)

    def add(self, entries_ns: list[int], exits_ns: list[int]) -> None:
        """Count warps that enter and leave at these times."""
        self._entries.update(entries_ns)
        self._exits.update(exits_ns)

    def flush(self, before_ns: int | None) -> list[Op]:
        """The changes before that time, all of them without one: one operation for each time."""
        times = self._entries.keys() | self._exits.keys()
        ops: list[Op] = []
        for ts_ns in sorted(times if before_ns is None else (ns for ns in times if ns < before_ns)):
            change = self._entries.pop(ts_ns, 0) - self._exits.pop(ts_ns, 0)
            if change:
                self.value += change
                ops.append((COUNTER, self.track, ts_ns, self.value, None, None))
        return ops


@dataclass(slots=True, eq=False)
class WarpRow(Row):
    """The track of a hardware slot or a warp, with the last `spans` drawn on it, in order of time.

    Kernels in flight at one time take turns on a slot, and their batches come one after the other: a warp may
    belong before one that is drawn already.
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    forgotten_ns: int = -1

    def takes_warp(self, base_ns: int, begin_ns: int, end_ns: int) -> bool:
        """Whether the track is free over that time; if so, it is taken now. No batch will begin before
        `base_ns` any more.
        """
        spans = self.spans
        if not spans:
            spans.append((begin_ns, end_ns))
            return True
        last_ns = spans[-1][1]
        if begin_ns >= last_ns:
            if last_ns <= base_ns or len(spans) >= SPANS_KEPT:
                self.forgotten_ns = last_ns
                spans.clear()
            spans.append((begin_ns, end_ns))
            return True
        at = bisect_left(spans, (begin_ns, end_ns))
        free_ns = spans[at - 1][1] if at else self.forgotten_ns
        # Not where it ends as the next begins: what is drawn first comes first in a stable sort.
        if begin_ns < free_ns or at == len(spans) or end_ns >= spans[at][0]:
            return False
        spans.insert(at, (begin_ns, end_ns))
        return True


@dataclass(slots=True, eq=False)
class Gpu:
    """One GPU's tracks, made as they are needed."""

    track: Track
    streams: dict[int, Row] = field(default_factory=dict)
    warps: dict[Any, WarpRow] = field(default_factory=dict)
    threads: dict[Any, Row] = field(default_factory=dict)
    kernels: dict[tuple[str, int | None], int] = field(default_factory=dict)
    """The ranks of groups for warps of no known slot, by kernel and launch."""
    active: dict[int, ActiveWarps] = field(default_factory=dict)
    """By SM; -1 is the whole GPU."""


class WarpNames:
    """Names the warps of launches of one kernel and size by kernel, block and warp."""

    KEPT = 1 << 14

    def __init__(self, kernel: str, grid: list[int], block: list[int]) -> None:
        self._kernel, self._grid = kernel, grid
        threads = 1
        for size in block:
            threads *= size
        self._warps = -(-threads // WARP_LANES) if block else 0
        self._flat = grid[1:] == [1, 1] or 0 in grid
        self._kept: dict[int, str] = {}

    def place(self, number: int) -> str:
        """Block and warp of a warp's number on the grid."""
        if not self._warps:
            return f"warp {number}"
        block, warp = divmod(number, self._warps)
        if self._flat:
            return f"block {block} warp {warp}"
        x, y, _ = self._grid
        return f"block ({block % x},{block // x % y},{block // (x * y)}) warp {warp}"

    def full(self, numbers: list[int]) -> list[str]:
        """Kernel, block and warp of each number; kept, as the next launch has the same ones."""
        kept, kernel = self._kept, self._kernel
        names = [kept.get(number) or f"{kernel} {self.place(number)}" for number in numbers]
        if len(kept) < self.KEPT:
            kept.update(zip(numbers, names, strict=True))
        return names


class WarpBatchView:
    """A batch on the trace clock: `stay_ns` is the last exit of each warp after its entry, None without one;
    `exits` where each warp's exits start in the exit columns.
    """

    __slots__ = (
        "_base_ns",
        "_cycles",
        "_masks",
        "_plain",
        "_raw",
        "exits",
        "names",
        "record",
        "stay_ns",
        "ts_ns",
    )

    def __init__(self, ts_ns: int, record: Record, names: WarpNames) -> None:
        self.ts_ns, self.record, self.names = ts_ns, record, names
        self._base_ns: int | None = record.get("source_ns")
        self._raw: list[int] = record.get("source_entry_ns") or record["entry_ns"]
        self._cycles: list[int] | None = record.get("exit_clk")
        self._masks: list[int] | None = record.get("entry_mask")
        exit_ns, counts = record["exit_ns"], record.get("exit_count")
        self._plain = counts is None and self._cycles is None and self._masks is None
        self.stay_ns: list[int | None] = exit_ns
        self.exits: list[int] | None = None
        if counts is not None:
            self.exits = list(accumulate(counts, initial=0))
            self.stay_ns = [
                max(exit_ns[start : start + count]) if count else None
                for start, count in zip(self.exits, counts, strict=False)
            ]

    def exits_of(self, at: int) -> range:
        """Where the exits of a warp stand in the exit columns."""
        return range(at, at + 1) if self.exits is None else range(self.exits[at], self.exits[at + 1])

    def args(self, some: list[int]) -> list[Args]:
        """What is known of each of some warps."""
        base_ns, raw = self._base_ns, self._raw
        all_args: list[Args]
        all_args = (
            [{} for _ in some] if base_ns is None else [{"source_ns": base_ns + raw[at]} for at in some]
        )
        if not self._plain:
            for at, args in zip(some, all_args, strict=True):
                self._add_exits(at, args)
        return all_args

    def _add_exits(self, at: int, args: Args) -> None:
        if self.exits is not None and len(exits := self.exits_of(at)) != 1:
            args["exits"] = len(exits)
            if self._cycles is not None and exits:
                args["cycles"] = max(self._cycles[exits.start : exits.stop])
        elif self._cycles is not None:
            args["cycles"] = self._cycles[at if self.exits is None else self.exits[at]]
        if self._masks is not None and self._masks[at] != FULL_MASK:
            args["lanes"] = self._masks[at].bit_count()


class _Some:
    """Some warps of a batch, in the order of their entry: when they begin and end, None without an exit."""

    __slots__ = ("begins_ns", "ends_ns", "warps")

    def __init__(self, view: WarpBatchView, warps: list[int]) -> None:
        base_ns, entry, stays = view.ts_ns, view.record["entry_ns"], view.stay_ns
        self.warps = warps
        self.begins_ns = [base_ns + entry[at] for at in warps]
        self.ends_ns = [
            None if (stay_ns := stays[at]) is None else begin_ns + stay_ns
            for begin_ns, at in zip(self.begins_ns, warps, strict=True)
        ]


class WarpLayout:
    """Appends its operations to the tree's."""

    def __init__(self, tree: Tree, host: HostLayout, launches: Launches, options: LayoutOptions) -> None:
        self._tree, self._host, self._launches, self._options = tree, host, launches, options
        self._unfinished: list[tuple[WarpRow, int, str, Args, Flows | None]] = []
        self._kernels: dict[tuple[Any, ...], WarpNames] = {}

    def _mode(self, batch: Record) -> str:
        known = "slot" in batch and "sm" in batch
        mode = self._options.warp_tracks
        if mode == "auto" or (mode == "slot" and not known):
            return "slot" if known else "logical"
        return "logical" if mode == "sm" and "sm" not in batch else mode

    def _names(self, record: Record) -> WarpNames:
        grid, block = record.get("grid", [0, 1, 1]), record.get("block", [])
        key = (record["name"], *grid, *block)
        names = self._kernels.get(key)
        if names is None:
            if len(self._kernels) >= KERNELS_KEPT:
                self._kernels.clear()
            names = self._kernels[key] = WarpNames(record["name"], grid, block)
        return names

    def place(self, gpu: Gpu, ts_ns: int, record: Record) -> int:
        """Draw one batch; returns the end of its last warp, trace ns."""
        mode = self._mode(record)
        entry = record["entry_ns"]
        if mode == "off" or not entry:
            return ts_ns
        order = sorted(range(len(entry)), key=entry.__getitem__)
        view = WarpBatchView(ts_ns, record, self._names(record))
        arrow = self._arrow(view, mode, order)
        for active in gpu.active.values():
            # Batches come in the order of their bases and may overlap: nothing earlier can come any more.
            self._tree.ops += active.flush(ts_ns)
        end_ns = ts_ns
        for start in range(0, len(order), WARPS_AT_ONCE):
            some = _Some(view, order[start : start + WARPS_AT_ONCE])
            if mode != "sm":
                self._draw(gpu, view, mode, some, arrow)
            end_ns = max(end_ns, self._count(gpu, view, mode, some))
        return end_ns

    def _arrow(self, view: WarpBatchView, mode: str, order: list[int]) -> Arrow:
        """The arrow of a batch's launch, to the first of its warps that left, or to the first one."""
        record = view.record
        if "launch" not in record:
            return -1, None
        launch, bound_ns = record["launch"], record.get("bound_ns", 0)
        first_ns = view.ts_ns + record["entry_ns"][order[0]]
        if mode == "sm":
            self._launches.start(launch, first_ns, bound_ns)
            return -1, None
        at = next((at for at in order if view.stay_ns[at] is not None), None)
        may_start = at is not None and record["entry_ns"][at] == 0
        flows = self._launches.warps(launch, first_ns, bound_ns, may_start=may_start)
        return order[0] if at is None else at, flows

    def _draw(self, gpu: Gpu, view: WarpBatchView, mode: str, some: _Some, arrow: Arrow) -> None:
        """Draw some warps of a batch, in the order of their entry."""
        arrow_at, arrow_flows = arrow
        record, base_ns, rows, draw = view.record, view.ts_ns, gpu.warps, self._tree.ops.append
        number, exits_too = record["warp"], self._options.thread_exits
        names, all_args = view.names.full([number[at] for at in some.warps]), view.args(some.warps)
        keys: list[Any]
        if mode == "slot":
            sms, slots = record["sm"], record["slot"]
            keys = [sms[at] * _SLOTS_MAX + slots[at] for at in some.warps]
        else:
            keys = [(record.get("launch"), record["name"], number[at]) for at in some.warps]
        for at, key, begin_ns, end_ns, name, args in zip(
            some.warps, keys, some.begins_ns, some.ends_ns, names, all_args, strict=True
        ):
            row = rows.get(key) or self._new_row(gpu, view, mode, at, key)
            flows = arrow_flows if at == arrow_at else None
            if end_ns is None:
                # It was still running when the record ended: drawn when the end of the trace is known.
                self._host.outcomes.unclosed += 1
                self._unfinished.append((row, begin_ns, name, args | {"unclosed": True}, flows))
            elif not row.takes_warp(base_ns, begin_ns, end_ns):
                # A slot holds one warp at a time: two there mean clocks that disagree.
                self._host.complete_beside(row, begin_ns, end_ns - begin_ns, name, args, flows)
            else:
                draw((BEGIN_ONCE, row.track, begin_ns, name, args, flows))
                draw((END, row.track, end_ns, name, None, None))
            if exits_too:
                self._draw_exits(row.track, view, at)

    def _draw_exits(self, track: Track, view: WarpBatchView, at: int) -> None:
        record = view.record
        for k in view.exits_of(at):
            mask = record["exit_mask"][k] if "exit_mask" in record else FULL_MASK
            args = {"mask": f"0x{mask:08x}", "lanes": mask.bit_count()}
            ts_ns = view.ts_ns + record["entry_ns"][at] + record["exit_ns"][k]
            self._tree.ops.append((INSTANT, track, ts_ns, "exit", args, None))

    def _new_row(self, gpu: Gpu, view: WarpBatchView, mode: str, at: int, key: Any) -> WarpRow:
        record, number = view.record, view.record["warp"][at]
        if mode == "slot":
            sm, slot = record["sm"][at], record["slot"][at]
            group = self._tree.child(gpu.track, "group", f"SM {sm}", RANK_SM + sm)
            track = self._tree.child(group, "slices", f"slot {slot}", slot, "warp")
        else:
            group = kernel_group(self._tree, gpu, record)
            track = self._tree.child(group, "slices", view.names.place(number), number, "warp")
        row = gpu.warps[key] = WarpRow(track)
        return row

    def _count(self, gpu: Gpu, view: WarpBatchView, mode: str, some: _Some) -> int:
        """Count some warps of a batch; returns their last exit."""
        counted: dict[int, tuple[list[int], list[int]]] = {}
        if mode == "sm":
            sms = view.record["sm"]
            for at, begin_ns, end_ns in zip(some.warps, some.begins_ns, some.ends_ns, strict=True):
                entries_ns, exits_ns = counted.setdefault(sms[at], ([], []))
                entries_ns.append(begin_ns)
                exits_ns += [] if end_ns is None else [end_ns]
        else:
            counted[-1] = some.begins_ns, [end_ns for end_ns in some.ends_ns if end_ns is not None]
        last_ns = view.ts_ns
        for sm, (entries_ns, exits_ns) in counted.items():
            active = gpu.active.get(sm)
            if active is None:
                where, rank = (f"SM {sm} active warps", RANK_SM + sm) if sm >= 0 else ("active warps", 0)
                track = self._tree.child(gpu.track, "counter", where, rank, "gpu", "warps")
                active = gpu.active[sm] = ActiveWarps(track)
            active.add(entries_ns, exits_ns)
            last_ns = max(last_ns, entries_ns[-1], max(exits_ns, default=0))
        return last_ns

    def finish(self, gpus: list[Gpu], end_ns: int) -> None:
        """Draw what waits for the end of the trace."""
        for row, ts_ns, name, args, flows in self._unfinished:
            dur_ns = max(0, end_ns - ts_ns)
            if row.takes_warp(ts_ns, ts_ns, ts_ns + dur_ns):
                self._tree.ops.append((BEGIN_ONCE, row.track, ts_ns, name, args, flows))
                self._tree.ops.append((END, row.track, ts_ns + dur_ns, name, None, None))
            else:
                self._host.complete_beside(row, ts_ns, dur_ns, name, args, flows)
        for gpu in gpus:
            for active in gpu.active.values():
                self._tree.ops += active.flush(None)


def kernel_group(tree: Tree, gpu: Gpu, record: Record) -> Track:
    """The group of a launch, for warps of no known slot. They stand in the order in which they are met, as a
    launch id may have 64 bits.
    """
    launch = record.get("launch")
    name = record["name"] if launch is None else f"{record['name']} launch {launch}"
    rank = gpu.kernels.setdefault((record["name"], launch), RANK_LOGICAL + len(gpu.kernels))
    return tree.child(gpu.track, "group", name, rank)
