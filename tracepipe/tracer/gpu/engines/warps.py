"""Entry and exits of each warp, recorded by a library with the Compute Sanitizer API.

The CUDA driver loads the library into the command (`native/warps.cpp` describes how it works). It needs
neither root nor PTX nor a changed program.
"""

from __future__ import annotations

import json
import re
import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, Final, NamedTuple

from tracepipe.errors import CaptureUnavailable
from tracepipe.event.bounded import put_bounded
from tracepipe.event.model import (
    COLUMN_LIMIT,
    COUNT_LIMIT,
    INDEX_LIMIT,
    MASK_LIMIT,
    OFFSET_LIMIT_NS,
    SLOT_LIMIT,
    SM_LIMIT,
    TIME_LIMIT_NS,
)
from tracepipe.hooks.names import near_names
from tracepipe.printable import printable
from tracepipe.tracer.gpu import choice
from tracepipe.tracer.gpu.build.toolchain import NATIVE, Toolchain
from tracepipe.tracer.gpu.engines.api_calls import (
    ARGUMENTS_VARIABLE,
    CALL_ENTER,
    CALL_EXIT,
    ApiCalls,
    CallLines,
    write_table,
)
from tracepipe.tracer.gpu.engines.channel import (
    ENTRY_BYTES,
    INJECTION_VARIABLE,
    NAME,
    PROCESS_BYTES,
    GpuRecord,
    Kind,
    Malformed,
    MemoryLimit,
    read_name,
)
from tracepipe.tracer.gpu.engines.failures import UnendedLaunch
from tracepipe.tracer.gpu.engines.streams import (
    Decoder,
    Finder,
    Keeper,
    OpenSpan,
    Process,
    ProcessDecoder,
    Recording,
    RecordStream,
    WantedName,
)
from tracepipe.tracer.records.effects import OPEN_CALLS_MAX
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.unrendered import KERNEL as KERNEL_SPAN
from tracepipe.tracer.records.unrendered import Carried, Span
from tracepipe.tracer.request import CaptureRequest


class WarpKind(IntEnum):
    """Kinds of the records."""

    WARPS = 16
    KERNEL = 17
    CALL_ENTER = 18
    CALL_EXIT = 19
    LOST_WARPS = 20
    MET = 21
    MET_CALLED = 22


CLOCK: Final = struct.Struct("<IxxxxQQQ")
LOST_WARPS: Final = struct.Struct("<QIIQ")  # launch, gpu, why, warps
KERNEL: Final = struct.Struct("<QQQI3I3I3IQIIQQQQQIIQ")
_BY_GRAPH: Final = 1
_NO_STACK_AT_CAPTURE: Final = 2  # of native/captured_graphs.h
WARPS: Final = struct.Struct("<QQIIIxxxx")  # launch, base_ns, warps, exits, columns
COLUMN: Final = struct.Struct("<BBxxI")  # id, bytes a value, values

