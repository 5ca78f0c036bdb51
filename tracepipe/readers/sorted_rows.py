"""Sorts rows by time, any number of them, in limited memory. If there are many, they are written to a
temporary file without a name, as sorted runs that are merged later. The native core does the same in
`sorted_rows.c`.

Rows of events become columns. The first text of such a row is the event's record without its time, its length
and its arguments. The second text is the arguments.
"""

from __future__ import annotations

import ctypes
import itertools
import marshal
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import merge
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

import numpy as np
import orjson

from tracepipe.errors import OutputError
from tracepipe.event.columns import (
    NONE,
    SPECIAL,
    UNDATED_NS,
    EventColumns,
    Int32s,
    Int64s,
    Row,
    SourceBatch,
    Texts,
    event_columns,
    no_events,
)
from tracepipe.event.model import Problem, cut_text
from tracepipe.event.shape import TEXTS, shape_of
from tracepipe.event.tables import new_tables, packed
from tracepipe.event.warps import Others
from tracepipe.native import library, owned, seed, text_of
from tracepipe.native.signatures import SortedColumns


def unnamed_file() -> BinaryIO:
    """Open a file that is removed when this process ends in any way. Raises OSError."""
    with tempfile.TemporaryFile(prefix="tracepipe-") as file:
        return os.fdopen(os.dup(file.fileno()), "r+b")


SHORT_BYTES: Final = 1 << 8
KeptText = bytes | tuple[int, int]


@contextmanager
def naming_the_folder() -> Iterator[None]:
    """Turn an OSError of such a file into an OutputError."""
    try:
        yield
    except OSError as e:
        raise OutputError(
            f"cannot keep the events of a trace in {tempfile.gettempdir()}: {e.strerror}",
            "Name a folder with room in TMPDIR.",
        ) from e


class TextFile:
    """Texts in a file without a name. Those of `short_bytes` at most stay in memory."""

    def __init__(self, short_bytes: int = SHORT_BYTES) -> None:
        self._short_bytes = short_bytes
        self._file: BinaryIO | None = None
        self._end = 0

    def keep(self, text: KeptText) -> KeptText:
        """Return the text, or its place in the file. Raises OutputError."""
        if not isinstance(text, bytes) or len(text) <= self._short_bytes:
            return text
        with naming_the_folder():
            if self._file is None:
                self._file = unnamed_file()
            self._file.seek(self._end)
            self._file.write(text)
        place = self._end, len(text)
        self._end += len(text)
        return place

    def text(self, kept: KeptText) -> bytes:
        """The text that was kept. Raises OutputError."""
        if isinstance(kept, bytes):
            return kept
        assert self._file is not None
        with naming_the_folder():
            self._file.seek(kept[0])
            return self._file.read(kept[1])


# Rows and bytes of a run in memory; rows, or bytes, of each run in memory while runs are merged; and runs
# that are merged at a time.
RUN_ROWS: Final = 1 << 11
RUN_BYTES: Final = 1 << 19
BLOCK_ROWS: Final = 1 << 6
BLOCK_BYTES: Final = 1 << 14
FAN_IN: Final = 1 << 5
# Rows, different first texts of rows, and bytes of texts that are returned at a time.
GIVEN_ROWS: Final = 1 << 12
GIVEN_FIRSTS: Final = 1 << 10
GIVEN_BYTES: Final = 1 << 19

SLICE, MARK, FLOW = range(3)
"""Ranks of rows at the same time: a flow comes after the slice to which it belongs."""
_SIZE_BYTES: Final = 8


class SortedRow(NamedTuple):
    """A row. `rank` orders rows at the same time; at the same rank, the longer row comes first. The other
    fields describe its event.
    """

    ts_ns: int
    rank: int
    dur_ns: int
    number: int
    first: bytes
    second: bytes


