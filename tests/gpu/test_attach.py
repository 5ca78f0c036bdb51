"""Kernels of a program that runs already: all of them, and a program that notices nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.bench import Bench
from tracepipe.tracer.gpu.engines.kernels import KernelStream
from tracepipe.tracer.gpu.engines.streams import GpuEngine

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
GRAPH_KERNELS = 10

# The graph is made before anything is recorded.
TORCH = f"""
import sys, torch
x = torch.zeros(1000, device="cuda")
x.add_(1)
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    for _ in range({GRAPH_KERNELS}): x.add_(1)
x.zero_()
torch.cuda.synchronize()
print("begun", flush=True)
for line in sys.stdin:
    what, count = line.split()
    for _ in range(int(count)): x.add_(1) if what == "add" else graph.replay()
    torch.cuda.synchronize()
    print(int(x[0].item()), flush=True)
"""


class Running:
    """A program that does what it is asked for, recorded or not."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", TORCH]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self.answer = self._line()

    def do(self, words: str) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n")
        return int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def running() -> Iterator[Running]:
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip("PyTorch is not installed")
    made = Running()
    yield made
    made.process.communicate()
    assert made.process.returncode == 0


def test_every_kernel_between_attachment_and_end_is_recorded(bench: Bench, running: Running) -> None:
    """Twice; natively in between."""
    library, total = KernelStream.build(bench.tools), 0
    for count in (200, 300):
        engine = GpuEngine([KernelStream(library)], gpus=bench.tools.driver.listed)
        engine.enter([running.process.pid])
        total += count + 5 * GRAPH_KERNELS
        running.do(f"add {count}")
        assert running.do("replay 5") == total
        engine.stop()
        chunks = []
        while not engine.is_over():
            chunks.append(engine.collect())
        chunks.append(engine.collect(is_final=True))
        renderer = engine.renderer()
        lines = [line for chunk in chunks for line in renderer.render(chunk).texts]
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        kernels = Counter("graph" in event["args"] for event in events if event["type"] == "gpu_kernel")
        # The answer is read by a kernel or two, and a copy.
        assert kernels[True] == 5 * GRAPH_KERNELS
        assert count <= kernels[False] <= count + 4
        launches = {event["launch"] for event in events if event["type"] == "gpu_kernel"}
        assert launches <= {event.get("launch") for event in events if event["type"] == "userspace"}
        assert renderer.losses == {}
        assert [gpu["uuid"] for gpu in renderer.gpus] == [gpu["uuid"] for gpu in bench.tools.driver.listed]
        engine.close()
        total += 7
        assert running.do("add 7") == total


def test_threads_that_are_in_the_driver_are_not_harmed(bench: Bench, tmp_path: Path) -> None:
    """They launch, allocate, capture and wait meanwhile."""
    command = [str(bench.program), "busy"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    capture = [sys.executable, "-m", "tracepipe", "capture", "--gpu", "kernels", "--layers", "gpu_kernel"]
    for _ in range(2):
        file = ["-o", str(tmp_path / "run.jsonl"), "--force", "--duration", "500ms"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [*capture, "--pid", str(process.pid), *file],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert done.returncode == 0, done.stderr
        footer = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
        assert footer["losses"] == {}
        assert footer["counts"]["gpu_kernel"] > 1000
    printed, _ = process.communicate("\n")
    assert (printed.split("\n"), process.returncode) == (["all ran"] * 5 + [""], 0)
