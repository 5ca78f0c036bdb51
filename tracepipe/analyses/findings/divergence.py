"""Divergence: threads of one warp that exit at different times.

Where a warp's exits were recorded with the masks of their lanes, nothing is inferred, and the share of the
lanes' time that was idle decides. Where every thread was timed separately, noise also makes the times of one
warp differ. Two tests separate it from divergence: single warps whose lanes fall into groups
(`split_p_values`), and lanes that are late in many warps (`ranks`).

Noise alone spreads the lanes of a warp. A warp counts as split where its lanes form two to four groups, each
of two lanes or more and each narrow compared with the gaps between them. How often noise does that is found
by drawing warps from Student's t with two degrees of freedom: its variance is infinite, so its tails are
heavier than those of clocks and caches. A lane that is late alone has a separate null distribution, as such
noise often has one value far out: the lane must be very late, or late in many warps, which ranks show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from tracepipe.analyses.findings import statistics
from tracepipe.analyses.findings.finding import MIN_SAVED, MIN_SHARE, Finding, confidence, listed, percent
from tracepipe.analyses.findings.kernel_warps import LANES, KernelWarps, sample
from tracepipe.analyses.findings.statistics import (
    APART_OF_RANGE,
    between,
    chance_in_rows,
    ranks_in_rows,
    score_rows,
)
from tracepipe.analyses.findings.stride import LANES_CAUSE, without_order
from tracepipe.event.columns import Bools, Floats, Ints
from tracepipe.libraries import np
from tracepipe.units import agree, duration_text

MIN_RECURRING = 3
"""The least number of warps: in fewer of them, the same lane is late by chance too often."""
MOST_WARPS_SHARE = 0.01
"""Where more than this share of the warps diverges by masks, the grid's first or last one is no exception."""
MOST_OF_KERNEL = 0.5
"""The least share of the warps whose lanes exit apart by masks, if they idle for less than MIN_SAVED."""
MIN_WARPS_SHARE = 0.01
"""The least share of the warps that must be split where noise is possible: a smaller share is not a property
of the kernel."""
STRIDES = (2, 4, 8, 16)
"""Moduli of lanes that are tried: banks, sectors and vector widths are powers of two."""
MOST_AT_EDGE = LANES // 4
"""The most lanes at an end of the warp that a boundary affects; more of them are a part of the warp."""

BRANCH_CAUSE = (
    "a branch that the lanes of a warp take differently, or loops whose length differs from lane to lane; "
    "the warp runs each path in turn, while lanes that have exited stay idle"
)
BOUNDARY_CAUSE = (
    "a boundary that only {these}, such as the first or last element of a chunk or of the data (bounds "
    "checks, a remainder, an unaligned access), or another branch on the thread index; the warp runs each "
    "path in turn, while lanes that have exited stay idle"
)
MOST_GROUPS = 4
DRAWS = 20_000
"""Warps drawn for the null distribution: it gives p values down to 1 in 20,000."""
SPLIT_P = 0.001
"""A warp with a smaller p value counts as split: one of a thousand noisy warps does."""
MIN_LANES = 4


def lacks(kernel: KernelWarps) -> str | None:
    """Why divergence cannot be looked for; None where it can."""
    if kernel.lanes_timed and not bool((kernel.exits > 1).any()):
        return "no two threads of one warp were recorded"
    return None


def find(kernel: KernelWarps, alpha: float) -> list[Finding]:
    """Return at most one finding: how many warps diverge, which lanes exit last, and how much later.

    If there is none in all warps, the first and the last warp of the grid are tried, each at a quarter of
    `alpha`.
    """
    diverges = kernel.diverges & ~_guards(kernel)
    others = int(np.count_nonzero(diverges)) - 2 * kernel.launches.size
    is_of_many = not kernel.lanes_timed and others > MOST_WARPS_SHARE * diverges.size
    ends = [] if is_of_many else list(_ends_of_grid(kernel))
    every = [("", np.flatnonzero(diverges)), *((place, rows[diverges[rows]]) for place, rows in ends)]
    for place, warps in every:
        share = alpha / 4 if place else alpha / 2 if ends else alpha
        found = None
        if warps.size and kernel.lanes_timed:
            found = _timed(kernel, warps, share, place)
        elif warps.size:
            found = _recorded(kernel, warps, place)
        if found is not None:
            return [found]
    return []


