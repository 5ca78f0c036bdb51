"""Slices of a GPU and its SMs that summarize the tracks in them: kernels, and how many warps there are."""

from __future__ import annotations

import numpy as np

from tracepipe.event.columns import NONE, Int32s, Int64s, TraceColumns, grown
from tracepipe.event.nesting import NO_ROW
from tracepipe.event.ops import BEGIN, END, OpColumns
from tracepipe.event.shape import Shape
from tracepipe.layout.rows import Rows
from tracepipe.layout.shares import Stretches
from tracepipe.layout.timeline import slice_name
from tracepipe.units import counted


def _add_slices(ops: OpColumns, row: Int32s, name: Int32s, begin_ns: Int64s, end_ns: Int64s) -> None:
    """Add slices without arguments to operations."""
    count = 2 * len(row)
    ops.reserve(count)
    columns = {key: column[ops.count : ops.count + count] for key, column in ops.columns.items()}
    for key in ("event", "slice_id", "parent"):
        columns[key][:] = NONE
    for key in ("mark", "flow", "flow2"):
        columns[key][:] = 0
    columns["kind"][0::2], columns["kind"][1::2] = BEGIN, END
    columns["ts"][0::2], columns["ts"][1::2] = begin_ns, end_ns
    columns["row"][:], columns["name"][:] = np.repeat(row, 2), np.repeat(name, 2)
    ops.count += count


class KernelsOfGpus:
    """Shows kernels on the row of their GPU. A kernel is shown there if no other is being shown, so that one
    row is enough; on its stream, each kernel is shown. Memory is used for each GPU, but none for a kernel.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._gpu: Int32s = np.zeros(0, np.int32)
        self._name: Int32s = np.zeros(0, np.int32)
        """By the number of a shape: the GPU's row, NONE where its events are not whole kernels, and its
        name."""
        self._ended_ns: dict[int, int] = {}
        """By row: when the last kernel that is shown ends."""

    def add_shape(self, number: int, shape: Shape) -> None:
        """Look at a shape that is new; its row is made."""
        self._gpu, self._name = grown(self._gpu, number + 1, NONE), grown(self._name, number + 1, 0)
        self._gpu[number] = NONE
        if shape.type == "gpu_kernel" and shape.phase == "X" and self._rows.drawn[number]:
            self._gpu[number] = self._rows.row_of(self._rows.gpu(shape.gpu or 0))
            self._name[number] = self._rows.name(slice_name(shape))

    def draw(self, events: TraceColumns, ops: OpColumns) -> None:
        """Add the slices of kernels to operations. The events are in the order of time."""
        shapes = np.maximum(events.shape, 0)
        rows = np.where(events.shape >= 0, self._gpu[shapes], NONE) if len(self._gpu) else shapes[:0]
        places = np.flatnonzero(rows >= 0)
        if not len(places):
            return
        taken = np.zeros(len(places), np.bool_)
        ended = self._ended_ns
        begins_ns = events.ts_ns[places]
        ends_ns = begins_ns + events.dur_ns[places]
        times = zip(rows[places].tolist(), begins_ns.tolist(), ends_ns.tolist(), strict=True)
        for at, (row, begin_ns, end_ns) in enumerate(times):
            if begin_ns >= ended.get(row, begin_ns):
                ended[row], taken[at] = end_ns, True
        names = self._name[shapes[places][taken]]
        _add_slices(ops, rows[places][taken], names, begins_ns[taken], ends_ns[taken])


class WarpsOfSms:
    """Shows each stretch of time in which an SM has warps as a slice on its row, named by how many there are
    at most. SMs have the numbers of their rows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._ops = OpColumns()
        self._stretches = Stretches()

    def take(self, ts_ns: Int64s, row: Int32s, delta: Int64s) -> None:
        """Take changes in the order of time. Those with NO_ROW belong to no SM."""
        of_sms = np.flatnonzero((row != NO_ROW) & (delta != 0))
        if len(of_sms):
            self._show(*self._stretches.take(ts_ns[of_sms], row[of_sms], delta[of_sms]))

    def _show(self, row: Int32s, most: Int64s, begin_ns: Int64s, end_ns: Int64s) -> None:
        counts, places = np.unique(most, return_inverse=True)
        texts = [counted(count, "warp|warps") for count in counts.tolist()]
        names = np.array([self._rows.name(text) for text in texts], np.int32)
        _add_slices(self._ops, row, names[places], begin_ns, end_ns)

    def finish(self, end_ns: int) -> None:
        """Show the stretches that have not ended at the end."""
        self._show(*self._stretches.rest(end_ns))

    def take_ops(self) -> OpColumns:
        """The operations since the last call."""
        ops, self._ops = self._ops, OpColumns()
        return ops


class Summaries:
    """All summaries. `on_sms` takes the changes of warps."""

    def __init__(self, rows: Rows) -> None:
        self._kernels, self.on_sms = KernelsOfGpus(rows), WarpsOfSms(rows)

    def add_shape(self, number: int, shape: Shape) -> None:
        """Look at a shape that is new; its row is made."""
        self._kernels.add_shape(number, shape)

    def draw(self, events: TraceColumns | None, ops: OpColumns) -> None:
        """Add the summaries of events and warps to operations."""
        if events is not None:
            self._kernels.draw(events, ops)
        ops.extend(self.on_sms.take_ops())
