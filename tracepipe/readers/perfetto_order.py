"""Turns sorted rows of a Perfetto trace into rows of events.

An end closes the slice that began last on its track, with its name and category if it has these, and all
slices inside. A flow starts where its number comes first.
"""

from __future__ import annotations

from collections import Counter as Counts
from typing import Final

import orjson

from tracepipe.event.model import Record
from tracepipe.event.tables import packed
from tracepipe.readers.chrome_numbers import flow_number
from tracepipe.readers.known import Known
from tracepipe.readers.perfetto_events import (
    BEGIN,
    COUNTER,
    END,
    FLOW,
    INSTANT,
    INSTANT_FLOW,
    LAST_FLOW,
    NO_NAME,
)
from tracepipe.readers.perfetto_streams import begun, kernel_name, kind_of
from tracepipe.readers.perfetto_threads import ThreadsInOrder
from tracepipe.readers.perfetto_tracks import Tracks
from tracepipe.readers.sorted_rows import Rows, SortedRow, rows_of

_OPEN_MAX: Final = 1 << 17
# The most open slices of a track among which an end is matched. The trace processor keeps no more.
_LOOKED_AT_MAX: Final = 512
_FLOWS_MAX: Final = 1 << 16
_Key = tuple[str, int, str, str]
"""Phase, track, name and category."""
_Row = tuple[int, int, int, bytes, bytes]
"""Time, length, flow, record and arguments."""


