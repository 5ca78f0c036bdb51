"""What an installation without the extra `reports` can do, and which commands import polars."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.program import PYTHONPATH

ROOT = Path(__file__).parents[2]
CALLS, STALLS, WARPS = (
    str(ROOT / "fixtures" / case / "input.jsonl") for case in ("host-layers", "gpu-stalls", "capture-h200")
)
EXTRA = {"jinja2", "matplotlib", "scipy"}

# Refuses to import what argv[1] names, runs a command and prints which of the libraries it imported.
COMMAND = """
import sys
from importlib.abc import MetaPathFinder

refused = sys.argv.pop(1).split(",")

class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
from tracepipe import cli
try:
    cli.main()
finally:
    print("imported:", *{"polars", "jinja2", "matplotlib", "scipy"} & set(sys.modules), file=sys.stderr)
"""


def ran(refused: set[str], *argv: str, folder: Path) -> tuple[int, str, list[str], set[str]]:
    """Exit code, output, messages and imported libraries of a command without the refused libraries."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, ",".join(refused), *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    *messages, imported = done.stderr.splitlines()
    return done.returncode, done.stdout, messages, set(imported.split()[1:])


@pytest.mark.parametrize(
    "argv",
    [
        *([name, WARPS] for name in ("summary", "gaps", "layers", "memory", "lines", "annotations")),
        ["timeline", WARPS],
        ["stalls", STALLS],
        ["export", WARPS, "-o", "tables"],
        ["diff", CALLS, CALLS],
    ],
    ids=lambda argv: argv[0],
)
def test_most_reports_need_polars_alone(argv: list[str], tmp_path: Path) -> None:
    code, out, messages, imported = ran(EXTRA, *argv, folder=tmp_path)
    assert code == 0 and out, messages
    assert imported <= {"polars"}


@pytest.mark.parametrize(
    ("argv", "missing"),
    [
        (["warps", WARPS], "warps needs scipy, which is not installed"),
        (["plot", WARPS, "-o", "x.png"], "plot needs matplotlib, which is not installed"),
        (
            ["report", WARPS, "-o", "x.html"],
            "report needs jinja2, matplotlib and scipy, which are not installed",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_report_that_needs_more_says_so_before_it_reads(
    argv: list[str], missing: str, tmp_path: Path
) -> None:
    code, out, messages, imported = ran(EXTRA, *argv, folder=tmp_path)
    assert (code, out, imported) == (3, "", set())
    assert messages == [f"tracepipe: {missing}", "  pip install 'tracepipe[reports]'"]
    assert not list(tmp_path.iterdir())


def test_runs_with_warps_are_compared_by_scipy(tmp_path: Path) -> None:
    code, _, messages, _ = ran(EXTRA, "diff", WARPS, WARPS, folder=tmp_path)
    assert (code, messages[-1]) == (3, "  pip install 'tracepipe[reports]'")
    assert messages[-2].startswith("tracepipe: reports need scipy.special, which cannot be imported")


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["capture", "--help"],
        ["capture", "--gpu", "off", "--duration", "1ms"],
        ["convert", WARPS, "-o", "x.pftrace"],
        ["convert", WARPS, "-o", "x.json.gz"],
        ["cut", WARPS, "--to", "1ms", "-o", "x.jsonl"],
        ["validate", WARPS],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_other_commands_import_no_library_of_the_reports(argv: list[str], tmp_path: Path) -> None:
    refused = {"polars", *EXTRA}
    _, out, messages, imported = ran(refused, *argv, folder=tmp_path)
    assert not imported
    assert not any("need" in line and "polars" in line for line in [*out.splitlines(), *messages])
