"""A program's NVTX annotations: ranges of threads, ranges of processes, marks.

NVTX loads the library into the command (`native/annotations.cpp`). Its records, which
`native/annotation_records.h` describes, become events:

    push, pop       B, E on the thread, nested in their domain
    start, end      B, E of the process with `range`, the least number that no open range has
    mark            I
    a thread's name I with `comm`

A pop or an end has no name, so open ranges are kept here. A push and a pop state how many ranges are open
around theirs. If that does not fit, records were lost, and the ranges that they would have ended end now.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Final

from tracepipe.event.model import ID_LIMIT, NAME_BYTES_MAX, RANGE_LIMIT
from tracepipe.tracer.gpu.build.toolchain import NATIVE, Toolchain
from tracepipe.tracer.gpu.engines.channel import (
    ENTRY_BYTES,
    NVTX_VARIABLE,
    PROCESS_BYTES,
    Crowded,
    GpuRecord,
    Malformed,
    MemoryLimit,
)
from tracepipe.tracer.gpu.engines.streams import (
    Decoder,
    Finder,
    Keeper,
    OpenSpan,
    Recording,
    RecordStream,
)
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.unrendered import NVTX, Carried, Span

_LAYER: Final = "annotation"
_OPEN_MAX: Final = 512
"""Nested ranges; a timeline draws no more."""


class AnnotationKind(IntEnum):
    """Kinds of the library's records."""

    MARK = 56
    PUSH = 57
    POP = 58
    START = 59
    END = 60
    LABEL = 61


class Label(IntEnum):
    """The object that a record of a label names."""

    DOMAIN = 1
    TEXT = 2
    CATEGORY = 3
    THREAD = 4
    FORK = 5
    STACK = 6


