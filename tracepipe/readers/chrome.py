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
from dataclasses import dataclass
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
)
from tracepipe.launchers import RANK_MAX
from tracepipe.readers.chrome_events import ChromeEvents, Kinds, ProtonKinds, chrome_events, ns_of_text
from tracepipe.readers.ids import Ids, RangeNumbers
from tracepipe.readers.json_elements import JsonElements
from tracepipe.readers.recording import BOM, FirstProblems, Recording, counted_problems
from tracepipe.readers.sorted_events import Cache, SortedEvents, batches_of
from tracepipe.readers.sorted_rows import MARK, SLICE, Rows, SortedRow, SortedRows

CLOCK: Final = "trace"
BASE: Final = "baseTimeNanoseconds"
OF_KINETO: Final = frozenset({"schemaVersion", "deviceProperties", "distributedInfo"})
VIZTRACER: Final = "viztracer_metadata"
_KINETO_EVENT = re.compile(
    rb'"cat"\s*:\s*"(?:cpu_op|cuda_runtime|gpu_memcpy|user_annotation|python_function)"'
)
_VIZTRACER_EVENT = re.compile(rb'"cat"\s*:\s*"(?:FEE|fee)"')
_PROTON_EVENT = re.compile(rb'"call_stack"\s*:\s*\[\s*"ROOT"')
_EVENT = re.compile(rb'"ph"\s*:\s*"')
_MEMBER = re.compile(rb'\{\s*(?:"[^"\\]{0,64}"\s*:|\})')
_LIST = re.compile(rb"\[\s*(?:\{|\]|$)")
_OF_AMD = re.compile(r"AMD|Radeon|Instinct|gfx", re.IGNORECASE)
_OF_SM: Final = {
    "regsPerMultiprocessor": "registers_per_sm",
    "sharedMemPerMultiprocessor": "shared_bytes_per_sm",
}
_SHOWN = ("schemaVersion", "traceName", "trace_id", "cuda_runtime_version", "cuda_driver_version")
_OVERFLOWN: Final = "VizTracer's buffer was full: the first events are missing, their number is not known"
# An event at 0 has no time, if all others are more than a day later.
_DAY_NS: Final = 24 * 3600 * 10**9
# At most this many begins may be open. Further ones become instants.
_OPEN_MAX: Final = 1 << 15
_Key = tuple[Any, ...]


