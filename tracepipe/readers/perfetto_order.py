"""Makes events of the sorted rows of a Perfetto trace in the core: `perfetto_order.c`."""

from __future__ import annotations

import ctypes
import os
from typing import Final, TypeVar

import numpy as np
import orjson

from tracepipe.event.columns import Bools, Int32s, Int64s, Texts
from tracepipe.event.model import TIME_LIMIT_NS, Record
from tracepipe.native import checked, owned
from tracepipe.native.signatures import OrderMade, OrderRows
from tracepipe.readers.perfetto_events import (
    BEGIN,
    COUNTER,
    END,
    FLOW,
    INSTANT,
    INSTANT_FLOW,
    LAST_FLOW,
    NEXT_FLOW,
    OF_CALLS,
    WHOLE,
    Key,
    Ordered,
    Submissions,
)
from tracepipe.readers.perfetto_tracks import Tracks, begun, kernel_name
from tracepipe.readers.sorted_rows import Rows

_ALL, _NEW_KEY, _NEW_VARIANT, _NEW_RECORD, _FOREIGN = range(5)
_PHASES: Final = (
    BEGIN, END, INSTANT, COUNTER, WHOLE, FLOW, NEXT_FLOW, LAST_FLOW, INSTANT_FLOW, INSTANT_FLOW + NEXT_FLOW,
    INSTANT_FLOW + LAST_FLOW,
)  # fmt: skip
_RECORD: Final = len(_PHASES)
_NUMBERS: Final = {phase: number for number, phase in enumerate(_PHASES)}
_IS_CALL, _IS_STREAM, _IS_SUMMARY, _MAY_LAUNCH, _HAS_GRID, _HAS_BLOCK, _IS_VARIANT = (
    1 << bit for bit in range(7)
)
_OF_ENDS: Final = 4
_OF_FLOWS: Final = (INSTANT, FLOW, NEXT_FLOW, LAST_FLOW)
_COUNTED: Final = (
    "more begins than can be open at a time",
    "end|ends without an open slice",
    "flow|flows ends|end without a begin",
    "flow|flows without a slice on its|their stream",
)
# The most keys, and bytes of their texts, before those that no open slice needs are forgotten.
_KEYS_MAX: Final = 1 << 12
_BYTES_MAX: Final = 1 << 20

K = TypeVar("K", str, bytes)


