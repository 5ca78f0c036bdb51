"""The `warps` engine: entry and exits of each warp, recorded by a library with the Compute Sanitizer API.

The CUDA driver loads the library into the command (`native/warps.cpp` describes how it works); the capture
process has the channel and turns its records into lines. It needs neither root nor PTX nor a changed program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tracepipe.hooks.names import near_names
from tracepipe.kernel_names import short_kernel_name
from tracepipe.tracer.gpu.choice import WarpOptions
from tracepipe.tracer.gpu.engines import warp_records as layout
from tracepipe.tracer.gpu.engines.api_calls import ARGUMENTS_VARIABLE, ApiCalls, CallLines, write_table
from tracepipe.tracer.gpu.engines.carries import WarpsCarry
from tracepipe.tracer.gpu.engines.channel_engine import ChannelEngine
from tracepipe.tracer.gpu.engines.channel_renderer import ChannelRenderer
from tracepipe.tracer.gpu.engines.gpu_numbers import numbers_of
from tracepipe.tracer.gpu.engines.python_stacks import STACK_KINDS
from tracepipe.tracer.gpu.engines.spans import WarpsSpans
from tracepipe.tracer.gpu.engines.transport import (
    INJECTION_VARIABLE,
    KIND_CLOCK,
    KIND_GPU,
    KIND_NAME,
    KIND_NOTE,
    NAME,
    GpuRecord,
    note,
    printable,
    read_name,
)
from tracepipe.tracer.gpu.engines.untrusted import REFUSALS, Malformed, add_loss
from tracepipe.tracer.records.bounds import COUNT_LIMIT, INDEX_LIMIT, TIME_LIMIT_NS
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.unrendered import Wanted

_LANES: Final = 32
_THREADS_MAX: Final = 1024
_FULL_MASK: Final = (1 << _LANES) - 1
_WARPS_AT_ONCE: Final = 256
_KEPT: Final = ("clock", "gpu", "launch", "pid")
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
    known |= {name: batch[name] for name in _KEPT if name in batch}
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
    masks = batch.get("exit_mask")
    at = 0
    for number, entry_ns, entered, count in zip(warps, batch["entry_ns"], entry_masks, counts, strict=True):
        entry_ns += batch["ts_ns"]
        yield (
            number,
            [
                (entry_ns + batch["exit_ns"][exit], masks[exit] if masks else entered)
                for exit in range(at, at + count)
            ],
        )
        at += count


def _index(number: int, size: Sequence[int]) -> str:
    """x, y and z of a linear index in a box of `size`; x varies fastest."""
    x, y, _ = size
    return f"[{number % x},{number // x % y},{number // (x * y)}]"


class NameChoice:
    """The names that a pattern did not select, and whether it selected any."""

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


_LAYERS: Final = {
    layout.KIND_WARPS: "gpu_warp",
    layout.KIND_KERNEL: "gpu_kernel",
    layout.KIND_CALL_ENTER: "userspace",
    layout.KIND_CALL_EXIT: "userspace",
}
# Handles of every context's streams: 0 and CU_STREAM_LEGACY are the same, 2 is CU_STREAM_PER_THREAD.
_KNOWN_STREAMS: Final = {0: 0, 1: 0, 2: 2}
_FIRST_OTHER_STREAM: Final = 3
_PROCESS_BYTES: Final = 2048  # roughly, for each process that is kept
_ENTRY_BYTES: Final = 256
_RANGES: Final = "gpu_range"  # the layer of lost marks
_RANGE_CHARACTERS: Final = 64  # of a name that is not of a mark


class WarpsEngine(ChannelEngine):
    """Records the warps of a command that runs with `environment()`; nothing has to be attached to it."""

    name = "sanitizer"
    layers = frozenset({"userspace", "memory", "transfer", "gpu_kernel", "gpu_warp"})

    def __init__(
        self,
        library: Path,
        patches: Path,
        options: WarpOptions | None = None,
        *,
        owner: tuple[int, int] | None = None,
        gpus: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`library` and `patches` are the built native code, the patches with the options' `defines`. `owner`
        (user, group): whom the command runs as. `gpus`: those of the machine, in the form of a header. Raises
        TracepipeError for options that cannot be used, CaptureUnavailable.
        """
        self._options = options or WarpOptions()
        self._options.check()
        self._library, self._patches = library, patches
        self.gpus = gpus
        self.clocks: Sequence[str] = [f"globaltimer:{gpu['index']}" for gpu in gpus] or ["globaltimer:0"]
        api = ApiCalls()
        super().__init__(owner, stacks=self._options.stacks, lost_layers=_LAYERS)
        self._table = write_table(api.table())
        self._renderer = WarpRenderer(
            numbers_of(gpus),
            api,
            thread_exits=self._options.thread_exits,
            wanted=self._options.selected(),
            called=self._options.marked()[1],
        )
        if self._options.thread_exits:
            self.layers = self.layers | {"gpu_thread"}

    def environment(self) -> dict[str, str]:
        """The variables to add to the command's environment, before it starts."""
        built = {
            INJECTION_VARIABLE: str(self._library.absolute()),
            "TRACEPIPE_GPU_PATCHES": str(self._patches.absolute()),
            ARGUMENTS_VARIABLE: str(self._table),
        }
        return built | self._options.environment() | super().environment()

    def renderer(self) -> WarpRenderer:
        """The decoder of what `collect` returns; used on another thread."""
        return self._renderer

    def close(self) -> None:
        """Close the channel, and remove the table of API calls."""
        super().close()
        self._table.unlink(missing_ok=True)


