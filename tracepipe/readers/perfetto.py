"""Reads Perfetto's protobuf traces: those of its tools, of programs with its SDK, and of tracepipe.

    TracePacket   8 timestamp  58 timestamp_clock_id  10 sequence  13 sequence_flags
                  42 previous_packet_dropped  6 clock_snapshot  11 track_event  12 interned_data
                  59 trace_packet_defaults  60 track_descriptor  43 process_descriptor
                  44 thread_descriptor  2 process_tree  98 machine_id  45 system_info  107 remote_clock_sync
    TraceStats    1 buffer_stats… {3 chunks_overwritten  18 chunks_discarded  19 trace_writer_packet_loss}
    FtraceStats   1 phase (1 start, 2 end of the trace)  2 cpu_stats… {1 cpu  3 overrun  8 dropped_events}
    GpuRenderStageEvent   1 event_id  2 duration  13 hw_queue_iid  14 stage_iid (3, 4 by number)  11 gpu_id
                          5 context  10 submission_id  17 name  20 name_iid  18 event_wait_ids…
                          19 kernel_iid  21 launch {1 grid  2 workgroup  3 arguments…}  6 extra data…
                          7 specifications of numbers: {2 queues…  3 stages…} {1 name}
    argument of a kernel  1 name_iid  2 name  3 int  4 uint  5 double  6 text  7 text_iid
    GpuCounterEvent       1 counter_descriptor {1 specs {1 counter_id  2 name}…}  4 its number instead
                          2 counters {1 counter_id  2 int  3 double}…  3 gpu_id
    InternedData          23 contexts {2 pid}  24 specifications {2 name}  1000 compute_kernels {2 name
                          3 demangled name  4 arch  5 arguments…}  1001 names of arguments
                          47 counter descriptors {2 counter_descriptor}

All packets are read before the header is made, as names of machines may be anywhere. Times are put on the
trace's clock immediately, as the trace processor does. Events are sorted by them in temporary files without
names. Packets that are not read are counted by their fields. Losses of TraceStats and FtraceStats are counts
of a whole trace, of which the last one is used.
GPU stages are kernels, or stages of graphics, on queues: a queue becomes a stream, by its number or else in
the order of the queues' first stages. The event id of a stage is its launch, which the call that submitted
it names, and other stages that wait for it.

Source: protos/perfetto/trace/trace_packet.proto, ftrace/ftrace_stats.proto, gpu/gpu_render_stage_event.proto,
gpu/gpu_counter_event.proto and protos/perfetto/common/trace_stats.proto of perfetto v55.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final, cast

from tracepipe.event.columns import SourceBatch, no_events
from tracepipe.event.model import (
    COUNT_LIMIT,
    ID_LIMIT,
    INDEX_LIMIT,
    TIME_LIMIT_NS,
    Header,
    HostInstant,
    Problem,
    Record,
    cut_text,
)
from tracepipe.event.tables import LongNames, packed
from tracepipe.event.warps import Others
from tracepipe.readers.ids import stream_number
from tracepipe.readers.perfetto_events import (
    COUNTER,
    LAST_FLOW,
    NativeOrdered,
    Ordered,
    Submissions,
    TrackEvents,
    number_or_text,
)
from tracepipe.readers.perfetto_packets import LargePacket, PacketStream, parts_of
from tracepipe.readers.perfetto_packets import is_trace as sniff  # noqa: F401 - of this format
from tracepipe.readers.perfetto_sched import Scheduling
from tracepipe.readers.perfetto_sequences import (
    BOOTTIME,
    EVENT_NAMES,
    GPU_ARGUMENTS,
    GPU_CONTEXTS,
    GPU_COUNTERS,
    GPU_KERNELS,
    GPU_STAGES,
    STRINGS,
    NativePackets,
    NativeSequences,
    PerfettoClocks,
    Sequence,
    Sequences,
    clock_of,
    defaults_of,
    numbers,
)
from tracepipe.readers.perfetto_tracks import CPUS_MAX, GPUS_MAX, Descriptor, Tracks
from tracepipe.readers.recording import FirstProblems, Recording, counted_problems
from tracepipe.readers.sorted_rows import FLOW as FLOW_RANK
from tracepipe.readers.sorted_rows import (
    SLICE,
    NativeSortedRows,
    SortedEvents,
    SortedRow,
    SortedRows,
    with_others,
)
from tracepipe.readers.wire_fields import BYTES, FIXED64, WireError, double, signed, tagged, text
from tracepipe.units import agree

_DURATION, _QUEUE_IID, _STAGE_IID, _GPU, _CONTEXT = 2 << 3, 13 << 3, 14 << 3, 11 << 3, 5 << 3
_QUEUE, _STAGE, _SUBMISSION = 3 << 3, 4 << 3, 10 << 3
_NAME, _NAME_IID, _KERNEL_IID, _LAUNCH = 17 << 3 | BYTES, 20 << 3, 19 << 3, 21 << 3 | BYTES
_EXTRA, _SPECIFICATIONS = 6 << 3 | BYTES, 7 << 3 | BYTES
_EVENT_ID, _WAITS = 1 << 3, 18
_ONE, _TWO, _THREE = (field << 3 | BYTES for field in (1, 2, 3))
_QUEUES_MAX: Final = 1 << 12
_EXTRAS_MAX: Final = 256
_WAITS_MAX: Final = 64
_DIGITS_MAX: Final = 18
_NUMBERED_QUEUE = re.compile(r"[Ss]tream 0*(\d{1,20})")
_RENAMED: Final = {"registers_per_thread": "registers", "shared_mem_config_size": "shared_config_bytes"}
_SHARED: Final = ("shared_mem_static", "shared_mem_dynamic")
# Stages of PyTorch that are not kernels.
_COPIES: Final = {"Memcpy": "memcpy", "Memset": "memset"}
_ANNOTATION: Final = "Annotation"
_ANNOTATION_LAYER: Final = "gpu_user_annotation"


def _text(data: bytes) -> str:
    return cut_text(text(data))


class GpuStages:
    """Reads stages. `counted` counts what was not read, by kind."""

    def __init__(
        self, rows: SortedRows, long_names: LongNames, submissions: Submissions, tracks: Tracks
    ) -> None:
        self._rows, self._long_names = rows, long_names
        self._submissions, self._tracks = submissions, tracks
        self.counted: Counts[str] = Counts()
        self._queues: list[str] = []
        self._stages: list[str] = []
        """Names by number, as older programs give them."""
        self._streams: dict[tuple[int, str], int] = {}

    def add(self, data: bytes, ts_ns: int, sequence: Sequence) -> None:
        """Add a GpuRenderStageEvent, of a packet with this time. Raises WireError."""
        fields = tagged(data)
        of = dict(fields)
        for tag, value in tagged(of.get(_SPECIFICATIONS, b"")):  # the names of queues and stages
            if tag in (_TWO, _THREE):
                names = self._queues if tag == _TWO else self._stages
                if len(names) < _QUEUES_MAX:
                    names.append(self._long_names.cut(text(dict(tagged(value)).get(_ONE, b""))))
        if _STAGE not in of and _STAGE_IID not in of:
            return
        gpu, dur_ns = signed(of.get(_GPU, 0)), of.get(_DURATION, 0)
        if not 0 <= gpu < GPUS_MAX or not 0 <= ts_ns <= TIME_LIMIT_NS - dur_ns:
            self.counted["stage|stages has|have an impossible GPU or time"] += 1
            return
        gpu = self._tracks.own_gpu(gpu)
        queue = self._named(of, sequence, _QUEUE_IID, _QUEUE)
        stage = self._named(of, sequence, _STAGE_IID, _STAGE)
        name = self._name(of, sequence) or stage
        args: dict[str, Any] = {"queue": queue, "stage": stage} if name != stage else {"queue": queue}
        for tag, value in fields:
            if tag == _EXTRA and len(args) < _EXTRAS_MAX:
                extra = dict(tagged(value))
                args[_text(extra.get(_ONE, b""))] = _text(extra.get(_TWO, b""))
        if _SUBMISSION in of:
            args["submission_id"] = of[_SUBMISSION]
        place: dict[str, Any] = {"type": "gpu_kernel", "gpu": gpu, "stream": self._stream(gpu, queue, of)}
        if stage in _COPIES:
            place["type"], name = "transfer", _COPIES.get(name, name)
            if "size" not in args and args.get("bytes", "").isdecimal():
                args["size"] = int(args.pop("bytes")[:_DIGITS_MAX])
        elif stage == _ANNOTATION:
            pid = self._tracks.group(gpu, _ANNOTATION_LAYER)
            place = {"type": "hook", "layer": _ANNOTATION_LAYER, "pid": pid, "tid": place["stream"]}
        record: dict[str, Any] = {**place, "name": name, "phase": "X", "dur_ns": 0}
        launch_id = 0
        if "gpu" in record:
            self._arguments(of, args, sequence)
            launch_id = self._submissions.launch_id(of.get(_EVENT_ID, 0), self._tracks.machine)
            self._waits(fields, ts_ns, {**place, "name": name, "phase": LAST_FLOW, "flow": 0})
            record |= {"launch": 0} if launch_id else {}
        context = sequence.name(GPU_CONTEXTS, of.get(_CONTEXT, 0))
        pid = 0 if context is None else signed(dict(tagged(context)).get(2 << 3, 0))
        record = {"pid": self._tracks.number_of(pid), **record} if 0 < pid <= ID_LIMIT else record
        launch = dict(tagged(of.get(_LAUNCH, b"")))
        for key, tag in (("grid", _ONE), ("block", _TWO)):
            if tag in launch and "gpu" in record:
                three = dict(tagged(launch[tag]))
                size = [three.get(axis << 3, 1) for axis in (1, 2, 3)]
                if all(one <= INDEX_LIMIT for one in size):
                    record[key] = size
        self._rows.add(SortedRow(ts_ns, SLICE, dur_ns, launch_id, packed(record), packed(args)))

    def _arguments(self, of: dict[int, Any], args: dict[str, Any], sequence: Sequence) -> None:
        """Add what is known of a kernel, and of its launch."""
        kernel = sequence.name(GPU_KERNELS, of.get(_KERNEL_IID, 0)) or b""
        found: dict[str, Any] = {}
        for fields, field in ((tagged(kernel), 5), (tagged(of.get(_LAUNCH, b"")), 3)):
            for tag, value in fields:
                if tag == field << 3 | BYTES and len(found) < _EXTRAS_MAX:
                    argument = dict(tagged(value))
                    name = sequence.text_of(GPU_ARGUMENTS, argument.get(1 << 3, 0))
                    name = cut_text(name or _text(argument.get(_TWO, b"")))
                    found[_RENAMED.get(name, name)] = _value(argument, sequence)
                elif tag == 4 << 3 | BYTES and field == 5:
                    args.setdefault("arch", _text(value))
        sizes = [found.pop(key) for key in _SHARED if type(found.get(key)) is int]
        if sizes:
            found["shared_bytes"] = sum(sizes)
        args |= found

    def _waits(self, fields: list[tuple[int, Any]], ts_ns: int, record: dict[str, Any]) -> None:
        """Add the ends of flows from the stages for which a stage waits."""
        ids = [id for tag, value in fields if tag >> 3 == _WAITS for id in numbers(tag, value)]
        if len(ids) > _WAITS_MAX:
            self.counted["wait|waits beyond those that a stage can have"] += len(ids) - _WAITS_MAX
        for id in ids[:_WAITS_MAX]:
            if flow := self._submissions.wait(id, self._tracks.machine):
                self._rows.add(SortedRow(ts_ns, FLOW_RANK, 0, flow, packed(record), b""))

    def _named(self, of: dict[int, Any], sequence: Sequence, iid: int, number: int) -> str:
        """The name of a queue or a stage."""
        if iid in of:
            entry = sequence.name(GPU_STAGES, of[iid])
            name = b"" if entry is None else dict(tagged(entry)).get(_TWO, b"")
            return _text(name) or f"{of[iid]}"
        at, names = signed(of.get(number, 0)), self._queues if number == _QUEUE else self._stages
        what = "queue" if number == _QUEUE else "render stage"
        return (names[at] if 0 <= at < len(names) else "") or f"{what}({at})"

    def _name(self, of: dict[int, Any], sequence: Sequence) -> str:
        """The name of a stage, where it has its own."""
        if _KERNEL_IID in of and (entry := sequence.name(GPU_KERNELS, of[_KERNEL_IID])):
            kernel = dict(tagged(entry))
            if name := _text(kernel.get(_THREE, b"") or kernel.get(_TWO, b"")):
                return name
        if _NAME in of:
            return _text(of[_NAME])
        return cut_text(sequence.text_of(EVENT_NAMES, of.get(_NAME_IID, 0)) or "")

    def _stream(self, gpu: int, queue: str, of: dict[int, Any]) -> int:
        if _QUEUE_IID not in of and (stated := stream_number(signed(of.get(_QUEUE, 0)))) is not None:
            return stated
        key = gpu, self._long_names.shortened(queue)
        if key not in self._streams and len(self._streams) < _QUEUES_MAX:
            taken = {number for (other, _), number in self._streams.items() if other == gpu}
            found = _NUMBERED_QUEUE.fullmatch(queue)
            number = stream_number(int(found[1])) if found else None
            number = len(taken) if number is None else number
            self._streams[key] = next(one for one in itertools.count(number) if one not in taken)
        return self._streams.get(key, 0)


def _value(argument: dict[int, Any], sequence: Sequence) -> int | float | str:
    """The value of an argument of a kernel."""
    for tag, value in argument.items():
        if tag in (3 << 3, 4 << 3):
            return signed(value) if tag == 3 << 3 else int(value)
        if tag == 5 << 3 | FIXED64:
            return number_or_text(double(value))
        if tag == 7 << 3:
            return cut_text(sequence.text_of(STRINGS, value) or "")
    return _text(argument.get(6 << 3 | BYTES, b""))


_DESCRIPTOR, _DESCRIPTOR_IID = 1 << 3 | BYTES, 4 << 3
_COUNTERS_MAX: Final = 1 << 12
_COUNTER_LAYER: Final = "counters"


class GpuCounters:
    """Reads values of counters of GPUs. `counted` counts what was not read, by kind."""

    def __init__(self, rows: SortedRows, long_names: LongNames, tracks: Tracks) -> None:
        self._rows, self._long_names, self._tracks = rows, long_names, tracks
        self.counted: Counts[str] = Counts()
        self._names: dict[tuple[int, int, int], str] = {}
        """The names of counters by packet sequence and number of the descriptor, the machine and 0 where it
        has none, and by the counter's number."""

    def add(self, data: bytes, ts_ns: int, sequence: Sequence) -> None:
        """Add a GpuCounterEvent, of a packet with this time. Raises WireError."""
        fields = tagged(data)
        of = dict(fields)
        gpu, iid = signed(of.get(3 << 3, 0)), of.get(_DESCRIPTOR_IID, 0)
        if not 0 <= gpu < GPUS_MAX or not 0 <= ts_ns <= TIME_LIMIT_NS:
            self.counted["value|values of counters has|have an impossible GPU or time"] += 1
            return
        descriptor, owner = of.get(_DESCRIPTOR, b""), (self._tracks.machine, 0)
        if iid:
            owner = sequence.id, iid
            descriptor = dict(tagged(sequence.name(GPU_COUNTERS, iid) or b"")).get(_TWO, b"")
        gpu = self._tracks.own_gpu(gpu)
        if descriptor:
            self._describe(descriptor, owner)
        for tag, value in fields:
            if tag != _TWO:
                continue
            one = dict(tagged(value))
            name = self._names.get((*owner, one.get(1 << 3, 0)))
            number = signed(one[2 << 3]) if 2 << 3 in one else double(one.get(3 << 3 | FIXED64, bytes(8)))
            if name is None or not math.isfinite(number):
                self.counted["value|values of counters of GPUs without a name, or not numeric"] += 1
                continue
            record = {"type": "hook", "name": name, "phase": COUNTER, "gpu": gpu, "layer": _COUNTER_LAYER}
            self._rows.add(SortedRow(ts_ns, SLICE, 0, 0, packed(record), packed({"value": number})))

    def _describe(self, descriptor: bytes, owner: tuple[int, int]) -> None:
        for tag, value in tagged(descriptor):
            if tag == _ONE:
                spec = dict(tagged(value))
                key = (*owner, spec.get(1 << 3, 0))
                if key in self._names or len(self._names) < _COUNTERS_MAX:
                    name = self._long_names.cut(text(spec.get(_TWO, b"")))
                    self._names[key] = name or f"counter {key[2]}"


