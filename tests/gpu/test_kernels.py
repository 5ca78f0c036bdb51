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

from tracepipe.analyses.occupancy import occupancy_of, resources
from tracepipe.errors import CaptureUnavailable
from tracepipe.event.sm_limits import sm_limits
from tracepipe.hooks.calls import CALL_RULES
from tracepipe.tracer.gpu.build.toolchain import Toolchain, this_toolchain
from tracepipe.tracer.gpu.engines.kernels import KernelStream
from tracepipe.tracer.gpu.engines.streams import GpuEngine, GpuRenderer

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
# Kernels of several sizes; a line for each: threads, dynamic shared memory, and how many blocks of it an SM
# holds at a time by CUDA itself, or -C where the GPU holds C clusters.
NEEDS = r"""
#include <cstdio>
template <int VALUES> __global__ void holds(float *p) {
    float values[VALUES];
    for (int k = 0; k < VALUES; k++) values[k] = p[k * 33];
    __syncthreads();
    for (int k = 0; k < VALUES; k++) p[k * 35 + threadIdx.x] = values[VALUES - 1 - k];
}
__global__ void shares(float *p) {
    __shared__ float some[3000];
    extern __shared__ float more[];
    some[threadIdx.x] = p[threadIdx.x], more[0] = 1;
    __syncthreads();
    p[threadIdx.x] = some[threadIdx.x ^ 1] + more[0];
}
__global__ void configured(float *p) {
    extern __shared__ float more[];
    more[0] = p[threadIdx.x];
}
__global__ void __cluster_dims__(4, 1, 1) clustered(float *p) {
    extern __shared__ float more[];
    more[0] = p[threadIdx.x];
}
float *p;
template <typename Kernel> void run(Kernel kernel, int threads, int dynamic) {
    int blocks = 0;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, dynamic);
    if (!blocks) return;
    kernel<<<4, threads, dynamic>>>(p);
    printf("%d %d %d\n", threads, dynamic, blocks);
}
int main() {
    cudaMalloc(&p, 1 << 20), cudaMemset(p, 0, 1 << 20);
    int sizes[] = {32, 96, 128, 256, 384, 512};
    for (int threads : sizes) {
        run(holds<1>, threads, 0), run(holds<16>, threads, 0);
        run(holds<48>, threads, 0), run(holds<100>, threads, 0);
        for (int dynamic : {0, 1000, 20000, 70000, 100000, 200000}) run(shares, threads, dynamic);
    }
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaFuncSetAttribute(configured, cudaFuncAttributePreferredSharedMemoryCarveout, 25);
    run(configured, 64, 8000);
    if (major >= 9)
        for (int dynamic : {1000, 120000}) {
            cudaFuncSetAttribute(clustered, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
            cudaLaunchConfig_t launch{};
            cudaLaunchAttribute cluster{};
            cluster.id = cudaLaunchAttributeClusterDimension;
            cluster.val.clusterDim.x = 4, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
            launch.gridDim = 4, launch.blockDim = 256, launch.dynamicSmemBytes = dynamic;
            launch.attrs = &cluster, launch.numAttrs = 1;
            int clusters = 0;
            cudaOccupancyMaxActiveClusters(&clusters, clustered, &launch);
            clustered<<<4, 256, dynamic>>>(p);
            printf("256 %d -%d\n", dynamic, clusters);
        }
    return cudaDeviceSynchronize() != cudaSuccess;
}
"""
VALUE = 10000 * 32 + 8 * 200 * 128 + 4 * 15


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    found = this_toolchain()
    try:
        found.architectures()
        found.nvcc()
        KernelStream.build(found)
    except CaptureUnavailable as refusal:
        pytest.skip(f"{refusal.message} {refusal.hint}")
    return found


@pytest.fixture(scope="module")
def program(tools: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tools, PROGRAM, tmp_path_factory.mktemp("program"))


def built(tools: Toolchain, source: str, folder: Path) -> Path:
    (folder / "p.cu").write_text(source)
    target = f"-arch={tools.architectures()[0]}"
    command = [str(tools.nvcc().path), "-std=c++17", target, "-o", str(folder / "p"), str(folder / "p.cu")]
    subprocess.run(command, check=True)
    return folder / "p"


def recorded(
    tools: Toolchain, program: Path, calls: str = "all", ring_bytes: int = 1 << 26
) -> tuple[str, list[dict[str, Any]], GpuRenderer, int]:
    """What the program wrote, its events, the renderer and what was lost."""
    recording = GpuEngine([KernelStream(KernelStream.build(tools), calls=calls)], ring_bytes=ring_bytes)
    try:
        environment = {**os.environ, **recording.environment()}
        process = subprocess.Popen([program], env=environment, stdout=subprocess.PIPE, text=True)
        chunks = []
        while process.poll() is None:
            recording.channel.accept()
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
        assert [name for name in names if not CALL_RULES["launches"].allows(name)] == []
        assert "cudaMalloc" not in names
    assert sum(event["type"] == "gpu_kernel" for event in events) == 11625


def test_records_without_room_are_counted(tools: Toolchain, program: Path) -> None:
    written, events, _, lost = recorded(tools, program, "none", 1 << 17)
    assert written == str(VALUE)
    assert lost > 0
    assert len(events) + lost == 11625 + 2 + 1  # kernels, transfers, an allocation


def test_theoretical_occupancy_is_that_of_cuda(tools: Toolchain, tmp_path: Path) -> None:
    """Each launch of several sizes, in the order of the launches, against what CUDA answers for it."""
    written, events, renderer, lost = recorded(tools, built(tools, NEEDS, tmp_path))
    assert lost == 0
    kernels = sorted(
        (event for event in events if event["type"] == "gpu_kernel"), key=lambda event: event["launch"]
    )
    expected = [tuple(map(int, line.split())) for line in written.splitlines()]
    assert len(kernels) == len(expected) >= 30
    gpu = renderer.gpus[0]
    limits = sm_limits(gpu)
    assert limits is not None
    differ = []
    for kernel, (threads, dynamic, answer) in zip(kernels, expected, strict=True):
        assert kernel["block"] == [threads, 1, 1]
        needs = resources(kernel["args"], threads)
        assert needs is not None
        assert needs.shared_bytes >= dynamic
        found = occupancy_of(needs, limits, gpu["sm_count"])
        blocks = found.blocks if found else 0
        if answer < 0:  # clusters of the GPU: never more than its SMs hold of single blocks
            agrees = needs.clusters == -answer and blocks <= -answer * 4 / gpu["sm_count"]
        else:
            agrees = blocks == answer
        if not agrees:
            differ.append((kernel["name"], threads, dynamic, answer, blocks, needs))
    assert differ == []
