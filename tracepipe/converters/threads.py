"""Writes every thread's entry and exit in the form of bpftime's kernel_trace and kernelretsnoop.

    [kernel_trace] ts=1795246105932206912 block=(0,0,0) thread=(1,0,0)        entry
    Thread (1, 0, 0) timestamp: 1795246105932207584                           exit

for the scripts that read those tools' output. Times are the GPU's own, %globaltimer. A warp record becomes
a line for each lane: at entry those of its entry mask, at each exit those of that exit's mask. Losses are
summed at the end in kernelretsnoop's words, `Full drops: N`.
"""

from __future__ import annotations

from typing import BinaryIO

from tracepipe.converters.writer import TraceInfo
from tracepipe.event.model import Record, Timed

WARP_LANES = 32
FULL_MASK = (1 << WARP_LANES) - 1
Dim3 = tuple[int, int, int]


def unflatten(number: int, size: list[int]) -> Dim3:
    """x, y, z of a linear index in a box of `size`, x fastest."""
    x, y, _ = size
    return number % x, number // x % y, number // (x * y)


class ThreadWriter:
    """Writes events as they come. `unwritten` counts warps and threads whose indices are not recorded."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out = out
        self._entries = self._exits = self._lost = 0
        self.unwritten = 0

    def write_events(self, events: list[Timed]) -> None:
        """Write the warps and threads among `events`, whose times are those of the recording."""
        lines: list[str] = []
        for ts_ns, shape in events:
            if shape.type == "gpu_warp":
                self._warps(ts_ns, shape.record, lines)
            elif shape.type == "gpu_thread":
                self._thread(ts_ns, shape.phase, shape.record, lines)
            elif shape.type == "loss":
                self._lost += shape.record["count"]
            if len(lines) > 1 << 16:
                self._flush(lines)
        self._flush(lines)

    def _flush(self, lines: list[str]) -> None:
        self._out.write("".join(lines).encode())
        lines.clear()

    def _entry(self, ts_ns: int, block: Dim3, thread: Dim3, lines: list[str]) -> None:
        where = "block=({},{},{}) thread=({},{},{})".format(*block, *thread)
        lines.append(f"[kernel_trace] ts={ts_ns} {where}\n")
        self._entries += 1

    def _exit(self, ts_ns: int, thread: Dim3, lines: list[str]) -> None:
        lines.append("Thread ({}, {}, {}) timestamp: {}\n".format(*thread, ts_ns))
        self._exits += 1

    def _thread(self, ts_ns: int, phase: str, record: Record, lines: list[str]) -> None:
        if "thread" not in record:
            self.unwritten += 1
            return
        x, y, z = record["thread"]
        event = {"B": "entry", "E": "exit"}.get(phase) or record.get("args", {}).get("event")
        if event == "exit":
            self._exit(ts_ns, (x, y, z), lines)
        elif "block" in record:
            bx, by, bz = record["block"]
            self._entry(ts_ns, (bx, by, bz), (x, y, z), lines)
        else:
            self.unwritten += 1

    def _warps(self, ts_ns: int, batch: Record, lines: list[str]) -> None:
        grid, block = batch.get("grid", []), batch.get("block", [])
        threads = block[0] * block[1] * block[2] if block else 0
        if not grid or not threads or 0 in grid:
            self.unwritten += len(batch["warp"])
            return
        warps_a_block = -(-threads // WARP_LANES)
        exit_at = 0
        for at, number in enumerate(batch["warp"]):
            block_number, warp = divmod(number, warps_a_block)
            where = unflatten(block_number, grid)
            first = warp * WARP_LANES
            lanes = [
                unflatten(first + lane, block) if first + lane < threads else None
                for lane in range(WARP_LANES)
            ]
            entry_ns = ts_ns + batch["entry_ns"][at]
            mask = batch["entry_mask"][at] if "entry_mask" in batch else FULL_MASK
            for thread in _of(mask, lanes):
                self._entry(entry_ns, where, thread, lines)
            count = batch["exit_count"][at] if "exit_count" in batch else 1
            for k in range(exit_at, exit_at + count):
                left = batch["exit_mask"][k] if "exit_mask" in batch else mask
                for thread in _of(left, lanes):
                    self._exit(entry_ns + batch["exit_ns"][k], thread, lines)
            exit_at += count

    def finish(self) -> None:
        """Write the totals, as those tools do."""
        if self._entries:
            self._out.write(b"[kernel_trace] total events: %d\n" % self._entries)
        if self._exits:
            self._out.write(b"Total events collected: %d\n" % self._exits)
        if self._lost:
            self._out.write(b"Full drops: %d\n" % self._lost)


def _of(mask: int, lanes: list[Dim3 | None]) -> list[Dim3]:
    """The threads of a mask's lanes."""
    return [thread for lane, thread in enumerate(lanes) if mask >> lane & 1 and thread is not None]
