"""Reads Chrome's trace JSON, which PyTorch's profiler (Kineto) writes too.

    {"traceEvents": [{"ph":"X","cat":"kernel","name":"f","pid":0,"tid":7,"ts":1.234,"dur":5.6,"args":{…}}, …]}

The file is the object, or only the array, which may lack its end. `ts` and `dur` are microseconds, and become
nanoseconds by their digits. Events may be in any order. They are sorted by time, in temporary files without
names if there are many. Begins and ends become whole slices: those of a thread (B, E), and those of an id (b,
n, e), which nest, and may overlap those of other ids.

Versions of PyTorch wrote times as whole microseconds since the epoch, as these with three decimals, and as
microseconds after `baseTimeNanoseconds`. The members around the events show the clock:

PyTorch's profiler (Kineto)   CLOCK_REALTIME, often after `baseTimeNanoseconds`
VizTracer                     CLOCK_MONOTONIC; its `baseTimeNanoseconds` is how far CLOCK_REALTIME is ahead
others                        CLOCK_REALTIME where they state a base, else their own clock
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, BinaryIO, Final

import numpy as np
import orjson

from tracepipe.event.columns import EventColumns, Int64s, SourceBatch, Texts, no_events
from tracepipe.event.model import (
    ID_LIMIT,
    MONOTONIC,
    NAME_BYTES_MAX,
    RANGE_LIMIT,
    TIME_LIMIT_NS,
    Header,
    Problem,
    Record,
    new_header,
)
from tracepipe.event.warps import Warps
from tracepipe.launchers import RANK_MAX
from tracepipe.readers.chrome_events import ChromeEvents, Kinds, ProtonKinds, chrome_events, ns_of_text
from tracepipe.readers.ids import Ids
from tracepipe.readers.json_elements import JsonElements
from tracepipe.readers.recording import BOM, FirstProblems, Recording
from tracepipe.readers.sorted_events import Cache, RowColumns, batches_of
from tracepipe.readers.sorted_rows import MARK, SLICE, Rows, SortedRow, SortedRows
from tracepipe.units import counted

CLOCK: Final = "trace"
BASE: Final = "baseTimeNanoseconds"
OF_KINETO: Final = frozenset({"schemaVersion", "deviceProperties", "distributedInfo"})
VIZTRACER: Final = "viztracer_metadata"
_KINETO_EVENT = re.compile(
    rb'"cat"\s*:\s*"(?:cpu_op|cuda_runtime|gpu_memcpy|user_annotation|python_function)"'
)
_VIZTRACER_EVENT = re.compile(rb'"cat"\s*:\s*"(?:FEE|fee)"')
_PROTON_EVENT = re.compile(rb'"call_stack"\s*:\s*\[\s*"ROOT"')
_OF_AMD = re.compile(r"AMD|Radeon|Instinct|gfx", re.IGNORECASE)
_OF_SM: Final = {
    "regsPerMultiprocessor": "registers_per_sm",
    "sharedMemPerMultiprocessor": "shared_bytes_per_sm",
}
_SHOWN = (
    "schemaVersion",
    "traceName",
    "trace_id",
    "cuda_runtime_version",
    "cuda_driver_version",
)


class ChromeHeader:
    """The meaning of the members around the events, as far as they were read."""

    def __init__(self, elements: JsonElements) -> None:
        self._members = elements.members
        has_members = not OF_KINETO.isdisjoint(self._members)
        self.is_kineto = has_members or elements.sees(_KINETO_EVENT)
        self._sees_viztracer = VIZTRACER in self._members or elements.sees(_VIZTRACER_EVENT)
        self.is_proton = not self.is_kineto and elements.sees(_PROTON_EVENT)
        self.is_after_events = self._sees_viztracer or (self.is_kineto and not has_members)
        """Whether the clock is known only when all events are read. VizTracer writes its members after them,
        and may have PyTorch's events before its own, with times on its clock."""

    @property
    def is_viztracer(self) -> bool:
        """Whether VizTracer wrote it."""
        return self._sees_viztracer or VIZTRACER in self._members

    def kinds(self, ids: Ids) -> Kinds:
        """The kinds of its events."""
        if self.is_proton:
            return ProtonKinds(ids)
        return Kinds(
            ids, is_kineto=self.is_kineto, is_viztracer=self.is_viztracer, rank=self._place().get("rank", 0)
        )

    def _of_viztracer(self) -> dict[str, Any]:
        stated = self._members.get(VIZTRACER)
        return stated if type(stated) is dict else {}

    @property
    def is_overflown(self) -> bool:
        """Whether VizTracer's buffer was full, so that it has only the last events."""
        return self._of_viztracer().get("overflow") is True

    @property
    def marker_ns(self) -> int | None:
        """When the program set VizTracer's marker."""
        marker = self._of_viztracer().get("sync_marker")
        return ns_of_text(repr(marker)) if type(marker) in (int, float) else None

    def _base_ns(self) -> int:
        base = self._members.get(BASE, self._of_viztracer().get(BASE))
        return base if type(base) is int and 0 < base < 1 << 62 else 0

    def clock(self, events: ChromeEvents) -> str:
        """The clock of the times."""
        if self.is_viztracer:
            # In files that were combined by their starts or markers, times count from there.
            is_aligned = events.least_ns <= 0 or events.last_ns < (self.marker_ns or 0) // 2
            return CLOCK if is_aligned else MONOTONIC
        return "realtime" if self.is_kineto or self._base_ns() else CLOCK

    def ahead_ns(self, events: ChromeEvents, clock: str) -> int:
        """The offset to add to each time, ns."""
        if clock == CLOCK:
            return max(0, -events.least_ns)
        base_ns = 0 if clock == MONOTONIC else self._base_ns()
        # Times that count from the base are far below it. These are absolute.
        return 0 if base_ns // 2 <= events.first_ns < TIME_LIMIT_NS else base_ns

    def header(self, events: ChromeEvents, clock: str) -> Header:
        """The header of the recording."""
        members = self._members
        fields: dict[str, Any] = {"clock": clock, "clocks": [clock]}
        first_ns, base_ns = events.first_ns, self._base_ns()
        if clock == MONOTONIC and base_ns and first_ns + base_ns < TIME_LIMIT_NS:
            fields["start"] = {"monotonic_ns": first_ns, "realtime_ns": first_ns + base_ns}
        if type(members.get("host_name")) is str:
            fields["host"] = members["host_name"]
        gpus = members.get("deviceProperties")
        if type(gpus) is list and gpus:
            fields["gpus"] = [
                _gpu(gpu)
                for gpu in gpus
                if type(gpu) is dict and type(gpu.get("id")) is int and 0 <= gpu["id"] <= ID_LIMIT
            ]
        fields |= self._place()
        if options := self._options():
            fields["options"] = options
        if self.is_viztracer:
            fields["engine"] = f"VizTracer {self._of_viztracer().get('version', '')}".rstrip()
        elif self.is_kineto or self.is_proton:
            fields["engine"] = "PyTorch's profiler (Kineto)" if self.is_kineto else "Triton Proton"
        return new_header(**fields)

    def _options(self) -> dict[str, Any]:
        members = self._members
        options = {key: members[key] for key in _SHOWN if type(members.get(key)) in (str, int)}
        if "backend" in (info := self._distributed()):
            options["backend"] = info["backend"]
        return options

    def _place(self) -> dict[str, int]:
        """The rank of the process among those that train together, and how many they are."""
        info = self._distributed()
        bounds = (("rank", 0, RANK_MAX), ("world_size", 1, RANK_MAX + 1))
        return {
            key: info[key]
            for key, low, high in bounds
            if type(info.get(key)) is int and low <= info[key] <= high
        }

    def _distributed(self) -> dict[str, Any]:
        info = self._members.get("distributedInfo")
        return info if type(info) is dict else {}


