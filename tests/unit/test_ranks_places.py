"""Where in their programs ranks differ: planted places are found, noise is not, and other calls excuse."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from tracepipe.analyses.gpu_work import COMPUTE
from tracepipe.dataset.places import Dataset
from tracepipe.ranks.engine import Columns
from tracepipe.ranks.places import Places
from tracepipe.ranks.stragglers import (
    MORE_CALLS,
    SEQUENCE,
    Straggler,
    once_each,
    slower_places,
    slower_ranks,
)

STEP_NS = 30_000_000
COLUMNS = "what", "step", "from_ns", "call_ns", "start_ns", "end_ns", "key", "nth", "loading_ns", "name"
Row = tuple[int, int, int, int]
"""A key, its nth, the ns of the host before it, and those of its kernel."""


def dataset_of(folder: Path, steps: list[list[list[Row]]]) -> Dataset:
    """A dataset of the rows of each step of each rank."""
    for rank, own in enumerate(steps):
        place = folder / "layer=program" / "host=node0" / f"rank={rank}"
        place.mkdir(parents=True)
        at_ns, rows = 0, []
        for step, some in enumerate(own):
            for key, nth, host_ns, kernel_ns in some:
                call_ns = at_ns + host_ns
                name = f"void kernel_{key}<float>(float*)"
                rows.append((COMPUTE, step, at_ns, call_ns, call_ns, call_ns + kernel_ns, key, nth, 0, name))
                at_ns = call_ns
        table = dict(zip(COLUMNS, map(np.array, zip(*rows, strict=True)), strict=True))
        table["name"] = table["name"].astype(object)
        with duckdb.connect() as connection:
            connection.register("made", table)
            connection.execute(f"copy (select * from made) to '{place / 'part-0.parquet'}'")
    return Dataset(folder)


def ranks_of(steps: list[list[list[Row]]], behaviour: int = 0) -> Columns:
    """The columns of `queries.RANKS` that are compared, with a GPU that works for nothing."""
    host_ns = [[sum(row[2] for row in step) for step in own] for own in steps]
    found: dict[str, Any] = {
        "rank": np.arange(len(steps)),
        "behaviour": np.full(len(steps), behaviour),
        "steps": np.array([len(own) for own in steps]),
        "step_ns": np.array([STEP_NS * len(own) for own in steps]),
    }
    for name in ("compute", "copies", "loading", "host"):
        ns = [np.array(own) if name == "host" else np.zeros(len(own), np.int64) for own in host_ns]
        found[f"{name}_ns"] = np.array([own.sum() for own in ns])
        found[f"{name}_us"] = np.array([(own // 1_000).sum() for own in ns])
        found[f"{name}_us2"] = np.array([((own // 1_000) ** 2).sum() for own in ns]).astype(float)
    return found


def noisy(seed: int, ranks: int, steps: int, noise: float, places: int = 20) -> list[list[list[Row]]]:
    """Calls that take a thirtieth of a step each; a hundredth of the gaps takes ten times as long."""
    rng = np.random.default_rng(seed)
    shape = (ranks, steps, places)
    ns = 1e6 * rng.lognormal(0, noise, shape) * np.where(rng.random(shape) < 0.01, 10, 1)
    return [
        [[(key, 0, int(of_key), 500) for key, of_key in enumerate(of_step)] for of_step in own] for own in ns
    ]


def table_of(steps: list[list[list[Row]]]) -> Columns:
    """`Places.table` without a dataset: all places of all ranks, by arithmetic."""
    found = defaultdict(list)
    for key, nth in sorted({row[:2] for row in steps[0][0]}):
        for rank, own in enumerate(steps):
            ns = [row[2] for step in own for row in step if row[:2] == (key, nth)]
            us = [one // 1_000 for one in ns]
            values = (0, key, nth, rank, sum(ns), sum(us), float(sum(one * one for one in us)))
            for name, value in zip(
                ("sequence", "key", "nth", "rank", "ns", "us", "us2"), values, strict=True
            ):
                found[name].append(value)
    return {name: np.array(values) for name, values in found.items()}


def found_in(steps: list[list[list[Row]]]) -> list[Straggler]:
    return [one.straggler for one in slower_places(ranks_of(steps), table_of(steps))]


@pytest.mark.parametrize("steps", [2, 3, 10, 60])
@pytest.mark.parametrize(("ranks", "jobs"), [(2, 40), (3, 20), (8, 8), (200, 1)])
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3, 1.0])
def test_noise_alone_makes_no_place_slow(ranks: int, jobs: int, steps: int, noise: float) -> None:
    """Of 1,104 jobs in all, in each of which the ranks are compared at 20 places."""
    assert [seed for seed in range(jobs) if found_in(noisy(seed, ranks, steps, noise))] == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("steps", [10, 60])
def test_a_place_is_found_that_the_sum_of_all_hides(ranks: int, steps: int) -> None:
    """Sums of these 20 places differ by 3 ms and more from step to step."""
    job = noisy(1, ranks, steps, 0.3)
    for step in job[1]:
        key, nth, ns, kernel_ns = step[7]
        step[7] = key, nth, ns + 4_000_000, kernel_ns
    (one,) = found_in(job)
    assert (one.ranks, one.slow, one.places, one.peers) == ((1,), "host", frozenset({(7, 0)}), ranks)
    means_ns = sorted(np.mean([step[7][2] for step in own]) for own in job)
    assert one.excess_ns == pytest.approx(means_ns[-1] - means_ns[(ranks - 1) // 2], abs=2)


def test_several_places_are_one_slow_host() -> None:
    job = noisy(2, 4, 20, 0.01)
    for step in job[2]:
        for at in (3, 9):
            key, nth, ns, kernel_ns = step[at]
            step[at] = key, nth, ns + 2_000_000, kernel_ns
    (one,) = found_in(job)
    assert (one.ranks, one.places) == ((2,), frozenset({(3, 0), (9, 0)}))
    assert one.excess_ns == pytest.approx(4_000_000, rel=0.15)


def test_a_host_is_slow_once_by_its_places_or_as_a_whole() -> None:
    def slow(rank: int, excess_ns: int, costs_ns: int | None, at: int = 0, what: str = "host") -> Straggler:
        places = frozenset({(at, 0)} if at else ())
        return Straggler((rank,), what, excess_ns, 0, 2, costs_ns, places=places)

    gpu, whole, place = slow(1, 9, 9, what="GPU"), slow(1, 10, 8), slow(1, 6, 6, at=3)
    assert [*once_each([gpu, whole, place])] == [gpu, place]
    small, cheap, other = slow(1, 4, 8, at=3), slow(1, 9, 5, at=3), slow(2, 4, 4, at=3)
    assert [*once_each([gpu, whole, small, other])] == [gpu, whole, other]
    # What a GPU hides costs nothing: the rest of the program is critical.
    assert [*once_each([gpu, whole, cheap])] == [gpu, whole]
    assert [*once_each([whole])] == [whole]


def test_with_one_step_no_place_is_slow() -> None:
    assert not [seed for seed in range(3) if found_in(noisy(seed, 64, 1, 0.3))]


def test_places_of_a_dataset_are_those_of_arithmetic(tmp_path: Path) -> None:
    job = noisy(3, 3, 5, 0.3, places=6)
    places = Places(dataset_of(tmp_path, job), ranks_of(job))
    expected = table_of(job)
    assert {name: column.tolist() for name, column in places.table.items()} == {
        name: column.tolist() for name, column in expected.items()
    }
    # Each makes the same calls; what is left is the rounding of each kind.
    assert max(map(abs, places.more_ns.values())) <= 7


def test_only_ranks_with_the_same_places_are_compared_at_them(tmp_path: Path) -> None:
    """The stages of a pipeline make about as many calls, in another order."""
    calls = [(1, 0, 3_000_000, 500), (2, 0, 1_000_000, 500)]
    turned = [(1, 1, 3_000_000, 500), (2, 0, 1_000_000, 500)]
    places = Places(dataset_of(tmp_path, [[calls] * 4, [turned] * 4]), ranks_of([[calls] * 4, [turned] * 4]))
    assert len(places.table["rank"]) == 0


def test_ranks_with_nearly_the_same_calls_have_one_sequence_and_stages_do_not(tmp_path: Path) -> None:
    """Rank 1 has one call more than rank 0, ranks 2 and 3 are another stage, and rank 4 a third one."""
    usual = [(key, 0, 1_000, 500) for key in range(60)]
    more, other, third = [*usual, (99, 0, 1_000, 500)], usual[:30], usual[30:]
    job = [[own] * 3 for own in (usual, more, other, other, third)]
    ranks = ranks_of(job)
    sequence = Places(dataset_of(tmp_path, job), ranks).sequence
    assert [sequence[rank] == sequence[0] for rank in range(5)] == [True, True, False, False, False]
    assert sequence[2] == sequence[3] != sequence[4]
    # Where nothing can be replayed, a host is compared with those of its sequence alone.
    for rank, host_ns in enumerate((9_000_000, 3_000_000, 3_000_000, 9_000_000, 60_000_000)):
        of_job = [host_ns, host_ns * host_ns // 10**6]
        ranks["host_ns"][rank], ranks["host_us"][rank] = 3 * host_ns, 3 * host_ns // 1_000
        ranks["host_us2"][rank] = 3 * of_job[1]
    ranks[SEQUENCE] = np.array([sequence[rank] for rank in range(5)])
    assert [one.straggler.ranks for one in slower_ranks(ranks)] == [(0,), (3,)]


def test_calls_that_only_one_rank_makes_take_what_such_calls_take(tmp_path: Path) -> None:
    """It makes one more of a kind that its peers make too (2 ms there), and two of one that is its own: each
    as long as any call of its peers, of 1.25 ms in the mean.
    """
    usual = [(1, 0, 2_000_000, 500), (2, 0, 1_000_000, 500), (2, 1, 1_000_000, 500), (2, 2, 1_000_000, 500)]
    more = [*usual, (1, 1, 2_500_000, 500), (3, 0, 9_000_000, 500), (3, 1, 1_000_000, 500)]
    job = [[usual] * 4, [usual] * 4, [more] * 4]
    places, ranks = Places(dataset_of(tmp_path, job), ranks_of(job)), ranks_of(job)
    assert places.more_ns[2] == 4 * (2_000_000 + 2 * 1_250_000)
    assert min(places.more_ns[0], places.more_ns[1]) < 0
    ranks[MORE_CALLS] = np.array([places.more_ns[rank] for rank in range(3)])
    (one,) = (suspect.straggler for suspect in slower_ranks(ranks))
    assert (one.ranks, one.own_ns, one.usual_ns) == ((2,), 17_500_000, 5_000_000 + 4_500_000)
    assert places.call(2, 0, one.excess_ns, "node0", ()) == "before kernel_3"
    ranks[MORE_CALLS] = np.array([0, 0, 4 * 12_000_000])
    assert not [*slower_ranks(ranks)]


def test_where_a_gpu_is_slow_is_the_kernel_that_takes_longer(tmp_path: Path) -> None:
    usual = [(key, 0, 1_000, 5_000) for key in range(4)]
    slow = [*usual[:3], (3, 0, 1_000, 9_000)]
    everywhere = [(key, 0, 1_000, 6_000) for key in range(4)]
    job = [[usual] * 3, [slow] * 3, [everywhere] * 3, [[*usual, (9, 0, 0, 4_000)]] * 3]
    places = Places(dataset_of(tmp_path, job), ranks_of(job))
    assert [places.kernel(rank, 0, 4_000) for rank in (1, 2, 3)] == ["in kernel_3", "", "in kernel_9"]
    # The program takes no longer anywhere.
    assert places.call(1, 0, 4_000, "node0", ()) == ""


def test_the_line_is_that_of_the_place_that_was_found(tmp_path: Path) -> None:
    """Rank 1 sleeps before kernel 1 in each step, and once, for longer in all, before kernel 2. Each rank has
    a long kernel with a name of its own.
    """

    def step(rank: int, *gaps_ns: int) -> list[Row]:
        calls = [(key, 0, 10_000 + gap_ns, 500) for key, gap_ns in enumerate(gaps_ns)]
        return [*calls, (90 + rank, 0, 3_000_000, 9_000)]

    job = [
        [step(0, 0, 0, 0)] * 10,
        [step(1, 0, 1_500_000, 60_000_000 if number == 4 else 0) for number in range(10)],
    ]
    dataset = dataset_of(tmp_path, job)
    places = Places(dataset, ranks_of(job))
    assert places.call(1, 0, 1_500_000, "node0", frozenset({(1, 0)})) == "before kernel_1"
    assert places.call(1, 0, 7_500_000, "node0", ()) == "before kernel_2"
    # The kernels with other names are as long as each other.
    assert places.kernel(1, 0, 4_000) == ""
    # The line is that of the call after the longest of the gaps.
    call_ns = 10_000 + 10_000 + 1_500_000
    part = dataset.part("calls", "node0", 1)
    part.parent.mkdir(parents=True)
    with duckdb.connect() as connection:
        connection.execute(
            f"""copy (select {call_ns} as start_ns, 'train.py:7 step' as python) to '{part}'"""
        )
    assert places.call(1, 0, 1_500_000, "node0", frozenset({(1, 0)})) == "before kernel_1 (train.py:7 step)"
    part.write_bytes(b"PAR1")
    assert places.call(1, 0, 1_500_000, "node0", frozenset({(1, 0)})) == "before kernel_1"
