"""Windows of functions and of launches in a program with the library of `kernels`, which follows or leads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.standin import needs
from tracepipe.tracer import choose
from tracepipe.tracer.engines.engine import Listeners
from tracepipe.tracer.gpu.engines.kernels import KernelStream
from tracepipe.tracer.gpu.engines.streams import GpuEngine
from tracepipe.tracer.request import CaptureRequest, Windows
from tracepipe.tracer.session import run_session

pytestmark = [pytest.mark.ebpf, pytest.mark.alone, needs("prebuilt")]

TIMES = 400
HELD_NS = 10_000_000
STEPS = """
int step(int at) {
    __asm__ volatile("push %rbp; pop %rbp");  // what a probe replaces
    return at + 1;
}
"""
# Each step of the library is followed by ten launches of the stand-in for CUPTI.
PROGRAM = """
import ctypes, sys, time
folder = sys.argv[1]
cupti = ctypes.CDLL(f"{folder}/libcupti.so.13")
ctypes.CDLL(f"{folder}/kernels.so").InitializeInjection()
steps = ctypes.CDLL(sys.argv[2])
for at in range(int(sys.argv[3])):
    steps.step(at)
    for _ in range(10):
        cupti.standin_launch()
    time.sleep(0.0005)
"""


def recorded(folder: Path, library: Path, steps: Path, windows: Windows) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", PROGRAM, str(library.parent), str(steps), str(TIMES)]
    request = CaptureRequest(command, ("userspace", "gpu_kernel"), gpu="kernels", windows=windows)
    engine, version, _ = choose("prebuilt")
    device, file = GpuEngine([KernelStream(library)]), folder / "run.jsonl"
    try:
        with file.open("w+b", buffering=0) as sink:
            summary = run_session(engine, version, request, sink, Listeners(print), device)
    finally:
        device.close()
    assert (summary.error, summary.exit_code) == ("", 0)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A library with the function that is called once a step."""
    source, library = tmp_path / "steps.c", tmp_path / "libsteps.so"
    source.write_text(STEPS)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def by_window(records: list[dict[str, Any]], what: str) -> list[int]:
    """How many in each window; behind them, how many in none."""
    turns = [record["ts_ns"] for record in records if record["type"] == "window"]
    spans = list(zip(turns[::2], turns[1::2], strict=True))
    counts = [0] * (len(spans) + 1)
    for record in records:
        if record["type"] == what:
            at = next((n for n, (b, e) in enumerate(spans) if b <= record["ts_ns"] <= e), len(spans))
            counts[at] += 1
    return counts


def test_a_function_begins_and_ends_what_the_library_records(
    tmp_path: Path, kernels_library: Path, steps: Path
) -> None:
    """Its calls wait for that, which a busy machine may not keep: 10 ms for a capture that does not see the
    request. So what is recorded behind such a wait, or behind an end, is not looked at.
    """
    trigger = f"call:{steps}:step"
    windows = Windows(start_on=f"{trigger}#60", stop_on=f"{trigger}#4", repeat=2)
    records = recorded(tmp_path, kernels_library, steps, windows)
    is_in_time = all(record.get("waited_ns", 0) < HELD_NS for record in records)
    for what in ("gpu_kernel", "userspace"):
        *inside, _ = by_window(records, what)
        assert all(count <= 30 for count in inside)
        assert not is_in_time or inside == [30, 30]


def test_launches_begin_and_end_windows(tmp_path: Path, kernels_library: Path, steps: Path) -> None:
    windows = Windows(start_on="kernel:^f$#101", stop_on="kernel:^f$#20", repeat=2)
    records = recorded(tmp_path, kernels_library, steps, windows)
    kernels = [record for record in records if record["type"] == "gpu_kernel"]
    assert len(kernels) == 40
    assert [record["cause"] for record in records if record["type"] == "window"] == [
        "kernel:^f$#101", "kernel:^f$#20"
    ] * 2  # fmt: skip
