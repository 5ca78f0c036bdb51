"""Waves: a last wave of blocks that leaves most of the GPU idle, and warps of a block that run one after the
other.

How many blocks fit at once is seen, not computed: the most that an SM held. It is only a limit where SMs were
full before the first block left; a kernel whose blocks end faster than they are launched has no waves, and
nothing is said.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from tracepipe.reports.findings.finding import MIN_EXIT_ONLY_NS, Finding, confidence, percent
from tracepipe.reports.findings.kernel_warps import Ints, KernelWarps
from tracepipe.reports.frames import statistics
from tracepipe.reports.frames.grouping import in_buckets, numbered
from tracepipe.reports.frames.intervals import most_at_once
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import parts
from tracepipe.units import duration_text

MIN_IDLE_SLOTS = 0.10
"""Of the kernel's block slots over its whole duration. Whatever the grid, the last blocks do not end
together: a kernel of ten waves loses half a wave in twenty by that."""
MIN_FILLED = 0.9
"""Of the slots, before blocks began to leave: else it is the launching that takes the time."""
MIN_RECORDED = 0.95
"""Of the grid's blocks: what was lost looks like idle slots."""
MOST_LAUNCHES = 16
"""Launches that are looked at, the first ones; launches of one grid have the same waves."""
MIN_ORDER = 0.8
"""Mean rank correlation of warp and exit in a block: warps that run one after the other have nearly 1."""
MIN_IN_ORDER_SHARE = 0.5
"""From the first warp to the last, of what a warp takes: less is the order in which warps were started."""
MIN_WARPS = 2

WAVE_CAUSE = (
    "a grid that is not a multiple of the blocks that fit at once; take smaller blocks, a grid of whole "
    "waves, or a fixed grid whose blocks loop over the work"
)
ORDER_CAUSE = (
    "a resource that lets one warp run at a time: registers or shared memory that too few of them fit in, a "
    "lock, atomics on one address, or a pipeline that all share"
)


class Waves(NamedTuple):
    """What one launch showed of its block slots."""

    waves: float
    blocks_per_sm: int
    sms: int
    filled: float
    """Share of the slots that had got a block before a tenth of the first blocks had left."""
    idle_share: float
    """Of slots × duration: what was empty after the last block had started."""
    tail_ns: int
    duration_ns: int


def lacks(kernel: KernelWarps) -> str | None:
    """What of the input is missing to see waves; None where warps in order at least can be seen."""
    if not kernel.has_exits:
        return "no exits were recorded"
    in_order = kernel.warps_of_a_block >= MIN_WARPS
    if (not kernel.has_entries or not kernel.has_sms) and not in_order:
        return "no entries or no SMs were recorded, and a block has one warp"
    return None


def find(kernel: KernelWarps, alpha: float) -> list[Finding]:
    """At most one finding of a partial last wave and one of warps in order."""
    findings = _in_order(kernel, alpha)
    if kernel.has_entries and kernel.has_sms and kernel.blocks_known:
        findings = _partial(kernel) + findings
    return findings


