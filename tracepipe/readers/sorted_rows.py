"""Rows in the order of their times, however many and in whatever order they come: what is more than fits lies
in a file without a name, in runs that are in order, and is merged. Long texts lie in a file of their own, and
are read when their rows are given.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, Final, NamedTuple

import numpy as np

from tracepipe.errors import OutputError
from tracepipe.event.columns import Int64s

# Rows and bytes of a run in memory; rows and bytes of each run that are looked at while they are merged, and
# bytes of those of one time; runs that are merged at a time; rows and bytes that are given at a time; and the
# bytes of a text that is a long one.
RUN_ROWS: Final = 1 << 11
RUN_BYTES: Final = 1 << 19
BLOCK_ROWS: Final = 1 << 6
BLOCK_BYTES: Final = 1 << 14
ONE_TIME_BYTES: Final = 1 << 17
FAN_IN: Final = 1 << 5
GIVEN_ROWS: Final = 1 << 10
GIVEN_BYTES: Final = 1 << 19
LONG_BYTES: Final = 1 << 12

SLICE, MARK, ARROW = range(3)
"""Ranks of rows of one time: an arrow is of a slice that begins there."""
_NUMBERS: Final = ("ts_ns", "rank", "dur_ns", "number", "first", "second")
_NEVER_NS: Final = (1 << 63) - 1
_ROW_BYTES: Final = 8 * len(_NUMBERS)


class LongText(bytes):
    """Where a long text lies: its place and its size."""

    @property
    def size_bytes(self) -> int:
        """The size of the text."""
        return int.from_bytes(self[8:], "little")


class SortedRow(NamedTuple):
    """`rank` orders rows of one time, and of one rank the longer comes first; the others say what it is."""

    ts_ns: int
    rank: int
    dur_ns: int
    number: int
    first: bytes
    second: bytes


@dataclass(slots=True)
class Rows:
    """Rows as columns: times, ranks, lengths and numbers, and two texts of each."""

    ts_ns: Int64s
    rank: Int64s
    dur_ns: Int64s
    number: Int64s
    first: list[bytes]
    second: list[bytes]

    def __len__(self) -> int:
        return len(self.first)

    def in_order(self) -> Rows:
        """The same in order."""
        return self._take(np.lexsort((-self.dur_ns, self.rank, self.ts_ns)))

    def _take(self, order: Any) -> Rows:
        places = order.tolist()
        numbers = (column[order] for column in (self.ts_ns, self.rank, self.dur_ns, self.number))
        texts = ([column[at] for at in places] for column in (self.first, self.second))
        return Rows(*numbers, *texts)

    def before(self, ts_ns: int) -> tuple[Rows, Rows]:
        """Those before a time, and the others."""
        count = int(np.searchsorted(self.ts_ns, ts_ns))
        return self._part(slice(None, count)), self._part(slice(count, None))

    def _part(self, part: slice) -> Rows:
        return Rows(
            self.ts_ns[part], self.rank[part], self.dur_ns[part], self.number[part], self.first[part],
            self.second[part],
        )  # fmt: skip


def joined_rows(parts: list[Rows]) -> Rows:
    """The rows of several parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    numbers = (np.concatenate([getattr(part, name) for part in parts]) for name in _NUMBERS[:4])
    ts_ns, rank, dur_ns, number = numbers
    first, second = ([text for part in parts for text in getattr(part, name)] for name in _NUMBERS[4:])
    return Rows(ts_ns, rank, dur_ns, number, first, second)


def rows_of(some: list[SortedRow]) -> Rows:
    """Rows as columns."""
    columns = [[row[at] for row in some] for at in range(4)]
    ts_ns, rank, dur_ns, number = (np.array(column, np.int64) for column in columns)
    return Rows(ts_ns, rank, dur_ns, number, [row.first for row in some], [row.second for row in some])


@dataclass(slots=True)
class _Run:
    """Where a run of blocks lies in the file, and what of it is at hand."""

    at: int
    end: int
    rows: Rows | None = None
    rows_bytes: int = 0


def _unnamed_file() -> IO[bytes]:
    """A file that is gone with this process however that ends. Raises OSError."""
    with tempfile.TemporaryFile(prefix="tracepipe-") as file:
        return os.fdopen(os.dup(file.fileno()), "r+b")


