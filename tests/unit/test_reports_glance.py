"""What `summary` says of GPUs before it counts: busy, overlap, launches, collectives, memory, lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import Load, event, loader, span
from tracepipe.analyses.gpu_work import COMMUNICATION, COMPUTE, COPIES, purpose_of
from tracepipe.kernel_names import short_kernel_name
from tracepipe.present.writing.rendering import report_lines
from tracepipe.reports import memory
from tracepipe.reports.summary import Options, run

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def kernel(start_ns: int, end_ns: int, name: str = "gemm", launch: int = 0, **fields: Any) -> dict[str, Any]:
    fields = {"gpu": 0, "stream": 7, **({"launch": launch} if launch else {}), **fields}
    return span(start_ns, end_ns, name, "gpu_kernel", **fields)


def called(start_ns: int, end_ns: int, launch: int, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return span(start_ns, end_ns, name, launch=launch)


def glance(load: Load, *records: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The sentences, and all figures."""
    found = run(load(*records), Options(all=True)).as_json()
    return [row["says"] for row in found.get("glance", [])], found


def test_work_at_one_time_counts_once_as_busy_and_as_hidden(load: Load) -> None:
    _, found = glance(
        load,
        kernel(2_000, 2_400),
        kernel(2_300, 2_700, NCCL, stream=8),
        kernel(2_500, 2_600, stream=9),
        span(2_650, 2_750, "HtoD", "transfer", gpu=0, stream=10, args={"size": 4}),
        kernel(2_900, 3_000),
    )
    (row,) = found["gpu_time"]
    assert row == {
        "gpu": 0,
        "process": "vec_add 1",
        "span_ns": 1_000,
        "busy_percent": 85.0,
        "compute_percent": 60.0,
        "communication_percent": 40.0,
        "copies_percent": 10.0,
        "idle_percent": 15.0,
        "communication_beside_percent": 50.0,
        "copies_beside_percent": 50.0,
        "unasked_percent": None,
    }


@pytest.mark.parametrize(
    ("asked_ns", "says"),
    [
        (2_900, "For 90.0% of the idle time no work was launched: the CPU is late."),
        (2_150, "For 85.0% of the idle time the next work was already launched."),
    ],
)
def test_a_gpu_is_idle_for_want_of_work_or_with_some_queued(load: Load, asked_ns: int, says: str) -> None:
    sentences, _ = glance(
        load,
        called(1_900, 1_950, 1),
        kernel(1_960, 2_000, "first", 1),
        called(asked_ns, asked_ns + 10, 2),
        kernel(3_000, 3_100, "second", 2),
    )
    assert sentences[0].endswith(says)


def test_a_busy_gpu_is_not_attributed_to_the_cpu(load: Load) -> None:
    launches = [called(1_100, 1_110, 1), called(1_120, 1_130, 2)]
    sentences, _ = glance(load, *launches, kernel(2_000, 2_900, "a", 1), kernel(2_950, 3_000, "b", 2))
    assert sentences == ["GPU 0: busy 95.0% of 1.00 µs, idle 5.0%."]


def test_delays_are_from_the_return_of_a_call_and_the_queue_is_what_has_not_started(load: Load) -> None:
    _, found = glance(
        load,
        called(1_100, 1_200, 1),
        called(1_210, 1_220, 2),
        called(1_230, 1_240, 3),
        # It began before its call returned.
        kernel(1_190, 1_300, "a", 1),
        kernel(1_300, 1_400, "b", 2),
        # Of a graph that one call launched the first kernel counts.
        kernel(1_400, 1_500, "c", 3),
        kernel(1_500, 1_600, "d", 3),
    )
    (row,) = found["launch_delay"]
    assert row == {
        "gpu": 0, "launches": 3, "p50_ns": 80, "p99_ns": 160, "max_ns": 160, "queue_p50": 1, "queue_max": 2
    }  # fmt: skip


def test_who_comes_last_to_a_collective_makes_the_others_wait(load: Load) -> None:
    sentences, found = glance(
        load,
        kernel(2_000, 2_500, NCCL),
        kernel(2_400, 2_510, NCCL, gpu=1),
        kernel(3_000, 3_110, NCCL),
        kernel(3_050, 3_100, NCCL, gpu=1),
        # These two are of no collective of both: one is over before the other begins.
        kernel(4_000, 4_100, NCCL),
        kernel(4_200, 4_300, NCCL, gpu=1),
        # The other GPU has none of these.
        kernel(5_000, 5_100, "ncclDevKernel_SendRecv"),
    )
    rows = {row["gpu"]: row for row in found["collectives"]}
    assert {row["name"] for row in rows.values()} == {f"{NCCL} (2)"}
    times = {
        gpu: [row[key] for key in row if key not in ("name", "gpu", "process")] for gpu, row in rows.items()
    }
    assert times == {"GPU 0": [0, 450, 160, 0], "GPU 1": [2, 0, 160, 450]}
    assert "GPU 1 is the last to start 2 of 2 collectives; the others wait 450 ns for it." in sentences
    lines = report_lines([], run(load(kernel(1, 2, NCCL)), Options(all=True)), width=120)
    assert not any("comes last" in line for line in lines)


