"""What a call costs at each layer: every nanosecond once, and whose the GPU's work is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recordings import Load, event, loader, span
from tracepipe.analyses.nesting import first_flagged, nearest_of, nearest_of_some
from tracepipe.errors import TracepipeError
from tracepipe.event.intervals import Stretches
from tracepipe.libraries import np
from tracepipe.reports.layers import Options, run
from tracepipe.store.run import load_run

SAMPLE = Path(__file__).parents[2] / "fixtures" / "layered-launch" / "input.jsonl"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def parts(result: Any, call: str) -> dict[str, tuple[int, int | None]]:
    """Layer → all of its time, exclusive and inclusive."""
    return {
        row["layer"]: (row["total_ns"], row["inclusive_ns"])
        for row in result.as_json()["layers"]
        if row["call"] == call
    }


def running(*stretches: tuple[int, int]) -> list[dict[str, Any]]:
    return [span(start_ns, end_ns, "running", "scheduler") for start_ns, end_ns in stretches]


def test_the_sample_of_a_launch_spends_its_time_in_the_driver() -> None:
    result = run(load_run(str(SAMPLE)), Options())
    assert parts(result, "cuLaunchKernel") == {
        "call": (101_000, None),
        "itself": (4_000, None),
        "driver": (97_000, 97_000),
    }
    (share,) = result.as_json()["shares"]
    assert round(share["driver_percent"], 1) == 96.0
    assert share["ioctl_percent"] is None
    assert "1 system call has no length in this recording: it counts as 0 ns" in result.notes


def test_every_nanosecond_goes_to_the_innermost_layer(load: Load) -> None:
    result = run(
        load(
            *running((1_000, 1_140), (1_160, 2_000)),
            span(1_100, 1_200, "cuCtxSynchronize"),
            span(1_110, 1_180, "ioctl", "syscall"),  # off the processor from 1140 to 1160
            span(1_120, 1_170, "nvidia_ioctl", "kernel"),
            span(1_190, 1_195, "futex", "syscall"),
        ),
        Options(),
    )
    assert parts(result, "cuCtxSynchronize") == {
        "call": (100, None),
        "itself": (25, None),
        "ioctl": (20, 70),
        "other system calls": (5, 5),
        "driver": (30, 50),
        "off-CPU": (20, 20),
    }


def test_hooked_functions_count_inside_a_call_and_not_around_it(load: Load) -> None:
    calls = load(
        span(1_100, 1_200, "cudaMalloc"),
        span(1_110, 1_180, "ioctl", "syscall"),
        span(1_105, 1_190, "pool_take", "hook") | {"layer": "my pool"},
        span(1_120, 1_130, "malloc", "hook") | {"layer": "libc"},
        span(1_000, 1_300, "step", "hook") | {"layer": "app"},
        span(1_105, 1_190, "elsewhere", "hook", tid=2),
        span(1_400, 1_500, "cuInit"),
    )
    result = run(calls, Options())
    assert parts(result, "cudaMalloc") == {
        "call": (100, None), "itself": (15, None), "hooked functions": (15, 85), "ioctl": (70, 70),
    }  # fmt: skip
    shares = {row["call"]: row["hooked_functions_percent"] for row in result.as_json()["shares"]}
    assert shares == {"cudaMalloc": 15.0, "cuInit": 0.0}
    tree = [(row["name"], row["layer"]) for row in run(calls, Options(call="1")).as_json()["tree"]]
    assert tree == [
        ("cudaMalloc", "call"), ("  pool_take", "hook"), ("    ioctl", "syscall"), ("      malloc", "hook"),
    ]  # fmt: skip


def test_another_thread_does_not_count(load: Load) -> None:
    result = run(
        load(
            span(1_100, 1_200, "cuInit"),
            span(1_100, 1_200, "ioctl", "syscall", tid=2),
            *running((1_000, 1_050), (1_150, 1_300)),
            span(1_100, 1_200, "cuInit", tid=3),
        ),
        Options(),
    )
    # Thread 1 runs from 1150 on; thread 3 is never seen to run, so that nothing is known of it.
    assert parts(result, "cuInit") == {"call": (200, None), "itself": (150, None), "off-CPU": (50, 50)}


def test_threads_of_a_recording_longer_than_a_search_can_hold_are_distinguished(load: Load) -> None:
    late_ns = 1 << 60
    records = []
    for tid in range(1, 12):
        records += [span(1_100, 1_200, "cuInit", tid=tid), span(late_ns, late_ns + 50, "cuExit", tid=tid)]
        records.append(span(1_110, 1_110 + tid, "ioctl", "syscall", tid=tid))
        records.append(span(late_ns + 10, late_ns + 12, "ioctl", "syscall", tid=tid))
    result = run(load(*records), Options())
    assert parts(result, "cuInit")["ioctl"] == (66, 66)
    assert parts(result, "cuExit")["ioctl"] == (22, 22)


def test_a_runtime_call_and_the_drivers_inside_it_are_one_call(load: Load) -> None:
    recording = load(
        event("B", 1_100, "cudaLaunchKernel"),
        event("B", 1_110, "cuLaunchKernel", launch=5),
        event("E", 1_150, "cuLaunchKernel"),
        event("E", 1_160, "cudaLaunchKernel"),
        span(1_200, 1_290, "k", "gpu_kernel", launch=5, gpu=0),
        span(1_295, 1_299, "of no call", "gpu_kernel", launch=6, gpu=0),
    )
    result = run(recording, Options())
    assert [row["call"] for row in result.as_json()["shares"]] == ["cudaLaunchKernel"]
    assert parts(result, "cudaLaunchKernel")["GPU"] == (90, None)
    inner = run(recording, Options(call="cuLaunchKernel"))
    assert parts(inner, "cuLaunchKernel")["call"] == (40, None)
    assert parts(inner, "cuLaunchKernel")["GPU"] == (90, None)
    (slowest,) = inner.as_json()["slowest"]
    assert (slowest["number"], slowest["at_ns"], slowest["dur_ns"]) == (1, 110, 40)


def test_a_launch_id_that_comes_again_is_another_launch(load: Load) -> None:
    result = run(
        load(
            span(1_100, 1_110, "cuLaunchKernel", launch=1),
            span(1_150, 1_157, "k", "gpu_kernel", launch=1, gpu=0),
            span(1_200, 1_210, "cudaLaunchKernel", launch=1),
            span(1_250, 1_253, "k", "gpu_kernel", launch=1, gpu=0),
        ),
        Options(),
    )
    assert parts(result, "cuLaunchKernel")["GPU"] == (7, None)
    assert parts(result, "cudaLaunchKernel")["GPU"] == (3, None)


def test_kernels_that_no_call_names_are_reported(load: Load) -> None:
    result = run(load(span(1_100, 1_110, "f"), span(1_200, 1_210, "k", "gpu_kernel", launch=9)), Options())
    assert "no call has the launch id of a kernel: 1 kernel is attributed to no call" in result.notes


def test_calls_without_an_end_are_left_out_and_reported(load: Load) -> None:
    result = run(load(event("B", 1_100, "cuInit"), span(1_200, 1_210, "f", tid=2)), Options())
    assert [row["call"] for row in result.as_json()["shares"]] == ["f"]
    assert "1 call has no known length: it is left out" in result.notes


def test_one_call_is_shown_in_its_parts(load: Load) -> None:
    result = run(
        load(
            span(1_050, 1_060, "before"),
            *running((1_000, 1_130), (1_140, 2_000)),
            event("B", 1_100, "cudaLaunchKernel"),
            event("B", 1_110, "cuLaunchKernel", launch=2),
            span(1_120, 1_150, "ioctl", "syscall"),
            event("I", 1_145, "wakeup", "scheduler"),
            event("E", 1_170, "cuLaunchKernel"),
            event("E", 1_200, "cudaLaunchKernel"),
            span(1_300, 1_360, "k", "gpu_kernel", launch=2, gpu=0, stream=7),
        ),
        Options(call="2", top=0),
    )
    tree = [tuple(row.values()) for row in result.as_json()["tree"]]
    assert tree == [
        ("cudaLaunchKernel", "call", 0, 100, 40, 0),
        ("  cuLaunchKernel", "call", 10, 60, 30, 1),
        ("    ioctl", "syscall", 20, 30, 20, 2),
        ("      off-CPU", "off-CPU", 30, 10, 10, 3),
        ("      wakeup", "scheduler", 45, None, None, 3),
        ("k (GPU 0 stream 7)", "GPU", 200, 60, 60, 0),
    ]


@pytest.mark.parametrize(
    ("call", "message"), [("3", "no call 3"), ("0", "no call 0"), ("cuInitt", "no call 'cuInitt'")]
)
def test_a_call_that_is_not_there_is_named(load: Load, call: str, message: str) -> None:
    recording = load(span(1_100, 1_110, "cuInit"), span(1_200, 1_210, "cuInit"))
    with pytest.raises(TracepipeError, match=message) as raised:
        run(recording, Options(call=call))
    assert ("cuInit?" in raised.value.hint) is (call == "cuInitt")


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


@given(SPANS, SPANS)
def test_cover_equals_counting_each_nanosecond(stretches: Any, asked: Any) -> None:
    def columns(pairs: Any) -> tuple[Any, Any]:
        starts = np.array([start for start, _ in pairs], np.int64)
        return starts, starts + np.array([length for _, length in pairs], np.int64)

    union = Stretches(*columns(stretches))
    covered = {ns for start, length in stretches for ns in range(start, start + length)}
    expected = [len(covered & set(range(start, start + length))) for start, length in asked]
    assert union.covered_ns(*columns(asked)).tolist() == expected
    inner = set(range(min(covered, default=0), max(covered, default=0))) - covered
    gaps = union.gaps()
    assert {ns for a, b in zip(gaps.start_ns, gaps.end_ns, strict=True) for ns in range(a, b)} == inner


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.booleans()), max_size=30))
def test_the_nearest_caller_is_what_climbing_gives(rows: Any) -> None:
    parents = [None if at == 0 or pick % 4 == 0 else pick % at for at, (pick, _) in enumerate(rows)]
    wanted = [flag for _, flag in rows]
    above = np.array([-1 if parent is None else parent for parent in parents], np.int32)

    def climb(at: int | None) -> int:
        while at is not None and not wanted[at]:
            at = parents[at]
        return -1 if at is None else at

    flags = np.array(wanted, bool)
    expected = [climb(at) for at in range(len(rows))]
    assert nearest_of(above, flags).tolist() == expected
    assert nearest_of_some(above, flags, np.arange(len(rows))).tolist() == expected
    alone = [flag and climb(parent) < 0 for flag, parent in zip(wanted, parents, strict=True)]
    assert first_flagged(above, flags).tolist() == alone
