"""Reads tables of foreign SQLite databases in order, in little memory, and makes batches of their events.

A database may be hostile, as its schema is code. Views, triggers, virtual tables and computed columns are
never used, no extension can be loaded, and a statement can only read plain columns of plain tables.
"""

from __future__ import annotations

import heapq
import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from shutil import copyfileobj
from typing import Any, BinaryIO, Final
from urllib.parse import quote

from tracepipe import paths
from tracepipe.errors import InputError
from tracepipe.event.columns import NONE, SPECIAL, Row, SourceBatch, event_columns, signed
from tracepipe.event.model import TIME_LIMIT_NS, Problem, Record, cut_text
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, Tables
from tracepipe.event.warps import Others, Warps
from tracepipe.readers.sorted_rows import Cache
from tracepipe.units import counted

Values = tuple[Any, ...]

# Errors may quote bytes of the database that are not text, and lengths in it may be of any size.
BROKEN: Final = (sqlite3.Error, UnicodeError, MemoryError)
"""The exceptions that reading a broken database may raise."""

_CACHE_KIB: Final = 512
# A table with a longer text cannot be read on. Profilers write none, but a text may have a gigabyte.
_LONGEST_BYTES: Final = 1 << 20
# A recording has some hundred tables of some dozen columns.
_TABLES_MAX, _COLUMNS_MAX = 4096, 512
# The most text of all small tables, which are kept.
_SMALL_BYTES_MAX: Final = 8 << 20
# Steps of SQLite's machine between two checks for signals: some tens of milliseconds.
_STEPS: Final = 1 << 20
# The most texts that are remembered, and the longest: at most 4 MB, usually some hundred KB.
_STRINGS_MAX: Final = 1 << 12
_STRING_LENGTH_MAX: Final = 1 << 10
_READS: Final = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ})
_FUNCTIONS: Final = frozenset({"count", "length", "typeof"})
# SQLite's sorter holds a row of each part that it merges: rows with longer texts are sorted without these.
_SORTED_LENGTH_MAX: Final = 1 << 12


