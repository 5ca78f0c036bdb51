"""Writes every thread's entry and exit in the form of bpftime's kernel_trace and kernelretsnoop.

    [kernel_trace] ts=1795246105932206912 block=(0,0,0) thread=(1,0,0)        entry
    Thread (1, 0, 0) timestamp: 1795246105932207584                           exit

This is for scripts that read the output of those tools. Times are those of the GPU's %globaltimer. A record
of a warp becomes a line for each lane: of its entry mask at the entry, and of each exit's mask at that exit.
The sum of losses is at the end in kernelretsnoop's words, `Full drops: N`.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from tracepipe.converters.writer import TraceInfo
from tracepipe.event.columns import SPECIAL, SourceBatch, Three, unsigned
from tracepipe.event.tables import Tables
from tracepipe.event.warps import Warps
from tracepipe.layout.timeline import FULL_MASK, WARP_LANES
from tracepipe.units import counted


def unflatten(number: int, size: list[int]) -> Three:
    """x, y, z of a linear index in a box of `size`, x fastest."""
    x, y, _ = size
    return number % x, number // x % y, number // (x * y)


class ThreadWriter:
    """Writes events as they come."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out = out
        self._entries = self._exits = self._lost = 0
        self._launches: set[int] = set()
        self._unwritten = 0
        self._lines: list[str] = []

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
            if len(self._lines) > 1 << 16:
                self._flush()
        self._flush()

    def _flush(self) -> None:
        self._out.write("".join(self._lines).encode())
        self._lines.clear()

    def _entry(self, ts_ns: int, block: Three, thread: Three) -> None:
        where = "block=({},{},{}) thread=({},{},{})".format(*block, *thread)
        self._lines.append(f"[kernel_trace] ts={ts_ns} {where}\n")
        self._entries += 1

    def _exit(self, ts_ns: int, thread: Three) -> None:
        self._lines.append("Thread ({}, {}, {}) timestamp: {}\n".format(*thread, ts_ns))
        self._exits += 1

    def _warps(self, batch: Warps) -> None:
        grid, block = batch.launched.get("grid", []), batch.launched.get("block", [])
        if "launch" in batch.launched:
            self._launches.add(batch.launched["launch"])
        threads = block[0] * block[1] * block[2] if block else 0
        if not grid or not threads or 0 in grid:
            self._unwritten += len(batch)
            return
        warps_a_block = -(-threads // WARP_LANES)
        full, exits = [FULL_MASK] * len(batch), batch.exit_ns.tolist()
        masks = full if batch.entry_mask is None else batch.entry_mask.tolist()
        counts = [1] * len(batch) if batch.exit_count is None else batch.exit_count.tolist()
        left = None if batch.exit_mask is None else batch.exit_mask.tolist()
        exit_at = 0
        for number, after_ns, mask, count in zip(
            batch.warp.tolist(), batch.entry_ns.tolist(), masks, counts, strict=True
        ):
            block_number, warp = divmod(number, warps_a_block)
            where = unflatten(block_number, grid)
            first = warp * WARP_LANES
            lanes = [
                unflatten(first + lane, block) if first + lane < threads else None
                for lane in range(WARP_LANES)
            ]
            entry_ns = batch.ts_ns + after_ns
            for thread in _of(mask, lanes):
                self._entry(entry_ns, where, thread)
            for k in range(exit_at, exit_at + count):
                for thread in _of(left[k] if left else mask, lanes):
                    self._exit(entry_ns + exits[k], thread)
            exit_at += count

    def remarks(self) -> list[str]:
        """A remark on warps and threads whose indices are not recorded."""
        if not self._unwritten:
            return []
        words = "warp|warps or thread|threads is|are not written: its|their block or thread is not recorded"
        return [counted(self._unwritten, words)]

    def finish(self) -> None:
        """Write the totals, as those tools do."""
        if self._entries:
            self._out.write(b"[kernel_trace] total events: %d\n" % self._entries)
        if self._exits:
            self._out.write(b"Total events collected: %d\n" % self._exits)
        if self._lost:
            self._out.write(b"Full drops: %d\n" % self._lost)


def _of(mask: int, lanes: list[Three | None]) -> list[Three]:
    """The threads of the lanes in a mask."""
    return [thread for lane, thread in enumerate(lanes) if mask >> lane & 1 and thread is not None]
