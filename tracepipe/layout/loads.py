"""Counters of how busy GPUs are, and of how much processor time the threads of a process use."""

from __future__ import annotations

from typing import Final

import numpy as np

from tracepipe.event.columns import NONE, Int32s, Int64s, distinct, grown
from tracepipe.event.ops import BEGIN, COUNTER, END, OpColumns, op_of
from tracepipe.event.vocabulary import CPU_USE, CPU_USE_UNIT, GPU_BUSY
from tracepipe.layout.rows import RANK_BUSY, SUMMARY, Rows
from tracepipe.layout.shares import Share, Stretches
from tracepipe.layout.timeline import Track
from tracepipe.layout.tree import RANK_COUNTERS

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

    def __init__(self, rows: Rows, name: str, unit: str, rank: int) -> None:
        self._rows = rows
        self._name, self._unit, self._rank = name, unit, rank
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
            track = self._rows.tree.child(parent, "counter", self._name, self._rank, SUMMARY, self._unit)
            row = self._rows.row_of(track)
            self._rows.nesting.add(
                *(op_of(COUNTER, row, ts_ns, 0, NONE, value) for ts_ns, value in share.percent())
            )


class BusyGpus:
    """Measures the share of time in which anything is on a stream of a GPU. GPUs have the numbers of their
    tracks.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._gpu: Int32s = np.zeros(0, np.int32)
        """By row: the GPU whose stream it is, NONE where it is not a stream."""
        self._counters = _Counters(rows, GPU_BUSY, "%", RANK_BUSY)
        self._stretches = Stretches()

    def take(self, ops: OpColumns, order: Int64s) -> None:
        """Take operations, of which `order` has the places in the order of time."""
        self._add_rows()
        row, kind = ops.columns["row"][order], ops.columns["kind"][order]
        places = np.flatnonzero((self._gpu[row] != NONE) & ((kind == BEGIN) | (kind == END)))
        if len(places):
            delta = np.where(kind[places] == BEGIN, 1, -1)
            ts_ns = ops.columns["ts"][order[places]]
            gpu, _, begin_ns, end_ns = self._stretches.take(ts_ns, self._gpu[row[places]], delta)
            self._counters.add(gpu, begin_ns, end_ns)

    def _add_rows(self) -> None:
        """Note the new rows."""
        if new := [self._gpu_of(track) for track in self._rows.book.tracks[len(self._gpu) :]]:
            self._gpu = np.append(self._gpu, np.array(new, np.int32))

    def _gpu_of(self, track: Track) -> int:
        """The GPU of a stream's track, NONE where it is not a stream's or there are too many GPUs."""
        gpu = track.parent
        if track.kind != "slices" or track.category != "gpu" or gpu is None:
            return NONE
        return gpu.id if self._counters.add_track(gpu, BUSY_GPUS_MAX) else NONE

    def draw(self) -> None:
        """Draw the counters at the end, when nothing is on a stream any more."""
        self._counters.draw(self._counters.tracks())


class CpuUse:
    """Measures the processor time of the threads of a process. Two threads that always run make 200%."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._counters = _Counters(rows, CPU_USE, CPU_USE_UNIT, RANK_COUNTERS)
        self._process: Int32s = np.zeros(0, np.int32)
        """By the number of a thread's track: its process, NONE where it is not known or there are too
        many."""
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


class Loads:
    """Both kinds of counters. `cpu_use` takes the stretches in which threads have processors."""

    def __init__(self, rows: Rows) -> None:
        self._busy, self.cpu_use = BusyGpus(rows), CpuUse(rows)

    def take(self, ops: OpColumns, order: Int64s) -> None:
        """Take operations, of which `order` has the places in the order of time."""
        if len(order):
            self._busy.take(ops, order)

    def draw(self) -> None:
        """Draw the counters at the end, when all else is drawn."""
        self._busy.draw()
        self.cpu_use.draw()