@dataclass(slots=True)
class _File:
    """Runs in a file without a name."""

    file: IO[bytes] = field(default_factory=_unnamed_file)
    end: int = 0

    def write(self, blocks: Iterator[Rows]) -> _Run:
        """Write the rows of a run, which are in order."""
        start = self.end
        self.file.seek(start)
        for rows in blocks:
            for part in _parts(rows, _sizes(rows), BLOCK_ROWS, BLOCK_BYTES):
                self._write(rows._part(part))
        return _Run(start, self.end)

    def _write(self, rows: Rows) -> None:
        columns = [rows.ts_ns, rows.rank, rows.dur_ns, rows.number]
        columns += [
            np.array([-len(text) if type(text) is LongText else len(text) for text in texts], np.int64)
            for texts in (rows.first, rows.second)
        ]
        texts = b"".join(rows.first) + b"".join(rows.second)
        head = np.array([len(rows), len(texts)], np.int64)
        block = b"".join(column.tobytes() for column in [head, *columns]) + texts
        self.file.write(block)
        self.end += len(block)

    def read(self, run: _Run) -> Rows | None:
        """The next block of a run."""
        if run.at >= run.end:
            return None
        self.file.seek(run.at)
        count, text_bytes = np.frombuffer(self.file.read(16), np.int64).tolist()
        size = count * _ROW_BYTES + text_bytes
        data = self.file.read(size)
        run.at += 16 + size
        columns = np.frombuffer(data, np.int64, count * len(_NUMBERS)).reshape(len(_NUMBERS), count)
        at, texts = count * _ROW_BYTES, []
        for sizes in columns[4:]:
            ends = (at + np.cumsum(np.abs(sizes))).tolist()
            starts = [at, *ends[:-1]]
            some = [data[start:end] for start, end in zip(starts, ends, strict=True)]
            for long in np.flatnonzero(sizes < 0).tolist():
                some[long] = LongText(some[long])
            texts.append(some)
            at = ends[-1]
        run.rows_bytes = size
        return Rows(*columns[:4], *texts)


@dataclass(slots=True)
class _LongTexts:
    """Long texts, in a file without a name."""

    file: IO[bytes] = field(default_factory=_unnamed_file)
    end: int = 0

    def put(self, text: bytes) -> LongText:
        """Put a text there."""
        self.file.seek(self.end)
        self.file.write(text)
        place = LongText(self.end.to_bytes(8, "little") + len(text).to_bytes(8, "little"))
        self.end += len(text)
        return place

    def whole(self, text: bytes) -> bytes:
        """A text, from there if it is a long one."""
        if type(text) is not LongText:
            return text
        self.file.seek(int.from_bytes(text[:8], "little"))
        return self.file.read(text.size_bytes)


class SortedRows:
    """Takes rows in any order, and gives them in order."""

    def __init__(self) -> None:
        self._waiting: list[SortedRow] = []
        self._parts: list[Rows] = []
        """What came before those that wait."""
        self._count = self._bytes = 0
        self._file: _File | None = None
        self._long: _LongTexts | None = None
        self._levels: list[list[_Run]] = []
        """Runs, and runs that were made of FAN_IN of those, and so on."""

    def add(self, row: SortedRow) -> None:
        """Take a row. Raises OutputError."""
        if len(row.first) > LONG_BYTES or len(row.second) > LONG_BYTES:
            row = row._replace(first=self._put_long(row.first), second=self._put_long(row.second))
        self._waiting.append(row)
        self._grow(1, len(row.first) + len(row.second))

    def add_all(self, rows: Rows) -> None:
        """Take rows, as if one by one. Raises OutputError."""
        self._to_parts()
        for texts in (rows.first, rows.second):
            if max(map(len, texts), default=0) > LONG_BYTES:
                texts[:] = map(self._put_long, texts)
        taken_bytes = np.cumsum(_sizes(rows))
        start = 0
        while start < len(rows):
            before_bytes = int(taken_bytes[start - 1]) if start else 0
            full = int(np.searchsorted(taken_bytes, before_bytes + RUN_BYTES - self._bytes)) + 1
            end = min(full, start + RUN_ROWS - self._count, len(rows))
            self._parts.append(rows._part(slice(start, end)))
            self._grow(end - start, int(taken_bytes[end - 1]) - before_bytes)
            start = end

    def _put_long(self, text: bytes) -> bytes:
        """A text, or where it lies if it is a long one."""
        if len(text) <= LONG_BYTES:
            return text
        with _naming_the_folder():
            if self._long is None:
                self._long = _LongTexts()
            return self._long.put(text)

    def _grow(self, count: int, size_bytes: int) -> None:
        self._count += count
        self._bytes += size_bytes
        if self._count >= RUN_ROWS or self._bytes >= RUN_BYTES:
            self._put_away()

    def _to_parts(self) -> None:
        if self._waiting:
            self._parts.append(rows_of(self._waiting))
            self._waiting = []

    def _taken(self) -> Rows:
        """Those at hand, in order."""
        self._to_parts()
        rows, self._parts = joined_rows(self._parts).in_order(), []
        self._count = self._bytes = 0
        return rows

    def _put_away(self) -> None:
        rows = self._taken()
        with _naming_the_folder():
            if self._file is None:
                self._file = _File()
            self._keep(0, self._file.write(iter([rows])))

    def _keep(self, level: int, run: _Run) -> None:
        """Keep a run; where there are many, make one of them."""
        if level == len(self._levels):
            self._levels.append([])
        self._levels[level].append(run)
        if len(self._levels[level]) >= FAN_IN:
            runs, self._levels[level] = self._levels[level], []
            self._keep(level + 1, self._merged_run(runs))

    def _merged_run(self, runs: list[_Run]) -> _Run:
        assert self._file is not None
        merged = _File()
        run = merged.write(_together(_merged(self._file, runs)))
        # What is written last is read last: the new run goes behind the others.
        start = self._file.end
        self._file.file.seek(start)
        merged.file.seek(0)
        while block := merged.file.read(1 << 20):
            self._file.file.write(block)
        self._file.end += run.end
        return _Run(start, self._file.end)

    def in_order(self) -> Iterator[Rows]:
        """All rows in order, some at a time. No more are taken then. Raises OutputError."""
        for rows in self._joined():
            sizes = _sizes(rows)
            if self._long is not None:
                for texts in (rows.first, rows.second):
                    sizes += [text.size_bytes if type(text) is LongText else 0 for text in texts]
            for part in _parts(rows, sizes, len(rows), GIVEN_BYTES):
                yield self._whole(rows._part(part))
        for file in (self._file, self._long):
            if file is not None:
                file.file.close()

    def _joined(self) -> Iterator[Rows]:
        if self._file is None:
            if self._count:
                yield self._taken()
            return
        if self._count:
            self._put_away()
        runs = [run for level in reversed(self._levels) for run in level]
        yield from _together(_merged(self._file, runs))

    def _whole(self, rows: Rows) -> Rows:
        """Rows with their long texts."""
        if self._long is not None:
            for texts in (rows.first, rows.second):
                texts[:] = map(self._long.whole, texts)
        return rows