@dataclass(slots=True)
class Rows:
    """Rows as columns: times, ranks, lengths and numbers, of the shape `(rows,)` each, and two texts of each
    row. Many first texts are the same: `first` has their places in `firsts`, the different ones.
    """

    ts_ns: Int64s
    rank: Int64s
    dur_ns: Int64s
    number: Int64s
    first: Int32s
    firsts: list[bytes]
    second: Texts

    def __len__(self) -> int:
        return len(self.ts_ns)

    def __iter__(self) -> Iterator[SortedRow]:
        numbers = (column.tolist() for column in (self.ts_ns, self.rank, self.dur_ns, self.number))
        firsts = map(self.firsts.__getitem__, self.first.tolist())
        return map(SortedRow, *numbers, firsts, self.second)


def rows_of(some: list[SortedRow]) -> Rows:
    """Rows as columns."""
    ts_ns, rank, dur_ns, number = (np.array([row[at] for row in some], np.int64) for at in range(4))
    firsts: dict[bytes, int] = {}
    first = np.array([firsts.setdefault(row.first, len(firsts)) for row in some], np.int32)
    return Rows(ts_ns, rank, dur_ns, number, first, list(firsts), Texts.of([row.second for row in some]))


Run = tuple[int, int]
"""Where a run starts and ends in the file."""


class SortedRows:
    """Keeps rows that come in any order, and returns them in order. The sort is stable."""

    fan_in = FAN_IN

    def __init__(self) -> None:
        self._waiting: list[SortedRow] = []
        self._bytes = 0
        self._file: Any = None
        """A file without a name, if there are runs, and where the next run starts."""
        self._end = 0
        self._long = TextFile(BLOCK_BYTES >> 2)
        """The second texts that are long, of which merging does not hold one for each run."""
        self._levels: list[list[Run]] = []
        """By level: runs, then runs that were made of `fan_in` of those, and so on."""

    def add(self, row: SortedRow) -> None:
        """Add a row. Raises OutputError."""
        self._waiting.append(row)
        self._bytes += len(row.first) + len(row.second)
        if len(self._waiting) >= RUN_ROWS or self._bytes >= RUN_BYTES:
            self.put_away()

    def in_order(self, *, again: bool = False) -> Iterator[Rows]:
        """All rows in order, some at a time. No more may be added then, unless they are asked for `again`.
        Raises OutputError.
        """
        if again and self._count():
            self.put_away()
        if self._file is None:
            yield from self._in_memory()
            return
        if self._count():
            self.put_away()
        runs = [run for level in reversed(self._levels) for run in level]
        with naming_the_folder():
            yield from self._merged(runs)
            if not again:
                self._file.close()

    def put_away(self) -> None:
        """Write the rows in memory as a run. Merge runs, if there are many. Raises OutputError."""
        with naming_the_folder():
            if self._file is None:
                self._file = unnamed_file()
            run = self._run()
            for level in itertools.count():
                if level == len(self._levels):
                    self._levels.append([])
                runs = self._levels[level]
                runs.append(run)
                if len(runs) < self.fan_in:
                    break
                # The order of runs must be kept: the new run is written after the others.
                self._levels[level] = []
                run = self._folded(runs)

    # What the core has too ------------------------------------------------------------------------------

    def _count(self) -> int:
        """How many rows are in memory."""
        return len(self._waiting)

    def _in_memory(self) -> Iterator[Rows]:
        """The rows in memory, in order."""
        yield from _given(self._sorted())

    def _sorted(self) -> Iterator[SortedRow]:
        rows, self._waiting, self._bytes = self._waiting, [], 0
        return iter(sorted(rows, key=_order))

    def _run(self) -> Run:
        """Write the rows in memory as a sorted run. Raises OSError."""
        return self._written(self._sorted())

    def _folded(self, runs: list[Run]) -> Run:
        """Merge several runs into one. Raises OSError."""
        return self._written(merge(*map(self._rows, runs), key=_order))

    def _merged(self, runs: list[Run]) -> Iterator[Rows]:
        """All rows of runs in order; equal rows in the order of the runs. Raises OSError."""
        rows = merge(*map(self._rows, runs), key=_order)
        text = self._long.text
        return _given(row if type(row[5]) is bytes else row._replace(second=text(row[5])) for row in rows)

    def _written(self, rows: Iterator[SortedRow]) -> Run:
        """Append rows to the file as blocks, each after its size: BLOCK_ROWS rows, or BLOCK_BYTES. Raises
        OSError.
        """
        start, row = self._end, next(rows, None)
        while row is not None:
            some: list[tuple[Any, ...]] = []
            size_bytes = 0
            while row is not None and len(some) < BLOCK_ROWS and size_bytes < BLOCK_BYTES:
                some.append((*row[:5], self._long.keep(row.second)))
                size_bytes += len(row.first) + len(row.second)
                row = next(rows, None)
            block = marshal.dumps(some)
            # Other runs may have been read meanwhile.
            self._file.seek(self._end)
            self._end += self._file.write(len(block).to_bytes(_SIZE_BYTES, "little") + block)
        return start, self._end

    def _rows(self, run: Run) -> Iterator[SortedRow]:
        """The rows of a run, of which one block is in memory. Raises OSError."""
        at, end = run
        while at < end:
            self._file.seek(at)
            size = int.from_bytes(self._file.read(_SIZE_BYTES), "little")
            yield from map(SortedRow._make, marshal.loads(self._file.read(size)))
            at += _SIZE_BYTES + size


