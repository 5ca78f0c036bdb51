"""Formats of exported tables: Parquet and CSV, which DuckDB writes, and Arrow, which pyarrow writes."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from tracepipe.errors import LibraryMissing, OutputError
from tracepipe.store.tables import connect, object_column

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from tracepipe.store.run import Run

FORMATS: Final = ("parquet", "arrow", "csv")
"""The formats; the name is also the ending of the files."""
TYPES: Final = {
    "BIGINT": "Int64",
    "UBIGINT": "UInt64",
    "DOUBLE": "Float64",
    "VARCHAR": "String",
    "BOOLEAN": "Boolean",
}
"""DuckDB's types → their names in the documents and in `run.json`."""
# Text that a spreadsheet would run as a formula gets a quote in front, which makes it text (OWASP, "CSV
# Injection"). A number is not a formula, though it may begin with a sign.
_FORMULA, _NUMBER = r"^[=+\-@＝＋－＠\t\r\n]", r"^[+-]?[0-9]+(\.[0-9]+)?$"
# The rows of a row group of Parquet, for which it has least and greatest values; and of a batch of Arrow.
_ROWS_OF_GROUP, _ROWS_OF_BATCH = 1 << 16, 1 << 13
_MEMORY_MB, _COLUMNS_MEMORY_MB = 300, 500


def write_table(
    connection: DuckDBPyConnection, question: str, out: BinaryIO, to: str, folder: str | None = None
) -> int:
    """Write the answer to a SELECT in one of `FORMATS`, and return the number of rows. `folder` is where
    DuckDB may write, if it may not write everywhere.

    Raises LibraryMissing if Arrow is wanted without pyarrow, OSError and OutputError on a full disk, and the
    errors of DuckDB.
    """
    import duckdb

    try:
        if to == "arrow":
            return _write_arrow(connection, question, out)
        if folder is None and _is_new_file(out):
            count = _copy(connection, question, f"/dev/fd/{out.fileno()}", to)
            out.seek(0, os.SEEK_END)
            return count
        with tempfile.NamedTemporaryFile(prefix="tracepipe-", dir=folder) as file:
            count = _copy(connection, question, file.name, to)
            shutil.copyfileobj(file, out)
            return count
    except duckdb.IOException as e:
        if "No space left" not in str(e):
            raise
        raise OutputError(f"cannot write a table as {to}: {e}", "Free some space, or use -o.") from e


def write_question(run: Run, question: str, out: BinaryIO, to: str) -> None:
    """Write the answer to a SELECT about a recording to a new file. Raises as `write_table`."""

    def write() -> None:
        out.seek(0)
        out.truncate()
        write_table(run.connection, question, out, to)

    # Rows are sorted, which long texts may need more memory for.
    run.connection.execute(f"set memory_limit = '{_MEMORY_MB}MB'")
    run.store.ask(write)


def write_columns(columns: Mapping[str, tuple[str, Sequence[Any]]], out: BinaryIO, to: str) -> None:
    """Write columns of one length, each with its type of DuckDB. Raises as `write_table`."""
    table, shown = {}, []
    for at, (name, (kind, values)) in enumerate(columns.items()):
        table[f"column_{at}"] = object_column(values)
        quoted = name.replace('"', '""')
        shown.append(f'column_{at}::{kind} as "{quoted}"')
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as folder:
        connection = connect(":memory:", Path(folder), memory_mb=_COLUMNS_MEMORY_MB)
        try:
            connection.register("given", table)
            write_table(connection, f"select {', '.join(shown)} from given", out, to)
        finally:
            connection.close()


def _is_new_file(out: BinaryIO) -> bool:
    try:
        status = os.fstat(out.fileno())
    except OSError:  # a file in memory
        return False
    return stat.S_ISREG(status.st_mode) and not status.st_size


def _copy(connection: DuckDBPyConnection, question: str, path: str, to: str) -> int:
    how = f"format parquet, compression zstd, row_group_size {_ROWS_OF_GROUP}"
    if to == "csv":
        how, answer = "format csv, header", connection.sql(question)
        names = (f'"{name}"'.replace('"', '""')[1:-1] for name in answer.columns)
        shown = (
            f"case when regexp_matches({name}, '{_FORMULA}') and not regexp_matches({name}, '{_NUMBER}') "
            f"then '''' || {name} else {name} end as {name}"
            if str(kind) == "VARCHAR"
            else name
            for name, kind in zip(names, answer.types, strict=True)
        )
        question = f"select {', '.join(shown)} from ({question}\n)"
    place = path.replace("'", "''")
    done = connection.execute(f"copy ({question}\n) to '{place}' ({how}, use_tmp_file false)").fetchone()
    return int(done[0]) if done else 0


def _write_arrow(connection: DuckDBPyConnection, question: str, out: BinaryIO) -> int:
    count = 0
    try:
        from pyarrow import ipc
    except ImportError as e:
        raise LibraryMissing(
            f"Arrow files need pyarrow, which cannot be imported: {e}", "pip install pyarrow"
        ) from e
    answer = connection.sql(question)
    # Older versions of DuckDB have another name for it.
    read = getattr(answer, "to_arrow_reader", None) or answer.fetch_arrow_reader
    with read(_ROWS_OF_BATCH) as batches:
        options = ipc.IpcWriteOptions(compression="zstd")
        with ipc.new_file(out, batches.schema, options=options) as file:
            for batch in batches:
                file.write_batch(batch)
                count += len(batch)
    return count
