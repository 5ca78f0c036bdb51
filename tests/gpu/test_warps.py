"""Every warp of real kernels is recorded, and the program computes what it computes without a recorder."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.gpu.bench import Bench, assert_complete
from tracepipe.tracer.request import CaptureRequest

pytestmark = pytest.mark.gpu

# Every kernel of these ends, and all its warps have room.
WHOLE = (
    "vector_add", "odd_block", "three_returns", "each_alone", "grid_stride", "three_dimensions", "empty_grid",
    "tiny", "long", "cluster", "no_sync", "reset", "streams", "large", "cooperative",
)  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_no_warp_is_missing_and_results_are_the_same(bench: Bench, name: str) -> None:
    native, recorded = bench.case(name)
    assert recorded.printed == native.printed
    assert recorded.exit_code == native.exit_code
    assert recorded.renderer.losses == {}
    assert recorded.lost == 0
    assert recorded.counts["gpu_warp"] == native.launched
    assert_complete(recorded)


def test_a_trap_leaves_the_program_its_error_and_counts_what_it_took_along(bench: Bench) -> None:
    native, recorded = bench.case("trap")
    assert recorded.printed == native.printed
    assert recorded.exit_code == native.exit_code
    warps = recorded.counts.get("gpu_warp", 0) + recorded.renderer.losses["gpu_warp"]
    assert warps == 32 * 4 + 256 * 8


def test_a_kernel_starts_after_the_call_that_launched_it(bench: Bench) -> None:
    _, recorded = bench.case("tiny")
    pairs = recorded.of("clock")
    assert pairs
    shift_ns = pairs[0]["host_lo_ns"] - pairs[0]["source_ns"]
    calls = {call["launch"]: call["ts_ns"] for call in recorded.of("userspace") if "launch" in call}
    kernels = recorded.of("gpu_kernel")
    assert len(kernels) == 10_000
    # The pair is at most a second old: 10 ppm of drift are 10 µs.
    assert all(kernel["ts_ns"] + shift_ns > calls[kernel["launch"]] - 10_000 for kernel in kernels)


def test_calls_have_their_arguments_and_effects(bench: Bench) -> None:
    _, recorded = bench.case("vector_add")
    begun = [call for call in recorded.of("userspace") if call["phase"] == "B"]
    calls = {call["launch"]: call for call in begun if "launch" in call}
    kernels = recorded.of("gpu_kernel")
    assert len(kernels) == 10
    for kernel in kernels:
        needs = kernel["args"]["registers"], kernel["args"]["shared_bytes"]
        assert 4 <= needs[0] <= 64 and needs[1] == 0
        args = calls[kernel["launch"]]["args"]
        assert (args["grid"], args["block"], args["kernel"]) == ([4096, 1, 1], [256, 1, 1], "vectorAdd")
    runtime = [call["args"] for call in begun if "cudaLaunchKernel" in call["name"]]
    assert [(args["grid"], args["kernel"]) for args in runtime] == [([4096, 1, 1], "vectorAdd")] * 10
    size = 4 << 20
    copies = [event for event in recorded.of("transfer") if event["args"]["size"] == size]
    assert [event["name"] for event in copies] == ["HtoD"] * 3 + ["DtoH"]
    taken = [event["args"] for event in recorded.of("memory") if event["args"].get("size") == size]
    assert len(taken) == 3
    assert {args["address"] for args in taken} == {
        event["args"]["to"] for event in copies if event["name"] == "HtoD"
    }
    results = {call["args"]["result_name"] for call in recorded.of("userspace") if call["phase"] == "E"}
    assert results >= {"CUDA_SUCCESS", "cudaSuccess"}


def test_only_selected_launches_are_recorded(bench: Bench) -> None:
    _, recorded = bench.case("tiny", CaptureRequest(gpu_kernels="^tiny", gpu_launches="3-5", calls="none"))
    assert [kernel["name"] for kernel in recorded.of("gpu_kernel")] == ["tiny"] * 3
    assert recorded.counts == {"gpu_kernel": 3, "gpu_warp": 12}
    _, recorded = bench.case("vector_add", CaptureRequest(gpu_kernels="nothing like it", calls="none"))
    assert recorded.counts == {}


def test_the_first_launches_of_each_kernel_are_recorded(bench: Bench) -> None:
    native, recorded = bench.case("phases", CaptureRequest(gpu_launches_per_kernel=3, calls="none"))
    assert (recorded.printed, recorded.exit_code) == (native.printed, 0)
    names = Counter(kernel["name"] for kernel in recorded.of("gpu_kernel"))
    assert names == {"tiny": 3, "vectorAdd": 3, "gridStride": 3}
    assert recorded.of("loss") == []


def test_a_launch_beyond_the_memory_is_recorded_in_part_and_the_rest_counted(bench: Bench) -> None:
    native, recorded = bench.case("large", CaptureRequest(gpu_memory_bytes=16 << 20))
    assert recorded.printed == native.printed
    assert recorded.counts["gpu_warp"] > 0
    counted = recorded.counts["gpu_warp"] + recorded.renderer.losses["gpu_warp"]
    assert counted == native.launched


STEP = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).cuda()
x, y = torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
a = torch.randn(512, 512, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(20):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    rows = torch.softmax(a @ a, -1).sum()
print(loss.item(), rows.item())
"""


def test_a_training_step_of_pytorch_is_complete_and_computes_the_same(bench: Bench) -> None:
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip("PyTorch is not installed")
    native = bench.native(sys.executable, "-c", STEP)
    recorded = bench.record(sys.executable, "-c", STEP)
    assert recorded.printed == native.printed
    assert recorded.renderer.losses == {}
    assert len(recorded.of("gpu_kernel")) > 200
    assert_complete(recorded)
