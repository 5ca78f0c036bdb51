"""Lays out what happens on a GPU: kernels and copies by stream, warps by hardware slot, threads by warp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tracepipe.layout.host import HostLayout
from tracepipe.layout.launches import Launches
from tracepipe.layout.options import LayoutOptions
from tracepipe.layout.rows import Outcomes, Row, complete, marked
from tracepipe.layout.tree import Tree
from tracepipe.model import Header, Record
from tracepipe.timeline import BEGIN_ONCE, COUNTER, INSTANT, Args, Op, Track

WARP_LANES = 32
FULL_MASK = (1 << WARP_LANES) - 1
# Warps laid out at a time: a batch of 10⁵ must not stand in memory as operations all at once.
WARPS_AT_ONCE = 4096
# Order under a GPU: the count of warps, streams, SMs, kernels with warps of no known slot.
_RANK_STREAM, _RANK_SM, _RANK_LOGICAL = 1, 100_000, 200_000


@dataclass(slots=True, eq=False)
class ActiveWarps:
    """A counter of running warps. Its changes wait until nothing earlier can come."""

    track: Track
    value: int = 0
    _changes: list[tuple[int, int]] = field(default_factory=list)

    def add(self, spans: list[tuple[int, int]]) -> None:
        """Count warps over [entry, exit)."""
        self._changes += [(entry_ns, 1) for entry_ns, _ in spans]
        self._changes += [(exit_ns, -1) for _, exit_ns in spans]

    def flush(self, before_ns: int | None) -> list[Op]:
        """The changes before that time, all of them without one: one operation for each time."""
        self._changes.sort()
        ops: list[Op] = []
        done = 0
        for at, (ts_ns, change) in enumerate(self._changes):
            if before_ns is not None and ts_ns >= before_ns:
                break
            self.value += change
            done = at + 1
            if done == len(self._changes) or self._changes[done][0] != ts_ns:
                ops.append((COUNTER, self.track, ts_ns, self.value, None, None))
        del self._changes[:done]
        return ops


@dataclass(slots=True, eq=False)
class Gpu:
    """One GPU's tracks, made as they are needed."""

    track: Track
    streams: dict[int, Row] = field(default_factory=dict)
    warps: dict[tuple[Any, ...], Row] = field(default_factory=dict)
    active: dict[int, ActiveWarps] = field(default_factory=dict)
    """By SM; -1 is the whole GPU."""


@dataclass(slots=True, eq=False)
class Warp:
    """One row of a warp batch: its index in the batch and on the grid, and its time, trace ns."""

    at: int
    number: int
    entry_ns: int
    exit_ns: int | None
    exits: range


def warps_in_order(batch: Record) -> Iterator[Warp]:
    """The warps of a batch by entry time."""
    base_ns, entry, exit_ns = batch["ts_ns"], batch["entry_ns"], batch["exit_ns"]
    counts = batch.get("exit_count")
    starts = list(accumulate(counts, initial=0)) if counts else range(len(entry) + 1)
    for at in sorted(range(len(entry)), key=entry.__getitem__):
        exits = range(starts[at], starts[at + 1])
        entry_ns = base_ns + entry[at]
        last_ns = entry_ns + max(exit_ns[k] for k in exits) if exits else None
        yield Warp(at, batch["warp"][at], entry_ns, last_ns, exits)


