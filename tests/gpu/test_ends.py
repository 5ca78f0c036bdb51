"""Programs that end in many ways: each launch is recorded or lost, and what had completed is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.bench import Bench
from tests.support.program import PYTHONPATH

pytestmark = pytest.mark.gpu

ENDS = {
    **{
        number.name: number
        for number in (
            signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT,
            signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
        )
    },
    "null": signal.SIGSEGV, "trap": signal.SIGILL, "stack": signal.SIGSEGV, "abort": signal.SIGABRT,
    "terminate": signal.SIGABRT, "throw": signal.SIGABRT,
    **dict.fromkeys(("_exit", "exit", "exit_in_thread", "quick_exit", "exec", "fork")),
}  # fmt: skip


@pytest.fixture(scope="module")
def program(bench: Bench) -> Path:
    return bench.built("ends")


def captured(program: Path, folder: Path, engine: str, how: str) -> tuple[int, str, Path]:
    """The exit code, the messages and the recording."""
    recording = folder / "run.jsonl"
    capture = [sys.executable, "-m", "tracepipe", "capture", "--gpu", engine, "-o", str(recording)]
    if engine == "warps":
        capture += ["--launches-per-kernel", "0"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [*capture, "--", str(program), how], capture_output=True, text=True, env=environment
    )
    return done.returncode, done.stderr, recording


@pytest.mark.parametrize("engine", ["kernels", "warps"])
@pytest.mark.parametrize("how", ENDS)
def test_each_launch_is_recorded_or_counted(program: Path, tmp_path: Path, engine: str, how: str) -> None:
    code, errors, recording = captured(program, tmp_path, engine, how)
    number = ENDS[how]
    assert code == (7 if number is None else 128 + number), errors
    footer = json.loads(recording.read_text().splitlines()[-1])
    kept = footer["counts"].get("gpu_kernel", 0)
    assert (kept + footer["losses"].get("gpu_kernel", 0), kept >= 200) == (250, True), footer
    if engine == "warps":
        warps = footer["counts"]["gpu_warp"]
        assert (warps + footer["losses"].get("gpu_warp", 0), warps >= 6400) == (6450, True), footer


@pytest.mark.parametrize("engine", ["kernels", "warps"])
def test_a_kernel_that_faults_is_named_first(program: Path, tmp_path: Path, engine: str) -> None:
    code, errors, recording = captured(program, tmp_path, engine, "fault")
    assert code == 3, errors
    (error,) = json.loads(recording.read_text().splitlines()[-1])["cuda_errors"]
    assert "an illegal memory access" in error and "faulty" in error
    lines = errors.splitlines()
    assert lines.index(error) < next(at for at, line in enumerate(lines) if line.startswith(str(recording)))
