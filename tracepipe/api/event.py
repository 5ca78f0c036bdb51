"""One event, and one warp, on the trace's clock, with a name for each of its fields; and how they are made of
batches of columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from tracepipe.event.columns import NONE, SPECIAL, AnyArray, TraceBatch, TraceColumns, unsigned
from tracepipe.event.shape import Shape, shape_of
from tracepipe.event.stacks import Frame
from tracepipe.event.tables import Tables
from tracepipe.event.warps import PlacedWarps

_LANES = 32
Three = tuple[int, int, int]
_NO_ARGS: Mapping[str, Any] = MappingProxyType({})


class Args:
    """The arguments of one or more events, parsed when they are first asked for."""

    __slots__ = ("_parsed", "_text")

    def __init__(self, text: bytes, parsed: Mapping[str, Any] | None = None) -> None:
        """`parsed` are the arguments, where they cannot be parsed from their text."""
        self._text = text
        self._parsed = None if parsed is None else MappingProxyType(parsed)

    def get(self) -> Mapping[str, Any]:
        """All arguments, by name. They are read-only, as other events may share them."""
        if self._parsed is None:
            self._parsed = MappingProxyType(orjson.loads(self._text))
        return self._parsed


def _of_shape(name: str, doc: str) -> Any:
    """A property with a field of an event's shape."""
    return property(attrgetter(f"_shape.{name}"), doc=doc)


class Event:
    """One event of a recording. What was not recorded is None.

    `ts_ns` is the time of the event on the trace's clock, or the start of an X. `dur_ns` is known for an X
    and for some E. `launch` is the same number on a launch call, its kernel and its warps. `source_ns` is the
    reading of the event's own clock, where that is not the trace's. `bound_ns` is by how much the time may be
    wrong: 0 on the trace's own clock, None where the clock was placed by an assumed offset, whose error is
    not known. `stack` has the Python frames of a call, innermost first, each with `function`, `file` and
    `line`. Kernels and copies have those of their launch. `block` is the threads of a block in x, y, z; of a
    `gpu_thread`, it is the index of its block, and `thread` that of the thread there.
    """

    __slots__ = (
        "_args", "_shape", "block", "bound_ns", "dur_ns", "launch", "source_ns", "stack", "thread", "ts_ns",
    )  # fmt: skip

    _SHOWN: tuple[str, ...] = (
        "ts_ns", "dur_ns", "layer", "name", "phase", "pid", "tid", "cpu", "comm", "gpu", "stream", "launch",
        "grid", "block", "thread", "clock", "source_ns",
    )  # fmt: skip

    def __init__(
        self,
        ts_ns: int,
        shape: Shape,
        args: Args | None,
        dur_ns: int | None,
        launch: int | None,
        source_ns: int | None,
        bound_ns: int | None,
    ) -> None:
        self.ts_ns = ts_ns
        self._shape = shape
        self._args = args
        self.dur_ns = dur_ns
        self.launch = launch
        self.source_ns = source_ns
        self.bound_ns = bound_ns
        self.block = shape.block
        self.thread: Three | None = None
        self.stack: tuple[Frame, ...] | None = None

    @property
    def end_ns(self) -> int | None:
        """The end of an X, the time of an E; None for a B and an I."""
        if self._shape.phase == "X":
            return self.ts_ns + (self.dur_ns or 0)
        return self.ts_ns if self._shape.phase == "E" else None

    @property
    def layer(self) -> str:
        """One of `userspace`, `syscall`, `kernel`, `scheduler`, `memory`, `transfer`, `gpu_kernel`,
        `gpu_warp`, `gpu_thread`; for a hook the name of its own layer, or `hook`.
        """
        return self._shape.layer or self._shape.type

    name: str = _of_shape("name", "Function, system call, kernel or operation.")
    phase: str = _of_shape("phase", "B begin, E end, I instant, X a whole slice.")
    pid: int | None = _of_shape("pid", "Process id.")
    tid: int | None = _of_shape("tid", "Thread id.")
    cpu: int | None = _of_shape("cpu", "Processor on which it happened.")
    comm: str | None = _of_shape("comm", "The thread's name, on the first event after it got that name.")
    gpu: int | None = _of_shape("gpu", "Index of the GPU.")
    stream: int | None = _of_shape("stream", "Id of the CUDA stream.")
    grid: Three | None = _of_shape("grid", "Blocks of the grid in x, y, z.")
    clock: str | None = _of_shape(
        "clock", "The clock with which it was recorded; None for the recording's own."
    )

    @property
    def args(self) -> Mapping[str, Any]:
        """Arguments, results and whatever else is known, by name; empty where there are none."""
        return _NO_ARGS if self._args is None else self._args.get()

    def __repr__(self) -> str:
        known = [(name, getattr(self, name)) for name in self._SHOWN]
        shown = [f"{name}={value!r}" for name, value in known if value is not None]
        shown += [f"bound_ns={self.bound_ns}"] if self.source_ns is not None else []
        shown += [f"stack={[str(frame) for frame in self.stack]!r}"] if self.stack else []
        shown += [f"args={dict(self.args)!r}"] if self.args else []
        return f"{type(self).__name__}({', '.join(shown)})"


