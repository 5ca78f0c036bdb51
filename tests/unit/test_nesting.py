"""Matching begins with ends: rows, slices around slices, flows, and launches, of both implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cores import running
from tracepipe.event.columns import NONE, SPECIAL, EventColumns, TraceColumns, event_columns, signed
from tracepipe.event.model import FLOW_LIMIT
from tracepipe.event.nesting import (
    COUNTED,
    DEPTH_MAX,
    DRAWN,
    FLOWS_OF_ALL,
    FLOWS_OF_IOCTLS,
    LAUNCHES_MAX,
    NO_LAUNCH,
    NO_ROW,
    OVERLAP_ROWS_MAX,
    STARTS,
    AnyNesting,
    Early,
    Outcomes,
    ShapeRow,
    WarpStarts,
    new_nesting,
)
from tracepipe.event.ops import (
    BEGIN,
    END,
    FROM_DURATION,
    INSTANT,
    NO_BEGIN,
    NO_MARK,
    UNCLOSED,
    Op,
    OpColumns,
    op_of,
)
from tracepipe.event.tables import new_tables
from tracepipe.layout.timeline import Book, Drawn

IOCTL, F, G = range(3)


def taken(nesting: AnyNesting) -> list[Op]:
    """The operations since the last call, in the order in which they were made."""
    ops = nesting.take_ops()
    return list(ops.rows(slice(ops.count)))


class Bench:
    """A nesting that is given events one by one: phase, time, and what else there is."""

    def __init__(self) -> None:
        self.nesting = new_nesting(IOCTL)
        self._shapes: dict[ShapeRow, int] = {}

    def row(self, on_stream: bool = False) -> int:
        return self.nesting.add_row(on_stream)

    def add(self, row: int, *events: tuple[str, int] | tuple[str, int, dict[str, int]]) -> None:
        """Events of one row: `("B", 5)`, `("X", 5, {"dur": 3, "name": G, "launch": 4, "bound": 9})`."""
        rows, bounds = [], []
        for phase, ts_ns, *more in events:
            given: dict[str, int] = more[0] if more else {}  # type: ignore[assignment]
            shape = ShapeRow(
                row,
                given.get("name", F),
                phase,
                bool(given.get("takes_flow")),
                "dur" in given,
                "launch" in given,
            )
            number = self._shapes.setdefault(shape, len(self._shapes))
            self.nesting.set_shape(number, shape)
            launch = signed(given.get("launch", 0))
            rows.append((ts_ns, number, NONE, given.get("dur", 0), launch, None, NONE))
            bounds.append(given.get("bound", 0))
        columns = event_columns(rows)
        trace = trace_of(columns)
        trace.bound_ns = np.array(bounds, np.int64)
        self.nesting.events(trace, 0, len(rows))

    def taken(self) -> list[Op]:
        return taken(self.nesting)


def trace_of(columns: EventColumns) -> TraceColumns:
    return TraceColumns(columns.ts_ns, columns.shape, columns.args, columns.dur_ns, columns.launch)


def starts(*batches: tuple[int, int, int, int, int]) -> WarpStarts:
    """Batches of warps: place, launch, time, bound, and what is done with them."""
    *columns, done = (np.array(column, np.int64) for column in zip(*batches, strict=True))
    return WarpStarts(*columns, done.astype(np.uint8), np.full(len(batches), NONE))


def flow(nesting: AnyNesting, launch: int, ts_ns: int, bound_ns: int, done: int) -> int:
    """The flow of a batch of warps that stands by itself."""
    rows = event_columns([(ts_ns, SPECIAL, NONE, 0, 0, None, NONE)])
    warps = starts((0, launch, ts_ns, bound_ns, done))
    nesting.events(trace_of(rows), 0, 1, warps)
    return int(warps.flow[0])


def short(ops: Sequence[Op]) -> list[tuple[Any, ...]]:
    """Kind, row, time, mark, number of the slice, slice around it."""
    return [(op[0], op[1], op[2], op[5], op[8], op[9]) for op in ops]


pytestmark = pytest.mark.usefixtures("core")


def test_slices_are_numbered_and_know_what_is_around_them() -> None:
    bench = Bench()
    row = bench.row()
    bench.add(row, ("B", 1), ("B", 2, {"name": G}), ("I", 3), ("E", 4, {"name": G}), ("E", 5))
    bench.add(row, ("X", 6, {"dur": 4}), ("X", 7, {"dur": 1}), ("I", 8), ("I", 11))
    assert short(bench.taken()) == [
        (BEGIN, row, 1, NO_MARK, 0, NONE),
        (BEGIN, row, 2, NO_MARK, 1, 0),
        (INSTANT, row, 3, NO_MARK, NONE, 1),
        (END, row, 4, NO_MARK, 1, NONE),
        (END, row, 5, NO_MARK, 0, NONE),
        (BEGIN, row, 6, NO_MARK, 2, NONE),
        (END, row, 10, NO_MARK, 2, NONE),
        (BEGIN, row, 7, NO_MARK, 3, 2),
        (END, row, 8, NO_MARK, 3, NONE),
        (INSTANT, row, 8, NO_MARK, NONE, 2),
        (INSTANT, row, 11, NO_MARK, NONE, NONE),
    ]


def events_with_flows(ops: Sequence[Op], nesting: AnyNesting) -> list[tuple[Any, ...]]:
    """Kind, row, time and flows of those that have some, without the bit that events' flows have."""
    book = Book(new_tables(), more_flows=nesting.more_flows)
    drawn = Drawn(book, [], None, OpColumns(), np.empty(0, np.int64), [], [])
    return [
        (*op[:3], *((abs(flow) & FLOW_LIMIT) * (1 if flow > 0 else -1) for flow in drawn.flows(*op[6:8])))
        for op in ops
        if op[6] or op[7]
    ]


