"""Nesting by the native core (`nest.c`), over arrays."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from tracepipe.event.columns import NONE, Bools, Bytes, Int32s, TraceColumns, grown
from tracepipe.event.nesting import NO_ROW, Early, Nesting, Outcomes, ShapeRow, WarpStarts
from tracepipe.event.ops import Op, OpColumns
from tracepipe.native import checked, library, owned
from tracepipe.native.signatures import Events, Shapes, Starts

_ROWS, _UNCLOSED, _NO_BEGIN, _OVERLAPS, _UNDRAWN, _OPS, _EARLY = range(7)
_SHAPE_KINDS: Final = {
    "row": np.int32, "name": np.int32, "has_dur": np.int64, "phase": np.uint8, "takes_flow": np.uint8,
    "has_launch": np.uint8,
}  # fmt: skip


class NativeNesting:
    """Nests one recording by `nest.c`. Its methods are those of `Nesting`, with the same results."""

    def __init__(self, core: ctypes.CDLL, ioctl: int) -> None:
        self._core = core
        self._nest = owned(self, core.tp_nest_new(ioctl), core.tp_nest_free)
        self._ops = OpColumns()
        self._shapes: dict[str, Any] = {name: np.empty(0, kind) for name, kind in _SHAPE_KINDS.items()}
        self._causality = 0

    def _count(self, what: int) -> int:
        return int(self._core.tp_nest_count(self._nest, what))

    @property
    def outcomes(self) -> Outcomes:
        return Outcomes(
            self._count(_UNCLOSED),
            self._count(_NO_BEGIN),
            self._count(_OVERLAPS),
            self._count(_UNDRAWN),
            self._causality,
        )

    @property
    def row_count(self) -> int:
        return self._count(_ROWS)

    def base(self, row: int) -> int:
        return int(self._core.tp_nest_base(self._nest, row))

    def add_row(self, on_stream: bool = False) -> int:
        return checked(self._core.tp_nest_row(self._nest, NO_ROW, on_stream))

    def forget_rows(self) -> None:
        self._core.tp_nest_forget_rows(self._nest)

    def set_above(self, row: int, near: int, far: int, starts_flows: int) -> None:
        self._core.tp_nest_above(self._nest, row, near, far, starts_flows)

    def take_ops(self) -> OpColumns:
        ops, self._ops = self._ops, OpColumns()
        return ops

    def add(self, *ops: Op) -> None:
        self._ops.add(*ops)

    def early(self) -> list[Early]:
        count = self._count(_EARLY)
        if not count:
            return []
        out = np.empty((count, 4), np.int64)
        self._core.tp_nest_early(self._nest, out.ctypes.data, count)
        self._causality += count
        return [Early(*row) for row in out.tolist()]

    def set_shape(self, number: int, shape: ShapeRow) -> None:
        row, name, phase, takes_flow, has_dur, has_launch = shape
        if number >= len(self._shapes["row"]):
            self._shapes = {key: grown(column, number + 1, 0) for key, column in self._shapes.items()}
        values = (row, name, 0 if has_dur else -1, ord(phase), takes_flow, has_launch)
        for column, value in zip(self._shapes.values(), values, strict=True):
            column[number] = value

    def set_shapes(self, row: Int32s, name: Int32s, phase: Bytes, has_dur: Bools) -> None:
        values: tuple[Any, ...] = (row, name, np.where(has_dur, 0, -1), phase, 0, 0)
        self._shapes = {
            key: np.ascontiguousarray(np.broadcast_to(value, len(row)), kind)
            for (key, kind), value in zip(_SHAPE_KINDS.items(), values, strict=True)
        }

    def forget_shapes(self) -> None:
        """Do nothing: a new shape replaces the one that had its number."""

    def open_names(self, count: int) -> Bools:
        used = np.zeros(count, np.bool_)
        self._core.tp_nest_names(self._nest, used.ctypes.data)
        return used

    def rename(self, to: Int32s) -> None:
        self._core.tp_nest_rename(self._nest, to.ctypes.data)

    def events(self, events: TraceColumns, start: int, stop: int, warps: WarpStarts | None = None) -> None:
        shapes = Shapes(*(column.ctypes.data for column in self._shapes.values()))
        ops = self._ops.reserve(self._core.tp_nest_most(self._nest, stop - start))
        bound = None if events.bound_ns is None else events.bound_ns.ctypes.data
        columns = (events.ts_ns, events.dur_ns, events.launch)
        given = Events(*(column.ctypes.data for column in columns), bound, events.shape.ctypes.data)
        starts = Starts(*(() if warps is None else (one.ctypes.data for one in warps.columns())))
        batches = 0 if warps is None else len(warps.place)
        refs = ctypes.byref(given), ctypes.byref(shapes), ctypes.byref(starts)
        count = self._core.tp_nest_events(
            self._nest, *refs, batches, start, stop, ctypes.byref(ops), self._ops.count
        )
        self._ops.count = checked(count)

    def one(self, row: int, phase: str, ts_ns: int, dur_ns: int | None, name: int, event: int) -> None:
        ops = self._ops.reserve(self._core.tp_nest_most(self._nest, 1))
        dur_ns = -1 if dur_ns is None else dur_ns
        count = self._core.tp_nest_one(
            self._nest, row, ord(phase), ts_ns, dur_ns, name, event, ctypes.byref(ops), self._ops.count
        )
        self._ops.count = checked(count)

    def overlap_row(self, row: int, ts_ns: int, end_ns: int) -> int:
        at = int(self._core.tp_nest_overlap_row(self._nest, row, ts_ns, end_ns))
        if at < NO_ROW:
            raise MemoryError
        return at

    def settle(self) -> None:
        # The view of the columns is taken again: operations that were added since may have moved them.
        self._core.tp_nest_settle(self._nest, ctypes.byref(self._ops.reserve(0)), self._ops.count)

    def close(self, row: int, ts_ns: int) -> None:
        ops = self._ops.reserve(self._core.tp_nest_most(self._nest, 0))
        count = self._core.tp_nest_close(self._nest, row, ts_ns, ctypes.byref(ops), self._ops.count)
        self._ops.count = checked(count)


AnyNesting = Nesting | NativeNesting


def new_nesting(ioctl: int = NONE) -> AnyNesting:
    """Return a nesting of the native core where it is loaded, else one in Python."""
    core = library()
    return Nesting(ioctl) if core is None else NativeNesting(core, ioctl)
