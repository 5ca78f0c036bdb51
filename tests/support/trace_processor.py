"""Perfetto's own trace processor, run inside the test's process.

with RealTraceProcessor(path) as tp:
    assert tp.rows("select name, dur from slice") == [...]
    assert tp.problems() == []
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tracepipe.sql.wasm import WasmTraceProcessor

# The UI's badge counts the severities error and data_loss only. Interned data that is missing, track events
# that make no sense and skipped packets are statistics of severity info, and just as wrong.
PROBLEMS_SQL = """
select name, idx, severity, source, value, description from stats
where value > 0 and (
  severity in ('error', 'data_loss') or name glob '*error*'
  or name in ('tokenizer_skipped_packets', 'flow_step_without_start', 'flow_end_without_start'))
order by name, idx"""


class RealTraceProcessor(WasmTraceProcessor):
    """A trace as Perfetto imports it: a path, or the bytes of the file.

    Raises TraceProcessorException for a trace that the importer refuses. What the importer swallows is in
    `problems()`; a truncated file and a surplus end of a slice are not, so compare counts as well.
    """

    def __init__(self, trace: Path | str | bytes) -> None:
        # The package takes text for a URI unless a file of that name is there: an open file is unambiguous.
        if isinstance(trace, bytes):
            super().__init__(iter([trace]))
            return
        with open(trace, "rb") as file:
            super().__init__(file)

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """The result of `sql`, one dict of column → value a row."""
        return [dict(vars(row)) for row in self.query(sql)]

    def problems(self) -> list[dict[str, Any]]:
        """What went wrong in the import, one row of the table `stats` each; empty if nothing did."""
        return self.rows(PROBLEMS_SQL)
