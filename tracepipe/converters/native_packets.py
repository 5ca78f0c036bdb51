"""Writes packets by the native core, with the same bytes as `Packets`."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Final

import numpy as np

from tracepipe.converters.native_columns import DrawnView, WarpsView
from tracepipe.converters.packets import FORGOTTEN, NAMES, SHOWN, Packets, counted
from tracepipe.layout.changes import WarpChanges
from tracepipe.layout.timeline import FIRST_EXTRA, Drawn

_ALL_ARGS = -1
TRACK_EVENT: Final = 11
_Kernels = np.dtype([("name", np.int64), ("warps", np.int64), ("x", np.int64), ("y", np.int64)])


def checked(result: int) -> int:
    """A result of the core. Raises MemoryError where it is below 0."""
    if result < 0:
        raise MemoryError
    return result


class NativeStream:
    """The packets of one sequence, which the core keeps until they are taken."""

    def __init__(self, core: ctypes.CDLL, id: int, clock: int, base_ns: int) -> None:
        self._core = core
        self.packets = core.tp_perfetto_new(int.from_bytes(os.urandom(8), "little"), id, clock, base_ns)
        if not self.packets:
            raise MemoryError
        weakref.finalize(self, core.tp_perfetto_free, self.packets)

    def packet(self, ts_ns: int, field: int, body: bytes) -> None:
        """Write a packet with a message that is its `field`."""
        checked(self._core.tp_perfetto_packet(self.packets, ts_ns, field, body, len(body)))

    def switches(self, view: ctypes.Structure, reader: object, ahead_ns: int, at: int, stop: int) -> int:
        """Write context switches from a place on, and return where the core stopped."""
        ref = ctypes.byref(view)
        return checked(self._core.tp_perfetto_switches(self.packets, ref, reader, ahead_ns, at, stop))

    def take(self) -> bytes:
        """The bytes that were written since the last call."""
        out = ctypes.c_void_p()
        size = self._core.tp_perfetto_take(self.packets, ctypes.byref(out))
        return ctypes.string_at(out, size) if size else b""


class NativePackets(Packets):
    """As `Packets`. The base class writes what the core cannot write, with the core's tables."""

    def __init__(self, core: ctypes.CDLL, id: int, clock: int, base_ns: int) -> None:
        super().__init__(id, clock, base_ns)
        self._core = core
        self._made = NativeStream(core, id, clock, base_ns)
        self._packets = self._made.packets
        self._kernels = np.empty(0, _Kernels)

    def intern(self, table: int, name: bytes) -> int:
        """As `Packets` has it."""
        return checked(self._core.tp_perfetto_intern(self._packets, table, name, len(name)))

    def _keep_ready(self, which: int, at: int, made: bytes) -> None:
        checked(self._core.tp_perfetto_set(self._packets, which, at, made, len(made)))

    def forget(self) -> None:
        """As `Packets` has it."""
        super().forget()
        for which in FORGOTTEN:
            self._core.tp_perfetto_forget(self._packets, which)
        self._core.tp_perfetto_forget(self._packets, _ALL_ARGS)

    def _packet(self, ts_ns: int, body: bytes) -> None:
        self._made.packet(ts_ns, TRACK_EVENT, body)

    def take(self) -> bytes:
        """As `Packets` has it."""
        return self._made.take()

    def write(self, drawn: Drawn) -> None:
        """As `Packets` has it."""
        view, events = DrawnView(drawn), drawn.events
        order = view.order
        at, refs = 0, (ctypes.byref(view.ops), ctypes.byref(view.given), drawn.book.tables.reader)
        made: dict[int, None] = {}
        while at < len(order):
            at = checked(self._core.tp_perfetto_write(self._packets, *refs, at, len(order)))
            if at < len(order):
                op = view.op(at)
                event = op[4]
                if (
                    events is None
                    or event <= FIRST_EXTRA
                    or not self._make(drawn, int(events.args[event]), made)
                ):
                    self._packet(op[2], self.fields(op, drawn))
                    at += 1

    def _make(self, drawn: Drawn, args: int, made: dict[int, None]) -> bool:
        """Let the core make the annotations of arguments whose texts it does not have. Return False where it
        has them, cannot make them, or where they may replace what is shown in addition to arguments.
        """
        tables = drawn.book.tables
        if tables.reader is not None or args in made or tables.is_odd(args):
            return False
        made[args] = None
        if not SHOWN.isdisjoint(tables.args(args)):
            return False
        text = tables.text(args)
        return checked(self._core.tp_perfetto_args(self._packets, args, text, len(text))) == 0

    def warps(self, changes: WarpChanges) -> None:
        """As `Packets` has it."""
        kernels = changes.kernels
        for number in range(len(self._kernels), len(kernels)):
            name = kernels[number].name.encode("utf-8", "replace")
            checked(self._core.tp_perfetto_set(self._packets, NAMES, number, name, len(name)))
        if len(kernels) > len(self._kernels):
            table = [(number, one.warps, one.grid_x, one.grid_y) for number, one in enumerate(kernels)]
            self._kernels = np.array(table, _Kernels)
        view = WarpsView(changes)
        refs = (
            ctypes.byref(view.changes),
            ctypes.byref(view.slices),
            self._kernels.ctypes.data,
            changes.counter_row,
            changes.offset_ns,
        )
        at, count = 0, len(changes.ts_ns)
        while at < count:
            at = checked(self._core.tp_perfetto_warps(self._packets, *refs, at, count))
            if at < count:
                self._packet(
                    int(changes.ts_ns[at]), self._exit(changes, at) + counted(int(changes.value[at]))
                )
                at += 1
