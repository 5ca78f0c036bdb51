"""Lays out warp batches: a slice for each warp on its hardware slot, and how many run at a time. Events of
single threads are on the tracks of their warps.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np

from tracepipe.event.columns import (
    NONE,
    AnyArray,
    Bools,
    Bytes,
    Int32s,
    Int64s,
    Ints,
    Texts,
    Three,
    TraceColumns,
    distinct,
    grown,
    signed,
)
from tracepipe.event.counters import ACTIVE_WARPS, RANK_OF_SM, SM_ACTIVE_WARPS, SUMMARY
from tracepipe.event.model import Record
from tracepipe.event.nesting import COUNTED, DRAWN, LAUNCHES_MAX, NO_LAUNCH, NO_ROW, STARTS, WarpStarts
from tracepipe.event.ops import COUNTER, INSTANT, op_of
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, packed
from tracepipe.event.warps import CROSSING, HAS, Others, PlacedWarps, WarpGroup, nested
from tracepipe.layout import LayoutOptions
from tracepipe.layout.rows import RANK_LOGICAL, Rows
from tracepipe.layout.summaries import Summaries
from tracepipe.layout.timeline import (
    FULL_MASK,
    ONLY_NAME,
    WARP_BEGIN,
    WARP_COUNT,
    WARP_END,
    WARP_EXIT,
    WARP_LANES,
    Kernel,
    Slices,
    Track,
    WarpChanges,
    joined_slices,
    kernel_of,
)
from tracepipe.native import checked, library, owned

CHANGES: Final = {"ts_ns": np.int64, "kind": np.uint8, "slice": np.int32, "delta": np.int8, "mask": np.int64}
"""The columns of changes. `delta` is by how much the count of running warps changes."""


@dataclass(slots=True, eq=False)
class WaitingChanges:
    """Changes that wait, as columns of `CHANGES`. Their `slice` is a place in the joined `slices`."""

    parts: list[list[AnyArray]] = field(default_factory=list)
    slices: list[Slices] = field(default_factory=list)
    slice_count: int = 0

    def add(self, slices: Slices, *columns: AnyArray) -> None:
        """Add changes, whose `slice` is a place in the slices that are added with them."""
        ts_ns, kind, of, *more = columns
        self.parts.append([ts_ns, kind, of + self.slice_count, *more])
        self.slices.append(slices)
        self.slice_count += len(slices)

    def columns(self) -> list[Any]:
        """The columns of all changes, of which there are some."""
        joined = map(np.concatenate, zip(*self.parts, strict=True))
        return [np.ascontiguousarray(one, kind) for one, kind in zip(joined, CHANGES.values(), strict=True)]


# This many warps of a slot are remembered, for batches that overlap theirs.
STAYS_MAX: Final = 1024
ON_TRACK, ON_OVERLAP, NO_END = range(3)
"""What is done with a warp: its slice is on its track or on an overlap track, or it has no end yet."""
ALL: Final = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class _Row:
    """The last stays on a slot, in the order of time."""

    stays: list[tuple[int, int]] = field(default_factory=list)
    forgotten_ns: int = -(1 << 63)

    def occupy(self, begin_ns: int, end_ns: int) -> bool:
        """Take the slot for a time that begins before the last stay ends. Return whether it was free."""
        stays = self.stays
        at = bisect_left(stays, (begin_ns, end_ns))
        free_ns = stays[at - 1][1] if at else self.forgotten_ns
        # It may not end when the next begins: a stable sort would put its end after that begin.
        if begin_ns < free_ns or at == len(stays) or end_ns >= stays[at][0]:
            return False
        stays.insert(at, (begin_ns, end_ns))
        return True


class Slots:
    """The rows of one GPU. Kernels that run at the same time take turns on a slot, but their batches come one
    after the other: a warp may belong before one that was placed already.
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def decide(
        self, rows: int, sizes: Int64s, bases_ns: Int64s, begin_ns: Int64s, stay_ns: Int64s, row: Int32s
    ) -> Bytes:
        """Decide what is done with each warp of some batches, in the order of entries, of the shape
        `(warps,)`. `rows` is how many rows there are. A stay below 0 has no end. `sizes` are how many warps
        each batch has. No later batch begins before the base of an earlier one.
        """
        while len(self._rows) < rows:
            self._rows.append(_Row())
        fates = bytearray()
        columns = (begin_ns, stay_ns, row, np.repeat(bases_ns, sizes))
        for begin, stay, at, base_ns in zip(*(column.tolist() for column in columns), strict=True):
            slot = self._rows[at]
            stays = slot.stays
            if stay < 0:
                fates.append(NO_END)
            elif not stays or begin >= (last_ns := stays[-1][1]):
                if stays and (last_ns <= base_ns or len(stays) >= STAYS_MAX):
                    slot.forgotten_ns = last_ns
                    stays.clear()
                stays.append((begin, begin + stay))
                fates.append(ON_TRACK)
            else:
                fates.append(ON_TRACK if slot.occupy(begin, begin + stay) else ON_OVERLAP)
        return np.frombuffer(fates, np.uint8)

    @staticmethod
    def running(ts_ns: Int64s, delta: Ints, before_ns: int, running: int) -> tuple[Int64s, Int64s, int]:
        """Sort the changes before a time and count the warps that run. Return the places in order, the
        counts, and how many run at the end. `running` is how many run at the start. Each time has its count
        at its last change; it is -1 at the others, and where the count stays the same.
        """
        order = np.argsort(ts_ns, kind="stable")
        times = ts_ns[order]
        count = int(np.searchsorted(times, before_ns))
        value = np.full(count, -1, np.int64)
        if count:
            last = np.flatnonzero(np.append(times[: count - 1] != times[1:count], True))
            after = running + np.cumsum(delta[order[:count]], dtype=np.int64)[last]
            changed = np.diff(after, prepend=running) != 0
            value[last[changed]] = after[changed]
            running = int(after[-1])
        return order, value, running


