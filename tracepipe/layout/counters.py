"""Counters of values that events have, of the memory that was allocated, and of what warps wait for.

Samples of stall reasons show how many warps were waiting, and not which warp waited from when to when, so
they do not make slices: each group of reasons has its share of the samples.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from tracepipe.event.columns import NONE, TraceColumns
from tracepipe.event.counters import (
    DEVICE_MEMORY,
    DEVICE_MEMORY_IN_USE,
    OF_GPU_EVENTS,
    OF_PROCESS_EVENTS,
    RANK_OF_GPU,
    STALL_GROUPS,
    STALL_SAMPLES,
    CounterTrack,
    stall_group,
)
from tracepipe.event.model import COUNT_LIMIT, COUNTS, Record
from tracepipe.event.ops import COUNTER, Op, op_of
from tracepipe.event.shape import Shape
from tracepipe.event.vocabulary import ADDRESS_KEYS, MEMORY_IN_USE, SIZE_KEYS
from tracepipe.layout.rows import Rows

# Live allocations whose sizes are remembered for their frees.
ALLOCATIONS_MAX = 1 << 20
_ADDRESS_LENGTH_MAX = 32
_WHOLE_MAX = (1 << 63) - 1
_STALLS: Final = (*(CounterTrack(group, "%") for group in STALL_GROUPS), STALL_SAMPLES)


@dataclass(slots=True, eq=False)
class _DeviceMemory:
    """The memory that a process has allocated on a GPU, or on its GPUs where their events do not name one, as
    far as it was recorded.
    """

    row: int
    total_bytes: int = 0
    live: dict[object, int] = field(default_factory=dict)


class Counters:
    """Draws the values of counters that do not depend on what is drawn elsewhere."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._memory: dict[int | None, dict[str, _DeviceMemory]] = {}
        """By process and name of the counter. A free may not name its GPU."""
        self._series: dict[tuple[int | None, int | None, str, str], int] = {}
        """By process, GPU, event and series: the row of a counter whose values events have."""
        self._stalls: dict[tuple[int, int | None], list[int]] = {}
        """By GPU and process: the rows of the counters of stalls."""

    def add_shape(self, number: int, shape: Shape) -> None:
        """Note a new shape, whose row exists."""
        is_counted = shape.type == "memory" and shape.phase not in ("E", COUNTS)
        self._rows.of_shape["counts_memory"][number] = is_counted

    def count_values(self, ts_ns: int, shape: Shape, args: dict[str, Any]) -> None:
        """Draw the values of a counter of a GPU or of the process, each series on its own track."""
        ops = []
        long_names = self._rows.book.tables.long_names
        for stated, value in args.items():
            if type(value) not in (int, float):
                continue
            series = long_names.shortened(stated)
            key = shape.pid, shape.gpu, shape.name, series
            row = self._series.get(key)
            if row is None:
                rows = self._rows
                if rows.tree.is_full:
                    continue
                of_layer = shape.name == shape.layer
                name = series if of_layer else shape.name if series == "value" else f"{shape.name} {series}"
                unit = rows.unit_of_series(shape.gpu, name)
                if shape.gpu is None:
                    owner, kind = rows.tree.process(shape.pid), OF_PROCESS_EVENTS
                else:
                    owner, kind = rows.gpu(shape.gpu), OF_GPU_EVENTS
                row = self._series[key] = rows.new_row(rows.tree.counter(owner, kind, name=name, unit=unit))
            if isinstance(value, float) or abs(value) > _WHOLE_MAX:
                ops.append(op_of(COUNTER, row, ts_ns, 0, self._rows.keep_args({"value": float(value)})))
            else:
                ops.append(op_of(COUNTER, row, ts_ns, 0, NONE, value))
        if ops:
            self._rows.nesting.add(*ops)

    def count_memory(self, events: TraceColumns) -> None:
        """Draw the memory counters that change with events of the memory layer."""
        places, tables = self._rows.flagged("counts_memory", events), self._rows.book.tables
        columns = (events.ts_ns, events.shape, events.args)
        counted = (
            self._memory_after(ts_ns, self._rows.shape(shape), tables.args(args))
            for ts_ns, shape, args in zip(*(column[places].tolist() for column in columns), strict=True)
        )
        self._rows.nesting.add(*(op for op in counted if op is not None))

    def _memory_after(self, ts_ns: int, shape: Shape, args: dict[str, Any]) -> Op | None:
        """The value of a counter after an event, None where the event allocates nothing on a GPU."""
        size = next((args[key] for key in SIZE_KEYS if key in args), None)
        total, kind = args.get("total_allocated"), DEVICE_MEMORY
        if shape.name == MEMORY_IN_USE:
            total, kind = args.get("total_bytes"), DEVICE_MEMORY_IN_USE
        name = "" if shape.gpu is None else f"{kind.name}, GPU {shape.gpu}"
        if shape.name not in ("alloc", "free") and not isinstance(total, int):
            return None  # a mapping, a memset
        address = next((args[key] for key in ADDRESS_KEYS if isinstance(args.get(key), int | str)), None)
        if isinstance(address, str) and len(address) > _ADDRESS_LENGTH_MAX:
            address = None
        of_process = self._memory.setdefault(shape.pid, {})
        memory = of_process.get(name or kind.name)
        if shape.name == "free" and shape.gpu is None and address is not None:
            memory = next((one for one in of_process.values() if address in one.live), memory)
        if memory is None:
            track = self._rows.tree.counter(self._rows.tree.process(shape.pid), kind, name=name)
            memory = of_process[name or kind.name] = _DeviceMemory(self._rows.new_row(track))
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

    def count_stalls(self, ts_ns: int, record: Record) -> None:
        """Draw the samples of a stretch as values from its start on, for each process on a GPU in its own
        group of tracks.
        """
        gpu, pid, tree = record.get("gpu", 0), record.get("pid"), self._rows.tree
        rows = self._stalls.get((gpu, pid))
        if rows is None:
            if tree.is_full:
                return
            several = f", process {pid}" if any(other == gpu for other, _ in self._stalls) else ""
            title = f"what warps wait for{several}"
            owner = tree.child(self._rows.gpu(gpu), "group", title, RANK_OF_GPU, "gpu")
            tracks = (tree.counter(owner, kind, rank=rank) for rank, kind in enumerate(_STALLS))
            rows = self._stalls[gpu, pid] = [self._rows.new_row(track) for track in tracks]
        samples: Counter[str] = Counter()
        for reason, count in zip(record["reason"], record["samples"], strict=True):
            samples[stall_group(record["reasons"][reason])] += count
        total = samples.total()
        shares = [round(100 * samples[group] / max(total, 1)) for group in STALL_GROUPS]
        for row, value in zip(rows, (*shares, min(total, COUNT_LIMIT)), strict=True):
            self._rows.nesting.add(op_of(COUNTER, row, ts_ns, 0, NONE, value))
