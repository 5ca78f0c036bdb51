"""Long texts: names that are cut, strings of JSON, and rows of databases that are sorted without them."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tracepipe.event import tables
from tracepipe.event.model import Problem
from tracepipe.event.tables import LongNames
from tracepipe.readers.json_elements import object_end
from tracepipe.readers.sorted_rows import SLICE, SortedRow, SortedRows, TextFile
from tracepipe.readers.sqlite_tables import Database


def test_long_names_are_kept_up_to_a_limit_and_stay_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LONG_NAMES_BYTES_MAX", 1_000)
    names, long = LongNames(), "x" * 400
    assert [names.shortened(name) for name in ("short", f"{long}a", f"{long}b")] == [
        "short",
        f"{long}a",
        f"{long}b",
    ]
    assert not names.note()
    cut = [names.shortened(f"{long}{at}") for at in range(3)]
    assert len(set(cut)) == 3
    assert all(one.startswith("x" * 100 + "… (") for one in cut)
    assert [names.shortened(f"{long}{at}") for at in range(3)] == cut
    assert names.shortened(f"{long}a") == f"{long}a", "a name that was kept is kept"
    assert names.note().startswith("3 names of more than 256 characters were cut")


_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|["{}\[\]]', re.DOTALL)


def _end(text: bytes, stop: int) -> int:
    """The same by a pattern of whole strings."""
    depth = 0
    for token in _TOKENS.finditer(text, 0, stop):
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(token[0], 0)
        if token[0] == b'"':
            return -1
        if depth == 0 and token[0] in (b"}", b"]"):
            return token.end()
    return -1


def test_the_end_of_an_object_in_any_text() -> None:
    rng = Random(3)
    for _ in range(20_000):
        text = b"{" + bytes(rng.choices(b'{}[]"\\a,:n', k=rng.randrange(16)))
        stop = rng.choice((len(text), rng.randrange(len(text) + 1)))
        assert object_end(text, 0, stop) == _end(text, stop), (text, stop)


@pytest.mark.parametrize("table", ["work", "of WHERE"])
def test_rows_with_long_texts_are_sorted_as_others(table: str, tmp_path: Path) -> None:
    rng, path = Random(5), tmp_path / "rows.sqlite"
    rows = [
        (rng.randrange(30), rng.randrange(30), "x" * rng.choice((3, 9_000)) + str(at)) for at in range(200)
    ]
    rows += [("no time" * 900, 1, "y"), (None, 2, "z")]
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f'CREATE TABLE "{table}" ("start" INTEGER, "end" INTEGER, "text" TEXT)')
        db.executemany(f'INSERT INTO "{table}" VALUES (?, ?, ?)', rows)
    problems: list[Problem] = []
    with path.open("rb") as file, closing(Database(file)) as database:
        found = [row[1:] for row in database.in_order(table, ("start", "end", "text"), problems)]
    expected = sorted(rows[:200], key=lambda row: (row[0], -row[1]))
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert sorted(found) == sorted(expected)
    assert [problem.message for problem in problems] == ["its time is not an integer"] * 2


def test_rows_with_long_texts_are_merged_as_others() -> None:
    rng, sorter = Random(7), SortedRows()
    rows = [
        SortedRow(
            rng.randrange(900), SLICE, 1, 0, b"first", bytes([rng.randrange(256)]) * rng.choice((5, 20_000))
        )
        for _ in range(2_000)
    ]
    for row in rows:
        sorter.add(row)
    assert [row for some in sorter.in_order() for row in some] == sorted(rows, key=lambda row: row.ts_ns)


def test_a_text_file_returns_what_it_was_given() -> None:
    texts, file = [b"", b"short", b"x" * 300, b"y" * 70_000], TextFile()
    kept = [file.keep(text) for text in texts]
    assert [isinstance(one, bytes) for one in kept] == [True, True, False, False]
    assert [file.text(one) for one in reversed(kept)] == texts[::-1]
