"""Blocks with more work than others: every m-th along a side of the grid, or scattered over it.

Both are looked for among blocks that started together, in the same turn, on SMs with equally many blocks.
Neither waves nor the order in which an SM serves its blocks can then make a block look heavy.
"""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.analyses.findings.block_times import (
    MIN_GROUP,
    BlockLateness,
    block_values,
    medians_by,
    started_together,
)
from tracepipe.analyses.findings.finding import Finding, confidence, listed, percent
from tracepipe.analyses.findings.kernel_warps import Flags, KernelWarps
from tracepipe.analyses.findings.ranks import LateClass, late_class_in_rows
from tracepipe.analyses.findings.sampling import MAX_BLOCKS, sample
from tracepipe.analyses.findings.waves import share_saved
from tracepipe.event.groups import number_rows
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.units import duration_text

MIN_DELAY = 0.25
"""The least delay of a class of blocks, as a share of a block's time. Blocks with the same remainder often
run on the same SMs, and SMs differ from each other by up to a tenth."""
MOST_MODULUS = 32
MIN_HEAVY = 8
"""The least number of heavy blocks; fewer are stragglers."""
HEAVY = 2.0
"""The least time of a heavy block, as a multiple of the others' time, in the median of three launches or
more."""
HEAVY_ONCE = 3.0
"""The same for one or two launches, in which chance does not average out."""
MIN_HEAVY_SHARE, MOST_HEAVY_SHARE = 0.01, 0.25
"""The range of the share of heavy blocks. With more, they are a common case, not a tail."""
MIN_SPARED = 0.05
"""The least extra time of the heavy blocks, as a share of the time of all blocks."""

PERIOD_CAUSE = (
    "work that depends on the block's index modulo this number: rows or tiles of two sizes, a reduction that "
    "these blocks finish, or conflicts of the memory that they address"
)
HEAVY_CAUSE = (
    "data that gives some blocks more work (longer rows, fuller bins, more iterations): split the heavy "
    "ones, start them first, or let blocks fetch their work from a queue"
)


def periods(kernel: KernelWarps, late: BlockLateness, alpha: float) -> list[Finding]:
    """Return a finding about blocks whose index modulo a number is late, along the side of the grid with the
    smallest p value.

    `late` is the lateness by turn and border: a class of blocks may contain a part of the border. `alpha` is
    divided among the sides of the grid.
    """
    rows = sample(np.arange(late.blocks.size), MAX_BLOCKS)
    profile, blocks, group = late.profile_ns[rows], late.blocks[rows], number_rows(late.group[rows])[0]
    sides = [side for side in _sides(blocks, kernel.grid) if side.size >= 2 * MIN_GROUP]
    least_ns = max(MIN_DELAY * float(np.median(block_values(kernel))), kernel.least_ns)
    found = []
    for side in sides:
        most = min(MOST_MODULUS, side.size // 2, blocks.size // MIN_GROUP)
        seen = late_class_in_rows(profile, group, side.place, range(2, most + 1))
        if seen is not None and seen.p_value * len(sides) <= alpha and seen.delay >= least_ns:
            found.append(_Period(seen.p_value * len(sides), -seen.delay, side.name, seen))
    if not found:
        return []
    period = min(found, key=lambda period: period[:3])
    is_late = np.isin(late.profile_row, rows[period.late.members])
    return [_period(kernel, period, np.flatnonzero(is_late))]


class _Period(NamedTuple):
    p_value: float
    minus_delay_ns: float
    side: str
    late: LateClass


class _Side(NamedTuple):
    name: str
    size: int
    place: Ints


def _sides(blocks: Ints, grid: tuple[int, int, int] | None) -> list[_Side]:
    """The sides of the grid and the index of each block along them; one side where the grid is not known."""
    if grid is None or 0 in grid:
        return [_Side("block", int(blocks.max()) + 1, blocks)]
    sides, rest = [], blocks
    for name, size in zip(("blockIdx.x", "blockIdx.y", "blockIdx.z"), grid, strict=True):
        sides.append(_Side(name, size, rest % size))
        rest = rest // size
    return sides


def _period(kernel: KernelWarps, period: _Period, rows: Ints) -> Finding:
    life, delay = float(np.median(block_values(kernel))), -period.minus_delay_ns
    late, blocks = period.late, kernel.block_count
    evidence = (
        f"Blocks with {period.side} mod {late.modulus} = {' or '.join(map(str, late.residues))} take "
        f"{duration_text(delay)} longer than others that started with them, "
        f"{percent(delay / max(life, 1.0))} of a block's time, of {blocks:,} blocks "
        f"({confidence(period.p_value)})"
    )
    numbers = {
        "across": "block period",
        "side": period.side,
        "modulus": late.modulus,
        "residues": late.residues,
        "delay_p50_ns": delay,
        "delay_share": delay / max(life, 1.0),
        "blocks_total": blocks,
    }
    saves = share_saved(kernel, delay, rows)
    return Finding("imbalance", kernel.kernel, evidence, PERIOD_CAUSE, period.p_value, numbers, saves)


def heavy(kernel: KernelWarps, late: BlockLateness) -> list[Finding]:
    """Return a finding about scattered blocks that take several times as long as those that started with
    them. They are counted; no p value is needed.
    """
    values, group = block_values(kernel), started_together(kernel, by_turn=True)
    usual = np.maximum(medians_by(values, group), 1.0)
    times = medians_by(values / usual[group], late.profile_row)
    least = HEAVY if kernel.launches.size > 2 else HEAVY_ONCE
    is_heavy: Flags = (times >= least) & (late.profile_ns >= kernel.least_ns)
    count, of = int(is_heavy.sum()), late.blocks.size
    # Their extra time as a share of all blocks' time in a launch.
    spared = float(late.profile_ns[is_heavy].sum()) / max(float(values.sum()) / kernel.launches.size, 1.0)
    if count < MIN_HEAVY or not MIN_HEAVY_SHARE <= count / of <= MOST_HEAVY_SHARE or spared < MIN_SPARED:
        return []
    ratio = float(np.median(times[is_heavy]))
    evidence = (
        f"{count:,} of {of:,} blocks ({listed(late.blocks[is_heavy].tolist(), 4)}) take at least {least:.0f} "
        f"times, in the median {ratio:.1f} times, as long as others that started with them: "
        f"{percent(spared)} of the time of all blocks"
    )
    numbers = {
        "across": "blocks",
        "heavy_blocks": count,
        "blocks_total": of,
        "heavy_p50_ratio": ratio,
        "excess_share": spared,
    }
    return [Finding("imbalance", kernel.kernel, evidence, HEAVY_CAUSE, None, numbers, spared)]