class WarpNames:
    """Names the warps of a launch by kernel, block and warp."""

    def __init__(self, batch: Record) -> None:
        self._kernel = batch["name"]
        threads = 1
        for size in batch.get("block", ()):
            threads *= size
        self._warps = -(-threads // WARP_LANES) if "block" in batch else 0
        self._grid = batch.get("grid", [0, 1, 1])

    def place(self, number: int) -> str:
        """Block and warp of a warp's number on the grid."""
        if not self._warps:
            return f"warp {number}"
        block, warp = divmod(number, self._warps)
        x, y, _ = self._grid
        if self._grid[1:] == [1, 1] or not x or not y:
            return f"block {block} warp {warp}"
        return f"block ({block % x},{block // x % y},{block // (x * y)}) warp {warp}"

    def full(self, number: int) -> str:
        """Kernel, block and warp."""
        return f"{self._kernel} {self.place(number)}"


class GpuLayout:
    """Appends its operations to the tree's. Returns from `place` the end of what it drew, trace ns."""

    def __init__(
        self, tree: Tree, host: HostLayout, launches: Launches, options: LayoutOptions, header: Header
    ) -> None:
        self._tree, self._host, self._launches, self._options = tree, host, launches, options
        self._names = {
            gpu.get("index"): str(gpu.get("name", ""))
            for gpu in header.get("gpus", [])
            if isinstance(gpu.get("index"), int)
        }
        self._gpus: dict[int, Gpu] = {}
        self._unfinished: list[tuple[Row, int, str, Args]] = []
        self._threads_inside: dict[tuple[Any, ...], int] = {}

    @property
    def _outcomes(self) -> Outcomes:
        return self._host.outcomes

    def place(self, record: Record) -> int:
        """Draw one record of a GPU layer."""
        index = record.get("gpu", 0)
        gpu = self._gpus.get(index)
        if gpu is None:
            name = f"GPU {index} {self._names.get(index, '')}".rstrip()
            gpu = self._gpus[index] = Gpu(self._tree.group(name))
        if record["type"] == "gpu_warp":
            return self._warp_batch(gpu, record)
        if record["type"] == "gpu_thread":
            return self._thread(gpu, record)
        return self._on_stream(gpu, record)

    def _on_stream(self, gpu: Gpu, record: Record) -> int:
        stream = record.get("stream", 0)
        row = gpu.streams.get(stream)
        if row is None:
            track = self._tree.child(
                gpu.track, "slices", f"stream {stream}", _RANK_STREAM + len(gpu.streams), "gpu"
            )
            row = gpu.streams[stream] = Row(track)
        shown = {key: record[key] for key in ("launch", "grid", "block") if key in record}
        flows = None
        if "launch" in record and record["phase"] in ("B", "X"):
            flows = self._launches.kernel(record["launch"], record["ts_ns"], record.get("bound_ns", 0))
        record["args"] = marked(record.get("args"), **shown)
        self._host.draw(row, record, flows)
        end_ns: int = record["ts_ns"] + record.get("dur_ns", 0)
        return end_ns

    # Warps ---------------------------------------------------------------------------------------------

    def _mode(self, batch: Record) -> str:
        known = "slot" in batch and "sm" in batch
        mode = self._options.warp_tracks
        if mode == "auto" or (mode == "slot" and not known):
            return "slot" if known else "logical"
        return "logical" if mode == "sm" and "sm" not in batch else mode

    def _warp_batch(self, gpu: Gpu, batch: Record) -> int:
        mode = self._mode(batch)
        end_ns: int = batch["ts_ns"]
        if mode == "off" or not batch["warp"]:
            return end_ns
        names = WarpNames(batch)
        flows = None
        some: list[Warp] = []
        for warp in warps_in_order(batch):
            if not some and "launch" in batch:
                flows = self._launches.warps(batch["launch"], warp.entry_ns, batch.get("bound_ns", 0))
            some.append(warp)
            if len(some) == WARPS_AT_ONCE:
                end_ns = max(end_ns, self._draw_warps(gpu, batch, mode, names, some, flows))
                some = []
        return max(end_ns, self._draw_warps(gpu, batch, mode, names, some, flows)) if some else end_ns

    def _draw_warps(
        self, gpu: Gpu, batch: Record, mode: str, names: WarpNames, warps: list[Warp], flows: Any
    ) -> int:
        if mode != "sm":
            for warp in warps:
                row = self._warp_row(gpu, batch, mode, names, warp)
                self._draw_warp(row, batch, names.full(warp.number), warp, flows)
                flows = None
        end_ns = max((warp.exit_ns or warp.entry_ns) for warp in warps)
        by_sm: dict[int, list[tuple[int, int]]] = {}
        for warp in warps:
            sm = batch["sm"][warp.at] if mode == "sm" else -1
            by_sm.setdefault(sm, []).append((warp.entry_ns, end_ns if warp.exit_ns is None else warp.exit_ns))
        for sm, spans in by_sm.items():
            self._count(gpu, sm, spans)
        return end_ns

    def _count(self, gpu: Gpu, sm: int, spans: list[tuple[int, int]]) -> None:
        active = gpu.active.get(sm)
        if active is None:
            where, rank = (f"SM {sm} active warps", _RANK_SM + sm) if sm >= 0 else ("active warps", 0)
            track = self._tree.child(gpu.track, "counter", where, rank, "gpu", "warps")
            active = gpu.active[sm] = ActiveWarps(track)
        # Batches come in the order of their first entry: nothing before this one's can come any more.
        self._tree.ops += active.flush(spans[0][0])
        active.add(spans)

    def _warp_row(self, gpu: Gpu, batch: Record, mode: str, names: WarpNames, warp: Warp) -> Row:
        if mode == "slot":
            sm, slot = batch["sm"][warp.at], batch["slot"][warp.at]
            key: tuple[Any, ...] = (sm, slot)
        else:
            key = (batch.get("launch", -1), batch["name"], warp.number)
        row = gpu.warps.get(key)
        if row is None:
            if mode == "slot":
                group = self._tree.child(gpu.track, "group", f"SM {sm}", _RANK_SM + sm)
                track = self._tree.child(group, "slices", f"slot {slot}", slot, "warp")
            else:
                group = self._kernel_group(gpu, batch)
                track = self._tree.child(group, "slices", names.place(warp.number), warp.number, "warp")
            row = gpu.warps[key] = Row(track)
        return row

    def _kernel_group(self, gpu: Gpu, record: Record) -> Track:
        launch = record.get("launch")
        name = record["name"] if launch is None else f"{record['name']} launch {launch}"
        return self._tree.child(gpu.track, "group", name, _RANK_LOGICAL + (launch or 0))

    def _draw_warp(self, row: Row, batch: Record, name: str, warp: Warp, flows: Any) -> None:
        args: Args = {}
        if "source_ns" in batch:
            entry = batch.get("source_entry_ns") or batch["entry_ns"]
            args["source_ns"] = batch["source_ns"] + entry[warp.at]
        if "exit_clk" in batch and warp.exits:
            args["cycles"] = max(batch["exit_clk"][k] for k in warp.exits)
        if len(warp.exits) > 1:
            args["exits"] = len(warp.exits)
        if "entry_mask" in batch and batch["entry_mask"][warp.at] != FULL_MASK:
            args["lanes"] = batch["entry_mask"][warp.at].bit_count()
        if warp.exit_ns is None:
            # It was still running when the record ended: drawn when the end of the trace is known.
            self._outcomes.unclosed += 1
            self._unfinished.append((row, warp.entry_ns, name, args | {"unclosed": True}))
            return
        dur_ns = warp.exit_ns - warp.entry_ns
        if row.takes_slice(warp.entry_ns, warp.exit_ns) and not row.ends:
            self._tree.ops += complete(row, warp.entry_ns, dur_ns, name, args, flows, BEGIN_ONCE)
        else:  # a slot holds one warp at a time: two there mean clocks that disagree
            self._host.complete_beside(row, warp.entry_ns, dur_ns, name, args, flows)
        if self._options.thread_exits:
            self._draw_exits(row.track, batch, warp)

    def _draw_exits(self, track: Track, batch: Record, warp: Warp) -> None:
        for k in warp.exits:
            mask = batch["exit_mask"][k] if "exit_mask" in batch else FULL_MASK
            args = {"mask": f"0x{mask:08x}", "lanes": mask.bit_count()}
            ts_ns = warp.entry_ns + batch["exit_ns"][k]
            self._tree.ops.append((INSTANT, track, ts_ns, "exit", args, None))

    # Threads -------------------------------------------------------------------------------------------

    def _thread(self, gpu: Gpu, record: Record) -> int:
        """Draw a thread's entry or exit on the track of its warp.

        A pair of B and E makes a slice for the warp, from its first thread's entry to its last thread's
        exit; a record of one end alone (I) is an instant.
        """
        ts_ns: int = record["ts_ns"]
        phase, thread = record["phase"], record.get("thread", [0, 0, 0])
        key = (record.get("launch", -1), record["name"], *self._warp_of(record))
        row = gpu.warps.get(key)
        if row is None:
            group = self._kernel_group(gpu, record)
            rank = len(gpu.warps)
            row = gpu.warps[key] = Row(self._tree.child(group, "slices", " ".join(key[2:]), rank, "warp"))
        args = marked(record.get("args"), thread=thread)
        if phase == "X":
            record["args"] = args
            self._host.draw(row, record, None)
            return ts_ns + int(record["dur_ns"])
        if phase == "I" or self._options.thread_exits:
            event = {"B": "entry", "E": "exit"}.get(phase) or args.get("event", "event")
            self._tree.ops.append((INSTANT, row.track, ts_ns, f"thread {event}", args, None))
        if phase == "I":
            return ts_ns
        inside = self._threads_inside.get(key, 0)
        name = f"{record['name']} {' '.join(key[2:])}"
        if (phase == "B" and inside == 0) or (phase == "E" and inside <= 1):
            self._host.draw(row, {"name": name, "phase": phase, "ts_ns": ts_ns}, None)
        self._threads_inside[key] = max(0, inside + (1 if phase == "B" else -1))
        return ts_ns

    @staticmethod
    def _warp_of(record: Record) -> tuple[str, str]:
        """Block and warp of a thread, in words.

        With y = z = 0 lane 0 of a warp has x divisible by 32, whatever the block's size. Elsewhere the
        size decides, which such a record does not tell: 32 neighbours in x are named by what they are.
        """
        x, y, z = record.get("thread", [0, 0, 0])
        if "block" in record:
            where = "block ({},{},{})".format(*record["block"])
        else:
            where = f"occurrence {(record.get('args') or {}).get('occurrence', 0)}"
        first = x // WARP_LANES * WARP_LANES
        if y == z == 0:
            return where, f"warp {x // WARP_LANES}"
        return where, f"threads ({first}–{first + WARP_LANES - 1},{y},{z})"

    def finish(self, end_ns: int) -> None:
        """Draw what waits for the end of the trace."""
        for row, ts_ns, name, args in self._unfinished:
            self._host.complete_on(row, ts_ns, max(0, end_ns - ts_ns), name, args)
        for gpu in self._gpus.values():
            for active in gpu.active.values():
                self._tree.ops += active.flush(None)
            for row in gpu.warps.values():
                self._host.close(row, end_ns)
            for row in gpu.streams.values():
                self._host.close(row, end_ns)
