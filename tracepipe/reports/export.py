"""Exports a recording as tables for DuckDB, Polars, Spark, pandas: a file for each layer, in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from tracepipe import __version__
from tracepipe.options import Option
from tracepipe.present.writing.rendering import facts_json
from tracepipe.present.writing.table_formats import FORMATS, TYPES, write_question
from tracepipe.printable import json_text
from tracepipe.reports.report import Column, FolderOutput, Report, Result, Table
from tracepipe.store import views
from tracepipe.store.run import Run

TABLES_VERSION = "tracepipe-tables/1"
"""The version of the folder's format, in `run.json`; it changes when a column changes its meaning."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe export`."""

    format: Annotated[str, Option("Write the tables in this format.", choices=FORMATS)] = "parquet"


def run(run: Run, options: Options) -> Result:
    """All tables of one recording, and `run.json` with the header, the losses and the clocks."""
    result = Result("EXPORTED TABLES")
    about: dict[str, Any] = {}
    rows = []
    for name in views.VIEWS:
        file, count, table = f"{name}.{options.format}", views.count(run, name), run.table(name)
        kinds = [TYPES[str(kind)] for kind in table.types]
        columns = dict(zip(table.columns, kinds, strict=True))
        about[name] = {"file": file, "rows": count, "columns": columns}
        rows.append((file, count, len(columns)))
        result.files[file] = partial(write_question, run, views.question(name), to=options.format)
    # What a reader of the tables must know about the recording.
    data = {
        "format": TABLES_VERSION,
        "tool": {"name": "tracepipe", "version": __version__},
        "recording": facts_json(run.facts),
        "header": run.facts.header.to_record(),
        "footer": run.facts.footer.as_read or None,
        "tables": about,
    }
    result.files["run.json"] = lambda out: out.write(json_text(data, indent=True).encode())
    shown = (Column("file", "file"), Column("rows", "rows", "count"), Column("columns", "columns", "count"))
    note = (
        f"Times are whole ns on {run.facts.trace_clock}; run.json has the header, the losses and the clocks."
    )
    result.parts.append(Table("tables", "Tables", shown, rows, note))
    return result


REPORT = Report("export", Options, run, output=FolderOutput(lambda options: f".{options.format}"))
