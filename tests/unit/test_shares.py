"""How much of the time something is busy, by bins that grow as wide as they need to be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.layout import summaries
from tracepipe.layout.summaries import Share

STRETCHES = st.lists(
    st.tuples(st.integers(0, 1 << 24), st.one_of(st.integers(0, 1 << 12), st.integers(0, 1 << 23))),
    min_size=1,
    max_size=6,
)
_US = 1 << 10


def share_of(*parts: list[tuple[int, int]]) -> Share:
    """The share of stretches, each a begin and a length."""
    share = Share()
    for part in parts:
        begin_ns, length_ns = (np.array(column, np.int64) for column in zip(*part, strict=True))
        share.add(begin_ns, begin_ns + length_ns)
    return share


def test_a_bin_has_its_part_of_what_goes_on_over_several() -> None:
    share = share_of([(0, _US // 2), (3 * _US + _US // 4, 2 * _US)])
    assert share.percent() == [(0, 50), (_US, 0), (3 * _US, 75), (4 * _US, 100), (5 * _US + _US // 4, 0)]


def test_the_first_and_the_last_bin_are_as_long_as_it_is_known_what_was_done_in_them() -> None:
    assert share_of([(100, 50), (200, 50)]).percent() == [(100, 67), (250, 0)]


def test_what_is_busy_for_a_moment_is_not_idle() -> None:
    assert share_of([(0, 1), (_US - 1, 2)]).percent() == [(0, 1), (_US, 100), (_US + 1, 0)]


def test_nothing_has_no_share() -> None:
    assert Share().percent() == []
    assert share_of([(5, 0)]).percent() == []


def test_a_time_that_is_long_ago_takes_no_more_bins() -> None:
    share = share_of([(1 << 61, 5_000)], [(0, 1)])
    values = share.percent()
    assert (values[0][0], values[-1]) == (0, ((1 << 61) + 5_000, 0))
    assert len(values) <= summaries.BINS_MAX + 1


@given(STRETCHES, STRETCHES)
def test_bins_hold_all_that_was_busy_whatever_the_order(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    share, other = share_of(first, second), share_of(second, first)
    assert share.percent() == other.percent()
    stretches = [one for one in first + second if one[1]]
    values = share.percent()
    assert len(values) <= summaries.BINS_MAX + 1
    if not stretches:
        return
    begin_ns, end_ns = min(at for at, _ in stretches), max(at + length for at, length in stretches)
    assert (values[0][0], values[-1]) == (begin_ns, (end_ns, 0))
    width_ns = _US
    while (end_ns - 1) // width_ns - begin_ns // width_ns >= summaries.BINS_MAX:
        width_ns *= 2
    known = dict(values)
    value = 0
    for at in range(begin_ns // width_ns, (end_ns - 1) // width_ns + 1):
        from_ns, to_ns = max(at * width_ns, begin_ns), min((at + 1) * width_ns, end_ns)
        value = known.get(from_ns, value)
        busy_ns = sum(max(0, min(at + length, to_ns) - max(at, from_ns)) for at, length in stretches)
        exact = 100 * busy_ns / (to_ns - from_ns)
        assert value == 0 if not busy_ns else value == max(1, int(np.floor(exact + 0.5)))
