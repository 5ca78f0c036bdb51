"""The result of the layout, which converters write: tracks, and operations on them.

Operations of one track are in an order in which a stable sort by time gives correct nesting. Those of all
tracks are in the order of time, except for events that were recorded very late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from tracepipe.event.columns import NONE, Bytes, Int32s, Int64s, Ints, Rows, TraceColumns, unsigned
from tracepipe.event.ops import BEGIN, COUNTER, END, INSTANT, MARKS, MORE_FLOWS, Op, OpColumns
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, Tables
from tracepipe.kernel_names import kernel_title

TrackKind = Literal["process", "thread", "group", "slices", "counter"]
# The distance of ranks in a viewer's order: the overlap tracks of a track come between it and the next.
_RANKS_APART = 1 << 8


@dataclass(frozen=True, slots=True)
class Track:
    """A track. `rank` orders siblings, smallest first. An overlap track has its track's rank, and a number
    from 1 on in `overlap`. `pid` and `tid` are 0 where they are not known. A track with a new name is a new
    object with the same `id`. Its children may still have the object with the old name as their parent.
    """

    id: int
    parent: Track | None
    kind: TrackKind
    name: str
    rank: int = 0
    category: str = ""
    pid: int = 0
    tid: int = 0
    unit: str = ""
    overlap: int = 0
    is_named: bool = True
    """Whether the recording states the name of the process or thread."""

    @property
    def order(self) -> int:
        """The place among siblings, as one number."""
        return self.rank * _RANKS_APART + self.overlap

    def label(self) -> str:
        """The name with the id of the process or thread, as a person sees it."""
        number = {"process": self.pid, "thread": self.tid}.get(self.kind, 0)
        return f"{self.name} {number}" if number else self.name


WARP_BEGIN, WARP_END, WARP_EXIT, WARP_COUNT = 1, 2, 3, 4
"""Kinds of changes: the slice of a warp or range begins, ends or has an exit, or a warp is only counted."""
ONLY_NAME: Final = -1
WARP_LANES: Final = 32
FULL_MASK: Final = (1 << WARP_LANES) - 1


class Kernel(NamedTuple):
    """A kernel with one size of its grid, or the name of ranges of warps, whose `warps` are ONLY_NAME.
    `warps` is how many a block has, 0 where that is not known. `grid_x` and `grid_y` are 0 where blocks are
    numbered in one dimension.
    """

    name: str
    warps: int
    grid_x: int
    grid_y: int

    def place(self, number: int) -> str:
        """The text for the block and the warp of a warp's number in the grid."""
        if not self.warps:
            return f"warp {number}"
        block, warp = divmod(number, self.warps)
        if not self.grid_x:
            return f"block {block} warp {warp}"
        x, y = self.grid_x, self.grid_y
        return f"block ({block % x},{block // x % y},{block // x // y}) warp {warp}"

    def title(self, number: int) -> str:
        """The name of a slice."""
        return self.name if self.warps == ONLY_NAME else f"{self.name} {self.place(number)}"


