"""Imbalance: SMs whose blocks take longer, and work that grows or shrinks along the grid, or differs between
blocks."""

from __future__ import annotations

from tracepipe.analyses.findings.block_patterns import heavy, periods
from tracepipe.analyses.findings.block_times import (
    MIN_BLOCKS_OF_SM,
    MIN_WAVE,
    BlockLateness,
    block_values,
    lacks_blocks,
    lateness,
    medians_by,
    without_medians,
)
from tracepipe.analyses.findings.finding import MIN_SM_SHARE, Finding, confidence, listed, percent
from tracepipe.analyses.findings.kernel_warps import Flags, KernelWarps
from tracepipe.analyses.findings.ranks import ranks_in_rows, score_rows
from tracepipe.analyses.findings.sampling import MAX_BLOCKS, evenly, sample
from tracepipe.analyses.findings.waves import share_saved, usual_waves
from tracepipe.event.groups import number_rows
from tracepipe.reports.frames import statistics
from tracepipe.reports.frames.arrays import Floats, Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.units import agree, duration_text

MOST_SMS_SHARE = 0.5
"""The largest share of SMs that can be late: with more, the others are early."""
MIN_TREND = 0.5
"""The least change of a block's time along the grid, as a share of the median: a smaller one comes from
caches and contention while the kernel runs. It is also the least rank correlation: the order then explains at
least a quarter of the ranks."""
MIN_WITHIN_WAVES = 0.5
"""The least share of that change that must be seen among blocks that started together: else the cause is the
time of the start, not the index."""
SLOPE_BLOCKS = 512
"""The number of blocks whose slope is computed: its cost grows with the square of this number."""

SM_CAUSE = (
    "another kernel on these SMs at that time, more blocks on them at a time, a slower path to memory, or "
    "blocks with more work whose index places them there"
)
TREND_CAUSE = (
    "loops whose length depends on the block's index, as over a triangle; interleave the work among blocks"
)


def lacks(kernel: KernelWarps) -> str | None:
    """Why imbalance cannot be looked for; None where it can."""
    if not kernel.has_exits:
        return "no exits were recorded"
    if not kernel.has_entries:
        return "no entries were recorded"
    return lacks_blocks(kernel)


def find(kernel: KernelWarps, alpha: float) -> list[Finding]:
    """Look for a trend along the grid, then periods, slow SMs, each at a third of `alpha`, and heavy blocks.

    The first effect that is found explains the others: a block's index decides its SM, so work that depends
    on the index makes some SMs seem slow.
    """
    alpha /= 3
    if trend := _trend(kernel, lateness(kernel, by_wave=False), alpha):
        return trend
    late = lateness(kernel, by_border=True)
    return periods(kernel, late, alpha) or _sms(kernel, late, alpha) or heavy(kernel, late)


