"""Makes rows of events of Chrome's trace JSON by the native core (`chrome_rows.c`), for their usual forms."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Final

import numpy as np

from tracepipe.event.model import TIME_LIMIT_NS
from tracepipe.event.tables import packed
from tracepipe.native import library
from tracepipe.readers.chrome_events import ChromeEvents
from tracepipe.readers.chrome_kinds import Kind, Kinds, Rules
from tracepipe.readers.chrome_numbers import Ids, flow_text
from tracepipe.readers.json_elements import Elements, Fault
from tracepipe.readers.native_sorted_rows import NativeSortedRows
from tracepipe.readers.sorted_rows import SortedRow

# Why the core returned, and what is done with the events of a key, as in chrome_rows.c.
_NEW, _FULL = 2, 3
_PASSED_OVER, _LEFT_TO_PYTHON, _ROW, _ALLOCATION = range(4)
_KINDS_MAX: Final = 1 << 12
_KIND_BYTES_MAX: Final = 1 << 21
_NO_TEXTS: Final = (b"", b"", b"")


def chrome_events(kinds: Kinds, ids: Ids) -> ChromeEvents:
    """Return a reader of events, with the native core where it is loaded."""
    core = library()
    return ChromeEvents(kinds, ids) if core is None else NativeChromeEvents(core, kinds, ids)


class NativeChromeEvents(ChromeEvents):
    """As `ChromeEvents`, which still takes events of new kinds and of unusual forms."""

    def __init__(self, core: ctypes.CDLL, kinds: Kinds, ids: Ids) -> None:
        super().__init__(kinds, ids)
        self._core = core
        self._sorted = NativeSortedRows(core)
        self.rows = self._sorted
        self._known = core.tp_events_new(int.from_bytes(os.urandom(8), "little"), kinds.launch_bits)
        if not self._known:
            raise MemoryError
        weakref.finalize(self, core.tp_events_free, self._known)
        self._kinds_count = 0
        self._rules: dict[tuple[tuple[str, str | None], ...], tuple[int, int]] = {}
        """The first place of some rules, and the place after them."""
        self._rules_count = 0
        self._times = np.array([TIME_LIMIT_NS, TIME_LIMIT_NS, 0], np.int64)
        self._last: tuple[SortedRow, Kind] | None = None

    def _take_all(self, batch: Elements) -> list[Fault]:
        """As `ChromeEvents` has it."""
        self._forget_some()
        faults: list[Fault] = []
        starts, ends = batch.starts.ctypes.data, batch.ends.ctypes.data
        why = np.zeros(1, np.int64)
        to = self._times.ctypes.data, why.ctypes.data
        at, count = 0, len(batch.starts)
        while True:
            at = self._core.tp_events_take(
                self._known, self._sorted.at, batch.text, starts, ends, at, count, *to
            )
            if at < 0:
                raise MemoryError
            if at == count:
                break
            if why[0] == _FULL:
                self._sorted.put_away()
                continue
            start = int(batch.starts[at])
            text = batch.text[start : int(batch.ends[at])]
            faults += self._take_one(batch.bytes_before + start, text, is_new=bool(why[0] == _NEW))
            at += 1
        self._note_times()
        return faults

    def _take_one(self, place: int, text: bytes, *, is_new: bool) -> list[Fault]:
        """Take an event that the core did not."""
        before, self._last = self.cut, None
        faults = [(place + at, message) for at, message in self._event(text)]
        if is_new:
            self._learn(is_usual=not faults and self.cut == before)
        return faults

    def _add(self, row: SortedRow, kind: Kind) -> None:
        """As `ChromeEvents` has it."""
        self._last = row, kind
        super()._add(row, kind)

    def _learn(self, *, is_usual: bool) -> None:
        """Tell the core what to do with events like the last one."""
        what, has_launch, rules, texts = _LEFT_TO_PYTHON, False, (0, 0), _NO_TEXTS
        if is_usual and self._last is None:
            what = _PASSED_OVER
        elif is_usual and self._last is not None:
            row, kind = self._last
            if kind.own_args is None or kind.is_allocation:
                what = _ALLOCATION if kind.is_allocation else _ROW
                has_launch = kind.launch is not None
                rules = self._rules_places(kind.rules)
                # The id of a flow goes between the quotes at the end.
                flow = flow_text(*kind.flow, "")[:-2] if kind.flow else b""
                texts = row.first, packed(kind.ahead)[1:-1], flow
        sizes = (ctypes.c_int64 * len(texts))(*map(len, texts))
        pointers = (ctypes.c_char_p * len(texts))(*texts)
        if self._core.tp_events_kind(self._known, what, has_launch, *rules, pointers, sizes) < 0:
            raise MemoryError
        self._kinds_count += 1

    def _rules_places(self, rules: Rules) -> tuple[int, int]:
        key = tuple(rules.items())
        places = self._rules.get(key)
        if places is None:
            start = self._rules_count
            for old, new in key:
                texts = packed(old), packed(new) if new is not None else b""
                sized = (part for text in texts for part in (text, len(text)))
                self._rules_count = self._core.tp_events_rule(self._known, *sized)
                if self._rules_count < 0:
                    raise MemoryError
            places = self._rules[key] = start, self._rules_count
        return places

    def _forget_some(self) -> None:
        """Forget all kinds when there are many."""
        if self._kinds_count > _KINDS_MAX or self._core.tp_events_bytes(self._known) > _KIND_BYTES_MAX:
            self._core.tp_events_forget(self._known)
            self._kinds_count = 0

    def _note_times(self) -> None:
        """Combine the times of the core's rows with those of the others."""
        first_ns, least_ns, last_ns = self._times.tolist()
        self.first_ns, self.least_ns = min(self.first_ns, first_ns), min(self.least_ns, least_ns)
        self.last_ns = max(self.last_ns, last_ns)
