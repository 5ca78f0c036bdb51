"""What is left of `--gpu kernels` and `--gpu warps` when the recording is over and the program goes on.

    python benchmarks/gpu_after.py [--quick]

Needs an NVIDIA GPU, and ends with 3 without one. The program is gpu.cu, which says of each round of launches
when it began and what a launch cost its thread. It is recorded for a while; then the capture process stops,
or is killed by signal 9. Figures are medians of a run's rounds, and of the runs; `after` are the rounds that
began 50 ms after the end or later. `back` is how long after the end the first round began that cost no more
than 1.1 times what it does natively, in the slowest run.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from gpu import NO_GPU, Bench, describe

from tracepipe.capture.gpu.build.toolchain import this_toolchain
from tracepipe.errors import TracepipeError

RECORDED_S = 1.5
AFTER_US = 50_000
NEAR = 1.1
ENGINES = ("warps", "kernels")
ENDS = ("stopped", "killed")


@dataclass
class Cost:
    """Of each run: microseconds a launch, recorded and after, and milliseconds until it was native."""

    during_us: list[float] = field(default_factory=list)
    after_us: list[float] = field(default_factory=list)
    back_ms: list[float] = field(default_factory=list)


def rounds(printed: str) -> list[tuple[float, float]]:
    """When each round began, and what a launch cost in it."""
    words = (line.split() for line in printed.splitlines() if line.startswith("at "))
    return [(float(begin_us), float(each_us)) for _, begin_us, each_us in words]


def capture(bench: Bench, engine: str, answers: int) -> NoReturn:
    """In a process of its own: record until it is asked to stop, or killed."""
    recording = bench.recording(engine)
    assert recording is not None
    signal.signal(signal.SIGUSR1, lambda *_: recording.stop())
    os.write(answers, json.dumps(recording.environment()).encode() + b"\n")
    while True:
        recording.collect()
        time.sleep(0.002)


def run(bench: Bench, engine: str, end: str, seconds: int) -> tuple[list[tuple[float, float]], float]:
    """The rounds of a program, and when its recording ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        capture(bench, engine, write)
    try:
        environment = json.loads(os.read(read, 1 << 16))
        command = [str(bench.program), "steady", str(seconds)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env={**os.environ, **environment}, stdout=pipe, text=True) as process:
            time.sleep(RECORDED_S)
            ended_us = time.monotonic_ns() / 1000
            os.kill(child, signal.SIGUSR1 if end == "stopped" else signal.SIGKILL)
            printed, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the program ended with {process.returncode}")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
    return rounds(printed), ended_us


def add(cost: Cost, native_us: float, found: list[tuple[float, float]], ended_us: float) -> None:
    """Add a run."""
    during = [each_us for begin_us, each_us in found if begin_us < ended_us]
    after = [each_us for begin_us, each_us in found if begin_us >= ended_us + AFTER_US]
    cost.during_us.append(statistics.median(during[len(during) // 2 :]))
    cost.after_us.append(statistics.median(after))
    near = [begin_us for begin_us, each_us in found if begin_us >= ended_us and each_us <= NEAR * native_us]
    cost.back_ms.append((near[0] - ended_us) / 1000 if near else float("inf"))


def main() -> None:
    """Print the table, or why there is none."""
    is_quick = "--quick" in sys.argv
    tools = this_toolchain()
    if not tools.driver.gpus:
        print(f"no GPU: {tools.driver.error or 'the driver names none'}", file=sys.stderr)
        raise SystemExit(NO_GPU)
    describe(tools)
    with tempfile.TemporaryDirectory() as folder:
        try:
            bench = Bench(tools, Path(folder), quick=is_quick)
        except TracepipeError as error:
            raise SystemExit(f"{error.message}\n{error.hint}") from None
        natives: list[float] = []
        costs = {(engine, end): Cost() for engine in ENGINES for end in ENDS}
        for _ in range(1 if is_quick else 5):
            command = [str(bench.program), "steady", "1"]
            printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            natives.append(statistics.median(each_us for _, each_us in rounds(printed)))
            for (engine, end), cost in costs.items():
                add(cost, natives[-1], *run(bench, engine, end, 3))
    native_us = statistics.median(natives)
    print(f"\nan empty launch: {native_us:.3f} us natively, {min(natives):.3f} to {max(natives):.3f}")
    print(f"  {'':<24}{'during us':>12}{'x native':>10}{'after us':>12}{'x native':>10}{'back ms':>10}")
    for (engine, end), cost in costs.items():
        during_us, after_us = statistics.median(cost.during_us), statistics.median(cost.after_us)
        during = f"{during_us:>12.3f}{during_us / native_us:>10.2f}"
        after = f"{after_us:>12.3f}{after_us / native_us:>10.3f}{max(cost.back_ms):>10.1f}"
        print(f"  {engine + ', ' + end:<24}{during}{after}")


if __name__ == "__main__":
    main()
