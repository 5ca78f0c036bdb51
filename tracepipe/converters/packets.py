"""One packet sequence of a Perfetto trace: its tables of names, and the packets of its events.

    TracePacket   8 timestamp  11 track_event  12 interned_data  10 sequence
    TrackEvent    9 type  11 track  3 category  10 name (or 23 in place)  4 annotations  30 value  47 flows

The native core does the same in `perfetto.c`.
Source: protos/perfetto/trace/trace_packet.proto and track_event/track_event.proto.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final, cast

import numpy as np
import orjson

from tracepipe.converters.native_columns import DrawnView, WarpsView
from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, grown, unsigned
from tracepipe.event.ops import BEGIN, COUNTER, END, INSTANT, MARKS, UNCLOSED, Op
from tracepipe.event.tables import Args
from tracepipe.layout.timeline import (
    FIRST_EXTRA,
    PYTHON,
    WARP_BEGIN,
    WARP_COUNT,
    WARP_EXIT,
    Drawn,
    Slices,
    Track,
    WarpChanges,
)
from tracepipe.native import checked, owned

SMALL_END = 1 << 11
_U64 = (1 << 64) - 1
_SIZES: Final = np.array([1 << 7 * size for size in range(1, 5)])
"""The first values that take 2, 3, … bytes: a varint has a byte for each 7 bits."""

SMALL: tuple[bytes, ...] = (
    *(bytes((value,)) for value in range(0x80)),
    *(bytes((value & 0x7F | 0x80, value >> 7)) for value in range(0x80, SMALL_END)),
)
"""The varint of each value under SMALL_END."""


def varint(value: int) -> bytes:
    """A varint; a negative value is taken as its 64-bit two's complement, as int64 fields are."""
    if 0 <= value < SMALL_END:
        return SMALL[value]
    if 0 <= value < 1 << 21:
        two = (value & 0x7F | 0x80, value >> 7 & 0x7F | (0x80 if value >= 1 << 14 else 0))
        return bytes((*two, value >> 14)) if value >= 1 << 14 else bytes(two)
    value &= _U64
    digits = []
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def varints(values: Int64s) -> list[bytes]:
    """The varint of each value."""
    # The highest bit of a byte is set where another byte follows.
    spread, sizes = values & 0x7F, _varint_sizes(values)
    for at in range(1, len(_SIZES)):
        more = values >> 7 * at
        spread |= np.where(more > 0, 1 << 8 * at - 1 | (more & 0x7F) << 8 * at, 0)
    made = [bits.to_bytes(size, "little") for bits, size in zip(spread.tolist(), sizes.tolist(), strict=True)]
    for at in np.flatnonzero((values < 0) | (values >= _SIZES[-1])).tolist():
        made[at] = varint(int(values[at]))
    return made


def tag(field: int, wire_type: int) -> bytes:
    """The tag of a field: wire type 0 varint, 1 fixed64, 2 length-delimited."""
    return varint(field << 3 | wire_type)


def number(field: int, value: int) -> bytes:
    """A varint field."""
    return tag(field, 0) + varint(value)


def delimited(field: int, payload: bytes) -> bytes:
    """A bytes, string or message field."""
    return tag(field, 2) + varint(len(payload)) + payload


def text(field: int, value: str) -> bytes:
    """A string field. Characters that UTF-8 cannot encode become question marks."""
    return delimited(field, value.encode("utf-8", "replace"))


def double(field: int, value: float) -> bytes:
    """A double field."""
    return tag(field, 1) + struct.pack("<d", value)


_TIMESTAMP, _TRACK_EVENT, _PACKET = tag(8, 0), tag(11, 2), tag(1, 2)
# Made once: timestamps by their steps, and what precedes a track event or a packet by its length.
_STEPS = tuple(_TIMESTAMP + digits for digits in SMALL)
_EVENT_OF = tuple(_TRACK_EVENT + digits for digits in SMALL)
_PACKET_OF = tuple(_PACKET + digits for digits in SMALL)


