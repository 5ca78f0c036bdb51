"""Formats of exported tables. A function here and a line in `FORMATS` make a format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import chain
from typing import Any, BinaryIO

from tracepipe.errors import OutputError
from tracepipe.reports.frames.libraries import pl

# Text that a spreadsheet would run as a formula gets a quote in front, which makes it text (OWASP, "CSV
# Injection"). A number is not a formula, though it may begin with a sign.
_FORMULA, _NUMBER = r"^[=+\-@＝＋－＠\t\r\n]", r"^[+-]?[0-9]+(\.[0-9]+)?$"
ROWS_OF_PART = 1 << 13
"""The rows of a part; they take little memory where texts are short."""
# The rows of a row group of Parquet, for which it has least and greatest values; and the parts of a group
# where texts are long.
_ROWS_OF_GROUP, _PARTS_OF_GROUP = 1 << 16, 4
WriteTable = Callable[["pl.Schema", Iterator["pl.DataFrame"], int, BinaryIO], None]


def _parquet(schema: pl.Schema, frames: Iterator[pl.DataFrame], rows: int, out: BinaryIO) -> None:
    with _lazily(schema, frames, "Parquet") as table:
        group = _ROWS_OF_GROUP if rows >= ROWS_OF_PART else rows * _PARTS_OF_GROUP
        table.sink_parquet(out, compression="zstd", statistics=True, row_group_size=group)


def _arrow(schema: pl.Schema, frames: Iterator[pl.DataFrame], rows: int, out: BinaryIO) -> None:
    with _lazily(schema, frames, "Arrow") as table:
        # Older versions of Polars have no such option, and make a batch of each part.
        has_size = "record_batch_size" in signature(table.sink_ipc).parameters
        size: dict[str, Any] = {"record_batch_size": rows} if has_size and rows < ROWS_OF_PART else {}
        # The oldest layout of text, which every reader of Arrow files supports.
        table.sink_ipc(out, compression="zstd", compat_level=pl.CompatLevel.oldest(), **size)


def _csv(schema: pl.Schema, frames: Iterator[pl.DataFrame], rows: int, out: BinaryIO) -> None:
    text = pl.col(pl.String)
    is_formula = text.str.contains(_FORMULA) & ~text.str.contains(_NUMBER)
    shown = pl.when(is_formula).then(pl.lit("'") + text).otherwise(text).name.keep()
    # Part by part, as Polars collects many rows of a lazy table, however long they are.
    for at, frame in enumerate(chain([pl.DataFrame(schema=schema)], frames)):
        frame.with_columns(shown).write_csv(out, include_header=at == 0)


@contextmanager
def _lazily(schema: pl.Schema, frames: Iterator[pl.DataFrame], what: str) -> Iterator[pl.LazyFrame]:
    """The parts as a lazy table, which is never wholly in memory. Raises what the parts raise, and
    OutputError on a full disk.
    """
    failed: list[BaseException] = []

    def source(*_: object) -> Iterator[pl.DataFrame]:
        try:
            yield from frames
        except BaseException as e:
            failed.append(e)
            raise

    from polars.io.plugins import register_io_source

    try:
        yield register_io_source(source, schema=schema)
    except pl.exceptions.PolarsError as e:
        if failed:  # an error of ours, which Polars wraps in its own
            raise failed[0] from None
        # What Polars makes of an error of the system.
        raise OutputError(f"cannot write a table as {what}: {e}", "Free some space, or use -o.") from e


FORMATS: dict[str, WriteTable] = {"parquet": _parquet, "arrow": _arrow, "csv": _csv}
"""Format → the function that writes the parts of a table; the name is also the ending of the files."""


def write_table(
    schema: pl.Schema, frames: Iterator[pl.DataFrame], out: BinaryIO, to: str, rows: int = ROWS_OF_PART
) -> None:
    """Write the parts of a table, of `rows` rows each, in one of `FORMATS`. Raises OSError or OutputError on
    a full disk.
    """
    FORMATS[to](schema, frames, rows, out)
