"""Reads Chrome's trace JSON, and that of PyTorch's profiler (Kineto), which is such.

    {"traceEvents": [{"ph":"X","cat":"kernel","name":"f","pid":0,"tid":7,"ts":1.234,"dur":5.6,"args":{…}}, …]}

The object or the array alone, which may lack its end. `ts` and `dur` are microseconds, and become nanoseconds
by their digits. Events may stand in any order: they are put in that of their times, in files without names
where they are many.

Three eras of PyTorch's times: whole microseconds since the epoch; those with three decimals; and microseconds
after `baseTimeNanoseconds`. All are CLOCK_REALTIME here. Others' times are on the clock "trace", or on
CLOCK_REALTIME where they say a base.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import numpy as np
import orjson

from tracepipe.event.columns import (
    NONE,
    SPECIAL,
    UNDATED_NS,
    EventColumns,
    Row,
    SourceBatch,
    event_columns,
    no_events,
)
from tracepipe.event.model import ID_LIMIT, NAME_BYTES_MAX, TIME_LIMIT_NS, Header, Problem, new_header
from tracepipe.event.shape import shape_of
from tracepipe.event.tables import Tables
from tracepipe.native import library
from tracepipe.readers.chrome_events import ChromeEvents
from tracepipe.readers.chrome_kinds import Kinds
from tracepipe.readers.chrome_numbers import Ids
from tracepipe.readers.chrome_pairs import ChromePairs
from tracepipe.readers.json_elements import JsonElements
from tracepipe.readers.lines import BOM
from tracepipe.readers.native_lines import NativeTables
from tracepipe.readers.recording import Recording
from tracepipe.readers.sorted_rows import Rows

CLOCK: Final = "trace"
BASE: Final = "baseTimeNanoseconds"
_OF_KINETO = frozenset({"schemaVersion", "deviceProperties", "distributedInfo"})
_KINETO_EVENT = re.compile(
    rb'"cat"\s*:\s*"(?:cpu_op|cuda_runtime|gpu_memcpy|user_annotation|python_function)"'
)
_EVENT = re.compile(rb'"ph"\s*:\s*"')
_MEMBER = re.compile(rb'\{\s*(?:"[^"\\]{0,64}"\s*:|\})')
_LIST = re.compile(rb"\[\s*(?:\{|\]|$)")
_SHOWN = (
    "schemaVersion",
    "traceName",
    "trace_id",
    "cuda_runtime_version",
    "cuda_driver_version",
    "host_name",
)
_SHAPES_MAX: Final = 1 << 11
# So many are kept with their text until the events come.
_PROBLEMS_MAX: Final = 1 << 10
# What stands at 0 where all others stand over a day later has no time.
_DAY_NS: Final = 24 * 3600 * 10**9


class _Trace:
    """One trace on its way into batches."""

    def __init__(self, stream: BinaryIO) -> None:
        self._elements = JsonElements(stream)
        self._has_array = self._elements.begin()
        members = self._elements.members
        self.is_kineto = not _OF_KINETO.isdisjoint(members) or self._elements.sees(_KINETO_EVENT)
        self.is_realtime = self.is_kineto or self._base_ns() != 0
        info = members.get("distributedInfo")
        rank = info.get("rank", 0) if type(info) is dict else 0
        ids = Ids()
        rank = rank if type(rank) is int and 0 <= rank < 1 << 20 else 0
        self._events = ChromeEvents(Kinds(ids, is_kineto=self.is_kineto, rank=rank), ids)
        core = library()
        self.tables = Tables() if core is None else NativeTables(core)
        self._shapes: dict[bytes, int] = {}
        self._rounds = 0
        self._unplaced = self._more_problems = 0
        self._problems: list[Problem] = []

    def _base_ns(self) -> int:
        members = self._elements.members
        of = members.get("viztracer_metadata")
        base = members.get(BASE, of.get(BASE) if type(of) is dict else None)
        return base if type(base) is int and 0 < base < 1 << 62 else 0

    def header(self) -> Header:
        """What stands before the events, as a header."""
        members = self._elements.members
        clock = "realtime" if self.is_realtime else CLOCK
        fields: dict[str, Any] = {"clock": clock, "clocks": [clock]}
        gpus = members.get("deviceProperties")
        if type(gpus) is list and gpus:
            fields["gpus"] = [
                {"index": gpu["id"], "name": str(gpu.get("name", "")), "sm_count": gpu.get("numSms")}
                for gpu in gpus
                if type(gpu) is dict and type(gpu.get("id")) is int and 0 <= gpu["id"] <= ID_LIMIT
            ]
        options = {key: members[key] for key in _SHOWN if type(members.get(key)) in (str, int)}
        info = members.get("distributedInfo")
        if type(info) is dict:
            options |= {key: info[key] for key in ("backend", "rank", "world_size") if key in info}
        if options:
            fields["options"] = options
        if self.is_kineto:
            fields["engine"] = "PyTorch's profiler (Kineto)"
        return new_header(**fields)

    def batches(self) -> Iterator[SourceBatch]:
        """Problems while events are read, and then the events in the order of their times."""
        elements, events = self._elements, self._events
        if not self._has_array:
            self._add([Problem(0, "", "holds no array of events", skipped=False)])
        else:
            for batch in elements.batches():
                self._add(events.take(batch))
                yield SourceBatch(no_events(), offset_bytes=elements.offset_bytes)
        pairs = ChromePairs(events.rows)
        pairs.take(events.paired.in_order(), events.last_ns)
        base_ns = self._base_ns() if self.is_realtime else 0
        if base_ns and base_ns // 2 <= events.first_ns < TIME_LIMIT_NS:
            base_ns = 0  # a time after the base is far below it: these are absolute
        # With the first events, whose time is the start of the trace.
        problems, self._problems = self._problems, []
        names = self._events.name_records()
        for rows in events.rows.in_order():
            columns = self._columns(rows, base_ns)
            yield SourceBatch(_with_others(columns, len(names)), list(names), problems)
            names, problems = [], []
        yield SourceBatch(_with_others(no_events(), len(names)), list(names), [*problems, *self._said(pairs)])

    def _add(self, problems: list[Problem]) -> None:
        room = max(0, _PROBLEMS_MAX - len(self._problems))
        self._problems += problems[:room]
        self._more_problems += len(problems[room:])

    def _columns(self, rows: Rows, base_ns: int) -> EventColumns:
        """Rows as columns of events."""
        tables, ts_ns = self.tables, rows.ts_ns
        if _DAY_NS < self._events.first_ns < TIME_LIMIT_NS and bool((ts_ns == 0).any()):
            ts_ns = self._with_times(rows)
        if self._rounds != tables.rounds or len(self._shapes) > _SHAPES_MAX:
            self._rounds = tables.rounds
            self._shapes.clear()
        shapes = list(map(self._shapes.get, rows.first))
        for at in [at for at, shape in enumerate(shapes) if shape is None]:
            first = rows.first[at]
            shape = self._shapes.get(first)
            if shape is None:
                record = orjson.loads(first)
                shape = self._shapes[first] = tables.number_of(shape_of(record))
            shapes[at] = shape
        number = tables.text_number
        args = [number(text) if text else NONE for text in rows.second]
        return EventColumns(
            ts_ns + base_ns,
            np.array(shapes, np.int32),
            np.array(args, np.int32),
            rows.dur_ns,
            rows.number,
        )

    def _with_times(self, rows: Rows) -> Any:
        """The times of rows, of which those at 0 stand where the first of the others does."""
        unknown = rows.ts_ns == 0
        self._unplaced += int(unknown.sum())
        for at in np.flatnonzero(unknown).tolist():
            args = orjson.loads(rows.second[at]) if rows.second[at] else {}
            rows.second[at] = orjson.dumps(args | {"time_not_known": True})
        return np.where(unknown, self._events.first_ns, rows.ts_ns)

    def _said(self, pairs: ChromePairs) -> Iterator[Problem]:
        """What there is to say of the whole."""
        said = {
            "slices have a negative duration: drawn without one (args.negative_duration_ns)": (
                self._events.negative
            ),
            "slices have a duration that cannot be: drawn without one (args.impossible_duration_ns)": (
                self._events.impossible
            ),
            f"names are longer than {NAME_BYTES_MAX} bytes and were cut": self._events.cut,
            "events stand at time 0, far before all others: drawn at the first of these "
            "(args.time_not_known)": self._unplaced,
            "begins have no end: drawn to that of their caller, or the trace (args.unclosed)": pairs.unclosed,
            "ends have no begin: drawn as instants (args.no_begin)": pairs.no_begin,
        }
        if self._more_problems:
            yield Problem(0, "", f"{self._more_problems} more objects are no good events", skipped=True)
        for words, count in said.items():
            if count:
                yield Problem(0, "", f"{count} {words}", skipped=False)


def _with_others(columns: EventColumns, count: int) -> EventColumns:
    """Columns with so many rows of what is no event, the first of a batch's others."""
    if not count:
        return columns
    rows: list[Row] = [(UNDATED_NS, SPECIAL, at, 0, 0, None, NONE) for at in range(count)]
    more = event_columns(rows)
    names = ("ts_ns", "shape", "args", "dur_ns", "launch")
    return EventColumns(*(np.concatenate([getattr(columns, name), getattr(more, name)]) for name in names))


def read(stream: BinaryIO) -> Recording:
    """Header and batches of such a stream."""
    trace = _Trace(stream)
    return Recording(trace.header(), trace.batches(), trace.tables)


def sniff(head: bytes) -> bool:
    """Whether content is an object with members, or an array of objects, of which one is an event."""
    text = head.removeprefix(BOM).lstrip()
    if text.startswith(b"["):
        return _LIST.match(text) is not None and (_EVENT.search(text) is not None)
    if not text.startswith(b"{") or not _MEMBER.match(text):
        return False
    first = text.partition(b"\n")[0]
    is_line = first.rstrip().endswith(b"}") and len(first) + 1 < len(text) and b'"traceEvents"' not in first
    return not is_line and (
        b'"traceEvents"' in text or any(f'"{key}"'.encode() in text for key in _OF_KINETO)
    )
