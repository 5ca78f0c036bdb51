"""What `scipy.stats` says of the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.analyses.findings import statistics
from tracepipe.libraries import Library

stats: Any = Library("scipy.stats")  # which takes a second to import


@given(st.floats(-8, 30), st.floats(0, 4))
def test_chances_above_a_score(score: float, skewness: float) -> None:
    assert statistics.normal_above(score) == pytest.approx(stats.norm.sf(score))
    expected = stats.pearson3.sf(score, skewness)
    assert statistics.pearson_above(score, skewness) == pytest.approx(expected, rel=1e-8, abs=1e-300)


@given(st.integers(1, 3_000), st.data(), st.floats(0.001, 0.9))
def test_binomial_chances(tries: int, data: st.DataObject, chance: float) -> None:
    count = data.draw(st.integers(0, tries))
    greater = stats.binomtest(count, tries, chance, "greater").pvalue
    assert statistics.binomial_above(count, tries, chance) == pytest.approx(greater, rel=1e-7, abs=1e-300)


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=70))
def test_p_values_together(p_values: list[float]) -> None:
    expected = stats.combine_pvalues(p_values, method="fisher").pvalue
    assert statistics.combined(np.array(p_values)) == pytest.approx(expected, rel=1e-7, abs=1e-300)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=70))
def test_bounds_of_a_median(values: list[int]) -> None:
    bounds = stats.quantile_test(values, q=0.0, p=0.5).confidence_interval(0.95)
    expected = [
        -np.inf if np.isnan(bounds.low) else bounds.low,
        np.inf if np.isnan(bounds.high) else bounds.high,
    ]
    assert list(statistics.median_interval(np.array(values), 0.95)) == expected


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=5))
def test_ranks_share_places(rows: list[list[int]]) -> None:
    values = np.array(rows)
    ranks = statistics.ranks_in_rows(values.reshape(-1), np.repeat(np.arange(len(rows)), 4))
    assert (ranks.reshape(-1, 4) == stats.rankdata(values, axis=1) - 2.5).all()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=40))
def test_correlation_and_slope(points: list[tuple[int, int]]) -> None:
    x, y = (np.array(column, np.float64) for column in zip(*points, strict=True))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert np.isnan(statistics.rank_correlation(x, y)).all()
        return
    expected = stats.spearmanr(x, y)
    assert statistics.rank_correlation(x, y) == pytest.approx((expected.statistic, expected.pvalue), abs=1e-7)
    assert statistics.median_slope(y, x) == pytest.approx(stats.theilslopes(y, x).slope)
