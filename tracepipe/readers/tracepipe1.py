"""Reads `tracepipe/1`, the event file of `event/model.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, cast

import orjson

from tracepipe.errors import FormatError, InputError
from tracepipe.event.checks import RecordCheck, first_fault
from tracepipe.event.model import (
    SCHEMA_VERSION,
    TIME_LIMIT_NS,
    Batch,
    Header,
    Problem,
    Record,
    Shape,
    SharedArgs,
    timed,
)
from tracepipe.readers.lines import BOM, SHALLOW_BYTES, TOO_DEEP, Rejoined, chunks_of_text, is_too_deep
from tracepipe.readers.recording import InputFormat, Recording, saying

# Small enough that the parsed records of one chunk stay within a few MB.
CHUNK_BYTES = 1 << 18
# Our own captures put the time first: the rest of such a line is a shape that comes again and again.
_TIME_FIRST = b'{"ts_ns":'
_NEEDED = {"type", "schema", "clock", "clocks"}
"""Fields of a header without which no event can be understood."""
_SHAPES_MAX = 1 << 12
_SHAPE_BYTES_MAX = 512
_MET_MAX = 1 << 14


class _Shapes(dict[bytes, Shape]):
    """Rest of a line after its time → its shape, from the second time that it is met: one line in five has
    arguments that no other has, and would only drive out what comes again.
    """

    def __init__(self, check: RecordCheck) -> None:
        super().__init__()
        self._check = check
        self._met: set[int] = set()
        self._without_args: dict[bytes, Shape] = {}
        """Rest of a line up to its arguments → the shape of the line if it had none."""
        self.bad = 0
        """Lines that have no shape, so far."""

    def __missing__(self, rest: bytes) -> Shape | None:
        shape = self._with_args(rest) or self._parsed(rest)
        if shape is None:
            self.bad += 1
        elif shape.plain and len(rest) <= _SHAPE_BYTES_MAX:
            self._meet(rest, shape)
        return shape

    def _parsed(self, rest: bytes) -> Shape | None:
        text = b'{"ts_ns":0,' + rest
        try:
            record = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        # A second ts_ns in the line would be the one that counts.
        if is_too_deep(text, record) or record.get("ts_ns") != 0 or self._check.fault(record):
            return None
        return timed(record)[1]

    def _with_args(self, rest: bytes) -> Shape | None:
        """The shape of a line that ends with its arguments; None where that is not so, or they are bad."""
        # In a string the quotes would have backslashes; deeper in the line the braces would not close.
        before, found, args_text = rest.partition(b',"args":{')
        if not found or not args_text.endswith(b"}") or len(args_text) > SHALLOW_BYTES:
            return None
        like = self._without_args.get(before)
        if like is None:
            like = self._parsed(before + b"}")
            if like is None or not like.plain or like.args is not None:
                return None
            if len(self._without_args) >= _SHAPES_MAX:
                self._without_args.clear()
            self._without_args[before] = like
        try:
            return like.with_args(orjson.loads(b"{" + args_text[:-1]))
        except orjson.JSONDecodeError:
            return None

    def _meet(self, rest: bytes, shape: Shape) -> None:
        if (met := hash(rest)) not in self._met:
            if len(self._met) >= _MET_MAX:
                self._met.clear()
            self._met.add(met)
            return
        if len(self) >= _SHAPES_MAX:
            self.clear()
        if shape.args is not None:
            shape.args = SharedArgs(shape.args)
        self[rest] = shape


def _times_first(text: bytes) -> tuple[list[int], list[bytes]] | None:
    """Times and rests of lines that all start with their time; None where one does not, or has a bad one."""
    lines = text[len(_TIME_FIRST) :].split(b"\n" + _TIME_FIRST)
    if not text.startswith(_TIME_FIRST) or len(lines) != text.count(b"\n") + 1:
        return None
    halves = [line.partition(b",") for line in lines]
    # One look at all numbers costs a third of one at each.
    digits = b",".join([half[0] for half in halves])
    try:
        times = orjson.loads(b"[" + digits + b"]")
    except orjson.JSONDecodeError:
        return None
    if len(times) != len(lines) or set(map(type, times)) != {int}:
        return None
    if min(times) < 0 or max(times) > TIME_LIMIT_NS:
        return None
    return times, [half[2] for half in halves]


class _Parser:
    """Parses lines; each rest of a line after its time only once, while the memory for shapes lasts."""

    def __init__(self) -> None:
        self._check = RecordCheck()
        self._shapes = _Shapes(self._check)

    def parse(self, first: int, text: bytes, batch: Batch) -> None:
        """Add the events of `text` to `batch`, and a problem for each line that has none."""
        found = _times_first(text)
        if found is not None:
            times, rests = found
            bad = self._shapes.bad
            events = list(zip(times, map(self._shapes.__getitem__, rests), strict=True))
            if self._shapes.bad == bad:
                batch.events = events
                return
        self._parse_lines(first, text, batch)

    def _parse_lines(self, first: int, text: bytes, batch: Batch) -> None:
        """Parse line by line, and say what is wrong with each that is bad."""
        for line, one in enumerate(text.split(b"\n"), first):
            found = _times_first(one)
            if found and (shape := self._shapes[found[1][0]]) is not None:
                batch.events.append((found[0][0], shape))
            elif one.strip():
                self._parse_other(line, one, batch)

    def _parse_other(self, line: int, text: bytes, batch: Batch) -> None:
        try:
            record = orjson.loads(text)
        except orjson.JSONDecodeError as e:
            batch.problems.append(Problem(line, "", f"is not JSON: {e.msg} at column {e.colno}"))
            return
        if is_too_deep(text, record):
            batch.problems.append(Problem(line, "", TOO_DEEP))
            return
        batch.events += map(timed, self._check.keep((record,), line, batch.problems))


def _header(stream: BinaryIO, problems: list[Problem]) -> tuple[Header, bytes]:
    """The header, and what was read beyond it. Its bad fields are left out and named in `problems`."""
    text = stream.read(CHUNK_BYTES)
    while b"\n" not in text and (more := stream.read(CHUNK_BYTES)):
        text += more
        if len(text) > 64 * CHUNK_BYTES:
            break
    line, _, rest = text.removeprefix(BOM).partition(b"\n")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        raise InputError(
            f"the header is not JSON: {e.msg}", "a tracepipe/1 file starts with its header", line=1
        ) from e
    if is_too_deep(line, record):
        raise InputError(TOO_DEEP, "a tracepipe/1 file starts with its header", line=1)
    if isinstance(record, dict) and record.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise FormatError(
            f"the file is {record['schema']!r}, and this program reads {SCHEMA_VERSION}",
            "use the version of tracepipe that wrote it, or a newer one",
        )
    if isinstance(record, dict) and record.get("type") == "header":
        _leave_out_faults(record, problems)
    if fault := first_fault(record):
        raise InputError(fault[1], "a tracepipe/1 file starts with its header", line=1, field=fault[0])
    if record["type"] != "header":
        raise InputError("is not a header", "a tracepipe/1 file starts with its header", line=1, field="type")
    return cast(Header, record), rest


def _leave_out_faults(header: Record, problems: list[Problem]) -> None:
    """What describes the capture must not cost its events; what says how to read them must be right."""
    while fault := first_fault(header):
        field = re.split(r"[.[]", fault[0])[0]
        if field in _NEEDED or field not in header:
            return
        del header[field]
        problems.append(Problem(1, *fault))


def _batches(stream: BinaryIO, header_bytes: int) -> Iterator[Batch]:
    parser = _Parser()
    for first, text, offset_bytes, cut in chunks_of_text(stream, CHUNK_BYTES):
        batch = Batch(offset_bytes=header_bytes + offset_bytes)
        parser.parse(first + 1, text, batch)
        if cut and batch.problems and batch.problems[0].message.startswith("is not JSON"):
            # Half a line at the very end is what an interrupted writer leaves, and says so.
            batch.problems[0] = Problem(first + 1, "", "was cut off in the middle of the line")
        yield batch


def read(stream: BinaryIO) -> Recording:
    """Header and batches of a `tracepipe/1` stream. Raises InputError or FormatError on a bad header."""
    problems: list[Problem] = []
    header, rest = _header(stream, problems)
    return Recording(header, saying(problems, _batches(cast(BinaryIO, Rejoined(rest, stream)), 0)))


def sniff(head: bytes) -> bool:
    """Whether the first line is a header, whatever its version."""
    line = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    return line.startswith(b"{") and b'"header"' in line and b'"schema"' in line


FORMAT = InputFormat("tracepipe", "tracepipe/1 event file (JSON Lines)", sniff, read)
