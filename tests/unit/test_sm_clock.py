"""Times between the steps of %globaltimer: near the true ones, never out of the step that was read."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stamped import Stamping
from tests.support.warp_readings import Batch, LikelyGpu, hostile_batches, read, refined_in_c
from tracepipe.clocks.sm_clock import LIMIT, NativeSmClocks, SmClocks, WarpReadings
from tracepipe.event.checks import first_fault
from tracepipe.event.model import COLUMN_LIMIT, Header, Record
from tracepipe.native import library as loaded

BASE_NS = 1_795_261_916_236_035_584
COLUMNS = ("entry_ns", "exit_ns", "sm", "slot", "entry_clk", "exit_clk", "exit_count")


@dataclass
class Gpu:
    """SMs whose warps enter and leave at true times, ns after BASE_NS, and what they read of them."""

    step_ns: int
    ghz: float = 1.98
    sms: int = 16
    lag_ns: float = 0.0
    """How much later than an entry an exit reads %globaltimer."""
    seed: int = 1
    entered: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)

    def run(
        self, warps: int, from_ns: float = 0.0, stay_ns: float = 2_000.0, slots: int = 8
    ) -> dict[str, Any]:
        """A batch of warps, as many at a time as there are slots."""
        dice = random.Random(self.seed)
        count_from = [dice.randrange(1 << 36) for _ in range(self.sms)]
        free = {(sm, slot): from_ns + dice.random() * 100 for sm in range(self.sms) for slot in range(slots)}
        self.entered, self.left, places = [], [], []
        for _ in range(warps):
            place = min(free, key=free.__getitem__)
            self.entered.append(free[place] + 150 + dice.random() * 50)
            self.left.append(self.entered[-1] + stay_ns * (0.5 + dice.random()))
            free[place] = self.left[-1]
            places.append(place)
        base_ns = BASE_NS + self.read(self.entered[0])
        cycles = [
            (count_from[sm] + int(a * self.ghz), count_from[sm] + int(b * self.ghz))
            for (sm, _), a, b in zip(places, self.entered, self.left, strict=True)
        ]
        entry_ns = [self.read(ns) + BASE_NS - base_ns for ns in self.entered]
        left_ns = [self.read(ns + self.lag_ns) + BASE_NS - base_ns for ns in self.left]
        return {
            "type": "gpu_warp", "name": "k", "ts_ns": base_ns, "warp": list(range(warps)),
            "sm": [sm for sm, _ in places], "slot": [slot for _, slot in places],
            "entry_ns": entry_ns, "entry_clk": [a for a, _ in cycles],
            "exit_ns": [b - a for a, b in zip(entry_ns, left_ns, strict=True)],
            "exit_clk": [b - a for a, b in cycles],
        }  # fmt: skip

    def read(self, ns: float) -> int:
        """%globaltimer at that time."""
        return int(ns // self.step_ns) * self.step_ns

    def errors_ns(self, batch: dict[str, Any], columns: tuple[list[int], list[int]]) -> list[float]:
        """How far the times of entries are from the true ones, and durations, counted as times."""
        base_ns, (entered, stayed) = batch["ts_ns"] - BASE_NS, columns
        starts = [abs(base_ns + got - true) for got, true in zip(entered, self.entered, strict=True)]
        true_ns = [b - a + self.lag_ns for a, b in zip(self.entered, self.left, strict=True)]
        return starts + [abs(got - true) for got, true in zip(stayed, true_ns, strict=True)]


def raw(batch: dict[str, Any]) -> tuple[list[int], list[int]]:
    return batch["entry_ns"], batch["exit_ns"]


def refine(clocks: SmClocks, batch: dict[str, Any]) -> tuple[list[int], list[int]] | None:
    """A batch's columns as integers, in and out."""
    columns = columns_of(batch)
    before = [None if column is None else column.copy() for column in columns]
    found = clocks.refine(batch["ts_ns"], WarpReadings(*columns))
    for column, was in zip(columns, before, strict=True):
        assert (column is None and was is None) or (column == was).all()
    return found and (found[0].tolist(), found[1].tolist())


def columns_of(batch: dict[str, Any]) -> list[Any]:
    return [np.array(batch[name], np.int64) if name in batch else None for name in COLUMNS]


def refined(clocks: SmClocks, batch: dict[str, Any]) -> tuple[list[int], list[int]]:
    columns = refine(clocks, batch)
    assert columns is not None
    assert_in_steps(batch, columns)
    return columns


