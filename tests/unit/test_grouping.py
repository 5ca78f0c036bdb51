"""Rows by their numbers: what is done a part at a time gives what the whole would."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.reports.frames import stored
from tracepipe.reports.frames.grouping import in_buckets, reduced


@pytest.fixture(autouse=True, scope="module")
def _short_parts() -> Iterator[None]:
    """Parts of few rows, so that groups lie in several."""
    patch = pytest.MonkeyPatch()
    patch.setattr(stored, "ROWS_AT_ONCE", 4)
    yield
    patch.undo()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=40))
def test_buckets_are_a_stable_sort(rows: list[tuple[int, int]]) -> None:
    numbers = np.array([number for number, _ in rows], np.int32)
    values = np.array([value for _, value in rows], np.int64)
    bounds, (ordered, again) = in_buckets(numbers, 6, values, numbers)
    assert ordered.tolist() == values[np.argsort(numbers, kind="stable")].tolist()
    assert again.tolist() == sorted(numbers.tolist())
    assert bounds.tolist() == [0, *np.cumsum(np.bincount(numbers, minlength=6)).tolist()]


@given(st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=11), min_size=1, max_size=8))
def test_groups_that_lie_in_several_parts_are_reduced(groups: list[list[int]]) -> None:
    column = np.array([value for group in groups for value in group], np.int64)
    starts = np.cumsum([0, *map(len, groups[:-1])])
    assert reduced(np.minimum, column, starts).tolist() == [min(group) for group in groups]
    assert reduced(np.add, column, starts).tolist() == [sum(group) for group in groups]