class _Members:
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

    def _member(self, name: str) -> dict[str, Any]:
        """A member that is an object, empty where it is not there."""
        member = self._members.get(name)
        return member if type(member) is dict else {}

    @property
    def is_viztracer(self) -> bool:
        """Whether VizTracer wrote it."""
        return self._sees_viztracer or VIZTRACER in self._members

    @property
    def is_overflown(self) -> bool:
        """Whether VizTracer's buffer was full, so that it has only the last events."""
        return self._member(VIZTRACER).get("overflow") is True

    @property
    def marker_ns(self) -> int | None:
        """When the program set VizTracer's marker."""
        marker = self._member(VIZTRACER).get("sync_marker")
        return ns_of_text(repr(marker)) if type(marker) in (int, float) else None

    @property
    def _base_ns(self) -> int:
        base = self._members.get(BASE, self._member(VIZTRACER).get(BASE))
        return base if type(base) is int and 0 < base < 1 << 62 else 0

    @property
    def _place(self) -> dict[str, int]:
        """The rank of the process among those that train together, and how many they are."""
        info = self._member("distributedInfo")
        bounds = (("rank", 0, RANK_MAX), ("world_size", 1, RANK_MAX + 1))
        return {
            key: info[key]
            for key, low, high in bounds
            if type(info.get(key)) is int and low <= info[key] <= high
        }

    def kinds(self, ids: Ids) -> Kinds:
        """The kinds of its events."""
        if self.is_proton:
            return ProtonKinds(ids)
        rank = self._place.get("rank", 0)
        return Kinds(ids, is_kineto=self.is_kineto, is_viztracer=self.is_viztracer, rank=rank)

    def clock(self, events: ChromeEvents) -> str:
        """The clock of the times."""
        if self.is_viztracer:
            # In files that were combined by their starts or markers, times count from there.
            is_aligned = events.least_ns <= 0 or events.last_ns < (self.marker_ns or 0) // 2
            return CLOCK if is_aligned else MONOTONIC
        return "realtime" if self.is_kineto or self._base_ns else CLOCK

    def ahead_ns(self, events: ChromeEvents, clock: str) -> int:
        """The offset to add to each time, ns."""
        if clock == CLOCK:
            return max(0, -events.least_ns)
        base_ns = 0 if clock == MONOTONIC else self._base_ns
        # Times that count from the base are far below it. These are absolute.
        return 0 if base_ns // 2 <= events.first_ns < TIME_LIMIT_NS else base_ns

    def header(self, events: ChromeEvents, clock: str) -> Header:
        """The header of the recording."""
        members = self._members
        header = Header(clock=clock, clocks=[clock])
        header.rank, header.world_size = self._place.get("rank"), self._place.get("world_size")
        first_ns, base_ns = events.first_ns, self._base_ns
        if clock == MONOTONIC and base_ns and first_ns + base_ns < TIME_LIMIT_NS:
            header.start = {"monotonic_ns": first_ns, "realtime_ns": first_ns + base_ns}
        if type(members.get("host_name")) is str:
            header.host = members["host_name"]
        gpus = members.get("deviceProperties")
        if type(gpus) is list and gpus:
            header.gpus = [
                _gpu(gpu)
                for gpu in gpus
                if type(gpu) is dict and type(gpu.get("id")) is int and 0 <= gpu["id"] <= ID_LIMIT
            ]
        header.options = {key: members[key] for key in _SHOWN if type(members.get(key)) in (str, int)}
        if "backend" in (info := self._member("distributedInfo")):
            header.options["backend"] = info["backend"]
        if self.is_viztracer:
            header.engine = f"VizTracer {self._member(VIZTRACER).get('version', '')}".rstrip()
        elif self.is_kineto or self.is_proton:
            header.engine = "PyTorch's profiler (Kineto)" if self.is_kineto else "Triton Proton"
        return header


def _gpu(stated: dict[str, Any]) -> dict[str, Any]:
    """A GPU in the form of a header. Of AMD's, the numbers of compute capabilities mean something else."""
    gpu = {"index": stated["id"], "name": str(stated.get("name", "")), "sm_count": stated.get("numSms")}
    if not gpu["name"] or _OF_AMD.search(gpu["name"]):
        return gpu
    capability = stated.get("computeMajor"), stated.get("computeMinor")
    if all(type(number) is int for number in capability):
        gpu["compute_capability"] = "{}.{}".format(*capability)
    return gpu | {new: stated[old] for old, new in _OF_SM.items() if type(stated.get(old)) is int}


@dataclass(slots=True)
class _Begin:
    """A begin that waits for its end."""

    ts_ns: int
    stated: dict[str, Any]
    args: bytes


