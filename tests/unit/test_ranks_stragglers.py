"""Slow ranks among ranks that do the same work, and slow links: what is planted is found, noise is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tracepipe.ranks.engine import Columns
from tracepipe.ranks.stragglers import (
    LINK,
    Straggler,
    Suspect,
    longest_unjudged,
    slow_links,
    slower_ranks,
    stragglers,
)

USUAL_NS = {"compute_ns": 12e6, "loading_ns": 3e5, "host_ns": 1e6, "copies_ns": 2e5}


def noisy(seed: int, ranks: int, steps: int, noise: float) -> dict[str, NDArray[np.float64]]:
    """The times of each step of each rank, of shape `(ranks, steps)`."""
    rng = np.random.default_rng(seed)
    return {name: ns * rng.lognormal(0, noise, (ranks, steps)) for name, ns in USUAL_NS.items()}


def found_in(times: dict[str, NDArray[np.float64]], behaviours: Iterable[int] = ()) -> list[Straggler]:
    return list(stragglers(slower_ranks(rows_of(times, behaviours)), costs))


def costs(suspects: Sequence[Suspect]) -> list[NDArray[np.int64]]:
    """Each step would be shorter by some ms without the slowness of any rank."""
    assert not any(one.straggler.ranks[0] in one.peers for one in suspects)
    return [np.array([3_000_000, 1_000_000, 2_000_000]) for _ in suspects]


def rows_of(times: dict[str, NDArray[np.float64]], behaviours: Iterable[int] = ()) -> Columns:
    whole = {name: ns.astype(np.int64) for name, ns in times.items()}
    count, steps = whole["compute_ns"].shape
    columns: dict[str, Any] = {
        "rank": np.arange(count),
        "behaviour": np.array(list(behaviours) or [0] * count),
        "steps": np.full(count, steps),
        "step_ns": sum(ns.sum(1) for ns in whole.values()),
    }
    for name, ns in whole.items():
        us, of = ns // 1_000, name.removesuffix("_ns")
        columns |= {name: ns.sum(1), f"{of}_us": us.sum(1), f"{of}_us2": (us**2).sum(1)}
    return columns


@pytest.mark.parametrize("steps", [2, 3, 10, 60])
@pytest.mark.parametrize(("ranks", "jobs"), [(2, 100), (3, 100), (8, 100), (1_000, 2)])
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
def test_noise_alone_makes_no_rank_slow(ranks: int, jobs: int, steps: int, noise: float) -> None:
    """Of 3,624 jobs in all, in each of which four times of each rank are compared."""
    alarms = [seed for seed in range(jobs) if found_in(noisy(seed, ranks, steps, noise))]
    assert alarms == []


@pytest.mark.parametrize(("ranks", "jobs"), [(2, 100), (31, 100), (32, 200), (64, 200), (1_000, 4)])
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
def test_noise_of_one_step_makes_no_rank_slow(ranks: int, jobs: int, noise: float) -> None:
    """Of 1,212 jobs that are judged, and others that are not."""
    alarms = [seed for seed in range(jobs) if found_in(noisy(seed, ranks, 1, noise))]
    assert alarms == []


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [(32, 1), (1_000, 1), *((ranks, steps) for ranks in (2, 3, 8, 1_000) for steps in (3, 10))],
)
def test_a_rank_that_is_slow_is_found_among_any_number(ranks: int, steps: int) -> None:
    times = noisy(1, ranks, steps, 0.01)
    times["compute_ns"][ranks - 1] *= 1.4
    (one,) = found_in(times)
    assert (one.ranks, one.slow, one.peers, one.costs_ns) == ((ranks - 1,), "GPU", ranks, 2_000_000)
    assert one.bounds_ns == (1_000_000, 3_000_000)
    assert one.own_ns / one.usual_ns == pytest.approx(1.4, rel=0.03)
    assert one.excess_ns == one.own_ns - one.usual_ns


def test_a_rank_that_costs_nothing_is_not_slow() -> None:
    times = noisy(1, 4, 10, 0.01)
    times["host_ns"][3] += 9e6
    assert [one.slow for one in found_in(times)] == ["host"]
    suspects = [*slower_ranks(rows_of(times))]
    assert not list(stragglers(suspects, lambda some: [np.full(10, 50_000)] * len(some)))
    # Without a replay it is not known.
    (one,) = stragglers(suspects, lambda some: [np.zeros(0, np.int64)] * len(some))
    assert (one.slow, one.costs_ns, one.bounds_ns) == ("host", None, None)


@pytest.mark.parametrize("ranks", [2, 3, 8, 31])
def test_a_single_step_has_its_longest_time_stated_and_no_slow_rank(ranks: int) -> None:
    times = noisy(1, ranks, 1, 0.01)
    times["compute_ns"][ranks - 1] *= 1.4
    assert found_in(times) == []
    longest = longest_unjudged(rows_of(times))
    assert longest is not None
    assert (longest.ranks, longest.slow, longest.peers) == ((ranks - 1,), "GPU", ranks)
    assert longest.own_ns / longest.usual_ns == pytest.approx(1.4, rel=0.03)
    # Two steps, or a difference that is not worth a look.
    assert longest_unjudged(rows_of({name: np.repeat(ns, 2, 1) for name, ns in times.items()})) is None
    assert longest_unjudged(rows_of(noisy(1, ranks, 1, 0.002))) is None


def test_a_rank_that_was_slow_in_one_step_of_ten_is_not_called_slow() -> None:
    times = noisy(1, 8, 10, 0.01)
    times["compute_ns"][3, 5] *= 5
    assert found_in(times) == []


def test_two_ranks_are_slow_at_different_things() -> None:
    times = noisy(1, 8, 10, 0.02)
    times["loading_ns"][2] += 9e6
    times["host_ns"][5] += 3e6
    assert {(one.ranks, one.slow) for one in found_in(times)} == {((2,), "data loading"), ((5,), "host")}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_host_is_not_slow_where_less_of_it_is_hidden(ranks: int) -> None:
    """Rank 0's GPU computes for 4 ms longer, behind which its program launches."""
    times = noisy(1, ranks, 10, 0.01)
    times["compute_ns"][0] += 4e6
    times["host_ns"][1:] += 3e6
    assert [(one.ranks, one.slow) for one in found_in(times)] == [((0,), "GPU")]


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_host_that_takes_longer_than_others_compute_is_slow(ranks: int) -> None:
    times = noisy(1, ranks, 10, 0.01)
    times["compute_ns"][0] += 4e6
    times["host_ns"][1] += 8e6
    assert [(one.ranks, one.slow) for one in found_in(times)] == [((0,), "GPU"), ((1,), "host")]


