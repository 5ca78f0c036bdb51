"""The event file `tracepipe/1`: every record of it, and the types that all stages share.

One JSON object a line. The first line is a `Header`, the last a `Footer` (a file without one is a capture
that was cut off, and is still read); between them events, warp batches, clock pairs and losses, distinguished
by `type`. Header and footer become objects; the other records are plain dicts, as a parser gives them. The
classes state their fields, and `schemas/event.schema.json` and the checks in `checks.py` are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Final, NewType, TypedDict, TypeVar

from tracepipe.launchers import RANK_MAX
from tracepipe.units import counted

SCHEMA_VERSION: Final = "tracepipe/1"

SourceNs = NewType("SourceNs", int)
"""Nanoseconds on the clock that an event was recorded with."""
TraceNs = NewType("TraceNs", int)
"""Nanoseconds on the trace's one clock. Only `clocks/` makes these."""

# Layers, outermost first: the order in which they are drawn and counted.
LAYERS: Final = (
    "annotation",
    "userspace",
    "hook",
    "syscall",
    "kernel",
    "scheduler",
    "host_sample",
    "memory",
    "transfer",
    "gpu_kernel",
    "gpu_warp",
    "gpu_thread",
)
HOST_LAYERS: Final = frozenset(
    {"annotation", "userspace", "hook", "syscall", "kernel", "scheduler", "host_sample", "memory", "transfer"}
)
COUNTS: Final = "C"
"""The phase of an event that has values of counters: `args` has them by the names of series."""
FLOW_PHASES: Final = ("s", "t", "f")
"""The phases of an event that is an end of a flow: the flow starts, continues, ends."""
NO_SLICES: Final = (COUNTS, *FLOW_PHASES)
PHASES: Final = ("B", "E", "I", "X", *NO_SLICES)
STALLS: Final = ("gpu_stall", "gpu_stall_pc")
"""The types of records that are samples of what warps waited for."""
MONOTONIC: Final = "monotonic"
HOST_CLOCKS: Final = ("monotonic", "boottime", "realtime")
GLOBALTIMER: Final = "globaltimer:"
"""How the name of a GPU's clock begins; the GPU's index follows."""
_NAMED: Final = 5  # processes in a sentence


@dataclass(frozen=True, slots=True)
class Doc:
    """The meaning of a field, and the bounds that its type cannot say."""

    text: str
    minimum: int | None = None
    maximum: int | None = None
    enum: tuple[str, ...] = ()
    length: int | None = None
    is_required: bool = False


Need: Final = partial(Doc, is_required=True)
"""The meaning of a field without which a record is invalid."""
Record = dict[str, Any]
"""A validated line: an `Event`, `WarpBatch`, `ClockRecord`, `LossRecord`, `WindowRecord`, `NameRecord`,
`StallRecord`, `InstructionStallRecord` or that of a `Footer`, distinguished by `type`.
"""
Column = list[int]
# Perfetto's times are signed 64-bit; half of that leaves room for a start plus a duration (146 years).
TIME_LIMIT_NS: Final = (1 << 62) - 1
# An entry and an exit are each added to a time: both of 36 years still fit.
OFFSET_LIMIT_NS: Final = 1 << 60
# pid_t is signed and has 32 bits, in Linux and in Perfetto.
ID_LIMIT: Final = (1 << 31) - 1
# The largest block index of CUDA, in x; indices of threads are kept with 32 bits.
INDEX_LIMIT: Final = (1 << 31) - 1
# The hardware of today has below 200 SMs and 64 slots on each; tracks are kept and ordered by both numbers.
SM_LIMIT: Final = (1 << 16) - 1
SLOT_LIMIT: Final = (1 << 12) - 1
# Ranges of a process that are open at a time have a track each.
RANGE_LIMIT: Final = (1 << 12) - 1
# This is a billion events a second for three days. Sums over a file stay within 64 bits.
COUNT_LIMIT: Final = (1 << 48) - 1
MASK_LIMIT: Final = (1 << 32) - 1
AUTOGRAD: Final = "autograd (line not known)"
"""The function of the only frame of a stack on a thread of autograd, which runs no Python."""
# Longer texts are cut, but not those in arguments. The name of the kernel of torch.randn has 5,050 bytes.
NAME_BYTES_MAX: Final = 1 << 14
# A recording has fewer processes and threads.
ORDER_LIMIT: Final = (1 << 21) - 1
# One more bit is used in the numbers made from it, which JavaScript must still represent exactly.
FLOW_LIMIT: Final = (1 << 52) - 1
# Columns of warps are 64-bit and signed.
COLUMN_LIMIT: Final = (1 << 63) - 1


