"""Context switch points: where a GPU continues with another process, and calls that change the context."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from tracepipe.analyses.cuda_calls import outermost_named, rows_named
from tracepipe.analyses.distribution import LENGTH_COLUMNS, lengths
from tracepipe.analyses.gpu_work import Idle, Work
from tracepipe.event.columns import NONE, Bools
from tracepipe.hooks.sets import load_set
from tracepipe.reports.frames.eager import nulls, picked
from tracepipe.reports.frames.intervals import Stretches, nothing
from tracepipe.reports.frames.kept_rows import kept_rows
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.stored import flagged
from tracepipe.reports.report import Column, Table

# Calls that create, end or change a thread's current context, without calls that only query it.
_CALL = re.compile(
    r"cuCtx(Create|Destroy|Attach|Detach|SetCurrent|PushCurrent|PopCurrent)(_v\d+)?"
    r"|cuDevicePrimaryCtx(Retain|Release|Reset)(_v\d+)?|cuGreenCtx(Create|Destroy)|cuCtxFromGreenCtx"
    r"|cudaSetDevice|cudaInitDevice|cudaDeviceReset"
)
_PROCESS, _CALLED, _DRIVER = "GPU continues with another process", "call", "driver function"
_ABOUT_CONTEXTS = ("kernel", "scheduler")
_COLUMNS = ("start_ns", "name", "gpu", "pid", "tid", "dur_ns")


def context_points(run: Run, work: Work, idle: list[Idle]) -> pl.DataFrame:
    """Return all points, sorted by time: start_ns, kind, name, gpu, pid, tid, dur_ns, in_idle.

    `dur_ns` is the length of the call, or how long the GPU was idle before it continued with another process.
    `in_idle` is whether any GPU was idle at that time.
    """
    points = pl.concat([_processes(run, work), _calls(run), _driver(run)]).sort("start_ns")
    if not len(points):
        return points.with_columns(in_idle=pl.lit(None, pl.Boolean))
    some_idle = nothing()
    for one in idle:
        some_idle = some_idle.joined(Stretches(one.gaps.start_ns, one.gaps.end_ns))
    starts = points["start_ns"].to_numpy()
    inside = some_idle.covered_ns(starts, starts + 1) > 0
    return points.with_columns(in_idle=pl.Series(inside, dtype=pl.Boolean) | (pl.col("kind") == _PROCESS))


def _processes(run: Run, work: Work) -> pl.DataFrame:
    """The points at which the next work on a GPU belongs to another process than the work before."""
    is_first = np.zeros(len(work) + 1, np.bool_)
    is_first[work.bounds] = True

    def turns(part: slice) -> Bools:
        pid, before = work.pid[part], work.pid[np.arange(part.start, part.stop) - 1]
        found: Bools = (pid != before) & (pid != NONE) & (before != NONE) & ~is_first[part]
        return found

    rows = flagged(len(work), turns)
    pairs, of = np.unique(np.stack((work.pid[rows - 1], work.pid[rows])), axis=1, return_inverse=True)
    pids = run.shapes.value
    names = [
        " → ".join(f"{run.process_name(pid)} {pid}" for pid in (pids("pid", was), pids("pid", now)))
        for was, now in zip(*pairs.tolist(), strict=True)
    ]
    starts_ns = work.start_ns[rows]
    return pl.DataFrame(
        {
            "start_ns": starts_ns,
            "name": picked(pl.Series(names, dtype=pl.String), of.reshape(-1)),
            "gpu": work.gpus[np.searchsorted(work.bounds, rows, "right") - 1],
            "pid": pl.Series([pids("pid", number) for number in work.pid[rows].tolist()], dtype=pl.Int64),
            "tid": nulls("tid", len(rows), pl.Int64()),
            "dur_ns": np.maximum(starts_ns - work.end_ns[rows - 1], 0),
        }
    ).select("start_ns", _kind(_PROCESS), "name", "gpu", "pid", "tid", "dur_ns")


def _kind(kind: str) -> pl.Expr:
    # An enum takes one byte a row, a text sixteen.
    return pl.lit(kind, pl.Enum((_PROCESS, _CALLED, _DRIVER))).alias("kind")


def _points(frame: pl.DataFrame, kind: str) -> pl.DataFrame:
    return frame.select("start_ns", _kind(kind), "name", "gpu", "pid", "tid", "dur_ns")


def _calls(run: Run) -> pl.DataFrame:
    return _points(run.rows("userspace", outermost_named(run, _CALL), *_COLUMNS), _CALLED)


def _driver(run: Run) -> pl.DataFrame:
    hooks = load_set("context-switch").hooks
    patterns = [hook.pattern for hook in hooks if ":" not in hook.pattern and hook.layer in _ABOUT_CONTEXTS]
    rows = rows_named(run, "kernel", lambda name: any(fnmatchcase(name, pattern) for pattern in patterns))
    return _points(run.rows("kernel", rows, *_COLUMNS), _DRIVER)


def context_tables(run: Run, work: Work, idle: list[Idle], top: int) -> list[Table]:
    """The points by kind and name, and the first of them one by one; no tables without points."""
    points = context_points(run, work, idle)
    if not len(points):
        return []
    counted = (
        points.group_by("kind", "name")
        .agg(pl.len().alias("count"), pl.col("in_idle").sum(), *lengths())
        .sort("total_ns", "name", descending=[True, False], nulls_last=True)
    )
    columns = (
        Column("kind", "context switch points"),
        Column("name", "what"),
        Column("count", "count", "count"),
        Column("in_idle", "in idle", "count"),
        *LENGTH_COLUMNS,
    )
    order = [column.key for column in columns]
    note = (
        "Length: of the call; where a GPU continues with another process, how long it was idle in between. "
        "In idle: how many happened while a GPU was idle."
    )
    counts = counted.sort("kind", maintain_order=True).select(order)
    if 0 < top < len(counts):
        note += f" {len(counts) - top} more, with less time: --top 0 lists all."
        counts = counted.head(top).sort("kind", maintain_order=True).select(order)
    shown = points.head(top) if top > 0 else points
    rows = (
        (start_ns - run.facts.start_ns, *rest, "yes" if in_idle else "no")
        for start_ns, *rest, in_idle in shown.select(
            "start_ns", "name", "kind", "gpu", "tid", "dur_ns", "in_idle"
        ).iter_rows()
    )
    each = (
        Column("at_ns", "at", "at"),
        Column("name", "what"),
        Column("kind", "kind", spare=True),
        Column("gpu", "GPU", "id"),
        Column("tid", "thread", "id"),
        Column("dur_ns", "length", "ns"),
        Column("in_idle", "in idle"),
    )
    left_out = f"{len(points) - len(shown)} more: --top 0 lists all." if len(shown) < len(points) else ""
    counted_rows = kept_rows(counts.iter_rows())
    return [
        Table("contexts", "Context switch points", columns, counted_rows, note, grouped=True),
        Table("context_points", "Context switch points in order", each, kept_rows(rows), left_out),
    ]
