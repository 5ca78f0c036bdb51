"""Which events of two recordings are one: those that begin nearest to each other."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from tests.support.recordings import event, span
from tracepipe.event.columns import TraceColumns, event_columns
from tracepipe.event.origins import Origins
from tracepipe.event.tables import Tables
from tracepipe.layout.merging import APART_NS, MERGED, Doubles
from tracepipe.readers.recording import row_of

END_NS = 1 << 40


@pytest.fixture
def tables() -> Tables:
    return Tables()


def columns(tables: Tables, *records: dict[str, Any]) -> TraceColumns:
    events = event_columns([row_of(record, tables, []) for record in records])
    return TraceColumns(events.ts_ns, events.shape, events.args, events.dur_ns, events.launch)


def doubles(tables: Tables, *captures: int) -> Doubles:
    """Of recordings that are of these captures."""
    files = tuple(f"file{at}" for at in range(len(captures)))
    two = combinations(range(len(captures)), 2)
    pairs = frozenset((at, to) for at, to in two if captures[at] != captures[to])
    return Doubles(tables, Origins(count=len(captures), files=files, doubles=pairs))


def decided(tables: Tables, *sources: TraceColumns, captures: tuple[int, ...] = ()) -> list[list[int]]:
    """The times of the events that are left of each recording."""
    both = doubles(tables, *(captures or range(len(sources))))
    for at, events in enumerate(sources):
        both.add(events, at)
    both.decide(END_NS)
    return [both.renamed(events, at).ts_ns.tolist() for at, events in enumerate(sources)]


def calls(tables: Tables, *starts_ns: int, name: str = "f", **more: Any) -> TraceColumns:
    return columns(tables, *(span(ns, ns + 10, name, **more) for ns in starts_ns))


def test_the_nearest_calls_are_doubles(tables: Tables) -> None:
    # The second recording began later, and has one that the first has not.
    first, second = calls(tables, 100, 200, 300, 400), calls(tables, 205, 306, 404, APART_NS * 3)
    assert decided(tables, first, second) == [[100, 200, 300, 400], [APART_NS * 3]]


def test_a_call_that_begins_far_from_all_others_is_not_a_double(tables: Tables) -> None:
    first, second = calls(tables, 100), calls(tables, 101 + APART_NS)
    assert decided(tables, first, second) == [[100], [101 + APART_NS]]


@pytest.mark.parametrize("more", [{"name": "g"}, {"tid": 2}, {"pid": 2}])
def test_a_call_of_another_name_or_thread_is_not_a_double(tables: Tables, more: dict[str, Any]) -> None:
    assert decided(tables, calls(tables, 100), calls(tables, 100, **more)) == [[100], [100]]


def test_the_parts_of_one_capture_have_no_doubles(tables: Tables) -> None:
    sources = [calls(tables, 100), calls(tables, 100), calls(tables, 103)]
    assert decided(tables, *sources, captures=(0, 0, 1)) == [[100], [100], []]


def test_three_recordings_have_one_slice(tables: Tables) -> None:
    sources = [calls(tables, 100, 900), calls(tables, 104, 901), calls(tables, 98, 500_000)]
    assert decided(tables, *sources) == [[100, 900], [], [500_000]]


def test_a_begin_stays_as_its_end_does_and_two_begins_are_two(tables: Tables) -> None:
    begun = columns(tables, event("B", 100, "f"), event("E", 120, "f"))
    assert decided(tables, calls(tables, 103), begun) == [[], [100, 120]]
    again = columns(tables, event("B", 101, "f"), event("E", 119, "f"))
    assert decided(tables, begun, again) == [[100, 120], [101, 119]]


def test_a_double_has_the_arguments_of_both(tables: Tables) -> None:
    one = columns(tables, span(100, 110, "f", args={"size": 1, "result": 0}))
    other = columns(tables, span(103, 108, "f", launch=7, args={"size": 2, "stream": 3}))
    both = doubles(tables, 0, 1)
    both.add(one, 0)
    both.add(other, 1)
    both.decide(END_NS)
    assert other.shape.tolist() == [MERGED]
    assert tables.args(int(one.args[0])) == {
        "size": 1, "result": 0, "size (file1)": 2, "stream": 3, "after_ns (file1)": 3, "dur_ns (file1)": 5,
    }  # fmt: skip
    shape = tables.shapes[int(one.shape[0])]
    assert shape is not None
    assert (shape.has_launch, int(one.launch[0])) == (True, 7)
    assert both.count == 1


def test_what_follows_has_the_launch_of_the_one_that_stays(tables: Tables) -> None:
    one = columns(tables, span(100, 110, "f", launch=5))
    other = columns(tables, span(103, 108, "f", launch=7), span(200, 210, "k", "gpu_kernel", launch=7))
    both = doubles(tables, 0, 1)
    both.add(one, 0)
    both.add(other, 1)
    both.decide(END_NS)
    assert both.renamed(other, 1).launch.tolist() == [5]
    assert both.renamed(one, 0).launch.tolist() == [5]


def launches(tables: Tables, *starts_ns: int, kernel: str = "k", tid: int = 1) -> TraceColumns:
    """Launches as probes record them: a begin with the kernel's name, and an end."""
    begins = (event("B", ns, "cuLaunchKernelEx", args={"kernel": kernel}, tid=tid) for ns in starts_ns)
    ends = [event("E", ns + 20, "cuLaunchKernelEx", tid=tid) for ns in starts_ns]
    both = [one for pair in zip(begins, ends, strict=True) for one in pair]
    return columns(tables, *both)


