"""What each GPU did, as one list: kernels, copies, warps; when it was busy, and which call asked for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracepipe.event.columns import Int64s
from tracepipe.reports.analyses.cuda_calls import launching, rows_by_effect
from tracepipe.reports.frames.intervals import Stretches
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.nesting import NOBODY, nearest_of_some
from tracepipe.reports.frames.run import Run

BY_ID, BY_ORDER = "launch id", "order"
_OF_CALL = ("name", "pid", "tid", "start_ns", "end_ns")
_COLUMNS = ("gpu", "name", "pid", "launch", "start_ns", "end_ns")


def gpu_work(run: Run) -> pl.DataFrame:
    """Kernels and copies on a GPU in the order of their starts, and the warps of launches without a kernel.

    gpu (0 where it was not recorded), name, what (kernel, copy, warps), pid, launch, start_ns, end_ns; call:
    the row in `run.calls` of the call that asked for it, null where it is not known, and `told_by`: `BY_ID`,
    or `BY_ORDER` where work has no launch id and the last launch or copy that began before it is taken.
    What has no length is left out.
    """
    lasts = pl.col("end_ns") > pl.col("start_ns")
    kernels = run.some("gpu_kernel", *_COLUMNS).filter(lasts).with_columns(what=pl.lit("kernel"))
    copies = run.some("transfer", *_COLUMNS).filter(lasts & pl.col("gpu").is_not_null())
    parts = [kernels, copies.select(*_COLUMNS, what=pl.lit("copy")), _warps(run, kernels)]
    work = pl.concat(parts, how="vertical_relaxed").with_columns(pl.col("gpu").fill_null(0))
    return _by_order(run, _launched(run, work))


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
    return pl.concat([whole, *alone]).with_columns(what=pl.lit("warps"))


def _launched(run: Run, work: pl.DataFrame) -> pl.DataFrame:
    """Work of a GPU (`start_ns`, `launch`) in the order of its starts, with `call`: the row in `run.calls`.

    A launch id may come again: the last call of it before the kernel counts. Null without a recorded call.
    """
    work = work.sort("start_ns")
    calls = run.some("userspace", "launch", "start_ns", "kind").with_row_index("call")
    calls = calls.filter(pl.col("launch").is_not_null())
    calls = calls.filter(pl.col("kind") != "no_begin").select("launch", "start_ns", "call")
    before = work.join_asof(calls, on="start_ns", by="launch", check_sortedness=False)
    # A kernel that starts before its call, by clocks that are off.
    after = work.join_asof(calls, on="start_ns", by="launch", strategy="forward", check_sortedness=False)
    return before.with_columns(pl.coalesce(before["call"], after["call"]).cast(pl.Int64))


def _by_order(run: Run, work: pl.DataFrame) -> pl.DataFrame:
    work = work.with_columns(pl.when(pl.col("call").is_not_null()).then(pl.lit(BY_ID)).alias("told_by"))
    guessed = np.full(len(work), -1, np.int64)
    without = (work["call"].is_null() & work["launch"].is_null()).to_numpy()
    if without.any():
        is_copy = (work["what"] == "copy").to_numpy()
        _last_before(run, work, without & ~is_copy, np.flatnonzero(launching(run)), guessed)
        _last_before(run, work, without & is_copy, rows_by_effect(run)["transfer"], guessed)
    found = pl.Series(guessed)
    return work.with_columns(
        pl.when(found >= 0).then(found).otherwise(pl.col("call")).alias("call"),
        pl.when(found >= 0).then(pl.lit(BY_ORDER)).otherwise(pl.col("told_by")).alias("told_by"),
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

    `previous` and `following` are rows of `work`, of each gap; `busy` is when it did something.
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
    own = work.filter(gpu=gpu)
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
    parents = run.layer("userspace").parent
    known = rows.is_not_null()
    if not len(parents):
        return run.some("userspace", *_OF_CALL).clear(len(rows))
    tops = nearest_of_some(parents, parents == NOBODY, rows.fill_null(0).to_numpy())
    return run.rows("userspace", tops, *_OF_CALL).select(pl.when(known).then(pl.all()))
