"""Reads fields of Protobuf messages without their schema, from bytes in memory, or from a file of any size
with little memory. Format: protobuf.dev/programming-guides/encoding.

    tag            = field number << 3 | wire type
    wire type 0      a varint: seven bits a byte, the lowest first, the highest bit is set if another follows
              1, 5   eight and four bytes
              2      a varint with the number of bytes that follow
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, Final, NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_CHUNK_BYTES: Final = 1 << 16
_VARINT_BYTES_MAX: Final = 10
_U64: Final = (1 << 64) - 1
_FIXED: Final = {FIXED64: 8, FIXED32: 4}
# The most fields of a message, and numbers of a packed field: a field of two bytes takes a hundred here.
FIELDS_MAX: Final = 1 << 17
NUMBERS_MAX: Final = 1 << 18
_WIRE_TYPES: Final = frozenset({VARINT, BYTES, *_FIXED})


class WireError(Exception):
    """Bytes are not a field. `at` is the place of the first one."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(f"{message} at byte {at}")
        self.at = at


class Place(NamedTuple):
    """A field in a file. Its bytes are from `start` to `end` if it is not a varint."""

    number: int
    wire_type: int
    value: int
    start: int
    end: int


def signed(value: int) -> int:
    """The int64 of a varint."""
    return value - (1 << 64) if value >> 63 else value


def double(data: bytes) -> float:
    """The double of eight bytes."""
    (value,) = struct.unpack("<d", data)
    return float(value)


def text(data: bytes) -> str:
    """The text of a field."""
    return data.decode("utf-8", "replace")


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at a place, and the place after it. Raises WireError."""
    value = shift = 0
    for byte in data[at : at + _VARINT_BYTES_MAX]:
        if byte < 0x80:
            return (value | byte << shift) & _U64, at + shift // 7 + 1
        value |= (byte & 0x7F) << shift
        shift += 7
    raise WireError("a number does not end", at)


def tagged(data: bytes) -> list[tuple[int, Any]]:
    """The fields of a message in memory as pairs of tag and value: the number of a varint, or the bytes of
    any other field. This is the fast way, for millions of messages. A field with the wrong type has a
    different tag. Raises WireError.
    """
    fields: list[tuple[int, Any]] = []
    add, size = fields.append, len(data)
    at = start = 0
    may_be_many = size > 2 * FIELDS_MAX
    try:
        while at < size:
            start, tag = at, data[at]
            at += 1
            if tag >= 0x80:
                tag, at = _longer(data, start)
            if may_be_many and len(fields) >= FIELDS_MAX:
                raise WireError(f"there are over {FIELDS_MAX} fields", start)
            wire_type = tag & 7
            if wire_type not in _WIRE_TYPES or tag < 8:
                raise WireError("is not a field", start)
            value = _FIXED.get(wire_type, 0)
            if not value:
                value = data[at]
                at += 1
                if value >= 0x80:
                    value, at = _longer(data, at - 1)
                if wire_type == VARINT:
                    add((tag, value))
                    continue
            at += value
            if at > size:
                raise WireError("a field is cut off", start)
            add((tag, data[at - value : at]))
    except IndexError:
        raise WireError("a number does not end", start) from None
    return fields


def _longer(data: bytes, at: int) -> tuple[int, int]:
    """The varint of two bytes or more at a place, and the place after it. Raises WireError, IndexError."""
    second = data[at + 1]
    if second < 0x80:
        return data[at] & 0x7F | second << 7, at + 2
    return varint(data, at)


def varints(data: bytes) -> list[int]:
    """The numbers of a packed field. Raises WireError."""
    numbers, at = [], 0
    while at < len(data):
        number, at = varint(data, at)
        numbers.append(number)
        if len(numbers) > NUMBERS_MAX:
            raise WireError(f"there are over {NUMBERS_MAX} numbers", at)
    return numbers


class WireFile:
    """A file that can be read at any place."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._chunk, self._chunk_at = b"", 0
        self.size = file.seek(0, 2)

    def read(self, start: int, end: int) -> bytes:
        """The bytes from one place to another, fewer at the end of the file."""
        end = min(end, self.size)
        if start < self._chunk_at or end > self._chunk_at + len(self._chunk):
            self._file.seek(start)
            self._chunk = self._file.read(max(end - start, min(_CHUNK_BYTES, self.size - start)))
            self._chunk_at = start
        return self._chunk[start - self._chunk_at : max(0, end - self._chunk_at)]

    def fields(self, start: int, end: int) -> Iterator[Place]:
        """The fields of a message at a place. A field that extends beyond the message, or the file, is
        yielded as far as it goes, and then WireError is raised.
        """
        at = start
        while at < min(end, self.size):
            head = self.read(at, at + 2 * _VARINT_BYTES_MAX)
            try:
                tag, used = varint(head, 0)
                wire_type, value = tag & 7, 0
                if wire_type in (VARINT, BYTES):
                    value, used = varint(head, used)
            except WireError as e:
                raise WireError("a number does not end", at + e.at) from e
            if tag >> 3 == 0 or wire_type not in (VARINT, BYTES, FIXED64, FIXED32):
                raise WireError("is not a field", at)
            begin = at + used
            behind = begin + (value if wire_type == BYTES else _FIXED.get(wire_type, 0))
            last = min(end, self.size)
            yield Place(tag >> 3, wire_type, value, begin, min(behind, last))
            if behind > last:
                raise WireError("a field is cut off", at)
            at = behind
        if end > self.size:
            raise WireError("the file ends", self.size)
