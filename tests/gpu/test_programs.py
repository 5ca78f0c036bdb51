"""Programs that start kernels in other ways: graphs, other kernels, several GPUs, Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.bench import Bench, Run, assert_complete

pytestmark = pytest.mark.gpu

# Kernels that each case launches by its graphs.
GRAPHS = {
    "graph": 5 * 12,
    "graph_four_times": 4 * 6,
    "graph_twice_at_once": 2 * 6,
    "two_graphs": 20 * (4 + 3),
    "graph_update": 3 * 2 * 2,
}


def assert_same(recorded: Run, native: Run) -> None:
    assert (recorded.printed, recorded.exit_code) == (native.printed, native.exit_code)


def assert_whole(recorded: Run, native: Run) -> None:
    """The program did what it does alone, and every warp that it says it launched is there."""
    assert_same(recorded, native)
    assert recorded.renderer.losses == {}
    assert recorded.lost == 0
    assert recorded.counts["gpu_warp"] == native.launched
    assert_complete(recorded)


@pytest.mark.parametrize("name", GRAPHS)
def test_all_warps_of_a_graphs_kernels_are_recorded(bench: Bench, name: str) -> None:
    native, recorded = bench.case(name)
    assert_whole(recorded, native)
    assert recorded.counts["gpu_kernel"] == GRAPHS[name]


def test_each_gpu_has_its_own_clock_and_warps(bench: Bench) -> None:
    if bench.gpus < 2:
        pytest.skip("there is one GPU")
    native, recorded = bench.case("devices")
    assert_whole(recorded, native)
    gpus = range(bench.gpus)
    assert [gpu["index"] for gpu in recorded.renderer.gpus] == list(gpus)
    assert {pair["clock"] for pair in recorded.of("clock")} == {f"globaltimer:{gpu}" for gpu in gpus}
    for gpu in gpus:
        batches = [batch for batch in recorded.of("gpu_warp") if batch["gpu"] == gpu]
        assert sum(len(batch["warp"]) for batch in batches) * bench.gpus == native.launched
        assert {batch["clock"] for batch in batches} == {f"globaltimer:{gpu}"}


def test_kernels_launched_by_kernels_are_recorded_and_their_parents_counted(bench: Bench) -> None:
    try:
        program = bench.built("nested", "-rdc=true")
    except subprocess.CalledProcessError:
        pytest.skip("CUDA's device runtime (libcudadevrt.a) is not installed")
    native, recorded = bench.native(str(program)), bench.record(str(program))
    assert_same(recorded, native)
    parents, children = 5 * 4 * 3, 5 * 4 * 3 * 2
    assert native.launched == parents
    by_name = {"parent": 0, "child": 0}
    for batch in recorded.of("gpu_warp"):
        by_name[batch["name"]] += len(batch["warp"])
    assert by_name["child"] == children
    # What Compute Sanitizer does not show of the parents is reported.
    assert by_name["parent"] + recorded.renderer.losses.get("gpu_warp", 0) == parents
    reasons = [loss["reason"] for loss in recorded.of("loss")]
    assert by_name["parent"] == parents or any("launches kernels" in reason for reason in reasons)


TRITON = """
import sys, torch, triton
import triton.language as tl

@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask) + tl.load(y + at, mask), mask)

n, times = 100_003, 10
x, y = (torch.arange(n, device="cuda", dtype=torch.float32) * k for k in (1, 2))
out = torch.empty_like(x)
for _ in range(times):
    add_kernel[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024, num_warps=4)
print(out.double().sum().item())
print("warps", times * triton.cdiv(n, 1024) * 4, file=sys.stderr)
"""


def test_a_kernel_of_triton_is_complete_and_computes_the_same(bench: Bench, tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", "import torch, triton"], capture_output=True)
    if found.returncode:
        pytest.skip("Triton is not installed")
    script = tmp_path / "add.py"  # Triton reads the source of its kernels
    script.write_text(TRITON)
    command = [sys.executable, str(script)]
    native, recorded = bench.native(*command), bench.record(*command)
    assert_same(recorded, native)
    assert recorded.renderer.losses == {}
    assert_complete(recorded)
    warps = [len(batch["warp"]) for batch in recorded.of("gpu_warp") if batch["name"] == "add_kernel"]
    assert sum(warps) == native.launched