def _order(row: SortedRow) -> tuple[int, int, int]:
    return row[0], row[1], -row[2]


def _given(rows: Iterator[SortedRow]) -> Iterator[Rows]:
    """Rows as columns, some at a time."""
    some: list[SortedRow] = []
    firsts: set[bytes] = set()
    size_bytes = 0
    for row in rows:
        some.append(row)
        size_bytes += len(row.second) + (0 if row.first in firsts else len(row.first))
        firsts.add(row.first)
        if len(some) >= GIVEN_ROWS or len(firsts) >= GIVEN_FIRSTS or size_bytes >= GIVEN_BYTES:
            yield rows_of(some)
            some, firsts, size_bytes = [], set(), 0
    if some:
        yield rows_of(some)


# Rows and bytes of a run in memory; runs that are merged at a time, and the bytes of all of these in memory.
NATIVE_RUN_ROWS: Final = 1 << 16
NATIVE_RUN_BYTES: Final = (1 << 20) - (1 << 16)  # with one row more, whose size is seldom as much
NATIVE_FAN_IN: Final = 1 << 9
MERGED_BYTES: Final = 1 << 20
# Of each run.
_READ_BYTES_MAX: Final = 1 << 17
_NO_FILE: Final = -1
_NO_MEMORY: Final = -1


def row_sorter() -> SortedRows:
    """Return a sorter of rows, with the native core where it is loaded."""
    core = library()
    return SortedRows() if core is None else NativeSortedRows(core)


