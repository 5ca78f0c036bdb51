"""Commands of a page of documentation, run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.program import PYTHONPATH

ROOT = Path(__file__).parents[2]
# After an empty line; a block ends at the next.
_BLOCK = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
_PATIENCE_S = 120
ANYWHERE, ON_GPU, ON_KPROBES = "", "# on a GPU", "# on kprobes"


def blocks(page: str, section: str) -> list[tuple[str, list[str]]]:
    """The indented blocks of a section of `docs/PAGE`: what each needs, and its lines of commands."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    part = re.split(r"^## ", text, flags=re.MULTILINE)
    (own,) = [one for one in part if one.startswith(f"{section}\n")]
    found = []
    for block in _BLOCK.findall(own):
        lines = [line[4:] for line in block.splitlines()]
        place = lines[0] if lines[0] in (ON_GPU, ON_KPROBES) else ANYWHERE
        found.append((place, lines[1:] if place else lines))
    return found


def sections(page: str) -> list[str]:
    """The headings of a page."""
    return re.findall(r"^## (.*)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)


def run_lines(lines: list[str], folder: Path) -> str:
    """What commands print, one after the other in a folder; the first that fails ends the test."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    python = shlex.quote(sys.executable)
    commands = {"python": f"{python}", "tracepipe": f"{python} -m tracepipe", "sudo": ""}
    for name, command in commands.items():
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
    ended = subprocess.run(
        ["bash", "-x", "-e", "-o", "pipefail", "-c", "\n".join(lines)],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": PYTHONPATH,
            "LD_LIBRARY_PATH": str(folder),
            "COLUMNS": "120",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout
