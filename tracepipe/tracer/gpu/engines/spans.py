"""Finds long calls, kernels and ranges in the records of the channel as they come."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tracepipe.tracer.gpu.engines import kernel_records as kernels
from tracepipe.tracer.gpu.engines import warp_records as warps
from tracepipe.tracer.gpu.engines.annotation_lines import AnnotationLines, Event
from tracepipe.tracer.gpu.engines.annotation_records import KINDS
from tracepipe.tracer.gpu.engines.transport import KIND_NAME, NAME, GpuRecord, read_name, records, text
from tracepipe.tracer.gpu.engines.untrusted import REFUSALS, Kept
from tracepipe.tracer.records.effects import OPEN_CALLS_MAX
from tracepipe.tracer.records.unrendered import CALL, KERNEL, NVTX, Span, Wanted

_ENTRY_BYTES: Final = 256
_VERSION: Final = re.compile(r"_v\d{4,5}$")  # CUPTI appends it to a runtime function: cudaMalloc_v3020
_MANY_NS: Final = 1 << 62


class ChannelSpans:
    """Finds nothing, for engines whose records have no durations."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._room = Kept()

    def take(self, chunk: bytes) -> Iterator[Span]:
        """What ended in a chunk and took longer than its limit."""
        for record in records(chunk):
            with suppress(*REFUSALS):  # they are counted when the records are rendered
                yield from self.found(record)

    def under_way(self, now_ns: int) -> Iterator[Span]:
        """Nothing, as these records do not show what is still open."""
        return iter(())

    def found(self, record: GpuRecord) -> Iterator[Span]:
        """What ended with a record. May raise one of REFUSALS."""
        return iter(())


class KernelsSpans(ChannelSpans):
    """Finds kernels and calls among the records of the engine `kernels`."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(wanted)
        self._kernels: dict[tuple[int, int], tuple[str, int]] = {}
        self._functions: dict[tuple[int, int, int], tuple[str, int]] = {}

    def found(self, record: GpuRecord) -> Iterator[Span]:
        """What ended with a record. May raise one of REFUSALS."""
        kind, pid, payload = record.kind, record.pid, record.payload
        if kind == KIND_NAME:
            number, name = read_name(payload)
            if (limit_ns := self._wanted.limit_ns(name, KERNEL)) is not None:
                self._room.take(_ENTRY_BYTES + len(name))
                self._kernels[pid, number] = name, limit_ns
        elif kind == kernels.KIND_CALL_NAME:
            domain, function = kernels.CALL_NAME.unpack_from(payload)
            name = _VERSION.sub("", text(payload, kernels.CALL_NAME.size))
            if (limit_ns := self._wanted.limit_ns(name, CALL)) is not None:
                self._room.take(_ENTRY_BYTES + len(name))
                self._functions[pid, domain, function] = name, limit_ns
        elif kind == kernels.KIND_KERNEL and self._kernels:
            for start_ns, end_ns, number, *_ in kernels.KERNEL.iter_unpack(payload):
                name, limit_ns = self._kernels.get((pid, number), ("", _MANY_NS))
                if end_ns - start_ns > limit_ns:
                    yield Span(name, end_ns - start_ns, KERNEL)
        elif kind == kernels.KIND_CALL and self._functions:
            for start_ns, end_ns, _, domain, function, *_ in kernels.CALL.iter_unpack(payload):
                name, limit_ns = self._functions.get((pid, domain, function), ("", _MANY_NS))
                if end_ns - start_ns > limit_ns:
                    yield Span(name, end_ns - start_ns)


class WarpsSpans(ChannelSpans):
    """Finds kernels and calls among the records of the engine `warps`, and calls that have not ended."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(wanted)
        self._names: dict[tuple[int, int], tuple[str, int | None, int | None]] = {}
        self._open: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        self._reported: set[tuple[int, int, int]] = set()

    def under_way(self, now_ns: int) -> Iterator[Span]:
        """Open calls that have already taken longer than their limit, each once."""
        for (pid, tid), calls in self._open.items():
            for name, began_ns, limit_ns in calls:
                key = pid, tid, began_ns
                if now_ns - began_ns > limit_ns and key not in self._reported:
                    self._reported.add(key)
                    yield Span(name, now_ns - began_ns, is_over=False)

    def found(self, record: GpuRecord) -> Iterator[Span]:
        """What ended with a record. May raise one of REFUSALS."""
        kind, pid, payload = record.kind, record.pid, record.payload
        if kind == KIND_NAME:
            number, name = read_name(payload)
            limits_ns = self._wanted.limit_ns(name, CALL), self._wanted.limit_ns(name, KERNEL)
            if limits_ns != (None, None):
                self._room.take(_ENTRY_BYTES + len(name))
                self._names[pid, number] = (name, *limits_ns)
        elif kind == warps.KIND_KERNEL:
            kernel = warps.read_kernel(payload)
            name, _, limit_ns = self._names.get((pid, kernel.name), ("", None, None))
            if limit_ns is not None and kernel.end_ns - kernel.start_ns > limit_ns:
                yield Span(name, kernel.end_ns - kernel.start_ns, KERNEL)
        elif kind in (warps.KIND_CALL_ENTER, warps.KIND_CALL_EXIT):
            (number,) = NAME.unpack_from(payload)
            name, limit_ns, _ = self._names.get((pid, number), ("", None, None))
            if limit_ns is not None:
                yield from self._turned(record, name, limit_ns)

    def _turned(self, record: GpuRecord, name: str, limit_ns: int) -> Iterator[Span]:
        """Take the entry or the return of a call that has a limit."""
        key = record.pid, record.tid
        if record.kind == warps.KIND_CALL_ENTER:
            if key not in self._open:
                self._room.take(_ENTRY_BYTES)
            calls = self._open.setdefault(key, [])
            del calls[: -OPEN_CALLS_MAX + 1]
            calls.append((name, record.time_ns, limit_ns))
        elif calls := self._open.get(key, []):
            _, began_ns, _ = calls.pop()
            self._reported.discard((*key, began_ns))
            if record.time_ns - began_ns > limit_ns:
                yield Span(name, record.time_ns - began_ns)


@dataclass(slots=True)
class _Range:
    """An open NVTX range; `limit_ns` is None if the range is not wanted."""

    name: str
    began_ns: int
    limit_ns: int | None
    is_reported: bool = False

    def lasts_longer(self, now_ns: int) -> bool:
        return self.limit_ns is not None and now_ns - self.began_ns > self.limit_ns


class RangesSpans(ChannelSpans):
    """Finds NVTX ranges, and what `device` finds among the other records."""

    def __init__(self, wanted: Wanted, device: ChannelSpans) -> None:
        super().__init__(wanted)
        self._device = device
        self._lines = AnnotationLines(self._room)
        self._open: dict[tuple[object, ...], list[_Range]] = {}

    def under_way(self, now_ns: int) -> Iterator[Span]:
        """Open ranges that have already taken longer than their limit, each once, and the device's."""
        yield from self._device.under_way(now_ns)
        for ranges in self._open.values():
            for one in ranges:
                if one.lasts_longer(now_ns) and not one.is_reported:
                    one.is_reported = True
                    yield Span(one.name, now_ns - one.began_ns, NVTX, is_over=False)

    def found(self, record: GpuRecord) -> Iterator[Span]:
        """What ended with a record. May raise one of REFUSALS."""
        if record.kind not in KINDS:
            yield from self._device.found(record)
        elif NVTX in self._wanted.kinds:
            for event in self._lines.events(record):
                yield from self._turned(event)

    def _turned(self, event: Event) -> Iterator[Span]:
        """Take the begin or the end of a range."""
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
