"""The warps of all launches of one kernel as arrays: what every finding is computed from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tracepipe.reports.findings.finding import MIN_CLOCK_STEPS, MIN_EXIT_ONLY_NS
from tracepipe.reports.frames.libraries import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]
else:
    Ints = Floats = Flags = Any

NOT_RECORDED = -(1 << 63)
LANES = 32

MAX_WARPS = 32
"""Of a block: 1024 threads."""
MAX_ROWS = 4096
"""Warps or blocks that a test looks at; more are sampled. The tests are sure with hundreds."""

CLOCK_STEPS_NS = (1024, 1000, 32)
"""Of %globaltimer on older GPUs and on recent ones: the largest that fits is taken where too few readings
differ to see the step in them."""


@dataclass(frozen=True)
class BlockTimes:
    """Blocks of all launches, one row each, by launch and block."""

    launch: Ints
    block: Ints
    sm: Ints
    entry_ns: Ints
    end_ns: Ints
    skew_ns: Ints
    """From the first warp's leaving to the last one's."""


@dataclass(frozen=True)
class KernelWarps:
    """Warps of the launches of one kernel with one grid and block, in order of launch, block and warp.

    Arrays of a value for each warp: `launch`, linear `block`, `warp` in its block, `sm`, `entry_ns`; the last
    two may be NOT_RECORDED. Arrays of a value for each exit, in order of warp and time: `exit_warp` (index of
    the warp), `exit_ns` and `exit_mask` (lanes that left). Make one by `sort_warps`.
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
    """Every thread took its own time, so that the times of one warp differ by noise too."""
    blocks_known: bool = True
    rows_mixed: bool = False
    """Threads of several blocks may stand as one warp, as the input does not name blocks."""
    launch_ids: tuple[int, ...] = ()
    """What the recording calls the launches 0, 1, …; empty: the same."""
    still_running: int = 0
    """Warps that had not left when the recording ended; they are not among the others."""

    def launch_id(self, launch: int) -> int:
        """What the recording calls a launch."""
        return self.launch_ids[launch] if self.launch_ids else launch

    @property
    def has_entries(self) -> bool:
        return self.launch.size > 0 and bool((self.entry_ns != NOT_RECORDED).all())

    @property
    def has_exits(self) -> bool:
        return self.exit_ns.size > 0

    @property
    def has_sms(self) -> bool:
        return self.launch.size > 0 and bool((self.sm != NOT_RECORDED).all())

    @cached_property
    def warps_of_a_block(self) -> int:
        """How many warps a block has, 0 where blocks are not known or have more than CUDA allows."""
        count = int(self.warp.max()) + 1 if self.blocks_known and self.warp.size else 0
        return count if count <= MAX_WARPS else 0

    @cached_property
    def exits(self) -> Ints:
        counts: Ints = np.bincount(self.exit_warp, minlength=self.launch.size)
        return counts

    @cached_property
    def first_exit(self) -> Ints:
        """The index of each warp's first exit."""
        first: Ints = np.cumsum(self.exits) - self.exits
        return first

    @cached_property
    def first_exit_ns(self) -> Ints:
        return self.exit_ns[self.first_exit]

    @cached_property
    def last_exit_ns(self) -> Ints:
        last: Ints = self.exit_ns[self.first_exit + self.exits - 1]
        return last

    @cached_property
    def spread_ns(self) -> Ints:
        """From each warp's first exit to its last one; NOT_RECORDED where one lane alone was timed."""
        spread: Ints = self.last_exit_ns - self.first_exit_ns
        return np.where(self.exits > 1, spread, NOT_RECORDED) if self.lanes_timed else spread

    @cached_property
    def last_thread(self) -> int:
        """The largest index of a thread in its block of which an exit was recorded, -1 without one."""
        told = np.flatnonzero(self.exit_mask > 0)
        highest_lane = np.frexp(self.exit_mask[told].astype(np.float64))[1] - 1
        threads = self.warp[self.exit_warp[told]] * LANES + highest_lane
        return int(threads.max(initial=-1))

    @cached_property
    def life_ns(self) -> Ints:
        """From each warp's entry to its last exit."""
        life: Ints = self.last_exit_ns - self.entry_ns
        return life

    @cached_property
    def launches(self) -> Ints:
        return np.unique(self.launch)

    @cached_property
    def clock_step_ns(self) -> int:
        """The least time between two readings that differ: the clock's resolution, at least 1."""
        times = np.sort(np.concatenate([self.exit_ns, self.entry_ns[self.entry_ns != NOT_RECORDED]]))
        steps = np.diff(times)
        steps = steps[steps > 0]
        if steps.size == 0:
            return CLOCK_STEPS_NS[-1]
        if steps.size >= 15:
            return int(steps.min())
        return next((step for step in CLOCK_STEPS_NS if not (steps % step).any()), 1)

    @cached_property
    def begin_ns(self) -> Ints:
        """The first entry of each launch; the first exit, where entries are not known."""
        starts = np.flatnonzero(np.r_[True, np.diff(self.launch) != 0])
        begins: Ints = np.minimum.reduceat(self.entry_ns if self.has_entries else self.first_exit_ns, starts)
        return begins

    @cached_property
    def launch_ns(self) -> Floats:
        """How long each launch ran: from `begin_ns` to the last exit."""
        starts = np.flatnonzero(np.r_[True, np.diff(self.launch) != 0])
        spans = np.maximum.reduceat(self.last_exit_ns, starts) - self.begin_ns
        return spans.astype(np.float64)

    @property
    def warp_scale_ns(self) -> float:
        """What a warp's delay is compared with: the median life, or the time over which a launch's warps
        leave."""
        if self.has_entries:
            return float(np.median(self.life_ns))
        spans = self.launch_ns[self.launch_ns > 0]
        return float(np.median(spans)) if spans.size else 0.0

    @property
    def scale_name(self) -> str:
        """What `warp_scale_ns` is, in a sentence."""
        return "a warp's life" if self.has_entries else "the time over which a launch's warps leave"

    @property
    def least_ns(self) -> float:
        """A difference below this is rounding, or the probe's own cost."""
        return max(MIN_CLOCK_STEPS * self.clock_step_ns, 0 if self.has_entries else MIN_EXIT_ONLY_NS)

    @cached_property
    def blocks(self) -> BlockTimes:
        begins = np.flatnonzero(np.r_[True, (np.diff(self.launch) != 0) | (np.diff(self.block) != 0)])
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
        """For each row of `blocks` how many warps it has here."""
        begins = np.flatnonzero(np.r_[True, (np.diff(self.launch) != 0) | (np.diff(self.block) != 0)])
        counts: Ints = np.diff(np.r_[begins, self.launch.size])
        return counts

    @cached_property
    def block_rows(self) -> list[Ints]:
        """For each launch the rows of `blocks`."""
        bounds = np.flatnonzero(np.diff(self.blocks.launch)) + 1
        return np.split(np.arange(self.blocks.launch.size), bounds)

    @cached_property
    def apart(self) -> Flags:
        """Warps whose lanes did not all leave at one reading of the clock."""
        apart: Flags = self.last_exit_ns > self.first_exit_ns
        return apart

    def lane_times(self, warps: Ints) -> Floats:
        """When each lane of `warps` left, after the warp's first exit: an array of (warps, 32), nan where it
        never did."""
        row = np.full(self.launch.size, -1, np.int64)
        row[warps] = np.arange(warps.size)
        wanted = row[self.exit_warp] >= 0
        rows, masks = row[self.exit_warp[wanted]], self.exit_mask[wanted]
        after = (self.exit_ns[wanted] - self.first_exit_ns[self.exit_warp[wanted]]).astype(np.float64)
        times = np.full((warps.size, LANES), np.nan)
        for lane in range(LANES):
            left = (masks >> lane) & 1 == 1
            times[rows[left], lane] = after[left]
        return times

    def warp_times(self) -> Floats:
        """How long each warp of a block took, an array of (blocks, warps): its life; its exit where no entry
        is known."""
        blocks = np.cumsum(np.r_[False, (np.diff(self.launch) != 0) | (np.diff(self.block) != 0)])
        taken = sample(np.arange(int(blocks[-1]) + 1))
        row = np.full(int(blocks[-1]) + 1, -1, np.int64)
        row[taken] = np.arange(taken.size)
        wanted = row[blocks] >= 0
        times = np.full((taken.size, int(self.warp.max()) + 1), np.nan)
        values = self.life_ns if self.has_entries else self.last_exit_ns - self.last_exit_ns.min()
        times[row[blocks[wanted]], self.warp[wanted]] = values[wanted]
        return times


