"""Where a recording has more clock pairs than are kept, bounds stay true, of all that there were."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stamped import Stamping
from tests.support.wandering_clock import SECOND_NS, Rates
from tracepipe.clocks import Clocks, maps
from tracepipe.clocks.maps import ClockMap, ClockPair, Pairs, fit
from tracepipe.event.model import Header, Record, SourceNs

GPU = "globaltimer:0"
KEPT = 64
STEP_NS = SECOND_NS // 4


@pytest.fixture(autouse=True)
def few_are_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "PAIRS_MAX", KEPT)
        patch.setattr(maps, "CLOCKS_MAX", 8)
        patch.setattr(maps, "PART", 50)
        yield


def record(pair: ClockPair, clock: str = GPU) -> Record:
    low_ns, high_ns = pair.host_ns - pair.uncertainty_ns, pair.host_ns + pair.uncertainty_ns
    return {
        "type": "clock",
        "clock": clock,
        "source_ns": pair.source_ns,
        "host_lo_ns": low_ns,
        "host_hi_ns": high_ns,
    }


def mapped(records: list[Record], clock: str = GPU) -> ClockMap:
    clock_map = Clocks(Header(clock="monotonic", clocks=["monotonic", clock]), records).get(clock)
    assert clock_map is not None
    return clock_map


def off_ns(clock_map: ClockMap, pair: ClockPair) -> int:
    return abs(clock_map.place(SourceNs(pair.source_ns)) - pair.host_ns)


noise = st.integers(0, 2_000)


@pytest.mark.slow
@given(
    drift=st.sampled_from([0.0, 10.1, -99.0]),
    wander=st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=40),
    piece_ns=st.sampled_from([300_000_000, 2 * SECOND_NS, 16 * SECOND_NS]),
    trip_ns=st.lists(st.tuples(noise, noise), min_size=1, max_size=50),
    count=st.integers(KEPT, 500),
    when=st.lists(st.integers(-20, 120), min_size=1, max_size=20),
    order=st.randoms(use_true_random=False),
    is_shuffled=st.booleans(),
)
def test_a_time_is_within_its_bound_whatever_pairs_were_kept(
    drift: float,
    wander: list[float],
    piece_ns: int,
    trip_ns: list[tuple[int, int]],
    count: int,
    when: list[int],
    order: Any,
    is_shuffled: bool,
) -> None:
    clock = Rates.of(drift, wander, piece_ns)
    # All of it after 0, where the clock begins to run.
    pairs = [clock.pair((100 + at) * STEP_NS, *trip_ns[at % len(trip_ns)]) for at in range(count)]
    if is_shuffled:
        order.shuffle(pairs)
    clock_map = mapped([record(pair) for pair in pairs])
    assert len(clock_map.source_ns) < KEPT
    assert (clock_map.pairs, clock_map.dropped) == (count, 0)
    for percent in when:
        source_ns = (100 * 100 + percent * count) * STEP_NS // 100
        error_ns = abs(clock_map.place(SourceNs(source_ns)) - clock.host_at(source_ns))
        assert error_ns <= clock_map.bound_at(source_ns)


def test_pairs_that_are_kept_are_spread_and_include_both_ends() -> None:
    clock = Rates.of(10.1, [0.0], SECOND_NS)
    pairs = [clock.pair(at * STEP_NS, 800, 800) for at in range(1_000)]
    kept_ns = mapped([record(pair) for pair in pairs]).source_ns
    assert (kept_ns[0], kept_ns[-1]) == (pairs[0].source_ns, pairs[-1].source_ns)
    assert KEPT // 3 < len(kept_ns) < KEPT
    # No stretch has a multiple of the distance that another has.
    steps_ns = np.diff(kept_ns)
    assert steps_ns.max() <= 4 * np.median(steps_ns)


def test_pairs_that_are_left_out_still_widen_the_bound_where_they_contradict() -> None:
    clock = Rates.of(10.1, [0.0], SECOND_NS)
    pairs = [clock.pair(at * STEP_NS, 100, 100) for at in range(400)]
    wrong = range(150, 160)
    for at in wrong:
        pairs[at] = pairs[at]._replace(host_ns=pairs[at].host_ns + 40_000)
    clock_map = mapped([record(pair) for pair in pairs])
    for at, pair in enumerate(pairs):
        assert off_ns(clock_map, pair) <= clock_map.bound_at(pair.source_ns) + pair.uncertainty_ns + 2, at
    assert clock_map.bound_at(pairs[155].source_ns) >= 30_000
    assert clock_map.bound_at(pairs[300].source_ns) < 5_000


def test_a_clock_that_was_set_is_not_placed_with_confidence_there() -> None:
    clock = Rates.of(0.0, [0.0], SECOND_NS)
    pairs = [clock.pair(at * STEP_NS, 100, 100) for at in range(400)]
    slept = [pair._replace(host_ns=pair.host_ns + 30 * SECOND_NS) for pair in pairs[200:]]
    clock_map = mapped([record(pair) for pair in pairs[:200] + slept])
    for pair in pairs[:200] + slept:
        assert off_ns(clock_map, pair) <= clock_map.bound_at(pair.source_ns) + pair.uncertainty_ns + 2


def test_bounds_of_many_pairs_are_used_after_they_are_dropped() -> None:
    # Of bursts of pairs a ms apart each allows 2 µs, all of one together 400 ns.
    clock = Rates.of(10.1, [0.0], SECOND_NS)
    trips = [(200 + 225 * (at % 8), 1_775 - 225 * (at % 8)) for at in range(8)]
    bursts = [
        [clock.pair(base * 10 * SECOND_NS + at * 1_000_000, *trips[at]) for at in range(8)]
        for base in range(1, 40)
    ]
    clock_map = mapped([record(pair) for burst in bursts for pair in burst])
    assert len(clock_map.source_ns) < KEPT
    placed = [clock_map.bound_at(burst[0].source_ns) for burst in bursts]
    assert max(placed) < 500


def test_clocks_share_the_room_and_are_all_placed() -> None:
    clock = Rates.of(10.1, [0.0], SECOND_NS)
    names = [f"globaltimer:{at}" for at in range(8)]
    pairs = [clock.pair(at * STEP_NS, 500, 500) for at in range(100)]
    records = [record(pair, name) for pair in pairs for name in names]
    clocks = Clocks(Header(clock="monotonic", clocks=["monotonic", *names]), records)
    maps = [clocks.get(name) for name in names]
    assert all(one is not None and one.pairs == 100 for one in maps)
    assert sum(len(one.source_ns) for one in maps if one is not None) < KEPT


def test_pairs_that_all_have_one_reading() -> None:
    clock_map = mapped([record(ClockPair(5, 100 + at % 3, 10)) for at in range(500)])
    assert clock_map.pairs == 500
    assert abs(clock_map.place(SourceNs(5)) - 101) <= clock_map.bound_at(5)


def test_a_recording_with_few_pairs_has_the_map_of_all() -> None:
    clock = Rates.of(10.1, [0.3], SECOND_NS)
    pairs = [clock.pair(at * STEP_NS, 300 + at, 900 - at) for at in range(KEPT - 1)]
    one, other = mapped([record(pair) for pair in pairs]), fit(GPU, Pairs.of(pairs))
    for column in ("source_ns", "trace_ns", "from_bound_ns", "to_bound_ns"):
        assert getattr(one, column).tolist() == getattr(other, column).tolist()


def test_clocks_beyond_the_most_are_counted_together_and_not_placed() -> None:
    names = [f"clock {at}" for at in range(20)]
    records = [record(ClockPair(at, at, 1), name) for at, name in enumerate(names)]
    stamping = Stamping(Header(clock="monotonic", clocks=["monotonic", *names]), records)
    event = {"type": "gpu_kernel", "name": "k", "phase": "I", "ts_ns": 50}
    placed = stamping.stamp([event | {"clock": name} for name in names])
    assert [one["clock"] for one in placed] == names[:8]
    assert stamping.unplaced == dict.fromkeys(names[8:16], 1) | {"other clocks": 4}
    losses = [{"type": "loss", "count": 1, "ts_ns": 5, "clock": f"no clock {at}"} for at in range(3)]
    assert stamping.stamp(losses) == []
    assert stamping.unplaced["other clocks"] == 7


def test_pairs_stand_in_the_order_of_their_clock() -> None:
    pairs = Pairs.of([ClockPair(at * 7 % 11, at, 1) for at in range(11)]).in_order()
    assert all(a < b for a, b in pairwise(pairs.source_ns.tolist()))
    assert pairs[3] == ClockPair(3, 2, 1)