def _ends_of_grid(kernel: KernelWarps) -> Iterator[tuple[str, Ints]]:
    """The first and the last warp of the grid in each launch, where blocks are known and a launch has several
    warps.
    """
    if not kernel.blocks_known or kernel.rows_mixed or kernel.launch.size == kernel.launches.size:
        return
    first = kernel.launch_starts
    last = np.r_[first[1:], kernel.launch.size] - 1
    yield "first", first[(kernel.block[first] == 0) & (kernel.warp[first] == 0)]
    blocks = math.prod(kernel.grid) if kernel.grid else 0
    ends = (kernel.block[last] == blocks - 1) & (kernel.warp[last] == kernel.warp.max())
    yield "last", last[ends]


def _guards(kernel: KernelWarps) -> Bools:
    """Flags the one warp of a launch's last block that diverges at the bounds check `if (i >= n) return`: its
    upper lanes exit first."""
    guards = np.zeros(kernel.launch.size, np.bool_)
    if kernel.lanes_timed or kernel.grid is None:
        return guards
    last_block = math.prod(kernel.grid) - 1
    candidates = np.flatnonzero(kernel.diverges & (kernel.block == last_block))
    _, at, counts = np.unique(kernel.launch[candidates], return_index=True, return_counts=True)
    for warp in candidates[at[counts == 1]]:
        first = int(kernel.first_exit[warp])
        masks = kernel.exit_mask[first : first + int(kernel.exits[warp])]
        upper, rest = int(masks[0]), int(np.bitwise_or.reduce(masks[1:]))
        guards[warp] = rest < (upper & -upper)
    return guards


def _recorded(kernel: KernelWarps, warps: Ints, place: str) -> Finding | None:
    """The finding from exits with masks: the time in which lanes are idle decides, and how much of a warp's
    lifetime is between its exits. For a warp at an end of the grid, the delay is compared with the launch's
    duration instead."""
    # The time that the lanes of these warps were idle, as a share of the time of all lanes of all warps.
    is_counted, of = np.zeros(kernel.launch.size, np.bool_), kernel.exit_warp
    is_counted[warps] = True
    lanes = np.bitwise_count(kernel.exit_mask.astype(np.uint32)).astype(np.float64)
    late_ns = kernel.last_exit_ns[of] - kernel.exit_ns
    scale = kernel.life_ns if kernel.has_entries else kernel.warp_scale_ns
    possible_ns = float((np.bincount(of, lanes, kernel.launch.size) * scale).sum())
    idle_share = float((late_ns * lanes)[is_counted[of]].sum()) / max(possible_ns, 1.0)
    # The widest gap between two exits of a warp is its last one in this order; the lanes after it are late.
    gaps = np.diff(kernel.exit_ns, prepend=0)
    gaps[np.diff(of, prepend=-1) != 0] = 0
    cut = np.lexsort((gaps, of))[np.cumsum(kernel.exits) - 1]
    is_late = np.arange(gaps.size) >= cut[of]
    masks = np.zeros(cut.size, np.int64)
    np.bitwise_or.at(masks, of[is_late], kernel.exit_mask[is_late])
    delays = gaps[cut][warps].astype(np.float64)
    delay = float(np.median(delays))
    if place:
        is_worth = delay >= MIN_SHARE * float(np.median(kernel.launch_ns))
    else:
        # A few lanes hold up a warp as much as many do, and waste less of its lanes' time. What most warps
        # do is a property of the kernel, however few lanes it concerns.
        share = max(idle_share, delay / max(kernel.warp_scale_ns, 1.0))
        is_of_most = warps.size >= MOST_OF_KERNEL * kernel.launch.size
        is_worth = share >= MIN_SHARE and (idle_share >= MIN_SAVED or is_of_most)
    if not is_worth or delay < kernel.least_ns or (kernel.exits_by_patches and not place):
        return None
    return _finding(kernel, Diverging(warps, warps.size, delays, idle_share, masks[warps]), place)