@contextmanager
def _naming_the_folder() -> Iterator[None]:
    """Raises an OSError as OutputError."""
    try:
        yield
    except OSError as e:
        raise OutputError(
            f"cannot keep the events of a trace in {tempfile.gettempdir()}: {e.strerror}",
            "name a folder with room in TMPDIR",
        ) from e


def _sizes(rows: Rows) -> Int64s:
    """The bytes of the texts of each row."""
    first, second = (np.array(list(map(len, texts)), np.int64) for texts in (rows.first, rows.second))
    return first + second


def _parts(rows: Rows, sizes: Int64s, rows_max: int, bytes_max: int) -> Iterator[slice]:
    """Parts of rows that have so many rows and bytes at most, or one row."""
    ends, start = np.cumsum(sizes), 0
    while start < len(rows):
        before_bytes = int(ends[start - 1]) if start else 0
        fitting = int(np.searchsorted(ends, before_bytes + bytes_max, "right"))
        end = min(max(fitting, start + 1), start + rows_max)
        yield slice(start, end)
        start = end


def _merged(file: _File, runs: list[_Run]) -> Iterator[Rows]:
    """The rows of runs in order; of one time and rank those of the earlier run first."""
    for run in runs:
        run.rows = file.read(run)
    while runs := [run for run in runs if run.rows is not None]:
        # Nothing that is still to come is before the earliest of the last times at hand.
        bound_ns = min((_last_ns(run) for run in runs if run.at < run.end), default=_NEVER_NS)
        parts = []
        for run in runs:
            assert run.rows is not None
            if int(run.rows.ts_ns[0]) < bound_ns:
                now, rest = run.rows.before(bound_ns)
                parts.append(now)
                run.rows = rest if len(rest) else file.read(run)
            elif _last_ns(run) == bound_ns and run.at < run.end:
                # All of one time: with more of it at hand, unless that is more than fits.
                held_bytes, more = run.rows_bytes, file.read(run)
                assert more is not None
                if len(run.rows) < RUN_ROWS and held_bytes < ONE_TIME_BYTES:
                    run.rows = joined_rows([run.rows, more])
                    run.rows_bytes += held_bytes
                else:
                    parts.append(run.rows)
                    run.rows = more
        if parts:
            yield joined_rows(parts).in_order()


def _together(some: Iterator[Rows]) -> Iterator[Rows]:
    """The same rows, GIVEN_ROWS or GIVEN_BYTES or more at a time."""
    parts: list[Rows] = []
    count = size_bytes = 0
    for rows in some:
        parts.append(rows)
        count += len(rows)
        size_bytes += int(_sizes(rows).sum())
        if count >= GIVEN_ROWS or size_bytes >= GIVEN_BYTES:
            yield joined_rows(parts)
            parts, count, size_bytes = [], 0, 0
    if parts:
        yield joined_rows(parts)


def _last_ns(run: _Run) -> int:
    assert run.rows is not None
    return int(run.rows.ts_ns[-1])
