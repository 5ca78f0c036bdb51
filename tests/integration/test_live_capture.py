"""Live totals of real processes: the same numbers as the file of the same capture, and the command itself."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.standin import needs
from tracepipe.tracer import CaptureRequest, capture
from tracepipe.tracer.live.totals import LiveSink

pytestmark = [pytest.mark.ebpf, needs("prebuilt")]

LAYERS = ("syscall", "scheduler")
HOOK = "uprobe:libc.so.6:getppid() -> i32"
CALLS = 2000
PROGRAM = f"""
import os, threading, time
def work():
    for _ in range({CALLS // 2}):
        os.getppid()
        time.sleep(0.00001)
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
COMMAND = [sys.executable, "-c", PROGRAM]
LIVE = [sys.executable, "-m", "tracepipe", "live", "--method", "prebuilt", "--layers", ",".join(LAYERS)]
PATIENCE_S = 60


def spans(records: list[dict[str, Any]]) -> dict[tuple[str, str], list[int]]:
    """Durations by layer and name, of calls whose begin and end are in the file."""
    begun: dict[tuple[int, str], list[int]] = defaultdict(list)
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for record in records:
        if record.get("type") in ("userspace", "hook", "syscall"):
            stack = begun[record["tid"], record["name"]]
            if record["phase"] == "B":
                stack.append(record["ts_ns"])
            elif stack:
                found[record.get("layer", record["type"]), record["name"]].append(
                    record["ts_ns"] - stack.pop()
                )
    return found


def test_totals_are_those_of_the_file() -> None:
    file, totals = io.BytesIO(), LiveSink()
    request = CaptureRequest(COMMAND, LAYERS, method="prebuilt", hooks=(HOOK,))
    summary = capture(request, file, notify=lambda message: None, watchers=[totals])
    assert totals.wait(PATIENCE_S)
    snapshot = totals.snapshot()
    assert snapshot is not None
    assert snapshot.counts == summary.counts
    records = [json.loads(line) for line in file.getvalue().splitlines()]
    expected = spans(records)
    assert len(expected["libc.so.6", "getppid"]) == CALLS
    for total in snapshot.functions:
        durations = expected[total.layer, total.name]
        assert total.latencies.count == len(durations), total.name
        assert total.latencies.total_ns == sum(durations)
        assert total.latencies.max_ns == max(durations, default=0)
    running = [record for record in records if record.get("name") == "running" and record["phase"] == "E"]
    assert sum(thread.switches for thread in snapshot.threads) == len(running)
    assert len(snapshot.threads) == 3
    assert all(thread.waits["sleeping"] > 0 for thread in snapshot.threads)


def test_the_command_without_a_terminal() -> None:
    ended = subprocess.run(
        [*LIVE, "--top", "1", "--", "sh", "-c", "echo from the command; exit 3"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 3
    assert "from the command\n" in ended.stdout
    tables = ended.stdout + ended.stderr
    assert "\x1b" not in tables
    assert len(re.findall(r"^syscall  ", tables, re.MULTILINE)) == 1
    assert re.search(r"^and \d+ more functions$", tables, re.MULTILINE)


def test_nothing_is_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    subprocess.run([*LIVE, "--", "true"], cwd=tmp_path, capture_output=True, check=True, timeout=PATIENCE_S)
    assert list(tmp_path.iterdir()) == []
    subprocess.run([*LIVE, "-o", "x.jsonl", "--", "true"], cwd=tmp_path, capture_output=True, check=True)
    last = json.loads((tmp_path / "x.jsonl").read_text().splitlines()[-1])
    assert last["type"] == "footer"


def test_ctrl_c_ends_the_command_and_leaves_the_table() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*LIVE, "--", "sh", "-c", "echo begun; sleep 600"])
    written, is_interrupted, give_up_s = b"", False, time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            written += os.read(terminal, 1 << 16)
        except OSError:  # it has ended
            break
        if not is_interrupted and b"begun" in written and b"wait4" in written:
            os.write(terminal, b"\x03")
            is_interrupted = True
    os.close(terminal)
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 130
    assert b"Traceback" not in written
    table = written.decode()[written.decode().rindex("sh -c") :]
    assert re.search(r"syscall +wait4 ", table)
    assert "\x1b" not in table, "the last one is not drawn over"
