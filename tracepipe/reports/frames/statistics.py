"""Tests and distributions, by the functions of `scipy.special`: `scipy.stats` takes 75 MB before it does any.

tests/unit/test_statistics.py compares each with that of `scipy.stats`.
"""

from __future__ import annotations

from typing import Any

from tracepipe.reports.frames.libraries import np, special
from tracepipe.reports.frames.stored import made, parts, release

# Up to so many pairs of a value of A with one of B, all ways to divide the values are counted.
_EXACT_PAIRS_MAX = 1 << 13
_EXACT_VALUES = 8
# Below this skewness a Pearson law is a normal one to as many digits as a float has.
_LEAST_SKEWNESS = 1.6e-5


def normal_above(score: Any) -> Any:
    """The chance that a normal variable is above a score."""
    return special.ndtr(-score)


def pearson_above(score: float, skewness: float) -> float:
    """The chance that a variable of mean 0, variance 1 and this skewness, not below 0, is above a score: by
    Pearson's law III.
    """
    if skewness < _LEAST_SKEWNESS:
        return float(normal_above(score))
    rate = 2 / skewness
    return float(special.gammaincc(rate**2, max(rate * (score + rate), 0.0)))


def binomial_above(count: int, tries: int, chance: float) -> float:
    """The chance that of so many tries so many succeed, or more."""
    return float(special.betainc(count, tries - count + 1, chance)) if count > 0 else 1.0


def median_interval(values: Any, confidence: float) -> tuple[float, float]:
    """Bounds of a median that no distribution is assumed for; infinite where there are too few values."""
    ordered, count = np.sort(values), len(values)
    most = np.arange(count + 1)
    # How likely so many values, or fewer, are below the median.
    below = special.betainc(np.maximum(count - most, 1), most + 1, 0.5)
    below[-1] = 1.0
    low = int(np.searchsorted(below, (1 - confidence) / 2)) - 1
    # As many are above it as likely; a bound that is met exactly is the other side's.
    high = int(np.searchsorted(1 - below, (1 - confidence) / 2, sorter=most[::-1], side="right"))
    high = count + 1 - high
    return (
        float(ordered[low]) if low >= 0 else -np.inf,
        float(ordered[high]) if high < count else np.inf,
    )


def ranks(values: Any) -> Any:
    """Ranks from 1 on along the last axis; equal values share the mean of theirs."""
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


class Ranks:
    """Two samples in one order: the ranks of A among all, as a column, and how much the equal ones take."""

    def __init__(self, a: Any, b: Any) -> None:
        both = np.empty(len(a) + len(b), np.result_type(a, b))
        both[: len(a)], both[len(a) :] = a, b
        both.sort()
        release()
        self._of_a, self._of_b = (self._among(values, both) for values in (a, b))
        bounds = np.flatnonzero(both[1:] != both[:-1])
        counts = np.diff(bounds, prepend=-1, append=len(both) - 1).astype(np.float64)
        self.has_ties = len(counts) < len(both)
        self._ties = float((counts**3 - counts).sum())

    @staticmethod
    def _among(values: Any, both: Any) -> Any:
        """The mean of the ranks that each value has among all."""

        def shared(part: slice) -> Any:
            first = np.searchsorted(both, values[part], "left")
            return (first + np.searchsorted(both, values[part], "right") + 1) / 2

        return made(len(values), np.float64, shared)

    @property
    def superior(self) -> float:
        """In how many pairs of a value of A with one of B that of A is greater; an equal pair is half."""
        count = len(self._of_a)
        total = sum(float(self._of_a[part].sum()) for part in parts(count))
        return total - count * (count + 1) / 2

    def greater_p(self) -> float:
        """The chance that A is so much greater than B (Mann–Whitney U)."""
        few = min(len(self._of_a), len(self._of_b)) <= _EXACT_VALUES
        if few and not self.has_ties and len(self._of_a) * len(self._of_b) <= _EXACT_PAIRS_MAX:
            return self._exact()
        return float(normal_above(self._score(self.superior)))

    def _score(self, superior: float) -> float:
        pairs, count = len(self._of_a) * len(self._of_b), len(self._of_a) + len(self._of_b)
        variance = pairs / 12 * (count + 1 - self._ties / (count * (count - 1)))
        # By half a pair less, as pairs come one by one and a normal variable does not.
        return float((superior - pairs / 2 - 0.5) / variance**0.5)

    def _exact(self) -> float:
        """The chance that ranks add up to no less than those of A: of all ways to divide."""
        # Twice the ranks are whole.
        doubled = np.rint(2 * np.concatenate((self._of_a, self._of_b))).astype(np.int64)
        count = len(self._of_a)
        ways = np.zeros((count + 1, int(np.sort(doubled)[-count:].sum()) + 1))
        ways[0, 0] = 1
        for rank in doubled.tolist():
            ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
        own = int(doubled[:count].sum())
        return float(ways[count, own:].sum() / ways[count].sum())


def rank_correlation(a: Any, b: Any) -> tuple[float, float]:
    """Spearman's, and the chance of one as far from 0; nan where all values of one are equal."""
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


def median_slope(y: Any, x: Any) -> float:
    """The median of the slopes between all two points (Theil and Sen)."""
    run, rise = np.subtract.outer(x, x), np.subtract.outer(y, y)
    return float(np.median(rise[run > 0] / run[run > 0]))