def test_a_flow_is_of_the_slice_that_begins_at_its_time_or_an_instant() -> None:
    bench = Bench()
    row, other = bench.row(), bench.row(on_stream=True)
    bench.add(row, ("X", 5, {"dur": 9}), *(("s", 5, {"launch": launch}) for launch in (3, 4, 5, 6)))
    bench.add(row, ("X", 6, {"dur": 20}), ("t", 6, {"launch": 3}))
    bench.add(other, ("B", 7), ("f", 7, {"launch": 3}), ("f", 8, {"launch": 4}))
    ops = bench.taken()
    assert events_with_flows(ops, bench.nesting) == [
        (BEGIN, row, 5, -3, -6, -5, -4),
        (BEGIN, row + 2, 6, 3),
        (BEGIN, other, 7, 3),
        (INSTANT, other, 8, 4),
    ]
    # Several flows without a slice have one instant, if they have the same name.
    bench.add(other, *(("s", 9, {"launch": launch}) for launch in (7, 8)), ("s", 9, {"launch": 9, "name": G}))
    assert events_with_flows(bench.taken(), bench.nesting) == [
        (INSTANT, other, 9, -7, -8),
        (INSTANT, other, 9, -9),
    ]
    bench.add(other, ("f", 7, {"launch": 9}))
    assert events_with_flows(bench.taken(), bench.nesting) == [(INSTANT, other, 7, 9)]


def test_operations_name_their_events() -> None:
    bench = Bench()
    row = bench.row()
    bench.add(row, ("B", 1), ("B", 2, {"name": G}), ("E", 5), ("X", 6, {"dur": 2}), ("E", 7, {"name": G}))
    # The end that a caller's end makes, and that of a whole slice, are of no event.
    assert [(op[0], op[3], op[4]) for op in bench.taken()] == [
        (BEGIN, F, 0), (BEGIN, G, 1), (END, G, NONE), (END, F, 2), (BEGIN, F, 3), (END, F, NONE),
        (INSTANT, G, 4),
    ]  # fmt: skip


