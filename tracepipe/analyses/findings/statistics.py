"""Statistical tests and distributions, made from functions of `scipy.special`: importing `scipy.stats` takes
75 MB.

tests/unit/test_statistics.py compares each with `scipy.stats`.
"""

from __future__ import annotations

from tracepipe.reports.frames.arrays import AnyArray, Floats
from tracepipe.reports.frames.libraries import np, special

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


def median_interval(values: AnyArray, confidence: float) -> tuple[float, float]:
    """Distribution-free bounds of the median of `values`, shape `(n,)`; infinite where there are
    too few values.
    """
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


def ranks(values: AnyArray) -> Floats:
    """The ranks, from 1, along the last axis; equal values get the mean of their ranks. The shape is that of
    `values`.
    """
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, -1)
    is_first = np.ones(values.shape, np.bool_)
    is_first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    starts = np.flatnonzero(is_first)
    counts = np.diff(starts, append=values.size)
    found = np.empty(values.shape)
    shared = np.repeat(starts % values.shape[-1] + (counts + 1) / 2, counts) if values.size else found
    np.put_along_axis(found, order, shared.reshape(values.shape), -1)
    return found


def rank_correlation(a: AnyArray, b: AnyArray) -> tuple[float, float]:
    """Spearman's rank correlation of two columns of shape `(n,)`, and the chance of one at least as far from
    0; nan where all values of a column are equal.
    """
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return np.nan, np.nan
    centred = [one - one.mean() for one in (ranks(a), ranks(b))]
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
