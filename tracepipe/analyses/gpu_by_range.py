"""What the GPU did for each range that a program marked, found by the launch calls inside the range."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tracepipe.analyses.gpu_work import LaunchCalls
from tracepipe.event.columns import NONE, Bools, Int64s, Ints
from tracepipe.event.groups import number_rows, sums_by
from tracepipe.store.run import Layer, Run
from tracepipe.store.schema import INSTANT, NO_BEGIN

# The suffix that PyTorch's emit_nvtx adds to the name of an operator: `aten::linear, seq = 5, op_id = 12`.
_MORE = re.compile(r", (seq|op_id|sizes|input_op_ids) ?= ?.*")
Row = tuple[str, int, int, int, int | None, int | None, float | None]
"""Name, number of ranges, the sum of their lengths; number of launches inside them, the time from the first
work to the last, the busy part of it, and the idle part in percent."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """The sums for each name of ranges, as columns of shape `(names,)`; `names` has the name of each row."""

    names: list[str]
    count: Int64s
    wall_ns: Int64s
    launches: Int64s
    span_ns: Int64s
    busy_ns: Int64s

    def __len__(self) -> int:
        return len(self.names)

    def first(self, top: int) -> list[Row]:
        """The `top` rows with the most busy time, or all for 0."""

        def rank(at: int) -> tuple[int, int, str]:
            return -int(self.busy_ns[at]), -int(self.wall_ns[at]), self.names[at]

        return [self._row(at) for at in sorted(range(len(self)), key=rank)[: top if top > 0 else None]]

    def _row(self, at: int) -> Row:
        sums = (self.count, self.wall_ns, self.launches, self.span_ns, self.busy_ns)
        count, wall, launches, span, busy = (int(column[at]) for column in sums)
        idle = 100 * (span - busy) / span if span else None
        on_it = (span, busy) if launches else (None, None)
        return self.names[at], count, wall, launches, *on_it, idle


class _Work:
    """Kernels and copies, with the threads and the times of the calls that launched them. Shapes `(n,)`."""

    def __init__(self, run: Run) -> None:
        launches, calls = LaunchCalls(run), run.layer("userspace")
        columns: list[list[Int64s]] = [[], [], [], []]
        for name in ("gpu_kernel", "transfer"):
            layer, rows = launches.work(name)
            found = launches.find(layer, rows)
            rows, found = rows[found != NONE], found[found != NONE]
            some = (
                layer.start_ns[rows],
                layer.end_ns[rows],
                calls.start_ns[found],
                _threads(run)[calls.shape[found]],
            )
            for column, values in zip(columns, some, strict=True):
                column.append(values)
        whole = [np.concatenate(column or [np.empty(0, np.int64)]) for column in columns]
        self.start_ns, self.end_ns, self.called_ns, self.thread = whole


class _OnGpu:
    """For each row of the annotations: the number of launches, the first and the last time of their work, and
    how long the GPU was busy with it. Shapes `(annotations,)`.
    """

    def __init__(self, count: int) -> None:
        self.launches = np.zeros(count, np.int64)
        self.first_ns = np.full(count, np.iinfo(np.int64).max)
        self.last_ns = np.full(count, np.iinfo(np.int64).min)
        self.busy_ns = np.zeros(count, np.int64)

    def add(self, ranges: Int64s, start_ns: Int64s, end_ns: Int64s) -> None:
        """Add work to the ranges in which it was launched. Shapes `(n,)`."""
        np.add.at(self.launches, ranges, 1)
        np.minimum.at(self.first_ns, ranges, start_ns)
        np.maximum.at(self.last_ns, ranges, end_ns)

    def settle(self, ranges: Int64s, start_ns: Int64s, end_ns: Int64s) -> None:
        """Sum the time during which any work of each range ran. The arguments have all work. Shapes
        `(n,)`.
        """
        order = np.lexsort((start_ns, ranges))
        ranges, start_ns, end_ns = ranges[order], start_ns[order], end_ns[order]
        # The latest end so far in the same range: a running maximum over ranks of ends, which are higher in
        # later ranges.
        ends, rank = np.unique(end_ns, return_inverse=True)
        group, _ = number_rows(ranges)
        latest = np.maximum.accumulate(group.astype(np.int64) * len(ends) + rank) % max(len(ends), 1)
        before = np.concatenate([start_ns[:1], ends[latest][:-1]])
        is_first = np.diff(ranges, prepend=NONE) != 0
        since = np.where(is_first, start_ns, np.maximum(start_ns, before))
        np.add.at(self.busy_ns, ranges, np.maximum(end_ns - since, 0))


def _threads(run: Run) -> Int64s:
    """A number for the thread of each shape. Shape `(shapes,)`."""
    shapes = np.arange(len(run.shapes), dtype=np.int32)
    pid, tid = (run.shapes.column(name, shapes).astype(np.int64) for name in ("pid", "tid"))
    threads: Int64s = (pid << 32) + tid
    return threads


def ranges_by_gpu_time(run: Run, *, own: bool = False) -> Ranges:
    """Return the ranges of threads by name; with `own`, only those without a domain."""
    ranges = run.layer("annotation")
    every = np.arange(len(run.shapes), dtype=np.int32)
    wanted = run.shapes.column("range", every) == NONE
    if own:
        wanted &= run.shapes.column("domain", every) == NONE
    is_range = wanted[ranges.shape] & (ranges.kind != INSTANT) & (ranges.kind != NO_BEGIN)
    names = run.shapes.column("name", every)[ranges.shape]
    return _rows(run, ranges, np.flatnonzero(is_range), names, _on_gpu(run, ranges, is_range))


def _on_gpu(run: Run, ranges: Layer, is_range: Bools) -> _OnGpu:
    """The work that was launched in each range."""
    on_gpu, work = _OnGpu(len(ranges)), _Work(run)
    domains = run.shapes.column("domain", np.arange(len(run.shapes), dtype=np.int32))
    threads, rows = _threads(run)[ranges.shape], np.flatnonzero(is_range)
    group, first = number_rows(threads[rows], domains[ranges.shape[rows]])
    levels: list[tuple[Int64s, Int64s]] = []
    for number, row in enumerate(rows[first].tolist()):
        some = np.flatnonzero(work.thread == threads[row])
        inside = _innermost(ranges, rows[group == number], work.called_ns[some])
        some, inside = some[inside != NONE], inside[inside != NONE]
        while len(some):
            levels.append((some, inside))
            inside = ranges.parent[inside].astype(np.int64)
            some, inside = some[inside != NONE], inside[inside != NONE]
    if levels:
        some, inside = (np.concatenate(column) for column in zip(*levels, strict=True))
        on_gpu.add(inside, work.start_ns[some], work.end_ns[some])
        on_gpu.settle(inside, work.start_ns[some], work.end_ns[some])
    return on_gpu


def _innermost(ranges: Layer, rows: Int64s, times_ns: Int64s) -> Int64s:
    """At each time the innermost of some ranges, which are of one thread and domain; else NONE.
    Shapes `(n,)`.
    """
    at = np.searchsorted(ranges.start_ns[rows], times_ns, "right") - 1
    found = np.where(at >= 0, rows[np.maximum(at, 0)], NONE)
    while len(over := np.flatnonzero((found != NONE) & (ranges.end_ns[found] <= times_ns))):
        found[over] = ranges.parent[found[over]]
    return found


def _rows(run: Run, ranges: Layer, rows: Int64s, names: Ints, on_gpu: _OnGpu) -> Ranges:
    """The sums for each name."""
    name, first = number_rows(names[rows])
    texts = [_MORE.sub("", run.shapes.text(number)) for number in names[rows[first]].tolist()]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    of = np.array([numbers[text] for text in texts], np.int64)[name]
    launched = on_gpu.launches[rows] > 0
    span_ns = np.where(launched, on_gpu.last_ns[rows] - on_gpu.first_ns[rows], 0)
    lengths_ns = np.where(ranges.has_length[rows], ranges.end_ns[rows] - ranges.start_ns[rows], 0)
    columns = (np.ones_like(rows), lengths_ns, on_gpu.launches[rows], span_ns, on_gpu.busy_ns[rows])
    return Ranges(list(numbers), *(sums_by(of, column, len(numbers)) for column in columns))