class WarpExit(NamedTuple):
    """Lanes of a warp that left together: a bit of `mask` for each, `cycles` since the warp's entry."""

    ts_ns: int
    mask: int | None
    cycles: int | None


class WarpRange(NamedTuple):
    """A range of a warp, with the name from the kernel's source. `cycles` are those of the SM. `is_open` is
    whether its end is not known; it is then taken to be the warp's last exit.
    """

    name: str
    ts_ns: int
    dur_ns: int
    cycles: int
    is_open: bool


class Warp(Event):
    """One warp of a kernel, from its entry (`ts_ns`) to its last exit (`end_ns`); `name` is the kernel's.

    `warp` is its number in the grid. `block_index` is the number of its block, and `warp_in_block` its number
    there; both are None where the size of a block is not known. `slot` is the hardware slot on its `sm`.
    `entry_mask` has a bit for each lane that entered. A warp that was running when the record ended has no
    exit, no `dur_ns` and the phase B; others have X.
    """

    __slots__ = ("block_index", "entry_mask", "exits", "ranges", "slot", "sm", "warp", "warp_in_block")

    _SHOWN = (
        *Event._SHOWN[:5], "warp", "block_index", "warp_in_block", "sm", "slot", "entry_mask", "exits",
        *Event._SHOWN[5:],
    )  # fmt: skip

    warp: int
    block_index: int | None
    warp_in_block: int | None
    sm: int | None
    slot: int | None
    entry_mask: int | None
    exits: tuple[WarpExit, ...]
    ranges: tuple[WarpRange, ...]

    @property
    def cycles(self) -> int | None:
        """Cycles of the SM's clock from the entry to the last exit."""
        cycles = [one.cycles for one in self.exits if one.cycles is not None]
        return max(cycles, default=None)


