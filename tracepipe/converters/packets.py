"""One packet sequence of a Perfetto trace: its tables of names, and the packets of its events.

    TracePacket   8 timestamp  11 track_event  12 interned_data  10 sequence
    TrackEvent    9 type  11 track  3 category  10 name (or 23 in place)  4 annotations  30 value  47 flows

Timestamps are steps from the packet before (an incremental clock), which makes one or two bytes of eight; a
packet that is older than the one before it has its time in full. The native core has the same in `perfetto.c`
and `perfetto_warps.c`. Source: protos/perfetto/trace/trace_packet.proto and track_event/track_event.proto.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import orjson

from tracepipe.converters.wire import SMALL, SMALL_END, delimited, double, number, tag, text, varint
from tracepipe.event.columns import NONE, unsigned
from tracepipe.event.nesting import BEGIN, COUNTER, END, INSTANT, MARKS, UNCLOSED, Op
from tracepipe.event.tables import Args
from tracepipe.layout.changes import WARP_BEGIN, WARP_COUNT, WARP_END, Kernel, WarpChanges
from tracepipe.layout.timeline import FIRST_EXTRA, Drawn

CATEGORIES, EVENT_NAMES, ARG_NAMES, STRINGS = range(4)
"""Tables of names."""
_FIELDS: Final = {CATEGORIES: 1, EVENT_NAMES: 2, ARG_NAMES: 3, STRINGS: 29}
"""Those of InternedData."""
TABLE_MAX: Final = 1 << 14
"""Entries of one table; when it is full, further names stand in their place."""
STRINGS_MAX: Final = 1 << 13
_TEXT_MAX = 64
# Names of warps that came once are remembered, so many of so many kernels; those that come again get a number,
# so many. The first is that of an exit.
_MET_MAX, _KERNELS_MAX, _NAMED_MAX, _FIRST_IID = 1 << 17, 256, 1 << 16, 2
TRACKS, TOPS, NAMES, BEFORE, LAUNCH_KEY, AFTER, MARK, KEYS = range(8)
"""What of packets is ready-made: by row its track, and its track and category; by name; by shape what it shows
before its arguments, the key of its launch, and what it shows after that; by mark; and keys of annotations."""
KEY_SOURCE, KEY_EXITS, KEY_CYCLES, KEY_LANES = range(4)
SHOWN: Final = frozenset({"cpu", "source_ns", "launch", "grid", "block", *MARKS})
# Deeper values are written as JSON text.
_DEPTH_MAX = 8
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1
_TYPES = tuple(number(9, kind) for kind in range(5))
_TIMESTAMP, _TRACK_EVENT, _PACKET, _FLOW = tag(8, 0), tag(11, 2), tag(1, 2), tag(47, 1)
_ANNOTATION, _INT_VALUE, _COUNTED = tag(4, 2), tag(4, 0), tag(12, 0)
# Ready-made: a timestamp by its step, and what precedes a track event or a packet by its length.
_STEPS = tuple(_TIMESTAMP + digits for digits in SMALL)
_EVENT_OF = tuple(_TRACK_EVENT + digits for digits in SMALL)
_PACKET_OF = tuple(_PACKET + digits for digits in SMALL)
_ALIKE_MAX = 1 << 14
_Key = tuple[int, int, int, int, int, int]
"""What operations have in common that are written alike: kind, row, name, shape, arguments, mark."""
_WarpBegin = tuple[int, int, int, int, int, int, int, int, int]
"""A row of `Slices`."""


class Packets:
    """`id` is the sequence's; `clock` and `base_ns` are those that its first packet states."""

    def __init__(self, id: int, clock: int, base_ns: int) -> None:
        self.id, self._clock, self._last_ns = id, clock, base_ns
        self._suffix = number(10, id)
        self._tables: list[dict[bytes, int]] = [{}, {}, {}, {}]
        self._pending: list[bytes] = []
        self._ready: list[dict[int, bytes]] = [{} for _ in range(8)]
        self._args: dict[int, bytes] = {}
        self._alike: dict[_Key, tuple[bytes, bytes]] = {}
        self._shadows: set[int] = set()
        """Arguments with names that are shown beside arguments too."""
        self._warp_names: dict[tuple[int, int], int] = {}
        """By kernel and number of a warp: the number of its name, 0 where it came once."""
        self._named = 0
        self._out: list[bytes] = []

    # Tables --------------------------------------------------------------------------------------------

    def intern(self, table: int, name: bytes) -> int:
        """The number of a name from 1 on; 0 where the table is full."""
        known = self._tables[table]
        iid = known.get(name)
        if iid is None:
            if len(known) >= (STRINGS_MAX if table == STRINGS else TABLE_MAX):
                return 0
            iid = known[name] = len(known) + 1
            self._pending.append(delimited(_FIELDS[table], number(1, iid) + delimited(2, name)))
        return iid

    def has(self, which: int, at: int) -> bool:
        """Whether something ready-made is there."""
        return at in self._ready[which]

    def unready(self, which: int, numbers: Iterable[int]) -> list[int]:
        """Which of these are not there, each once, in order."""
        ready = self._ready[which]
        return [at for at in dict.fromkeys(numbers) if at not in ready]

    def set(self, which: int, at: int, made: bytes) -> None:
        """Give something ready-made."""
        self._ready[which][at] = made

    def forget(self) -> None:
        """Shapes and arguments have other numbers now."""
        for which in (BEFORE, LAUNCH_KEY, AFTER):
            self._ready[which].clear()
        self._args.clear()
        self._alike.clear()
        self._shadows.clear()

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
        """TrackEvent.debug_annotations of all `args`; None is left out."""
        return b"".join(
            [
                delimited(4, self.key(str(name)) + self._value(value, 0, may_intern=True))
                for name, value in args.items()
                if value is not None
            ]
        )

    def _value(self, value: Any, depth: int, *, may_intern: bool = False) -> bytes:
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

    def packet(self, ts_ns: int, body: bytes) -> None:
        """Write a packet whose track event has these fields."""
        size = len(body)
        event = (_EVENT_OF[size] if size < SMALL_END else _TRACK_EVENT + varint(size)) + body
        if self._pending:
            event += delimited(12, b"".join(self._pending))
            self._pending.clear()
        self._write(ts_ns, event + self._suffix)

    def _write(self, ts_ns: int, rest: bytes) -> None:
        """Write a packet, of which this follows its timestamp."""
        step = ts_ns - self._last_ns
        if 0 <= step < SMALL_END:
            packet = _STEPS[step] + rest
            self._last_ns = ts_ns
        else:
            packet = self._far(ts_ns) + rest
        self._out.append((_PACKET_OF[len(packet)] if len(packet) < SMALL_END else _PACKET + varint(len(packet))) + packet)

    def _far(self, ts_ns: int) -> bytes:
        """A timestamp that no table has: a long step, or the time in full where it goes back."""
        if ts_ns < self._last_ns:
            return number(8, max(0, ts_ns)) + number(58, self._clock)
        step, self._last_ns = ts_ns - self._last_ns, ts_ns
        return number(8, step)

    def take(self) -> bytes:
        """What was written since the last call."""
        out, self._out = self._out, []
        return b"".join(out)

    def fields(self, op: Op, drawn: Drawn) -> bytes:
        """The fields of an operation, which is no count, all of them made anew."""
        kind, row, _, name, event, mark, flow, flow2, _, _ = op
        args = self.annotations(drawn.args_of(event, mark))
        return self._head(kind, row, name) + args + _flow(flow) + _flow(flow2)

    def write(self, drawn: Drawn) -> None:
        """Write the operations of a batch, for which all that can be is ready-made."""
        shapes, numbers = [NONE], [NONE]  # the last place is that of no event
        if (events := drawn.events) is not None:
            shapes, numbers = [*events.shape.tolist(), NONE], [*events.args.tolist(), NONE]
        if len(self._alike) > _ALIKE_MAX:
            self._alike.clear()
        alike, suffix = self._alike, self._suffix
        for op in drawn.rows():
            kind, row, ts_ns, name, event, mark, flow, flow2, value, _ = op
            if kind == COUNTER:
                self.packet(ts_ns, _TYPES[COUNTER] + self._ready[TRACKS][row] + number(30, value))
                continue
            if event <= FIRST_EXTRA:
                self.packet(ts_ns, self.fields(op, drawn))
                continue
            key = (kind, row, name, shapes[event], numbers[event], mark)
            made = alike.get(key)
            if made is None or flow2 or self._pending:
                self.packet(ts_ns, self._body(key, op, drawn) + _flow(flow) + _flow(flow2))
            elif flow:
                self._write(ts_ns, made[1] + abs(flow).to_bytes(8, "little") + suffix)
            else:
                self._write(ts_ns, made[0])

    def _body(self, key: _Key, op: Op, drawn: Drawn) -> bytes:
        """The fields of an operation but its arrows. What others have too is kept."""
        kind, row, name, shape, args, mark = key
        event, marked = op[4], self._ready[MARK][mark]
        body = self._head(kind, row, name)
        if shape == NONE:
            return self._keep(key, body + marked)
        made = b"" if args == NONE else self._args.get(args) or self._annotated_args(drawn, args)
        if args in self._shadows:
            return body + self.annotations(drawn.args_of(event, mark))
        body += self._ready[BEFORE][shape] + made
        launch_key, after = self._ready[LAUNCH_KEY][shape], self._ready[AFTER][shape]
        source = drawn.events.source_ns if drawn.events is not None else None
        if source is None and not launch_key:
            return self._keep(key, body + after + marked)
        if source is not None and source[event] != NONE:
            body += _annotated(self._ready[KEYS][KEY_SOURCE], int(source[event]))
        if launch_key and drawn.events is not None:
            launch = unsigned(int(drawn.events.launch[event]))
            body += delimited(4, launch_key + number(4 if launch <= _INT_MAX else 3, launch))
        return body + after + marked

    def _keep(self, key: _Key, body: bytes) -> bytes:
        """Keep what follows the timestamp in packets of operations like this one: all of it without an arrow, and
        up to the arrow with one.
        """
        with_one = _TRACK_EVENT + varint(len(body) + len(_FLOW) + 8) + body + _FLOW
        self._alike[key] = _TRACK_EVENT + varint(len(body)) + body + self._suffix, with_one
        return body

    def _head(self, kind: int, row: int, name: int) -> bytes:
        """Type, track, and of what has them category and name."""
        if kind in (BEGIN, INSTANT):
            return _TYPES[kind] + self._ready[TOPS][row] + self._ready[NAMES][name]
        return _TYPES[kind] + self._ready[TRACKS][row]

    def _annotated_args(self, drawn: Drawn, at: int) -> bytes:
        args = drawn.book.tables.args(at)
        if not SHOWN.isdisjoint(args):
            self._shadows.add(at)
            return b""
        made = self._args[at] = self.annotations(args)
        return made

    # Warps ---------------------------------------------------------------------------------------------

    def warps(self, changes: WarpChanges) -> None:
        """Write the changes of a GPU. How many warps run is a field of the packet that changes it."""
        tracks, begins = self._ready[TRACKS], self._warp_begins(changes)
        rows = changes.slices.row.tolist()
        for ts_ns, kind, at, value, mask in changes.rows():
            counted = _COUNTED + varint(value) if value >= 0 else b""
            if kind == WARP_BEGIN:
                self._write_begin(changes, begins[at], ts_ns, counted)
            elif kind == WARP_END:
                self.packet(ts_ns, _TYPES[END] + tracks[rows[at]] + counted)
            elif kind != WARP_COUNT:
                self.packet(ts_ns, self.warp_exit(changes, at, mask, value))
            elif counted:
                self.packet(ts_ns, _TYPES[COUNTER] + tracks[changes.counter_row] + number(30, value))

    @staticmethod
    def _warp_begins(changes: WarpChanges) -> list[_WarpBegin]:
        """What the begin of each slice says."""
        columns = (column.tolist() for column in changes.slices.columns())
        return list(zip(*columns, strict=True))

    def _write_begin(self, changes: WarpChanges, begin: _WarpBegin, ts_ns: int, counted: bytes) -> None:
        row, kernel, at, source_ns, exits, cycles, lanes, flow, unclosed = begin
        keys = self._ready[KEYS]
        body = _TYPES[BEGIN] + self._ready[TOPS][row] + self._warp_name(changes.kernels[kernel], kernel, at)
        if source_ns != NONE:
            body += _annotated(keys[KEY_SOURCE], source_ns - ts_ns - changes.offset_ns)
        for key, value in ((KEY_EXITS, exits), (KEY_CYCLES, cycles), (KEY_LANES, lanes)):
            if value != NONE:
                body += _annotated(keys[key], value)
        if unclosed:
            body += self._ready[MARK][UNCLOSED]
        self.packet(ts_ns, body + counted + _flow(flow))

    def warp_exit(self, changes: WarpChanges, at: int, mask: int, value: int) -> bytes:
        """The fields of the instant of an exit of a slice; `value` is how many run from then on, or NONE."""
        args = {"mask": f"0x{mask:08x}", "lanes": mask.bit_count()}
        top = self._ready[TOPS][int(changes.slices.row[at])]
        counted = _COUNTED + varint(value) if value >= 0 else b""
        return _TYPES[INSTANT] + top + self.name("exit") + self.annotations(args) + counted

    def _warp_name(self, kernel: Kernel, at: int, warp: int) -> bytes:
        """The name's number if it came before, else the name: a launch of many warps names each once."""
        iid = self._warp_names.get((at, warp))
        if iid:
            return number(10, iid)
        name = f"{kernel.name} {kernel.place(warp)}".encode("utf-8", "replace")
        if iid == 0 and self._named < _NAMED_MAX:
            iid = self._warp_names[at, warp] = _FIRST_IID + self._named
            self._named += 1
            self._pending.append(delimited(_FIELDS[EVENT_NAMES], number(1, iid) + delimited(2, name)))
            return number(10, iid)
        if iid is None and at < _KERNELS_MAX and warp < _MET_MAX and len(self._warp_names) < _MET_MAX:
            self._warp_names[at, warp] = 0
        return delimited(23, name)


def _flow(flow: int) -> bytes:
    return _FLOW + abs(flow).to_bytes(8, "little") if flow else b""


def _annotated(key: bytes, value: int) -> bytes:
    """An annotation of an integer."""
    field = key + _INT_VALUE + varint(value)
    return _ANNOTATION + SMALL[len(field)] + field



