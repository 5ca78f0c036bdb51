"""What relates the clocks of several recordings, with which bound, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tracepipe.clocks.anchors import Source, anchors, is_one_host
from tracepipe.errors import ClockError
from tracepipe.event.model import new_header

NOW_NS = 1_700_000_000_000_000_000
AT_BOOT_NS = NOW_NS - 1_000_000
START = {"monotonic_ns": 1_000_000, "boottime_ns": 1_200_000, "realtime_ns": NOW_NS}


def source(name: str, clock: str = "monotonic", start: dict[str, int] | None = None, **said: Any) -> Source:
    return Source(name, new_header(start=START if start is None else start, **said), clock)


OURS = source("ours", host="node1", boot="b1")


def anchor(one: Source, base: Source = OURS) -> tuple[int, int | None, str]:
    found = anchors([base, one], {})[1]
    return found.offset_ns, found.bound_ns, found.bound


def test_clocks_of_one_boot_are_one_clock() -> None:
    assert anchor(source("other", host="a container", boot="b1")) == (0, 0, "")
    assert anchor(source("other", "boottime", host="node1", boot="b1")) == (-200_000, 1_000, "")
    assert anchor(source("other", "realtime", {}, host="node1", boot="b1")) == (-AT_BOOT_NS, 1_000, "")
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
    assert bound == "1000 ns if both are of one host, else as good as NTP keeps CLOCK_REALTIME of both hosts"


def test_the_clock_of_all_is_that_which_relates_most() -> None:
    kineto = source("kineto", "realtime", {})
    found = anchors([kineto, OURS], {})
    assert [one.offset_ns for one in found] == [-AT_BOOT_NS, 0]


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (source("x", "trace", {}), "x has its times on 'trace', which no host clock is related to"),
        (
            source("x", "globaltimer:0", {}, boot="b1"),
            "x has its times on 'globaltimer:0', which no host clock is related to",
        ),
        (source("x", "boottime", {}), "x has its times on 'boottime' alone, and does not say its host"),
        (
            source("x", "monotonic", {}, host="node2"),
            "x has its times on 'monotonic' alone, and is of another host",
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
