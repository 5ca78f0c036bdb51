"""How late each block is against its launch, pooled over the launches of a kernel."""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.reports.findings.kernel_warps import Flags, Floats, Ints, KernelWarps
from tracepipe.reports.findings.tail import MIN_VALUES
from tracepipe.reports.frames.libraries import np

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
    """Why blocks cannot be told from each other by chance or not; None where they can."""
    if not kernel.blocks_known:
        return "blocks were not recorded"
    if np.unique(kernel.blocks.block).size < MIN_VALUES:
        return f"fewer than {MIN_VALUES} blocks"
    return None


def block_values(kernel: KernelWarps) -> Floats:
    """How long each block took: from its first entry to its last exit; the exit alone where no entry is
    known."""
    blocks = kernel.blocks
    values = blocks.end_ns - (blocks.entry_ns if kernel.has_entries else kernel.last_exit_ns.min())
    return values.astype(np.float64)


def lateness(kernel: KernelWarps, by_wave: bool = True) -> BlockLateness:
    """The lateness of every block.

    Against the blocks of its launch that started with it, as those of the first wave find cold caches and
    those of the last have the GPU to themselves; against the whole launch where `by_wave` is False or entries
    are not known. Medians are taken within launches first, then over launches.
    """
    values = block_values(kernel)
    if by_wave and kernel.has_entries:
        group = started_together(kernel)
    else:
        _, group = np.unique(kernel.blocks.launch, return_inverse=True)
    rows_ns = values - medians_by(values, group)[group]
    blocks, profile_row = np.unique(kernel.blocks.block, return_inverse=True)
    return BlockLateness(rows_ns, blocks, medians_by(rows_ns, profile_row), profile_row)


def started_together(kernel: KernelWarps) -> Ints:
    """For each block a number of the wave that it started in, 0, 1, … through all launches.

    The first wave of a launch are the blocks that started before any of it had ended, the second those of the
    rest that started before any of the rest had ended, and so on. Waves of a few blocks count with the wave
    before.
    """
    blocks = kernel.blocks
    wave = np.zeros(blocks.block.size, np.int64)
    number = -1
    for of_launch in kernel.block_rows:
        rows = of_launch[np.argsort(blocks.entry_ns[of_launch], kind="stable")]
        number += 1
        # The earliest end from each row on: ends come in no order.
        first_end = np.minimum.accumulate(blocks.end_ns[rows][::-1])[::-1]
        at = 0
        while at < rows.size:
            upto = int(np.searchsorted(blocks.entry_ns[rows], first_end[at], side="left"))
            upto = max(upto, at + 1)
            if rows.size - upto < MIN_WAVE:
                upto = rows.size
            number += at > 0 and upto - at >= MIN_WAVE
            wave[rows[at:upto]] = number
            at = upto
    return wave


def medians_by(values: Floats, groups: Ints) -> Floats:
    """The median of `values` in each group 0…n-1; every group has one value or more."""
    order = np.lexsort((values, groups))
    counts = np.bincount(groups)
    first = np.cumsum(counts) - counts
    ordered = values[order]
    medians: Floats = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2
    return medians


def at_border(blocks: Ints, grid: tuple[int, int, int] | None) -> Flags:
    """Which linear block indices are first or last along a side of the grid that has more than two."""
    border = np.zeros(blocks.size, np.bool_)
    if grid is None or 0 in grid:
        return border
    rest = blocks
    for size in grid:
        if size > 2:
            border |= (rest % size == 0) | (rest % size == size - 1)
        rest = rest // size
    return border