def assert_in_steps(batch: dict[str, Any], columns: tuple[list[int], list[int]], step_ns: int = 0) -> None:
    """No time is out of the step that was read, and no exit is before its entry."""
    counts = batch.get("exit_count", [1] * len(batch["warp"]))
    owners = [at for at, count in enumerate(counts) for _ in range(count)]
    (entry, exits), (entered, stayed) = raw(batch), columns
    step_ns = step_ns or max(1, *(more - read for more, read in zip(entered, entry, strict=True))) + 1
    assert all(0 <= more - read < step_ns for more, read in zip(entered, entry, strict=True))
    assert all(ns >= 0 for ns in stayed)
    for at, stay, read_ns in zip(owners, stayed, exits, strict=True):
        assert 0 <= entered[at] + stay - entry[at] - read_ns < step_ns


@pytest.mark.parametrize("ghz", [1.98, 0.345])
def test_warps_are_known_to_two_ns_where_readings_are_32_ns_apart(ghz: float) -> None:
    gpu = Gpu(32, ghz)
    batch = gpu.run(3_000)
    columns = refined(SmClocks(), batch)
    assert_in_steps(batch, columns, 32)
    errors = gpu.errors_ns(batch, columns)
    assert mean(errors) < 1 / min(ghz, 1)
    assert sorted(errors)[len(errors) * 99 // 100] <= 2 / min(ghz, 1)
    assert mean(gpu.errors_ns(batch, raw(batch))) > 12


def test_warps_are_known_to_some_ns_where_readings_are_a_microsecond_apart() -> None:
    gpu = Gpu(1024)
    batch = gpu.run(12_000, slots=16)
    columns = refined(SmClocks(), batch)
    assert_in_steps(batch, columns, 1024)
    errors = gpu.errors_ns(batch, columns)
    assert mean(errors) < 3
    assert max(errors) <= 12
    assert mean(gpu.errors_ns(batch, raw(batch))) > 400


@pytest.mark.slow
def test_what_earlier_batches_show_of_the_rate_serves_the_next() -> None:
    # One wave of warps says little of the rate: all enter at once and leave at once.
    gpu = Gpu(1024, sms=80)
    clocks, waves = SmClocks(), []
    for wave in range(30):
        gpu.seed = 1  # the same SMs, counting on
        batch = gpu.run(640, from_ns=wave * 2_700.0 + 37.0 * wave)
        if columns := refine(clocks, batch):
            assert_in_steps(batch, columns, 1024)
            waves.append(mean(abs(e) for e in gpu.errors_ns(batch, columns)[640:]))
    assert mean(waves[-5:]) < mean(waves[:5])
    assert mean(waves[-5:]) < 40


@pytest.mark.parametrize("lag_ns", [-30.0, 25.0])
def test_an_exit_that_reads_its_clocks_in_another_order_is_not_a_contradiction(lag_ns: float) -> None:
    gpu = Gpu(32, lag_ns=lag_ns)
    batch = gpu.run(3_000)
    errors = gpu.errors_ns(batch, refined(SmClocks(), batch))
    assert mean(errors) < 1.5
    assert max(errors) <= 5


def test_warps_of_an_sm_are_in_the_order_of_its_cycles() -> None:
    batch = Gpu(1024, sms=4).run(2_000)
    entered, _ = refined(SmClocks(), batch)
    for sm in range(4):
        mine = [at for at in range(2_000) if batch["sm"][at] == sm]
        mine.sort(key=batch["entry_clk"].__getitem__)
        assert all(entered[a] <= entered[b] for a, b in pairwise(mine))
        # 1 µs holds the entries of several warps, which are apart now.
        assert len({entered[at] for at in mine}) > 3 * len({batch["entry_ns"][at] for at in mine})


@pytest.mark.parametrize("step_ns", [32, 1024])
def test_one_warp_at_a_time_is_in_a_slot_over_all_batches(step_ns: int) -> None:
    whole = Gpu(step_ns, sms=4).run(4_000, stay_ns=300.0)
    clocks, spans = SmClocks(), []
    for start in range(0, 4_000, 100):
        batch = {k: v[start : start + 100] if isinstance(v, list) else v for k, v in whole.items()}
        entered, stayed = refine(clocks, batch) or raw(batch)
        places = zip(batch["sm"], batch["slot"], strict=True)
        spans += [(place, a, a + b) for place, a, b in zip(places, entered, stayed, strict=True)]
    for place in {place for place, _, _ in spans}:
        mine = [span[1:] for span in spans if span[0] == place]
        assert all(a[1] <= b[0] for a, b in pairwise(mine))


def test_a_warp_that_is_held_up_between_its_readings_does_not_move_the_others() -> None:
    gpu = Gpu(32)
    batch = gpu.run(3_000)
    for at in range(0, 3_000, 150):
        batch["entry_clk"][at] += 120  # 60 ns later than its %globaltimer
        batch["exit_clk"][at] -= 120
    errors = gpu.errors_ns(batch, refined(SmClocks(), batch))
    errors = [error for at, error in enumerate(errors) if at % 3_000 % 150]
    assert sorted(errors)[len(errors) * 95 // 100] <= 8
    assert mean(errors) < 4


def test_where_the_cycles_make_no_line_the_readings_stand() -> None:
    batch = Gpu(32).run(500)
    dice = random.Random(2)
    batch["entry_clk"] = [dice.randrange(1 << 40) for _ in range(500)]
    batch["exit_clk"] = [dice.randrange(1 << 20) for _ in range(500)]
    assert refine(SmClocks(), batch) in (None, raw(batch))


def test_an_sm_without_a_line_leaves_the_others_theirs() -> None:
    gpu = Gpu(32)
    batch = gpu.run(3_000)
    dice = random.Random(2)
    lost = [at for at in range(3_000) if batch["sm"][at] == 3]
    for at in lost:
        batch["entry_clk"][at] = dice.randrange(1 << 40)
    entered, stayed = refined(SmClocks(), batch)
    assert [entered[at] for at in lost] == [batch["entry_ns"][at] for at in lost]
    assert [stayed[at] for at in lost] == [batch["exit_ns"][at] for at in lost]
    kept = [e for at, e in enumerate(gpu.errors_ns(batch, (entered, stayed))) if batch["sm"][at % 3_000] != 3]
    assert mean(kept) < 2


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("missing", ["sm", "entry_clk", "exit_clk"])
def test_without_cycles_no_times_are_refined(missing: str) -> None:
    batch = Gpu(32).run(100)
    assert stamped(batch)["entry_ns"] != batch["entry_ns"]
    del batch[missing]
    assert_as_read(batch)


@pytest.mark.usefixtures("core")
def test_the_largest_count_of_cycles_refines_no_times() -> None:
    batch = Gpu(32).run(100)
    batch["entry_clk"][50] = COLUMN_LIMIT
    assert_as_read(batch)
    one = Gpu(32).run(1)
    assert first_fault(one | {"entry_clk": [COLUMN_LIMIT]}) is None
    no_int64 = one | {"entry_clk": [COLUMN_LIMIT + 1]}
    assert first_fault(no_int64) == ("entry_clk[0]", f"must be at most {COLUMN_LIMIT}")


def assert_as_read(batch: dict[str, Any]) -> None:
    """Nothing of a batch becomes finer."""
    assert stamped(batch) == batch | {"source_ns": None, "bound_ns": 0, "offset_ns": 0}


def stamped(batch: dict[str, Any]) -> Record:
    """The record of a batch whose clock stands alone, as `Clocks` makes it."""
    (placed,) = Stamping(Header(clock="g", clocks=["g"])).stamp([batch])
    return placed


def test_readings_of_whole_ns_stay_as_they_are() -> None:
    batch = Gpu(1).run(500)
    assert refine(SmClocks(), batch) is None


def test_too_few_readings_do_not_show_the_step() -> None:
    gpu, clocks = Gpu(32), SmClocks()
    assert refine(clocks, gpu.run(1) | {"ts_ns": 0}) is None  # any two readings have a common divisor
    assert refine(clocks, gpu.run(400)) is not None


def test_a_batch_without_warps_is_not_refined() -> None:
    clocks, batch = SmClocks(), Gpu(32).run(100)
    none = {name: [] if isinstance(value, list) else value for name, value in batch.items()}
    assert refine(clocks, none) is None
    assert refine(clocks, none | {"exit_count": []}) is None
    assert refine(clocks, batch) == refine(SmClocks(), batch)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("value", [-LIMIT - 1, LIMIT, (1 << 63) - 1, -(1 << 63)])
def test_a_number_out_of_the_limits_refines_no_times(column: str, value: int) -> None:
    gpu, clocks = Gpu(1024), SmClocks()
    batch = gpu.run(400) | {"exit_count": [1] * 400}
    broken = batch | {column: [*batch[column][:200], value, *batch[column][201:]]}
    if column == "exit_count":
        with pytest.raises(ValueError):
            refine(clocks, broken)
    else:
        assert refine(clocks, broken) is None
    assert refine(clocks, batch) == refine(SmClocks(), batch)  # nothing was learnt from it


@pytest.mark.parametrize("column", COLUMNS)
def test_columns_of_different_lengths_are_refused(column: str) -> None:
    batch = Gpu(32).run(400) | {"exit_count": [1] * 400}
    with pytest.raises(ValueError):
        refine(SmClocks(), batch | {column: batch[column][:-1]})


columns = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 50),
        st.integers(0, 1 << 60),
        st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1 << 40)), max_size=3),
    ),
    max_size=60,
)


