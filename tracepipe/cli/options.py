"""Makes the parameters of commands from dataclasses of options, reads their values, and defines the options
that several commands have and the library does not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Final, get_args, get_origin

import typer

from tracepipe.api.options import OUTPUT
from tracepipe.errors import OutputError, TracepipeError
from tracepipe.options import Option, flags_of, options_of

COMMAND_LAST: Final = {"allow_interspersed_args": False}
"""The settings of a command that runs another: what follows the first argument is not for it."""
RECORDING: Final = "A recording: a path, a URL, or - for standard input."
COMPRESSED: Final = "compressed if its name ends with .zst or .gz"
TO_STANDARD: Final = "- is standard output."
AS_RECORDING: Final = "Default: named after the recording."

Recording = Annotated[str, typer.Argument(help=RECORDING, metavar="FILE")]
Force = Annotated[bool, Option("Overwrite the output if it exists.", panel=OUTPUT)]


class Misuse(typer.BadParameter):
    """An option or argument that cannot be used: what is wrong, and what to do."""

    def __init__(self, message: str, hint: str = "", *, option: str = "") -> None:
        super().__init__(message, param_hint=option or None)
        self.hint = hint


@contextmanager
def as_misuse(kind: type) -> Iterator[None]:
    """In this context, an error about the options of a dataclass is one of the command line."""
    try:
        yield
    except TracepipeError as error:
        if isinstance(error, OutputError) or error.exit_code != TracepipeError.exit_code:
            raise
        own = options_of(kind)
        flag = flags_of(error.option, own[error.option][1])[0] if error.option in own else ""
        named = flag or (f"--{error.option}" if error.option else "")
        raise Misuse(error.message, error.hint, option=named) from None


def output_option(what: str, metavar: str = "FILE") -> Option:
    """The option that names the output; `what` is its help."""
    return Option(what, metavar, flags=("--output", "-o"), panel=OUTPUT)


def json_option(what: str, more: str = "") -> Option:
    """The option that prints `what` as JSON."""
    return Option(f"Print {what} as JSON{more}.", flags=("--json",), panel=OUTPUT)


def local_option(what: str) -> Option:
    """The option that opens a trace in a UI of this machine; `what` says so."""
    return Option(f"{what} a UI found on this machine, without a network.")


@dataclass(frozen=True, slots=True)
class Changed:
    """The options of a dataclass as a command has them: those that `command` also has, or all; with other
    `flags`.
    """

    command: str = ""
    flags: Mapping[str, tuple[str, ...]] | None = None


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Make a command for Typer. A parameter whose type is a dataclass is replaced with the dataclass's
    options, and a parameter that is annotated with an `Option` becomes that option. An option that two
    dataclasses have is one option, and both get its value. All parameters are keywords.
    """
    parameters: dict[str, inspect.Parameter] = {}
    kinds: dict[str, Any] = {}  # of the parameters that are options
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    # Not get_type_hints: in Python 3.10 it adds an Optional to parameters whose default is None.
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind, changed = parameter.annotation, Changed()
        if get_origin(kind) is Annotated:
            kind, changed = get_args(kind)
        if is_dataclass(kind):
            assert isinstance(kind, type)
            own = options_of(kind, changed.command)
            groups[name] = kind, [*own]
            defaults = {one.name: one.default for one in fields(kind)}
            for field, (of, option) in own.items():
                flags = (changed.flags or {}).get(field) or flags_of(field, option)
                parameters.setdefault(field, _parameter(field, of, option, flags, defaults[field]))
                kinds[field] = of
        elif isinstance(changed, Option):
            flags = flags_of(name, changed)
            parameters[name] = _parameter(name, kind, changed, flags, parameter.default)
            kinds[name] = kind
        else:
            parameters[name] = keyword(name, parameter.default, parameter.annotation)

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        # None is what Typer gives where an option is not given and its default is not a text or a number.
        values = {name: _value(value, kinds.get(name)) for name, value in given.items() if value is not None}
        made = {
            name: kind(**{field: values[field] for field in own if field in values})
            for name, (kind, own) in groups.items()
        }
        grouped = {field for _, own in groups.values() for field in own}
        return command(**{name: value for name, value in values.items() if name not in grouped}, **made)

    run.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


def keyword(name: str, default: object, kind: object) -> inspect.Parameter:
    """A parameter of a command for Typer."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _parameter(
    name: str, kind: Any, option: Option, flags: tuple[str, ...], default: Any
) -> inspect.Parameter:
    """An option for Typer."""
    of_one, parser = str, None

    def parse(text: Any) -> Any:
        try:
            return option.value_of(of_one, str(text))
        except TracepipeError as error:
            raise Misuse(error.message, error.hint) from None

    if kind is bool:
        flags = (f"{flags[0]}/--no-{flags[0][2:]}",) if default is True else flags
    elif option.choices:
        # Typer makes choices of an Enum of texts.
        texts = {choice.replace("-", "_"): choice for choice in option.choices}
        allowed: Any = Enum(name.title(), texts, type=str)  # type: ignore[misc]
        kind, default = (allowed, default) if default in option.choices else (allowed | None, None)
    else:
        parser = parse
        if option.repeats:
            kind, default = (kind if kind == list[int] | None else list[str] | None), None
            of_one = get_args(get_args(kind)[0])[0]
        elif kind in (int, int | None, float):
            of_one = kind
        else:
            is_text = isinstance(default, str) or default is inspect.Parameter.empty
            kind, default = (str, default) if is_text else (str | None, None)
    given = typer.Option(
        *flags,
        help=option.text,
        metavar=option.metavar or None,
        parser=parser,
        autocompletion=option.complete,
        rich_help_panel=option.panel or None,
    )
    return keyword(name, default, Annotated[kind, given])


def _value(value: Any, kind: Any) -> Any:
    """The value of an option as its field has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list) and value and kind is not None:
        return dict(value) if get_origin(kind) is get_origin(Mapping[str, str]) else tuple(value)
    return value
