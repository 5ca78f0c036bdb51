"""Command lines of the documentation: split, parsed by the real command line, and run."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.pages import Block, run_lines
from tracepipe import cli

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
# What a shell has to do more than split words.
_SHELL = re.compile(r"[|&;<>$*?(){}~`\\]|\\$")
_ENDS_OF_A_COMMAND = {"|", "||", "&", "&&", ";", "(", ")"}
COLUMNS = "80"
# What is run: nothing that installs, downloads or needs rights.
PROGRAMS = {"tracepipe", "jq", "sort", "uniq", "head", "cp"}
# Its class: Typer has it from click, or brings it along.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


def commands(block: Block) -> list[tuple[str, str]]:
    """The command lines of a block, each with what the page shows as its output.

    Of `console` those after `$ `, with the lines up to the next; else every line, joined at a backslash, at a
    pipe and within quotes.
    """
    if block.language == "console":
        found = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
        return [(one.partition("\n")[0], one.partition("\n")[2]) for one in found]
    lines: list[str] = []
    more = False
    for line in block.lines:
        if more:
            lines[-1] += "\n" + line
        elif line.strip() and not line.startswith("#"):
            lines.append(line)
        else:
            continue
        more = _goes_on(lines[-1])
    return [(line, "") for line in lines]


def _goes_on(line: str) -> bool:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote that is not closed yet
        return True
    return line.endswith("\\") or words[-1:] == ["|"]


def tracepipe_arguments(line: str) -> list[list[str]]:
    """The arguments of each `tracepipe` in a command line, behind sudo, env, torchrun and the like."""
    lexer = shlex.shlex(line.replace("\\\n", " ").replace("$!", "4242"), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    found: list[list[str]] = []
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in _ENDS_OF_A_COMMAND:
            words.append(word)
            continue
        if "tracepipe" in words and words[0] not in ("apt", "ls"):
            found.append(_without_redirections(words[words.index("tracepipe") + 1 :]))
        words = []
    return found


def _without_redirections(words: list[str]) -> list[str]:
    for place, word in enumerate(words):
        if word in ("<", ">", ">>", ">&", "2>"):
            return words[:place]
    return words


def parse(arguments: list[str]) -> str:
    """What the command line finds wrong with arguments, which it parses without running the command."""
    command: Any = typer.main.get_command(cli.app)
    context = command.make_context("tracepipe", ["doctor"])
    name, rest = "tracepipe", list(arguments)
    try:
        while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
            name, *rest = rest
            outer, command = command, command.get_command(context, name)
            if command is None:
                return f"{outer.name} has no command {name}"
        command.make_context(name, rest, parent=context)
    except typer.Exit:
        return ""  # --help, --version
    except _USAGE_ERROR as error:
        return str(error.format_message())
    return ""


def is_command(name: str) -> bool:
    """Whether tracepipe has a command of that name."""
    group: Any = typer.main.get_command(cli.app)
    return group.get_command(group.make_context("tracepipe", ["doctor"]), name) is not None


def options() -> set[str]:
    """Every option of every command."""
    return {"--help"}.union(*options_of_commands().values())


def json_commands() -> list[str]:
    """Every command with `--json`: `gaps`, `dataset build`, …"""
    return [name for name, flags in options_of_commands().items() if "--json" in flags]


def options_of_commands() -> dict[str, set[str]]:
    """The options of every command; of the program itself, its name is ""."""
    found: dict[str, set[str]] = {}
    group: Any = typer.main.get_command(cli.app)
    waiting = [("", group, group.make_context("tracepipe", ["doctor"]))]
    while waiting:
        path, command, context = waiting.pop()
        flags = found.setdefault(path, set())
        for option in (one for one in command.params if one.param_type_name == "option"):
            flags.update(getattr(option, "opts", []), getattr(option, "secondary_opts", []))
        for name in command.list_commands(context) if hasattr(command, "list_commands") else []:
            waiting.append((f"{path} {name}".strip(), command.get_command(context, name), context))
    return found


def run(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line prints to standard output, run in a folder; it must end well.

    A line with tracepipe alone runs in this process, any other in a shell.
    """
    programs = {words[0] for part in _QUOTED.sub("''", line).split("|") if (words := part.split())}
    assert programs <= PROGRAMS, f"{line}: run by no test; say why in front of the block"
    if not line.startswith("tracepipe ") or _SHELL.search(_QUOTED.sub("", line.partition(" #")[0])):
        return run_lines([line], folder, quiet=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    seen = capsys.readouterr()
    assert not ended.value.code, f"{line}\n{seen.out}{seen.err}"
    return seen.out
