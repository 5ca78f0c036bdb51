"""Operations and warps into Chrome's JSON: what is written are elements of an array that any reader takes."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from tests.native import buffers, inputs
from tracepipe.native.signatures import Changes, Drawn, Given, Slices

_PLACES, _TOPS, _COUNTS, _NAMES, _KERNELS, _BEFORE, _LAUNCH, _AFTER, _MARK, _ARGS = range(10)
_READER_ARGS = 1
_END, _COUNTER = 2, 4
_NUMBERS = 6  # of tracks, names, shapes and kernels
_KINDS = {"mark": "uint8", "kind": "uint8", "row": "int32", "name": "int32", "event": "int32"}


def _text(rng: Random) -> bytes:
    return json.dumps(inputs.word(rng), ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def _members(rng: Random) -> bytes:
    return b"," + json.dumps(inputs.arguments(rng), ensure_ascii=False).encode()[1:-1]


def _ready(rng: Random) -> dict[int, bytes]:
    """A text for each table that must have one."""
    place = b',"pid":%d,"tid":%d,"ts":' % (rng.getrandbits(23), rng.getrandbits(20))
    return {
        _PLACES: place,
        _TOPS: b',"cat":' + _text(rng) + place,
        _COUNTS: b',\n{"ph":"C","name":' + _text(rng) + place,
        _NAMES: _text(rng),
        _KERNELS: _text(rng)[:-1],
    }


def _shown(rng: Random) -> dict[int, bytes]:
    """What a shape or a mark may show."""
    some = {
        _BEFORE: b',"cpu":3',
        _LAUNCH: b',"launch":',
        _AFTER: b',"grid":[1,2,3]',
        _MARK: b',"no_begin":true',
    }
    return {table: text for table, text in some.items() if rng.random() < 0.5}


def _give(core: ctypes.CDLL, writer: int, table: int, number: int, text: bytes, shadows: int = 0) -> None:
    assert core.tp_chrome_set(writer, table, number, buffers.text(text), len(text), shadows) == 0


@contextmanager
def _writer(core: ctypes.CDLL, rng: Random) -> Iterator[int]:
    writer = core.tp_chrome_new(rng.choice((0, inputs.moment(rng) >> 1 & (1 << 62) - 1)))
    if not writer:
        raise MemoryError
    try:
        for number in range(_NUMBERS):
            for table, text in (_ready(rng) | _shown(rng)).items():
                _give(core, writer, table, number, text)
        yield writer
    finally:
        core.tp_chrome_free(writer)


def _taken(core: ctypes.CDLL, writer: int) -> list[dict[str, Any]]:
    """What was written, read by json."""
    there = ctypes.c_void_p()
    lines = buffers.taken(core.tp_chrome_take(writer, ctypes.byref(there)), there)
    assert lines[:2] in (b"", b",\n")
    events: list[dict[str, Any]] = json.loads(b"[" + lines[2:] + b"]")
    return events


def _arguments(rng: Random) -> bytes:
    text = inputs.compact(inputs.arguments(rng))
    return inputs.mutated(rng, text) if rng.random() < 0.2 else text


def _drawn(rng: Random, count: int, events: int) -> tuple[Any, dict[str, Any]]:
    """Columns of operations by name, and a view of them."""
    made = {
        "order": rng.sample(range(count), count),
        "kind": [rng.randrange(1, 5) for _ in range(count)],
        "mark": [rng.randrange(4) for _ in range(count)],
        "row": [rng.randrange(_NUMBERS) for _ in range(count)],
        "name": [rng.randrange(_NUMBERS) for _ in range(count)],
        "event": [rng.choice((-1, -2, *range(events), *range(events))) for _ in range(count)],
        "ts": [inputs.moment(rng) if rng.random() < 0.5 else 5 for _ in range(count)],
        "flow": [rng.choice((0, 0, 7, -7, (1 << 63) - 1, -(1 << 63))) for _ in range(count)],
        "flow2": [rng.choice((0, 0, 8, -8)) for _ in range(count)],
        "value": [rng.choice((0, 1, -1, (1 << 63) - 1, -(1 << 63))) for _ in range(count)],
    }
    columns = {name: buffers.array(values, _KINDS.get(name, "int64")) for name, values in made.items()}
    return buffers.view(Drawn, *columns.values()), columns


def _given(rng: Random, events: int, args: int) -> tuple[Any, Any]:
    """The numbers of events' arguments, and a view of all columns."""
    numbers = buffers.array([rng.randrange(-1, args) for _ in range(events)], "int32")
    source = buffers.array([rng.choice((-1, 0, -7, (1 << 63) - 1)) for _ in range(events)])
    return numbers, buffers.view(
        Given,
        buffers.array([rng.randrange(_NUMBERS + 2) for _ in range(events)], "int32"),
        numbers,
        buffers.array([rng.choice((0, 5, (1 << 63) - 1, -(1 << 63), -1)) for _ in range(events)]),
        None if rng.random() < 0.3 else source,
    )


def _tracks() -> Any:
    """Tracks by row."""
    return buffers.array([*reversed(range(_NUMBERS))], "int32")