class PacketStream:
    """The packets of the sequence `id`. `clock` and `base_ns` are those that its first packet states."""

    def __init__(self, id: int, clock: int, base_ns: int) -> None:
        self._clock, self._last_ns = clock, base_ns
        self._suffix = number(10, id)
        self._out: list[bytes] = []

    def put(self, ts_ns: Int64s, parts: Sequence[list[bytes]], interned: dict[int, list[bytes]]) -> None:
        """Write a packet with a track event for each time. `parts` are the columns of its parts. `interned`
        are entries of tables that some packets have, by their places.
        """
        count = len(ts_ns)
        sizes = sum((_lengths(part) for part in parts), np.zeros(count, np.int64))
        ends, end_sizes = [self._suffix] * count, np.full(count, len(self._suffix))
        for at, entries in interned.items():
            ends[at] = delimited(12, b"".join(entries)) + self._suffix
            end_sizes[at] = len(ends[at])
        events = _heads(_EVENT_OF, _TRACK_EVENT, sizes)
        whole = len(_TRACK_EVENT) + _varint_sizes(sizes) + sizes + end_sizes
        self._put(ts_ns, whole, [events, *parts, ends])

    def put_messages(self, ts_ns: Int64s, messages: list[bytes]) -> None:
        """Write a packet for each time, with a message that is not a track event and has its tag."""
        sizes = _lengths(messages) + len(self._suffix)
        self._put(ts_ns, sizes, [messages, [self._suffix] * len(messages)])

    def _put(self, ts_ns: Int64s, sizes: Int64s, parts: Sequence[list[bytes]]) -> None:
        stamps, stamp_sizes = self._stamps(ts_ns)
        heads = _heads(_PACKET_OF, _PACKET, stamp_sizes + sizes)
        self._out.append(b"".join(chain.from_iterable(zip(heads, stamps, *parts, strict=True))))

    def _stamps(self, ts_ns: Int64s) -> tuple[list[bytes], Int64s]:
        """The timestamps of packets, and their sizes."""
        last_ns = np.maximum.accumulate(np.concatenate([[self._last_ns], ts_ns]))
        self._last_ns = int(last_ns[-1])
        steps = ts_ns - last_ns[:-1]
        far = (steps < 0) | (steps >= SMALL_END)
        steps[far] = 0
        stamps = list(map(_STEPS.__getitem__, steps.tolist()))
        sizes = len(_TIMESTAMP) + _varint_sizes(steps)
        for at in np.flatnonzero(far).tolist():
            # A long step, or the full time of an earlier event.
            ns, earlier_ns = int(ts_ns[at]), int(last_ns[at])
            is_earlier = ns < earlier_ns
            full = number(8, max(0, ns)) + number(58, self._clock)
            stamps[at] = full if is_earlier else number(8, ns - earlier_ns)
            sizes[at] = len(stamps[at])
        return stamps, sizes

    def drain(self) -> bytes:
        """The bytes that were written since the last call."""
        out, self._out = self._out, []
        return b"".join(out)


def _lengths(part: list[bytes]) -> Int64s:
    return np.fromiter(map(len, part), np.int64, len(part))


def _varint_sizes(values: Int64s) -> Int64s:
    return 1 + np.searchsorted(_SIZES, values, side="right")


def _heads(ready: tuple[bytes, ...], tag: bytes, sizes: Int64s) -> list[bytes]:
    """The bytes before messages of these sizes."""
    return [ready[size] if size < SMALL_END else tag + varint(size) for size in sizes.tolist()]


