"""Writes the tables of a store, and opens them again: all that knows DuckDB's file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np

from tracepipe.errors import LibraryMissing, OutputError, TracepipeError
from tracepipe.store.numbered import Numbered
from tracepipe.store.schema import SPANS, TABLES

FILE: Final = "store.duckdb"
# A transaction of more rows takes too much memory, whatever the limit.
_ROWS_A_COMMIT: Final = 1_000_000
# What DuckDB may use. It takes some 70 MB more, which it does not count.
_WRITING_MB: Final = 100
_TEXTS_AT_ONCE: Final = 1 << 14


def connect(path: str, folder: Path, *, memory_mb: int, threads: int = 0) -> Any:
    """A connection to a file of DuckDB, or to ":memory:". Raises LibraryMissing and OutputError."""
    try:
        import duckdb
    except ImportError as e:
        raise LibraryMissing(f"duckdb cannot be imported: {e}", "pip install duckdb") from e
    config: dict[str, Any] = {
        "memory_limit": f"{memory_mb}MB",
        "temp_directory": str(folder / f"spilled-{os.getpid()}"),
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    if threads:
        config["threads"] = threads
    try:
        return duckdb.connect(path, config=config)
    except duckdb.Error as e:
        raise OutputError(f"cannot open the tables of a recording: {_first_line(e)}", "") from e


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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Writer:
    """Writes the tables of `schema.TABLES` into a folder. All methods raise OutputError."""

    def __init__(self, folder: Path) -> None:
        self._con = connect(str(folder / FILE), folder, memory_mb=_WRITING_MB, threads=1)
        for table, columns in TABLES.items():
            self._con.execute(f'create table "{table}" ({_typed(columns)})')
        self._con.execute("begin")
        self._uncommitted = 0

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

    def _execute(self, sql: str, given: Any = None) -> Any:
        import duckdb

        try:
            return self._con.execute(sql, given) if given is not None else self._con.execute(sql)
        except duckdb.Error as e:
            raise _refused(e) from e

    def put(self, table: str, columns: dict[str, Any]) -> None:
        """Append rows, given as numpy columns of one length by their names."""
        names = ", ".join(f'"{name}"' for name in columns)
        # DuckDB finds `columns` by its name; a view of rows must be contiguous.
        columns = {name: np.ascontiguousarray(column) for name, column in columns.items()}
        import duckdb

        try:
            self._con.execute(f'insert into "{table}" ({names}) select {names} from columns')
        except duckdb.Error as e:
            raise _refused(e) from e
        self._uncommitted += len(next(iter(columns.values())))
        if self._uncommitted > _ROWS_A_COMMIT:
            self._execute("commit")
            self._execute("begin")
            self._uncommitted = 0

    def put_rows(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Append a few rows, given as tuples of all columns."""
        if rows:
            import duckdb

            places = ", ".join("?" for _ in rows[0])
            try:
                self._con.executemany(
                    f'insert into "{table}" values ({places})', [_plain(row) for row in rows]
                )
            except duckdb.Error as e:
                raise _refused(e) from e

    def put_texts(self, table: str, texts: Numbered) -> None:
        """Append texts with their numbers; invalid Unicode is replaced."""
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            numbers = range(start, min(start + _TEXTS_AT_ONCE, len(texts)))
            some = np.array([texts[at].decode("utf-8", "replace") for at in numbers], object)
            self.put(table, {"number": np.arange(numbers.start, numbers.stop, dtype=np.int32), "text": some})

    def by_id(self, table: str, columns: Sequence[str]) -> dict[str, Any]:
        """Columns of a table of spans in the order of its ids, which count from 0."""
        names = ", ".join(dict.fromkeys(("id", *columns)))
        found: dict[str, Any] = self._execute(f'select {names} from "{table}"').fetchnumpy()
        place = found["id"]
        if len(place) and bool((place[1:] < place[:-1]).any()):
            order = np.empty(len(place), np.int64)
            order[place] = np.arange(len(place))
            found = {name: column[order] for name, column in found.items()}
        return found

    def replace(self, source: str, table: str, ids: dict[str, Any]) -> None:
        """Make `table` of the rows of `source` that have an id in `old`, with the columns of `ids`."""
        names = ", ".join(f'{"m" if name in ids else "s"}."{name}"' for name in SPANS)
        import duckdb

        try:
            self._con.execute(
                f'create table renumbered as select {names} from "{source}" s '
                "join ids m on s.id = m.old order by m.id"
            )
        except duckdb.Error as e:
            raise _refused(e) from e
        self._execute(f'drop table "{table}"')
        self._execute(f'alter table renumbered rename to "{table}"')


def _plain(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row without lone surrogates, which are no Unicode."""
    return tuple(
        value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for value in row
    )


def _typed(columns: dict[str, str]) -> str:
    return ", ".join(f'"{name}" {kind}' for name, kind in columns.items())


def _refused(error: Exception) -> TracepipeError:
    return OutputError(
        f"cannot write the tables of a recording: {_first_line(error)}",
        "Name a folder with room in TRACEPIPE_CACHE, or in TMPDIR.",
    )
