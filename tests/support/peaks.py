"""The peak memory of a report, in a process of its own."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tracepipe.reports import REPORTS

_MEASURE = r"""
import json, os, re, sys
from tracepipe.cli import app

def measured(arguments):
    app(arguments, standalone_mode=False)
    # Not ru_maxrss, which is never below that of the process that forked this one.
    return re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]
"""
_ONE = """
print(measured(sys.argv[1:]), file=sys.stderr)
"""
# A report of each line in a child, which has the libraries: to load them anew takes longer than most reports.
_EACH = """
import numpy
from tracepipe.store import run

said = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for line in sys.stdin:
    child = os.fork()
    if not child:
        os.write(said, measured(json.loads(line)).encode() + b"\\n")
        break
    if os.waitpid(child, 0)[1]:
        os.write(said, b"failed\\n")
"""


def peak_bytes(*command: str) -> int:
    """Peak memory of a process that makes one report and does nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-c", _MEASURE + _ONE, *_written_to(folder, command)]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
    return int(done.stderr.split()[-1]) * 1024


@cache
def _measuring() -> subprocess.Popen[str]:
    """The process that measures in its children, one for all tests."""
    # A child would lack the threads of a library.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", _MEASURE + _EACH], text=True, env=environment, **pipes)
    atexit.register(process.communicate)
    return process


def compared_bytes(*command: str) -> int:
    """Peak memory of a report beyond what all have alike: it is for comparing recordings."""
    process = _measuring()
    assert process.stdin and process.stdout
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(_written_to(folder, command)), file=process.stdin, flush=True)
        return int(process.stdout.readline()) * 1024


def _written_to(folder: str, command: tuple[str, ...]) -> list[str]:
    """A command whose output goes into a folder: all that a report writes can be HTML, or a folder."""
    return [*command, *(["-o", str(Path(folder, "out.html"))] if REPORTS[command[0]].output else [])]