class Database:
    """The plain tables of a database. Raises InputError where it cannot be opened, or has no schema.

    `tables` has the stored columns of each table, not the computed ones.
    """

    def __init__(self, stream: BinaryIO) -> None:
        # The name is resolved here, as SQLite would resolve /proc/self/fd itself.
        file = Path(f"/proc/self/fd/{stream.fileno()}").resolve()
        copy = recovered(file)
        self.is_recovered = copy is not None
        """Whether its writer did not close it, and SQLite recovered what it had committed."""
        how = "mode=ro&immutable=1" if copy is None else "mode=rw"
        self._connection = sqlite3.connect(
            f"file:{quote(str(copy or file))}?{how}", uri=True, check_same_thread=False
        )
        self._connection.text_factory = lambda text: text.decode("utf-8", "replace")
        try:
            for pragma in (
                f"cache_size = -{_CACHE_KIB}",
                "mmap_size = 0",
                "temp_store = FILE",
                "trusted_schema = OFF",
                "cell_size_check = ON",
            ):
                self._connection.execute(f"PRAGMA {pragma}")
            if hasattr(self._connection, "setlimit"):  # from Python 3.11 on
                self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_BYTES)
                self._connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
                self._connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
            # A virtual table has no root page.
            found = self._connection.execute(
                "SELECT name FROM sqlite_master"
                " WHERE type = 'table' AND rootpage > 0 AND name NOT LIKE 'sqlite_%'"
            )
            self.tables: dict[str, tuple[str, ...]] = {}
            for name in [name for (name,) in found.fetchmany(_TABLES_MAX) if isinstance(name, str)]:
                columns = self._connection.execute(f"PRAGMA table_xinfo({quoted(name)})")
                kept = (column[1] for column in columns.fetchmany(_COLUMNS_MAX) if not column[6])
                self.tables[name] = tuple(kept)
        except BROKEN as e:
            self.close()
            raise InputError(f"cannot be read: {unreadable(e)}", "Export or copy it again.") from e
        except BaseException:
            self.close()
            raise
        self._small_bytes = 0
        self._is_asking = False  # of the schema: Python 3.10 cannot take an authorizer away again
        self._connection.set_authorizer(self._may)
        self._connection.set_progress_handler(lambda: 0, _STEPS)

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _may(self, action: int, of: str | None, name: str | None, _: object, within: str | None) -> int:
        """Whether a part of a statement is allowed. SQLite calls this when it compiles a statement."""
        is_read = action in _READS and within is None
        if self._is_asking or is_read or (action == sqlite3.SQLITE_FUNCTION and name in _FUNCTIONS):
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    def is_key(self, table: str, column: str) -> bool:
        """Whether an integer column is the key of the rows."""
        if table not in self.tables:
            return False
        found = self._asked(f"table_xinfo({quoted(table)})")
        keys = [(name, kind) for _, name, kind, _, _, key, _ in found if key]
        return [(name, str(kind).upper()) for name, kind in keys] == [(column, "INTEGER")]

    def is_indexed(self, table: str, column: str) -> bool:
        """Whether there is an index for a column."""
        if table not in self.tables:
            return False
        names = [row[1] for row in self._asked(f"index_list({quoted(table)})")]
        firsts = [self._asked(f"index_info({quoted(name)})")[:1] for name in names]
        return any(row[2] == column for rows in firsts for row in rows)

    def _asked(self, pragma: str) -> list[Values]:
        self._is_asking = True
        try:
            return self._connection.execute(f"PRAGMA {pragma}").fetchmany(_COLUMNS_MAX)
        finally:
            self._is_asking = False

    def count(self, table: str) -> int:
        """How many rows a table has. Raises sqlite3.Error."""
        (count,) = self._connection.execute(f"SELECT count(*) FROM {quoted(table)}").fetchone()
        return int(count)

    def select(
        self, table: str, columns: Sequence[str], rest: str = "", values: Sequence[Any] = ()
    ) -> Iterator[Values]:
        """Rows of a table, with None for columns that it lacks. `rest` is the SQL after FROM. Raises
        sqlite3.Error.
        """
        return self._connection.execute(
            f"SELECT {', '.join(self._columns(table, columns))} FROM {quoted(table)} {rest}", values
        )

    def _columns(self, table: str, columns: Sequence[str]) -> list[str]:
        here = {name.lower() for name in self.tables[table]} | {"rowid"}
        return [quoted(name) if name.lower() in here else "NULL" for name in columns]

    def in_order(
        self,
        table: str,
        columns: Sequence[str],
        problems: list[Problem],
        order: Sequence[str] = ("start", "end DESC"),
        where: str = "",
        joined: str = "",
        of_joined: Sequence[str] = (),
    ) -> Iterator[Values]:
        """Rows of a table by time: the number of the row, and the columns. A row whose time, the first
        column, is not an integer is left out, with a problem. A table that cannot be read on gets a problem
        too. `joined` joins others to the table, which is called r, for the last columns, `of_joined`: NULL
        if the table has long texts.

        SQLite sorts in its own files, as indexes of a foreign database cannot be trusted.
        """
        here = {name.lower() for name in self.tables[table]}
        words = [
            (name, way) for name, _, way in (one.partition(" ") for one in order) if name.lower() in here
        ]
        own = [name if name == "NULL" else f"r.{name}" for name in self._columns(table, ("rowid", *columns))]
        source = f"{quoted(table)} AS r NOT INDEXED"
        alone = ", ".join((*own, *("NULL" for _ in of_joined))), source
        found, source = ", ".join((*own, *of_joined)), f"{source} {joined}"
        by = [(f"r.{quoted(name)}", way) for name, way in words]
        return self.dated([table], found, source, by, problems, where, alone)

    def dated(
        self,
        tables: list[str],
        found: str,
        source: str,
        order: list[tuple[str, str]],
        problems: list[Problem],
        where: str = "",
        alone: tuple[str, str] | None = None,
    ) -> Iterator[Values]:
        """Rows of the first table, which is called r, joined to others, as `in_order` returns them. `found`
        are the columns, `source` is what stands after FROM, and `where` the condition with its WHERE. `alone`
        are the first two for rows that are looked up one by one, as those with long texts are.
        """
        table = tables[0]
        try:
            for row in self._sorted(tables, found, source, order, where, alone or (found, source)):
                if type(row[1]) is int:
                    yield row
                else:
                    problems.append(Problem(0, f"{table} row {row[0]}", "its time is not an integer"))
        except BROKEN as e:
            problems.append(Problem(0, table, f"cannot be read on: {unreadable(e)}"))

    def _sorted(
        self,
        tables: list[str],
        found: str,
        source: str,
        order: list[tuple[str, str]],
        where: str,
        alone: tuple[str, str],
    ) -> Iterator[Values]:
        if not any(map(self._has_long_texts, tables)):
            by = ", ".join(f"{name} {way}" for name, way in order)
            yield from self._connection.execute(f"SELECT {found} FROM {source} {where} ORDER BY {by}")
            return
        found, source = alone
        by = ", ".join(f"CASE WHEN typeof({name}) = 'integer' THEN {name} END {way}" for name, way in order)
        one = f"SELECT {found} FROM {source} WHERE r.rowid = ?"
        for number in self._connection.execute(f"SELECT r.rowid FROM {source} {where} ORDER BY {by}"):
            yield from self._connection.execute(one, number)

    def _has_long_texts(self, table: str) -> bool:
        names = map(quoted, self.tables[table])
        # Texts are greater than all numbers: this is much faster than to ask for types or lengths.
        long = " OR ".join(f"({name} >= '' AND length({name}) > {_SORTED_LENGTH_MAX})" for name in names)
        found = self._connection.execute(f"SELECT 1 FROM {quoted(table)} NOT INDEXED WHERE {long} LIMIT 1")
        return found.fetchone() is not None

    def texts(self, table: str, columns: Sequence[str], most: int, problems: list[Problem]) -> list[Values]:
        """The first rows of a small table, `most` of them, with their texts cut; none where there is no such
        table.
        """
        rows: list[Values] = []
        try:
            for found in self.select(table, columns) if table in self.tables else ():
                # Blobs are not used.
                row = tuple(
                    cut_text(value) if type(value) is str else value if type(value) is not bytes else None
                    for value in found
                )
                size = sum(len(value) for value in row if isinstance(value, str))
                if len(rows) >= most or self._small_bytes + size > _SMALL_BYTES_MAX:
                    what = f"{most} rows" if len(rows) >= most else "as much text as is kept"
                    problems.append(Problem(0, table, f"has over {what}: the first are used", skipped=False))
                    break
                self._small_bytes += size
                rows.append(row)
        except BROKEN as e:
            problems.append(Problem(0, table, f"cannot be read on: {unreadable(e)}"))
            return []
        return rows