@given(columns, st.sampled_from([2, 32, 1000]))
def test_whatever_is_read_no_time_leaves_its_step(rows: list[Any], step_ns: int) -> None:
    every = [one for row in rows for one in row[3]]
    batch = {
        "ts_ns": BASE_NS, "warp": list(range(len(rows))), "sm": [row[0] for row in rows],
        "slot": [at % 5 for at in range(len(rows))], "entry_ns": [row[1] * step_ns for row in rows],
        "entry_clk": [row[2] for row in rows], "exit_count": [len(row[3]) for row in rows],
        "exit_ns": [ns * step_ns for ns, _ in every], "exit_clk": [clk for _, clk in every],
    }  # fmt: skip
    clocks = SmClocks()
    for _ in range(2):
        if (found := refine(clocks, batch)) is not None:
            divisor = clocks._step_ns
            assert divisor % step_ns == 0
            assert_in_steps(batch, found, divisor)


@pytest.mark.usefixtures("core")
def test_a_recording_has_the_finer_times_and_the_readings() -> None:
    gpu = Gpu(32)
    batch = gpu.run(2_000)
    readings = [batch["ts_ns"] + ns for ns in batch["entry_ns"]]
    pair = {"type": "clock", "clock": "g", "source_ns": BASE_NS, "host_lo_ns": 1_000, "host_hi_ns": 1_000}
    stamping = Stamping(Header(clock="monotonic", clocks=["monotonic", "g"]), [pair])
    (record,) = stamping.stamp([batch | {"clock": "g"}])
    assert record["source_ns"] == readings
    assert min(record["entry_ns"]) == 0
    starts = [record["ts_ns"] - 1_000 + ns for ns in record["entry_ns"]]
    assert mean(abs(a - b) for a, b in zip(starts, gpu.entered, strict=True)) < 1