def test_a_slice_ends_at_the_last_time_that_there_is() -> None:
    bench, last_ns = Bench(), (1 << 63) - 1
    row = bench.row()
    bench.add(row, ("X", last_ns - 5, {"dur": 10}))
    assert [op[2] for op in bench.taken()] == [last_ns - 5, last_ns]


def test_names_of_open_slices_can_have_other_numbers() -> None:
    bench = Bench()
    row = bench.row()
    bench.add(row, ("B", 1, {"name": G}), ("B", 2), ("E", 3))
    assert bench.nesting.open_names(3).tolist() == [False, False, True]
    bench.nesting.rename(np.array([NONE, NONE, F], np.int32))
    assert bench.nesting.open_names(3).tolist() == [False, True, False]
    bench.taken()
    bench.add(row, ("E", 4))
    assert [(op[0], op[3]) for op in bench.taken()] == [(END, F)]


def test_a_part_of_the_events_may_be_nested() -> None:
    bench = Bench()
    row = bench.row()
    bench.add(row, ("I", 0))
    bench.taken()
    columns = event_columns([(ns, 0, NONE, 0, 0, None, NONE) for ns in range(10)])
    trace = TraceColumns(columns.ts_ns, columns.shape, columns.args, columns.dur_ns, columns.launch)
    bench.nesting.events(trace, 3, 6)
    bench.nesting.add(op_of(INSTANT, row, 77, G, -5))
    bench.nesting.events(trace, 8, 9)
    assert [(op[2], op[4]) for op in bench.taken()] == [(3, 3), (4, 4), (5, 5), (77, -5), (8, 8)]


def test_a_whole_slice_nests_in_an_open_one_that_surely_ends_later() -> None:
    bench = Bench()
    row, overlap = bench.row(), 1
    bench.nesting.set_horizon(60)
    bench.add(row, ("B", 1), ("X", 10, {"dur": 5}), ("X", 11, {"dur": 2}), ("E", 15), ("X", 15, {"dur": 1}))
    assert short(bench.taken())[::2] == [
        (BEGIN, row, 1, NO_MARK, 0, NONE),
        (END, row, 15, NO_MARK, 1, NONE),
        (END, row, 13, NO_MARK, 2, NONE),
        (BEGIN, row, 15, NO_MARK, 3, NONE),
    ]
    # Two cross the end of the slice around them, one begins there, and one ends too late to know.
    bench.add(row, ("B", 20), ("B", 21, {"name": G}), ("X", 30, {"dur": 25}), ("X", 31, {"dur": 20}))
    bench.add(row, ("X", 32, {"dur": 3}), ("X", 35, {"dur": 30}), ("X", 40, {"dur": 2}))
    bench.add(row, ("E", 40, {"name": G}), ("X", 41, {"dur": 1}), ("E", 42))
    begun = [one for one in short(bench.taken()) if one[0] == BEGIN]
    assert [one[1:3] + one[4:] for one in begun] == [
        (row, 20, 4, NONE),
        (row, 21, 5, 4),
        (overlap + 1, 30, 6, NONE),
        (overlap + 1, 31, 7, 6),
        (row, 32, 8, 7),
        (overlap, 35, 9, NONE),
        (overlap, 40, 10, 9),
        (row, 41, 11, 4),
    ]
    assert bench.nesting.outcomes == Outcomes(overlaps=4)


def test_an_end_finds_its_begin_on_an_overlap_row() -> None:
    bench = Bench()
    row = bench.row()
    bench.add(row, ("X", 10, {"dur": 50}), ("B", 20, {"name": G}), ("E", 90, {"name": G}))
    overlap = row + 1
    assert short(bench.taken())[2:] == [
        (BEGIN, overlap, 20, NO_MARK, 1, NONE),
        (END, overlap, 90, NO_MARK, 1, NONE),
    ]
    assert bench.nesting.base(overlap) == row
    assert bench.nesting.row_count == 2
    assert bench.nesting.outcomes == Outcomes(overlaps=1)