def test_the_process_is_named_whose_work_a_gpu_does(load: Load) -> None:
    """By its kernels and by the calls that launched them; none where there are several."""

    def of(pid: int, record: dict[str, Any]) -> dict[str, Any]:
        return record | {"pid": pid, "tid": pid, "comm": f"rank{pid}"}

    without_pid = {key: one for key, one in kernel(2_400, 2_510, NCCL, 5, gpu=1).items() if key != "pid"}
    sentences, found = glance(
        load,
        of(11, called(1_900, 1_910, 4)),
        kernel(2_000, 2_500, NCCL, 4, gpu=0, pid=11),
        of(12, called(2_100, 2_110, 5)),
        without_pid,
        kernel(3_000, 3_100, "a", gpu=2, pid=11),
        kernel(3_200, 3_300, "b", gpu=2, pid=13),
    )
    assert [row["process"] for row in found["gpu_time"]] == ["rank11 11", "rank12 12", None]
    assert [(row["gpu"], row["process"]) for row in found["collectives"]] == [
        ("GPU 0", "rank11 11"),
        ("GPU 1", "rank12 12"),
    ]
    assert (
        "GPU 1 (rank12 12) is the last to start 1 of 1 collective; the others wait 400 ns for it."
        in sentences
    )


def test_kernels_that_were_left_out_make_no_gpu_idle(load: Load) -> None:
    launches = [called(1_000 + 20 * at, 1_010 + 20 * at, at) for at in range(1, 11)]
    sentences, _ = glance(load, *launches, kernel(2_000, 2_100, NCCL, 1), kernel(2_800, 3_000, NCCL, 2))
    assert sentences == [
        "Only 2 kernels of 10 launches were recorded: the GPUs were busy for longer than shown here."
    ]


@pytest.mark.parametrize(
    ("name", "is_leak"),
    [("void at::native::vectorized_elementwise_kernel<4>(int)", False), ("vectorAdd", True)],
)
def test_segments_of_a_caching_allocator_are_no_leaks(load: Load, name: str, is_leak: bool) -> None:
    records = (
        event("I", 1_100, "alloc", "memory", gpu=0, args={"size": 2 << 20, "address": "0x100"}),
        event("I", 1_200, "alloc", "memory", gpu=0, args={"size": 4 << 20, "address": "0x900"}),
        event("I", 1_300, "free", "memory", gpu=0, args={"address": "0x100"}),
        kernel(2_000, 2_100, name),
    )
    sentences, found = glance(load, *records)
    (row,) = found["peak_memory"]
    assert (row["peak_bytes"], row["at_ns"], row["kept"], row["kept_bytes"]) == (6 << 20, 200, 1, 4 << 20)
    why = "" if is_leak else (
        ". PyTorch's caching allocator keeps its segments until the end: the 1 of 2 that are not freed are "
        "not a leak"
    )  # fmt: skip
    assert sentences[-1] == f"Peak memory: 6.00 MiB on GPU 0{why}."
    notes = memory.run(load(*records), memory.Options()).notes
    assert any("not a leak" in note for note in notes) is not is_leak


def test_the_line_that_costs_most_is_named(load: Load) -> None:
    def stack(number: int, line: int) -> dict[str, Any]:
        frames = [{"function": "step", "file": "/home/me/train.py", "line": line}]
        return {"type": "stack", "id": number, "frames": frames}

    sentences, found = glance(
        load,
        stack(1, 34),
        stack(2, 51),
        called(1_100, 1_110, 1) | {"stack": 1},
        called(1_200, 1_210, 2) | {"stack": 2},
        kernel(2_000, 2_300, "a", 1),
        kernel(2_300, 2_400, "b", 2),
    )
    assert [row["gpu_ns"] for row in found["python_lines"]] == [300, 100]
    assert "train.py:34" in sentences[-1]
    assert sentences[-1].endswith("launches 75.0% of the GPU's work.")


def test_without_lines_the_range_that_costs_most_is_named(load: Load) -> None:
    sentences, found = glance(
        load,
        span(1_000, 1_150, "forward", "annotation"),
        span(1_090, 1_120, "aten::mm", "annotation", domain="cpu_op"),
        called(1_100, 1_110, 1),
        kernel(2_000, 2_300, "a", 1),
    )
    assert [row["name"] for row in found["gpu_ranges"]] == ["forward"]
    assert sentences[-1] == "The range forward keeps the GPU busy for 300 ns."


def test_without_a_gpu_none_is_mentioned(load: Load) -> None:
    sentences, found = glance(load, span(1_100, 1_140, "ioctl", "syscall"))
    assert sentences == []
    assert not {"gpu_time", "kernels", "launch_delay", "peak_memory"} & found.keys()
    assert run(load(span(1_100, 1_140, "ioctl", "syscall")), Options(all=True)).parts[0].name == "layers"


@pytest.mark.parametrize(
    ("name", "purpose"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", COMMUNICATION),
        ("ncclDevKernel_Broadcast_RING_LL", COMMUNICATION),
        ("void vllm::cross_device_reduce_1stage<float, 2>(vllm::RankData*)", COMMUNICATION),
        ("two_shot_all_reduce_kernel", COMMUNICATION),
        ("void deep_ep::internode::dispatch<false>(int4*)", COMMUNICATION),
        ("_Z24ncclDevKernel_Generic_4K24ncclDevKernelArgsStorage.kd", COMMUNICATION),
        ("void at::native::reduce_kernel<512, 1, all_reduce>(int)", COMPUTE),
        ("void cutlass::Kernel<cutlass_80_tensorop>(int)", COMPUTE),
        ("_ZN2at6native13reduce_kernelILi512ELi1EEEvi", COMPUTE),
        ("__amd_rocclr_copyBufferAligned.kd", COPIES),
        ("__amd_rocclr_fillBufferAligned", COPIES),
        ("__amd_rocclr_streamOpsWait", COMPUTE),
    ],
)
def test_the_purpose_of_a_kernel_is_known_by_its_name(name: str, purpose: int) -> None:
    assert purpose_of(short_kernel_name(name)) == purpose
