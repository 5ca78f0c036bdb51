r"""Takes the lines that a script printed out of the records of `bpftrace -f json`.

These are objects that have only `type` and `data`:

    {"type": "printf", "data": "{\"ts\":23.15,\"type\":\"userspace\","}    a line may come in pieces,
    {"type": "printf", "data": "\"name\":\"cuInit\"}\n"}                or several lines in one record
    {"type": "lost_events", "data": {"events": 12}}
    {"type": "hist", "data": {"@h": [{"min": 0, "max": 0, "count": 4}]}}

`printf` is what the script printed and `lost_events` a loss. All others (maps, histograms, values, times)
have no place in time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar

import orjson

from tracepipe.event.checks import Fault, shown
from tracepipe.event.model import COUNT_LIMIT, Problem, Record
from tracepipe.readers.recording import BOM, Batch

# bpftrace's own records have exactly these keys.
_WRAPPED_KEYS = {"type", "data"}
LOST: Final = "lost_events"
# Printed text of this length without a newline is not a line.
_HELD_BYTES_MAX = 1 << 14
_ATTACHING = re.compile(rb"(?:Attaching|Attached) \d+ probes?")
OWN_TEXT: Final = re.compile(
    rb"Attach(?:ing|ed) \d+ probes?|@|[\[(]\S+(?: \S+)?[\])]\s+\d+ \|[@ ]*\||WARNING: |stdin:\d"
)
"""The begin of lines that bpftrace itself prints: at its start, maps, histograms, warnings."""
_LOST_TEXT = re.compile(rb"Lost (\d{1,18}) events")
_LOST_REASON = "bpftrace's buffer was full"

_Lines = list[tuple[int, bytes]]
"""Lines of text, each with the number of the input's line on which it starts."""


def _loss(count: int) -> Record:
    return {"type": "loss", "count": min(count, COUNT_LIMIT), "reason": _LOST_REASON}


def loss_of(text: bytes) -> Record | None:
    """The loss in a line of bpftrace, `Lost N events`."""
    found = _LOST_TEXT.match(text)
    return _loss(int(found[1])) if found else None


def is_wrapped(record: object) -> bool:
    """Whether a parsed line is one of bpftrace's own records."""
    return type(record) is dict and record.keys() == _WRAPPED_KEYS and type(record["type"]) is str


def _is_object(text: bytes) -> bool:
    try:
        return type(orjson.loads(text)) is dict
    except orjson.JSONDecodeError:
        return False


class Unwrapped:
    """Joins the pieces of lines that a script printed."""

    def __init__(self) -> None:
        self._held = b""
        self._held_at = 0

    def take(self, number: int, record: Record, batch: Batch) -> _Lines:
        """The lines that are complete after bpftrace's record on line `number`. A loss or a fault goes to
        `batch`.
        """
        kind, data = record["type"], record["data"]
        if kind == "printf":
            if type(data) is str:
                return self._join(number, data.encode())
            batch.problems.append(Problem(number, "data", f"must be a string, not {shown(data)}"))
        elif kind == LOST:
            count = data.get("events") if type(data) is dict else None
            if type(count) is int and count >= 0:
                batch.records.append(_loss(count))
            else:
                wrong = f"must be an integer of at least 0, not {shown(count)}"
                batch.problems.append(Problem(number, "data.events", wrong))
        return []

    def _join(self, number: int, text: bytes) -> _Lines:
        lines: _Lines = []
        if self._held and text.startswith(b"{"):
            if not self._held.startswith(b"{") or _is_object(self._held):
                # The text before was printed without a newline, and is not the begin of this.
                lines = self.rest()
            elif text.endswith(b"\n") and _is_object(text):
                # This is another processor's line between the pieces of a line.
                return [(number, text[:-1])]
        if not self._held:
            self._held_at = number
        whole, newline, tail = text.rpartition(b"\n")
        if newline:
            first, *others = (self._held + whole).split(b"\n")
            lines += [(self._held_at, first), *((number, line) for line in others)]
            self._held, self._held_at = tail, number
        else:
            self._held += tail
        return lines + self.rest() if len(self._held) > _HELD_BYTES_MAX else lines

    def rest(self) -> _Lines:
        """The line without an end, if there is one."""
        held, self._held = self._held, b""
        return [(self._held_at, held)] if held else []


def printed_lines(head: bytes) -> Iterator[tuple[bytes, Any]]:
    """The lines of `head`, with those that its records have as printed text, and the JSON value of each; None
    for a line that is not JSON.
    """
    unwrapped, unused = Unwrapped(), Batch()
    for text in head.removeprefix(BOM).split(b"\n"):
        value = _parsed(text)
        yield text.strip(), value
        if is_wrapped(value):
            for _, printed in unwrapped.take(0, value, unused):
                yield printed.strip(), _parsed(printed)


def is_of_bpftrace(head: bytes) -> bool:
    """Whether the first line of an input is one that bpftrace prints at its start."""
    first = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    record = _parsed(first)
    return _ATTACHING.match(first) is not None or (is_wrapped(record) and record["type"] == "attached_probes")


def _parsed(text: bytes) -> Any:
    if not text.lstrip().startswith(b"{"):
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


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