class NativeSlots:
    """Warps on the slots of one GPU by `warps.c`, with the methods and results of `Slots`."""

    def __init__(self, core: ctypes.CDLL) -> None:
        self._core = core
        self._warps = owned(self, core.tp_warps_new(), core.tp_warps_free)

    def decide(
        self, rows: int, sizes: Int64s, bases_ns: Int64s, begin_ns: Int64s, stay_ns: Int64s, row: Int32s
    ) -> Bytes:
        fate = np.empty(len(begin_ns), np.uint8)
        columns = (column.ctypes.data for column in (sizes, bases_ns, begin_ns, stay_ns, row, fate))
        checked(self._core.tp_warps_take(self._warps, rows, len(sizes), *columns))
        return fate

    def running(self, ts_ns: Int64s, delta: Ints, before_ns: int, running: int) -> tuple[Int64s, Int64s, int]:
        order, value = np.empty(len(ts_ns), np.int64), np.empty(len(ts_ns), np.int64)
        now = ctypes.c_int64(running)
        columns = (column.ctypes.data for column in (order, value))
        count = self._core.tp_warps_running(
            len(ts_ns), ts_ns.ctypes.data, delta.ctypes.data, before_ns, *columns, ctypes.byref(now)
        )
        return order, value[: checked(count)], now.value


def new_slots() -> Slots | NativeSlots:
    """The rows of one GPU."""
    core = library()
    return Slots() if core is None else NativeSlots(core)


def entry_order(entry_ns: Int64s) -> Int64s:
    """The places of entries in the order of time."""
    core = library()
    if core is None:
        return np.argsort(entry_ns, kind="stable")
    order = np.empty(len(entry_ns), np.int64)
    checked(core.tp_order(entry_ns.ctypes.data, len(entry_ns), order.ctypes.data))
    return order


class WarpRun:
    """Batches of one GPU that are laid out as one, `group`. Their places among the current events are
    `places`. `warps` are all warps, with entries from the time of the first batch. By batch, `first` is where
    its warps begin. `order` has the places of the warps batch after batch, each in the order of its entries.
    `stay_ns` are the times from entry to last exit, in the order of `warps`; NONE without an exit.
    """

    def __init__(self, gpu: int, mode: str, places: Int64s, group: WarpGroup[PlacedWarps]) -> None:
        self.gpu, self.mode, self.group = gpu, mode, group
        self.sizes, self.bases_ns, self.first = group.sizes, group.base_ns, group.first
        entry_ns = group.whole.entry_ns + np.repeat(self.bases_ns - self.bases_ns[0], self.sizes)
        self.warps = replace(group.whole, ts_ns=int(self.bases_ns[0]), entry_ns=entry_ns)
        self.order: Int64s = np.arange(len(entry_ns))
        if len(group) == 1:
            self.order = entry_order(entry_ns)
        elif len(group) != len(entry_ns):
            self.order = np.lexsort((entry_ns, np.repeat(np.arange(len(group)), self.sizes)))
        self.stay_ns = self.warps.last_of_exits(self.warps.exit_ns)
        left = np.append(np.flatnonzero(self.stay_ns[self.order] >= 0), len(self.order))
        at = left[np.searchsorted(left, self.first)]
        has_left = at < self.first + self.sizes
        at = np.where(has_left, at, self.first)
        entered_ns = self.warps.ts_ns + entry_ns[self.order[self.first]]
        now = has_left & (self.warps.ts_ns + entry_ns[self.order[at]] == self.bases_ns)
        done = np.where(now, STARTS, DRAWN) if self.mode != "sm" else np.full(len(at), COUNTED)
        launches = group.launches()
        if None in launches:
            done[[at for at, launch in enumerate(launches) if launch is None]] = NO_LAUNCH
        self.starts_at = at
        self.starts = WarpStarts(
            places,
            np.array([signed(launch or 0) for launch in launches], np.int64),
            entered_ns,
            group.bound_ns,
            done.astype(np.uint8),
            np.zeros(len(at), np.int64),
        )

    def with_exits(self, drawn: Bools, begin_ns: Int64s, columns: list[AnyArray]) -> list[AnyArray]:
        """The columns of changes with the exits of each drawn warp after its end."""
        warps, order = self.warps, self.order
        counts = warps.exit_count
        count = np.ones(len(order), np.int64) if counts is None else counts[order]
        count = np.where(drawn, count, 0)
        of = np.repeat(np.arange(len(order)), count)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        at = warps.first_exits()[order][of] + nth
        mask = np.full(len(of), NONE, np.int64) if warps.exit_mask is None else warps.exit_mask[at]
        more = (
            begin_ns[of] + warps.exit_ns[at],
            np.full(len(of), WARP_EXIT, np.uint8),
            of.astype(np.int32),
            np.zeros(len(of), np.int8),
            np.where(mask == NONE, FULL_MASK, mask),
        )
        whole = [np.concatenate(pair) for pair in zip(columns, more, strict=True)]
        by_warp = np.argsort(whole[2], kind="stable")
        return [column[by_warp] for column in whole]

    def end_ns(self) -> int:
        """The end of the last warp."""
        entry_ns, left = self.warps.entry_ns, self.stay_ns >= 0
        last_ns = int(entry_ns.max())
        if left.any():
            last_ns = max(last_ns, int((entry_ns + self.stay_ns)[left].max()))
        return self.warps.ts_ns + last_ns