def test_ranks_that_do_other_work_are_not_compared() -> None:
    times = noisy(1, 8, 10, 0.01)
    times["compute_ns"][4:] *= 2
    assert found_in(times, [0] * 4 + [1] * 4) == []
    assert {one.ranks for one in found_in(times, [0] * 7 + [1])} == {(4,), (5,), (6,)}
    assert found_in(noisy(1, 1, 10, 0.1)) == []


def links(
    usual_ns: dict[str, int], members: dict[str, tuple[int, ...]], counts: dict[str, int] | None = None
) -> list[Straggler]:
    """Of groups that ran ten all-gathers each, or so many: their usual transfers, and their ranks."""
    count, of = len(usual_ns), [(group, rank) for group, ranks in members.items() for rank in ranks]
    groups = {
        "operation": np.full(count, "all_gather"), "process_group": np.array([*usual_ns], object),
        "group_size": np.full(count, 4), "elements": np.zeros(count),
        "collectives": np.array([(counts or {}).get(group, 10) for group in usual_ns]),
        "usual_ns": np.array([*usual_ns.values()]),
    }  # fmt: skip
    own = {
        "operation": np.full(len(of), "all_gather"), "process_group": np.array([group for group, _ in of]),
        "rank": np.array([rank for _, rank in of]),
    }  # fmt: skip
    return list(
        stragglers(
            slow_links(groups, own),
            lambda some: [np.array([round(300 * min(one.faster.values()))]) for one in some],
        )
    )


# Four by four ranks: groups of rows and of columns.
GRID = {f"row{row}": tuple(range(4 * row, 4 * row + 4)) for row in range(4)} | {
    f"column{column}": tuple(range(column, 16, 4)) for column in range(4)
}


def grid(*slow: str) -> dict[str, int]:
    return {group: 3_000 if group in slow else 1_000 for group in GRID}


def test_a_slow_link_is_of_the_rank_that_is_in_all_slow_groups() -> None:
    (one,) = links(grid("row1", "column2"), GRID)
    assert (one.ranks, one.slow, one.own_ns, one.usual_ns) == ((6,), LINK, 3_000, 1_000)
    assert one.costs_ns == 100  # a third of each transfer remains
    assert one.peers == 8


def test_two_slow_links_are_named_with_all_possible_pairs() -> None:
    """Ranks 1 and 14: groups of rows 0 and 3, columns 1 and 2. Ranks 2 and 13 would slow the same ones."""
    (one,) = links(grid("row0", "row3", "column1", "column2"), GRID)
    assert one.ranks == (1, 2, 13, 14)


def test_two_slow_links_of_one_row_are_distinguished_from_the_rest() -> None:
    (one,) = links(grid("row0", "column1", "column2"), GRID)
    assert one.ranks == (1, 2)


def test_a_slow_group_whose_ranks_are_in_fast_ones_has_no_slow_link() -> None:
    assert links(grid("row0"), GRID) == []


def test_what_a_group_transferred_once_at_its_start_does_not_clear_a_link() -> None:
    """Rank 6 is also in a group that is as fast as one like it, with a hundredth of the transfers."""
    members = GRID | {"start0": (6, 7), "start1": (8, 9)}
    counts = dict.fromkeys(GRID, 1_000) | {"start0": 1, "start1": 1}
    (one,) = links(grid("row1", "column2") | {"start0": 1_000, "start1": 1_000}, members, counts)
    assert one.ranks == (6,)
    assert links(grid("row1", "column2") | {"start0": 1_000, "start1": 1_000}, members) == []


def test_a_group_without_others_like_it_is_not_judged() -> None:
    assert links({"all": 9_000}, {"all": (0, 1, 2)}) == []
    assert links({}, {}) == []


def test_ranks_in_one_slow_group_alone_cannot_be_distinguished() -> None:
    members = {group: ranks for group, ranks in GRID.items() if group.startswith("row")}
    (one,) = links({"row0": 1_000, "row1": 1_000, "row2": 3_000, "row3": 1_000}, members)
    assert one.ranks == (8, 9, 10, 11)


def test_ranks_that_are_not_recorded_blame_no_other() -> None:
    """Of column 2 two ranks are lost, and of column 3 all: the slow link is still that of rank 6."""
    members = GRID | {"column2": (2, 6)}
    del members["column3"]
    shortest = {group: ns for group, ns in grid("row1", "column2").items() if group in members}
    assert [one.ranks for one in links(shortest, members)] == [(6,)]