def quoted(name: str) -> str:
    """A name in a statement."""
    return '"' + name.replace('"', '""') + '"'


def unreadable(error: Exception) -> str:
    """The message for an error of a table. Raises KeyboardInterrupt where a signal ended the reading."""
    text = str(error) if isinstance(error, sqlite3.Error) else ""
    if text == "interrupted":  # the handler of a signal did this while SQLite was working
        raise KeyboardInterrupt from error
    if "full" in text:
        raise InputError(
            "its tables cannot be sorted: no room for temporary files",
            "Free some space in /var/tmp, or set SQLITE_TMPDIR to a folder with space.",
        ) from error
    return text or "the database is broken"  # Python 3.10 has no text for what is not UTF-8


class Strings:
    """A table of texts by number, of which the last ones are remembered."""

    def __init__(self, database: Database, table: str, key: str, value: str, problems: list[Problem]) -> None:
        self._database, self._table, self._columns = database, table, (value,)
        self._where = f"WHERE {quoted(key)} = ?"
        self._problems = problems
        self._known: dict[int, str | None] = {}
        self._is_keyed = database.is_key(table, key)
        if table in database.tables and not self._is_keyed:
            # Each lookup would read the whole table.
            rows = database.texts(table, (key, value), _STRINGS_MAX, problems)
            self._known = {number: text for number, text in rows if type(number) is int and type(text) is str}

    def get(self, number: object) -> str | None:
        """The text of a number; None where there is none."""
        if type(number) is not int:
            return None
        if number in self._known or not self._is_keyed:
            return self._known.get(number)
        text = None
        try:
            found = next(self._database.select(self._table, self._columns, self._where, (number,)), None)
            text = found[0] if found and type(found[0]) is str else None
        except BROKEN as e:
            self._problems.append(Problem(0, f"{self._table} row {number}", unreadable(e), skipped=False))
        if len(self._known) >= _STRINGS_MAX:
            self._known.clear()
        # A longer text is looked up each time.
        if text is None or len(text) <= _STRING_LENGTH_MAX:
            self._known[number] = text
        return text


