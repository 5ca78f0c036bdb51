"""Makes events of a program's NVTX annotations: ranges of threads, ranges of processes, marks.

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tracepipe.tracer.gpu.engines.annotation_records import (
    BEGAN_BEFORE,
    BEGUN,
    DEPTH_UNKNOWN,
    ENDED,
    HAS_COLOR,
    KIND_END,
    KIND_LABEL,
    KIND_MARK,
    KIND_POP,
    KIND_PUSH,
    KIND_START,
    LABEL,
    LABEL_CATEGORY,
    LABEL_DOMAIN,
    LABEL_FORK,
    LABEL_STACK,
    LABEL_TEXT,
    LABEL_THREAD,
    PAYLOADS,
)
from tracepipe.tracer.gpu.engines.transport import GpuRecord
from tracepipe.tracer.gpu.engines.untrusted import Crowded, Kept, Malformed
from tracepipe.tracer.records.bounds import ID_LIMIT, NAME_BYTES_MAX, RANGE_LIMIT

_OPEN_MAX: Final = 512
"""Nested ranges; a timeline draws no more."""
_PROCESS_BYTES: Final = 2048  # roughly, for each process that is kept
_ENTRY_BYTES: Final = 256

Event = dict[str, Any]


@dataclass(slots=True)
class _Numbers:
    """The numbers of a process's open ranges in a domain."""

    used: int = 0
    free: list[int] = field(default_factory=list)

    def take(self) -> int:
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


class AnnotationLines:
    """Makes events of records. Raises Malformed and Crowded."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._processes: dict[int, _Process] = {}
        self._make = {
            KIND_MARK: self._mark,
            KIND_PUSH: self._push,
            KIND_POP: self._pop,
            KIND_START: self._start,
            KIND_END: self._end,
            KIND_LABEL: self._label,
        }

    def events(self, record: GpuRecord) -> Iterator[Event]:
        """The events of a record of these kinds."""
        process = self._processes.get(record.pid)
        if process is None:
            self._kept.take(_PROCESS_BYTES)
            process = self._processes[record.pid] = _Process()
        return self._make[record.kind](process, record)

    def _mark(self, process: _Process, record: GpuRecord) -> Iterator[Event]:
        domain, _, name, args = _begun(process, record)
        yield _event(process, record, "I", name, domain) | args

    def _push(self, process: _Process, record: GpuRecord) -> Iterator[Event]:
        domain, depth, name, args = _begun(process, record)
        names = process.pushed.get((record.tid, domain))
        if names is None:
            self._kept.take(_ENTRY_BYTES)
            names = process.pushed[record.tid, domain] = []
        depth = len(names) if depth == DEPTH_UNKNOWN else depth
        if depth >= _OPEN_MAX:
            raise Crowded
        yield from self._close(process, record, names, depth, domain)
        self._kept.take(_size(name))
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
                self._kept.give(_size(name))
                yield _event(process, record, "E", name, domain)

    def _start(self, process: _Process, record: GpuRecord) -> Iterator[Event]:
        domain, range_id, name, args = _begun(process, record)
        if range_id in process.started:
            raise Malformed
        if domain not in process.numbers:
            self._kept.take(_ENTRY_BYTES)
            process.numbers[domain] = _Numbers()
        number = process.numbers[domain].take()
        self._kept.take(_size(name))
        process.started[range_id] = name, domain, number
        yield _event(process, record, "B", name, domain, number) | args

    def _end(self, process: _Process, record: GpuRecord) -> Iterator[Event]:
        _, range_id = ENDED.unpack_from(record.payload)
        if range_id not in process.started:  # its start was lost
            return
        # The domain is that of the start, whichever function ends the range.
        name, domain, number = process.started.pop(range_id)
        self._kept.give(_size(name))
        heapq.heappush(process.numbers[domain].free, number)
        yield _event(process, record, "E", name, domain, number)

    def _label(self, process: _Process, record: GpuRecord) -> Iterator[Event]:
        what, _, domain, number = LABEL.unpack_from(record.payload)
        name = _text(record.payload, LABEL.size)
        if what == LABEL_THREAD:
            if number > ID_LIMIT:
                raise Malformed
            named = {"tid": number, "comm": name}
            yield _event(process, record, "I", "thread name", 0) | named | {"args": {"thread": name}}
            return
        if what == LABEL_FORK:
            self._fork(process, number)
            return
        self._kept.take(_ENTRY_BYTES + 2 * len(name))
        if what == LABEL_DOMAIN:
            process.domains[number] = name
        elif what == LABEL_TEXT:
            process.texts[number] = name
        elif what == LABEL_STACK:
            process.stacks[number] = _shown_stack(name)
        elif what == LABEL_CATEGORY:
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
                self._kept.take(_size(name))
                own[key] = name


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
    return _ENTRY_BYTES + 2 * len(name)
