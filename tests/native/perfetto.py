"""Operations, arguments and warps into packets: what is written is a trace that protobuf reads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from random import Random
from typing import Any

import numpy as np

from tests.native import buffers, drawing, inputs
from tracepipe.native.signatures import Changes, Drawn, Given, Slices, Switches

_TRACKS, _TOPS, _NAMES, _BEFORE, _LAUNCH_KEY, _AFTER, _MARK, _KEYS, _LINES = range(9)
_ARGS = -1
_INSTANT, _COUNTER = 3, 4
_NUMBERS = drawing.NUMBERS
_STRINGS = 3
_STRINGS_MAX = 1 << 13


@cache
def _trace() -> Any:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2

    return perfetto_trace_pb2.Trace


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def _annotation(rng: Random) -> bytes:
    name = b"\x52" + _varint(3) + b"key"
    value = b"\x20" + _varint(rng.getrandbits(63))
    return b"\x22" + _varint(len(name + value)) + name + value


def _ready(rng: Random) -> dict[int, bytes]:
    """A piece of a track event for each table."""
    number = _varint(rng.getrandbits(rng.randrange(1, 64)))
    return {
        _TRACKS: b"\x58" + number,
        _TOPS: b"\x58" + number + b"\x18\x01",
        _NAMES: rng.choice((b"\x50" + number, b"\xba\x01\x03abc", b"")),
        _BEFORE: _annotation(rng) * rng.randrange(3),
        _LAUNCH_KEY: b"\x08" + number,
        _AFTER: _annotation(rng) * rng.randrange(3),
        _MARK: _annotation(rng),
        _KEYS: b"\x08" + number,
        _LINES: _annotation(rng),
    }


@contextmanager
def _writer(core: ctypes.CDLL, rng: Random) -> Iterator[int]:
    writer = core.tp_perfetto_new(rng.getrandbits(64), rng.randrange(1, 1 << 20), 64, inputs.moment(rng))
    assert writer
    try:
        for number in range(_NUMBERS):
            for table, piece in _ready(rng).items():
                if rng.random() < 0.9:
                    assert core.tp_perfetto_set(writer, table, number, buffers.text(piece), len(piece)) == 0
        yield writer
    finally:
        core.tp_perfetto_free(writer)


def _written(core: ctypes.CDLL, writer: int) -> Any:
    """What was written, read by protobuf."""
    there = ctypes.c_void_p()
    made = buffers.taken(core.tp_perfetto_take(writer, ctypes.byref(there)), there)
    return _trace().FromString(made)


def perfetto_args(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_perfetto_args`: text of any kind; what it takes is written with one operation."""
    with _writer(core, rng) as writer:
        if rng.random() < 0.01:
            _fill_strings(core, writer)
        for number in range(rng.randrange(1, 5)):
            text = drawing.arguments(rng)
            done = core.tp_perfetto_args(writer, number, buffers.text(text), len(text))
            columns = drawing.drawn(rng, 1, number + 1)
            columns[1][0], columns[5][0] = _INSTANT, 0
            given = drawing.given(rng, 1, number + 1)
            given[1][0] = number
            views = buffers.view(Drawn, *columns), buffers.view(Given, *given)
            last = core.tp_perfetto_write(writer, *views, None, 0, 1)
            assert last <= (done == 0)  # an argument may be one that Python must write
            packets = _written(core, writer).packet
            assert len(packets) == last
            if last:
                _expect_arguments(packets[0].track_event, text)
        core.tp_perfetto_forget(writer, _ARGS)


def _fill_strings(core: ctypes.CDLL, writer: int) -> None:
    for at in range(_STRINGS_MAX + 1):
        text = b"%d" % at
        assert core.tp_perfetto_intern(writer, _STRINGS, buffers.text(text), len(text)) >= 0


def _expect_arguments(event: Any, text: bytes) -> None:
    """As many as the text has, but for null, after those of the shape."""
    import orjson

    values = [value for value in orjson.loads(text).values() if value is not None]
    assert len(event.debug_annotations) >= len(values)


