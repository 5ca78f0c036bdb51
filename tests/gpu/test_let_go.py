"""The end of a recording while the program goes on: all of it until then, and a program as it was."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.bench import Bench
from tests.support.program import PYTHONPATH
from tracepipe.tracer.gpu.engines.kernels import KernelStream
from tracepipe.tracer.gpu.engines.streams import GpuEngine
from tracepipe.tracer.gpu.engines.warps import WarpStream
from tracepipe.tracer.request import CaptureRequest

pytestmark = pytest.mark.gpu

PATIENCE_S = 120
WARPS = 8  # of a launch
HALF = {"tiny": 101, "gridStride": 1}

# 200 kernels before, in and after a profile of torch's own, and how many that one has of its.
TORCH = """
import torch
from torch.profiler import ProfilerActivity, profile
x = torch.zeros(1000, device="cuda")
def some():
    for _ in range(200):
        x.add_(1)
    torch.cuda.synchronize()
some()
with profile(activities=[ProfilerActivity.CUDA]) as seen:
    some()
some()
print(sum(event.count for event in seen.key_averages() if "elementwise" in event.key), int(x.sum()))
"""

# A loop that is profiled from its fifth round on, three at a time, and never waits for the GPU.
TORCH_LOOP = """
import torch
from torch.profiler import ProfilerActivity, profile, schedule
x, found = torch.zeros(1000, device="cuda"), []
def some():
    for _ in range(200):
        x.add_(1)
def keep(seen):
    averages = seen.key_averages()
    found.append(sum(event.count for event in averages if "elementwise" in event.key))
    found.append(sum(event.count for event in averages if event.key == "cudaLaunchKernel"))
for _ in range(20):
    some()
kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
with profile(activities=kinds, schedule=schedule(wait=3, warmup=1, active=3), on_trace_ready=keep) as rounds:
    for _ in range(14):
        some()
        rounds.step()