def test_a_slice_that_is_moved_is_not_put_into_one_that_began_later() -> None:
    bench = Bench()
    row = bench.row()
    bench.nesting.set_horizon(30)
    # The call ends before what it seemed to enclose, which had to leave another begin to an overlap row.
    bench.add(row, ("B", 5), ("X", 5, {"dur": 4, "name": G}), ("B", 5, {"name": G + 1}), ("E", 7))
    bench.nesting.close(row, 20)
    assert short(bench.taken()) == [
        (BEGIN, row, 5, NO_MARK, 0, NONE),
        (BEGIN, row + 2, 5, NO_MARK, 1, NONE),
        (END, row + 2, 9, NO_MARK, 1, NONE),
        (BEGIN, row + 1, 5, NO_MARK, 2, NONE),
        (END, row, 7, NO_MARK, 0, NONE),
        (END, row + 1, 20, UNCLOSED, 2, NONE),
    ]


def test_slices_that_are_moved_together_nest_as_before() -> None:
    bench = Bench()
    row = bench.row()
    bench.nesting.set_horizon(30)
    inner = {"dur": 3, "name": G + 1}
    bench.add(row, ("B", 5), ("X", 5, {"dur": 4, "name": G}), ("X", 5, inner), ("E", 7))
    assert [(op[0], op[1], op[9]) for op in bench.taken() if op[0] == BEGIN] == [
        (BEGIN, row, NONE),
        (BEGIN, row + 1, NONE),
        (BEGIN, row + 1, 1),
    ]


def test_an_end_is_rather_that_of_an_innermost_call() -> None:
    bench = Bench()
    row = bench.row()
    # Late, the third goes to an overlap row, on which a call of its name is open below another.
    bench.add(row, ("B", 5), ("B", 6, {"name": G}), ("B", 4), ("E", 9))
    assert [(op[0], op[1]) for op in bench.taken()] == [(BEGIN, row)] * 2 + [(BEGIN, row + 1), (END, row + 1)]
    bench.add(row, ("E", 10))
    assert short(bench.taken()) == [(END, row, 10, UNCLOSED, 1, NONE), (END, row, 10, NO_MARK, 0, NONE)]


def test_what_does_not_fit_anywhere_is_on_no_row_and_has_a_number() -> None:
    bench = Bench()
    row = bench.row()
    bench.add(row, *(("X", at, {"dur": 1_000}) for at in range(OVERLAP_ROWS_MAX + 3)))
    ops = bench.taken()
    assert bench.nesting.outcomes == Outcomes(overlaps=OVERLAP_ROWS_MAX + 2, undrawn=2)
    assert bench.nesting.row_count == OVERLAP_ROWS_MAX + 1
    assert [op[1] for op in ops][-4:] == [NO_ROW] * 4
    assert [op[8] for op in ops[::2]] == list(range(OVERLAP_ROWS_MAX + 3))
    # Begins and ends of what is not drawn: the end has nothing to find.
    bench.add(row, ("B", 500, {"name": G}), ("E", 600, {"name": G}))
    assert [(op[0], op[1], op[5]) for op in bench.taken()] == [
        (BEGIN, NO_ROW, NO_MARK),
        (INSTANT, row, NO_BEGIN),
    ]


def test_a_row_is_as_deep_as_perfetto_shows_and_its_ends_come_back() -> None:
    bench = Bench()
    row, deep = bench.row(), DEPTH_MAX + 3
    bench.add(row, *(("B", at) for at in range(deep)), *(("E", 10_000 + at) for at in range(deep)))
    begins, ends = bench.taken()[:deep], bench.taken()
    assert ends == []
    assert [op[1] for op in begins] == [row] * DEPTH_MAX + [row + 1] * 3
    assert bench.nesting.outcomes == Outcomes(overlaps=3)


