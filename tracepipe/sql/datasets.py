"""Asks DuckDB about a dataset. Each layer is a table, with each time a second time as `aligned_…`: on the
reference clock.

A query can read the files of the dataset and no others, and write nothing:

    TMP/dataset ──▶ the folder    the only place that DuckDB may open. The link has no letters with a
                                  meaning in patterns, and no folders that look like partitions
    TMP/spill                     what does not fit into memory
    SELECT                        the only statement that is run; the settings are locked
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tracepipe.dataset.places import RANKS, Dataset
from tracepipe.errors import LibraryMissing, QueryError

_ROWS_OF_PART: Final = 1 << 13
_MEMORY_BYTES, _MEMORY_OF_THREAD_BYTES = 1 << 30, 256 << 20
_ALIGNMENT: Final = "alignment"
_LAYER: Final = re.compile(r"[a-z][a-z_]*")
_TIMES: Final = ("start_ns", "end_ns", "ts_ns", "entry_ns", "exit_ns", "first_exit_ns", "last_exit_ns")
# Division rounds towards zero, and the time before `at_ns` is below it.
_PLACED: Final = """
create schema tracepipe;
create macro tracepipe.floored(product) as
    product // 1000000000 - (product % 1000000000 < 0)::hugeint;
create macro tracepipe.aligned(ns, at_ns, offset_ns, drift_ppb) as
    try_cast(ns::hugeint + offset_ns + tracepipe.floored((ns::hugeint - at_ns) * drift_ppb) as bigint);