CATEGORIES, EVENT_NAMES, ARG_NAMES, STRINGS = range(4)
"""Tables of names."""
_FIELDS: Final = {CATEGORIES: 1, EVENT_NAMES: 2, ARG_NAMES: 3, STRINGS: 29}
"""Their fields in InternedData."""
TABLE_MAX: Final = 1 << 14
"""The most entries of a table. When it is full, further names are written in place."""
TABLE_BYTES_MAX: Final = 1 << 19
"""The most bytes of a table: names may be long, and keys of arguments as long as a line."""
STRINGS_MAX: Final = 1 << 13
_TEXT_MAX = 64
# Names of warps that were used once are remembered, for warps below _MET_MAX of the first _KERNELS_MAX
# kernels. Up to _NAMED_MAX that are used again get a number, from _FIRST_IID on: 1 is an exit.
_MET_MAX, _KERNELS_MAX, _NAMED_MAX, _FIRST_IID = 1 << 17, 256, 1 << 16, 2
TRACKS, TOPS, NAMES, BEFORE, LAUNCH_KEY, AFTER, MARK, KEYS, LINES = range(9)
"""The parts of packets that are made once. By row: its track, and its track and category. By name. By shape:
what is shown before its arguments, the key of its launch, and what is shown after that. By mark. Keys of
annotations. By frame: the Python line."""
FORGOTTEN: Final = (NAMES, BEFORE, LAUNCH_KEY, AFTER)
KEY_SOURCE, KEY_EXITS, KEY_CYCLES, KEY_LANES = range(4)
SHOWN: Final = frozenset({"cpu", "source_ns", "launch", "grid", "block", PYTHON, *MARKS})
# Deeper values are written as JSON text.
_DEPTH_MAX = 8
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1
_TYPES = tuple(number(9, kind) for kind in range(5))
_FLOW, _ANNOTATION, _INT_VALUE, _COUNTED = tag(47, 1), tag(4, 2), tag(4, 0), tag(12, 0)
_COUNTS = tuple(_COUNTED + digits for digits in SMALL)
_ALIKE_MAX = 1 << 13
# This many changes of warps are written at a time, as each takes several Python objects.
_AT_ONCE = 1 << 12
_Key = tuple[int, int, int]
"""The key of operations that are written alike: kind, line and mark, row and name, shape and arguments."""


