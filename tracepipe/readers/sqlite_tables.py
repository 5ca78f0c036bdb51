"""Reads tables of foreign SQLite databases in order, in little memory.

A database may be hostile, as its schema is code. Views, triggers, virtual tables and computed columns are
never used, no extension can be loaded, and a statement can only read plain columns of plain tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import quote

from tracepipe.errors import InputError
from tracepipe.event.model import Problem
from tracepipe.readers.event_rows import Values

# Errors may quote bytes of the database that are not text, and lengths in it may be of any size.
BROKEN: Final = (sqlite3.Error, UnicodeError, MemoryError)
"""The exceptions that reading a broken database may raise."""

_CACHE_KIB: Final = 512
# A table with a longer text cannot be read on. Profilers write none, but a text may have a gigabyte.
_LONGEST_BYTES: Final = 1 << 20
# A recording has some hundred tables of some dozen columns.
_TABLES_MAX, _COLUMNS_MAX = 4096, 512
# Steps of SQLite's machine between two checks for signals: some tens of milliseconds.
_STEPS: Final = 1 << 20
# The most texts that are remembered, and the longest: at most 4 MB, usually some hundred KB.
_STRINGS_MAX: Final = 1 << 12
_STRING_LENGTH_MAX: Final = 1 << 10
_READS: Final = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ})
_FUNCTIONS: Final = frozenset({"count"})


class Database:
    """The plain tables of a database. Raises InputError where it cannot be opened, or has no schema.

    `tables` has the stored columns of each table, not the computed ones.
    """

    def __init__(self, stream: BinaryIO) -> None:
        # The name is resolved here, as SQLite would resolve /proc/self/fd itself.
        name = Path(f"/proc/self/fd/{stream.fileno()}").resolve()
        self._connection = sqlite3.connect(
            f"file:{quote(str(name))}?mode=ro&immutable=1", uri=True, check_same_thread=False
        )
        self._connection.text_factory = lambda text: text.decode("utf-8", "replace")
        try:
            self._limit()
            self.tables = self._plain_tables()
        except BROKEN as e:
            self.close()
            raise InputError(f"cannot be read: {unreadable(e)}", "Export or copy it again.") from e
        except BaseException:
            self.close()
            raise
        self._is_asking = False  # of the schema: Python 3.10 cannot take an authorizer away again
        self._connection.set_authorizer(self._may)
        self._connection.set_progress_handler(lambda: 0, _STEPS)

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _limit(self) -> None:
        connection = self._connection
        for pragma in (
            f"cache_size = -{_CACHE_KIB}",
            "mmap_size = 0",
            "temp_store = FILE",
            "trusted_schema = OFF",
            "cell_size_check = ON",
        ):
            connection.execute(f"PRAGMA {pragma}")
        if hasattr(connection, "setlimit"):  # from Python 3.11 on
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_BYTES)
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)

    def _plain_tables(self) -> dict[str, tuple[str, ...]]:
        # A virtual table has no root page.
        found = self._connection.execute(
            "SELECT name FROM sqlite_master"
            " WHERE type = 'table' AND rootpage > 0 AND name NOT LIKE 'sqlite_%'"
        )
        names = [name for (name,) in found.fetchmany(_TABLES_MAX) if isinstance(name, str)]
        tables = {}
        for name in names:
            columns = self._connection.execute(f"PRAGMA table_xinfo({quoted(name)})").fetchmany(_COLUMNS_MAX)
            tables[name] = tuple(column[1] for column in columns if not column[6])
        return tables

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
    ) -> Iterator[Values]:
        """Rows of a table by time: the number of the row, and the columns. A row whose time, the first
        column, is not an integer is left out, with a problem. A table that cannot be read on gets a problem
        too.

        SQLite sorts in its own files, as indexes of a foreign database cannot be trusted.
        """
        here = {name.lower() for name in self.tables[table]}
        by = [one for one in order if one.split()[0].lower() in here]
        found = ", ".join(self._columns(table, ("rowid", *columns)))
        sql = (
            f"SELECT {found} FROM {quoted(table)} NOT INDEXED {where} ORDER BY {', '.join(map(_ordered, by))}"
        )
        return self.dated(table, sql, problems)

    def dated(self, table: str, sql: str, problems: list[Problem]) -> Iterator[Values]:
        """Rows of a statement, as `in_order` returns those of a table."""
        try:
            for row in self._connection.execute(sql):
                if type(row[1]) is int:
                    yield row
                else:
                    problems.append(Problem(0, f"{table} row {row[0]}", "its time is not an integer"))
        except BROKEN as e:
            problems.append(Problem(0, table, f"cannot be read on: {unreadable(e)}"))

    def texts(self, table: str, columns: Sequence[str], most: int, problems: list[Problem]) -> list[Values]:
        """The first rows of a small table, `most` of them; none where there is no such table."""
        if table not in self.tables:
            return []
        try:
            rows = list(self._first(table, columns, most + 1))
        except BROKEN as e:
            problems.append(Problem(0, table, f"cannot be read on: {unreadable(e)}"))
            return []
        if len(rows) > most:
            problems.append(Problem(0, table, f"has over {most} rows: the first are used", skipped=False))
        return rows[:most]

    def _first(self, table: str, columns: Sequence[str], count: int) -> Iterator[Values]:
        return self.select(table, columns, "LIMIT ?", (count,))


def _ordered(column: str) -> str:
    name, _, way = column.partition(" ")
    return f"{quoted(name)} {way}".rstrip()


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
        self._database, self._table, self._names = database, table, (value,)
        self._rest = f"WHERE {quoted(key)} = ?"
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
        if number in self._known:
            return self._known[number]
        if not self._is_keyed:
            return None
        text = self._look(number)
        if len(self._known) >= _STRINGS_MAX:
            self._known.clear()
        # A longer text is looked up each time.
        if text is None or len(text) <= _STRING_LENGTH_MAX:
            self._known[number] = text
        return text

    def _look(self, number: int) -> str | None:
        try:
            found = next(self._database.select(self._table, self._names, self._rest, (number,)), None)
        except BROKEN as e:
            self._problems.append(Problem(0, f"{self._table} row {number}", unreadable(e), skipped=False))
            return None
        return found[0] if found and type(found[0]) is str else None
