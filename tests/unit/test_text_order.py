"""Rows in the order of their texts, which are compared by pieces, and rows that are kept in a file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.reports.frames import text_order
from tracepipe.reports.frames.kept_rows import kept_rows
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.text_order import in_text_order

TEXTS = st.text(st.sampled_from("ab\0\1é\ud800\U0001f600"), max_size=40)


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 1), TEXTS), max_size=30), st.integers(1, 9))
def test_texts_decide_where_numbers_do_not(rows: list[tuple[int, int, str]], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_order, "_PIECE_MOST", piece)
        patch.setattr(text_order, "_PIECE_LEAST", 1)
        columns = [np.array([row[at] for row in rows], np.int64) for at in range(2)]
        order = in_text_order(lambda at: rows[at][2], *columns).tolist()
    assert order == sorted(range(len(rows)), key=rows.__getitem__)


@pytest.mark.parametrize("count", [0, 1, 999, 1_000, 1_001, 2_500])
def test_kept_rows_are_the_same_each_time(count: int) -> None:
    rows = [("name \ud800", at, None, at / 3, 1 << 70) for at in range(count)]
    kept = kept_rows(iter(rows))
    assert (len(kept), [*kept], [*kept]) == (count, rows, rows)
    assert bool(kept) == bool(rows)
