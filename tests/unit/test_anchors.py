"""What relates the clocks of several recordings, with which bound, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.recordings import event, span, write
from tracepipe.clocks import Clocks
from tracepipe.clocks.anchors import Anchor, Source, anchors, is_one_host
from tracepipe.clocks.common_events import KEPT_MAX, LAUNCH_SPREAD_NS, NOTED_NS, CommonEvents, EventsByKey
from tracepipe.clocks.maps import ClockMap
from tracepipe.errors import ClockError
from tracepipe.event.columns import NONE
from tracepipe.event.model import Header
from tracepipe.recording.account import anchor_text
from tracepipe.recording.reading import Reading, open_recording

NOW_NS = 1_700_000_000_000_000_000
AT_BOOT_NS = NOW_NS - 1_000_000
START = {"monotonic_ns": 1_000_000, "boottime_ns": 1_200_000, "realtime_ns": NOW_NS}


def source(name: str, clock: str = "monotonic", start: dict[str, int] | None = None, **stated: Any) -> Source:
    return Source(name, Header(start=START if start is None else start, **stated), clock)


def having(sources: list[Source], common: list[CommonEvents]) -> list[Source]:
    return [replace(one, common=events) for one, events in zip(sources, common, strict=True)]


OURS = source("ours", host="node1", boot="b1")


def anchor(one: Source, base: Source = OURS) -> tuple[int, int | None, str]:
    found = anchors([base, one], {})[1]
    return found.offset_ns, found.bound_ns, found.bound


def test_clocks_of_one_boot_are_one_clock() -> None:
    assert anchor(source("other", host="a container", boot="b1")) == (0, 0, "")
    assert anchor(source("other", "boottime", host="node1", boot="b1")) == (-200_000, 1_000, "")
    assert anchor(source("other", "realtime", {}, host="node1", boot="b1")) == (-AT_BOOT_NS, 5_000, "")
    assert anchor(source("other", "globaltimer:0", boot="b1"), source("b", "globaltimer:0", boot="b1")) == (
        0,
        0,
        "",
    )


def test_a_host_is_known_by_its_name_and_the_time_at_which_it_was_booted() -> None:
    # Which another tool took 700 ns later: that much its clock may be another one.
    start = {"monotonic_ns": 5_000_000, "realtime_ns": NOW_NS + 4_000_700}
    assert anchor(source("nsys", start=start, host="node1")) == (0, 700, "")
    later = {"monotonic_ns": 1_000, "realtime_ns": NOW_NS + 3_600 * 10**9}
    other = source("after a reboot", start=later, host="node1")
    assert is_one_host(other, OURS) is False
    offset_ns, bound_ns, bound = anchor(other)
    assert (offset_ns, bound_ns) == (3_600 * 10**9 + 999_000, None)
    assert bound == "as good as NTP keeps CLOCK_REALTIME of both hosts"


def test_boot_time_is_that_of_a_host_with_the_same_name() -> None:
    assert anchor(source("rocpd", "boottime", {}, host="node1")) == (-200_000, 1_000, "")


def test_hosts_are_related_by_the_time_of_day() -> None:
    start = {"monotonic_ns": 7, "boottime_ns": 7, "realtime_ns": NOW_NS + 100}
    two = source("far", start=start, host="node2", boot="b2")
    assert anchor(two) == (1_000_093, None, "as good as NTP keeps CLOCK_REALTIME of both hosts")
    offset_ns, bound_ns, bound = anchor(source("kineto", "realtime", {}))
    assert (offset_ns, bound_ns) == (-AT_BOOT_NS, None)
    assert bound == "5000 ns if both are of one host, else as good as NTP keeps CLOCK_REALTIME of both hosts"


def test_each_tool_that_converts_to_the_time_of_day_may_be_off() -> None:
    one, two = (source(name, "realtime", {}, host="node1") for name in "ab")
    assert anchor(one, two) == (0, 8_000, "")


def test_the_clock_of_all_is_that_which_relates_most() -> None:
    kineto = source("kineto", "realtime", {})
    found = anchors([kineto, OURS], {})
    assert [one.offset_ns for one in found] == [-AT_BOOT_NS, 0]


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (source("x", "trace", {}), "x has its times on 'trace', to which no host clock is related"),
        (
            source("x", "globaltimer:0", {}, boot="b1"),
            "x has its times on 'globaltimer:0', to which no host clock is related",
        ),
        (source("x", "boottime", {}), "x has its times only on 'boottime', and does not state its host"),
        (
            source("x", "monotonic", {}, host="node2"),
            "x has its times only on 'monotonic', and is of another host",
        ),
    ],
)
def test_what_nothing_relates_is_refused(one: Source, reason: str) -> None:
    with pytest.raises(ClockError) as refused:
        anchors([OURS, one], {})
    assert refused.value.message == f"x cannot be put on the clock of ours: {reason}"
    assert "--offset x=NS" in refused.value.hint
    (_, placed) = anchors([OURS, one], {1: 25})
    assert (placed.offset_ns, placed.bound_ns, placed.bound) == (25, None, "set by hand")


def test_an_offset_by_hand_is_added_to_what_relates_a_clock() -> None:
    (_, placed) = anchors([OURS, source("x", "boottime", host="node1", boot="b1")], {1: -5})
    assert placed.offset_ns == -200_005
    assert placed.how.endswith(", and -5 ns by hand")
    with pytest.raises(ClockError, match="cannot place x by"):
        anchors([OURS, source("x", "trace", {})], {1: 1 << 62})


def test_a_clock_of_a_format_is_that_of_one_file() -> None:
    one, two = (source(name, "trace", {}, host="node1", boot="b1") for name in "ab")
    with pytest.raises(ClockError, match="b cannot be put on the clock of a"):
        anchors([one, two], {})


def test_pairs_of_a_gpus_clock_place_a_file_of_that_clock() -> None:
    pair = {
        "type": "clock",
        "clock": "globaltimer:0",
        "source_ns": 500,
        "host_lo_ns": 990,
        "host_hi_ns": 1_010,
    }
    clocks = Clocks(Header(clocks=["monotonic", "globaltimer:0"]), [pair])
    base = Source("ours", OURS.header, "monotonic", 0, clocks)
    found = anchors([base, Source("bpftime", Header(), "globaltimer:0", 600)], {})[1]
    assert (found.offset_ns, found.bound_ns) == (500, 12)
    # The GPU goes with what launched its work.
    moved = anchors([base, Source("bpftime", Header(), "globaltimer:0", 600)], {0: 25})
    assert [one.offset_ns for one in moved] == [25, 525]
    other = Source("another GPU's", Header(), "globaltimer:1", 600, clocks)
    with pytest.raises(ClockError):
        anchors([base, other], {})
    for first_ns, stated in ((600 + 3_601 * 10**9, {}), (600, {"boot": "b2"})):
        with pytest.raises(ClockError):
            anchors([base, Source("x", Header(**stated), "globaltimer:0", first_ns)], {})


# What others saw too ------------------------------------------------------------------------------------


def seen(tool: str, kind: str, times: dict[int, int], length_ns: int = 0) -> CommonEvents:
    """What a tool saw: time by key."""
    found = CommonEvents(tool)
    getattr(found, kind).add(*columns(times, length_ns))
    return found


def columns(times: dict[int, int], length_ns: int = 0) -> tuple[Any, Any, Any]:
    """Keys, times and lengths."""
    keys, ns = np.array([*times], np.int64), np.array([*times.values()], np.int64)
    return keys, ns, np.full(len(keys), length_ns, np.int64)


def refined(one: Source, kind: str, ahead_ns: int, *, base: Source = OURS, jitter_ns: int = 20) -> Any:
    """Where `one` stands, whose times are so far ahead, within a jitter; one thing in twelve is far off."""
    base_ns = {key: 1_000_000 + 5_000 * key for key in range(1, 25)}
    own_ns = {key: ns + ahead_ns + jitter_ns * (key % 3 - 1) for key, ns in base_ns.items()}
    own_ns[5] += 10**9
    return anchors(having([base, one], [seen("a", kind, base_ns), seen("b", kind, own_ns)]), {})[1]


@given(
    before_ns=st.integers(0, 3_000),
    after_ns=st.integers(0, 3_000),
    ahead_ns=st.integers(-(10**9), 10**9),
    is_inside=st.booleans(),
)
def test_the_truth_is_within_the_bound_whichever_tool_sees_a_call_from_the_inside(
    before_ns: int, after_ns: int, ahead_ns: int, is_inside: bool
) -> None:
    outside = {key: 1_000_000 + 50_000 * key for key in range(20)}
    inside = {key: ns + before_ns for key, ns in outside.items()}
    length_ns, inside_ns = 9_000, 9_000 - before_ns - after_ns
    ours, theirs = (inside, outside) if is_inside else (outside, inside)
    lengths_ns = (inside_ns, length_ns) if is_inside else (length_ns, inside_ns)
    theirs = {key: ns + ahead_ns for key, ns in theirs.items()}
    both = [seen("a", "launches", ours, lengths_ns[0]), seen("b", "launches", theirs, lengths_ns[1])]
    found = anchors(having([OURS, source("x", "trace", {})], both), {})[1]
    assert found.bound_ns is not None and found.bound_ns <= (before_ns + after_ns) // 2 + 1
    assert abs(found.offset_ns + ahead_ns) <= found.bound_ns


def test_a_call_of_unknown_length_may_be_noted_late() -> None:
    times = {key: 1_000_000 + 5_000 * key for key in range(20)}
    both = [seen("a", "launches", times, NONE), seen("b", "launches", times, 3_000)]
    assert anchors(having([OURS, source("x", "trace", {})], both), {})[1].bound_ns == NOTED_NS


def test_calls_without_a_number_make_an_anchor_better_that_is_not_exact() -> None:
    def calls(tool: str, ahead_ns: int) -> CommonEvents:
        made = CommonEvents(tool)
        ns = np.array([1_000_000 + 90_000 * at * at + ahead_ns for at in range(20)], np.int64)
        for times, length_ns in ((made.calls.begins, 0), (made.calls.ends, 9_000)):
            times.add(np.zeros(20, np.int64), ns + length_ns)
        return made

    def placed(one: Source, ahead_ns: int, tool: str = "b") -> Any:
        return anchors(having([OURS, one], [calls("a", 0), calls(tool, ahead_ns)]), {})[1]

    found = placed(source("kineto", "realtime", {}), AT_BOOT_NS + 1_300)
    assert (found.offset_ns, found.bound_ns) == (-AT_BOOT_NS - 1_300, 0)
    assert found.how.startswith("20 calls that ours recorded too, 1300 ns from where CLOCK_REALTIME")
    assert placed(source("kineto", "realtime", {}), AT_BOOT_NS + 60_000).bound_ns is None
    # One tool has no call twice.
    assert placed(source("kineto", "realtime", {}), AT_BOOT_NS + 1_300, "a").bound_ns is None
    assert placed(source("other", boot="b1"), 1_300).offset_ns == 0
    with pytest.raises(ClockError):
        placed(source("x", "trace", {}), 0)


def test_launches_that_both_saw_place_a_clock_of_its_own() -> None:
    found = refined(source("x", "trace", {}), "launches", -700_000)
    assert (found.offset_ns, found.bound_ns) == (700_000, 20)
    assert found.how == "24 launches that ours recorded too"


def test_collectives_relate_two_hosts_better_than_ntp() -> None:
    start = {"monotonic_ns": 1_000_000, "realtime_ns": NOW_NS + 3_000_000}
    far = source("far", start=start, host="node2", boot="b2")
    found = refined(far, "collectives", -2_999_000, jitter_ns=4_000)
    assert (found.offset_ns, found.bound_ns) == (2_999_000, 4_000)
    assert found.how.endswith(", 1000 ns from where CLOCK_REALTIME of two hosts puts it")
    # Launches of two hosts are not the same, whatever their numbers.
    assert refined(far, "launches", -2_999_000).bound_ns is None


def test_an_anchor_that_is_better_stays() -> None:
    other = source("other", boot="b1")
    assert refined(other, "launches", 15).how == "monotonic of the same host"
    # But not where what both saw contradicts it.
    assert refined(other, "launches", 5_000).offset_ns == -5_000


def test_clocks_that_do_not_agree_are_not_related() -> None:
    one = source("x", "trace", {})
    with pytest.raises(ClockError):
        refined(one, "launches", 0, jitter_ns=LAUNCH_SPREAD_NS + 1)
    few = {key: 1_000 * key for key in range(7)}
    with pytest.raises(ClockError):
        anchors(having([OURS, one], [seen("a", "launches", few), seen("b", "launches", few)]), {})
    same_tool = {key: 1_000 * key for key in range(50)}
    with pytest.raises(ClockError):
        anchors(having([OURS, one], [seen("a", "launches", same_tool)] * 2), {})


def test_a_recording_is_placed_by_one_that_is_placed_by_another() -> None:
    times = {key: 1_000_000 + 5_000 * key for key in range(20)}
    ranks = [source("rank0", "trace", {}), source("rank1", "trace", {})]
    by_rank = seen("kineto", "launches", {key: ns + 100 for key, ns in times.items()})
    by_rank.collectives.add(*columns({key: key * 7_000 for key in range(20)}))
    other = seen("kineto", "collectives", {key: key * 7_000 - 40 for key in range(20)})
    found = anchors(having([ranks[1], ranks[0], OURS], [other, by_rank, seen("ours", "launches", times)]), {})
    assert [one.offset_ns for one in found] == [-60, -100, 0]
    assert found[0].how == "20 collectives that rank0 recorded too"


def test_a_key_that_comes_twice_is_not_used_and_few_keys_are_kept() -> None:
    sightings = EventsByKey()
    sightings.add(np.array([3, 1, 2, 1]), np.array([30, 10, 20, 11]), np.array([5, 4, 3, 2]))
    assert [column.tolist() for column in sightings.once()] == [[2, 3], [20, 30], [3, 5]]
    sightings.add(*columns(dict.fromkeys(range(10, 10 + KEPT_MAX), 0)))
    assert len(sightings.once()[0]) == KEPT_MAX - 2


BEGIN_NS = 10**15
SECOND_NS = 10**9


class Drifting:
    """A clock that runs at nearly one rate against ours: here and there it is another by some millionths."""

    def __init__(self, ahead_ns: int, rate_ppm: float, steps_ppm: list[float], span_ns: int) -> None:
        self._at_ns = np.linspace(0, span_ns, len(steps_ppm) + 2)
        rates = 1 + np.array([rate_ppm, *(rate_ppm + step for step in steps_ppm)]) / 1e6
        self._shown_ns = np.append(0, np.cumsum(np.diff(self._at_ns) * rates))
        self._ahead_ns = ahead_ns

    def shown(self, ns: Any) -> Any:
        """What it shows when ours does `ns`."""
        past = np.interp(ns - BEGIN_NS, self._at_ns, self._shown_ns)
        return BEGIN_NS + self._ahead_ns + np.round(past).astype(np.int64)


def both(
    clock: Drifting, ours_ns: Any, noise: Any, *, is_inside: bool, has_lengths: bool = True
) -> list[CommonEvents]:
    """Calls as we saw them and as another tool did; `noise` is how much later they began and sooner they
    ended for whom was inside.
    """
    keys = np.arange(1, len(ours_ns) + 1)
    outer = ours_ns, ours_ns + 20_000
    inner = ours_ns + noise[0], ours_ns + 20_000 - noise[1]
    found = []
    for tool, (begins_ns, ends_ns) in zip("ab", (outer, inner) if is_inside else (inner, outer), strict=True):
        if tool == "b":
            begins_ns, ends_ns = clock.shown(begins_ns), clock.shown(ends_ns)
        one = CommonEvents(tool)
        lengths_ns = ends_ns - begins_ns if has_lengths else np.full(len(keys), NONE)
        one.launches.add(keys * 7919 % (1 << 31), begins_ns, lengths_ns)
        found.append(one)
    return found


def placed(clock: Drifting, found: list[CommonEvents], span_ns: int) -> Anchor:
    first_ns, end_ns = (int(clock.shown(BEGIN_NS + at_ns)) for at_ns in (0, span_ns))
    one = Source("other", Header(start={}), "trace", first_ns, end_ns=end_ns)
    return anchors(having([OURS, one], found), {})[1]


def off_ns(clock: Drifting, anchor: Anchor, span_ns: int) -> int:
    """How far off any time of the recording is placed at most."""
    truth_ns = BEGIN_NS + np.linspace(0, span_ns, 2_000).astype(np.int64)
    return int(np.abs(anchor.place_all(clock.shown(truth_ns)) - truth_ns).max())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(64, 3_000),
    st.sampled_from([SECOND_NS, 15 * SECOND_NS, 600 * SECOND_NS, 7_200 * SECOND_NS]),
    st.floats(-80, 80),
    st.lists(st.floats(-0.5, 0.5), max_size=5),
    st.integers(0, 4_000),
    st.booleans(),
    st.booleans(),
)
def test_the_truth_is_within_the_bound(
    chance: Any, count: int, span_ns: int, rate_ppm: float, steps_ppm: list[float], noise_ns: int,
    is_inside: bool, has_lengths: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(chance.getrandbits(32))
    clock = Drifting(int(rng.integers(-(10**12), 10**12)), rate_ppm, steps_ppm, span_ns + SECOND_NS)
    ours_ns = BEGIN_NS + np.sort(rng.integers(0, span_ns, count))
    # One of thirty is noted 15 µs late, as a profiler that gets itself a buffer does it.
    noise = rng.integers(0, 1 + (noise_ns if has_lengths else 900), (2, count))
    if has_lengths:
        noise[0][rng.random(count) < 1 / 30] = 15_000
    found = both(clock, ours_ns, noise, is_inside=is_inside, has_lengths=has_lengths)
    anchor = placed(clock, found, span_ns)
    assert anchor.bound_ns is not None
    assert off_ns(clock, anchor, span_ns) <= anchor.bound_ns


@pytest.mark.parametrize("rate_ppm", [-60.0, 60.0])
@pytest.mark.parametrize("seed", range(5))
def test_few_calls_in_hours_show_a_drift_of_either_sign(rate_ppm: float, seed: int) -> None:
    span_ns, rng = 7_200 * SECOND_NS, np.random.default_rng(seed)
    clock = Drifting(5_000, rate_ppm, [], span_ns + SECOND_NS)
    ours_ns = BEGIN_NS + np.sort(rng.integers(0, span_ns, 64))
    found = both(clock, ours_ns, rng.integers(0, 900, (2, 64)), is_inside=False, has_lengths=False)
    anchor = placed(clock, found, span_ns)
    assert anchor.bound_ns is not None
    assert off_ns(clock, anchor, span_ns) <= anchor.bound_ns < 5 * 10**6


def of_an_hour(rate_ppm: float, count: int = 3_000) -> tuple[Drifting, list[CommonEvents], int]:
    """A clock, and calls of an hour, which the other tool sees from the inside."""
    span_ns = 3_600 * SECOND_NS
    clock, rng = Drifting(5_000, rate_ppm, [], span_ns + SECOND_NS), np.random.default_rng(7)
    ours_ns = BEGIN_NS + np.sort(rng.integers(0, span_ns, count))
    noise = rng.integers(0, 1_500, (2, count))
    return clock, both(clock, ours_ns, noise, is_inside=True), span_ns


def test_a_drift_is_removed_and_reported() -> None:
    clock, found, span_ns = of_an_hour(20)
    anchor = placed(clock, found, span_ns)
    statement = anchor.stated("monotonic")
    assert statement["drift_ppm"] == -20.0
    # What may be off is the rate between calls, 1 ppm of some ten seconds; the drift made 72 ms.
    assert anchor.bound_ns is not None and anchor.bound_ns < 30_000
    assert off_ns(clock, anchor, span_ns) < 1_000
    assert f": {anchor.offset_ns:+d} ns, drift -20.000 ppm, within " in anchor_text(statement)


def test_one_offset_is_enough_where_no_drift_is_seen() -> None:
    clock, found, span_ns = of_an_hour(0)
    anchor = placed(clock, found, span_ns)
    assert (anchor.drift, "drift_ppm" in anchor.stated("monotonic")) == (None, False)
    assert anchor.bound_ns is not None and anchor.bound_ns < 5_000


def test_a_rate_that_no_clock_has_is_another_run() -> None:
    clock, found, span_ns = of_an_hour(3_000)
    with pytest.raises(ClockError):
        placed(clock, found, span_ns)


def test_few_calls_show_no_drift() -> None:
    clock, found, span_ns = of_an_hour(0.01, 60)
    assert placed(clock, found, span_ns).drift is None


def test_a_recording_that_another_one_places_drifts_with_it() -> None:
    clock, found, span_ns = of_an_hour(20)
    ends_ns = {key: int(clock.shown(BEGIN_NS + key * SECOND_NS)) for key in range(50)}
    found[1].collectives.add(*columns(ends_ns))
    third = seen("c", "collectives", {key: ns + 70 for key, ns in ends_ns.items()})
    first_ns, end_ns = (int(clock.shown(BEGIN_NS + at_ns)) for at_ns in (0, span_ns))
    others = [
        Source(name, Header(start={}), "trace", ahead_ns + first_ns, end_ns=ahead_ns + end_ns)
        for name, ahead_ns in (("other", 0), ("third", 70))
    ]
    anchor = anchors(having([OURS, *others], [*found, third]), {})[2]
    truth_ns = BEGIN_NS + np.linspace(0, span_ns, 100).astype(np.int64)
    assert anchor.bound_ns is not None
    placed_ns = anchor.place_all(clock.shown(truth_ns) + 70)
    assert int(np.abs(placed_ns - truth_ns).max()) <= anchor.bound_ns < 30_000


def test_events_and_their_ends_go_where_the_map_puts_them(tmp_path: Path) -> None:
    second = 10**9
    points = np.array([0, 100 * second])
    bounds = np.zeros(3, np.int64)
    drift = ClockMap("trace", "fit", points, points + np.array([7, 7 + 1_000_000]), bounds, bounds)
    path = write(tmp_path / "run.jsonl", span(50 * second, 70 * second, "f"), event("I", 80 * second, "g"))
    with open_recording(str(path)) as opened:
        opened.clocks.anchor(7, drift)
        (batch, _), *_ = Reading(opened, str(path)).placed()
    assert batch.events.ts_ns.tolist() == [50 * second + 500_007, 80 * second + 800_007]
    assert batch.events.dur_ns.tolist() == [20 * second + 200_000, 0]
