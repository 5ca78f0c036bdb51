"""GPU kernels, copies and memsets with the API calls that requested them, from CUPTI.

The CUDA driver loads the library into the command (`native/kernels.cpp` describes how it works). Its records,
which `native/kernel_records.h` describes, become lines:

    gpu_kernel X   launch, grid, block, stream; `stack` of the code that made its node of a CUDA graph
    transfer X     HtoD, DtoH, …, memset: gpu, stream, size, launch
    userspace X    calls with their results, launches also with sizes; `launch` where they request work,
                   `stack` where Python made them
    memory I       alloc, free, alloc_host, free_host: address, size, kind, call

Times are CLOCK_MONOTONIC: CUPTI converts the GPU's times to it. A launch id is CUPTI's correlation number,
with the process's number in the upper bits.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from tracepipe.errors import CaptureUnavailable
from tracepipe.event.bounded import put_bounded
from tracepipe.event.model import ID_LIMIT, INDEX_LIMIT
from tracepipe.tracer.gpu.build.toolchain import NATIVE, Toolchain
from tracepipe.tracer.gpu.choice import CALLS_VARIABLE, calls_text
from tracepipe.tracer.gpu.engines.channel import (
    ENTRY_BYTES,
    INJECTION_VARIABLE,
    PROCESS_BYTES,
    REFUSALS,
    GpuRecord,
    Kind,
    Malformed,
    check_span,
    text,
)
from tracepipe.tracer.gpu.engines.failures import UnendedLaunch
from tracepipe.tracer.gpu.engines.stalls import STALL_LAYER, STALLS_VARIABLE, StallDecoder, StallKind
from tracepipe.tracer.gpu.engines.streams import (
    Decoder,
    Event,
    Finder,
    Keeper,
    MakeDecoder,
    Process,
    ProcessDecoder,
    Recording,
    RecordStream,
    WantedName,
)
from tracepipe.tracer.gpu.sampling_lock import SamplingLock
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.unrendered import CALL as CALL_SPAN
from tracepipe.tracer.records.unrendered import KERNEL as KERNEL_SPAN
from tracepipe.tracer.records.unrendered import Span
from tracepipe.units import counted


class KernelKind(IntEnum):
    """Kinds of CUPTI's records."""

    NODE = 38
    LAYOUT = 39
    HELLO = 40
    KERNEL = 41
    COPY = 42
    SET = 43
    CALL = 44
    CALL_NAME = 45
    ANY = 46
    """Only lost: CUPTI does not say what it dropped."""
    MEMORY = 47
    TAKEN = 48


