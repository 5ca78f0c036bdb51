"""Writes the rows of a query as a text table, as JSON, and in the formats of exported tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, BinaryIO

from tracepipe.errors import QueryError
from tracepipe.printable import json_pieces, json_text, printable
from tracepipe.sql.datasets import Column, Rows
from tracepipe.sql.processor import Answer

_NULL = "–"
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
    """Write an answer as table, json, or in one of the formats of tables."""
    if form == "table":
        out.write("".join(f"{line}\n" for line in table_lines(answer)).encode())
        return
    if form == "json":
        out.write(f"{json_text(as_json(answer), indent=True)}\n".encode())
        return
    from tracepipe.present.writing.table_formats import write_table
    from tracepipe.reports.frames.libraries import pl

    rows = _without_bytes(answer) if form == "csv" else answer.rows
    frame = pl.DataFrame(rows, schema=answer.columns, orient="row", infer_schema_length=None)
    write_table(frame.schema, iter([frame]), out, form)


def write_rows(rows: Rows, form: str, out: BinaryIO) -> int:
    """Write rows as they come, in the same formats, and return their number. Raises QueryError."""
    count = 0

    def counted() -> Iterator[list[Sequence[Any]]]:
        nonlocal count
        for part in rows.parts:
            count += len(part[0])
            yield part

    names = [column.name for column in rows.columns]
    if form == "table":
        write_answer(Answer(names, _few(counted())), form, out)
    elif form == "json":
        lines = (as_json(Answer(names, _across(part)))["rows"] for part in counted())
        for text in json_pieces({"columns": names, "rows": chain.from_iterable(lines)}):
            out.write(text.encode())
        out.write(b"\n")
    else:
        _write_frames(rows.columns, counted(), form, out)
    return count


def _across(part: list[Sequence[Any]]) -> list[list[Any]]:
    """The rows of a part."""
    return [list(row) for row in zip(*part, strict=True)]


def _few(parts: Iterator[list[Sequence[Any]]]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for part in parts:
        rows += _across(part)
        if len(rows) > _SHOWN_MAX:
            raise QueryError(
                f"More than {_SHOWN_MAX:,} rows: write them with --format, or take fewer with LIMIT."
            )
    return rows


def _write_frames(
    columns: list[Column], parts: Iterator[list[Sequence[Any]]], form: str, out: BinaryIO
) -> None:
    from tracepipe.present.writing.table_formats import write_table
    from tracepipe.reports.frames.libraries import pl

    def kind_of(column: Column) -> Any:
        if form == "csv" and column.kind in ("List", "Binary"):
            return pl.String
        return pl.List(getattr(pl, column.of)) if column.of else getattr(pl, column.kind)

    def values(column: Column, of: Sequence[Any]) -> Sequence[Any]:
        if form != "csv" or column.kind not in ("List", "Binary"):
            return of
        plain: Callable[[Any], str] = json_text if column.kind == "List" else bytes.hex
        return [None if one is None else plain(one) for one in of]

    schema = pl.Schema({column.name: kind_of(column) for column in columns})
    frames = (
        pl.DataFrame(
            [
                pl.Series(column.name, values(column, of), schema[column.name])
                for column, of in zip(columns, part, strict=True)
            ]
        )
        for part in parts
    )
    write_table(schema, frames, out, form)
