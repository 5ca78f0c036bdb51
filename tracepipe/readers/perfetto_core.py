"""Reads the usual packets of a Perfetto trace in the core: its `perfetto_rows.c` describes which these are.

The core keeps the names of all sequences, the ranks of tracks and the last times. Before Python reads a
packet of a sequence, it fetches what the core has changed (`leave`). After that, it states what is known
(`enter`).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import Structure, c_int64, c_uint64
from typing import Final

import numpy as np

from tracepipe.native import checked, library, owned
from tracepipe.readers.perfetto_sequences import Names, PerfettoClocks, Sequence, Sequences, clock_of
from tracepipe.readers.sorted_rows import NativeSortedRows

_MORE, _FOREIGN, _CLOCK, _FULL = range(4)
_NO_CLOCK: Final = -1
_U64: Final = (1 << 64) - 1
_I64: Final = range(-(1 << 63), 1 << 63)


class _Clock(Structure):
    _fields_ = [
        (name, c_int64)
        for name in ("id", "unit_ns", "is_incremental", "last_ns", "start_ns", "end_ns", "shift_ns")
    ]


class _Stated(Structure):
    """What Python states of a sequence, and what changes in the core."""

    _fields_ = [
        *((name, c_int64) for name in ("is_valid", "has_track", "has_thread", "is_negative", "has_counter")),
        *((name, c_uint64) for name in ("track", "thread", "counter")),
        *((name, c_int64) for name in ("clock", "last_ns", "names_bytes", "snapshots")),
        ("clocks", _Clock * 2),
    ]


class _Shared(Structure):
    _fields_ = [(name, c_int64) for name in ("last_ns", "names_bytes", "snapshots", "descriptors")]


class _NativeNames(Names):
    """Names of a sequence that the core keeps."""

    def __init__(self, core: NativePackets, stated: _Stated) -> None:
        self._core, self._stated = core, stated

    @property
    def size_bytes(self) -> int:
        return int(self._stated.names_bytes)

    def get(self, table: int, iid: int) -> bytes | None:
        text = ctypes.c_void_p()
        size = self._core.core.tp_packets_name(ctypes.addressof(self._stated), table, iid, ctypes.byref(text))
        return None if size < 0 else ctypes.string_at(text, size)

    def keep(self, table: int, iid: int, entry: bytes) -> None:
        of = self._core
        address = ctypes.addressof(self._stated)
        checked(of.core.tp_packets_keep(of.at, address, table, iid, entry, len(entry)))

    def clear(self) -> None:
        self._core.core.tp_packets_forget(self._core.at, ctypes.addressof(self._stated))


class NativeSequences(Sequences):
    """Sequences that the core knows."""

    def __init__(self, core: NativePackets) -> None:
        super().__init__(core.new_sequence)
        self._core = core

    @property
    def names_bytes(self) -> int:
        return int(self._core.shared.names_bytes)


class NativePackets:
    """Reads packets into `rows`."""

    def __init__(self, rows: NativeSortedRows, clocks: PerfettoClocks) -> None:
        core = library()
        assert core is not None
        self.core, self._rows, self._clocks = core, rows, clocks
        self.at = owned(
            self, core.tp_packets_new(int.from_bytes(os.urandom(8), "little")), core.tp_packets_free
        )
        self.shared = _Shared.from_address(core.tp_packets_state(self.at))
        self._stated: dict[int, _Stated] = {}
        self._asked = np.zeros(4, np.int64)

    def new_sequence(self, id: int) -> Sequence:
        """A new sequence, which the core knows from then on."""
        if id > _U64:
            return Sequence(id)
        address = self.core.tp_packets_sequence(self.at, id)
        if not address:
            raise MemoryError
        stated = self._stated[id] = _Stated.from_address(address)
        return Sequence(id, names=_NativeNames(self, stated))

    def leave(self, sequence: Sequence) -> int:
        """Fetch what the core has changed of a sequence. Return the last time that it has read, ns."""
        stated = self._stated.get(sequence.id)
        if stated is not None:
            if stated.last_ns != _limited(sequence.last_ns):  # the core leaves times beyond to Python
                sequence.last_ns = stated.last_ns
            for clock in stated.clocks:
                if clock.id != _NO_CLOCK and clock.is_incremental:
                    self._clocks.set_last(clock_of(clock.id, sequence.id), clock.last_ns)
        return int(self.shared.last_ns)

    def enter(self, sequence: Sequence, last_ns: int, *, has_snapshot: bool, has_track: bool) -> None:
        """State what is known after a packet of a sequence, and whether it has clocks or a track."""
        self.shared.last_ns = _limited(last_ns)
        self.shared.snapshots += has_snapshot
        self.shared.descriptors += has_track
        stated = self._stated.get(sequence.id)
        if stated is None:
            return
        track, thread = sequence.defaults.track, sequence.thread
        stated.is_valid, stated.last_ns = sequence.is_valid, _limited(sequence.last_ns)
        stated.has_track, stated.has_thread = track is not None, thread is not None
        stated.track, stated.thread, stated.is_negative = track or 0, (thread or 0) & _U64, (thread or 0) < 0
        counters = sequence.defaults.counters
        stated.has_counter, stated.counter = (1, counters[0]) if len(counters) == 1 else (0, 0)
        stated.clock = _limited(sequence.defaults.clock)
        for clock in stated.clocks:
            if clock.id != _NO_CLOCK and clock.is_incremental:
                clock_ns = self._clocks.last_ns(clock_of(clock.id, sequence.id))
                clock.id, clock.last_ns = (clock.id, clock_ns) if clock_ns in _I64 else (_NO_CLOCK, 0)

    def rank(self, track: int, ts_ns: int, is_whole: bool) -> int:
        """The rank of an event of a track."""
        return checked(self.core.tp_packets_rank(self.at, track & _U64, track < 0, ts_ns, is_whole))

    def note_counter(self, track: int, factor: int) -> None:
        """Note that a track is a counter whose values are multiplied by a factor."""
        if factor in _I64:
            checked(self.core.tp_packets_counter(self.at, track & _U64, track < 0, factor))

    def take(self, data: bytes, at: int) -> int:
        """Read packets from a place on. Return the place of the next one. Raises OutputError."""
        while True:
            asked = self._asked.ctypes.data
            at = checked(self.core.tp_packets_take(self.at, self._rows.at, data, len(data), at, asked))
            why, id, clock, value = self._asked.tolist()
            if why == _FULL:
                self._rows.put_away()
            elif why != _CLOCK or not self._state_clock(id & _U64, clock, value):
                return at

    def _state_clock(self, id: int, clock_id: int, value: int) -> bool:
        """State how times around one of a clock are put on the trace's clock. Return whether it is known."""
        stated, clock = self._stated[id], clock_of(clock_id, id)
        places = [one for one in stated.clocks if one.id in (clock_id, _NO_CLOCK)]
        place = places[0] if places else stated.clocks[1]
        if place.id != _NO_CLOCK and place.is_incremental:
            self._clocks.set_last(clock_of(place.id, id), place.last_ns)
        stretch = self._clocks.stretch(value, clock)
        if stretch is None or not all(number in _I64 for number in stretch):
            return False
        last_ns = self._clocks.last_ns(clock)
        if last_ns not in _I64:
            return False
        place.id, place.last_ns = clock_id, last_ns
        place.unit_ns, place.is_incremental, place.start_ns, place.end_ns, place.shift_ns = stretch
        return True


def _limited(number: int) -> int:
    """A number, or the nearest one that has 64 bits."""
    return min(max(number, _I64[0]), _I64[-1])
