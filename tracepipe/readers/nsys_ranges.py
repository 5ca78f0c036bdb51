"""Reads NVTX_EVENTS of an export of Nsight Systems: ranges of threads and of processes, marks, names.

A row is a whole range, which becomes a begin and an end. A range that crosses another one of its thread stays
whole, as only ends of ranges that nest can be matched with their begins.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from tracepipe.event.model import RANGE_LIMIT, Problem
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args
from tracepipe.readers.event_rows import EventRows, Place, Values, cut_text
from tracepipe.readers.nsys_names import Names, pid_of, tid_of
from tracepipe.readers.sqlite_tables import Database
from tracepipe.units import agree, counted

TABLE: Final = "NVTX_EVENTS"
COLUMNS: Final = (
    "start", "end", "eventType", "category", "color", "text", "globalTid", "endGlobalTid", "textId",
    "domainId", "uint64Value", "int64Value", "doubleValue", "uint32Value", "int32Value", "floatValue",
    "jsonTextId", "jsonText", "binaryData",
)  # fmt: skip
# ENUM_NSYS_EVENT_TYPE. Types with two numbers have an older one too.
_CATEGORY, _DOMAIN = 33, 75
_MARKS: Final = frozenset({34, 65})
_OF_THREADS: Final = frozenset({35, 59, 66, 70})
_OF_PROCESSES: Final = frozenset({37, 60, 68, 71})
_THREAD_NAMES: Final = frozenset({39, 72})
_DEFINITIONS: Final = frozenset({_CATEGORY, 64, _DOMAIN, 76})
_NAMES_MAX: Final = 1 << 12
_U64: Final = (1 << 64) - 1
_PAYLOADS: Final = 10
"""Where the payload's columns begin: there is one for each type, and one of them has a value."""


@dataclass(slots=True)
class _Open:
    """Numbers of the open ranges of a process and a domain. The lowest free number is taken next."""

    free: list[int] = field(default_factory=list)
    count: int = 0

    def take(self) -> int | None:
        if self.free:
            return heapq.heappop(self.free)
        if self.count > RANGE_LIMIT:
            return None
        self.count += 1
        return self.count - 1

    def give_back(self, number: int) -> None:
        heapq.heappush(self.free, number)


