"""What the host's events draw beside their slices: names of threads, and the memory that is allocated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracepipe.event.columns import NONE, TraceColumns
from tracepipe.event.nesting import COUNTER, Op
from tracepipe.event.shape import ADDRESS_KEYS, Shape
from tracepipe.layout.rows import Rows
from tracepipe.layout.tree import LAYER_TITLES

# Live allocations whose sizes are remembered for their frees.
ALLOCATIONS_MAX = 1 << 20


@dataclass(slots=True, eq=False)
class DeviceMemory:
    """What a process has allocated on its GPUs, as far as the recording tells."""

    row: int
    total_bytes: int = 0
    live: dict[object, int] = field(default_factory=dict)


class HostLayout:
    """Looks at the few events that do more than nest, by their shapes."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._memory: dict[int | None, DeviceMemory] = {}
        self._naming: set[int] = set()
        self._of_memory: set[int] = set()

    def meet(self, number: int, shape: Shape) -> None:
        """Look at a shape that is new; its row is made."""
        if shape.comm and shape.type in LAYER_TITLES:
            self._naming.add(number)
        if shape.type == "memory" and shape.phase != "E":
            self._of_memory.add(number)

    def forget_shapes(self) -> None:
        """The shapes have other numbers now."""
        self._naming.clear()
        self._of_memory.clear()

    def name_threads(self, events: TraceColumns) -> None:
        """Give threads the names that events say they have."""
        if not self._naming:
            return
        places = np.flatnonzero(np.isin(events.shape, list(self._naming)))
        for number in reversed(dict.fromkeys(reversed(events.shape[places].tolist()))):
            shape = self._shape(number)
            self._rows.tree.rename_thread(shape.pid, shape.tid, shape.comm or "")

    def _shape(self, number: int) -> Shape:
        shape = self._rows.book.tables.shapes[number]
        assert shape is not None
        return shape

    def count_memory(self, events: TraceColumns) -> None:
        """Count what events of the memory layer allocate and free."""
        if not self._of_memory:
            return
        for at in np.flatnonzero(np.isin(events.shape, list(self._of_memory))).tolist():
            shape = self._shape(int(events.shape[at]))
            number = int(events.args[at])
            args = self._rows.book.tables.args(number) if number != NONE else {}
            self._count(int(events.ts_ns[at]), shape, args)

    def _count(self, ts_ns: int, shape: Shape, args: dict[str, Any]) -> None:
        size, total = args.get("size"), args.get("total_allocated")
        if shape.name not in ("alloc", "free") and not isinstance(total, int):
            return  # it allocates nothing on a GPU: a mapping, a memset
        memory = self._memory.get(shape.pid)
        if memory is None:
            process = self._rows.tree.process(shape.pid)
            track = self._rows.tree.child(process, "counter", "device memory", 0, "memory", "bytes")
            memory = self._memory[shape.pid] = DeviceMemory(self._rows.new_row(track))
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
        self._rows.nesting.add(Op(COUNTER, memory.row, ts_ns, 0, NONE, value=value))