BEGUN: Final = struct.Struct("<3Q8s4IQ")
"""domain, registered text, number, payload, type of that, flags, colour, category, stack; a text follows."""
HAS_COLOR: Final = 1
BEGAN_BEFORE: Final = 2
"""Flags; BEGAN_BEFORE marks a range that was open when its window began."""
ENDED: Final = struct.Struct("<2Q")
"""domain, number"""
LABEL: Final = struct.Struct("<IIQQ")
"""what, 0, domain, number; a text follows."""
DEPTH_UNKNOWN: Final = (1 << 64) - 1
PAYLOADS: Final = {
    1: struct.Struct("<Q"),
    2: struct.Struct("<q"),
    3: struct.Struct("<d"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
}
"""Type of a payload → its format."""

Event = dict[str, Any]


@dataclass(slots=True)
class _OpenRange(OpenSpan):
    """A range that has begun, of a thread or, with a number, of a process."""

    domain: int = 0
    number: int | None = None
    content: bytes = b""
    """The bytes of its record, for a keeper."""


@dataclass(slots=True)
class _Process:
    """The state of a traced process: texts by handle, and open ranges."""

    texts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    """Kind of a label, its domain if it is a category, and its number → the text."""
    pushed: dict[tuple[int, int], list[_OpenRange | None]] = field(default_factory=dict)
    """Thread and domain → its open ranges; None for one whose record was lost."""
    started: dict[int, _OpenRange] = field(default_factory=dict)
    """Id of an open range of the process → the range."""
    free: dict[int, list[int]] = field(default_factory=dict)
    """Domain → a heap of the numbers that no range has; its greatest was never used."""


Made = Iterator[tuple[Event, _OpenRange | None]]


class _AnnotationEvents:
    """Makes events of records, each with the range that it begins or ends, if any. Raises REFUSALS."""

    def __init__(self, memory: MemoryLimit) -> None:
        self._memory = memory
        self._processes: dict[int, _Process] = {}
        self._make: Mapping[int, Callable[[_Process, GpuRecord], Made]] = {
            AnnotationKind.MARK: self._mark,
            AnnotationKind.PUSH: self._push,
            AnnotationKind.POP: self._pop,
            AnnotationKind.START: self._start,
            AnnotationKind.END: self._end,
            AnnotationKind.LABEL: self._label,
        }

    def events_of(self, record: GpuRecord) -> Made:
        """The events of a record of these kinds."""
        process = self._processes.get(record.pid)
        if process is None:
            self._memory.use(PROCESS_BYTES)
            process = self._processes[record.pid] = _Process()
        return self._make[record.kind](process, record)

    def open_ranges(self) -> Iterator[_OpenRange]:
        """The ranges that are open."""
        for process in self._processes.values():
            yield from process.started.values()
            for ranges in process.pushed.values():
                yield from (opened for opened in ranges if opened is not None)

    def _mark(self, process: _Process, record: GpuRecord) -> Made:
        opened, _, args = _begun(process, record)
        yield _event(process, record, "I", opened) | args, None

    def _push(self, process: _Process, record: GpuRecord) -> Made:
        opened, depth, args = _begun(process, record)
        ranges = process.pushed.get((record.tid, opened.domain))
        if ranges is None:
            self._memory.use(ENTRY_BYTES)
            ranges = process.pushed[record.tid, opened.domain] = []
        depth = len(ranges) if depth == DEPTH_UNKNOWN else depth
        if depth >= _OPEN_MAX:
            raise Crowded
        yield from self._close(process, record, ranges, depth)
        self._memory.use(_size(opened.name))
        ranges += [None] * (depth - len(ranges))
        ranges.append(opened)
        yield _event(process, record, "B", opened) | args, opened

    def _pop(self, process: _Process, record: GpuRecord) -> Made:
        domain, depth = ENDED.unpack_from(record.payload)
        ranges = process.pushed.get((record.tid, domain), [])
        depth = len(ranges) - 1 if depth == DEPTH_UNKNOWN else depth
        if depth >= 0:
            yield from self._close(process, record, ranges, depth)

    def _close(
        self, process: _Process, record: GpuRecord, ranges: list[_OpenRange | None], depth: int
    ) -> Made:
        """End the open ranges of a thread beyond a depth."""
        while len(ranges) > depth:
            if (opened := ranges.pop()) is not None:
                self._memory.release(_size(opened.name))
                yield _event(process, record, "E", opened), opened

    def _start(self, process: _Process, record: GpuRecord) -> Made:
        opened, range_id, args = _begun(process, record)
        if range_id in process.started:
            raise Malformed
        if opened.domain not in process.free:
            self._memory.use(ENTRY_BYTES)
        free = process.free.setdefault(opened.domain, [0])
        if free[0] > RANGE_LIMIT:
            raise Crowded
        self._memory.use(_size(opened.name))
        opened.number = heapq.heappop(free)
        if not free:
            free.append(opened.number + 1)
        process.started[range_id] = opened
        yield _event(process, record, "B", opened) | args, opened

    def _end(self, process: _Process, record: GpuRecord) -> Made:
        _, range_id = ENDED.unpack_from(record.payload)
        opened = process.started.pop(range_id, None)
        if opened is not None and opened.number is not None:  # else its start was lost
            self._memory.release(_size(opened.name))
            # The domain is that of the start, whichever function ends the range.
            heapq.heappush(process.free[opened.domain], opened.number)
            yield _event(process, record, "E", opened), opened

    def _label(self, process: _Process, record: GpuRecord) -> Made:
        what, _, domain, number = LABEL.unpack_from(record.payload)
        name = _text(record.payload, LABEL.size)
        if what == Label.THREAD:
            if number > ID_LIMIT:
                raise Malformed
            event = _event(process, record, "I", _OpenRange("thread name", 0))
            yield event | {"tid": number, "comm": name, "args": {"thread": name}}, None
        elif what == Label.FORK:  # a child has its parent's handles, and its own threads and ranges
            for key, text in list(self._processes.get(number, process).texts.items()):
                self._memory.use(_size(text))
                process.texts[key] = text
        elif what in (Label.DOMAIN, Label.TEXT, Label.CATEGORY, Label.STACK):
            self._memory.use(_size(name))
            if what == Label.STACK:  # in one line, innermost first: `models/net.py:41 forward`
                frames = (line.rpartition("/") for line in name.splitlines())
                name = ", ".join(
                    f"{folder.rpartition('/')[2]}{slash}{rest}" for folder, slash, rest in frames
                )
            process.texts[what, domain if what == Label.CATEGORY else 0, number] = name
        else:
            raise Malformed


class _AnnotationKeeper(Keeper):
    """Keeps texts and domains, and the records of ranges that are open."""

    def __init__(self, memory: MemoryLimit, kinds: frozenset[int]) -> None:
        super().__init__(memory, kinds)
        self._events = _AnnotationEvents(memory)

    def carried(self) -> Carried:
        """Texts count as known; open ranges and names of threads, which become lines, as under way."""
        self._under_way[()] = [(one.began_ns, one.content) for one in self._events.open_ranges()]
        return super().carried()

    def add(self, record: GpuRecord) -> None:
        for event, opened in self._events.events_of(record):
            if opened is None:
                continue
            if event["phase"] == "E":
                self._memory.release(len(opened.content))
            else:
                content = record.content
                self._memory.use(len(content))
                opened.content = content
        if record.kind == AnnotationKind.LABEL and LABEL.unpack_from(record.payload)[0] == Label.THREAD:
            content, key = record.content, (record.pid, LABEL.unpack_from(record.payload)[3])
            self._memory.use(ENTRY_BYTES + len(content))
            self._under_way[key] = [(record.time_ns, content)]
        else:
            super().add(record)


@dataclass(eq=False)
class _AnnotationFinder(Finder):
    """Finds long ranges."""

    kind = NVTX

    def __post_init__(self) -> None:
        self._events = _AnnotationEvents(self.memory)

    def open_spans(self) -> Iterator[OpenSpan]:
        return self._events.open_ranges()

    def spans_in(self, record: GpuRecord) -> Iterator[Span]:
        if NVTX not in self.wanted.kinds:
            return
        for event, opened in self._events.events_of(record):
            if opened is not None and event["phase"] == "B":
                opened.limit_ns = self.wanted.limit_ns(opened.name, NVTX)
            elif opened is not None and opened.is_longer(record.time_ns):
                yield Span(opened.name, record.time_ns - opened.began_ns, NVTX)


class AnnotationDecoder(Decoder):
    """Makes lines of annotations."""

    kinds = frozenset(AnnotationKind)
    layers: ClassVar[Mapping[int, str]] = dict.fromkeys(kinds - {AnnotationKind.LABEL}, _LAYER)
    kept = frozenset({AnnotationKind.LABEL})
    keeper, finder = _AnnotationKeeper, _AnnotationFinder

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self._events = _AnnotationEvents(recording.memory)

    def add(self, lines: Lines, record: GpuRecord) -> None:
        start_ns = self._recording.resumed_ns
        for event, _ in self._events.events_of(record):
            if start_ns is not None:  # it began before the recording: its arguments state when
                began = {"began": "before the recording", "began_ns": event["ts_ns"]}
                args = {"args": event.get("args", {}) | began} if event["phase"] == "B" else {}
                event |= {"ts_ns": start_ns} | args
            lines.record(event)


def _begun(process: _Process, record: GpuRecord) -> tuple[_OpenRange, int, Event]:
    """The range that begins, its number or depth, and its arguments."""
    domain, registered, number, payload, kind, flags, color, category, stack = BEGUN.unpack_from(
        record.payload
    )
    if registered:
        lost = f"text {registered:#x}, which was lost"
        name = process.texts.get((Label.TEXT, 0, registered), lost)
    else:
        name = _text(record.payload, BEGUN.size)
    args: Event = {}
    if category:
        args["category"] = process.texts.get((Label.CATEGORY, domain, category), category)
    if kind in PAYLOADS:
        (value,) = PAYLOADS[kind].unpack_from(payload)
        args["payload"] = value if math.isfinite(value) else str(value)
    if flags & BEGAN_BEFORE:
        args["began"] = "before the window"
    if flags & HAS_COLOR:
        args["color"] = f"#{color & 0xFFFFFF:06x}"
    if (python := process.texts.get((Label.STACK, 0, stack))) is not None:
        args["python"] = python
    return (
        _OpenRange(name or "unnamed", record.time_ns, domain=domain),
        number,
        {"args": args} if args else {},
    )


def _event(process: _Process, record: GpuRecord, phase: str, of: _OpenRange) -> Event:
    event: Event = {"ts_ns": record.time_ns, "type": "annotation", "name": of.name, "phase": phase}
    event |= {"pid": record.pid, "tid": record.tid}
    if of.domain:
        event["domain"] = process.texts.get((Label.DOMAIN, 0, of.domain), f"domain {of.domain:#x}")
    if of.number is not None:
        event["range"] = of.number
    return event


def _text(payload: memoryview, start: int) -> str:
    return bytes(payload[start : start + NAME_BYTES_MAX]).decode(errors="ignore")


def _size(name: str) -> int:
    return ENTRY_BYTES + 2 * len(name)


class AnnotationStream(RecordStream):
    """The annotations of a command."""

    name = "nvtx"
    layers = frozenset({_LAYER})
    decoders = (AnnotationDecoder,)
    lost_layers = AnnotationDecoder.layers

    def __init__(self, library: Path) -> None:
        """`library` is the built native code."""
        self._library = library
        self.sees = {"nvtx": library}

    @classmethod
    def build(cls, toolchain: Toolchain) -> Path:
        """The library that the command loads, built if it is not in the cache. Raises CaptureUnavailable."""
        return toolchain.build_host(NATIVE / "annotations.cpp")

    def environment(self) -> dict[str, str]:
        return {NVTX_VARIABLE: str(self._library.absolute())}
