"""Ranges of warps: how they lie in each other, and when they were, by both implementations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cores import CORES, running
from tracepipe.clocks.warp_times import place_ranges
from tracepipe.event.warps import CROSSING, OUTER, RANGE_DEPTH_MAX, Nested, PlacedWarps, nested

pytestmark = pytest.mark.usefixtures("core")


def int64s(*of: int) -> Any:
    return np.array(of, np.int64)


def placed(*warps: list[tuple[int, int]], lives: list[tuple[int, int]] | None = None) -> PlacedWarps:
    """Warps with the begins and lengths of their ranges, in cycles; `lives` are in ns and cycles."""
    spans = [span for ranges in warps for span in ranges]
    lives = lives or [(1 << 40, 1 << 40)] * len(warps)
    return PlacedWarps(
        launched={}, ts_ns=0, clock="c", warp=np.arange(len(warps)), entry_ns=int64s(*[0] * len(warps)),
        exit_ns=int64s(*(ns for ns, _ in lives)), exit_clk=int64s(*(clk for _, clk in lives)),
        range_count=int64s(*map(len, warps)), range_name=int64s(*[0] * len(spans)), ranges=["r"],
        range_clk=int64s(*(clk for clk, _ in spans)), range_dur_clk=int64s(*(dur for _, dur in spans)),
    )  # fmt: skip


def steps_of(found: Nested) -> list[str]:
    return [f"{'E' if step & 1 else 'B'}{step >> 1}" for step in found.steps.tolist()]


def test_ranges_lie_in_each_other_and_after_each_other() -> None:
    found = nested(placed([(0, 100), (10, 20), (12, 3), (30, 70), (100, 5)], [], [(4, 1)]))
    assert found.inside.tolist() == [OUTER, 0, 1, 0, OUTER, OUTER]
    assert " ".join(steps_of(found)) == "B0 B1 B2 E2 E1 B3 E3 E0 B4 E4 B5 E5"


def test_a_range_that_ends_behind_the_one_that_it_began_in_crosses_it() -> None:
    found = nested(placed([(0, 10), (5, 10), (7, 2), (12, 8)]))
    assert found.inside.tolist() == [OUTER, CROSSING, 0, OUTER]
    assert " ".join(steps_of(found)) == "B0 B2 E2 E0 B3 E3"


def test_a_range_without_a_length_is_after_what_ends_there_and_in_what_goes_on() -> None:
    found = nested(placed([(0, 5), (5, 0), (5, 0), (5, 9), (6, 0)]))
    assert found.inside.tolist() == [OUTER, OUTER, OUTER, OUTER, 3]


def test_ranges_that_are_too_deep_cross() -> None:
    found = nested(placed([(at, 1_000 - 2 * at) for at in range(RANGE_DEPTH_MAX + 2)]))
    assert found.inside.tolist() == [OUTER, *range(RANGE_DEPTH_MAX - 1), CROSSING, CROSSING]


@given(st.lists(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=8), max_size=3))
def test_both_implementations_nest_alike(warps: list[list[tuple[int, int]]]) -> None:
    batch = placed(*map(sorted, warps))
    found = []
    for core in CORES:
        with running(core):
            found.append(nested(batch))
    assert found[0].inside.tolist() == found[1].inside.tolist()
    assert found[0].steps.tolist() == found[1].steps.tolist()


def test_times_are_on_the_line_between_entry_and_last_exit() -> None:
    batch = placed([(0, 1), (500, 250), (900, 100)], [(7, 0)], lives=[(2_000, 1_000), (0, 7)])
    place_ranges(batch)
    assert batch.range_ns is not None
    assert batch.range_dur_ns is not None
    assert batch.range_ns.tolist() == [0, 1_000, 1_800, 0]
    assert batch.range_dur_ns.tolist() == [2, 500, 200, 0]


SIZES = st.one_of(st.integers(0, 99), st.integers(0, (1 << 40) - 1), st.integers(0, (1 << 63) - 1))


@given(SIZES, st.integers(0, 1 << 60), st.floats(0, 1), st.floats(0, 1))
def test_a_time_is_the_share_of_the_life_in_ns(
    life_clk: int, life_ns: int, begin: float, length: float
) -> None:
    clk = min(int(begin * life_clk), life_clk)
    dur_clk = min(int(length * life_clk), life_clk - clk)
    batch = placed([(clk, dur_clk)], lives=[(life_ns, life_clk)])
    place_ranges(batch)
    assert batch.range_ns is not None
    assert batch.range_dur_ns is not None
    (begin_ns,), (dur_ns,) = batch.range_ns.tolist(), batch.range_dur_ns.tolist()
    assert 0 <= begin_ns <= begin_ns + dur_ns <= life_ns
    for found_ns, at_clk in ((begin_ns, clk), (begin_ns + dur_ns, clk + dur_clk)):
        assert found_ns == life_ns * at_clk // max(life_clk, 1)
