"""Which ranks do the same work, and what they did in the sections of a path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tracepipe.ranks.engine import Columns
from tracepipe.ranks.path import TRANSFERS, WORKS, Section, done_in
from tracepipe.ranks.stragglers import behaviours

Ran = dict[int, tuple[int, int]]
Met = list[tuple[int, str, int, int]]


def groups_of(ran: Ran, met: Met) -> list[int]:
    """Of ranks with their steps and kernels, and of rank, operation, group size and number of collectives."""
    counts = {rank: sum(count for one, *_, count in met if one == rank) for rank in ran}
    ranks = [(rank, *ran[rank], count) for rank, count in counts.items()]
    members = columns(("rank", "operation", "group_size", "collectives"), met)
    found: list[int] = behaviours(
        columns(("rank", "steps", "kernels", "collectives"), ranks), members
    ).tolist()
    return found


def columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Columns:
    """Rows as an engine returns them."""
    values = list(zip(*rows, strict=True)) or [()] * len(names)
    kinds = (object if of and isinstance(of[0], str) else np.int64 for of in values)
    return {name: np.array(of, kind) for name, of, kind in zip(names, values, kinds, strict=True)}


def test_stages_of_a_pipeline_are_groups_of_their_own() -> None:
    """The middle stages run as many kernels as each other; the first and the last have more."""
    kernels = [130, 130, 100, 101, 100, 100, 160, 160]
    ran = {rank: (10, 10 * count) for rank, count in enumerate(kernels)}
    met = [(rank, "all_reduce", 2, 40) for rank in ran]
    assert groups_of(ran, met) == [1, 1, 0, 0, 0, 0, 2, 2]


def test_ranks_that_run_other_operations_or_in_other_groups_are_apart() -> None:
    ran = dict.fromkeys(range(6), (10, 1_000))
    met = [(rank, "all_reduce", 4, 40) for rank in range(3)] + [
        (rank, "all_reduce", 2, 40) for rank in (3, 4)
    ]
    assert groups_of(ran, met) == [0, 0, 0, 1, 1, 2]


def test_ranks_that_lost_a_few_kernels_stay_in_their_group() -> None:
    ran = {0: (10, 1_000), 1: (10, 960), 2: (10, 1_000), 3: (10, 930)}
    assert groups_of(ran, [(rank, "all_reduce", 4, 40 - rank) for rank in ran]) == [0, 0, 0, 0]


def test_ranks_of_which_fewer_steps_were_recorded_stay_in_their_group() -> None:
    assert groups_of({0: (10, 1_000), 1: (3, 300)}, [(0, "barrier", 2, 20), (1, "barrier", 2, 6)]) == [0, 0]


def test_the_largest_group_is_first_and_of_equal_ones_that_of_the_lowest_rank() -> None:
    ran = {1: (1, 40), 2: (1, 10), 3: (1, 90), 4: (1, 90), 5: (1, 10)}
    assert groups_of(ran, []) == [2, 0, 1, 1, 0]
    assert groups_of({7: (0, 0)}, []) == [0]


Rows = list[tuple[str, int, int]]
WORK = Section(0, WORKS, 100, 200)


def frame(*rows: tuple[str, int, int]) -> Rows:
    return list(rows)


def listed(
    section: Section, kernels: Rows, ranges: Rows, copies: Rows | None = None
) -> list[tuple[str, str, int]]:
    work = [(*row, "compute") for row in kernels] + [(*row, "copies") for row in copies or ()]
    work.sort(key=lambda row: row[1])
    names = ("name", "start_ns", "end_ns")
    of_ranges = columns(names, sorted(ranges, key=lambda row: row[1]))
    found = done_in([section], columns((*names, "purpose"), work), of_ranges)
    return [(what, name, ns) for _, what, name, ns in found]


def test_each_ns_of_a_section_is_of_one_cause() -> None:
    """Kernels that overlap count once, and data loading is separated from other idle time."""
    kernels = frame(("a", 90, 130), ("b", 120, 140), ("a", 190, 260))
    loader = "enumerate(DataLoader)#next"
    found = listed(WORK, kernels, frame((loader, 150, 170), ("forward", 130, 195)))
    assert sorted(found) == [
        ("GPU idle", "forward", 30), ("computes", "a", 40), ("computes", "b", 10), ("loads data", loader, 20),
    ]  # fmt: skip
    assert sum(ns for *_, ns in found) == 100


def test_copies_are_no_idle_time_and_are_hidden_while_a_kernel_runs() -> None:
    """Of the copies, 60 ns are alone; data is loaded during one of them, and while the GPU idles."""
    kernels = frame(("a", 90, 120), ("b", 150, 160))
    copies = frame(("HtoD", 110, 140), ("DtoH", 130, 155), ("memset", 152, 158), ("HtoD", 170, 200))
    ranges = frame(("data loading", 160, 180), ("forward", 90, 210))
    assert sorted(listed(WORK, kernels, ranges, copies)) == [
        ("computes", "a", 20), ("computes", "b", 10), ("copies", "DtoH", 10), ("copies", "HtoD", 50),
        ("loads data", "data loading", 10),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["data loading", "Dataloader", "train: data_load", "enumerate(DataLoader)#next"]
)
def test_ranges_in_which_data_is_loaded(name: str) -> None:
    assert listed(WORK, frame(), frame((name, 100, 200))) == [("loads data", name, 100)]


@pytest.mark.parametrize("name", ["payload", "load weights", "data upload", "metadata loading_rules"])
def test_other_ranges_load_no_data(name: str) -> None:
    assert listed(WORK, frame(), frame((name, 100, 200))) == [("GPU idle", name, 100)]


def test_a_section_without_records_is_idle() -> None:
    assert listed(WORK, frame(), frame()) == [("GPU idle", "", 100)]


def test_idle_time_has_the_innermost_range_but_no_step() -> None:
    ranges = frame(("ProfilerStep#3", 0, 300), ("outer", 90, 210), ("inner", 95, 205), ("short", 150, 160))
    assert listed(WORK, frame(), ranges) == [("GPU idle", "inner", 100)]


def test_a_transfer_has_the_name_of_its_collective() -> None:
    section = Section(0, TRANSFERS, 100, 140, "all_reduce")
    assert listed(section, frame(("a", 100, 140)), frame()) == [("transfers", "all_reduce", 40)]