LOST_WHY: Final = {
    1: "no memory on the GPU for its records",
    2: "the context failed before the records were read",
    3: "the process ended first",
    4: "the launch is over and these warps wrote nothing",
    5: "no room was left for the exits of warps that diverge",
    7: "the budget of --gpu-warps was used up",
    8: "the kernel launches kernels, and Compute Sanitizer does not see their entries",
    9: "the node runs on another GPU than the first node of its graph",
    10: "its module was loaded while a stream was captured",
    11: "marks were overwritten before they were read, or end a range that did not begin",
}
# Column → its name, and the greatest value in it.
_COLUMNS: Final = {
    1: ("warp", COLUMN_LIMIT),
    2: ("sm", SM_LIMIT),
    3: ("slot", SLOT_LIMIT),
    4: ("entry_ns", OFFSET_LIMIT_NS),
    5: ("entry_clk", COLUMN_LIMIT),
    6: ("entry_mask", MASK_LIMIT),
    7: ("exit_count", MASK_LIMIT),
    8: ("exit_ns", OFFSET_LIMIT_NS),
    9: ("exit_clk", COLUMN_LIMIT),
    10: ("exit_mask", MASK_LIMIT),
    11: ("first_warp", COLUMN_LIMIT - MASK_LIMIT),  # MASK_LIMIT warps may follow it
    12: ("range_count", MASK_LIMIT),
    13: ("range_name", (1 << 64) - 1),  # the number of a name in the process
    14: ("range_clk", COLUMN_LIMIT),
    15: ("range_dur_clk", COLUMN_LIMIT),
    16: ("range_open", 1),
}
COLUMN_NAMES: Final = {number: name for number, (name, _) in _COLUMNS.items()}
LAUNCHED_BY: Final = ("", "graph", "kernel")
_TYPES: Final = {2: "H", 4: "I", 8: "Q"}  # width in bytes → array's type of a column
_NEEDED: Final = {"warp", "entry_ns", "exit_ns"}
_OF_EXITS: Final = ("exit_ns", "exit_clk", "exit_mask")
_OF_RANGES: Final = ("range_name", "range_clk", "range_dur_clk", "range_open")
MARKS_LOST: Final = 11
_CONTEXT_FAILED: Final = 2
_LAUNCHES_MAX: Final = 1 << 14
"""The number of launches whose stacks are remembered."""


class Kernel(NamedTuple):
    """A launch that has ended. Of its `warps`, `begun` were recorded, `whole` with the exit of every lane.

    `call_ns` is CLOCK_MONOTONIC, `start_ns` and `end_ns` the GPU's clock; `launched_by` indexes LAUNCHED_BY.
    `registers` are those of a thread, 0 where neither they nor the static shared memory are known. `stack` is
    that of the capture, if a graph launched it.
    """

    launch: int
    name: int
    stream: int
    gpu: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    call_ns: int
    call_tid: int
    launched_by: int
    start_ns: int
    end_ns: int
    warps: int
    begun: int
    whole: int
    registers: int
    static_shared_bytes: int
    stack: int


def read_kernel(payload: memoryview) -> Kernel:
    """The payload of a launch's record. Raises Malformed."""
    v = KERNEL.unpack_from(payload)
    kernel = Kernel._make((*v[:4], v[4:7], v[7:10], v[10:13], *v[13:]))
    if not kernel.start_ns <= kernel.end_ns <= TIME_LIMIT_NS or kernel.launched_by >= len(LAUNCHED_BY):
        raise Malformed
    if max(kernel.block) > INDEX_LIMIT:
        raise Malformed
    return kernel


def read_warp_count(payload: memoryview) -> int:
    """The number of warps in a batch, at most its number of bytes, whatever it states."""
    return min(int(WARPS.unpack_from(payload)[2]), len(payload)) if len(payload) >= WARPS.size else 0


def read_warps(payload: memoryview) -> tuple[int, int, int, dict[str, list[int]]]:
    """Launch, base in ns, number of warps, and each column's values. Raises Malformed if inconsistent."""
    launch, base_ns, warps, exits, count = WARPS.unpack_from(payload)
    columns = dict(_columns(payload, count))
    if len(columns.get("first_warp", ())) == 1 and warps == len(columns.get("entry_ns", ())):
        (first,) = columns.pop("first_warp")
        columns = {"warp": list(range(first, first + warps))} | columns
    if base_ns > TIME_LIMIT_NS or not warps or any(name not in columns for name in _NEEDED):
        raise Malformed
    ranges = sum(columns.get("range_count", ()))
    for name, values in columns.items():
        if len(values) != (exits if name in _OF_EXITS else ranges if name in _OF_RANGES else warps):
            raise Malformed
    if exits != (sum(columns["exit_count"]) if "exit_count" in columns else warps):
        raise Malformed
    if ranges and not _are_within(columns):
        raise Malformed
    return launch, base_ns, warps, columns


