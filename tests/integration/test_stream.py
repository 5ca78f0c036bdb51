"""Recordings that are written to standard output, and read while they grow."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest

from tests.support.program import PYTHONPATH
from tests.support.standin import needs

TRACEPIPE = [sys.executable, "-m", "tracepipe"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH}
CAPTURE = [
    *TRACEPIPE,
    "capture",
    "--method",
    "prebuilt",
    "--layers",
    "userspace",
    "--calls",
    "all",
    "--gpu",
    "off",
]
PATIENCE_S = 60

pytestmark = [pytest.mark.ebpf, needs("prebuilt")]


def done(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.parametrize("written_to", ["standard error", "a file"])
def test_the_commands_output_is_not_in_the_recording(written_to: str, vec_add: str, tmp_path: Path) -> None:
    options = ["--command-output", "output"] if written_to == "a file" else []
    recorded = done([*CAPTURE, "-o", "-", *options, "--", vec_add, "-n", "10"], tmp_path)
    assert recorded.returncode == 0, recorded.stderr
    records = [json.loads(line) for line in recorded.stdout.splitlines()]
    assert (records[0]["type"], records[-1]["ended_by"]) == ("header", "exit 0")
    errors = (tmp_path / "output").read_text() if options else recorded.stderr
    assert "ok: 10 elements" in errors
    assert ("ok: 10 elements" in recorded.stderr) == (not options)


def test_a_recording_is_shown_while_it_is_written(vec_add: str, tmp_path: Path) -> None:
    # Both ends of a pipe get the Ctrl-C of their terminal: the program ends by it, and then the recording.
    spin = f"{vec_add} -n 10 --call cuCtxGetCurrent --spin 10000000 --rate 500"
    capture = shlex.join([*CAPTURE, "-o", "-", "--command-output", "output", "--", *shlex.split(spin)])
    live = shlex.join([*TRACEPIPE, "live", "--interval", "100ms", "--sort", "count", "--top", "1", "-"])
    shell = ["sh", "-c", f"trap : INT; {capture} | {live}"]
    with subprocess.Popen(
        shell, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as both:
        giving_up = Timer(PATIENCE_S, os.killpg, (both.pid, signal.SIGKILL))
        giving_up.start()
        assert both.stdout is not None
        counts: list[int] = []
        for line in both.stdout:
            if line.startswith("userspace  cuCtxGetCurrent"):
                is_third = len(set(counts)) == 2
                counts.append(int(line.split()[2].replace(",", "")))
                if is_third and len(set(counts)) == 3:
                    os.killpg(both.pid, signal.SIGINT)
        giving_up.cancel()
    assert both.returncode == 0
    assert counts == sorted(counts)
    assert len(set(counts)) >= 3
