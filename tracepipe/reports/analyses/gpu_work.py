"""What each GPU did, as one list: kernels, copies, warps; when it was busy, and which call asked for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracepipe.event.columns import NONE, Int64s
from tracepipe.reports.analyses.cuda_calls import launching, rows_by_effect
from tracepipe.reports.analyses.launch_calls import LaunchCalls
from tracepipe.reports.frames.intervals import Stretches
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.nesting import NOBODY, nearest_of_some
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.shapes import where
from tracepipe.reports.frames.stored import parts

BY_ID, BY_ORDER = "launch id", "order"
_TOLD_BY, _WHAT = (BY_ID, BY_ORDER), ("kernel", "copy", "warps")
_OF_CALL = ("name", "pid", "tid", "start_ns", "end_ns")
_COLUMNS = ("gpu", "name", "pid", "launch", "start_ns", "end_ns")


def gpu_work(run: Run) -> pl.DataFrame:
    """Kernels and copies on a GPU in the order of their starts, and the warps of launches without a kernel.

    gpu (0 where it was not recorded), name, what (kernel, copy, warps), pid, start_ns, end_ns; call: the row
    in `run.calls` of the call that asked for it, null where it is not known, and `told_by`: `BY_ID`, or
    `BY_ORDER` where work has no launch id and the last launch or copy that began before it is taken. What has
    no length is left out.
    """
    lasts = pl.col("end_ns") > pl.col("start_ns")
    kernels = run.some("gpu_kernel", *_COLUMNS)
    if not kernels.select(lasts.all()).item():
        kernels = kernels.filter(lasts)
    kernels = kernels.with_columns(what=_what("kernel"))
    copies = run.some("transfer", *_COLUMNS).filter(lasts & pl.col("gpu").is_not_null())
    every = [kernels, copies.select(*_COLUMNS, what=_what("copy")), _warps(run, kernels)]
    work = pl.concat(every, how="vertical_relaxed").with_columns(pl.col("gpu").fill_null(0))
    return _by_order(run, _launched(run, work)).drop("launch")


def _what(what: str) -> pl.Expr:
    # One byte a row, where a text takes sixteen.
    return pl.lit(what, dtype=pl.Enum(_WHAT))


def _warps(run: Run, kernels: pl.DataFrame) -> pl.DataFrame:
    """Launches without a kernel, from the first entry to the last exit; warps of no launch one by one."""
    columns = ("gpu", "name", "pid", "launch", "entry_ns", "last_exit_ns")
    start_ns, until = pl.col("entry_ns").alias("start_ns"), pl.col("last_exit_ns").fill_null(run.facts.end_ns)
    known = kernels["launch"].drop_nulls().unique().implode()
    ends = pl.col("start_ns").min(), pl.col("end_ns").max()
    launch = pl.col("launch")
    of_launches, alone = [], []
    for warps in run.warp_table.frames(*columns):
        some = warps.select("gpu", "name", "pid", "launch", start_ns, until.alias("end_ns"))
        some = some.filter(pl.col("end_ns") > pl.col("start_ns"))
        asked = some.filter(launch.is_not_null() & ~launch.is_in(known))
        of_launches.append(asked.group_by(*columns[:4], maintain_order=True).agg(*ends))
        alone.append(some.filter(launch.is_null() & pl.lit(len(kernels) == 0)))
    if not of_launches:
        return kernels.clear()
    whole = pl.concat(of_launches).group_by(*columns[:4], maintain_order=True).agg(*ends)
    return pl.concat([whole, *alone]).with_columns(what=_what("warps"))


def _launched(run: Run, work: pl.DataFrame) -> pl.DataFrame:
    """Work of a GPU (`start_ns`, `launch`) in the order of its starts, with `call`: the row in `run.calls`.

    A launch id may come again: the last call of it before the kernel counts. Null without a recorded call.
    """
    work = work.sort("start_ns")
    has_launch = work["launch"].is_not_null().to_numpy()
    ids = work["launch"].fill_null(0).to_numpy().view(np.int64)
    calls, launches = np.full(len(work), NONE, np.int64), LaunchCalls(run)
    for part in parts(len(work)):
        calls[part] = launches.last_before(ids[part], work["start_ns"][part].to_numpy())
    return work.with_columns(where(has_launch & (calls != NONE), pl.Series("call", calls)))


def _by_order(run: Run, work: pl.DataFrame) -> pl.DataFrame:
    work = work.with_columns(
        pl.when(pl.col("call").is_not_null()).then(pl.lit(BY_ID, pl.Enum(_TOLD_BY))).alias("told_by")
    )
    guessed = np.full(len(work), -1, np.int64)
    without = (work["call"].is_null() & work["launch"].is_null()).to_numpy()
    if without.any():
        is_copy = (work["what"] == "copy").to_numpy()
        _last_before(run, work, without & ~is_copy, np.flatnonzero(launching(run)), guessed)
        _last_before(run, work, without & is_copy, rows_by_effect(run)["transfer"], guessed)
    found = pl.Series(guessed)
    return work.with_columns(
        pl.when(found >= 0).then(found).otherwise(pl.col("call")).alias("call"),
        pl.when(found >= 0)
        .then(pl.lit(BY_ORDER, pl.Enum(_TOLD_BY)))
        .otherwise(pl.col("told_by"))
        .alias("told_by"),
    )


def _last_before(run: Run, work: pl.DataFrame, wanted: Any, calls: Int64s, into: Any) -> None:
    """Put the last of some rows of `run.calls`, of the same process, before each wanted row."""
    rows = run.rows("userspace", calls, "start_ns", "pid").with_columns(row=pl.Series(calls))
    for (pid,), part in rows.partition_by("pid", as_dict=True).items():
        same = (work["pid"].eq_missing(pl.Series([pid], dtype=pl.Int64)) | work["pid"].is_null()).to_numpy()
        same &= wanted
        at = np.searchsorted(part["start_ns"].to_numpy(), work["start_ns"].to_numpy()[same], "right") - 1
        found = np.where(at >= 0, part["row"].to_numpy()[np.maximum(at, 0)], -1)
        # Work of no known process: the latest call of any.
        into[same] = np.maximum(into[same], found)


@dataclass(frozen=True, slots=True)
class Idle:
    """When one GPU did nothing, between its first work and its last.

    `previous` and `following` are rows of `work` (name, start_ns, end_ns, call, told_by), of each gap; `busy`
    is when it did something.
    """

    gpu: int
    work: pl.DataFrame
    busy: Stretches
    start_ns: Any
    end_ns: Any
    previous: Any
    following: Any


def idle_of(work: pl.DataFrame, gpu: int) -> Idle:
    """The gaps of one GPU. `work` is `gpu_work(run)`."""
    own = work.filter(gpu=gpu).select("name", "start_ns", "end_ns", "call", "told_by")
    starts, ends = own["start_ns"].to_numpy(), own["end_ns"].to_numpy()
    busy = Stretches(starts, ends)
    gaps = busy.gaps()
    by_end = np.argsort(ends, kind="stable")
    # A gap lies between the end of one piece of work and the start of another, to the nanosecond.
    following = np.searchsorted(starts, gaps.end_ns)
    previous = by_end[np.searchsorted(ends[by_end], gaps.start_ns)] if len(own) else by_end
    return Idle(gpu, own, busy, gaps.start_ns, gaps.end_ns, previous, following)


def outermost_of(run: Run, rows: pl.Series) -> pl.DataFrame:
    """The outermost call around each row of `run.calls`: name, pid, tid, start_ns, end_ns; null for null."""
    tops = outermost_rows(run, rows)
    if not len(run.layer("userspace")):
        return run.some("userspace", *_OF_CALL).clear(len(rows))
    return run.rows("userspace", np.maximum(tops, 0), *_OF_CALL).select(
        pl.when(pl.Series(tops != NONE)).then(pl.all())
    )


def outermost_rows(run: Run, rows: pl.Series) -> Int64s:
    """The rows of these calls, NONE for null."""
    parents, tops = run.layer("userspace").parent, rows.fill_null(NONE).to_numpy().astype(np.int64)
    known = tops != NONE
    if known.any():
        tops[known] = nearest_of_some(parents, parents == NOBODY, tops[known])
    return tops
