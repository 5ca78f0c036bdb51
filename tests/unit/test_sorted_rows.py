"""Rows in order: as `sorted` has them, in memory and in files, with the core and without it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.support.cores import CORES, running
from tracepipe.errors import OutputError
from tracepipe.event.columns import Texts
from tracepipe.readers import sorted_rows
from tracepipe.readers.sorted_rows import Rows, SortedRow, rows_of

BOTH = pytest.mark.parametrize("core", CORES)


def order(row: SortedRow) -> tuple[int, int, int]:
    return row.ts_ns, row.rank, -row.dur_ns


def given(core: str, rows: list[SortedRow]) -> list[Rows]:
    with running(core):
        some = sorted_rows.row_sorter()
        for row in rows:
            some.add(row)
        return list(some.in_order())


def some_rows(count: int, seed: int = 7) -> list[SortedRow]:
    rng = Random(seed)
    return [
        SortedRow(
            rng.randrange(400), rng.randrange(3), rng.randrange(9), at, b"f" * rng.randrange(5), b"s%d" % at
        )
        for at in range(count)
    ]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of some rows, of which a few are merged at a time."""
    for name in ("RUN_ROWS", "NATIVE_RUN_ROWS"):
        monkeypatch.setattr(sorted_rows, name, 8)
    monkeypatch.setattr(sorted_rows, "BLOCK_ROWS", 3)
    monkeypatch.setattr(sorted_rows, "MERGED_BYTES", 64)
    for kind in (sorted_rows.SortedRows, sorted_rows.NativeSortedRows):
        monkeypatch.setattr(kind, "fan_in", 3)


@BOTH
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 24, 300])
def test_rows_are_in_order_however_many(core: str, count: int, small: None) -> None:
    rows = some_rows(count)
    assert [row for part in given(core, rows) for row in part] == sorted(rows, key=order)


@BOTH
def test_texts_that_are_longer_than_the_buffer(core: str, small: None) -> None:
    texts = (b"a" * 5_000, b"", b"b" * 200_000, b"c")
    rows = [SortedRow(-at, 0, 0, at, texts[at % 4], texts[at % 3]) for at in range(40)]
    assert [row for part in given(core, rows) for row in part] == rows[::-1]


@BOTH
def test_runs_end_by_their_bytes_too(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN_BYTES", "NATIVE_RUN_BYTES"):
        monkeypatch.setattr(sorted_rows, name, 100)
    rows = [SortedRow(at * 7 % 50, 0, 0, at, b"f" * (at * 13 % 90), b"s") for at in range(100)]
    assert [row for part in given(core, rows) for row in part] == sorted(rows, key=order)


@BOTH
def test_a_bounded_number_of_rows_and_texts_is_given_at_a_time(
    core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GIVEN_ROWS", 10), ("GIVEN_FIRSTS", 4), ("GIVEN_BYTES", 100)):
        monkeypatch.setattr(sorted_rows, name, value)
    texts = [(b"f", b"")] * 12 + [(b"%d" % at, b"") for at in range(5)] + [(b"", b"x" * 60)] * 5
    parts = given(core, [SortedRow(at, 0, 0, 0, *both) for at, both in enumerate(texts)])
    assert [len(part) for part in parts] == [10, 5, 4, 2, 1]


@BOTH
def test_first_texts_stand_once(core: str) -> None:
    (part,) = given(core, [SortedRow(at, 0, 0, 0, b"fg"[at % 2 :], b"") for at in range(6)])
    assert part.firsts == [b"fg", b"g"]
    assert part.first.tolist() == [0, 1, 0, 1, 0, 1]


def test_a_column_of_texts() -> None:
    texts = [b"a", b"", b"bcd"]
    column = Texts.of(texts)
    assert (len(column), list(column), column[1], column[2]) == (3, texts, b"", b"bcd")
    assert list(rows_of([])) == list(Texts.of([])) == []
    assert column.ends.dtype == np.int64


@BOTH
def test_a_full_disk_is_an_error(core: str, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def file_that_is_full() -> object:
        return os.fdopen(os.open("/dev/full", os.O_RDWR), "r+b", buffering=0)

    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    monkeypatch.setattr(sorted_rows, "unnamed_file", file_that_is_full)
    with pytest.raises(OutputError, match=os.strerror(errno.ENOSPC)):
        given(core, some_rows(100))
