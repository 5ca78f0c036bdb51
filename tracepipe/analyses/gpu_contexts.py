"""Context switch points: where a GPU continues with another process, and calls that change the context."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from tracepipe.analyses.cuda_calls import outermost_named, rows_named
from tracepipe.analyses.distribution import LENGTH_COLUMNS, cells_of, spread_of
from tracepipe.analyses.gpu_work import Idle, Work
from tracepipe.event.columns import NONE, Int64s, Ints
from tracepipe.event.intervals import Stretches, nothing
from tracepipe.hooks.sets import load_set
from tracepipe.libraries import np
from tracepipe.reports.report import Column, Table
from tracepipe.store.run import Run

# Calls that create, end or change a thread's current context, without calls that only query it.
_CALL = re.compile(
    r"cuCtx(Create|Destroy|Attach|Detach|SetCurrent|PushCurrent|PopCurrent)(_v\d+)?"
    r"|cuDevicePrimaryCtx(Retain|Release|Reset)(_v\d+)?|cuGreenCtx(Create|Destroy)|cuCtxFromGreenCtx"
    r"|cudaSetDevice|cudaInitDevice|cudaDeviceReset"
)
# The kinds of points, in the order of the table.
_KINDS = ("GPU continues with another process", "call", "driver function")
_ABOUT_CONTEXTS = ("kernel", "scheduler")
_Points = tuple[list[str], Int64s, Int64s, Int64s, Int64s]
"""The names of points; their times, GPUs and threads, and the lengths of the calls, or how long the GPU was
idle before it continued with another process. NONE is an unknown value. Shapes `(n,)`.
"""


def context_tables(run: Run, work: Work, idle: list[Idle], top: int) -> list[Table]:
    """The points by kind and name, and the first of them one by one; no tables without points. Without `idle`
    times, it is not known what happened in one.
    """
    hooks = load_set("context-switch").hooks
    patterns = [hook.pattern for hook in hooks if ":" not in hook.pattern and hook.layer in _ABOUT_CONTEXTS]
    driver = rows_named(run, "kernel", lambda name: any(fnmatchcase(name, pattern) for pattern in patterns))
    kinds = (
        _of_processes(run, work),
        _of_rows(run, "userspace", outermost_named(run, _CALL)),
        _of_rows(run, "kernel", driver),
    )
    names = [name for one, *_ in kinds for name in one]
    if not names:
        return []
    some_idle = nothing()
    for one in idle:
        some_idle = some_idle.joined(Stretches(one.gaps.start_ns, one.gaps.end_ns))
    kind = np.repeat(np.arange(len(kinds)), [len(one) for one, *_ in kinds])
    start_ns, gpu, tid, dur_ns = (np.concatenate(of) for of in zip(*(of for _, *of in kinds), strict=True))
    in_idle = (kind == 0) | (some_idle.covered_ns(start_ns, start_ns + 1) > 0)
    order = np.argsort(start_ns, kind="stable")
    shown = order[:top] if top > 0 else order
    known = ([None if value == NONE else value for value in of[shown].tolist()] for of in (gpu, tid, dur_ns))
    rows = [
        (at_ns, names[at], _KINDS[kind[at]], *cells, ("yes" if in_idle[at] else "no") if idle else None)
        for at, at_ns, *cells in zip(
            shown.tolist(), (start_ns[shown] - run.facts.start_ns).tolist(), *known, strict=True
        )
    ]
    columns = (
        Column("at_ns", "at", "at"),
        Column("name", "what"),
        Column("kind", "kind", spare=True),
        Column("gpu", "GPU", "id"),
        Column("tid", "thread", "pid"),
        Column("dur_ns", "length", "ns"),
        Column("in_idle", "in idle"),
    )
    left_out = f"{len(order) - len(shown)} more: --top 0 lists all." if len(shown) < len(order) else ""
    in_order = Table("context_points", "Context switch points in order", columns, rows, left_out)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    of_name = np.array([numbers[name] for name in names], np.int32)
    points = {"kind": kind, "name": of_name, "in_idle": in_idle, "dur_ns": dur_ns}
    return [_by_name(run, points, [*numbers], top, knows_idle=bool(idle)), in_order]


def _of_processes(run: Run, work: Work) -> _Points:
    """The points at which the next work on a GPU belongs to another process than the work before."""
    before = work.pid[np.arange(len(work)) - 1]
    turns = (work.pid != before) & (work.pid != NONE) & (before != NONE)
    turns[work.bounds[:-1]] = False  # the first work of each GPU
    rows = np.flatnonzero(turns)
    gpus = work.gpus[np.searchsorted(work.bounds, rows, "right") - 1]
    called = {
        number: f"{run.process_name(pid)} {pid}"
        for number in {*before[rows].tolist(), *work.pid[rows].tolist()}
        for pid in (run.shapes.value("pid", number),)
    }
    idle_ns = np.maximum(work.start_ns[rows] - work.end_ns[rows - 1], 0)
    names = [
        f"{called[was]} → {called[now]}"
        for was, now in zip(before[rows].tolist(), work.pid[rows].tolist(), strict=True)
    ]
    return names, work.start_ns[rows], gpus, np.full(len(rows), NONE), idle_ns


def _of_rows(run: Run, name: str, rows: Ints) -> _Points:
    """The calls at some rows of a layer."""
    layer = run.layer(name).rows(rows, "shape", "kind", "start_ns", "end_ns")
    gpus, tids = (run.shapes.numbers(key, layer.shape, NONE) for key in ("gpu", "tid"))
    lengths_ns = np.where(layer.has_length, layer.end_ns - layer.start_ns, NONE)
    names = [called or "" for called in run.shapes.texts("name", layer.shape)]
    return names, layer.start_ns, gpus, tids, lengths_ns


def _by_name(run: Run, points: dict[str, Any], names: list[str], top: int, *, knows_idle: bool) -> Table:
    """The points by kind and name, those with the most time."""
    found = run.store.rows(
        f"""select kind, name, count(*), count(*) filter (in_idle), {spread_of(f"nullif(dur_ns, {NONE})")}
        from points group by kind, name""",
        points=points,
    )
    rows: list[tuple[Any, ...]] = [
        (kind, names[name], count, in_idle if knows_idle else None, *cells_of(*spread))
        for kind, name, count, in_idle, *spread in found
    ]
    rows.sort(key=lambda row: (row[4] is None, -(row[4] or 0), row[1], row[0]))
    columns = (
        Column("kind", "context switch points"),
        Column("name", "what"),
        Column("count", "count", "count"),
        Column("in_idle", "in idle", "count"),
        *LENGTH_COLUMNS,
    )
    note = (
        "Length: of the call; where a GPU continues with another process, how long it was idle in between. "
        "In idle: how many happened while a GPU was idle."
    )
    if 0 < top < len(rows):
        note += f" {len(rows) - top} more, with less time: --top 0 lists all."
        rows = rows[:top]
    shown = [(_KINDS[kind], *rest) for kind, *rest in sorted(rows, key=lambda row: row[0])]
    return Table("contexts", "Context switch points", columns, shown, note, grouped=True)
