"""What the layer `host_sample` costs a program: processor time with it and without it, in turn, as root; and
how long its BPF programs run, by the kernel's own count.

    python benchmarks/host_stacks.py [ROUNDS]

The programs have 25 frames of Python. `compute` never waits; in `switches` two threads give each other turns
as fast as they can; `launches` calls small operations of PyTorch on a GPU, if there is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json, queue, sys, threading, time

def deep(depth, work):
    return deep(depth - 1, work) if depth else work()

def compute():
    total = 0
    for number in range(600_000):
        total += number * number % 7

def switches():
    asked, given = queue.SimpleQueue(), queue.SimpleQueue()
    def echo():
        while (one := asked.get()) is not None:
            given.put(one)
    thread = threading.Thread(target=lambda: deep(20, echo))
    thread.start()
    for _ in range(4_000):
        asked.put(1), given.get()
    asked.put(None), thread.join()

def launches():
    for _ in range(20_000):
        small + 1
    torch.cuda.synchronize()

works = [compute, switches]
try:
    import torch
    small = torch.rand(8, 8, device="cuda")
    works.append(launches)
except (ImportError, RuntimeError):
    pass
found = {}
if sys.argv[2:]:
    ends = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < ends:
        deep(20, compute)
    works = []
for work in works:
    times = []
    for _ in range(12):
        begun = time.process_time()
        deep(20, work)
        times.append(time.process_time() - begun)
    found[work.__name__] = min(times)
json.dump(found, open(sys.argv[1], "w"))
"""


def main() -> None:
    """Print the least processor time of each program, and the median of the ratios."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder, "program.py"), Path(folder, "out.json")
        script.write_text(PROGRAM)
        command = [sys.executable, str(script), str(out)]
        record = [sys.executable, "-m", "tracepipe", "capture", "--layers", "host_sample", "--force"]
        record += ["-o", str(Path(folder, "run.jsonl")), "--", *command]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
        for _ in range(rounds):
            took: list[dict[str, float]] = []
            for line in (command, record):
                subprocess.run(line, check=True, env=environment, capture_output=True)
                took.append(json.loads(out.read_text()))
            for name, native_s in took[0].items():
                ratios.setdefault(name, []).append(took[1][name] / native_s)
                print(f"{name:10} {1e3 * native_s:8.2f} ms alone {1e3 * took[1][name]:8.2f} ms recorded")
        for name, found in ratios.items():
            print(f"{name:10} {median(found):.3f} times as long, from {min(found):.3f} to {max(found):.3f}")
        share = share_in_bpf([*record, "14"], environment)
        print(f"in BPF programs while it computes: {100 * share:.2f}% of a processor")


def share_in_bpf(command: list[str], environment: dict[str, str]) -> float:
    """The share of a processor's time in the BPF programs of a capture, whose command computes."""
    counts = Path("/proc/sys/kernel/bpf_stats_enabled")
    before, shares = counts.read_text(), []
    counts.write_text("1")
    try:
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as capture:
            at = time.monotonic(), 0
            while capture.poll() is None:
                time.sleep(2)
                now = time.monotonic(), run_ns(capture.pid)
                shares.append((now[1] - at[1]) / 1e9 / (now[0] - at[0]))
                at = now
    finally:
        counts.write_text(before)
    return median(shares)


def run_ns(pid: int) -> int:
    """How long the BPF programs of a process have run."""
    found = 0
    for file in Path(f"/proc/{pid}/fdinfo").glob("*"):
        with suppress(OSError):
            lines = file.read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("run_time_ns:"))
    return found


if __name__ == "__main__":
    main()