class Packets:
    """The packets of the sequence `id`. `clock` and `base_ns` are those that its first packet states."""

    def __init__(self, id: int, clock: int, base_ns: int) -> None:
        self._stream: Any = PacketStream(id, clock, base_ns)
        self._tables: list[dict[bytes, int]] = [{}, {}, {}, {}]
        self._table_bytes = [0] * len(self._tables)
        self._pending: list[bytes] = []
        self._is_ready: list[Bools] = [np.zeros(0, np.bool_) for _ in range(LINES + 1)]
        self._ready: list[dict[int, bytes]] = [{} for _ in range(LINES + 1)]
        self._args: dict[int, bytes] = {}
        self._alike: dict[_Key, bytes] = {}
        self._shadows: set[int] = set()
        """Arguments that have names of what is shown in addition to arguments."""
        self._warp_names: dict[int, bytes] = {}
        """By kernel and number of a warp: its name's number as a field, empty if the name was used once."""
        self._named = 0

    # Tables --------------------------------------------------------------------------------------------

    def intern(self, table: int, name: bytes) -> int:
        """The number of a name from 1 on; 0 where the table is full."""
        known = self._tables[table]
        iid = known.get(name)
        if iid is None:
            if len(known) >= (STRINGS_MAX if table == STRINGS else TABLE_MAX):
                return 0
            if len(name) > TABLE_BYTES_MAX - self._table_bytes[table]:
                return 0
            self._table_bytes[table] += len(name)
            iid = known[name] = len(known) + 1
            self._pending.append(delimited(_FIELDS[table], number(1, iid) + delimited(2, name)))
        return iid

    def is_ready(self, which: int, numbers: Int32s) -> bool:
        """Whether all these numbers have bytes, and none is below 0."""
        ready = self._is_ready[which]
        if not len(numbers):
            return True
        is_known = int(numbers.min()) >= 0 and int(numbers.max()) < len(ready)
        return is_known and bool(ready[numbers].all())

    def unready(self, which: int, numbers: Int32s) -> list[int]:
        """Which of these numbers have no bytes yet, each once, in order."""
        if not len(numbers):
            return []
        self._is_ready[which] = ready = grown(self._is_ready[which], int(numbers.max()) + 1, 0)
        new = numbers[~ready[numbers]]
        return list(dict.fromkeys(new.tolist())) if len(new) else []

    def set(self, which: int, at: int, made: bytes) -> None:
        """Set the bytes of a number."""
        self._is_ready[which] = ready = grown(self._is_ready[which], at + 1, 0)
        ready[at] = True
        self._keep_ready(which, at, made)

    def _keep_ready(self, which: int, at: int, made: bytes) -> None:
        self._ready[which][at] = made

    def forget(self, *, shapes: bool) -> None:
        """Forget all arguments, and all names and `shapes`: they have new numbers now."""
        for which in FORGOTTEN if shapes else ():
            self._is_ready[which][:] = False
            self._ready[which].clear()
        self._args.clear()
        self._alike.clear()
        self._shadows.clear()

    def set_row(self, row: int, track: Track) -> None:
        """Make the bytes that the operations of a row share."""
        self.set(TRACKS, row, _on(track))
        self.set(TOPS, row, self._top(track))

    def _top(self, track: Track) -> bytes:
        """The fields of a begin or an instant for its track."""
        return _on(track) + self.category(track.category)

    def name(self, name: str) -> bytes:
        """TrackEvent.name_iid, or .name where the table is full."""
        encoded = name.encode("utf-8", "replace")
        iid = self.intern(EVENT_NAMES, encoded)
        return number(10, iid) if iid else delimited(23, encoded)

    def category(self, name: str) -> bytes:
        """TrackEvent.category_iids, or .categories."""
        encoded = name.encode("utf-8", "replace")
        iid = self.intern(CATEGORIES, encoded) if name else 0
        return (number(3, iid) if iid else delimited(22, encoded)) if name else b""

    def key(self, name: str) -> bytes:
        """DebugAnnotation.name_iid, or .name."""
        encoded = name.encode("utf-8", "replace")
        iid = self.intern(ARG_NAMES, encoded)
        return number(1, iid) if iid else delimited(10, encoded)

    def annotations(self, args: Args) -> bytes:
        """TrackEvent.debug_annotations of `args`, without those that are None."""
        return b"".join(
            [
                delimited(4, self.key(str(name)) + self._value(value, 0, may_intern=True))
                for name, value in args.items()
                if value is not None
            ]
        )

    def _value(self, value: object, depth: int, *, may_intern: bool = False) -> bytes:
        """The value fields of a DebugAnnotation."""
        if isinstance(value, str):
            encoded = value.encode("utf-8", "replace")
            iid = self.intern(STRINGS, encoded) if may_intern and len(value) <= _TEXT_MAX else 0
            return number(17, iid) if iid else delimited(6, encoded)
        if isinstance(value, bool):
            return number(2, value)
        if isinstance(value, int):
            if _INT_MIN <= value <= _INT_MAX:
                return number(4, value)
            return number(3, value) if 0 <= value < 1 << 64 else text(6, str(value))
        if isinstance(value, float):
            return double(5, value)
        if isinstance(value, list | dict) and value and depth < _DEPTH_MAX:
            if isinstance(value, list):
                return b"".join(delimited(12, self._value(item, depth + 1)) for item in value)
            return b"".join(
                delimited(11, text(10, str(key)) + self._value(item, depth + 1))
                for key, item in value.items()
            )
        return text(6, orjson.dumps(value).decode())

    # Packets -------------------------------------------------------------------------------------------

    def drain(self) -> bytes:
        """The bytes that were written since the last call."""
        drained: bytes = self._stream.drain()
        return drained

    def _move_pending(self, interned: dict[int, list[bytes]], at: int) -> None:
        """Move the entries that were interned since to the packet at a place."""
        if self._pending:
            interned.setdefault(at, []).extend(self._pending)
            self._pending.clear()

    def _all_pending(self) -> dict[int, list[bytes]]:
        """The entries that were interned before the next packets, the first of which has them."""
        interned: dict[int, list[bytes]] = {}
        self._move_pending(interned, 0)
        return interned

    def fields(self, op: Op, drawn: Drawn) -> bytes:
        """The fields of an operation, without those that are made once."""
        kind, row, _, name, event, mark, flow, flow2, value, _ = op
        if kind == COUNTER:
            return _TYPES[COUNTER] + _on(drawn.book.tracks[row]) + _value(drawn.counted(event, value))
        track, book = drawn.book.tracks[row], drawn.book
        on_track = _on(track) if kind == END else self._top(track) + self.name(book.names[name])
        args = self.annotations(drawn.args_of(event, mark))
        return _TYPES[kind] + on_track + args + b"".join(map(_flow, drawn.flows(flow, flow2)))

    def write(self, drawn: Drawn) -> None:
        """Write the operations of a batch. The bytes that they share must be set."""
        columns = {name: column[drawn.order] for name, column in drawn.ops.columns.items()}
        if len(self._alike) > _ALIKE_MAX:
            self._alike.clear()
        keys, lines = _keys_of(columns, drawn), drawn.lines()
        bodies: list[bytes | None] = list(map(self._alike.get, keys))
        interned, ops = self._all_pending(), drawn.ops
        for at in [at for at, body in enumerate(bodies) if body is None]:
            body = self._alike.get(keys[at])
            if body is None:
                body = self._body(keys[at], ops.op(int(drawn.order[at])), drawn, lines)
            bodies[at] = body
            self._move_pending(interned, at)
        flows = [b""] * len(bodies)
        for at in np.flatnonzero(columns["flow"] | columns["flow2"]).tolist():
            both = int(columns["flow"][at]), int(columns["flow2"][at])
            flows[at] = b"".join(map(_flow, drawn.flows(*both)))
        self._stream.put(columns["ts"], [cast("list[bytes]", bodies), flows], interned)

    def _body(self, key: _Key, op: Op, drawn: Drawn, lines: Int64s | None) -> bytes:
        """The fields of an operation but its flows. They are kept for operations with the same key."""
        kind, row, _, name, event, mark, _, _, value, _ = op
        if kind == COUNTER:
            return _TYPES[COUNTER] + self._ready[TRACKS][row] + _value(drawn.counted(event, value))
        on_track = TRACKS if kind == END else TOPS
        body, marked = _TYPES[kind] + self._ready[on_track][row], self._ready[MARK][mark]
        body += b"" if kind == END else self._ready[NAMES][name]
        if event == NONE:
            return self._keep(key, body + marked)
        args = NONE if event <= FIRST_EXTRA or drawn.events is None else int(drawn.events.args[event])
        made = b"" if args == NONE else self._args.get(args, b"")
        if not made and args != NONE:
            own = drawn.book.tables.args(args)
            if SHOWN.isdisjoint(own):
                made = self._args[args] = self.annotations(own)
            else:
                self._shadows.add(args)
        if event <= FIRST_EXTRA or drawn.events is None or args in self._shadows:
            return body + self.annotations(drawn.args_of(event, mark))
        shape, source = int(drawn.events.shape[event]), drawn.events.source_ns
        body += self._ready[BEFORE][shape] + made
        if lines is not None:
            body += self._ready[LINES].get(int(lines[event]), b"")
        launch_key, after = self._ready[LAUNCH_KEY][shape], self._ready[AFTER][shape]
        if source is None and not launch_key:
            return self._keep(key, body + after + marked)
        if source is not None and source[event] != NONE:
            field = self._ready[KEYS][KEY_SOURCE] + _INT_VALUE + varint(int(source[event]))
            body += _ANNOTATION + SMALL[len(field)] + field
        if launch_key:
            launch = unsigned(int(drawn.events.launch[event]))
            body += delimited(4, launch_key + number(4 if launch <= _INT_MAX else 3, launch))
        return body + after + marked

    def _keep(self, key: _Key, body: bytes) -> bytes:
        self._alike[key] = body
        return body

    # Warps ---------------------------------------------------------------------------------------------

    def warps(self, changes: WarpChanges) -> None:
        """Write the changes of a GPU. The count of running warps is a field of the packet that changes it."""
        shown = np.flatnonzero((changes.kind != WARP_COUNT) | (changes.value >= 0))
        for start in range(0, len(shown), _AT_ONCE):
            self._write_warps(changes.take(shown[start : start + _AT_ONCE]))

    def _write_warps(self, changes: WarpChanges) -> None:
        tracks, rows, kind = self._ready[TRACKS], changes.slices.row, changes.kind
        interned = self._all_pending()
        # Most changes are ends: all are made as ends first, and the others replaced.
        of = rows[changes.slice].tolist()
        ends = {row: _TYPES[END] + tracks[row] for row in set(of) & tracks.keys()}
        bodies: list[Any] = list(map(ends.get, of))
        begins = np.flatnonzero(kind == WARP_BEGIN)
        for at, body in zip(begins.tolist(), self._begins(changes, begins, interned), strict=True):
            bodies[at] = body
        counts = [counted(value) for value in changes.value.tolist()]
        for at in np.flatnonzero(kind == WARP_COUNT).tolist():
            bodies[at], counts[at] = _TYPES[COUNTER] + tracks[changes.counter_row], _value(changes.value[at])
        for at in np.flatnonzero(kind == WARP_EXIT).tolist():
            bodies[at] = self._exit(changes, at)
            self._move_pending(interned, at)
        flow = np.where(kind == WARP_BEGIN, changes.slices.flow[changes.slice], 0)
        self._stream.put(changes.ts_ns, [bodies, counts, *_flows(flow)], interned)

    def _begins(
        self, changes: WarpChanges, begins: Int64s, interned: dict[int, list[bytes]]
    ) -> Iterator[bytes]:
        """The fields of slices that begin, in the order of the changes, without count and flow."""
        slices, keys, tops = changes.slices.take(changes.slice[begins]), self._ready[KEYS], self._ready[TOPS]
        after_ns = slices.source_ns - changes.ts_ns[begins] - changes.offset_ns
        known = [
            (KEY_SOURCE, after_ns, slices.source_ns != NONE),
            (KEY_EXITS, slices.exits, slices.exits != NONE),
            (KEY_CYCLES, slices.cycles, slices.cycles != NONE),
            (KEY_LANES, slices.lanes, slices.lanes != NONE),
        ]
        parts = [
            [_TYPES[BEGIN] + tops[row] for row in slices.row.tolist()],
            self._warp_names_of(changes, slices, begins, interned),
            *(_all_annotated(keys[key], values, there) for key, values, there in known if there.any()),
        ]
        if slices.unclosed.any():
            unclosed = self._ready[MARK][UNCLOSED]
            parts.append([unclosed if one else b"" for one in slices.unclosed.tolist()])
        return map(b"".join, zip(*parts, strict=True))

    def _exit(self, changes: WarpChanges, at: int) -> bytes:
        """The fields of the instant of an exit, without count."""
        mask = int(changes.mask[at])
        args = {"mask": f"0x{mask:08x}", "lanes": mask.bit_count()}
        top = self._top(changes.track(int(changes.slice[at])))
        return _TYPES[INSTANT] + top + self.name("exit") + self.annotations(args)

    def _warp_names_of(
        self, changes: WarpChanges, slices: Slices, begins: Int64s, interned: dict[int, list[bytes]]
    ) -> list[bytes]:
        """The names of slices, as numbers where they were used before."""
        kernels, numbers = slices.kernel.tolist(), slices.number.tolist()
        # One number for a kernel and a warp, if both are small enough to remember the name.
        small = (slices.kernel < _KERNELS_MAX) & (slices.number < _MET_MAX)
        keys = np.where(small, slices.kernel * _MET_MAX + slices.number % _MET_MAX, NONE).tolist()
        names = list(map(self._warp_names.get, keys))
        for at in [at for at, name in enumerate(names) if not name]:
            key, known = keys[at], self._warp_names.get(keys[at])
            if not known:
                # A number only for a name that was used before: a large launch uses each name once.
                name = changes.kernels[kernels[at]].title(numbers[at]).encode("utf-8", "replace")
                if known is None and key != NONE and len(self._warp_names) < _MET_MAX:
                    self._warp_names[key] = b""
                if known is None or self._named >= _NAMED_MAX:
                    known = delimited(23, name)
                else:
                    iid = _FIRST_IID + self._named
                    self._named += 1
                    self._pending.append(delimited(_FIELDS[EVENT_NAMES], number(1, iid) + delimited(2, name)))
                    known = self._warp_names[key] = number(10, iid)
            names[at] = known
            self._move_pending(interned, int(begins[at]))
        return cast("list[bytes]", names)