def _timed(kernel: KernelWarps, warps: Ints, alpha: float, place: str) -> Finding | None:
    """The finding from one time for each thread: lanes that are late in many warps, else warps that split."""
    rows = sample(warps)
    times, step_ns = without_order(kernel.lane_times(rows))
    both = rows.size >= MIN_RECURRING and not kernel.rows_mixed
    alpha = alpha / 2 if both else alpha
    found = _recurring(times, alpha) if rows.size >= MIN_RECURRING else None
    if found is None and not kernel.rows_mixed:
        found = _split(times, float(kernel.clock_step_ns), alpha)
    if found is None:
        return None
    struck, masks, p_value = found
    delays = _between(times, masks)[struck]
    scale = kernel.warp_scale_ns
    if np.median(delays) < max(MIN_SHARE * scale, kernel.least_ns):
        return None
    late = np.nanmax(times[struck], axis=1, keepdims=True) - times[struck]
    life = kernel.life_ns[rows[struck]][:, None] if kernel.has_entries else scale
    idle_share = float(np.nansum(late) / max(np.nansum(np.where(np.isnan(late), np.nan, life)), 1.0))
    count = round(struck.size / rows.size * warps.size)
    idle_share = min(1.0, idle_share)
    diverging = Diverging(rows[struck], count, delays, idle_share, masks[struck], p_value, step_ns)
    return _finding(kernel, diverging, place)


_Struck = tuple[Ints, Ints, float]
"""Which rows of times diverge, the mask of late lanes for every row, and the p value."""


def _split(times: Floats, step: float, alpha: float) -> _Struck | None:
    """Warps whose lanes fall into groups far apart."""
    p_values = split_p_values(times, step)
    # With few warps, a single split can be significant that would be chance among a thousand warps.
    split = p_values <= max(SPLIT_P, alpha / (2 * len(times)))
    small = int((p_values <= SPLIT_P).sum())
    # Either many splits, or one that noise would make in no warp, is significant: two tests, so twice the p.
    many = statistics.binomial_above(small, len(times), SPLIT_P)
    p_value = min(1.0, 2 * min(many, float(p_values.min()) * len(times)))
    if p_value > alpha or split.mean() < MIN_WARPS_SHARE:
        return None
    masks = np.array([_above_gap(row) for row in times], np.int64)
    return np.flatnonzero(split), masks, p_value


def _recurring(times: Floats, alpha: float) -> _Struck | None:
    """Lanes that are late in many warps, though not in each; None where the lanes' times form a ramp."""
    row, lane = np.nonzero(~np.isnan(times))
    ranks = ranks_in_rows(times[row, lane], row)
    scores = score_rows(ranks, row, lane, LANES)
    late = int(np.abs(scores).argmax())
    chance = chance_in_rows(ranks if scores[late] > 0 else -ranks, row, lane == late)
    p_value = min(1.0, chance * 2 * LANES)
    if p_value > alpha:
        return None
    # Ranks separate lanes that are late in some of the warps; times separate lanes that are far behind. A
    # lane that is in no warp has no level.
    mean_rank, median_time = np.full((2, LANES), np.nan)
    counts = np.bincount(lane, minlength=LANES)
    in_any = counts > 0
    mean_rank[in_any] = np.bincount(lane, ranks, LANES)[in_any] / counts[in_any]
    residual = times - np.nanmedian(times, axis=1, keepdims=True)
    median_time[in_any] = np.nanmedian(residual[:, in_any], axis=0)
    for level in (mean_rank, median_time):
        ordered = np.sort(level[in_any])
        # On a ramp no lane is late.
        if np.diff(ordered).max(initial=0) >= APART_OF_RANGE * (ordered[-1] - ordered[0]) > 0:
            break
    else:
        return None
    masks = np.full(len(times), _above_gap(level))
    delays = _between(times, masks)
    usable = delays[~np.isnan(delays)]
    if not usable.size:
        return None
    # Only some of the warps may have late lanes: those are taken, the others are not.
    return np.flatnonzero(delays >= np.quantile(usable, 0.9) / 2), masks, p_value


