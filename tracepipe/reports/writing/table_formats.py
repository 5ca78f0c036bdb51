"""Formats of exported tables. A new one is a function here and a line in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

from tracepipe.errors import OutputError
from tracepipe.reports.frames.libraries import pl

# Text that a spreadsheet would run as a formula has a quote in front, by which it is shown as text (OWASP,
# "CSV Injection"). A number is none, though it may begin with a sign.
_FORMULA, _NUMBER = r"^[=+\-@＝＋－＠\t\r\n]", r"^[+-]?[0-9]+(\.[0-9]+)?$"
WriteTable = Callable[["pl.DataFrame", BinaryIO], None]


def _parquet(table: pl.DataFrame, out: BinaryIO) -> None:
    table.write_parquet(out, compression="zstd", statistics=True)


def _arrow(table: pl.DataFrame, out: BinaryIO) -> None:
    # The oldest layout of text, which every reader of Arrow files knows.
    table.write_ipc(out, compression="zstd", compat_level=pl.CompatLevel.oldest())


def _csv(table: pl.DataFrame, out: BinaryIO) -> None:
    text = pl.col(pl.String)
    is_formula = text.str.contains(_FORMULA) & ~text.str.contains(_NUMBER)
    table.with_columns(pl.when(is_formula).then(pl.lit("'") + text).otherwise(text).name.keep()).write_csv(
        out
    )


FORMATS: dict[str, WriteTable] = {"parquet": _parquet, "arrow": _arrow, "csv": _csv}
"""Format → how a table is written; the name is the ending of its files."""


def write_table(table: pl.DataFrame, out: BinaryIO, to: str) -> None:
    """Write a table in one of `FORMATS`. Raises OSError or OutputError where the disk is full."""
    try:
        FORMATS[to](table, out)
    except pl.exceptions.PolarsError as e:  # what Polars makes of an error of the system
        raise OutputError(f"cannot write a table as {to}: {e}", "free some space, or use -o") from e