def test_the_ends_of_calls_on_overlap_rows_of_a_full_row_come_first() -> None:
    bench = Bench()
    row, deep = bench.row(), DEPTH_MAX + 3
    bench.add(row, *(("B", at) for at in range(deep)))
    bench.taken()
    bench.add(row, *(("E", 10_000 + at) for at in range(deep)))
    assert [op[8] for op in bench.taken()] == [
        *range(deep - 1, DEPTH_MAX - 1, -1),
        *range(DEPTH_MAX - 1, -1, -1),
    ]


def test_an_end_with_a_duration_is_a_slice_and_never_ends_before_it_begins() -> None:
    bench = Bench()
    row = bench.row()
    bench.add(row, ("E", 50, {"dur": 20}), ("E", 60, {"dur": 100, "name": G}))
    assert short(bench.taken())[::2] == [
        (BEGIN, row, 30, FROM_DURATION, 0, NONE),
        (BEGIN, row + 1, 0, FROM_DURATION, 1, NONE),
    ]
    # Before time zero, where an assumed offset may place it.
    early = bench.row()
    bench.add(early, ("E", -50, {"dur": 20}))
    assert [(op[0], op[2]) for op in bench.taken()] == [(BEGIN, -50), (END, -50)]


def test_a_slice_from_a_duration_does_not_cross_one_that_has_ended() -> None:
    bench = Bench()
    row = bench.row()
    bench.add(row, ("E", 100, {"dur": 9}), ("I", 101), ("E", 105, {"dur": 11, "name": G}))
    first, _, _, second, _ = bench.taken()
    assert (first[1:3], second[1:3]) == ((row, 91), (row + 1, 94))


def test_a_slice_from_a_duration_nests_in_one_that_ends_with_it() -> None:
    bench = Bench()
    row = bench.row()
    bench.add(row, ("E", 100, {"dur": 9}), ("I", 100), ("E", 100, {"dur": 5, "name": G}))
    outer, *_, inner, _ = bench.taken()
    assert (inner[1], inner[9]) == (row, outer[8])


def test_what_is_open_at_the_end_is_closed_innermost_first_and_marked() -> None:
    bench = Bench()
    row = bench.row()
    bench.add(row, ("B", 1), ("B", 8, {"name": G}), ("B", 5, {"name": G}))
    bench.taken()
    bench.nesting.close(row, 3)
    # Never before the last begin of its row.
    assert short(bench.taken()) == [
        (END, row, 8, UNCLOSED, 1, NONE),
        (END, row, 8, UNCLOSED, 0, NONE),
        (END, row + 1, 5, UNCLOSED, 2, NONE),
    ]
    assert bench.nesting.outcomes == Outcomes(unclosed=3, overlaps=1)
    bench.nesting.close(row, 9)
    assert bench.taken() == []


def test_rows_that_are_forgotten_count_from_0_again() -> None:
    nesting = new_nesting(IOCTL)
    nesting.one(nesting.add_row(), "B", 8, None, F, 0)
    nesting.one(0, "B", 5, None, F, 1)  # goes to an extra row
    nesting.close(0, 9)
    nesting.forget_rows()
    assert (nesting.row_count, nesting.add_row(), nesting.add_row()) == (0, 0, 1)
    nesting.one(0, "B", 1, None, F, 2)  # earlier than what was there
    nesting.one(0, "E", 3, None, F, 3)
    *_, begin, end = taken(nesting)
    assert [op[:3] for op in (begin, end)] == [(BEGIN, 0, 1), (END, 0, 3)]
    assert begin[8] == end[8] == 2  # slices count on
    assert nesting.outcomes == Outcomes(unclosed=2, overlaps=1)


