"""The engine `kernels` on a real GPU: nothing missing, nothing changed, times that fit.

Programs are built from CUDA sources here with the machine's nvcc.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tracepipe.capture.gpu.build.toolchain import Toolchain, this_toolchain
from tracepipe.capture.gpu.engines.kernel_lines import KernelsRenderer
from tracepipe.capture.gpu.engines.kernels import KernelsEngine, build_library
from tracepipe.errors import CaptureUnavailable
from tracepipe.hooks.calls import CALL_RULES

pytestmark = pytest.mark.gpu

PROGRAM = r"""
#include <cstdio>
#include <thread>
#include <vector>
__global__ void tiny(int *p) { atomicAdd(p, 1); }
__global__ void graphed(int *p, int k) { atomicAdd(p, k); }
int main() {
    int *p, value;
    cudaMalloc(&p, 4);
    cudaMemset(p, 0, 4);
    for (int i = 0; i < 10000; i++) tiny<<<1, 32>>>(p);
    std::vector<std::thread> threads;
    for (int n = 0; n < 8; n++)
        threads.emplace_back([=] {
            cudaStream_t stream;
            cudaStreamCreate(&stream);
            for (int i = 0; i < 200; i++) tiny<<<2, 64, 0, stream>>>(p);
            cudaStreamSynchronize(stream);
        });
    for (auto &thread : threads) thread.join();
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    cudaStreamCreate(&stream);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    for (int k = 0; k < 6; k++) graphed<<<1, 1, 0, stream>>>(p, k);
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&ready, graph, 0);
    for (int k = 0; k < 4; k++) cudaGraphLaunch(ready, stream);
    cudaStreamSynchronize(stream);
    cudaMemcpy(&value, p, 4, cudaMemcpyDeviceToHost);
    tiny<<<1, 1>>>(p);  // nobody waits for it
    printf("%d", value);
}
"""
VALUE = 10000 * 32 + 8 * 200 * 128 + 4 * 15


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    found = this_toolchain()
    try:
        found.architectures()
        found.nvcc()
        build_library(found)
    except CaptureUnavailable as refusal:
        pytest.skip(f"{refusal.message} {refusal.hint}")
    return found


@pytest.fixture(scope="module")
def program(tools: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "p.cu").write_text(PROGRAM)
    target = f"-arch={tools.architectures()[0]}"
    command = [str(tools.nvcc().path), "-std=c++17", target, "-o", str(folder / "p"), str(folder / "p.cu")]
    subprocess.run(command, check=True)
    return folder / "p"


def recorded(
    tools: Toolchain, program: Path, calls: str = "all", ring_bytes: int = 1 << 26
) -> tuple[str, list[dict[str, Any]], KernelsRenderer, int]:
    """What the program wrote, its events, the renderer and what was lost."""
    recording = KernelsEngine(build_library(tools), calls=calls, ring_bytes=ring_bytes)
    try:
        environment = {**os.environ, **recording.environment()}
        process = subprocess.Popen([program], env=environment, stdout=subprocess.PIPE, text=True)
        chunks = []
        while process.poll() is None:
            recording._channel.accept()
            if ring_bytes > 1 << 17:  # a small one is to be full
                chunks.append(recording.collect())
        assert process.stdout is not None
        written = process.stdout.read()
        assert process.returncode == 0
        chunks.append(recording.collect(is_final=True))
        renderer = recording.renderer()
        texts = renderer.render(b"".join(chunks)).texts
        lost = sum(loss.count for loss in recording.lost())
        return written, [json.loads(line) for line in (*texts, *renderer.last().texts)], renderer, lost
    finally:
        recording.close()


def test_every_kernel_comes_with_its_launch_and_nothing_is_changed(tools: Toolchain, program: Path) -> None:
    before_ns = time.monotonic_ns()
    written, events, renderer, lost = recorded(tools, program)
    assert (written, lost) == (str(VALUE), 0)
    kernels = [event for event in events if event["type"] == "gpu_kernel"]
    assert Counter(event["name"] for event in kernels) == {"tiny(int*)": 11601, "graphed(int*, int)": 24}
    calls = {event["launch"]: event for event in events if event["type"] == "userspace" and "launch" in event}
    for kernel in kernels:
        assert before_ns < calls[kernel["launch"]]["ts_ns"] < kernel["ts_ns"], (
            "a kernel starts after its call"
        )
        assert kernel["ts_ns"] + kernel["dur_ns"] < time.monotonic_ns()
    assert len({event["stream"] for event in kernels}) == 10
    by_launch = {kernel["launch"]: kernel for kernel in kernels}
    launches = [event for event in events if event["name"] == "cudaLaunchKernel" and "grid" in event["args"]]
    assert len(launches) == 11601, "launches that are captured into a graph have no kernel of their own"
    for launch in launches:
        kernel, args = by_launch[launch["launch"]], launch["args"]
        assert [args[what] for what in ("grid", "block", "stream")] == [
            kernel[what] for what in ("grid", "block", "stream")
        ]
        assert args["kernel"] == "tiny"
    transfers = Counter(event["name"] for event in events if event["type"] == "transfer")
    assert transfers == {"set": 1, "DtoH": 1}
    (taken,) = [event for event in events if event["type"] == "memory"]
    assert (taken["name"], taken["args"]["size"], taken["args"]["kind"]) == ("alloc", 4, "device")
    assert taken["args"]["call"] in ("cudaMalloc", "cuMemAlloc_v2")
    assert renderer.gpus[0]["name"] == tools.driver.gpus[0].name
    assert renderer.notes == []


@pytest.mark.parametrize("calls", ["launches", "none"])
def test_calls_can_be_left_to_another_engine(tools: Toolchain, program: Path, calls: str) -> None:
    _, events, _, _ = recorded(tools, program, calls)
    names = {event["name"] for event in events if event["type"] == "userspace"}
    if calls == "none":
        assert names == set()
    else:
        assert names >= {
            "cudaLaunchKernel",
            "cudaGraphLaunch",
            "cudaMemcpy",
            "cudaMemset",
            "cudaStreamSynchronize",
        }
        assert [name for name in names if not CALL_RULES["launches"].takes(name)] == []
        assert "cudaMalloc" not in names
    assert sum(event["type"] == "gpu_kernel" for event in events) == 11625


def test_what_finds_no_room_is_counted(tools: Toolchain, program: Path) -> None:
    written, events, _, lost = recorded(tools, program, "none", 1 << 17)
    assert written == str(VALUE)
    assert lost > 0
    assert len(events) + lost == 11625 + 2 + 1  # kernels, transfers, an allocation
