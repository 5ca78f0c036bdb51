"""Traces of Perfetto: the core and Python alone read the same events and problems from them."""

from __future__ import annotations

import ctypes
import io
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import packets as recorded
from tests.support.batches import read_all
from tracepipe import native
from tracepipe.converters.packets import varint
from tracepipe.readers import perfetto, perfetto_events, sorted_rows
from tracepipe.readers.wire_fields import BYTES, FIXED64, VARINT

_BEGIN, _END, _INSTANT, _COUNTER = range(1, 5)
_DOUBLES = (
    0.0, -0.0, 1.0, -2.5, 0.027027, 1639.3846153846155, 0.1 + 0.2, 1e9, 999999999.5, 0.0001, 9.9e-5, 1e-7,
    2.0**-9, 1e300, float("inf"), float("nan"), 0.5**30, 123456.0000001,
)  # fmt: skip
_WORDS = (
    b"",
    b"a",
    b"step",
    b'q"\\',
    b"\n\x01\x7f",
    "é🔥".encode(),
    b"\xff",
    b"kernel",
    b"callstack",
    b"x" * 300,
)


def packets_take(core: ctypes.CDLL, rng: Random) -> None:
    """Reading a whole trace, twice."""
    native.CORE = Path(core._name)
    data, kept = trace(rng), rng.choice((0, 5, 1 << 12))
    os.environ[native.PURE] = "1"
    pure = read(data, kept)
    os.environ[native.PURE] = "0"
    assert read(data, kept) == pure


def read(data: bytes, kept: int) -> Any:
    """All that is read from a trace, with so many keys and rows at a time."""
    perfetto_events._KEYS_MAX, sorted_rows.GIVEN_ROWS = kept, kept + 1
    recording = perfetto.read(io.BytesIO(data))
    return recording.header, *read_all(recording)


def trace(rng: Random) -> bytes:
    """A trace: a recorded one with changes, or one whose events have any of the usual fields."""
    if rng.random() < 0.4:
        return recorded.trace(rng)
    packets = [_descriptor(uuid) for uuid in range(1, 8)] if rng.random() < 0.9 else []
    packets += [_state(rng, sequence) for sequence in (1, 2, 2)]
    packets += [_packet(rng) for _ in range(rng.choice((5, 50, 200)))]
    if rng.random() < 0.3:
        rng.shuffle(packets)
    for _ in range(rng.choice((0, 0, 1, 5))):
        at = rng.randrange(len(packets))
        packets[at] = recorded._changed(rng, packets[at])
    return b"".join(_message(1, packet) for packet in packets)


def _field(field: int, value: int) -> bytes:
    return varint(field << 3 | VARINT) + varint(value & (1 << 64) - 1)


def _message(field: int, *parts: bytes) -> bytes:
    data = b"".join(parts)
    return varint(field << 3 | BYTES) + varint(len(data)) + data


def _fixed(field: int, data: bytes) -> bytes:
    return varint(field << 3 | FIXED64) + data


def _descriptor(uuid: int) -> bytes:
    """Two threads, a counter, and a stream of a GPU in a trace of tracepipe."""
    name, parent = {3: (b"stream 7", 7), 4: (b"bytes", 0), 5: (b"capture", 6), 6: (b"tracepipe", 0)}.get(
        uuid, (b"GPU 0", 0)
    )
    of = _message(2, name) + _field(5, parent)
    if uuid < 3:
        of = _message(4, _field(1, 7), _field(2, uuid), _message(5, b"thread"))
    elif uuid == 4:
        of += _message(8, _field(4, 1000))
    return _message(60, _field(1, uuid), of) + _field(10, 1)


def _state(rng: Random, sequence: int) -> bytes:
    """The first packet of a sequence: clocks, and defaults."""
    clocks = [_message(1, _field(1, id), _field(2, rng.randrange(50))) for id in (6, 3, 1)]
    own = [_message(1, _field(1, 64), _field(2, 20), _field(3, 1), _field(4, rng.choice((1, 1, 1000))))]
    of_events = [_field(11, rng.choice((1, 2, 9))), *[_field(31, 4)] * rng.choice((0, 1, 1, 2))]
    defaults = _field(58, rng.choice((64, 64, 3, 6, 0))) + _message(11, *of_events)
    parts = [_field(10, sequence), _field(13, rng.choice((1, 3, 3, 2))), _message(59, defaults)]
    if rng.random() < 0.8:
        parts += [_message(6, *clocks, *own), _field(8, rng.randrange(100))]
    return b"".join(parts)