def test_a_call_that_is_named_as_the_kernel_is_the_launch_of_it(tables: Tables) -> None:
    """Its thread has a number that was made up."""
    xla = columns(tables, *(span(ns, ns + 9, "k", launch=ns, tid=1 << 30) for ns in (105, 207)))
    assert decided(tables, launches(tables, 100, 200), xla) == [[100, 120, 200, 220], []]
    assert decided(tables, xla, launches(tables, 100, 200)) == [[], [100, 120, 200, 220]]


def test_launches_of_another_kernel_or_of_two_threads_are_not_joined(tables: Tables) -> None:
    def xla() -> TraceColumns:
        return columns(tables, span(105, 114, "k", launch=5, tid=1 << 30))

    assert decided(tables, launches(tables, 100, kernel="other"), xla())[1] == [105]
    two = columns(
        tables,
        event("B", 100, "cuLaunchKernelEx", args={"kernel": "k"}),
        event("B", 101, "cuLaunchKernelEx", args={"kernel": "k"}, tid=2),
    )
    assert decided(tables, two, xla())[1] == [105]


def test_calls_that_may_still_come_are_waited_for(tables: Tables) -> None:
    one, other = calls(tables, 100, 5_000_000), calls(tables, 104, 5_000_002)
    both = doubles(tables, 0, 1)
    both.add(one, 0)
    both.add(other, 1)
    both.decide(100)
    assert np.array_equal(other.shape == MERGED, [True, False])
    both.decide(5_000_001)
    assert both.count == 2


def test_one_collective_matches_one_of_each_other_recording(tables: Tables) -> None:
    # The first of the other comes long before both others, which are near each other.
    one, other = calls(tables, 30_000), calls(tables, 20_000, 45_000)
    both = doubles(tables, 0, 1)
    both.add(one, 0)
    both.add(other, 1)
    both.decide(25_000)
    both.decide(END_NS)
    assert both.renamed(other, 1).ts_ns.tolist() == [45_000]


def test_a_stack_comes_along(tables: Tables) -> None:
    one, other = calls(tables, 100, 300), calls(tables, 101)
    other.stack = np.array([4], np.int64)
    both = doubles(tables, 0, 1)
    both.add(one, 0)
    both.add(other, 1)
    both.decide(END_NS)
    assert one.stack is not None
    assert one.stack.tolist() == [4, -1]
