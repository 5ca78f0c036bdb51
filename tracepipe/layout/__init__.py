"""Decides tracks, names, nesting and flows: records on the trace clock in, timeline operations out.

    process ─ thread ─ CUDA API, syscalls, driver, scheduler, memory, transfers
    GPU ─ streams ─ kernels and copies
        ─ SM ─ hardware warp slot, a slice for each warp
    tracepipe ─ capture, losses, problems

Host events go through `HostLayout`, the GPU's through `GpuLayout`; this class keeps the order and draws what
the recording says of itself.
"""

from __future__ import annotations

from collections import Counter
from operator import itemgetter
from typing import Any

from tracepipe.layout.gpu import GpuLayout
from tracepipe.layout.host import HostLayout
from tracepipe.layout.launches import Launches
from tracepipe.layout.options import LayoutOptions
from tracepipe.layout.rows import Outcomes
from tracepipe.layout.tree import Tree
from tracepipe.model import Header, Problem, Record
from tracepipe.timeline import INSTANT, Op

__all__ = ["Layout", "LayoutOptions", "Outcomes"]

# Records are put in order over this many: what a capture writes is out of order by less.
WINDOW_RECORDS = 4096
# Every problem is counted; so many are drawn.
PROBLEMS_DRAWN = 1000

# Records about the recording itself.
_TIMELESS = frozenset({"header", "footer", "clock"})
_TS = itemgetter("ts_ns")
_TYPE = itemgetter("type")


def _longest_first(records: list[Record]) -> None:
    """Put an X before those it encloses where several start at one time; the order of the rest stays."""
    at = 0
    while at < len(records):
        upto = at + 1
        while upto < len(records) and records[upto]["ts_ns"] == records[at]["ts_ns"]:
            upto += 1
        if upto - at > 1:
            places = [k for k in range(at, upto) if records[k].get("phase") == "X"]
            longest = sorted((records[k] for k in places), key=lambda r: -r["dur_ns"])
            for place, record in zip(places, longest, strict=True):
                records[place] = record
        at = upto


class Layout:
    """Lays out one recording. Call `place` with each batch, `finish` once, and write what they return."""

    def __init__(self, header: Header, options: LayoutOptions | None = None) -> None:
        self.outcomes = Outcomes()
        self.counts: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        self.footer: Record | None = None
        self.after_footer = 0
        self.first_ns: int | None = None
        self.end_ns = 0
        self._problems = 0
        self._window: list[Record] = []
        self._tree = Tree(header)
        launches = Launches(self._tree, self.outcomes)
        self._host = HostLayout(self._tree, self.outcomes, launches)
        self._gpu = GpuLayout(self._tree, self._host, launches, options or LayoutOptions(), header)

    def place(self, records: list[Record]) -> list[Op]:
        """Operations for the records whose turn it is; the newest wait for what may come before them."""
        if not records:
            return self._take_ops()
        kinds = Counter(map(_TYPE, records))
        if not _TIMELESS.isdisjoint(kinds):
            records = self._take_timeless(records)
        elif self.footer is not None:
            self.after_footer += len(records)
        self.counts.update(kinds)
        self._window += records
        if len(self._window) < 2 * WINDOW_RECORDS:
            return self._take_ops()
        self._sort()
        ready = self._window[:-WINDOW_RECORDS]
        del self._window[:-WINDOW_RECORDS]
        return self._deal(ready)

    def _sort(self) -> None:
        self._window.sort(key=_TS)
        if any("dur_ns" in record for record in self._window):
            _longest_first(self._window)

    def _take_timeless(self, records: list[Record]) -> list[Record]:
        """`records` without those that have no place in time; the footer is kept."""
        for at, record in enumerate(records):
            if record["type"] == "footer":
                self.footer, self.after_footer = record, len(records) - at - 1
        return [record for record in records if record["type"] not in _TIMELESS]

    def _deal(self, records: list[Record]) -> list[Op]:
        if records:
            if self.first_ns is None:
                self.first_ns = records[0]["ts_ns"]
            self.end_ns = max(self.end_ns, records[-1]["ts_ns"])
            self._host.place(records, self._special)
        return self._take_ops()

    def _special(self, record: Record) -> None:
        if record["type"] == "loss":
            self._loss(record)
            return
        if record["type"] == "gpu_warp":
            self.counts["gpu_warp"] += len(record["warp"]) - 1
        self.end_ns = max(self.end_ns, self._gpu.place(record))

    def _take_ops(self) -> list[Op]:
        ops, self._tree.ops[:] = self._tree.ops[:], []
        return ops

    def _loss(self, record: Record) -> None:
        layer = record.get("layer", "unknown layer")
        self.losses[layer] += record["count"]
        track = self._tree.child(self._tree.group("tracepipe"), "slices", f"losses: {layer}", 1, "loss")
        args = {k: v for k, v in record.items() if k not in ("type", "ts_ns", "dur_ns", "bound_ns")}
        self._host.complete_on(
            self._host.row_of(track),
            record["ts_ns"],
            record.get("dur_ns", 0),
            f"lost {record['count']} events",
            args,
        )

    def say(self, name: str, ts_ns: int, args: dict[str, Any], track: str = "capture") -> list[Op]:
        """Operations that write a statement about the recording itself into the trace."""
        row = self._tree.child(self._tree.group("tracepipe"), "slices", track, 0, "tracepipe")
        self._tree.ops.append((INSTANT, row, ts_ns, name, args, None))
        return self._take_ops()

    def problem(self, problem: Problem) -> list[Op]:
        """Operations that draw a problem where it stands in the file."""
        self._problems += 1
        if self._problems > PROBLEMS_DRAWN:
            return []
        name = "skipped line" if problem.skipped else "ambiguous"
        args = {"line": problem.line, "field": problem.field, "message": problem.message}
        return self.say(name, self.end_ns, args, "problems")

    def finish(self) -> list[Op]:
        """Operations for all that is left, ends of what is still open included."""
        self._sort()
        left, self._window = self._window, []
        ops = self._deal(left)
        self._gpu.finish(self.end_ns)
        self._host.finish(self.end_ns)
        return ops + self._take_ops()