def launch_waves(kernel: KernelWarps, launch: int) -> Waves:
    """The waves of one launch; needs entries and SMs."""
    rows = slice(*kernel.block_bounds[launch : launch + 2].tolist())
    present, sm = numbered(kernel.blocks.sm[rows])
    entry, end, sms = kernel.blocks.entry_ns[rows], kernel.blocks.end_ns[rows], present.size
    held = _most_held(sm, sms, entry, end)
    first_ends = np.sort(end[np.argsort(entry, kind="stable")[: held * sms]])
    filled = float((entry < first_ends[first_ends.size // 10]).sum()) / (held * sms)
    last_entry, finish = int(entry.max()), int(end.max())
    span = finish - int(entry.min())
    busy = sum(int(np.clip(end[part] - last_entry, 0, None).sum()) for part in parts(end.size))
    tail = finish - last_entry
    idle = (held * sms * tail - busy) / max(held * sms * span, 1)
    return Waves(sm.size / (held * sms), held, sms, filled, idle, tail, span)


def usual_waves(kernel: KernelWarps) -> Waves:
    """Those of the launch, of the first ones, that leaves the median share idle; needs entries and SMs."""
    seen = [launch_waves(kernel, launch) for launch in range(min(kernel.launches.size, MOST_LAUNCHES))]
    return sorted(seen, key=lambda w: w.idle_share)[len(seen) // 2]


def _most_held(sm: Ints, sms: int, entry: Ints, end: Ints) -> int:
    """The most blocks that an SM held."""
    bounds, columns = in_buckets(sm, sms, entry, end)
    most = 0
    for first, last in pairwise(bounds.tolist()):
        begun, ended = (column[first:last] for column in columns)
        # One that ends as it begins holds its slot for a moment.
        most = max(most, most_at_once(begun, np.maximum(ended, begun + 1)))
    return most


def _partial(kernel: KernelWarps) -> list[Finding]:
    recorded_blocks = kernel.block_count
    # A size of 0, which no grid has, is none.
    blocks = (math.prod(kernel.grid) if kernel.grid else 0) or recorded_blocks
    waves = usual_waves(kernel)
    whole = int(np.ceil(waves.waves))
    recorded = recorded_blocks / blocks
    by_grid = 1 - waves.waves / whole
    if (
        waves.waves <= 1
        or recorded < MIN_RECORDED
        or waves.filled < MIN_FILLED
        or min(by_grid, waves.idle_share) < MIN_IDLE_SLOTS
    ):
        return []
    last = waves.waves - (whole - 1)
    share = waves.tail_ns / max(waves.duration_ns, 1)
    evidence = (
        f"{blocks:,} blocks run {waves.blocks_per_sm} at a time on each of {waves.sms} SMs, in "
        f"{waves.waves:.2f} waves: the last one fills {percent(last)} of the slots and takes "
        f"{duration_text(waves.tail_ns)}, {percent(share)} of the kernel's duration; by it "
        f"{percent(waves.idle_share)} of the slots' time is idle"
    )
    numbers = {
        "of": "blocks",
        "waves": waves.waves,
        "blocks": blocks,
        "blocks_per_sm": waves.blocks_per_sm,
        "sms": waves.sms,
        "last_wave_fill": last,
        "tail_ns": waves.tail_ns,
        "tail_share": share,
        "idle_slot_share": waves.idle_share,
    }
    return [Finding("wave", kernel.kernel, evidence, WAVE_CAUSE, None, numbers, waves.idle_share)]


def _in_order(kernel: KernelWarps, alpha: float) -> list[Finding]:
    if kernel.warps_of_a_block < MIN_WARPS:
        return []
    times = kernel.warp_times()
    times = times[~np.isnan(times).any(axis=1)]
    rows, warps = times.shape
    if not rows:
        return []
    # Spearman's correlation in each block has variance 1/(warps-1) if the order is random.
    ranks = statistics.ranks(times) - (warps + 1) / 2
    index = np.arange(warps) - (warps - 1) / 2
    correlation = float((ranks @ index).mean() / (index @ index))
    # Of few warps in few blocks, no order is less likely than any other.
    least_p = math.exp(-rows * math.lgamma(warps + 1))
    p_value = max(float(statistics.normal_above(correlation * np.sqrt((warps - 1) * rows))), least_p)
    span = float(np.median(times[:, -1] - times[:, 0]))
    step = span / (warps - 1)
    least = kernel.least_ns if kernel.has_entries else MIN_EXIT_ONLY_NS
    if p_value > alpha or correlation < MIN_ORDER or step < least:
        return []
    if span < MIN_IN_ORDER_SHARE * kernel.warp_scale_ns:
        return []
    evidence = (
        f"The {warps} warps of a block leave one after the other, {duration_text(step)} apart, "
        f"{duration_text(span)} from the first to the last: seen in {rows:,} block{'s' * (rows != 1)} "
        f"(rank correlation {correlation:.2f}, {confidence(p_value)})"
    )
    numbers = {
        "of": "warps",
        "warps_per_block": warps,
        "step_ns": step,
        "span_ns": span,
        "rank_correlation": correlation,
        "blocks": rows,
    }
    of_block = float(np.median(kernel.blocks.end_ns - kernel.blocks.entry_ns)) if kernel.has_entries else 0.0
    saves = span / max(of_block, 1.0)
    return [Finding("wave", kernel.kernel, evidence, ORDER_CAUSE, p_value, numbers, saves)]