def _keys_of(columns: dict[str, Any], drawn: Drawn) -> list[_Key]:
    """The keys of operations: those with the same key are written the same way."""
    event, events = columns["event"], drawn.events
    columns = {name: column.astype(np.int64) for name, column in columns.items()}
    mark = columns["mark"]
    # An operation with its own arguments has a key that no other has.
    shape, args = event.astype(np.int64), np.full(len(event), NONE, np.int64)
    if events is not None and len(events):
        of_event, places = event >= 0, np.maximum(event, 0)
        shape = np.where(of_event, events.shape[places], shape)
        args = np.where(of_event, events.args[places], args)
        lines = drawn.lines()
        if lines is not None:
            mark += len(MARKS) * (1 + np.where(of_event, lines[places], NONE))
    pairs = ((columns["kind"], mark), (columns["row"], columns["name"]), (shape, args))
    # Each number is two numbers of 32 bits. The lower one may be NONE.
    return list(zip(*(((high << 32) + low).tolist() for high, low in pairs), strict=True))


def _on(track: Track) -> bytes:
    return number(11, track.id * 2)


def _flow(flow: int) -> bytes:
    return _FLOW + abs(flow).to_bytes(8, "little")


def _flows(flows: Int64s) -> list[list[bytes]]:
    """Columns of flows, none where there are no flows."""
    if not (places := np.flatnonzero(flows)).size:
        return []
    column = [b""] * len(flows)
    for at, flow in zip(places.tolist(), flows[places].tolist(), strict=True):
        column[at] = _flow(flow)
    return [column]