# The most GPUs whose warps are drawn. Each has a packet sequence and tables, which take 30 KB or more.
GPUS_MAX = 64
# Up to this many pairs of SM and slot are looked up in a table. More, which no hardware has, are in a
# dictionary.
_TABLE_MAX: Final = 1 << 15


@dataclass(slots=True, eq=False)
class _Gpu:
    """The tracks of one GPU's warps, which are made when they are needed."""

    index: int
    track: Track
    tracks: list[Track] = field(default_factory=list)
    sm_rows: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    """By track: the row on which its SM shows how many warps it has."""
    slots: Any = field(default_factory=new_slots)
    table: Int32s = field(default_factory=lambda: np.full((0, 0), NO_ROW, np.int32))
    """The row of each SM and slot."""
    sparse: dict[tuple[Any, ...], int] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    kernel_numbers: dict[Kernel, int] = field(default_factory=dict)
    waiting: WaitingChanges = field(default_factory=WaitingChanges)
    running: int = 0
    counter_row: int = NO_ROW
    shared_row: int = NO_ROW
    """The row of all slots and warps for which there are too many tracks."""
    offset_ns: int = 0
    overlap_bases: dict[int, int] = field(default_factory=dict)
    """By row: the row of the nesting whose overlap rows take slices that overlap on its track."""
    of_nesting: dict[int, int] = field(default_factory=dict)
    sms: dict[int, tuple[int, list[Any], list[Any], int]] = field(default_factory=dict)
    """Where warps are only counted, by SM: the row of its counter, the changes that wait, and how many warps
    run."""

    def new_row(self, track: Track, sm_row: int = NO_ROW) -> int:
        """Add a track and return its row."""
        self.tracks.append(track)
        self.sm_rows = grown(self.sm_rows, len(self.tracks), NO_ROW)
        self.sm_rows[len(self.tracks) - 1] = sm_row
        return len(self.tracks) - 1

    def kernel_number(self, kernel: Kernel) -> int:
        """The number of a kernel, which names slices."""
        number = self.kernel_numbers.get(kernel)
        if number is None:
            number = self.kernel_numbers[kernel] = len(self.kernels)
            self.kernels.append(kernel)
        return number


def _kernel_of(launched: Record) -> Kernel:
    """The kernel of a batch."""
    return kernel_of(launched["name"], tuple(launched.get("grid", ())), tuple(launched.get("block", ())))


