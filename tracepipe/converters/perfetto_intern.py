"""The tables of one Perfetto packet sequence: names are written once and then stand as small numbers."""

from __future__ import annotations

from typing import Any

import orjson

from tracepipe.converters.wire import delimited, double, number, tag, text, varint
from tracepipe.layout.timeline import Track

_INTERNED = 12
_CATEGORIES, _NAMES, _ARG_NAMES, _STRINGS = 1, 2, 3, 29
"""Fields of InternedData."""
_ANNOTATION = tag(4, 2)
_SMALL_INT = 256
# Deeper values are written as JSON text.
_DEPTH_MAX = 8
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1
_VARINT_MAX_BYTES = 10


class Sequence:
    """One `trusted_packet_sequence_id` with its interned names; `pending` goes out with the next packet."""

    TABLE_MAX = 1 << 14
    """Entries of one table; when names keep coming, the tables start anew."""

    ONCE_MAX = 1 << 15
    """Names of warps that are kept, as the next launch of a kernel has the same ones."""

    def __init__(self, lane: int) -> None:
        self.id = lane + 1
        self.default_uuid = 0
        self.started = False
        self.suffix = number(10, self.id) + number(13, 2)
        self.pending: list[bytes] = []
        self.last_ns = 0
        self.tracks: list[Track] = []
        """Those whose ready-made packets use the tables."""
        self._tables: dict[int, dict[str, int]] = {}
        self.once: dict[str, bytes] = {}
        """TrackEvent.name_iid of the names of warps that are in the table."""
        self._int_heads: dict[str, list[bytes]] = {}
        self._whole: dict[tuple[str, str], bytes] = {}

    def take_pending(self) -> bytes:
        """TracePacket.interned_data of what is new in the tables."""
        new = delimited(_INTERNED, b"".join(self.pending))
        self.pending.clear()
        return new

    def full(self) -> bool:
        """Whether the tables have grown beyond what a trace's own names explain."""
        return any(len(table) >= self.TABLE_MAX for table in self._tables.values())

    def restart(self) -> None:
        """Forget all names; the next packet of the sequence must say so."""
        self.started = False
        self._tables.clear()
        self.once.clear()
        self._int_heads.clear()
        self._whole.clear()

    def _iid(self, table: int, value: str) -> int:
        known = self._tables.setdefault(table, {})
        iid = known.get(value)
        if iid is None:
            iid = known[value] = len(known) + 1
            entry = number(1, iid) + text(2, value)
            self.pending.append(delimited(table, entry))
        return iid

    def category(self, name: str) -> bytes:
        """TrackEvent.category_iids."""
        return number(3, self._iid(_CATEGORIES, name)) if name else b""

    def name(self, name: str) -> bytes:
        """TrackEvent.name_iid."""
        return number(10, self._iid(_NAMES, name))

    def name_once(self, name: str) -> bytes:
        """TrackEvent.name_iid while this table has room, then .name: a launch has 10⁵ warps to name."""
        known = self.once
        whole = known.get(name)
        if whole is None:
            if len(known) >= self.ONCE_MAX:
                return text(23, name)
            # Numbers beyond the other table's.
            iid = self.TABLE_MAX + 1 + len(known)
            self.pending.append(delimited(_NAMES, number(1, iid) + text(2, name)))
            whole = known[name] = number(10, iid)
        return whole

    def annotations(self, args: dict[str, Any]) -> bytes:
        """TrackEvent.debug_annotations of all `args`; None is left out."""
        out = b""
        whole, int_heads = self._whole, self._int_heads
        for key, value in args.items():
            kind = type(value)
            if kind is int and 0 <= value <= _INT_MAX:
                heads = int_heads.get(key) or self._new_int_heads(key)
                if value < _SMALL_INT:
                    out += heads[value] or self._small_int(key, value, heads)
                else:
                    digits = varint(value)
                    out += heads[_SMALL_INT + len(digits)] + digits
            elif kind is str:
                out += whole.get((key, value)) or self._string(key, value)
            elif value is not None:
                out += self._annotation(self._key(key), value)
        return out

    def _small_int(self, key: str, value: int, heads: list[bytes]) -> bytes:
        """An argument with one of the few values that come again and again: results, processors, ids."""
        whole = heads[value] = self._annotation(self._key(key), value)
        return whole

    def _key(self, key: str) -> bytes:
        return number(1, self._iid(_ARG_NAMES, key))

    def _new_int_heads(self, key: str) -> list[bytes]:
        """The whole of each small int of `key`, empty until it is met, and what precedes a larger one's
        varint, by its length.
        """
        start = self._key(key) + tag(4, 0)
        heads = [b""] * _SMALL_INT
        heads += [_ANNOTATION + varint(len(start) + n) + start for n in range(_VARINT_MAX_BYTES + 1)]
        if len(self._int_heads) < self.TABLE_MAX >> 4:
            self._int_heads[key] = heads
        return heads

    def _string(self, key: str, value: str) -> bytes:
        """A string argument: in the table if it is short and the table has room, as such strings repeat."""
        room = len(self._tables.get(_STRINGS, ())) < self.TABLE_MAX // 2
        if len(value) <= 64 and room:
            whole = self._annotation(self._key(key), None, number(17, self._iid(_STRINGS, value)))
            self._whole[key, value] = whole
            return whole
        return self._annotation(self._key(key), value)

    def _annotation(self, key: bytes, value: Any, encoded: bytes = b"") -> bytes:
        return delimited(4, key + (encoded or self._value(value, 0)))

    def _value(self, value: Any, depth: int) -> bytes:
        """The value fields of a DebugAnnotation."""
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
        return text(6, value if isinstance(value, str) else orjson.dumps(value).decode())
