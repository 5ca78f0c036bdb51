"""Reads the elements of the array of events in a stream of JSON, some at a time, and the members around it.

    {"schemaVersion": 1, "traceEvents": [ {…}, {…}, ], "traceName": "…"}      or the array alone
     └─ members: kept if they are short ┘  └ objects ┘   └─ members ──┘

Objects are found by brackets and quotes alone; the native core does the same in `json.c`. The array may
end with the stream. What is not an object, and an object without an end, is skipped up to the next event.
Nothing is ever read as a whole. Times are microseconds, which become nanoseconds by their digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from math import isfinite
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import orjson

from tracepipe.event.columns import Int64s
from tracepipe.event.model import TIME_LIMIT_NS, Problem
from tracepipe.native import library
from tracepipe.readers.recording import BOM, LINE_LIMIT_BYTES, TOO_DEEP, is_too_deep
from tracepipe.units import counted

# What opens, what closes, and a string up to its first escape or its end. For a pattern of a whole string,
# the engine takes 100 bytes of memory for each byte of it.
_TOKENS = re.compile(rb'([{\[])|([}\]])|"[^"\\]*(")?')
_OPENS, _CLOSES = 1, 2
_ESCAPED = re.compile(rb'\\.[^"\\]*', re.DOTALL)
_BETWEEN = re.compile(rb"[\s,]*")
# Objects that are found at a time.
ROOM: Final = 1 << 11


class Objects(NamedTuple):
    """Objects of a text, by their first and last places, and where the search ended: after the last one, with
    its blanks and commas. `is_open`: an object begins there whose end is not in the text.
    """

    starts: Int64s
    ends: Int64s
    at: int
    is_open: bool


def objects(text: bytes, at: int) -> Objects:
    """The objects that follow each other from `at` on, at most ROOM."""
    core = library()
    if core is not None:
        starts, ends, done = np.empty(ROOM, np.int64), np.empty(ROOM, np.int64), np.array([at, 0], np.int64)
        count = core.tp_objects(text, len(text), done.ctypes.data, starts.ctypes.data, ends.ctypes.data, ROOM)
        return Objects(starts[:count], ends[:count], int(done[0]), bool(done[1]))
    found: list[tuple[int, int]] = []
    is_open = False
    while len(found) < ROOM and not is_open:
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
        if text[at : at + 1] != b"{":
            break
        end = object_end(text, at)
        is_open = end < 0
        if not is_open:
            found.append((at, end))
            at = end
    columns = np.array(found, np.int64).reshape(-1, 2)
    return Objects(columns[:, 0], columns[:, 1], at, is_open)


def object_end(text: bytes, at: int, stop: int = -1) -> int:
    """The end of the object or array that begins at `at`, -1 where it is not in the text, or not before
    `stop`.
    """
    stop, depth = len(text) if stop < 0 else stop, 0
    while at >= 0:
        escape = -1
        for token in _TOKENS.finditer(text, at, stop):
            kind = token.lastindex
            if kind == _OPENS:
                depth += 1
            elif kind == _CLOSES:
                depth -= 1
                if depth == 0:
                    return token.end()
            elif kind is None:
                escape = token.end()
                break
        at = _string_end(text, escape, stop) if escape >= 0 else -1
    return -1


def _string_end(text: bytes, at: int, stop: int) -> int:
    """The end of a string, of which `at` is a place before an escape or the end; -1 where it has none."""
    while (found := _ESCAPED.match(text, at, stop)) is not None:
        at = found.end()
    return at + 1 if at < stop and text[at] == _QUOTE else -1


CHUNK_BYTES: Final = 1 << 17
ARRAY: Final = "traceEvents"
_OF_VIEWERS: Final = frozenset({"displayTimeUnit"})
_BLANK = re.compile(rb"\s*")
_STRING = re.compile(rb'"[^"\\]*')
_SCALAR = re.compile(rb"[^\s,{}\[\]\"]+")
_SCALAR_END = re.compile(rb"[,\]}\s]")
_NEXT = re.compile(rb"[{\]]")
# A whole value that is no object, in its place.
_OTHER = re.compile(rb'(?:"[^"\\]*(?:\\.[^"\\]*)*"|\[[^{}\[\]"]*\]|[^\s,{}\[\]"]+)(?=\s*[,\]])', re.DOTALL)
_ENDS = re.compile(rb"[}\s]+")
_SKIPPED = re.compile(rb'\\.|["{}\[\]]', re.DOTALL)
# What JSON is made of, with commas that repeat, and bare words and numbers as Python, JavaScript and C write
# them.
_TOKEN = re.compile(rb'"|,[\s,]*|[{}\[\]:]|[^\s,:{}\[\]"]+')
_WORDS: Final = {
    **{word: word for word in (b"null", b"true", b"false")},
    b"None": b"null",
    b"undefined": b"null",
    b"True": b"true",
    b"False": b"false",
}
_LOOSE_NUMBER = re.compile(rb"\+?(-?)(?=\.?\d)0*([1-9]\d*)?(?:\.(\d*))?([eE][-+]?\d+)?")
_ESCAPES = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_BACKSLASH = re.compile(rb'\\([^"])', re.DOTALL)
_NUMBER_BYTES_MAX = 1 << 9
# How an event begins inside of broken text, how many such places are tried, and how often the text is read.
_BEGINS = re.compile(rb'\{\s*"(?:ph|name|cat|ts|pid|tid|args|id|dur|s|bp)"\s*:')
_BEGINS_MAX = 1 << 10
_BEGIN_BYTES_MAX = 1 << 16
_BEGIN_READS_MAX = 4
_NEWLINE, _QUOTE = ord("\n"), ord('"')
_ANOTHER: Final = "another trace follows the first one: "
_PHASE = re.compile(rb'"ph"\s{0,8}:')
_PHASE_BYTES: Final = 13
_UNFINISHED: Final = (
    "ends without its last bracket: what followed is missing, as the base of its times may be"
)
CUT_OFF: Final = "was cut off in the middle of the event"


Fault = tuple[int, str]
"""A place, in bytes from the start of the stream, and what is wrong there."""


@dataclass(slots=True)
class _Lines:
    """The lines of a text: the number of the one at the last place that was asked for."""

    text: bytes
    line: int
    at: int = 0

    def of(self, at: int) -> int:
        """The line of a place, counted from the last one: places in order take one reading of the text."""
        if at != self.at:
            # This is several times as fast as `bytes.count`.
            part = np.frombuffer(self.text, np.uint8)[min(self.at, at) : max(self.at, at)]
            between = int(np.count_nonzero(part == _NEWLINE))
            self.line += between if at > self.at else -between
            self.at = at
        return self.line


@dataclass(slots=True)
class Elements:
    """Objects by their first and last places in `text`, with the number of bytes before the text, and the
    faults between them.
    """

    text: bytes
    starts: Int64s
    ends: Int64s
    bytes_before: int
    lines: _Lines
    faults: list[Fault] = field(default_factory=list)

    def texts(self) -> Iterator[tuple[int, bytes]]:
        """The place of each object in the stream, and its text."""
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            yield self.bytes_before + start, self.text[start:end]

    def problem(self, fault: Fault) -> Problem:
        """The problem of a fault, with its line."""
        at, message = fault
        return Problem(self.lines.of(at - self.bytes_before), "", f"{message} (at byte {at})")


class JsonText:
    """A place in a stream of JSON, of which a chunk is in memory."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._text, self._at = stream, b"", 0
        self._before, self._lines = 0, _Lines(b"", 1)
        """The bytes before the text, and the lines of the text."""
        self._peek()
        self._text = self._text.removeprefix(BOM) if not self._before else self._text

    def _more(self) -> bool:
        """Read more. Return False at the end."""
        parts, size = [self._text[self._at :]], 0
        # Several reads, as a compressed stream returns few bytes at a time.
        while size < CHUNK_BYTES and (part := self._stream.read(CHUNK_BYTES - size)):
            parts.append(part)
            size += len(part)
        line = self._lines.of(self._at)
        self._before += self._at
        self._text, self._at = b"".join(parts), 0
        self._lines = _Lines(self._text, line)
        return size > 0

    def _peek(self) -> bytes:
        """The next byte that is not blank, empty at the end."""
        while True:
            found = _BLANK.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _value(self) -> bytes | None:
        """The next value. It is empty, and not consumed, if it is too long; None where there is none."""
        first = self._peek()
        if not first or first in b",:]}":
            return None
        while True:
            if first in b"{[":
                end = object_end(self._text, self._at)
            elif first == b'"':
                found = _STRING.match(self._text, self._at)
                end = _string_end(self._text, found.end(), len(self._text)) if found else -1
            else:
                found = _SCALAR.match(self._text, self._at)
                end = found.end() if found and found.end() < len(self._text) else -1
            if end >= 0:
                text, self._at = self._text[self._at : end], end
                return text
            if len(self._text) - self._at > LINE_LIMIT_BYTES:
                return b""
            if not self._more():
                return None

    def _skip(self) -> bool:
        """Skip a value of any length, of which at most a chunk is kept. Return whether it has an end."""
        if self._peek() not in (b'"', b"{", b"["):
            while (end := _SCALAR_END.search(self._text, self._at)) is None:
                self._at = len(self._text)
                if not self._more():
                    return True
            self._at = end.start()
            return True
        depth, in_string = 0, False
        while True:
            at = self._at
            for token in _SKIPPED.finditer(self._text, at):
                at, what = token.end(), token[0]
                if what == b'"':
                    in_string = not in_string
                elif not in_string and len(what) == 1:
                    depth += 1 if what in b"{[" else -1
                if depth == 0 and not in_string and what != b"\\":
                    self._at = at
                    return True
            # A backslash at the end belongs to the next byte.
            self._at = len(self._text) - self._text.endswith(b"\\")
            if not self._more():
                return False


