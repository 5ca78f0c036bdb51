"""Runs a program while the process that empties bpftrace's buffers is stopped, so that they fill for certain.

python held_reader.py PROGRAM [ARGUMENT …]      as the command of a capture by bpftrace
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def readers(parent: int) -> list[int]:
    """The bpftrace processes that a capture, our parent, has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        state, its_parent = rest.split()[:2]
        if (name, its_parent) == ("bpftrace", str(parent)) and state != "Z":
            found.append(int(stat.parent.name))
    return found


def main() -> int:
    """Run the command of the arguments; returns its exit code."""
    held = readers(os.getppid())
    assert held
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    try:
        return subprocess.run(sys.argv[1:]).returncode
    finally:
        for pid in held:
            os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())
