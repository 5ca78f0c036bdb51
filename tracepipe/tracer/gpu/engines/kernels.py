"""The engine `kernels`: GPU kernels, copies and memsets with the API calls that requested them, from CUPTI.

The CUDA driver loads the library into the command (`native/kernels.cpp` describes how it works); the capture
process has the channel, and makes lines of its records:

    gpu_kernel X   launch, grid, block, stream
    transfer X     HtoD, DtoH, …, memset: gpu, stream, size, launch
    userspace X    calls with their results, launches also with sizes; `launch` where they request work,
                   `stack` where Python made them
    memory I       alloc, free, alloc_host, free_host: address, size, kind, call
    gpu_stall      where stall reasons are sampled: stall_lines.py

`native/kernel_records.h` describes the records. Times are CLOCK_MONOTONIC: CUPTI converts the GPU's times to
it. A launch id is CUPTI's correlation number, with the process's number in the upper bits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from tracepipe.errors import CaptureUnavailable
from tracepipe.kernel_names import short_kernel_name
from tracepipe.tracer.gpu.build.toolchain import NATIVE, Toolchain
from tracepipe.tracer.gpu.choice import CALLS_VARIABLE, calls_text
from tracepipe.tracer.gpu.engines import stall_records
from tracepipe.tracer.gpu.engines.carries import KernelsCarry
from tracepipe.tracer.gpu.engines.channel import CHANNEL_BYTES
from tracepipe.tracer.gpu.engines.channel_engine import ChannelEngine
from tracepipe.tracer.gpu.engines.channel_renderer import ChannelRenderer
from tracepipe.tracer.gpu.engines.gpu_numbers import numbers_of
from tracepipe.tracer.gpu.engines.kernel_records import (
    CALL,
    CALL_NAME,
    COPY,
    DIRECTIONS,
    HELLO,
    KERNEL,
    KIND_ANY,
    KIND_CALL,
    KIND_CALL_NAME,
    KIND_COPY,
    KIND_HELLO,
    KIND_KERNEL,
    KIND_MEMORY,
    KIND_SET,
    KIND_TAKEN,
    LAYERS,
    MEMORIES,
    MEMORY,
    SET,
    TAKEN,
)
from tracepipe.tracer.gpu.engines.python_stacks import STACK_KINDS
from tracepipe.tracer.gpu.engines.spans import KernelsSpans
from tracepipe.tracer.gpu.engines.stall_lines import StallLines
from tracepipe.tracer.gpu.engines.transport import (
    INJECTION_VARIABLE,
    KIND_GPU,
    KIND_NAME,
    KIND_NOTE,
    GpuRecord,
    note,
    read_name,
    text,
)
from tracepipe.tracer.gpu.engines.untrusted import REFUSALS, Malformed, add_loss, check_span
from tracepipe.tracer.gpu.sampling_lock import SamplingLock
from tracepipe.tracer.records.bounds import ID_LIMIT, INDEX_LIMIT
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.unrendered import Wanted
from tracepipe.units import counted

_ALLOCATES: Final = re.compile(r"[Aa]lloc|Free")
_COPIES: Final = re.compile(r"(?:cu|cuda)Mem(?:cpy|set)")
_ALLOCATING_MAX: Final = 4096
_VERSION: Final = re.compile(r"_v\d{4,5}$")  # CUPTI appends it to a runtime function: cudaMalloc_v3020


class Function(NamedTuple):
    """A CUDA function; whether it launches kernels, copies or sets memory, allocates or frees it."""

    name: str = ""
    is_launch: bool = False
    copies: bool = False
    allocates: bool = False


def function_of(text: str) -> Function:
    """The function of a name in CUPTI, with what it does."""
    name = _VERSION.sub("", text)
    return Function(name, "Launch" in name, bool(_COPIES.match(name)), bool(_ALLOCATES.search(name)))


KEPT_MAX: Final = 1 << 16
"""The number of launches, and of kernels, that are remembered; the oldest are forgotten first."""
_LAUNCHES: Final = re.compile(r"(?:cu|cuda)(?:Graph)?Launch(?!HostFunc)")
_BEGINS_CAPTURE: Final = re.compile(r"(?:cu|cuda)StreamBeginCapture")
_ENDS_CAPTURE: Final = re.compile(r"(?:cu|cuda)StreamEndCapture")


class Launches:
    """Matches a process's launches with kernels by the number that they share, to count those without one
    after another profiler takes CUPTI.

    A launch's call and its kernels come in any order, and the calls of both APIs have the launch's number. A
    launch into a stream that is being captured has no kernel, and neither has a call that failed.
    """

    __slots__ = ("_capturing", "_ran", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, None] = {}
        self._ran: dict[int, None] = {}
        self._capturing = 0

    def call(self, name: str, correlation: int, *, failed: bool) -> None:
        """A call of the process has returned."""
        if failed:
            return
        if _LAUNCHES.match(name):
            if correlation not in self._ran and not self._capturing:
                _keep(self._waiting, correlation)
        elif _BEGINS_CAPTURE.match(name):
            self._capturing += name.startswith("cuS")  # the runtime's calls have the driver's in them
        elif _ENDS_CAPTURE.match(name):
            self._capturing = max(0, self._capturing - name.startswith("cuS"))

    def kernel(self, correlation: int) -> None:
        """A kernel that a launch with this number started."""
        self._waiting.pop(correlation, None)
        _keep(self._ran, correlation)

    def take_waiting(self) -> int:
        """Return the number of launches without a kernel, and forget them."""
        count = len(self._waiting)
        self._waiting.clear()
        return count


def _keep(numbers: dict[int, None], number: int) -> None:
    if len(numbers) >= KEPT_MAX:
        del numbers[next(iter(numbers))]
    numbers[number] = None


WAIT_NS: Final = 1_000_000_000
"""If a kernel is queued or runs for longer, its call has no arguments."""
HELD_MAX: Final = 1 << 14
KNOWN_MAX: Final = 1 << 12
"""Kernels that are remembered for calls that come later, or calls of the other API."""
_OF_ONE_KERNEL: Final = re.compile(r"(?:__)?(?:cu|cuda)Launch(?!HostFunc)")

Event = dict[str, Any]


class LaunchArguments:
    """Takes the arguments of a process's launch calls from the kernels that they started, as CUPTI reports
    none for calls.

    A call and its kernel have the same number and come in any order, the kernel when it has run. So the event
    of a call waits for the kernel for a while.
    """

    __slots__ = ("_held", "_known")

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, list[Event]]] = {}
        """Number of the launch → until when its calls wait, and the calls; in order of arrival."""
        self._known: dict[int, dict[str, Any]] = {}

    def call(self, correlation: int, event: Event, now_ns: int) -> Iterator[Event]:
        """Take a call, and return the events that are complete now."""
        result = event["args"]["result"]
        if result or not _OF_ONE_KERNEL.match(event["name"]):
            yield event
        elif correlation in self._known:
            event["args"] = self._known[correlation]
            yield event
        else:
            if correlation not in self._held and len(self._held) >= HELD_MAX:
                yield from self._held.pop(next(iter(self._held)))[1]
            self._held.setdefault(correlation, (now_ns + WAIT_NS, []))[1].append(event)

    def kernel(self, correlation: int, args: dict[str, Any]) -> list[Event]:
        """Take a kernel with its launch's arguments, and return the calls that are complete now."""
        if len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[correlation] = args
        _, calls = self._held.pop(correlation, (0, []))
        for call in calls:
            call["args"] = args
        return calls

    def late(self, now_ns: int | None = None) -> list[Event]:
        """The calls that have waited long enough, or all; they have no arguments."""
        late: list[Event] = []
        while self._held:
            correlation, (until_ns, calls) = next(iter(self._held.items()))
            if now_ns is not None and now_ns < until_ns:
                break
            late += calls
            del self._held[correlation]
        return late


