"""Makes the manual page from the help of the commands: `python -m tracepipe.cli.man > man/tracepipe.1`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from tracepipe import __version__
from tracepipe.cli import app
from tracepipe.cli.help import by_panel, default_of, examples_of, names_of, value_of
from tracepipe.terminal.output import put

_ESCAPES = str.maketrans(
    {"\\": "\\e", "-": "\\-", "…": "...", "'": "\\(aq", "^": "\\(ha", "~": "\\(ti", "`": "\\(ga"}
)
_EXIT = {
    "0": "The command did what was asked. If capture, live or hooks test ran a command, they exit with its "
    "code, or with 128 and the number of the signal that ended it.",
    "1": "An error: input, a file or a machine; two lines say what happened and what to do.",
    "2": "The command line cannot be used.",
    "3": "This machine cannot capture what was asked for, or a library is not installed.",
    "125": "The command that capture or live ran ended with 0, but its recording is not complete.",
}
_ENVIRONMENT = {
    "NO_COLOR": "If it is set and not empty, nothing has colours.",
    "FORCE_COLOR": "If it is set, and neither empty nor 0, output to files and pipes has colours too.",
    "TRACEPIPE_PURE": "If it is 1, the native core is not used: everything runs in Python.",
}


def page() -> Iterator[str]:
    """The lines of the page, in the man macros of roff."""
    program: Any = typer.main.get_group(app)
    context = program.make_context("tracepipe", ["capture"])
    yield '.\\" Made by python -m tracepipe.cli.man from the help of the commands.'
    yield f'.TH TRACEPIPE 1 "" "tracepipe {__version__}" "User Commands"'
    yield ".SH NAME"
    yield "tracepipe \\- " + _text(program.help.rstrip("."))
    yield ".SH SYNOPSIS"
    yield ".B tracepipe"
    yield "COMMAND [OPTIONS] [ARGUMENTS]"
    yield ".SH OPTIONS"
    for option in program.params:
        yield from _parameter(option, context)
    yield ".SH COMMANDS"
    for name in program.list_commands(context):
        yield from _command(f"{name}", program.get_command(context, name), context)
    yield from _defined("EXIT STATUS", _EXIT)
    yield from _defined("ENVIRONMENT", _ENVIRONMENT)
    yield ".SH EXAMPLES"
    yield from _examples("")


def _command(name: str, command: Any, parent: Any) -> Iterator[str]:
    """The lines of a command, and of its subcommands."""
    context = type(parent)(command, info_name=name.split()[-1], parent=parent)
    form = " ".join(command.collect_usage_pieces(context))
    yield f'.SS "tracepipe {_text(name)} {_text(form)}"'
    yield _text(command.help or "")
    for panel, parameters in by_panel(command.params).items():
        if panel != "Arguments":
            yield ".PP"
            yield f".I {_text(panel)}:"
        for parameter in parameters:
            yield from _parameter(parameter, context)
    if not hasattr(command, "commands"):
        yield from _examples(name)
    for inner, one in getattr(command, "commands", {}).items():
        yield from _command(f"{name} {inner}", one, context)


def _parameter(parameter: Any, context: Any) -> Iterator[str]:
    """The lines of an option or an argument: value, help and default."""
    yield ".TP"
    value = value_of(parameter, context)
    if parameter.param_type_name == "argument":
        yield f".I {_text(value)}"
    else:
        names = names_of(parameter)
        yield f".B {_text(names)}" if not value else f".BI {_quoted(names + ' ')} {_quoted(value)}"
    default = default_of(parameter)
    yield _text((parameter.help or "") + (f" [default: {default}]" if default else ""))


def _examples(name: str) -> Iterator[str]:
    yield ".PP"
    yield ".nf"
    for line in examples_of(name):
        yield f".RS 4\n{_text(line)}\n.RE"
    yield ".fi"


def _defined(title: str, terms: dict[str, str]) -> Iterator[str]:
    yield f".SH {_quoted(title)}"
    for term, meaning in terms.items():
        yield ".TP"
        yield f".B {_text(term)}"
        yield _text(meaning)


def _quoted(text: str) -> str:
    """An argument of a macro."""
    return '"' + _text(text).replace('"', "\\(dq") + '"'


def _text(text: str) -> str:
    """Text escaped for roff: `-` is a minus sign that can be copied, and no line begins with a control
    character.
    """
    text = " ".join(text.split()) if "\n" in text else text
    text = text.translate(_ESCAPES)
    return f"\\&{text}" if text[:1] in (".", "\\(aq") else text


if __name__ == "__main__":
    for _line in page():
        for _part in _line.split("\n"):
            put(_part)