_BUFFER, _OF_CPU = 1 << 3 | BYTES, 2 << 3 | BYTES
_OF_BUFFERS: Final = {
    3 << 3: "chunks of a full buffer were overwritten before they were read",
    18 << 3: "chunks were discarded, as a buffer was full",
    19 << 3: "times a program that was traced had no room for packets",
}
_PHASE, _CPU, _OVERRUN, _DROPPED_EVENTS = 1 << 3, 1 << 3, 3 << 3, 8 << 3
_AT_START: Final = 1
_LISTED_MAX: Final = 1 << 12


class _Losses:
    """Adds losses with a time to `rows`, and keeps those of the whole trace."""

    def __init__(self, rows: SortedRows) -> None:
        self._rows = rows
        self._buffers: list[dict[int, int]] = []
        self._ftrace: dict[bool, dict[int, int]] = {False: {}, True: {}}
        """Whether at the start of the trace, and by processor: how many events were lost so far."""

    def add(self, from_ns: int, to_ns: int, reason: str, cpu: int | None = None) -> None:
        """Add a loss between two times."""
        if 0 <= from_ns <= to_ns <= TIME_LIMIT_NS:
            record: Record = {"type": "loss", "count": 1, "dur_ns": to_ns - from_ns, "reason": reason}
            if cpu is not None:
                record |= {"layer": "scheduler", "cpu": cpu}
            self._rows.add(SortedRow(from_ns, 0, 0, 0, packed(record), b""))

    def note_stats(self, data: bytes) -> None:
        """Note a TraceStats. Raises WireError."""
        buffers = [dict(tagged(value)) for tag, value in tagged(data) if tag == _BUFFER]
        self._buffers = [
            {tag: count for tag in _OF_BUFFERS if (count := of.get(tag, 0))} for of in buffers[:_LISTED_MAX]
        ]

    def note_ftrace_stats(self, data: bytes, tracks: Tracks) -> None:
        """Note an FtraceStats of the current machine. Raises WireError."""
        fields = tagged(data)
        phase = next((value for tag, value in fields if tag == _PHASE), 0)
        for tag, value in fields:
            of: dict[int, Any] = dict(tagged(value)) if tag == _OF_CPU else {}
            if of and (cpu := of.get(_CPU, 0)) < CPUS_MAX:
                count = of.get(_OVERRUN, 0) + of.get(_DROPPED_EVENTS, 0)
                self._ftrace[phase == _AT_START][tracks.own_cpu(cpu)] = count

    def records(self, tracks: Tracks) -> Iterator[Record]:
        """The losses that have no time."""
        for at, of in enumerate(self._buffers):
            for tag, count in of.items():
                reason = f"{_OF_BUFFERS[tag]} (buffer {at})"
                yield {"type": "loss", "count": min(count, COUNT_LIMIT), "reason": reason}
        for cpu, count in self._ftrace[False].items():
            lost = count - self._ftrace[True].get(cpu, 0)
            if lost > 0:
                loss = {"type": "loss", "layer": "scheduler", "count": min(lost, COUNT_LIMIT)}
                yield loss | {"cpu": tracks.cpu(cpu), "reason": "ftrace's buffer was full"}


