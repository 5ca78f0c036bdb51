"""The critical path across ranks, of steps made by hand."""

from __future__ import annotations

import duckdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.ranks.path import TRANSFERS, WORKS, Bounds, Section, critical_path
from tracepipe.ranks.queries import members_of

MEMBERS = """
create or replace table members (rank bigint, operation varchar, process_group varchar, is_numbered boolean,
    number bigint, step bigint, start_ns bigint, end_ns bigint, dur_ns bigint);
create or replace table steps as select 1 as step, unnest(?) as rank
"""
CONNECTION = duckdb.connect()
Met = tuple[int, str, int, int, int]


def path_of(ends: dict[int, int | None], *met: Met, start_ns: int = 0) -> list[Section]:
    """Of ranks that all begin at a time, and rows of collectives: rank, group, number, start, end."""
    bounds = {rank: Bounds(start_ns, end or 100, end) for rank, end in ends.items()}
    CONNECTION.execute(MEMBERS, [list(ends)])
    if met:
        rank, group, number, start, end = (np.array(column) for column in zip(*met, strict=True))
        given = {"rank": rank, "group": group.astype(object), "number": number, "start": start, "end": end}
        CONNECTION.register("given", given)
        CONNECTION.execute(
            """insert into members select rank, 'all_reduce', "group", true, number, 1, "start", "end",
            greatest("end" - "start", 0) from given"""
        )
    return critical_path(bounds, CONNECTION.execute(members_of(1)).fetchnumpy())


def listed(sections: list[Section]) -> list[tuple[int, str, int, int]]:
    return [(one.rank, one.what, one.start_ns, one.end_ns) for one in sections]


def test_the_path_leads_to_the_rank_that_came_last_in_the_middle() -> None:
    """Rank 0 ends last; to the collective rank 1 came last."""
    found = path_of({0: 100, 1: 90}, (0, "g", 0, 20, 60), (1, "g", 0, 50, 60))
    assert listed(found) == [(1, WORKS, 0, 50), (1, TRANSFERS, 50, 60), (0, WORKS, 60, 100)]
    assert [one.collective for one in found] == ["", "all_reduce", ""]


def test_the_path_continues_from_collective_to_collective() -> None:
    found = path_of(
        {0: 100, 1: 100, 2: 90},
        (0, "a", 0, 30, 40), (1, "a", 0, 10, 40),
        (1, "b", 0, 70, 80), (2, "b", 0, 45, 80),
    )  # fmt: skip
    assert listed(found)[-1] == (0, WORKS, 40, 100)
    found = path_of(
        {0: 95, 1: 95, 2: 100},
        (0, "a", 0, 30, 40), (1, "a", 0, 10, 40),
        (1, "b", 0, 70, 80), (2, "b", 0, 45, 80),
    )  # fmt: skip
    assert listed(found) == [
        (0, WORKS, 0, 30), (0, TRANSFERS, 30, 40), (1, WORKS, 40, 70), (1, TRANSFERS, 70, 80),
        (2, WORKS, 80, 100),
    ]  # fmt: skip


def test_collectives_of_two_streams_that_overlap_are_followed_by_their_ends() -> None:
    """What runs when the last one is entered does not hold it up."""
    found = path_of({0: 100}, (0, "a", 0, 10, 50), (0, "b", 0, 40, 80), (0, "c", 0, 5, 20))
    assert listed(found) == [
        (0, WORKS, 0, 5), (0, TRANSFERS, 5, 20), (0, WORKS, 20, 40), (0, TRANSFERS, 40, 80),
        (0, WORKS, 80, 100),
    ]  # fmt: skip


def test_a_rank_without_collectives_works_all_the_step() -> None:
    found = path_of({0: 90, 1: 100}, (0, "g", 0, 20, 60))
    assert listed(found) == [(1, WORKS, 0, 100)]
    assert listed(path_of({0: 100})) == [(0, WORKS, 0, 100)]
    assert path_of({}) == []


def test_the_path_takes_the_lowest_rank_among_equal_ones() -> None:
    found = path_of({2: 100, 1: 100}, (1, "g", 0, 50, 60), (2, "g", 0, 50, 60))
    assert listed(found) == [(1, WORKS, 0, 50), (1, TRANSFERS, 50, 60), (1, WORKS, 60, 100)]


def test_a_clock_that_is_not_placed_does_not_end_last() -> None:
    assert listed(path_of({0: 90, 1: None})) == [(0, WORKS, 0, 90)]
    assert listed(path_of({0: None, 1: None})) == [(0, WORKS, 0, 100)]


def test_two_kernels_of_one_rank_are_two_collectives() -> None:
    """As of a rank whose counter began anew. The first was the shorter, which is not a reason to go there."""
    found = path_of({0: 200}, (0, "g", 0, 10, 20), (0, "g", 0, 100, 140))
    assert listed(found) == [
        (0, WORKS, 0, 10), (0, TRANSFERS, 10, 20), (0, WORKS, 20, 100), (0, TRANSFERS, 100, 140),
        (0, WORKS, 140, 200),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_collectives_without_length_at_one_time_are_not_looked_for_over_and_over() -> None:
    """None that was seen is passed again: so often would take minutes."""
    count = 50_000
    found = path_of({0: 60, 1: 60}, *((rank, "g", n, 50, 50) for n in range(count) for rank in (0, 1)))
    assert len(found) == count + 2


TIMES = st.integers(-50, 150)
ROWS = st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.integers(0, 2), TIMES, TIMES)


@given(st.lists(ROWS, max_size=40), st.dictionaries(st.integers(0, 3), st.integers(1, 120), min_size=1))
def test_whatever_the_times_say_it_ends(met: list[Met], ends: dict[int, int | None]) -> None:
    found = path_of(ends, *met)
    assert sum(one.what == TRANSFERS for one in found) <= len(met)
    for one in found:
        assert one.rank in ends
        assert one.start_ns <= one.end_ns