BATCH_ROWS: Final = 1 << 10
_BATCH_BYTES: Final = 1 << 19
# The most ends that wait. Ranges nest some dozen deep on some hundred threads.
ENDS_MAX: Final = 1 << 14
_NEVER_NS: Final = 1 << 63
# The most rows whose open ranges are remembered.
_ROWS_MAX: Final = 1 << 12
AddRow = Callable[[Values], None]
"""Adds the events of a row."""


class EventRows:
    """Makes batches of the events of rows, in the order of time. Ends of ranges wait until their time comes.

    `base_ns` is added to each time. `longest_ns` is the longest possible duration. `table` and `row` are the
    place that is read, for problems.
    """

    def __init__(self, database: Database, problems: list[Problem]) -> None:
        self._database, self.problems = database, problems
        self.tables = Tables()
        self.base_ns, self.longest_ns = 0, 366 * 86_400 * 10**9
        self.table, self.row = "", 0
        self._rows: list[Row] = []
        self._others = Others[Warps]()
        self._numbers = Cache[Any, int]()
        self._rounds = self._ended = 0
        self._ends: list[tuple[int, int, Shape, Callable[[], None] | None]] = []
        self._open: dict[Any, list[int]] = {}
        """By thread or process: the ends of the open ranges."""
        if database.is_recovered:
            self.say(
                "its exporter was killed or still runs: SQLite recovered a copy, which has what was committed"
            )

    def shape(self, key: object, make: Callable[[], Shape]) -> int:
        """The number of the shape that `make` returns. It is called once for each key."""
        number = self._numbers.get(key)
        if number is None:
            shape = make()
            number = self._numbers.keep(key, self.tables.number_of(shape), len(shape.name))
        return number

    def add(self, ts_ns: int, shape: int, args: Args | None = None, dur_ns: int = 0, launch: int = 0) -> None:
        """Add an event, or a problem where its time is impossible."""
        ts_ns += self.base_ns
        if not 0 <= ts_ns <= TIME_LIMIT_NS:
            stated = "is before the clock began" if ts_ns < 0 else "is beyond 146 years"
            self.say(f"its time, {ts_ns - self.base_ns} ns, {stated}", skipped=True)
            return
        number = self.tables.args_number(args) if args else NONE
        self._rows.append((ts_ns, shape, number, dur_ns, signed(launch), None, NONE))

    def say(self, text: str, *, skipped: bool = False, table: str = "") -> None:
        """Add a problem of the row, or of a table; `skipped` if its event is left out."""
        place = f"{self.table} row {self.row}" if self.table and not table else table
        self.problems.append(Problem(0, place, text, skipped))

    def length(self, start: int, end: object, args: Args) -> int:
        """The length of something. An impossible length is marked in `args`, with a problem."""
        if type(end) is not int:
            args["end"] = "not recorded"
            self.say("has no end: it is kept without a length")
            return 0
        dur_ns = end - start
        if dur_ns < 0:
            args["ends_before_start_ns"] = -dur_ns
            self.say(f"ends {-dur_ns} ns before it starts: it is kept without a length")
            return 0
        if dur_ns > self.longest_ns:
            args["longer_than_recording"] = True
            self.say(f"lasts {dur_ns} ns, longer than the recording")
        return min(dur_ns, TIME_LIMIT_NS)

    def add_record(self, record: Record) -> None:
        """Add a record that is not an event: a name."""
        self._others.append(record)
        self._rows.append((NONE, SPECIAL, len(self._others) - 1, 0, 0, None, NONE))

    def can_end(self, start_ns: int, end_ns: int) -> bool:
        """Whether a range may wait for its end: both times are possible, and few others wait."""
        is_possible = 0 <= start_ns + self.base_ns <= end_ns + self.base_ns <= TIME_LIMIT_NS
        return is_possible and len(self._ends) < ENDS_MAX

    def end_later(self, end_ns: int, shape: Shape, then: Callable[[], None] | None = None) -> None:
        """Add the end of a range when its time comes, and call `then` with it. The range that began last ends
        first.
        """
        self._ended += 1
        heapq.heappush(self._ends, (end_ns, -self._ended, self.tables.long_names.shape(shape), then))

    def _end_until(self, ts_ns: int) -> None:
        """Add the ends up to a time."""
        while self._ends and self._ends[0][0] <= ts_ns:
            end_ns, _, shape, then = heapq.heappop(self._ends)
            self.table = ""
            self.add(end_ns, self.tables.number_of(shape))
            if then:
                then()

    def nests(self, track: object, start_ns: int, end_ns: int) -> bool:
        """Whether a range can be a begin and an end: it is within those that are open on its track, and its
        end can wait. If so, it is open from now on. Ranges come in the order of their starts.
        """
        if not self.can_end(start_ns, end_ns):
            return False
        if len(self._open) >= _ROWS_MAX and track not in self._open:
            self._open = {key: ends for key, ends in self._open.items() if ends and ends[-1] > start_ns}
        ends = self._open.setdefault(track, [])
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if ends and end_ns > ends[-1]:
            return False
        ends.append(end_ns)
        return True

    def say_unread(self, is_read: Callable[[str], bool]) -> None:
        """Add a problem for each table with rows that are not read."""
        for table in self._database.tables:
            if not is_read(table):
                try:
                    if count := self._database.count(table):
                        self.say(counted(count, "row|rows is|are not read"), table=table)
                except BROKEN as e:
                    self.say(f"cannot be read on: {unreadable(e)}", skipped=True, table=table)

    def steps(
        self,
        sources: Iterable[tuple[str, Iterator[Values], AddRow]],
        begin: Callable[[int], None] | None = None,
    ) -> Iterator[None]:
        """Add the rows of several tables in the order of time, in which each table is. A row is its number,
        its time and the rest. `begin` is called with the first time.
        """
        tables = list(sources)

        def dated(at: int, rows: Iterator[Values]) -> Iterator[tuple[int, int, Values]]:
            return ((row[1], at, row) for row in rows)

        in_order = heapq.merge(*(dated(at, rows) for at, (_, rows, _) in enumerate(tables)))
        for ts_ns, at, row in in_order:
            if begin:
                begin(ts_ns)
                begin = None
            self._end_until(ts_ns)
            self.table, _, add = tables[at]
            self.row = row[0]
            add(row[1:])
            yield

    def batches(self, steps: Iterable[object]) -> Iterator[SourceBatch]:
        """The batches of the events that are added while `steps` is iterated. Then the database is closed."""
        with closing(self._database):
            given_bytes = self.tables.given_bytes
            for _ in steps:
                is_full = len(self._rows) >= BATCH_ROWS or len(self.problems) >= BATCH_ROWS
                if is_full or self.tables.given_bytes - given_bytes >= _BATCH_BYTES:
                    yield self._batch()
                    given_bytes = self.tables.given_bytes  # the consumer of batches may reset it to 0
                    if self._rounds != self.tables.shape_rounds:
                        self._rounds = self.tables.shape_rounds
                        self._numbers.clear()
            self._end_until(_NEVER_NS)
            if self._rows or self.problems:
                yield self._batch()

    def _batch(self) -> SourceBatch:
        batch = SourceBatch(event_columns(self._rows), self._others, list(self.problems))
        self._rows, self._others = [], Others()
        self.problems.clear()  # readers hold this one
        return batch