class NativeSortedRows(SortedRows):
    """Sorts rows in the core. `at` is the address of its rows, for its functions that add rows."""

    fan_in = NATIVE_FAN_IN

    def __init__(self, core: ctypes.CDLL) -> None:
        super().__init__()
        self._core = core
        made = core.tp_sorted_new(seed(), NATIVE_RUN_ROWS, NATIVE_RUN_BYTES)
        self.at = owned(self, made, core.tp_sorted_free)

    def add(self, row: SortedRow) -> None:
        *numbers, first, second = row
        if self._good(self._core.tp_sorted_add(self.at, *numbers, first, len(first), second, len(second))):
            self.put_away()

    def _count(self) -> int:
        return int(self._core.tp_sorted_count(self.at))

    def _in_memory(self) -> Iterator[Rows]:
        if self._count():
            self._good(self._core.tp_sorted_run(self.at, _NO_FILE, 0))
            return self._given(_NO_FILE, [(0, 0)])
        return iter(())

    def _run(self) -> Run:
        start = self._end
        self._end += self._good(self._core.tp_sorted_run(self.at, self._file.fileno(), start))
        return start, self._end

    def _folded(self, runs: list[Run]) -> Run:
        self._merge(self._file.fileno(), runs)
        start = self._end
        self._end += self._good(self._core.tp_sorted_fold(self.at, start))
        return start, self._end

    def _merged(self, runs: list[Run]) -> Iterator[Rows]:
        return self._given(self._file.fileno(), runs)

    def _merge(self, file: int, runs: list[Run]) -> None:
        """Begin to merge runs."""
        starts, ends = (np.array(column, np.int64) for column in zip(*runs, strict=True))
        read_bytes = min(_READ_BYTES_MAX, MERGED_BYTES // len(runs))
        self._good(
            self._core.tp_sorted_merge(
                self.at, file, starts.ctypes.data, ends.ctypes.data, len(runs), read_bytes
            )
        )

    def _given(self, file: int, runs: list[Run]) -> Iterator[Rows]:
        """The rows of runs as columns."""
        self._merge(file, runs)
        numbers = np.empty((6, GIVEN_ROWS), np.int64)
        first, made = np.empty(GIVEN_ROWS, np.int32), np.zeros(1, np.int64)
        columns = SortedColumns(*(column.ctypes.data for column in (*numbers, first)))
        view, limits = ctypes.byref(columns), (GIVEN_ROWS, GIVEN_FIRSTS, GIVEN_BYTES)
        while True:
            count = self._good(self._core.tp_sorted_next(self.at, view, *limits, made.ctypes.data))
            if not count:
                return
            ts_ns, rank, dur_ns, number, second_ends = numbers[:5, :count].copy()
            firsts = list(self._texts(0, numbers[5, : int(made[0])]))
            second = self._texts(1, second_ends)
            yield Rows(ts_ns, rank, dur_ns, number, first[:count].copy(), firsts, second)

    def _texts(self, which: int, ends: Int64s) -> Texts:
        return Texts(text_of(self._core.tp_sorted_texts, self.at, which), ends)

    @staticmethod
    def _good(result: int) -> int:
        """Return a result of the core. Raises MemoryError and OSError where it is an error."""
        if result == _NO_MEMORY:
            raise MemoryError
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result


_ENTRIES_MAX: Final = 1 << 11
_BYTES_MAX: Final = 1 << 19

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """Remembers what was made of a key, by `make` where that returns it with the size of its text. It is
    emptied when it is full.
    """

    def __init__(self, make: Callable[[K], tuple[V, int]] | None = None) -> None:
        super().__init__()
        self._make, self._size_bytes = make, 0

    def __missing__(self, key: K) -> V:
        if self._make is None:
            raise KeyError(key)
        return self.keep(key, *self._make(key))

    def keep(self, key: K, value: V, size_bytes: int) -> V:
        """Keep what was made of a key, with the size of its text."""
        self._size_bytes += size_bytes
        if len(self) >= _ENTRIES_MAX or self._size_bytes > _BYTES_MAX:
            self.clear()
            self._size_bytes = size_bytes
        self[key] = value
        return value


class SortedEvents:
    """Keeps events, which come in any order, as rows, and makes columns of the sorted rows. `tables`
    has the shapes and arguments for the numbers of these.
    """

    def __init__(self, rows: SortedRows | None = None) -> None:
        self.rows = row_sorter() if rows is None else rows
        self.tables = tables = new_tables()
        self._shapes = Cache[bytes, int](
            lambda first: (tables.number_of(shape_of(orjson.loads(first))), len(first))
        )
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
        kept = {key: cut_text(value) if key in TEXTS else value for key, value in record.items()}
        if dur_ns is not None:
            kept["dur_ns"] = 0
        if launch is not None:
            kept["launch"] = 0
        texts = (packed(value) if value else b"" for value in (kept, args))
        self.rows.add(SortedRow(ts_ns, rank, dur_ns or 0, launch or flow, *texts))

    def columns(self, rows: Rows, ts_ns: Int64s) -> EventColumns:
        """Columns of events for rows, with these times."""
        tables = self.tables
        if self._rounds != tables.shape_rounds:
            self._rounds = tables.shape_rounds
            self._shapes.clear()
        shapes = np.array([self._shapes[first] for first in rows.firsts], np.int32)
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
        yield SourceBatch(with_others(some, others), Others(others), problems)
        others, problems = [], []
    yield SourceBatch(with_others(no_events(), others), Others(others), [*problems, *stated])


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
