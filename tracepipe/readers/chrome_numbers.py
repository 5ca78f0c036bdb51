"""Times and ids of Chrome's trace format: microseconds in digits, and ids that are numbers or texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from hashlib import blake2b
from typing import Any, Final

from tracepipe.event.model import FLOW_LIMIT, ID_LIMIT, TIME_LIMIT_NS, Problem

_PLAIN = re.compile(r"(-?)(\d{1,18})(?:\.(\d+))?")
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?\s*")
_OF_KEY = {key: re.compile(rb'"%b"\s*:\s*(-?[0-9][0-9.eE+-]*)' % key.encode()) for key in ("ts", "dur")}
_THREE_DECIMALS = {
    key: re.compile(rb'"%b"\s*:\s*([0-9]{1,16})\.([0-9]{3})[,}\s]' % key.encode()) for key in ("ts", "dur")
}
# Below this, two neighbouring doubles differ by less than a quarter of a nanosecond.
_EXACT_US: Final = 1 << 40


def ns_of_text(text: str) -> int | None:
    """Nanoseconds of microseconds in digits, rounded to the nearest; None where the text is not a number, or
    beyond the times of a trace.
    """
    plain = _PLAIN.fullmatch(text)
    if plain:
        sign, whole, fraction = plain[1], plain[2], plain[3] or ""
        ns = int(whole) * 1000 + int(fraction[:3].ljust(3, "0")) + (fraction[3:4] >= "5")
        ns = -ns if sign else ns
    else:
        if not _NUMBER.fullmatch(text):
            return None
        try:
            ns = round(Decimal(text.strip()) * 1000)
        except InvalidOperation:
            return None
    return ns if abs(ns) <= TIME_LIMIT_NS else None


def ns_of(value: object, key: str, event: bytes) -> int | None:
    """Nanoseconds of the microseconds that an event has at `key`, by the digits of its text."""
    if type(value) is int:
        return value * 1000 if abs(value) <= TIME_LIMIT_NS // 1000 else None
    if type(value) is str:
        return ns_of_text(value)
    if type(value) is not float:
        return None
    if abs(value) < _EXACT_US:
        return round(value * 1000)
    # PyTorch writes three decimals. No text before may look like the key.
    found = _THREE_DECIMALS[key].search(event)
    if found:
        ns = int(found[1]) * 1000 + int(found[2])
        if float(b"%b.%b" % found.groups()) == value and ns <= TIME_LIMIT_NS:
            return ns
    for found in _OF_KEY[key].finditer(event):
        if float(found[1]) == value:
            return ns_of_text(found[1].decode())
    # The key has an escape.
    texts = json.loads(event.decode("utf-8", "replace"), parse_float=str)
    return ns_of_text(texts[key]) if type(texts.get(key)) is str else None


class Ids:
    """Numbers of processes and threads. An id that is not a valid number gets the highest free number, and
    its text becomes the name.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._names: dict[int, str] = {}
        self._used: dict[tuple[int, int | None], None] = {}
        self._next = ID_LIMIT
        self._text_length = 0
        self._is_full = False

    def number(self, id: object) -> int | None:
        """The number of an id, None where there is none."""
        if type(id) is int and 0 <= id <= ID_LIMIT:
            return id
        if id is None:
            return None
        if type(id) is str and id.isascii() and id.isdigit() and len(id) < 11 and int(id) <= ID_LIMIT:
            return int(id)
        key = id if type(id) is int or type(id) is str else json.dumps(id, default=str)
        return self.of(key)

    def thread(self, event: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Add the numbers of an event's process and thread to `fields`."""
        pid, tid = event.get("pid"), event.get("tid")
        if type(pid) is int and type(tid) is int and 0 <= pid <= ID_LIMIT and 0 <= tid <= ID_LIMIT:
            fields["pid"], fields["tid"] = pid, tid
            return fields
        if (process := self.number(pid)) is not None:
            fields["pid"] = process
            if process in self._names:
                self._used[process, None] = None
        if (thread := self.number(tid)) is not None:
            fields["tid"] = thread
            if thread in self._names and process is not None and len(self._used) < 2 * _IDS_MAX:
                self._used[process, thread] = None
        return fields

    def named(self) -> Iterator[tuple[tuple[int, int | None], str]]:
        """The processes and threads that got such numbers, with their names."""
        for process, thread in self._used:
            yield (process, thread), self._names[process if thread is None else thread]

    def of(self, key: int | str) -> int:
        """The number for a process or thread whose id is not one of the system."""
        number = self._numbers.get(key)
        if number is None:
            name = str(key)
            if len(self._numbers) >= _IDS_MAX or self._text_length + len(name) > _TEXT_MAX:
                self._is_full = True
                return self._next
            self._text_length += len(name)
            number = self._numbers[key] = self._next
            self._names[number] = name
            self._next -= 1
        return number

    def stated(self) -> Iterator[Problem]:
        """A problem if there are more ids than can be distinguished."""
        if self._is_full:
            words = (
                "too many processes and threads have ids that are not numbers: some of them are shown as one"
            )
            yield Problem(0, "", words, skipped=False)


_IDS_MAX: Final = 1 << 16
_TEXT_MAX: Final = 1 << 22
_ENCODER: Final = json.JSONEncoder(default=str)


def flow_text(*parts: object) -> bytes:
    """The key from which the number of a flow is made."""
    return _ENCODER.encode(parts).encode("utf-8", "replace")


def flow_number(*parts: object) -> int:
    """The number of a flow, by the parts of its key, which all of its ends share. `flow_number.c` of the core
    does the same.
    """
    text = flow_text(*parts)
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") & FLOW_LIMIT