create table tracepipe.clock_of_rank (rank bigint, at_ns bigint, offset_ns bigint, drift_ppb bigint);
"""
_CLOCKS: Final = """
insert into tracepipe.clock_of_rank
select distinct on (rank) rank, at_ns, offset_ns, drift_ppb from {ranks} join {alignment} using (clock)
where offset_ns is not null
"""
# SQL type → the type in tables that are written.
_TYPES: Final = {
    **dict.fromkeys(("tinyint", "smallint", "integer", "bigint", "hugeint", "uhugeint"), "Int64"),
    **dict.fromkeys(("utinyint", "usmallint", "uinteger"), "Int64"),
    **dict.fromkeys(("float", "double", "decimal"), "Float64"),
    "ubigint": "UInt64", "boolean": "Boolean", "varchar": "String", "blob": "Binary",
}  # fmt: skip
_IN_LISTS: Final = ("bigint", "integer", "double", "varchar", "boolean")
_INT64: Final = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of an answer. `kind` is its type in a table, and `of` the type of the values of a List.
    `value` converts DuckDB's values, except for null, if the column has others.
    """

    name: str
    kind: str
    of: str = ""
    value: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of an answer, in parts that are made one after the other. A part has the values of each
    column.
    """

    columns: list[Column]
    parts: Iterator[list[Sequence[Any]]]


@contextmanager
def query_dataset(path: str, sql: str) -> Iterator[Rows]:
    """The rows of the last statement of some SQL on the dataset at a path, while the context is open.

    Raises QueryError, also from the parts, InputError where there is no dataset, LibraryMissing.
    """
    dataset, duckdb = Dataset.opened(path), _duckdb()
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as folder:
        link = Path(folder) / "dataset"
        link.symlink_to(dataset.folder.absolute(), target_is_directory=True)
        connection = duckdb.connect(":memory:", config=_settings())
        try:
            with _translated(duckdb, str(link), path):
                _open_only(connection, link, Path(folder) / "spill")
                _make_tables(connection, dataset, link)
                connection.execute("set lock_configuration = true")
                _run(duckdb, connection, sql)
            columns = [_column(name, kind) for name, kind, *_ in connection.description or ()]
            names = _all_different([column.name for column in columns])
            columns = [replace(one, name=name) for name, one in zip(names, columns, strict=True)]
            yield Rows(columns, _parts(duckdb, connection, columns, (str(link), path)))
        finally:
            connection.close()


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as e:
        raise LibraryMissing(
            f"queries of datasets need duckdb, which cannot be imported: {e}",
            "pip install 'tracepipe[ranks]'",
        ) from e
    return duckdb


def _settings() -> dict[str, Any]:
    threads = len(os.sched_getaffinity(0))
    memory_bytes = _MEMORY_BYTES + threads * _MEMORY_OF_THREAD_BYTES
    return {
        "threads": threads,
        "memory_limit": f"{memory_bytes >> 20}MiB",
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        "python_enable_replacements": False,  # else names of tables may be those of variables here
    }


def _open_only(connection: Any, link: Path, spill: Path) -> None:
    """Let DuckDB open nothing but the dataset from here on; no setting can undo this."""
    connection.execute(f"set temp_directory = {_text(str(spill))}")
    connection.execute(f"set allowed_directories = [{_text(f'{link}/')}]")
    connection.execute("set enable_external_access = false")


def _make_tables(connection: Any, dataset: Dataset, link: Path) -> None:
    connection.execute(_PLACED)
    layers = [layer for layer in dataset.layers() if _LAYER.fullmatch(layer)]
    if RANKS in layers and _ALIGNMENT in layers:
        ranks, alignment = _files(link, RANKS), _files(link, _ALIGNMENT)
        connection.execute(_CLOCKS.format(ranks=ranks, alignment=alignment))
    for layer in layers:
        connection.execute(f'create view "{layer}" as {_select(connection, layer, _files(link, layer))}')


def _files(link: Path, layer: str) -> str:
    """The SQL that reads all files of a layer."""
    if layer == _ALIGNMENT:
        return f"read_parquet({_text(f'{link}/layer={layer}/*.parquet')})"
    files = _text(f"{link}/layer={layer}/host=*/rank=*/*.parquet")
    # Names of hosts may look like numbers.
    types = "{'host': varchar, 'rank': bigint}"
    return f"read_parquet({files}, hive_partitioning = true, hive_types = {types})"


def _select(connection: Any, layer: str, files: str) -> str:
    if layer == _ALIGNMENT:
        return f"select * from {files}"
    names = [name for name, *_ in connection.execute(f"describe select * from {files}").fetchall()]
    aligned = "".join(
        f", tracepipe.aligned({name}, at_ns, offset_ns, drift_ppb) as aligned_{name}"
        for name in _TIMES
        if name in names
    )
    clocks = "left join tracepipe.clock_of_rank using (rank)" if aligned else ""
    return f"select host, rank, here.* exclude (host, rank){aligned} from {files} as here {clocks}"


def _run(duckdb: Any, connection: Any, sql: str) -> None:
    """Run all statements. Raises QueryError where one is not a SELECT."""
    statements = duckdb.extract_statements(sql)
    if not statements:
        raise QueryError("There is no statement.")
    for statement in statements:
        if statement.type != duckdb.StatementType.SELECT:
            raise QueryError(f"A dataset is only read: {statement.type.name} is not taken, SELECT is.")
    for statement in statements:
        connection.execute(statement)


def _column(name: str, kind: Any) -> Column:
    if kind.id == "list":
        of = kind.children[0][1].id
        return Column(name, "List", _TYPES[of]) if of in _IN_LISTS else Column(name, "String", value=str)
    if kind.id not in _TYPES:
        return Column(name, "String", value=str)
    return Column(name, _TYPES[kind.id], value=_VALUES.get(kind.id))


def _all_different(names: list[str]) -> list[str]:
    """The names of columns, made unique as a table needs them: `rank`, `rank_2`."""
    found: list[str] = []
    for name in names:
        number, free = 1, name
        while free in found:
            number += 1
            free = f"{name}_{number}"
        found.append(free)
    return found


def _parts(
    duckdb: Any, connection: Any, columns: list[Column], names: tuple[str, str]
) -> Iterator[list[Sequence[Any]]]:
    while columns:
        with _translated(duckdb, *names):
            rows = connection.fetchmany(_ROWS_OF_PART)
            if not rows:
                return
        yield [
            values if column.value is None else [None if one is None else column.value(one) for one in values]
            for column, values in zip(columns, zip(*rows, strict=True), strict=True)
        ]


def _whole(value: int) -> int:
    if value not in _INT64:
        raise QueryError(f"{value} has more than 64 bits: cast it to DOUBLE.")
    return value


# SQL type → what makes a value, where DuckDB gives another.
_VALUES: Final[dict[str, Callable[[Any], Any]]] = {"hugeint": _whole, "uhugeint": _whole, "decimal": float}


@contextmanager
def _translated(duckdb: Any, link: str, path: str) -> Iterator[None]:
    """Raise DuckDB's errors as QueryError with the path of the dataset, and Ctrl-C as KeyboardInterrupt."""
    try:
        yield
    except duckdb.InterruptException as e:
        raise KeyboardInterrupt from e
    except duckdb.Error as e:
        raise QueryError(str(e).replace(link, path)) from e
    except RuntimeError as e:
        if "interrupted" in str(e):
            raise KeyboardInterrupt from e
        raise


def _text(value: str) -> str:
    """A text in SQL."""
    return "'" + value.replace("'", "''") + "'"
