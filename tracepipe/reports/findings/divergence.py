"""Divergence: threads of one warp that leave apart, by mask and by how much.

Where a warp's exits were recorded with their lanes, two exits are two: nothing is inferred, and what counts
is how much of the lanes' time was idle. Where every thread took its own time, noise parts them too, and two
tests must tell: single warps whose lanes fall into groups (`groups`), and lanes that are late in warp after
warp (`ranks`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tracepipe.reports.findings.finding import MIN_SHARE, Finding, confidence, listed, percent
from tracepipe.reports.findings.groups import SPLIT_P, split_p_values
from tracepipe.reports.findings.kernel_warps import LANES, Flags, Floats, Ints, KernelWarps, sample
from tracepipe.reports.findings.ranks import APART_OF_RANGE, centred_ranks, score_classes
from tracepipe.reports.frames.libraries import np, stats
from tracepipe.units import duration_text

MIN_WARPS_SHARE = 0.01
"""Of the warps, at least, must be split where noise is possible: fewer are no property of the kernel."""

CAUSE = (
    "a branch that the lanes of a warp take differently, or loops whose length differs from lane to lane; "
    "the warp runs each path in turn, while lanes that have left stay idle"
)


def lacks(kernel: KernelWarps) -> str | None:
    """What of the input is missing to look for divergence; None where nothing is."""
    if not kernel.has_exits:
        return "no exits were recorded"
    if kernel.lanes_timed and not bool((kernel.exits > 1).any()):
        return "no two threads of one warp were recorded"
    return None


def find(kernel: KernelWarps, alpha: float) -> list[Finding]:
    """At most one finding: how many warps part, which lanes leave last, how much later."""
    apart = np.flatnonzero(kernel.apart & ~_guards(kernel))
    if not apart.size:
        return []
    if not kernel.lanes_timed:
        return _recorded(kernel, apart)
    rows = sample(apart)
    return _timed(kernel, rows, kernel.lane_times(rows), alpha)


def _guards(kernel: KernelWarps) -> Flags:
    """The one warp of a launch's last block that the bounds check `if (i >= n) return` parts: upper lanes
    leave first."""
    guards = np.zeros(kernel.launch.size, np.bool_)
    if kernel.lanes_timed or kernel.grid is None:
        return guards
    last_block = math.prod(kernel.grid) - 1
    candidates = np.flatnonzero(kernel.apart & (kernel.block == last_block))
    _, at, counts = np.unique(kernel.launch[candidates], return_index=True, return_counts=True)
    for warp in candidates[at[counts == 1]]:
        first = int(kernel.first_exit[warp])
        masks = kernel.exit_mask[first : first + int(kernel.exits[warp])]
        upper, rest = int(masks[0]), int(np.bitwise_or.reduce(masks[1:]))
        guards[warp] = rest < (upper & -upper)
    return guards


def _recorded(kernel: KernelWarps, apart: Ints) -> list[Finding]:
    """Exits with masks: idle lane time of all warps, from what was recorded."""
    after = kernel.last_exit_ns[kernel.exit_warp] - kernel.exit_ns
    lanes = np.bitwise_count(kernel.exit_mask.astype(np.uint32)).astype(np.float64)
    counted = np.zeros(kernel.launch.size, np.bool_)
    counted[apart] = True
    idle = float((after * lanes)[counted[kernel.exit_warp]].sum())
    by_warp = np.bincount(kernel.exit_warp, lanes, kernel.launch.size)
    scale = kernel.life_ns if kernel.has_entries else kernel.warp_scale_ns
    idle_share = idle / max(float((by_warp * scale).sum()), 1.0)
    delays, masks = _widest_gaps(kernel, apart)
    if idle_share < MIN_SHARE or np.median(delays) < kernel.least_ns:
        return []
    return [_finding(kernel, apart.size, delays, idle_share, _late(masks), None)]


def _widest_gaps(kernel: KernelWarps, warps: Ints) -> tuple[Floats, Ints]:
    """For each of `warps` the widest gap between two of its exits, and the mask of the lanes that left after
    it."""
    gaps = np.diff(kernel.exit_ns, prepend=kernel.exit_ns[:1])
    gaps[np.diff(kernel.exit_warp, prepend=-1) != 0] = 0
    # The widest gap of each warp comes last in this order.
    order = np.lexsort((gaps, kernel.exit_warp))
    cut = order[np.cumsum(kernel.exits) - 1]
    after = np.arange(gaps.size) >= cut[kernel.exit_warp]
    masks = np.zeros(kernel.launch.size, np.int64)
    np.bitwise_or.at(masks, kernel.exit_warp[after], kernel.exit_mask[after])
    return gaps[cut[warps]].astype(np.float64), masks[warps]


class _Late(NamedTuple):
    mask: int
    share: float


def _late(masks: Ints) -> _Late:
    """The most frequent of `masks` and its share."""
    values, counts = np.unique(masks, return_counts=True)
    return _Late(int(values[counts.argmax()]), float(counts.max() / masks.size))


def _timed(kernel: KernelWarps, rows: Ints, times: Floats, alpha: float) -> list[Finding]:
    """A time from every thread: lanes that are late again and again, or else warps that are split."""
    found = _recurring(times, alpha / 2)
    if found is None and not kernel.rows_mixed:
        found = _split(times, float(kernel.clock_step_ns), alpha / 2)
    if found is None:
        return []
    struck, masks, p_value = found
    delays = _between(times, masks)[struck]
    scale = kernel.warp_scale_ns
    if np.median(delays) < max(MIN_SHARE * scale, kernel.least_ns):
        return []
    late = np.nanmax(times[struck], axis=1, keepdims=True) - times[struck]
    life = kernel.life_ns[rows[struck]][:, None] if kernel.has_entries else scale
    idle_share = float(np.nansum(late) / max(np.nansum(np.where(np.isnan(late), np.nan, life)), 1.0))
    warps = round(struck.size / rows.size * int(kernel.apart.sum()))
    return [_finding(kernel, warps, delays, min(1.0, idle_share), _late(masks[struck]), p_value)]


class _Parted(NamedTuple):
    """Which rows of times are parted, the mask of late lanes for each row of all, and the chance of it."""

    rows: Ints
    masks: Ints
    p_value: float


def _split(times: Floats, step: float, alpha: float) -> _Parted | None:
    """Warps whose lanes fall into groups far apart."""
    p_values = split_p_values(times, step)
    split = p_values <= SPLIT_P
    # Many splits, or one that noise would make in none of all the warps: two ways to be sure, so two tries.
    many = float(stats.binomtest(int(split.sum()), len(times), SPLIT_P, "greater").pvalue)
    p_value = min(1.0, 2 * min(many, float(p_values.min()) * len(times)))
    if p_value > alpha or split.mean() < MIN_WARPS_SHARE:
        return None
    masks = np.array([_above_gap(row) for row in times], np.int64)
    return _Parted(np.flatnonzero(split), masks, p_value)


def _recurring(times: Floats, alpha: float) -> _Parted | None:
    """Lanes that are late in warp after warp, though not in each; none where the lanes make a ramp."""
    ranks = centred_ranks(times)
    scores = score_classes(ranks, np.broadcast_to(np.arange(LANES), times.shape), LANES)
    p_value = min(1.0, float(stats.norm.sf(np.abs(scores).max())) * 2 * LANES)
    seen = (~np.isnan(ranks)).sum(axis=0)
    level = np.where(seen > 0, np.nansum(ranks, axis=0) / np.maximum(seen, 1), np.nan)
    ordered = np.sort(level[seen > 0])
    if p_value > alpha or np.diff(ordered).max(initial=0) < APART_OF_RANGE * (ordered[-1] - ordered[0]):
        return None
    masks = np.full(len(times), _above_gap(level))
    delays = _between(times, masks)
    usable = delays[~np.isnan(delays)]
    if not usable.size:
        return None
    # Of two sorts of warps, those with late lanes and those without, the first are meant.
    return _Parted(np.flatnonzero(delays >= np.quantile(usable, 0.9) / 2), masks, p_value)


def _above_gap(times: Floats) -> int:
    """The mask of the lanes above the largest gap of one warp."""
    known = np.flatnonzero(~np.isnan(times))
    order = known[np.argsort(times[known], kind="stable")]
    late = order[int(np.diff(times[order]).argmax()) + 1 :] if order.size > 1 else order[:0]
    return int(sum(1 << int(lane) for lane in late))


def _between(times: Floats, masks: Ints) -> Floats:
    """For each row how much later the lanes of its mask left than the others, by medians; nan where one side
    is empty."""
    late = ((masks[:, None] >> np.arange(LANES)) & 1).astype(np.bool_)
    above, below = np.where(late, times, np.nan), np.where(late, np.nan, times)
    usable = ~(np.isnan(above).all(axis=1) | np.isnan(below).all(axis=1))
    delays = np.full(times.shape[0], np.nan)
    delays[usable] = np.nanmedian(above[usable], axis=1) - np.nanmedian(below[usable], axis=1)
    return delays


def _finding(
    kernel: KernelWarps, warps: int, delays: Floats, idle: float, late: _Late, p_value: float | None
) -> Finding:
    lanes = [lane for lane in range(LANES) if late.mask >> lane & 1]
    total = kernel.launch.size
    typical, high = float(np.median(delays)), float(np.quantile(delays, 0.95))
    share = typical / max(kernel.warp_scale_ns, 1.0)
    most = "" if late.share > 0.99 else f" in {percent(late.share)} of them"
    idle_text = f"; {percent(idle)} of the lanes' time is idle" if kernel.has_entries else ""
    sure = "" if p_value is None else f" ({confidence(p_value)})"
    evidence = (
        f"In {warps:,} of {total:,} warp{'s' * (total != 1)} the lanes leave apart: "
        f"lane{'s' * (len(lanes) != 1)} {listed(lanes)} (mask {late.mask:#010x}) last{most}, "
        f"{duration_text(typical)} after the others in the median, {percent(share)} of "
        f"{kernel.scale_name}{idle_text}{sure}"
    )
    numbers = {
        "warps": total,
        "warps_apart": warps,
        "late_lanes_mask": late.mask,
        "late_lanes": lanes,
        "late_mask_share": late.share,
        "delay_p50_ns": typical,
        "delay_p95_ns": high,
        "delay_share": share,
        "idle_lane_share": idle if kernel.has_entries else None,
    }
    return Finding("divergence", kernel.kernel, evidence, CAUSE, p_value, numbers)