def chrome_write(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_chrome_write` over some batches, with what Python writes in between."""
    has_reader = rng.random() < 0.8
    reader = core.tp_reader_new(rng.getrandbits(64)) if has_reader else None
    if has_reader and not reader:
        raise MemoryError
    try:
        with _writer(core, rng) as writer:
            for _ in range(rng.randrange(1, 4)):
                args = rng.randrange(1, 8)
                for number in range(core.tp_reader_count(reader, _READER_ARGS) if reader else args, args):
                    text = _arguments(rng) or b"%d" % number
                    assert core.tp_reader_number(reader, _READER_ARGS, buffers.text(text), len(text)) >= 0
                _write_batch(core, writer, reader, args, rng)
                if rng.random() < 0.2:
                    core.tp_chrome_forget(writer)
    finally:
        if reader:
            core.tp_reader_free(reader)


def _write_batch(core: ctypes.CDLL, writer: int, reader: int | None, args: int, rng: Random) -> None:
    count, events = rng.choice((rng.randrange(40), rng.randrange(2000))), rng.randrange(1, 20)
    view, columns = _drawn(rng, count, events)
    numbers, given = _given(rng, events, args)
    tracks, is_odd = _tracks(), ctypes.c_int()
    at, found = 0, []
    while at < count:
        stopped = core.tp_chrome_write(
            writer, view, given, reader, tracks.ctypes.data, at, count, ctypes.byref(is_odd)
        )
        assert at <= stopped <= count
        at = stopped
        if not is_odd.value:
            found += _taken(core, writer)
            continue
        place = int(columns["order"][at])
        event = int(columns["event"][place])
        if event >= 0 and rng.random() < 0.5:
            _give(core, writer, _ARGS, int(numbers[event]), rng.choice((b"", _members(rng))))
            continue
        text = rng.choice((b"", _members(rng)))
        one = (writer, view, tracks.ctypes.data, place, buffers.text(text), len(text))
        assert core.tp_chrome_one(*one) == 0
        at += 1
    # Each has its line, and begins and instants one for each of their arrows.
    arrows = (columns["flow"] != 0).astype(int) + (columns["flow2"] != 0)
    known = (columns["kind"] != _END) & (columns["kind"] != _COUNTER)
    assert len(found + _taken(core, writer)) == count + int(arrows[known].sum())


def chrome_warps(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_chrome_warps` over some batches: begins, ends, exits and counts."""
    with _writer(core, rng) as writer:
        for _ in range(rng.randrange(1, 4)):
            _write_warps(core, writer, rng)
            line = json.dumps(inputs.arguments(rng)).encode()
            assert core.tp_chrome_line(writer, buffers.text(line), len(line)) == 0
            assert len(_taken(core, writer)) == 1


def _write_warps(core: ctypes.CDLL, writer: int, rng: Random) -> None:
    count, slices = rng.choice((rng.randrange(40), rng.randrange(2000))), rng.randrange(1, 20)
    unknown = (-1, -1, 0, 5, (1 << 63) - 1)
    sizes = ((0, 0), (4, 2), (3, 1), (1, 1))
    kernels = [(at, rng.choice((0, 1, 32)), *rng.choice(sizes)) for at in range(_NUMBERS)]
    values = buffers.array([rng.choice((-1, 0, 3, (1 << 63) - 1)) for _ in range(count)])
    kinds = buffers.array([rng.choice((1, 1, 2, 2, 3, 4)) for _ in range(count)], "uint8")
    of = buffers.array([rng.randrange(slices) for _ in range(count)], "int32")
    flows = buffers.array([rng.choice((0, 2, -2)) for _ in range(slices)])
    changes = buffers.view(
        Changes,
        buffers.array([inputs.moment(rng) for _ in range(count)]),
        values,
        buffers.array([rng.choice((0, 0xFFFF_FFFF, rng.getrandbits(63))) for _ in range(count)]),
        of,
        kinds,
    )
    drawn = buffers.view(
        Slices,
        buffers.array([rng.choice((0, 1, 77, inputs.number(rng) >> 2)) for _ in range(slices)]),
        *(buffers.array([rng.choice(unknown) for _ in range(slices)]) for _ in range(4)),
        flows,
        buffers.array([rng.randrange(_NUMBERS) for _ in range(slices)], "int32"),
        buffers.array([rng.randrange(_NUMBERS) for _ in range(slices)], "int32"),
        buffers.array([rng.randrange(2) for _ in range(slices)], "uint8"),
    )
    tracks, table = _tracks(), buffers.array([value for kernel in kernels for value in kernel])
    at, found = 0, []
    while at < count:
        places = (table.ctypes.data, tracks.ctypes.data, 1)
        stopped = core.tp_chrome_warps(writer, changes, drawn, *places, at, count)
        assert at < stopped <= count
        at, found = stopped, found + _taken(core, writer)
    arrows = int((flows[of[kinds == 1]] != 0).sum())
    assert len(found) == int((kinds != 4).sum()) + int((values >= 0).sum()) + arrows
