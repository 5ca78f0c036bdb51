"""Options: a field of a dataclass is an option, from which the command line, the manual page and the docs of
the library are made.

    @dataclass(frozen=True)
    class Options:
        min_duration: Annotated[str, Option("Leave out calls that are shorter than this.", TIME)] = ""
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final, get_args, get_type_hints

from tracepipe.errors import TracepipeError
from tracepipe.units import duration_ns, size_bytes

STANDARD: Final = "-"
"""The name that stands for standard input and standard output."""
TIME, SIZE, REGEX, OTHER_RUN = "TIME", "SIZE", "REGEX", "OTHER"
SECONDS: Final = "A number without a unit is in seconds."
"""What the help of an option for a time says."""


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

    def checked(self, text: str) -> str:
        """The text of a duration or a size. Raises TracepipeError where it is none."""
        self.quantity(text)
        return text


def options_of(kind: type, command: str = "") -> dict[str, tuple[Any, Option]]:
    """Field → type and option, of a dataclass; those alone that another command `also` has, if one is
    named.
    """
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
