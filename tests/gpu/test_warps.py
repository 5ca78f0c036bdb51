"""Every warp of real kernels is recorded, and the program computes what it computes without a recorder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tracepipe.capture.gpu.warp_options import WarpOptions
from tracepipe.capture.gpu.warps import GpuRecording, WarpRenderer

pytestmark = pytest.mark.gpu

NATIVE = Path(__file__).parents[2] / "tracepipe/capture/gpu/native"
CASES = Path(__file__).with_name("cases.cu")
# Every kernel of these ends, and all its warps have room.
WHOLE = (
    "vector_add", "odd_block", "three_returns", "each_alone", "grid_stride", "three_dimensions", "empty_grid",
    "tiny", "long", "cluster", "no_sync", "reset", "streams", "large",
)  # fmt: skip


@dataclass
class Run:
    """What a program printed and how many warps it said that it launched; what was recorded of it."""

    printed: str
    launched: int
    exit_code: int
    records: list[dict[str, Any]]
    renderer: WarpRenderer
    lost: int

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["type"] == kind]


class Bench:
    """The programs and the native code, built once."""

    def __init__(self, folder: Path) -> None:
        toolchain = pytest.importorskip("tracepipe.capture.gpu.toolchain")
        if not Path("/dev/nvidiactl").exists():
            pytest.skip("there is no NVIDIA GPU")
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        if not Path(nvcc).exists():
            pytest.skip("nvcc is not installed")
        self.program = folder / "cases"
        subprocess.run([nvcc, "-O2", "-std=c++17", "-arch=native", "-o", self.program, CASES], check=True)
        self.library = toolchain.build_host("warps", [NATIVE / "warps.cpp"], ["sanitizer"])
        self.patches = toolchain.build_patches("warps", NATIVE / "patches.cu")

    def native(self, *command: str) -> Run:
        done = subprocess.run(command, capture_output=True, text=True)
        return Run(done.stdout, _launched(done.stderr), done.returncode, [], WarpRenderer({}), 0)

    def record(self, *command: str, options: WarpOptions | None = None) -> Run:
        recording = GpuRecording(self.library, self.patches, options)
        chunks, lost, is_over = [], 0, False
        environment = {**os.environ, **recording.environment()}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
            while not is_over:
                is_over = process.poll() is not None
                chunks.append(recording.collect(is_final=is_over))
                lost += sum(loss.count for loss in recording.lost())
            printed, errors = process.communicate()
        renderer = recording.renderer()
        records = [json.loads(line) for chunk in chunks for line in renderer.render(chunk).splitlines()]
        recording.close()
        return Run(printed, _launched(errors), process.returncode, records, renderer, lost)

    def case(self, name: str, options: WarpOptions | None = None) -> tuple[Run, Run]:
        return self.native(str(self.program), name), self.record(str(self.program), name, options=options)


def _launched(errors: str) -> int:
    words = errors.split()
    return int(words[words.index("warps") + 1]) if "warps" in words else -1


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("gpu"))


def _expected(kernel: dict[str, Any]) -> int:
    (x, y, z), (a, b, c) = kernel["grid"], kernel["block"]
    return int(x * y * z * ((a * b * c + 31) // 32))


def _assert_complete(run: Run) -> None:
    """Each launch has every warp of its grid once, each lane of a warp left once."""
    seen: dict[int, Counter[int]] = {}
    for batch in run.of("gpu_warp"):
        seen.setdefault(batch["launch"], Counter()).update(batch["warp"])
        count = len(batch["warp"])
        entries = batch.get("entry_mask", [0xFFFFFFFF] * count)
        exits = iter(batch.get("exit_mask", [0xFFFFFFFF] * len(batch["exit_ns"])))
        for entry, exit_count in zip(entries, batch.get("exit_count", [1] * count), strict=True):
            assert sum(next(exits) for _ in range(exit_count)) == entry
    for kernel in run.of("gpu_kernel"):
        assert seen[kernel["launch"]] == Counter(range(_expected(kernel))), kernel["name"]


@pytest.mark.parametrize("name", WHOLE)
def test_no_warp_is_missing_and_results_are_the_same(bench: Bench, name: str) -> None:
    native, recorded = bench.case(name)
    assert recorded.printed == native.printed
    assert recorded.exit_code == native.exit_code
    assert recorded.renderer.losses == {}
    assert recorded.lost == 0
    assert recorded.renderer.counts["gpu_warp"] == native.launched
    _assert_complete(recorded)


def test_a_trap_leaves_the_program_its_error_and_counts_what_it_took_along(bench: Bench) -> None:
    native, recorded = bench.case("trap")
    assert recorded.printed == native.printed
    assert recorded.exit_code == native.exit_code
    warps = recorded.renderer.counts.get("gpu_warp", 0) + recorded.renderer.losses["gpu_warp"]
    assert warps == 32 * 4 + 256 * 8


def test_a_graph_computes_the_same_and_its_warps_are_counted_as_lost(bench: Bench) -> None:
    native, recorded = bench.case("graph")
    assert recorded.printed == native.printed
    assert recorded.renderer.losses == {"gpu_warp": native.launched}


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


def test_calls_have_their_arguments_and_tell_what_they_did(bench: Bench) -> None:
    _, recorded = bench.case("vector_add")
    begun = [call for call in recorded.of("userspace") if call["phase"] == "B"]
    calls = {call["launch"]: call for call in begun if "launch" in call}
    kernels = recorded.of("gpu_kernel")
    assert len(kernels) == 10
    for kernel in kernels:
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
    _, recorded = bench.case("tiny", WarpOptions(kernels="^tiny", launches="3-5", calls="none"))
    assert [kernel["name"] for kernel in recorded.of("gpu_kernel")] == ["tiny"] * 3
    assert recorded.renderer.counts == {"gpu_kernel": 3, "gpu_warp": 12}
    _, recorded = bench.case("vector_add", WarpOptions(kernels="nothing like it", calls="none"))
    assert recorded.renderer.counts == {}


def test_a_launch_beyond_the_memory_is_recorded_in_part_and_the_rest_counted(bench: Bench) -> None:
    native, recorded = bench.case("large", WarpOptions(memory_bytes=16 << 20))
    assert recorded.printed == native.printed
    assert recorded.renderer.counts["gpu_warp"] > 0
    counted = recorded.renderer.counts["gpu_warp"] + recorded.renderer.losses["gpu_warp"]
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
    _assert_complete(recorded)
