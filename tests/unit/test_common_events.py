"""Calls without a number that two recordings have: by how much one is ahead, or that they do not say it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.clocks.common_events import CALLS_KEPT_MAX, CallTimes, Times, between

Span = tuple[int, int]


def recorded(spans: Sequence[Span], cell: int = 7) -> CallTimes:
    """What is known of a recording's calls of one name, from their begins and ends."""
    made = CallTimes()
    for times, at in ((made.begins, 0), (made.ends, 1)):
        ns = np.array([span[at] for span in spans], np.int64)
        times.add(np.full(len(ns), cell, np.int64), ns)
    return made


def from_inside(spans: Sequence[Span], ahead_ns: int, jitter_ns: int, random: Random) -> list[Span]:
    """The same calls, as a tool notes them that sees them from the inside, with a clock that is ahead."""
    made = []
    for start_ns, end_ns in spans:
        most_ns = min(jitter_ns, (end_ns - start_ns) // 2)
        inner = start_ns + random.randint(0, most_ns), end_ns - random.randint(0, most_ns)
        made.append((inner[0] + ahead_ns, inner[1] + ahead_ns))
    return made


def irregular(random: Random, count: int = 60) -> list[Span]:
    """Calls as a program makes them that does something else between them."""
    made, at_ns = [], 10**9
    for _ in range(count):
        at_ns += random.randint(60_000, 900_000)
        made.append((at_ns, at_ns + random.randint(6_000, 40_000)))
    return made


def regular(period_ns: int, count: int = 200) -> list[Span]:
    return [(10**9 + period_ns * at, 10**9 + period_ns * at + period_ns // 2) for at in range(count)]


@pytest.mark.parametrize("ahead_ns", [0, 1_400, -9_000, 43_000])
@pytest.mark.parametrize("is_first_inside", [False, True])
def test_the_truth_lies_between_begins_and_ends(ahead_ns: int, is_first_inside: bool) -> None:
    random = Random(1)
    outside = irregular(random)
    inside = from_inside(outside, ahead_ns, 3_000, random)
    if is_first_inside:
        found, truth_ns = between(recorded(inside), recorded(outside), 0), ahead_ns
    else:
        found, truth_ns = between(recorded(outside), recorded(inside), 0), -ahead_ns
    assert found is not None
    least_ns, most_ns, count = found
    assert least_ns <= truth_ns <= most_ns <= least_ns + 2_000
    assert count > 50


@pytest.mark.parametrize("period_ns", [10_000, 51_000, 60_000, 300_000, 1_000_000])
@pytest.mark.parametrize("ahead_ns", [0, 1_000, 60_000, 990_000])
def test_a_loop_at_a_regular_pace_relates_no_clocks(period_ns: int, ahead_ns: int) -> None:
    calls = regular(period_ns)
    inside = from_inside(calls, ahead_ns, 1_000, Random(2))
    assert between(recorded(inside), recorded(calls), 0) is None


@st.composite
def programs(draw: st.DrawFn) -> list[Span]:
    """Calls in stretches: some at a regular pace, some not."""
    made: list[Span] = []
    at_ns = 10**9
    for _ in range(draw(st.integers(1, 4))):
        pace_ns = draw(st.integers(5_000, 2_000_000))
        spread_ns = draw(st.sampled_from([0, pace_ns // 20, pace_ns]))
        random = Random(draw(st.integers(0, 1 << 16)))
        for _ in range(draw(st.integers(1, 60))):
            gap_ns = pace_ns + random.randint(0, spread_ns)
            made.append((at_ns, at_ns + max(1, random.randint(gap_ns // 4, gap_ns // 2))))
            at_ns += gap_ns
    return made


@given(
    programs(),
    st.integers(-1_000_000, 1_000_000),
    st.sampled_from([0, 500, 5_000, 50_000]),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.integers(0, 1 << 16),
)
def test_the_bound_holds_or_nothing_is_stated(
    outside: list[Span], ahead_ns: int, jitter_ns: int, lost: float, seed: int
) -> None:
    random = Random(seed)
    inside = from_inside(outside, ahead_ns, jitter_ns, random)
    ours, theirs = ([one for one in calls if random.random() >= lost] for calls in (outside, inside))
    found = between(recorded(theirs), recorded(ours), 0)
    assert found is None or found[0] <= ahead_ns <= found[1]


def test_calls_are_looked_for_where_the_anchor_says() -> None:
    calls = irregular(Random(3))
    far = from_inside(calls, 5_000_000_000, 1_000, Random(4))
    assert between(recorded(far), recorded(calls), 0) is None
    found = between(recorded(far), recorded(calls), 4_999_970_000)
    assert found is not None and found[0] <= 5_000_000_000 <= found[1]
    # Beyond its reach they are not taken, however well they agree.
    assert between(recorded(far), recorded(calls), 4_999_940_000) is None


def test_few_calls_and_those_of_other_threads_relate_no_clocks() -> None:
    calls = irregular(Random(5), 12)
    assert between(recorded(calls), recorded(calls), 0) == (0, 0, 12)
    assert between(recorded(calls[:7]), recorded(calls[:7]), 0) is None
    assert between(recorded(calls, cell=1), recorded(calls, cell=2), 0) is None
    begins = CallTimes(begins=recorded(calls).begins)
    assert between(begins, recorded(calls), 0) is None


def test_no_more_is_kept_than_others_keep_too() -> None:
    """The same cells, and the first of each, in whatever batches they come."""
    random, wanted = Random(6), []
    for batch in (100, 5_000):
        times, made = Times(), [(cell, ns) for cell in range(40) for ns in range(0, 10**8, 10**5)]
        random.shuffle(made)
        for first in range(0, len(made), batch):
            cells, ns = np.array(made[first : first + batch], np.int64).T
            times.add(cells, ns)
        wanted.append([column.tolist() for column in times.alone()])
    assert wanted[0] == wanted[1]
    cells, ns = wanted[0]
    assert len(cells) == CALLS_KEPT_MAX and set(cells) == set(range(16))
    assert ns[:256] == list(range(0, 256 * 10**5, 10**5))
