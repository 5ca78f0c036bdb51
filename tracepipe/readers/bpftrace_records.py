r"""Reads the lines that a script printed, also out of the records of `bpftrace -f json`, and places those
without a time.

bpftrace's records are objects that have only `type` and `data`:

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
from tracepipe.event.model import COUNT_LIMIT, Record
from tracepipe.readers.recording import BOM, LineReader, Unusable

_WRAPPED_KEYS = {"type", "data"}
# Printed text of this length without a newline is not a line.
_HELD_BYTES_MAX = 1 << 14
_ATTACHING = re.compile(rb"(?:Attaching|Attached) \d+ probes?")
OWN_TEXT: Final = re.compile(
    rb"Attach(?:ing|ed) \d+ probes?|@|[\[(]\S+(?: \S+)?[\])]\s+\d+ \|[@ ]*\||WARNING: |stdin:\d"
)
"""The begin of lines that bpftrace itself prints: at its start, maps, histograms, warnings."""
_LOST_TEXT = re.compile(rb"Lost (\d{1,18}) events")
_MAPS: Final = frozenset({"map", "hist", "stats", "value"})
_FIRST_TYPES: Final = _MAPS | {"attached_probes"}
_ONLY_MAPS: Final = (
    "has only maps and histograms that bpftrace printed, and no lines with times: there is nothing to draw"
)
PROBE: Final = (
    r"(?:uprobe|uretprobe|usdt|kprobe|kretprobe|kfunc|kretfunc|fentry|fexit|tracepoint|rawtracepoint)"
    r":[^\s:]\S*"
)
"""The form of the name of a probe, `probe` in a script."""

PLACED: Final = "between lines"
"""The value of the argument `placed` of an event without a time."""
NO_TIME: Final[Fault] = (
    "ts",
    "is missing: the line has no place in time; --undated between places it between its neighbours",
)
_ARE_PLACED: Final = "is missing: such lines are placed between their neighbours (args.placed)"
_NO_NEIGHBOUR: Final[Fault] = "ts", "is missing, and so are the times of all lines around it"
# The most lines that wait for one with a time. Beyond that, they get the time of the last one.
_WAITING_MAX: Final = 1 << 12

Line = TypeVar("Line")


def _loss(count: int) -> Record:
    return {"type": "loss", "count": min(count, COUNT_LIMIT), "reason": "bpftrace's buffer was full"}


def loss_of(text: bytes) -> Record | None:
    """The loss in a line of bpftrace, `Lost N events`."""
    found = _LOST_TEXT.match(text)
    return _loss(int(found[1])) if found else None


def is_wrapped(record: object) -> bool:
    """Whether a parsed line is one of bpftrace's own records."""
    return type(record) is dict and record.keys() == _WRAPPED_KEYS and type(record["type"]) is str


def parsed_object(text: bytes) -> Any:
    """The JSON object in a text; None where it has none."""
    if not text.lstrip().startswith(b"{"):
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


class ScriptLines(LineReader, Generic[Line]):
    """Reads lines of a script. Lines without a time are placed `between` those that have one, at equal
    distances, where a user asks for it.
    """

    def __init__(self, *, between: bool = False) -> None:
        super().__init__()
        self._between = between
        self._waiting: list[tuple[int, Line]] = []
        self._last_ns: int | None = None
        self._held = b""
        """Text that a record of bpftrace has, and whose newline is to come."""
        self._held_at = 0

    def add_at(self, line: Line, ts_ns: int) -> None:
        """Add the event of a line at a time. Raises Unusable."""
        raise NotImplementedError

    def wait(self, line: Line) -> bool:
        """Let a line without a time wait for one that has a time. Return False if it may not."""
        if self._between:
            self.say_once("ts", _ARE_PLACED)
            self._waiting.append((self.number, line))
            if len(self._waiting) >= _WAITING_MAX:
                self.add_waiting(None)
        return self._between

    def add_waiting(self, ts_ns: int | None) -> None:
        """Add the lines that wait: before a line with this time, or at the last time."""
        if not self._between:
            return
        here, waiting, self._waiting = self.number, self._waiting, []
        first_ns = ts_ns if self._last_ns is None else self._last_ns
        if ts_ns is not None:
            self._last_ns = ts_ns
        between_ns = max(0, (self._last_ns or 0) - (first_ns or 0))
        for at, (self.number, line) in enumerate(waiting, 1):
            try:
                if first_ns is None:
                    raise Unusable(*_NO_NEIGHBOUR)
                self.add_at(line, first_ns + between_ns * at // (len(waiting) + 1))
            except Unusable as e:
                self.say(e.field, e.message)
        self.number = here

    def note_map(self) -> None:
        """Note that the input has a map, or a histogram."""
        self.no_line = _ONLY_MAPS

    def read_end(self) -> None:
        """Read a last line without a newline, and add the lines that wait."""
        self.read_numbered(self._rest(), is_cut=True)
        self.add_waiting(None)

    def printed_in(self, record: Record) -> list[tuple[int, bytes]]:
        """The lines that are complete after one of bpftrace's records, with the number of the line of the
        input where each begins.
        """
        kind, data = record["type"], record["data"]
        if kind in _MAPS:
            self.note_map()
        if kind == "printf":
            if type(data) is str:
                return self._join(self.number, data.encode())
            self.say("data", f"must be a string, not {shown(data)}")
        elif kind == "lost_events":
            count = data.get("events") if type(data) is dict else None
            if type(count) is int and count >= 0:
                self.records.append(_loss(count))
            else:
                self.say("data.events", f"must be an integer of at least 0, not {shown(count)}")
        return []

    def _join(self, number: int, text: bytes) -> list[tuple[int, bytes]]:
        lines: list[tuple[int, bytes]] = []
        if self._held and text.startswith(b"{"):
            if not self._held.startswith(b"{") or type(parsed_object(self._held)) is dict:
                # The text before was printed without a newline, and is not the begin of this.
                lines = self._rest()
            elif text.endswith(b"\n") and type(parsed_object(text)) is dict:
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
        return lines + self._rest() if len(self._held) > _HELD_BYTES_MAX else lines

    def _rest(self) -> list[tuple[int, bytes]]:
        """The line without an end, if there is one."""
        held, self._held = self._held, b""
        return [(self._held_at, held)] if held else []


def printed_lines(head: bytes) -> Iterator[tuple[bytes, Any]]:
    """The lines of `head`, with those that its records have as printed text, and the JSON value of each; None
    for a line that is not JSON.
    """
    lines = ScriptLines[bytes]()
    for text in head.removeprefix(BOM).split(b"\n"):
        value = parsed_object(text)
        yield text.strip(), value
        if is_wrapped(value):
            for _, printed in lines.printed_in(value):
                yield printed.strip(), parsed_object(printed)


def is_of_bpftrace(head: bytes) -> bool:
    """Whether the first line of an input is one that bpftrace prints at its start, or a map."""
    first = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    record = parsed_object(first)
    return _ATTACHING.match(first) is not None or (is_wrapped(record) and record["type"] in _FIRST_TYPES)
