"""Whether two samples differ by more than chance: known answers, and how often chance alone is told."""

from __future__ import annotations

from typing import Any

import pytest

from tracepipe.reports.analyses import comparison
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.statistics import Ranks


def correlated(rng: Any, count: int, previous: float) -> Any:
    """Lengths of which each depends so much on the one before."""
    noise = rng.normal(size=count)
    values = np.empty(count)
    values[0] = noise[0]
    for at in range(1, count):
        values[at] = previous * values[at - 1] + (1 - previous**2) ** 0.5 * noise[at]
    return (10_000 * np.exp(0.3 * values)).round().astype(np.int64)


def test_small_samples_are_tested_exactly() -> None:
    a, b = np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8])
    assert comparison.difference_p(Ranks(a, b), 1.0) == pytest.approx(
        2 / 70
    )  # 2 of all ways to choose 4 of 8
    assert comparison.least_p(4, 4) == pytest.approx(2 / 70)
    assert comparison.least_p(3, 3) == pytest.approx(0.1)
    # With ties, by all permutations: 1 1 2 | 2 3 3, of which 2 of 20 are so far apart.
    assert comparison.difference_p(Ranks(np.array([1, 1, 2]), np.array([2, 3, 3])), 1.0) == pytest.approx(
        0.2, abs=0.01
    )
    assert comparison.difference_p(Ranks(a, a), 1.0) == 1.0
    assert comparison.difference_p(Ranks(np.array([5, 5]), np.array([5, 5])), 1.0) == 1.0


def test_the_shift_is_the_median_of_all_differences() -> None:
    a, b = np.array([10, 20, 30, 40]), np.array([15, 25, 35, 55])
    found = comparison.shift(a, b, 0.95, 1.0)
    differences = sorted(y - x for x in a for y in b)
    assert found.estimate == np.median(differences) == 5.0
    assert (found.low, found.high) == (differences[0], differences[-1])
    assert comparison.shift(np.array([1]), np.array([4]), 0.95, 1.0) == comparison.Shift(3.0, None, None)


def test_the_bounds_of_a_shift_hold_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        a, b = rng.normal(100, 10, 40), rng.normal(107, 10, 60)
        found = comparison.shift(a, b, 0.95, 1.0)
        held += found.low is not None and found.high is not None and found.low <= 7 <= found.high
    assert 0.91 <= held / 300 <= 0.99


def test_large_samples_are_compared_by_their_quantiles() -> None:
    rng = np.random.default_rng(2)
    a = rng.lognormal(0, 0.5, 30_000)
    found = comparison.shift(a, a[:20_000] + 0.25, 0.95, 1.0)
    assert found.estimate == pytest.approx(0.25, abs=0.01)
    assert found.low is not None and found.low < found.estimate < (found.high or 0)


def test_values_that_depend_on_those_before_widen_the_test() -> None:
    rng = np.random.default_rng(3)
    independent = [comparison.dependence(rng.normal(size=400)) for _ in range(50)]
    assert 1 <= float(np.median(independent)) < 1.3
    # An autoregressive series of 0.6 has (1 + 0.6) / (1 - 0.6) = 4 times the variance of its mean.
    dependent = [comparison.dependence(correlated(rng, 4_000, 0.6).astype(float)) for _ in range(20)]
    assert float(np.median(dependent)) == pytest.approx(4, rel=0.2)
    assert comparison.dependence(np.full(100, 7.0)) == 1.0


@pytest.mark.parametrize(("count", "previous"), [(6, 0.0), (30, 0.0), (200, 0.3), (300, 0.6)])
def test_noise_alone_is_told_no_more_often_than_is_said(count: int, previous: float) -> None:
    rng = np.random.default_rng(4)
    told = naive = 0
    for _ in range(300):
        a, b = correlated(rng, count, previous), correlated(rng, count, previous)
        told += comparison.difference_p(Ranks(a, b), comparison.ranks_widening(Ranks(a, b))) <= 0.05
        naive += comparison.difference_p(Ranks(a, b), 1.0) <= 0.05
    # Of 300 at 5 %: more than 27 happen in one of a thousand.
    assert told <= 27
    assert previous < 0.6 or naive > 60  # what the widening is for


def test_tails_are_compared_where_there_are_enough_values() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(100, 1, 500), rng.normal(100, 1, 500)
    b[::10] += 50  # one of ten is slow: no more than the median notices
    found = comparison.tail(a, b, Ranks(a, b))
    assert found is not None
    assert found.p < 1e-4 and found.share_b == pytest.approx(0.1, abs=0.01) and found.share_a < 0.01
    other = rng.normal(100, 1, 500)
    same = comparison.tail(a, other, Ranks(a, other))
    assert same is not None and same.p > 0.05
    assert comparison.tail(a, b[:99], Ranks(a, b[:99])) is None


def test_counts_are_compared_by_how_bunched_they_are() -> None:
    even = np.arange(0, 1_000, 10)
    more = np.arange(0, 1_000, 5)
    window = (0, 1_000)
    assert comparison.count_p(even, even + 1, window, window) == 1.0
    assert comparison.count_p(even, more, window, window) < 1e-6
    bunched, twice = np.repeat([100, 900], 50), np.repeat([100, 900], 100)
    assert comparison.count_p(bunched, twice, window, window) > 0.05
    assert comparison.count_p(even[:1], even[:0], window, window) == 1.0


def test_many_tests_are_adjusted_for_their_number() -> None:
    adjusted = comparison.discoveries(np.array([0.01, 0.02, 0.03, 0.5]))
    assert adjusted.tolist() == pytest.approx([0.04, 0.04, 0.04, 0.5])
    assert len(comparison.discoveries(np.zeros(0))) == 0


def dependence_of_the_whole(values: Any) -> float:
    """As `dependence`, with all values at once."""
    centred = values - values.mean()
    count, spectrum = len(values), np.fft.rfft(centred, 4 * len(values))
    correlation = np.fft.irfft(spectrum * spectrum.conj())[:count] / (centred @ centred)
    pairs = correlation[: count // 2 * 2].reshape(-1, 2).sum(axis=1)
    stop = np.flatnonzero(pairs <= 0)
    pairs = pairs[: int(stop[0])] if len(stop) else pairs
    return max(1.0, 2 * float(np.minimum.accumulate(pairs).sum()) - 1)


@pytest.mark.parametrize("previous", [0.0, 0.6, 0.999])
def test_dependence_is_that_of_the_whole_however_it_is_cut(
    previous: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(comparison, "_LAGS_AT_FIRST", 16)
    for count in (10, 63, 64, 1_000, 4_097):
        values = correlated(np.random.default_rng(count), count, previous)
        assert comparison.dependence(values) == pytest.approx(dependence_of_the_whole(values))
