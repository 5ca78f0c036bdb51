"""The warps of all launches of one kernel as arrays, from which every finding is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from tracepipe.analyses.findings.finding import MIN_CLOCK_STEPS, MIN_EXIT_ONLY_NS
from tracepipe.analyses.findings.sampling import sample
from tracepipe.reports.frames.arrays import Bools, Floats, Ints
from tracepipe.reports.frames.grouping import distinct, reduced, starts_of
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import flagged, made, parts, release, stored, taken

Flags = Bools
NOT_RECORDED = -(1 << 63)
LANES = 32

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


def _not_recorded(_: int) -> int:
    return 1


class LaunchIds(NamedTuple):
    """The ids of launches in a recording, 64 bits each, and which launches have none; shapes
    `(launches,)`.
    """

    id: Ints
    is_nameless: Flags


@dataclass(frozen=True)
class WarpColumns:
    """The warps of the launches of one kernel with one grid and block, as columns in any order.

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
    launch_ids: LaunchIds | None = None
    """The launches' ids in the recording; None where the ids are 0, 1, …"""
    gpu: int = 0
    block_size: tuple[int, int, int] | None = None
    sm_count: int | None = None
    """How many SMs the GPU has."""
    cluster_of: Callable[[int], int] = _not_recorded
    """How many blocks a cluster has, of the launch with an id in the recording."""


