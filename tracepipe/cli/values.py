"""Reads values of options from text, with their bounds: numbers, durations and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import typer

from tracepipe.errors import TracepipeError
from tracepipe.launchers import RANK_MAX

INT_MAX: Final = (1 << 31) - 1
"""The greatest value of an option, as it is compared with columns of small integers."""
SECONDS: Final = "A number without a unit is in seconds."
"""What the help of an option for a time says."""
_RANKS: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class Misuse(typer.BadParameter):
    """An option or argument that cannot be used: what is wrong, and what to do."""

    def __init__(self, message: str, hint: str = "", *, option: str = "") -> None:
        super().__init__(message, param_hint=option or None)
        self.hint = hint


def misuse_of(error: TracepipeError, option: str = "") -> Misuse:
    """The same error, for an option."""
    return Misuse(error.message, error.hint, option=option)


def whole(least: int = 0, most: int = INT_MAX) -> Callable[[Any], int]:
    """A parser for Typer of whole numbers from `least` to `most`. It raises Misuse."""

    def whole_number(value: str | int) -> int:
        try:
            number = int(value)
        except ValueError:
            raise Misuse(f"takes a whole number from {least}, not {value!r}.") from None
        if not least <= number <= most:
            bound = f"from {least}" if number < least else f"up to {most}"
            raise Misuse(f"takes a whole number {bound}, not {number}.")
        return number

    return whole_number


def number(least: float = 0.0, most: float = float("inf")) -> Callable[[Any], float]:
    """A parser for Typer of numbers from `least` to `most`. It raises Misuse."""
    bounds = f"from {least:g}" + (f" to {most:g}" if most != float("inf") else "")

    def any_number(value: str | float) -> float:
        try:
            found = float(value)
        except ValueError:
            found = float("nan")
        if not least <= found <= most:
            raise Misuse(f"takes a number {bounds}, not {str(value)!r}.")
        return found

    return any_number


def read(text: str, parse: Callable[[str], int], option: str, *, least: int = 0) -> int | None:
    """Read an option's duration or size; None if the option was not given. Raises Misuse."""
    if not text:
        return None
    try:
        value = parse(text)
    except TracepipeError as error:
        raise misuse_of(error, option) from None
    if value < least:
        raise Misuse(f"{text} is too little: give more than 0.", option=option)
    return value


def offsets(values: list[str]) -> dict[str, int | str]:
    """Read `--assume-offset CLOCK=NS` options: clock → ns to add, or a host clock's name."""
    out: dict[str, int | str] = {}
    for value in values:
        clock, equals, offset = value.partition("=")
        if not equals or not clock or not offset:
            raise Misuse(
                f"takes CLOCK=NANOSECONDS or CLOCK=realtime, not {value!r}.", option="--assume-offset"
            )
        try:
            out[clock] = int(offset)
        except ValueError:
            out[clock] = offset
    return out


def ranks(text: str) -> tuple[int, ...]:
    """Read `--ranks`: numbers and ranges, as in `0-7,17`. Raises Misuse."""
    numbers: dict[int, None] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        found = _RANKS.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last or last > RANK_MAX:
            raise Misuse(f"takes ranks as in 0-7,17, not {part!r}.", option="--ranks")
        numbers |= dict.fromkeys(range(first, last + 1))
    return tuple(numbers)


def file_offsets(values: list[str]) -> dict[str, int]:
    """Read `--offset FILE=NS` options: file → ns to add to its times."""
    out: dict[str, int] = {}
    for value in values:
        file, _, offset = value.rpartition("=")  # a file's name may contain the sign
        try:
            out[file] = int(offset)
        except ValueError:
            file = ""
        if not file:
            raise Misuse(f"takes FILE=NANOSECONDS, not {value!r}.", option="--offset")
    return out
