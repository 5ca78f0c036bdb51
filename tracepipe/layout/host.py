"""What the host's events draw in addition to slices: names of threads, counters, and the allocated memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracepipe.event.columns import NONE, Bools, Int64s, TraceColumns, grown
from tracepipe.event.model import COUNTS
from tracepipe.event.ops import COUNTER, Op, op_of
from tracepipe.event.shape import Shape
from tracepipe.event.vocabulary import ADDRESS_KEYS, MEMORY_IN_USE, SIZE_KEYS
from tracepipe.layout.rows import RANK_COUNT, Rows
from tracepipe.layout.tree import LAYER_TITLES, RANK_COUNTERS

# Live allocations whose sizes are remembered for their frees.
ALLOCATIONS_MAX = 1 << 20
_WHOLE_MAX = (1 << 63) - 1
Extra = Callable[[dict[str, Any]], int]
"""Keeps the arguments of an operation and returns its `event`."""


@dataclass(slots=True, eq=False)
class DeviceMemory:
    """The memory that a process has allocated on its GPUs, as far as it was recorded."""

    row: int
    total_bytes: int = 0
    live: dict[object, int] = field(default_factory=dict)


class HostLayout:
    """Draws the few kinds of events that do more than nest, which it knows by their shapes."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._memory: dict[tuple[int | None, str], DeviceMemory] = {}
        self._counters: dict[tuple[int | None, int | None, str, str], int] = {}
        """The rows of counters whose values events have."""
        self._named: set[tuple[int | None, int | None]] = set()
        """Threads that the program named itself. These names come before those of the kernel."""
        self._naming: Bools = np.zeros(0, np.bool_)
        self._of_memory: Bools = np.zeros(0, np.bool_)
        """Whether the events of a shape are of the memory layer, by its number."""

    def add_shape(self, number: int, shape: Shape) -> None:
        """Note a new shape, whose row exists."""
        if number >= len(self._naming):
            self._naming = grown(self._naming, number + 1, 0)
            self._of_memory = grown(self._of_memory, number + 1, 0)
        self._naming[number] = bool(shape.comm) and shape.type in LAYER_TITLES
        self._of_memory[number] = shape.type == "memory" and shape.phase not in ("E", COUNTS)

    def name_threads(self, events: TraceColumns) -> None:
        """Give threads the names that events have for them."""
        numbers = events.shape[_flagged(self._naming, events)].tolist()
        for number in reversed(dict.fromkeys(reversed(numbers))):
            shape = self._shape(number)
            thread, name = (shape.pid, shape.tid), shape.comm or ""
            if shape.type == "annotation":
                self._named.add(thread)
            elif shape.pid is not None and shape.pid == shape.tid:
                self._rows.tree.rename_process(shape.pid, name)
            if shape.type == "annotation" or thread not in self._named:
                self._rows.tree.rename_thread(*thread, name)

    def _shape(self, number: int) -> Shape:
        shape = self._rows.book.tables.shapes[number]
        assert shape is not None
        return shape

    def count_values(self, ts_ns: int, shape: Shape, args: dict[str, Any], extra: Extra) -> None:
        """Draw the values of a counter of a GPU or of the process, each series on its own track."""
        ops = []
        for series, value in args.items():
            if type(value) not in (int, float):
                continue
            key = shape.pid, shape.gpu, shape.name, series
            row = self._counters.get(key)
            if row is None:
                if self._rows.tree.is_full:
                    continue
                owner = self._rows.tree.process(shape.pid) if shape.gpu is None else self._rows.gpu(shape.gpu)
                of_layer = shape.name == shape.layer
                name = series if of_layer else shape.name if series == "value" else f"{shape.name} {series}"
                rank = RANK_COUNTERS if shape.gpu is None else RANK_COUNT
                unit = self._rows.unit_of_counter(shape.gpu, series) if of_layer else ""
                track = self._rows.tree.child(owner, "counter", name, rank, "counter", unit)
                row = self._counters[key] = self._rows.new_row(track)
            if isinstance(value, float) or abs(value) > _WHOLE_MAX:
                ops.append(op_of(COUNTER, row, ts_ns, 0, extra({"value": float(value)})))
            else:
                ops.append(op_of(COUNTER, row, ts_ns, 0, NONE, value))
        if ops:
            self._rows.nesting.add(*ops)

    def count_memory(self, events: TraceColumns) -> None:
        """Draw the memory counters that change with events of the memory layer."""
        places, tables = _flagged(self._of_memory, events), self._rows.book.tables
        columns = (events.ts_ns, events.shape, events.args)
        counted = (
            self._count(ts_ns, self._shape(shape), tables.args(args))
            for ts_ns, shape, args in zip(*(column[places].tolist() for column in columns), strict=True)
        )
        self._rows.nesting.add(*(op for op in counted if op is not None))

    def _count(self, ts_ns: int, shape: Shape, args: dict[str, Any]) -> Op | None:
        """The value of a counter after an event, None where the event allocates nothing on a GPU."""
        size = next((args[key] for key in SIZE_KEYS if key in args), None)
        total = args.get("total_allocated")
        what = "device memory"
        if shape.name == MEMORY_IN_USE:
            total, what = args.get("total_bytes"), "device memory in use"
            what += "" if shape.gpu is None else f", GPU {shape.gpu}"
        if shape.name not in ("alloc", "free") and not isinstance(total, int):
            return None  # a mapping, a memset
        memory = self._memory.get((shape.pid, what))
        if memory is None:
            process = self._rows.tree.process(shape.pid)
            track = self._rows.tree.child(process, "counter", what, RANK_COUNTERS, "memory", "bytes")
            memory = self._memory[shape.pid, what] = DeviceMemory(self._rows.new_row(track))
        address = next((args[key] for key in ADDRESS_KEYS if isinstance(args.get(key), int | str)), None)
        if shape.name == "free":
            known = memory.live.pop(address, 0)
            memory.total_bytes -= size if isinstance(size, int) else known
        elif shape.name == "alloc" and isinstance(size, int):
            memory.total_bytes += size
            if address is not None and len(memory.live) < ALLOCATIONS_MAX:
                memory.live[address] = size
        if isinstance(total, int):
            memory.total_bytes = total
        value = max(-(1 << 63), min(memory.total_bytes, (1 << 63) - 1))
        return op_of(COUNTER, memory.row, ts_ns, 0, NONE, value)


def _flagged(flags: Bools, events: TraceColumns) -> Int64s:
    """The places of the events whose shapes have a flag."""
    if not flags.any():
        return np.empty(0, np.int64)
    return np.flatnonzero((events.shape >= 0) & flags[np.maximum(events.shape, 0)])
