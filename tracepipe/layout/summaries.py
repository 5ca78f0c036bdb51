"""What a GPU and its SMs show of what is on the tracks in them: kernels, how busy it is, how many warps."""

from __future__ import annotations

from typing import Final

import numpy as np

from tracepipe.event.columns import NONE, Int32s, Int64s, TraceColumns, distinct, grown
from tracepipe.event.nesting import NO_ROW
from tracepipe.event.ops import BEGIN, COUNTER, END, OpColumns, op_of
from tracepipe.event.shape import Shape
from tracepipe.event.vocabulary import GPU_BUSY
from tracepipe.layout.rows import RANK_BUSY, SUMMARY, Rows
from tracepipe.layout.shares import Share
from tracepipe.layout.timeline import Track, slice_name

# At most this many GPUs have a counter of how busy they are: each takes some kilobytes.
BUSY_GPUS_MAX: Final = 64


def _add_slices(ops: OpColumns, row: Int32s, name: Int32s, begin_ns: Int64s, end_ns: Int64s) -> None:
    """Add slices without arguments to operations."""
    count = 2 * len(row)
    ops.reserve(count)
    columns = {key: column[ops.count : ops.count + count] for key, column in ops.columns.items()}
    for key in ("event", "span", "parent"):
        columns[key][:] = NONE
    for key in ("mark", "flow", "flow2"):
        columns[key][:] = 0
    columns["kind"][0::2], columns["kind"][1::2] = BEGIN, END
    columns["ts"][0::2], columns["ts"][1::2] = begin_ns, end_ns
    columns["row"][:], columns["name"][:] = np.repeat(row, 2), np.repeat(name, 2)
    ops.count += count


class _Stretches:
    """When there is any of what begins and ends, by the number of what it is on."""

    def __init__(self) -> None:
        self._count: Int64s = np.zeros(0, np.int64)
        self._begin_ns: Int64s = np.zeros(0, np.int64)
        self._most: Int64s = np.zeros(0, np.int64)
        """Of a stretch that goes on: how many there are, since when, how many there were at most."""

    def take(self, ts_ns: Int64s, on: Int32s, delta: Int64s) -> tuple[Int32s, Int64s, Int64s, Int64s]:
        """Take changes in the order of time. Gives stretches that are over: on what, how many there were at
        most, begin, end.
        """
        order = np.argsort(on, kind="stable")
        ts_ns, on, delta = ts_ns[order], on[order], delta[order].astype(np.int64)
        size = int(on[-1]) + 1
        self._count, self._begin_ns = grown(self._count, size, 0), grown(self._begin_ns, size, 0)
        self._most = grown(self._most, size, 0)
        is_first = np.append(True, on[1:] != on[:-1])
        after = np.cumsum(delta)
        first = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
        count = after - (after - delta)[first] + self._count[on]
        starts = np.flatnonzero(is_first | np.append(False, count[:-1] == 0))
        ends = np.append(starts[1:], len(on)) - 1
        goes_on = is_first[starts] & (self._count[on[starts]] > 0)
        begin_ns = np.where(goes_on, self._begin_ns[on[starts]], ts_ns[starts])
        most = np.maximum.reduceat(count, starts)
        most = np.where(goes_on, np.maximum(most, self._most[on[starts]]), most)
        self._count[on[ends]] = count[ends]
        self._begin_ns[on[ends]], self._most[on[ends]] = begin_ns, most
        over = count[ends] == 0
        return on[starts[over]], most[over], begin_ns[over], ts_ns[ends[over]]

    def rest(self, end_ns: int) -> tuple[Int32s, Int64s, Int64s, Int64s]:
        """Those that go on, as if they were over then."""
        on = np.flatnonzero(self._count > 0).astype(np.int32)
        return on, self._most[on], self._begin_ns[on], np.maximum(self._begin_ns[on], end_ns)


class KernelsOfGpus:
    """A kernel is shown where none runs that is shown already, so that they need no more than one row; on its
    stream each is. Takes memory for each GPU, none for a kernel.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._gpu: Int32s = np.zeros(0, np.int32)
        self._name: Int32s = np.zeros(0, np.int32)
        """By the number of a shape: the GPU's row, NONE where it is no whole kernel, and its name."""
        self._ended_ns: dict[int, int] = {}
        """By row when the last kernel ends that is shown."""

    def meet(self, number: int, shape: Shape) -> None:
        """Look at a shape that is new; its row is made."""
        self._gpu, self._name = grown(self._gpu, number + 1, NONE), grown(self._name, number + 1, 0)
        self._gpu[number] = NONE
        if shape.type == "gpu_kernel" and shape.phase == "X" and self._rows.drawn[number]:
            self._gpu[number] = self._rows.row_of(self._rows.gpu(shape.gpu or 0))
            self._name[number] = self._rows.name(slice_name(shape))

    def draw(self, events: TraceColumns, ops: OpColumns) -> None:
        """Add what events show to operations; the events are in the order of time."""
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


