"""Decides tracks, names, nesting and flows: events on the trace clock in, timeline operations out.

    process ─ thread ─ CUDA API, syscalls, driver, scheduler, memory, transfers
    GPU ─ streams ─ kernels and copies
        ─ SM ─ hardware warp slot, a slice for each warp
    tracepipe ─ capture, losses, problems

Host events go through `HostLayout`, the GPU's through `GpuLayout`; this class keeps the order and draws what
the recording says of itself.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from operator import itemgetter
from typing import Any

from tracepipe.event.model import LAYERS, Header, Problem, Record, Shape, Timed
from tracepipe.event.outcomes import Outcomes
from tracepipe.layout.gpu import GpuLayout
from tracepipe.layout.host import HostLayout
from tracepipe.layout.launches import Launches
from tracepipe.layout.options import LayoutOptions
from tracepipe.layout.timeline import INSTANT, Op
from tracepipe.layout.tree import Tree

__all__ = ["Layout", "LayoutOptions"]

# Events are put in order over this many: what a capture writes is out of order by less.
WINDOW_EVENTS = 2048
# Every problem is counted; so many are drawn, and so many at one time: a viewer draws each a row lower.
PROBLEMS_DRAWN = 1000
PROBLEMS_AT_ONCE = 16

# Records about the recording itself.
_TIMELESS = frozenset({"header", "footer", "clock"})
_TS, _SHAPE = itemgetter(0), itemgetter(1)


def _longest_first(events: list[Timed]) -> None:
    """Put an X before those it encloses where several start at one time; the order of the rest stays."""
    places = [at for at, (_, shape) in enumerate(events) if shape.phase == "X"]
    for _, group in groupby(places, key=lambda at: events[at][0]):
        same_start = list(group)
        if len(same_start) > 1:
            longest = sorted((events[at] for at in same_start), key=lambda event: -(event[1].dur_ns or 0))
            for at, event in zip(same_start, longest, strict=True):
                events[at] = event


def _weight(shape: Shape) -> int:
    """How many events a record stands for in the memory that it takes."""
    return 1 + shape.events // 2 if shape.type == "gpu_warp" else 1


class Layout:
    """Lays out one recording. Call `place` with each batch, `finish` once, and write what they return."""

    def __init__(self, header: Header, options: LayoutOptions | None = None) -> None:
        self.outcomes = Outcomes()
        self.counts: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        self.footer: Record | None = None
        self.after_footer = 0
        self.end_ns = 0
        self._problems_drawn = self._problems_here = self._problems_undrawn = 0
        self._problem_ns = 0
        self._window: list[Timed] = []
        self._weight = 0
        self._slices = False
        self._tree = Tree(header)
        launches = Launches(self._tree, self.outcomes)
        self._host = HostLayout(self._tree, self.outcomes, launches)
        self._gpu = GpuLayout(self._tree, self._host, launches, options or LayoutOptions(), header)

    def place(self, events: list[Timed]) -> list[Op]:
        """Operations for the events whose turn it is; the newest wait for what may come before them."""
        if self.footer is not None:
            self.after_footer += len(events)
        # Some hundred shapes stand for thousands of events: look at those instead.
        shapes = Counter(map(_SHAPE, events))
        for shape, count in shapes.items():
            self.counts[shape.type] += count
            self._slices = self._slices or shape.dur_ns is not None
            self._weight += _weight(shape) * count
        if any(shape.type in _TIMELESS for shape in shapes):
            events = self._take_timeless(events)
        self._window += events
        if self._weight < 2 * WINDOW_EVENTS:
            return self._take_ops()
        self._sort()
        keep = max(1, len(self._window) * WINDOW_EVENTS // self._weight)
        ready, self._window = self._window[:-keep], self._window[-keep:]
        if self._slices or self._weight > len(self._window) + len(ready):
            kept = set(map(_SHAPE, self._window))
            self._slices = any(shape.dur_ns is not None for shape in kept)
            self._weight = len(self._window) + sum(_weight(shape) - 1 for shape in kept)
        else:
            self._weight = len(self._window)
        return self._deal(ready)

    def _sort(self) -> None:
        self._window.sort(key=_TS)
        if self._slices:
            _longest_first(self._window)

    def _take_timeless(self, events: list[Timed]) -> list[Timed]:
        """`events` without those that have no place in time; the footer is kept."""
        for at, (_, shape) in enumerate(events):
            if shape.type == "footer":
                self.footer, self.after_footer = shape.record, len(events) - at - 1
        return [event for event in events if event[1].type not in _TIMELESS]

    def _deal(self, events: list[Timed], *, last: bool = False) -> list[Op]:
        if events:
            self.end_ns = max(self.end_ns, events[-1][0])
            self._host.place(events, self._special)
            if not last:
                self._host.settle()
        return self._take_ops()

    def _special(self, ts_ns: int, shape: Shape) -> None:
        if shape.type == "loss":
            self._loss(ts_ns, shape.record)
            return
        if shape.type == "gpu_warp":
            self.counts["gpu_warp"] += shape.events - 1
        self.end_ns = max(self.end_ns, self._gpu.place(ts_ns, shape))

    def _take_ops(self) -> list[Op]:
        ops, self._tree.ops[:] = self._tree.ops[:], []
        return ops

    def _loss(self, ts_ns: int, record: Record) -> None:
        layer = record.get("layer", "unknown layer")
        self.losses[layer] += record["count"]
        rank = 1 + (LAYERS.index(layer) if layer in LAYERS else len(LAYERS))
        track = self._tree.child(self._tree.group("tracepipe"), "slices", f"losses: {layer}", rank, "loss")
        args = {k: v for k, v in record.items() if k not in ("type", "dur_ns", "bound_ns", "args")}
        name = f"lost {record['count']} events"
        self._host.complete_on(self._host.row_of(track), ts_ns, record.get("dur_ns", 0), name, args)

    def say(self, name: str, ts_ns: int, args: dict[str, Any], track: str = "capture") -> list[Op]:
        """Operations that write a statement about the recording itself into the trace."""
        row = self._tree.child(self._tree.group("tracepipe"), "slices", track, 0, "tracepipe")
        self._tree.ops.append((INSTANT, row, ts_ns, name, args, None))
        return self._take_ops()

    def problem(self, problem: Problem) -> list[Op]:
        """Operations that draw a problem where it stands in the file."""
        ops: list[Op] = []
        has_room = self._problems_drawn < PROBLEMS_DRAWN
        if has_room and self.end_ns != self._problem_ns:
            ops = self._undrawn_problems()
            self._problem_ns, self._problems_here = self.end_ns, 0
        if not has_room or self._problems_here >= PROBLEMS_AT_ONCE:
            self._problems_undrawn += 1
            return ops
        self._problems_drawn += 1
        self._problems_here += 1
        name = "skipped line" if problem.skipped else "ambiguous"
        args = {"line": problem.line, "field": problem.field, "message": problem.message}
        return ops + self.say(name, self.end_ns, args, "problems")

    def _undrawn_problems(self) -> list[Op]:
        """The mark that stands for the problems that had no room of their own."""
        count, self._problems_undrawn = self._problems_undrawn, 0
        return self.say(f"{count} more lines", self._problem_ns, {}, "problems") if count else []

    def finish(self) -> list[Op]:
        """Operations for all that is left, ends of what is still open included."""
        self._sort()
        ops = self._deal(self._window, last=True)
        self._gpu.finish(self.end_ns)
        self._host.finish(self.end_ns)
        return ops + self._take_ops() + self._undrawn_problems()
