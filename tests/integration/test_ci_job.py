"""The job of docs/ci.md, run here: its steps record two versions of a program, compare them and comment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree

import pytest

from tests.support.compiled import compiled
from tests.support.program import PYTHONPATH
from tracepipe.tracer.gpu.build.toolchain import find_parts

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs/ci.md"
FOLDERS = [folder for part in find_parts().cupti for folder in part.include]
PROGRAM = """
#include <nvtx3/nvToolsExt.h>
#include <cstdio>
#include <cstdlib>
#include <fstream>
int main() {
    volatile unsigned work = 0;
    long loops = 0;
    std::ifstream("loops") >> loops;  // as the version that is checked out has it
    for (int step = 0; step < 40; step++) {
        char name[32];
        snprintf(name, sizeof name, "step %d", step);
        nvtxRangePushA(name);
        for (long at = 0; at < loops; at++) work += unsigned(at);
        nvtxRangePop();
    }
}
"""


def steps_of(page: str) -> dict[str, str]:
    """The scripts of the job by the names of its steps."""
    found = {}
    for step in page.split("      - name: ")[1:]:
        name, _, rest = step.partition("\n")
        script = rest.partition("        run: |\n")[2]
        lines = []
        for line in script.splitlines():
            if line and not line.startswith(" " * 10):
                break
            lines.append(line)
        found[name] = dedent("\n".join(lines))
    return found


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with two commits: in the second one each step takes four times as long."""
    compiler = shutil.which("g++")
    headers = [folder for folder in FOLDERS if (folder / "nvtx3/nvToolsExt.h").exists()]
    if compiler is None or not headers or shutil.which("git") is None:
        pytest.skip("there is no git, no g++, or no header of NVTX (pip install 'nvidia-nvtx==13.0.*')")
    source = tmp_path / "steps.cpp"
    source.write_text(PROGRAM)
    compiled([compiler, "-O1", f"-isystem{headers[0]}", str(source), "-ldl"], tmp_path / "steps")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, script in (
        ("tracepipe", f'exec "{sys.executable}" -m tracepipe "$@"'),
        ("gh", 'echo "$@" > "$GH_SAYS"'),
        ("pip", 'echo "$@" > "$PIP_SAYS"'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    for loops in (400_000, 1_600_000):  # other programs of the machine delay steps too
        (folder / "loops").write_text(str(loops))
        git(folder, "add", "loops")
        git(folder, "commit", "-qm", f"{loops}")
    # An earlier run on this machine made it, and actions/checkout has removed the folder.
    git(folder, "worktree", "add", "--detach", "base", "HEAD~1")
    shutil.rmtree(folder / "base")
    return folder


def test_the_job_finds_that_steps_became_longer(checkout: Path) -> None:
    steps = steps_of(PAGE.read_text())
    assert [*steps] == ["Install", "Record", "Compare", "Comment"]
    environment = {
        **os.environ,
        "PATH": f"{checkout.parent / 'tools'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": PYTHONPATH,
        "PROGRAM": str(checkout.parent / "steps"),
        "BASE": git(checkout, "rev-parse", "HEAD~1"),
        "NUMBER": "7",
        "GH_SAYS": str(checkout.parent / "said"),
        "PIP_SAYS": str(checkout.parent / "installed"),
    }
    # Without a GPU there is no idle time; all else is as on the page.
    codes, comments = {}, []
    for name in ("Install", "Compare", "Comment", "Record", "Compare", "Comment"):
        script = steps[name].replace(" --gate 'idle<=+2%'", "")
        # As GitHub Actions runs it.
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        codes[name] = done.returncode, done.stderr[-2000:] if done.returncode not in (0, 4) else ""
        if name == "Comment":
            comments.append((checkout / "comment.md").read_text())
    assert codes == {"Install": (0, ""), "Record": (0, ""), "Compare": (4, ""), "Comment": (0, "")}
    assert "tracepipe: base-?.jsonl.zst" in comments[0], "the reason why nothing is compared"
    assert "tracepipe" in (checkout.parent / "installed").read_text()
    assert "Broken: step<=+3%" in comments[1]
    (case,) = ElementTree.parse(checkout / "gates.xml").getroot()
    assert case[0].tag == "failure"
    assert (checkout.parent / "said").read_text().startswith("pr comment 7 --body-file comment.md")
