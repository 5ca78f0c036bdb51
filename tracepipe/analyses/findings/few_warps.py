"""Kernels of which few warps were recorded: what each warp did, and the order in which they exited.

Chance can explain any pattern in so few warps, so they are listed as an observation, not as a finding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tracepipe.analyses.findings.finding import FALSE_ALARM_RATE
from tracepipe.analyses.findings.kernel_warps import LANES, NOT_RECORDED, KernelWarps
from tracepipe.analyses.findings.waves import ORDER_CAUSE
from tracepipe.reports.frames.arrays import Floats
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
    times = kernel.lane_times(np.arange(kernel.launch.size))
    rows = []
    for at in range(kernel.launch.size):
        same = kernel.launch == kernel.launch[at]
        spread = int(kernel.spread_ns[at])
        known = kernel.launch_ids is not None or np.unique(kernel.launch).size > 1
        rows.append(
            OneWarp(
                kernel.launch_id(int(kernel.launch[at])) if known else None,
                int(kernel.block[at]) if kernel.blocks_known else None,
                int(kernel.warp[at]),
                int(kernel.first_exit_ns[at] - kernel.first_exit_ns[same].min()),
                None if spread == NOT_RECORDED else spread,
                _last_lane(times[at]),
                *_ends(kernel, at, times[at]),
            )
        )
    return rows


def _last_lane(times: Floats) -> int | None:
    known = np.flatnonzero(~np.isnan(times))
    latest = known[times[known] == times[known].max(initial=0)]
    return int(latest[0]) if latest.size == 1 < known.size else None


def _ends(kernel: KernelWarps, at: int, times: Floats) -> tuple[int | None, int | None]:
    """When the first and the last thread of the grid exited, after the median lane of their warp; None where
    this warp does not have that thread.
    """
    if not kernel.blocks_known or (~np.isnan(times)).sum() < 2:
        return None, None
    block, thread = int(kernel.block[at]), int(kernel.warp[at]) * LANES
    after = times - np.nanmedian(times)
    of_first = block == 0 and thread == 0
    lane = kernel.last_thread - thread
    last_block = math.prod(kernel.grid) - 1 if kernel.grid else int(kernel.block.max())
    of_last = block == last_block and 0 <= lane < LANES
    return _at(after, 0) if of_first else None, _at(after, lane) if of_last else None


def _at(after: Floats, lane: int) -> int | None:
    return None if np.isnan(after[lane]) else round(float(after[lane]))


def order_seen(kernel: KernelWarps) -> str | None:
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