class ChromePairs:
    """Adds slices made of begins and ends to `rows`.

        B E      of a thread; an E ends the innermost B of its name, or the innermost one where it has none
        b n e    of an id: they nest, and may overlap those of other ids: ranges of a process

    They come in the order of time. A begin without an end lasts to the end of the trace, marked `unclosed`.
    An end without a begin is an instant, marked `no_begin`.
    """

    def __init__(self, rows: SortedRows) -> None:
        self._rows = rows
        self._open: dict[_Key, list[_Begin]] = {}
        self._count = 0
        self._ranges: dict[_Key, RangeNumbers] = {}
        self._range_of: dict[_Key, int] = {}
        self._parsed = Cache[bytes, dict[str, Any]]()
        self.unclosed = self.no_begin = 0

    def add(self, paired: Iterable[Rows], last_ns: int) -> None:
        """Add the slices of all begins and ends, in order; `last_ns` is the end of the trace."""
        for rows in paired:
            for row in rows:
                stated = self._parsed.get(row.first)
                if stated is None:
                    stated = self._parsed.keep(row.first, orjson.loads(row.first), len(row.first))
                self._add(row.ts_ns, stated, row.second)
        for key, opened in list(self._open.items()):
            while opened:
                self._end(key, opened.pop(), max(last_ns, 0), b"", unclosed=True)

    def _add(self, ts_ns: int, stated: dict[str, Any], args: bytes) -> None:
        key, phase, name = tuple(stated["key"]), stated["phase"], stated.get("name")
        range_key = stated["fields"].get("pid"), stated["fields"].get("domain")
        opened = self._open.setdefault(key, [])
        if phase in "Bb":
            if self._count >= _OPEN_MAX:
                self._instant(ts_ns, key, stated, args, "unclosed")
                return
            if phase == "b" and not opened:
                number = self._ranges.setdefault(range_key, RangeNumbers()).lowest()
                self._range_of[key] = RANGE_LIMIT if number is None else number
            self._count += 1
            opened.append(_Begin(ts_ns, stated, args))
        elif phase == "n":
            self._instant(ts_ns, key, stated, args, "")
        elif not opened or (name is not None and all(one.stated.get("name", name) != name for one in opened)):
            self._instant(ts_ns, key, stated, args, "no_begin")
        else:  # it ends the innermost begin of its name, with all that is in it
            is_it = False
            while not is_it:
                begin = opened.pop()
                is_it = name is None or begin.stated.get("name", name) == name
                self._end(key, begin, ts_ns, args if is_it else b"", unclosed=not is_it)
            if not opened and key in self._range_of:
                self._ranges[range_key].free(self._range_of.pop(key))
        if not opened:
            del self._open[key]

    def _end(self, key: _Key, begin: _Begin, end_ns: int, args: bytes, *, unclosed: bool) -> None:
        """Add a slice from a begin to its end."""
        self._count -= 1
        self.unclosed += unclosed
        fields, launch = begin.stated["fields"], begin.stated["launch"]
        record = {**fields, "name": fields.get("name") or begin.stated.get("name", "no name")}
        if key in self._range_of:
            record["range"] = self._range_of[key]
        record |= {"phase": "X", "dur_ns": 0}
        if launch is not None:
            record["launch"] = 0
        joined = _joined(begin.args, args, "unclosed" if unclosed else "")
        dur_ns = max(0, end_ns - begin.ts_ns)
        self._rows.add(SortedRow(begin.ts_ns, SLICE, dur_ns, launch or 0, orjson.dumps(record), joined))

    def _instant(self, ts_ns: int, key: _Key, stated: dict[str, Any], args: bytes, mark: str) -> None:
        self.no_begin += mark == "no_begin"
        self.unclosed += mark == "unclosed"
        record = {**stated["fields"], "name": stated.get("name", "no name"), "phase": "I"}
        if stated["phase"] in "bne":
            record["range"] = self._range_of.get(key, 0)
        self._rows.add(SortedRow(ts_ns, MARK, 0, 0, orjson.dumps(record), _joined(args, b"", mark)))


def _joined(first: bytes, second: bytes, mark: str) -> bytes:
    """The arguments of a begin and of its end, whose values replace those of the begin, and a mark."""
    if not second and not mark:
        return first
    args = (orjson.loads(first) if first else {}) | (orjson.loads(second) if second else {})
    return orjson.dumps(args | {mark: True} if mark else args) if args or mark else b""


