"""The C of the SM clocks finds what the Python finds, to the last bit, whatever was read."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.support.warp_readings import Batch, LikelyGpu, hostile_batches, read
from tracepipe.clocks import sm_clock
from tracepipe.clocks import sm_clock as native
from tracepipe.clocks.sm_clock import WarpReadings
from tracepipe.native import library as loaded


@pytest.fixture
def library() -> ctypes.CDLL:
    core = loaded()
    if core is None:
        pytest.skip("there is no compiled core")
    return core


def found_by_both(library: ctypes.CDLL, batches: list[Batch]) -> int:
    """How many of a GPU's batches both make finer, and the same."""
    reference, in_c, finer = sm_clock.SmClocks(), native.NativeSmClocks(library), 0
    for batch in batches:
        before = [None if column is None else column.copy() for column in batch[1:]]
        expected, found = reference.refine(*read(batch)), in_c.refine(*read(batch))
        for column, was in zip(batch[1:], before, strict=True):
            assert column is None or was is None or np.array_equal(column, was)
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert all(map(np.array_equal, expected, found))
            finer += 1
    return finer


@pytest.mark.slow
def test_both_find_the_same_in_what_gpus_read(library: ctypes.CDLL) -> None:
    batches = [LikelyGpu(seed).batches() for seed in range(150)]
    finer = sum(found_by_both(library, some) for some in batches)
    assert finer > sum(map(len, batches)) // 3


@pytest.mark.slow
def test_both_find_the_same_in_what_no_gpu_reads(library: ctypes.CDLL) -> None:
    batches = [hostile_batches(seed) for seed in range(600)]
    assert sum(found_by_both(library, some) for some in batches) > 20


def test_every_sm_and_slot_has_its_place(library: ctypes.CDLL) -> None:
    dice, warps = np.random.default_rng(1), 30_000
    sm, slot = dice.integers(0, 1 << 16, warps), dice.integers(0, 1 << 12, warps)
    sm[-3:], slot[-3:] = (0, 65535, 65535), (4095, 0, 4095)
    entry_ns = dice.integers(0, 50, warps) * 1024
    batches: list[Batch] = []
    for base_ns in range(0, 4 * 1024, 1024):
        stay_ns = dice.integers(1, 4, warps) * 1024
        clk = (entry_ns + base_ns) * 2 + dice.integers(0, 1024, warps), stay_ns * 2
        batches.append((base_ns, entry_ns, stay_ns, sm, slot, *clk, None))
        entry_ns = entry_ns + stay_ns - 1024  # the next enter when those before leave
    assert found_by_both(library, batches) == 4


@pytest.mark.parametrize("order", ["rising", "falling", "pipe", "equal", "far"])
def test_no_order_of_readings_takes_long(library: ctypes.CDLL, order: str) -> None:
    warps = 200_000
    rising = np.arange(warps)
    off_clk = {
        "rising": rising,
        "falling": rising[::-1],
        "pipe": np.minimum(rising, rising[::-1]),
        "equal": rising % 2,
        "far": np.where(rising % 2 == 1, 1 << np.minimum(rising % 64, 50), rising),
    }[order]
    ns = rising * 32
    zeros = np.zeros(warps, np.int64)
    batch = (0, ns, zeros + 3200, zeros, None, ns * 2 + off_clk, zeros + 6400, None)
    assert found_by_both(library, [batch]) == 1


@pytest.mark.parametrize("value", [-1, 2, 1 << 62, -(1 << 63)])
def test_counts_that_do_not_add_up_are_refused(library: ctypes.CDLL, value: int) -> None:
    one, counts = np.array([1, 1]), np.array([1, value])
    for clocks in (sm_clock.SmClocks(), native.NativeSmClocks(library)):
        with pytest.raises(ValueError, match="do not add up"):
            clocks.refine(0, WarpReadings(one, one, one, one, one, one, counts))


@pytest.mark.parametrize("at", range(7))
def test_columns_of_other_lengths_are_refused(library: ctypes.CDLL, at: int) -> None:
    columns = [np.array([1, 1])] * 7
    columns[at] = np.array([1])
    for clocks in (sm_clock.SmClocks(), native.NativeSmClocks(library)):
        with pytest.raises(ValueError):
            clocks.refine(0, WarpReadings(*columns))


def test_columns_of_other_numbers_are_refused(library: ctypes.CDLL) -> None:
    one, two = np.array([1, 1]), np.array([1, 1, 2, 2])
    for column in (one.astype(np.int32), one.astype(np.uint64), two[::2], one.astype(np.float64)):
        with pytest.raises(TypeError):
            columns = WarpReadings(one, one, column, None, one, one, None)  # type: ignore[arg-type]
            native.NativeSmClocks(library).refine(0, columns)


@pytest.mark.parametrize("base_ns", [-1, 1 << 62, 1 << 64, (1 << 64) + 5])
def test_a_base_out_of_the_limits_refines_no_times(library: ctypes.CDLL, base_ns: int) -> None:
    _, columns = read(LikelyGpu(5).batch(600))
    for make in (sm_clock.SmClocks, lambda: native.NativeSmClocks(library)):
        assert make().refine(0, columns) is not None
        assert make().refine(base_ns, columns) is None