class EventRows:
    """Makes events of batches. `assumed` are the clocks whose error is not known."""

    def __init__(self, tables: Tables, default_clock: str, assumed: Collection[str]) -> None:
        self._tables, self._default, self._assumed = tables, default_clock, assumed
        self._last: tuple[int, tuple[Frame, ...]] = (NONE, ())

    def events(self, batch: TraceBatch) -> Iterator[Event]:
        """The events of a batch in its order; each warp is one. All are made while the numbers of its tables
        are valid.
        """
        shapes = self._tables.shapes
        known: dict[int, Args | None] = {NONE: None}
        rows = enumerate(_rows(batch.events))
        for at, (ts_ns, shape_number, args_number, dur_ns, launch, source_ns, bound_ns) in rows:
            if shape_number == SPECIAL:
                other = batch.others[args_number]
                if isinstance(other, PlacedWarps):
                    yield from self._warps(other)
                continue
            shape = shapes[shape_number]
            assert shape is not None
            if args_number not in known:
                known[args_number] = self._args(args_number)
            read = source_ns != NONE
            event = Event(
                ts_ns,
                shape,
                known[args_number],
                dur_ns if shape.has_dur else None,
                unsigned(launch) if shape.has_launch else None,
                source_ns if read else None,
                None if read and self._is_assumed(shape.clock) else bound_ns,
            )
            if shape.type == "gpu_thread":
                event.block, event.thread = batch.events.thread_of(at)
            if batch.events.stack is not None:
                event.stack = self._stack(int(batch.events.stack[at]))
            yield event

    def _stack(self, number: int) -> tuple[Frame, ...] | None:
        """The frames of a stack, made once for consecutive events that have it."""
        if number == NONE:
            return None
        if number != self._last[0]:
            stacks = self._tables.stacks
            self._last = number, tuple(stacks.frames[at] for at in stacks.frames_of(number))
        return self._last[1]

    def _args(self, number: int) -> Args:
        odd = self._tables.args(number) if self._tables.is_odd(number) else None
        return Args(self._tables.text(number), odd)

    def _is_assumed(self, clock: str | None) -> bool:
        return (clock or self._default) in self._assumed

    def _warps(self, batch: PlacedWarps) -> Iterator[Warp]:
        """Each warp of a batch. The columns become lists once for all warps."""
        launched, count, exits_count = batch.launched, len(batch.warp), len(batch.exit_ns)
        left = shape_of({**launched, "type": "gpu_warp", "phase": "X"})
        running = replace(left, phase="B")
        args = Args(b"", launched["args"]) if launched.get("args") else None
        bound_ns = None if self._is_assumed(left.clock) else batch.bound_ns
        block_warps = -(-left.block[0] * left.block[1] * left.block[2] // _LANES) if left.block else 0
        numbers, source_ns = batch.warp.tolist(), _list(batch.source_ns, count)
        sms, slots, masks = (_list(column, count) for column in (batch.sm, batch.slot, batch.entry_mask))
        firsts, counts = batch.first_exits().tolist(), _list(batch.exit_count, count, 1)
        exit_ns = batch.exit_ns.tolist()
        exit_masks, exit_cycles = _list(batch.exit_mask, exits_count), _list(batch.exit_clk, exits_count)
        ranges: list[tuple[Any, ...]] = []
        first_ranges = [0] * (count + 1)
        if batch.range_ns is not None and batch.range_count is not None:
            first_ranges = list(accumulate(batch.range_count.tolist(), initial=0))
            columns = (batch.range_name, batch.range_ns, batch.range_dur_ns, batch.range_dur_clk)
            open_ranges = _list(batch.range_open, len(batch.range_ns), 0)
            ranges = list(zip(*(_list(column, 0) for column in columns), open_ranges, strict=True))
        for at, after_ns in enumerate(batch.entry_ns.tolist()):
            entry_ns = batch.ts_ns + after_ns
            exits = tuple(
                WarpExit(entry_ns + exit_ns[place], exit_masks[place], exit_cycles[place])
                for place in range(firsts[at], firsts[at] + counts[at])
            )
            lasted_ns = max(one.ts_ns for one in exits) - entry_ns if exits else None
            shape = left if exits else running
            warp = Warp(entry_ns, shape, args, lasted_ns, launched.get("launch"), source_ns[at], bound_ns)
            warp.warp = numbers[at]
            in_block = divmod(warp.warp, block_warps) if block_warps else (None, None)
            warp.block_index, warp.warp_in_block = in_block
            warp.sm, warp.slot, warp.entry_mask, warp.exits = sms[at], slots[at], masks[at], exits
            warp.ranges = tuple(
                WarpRange(batch.ranges[name], entry_ns + begin_ns, dur_ns, cycles, is_open == 1)
                for name, begin_ns, dur_ns, cycles, is_open in ranges[first_ranges[at] : first_ranges[at + 1]]
            )
            yield warp


def _list(column: AnyArray | None, count: int, default: int | None = None) -> list[Any]:
    """A column as a list, which has `count` times the default where there is no column."""
    return [default] * count if column is None else column.tolist()


def _rows(events: TraceColumns) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """The columns row by row, as Python integers."""
    count = len(events)
    source = [NONE] * count if events.source_ns is None else events.source_ns.tolist()
    bound = [0] * count if events.bound_ns is None else events.bound_ns.tolist()
    columns = (events.ts_ns, events.shape, events.args, events.dur_ns, events.launch)
    return zip(*(column.tolist() for column in columns), source, bound, strict=True)