class WarpLayout:
    """Lays out batches of warps, which come in the order of their bases, and may overlap."""

    def __init__(self, rows: Rows, options: LayoutOptions, summaries: Summaries | None) -> None:
        self._rows, self._options, self._summaries = rows, options, summaries
        self._gpus: dict[int, _Gpu] = {}
        self._open: list[tuple[_Gpu, Slices, int]] = []
        self.unclosed = 0
        self.beyond = 0
        """Warps that are not drawn, as there are too many GPUs."""
        self._runs: list[WarpRun] = []
        # At first, no number is at the place of its own lower bits, so none is found.
        self._launches = np.arange(1, LAUNCHES_MAX + 1, dtype=np.uint64)
        """The last launches whose warps were laid out, by the lower bits of their consecutive ids."""

    def has_drawn(self, launch: int | None) -> bool:
        """Whether warps of a launch were laid out, so that exits of its threads are not drawn again."""
        return launch is not None and int(self._launches[launch % LAUNCHES_MAX]) == launch

    def add(self, places: Int64s, others: Others[PlacedWarps], numbers: Ints) -> None:
        """Add batches at places of the current events, in the order of time, for `starts` and `draw`."""
        indices: dict[int, int] = {}  # an index may have more than 64 bits

        def number(launched: Record) -> int:
            return indices.setdefault(launched.get("gpu", 0), len(indices))

        gpus = [group.by_kind(number)[at] for _, _, group, at in others.stretches(numbers)]
        gpu = np.concatenate([np.empty(0, np.int64), *gpus])
        for index, at in indices.items():
            own = np.flatnonzero(gpu == at)
            for stretch, group in others.groups(numbers[own]):
                self._add_group(index, places[own[stretch]], group)

    def _add_group(self, index: int, places: Int64s, group: WarpGroup[PlacedWarps]) -> None:
        """Add batches of one GPU."""
        ids = np.array([launch for launch in group.launches() if launch is not None], np.uint64)
        self._launches[ids % LAUNCHES_MAX] = ids
        asked, has = self._options.warp_tracks, group.has
        if index not in self._gpus:
            if len(self._gpus) >= GPUS_MAX:
                self.beyond += len(group.whole)
                return
            track = self._rows.gpu(index)
            if asked == "off" or not len(group.whole):
                return
            self._gpus[index] = _Gpu(index, track)
        if not len(group.whole):
            return
        needed = HAS["sm"] | (HAS["slot"] if asked in ("auto", "slot") else 0)
        wanted = "slot" if asked in ("auto", "slot") else asked
        is_logical = has & needed != needed
        # Batches with another clock's reading are apart, as the run has the distance of the clocks.
        kind = is_logical * 2 + (has & HAS["source_ns"] != 0)
        bounds = np.flatnonzero(np.diff(kind, prepend=-1, append=-1)).tolist()
        for first, last in pairwise(bounds):
            mode = "logical" if is_logical[first] else wanted
            some = group.take(np.arange(first, last))
            self._runs.append(WarpRun(index, mode, places[first:last], some))

    def starts(self) -> WarpStarts | None:
        """The starts of the batches that were taken, for which `draw` needs flows; None without batches."""
        if not self._runs:
            return None
        columns = zip(*(run.starts.columns() for run in self._runs), strict=True)
        place, *more = map(np.concatenate, columns)
        order = np.argsort(place)
        return WarpStarts(place[order], *(column[order] for column in more))

    def draw(self, starts: WarpStarts) -> tuple[int, list[WarpChanges]]:
        """Draw the batches that were added. Return the end of their last warp, and the changes in order."""
        changes: list[WarpChanges] = []
        runs, self._runs = self._runs, []
        for run in runs:
            gpu, warps = self._gpus[run.gpu], run.warps
            changes += self._ready(gpu, warps.ts_ns)
            if int(run.group.has[0]) & HAS["source_ns"]:
                gpu.offset_ns = warps.offset_ns or gpu.offset_ns
            if run.mode == "sm":
                assert warps.sm is not None
                begin_ns = warps.ts_ns + warps.entry_ns
                for sm in distinct(warps.sm).tolist():
                    mine = warps.sm == sm
                    left = mine & (run.stay_ns >= 0)
                    ends_ns = (begin_ns + run.stay_ns)[left]
                    if sm not in gpu.sms:
                        name = SM_ACTIVE_WARPS.name.format(sm)
                        track = self._rows.tree.counter(
                            gpu.track, SM_ACTIVE_WARPS, name=name, rank=SM_ACTIVE_WARPS.rank + sm
                        )
                        gpu.sms[sm] = self._rows.new_row(track), [], [], 0
                    _, times, deltas, _ = gpu.sms[sm]
                    times += [begin_ns[mine], ends_ns]
                    deltas += [np.ones(int(mine.sum()), np.int8), np.full(len(ends_ns), -1, np.int8)]
            else:
                flow = starts.flow[np.searchsorted(starts.place, run.starts.place)]
                self._draw(gpu, run, flow)
        return max(run.end_ns() for run in runs), changes

    def _draw(self, gpu: _Gpu, run: WarpRun, flow: Int64s) -> None:
        if gpu.counter_row == NO_ROW:
            unit = self._rows.unit_of_warps(gpu.index)
            track = self._rows.tree.counter(gpu.track, ACTIVE_WARPS, unit=unit)
            gpu.counter_row = gpu.new_row(track)
        warps, order = run.warps, run.order
        begin_ns, stay_ns = (warps.ts_ns + warps.entry_ns)[order], run.stay_ns[order]
        if run.mode == "slot" and warps.sm is not None and warps.slot is not None:
            row = self._slot_rows(gpu, warps.sm[order], warps.slot[order])
        else:
            numbers = np.split(warps.warp[order], run.first[1:])
            rows = [
                self._logical_rows(gpu, run.group.launched(at), of.tolist()) for at, of in enumerate(numbers)
            ]
            row = np.array([*chain.from_iterable(rows)], np.int32)
        slices = self._slices(gpu, run, row, flow)
        fate = gpu.slots.decide(len(gpu.tracks), run.sizes, run.bases_ns, begin_ns, stay_ns, row)
        end_ns = begin_ns + stay_ns
        if not (fate == ON_TRACK).all():
            for at in np.flatnonzero(fate == ON_OVERLAP).tolist():
                # A slot has one warp at a time: two there mean that clocks disagree.
                slices.row[at] = self._overlap_row(
                    gpu, int(slices.row[at]), int(begin_ns[at]), int(end_ns[at])
                )
            for at in np.flatnonzero(fate == NO_END).tolist():
                # Drawn when the end of the trace is known.
                self.unclosed += 1
                self._open.append((gpu, slices.take([at]), int(begin_ns[at])))
        drawn = (fate != NO_END) & (slices.row != NO_ROW)
        self._add(gpu, run, slices, drawn, begin_ns, end_ns)

    def _overlap_row(self, gpu: _Gpu, row: int, begin_ns: int, end_ns: int) -> int:
        """The overlap row of a row that takes a slice, NO_ROW where none does."""
        base = gpu.overlap_bases.get(row)
        if base is None:
            base = gpu.overlap_bases[row] = self._rows.new_row(gpu.tracks[row])
        at = self._rows.nesting.overlap_row(base, begin_ns, end_ns)
        if at == NO_ROW:
            return NO_ROW
        self._rows.add_overlap_tracks()
        found = gpu.of_nesting.get(at)
        if found is None:
            sm_row = int(gpu.sm_rows[row])
            found = gpu.of_nesting[at] = gpu.new_row(self._rows.book.tracks[at], sm_row)
        return found

    def _slices(self, gpu: _Gpu, run: WarpRun, row: Int32s, flow: Int64s) -> Slices:
        """The columns of all warps of a run, in its order."""
        batch, order = run.warps, run.order
        size = len(order)
        kernels = run.group.by_kind(lambda record: gpu.kernel_number(_kernel_of(record)))

        def column(values: Int64s | None) -> Int64s:
            return np.full(size, NONE, np.int64) if values is None else values[order]

        exits, mask, lanes = batch.exit_count, batch.entry_mask, None
        if mask is not None:
            lanes = np.where(
                (mask == FULL_MASK) | (mask == NONE), NONE, np.bitwise_count(mask).astype(np.int64)
            )
        cycles = None if batch.exit_clk is None else batch.last_of_exits(batch.exit_clk)
        flows = np.zeros(size, np.int64)
        flows[run.starts_at] = flow
        return Slices(
            row,
            np.repeat(kernels.astype(np.int32), run.sizes),
            batch.warp[order],
            column(batch.source_ns),
            column(None if exits is None else np.where(exits == 1, NONE, exits)),
            column(cycles),
            column(lanes),
            flows,
            np.zeros(size, np.uint8),
        )

    def _add(
        self, gpu: _Gpu, run: WarpRun, slices: Slices, drawn: Bools, begin_ns: Int64s, end_ns: Int64s
    ) -> None:
        """Keep the changes of a run until they are in order."""
        size = len(slices)
        each = np.arange(size, dtype=np.int32)
        left = end_ns >= begin_ns
        # Begin and end of a warp are next to each other, so that a stable sort by time gives correct nesting.
        columns = {name: np.zeros((size, 2), kind) for name, kind in CHANGES.items()}
        columns["ts_ns"][:, 0], columns["ts_ns"][:, 1] = begin_ns, end_ns
        columns["kind"][:] = np.where(drawn[:, None], (WARP_BEGIN, WARP_END), WARP_COUNT)
        columns["slice"][:] = each[:, None]
        columns["delta"][:] = 1, -1
        flat = [column.reshape(-1) for column in columns.values()]
        if not left.all():
            there = np.ravel(np.column_stack([np.ones(size, np.bool_), left]))
            flat = [column[there] for column in flat]
        if self._options.thread_exits:
            flat = run.with_exits(drawn, begin_ns, flat)
        if run.warps.range_ns is not None:
            slices, flat = self._with_ranges(gpu, run, drawn, slices, flat)
            self.unclosed += 0 if run.warps.range_open is None else int(run.warps.range_open.sum())
        gpu.waiting.add(slices, *flat)

    def _with_ranges(
        self, gpu: _Gpu, run: WarpRun, drawn: Bools, slices: Slices, columns: list[Any]
    ) -> tuple[Slices, list[Any]]:
        """Add the slices of ranges to those of a run's warps, of which some are `drawn`.

        Return all slices, those of ranges last, and the columns of all changes. The changes of ranges are
        between the begin and the end of their warp.
        """
        batch, order = run.warps, run.order
        assert batch.range_ns is not None and batch.range_dur_ns is not None
        assert batch.range_name is not None and batch.range_dur_clk is not None
        inside, steps = nested(batch)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        warp = rank[batch.of_ranges()]
        begin_ns = batch.ts_ns + batch.entry_ns[order][warp] + batch.range_ns
        end_ns = begin_ns + batch.range_dur_ns
        row = np.where(drawn[warp], slices.row[warp], NO_ROW).astype(np.int32)
        crossing = np.flatnonzero((inside == CROSSING) & (row != NO_ROW))
        for at in crossing.tolist():
            row[at] = self._overlap_row(gpu, int(row[at]), int(begin_ns[at]), int(end_ns[at]))
        steps = np.concatenate([steps, np.stack([2 * crossing, 2 * crossing + 1], 1).reshape(-1)])
        steps = steps[row[steps >> 1] != NO_ROW]
        of, is_end = steps >> 1, steps & 1 == 1
        changes = (
            np.where(is_end, end_ns[of], begin_ns[of]),
            np.where(is_end, WARP_END, WARP_BEGIN).astype(np.uint8),
            (of + len(slices)).astype(np.int32),
            np.zeros(len(of), np.int8),
            np.zeros(len(of), np.int64),
        )
        # The order is a warp's begin, its ranges, its end and its exits, also where they are at the same
        # time.
        _, kind, slice_, _, _ = columns
        keys = np.concatenate([3 * slice_.astype(np.int64) + 2 * (kind != WARP_BEGIN), 3 * warp[of] + 1])
        by_warp = np.argsort(keys, kind="stable")
        numbers = [gpu.kernel_number(Kernel(name, ONLY_NAME, 0, 0)) for name in batch.ranges]
        kernel, none = np.array(numbers, np.int32)[batch.range_name], np.zeros(len(row), np.int64)
        unknown = np.full(len(row), NONE, np.int64)
        is_open = none if batch.range_open is None else batch.range_open
        of_ranges = Slices(
            row, kernel, none, unknown, unknown, batch.range_dur_clk, unknown, none, is_open.astype(np.uint8)
        )
        whole = [np.concatenate(pair)[by_warp] for pair in zip(columns, changes, strict=True)]
        return joined_slices([slices, of_ranges]), whole

    def _logical_rows(self, gpu: _Gpu, launched: Record, numbers: list[int]) -> list[int]:
        """The rows of some warps of one launch."""
        known, kernel, rows = gpu.sparse, _kernel_of(launched), []
        launch, name = launched.get("launch"), launched["name"]
        for number in numbers:
            row = known.get((launch, name, number))
            if row is None and self._rows.tree.is_full:
                row = self._shared_row(gpu)
            elif row is None:
                group = self._rows.launch_group(gpu.index, name, launch)
                track = self._rows.tree.child(group, "slices", kernel.place(number), number, "warp")
                row = known[launch, name, number] = gpu.new_row(track)
            rows.append(row)
        return rows

    def _slot_rows(self, gpu: _Gpu, sms: Int64s, slots: Int64s) -> Int32s:
        table = gpu.table
        shape = max(table.shape[0], int(sms.max()) + 1), max(table.shape[1], int(slots.max()) + 1)
        if shape != table.shape and shape[0] * shape[1] <= _TABLE_MAX:
            table = np.full(shape, NO_ROW, np.int32)
            table[: gpu.table.shape[0], : gpu.table.shape[1]] = gpu.table
            gpu.table = table
        inside = (sms < table.shape[0]) & (slots < table.shape[1])
        if inside.all():
            rows: Int32s = table[sms, slots]
        else:
            rows = np.full(len(sms), NO_ROW, np.int32)
            rows[inside] = table[sms[inside], slots[inside]]
        for at in np.flatnonzero(rows == NO_ROW).tolist():
            sm, slot = int(sms[at]), int(slots[at])
            row = int(table[sm, slot]) if inside[at] else NO_ROW
            row = gpu.sparse.get((sm, slot), NO_ROW) if row == NO_ROW else row
            if row == NO_ROW and self._rows.tree.is_full:
                row = self._shared_row(gpu)
            elif row == NO_ROW:
                group = self._rows.tree.child(gpu.track, "group", f"SM {sm}", RANK_OF_SM + sm, SUMMARY)
                sm_row = NO_ROW if self._summaries is None else self._rows.row_of(group)
                row = gpu.new_row(self._rows.tree.slot(group, slot), sm_row)
            rows[at] = row
            if inside[at]:
                table[sm, slot] = row
            elif row != gpu.shared_row:
                gpu.sparse[sm, slot] = row
        return rows

    def _shared_row(self, gpu: _Gpu) -> int:
        if gpu.shared_row == NO_ROW:
            track = self._rows.tree.child(gpu.track, "slices", "more warps", RANK_LOGICAL, "warp")
            gpu.shared_row = gpu.new_row(track)
        return gpu.shared_row

    def _ready(self, gpu: _Gpu, before_ns: int) -> list[WarpChanges]:
        """Take the changes of a GPU before that time. Nothing earlier can come any more."""
        for sm, (row, times, deltas, running) in gpu.sms.items():
            ts_ns, delta = np.concatenate(times), np.concatenate(deltas)
            order, value, running = Slots.running(ts_ns, delta, before_ns, running)
            now, rest = order[: len(value)], order[len(value) :]
            for at in np.flatnonzero(value >= 0).tolist():
                self._rows.nesting.add(op_of(COUNTER, row, int(ts_ns[now[at]]), 0, NONE, int(value[at])))
            gpu.sms[sm] = row, [ts_ns[rest]], [delta[rest]], running
        waiting, gpu.waiting = gpu.waiting, WaitingChanges()
        if not waiting.parts:
            return []
        ts_ns, kind, of, delta, mask = waiting.columns()
        order, value, gpu.running = gpu.slots.running(ts_ns, delta, before_ns, gpu.running)
        slices = joined_slices(waiting.slices)
        now, rest = order[: len(value)], order[len(value) :]
        if len(rest):
            kept = distinct(of[rest])
            still = np.searchsorted(kept, of[rest]).astype(np.int32)
            gpu.waiting.add(slices.take(kept), ts_ns[rest], kind[rest], still, delta[rest], mask[rest])
        if not len(now):
            return []
        if self._summaries is not None:
            row = slices.row[of[now]]
            sm_row = np.where(row == NO_ROW, NO_ROW, gpu.sm_rows[row])
            self._summaries.count_warps(ts_ns[now], sm_row, delta[now])
        changes = (ts_ns[now], kind[now], of[now], value, mask[now])
        return [
            WarpChanges(gpu.index, gpu.tracks, gpu.kernels, gpu.counter_row, gpu.offset_ns, *changes, slices)
        ]

    def finish(self, end_ns: int) -> list[WarpChanges]:
        """Draw the warps that wait for the end of the trace."""
        for gpu, slices, begin_ns in self._open:
            last_ns = max(begin_ns, end_ns)
            times = (np.array([ns], np.int64) for ns in (1, begin_ns, begin_ns, min(last_ns - begin_ns, ALL)))
            fate = gpu.slots.decide(len(gpu.tracks), *times, slices.row)
            if fate[0] != ON_TRACK:
                slices.row[0] = self._overlap_row(gpu, int(slices.row[0]), begin_ns, last_ns)
            if slices.row[0] == NO_ROW:
                continue
            slices.unclosed[0] = 1
            both, kinds = np.array([begin_ns, last_ns], np.int64), np.array([WARP_BEGIN, WARP_END], np.uint8)
            gpu.waiting.add(slices, both, kinds, *[np.zeros(2, np.int32)] * 3)
        changes = [changes for gpu in self._gpus.values() for changes in self._ready(gpu, ALL)]
        if self._summaries is not None:
            self._summaries.finish(end_ns)
        return changes