def _sms(kernel: KernelWarps, late: BlockLateness, alpha: float) -> list[Finding]:
    if not kernel.has_sms:
        return []
    rows = sample(np.arange(kernel.blocks.sm.size), MAX_BLOCKS)
    sms, sm = np.unique(kernel.blocks.sm[rows], return_inverse=True)
    _, launch = np.unique(kernel.blocks.launch[rows], return_inverse=True)
    lateness_ns = late.rows_ns[rows]
    scores = score_rows(ranks_in_rows(lateness_ns, launch), launch, sm, sms.size)
    pairs = np.unique(sm * np.int64(late.blocks.size) + late.profile_row[rows])
    distinct = np.bincount(pairs // late.blocks.size, minlength=sms.size)
    delays = medians_by(lateness_ns, sm)
    life = float(np.median(block_values(kernel)))
    p_values = np.minimum(1.0, statistics.normal_above(scores) * sms.size)
    slow = (p_values <= alpha) & (distinct >= MIN_BLOCKS_OF_SM)
    slow &= delays >= max(MIN_SM_SHARE * life, kernel.least_ns)
    if not slow.any() or slow.mean() > MOST_SMS_SHARE:
        return []
    return [_sm_finding(kernel, sms, slow, (delays, p_values), life)]


def _sm_finding(
    kernel: KernelWarps,
    sms: Ints,
    slow: Flags,
    of_sms: tuple[Floats, Floats],
    life: float,
) -> Finding:
    delays, p_values = of_sms
    which = sms[slow].tolist()
    delay = float(np.median(delays[slow]))
    worst_p = float(p_values[slow].max())
    counts = np.bincount(np.searchsorted(sms, kernel.blocks.sm), minlength=sms.size)
    per_sm = counts / kernel.launches.size
    own, others = float(per_sm[slow].mean()), float(per_sm[~slow].mean())
    evidence = (
        f"On {agree(len(which), 'SM|SMs')} {listed(which)} of {sms.size} blocks take {duration_text(delay)} "
        f"longer than others that started with them, {percent(delay / max(life, 1.0))} of a block's time, "
        f"with {own:.3g} blocks a launch there and {others:.3g} on others ({confidence(worst_p)})"
    )
    numbers = {
        "across": "sms",
        "sms": which,
        "sms_total": int(sms.size),
        "delay_p50_ns": delay,
        "delay_share": delay / max(life, 1.0),
        "blocks_per_sm": own,
        "blocks_per_other_sm": others,
    }
    saves = share_saved(kernel, delay, np.flatnonzero(np.isin(kernel.blocks.sm, which)))
    return Finding("imbalance", kernel.kernel, evidence, SM_CAUSE, worst_p, numbers, saves)


def _trend(kernel: KernelWarps, late: BlockLateness, alpha: float) -> list[Finding]:
    profile = late.profile_ns  # np.unique has put the blocks in order
    tenth = max(profile.size // 10, 3)
    first, last = float(np.median(profile[:tenth])), float(np.median(profile[-tenth:]))
    life = float(np.median(block_values(kernel)))
    if abs(last - first) < max(MIN_TREND * life, kernel.least_ns):
        return []
    some = evenly(profile.size, MAX_BLOCKS)
    correlation, of_all = statistics.rank_correlation(some, profile[some])
    if not of_all <= alpha or abs(correlation) < MIN_TREND:
        return []
    # Blocks that started together, in the same turn on their SMs, had the same conditions: among them, only
    # the index can cause the same change. Turns of a few blocks are left out.
    wave = lateness(kernel).group
    index = np.flatnonzero(np.bincount(wave)[wave] >= MIN_WAVE)
    if not index.size:
        return []
    group, _ = number_rows(wave[index])
    place, rest = without_medians(index.astype(np.float64), group), without_medians(profile[index], group)
    if np.ptp(rest) == 0:
        return []
    some = evenly(rest.size, MAX_BLOCKS)
    _, inner = statistics.rank_correlation(place[some], rest[some])
    picked = evenly(rest.size, SLOPE_BLOCKS)
    within = statistics.median_slope(rest[picked], place[picked]) * profile.size
    p_value = max(of_all, inner)
    if not p_value <= alpha or within / (last - first) < MIN_WITHIN_WAVES:
        return []
    begin, end = life + first, life + last
    evidence = (
        f"Blocks take {'longer' if last > first else 'shorter'} along the grid: {duration_text(begin)} for "
        f"the first tenth of {profile.size:,} blocks, {duration_text(end)} for the last (rank correlation "
        f"{correlation:+.2f}, {confidence(p_value)})"
    )
    numbers = {
        "across": "block index",
        "blocks_total": int(profile.size),
        "first_tenth_p50_ns": begin,
        "last_tenth_p50_ns": end,
        "rank_correlation": correlation,
    }
    # With evenly distributed work, no slot is empty at the end.
    saves = usual_waves(kernel).idle_share if kernel.has_sms else None
    return [Finding("imbalance", kernel.kernel, evidence, TREND_CAUSE, p_value, numbers, saves)]
