"""Context switch points: where a GPU continues with another process, and calls that change the context."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from tracepipe.analyses.cuda_calls import outermost_named, rows_named
from tracepipe.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.analyses.gpu_work import Idle, Work
from tracepipe.event.columns import NONE, Ints
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
_PROCESS, _CALLED, _DRIVER = range(len(_KINDS))
_ABOUT_CONTEXTS = ("kernel", "scheduler")


class _Point(NamedTuple):
    """A context switch point. `dur_ns` is the length of the call, or how long the GPU was idle before it
    continued with another process; None where it is not known. `kind` is an index into `_KINDS`.
    """

    start_ns: int
    name: str
    kind: int
    gpu: int | None
    tid: int | None
    dur_ns: int | None


def context_tables(run: Run, work: Work, idle: list[Idle], top: int) -> list[Table]:
    """The points by kind and name, and the first of them one by one; no tables without points."""
    hooks = load_set("context-switch").hooks
    patterns = [hook.pattern for hook in hooks if ":" not in hook.pattern and hook.layer in _ABOUT_CONTEXTS]
    driver = rows_named(run, "kernel", lambda name: any(fnmatchcase(name, pattern) for pattern in patterns))
    points = [
        *_of_processes(run, work),
        *_of_rows(run, "userspace", outermost_named(run, _CALL), _CALLED),
        *_of_rows(run, "kernel", driver, _DRIVER),
    ]
    if not points:
        return []
    points.sort(key=lambda point: point.start_ns)
    some_idle = nothing()
    for one in idle:
        some_idle = some_idle.joined(Stretches(one.gaps.start_ns, one.gaps.end_ns))
    starts_ns = np.array([point.start_ns for point in points], np.int64)
    is_process = np.array([point.kind == _PROCESS for point in points], np.bool_)
    in_idle = ((some_idle.covered_ns(starts_ns, starts_ns + 1) > 0) | is_process).tolist()
    return [_by_name(points, in_idle, top), _one_by_one(points, in_idle, top, run.facts.start_ns)]


def _of_processes(run: Run, work: Work) -> Iterator[_Point]:
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
    columns = (work.start_ns[rows], before[rows], work.pid[rows], gpus, idle_ns)
    for start_ns, was, now, gpu, dur_ns in zip(*(column.tolist() for column in columns), strict=True):
        yield _Point(start_ns, f"{called[was]} → {called[now]}", _PROCESS, gpu, None, dur_ns)


def _of_rows(run: Run, name: str, rows: Ints, kind: int) -> Iterator[_Point]:
    """The calls at some rows of a layer as points."""
    layer = run.layer(name).rows(rows, "shape", "kind", "start_ns", "end_ns")
    gpus, tids = (run.shapes.numbers(key, layer.shape, NONE) for key in ("gpu", "tid"))
    lengths_ns = np.where(layer.has_length, layer.end_ns - layer.start_ns, NONE)
    columns = (column.tolist() for column in (layer.start_ns, gpus, tids, lengths_ns))
    for called, start_ns, *values in zip(run.shapes.texts("name", layer.shape), *columns, strict=True):
        known = (None if value == NONE else value for value in values)
        yield _Point(start_ns, called or "", kind, *known)


def _by_name(points: list[_Point], in_idle: list[bool], top: int) -> Table:
    groups: dict[tuple[int, str], tuple[list[bool], list[int]]] = {}
    for point, is_idle in zip(points, in_idle, strict=True):
        idle, lengths_ns = groups.setdefault((point.kind, point.name), ([], []))
        idle.append(is_idle)
        if point.dur_ns is not None:
            lengths_ns.append(point.dur_ns)
    rows: list[tuple[Any, ...]] = [
        (kind, name, len(idle), sum(idle), *of_values(np.array(lengths_ns, np.int64)))
        for (kind, name), (idle, lengths_ns) in groups.items()
    ]
    total_ns = len(rows[0]) - len(LENGTH_COLUMNS)
    rows.sort(key=lambda row: (row[total_ns] is None, -(row[total_ns] or 0), row[1]))
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


def _one_by_one(points: list[_Point], in_idle: list[bool], top: int, base_ns: int) -> Table:
    shown = len(points) if top <= 0 else min(top, len(points))
    rows = [
        (
            point.start_ns - base_ns,
            point.name,
            _KINDS[point.kind],
            point.gpu,
            point.tid,
            point.dur_ns,
            "yes" if is_idle else "no",
        )
        for point, is_idle in zip(points[:shown], in_idle, strict=False)
    ]
    columns = (
        Column("at_ns", "at", "at"),
        Column("name", "what"),
        Column("kind", "kind", spare=True),
        Column("gpu", "GPU", "id"),
        Column("tid", "thread", "id"),
        Column("dur_ns", "length", "ns"),
        Column("in_idle", "in idle"),
    )
    left_out = f"{len(points) - shown} more: --top 0 lists all." if shown < len(points) else ""
    return Table("context_points", "Context switch points in order", columns, rows, left_out)
