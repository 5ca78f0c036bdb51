"""Rows of slices that nest: what is open on a track, and where a slice goes that does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tracepipe.event.outcomes import Outcomes
from tracepipe.layout.timeline import BEGIN, END, INSTANT, Args, Flows, Op, Track

# Where more slices overlap than this, the input does not describe a call stack.
LANES_MAX = 64
# Perfetto v52 keeps no ends of slices that stand deeper than this.
DEPTH_MAX = 512


OpenSlice = tuple[str, int, int]
"""A slice with a begin and no end yet: its name, the place of its begin among the operations of this batch,
and its flow or 0. A tuple, as there are as many as calls."""


@dataclass(slots=True, eq=False)
class Row:
    """One track, with what is open on it. At any time it holds open B slices or unfinished X slices, never
    both: which of them ends first is not known while one of them is open.
    """

    track: Track
    last_ns: int = -1
    open: list[OpenSlice] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Ends of the X slices that enclose `last_ns`, outermost first."""
    beside: list[Row] = field(default_factory=list)
    """Extra tracks for what does not nest here."""

    def takes_begin(self, ts_ns: int) -> bool:
        """Whether a B at that time nests here."""
        self._finish(ts_ns)
        return ts_ns >= self.last_ns and not self.ends and len(self.open) < DEPTH_MAX

    def takes_slice(self, ts_ns: int, end_ns: int) -> bool:
        """Whether an X over that time nests here."""
        self._finish(ts_ns)
        if ts_ns < self.last_ns or self.open or len(self.ends) >= DEPTH_MAX:
            return False
        return not self.ends or end_ns <= self.ends[-1]

    def _finish(self, ts_ns: int) -> None:
        while self.ends and self.ends[-1] <= ts_ns:
            self.ends.pop()


def complete(
    row: Row, ts_ns: int, dur_ns: int, name: str, args: Args | None, flows: Flows | None
) -> list[Op]:
    """The operations that draw a slice with a known end on `row`, which takes it."""
    row.last_ns = ts_ns
    row.ends.append(ts_ns + dur_ns)
    # Both at once: a stable sort by time keeps this right for every slice that nests here later.
    return [(BEGIN, row.track, ts_ns, name, args, flows), (END, row.track, ts_ns + dur_ns, name, None, None)]


def lane_of_end(row: Row, ts_ns: int, name: str) -> Row | None:
    """Where an E belongs: the row or a track beside it on which a B of that name is open, innermost first."""
    # A row that is full has its innermost calls beside it.
    lanes = (*reversed(row.beside), row) if len(row.open) >= DEPTH_MAX else (row, *row.beside)
    rows = [lane for lane in lanes if lane.open and ts_ns >= lane.last_ns]
    inner = next((lane for lane in rows if lane.open[-1][0] == name), None)
    return inner or next((lane for lane in rows if any(opened[0] == name for opened in lane.open)), None)


def end(row: Row, ts_ns: int, name: str, args: Args | None, outcomes: Outcomes) -> list[Op]:
    """The operations that an E draws: on the row or beside it, where a B of that name is open."""
    lane = lane_of_end(row, ts_ns, name)
    if lane is None:
        outcomes.no_begin += 1
        return [(INSTANT, row.track, ts_ns, name, {**(args or {}), "no_begin": True}, None)]
    lane.last_ns = ts_ns
    ops: list[Op] = []
    while (ended := lane.open.pop()[0]) != name:
        # longjmp, an exception or a lost record: the caller has returned, so this call has too.
        ops.append((END, lane.track, ts_ns, ended, {"unclosed": True}, None))
        outcomes.unclosed += 1
    ops.append((END, lane.track, ts_ns, name, args, None))
    return ops


def close_all(row: Row, ts_ns: int, outcomes: Outcomes) -> list[Op]:
    """The operations that end what is still open at the end of the trace, and mark it."""
    ops: list[Op] = []
    for lane in (row, *row.beside):
        outcomes.unclosed += len(lane.open)
        at_ns = max(ts_ns, lane.last_ns)
        for name, _, _ in reversed(lane.open):
            ops.append((END, lane.track, at_ns, name, {"unclosed": True}, None))
        lane.open.clear()
    return ops


def marked(args: Args | None, **marks: Any) -> Args:
    """A copy of `args` with `marks` added."""
    return {**(args or {}), **marks}