def test_slices_of_others_take_room_on_overlap_rows() -> None:
    nesting = new_nesting(IOCTL)
    row = nesting.add_row()
    assert nesting.overlap_row(row, 10, 20) == row + 1
    assert nesting.overlap_row(row, 12, 18) == row + 1  # inside the first
    assert nesting.overlap_row(row, 12, 30) == row + 2
    assert nesting.overlap_row(row, 30, 40) == row + 1
    assert (nesting.base(row), nesting.base(row + 1), nesting.base(row + 2)) == (NO_ROW, row, row)
    found = [nesting.overlap_row(row, 50, 1_000 + at) for at in range(OVERLAP_ROWS_MAX + 1)]
    assert found == [*range(row + 1, row + 1 + OVERLAP_ROWS_MAX), NO_ROW]
    assert nesting.row_count == OVERLAP_ROWS_MAX + 1
    assert nesting.outcomes.undrawn == 1


# Flows ------------------------------------------------------------------------------------------------


def layers() -> tuple[Bench, int, int, int]:
    """A thread's calls, system calls and driver functions."""
    bench = Bench()
    calls, system_calls, driver = bench.row(), bench.row(), bench.row()
    bench.nesting.set_above(calls, NO_ROW, NO_ROW, FLOWS_OF_ALL)
    bench.nesting.set_above(system_calls, calls, NO_ROW, FLOWS_OF_IOCTLS)
    bench.nesting.set_above(driver, system_calls, calls, 0)
    return bench, calls, system_calls, driver


def flows(ops: Sequence[Op]) -> list[tuple[int, int]]:
    return [(op[6], op[7]) for op in ops if op[0] != END]


def test_the_nearer_layer_is_the_cause_unless_it_is_no_ioctl() -> None:
    bench, calls, system_calls, driver = layers()
    takes_flow = {"takes_flow": 1}
    bench.add(calls, ("B", 1))
    bench.add(system_calls, ("B", 2, {"name": IOCTL, "takes_flow": 1}))
    bench.add(driver, ("B", 3, takes_flow), ("I", 4, takes_flow), ("E", 5, takes_flow))
    assert flows(bench.taken()) == [(-1, 0), (1, 0), (1, 0), (0, 0)]
    bench, calls, system_calls, driver = layers()
    bench.add(calls, ("B", 1))
    bench.add(system_calls, ("B", 2, {"name": G}))
    bench.add(driver, ("I", 3, takes_flow))
    assert flows(bench.taken()) == [(-1, 0), (0, 0), (1, 0)]


def test_a_call_that_may_be_asked_later_gets_its_flow_while_it_is_at_hand() -> None:
    bench, calls, system_calls, driver = layers()
    bench.add(calls, ("B", 1))
    bench.add(system_calls, ("B", 2, {"name": IOCTL}), ("B", 3, {"name": G}))
    bench.nesting.settle()
    assert flows(bench.taken()) == [(-1, 0), (-3, 0), (0, 0)]
    bench.nesting.settle()
    bench.add(driver, ("I", 9, {"takes_flow": 1}))
    # `G` is not an ioctl, so the call above it is the cause.
    assert flows(bench.taken()) == [(1, 0)]


def test_operations_may_be_added_before_open_calls_get_their_flows() -> None:
    bench, calls, _, _ = layers()
    bench.add(calls, ("B", 1), ("B", 2, {"launch": 5}))
    for at in range(10_000):  # so that there is no room left where the begins were
        bench.nesting.add(op_of(INSTANT, calls, at, G, NONE))
    bench.nesting.settle()
    assert flows(bench.taken())[:3] == [(-1, 0), (-2, -3), (0, 0)]


def test_a_flow_that_begins_where_another_does_is_its_second_one() -> None:
    bench, calls, system_calls, _ = layers()
    bench.add(calls, ("B", 1, {"launch": 7}))
    bench.add(system_calls, ("I", 2, {"name": IOCTL, "takes_flow": 1}))
    assert flows(bench.taken()) == [(-2, -1), (1, 0)]


