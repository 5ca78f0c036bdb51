"""Lays out what happens on the host: a row for each layer of each thread, and the arrows between layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tracepipe.event.model import Shape, SharedArgs, Timed
from tracepipe.event.outcomes import Outcomes
from tracepipe.event.vocabulary import ADDRESS_KEYS, RUNNING
from tracepipe.layout.launches import Launches
from tracepipe.layout.rows import DEPTH_MAX, LANES_MAX, Row, close_all, complete, end, marked
from tracepipe.layout.timeline import BEGIN, COUNTER, END, INSTANT, Flows, Track
from tracepipe.layout.tree import LAYER_TITLES, Tree

# Live allocations whose sizes are remembered for their frees.
ALLOCATIONS_MAX = 1 << 20


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
        self._threads: dict[tuple[int | None, int | None], HostThread] = {}
        self._other_rows: dict[int, Row] = {}
        self._memory: dict[int | None, DeviceMemory] = {}
        self._flow = 1

    def place(self, events: list[Timed], special: Callable[[int, Shape], None]) -> None:
        """Draw events in time order; what is not a host layer's goes to `special`."""
        append, ops = self._ops.append, self._ops
        for ts_ns, shape in events:
            row = shape.row
            if row is None:
                if not self._meet(shape):
                    special(ts_ns, shape)
                    continue
                row = shape.row
            if shape.phase == "E":
                opened = row.open
                if (
                    opened
                    and opened[-1][0] == shape.name
                    and ts_ns >= row.last_ns
                    and len(opened) < DEPTH_MAX
                ):
                    opened.pop()
                    row.last_ns = ts_ns
                    append((END, row.track, ts_ns, shape.name, shape.args, None))
                else:
                    self._end(row, ts_ns, shape.dur_ns, shape.name, shape.args)
                continue
            flow = self._caller(shape.thread, shape.type, row) if shape.may_be_called else 0
            flows: Flows | None = (flow,) if flow else None
            if shape.launch is not None and shape.phase != "I":
                flows = (*(flows or ()), self._launches.call(shape.launch, ts_ns))
            if shape.phase == "B" and not row.ends and ts_ns >= row.last_ns and len(row.open) < DEPTH_MAX:
                row.last_ns = ts_ns
                row.open.append((shape.name, len(ops), flow))
                append((BEGIN, row.track, ts_ns, shape.name, shape.args, flows))
            elif shape.phase == "I":
                append((INSTANT, row.track, ts_ns, shape.name, shape.args, flows))
            else:
                self.draw(row, shape.phase, ts_ns, shape.dur_ns, shape.name, shape.args, flows)
            if shape.type == "memory":
                self._count_memory(ts_ns, shape)

    def _meet(self, shape: Shape) -> bool:
        """Settle where the events of a shape are drawn; False if that is not here."""
        layer, pid, tid = shape.type, shape.pid, shape.tid
        if layer not in LAYER_TITLES or (layer == "transfer" and "gpu" in shape.record):
            return False
        thread = self._threads.get((pid, tid))
        comm = shape.record.get("comm", "")
        if thread is None:
            thread = self._threads[pid, tid] = HostThread(self._tree.thread(pid, tid, comm))
        if comm:
            self._tree.rename_thread(pid, tid, comm)
        # A scheduler of the GPU's work is a function of the driver, and nests among the others.
        calls = layer == "scheduler" and shape.phase != "I" and shape.name != RUNNING
        drawn = "kernel" if calls else layer
        row = thread.rows.get(drawn)
        if row is None:
            row = thread.rows[drawn] = Row(self._tree.layer(thread.track, drawn))
        shape.row, shape.thread = row, thread
        shape.may_be_called = drawn == "kernel" or (layer == "syscall" and shape.name == "ioctl")
        if shape.phase != "E" and "cpu" in shape.record:
            args = {"cpu": shape.record["cpu"], **(shape.args or {})}
            # Shared only where the shape is: the others' would be kept for one event.
            shape.args = args if shape.args and type(shape.args) is dict else SharedArgs(args)
        return True

    def _caller(self, thread: HostThread, layer: str, row: Row) -> int:
        """The flow from the call that this ioctl or driver function runs in, 0 if there is none."""
        if row.open:
            return 0  # a driver function that another called: the nesting shows it
        for above in ("userspace",) if layer == "syscall" else ("syscall", "userspace"):
            caller = thread.rows.get(above)
            if caller is not None and caller.open and (above != "syscall" or caller.open[-1][0] == "ioctl"):
                return caller.open[-1][2] or self._give_flow(caller, len(caller.open) - 1)
        return 0

    def _give_flow(self, row: Row, depth: int) -> int:
        """Start a flow at an open slice whose begin is still among the operations of this batch."""
        # Odd: the even ones are the launches'.
        flow, self._flow = self._flow, self._flow + 2
        name, at, _ = row.open[depth]
        row.open[depth] = name, at, flow
        kind, track, ts_ns, shown, args, flows = self._ops[at]
        self._ops[at] = (kind, track, ts_ns, shown, args, (*(flows or ()), -flow))
        return flow

    def settle(self) -> None:
        """Give each call that is open over a batch's end its flow now, while its begin can be changed."""
        for thread in self._threads.values():
            for layer in ("userspace", "syscall"):
                row = thread.rows.get(layer)
                if row is None:
                    continue
                for depth, (name, _, flow) in enumerate(row.open):
                    if not flow and (layer == "userspace" or name == "ioctl"):
                        self._give_flow(row, depth)

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

    def draw(
        self, row: Row, phase: str, ts_ns: int, dur_ns: int | None, name: str, args: Any, flows: Flows | None
    ) -> None:
        """Draw an event of any phase on `row`, or beside it where it does not nest there."""
        if phase == "I":
            self._ops.append((INSTANT, row.track, ts_ns, name, args, flows))
        elif phase == "E":
            self._end(row, ts_ns, dur_ns, name, args)
        elif phase == "X":
            self.complete_on(row, ts_ns, dur_ns or 0, name, args, flows)
        else:
            lane: Row | None = row
            if not row.takes_begin(ts_ns):
                self.outcomes.overlaps += 1
                lane = self._beside(row, lambda other: other.takes_begin(ts_ns))
            if lane is not None:
                lane.last_ns = ts_ns
                lane.open.append((name, len(self._ops), 0))
                self._ops.append((BEGIN, lane.track, ts_ns, name, args, flows))

    def complete_on(
        self, row: Row, ts_ns: int, dur_ns: int, name: str, args: Any, flows: Flows | None = None
    ) -> None:
        """Draw a slice with a known end on `row`, or beside it where it does not nest there."""
        if row.takes_slice(ts_ns, ts_ns + dur_ns):
            self._ops += complete(row, ts_ns, dur_ns, name, args, flows)
        else:
            self.complete_beside(row, ts_ns, dur_ns, name, args, flows)

    def complete_beside(
        self, row: Row, ts_ns: int, dur_ns: int, name: str, args: Any, flows: Flows | None
    ) -> None:
        """Draw a slice with a known end on an extra track beside `row`."""
        self.outcomes.overlaps += 1
        lane = self._beside(row, lambda other: other.takes_slice(ts_ns, ts_ns + dur_ns))
        if lane is not None:
            self._ops += complete(lane, ts_ns, dur_ns, name, args, flows)

    def row_of(self, track: Track) -> Row:
        """The row of a track that belongs to no thread."""
        return self._other_rows.setdefault(track.id, Row(track))

    def _end(self, row: Row, ts_ns: int, dur_ns: int | None, name: str, args: Any) -> None:
        opened = any(o[0] == name for lane in (row, *row.beside) for o in lane.open)
        if not opened and dur_ns is not None:
            # Its begin was lost, or its writer prints exits only: the duration says when it began.
            start_ns = max(0, ts_ns - dur_ns)
            self.complete_on(row, start_ns, ts_ns - start_ns, name, marked(args, from_duration=True))
        else:
            self._ops += end(row, ts_ns, name, args, self.outcomes)

    def _count_memory(self, ts_ns: int, shape: Shape) -> None:
        args: dict[str, Any] = shape.args or {}
        if shape.name not in ("alloc", "free") and not isinstance(args.get("total_allocated"), int):
            return  # it allocates nothing on a GPU: a mapping, a memset
        pid, thread = shape.pid, shape.thread
        memory = self._memory.get(pid)
        if memory is None:
            process = thread.track.parent or thread.track
            track = self._tree.child(process, "counter", "device memory", 0, "memory", "bytes")
            memory = self._memory[pid] = DeviceMemory(track)
        size, total = args.get("size"), args.get("total_allocated")
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
        self._ops.append((COUNTER, memory.track, ts_ns, memory.total_bytes, None, None))

    def finish(self, end_ns: int) -> None:
        """End what is still open."""
        for thread in self._threads.values():
            for row in thread.rows.values():
                self.close(row, end_ns)

    def close(self, row: Row, end_ns: int) -> None:
        """End what is still open on one row."""
        self._ops += close_all(row, end_ns, self.outcomes)