def _packet(rng: Random) -> bytes:
    if rng.random() < 0.03:
        return rng.choice((_state, lambda rng, id: _descriptor(id)))(rng, rng.choice((1, 2, 3)))
    parts = [_field(8, rng.choice((0, 1, 5, 5, 40, 1000, -3, 1 << 62)))] if rng.random() < 0.98 else []
    parts += [_field(10, rng.choice((1, 1, 1, 2, 3)))]
    parts += [_field(58, rng.choice((3, 6, 64, 65, 1)))] * (rng.random() < 0.1)
    parts += [_field(13, rng.choice((1, 2, 2, 2, 0)))] * (rng.random() < 0.2)
    parts += [_field(3, 5)] * (rng.random() < 0.1)
    if rng.random() < 0.2:
        parts.append(_message(12, *(_name(rng) for _ in range(rng.randrange(4)))))
    parts.append(_message(11, _event(rng)))
    if rng.random() < 0.1:
        rng.shuffle(parts)
    return b"".join(parts)


def _name(rng: Random) -> bytes:
    return _message(
        rng.choice((1, 2, 3, 3, 29)), _field(1, rng.randrange(1, 6)), _message(2, rng.choice(_WORDS))
    )


def _event(rng: Random) -> bytes:
    kind = rng.choice((_BEGIN, _BEGIN, _END, _END, _END, _INSTANT, _COUNTER))
    parts = [_field(9, kind)]
    parts += [_field(11, rng.choice((1, 1, 2, 3, 5, 9, 1 << 63)))] * (rng.random() < 0.7)
    if kind == _COUNTER:
        return b"".join(
            [_field(9, kind), _field(11, 4), _field(30, rng.choice((0, 5, -5, 1 << 61, 1 << 63)))]
        )
    if kind != _END or rng.random() < 0.2:
        parts += [_field(10, rng.randrange(1, 6)) if rng.random() < 0.7 else _message(23, rng.choice(_WORDS))]
        parts += [_field(3, rng.randrange(1, 6))] * rng.choice((0, 1, 1, 2))
        parts += [_message(22, rng.choice(_WORDS))] * (rng.random() < 0.1)
    parts += [_message(4, *_annotation(rng, 0)) for _ in range(rng.choice((0, 0, 1, 3)))]
    parts += [_of_kernel(rng) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    parts += [_field(12, rng.choice((5, -5, 1 << 62)))] * rng.choice((0, 0, 0, 1, 1, 2))
    parts += [_field(31, rng.choice((4, 4, 2)))] * (rng.random() < 0.1)
    parts += [_fixed(47, rng.choice((0, 1, 2, 3, 1 << 60)).to_bytes(8, "little"))] * rng.choice(
        (0, 0, 0, 1, 2)
    )
    parts += [_fixed(48, rng.choice((1, 2, 1 << 60)).to_bytes(8, "little"))] * (rng.random() < 0.1)
    return b"".join(parts)


def _of_kernel(rng: Random) -> bytes:
    """An argument on which the record of a kernel depends."""
    if rng.random() < 0.3:
        return _message(4, _message(10, b"kernel"), _message(6, rng.choice(_WORDS)))
    sizes = [_message(12, _field(4, rng.choice((1, 5, 5, -1)))) for _ in range(rng.choice((3, 3, 3, 2)))]
    return _message(4, _message(10, rng.choice((b"grid", b"block"))), *sizes)


def _annotation(rng: Random, depth: int) -> list[bytes]:
    values: list[Callable[[], bytes]] = [
        lambda: _field(2, rng.randrange(2)),
        lambda: _field(3, rng.choice((0, 5, (1 << 64) - 1))),
        lambda: _field(4, rng.choice((0, -5, 1 << 40))),
        lambda: _fixed(
            5, struct.pack("<d", rng.choice((*_DOUBLES, rng.random(), round(rng.random() * 1e4, 5))))
        ),
        lambda: _message(6, rng.choice(_WORDS)),
        lambda: _field(7, rng.choice((0, 1 << 47))),
        lambda: _field(17, rng.randrange(1, 6)),
        lambda: _message(9, b'{"a": 1.50}'),
        lambda: b"",
    ]
    parts = [rng.choice(values)()]
    if depth < 10 and rng.random() < 0.3:
        tags = rng.choice(((11,), (12,), (11, 12)))
        parts = [_message(rng.choice(tags), *_annotation(rng, depth + 1)) for _ in range(rng.randrange(4))]
    name = _field(1, rng.randrange(1, 6)) if rng.random() < 0.6 else _message(10, rng.choice(_WORDS))
    return [name, *parts] if depth == 0 or rng.random() < 0.5 else parts