def cut_text(text: str, most: int = NAME_BYTES_MAX) -> str:
    """A text, cut to `most` bytes of UTF-8."""
    if len(text) <= most // 4:
        return text
    whole = text.encode("utf-8", "replace")
    return text if len(whole) <= most else whole[:most].decode("utf-8", "ignore")


class HostInstant(TypedDict, total=False):
    """One instant read on the host's clocks, ns each."""

    monotonic_ns: Annotated[int, Doc("CLOCK_MONOTONIC", 0, TIME_LIMIT_NS)]
    boottime_ns: Annotated[int, Doc("CLOCK_BOOTTIME", 0, TIME_LIMIT_NS)]
    realtime_ns: Annotated[int, Doc("CLOCK_REALTIME, since the epoch", 0, TIME_LIMIT_NS)]


_Object = TypeVar("_Object", bound="JsonObject")
_ABSENT: Final[tuple[object, ...]] = (None, "", [], {})


@dataclass(slots=True, kw_only=True)
class JsonObject:
    """A JSON object with typed fields, of which absent ones are empty or None."""

    as_read: Record = field(default_factory=dict, repr=False)
    """The object in the file, with the fields of newer versions. Empty if it was not read from a file."""

    WRITTEN_EMPTY: ClassVar[tuple[str, ...]] = ()
    """Fields that a record has although they are empty."""

    @classmethod
    def from_record(cls: type[_Object], record: Record) -> _Object:
        """The object that a record states, which the checks of `checks.py` accept."""
        known = {name: record[name] for name in cls.__annotations__ if name in record}
        if "layers" in known:
            known["layers"] = Layers.from_record(known["layers"])
        return cls(as_read=record, **known)

    @property
    def is_read(self) -> bool:
        """Whether a file has it."""
        return bool(self.as_read)

    def to_record(self) -> Record:
        """The record of the object: that in the file, with the fields that were set since."""
        record = dict(self.as_read)
        for name in type(self).__annotations__:
            value = getattr(self, name)
            value = value.to_record() if isinstance(value, JsonObject) else value
            if value not in _ABSENT or name in record or name in self.WRITTEN_EMPTY:
                record[name] = value
        return record


def _reading_ns(instant: HostInstant, clock: str) -> int | None:
    reading = instant.get(f"{clock}_ns")
    return reading if isinstance(reading, int) else None