_TIME, _CLOCK, _SEQUENCE, _FLAGS, _CLEARED, _DROPPED = 8 << 3, 58 << 3, 10 << 3, 13 << 3, 41 << 3, 42 << 3
_MACHINE: Final = 98 << 3
_SYSTEM, _SYNC, _OTHER_TREE = (field << 3 | BYTES for field in (45, 107, 122))
_SNAPSHOT, _EVENT, _INTERNED, _DEFAULTS = (field << 3 | BYTES for field in (6, 11, 12, 59))
_TRACK, _PROCESS, _THREAD, _TREE = (field << 3 | BYTES for field in (60, 43, 44, 2))
_FTRACE, _STATE, _STATS, _FTRACE_STATS = (field << 3 | BYTES for field in (1, 117, 35, 34))
_RENDER_STAGE, _GPU_COUNTER, _TRIGGER, _RENAME = (field << 3 | BYTES for field in (53, 52, 46, 120))
# The most kinds of packets that are counted separately, and the number for all others.
_KINDS_MAX, _OTHERS = 1 << 10, 0
_IS_CLEARED, _NEEDS_STATE = 1, 2
# Fields that a timeline does not show: how the trace was made, and for whom.
_SILENT: Final = (3, 8, 10, 13, 33, 36, 41, 42, 58, 79, 87, 89, 98, 126)
_PASSED_OVER: Final = frozenset(
    {field << 3 | wire_type for field in _SILENT for wire_type in range(8)}
    | {_DEFAULTS, _INTERNED, _SNAPSHOT, _SYNC}
)
_OF_STATE: Final = frozenset({_FLAGS, _CLEARED, _DROPPED, _DEFAULTS, _INTERNED})
_TITLES: Final = {
    _OTHERS: "of further kinds", 5: "chrome_events", 7: "sys_stats", 9: "process_stats",
    37: "profile_packet", 39: "android_log",
    40: "power_rails", 51: "chrome_metadata",
    54: "streaming_profile_packet", 62: "vulkan_memory_event", 65: "vulkan_api_event", 66: "perf_sample",
    67: "cpu_info", 68: "smaps_packet", 69: "service_event", 71: "gpu_mem_total_event",
    73: "memory_tracker_snapshot", 95: "etw_events", 118: "generic_kernel_cpu_freq_event",
    129: "generic_gpu_frequency_event", 133: "zstd_compressed_packets",
}  # fmt: skip


