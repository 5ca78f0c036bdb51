"""Reads Chrome's trace JSON, which PyTorch's profiler (Kineto) writes too.

    {"traceEvents": [{"ph":"X","cat":"kernel","name":"f","pid":0,"tid":7,"ts":1.234,"dur":5.6,"args":{…}}, …]}

The file is the object, or only the array, which may lack its end. `ts` and `dur` are microseconds, and become
nanoseconds by their digits. Events may be in any order. They are sorted by time, in temporary files without
names if there are many.

Versions of PyTorch wrote times as whole microseconds since the epoch, as these with three decimals, and as
microseconds after `baseTimeNanoseconds`. `chrome_header` finds the clock of these, and of other tools' times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, Final

import numpy as np
import orjson

from tracepipe.event.columns import EventColumns, Int64s, SourceBatch, Texts, no_events
from tracepipe.event.model import MONOTONIC, NAME_BYTES_MAX, TIME_LIMIT_NS, Header, Problem, Record
from tracepipe.event.warps import Warps
from tracepipe.readers.chrome_header import CLOCK, OF_KINETO, ChromeHeader
from tracepipe.readers.chrome_numbers import Ids
from tracepipe.readers.chrome_pairs import ChromePairs
from tracepipe.readers.json_elements import JsonElements
from tracepipe.readers.lines import BOM
from tracepipe.readers.native_chrome_rows import chrome_events
from tracepipe.readers.recording import FirstProblems, Recording
from tracepipe.readers.sorted_events import RowColumns, batches_of
from tracepipe.readers.sorted_rows import Rows
from tracepipe.units import counted

_EVENT = re.compile(rb'"ph"\s*:\s*"')
_MEMBER = re.compile(rb'\{\s*(?:"[^"\\]{0,64}"\s*:|\})')
_LIST = re.compile(rb"\[\s*(?:\{|\]|$)")
_OVERFLOWN: Final = "VizTracer's buffer was full: the first events are missing, their number is not known"
# An event at 0 has no time, if all others are more than a day later.
_DAY_NS: Final = 24 * 3600 * 10**9


class _Trace:
    """Turns one trace into batches."""

    def __init__(self, stream: BinaryIO) -> None:
        self._elements = JsonElements(stream)
        self._has_array = self._elements.begin()
        self._around = around = ChromeHeader(self._elements)
        self._ids = ids = Ids()
        self._events = chrome_events(around.kinds(ids), ids)
        self._in_columns = RowColumns()
        self.tables = self._in_columns.tables
        self._unplaced = 0
        self._problems = FirstProblems()
        if around.is_after_events:
            for _ in self._take():
                pass
        self._clock = around.clock(self._events)

    def header(self) -> Header:
        """The members around the events as a header: only those before them, where that is enough."""
        return self._around.header(self._events, self._clock)

    def _take(self) -> Iterator[SourceBatch]:
        """Read all events, and yield a batch without events for each step."""
        elements = self._elements
        if not self._has_array:
            self._problems.add(Problem(0, "", "has no array of events", skipped=False))
            return
        for batch in elements.batches():
            self._problems.add(*self._events.take(batch))
            yield SourceBatch(no_events(), offset_bytes=elements.offset_bytes)
        if elements.has_another:
            self._problems.add(Problem(0, "", "another trace follows the first one, and is not read"))

    def batches(self) -> Iterator[SourceBatch]:
        """Batches with problems while events are read, and then the events in the order of time."""
        events, around = self._events, self._around
        if not around.is_after_events:
            yield from self._take()
        if self._clock == MONOTONIC and around.marker_ns is not None:
            events.mark("sync marker", around.marker_ns)
        pairs = ChromePairs(events.rows)
        pairs.take(events.paired.in_order(), events.last_ns)
        ahead_ns = around.ahead_ns(events, self._clock)
        # They come with the first events, whose time is the start of the trace.
        others: list[Record | Warps] = [*events.name_records(), *self._losses(ahead_ns)]
        columns = (self._columns(rows, ahead_ns) for rows in events.rows.in_order())
        yield from batches_of(columns, others, self._problems.take(), self._stated(pairs))

    def _losses(self, ahead_ns: int) -> Iterator[Record]:
        """The loss of the events that were overwritten."""
        if self._around.is_overflown and self._events.first_ns < TIME_LIMIT_NS:
            ts_ns = self._events.first_ns + ahead_ns
            yield {"type": "loss", "layer": "hook", "count": 1, "ts_ns": ts_ns, "reason": _OVERFLOWN}

    def _columns(self, rows: Rows, base_ns: int) -> EventColumns:
        """Rows as columns of events."""
        ts_ns = rows.ts_ns
        if _DAY_NS < self._events.first_ns < TIME_LIMIT_NS and bool((ts_ns == 0).any()):
            ts_ns = self._with_times(rows)
        return self._in_columns.columns(rows, ts_ns + base_ns)

    def _with_times(self, rows: Rows) -> Int64s:
        """The times of rows. Rows at time 0 get the first of the other times."""
        unknown = rows.ts_ns == 0
        self._unplaced += int(unknown.sum())
        texts = list(rows.second)
        for at in np.flatnonzero(unknown).tolist():
            args = orjson.loads(texts[at]) if texts[at] else {}
            texts[at] = orjson.dumps(args | {"time_not_known": True})
        rows.second = Texts.of(texts)
        return np.where(unknown, self._events.first_ns, rows.ts_ns)

    def _stated(self, pairs: ChromePairs) -> Iterator[Problem]:
        """The problems of the whole trace."""
        if self._around.is_overflown:
            yield Problem(0, "viztracer_metadata.overflow", f"{_OVERFLOWN}: counted as one", skipped=False)
        if self._clock == CLOCK and self._events.least_ns < 0:
            words = f"times begin {-self._events.least_ns} ns before 0: this is added to all of them"
            yield Problem(0, "ts", words, skipped=False)
        stated = {
            "slice|slices has|have a negative duration: drawn without one (args.negative_duration_ns)": (
                self._events.negative
            ),
            "slice|slices has|have an impossible duration: drawn without one (args.impossible_duration_ns)": (
                self._events.impossible
            ),
            f"name|names is|are longer than {NAME_BYTES_MAX} bytes and was|were cut": self._events.cut,
            "event|events is|are at time 0, far before all others: drawn at the first of these "
            "(args.time_not_known)": self._unplaced,
            "name|names of processes and threads is|are left out: there are more than can be kept": (
                self._events.names_left_out
            ),
            "begin|begins has|have no end: drawn to that of the caller, or the trace (args.unclosed)": (
                pairs.unclosed
            ),
            "end|ends has|have no begin: drawn as an_instant|instants (args.no_begin)": pairs.no_begin,
        }
        yield from self._problems.rest("object|objects cannot be read")
        yield from self._ids.stated()
        for words, count in stated.items():
            if count:
                yield Problem(0, "", counted(count, words), skipped=False)


def read(stream: BinaryIO) -> Recording:
    """Header and batches of such a stream."""
    trace = _Trace(stream)
    return Recording(trace.header(), trace.batches(), trace.tables)


def sniff(head: bytes) -> bool:
    """Whether the content is an object with members, or an array of objects, with an event in it."""
    text = head.removeprefix(BOM).lstrip()
    if text.startswith(b"["):
        return _LIST.match(text) is not None and (_EVENT.search(text) is not None)
    if not text.startswith(b"{") or not _MEMBER.match(text):
        return False
    first = text.partition(b"\n")[0]
    is_line = first.rstrip().endswith(b"}") and len(first) + 1 < len(text) and b'"traceEvents"' not in first
    return not is_line and (b'"traceEvents"' in text or any(f'"{key}"'.encode() in text for key in OF_KINETO))
