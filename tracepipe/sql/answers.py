"""Rows that a query gave, as a table of text, as JSON, and in the formats of exported tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from tracepipe.printable import json_text, printable
from tracepipe.sql.processor import Answer

_NULL = "–"


def as_json(answer: Answer) -> dict[str, Any]:
    """Columns, and an object for each row; bytes are hexadecimal digits."""
    rows = [dict(zip(answer.columns, row, strict=True)) for row in _without_bytes(answer)]
    return {"columns": answer.columns, "rows": rows}


def _without_bytes(answer: Answer) -> list[list[Any]]:
    """Rows for formats that have no bytes."""
    return [[value.hex() if isinstance(value, bytes) else value for value in row] for row in answer.rows]


def table_lines(answer: Answer) -> Iterator[str]:
    """A line of names, and one for each row; numbers stand to the right."""
    if not answer.columns:
        return
    texts = [list(map(printable, answer.columns)), *([_text(value) for value in row] for row in answer.rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    # A column is of numbers where each of its values is one, or null.
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


def _text(value: Any) -> str:
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
    from tracepipe.reports.frames.libraries import pl
    from tracepipe.reports.writing.table_formats import write_table

    rows = _without_bytes(answer) if form == "csv" else answer.rows
    frame = pl.DataFrame(rows, schema=answer.columns, orient="row", infer_schema_length=None)
    write_table(frame.schema, iter([frame]), out, form)
