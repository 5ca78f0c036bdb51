"""The occupancy that launches allow: cases worked out by hand, NVIDIA's own calculation, and the report."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiled import compiled
from tests.support.recordings import Load, event, loader, span
from tracepipe.analyses.occupancy import Resources, occupancy_of, resources
from tracepipe.event.sm_limits import SmLimits, sm_limits
from tracepipe.reports import warps
from tracepipe.reports.summary import Options, run
from tracepipe.tracer.gpu.build.toolchain import find_parts

CAPABILITIES = (
    "7.0",
    "7.2",
    "7.5",
    "8.0",
    "8.6",
    "8.7",
    "8.9",
    "9.0",
    "10.0",
    "10.3",
    "11.0",
    "12.0",
    "12.1",
)
KIB = 1024
FIXTURES = Path(__file__).parents[2] / "fixtures"


def limits_of(capability: str) -> SmLimits:
    limits = sm_limits({"compute_capability": capability})
    assert limits is not None
    return limits


@pytest.mark.parametrize(
    ("capability", "needs", "blocks", "warps", "limits"),
    [
        # 32 registers × 32 threads: 1024 a warp, 16 warps in each of four parts, so all 64 fit.
        ("9.0", Resources(256, 32, 0), 8, 64, ()),
        # 33 → 1056, rounded up to 1280: 12 warps a part, 48 in all, 6 blocks of 8.
        ("9.0", Resources(256, 33, 0), 6, 48, ("registers",)),
        # 255 → 8160, up to 8192: 2 warps a part, 8 in all: one block of 8, or none of 9.
        ("9.0", Resources(256, 255, 0), 1, 8, ("registers",)),
        # 227 KiB and the 1 KiB that is reserved are all 228.
        ("9.0", Resources(128, 32, 227 * KIB), 1, 4, ("shared memory",)),
        # 75 + 1 KiB: three fit; a byte more, and only two.
        ("9.0", Resources(128, 32, 75 * KIB), 3, 12, ("shared memory",)),
        ("9.0", Resources(128, 32, 75 * KIB + 1), 2, 8, ("shared memory",)),
        # 32 blocks of one warp: half of the warps.
        ("9.0", Resources(32, 16, 0), 32, 32, ("blocks per SM",)),
        # 24 warps a block: two blocks of 24 are 48, and no third.
        ("9.0", Resources(768, 32, 0), 2, 48, ("registers", "block size")),
        ("9.0", Resources(768, 16, 0), 2, 48, ("block size",)),
        # A block of 33 threads has two warps.
        ("9.0", Resources(33, 16, 0), 32, 64, ()),
        # What the program configured of an SM: 32 KiB hold 6 blocks of 4 + 1 KiB.
        ("9.0", Resources(128, 32, 4 * KIB, 32 * KIB), 6, 24, ("shared memory",)),
        # 16 clusters of 4 blocks on 132 SMs: 0.48 blocks each.
        ("9.0", Resources(1024, 32, 0, 0, 4, 16), 64 / 132, 64 / 132 * 32, ("clusters",)),
        ("9.0", Resources(1024, 32, 0, 0, 4, 66), 2, 64, ()),
        ("8.0", Resources(128, 32, 163 * KIB), 1, 4, ("shared memory",)),
        ("8.6", Resources(256, 40, 0), 6, 48, ()),
        ("8.6", Resources(32, 16, 0), 16, 16, ("blocks per SM",)),
        ("8.9", Resources(32, 16, 0), 24, 24, ("blocks per SM",)),
        ("8.9", Resources(1024, 32, 0), 1, 32, ("block size",)),
        ("10.0", Resources(256, 168, 209 * KIB), 1, 8, ("registers", "shared memory")),
        # Before 8.0 nothing is reserved, and the unit is 256 bytes.
        ("7.0", Resources(128, 32, 96 * KIB), 1, 4, ("shared memory",)),
        ("7.5", Resources(256, 32, 0), 4, 32, ()),
        ("7.5", Resources(32, 32, 0), 16, 16, ("blocks per SM",)),
    ],
)
def test_cases_worked_out_by_hand(
    capability: str, needs: Resources, blocks: float, warps: float, limits: tuple[str, ...]
) -> None:
    found = occupancy_of(needs, limits_of(capability), 132)
    assert found is not None
    assert (found.blocks, found.warps, found.limits) == (blocks, warps, limits)
    assert found.percent == 100 * warps / limits_of(capability).warps


def test_kernels_that_cannot_have_run_have_no_occupancy() -> None:
    assert occupancy_of(Resources(1024, 255, 0), limits_of("9.0")) is None
    assert occupancy_of(Resources(32, 32, 1 << 20), limits_of("9.0")) is None
    assert occupancy_of(Resources(0, 32, 0), limits_of("9.0")) is None


def test_limits_are_those_of_the_driver_before_those_of_a_table() -> None:
    assert limits_of("9.0") == (64, 32, 65536, 228 * KIB, KIB, 128)
    assert sm_limits({"name": "NVIDIA H200"}) == limits_of("9.0")
    assert sm_limits({"name": "Tesla T4"}) == limits_of("7.5")
    stated = {"compute_capability": "9.0", "max_warps_per_sm": 48, "max_blocks_per_sm": "many"}
    assert sm_limits(stated) == limits_of("9.0")._replace(warps=48)
    assert sm_limits({"name": "NVIDIA H200", "compute_capability": "99.0"}) is None
    assert sm_limits({"name": "AMD Instinct MI300X"}) is None


ORACLE = r"""
#include <cstddef>
#include <cstdio>
#include <cuda_occupancy.h>
int main() {
    int major, minor, warps, registers, shared, reserved, threads, needed, dynamic;
    while (scanf("%d.%d %d %d %d %d %d %d %d", &major, &minor, &warps, &registers, &shared, &reserved,
                 &threads, &needed, &dynamic) == 9) {
        cudaOccDeviceProp gpu{};
        gpu.computeMajor = major, gpu.computeMinor = minor, gpu.maxThreadsPerBlock = 1024, gpu.warpSize = 32;
        gpu.maxThreadsPerMultiprocessor = warps * 32, gpu.numSms = 132;
        gpu.regsPerBlock = gpu.regsPerMultiprocessor = registers;
        gpu.sharedMemPerBlock = 48 * 1024, gpu.sharedMemPerMultiprocessor = shared;
        gpu.reservedSharedMemPerBlock = reserved, gpu.sharedMemPerBlockOptin = shared - reserved;
        cudaOccFuncAttributes kernel{};
        kernel.maxThreadsPerBlock = 1024, kernel.numRegs = needed, kernel.numBlockBarriers = 1;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = shared - reserved;
        cudaOccDeviceState state{};
        state.carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT;
        cudaOccResult found{};
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&found, &gpu, &kernel, &state, threads, dynamic))
            return 1;
        printf("%d\n", found.activeBlocksPerMultiprocessor);
    }
}
"""


def test_it_agrees_with_nvidias_own_calculation(tmp_path: Path) -> None:
    """With the header that computes what cudaOccupancyMaxActiveBlocksPerMultiprocessor answers."""
    parts = find_parts()
    folders = [
        folder for part in parts.cupti for folder in part.include if (folder / "cuda_occupancy.h").exists()
    ]
    if not folders or not shutil.which("g++"):
        pytest.skip("there is no g++, or no cuda_occupancy.h")
    (tmp_path / "oracle.cpp").write_text(ORACLE)
    built = ["g++", "-w", f"-isystem{folders[0]}", str(tmp_path / "oracle.cpp")]
    oracle = compiled(built, tmp_path / "oracle")
    rng = random.Random(1)
    cases = []
    for capability in CAPABILITIES:
        most = limits_of(capability).shared_bytes - limits_of(capability).reserved_bytes
        for _ in range(500):
            threads = rng.choice([1, 32, 33, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1000, 1024])
            shared = rng.choice([0, rng.randint(0, 4096), rng.randint(0, most)])
            cases.append((capability, Resources(threads, rng.randint(1, 255), shared)))
    lines = []
    for capability, needs in cases:
        limits = limits_of(capability)
        of_gpu = f"{limits.warps} {limits.registers} {limits.shared_bytes} {limits.reserved_bytes}"
        lines.append(f"{capability} {of_gpu} {needs.threads} {needs.registers} {needs.shared_bytes}\n")
    done = subprocess.run([oracle], input="".join(lines), capture_output=True, text=True, check=True)
    answers = list(map(int, done.stdout.split()))
    found = [occupancy_of(needs, limits_of(capability)) for capability, needs in cases]
    assert [one.blocks if one else 0 for one in found] == answers


def test_arguments_that_say_what_a_launch_needs() -> None:
    stated = {"registers": 40, "shared_bytes": 512}
    assert resources(stated, 128) == Resources(128, 40, 512)
    clustered = {**stated, "cluster": [2, 2, 1], "max_active_clusters": 7, "shared_config_bytes": 65536}
    assert resources(clustered, 128) == Resources(128, 40, 512, 65536, 4, 7)
    assert resources({"registers": 40}, 128) is None
    assert resources({"registers": "many", "shared_bytes": 0}, 128) is None
    assert resources({**stated, "cluster": "wide"}, 128) == Resources(128, 40, 512)


# The report

H200 = {"index": 0, "name": "NVIDIA H200", "sm_count": 132, "compute_capability": "9.0"}


def footer(*gpus: dict[str, Any]) -> dict[str, Any]:
    return {"type": "footer", "gpus": [*gpus], "counts": {}, "losses": {}}


def kernel(start_ns: int, name: str, threads: int, **args: Any) -> dict[str, Any]:
    sizes = {"grid": [64, 1, 1], "block": [threads, 1, 1], "gpu": 0, "stream": 7}
    return span(start_ns, start_ns + 100, name, "gpu_kernel", **sizes, args=args)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def test_summary_says_what_limits_the_occupancy_of_kernels(load: Load) -> None:
    some = [kernel(1000 + 200 * at, "gemm", 256, registers=168, shared_bytes=100 * KIB) for at in range(3)]
    others = [
        kernel(5000, "add<float>(float*)", 256, registers=16, shared_bytes=0),
        kernel(6000, "add<float>(float*)", 512, registers=40, shared_bytes=0),
        kernel(7000, "graph", 0, registers=40, shared_bytes=0),
        kernel(8000, "unknown", 128),
        event("I", 9000, "cuInit"),
    ]
    rows = run(load(*some, *others, footer(H200)), Options(all=True)).as_json()["occupancy"]
    seen = [(row["name"], row["block_threads"], row["occupancy_percent"], row["limited_by"]) for row in rows]
    assert seen[0] == ("gemm", 256, 12.5, "registers")
    assert sorted(seen[1:]) == [("add<float>", 256, 100.0, None), ("add<float>", 512, 75.0, "registers")]
    first = rows[0]
    assert (first["launches"], first["blocks_per_sm"], first["warps_per_sm"]) == (3, 1, 8)
    assert (first["registers"], first["shared_bytes"], first["max_warps_per_sm"]) == (168, 100 * KIB, 64)


def test_no_occupancy_is_claimed_of_an_unknown_gpu(load: Load) -> None:
    one = kernel(1000, "gemm", 256, registers=168, shared_bytes=0)
    for gpus in ((), ({"index": 0, "name": "a GPU"},), ({"index": 1, "compute_capability": "9.0"},)):
        assert "occupancy" not in run(load(one, footer(*gpus)), Options(all=True)).as_json()


def test_the_usual_launch_decides(load: Load) -> None:
    some = [kernel(1000 + 200 * at, "k", 128, registers=32, shared_bytes=n) for at, n in enumerate((0, 1, 1))]
    (row,) = run(load(*some, footer(H200)), Options(all=True)).as_json()["occupancy"]
    assert (row["shared_bytes"], row["launches"]) == (1, 3)


def test_many_kernels_are_examined_by_their_first_launches(load: Load) -> None:
    some = [
        kernel(1000 + at, f"k{at % 50}", 128, registers=32 + at % 50, shared_bytes=0) for at in range(2000)
    ]
    read = load(*some, footer(H200))
    assert len(run(read, Options(all=True)).as_json()["occupancy"]) == 10
    rows = run(read, Options(top=0)).as_json()["occupancy"]
    assert {row["name"]: row["registers"] for row in rows} == {f"k{n}": 32 + n for n in range(50)}


# Beside what warps achieved


def warps_of(name: str, launch: int, blocks: int, sms: int, threads: int = 128) -> dict[str, Any]:
    """All blocks at a time, for 1 µs."""
    count, per_block = blocks * threads // 32, threads // 32
    return {
        "ts_ns": 1000, "type": "gpu_warp", "name": name, "gpu": 0, "stream": 7, "launch": launch,
        "grid": [blocks, 1, 1], "block": [threads, 1, 1], "warp": [*range(count)],
        "sm": [at // per_block % sms for at in range(count)], "slot": [*range(count)],
        "entry_ns": [0] * count, "exit_ns": [1000] * count,
    }  # fmt: skip


def test_warps_sets_achieved_occupancy_beside_the_theoretical_one(load: Load) -> None:
    launched = kernel(1000, "full", 128, registers=128, shared_bytes=0)
    half = kernel(1000, "half", 128, registers=32, shared_bytes=27 * KIB) | {"stream": 8}
    read = load(
        launched,
        warps_of("full", 1, 8, 2),
        half,
        warps_of("half", 2, 8, 2),
        warps_of("unknown", 3, 2, 2),
        footer(H200),
    )
    rows = {row["kernel"]: row for row in warps.run(read, warps.Options()).as_json()["achieved_occupancy"]}
    full = rows["full"]
    assert (full["blocks_per_sm"], full["theoretical_blocks_per_sm"]) == (4, 4)
    assert (full["active_warps_per_sm"], full["theoretical_warps_per_sm"]) == (16, 16)
    assert (full["achieved_percent"], full["theoretical_percent"]) == (25, 25)
    assert full["limited_by"] == "registers"
    # 28 KiB a block: 8 of them, but the grid has only 4 for each SM.
    assert (rows["half"]["blocks_per_sm"], rows["half"]["theoretical_blocks_per_sm"]) == (4, 8)
    assert (rows["half"]["achieved_percent"], rows["half"]["theoretical_percent"]) == (25, 50)
    assert rows["half"]["limited_by"] == "shared memory"
    unknown = rows["unknown"]
    assert (unknown["achieved_percent"], unknown["theoretical_percent"]) == (6.25, None)


def test_warps_of_an_unknown_gpu_have_no_occupancy(load: Load) -> None:
    read = load(kernel(1000, "full", 128, registers=128, shared_bytes=0), warps_of("full", 1, 8, 2))
    assert "achieved_occupancy" not in warps.run(read, warps.Options()).as_json()


@pytest.mark.parametrize("case", ["kineto-b200-overlaps", "kineto-integer-times"])
def test_pytorchs_own_estimate_agrees(case: str) -> None:
    """It is 0 where a block has more than 48 KiB of shared memory, and less where the grid is small."""
    data = json.loads((FIXTURES / case / "input.json").read_text())
    (gpu,) = data["deviceProperties"]
    limits = limits_of(f"{gpu['computeMajor']}.{gpu['computeMinor']}")
    compared = 0
    for one in data["traceEvents"]:
        args = one.get("args", {})
        if not args.get("est. achieved occupancy %"):
            continue
        threads = math.prod(args["block"])
        found = occupancy_of(Resources(threads, args["registers per thread"], args["shared memory"]), limits)
        assert found is not None
        filled = min(found.warps, args["warps per SM"])
        assert 100 * filled / found.most == pytest.approx(args["est. achieved occupancy %"], abs=0.5)
        compared += 1
    assert compared >= 5
