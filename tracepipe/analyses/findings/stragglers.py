"""Stragglers: blocks that take far longer than the others, in every launch, in one launch, or at the grid's
border.

Some block is the last in any sample, so a block only counts beyond the tail of the others. Of several
launches, the median of each block is tested first, then each launch for blocks that are late only in it.
Blocks at the border of a grid are ranked among inner ones of the same turn.

Excesses over a high threshold follow a generalised Pareto distribution, for nearly any noise (Pickands,
Balkema and de Haan); its shape is the weight of the tail. Shape and scale are unknown, so both are weighted
by the likelihood of the values below a gap, and the chance of the gap is averaged over them. This predictive
p value holds with few values too, where a fitted tail would be too small. Shapes up to that of a tail without
a variance are considered.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from tracepipe.analyses.findings.block_times import (
    MIN_BLOCKS_OF_SM,
    MIN_GROUP,
    MIN_VALUES,
    BlockLateness,
    at_border,
    beyond_others_ns,
    end_delayed_ns,
    lacks_blocks,
    lateness,
)
from tracepipe.analyses.findings.finding import MIN_SAVED, MIN_SHARE, Finding, confidence, listed, percent
from tracepipe.analyses.findings.kernel_warps import KernelWarps
from tracepipe.analyses.findings.statistics import chance_in_rows, combined, medians_by, ranks_in_rows
from tracepipe.analyses.findings.waves import share_saved
from tracepipe.event.columns import Bools, Floats, Ints
from tracepipe.event.groups import number_rows
from tracepipe.libraries import np
from tracepipe.units import agree, counted, duration_text

MOST_OUTLYING = 16
"""The most values beyond a gap that count as stragglers; more are a separate group."""
TAIL_SHARE = 0.25
"""The share of the values that form the tail."""
MOST_OF_TAIL = 80
"""The most values that form the tail."""
LIGHTEST, HEAVIEST, SHAPES = -0.5, 0.5, 15
"""The range and number of the shapes that are weighted: below 0 a tail ends, at 0 it is exponential, from 0.5
on it has no variance."""
NARROWEST, WIDEST, SCALES = -2.0, 2.0, 25
"""The range and number of the scales that are weighted, as logarithms of multiples of the mean excess."""


LEAST_GAP = 3.0
"""The least size of the gap, in mean excesses, times the number of values above it. An exponential tail has
such a gap once in twenty times, so the test would not report a smaller one: this only saves time."""


CAUTION = 4.0
"""The factor of every p value. The distribution holds for the far tail, and a quarter of the values is more
than that. With the noise that converges slowest of those tried (t, 3 degrees of freedom), false alarms were
four times as frequent as they should be (`benchmarks/findings.py`)."""


class Outlying(NamedTuple):
    """The indices of the values beyond the gap, the largest value first, and the chance of such a gap."""

    indices: Ints
    p_value: float


def beyond_the_tail(values: Floats, step: float, least: float) -> Outlying | None:
    """The largest values that a gap separates from the others, if they are `least` above the median.

    `values` has the shape `(n,)`, `step` is their resolution. For a gap below the j-th value the p value is
    multiplied by j·(j+1). The inverses of these factors add up to one, so they correct for the gaps that were
    tried, and require stronger evidence for more outliers.
    """
    if values.size < MIN_VALUES:
        return None
    # The random offsets of `_tail` move neither a value nor the median by more than half a step.
    middle = (values.size - 1) // 2
    if values.max() - np.partition(values, middle)[middle] < least - step:
        return None
    order, excess, far_ns = _tail(values, step)
    far = int((far_ns >= least).sum())
    p_values = [
        _chance_of_gap(excess, above) * above * (above + 1) * CAUTION
        for above in range(1, min(far, MOST_OUTLYING, max(1, values.size // 16)) + 1)
    ]
    if not p_values:
        return None
    count = int(np.argmin(p_values)) + 1
    return Outlying(order[:count], min(1.0, p_values[count - 1]))


def _tail(values: Floats, step: float) -> tuple[Ints, Floats, Floats]:
    """The indices of the values that form the tail and of the one below, the largest first; how far those of
    the tail are above that one, and how far all are above the median.
    """
    # Rounding makes ties, and a tie has no spacing. Random offsets within the step undo the rounding.
    most = values.size - 1
    spread = values + np.random.default_rng(0).uniform(-step / 2, step / 2, values.size)
    tail = min(int(values.size * TAIL_SHARE), MOST_OF_TAIL)
    order = np.argpartition(spread, most - tail)[most - tail :]
    order = order[np.argsort(-spread[order])]
    return order, spread[order[:-1]] - spread[order[-1]], spread[order] - np.median(spread)


def _chance_of_gap(excess: Floats, above: int) -> float:
    """The chance that the `above` largest values of `excess` are all at least as far above the next one."""
    below = excess[above:]
    gap = float(excess[above - 1] - excess[above])
    if above * gap < LEAST_GAP * float(below.mean()):
        return 1.0
    shape = np.linspace(LIGHTEST, HEAVIEST, SHAPES)[:, None]
    scale = np.exp(np.linspace(NARROWEST, WIDEST, SCALES))[None, :] * max(float(below.mean()), 1e-9)
    at_next = _log_survival(below[:1], shape, scale)[..., 0]
    at_gap = _log_survival(excess[above - 1 : above], shape, scale)[..., 0]
    density = ((1 + shape[..., None]) * _log_survival(below, shape, scale)).sum(-1) - below.size * np.log(
        scale
    )
    likelihood = density + above * at_next
    weights = np.exp(likelihood - likelihood.max())
    possible = np.isfinite(at_next)
    chance = np.exp(above * (at_gap[possible] - at_next[possible]))
    return float((weights[possible] * chance).sum() / weights[possible].sum())


def _log_survival(x: Floats, shape: Floats, scale: Floats) -> Floats:
    """The log survival function of the generalised Pareto distribution at each `x`, on the last axis; -inf
    beyond its end.
    """
    ratio = x / scale[..., None]
    shape = np.where(np.abs(shape) < 1e-9, 1e-9, shape)[..., None]
    with np.errstate(divide="ignore"):
        logs: Floats = -np.log1p(np.maximum(shape * ratio, -1.0)) / shape
    return logs


MIN_SUPERIORITY = 0.8
"""The least chance that a border block takes longer than an inner one; with less, the two hardly differ."""
MOST_LAUNCHES = 3
"""The most launches with stragglers that are reported one by one."""

BLOCKS_CAUSE = (
    "more work for these blocks (longer rows, fuller bins, a boundary), or data for which only they had to "
    "wait"
)
LAUNCH_CAUSE = (
    "something outside the kernel that affected these blocks once: a page that had to be moved, another "
    "kernel on the same SM, preemption"
)
LAST_CAUSE = (
    "the block that finishes last does the rest of the work, as in a reduction with an atomic counter and "
    "__threadfence"
)
SHARE_OF_LAST = 0.1
"""Its share of the false-alarm rate of single launches: all launches together are strong evidence."""
LEAST_LAUNCHES = 3
"""The least number of launches that show that another block is late each time."""

BORDER_CAUSE = "bounds checks, partial tiles or halo loads that inner blocks do not have"
EXITS_ONLY = ", or blocks that started last, as no entries were recorded"


lacks = lacks_blocks


def find(kernel: KernelWarps, alpha: float) -> list[Finding]:
    """Return findings about blocks in all launches, in single launches, and at the border. `alpha` is divided
    among those of the three that apply."""
    late = lateness(kernel)
    border = at_border(late.blocks, kernel.grid)
    with_border = min(int(border.sum()), int((~border).sum())) >= MIN_GROUP
    alpha /= 1 + (kernel.launches.size > 1) + with_border
    found = beyond_the_tail(late.profile_ns, float(kernel.clock_step_ns), least_excess_ns(kernel))
    findings = [] if found is None else _blocks(kernel, late, found, alpha)
    if kernel.launches.size > 1:
        is_reported = np.isin(late.profile_row, found.indices) if findings and found else None
        alternates = kernel.launches.size >= LEAST_LAUNCHES and not findings
        of_last = alpha * SHARE_OF_LAST if alternates else 0.0
        last = _last_of_each_launch(kernel, late, of_last) if alternates else []
        findings += last or _single_launches(kernel, late, is_reported, alpha - of_last)
    return findings + _border(kernel, late, border, alpha) if with_border else findings


def least_excess_ns(kernel: KernelWarps) -> float:
    """The least lateness of a block that lengthens its launch noticeably."""
    return max(MIN_SHARE * float(np.median(kernel.launch_ns)), kernel.least_ns)


def _blocks(kernel: KernelWarps, late: BlockLateness, found: Outlying, alpha: float) -> list[Finding]:
    excess = late.profile_ns[found.indices]
    if found.p_value > alpha or excess.min() < least_excess_ns(kernel):
        return []
    launches = kernel.launches.size
    where = "" if launches == 1 else f" in the median of {launches} launches"
    rows = np.flatnonzero(np.isin(late.profile_row, found.indices))
    sms = np.unique(kernel.blocks.sm[rows])
    if kernel.has_sms and kernel.has_entries and sms.size == 1:
        # If these are most of the blocks of one SM, the SM is slow, and `imbalance` reports it.
        slow = np.unique(kernel.blocks.block[rows]).size
        of_sm = np.unique(kernel.blocks.block[kernel.blocks.sm == sms[0]]).size
        if slow >= MIN_BLOCKS_OF_SM and slow > of_sm / 2:
            return []
    blocks = np.sort(late.blocks[found.indices])
    return [_finding(kernel, late, found, (blocks, rows), (where, BLOCKS_CAUSE))]


def _single_launches(
    kernel: KernelWarps, late: BlockLateness, is_reported: Bools | None, alpha: float
) -> list[Finding]:
    """Findings about launches in which blocks are late that are not late in general."""
    own, step_ns, least_ns = late.rows_ns, float(kernel.clock_step_ns), least_excess_ns(kernel)
    # With two launches the median is between both, and nothing can be subtracted. A block that is usually
    # earlier than others is not late where it is not.
    if kernel.launches.size > 2:
        own = own - np.maximum(late.profile_ns, 0)[late.profile_row]
    candidates: list[tuple[float, int, Outlying, Ints]] = []
    for launch, (first, last) in zip(
        kernel.launches.tolist(), pairwise(kernel.block_bounds.tolist()), strict=True
    ):
        if last - first < MIN_VALUES:
            continue
        rows = (
            np.arange(first, last)
            if is_reported is None
            else first + np.flatnonzero(~is_reported[first:last])
        )
        found = beyond_the_tail(own[rows], step_ns, least_ns)
        if found is not None and found.p_value * kernel.launches.size <= alpha:
            p_value = found.p_value * kernel.launches.size
            late_rows = rows[found.indices]
            if own[late_rows].min() >= least_ns:
                candidates.append(
                    (p_value, kernel.launch_id(launch), Outlying(found.indices, p_value), late_rows)
                )
    candidates.sort(key=lambda candidate: candidate[0])
    findings = []
    for _, launch, found, rows in candidates[:MOST_LAUNCHES]:
        blocks = np.sort(kernel.blocks.block[rows])
        where = f" in launch {launch}, not in the others"
        finding = _finding(kernel, late, found, (blocks, rows), (where, LAUNCH_CAUSE))
        finding.numbers["launch"] = launch
        finding.numbers["launches_with_stragglers"] = len(candidates)
        findings.append(finding)
    return findings


def _last_of_each_launch(kernel: KernelWarps, late: BlockLateness, alpha: float) -> list[Finding]:
    """The finding where in each launch another block is late, which is the last to end. The gaps of all
    launches are judged together (Fisher's method), so that they need not be far beyond the tail in each.
    """
    rows, chances = list[int](), list[float]()
    for first, last in pairwise(kernel.block_bounds.tolist()):
        if last - first < MIN_VALUES:
            return []
        order, excess, _ = _tail(late.rows_ns[first:last], float(kernel.clock_step_ns))
        if kernel.blocks.end_ns[first + order[0]] < kernel.blocks.end_ns[first:last].max():
            return []
        rows.append(first + int(order[0]))
        chances.append(min(1.0, _chance_of_gap(excess, 1) * CAUTION))
    own = np.array(rows)
    blocks = np.sort(kernel.blocks.block[own])
    p_value = combined(np.array(chances))
    excess_ns = float(np.median(late.rows_ns[own]))
    is_another = np.unique(blocks).size > blocks.size / 2
    if p_value > alpha or not is_another or excess_ns < least_excess_ns(kernel):
        return []
    where = f", another one in each of {blocks.size} launches and always the last to end"
    finding = _finding(kernel, late, Outlying(own, p_value), (np.unique(blocks), own), (where, LAST_CAUSE))
    finding.numbers["of"] = "last block"
    return [finding]


def _finding(
    kernel: KernelWarps,
    late: BlockLateness,
    found: Outlying,
    which: tuple[Ints, Ints],
    words: tuple[str, str],
) -> Finding:
    blocks, rows = which
    excess = float(np.median(late.rows_ns[rows]))
    share = excess / max(float(np.median(kernel.launch_ns)), 1.0)
    beyond = beyond_others_ns(kernel, rows) if kernel.has_entries else late.rows_ns[rows]
    delayed = end_delayed_ns(kernel, rows, beyond)
    border = int(at_border(blocks, kernel.grid).sum())
    sms = np.unique(kernel.blocks.sm[rows]) if kernel.has_sms else np.array([], np.int64)
    count, place, edge = int(blocks.size), "", ""
    verb, than = agree(count, "exits|exit"), "later than the median block"
    if kernel.has_entries:
        verb = agree(count, "takes|take")
        than = f"longer than blocks that started with {agree(count, 'it|them')}"
    if sms.size:
        place = (
            f", on {sms.size} SMs" if sms.size > 1 else f", {'on' if count == 1 else 'all on'} SM {sms[0]}"
        )
    if border:
        edge = f",{'' if border == count else f' {border}'} at the border of the grid"
    effect = "other blocks end as late"
    if delayed >= max(MIN_SAVED * float(np.median(kernel.launch_ns)), kernel.least_ns):
        effect = f"without that the launch would end up to {duration_text(delayed)} earlier"
    evidence = (
        f"{agree(count, 'Block|Blocks')} {listed(blocks.tolist())} of {late.blocks.size}{place}{edge} {verb} "
        f"{duration_text(excess)} {than}{words[0]}: {percent(share)} of the kernel's duration; {effect} "
        f"({confidence(found.p_value)})"
    )
    numbers = {
        "of": "blocks",
        "blocks": blocks.tolist(),
        "blocks_total": int(late.blocks.size),
        "sms": sms.tolist(),
        "border_blocks": border,
        "excess_p50_ns": excess,
        "excess_share": share,
        "end_delayed_ns": delayed,
        "launches": int(kernel.launches.size),
    }
    cause = words[1] + ("" if kernel.has_entries else EXITS_ONLY)
    saves = delayed / max(float(np.median(kernel.launch_ns)), 1.0)
    return Finding("straggler", kernel.kernel, evidence, cause, found.p_value, numbers, saves)


def _border(kernel: KernelWarps, late: BlockLateness, border: Bools, alpha: float) -> list[Finding]:
    # The border blocks whose group has inner ones too, and the number of pairs of both within groups.
    of_border, of_inner = (
        np.bincount(late.group[own], minlength=int(late.group.max()) + 1) for own in (border, ~border)
    )
    outer, pairs = border & (of_inner[late.group] > 0), int(of_border @ of_inner)
    if outer.sum() < MIN_GROUP:
        return []
    ranks = ranks_in_rows(late.profile_ns, late.group)
    p_value = chance_in_rows(ranks, late.group, border)
    superiority = 0.5 + float(ranks[border].sum()) / pairs
    kinds = late.group * 2 + border
    kind, first = number_rows(kinds)
    medians = medians_by(late.profile_ns, kind)
    inner = medians[np.searchsorted(kinds[first], late.group[outer] * 2)]
    delay = float(np.median(late.profile_ns[outer] - inner))
    share = delay / max(float(np.median(kernel.launch_ns)), 1.0)
    if p_value > alpha or superiority < MIN_SUPERIORITY or delay < least_excess_ns(kernel):
        return []
    verb, than = ("take", "longer") if kernel.has_entries else ("exit", "later")
    evidence = (
        f"The {border.sum()} blocks at the border of the grid {verb} {duration_text(delay)} {than} than the "
        f"{counted((~border).sum(), 'inner one|ones')}, {percent(share)} of the kernel's duration "
        f"({confidence(p_value)})"
    )
    numbers = {
        "of": "border",
        "border_blocks": int(border.sum()),
        "blocks_total": int(late.blocks.size),
        "excess_p50_ns": delay,
        "excess_share": share,
        "superiority": superiority,
    }
    saves = share_saved(kernel, delay, np.flatnonzero(border[late.profile_row]))
    return [Finding("straggler", kernel.kernel, evidence, BORDER_CAUSE, p_value, numbers, saves)]
