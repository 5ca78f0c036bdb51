"""What a PyTorch program does while a real GPU is idle, against what the program says of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from bisect import bisect_right
from collections import Counter
from pathlib import Path

import pytest

from tests.support.planted_causes import CAUSES
from tests.support.program import PYTHONPATH

pytestmark = [pytest.mark.gpu, pytest.mark.ebpf]

# Each cause lasts longer than the work that was launched before it.
PLANTED = (
    f"""
import gc, json, sys, threading, time
import torch
from torch.utils.data import DataLoader, Dataset
{CAUSES}"""
    + """
class Slow(Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, _):
        time.sleep(0.03)
        return torch.ones(4)

def loads():
    next(loader)

def main():
    global running, loader
    torch.set_num_threads(1)
    loader = iter(DataLoader(Slow(), batch_size=1, num_workers=1, prefetch_factor=1))
    threading.Thread(target=holder).start()
    a = torch.rand(2048, 2048, device="cuda")
    for _ in range(3):
        a @ a
    torch.cuda.synchronize(), loads()
    spans = []
    for _ in range(12):
        for cause in (parses, sleeps, locks, computes, loads):
            a @ a
            begun = now()
            cause()
            spans.append((cause.__name__, begun, now()))
    a @ a
    torch.cuda.synchronize()
    running = False
    go.set()
    json.dump(spans, open(sys.argv[1], "w"))

main()
"""
)


@pytest.mark.parametrize("layers", ["userspace,scheduler,host_sample", "host_sample"])
def test_idle_time_by_function_and_line(tmp_path: Path, layers: str) -> None:
    pytest.importorskip("torch")
    script, said, path = (tmp_path / name for name in ("planted.py", "said.json", "run.jsonl"))
    script.write_text(PLANTED)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    tracepipe = [sys.executable, "-m", "tracepipe"]
    command = [sys.executable, str(script), str(said)]
    capture = [*tracepipe, "capture", "--layers", layers, "--gpu", "kernels", "-o", str(path), "--", *command]
    subprocess.run(capture, check=True, env=environment)
    gaps = [*tracepipe, "gaps", str(path), "--json", "--top", "0"]
    shown = subprocess.run(gaps, check=True, env=environment, capture_output=True, text=True).stdout
    idle, end_ns = list[tuple[int, int]](), 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    kernels = sorted(
        (one["ts_ns"], one["ts_ns"] + one["dur_ns"])
        for one in records
        if one["type"] == "gpu_kernel" and one["phase"] == "X"
    )
    for start_ns, until_ns in kernels:
        if end_ns and start_ns > end_ns:
            idle.append((end_ns, start_ns))
        end_ns = max(end_ns, until_ns)
    starts, truth = [start_ns for start_ns, _ in idle], Counter[str]()
    for name, begun_ns, ended_ns in json.loads(said.read_text()):
        for start_ns, until_ns in idle[max(bisect_right(starts, begun_ns) - 1, 0) :]:
            if start_ns >= ended_ns:
                break
            truth[name] += max(0, min(ended_ns, until_ns) - max(begun_ns, start_ns))
    whole_ns, found, named_ns = sum(until - start for start, until in idle), Counter[str](), 0
    for row in json.loads(shown)["places"]:
        line = row["line"] or ""
        named_ns += row["idle_ns"] * bool(line)
        found[next((name for name in truth if line.endswith(name)), line)] += row["idle_ns"]
    for name in ("sleeps", "locks", "computes", "loads"):
        assert found[name] / whole_ns == pytest.approx(truth[name] / whole_ns, abs=0.02)
    assert named_ns >= 0.95 * whole_ns