class Ordered:
    """Takes rows in the order of time. `counted` counts what could not be used."""

    def __init__(self, tracks: Tracks) -> None:
        self._tracks = tracks
        self.counted: Counts[str] = Counts()
        self._open: dict[int, list[tuple[str, str]]] = {}
        """By track: the names and categories of its open slices."""
        self._opened = 0
        self._deeper: Counts[int] = Counts()
        self._begun_ns: dict[int, int] = {}
        self._flows: dict[int, tuple[int, bool]] = {}
        """By the number of a flow: how often it ended, and whether it has begun again. The last used are at
        the end."""
        self.threads = ThreadsInOrder(tracks)
        self.losses: list[Record] = []
        """The losses among the rows that were taken."""
        self._keys = Known[bytes, _Key | Record]()
        self._records = Known[tuple[str, int, str], bytes]()

    def events(self, rows: Rows) -> Rows:
        """The rows of events for these rows."""
        made: list[_Row] = []
        for ts_ns, _, dur_ns, number, first, second in rows:
            key = self._keys.get(first) or self._parsed_row(first)
            if isinstance(key, dict):
                made += self._ready(key, ts_ns, dur_ns, first, second)
                continue
            phase, track, name, category = key
            stream = self._tracks.place(track).stream
            if stream is not None:
                if stream.is_summary:
                    continue
                name = kernel_name(name, second)
            if phase == BEGIN:
                if not self._begin(track, name, category):
                    continue
                self._begun_ns[track] = ts_ns
            elif phase == END:
                called = self._end(track, name, category)
                if called is None:
                    continue
                name, category = called, ""
            elif phase == COUNTER:
                name = self._tracks.place(track).counter
            elif phase not in (INSTANT, "X"):
                made += self._flow(key, ts_ns, number, second)
                continue
            elif phase == "X":
                self._begun_ns[track] = ts_ns
            record, second = self._record(phase, track, name), self._with_category(track, category, second)
            if stream is not None and phase != END:
                record, second = begun(orjson.loads(record), second)
            made.append((ts_ns, dur_ns, 0, record, second))
        return rows_of([SortedRow(of[0], 0, *of[1:]) for of in made])

    def _parsed_row(self, first: bytes) -> _Key | Record:
        """Parse the text of a row: the key of a track's row, or a record."""
        stated = orjson.loads(first)
        return self._keys.keep(first, stated if isinstance(stated, dict) else tuple(stated), len(first))

    def _ready(self, of: Record, ts_ns: int, dur_ns: int, first: bytes, second: bytes) -> list[_Row]:
        """The rows of a record, which has its thread or stream."""
        if of["type"] == "loss":
            self.losses.append({**of, "ts_ns": ts_ns})
            return []
        if of["type"] != "scheduler":
            return [(ts_ns, dur_ns, 0, first, second)]
        event = self.threads.event(of, second)
        return [] if event is None else [(ts_ns, 0, 0, *event)]

    def _begin(self, track: int, name: str, category: str) -> bool:
        """Open a slice. Return whether there is room for it."""
        if self._opened >= _OPEN_MAX:
            self._deeper[track] += 1
            self.counted["more begins than can be open at a time"] += 1
            return False
        self._opened += 1
        self._open.setdefault(track, []).append((name, category))
        return True

    def _end(self, track: int, name: str, category: str) -> str | None:
        """Close a slice and return its name, or that of the end where nothing is open. None for an end that
        is left out.
        """
        if self._deeper[track]:
            self._deeper[track] -= 1
            return None
        opened = self._open.get(track)
        if not opened:
            return name
        for at in range(len(opened) - 1, max(-1, len(opened) - 1 - _LOOKED_AT_MAX), -1):
            called, of = opened[at]
            if (not name or not called or name == called) and (not category or category == of):
                self._opened -= len(opened) - at
                del opened[at:]
                return called
        self.counted["end|ends without an open slice"] += 1
        return None

    def _flow(self, key: _Key, ts_ns: int, number: int, second: bytes) -> list[_Row]:
        """The rows for an end of a flow, and for its instant."""
        phase, track, name, category = key
        is_instant = phase.startswith(INSTANT_FLOW)
        if is_instant:
            phase = phase.removeprefix(INSTANT_FLOW) or FLOW
            second = self._with_category(track, category, second)
        instant = (ts_ns, 0, 0, self._record(INSTANT, track, name), second)
        if self._tracks.place(track).stream is not None and self._begun_ns.get(track) != ts_ns:
            # Without a slice, the end of a flow would be an instant, and reports have no instants on streams.
            self.counted["flow|flows without a slice on its|their stream"] += 1
            return [instant] if is_instant else []
        flow = self._goes_on(phase, number)
        if flow is None:
            return [instant] if is_instant else []
        phase, number = flow
        record = self._record(phase, track, name)
        if is_instant and self._begun_ns.get(track) == ts_ns:
            # The flow will belong to the slice that begins there, so the instant is a separate row.
            return [instant, (ts_ns, 0, number, record, b"")]
        return [(ts_ns, 0, number, record, second)]

    def _goes_on(self, phase: str, number: int) -> tuple[str, int] | None:
        """The phase of a flow (it starts, continues or ends) and its number. A number that is used again is
        replaced by another. None where the flow ends and has not begun.
        """
        times, is_open = self._flows.pop(number, (0, False))
        ends = phase == LAST_FLOW
        if ends and not is_open:
            self.counted["flow|flows ends|end without a begin"] += 1
            return None
        if len(self._flows) >= _FLOWS_MAX:
            del self._flows[next(iter(self._flows))]
        self._flows[number] = times + ends, not ends
        called = flow_number("again", number, times) if times else number
        return ("t" if is_open and not ends else phase), called

    def _record(self, phase: str, track: int, name: str) -> bytes:
        key = (phase, track, name)
        record = self._records.get(key)
        if record is None:
            place = self._tracks.place(track)
            whole = {**place.fields, "name": name or NO_NAME, "phase": phase}
            if place.stream is not None:
                whole["type"] = kind_of(name)
            if phase == "X":
                whole["dur_ns"] = 0
            elif phase in (FLOW, "t", LAST_FLOW):
                whole["flow"] = 0
            record = packed(whole)
            self._records.keep(key, record, len(record))
        return record

    def _with_category(self, track: int, category: str, second: bytes) -> bytes:
        """Arguments with the category, where the layer is not named after it."""
        if not category or category == self._tracks.place(track).layer:
            return second
        # The bytes that orjson returns hold at least 4 KB of memory. A copy holds no more than its size.
        stated = bytes(memoryview(orjson.dumps({"cat": category})))
        return stated[:-1] + b"," + second[1:] if second else stated
