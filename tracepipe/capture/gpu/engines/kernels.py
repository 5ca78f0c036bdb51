"""The engine `kernels`: GPU kernels, copies and memsets with the API calls that asked for them, by CUPTI.

    channel ──▶ records ──▶ gpu_kernel X   launch, grid, block, stream
                            transfer X     HtoD, DtoH, …, memset: gpu, stream, size
                            userspace X    calls with their results; `launch` on those that started kernels
                            memory I       alloc, free, alloc_host, free_host: address, size, kind, call

`native/kernel_records.h` draws the records. Times are CLOCK_MONOTONIC: CUPTI is told to use it and converts
the GPU's own. A launch id is CUPTI's correlation number, with the number of the process above it.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tracepipe.capture.gpu.build.toolchain import NATIVE, Toolchain
from tracepipe.capture.gpu.engines.gpu_numbers import GpuNumbers, numbers_of
from tracepipe.capture.gpu.engines.transport import (
    CHANNEL_BYTES,
    INJECTION_VARIABLE,
    KIND_GPU,
    KIND_NAME,
    KIND_NOTE,
    Channel,
    GpuRecord,
    read_name,
    records,
    text,
)
from tracepipe.capture.records.line import Lines
from tracepipe.capture.records.loss import Loss

CALLS_VARIABLE: Final = "TRACEPIPE_GPU_CALLS"
CALLS: Final = ("all", "launches", "none")

KIND_HELLO: Final = 40
KIND_KERNEL: Final = 41
KIND_COPY: Final = 42
KIND_SET: Final = 43
KIND_CALL: Final = 44
KIND_CALL_NAME: Final = 45
KIND_ANY: Final = 46
KIND_MEMORY: Final = 47

HELLO: Final = struct.Struct("<IIQQQ")
KERNEL: Final = struct.Struct("<QQQQ4I3I3I3I5I")
COPY: Final = struct.Struct("<QQQQ6I4B4x")
SET: Final = struct.Struct("<QQQQ7I4x")
CALL: Final = struct.Struct("<QQ5I4x")
MEMORY: Final = struct.Struct("<QQQ6I")
_CALL_NAME: Final = struct.Struct("<II")

_LAYERS: Final = {
    KIND_KERNEL: "gpu_kernel",
    KIND_COPY: "transfer",
    KIND_SET: "transfer",
    KIND_CALL: "userspace",
    KIND_MEMORY: "memory",
}
_EVENT_BYTES: Final = {
    KIND_KERNEL: KERNEL.size,
    KIND_COPY: COPY.size,
    KIND_SET: SET.size,
    KIND_CALL: CALL.size,
    KIND_MEMORY: MEMORY.size,
}
# CUpti_ActivityMemcpyKind and …MemoryKind of cupti_activity.h.
_DIRECTIONS: Final = ("copy", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_MEMORIES: Final = ("", "pageable", "pinned", "device", "array", "managed", "device_static", "managed_static")
_RELEASE: Final = 2  # CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_RELEASE
_PINNED: Final = 2
_NO_STREAM: Final = 0xFFFFFFFF
_ALLOCATES: Final = re.compile(r"[Aa]lloc|Free")
_ALLOCATING_MAX: Final = 4096
_ASYNCHRONOUS: Final = 1  # CUPTI_ACTIVITY_FLAG_MEMCPY_ASYNC
_VERSION: Final = re.compile(r"_v\d{4,5}$")  # CUPTI's own ending of a runtime function: cudaMalloc_v3020
_DRIVER: Final = 1


@dataclass(slots=True)
class _Process:
    """What a traced process has told: names, functions, GPUs."""

    number: int
    names: dict[int, str] = field(default_factory=dict)
    functions: dict[tuple[int, int], tuple[str, bool, bool]] = field(default_factory=dict)
    allocating: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Correlation of a call that takes or gives back memory → its function and thread: the last ones."""
    gpus: dict[int, int] = field(default_factory=dict)
    is_realtime: bool = False

    def meet_allocation(self, correlation: int, name: str, tid: int) -> None:
        if len(self.allocating) >= _ALLOCATING_MAX:
            del self.allocating[next(iter(self.allocating))]
        self.allocating[correlation] = name, tid


