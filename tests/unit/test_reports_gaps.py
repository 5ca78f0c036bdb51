"""When the GPUs were idle: which stretches, what the CPU did in them, which call ended them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import PAIR, Load, event, loader, span
from tracepipe.analyses import gpu_work
from tracepipe.reports.gaps import Options, run


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def kernel(start_ns: int, end_ns: int, name: str, **fields: Any) -> dict[str, Any]:
    return span(start_ns, end_ns, name, "gpu_kernel", **{"gpu": 0, "stream": 7} | fields)


def running(*stretches: tuple[int, int], **fields: Any) -> list[dict[str, Any]]:
    return [span(start_ns, end_ns, "running", "scheduler", **fields) for start_ns, end_ns in stretches]


def causes(result: Any, column: str = "total_ns") -> dict[tuple[str, str | None], int]:
    return {(row["state"], row["call"]): row[column] for row in result.as_json()["causes"]}


# The GPU works from 2000 to 2100 and from 3000 to 3050; the recording begins at 1000 and ends at 4000.
EVERY_LAYER = [
    *running((1_000, 2_250), (2_600, 4_000)),
    span(1_500, 1_600, "cuLaunchKernel", launch=1),
    kernel(2_000, 2_100, "first", launch=1),
    # In the gap: 50 in user code, then a call with an ioctl in which the driver sleeps.
    span(2_150, 2_800, "cuMemAlloc_v2"),
    span(2_200, 2_700, "ioctl", "syscall"),
    span(2_220, 2_650, "nvidia_ioctl", "kernel"),
    span(2_850, 2_870, "read", "syscall"),
    span(2_900, 2_960, "cudaLaunchKernel"),
    span(2_910, 2_950, "cuLaunchKernel", launch=2),
    kernel(3_000, 3_050, "second", launch=2),
]


def test_every_nanosecond_of_a_gap_goes_to_what_the_cpu_did(load: Load) -> None:
    result = run(load(*EVERY_LAYER), Options())
    assert causes(result) == {
        ("user code", None): 50 + 50 + 30 + 40,  # 2100-2150, 2800-2850, 2870-2900, 2960-3000
        ("CUDA call", "cuMemAlloc_v2"): 50 + 100,  # 2150-2200, 2700-2800
        ("ioctl", "cuMemAlloc_v2"): 20 + 50,  # 2200-2220, 2650-2700
        ("driver", "cuMemAlloc_v2"): 30 + 50,  # 2220-2250, 2600-2650
        ("off-CPU", "cuMemAlloc_v2"): 350,
        ("system call", "read"): 20,
        ("CUDA call", "cudaLaunchKernel"): 60,
        ("CUDA call", "cuLaunchKernel"): 0,  # before the first kernel alone
    }
    (gpu,) = result.as_json()["gpus"]
    assert (gpu["busy_ns"], gpu["idle_ns"], gpu["gaps"], gpu["p99_ns"]) == (150, 900, 1, 900)
    assert (gpu["before_ns"], gpu["after_ns"]) == (1_000, 950)
    assert round(gpu["idle_percent"], 3) == round(100 * 900 / 1_050, 3)
    assert gpu["queued_ns"] == 40  # the call returned at 2960, the kernel starts at 3000
    assert causes(result, "before_ns")[("CUDA call", "cuLaunchKernel")] == 100
    assert causes(result, "before_ns")[("user code", None)] == 900
    assert causes(result, "after_ns")[("user code", None)] == 950
    assert not [note for note in result.notes if "not recorded" in note]


def test_gaps_are_ranked_with_what_was_before_and_after_and_who_ended_them(load: Load) -> None:
    result = run(load(*EVERY_LAYER), Options())
    rows = [
        (row["at_ns"], row["dur_ns"], row["previous"], row["following"], row["ended_by"], row["cause"])
        for row in result.as_json()["gaps"]
    ]
    assert rows == [
        (0, 1_000, "(start of the recording)", "first", "cuLaunchKernel", "user code"),
        (2_050, 950, "second", "(end of the recording)", None, "user code"),
        (1_100, 900, "first", "second", "cudaLaunchKernel", "off-CPU in cuMemAlloc_v2"),
    ]
    least = run(load(*EVERY_LAYER), Options(min="0.92us", top=1))
    assert [row["dur_ns"] for row in least.as_json()["gaps"]] == [1_000]
    assert "1 gap shorter than 0.92us counts only in the table of the GPUs: 900 ns in total" in least.notes
    assert "1 more gap is not listed: --top 0 lists all" in least.notes


def test_a_gap_is_where_no_kernel_copy_or_warp_is(load: Load) -> None:
    warps = {
        "ts_ns": 3_000, "type": "gpu_warp", "name": "w", "gpu": 0, "launch": 9, "warp": [0, 1],
        "entry_ns": [0, 40], "exit_ns": [50, 60],
    }  # fmt: skip
    result = run(
        load(
            kernel(2_000, 2_100, "a", stream=1),
            kernel(2_050, 2_200, "b", stream=2),
            span(2_200, 2_300, "HtoD", "transfer", gpu=0, stream=3),
            span(2_350, 2_360, "DtoH", "transfer"),  # a call on the host
            warps,
            kernel(2_000, 2_500, "other", gpu=1),
        ),
        Options(),
    )
    assert [(g["gpu"], g["busy_ns"], g["idle_ns"], g["gaps"]) for g in result.as_json()["gpus"]] == [
        (0, 300 + 100, 700, 1),
        (1, 500, 0, 0),
    ]
    (gap,) = (g for g in result.as_json()["gaps"] if g["previous"] == "HtoD")
    assert (gap["at_ns"], gap["dur_ns"], gap["following"]) == (1_300, 700, "w")
    assert gap["cause"] == "unknown"


def test_hooked_functions_are_distinguished_from_user_code(load: Load) -> None:
    hooks = (
        # Around a call, in a call, and two layers that overlap in user code.
        span(2_120, 2_840, "step", "hook") | {"layer": "app"},
        span(2_160, 2_190, "inside", "hook") | {"layer": "app"},
        span(2_965, 2_985, "load", "hook") | {"layer": "app"},
        span(2_970, 2_980, "malloc", "hook") | {"layer": "libc"},
    )
    another = span(2_300, 2_400, "cuEventQuery", tid=5)
    result = run(load(*EVERY_LAYER, another, *hooks), Options())
    found = causes(result)
    assert found["hooked functions", "step"] == 30 + 40  # 2120-2150, 2800-2840
    assert found["hooked functions", "load"] == 20
    assert found["CUDA call", "cuMemAlloc_v2"] == 50 + 100, "the call is innermost"
    assert found["user code", None] == 170 - 70 - 20
    threads = {row["tid"]: row for row in result.as_json()["threads"]}
    assert (threads[1]["hooked_functions_ns"], threads[1]["user_code_ns"]) == (90, 80)
    plain = run(load(*EVERY_LAYER, another), Options()).as_json()
    assert all("hooked_functions_ns" not in row for row in plain["threads"])


def test_missing_layers_are_reported_and_user_code_is_not_claimed(load: Load) -> None:
    result = run(
        load(
            span(1_500, 1_600, "cuLaunchKernel", launch=1),
            kernel(2_000, 2_100, "k", launch=1),
            span(2_200, 2_300, "cuLaunchKernel", launch=2),
            kernel(2_400, 2_500, "k", launch=2),
        ),
        Options(),
    )
    assert causes(result) == {("user or unrecorded", None): 200, ("CUDA call", "cuLaunchKernel"): 100}
    messages = [note for note in result.notes if note.startswith("not recorded")]
    assert [note.split(":")[1].strip() for note in messages] == ["syscall", "kernel", "scheduler"]
    assert "off-CPU is unknown" in messages[-1]


def test_without_launch_ids_the_last_launch_of_the_process_is_taken_and_marked(load: Load) -> None:
    result = run(
        load(
            span(1_500, 1_510, "cudaLaunchKernel"),
            span(1_600, 1_700, "cudaMemcpyAsync", tid=2),
            span(1_650, 1_660, "cudaLaunchKernel", pid=8, tid=8),
            kernel(2_000, 2_100, "k"),
            span(2_500, 2_600, "HtoD", "transfer", gpu=0, stream=7),
        ),
        Options(),
    )
    ended = {row["following"]: (row["ended_by"], row["tid"]) for row in result.as_json()["gaps"]}
    assert ended["k"] == ("cudaLaunchKernel ?", 1)
    assert ended["HtoD"] == ("cudaMemcpyAsync ?", 2)
    assert result.as_json()["gpus"][0]["queued_ns"] == 0  # not guessed


def test_each_thread_that_uses_cuda_has_its_own_time(load: Load) -> None:
    result = run(load(*EVERY_LAYER, span(2_300, 2_400, "cuEventQuery", tid=5)), Options())
    threads = {row["tid"]: row for row in result.as_json()["threads"]}
    assert (threads[1]["off_cpu_ns"], threads[1]["driver_ns"], threads[1]["user_code_ns"]) == (350, 80, 170)
    assert (threads[5]["cuda_call_ns"], threads[5]["user_code_ns"]) == (100, 800)


def test_a_thread_that_does_not_run_yet_is_in_no_user_code(load: Load) -> None:
    result = run(
        load(
            *running((1_800, 3_000)),
            event("B", 2_900, "cuCtxSynchronize"),
            span(1_850, 1_900, "cuLaunchKernel", launch=1),
            kernel(2_000, 2_100, "k", launch=1),
            event("I", 4_000, "last", "syscall", tid=9),
        ),
        Options(),
    )
    assert causes(result, "before_ns")[("not running", None)] == 800
    # It sleeps in a call at the end, and is not seen to run again.
    assert causes(result, "after_ns")[("off-CPU", "cuCtxSynchronize")] == 1_000


def test_context_switch_points(load: Load) -> None:
    result = run(
        load(
            span(1_100, 1_200, "cuCtxSetCurrent"),
            span(1_300, 1_310, "cuCtxGetCurrent"),
            span(1_400, 1_450, "nv_bind_context_x", "kernel"),
            kernel(2_000, 2_100, "a", pid=1),
            kernel(2_150, 2_200, "b", pid=2),
            kernel(2_250, 2_300, "c", pid=2),
            kernel(2_390, 2_400, "d", pid=1),
        ),
        Options(),
    )
    points = [(row["at_ns"], row["name"], row["dur_ns"]) for row in result.as_json()["context_points"]]
    assert points == [
        (100, "cuCtxSetCurrent", 100),
        (400, "nv_bind_context_x", 50),
        (1_150, "vec_add 1 → vec_add 2", 50),
        (1_390, "vec_add 2 → vec_add 1", 90),
    ]
    counted = {row["name"]: (row["count"], row["in_idle"]) for row in result.as_json()["contexts"]}
    assert counted["vec_add 1 → vec_add 2"] == (1, 1)
    assert counted["cuCtxSetCurrent"] == (1, 0)


def test_context_switch_points_are_listed_where_no_work_of_a_gpu_is_known(load: Load) -> None:
    shown = run(load(span(1_400, 1_450, "nv_bind_context_x", "kernel")), Options()).as_json()
    assert [(row["name"], row["dur_ns"], row["in_idle"]) for row in shown["context_points"]] == [
        ("nv_bind_context_x", 50, None)
    ]
    assert [(row["count"], row["in_idle"]) for row in shown["contexts"]] == [(1, None)]


def test_a_gap_within_the_bound_of_the_clock_and_lost_events_are_reported(load: Load) -> None:
    clock = {"clock": "globaltimer:0"}
    result = run(
        load(
            PAIR,
            kernel(500_000, 500_010, "a", **clock),
            kernel(500_015, 500_020, "b", **clock),
            {"type": "loss", "layer": "gpu_kernel", "count": 4},
        ),
        Options(),
    )
    assert next(note for note in result.notes if "shorter than the error bound" in note).startswith("1 gap")
    assert "4 events of the GPU were lost: it may have worked where it counts as idle" in result.notes


def test_without_work_on_a_gpu_nothing_is_claimed(load: Load) -> None:
    entry = event("E", 2_000, "k", "gpu_thread", block=[0, 0, 0], thread=[0, 0, 0])
    result = run(load(span(1_100, 1_200, "cuInit"), entry), Options())
    assert result.parts == []
    assert (
        result.notes[0] == "no work of a GPU (kernel, copy, warp) was recorded, so its idle time is not known"
    )
    assert result.notes[2].startswith("1 entry or exit of single threads is left out")


def test_the_busiest_of_very_many_gpus_are_examined(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_work, "GPUS_MAX", 2)
    work = [
        kernel(at, at + 10, "k", gpu=gpu)
        for gpu, count in enumerate((3, 1, 2, 1))
        for at in range(0, 20 * count, 20)
    ]
    result = run(load(*work), Options())
    assert [row[0] for row in result.parts[0].rows] == [0, 2]
    assert "2 more GPUs, with less work, are not analyzed" in result.notes


def test_functions_of_python_are_called_so(load: Load) -> None:
    step = span(2_120, 2_840, "step", "hook") | {"layer": "python_function"}
    assert causes(run(load(*EVERY_LAYER, step), Options()))["Python functions", None] == 30 + 40


def test_the_threads_with_the_longest_time_in_calls_are_listed(load: Load) -> None:
    calls = [span(1_000 + at, 2_000 + 2 * at, "cuLaunchKernel", tid=at + 1) for at in range(70)]
    work = [span(ns, ns + 10, "k", "gpu_kernel", gpu=0) for ns in (3_000, 4_000)]
    for top, listed, others in (
        (0, 64, ", which were in calls for a shorter time, are not listed"),
        (3, 3, "64"),
    ):
        result = run(load(*calls, *work), Options(top=top))
        tids = [row["tid"] for row in result.as_json()["threads"]]
        assert tids == list(range(70, 70 - listed, -1))
        (note,) = (note for note in result.notes if "threads that use CUDA" in note)
        assert note.startswith(f"{70 - listed} more") and note.endswith(others)


def test_as_many_rows_as_an_option_can_ask_for_are_all(load: Load) -> None:
    recording = load(kernel(2_000, 2_100, "a"), kernel(2_200, 2_300, "b"), kernel(2_400, 2_500, "c"))
    of_all, most = (run(recording, Options(top=top)).as_json() for top in (0, 2**31 - 1))
    assert of_all == most