def perfetto_write(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_perfetto_write` over some batches, with what Python writes in between."""
    with _writer(core, rng) as writer, drawing.reader_of_texts(core, rng) as reader:
        for _ in range(rng.randrange(1, 4)):
            args = rng.randrange(8)
            drawing.add_texts(core, reader, args, rng)
            _write_batch(core, writer, reader, args, rng)
            if rng.random() < 0.2:
                core.tp_perfetto_forget(writer, _ARGS)


def _write_batch(core: ctypes.CDLL, writer: int, texts: int, args: int, rng: Random) -> None:
    count, events = rng.randrange(40), rng.randrange(20)
    columns, given = drawing.drawn(rng, count, events), drawing.given(rng, events, args)
    for at in range(count):
        if rng.random() < 0.05:
            columns[5][at] = rng.choice((-2, -3))  # Python writes it
    views = buffers.view(Drawn, *columns), buffers.view(Given, *given)
    at, packets = 0, 0
    while at < count:
        stopped = core.tp_perfetto_write(writer, *views, texts if rng.random() < 0.8 else None, at, count)
        assert at <= stopped <= count
        packets += stopped - at
        at = stopped
        if at < count:
            body = b"\x48\x03\x58\x01" + _annotation(rng)
            assert core.tp_perfetto_packet(writer, inputs.moment(rng), 11, buffers.text(body), len(body)) == 0
            packets += 1
            at += 1
    assert len(_written(core, writer).packet) == packets


def perfetto_warps(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_perfetto_warps` over some batches: begins, ends and counts, up to an exit."""
    with _writer(core, rng) as writer:
        for number in range(_NUMBERS):
            name = inputs.word(rng).encode()
            assert core.tp_perfetto_set(writer, _NAMES, number, buffers.text(name), len(name)) == 0
        for _ in range(rng.randrange(1, 4)):
            _write_warps(core, writer, rng)


def _write_warps(core: ctypes.CDLL, writer: int, rng: Random) -> None:
    changes, slices, kernels, count = drawing.warps(rng)
    views = buffers.view(Changes, *changes), buffers.view(Slices, *slices)
    offset = rng.choice((0, 10**18, -(10**18)))
    stopped = core.tp_perfetto_warps(
        writer, *views, kernels.ctypes.data, rng.randrange(_NUMBERS), offset, 0, count
    )
    assert 0 <= stopped <= count
    assert len(_written(core, writer).packet) <= stopped


def perfetto_switches(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_perfetto_switches` over some batches, with what Python writes in between."""
    with _writer(core, rng) as writer, drawing.reader_of_texts(core, rng) as reader:
        for _ in range(rng.randrange(1, 4)):
            args = rng.randrange(8)
            for number in range(core.tp_reader_count(reader, 1), args):
                text = _switch_args(rng) or b"%d" % number
                assert core.tp_reader_number(reader, 1, buffers.text(text), len(text)) >= 0
            _write_switches(core, writer, reader, core.tp_reader_count(reader, 1), rng)


def _switch_args(rng: Random) -> bytes:
    """What a scheduler says, more or less."""
    messages = [
        b'"by_tid":%d' % rng.choice((0, 7, (1 << 31) - 1, 1 << 31, 1 << 63)),
        b'"target_cpu":%d' % rng.choice((0, 7, 1 << 40, -1)),
        b'"prev_state":' + rng.choice((b'"dead"', b'"disk"', b'"x"', b"1", b'""', b"[1]")),
        inputs.compact(inputs.arguments(rng))[1:-1],
    ]
    text = b"{" + b",".join(rng.sample(messages, rng.randrange(4))) + b"}"
    return inputs.mutated(rng, text) if rng.random() < 0.3 else text


def _write_switches(core: ctypes.CDLL, writer: int, texts: int, args: int, rng: Random) -> None:
    count, shapes = rng.randrange(20), _NUMBERS
    columns = [
        buffers.array([inputs.moment(rng) for _ in range(count)]),
        buffers.array([rng.randrange(shapes) for _ in range(count)], np.int32),
        buffers.array([rng.randrange(-1, args + 1) for _ in range(count)], np.int32),
        buffers.array([rng.randrange(4) for _ in range(shapes)], np.uint8),
        *(
            buffers.array([rng.choice((0, 3, (1 << 31) - 1)) for _ in range(shapes)], np.int32)
            for _ in range(2)
        ),
    ]
    view, at, packets = buffers.view(Switches, *columns), 0, 0
    while at < count:
        ahead_ns = rng.choice((0, 5, -5, (1 << 63) - 1, -(1 << 63)))
        reader = texts if rng.random() < 0.8 else None
        stopped = core.tp_perfetto_switches(writer, view, reader, ahead_ns, at, count)
        assert at <= stopped <= count
        packets += stopped - at
        at = stopped + 1
    assert len(_written(core, writer).packet) == packets