def _are_within(columns: dict[str, list[int]]) -> bool:
    """Whether the ranges are within the lifetimes of their warps, and in order of their begins."""
    if not columns.keys() >= {"range_name", "range_clk", "range_dur_clk", "exit_clk"}:
        return False
    left, begins, lengths = map(iter, (columns["exit_clk"], columns["range_clk"], columns["range_dur_clk"]))
    exit_counts = columns.get("exit_count") or [1] * len(columns["warp"])
    for ranges, exits in zip(columns["range_count"], exit_counts, strict=True):
        last_clk, before_clk = max(islice(left, exits), default=-1), 0
        for clk in islice(begins, ranges):
            if clk < before_clk or clk + next(lengths) > last_clk:
                return False
            before_clk = clk
    return True


def _columns(payload: memoryview, count: int) -> Iterator[tuple[str, list[int]]]:
    at = WARPS.size + count * COLUMN.size
    if at > len(payload):
        raise Malformed
    for number, width, values in COLUMN.iter_unpack(payload[WARPS.size : at]):
        size_bytes = width * values
        if number not in _COLUMNS or width not in _TYPES or at + size_bytes > len(payload):
            raise Malformed
        column = array(_TYPES[width])
        column.frombytes(payload[at : at + size_bytes])
        name, greatest = _COLUMNS[number]
        if column and greatest >> 8 * width == 0 and max(column) > greatest:
            raise Malformed
        yield name, column.tolist()
        at += (size_bytes + 7) // 8 * 8


_LAYERS: Final[Mapping[int, str]] = {
    WarpKind.WARPS: "gpu_warp",
    WarpKind.KERNEL: "gpu_kernel",
    WarpKind.CALL_ENTER: "userspace",
    WarpKind.CALL_EXIT: "userspace",
}
# Handles of every context's streams: 0 and CU_STREAM_LEGACY are the same, 2 is CU_STREAM_PER_THREAD.
_KNOWN_STREAMS: Final = {0: 0, 1: 0, 2: 2}
_FIRST_OTHER_STREAM: Final = 3
_RANGES: Final = "gpu_range"  # the layer of lost marks
_RANGE_CHARACTERS: Final = 64  # of a name that is not of a mark
_SHOWN_NAME: Final = 200
_CLOCK_PAIRS: Final = 2  # that are carried of each GPU: two define a line


