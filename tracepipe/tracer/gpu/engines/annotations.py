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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from tracepipe.tracer.gpu.build.toolchain import NATIVE, Toolchain
from tracepipe.tracer.gpu.engines.renderer import (
    Decoder,
    EvictedRecord,
    Finder,
    Keeper,
    MakeDecoder,
    Recording,
    WantedName,
)
from tracepipe.tracer.gpu.engines.streams import RecordStream
from tracepipe.tracer.gpu.engines.transport import (
    ENTRY_BYTES,
    NVTX_VARIABLE,
    PROCESS_BYTES,
    Crowded,
    GpuRecord,
    Malformed,
    MemoryLimit,
)
from tracepipe.tracer.records.bounds import ID_LIMIT, NAME_BYTES_MAX, RANGE_LIMIT
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.unrendered import NVTX, Carried, Span, Wanted

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
    """What a record of a label names."""

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


class AnnotationStream(RecordStream):
    """The annotations of a command."""

    name = "nvtx"
    layers = frozenset({_LAYER})
    lost_layers: Mapping[int, str] = dict.fromkeys(set(AnnotationKind) - {AnnotationKind.LABEL}, _LAYER)

    def __init__(self, library: Path) -> None:
        """`library` is the built native code."""
        self._library = library
        self.sees = {"nvtx": library}

    @classmethod
    def build(cls, toolchain: Toolchain) -> Path:
        """The library that the command loads, built if it is not in the cache. Raises CaptureUnavailable."""
        return toolchain.build_host("annotations", [NATIVE / "annotations.cpp"])

    @property
    def decoders(self) -> Sequence[MakeDecoder]:
        """That of annotations."""
        return (AnnotationDecoder,)

    def environment(self) -> dict[str, str]:
        """Variables for the command's environment."""
        return {NVTX_VARIABLE: str(self._library.absolute())}


@dataclass(slots=True)
class _Numbers:
    """The numbers of a process's open ranges in a domain."""

    used: int = 0
    free: list[int] = field(default_factory=list)

    def next(self) -> int:
        if self.free:
            return heapq.heappop(self.free)
        if self.used > RANGE_LIMIT:
            raise Crowded
        self.used += 1
        return self.used - 1


