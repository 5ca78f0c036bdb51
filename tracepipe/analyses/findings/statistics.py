"""Statistical tests and distributions, made from functions of `scipy.special`: importing `scipy.stats` takes
75 MB. tests/unit/test_statistics.py compares those that it has with `scipy.stats`.

Tests by ranks: under the null hypothesis, the times of one row (lanes of a warp, warps of a block, blocks of
a launch) are exchangeable. With any distribution, however heavy its tail, their ranks are a random order.
Sums of ranks over many rows are normal. With few rows, or many ties from a coarse clock, the sums are skewed,
and no class can be less likely than one order among all possible ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tracepipe.event.columns import AnyArray, Bools, Floats, Ints
from tracepipe.event.groups import number_rows, sorted_rows, sorted_runs
from tracepipe.libraries import np, special

# With less skewness, a Pearson distribution equals a normal one within the precision of a float.
_LEAST_SKEWNESS = 1.6e-5


def normal_above(score: Floats | float) -> Floats:
    """The chance that a standard normal variable is above a score. Scores and result have the same shape."""
    found: Floats = special.ndtr(-score)
    return found


def pearson_above(score: float, skewness: float) -> float:
    """The chance that a Pearson type III variable with mean 0, variance 1 and this skewness (at least 0) is
    above a score.
    """
    if skewness < _LEAST_SKEWNESS:
        return float(normal_above(score))
    rate = 2 / skewness
    return float(special.gammaincc(rate**2, max(rate * (score + rate), 0.0)))


def binomial_above(count: int, tries: int, chance: float) -> float:
    """The chance that at least `count` of `tries` tries succeed, each with the probability `chance`."""
    return float(special.betainc(count, tries - count + 1, chance)) if count > 0 else 1.0


def combined(p_values: Floats) -> float:
    """The chance of p values of independent tests that are as small together (Fisher's method)."""
    return float(special.gammaincc(p_values.size, -np.log(np.maximum(p_values, 1e-300)).sum()))


def median_interval(values: AnyArray, confidence: float) -> tuple[float, float]:
    """Distribution-free bounds of the median of `values`, shape `(n,)`; infinite if these are too few."""
    ordered, count = np.sort(values), len(values)
    most = np.arange(count + 1)
    # The chances that at most 0, 1, … values are below the median.
    below = special.betainc(np.maximum(count - most, 1), most + 1, 0.5)
    below[-1] = 1.0
    low = int(np.searchsorted(below, (1 - confidence) / 2)) - 1
    # The same holds above the median; a bound that is met exactly belongs to the other side.
    high = int(np.searchsorted(1 - below, (1 - confidence) / 2, sorter=most[::-1], side="right"))
    high = count + 1 - high
    return (
        float(ordered[low]) if low >= 0 else -np.inf,
        float(ordered[high]) if high < count else np.inf,
    )


def rank_correlation(a: AnyArray, b: AnyArray) -> tuple[float, float]:
    """Spearman's rank correlation of two columns of shape `(n,)`, and the chance of one at least as far from
    0; nan where all values of a column are equal.
    """
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return np.nan, np.nan
    centred = [ranks_in_rows(one, np.zeros(len(one), np.int64)) for one in (a, b)]
    lengths = [float(one @ one) ** 0.5 for one in centred]
    found = float(np.clip(centred[0] @ centred[1] / (lengths[0] * lengths[1]), -1, 1))
    free = len(a) - 2
    if abs(found) == 1:
        return found, 0.0
    score = abs(found) * (free / ((1 + found) * (1 - found))) ** 0.5
    return found, float(2 * special.stdtr(free, -score))


def median_slope(y: Floats, x: Floats) -> float:
    """The median of the slopes between all pairs of points (Theil-Sen). Shapes `(n,)`."""
    run, rise = np.subtract.outer(x, x), np.subtract.outer(y, y)
    return float(np.median(rise[run > 0] / run[run > 0]))


# The most cells of a table of rows and classes, which may be nearly empty; larger ones are not made.
_CELLS = 1 << 20


def ranks_in_rows(values: AnyArray, row: Ints) -> Floats:
    """Ranks within each row less their mean, with the mean rank for ties. `row` has the number of the row of
    each value. Shapes `(n,)`.
    """
    present = np.bincount(row)
    order, starts = sorted_runs(row, values)
    counts = np.diff(starts, append=len(order))
    ranks = np.empty(values.size)
    ranks[order] = np.repeat(starts + (counts - 1) / 2, counts)
    centred: Floats = ranks - (np.cumsum(present) - present + (present - 1) / 2)[row]
    return centred


def score_rows(ranks: Floats, row: Ints, classes: Ints, count: int) -> Floats:
    """A score for how much later than the rest each class 0…`count`-1 is: standard normal under the null
    hypothesis, negative for early classes.

    `ranks` are centred within each row; `row` and `classes` are the row and the class of each rank, all of
    shape `(n,)`. The scores have the shape `(count,)`.
    """
    present = np.bincount(row)
    variance = np.bincount(row, ranks**2) / np.maximum(present, 1)
    # Each pair of a row and a class that occurs, and how often it does.
    key = row * count + classes
    if int(row.max(initial=0)) < _CELLS // count:
        every = np.bincount(key)
        pairs = np.flatnonzero(every)
        members = every[pairs]
    else:
        pairs, members = np.unique(key, return_counts=True)
    rows, of = pairs // count, pairs % count
    others = present[rows] - members
    spread = np.bincount(of, members * others / np.maximum(present[rows] - 1, 1) * variance[rows], count)
    sums = np.bincount(classes, ranks, count)
    scores: Floats = np.divide(sums, np.sqrt(spread), out=np.zeros(count), where=spread > 0)
    return scores


def chance_in_rows(ranks: Floats, row: Ints, members: Bools) -> float:
    """The chance that values are as late as `members` are, if all orders within a row are equally likely.
    `ranks` are from `ranks_in_rows`. Shapes `(n,)`.
    """
    present, chosen = np.bincount(row), np.bincount(row, members)
    usable = (chosen > 0) & (chosen < present)
    if not usable.any():
        return 1.0
    n, k = present[usable].astype(np.float64), chosen[usable].astype(np.float64)
    squares, cubes = (np.bincount(row, ranks**power)[usable] for power in (2, 3))
    total = float(ranks[members & usable[row]].sum())
    variance = float((k * (n - k) / (n - 1) * squares / n).sum())
    if variance <= 0:
        return 1.0
    # In a row of two values the skewness is 0.
    third = (n - k) * (n - 2 * k) * k / ((n - 1) * np.maximum(n - 2, 1)) * cubes / n
    score, skewness = total / variance**0.5, max(float(third.sum()) / variance**1.5, 0.0)
    log_orders = _log_factorial(n) - _log_factorial(k) - _log_factorial(n - k)
    least = float(np.exp(-log_orders.sum()))
    return max(float(normal_above(score)), pearson_above(score, skewness), least)


def _log_factorial(values: Floats) -> Floats:
    logs: Floats = np.cumsum(np.log(np.maximum(np.arange(values.max(initial=0) + 1), 1)))
    return logs[values.astype(np.int64)]


def between(times: Floats, members: Bools, middle: Callable[..., Any] | None = None) -> Floats:
    """For each row, the median time of its members, or another `middle`, less the median time of the others;
    nan if either side is empty. `times` and `members` have the shape `(rows, positions)`, the result
    `(rows,)`.
    """
    above, below = np.where(members, times, np.nan), np.where(members, np.nan, times)
    usable = ~(np.isnan(above).all(axis=1) | np.isnan(below).all(axis=1))
    delays, middle = np.full(times.shape[0], np.nan), middle or np.nanmedian
    delays[usable] = middle(above[usable], axis=1) - np.nanmedian(below[usable], axis=1)
    return delays


class LateClass(NamedTuple):
    """Positions t with t mod `modulus` in `residues` are later than the others."""

    modulus: int
    residues: list[int]
    p_value: float
    members: Bools
    delay: float
    """How much later the members are, in the median, than the others of their row."""


APART_OF_RANGE = 0.5
"""The least gap between the late residues and the next one, as a share of the range of all residues. With a
smaller gap the positions form a ramp, and no class of them is late."""


def late_class(times: Floats, positions: Ints, moduli: range) -> LateClass | None:
    """Return the modulus and residues of `positions` whose times are the latest, or None where no class is
    apart from the others. `times` and `positions` have the shape `(rows, positions)`."""
    known = ~np.isnan(times)
    late = late_class_in_rows(times[known], np.nonzero(known)[0], positions[known], moduli)
    return late and late._replace(members=np.isin(positions % late.modulus, late.residues))


def late_class_in_rows(times: Floats, row: Ints, positions: Ints, moduli: range) -> LateClass | None:
    """Like `late_class`, for rows of different lengths, as in `ranks_in_rows`. Shapes `(n,)`."""
    ranks = ranks_in_rows(times, row)
    tried, score, modulus, residue = 0, 0.0, 0, 0
    for candidate in moduli:
        scores = score_rows(ranks, row, positions % candidate, candidate)
        tried += candidate
        # With equal evidence the smaller modulus is the simpler pattern, so a larger one must score better.
        if scores.max() > score:
            score, modulus, residue = float(scores.max()), candidate, int(scores.argmax())
    if not modulus:
        return None
    classes = positions % modulus
    # Where a class is half of its row, only the others' median is the same in all rows.
    residual = _after_others(times, row, classes == residue)
    level = np.full(modulus, np.nan)
    known = ~np.isnan(residual)
    of, first = number_rows(classes[known])
    level[classes[known][first]] = medians_by(residual[known], of)
    residues = _standing_apart(level, int(moduli[-1]) if modulus == moduli[-1] else 0)
    if residue not in residues:
        return None
    chance = chance_in_rows(ranks, row, classes == residue)
    members: Bools = np.isin(classes, residues)
    delay = float(np.nanmedian(_after_others(times, row, members)[members]))
    return LateClass(modulus, residues, min(1.0, chance * tried), members, delay)


def _after_others(times: Floats, row: Ints, members: Bools) -> Floats:
    """Times less the median of those of their row that are no members; nan where there are none."""
    medians = np.full(int(row.max()) + 1, np.nan)
    of, first = number_rows(row[~members])
    medians[row[~members][first]] = medians_by(times[~members], of)
    rest: Floats = times - medians[row]
    return rest


def _standing_apart(level: Floats, widest: int) -> list[int]:
    """The residues above the largest gap, where they are few enough to be a stride."""
    order = np.argsort(level)  # nan last
    known = order[~np.isnan(level[order])]
    if known.size < 2:
        return []
    steps = np.diff(level[known])
    cut = int(steps.argmax())
    span = level[known[-1]] - level[known[0]]
    late = known[cut + 1 :]
    # Many residues of the widest modulus are a range of lanes, not a stride: divergence reports that.
    most = 1 if level.size == widest else max(1, level.size // 4)
    if span <= 0 or steps[cut] < APART_OF_RANGE * span or late.size > most:
        return []
    return sorted(int(r) for r in late)


def median_with_interval(values: Floats) -> tuple[float, float, float]:
    """The median and its distribution-free 95% interval, infinite where there are too few values for one."""
    return float(np.median(values)), *median_interval(values, 0.95)


def medians_by(values: Floats, groups: Ints) -> Floats:
    """The median of `values` in each group, shape `(groups,)`. `groups` has the numbers 0…groups-1, each at
    least once."""
    counts = np.bincount(groups)
    first = np.cumsum(counts) - counts
    ordered = values[sorted_rows(groups, values)]
    medians: Floats = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2
    return medians
