"""Keeps what later records of the channel need from records that a flight recorder evicts.

kernels       names of kernels, functions and stall reasons, stacks, GPUs, notes, and whether another
              profiler took over CUPTI
warps         names, stacks, GPUs, notes, each stream's first launch, which numbers it, and the last launch
              of a process; open calls, and the last clock pairs
annotations   texts and domains; open ranges
samples       nothing
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from tracepipe.tracer.gpu.engines import annotation_records as annotation
from tracepipe.tracer.gpu.engines import kernel_records as kernels
from tracepipe.tracer.gpu.engines import stall_records as stalls
from tracepipe.tracer.gpu.engines import warp_records as warps
from tracepipe.tracer.gpu.engines.python_stacks import STACK_KINDS
from tracepipe.tracer.gpu.engines.transport import (
    KIND_CLOCK,
    KIND_GPU,
    KIND_NAME,
    KIND_NOTE,
    KIND_SAMPLE,
    GpuRecord,
    records,
    whole_bytes,
)
from tracepipe.tracer.gpu.engines.untrusted import (
    KEPT_BYTES,
    REFUSALS,
    Crowded,
    Kept,
    can_be,
)
from tracepipe.tracer.records.effects import OPEN_CALLS_MAX
from tracepipe.tracer.records.unrendered import Carried

_ENTRY_BYTES: Final = 256  # roughly, for each entry besides its bytes
_RANGES_MAX: Final = 512  # nested ranges; the renderer takes no more
_CLOCK_PAIRS: Final = 2  # for each GPU: two define a line


class _Raw(NamedTuple):
    """The bytes of a record, and its time."""

    time_ns: int
    content: bytes


def raw_records(chunk: bytes) -> Iterator[tuple[GpuRecord, bytes]]:
    """The plausible records of a chunk, each with its bytes."""
    at = 0
    for record in records(chunk):
        end = at + whole_bytes(len(record.payload))
        if can_be(record):
            yield record, chunk[at:end]
        at = end


class ChannelCarry:
    """Carries records of some kinds, and of equal ones only the last."""

    whole: frozenset[int] = frozenset()
    """Kinds whose records are complete without earlier ones."""

    def __init__(self, kinds: frozenset[int]) -> None:
        self.kinds = kinds
        """Kinds that are kept as they are."""
        self._known: dict[tuple[int, int, bytes], bytes] = {}
        self._room = Kept(KEPT_BYTES)

    def take(self, chunk: bytes) -> None:
        """Take complete records that are evicted, in order."""
        for record, content in raw_records(chunk):
            with suppress(*REFUSALS):  # a decoder would keep nothing of such records either
                self.take_one(record, content)

    def divide(self, chunk: bytes, start_ns: int) -> tuple[bytes, bytes]:
        """The records of a chunk that precede an instant and depend on earlier ones, and the rest."""
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        at = 0
        for record in records(chunk):
            end = at + whole_bytes(len(record.payload))
            stays = record.time_ns >= start_ns or record.kind in self.whole
            parts[stays].append(chunk[at:end])
            at = end
        return b"".join(parts[0]), b"".join(parts[1])

    def carried(self) -> Carried:
        """What later records need now."""
        return Carried(b"".join(self._known.values()))

    def take_one(self, record: GpuRecord, content: bytes) -> None:
        """Take a record that is dropped, with its bytes. May raise one of REFUSALS."""
        if record.kind in self.kinds:
            self._keep(record, content, bytes(record.payload))

    def _keep(self, record: GpuRecord, content: bytes, identity: bytes) -> None:
        """Keep a record in place of an earlier one with the same identity."""
        key = record.kind, record.pid, identity
        if key not in self._known:
            self._room.take(_ENTRY_BYTES + len(content) + len(identity))
        self._known[key] = content


class KernelsCarry(ChannelCarry):
    """Carries records of the engine `kernels`, in which a record of finished work needs only names."""

    whole = frozenset(kernels.LAYERS) | stalls.WHOLE

    def __init__(self) -> None:
        super().__init__(
            frozenset(
                {KIND_NAME, *STACK_KINDS, KIND_GPU, KIND_NOTE, kernels.KIND_CALL_NAME, kernels.KIND_HELLO}
                | {stalls.KIND_STALL_REASON}
            )
        )
        self._taken: dict[int, bytes] = {}

    def carried(self) -> Carried:
        """That another profiler took over CUPTI in a process counts as under way, as it is a loss."""
        return Carried(super().carried().known, b"".join(self._taken.values()))

    def take_one(self, record: GpuRecord, content: bytes) -> None:
        """Take a record that is dropped, with its bytes. May raise one of REFUSALS."""
        if record.kind == kernels.KIND_TAKEN:
            self._taken[record.pid] = content
        else:
            super().take_one(record, content)


class WarpsCarry(ChannelCarry):
    """Carries records of the engine `warps`."""

    whole = frozenset({warps.KIND_WARPS, warps.KIND_KERNEL, warps.KIND_LOST_WARPS})

    def __init__(self) -> None:
        kept = (KIND_NAME, *STACK_KINDS, KIND_GPU, KIND_NOTE, warps.KIND_MET, warps.KIND_MET_CALLED)
        super().__init__(frozenset(kept))
        self._launches: dict[int, bytes] = {}
        self._calls: dict[int, list[_Raw]] = {}
        self._clocks: dict[tuple[int, int], list[_Raw]] = {}

    def carried(self) -> Carried:
        """Names and launches count as known; open calls and clock pairs, which are lines, as under way."""
        begun = [*self._calls.values(), *self._clocks.values()]
        ordered = sorted((raw for some in begun for raw in some), key=lambda raw: raw.time_ns)
        known = super().carried().known + b"".join(self._launches.values())
        return Carried(known, b"".join(raw.content for raw in ordered))

    def take_one(self, record: GpuRecord, content: bytes) -> None:
        """Take a record that is dropped, with its bytes. May raise one of REFUSALS."""
        raw = _Raw(record.time_ns, content)
        if record.kind == warps.KIND_CALL_ENTER:
            self._calls_of(record.tid).append(raw)
        elif record.kind == warps.KIND_CALL_EXIT:
            if self._calls_of(record.tid):
                self._calls[record.tid].pop()
        elif record.kind == warps.KIND_KERNEL:
            stream = warps.read_kernel(record.payload).stream
            if (record.kind, record.pid, stream.to_bytes(8, "little")) not in self._known:
                self._keep(record, content, stream.to_bytes(8, "little"))
            self._launches[record.pid] = content
        elif record.kind == KIND_CLOCK:
            (gpu, *_) = warps.CLOCK.unpack_from(record.payload)
            pairs = self._clocks.setdefault((record.pid, gpu), [])
            pairs.append(raw)
            del pairs[:-_CLOCK_PAIRS]
        else:
            super().take_one(record, content)

    def _calls_of(self, tid: int) -> list[_Raw]:
        calls = self._calls.get(tid)
        if calls is None:
            self._room.take(_ENTRY_BYTES)
            calls = self._calls[tid] = []
        del calls[: -OPEN_CALLS_MAX + 1]  # the returns of those were lost
        return calls


class AnnotationsCarry(ChannelCarry):
    """Carries records of annotations; `device` carries those of the GPU engine."""

    def __init__(self, device: ChannelCarry) -> None:
        super().__init__(frozenset({annotation.KIND_LABEL}))
        self._device, self.whole = device, device.whole
        self._pushed: dict[tuple[int, int, int], list[_Raw]] = {}
        self._started: dict[tuple[int, int], _Raw] = {}
        self._threads: dict[tuple[int, int], _Raw] = {}

    def carried(self) -> Carried:
        """Texts count as known; open ranges and names of threads, which become lines, as under way."""
        device = self._device.carried()
        begun = [*self._started.values(), *self._threads.values()]
        begun += (raw for some in self._pushed.values() for raw in some if raw is not _LOST)
        begun.sort(key=lambda raw: raw.time_ns)
        known = super().carried().known + device.known
        return Carried(known, b"".join(raw.content for raw in begun) + device.under_way)

    def take_one(self, record: GpuRecord, content: bytes) -> None:
        """Take a record that is dropped, with its bytes. May raise one of REFUSALS."""
        raw = _Raw(record.time_ns, content)
        if record.kind == annotation.KIND_PUSH:
            domain, _, depth, *_ = annotation.BEGUN.unpack_from(record.payload)
            self._push(record, domain, depth, raw)
        elif record.kind == annotation.KIND_POP:
            domain, depth = annotation.ENDED.unpack_from(record.payload)
            key = record.pid, record.tid, domain
            ranges = self._pushed.get(key, [])
            self._cut(ranges, max(len(ranges) - 1, 0) if depth == annotation.DEPTH_UNKNOWN else depth)
            if not ranges:
                self._pushed.pop(key, None)
        elif record.kind == annotation.KIND_START:
            _, _, number, *_ = annotation.BEGUN.unpack_from(record.payload)
            self._room.take(_ENTRY_BYTES + len(content))
            self._started[record.pid, number] = raw
        elif record.kind == annotation.KIND_END:
            _, number = annotation.ENDED.unpack_from(record.payload)
            if (ended := self._started.pop((record.pid, number), None)) is not None:
                self._give(ended)
        elif record.kind == annotation.KIND_LABEL and _is_of_thread(record):
            self._room.take(_ENTRY_BYTES + len(content))
            number = annotation.LABEL.unpack_from(record.payload)[3]
            self._threads[record.pid, number] = raw
        elif record.kind in annotation.KINDS:
            super().take_one(record, content)
        else:
            self._device.take_one(record, content)

    def _push(self, record: GpuRecord, domain: int, depth: int, raw: _Raw) -> None:
        """Keep a range that is nested in `depth` others of its thread in the domain."""
        key = record.pid, record.tid, domain
        ranges = self._pushed.get(key, [])
        depth = len(ranges) if depth == annotation.DEPTH_UNKNOWN else depth
        if depth >= _RANGES_MAX:
            raise Crowded
        self._room.take(_ENTRY_BYTES + len(raw.content))
        self._cut(ranges, depth)
        ranges += [_LOST] * (depth - len(ranges))
        ranges.append(raw)
        self._pushed[key] = ranges

    def _cut(self, ranges: list[_Raw], depth: int) -> None:
        while len(ranges) > depth:
            self._give(ranges.pop())

    def _give(self, raw: _Raw) -> None:
        if raw is not _LOST:
            self._room.give(_ENTRY_BYTES + len(raw.content))


class SamplesCarry(ChannelCarry):
    """Carries records of the GPU engine with `device`; no sample is needed later."""

    def __init__(self, device: ChannelCarry) -> None:
        super().__init__(frozenset())
        self._device, self.whole = device, device.whole

    def carried(self) -> Carried:
        """What later records need of the others."""
        return self._device.carried()

    def take_one(self, record: GpuRecord, content: bytes) -> None:
        """Take a record that is dropped, with its bytes. May raise one of REFUSALS."""
        if record.kind != KIND_SAMPLE:
            self._device.take_one(record, content)


_LOST: Final = _Raw(0, b"")
"""Stands for a range whose record was lost."""


def _is_of_thread(record: GpuRecord) -> bool:
    return bool(annotation.LABEL.unpack_from(record.payload)[0] == annotation.LABEL_THREAD)
