"""Warps on hardware slots: who has a slot when, and how many run, by both implementations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cores import running
from tracepipe.event.columns import NONE
from tracepipe.layout.warps import ALL, NO_END, ON_OVERLAP, ON_TRACK, STAYS_MAX, entry_order, new_slots

pytestmark = pytest.mark.usefixtures("core")


def int64s(*of: int) -> Any:
    return np.array(of, np.int64)


def fates(slots: Any, base_ns: int, *warps: tuple[int, int, int], rows: int = 2) -> list[int]:
    """What becomes of warps given as begin, stay and row."""
    begin, stay, row = zip(*warps, strict=True)
    batch = int64s(len(warps)), int64s(base_ns)
    return slots.decide(rows, *batch, int64s(*begin), int64s(*stay), np.array(row, np.int32)).tolist()


def test_a_slot_has_one_warp_at_a_time() -> None:
    slots = new_slots()
    warps = [(0, 10, 0), (5, 10, 0), (5, 10, 1), (10, 5, 0), (15, 0, 0), (15, 3, 0), (20, -1, 0)]
    assert fates(slots, 0, *warps) == [ON_TRACK, ON_OVERLAP, ON_TRACK, ON_TRACK, ON_TRACK, ON_TRACK, NO_END]


def test_a_warp_of_a_later_batch_may_stand_before_others() -> None:
    slots = new_slots()
    assert fates(slots, 0, (0, 50, 0), (100, 100, 0), (400, 10, 0)) == [ON_TRACK] * 3
    # Not where it ends as the next begins: a stable sort by time would put that one first.
    later = [(60, 30, 0), (210, 50, 0), (270, 129, 0), (399, 1, 0), (50, 9, 0), (90, 10, 0), (405, 1, 0)]
    assert fates(slots, 60, *later) == [
        ON_TRACK,
        ON_TRACK,
        ON_TRACK,
        ON_OVERLAP,
        ON_TRACK,
        ON_OVERLAP,
        ON_OVERLAP,
    ]


def test_a_bounded_number_of_stays_in_a_slot_is_remembered() -> None:
    slots = new_slots()
    warps = [(10 * at, 5, 0) for at in range(STAYS_MAX)]
    assert set(fates(slots, 0, *warps)) == {ON_TRACK}
    assert fates(slots, 0, (8, 1, 0), (10 * STAYS_MAX, 5, 0)) == [ON_TRACK, ON_TRACK]
    # That one was one too many: what came before it is taken for full.
    assert fates(slots, 0, (18, 1, 0)) == [ON_OVERLAP]


def test_the_number_of_running_threads_is_written_once_a_time_and_where_it_changes() -> None:
    slots = new_slots()
    ts_ns = int64s(5, 9, 5, 7, 9, 12)
    delta = np.array([1, -1, 1, 0, 1, -1], np.int8)
    order, value, now = slots.running(ts_ns, delta, 12, 3)
    assert order.tolist() == [0, 2, 3, 1, 4, 5]
    assert value.tolist() == [NONE, 5, NONE, NONE, NONE]
    assert now == 5
    order, value, now = slots.running(ts_ns[5:], delta[5:], ALL, now)
    assert (order.tolist(), value.tolist(), now) == ([0], [4], 4)
    order, value, now = slots.running(ts_ns[:0], delta[:0], ALL, 4)
    assert (order.tolist(), value.tolist(), now) == ([], [], 4)


@given(
    st.lists(st.one_of(st.integers(0, 50), st.integers(0, 1 << 60), st.integers(-(1 << 63), (1 << 63) - 1)))
)
def test_entries_are_put_in_order_and_those_of_one_time_stay_as_they_are(entry_ns: list[int]) -> None:
    assert entry_order(int64s(*entry_ns)).tolist() == sorted(range(len(entry_ns)), key=entry_ns.__getitem__)


batches = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.lists(
            st.tuples(st.integers(0, 40), st.integers(-1, 12), st.integers(0, 2)), min_size=1, max_size=12
        ),
    ),
    max_size=12,
)


def test_batches_may_be_placed_at_once() -> None:
    batches = [(0, [(0, 10, 0), (5, 4, 1)]), (20, []), (20, [(20, 5, 0)]), (22, [(22, 1, 0), (25, 5, 0)])]
    slots = new_slots()
    one_by_one = [fates(slots, base_ns, *warps) for base_ns, warps in batches if warps]
    begin, stay, row = zip(*(warp for _, warps in batches for warp in warps), strict=True)
    sizes, bases_ns = int64s(*(len(warps) for _, warps in batches)), int64s(*(ns for ns, _ in batches))
    columns = int64s(*begin), int64s(*stay), np.array(row, np.int32)
    assert new_slots().decide(2, sizes, bases_ns, *columns).tolist() == [
        one for some in one_by_one for one in some
    ]
    assert one_by_one[-1] == [ON_OVERLAP, ON_TRACK]


def outcome(plan: list[Any], before_ns: int) -> list[Any]:
    slots, base_ns, messages, now = new_slots(), 0, [], 0
    for step_ns, warps in plan:
        base_ns += step_ns
        warps = sorted((base_ns + after, stay, row) for after, stay, row in warps)
        messages.append(fates(slots, base_ns, *warps, rows=3))
        edges = [(ns, change) for begin, stay, _ in warps for ns, change in ((begin, 1), (begin + stay, -1))]
        times, deltas = int64s(*(ns for ns, _ in edges)), np.array([change for _, change in edges], np.int8)
        order, value, now = slots.running(times, deltas, before_ns, now)
        messages.append((order.tolist(), value.tolist(), now))
    return messages


@given(batches, st.integers(0, 100))
def test_both_cores_answer_the_same(plan: list[Any], before_ns: int) -> None:
    with running("pure"):
        want = outcome(plan, before_ns)
    assert outcome(plan, before_ns) == want
