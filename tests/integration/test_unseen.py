"""Counted is what the kernel ran no program for: it runs none in an interrupt of another, or of perf."""

from __future__ import annotations

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
