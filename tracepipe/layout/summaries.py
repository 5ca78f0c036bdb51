"""Sums up tracks: how busy GPUs are, what threads did, the kernels of a GPU, the warps of an SM.

The sums become counters, slices of groups, and the order of processes and threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from tracepipe.event.columns import NONE, Int32s, Int64s, TraceColumns, distinct, grown
from tracepipe.event.counters import CPU_USE, GPU_BUSY, CounterTrack
from tracepipe.event.model import HOST_LAYERS
from tracepipe.event.nesting import NO_ROW
from tracepipe.event.ops import BEGIN, COUNTER, END, OpColumns, op_of
from tracepipe.event.shape import Shape
from tracepipe.event.vocabulary import RUNNING
from tracepipe.layout.rows import Rows
from tracepipe.layout.timeline import Track, slice_name
from tracepipe.layout.tree import Work
from tracepipe.units import counted

# This many bins are enough for any length of time, as they grow wider.
BINS_MAX: Final = 1 << 10
_PERCENT: Final = 100
_FIRST_BITS: Final = 10


class Stretches:
    """Finds the stretches of time in which something runs, by the number of the track that it runs on."""

    def __init__(self) -> None:
        self._count: Int64s = np.zeros(0, np.int64)
        self._begin_ns: Int64s = np.zeros(0, np.int64)
        self._most: Int64s = np.zeros(0, np.int64)
        """The stretch that has not ended, by track: how many run, since when, and how many ran at most."""

    def ended_by(self, ts_ns: Int64s, on: Int32s, delta: Int64s) -> tuple[Int32s, Int64s, Int64s, Int64s]:
        """Take changes in the order of time. Return the stretches that have ended: track, how many ran at
        most, begin and end, of the shape `(stretches,)` each.
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
        """The stretches that have not ended, as if they ended then."""
        on = np.flatnonzero(self._count > 0).astype(np.int32)
        return on, self._most[on], self._begin_ns[on], np.maximum(self._begin_ns[on], end_ns)


