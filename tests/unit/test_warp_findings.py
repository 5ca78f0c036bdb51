"""Findings in warps: hand-computed cases, planted effects, and kernels in which there is nothing to find."""

from __future__ import annotations

import heapq
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.synthetic_warps import NOISES, SyntheticKernel
from tracepipe.analyses.findings import FINDERS, find_all
from tracepipe.analyses.findings.divergence import split_p_values, stride_of
from tracepipe.analyses.findings.finding import Finding, listed, percent
from tracepipe.analyses.findings.kernel_warps import NOT_RECORDED, KernelWarps, sort_warps
from tracepipe.analyses.findings.statistics import chance_in_rows, late_class, ranks_in_rows, score_rows
from tracepipe.analyses.findings.stragglers import beyond_the_tail
from tracepipe.analyses.findings.stride import without_order
from tracepipe.analyses.findings.waves import launch_waves, one_by_one, order_of_exits

FULL = 0xFFFFFFFF
HEAVY = tuple(np.flatnonzero(np.random.default_rng(5).random(512) < 1 / 16).tolist())


def warps(
    rows: list[tuple[int, int, int, int, list[tuple[int, int]]]],
    grid: tuple[int, int, int] | None = None,
    launches: Any = 0,
    **options: Any,
) -> KernelWarps:
    """Warps of (block, warp, SM, entry, [(exit, mask), …]), in one launch if their launches are not given."""
    exits = [(at, ns, mask) for at, row in enumerate(rows) for ns, mask in row[4]]
    block, warp, sm, entry = (np.array([row[key] for row in rows], np.int64) for key in range(4))
    exit_warp, exit_ns, exit_mask = (np.array([e[key] for e in exits], np.int64) for key in range(3))
    unsorted = KernelWarps(
        "k", grid, launch=np.zeros(len(rows), np.int64) + launches, block=block, warp=warp, sm=sm,
        entry_ns=entry, exit_warp=exit_warp, exit_ns=exit_ns, exit_mask=exit_mask, **options,
    )  # fmt: skip
    return sort_warps(unsorted)


def found(kernel: KernelWarps, kind: str = "") -> list[Finding]:
    return [finding for finding in find_all([kernel]).findings if kind in ("", finding.kind)]


def test_divergence_is_measured_by_the_widest_gap_between_exits() -> None:
    # Lanes 0–7 leave after 100 ns, 24 of 32 after 1000 and 1040: the gap of 900 parts 0–7 from the others.
    exits = [(100, 0xFF), (1_000, 0xFFFF00), (1_040, 0xFF000000)]
    (finding,) = found(warps([(b, 0, 0, 0, exits) for b in range(8)]))
    # Idle: 8 lanes for 940 ns and 16 for 40, of 32 lanes for 1040.
    assert finding.numbers["idle_lane_share"] == pytest.approx((8 * 940 + 16 * 40) / (32 * 1_040))
    assert finding.numbers["late_lanes_mask"] == 0xFFFFFF00
    assert finding.numbers["delay_p50_ns"] == 900
    assert finding.p_value is None
    assert (
        "In 8 of 8 warps the lanes exit at different times: lanes 0–7 (mask 0x000000ff) first, 900 ns"
        in finding.sentence
    )


def test_the_bounds_check_of_a_vector_addition_is_not_divergence() -> None:
    guard = [(60, 0xFFFFF000), (500, 0xFFF)]
    rows: Any = [(b, 0, b, 0, [(500, FULL)]) for b in range(3)]
    assert found(warps([*rows, (3, 0, 3, 0, guard)], (4, 1, 1))) == []
    # The same warp is a finding where the grid goes on behind it.
    assert [f.kind for f in found(warps([*rows, (3, 0, 3, 0, guard)], (64, 1, 1)))] == ["divergence"]