@dataclass(slots=True, kw_only=True)
class Layers(JsonObject):
    """Which layers a capture was asked for and which it got."""

    asked: Annotated[list[str], Doc("layers asked for")] = field(default_factory=list)
    got: Annotated[list[str], Doc("layers that were recorded")] = field(default_factory=list)
    missing: Annotated[dict[str, Any], Doc("layer → why it was not recorded")] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Header(JsonObject):
    """First line of a file: where, when and how it was recorded."""

    type: Annotated[str, Need("record type", enum=("header",))] = "header"
    schema: Annotated[str, Need("version of this format", enum=(SCHEMA_VERSION,))] = SCHEMA_VERSION
    tool: Annotated[str, Doc("program and version that wrote the file")] = ""
    host: Annotated[str, Doc("host name")] = ""
    boot: Annotated[
        str, Doc("id of the host's boot: the same in files whose clocks count from the same boot")
    ] = ""
    kernel: Annotated[str, Doc("kernel release")] = ""
    machine: Annotated[str, Doc("processor architecture")] = ""
    command: Annotated[list[str], Doc("command that was traced")] = field(default_factory=list)
    rank: Annotated[int | None, Doc("rank of its process in a job of several", 0, RANK_MAX)] = None
    world_size: Annotated[int | None, Doc("ranks that the job has", 1, RANK_MAX + 1)] = None
    engine: Annotated[str, Doc("capture engine, with version")] = ""
    clock: Annotated[str, Doc("clock of every ts_ns that names none; monotonic if absent")] = ""
    clocks: Annotated[list[str], Doc("every clock that a ts_ns of this file is on")] = field(
        default_factory=list
    )
    start: Annotated[HostInstant, Doc("start of the capture on each host clock")] = field(
        default_factory=HostInstant
    )
    clock_pairs: Annotated[list[dict[str, Any]], Doc("clock records known at the start")] = field(
        default_factory=list
    )
    layers: Annotated[Layers, Doc("layers asked for and got")] = field(default_factory=Layers)
    options: Annotated[dict[str, Any], Doc("the capture's options that differ from the defaults")] = field(
        default_factory=dict
    )
    gpus: Annotated[
        list[dict[str, Any]], Doc("the host's GPUs: index, name, uuid, sm_count, limits of an SM")
    ] = field(default_factory=list)
    counters: Annotated[list[dict[str, Any]], Doc("counters: gpu, name, unit, metric, interval_ns, max")] = (
        field(default_factory=list)
    )

    @property
    def default_clock(self) -> str:
        """The clock of times that name none."""
        return self.clock or MONOTONIC

    @property
    def declared_clocks(self) -> list[str]:
        """The clocks that times are on."""
        return self.clocks or [self.default_clock]

    def start_ns(self, clock: str) -> int | None:
        """The reading of a host clock at the start; None where it is not known."""
        return _reading_ns(self.start, clock)


class Event(TypedDict, total=False):
    """One event of one layer."""

    type: Annotated[str, Need("layer", enum=tuple(name for name in LAYERS if name != "gpu_warp"))]
    name: Annotated[str, Need("function, syscall, kernel or operation")]
    phase: Annotated[
        str,
        Need(
            "B begin, E end, I instant, X complete with dur_ns; C values of counters; ends of a flow: "
            "s starts, t continues, f ends",
            enum=PHASES,
        ),
    ]
    ts_ns: Annotated[int, Need("time of the event on `clock`; the start of an X", 0, TIME_LIMIT_NS)]
    dur_ns: Annotated[
        int, Doc("duration: always with X, and on an E whose B may be missing", 0, TIME_LIMIT_NS)
    ]
    pid: Annotated[int, Doc("process id", 0, ID_LIMIT)]
    tid: Annotated[int, Doc("thread id", 0, ID_LIMIT)]
    cpu: Annotated[int, Doc("processor it happened on", 0)]
    comm: Annotated[str, Doc("thread name at that time")]
    clock: Annotated[str, Doc("clock of ts_ns, if not the header's")]
    domain: Annotated[str, Doc("annotation: NVTX domain, absent for the default one")]
    range: Annotated[
        int,
        Doc(
            "annotation: number of a range of the process (not of a thread) among the open ones",
            minimum=0,
            maximum=RANGE_LIMIT,
        ),
    ]
    gpu: Annotated[int, Doc("GPU index", 0)]
    stream: Annotated[int, Doc("CUDA stream id", 0)]
    launch: Annotated[int, Doc("launch id: the same on the launch call, the kernel and its warps", 0)]
    flow: Annotated[int, Doc("s, t and f: the flow, the same number on all its ends", 0, FLOW_LIMIT)]
    grid: Annotated[list[int], Doc("blocks in x, y, z", 0, length=3)]
    block: Annotated[
        list[int], Doc("gpu_kernel: threads a block; gpu_thread: block index", 0, INDEX_LIMIT, length=3)
    ]
    thread: Annotated[list[int], Doc("gpu_thread: thread index in its block", 0, INDEX_LIMIT, length=3)]
    layer: Annotated[str, Doc("hook: the layer's own name, which the hook states, or that of its file")]
    stack: Annotated[int, Doc("id of the stack that called it, or captured it in a graph", 0, COLUMN_LIMIT)]
    args: Annotated[dict[str, Any], Doc("arguments, results and whatever else is known")]


