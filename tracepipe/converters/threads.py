"""Writes every thread's entry and exit in the form of bpftime's kernel_trace and kernelretsnoop.

    [kernel_trace] ts=1795246105932206912 block=(0,0,0) thread=(1,0,0)        entry
    Thread (1, 0, 0) timestamp: 1795246105932207584                           exit

This is for scripts that read the output of those tools. Times are those of the GPU's %globaltimer. A record
of a warp becomes a line for each lane: of its entry mask at the entry, and of each exit's mask at that exit.
Lines are in the order of time. The sum of losses is at the end in kernelretsnoop's words, `Full drops: N`.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from tracepipe.converters.lanes import has_indices, threads_of
from tracepipe.converters.writer import TraceInfo
from tracepipe.event.columns import SPECIAL, SourceBatch, Three, unsigned
from tracepipe.event.tables import Tables
from tracepipe.event.warps import Warps
from tracepipe.units import counted


class ThreadWriter:
    """Writes the lines of all events in the order of time, at the end."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out = out
        assert info.new_sorter is not None
        self._sorted = info.new_sorter()
        self._entries = self._exits = self._lost = 0
        self._launches: set[int] = set()
        self._unwritten = 0

    def write_events(self, batch: SourceBatch, tables: Tables) -> None:
        """Write the warps and threads of a batch, whose times are those of the recording."""
        threads = [
            at for at, shape in enumerate(tables.shapes) if shape is not None and shape.type == "gpu_thread"
        ]
        wanted = np.isin(batch.events.shape, [*threads, SPECIAL])
        for at in np.flatnonzero(wanted).tolist():
            ts_ns, number, args = (
                int(column[at]) for column in (batch.events.ts_ns, batch.events.shape, batch.events.args)
            )
            if number != SPECIAL:
                shape = tables.shapes[number]
                assert shape is not None
                if shape.has_launch and unsigned(int(batch.events.launch[at])) in self._launches:
                    continue  # its warps are written already
                block, thread = batch.events.thread_of(at)
                event = {"B": "entry", "E": "exit"}.get(shape.phase) or tables.args(args).get("event")
                if thread is not None and event == "exit":
                    self._exit(ts_ns, thread)
                elif thread is not None and block is not None:
                    self._entry(ts_ns, block, thread)
                else:
                    self._unwritten += 1
            elif isinstance(other := batch.others[args], Warps):
                self._warps(other)
            elif other["type"] == "loss":
                self._lost += other["count"]

    def _entry(self, ts_ns: int, block: Three, thread: Three) -> None:
        where = "block=({},{},{}) thread=({},{},{})".format(*block, *thread)
        self._sorted.add(ts_ns, f"[kernel_trace] ts={ts_ns} {where}\n".encode())
        self._entries += 1

    def _exit(self, ts_ns: int, thread: Three) -> None:
        self._sorted.add(ts_ns, "Thread ({}, {}, {}) timestamp: {}\n".format(*thread, ts_ns).encode())
        self._exits += 1

    def _warps(self, batch: Warps) -> None:
        if "launch" in batch.launched:
            self._launches.add(batch.launched["launch"])
        if not has_indices(batch):
            self._unwritten += len(batch)
            return
        for ts_ns, block, thread, is_exit in threads_of(batch):
            if is_exit:
                self._exit(ts_ns, thread)
            else:
                self._entry(ts_ns, block, thread)

    def remarks(self) -> list[str]:
        """A remark on warps and threads whose indices are not recorded."""
        if not self._unwritten:
            return []
        words = "warp|warps or thread|threads is|are not written: its|their block or thread is not recorded"
        return [counted(self._unwritten, words)]

    def finish(self) -> None:
        """Write the lines, then the totals, as those tools do."""
        for lines in self._sorted.lines():
            self._out.write(lines)
        if self._entries:
            self._out.write(b"[kernel_trace] total events: %d\n" % self._entries)
        if self._exits:
            self._out.write(b"Total events collected: %d\n" % self._exits)
        if self._lost:
            self._out.write(b"Full drops: %d\n" % self._lost)