class WarpStream(RecordStream):
    """The warps of a command whose processes load the library; nothing has to be attached to it."""

    name = "sanitizer"
    layers = frozenset({"userspace", "memory", "transfer", "gpu_kernel", "gpu_warp"})
    lost_layers = _LAYERS

    def __init__(
        self,
        library: Path,
        patches: Path,
        request: CaptureRequest,
        gpus: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`library` and `patches` are the built native code, the patches with the request's `warp_defines`.
        `gpus`: those of the machine, in the form of a header. Raises TracepipeError for options that cannot
        be used, CaptureUnavailable.
        """
        choice.check_warps(request)
        self._request = request
        self._library, self._patches, api = library, patches, ApiCalls()
        self.decoders = ProcessDecoder, partial(WarpDecoder, api=api, request=request)
        self.clocks = [f"globaltimer:{gpu['index']}" for gpu in gpus] or ["globaltimer:0"]
        if choice.has_thread_exits(request):
            self.layers |= {"gpu_thread"}
        self._table = write_table(api.table())

    @staticmethod
    def build(toolchain: Toolchain, request: CaptureRequest) -> tuple[Path, Path]:
        """The library and the patches, built if they are not in the cache. Raises CaptureUnavailable."""
        return (
            toolchain.build_host(NATIVE / "warps.cpp", ["sanitizer"]),
            toolchain.build_patches(NATIVE / "patches.cu", defines=choice.warp_defines(request)),
        )

    def environment(self) -> dict[str, str]:
        built = {
            INJECTION_VARIABLE: str(self._library.absolute()),
            "TRACEPIPE_GPU_PATCHES": str(self._patches.absolute()),
            ARGUMENTS_VARIABLE: str(self._table),
        }
        return built | choice.warp_environment(self._request)

    def enter(self, pids: Sequence[int], settings: Mapping[str, str], meanwhile: object) -> None:
        """Raises CaptureUnavailable, as code is patched when a program loads it."""
        raise CaptureUnavailable(
            f"{self.name} cannot record process {pids[0]}, which is already running.",
            "Give a command after --.",
        )

    def close(self) -> None:
        self._table.unlink(missing_ok=True)


class _Work:
    """The GPU work of a traced process: its streams, and the launch to which its warps belong."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.streams = dict(_KNOWN_STREAMS)
        self.launch = 0
        self.of_launch: dict[str, Any] = {}
        self.stacks = OrderedDict[int, int]()
        """The last launches → their stacks."""

    def name(self, number: int) -> str:
        return self.process.names.get(number, f"unknown {number:#x}")


class _WarpKeeper(Keeper):
    """Keeps names, each stream's first launch, which numbers it, and the last launch. Open calls and the last
    clock pairs, which become lines, count as under way.
    """

    def __init__(self, memory: MemoryLimit, kinds: frozenset[int]) -> None:
        super().__init__(memory, kinds)
        self._launches: dict[int, bytes] = {}

    def carried(self) -> Carried:
        known, under_way = super().carried()
        return Carried(known + b"".join(self._launches.values()), under_way)

    def add(self, record: GpuRecord) -> None:
        if record.kind in (WarpKind.CALL_ENTER, WarpKind.CALL_EXIT):
            if (record.tid,) not in self._under_way:
                self._memory.use(ENTRY_BYTES)
            calls = self._under_way.setdefault((record.tid,), [])
            del calls[: -OPEN_CALLS_MAX + 1]  # the returns of those were lost
            if record.kind == WarpKind.CALL_ENTER:
                calls.append((record.time_ns, record.content))
            elif calls:
                calls.pop()
        elif record.kind == WarpKind.KERNEL:
            stream = read_kernel(record.payload).stream.to_bytes(8, "little")
            if (record.kind, record.pid, stream) not in self._known:
                self._keep(record, stream)
            self._launches[record.pid] = record.content
        elif record.kind == Kind.CLOCK:
            (gpu, *_) = CLOCK.unpack_from(record.payload)
            pairs = self._under_way.setdefault((record.pid, gpu), [])
            pairs.append((record.time_ns, record.content))
            del pairs[:-_CLOCK_PAIRS]
        else:
            super().add(record)


@dataclass(eq=False)
class _WarpFinder(Finder):
    """Finds long kernels and calls, also calls that have not ended."""

    open: dict[tuple[int, int], list[OpenSpan]] = field(default_factory=dict)
    """Process and thread → its open calls."""

    def open_spans(self) -> Iterator[OpenSpan]:
        return chain.from_iterable(self.open.values())

    def spans_in(self, record: GpuRecord) -> Iterator[Span]:
        key, payload = (record.pid, record.tid), record.payload
        if record.kind == WarpKind.KERNEL:
            kernel = read_kernel(payload)
            name, _, limit_ns = self.names.get((record.pid, kernel.name), WantedName(""))
            if limit_ns is not None and kernel.end_ns - kernel.start_ns > limit_ns:
                yield Span(name, kernel.end_ns - kernel.start_ns, KERNEL_SPAN)
        elif record.kind in (WarpKind.CALL_ENTER, WarpKind.CALL_EXIT):
            (number,) = NAME.unpack_from(payload)
            name, limit_ns, _ = self.names.get((record.pid, number), WantedName(""))
            if limit_ns is None:
                return
            if record.kind == WarpKind.CALL_ENTER:
                if key not in self.open:
                    self.memory.use(ENTRY_BYTES)
                calls = self.open.setdefault(key, [])
                del calls[: -OPEN_CALLS_MAX + 1]
                calls.append(OpenSpan(name, record.time_ns, limit_ns))
            elif calls := self.open.get(key, []):
                length_ns = record.time_ns - calls.pop().began_ns
                if length_ns > limit_ns:
                    yield Span(name, length_ns)


class WarpDecoder(Decoder):
    """Makes lines of warps, kernels and calls; lines of threads, if wanted, are in `rest`."""

    kinds = frozenset(WarpKind) | {Kind.CLOCK}
    layers = _LAYERS
    kept = frozenset({WarpKind.MET, WarpKind.MET_CALLED})
    whole = frozenset({WarpKind.WARPS, WarpKind.KERNEL, WarpKind.LOST_WARPS})
    keeper, finder = _WarpKeeper, _WarpFinder

    def __init__(
        self, recording: Recording, api: ApiCalls | None = None, request: CaptureRequest | None = None
    ) -> None:
        """`request` selects kernels and device functions, and asks for the exits of threads."""
        super().__init__(recording)
        request = request or CaptureRequest()
        self._thread_exits = choice.has_thread_exits(request)
        self._batches: list[Mapping[str, Any]] = []
        self._calls = CallLines(api, recording.memory)
        self._kernels = _UnmatchedNames(
            choice.kernel_pattern(request),
            "kernel fits --kernel",
            "the kernels launched were",
            "no kernel was launched",
        )
        self._called = _UnmatchedNames(
            choice.marked(request)[1],
            "function fits --warp-marks",
            "there are",
            "the kernels call none, or all calls are inlined",
        )
        self._work: dict[int, _Work] = {}

    @property
    def last_notes(self) -> list[str]:
        return [*self._kernels.note, *self._called.note]

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        if record.kind == WarpKind.WARPS:
            return _LAYERS[record.kind], read_warp_count(record.payload)
        return super().counted(record)

    def rest(self) -> Iterator[Lines]:
        batches, self._batches = self._batches, []
        for batch in batches:
            for some in thread_lines(batch):
                lines = Lines()
                lines.threads(some)
                yield lines

    def add(self, lines: Lines, record: GpuRecord) -> None:
        kind, payload = record.kind, record.payload
        work = self._work.get(record.pid)
        if work is None:
            process = self._recording.process(record.pid)
            self._recording.memory.use(PROCESS_BYTES)
            work = self._work[record.pid] = _Work(process)
        if kind == WarpKind.CALL_ENTER:
            (number,) = NAME.unpack_from(payload)
            _, launch, kernel, stack, *_ = CALL_ENTER.unpack_from(payload)
            if launch and stack:
                put_bounded(work.stacks, launch, stack, _LAUNCHES_MAX)
            launched = self._recording.short_name(work.name(kernel)) if kernel else ""
            made_at = self._recording.stacks.id_of(record.pid, stack)
            self._recording.stacks.write_new(lines)
            start_ns = self._recording.resumed_ns
            self._calls.enter(lines, record, work.name(number), launched, made_at, start_ns)
        elif kind == WarpKind.CALL_EXIT:
            number, result, *_ = CALL_EXIT.unpack_from(payload)
            self._recording.failures.returned(record.pid, work.name(number), result)
            self._calls.leave(lines, record, work.name(number))
        elif kind == WarpKind.WARPS:
            warps, batch = self._warps(work, payload)
            lines.record(batch, warps)
            if self._thread_exits:
                self._batches.append(batch)
        elif kind == WarpKind.KERNEL:
            event = self._kernel(work, record)
            self._recording.stacks.write_new(lines)
            reason = f"launch {work.launch}: none of its warps was recorded"
            lines.record(event or self._recording.loss("gpu_kernel", 1, reason, record.time_ns))
        elif kind == WarpKind.LOST_WARPS:
            lines.record(self._lost(work, record))
        elif kind == Kind.CLOCK:
            gpu, source_ns, low_ns, high_ns = CLOCK.unpack_from(payload)
            if not low_ns <= high_ns <= TIME_LIMIT_NS or source_ns > TIME_LIMIT_NS:
                raise Malformed
            clock = f"globaltimer:{work.process.gpus.get(gpu, gpu)}"
            pair = {"source_ns": source_ns, "host_lo_ns": low_ns, "host_hi_ns": high_ns}
            lines.record({"type": "clock", "clock": clock, **pair})
        else:
            unmatched = self._kernels if kind == WarpKind.MET else self._called
            fits, name = read_name(payload)
            unmatched.is_matched |= bool(fits)
            short = printable(self._recording.short_name(name))[:_SHOWN_NAME]
            if not fits and short not in unmatched.names:
                self._recording.memory.use(ENTRY_BYTES + len(name))
                unmatched.names[short] = None

    def _kernel(self, work: _Work, record: GpuRecord) -> dict[str, Any] | None:
        """The event of a launch, whose warps follow; None if none of them was recorded."""
        kernel = read_kernel(record.payload)
        gpu = work.process.gpus.get(kernel.gpu, kernel.gpu)
        full_name = work.name(kernel.name)
        if kernel.stream not in work.streams:
            self._recording.memory.use(ENTRY_BYTES)
            work.streams[kernel.stream] = _FIRST_OTHER_STREAM + len(work.streams) - len(_KNOWN_STREAMS)
        work.launch = kernel.launch
        work.of_launch = {
            "name": self._recording.short_name(full_name),
            "clock": f"globaltimer:{gpu}",
            "gpu": gpu,
            "stream": work.streams[kernel.stream],
            "launch": kernel.launch,
            "pid": record.pid,
            "grid": list(kernel.grid),
            "block": list(kernel.block),
        }
        if not kernel.begun:
            return None
        args: dict[str, Any] = {"warps": kernel.begun, "function": full_name}
        if kernel.registers:
            args["registers"] = kernel.registers
            dynamic_bytes = self._calls.shared_bytes.pop(kernel.launch, None)
            if dynamic_bytes is not None:
                args["shared_bytes"] = kernel.static_shared_bytes + dynamic_bytes
        if kernel.cluster not in ((0, 0, 0), (1, 1, 1)):
            args["cluster"] = list(kernel.cluster)
        if kernel.launched_by:
            args["launched_by"] = LAUNCHED_BY[kernel.launched_by]
        if kernel.whole < kernel.warps:
            args["warps_not_whole"] = kernel.warps - kernel.whole
        span = {"type": "gpu_kernel", "phase": "X", "dur_ns": kernel.end_ns - kernel.start_ns}
        event = {"ts_ns": kernel.start_ns, **span, **work.of_launch}
        if kernel.launched_by == _BY_GRAPH:
            number = 0 if kernel.stack == _NO_STACK_AT_CAPTURE else kernel.stack or None
            if (stack := self._recording.stacks.id_of_capture(record.pid, number)) is not None:
                event["stack"] = stack
        return event | {"args": args}

    def _warps(self, work: _Work, payload: memoryview) -> tuple[int, dict[str, Any]]:
        """The number of warps, and their record."""
        launch, base_ns, warps, columns = read_warps(payload)
        of_launch = work.of_launch
        if work.launch != launch:  # its record was lost
            of_launch = {"name": "unknown", "launch": launch}
        if numbers := columns.get("range_name"):
            # Names of device functions are demangled, with parameters; several may have the same short form.
            named = {
                number: self._recording.short_name(work.name(number))[:_RANGE_CHARACTERS]
                for number in numbers
            }
            place = {name: at for at, name in enumerate(dict.fromkeys(named.values()))}
            columns["range_name"] = [place[named[number]] for number in numbers]
            of_launch = {**of_launch, "ranges": list(place)}
        return warps, {"ts_ns": base_ns, "type": "gpu_warp", **of_launch, **columns}

    def _lost(self, work: _Work, record: GpuRecord) -> dict[str, Any]:
        launch, _, why, count = LOST_WARPS.unpack_from(record.payload)
        if count > COUNT_LIMIT:
            raise Malformed
        layer = _RANGES if why == MARKS_LOST else "gpu_warp"
        reason = LOST_WHY.get(why, f"reason {why}")
        if why == _CONTEXT_FAILED:  # they come in order
            kernel = str(work.of_launch["name"]) if work.launch == launch else ""
            place = self._recording.stacks.innermost(record.pid, work.stacks.get(launch, 0))
            self._recording.failures.left(record.pid, UnendedLaunch(launch, kernel, place))
        if launch:  # else the loss is of many launches
            reason = f"launch {launch}: {reason}"
        return self._recording.loss(layer, count, reason, record.time_ns)


_LANES: Final = 32
_THREADS_MAX: Final = 1024
_FULL_MASK: Final = (1 << _LANES) - 1
_WARPS_AT_ONCE: Final = 256
_SHARED: Final = ("clock", "gpu", "launch", "pid")
_END: Final = ',"args":{"event":"exit"}}\n'


def thread_lines(batch: Mapping[str, Any]) -> Iterator[list[str]]:
    """A line for each thread's exit in a record of warps, for a few hundred warps at a time; none if the
    record has no sizes.

    {"ts_ns":1795,"type":"gpu_thread","name":"k","phase":"I","clock":"globaltimer:0","gpu":0,"launch":7,
     "pid":11,"block":[0,0,0],"thread":[31,0,0],"args":{"event":"exit"}}
    """
    grid, block = batch.get("grid", ()), batch.get("block", ())
    threads = block[0] * block[1] * block[2] if block else 0
    # The input is untrusted. No CUDA block has more threads, and every line must be valid.
    if not grid or 0 in grid or max(grid) > INDEX_LIMIT or not 0 < threads <= _THREADS_MAX:
        return
    known = {"type": "gpu_thread", "name": batch["name"], "phase": "I"}
    known |= {name: batch[name] for name in _SHARED if name in batch}
    head = json.dumps(known, separators=(",", ":"))[1:-1]
    # The part of each thread's line that follows the block.
    ends = [f',"thread":{_index(thread, block)}{_END}' for thread in range(threads)]
    warps_a_block = -(-threads // _LANES)
    lines: list[str] = []
    for done, (number, exits) in enumerate(_exits(batch), 1):
        block_number, warp = divmod(number, warps_a_block)
        if block_number >= grid[0] * grid[1] * grid[2]:
            continue
        of_warp = ends[warp * _LANES : (warp + 1) * _LANES]
        where = f',{head},"block":{_index(block_number, grid)}'
        for ts_ns, mask in exits:
            if ts_ns > TIME_LIMIT_NS:
                continue
            start = f'{{"ts_ns":{ts_ns}{where}'
            lines += [start + end for lane, end in enumerate(of_warp) if mask >> lane & 1]
        if done % _WARPS_AT_ONCE == 0:
            yield lines
            lines = []
    yield lines


def _exits(batch: Mapping[str, Any]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """The number of each warp, and its exits: time and mask."""
    warps = batch["warp"]
    counts = batch.get("exit_count") or [1] * len(warps)
    entry_masks = batch.get("entry_mask") or [_FULL_MASK] * len(warps)
    exits = zip(batch["exit_ns"], batch.get("exit_mask") or repeat(None), strict=False)
    for number, entry_ns, entered, count in zip(warps, batch["entry_ns"], entry_masks, counts, strict=True):
        entry_ns += batch["ts_ns"]
        of_warp = islice(exits, count)
        yield number, [(entry_ns + ns, entered if mask is None else mask) for ns, mask in of_warp]


def _index(number: int, size: Sequence[int]) -> str:
    """x, y and z of a linear index in a box of `size`; x varies fastest."""
    x, y, _ = size
    return f"[{number % x},{number // x % y},{number // (x * y)}]"


class _UnmatchedNames:
    """The names that a pattern did not select, and whether it selected any: the pattern may be mistyped."""

    def __init__(self, pattern: str, what: str, others: str, none: str) -> None:
        """`what` states what should fit; `others` precedes names that do not, `none` replaces them."""
        self.pattern, self._what, self._others, self._none = pattern, what, others, none
        self.names: dict[str, None] = {}
        """The names that do not fit."""
        self.is_matched = False

    @property
    def note(self) -> list[str]:
        """The note; empty if a name fitted, or if there is no pattern."""
        if not self.pattern or self.is_matched:
            return []
        names = list(self.names)
        literal = max(re.findall(r"[\w:]+", self.pattern), key=len, default="")
        near = near_names(literal, names) if literal else []
        found = f"near: {', '.join(near)}" if near else f"{self._others} {', '.join(names[:3])}"
        found += f" and {len(names) - 3} more" if not near and len(names) > 3 else ""
        return [f"no {self._what} {self.pattern!r}; {found if names else self._none}"]
