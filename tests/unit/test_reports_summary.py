"""What the summary counts, and what it does not count twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from tests.support.recordings import GPU_CLOCK, PAIR, Load, event, loader, span
from tracepipe.analyses.cuda_calls import LAUNCH
from tracepipe.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.analyses.functions import SORTS, functions_of, slowest_calls
from tracepipe.hooks.sets import effect_of, load_set
from tracepipe.libraries import np
from tracepipe.present.writing.rendering import names_within, report_lines
from tracepipe.reports.report import Column, Result, Table
from tracepipe.reports.summary import Options, run


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def table(result: Result, name: str) -> dict[Any, dict[str, Any]]:
    """The rows of a table by their first cell."""
    rows = result.as_json()[name]
    return {next(iter(row.values())): row for row in rows}


def test_calls_inside_others_are_counted_apart(load: Load) -> None:
    result = run(
        load(
            event("B", 1_100, "cudaLaunchKernel"),
            event("B", 1_120, "cuLaunchKernel"),
            event("E", 1_180, "cuLaunchKernel"),
            event("E", 1_200, "cudaLaunchKernel"),
            span(1_300, 1_350, "cuLaunchKernel_ptsz"),
            span(1_400, 1_410, "cuLaunchHostFunc"),
        ),
        Options(all=True),
    )
    activities = table(result, "activities")
    assert (activities["CUDA API calls"]["count"], activities["CUDA API calls"]["total_ns"]) == (3, 160)
    assert activities["  calls inside those"]["count"] == 1
    assert (activities["kernel launches"]["count"], activities["kernel launches"]["total_ns"]) == (2, 150)


def test_functions_of_python_are_called_so(load: Load) -> None:
    result = run(load(span(1_100, 1_150, "step", "hook") | {"layer": "python_function"}), Options(all=True))
    assert table(result, "activities")["Python functions"]["total_ns"] == 50


def test_each_layer_has_its_times(load: Load) -> None:
    warps = {
        "ts_ns": 500_000, "type": "gpu_warp", "name": "k", "clock": GPU_CLOCK, "warp": [0, 1, 2],
        "entry_ns": [0, 0, 0], "exit_ns": [10, 30], "exit_count": [1, 1, 0],
    }  # fmt: skip
    result = run(
        load(
            PAIR,
            span(1_100, 1_140, "ioctl", "syscall"),
            span(1_150, 1_160, "futex", "syscall"),
            event("B", 1_200, "nvidia_ioctl", "kernel"),
            event("B", 1_210, "nv_schedule_work", "scheduler"),
            event("E", 1_220, "nv_schedule_work", "scheduler"),
            event("E", 1_240, "nvidia_ioctl", "kernel"),
            event("I", 1_250, "wakeup", "scheduler"),
            span(1_260, 1_290, "pool_take", "hook") | {"layer": "my pool"},
            span(1_265, 1_285, "malloc", "hook") | {"layer": "libc.so.6"},
            span(1_300, 1_900, "running", "scheduler"),
            span(1_950, 1_957, "k", "gpu_kernel"),
            warps,
        ),
        Options(all=True),
    )
    found = {
        name: (row["count"], row["total_ns"], row["max_ns"])
        for name, row in table(result, "activities").items()
    }
    assert found == {
        "hooked functions": (2, 50, 30),
        "system calls": (2, 50, 40),
        "  ioctl": (1, 40, 40),
        "driver functions": (1, 40, 40),
        "scheduler calls": (1, 10, 10),
        "scheduler events": (1, None, None),
        "threads running": (1, 600, 600),
        "GPU kernels": (1, 7, 7),
        "GPU warps": (3, 40, 30),
    }
    layers = {name: row["layer"] for name, row in table(result, "hooks").items()}
    assert layers == {"pool_take": "my pool", "malloc": "libc.so.6"}
    # Each layer has a table of its own: what waits in the kernel does not stand before the kernels.
    named = {name: list(table(result, name)) for name in ("kernels", "syscalls", "driver")}
    assert named == {
        "kernels": ["k"],
        "syscalls": ["ioctl", "futex"],
        "driver": ["nvidia_ioctl", "nv_schedule_work"],
    }


def test_calls_without_an_end_are_counted_and_not_timed(load: Load) -> None:
    result = run(load(event("B", 1_100, "cuInit"), event("E", 1_200, "lost its begin")), Options(all=True))
    (row,) = result.as_json()["calls"]
    assert (row["name"], row["count"], row["total_ns"], row["p99_ns"]) == ("cuInit", 1, None, None)


def test_memory_events_state_what_was_moved(load: Load) -> None:
    result = run(
        load(
            span(1_050, 1_060, "cuMemAlloc_v2", args={"size_bytes": 99}),
            event("I", 1_100, "alloc", "memory", args={"size": 1_000}),
            event("I", 1_110, "alloc", "memory", args={"size": 3_000}),
            event("I", 1_120, "free", "memory", args={"address": 5}),
            span(1_200, 1_300, "HtoD", "transfer", args={"size": 400}),
            span(1_400, 1_500, "HtoD", "transfer", args={"size": 600}),
            event("I", 1_510, "HtoD", "transfer", args={"size": 7}),
            span(1_600, 1_610, "HtoD", "transfer", gpu=0, args={"size": 400}),
        ),
        Options(all=True),
    )
    moved = table(result, "memory")
    assert list(moved) == ["alloc", "free", "HtoD", "HtoD (GPU)"]
    assert moved["alloc"]["total_bytes"] == 4_000
    assert (moved["free"]["count"], moved["free"]["total_bytes"], moved["free"]["bytes_per_s"]) == (
        1,
        None,
        None,
    )
    copies = moved["HtoD"]
    assert (copies["count"], copies["total_bytes"], copies["p50_bytes"], copies["max_bytes"]) == (
        3,
        1_007,
        400,
        600,
    )
    # The one whose length is not known has no part in the rate: 1000 bytes in 200 ns.
    assert (copies["total_ns"], copies["bytes_per_s"], copies["p50_bytes_per_s"]) == (200, 5e9, 4e9)
    assert moved["HtoD (GPU)"]["bytes_per_s"] == 40e9


def test_bytes_in_all_count_a_copy_once(load: Load) -> None:
    host = [
        event("I", 1_100, "alloc", "memory", args={"size": 1_000}),
        event("I", 1_110, "set", "memory", args={"size": 500}),
        event("I", 1_120, "alloc_host", "memory", args={"size": 70}),
        span(1_200, 1_300, "HtoD", "transfer", args={"size": 400}),
        span(1_400, 1_500, "DtoH", "transfer", args={"size": 600}),
    ]
    gpu = span(1_600, 1_610, "HtoD", "transfer", gpu=0, args={"size": 400})
    for events, row in (
        ([*host, gpu], (1_000, 1, 1_000, 2)),
        ([gpu], (0, 0, 400, 1)),
        ([span(1_100, 1_140, "cuMemAlloc_v2", args={"size_bytes": 64})], (64, 1, 0, 0)),
        ([event("I", 1_100, "alloc", "memory")], (None, 1, 0, 0)),
    ):
        (found,) = run(load(*events), Options(all=True)).as_json()["bytes"]
        assert tuple(found.values()) == row
    assert "bytes" not in run(load(span(1_100, 1_140, "cuInit")), Options(all=True)).as_json()


def test_the_slowest_calls_stand_one_by_one(load: Load) -> None:
    calls = [span(1_000 + at * 100, 1_000 + at * 100 + at % 7, f"cu{at}", tid=at % 2) for at in range(40)]
    inside = [span(9_000, 9_900, "cudaOuter", tid=3), span(9_100, 9_800, "cuInner", tid=3)]
    open_call = event("B", 9_950, "cuNever", tid=4)
    loaded = load(*calls, *inside, open_call, span(1_000, 99_000, "futex", "syscall"))
    (slowest,) = [part for part in run(loaded, Options(all=True)).parts if part.name == "slowest"]
    rows = [*slowest.lazily()]
    assert [row["name"] for row in rows] == [
        "cudaOuter", "cu6", "cu13", "cu20", "cu27", "cu34", "cu5", "cu12", "cu19", "cu26",
    ]  # fmt: skip
    assert (rows[0]["at_ns"], rows[0]["dur_ns"], rows[0]["tid"]) == (9_000 - loaded.facts.start_ns, 900, 3)
    assert len(run(loaded, Options(slowest=2)).as_json()["slowest"]) == 2
    assert "slowest" not in run(loaded, Options(slowest=0)).as_json()


def test_the_slowest_of_many_calls_are_sorted_by_length_then_start(load: Load) -> None:
    dice = random.Random(3)
    lengths = [dice.randrange(60) for _ in range(400)]
    loaded = load(*(span(at * 100, at * 100 + length, "cuX") for at, length in enumerate(lengths)))
    expected = sorted(range(400), key=lambda at: (-lengths[at], at))[:25]
    found = [(start_ns, dur_ns) for _, start_ns, dur_ns, *_ in slowest_calls(loaded, "userspace", 25)]
    assert found == [(at * 100, lengths[at]) for at in expected]


def test_without_cuda_calls_the_slowest_are_of_what_was_recorded(load: Load) -> None:
    rows = run(load(span(1_000, 1_900, "futex", "syscall")), Options(all=True)).as_json()["slowest"]
    assert [row["name"] for row in rows] == ["futex"]


def test_a_recording_of_nothing_is_reported_in_words(load: Load) -> None:
    loaded = load()
    result = run(loaded, Options(all=True))
    assert result.as_json() == {"layers": [], "activities": [], "notes": []}
    lines = list(report_lines([loaded.facts], result, width=80))
    assert "The recording holds no events." in lines
    assert "No calls, system calls, driver functions, kernels or warps were recorded." in lines
    assert not any("count" in line for line in lines)


def test_without_memory_events_the_calls_that_succeeded_are_used(load: Load) -> None:
    result = run(
        load(
            event("B", 1_100, "cudaMalloc", args={"size_bytes": 64}),
            event("B", 1_110, "cuMemAlloc_v2", args={"size_bytes": 64}),
            event("E", 1_120, "cuMemAlloc_v2", args={"result": 0}),
            event("E", 1_130, "cudaMalloc", args={"result": 0}),
            event("B", 1_200, "cuMemAlloc_v2", args={"size_bytes": 1 << 40}),
            event("E", 1_210, "cuMemAlloc_v2", args={"result": 2}),
            span(1_300, 1_320, "cudaMemcpy", args={"size_bytes": 100, "direction": "H2D"}),
            span(1_350, 1_370, "cudaMemcpy", args={"size_bytes": 100, "direction": "HtoD"}),
            span(1_400, 1_420, "cuMemcpyDtoH_v2", args={"size_bytes": 100}),
        ),
        Options(all=True),
    )
    moved = table(result, "memory")
    keys = ("count", "total_bytes", "total_ns", "bytes_per_s")
    assert {what: tuple(row[key] for key in keys) for what, row in moved.items()} == {
        "alloc": (1, 64, 30, None),
        "HtoD": (2, 200, 40, 5e9),
        "DtoH": (1, 100, 20, 5e9),
    }


def test_processes_have_their_own_sums(load: Load) -> None:
    result = run(
        load(
            span(1_100, 1_200, "cuInit", comm="app"),
            span(1_100, 1_110, "cuInit", tid=2),
            span(1_120, 1_150, "ioctl", "syscall", pid=9, tid=9),
            span(1_300, 1_340, "k", "gpu_kernel", pid=9),
        ),
        Options(all=True),
    )
    keys = ("process", "threads", "calls", "calls_ns", "ioctls", "ioctls_ns", "kernels_ns", "running_ns")
    assert [tuple(row[key] for key in keys) for row in result.as_json()["processes"]] == [
        ("app", 2, 2, 110, 0, None, None, None),
        ("vec_add", 1, 0, None, 1, 30, 40, None),
    ]


def test_losses_are_shown_by_layer(load: Load) -> None:
    loss = {"type": "loss", "layer": "syscall", "count": 3, "ts_ns": 1_200}
    result = run(
        load(span(1_100, 1_200, "ioctl", "syscall"), loss, {"type": "loss", "count": 5}), Options(all=True)
    )
    layers = table(result, "layers")
    assert (layers["syscall"]["events"], layers["syscall"]["lost"], layers["syscall"]["lost_percent"]) == (
        1,
        3,
        75,
    )
    assert layers["unknown layer"]["lost"] == 5


@pytest.mark.parametrize(
    ("sort", "first"),
    [("total", "b"), ("count", "c"), ("max", "b"), ("p50", "b"), ("mean", "b"), ("name", "a")],
)
def test_functions_are_listed_by_what_is_asked_for(load: Load, sort: str, first: str) -> None:
    calls = [
        span(1_000, 1_005, "a"),
        span(1_100, 1_190, "b"),
        *(span(1_200 + 9 * n, 1_204 + 9 * n, "c") for n in range(3)),
    ]
    result = run(load(*calls), Options(top=1, sort=sort))
    (row,) = result.as_json()["calls"]
    assert row["name"] == first
    assert result.notes == ["2 more calls are not listed: --top 0 lists all"]
    assert len(run(load(*calls), Options(top=0)).as_json()["calls"]) == 3


@pytest.mark.parametrize("sort", SORTS)
def test_all_functions_are_in_the_same_order_as_the_first_few(load: Load, sort: str) -> None:
    unknown = event("B", 5_000, "open")
    hooked = [span(at, at + 5, "f", "hook") | {"layer": of} for at, of in ((1, "b"), (9, "a"))]
    calls = [span(at * 100, at * 100 + 7 + at % 3, f"f{(7 * at) % 30}") for at in range(60)]
    loaded = load(*hooked, *calls, unknown, span(1, 9, "z"), span(11, 19, "b"))
    every, first = (run(loaded, Options(top=top, sort=sort)).as_json() for top in (0, 99))
    assert (every["calls"], every["hooks"]) == (first["calls"], first["hooks"])


def test_percentiles_are_lengths_that_occurred() -> None:
    values = list(range(1, 101))
    keys = [column.key for column in LENGTH_COLUMNS]
    assert dict(zip(keys, of_values(np.array(values[::-1])), strict=True)) == {
        "total_ns": 5_050, "mean_ns": 50, "p50_ns": 50, "p95_ns": 95, "p99_ns": 99, "max_ns": 100,
    }  # fmt: skip


@pytest.mark.parametrize("values", [[], [7], [1, 2], [5, 1, 9], [3] * 20 + [100], list(range(101))])
def test_both_ways_to_a_distribution_agree(load: Load, values: list[int]) -> None:
    calls = (span(at * 1_000, at * 1_000 + value, "cuX") for at, value in enumerate(values))
    (found,) = functions_of(load(*calls, event("B", 900_000, "cuX")), "userspace", "total", 0).rows
    assert found == ("cuX", "userspace", len(values) + 1, *of_values(np.array(values, np.int64)))


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("cuLaunchKernel", True), ("cuLaunchKernelEx_ptsz", True), ("cudaLaunchKernelExC", True),
        ("__cudaLaunchKernel", True), ("cudaGraphLaunch", True), ("cuLaunchCooperativeKernel", True),
        ("cuLaunchGridAsync", True), ("cuLaunchHostFunc", False), ("cudaLaunchHostFunc", False),
        ("cuModuleLaunch", False),
    ],
)  # fmt: skip
def test_names_that_launch(name: str, launches: bool) -> None:
    assert (LAUNCH.fullmatch(name) is not None) == launches


@pytest.mark.parametrize(
    ("name", "effect"),
    [
        ("cuMemAlloc_v2", ("alloc", "")), ("cuMemcpyHtoD_v2_ptds", ("transfer", "HtoD")),
        ("cudaFree", ("free", "")), ("cudaMemcpyAsync_ptsz", ("transfer", "")), ("cuInit", ("", "")),
    ],
)  # fmt: skip
def test_effects_are_those_of_the_shipped_hooks(name: str, effect: tuple[str, str]) -> None:
    assert effect_of(name) == effect
    assert all(
        effect_of(hook.pattern) == (hook.effect, hook.direction) for hook in load_set("cuda-driver").hooks
    )


KERNEL = (
    "void at::native::(anonymous namespace)::layer_norm<c10::Half, at::acc_type<c10::Half, true> >"
    "(int, c10::Half const*)"
)


def test_a_long_name_is_one_line_without_its_middle(load: Load) -> None:
    loaded = load(span(1_000, 1_500, KERNEL, "gpu_kernel", gpu=0))
    result = run(loaded, Options(all=True))

    def row(width: int, **how: bool) -> str:
        lines = report_lines([loaded.facts], result, width=width, **how)
        return next(line for line in lines if "layer_no" in line)

    assert row(120).startswith("layer_norm<Half, acc_type<Half, true>>")
    assert (row(70)[:14], len(row(70)) <= 70, "…" in row(70)) == ("layer_norm<Hal", True, True)
    assert "~" in row(70, ascii_only=True)
    # What is meant for programs, or asked for, has all that distinguishes kernels.
    short = "at::native::(anonymous namespace)::layer_norm<c10::Half, at::acc_type<c10::Half, true> >"
    assert row(70, full_names=True).startswith(short)
    assert [one["name"] for one in result.as_json()["kernels"]] == [short]


def test_a_group_has_a_line_of_its_own_and_wide_letters_take_two_places() -> None:
    columns = (Column("line", "line"), Column("name", "name"), Column("ns", "on GPU", "ns"))
    rows = [("/home/me/train.py:34 step", "語" * 40, 5), ("/home/me/train.py:34 step", "b", 7)]
    result = Result("", [Table("t", "T", columns, rows, grouped=True)])
    _, _, header, group, wide, narrow = report_lines([], result, width=30)
    assert (header[:4], group) == ("line", "/home/me/train.py:34 step")
    assert cell_len(wide) == 30
    assert narrow.endswith("7 ns")
    assert cell_len(narrow) == 30


def test_groups_of_tracks_that_are_not_processes_are_not_listed(load: Load) -> None:
    result = run(
        load(
            span(1_100, 1_200, "f", "hook", pid=7, tid=7) | {"layer": "python"},
            span(1_100, 1_200, "f", "hook", pid=10_000_007, tid=10_000_007) | {"layer": "python"},
            span(1_100, 1_200, "profiler", "hook", pid=2_147_483_647) | {"layer": "Trace"},
            span(1_300, 1_340, "cuInit", pid=2_147_483_646),
        ),
        Options(all=True),
    )
    assert [row["pid"] for row in result.as_json()["processes"]] == [7, 10_000_007, None]
    (note,) = (note for part in result.parts if "Not listed" in (note := getattr(part, "note", "")))
    assert note.endswith("Not listed: 1 group of another tool's tracks that is not a process.")


def names_shown(names: list[str], width: int) -> list[str]:
    """The first cells of a table with a name and a number in each row."""
    table = Table("t", "", (Column("name", "name"), Column("n", "n", "count")), [(one, 1) for one in names])
    _, *lines = report_lines([], Result("", [table]), width=width, colours=False, ascii_only=False)
    return [line.rsplit(maxsplit=1)[0] for line in lines if line.endswith(" 1")]


@pytest.mark.parametrize("width", [20, 24, 30, 40, 80])
def test_names_that_differ_are_shown_apart_however_little_room_they_have(width: int) -> None:
    start, end = "vectorized_elementwise_kernel<4, ", "Functor<float>, std::array<char*, 2ul> >"
    names = [f"{start}{what}{end}" for what in ("add", "mul", "tanh", "a" * 40, "a" * 39 + "b")]
    names += ["a::f<int>", "b::f<int>", "short"]
    shown = names_shown(names, width)
    assert len(set(shown)) == len(names)
    assert shown[-3:] == ["a::f<int>", "b::f<int>", "short"]
    assert all(len(one) <= width - 2 for one in shown)


@pytest.mark.parametrize("before", ["kernel_of_a_", "kernel_of_a_b_", "漢漢漢漢漢漢"])
def test_names_of_two_kinds_are_shown_apart_too(before: str) -> None:
    ends = [f"{'m' * 40}{one}{'z' * 20}{other}{'y' * 40}" for one in "cd" for other in "efgh"]
    shown = {
        width: names_shown([before + of + end for of in "ST" for end in ends], width)
        for width in range(20, 32)
    }
    assert [len(set(of)) for of in shown.values()] == [2 * len(ends)] * len(shown)


def test_of_names_that_are_alike_the_place_is_shown_where_they_differ() -> None:
    start, end = "vectorized_kernel_of_a_library<4, ", "Functor<float>, Array<char*, 2ul>>"
    shown = names_shown([f"{start}{what}{end}" for what in ("add", "tanh")], 32)
    assert [one.split("…")[1][:5] for one in shown] == ["addFu", "tanhF"]


def test_python_functions_are_counted_without_ranges_of_gpus(load: Load) -> None:
    python = span(1_000, 1_100, "train.py(10): step", "hook", pid=7, tid=7) | {"layer": "python_function"}
    of_gpu = span(1_020, 1_100, "fwd", "hook") | {"layer": "gpu_user_annotation", "gpu": 0, "stream": 7}
    of_gpu = {key: value for key, value in of_gpu.items() if key not in ("pid", "tid")}
    other = span(1_050, 1_080, "Buffer Flush", "hook", pid=7) | {"layer": "overhead"}
    found = run(load(python, of_gpu, other), Options(all=True)).as_json()
    assert [(row["activity"], row["count"], row["total_ns"]) for row in found["activities"]] == [
        ("Python functions", 1, 100),
        ("other functions", 1, 30),
    ]
    assert {row["name"] for row in found["hooks"]} == {"train.py(10): step", "Buffer Flush"}


def test_the_first_screen_tells_kernels_with_long_names_apart() -> None:
    start, end = (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize",
        "_execute_segment_k_off_kernel__5x_cublas",
    )
    applied = "elementwise_kernel<128, 4, gpu_kernel_impl<{}<float>>(X&)::{{lambda(int)#1}}>"
    names = [f"{start}{size}{end}" for size in ("128x128x64", "128x64x64")]
    names += [applied.format(function) for function in ("AddFunctor", "MulFunctor")]
    shown = names_within(names, 24)
    assert len(set(shown)) == len(names) and all(len(one) <= 24 for one in shown)
    assert [one.partition("<")[0] for one in shown[2:]] == ["AddFunctor", "MulFunctor"]


def test_an_error_that_a_kernel_caused_comes_first(load: Load) -> None:
    errors = ["CUDA error in process 42: an illegal memory access. f returned it first (700)."]
    recorded = load(
        span(1000, 1500, "f"), {"type": "footer", "counts": {}, "losses": {}, "cuda_errors": errors}
    )
    for options in (Options(), Options(all=True)):
        first = run(recorded, options).parts[0]
        assert isinstance(first, Table)
        assert [says for (says,) in first.rows] == errors[0].split(". ")