class ThreadExit(TypedDict, total=False):
    """A thread of a GPU that left its kernel: read as a `gpu_thread` with phase I and the event `exit`."""

    type: Annotated[str, Need("record type", enum=("gpu_thread_exit",))]
    ts_ns: Annotated[int, Need("when the thread left, on `clock`", 0, TIME_LIMIT_NS)]
    name: Annotated[str, Doc("kernel, if it is known")]
    pid: Annotated[int, Doc("process id", 0, ID_LIMIT)]
    tid: Annotated[int, Doc("thread id", 0, ID_LIMIT)]
    cpu: Annotated[int, Doc("processor that wrote it", 0)]
    comm: Annotated[str, Doc("thread name at that time")]
    clock: Annotated[str, Doc("clock of ts_ns, if not the header's")]
    gpu: Annotated[int, Doc("GPU index", 0)]
    launch: Annotated[int, Doc("launch id", 0)]
    block: Annotated[list[int], Doc("block index", 0, INDEX_LIMIT, length=3)]
    thread: Annotated[list[int], Doc("thread index in its block", 0, INDEX_LIMIT, length=3)]
    args: Annotated[dict[str, Any], Doc("whatever else is known")]


class WarpBatch(TypedDict, total=False):
    """Warps of one launch, as columns: all of them, or some thousands. A launch may fill several batches.

    `warp`, `sm`, `slot`, `entry_ns`, `entry_clk`, `entry_mask` have a value for each warp; `exit_ns`,
    `exit_clk`, `exit_mask` one for each exit, warp after warp, `exit_count` of them for each warp (1 each
    where that column is absent). A warp with no exit was running when the record ended.

    Ranges show what a warp did: `range_name`, `range_clk`, `range_dur_clk` and `range_open` have a value for
    each range, warp after warp, `range_count` of them for each warp, in the order of their begins, an outer
    range before those in it. Ranges are between the warp's entry and its last exit, in cycles of its SM.
    """

    type: Annotated[str, Need("record type", enum=("gpu_warp",))]
    name: Annotated[str, Need("kernel name")]
    ts_ns: Annotated[int, Need("base of entry_ns, on `clock`", 0, TIME_LIMIT_NS)]
    warp: Annotated[Column, Need("linear block index × warps a block + warp in its block", 0, COLUMN_LIMIT)]
    entry_ns: Annotated[Column, Need("%globaltimer at entry, after ts_ns", 0, OFFSET_LIMIT_NS)]
    exit_ns: Annotated[Column, Need("%globaltimer at each exit, after that warp's entry", 0, OFFSET_LIMIT_NS)]
    clock: Annotated[str, Doc("clock of ts_ns, globaltimer:N of GPU N")]
    gpu: Annotated[int, Doc("GPU index", 0)]
    stream: Annotated[int, Doc("CUDA stream id", 0)]
    launch: Annotated[int, Doc("launch id", 0)]
    pid: Annotated[int, Doc("process that launched it", 0, ID_LIMIT)]
    grid: Annotated[list[int], Doc("blocks in x, y, z", 0, length=3)]
    block: Annotated[list[int], Doc("threads a block in x, y, z", 0, length=3)]
    sm: Annotated[Column, Doc("%smid", 0, SM_LIMIT)]
    slot: Annotated[Column, Doc("%warpid, the hardware slot on the SM", 0, SLOT_LIMIT)]
    entry_clk: Annotated[Column, Doc("%clock64 of the SM at entry, cycles", 0, COLUMN_LIMIT)]
    entry_mask: Annotated[Column, Doc("lanes active at entry; all 32 if absent", 0, MASK_LIMIT)]
    exit_count: Annotated[Column, Doc("exits of each warp; 1 each if absent", 0, MASK_LIMIT)]
    exit_clk: Annotated[Column, Doc("%clock64 at each exit, cycles after that warp's entry", 0, COLUMN_LIMIT)]
    exit_mask: Annotated[Column, Doc("lanes that left at each exit", 0, MASK_LIMIT)]
    ranges: Annotated[list[str], Doc("names of ranges, which range_name counts from 0")]
    range_count: Annotated[Column, Doc("ranges of each warp; none if absent", 0, MASK_LIMIT)]
    range_name: Annotated[Column, Doc("place of its name in ranges", 0, INDEX_LIMIT)]
    range_clk: Annotated[
        Column, Doc("%clock64 at its begin, cycles after that warp's entry", 0, COLUMN_LIMIT)
    ]
    range_dur_clk: Annotated[
        Column, Doc("cycles until it ended, or until the last exit if open", 0, COLUMN_LIMIT)
    ]
    range_open: Annotated[Column, Doc("1 if its end is not known; 0 each if absent", 0, 1)]
    args: Annotated[dict[str, Any], Doc("whatever else is known of the launch")]


