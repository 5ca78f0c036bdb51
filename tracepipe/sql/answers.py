"""Writes the rows of a query as a text table, as JSON, and in the formats of exported tables."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

from tracepipe.errors import QueryError
from tracepipe.present.writing.table_formats import write_table
from tracepipe.printable import json_pieces, json_text, printable
from tracepipe.sql.processor import Answer
from tracepipe.sql.tables import Rows
from tracepipe.store.tables import connect, object_column

_NULL = "–"
_KINDS: Final[dict[str, set[type]]] = {
    "varchar": {str}, "bigint": {int}, "double": {int, float}, "blob": {bytes},
}  # fmt: skip
_MEMORY_MB: Final = 500
_SHOWN_MAX = 100_000
"""The rows of a table for people, whose columns are as wide as the widest text in any row."""


def as_json(answer: Answer) -> dict[str, Any]:
    """Columns, and an object for each row; bytes become hexadecimal digits."""
    rows = [dict(zip(answer.columns, row, strict=True)) for row in _without_bytes(answer)]
    return {"columns": answer.columns, "rows": rows}


def _without_bytes(answer: Answer) -> list[list[Any]]:
    """Rows for formats that have no bytes."""
    return [[value.hex() if isinstance(value, bytes) else value for value in row] for row in answer.rows]


def table_lines(answer: Answer) -> Iterator[str]:
    """A line of names, and one for each row; numbers are aligned to the right."""
    if not answer.columns:
        return
    texts = [list(map(printable, answer.columns)), *([_text(value) for value in row] for row in answer.rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    # A column is numeric if each of its values is a number or null.
    right = [
        all(value is None or isinstance(value, int | float) for value in column)
        for column in zip(*answer.rows, strict=True)
    ] or [False] * len(widths)
    for row in texts:
        cells = zip(row, widths, right, strict=True)
        line = "  ".join(
            text.rjust(width) if is_right else text.ljust(width) for text, width, is_right in cells
        )
        yield line.rstrip()


def _text(value: object) -> str:
    if value is None:
        return _NULL
    return value.hex() if isinstance(value, bytes) else printable(str(value))


def write_answer(answer: Answer, form: str, out: BinaryIO) -> None:
    """Write an answer as table, json, or in one of the formats of tables. Raises QueryError."""
    if form == "table":
        out.write("".join(f"{line}\n" for line in table_lines(answer)).encode())
        return
    if form == "json":
        out.write(f"{json_text(as_json(answer), indent=True)}\n".encode())
        return
    if not answer.columns:
        raise QueryError("The last statement has no rows.")
    _write_values(answer.columns, answer.rows, form, out)


def _write_values(names: list[str], rows: list[list[Any]], form: str, out: BinaryIO) -> None:
    """Write the values of an answer, whose columns have a type if all of their values have it."""
    columns, shown = {}, []
    for at, name in enumerate(names):
        values = [row[at] for row in rows]
        kinds = {type(value) for value in values if value is not None}
        kind = next((kind for kind, types in _KINDS.items() if kinds <= types), "varchar")
        if kind == "varchar" or (kind == "blob" and form == "csv"):
            kind, values = "varchar", [_plain(value) for value in values]
        columns[f"column_{at}"] = object_column(values)
        quoted = name.replace('"', '""')
        shown.append(f'column_{at}::{kind} as "{quoted}"')
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as folder:
        connection = connect(":memory:", Path(folder), memory_mb=_MEMORY_MB)
        try:
            connection.register("given", columns)
            write_table(connection, f"select {', '.join(shown)} from given", out, form)
        finally:
            connection.close()


def _plain(value: object) -> str | None:
    if value is None:
        return None
    return value.hex() if isinstance(value, bytes) else str(value)


def write_rows(rows: Rows, form: str, out: BinaryIO) -> int:
    """Write rows in the same formats, and return their number. Raises QueryError."""
    if form not in ("table", "json"):
        return rows.write(form, out)
    count = 0

    def parts() -> Iterator[list[dict[str, Any]]]:
        nonlocal count
        for part in rows.parts():
            count += len(part)
            yield as_json(Answer(rows.columns, [list(row) for row in part]))["rows"]

    if form == "json":
        for text in json_pieces({"columns": rows.columns, "rows": chain.from_iterable(parts())}):
            out.write(text.encode())
        out.write(b"\n")
        return count
    shown: list[list[Any]] = []
    for part in rows.parts():
        shown += map(list, part)
        if len(shown) > _SHOWN_MAX:
            raise QueryError(
                f"More than {_SHOWN_MAX:,} rows: write them with --format, or take fewer with LIMIT."
            )
    write_answer(Answer(rows.columns, shown), form, out)
    return len(shown)
