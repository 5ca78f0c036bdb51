"""Clock maps: a placed time lies within the stated bound of the true one, wherever the pairs are."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stamped import Stamping
from tests.support.wandering_clock import SECOND_NS, Rates, ppm
from tracepipe.clocks import Clocks, maps
from tracepipe.clocks.maps import ClockMap, ClockPair, Pairs, offset_map
from tracepipe.errors import ClockError
from tracepipe.event.checks import first_fault
from tracepipe.event.columns import UNDATED_NS
from tracepipe.event.model import TIME_LIMIT_NS, Header, Record, SourceNs
from tracepipe.recording.account import fit_text

GPU = "globaltimer:0"


@dataclass(frozen=True)
class TrueClock:
    """A clock that runs fast by `drift`, and by `drift` + `bend` after `bend_at_ns` of the host."""

    offset_ns: int
    drift: Fraction
    bend: Fraction = Fraction(0)
    bend_at_ns: int = 0

    def reads(self, host_ns: int) -> int:
        """What the clock shows at that instant: whole nanoseconds, as clocks give them."""
        bent = max(0, host_ns - self.bend_at_ns) * self.bend
        return int(self.offset_ns + host_ns + host_ns * self.drift + bent)

    def pair(self, host_ns: int, before_ns: int, after_ns: int) -> dict[str, Any]:
        """A clock record of a reading at `host_ns` between two readings of the host's clock."""
        low_ns, high_ns = host_ns - before_ns, host_ns + after_ns
        source_ns = self.reads(host_ns)
        record = {"type": "clock", "clock": GPU, "source_ns": source_ns}
        return record | {"host_lo_ns": low_ns, "host_hi_ns": high_ns}


def fit(clock: str, pairs: list[ClockPair]) -> ClockMap:
    return maps.fit(clock, Pairs.of(pairs))


noise = st.integers(0, 2_000)
noises = st.lists(st.tuples(noise, noise), min_size=2, max_size=12)


def pairs_of(
    clock: TrueClock, noise_ns: list[tuple[int, int]], from_ns: int, step_ns: int
) -> list[ClockPair]:
    records = [clock.pair(from_ns + at * step_ns, *both) for at, both in enumerate(noise_ns)]
    assert [first_fault(record) for record in records] == [None] * len(records)
    return [ClockPair.of(record) for record in records]


def error_ns(clock_map: ClockMap, clock: TrueClock, host_ns: int) -> int:
    return abs(clock_map.place(SourceNs(clock.reads(host_ns))) - host_ns)


def bound_ns(clock_map: ClockMap, clock: TrueClock, host_ns: int) -> int:
    return clock_map.bound_at(clock.reads(host_ns))


@given(
    noise_ns=noises,
    drift=st.sampled_from([0.0, 10.1, -10.1, 80.0]),
    offset_ns=st.integers(-5_000 * SECOND_NS, 1_900_000_000 * SECOND_NS),
    when=st.lists(st.integers(-100, 200), min_size=1, max_size=20),
)
def test_a_steady_clock_is_placed_within_its_bound(
    noise_ns: list[tuple[int, int]], drift: float, offset_ns: int, when: list[int]
) -> None:
    clock = TrueClock(offset_ns, ppm(drift))
    from_ns, step_ns = 6_000 * SECOND_NS, 10 * SECOND_NS
    clock_map = fit(GPU, pairs_of(clock, noise_ns, from_ns, step_ns))
    span_ns = (len(noise_ns) - 1) * step_ns
    for percent in when:  # 0 to 100 is between the first and the last pair
        host_ns = from_ns + span_ns * percent // 100
        assert error_ns(clock_map, clock, host_ns) <= bound_ns(clock_map, clock, host_ns)