class BusyGpus:
    """Counts how much of the time anything is on a stream of a GPU. GPUs go by their tracks' numbers."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._gpu: Int32s = np.zeros(0, np.int32)
        """By row the GPU of which it is a stream, NONE where it is none."""
        self._tracks: dict[int, Track] = {}
        self._shares: dict[int, Share] = {}
        self._stretches = _Stretches()

    def take(self, ops: OpColumns, order: Int64s) -> None:
        """Take note of operations in an order that is that of time."""
        self._meet_rows()
        row, kind = ops.columns["row"][order], ops.columns["kind"][order]
        places = np.flatnonzero((self._gpu[row] != NONE) & ((kind == BEGIN) | (kind == END)))
        if len(places):
            delta = np.where(kind[places] == BEGIN, 1, -1)
            self._add(*self._stretches.take(ops.columns["ts"][order[places]], self._gpu[row[places]], delta))

    def _meet_rows(self) -> None:
        """Look at the rows that are new."""
        if new := [self._gpu_of(track) for track in self._rows.book.tracks[len(self._gpu) :]]:
            self._gpu = np.append(self._gpu, np.array(new, np.int32))

    def _gpu_of(self, track: Track) -> int:
        """The GPU of which a track is a stream, NONE where it is none or there are too many."""
        gpu = track.parent
        if track.kind != "slices" or track.category != "gpu" or gpu is None:
            return NONE
        if gpu.id not in self._tracks and len(self._tracks) >= BUSY_GPUS_MAX:
            return NONE
        self._tracks[gpu.id] = gpu
        return gpu.id

    def _add(self, gpus: Int32s, most: Int64s, begin_ns: Int64s, end_ns: Int64s) -> None:
        for gpu in distinct(gpus).tolist():
            mine = gpus == gpu
            self._shares.setdefault(gpu, Share()).add(begin_ns[mine], end_ns[mine])

    def finish(self) -> None:
        """Draw what is known at the end, when nothing is on a stream any more."""
        for gpu, share in self._shares.items():
            track = self._rows.tree.child(self._tracks[gpu], "counter", GPU_BUSY, RANK_BUSY, SUMMARY, "%")
            row = self._rows.row_of(track)
            self._rows.nesting.add(
                *(op_of(COUNTER, row, ts_ns, 0, NONE, value) for ts_ns, value in share.percent())
            )


class WarpsOfSms:
    """Shows on the row of an SM each stretch of time in which it has warps, by how many there are at most.
    SMs go by their rows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._ops = OpColumns()
        self._stretches = _Stretches()

    def take(self, ts_ns: Int64s, row: Int32s, delta: Int64s) -> None:
        """Take changes in the order of time, of SMs or, with NO_ROW, of none."""
        of_sms = np.flatnonzero((row != NO_ROW) & (delta != 0))
        if len(of_sms):
            self._show(*self._stretches.take(ts_ns[of_sms], row[of_sms], delta[of_sms]))

    def _show(self, row: Int32s, most: Int64s, begin_ns: Int64s, end_ns: Int64s) -> None:
        counts, places = np.unique(most, return_inverse=True)
        texts = ["1 warp" if count == 1 else f"{count} warps" for count in counts.tolist()]
        names = np.array([self._rows.name(text) for text in texts], np.int32)
        _add_slices(self._ops, row, names[places], begin_ns, end_ns)

    def finish(self, end_ns: int) -> None:
        """Show what goes on at the end."""
        self._show(*self._stretches.rest(end_ns))

    def take_ops(self) -> OpColumns:
        """What is shown since the last call."""
        ops, self._ops = self._ops, OpColumns()
        return ops


class Summaries:
    """All of these; `on_sms` is given the changes of warps."""

    def __init__(self, rows: Rows) -> None:
        self._kernels, self._busy, self.on_sms = KernelsOfGpus(rows), BusyGpus(rows), WarpsOfSms(rows)

    def meet(self, number: int, shape: Shape) -> None:
        """Look at a shape that is new; its row is made."""
        self._kernels.meet(number, shape)

    def draw(self, events: TraceColumns | None, ops: OpColumns) -> None:
        """Add what events and warps show to operations."""
        if events is not None:
            self._kernels.draw(events, ops)
        ops.extend(self.on_sms.take_ops())

    def take(self, ops: OpColumns, order: Int64s) -> None:
        """Take note of operations in an order that is that of time."""
        if len(order):
            self._busy.take(ops, order)

    def finish(self) -> None:
        """Draw what is known at the end, when all else is drawn."""
        self._busy.finish()
