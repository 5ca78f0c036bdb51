"""Lines of `tracepipe/1` into columns, in Python: the reference of the native core's `lines.c`.

    {"ts_ns":1795,"type":"userspace","name":"cuInit","phase":"B","pid":7,"tid":7,"args":{"flags":0}}
             time └────────────── the same on many lines, but for duration and launch ───────────┘

What follows the time on a line is parsed once, and found by its text when it comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, cast

import numpy as np
import orjson

from tracepipe.event.checks import RecordCheck
from tracepipe.event.columns import NONE, EventColumns, Index, Row, event_columns, signed
from tracepipe.event.model import TIME_LIMIT_NS
from tracepipe.event.shape import index_of
from tracepipe.event.tables import Tables
from tracepipe.event.warps import Warps
from tracepipe.readers.lines import is_too_deep

FOREIGN: Final = NONE
"""The shape of a line that is read by itself, and of one that has no event."""
Rest = tuple[int, int, int, int, Index | None]
"""A row without its time."""
ReadOne = Callable[[int, bytes], Row]
"""Reads one line by itself: its place in the text, from 0 on, and the line."""
# Our own captures put the time first.
_TIME_FIRST = b'{"ts_ns":'
_ZERO = ord("0")
_LINES_MAX = 1 << 14
_LINE_BYTES_MAX = 512


class Lines(Protocol):
    """Reads text that is whole lines."""

    def read(self, text: bytes, read_one: ReadOne) -> tuple[EventColumns, int]:
        """The rows of the lines of `text`, those that are not of its grammar by `read_one`, in order; and how
        many lines there are.
        """

    def warps(self, line: bytes) -> Warps | None:
        """A line as a batch of warps, where this reads such a line quicker than as any other."""


class LineColumns:
    """Reads lines that start with their time and repeat others."""

    def __init__(self, tables: Tables, check: RecordCheck) -> None:
        self._tables, self._check = tables, check
        self._rounds = 0
        self._known: dict[bytes, Rest] = {}
        """What follows the time on a line → all of its row but the time."""

    def read(self, text: bytes, read_one: ReadOne) -> tuple[EventColumns, int]:
        """As `Lines` has it."""
        if self._rounds != self._tables.rounds or len(self._known) > _LINES_MAX:
            self._known.clear()
            self._rounds = self._tables.rounds
        lines = text.split(b"\n")
        halves = [line.partition(b",") for line in lines]
        times = _times_of([head for head, _, _ in halves])
        known = self._known
        # A line that is out of time must not give its shape a number.
        rests = [
            None if ts_ns == NONE else known.get(rest) or self._parsed(rest)
            for ts_ns, (_, _, rest) in zip(times, halves, strict=True)
        ]
        if None not in rests:
            return _columns_of(times, cast("list[Rest]", rests)), len(lines)
        rows: list[Row] = []
        for at, (ts_ns, rest) in enumerate(zip(times, rests, strict=True)):
            row = read_one(at, lines[at]) if rest is None else (ts_ns, *rest)
            if row[1] != FOREIGN:
                rows.append(row)
        return event_columns(rows), len(lines)

    def _parsed(self, rest: bytes) -> Rest | None:
        text = b"{" + rest
        try:
            record = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        # A second ts_ns in the line would be the one that counts.
        if is_too_deep(text, record) or "ts_ns" in record or "phase" not in record:
            return None
        record["ts_ns"] = 0
        if self._check.fault(record):
            return None
        row = (
            self._tables.shape_number(record),
            self._tables.args_number(record.get("args")),
            record.get("dur_ns", 0),
            signed(record.get("launch", 0)),
            index_of(record),
        )
        if len(rest) <= _LINE_BYTES_MAX:
            self._known[rest] = row
        return row

    def warps(self, line: bytes) -> Warps | None:
        """As `Lines` has it: here such a line is like any other."""
        return None


def _columns_of(times: list[int], rests: list[Rest]) -> EventColumns:
    """Columns of lines of which many have the same rest: each of those is looked at once."""
    ids = list(map(id, rests))
    different = dict(zip(ids, rests, strict=True))
    places = {one: at for at, one in enumerate(different)}
    columns = event_columns([(0, *rest) for rest in different.values()])
    events = columns.take(np.array(list(map(places.__getitem__, ids)), np.int64))
    events.ts_ns = np.array(times, np.int64)
    return events


def _times_of(heads: list[bytes]) -> list[int]:
    """The times of lines that start with them, NONE for others."""
    digits = [head[len(_TIME_FIRST) :] if head.startswith(_TIME_FIRST) else b"-1" for head in heads]
    # One look at all numbers costs a third of one at each.
    try:
        times = orjson.loads(b"[" + b",".join(digits) + b"]")
    except orjson.JSONDecodeError:
        return [_time_of(one) for one in digits]
    if len(times) != len(heads) or set(map(type, times)) != {int} or max(times) > TIME_LIMIT_NS:
        return [_time_of(one) for one in digits]
    return [max(ts_ns, NONE) for ts_ns in times] if min(times) < NONE else times


def _time_of(digits: bytes) -> int:
    # A number of Python's is none of JSON's: `1_0`, `+1`, `01`.
    if not digits.isdigit() or (digits[0] == _ZERO and digits != b"0") or len(digits) > 19:
        return NONE
    return ts_ns if (ts_ns := int(digits)) <= TIME_LIMIT_NS else NONE