@pytest.mark.parametrize(("apart_ns", "is_divergence"), [((3_000, 9_000), False), ((80_000, 90_000), True)])
def test_exits_that_patches_hold_up_are_not_divergence_and_heavy_blocks_are_found(
    apart_ns: tuple[int, int], is_divergence: bool
) -> None:
    """Rows of power-law length, each of a warp whose lane 0 stores the sum; 64 warps on an SM."""
    rng, rows, sms, launches = np.random.default_rng(1), list[Any](), 4, 3
    work_ns = np.minimum(rng.pareto(1.6, (500, 8)) * 48 + 612, 48_000)
    for launch in range(launches):
        free = [(launch * 10**9, slot % sms) for slot in range(8 * sms)]
        heapq.heapify(free)
        for block, of_warps in enumerate(work_ns):
            entry_ns, sm = heapq.heappop(free)
            first_ns = entry_ns + (of_warps * rng.uniform(0.9, 1.1, 8)).astype(int)
            last_ns = first_ns + rng.integers(*apart_ns, 8)
            exits = zip(first_ns.tolist(), last_ns.tolist(), strict=True)
            rows += [
                (block, warp, sm, entry_ns, [(first, FULL ^ 1), (last, 1)])
                for warp, (first, last) in enumerate(exits)
            ]
            heapq.heappush(free, (int(last_ns.max()) + 100, sm))
    launch = np.repeat(np.arange(launches), len(rows) // launches)
    kernel = warps(rows, (500, 1, 1), launch, is_patched=True)
    kinds = {one.kind: one.numbers for one in found(kernel)}
    assert ("divergence" in kinds) == is_divergence
    assert is_divergence or kinds["imbalance"]["across"] == "blocks"


def test_a_delay_that_costs_little_is_not_divergence() -> None:
    # A lane that stays 30 ns longer than 31 others, in a life of 1 ms.
    exits = [(1_000_000, FULL >> 1), (1_000_030, 1 << 31)]
    assert found(warps([(b, 0, 0, 0, exits) for b in range(64)])) == []


def test_lanes_of_one_warp_are_split_by_their_times() -> None:
    times = np.array([[0, 4, 9, 754.0], [0, 4, 9, 14], [0, 300, 9, 754], [0, np.nan, 9, np.nan]])
    p_values = split_p_values(times, 1.0)
    assert p_values[0] < 0.002
    assert p_values[1:].min() > 0.2
    groups = np.array([[0, 4, 9, 14, 754, 754, 764.0]])
    assert split_p_values(groups, 1.0)[0] < 0.001
    # Where the clock steps by 1 µs, the same times are rounding.
    assert split_p_values(groups, 1_000.0)[0] > 0.2


def test_ranks_are_scored_as_drawn_without_replacement() -> None:
    row, lane = np.array([0, 0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 3, 0, 1, 2])
    ranks = ranks_in_rows(np.array([1.0, 2, 3, 40, 5, 5, 5]), row)
    assert ranks.tolist() == [-1.5, -0.5, 0.5, 1.5, 0, 0, 0]
    # The largest of four: rank 1.5 above the mean, with variance 5/4 of single ranks, and 1·3/3 of that.
    scores = score_rows(ranks, row, lane, 4)
    assert scores[3] == pytest.approx(1.5 / np.sqrt(1.25))
    assert scores[0] == pytest.approx(-1.5 / np.sqrt(1.25))


def test_a_late_class_is_the_simplest_that_holds() -> None:
    positions = np.broadcast_to(np.arange(32), (40, 32))
    noise = np.random.default_rng(5).standard_normal((40, 32))
    late = late_class(noise + 9 * (positions % 8 == 7), positions, range(2, 33))
    assert late is not None
    assert (late.modulus, late.residues) == (8, [7])
    two = late_class(noise + 9 * ((positions % 8 == 7) | (positions % 8 == 2)), positions, range(2, 33))
    assert two is not None
    assert (two.modulus, two.residues) == (8, [2, 7])
    # A ramp and half a warp are not a stride.
    assert late_class(noise + positions, positions, range(2, 33)) is None
    assert late_class(noise + 9 * (positions >= 16), positions, range(2, 33)) is None


def test_a_value_far_beyond_others_stands_out_and_the_last_of_many_does_not() -> None:
    values = np.random.default_rng(3).standard_normal(400)
    quiet = beyond_the_tail(values, 0.001, 1.0)
    assert quiet is not None
    assert quiet.p_value > 0.05
    values[[7, 90]] = (30.0, 31.0)
    out = beyond_the_tail(values, 0.001, 1.0)
    assert out is not None
    assert (sorted(out.indices.tolist()), out.p_value < 1e-4) == ([7, 90], True)
    assert beyond_the_tail(values, 0.001, 40.0) is None, "none is as late as it must be to matter"
    assert beyond_the_tail(values[:15], 0.001, 1.0) is None, "fifteen values have no tail"


def test_waves_are_counted_from_what_the_sms_held() -> None:
    # Two SMs hold two blocks each; six blocks of 1000 ns: the last two come 100 ns after.
    first: list[Any] = [(b, 0, b % 2, 0, [(1_000, FULL)]) for b in range(4)]
    last: list[Any] = [(b, 0, b % 2, 1_100, [(2_100, FULL)]) for b in (4, 5)]
    kernel = warps(first + last)
    waves = launch_waves(kernel, 0)
    assert (waves.waves, waves.blocks_per_sm, waves.sms, waves.filled) == (1.5, 2, 2, 1.0)
    # From 1100 to 2100 ns two of four slots are empty.
    assert waves.idle_share == pytest.approx(2 * 1_000 / (4 * 2_100))
    (finding,) = found(kernel, "wave")
    assert finding.numbers["last_wave_fill"] == 0.5
    assert (
        "6 blocks run 2 at a time on each of 2 SMs, in 1.50 waves: the last one fills 50%" in finding.sentence
    )
    assert found(warps(first), "wave") == []


PLANTED = {
    "divergence": SyntheticKernel(late_lanes=(31,), delay=0.2),
    "divergence of threads": SyntheticKernel(
        blocks=64, lanes_timed=True, lane_sigma=0.02, late_lanes=(16, 17, 18), delay=0.5, late_lanes_share=0.5
    ),
    "stride": SyntheticKernel(late_lanes=(7, 15, 23, 31), delay=0.2),
    "stride of threads": SyntheticKernel(
        blocks=64, lanes_timed=True, lane_sigma=0.05, late_lanes=(7, 15, 23, 31), delay=0.2
    ),
    "stride of exits": SyntheticKernel(
        blocks=64, lanes_timed=True, entries=False, lane_sigma=0.05, late_lanes=(7, 15, 23, 31), delay=0.3
    ),
    "stride of warps": SyntheticKernel(warps=8, late_warps=(3, 7), delay=0.2),
    "straggler": SyntheticKernel(late_blocks=(30, 99, 500), delay=1.0),
    "straggler in a launch": SyntheticKernel(late_blocks=(8, 9, 500), delay=1.0, launches=6, late_launch=4),
    "imbalance of SMs": SyntheticKernel(late_sms=(5,), delay=0.5),
    "imbalance of work": SyntheticKernel(trend=2.0),
    "imbalance of every 7th block": SyntheticKernel(late_blocks=tuple(range(3, 512, 7)), delay=1.0),
    "imbalance of heavy blocks": SyntheticKernel(late_blocks=HEAVY, delay=7.0),
    "wave": SyntheticKernel(blocks=160),
    "wave of warps": SyntheticKernel(warps=8, in_order=0.3),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_found_and_nothing_else(name: str) -> None:
    findings = found(PLANTED[name].run(11))
    kind = name.split()[0]
    # Threads that leave at a stride leave apart: that is divergence too.
    allowed = {kind, "divergence"} if kind == "stride" else {kind}
    assert kind in {finding.kind for finding in findings} <= allowed
    for finding in findings:
        data = finding.as_json()
        assert data["kernel"] == "synthetic"
        assert f"Usual cause: {finding.cause}." in data["sentence"]


@pytest.mark.slow
def test_the_numbers_show_what_was_planted() -> None:
    (stride,) = found(PLANTED["stride of threads"].run(11), "stride")
    assert (stride.numbers["modulus"], stride.numbers["residues"]) == (8, [7])
    assert stride.numbers["delay_low_ns"] <= 4_000 <= stride.numbers["delay_high_ns"]
    (warp_stride,) = found(PLANTED["stride of warps"].run(11))
    assert warp_stride.numbers["modulus_threads"] == 128
    (straggler,) = found(PLANTED["straggler"].run(11))
    assert straggler.numbers["blocks"] == [30, 99, 500]
    (once,) = found(PLANTED["straggler in a launch"].run(11))
    assert (once.numbers["launch"], once.numbers["blocks"]) == (4, [8, 9, 500])
    (sm,) = found(PLANTED["imbalance of SMs"].run(11))
    assert sm.numbers["sms"] == [5]
    (period,) = found(PLANTED["imbalance of every 7th block"].run(11))
    assert [period.numbers[key] for key in ("side", "modulus", "residues")] == ["blockIdx.x", 7, [3]]
    assert period.numbers["delay_p50_ns"] == pytest.approx(20_000, rel=0.05)
    (heavy,) = found(PLANTED["imbalance of heavy blocks"].run(11))
    # One of them may have started with only others of them.
    assert len(HEAVY) - 2 <= heavy.numbers["heavy_blocks"] <= len(HEAVY)
    assert heavy.numbers["heavy_p50_ratio"] == pytest.approx(8, rel=0.05)
    (order,) = found(PLANTED["wave of warps"].run(11))
    assert order.numbers["step_ns"] == pytest.approx(6_000, rel=0.1)


def test_a_finding_says_what_could_be_saved_of_a_launch_and_of_all() -> None:
    # 256 blocks on 128 slots: without its late one, each launch ends a block's time sooner.
    kernel = SyntheticKernel(blocks=256, launches=4, late_blocks=(200,), delay=2.0).run(3)
    (late,) = found(kernel, "straggler")
    assert late.saves is not None
    assert late.saves.launch_ns == late.numbers["end_delayed_ns"] == pytest.approx(40_000, rel=0.1)
    assert late.saves.run_ns == pytest.approx(4 * late.saves.launch_ns, rel=0.05)
    assert late.as_json()["saves_run_ns"] == late.saves.run_ns
    assert "A fix could save at most 37.8 µs (46%) of a launch, 151 µs of all recorded ones." in late.sentence


def test_a_launch_with_stragglers_of_its_own_saves_no_time_in_others() -> None:
    (once,) = found(PLANTED["straggler in a launch"].run(11))
    assert once.saves is not None
    assert once.saves.run_ns == once.saves.launch_ns


def test_without_entries_no_saving_is_stated() -> None:
    findings = found(PLANTED["stride of exits"].run(11))
    assert findings
    assert all(finding.saves is None for finding in findings)


def test_what_could_save_most_comes_first() -> None:
    quick = SyntheticKernel(blocks=256, late_warps=(3, 7), warps=8, delay=0.2, life_ns=2_000).run(1)
    slow = SyntheticKernel(late_blocks=(30, 99, 500), delay=1.0).run(11)
    findings = find_all([quick, slow]).findings
    assert [(finding.kind, finding.grid) for finding in findings] == [
        ("straggler", (512, 1, 1)),
        ("stride", (256, 1, 1)),
    ]


def test_a_period_along_a_side_of_the_grid_is_distinguished_from_one_of_the_index() -> None:
    rows = tuple(b for b in range(512) if b // 16 % 4 == 1)
    (finding,) = found(SyntheticKernel(grid=(16, 32, 1), late_blocks=rows, delay=0.5).run(3))
    assert [finding.numbers[key] for key in ("side", "modulus", "residues")] == ["blockIdx.y", 4, [1]]


def test_a_border_is_distinguished_from_a_period_where_turns_differ_more() -> None:
    # The first turn of each SM has nearly two of eight rows, most of them at the border.
    border = tuple(b for b in range(128) if b % 16 in (0, 15) or b // 16 in (0, 7))
    options: Any = {"blocks": 128, "grid": (16, 8, 1), "launches": 4, "oldest_first": 0.6}
    (finding,) = found(SyntheticKernel(**options, late_blocks=border, delay=0.5).run(2))
    assert finding.numbers["of"] == "border"
    columns = tuple(b for b in range(128) if b % 5 == 0)
    (finding,) = found(SyntheticKernel(**options | {"grid": None}, late_blocks=columns, delay=0.5).run(2))
    assert (finding.numbers["modulus"], finding.numbers["residues"]) == (5, [0])


def test_half_of_the_blocks_can_be_a_period() -> None:
    # In some turns more than half are late, in others less.
    late = tuple(b for b in range(512) if b // 16 % 2 == 1)
    (finding,) = found(SyntheticKernel(grid=(16, 32, 1), late_blocks=late, delay=1.0).run(3))
    assert [finding.numbers[key] for key in ("side", "modulus", "residues")] == ["blockIdx.y", 2, [1]]


def test_a_last_wave_of_clusters_names_them_and_the_sms_that_stay_unused() -> None:
    blocks: Any = [(b, 0, b % 2, b // 4 * 1_100, [(b // 4 * 1_100 + 1_000, FULL)]) for b in range(6)]

    def sentence(**options: Any) -> str:
        (finding,) = found(warps(blocks, **options), "wave")
        return finding.sentence

    assert "run 2 at a time on each of 2 SMs" in sentence(sm_count=2)
    unknown = sentence(sm_count=3)
    assert "each of 2 of 3 SMs" in unknown
    assert (
        "SMs stay unused where clusters of blocks do not fit, or where something else holds them" in unknown
    )
    clusters = sentence(sm_count=3, cluster_of=lambda _: 2)
    assert "6 blocks in clusters of 2 run 2 at a time on each of 2 of 3 SMs" in clusters
    assert "Usual cause: clusters of blocks, which fit only where" in clusters


def test_late_blocks_that_end_before_others_are_not_a_finding() -> None:
    # Each SM serves four blocks one after the other; those of the first turn are late.
    options: Any = {"blocks": 128, "launches": 6, "oldest_first": 0.6, "late_launch": 4}
    assert found(SyntheticKernel(**options, late_blocks=(8, 9), delay=0.5).run(11)) == []
    (finding,) = found(SyntheticKernel(**options, late_blocks=(120, 121), delay=0.5).run(11))
    assert (finding.kind, finding.numbers["blocks"]) == ("straggler", [120, 121])


def test_a_block_that_ends_last_and_does_the_rest_is_a_pattern_of_the_launches() -> None:
    """By 12%, which is far in some launches only, and by 40%; uniform kernels have none."""
    for rest in (0.12, 0.4):
        (finding,) = found(SyntheticKernel(blocks=128, launches=4, rest=rest).run(5))
        assert (finding.kind, finding.numbers["of"]) == ("straggler", "last block")
        assert len(finding.numbers["blocks"]) == 4 and "launch" not in finding.numbers
        assert "another one in each of 4 launches and always the last to end" in finding.evidence
        assert "does the rest of the work" in finding.cause
    uniform = [SyntheticKernel(blocks=128, launches=4, noise=n).run(s) for n in NOISES for s in range(10)]
    assert [one for kernel in uniform for one in found(kernel)] == []


def test_slots_that_something_else_occupied_once_make_no_wave() -> None:
    free: Any = [(b, 0, b % 2, 0, [(1_000, FULL)]) for b in range(4)]
    held_up: Any = [(b, 0, 0, b // 3 * 1_100, [(b // 3 * 1_100 + 1_000, FULL)]) for b in range(4)]

    def of(launches: list[Any]) -> KernelWarps:
        rows = [row for one in launches for row in one]
        return warps(rows, launches=np.repeat(np.arange(len(launches)), 4))

    assert [found(of(launches), "wave") for launches in ([free, held_up], [free, held_up, held_up])] == [
        [],
        [],
    ]
    # Where it is so in all launches, the kernel has only these slots.
    assert found(of([held_up, held_up]), "wave")[0].numbers["waves"] == pytest.approx(4 / 3)


def test_late_blocks_of_a_period_are_not_stragglers_as_well() -> None:
    late = tuple(range(1, 512, 32))
    (finding,) = found(SyntheticKernel(late_blocks=late, delay=0.5).run(3))
    assert (finding.kind, finding.numbers["across"]) == ("imbalance", "block period")


def test_blocks_at_the_border_are_one_finding() -> None:
    border = tuple(b for b in range(128) if b % 16 in (0, 15) or b // 16 in (0, 7))
    kernel = SyntheticKernel(blocks=128, grid=(16, 8, 1), launches=4, late_blocks=border, delay=0.2)
    (finding,) = found(kernel.run(2))
    assert (finding.numbers["of"], finding.numbers["border_blocks"]) == ("border", len(border))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("sigma", [0.02, 0.2])
def test_noise_alone_is_not_a_finding(noise: str, sigma: float) -> None:
    timed: Any = {"noise": noise, "sigma": sigma, "lane_sigma": sigma, "lanes_timed": True, "entries": False}
    kernels = [
        SyntheticKernel(blocks=1, warps=1, lane_step_ns=200, **timed),
        # Noise that a coarse clock rounds to two readings.
        SyntheticKernel(blocks=4, step_ns=1024, **timed),
        SyntheticKernel(blocks=16, warps=3, **timed),
        SyntheticKernel(noise=noise, sigma=sigma),
        SyntheticKernel(noise=noise, sigma=sigma, blocks=128, launches=4, first_wave=0.5),
        SyntheticKernel(noise=noise, sigma=sigma, blocks=32, lanes_timed=True, lane_sigma=sigma),
    ]
    assert [found(kernel.run(100 + at)) for at, kernel in enumerate(kernels)] == [[]] * len(kernels)


@pytest.mark.parametrize("blocks", [128, 120, 512])
def test_blocks_that_an_sm_serves_last_are_not_a_finding(blocks: int) -> None:
    kernel = SyntheticKernel(blocks=blocks, launches=4, oldest_first=0.6)
    assert [finding for finding in found(kernel.run(7)) if finding.kind != "wave"] == []


@pytest.mark.parametrize("blocks", [128, 512])
def test_work_that_grows_is_found_where_an_sm_serves_its_oldest_block_first(blocks: int) -> None:
    kernel = SyntheticKernel(blocks=blocks, launches=4, oldest_first=0.6, trend=2.0)
    (finding,) = found(kernel.run(7), "imbalance")
    assert finding.numbers["across"] == "block index"


@pytest.mark.slow
def test_few_lanes_that_hold_up_their_warps_are_found_and_few_that_leave_early() -> None:
    late = SyntheticKernel(late_lanes=(5, 21), delay=0.67)
    (finding,) = found(late.run(3), "divergence")
    assert finding.numbers["late_lanes"] == [5, 21]
    (stride,) = found(late.run(3), "stride")
    assert (stride.numbers["modulus"], stride.numbers["residues"]) == (16, [5])
    early = SyntheticKernel(late_lanes=tuple(lane for lane in range(32) if lane % 16 != 5), delay=0.67)
    (finding,) = found(early.run(3))
    # 2 of 32 lanes are idle for 40% of a warp's life.
    assert finding.numbers["idle_lane_share"] == pytest.approx(2 / 32 * 0.4, rel=0.05)
    assert "40% of a warp's lifetime; 3% of the lanes' time is idle" in finding.sentence
    # Of a warp in eight that would be worth too little.
    early.late_lanes_share = 1 / 8
    assert found(early.run(3)) == []


@pytest.mark.slow
def test_a_recording_of_many_kernels_asks_more_of_each() -> None:
    kernel = SyntheticKernel(
        blocks=1, warps=8, lanes_timed=True, lane_sigma=0.05, late_lanes=(7, 15, 23, 31), delay=0.07
    )
    (alone,) = found(kernel.run(4), "stride")
    assert alone.p_value is not None
    assert 0.0001 < alone.p_value < 0.005
    quiet = SyntheticKernel(blocks=1, warps=8, lanes_timed=True, lane_sigma=0.05).run(5)
    assert [f for f in find_all([kernel.run(4), *[quiet] * 99]).findings if f.kind == "stride"] == []


def test_what_an_input_lacks_is_reported_for_each_kind() -> None:
    entries_only = warps([(0, 0, 0, 5, [])], (1, 1, 1))
    assert set(find_all([entries_only]).skipped) == set(FINDERS)
    exits_only = warps([(b, w, NOT_RECORDED, NOT_RECORDED, [(9, FULL)]) for b in range(20) for w in range(4)])
    assert find_all([exits_only]).skipped == {"imbalance": [("k", "no entries were recorded")]}


def test_a_warp_that_never_left_is_counted_apart() -> None:
    kernel = warps([(0, 0, 0, 5, [(9, FULL)]), (0, 1, 0, 5, [])])
    assert (kernel.launch.size, kernel.still_running, kernel.life_ns.tolist()) == (1, 1, [4])


def test_numbers_are_written_in_words() -> None:
    assert listed([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7, 8"
    assert listed(list(range(0, 40, 2)), 3) == "0, 2, 4 and 17 more"
    assert [percent(share) for share in (0.0, 0.004, 0.5, 0.996, 1.0)] == [
        "0%",
        "under 1%",
        "50%",
        "over 99%",
        "100%",
    ]


def threads(times: list[list[int]], **options: Any) -> KernelWarps:
    """Warps of one block, each with the exits of its lanes."""
    exits = [[(ns, 1 << lane) for lane, ns in enumerate(warp)] for warp in times]
    rows: Any = [(0, at, NOT_RECORDED, NOT_RECORDED, warp) for at, warp in enumerate(exits)]
    return warps(rows, (1, 1, 1), lanes_timed=True, **options)


IN_TURN = [5 * lane for lane in range(32)]
LATE_31 = [*IN_TURN[:31], 905]


def test_one_late_lane_of_one_warp_is_named_and_its_boundary_first() -> None:
    (finding,) = found(threads([LATE_31]))
    assert (finding.kind, finding.numbers["late_lanes"]) == ("divergence", [31])
    assert (finding.numbers["delay_p50_ns"], finding.numbers["lane_step_ns"]) == (750, 5)
    assert finding.sentence.startswith(
        "In the one warp that was recorded the lanes exit at different times: lane 31 (mask 0x80000000; "
        "thread 31, the last of its block) last, 750 ns after the others, which exit 5 ns apart, lane by "
        "lane; seen in one warp"
    )
    assert finding.cause.startswith("a boundary that only this lane meets")
    assert found(threads([IN_TURN])) == []


def test_one_late_lane_of_many_warps_is_divergence_and_no_stride() -> None:
    (finding,) = [f for f in found(threads([LATE_31] * 32)) if f.kind != "wave"]
    assert (finding.kind, finding.numbers["late_lanes"], finding.numbers["warps_apart"]) == (
        "divergence", [31], 32,
    )  # fmt: skip
    assert finding.numbers["delay_p50_ns"] == 750
    assert "seen in one warp" not in finding.sentence
    inner = [*IN_TURN[:13], 900, *IN_TURN[14:]]
    (finding,) = [f for f in found(threads([inner] * 32)) if f.kind != "wave"]
    assert finding.numbers["late_lanes"] == [13]
    assert finding.cause.startswith("a branch that the lanes of a warp take differently")


def test_every_eighth_thread_points_to_the_array_index() -> None:
    eighth = [ns + 750 * (lane % 8 == 7) for lane, ns in enumerate(IN_TURN)]
    (finding,) = [f for f in found(threads([eighth] * 32)) if f.kind != "wave"]
    assert (finding.kind, finding.numbers["modulus"], finding.numbers["residues"]) == ("stride", 8, [7])
    assert finding.numbers["delay_p50_ns"] == 750
    # A single warp is too few for ranks: there the lanes leave apart, and their stride is named.
    (finding,) = found(threads([eighth]))
    assert (finding.kind, finding.numbers["stride"]) == ("divergence", 8)
    assert "t mod 8 = 7" in finding.sentence
    assert "seen in one warp" in finding.sentence
    assert finding.cause.startswith("the array index that these threads use: shared-memory bank conflicts")


def test_a_late_thread_at_an_end_of_the_grid_is_found_among_many_warps() -> None:
    noise = np.random.default_rng(1).integers(0, 400, (600, 32))
    quiet = threads(noise.tolist()[:32])
    assert found(quiet) == []
    noise[31, 31] += 60_000
    (finding,) = found(threads(noise.tolist()[:32]), "divergence")
    assert (finding.numbers["late_lanes"], finding.numbers["warps_apart"]) == ([31], 1)
    assert "thread 1023, the last of its block" in finding.sentence
    # One of 600 warps is not a property of the kernel, unless it is the last one of the grid.
    late: Any = [(b, 0, b % 8, 0, [(1_000, FULL)]) for b in range(600)]
    late[599] = (599, 0, 7, 0, [(1_000, FULL >> 1), (1_900, 1 << 31)])
    (finding,) = found(warps(late, (600, 1, 1)), "divergence")
    assert finding.numbers["of"] == "last warp of the grid"
    assert finding.sentence.startswith(
        "In the last warp of the grid the lanes exit at different times: lane 31"
    )
    late[599], late[300] = late[300], (300, *late[599][1:])
    assert found(warps(late, (600, 1, 1)), "divergence") == []


def test_lanes_in_turn_are_not_a_spread_and_halves_are_not_a_turn() -> None:
    rng = np.random.default_rng(4)
    turn = 5.0 * np.arange(32) + rng.integers(0, 3, (4, 32))
    assert without_order(turn).step_ns == pytest.approx(5, abs=0.1)
    # A clock of 32 ns shows a step of 5 ns as 0 or 32.
    assert without_order(turn // 32 * 32).step_ns == 4
    for other in (rng.standard_normal((1, 32)), 750.0 * (np.arange(32) >= 16)[None, :], turn[:, :8]):
        assert without_order(other).step_ns == 0


def test_no_class_is_less_likely_than_an_order_of_its_row() -> None:
    def chance(times: Any) -> float:
        """The chance that lane 31 is as late as it is."""
        row, lane = np.nonzero(np.isfinite(times))
        return chance_in_rows(ranks_in_rows(times[row, lane], row), row, lane == 31)

    tied = np.zeros((1, 32))
    tied[0, 31] = 1
    assert chance(tied) == pytest.approx(1 / 32)
    # Of ten warps in each of which one lane is late, lane 31 is late in four: 2.0e-4 by the binomial law.
    tied = np.zeros((10, 32))
    tied[np.arange(10), [31, 31, 31, 31, 1, 5, 9, 13, 17, 21]] = 1
    assert 1e-4 < chance(tied) < 1e-3
    # Without ties it is the normal law's.
    rows = np.random.default_rng(0).standard_normal((400, 32)) + 0.3 * (np.arange(32) == 31)
    row, lane = np.nonzero(np.isfinite(rows))
    score = score_rows(ranks_in_rows(rows[row, lane], row), row, lane, 32)[31]
    assert chance(rows) == pytest.approx(math.erfc(score / math.sqrt(2)) / 2, rel=0.01)


def test_a_stride_is_found_among_the_lanes_that_were_recorded() -> None:
    every = list(range(32))
    assert stride_of([7, 15, 23, 31], every) == (8, 7)
    assert stride_of([8, 24], [0, 8, 16, 24]) == (16, 8)
    assert stride_of([8, 24], every) == (16, 8)
    assert stride_of([16, 17], every) is None
    assert stride_of([31], every) is None
    assert stride_of([1, 3, 5], every) is None


def test_few_warps_are_listed_one_by_one() -> None:
    kernel = threads([LATE_31, [ns + 2_000 for ns in IN_TURN]])
    first, last = one_by_one(kernel)
    assert (first.leaves_ns, first.spread_ns, first.last_lane) == (0, 905, 31)
    assert (last.leaves_ns, last.spread_ns, last.last_lane) == (2_000, 155, 31)
    # The median of a warp lies between its lanes 15 and 16.
    assert (first.first_thread_ns, first.last_thread_ns) == (-78, None)
    assert (last.first_thread_ns, last.last_thread_ns) == (None, 78)
    assert one_by_one(threads([IN_TURN] * 9)) == []


def test_the_order_of_three_warps_is_seen_and_is_not_a_finding() -> None:
    base = 1_749_147_474_550_023_000
    kernel = threads([[base + 2_000 * warp] for warp in range(3)])
    assert found(kernel) == []
    assert [(row.leaves_ns, row.spread_ns) for row in one_by_one(kernel)] == [
        (0, None),
        (2_000, None),
        (4_000, None),
    ]
    seen = order_of_exits(kernel)
    assert seen is not None
    assert seen.startswith(
        "The 3 warps of a launch exit one after the other, 2.00 µs apart, 4.00 µs from the"
    )
    assert "seen in one launch, where chance alone gives such an order once in 6" in seen
    assert order_of_exits(threads([[0], [4_000], [2_000]])) is None
    assert order_of_exits(threads([[0], [40], [80]])) is None, "less than a probe costs"


def test_three_warps_in_order_in_many_blocks_are_a_finding() -> None:
    rows: Any = [
        (b, w, NOT_RECORDED, NOT_RECORDED, [(2_000 * w + b, FULL)]) for b in range(8) for w in range(3)
    ]
    (finding,) = found(warps(rows, (8, 1, 1)), "wave")
    assert (finding.numbers["warps_per_block"], finding.numbers["step_ns"]) == (3, 2_000)
    assert finding.p_value is not None
    assert finding.p_value >= (1 / 6) ** 8
    assert found(warps(rows[:6], (2, 1, 1)), "wave") == [], "two blocks are in this order once in 36"


times = st.integers(-(1 << 61), 1 << 61) | st.integers(0, 3_000)
warp_rows = st.tuples(
    st.integers(0, 40) | st.integers(0, 1 << 40),
    st.integers(0, 5) | st.integers(0, 1 << 40),
    st.integers(-1, 3) | st.just(NOT_RECORDED),
    times | st.just(NOT_RECORDED),
    st.lists(st.tuples(times, st.integers(0, FULL)), max_size=4),
)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(warp_rows, min_size=1, max_size=80), st.booleans(), st.booleans())
@pytest.mark.filterwarnings("error")
def test_whatever_was_recorded_can_be_looked_at(rows: Any, lanes_timed: bool, mixed: bool) -> None:
    flags = {"lanes_timed": lanes_timed, "rows_mixed": mixed, "is_patched": not lanes_timed}
    kernel = warps(rows, (7, 1 << 31, 1 << 31), **flags)
    for finding in found(kernel):
        json.dumps(finding.as_json(), allow_nan=False)
    json.dumps(one_by_one(kernel), allow_nan=False)
    order_of_exits(kernel)