def integers(**values: object) -> Args:
    """The values that are integers, by their names."""
    return {name: value for name, value in values.items() if type(value) is int}


# Recovery of databases whose writer was killed, or still runs.
#
#     run.sqlite           may lack what was committed, or have what never was
#     run.sqlite-wal       pages of transactions that are not in the database yet
#     run.sqlite-journal   pages as they were before a transaction that did not end: a hot journal
#
# SQLite recovers such a database when it opens it, which writes to it. A recording is never changed, so this
# is done with a private copy of all its files.

# A journal of a transaction of several databases ends with this, and names a file with their names before it:
# SQLite would look for that file, and remove it.
_MAGIC: Final = bytes.fromhex("d9d505f920a163d7")
_TRIES: Final = 3
_AGAIN: Final = "Wait until the exporter has ended, or export it again."


def recovered(file: Path) -> Path | None:
    """The copy of a database that SQLite will recover, removed when this process ends; None for a database
    that was closed.

    Raises InputError where its files cannot be copied.
    """
    try:
        # After a transaction a journal is empty, or begins with zeros.
        if not _first_byte(file, "-wal") and _first_byte(file, "-journal") in (b"", b"\0"):
            return None
        for _ in range(_TRIES):
            before = paths.identity(file)
            folder = _copied(file, before)
            if paths.identity(file) == before:
                return Path(folder.name, file.name)
    except OSError as e:
        raise InputError(f"cannot be recovered: {e.strerror}: {e.filename}", _AGAIN) from e
    raise InputError("changes while it is read: its exporter still writes it", _AGAIN)