def _above_gap(times: Floats) -> int:
    """The mask of the lanes above the largest gap of one warp."""
    known = np.flatnonzero(~np.isnan(times))
    order = known[np.argsort(times[known], kind="stable")]
    late = order[int(np.diff(times[order]).argmax()) + 1 :] if order.size > 1 else order[:0]
    return int(sum(1 << int(lane) for lane in late))


def _between(times: Floats, masks: Ints) -> Floats:
    """For each row, how much later the lanes of its mask exited than the others; nan where either side is
    empty.
    """
    return between(times, ((masks[:, None] >> np.arange(LANES)) & 1).astype(np.bool_))


class Diverging(NamedTuple):
    """Warps whose lanes exit at different times. `rows` are some of them, `warps` is their number; `delays`
    has a value for each of `rows`, or for all of them, and `masks` have the lanes that are late."""

    rows: Ints
    warps: int
    delays: Floats
    idle_share: float
    masks: Ints
    p_value: float | None = None
    step_ns: float = 0.0
    """The time between two neighbouring lanes that read the clock in turn; the delays do not contain it."""


def _finding(kernel: KernelWarps, found: Diverging, place: str) -> Finding:
    """Return the finding. `place` is "first" or "last" where only that warp of the grid is affected."""
    # The most frequent mask, and its share.
    masks, counts = np.unique(found.masks, return_counts=True)
    late_mask, mask_share = int(masks[counts.argmax()]), float(counts.max() / found.masks.size)
    late = [lane for lane in range(LANES) if late_mask >> lane & 1]
    is_among = np.zeros(kernel.launch.size, np.bool_)
    is_among[found.rows] = True
    mask = int(np.bitwise_or.reduce(kernel.exit_mask[is_among[kernel.exit_warp]]))
    recorded = [lane for lane in range(LANES) if mask >> lane & 1]
    stride = stride_of(late, recorded) if kernel.lanes_timed else None
    delay = float(np.median(found.delays))
    share = delay / max(kernel.warp_scale_ns, 1.0)
    # Where most lanes exit last, the few that exit first are named.
    is_early = not kernel.lanes_timed and len(late) > len(recorded) / 2
    named = [lane for lane in recorded if lane not in late] if is_early else late
    order, than = ("first", "before") if is_early else ("last", "after")
    total = int(kernel.launch.size)
    if place:
        of = f" of {found.warps:,} launches" if found.warps > 1 else ""
        where = f"In the {place} warp of the grid{of}"
    elif total == 1:
        where = "In the one warp that was recorded"
    else:
        where = f"In {found.warps:,} of {total:,} warps"
    which = [f"mask {sum(1 << lane for lane in named):#010x}"]
    if stride:
        which.append(f"t mod {stride[0]} = {stride[1]}")
    if len(recorded) < LANES and kernel.lanes_timed:
        which.append(f"of {len(recorded)} that were recorded")
    warp = np.unique(kernel.warp[found.rows])
    if len(named) == 1 and warp.size == 1 and kernel.blocks_known:
        thread = int(warp[0]) * LANES + named[0]
        edge = "first" * (thread == 0) or "last" * (thread == kernel.last_thread)
        which.append(f"thread {thread}" + (f", the {edge} of its block" if edge else ""))
    evidence = (
        f"{where} the lanes exit at different times: {agree(len(named), 'lane|lanes')} {listed(named)} "
        f"({'; '.join(which)}) {order}"
    )
    if mask_share <= 0.99:
        evidence += f" in {percent(mask_share)} of them"
    evidence += f", {duration_text(delay)} {than} the others"
    if found.warps > 1:
        evidence += " (median)"
    if found.step_ns:
        evidence += f", which exit {duration_text(found.step_ns)} apart, lane by lane"
    if total > 1 or kernel.has_entries:
        evidence += f", {percent(share)} of {kernel.scale_name}"
    if kernel.has_entries:
        evidence += f"; {percent(found.idle_share)} of the lanes' time is idle"
    if found.warps == 1:
        evidence += "; seen in one warp"
    if found.p_value is not None:
        evidence += f" ({confidence(found.p_value)})"
    numbers = {
        "of": f"{place} warp of the grid" if place else "warps",
        "warps": total,
        "warps_apart": found.warps,
        "late_lanes_mask": late_mask,
        "late_lanes": late,
        "late_mask_share": mask_share,
        "stride": stride[0] if stride else None,
        "delay_p50_ns": delay,
        "delay_p95_ns": float(np.quantile(found.delays, 0.95)),
        "delay_share": share,
        "lane_step_ns": found.step_ns,
        "idle_lane_share": found.idle_share if kernel.has_entries else None,
    }
    cause = LANES_CAUSE if stride else BRANCH_CAUSE
    at_edge = named in (recorded[: len(named)], recorded[-len(named) :])
    if not stride and at_edge and len(named) <= MOST_AT_EDGE:
        cause = BOUNDARY_CAUSE.format(these="this lane meets" if len(named) == 1 else "these lanes meet")
    # With fewer idle lanes, only the time between the exits is stated, not the possible saving.
    saves = None if place or found.idle_share < MIN_SAVED else found.idle_share
    return Finding("divergence", kernel.kernel, evidence, cause, found.p_value, numbers, saves)


