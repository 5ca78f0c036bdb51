"""Context switch points: where a GPU goes on with another process, and calls that change the context."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from tracepipe.hooks.sets import load_set
from tracepipe.reports.analyses.cuda_calls import outermost_named, rows_named
from tracepipe.reports.analyses.distribution import LENGTH_COLUMNS, lengths
from tracepipe.reports.analyses.gpu_work import Idle
from tracepipe.reports.frames.intervals import nothing
from tracepipe.reports.frames.libraries import pl
from tracepipe.reports.frames.run import Run
from tracepipe.reports.report import Column, Table

# Calls that make, end, or change a thread's current context; those that only ask are not among them.
_CALL = re.compile(
    r"cuCtx(Create|Destroy|Attach|Detach|SetCurrent|PushCurrent|PopCurrent)(_v\d+)?"
    r"|cuDevicePrimaryCtx(Retain|Release|Reset)(_v\d+)?|cuGreenCtx(Create|Destroy)|cuCtxFromGreenCtx"
    r"|cudaSetDevice|cudaInitDevice|cudaDeviceReset"
)
_PROCESS, _CALLED, _DRIVER = "GPU goes on with another process", "call", "driver function"
_ABOUT_CONTEXTS = ("kernel", "scheduler")
_COLUMNS = ("start_ns", "name", "gpu", "pid", "tid", "dur_ns")


def context_points(run: Run, work: pl.DataFrame, idle: list[Idle]) -> pl.DataFrame:
    """Every point in the order of time: start_ns, kind, name, gpu, pid, tid, dur_ns, in_idle.

    `dur_ns` is how long the call took, and of a GPU that goes on with another process how long it was idle
    there; `in_idle`: whether any GPU was idle at the time.
    """
    points = pl.concat([_processes(run, work), _calls(run), _driver(run)]).sort("start_ns")
    some_idle = nothing()
    for one in idle:
        some_idle = some_idle.joined(one.busy.gaps())
    starts = points["start_ns"].to_numpy()
    inside = some_idle.covered_ns(starts, starts + 1) > 0
    return points.with_columns(in_idle=pl.Series(inside, dtype=pl.Boolean) | (pl.col("kind") == _PROCESS))


def _processes(run: Run, work: pl.DataFrame) -> pl.DataFrame:
    """Where the next piece of work on a GPU is another process's than the one before."""
    before = [pl.col(key).shift().over("gpu").alias(f"before_{key}") for key in ("pid", "end_ns")]
    # Most recordings are of one process: nothing has to be sorted for them.
    some = work.select("gpu", "pid", "start_ns", "end_ns").head(
        len(work) if work["pid"].n_unique() > 1 else 0
    )
    pairs = some.sort("gpu", "start_ns").with_columns(before)
    turns = pairs.filter(pl.col("pid") != pl.col("before_pid"))
    names = [
        f"{run.process_name(was)} {was} → {run.process_name(now)} {now}"
        for was, now in turns.select("before_pid", "pid").iter_rows()
    ]
    idle_ns = (pl.col("start_ns") - pl.col("before_end_ns")).clip(0)
    return turns.select(
        "start_ns",
        pl.lit(_PROCESS).alias("kind"),
        pl.Series("name", names, dtype=pl.String),
        "gpu",
        "pid",
        pl.lit(None, pl.Int64).alias("tid"),
        idle_ns.alias("dur_ns"),
    )


def _points(frame: pl.DataFrame, kind: str) -> pl.DataFrame:
    return frame.select("start_ns", pl.lit(kind).alias("kind"), "name", "gpu", "pid", "tid", "dur_ns")


def _calls(run: Run) -> pl.DataFrame:
    return _points(run.rows("userspace", outermost_named(run, _CALL), *_COLUMNS), _CALLED)


def _driver(run: Run) -> pl.DataFrame:
    hooks = load_set("context-switch").hooks
    patterns = [hook.pattern for hook in hooks if ":" not in hook.pattern and hook.layer in _ABOUT_CONTEXTS]
    rows = rows_named(run, "kernel", lambda name: any(fnmatchcase(name, pattern) for pattern in patterns))
    return _points(run.rows("kernel", rows, *_COLUMNS), _DRIVER)


def context_tables(run: Run, work: pl.DataFrame, idle: list[Idle], top: int) -> list[Table]:
    """The points by what happened, and the first of them one by one; nothing without any."""
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
    note = "Length: of the call, and where a GPU goes on with another process, how long it was idle there."
    counts = counted.sort("kind", maintain_order=True).select(order).rows()
    rows = [
        (start_ns - run.facts.start_ns, *rest)
        for start_ns, *rest in points.select(
            "start_ns", "name", "kind", "gpu", "tid", "dur_ns", "in_idle"
        ).iter_rows()
    ]
    each = (
        Column("at_ns", "at", "at"),
        Column("name", "what"),
        Column("kind", "kind", spare=True),
        Column("gpu", "GPU", "id"),
        Column("tid", "thread", "id"),
        Column("dur_ns", "length", "ns"),
        Column("in_idle", "in idle"),
    )
    shown = rows[:top] if top > 0 else rows
    left_out = f"{len(rows) - len(shown)} more: --top 0 lists all." if len(shown) < len(rows) else ""
    return [
        Table("contexts", "Context switch points", columns, counts, note, grouped=True),
        Table(
            "context_points",
            "One by one",
            each,
            [(*r[:-1], "yes" if r[-1] else "no") for r in shown],
            left_out,
        ),
    ]