def _gpu(stated: dict[str, Any]) -> dict[str, Any]:
    """A GPU in the form of a header. Of AMD's, the numbers of compute capabilities mean something else."""
    gpu = {"index": stated["id"], "name": str(stated.get("name", "")), "sm_count": stated.get("numSms")}
    if not gpu["name"] or _OF_AMD.search(gpu["name"]):
        return gpu
    capability = stated.get("computeMajor"), stated.get("computeMinor")
    if all(type(number) is int for number in capability):
        gpu["compute_capability"] = "{}.{}".format(*capability)
    return gpu | {new: stated[old] for old, new in _OF_SM.items() if type(stated.get(old)) is int}


# At most this many may be open. Further begins become instants.
_OPEN_MAX: Final = 1 << 15
_Key = tuple[Any, ...]


@dataclass(slots=True)
class _Open:
    """A begin that waits for its end."""

    ts_ns: int
    what: dict[str, Any]
    args: bytes


@dataclass(slots=True)
class _Lanes:
    """The numbers of the open ranges of a process and domain."""

    count: int = 0
    free: list[int] = field(default_factory=list)

    def take(self) -> int:
        """Take the lowest free number."""
        if self.free:
            return heappop(self.free)
        self.count += 1
        return min(self.count - 1, RANGE_LIMIT)

    def give_back(self, lane: int) -> None:
        """Free a number again."""
        heappush(self.free, lane)


