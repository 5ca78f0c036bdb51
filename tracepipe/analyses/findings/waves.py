"""Waves: a last wave of blocks that leaves most of the GPU idle, and warps of a block that run one after the
other.

How many blocks fit on an SM is observed, not computed: it is the most that an SM held at a time. This is a
limit only where the SMs were full before the first block ended. A kernel whose blocks end faster than they
are launched has no waves, and no finding.

Of kernels of which few warps were recorded, each warp is listed, and the order in which they exited. Chance
can explain any pattern in so few warps, so that is an observation, not a finding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tracepipe.analyses.findings import statistics
from tracepipe.analyses.findings.block_times import block_life_ns, block_values
from tracepipe.analyses.findings.finding import (
    FALSE_ALARM_RATE,
    MIN_EXIT_ONLY_NS,
    Finding,
    confidence,
    percent,
)
from tracepipe.analyses.findings.kernel_warps import LANES, NOT_RECORDED, KernelWarps
from tracepipe.event.columns import Ints, distinct
from tracepipe.event.groups import RowsByNumber
from tracepipe.event.intervals import most_at_once
from tracepipe.libraries import np
from tracepipe.units import agree, counted, duration_text

MIN_IDLE_SLOTS = 0.10
"""The least idle share of the kernel's block slots over its whole duration. With any grid, the last blocks do
not end together: a kernel of ten waves loses half a wave in twenty by that."""
MIN_FILLED = 0.9
"""The least share of slots with a block before blocks began to end: with less, launching takes the time."""
MIN_RECORDED = 0.95
"""The least share of the grid's blocks that were recorded: lost ones look like idle slots."""
MOST_LAUNCHES = 16
"""The number of launches that are analyzed, the first ones: launches of one grid have the same waves."""
MIN_ORDER = 0.8
"""The least mean rank correlation of warp index and exit in a block: nearly 1 for warps that run in turn."""
MIN_IN_ORDER_SHARE = 0.5
"""The least time from the exit of the first warp to that of the last, as a share of a warp's lifetime: a
smaller one is the order in which the warps were started."""
MIN_WARPS = 2

WAVE_CAUSE = (
    "a grid that is not a multiple of the blocks that fit on the GPU at a time; take smaller blocks, a grid "
    "of whole waves, or a fixed grid whose blocks loop over the work"
)
CLUSTER_CAUSE = (
    "clusters of blocks, which fit only where a group of SMs (GPC) has place for all blocks of one, so that "
    "SMs stay unused; take smaller clusters or blocks, or a grid of whole waves of the SMs that are used"
)
UNUSED_CAUSE = "; SMs stay unused where clusters of blocks do not fit, or where something else holds them"
ORDER_CAUSE = (
    "a resource that lets only one warp run at a time: registers or shared memory that hold too few warps, a "
    "lock, atomics on one address, or a pipeline that all warps share"
)


class Waves(NamedTuple):
    """How one launch used its block slots."""

    waves: float
    blocks_per_sm: int
    sms: int
    filled: float
    """The share of the slots that had a block before a tenth of the first blocks had ended."""
    idle_share: float
    """The share of slots × duration that was empty after the last block had started."""
    tail_ns: int
    duration_ns: int


def lacks(kernel: KernelWarps) -> str | None:
    """Why neither waves nor the order of warps can be looked for; None where one of them can."""
    in_order = kernel.warps_of_a_block >= MIN_WARPS
    if (not kernel.has_entries or not kernel.has_sms) and not in_order:
        return "no entries or no SMs were recorded, and a block has one warp"
    return None


def find(kernel: KernelWarps, alpha: float) -> list[Finding]:
    """Return at most one finding of a partial last wave and one of warps that run in order."""
    findings = _in_order(kernel, alpha)
    if kernel.has_entries and kernel.has_sms and kernel.blocks_known:
        findings = _partial(kernel) + findings
    return findings


