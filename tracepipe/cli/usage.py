"""Explains a command line that cannot be used: what is wrong, what to do, and the form of the command.

Typer's errors are known by the names of their classes: where they are defined depends on its version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tracepipe.printable import printable

_STRAY = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", re.DOTALL)
_NOT_ONE_OF = " is not one of "


def usage_lines(error: Any) -> Iterator[str]:
    """The lines for a usage error of Typer, or a `Misuse`."""
    kind = type(error).__name__
    hint = getattr(error, "hint", "")
    if kind == "NoSuchOption":
        what = f"No such option: {error.option_name}"
        if error.possibilities:
            hint = f"Did you mean {' or '.join(sorted(error.possibilities))}?"
    elif kind == "MissingParameter":
        what = f"Missing {error.param.param_type_name}: {_name(error.param, error.ctx)}"
    elif hasattr(error, "param_hint"):
        what, hint = _of_value(error, hint)
    elif stray := _STRAY.fullmatch(error.message):
        what = f"Too many arguments: {stray[1]}"
    else:
        what = error.message
    yield f"tracepipe: {printable(what.expandtabs())}"
    if hint:
        yield f"  {printable(hint)}"
    if error.ctx is not None:
        form = " ".join(error.ctx.get_usage().split())
        yield f"  {form} ({error.ctx.command_path} -h explains it)"


def _of_value(error: Any, hint: str) -> tuple[str, str]:
    """The message and the hint about a wrong value of an option or argument."""
    message, choices = error.message, getattr(getattr(error.param, "type", None), "choices", None)
    given, found, _ = message.partition(_NOT_ONE_OF)
    if found and choices:
        known = [str(getattr(choice, "value", choice)) for choice in choices]
        message = f"takes {', '.join(known[:-1])} or {known[-1]}, not {given}."
    name = error.param_hint or (_name(error.param, error.ctx) if error.param is not None else "")
    if not name or message.startswith(f"{name} "):
        return message, hint
    return f"{name}{' ' if message.startswith('takes ') else ': '}{message}", hint


def _name(parameter: Any, context: Any) -> str:
    """An option by its long name, or an argument by what stands for it in the help."""
    if parameter.param_type_name == "option":
        return str(max(parameter.opts, key=len))
    return str(parameter.metavar or parameter.make_metavar(context))
