"""Everything that happened in one call, as a tree: calls, system calls, driver functions, sleep, the GPU."""

from __future__ import annotations

from typing import Any

from tracepipe.analyses.launch_calls import LaunchCalls
from tracepipe.event.columns import NONE, Bools
from tracepipe.event.model import TIME_LIMIT_NS
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.intervals import Stretches
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.nesting import nearest_of_some
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.spans import INSTANT
from tracepipe.reports.report import Column, Table

# The layers, outermost first: of two events that start together, the first layer's encloses the other.
_RANKS = {"call": 0, "hook": 1, "syscall": 2, "driver": 3, "off-CPU": 4, "scheduler": 5, "GPU": 6}
_LAYERS = {
    "call": "userspace",
    "hook": "hook",
    "syscall": "syscall",
    "driver": "kernel",
    "scheduler": "scheduler",
}
Item = tuple[int, int | None, str, str]
"""Start, end (None for an instant), layer, name."""


def tree_of(run: Run, row: int, top: int) -> tuple[Table, int]:
    """The tree of a row of calls with at most `top` lines, or all for 0, and how many lines are left out."""
    begin_ns = int(run.layer("userspace").start_ns[row])
    items = _on_thread(run, row) + _off_cpu(run, row)
    items.sort(key=lambda item: (item[0], _RANKS[item[2]], -(item[1] or item[0])))
    lines = _lines(items, begin_ns)
    for name, start_ns, end_ns, gpu, stream in _on_gpu(run, row):
        length_ns = end_ns - start_ns
        where = f"{name} (GPU {gpu} stream {stream})"
        lines.append((where, "GPU", start_ns - begin_ns, length_ns, length_ns, 0))
    shown = lines[:top] if top > 0 else lines
    columns = (
        Column("name", "what"),
        Column("layer", "layer"),
        Column("at_ns", "at", "ns"),
        Column("dur_ns", "length", "ns"),
        Column("itself_ns", "itself", "ns"),
        Column("depth", "depth", "count", spare=True),
    )
    rows = [("  " * depth + name, *rest, depth) for name, *rest, depth in shown]
    note = "At: after the start of the call. Itself: the length without the lines inside it."
    return Table("tree", "In this call", columns, rows, note), len(lines) - len(shown)


def _of_thread(run: Run, row: int, *, running: bool) -> Bools:
    """Flags the shapes of the call's thread, shape `(shapes,)`: with `running`, those of the stretches in
    which it ran, else all others.
    """
    every, shape = np.arange(len(run.shapes), dtype=np.int32), int(run.layer("userspace").shape[row])
    same = (run.shapes.column("name", every) == run.shapes.number_of("name", RUNNING)) == running
    for key in ("pid", "tid"):
        same &= run.shapes.column(key, every) == run.shapes.column(key, shape)
    own: Bools = same
    return own


def _on_thread(run: Run, row: int) -> list[Item]:
    """The events that began in the call, on its thread; they are cut at the end of the call."""
    first_ns, end_ns = _ends(run, row)
    shapes = _of_thread(run, row, running=False)
    items: list[Item] = []
    for layer, name in _LAYERS.items():
        of = run.layer(name)
        first, last = np.searchsorted(of.start_ns, [first_ns, end_ns + 1])
        rows = first + np.flatnonzero((of.is_call & shapes[of.shape])[first:last])
        if layer == "call":
            rows = rows[_is_inside(run, row, rows)]
        ends: list[int | None] = np.minimum(of.end_ns[rows], end_ns).tolist()
        ends = [None if kind == INSTANT else end for kind, end in zip(of.kind[rows], ends, strict=True)]
        names = run.shapes.texts("name", of.shape[rows])
        for start, end, called in zip(of.start_ns[rows].tolist(), ends, names, strict=True):
            items.append((start, end, layer, called or ""))
    return items


def _ends(run: Run, row: int) -> tuple[int, int]:
    calls = run.layer("userspace")
    return int(calls.start_ns[row]), int(calls.end_ns[row])


def _is_inside(run: Run, row: int, rows: Ints) -> Bools:
    """Flags the rows of calls that are `row` or inside it. Shapes `(n,)`."""
    parents = run.layer("userspace").parent
    wanted = np.zeros(len(parents), np.bool_)
    wanted[row] = True
    inside: Bools = nearest_of_some(parents, wanted, rows) == row
    return inside


def _off_cpu(run: Run, row: int) -> list[Item]:
    first_ns, last_ns = _ends(run, row)
    shapes, of = _of_thread(run, row, running=True), run.layer("scheduler")
    some = shapes[of.shape] & (of.end_ns > of.start_ns)
    start_ns, end_ns = of.start_ns[some], of.end_ns[some]
    before_ns = int(end_ns[end_ns <= first_ns].max(initial=-TIME_LIMIT_NS))
    after_ns = int(start_ns[start_ns >= last_ns].min(initial=TIME_LIMIT_NS))
    inside = (end_ns > first_ns) & (start_ns < last_ns)
    # A thread is off the processor between two stretches in which it runs; outside them it is not known.
    around = [ts_ns for ts_ns in (before_ns, after_ns) if abs(ts_ns) < TIME_LIMIT_NS]
    edges = np.array(around, np.int64)
    gaps = Stretches(
        np.concatenate([start_ns[inside], edges - (edges <= first_ns)]),
        np.concatenate([end_ns[inside], edges + (edges > first_ns)]),
    ).gaps()
    items: list[Item] = []
    for left_ns, right_ns in zip(gaps.start_ns.tolist(), gaps.end_ns.tolist(), strict=True):
        if max(left_ns, first_ns) < min(right_ns, last_ns):
            items.append((max(left_ns, first_ns), min(right_ns, last_ns), "off-CPU", "off-CPU"))
    return items


def _on_gpu(run: Run, row: int) -> list[tuple[Any, ...]]:
    """The kernels and copies that a call, or one inside it, launched."""
    launches, found = LaunchCalls(run), list[tuple[Any, ...]]()
    for name in ("gpu_kernel", "transfer"):
        for work, rows in launches.work(name):
            calls = launches.find(work, rows)
            asked = np.flatnonzero(calls != NONE)
            own = rows[asked[_is_inside(run, row, calls[asked])]]
            shape = work.shape[own]
            numbers = (run.shapes.numbers(key, shape, 0) for key in ("gpu", "stream"))
            columns = (column.tolist() for column in (work.start_ns[own], work.end_ns[own], *numbers))
            found += zip(run.shapes.texts("name", shape), *columns, strict=True)
    return sorted(found, key=lambda one: one[1])


def _lines(items: list[Item], base_ns: int) -> list[tuple[Any, ...]]:
    """A line for each item: name, layer, start, length, length without inner items, depth."""
    lines: list[list[Any]] = []
    around: list[tuple[int, int]] = []  # end and line of those that are open
    for start_ns, end_ns, layer, name in items:
        while around and around[-1][0] <= start_ns:
            around.pop()
        length_ns = None if end_ns is None else end_ns - start_ns
        if around and length_ns is not None:
            # A thread may sleep beyond the end of the call in which it fell asleep.
            lines[around[-1][1]][4] -= min(end_ns or 0, around[-1][0]) - start_ns
        lines.append([name, layer, start_ns - base_ns, length_ns, length_ns, len(around)])
        if end_ns is not None:
            around.append((end_ns if not around else min(end_ns, around[-1][0]), len(lines) - 1))
    return [tuple(line) for line in lines]
