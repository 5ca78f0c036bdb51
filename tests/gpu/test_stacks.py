"""Where PyTorch programs launch: what the file says is what Python says at the same calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.bench import Bench
from tests.gpu.test_let_go import Recorded, engine

pytestmark = pytest.mark.gpu

# Launches in a module's forward, in its backward on a thread of PyTorch's, and in a thread of Python's.
PROGRAM = """
import json, sys, threading, traceback
import torch

x = torch.zeros(1000, device="cuda")
printed = []

def frames():
    return [[f.filename, f.lineno, f.name] for f in reversed(traceback.extract_stack()[:-1])]

def launch():
    printed.append([threading.get_native_id(), frames()]), x.add_(1)

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        launch()
        return value.clone()
    @staticmethod
    def backward(context, gradient):
        launch()
        return gradient

class Net(torch.nn.Module):
    def forward(self, value):
        [launch() for _ in range(3)]
        return Twice.apply(value)

torch.cuda.synchronize()
net, value = Net(), torch.ones(3, device="cuda", requires_grad=True)
for step in range(20):
    torch.nn.Sequential(net, net)(value).sum().backward()
thread = threading.Thread(target=lambda: [launch() for _ in range(50)])
thread.start()
thread.join()
torch.cuda.synchronize()
print(json.dumps(printed))
"""


@pytest.mark.parametrize("name", ["kernels", "warps"])
def test_launches_state_where_a_program_makes_them(bench: Bench, tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(PROGRAM)
    recorded = Recorded(engine(bench, name), [sys.executable, str(tmp_path / "train.py")])
    recorded.wait_for(b"]]]]\n")
    assert recorded.finish() == 0
    recorded.collect(is_final=True)
    events = recorded.events()
    assert recorded.lost == 0
    stacks = {event["id"]: event["frames"] for event in events if event["type"] == "stack"}
    read: dict[int, list[Any]] = {}
    for event in sorted(
        (e for e in events if e.get("name") == "cudaLaunchKernel"), key=lambda e: int(e["ts_ns"])
    ):
        frames = stacks.get(event.get("stack"), []) if event["phase"] != "E" else []
        if frames and frames[0]["function"] == "launch":
            read.setdefault(event["tid"], []).append(
                [[frame["file"], frame["line"], frame["function"].rpartition(".")[2]] for frame in frames]
            )
    expected: dict[int, list[Any]] = {}
    for tid, frames in json.loads(recorded.printed):
        expected.setdefault(tid, []).append(frames)
    assert len(expected) == 3, "the main thread, PyTorch's, and one of Python's"
    assert read == expected
    recorded.recording.close()
