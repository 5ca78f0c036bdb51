"""Everything that happened in one call, as a tree: calls, system calls, driver functions, sleep, the GPU."""

from __future__ import annotations

from typing import Any

from tracepipe.analyses.launch_calls import LaunchCalls
from tracepipe.event.columns import NONE, Bools, Int32s
from tracepipe.event.model import TIME_LIMIT_NS
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.intervals import Stretches
from tracepipe.reports.frames.layers import Layer
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.nesting import nearest_of_some
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.stored import flagged, parts
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
    call = run.rows("userspace", np.array([row])).row(0, named=True)
    items = _on_thread(run, call, row) + _off_cpu(run, call)
    items.sort(key=lambda item: (item[0], _RANKS[item[2]], -(item[1] or item[0])))
    lines = _lines(items, call["start_ns"])
    for name, start_ns, end_ns, gpu, stream in _on_gpu(run, row):
        length_ns = end_ns - start_ns
        where = f"{name} (GPU {gpu or 0} stream {stream or 0})"
        lines.append((where, "GPU", start_ns - call["start_ns"], length_ns, length_ns, 0))
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


def _of_thread(run: Run, call: dict[str, Any], *, running: bool) -> Bools:
    """Flags the shapes of the call's thread, shape `(shapes,)`: with `running`, those of the stretches in
    which it ran, else all others.
    """
    every = np.arange(len(run.shapes), dtype=np.int32)
    same = (run.shapes.column("name", every) == run.shapes.number_of("name", RUNNING)) == running
    for key in ("pid", "tid"):
        same &= run.shapes.column(key, every) == run.shapes.number_of(key, call[key])
    own: Bools = same
    return own


def _on_thread(run: Run, call: dict[str, Any], row: int) -> list[Item]:
    """The events that began in the call, on its thread; they are cut at the end of the call."""
    first_ns, end_ns = call["start_ns"], call["end_ns"]
    shapes = _of_thread(run, call, running=False)
    items: list[Item] = []
    for layer, name in _LAYERS.items():
        rows = _began(run.layer(name), shapes, first_ns, end_ns)
        if layer == "call":
            rows = rows[_is_inside(run, row, rows)]
        found = run.rows(name, rows).select("start_ns", "end_ns", "kind", "name").iter_rows()
        items += [
            (start, None if kind == "instant" else min(end, end_ns), layer, called)
            for start, end, kind, called in found
        ]
    return items


def _began(layer: Layer, shapes: Bools, first_ns: int, last_ns: int) -> Int32s:
    """The rows of some shapes that began in a stretch of time. Shape `(n,)`."""

    is_call = layer.is_call

    def which(part: slice) -> Bools:
        start_ns = layer.start_ns[part]
        began: Bools = (start_ns >= first_ns) & (start_ns <= last_ns) & is_call[part]
        return began & shapes[layer.shape[part]]

    return flagged(len(layer), which)


def _is_inside(run: Run, row: int, rows: Ints) -> Bools:
    """Flags the rows of calls that are `row` or inside it. Shapes `(n,)`."""
    parents = run.layer("userspace").parent
    wanted = np.zeros(len(parents), np.bool_)
    wanted[row] = True
    inside: Bools = nearest_of_some(parents, wanted, rows) == row
    return inside


def _off_cpu(run: Run, call: dict[str, Any]) -> list[Item]:
    first_ns, last_ns = call["start_ns"], call["end_ns"]
    shapes, of = _of_thread(run, call, running=True), run.layer("scheduler")
    starts, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    before_ns, after_ns = -TIME_LIMIT_NS, TIME_LIMIT_NS
    for part in parts(len(of)):
        some = shapes[of.shape[part]] & (of.end_ns[part] > of.start_ns[part])
        start_ns, end_ns = of.start_ns[part][some], of.end_ns[part][some]
        before_ns = int(end_ns[end_ns <= first_ns].max(initial=before_ns))
        after_ns = int(start_ns[start_ns >= last_ns].min(initial=after_ns))
        inside = (end_ns > first_ns) & (start_ns < last_ns)
        starts.append(start_ns[inside])
        ends.append(end_ns[inside])
    # A thread is off the processor between two stretches in which it runs; outside them it is not known.
    around = [ts_ns for ts_ns in (before_ns, after_ns) if abs(ts_ns) < TIME_LIMIT_NS]
    edges = np.array(around, np.int64)
    gaps = Stretches(
        np.concatenate([*starts, edges - (edges <= first_ns)]),
        np.concatenate([*ends, edges + (edges > first_ns)]),
    ).gaps()
    items: list[Item] = []
    for left_ns, right_ns in zip(gaps.start_ns.tolist(), gaps.end_ns.tolist(), strict=True):
        if max(left_ns, first_ns) < min(right_ns, last_ns):
            items.append((max(left_ns, first_ns), min(right_ns, last_ns), "off-CPU", "off-CPU"))
    return items


def _on_gpu(run: Run, row: int) -> list[tuple[Any, ...]]:
    """The kernels and copies that a call, or one inside it, launched."""
    launches, found = LaunchCalls(run), []
    for name in ("gpu_kernel", "transfer"):
        for work, rows in launches.work(name):
            calls = launches.find(work, rows)
            asked = np.flatnonzero(calls != NONE)
            own = rows[asked[_is_inside(run, row, calls[asked])]]
            if len(own):
                found.append(run.rows(name, own).select("name", "start_ns", "end_ns", "gpu", "stream"))
    return pl.concat(found).sort("start_ns", maintain_order=True).rows() if found else []


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
