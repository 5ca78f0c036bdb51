"""Kernels of which few warps were recorded: what each warp did, and the order in which they exited.

Chance can explain any pattern in so few warps, so they are listed as an observation, not as a finding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tracepipe.analyses.findings.finding import FALSE_ALARM_RATE
from tracepipe.analyses.findings.kernel_warps import LANES, NOT_RECORDED, KernelWarps
from tracepipe.analyses.findings.waves import ORDER_CAUSE
from tracepipe.reports.frames.libraries import np
from tracepipe.units import duration_text

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