@pytest.mark.usefixtures("core")
def test_a_gpu_clock_that_stands_alone_is_refined_too() -> None:
    gpu = Gpu(32)
    batch = gpu.run(2_000)
    record = stamped(batch)
    starts = [record["ts_ns"] - BASE_NS + ns for ns in record["entry_ns"]]
    assert mean(abs(a - b) for a, b in zip(starts, gpu.entered, strict=True)) < 1
    assert record["source_ns"] == [batch["ts_ns"] + ns for ns in batch["entry_ns"]]


@pytest.fixture
def library() -> ctypes.CDLL:
    core = loaded()
    if core is None:
        pytest.skip("there is no compiled core")
    return core


def found_by_both(library: ctypes.CDLL, batches: list[Batch]) -> int:
    """How many of a GPU's batches both make finer, and the same."""
    reference, in_c, finer = SmClocks(), NativeSmClocks(library), 0
    for batch in batches:
        before = [None if column is None else column.copy() for column in batch[1:]]
        expected, found = reference.refine(*read(batch)), refined_in_c(in_c, batch)
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
    batch = (0, one, one, one, one, one, one, counts)
    with pytest.raises(ValueError, match="do not add up"):
        SmClocks().refine(*read(batch))
    with pytest.raises(ValueError, match="do not add up"):
        refined_in_c(NativeSmClocks(library), batch)


@pytest.mark.parametrize("at", range(7))
def test_columns_of_other_lengths_are_refused(library: ctypes.CDLL, at: int) -> None:
    columns = [np.array([1, 1])] * 7
    columns[at] = np.array([1])
    with pytest.raises(ValueError):
        SmClocks().refine(0, WarpReadings(*columns))
    with pytest.raises(ValueError):
        refined_in_c(NativeSmClocks(library), (0, *columns))


def test_columns_of_other_numbers_are_refused(library: ctypes.CDLL) -> None:
    one, two = np.array([1, 1]), np.array([1, 1, 2, 2])
    for column in (one.astype(np.int32), one.astype(np.uint64), two[::2], one.astype(np.float64)):
        with pytest.raises(TypeError):
            batch = (0, one, one, column, None, one, one, None)
            refined_in_c(NativeSmClocks(library), batch)


@pytest.mark.parametrize("base_ns", [-1, 1 << 62])
def test_a_base_out_of_the_limits_refines_no_times(library: ctypes.CDLL, base_ns: int) -> None:
    _, *columns = LikelyGpu(5).batch(600)
    assert found_by_both(library, [(0, *columns)]) == 1
    assert found_by_both(library, [(base_ns, *columns)]) == 0
