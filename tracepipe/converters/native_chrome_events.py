"""Writes events of a Chrome trace by the native core, with the same bytes as `ChromeEvents`."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from dataclasses import dataclass, field
from typing import BinaryIO

import orjson

from tracepipe.converters.chrome_events import ARGS, KERNELS, SHOWN, ChromeEvents, members
from tracepipe.converters.native_columns import DrawnView, WarpsView
from tracepipe.event.ops import Op
from tracepipe.layout.changes import WarpChanges
from tracepipe.layout.timeline import FIRST_EXTRA, Drawn, Track


@dataclass(slots=True, eq=False)
class _Ids:
    """Ids of tracks by row."""

    ids: array[int] = field(default_factory=lambda: array("i"))

    def of(self, tracks: list[Track]) -> int:
        """The address of the ids of all tracks. `tracks` begin with those of the last call."""
        self.ids.extend(track.id for track in tracks[len(self.ids) :])
        return self.ids.buffer_info()[0]


@dataclass(slots=True, eq=False)
class _Gpu:
    """The tracks of one GPU, and its kernels as four numbers each."""

    tracks: _Ids = field(default_factory=_Ids)
    kernels: array[int] = field(default_factory=lambda: array("q"))


class NativeChromeEvents(ChromeEvents):
    """As `ChromeEvents`."""

    def __init__(self, core: ctypes.CDLL, out: BinaryIO, base_ns: int) -> None:
        self._core = core
        self._events = core.tp_chrome_new(base_ns)
        if not self._events:
            raise MemoryError
        weakref.finalize(self, core.tp_chrome_free, self._events)
        self._rows = _Ids()
        self._gpus: dict[int, _Gpu] = {}
        self._kernel_count = 0
        self._made: set[int] = set()
        """Arguments whose text Python made."""
        super().__init__(out, base_ns)

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            raise MemoryError
        return result

    def give(self, which: int, at: int, text: bytes) -> None:
        """As `ChromeEvents` has it."""
        self._give(which, at, text, 0)

    def _give(self, which: int, at: int, text: bytes, shadows: int) -> None:
        self._checked(self._core.tp_chrome_set(self._events, which, at, text, len(text), shadows))

    def forget(self) -> None:
        """As `ChromeEvents` has it."""
        super().forget()
        self._made.clear()
        self._core.tp_chrome_forget(self._events)

    def line(self, text: bytes) -> None:
        """As `ChromeEvents` has it."""
        self._checked(self._core.tp_chrome_line(self._events, text, len(text)))

    def flush(self) -> None:
        """As `ChromeEvents` has it."""
        lines = ctypes.c_void_p()
        size = self._core.tp_chrome_take(self._events, ctypes.byref(lines))
        self.put(ctypes.string_at(lines, size) if size else b"")

    def write(self, drawn: Drawn) -> None:
        """As `ChromeEvents` has it."""
        self.make_ready(drawn.book)
        view = DrawnView(drawn)
        ops, is_odd = ctypes.byref(view.ops), ctypes.c_int()
        tracks = self._rows.of(drawn.book.tracks)
        given = (ctypes.byref(view.given), drawn.book.tables.reader, tracks)
        at, count = 0, len(view.order)
        while at < count:
            write = self._core.tp_chrome_write
            at = self._checked(write(self._events, ops, *given, at, count, ctypes.byref(is_odd)))
            if not is_odd.value:
                self.flush()
                continue
            op = view.op(at)
            text = self._odd_text(drawn, op)
            if text is not None:
                place = int(view.order[at])
                self._checked(self._core.tp_chrome_one(self._events, ops, tracks, place, text, len(text)))
                at += 1

    def _odd_text(self, drawn: Drawn, op: Op) -> bytes | None:
        """The members that an operation shows, or None where the core has all texts for them now."""
        event, mark = op[4], op[5]
        if event > FIRST_EXTRA and drawn.events is not None:
            number = int(drawn.events.args[event])
            if number not in self._made:
                self._made.add(number)
                args = drawn.book.tables.args(number)
                shadows = sum(1 << at for at, name in enumerate(SHOWN) if name in args)
                self._give(ARGS, number, members(args), shadows)
                return None
        return members(drawn.args_of(event, mark))

    def warps(self, changes: WarpChanges) -> None:
        """As `ChromeEvents` has it."""
        gpu = self._gpus.setdefault(changes.id, _Gpu())
        for kernel in changes.kernels[len(gpu.kernels) // 4 :]:
            self.give(KERNELS, self._kernel_count, orjson.dumps(kernel.name)[:-1])
            gpu.kernels.extend((self._kernel_count, kernel.warps, kernel.grid_x, kernel.grid_y))
            self._kernel_count += 1
        view = WarpsView(changes)
        tracks = gpu.tracks.of(changes.tracks)
        counter = changes.counter.id if changes.counter_row >= 0 else 0
        columns = (
            ctypes.byref(view.changes),
            ctypes.byref(view.slices),
            gpu.kernels.buffer_info()[0],
            tracks,
        )
        at, count = 0, len(changes.ts_ns)
        while at < count:
            at = self._checked(self._core.tp_chrome_warps(self._events, *columns, counter, at, count))
            self.flush()