def counted(value: int) -> bytes:
    """The field for how many warps run."""
    return b"" if value < 0 else _COUNTS[value] if value < SMALL_END else _COUNTED + varint(value)


def _value(value: float) -> bytes:
    """TrackEvent.counter_value, or .double_counter_value."""
    return double(44, value) if isinstance(value, float) else number(30, int(value))


def _all_annotated(key: bytes, values: Int64s, known: Bools) -> list[bytes]:
    """Annotations of integers, empty where they are not known."""
    first = [_ANNOTATION + SMALL[len(key) + 1 + size] + key + _INT_VALUE for size in range(11)]
    made = [first[len(digits)] + digits for digits in varints(values)]
    for at in np.flatnonzero(~known).tolist():
        made[at] = b""
    return made


_ALL_ARGS = -1
TRACK_EVENT: Final = 11
_Kernels = np.dtype([("name", np.int64), ("warps", np.int64), ("x", np.int64), ("y", np.int64)])


class NativeStream:
    """The packets of one sequence, which the core keeps until they are taken."""

    def __init__(self, core: ctypes.CDLL, id: int, clock: int, base_ns: int) -> None:
        self._core = core
        made = core.tp_perfetto_new(int.from_bytes(os.urandom(8), "little"), id, clock, base_ns)
        self.packets = owned(self, made, core.tp_perfetto_free)

    def packet(self, ts_ns: int, field: int, body: bytes) -> None:
        """Write a packet with a message that is its `field`."""
        checked(self._core.tp_perfetto_packet(self.packets, ts_ns, field, body, len(body)))

    def switches(self, view: ctypes.Structure, reader: object, ahead_ns: int, at: int, stop: int) -> int:
        """Write context switches from a place on, and return where the core stopped."""
        ref = ctypes.byref(view)
        return checked(self._core.tp_perfetto_switches(self.packets, ref, reader, ahead_ns, at, stop))

    def drain(self) -> bytes:
        """The bytes that were written since the last call."""
        out = ctypes.c_void_p()
        size = self._core.tp_perfetto_take(self.packets, ctypes.byref(out))
        return ctypes.string_at(out, size) if size else b""