@dataclass(slots=True)
class _Process:
    """The state of a traced process: texts by handle, and open ranges."""

    domains: dict[int, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    categories: dict[tuple[int, int], str] = field(default_factory=dict)
    pushed: dict[tuple[int, int], list[str | None]] = field(default_factory=dict)
    """Names of the open ranges of a thread in a domain; None if the record was lost."""
    started: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """Id of an open range of the process → its name, domain and number."""
    numbers: dict[int, _Numbers] = field(default_factory=dict)


class AnnotationEvents:
    """Makes events of records. Raises Malformed and Crowded."""

    def __init__(self, memory: MemoryLimit) -> None:
        self._memory = memory
        self._processes: dict[int, _Process] = {}
        self._make: Mapping[int, Callable[[_Process, GpuRecord], Iterator[Event]]] = {
            AnnotationKind.MARK: self._mark,
            AnnotationKind.PUSH: self._push,
            AnnotationKind.POP: self._pop,
            AnnotationKind.START: self._start,
            AnnotationKind.END: self._end,
            AnnotationKind.LABEL: self._label,
        }

    def made(self, record: GpuRecord) -> Iterator[Event]:
        """The events of a record of these kinds."""
        process = self._processes.get(record.pid)
        if process is None:
            self._memory.use(PROCESS_BYTES)
            process = self._processes[record.pid] = _Process()
        return self._make[record.kind](process, record)

    def _mark(self, process: _Process, record: GpuRecord) -> Iterator[Event]:
        domain, _, name, args = _begun(process, record)
        yield _event(process, record, "I", name, domain) | args

    def _push(self, process: _Process, record: GpuRecord) -> Iterator[Event]:
        domain, depth, name, args = _begun(process, record)
        names = process.pushed.get((record.tid, domain))
        if names is None:
            self._memory.use(ENTRY_BYTES)
            names = process.pushed[record.tid, domain] = []
        depth = len(names) if depth == DEPTH_UNKNOWN else depth
        if depth >= _OPEN_MAX:
            raise Crowded
        yield from self._close(process, record, names, depth, domain)
        self._memory.use(_size(name))
        names += [None] * (depth - len(names))
        names.append(name)
        yield _event(process, record, "B", name, domain) | args

    def _pop(self, process: _Process, record: GpuRecord) -> Iterator[Event]:
        domain, depth = ENDED.unpack_from(record.payload)
        names = process.pushed.get((record.tid, domain), [])
        depth = len(names) - 1 if depth == DEPTH_UNKNOWN else depth
        if depth >= 0:
            yield from self._close(process, record, names, depth, domain)

    def _close(
        self, process: _Process, record: GpuRecord, names: list[str | None], depth: int, domain: int
    ) -> Iterator[Event]:
        """End the open ranges of a thread beyond a depth."""
        while len(names) > depth:
            name = names.pop()
            if name is not None:
                self._memory.release(_size(name))
                yield _event(process, record, "E", name, domain)

    def _start(self, process: _Process, record: GpuRecord) -> Iterator[Event]:
        domain, range_id, name, args = _begun(process, record)
        if range_id in process.started:
            raise Malformed
        if domain not in process.numbers:
            self._memory.use(ENTRY_BYTES)
            process.numbers[domain] = _Numbers()
        number = process.numbers[domain].next()
        self._memory.use(_size(name))
        process.started[range_id] = name, domain, number
        yield _event(process, record, "B", name, domain, number) | args

    def _end(self, process: _Process, record: GpuRecord) -> Iterator[Event]:
        _, range_id = ENDED.unpack_from(record.payload)
        if range_id not in process.started:  # its start was lost
            return
        # The domain is that of the start, whichever function ends the range.
        name, domain, number = process.started.pop(range_id)
        self._memory.release(_size(name))
        heapq.heappush(process.numbers[domain].free, number)
        yield _event(process, record, "E", name, domain, number)

    def _label(self, process: _Process, record: GpuRecord) -> Iterator[Event]:
        what, _, domain, number = LABEL.unpack_from(record.payload)
        name = _text(record.payload, LABEL.size)
        if what == Label.THREAD:
            if number > ID_LIMIT:
                raise Malformed
            named = {"tid": number, "comm": name}
            yield _event(process, record, "I", "thread name", 0) | named | {"args": {"thread": name}}
            return
        if what == Label.FORK:
            self._fork(process, number)
            return
        self._memory.use(ENTRY_BYTES + 2 * len(name))
        if what == Label.DOMAIN:
            process.domains[number] = name
        elif what == Label.TEXT:
            process.texts[number] = name
        elif what == Label.STACK:
            process.stacks[number] = _shown_stack(name)
        elif what == Label.CATEGORY:
            process.categories[domain, number] = name
        else:
            raise Malformed

    def _fork(self, process: _Process, parent_pid: int) -> None:
        """Copy the handles of a parent to its child, which has separate threads and ranges."""
        parent = self._processes.get(parent_pid, process)
        both: list[tuple[dict[Any, str], dict[Any, str]]] = [
            (process.domains, parent.domains),
            (process.texts, parent.texts),
            (process.stacks, parent.stacks),
            (process.categories, parent.categories),
        ]
        for own, known in both:
            for key, name in list(known.items()):
                self._memory.use(_size(name))
                own[key] = name


class AnnotationKeeper(Keeper):
    """Keeps texts and domains, and the ranges that are open."""

    kinds = frozenset({AnnotationKind.LABEL})

    def __init__(self, memory: MemoryLimit) -> None:
        super().__init__(memory)
        self._pushed: dict[tuple[int, int, int], list[EvictedRecord]] = {}
        self._started: dict[tuple[int, int], EvictedRecord] = {}
        self._threads: dict[tuple[int, int], EvictedRecord] = {}

    def carried(self) -> Carried:
        """Texts count as known; open ranges and names of threads, which become lines, as under way."""
        begun = [*self._started.values(), *self._threads.values()]
        begun += (evicted for some in self._pushed.values() for evicted in some)
        begun.sort(key=lambda evicted: evicted.time_ns)
        return Carried(super().carried().known, b"".join(evicted.content for evicted in begun))

    def add(self, record: GpuRecord, content: bytes) -> None:
        """Add an evicted record, with its bytes. May raise one of REFUSALS."""
        evicted, payload = EvictedRecord(record.time_ns, content), record.payload
        if record.kind == AnnotationKind.PUSH:
            domain, _, depth, *_ = BEGUN.unpack_from(payload)
            key = record.pid, record.tid, domain
            ranges = self._pushed.get(key, [])
            depth = len(ranges) if depth == DEPTH_UNKNOWN else depth
            if depth >= _OPEN_MAX:
                raise Crowded
            self._memory.use(ENTRY_BYTES + len(content))
            self._end_beyond(depth, ranges)
            ranges += [_LOST] * (depth - len(ranges))
            ranges.append(evicted)
            self._pushed[key] = ranges
        elif record.kind == AnnotationKind.POP:
            domain, depth = ENDED.unpack_from(payload)
            key = record.pid, record.tid, domain
            ranges = self._pushed.get(key, [])
            self._end_beyond(max(len(ranges) - 1, 0) if depth == DEPTH_UNKNOWN else depth, ranges)
            if not ranges:
                self._pushed.pop(key, None)
        elif record.kind == AnnotationKind.START:
            _, _, number, *_ = BEGUN.unpack_from(payload)
            self._memory.use(ENTRY_BYTES + len(content))
            self._started[record.pid, number] = evicted
        elif record.kind == AnnotationKind.END:
            _, number = ENDED.unpack_from(payload)
            if (ended := self._started.pop((record.pid, number), None)) is not None:
                self._memory.release(ENTRY_BYTES + len(ended.content))
        elif record.kind == AnnotationKind.LABEL and LABEL.unpack_from(payload)[0] == Label.THREAD:
            self._memory.use(ENTRY_BYTES + len(content))
            self._threads[record.pid, LABEL.unpack_from(payload)[3]] = evicted
        else:
            super().add(record, content)

    def _end_beyond(self, depth: int, ranges: list[EvictedRecord]) -> None:
        while len(ranges) > depth:
            if (ended := ranges.pop()) is not _LOST:
                self._memory.release(ENTRY_BYTES + len(ended.content))


_LOST: Final = EvictedRecord(0, b"")
"""Stands for a range whose record was lost."""


@dataclass(slots=True)
class _Range:
    """An open NVTX range; `limit_ns` is None if the range is not wanted."""

    name: str
    began_ns: int
    limit_ns: int | None
    is_reported: bool = False

    def lasts_longer(self, now_ns: int) -> bool:
        return self.limit_ns is not None and now_ns - self.began_ns > self.limit_ns


class AnnotationFinder(Finder):
    """Finds long ranges."""

    def __init__(
        self, wanted: Wanted, names: Mapping[tuple[int, int], WantedName], memory: MemoryLimit
    ) -> None:
        super().__init__(wanted, names, memory)
        self._events = AnnotationEvents(memory)
        self._open: dict[tuple[object, ...], list[_Range]] = {}

    def under_way(self, now_ns: int) -> Iterator[Span]:
        """Open ranges that have already taken longer than their limit, each once."""
        for ranges in self._open.values():
            for one in ranges:
                if one.lasts_longer(now_ns) and not one.is_reported:
                    one.is_reported = True
                    yield Span(one.name, now_ns - one.began_ns, NVTX, is_over=False)

    def found(self, record: GpuRecord) -> Iterator[Span]:
        """What ended with a record. May raise one of REFUSALS."""
        if NVTX not in self._wanted.kinds:
            return
        for event in self._events.made(record):
            name, ts_ns, domain = event["name"], event["ts_ns"], event.get("domain")
            # Ranges of a thread nest within a domain; a range of a process has its own number.
            key = (event["pid"], domain, event.get("range"), None if "range" in event else event["tid"])
            if event["phase"] == "B":
                limit_ns = self._wanted.limit_ns(name, NVTX)
                self._open.setdefault(key, []).append(_Range(name, ts_ns, limit_ns))
            elif event["phase"] == "E" and key in self._open:
                ended = self._open[key].pop()
                if not self._open[key]:
                    del self._open[key]
                if ended.lasts_longer(ts_ns):
                    yield Span(name, ts_ns - ended.began_ns, NVTX)


class AnnotationDecoder(Decoder):
    """Makes lines of annotations."""

    kinds = frozenset(AnnotationKind)
    keeper, finder = AnnotationKeeper, AnnotationFinder

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self._events = AnnotationEvents(recording.memory)

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """The layer of a record's events, and their number."""
        return _LAYER, record.kind != AnnotationKind.LABEL

    def add(self, lines: Lines, record: GpuRecord) -> None:
        """Add the events of a record. Raises one of REFUSALS."""
        start_ns = self._recording.resumed_ns
        for event in self._events.made(record):
            if start_ns is not None:  # it began before the recording: its arguments state when
                began = {"began": "before the recording", "began_ns": event["ts_ns"]}
                args = {"args": event.get("args", {}) | began} if event["phase"] == "B" else {}
                event |= {"ts_ns": start_ns} | args
            lines.record(event)


def _begun(process: _Process, record: GpuRecord) -> tuple[int, int, str, Event]:
    """Domain, number, name and arguments of what begins."""
    domain, registered, number, payload, kind, flags, color, category, stack = BEGUN.unpack_from(
        record.payload
    )
    if registered:
        name = process.texts.get(registered, f"text {registered:#x}, which was lost")
    else:
        name = _text(record.payload, BEGUN.size)
    args: Event = {}
    if category:
        args["category"] = process.categories.get((domain, category), category)
    if kind in PAYLOADS:
        (value,) = PAYLOADS[kind].unpack_from(payload)
        args["payload"] = value if math.isfinite(value) else str(value)
    if flags & BEGAN_BEFORE:
        args["began"] = "before the window"
    if flags & HAS_COLOR:
        args["color"] = f"#{color & 0xFFFFFF:06x}"
    if stack in process.stacks:
        args["python"] = process.stacks[stack]
    return domain, number, name or "unnamed", {"args": args} if args else {}


def _event(
    process: _Process, record: GpuRecord, phase: str, name: str, domain: int, number: int | None = None
) -> Event:
    event: Event = {"ts_ns": record.time_ns, "type": "annotation", "name": name, "phase": phase}
    event |= {"pid": record.pid, "tid": record.tid}
    if domain:
        event["domain"] = process.domains.get(domain, f"domain {domain:#x}")
    if number is not None:
        event["range"] = number
    return event


def _text(payload: memoryview, start: int) -> str:
    return bytes(payload[start : start + NAME_BYTES_MAX]).decode(errors="ignore")


def _shown_stack(lines: str) -> str:
    """Frames in one line, innermost first, each with its file and folder: `models/net.py:41 forward`."""
    frames = (line.rpartition("/") for line in lines.splitlines())
    return ", ".join(f"{folder.rpartition('/')[2]}{slash}{rest}" for folder, slash, rest in frames)


def _size(name: str) -> int:
    return ENTRY_BYTES + 2 * len(name)
