"""Imbalance: SMs whose blocks take longer, and work that grows or shrinks along the grid, or differs between
blocks: every m-th along a side of the grid, or scattered over it.

Blocks are compared with those that started together, in the same turn, on SMs with equally many blocks.
Neither waves nor the order in which an SM serves its blocks can then make a block look heavy.
"""

from __future__ import annotations

from tracepipe.analyses.findings import statistics
from tracepipe.analyses.findings.block_times import (
    MIN_BLOCKS_OF_SM,
    MIN_GROUP,
    BlockLateness,
    block_values,
    lacks_blocks,
    lateness,
    without_medians,
)
from tracepipe.analyses.findings.finding import MIN_SM_SHARE, Finding, confidence, listed, percent
from tracepipe.analyses.findings.kernel_warps import MAX_BLOCKS, MIN_WAVE, KernelWarps, evenly, sample
from tracepipe.analyses.findings.statistics import (
    LateClass,
    late_class_in_rows,
    medians_by,
    ranks_in_rows,
    score_rows,
)
from tracepipe.analyses.findings.waves import share_saved, usual_waves
from tracepipe.event.columns import Bools
from tracepipe.event.groups import number_rows
from tracepipe.libraries import np
from tracepipe.units import agree, duration_text

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
    # The sides of the grid, and the index of each block along them; one side where the grid is not known.
    sides, rest = [("block", int(blocks.max()) + 1, blocks)], blocks
    if kernel.grid is not None and 0 not in kernel.grid:
        sides = []
        for name, size in zip(("blockIdx.x", "blockIdx.y", "blockIdx.z"), kernel.grid, strict=True):
            sides.append((name, size, rest % size))
            rest = rest // size
    sides = [side for side in sides if side[1] >= 2 * MIN_GROUP]
    life = float(np.median(block_values(kernel)))
    found: list[tuple[float, float, str, LateClass]] = []
    for name, size, place in sides:
        most = min(MOST_MODULUS, size // 2, blocks.size // MIN_GROUP)
        one = late_class_in_rows(profile, group, place, range(2, most + 1))
        least_ns = max(MIN_DELAY * life, kernel.least_ns)
        if one is not None and one.p_value * len(sides) <= alpha and one.delay >= least_ns:
            found.append((one.p_value * len(sides), -one.delay, name, one))
    if not found:
        return []
    p_value, _, side, period = min(found, key=lambda of_side: of_side[:3])
    delay, total = period.delay, kernel.block_count
    evidence = (
        f"Blocks with {side} mod {period.modulus} = {' or '.join(map(str, period.residues))} take "
        f"{duration_text(delay)} longer than others that started with them, "
        f"{percent(delay / max(life, 1.0))} of a block's time, of {total:,} blocks ({confidence(p_value)})"
    )
    numbers = {
        "across": "block period",
        "side": side,
        "modulus": period.modulus,
        "residues": period.residues,
        "delay_p50_ns": delay,
        "delay_share": delay / max(life, 1.0),
        "blocks_total": total,
    }
    saves = share_saved(kernel, delay, np.flatnonzero(np.isin(late.profile_row, rows[period.members])))
    return [Finding("imbalance", kernel.kernel, evidence, PERIOD_CAUSE, p_value, numbers, saves)]


def heavy(kernel: KernelWarps, late: BlockLateness) -> list[Finding]:
    """Return a finding about scattered blocks that take several times as long as those that started with
    them. They are counted; no p value is needed.
    """
    values, group = block_values(kernel), kernel.turn
    usual = np.maximum(medians_by(values, group), 1.0)
    times = medians_by(values / usual[group], late.profile_row)
    least = HEAVY if kernel.launches.size > 2 else HEAVY_ONCE
    is_heavy: Bools = (times >= least) & (late.profile_ns >= kernel.least_ns)
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
    return lacks_blocks(kernel) if kernel.has_entries else "no entries were recorded"


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
    lateness_ns = late.rows_ns[rows]
    pairs = np.unique(sm * np.int64(late.blocks.size) + late.profile_row[rows])
    distinct = np.bincount(pairs // late.blocks.size, minlength=sms.size)
    delays = medians_by(lateness_ns, sm)
    life = float(np.median(block_values(kernel)))
    slow = (distinct >= MIN_BLOCKS_OF_SM) & (delays >= max(MIN_SM_SHARE * life, kernel.least_ns))
    if not slow.any():
        return []
    _, launch = np.unique(kernel.blocks.launch[rows], return_inverse=True)
    scores = score_rows(ranks_in_rows(lateness_ns, launch), launch, sm, sms.size)
    p_values = np.minimum(1.0, statistics.normal_above(scores) * sms.size)
    slow &= p_values <= alpha
    if not slow.any() or slow.mean() > MOST_SMS_SHARE:
        return []
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
    return [Finding("imbalance", kernel.kernel, evidence, SM_CAUSE, worst_p, numbers, saves)]


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