@dataclass(slots=True)
class Process:
    """The state of a traced process: names, functions, GPUs, launches."""

    number: int
    names: dict[int, str] = field(default_factory=dict)
    stall_reasons: dict[int, str] = field(default_factory=dict)
    functions: dict[tuple[int, int], Function] = field(default_factory=dict)
    allocating: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Correlation of a call that allocates or frees memory → its function and thread; the last calls only."""
    gpus: dict[int, int] = field(default_factory=dict)
    launches: Launches = field(default_factory=Launches)
    arguments: LaunchArguments = field(default_factory=LaunchArguments)
    now_ns: int = 0
    """The latest time of its records."""
    is_realtime: bool = False

    def add_allocation(self, correlation: int, name: str, tid: int) -> None:
        if len(self.allocating) >= _ALLOCATING_MAX:
            del self.allocating[next(iter(self.allocating))]
        self.allocating[correlation] = name, tid


_EVENT_BYTES: Final = {
    KIND_KERNEL: KERNEL.size,
    KIND_COPY: COPY.size,
    KIND_SET: SET.size,
    KIND_CALL: CALL.size,
    KIND_MEMORY: MEMORY.size,
}
_RELEASE: Final = 2  # CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_RELEASE
_PINNED: Final = 2
_NO_STREAM: Final = 0xFFFFFFFF
_PROCESS_BYTES: Final = 2048  # roughly, for each process that is kept
_NAME_BYTES: Final = 256
_ASYNCHRONOUS: Final = 1  # CUPTI_ACTIVITY_FLAG_MEMCPY_ASYNC
_DRIVER: Final = 1


class KernelsRenderer(ChannelRenderer):
    """Lines of an event file from the channel's records."""

    def __init__(self, gpus: Mapping[str, int] | None = None) -> None:
        """`gpus`: UUID → number, as in the header."""
        super().__init__(gpus)
        self._processes: dict[int, Process] = {}
        self._short: dict[str, str] = {}
        self._unended: Counter[tuple[int, str]] = Counter()
        self._stalls = StallLines(self._kept, self._losses)
        self._take: dict[int, Callable[[Process, GpuRecord], list[dict[str, Any]]]] = {
            KIND_KERNEL: self._kernels,
            KIND_COPY: self._copies,
            KIND_SET: self._sets,
            KIND_CALL: self._calls,
            KIND_MEMORY: self._memory,
        }

    @property
    def stall_samples(self) -> int:
        """Samples of what warps wait for, which are not counted as events."""
        return self._stalls.samples

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """The layer of a record's events, and their number."""
        size_bytes = _EVENT_BYTES.get(record.kind)
        return (LAYERS[record.kind], len(record.payload) // size_bytes) if size_bytes else ("", 0)

    def spans(self, wanted: Wanted) -> KernelsSpans:
        """A finder of long calls and kernels among such records."""
        return KernelsSpans(wanted)

    def anew(self) -> KernelsRenderer:
        """A renderer like this one that has taken nothing."""
        return KernelsRenderer(self._gpus)

    def carry(self) -> KernelsCarry:
        """A keeper of what such a renderer needs from evicted records."""
        return KernelsCarry()

    def _rendered(self, some: Iterable[GpuRecord]) -> Lines:
        """Lines of a chunk's records, in the order of their times."""
        events: list[dict[str, Any]] = []
        whole: list[GpuRecord] = []
        lines = Lines()
        # A kernel comes before its name if the name found no room at first, and memory before its call.
        for record in some:
            if self._each(record, self._note_state) is not None:
                whole.append(record)
        for record in sorted(whole, key=lambda record: record.kind == KIND_MEMORY):
            events += self._each(record, self._made) or ()
        for process in self._processes.values():
            events += _clocked(process, process.arguments.late(process.now_ns))
        events += self._taken_over(whole)
        events += self._lost_unended(max((record.time_ns for record in whole), default=0))
        for stack in self._stacks.take_new():
            lines.record(stack)
        _add(lines, events)
        return lines

    def last(self) -> Lines:
        """Lines of calls whose kernels have not come."""
        lines = Lines()
        processes = self._processes.values()
        _add(lines, [event for process in processes for event in _clocked(process, process.arguments.late())])
        return lines

    def _each(
        self, record: GpuRecord, take: Callable[[Process, GpuRecord], list[dict[str, Any]]]
    ) -> list[dict[str, Any]] | None:
        """The events that `take` makes of a record; None if it is refused."""
        try:
            return take(self._process(record.pid), record)
        except REFUSALS as refusal:
            self._refused.take(refusal)
            return None

    def _made(self, process: Process, record: GpuRecord) -> list[dict[str, Any]]:
        """The events of a record."""
        if record.kind in stall_records.WHOLE:
            return self._stalls.take(process, record)
        take = self._take.get(record.kind)
        process.now_ns = max(process.now_ns, record.time_ns)
        made = take(process, record) if take else []
        # CUPTI has no times for work that had not ended when its records were requested.
        events = [event for event in made if event["ts_ns"]]
        if len(events) < len(made):
            self._unended[record.pid, LAYERS[record.kind]] += len(made) - len(events)
        return _clocked(process, events)

    def _process(self, pid: int) -> Process:
        process = self._processes.get(pid)
        if process is None:
            self._kept.take(_PROCESS_BYTES)
            process = self._processes[pid] = Process(len(self._processes))
        return process

    def _note_state(self, process: Process, record: GpuRecord) -> list[dict[str, Any]]:
        """Take a record that is not an event."""
        kind, payload = record.kind, record.payload
        if kind == KIND_NAME:
            number, name = read_name(payload)
            self._kept.take(_NAME_BYTES + len(name))
            process.names[number] = name
        elif kind == KIND_CALL_NAME:
            domain, function = CALL_NAME.unpack_from(payload)
            named = function_of(text(payload, CALL_NAME.size))
            self._kept.take(_NAME_BYTES + len(named.name))
            process.functions[domain, function] = named
        elif kind in STACK_KINDS:
            self._stacks.take(record)
        elif kind == stall_records.KIND_STALL_REASON:
            self._stalls.take_name(process, record)
        elif kind == KIND_GPU:
            index, number = self._numbers.add(payload)
            self._kept.take(_NAME_BYTES)
            process.gpus[index] = number
        elif kind == KIND_NOTE:
            self._note(note(payload))
        elif kind == KIND_HELLO:
            process.is_realtime = bool(HELLO.unpack_from(payload)[1])
        elif kind == KIND_TAKEN:
            check_span(*TAKEN.unpack_from(payload))
        elif kind not in self._take and kind not in stall_records.WHOLE:
            raise Malformed
        return []

    def _note(self, words: str) -> None:
        if words not in self._notes:
            self._kept.take(_NAME_BYTES + len(words))
            self._notes.append(words)

    def _taken_over(self, whole: list[GpuRecord]) -> list[dict[str, Any]]:
        """The losses of processes in which another profiler has taken over CUPTI."""
        losses = []
        for record in whole:
            if record.kind != KIND_TAKEN:
                continue
            until_ns, noticed_ns = TAKEN.unpack_from(record.payload)
            count = self._process(record.pid).launches.take_waiting()
            which = counted(count, "launch|launches and all later ones") if count else "later launches"
            reason = f"another profiler took over CUPTI in process {record.pid}: kernels of {which} are lost"
            self._note(f"{reason}; run the program without that profiler to record them")
            # At least 1, as something was lost even if no launch is known.
            add_loss(self._losses, "gpu_kernel", max(count, 1))
            loss = {"type": "loss", "layer": "gpu_kernel", "count": max(count, 1), "reason": reason}
            until_ns = max(until_ns, self._resumed_ns or 0)
            losses.append({"ts_ns": until_ns, "dur_ns": max(0, noticed_ns - until_ns)} | loss)
        return losses

    def _lost_unended(self, now_ns: int) -> list[dict[str, Any]]:
        """The losses of GPU work that had not ended when the recording did."""
        losses = []
        for (pid, layer), count in self._unended.items():
            add_loss(self._losses, layer, count)
            reason = f"process {pid}: {count} had not ended when the recording did"
            losses.append({"ts_ns": now_ns, "type": "loss", "layer": layer, "count": count, "reason": reason})
        self._unended.clear()
        return losses

    def _kernels(self, process: Process, record: GpuRecord) -> list[dict[str, Any]]:
        some = list(KERNEL.iter_unpack(record.payload))
        events = [self._kernel(process, record.pid, values) for values in some]
        for values, kernel in zip(some, tuple(events), strict=True):
            events += process.arguments.kernel(values[7], self._launched(kernel, values[18]))
        return events

    def _launched(self, kernel: dict[str, Any], shared_bytes: int) -> dict[str, Any]:
        """The arguments of a kernel's launch, in the form that other engines give its call."""
        name = kernel["name"]
        short = self._short.get(name)
        if short is None:
            self._kept.take(_NAME_BYTES + 2 * len(name))
            short = self._short[name] = short_kernel_name(name)
        launched = {what: kernel[what] for what in ("grid", "block")}
        return launched | {"shared_bytes": shared_bytes, "stream": kernel["stream"], "kernel": short}

    def _kernel(self, process: Process, pid: int, values: tuple[int, ...]) -> dict[str, Any]:
        start_ns, end_ns, name, node, gpu, context, stream, correlation = values[:8]
        static_bytes, dynamic_bytes, registers, graph, is_device_launched, *limits = values[17:]
        configured_bytes, clusters = limits
        check_span(start_ns, end_ns)
        if max(values[11:14]) > INDEX_LIMIT:
            raise Malformed
        process.launches.kernel(correlation)
        args: dict[str, Any] = {"registers": registers, "shared_bytes": static_bytes + dynamic_bytes}
        if configured_bytes:
            args["shared_config_bytes"] = configured_bytes
        if any(values[14:17]):
            args["cluster"] = values[14:17]
            args |= {"max_active_clusters": clusters} if clusters else {}
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

    def _copies(self, process: Process, record: GpuRecord) -> list[dict[str, Any]]:
        events = []
        for values in COPY.iter_unpack(record.payload):
            start_ns, end_ns, size_bytes, node, gpu, context, stream, correlation, graph, to_gpu = values[:10]
            direction, from_kind, to_kind, flags = values[10:]
            check_span(start_ns, end_ns)
            args: dict[str, Any] = {"size": size_bytes, "correlation": process.number << 32 | correlation}
            args |= {"from": _at(MEMORIES, from_kind), "to": _at(MEMORIES, to_kind)}
            args["async"] = bool(flags & _ASYNCHRONOUS)
            if to_gpu != gpu:
                args["to_gpu"] = process.gpus.get(to_gpu, to_gpu)
            name = _at(DIRECTIONS, direction) or "copy"
            args |= _where(context, graph, node)
            events.append(_transfer(process, record.pid, name, (start_ns, end_ns), (gpu, stream), args))
        return events

    def _sets(self, process: Process, record: GpuRecord) -> list[dict[str, Any]]:
        events = []
        for values in SET.iter_unpack(record.payload):
            start_ns, end_ns, size_bytes, node, gpu, context, stream, correlation, graph, value, kind = values
            check_span(start_ns, end_ns)
            args: dict[str, Any] = {"size": size_bytes, "correlation": process.number << 32 | correlation}
            args |= {"value": value, "to": _at(MEMORIES, kind)} | _where(context, graph, node)
            events.append(_transfer(process, record.pid, "set", (start_ns, end_ns), (gpu, stream), args))
        return events

    def _calls(self, process: Process, record: GpuRecord) -> list[dict[str, Any]]:
        number, pid = process.number << 32, record.pid
        events: list[dict[str, Any]] = []
        for start_ns, end_ns, stack, domain, function, tid, correlation, result in CALL.iter_unpack(
            record.payload
        ):
            check_span(start_ns, end_ns)
            if tid > ID_LIMIT:
                raise Malformed
            name, is_launch, copies, allocates = process.functions.get((domain, function), Function())
            # If calls of both APIs have the number, the driver's is the inner one.
            if allocates and (domain == _DRIVER or correlation not in process.allocating):
                process.add_allocation(correlation, name, tid)
            if is_launch or "Capture" in name:
                process.launches.call(name, correlation, failed=result != 0)
            event: dict[str, Any] = {
                "ts_ns": start_ns,
                "type": "userspace",
                "name": name or f"{'driver' if domain == _DRIVER else 'runtime'} function {function}",
                "phase": "X",
                "dur_ns": _span(start_ns, end_ns),
                "pid": pid,
                "tid": tid,
            }
            if is_launch or copies:
                event["launch"] = number | correlation
            if (made_at := self._stacks.id_of(pid, stack)) is not None:
                event["stack"] = made_at
            event["args"] = {"result": result}
            if is_launch:
                events += process.arguments.call(correlation, event, record.time_ns)
            else:
                events.append(event)
        return events

    def _memory(self, process: Process, record: GpuRecord) -> list[dict[str, Any]]:
        events = []
        for values in MEMORY.iter_unpack(record.payload):
            time_ns, size_bytes, address, gpu, context, stream, correlation, operation, kind = values
            check_span(time_ns, time_ns)
            name = ("free" if operation == _RELEASE else "alloc") + ("_host" if kind == _PINNED else "")
            call, tid = process.allocating.get(correlation, ("", 0))
            event: dict[str, Any] = {"ts_ns": time_ns, "type": "memory", "name": name, "phase": "I"}
            event |= {"pid": record.pid} | ({"tid": tid} if tid else {})
            event["gpu"] = process.gpus.get(gpu, gpu)
            if stream != _NO_STREAM:
                event["stream"] = stream
            args: dict[str, Any] = {"size": size_bytes} if size_bytes else {}
            args |= {"address": address, "kind": _at(MEMORIES, kind), "context": context}
            args["correlation"] = process.number << 32 | correlation
            event["args"] = args | ({"call": call} if call else {})
            events.append(event)
        return events


def _clocked(process: Process, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events, with the clock of their times if that is not the recording's."""
    if process.is_realtime:
        for event in events:
            event["clock"] = "realtime"
    return events


def _add(lines: Lines, events: list[dict[str, Any]]) -> None:
    """Add events in the order of their times."""
    events.sort(key=lambda event: int(event["ts_ns"]))
    for event in events:
        lines.record(event)


def _transfer(
    process: Process,
    pid: int,
    name: str,
    times_ns: tuple[int, int],
    where: tuple[int, int],
    args: dict[str, Any],
) -> dict[str, Any]:
    """A copy or set on the stream `where[1]` of the GPU `where[0]`, from one time to another."""
    (start_ns, end_ns), (gpu, stream) = times_ns, where
    return {
        "ts_ns": start_ns,
        "type": "transfer",
        "name": name,
        "phase": "X",
        "dur_ns": _span(start_ns, end_ns),
        "pid": pid,
        "gpu": process.gpus.get(gpu, gpu),
        "stream": stream,
        "launch": args["correlation"],
        "args": args,
    }


def _span(start_ns: int, end_ns: int) -> int:
    """The duration. CUPTI has 0 as the end of what was interrupted."""
    return max(0, end_ns - start_ns)


def _where(context: int, graph: int, node: int) -> dict[str, int]:
    return {"context": context} | ({"graph": graph, "graph_node": node} if graph else {})


def _at(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else str(number)


STALLS_VARIABLE: Final = "TRACEPIPE_GPU_STALLS"
"""The variable that is set if the library is to sample stall reasons."""
ENTRY: Final = "tracepipe_attach"
"""The library's entry for a running process."""
# Results of the entry, `Attached` in native/kernels.cpp.
_NOT_ATTACHED: Final = {
    1: ("another capture is recording its GPU's work", "End that one first."),
    2: ("it could not connect to this capture", "Run the capture as the user of the process, or as root."),
    3: ("another profiler (such as torch.profiler) uses CUPTI there", "End that one, or start it later."),
    4: ("CUPTI refused", "Start the program with tracepipe: capture --gpu kernels -- COMMAND."),
}
_REASONS: Final = {KIND_ANY: "CUPTI had no buffer"}


class KernelsEngine(ChannelEngine):
    """Records the GPU work of a command that runs with `environment()`; nothing has to be attached to it."""

    name = "cupti"
    layers = frozenset({"userspace", "memory", "transfer", "gpu_kernel"})
    clocks: Sequence[str] = ("realtime",)
    """Clocks other than CLOCK_MONOTONIC that its times can be on: an older CUPTI uses its own."""

    def __init__(
        self,
        library: Path,
        *,
        calls: str = "all",
        stacks: str = "python",
        ring_bytes: int = CHANNEL_BYTES,
        owner: tuple[int, int] | None = None,
        gpus: Sequence[Mapping[str, Any]] = (),
        stalls: bool = False,
    ) -> None:
        """`calls`: which API calls are recorded, as `calls_text` takes it. `owner` (user, group): whom the
        command runs as. `gpus`: those of the machine, in the form of a header. With `stalls`, stall reasons
        are sampled on all of them, and no other process may sample them. Raises CaptureUnavailable.
        """
        self._calls = calls_text(calls)
        lock = SamplingLock(gpu["uuid"] for gpu in gpus if "uuid" in gpu) if stalls else None
        layers = LAYERS | stall_records.LAYERS
        try:
            super().__init__(
                owner, ring_bytes=ring_bytes, stacks=stacks, lost_layers=layers, lost_why=_REASONS
            )
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        self._library, self._lock = library, lock
        if stalls:  # CUPTI gives its callbacks to only one client
            self.layers = self.layers | {stall_records.LAYER}
        else:
            self.sees = {"kernel": library, "profiler": library}
        self.gpus = gpus
        self._renderer = KernelsRenderer(numbers_of(gpus))

    def environment(self) -> dict[str, str]:
        """Variables for the command's environment."""
        own = {INJECTION_VARIABLE: str(self._library), CALLS_VARIABLE: self._calls}
        sampled = {STALLS_VARIABLE: "1"} if self._lock is not None else {}
        return own | sampled | super().environment()

    def enter(self, pids: Sequence[int]) -> None:
        """Load the library into running processes. Raises CaptureUnavailable, TracepipeError."""
        from tracepipe.tracer.gpu.attach.loader import enter

        settings = {CALLS_VARIABLE: self._calls} | super().environment()
        text = "\n".join(f"{name}={value}" for name, value in settings.items())
        for pid in pids:
            result = enter(pid, self._library, ENTRY, text, self._channel.accept)
            if result:
                why, hint = _NOT_ATTACHED.get(
                    result,
                    (f"answers {result}", "Check whether it has another version of tracepipe's library."),
                )
                raise CaptureUnavailable(f"Process {pid} is not recorded: {why}.", hint)

    def close(self) -> None:
        """Close the channel, and release the right to sample."""
        super().close()
        if self._lock is not None:
            self._lock.close()

    def renderer(self) -> KernelsRenderer:
        """The decoder of what `collect` returns."""
        return self._renderer


def build_library(toolchain: Toolchain) -> Path:
    """The library that the command loads, built if it is not in the cache. Raises CaptureUnavailable."""
    return toolchain.build_host("kernels", [NATIVE / "kernels.cpp"], ["cupti"])