class KernelsRenderer:
    """Lines of an event file from the channel's records; chunks in the order in which they were collected."""

    def __init__(self, gpus: Mapping[str, int] | None = None) -> None:
        """`gpus`: number of each GPU by UUID, as the header has them."""
        self.notes: list[str] = []
        """What the user should know, once each."""
        self.losses: dict[str, int] = {}
        self._processes: dict[int, _Process] = {}
        self._numbers = GpuNumbers(gpus)
        self._take: dict[int, Callable[[_Process, GpuRecord], list[dict[str, Any]]]] = {
            KIND_KERNEL: self._kernels,
            KIND_COPY: self._copies,
            KIND_SET: self._sets,
            KIND_CALL: self._calls,
            KIND_MEMORY: self._memory,
        }

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs met, as the header has them: index, name, uuid, sm_count."""
        return self._numbers.met

    def count(self, chunk: bytes) -> int:
        """Events in a chunk."""
        return sum(
            len(record.payload) // _EVENT_BYTES[record.kind]
            for record in records(chunk)
            if record.kind in _EVENT_BYTES
        )

    def render(self, chunk: bytes) -> Lines:
        """Lines of a chunk, in the order of their times."""
        whole = list(records(chunk))
        # A kernel comes before its name where that found no room at first.
        for record in whole:
            self._hear(record)
        events: list[dict[str, Any]] = []
        # The calls before the memory that they took.
        for record in sorted(whole, key=lambda record: record.kind == KIND_MEMORY):
            take = self._take.get(record.kind)
            if take:
                process = self._process(record.pid)
                made = take(process, record)
                if process.is_realtime:
                    for event in made:
                        event["clock"] = "realtime"
                events += made
        events.sort(key=lambda event: int(event["ts_ns"]))
        lines = Lines()
        for event in events:
            lines.record(event)
        return lines

    def _process(self, pid: int) -> _Process:
        process = self._processes.get(pid)
        if process is None:
            process = self._processes[pid] = _Process(len(self._processes))
        return process

    def _hear(self, record: GpuRecord) -> None:
        """Take what is no event."""
        kind, payload, process = record.kind, record.payload, self._process(record.pid)
        if kind == KIND_NAME:
            number, name = read_name(payload)
            process.names[number] = name
        elif kind == KIND_CALL_NAME:
            domain, function = _CALL_NAME.unpack_from(payload)
            name = _VERSION.sub("", text(payload, _CALL_NAME.size))
            process.functions[domain, function] = (name, "Launch" in name, bool(_ALLOCATES.search(name)))
        elif kind == KIND_GPU:
            index, number = self._numbers.meet(payload)
            process.gpus[index] = number
        elif kind == KIND_NOTE:
            note = text(payload)
            if note not in self.notes:
                self.notes.append(note)
        elif kind == KIND_HELLO:
            process.is_realtime = bool(HELLO.unpack(payload)[1])

    def _kernels(self, process: _Process, record: GpuRecord) -> list[dict[str, Any]]:
        return [self._kernel(process, record.pid, values) for values in KERNEL.iter_unpack(record.payload)]

    def _kernel(self, process: _Process, pid: int, values: tuple[int, ...]) -> dict[str, Any]:
        start_ns, end_ns, name, node, gpu, context, stream, correlation = values[:8]
        static_bytes, dynamic_bytes, registers, graph, is_device_launched = values[17:]
        args: dict[str, Any] = {"registers": registers, "shared_bytes": static_bytes + dynamic_bytes}
        if any(values[14:17]):
            args["cluster"] = values[14:17]
        if is_device_launched:
            args["launched_by"] = "device"
        return {
            "ts_ns": start_ns,
            "type": "gpu_kernel",
            "name": process.names.get(name, "kernel whose name was lost"),
            "phase": "X",
            "dur_ns": _span(start_ns, end_ns),
            "pid": pid,
            "gpu": process.gpus.get(gpu, gpu),
            "stream": stream,
            "launch": process.number << 32 | correlation,
            "grid": values[8:11],
            "block": values[11:14],
            "args": args | _where(context, graph, node),
        }

    def _copies(self, process: _Process, record: GpuRecord) -> list[dict[str, Any]]:
        events = []
        for values in COPY.iter_unpack(record.payload):
            start_ns, end_ns, size_bytes, node, gpu, context, stream, correlation, graph, to_gpu = values[:10]
            direction, from_kind, to_kind, flags = values[10:]
            args: dict[str, Any] = {"size": size_bytes, "correlation": process.number << 32 | correlation}
            args |= {"from": _at(_MEMORIES, from_kind), "to": _at(_MEMORIES, to_kind)}
            args["async"] = bool(flags & _ASYNCHRONOUS)
            if to_gpu != gpu:
                args["to_gpu"] = process.gpus.get(to_gpu, to_gpu)
            name = _at(_DIRECTIONS, direction) or "copy"
            args |= _where(context, graph, node)
            events.append(_transfer(process, record.pid, name, start_ns, end_ns, gpu, stream, args))
        return events

    def _sets(self, process: _Process, record: GpuRecord) -> list[dict[str, Any]]:
        events = []
        for values in SET.iter_unpack(record.payload):
            start_ns, end_ns, size_bytes, node, gpu, context, stream, correlation, graph, value, kind = values
            args: dict[str, Any] = {"size": size_bytes, "correlation": process.number << 32 | correlation}
            args |= {"value": value, "to": _at(_MEMORIES, kind)} | _where(context, graph, node)
            events.append(_transfer(process, record.pid, "set", start_ns, end_ns, gpu, stream, args))
        return events

    def _calls(self, process: _Process, record: GpuRecord) -> list[dict[str, Any]]:
        events, number, pid = [], process.number << 32, record.pid
        for start_ns, end_ns, domain, function, tid, correlation, result in CALL.iter_unpack(record.payload):
            name, is_launch, allocates = process.functions.get((domain, function), ("", False, False))
            # The driver's is the inner one, where both APIs' calls have the number.
            if allocates and (domain == _DRIVER or correlation not in process.allocating):
                process.meet_allocation(correlation, name, tid)
            event: dict[str, Any] = {
                "ts_ns": start_ns,
                "type": "userspace",
                "name": name or f"{'driver' if domain == _DRIVER else 'runtime'} function {function}",
                "phase": "X",
                "dur_ns": _span(start_ns, end_ns),
                "pid": pid,
                "tid": tid,
            }
            if is_launch:
                event["launch"] = number | correlation
            event["args"] = {"result": result}
            events.append(event)
        return events

    def _memory(self, process: _Process, record: GpuRecord) -> list[dict[str, Any]]:
        events = []
        for values in MEMORY.iter_unpack(record.payload):
            time_ns, size_bytes, address, gpu, context, stream, correlation, operation, kind = values
            name = ("free" if operation == _RELEASE else "alloc") + ("_host" if kind == _PINNED else "")
            call, tid = process.allocating.get(correlation, ("", 0))
            event: dict[str, Any] = {"ts_ns": time_ns, "type": "memory", "name": name, "phase": "I"}
            event |= {"pid": record.pid} | ({"tid": tid} if tid else {})
            event["gpu"] = process.gpus.get(gpu, gpu)
            if stream != _NO_STREAM:
                event["stream"] = stream
            args: dict[str, Any] = {"size": size_bytes} if size_bytes else {}
            args |= {"address": address, "kind": _at(_MEMORIES, kind), "context": context}
            args["correlation"] = process.number << 32 | correlation
            event["args"] = args | ({"call": call} if call else {})
            events.append(event)
        return events


def _transfer(
    process: _Process,
    pid: int,
    name: str,
    start_ns: int,
    end_ns: int,
    gpu: int,
    stream: int,
    args: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ts_ns": start_ns,
        "type": "transfer",
        "name": name,
        "phase": "X",
        "dur_ns": _span(start_ns, end_ns),
        "pid": pid,
        "gpu": process.gpus.get(gpu, gpu),
        "stream": stream,
        "args": args,
    }


def _span(start_ns: int, end_ns: int) -> int:
    """CUPTI leaves 0 where it does not know an end: what is interrupted has none."""
    return max(0, end_ns - start_ns)


def _where(context: int, graph: int, node: int) -> dict[str, int]:
    return {"context": context} | ({"graph": graph, "graph_node": node} if graph else {})


def _at(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else str(number)


class KernelsEngine:
    """A command's GPU work while it runs with `environment()`; nothing has to be attached to it."""

    name = "cupti"
    layers = frozenset({"userspace", "memory", "transfer", "gpu_kernel"})
    clocks: Sequence[str] = ("realtime",)
    """What its times can be on beside CLOCK_MONOTONIC: an older CUPTI has its own."""

    def __init__(
        self,
        library: Path,
        *,
        calls: str = "all",
        ring_bytes: int = CHANNEL_BYTES,
        owner: tuple[int, int] | None = None,
        gpus: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`calls`: which API calls are recorded, one of CALLS. `owner` (user, group): who the command runs
        as. `gpus`: those that there are, as a header has them. Raises CaptureUnavailable.
        """
        if calls not in CALLS:
            raise ValueError(calls)
        self._channel = Channel.create(ring_bytes, owner=owner)
        self._library, self._calls = library, calls
        self._lost_until_ns = time.monotonic_ns()
        self.gpus = gpus
        self._renderer = KernelsRenderer(numbers_of(gpus))

    def environment(self) -> dict[str, str]:
        """What the command's environment needs."""
        told = {INJECTION_VARIABLE: str(self._library), CALLS_VARIABLE: self._calls}
        return told | self._channel.environment()

    def collect(self, *, is_final: bool = False) -> bytes:
        """Whole records since the last call; never waits. `is_final`: the command has ended."""
        return self._channel.collect(is_final=is_final)

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        now_ns = time.monotonic_ns()
        since_ns, self._lost_until_ns = self._lost_until_ns, now_ns
        return [
            Loss(_LAYERS.get(kind), count, since_ns, now_ns, _reason(kind))
            for kind, count in self._channel.dropped().items()
        ]

    def renderer(self) -> KernelsRenderer:
        """The decoder of what `collect` gives."""
        return self._renderer

    def close(self) -> None:
        """Give the memory back."""
        self._channel.close()


def _reason(kind: int) -> str:
    return "CUPTI had no buffer" if kind == KIND_ANY else "GPU channel full"


def build_library(toolchain: Toolchain) -> Path:
    """The library that the command loads, built if it has to be. Raises CaptureUnavailable."""
    return toolchain.build_host("kernels", [NATIVE / "kernels.cpp"], ["cupti"])