def _first_byte(file: Path, ending: str) -> bytes:
    """The first byte of a file next to the database, empty where there is none. Raises OSError."""
    try:
        with _opened(Path(f"{file}{ending}")) as opened:
            return opened.read(1)
    except FileNotFoundError:
        return b""


def _opened(path: Path) -> BinaryIO:
    """A file, which is no link, pipe or device. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a file", str(path))
    return os.fdopen(descriptor, "rb")


# A database is opened twice: to look what it is, and to read it.
@lru_cache(maxsize=2)
def _copied(file: Path, identity: paths.Identity) -> tempfile.TemporaryDirectory[str]:
    """A folder with copies of the files that are there. Raises OSError, and InputError for a journal of
    several databases.
    """
    folder = tempfile.TemporaryDirectory(prefix="tracepipe-")
    for ending, found in zip(("", *paths.SQLITE_SIDECARS), identity, strict=True):
        if found is None:
            continue
        with (
            _opened(Path(f"{file}{ending}")) as source,
            Path(folder.name, file.name + ending).open("w+b") as copy,
        ):
            copyfileobj(source, copy)
            # The copy is examined, as its owner may replace the journal at any time.
            copy.seek(-min(len(_MAGIC), copy.tell()), os.SEEK_END)
            if ending == "-journal" and copy.read() == _MAGIC:
                raise InputError(f"cannot be recovered: {file.name}-journal is of several databases", _AGAIN)
    return folder