class ChromePairs:
    """Adds slices made of begins and ends to `rows`."""

    def __init__(self, rows: SortedRows) -> None:
        self._rows = rows
        self._open: dict[_Key, list[_Open]] = {}
        self._count = 0
        self._lanes: dict[_Key, _Lanes] = {}
        self._lane_of: dict[_Key, int] = {}
        self._known = Cache[bytes, dict[str, Any]]()
        self.unclosed = self.no_begin = 0

    def take(self, paired: Iterable[Rows], last_ns: int) -> None:
        """Take all rows of begins and ends, in order; `last_ns` is the end of the trace."""
        for rows in paired:
            for row in rows:
                self._take(row.ts_ns, self._what(row.first), row.second)
        for key, opened in list(self._open.items()):
            while opened:
                self._end(key, opened.pop(), max(last_ns, 0), b"", unclosed=True)

    def _what(self, first: bytes) -> dict[str, Any]:
        what = self._known.get(first)
        if what is None:
            what = orjson.loads(first)
            self._known.keep(first, what, len(first))
        return what

    def _take(self, ts_ns: int, what: dict[str, Any], args: bytes) -> None:
        key, phase = tuple(what["key"]), what["phase"]
        opened = self._open.setdefault(key, [])
        if phase in "Bb":
            if self._count >= _OPEN_MAX:
                self._instant(ts_ns, key, what, args, "unclosed")
                return
            if phase == "b" and not opened:
                fields = what["fields"]
                lanes = self._lanes.setdefault((fields.get("pid"), fields.get("domain")), _Lanes())
                self._lane_of[key] = lanes.take()
            self._count += 1
            opened.append(_Open(ts_ns, what, args))
        elif phase == "n":
            self._instant(ts_ns, key, what, args, "")
        else:
            self._end_of(ts_ns, key, opened, what, args)
        if not opened:
            del self._open[key]

    def _end_of(self, ts_ns: int, key: _Key, opened: list[_Open], what: dict[str, Any], args: bytes) -> None:
        """End the innermost begin of a name, with all that is in it."""
        name = what.get("name")
        if not opened or (name is not None and all(one.what.get("name", name) != name for one in opened)):
            self._instant(ts_ns, key, what, args, "no_begin")
            return
        while True:
            one = opened.pop()
            is_it = name is None or one.what.get("name", name) == name
            self._end(key, one, ts_ns, args if is_it else b"", unclosed=not is_it)
            if is_it:
                break
        if not opened and key in self._lane_of:
            fields = what["fields"]
            self._lanes[fields.get("pid"), fields.get("domain")].give_back(self._lane_of.pop(key))

    def _end(self, key: _Key, one: _Open, end_ns: int, args: bytes, *, unclosed: bool) -> None:
        """Add a slice from a begin to its end."""
        self._count -= 1
        self.unclosed += unclosed
        fields, launch = one.what["fields"], one.what["launch"]
        record = {**fields, "name": fields.get("name") or one.what.get("name", "no name")}
        if key in self._lane_of:
            record["range"] = self._lane_of[key]
        record |= {"phase": "X", "dur_ns": 0}
        if launch is not None:
            record["launch"] = 0
        joined = _joined(one.args, args, "unclosed" if unclosed else "")
        dur_ns = max(0, end_ns - one.ts_ns)
        self._rows.add(SortedRow(one.ts_ns, SLICE, dur_ns, launch or 0, orjson.dumps(record), joined))

    def _instant(self, ts_ns: int, key: _Key, what: dict[str, Any], args: bytes, mark: str) -> None:
        self.no_begin += mark == "no_begin"
        self.unclosed += mark == "unclosed"
        record = {**what["fields"], "name": what.get("name", "no name"), "phase": "I"}
        if what["phase"] in "bne":
            record["range"] = self._lane_of.get(key, 0)
        self._rows.add(SortedRow(ts_ns, MARK, 0, 0, orjson.dumps(record), _joined(args, b"", mark)))


def _joined(first: bytes, second: bytes, mark: str) -> bytes:
    """The arguments of a begin and of its end, whose values replace those of the begin, and a mark."""
    if not second and not mark:
        return first
    args = (orjson.loads(first) if first else {}) | (orjson.loads(second) if second else {})
    return orjson.dumps(args | {mark: True} if mark else args) if args or mark else b""


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