class Annotations:
    """Makes annotations of rows."""

    def __init__(self, rows: EventRows, names: Names, database: Database, problems: list[Problem]) -> None:
        self._rows, self._names = rows, names
        self._domains: dict[tuple[int | None, Any], str] = {}
        self._categories: dict[tuple[int | None, Any, Any], str] = {}
        self._open: dict[tuple[int | None, Any], _Open] = {}
        self._others: dict[str, int] = {}
        if TABLE in database.tables:
            self._define(database, problems)

    def _define(self, database: Database, problems: list[Problem]) -> None:
        where = f"WHERE eventType IN ({_CATEGORY}, 64, {_DOMAIN})"
        columns = ("start", "eventType", "globalTid", "domainId", "category", "text", "textId")
        for count, row in enumerate(database.in_order(TABLE, columns, problems, ("start",), where)):
            if count >= _NAMES_MAX:
                break
            _, _, kind, whole, domain, category, text, text_id = row
            name = text if type(text) is str else self._names.strings.get(text_id)
            if name is None:
                continue
            if kind == _DOMAIN:
                self._domains[_pid(whole), domain] = name
            else:
                self._categories[_pid(whole), domain, category] = name

    def take(self, at: Place, row: Values) -> None:
        """Make the events of a row."""
        kind, whole, text = row[2], row[6], row[5]
        name = text if type(text) is str else self._names.strings.get(row[8])
        if type(whole) is not int:
            self._rows.say(at, "globalTid is not an integer", skipped=True)
        elif kind in _DEFINITIONS:
            return
        elif kind in _MARKS:
            self._add(at, row, "I", name or "")
        elif kind in _THREAD_NAMES:
            shape = self._shape("thread name", "I", whole, None, None, comm=name)
            self._rows.add(at, row[0], self._rows.number_of(shape), {"thread": name or ""})
        elif kind in _OF_THREADS:
            self._thread_range(at, row, name or "")
        elif kind in _OF_PROCESSES:
            self._process_range(at, row, name or "")
        else:
            label = self._names.label("ENUM_NSYS_EVENT_TYPE", kind)
            self._others[label or "no type"] = self._others.get(label or "no type", 0) + 1

    def say_others(self) -> None:
        """Add a problem for the rows that are not read."""
        for label, count in self._others.items():
            self._rows.say(
                (TABLE, -1), f"{counted(count, 'row|rows')} of {label} {agree(count, 'is|are')} not read"
            )

    def _thread_range(self, at: Place, row: Values, name: str) -> None:
        start, end, whole, domain = row[0], row[1], row[6], row[9]
        if type(end) is not int or end < start:
            if type(end) is int:
                self._rows.say(at, f"ends {start - end} ns before it starts: it is kept without an end")
                self._add(at, row, "B", name, ends_before_start_ns=start - end)
            else:
                self._add(at, row, "B", name)
            return
        if not self._rows.nests((whole, domain), start, end):
            self._add(at, row, "X", name, dur_ns=end - start)
            return
        shape = self._add(at, row, "B", name)
        self._end(end, shape, whole)

    def _process_range(self, at: Place, row: Values, name: str) -> None:
        start, end, whole, domain = row[0], row[1], row[6], row[9]
        open_ = self._open.setdefault((_pid(whole), domain), _Open())
        number = open_.take() if self._rows.has_room_for_ends else None
        is_known = type(end) is int and end >= start
        if number is None:
            self._add(at, row, "X", name, dur_ns=end - start if is_known else 0)
            return
        shape = self._add(at, row, "B", name, number=number)
        if is_known:
            self._end(end, shape, row[7] if type(row[7]) is int else whole, lambda: open_.give_back(number))
        elif type(end) is int:
            self._rows.say(at, f"ends {start - end} ns before it starts: it is kept without an end")

    def _end(self, end: int, begin: Shape, whole: int, then: Callable[[], None] | None = None) -> None:
        shape = Shape(
            begin.type, begin.name, "E", begin.pid, tid_of(whole), domain=begin.domain, range=begin.range
        )
        self._rows.end_later(end, shape, then=then)

    def _add(
        self, at: Place, row: Values, phase: str, name: str, *, dur_ns: int = 0, number: int | None = None,
        **marks: object,
    ) -> Shape:  # fmt: skip
        shape = self._shape(name, phase, row[6], row[9], number)
        args = self._args(row) | marks
        self._rows.add(at, row[0], self._rows.number_of(shape), args, dur_ns)
        return shape

    def _shape(
        self, name: str, phase: str, whole: int, domain: object, number: int | None, comm: str | None = None
    ) -> Shape:
        pid = pid_of(whole)
        own = None
        if domain:  # 0 is the default one
            own = self._domains.get((pid, domain)) or f"domain {domain}"
        return Shape(
            "annotation", cut_text(name), phase, pid, tid_of(whole), comm=comm, has_dur=phase == "X",
            domain=own, range=number,
        )  # fmt: skip

    def _args(self, row: Values) -> Args:
        category, color, whole, domain = row[3], row[4], row[6], row[9]
        args: Args = {}
        if category:
            args["category"] = self._categories.get((_pid(whole), domain, category), category)
        if type(color) is int:
            args["color"] = f"#{color & 0xFFFFFF:06x}"
        uint64, int64, double, uint32, int32, single, json_id, json, binary = row[_PAYLOADS:]
        if type(uint64) is int:
            args["payload"] = uint64 & _U64
        for value in (int64, double, uint32, int32, single):
            if isinstance(value, int | float):
                args["payload"] = value
        text = json if type(json) is str else self._names.strings.get(json_id)
        if text:
            args["payload"] = _parsed(text)
        if type(binary) is str and binary:
            args["payload_data"] = binary
        return args


def _parsed(text: str) -> object:
    """The value of a payload's JSON, or its text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _pid(whole: object) -> int | None:
    return pid_of(whole) if type(whole) is int else None
