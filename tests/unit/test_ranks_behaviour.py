"""Which ranks do the same work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracepipe.ranks.engine import Columns
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
