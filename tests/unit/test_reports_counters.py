"""Means of what GPUs' hardware counted while kernels ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import Load, loader
from tracepipe.analyses.kernel_counters import kernel_counters
from tracepipe.event.counters import DRAM_READ, DRAM_READ_SHARE, GPU_COUNTERS, SM_CLOCK, TENSOR_ACTIVE
from tracepipe.reports.summary import Options, run

INTERVAL_NS = 100


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def sample(number: int, gpu: int = 0, **args: Any) -> dict[str, Any]:
    names = {"tensor": TENSOR_ACTIVE, "read": DRAM_READ, "share": DRAM_READ_SHARE, "clock": SM_CLOCK}
    return {
        "ts_ns": number * INTERVAL_NS, "type": "hook", "layer": GPU_COUNTERS, "name": GPU_COUNTERS,
        "phase": "C", "dur_ns": INTERVAL_NS, "gpu": gpu, "args": {names[key]: args[key] for key in args},
    }  # fmt: skip


def kernel(start_ns: int, end_ns: int, name: str, gpu: int = 0) -> dict[str, Any]:
    return {
        "ts_ns": start_ns, "type": "gpu_kernel", "name": name, "phase": "X", "dur_ns": end_ns - start_ns,
        "gpu": gpu, "stream": 7, "pid": 5,
    }  # fmt: skip


def means(load: Load, *events: dict[str, Any], top: int = 10) -> dict[str, dict[str, Any]]:
    """By kernel what is known of it."""
    table, _ = kernel_counters(load(*sorted(events, key=lambda one: one["ts_ns"])), top)
    keys = [column.key for column in table.columns]
    rows = [dict(zip(keys, row, strict=True)) for row in table.rows]
    return {row["name"]: {key: value for key, value in row.items() if value is not None} for row in rows}


def test_a_mean_is_of_the_samples_that_lie_in_the_launches(load: Load) -> None:
    samples = [
        sample(number, tensor=number, read=number / 4, share=2 * number, clock=1700) for number in range(20)
    ]
    found = means(
        load, *samples, kernel(150, 551, "gemm"), kernel(1000, 1300, "gemm"), kernel(560, 780, "copy")
    )
    # Samples 2, 3, 4 and 10, 11, 12 lie in the two launches, and 6 in the third.
    assert found["gemm"] == {
        "name": "gemm", "launches": 2, "samples": 6, "tensor_active_percent": 7.0,
        "dram_read_bytes_per_s": 7e9 / 4, "dram_read_percent": 14.0, "sm_clock_mhz": 1700.0,
    }  # fmt: skip
    assert (found["copy"]["samples"], found["copy"]["tensor_active_percent"]) == (1, 6.0)


def test_launches_of_two_samples_or_less_are_left_out(load: Load) -> None:
    samples = [sample(number, tensor=1) for number in range(10)]
    assert means(load, *samples, kernel(100, 300, "short"), kernel(400, 601, "long")).keys() == {"long"}


def test_each_gpu_has_its_own_samples(load: Load) -> None:
    samples = [sample(number, gpu, tensor=10 * gpu) for number in range(10) for gpu in (0, 1)]
    found = means(
        load, *samples, kernel(100, 500, "a"), kernel(100, 500, "b", gpu=1), kernel(100, 500, "c", gpu=2)
    )
    assert {name: row["tensor_active_percent"] for name, row in found.items()} == {"a": 0.0, "b": 10.0}


def test_values_that_are_missing_are_not_zeros(load: Load) -> None:
    samples = [sample(1, tensor=50), sample(2), sample(3, tensor=1e300), sample(4, tensor="many")]
    found = means(load, *samples, kernel(100, 500, "a"))
    assert found["a"] == {"name": "a", "launches": 1, "samples": 4, "tensor_active_percent": 50.0}


def test_samples_may_stand_in_any_order_and_be_missing(load: Load) -> None:
    samples = [sample(number, tensor=number) for number in (7, 2, 9, 1)]
    table, _ = kernel_counters(load(*samples, kernel(100, 1000, "a")), 10)
    assert next(iter(table.rows))[2:5] == (4, None, 4.75)


def test_the_kernels_that_were_sampled_most_are_shown(load: Load) -> None:
    samples = [sample(number, tensor=1) for number in range(20)]
    kernels = [kernel(0, 400, "a"), kernel(500, 1500, "b")]
    assert list(means(load, *samples, *kernels)) == ["b", "a"]
    table, left_out = kernel_counters(load(*samples, *kernels), 1)
    assert (len(table.rows), left_out) == (1, 1)


def test_a_summary_without_samples_does_not_mention_them(load: Load) -> None:
    assert "counters" not in run(load(kernel(0, 1000, "a")), Options(all=True)).as_json()
    with_samples = [sample(number, tensor=1) for number in range(5)]
    assert "counters" in run(load(*with_samples, kernel(0, 500, "a")), Options(all=True)).as_json()