class Share:
    """The share of busy time in bins. Their width is a power of two in nanoseconds: the smallest with which
    BINS_MAX bins reach from the first stretch to the end of the last, at least 1 µs.
    """

    def __init__(self) -> None:
        self._busy_ns: Int64s = np.zeros(0, np.int64)
        self._bits, self._first = _FIRST_BITS, 0
        self._begin_ns, self._end_ns = (1 << 63) - 1, -(1 << 63)

    def add(self, begin_ns: Int64s, end_ns: Int64s) -> None:
        """Add stretches in which it was busy. Stretches that overlap all count."""
        longer = end_ns > begin_ns
        begin_ns, end_ns = begin_ns[longer], end_ns[longer]
        if not len(begin_ns):
            return
        self._begin_ns = min(self._begin_ns, int(begin_ns.min()))
        self._end_ns = max(self._end_ns, int(end_ns.max()))
        # Bins for all of the time, wider ones if there are too many.
        had, at = self._busy_ns, self._first
        while (self._end_ns - 1 >> self._bits) - (self._begin_ns >> self._bits) >= BINS_MAX:
            pairs = np.zeros(2 * (len(had) // 2 + 1), np.int64)
            pairs[at & 1 : (at & 1) + len(had)] = had
            had, at = pairs.reshape(-1, 2).sum(axis=1), at >> 1
            self._bits += 1
        self._first = self._begin_ns >> self._bits
        size = (self._end_ns - 1 >> self._bits) - self._first + 1
        self._busy_ns = np.zeros(size, np.int64)
        kept = had[: max(0, self._first + size - at)]
        self._busy_ns[at - self._first : at - self._first + len(kept)] = kept
        first, last = (begin_ns >> self._bits) - self._first, (end_ns - 1 >> self._bits) - self._first
        width_ns = 1 << self._bits
        over = last > first
        until_ns = np.where(over, (first + self._first + 1) << self._bits, end_ns)
        np.add.at(self._busy_ns, first, until_ns - begin_ns)
        if over.any():
            first, last = first[over], last[over]
            np.add.at(self._busy_ns, last, end_ns[over] - ((last + self._first) << self._bits))
            whole = np.zeros(len(self._busy_ns) + 1, np.int64)
            np.add.at(whole, first + 1, width_ns)
            np.add.at(whole, last, -width_ns)
            self._busy_ns += np.cumsum(whole[:-1])

    def percent(self) -> list[tuple[int, int]]:
        """The times at which the share changes, with the share in percent, at least 1% where it is busy."""
        if not len(self._busy_ns):
            return []
        starts_ns = (np.arange(len(self._busy_ns) + 1) + self._first) << self._bits
        starts_ns[0], starts_ns[-1] = self._begin_ns, self._end_ns
        # As floats: a long time in ns, added up many times, exceeds 64 bits.
        share = np.floor(self._busy_ns * float(_PERCENT) / np.diff(starts_ns) + 0.5).astype(np.int64)
        values = np.append(np.where(self._busy_ns > 0, np.maximum(share, 1), 0), 0)
        changes = np.append(True, values[1:] != values[:-1])
        return list(zip(starts_ns[changes].tolist(), values[changes].tolist(), strict=True))


# At most this many GPUs and processes are counted: each takes some kilobytes.
BUSY_GPUS_MAX: Final = 64
PROCESSES_MAX: Final = 128
# This many processes have a counter. Perfetto's UI v52 numbers the groups at the top, and counts processes
# with counters and these counters. A group with a number from 50 on is below all processes, which GPUs must
# not be.
SHOWN_MAX: Final = 16
# Adding many stretches to a share takes hardly longer than adding one.
_STRETCHES_AT_ONCE: Final = 1 << 13


class _Counters:
    """Shares by the number of a track. Each becomes a counter under its track."""

    def __init__(self, rows: Rows, kind: CounterTrack) -> None:
        self._rows, self._kind = rows, kind
        self._tracks: dict[int, Track] = {}
        self._shares: dict[int, Share] = {}

    def add_track(self, track: Track, at_most: int) -> bool:
        """Make a counter for a track. Return whether there is room for it."""
        if track.id not in self._tracks and len(self._tracks) >= at_most:
            return False
        self._tracks[track.id] = track
        return True

    def add(self, of: Int32s, begin_ns: Int64s, end_ns: Int64s) -> None:
        """Add stretches in which tracks were busy."""
        for number in distinct(of).tolist():
            mine = of == number
            self._shares.setdefault(number, Share()).add(begin_ns[mine], end_ns[mine])

    def tracks(self) -> list[Track]:
        """The tracks that were busy at any time, in the order in which they first were."""
        return [self._tracks[number] for number in self._shares]

    def draw(self, tracks: list[Track]) -> None:
        """Draw the counters of some tracks, when all is known."""
        for parent in tracks:
            share = self._shares[parent.id]
            row = self._rows.row_of(self._rows.tree.counter(parent, self._kind))
            self._rows.nesting.add(
                *(op_of(COUNTER, row, ts_ns, 0, NONE, value) for ts_ns, value in share.percent())
            )


class BusyGpus:
    """Measures the share of time in which anything is on a stream of a GPU, by the GPU's track."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._gpu: Int32s = np.zeros(0, np.int32)
        """By row: the GPU whose stream it is, NONE where it is not a stream or there are too many GPUs."""
        self._counters = _Counters(rows, GPU_BUSY)
        self._stretches = Stretches()

    def measure(self, ops: OpColumns, order: Int64s) -> None:
        """Take operations, of which `order` has the places in the order of time."""
        if not len(order):
            return
        first, tracks = len(self._gpu), self._rows.book.tracks
        self._gpu = np.append(self._gpu, np.full(len(tracks) - first, NONE, np.int32))
        for at, track in enumerate(tracks[first:], first):
            is_stream = track.kind == "slices" and track.category == "gpu"
            if is_stream and track.parent and self._counters.add_track(track.parent, BUSY_GPUS_MAX):
                self._gpu[at] = track.parent.id
        row, kind = ops.columns["row"][order], ops.columns["kind"][order]
        places = np.flatnonzero((self._gpu[row] != NONE) & ((kind == BEGIN) | (kind == END)))
        if len(places):
            delta = np.where(kind[places] == BEGIN, 1, -1)
            ts_ns = ops.columns["ts"][order[places]]
            gpu, _, begin_ns, end_ns = self._stretches.ended_by(ts_ns, self._gpu[row[places]], delta)
            self._counters.add(gpu, begin_ns, end_ns)

    def draw(self) -> None:
        """Draw the counters at the end, when nothing is on a stream any more."""
        self._counters.draw(self._counters.tracks())


class CpuUse:
    """Measures the processor time of the threads of a process. Two threads that always run make 200%."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._counters = _Counters(rows, CPU_USE)
        self._process: Int32s = np.zeros(0, np.int32)
        """By the number of a thread's track: its process, NONE if that is not known or there are too many."""
        self._waiting: list[tuple[Int32s, Int64s, Int64s]] = []
        self._waiting_count = 0

    def add_thread(self, thread: Track) -> None:
        """Note a thread that has context switches."""
        process = thread.parent
        self._process = grown(self._process, thread.id + 1, NONE)
        if process is not None and process.pid and self._counters.add_track(process, PROCESSES_MAX):
            self._process[thread.id] = process.id

    def add(self, thread: Int32s, begin_ns: Int64s, end_ns: Int64s) -> None:
        """Add stretches in which threads had a processor, by the numbers of their tracks."""
        of = self._process[thread]
        known = of != NONE
        self._waiting.append((of[known], begin_ns[known], end_ns[known]))
        self._waiting_count += len(thread)
        if self._waiting_count >= _STRETCHES_AT_ONCE:
            self._share()

    def _share(self) -> None:
        of, begin_ns, end_ns = (np.concatenate(column) for column in zip(*self._waiting, strict=True))
        self._waiting, self._waiting_count = [], 0
        self._counters.add(of, begin_ns, end_ns)

    def draw(self) -> None:
        """Draw the counters of the first processes at the end, when these are in order."""
        if self._waiting:
            self._share()
        tree = self._rows.tree
        processes = sorted(self._counters.tracks(), key=lambda track: tree.process(track.pid).rank)
        self._counters.draw(processes[:SHOWN_MAX])


_OTHER, _RUNS, _LEAVES = range(3)
_NEVER: Final = -(1 << 63)


class ThreadWork:
    """Measures the work of threads, with memory for each thread but none for an event. Threads have the
    numbers of their tracks. `cpu_use` gets each stretch in which a thread has a processor.
    """

    def __init__(self, rows: Rows, cpu_use: CpuUse | None) -> None:
        self._rows, self._cpu_use = rows, cpu_use
        self._launches: Int64s = np.zeros(0, np.int64)
        self._ran_ns: Int64s = np.zeros(0, np.int64)
        self._since_ns: Int64s = np.zeros(0, np.int64)
        """By thread: since when it has a processor."""

    def add_shape(self, number: int, shape: Shape) -> None:
        """Look at a shape that is new; its row is made."""
        own, of_host = self._rows.of_shape[number], shape.type in HOST_LAYERS and not shape.on_gpu
        thread = self._rows.threads.get((shape.pid, shape.tid)) if of_host else None
        own["thread"], own["runs"] = NONE if thread is None else thread.track.id, _OTHER
        own["launches"] = shape.has_launch and shape.phase != "E"
        if thread is None:
            return
        if shape.type == "scheduler" and shape.name == RUNNING:
            own["runs"] = {"B": _RUNS, "E": _LEAVES}.get(shape.phase, _OTHER)
            if self._cpu_use is not None:
                self._cpu_use.add_thread(thread.track)
        size = thread.track.id + 1
        self._launches, self._ran_ns = grown(self._launches, size, 0), grown(self._ran_ns, size, 0)
        self._since_ns = grown(self._since_ns, size, _NEVER)

    def measure(self, events: TraceColumns) -> None:
        """Take events, which are in the order of time."""
        of_shape, shapes = self._rows.of_shape, np.maximum(events.shape, 0)
        thread = np.where(events.shape >= 0, of_shape["thread"][shapes], NONE)
        launched = np.bincount(thread[(thread >= 0) & of_shape["launches"][shapes] & (events.launch != 0)])
        self._launches[: len(launched)] += launched
        switches = np.flatnonzero((thread >= 0) & (of_shape["runs"][shapes] != _OTHER))
        if not len(switches):
            return
        thread, ts_ns = thread[switches], events.ts_ns[switches]
        runs = of_shape["runs"][shapes[switches]] == _RUNS
        order = np.argsort(thread, kind="stable")
        thread, ts_ns, runs = thread[order], ts_ns[order], runs[order]
        first = np.append(True, thread[1:] != thread[:-1])
        since_ns = np.where(np.append(False, runs[:-1]), np.append(_NEVER, ts_ns[:-1]), _NEVER)
        since_ns = np.where(first, self._since_ns[thread], since_ns)
        ran = ~runs & (since_ns != _NEVER)
        self._add(thread[ran], since_ns[ran], ts_ns[ran])
        last = np.append(first[1:], True)
        self._since_ns[thread[last]] = np.where(runs[last], ts_ns[last], _NEVER)

    def _add(self, thread: Int32s, begin_ns: Int64s, end_ns: Int64s) -> None:
        np.add.at(self._ran_ns, thread, end_ns - begin_ns)
        if self._cpu_use is not None:
            self._cpu_use.add(thread, begin_ns, end_ns)

    def finish(self, end_ns: int) -> Callable[[int], Work]:
        """Return the function that gives a thread's work. Threads on a processor keep it until the end."""
        thread = np.flatnonzero(self._since_ns != _NEVER).astype(np.int32)
        since_ns = self._since_ns[thread]
        self._add(thread, since_ns, np.maximum(since_ns, end_ns))
        works = list(map(Work, self._launches.tolist(), self._ran_ns.tolist()))
        return lambda thread: works[thread] if thread < len(works) else Work()


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


class Summaries:
    """Shows on the row of a GPU its kernels, and on that of an SM each stretch in which it has warps.

    A kernel is shown on its GPU if no other is being shown, so that one row is enough. Memory is used for
    each GPU, but none for a kernel. A stretch is named by the most warps in it.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._ended_ns: dict[int, int] = {}
        """By row: when the last kernel that is shown ends."""
        self._stretches = Stretches()
        """By the rows of SMs."""
        self._ops = OpColumns()
        """Stretches since the last call of `draw`."""

    def add_shape(self, number: int, shape: Shape) -> None:
        """Look at a shape that is new; its row is made."""
        own = self._rows.of_shape[number]
        own["gpu"] = NONE
        if shape.type == "gpu_kernel" and shape.phase == "X" and own["drawn"]:
            own["gpu"] = self._rows.row_of(self._rows.gpu(shape.gpu or 0))
            own["name"] = self._rows.name(slice_name(shape))

    def count_warps(self, ts_ns: Int64s, row: Int32s, delta: Int64s) -> None:
        """Count changes on the rows of SMs in the order of time. Those with NO_ROW belong to no SM."""
        of_sms = np.flatnonzero((row != NO_ROW) & (delta != 0))
        if len(of_sms):
            self._show(*self._stretches.ended_by(ts_ns[of_sms], row[of_sms], delta[of_sms]))

    def finish(self, end_ns: int) -> None:
        """Show the stretches that have not ended at the end."""
        self._show(*self._stretches.rest(end_ns))

    def _show(self, row: Int32s, most: Int64s, begin_ns: Int64s, end_ns: Int64s) -> None:
        counts, places = np.unique(most, return_inverse=True)
        texts = [counted(count, "warp|warps") for count in counts.tolist()]
        names = np.array([self._rows.name(text) for text in texts], np.int32)
        _add_slices(self._ops, row, names[places], begin_ns, end_ns)

    def draw(self, events: TraceColumns | None, ops: OpColumns) -> None:
        """Add the slices of kernels and stretches to operations. The events are in the order of time."""
        of_shape = self._rows.of_shape
        if events is not None and len(of_shape):
            shapes = np.maximum(events.shape, 0)
            places = np.flatnonzero((events.shape >= 0) & (of_shape["gpu"][shapes] >= 0))
            rows = of_shape["gpu"][shapes[places]]
            begins_ns = events.ts_ns[places]
            ends_ns = begins_ns + events.dur_ns[places]
            shown = np.zeros(len(places), np.bool_)
            times = zip(rows.tolist(), begins_ns.tolist(), ends_ns.tolist(), strict=True)
            for at, (row, begin_ns, end_ns) in enumerate(times):
                if begin_ns >= self._ended_ns.get(row, begin_ns):
                    self._ended_ns[row], shown[at] = end_ns, True
            names = of_shape["name"][shapes[places[shown]]]
            _add_slices(ops, rows[shown], names, begins_ns[shown], ends_ns[shown])
        ops.extend(self._ops)
        self._ops = OpColumns()
