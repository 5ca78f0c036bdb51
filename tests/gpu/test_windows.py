"""Windows of a PyTorch program: what begins and ends one, and that all of it is there and nothing else."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.bench import Bench
from tests.support.program import PYTHONPATH

pytestmark = pytest.mark.gpu

ADDS = 50
NEAR_NS = 20_000  # the call whose kernel begins a window began before it
# Steps of 50 kernels, each a range, when they are asked for. Numbers 4 and 9 are for the profiler, and one
# below 0 asks for so many milliseconds of them, or until there is a file.
PROGRAM = f"""
import os, sys, time, torch
from torch.cuda import nvtx, profiler

x, steps = torch.zeros(1000, device="cuda"), 0

def step():
    global steps
    steps += 1
    with nvtx.range("step"):
        for _ in range({ADDS}):
            x.add_(1)
        torch.cuda.synchronize()

step()
print("ready", flush=True)
for line in sys.stdin:
    number = int(line)
    if number in (4, 9):
        profiler.start()
    step()
    ends_s = time.monotonic() - number / 1000
    while time.monotonic() < ends_s and not os.path.exists(sys.argv[1]):
        step()
    if number in (4, 9):
        profiler.stop()
    print(number, flush=True)
print(int(x[0].item()) - {ADDS} * steps)
"""


@dataclass
class Window:
    """What it holds."""

    cause: str
    end: str = ""
    kernels: int = 0
    launches: int = 0
    ranges: int = 0


@dataclass
class Recorded:
    """Of a capture: its windows, and what lies outside of them."""

    windows: list[Window] = field(default_factory=list)
    outside: Counter[str] = field(default_factory=Counter)
    footer: dict[str, Any] = field(default_factory=dict)


def read(path: Path, near_ns: int = 0) -> Recorded:
    """The additions, the calls of `cudaLaunchKernel` and the ranges, by window; a kernel is its launch's.
    `near_ns`: what came so long before it is a window's too.
    """
    found, spans = Recorded(), list[tuple[int, float]]()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["type"] == "window" and record["phase"] == "B":
            found.windows.append(Window(record["cause"].partition(":")[0]))
            spans.append((record["ts_ns"], math.inf))
        elif record["type"] == "window":
            found.windows[-1].end = record["cause"].partition(":")[0]
            spans[-1] = spans[-1][0], record["ts_ns"]
    found.footer, launched = records[-1], dict[int, int]()
    for record in sorted(records, key=lambda record: kind_of(record) == "kernels"):
        at_ns = record.get("ts_ns", 0)
        inside = [number for number, (begin, end) in enumerate(spans) if begin - near_ns <= at_ns <= end]
        if inside and record["type"] == "userspace" and "launch" in record:
            launched[record["launch"]] = inside[0]
        if not (what := kind_of(record)):
            continue
        if what == "kernels":
            inside = [launched[record["launch"]]] if record["launch"] in launched else []
        if inside:
            window = found.windows[inside[0]]
            setattr(window, what, getattr(window, what) + 1)
        else:
            found.outside[what] += 1
    return found


def kind_of(record: dict[str, Any]) -> str:
    name, phase = str(record.get("name")), record.get("phase")
    if record["type"] == "gpu_kernel" and "elementwise" in name:
        return "kernels"
    if record["type"] == "userspace" and name == "cudaLaunchKernel" and phase != "E":
        return "launches"
    return "ranges" if record["type"] == "annotation" and name == "step" and phase == "B" else ""


class Steps:
    """A capture of the program, which makes its steps when it is asked to."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        (folder / "train.py").write_text(PROGRAM)
        self.path, pipe = folder / "run.jsonl", subprocess.PIPE
        capture = [sys.executable, "-m", "tracepipe", "capture", *options, "-o", str(self.path)]
        self.printed = folder / "printed"
        with self.printed.open("w") as printed:
            self.process = subprocess.Popen(
                [*capture, "--", sys.executable, str(folder / "train.py"), str(folder / "enough")],
                stdin=pipe,
                stdout=pipe,
                stderr=printed,
                text=True,
                bufsize=1,
                env={**os.environ, "PYTHONPATH": PYTHONPATH},
            )
        assert self._line() == "ready", self.printed.read_text()

    def step(self, number: int) -> None:
        self.begin_step(number)
        self.end_step(number)

    def begin_step(self, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")

    def end_step(self, number: int) -> None:
        assert self._line() == str(number)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def wait_for(self, count: int, *words: str) -> None:
        """Until so many lines of the recording have these."""
        part = self.path.with_name(self.path.name + ".part")
        while self.process.poll() is None:
            for path in (part, self.path):  # it gets its name when it is complete
                with suppress(FileNotFoundError):
                    lines = path.read_text().splitlines()
                    if sum(all(word in line for word in words) for line in lines) >= count:
                        return
        raise AssertionError(self.printed.read_text())

    def make(self, count: int, near_ns: int = 0) -> Recorded:
        """Make so many steps, from number 0 on, and finish."""
        for number in range(count):
            self.step(number)
        return self.finish(near_ns)

    def finish(self, near_ns: int = 0) -> Recorded:
        printed, _ = self.process.communicate()
        assert (self.process.returncode, printed.split()) == (0, ["0"]), self.printed.read_text()
        return read(self.path, near_ns)


WINDOW = '"type":"window"'
ENGINE = ["--gpu", "kernels", "--layers", "gpu_kernel,userspace,annotation"]
ALL = ["--gpu", "kernels"]
WARPS = ["--gpu", "warps", "--layers", "gpu_kernel,gpu_warp,userspace,annotation"]


def step_windows(cause: str, end: str) -> list[Window]:
    return [Window(cause, end, ADDS, ADDS, 1)] * 2


@pytest.mark.parametrize("options", [ENGINE, ALL, WARPS], ids=["engine", "probes", "warps"])
def test_the_programs_own_choice(bench: Bench, tmp_path: Path, options: list[str]) -> None:
    steps = Steps(tmp_path, [*options, "--start-on", "profiler", "--repeat", "2"])
    recorded = steps.make(12)
    assert recorded.windows == step_windows("profiler", "profiler")
    assert recorded.outside == {}
    assert recorded.footer["losses"] == {}


@pytest.mark.parametrize("options", [ENGINE, ALL], ids=["engine", "probes"])
def test_ranges(bench: Bench, tmp_path: Path, options: list[str]) -> None:
    """The third of the program, and the third after it."""
    steps = Steps(tmp_path, [*options, "--start-on", "nvtx:step#3", "--repeat", "2"])
    recorded = steps.make(9)
    assert recorded.windows == step_windows("nvtx", "nvtx")
    assert recorded.outside == {}


@pytest.mark.parametrize("options", [ENGINE, ALL], ids=["engine", "probes"])
def test_launches(bench: Bench, tmp_path: Path, options: list[str]) -> None:
    """20 from the 101st on, and again."""
    trigger = ["--start-on", "kernel:elementwise#101", "--stop-on", "kernel:elementwise#20", "--repeat", "2"]
    steps = Steps(tmp_path, [*options, *trigger])
    recorded = steps.make(9, NEAR_NS)
    assert [window.launches for window in recorded.windows] == [20, 20]
    assert sum(window.kernels for window in recorded.windows) + recorded.outside["kernels"] == 40


def test_calls(bench: Bench, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("probes need root")
    trigger = ["--start-on", "call:cudaLaunchKernel#101", "--stop-on", "call:cudaLaunchKernel#20"]
    steps = Steps(tmp_path, [*ALL, *trigger, "--repeat", "2"])
    recorded = steps.make(9)
    assert [(window.kernels, window.launches) for window in recorded.windows] == [(20, 20)] * 2
    assert recorded.outside == {}


@pytest.mark.parametrize("options", [ENGINE, ALL], ids=["engine", "probes"])
def test_signals(bench: Bench, tmp_path: Path, options: list[str]) -> None:
    steps = Steps(tmp_path, [*options, "--start-on", "signal", "--repeat", "2"])
    for window in (1, 2):
        steps.step(0)
        steps.process.send_signal(signal.SIGUSR2)
        steps.wait_for(window, WINDOW, '"phase":"B"')
        for _ in range(3):
            steps.step(0)
        steps.process.send_signal(signal.SIGUSR2)
        steps.wait_for(window, WINDOW, '"phase":"E"')
    steps.step(0)
    recorded = steps.finish()
    assert recorded.windows == [Window("signal", "signal", 3 * ADDS, 3 * ADDS, 3)] * 2
    assert recorded.outside == {}


@pytest.mark.parametrize("options", [ENGINE, ALL], ids=["engine", "probes"])
def test_windows_of_a_program_that_launches_all_the_time(
    bench: Bench, tmp_path: Path, options: list[str]
) -> None:
    steps = Steps(tmp_path, [*options, "--start-on", "signal", "--duration", "100ms", "--repeat", "3"])
    steps.begin_step(-60_000)
    for window in (1, 2, 3):
        steps.process.send_signal(signal.SIGUSR2)
        steps.wait_for(window, WINDOW, '"phase":"E"')
    (tmp_path / "enough").touch()
    steps.end_step(-60_000)
    assert_each_launch_has_its_kernel(steps.finish(), windows=3, launches_min=10 * ADDS)


@pytest.mark.parametrize("options", [ENGINE, ALL], ids=["engine", "probes"])
def test_tens_of_windows(bench: Bench, tmp_path: Path, options: list[str]) -> None:
    """What a switch in the midst of a call harms shows after some tens of them."""
    trigger = ["--start-on", "nvtx:step", "--stop-on", "signal", "--duration", "40ms", "--repeat", "30"]
    steps = Steps(tmp_path, [*options, *trigger])
    steps.begin_step(-60_000)
    steps.wait_for(30, WINDOW, '"phase":"E"')
    (tmp_path / "enough").touch()
    steps.end_step(-60_000)
    assert_each_launch_has_its_kernel(steps.finish(), windows=30, launches_min=4 * ADDS)


def assert_each_launch_has_its_kernel(recorded: Recorded, windows: int, launches_min: int) -> None:
    assert len(recorded.windows) == windows
    for window in recorded.windows:
        assert window.end == "duration"
        assert window.launches >= launches_min
        # Of some at its ends there is the driver's call alone.
        assert 0 <= window.kernels - window.launches <= 20
    assert recorded.footer["losses"] == {}


@pytest.mark.parametrize("options", [ENGINE, ALL], ids=["engine", "probes"])
def test_a_window_that_is_open_when_cuda_starts(bench: Bench, tmp_path: Path, options: list[str]) -> None:
    steps = Steps(tmp_path, [*options, "--delay", "10ms"])
    recorded = steps.make(3)
    (window,) = recorded.windows
    launches = 4 * ADDS + 1  # the first sets the tensor to zeros
    assert (window.launches, window.kernels, window.ranges) == (launches, launches, 4)
    assert recorded.footer["losses"] == {}


def test_a_program_that_is_killed_in_a_window(bench: Bench, tmp_path: Path) -> None:
    steps = Steps(tmp_path, [*ENGINE, "--start-on", "nvtx:step#3", "--stop-on", "nvtx:step#5"])
    for number in range(4):
        steps.step(number)
    steps.wait_for(1, '"type":"gpu_kernel"')
    children = Path(f"/proc/{steps.process.pid}/task/{steps.process.pid}/children").read_text().split()
    (program,) = [int(pid) for pid in children if "train.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(program, signal.SIGKILL)
    steps.process.communicate()
    recorded = read(steps.path)
    assert recorded.footer["ended_by"] == "signal 9 (SIGKILL)"
    assert len(recorded.windows) == 1
    # The last 25 ms of a process that is killed may be missing.
    assert 0 < recorded.windows[0].kernels <= 3 * ADDS