def stride_of(lanes: list[int], recorded: list[int]) -> tuple[int, int] | None:
    """The modulus and residue where `lanes` are all lanes of `recorded` with that residue, and not all of
    `recorded`; else None.
    """
    if not 1 < len(lanes) < len(recorded):
        return None
    for modulus in STRIDES:
        residue = lanes[0] % modulus
        if [lane for lane in recorded if lane % modulus == residue] == lanes:
            return modulus, residue
    return None


def _scores(ordered: Floats, step: float) -> Floats:
    """For each row of sorted lane times, the gap between its groups divided by the widest group, for the best
    number of groups. Shapes `(rows, lanes)` and `(rows,)`."""
    rows, lanes = ordered.shape
    gaps = np.diff(ordered, axis=1)
    by_size = np.argsort(-gaps, axis=1, kind="stable")
    best = np.zeros(rows)
    for cuts in range(1, min(MOST_GROUPS, lanes // 2)):
        at = np.sort(by_size[:, :cuts], axis=1)
        first = np.concatenate([np.zeros((rows, 1), np.int64), at + 1], axis=1)
        last = np.concatenate([at, np.full((rows, 1), lanes - 1)], axis=1)
        widths = np.take_along_axis(ordered, last, 1) - np.take_along_axis(ordered, first, 1)
        gap = np.take_along_axis(gaps, by_size[:, cuts - 1 : cuts], 1)[:, 0]
        score = gap / np.maximum(widths.max(axis=1), step)
        best = np.maximum(best, np.where((last - first).min(axis=1) >= 1, score, 0))
    return best


def _lone_scores(ordered: Floats, step: float) -> Floats:
    """For each row, the gap below the last lane divided by the width of the others."""
    scores: Floats = (ordered[:, -1] - ordered[:, -2]) / np.maximum(ordered[:, -2] - ordered[:, 0], step)
    return scores


@lru_cache(maxsize=LANES)
def _nulls(lanes: int) -> tuple[Floats, Floats]:
    noise = np.sort(np.random.default_rng(lanes).standard_t(2, (DRAWS, lanes)), axis=1)
    return np.sort(_scores(noise, 0.0)), np.sort(_lone_scores(noise, 0.0))


def split_p_values(times: Floats, step: float) -> Floats:
    """The p value of each row of lane times: the chance that noise separates its lanes as much. It is 1 for a
    row with too few lanes.

    `times` has the shape `(rows, lanes)` and nan where a lane has no time; `step` is their resolution.
    """
    ordered = np.sort(times, axis=1)  # nan last
    present: Ints = (~np.isnan(times)).sum(axis=1)
    p_values = np.ones(times.shape[0])
    for lanes in np.unique(present[present >= MIN_LANES]):
        rows = present == lanes
        known = ordered[rows, : int(lanes)]
        scores = (_scores(known, step), _lone_scores(known, step))
        above = [
            DRAWS - np.searchsorted(null, score, side="left")
            for null, score in zip(_nulls(int(lanes)), scores, strict=True)
        ]
        p_values[rows] = np.minimum(1.0, 2 * (np.minimum(*above) + 1) / (DRAWS + 1))
    return p_values
