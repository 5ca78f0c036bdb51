"""Sorts events that are not in the order of their times, and makes columns of them. `sorted_rows.py` keeps
them, in temporary files without names if there are many.

A row's first text is the event's record without its time, its length and its arguments. The second text is
the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import orjson

from tracepipe.event.columns import (
    NONE,
    SPECIAL,
    UNDATED_NS,
    EventColumns,
    Int64s,
    Row,
    SourceBatch,
    event_columns,
    no_events,
)
from tracepipe.event.model import Problem
from tracepipe.event.shape import shape_of
from tracepipe.event.tables import packed
from tracepipe.readers.line_columns import new_tables
from tracepipe.readers.recording import cut_text
from tracepipe.readers.sorted_rows import Rows, SortedRow, SortedRows, row_sorter

_ENTRIES_MAX: Final = 1 << 11
_BYTES_MAX: Final = 1 << 19

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """Remembers what was made of a key. It is emptied when it is full."""

    def __init__(self) -> None:
        super().__init__()
        self._size_bytes = 0

    def keep(self, key: K, value: V, size_bytes: int) -> V:
        """Keep what was made of a key, with the size of its text."""
        self._size_bytes += size_bytes
        if len(self) >= _ENTRIES_MAX or self._size_bytes > _BYTES_MAX:
            self.clear()
            self._size_bytes = size_bytes
        self[key] = value
        return value


_TEXTS = ("name", "comm", "layer", "domain")


class SortedEvents:
    """Keeps events, which come in any order, as rows, and makes columns of the sorted rows. `tables`
    has the shapes and arguments for the numbers of these.
    """

    def __init__(self, rows: SortedRows | None = None) -> None:
        self.rows = row_sorter() if rows is None else rows
        self.tables = new_tables()
        self._shapes = Cache[bytes, int]()
        self._rounds = 0

    def add(
        self,
        ts_ns: int,
        record: dict[str, Any],
        args: dict[str, Any],
        *,
        rank: int = 0,
        dur_ns: int | None = None,
        launch: int | None = None,
        flow: int = 0,
    ) -> None:
        """Add an event. `rank` orders events at the same time. `flow` is the number of a flow, for an end of
        one.
        """
        kept = {key: cut_text(value) if key in _TEXTS else value for key, value in record.items()}
        if dur_ns is not None:
            kept["dur_ns"] = 0
        if launch is not None:
            kept["launch"] = 0
        texts = (packed(value) if value else b"" for value in (kept, args))
        self.rows.add(SortedRow(ts_ns, rank, dur_ns or 0, launch or flow, *texts))

    def columns(self, rows: Rows, ts_ns: Int64s) -> EventColumns:
        """Columns of events for rows, with these times."""
        tables = self.tables
        if self._rounds != tables.rounds:
            self._rounds = tables.rounds
            self._shapes.clear()
        numbers = []
        for first in rows.firsts:
            number = self._shapes.get(first)
            if number is None:
                number = tables.number_of(shape_of(orjson.loads(first)))
                self._shapes.keep(first, number, len(first))
            numbers.append(number)
        shapes = np.array(numbers, np.int32)
        tables.given_bytes += len(rows.second.data)
        args = tables.text_numbers(rows.second)
        return EventColumns(ts_ns, shapes[rows.first], args, rows.dur_ns, rows.number)


def batches_of(
    columns: Iterable[EventColumns], others: list[Any], problems: list[Problem], stated: Iterable[Problem]
) -> Iterator[SourceBatch]:
    """Batches of columns, the first with these others and problems, and a last one with the problems of
    `stated`.
    """
    for some in columns:
        yield SourceBatch(with_others(some, others), others, problems)
        others, problems = [], []
    yield SourceBatch(with_others(no_events(), others), others, [*problems, *stated])


def with_others(columns: EventColumns, others: Sequence[Any]) -> EventColumns:
    """Columns with rows for the first of a batch's others, which are not events, after those of events."""
    if not others:
        return columns
    rows: list[Row] = [
        (record.get("ts_ns", UNDATED_NS), SPECIAL, at, 0, 0, None, NONE) for at, record in enumerate(others)
    ]
    more = event_columns(rows)
    names = ("ts_ns", "shape", "args", "dur_ns", "launch")
    return EventColumns(*(np.concatenate([getattr(columns, name), getattr(more, name)]) for name in names))
