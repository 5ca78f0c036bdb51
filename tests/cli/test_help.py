"""What each command's help has, and what a shell completes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.test_output import piped
from tests.support.here import read_ranks_here
from tests.support.program import PYTHONPATH
from tests.support.simulated_job import SimulatedJob
from tracepipe import cli
from tracepipe.cli.help import examples_of
from tracepipe.converters import CONVERTERS
from tracepipe.readers import READERS
from tracepipe.reports import REPORTS
from tracepipe.tracer.request import LAYER_NAMES

FIXTURES = Path(__file__).parents[2] / "fixtures"
RUN = FIXTURES / "capture-h200" / "input.jsonl"
# What an example does beyond files: it records, serves a browser, or compiles.
_NOT_RUN = ("capture", "live", "open", "doctor", "hooks", "mcp", "include", "whatif", "")


def commands() -> Iterator[tuple[str, Any]]:
    """All commands by their names, those of groups too, and the program itself by ""."""
    program = typer.main.get_group(cli.app)
    context = typer.Context(program)  # type: ignore[arg-type]
    yield "", program
    for name in program.list_commands(context):  # type: ignore[arg-type]
        command: Any = program.get_command(context, name)  # type: ignore[arg-type]
        yield name, command
        for inner, one in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", one


COMMANDS = dict(commands())
EXAMPLES = [(name, line) for name in COMMANDS for line in examples_of(name)]


def calls_of(line: str) -> Iterator[list[str]]:
    """The arguments of each call of tracepipe in a line of a shell."""
    words = shlex.split(line.replace('"$(tracepipe include)"', "| tracepipe include |"))
    call: list[str] | None = None
    for word in [*words, "|"]:
        if word == "|":
            if call is not None:
                yield call
            call = None
        elif word == "tracepipe" and call is None:
            call = []
        elif call is not None:
            call.append(word)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_a_help_with_examples(
    name: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, err = piped([*name.split(), flag])
    assert (code, err) == (0, "")
    text, _, examples = out.partition("Examples:\n")
    assert f"Usage: tracepipe {name}".rstrip() in text and "{" not in text.splitlines()[0]
    assert [line.strip() for line in examples.splitlines() if line.strip()] == [*examples_of(name)]


@pytest.mark.parametrize(("name", "line"), EXAMPLES)
def test_every_example_is_read_by_its_command(name: str, line: str) -> None:
    named = set()
    for argv in calls_of(line):
        depth = 2 if " ".join(argv[:2]) in COMMANDS else 1
        path = " ".join(argv[:depth])
        COMMANDS[path].make_context(path, argv[depth:])  # raises where it cannot be read
        named |= {"", path, argv[0]}
    assert name in named


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    ("name", "line"),
    [(name, line) for name, line in EXAMPLES if name.split(" ")[0] not in _NOT_RUN and "://" not in line],
)
def test_every_example_on_files_runs(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read_ranks_here(monkeypatch)
    for copy in ("run", "run2", "other", "other2"):
        shutil.copy(RUN, f"{copy}.jsonl")
    shutil.copy(FIXTURES / "gpu-stalls" / "input.jsonl", "stalls.jsonl")
    for rank in ("rank0.jsonl", "rank1.jsonl", "runs/0.jsonl", "runs/1.jsonl"):
        Path(rank).parent.mkdir(exist_ok=True)
        shutil.copy(RUN, rank)
    Path("slow.sql").write_text("select name from slice limit 1")
    if name == "ranks":
        shutil.rmtree("runs")
        SimulatedJob(1, 2, steps=13).write(Path("runs"))
    if " ds " in f"{line} " and not name.startswith("dataset"):
        assert piped(["dataset", "build", "runs", "-o", "ds", "--jobs", "1"])[0] == 0
    for argv in calls_of(line):
        code, _, err = piped(argv)
        assert code == 0, err


def test_commands_are_listed_in_the_order_of_use() -> None:
    first = [
        "capture",
        "live",
        "convert",
        "open",
        "validate",
        "cut",
        "query",
        "dataset",
        "ranks",
        "doctor",
        "hooks",
        "mcp",
        "include",
    ]
    assert [name for name in COMMANDS if name and " " not in name] == [*first, *REPORTS]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name])
def test_every_option_has_a_sentence_with_its_value(name: str) -> None:
    for option in COMMANDS[name].params:
        assert option.help and option.help[0].isupper() and option.help.endswith("."), (name, option.name)
        assert "for programs" not in option.help.lower()
        if option.metavar == "TIME" and option.name != "end" and name != "capture":
            assert "seconds" in option.help, (name, option.name)


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_shows_its_own_options_first(name: str) -> None:
    panels = [
        option.rich_help_panel for option in COMMANDS[name].params if option.param_type_name == "option"
    ]
    own = [field.name for field in REPORTS[name].options.__dataclass_fields__.values()]
    named = {option.name: option.rich_help_panel for option in COMMANDS[name].params}
    assert all(named[option] is None for option in own)
    assert {named[one] for one in ("source_format", "strict", "assume_offset", "undated")} == {"Reading"}
    assert {named[one] for one in ("as_json", "full_names")} == {"Output"} and set(panels) >= {"Reading"}


# Completion -----------------------------------------------------------------------------------------------


def completed(shell: str, line: str) -> list[str]:
    """Return the values that a shell offers to complete a line, without their help."""
    words = line.split(" ")
    asked = {
        "_TRACEPIPE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in asked.items():
            patch.setenv(name, value)
        code, out, err = piped([])
    assert (code, err) == (0, "")
    if shell == "zsh":
        return re.findall(r'^(?:_arguments \'\*: :\(\()?"([^"]*)"', out, re.MULTILINE)
    return [one.partition("\t")[0] for one in out.splitlines() if one]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("tracepipe ca", ["capture"]),
        ("tracepipe hooks ", ["list", "test"]),
        ("tracepipe convert --form", ["--format"]),
        ("tracepipe convert --format ", [*CONVERTERS]),
        ("tracepipe summary --undated ", ["skip", "between"]),
        ("tracepipe summary --from n", ["nsys"]),
        ("tracepipe capture --gpu w", ["warps"]),
        ("tracepipe capture --layers sy", ["syscall"]),
        ("tracepipe capture --layers syscall,sche", ["syscall,scheduler"]),
        ("tracepipe capture --hook n", ["nccl", "nvidia-kmod"]),
        ("tracepipe hooks list cuda-", ["cuda-driver", "cuda-runtime"]),
    ],
)
def test_a_shell_completes(shell: str, line: str, values: list[str]) -> None:
    assert sorted(completed(shell, line)) == sorted(values)


def test_all_commands_and_sources_are_completed() -> None:
    assert completed("bash", "tracepipe ") == [name for name in COMMANDS if name and " " not in name]
    assert completed("bash", "tracepipe summary --from ") == [*READERS]
    layers = completed("bash", "tracepipe capture --layers userspace,")
    assert layers == [f"userspace,{layer}" for layer in LAYER_NAMES if layer != "userspace"]


@pytest.mark.parametrize("shell", ["bash", "fish"])
@pytest.mark.parametrize(
    "line", ["tracepipe convert ", "tracepipe summary r", "tracepipe diff --a ", "tracepipe cut -o "]
)
def test_files_are_left_to_the_shell(shell: str, line: str) -> None:
    assert completed(shell, line) == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_takes_the_script(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").touch()
    (tmp_path / "tracepipe").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tracepipe "$@"\n')
    (tmp_path / "tracepipe").chmod(0o755)
    script = """
        eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 tracepipe --show-completion bash)"
        COMP_WORDS=(tracepipe capture --gpu k) COMP_CWORD=3
        _tracepipe_completion tracepipe && echo "${COMPREPLY[*]}"; complete -p tracepipe
    """
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.splitlines() == [
        "kernels", "complete -o default -F _tracepipe_completion tracepipe",
    ]  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_shown(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tracepipe", "--show-completion", shell],
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"_TRACEPIPE_COMPLETE=complete_{shell}" in done.stdout and "\\x" not in done.stdout


# The manual page ------------------------------------------------------------------------------------------


def test_the_manual_page_is_current() -> None:
    from tracepipe.cli.man import page

    made = "".join(f"{line}\n" for line in page())
    hint = "python -m tracepipe.cli.man > man/tracepipe.1"
    assert (FIXTURES.parent / "man" / "tracepipe.1").read_text() == made, hint
    assert made.isascii()
    for name in COMMANDS:
        assert f'.SS "tracepipe {name} '.replace("-", "\\-") in made or not name


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
def test_roff_finds_nothing_wrong_with_the_manual_page() -> None:
    page = FIXTURES.parent / "man" / "tracepipe.1"
    done = subprocess.run(
        ["groff", "-ww", "-man", "-Tutf8", page], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