class Frame(TypedDict, total=False):
    """One frame of a stack."""

    function: Annotated[str, Need("function, without its module")]
    file: Annotated[str, Doc("path of its source")]
    line: Annotated[int, Doc("line in it that was running", 0, INDEX_LIMIT)]


class StackRecord(TypedDict, total=False):
    """A Python stack. It comes before the first event that refers to it."""

    type: Annotated[str, Need("record type", enum=("stack",))]
    id: Annotated[int, Need("the `stack` of events; unique in the file", 0, COLUMN_LIMIT)]
    frames: Annotated[list[Frame], Need("innermost first")]
    omitted: Annotated[int, Doc("frames left out at the outer end", 0, COUNT_LIMIT)]


class NameRecord(TypedDict, total=False):
    """The name of a process, or with `tid` of a thread, and its place among the others."""

    type: Annotated[str, Need("record type", enum=("name",))]
    pid: Annotated[int, Need("process id", 0, ID_LIMIT)]
    tid: Annotated[int, Doc("thread id", 0, ID_LIMIT)]
    name: Annotated[str, Doc("its name")]
    order: Annotated[int, Doc("its place among the others, the smallest first", 0, ORDER_LIMIT)]


class ClockRecord(TypedDict, total=False):
    """A clock pair: `clock` showed `source_ns` when CLOCK_MONOTONIC was within [host_lo_ns, host_hi_ns]."""

    type: Annotated[str, Need("record type", enum=("clock",))]
    clock: Annotated[str, Need("the source clock")]
    source_ns: Annotated[int, Need("reading of the source clock", 0, TIME_LIMIT_NS)]
    host_lo_ns: Annotated[int, Need("CLOCK_MONOTONIC before the reading", 0, TIME_LIMIT_NS)]
    host_hi_ns: Annotated[int, Need("CLOCK_MONOTONIC after the reading", 0, TIME_LIMIT_NS)]


