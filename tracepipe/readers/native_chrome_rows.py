"""Events of Chrome's trace JSON into rows by the native core, `chrome_rows.c`: the usual forms of them."""

from __future__ import annotations

import ctypes
import os
import weakref

import numpy as np

from tracepipe.event.columns import Int64s
from tracepipe.event.tables import packed
from tracepipe.native import library
from tracepipe.native.signatures import EventRows
from tracepipe.readers.chrome_events import ChromeEvents
from tracepipe.readers.chrome_kinds import Kind, Kinds, Rules
from tracepipe.readers.chrome_numbers import Ids
from tracepipe.readers.json_elements import Elements, Fault
from tracepipe.readers.sorted_rows import ARROW, Rows, SortedRow

# Why the core came back, and what becomes of the events of a key, as chrome_rows.c has them.
_NEW, _FULL = 2, 3
_PASSED_OVER, _LEFT_TO_PYTHON, _ROW = 0, 1, 2
_ROOM = 1 << 11
_KINDS_MAX = 1 << 10
_KIND_BYTES_MAX = 1 << 18


def chrome_events(kinds: Kinds, ids: Ids) -> ChromeEvents:
    """What takes events, by the core where there is one."""
    core = library()
    return ChromeEvents(kinds, ids) if core is None else NativeChromeEvents(core, kinds, ids)


class NativeChromeEvents(ChromeEvents):
    """As `ChromeEvents`, which still takes each event whose kind is new, and what is of no usual form."""

    def __init__(self, core: ctypes.CDLL, kinds: Kinds, ids: Ids) -> None:
        super().__init__(kinds, ids)
        self._core = core
        self._known = core.tp_events_new(int.from_bytes(os.urandom(8), "little"), kinds.launch_bits)
        if not self._known:
            raise MemoryError
        weakref.finalize(self, core.tp_events_free, self._known)
        self._firsts_of: list[bytes] = []
        """By the number of a kind."""
        self._rules: dict[tuple[tuple[str, str | None], ...], int] = {}
        self._numbers = np.empty((5, _ROOM), np.int64)
        self._kind = np.empty(_ROOM, np.int32)
        self._view = EventRows(*(column.ctypes.data for column in (*self._numbers, self._kind)))
        self._made = np.zeros(2, np.int64)
        self._odd: dict[int, SortedRow] = {}
        """Rows that are not the core's, by their place."""
        self._last: tuple[SortedRow, Kind] | None = None

    def _take_all(self, batch: Elements) -> list[Fault]:
        """As `ChromeEvents` has it."""
        self._forget_some()
        faults: list[Fault] = []
        starts, ends = batch.starts.ctypes.data, batch.ends.ctypes.data
        rows, made = ctypes.byref(self._view), self._made.ctypes.data
        at, count = 0, len(batch.starts)
        while True:
            at = self._core.tp_events_take(
                self._known, batch.text, starts, ends, at, count, rows, made, _ROOM
            )
            if at < 0:
                raise MemoryError
            if at == count:
                break
            if self._made[1] == _FULL:
                self._flush()
                continue
            start = int(batch.starts[at])
            faults += self._take_one(batch.bytes_before + start, batch.text[start : int(batch.ends[at])])
            at += 1
        self._flush()
        return faults

    def _take_one(self, place: int, text: bytes) -> list[Fault]:
        """Take an event that the core did not."""
        is_new, before, self._last = self._made[1] == _NEW, self.cut, None
        faults = [(place + at, message) for at, message in self._event(text)]
        if is_new:
            self._learn(is_usual=not faults and self.cut == before)
        return faults

    def _add(self, row: SortedRow, kind: Kind) -> None:
        """As `ChromeEvents` has it."""
        if self._made[0] == _ROOM:
            self._flush()
        at = int(self._made[0])
        self._last = row, kind
        self._odd[at] = row
        # Its texts are not the core's.
        self._numbers[:, at] = (*row[:4], self._numbers[4, at - 1] if at else 0)
        self._kind[at] = 0
        self._made[0] += 1

    def _learn(self, *, is_usual: bool) -> None:
        """Say what becomes of events like the last one."""
        what, has_launch, rules, ahead, first = _LEFT_TO_PYTHON, False, 0, b"", b""
        if is_usual and self._last is None:
            what = _PASSED_OVER
        elif is_usual and self._last is not None:
            row, kind = self._last
            if row.rank != ARROW and kind.own_args is None:
                what, has_launch, first = _ROW, kind.launch is not None, row.first
                rules = self._rules_number(kind.rules)
                ahead = packed(kind.ahead)[1:-1]
        if self._core.tp_events_kind(self._known, what, has_launch, rules, ahead, len(ahead)) < 0:
            raise MemoryError
        self._firsts_of.append(first)

    def _rules_number(self, rules: Rules) -> int:
        key = tuple(rules.items())
        number = self._rules.get(key)
        if number is None:
            number = self._rules[key] = len(self._rules)
            names = [name for pair in key for name in pair]
            text = b"".join((packed(name) if name is not None else b"") + b"\0" for name in names)
            if self._core.tp_events_rules(self._known, number, text, len(text)) < 0:
                raise MemoryError
        return number

    def _forget_some(self) -> None:
        """Forget kinds where they are many."""
        if len(self._firsts_of) > _KINDS_MAX or self._core.tp_events_bytes(self._known) > _KIND_BYTES_MAX:
            self._core.tp_events_forget(self._known)
            self._firsts_of.clear()

    def _flush(self) -> None:
        """Hand on the rows that were made."""
        count = int(self._made[0])
        if not count:
            return
        there = ctypes.c_void_p()
        texts = ctypes.string_at(there, self._core.tp_events_texts(self._known, ctypes.byref(there)))
        ts_ns, rank, dur_ns, number, end = self._numbers[:, :count].copy()
        ends, firsts = end.tolist(), self._firsts_of or [b""]
        first = [firsts[kind] for kind in self._kind[:count].tolist()]
        second = [texts[start:stop] for start, stop in zip([0, *ends[:-1]], ends, strict=True)]
        for at, row in self._odd.items():
            first[at], second[at] = row.first, row.second
        self._note_times(ts_ns, dur_ns)
        self.rows.add_all(Rows(ts_ns, rank, dur_ns, number, first, second))
        self._made[0] = 0
        self._odd.clear()

    def _note_times(self, ts_ns: Int64s, dur_ns: Int64s) -> None:
        above = ts_ns[ts_ns > 0]
        if len(above):
            self.first_ns = min(self.first_ns, int(above.min()))
        self.least_ns = min(self.least_ns, int(ts_ns.min()))
        self.last_ns = max(self.last_ns, int((ts_ns + dur_ns).max()))
