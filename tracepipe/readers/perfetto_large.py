"""Reads packets of a Perfetto trace that are too large for memory: they are in a temporary file, and their
fields are read some at a time.

    1 ftrace_events {2 event…}        messages with some of the repeated fields each; the first has all others
    2 process_tree {1, 2…}
    12 interned_data {…}
    50 compressed_packets             bytes, some at a time
    others                            one message, with those of its fields that fit
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Final

from tracepipe.readers.wire_fields import BYTES, FIELDS_MAX, VARINT, Place, WireError, WireFile

AT_HAND_BYTES: Final = 1 << 20
_PART_BYTES: Final = 1 << 18
_CHUNK_BYTES: Final = 1 << 16
_FTRACE, _TREE, _INTERNED, _COMPRESSED = 1, 2, 12, 50
_REPEATED: Final = {_FTRACE: range(2, 3), _TREE: range(1, 3), _INTERNED: range(1, 1 << 29)}
# The field of a ftrace bundle for events that were lost before it. Only its first part has it.
_LOST_EVENTS: Final = 3


class LargePacket:
    """A packet of `size_bytes` at the start of a file. `left_out` is how many of its fields do not fit."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._wire = WireFile(file)
        self.size_bytes = size_bytes
        self.left_out = 0

    def startswith(self, start: bytes) -> bool:
        """Whether the packet starts with these bytes."""
        return self._wire.read(0, len(start)) == start

    def compressed(self) -> Iterator[Iterator[bytes]]:
        """The content of each field of compressed packets, some bytes at a time. Raises WireError."""
        for field in self._wire.fields(0, self.size_bytes):
            if (field.number, field.wire_type) == (_COMPRESSED, BYTES):
                yield self._chunks(field)

    def fields(self) -> list[tuple[int, Any]]:
        """The fields of the packet by their tags, as `tagged` has them: large ones as `Parts`. Raises
        WireError.
        """
        found: list[tuple[int, Any]] = []
        held_bytes = 0
        for field in self._wire.fields(0, self.size_bytes):
            if len(found) >= FIELDS_MAX:
                raise WireError(f"there are over {FIELDS_MAX} fields", field.start)
            tag, size = field.number << 3 | field.wire_type, field.end - field.start
            value: Any = field.value
            if field.wire_type != VARINT:
                is_held = held_bytes + size <= _PART_BYTES
                held_bytes += size * is_held
                value = self._wire.read(field.start, field.end) if is_held else Parts(self, field)
            found.append((tag, value))
        return found

    def parts(self, of: Place) -> Iterator[bytes]:
        """A field as messages. Raises WireError."""
        repeated = _REPEATED.get(of.number, range(0))
        first, again = self._not_repeated(of, repeated)
        held, held_bytes = [first], len(first)
        for field, at in self._inside(of):
            if field.number not in repeated:
                continue
            size = field.end - at
            if size > AT_HAND_BYTES:
                self.left_out += 1
                continue
            if held_bytes + size > AT_HAND_BYTES or (len(held) > 1 and held_bytes + size > _PART_BYTES):
                yield b"".join(held)
                held, held_bytes = [again], len(again)
            held.append(self._wire.read(at, field.end))
            held_bytes += size
        yield b"".join(held)

    def _not_repeated(self, of: Place, repeated: range) -> tuple[bytes, bytes]:
        """The other fields that fit, and those of them that are numbers, which each part has."""
        first, again = bytearray(), bytearray()
        for field, at in self._inside(of):
            if field.number in repeated:
                continue
            if len(first) + field.end - at > AT_HAND_BYTES:
                self.left_out += 1
                continue
            data = self._wire.read(at, field.end)
            first += data
            if repeated and field.wire_type == VARINT and field.number != _LOST_EVENTS:
                again += data
        return bytes(first), bytes(again)

    def _inside(self, of: Place) -> Iterator[tuple[Place, int]]:
        """The fields of a field, and where each begins."""
        at = of.start
        for field in self._wire.fields(of.start, of.end):
            yield field, at
            at = field.end

    def _chunks(self, of: Place) -> Iterator[bytes]:
        for at in range(of.start, of.end, _CHUNK_BYTES):
            yield self._wire.read(at, min(at + _CHUNK_BYTES, of.end))


class Parts:
    """A large field of a packet, as messages that each have a part of it."""

    def __init__(self, packet: LargePacket, field: Place) -> None:
        self._packet, self._field = packet, field

    def __iter__(self) -> Iterator[bytes]:
        return self._packet.parts(self._field)


def parts_of(value: bytes | Iterable[bytes]) -> Iterable[bytes]:
    """The messages of a packet's field: a single one, if it is in memory."""
    return (value,) if isinstance(value, bytes) else value
