"""How late each block is compared with its launch, pooled over the launches of a kernel."""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.analyses.findings.kernel_warps import KernelWarps
from tracepipe.analyses.findings.statistics import medians_by
from tracepipe.event.columns import Bools, Floats, Ints
from tracepipe.event.groups import number_rows
from tracepipe.libraries import np

MIN_VALUES = 16
"""The least number of values that have a tail."""
MIN_GROUP = 8
"""The least number of border blocks, and of inner ones, that form a group."""
MIN_BLOCKS_OF_SM = 3
"""The least number of different blocks of an SM: with fewer, either the blocks or the SM may be the cause."""


class BlockLateness(NamedTuple):
    """How much longer each row of `KernelWarps.blocks`, and each block of the grid, took than others."""

    rows_ns: Floats
    blocks: Ints
    """The linear index of each block that ran."""
    profile_ns: Floats
    """For each of `blocks` the median over launches, in which the chance of single launches averages out."""
    profile_row: Ints
    """For each row the index of its block in `blocks`."""
    group: Ints
    """For each of `blocks` the number, from 0, of the group in which it was compared, in its last launch."""


def lacks_blocks(kernel: KernelWarps) -> str | None:
    """Why blocks cannot be compared; None where they can."""
    if not kernel.blocks_known:
        return "blocks were not recorded"
    if kernel.block_count < MIN_VALUES:
        return f"fewer than {MIN_VALUES} blocks"
    return None


def block_values(kernel: KernelWarps) -> Floats:
    """How long each block took, from its first entry to its last exit, shape `(blocks,)`. Where no entry is
    known, it is the time of its last exit after the kernel's first one."""
    begin_ns = kernel.blocks.entry_ns if kernel.has_entries else kernel.done_ns.min()
    return (np.maximum.reduceat(kernel.done_ns, kernel.block_starts) - begin_ns).astype(np.float64)


def block_life_ns(kernel: KernelWarps) -> float:
    """The median time of a block, from its first entry to its last exit; 0 where entries are not known."""
    return float(np.median(block_values(kernel))) if kernel.has_entries else 0.0


def lateness(kernel: KernelWarps, by_wave: bool = True, by_border: bool = False) -> BlockLateness:
    """Return the lateness of every block.

    A block is compared with the blocks of its launch that started with it, in the same turn on their SMs, as
    the first wave finds cold caches, and the last has the GPU to itself. With `by_border`, blocks at the
    border of the grid and inner ones are compared with their like. Where `by_wave` is False or entries are
    not known, a block is compared with the whole launch. Medians are taken within launches first, then over
    launches.
    """
    with_waves = by_wave and kernel.has_entries
    group = kernel.turn if with_waves else number_rows(kernel.blocks.launch)[0]
    profile_row, first = number_rows(kernel.blocks.block)
    blocks = kernel.blocks.block[first]
    border = at_border(blocks, kernel.grid)
    if by_border and min(int(border.sum()), int((~border).sum())) >= MIN_GROUP:
        group, _ = number_rows(group, border[profile_row])
    rows_ns = without_medians(block_values(kernel), group)
    last = np.empty(blocks.size, np.int32)
    last[profile_row] = group
    medians_ns = medians_by(rows_ns, profile_row)
    return BlockLateness(rows_ns, blocks, medians_ns, profile_row, number_rows(last)[0])


def beyond_others_ns(kernel: KernelWarps, rows: Ints) -> Floats:
    """How much longer each of these rows of `KernelWarps.blocks` took than any other block that started with
    it, in whatever turn: an SM may serve its blocks in another order once, and end as late."""
    values, wave = block_values(kernel), kernel.wave
    most = np.zeros(int(wave.max()) + 1)
    others = np.ones(values.size, np.bool_)
    others[rows] = False
    np.maximum.at(most, wave[others], values[others])
    beyond: Floats = values[rows] - most[wave[rows]]
    return beyond


def end_delayed_ns(kernel: KernelWarps, rows: Ints, excess_ns: Floats) -> float:
    """The most by which the launches of these rows of `KernelWarps.blocks` would end earlier, in the median,
    if the blocks did not take `excess_ns` longer: they would end earlier, and so would blocks that started
    since, as they may have waited for a slot. Shapes of `rows` and `excess_ns`: `(n,)`."""
    blocks, bounds = kernel.blocks, kernel.block_bounds
    launch = np.repeat(np.arange(kernel.launches.size), np.diff(bounds))
    earlier = np.zeros(blocks.block.size, np.int64)
    earlier[rows] = np.maximum(excess_ns, 0).astype(np.int64)
    if kernel.has_entries:
        most = np.maximum.reduceat(earlier, bounds[:-1])
        due_ns = np.full(most.size, np.iinfo(np.int64).max)
        np.minimum.at(due_ns, launch[rows], (blocks.end_ns - earlier)[rows])
        earlier += np.where(blocks.entry_ns >= due_ns[launch], most[launch], 0)
    first = bounds[:-1]
    delayed = np.maximum.reduceat(blocks.end_ns, first) - np.maximum.reduceat(blocks.end_ns - earlier, first)
    return float(np.median(delayed[np.unique(launch[rows])]))


def first_wave(kernel: KernelWarps) -> Ints:
    """The rows of `KernelWarps.blocks` that started before any block of their launch had ended; all where
    entries are not known."""
    if not kernel.has_entries:
        return np.arange(kernel.blocks.block.size)
    # The waves of a launch follow those of the launch before.
    first = np.minimum.reduceat(kernel.wave, kernel.block_bounds[:-1])
    return np.flatnonzero(kernel.wave == np.repeat(first, np.diff(kernel.block_bounds)))


def without_medians(values: Floats, groups: Ints) -> Floats:
    """The values less the median of their group, shape `(n,)`."""
    rest: Floats = values - medians_by(values, groups)[groups]
    return rest


def at_border(blocks: Ints, grid: tuple[int, int, int] | None) -> Bools:
    """Flags linear block indices at an end of a side of the grid with more than two blocks. Shapes `(n,)`."""
    border = np.zeros(blocks.size, np.bool_)
    for size in () if grid is None or 0 in grid else grid:
        if size > 2:
            border |= (blocks % size == 0) | (blocks % size == size - 1)
        blocks = blocks // size
    return border
