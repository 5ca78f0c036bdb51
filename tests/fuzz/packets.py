"""Traces of Perfetto that are nearly those of fixtures/: some packets, fields and bytes are others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from tests.golden.cases import FIXTURES, Case
from tests.native.inputs import mutated
from tracepipe.converters.packets import varint
from tracepipe.readers.wire_fields import BYTES, FIXED64, VARINT, WireError, tagged

_WRITTEN = ("flows", "host-layers", "warps-ranges", "annotations", "capture-standin")
_EXTREMES = (
    0, 1, 2, 3, 63, 64, 127, 128, 255, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 62) - 1, 1 << 62, 1 << 63,
    (1 << 64) - 1,
)  # fmt: skip


@cache
def traces() -> list[bytes]:
    """The traces to start from: others', and what is written here."""
    written = [Case(FIXTURES / name).convert("perfetto")[0] for name in _WRITTEN]
    return [*written, *(path.read_bytes() for path in sorted(FIXTURES.glob("*/input.pftrace")))]


def trace(rng: Random) -> bytes:
    """One trace."""
    packets = [value for _, value in tagged(rng.choice(traces()))]
    if len(packets) > 40:
        start = rng.randrange(len(packets) - 30)
        packets = packets[:10] + packets[start : start + 30]
    for _ in range(rng.choice((0, 1, 2, 4, 10))):
        if packets:
            rng.choice(_CHANGES)(rng, packets)
    data = b"".join(_field(1 << 3 | BYTES, packet) for packet in packets)
    if rng.random() < 0.1:
        data = mutated(rng, data)
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data


def _field(tag: int, value: Any) -> bytes:
    if tag & 7 == VARINT:
        return varint(tag) + varint(value)
    return varint(tag) + (varint(len(value)) if tag & 7 == BYTES else b"") + value


def _fields(rng: Random, packets: list[bytes]) -> None:
    """Change a field somewhere in a packet."""
    at = rng.randrange(len(packets))
    packets[at] = _changed(rng, packets[at])


def _changed(rng: Random, data: bytes) -> bytes:
    try:
        fields = tagged(data)
    except WireError:
        return mutated(rng, data)
    if not fields:
        return data
    at = rng.randrange(len(fields))
    tag, value = fields[at]
    match rng.randrange(6):
        case 0:
            del fields[at]
        case 1:
            fields[at:at] = [(tag, value)] * rng.choice((1, 3, 50))
        case 2:
            fields[at] = (rng.choice((1, 2, 3, 6, 11, 44, 60)) << 3 | tag & 7, value)
        case _ if tag & 7 == VARINT:
            fields[at] = (tag, rng.choice((*_EXTREMES, value + 1, max(0, value - 1))))
        case _ if tag & 7 == FIXED64:
            fields[at] = (tag, rng.randbytes(8))
        case _ if tag & 7 == BYTES:
            fields[at] = (tag, _changed(rng, value))
    return b"".join(_field(*field) for field in fields)


def _delete(rng: Random, packets: list[bytes]) -> None:
    del packets[rng.randrange(len(packets))]


def _duplicate(rng: Random, packets: list[bytes]) -> None:
    packet = rng.choice(packets)
    at = rng.randrange(len(packets) + 1)
    packets[at:at] = [packet] * rng.choice((1, 2, 30))


def _swap(rng: Random, packets: list[bytes]) -> None:
    a, b = rng.randrange(len(packets)), rng.randrange(len(packets))
    packets[a], packets[b] = packets[b], packets[a]


def _mix(rng: Random, packets: list[bytes]) -> None:
    """Put in packets of another trace."""
    other = [value for _, value in tagged(rng.choice(traces()))]
    start = rng.randrange(len(other))
    at = rng.randrange(len(packets) + 1)
    packets[at:at] = other[start : start + rng.choice((1, 3, 10))]


def _bytes(rng: Random, packets: list[bytes]) -> None:
    at = rng.randrange(len(packets))
    packets[at] = mutated(rng, packets[at])


_CHANGES: tuple[Callable[[Random, list[bytes]], None], ...] = (
    *(_fields,) * 8, _delete, _duplicate, _swap, _mix, _bytes,
)  # fmt: skip
