"""Compares two samples: is the difference more than chance makes, and how large is it.

Lengths of one call in one run depend on each other: a slow one often comes after a slow one. A test for
independent values would then see differences where there are none, so that each test here is widened by how
much the values depend on those before them (`dependence`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracepipe.reports.frames.libraries import np, stats
from tracepipe.reports.frames.stored import made, parts

# From so many values on it is seen whether they depend on each other.
DEPENDENCE_MIN = 10
# Values of a sample whose differences are taken one by one; of a larger one, so many quantiles stand for all.
_SKETCH = 1_000
_TAIL_PERCENT = 5
# A tail has to have some values to be compared.
TAIL_MIN = 100
WINDOWS = 20
_EXACT_MAX = 8
_RESAMPLES = 20_000


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
    centred = values - values.mean()
    variance = float(centred @ centred)
    if variance == 0:
        return 1.0
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    correlation = np.fft.irfft(spectrum * spectrum.conj(), size)[:count] / variance
    pairs = correlation[: count // 2 * 2].reshape(-1, 2).sum(axis=1)
    stop = np.flatnonzero(pairs <= 0)
    pairs = pairs[: int(stop[0])] if len(stop) else pairs
    # Sums of neighbours that grow again are noise.
    return max(1.0, 2 * float(np.minimum.accumulate(pairs).sum()) - 1)


def _widening(a: Any, b: Any) -> float:
    """`dependence` of the difference between two means, of numbers in the order of time."""
    of_a, of_b = dependence(a) / len(a), dependence(b) / len(b)
    return float((of_a + of_b) / (1 / len(a) + 1 / len(b)))


def _widened(p: float, widening: float) -> float:
    """A two-sided p whose statistic varies so many times as much."""
    if p <= 0:
        return 0.0
    return float(min(1.0, 2 * stats.norm.sf(stats.norm.isf(p / 2) / widening**0.5)))


def least_p(count_a: int, count_b: int) -> float:
    """The smallest p that two samples of these sizes can have: 2 in all ways to divide them."""
    ways = 1.0
    for at in range(min(count_a, count_b)):
        ways *= (count_a + count_b - at) / (at + 1)
    return min(1.0, 2 / ways)


def ranks_widening(a: Any, b: Any) -> float:
    """How much a rank test of these samples has to be widened."""
    ranks = stats.rankdata(np.concatenate((a, b)))
    return _widening(ranks[: len(a)], ranks[len(a) :])


def difference_p(a: Any, b: Any, widening: float) -> float:
    """How likely samples differ so much by chance: Mann–Whitney U, two-sided, exact where they are small."""
    if a.min() == a.max() == b.min() == b.max():
        return 1.0
    small = max(len(a), len(b)) <= _EXACT_MAX
    has_ties = len(np.unique(np.concatenate((a, b)))) < len(a) + len(b)
    method: Any = "exact" if small else "asymptotic"
    if small and has_ties:
        method = stats.PermutationMethod(n_resamples=_RESAMPLES, rng=np.random.default_rng(0))
    return _widened(float(stats.mannwhitneyu(a, b, method=method).pvalue), widening)


def shift(a: Any, b: Any, confidence: float, widening: float) -> Shift:
    """By how much values of B differ from those of A."""
    low_rank = (
        0.5
        - float(stats.norm.isf((1 - confidence) / 2))
        * (widening * (len(a) + len(b) + 1) / (12 * len(a) * len(b))) ** 0.5
    )
    small_a, small_b = _sketch(a), _sketch(b)
    differences = np.subtract.outer(small_b, small_a).ravel()
    differences.sort()
    count = len(differences)
    place = int(low_rank * count)  # rounded down: the bounds hold at least as often
    estimate = float(np.median(differences))
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


def tail(a: Any, b: Any) -> Tail | None:
    """Compares the longest values of two samples; None where there are too few to."""
    if min(len(a), len(b)) < TAIL_MIN:
        return None
    limit = float(np.quantile(np.concatenate((a, b)), 1 - _TAIL_PERCENT / 100, method="higher"))
    above_a, above_b = (a > limit).astype(np.float64), (b > limit).astype(np.float64)
    p = difference_p(above_a, above_b, _widening(above_a, above_b))
    return Tail(limit, float(above_a.mean()), float(above_b.mean()), p)


def count_p(a_ns: Any, b_ns: Any, a_window: tuple[int, int], b_window: tuple[int, int]) -> float:
    """How likely two counts differ so much by chance, of events at these times in these stretches of time.

    Events that come in bunches vary more than independent ones: by how much is seen from their counts in
    `WINDOWS` parts of each run.
    """
    if len(a_ns) == len(b_ns):
        return 1.0
    total = len(a_ns) + len(b_ns)
    spread = (len(a_ns) * _bunching(a_ns, a_window) + len(b_ns) * _bunching(b_ns, b_window)) / total
    return _widened(float(stats.binomtest(len(a_ns), total, 0.5).pvalue), spread)


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
