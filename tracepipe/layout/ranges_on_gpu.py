"""Draws annotations where their work ran: on a track of each stream, from their first work to the last.

    thread   ├ step ───────────────────┤            the ranges of the program, and the calls in them
             │├ forward ┤├ backward ┤  │
    stream 7      ├ step ─────────────────────┤     what those calls launched, by launch id
                  ├ forward ─┤  ├ backward ───┤

Work runs on a stream in the order of its calls. So the ranges of one thread nest there as they do on the
thread: a range ends where work begins that is not in it. Operators, which tools record by themselves, are
left out, and so are ranges that PyTorch's profiler has recorded on the GPU itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tracepipe.event.columns import NONE, TraceColumns
from tracepipe.event.nesting import NO_ROW
from tracepipe.event.ops import BEGIN, END, Op, op_of
from tracepipe.event.shape import Shape, ShapeColumn
from tracepipe.event.vocabulary import OPERATORS, RANGES_ON_GPU
from tracepipe.layout.rows import Rows

# The most launches whose work has not come yet, and the most ranges that are open on a thread.
LAUNCHES_MAX = 1 << 14
DEPTH_MAX = 512
_NEITHER, _RANGE, _WHOLE_RANGE, _CALL, _WORK = range(5)
_NEVER = (1 << 63) - 1
_Thread = tuple[int | None, int | None]


@dataclass(slots=True, eq=False)
class _Range:
    """A range of a thread and a domain, inside another. `end_ns` is known of one that is a single event."""

    name: str
    domain: str | None
    depth: int
    outer: _Range | None
    end_ns: int = _NEVER


def _going_on(innermost: _Range | None, ts_ns: int) -> _Range | None:
    """The innermost range, of those around and `innermost` itself, that has not ended at a time."""
    while innermost is not None and innermost.end_ns <= ts_ns:
        innermost = innermost.outer
    return innermost


_Caller = tuple[_Thread, tuple[_Range, ...]]
"""Where a launch was called: a thread, and its innermost range of each domain."""


@dataclass(slots=True, eq=False)
class _Track:
    """A row of a stream for the ranges of one thread and domain. `open` are those that have not ended, with
    their ends so far.
    """

    row: int
    last_ns: int = 0
    open: list[tuple[_Range, int]] = field(default_factory=list)


class RangesOnGpu:
    """Takes annotations, calls and work in the order of time, and ignores all before the first range."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._ops: list[Op] = []
        """The operations of the current batch."""
        self._tables = rows.book.tables
        self._callers: dict[_Thread, _Caller] = {}
        """By thread: the current state."""
        self._launched: dict[int, _Caller] = {}
        self._before: dict[int, _Caller] = {}
        """By launch: the last ones, and the ones before them."""
        self._tracks: dict[tuple[int, int, _Thread], dict[str | None, _Track]] = {}
        self._has_own = False
        """Whether the recording has ranges on GPUs itself."""
        self._parts = ShapeColumn(self._tables, self._part_of, np.uint8)

    def draw(self, events: TraceColumns) -> None:
        """Draw the ranges of the work of a batch."""
        part = self._parts.values()[events.shape]
        if self._has_own:
            part[part == _WHOLE_RANGE] = _NEITHER
        if not self._callers and not ((part == _RANGE) | (part == _WHOLE_RANGE)).any():
            return
        at = np.flatnonzero(part)
        # Of ranges that begin at the same time, the longest is around the others.
        length_ns = np.where(part[at] == _WHOLE_RANGE, events.dur_ns[at], 0)
        at = at[np.lexsort((-length_ns, events.ts_ns[at]))]
        columns = (events.ts_ns, events.dur_ns, events.launch, events.shape, part)
        for ts_ns, dur_ns, launch, number, kind in zip(*(one[at].tolist() for one in columns), strict=True):
            shape = self._rows.shape(number)
            if kind == _RANGE:
                self._take_range(shape, ts_ns, _NEVER)
            elif kind == _WHOLE_RANGE:
                self._take_range(shape, ts_ns, ts_ns + dur_ns)
            elif kind == _CALL:
                self._call(launch, (shape.pid, shape.tid), ts_ns)
            else:
                self._work(ts_ns, ts_ns + dur_ns, launch, shape)
        self._draw()

    def _draw(self) -> None:
        if self._ops:
            self._rows.nesting.add(*self._ops)
            self._ops.clear()

    def _part_of(self, shape: Shape, _: int) -> int:
        self._has_own |= shape.layer == RANGES_ON_GPU
        if shape.type == "annotation":
            if shape.range is not None or shape.phase not in "BEX":
                return _NEITHER
            if shape.phase == "X":
                return _NEITHER if shape.domain in OPERATORS else _WHOLE_RANGE
            return _RANGE
        if not shape.has_launch or shape.phase == "E":
            return _NEITHER
        return _WORK if shape.on_stream else _CALL

    # What threads do -----------------------------------------------------------------------------------

    def _take_range(self, shape: Shape, ts_ns: int, end_ns: int) -> None:
        """Begin a range, or end the innermost of that name with all that is open in it."""
        thread = shape.pid, shape.tid
        _, before = self._callers.get(thread, (thread, ()))
        innermost = _going_on(next((one for one in before if one.domain == shape.domain), None), ts_ns)
        if shape.phase != "E":
            depth = 0 if innermost is None else innermost.depth + 1
            until_ns = end_ns if innermost is None else min(end_ns, innermost.end_ns)
            inner = _Range(shape.name, shape.domain, depth, innermost, until_ns)
            after = inner if depth < DEPTH_MAX else innermost
        else:
            at = innermost
            while at is not None and at.name != shape.name:
                at = at.outer
            after = innermost if at is None else at.outer
        others = tuple(one for one in before if one.domain != shape.domain)
        self._callers[thread] = thread, others if after is None else (*others, after)

    def _call(self, launch: int, thread: _Thread, ts_ns: int) -> None:
        caller = self._callers.get(thread)
        if caller is not None and any(one.end_ns <= ts_ns for one in caller[1]):
            going_on = (_going_on(one, ts_ns) for one in caller[1])
            caller = self._callers[thread] = thread, tuple(one for one in going_on if one is not None)
        if len(self._launched) >= LAUNCHES_MAX // 2:
            self._before, self._launched = self._launched, {}
        if caller is not None:
            self._launched[launch] = caller
        else:  # the id is used again for a new launch
            self._launched.pop(launch, None)
            self._before.pop(launch, None)

    # What streams do -----------------------------------------------------------------------------------

    def _work(self, start_ns: int, end_ns: int, launch: int, shape: Shape) -> None:
        """Begin and end ranges with a kernel or a copy."""
        caller = self._launched.get(launch) or self._before.get(launch)
        if caller is None:
            return
        thread, ranges = caller
        gpu, stream = shape.gpu or 0, shape.stream or 0
        tracks = self._tracks.setdefault((gpu, stream, thread), {})
        domains = {one.domain for one in ranges}
        for domain, track in tracks.items():
            if domain not in domains:
                self._close(track, 0, start_ns)
        for innermost in ranges:
            domain = innermost.domain
            if domain not in tracks:
                tracks[domain] = _Track(self._rows.ranges_of_stream(gpu, stream, thread, domain))
            if (track := tracks[domain]).row == NO_ROW:
                continue
            chain, same = [innermost], 0
            while (outer := chain[-1].outer) is not None:
                chain.append(outer)
            chain.reverse()
            while same < min(len(chain), len(track.open)) and track.open[same][0] is chain[same]:
                same += 1
            self._close(track, same, start_ns)
            begin_ns = max(start_ns, track.last_ns)
            for one in chain[same:]:
                self._ops.append(op_of(BEGIN, track.row, begin_ns, self._rows.name(one.name), NONE))
                track.open.append((one, begin_ns))
                track.last_ns = begin_ns
            track.open = [(one, max(until_ns, end_ns)) for one, until_ns in track.open]

    def _close(self, track: _Track, depth: int, before_ns: int) -> None:
        """End the ranges that are open from a depth on, at the end of their last work, but before a time."""
        while len(track.open) > depth:
            ended, until_ns = track.open.pop()
            end_ns = max(track.last_ns, min(until_ns, before_ns))
            self._ops.append(op_of(END, track.row, end_ns, self._rows.name(ended.name), NONE))
            track.last_ns = end_ns

    def finish(self, end_ns: int) -> None:
        """End the ranges that are open on streams."""
        for tracks in self._tracks.values():
            for track in tracks.values():
                self._close(track, 0, end_ns)
        self._draw()
