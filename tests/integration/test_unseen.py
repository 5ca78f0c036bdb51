"""What the kernel runs no program for is counted, as in an interrupt of another; and how many it runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_capture import run
from tests.support.standin import needs

pytestmark = [pytest.mark.ebpf, needs("prebuilt")]

SCRIPT = """
import os, threading, time
end = time.monotonic() + 1
def nap():
    while time.monotonic() < end: time.sleep(0.0002)
for _ in range(3): threading.Thread(target=nap).start()
while time.monotonic() < end: os.getppid()
"""


def missing(events: Iterable[dict[str, Any]]) -> int:
    """Threads that run again after they waited, without a wakeup; or elsewhere, without a migration."""
    left: dict[int, tuple[str, int]] = {}
    found = 0
    for event in events:
        tid, args = event["tid"], event.get("args", {})
        state, cpu = left.pop(tid, ("", -1))
        if event["name"] == "running" and event["phase"] == "E":
            if args["prev_state"] not in ("not reported", "dead", "zombie"):
                left[tid] = args["prev_state"], event["cpu"]
        elif event["name"] == "running":
            found += state in ("sleeping", "disk")
            found += cpu not in (-1, event["cpu"])
        elif cpu >= 0:
            left[tid] = ("", cpu) if event["name"] == "wakeup" else (state, args["to_cpu"])
    return found


def test_wakeups_and_migrations_that_no_program_saw_are_counted_exactly(tmp_path: Path) -> None:
    """A hook's program runs at every system call, in which timers end that wake the other threads."""
    hook = "tracepoint:raw_syscalls:sys_enter(id)"
    trace, _, _ = run(tmp_path, [sys.executable, "-c", SCRIPT], layers=("scheduler",), hooks=(hook,))
    # In the order of their times: an interrupt's record stands in the ring before the one that it came in.
    events = sorted(trace.layer("scheduler"), key=lambda event: event["ts_ns"])
    assert len(events) > 1000
    assert trace.footer["losses"].get("scheduler", 0) == missing(events)


SYNCS = """
import os, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
for _ in range(50):
    os.write(file, b"x")
    os.fsync(file)
"""


def test_one_program_is_for_all_interrupts_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts with several GPUs have tens of them, and the kernel runs 64 programs at a tracepoint."""
    numbers: list[int] = []

    def interrupts(_: str, table: str) -> list[int]:
        numbers[:] = [int(number) for number in re.findall(r"^ *(\d+):", table, re.MULTILINE)]
        return [*range(10**6, 10**6 + 100), *numbers]

    monkeypatch.setattr("tracepipe.tracer.find.kernel.interrupts_of", interrupts)
    command = [sys.executable, "-c", SYNCS, str(tmp_path / "synced")]
    trace, _, _ = run(tmp_path, command, layers=("scheduler",))
    seen = {event["args"]["irq"] for event in trace.layer("scheduler") if event["name"] == "gpu_complete"}
    assert seen
    assert seen <= set(numbers)
