"""Lines into columns: what the core takes is what orjson reads."""

from __future__ import annotations

import ctypes
from random import Random
from typing import Any

import numpy as np
import orjson

from tests.native import buffers, inputs
from tracepipe.native.signatures import Columns, WarpLines

_SHAPES, _ARGS = 0, 1
_WARPS = -3
_KINDS = [np.int64, np.int32, np.int32, np.int64, np.int64, np.int64]
_INDEX = 6
_MANY = 40_000  # more than the table of whole lines holds


def read_lines(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_read_lines` and what else a reader does, over some texts."""
    reader = core.tp_reader_new(rng.getrandbits(64))
    assert reader
    try:
        for _ in range(rng.randrange(1, 4)):
            _read_one(core, reader, _lines(rng), rng)
            if rng.random() < 0.2:
                _keep_some(core, reader, rng)
    finally:
        core.tp_reader_free(reader)


def _lines(rng: Random) -> list[bytes]:
    if rng.random() < 0.002:
        return [b'{"ts_ns":%d,"pid":%d,"args":{"a":%d}}' % (at, at, at % 7) for at in range(_MANY)]
    lines = [inputs.any_line(rng) for _ in range(rng.randrange(12))]
    again = [line.replace(b'"ts_ns":', b'"ts_ns":%d' % rng.randrange(1, 99), 1) for line in lines]
    return lines + again * rng.randrange(3)


def _read_one(core: ctypes.CDLL, reader: int, given: list[bytes], rng: Random) -> None:
    text = inputs.cut(rng, b"\n".join(given))
    lines = text.split(b"\n")
    room = len(lines) if rng.random() < 0.8 else rng.randrange(1, len(lines) + 1)
    rows: list[tuple[Any, ...]] = []
    given_text, done, indices = buffers.text(text), ctypes.c_int64(), ctypes.c_int64()
    while done.value <= len(text):
        columns = [np.empty(room, kind) for kind in _KINDS]
        index = np.full((room, _INDEX), -1, np.int32)
        refs = buffers.view(Columns, *columns, index), ctypes.byref(indices)
        read = core.tp_read_lines(reader, given_text, len(text), ctypes.byref(done), *refs, room)
        assert read == min(room, len(lines) - len(rows))
        assert indices.value == (index >= 0).any(axis=1).sum()
        rows += zip(*(column[:read].tolist() for column in (*columns, index)), strict=True)
    sampled = range(len(rows)) if len(rows) < 1000 else {rng.randrange(len(rows)) for _ in range(100)}
    for at, (line, row) in enumerate(zip(lines, rows, strict=True)):
        if at in sampled:
            _expect_as_read(core, reader, text, line, row)


def _expect_as_read(core: ctypes.CDLL, reader: int, text: bytes, line: bytes, row: tuple[Any, ...]) -> None:
    """The parts of a line, put together, are the line."""
    ts, shape, args, dur, launch, stack, index = row
    if shape < 0:
        assert text[ts : ts + dur] == line
        assert shape != _WARPS or b'"type":"gpu_warp"' in line
        return
    record = orjson.loads(_text(core, reader, _SHAPES, shape))
    assert record.pop("ts_ns") == 0
    made = {"ts_ns": ts} | record
    # A flow's end without a launch has the flow's number in its place.
    for name, value in (("dur_ns", dur), ("launch" if "launch" in record else "flow", launch)):
        if name in record:
            assert record[name] == 0
            made[name] = value
        else:
            assert value == 0
    for name, value in (("block", index[:3]), ("thread", index[3:])):
        if value[0] >= 0:
            made[name] = value
    if stack >= 0:
        made["stack"] = stack
    if args >= 0:
        made["args"] = orjson.loads(_text(core, reader, _ARGS, args))
    assert made == orjson.loads(line), line


def _text(core: ctypes.CDLL, reader: int, table: int, number: int) -> bytes:
    text = ctypes.c_void_p()
    return buffers.taken(core.tp_reader_text(reader, table, number, ctypes.byref(text)), text)


def _keep_some(core: ctypes.CDLL, reader: int, rng: Random) -> None:
    """Texts that are kept have new numbers, in the order in which they were named."""
    for table in (_SHAPES, _ARGS):
        more = rng.choice((b"", b"{}", rng.randbytes(9)))
        assert core.tp_reader_number(reader, table, buffers.text(more), len(more)) >= 0
        count = core.tp_reader_count(reader, table)
        assert core.tp_reader_text(reader, table, count, ctypes.byref(ctypes.c_void_p())) == -1
        numbers = rng.sample(range(count), min(count, rng.randrange(20)))
        texts = [_text(core, reader, table, number) for number in numbers]
        ends, every = buffers.array([0] * count), ctypes.c_void_p()
        size = core.tp_reader_texts(reader, table, ends.ctypes.data, ctypes.byref(every))
        joined = b"".join(_text(core, reader, table, number) for number in range(count))
        assert buffers.taken(size, every) == joined
        assert not count or ends[-1] == size
        kept = buffers.array(numbers)
        assert core.tp_reader_keep(reader, table, kept.ctypes.data, len(numbers)) == 0
        assert [_text(core, reader, table, at) for at in range(len(numbers))] == texts
        assert core.tp_reader_count(reader, table) == len(numbers)
        assert core.tp_reader_bytes(reader, table) == sum(map(len, texts))


def batch_read(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_batch_read`, over some lines, some times with one batch."""
    batch = core.tp_batch_new()
    assert batch
    try:
        for _ in range(rng.randrange(1, 3)):
            lines = [_warp_line(rng) for _ in range(rng.randrange(6))]
            sizes = [len(line) for line in lines]
            places = buffers.array([sum(sizes[:at]) for at in range(len(sizes))])
            made = [np.empty(len(lines), kind) for kind in (np.bool_, *[np.int64] * 3)]
            counts = np.empty((len(lines), len(inputs.WARP_COLUMNS)), np.int64)
            size = buffers.array(sizes)
            out = buffers.view(WarpLines, *made, counts)
            text = buffers.text(b"".join(lines))
            core.tp_batch_read(batch, text, len(lines), places.ctypes.data, size.ctypes.data, out)
            _expect_batches(core, batch, lines, [column.tolist() for column in (*made, counts)])
            _expect_object(core, rng)
    finally:
        core.tp_batch_free(batch)


def _warp_line(rng: Random) -> bytes:
    line = inputs.warp_line(rng) if rng.random() < 0.8 else inputs.any_line(rng)
    return inputs.cut(rng, inputs.mutated(rng, line) if rng.random() < 0.5 else line)


def _expect_object(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_object_size` of an object and what follows it."""
    text = inputs.cut(rng, inputs.mutated(rng, inputs.compact(inputs.arguments(rng))))
    size = core.tp_object_size(buffers.text(text), len(text))
    assert 0 <= size <= len(text)
    if size:
        assert type(orjson.loads(text[:size])) is dict


def _expect_batches(core: ctypes.CDLL, batch: int, lines: list[bytes], made: list[list[Any]]) -> None:
    columns = []
    for at in range(len(inputs.WARP_COLUMNS)):
        values = ctypes.c_void_p()
        count = core.tp_batch_column(batch, at, ctypes.byref(values))
        columns.append(np.frombuffer(buffers.taken(count * 8, values), np.int64).tolist())
    text = ctypes.c_void_p()
    texts = buffers.taken(core.tp_batch_rest(batch, ctypes.byref(text)), text)
    start, first = 0, [0] * len(columns)
    for line, is_done, ts_ns, launch, end, counts in zip(lines, *made, strict=True):
        assert is_done or end == start
        if not is_done:
            continue
        record = orjson.loads(line)
        assert record["ts_ns"] == ts_ns
        record["ts_ns"] = 0
        if launch >= 0:
            assert record["launch"] == launch
            record["launch"] = 0
        for at, name in enumerate(inputs.WARP_COLUMNS):
            assert (counts[at] >= 0) == (name in record)
            if counts[at] >= 0:
                assert columns[at][first[at] : first[at] + counts[at]] == record[name], line
                record[name] = []
                first[at] += counts[at]
        assert orjson.loads(texts[start:end]) == record, line
        start = end
    assert [len(column) for column in columns] == first
