"""Compares two samples: is the difference more than chance makes, and how large is it.

Lengths of one call in one run depend on each other: a slow one often comes after a slow one. A test for
independent values would then see differences where there are none, so that each test here is widened by how
much the values depend on those before them (`dependence`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracepipe.reports.frames import statistics
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.statistics import Ranks
from tracepipe.reports.frames.stored import ROWS_AT_ONCE, made, parts, release

# From so many values on it is seen whether they depend on each other.
DEPENDENCE_MIN = 10
# Values of a sample whose differences are taken one by one; of a larger one, so many quantiles stand for all.
_SKETCH = 1_000
_TAIL_PERCENT = 5
# A tail has to have some values to be compared.
TAIL_MIN = 100
WINDOWS = 20
# How far values are looked at for what depends on what, at first and at most.
_LAGS_AT_FIRST = 1 << 11
_LAGS_MAX = 1 << 17


@dataclass(frozen=True, slots=True)
class Shift:
    """By how much values of B differ from those of A: the Hodges–Lehmann estimate and its confidence bounds,
    None where the samples are too small for bounds."""

    estimate: float
    low: float | None
    high: float | None


def dependence(values: Any) -> float:
    """How many times the variance of the mean is what it would be if the values were independent, at least 1.

    The values are in the order of time. Geyer's initial positive sequence.
    """
    count = len(values)
    if count < DEPENDENCE_MIN:
        return 1.0
    mean = sum(float(values[part].sum()) for part in parts(count)) / count
    variance = sum(float(((values[part] - mean) ** 2).sum()) for part in parts(count))
    if variance == 0:
        return 1.0
    lags = min(_LAGS_AT_FIRST, count)
    while True:
        correlation = _products(values, mean, lags) / variance
        pairs = correlation[: lags // 2 * 2].reshape(-1, 2).sum(axis=1)
        stop = np.flatnonzero(pairs <= 0)
        if len(stop) or lags == min(count, _LAGS_MAX):
            break
        lags = min(lags * 8, count, _LAGS_MAX)
    pairs = pairs[: int(stop[0])] if len(stop) else pairs
    # Sums of neighbours that grow again are noise.
    return max(1.0, 2 * float(np.minimum.accumulate(pairs).sum()) - 1)


def _products(values: Any, mean: float, lags: int) -> Any:
    """The sums of all values, less the mean, times those so many places later, for each number of places.

    Some values at a time, with those that follow them.
    """
    at_once = min(max(lags, ROWS_AT_ONCE), len(values))
    size = 1 << (2 * at_once + lags - 1).bit_length()
    found = np.zeros(lags)
    for start in range(0, len(values), at_once):
        here = values[start : start + at_once] - mean
        later = values[start : start + at_once + lags] - mean
        spectrum = np.fft.rfft(here, size).conj()
        spectrum *= np.fft.rfft(later, size)
        found += np.fft.irfft(spectrum, size)[:lags]
        release()
    return found


def _widening(a: Any, b: Any) -> float:
    """`dependence` of the difference between two means, of numbers in the order of time."""
    of_a, of_b = dependence(a) / len(a), dependence(b) / len(b)
    return float((of_a + of_b) / (1 / len(a) + 1 / len(b)))


def _widened(p: float, widening: float) -> float:
    """A two-sided p whose statistic has `widening` times the variance."""
    if p <= 0:
        return 0.0
    return float(min(1.0, 2 * statistics.normal_above(statistics.normal_score(p / 2) / widening**0.5)))


def least_p(count_a: int, count_b: int) -> float:
    """The smallest p that two samples of these sizes can have: 2 in all ways to divide them."""
    ways = 1.0
    for at in range(min(count_a, count_b)):
        ways *= (count_a + count_b - at) / (at + 1)
    return min(1.0, 2 / ways)


def ranks_widening(ranks: Ranks) -> float:
    """How much a rank test of these samples has to be widened."""
    return _widening(ranks.of_a, ranks.of_b)


def difference_p(ranks: Ranks, widening: float) -> float:
    """How likely samples differ so much by chance: Mann–Whitney U, two-sided, exact where they are small."""
    if ranks.ordered[0] == ranks.ordered[-1]:
        return 1.0
    return _widened(ranks.different_p(), widening)


def shift(a: Any, b: Any, confidence: float, widening: float) -> Shift:
    """By how much values of B differ from those of A."""
    low_rank = (
        0.5
        - statistics.normal_score((1 - confidence) / 2)
        * (widening * (len(a) + len(b) + 1) / (12 * len(a) * len(b))) ** 0.5
    )
    small_a, small_b = _sketch(a), _sketch(b)
    differences = np.subtract.outer(small_b, small_a).ravel()
    differences.sort()
    count = len(differences)
    place = int(low_rank * count)  # rounded down: the bounds hold at least as often
    estimate = float(differences[(count - 1) // 2] + differences[count // 2]) / 2
    if place < 1:
        return Shift(estimate, None, None)
    return Shift(estimate, float(differences[place - 1]), float(differences[count - place]))


def _sketch(values: Any) -> Any:
    """The values, or evenly spaced quantiles of many, as floats."""
    if len(values) <= _SKETCH:
        return values.astype(np.float64)
    return np.quantile(values, (np.arange(_SKETCH) + 0.5) / _SKETCH)


@dataclass(frozen=True, slots=True)
class Tail:
    """Which share of each sample is above 95 of 100 values of both, and how likely that is by chance."""

    limit: float
    share_a: float
    share_b: float
    p: float


def tail(a: Any, b: Any, ranks: Ranks) -> Tail | None:
    """Compares the longest values of two samples; None where there are too few to."""
    if min(len(a), len(b)) < TAIL_MIN:
        return None
    # Of this many percent, the next longer one.
    limit = float(ranks.ordered[-(-(len(ranks.ordered) - 1) * (100 - _TAIL_PERCENT) // 100)])
    above_a, above_b = _above(a, limit), _above(b, limit)
    p = difference_p(Ranks(above_a, above_b), _widening(above_a, above_b))
    return Tail(limit, float(above_a.mean()), float(above_b.mean()), p)


def _above(values: Any, limit: float) -> Any:
    """1 for each value that is above the limit, and 0 for the others."""
    return made(len(values), np.float64, lambda part: values[part] > limit)


def count_p(a_ns: Any, b_ns: Any, a_window: tuple[int, int], b_window: tuple[int, int]) -> float:
    """How likely two counts differ so much by chance, of events at these times in these stretches of time.

    Events that come in bunches vary more than independent ones: by how much is seen from their counts in
    `WINDOWS` parts of each run.
    """
    if len(a_ns) == len(b_ns):
        return 1.0
    total = len(a_ns) + len(b_ns)
    spread = (len(a_ns) * _bunching(a_ns, a_window) + len(b_ns) * _bunching(b_ns, b_window)) / total
    return _widened(statistics.binomial_either(len(a_ns), total), spread)


def _bunching(ts_ns: Any, window: tuple[int, int]) -> float:
    """The variance of counts by their mean, at least 1, which it is of independent events."""
    if len(ts_ns) < 2:
        return 1.0
    counts, _ = np.histogram(ts_ns, bins=WINDOWS, range=(window[0], max(window[1], window[0] + 1)))
    return max(1.0, float(counts.var(ddof=1) / max(counts.mean(), 1e-9)))


def discoveries(p: Any) -> Any:
    """p of many tests, adjusted: of those up to q a share of q is false, in the mean (Benjamini–Hochberg)."""
    # Of a million names most have the same p.
    values = np.unique(np.concatenate([np.zeros(0), *(np.unique(p[part]) for part in parts(len(p)))]))
    counts = np.zeros(len(values), np.int64)
    for part in parts(len(p)):
        counts += np.bincount(np.searchsorted(values, p[part]), minlength=len(values))
    adjusted = values * (len(p) / np.cumsum(counts))
    np.minimum.accumulate(adjusted[::-1], out=adjusted[::-1])
    adjusted = np.clip(adjusted, 0.0, 1.0)
    return made(len(p), np.float64, lambda part: adjusted[np.searchsorted(values, p[part])])
