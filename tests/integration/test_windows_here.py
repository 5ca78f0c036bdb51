"""Windows of real captures: what is recorded is what the stand-in for CUDA was called for in them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_capture import Trace, run
from tests.support.standin import needs
from tracepipe.errors import TracepipeError
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.request import Limits, Windows

pytestmark = [pytest.mark.ebpf, needs("prebuilt")]

HELD_NS = 10_000_000
"""HOLD_UNSEEN_NS of probes.bpf.c: how long a call waits in any case for the window that it begins."""

# A program that is to outlive its last window waits, for 30 s at most, until its recording has a footer.
_OUTLIVE = """
def outlive(recording):
    ends_s = time.monotonic() + 30
    while recording and time.monotonic() < ends_s:
        if b'"footer"' in open(recording, "rb").read()[-10_000:]:
            break
        time.sleep(0.01)
"""

# Calls cuInit(n) to mark the place: the stand-in returns an error for flags, and the probe records them. The
# last argument is how long it waits for a window that begins late, on a busy machine.
_PROGRAM = f"""
import ctypes, sys, time
{_OUTLIVE}
cuda = ctypes.CDLL("libcuda.so.1")
for at in range(int(sys.argv[1])):
    if at % 10 == 2:
        cuda.cuProfilerStart()
        time.sleep(float(sys.argv[3]))
    cuda.cuInit(at)
    if at % 10 == 5:
        cuda.cuProfilerStop()
    time.sleep(float(sys.argv[2]))
outlive(sys.argv[4])
"""


# The capture, this program's parent, stands still while the window is asked for and is over.
_AT_ONCE = f"""
import ctypes, os, signal, sys, time
{_OUTLIVE}
cuda = ctypes.CDLL("libcuda.so.1")
time.sleep(float(sys.argv[2]))
os.kill(os.getppid(), signal.SIGSTOP)
try:
    cuda.cuProfilerStart()
    cuda.cuProfilerStop()
    time.sleep(float(sys.argv[3]))
finally:
    os.kill(os.getppid(), signal.SIGCONT)