@dataclass(frozen=True)
class KernelWarps(WarpColumns):
    """The warps of the launches of one kernel, sorted by launch, block and warp, and exits by warp and time.
    `warp_order.sort_warps` makes one.

    Long arrays are columns of `frames/stored.py`, also the computed ones: read them by parts.
    """

    still_running: int = 0
    """Warps that had not exited when the recording ended; the columns do not contain them."""

    def launch_id(self, launch: int) -> int:
        """The id of a launch in the recording; -1 where it has none."""
        if self.launch_ids is None:
            return launch
        return -1 if self.launch_ids.is_nameless[launch] else int(self.launch_ids.id[launch])

    def forget(self) -> None:
        """Drop the computed columns; they are computed again when they are needed."""
        given = {field.name for field in fields(self)}
        for name in set(self.__dict__) - given:
            del self.__dict__[name]
        release()

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
        counts: Ints = np.zeros(self.launch.size, np.int32)
        for part in parts(self.exit_warp.size):
            # Exits are in the order of warps, so the warps of a part are neighbours.
            of = self.exit_warp[part]
            number = np.bincount(of - of[0])
            counts[of[0] : of[0] + number.size] += number.astype(np.int32)
        column: Ints = stored(counts)
        return column

    @cached_property
    def _left_at_once(self) -> bool:
        """Whether each warp has exactly one exit."""
        return bool(self.exit_ns.size == self.launch.size == np.count_nonzero(self.exits))

    @cached_property
    def first_exit(self) -> Ints:
        """The index of each warp's first exit."""
        first: Ints = np.cumsum(self.exits, dtype=np.int32)
        first -= self.exits
        column: Ints = stored(first)
        return column

    @cached_property
    def first_exit_ns(self) -> Ints:
        return self.exit_ns if self._left_at_once else taken(self.exit_ns, self.first_exit)

    @cached_property
    def last_exit_ns(self) -> Ints:
        if self._left_at_once:
            return self.exit_ns
        first, exits = self.first_exit, self.exits
        column: Ints = made(
            self.launch.size, np.int64, lambda part: self.exit_ns[first[part] + exits[part] - 1]
        )
        return column

    @cached_property
    def spread_ns(self) -> Ints:
        """From each warp's first exit to its last one; NOT_RECORDED where only one lane was timed."""
        first, last, exits = self.first_exit_ns, self.last_exit_ns, self.exits

        def spread(part: slice) -> Ints:
            of_part: Ints = last[part] - first[part]
            return np.where(exits[part] > 1, of_part, NOT_RECORDED) if self.lanes_timed else of_part

        column: Ints = made(self.launch.size, np.int64, spread)
        return column

    @cached_property
    def last_thread(self) -> int:
        """The largest thread index in a block of which an exit was recorded; -1 without one."""
        last = -1
        for part in parts(self.exit_mask.size):
            masks = self.exit_mask[part]
            known = np.flatnonzero(masks > 0)
            highest_lane = np.frexp(masks[known].astype(np.float64))[1] - 1
            threads = self.warp[self.exit_warp[part][known]] * LANES + highest_lane
            last = int(threads.max(initial=last))
        return last

    @cached_property
    def life_ns(self) -> Ints:
        """From each warp's entry to its last exit."""
        last_ns = self.last_exit_ns
        column: Ints = made(self.launch.size, np.int64, lambda part: last_ns[part] - self.entry_ns[part])
        return column

    @cached_property
    def launch_starts(self) -> Ints:
        """The first warp of each launch."""
        column: Ints = starts_of(self.launch)
        return column

    @cached_property
    def block_starts(self) -> Ints:
        """The first warp of each block of each launch."""
        column: Ints = starts_of(self.launch, self.block)
        return column

    @cached_property
    def launches(self) -> Ints:
        # The warps are sorted by launch.
        return self.launch[self.launch_starts]

    @cached_property
    def launch_row(self) -> Ints:
        """For each warp the index of its launch in `launches`."""
        column: Ints = stored(
            np.repeat(np.arange(self.launches.size, dtype=np.int32), self._counts(self.launch_starts))
        )
        return column

    def _counts(self, starts: Ints) -> Ints:
        """How many warps there are from each start to the next."""
        return np.diff(starts, append=np.int32(self.launch.size))

    @cached_property
    def clock_step_ns(self) -> int:
        """The least time between two readings that differ: the clock's resolution, at least 1."""
        known = flagged(self.launch.size, lambda part: self.entry_ns[part] != NOT_RECORDED)
        times = _narrow(self.exit_ns, taken(self.entry_ns, known))
        times.sort()
        count, least, first = 0, 1 << 63, list[int]()
        for part in parts(times.size - 1):
            steps = np.diff(times[part.start : part.stop + 1])
            steps = steps[steps > 0]
            first += steps[: max(_FEW_STEPS - count, 0)].tolist()
            count += steps.size
            least = min(least, int(steps.min())) if steps.size else least
        if not count:
            return CLOCK_STEPS_NS[-1]
        if count >= _FEW_STEPS:
            return least
        return next((step for step in CLOCK_STEPS_NS if not any(one % step for one in first)), 1)

    @cached_property
    def begin_ns(self) -> Ints:
        """The first entry of each launch; the first exit, where entries are not known."""
        first_ns = self.entry_ns if self.has_entries else self.first_exit_ns
        begins: Ints = reduced(np.minimum, first_ns, self.launch_starts)
        return begins

    @cached_property
    def launch_ns(self) -> Floats:
        """How long each launch ran: from `begin_ns` to the last exit."""
        spans: Ints = reduced(np.maximum, self.last_exit_ns, self.launch_starts) - self.begin_ns
        return spans.astype(np.float64)

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
        end_ns = reduced(np.maximum, self.last_exit_ns, begins)
        first_ns = reduced(np.minimum, self.last_exit_ns, begins)
        return BlockTimes(
            taken(self.launch, begins),
            taken(self.block, begins),
            taken(self.sm, begins),
            reduced(np.minimum, self.entry_ns, begins),
            end_ns,
            made(begins.size, np.int64, lambda part: end_ns[part] - first_ns[part]),
        )

    @cached_property
    def warps_of_block(self) -> Ints:
        """For each row of `blocks` how many recorded warps it has."""
        return self._counts(self.block_starts)

    @cached_property
    def block_count(self) -> int:
        """How many different blocks of the grid were recorded."""
        return int(distinct(taken(self.block, self.block_starts)).size)

    @cached_property
    def block_bounds(self) -> Ints:
        """The index in `blocks` at which each launch begins, and the end of the last; shape
        `(launches + 1,)`.
        """
        starts = self.block_starts
        return np.append(np.searchsorted(starts, self.launch_starts), starts.size)

    @cached_property
    def apart(self) -> Flags:
        """Flags the warps whose lanes did not all exit at the same reading of the clock."""
        first_ns, last_ns = self.first_exit_ns, self.last_exit_ns
        column: Flags = made(self.launch.size, np.bool_, lambda part: last_ns[part] > first_ns[part])
        return column

    def exit_parts(self) -> Iterator[tuple[slice, slice]]:
        """Yield the warps in parts, as a slice of warps and the slice of their exits."""
        for part in parts(self.launch.size):
            yield part, slice(*np.searchsorted(self.exit_warp, [part.start, part.stop]).tolist())

    def lane_times(self, warps: Ints) -> Floats:
        """When each lane of `warps` exited, after its warp's first exit. Shape `(warps, 32)`, nan where no
        exit was recorded."""
        row = np.full(self.launch.size, -1, np.int32)
        row[warps] = np.arange(warps.size)
        times = np.full((warps.size, LANES), np.nan)
        for part in parts(self.exit_warp.size):
            of = self.exit_warp[part]
            wanted = np.flatnonzero(row[of] >= 0)
            of, masks = of[wanted], self.exit_mask[part][wanted]
            after = (self.exit_ns[part][wanted] - self.first_exit_ns[of]).astype(np.float64)
            for lane in range(LANES):
                left = (masks >> lane) & 1 == 1
                times[row[of[left]], lane] = after[left]
        return times

    def warp_times(self, rows: Ints | None = None) -> Floats:
        """How long each warp of a block took, shape `(blocks, warps)`: its lifetime, or its exit where no
        entry is known. `rows` are some of `blocks`; of many it takes a sample."""
        starts = self.block_starts
        taken_blocks = sample(np.arange(starts.size) if rows is None else rows)
        row = np.full(starts.size, -1, np.int32)
        row[taken_blocks] = np.arange(taken_blocks.size)
        times = np.full((taken_blocks.size, int(self.warp.max()) + 1), np.nan)
        values, origin = (
            (self.life_ns, 0) if self.has_entries else (self.last_exit_ns, self.last_exit_ns.min())
        )
        for part in parts(self.launch.size):
            numbers = np.arange(part.start, part.stop, dtype=np.int32)
            of = row[np.searchsorted(starts, numbers, "right") - 1]
            wanted = of >= 0
            times[of[wanted], self.warp[part][wanted]] = values[part][wanted] - origin
        return times


def _narrow(*columns: Ints) -> Ints:
    """The times of all columns, after the earliest one: in 4 bytes each if they span at most 4 seconds."""
    ends = [end for column in columns if column.size for end in (int(column.min()), int(column.max()))]
    first_ns, last_ns = min(ends, default=0), max(ends, default=0)
    # Differences of sorted unsigned numbers are right, too.
    dtype: type[np.integer[Any]] = np.uint32 if last_ns - first_ns < 1 << 32 else np.int64
    times, at = np.empty(sum(column.size for column in columns), dtype), 0
    for column in columns:
        for part in parts(column.size):
            times[at : at + part.stop - part.start] = column[part] - first_ns
            at += part.stop - part.start
    return times
