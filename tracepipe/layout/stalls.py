"""What the warps of a GPU wait for: a counter for each group of stall reasons, as its share of the samples.

Samples show how many warps were waiting, and not which warp waited from when to when, so they do not make
slices. The number of samples is a counter too.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from tracepipe.event.columns import NONE
from tracepipe.event.model import COUNT_LIMIT, Record
from tracepipe.event.ops import COUNTER, op_of
from tracepipe.event.stall_reasons import GROUPS, group_of
from tracepipe.layout.rows import RANK_COUNT, Rows

_TITLE: Final = "what warps wait for"
_SAMPLES: Final = "samples"


class StallCounters:
    """Draws samples of stall reasons, for each process on a GPU in its own group of tracks."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._of: dict[tuple[int, int | None], dict[str, int]] = {}
        """By GPU and process: the rows of the counters."""
        self._processes: Counter[int] = Counter()

    def take(self, ts_ns: int, record: Record) -> None:
        """Draw the samples of a stretch as values from its start on."""
        rows = self._rows_of(record.get("gpu", 0), record.get("pid"))
        if rows is None:
            return
        samples: Counter[str] = Counter()
        for reason, count in zip(record["reason"], record["samples"], strict=True):
            samples[group_of(record["reasons"][reason])] += count
        total = samples.total()
        for group, row in rows.items():
            value = (
                min(total, COUNT_LIMIT) if group == _SAMPLES else round(100 * samples[group] / max(total, 1))
            )
            self._rows.nesting.add(op_of(COUNTER, row, ts_ns, 0, NONE, value))

    def _rows_of(self, gpu: int, pid: int | None) -> dict[str, int] | None:
        """The rows of a process on a GPU by their names; None where there are too many tracks."""
        rows = self._of.get((gpu, pid))
        if rows is None and not self._rows.tree.is_full:
            tree = self._rows.tree
            self._processes[gpu] += 1
            several = f", process {pid}" if self._processes[gpu] > 1 else ""
            owner = tree.child(self._rows.gpu(gpu), "group", _TITLE + several, RANK_COUNT, "gpu")
            units = [*((group, "%") for group in GROUPS), (_SAMPLES, "samples")]
            rows = self._of[gpu, pid] = {
                name: self._rows.new_row(tree.child(owner, "counter", name, rank, "gpu", unit))
                for rank, (name, unit) in enumerate(units)
            }
        return rows
