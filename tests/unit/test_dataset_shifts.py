"""Collectives without numbers get the same one on all ranks, though recordings begin at different ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.support.here import build_here
from tests.support.simulated_job import SimulatedJob
from tracepipe.dataset.shifts import shift_of
from tracepipe.event.columns import Int64s

RANKS = 4


def ends(count: int, seed: int, steps_ns: float = 400_000) -> Int64s:
    """The ends of collectives, about as far apart as in steps that repeat."""
    rng = np.random.default_rng(seed)
    pattern = np.tile([5_000_000, 900_000, 3_000_000, 900_000], count)[:count]
    return np.cumsum(pattern + rng.normal(0, steps_ns, count)).astype(np.int64)


def seen(ends_ns: Int64s, seed: int, drift: float = 1e-5) -> Int64s:
    """The same ends on another clock, with what ranks leave apart."""
    rng = np.random.default_rng(seed)
    noise_ns = rng.normal(0, 3_000, len(ends_ns))
    return (7_000_000_000 + ends_ns * (1 + drift) + noise_ns).astype(np.int64)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("missing", [0, 1, 4, 37])
def test_a_rank_that_began_later_is_shifted_by_what_it_lacks(missing: int, seed: int) -> None:
    every = ends(400, seed)
    assert shift_of(seen(every, seed + 100)[missing:], every) == missing
    assert shift_of(every, seen(every, seed + 200)[missing:]) == -missing


def test_recordings_whose_shift_is_unclear_are_not_shifted() -> None:
    every = ends(300, 1)
    assert shift_of(seen(every, 2)[3:33], every) == 0, "few collectives"
    assert {shift_of(ends(300, seed), every) for seed in range(3, 103)} == {0}, "not the same collectives"
    even = np.arange(300) * 1_000_000
    assert shift_of(even[5:], even) == 0, "all intervals are alike"
    assert shift_of(np.zeros(0, np.int64), every) == 0


def written(folder: Path, begins: dict[int, int]) -> str:
    """A dataset of four ranks of two hosts with an all-reduce alone, of whose collectives none has a number.

    `begins`: rank → how many of its collectives are not in its recording.
    """
    job = SimulatedJob(2, 2, steps=60, kernels=4, rounds=1)
    job.write(folder / "runs")
    for rank in range(RANKS):
        file = folder / "runs" / job.host_of(rank) / f"{rank}.jsonl"
        kept, left_out = list[dict[str, Any]](), begins.get(rank, 0)
        for record in map(json.loads, file.read_text().splitlines()):
            args = record.pop("args", {})
            if args and args["Process Group Name"] != "all":
                continue
            if args:
                left_out -= 1
            if record["type"] != "footer" and not (args and left_out >= 0):
                kept.append(record)
        file.write_text("".join(json.dumps(record) + "\n" for record in kept))
    build_here(str(folder / "runs"), str(folder / "ds"))
    return str(folder / "ds")


def collectives(dataset: str) -> pl.DataFrame:
    return pl.read_parquet(f"{dataset}/layer=collectives/**/*.parquet", hive_partitioning=True)


def test_recordings_that_begin_at_different_collectives_are_compared(tmp_path: Path) -> None:
    dataset = written(tmp_path, {1: 3, 2: 11})
    found = collectives(dataset)
    assert dict(found.group_by("rank").agg(pl.col("nth").min()).iter_rows()) == {0: 0, 1: 3, 2: 11, 3: 0}
    assert found["nth"].max() == 59
    clocks = pl.read_parquet(f"{dataset}/layer=alignment/part-0.parquet")
    assert clocks["residual_ns"].max() < 20_000  # type: ignore[operator]
    assert clocks["bound_ns"].max() < 70_000  # type: ignore[operator]  # a transfer takes 60 us
    assert clocks["dropped"].sum() == 0


def test_numbers_are_kept_where_a_dataset_is_built_again(tmp_path: Path) -> None:
    dataset = written(tmp_path, {0: 5})
    before = collectives(dataset).sort("rank", "nth")
    assert before.group_by("rank").agg(pl.col("nth").min()).sort("rank")["nth"].to_list() == [5, 0, 0, 0]
    build_here(str(tmp_path / "runs"), dataset)
    assert collectives(dataset).sort("rank", "nth").equals(before)
