"""What the layout returns and a converter writes: tracks, and operations on them.

Operations of one track are in an order in which a stable sort by time gives correct nesting. Those of all
tracks are in the order of time, except for events that were recorded very late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tracepipe.event.columns import NONE, Int64s, Ints, TraceColumns, unsigned
from tracepipe.event.ops import BEGIN, COUNTER, END, INSTANT, MARKS, Op, OpColumns
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, Tables
from tracepipe.kernel_names import kernel_title
from tracepipe.layout.changes import WARP_BEGIN, WARP_COUNT, WARP_END, WarpChanges
from tracepipe.layout.tracks import Track

__all__ = ["BEGIN", "COUNTER", "END", "INSTANT", "Book", "Drawn", "Item", "Track", "TrackKind"]

TrackKind = Literal["process", "thread", "group", "slices", "counter"]
FIRST_EXTRA = -2
"""The `event` of an operation whose arguments are the first of `Drawn.extras`; -3 is that of the second, …"""


@dataclass(slots=True, eq=False)
class Book:
    """What the numbers in operations refer to: `tracks` by row, `names`, and the tables of the recording."""

    tables: Tables
    tracks: list[Track] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


class Item(NamedTuple):
    """An operation with its texts and arguments. `name` is the value for a counter. `args` are None where
    there are none. `flows` are the ids of flows: negative where the flow starts, positive where it continues.
    """

    kind: int
    track: Track
    ts_ns: int
    name: Any
    args: Args | None = None
    flows: tuple[int, ...] = ()


PYTHON = "python"
"""The argument that shows the Python line of a call. A recorded argument of that name replaces it."""
KERNEL = "kernel"
"""The argument that shows the whole name of a kernel, where its slices have a shorter one."""


def shown_before(shape: Shape) -> Args:
    """The arguments that events of a shape show before their own."""
    known = (
        shape.phase != "E" and shape.cpu is not None and not shape.on_stream and shape.type != "gpu_thread"
    )
    if shape.type == "gpu_kernel" and shape.phase != "E" and slice_name(shape) != shape.name:
        return {KERNEL: shape.name}
    return {"cpu": shape.cpu} if known else {}


def slice_name(shape: Shape) -> str:
    """The name of a shape's slices."""
    return kernel_title(shape.name) if shape.type == "gpu_kernel" else shape.name


def shows_launch(shape: Shape) -> bool:
    """Whether a shape's events show their launch, after their arguments."""
    return shape.on_stream and shape.phase != "E" and shape.has_launch


def shown_after(shape: Shape) -> Args:
    """The arguments that events of a shape show after their own and their launch."""
    if shape.on_stream and shape.phase != "E":
        sizes = {"grid": shape.grid, "block": shape.block}
        return {name: list(size) for name, size in sizes.items() if size is not None}
    return {}


@dataclass(slots=True, eq=False)
class Drawn:
    """What one batch draws. `declared` are tracks that exist from here on, or have a new name: after their
    parents, before their use. `order` has the places of `ops` in their order. `warps` are the changes of
    GPUs, which have separate tracks. `switches` are context switches in the order of time, for a format that
    has its own form for them; None where there are none, or where they are among the operations.
    """

    book: Book
    declared: list[Track]
    events: TraceColumns | None
    ops: OpColumns
    order: Ints
    extras: list[Args]
    warps: list[WarpChanges]
    switches: TraceColumns | None = None

    def rows(self) -> Iterator[Op]:
        """The operations in their order."""
        return self.ops.rows(self.order)

    def lines(self) -> Int64s | None:
        """By event: the Python frame that it shows, NONE without one; None where no event shows any."""
        if self.events is None or self.events.stack is None:
            return None
        return self.book.tables.stacks.own(self.events.stack)

    def args_of(self, event: int, mark: int) -> Args:
        """All arguments of an operation, in the order in which they are shown."""
        args: Args = {}
        if event <= FIRST_EXTRA:
            args = dict(self.extras[FIRST_EXTRA - event])
        elif event >= 0:
            assert self.events is not None
            events, tables = self.events, self.book.tables
            shape = tables.shapes[int(events.shape[event])]
            assert shape is not None
            args = shown_before(shape) | tables.args(int(events.args[event]))
            if events.stack is not None and PYTHON not in args:
                (line,) = tables.stacks.own(events.stack[event : event + 1]).tolist()
                if line != NONE:
                    args[PYTHON] = str(tables.stacks.frames[line])
            if events.source_ns is not None and (source_ns := int(events.source_ns[event])) != NONE:
                args["source_ns"] = source_ns
            if shows_launch(shape):
                args["launch"] = unsigned(int(events.launch[event]))
            args |= shown_after(shape)
        if mark:
            args[MARKS[mark]] = True
        return args

    def counted(self, event: int, value: int) -> int | float:
        """The value of a counter. One that is not an integer is kept as an argument."""
        return float(self.args_of(event, 0)["value"]) if event <= FIRST_EXTRA else value

    def items(self) -> Iterator[Item]:
        """All operations one by one, on hosts and on GPUs, for writers that need not be fast."""
        tracks, names = self.book.tracks, self.book.names
        for kind, row, ts_ns, name, event, mark, flow, flow2, value, _ in self.rows():
            if kind == COUNTER:
                yield Item(COUNTER, tracks[row], ts_ns, self.counted(event, value))
                continue
            flows = tuple(one for one in (flow, flow2) if one)
            yield Item(kind, tracks[row], ts_ns, names[name], self.args_of(event, mark) or None, flows)
        for warps in self.warps:
            yield from _items_of(warps)


def _items_of(warps: WarpChanges) -> Iterator[Item]:
    """The changes of one GPU. The count of running warps comes after the change that it is for."""
    for change in warps.rows():
        if change.kind == WARP_BEGIN:
            flow = warps.flow(change.slice)
            name, args = warps.name(change.slice), warps.args(change.slice)
            yield Item(
                BEGIN, warps.track(change.slice), change.ts_ns, name, args or None, (flow,) if flow else ()
            )
        elif change.kind == WARP_END:
            yield Item(END, warps.track(change.slice), change.ts_ns, warps.name(change.slice))
        elif change.kind != WARP_COUNT:
            mask = change.mask
            args = {"mask": f"0x{mask:08x}", "lanes": mask.bit_count()}
            yield Item(INSTANT, warps.track(change.slice), change.ts_ns, "exit", args)
        if change.value >= 0:
            yield Item(COUNTER, warps.counter, change.ts_ns, change.value)
