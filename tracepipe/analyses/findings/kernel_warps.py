"""The warps of all launches of one kernel as arrays, from which every finding is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from tracepipe.analyses.findings.finding import MIN_CLOCK_STEPS, MIN_EXIT_ONLY_NS
from tracepipe.event.columns import Bools, Floats, Int64s, Ints, distinct
from tracepipe.event.groups import number_rows, run_starts, sorted_rows
from tracepipe.libraries import np

MAX_ROWS = 4096
"""The most warps or blocks that a test uses; of more it takes a sample. The tests need only hundreds."""
MAX_BLOCKS = 1 << 17
"""The same where a test needs hundreds for each SM, or along the grid."""

PATCH_ALONE_NS, PATCH_NS = 465, 146
"""What a patch at a warp's entry or exit takes, alone, and for each one that runs on its SM meanwhile: the
most that was measured on an H200, 920 and 290 cycles at 1.98 GHz, with patches that do nothing."""
PATCHES_AT_MOST = 2
"""The factor up to which exits that are apart may be apart by the patches."""


def sample(indices: Ints, most: int = MAX_ROWS) -> Ints:
    """At most `most` of `indices`, in their order; the same ones each time. Shapes `(n,)`."""
    if indices.size <= most:
        return indices
    return np.sort(np.random.default_rng(0).choice(indices, most, replace=False))


def evenly(count: int, most: int) -> Int64s:
    """At most `most` of the row numbers 0…`count`-1, evenly spaced. Shape `(n,)`."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


NOT_RECORDED = -(1 << 63)
LANES = 32

MIN_WAVE = 8
"""The least number of blocks whose median others are compared with."""
MAX_WARPS = 32
"""The most warps of a block: 1024 threads."""
_FEW_STEPS = 15
CLOCK_STEPS_NS = (1024, 1000, 32)
"""The steps of %globaltimer on older GPUs and on recent ones. The largest that fits the readings is taken
where too few of them differ to measure the step."""


@dataclass(frozen=True)
class BlockTimes:
    """The blocks of all launches, sorted by launch and block; columns of shape `(blocks,)`."""

    launch: Ints
    block: Ints
    sm: Ints
    entry_ns: Ints
    end_ns: Ints
    skew_ns: Ints
    """From the exit of the first warp to that of the last."""


