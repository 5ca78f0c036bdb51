"""Warps on the hardware slots of a GPU, and how many of them run at a time: the reference of `warps.c`."""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tracepipe.event.columns import Bytes, Int32s, Int64s, Ints
from tracepipe.native import library

# This many warps of a slot are remembered, for batches that overlap theirs.
STAYS_MAX: Final = 1024
DRAWN, OVERLAPS, OPEN = range(3)
"""What is done with a warp: its slice is on its track or on an overlap track, or it has no end yet."""
ALL: Final = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class _Row:
    """The last stays on a slot, in the order of time."""

    stays: list[tuple[int, int]] = field(default_factory=list)
    forgotten_ns: int = -(1 << 63)

    def take(self, begin_ns: int, end_ns: int) -> bool:
        """Take the slot for a time that begins before the last stay ends. Return whether it was free."""
        stays = self.stays
        at = bisect_left(stays, (begin_ns, end_ns))
        free_ns = stays[at - 1][1] if at else self.forgotten_ns
        # It may not end when the next begins: a stable sort would put its end after that begin.
        if begin_ns < free_ns or at == len(stays) or end_ns >= stays[at][0]:
            return False
        stays.insert(at, (begin_ns, end_ns))
        return True


class Slots:
    """The rows of one GPU. Kernels that run at the same time take turns on a slot, but their batches come one
    after the other: a warp may belong before one that was placed already.
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def take(
        self, rows: int, sizes: Int64s, bases_ns: Int64s, begin_ns: Int64s, stay_ns: Int64s, row: Int32s
    ) -> Bytes:
        """Decide what is done with each warp of some batches, in the order of entries, of the shape
        `(warps,)`. `rows` is how many rows there are. A stay below 0 has no end. `sizes` are how many warps
        each batch has. No later batch begins before the base of an earlier one.
        """
        while len(self._rows) < rows:
            self._rows.append(_Row())
        fates = bytearray()
        columns = (begin_ns, stay_ns, row, np.repeat(bases_ns, sizes))
        for begin, stay, at, base_ns in zip(*(column.tolist() for column in columns), strict=True):
            slot = self._rows[at]
            stays = slot.stays
            if stay < 0:
                fates.append(OPEN)
            elif not stays or begin >= (last_ns := stays[-1][1]):
                if stays and (last_ns <= base_ns or len(stays) >= STAYS_MAX):
                    slot.forgotten_ns = last_ns
                    stays.clear()
                stays.append((begin, begin + stay))
                fates.append(DRAWN)
            else:
                fates.append(DRAWN if slot.take(begin, begin + stay) else OVERLAPS)
        return np.frombuffer(fates, np.uint8)

    @staticmethod
    def running(ts_ns: Int64s, delta: Ints, before_ns: int, running: int) -> tuple[Int64s, Int64s, int]:
        """Sort the changes before a time and count the warps that run. Return the places in order, the
        counts, and how many run at the end. `running` is how many run at the start. Each time has its count
        at its last change; it is -1 at the others, and where the count stays the same.
        """
        order = np.argsort(ts_ns, kind="stable")
        times = ts_ns[order]
        count = int(np.searchsorted(times, before_ns))
        value = np.full(count, -1, np.int64)
        if count:
            last = np.flatnonzero(np.append(times[: count - 1] != times[1:count], True))
            after = running + np.cumsum(delta[order[:count]], dtype=np.int64)[last]
            changed = np.diff(after, prepend=running) != 0
            value[last[changed]] = after[changed]
            running = int(after[-1])
        return order, value, running


class NativeSlots:
    """As `Slots`, by the native core."""

    def __init__(self, core: ctypes.CDLL) -> None:
        self._core = core
        self._warps = core.tp_warps_new()
        if not self._warps:
            raise MemoryError
        weakref.finalize(self, core.tp_warps_free, self._warps)

    def take(
        self, rows: int, sizes: Int64s, bases_ns: Int64s, begin_ns: Int64s, stay_ns: Int64s, row: Int32s
    ) -> Bytes:
        """As `Slots` has it."""
        fate = np.empty(len(begin_ns), np.uint8)
        columns = (column.ctypes.data for column in (sizes, bases_ns, begin_ns, stay_ns, row, fate))
        if self._core.tp_warps_take(self._warps, rows, len(sizes), *columns):
            raise MemoryError
        return fate

    def running(self, ts_ns: Int64s, delta: Ints, before_ns: int, running: int) -> tuple[Int64s, Int64s, int]:
        """As `Slots` has it."""
        order, value = np.empty(len(ts_ns), np.int64), np.empty(len(ts_ns), np.int64)
        now = ctypes.c_int64(running)
        columns = (column.ctypes.data for column in (order, value))
        count = self._core.tp_warps_running(
            len(ts_ns), ts_ns.ctypes.data, delta.ctypes.data, before_ns, *columns, ctypes.byref(now)
        )
        if count < 0:
            raise MemoryError
        return order, value[:count], now.value


def new_slots() -> Slots | NativeSlots:
    """The rows of one GPU."""
    core = library()
    return Slots() if core is None else NativeSlots(core)


def entry_order(entry_ns: Int64s) -> Int64s:
    """The places of entries in the order of time."""
    core = library()
    if core is None:
        return np.argsort(entry_ns, kind="stable")
    order = np.empty(len(entry_ns), np.int64)
    if core.tp_order(entry_ns.ctypes.data, len(entry_ns), order.ctypes.data):
        raise MemoryError
    return order