def launch_waves(kernel: KernelWarps, launch: int) -> Waves:
    """The waves of one launch, of which entries and SMs must be recorded."""
    rows = slice(*kernel.block_bounds[launch : launch + 2].tolist())
    entry, end = kernel.blocks.entry_ns[rows], kernel.blocks.end_ns[rows]
    of_sms = RowsByNumber(kernel.blocks.sm[rows])
    sms = of_sms.numbers.size
    # A block that ends when it begins still holds its slot for 1 ns.
    held = max(most_at_once(entry[own], np.maximum(end[own], entry[own] + 1)) for _, own in of_sms)
    first_ends = np.sort(end[np.argsort(entry, kind="stable")[: held * sms]])
    filled = float((entry < first_ends[first_ends.size // 10]).sum()) / (held * sms)
    last_entry, finish = int(entry.max()), int(end.max())
    span = finish - int(entry.min())
    busy = int(np.clip(end - last_entry, 0, None).sum())
    tail = finish - last_entry
    idle = (held * sms * tail - busy) / max(held * sms * span, 1)
    return Waves(entry.size / (held * sms), held, sms, filled, idle, tail, span)


def mean_active_warps(kernel: KernelWarps) -> float | None:
    """The active warps of an SM that had any, the mean over a launch's duration; None where entries, exits or
    SMs were not recorded.
    """
    if not (kernel.has_exits and kernel.has_entries and kernel.has_sms):
        return None
    return float(kernel.life_ns.sum() / max(kernel.launch_ns.sum(), 1) / launch_waves(kernel, 0).sms)


def usual_waves(kernel: KernelWarps) -> Waves:
    """The waves of the launch with the median idle share, among the first launches. Entries and SMs must be
    recorded.

    Slots that only other launches used count too: something else may have occupied them. Of an even number
    the launch with less idle time is taken, so a cause that is seen holds for most of them.
    """
    seen = [launch_waves(kernel, launch) for launch in range(min(kernel.launches.size, MOST_LAUNCHES))]
    usual = sorted(seen, key=lambda w: w.idle_share)[(len(seen) - 1) // 2]
    held = max(waves.blocks_per_sm for waves in seen)
    sms = distinct(kernel.blocks.sm[: int(kernel.block_bounds[len(seen)])]).size
    blocks = usual.waves * usual.blocks_per_sm * usual.sms
    return usual._replace(waves=blocks / (held * sms), blocks_per_sm=held, sms=sms)


def share_saved(kernel: KernelWarps, delay_ns: float, rows: Ints) -> float:
    """The most that a fix of the delay of these rows of `KernelWarps.blocks` could save, as a share of a
    launch: the time that it takes from all blocks, and the slots that are empty at the end, as with evenly
    distributed work none is."""
    idle_share = usual_waves(kernel).idle_share if kernel.has_sms and kernel.has_entries else 0.0
    return delay_ns * rows.size / max(float(block_values(kernel).sum()), 1.0) + idle_share


def _partial(kernel: KernelWarps) -> list[Finding]:
    recorded_blocks = kernel.block_count
    # No grid has a size of 0: such a product means that the grid is not known.
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
    unused = max((kernel.sm_count or 0) - waves.sms, 0)
    cluster = kernel.cluster_of(kernel.launch_id(int(kernel.launches[0]))) if unused else 1
    share = waves.tail_ns / max(waves.duration_ns, 1)
    clustered = f" in clusters of {cluster}" if cluster > 1 else ""
    sms = f"{waves.sms} of {kernel.sm_count} SMs" if unused else counted(waves.sms, "SM|SMs")
    evidence = (
        f"{blocks:,} blocks{clustered} run {waves.blocks_per_sm} at a time on each of "
        f"{sms}, in "
        f"{waves.waves:.2f} waves: the last one fills {percent(last)} of the slots and takes "
        f"{duration_text(waves.tail_ns)}, {percent(share)} of the kernel's duration; this leaves "
        f"{percent(waves.idle_share)} of the slots' time idle"
    )
    numbers = {
        "of": "blocks",
        "waves": waves.waves,
        "blocks": blocks,
        "blocks_per_sm": waves.blocks_per_sm,
        "sms": waves.sms,
        "sms_of_gpu": kernel.sm_count,
        "blocks_per_cluster": cluster if cluster > 1 else None,
        "last_wave_fill": last,
        "tail_ns": waves.tail_ns,
        "tail_share": share,
        "idle_slot_share": waves.idle_share,
    }
    cause = CLUSTER_CAUSE if cluster > 1 else WAVE_CAUSE + UNUSED_CAUSE * (unused > 0)
    return [Finding("wave", kernel.kernel, evidence, cause, None, numbers, waves.idle_share)]


def _in_order(kernel: KernelWarps, alpha: float) -> list[Finding]:
    if kernel.warps_of_a_block < MIN_WARPS:
        return []
    times = kernel.warp_times()
    times = times[~np.isnan(times).any(axis=1)]
    rows, warps = times.shape
    if not rows:
        return []
    # Spearman's correlation in each block has variance 1/(warps-1) if the order is random.
    ranks = statistics.ranks_in_rows(times.reshape(-1), np.repeat(np.arange(rows), warps)).reshape(rows, -1)
    index = np.arange(warps) - (warps - 1) / 2
    correlation = float((ranks @ index).mean() / (index @ index))
    span = float(np.median(times[:, -1] - times[:, 0]))
    step = span / (warps - 1)
    least = kernel.least_ns if kernel.has_entries else MIN_EXIT_ONLY_NS
    if correlation < MIN_ORDER or step < least or span < MIN_IN_ORDER_SHARE * kernel.warp_scale_ns:
        return []
    # With few warps in few blocks, the p value cannot be below the chance of one order among all.
    least_p = math.exp(-rows * math.lgamma(warps + 1))
    p_value = max(float(statistics.normal_above(correlation * np.sqrt((warps - 1) * rows))), least_p)
    if p_value > alpha:
        return []
    evidence = (
        f"The {warps} warps of a block exit one after the other, {duration_text(step)} apart, "
        f"{duration_text(span)} from the first to the last: seen in {rows:,} {agree(rows, 'block|blocks')} "
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
    saves = span / max(block_life_ns(kernel), 1.0)
    return [Finding("wave", kernel.kernel, evidence, ORDER_CAUSE, p_value, numbers, saves)]


FEW = 8


class OneWarp(NamedTuple):
    """One of a few warps. None: not recorded, or the warp does not have that thread."""

    launch: int | None
    block: int | None
    warp: int
    leaves_ns: int
    """Its first exit, after the first exit of its launch."""
    spread_ns: int | None
    """From its first exit to its last one."""
    last_lane: int | None
    """The lane that exited last, where one lane alone did."""
    first_thread_ns: int | None
    """When the first thread of the grid exited, after the median lane of its warp."""
    last_thread_ns: int | None
    """The same of the grid's last thread."""


def one_by_one(kernel: KernelWarps) -> list[OneWarp]:
    """Return each warp of a kernel that has at most FEW, else none."""
    if not kernel.has_exits or kernel.launch.size > FEW:
        return []
    rows = []
    for at, times in enumerate(kernel.lane_times(np.arange(kernel.launch.size))):
        same = kernel.launch == kernel.launch[at]
        spread = int(kernel.spread_ns[at])
        has_launch = kernel.launch_ids is not None or np.unique(kernel.launch).size > 1
        known = np.flatnonzero(~np.isnan(times))
        latest = known[times[known] == times[known].max(initial=0)]
        block, thread = int(kernel.block[at]), int(kernel.warp[at]) * LANES
        last_block = math.prod(kernel.grid) - 1 if kernel.grid else int(kernel.block.max())
        # The lanes of the first and of the last thread of the grid, where this warp has them.
        first_lane = 0 if block == thread == 0 else -1
        last_lane = kernel.last_thread - thread if block == last_block else -1
        after = times - np.nanmedian(times) if kernel.blocks_known and known.size > 1 else times * np.nan
        first_ns, last_ns = (
            round(float(after[lane])) if 0 <= lane < LANES and not np.isnan(after[lane]) else None
            for lane in (first_lane, last_lane)
        )
        rows.append(
            OneWarp(
                kernel.launch_id(int(kernel.launch[at])) if has_launch else None,
                block if kernel.blocks_known else None,
                int(kernel.warp[at]),
                int(kernel.first_exit_ns[at] - kernel.first_exit_ns[same].min()),
                None if spread == NOT_RECORDED else spread,
                int(latest[0]) if latest.size == 1 < known.size else None,
                first_ns,
                last_ns,
            )
        )
    return rows


def order_of_exits(kernel: KernelWarps) -> str | None:
    """A sentence about the warps of each launch that exited one after the other, where there are too few of
    them to exclude chance; else None.
    """
    count = kernel.launch.size // max(kernel.launches.size, 1)
    if not kernel.has_exits or kernel.rows_mixed or not 1 < count <= FEW:
        return None
    if (np.unique(kernel.launch, return_counts=True)[1] != count).any():
        return None
    # After the first one, as ns since 1970 have more digits than a float.
    left = (kernel.first_exit_ns - kernel.first_exit_ns.min()).reshape(-1, count).astype(np.float64)
    gaps = np.diff(left, axis=1)
    step = float(np.median(gaps))
    spread = np.where(kernel.spread_ns == NOT_RECORDED, 0, kernel.spread_ns)
    orders = math.factorial(count) ** min(kernel.launches.size, FEW)
    if (
        gaps.min() <= 0
        or step < max(kernel.least_ns, float(np.median(spread)))
        or 1 / orders <= FALSE_ALARM_RATE
    ):
        return None
    launches = kernel.launches.size
    seen = "one launch" if launches == 1 else f"{launches} launches"
    span = float(np.median(left[:, -1] - left[:, 0]))
    return (
        f"The {count} warps of a launch exit one after the other, {duration_text(step)} apart, "
        f"{duration_text(span)} from the first to the last: seen in {seen}, where chance alone gives such an "
        f"order once in {orders}. If it recurs, the usual cause is {ORDER_CAUSE}."
    )
