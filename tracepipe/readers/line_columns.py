"""Makes columns of lines of `tracepipe/1` in Python: the reference of the native core's `lines.c`.

    {"ts_ns":1795,"type":"userspace","name":"cuInit","phase":"B","pid":7,"tid":7,"args":{"flags":0}}
             time └────────────── the same on many lines, but for duration and launch ───────────┘

What follows the time on a line is parsed once. When the same text comes again, it is looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, cast

import numpy as np
import orjson

from tracepipe.event.checks import RecordCheck, long_texts
from tracepipe.event.columns import NONE, EventColumns, Index, Int64s, Row, event_columns, signed
from tracepipe.event.model import TIME_LIMIT_NS, Record
from tracepipe.event.shape import index_of
from tracepipe.event.tables import Tables
from tracepipe.event.warps import Warps
from tracepipe.readers.lines import OTHERS, is_too_deep

FOREIGN: Final = NONE
"""The shape of a line that is read separately, or that has no event."""
Rest = tuple[int, int, int, int, Index | None, int]
"""A row without its time."""
ReadOne = Callable[[int, bytes], Row]
"""Reads one line separately, given its number in the text, from 0 on, and the line."""
# Our own captures put the time first.
_TIME_FIRST = b'{"ts_ns":'
_ZERO, _NEWLINE = ord("0"), ord("\n")
# A number with this many digits is within the limit of times.
_DIGITS_MAX = len(str(TIME_LIMIT_NS)) - 1
_LINES_MAX = 1 << 12
_LINE_BYTES_MAX = 512


class Lines(Protocol):
    """Reads text that is whole lines."""

    def read(
        self, text: bytes, read_one: ReadOne, others: list[Record | Warps]
    ) -> tuple[EventColumns, Int64s | None, int]:
        """Read the lines of `text`. Lines that are not of its grammar are read by `read_one`. Return the rows
        in order, with ids of stacks; the numbers of their lines, from 0, None for all lines; and how many
        lines there are. Records that are not events are added to `others`, also by `read_one`.
        """


class LineColumns:
    """Reads lines that start with their time and repeat others."""

    def __init__(self, tables: Tables, check: RecordCheck) -> None:
        self._tables, self._check = tables, check
        self._rounds = 0
        self._rests: list[Rest] = []
        self._known: dict[bytes, int] = {}
        """The text that follows the time on a line → its place in `_rests`."""

    def read(
        self, text: bytes, read_one: ReadOne, others: list[Record | Warps]
    ) -> tuple[EventColumns, Int64s | None, int]:
        """As `Lines` has it; here a batch of warps is read as any other line."""
        if self._rounds != self._tables.rounds or len(self._rests) > _LINES_MAX:
            self._known.clear()
            self._rests.clear()
            self._rounds = self._tables.rounds
        starts, ends, times, cut = _times_of(text)
        rests = [text[start:end] for start, end in zip((starts + cut).tolist(), ends.tolist(), strict=True)]
        places = list(map(self._known.get, rests))
        odd = np.flatnonzero(times == NONE).tolist()
        for line in odd:
            places[line] = None
        for line in [line for line, place in enumerate(places) if place is None]:
            whole = text[starts[line] : ends[line]]
            if times[line] == NONE:
                head, _, rests[line] = whole.partition(b",")
                times[line] = _time_of(head)
            # The shape of a line without a time must not get a number.
            place = None if times[line] == NONE else self._place(rests[line])
            if place is None:
                times[line], *rest = read_one(line, whole)
                place = self._add(cast("Rest", tuple(rest)))
            places[line] = place
        used, at = np.unique(np.array(places, np.int64), return_inverse=True)
        events = event_columns([(0, *self._rests[place]) for place in used.tolist()]).take(at)
        events.ts_ns = times
        kept = np.flatnonzero(events.shape != FOREIGN)
        if len(kept) == len(places):
            return events, None, len(places)
        return events.take(kept), kept, len(places)

    def _add(self, rest: Rest) -> int:
        self._rests.append(rest)
        return len(self._rests) - 1

    def _place(self, rest: bytes) -> int | None:
        """The place of the text that follows the time on a line, None where it is not of this grammar."""
        if (known := self._known.get(rest)) is not None:
            return known
        text = b"{" + rest
        try:
            record = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        # A second ts_ns in the line would replace the first.
        if is_too_deep(text, record) or "ts_ns" in record or "phase" not in record:
            return None
        record["ts_ns"] = 0
        if self._check.fault(record) or record["type"] in OTHERS or long_texts(record):
            return None
        shape, args = self._tables.shape_number(record), self._tables.args_number(record.get("args"))
        launch = signed(record.get("launch", record.get("flow", 0)))
        stack = record.get("stack", NONE)
        place = self._add((shape, args, record.get("dur_ns", 0), launch, index_of(record), stack))
        if len(rest) <= _LINE_BYTES_MAX:
            self._known[rest] = place
        return place


def _times_of(text: bytes) -> tuple[Int64s, Int64s, Int64s, int]:
    """The starts and ends of lines, their times, and the size of what precedes the rest of a line, bytes.

    Times have the same number of digits for a long time, so all are read in one pass. A line where that is
    not so gets the time NONE.
    """
    ends = np.append(np.flatnonzero(np.frombuffer(text, np.uint8) == _NEWLINE), len(text))
    starts = np.append(0, ends[:-1] + 1)
    first = text.find(_TIME_FIRST)
    cut = text.find(b",", first) + 1 - first
    if first < 0 or not len(_TIME_FIRST) + 1 < cut <= len(_TIME_FIRST) + 1 + _DIGITS_MAX:
        return starts, ends, np.full(len(starts), NONE, np.int64), 0
    padded = np.frombuffer(text + bytes(cut), np.uint8)
    heads = np.lib.stride_tricks.sliding_window_view(padded, cut)[starts]
    digits = heads[:, len(_TIME_FIRST) : -1] - _ZERO
    are_times = (heads[:, : len(_TIME_FIRST)] == np.frombuffer(_TIME_FIRST, np.uint8)).all(axis=1)
    are_times &= (digits <= 9).all(axis=1) & (heads[:, -1] == ord(","))
    if digits.shape[1] > 1:
        are_times &= digits[:, 0] > 0  # 01 is not a number in JSON
    times = digits @ 10 ** np.arange(digits.shape[1] - 1, -1, -1, dtype=np.int64)
    return starts, ends, np.where(are_times, times, NONE), cut


def _time_of(head: bytes) -> int:
    """The time of a line that starts with this, up to its first comma."""
    digits = head.removeprefix(_TIME_FIRST)
    # Some numbers of Python are invalid in JSON: `1_0`, `+1`, `01`.
    if digits == head or not digits.isdigit() or (digits[0] == _ZERO and digits != b"0"):
        return NONE
    return ts_ns if len(digits) <= 19 and (ts_ns := int(digits)) <= TIME_LIMIT_NS else NONE