class NativePackets(Packets):
    """Packets by `perfetto.c`, with the same bytes. The base class writes what the core cannot write."""

    def __init__(self, core: ctypes.CDLL, id: int, clock: int, base_ns: int) -> None:
        super().__init__(id, clock, base_ns)
        self._core = core
        self._stream = NativeStream(core, id, clock, base_ns)
        self._packets = self._stream.packets
        self._kernels = np.empty(0, _Kernels)

    def intern(self, table: int, name: bytes) -> int:
        return checked(self._core.tp_perfetto_intern(self._packets, table, name, len(name)))

    def _keep_ready(self, which: int, at: int, made: bytes) -> None:
        checked(self._core.tp_perfetto_set(self._packets, which, at, made, len(made)))

    def forget(self, *, shapes: bool) -> None:
        super().forget(shapes=shapes)
        for which in (*FORGOTTEN, _ALL_ARGS) if shapes else (_ALL_ARGS,):
            self._core.tp_perfetto_forget(self._packets, which)

    def write(self, drawn: Drawn) -> None:
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
                    self._stream.packet(op[2], TRACK_EVENT, self.fields(op, drawn))
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
                body = self._exit(changes, at) + counted(int(changes.value[at]))
                self._stream.packet(int(changes.ts_ns[at]), TRACK_EVENT, body)
                at += 1