LAYERS: Final[Mapping[int, str]] = {
    KernelKind.KERNEL: "gpu_kernel",
    KernelKind.COPY: "transfer",
    KernelKind.SET: "transfer",
    KernelKind.CALL: "userspace",
    KernelKind.MEMORY: "memory",
}
"""Kinds of the records that become events → layer."""
HELLO: Final = struct.Struct("<IIQQQ")
KERNEL: Final = struct.Struct("<QQQQ4I3I3I3I7I")
COPY: Final = struct.Struct("<QQQQ6I4B4x")
SET: Final = struct.Struct("<QQQQ7I4x")
CALL: Final = struct.Struct("<QQQ8I")
MEMORY: Final = struct.Struct("<QQQ6I")
TAKEN: Final = struct.Struct("<QQ")
NODE: Final = struct.Struct("<QQQ")
NODES_MAX: Final = 1 << 20
"""The nodes of graphs that are remembered of a process; the oldest are forgotten first."""
_NODE_BYTES: Final = 150  # roughly, of each
_TIMES_BYTES: Final = 16
"""Records of work begin with two times."""
LAYOUT: Final = struct.Struct("<4I")
FIELD: Final = struct.Struct("<3H2x")
_LAYOUTS_MAX, _FIELDS_MAX, _LEAST_CUPTI_RECORD = 64, 64, 32
CALL_NAME: Final = struct.Struct("<II")
# CUpti_ActivityMemcpyKind and …MemoryKind of cupti_activity.h.
_DIRECTIONS: Final = ("copy", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_MEMORIES: Final = ("", "pageable", "pinned", "device", "array", "managed", "device_static", "managed_static")
_ALLOCATE, _RELEASE = 1, 2  # CUpti_ActivityMemoryOperationType
_PINNED: Final = 2
_KINDS_OF_CALLS: Final = (_PINNED, 3, 5)  # device and managed memory
_NO_TIMES_YET: Final = 1 << 31
"""The bit in the kind of a record of CUPTI's to which it has not written times"""
_ADDRESS: Final = (1 << 48) - 1
"""The bits of a kernel's name that are its address; those above are a count."""
_NONE: Final = 0xFFFFFFFF
_ASYNCHRONOUS: Final = 1  # CUPTI_ACTIVITY_FLAG_MEMCPY_ASYNC
_DRIVER: Final = 1

_ALLOCATES: Final = re.compile(r"[Aa]lloc|Free")
_COPIES: Final = re.compile(r"(?:cu|cuda)Mem(?:cpy|set)")
_ALLOCATING_MAX: Final = 4096
_VERSION: Final = re.compile(r"_v\d{4,5}$")  # CUPTI appends it to a runtime function: cudaMalloc_v3020
LAUNCHES_MAX: Final = 1 << 16
"""The number of launches, and of kernels, that are remembered; the oldest are forgotten first."""
_LAUNCHES: Final = re.compile(r"(?:cu|cuda)(?:Graph)?Launch(?!HostFunc)")
_BEGINS_CAPTURE: Final = re.compile(r"(?:cu|cuda)StreamBeginCapture")
_ENDS_CAPTURE: Final = re.compile(r"(?:cu|cuda)StreamEndCapture")
_OF_ONE_KERNEL: Final = re.compile(r"(?:__)?(?:cu|cuda)Launch(?!HostFunc)")
WAIT_NS: Final = 1_000_000_000
"""If a kernel is queued or runs for longer, its call has no arguments."""
WAITING_MAX: Final = 1 << 14
_NAMED_BYTES: Final = 128
"""The memory that a function takes in each process which has it, roughly."""
KERNELS_MAX: Final = 1 << 12
"""Kernels that are remembered for calls that come later, or calls of the other API."""

_NOT_ENDED: Final = "had not ended when the recording did"
_NOT_TIMED: Final = "had not ended, or their times had not been read, when the process ended"

ENTRY: Final = "tracepipe_attach"
"""The library's entry for a running process."""
# Results of the entry, `Attached` in native/kernels.cpp.
_NOT_ATTACHED: Final = {
    1: ("another capture is recording its GPU's work", "End that one first."),
    2: ("it could not connect to this capture", "Run the capture as the user of the process, or as root."),
    3: ("another profiler (such as torch.profiler) uses CUPTI there", "End that one, or start it later."),
    4: ("CUPTI refused", "Start the program with tracepipe: capture --gpu kernels -- COMMAND."),
}


class _Function(NamedTuple):
    """A CUDA function; whether it launches kernels, copies or sets memory, allocates or frees it."""

    name: str = ""
    is_launch: bool = False
    copies: bool = False
    allocates: bool = False


def function_of(text: str) -> _Function:
    """The function of a name in CUPTI, with what it does."""
    name = _VERSION.sub("", text)
    return _Function(name, "Launch" in name, bool(_COPIES.match(name)), bool(_ALLOCATES.search(name)))


class _Open(NamedTuple):
    """A launch whose kernel has not ended: when it was called, its stack, its kernel, "" without a record."""

    start_ns: int = 0
    stack: int = 0
    kernel: str = ""


class _Launches:
    """Matches a process's launch calls with the kernels that they started, by the number that they share.

    A call takes its arguments from its kernel, as CUPTI reports none for calls: its event waits until the
    kernel has run, for a while. _Launches without a kernel are counted, which are lost when another profiler
    takes over CUPTI. Calls and kernels come in any order, and the calls of both APIs have the launch's
    number. A launch into a stream that is being captured has no kernel, and neither has a call that failed.
    """

    def __init__(self) -> None:
        self.open = OrderedDict[int, _Open]()
        """Number of a launch → what is known of it; not of those whose kernel has ended."""
        self.ran = OrderedDict[int, None]()
        self._capturing = 0
        self._waiting = OrderedDict[int, tuple[int, list[Event]]]()
        """Number of the launch → until when its calls wait, and the calls; in order of arrival."""
        self._arguments = OrderedDict[int, dict[str, Any]]()

    @property
    def without_kernel(self) -> set[int]:
        """The launches of which no kernel came."""
        return {correlation for correlation, launch in self.open.items() if not launch.kernel}

    def add_call(self, correlation: int, event: Event, now_ns: int, stack: int) -> Iterator[Event]:
        """Take a call that has returned, and return the events that are complete now."""
        name, is_failed = event["name"], event["args"]["result"] != 0
        if not is_failed and _LAUNCHES.match(name):
            if known := self.open.get(correlation):
                self.open[correlation] = known._replace(start_ns=event["ts_ns"], stack=stack)
            elif correlation not in self.ran and not self._capturing:
                put_bounded(self.open, correlation, _Open(event["ts_ns"], stack), LAUNCHES_MAX)
        elif not is_failed and _BEGINS_CAPTURE.match(name):
            self._capturing += name.startswith("cuS")  # the runtime's calls have the driver's in them
        elif not is_failed and _ENDS_CAPTURE.match(name):
            self._capturing = max(0, self._capturing - name.startswith("cuS"))
        if is_failed or not _OF_ONE_KERNEL.match(name):
            yield event
        elif correlation in self._arguments:
            event["args"] = self._arguments[correlation]
            yield event
        else:
            if correlation not in self._waiting and len(self._waiting) >= WAITING_MAX:
                yield from self._waiting.popitem(last=False)[1][1]
            self._waiting.setdefault(correlation, (now_ns + WAIT_NS, []))[1].append(event)

    def add_kernel(self, correlation: int, args: dict[str, Any], *, has_ended: bool) -> list[Event]:
        """Take a kernel with its launch's arguments, and return the calls that are complete now."""
        known = self.open.pop(correlation, _Open())
        if not has_ended:
            put_bounded(self.open, correlation, known._replace(kernel=args["kernel"]), LAUNCHES_MAX)
        put_bounded(self.ran, correlation, None, LAUNCHES_MAX)
        put_bounded(self._arguments, correlation, args, KERNELS_MAX)
        _, calls = self._waiting.pop(correlation, (0, []))
        for call in calls:
            call["args"] = args
        return calls

    def late(self, now_ns: int | None = None) -> list[Event]:
        """The calls that have waited long enough, or all; they have no arguments."""
        late: list[Event] = []
        while self._waiting:
            correlation, (until_ns, calls) = next(iter(self._waiting.items()))
            if now_ns is not None and now_ns < until_ns:
                break
            late += calls
            del self._waiting[correlation]
        return late


class _Layout(NamedTuple):
    """How one of CUPTI's records, of so many bytes, becomes a record of a kind, 0 if it becomes none."""

    size_bytes: int
    kind: int
    record: bytes
    fields: list[tuple[int, int, int]]

    @classmethod
    def of(cls, payload: memoryview) -> tuple[int, _Layout]:
        """CUPTI's kind, and the layout. Raises Malformed."""
        cupti_kind, size, kind, record_bytes = LAYOUT.unpack_from(payload)
        record = bytes(payload[LAYOUT.size : LAYOUT.size + record_bytes])
        fields = list(FIELD.iter_unpack(payload[LAYOUT.size + len(record) :]))
        is_bounded = size >= _LEAST_CUPTI_RECORD and len(fields) <= _FIELDS_MAX
        if not is_bounded or any(start + n > size or to + n > len(record) for start, to, n in fields):
            raise Malformed
        return cupti_kind, cls(size, kind, record, fields)

    def read(self, record: memoryview) -> bytearray:
        made = bytearray(self.record)
        for start, to, count in self.fields:
            made[to : to + count] = record[start : start + count]
        return made


@dataclass(slots=True)
class _Work:
    """The GPU work of a traced process."""

    process: Process
    functions: dict[tuple[int, int], _Function] = field(default_factory=dict)
    allocating: OrderedDict[int, tuple[str, int]] = field(default_factory=OrderedDict)
    """Correlation of a call that allocates or frees memory → its function and thread; the last calls only."""
    launches: _Launches = field(default_factory=_Launches)
    layouts: OrderedDict[int, _Layout] = field(default_factory=OrderedDict)
    nodes: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Node of a graph → the stack that made it, as `id_of_capture` takes it."""
    updated: OrderedDict[int, tuple[int, int | None]] = field(default_factory=OrderedDict)
    """Node that got another stack → when, and the stack before."""
    has_died: bool = False
    """Whether it could not send its last records."""
    now_ns: int = 0
    """The latest time of its records."""
    is_realtime: bool = False

    def launch_id(self, correlation: int) -> int:
        return self.process.number << 32 | correlation

    def with_clock(self, events: list[Event]) -> list[Event]:
        """The events, with the clock of their times if that is not the recording's."""
        if self.is_realtime:
            for event in events:
                event["clock"] = "realtime"
        return events


class _KernelKeeper(Keeper):
    """Keeps names of functions, as ended work needs only names, and that another profiler took over CUPTI in
    a process. The latter counts as under way, as it is a loss.
    """

    def add(self, record: GpuRecord) -> None:
        if record.kind == KernelKind.TAKEN:
            self._under_way[(record.pid,)] = [(record.time_ns, record.content)]
        super().add(record)


@dataclass(eq=False)
class _KernelFinder(Finder):
    """Finds long kernels and calls."""

    functions: dict[tuple[int, int, int], tuple[str, int]] = field(default_factory=dict)
    """Process, domain and number of a function → its name and limit, if it is wanted."""

    def spans_in(self, record: GpuRecord) -> Iterator[Span]:
        kind, pid, payload = record.kind, record.pid, record.payload
        if kind == KernelKind.CALL_NAME:
            domain, function = CALL_NAME.unpack_from(payload)
            name = _VERSION.sub("", text(payload, CALL_NAME.size))
            if (limit_ns := self.wanted.limit_ns(name, CALL_SPAN)) is not None:
                self.memory.use(ENTRY_BYTES + len(name))
                self.functions[pid, domain, function] = name, limit_ns
        elif kind == KernelKind.KERNEL and self.names:
            for start_ns, end_ns, number, *_ in KERNEL.iter_unpack(payload):
                name, _, longest_ns = self.names.get((pid, number), WantedName(""))
                if longest_ns is not None and end_ns - start_ns > longest_ns:
                    yield Span(name, end_ns - start_ns, KERNEL_SPAN)
        elif kind == KernelKind.CALL and self.functions:
            for start_ns, end_ns, _, domain, function, *_ in CALL.iter_unpack(payload):
                found = self.functions.get((pid, domain, function))
                if found and end_ns - start_ns > found[1]:
                    yield Span(found[0], end_ns - start_ns)


MakeEvents = Callable[[_Work, GpuRecord, tuple[int, ...]], Iterator[Event]]


class KernelDecoder(Decoder):
    """Makes lines of GPU work and of API calls."""

    kinds = frozenset[int](KernelKind) - {KernelKind.ANY} | {Kind.KEPT}
    layers = LAYERS
    kept = frozenset({KernelKind.CALL_NAME, KernelKind.HELLO, KernelKind.LAYOUT, KernelKind.NODE})
    whole = frozenset(LAYERS)
    keeper, finder = _KernelKeeper, _KernelFinder

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self._work: dict[int, _Work] = {}
        self._functions: dict[str, _Function] = {}
        self._waiting: list[GpuRecord] = []
        self._unended: Counter[tuple[int, str, str]] = Counter()
        self._without_capture = 0
        self._layouts: Mapping[int, tuple[struct.Struct, MakeEvents]] = {
            KernelKind.KERNEL: (KERNEL, self._kernel),
            KernelKind.COPY: (COPY, self._transfer),
            KernelKind.SET: (SET, self._transfer),
            KernelKind.CALL: (CALL, self._call),
            KernelKind.MEMORY: (MEMORY, self._memory),
        }

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        layer, is_event = super().counted(record)
        return layer, len(record.payload) // self._layouts[record.kind][0].size if is_event else 0

    def add(self, lines: Lines, record: GpuRecord) -> None:
        """Take a name; keep what becomes lines, as a name follows its kernel if it found no room at first."""
        work, payload = self._work.get(record.pid), record.payload
        if work is None:
            process = self._recording.process(record.pid)
            self._recording.memory.use(PROCESS_BYTES)
            work = self._work[record.pid] = _Work(process)
        if record.kind == KernelKind.CALL_NAME:
            domain, function = CALL_NAME.unpack_from(payload)
            # Each process sends all of them, mostly the same ones.
            given = text(payload, CALL_NAME.size)
            self._recording.memory.use(
                _NAMED_BYTES + (given not in self._functions) * (ENTRY_BYTES + len(given))
            )
            named = self._functions.setdefault(given, function_of(given))
            work.functions[domain, function] = named
        elif record.kind == KernelKind.LAYOUT:
            self._recording.memory.use(ENTRY_BYTES + len(payload))
            cupti_kind, layout = _Layout.of(payload)
            made, _ = self._layouts.get(layout.kind, (None, None))
            if layout.kind and (made is None or made.size != len(layout.record)):
                raise Malformed
            put_bounded(work.layouts, cupti_kind, layout, _LAYOUTS_MAX)
        elif record.kind == KernelKind.NODE:
            node, original, stack = NODE.unpack(payload)
            self._recording.memory.use(_NODE_BYTES * (len(work.nodes) < NODES_MAX))
            before, made_at = work.nodes.pop(node, None), work.nodes.get(original) if original else stack
            if made_at is not None:
                put_bounded(work.nodes, node, made_at, NODES_MAX)
            if original and stack and before is not None:
                put_bounded(work.updated, node, (record.time_ns, before), NODES_MAX)
        elif record.kind == KernelKind.HELLO:
            work.is_realtime = bool(HELLO.unpack_from(payload)[1])
        else:
            if record.kind == KernelKind.TAKEN:
                check_span(*TAKEN.unpack_from(payload))
            self._waiting.append(record)

    def end_chunk(self, lines: Lines) -> None:
        events: list[Event] = []
        waiting, self._waiting = self._waiting, []
        for record in sorted(waiting, key=lambda record: record.kind == KernelKind.MEMORY):  # after its call
            if record.kind == Kind.KEPT:
                events += self._events_left(self._work[record.pid], record)
            elif record.kind != KernelKind.TAKEN:
                events += self._checked_events(self._work[record.pid], record, _NOT_ENDED)
        for pid, work in self._work.items():
            if work.has_died and (lost := work.launches.without_kernel):
                self._unended[pid, "gpu_kernel", _NOT_TIMED] += len(lost)
            work.has_died = False
            events += work.with_clock(work.launches.late(work.now_ns))
        events += self._taken_over(waiting)
        now_ns = max((record.time_ns for record in waiting), default=0)
        for (pid, layer, why), count in self._unended.items():
            events.append(self._recording.loss(layer, count, f"process {pid}: {count} {why}", now_ns))
        self._unended.clear()
        self._recording.stacks.write_new(lines)
        _write(lines, events)

    def find_unended(self) -> None:
        failures, stacks = self._recording.failures, self._recording.stacks
        for pid, work in self._work.items():
            if failures.has_failed(pid) and work.launches.open:
                correlation, first = min(work.launches.open.items(), key=lambda item: item[1].start_ns)
                place = stacks.innermost(pid, first.stack)
                failures.left(pid, UnendedLaunch(work.launch_id(correlation), first.kernel, place))

    @property
    def last_notes(self) -> list[str]:
        if not self._without_capture:
            return []
        which = counted(self._without_capture, "kernel|kernels")
        return [f"{which} or copies of CUDA graphs have no line of Python: their capture was not recorded"]

    def last(self, lines: Lines) -> None:
        works = self._work.values()
        _write(lines, [event for work in works for event in work.with_clock(work.launches.late())])

    def _events_left(self, work: _Work, buffer: GpuRecord) -> list[Event]:
        """The events of a buffer that its process could not send."""
        work.has_died = True
        names = {number & _ADDRESS: number for number in work.process.names}
        made: dict[int, bytearray] = {}
        at, payload = 0, buffer.payload
        try:
            while cupti_kind := int.from_bytes(payload[at : at + 4], "little"):
                if (layout := work.layouts.get(cupti_kind & ~_NO_TIMES_YET)) is None:
                    raise Malformed
                if layout.kind:
                    record = layout.read(payload[at : at + layout.size_bytes])
                    if cupti_kind & _NO_TIMES_YET:
                        record[:_TIMES_BYTES] = bytes(_TIMES_BYTES)
                    values = self._layouts[layout.kind][0].unpack(record)
                    if layout.kind == KernelKind.KERNEL:
                        record[16:24] = names.get(values[2], 0).to_bytes(8, "little")
                    if _is_left(work, layout.kind, values):
                        made.setdefault(layout.kind, bytearray()).extend(record)
                at += layout.size_bytes
        except (Malformed, struct.error):
            self._recording.refuse(Malformed())
        left = [buffer._replace(kind=kind, payload=memoryview(made[kind])) for kind in sorted(made)]
        return [event for record in left for event in self._checked_events(work, record, _NOT_TIMED)]

    def _checked_events(self, work: _Work, record: GpuRecord, why: str) -> list[Event]:
        try:
            return self._events_of(work, record, why)
        except REFUSALS as refusal:
            self._recording.refuse(refusal)
            return []

    def _events_of(self, work: _Work, record: GpuRecord, why: str) -> list[Event]:
        """The events of a record; `why` says why those without times are lost."""
        layout, make = self._layouts[record.kind]
        some = list(layout.iter_unpack(record.payload))
        work.now_ns = max(work.now_ns, record.time_ns)
        made = [event for values in some for event in make(work, record, values)]
        if record.kind == KernelKind.KERNEL:
            for values, kernel in zip(some, tuple(made), strict=True):
                # The arguments of the launch are in the form that other engines give its call.
                args = {name: kernel[name] for name in ("grid", "block")} | {"shared_bytes": values[18]}
                args |= {"stream": kernel["stream"], "kernel": self._recording.short_name(kernel["name"])}
                made += work.launches.add_kernel(values[7], args, has_ended=values[1] > 0)
        # CUPTI has no times for work that had not ended when its records were requested.
        events = [event for event in made if event["ts_ns"]]
        if len(events) < len(made):
            self._unended[record.pid, LAYERS[record.kind], why] += len(made) - len(events)
        return work.with_clock(events)

    def _taken_over(self, waiting: list[GpuRecord]) -> list[Event]:
        """The losses of processes in which another profiler has taken over CUPTI."""
        losses = []
        for record in waiting:
            if record.kind != KernelKind.TAKEN:
                continue
            until_ns, noticed_ns = TAKEN.unpack_from(record.payload)
            launches = self._work[record.pid].launches
            count = len(launches.without_kernel)
            launches.open.clear()
            which = counted(count, "launch|launches and all later ones") if count else "later launches"
            reason = f"another profiler took over CUPTI in process {record.pid}: kernels of {which} are lost"
            self._recording.note(f"{reason}; run the program without that profiler to record them")
            until_ns = max(until_ns, self._recording.resumed_ns or 0)
            dur_ns = max(0, noticed_ns - until_ns)
            # At least 1, as something was lost even if no launch is known.
            losses.append(self._recording.loss("gpu_kernel", max(count, 1), reason, until_ns, dur_ns))
        return losses

    def _kernel(self, work: _Work, record: GpuRecord, values: tuple[int, ...]) -> Iterator[Event]:
        static_bytes, dynamic_bytes, registers, graph, is_device_launched, *limits = values[17:]
        configured_bytes, clusters = limits
        if max(values[11:14]) > INDEX_LIMIT:
            raise Malformed
        event = _work_event("gpu_kernel", work, record, values)
        args: Event = {"registers": registers, "shared_bytes": static_bytes + dynamic_bytes}
        if configured_bytes:
            args["shared_config_bytes"] = configured_bytes
        if any(values[14:17]):
            args["cluster"] = values[14:17]
            args |= {"max_active_clusters": clusters} if clusters else {}
        if is_device_launched:
            args["launched_by"] = "device"
        event["name"] = work.process.names.get(values[2], "kernel whose name was lost")
        event |= {"grid": values[8:11], "block": values[11:14]}
        yield event | self._placed(work, record.pid, values, args, graph)

    def _transfer(self, work: _Work, record: GpuRecord, values: tuple[int, ...]) -> Iterator[Event]:
        event = _work_event("transfer", work, record, values)
        args: Event = {"size": values[2], "correlation": event["launch"]}
        if record.kind == KernelKind.SET:
            value, kind = values[9:]
            event["name"] = "set"
            args |= {"value": value, "to": _name_at(_MEMORIES, kind)}
        else:
            to_gpu, direction, from_kind, to_kind, flags = values[9:]
            event["name"] = _name_at(_DIRECTIONS, direction) or "copy"
            args |= {"from": _name_at(_MEMORIES, from_kind), "to": _name_at(_MEMORIES, to_kind)}
            args["async"] = bool(flags & _ASYNCHRONOUS)
            if to_gpu != values[4]:
                args["to_gpu"] = work.process.gpus.get(to_gpu, to_gpu)
        yield event | self._placed(work, record.pid, values, args, values[8])

    def _placed(self, work: _Work, pid: int, values: tuple[int, ...], args: Event, graph: int) -> Event:
        """The arguments of work, with where it ran; of work in a graph also the stack that made its node."""
        start_ns, node, context = values[0], values[3], values[5]
        if not graph:
            return {"args": args | {"context": context}}
        number, placed = work.nodes.get(node), {"context": context, "graph": graph, "graph_node": node}
        updated_ns, before = work.updated.get(node, (0, None))
        if start_ns < updated_ns and not work.is_realtime:
            number = before
        stack = self._recording.stacks.id_of_capture(pid, number)
        self._without_capture += number is None and stack is not None
        return {"args": args | placed} | ({} if stack is None else {"stack": stack})

    def _call(self, work: _Work, record: GpuRecord, values: tuple[int, ...]) -> Iterator[Event]:
        start_ns, end_ns, stack, domain, function, tid, correlation, result, *of_wait = values
        check_span(start_ns, end_ns)
        if tid > ID_LIMIT:
            raise Malformed
        name, is_launch, copies, allocates = work.functions.get((domain, function), _Function())
        # If calls of both APIs have the number, the driver's is the inner one.
        if allocates and (domain == _DRIVER or correlation not in work.allocating):
            put_bounded(work.allocating, correlation, (name, tid), _ALLOCATING_MAX)
        event: Event = {
            "ts_ns": start_ns,
            "type": "userspace",
            "name": name or f"{'driver' if domain == _DRIVER else 'runtime'} function {function}",
            "phase": "X",
            "dur_ns": max(0, end_ns - start_ns),
            "pid": record.pid,
            "tid": tid,
        }
        if is_launch or copies:
            event["launch"] = work.launch_id(correlation)
        if (made_at := self._recording.stacks.id_of(record.pid, stack)) is not None:
            event["stack"] = made_at
        known = zip(("context", "stream", "event"), of_wait, strict=True)
        self._recording.failures.returned(record.pid, event["name"], result)
        event["args"] = {"result": result, **{key: number for key, number in known if number != _NONE}}
        if is_launch or "Capture" in name:
            yield from work.launches.add_call(correlation, event, record.time_ns, stack)
        else:
            yield event

    def _memory(self, work: _Work, record: GpuRecord, values: tuple[int, ...]) -> Iterator[Event]:
        time_ns, size_bytes, address, gpu, context, stream, correlation, operation, kind = values
        check_span(time_ns, time_ns)
        name = ("free" if operation == _RELEASE else "alloc") + ("_host" if kind == _PINNED else "")
        call, tid = work.allocating.get(correlation, ("", 0))
        event: Event = {"ts_ns": time_ns, "type": "memory", "name": name, "phase": "I", "pid": record.pid}
        event |= {"tid": tid} if tid else {}
        event["gpu"] = work.process.gpus.get(gpu, gpu)
        if stream != _NONE:
            event["stream"] = stream
        args: Event = {"size": size_bytes} if size_bytes else {}
        args |= {"address": address, "kind": _name_at(_MEMORIES, kind), "context": context}
        args["correlation"] = work.launch_id(correlation)
        yield event | {"args": args | ({"call": call} if call else {})}


def _is_left(work: _Work, kind: int, values: tuple[int, ...]) -> bool:
    """Whether a record in a buffer that a process could not send is one that it would have sent."""
    if kind == KernelKind.KERNEL:  # it may have died between sending it and saying so; nodes share a number
        return bool(values[20]) or values[7] not in work.launches.ran
    if kind == KernelKind.CALL:
        return (values[3], values[4]) in work.functions
    return kind != KernelKind.MEMORY or (values[7] in (_ALLOCATE, _RELEASE) and values[8] in _KINDS_OF_CALLS)


def _work_event(layer: str, work: _Work, record: GpuRecord, values: tuple[int, ...]) -> Event:
    """An event without its name and arguments; the records of work begin alike."""
    start_ns, end_ns, gpu = values[0], values[1], values[4]
    check_span(start_ns, end_ns)
    return {
        "ts_ns": start_ns,
        "type": layer,
        "name": "",
        "phase": "X",
        "dur_ns": max(0, end_ns - start_ns),  # CUPTI has 0 as the end of what was interrupted
        "pid": record.pid,
        "gpu": work.process.gpus.get(gpu, gpu),
        "stream": values[6],
        "launch": work.launch_id(values[7]),
    }


def _write(lines: Lines, events: list[Event]) -> None:
    """Add events in the order of their times."""
    events.sort(key=lambda event: int(event["ts_ns"]))
    for event in events:
        lines.record(event)


def _name_at(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else str(number)


class KernelStream(RecordStream):
    """The GPU work of a command whose processes load the library; nothing has to be attached to it."""

    name = "cupti"
    layers = frozenset({"userspace", "memory", "transfer", "gpu_kernel"})
    source = "kernels"
    decoders: Sequence[MakeDecoder] = (ProcessDecoder, KernelDecoder, StallDecoder)
    clocks: Sequence[str] = ("realtime",)  # an older CUPTI uses its own clock
    lost_layers: Mapping[int, str] = {
        **LAYERS, KernelKind.CALL_NAME: "userspace", KernelKind.NODE: "stack",
        StallKind.STALLS: STALL_LAYER, StallKind.STALL_LOSS: STALL_LAYER,
    }  # fmt: skip
    lost_reasons: Mapping[int, str] = {
        KernelKind.ANY: "CUPTI had no buffer",
        KernelKind.CALL_NAME: "another profiler had CUPTI's callbacks: the calls of a process are not there",
    }

    def __init__(self, library: Path, *, calls: str = "all", sampled: Iterable[str] | None = None) -> None:
        """`calls`: which API calls are recorded, as `calls_text` takes it. `sampled`: the UUIDs of the
        machine's GPUs if stall reasons are sampled, which no other process may do then. Raises
        CaptureUnavailable.
        """
        self._library, self._calls = library, calls_text(calls)
        self._lock = None if sampled is None else SamplingLock(sampled)
        if self.source == "kernels":
            self.sees = {"kernel": library, "profiler": library}
        if self._lock is not None:
            self.layers |= {STALL_LAYER}

    @classmethod
    def build(cls, toolchain: Toolchain) -> Path:
        """The library that the command loads, built if it is not in the cache. Raises CaptureUnavailable."""
        return toolchain.build_host(NATIVE / f"{cls.source}.cpp", ["cupti"])

    def environment(self) -> dict[str, str]:
        sampled = {STALLS_VARIABLE: "1"} if self._lock is not None else {}
        return {INJECTION_VARIABLE: str(self._library), CALLS_VARIABLE: self._calls} | sampled

    def enter(self, pids: Sequence[int], settings: Mapping[str, str], meanwhile: Callable[[], None]) -> None:
        """Load the library into running processes. Raises CaptureUnavailable, TracepipeError."""
        from tracepipe.tracer.gpu.attach.loader import enter

        settings = {CALLS_VARIABLE: self._calls, **settings}
        argument = "\n".join(f"{name}={value}" for name, value in settings.items())
        for pid in pids:
            result = enter(pid, self._library, ENTRY, argument, meanwhile)
            if result:
                why, hint = _NOT_ATTACHED.get(
                    result,
                    (f"answers {result}", "Check whether it has another version of tracepipe's library."),
                )
                raise CaptureUnavailable(f"Process {pid} is not recorded: {why}.", hint)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


class StallStream(KernelStream):
    """Only the stall reasons of a GPU's warps. `native/stalls.cpp` is loaded into the command; the library of
    KernelStream has the same sampler.
    """

    name = "cupti pc sampling"
    source = "stalls"
    layers = frozenset({STALL_LAYER})
    clocks: Sequence[str] = ()

    def enter(self, pids: Sequence[int], settings: Mapping[str, str], meanwhile: Callable[[], None]) -> None:
        """Raises CaptureUnavailable, as sampling begins when a program's context is created."""
        raise CaptureUnavailable(f"Process {pids[0]} is already running.", "Give a command after --.")
