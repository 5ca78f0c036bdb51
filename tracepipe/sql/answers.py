"""Writes the rows of a query as a text table, as JSON, and in the formats of exported tables."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, Final

from tracepipe.errors import QueryError
from tracepipe.present.writing.table_formats import write_columns
from tracepipe.printable import json_pieces, json_schema, json_text, printable
from tracepipe.sql.processor import Answer
from tracepipe.sql.tables import Rows

_NULL = "–"
_KINDS: Final[dict[str, set[type]]] = {
    "varchar": {str}, "bigint": {int}, "double": {int, float}, "blob": {bytes},
}  # fmt: skip
_SHOWN_MAX = 100_000
"""The rows of a table for people, whose columns are as wide as the widest text in any row."""


def as_json(answer: Answer) -> dict[str, Any]:
    """The form, columns, and an object for each row; bytes become hexadecimal digits."""
    plain = ([one.hex() if isinstance(one, bytes) else one for one in row] for row in answer.rows)
    rows = [dict(zip(answer.columns, row, strict=True)) for row in plain]
    return {"schema": json_schema("query"), "columns": answer.columns, "rows": rows}


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
    columns: dict[str, tuple[str, list[Any]]] = {}
    for at, name in enumerate(answer.columns):
        # A column has a type if all of its values have it.
        values = [row[at] for row in answer.rows]
        kinds = {type(value) for value in values if value is not None}
        kind = next((kind for kind, types in _KINDS.items() if kinds <= types), "varchar")
        if kind == "varchar" or (kind == "blob" and form == "csv"):
            plain = (value.hex() if isinstance(value, bytes) else value for value in values)
            kind, values = "varchar", [None if value is None else str(value) for value in plain]
        columns[name] = kind, values
    write_columns(columns, out, form)


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
        for text in json_pieces({**as_json(Answer(rows.columns, [])), "rows": chain.from_iterable(parts())}):
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