class LossRecord(TypedDict, total=False):
    """Events that happened and were not recorded, between `ts_ns` and `ts_ns` + `dur_ns`."""

    type: Annotated[str, Need("record type", enum=("loss",))]
    count: Annotated[int, Need("events lost", 0, COUNT_LIMIT)]
    layer: Annotated[str, Doc("layer of the lost events; absent if unknown")]
    ts_ns: Annotated[
        int, Doc("start of the loss; absent: where the record stands in the file", 0, TIME_LIMIT_NS)
    ]
    dur_ns: Annotated[int, Doc("length of the loss", 0, TIME_LIMIT_NS)]
    clock: Annotated[str, Doc("clock of ts_ns, if not the header's")]
    cpu: Annotated[int, Doc("processor whose buffer was full", 0)]
    reason: Annotated[str, Doc("what was full or failed")]


class WindowRecord(TypedDict, total=False):
    """Where a window begins or ends. A recording that has windows has events only in them."""

    type: Annotated[str, Need("record type", enum=("window",))]
    phase: Annotated[str, Need("B: events are recorded from here on; E: no more", enum=("B", "E"))]
    ts_ns: Annotated[int, Need("time on `clock`", 0, TIME_LIMIT_NS)]
    window: Annotated[int, Doc("its number, from 1", 1, COUNT_LIMIT)]
    name: Annotated[str, Doc("the name that the program gave it")]
    cause: Annotated[str, Doc("what began it or ended it: profiler, signal, duration, …")]
    pid: Annotated[int, Doc("process that caused it", 0, ID_LIMIT)]
    tid: Annotated[int, Doc("thread that caused it", 0, ID_LIMIT)]
    waited_ns: Annotated[int, Doc("how long before ts_ns it was due", 0, TIME_LIMIT_NS)]
    clock: Annotated[str, Doc("clock of ts_ns, if not the header's")]


@dataclass(slots=True, kw_only=True)
class Footer(JsonObject):
    """Last line of a file: how many events it has and how many were lost."""

    type: Annotated[str, Need("record type", enum=("footer",))] = "footer"
    counts: Annotated[
        dict[str, int], Need("layer → events in this file; a warp counts one", 0, COUNT_LIMIT)
    ] = field(default_factory=dict)
    losses: Annotated[dict[str, int], Need("layer → events lost", 0, COUNT_LIMIT)] = field(
        default_factory=dict
    )
    end: Annotated[HostInstant, Doc("end of the capture on each host clock")] = field(
        default_factory=HostInstant
    )
    ended_by: Annotated[str, Doc("why it ended: exit 0, signal 11, interrupt, duration, …")] = ""
    gpus: Annotated[
        list[dict[str, Any]], Doc("the GPUs that had events: index, name, uuid, sm_count, limits of an SM")
    ] = field(default_factory=list)
    sampling: Annotated[
        list[dict[str, Any]],
        Doc("the processes that sampled counters: gpu, cpu_ns of processor time in elapsed_ns"),
    ] = field(default_factory=list)
    cuda_errors: Annotated[
        list[str],
        Doc("errors that kernels caused: the process, the error, the first launch that did not end"),
    ] = field(default_factory=list)
    cpu_losses: Annotated[dict[str, Any], Doc("layer → processor → events lost, where that is known")] = (
        field(default_factory=dict)
    )
    filtered: Annotated[dict[str, int], Doc("layer → events that a filter left out", 0, COUNT_LIMIT)] = field(
        default_factory=dict
    )
    evicted: Annotated[
        dict[str, int],
        Doc(
            "layer → events of the kept time for which a flight recorder had no room",
            minimum=0,
            maximum=COUNT_LIMIT,
        ),
    ] = field(default_factory=dict)
    running: Annotated[
        int | None, Doc("processes that still ran when what had started them had ended", 0, COUNT_LIMIT)
    ] = None
    running_processes: Annotated[dict[str, str], Doc("the first of them: process → name")] = field(
        default_factory=dict
    )

    WRITTEN_EMPTY = ("counts", "losses")

    def end_ns(self, clock: str) -> int | None:
        """The reading of a host clock at the end; None where it is not known."""
        return _reading_ns(self.end, clock)