print(min(found) >= 600, int(x.sum()))
"""


def engine(bench: Bench, name: str) -> GpuEngine:
    gpus = bench.tools.driver.listed
    if name == "kernels":
        return GpuEngine([KernelStream(KernelStream.build(bench.tools))], gpus=gpus)
    return GpuEngine([WarpStream(bench.library, bench.patches, CaptureRequest(), gpus)], gpus=gpus)


class Recorded:
    """A program that is recorded, and its events so far."""

    def __init__(self, recording: GpuEngine, command: list[str]) -> None:
        self.recording = recording
        self.chunks: list[bytes] = []
        self.lost = 0
        settings, pipe = {**os.environ, **recording.environment()}, subprocess.PIPE
        self.process = subprocess.Popen(command, env=settings, stdin=pipe, stdout=pipe, bufsize=0)
        self.printed = b""

    def collect(self, *, is_final: bool = False) -> None:
        self.chunks.append(self.recording.collect(is_final=is_final))
        self.lost += sum(loss.count for loss in self.recording.lost())

    def wait_for(self, wanted: bytes) -> None:
        assert self.process.stdout is not None
        while wanted not in self.printed:
            if select.select([self.process.stdout], [], [], 0.001)[0]:
                piece = self.process.stdout.read(4096)
                assert piece, "the program has ended"
                self.printed += piece
            self.collect()

    def stop(self) -> None:
        self.recording.stop()
        while not self.recording.is_over():
            self.collect()
        self.collect(is_final=True)

    def finish(self) -> int:
        printed, _ = self.process.communicate(b"\n", timeout=PATIENCE_S)
        self.printed += printed
        return self.process.returncode

    def events(self) -> list[dict[str, Any]]:
        renderer = self.recording.renderer()
        lines = [line for chunk in self.chunks for line in renderer.render(chunk).texts]
        return [json.loads(line) for line in (*lines, *renderer.last().texts)]


def kernels(events: list[dict[str, Any]]) -> Counter[str]:
    return Counter(str(event["name"]).partition("(")[0] for event in events if event["type"] == "gpu_kernel")


@pytest.mark.parametrize("name", ["kernels", "warps"])
def test_all_until_the_end_is_recorded_and_nothing_after(bench: Bench, name: str) -> None:
    """Launches and a graph, that was made while it was recorded; the same again afterwards."""
    command = [str(bench.program), "two_halves"]
    native = subprocess.run(command, input=b"\n", stdout=subprocess.PIPE, check=True)
    recorded = Recorded(engine(bench, name), command)
    recorded.wait_for(b"half\n")
    recorded.stop()
    assert recorded.process.poll() is None
    assert recorded.finish() == 0
    assert recorded.printed == native.stdout
    recorded.collect(is_final=True)
    assert kernels(recorded.events()) == HALF
    assert recorded.recording.renderer().losses == {}
    assert recorded.lost == 0
    recorded.recording.close()


@pytest.mark.parametrize("name", ["kernels", "warps"])
def test_a_duration_ends_the_recording_and_not_the_program(bench: Bench, tmp_path: Path, name: str) -> None:
    native = bench.native(str(bench.program), "for_a_while")
    # CUDA and CUPTI may take a second until the first launch, on a host with several GPUs.
    capture = [sys.executable, "-m", "tracepipe", "capture", "--gpu", name, "--duration", "2s"]
    done = subprocess.run(
        [*capture, "-o", str(tmp_path / "run.jsonl"), "--", str(bench.program), "for_a_while"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert (done.returncode, done.stdout) == (0, native.printed), done.stderr
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert records[-1]["ended_by"] == "duration"
    assert records[-1]["losses"] == {}
    warps = re.search(r"^warps (\d+)$", done.stderr, re.MULTILINE)
    assert warps
    assert 0 < records[-1]["counts"]["gpu_kernel"] < int(warps[1]) // WARPS
    assert "continues" in done.stderr


@pytest.mark.parametrize("options", [["--duration", "1s"], []], ids=["duration", "exit"])
def test_kernels_that_wait_to_run_at_the_end_are_waited_for(
    bench: Bench, tmp_path: Path, options: list[str]
) -> None:
    path = tmp_path / "run.jsonl"
    capture = [sys.executable, "-m", "tracepipe", "capture", "--gpu", "kernels", "--layers", "gpu_kernel"]
    done = subprocess.run(
        [*capture, *options, "-o", str(path), "--", str(bench.program), "queue"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    records = [json.loads(line) for line in path.read_text().splitlines()]
    kernels = [record for record in records if record["type"] == "gpu_kernel"]
    launched = [record["launch"] for record in records if record.get("name") == "cudaLaunchKernel"]
    assert len(launched) > 100
    assert min(record["ts_ns"] for record in kernels) > records[0]["start"]["monotonic_ns"]
    # A process that ends is not held up for long: others may use the GPU.
    lost = records[-1]["losses"].get("gpu_kernel", 0)
    assert len(set(launched) - {kernel["launch"] for kernel in kernels}) == lost
    assert lost == 0 or not options


@pytest.mark.parametrize("end", ["stop", "close"])
@pytest.mark.parametrize("how", ["busy", "busy_without_graphs"])
@pytest.mark.parametrize("name", ["kernels", "warps"])
def test_threads_that_are_in_the_driver_are_not_harmed(bench: Bench, name: str, how: str, end: str) -> None:
    """They launch, allocate, capture and wait meanwhile; `close` is as if the capture were gone."""
    recorded = Recorded(engine(bench, name), [str(bench.program), how])
    recorded.wait_for(b"begun\n")
    if end == "stop":
        recorded.stop()
    else:
        recorded.recording.close()
    assert recorded.finish() == 0
    assert recorded.printed.split(b"\n") == [b"begun", *[b"all ran"] * 5, b""]
    recorded.recording.close()


@pytest.mark.parametrize("name", ["kernels", "warps"])
def test_a_program_that_ends_with_its_recording_ends_well(bench: Bench, name: str) -> None:
    """Its exit handlers run while the library lets go."""
    for _ in range(10):
        recorded = Recorded(engine(bench, name), [str(bench.program), "two_halves"])
        recorded.wait_for(b"half\n")
        recorded.recording.stop()
        assert recorded.finish() == 0
        recorded.recording.close()


def test_a_profiler_of_the_programs_works_afterwards(bench: Bench) -> None:
    """The program makes no CUDA call between the end of the recording and the start of its profiler."""
    pytest.importorskip("torch")
    waits = TORCH.replace("some()\nwith", "some()\nprint('half', flush=True)\ninput()\nwith", 1)
    recorded = Recorded(engine(bench, "kernels"), [sys.executable, "-c", waits])
    recorded.wait_for(b"half\n")
    recorded.stop()
    assert recorded.finish() == 0
    assert recorded.printed.split() == [b"half", b"200", b"600000"]
    recorded.recording.close()


def test_a_profile_of_a_loop_in_the_program_is_whole(bench: Bench) -> None:
    """It begins while CUPTI fills buffers of ours. When it kept them, three of four lacked kernels."""
    pytest.importorskip("torch")
    for _ in range(3):
        recorded = Recorded(engine(bench, "kernels"), [sys.executable, "-c", TORCH_LOOP])
        recorded.wait_for(b" 6800000\n")
        assert recorded.finish() == 0
        assert recorded.printed.split() == [b"True", b"6800000"]
        recorded.recording.close()


def test_launches_that_another_profiler_took_are_lost_with_the_reason(bench: Bench) -> None:
    pytest.importorskip("torch")
    recorded = Recorded(engine(bench, "kernels"), [sys.executable, "-c", TORCH])
    recorded.wait_for(b" 600000\n")
    assert recorded.finish() == 0
    recorded.collect(is_final=True)
    events, renderer = recorded.events(), recorded.recording.renderer()
    assert recorded.printed.split() == [b"200", b"600000"], "its profile is whole"
    adds = sum(count for name, count in kernels(events).items() if "elementwise" in name)
    assert 0 < adds < 600
    (loss,) = [event for event in events if event["type"] == "loss"]
    assert loss["layer"] == "gpu_kernel"
    assert "another profiler took over CUPTI" in loss["reason"]
    assert renderer.losses == {"gpu_kernel": loss["count"]}
    assert any("another profiler took over CUPTI" in note for note in renderer.notes)
    recorded.recording.close()
