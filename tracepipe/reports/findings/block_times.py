"""How late each block is against its launch, pooled over the launches of a kernel."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from tracepipe.reports.findings.kernel_warps import Flags, Floats, Ints, KernelWarps
from tracepipe.reports.findings.tail import MIN_VALUES
from tracepipe.reports.frames.grouping import batches, in_buckets, numbered
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import empty, made, parts, release

MIN_WAVE = 8
"""Blocks that make a median to compare with."""
MIN_GROUP = 8
"""Fewer border or inner blocks make no group."""
MIN_BLOCKS_OF_SM = 3
"""Different blocks that an SM must have run: of fewer it is not known whether block or SM is the reason."""


class BlockLateness(NamedTuple):
    """For each row of `KernelWarps.blocks` and for each block of the grid, how much longer it took than
    others."""

    rows_ns: Floats
    blocks: Ints
    """The linear index of each block that ran."""
    profile_ns: Floats
    """The median over launches, for each of `blocks`: chance in single launches averages out."""
    profile_row: Ints
    """For each row the index of its block in `blocks`."""


def lacks_blocks(kernel: KernelWarps) -> str | None:
    """Why it cannot be said whether blocks differ by chance; None where it can."""
    if not kernel.blocks_known:
        return "blocks were not recorded"
    if kernel.block_count < MIN_VALUES:
        return f"fewer than {MIN_VALUES} blocks"
    return None


def block_values(kernel: KernelWarps) -> Floats:
    """How long each block took: from its first entry to its last exit; the exit alone where no entry is
    known."""
    blocks, first_ns = kernel.blocks, 0 if kernel.has_entries else int(kernel.last_exit_ns.min())

    def lengths(part: slice) -> Ints:
        return blocks.end_ns[part] - (blocks.entry_ns[part] if kernel.has_entries else first_ns)

    values: Floats = made(blocks.block.size, np.float64, lengths)
    return values


def lateness(kernel: KernelWarps, by_wave: bool = True, by_turn: bool = False) -> BlockLateness:
    """The lateness of every block.

    Against the blocks of its launch that started with it, as those of the first wave find cold caches and
    those of the last have the GPU to themselves; with `by_turn` in the same turn on their SMs; against the
    whole launch where `by_wave` is False or entries are not known. Medians are taken within launches first,
    then over launches.
    """
    with_waves = by_wave and kernel.has_entries
    group = started_together(kernel, by_turn) if with_waves else numbered(kernel.blocks.launch)[1]
    rows_ns = without_medians(block_values(kernel), group)
    blocks, profile_row = numbered(kernel.blocks.block)
    return BlockLateness(rows_ns, blocks, medians_by(rows_ns, profile_row), profile_row)


def share_of_blocks_time(kernel: KernelWarps, delay_ns: float, blocks: int) -> float:
    """The share of all blocks' time that `blocks` of each launch take by being late."""
    of_launch = float(block_values(kernel).sum()) / kernel.launches.size
    return delay_ns * blocks / max(of_launch, 1.0)


def started_together(kernel: KernelWarps, by_turn: bool = False) -> Ints:
    """For each block a number of the wave that it started in, 0, 1, … through all launches.

    The first wave of a launch are the blocks that started before any of it had ended, the second those of the
    rest that started before any of the rest had ended, and so on. Waves of a few blocks count with the wave
    before. `by_turn`: those of a wave that were the first on their SM are apart from the second ones, and so
    on, and from those of SMs with more or fewer blocks, where SMs are known. An SM that has too
    much to do serves its oldest block first: on an H200 the four of a kernel of multiplications entered
    within 0.7 µs and took 8.6, 13.4, 18.5 and 23.2 µs, in every launch.
    """
    blocks = kernel.blocks
    wave: Ints = empty(blocks.block.size, np.int32)
    number = -1
    for first, last in pairwise(kernel.block_bounds.tolist()):
        number += 1
        wave[first:last] = number
        if last - first > MIN_WAVE:
            number = _waves(blocks.entry_ns[first:last], blocks.end_ns[first:last], wave[first:last])
        if by_turn and kernel.has_sms:
            number = _turns(blocks.sm[first:last], blocks.entry_ns[first:last], wave[first:last])
    release()
    return wave


def _waves(entry_ns: Ints, end_ns: Ints, wave: Ints) -> int:
    """Number the waves of a launch from the number on that `wave` has; returns the last number."""
    number, count = int(wave[0]), wave.size
    rows = np.argsort(entry_ns, kind="stable")
    starts_ns, first_end = entry_ns[rows], end_ns[rows][::-1]
    # The earliest end from each row on: ends come in no order.
    first_end = np.minimum.accumulate(first_end, out=first_end)[::-1]
    at = 0
    while at < count:
        upto = max(int(np.searchsorted(starts_ns, first_end[at], side="left")), at + 1)
        if count - upto < MIN_WAVE:
            upto = count
        number += at > 0 and upto - at >= MIN_WAVE
        wave[rows[at:upto]] = number
        at = upto
    return number


def _turns(sm: Ints, entry_ns: Ints, wave: Ints) -> int:
    """Number the turns of the waves of a launch, apart by how many blocks an SM has, from the first wave's
    number on; returns the last number."""
    first = int(wave.min())
    rows = np.lexsort((entry_ns, sm, wave))
    begins = np.flatnonzero(np.diff(wave[rows], prepend=-1) | np.diff(sm[rows], prepend=-1))
    held = np.diff(begins, append=rows.size)
    turn = np.arange(rows.size) - np.repeat(begins, held)
    key = (wave[rows] * np.int64(held.max() + 1) + np.repeat(held, held)) * np.int64(held.max()) + turn
    _, numbers = np.unique(key, return_inverse=True)
    wave[rows] = first + numbers
    return first + int(numbers.max())


def medians_by(values: Floats, groups: Ints) -> Floats:
    """The median of `values` in each group 0…n-1; every group has one value or more."""
    count = 1 + max((int(groups[part].max()) for part in parts(groups.size)), default=-1)
    bounds, (grouped,) = in_buckets(groups, count, values)
    medians: Floats = empty(count, np.float64)
    for some in batches(bounds):
        counts = np.diff(bounds[some.start : some.stop + 1])
        first = np.cumsum(counts) - counts
        own = grouped[bounds[some.start] : bounds[some.stop]]
        ordered = np.sort(own) if len(counts) == 1 else own[np.lexsort((own, np.repeat(first, counts)))]
        medians[some] = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2
    return medians


def without_medians(values: Floats, groups: Ints) -> Floats:
    """The values less the median of their group."""
    medians = medians_by(values, groups)
    rest: Floats = made(values.size, np.float64, lambda part: values[part] - medians[groups[part]])
    return rest


def at_border(blocks: Ints, grid: tuple[int, int, int] | None) -> Flags:
    """Which linear block indices are first or last along a side of the grid that has more than two."""
    sizes = () if grid is None or 0 in grid else grid

    def is_there(part: slice) -> Flags:
        border, rest = np.zeros(part.stop - part.start, np.bool_), blocks[part]
        for size in sizes:
            if size > 2:
                border |= (rest % size == 0) | (rest % size == size - 1)
            rest = rest // size
        return border

    border: Flags = made(blocks.size, np.bool_, is_there)
    return border
