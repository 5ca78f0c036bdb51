"""Ends commands: with an exit code, and with two lines for an error that is not a bug. An error in the use of
a command has the form of the command after them.

Typer's errors are known by the names of their classes: where they are defined depends on its version.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from typing import Any

import typer

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.printable import printable
from tracepipe.terminal.output import say

# Errors of a machine without resources. They are not bugs, and any call may fail with them.
_SHORT_OF = {
    errno.EMFILE: ("Too many open files.", "Raise the limit of this shell: ulimit -n 1024."),
    errno.ENFILE: ("Too many open files on this machine.", "End what holds them: see /proc/sys/fs/file-nr."),
    errno.ENOMEM: ("Not enough memory.", "Free some, or raise the limit of this shell: ulimit -v unlimited."),
    errno.EAGAIN: ("No further thread or process can start.", "Raise the limit of this shell: ulimit -u."),
}
# The words of libraries without an errno: the loader of shared objects, threads of Python and of Polars.
_WORDS = {
    "Too many open files": errno.EMFILE,
    "TooManyOpenFiles": errno.EMFILE,
    "Cannot allocate memory": errno.ENOMEM,
    "failed to map segment": errno.ENOMEM,
    "memory allocation": errno.ENOMEM,
    "Not enough memory": errno.ENOMEM,
    "start new thread": errno.EAGAIN,
    "Resource temporarily unavailable": errno.EAGAIN,
}
_WITH_WORDS = (
    "ImportError",
    "LibraryMissing",
    "OSError",
    "RuntimeError",
    "JSONDecodeError",
    "ComputeError",
    "PanicException",
)


def exit_code_of(step: Callable[[], Any], quietly: bool = False) -> int | str | None:
    """Run a step of a command, and return its exit code. A bug keeps its traceback. `quietly`: print no
    error.
    """
    try:
        code = step()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return 0  # the reader of standard output has what it wanted
    except SystemExit as e:
        return 0 if isinstance(e.__context__, BrokenPipeError) else e.code  # as Rich makes exit 1 of that
    except typer.Abort:
        say("Aborted.")
        return 1
    except TracepipeError as e:
        # A capture's error already names the resource and its use.
        error = e if isinstance(e, CaptureUnavailable) else _shortage(e) or e
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a panic of Polars is not an Exception
        usage: Any = e
        if callable(getattr(usage, "format_message", None)):
            # The error of a group without a command has its help, which was printed.
            for line in usage_lines(usage) if type(e).__name__ != "NoArgsIsHelpError" else ():
                say(line)
            return int(usage.exit_code)
        if (short := _shortage(e)) is None:
            raise
        error = short
    if not quietly:
        say(f"tracepipe: {error}")
        if error.hint:
            say(f"  {error.hint}")
    return error.exit_code


def _shortage(error: BaseException) -> TracepipeError | None:
    """The error for a machine without memory, files or threads, if that caused an exception."""
    examined: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in examined:
        examined.add(id(cause))
        number = cause.errno if isinstance(cause, OSError) else None
        if isinstance(cause, MemoryError):
            number = errno.ENOMEM
        elif number not in _SHORT_OF and type(cause).__name__ in _WITH_WORDS:
            number = next((number for words, number in _WORDS.items() if words in str(cause)), None)
        if number in _SHORT_OF:
            return TracepipeError(*_SHORT_OF[number])
        cause = cause.__cause__ or cause.__context__
    return None


_STRAY = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", re.DOTALL)


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
        what, choices = error.message, getattr(getattr(error.param, "type", None), "choices", None)
        given, is_choice, _ = what.partition(" is not one of ")
        if is_choice and choices:
            known = [str(getattr(choice, "value", choice)) for choice in choices]
            what = f"takes {', '.join(known[:-1])} or {known[-1]}, not {given}."
        name = error.param_hint or (_name(error.param, error.ctx) if error.param is not None else "")
        if name and not what.startswith(f"{name} "):
            what = f"{name}{' ' if what.startswith('takes ') else ': '}{what}"
    elif stray := _STRAY.fullmatch(error.message):
        what = f"Too many arguments: {stray[1]}"
        if error.ctx.params.get("junit"):
            hint = f"--junit prints the XML: write --junit > {stray[1]}."
    else:
        what = error.message
    yield f"tracepipe: {printable(what.expandtabs())}"
    if hint:
        yield f"  {printable(hint)}"
    if error.ctx is not None:
        form = " ".join(error.ctx.get_usage().split())
        yield f"  {form} ({error.ctx.command_path} -h explains it)"


def _name(parameter: Any, context: Any) -> str:
    """An option by its long name, or an argument by what stands for it in the help."""
    if parameter.param_type_name == "option":
        return str(max(parameter.opts, key=len))
    return str(parameter.metavar or parameter.make_metavar(context))