Of = tuple[Three | None, Three | None]
"""Block and thread of an event, None each where it is not recorded."""


class ThreadLayout:
    """Draws events of single threads. A pair of B and E makes a slice for the warp, from its first thread's
    entry to its last thread's exit. A record of a single entry or exit (I) is an instant.
    """

    def __init__(self, rows: Rows, options: LayoutOptions) -> None:
        self._rows, self._options = rows, options
        self._of: dict[int, dict[tuple[Any, ...], int]] = {}
        self._inside: dict[tuple[Any, ...], int] = {}
        self.beyond = 0
        """Events that are not drawn, as there are too many tracks."""

    def place(
        self,
        ts_ns: int,
        shape: Shape,
        of: Of,
        args: Args,
        dur_ns: int,
        launch: int | None,
        keep: Callable[[Args], int],
    ) -> int:
        """Draw one event `of` a block and a thread. Return its end, trace ns. `keep` gives the event other
        arguments, and returns its number.
        """
        where = _warp_of(*of, args)
        gpu = shape.gpu or 0
        key = (launch, shape.name, *where)
        row = self._row(gpu, key)
        if row == NO_ROW:
            self.beyond += 1
            return ts_ns
        if of[1] is not None:
            args["thread"] = list(of[1])
        nesting, name = self._rows.nesting, self._rows.name
        if shape.phase == "X":
            nesting.one(row, "X", ts_ns, dur_ns, name(shape.name), self._rows.keep_args(args))
            return ts_ns + dur_ns
        if shape.phase == "I" or self._options.thread_exits:
            event = {"B": "entry", "E": "exit"}.get(shape.phase) or args.pop("event", "event")
            nesting.one(row, "I", ts_ns, None, name(f"thread {event}"), keep(args))
        if shape.phase == "I":
            return ts_ns
        begins, inside = shape.phase == "B", self._inside.get((gpu, *key), 0)
        if (begins and inside == 0) or (not begins and inside <= 1):
            nesting.one(row, shape.phase, ts_ns, None, name(" ".join((shape.name, *where))), NONE)
        self._inside[(gpu, *key)] = max(0, inside + (1 if begins else -1))
        return ts_ns

    def place_all(self, events: TraceColumns) -> bool:
        """Draw events many at a time, with the result of `place`, if all are entries and exits of threads (I)
        of launches without a number. Return whether they are.
        """
        tables, index = self._rows.book.tables, events.index
        if index is None or not len(events) or int(events.shape.min()) < 0:
            return False
        both = events.shape.astype(np.int64) << 32 | events.args.astype(np.int64) & 0xFFFF_FFFF
        kinds = distinct(both)
        kind, numbers = np.searchsorted(kinds, both), (kinds << 32 >> 32).tolist()
        shapes = [self._rows.shape(number) for number in (kinds >> 32).tolist()]
        if any(shape.type != "gpu_thread" or shape.phase != "I" or shape.has_launch for shape in shapes):
            return False
        shown = [*map(tables.args, numbers)]
        if any(map(tables.is_odd, numbers)) or any("thread" in args for args in shown):
            return False
        # Each warp once, in the order in which they come.
        key = np.column_stack([kind, index[:, :3], index[:, 3] // WARP_LANES, index[:, 4:]])
        order = np.lexsort(key.T)
        is_first = np.append(True, (np.diff(key[order], axis=0) != 0).any(axis=1))
        warp, firsts = np.empty(len(order), np.int64), order[is_first]
        warp[order] = np.cumsum(is_first) - 1
        rows = np.empty(len(firsts), np.int32)
        for at in np.argsort(firsts).tolist():
            first = int(firsts[at])
            shape, args = shapes[int(kind[first])], shown[int(kind[first])]
            where = _warp_of(*events.thread_of(first), args)
            rows[at] = self._row(shape.gpu or 0, (None, shape.name, *where))
        drawn = np.flatnonzero(rows[warp] != NO_ROW)
        self.beyond += len(events) - len(drawn)
        names = [self._rows.name(f"thread {args.pop('event', 'event')}") for args in shown]
        texts = [packed(args)[:-1] + (b"," if args else b"") + b'"thread":[' for args in shown]
        alone = [packed(args) if args else b"" for args in shown]
        threads = zip(kind[drawn].tolist(), index[drawn, 3:].tolist(), strict=True)
        given = Texts.of(
            [
                alone[of] if thread[0] == NONE else b"%b%d,%d,%d]}" % (texts[of], *thread)
                for of, thread in threads
            ]
        )
        tables.given_bytes += len(given.data)
        events.args[drawn] = tables.text_numbers(given)
        named = np.array(names, np.int32)[kind[drawn]]
        ops = zip(
            rows[warp[drawn]].tolist(),
            events.ts_ns[drawn].tolist(),
            named.tolist(),
            drawn.tolist(),
            strict=True,
        )
        self._rows.nesting.add(*[op_of(INSTANT, *op) for op in ops])
        return True

    def _row(self, gpu: int, key: tuple[Any, ...]) -> int:
        """The row of a warp, by its launch, its kernel and where it is; NO_ROW where there are too many."""
        rows = self._of.setdefault(gpu, {})
        row = rows.get(key, NO_ROW)
        if row == NO_ROW and not self._rows.tree.is_full:
            launch, name, *where = key
            group = self._rows.launch_group(gpu, name, launch)
            row = rows[key] = self._rows.new_row(
                self._rows.tree.child(group, "slices", " ".join(where), len(rows), "warp")
            )
        return row

    def close(self, gpu: int, end_ns: int) -> None:
        """End what is still open on one GPU."""
        for row in self._of.get(gpu, {}).values():
            self._rows.nesting.close(row, end_ns)


def _warp_of(block: Three | None, thread: Three | None, args: Record) -> tuple[str, str]:
    """Block and warp of a thread, in words.

    With y = z = 0, lane 0 of a warp has an x divisible by 32, for every size of the block. Elsewhere it
    depends on the size, which such a record does not have: 32 neighbours in x are named as threads then.
    """
    if block is not None:
        where = "block ({},{},{})".format(*block)
    elif "block_x" in args:
        where = f"block {args['block_x']}"
    else:
        where = f"occurrence {args.get('occurrence', 0)}"
    if thread is None:
        return where, "warp not recorded"
    x, y, z = thread
    if y == z == 0:
        return where, f"warp {x // WARP_LANES}"
    first = x // WARP_LANES * WARP_LANES
    return where, f"threads ({first}–{first + WARP_LANES - 1},{y},{z})"
