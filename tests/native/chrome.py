"""Operations and warps into lines of Chrome's JSON: what is written is JSON."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import orjson

from tests.native import buffers, drawing, inputs
from tracepipe.native.signatures import Changes, Drawn, Given, Slices

_PLACES, _TOPS, _COUNTS, _NAMES, _KERNELS, _BEFORE, _LAUNCH, _AFTER, _MARK, _ARGS, _LINES = range(11)
_NUMBERS = drawing.NUMBERS + 1  # those of its columns
_TEXTS = {
    _PLACES: b',"pid":1,"tid":%d,"ts":',
    _TOPS: b',"cat":"userspace","pid":1,"tid":%d,"ts":',
    _COUNTS: b',\n{"ph":"C","name":"n","pid":%d,"ts":',
    _NAMES: b'"name %d"',
    _KERNELS: b'"kernel %d',
    _BEFORE: b',"cpu":%d',
    _LAUNCH: b',"launch":',
    _AFTER: b',"grid":[%d,1,1]',
    _MARK: b',"mark":%d',
    _LINES: b',"python":"train.py:%d step"',
}
_ALWAYS = {_PLACES, _TOPS, _COUNTS, _NAMES, _KERNELS}


@contextmanager
def _writer(core: ctypes.CDLL, rng: Random) -> Iterator[int]:
    writer = core.tp_chrome_new(inputs.moment(rng))
    assert writer
    try:
        for number in range(_NUMBERS):
            for table, text in _TEXTS.items():
                if table in _ALWAYS or rng.random() < 0.6:
                    _set(core, writer, table, number, text % number if b"%" in text else text, 0)
        yield writer
    finally:
        core.tp_chrome_free(writer)


def _set(core: ctypes.CDLL, writer: int, table: int, number: int, text: bytes, shadows: int) -> None:
    assert core.tp_chrome_set(writer, table, number, buffers.text(text), len(text), shadows) == 0


def _lines(core: ctypes.CDLL, writer: int) -> list[Any]:
    """What was written; each line after a comma."""
    there = ctypes.c_void_p()
    made = buffers.taken(core.tp_chrome_take(writer, ctypes.byref(there)), there)
    lines = orjson.loads(b"[0" + made + b"]")[1:]
    assert len(lines) == made.count(b"\n")
    assert isinstance(lines, list)
    return lines


def chrome_write(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_chrome_write` over some batches, with what Python writes in between."""
    with _writer(core, rng) as writer, drawing.reader_of_texts(core, rng) as reader:
        texts = reader if rng.random() < 0.9 else None
        for _ in range(rng.randrange(1, 4)):
            args = rng.randrange(8)
            drawing.add_texts(core, reader, args, rng)
            _write_batch(core, writer, texts, args, rng)
            if rng.random() < 0.2:
                core.tp_chrome_forget(writer, rng.randrange(2))
                for number in range(_NUMBERS):  # what has none would be no JSON
                    _set(core, writer, _NAMES, number, _TEXTS[_NAMES] % number, 0)


def _write_batch(core: ctypes.CDLL, writer: int, texts: int | None, args: int, rng: Random) -> None:
    count, events = rng.randrange(40), rng.randrange(20)
    columns, given = drawing.drawn(rng, count, events), drawing.given(rng, events, args)
    if columns[0] is None:
        columns[0] = np.arange(count)
    columns[3] %= drawing.NUMBERS
    columns[4] = np.abs(columns[4])
    columns[5][buffers.array([rng.random() < 0.05 for _ in range(count)], np.bool_)] = -2  # Python writes it
    tracks = buffers.array([rng.randrange(_NUMBERS) for _ in range(drawing.NUMBERS)], np.int32)
    views = buffers.view(Drawn, *columns), buffers.view(Given, *given)
    is_odd, at, lines = ctypes.c_int(), 0, 0
    while at < count:
        stopped = core.tp_chrome_write(
            writer, *views, texts, tracks.ctypes.data, at, count, ctypes.byref(is_odd)
        )
        assert at <= stopped <= count
        at = stopped
        if at < count and not is_odd.value:
            lines += len(_lines(core, writer))
        elif at < count:
            place = int(columns[0][at])
            number = int(given[1][columns[5][place]]) if columns[5][place] >= 0 else -1
            if number >= 0 and rng.random() < 0.5:
                _set(core, writer, _ARGS, number, b',"made":1', 0)
            members = rng.choice((b"", b',"a":1'))
            text = buffers.text(members)
            assert core.tp_chrome_one(writer, views[0], tracks.ctypes.data, place, text, len(members)) == 0
            assert core.tp_chrome_line(writer, buffers.text(b"{}"), 2) == 0
            at += 1
    assert lines + len(_lines(core, writer)) >= count


def chrome_warps(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_chrome_warps` over some batches."""
    with _writer(core, rng) as writer:
        for _ in range(rng.randrange(1, 4)):
            changes, slices, kernels, count = drawing.warps(rng)
            tracks = buffers.array([rng.randrange(_NUMBERS) for _ in range(_NUMBERS)], np.int32)
            views = buffers.view(Changes, *changes), buffers.view(Slices, *slices), kernels.ctypes.data
            at = 0
            while at < count:
                at = core.tp_chrome_warps(writer, *views, tracks.ctypes.data, rng.randrange(3), at, count)
                assert at >= 0
                assert at < count or len(_lines(core, writer)) >= (changes[4] != 4).sum()