class NativeOrdered(Ordered):
    """Reads rows in the core."""

    def __init__(self, tracks: Tracks, submissions: Submissions, core: ctypes.CDLL) -> None:
        super().__init__(tracks, submissions)
        self._core = core
        made = core.tp_order_new(int.from_bytes(os.urandom(8), "little"), self._open_max)
        self._at = owned(self, made, core.tp_order_free)
        self._numbers: dict[bytes, int] = {}
        """The numbers of keys by first texts, and then what each is."""
        self._described: list[tuple[Key | Record, bytes]] = []
        self._names = {"": 0}
        self._track_numbers: dict[int, int] = {}
        self._record_numbers: dict[bytes, int] = {}
        self._bytes, self._bytes_max = 0, _BYTES_MAX

    def events(self, rows: Rows) -> Rows:
        if len(self._described) > _KEYS_MAX or self._bytes > self._bytes_max:
            self._forget()
        core, count, number_of = self._core, len(rows), self._numbers.get
        keys = np.array([number_of(first, -1) for first in rows.firsts], np.int32)
        columns: list[Int32s | Int64s] = [
            rows.ts_ns,
            rows.dur_ns,
            rows.number,
            rows.second.ends,
            rows.first,
            keys,
        ]
        view = ctypes.byref(OrderRows(*(column.ctypes.data for column in columns)))
        made, asked, at = _Made(2 * count), np.zeros(3, np.int64), 0
        while True:
            data = rows.second.data
            at = checked(core.tp_order_take(self._at, view, data, at, count, made.view, asked.ctypes.data))
            why, of, slot = asked.tolist()
            if why == _NEW_KEY:
                first = rows.firsts[int(rows.first[at])]
                keys[rows.first[at]] = self._numbers[first] = self._new_key(first, int(rows.ts_ns[at]))
            elif why == _NEW_VARIANT:
                text = ctypes.c_void_p()
                size = core.tp_order_part(self._at, ctypes.byref(text))
                key = self._described[of][0]
                assert isinstance(key, tuple)
                checked(
                    core.tp_order_set_variant(self._at, self._describe(key, ctypes.string_at(text, size)))
                )
            elif why == _NEW_RECORD:
                core.tp_order_set_record(self._at, of, slot, self._record_number(self._record_of(of, slot)))
            elif why == _FOREIGN:
                at = self._take_records(rows, at, keys, made)
            else:
                break
        self._note_counts()
        return self._made_rows(made)

    def _made_rows(self, made: _Made) -> Rows:
        text, size = ctypes.c_void_p(), ctypes.c_int64()
        count = self._core.tp_order_made_rows(self._at, ctypes.byref(text), ctypes.byref(size))
        data = ctypes.string_at(text, size.value) if size.value else b""
        ts_ns, dur_ns, number, ends = made.numbers[:, :count]
        # The different records, in the order in which they come first.
        different, places, inverse = np.unique(made.records[:count], return_index=True, return_inverse=True)
        order = np.argsort(places)
        known = list(self._record_numbers)
        firsts = [known[at] for at in different[order].tolist()]
        first = np.empty(len(order), np.int32)
        first[order] = np.arange(len(order), dtype=np.int32)
        return Rows(
            ts_ns, np.zeros(count, np.int64), dur_ns, number, first[inverse], firsts, Texts(data, ends)
        )

    def _take_records(self, rows: Rows, at: int, keys: Int32s, made: _Made) -> int:
        """Add the rows of events for rows of records, from a place on. Return the place of the next row."""
        for place in range(at, len(rows)):
            key = keys.item(rows.first.item(place))
            record, text = self._described[key] if key >= 0 else ((), b"")
            if not isinstance(record, dict):
                return place
            ts_ns, dur_ns, number = (of.item(place) for of in (rows.ts_ns, rows.dur_ns, rows.number))
            for *columns, of, args in self._rows_of(
                record, (ts_ns, dur_ns, number, text, rows.second[place])
            ):
                made.reserve(2 * len(rows) + 1)
                called = self._record_number(of)
                checked(self._core.tp_order_add(self._at, made.view, *columns, called, args, len(args)))
                made.count += 1
        return len(rows)

    # Keys -----------------------------------------------------------------------------------------------

    def _new_key(self, first: bytes, ts_ns: int) -> int:
        """The number of a new key, or of one that has another track from a time on."""
        key, text = self._stated(first)
        self._bytes += len(first)
        if isinstance(key, dict):
            return self._add_key(_RECORD, 0, 0, (key, text))
        phase, track, name, category = key
        until_ns, track = self._tracks.until(track, ts_ns), self._tracks.at(track, ts_ns)
        stream = self._tracks.place(track).stream
        if stream is None or _NUMBERS[phase] >= _NUMBERS[FLOW]:
            return self._describe((phase, track, name, category), b"", until_ns)
        flags = _IS_STREAM | (_IS_SUMMARY if stream.is_summary else 0)
        return self._add_key(_NUMBERS[phase], flags, track, (key, b""))

    def _describe(self, key: Key, part: bytes, until_ns: int = TIME_LIMIT_NS + 1) -> int:
        """The number of the key of an event. On a stream, `part` has the arguments on which it depends."""
        phase, track, name, category = key
        place = self._tracks.place(track)
        flags = (_IS_CALL if category in OF_CALLS else 0) | (_MAY_LAUNCH if self._may_launch(track) else 0)
        if place.stream is not None:
            flags |= _IS_STREAM | (_IS_SUMMARY if place.stream.is_summary else 0)
            if _NUMBERS[phase] < _NUMBERS[FLOW]:
                name = kernel_name(name, part)
        if part:
            moved = orjson.loads(begun({"name": name}, part)[0])
            flags |= (
                _IS_VARIANT | (_HAS_GRID if "grid" in moved else 0) | (_HAS_BLOCK if "block" in moved else 0)
            )
        if phase in (BEGIN, END):
            name, category = map(self._tracks.long_names.shortened, (name, category))
        elif phase == COUNTER:
            name = place.counter
        ahead = self._with_category(track, category, b"")
        described = (phase, track, name, category), part
        return self._add_key(_NUMBERS[phase], flags, track, described, (name, category), ahead, until_ns)

    def _add_key(
        self, phase: int, flags: int, track: int, described: tuple[Key | Record, bytes],
        names: tuple[str, str] = ("", ""), ahead: bytes = b"", until_ns: int = TIME_LIMIT_NS + 1,
    ) -> int:  # fmt: skip
        texts = (self._names.setdefault(text, len(self._names)) for text in names)
        number = self._track_numbers.setdefault(track, len(self._track_numbers))
        self._described.append(described)
        self._bytes += sum(map(len, names)) + len(ahead) + len(described[1])
        add = self._core.tp_order_add_key
        return checked(add(self._at, phase, flags, number, *texts, ahead, len(ahead), until_ns))

    def _record_of(self, number: int, slot: int) -> bytes:
        """A record of the events of a key."""
        key, part = self._described[number]
        assert isinstance(key, tuple)
        phase, track, name, _ = key
        if _NUMBERS[phase] >= _NUMBERS[FLOW]:
            return self._record(_OF_FLOWS[slot], track, name)
        if slot >= _OF_ENDS:
            return self._record(END, track, name, slot > _OF_ENDS)
        record = self._record(phase, track, name, slot >= 2, slot % 2 == 1)
        if phase == END or self._tracks.place(track).stream is None:
            return record
        return begun(orjson.loads(record), part)[0]

    def _record_number(self, record: bytes) -> int:
        number = self._record_numbers.get(record)
        if number is None:
            number = self._record_numbers[record] = len(self._record_numbers)
            self._bytes += len(record)
        return number

    def _forget(self) -> None:
        """Forget all keys, and the names and records that no open slice needs."""
        self._core.tp_order_forget(self._at)
        self._numbers.clear()
        self._described.clear()
        there = ctypes.c_void_p()
        size = 5 * self._core.tp_order_open(self._at, ctypes.byref(there))
        data = (ctypes.c_int32 * size).from_address(there.value) if there.value else bytearray()
        # By open slice: that below, its name and category, whether it is a call, and the record of its end.
        of = np.frombuffer(data, np.int32).reshape(-1, 5)
        is_open = of[:, 3] >= 0
        self._names = _renumber(self._names, of, is_open, [1, 2], {0})
        self._record_numbers = _renumber(self._record_numbers, of, is_open, [4], set())
        self._bytes = sum(map(len, self._names)) + sum(map(len, self._record_numbers))
        self._bytes_max = max(_BYTES_MAX, 2 * self._bytes)

    # Flows, and what is counted -------------------------------------------------------------------------

    def _goes_on(self, phase: str, number: int) -> tuple[str, int] | None:
        made = np.zeros(2, np.int64)
        if not checked(self._core.tp_order_flow(self._at, _NUMBERS[phase], number, made.ctypes.data)):
            return None
        return _PHASES[int(made[0])], int(made[1])

    def _note_counts(self) -> None:
        counts = np.zeros(2 * len(_COUNTED), np.int64)
        self._core.tp_order_counted(self._at, counts.ctypes.data)
        numbers, order = counts.reshape(2, -1).tolist()
        for _, words, count in sorted(zip(order, _COUNTED, numbers, strict=True)):
            if count:
                self.counted[words] = count


