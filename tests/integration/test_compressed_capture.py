"""Captures into compressed files: whole ones, and what is left of one that was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.standin import needs
from tests.support.waiting import wait_until
from tracepipe.recording.convert import check
from tracepipe.recording.files import open_input

ROOT = Path(__file__).parents[2]
CAPTURE = [
    *(sys.executable, "-m", "tracepipe", "capture"),
    *("--method", "prebuilt", "--layers", "userspace", "--calls", "all", "--gpu", "off"),
]
WAITS_AT_MOST_S = 1.0  # a line, in the capture's memory

pytestmark = [
    pytest.mark.ebpf,
    pytest.mark.alone,
    needs("prebuilt"),
    pytest.mark.parametrize("suffix", [".gz", ".zst"]),
]


def records(path: Path) -> list[dict[str, Any]]:
    """The records of the lines that are whole."""
    with open_input(str(path)) as stream:
        lines = b"".join(iter(lambda: stream.read(1 << 20), b"")).splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def test_a_fast_program_is_recorded_whole(suffix: str, tmp_path: Path, vec_add: str) -> None:
    path, calls = tmp_path / f"run.jsonl{suffix}", 100_000
    spin = ["--call", "cuCtxGetCurrent", "--spin", str(calls)]
    command = [*CAPTURE, "-o", str(path), "--", vec_add, "-n", "100", "--threads", "2", *spin]
    errors = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stderr
    assert "lost:" not in errors
    found = records(path)
    phases = Counter(record["phase"] for record in found if record.get("name") == "cuCtxGetCurrent")
    assert phases == {"B": 2 * calls, "E": 2 * calls}
    assert found[-1]["counts"]["userspace"] == sum(record["type"] == "userspace" for record in found)
    assert path.stat().st_size < 4 * calls * 134 // 5


def test_a_killed_capture_leaves_all_but_the_last_second(suffix: str, tmp_path: Path, vec_add: str) -> None:
    part = tmp_path / f"run.jsonl{suffix}.part"
    # So few that no part is written for being full.
    spin = ["--call", "cuCtxGetCurrent", "--spin", "1000000", "--rate", "200"]
    command = [*CAPTURE, "-o", str(part.with_suffix("")), "--", vec_add, *spin]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, cwd=ROOT, start_new_session=True) as capture:
        try:
            wait_until(lambda: capture.poll() is not None or (part.exists() and len(records(part)) >= 500))
            assert capture.poll() is None
            capture.send_signal(signal.SIGKILL)
            killed_ns = time.monotonic_ns()
            capture.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(capture.pid, signal.SIGKILL)  # the program goes on without its capture
    messages: list[str] = []
    account = check(str(part), "", messages.append)
    assert account.counts["userspace"] >= 500
    assert account.notes == ["the file has no footer: the capture was cut off"]
    assert all("was cut off" in text for text in messages)  # by a write that the signal stopped halfway
    newest_ns = max(record["ts_ns"] for record in records(part) if "ts_ns" in record)
    assert killed_ns - newest_ns < (WAITS_AT_MOST_S + 1) * 1e9
