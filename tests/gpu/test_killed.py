"""A program or a capture that is killed: what was recorded stays readable, and no other process ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.bench import Bench
from tests.gpu.test_let_go import WARPS
from tests.support.program import PYTHONPATH
from tracepipe.event.checks import first_fault

pytestmark = pytest.mark.gpu

PATIENCE_S = 120
SHELL = 'echo "$$"; "$0" for_a_while; echo "ended with $?"'


def start(bench: Bench, recording: Path, engine: str, script: str) -> subprocess.Popen[str]:
    """A capture of the shell's script, whose $0 is the program."""
    capture = [sys.executable, "-m", "tracepipe", "capture", "--gpu", engine, "-o", str(recording)]
    return subprocess.Popen(
        [*capture, "--", "sh", "-c", script, str(bench.program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )


def wait_for(process: subprocess.Popen[str], wanted: str) -> list[str]:
    """The lines before the one that is wanted."""
    assert process.stdout is not None
    lines = []
    while (line := process.stdout.readline().strip()) != wanted:
        assert line, process.communicate(timeout=PATIENCE_S)[1]
        lines.append(line)
    return lines


@pytest.mark.parametrize("engine", ["kernels", "warps"])
def test_what_was_recorded_of_a_killed_program_can_be_read(bench: Bench, tmp_path: Path, engine: str) -> None:
    process = start(bench, tmp_path / "run.jsonl", engine, 'echo "$$"; exec "$0" for_a_while')
    (pid,) = wait_for(process, "begun")
    os.kill(int(pid), signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE_S)
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [first_fault(record) for record in records] == [None] * len(records)
    footer = records[-1]
    assert footer["ended_by"].startswith("signal 9"), errors
    assert footer["counts"]["gpu_kernel"] > 100
    assert engine == "kernels" or footer["counts"]["gpu_warp"] > 100 * WARPS


@pytest.mark.parametrize("engine", ["kernels", "warps"])
def test_a_program_outlives_its_killed_capture(bench: Bench, tmp_path: Path, engine: str) -> None:
    native = bench.native(str(bench.program), "for_a_while")
    process = start(bench, tmp_path / "run.jsonl", engine, SHELL)
    wait_for(process, "begun")
    process.kill()
    # The program holds the pipe until it ends.
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert "begun\n" + printed == f"{native.printed}ended with {native.exit_code}\n"
    assert native.exit_code == 0