class _Made:
    """Room for rows of events."""

    def __init__(self, room: int) -> None:
        self.count = 0
        self.numbers: Int64s = np.empty((4, room), np.int64)
        self.records = np.empty(room, np.int32)
        self._set_view()

    def _set_view(self) -> None:
        columns = [*self.numbers, self.records]
        self.view = ctypes.byref(OrderMade(*(column.ctypes.data for column in columns)))

    def reserve(self, room: int) -> None:
        """Have room for so many rows more than those that Python has added."""
        if self.count + room > len(self.records):
            room = 2 * (self.count + room)
            numbers, records = self.numbers, self.records
            self.numbers, self.records = np.empty((4, room), np.int64), np.empty(room, np.int32)
            self.numbers[:, : numbers.shape[1]], self.records[: len(records)] = numbers, records
            self._set_view()


def _renumber(
    numbers: dict[K, int], of: Int32s, is_open: Bools, columns: list[int], more: set[int]
) -> dict[K, int]:
    """New numbers of the texts that open slices have in these columns, which are changed, and of `more`."""
    kept = sorted({*of[is_open][:, columns].flatten().tolist(), *more})
    new = np.zeros(len(numbers) + 1, np.int32)
    new[kept] = np.arange(len(kept), dtype=np.int32)
    for column in columns:
        of[is_open, column] = new[of[is_open, column]]
    texts = list(numbers)
    return {texts[at]: place for place, at in enumerate(kept)}