def named_processes(count: int, processes: Mapping[str, str]) -> str:
    """The first of so many processes, which are given by number and name."""
    names = [f"{comm} ({pid})" for pid, comm in processes.items()][:_NAMED]
    return ", ".join([*names, "…"] if count > len(names) else names)


def still_running(count: int, processes: Mapping[str, str]) -> str:
    """A sentence about processes that still ran at the end of a recording."""
    started = counted(count, "process|processes that was|were started still runs|run")
    return f"the recording ended while {started}: {named_processes(count, processes)}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that could not be used, or an ambiguity in the input. Writers must show both.

    `line` counts from 1 and is 0 for the whole file. `skipped` says that the event of the line is not in the
    output; otherwise the problem changes how a kept event must be understood.
    """

    line: int
    field: str
    message: str
    skipped: bool = True

    def at(self, path: str) -> str:
        """`run.jsonl:17: field: message`."""
        place = f"{path}:{self.line}" if self.line else path
        return ": ".join(part for part in (place, self.field, self.message) if part)


class _Samples(TypedDict, total=False):
    ts_ns: Annotated[int, Need("start of the stretch, on `clock`", 0, TIME_LIMIT_NS)]
    functions: Annotated[list[str], Need("names of functions, which function counts from 0")]
    reasons: Annotated[list[str], Need("names of stall reasons, which reason counts from 0")]
    function: Annotated[Column, Need("place of its name in functions", 0, INDEX_LIMIT)]
    reason: Annotated[Column, Need("place of its name in reasons", 0, INDEX_LIMIT)]
    samples: Annotated[Column, Need("how many samples", 0, COUNT_LIMIT)]
    dur_ns: Annotated[int, Doc("length of the stretch", 0, TIME_LIMIT_NS)]
    clock: Annotated[str, Doc("clock of ts_ns, if not the header's")]
    gpu: Annotated[int, Doc("GPU index", 0)]
    pid: Annotated[int, Doc("process whose kernels were sampled", 0, ID_LIMIT)]
    period_cycles: Annotated[int, Doc("cycles of an SM between two samples", 1, COUNT_LIMIT)]


class StallRecord(_Samples, total=False):
    """Samples of what warps waited for, of one process on one GPU in a stretch of time. `function`, `reason`
    and `samples` have a value for each pair that was sampled. Empty columns state that nothing is sampled
    from `ts_ns` on.
    """

    type: Annotated[str, Need("record type", enum=("gpu_stall",))]


class InstructionStallRecord(_Samples, total=False):
    """Samples of a stretch by instruction: the same samples as in `gpu_stall`.

    `function`, `reason`, `samples` and `offset` have a value for each; so has `line` where lines of the
    source are known.
    """

    modules: Annotated[list[str], Doc("of each function, the CRC of its module's machine code")]
    lines: Annotated[list[str], Doc("lines of the source as FILE:LINE, which line counts from 1")]
    line: Annotated[Column, Doc("place in lines, from 1; 0: it is not known", 0, INDEX_LIMIT)]
    type: Annotated[str, Need("record type", enum=("gpu_stall_pc",))]
    offset: Annotated[Column, Need("of the instruction in its function, bytes", 0, COLUMN_LIMIT)]


RECORDS: Final[dict[str, type]] = {
    "header": Header,
    "clock": ClockRecord,
    "loss": LossRecord,
    "window": WindowRecord,
    "stack": StackRecord,
    "name": NameRecord,
    "gpu_warp": WarpBatch,
    "gpu_thread_exit": ThreadExit,
    "gpu_stall": StallRecord,
    "gpu_stall_pc": InstructionStallRecord,
    "footer": Footer,
    **{name: Event for name in LAYERS if name != "gpu_warp"},
}
OTHERS: Final = frozenset(name for name, record in RECORDS.items() if record is not Event)
"""Types of records that are not events of a thread, a stream or a lane, or that become an event of another
type."""
