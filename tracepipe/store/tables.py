"""Writes the tables of a store, and opens them again: all that knows DuckDB's file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np

from tracepipe.errors import LibraryMissing, OutputError, TracepipeError
from tracepipe.event.columns import NONE, Int32s, Ints
from tracepipe.libraries import check_room
from tracepipe.store.numbered import Numbered
from tracepipe.store.schema import FRAMES, FUNCTIONS, IS_CALL, LENGTHS, SPANS, TABLES

# Connections must not write to the same temporary files.
_CONNECTIONS = count()
FILE: Final = "store.duckdb"
_MORE_ROOM: Final = "Name a folder with room in TRACEPIPE_CACHE, or in TMPDIR."
# A transaction of more rows takes too much memory, whatever the limit.
_ROWS_A_COMMIT: Final = 500_000
# What DuckDB may use. It takes some 70 MB more, which it does not count.
_WRITING_MB: Final = 100
# The most that it may ever use.
_MEMORY_MB_MAX: Final = 64_000
_TEXTS_AT_ONCE: Final = 1 << 14
_RENUMBERED_AT_ONCE: Final = 1 << 17
_RENUMBERED: Final = ("id", "parent", "depth", "top")


def connect(path: str, folder: Path, *, memory_mb: int, threads: int = 0) -> Any:
    """A connection to a file of DuckDB, or to ":memory:". Raises LibraryMissing, OutputError, and
    TracepipeError where there is too little room for it.
    """
    check_room()
    try:
        import duckdb
    except ImportError as e:
        raise LibraryMissing(f"duckdb cannot be imported: {e}", "pip install duckdb") from e
    config: dict[str, Any] = {
        "memory_limit": f"{memory_mb}MB",
        "temp_directory": str(folder / f"spilled-{os.getpid()}-{next(_CONNECTIONS)}"),
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "arrow_large_buffer_size": True,  # columns of text have no limit of 2 GB
        # The type of a column of objects must fit all of them, and by default some 1,000 are looked at.
        "pandas_analyze_sample": 1 << 30,
    }
    if threads:
        config["threads"] = threads
    try:
        connection = duckdb.connect(path, config=config)
        # DuckDB 2.0 draws it on standard output after two seconds, also where that is no terminal.
        connection.execute("set enable_progress_bar = false")
        return connection
    except duckdb.Error as e:
        raise OutputError(f"cannot open the tables of a recording: {_first_line(e)}", _MORE_ROOM) from e


def connect_to_ask(folder: Path, *, memory_mb: int) -> Any:
    """A connection whose catalog `store` has the tables in a folder, which are only read. Raises
    LibraryMissing and OutputError.
    """
    con = connect(":memory:", Path(tempfile.gettempdir()), memory_mb=memory_mb)
    path = str(folder / FILE).replace("'", "''")
    import duckdb

    try:
        con.execute(f"attach '{path}' as store (read_only)")
    except duckdb.Error as e:
        raise OutputError(f"cannot open the tables of a recording: {_first_line(e)}", "") from e
    return con


def more_memory(connection: Any, memory_mb: int, error: Exception) -> int:
    """Let DuckDB use four times `memory_mb` after an error, as that was too little. Return the new limit.
    Raises MemoryError where the machine has no more.
    """
    if memory_mb > _MEMORY_MB_MAX or "bad allocation" in str(error):
        raise MemoryError(_first_line(error)) from error
    connection.execute(f"set memory_limit = '{4 * memory_mb}MB'")
    return 4 * memory_mb


def object_column(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A column for DuckDB, whose values may be None. An array stays as it is."""
    return values if isinstance(values, np.ndarray) else np.fromiter(values, object, len(values))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Writer:
    """Writes the tables of `schema.TABLES` into a folder. All methods raise OutputError."""

    def __init__(self, folder: Path) -> None:
        self._con = connect(str(folder / FILE), folder, memory_mb=_WRITING_MB, threads=1)
        self._con.execute("begin")
        for table, columns in TABLES.items():
            self._con.execute(f'create table "{table}" ({typed(columns)})')
        self._uncommitted = 0
        self._filled: set[str] = set()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._execute("commit")
        finally:
            self._con.close()

    def _execute(self, sql: str, **tables: dict[str, Any]) -> dict[str, Any]:
        """The columns of an answer. `tables` are tables of numpy columns, which `sql` may name."""
        import duckdb

        try:
            for name, table in tables.items():
                # A view of rows must be contiguous.
                columns = {key: np.ascontiguousarray(column) for key, column in table.items()}
                self._con.register(name, columns)
            found: dict[str, Any] = self._con.execute(sql).fetchnumpy()
            for name in tables:
                self._con.unregister(name)
        except duckdb.Error as e:
            raise _refused(e) from e
        return found

    def put(self, table: str, columns: dict[str, Any]) -> None:
        """Append rows, given as numpy columns of one length by their names."""
        names = ", ".join(f'"{name}"' for name in columns)
        self._execute(f'insert into "{table}" ({names}) select {names} from given', given=columns)
        self._filled.add(table)
        self._added(len(next(iter(columns.values()))))

    def _added(self, rows: int) -> None:
        """Commit when many rows were added."""
        self._uncommitted += rows
        if self._uncommitted > _ROWS_A_COMMIT:
            self._execute("commit")
            self._execute("begin")
            self._uncommitted = 0

    def put_rows(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Append rows, given as tuples of all columns; None stands for null."""
        if not rows:
            return
        import duckdb

        kinds = TABLES[table].values()
        # Columns of objects: statements with values take a hundred times as long.
        columns = {
            f"c{at}": np.array([_plain(value) for value in of], object)
            for at, of in enumerate(zip(*rows, strict=True))
        }
        names = ", ".join(f"{name}::{kind}" for name, kind in zip(columns, kinds, strict=True))
        try:
            self._con.execute(f'insert into "{table}" select {names} from columns')
        except duckdb.Error as e:
            raise _refused(e) from e

    def put_texts(self, table: str, texts: Numbered) -> None:
        """Append texts with their numbers; invalid Unicode is replaced."""
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            numbers = range(start, min(start + _TEXTS_AT_ONCE, len(texts)))
            some = np.array([texts[at].decode("utf-8", "replace") for at in numbers], object)
            self.put(table, {"number": np.arange(numbers.start, numbers.stop, dtype=np.int32), "text": some})

    def sum_up(self) -> None:
        """Write the tables of sums. Everything else is written."""
        lengths = ", ".join(LENGTHS.values())
        # Most recordings have few layers, and each statement takes some ms.
        for table in FRAMES:
            if table != "gpu_thread" and table in self._filled:
                self.rows(
                    f"""insert into shape_sums select '{table}', shape, kind, parent = -1, count(*),
                    sum(end_ns - start_ns) from "{table}" group by all"""
                )
        for table, activity in FUNCTIONS.items():
            if table in self._filled:
                self.rows(
                    f"""insert into lengths select '{table}', s.name_text, s.layer, {lengths}
                    from "{table}" x join shapes s using (shape) where {IS_CALL} group by all"""
                )
            self.rows(
                f"""insert into lengths select '{table}', null, null, {lengths} from "{table}" x
                where {activity}"""
            )

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of an answer about the tables so far. DuckDB gets more memory where it has too little, as
        percentiles need all lengths at once.
        """
        import duckdb

        memory_mb = _WRITING_MB
        self._execute("commit")
        while True:
            self._execute("begin")
            try:
                found: list[tuple[Any, ...]] = self._con.execute(sql).fetchall()
                return found
            except duckdb.OutOfMemoryException as e:
                self._execute("rollback")
                memory_mb = more_memory(self._con, memory_mb, e)
            except duckdb.Error as e:
                raise _refused(e) from e

    def by_id(self, table: str, columns: Sequence[str]) -> dict[str, Any]:
        """Columns of a table of spans in the order of its ids, which count from 0."""
        names = ", ".join(dict.fromkeys(("id", *columns)))
        found = self._execute(f'select {names} from "{table}"')
        place = found["id"]
        if bool((place[1:] < place[:-1]).any()):
            for name in columns:
                values = np.empty_like(found[name])
                values[place] = found[name]
                found[name] = values
        return found

    def of_shapes(self, table: str, shapes: Ints, columns: Sequence[str]) -> dict[str, Any]:
        """Columns of the rows of a table of spans that have some shapes, in any order."""
        names = ", ".join(columns)
        sql = f'select {names} from "{table}" where shape in (select shape from given)'
        return self._execute(sql, given={"shape": shapes})

    def give_stacks(self, table: str, ids: Int32s, stack: Int32s) -> None:
        """Set the stacks of some rows of a table of spans."""
        sql = f'update "{table}" set stack = given.stack from given where "{table}".id = given.id'
        self._execute(sql, given={"id": ids[stack != NONE], "stack": stack[stack != NONE]})

    def replace(
        self, source: str, table: str, new: Int32s, parent: Int32s, depth: Int32s, top: Int32s
    ) -> None:
        """Make `table` of the rows of `source`, with other values.

        All columns are by the old ids. `new` has the new ids, or NONE for rows to leave out, and a last value
        of NONE; `parent` and `top` have old ids.
        """
        names = ", ".join(f'{"m" if name in _RENUMBERED else "s"}."{name}"' for name in SPANS)
        self._execute(f"create table renumbered ({typed(SPANS)})")
        for first in range(0, len(parent), _RENUMBERED_AT_ONCE):
            part = slice(first, min(first + _RENUMBERED_AT_ONCE, len(parent)))
            given = {
                "old": np.arange(part.start, part.stop, dtype=np.int32),
                "id": new[part],
                "parent": new[parent[part]],
                "depth": depth[part],
                "top": new[top[part]],
            }
            self._execute(
                f'insert into renumbered select {names} from "{source}" s join given m on s.id = m.old '
                f"where s.id >= {part.start} and s.id < {part.stop} and m.id >= 0",
                given=given,
            )
            self._added(part.stop - part.start)
        self._filled.add(table)
        self._execute(f'drop table "{table}"')
        self._execute(f'alter table renumbered rename to "{table}"')


def _plain(value: object) -> object:
    """A value without lone surrogates, which are no Unicode."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def typed(columns: dict[str, str]) -> str:
    """Columns and their types, as a statement that makes a table has them."""
    return ", ".join(f'"{name}" {kind}' for name, kind in columns.items())


def _refused(error: Exception) -> TracepipeError | MemoryError:
    if "bad allocation" in str(error):  # the machine's memory, not DuckDB's own limit
        return MemoryError(_first_line(error))
    return OutputError(
        f"cannot write the tables of a recording: {_first_line(error)}",
        _MORE_ROOM,
    )