def place_a_bent_clock(
    noise_ns: list[tuple[int, int]], bend: float, bend_percent: int, when: list[int]
) -> None:
    from_ns, step_ns = 6_000 * SECOND_NS, SECOND_NS
    span_ns = (len(noise_ns) - 1) * step_ns
    clock = TrueClock(123_456_789, ppm(10.1), ppm(bend), from_ns + span_ns * bend_percent // 100)
    clock_map = fit(GPU, pairs_of(clock, noise_ns, from_ns, step_ns))
    for percent in when:
        host_ns = from_ns + span_ns * percent // 100
        assert error_ns(clock_map, clock, host_ns) <= bound_ns(clock_map, clock, host_ns), percent


@given(
    noise_ns=noises,
    bend=st.floats(-1, 1),
    bend_percent=st.integers(-50, 150),
    when=st.lists(st.integers(-100, 200), min_size=1, max_size=20),
)
def test_a_clock_that_wanders_is_placed_within_its_bound(
    noise_ns: list[tuple[int, int]], bend: float, bend_percent: int, when: list[int]
) -> None:
    place_a_bent_clock(noise_ns, bend, bend_percent, when)


@given(
    noise_ns=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=6, max_size=12),
    bend=st.sampled_from([3.0, -3.0, 40.0, -40.0]),
    bend_percent=st.integers(25, 75),
    when=st.lists(st.integers(-100, 200), min_size=1, max_size=20),
)
def test_a_bend_that_the_pairs_show_is_in_the_bound(
    noise_ns: list[tuple[int, int]], bend: float, bend_percent: int, when: list[int]
) -> None:
    place_a_bent_clock(noise_ns, bend, bend_percent, when)


def test_a_steady_clock_is_not_taken_for_a_bent_one() -> None:
    clock = TrueClock(5, ppm(10.1))
    clock_map = fit(GPU, pairs_of(clock, [(900, 100), (100, 900)] * 4, SECOND_NS, SECOND_NS))
    # ± 500 ns of the readings, 2 ns of rounding, and a quarter of 1 ppm of the second between them
    assert clock_map.bound_at(clock.reads(3 * SECOND_NS + SECOND_NS // 2)) == 752
    assert clock_map.bound_at(clock.reads(3 * SECOND_NS + 5)) == 502
    assert clock_map.bound_at(clock.reads(8 * SECOND_NS)) == 501


@given(noise_ns=noises, bend=st.sampled_from([0.0, 3.0]))
def test_the_map_is_continuous_and_never_goes_back(noise_ns: list[tuple[int, int]], bend: float) -> None:
    clock = TrueClock(77, ppm(10.1), ppm(bend), 6_005 * SECOND_NS)
    clock_map = fit(GPU, pairs_of(clock, noise_ns, 6_000 * SECOND_NS, 4 * SECOND_NS))
    for source_ns in clock_map.source_ns.tolist():
        before, at, after = (clock_map.place(SourceNs(source_ns + step)) for step in (-1, 0, 1))
        assert 0 <= at - before <= 2
        assert 0 <= after - at <= 2
    grid = [SourceNs(clock.reads(6_000 * SECOND_NS) + step * 700_000_001) for step in range(-20, 80)]
    assert all(a < b for a, b in pairwise(map(clock_map.place, grid)))


def test_drift_is_measured_over_all_pairs() -> None:
    # 10.1 ppm is what one H200 showed; a source clock that runs fast has a negative drift here.
    fast = TrueClock(0, ppm(10.1))
    clock_map = fit(GPU, pairs_of(fast, [(0, 0)] * 5, SECOND_NS, 100 * SECOND_NS))
    assert clock_map.drift_ppm == pytest.approx(-10.1, abs=0.01)
    assert (clock_map.pairs, clock_map.dropped, clock_map.method) == (5, 0, "fit")


def test_a_single_pair_is_an_offset_whose_bound_grows_with_the_distance() -> None:
    clock_map = fit(GPU, [ClockPair(1_000, 5_000, 300)])
    assert clock_map.place(SourceNs(1_000)) == 5_000
    assert clock_map.place(SourceNs(2_000_001_000)) == 2_000_005_000
    assert clock_map.bound_at(1_000) == 301
    # 100 ppm, as crystals go, of two seconds
    assert clock_map.bound_at(2_000_001_000) == 301 + 200_000
    assert clock_map.drift_ppm is None


@given(drift=st.sampled_from([-99.0, 10.1, 99.0]), away_ns=st.integers(-50 * SECOND_NS, 50 * SECOND_NS))
def test_a_single_pair_covers_the_drift_of_any_crystal(drift: float, away_ns: int) -> None:
    clock = TrueClock(1_000 * SECOND_NS, ppm(drift))
    clock_map = fit(GPU, pairs_of(clock, [(400, 10)], 60 * SECOND_NS, SECOND_NS))
    host_ns = 60 * SECOND_NS + away_ns
    assert error_ns(clock_map, clock, host_ns) <= bound_ns(clock_map, clock, host_ns)


def test_no_pairs_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ClockError) as caught:
        fit(GPU, [])
    assert caught.value.message == "clock globaltimer:0 has no clock pairs"
    assert caught.value.hint == "Place it with --assume-offset globaltimer:0=NS."


def test_two_close_pairs_leave_what_both_allow() -> None:
    # 10 µs apart with ± 1 µs each: the line through both could be off by 20%. The offset is 900 ± 500 by one,
    # 0 ± 1000 by the other.
    close = [ClockPair(0, 0, 1_000), ClockPair(10_000, 10_900, 500)]
    for pairs in (close, close[::-1]):
        clock_map = fit(GPU, pairs)
        assert (clock_map.pairs, clock_map.dropped) == (2, 0)
        assert abs(clock_map.place(SourceNs(10_000)) - 10_000 - 700) <= 1
        # half of 400 to 1000, two readings that are whole, and 100 ppm of 10 µs
        assert clock_map.bound_at(10_000) <= 300 + 2 + 1


def test_two_pairs_of_one_reading_do_not_divide_by_zero() -> None:
    clock_map = fit(GPU, [ClockPair(50, 100, 5), ClockPair(50, 101, 5)])
    assert clock_map.pairs == 2
    assert clock_map.place(SourceNs(60)) == 110


pieces = st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=12)
trips = st.lists(st.tuples(noise, noise), min_size=1, max_size=24)
gaps = st.lists(st.sampled_from([0, 1, 500_000, 3_000_000, 50_000_000, SECOND_NS, 4 * SECOND_NS]))


