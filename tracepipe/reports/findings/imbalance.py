"""Imbalance: SMs whose blocks take longer, and work that grows or shrinks along the grid or differs from
block to block."""

from __future__ import annotations

from tracepipe.reports.findings.block_times import (
    MIN_BLOCKS_OF_SM,
    MIN_GROUP,
    MIN_WAVE,
    BlockLateness,
    at_border,
    block_values,
    lacks_blocks,
    lateness,
    medians_by,
    started_together,
)
from tracepipe.reports.findings.finding import MIN_SM_SHARE, Finding, confidence, listed, percent
from tracepipe.reports.findings.kernel_warps import Flags, Floats, Ints, KernelWarps
from tracepipe.reports.findings.ranks import centred_ranks, score_classes
from tracepipe.reports.frames import statistics
from tracepipe.reports.frames.libraries import np
from tracepipe.units import duration_text

MOST_SMS_SHARE = 0.5
"""If more SMs than this are late, the others are early."""
MIN_TREND = 0.5
"""Change of a block's time along the grid, as a share of the median: less is what caches and contention do as
a kernel goes on. Also the least rank correlation, so that the order explains a quarter of the ranks at
least."""
MIN_WITHIN_WAVES = 0.5
"""How much of that change must be seen among blocks that started together: else it came with time, not with
the index."""
SLOPE_BLOCKS = 512
"""Blocks whose slope is taken: its cost grows with their square."""

SM_CAUSE = (
    "another kernel on these SMs at the time, more blocks there at once, a slower path to memory, or "
    "blocks with more work whose index leads them there"
)
TREND_CAUSE = (
    "loops whose length depends on the block's index, as over a triangle: deal the work out interleaved"
)


def lacks(kernel: KernelWarps) -> str | None:
    """What of the input is missing to look for imbalance; None where nothing is."""
    if not kernel.has_exits:
        return "no exits were recorded"
    if not kernel.has_entries:
        return "no entries were recorded"
    return lacks_blocks(kernel)


def find(kernel: KernelWarps, alpha: float) -> list[Finding]:
    """Findings of SMs and of the order of blocks, each tried at half of `alpha`."""
    late = lateness(kernel)
    return [*_sms(kernel, late, alpha / 2), *_trend(kernel, lateness(kernel, by_wave=False), alpha / 2)]


def _sms(kernel: KernelWarps, late: BlockLateness, alpha: float) -> list[Finding]:
    if not kernel.has_sms:
        return []
    sms, sm = np.unique(kernel.blocks.sm, return_inverse=True)
    launches, launch = np.unique(kernel.blocks.launch, return_inverse=True)
    counts = np.bincount(launch)
    column = np.arange(launch.size) - (np.cumsum(counts) - counts)[launch]
    times = np.full((launches.size, int(counts.max())), np.nan)
    classes = np.zeros(times.shape, np.int64)
    lateness_ns = _within_border(kernel, late)
    times[launch, column], classes[launch, column] = lateness_ns, sm
    scores = score_classes(centred_ranks(times), classes, sms.size)
    pairs = np.unique(np.stack([sm, late.profile_row]), axis=1)
    distinct = np.bincount(pairs[0], minlength=sms.size)
    delays = medians_by(lateness_ns, sm)
    life = float(np.median(block_values(kernel)))
    p_values = np.minimum(1.0, statistics.normal_above(scores) * sms.size)
    slow = (p_values <= alpha) & (distinct >= MIN_BLOCKS_OF_SM)
    slow &= delays >= max(MIN_SM_SHARE * life, kernel.least_ns)
    if not slow.any() or slow.mean() > MOST_SMS_SHARE:
        return []
    return [_sm_finding(kernel, sms, slow, (sm, delays, p_values), life)]


def _within_border(kernel: KernelWarps, late: BlockLateness) -> Floats:
    """Lateness against blocks at the border or inside it, as the block itself: an SM may get one sort."""
    border = at_border(late.blocks, kernel.grid)
    if min(int(border.sum()), int((~border).sum())) < MIN_GROUP:
        return late.rows_ns
    levels = np.where(border, np.median(late.profile_ns[border]), np.median(late.profile_ns[~border]))
    centred: Floats = late.rows_ns - levels[late.profile_row]
    return centred


def _sm_finding(
    kernel: KernelWarps,
    sms: Ints,
    slow: Flags,
    of_sms: tuple[Ints, Floats, Floats],
    life: float,
) -> Finding:
    sm, delays, p_values = of_sms
    which = sms[slow].tolist()
    delay = float(np.median(delays[slow]))
    worst_p = float(p_values[slow].max())
    per_sm = np.bincount(sm, minlength=sms.size) / kernel.launches.size
    own, others = float(per_sm[slow].mean()), float(per_sm[~slow].mean())
    evidence = (
        f"On SM{'s' * (len(which) > 1)} {listed(which)} of {sms.size} blocks take {duration_text(delay)} "
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
    return Finding("imbalance", kernel.kernel, evidence, SM_CAUSE, worst_p, numbers)


def _trend(kernel: KernelWarps, late: BlockLateness, alpha: float) -> list[Finding]:
    profile = late.profile_ns  # np.unique has put the blocks in order
    tenth = max(profile.size // 10, 3)
    first, last = float(np.median(profile[:tenth])), float(np.median(profile[-tenth:]))
    life = float(np.median(block_values(kernel)))
    if abs(last - first) < max(MIN_TREND * life, kernel.least_ns):
        return []
    correlation, of_all = statistics.rank_correlation(np.arange(profile.size), profile)
    if not of_all <= alpha or abs(correlation) < MIN_TREND:
        return []
    wave = np.zeros(profile.size, np.int64)
    wave[late.profile_row] = started_together(kernel)  # the last launch's, where there are many
    # Among blocks that started together, time plays no part: there the index alone must show the same.
    index = np.arange(profile.size, dtype=np.float64)
    counts = np.bincount(wave, minlength=int(wave.max()) + 1)
    kept = counts[wave] >= MIN_WAVE
    if not kept.any():
        return []
    _, group = np.unique(wave[kept], return_inverse=True)
    place = index[kept] - medians_by(index[kept], group)[group]
    rest = profile[kept] - medians_by(profile[kept], group)[group]
    if np.ptp(rest) == 0:
        return []
    _, inner = statistics.rank_correlation(place, rest)
    picked = np.linspace(0, rest.size - 1, min(rest.size, SLOPE_BLOCKS)).astype(np.int64)
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
    return [Finding("imbalance", kernel.kernel, evidence, TREND_CAUSE, p_value, numbers)]
