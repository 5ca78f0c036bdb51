r"""Lines that a script printed, out of the records that `bpftrace -f json` wraps them in.

Objects of `type` and `data` and nothing else:

    {"type": "printf", "data": "{\"ts\":23.15,\"type\":\"userspace\","}    a line may come in pieces,
    {"type": "printf", "data": "\"name\":\"cuInit\"}\n"}                or several lines in one record
    {"type": "lost_events", "data": {"events": 12}}
    {"type": "hist", "data": {"@h": [{"min": 0, "max": 0, "count": 4}]}}

`printf` is what the script printed and `lost_events` a loss; all others (maps, histograms, values, times)
say nothing that has a place in time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from tracepipe.event.checks import shown
from tracepipe.event.model import COUNT_LIMIT, Problem, Record
from tracepipe.readers.lines import BOM
from tracepipe.readers.recording import Batch

# bpftrace's own records have these keys and no other.
_WRAPPED_KEYS = {"type", "data"}
LOST: Final = "lost_events"
# A printed line that is not at its end after so much is none.
_HELD_BYTES_MAX = 1 << 14
_ATTACHING = re.compile(rb"(?:Attaching|Attached) \d+ probes?")
OWN_TEXT: Final = re.compile(
    rb"Attach(?:ing|ed) \d+ probes?|@|[\[(]\S+(?: \S+)?[\])]\s+\d+ \|[@ ]*\||WARNING: |stdin:\d"
)
"""How lines of text start that bpftrace itself prints: at its start, maps, histograms, warnings."""
_LOST_TEXT = re.compile(rb"Lost (\d{1,18}) events")
_LOST_REASON = "bpftrace's buffer was full"

_Lines = list[tuple[int, bytes]]
"""Lines of text, each with the number of the input's line that it starts on."""


def _loss(count: int) -> Record:
    return {"type": "loss", "count": min(count, COUNT_LIMIT), "reason": _LOST_REASON}


def loss_of(text: bytes) -> Record | None:
    """The loss that a line of bpftrace's own says, `Lost N events`."""
    found = _LOST_TEXT.match(text)
    return _loss(int(found[1])) if found else None


def is_wrapped(record: Any) -> bool:
    """Whether a parsed line is one of bpftrace's own records."""
    return type(record) is dict and record.keys() == _WRAPPED_KEYS and type(record["type"]) is str


def _is_object(text: bytes) -> bool:
    try:
        return type(orjson.loads(text)) is dict
    except orjson.JSONDecodeError:
        return False


class Unwrapped:
    """Puts the lines together that a script printed."""

    def __init__(self) -> None:
        self._held = b""
        self._held_at = 0

    def take(self, number: int, record: Record, batch: Batch) -> _Lines:
        """The lines that bpftrace's record on line `number` completes. A loss or a fault goes to `batch`."""
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
                # Printed without a newline, and not the begin of what comes now.
                lines = self.rest()
            elif text.endswith(b"\n") and _is_object(text):
                # Another processor's line between the pieces of one.
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
        """The line that has not ended, if there is one."""
        held, self._held = self._held, b""
        return [(self._held_at, held)] if held else []


def printed_lines(head: bytes) -> Iterator[tuple[bytes, Any]]:
    """The lines of `head`, those that its records say were printed among them, and what each is as JSON.

    That is None for a line that is none.
    """
    unwrapped, unused = Unwrapped(), Batch()
    for text in head.removeprefix(BOM).split(b"\n"):
        value = _parsed(text)
        yield text.strip(), value
        if is_wrapped(value):
            for _, printed in unwrapped.take(0, value, unused):
                yield printed.strip(), _parsed(printed)


def is_of_bpftrace(head: bytes) -> bool:
    """Whether the first line of an input is what bpftrace prints when it starts."""
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