class JsonElements(JsonText):
    """Reads a stream. `members` are the short members of the object around the array, as far as they were
    read.
    """

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self.members: dict[str, Any] = {}
        self.members_left_out = self._members_bytes = 0
        """Members that are too long to be read, and those beyond all that are kept."""
        self.is_ended = False
        self.rest = ""
        """What is wrong after the last event that was read, if anything is."""
        self._in_object = False

    def sees(self, pattern: re.Pattern[bytes]) -> bool:
        """Whether the buffered text matches a pattern."""
        return pattern.search(self._text) is not None

    # Around the array -----------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Go to the array. Return False where there is none."""
        first = self._peek()
        if first == b"[":
            self._at += 1
            return True
        self._in_object = first == b"{"
        if self._in_object:
            self._at += 1
            return self._members()
        return False

    def _members(self) -> bool:
        """Read members up to the array. Return False where there is none."""
        while True:
            while self._peek() == b",":
                self._at += 1
            key = self._value() if self._peek() == b'"' else None
            if key == b"":
                self._skip()
            if key is None or self._peek() != b":":
                return False
            self._at += 1
            name = _parsed(key)
            if name == ARRAY and self._peek() == b"[":
                self._at += 1
                return True
            text = self._value()
            if text is None:
                return False
            if not text:
                self._skip()
            self._members_bytes += len(key) + len(text)
            if not text or self._members_bytes > LINE_LIMIT_BYTES:
                self.members_left_out += 1
                continue
            value = _parsed(text)
            if type(name) is str and value is not None:
                self.members[name] = value

    # The array ------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Elements]:
        """The objects of the array. Afterwards, members and the array of a following object are read."""
        while not self.is_ended or self._goes_on():
            self.is_ended = False
            found = objects(self._text, self._at)
            batch = Elements(self._text, found.starts, found.ends, self._before, self._lines)
            self._at = found.at
            if not len(found.starts) or found.is_open:
                self._go_on(batch, is_open=found.is_open)
            yield batch
        if self._in_object:
            while self._more():
                self._at = len(self._text)

    def _goes_on(self) -> bool:
        """Whether more follows the bracket that ended the array: members with another array, another object,
        or events, as the bracket closed something else.
        """
        if self._in_object and self._members():
            return True
        found = self._peek()
        if self._in_object and found == b"}":
            return self._begin_another()
        self.rest = _UNFINISHED if self._in_object and not found else ""
        return found != b""

    def _begin_another(self) -> bool:
        """Go to the array of another object that follows, as Proton once wrote one for each stream. If the
        members of the first object are about more than how to show its events, they need not apply to others.
        """
        self._at += 1
        if not (first := self._peek()):
            return False
        if first == b"{" and self.members.keys() <= _OF_VIEWERS:
            self._at += 1
            if self._members():
                return True
        self.rest = _ANOTHER + counted(self._count_phases(), "event|events is|are not read")
        return False

    def _count_phases(self) -> int:
        """Read to the end, and count what looks like an event."""
        count = 0
        while True:
            for found in _PHASE.finditer(self._text, self._at):
                count, self._at = count + 1, found.end()
            self._at = max(self._at, len(self._text) - _PHASE_BYTES + 1)
            if not self._more():
                return count

    def _go_on(self, batch: Elements, *, is_open: bool) -> None:
        """Go to the next object, where the buffer has no whole object here."""
        first = self._text[self._at : self._at + 1]
        if not first:
            self.is_ended = not self._more()
        elif first == b"]":
            self._at += 1
            while self._peek() == b"]":  # the last one may be that of the array
                self._at += 1
            self.is_ended = True
        elif is_open:
            if len(self._text) - self._at > LINE_LIMIT_BYTES or not self._more():
                # Skip an object without an end, up to the next event in it.
                whole = self._text[self._at : self._at + LINE_LIMIT_BYTES]
                at_end = len(self._text) - self._at <= LINE_LIMIT_BYTES
                inner = next(events_in(whole, 1), None)
                message = "does not end" if inner is not None or not at_end else CUT_OFF
                batch.faults.append((self._before + self._at, message))
                self._at += len(whole) if inner is None else inner[0]
                if message == CUT_OFF:
                    self.is_ended, self._in_object = True, False
        elif first != b"{":
            self._skip_others(batch)

    def _skip_others(self, batch: Elements) -> None:
        """Skip what is in the place of events, up to the next event or bracket."""
        while True:
            batch.faults.append((self._before + self._at, "is not an event"))
            found = _OTHER.match(self._text, self._at, self._at + _BEGIN_BYTES_MAX)
            found = found or (_ENDS.match(self._text, self._at) if self._in_object else None)
            if not found:
                break
            self._at = found.end()
            found = _BETWEEN.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._text[self._at : self._at + 1] in (b"", b"{", b"]"):
                return
        while (found := _NEXT.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not self._more():
                return
        self._at = found.start()


def parsed(text: bytes) -> Any:
    """The value of JSON, or of what other viewers read as JSON too: invalid UTF-8 is replaced, and what is no
    JSON number or word is text, as in `_strict`. Raises ValueError.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        value = _loaded(text, _finite)
    except ValueError:
        value = _loaded(_strict(text), _finite)
    return orjson.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _loaded(text: bytes, parse_float: Callable[[str], object]) -> Any:
    """The value of JSON, in which strings may have control characters."""
    return json.loads(
        text.decode("utf-8", "replace"), strict=False, parse_constant=str, parse_float=parse_float
    )


def _finite(number: str) -> float | str:
    value = float(number)
    return value if isfinite(value) else number


def _strict(text: bytes) -> bytes:
    """JSON without superfluous commas, in which bare words are values: `None`, `+.5`, and `-nan(ind)` as a
    text. In a string with an escape that JSON does not have, backslashes are letters. Raises ValueError
    where a string has no end.
    """
    strict = bytearray()
    last, at = b"", 0
    while (token := _TOKEN.search(text, at)) is not None:
        part, at = token[0], token.end()
        if part == b'"':
            found = _STRING.match(text, at - 1)
            at = _string_end(text, found.end(), len(text)) if found else -1
            if at < 0:
                raise ValueError("a string has no end")
            part = text[token.start() : at]
            if b"\\" in _ESCAPES.findall(part):  # as a path of Windows, by a writer that escapes quotes alone
                part = _BACKSLASH.sub(lambda found: b"\\\\" + found[1] * (1 + (found[1] == b"\\")), part)
        elif part[:1] == b",":
            if last in (b"[", b"{") or text[at : at + 1] in (b"]", b"}"):
                continue
            part = b","
        elif last in (b"[", b",", b":") and part not in (b"{", b"}", b"[", b"]", b":"):
            part = _bare(part)
        strict += part
        last = part
    return bytes(strict)


def _bare(word: bytes) -> bytes:
    """The JSON value of a word without quotes."""
    if len(word) <= _NUMBER_BYTES_MAX and (number := _LOOSE_NUMBER.fullmatch(word)):
        sign, whole, fraction, exponent = number.groups(b"")
        return sign + (whole or b"0") + (b"." + fraction if fraction else b"") + exponent
    value = _WORDS.get(word)
    return value if value is not None else json.dumps(word.decode("utf-8", "replace")).encode()


def _parsed(text: bytes) -> object:
    try:
        return parsed(text)
    except (ValueError, RecursionError):
        return None


def events_in(text: bytes, at: int) -> Iterator[tuple[int, int]]:
    """The begins and ends of whole events inside of a text, from `at` on."""
    left = _BEGIN_READS_MAX * (len(text) - at)
    for _ in range(_BEGINS_MAX):
        found = _BEGINS.search(text, at)
        if not found or left < 0:
            return
        start = found.start()
        stop = min(len(text), start + _BEGIN_BYTES_MAX)
        end = object_end(text, start, stop)
        left -= (end if end >= 0 else stop) - start
        event = _parsed(text[start:end]) if end >= 0 else None
        if type(event) is dict and type(event.get("ph")) is str:
            yield start, end
            at = end
        else:
            at = start + 1


def events_of(text: bytes, at: int = 0) -> Iterator[tuple[int, bytes, Any]]:
    """The event in the text of an object, with its place, after `at`, and its own text; or what is wrong with
    it. A missing bracket or quote may have joined it with valid events, which follow then.
    """
    try:
        event = parsed(text)
        yield at, text, TOO_DEEP if is_too_deep(text, event) else event
    except (ValueError, RecursionError):
        yield at, text, "is not JSON"
        for start, end in events_in(text, 1):
            yield from events_of(text[start:end], at + start)


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
    # The key has an escape, or the number an unusual form.
    texts = _loaded(_strict(event), str)
    return ns_of_text(texts[key]) if type(texts.get(key)) is str else None
