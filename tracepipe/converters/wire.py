"""Protobuf's wire format, for the packets of which there are millions.

It has only what `perfetto.py` needs: varints, length-delimited fields, fixed64, double. Small numbers and
lengths come from a table, as making them costs more than the rest of a packet. The tests compare this with
the classes of the `perfetto` package. Format: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from tracepipe.event.columns import Int64s

SMALL_END = 1 << 11
_U64 = (1 << 64) - 1
_SIZES: Final = np.array([1 << 7 * size for size in range(1, 5)])
"""The first values that take 2, 3, … bytes."""

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
    # Each byte has seven bits. Its highest bit is set where another byte follows.
    spread, sizes = values & 0x7F, 1 + np.searchsorted(_SIZES, values, side="right")
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


def fixed64(field: int, value: int) -> bytes:
    """A fixed64 field."""
    return tag(field, 1) + struct.pack("<Q", value & _U64)


def double(field: int, value: float) -> bytes:
    """A double field."""
    return tag(field, 1) + struct.pack("<d", value)
