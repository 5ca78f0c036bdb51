"""What `layout` gives and a converter writes: tracks, and operations on them.

Operations of one track come in an order in which a stable sort by time gives correct nesting; over all tracks
they come in the order of time, but for those of events that were recorded very late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tracepipe.event.columns import NONE, Int64s, TraceColumns, unsigned
from tracepipe.event.ops import BEGIN, COUNTER, END, INSTANT, MARKS, Op, OpColumns
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, Tables
from tracepipe.kernel_names import kernel_title
from tracepipe.layout.changes import WARP_BEGIN, WARP_COUNT, WARP_END, WarpChanges
from tracepipe.layout.tracks import Track

__all__ = ["BEGIN", "COUNTER", "END", "INSTANT", "Book", "Drawn", "Item", "Track", "TrackKind"]

TrackKind = Literal["process", "thread", "group", "slices", "counter"]
FIRST_EXTRA = -2
"""The `event` of an operation that has arguments of its own, the first of `Drawn.extras`; then -3, …"""


@dataclass(slots=True, eq=False)
class Book:
    """What the numbers of operations mean: `tracks` by row, `names`, and the tables of the recording."""

    tables: Tables
    tracks: list[Track] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


class Item(NamedTuple):
    """An operation with all that it says. `name` is a counter's value. `args` are None where there are none;
    `flows` are arrows by their ids: negative where the arrow starts, positive where it goes on.
    """

    kind: int
    track: Track
    ts_ns: int
    name: Any
    args: Args | None = None
    flows: tuple[int, ...] = ()


PYTHON = "python"
"""What shows the line of Python that made a call; an argument of that name takes its place."""
KERNEL = "kernel"
"""What shows the whole name of a kernel, where its slices have a shorter one."""


def shown_before(shape: Shape) -> Args:
    """What a shape's events show before their arguments."""
    known = (
        shape.phase != "E" and shape.cpu is not None and not shape.on_stream and shape.type != "gpu_thread"
    )
    if shape.type == "gpu_kernel" and shape.phase != "E" and slice_name(shape) != shape.name:
        return {KERNEL: shape.name}
    return {"cpu": shape.cpu} if known else {}


def slice_name(shape: Shape) -> str:
    """What the slices of a shape are called."""
    return kernel_title(shape.name) if shape.type == "gpu_kernel" else shape.name


def shows_launch(shape: Shape) -> bool:
    """Whether a shape's events show their launch, after their arguments."""
    return shape.on_stream and shape.phase != "E" and shape.has_launch


def shown_after(shape: Shape) -> Args:
    """What a shape's events show after their arguments and their launch."""
    if shape.on_stream and shape.phase != "E":
        sizes = {"grid": shape.grid, "block": shape.block}
        return {name: list(size) for name, size in sizes.items() if size is not None}
    return {}


@dataclass(slots=True, eq=False)
class Drawn:
    """What one batch draws. `declared` are tracks that exist from here on, or have a new name: after their
    parents, before their use. `order` says in which order `ops` come. `warps` are changes
    of GPUs, which are on tracks of their own. `switches` are events of scheduling in the order of time, for a
    format that has a form of its own for them; None where there are none, or they are among the operations.
    """

    book: Book
    declared: list[Track]
    events: TraceColumns | None
    ops: OpColumns
    order: Any
    extras: list[Args]
    warps: list[WarpChanges]
    switches: TraceColumns | None = None

    def rows(self) -> Iterator[Op]:
        """The operations in their order."""
        return self.ops.rows(self.order)

    def lines(self) -> Int64s | None:
        """By event the frame of Python that it shows, NONE without one; None where none shows any."""
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
        """The value of a counter: one that is not whole is an argument of its own."""
        return float(self.args_of(event, 0)["value"]) if event <= FIRST_EXTRA else value

    def items(self) -> Iterator[Item]:
        """Everything, on hosts and on GPUs, for writers that are not in a hurry."""
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
    """The changes of one GPU. How many warps run comes after the change that it is counted at."""
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