def test_a_kernel_goes_on_where_its_launch_began() -> None:
    bench = Bench()
    calls, stream = bench.row(), bench.row(on_stream=True)
    bench.add(calls, ("X", 1, {"dur": 1, "launch": (1 << 64) - 1}))
    bench.add(
        stream,
        ("X", 5, {"dur": 1, "launch": (1 << 64) - 1}),
        ("I", 6, {"launch": 3}),
        ("B", 7, {"launch": 4}),
    )
    assert flows(bench.taken()) == [(-2, 0), (2, 0), (0, 0), (-4, 0)]


def test_a_kernel_before_its_call_is_reported_once() -> None:
    bench = Bench()
    calls, stream = bench.row(), bench.row(on_stream=True)
    bench.add(stream, ("B", 5, {"launch": 9, "bound": 2}), ("B", 6, {"launch": 8, "bound": 20}))
    bench.add(calls, *(("B", 10, {"launch": launch}) for launch in (9, 8, 9)))
    assert bench.nesting.early() == [Early(9, 5, 2, 10)]
    assert bench.nesting.early() == []
    assert bench.nesting.outcomes.causality == 1


def test_the_flow_of_warps_ends_at_a_kernel_if_there_is_one() -> None:
    nesting = new_nesting(IOCTL)
    assert flow(nesting, 1, 10, 0, COUNTED) == 0  # it holds the launch against its call
    assert flow(nesting, 2, 10, 0, STARTS) == -2
    assert flow(nesting, 2, 20, 0, STARTS) == 0
    assert flow(nesting, 3, 10, 0, DRAWN) == 0
    assert flow(nesting, 4, 10, 0, NO_LAUNCH) == 0
    bench = Bench()
    calls = bench.row()
    bench.add(calls, ("B", 5, {"launch": 4}))
    assert flow(bench.nesting, 4, 9, 0, DRAWN) == 2


def test_warps_find_their_flows_among_the_events_around_them() -> None:
    bench = Bench()
    calls, stream = bench.row(), bench.row(on_stream=True)
    bench.nesting.set_shape(0, ShapeRow(calls, F, "B", False, False, True))
    bench.nesting.set_shape(1, ShapeRow(stream, G, "X", False, True, True))
    launch, drawn, special = 0, 1, SPECIAL
    rows = [(1, special, 5), (2, launch, 5), (3, special, 5), (4, drawn, 6), (5, special, 6), (6, special, 5)]
    events = trace_of(event_columns([(ts, shape, NONE, 0, of, None, NONE) for ts, shape, of in rows]))
    warps = starts((0, 5, 1, 0, DRAWN), (2, 5, 3, 0, DRAWN), (4, 6, 5, 0, DRAWN))
    bench.nesting.events(events, 0, len(rows), warps)
    assert warps.flow.tolist() == [0, 2, 0]
    assert [op[0] for op in bench.taken()] == [BEGIN, BEGIN, END]


@pytest.mark.slow
def test_remembered_launches_are_bounded() -> None:
    bench = Bench()
    calls, stream = bench.row(), bench.row(on_stream=True)
    bench.add(calls, *(("I", launch) for launch in range(3)))
    rows = [(launch, 0, NONE, 0, launch, None, NONE) for launch in range(LAUNCHES_MAX + 2)]
    columns = event_columns(rows)
    bench.nesting.set_shape(0, ShapeRow(calls, F, "X", False, True, True))
    bench.nesting.events(trace_of(columns), 0, len(rows))
    bench.taken()
    after = len(rows) + 9
    bench.add(stream, *(("X", after, {"launch": launch, "dur": 0}) for launch in (2, len(rows) - 1, 0, 1)))
    known, newest, forgotten, also = (op[6] for op in bench.taken() if op[0] == BEGIN)
    # Flows are numbered 2, 4, …: those of launches that are remembered go on, others start anew.
    assert (known, newest) == (2 * 3, 2 * len(rows))
    assert (forgotten, also) == (-2 * (len(rows) + 1), -2 * (len(rows) + 2))


# Both -----------------------------------------------------------------------------------------------------