@lru_cache(maxsize=256)
def kernel_of(name: str, grid: tuple[int, ...], block: tuple[int, ...]) -> Kernel:
    """The kernel of a launch; `grid` and `block` are empty where they are not known."""
    warps = -(-prod(block) // WARP_LANES) if block else 0
    flat = not grid or grid[1:] == (1, 1) or 0 in grid
    # Sizes above the largest number of a warp have the same effect as that.
    most = (1 << 63) - 1
    x, y = (0, 0) if flat else (min(grid[0], most), min(grid[1], most))
    return Kernel(kernel_title(name), min(warps, most), x, y)


class Change(NamedTuple):
    """A change. `value` is how many warps run from then on, NONE where that does not change. `slice` is a
    place in the columns of slices, and `mask` has the lanes of an exit.
    """

    ts_ns: int
    kind: int
    slice: int
    value: int
    mask: int


@dataclass(slots=True)
class Slices:
    """Slices as columns, of the shape `(slices,)` each. `source_ns`, `exits`, `cycles` and `lanes` are NONE
    where they are not known or need not be shown. `flow` is a flow or 0. `row` is the number of a track of
    the GPU.
    """

    row: Int32s
    kernel: Int32s
    number: Int64s
    source_ns: Int64s
    exits: Int64s
    cycles: Int64s
    lanes: Int64s
    flow: Int64s
    unclosed: Bytes

    def __len__(self) -> int:
        return len(self.row)

    def columns(self) -> list[Any]:
        """The columns in the order of the fields."""
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def take(self, places: Rows | list[int]) -> Slices:
        """The slices of some places, in that order."""
        return Slices(*(column[places] for column in self.columns()))


def joined_slices(parts: list[Slices]) -> Slices:
    """The slices of several parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Slices(*map(np.concatenate, zip(*(part.columns() for part in parts), strict=True)))


@dataclass(slots=True, eq=False)
class WarpChanges:
    """Changes of one GPU, which has an `id`. `tracks` are by the rows of slices; the one at `counter_row` is
    the `counter` of running warps. A reading of the GPU's timer is the time of its slice, plus `offset_ns`,
    plus a small difference that is usually not negative.
    """

    id: int
    tracks: list[Track]
    kernels: list[Kernel]
    counter_row: int
    offset_ns: int
    ts_ns: Int64s
    kind: Bytes
    slice: Int32s
    value: Int64s
    mask: Int64s
    slices: Slices

    @property
    def counter(self) -> Track:
        """The track that counts running warps."""
        return self.tracks[self.counter_row]

    def rows(self) -> Iterator[Change]:
        """The changes one by one."""
        columns = (self.ts_ns, self.kind, self.slice, self.value, self.mask)
        yield from map(Change._make, zip(*(column.tolist() for column in columns), strict=True))

    def take(self, places: Rows) -> WarpChanges:
        """The changes of some places, in that order."""
        columns: dict[str, Any] = {name: getattr(self, name)[places] for name in Change._fields}
        return replace(self, **columns)

    def track(self, at: int) -> Track:
        """The track of a slice."""
        return self.tracks[int(self.slices.row[at])]

    def name(self, at: int) -> str:
        """The name of a slice: kernel, block and warp, or its range."""
        return self.kernels[int(self.slices.kernel[at])].title(int(self.slices.number[at]))

    def flow(self, at: int) -> int:
        """The flow of a slice, 0 without one."""
        return int(self.slices.flow[at])

    def args(self, at: int) -> Args:
        """The arguments of the slice of a warp or a range."""
        slices = self.slices
        known = {"source_ns": slices.source_ns, "exits": slices.exits, "cycles": slices.cycles,
                 "lanes": slices.lanes}  # fmt: skip
        args: Args = {name: int(column[at]) for name, column in known.items() if column[at] != NONE}
        return args | {"unclosed": True} if slices.unclosed[at] else args


FIRST_EXTRA = -2
"""The `event` of an operation whose arguments are the first of `Drawn.extras`; -3 is that of the second, …"""


@dataclass(slots=True, eq=False)
class Book:
    """The meaning of the numbers in operations: `tracks` by row, `names`, the tables of the recording, and
    pairs of further flows (see `ops.Op`).
    """

    tables: Tables
    tracks: list[Track] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    more_flows: Int64s = field(default_factory=lambda: np.empty((0, 2), np.int64))


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
    """The drawing of one batch. `declared` are tracks that exist from here on, or have a new name, each after
    its parent and before its use. `order` has the places of `ops` in their order. `warps` are the changes of
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

    def drawn(self) -> dict[str, Any]:
        """The columns of the operations that are drawn, in any order: most often they need not be copied."""
        columns = self.ops.used()
        is_all = len(self.order) == self.ops.count
        return columns if is_all else {name: column[self.order] for name, column in columns.items()}

    def flows(self, flow: int, flow2: int) -> list[int]:
        """All flows of an operation that has these two."""
        flows = [flow]
        while flow2 >= MORE_FLOWS:
            more, flow2 = self.book.more_flows[flow2 - MORE_FLOWS].tolist()
            flows.append(more)
        return [one for one in (*flows, flow2) if one]

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
            flows = tuple(self.flows(flow, flow2))
            yield Item(kind, tracks[row], ts_ns, names[name], self.args_of(event, mark) or None, flows)
        for warps in self.warps:
            yield from _items_of(warps)


def _items_of(warps: WarpChanges) -> Iterator[Item]:
    """The changes of one GPU. The count of running warps comes after the change that it is for."""
    for change in warps.rows():
        ts_ns, kind, at, value, mask = change
        if kind == WARP_BEGIN:
            flows = (warps.flow(at),) if warps.flow(at) else ()
            yield Item(BEGIN, warps.track(at), ts_ns, warps.name(at), warps.args(at) or None, flows)
        elif kind == WARP_END:
            yield Item(END, warps.track(at), ts_ns, warps.name(at))
        elif kind != WARP_COUNT:
            args: Args = {"mask": f"0x{mask:08x}", "lanes": mask.bit_count()}
            yield Item(INSTANT, warps.track(at), ts_ns, "exit", args)
        if value >= 0:
            yield Item(COUNTER, warps.counter, ts_ns, value)
