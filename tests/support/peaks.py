"""The peak memory of a report, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tracepipe.reports import REPORTS

_MEASURE = r"""
import re, sys
from tracepipe.cli import app

app(sys.argv[1:], standalone_mode=False)
# Not ru_maxrss, which is never below that of the process that forked this one.
print(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
"""


def peak_bytes(*command: str) -> int:
    """Peak memory of a process that reads a recording, makes one report and does nothing else.

    Each has a process of its own: a child of a process that has the libraries would lack the threads of
    DuckDB.
    """
    environment = os.environ | {"TRACEPIPE_CACHE": ""}
    with tempfile.TemporaryDirectory() as folder:
        # All that a report writes can be HTML, or a folder.
        output = ["-o", str(Path(folder, "out.html"))] if REPORTS[command[0]].output else []
        argv = [sys.executable, "-c", _MEASURE, *command, *output]
        done = subprocess.run(argv, check=True, capture_output=True, text=True, env=environment)
    return int(done.stderr.split()[-1]) * 1024
