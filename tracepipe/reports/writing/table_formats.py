"""Formats of exported tables. A new one is a function here and a line in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from tracepipe.errors import OutputError
from tracepipe.reports.frames.libraries import pl

# Text that a spreadsheet would run as a formula has a quote in front, by which it is shown as text (OWASP,
# "CSV Injection"). A number is none, though it may begin with a sign.
_FORMULA, _NUMBER = r"^[=+\-@＝＋－＠\t\r\n]", r"^[+-]?[0-9]+(\.[0-9]+)?$"
# What Parquet has the least and greatest values of.
_ROWS_OF_GROUP = 1 << 16
WriteTable = Callable[["pl.LazyFrame", BinaryIO], None]


def _parquet(table: pl.LazyFrame, out: BinaryIO) -> None:
    table.sink_parquet(out, compression="zstd", statistics=True, row_group_size=_ROWS_OF_GROUP)


def _arrow(table: pl.LazyFrame, out: BinaryIO) -> None:
    # The oldest layout of text, which every reader of Arrow files knows.
    table.sink_ipc(out, compression="zstd", compat_level=pl.CompatLevel.oldest())


def _csv(table: pl.LazyFrame, out: BinaryIO) -> None:
    text = pl.col(pl.String)
    is_formula = text.str.contains(_FORMULA) & ~text.str.contains(_NUMBER)
    table.with_columns(pl.when(is_formula).then(pl.lit("'") + text).otherwise(text).name.keep()).sink_csv(out)


FORMATS: dict[str, WriteTable] = {"parquet": _parquet, "arrow": _arrow, "csv": _csv}
"""Format → how a table is written; the name is the ending of its files."""


def write_table(schema: pl.Schema, frames: Iterator[pl.DataFrame], out: BinaryIO, to: str) -> None:
    """Write the parts of a table in one of `FORMATS`. Raises OSError or OutputError on a full disk."""
    failed: list[BaseException] = []

    def source(*_: Any) -> Iterator[pl.DataFrame]:
        try:
            yield from frames
        except BaseException as e:
            failed.append(e)
            raise

    from polars.io.plugins import register_io_source

    try:
        FORMATS[to](register_io_source(source, schema=schema), out)
    except pl.exceptions.PolarsError as e:
        if failed:  # an error of ours, which Polars wraps in its own
            raise failed[0] from None
        # What Polars makes of an error of the system.
        raise OutputError(f"cannot write a table as {to}: {e}", "free some space, or use -o") from e
