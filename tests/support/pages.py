"""The code blocks of the documentation, and its commands, run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.program import PYTHONPATH

ROOT = Path(__file__).parents[2]
# A fence with its language, its text, and the comment in front of it that says why the tests do not run it.
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n\n?)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_PATIENCE_S = 120
ANYWHERE, ON_GPU, ON_KPROBES = "", "# on a GPU", "# on kprobes"
PLACES = (ON_GPU, ON_KPROBES)


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    line: int
    language: str
    text: str
    reason: str
    """Why its commands are not run in the tests; empty where they are."""

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page of documentation, as its path from the repository's root."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("fixtures/*/README.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def text_of(page: str) -> str:
    """A page's text."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, text: str | None = None) -> list[Block]:
    """The code blocks of a page, in their order."""
    text = text_of(page) if text is None else text
    return [
        Block(
            page,
            text.count("\n", 0, match.start("text")),
            match["language"],
            match["text"],
            match["reason"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def section_blocks(page: str, section: str) -> list[tuple[str, list[str]]]:
    """The code blocks of a section of a page: what each needs, and its lines of commands."""
    parts = re.split(r"^## ", text_of(page), flags=re.MULTILINE)
    (own,) = [one for one in parts if one.startswith(f"{section}\n")]
    found = []
    for block in blocks(page, own):
        place = block.lines[0] if block.lines[0] in PLACES else ANYWHERE
        found.append((place, block.lines[1:] if place else block.lines))
    return found


def sections(page: str) -> list[str]:
    """The headings of a page."""
    return re.findall(r"^## (.*)$", text_of(page), re.MULTILINE)


def run_lines(lines: list[str], folder: Path, *, quiet: bool = False) -> str:
    """What commands print, one after the other in a folder; the first that fails ends the test.

    Without `quiet` each command itself is printed too.
    """
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    python = shlex.quote(sys.executable)
    commands = {"python": f"{python}", "tracepipe": f"{python} -m tracepipe", "sudo": ""}
    for name, command in commands.items():
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
    ended = subprocess.run(
        ["bash", "+x" if quiet else "-x", "-e", "-o", "pipefail", "-c", "\n".join(lines)],
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