@dataclass(frozen=True)
class KernelWarps:
    """The warps of the launches of one kernel with one grid and block, sorted by launch, block and warp, and
    their exits by warp and time; `sort_warps` sorts them.

    Columns of shape `(warps,)`: `launch`, linear `block`, `warp` in its block, `sm`, `entry_ns`; the last two
    may be NOT_RECORDED. Columns of shape `(exits,)`: `exit_warp` (index of the warp), `exit_ns`, and
    `exit_mask` (the lanes that exited).
    """

    kernel: str
    grid: tuple[int, int, int] | None
    launch: Ints
    block: Ints
    warp: Ints
    sm: Ints
    entry_ns: Ints
    exit_warp: Ints
    exit_ns: Ints
    exit_mask: Ints
    lanes_timed: bool = False
    """Each thread was timed separately, so the times of one warp also differ by noise."""
    blocks_known: bool = True
    rows_mixed: bool = False
    """Threads of several blocks may appear as one warp, as the input does not name blocks."""
    launch_ids: Any = None
    """The launches' ids in the recording, whole numbers of 64 bits, -1 for launches without one; shape
    `(launches,)`. None where the ids are 0, 1, …"""
    gpu: int = 0
    block_size: tuple[int, int, int] | None = None
    sm_count: int | None = None
    """How many SMs the GPU has."""
    cluster_of: Callable[[int], int] = lambda _: 1
    """How many blocks a cluster has, of the launch with an id in the recording."""
    is_patched: bool = False
    """Its code was patched to record its warps, which takes time at their entries and exits."""
    still_running: int = 0
    """Warps that had not exited when the recording ended; the columns do not contain them."""

    def launch_id(self, launch: int) -> int:
        """The id of a launch in the recording; -1 where it has none."""
        return launch if self.launch_ids is None else int(self.launch_ids[launch])

    @cached_property
    def has_entries(self) -> bool:
        return self.launch.size > 0 and bool((self.entry_ns != NOT_RECORDED).all())

    @property
    def has_exits(self) -> bool:
        return self.exit_ns.size > 0

    @cached_property
    def has_sms(self) -> bool:
        return self.launch.size > 0 and bool((self.sm != NOT_RECORDED).all())

    @cached_property
    def warps_of_a_block(self) -> int:
        """How many warps a block has; 0 where blocks are not known, or have more warps than CUDA allows."""
        count = int(self.warp.max()) + 1 if self.blocks_known and self.warp.size else 0
        return count if count <= MAX_WARPS else 0

    @cached_property
    def exits(self) -> Ints:
        """How many exits each warp has."""
        return np.bincount(self.exit_warp, minlength=self.launch.size)

    @cached_property
    def _left_at_once(self) -> bool:
        """Whether each warp has exactly one exit."""
        return bool(self.exit_ns.size == self.launch.size == np.count_nonzero(self.exits))

    @cached_property
    def first_exit(self) -> Ints:
        """The index of each warp's first exit."""
        return np.cumsum(self.exits) - self.exits

    @cached_property
    def first_exit_ns(self) -> Ints:
        return self.exit_ns if self._left_at_once else self.exit_ns[self.first_exit]

    @cached_property
    def last_exit_ns(self) -> Ints:
        return self.exit_ns if self._left_at_once else self.exit_ns[self.first_exit + self.exits - 1]

    @cached_property
    def spread_ns(self) -> Ints:
        """From each warp's first exit to its last one; NOT_RECORDED where only one lane was timed."""
        spread_ns: Ints = self.last_exit_ns - self.first_exit_ns
        return np.where(self.exits > 1, spread_ns, NOT_RECORDED) if self.lanes_timed else spread_ns

    @cached_property
    def last_thread(self) -> int:
        """The largest thread index in a block of which an exit was recorded; -1 without one."""
        known = np.flatnonzero(self.exit_mask > 0)
        highest_lane = np.frexp(self.exit_mask[known].astype(np.float64))[1] - 1
        return int((self.warp[self.exit_warp[known]] * LANES + highest_lane).max(initial=-1))

    @cached_property
    def life_ns(self) -> Ints:
        """From each warp's entry to its last exit."""
        return self.last_exit_ns - self.entry_ns

    @cached_property
    def launch_starts(self) -> Ints:
        """The first warp of each launch."""
        return run_starts(self.launch)

    @cached_property
    def block_starts(self) -> Ints:
        """The first warp of each block of each launch."""
        return run_starts(self.launch, self.block)

    @cached_property
    def launches(self) -> Ints:
        # The warps are sorted by launch.
        return self.launch[self.launch_starts]

    @cached_property
    def launch_row(self) -> Ints:
        """For each warp the index of its launch in `launches`."""
        return np.repeat(np.arange(self.launches.size), self._counts(self.launch_starts))

    def _counts(self, starts: Ints) -> Ints:
        """How many warps there are from each start to the next."""
        return np.diff(starts, append=self.launch.size)

    @cached_property
    def clock_step_ns(self) -> int:
        """The least time between two readings that differ: the clock's resolution, at least 1."""
        known_ns = self.entry_ns[self.entry_ns != NOT_RECORDED]
        steps = np.diff(distinct(np.concatenate([self.exit_ns, known_ns])))
        if not steps.size:
            return CLOCK_STEPS_NS[-1]
        if steps.size >= _FEW_STEPS:
            return int(steps.min())
        return next((step for step in CLOCK_STEPS_NS if not (steps % step).any()), 1)

    @cached_property
    def begin_ns(self) -> Ints:
        """The first entry of each launch; the first exit, where entries are not known."""
        first_ns = self.entry_ns if self.has_entries else self.first_exit_ns
        begins: Ints = np.minimum.reduceat(first_ns, self.launch_starts)
        return begins

    @cached_property
    def launch_ns(self) -> Floats:
        """How long each launch ran: from `begin_ns` to the last exit."""
        spans_ns: Ints = np.maximum.reduceat(self.last_exit_ns, self.launch_starts) - self.begin_ns
        return spans_ns.astype(np.float64)

    @cached_property
    def warp_scale_ns(self) -> float:
        """The time with which a warp's delay is compared: the median lifetime, or the time over which the
        warps of a launch exit."""
        if self.has_entries:
            return float(np.median(self.life_ns))
        spans = self.launch_ns[self.launch_ns > 0]
        return float(np.median(spans)) if spans.size else 0.0

    @property
    def scale_name(self) -> str:
        """The name of `warp_scale_ns`, for a sentence."""
        return "a warp's lifetime" if self.has_entries else "the time over which a launch's warps exit"

    @property
    def least_ns(self) -> float:
        """The least difference that is more than rounding, or than the cost of the probe."""
        return max(MIN_CLOCK_STEPS * self.clock_step_ns, 0 if self.has_entries else MIN_EXIT_ONLY_NS)

    @cached_property
    def blocks(self) -> BlockTimes:
        begins = self.block_starts
        end_ns = np.maximum.reduceat(self.last_exit_ns, begins)
        return BlockTimes(
            self.launch[begins],
            self.block[begins],
            self.sm[begins],
            np.minimum.reduceat(self.entry_ns, begins),
            end_ns,
            end_ns - np.minimum.reduceat(self.last_exit_ns, begins),
        )

    @cached_property
    def warps_of_block(self) -> Ints:
        """For each row of `blocks` how many recorded warps it has."""
        return self._counts(self.block_starts)

    @cached_property
    def block_count(self) -> int:
        """How many different blocks of the grid were recorded."""
        return int(distinct(self.block[self.block_starts]).size)

    @cached_property
    def block_bounds(self) -> Ints:
        """The index in `blocks` at which each launch begins, and the end of the last; shape
        `(launches + 1,)`.
        """
        starts = self.block_starts
        return np.append(np.searchsorted(starts, self.launch_starts), starts.size)

    @cached_property
    def wave(self) -> Ints:
        """For each row of `blocks` the number of the wave in which it started, 0, 1, … through all launches.
        Entries must be known.

        The first wave of a launch is the blocks that started before any block of the launch had ended. The
        second is those of the rest that started before any of the rest had ended, and so on. A wave of a few
        blocks is joined with the wave before it.
        """
        bounds, count = self.block_bounds, self.blocks.block.size
        rows, upto = np.empty(count, np.int64), np.empty(count, np.int64)
        for first, last in pairwise(bounds.tolist()):
            own = first + np.argsort(self.blocks.entry_ns[first:last], kind="stable")
            # For each row the earliest end of it and of the later rows, as ends are in no order.
            first_end = np.minimum.accumulate(self.blocks.end_ns[own[::-1]])[::-1]
            rows[first:last] = own
            upto[first:last] = first + np.searchsorted(self.blocks.entry_ns[own], first_end)
        last_row = np.repeat(bounds[1:], np.diff(bounds))
        upto = np.maximum(upto, np.arange(1, count + 1))
        ends = np.where(last_row - upto < MIN_WAVE, last_row, upto).tolist()
        begins = np.zeros(count, np.int32)
        begins[bounds[:-1]], at = 1, 0
        while at < count:
            if ends[at] - at >= MIN_WAVE:
                begins[at] = 1
            at = ends[at]
        wave = np.empty(count, np.int32)
        wave[rows] = np.cumsum(begins) - 1
        return wave

    @cached_property
    def turn(self) -> Ints:
        """The numbers of `wave` where SMs are not known. Else a wave is divided further: by the order in
        which its blocks started on their SM, and by how many of them the SM had.

        An overloaded SM serves its oldest block first: on an H200, the four blocks of an SM, of a kernel of
        multiplications, entered within 0.7 µs and took 8.6, 13.4, 18.5 and 23.2 µs, in every launch.
        """
        if not self.has_sms:
            return self.wave
        rows = sorted_rows(self.wave, self.blocks.sm, self.blocks.entry_ns)
        wave = self.wave[rows]
        begins = run_starts(wave, self.blocks.sm[rows])
        held = np.diff(begins, append=rows.size)
        numbers, _ = number_rows(wave, np.repeat(held, held), np.arange(rows.size) - np.repeat(begins, held))
        turn = np.empty(rows.size, np.int32)
        turn[rows] = numbers
        return turn

    @cached_property
    def diverges(self) -> Bools:
        """Flags the warps whose lanes did not all exit at the same reading of the clock."""
        later: Bools = self.last_exit_ns > self.first_exit_ns
        return later

    @cached_property
    def exits_by_patches(self) -> bool:
        """Whether the exits of warps that diverge are no further apart than what records them takes: a patch
        runs at each entry and exit, and those of an SM take turns.
        """
        rows = sample(np.flatnonzero(self.diverges))
        if not self.is_patched or not self.has_sms or not self.has_entries or not rows.size:
            return False
        first_ns = int(min(self.exit_ns.min(), self.entry_ns.min()))
        span_ns = int(max(self.exit_ns.max(), self.entry_ns.max())) - first_ns + 1
        if span_ns * (int(self.sm.max()) + 1) >= 1 << 62:
            return False

        def place(sm: Ints, time_ns: Ints) -> Ints:
            """The time, with that of each SM apart."""
            found: Ints = sm * np.int64(span_ns) + (time_ns - first_ns)
            return found

        patched = place(self.sm[self.exit_warp], self.exit_ns), place(self.sm, self.entry_ns)
        times = np.sort(np.concatenate(patched))
        ends = (place(self.sm[rows], of[rows]) for of in (self.first_exit_ns, self.last_exit_ns))
        first, last = (np.searchsorted(times, end, side="right") for end in ends)
        cost_ns = PATCH_ALONE_NS + PATCH_NS * (last - first)
        apart_ns = self.last_exit_ns[rows] - self.first_exit_ns[rows]
        return bool(np.median(apart_ns - PATCHES_AT_MOST * cost_ns) <= 0)

    @cached_property
    def done_ns(self) -> Ints:
        """When each warp's work ended: at its last exit, or at its first one if patches make the rest."""
        return self.first_exit_ns if self.exits_by_patches else self.last_exit_ns

    def lane_times(self, warps: Ints) -> Floats:
        """When each lane of `warps` exited, after its warp's first exit. Shape `(warps, 32)`, nan where no
        exit was recorded."""
        row = np.full(self.launch.size, -1)
        row[warps] = np.arange(warps.size)
        times = np.full((warps.size, LANES), np.nan)
        wanted = np.flatnonzero(row[self.exit_warp] >= 0)
        of, masks = self.exit_warp[wanted], self.exit_mask[wanted]
        after = (self.exit_ns[wanted] - self.first_exit_ns[of]).astype(np.float64)
        for lane in range(LANES):
            left = (masks >> lane) & 1 == 1
            times[row[of[left]], lane] = after[left]
        return times

    def warp_times(self, rows: Ints | None = None) -> Floats:
        """How long each warp of a block took, shape `(blocks, warps)`: its lifetime, or its exit where no
        entry is known. `rows` are some of `blocks`; of many it takes a sample."""
        count = self.block_starts.size
        blocks = sample(np.arange(count) if rows is None else rows)
        row = np.full(count, -1)
        row[blocks] = np.arange(blocks.size)
        of = np.repeat(row, self.warps_of_block)
        wanted = of >= 0
        values = self.life_ns if self.has_entries else self.last_exit_ns - self.last_exit_ns.min()
        times = np.full((blocks.size, int(self.warp.max()) + 1), np.nan)
        times[of[wanted], self.warp[wanted]] = values[wanted]
        return times


def sort_warps(warps: KernelWarps) -> KernelWarps:
    """Sort warps and exits that are in any order. Where exits were recorded at all, warps without one are
    left out and counted in `still_running`.
    """
    launch, exit_warp = warps.launch, warps.exit_warp
    has_exit = np.full(launch.size, not exit_warp.size)
    has_exit[exit_warp] = True
    order = sorted_rows(launch, warps.block, warps.warp)
    order = order[has_exit[order]]
    place = np.full(launch.size, -1)
    place[order] = np.arange(order.size)
    exits = np.lexsort((warps.exit_ns, place[exit_warp]))
    return replace(
        warps,
        launch=launch[order],
        block=warps.block[order],
        warp=warps.warp[order],
        sm=warps.sm[order],
        entry_ns=warps.entry_ns[order],
        exit_warp=place[exit_warp[exits]],
        exit_ns=warps.exit_ns[exits],
        exit_mask=warps.exit_mask[exits],
        still_running=int(launch.size - order.size),
    )