single = st.tuples(
    st.sampled_from("BBEEIX"),
    st.integers(0, 4),
    st.integers(0, 30),
    st.sampled_from([IOCTL, F, F, G]),
    st.none() | st.integers(0, 12),
    st.none() | st.sampled_from([0, 1, 2, (1 << 64) - 1]),
    st.booleans(),
    st.sampled_from([0, 0, 5]),
)
steps = st.one_of(
    st.lists(single, max_size=12),
    st.tuples(st.just("close"), st.integers(0, 4), st.integers(0, 40)),
    st.tuples(st.just("overlap"), st.integers(0, 4), st.integers(0, 30), st.integers(0, 12)),
    st.tuples(st.just("warps"), st.integers(0, 2), st.integers(0, 30), st.integers(NO_LAUNCH, STARTS)),
    st.tuples(st.just("one"), st.integers(0, 4), single),
    st.sampled_from(["settle", "take"]),
)


def outcome(plan: list[Any]) -> list[Any]:
    """Everything that a nesting says of a plan."""
    bench, *_ = layers()
    bench.row(on_stream=True), bench.row()
    nesting, messages = bench.nesting, []
    for step in plan:
        if isinstance(step, list):
            # Shapes of one batch have numbers of their own.
            for phase, row, ts_ns, name, dur, launch, takes_flow, bound in step:
                given = {"name": name, "takes_flow": int(takes_flow), "bound": bound}
                given |= {} if dur is None and phase != "X" else {"dur": dur or 0}
                bench.add(row, (phase, ts_ns, given | ({} if launch is None else {"launch": launch})))
        elif step == "settle":
            nesting.settle()
        elif step == "take":
            messages += bench.taken()
        elif step[0] == "close":
            nesting.close(*step[1:])
        elif step[0] == "overlap":
            _, row, ts_ns, dur = step
            messages.append(nesting.overlap_row(row, ts_ns, ts_ns + dur))
        elif step[0] == "warps":
            _, launch, ts_ns, done = step
            messages.append(flow(nesting, launch, ts_ns, 3, done))
        else:
            _, row, (phase, _, ts_ns, name, dur, *_) = step
            nesting.one(row, phase, ts_ns, dur, name, -7)
        messages += nesting.early()
    messages += bench.taken()
    return [*messages, nesting.outcomes, [nesting.base(row) for row in range(nesting.row_count)]]


# Few times, so that much happens at the same one, and ends with and without a duration.
crossing = st.tuples(
    st.integers(0, 8), st.sampled_from("BBEEIX"), st.none() | st.integers(0, 6), st.integers(0, 2)
)


@settings(max_examples=500)
@given(st.lists(crossing, max_size=40), st.integers(-1, 20))
def test_slices_never_cross(events: list[tuple[int, str, int | None, int]], horizon_ns: int) -> None:
    bench = Bench()
    row = bench.row()
    bench.nesting.set_horizon(horizon_ns)
    for ts_ns, phase, dur, name in sorted(events, key=lambda event: event[0]):
        bench.add(row, (phase, ts_ns, {"name": F + name} | ({} if dur is None else {"dur": dur})))
    bench.nesting.close(row, 50)
    ops = sorted((op for op in bench.taken() if op[0] != INSTANT), key=lambda op: op[2])
    ends_ns = {op[8]: op[2] for op in ops if op[0] == END}
    opened: dict[int, list[int]] = {}
    for kind, on, ts_ns, *_, span, _ in ops:
        around = opened.setdefault(on, [])
        if kind == BEGIN:
            around.append(span)
        else:
            inside = around[around.index(span) + 1 :]
            assert {ends_ns[one] for one in inside} <= {ts_ns}
            around.remove(span)


@given(st.lists(steps, max_size=25))
def test_both_nest_alike(core: str, plan: list[Any]) -> None:
    with running("pure"):
        want = outcome(plan)
    assert outcome(plan) == want
