"""Places lines without a time between the lines around them, where a user asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from tracepipe.event.checks import Fault

PLACED: Final = "between lines"
"""The value of the argument `placed` of such an event."""
NO_TIME: Final[Fault] = (
    "ts",
    "is missing: the line has no place in time; --undated between places it between its neighbours",
)
SAID: Final = "is missing: such lines are placed between their neighbours (args.placed)"
NO_NEIGHBOUR: Final[Fault] = "ts", "is missing, and so are the times of all lines around it"
# The most lines that wait for one with a time. Beyond that, they get the time of the last one.
_WAITING_MAX: Final = 1 << 12

Line = TypeVar("Line")


class Undated(Generic[Line]):
    """The lines that wait for the next one with a time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Line]] = []
        self._last_ns: int | None = None

    def wait(self, number: int, line: Line) -> Iterator[tuple[int, Line, int | None]]:
        """Keep line `number`. If too many lines wait, yield them as `until` does."""
        self._waiting.append((number, line))
        if len(self._waiting) >= _WAITING_MAX:
            yield from self.rest()

    def until(self, ts_ns: int) -> Iterator[tuple[int, Line, int | None]]:
        """Number, line and time of the lines that wait for a line with that time, at equal distances before
        it.
        """
        waiting, self._waiting = self._waiting, []
        first_ns = ts_ns if self._last_ns is None else self._last_ns
        self._last_ns = ts_ns
        between_ns = max(0, ts_ns - first_ns)
        for at, (number, line) in enumerate(waiting, 1):
            yield number, line, first_ns + between_ns * at // (len(waiting) + 1)

    def rest(self) -> Iterator[tuple[int, Line, int | None]]:
        """The lines that wait at the end of the input: at the last time, or None without any."""
        waiting, self._waiting = self._waiting, []
        for number, line in waiting:
            yield number, line, self._last_ns
