"""What an installation without the extra `reports` can do, and which commands import what it brings."""

from __future__ import annotations

import json
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

# Refuses to import what argv[1] names, runs each of the commands in argv[2] and prints how they ended, and
# which of the libraries were imported until then.
COMMANDS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.abc import MetaPathFinder

refused, commands = sys.argv[1].split(","), json.loads(sys.argv[2])

class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
from tracepipe import cli
for argv in commands:
    sys.argv = ["tracepipe", *argv]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    imported = [*{"jinja2", "matplotlib", "scipy"} & set(sys.modules)]
    print(json.dumps([code, out.getvalue(), err.getvalue().splitlines(), imported]))
"""
# Exit code, output, messages and imported libraries.
Ended = tuple[int, str, list[str], set[str]]


def ran_each(refused: set[str], commands: list[list[str]], folder: Path) -> list[Ended]:
    """How commands ended that ran one after the other in a process without some libraries."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, ",".join(refused), json.dumps(commands)],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        check=True,
    )
    ends = map(json.loads, done.stdout.splitlines())
    return [(code, out, messages, set(imported)) for code, out, messages, imported in ends]


def ran(refused: set[str], *argv: str, folder: Path) -> Ended:
    """How one command ended."""
    return ran_each(refused, [[*argv]], folder)[0]


MOST = [
    *([name, WARPS] for name in ("summary", "gaps", "layers", "memory", "lines", "annotations")),
    ["timeline", WARPS],
    ["stalls", STALLS],
    ["export", WARPS, "-o", "tables"],
    ["diff", CALLS, CALLS],
]


@pytest.fixture(scope="module")
def most(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """By report: what cannot be imported for one cannot be for the next of the process either."""
    ends = ran_each(EXTRA, MOST, tmp_path_factory.mktemp("most"))
    return {argv[0]: end for argv, end in zip(MOST, ends, strict=True)}


@pytest.mark.parametrize("report", [argv[0] for argv in MOST])
def test_most_reports_need_no_extra(report: str, most: dict[str, Ended]) -> None:
    code, out, messages, imported = most[report]
    assert code == 0 and out, messages
    assert not imported


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
def test_a_missing_library_is_reported_before_the_recording_is_read(
    argv: list[str], missing: str, tmp_path: Path
) -> None:
    code, out, messages, imported = ran(EXTRA, *argv, folder=tmp_path)
    assert (code, out, imported) == (3, "", set())
    assert messages == [f"tracepipe: {missing}", "  pip install 'tracepipe[reports]'"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_runs_with_warps_are_compared_by_scipy(tmp_path: Path) -> None:
    code, _, messages, _ = ran(EXTRA, "diff", WARPS, WARPS, folder=tmp_path)
    assert (code, messages[-1]) == (3, "  pip install 'tracepipe[reports]'")
    assert messages[-2].startswith("tracepipe: reports need scipy.special, which cannot be imported")


OTHERS = [
    ["--help"],
    ["--version"],
    ["capture", "--help"],
    ["capture", "--gpu", "off", "--duration", "1ms"],
    ["convert", WARPS, "-o", "x.pftrace"],
    ["convert", WARPS, "-o", "x.json.gz"],
    ["cut", WARPS, "--to", "1ms", "-o", "x.jsonl"],
    ["validate", WARPS],
    ["doctor"],
]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """By command line: what one imports, the next of the process has imported too."""
    # Without BCC `doctor` tries out no captures, which take a second.
    ends = ran_each({"bcc", *EXTRA}, OTHERS, tmp_path_factory.mktemp("others"))
    return {" ".join(argv): end for argv, end in zip(OTHERS, ends, strict=True)}


@pytest.mark.parametrize("line", [" ".join(argv) for argv in OTHERS])
def test_other_commands_import_no_library_of_the_reports(line: str, others: dict[str, Ended]) -> None:
    _, out, messages, imported = others[line]
    assert not imported
    assert not any("reports need" in line for line in [*out.splitlines(), *messages])