@given(
    drift=st.sampled_from([0.0, 10.1, -10.1, 99.0, -99.0]),
    wander=pieces,
    piece_ns=st.sampled_from([1_000_000, 300_000_000, 2 * SECOND_NS]),
    trip_ns=trips,
    gaps_ns=gaps,
    when=st.lists(st.integers(0, 100), min_size=1, max_size=20),
)
def test_pairs_that_cut_each_other_down_never_cut_off_the_true_time(
    drift: float,
    wander: list[float],
    piece_ns: int,
    trip_ns: list[tuple[int, int]],
    gaps_ns: list[int],
    when: list[int],
) -> None:
    clock = Rates.of(drift, wander, piece_ns)
    at_ns = list(accumulate(gaps_ns[: len(trip_ns) - 1], initial=0))
    pairs = [clock.pair(at, *both) for at, both in zip(at_ns, trip_ns, strict=False)]
    clock_map = fit(GPU, pairs)
    assert (clock_map.pairs, clock_map.dropped) == (len(pairs), 0)
    for source_ns in [*at_ns, *(at_ns[-1] * percent // 100 for percent in when)]:
        error = abs(clock_map.place(SourceNs(source_ns)) - clock.host_at(source_ns))
        assert error <= clock_map.bound_at(source_ns)


@given(trip_ns=st.lists(st.tuples(noise, noise), min_size=1, max_size=12), more=st.tuples(noise, noise))
def test_one_more_pair_of_a_burst_never_makes_the_bound_worse(
    trip_ns: list[tuple[int, int]], more: tuple[int, int]
) -> None:
    clock = Rates.of(10.1, [0.0], SECOND_NS)
    pairs = [clock.pair(SECOND_NS, *both) for both in trip_ns]
    before, after = fit(GPU, pairs), fit(GPU, [*pairs, clock.pair(SECOND_NS, *more)])
    assert (
        after.bound_at(SECOND_NS) <= before.bound_at(SECOND_NS) <= max(sum(both) for both in trip_ns) // 2 + 3
    )
    # What all of them allow, and no more than whole numbers cost.
    allowed_ns = sum(min(side) for side in zip(*trip_ns, more, strict=True))
    assert after.bound_at(SECOND_NS) <= allowed_ns // 2 + 4


def test_bursts_at_both_ends_of_a_run_state_less_than_single_pairs() -> None:
    clock = Rates.of(-8.0, [0.0], SECOND_NS)
    # Each trip took 1.6 µs; the GPU answered at another time in it.
    trip_ns = [(400 + 160 * at, 1_200 - 160 * at) for at in range(6)]
    ends = [[base + at * 800_000 for at in range(6)] for base in (0, SECOND_NS)]
    pairs = [[clock.pair(at, *both) for at, both in zip(end, trip_ns, strict=True)] for end in ends]
    single, bursts = fit(GPU, [pairs[0][0], pairs[1][0]]), fit(GPU, pairs[0] + pairs[1])
    middle_ns = SECOND_NS // 2
    assert single.bound_at(middle_ns) >= 800 + 250
    # 400 before and 400 after are possible everywhere; 250 is 1 ppm that changes halfway; the clock is known
    # to 2 ppm over the 4 ms of a burst.
    assert bursts.bound_at(middle_ns) <= 400 + 250 + 12
    assert (bursts.pairs, bursts.dropped) == (12, 0)


def test_pairs_that_contradict_each_other_widen_the_bound() -> None:
    # Five milliseconds apart nothing explains 3 µs between intervals of 1 µs.
    clock = Rates.of(0.0, [0.0], SECOND_NS)
    pairs = [clock.pair(at * 5_000_000, 500, 500) for at in range(8)]
    steady = fit(GPU, pairs)
    pairs[4] = pairs[4]._replace(host_ns=pairs[4].host_ns + 4_000)
    shaken = fit(GPU, pairs)
    for pair in pairs:
        error = abs(shaken.place(SourceNs(pair.source_ns)) - pair.host_ns)
        assert error <= shaken.bound_at(pair.source_ns) + pair.uncertainty_ns
        assert shaken.bound_at(pair.source_ns) >= steady.bound_at(pair.source_ns)
    assert max(shaken.bound_at(pair.source_ns) for pair in pairs) >= 4_000


@pytest.mark.parametrize("wrong", range(6))
@pytest.mark.parametrize("off_ns", [30_000, -30_000, 900_000])
def test_one_wrong_pair_anywhere_is_within_the_bound_also_before_and_after_all(
    wrong: int, off_ns: int
) -> None:
    clock = TrueClock(0, ppm(10.1))
    pairs = pairs_of(clock, [(300, 300)] * 6, SECOND_NS, SECOND_NS)
    pairs[wrong] = pairs[wrong]._replace(host_ns=pairs[wrong].host_ns + off_ns)
    clock_map = fit(GPU, pairs)
    for host_ns in range(0, 8 * SECOND_NS, 49_999_999):
        assert error_ns(clock_map, clock, host_ns) <= bound_ns(clock_map, clock, host_ns), host_ns


def test_a_bound_does_not_shrink_beyond_the_ends() -> None:
    clock = TrueClock(0, ppm(10.1))
    pairs = pairs_of(clock, [(300, 300)] * 3, SECOND_NS, SECOND_NS)
    pairs[1] = pairs[1]._replace(host_ns=pairs[1].host_ns + 50_000)
    clock_map = fit(GPU, pairs)
    for pair, outward in ((pairs[0], -1), (pairs[2], 1)):
        inside, outside = (clock_map.bound_at(pair.source_ns + step) for step in (-outward, outward))
        assert outside >= inside - 2


def test_two_pairs_at_a_rate_that_no_clock_has_cover_each_other() -> None:
    # 800 ppm: one of the two is off by 0.8 ms, and nothing shows which.
    pairs = [ClockPair(0, SECOND_NS, 300), ClockPair(SECOND_NS, 2 * SECOND_NS + 800_000, 300)]
    clock_map = fit(GPU, pairs)
    for source_ns in range(0, 3 * SECOND_NS, 99_999_999):
        by_each = (pair.host_ns + source_ns - pair.source_ns for pair in pairs)
        placed_ns, bound = clock_map.place(SourceNs(source_ns)), clock_map.bound_at(source_ns)
        assert all(abs(placed_ns - host_ns) <= bound for host_ns in by_each), source_ns


@pytest.mark.parametrize("uncertainty_ns", [5, 21])
def test_a_pair_that_jumps_is_dropped_and_raises_the_bound_at_its_time(uncertainty_ns: int) -> None:
    # However certain it says it is: the others agree with each other.
    clock = TrueClock(0, ppm(10.1))
    pairs = pairs_of(clock, [(20, 20)] * 6, SECOND_NS, SECOND_NS)
    pairs[3] = ClockPair(pairs[3].source_ns, pairs[3].host_ns + 500_000_000, uncertainty_ns)
    clock_map = fit(GPU, pairs)
    assert (clock_map.pairs, clock_map.dropped) == (5, 1)
    for host_ns in range(SECOND_NS, 6 * SECOND_NS, 99_999_999):
        bound = bound_ns(clock_map, clock, host_ns)
        assert error_ns(clock_map, clock, host_ns) <= bound
        in_doubt = 3 * SECOND_NS <= host_ns < 5 * SECOND_NS
        assert (bound > 499_000_000) is in_doubt
        assert in_doubt or bound <= 22 + 500


def test_a_clock_that_is_set_is_not_placed_with_confidence() -> None:
    # The host's monotonic clock stops while the machine sleeps, the GPU's goes on.
    slept_ns = 30 * SECOND_NS
    clock = TrueClock(0, ppm(10.1))
    before = pairs_of(clock, [(20, 20)] * 4, SECOND_NS, SECOND_NS)
    late = pairs_of(clock, [(10, 10)] * 4, 60 * SECOND_NS, SECOND_NS)
    after = [ClockPair(pair.source_ns, pair.host_ns - slept_ns, pair.uncertainty_ns) for pair in late]
    clock_map = fit(GPU, before + after)
    for pair in before + after:
        error = abs(clock_map.place(SourceNs(pair.source_ns)) - pair.host_ns)
        assert error <= clock_map.bound_at(pair.source_ns) + pair.uncertainty_ns
    assert clock_map.bound_at(before[1].source_ns) < 1_000
    assert clock_map.bound_at(after[1].source_ns) >= slept_ns


@given(st.integers(1 << 55, 1 << 62))
def test_huge_times_keep_every_nanosecond(source_ns: int) -> None:
    pairs = [ClockPair(1 << 54, 0, 10), ClockPair((1 << 54) + SECOND_NS, SECOND_NS, 10)]
    placed = fit(GPU, pairs).place(SourceNs(source_ns))
    assert type(placed) is int
    assert placed == source_ns - (1 << 54)
    assert fit(GPU, pairs).place_all(np.array([source_ns])).tolist() == [placed]


@given(
    noise_ns=noises,
    drift=st.sampled_from([0.0, 10.1, -99.0]),
    bend=st.sampled_from([0.0, 3.0, -40.0]),
    near=st.lists(st.integers(-100, 200), max_size=20),
    far=st.lists(st.integers(0, 2 * TIME_LIMIT_NS), max_size=5),
)
def test_a_column_of_times_is_placed_like_single_times(
    noise_ns: list[tuple[int, int]], drift: float, bend: float, near: list[int], far: list[int]
) -> None:
    from_ns, step_ns = 6_000 * SECOND_NS, 10 * SECOND_NS
    span_ns = (len(noise_ns) - 1) * step_ns
    clock = TrueClock(77, ppm(drift), ppm(bend), from_ns + span_ns // 2)
    clock_map = fit(GPU, pairs_of(clock, noise_ns, from_ns, step_ns))
    times = [clock.reads(from_ns + span_ns * percent // 100) for percent in near] + far
    times += [source_ns + step for source_ns in clock_map.source_ns.tolist() for step in (-1, 0, 1)]
    column = np.array(times, np.int64)
    assert clock_map.place_all(column).tolist() == [clock_map.place(SourceNs(ns)) for ns in times]
    assert clock_map.bounds_at(column).tolist() == [clock_map.bound_at(ns) for ns in times]
    assert column.tolist() == times


def test_a_pair_contains_the_whole_interval_of_its_record() -> None:
    for low, high in ((100, 100), (100, 101), (100, 103), (7, 1_000_008)):
        record = {"source_ns": 1, "host_lo_ns": low, "host_hi_ns": high}
        pair = ClockPair.of(record)
        assert pair.host_ns - pair.uncertainty_ns <= low
        assert pair.host_ns + pair.uncertainty_ns >= high


def test_times_beyond_a_trace_are_at_its_end() -> None:
    late_ns = TIME_LIMIT_NS - SECOND_NS
    for pairs in (
        [ClockPair(0, late_ns, 10)],
        [ClockPair(0, late_ns - SECOND_NS, 10), ClockPair(SECOND_NS, late_ns + 10_000, 10)],
    ):
        clock_map = fit(GPU, pairs)
        times = [2 * SECOND_NS, TIME_LIMIT_NS, 2 * TIME_LIMIT_NS]
        assert [clock_map.place(SourceNs(ns)) for ns in times] == [TIME_LIMIT_NS] * 3
        assert clock_map.place_all(np.array(times, np.int64)).tolist() == [TIME_LIMIT_NS] * 3
    early = offset_map(GPU, "assumed", -TIME_LIMIT_NS, 0)
    assert early.place(SourceNs(-5)) == -TIME_LIMIT_NS
    assert early.place_all(np.array([-5, 0, 5])).tolist() == [
        -TIME_LIMIT_NS,
        -TIME_LIMIT_NS,
        5 - TIME_LIMIT_NS,
    ]


# Recordings: which clock is the trace's, and what happens to events ------------------------------------


def event(ts_ns: int, **fields: Any) -> Record:
    return {"type": "gpu_kernel", "name": "k", "phase": "I", "ts_ns": ts_ns, **fields}


def times_of(records: list[Record]) -> list[int]:
    return [record["ts_ns"] for record in records]


def header(**fields: Any) -> Any:
    return Header(clock="monotonic", clocks=["monotonic", GPU], **fields)


PAIRS: list[dict[str, Any]] = [
    {"type": "clock", "clock": GPU, "source_ns": 1_000 * SECOND_NS, "host_lo_ns": 90, "host_hi_ns": 110},
    {
        "type": "clock",
        "clock": GPU,
        "source_ns": 1_100 * SECOND_NS,
        "host_lo_ns": 100 * SECOND_NS + 1_000_090,  # 10 ppm more than the source
        "host_hi_ns": 100 * SECOND_NS + 1_000_110,
    },
]


def test_events_on_the_traces_own_clock_pass_as_they_are() -> None:
    stamping = Stamping(Header(clock="monotonic", clocks=["monotonic"]))
    calls = [{"type": "userspace", "name": "f", "phase": "B", "ts_ns": n} for n in (3, 5)]
    assert stamping.stamp(calls) == calls
    batch = stamping.batch(calls)
    read, placed = batch.events, stamping.clocks.stamp(batch, stamping.tables, {}).events
    for name in ("ts_ns", "shape", "args", "dur_ns", "launch"):
        assert getattr(placed, name) is getattr(read, name)
    assert (placed.source_ns, placed.bound_ns, placed.index) == (None, None, None)
    assert stamping.clocks.statements() == []


def test_an_event_of_another_clock_keeps_its_reading_and_gets_the_bound() -> None:
    read = event(1_050 * SECOND_NS, clock=GPU, args={"n": 1}, phase="X", dur_ns=10**9)
    assert Stamping(header(), PAIRS).stamp([read]) == [
        read
        | {
            "ts_ns": 50 * SECOND_NS + 500_100,
            "source_ns": 1_050 * SECOND_NS,
            "bound_ns": 11 + 25_000,
            "dur_ns": SECOND_NS + 10_000,  # the same second, on the host's clock
        }
    ]


def test_times_that_a_reader_placed_are_kept() -> None:
    stamping = Stamping(header(), PAIRS)
    batch = stamping.batch([event(1_050 * SECOND_NS, clock=GPU, phase="X", dur_ns=10**9), event(5)])
    stamping.clocks.stamp(batch, stamping.tables, {})
    assert batch.events.ts_ns.tolist() == [1_050 * SECOND_NS, 5]
    assert batch.events.dur_ns.tolist() == [10**9, 0]


@pytest.mark.usefixtures("core")
def test_events_of_several_clocks_stay_in_the_order_of_the_file() -> None:
    stamping = Stamping(header(start=START), PAIRS)
    read = [
        (1_000, "monotonic"),
        (61_500, "boottime"),
        (1_000 * SECOND_NS, GPU),
        (7, "tai"),
        (3, "monotonic"),
    ]
    for _ in range(2):  # shapes that are new, and shapes that were met
        placed = stamping.stamp([event(ts_ns, clock=clock) for ts_ns, clock in read])
        assert [(one["ts_ns"], one["clock"], one.get("source_ns")) for one in placed] == [
            (1_000, "monotonic", None),
            (1_500, "boottime", 61_500),
            (100, GPU, 1_000 * SECOND_NS),
            (3, "monotonic", None),
        ]
    assert stamping.unplaced == {"tai": 2}


@pytest.mark.usefixtures("core")
def test_tables_that_number_anew_change_nothing() -> None:
    stamping, nothing = Stamping(header(), PAIRS), np.empty(0, np.int32)
    for records in ([event(1_000 * SECOND_NS, clock=GPU), event(3)], [event(3), event(5, name="l")]):
        want_ns = [100 if "clock" in record else record["ts_ns"] for record in records]
        assert times_of(stamping.stamp(records)) == want_ns
        stamping.tables.keep(nothing, nothing)


def test_events_of_a_clock_without_pairs_are_counted_and_left_out() -> None:
    stamping = Stamping(header())
    batch = {"type": "gpu_warp", "name": "k", "ts_ns": 5, "clock": GPU, "warp": [0, 1, 2]}
    batch |= {"entry_ns": [0] * 3, "exit_ns": [1] * 3}
    assert stamping.stamp([event(1, clock=GPU), event(2), batch]) == [event(2)]
    assert stamping.unplaced == {GPU: 4}
    assert stamping.clocks.get(GPU) is None


def warps(**fields: Any) -> dict[str, Any]:
    return {"type": "gpu_warp", "name": "k", "ts_ns": 1_000 * SECOND_NS, "clock": GPU, **fields}


def test_columns_of_warps_are_stretched_by_the_drift() -> None:
    entry_ns, exit_ns = [0, SECOND_NS, 2 * SECOND_NS], [1_000_000, 2_000_000, 5_000_000, 7_000_000]
    batch = warps(warp=[0, 1, 2], entry_ns=entry_ns, exit_ns=exit_ns, exit_count=[1, 2, 1])
    (stretched,) = Stamping(header(), PAIRS).stamp([batch])
    assert stretched["ts_ns"] == 100
    assert stretched["source_ns"] == [1_000 * SECOND_NS + ns for ns in entry_ns]
    assert stretched["bound_ns"] == 11
    # A reading less its time in the trace and the batch's offset is a small number.
    for source_ns, ns in zip(stretched["source_ns"], stretched["entry_ns"], strict=True):
        assert 0 <= source_ns - (100 + ns) - stretched["offset_ns"] < 1 << 21
    assert stretched["entry_ns"] == [0, SECOND_NS + 10_000, 2 * SECOND_NS + 20_000]
    assert stretched["exit_ns"] == [1_000_010, 2_000_020, 5_000_050, 7_000_070]


def test_columns_too_short_to_stretch_stay_as_they_are() -> None:
    batch = warps(warp=[0, 1], entry_ns=[0, 4_000], exit_ns=[32, 64])
    (placed,) = Stamping(header(), PAIRS).stamp([batch])
    assert (placed["ts_ns"], placed["entry_ns"], placed["exit_ns"]) == (100, [0, 4_000], [32, 64])
    assert placed["source_ns"] == [1_000 * SECOND_NS, 1_000 * SECOND_NS + 4_000]


def test_warps_on_the_traces_own_clock_pass_as_they_are() -> None:
    batch = warps(warp=[0, 1], entry_ns=[0, 4_000], exit_ns=[32, 64])
    (placed,) = Stamping(Header(clock=GPU, clocks=[GPU])).stamp([batch])
    assert placed == batch | {"source_ns": None, "bound_ns": 0, "offset_ns": 0}


@given(
    st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**10)), min_size=1, max_size=20),
    st.integers(0, 200 * SECOND_NS),
)
def test_a_stretched_warp_lies_where_its_readings_lie(columns: list[tuple[int, int]], base_ns: int) -> None:
    stamping = Stamping(header(), PAIRS)
    clock_map = stamping.clocks.get(GPU)
    assert clock_map is not None
    base_ns += 950 * SECOND_NS
    entry_ns, exit_ns = [list(column) for column in zip(*columns, strict=True)]
    batch = warps(warp=list(range(len(entry_ns))), entry_ns=entry_ns, exit_ns=exit_ns) | {"ts_ns": base_ns}
    (placed,) = stamping.stamp([batch])
    for at, (entered, stayed) in enumerate(columns):
        want_ns = clock_map.place(SourceNs(base_ns + entered))
        got_ns = placed["ts_ns"] + placed["entry_ns"][at]
        assert abs(got_ns - want_ns) <= 1
        left_ns = clock_map.place(SourceNs(base_ns + entered + stayed))
        assert abs(got_ns + placed["exit_ns"][at] - left_ns) <= 1
        assert placed["source_ns"][at] == base_ns + entered


START = {"monotonic_ns": 1_000, "boottime_ns": 61_000, "realtime_ns": 1_800_000_000 * SECOND_NS}


def test_host_clocks_are_placed_by_the_header() -> None:
    head = Header(clock="monotonic", clocks=["monotonic", "boottime", "realtime"], start=START)
    stamping, now = Stamping(head), START["realtime_ns"] + 25
    read = [event(61_500, clock="boottime"), event(now, clock="realtime"), event(1_030)]
    assert times_of(stamping.stamp(read)) == [1_500, 1_025, 1_030]
    assert {statement["clock"]: statement["method"] for statement in stamping.clocks.statements()} == {
        "boottime": "offset",
        "realtime": "offset",
    }


def test_a_recording_on_one_clock_has_it_as_its_trace_clock() -> None:
    stamping = Stamping(Header(clock=GPU, clocks=[GPU], start=START))
    assert stamping.clocks.trace_clock == GPU
    assert stamping.stamp([event(987)]) == [event(987)]
    assert stamping.clocks.statements() == [
        {"clock": GPU, "trace_clock": GPU, "method": "same", "bound_ns": 0}
    ]


def test_an_assumed_offset_is_added_and_reported_as_assumed() -> None:
    stamping = Stamping(header(), assumed={GPU: -400})
    assert times_of(stamping.stamp([event(1_000, clock=GPU)])) == [600]
    (statement,) = stamping.clocks.statements()
    assert statement["method"] == "assumed"
    assert statement["bound"] == "unknown: the offset was assumed"
    assert "bound_ns" not in statement


def test_an_assumed_offset_wins_over_pairs() -> None:
    stamping = Stamping(header(), PAIRS, assumed={GPU: 7})
    assert times_of(stamping.stamp([event(1_000 * SECOND_NS, clock=GPU)])) == [1_000 * SECOND_NS + 7]


def test_a_clock_can_be_assumed_to_be_realtime() -> None:
    stamping = Stamping(header(start=START), assumed={GPU: "realtime"})
    assert times_of(stamping.stamp([event(START["realtime_ns"] + 44, clock=GPU)])) == [1_044]


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("realtime", {}),
        ("realtime", {"monotonic_ns": 5}),
        ("realtime", {"realtime_ns": 5}),
        ("tai", START),
        (-(1 << 62), START),
    ],
)
def test_an_assumption_that_nothing_supports_is_an_error(name: str | int, start: dict[str, int]) -> None:
    with pytest.raises(ClockError, match="cannot place globaltimer:0 by"):
        Clocks(header(start=start), assumed={GPU: name})