class _Trace:
    """Turns one trace into batches."""

    def __init__(self, stream: BinaryIO) -> None:
        self._sorted = SortedEvents()
        self._problems = FirstProblems()
        long_names = self._sorted.tables.long_names
        self._clocks, self._tracks = PerfettoClocks(), Tracks(long_names)
        rows = self._sorted.rows
        self._core = NativePackets(rows, self._clocks) if isinstance(rows, NativeSortedRows) else None
        if self._core is None:
            self._sequences, self._stream = Sequences(), PacketStream(stream, self._say)
        else:
            self._sequences = NativeSequences(self._core)
            self._stream = PacketStream(stream, self._say, self._take)
        self._submissions = Submissions()
        self._events = TrackEvents(self._tracks, self._clocks, rows, self._submissions, self._core)
        self._counted: Counts[str] = Counts()
        self._not_read: Counts[int] = Counts()
        self._losses = _Losses(rows)
        self._scheduling = Scheduling(
            rows,
            self._tracks,
            lambda ns: self._clocks.trace_ns(ns, (self._tracks.machine << 32, BOOTTIME)),
            self._events.mark,
        )
        self._stages = GpuStages(rows, long_names, self._submissions, self._tracks)
        self._counters = GpuCounters(rows, long_names, self._tracks)
        self._last_ns = 0
        self._machine: int | None = None
        """The machine of the last packet."""
        self._unrelated = Counts[int]()
        """By the place of a machine: packets with times before its clock is related to the host's."""
        self._of_field: dict[int, Callable[[bytes, int, Sequence], None]] = {
            _EVENT: self._events.add,
            _TRACK: self._track,
            _PROCESS: lambda data, ts_ns, sequence: self._tracks.describe_process(data, Descriptor()),
            _THREAD: self._thread,
            _TREE: lambda data, ts_ns, sequence: self._tree(data, ts_ns, is_linux=True),
            _OTHER_TREE: lambda data, ts_ns, sequence: self._tree(data, ts_ns, is_linux=False),
            _FTRACE: lambda data, ts_ns, sequence: self._ftrace(data),
            _STATE: lambda data, ts_ns, sequence: self._scheduling.add_state(data, ts_ns),
            _RENAME: lambda data, ts_ns, sequence: self._tracks.describe_task(data),
            _RENDER_STAGE: self._stages.add,
            _GPU_COUNTER: self._counters.add,
            _TRIGGER: lambda data, ts_ns, sequence: self._events.add_trigger(data, ts_ns),
            _STATS: lambda data, ts_ns, sequence: self._losses.note_stats(data),
            _FTRACE_STATS: lambda data, ts_ns, sequence: self._losses.note_ftrace_stats(data, self._tracks),
            _SYSTEM: lambda data, ts_ns, sequence: self._tracks.note_system(data),
        }

    def recording(self) -> Recording:
        """The recording. Its header has the clocks of the trace, and what is known of its machines."""
        self._read()
        self._sequences.forget()
        self._tracks.settle()
        host = self._tracks.host_place
        clock = self._clocks.name(host)
        header = Header(clock=clock, clocks=[clock], engine="Perfetto")
        self._tracks.state(header)
        if clock != "trace":
            header.start = cast(HostInstant, self._clocks.starts[host])
        states_itself = self._tracks.is_own
        return Recording(header, self._batches(), self._sorted.tables, states_itself=states_itself)

    def _say(self, message: str) -> None:
        self._problems.add(Problem(0, "", message))

    # Packets --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read all packets, one at a time."""
        for at, data in self._stream.packets():
            try:
                self._packet(data.fields() if isinstance(data, LargePacket) else tagged(data))
            except WireError as e:
                self._say(f"the packet at byte {at} cannot be read: {e}")
            if isinstance(data, LargePacket) and data.left_out:
                words = f"{data.left_out} of its fields do not fit in 1 MiB, and are not read"
                self._say(f"the packet at byte {at} has {data.size_bytes} bytes: {words}")

    def _take(self, data: bytes, at: int) -> int:
        """Read packets in the core, while they are of the first machine. Return the place of the next one."""
        if self._core is None or self._machine != 0 or self._tracks.machine:
            return at
        return self._core.take(data, at)

    def _packet(self, fields: list[tuple[int, Any]]) -> None:
        """Read a packet. Raises WireError."""
        of = dict(fields)
        if (machine := of.get(_MACHINE, 0)) != self._machine:
            self._machine = machine
            self._tracks.enter(machine)
        sequence = self._sequences.sequence(of.get(_SEQUENCE, 0) + (self._tracks.machine << 32))
        if self._core is None:
            self._packet_of(of, sequence)
            return
        self._last_ns = max(self._last_ns, self._core.leave(sequence))
        try:
            self._packet_of(of, sequence)
        finally:
            has_snapshot, has_track = _SNAPSHOT in of or _SYNC in of, _TRACK in of
            self._core.enter(sequence, self._last_ns, has_snapshot=has_snapshot, has_track=has_track)

    def _packet_of(self, of: dict[int, Any], sequence: Sequence) -> None:
        """Read a packet of a sequence. Raises WireError."""
        if not _OF_STATE.isdisjoint(of):
            self._change(of, sequence)
        sequence.is_begun = True
        if of.get(_FLAGS, 0) & _NEEDS_STATE and not sequence.is_valid:
            self._counted["packet|packets needs|need names or times from packets that are missing"] += 1
            return
        for part in parts_of(of.get(_SNAPSHOT, ())):
            self._clocks.add_snapshot(part, sequence.id)
        if self._machine:
            for part in parts_of(of.get(_SYNC, ())):
                self._clocks.add_sync(part, sequence.id)
        clock = of.get(_CLOCK, sequence.defaults.clock)
        if self._machine and (_FTRACE in of or (clock and _TIME in of)):
            self._unrelated[self._tracks.machine] += not self._clocks.is_related(self._tracks.machine)
        ts_ns = self._last_ns  # of the packet before, where it has none
        if _TIME in of:
            stated_ns = signed(of[_TIME])
            placed_ns = self._clocks.trace_ns(stated_ns, clock_of(clock, sequence.id)) if clock else stated_ns
            if placed_ns is None:
                self._counted["packet|packets is|are on a clock that is not related to the trace's"] += 1
                return
            ts_ns = sequence.last_ns = placed_ns
            self._last_ns = max(self._last_ns, ts_ns)
        for tag, value in of.items():
            add = self._of_field.get(tag)
            if add is not None:
                for part in parts_of(value):
                    add(part, ts_ns, sequence)
            elif tag not in _PASSED_OVER:
                has_room = len(self._not_read) < _KINDS_MAX or tag >> 3 in self._not_read
                self._not_read[tag >> 3 if has_room else _OTHERS] += 1

    def _change(self, of: dict[int, Any], sequence: Sequence) -> None:
        """Read the fields of a packet about its sequence. Raises WireError."""
        if of.get(_FLAGS, 0) & _IS_CLEARED or of.get(_CLEARED, 0):
            self._sequences.clear(sequence)
        elif of.get(_DROPPED, 0) and sequence.is_begun:
            sequence.is_valid = False
            reason = f"packets of sequence {sequence.id & 0xFFFFFFFF} were dropped: how many is not known"
            self._losses.add(sequence.last_ns, max(sequence.last_ns, self._last_ns), reason)
        for part in parts_of(of.get(_DEFAULTS, ())):
            sequence.defaults = defaults_of(part)
        for part in parts_of(of.get(_INTERNED, ())):
            self._sequences.intern(sequence, part)

    def _ftrace(self, data: bytes) -> None:
        lost = self._scheduling.add_bundle(data)
        if lost is not None:
            self._losses.add(lost[0], lost[1], "ftrace's buffer was full: how many is not known", lost[2])

    def _track(self, data: bytes, ts_ns: int, sequence: Sequence) -> None:
        """Read a track. The last one of a thread has the events of the sequence that name no track."""
        thread = self._tracks.describe(data)
        if thread is not None and sequence.is_valid:
            sequence.thread = thread

    def _thread(self, data: bytes, ts_ns: int, sequence: Sequence) -> None:
        """Read the thread that writes a sequence, as older traces state it."""
        thread = Descriptor()
        self._tracks.describe_thread(data, thread)
        assert thread.pid is not None and thread.tid is not None
        sequence.thread = self._tracks.thread(thread.pid, thread.tid)
        reference = next((value for tag, value in tagged(data) if tag == 6 << 3), None)
        sequence.time_ns = None if reference is None else signed(reference) * 1000

    def _tree(self, data: bytes, ts_ns: int, *, is_linux: bool) -> None:
        """Read the names of processes and threads of the machine: {1 processes {1 pid  2 parent  3 words…}
        2 threads {1 tid  2 name  3 pid}}. Other kernels have one text of words, and 2 pid  3 name.
        """
        pid_field, name_field = (3, 2) if is_linux else (2, 3)
        for tag, value in tagged(data):
            if tag not in (1 << 3 | BYTES, 2 << 3 | BYTES):
                continue
            inner = tagged(value)
            fields, first = dict(inner), dict(inner[::-1])
            id = signed(first.get(1 << 3, 0))
            if tag == 1 << 3 | BYTES:
                parent = signed(first.get(2 << 3, 0))
                if is_linux and parent > 0:  # is a process, and has a main thread
                    self._tracks.name_process(parent, "", ts_ns, has_main=True)
                word = first.get(3 << 3 | BYTES, b"").decode("utf-8", "replace")
                word = (word if is_linux else word.partition(" ")[0]).rpartition("/")[2]
                self._tracks.name_process(id, word, ts_ns, has_main=is_linux)
            else:
                name = fields.get(name_field << 3 | BYTES, b"").decode("utf-8", "replace")
                pid = signed(fields.get(pid_field << 3, 0))
                self._tracks.name_thread(pid, id, name, ts_ns, has_main=is_linux)

    # Batches --------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[SourceBatch]:
        """The events in the order of time."""
        core = None if self._core is None else self._core.core
        of = self._tracks, self._submissions
        ordered = Ordered(*of) if core is None else NativeOrdered(*of, core)
        problems = self._problems.pop()
        others: list[Any] = [*self._tracks.name_records(), *self._losses.records(self._tracks)]
        for rows in self._sorted.rows.in_order():
            events = ordered.events(rows)
            others += ordered.losses
            ordered.losses.clear()
            columns = self._sorted.columns(events, events.ts_ns)
            yield SourceBatch(with_others(columns, others), Others(others), problems)
            others, problems = [], []
        others += self._tracks.main_records()
        yield SourceBatch(
            with_others(no_events(), others), Others(others), [*problems, *self._last_problems(ordered)]
        )

    def _last_problems(self, ordered: Ordered) -> Iterator[Problem]:
        """The problems of the whole trace."""
        yield from self._problems.rest("packet|packets cannot be read")
        yield from self._tracks.problems()
        yield from counted_problems(self._counted)
        for machine, count in self._unrelated.items():
            words = f"{count} {agree(count, 'packet|packets')}{self._tracks.host(machine)}"
            words += ": its clock is not related to that of the others, and is taken for the same"
            if count and self._tracks.are_several:
                yield Problem(0, "", words, skipped=False)
        for of in (self._scheduling, self._stages, self._counters, ordered.threads, self._events, ordered):
            left_out = {f"{words}: it|they is|are left out": count for words, count in of.counted.items()}
            yield from counted_problems(left_out)
        arguments, too_many = self._events.arguments, "is|are left out: there are more than can be kept"
        yield from counted_problems(
            {
                "argument|arguments is|are left out: an event has more than can be kept": arguments.left_out,
                "name|names by number is|are not in the trace": arguments.unnamed,
                f"name|names or sequence|sequences {too_many}": self._sequences.left_out,
                f"track|tracks, process|processes or thread|threads {too_many}": self._tracks.left_out,
                "track|tracks with events is|are not described": self._tracks.unknown,
                f"clock reading|readings {too_many}": self._clocks.left_out,
                f"begin|begins, end|ends or name|names of tasks {too_many}": self._tracks.lives.left_out,
                f"id|ids of stages of GPUs {too_many}": self._submissions.left_out,
            }
        )
        if self._not_read:
            kinds = ", ".join(
                f"{count} {_TITLES.get(field, f'of field {field}')}"
                for field, count in sorted(self._not_read.items(), key=lambda one: -one[1])[:32]
            )
            yield Problem(0, "", f"packets of these kinds are not read: {kinds}", skipped=False)


def read(stream: BinaryIO) -> Recording:
    """The recording in such a stream."""
    return _Trace(stream).recording()