def sample(indices: Ints) -> Ints:
    """At most MAX_ROWS of `indices`, in their order, the same ones each time."""
    if indices.size <= MAX_ROWS:
        return indices
    return np.sort(np.random.default_rng(0).choice(indices, MAX_ROWS, replace=False))


def sort_warps(
    kernel: str,
    grid: tuple[int, int, int] | None,
    *,
    launch: Ints,
    block: Ints,
    warp: Ints,
    sm: Ints,
    entry_ns: Ints,
    exit_warp: Ints,
    exit_ns: Ints,
    exit_mask: Ints,
    lanes_timed: bool = False,
    blocks_known: bool = True,
    rows_mixed: bool = False,
    launch_ids: tuple[int, ...] = (),
) -> KernelWarps:
    """`KernelWarps` of warps and exits in any order; where exits are recorded at all, warps without one are
    counted apart."""
    left = np.zeros(launch.size, np.bool_)
    left[exit_warp] = True
    kept = np.flatnonzero(left) if exit_warp.size else np.arange(launch.size)
    order = kept[np.lexsort((warp[kept], block[kept], launch[kept]))]
    place = np.full(launch.size, -1, np.int64)
    place[order] = np.arange(order.size)
    exits = np.lexsort((exit_ns, place[exit_warp]))
    return KernelWarps(
        kernel,
        grid,
        launch[order],
        block[order],
        warp[order],
        sm[order],
        entry_ns[order],
        place[exit_warp[exits]],
        exit_ns[exits],
        exit_mask[exits].astype(np.int64),
        lanes_timed,
        blocks_known,
        rows_mixed,
        launch_ids,
        int(launch.size - order.size),
    )