def test_a_loss_without_a_date_stands_where_it_stands() -> None:
    stamping = Stamping(header(), PAIRS)
    loss = {"type": "loss", "count": 3}
    assert stamping.batch([loss]).events.ts_ns.tolist() == [UNDATED_NS] == [-1]
    assert times_of(stamping.stamp([event(10), event(20), loss, event(30)])) == [10, 20, 20, 30]
    stamping.stamp([{"type": "userspace", "name": "f", "phase": "B", "ts_ns": 50}])
    assert stamping.stamp([loss]) == [loss | {"ts_ns": 50}]
    # What was left out is nowhere in the trace.
    assert times_of(stamping.stamp([event(60), event(70, clock="tai"), loss])) == [60, 60]


def test_a_loss_with_a_date_is_placed_as_an_event_is() -> None:
    stamping = Stamping(header(), PAIRS)
    loss = {"type": "loss", "count": 3, "clock": GPU, "ts_ns": 1_000 * SECOND_NS, "dur_ns": SECOND_NS}
    (placed,) = stamping.stamp([loss])
    assert (placed["ts_ns"], placed["dur_ns"], placed["count"]) == (100, SECOND_NS + 10_000, 3)
    assert stamping.stamp([loss | {"clock": "tai"}]) == []
    assert stamping.unplaced == {"tai": 1}


