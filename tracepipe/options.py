"""Options: a field of a dataclass is an option, from which the command line, the manual page and the docs of
the library are made.

    @dataclass(frozen=True)
    class Options:
        min_duration: Annotated[str, Option("Leave out calls that are shorter than this.", TIME)] = ""
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final, get_args, get_type_hints

from tracepipe.errors import TracepipeError
from tracepipe.units import duration_ns, size_bytes

STANDARD: Final = "-"
"""The name that stands for standard input and standard output."""
TIME, SIZE, REGEX, OTHER_RUN = "TIME", "SIZE", "REGEX", "OTHER"
INT_MAX: Final = (1 << 31) - 1
"""The greatest value of an option, as it is compared with columns of small integers."""
SECONDS: Final = "A number without a unit is in seconds."
"""A sentence for the help of options that are durations."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command, written as `Annotated[int, Option("What it does.")]` at a field of its
    dataclass of options, or at a parameter of the command.

    `choices` lists the allowed values; `metavar` is the placeholder of the value in the help: `TIME` is a
    duration, `SIZE` a size, `REGEX` a regular expression, `OTHER_RUN` a recording. A number is from `least`
    to `most`, and a duration or size more than 0 where `least` is. `flags` are its names on the command line,
    by default that of the field. `panel` is its heading in the help. `repeats`: it may be given several
    times, and the field has all values. `read` makes a value from a text of the command line, and raises
    TracepipeError; `complete` returns the values that complete a text. `also` names other commands that have
    this option of the dataclass.
    """

    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    least: float = 0
    most: float = float("inf")
    flags: tuple[str, ...] = ()
    panel: str = ""
    repeats: bool = False
    read: Callable[[str], object] | None = None
    complete: Callable[[str], Iterable[str]] | None = None
    also: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The help, with how often the option may be given."""
        return f"{self.help} Repeat for more." if self.repeats else self.help

    def quantity(self, text: str) -> int | None:
        """A duration in ns or a size in bytes; None for an empty text. Raises TracepipeError."""
        if not text:
            return None
        value = size_bytes(text) if self.metavar == SIZE else duration_ns(text)
        if value < self.least:
            raise TracepipeError(f"{text} is too little: give more than 0.")
        return value

    def value_of(self, kind: type, text: str) -> object:
        """The value of a text of the command line; a duration, size or regular expression is only checked.
        Raises TracepipeError.
        """
        if self.read is not None:
            return self.read(text)
        if kind in (int, int | None):
            least = int(self.least)
            try:
                whole = int(text)
            except ValueError:
                raise TracepipeError(f"takes a whole number from {least}, not {text!r}.") from None
            if not least <= whole <= INT_MAX:
                bound = f"from {least}" if whole < least else f"up to {INT_MAX}"
                raise TracepipeError(f"takes a whole number {bound}, not {whole}.")
            return whole
        if kind is float:
            try:
                number = float(text)
            except ValueError:
                number = float("nan")
            if not self.least <= number <= self.most:
                most = f" to {self.most:g}" if self.most != float("inf") else ""
                raise TracepipeError(f"takes a number from {self.least:g}{most}, not {text!r}.")
            return number
        if self.metavar in (TIME, SIZE):
            self.quantity(text)
        elif self.metavar == REGEX:
            regex(text)
        return text


def regex(text: str) -> re.Pattern[str]:
    """A regular expression that a user gave. Raises TracepipeError."""
    try:
        return re.compile(text)
    except re.error as e:
        raise TracepipeError(f"{text!r} is not a regular expression: {e}.", "Try a part of the name.") from e


def flags_of(field: str, option: Option) -> tuple[str, ...]:
    """The names of an option on the command line."""
    return option.flags or (f"--{field.replace('_', '-')}",)


def options_of(kind: type, command: str = "") -> dict[str, tuple[Any, Option]]:
    """Field → type and option of a dataclass; with `command` those that it `also` has."""
    hints = get_type_hints(kind, include_extras=True)
    found = {field.name: get_args(hints[field.name]) for field in fields(kind)}
    return {
        name: (given[0], given[1])
        for name, given in found.items()
        if len(given) == 2 and isinstance(given[1], Option) and (not command or command in given[1].also)
    }


def quantities(options: object) -> dict[str, int | None]:
    """Field → duration in ns or size in bytes, of all fields of a dataclass that are durations or sizes, None
    where none is given. Raises TracepipeError, with the field's name.
    """
    found = {}
    for name, (_, option) in options_of(type(options)).items():
        if option.metavar in (TIME, SIZE):
            with about(name):
                found[name] = option.quantity(getattr(options, name))
    return found


@contextmanager
def about(option: str) -> Iterator[None]:
    """In this context, a TracepipeError is about the option of this name."""
    try:
        yield
    except TracepipeError as error:
        error.option = error.option or option
        raise