class _Trace:
    """Turns one trace into batches."""

    def __init__(self, stream: BinaryIO) -> None:
        self._elements = JsonElements(stream)
        self._has_array = self._elements.begin()
        self._around = around = _Members(self._elements)
        self._ids = ids = Ids()
        self._events = chrome_events(around.kinds(ids), ids)
        self._sorted = SortedEvents(self._events.rows)
        self._undated = 0
        self._problems = FirstProblems()
        if around.is_after_events:
            for _ in self._read():
                pass
        self._clock = around.clock(self._events)

    def recording(self) -> Recording:
        """The recording. Its header is made of the members before the events, where these are enough."""
        header = self._around.header(self._events, self._clock)
        return Recording(header, self._batches(), self._sorted.tables)

    def _read(self) -> Iterator[SourceBatch]:
        """Read all events, and yield a batch without events for each step."""
        elements = self._elements
        if not self._has_array:
            self._problems.add(Problem(0, "", "has no array of events", skipped=False))
            return
        for batch in elements.batches():
            self._problems.add(*self._events.add_all(batch))
            yield SourceBatch(no_events(), offset_bytes=elements.offset_bytes)
        if elements.has_another:
            self._problems.add(Problem(0, "", "another trace follows the first one, and is not read"))

    def _batches(self) -> Iterator[SourceBatch]:
        """Batches with problems while events are read, and then the events in the order of time."""
        events, around = self._events, self._around
        if not around.is_after_events:
            yield from self._read()
        if self._clock == MONOTONIC and around.marker_ns is not None:
            events.mark("sync marker", around.marker_ns)
        pairs = ChromePairs(events.rows)
        pairs.add(events.paired.in_order(), events.last_ns)
        ahead_ns = around.ahead_ns(events, self._clock)
        # They come with the first events, whose time is the start of the trace.
        others: list[Record] = events.name_records()
        if around.is_overflown and events.first_ns < TIME_LIMIT_NS:
            loss = {"type": "loss", "layer": "hook", "count": 1, "ts_ns": events.first_ns + ahead_ns}
            others.append({**loss, "reason": _OVERFLOWN})
        columns = (self._columns(rows, ahead_ns) for rows in events.rows.in_order())
        yield from batches_of(columns, others, self._problems.pop(), self._last_problems(pairs))

    def _columns(self, rows: Rows, ahead_ns: int) -> EventColumns:
        """Rows as columns of events. Rows at time 0, far before all others, get the first of these times."""
        ts_ns: Int64s = rows.ts_ns
        if _DAY_NS < self._events.first_ns < TIME_LIMIT_NS and bool((ts_ns == 0).any()):
            undated = ts_ns == 0
            self._undated += int(undated.sum())
            texts = list(rows.second)
            for at in np.flatnonzero(undated).tolist():
                args = orjson.loads(texts[at]) if texts[at] else {}
                texts[at] = orjson.dumps(args | {"time_not_known": True})
            rows.second = Texts.of(texts)
            ts_ns = np.where(undated, self._events.first_ns, ts_ns)
        return self._sorted.columns(rows, ts_ns + ahead_ns)

    def _last_problems(self, pairs: ChromePairs) -> Iterator[Problem]:
        """The problems of the whole trace."""
        events = self._events
        if self._around.is_overflown:
            yield Problem(0, "viztracer_metadata.overflow", f"{_OVERFLOWN}: counted as one", skipped=False)
        if self._clock == CLOCK and events.least_ns < 0:
            words = f"times begin {-events.least_ns} ns before 0: this is added to all of them"
            yield Problem(0, "ts", words, skipped=False)
        yield from self._problems.rest("object|objects cannot be read")
        yield from self._ids.problems()
        drawn = "slice|slices has|have {0} duration: drawn without one (args.{1}_duration_ns)"
        yield from counted_problems(
            {
                drawn.format("a negative", "negative"): events.negative,
                drawn.format("an impossible", "impossible"): events.impossible,
                f"name|names is|are longer than {NAME_BYTES_MAX} bytes and was|were cut": events.cut,
                "event|events is|are at time 0, far before all others: drawn at the first of these "
                "(args.time_not_known)": self._undated,
                "name|names of processes and threads is|are left out: there are more than can be kept": (
                    events.names_left_out
                ),
                "begin|begins has|have no end: drawn to that of the caller, or the trace (args.unclosed)": (
                    pairs.unclosed
                ),
                "end|ends has|have no begin: drawn as an_instant|instants (args.no_begin)": pairs.no_begin,
            }
        )


def read(stream: BinaryIO) -> Recording:
    """The recording in such a stream."""
    return _Trace(stream).recording()


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