time.sleep(float(sys.argv[2]))
cuda.cuInit(9)
outlive(sys.argv[4])
"""


def recorded(
    tmp_path: Path,
    standin: Path,
    times: int,
    pause_s: float,
    wait_s: float = 0,
    program: str = _PROGRAM,
    outlives: bool = True,
    **options: Any,
) -> Any:
    os.environ["LD_LIBRARY_PATH"] = str(standin)
    recording = str(tmp_path / "run.jsonl") if outlives else ""
    try:
        command = [sys.executable, "-c", program, str(times), str(pause_s), str(wait_s), recording]
        return run(tmp_path, command, **{"layers": ("userspace", "syscall")} | options)
    finally:
        del os.environ["LD_LIBRARY_PATH"]


def calls(trace: Trace) -> list[tuple[int, int]]:
    """When cuInit was called, and with what; not the calls that a late window began in."""
    begins = [e for e in trace.layer("userspace") if e["name"] == "cuInit" and e["phase"] == "B"]
    return [(e["ts_ns"], e["args"]["flags"]) for e in begins if "flags" in e["args"]]


def inits(trace: Trace) -> list[int]:
    return [flags for _, flags in calls(trace)]


def noting(times: list[int], function: Callable[..., int]) -> Callable[..., int]:
    """The function, which adds the time of each call to `times`."""

    def noted(*given: Any) -> int:
        times.append(time.monotonic_ns())
        return function(*given)

    return noted


def turns(trace: Trace) -> list[tuple[int, str, str]]:
    return [(turn["window"], turn["phase"], turn["cause"]) for turn in trace.layer("window")]


def test_the_profilers_calls_begin_and_end_windows(tmp_path: Path, standin: Path) -> None:
    windows = Windows(start_on="profiler", repeat=2)
    trace, summary, _ = recorded(tmp_path, standin, 20, 0, wait_s=1.5, windows=windows)
    assert inits(trace) == [2, 3, 4, 5, 12, 13, 14, 15]
    assert turns(trace) == [(n, phase, "profiler") for n in (1, 2) for phase in "BE"]
    assert (summary.ended_by, summary.exit_code, summary.windows.count) == ("profiler", 0, 2)
    assert trace.header["options"] == {"start_on": "profiler", "repeat": 2}


def test_a_call_begins_a_window_and_its_return_ends_it(tmp_path: Path, standin: Path) -> None:
    windows = Windows(start_on="call:cuInit#7", stop_on="call:cuInit#3", repeat=2)
    trace, _, _ = recorded(tmp_path, standin, 40, 0.03, windows=windows)
    begins, ends = trace.layer("window")[::2], trace.layer("window")[1::2]
    assert (len(begins), len(ends)) == (2, 2)
    is_in_time = True  # else a window began late, on a busy machine, and states it
    for first, begin, end in zip((6, 15), begins, ends, strict=True):
        mine = [flags for at, flags in calls(trace) if begin["ts_ns"] <= at <= end["ts_ns"]]
        assert mine == list(range(mine[0], mine[0] + len(mine))) if mine else begin["waited_ns"]
        assert len(mine) <= 3
        is_in_time = is_in_time and begin.get("waited_ns", 0) < HELD_NS
        if is_in_time:
            assert (mine, begin["tid"]) == ([first, first + 1, first + 2], end["tid"])


def test_a_window_that_ends_at_once_is_stated(tmp_path: Path, standin: Path) -> None:
    """And how long after it was asked for."""
    windows = Windows(start_on="profiler")
    trace, summary, _ = recorded(tmp_path, standin, 1, 0.5, 0.25, program=_AT_ONCE, windows=windows)
    begin, end = trace.layer("window")
    assert (begin["cause"], end["cause"], summary.ended_by) == ("profiler",) * 3
    assert begin["waited_ns"] >= 250_000_000
    assert inits(trace) == []


def test_windows_by_time_hold_what_happens_in_them(
    tmp_path: Path, standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = Windows(delay_ns=700_000_000, repeat=2)
    limits = Limits(duration_ns=300_000_000)
    opened, linked = list[int](), list[int]()
    for done, name in ((opened, "open_tracepoint"), (linked, "link_event")):
        monkeypatch.setattr(bpf, name, noting(done, getattr(bpf, name)))
    layers = ("userspace", "syscall", "scheduler")
    options: dict[str, Any] = {"windows": windows, "limits": limits, "layers": layers}
    trace, summary, _ = recorded(tmp_path, standin, 2000, 0.002, **options)
    assert turns(trace) == [
        (n, phase, why) for n in (1, 2) for phase, why in (("B", "delay"), ("E", "duration"))
    ]
    times = [turn["ts_ns"] for turn in trace.layer("window")]
    assert times[0] - trace.header["start"]["monotonic_ns"] >= 700_000_000
    assert times[2] - times[1] >= 700_000_000
    # A held call would make the opening of a tracepoint wait, so that is done before the first window.
    assert max(opened) < times[0] - 500_000_000 < times[1] < max(linked) < times[2]
    events = [event["ts_ns"] for event in trace.layer("userspace") + trace.layer("syscall")]
    assert any(times[2] <= event["ts_ns"] <= times[3] for event in trace.layer("scheduler"))
    assert all(times[0] <= at <= times[1] or times[2] <= at <= times[3] for at in events)
    assert list(trace.slices("userspace"))
    assert list(trace.slices("syscall"))
    assert summary.ended_by == "duration"


def test_a_trigger_that_never_happens_is_an_error_and_the_command_is_not_touched(
    tmp_path: Path, standin: Path
) -> None:
    windows = Windows(start_on="call:cuInit#1000")
    trace, summary, _ = recorded(tmp_path, standin, 5, 0, outlives=False, windows=windows)
    assert (summary.error, summary.exit_code) == ("call:cuInit#1000 did not happen: nothing was recorded.", 0)
    assert trace.events == []
    with pytest.raises(TracepipeError, match=r"--start-on call:cuInitt: no such function.*near: cuInit"):
        recorded(tmp_path, standin, 5, 0, windows=Windows(start_on="call:cuInitt"))
