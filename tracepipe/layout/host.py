"""Lays out what happens on the host: a row for each layer of each thread, and the arrows between layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tracepipe.layout.launches import Launches
from tracepipe.layout.rows import LANES_MAX, OpenSlice, Outcomes, Row, close_all, complete, end, marked
from tracepipe.layout.tree import LAYER_TITLES, Tree
from tracepipe.model import Record
from tracepipe.timeline import BEGIN, COUNTER, END, INSTANT, Args, Flows, Track

# Live allocations whose sizes are remembered for their frees.
ALLOCATIONS_MAX = 1 << 20
_ADDRESSES = ("address", "ptr", "dptr", "devPtr")


@dataclass(slots=True, eq=False)
class HostThread:
    """One thread: its group, and the row of each of its layers."""

    track: Track
    rows: dict[str, Row] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class DeviceMemory:
    """What a process has allocated on its GPUs, as far as the recording tells."""

    track: Track
    total_bytes: int = 0
    live: dict[object, int] = field(default_factory=dict)


class HostLayout:
    """Appends its operations to the tree's, so that a track is declared before it is used.

    `launches` is shared with the GPU's layout.
    """

    def __init__(self, tree: Tree, outcomes: Outcomes, launches: Launches) -> None:
        self._tree, self.outcomes, self._launches = tree, outcomes, launches
        self._ops = tree.ops
        self._rows: dict[tuple[Any, Any, Any], tuple[Row, HostThread]] = {}
        self._threads: dict[tuple[int | None, int | None], HostThread] = {}
        self._other_rows: dict[int, Row] = {}
        self._memory: dict[int | None, DeviceMemory] = {}
        self._flow = 1

    def place(self, records: list[Record], special: Callable[[Record], None]) -> None:
        """Draw records in time order; what is not a host layer's goes to `special`."""
        rows, append, ops = self._rows, self._ops.append, self._ops
        for record in records:
            kind = record["type"]
            found = rows.get((kind, record.get("pid"), record.get("tid")))
            if found is None or "comm" in record:
                found = self._meet(record)
                if found is None:
                    special(record)
                    continue
            row, thread = found
            name, phase, ts_ns, args = record["name"], record["phase"], record["ts_ns"], record.get("args")
            if phase == "E":
                if row.open and row.open[-1].name == name and ts_ns >= row.last_ns:
                    row.open.pop()
                    row.last_ns = ts_ns
                    append((END, row.track, ts_ns, "", args, None))
                else:
                    self._end(row, record)
                continue
            if "cpu" in record:
                args = marked(args, cpu=record["cpu"])
            flow = 0
            if kind == "kernel" or (name == "ioctl" and kind == "syscall"):
                flow = self._caller(thread, kind, row)
            flows = (flow,) if flow else None
            if "launch" in record and phase != "I":
                flows = (*(flows or ()), self._launches.call(record["launch"], ts_ns))
            if phase == "B" and not row.ends and ts_ns >= row.last_ns:
                row.last_ns = ts_ns
                row.open.append(OpenSlice(name, len(ops), flow))
                append((BEGIN, row.track, ts_ns, name, args, flows))
            else:
                if args is not None:
                    record["args"] = args
                self.draw(row, record, flows)
            if kind == "memory":
                self._count_memory(record, thread)
        self._settle()

    def _meet(self, record: Record) -> tuple[Row, HostThread] | None:
        """The row of a record whose row was not found by its key, or that names its thread."""
        layer, pid, tid = record["type"], record.get("pid"), record.get("tid")
        if layer not in LAYER_TITLES or (layer == "transfer" and "gpu" in record):
            return None
        thread = self._threads.get((pid, tid))
        comm = record.get("comm", "")
        if thread is None:
            thread = self._threads[pid, tid] = HostThread(self._tree.thread(pid, tid, comm))
        if comm:
            self._tree.rename_thread(pid, tid, comm)
        row = thread.rows.get(layer)
        if row is None:
            row = thread.rows[layer] = Row(self._tree.layer(thread.track, layer))
            self._rows[layer, pid, tid] = row, thread
        return row, thread

    def _caller(self, thread: HostThread, layer: str, row: Row) -> int:
        """The flow from the call that this ioctl or driver function runs in, 0 if there is none."""
        if row.open:
            return 0  # a driver function that another called: the nesting shows it
        for above in ("syscall", "userspace") if layer == "kernel" else ("userspace",):
            caller = thread.rows.get(above)
            if caller is not None and caller.open and (above != "syscall" or caller.open[-1].name == "ioctl"):
                top = caller.open[-1]
                if not top.flow:
                    self._give_flow(top)
                return top.flow
        return 0

    def _give_flow(self, top: OpenSlice) -> None:
        """Start a flow at an open slice whose begin is still among the operations of this batch."""
        # Odd: the even ones are the launches'.
        top.flow, self._flow = self._flow, self._flow + 2
        kind, track, ts_ns, name, args, flows = self._ops[top.at]
        self._ops[top.at] = (kind, track, ts_ns, name, args, (*(flows or ()), -top.flow))

    def _settle(self) -> None:
        """Give each call that is open over a batch's end its flow now, while its begin can be changed."""
        for thread in self._threads.values():
            for layer in ("userspace", "syscall"):
                row = thread.rows.get(layer)
                for opened in row.open if row else ():
                    if not opened.flow and (layer == "userspace" or opened.name == "ioctl"):
                        self._give_flow(opened)

    def _beside(self, row: Row, fits: Callable[[Row], bool]) -> Row | None:
        """The first extra track of `row` that takes a slice, a new one if none does."""
        for lane in row.beside:
            if fits(lane):
                return lane
        if len(row.beside) >= LANES_MAX:
            self.outcomes.undrawn += 1
            return None
        lane = Row(self._tree.beside(row.track, len(row.beside) + 1))
        row.beside.append(lane)
        return lane

    def draw(self, row: Row, record: Record, flows: Flows | None) -> None:
        """Draw a record of any phase on `row`, or beside it where it does not nest there."""
        ts_ns, name, phase, args = record["ts_ns"], record["name"], record["phase"], record.get("args")
        if phase == "I":
            self._ops.append((INSTANT, row.track, ts_ns, name, args, flows))
        elif phase == "E":
            self._end(row, record)
        elif phase == "X":
            self.complete_on(row, ts_ns, record["dur_ns"], name, args, flows)
        else:
            lane: Row | None = row
            if not row.takes_begin(ts_ns):
                self.outcomes.overlaps += 1
                lane = self._beside(row, lambda other: other.takes_begin(ts_ns))
            if lane is not None:
                lane.last_ns = ts_ns
                lane.open.append(OpenSlice(name, len(self._ops)))
                self._ops.append((BEGIN, lane.track, ts_ns, name, args, flows))

    def complete_on(
        self, row: Row, ts_ns: int, dur_ns: int, name: str, args: Args | None, flows: Flows | None = None
    ) -> None:
        """Draw a slice with a known end on `row`, or beside it where it does not nest there."""
        if row.takes_slice(ts_ns, ts_ns + dur_ns):
            self._ops += complete(row, ts_ns, dur_ns, name, args, flows)
        else:
            self.complete_beside(row, ts_ns, dur_ns, name, args, flows)

    def complete_beside(
        self, row: Row, ts_ns: int, dur_ns: int, name: str, args: Args | None, flows: Flows | None
    ) -> None:
        """Draw a slice with a known end on an extra track beside `row`."""
        self.outcomes.overlaps += 1
        lane = self._beside(row, lambda other: other.takes_slice(ts_ns, ts_ns + dur_ns))
        if lane is not None:
            self._ops += complete(lane, ts_ns, dur_ns, name, args, flows)

    def row_of(self, track: Track) -> Row:
        """The row of a track that belongs to no thread."""
        return self._other_rows.setdefault(track.id, Row(track))

    def _end(self, row: Row, record: Record) -> None:
        name, ts_ns, args = record["name"], record["ts_ns"], record.get("args")
        opened = any(o.name == name for lane in (row, *row.beside) for o in lane.open)
        if not opened and "dur_ns" in record:
            # Its begin was lost, or its writer prints exits only: the duration says when it began.
            start_ns = max(0, ts_ns - record["dur_ns"])
            self.complete_on(row, start_ns, ts_ns - start_ns, name, marked(args, from_duration=True))
        else:
            self._ops += end(row, ts_ns, name, args, self.outcomes)

    def _count_memory(self, record: Record, thread: HostThread) -> None:
        args = record.get("args") or {}
        pid = record.get("pid")
        memory = self._memory.get(pid)
        if memory is None:
            process = thread.track.parent or thread.track
            track = self._tree.child(process, "counter", "device memory", 0, "memory", "bytes")
            memory = self._memory[pid] = DeviceMemory(track)
        size, total = args.get("size"), args.get("total_allocated")
        address = next((args[key] for key in _ADDRESSES if isinstance(args.get(key), int | str)), None)
        if record["name"] == "free":
            known = memory.live.pop(address, 0)
            memory.total_bytes -= size if isinstance(size, int) else known
        elif record["name"] == "alloc" and isinstance(size, int):
            memory.total_bytes += size
            if address is not None and len(memory.live) < ALLOCATIONS_MAX:
                memory.live[address] = size
        if isinstance(total, int):
            memory.total_bytes = total
        self._ops.append((COUNTER, memory.track, record["ts_ns"], memory.total_bytes, None, None))

    def finish(self, end_ns: int) -> None:
        """End what is still open."""
        for row, _ in self._rows.values():
            self.close(row, end_ns)

    def close(self, row: Row, end_ns: int) -> None:
        """End what is still open on one row."""
        self._ops += close_all(row, end_ns, self.outcomes)
