"""Rows in the order of their times: by the core as by Python's `sorted`, from memory and from a file."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import numpy as np

from tests.native import buffers
from tracepipe.native.signatures import SortedColumns
from tracepipe.readers.sorted_rows import SortedRow

_NO_FILE = -1
_MORE = 1 << 40


def given(
    core: ctypes.CDLL, rows: int, room: int, firsts: int = _MORE, size_bytes: int = _MORE
) -> list[SortedRow]:
    """The rows that `tp_sorted_next` gives next."""
    numbers, first = np.zeros((6, room), np.int64), np.zeros(room, np.int32)
    made = np.zeros(1, np.int64)
    view = buffers.view(SortedColumns, *numbers, first)
    count = core.tp_sorted_next(rows, view, room, firsts, size_bytes, made.ctypes.data)
    assert 0 <= count <= room
    assert made[0] <= count
    texts = []
    for which in range(2):
        there = ctypes.c_void_p()
        texts.append(buffers.taken(core.tp_sorted_texts(rows, which, ctypes.byref(there)), there))
    ends = [0, *numbers[5, : made[0]].tolist()]
    firsts = [texts[0][start:end] for start, end in pairwise(ends)]
    assert len({*firsts}) == len(firsts)
    ends = [0, *numbers[4, :count].tolist()]
    seconds = [texts[1][start:end] for start, end in pairwise(ends)]
    columns = zip(*numbers[:4, :count].tolist(), first[:count].tolist(), seconds, strict=True)
    return [SortedRow(*of, firsts[place], second) for *of, place, second in columns]


def taken(core: ctypes.CDLL, rows: int) -> list[SortedRow]:
    """The rows at hand, in order, which are gone then."""
    assert core.tp_sorted_run(rows, _NO_FILE, 0) >= 0
    zero = np.zeros(1, np.int64)
    assert core.tp_sorted_merge(rows, _NO_FILE, zero.ctypes.data, zero.ctypes.data, 1, 0) == 0
    made = given(core, rows, 64)
    assert given(core, rows, 64) == []
    return made


def _some(rng: Random) -> SortedRow:
    texts = (rng.choice((b"f", b"g", b"")) * rng.choice((1, 1, 1, 9, 90)) for _ in range(2))
    ts_ns = rng.choice((rng.randrange(-9, 9), rng.randrange(1 << 62), -(1 << 63), (1 << 63) - 1))
    return SortedRow(ts_ns, rng.randrange(3), rng.randrange(4), rng.getrandbits(62), *texts)


def _order(row: SortedRow) -> tuple[int, int, int]:
    return row.ts_ns, row.rank, -row.dur_ns


def _parts(core: ctypes.CDLL, rows: int, rng: Random) -> Iterator[list[SortedRow]]:
    room, firsts, size_bytes = rng.randrange(1, 20), rng.choice((1, 3, _MORE)), rng.choice((1, 50, _MORE))
    while part := given(core, rows, room, firsts, size_bytes):
        before = part[:-1]
        different = {row.first for row in before}
        assert len(different) < firsts
        assert sum(map(len, different)) + sum(len(row.second) for row in before) < size_bytes
        yield part


def sorted_rows(core: ctypes.CDLL, rng: Random) -> None:
    """All of `tp_sorted_…`."""
    rows = core.tp_sorted_new(rng.getrandbits(64), rng.randrange(1, 20), rng.choice((200, 10_000)))
    assert rows
    expected: list[SortedRow] = []
    starts, end, read_bytes = [], 0, rng.choice((1, 40, 64, 200))
    with tempfile.TemporaryFile() as file:
        try:
            for _ in range(rng.randrange(80)):
                row = _some(rng)
                expected.append(row)
                *numbers, first, second = row
                texts = buffers.text(first), len(first), buffers.text(second), len(second)
                is_full = core.tp_sorted_add(rows, *numbers, *texts)
                assert is_full in (0, 1)
                if not is_full:
                    continue
                starts.append(end)
                end += core.tp_sorted_run(rows, file.fileno(), end)
                if len(starts) == 5:
                    _merge(core, rows, file.fileno(), starts, end, read_bytes)
                    starts, size = [end], core.tp_sorted_fold(rows, end)
                    end += size
            if starts:
                starts.append(end)
                end += core.tp_sorted_run(rows, file.fileno(), end)
                _merge(core, rows, file.fileno(), starts, end, read_bytes)
            else:
                assert core.tp_sorted_count(rows) == len(expected)
                assert core.tp_sorted_run(rows, _NO_FILE, 0) >= 0
                _merge(core, rows, _NO_FILE, [0], 0, read_bytes)
            made = [row for part in _parts(core, rows, rng) for row in part]
        finally:
            core.tp_sorted_free(rows)
    assert made == sorted(expected, key=_order)


def _merge(core: ctypes.CDLL, rows: int, file: int, starts: list[int], end: int, read_bytes: int) -> None:
    first, last = np.array(starts, np.int64), np.array([*starts[1:], end], np.int64)
    columns = first.ctypes.data, last.ctypes.data
    assert core.tp_sorted_merge(rows, file, *columns, len(starts), read_bytes) == 0