class _Process:
    """The state of a traced process: names, streams and GPUs, and the launch to which its warps belong."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.streams = dict(_KNOWN_STREAMS)
        self.gpus: dict[int, int] = {}
        self.launch = 0
        self.of_launch: dict[str, Any] = {}

    def name(self, number: int) -> str:
        return self.names.get(number, f"unknown {number:#x}")

    def stream(self, handle: int) -> int:
        return self.streams.setdefault(handle, _FIRST_OTHER_STREAM + len(self.streams) - len(_KNOWN_STREAMS))


_SHOWN_NAME: Final = 200


class WarpRenderer(ChannelRenderer):
    """Turns chunks of records into lines; lines of threads, if wanted, are in `rest`."""

    def __init__(
        self,
        gpus: Mapping[str, int],
        api: ApiCalls | None = None,
        *,
        thread_exits: bool = False,
        wanted: str = "",
        called: str = "",
    ) -> None:
        """`wanted`: the pattern that selects kernels; `called`: the one that selects device functions."""
        super().__init__(gpus)
        self._api, self._thread_exits = api, thread_exits
        self._batches: list[Mapping[str, Any]] = []
        self._calls = CallLines(api, self._kept)
        self._kernels = NameChoice(
            wanted, "kernel fits --kernel", "the kernels launched were", "no kernel was launched"
        )
        self._called = NameChoice(
            called,
            "function fits --warp-marks",
            "there are",
            "the kernels call none, or all calls are inlined",
        )
        self._processes: dict[int, _Process] = {}
        self._short: dict[str, str] = {}

    @property
    def notes(self) -> list[str]:
        """The library's notes, and whether no kernel or no function was selected."""
        return [*self._notes, *self._kernels.note, *self._called.note]

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """The layer of a record's events, and their number."""
        if record.kind == layout.KIND_WARPS:
            return _LAYERS[record.kind], layout.read_warp_count(record.payload)
        return _LAYERS.get(record.kind, ""), int(record.kind in _LAYERS)

    def spans(self, wanted: Wanted) -> WarpsSpans:
        """A finder of long calls and kernels among such records."""
        return WarpsSpans(wanted)

    def anew(self) -> WarpRenderer:
        """A renderer like this one that has taken nothing."""
        return WarpRenderer(
            self._gpus,
            self._api,
            thread_exits=self._thread_exits,
            wanted=self._kernels.pattern,
            called=self._called.pattern,
        )

    def carry(self) -> WarpsCarry:
        """A keeper of what such a renderer needs from evicted records."""
        return WarpsCarry()

    def rest(self) -> Iterator[Lines]:
        """Lines of the threads of the last rendered warps, a few thousand at a time."""
        batches, self._batches = self._batches, []
        for batch in batches:
            for some in thread_lines(batch):
                lines = Lines()
                lines.threads(some)
                yield lines

    def _rendered(self, some: Iterable[GpuRecord]) -> Lines:
        lines = Lines()
        for record in some:
            try:
                self._add(lines, self._process(record.pid), record)
            except REFUSALS as refusal:
                self._refused.take(refusal)
        return lines

    def _process(self, pid: int) -> _Process:
        process = self._processes.get(pid)
        if process is None:
            self._kept.take(_PROCESS_BYTES)
            process = self._processes[pid] = _Process()
        return process

    def _add(self, lines: Lines, process: _Process, record: GpuRecord) -> None:
        if record.kind == layout.KIND_CALL_ENTER or record.kind == layout.KIND_CALL_EXIT:
            self._add_call(lines, process, record)
        else:
            self._add_lines(lines, process, record)

    def _add_lines(self, lines: Lines, process: _Process, record: GpuRecord) -> None:
        kind, payload = record.kind, record.payload
        if kind == layout.KIND_WARPS:
            warps, batch = self._warps(process, payload)
            lines.record(batch, warps)
            if self._thread_exits:
                self._batches.append(batch)
        elif kind == layout.KIND_KERNEL:
            kernel = self._kernel(process, record)
            if kernel is not None:
                lines.record(kernel)
        elif kind == layout.KIND_LOST_WARPS:
            lines.record(self._lost(record))
        elif kind == KIND_CLOCK:
            gpu, source_ns, low_ns, high_ns = layout.CLOCK.unpack_from(payload)
            if not low_ns <= high_ns <= TIME_LIMIT_NS or source_ns > TIME_LIMIT_NS:
                raise Malformed
            clock = f"globaltimer:{process.gpus.get(gpu, gpu)}"
            pair = {"source_ns": source_ns, "host_lo_ns": low_ns, "host_hi_ns": high_ns}
            lines.record({"type": "clock", "clock": clock, **pair})
        elif kind == KIND_NAME:
            number, name = read_name(payload)
            self._kept.take(_ENTRY_BYTES + 2 * len(name))
            process.names[number] = name
        elif kind in STACK_KINDS:
            self._stacks.take(record)
        elif kind == KIND_GPU:
            index, number = self._numbers.add(payload)
            self._kept.take(_ENTRY_BYTES)
            process.gpus[index] = number
        elif kind == KIND_NOTE:
            words = note(payload)
            self._kept.take(_ENTRY_BYTES + len(words))
            self._notes.append(words)
        elif kind in (layout.KIND_MET, layout.KIND_MET_CALLED):
            wanted = self._kernels if kind == layout.KIND_MET else self._called
            fits, name = read_name(payload)
            wanted.is_matched |= bool(fits)
            short = printable(self._kernel_name(name))[:_SHOWN_NAME]
            if not fits and short not in wanted.names:
                self._kept.take(_ENTRY_BYTES + len(name))
                wanted.names[short] = None
        else:
            raise Malformed

    def _add_call(self, lines: Lines, process: _Process, record: GpuRecord) -> None:
        (name,) = NAME.unpack_from(record.payload)
        if record.kind == layout.KIND_CALL_EXIT:
            self._calls.leave(lines, record, process.name(name))
            return
        _, _, kernel, stack, *_ = layout.CALL_ENTER.unpack_from(record.payload)
        launched = self._kernel_name(process.name(kernel)) if kernel else ""
        at = self._stacks.id_of(record.pid, stack)
        for new in self._stacks.take_new():
            lines.record(new)
        self._calls.enter(lines, record, process.name(name), launched, at, self._resumed_ns)

    def _kernel(self, process: _Process, record: GpuRecord) -> dict[str, Any] | None:
        """The event of a launch, whose warps follow; None if none of them was recorded."""
        kernel = layout.read_kernel(record.payload)
        gpu = process.gpus.get(kernel.gpu, kernel.gpu)
        full_name = process.name(kernel.name)
        process.launch = kernel.launch
        process.of_launch = {
            "name": self._kernel_name(full_name),
            "clock": f"globaltimer:{gpu}",
            "gpu": gpu,
            "stream": self._stream(process, kernel.stream),
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
            args["launched_by"] = layout.LAUNCHED_BY[kernel.launched_by]
        if kernel.whole < kernel.warps:
            args["warps_not_whole"] = kernel.warps - kernel.whole
        span = {"type": "gpu_kernel", "phase": "X", "dur_ns": kernel.end_ns - kernel.start_ns}
        return {"ts_ns": kernel.start_ns, **span, **process.of_launch, "args": args}

    def _warps(self, process: _Process, payload: memoryview) -> tuple[int, dict[str, Any]]:
        """The number of warps, and their record."""
        launch, base_ns, warps, columns = layout.read_warps(payload)
        of_launch = process.of_launch
        if process.launch != launch:  # its record was lost
            of_launch = {"name": "unknown", "launch": launch}
        if numbers := columns.get("range_name"):
            # Names of device functions are demangled, with parameters; several may have the same short form.
            named = {
                number: self._kernel_name(process.name(number))[:_RANGE_CHARACTERS] for number in numbers
            }
            place = {name: at for at, name in enumerate(dict.fromkeys(named.values()))}
            columns["range_name"] = [place[named[number]] for number in numbers]
            of_launch = {**of_launch, "ranges": list(place)}
        return warps, {"ts_ns": base_ns, "type": "gpu_warp", **of_launch, **columns}

    def _lost(self, record: GpuRecord) -> dict[str, Any]:
        launch, _, why, count = layout.LOST_WARPS.unpack_from(record.payload)
        if count > COUNT_LIMIT:
            raise Malformed
        layer = _RANGES if why == layout.MARKS_LOST else "gpu_warp"
        add_loss(self._losses, layer, count)
        reason = layout.LOST_WHY.get(why, f"reason {why}")
        if launch:  # else the loss is of many launches
            reason = f"launch {launch}: {reason}"
        return {
            "type": "loss",
            "layer": layer,
            "ts_ns": record.time_ns,
            "count": count,
            "reason": reason,
        }

    def _stream(self, process: _Process, handle: int) -> int:
        if handle not in process.streams:
            self._kept.take(_ENTRY_BYTES)
        return process.stream(handle)

    def _kernel_name(self, name: str) -> str:
        short = self._short.get(name)
        if short is None:
            short = self._short[name] = short_kernel_name(name)
        return short
