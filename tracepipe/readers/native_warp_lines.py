"""Makes columns of lines with batches of warps by the native core (`warp_lines.c`), many lines at a time."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Final

import numpy as np
import orjson

from tracepipe.event.checks import first_fault, long_texts
from tracepipe.event.columns import Bools, Int64s
from tracepipe.event.model import COLUMN_LIMIT, Record, WarpBatch
from tracepipe.event.ranges import ranges_agree
from tracepipe.event.schema import fields_of
from tracepipe.event.warps import EACH_EXIT, EACH_RANGE, EACH_WARP, WARP_COLUMNS, Warps
from tracepipe.native.signatures import WarpLines

_PLACES: Final = {name: at for at, name in enumerate(WARP_COLUMNS)}
_LIMITS: Final = {
    name: doc.maximum if doc.maximum is not None else COLUMN_LIMIT
    for name, (_, doc) in fields_of(WarpBatch).items()
    if name in WARP_COLUMNS
}
_OF_RANGES: Final = {"range_count", *EACH_RANGE}
_NOT_OF_LAUNCH: Final = {"ts_ns", *WARP_COLUMNS}
# Columns are made of lines with this much text together. A longer line is read alone.
_TEXT_BYTES: Final = 1 << 18
# How many texts of launches are remembered, and the most bytes of one.
_KNOWN_MAX, _KNOWN_BYTES_MAX = 1 << 10, 1 << 11


class NativeWarpLines:
    """Reads such lines of the native grammar."""

    def __init__(self, core: ctypes.CDLL) -> None:
        self._core = core
        self._batch = core.tp_batch_new()
        if not self._batch:
            raise MemoryError
        weakref.finalize(self, core.tp_batch_free, self._batch)
        self._known: dict[bytes, tuple[Record, list[str]] | None] = {}
        """By the text of a launch: its record and the names of its ranges; None where the line is bad."""

    @staticmethod
    def parts(size: Int64s) -> list[Any]:
        """Split lines of these sizes into parts that are read together."""
        end = np.cumsum(size)
        part = end // _TEXT_BYTES + (end - size) // _TEXT_BYTES
        return np.split(np.arange(len(size)), np.flatnonzero(np.diff(part)) + 1)

    def read(self, text: bytes, at: Int64s, size: Int64s) -> list[Warps | None]:
        """The batches of lines of `text`, by their places and sizes; None for one that is bad, or not of the
        native grammar.
        """
        lines = len(at)
        done, counts = np.empty(lines, np.bool_), np.empty((lines, len(WARP_COLUMNS)), np.int64)
        ts_ns, launch, end = (np.empty(lines, np.int64) for _ in range(3))
        out = WarpLines(*(column.ctypes.data for column in (done, ts_ns, launch, end, counts)))
        columns = at.ctypes.data, size.ctypes.data, ctypes.byref(out)
        self._core.tp_batch_read(self._batch, text, lines, *columns)
        texts = ctypes.c_void_p()
        there = ctypes.string_at(texts, self._core.tp_batch_rest(self._batch, ctypes.byref(texts)))
        values = [self._column(place) for place in range(len(WARP_COLUMNS))]
        counts[~done] = -1
        last = np.cumsum(np.maximum(counts, 0), axis=0)
        good = done & _are_within(values, last) & _agree(values, counts, last)
        found: list[Warps | None] = []
        start = 0
        some = np.flatnonzero((counts >= 0).any(axis=0))
        named = [(WARP_COLUMNS[place], values[place]) for place in some.tolist()]
        places = counts[:, some].tolist(), last[:, some].tolist()
        rows = zip(good.tolist(), ts_ns.tolist(), launch.tolist(), end.tolist(), *places, strict=True)
        for is_good, base_ns, of, end_of_text, sizes, stops in rows:
            launched = self._launched(there[start:end_of_text]) if is_good else None
            start = end_of_text
            if launched is None:
                found.append(None)
                continue
            record, ranges = dict(launched[0]), launched[1]
            if of >= 0:
                record["launch"] = of
            each = zip(named, sizes, stops, strict=True)
            given = {name: column[stop - size : stop] for (name, column), size, stop in each if size >= 0}
            warps = Warps(launched=record, ts_ns=base_ns, ranges=ranges, **given)
            found.append(warps if given.keys().isdisjoint(_OF_RANGES) or ranges_agree(warps) else None)
        return found

    def _launched(self, text: bytes) -> tuple[Record, list[str]] | None:
        """The record of a launch, without its time and with 0 for its id, and the names of its ranges; None
        where the line is bad.
        """
        if text in self._known:
            return self._known[text]
        record: Record = orjson.loads(text)
        known = None
        if record.get("type") == "gpu_warp" and not first_fault(record) and not long_texts(record):
            ranges = record.pop("ranges", [])
            known = {name: value for name, value in record.items() if name not in _NOT_OF_LAUNCH}, ranges
        if len(text) <= _KNOWN_BYTES_MAX:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[text] = known
        return known

    def _column(self, at: int) -> Int64s:
        """A column of all lines."""
        values = ctypes.c_void_p()
        count = self._core.tp_batch_column(self._batch, at, ctypes.byref(values))
        if count == 0:
            return np.empty(0, np.int64)
        assert values.value is not None
        there = (ctypes.c_int64 * count).from_address(values.value)
        return np.frombuffer(there, np.int64).copy()


def _are_within(values: list[Int64s], last: Int64s) -> Bools:
    """Whether all numbers of each line are within their limits; `last` is where those of each line end."""
    within = np.ones(len(last), np.bool_)
    for name, at in _PLACES.items():
        if len(values[at]) and int(values[at].max()) > _LIMITS[name]:
            beyond = np.flatnonzero(values[at] > _LIMITS[name])
            within[np.searchsorted(last[:, at], beyond, "right")] = False
    return within


def _agree(values: list[Int64s], counts: Int64s, last: Int64s) -> Bools:
    """Whether all columns of each line have the same number of values, except those of ranges."""
    size, exits, at = counts[:, _PLACES["warp"]], counts[:, _PLACES["warp"]], _PLACES["exit_count"]
    if len(values[at]):
        total = np.append(0, np.cumsum(values[at]))
        of_warps = total[last[:, at]] - total[last[:, at] - np.maximum(counts[:, at], 0)]
        exits = np.where(counts[:, at] < 0, size, of_warps)
    agree = np.ones(len(counts), np.bool_)
    for names, want in ((EACH_WARP, size), (EACH_EXIT, exits)):
        for name in names:
            count = counts[:, _PLACES[name]]
            agree &= (count < 0) | (count == want)
    return agree