def test_footers_and_clock_records_pass_where_they_stand() -> None:
    stamping = Stamping(header(), PAIRS)
    records = [{"type": "footer", "counts": {}, "losses": {}}, dict(PAIRS[0])]
    batch = stamping.clocks.stamp(stamping.batch(records), stamping.tables, {})
    assert [*batch.others] == records
    assert batch.events.ts_ns.tolist() == [0, 0]
    assert times_of(stamping.stamp([event(7), *records])) == [7, 7, 7]
    assert stamping.clocks.statements() == []


def test_a_statement_gives_pairs_drift_and_the_worst_bound() -> None:
    stamping = Stamping(header(), [*PAIRS, {**PAIRS[1], "source_ns": PAIRS[1]["source_ns"] + 5}])
    stamping.stamp([event(1_050 * SECOND_NS, clock=GPU), event(1_000, clock="monotonic")])
    (statement,) = stamping.clocks.statements()
    bound_ns = statement.pop("bound_ns")
    assert statement == {
        "clock": GPU,
        "trace_clock": "monotonic",
        "method": "fit",
        "pairs": 3,
        "pairs_dropped": 0,
        "drift_ppm": 10.0,
    }
    # A quarter of 1 ppm of the hundred seconds between the pairs; the two at the end are 5 ns apart.
    assert 25_000 <= bound_ns <= 11 + 25_000
    # An event a hundred seconds after the last pair is less certain, and the statement shows it.
    stamping.stamp([event(1_200 * SECOND_NS, clock=GPU)])
    assert stamping.clocks.statements()[0]["bound_ns"] > 100_000


def test_a_statement_gives_no_drift_where_the_pairs_do_not_show_one() -> None:
    stamping = Stamping(header(), PAIRS[:1])
    stamping.stamp([event(1_050 * SECOND_NS, clock=GPU)])
    (statement,) = stamping.clocks.statements()
    assert (statement["pairs"], "drift_ppm" in statement) == (1, False)
    assert fit_text(statement) == "1 pair, drift unknown"
