"""The warps of a run, kernel by kernel: from warp records, and from threads that were timed one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tracepipe.reports.findings.kernel_warps import LANES, NOT_RECORDED, Ints, KernelWarps, sort_warps
from tracepipe.reports.findings.timed_threads import kernels_of_threads
from tracepipe.reports.frames.grouping import grouped
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run

FULL_MASK = (1 << LANES) - 1
_COLUMNS = (
    "launch", "warp", "sm", "entry_ns", "last_exit_ns", "exits", "entry_mask", "block_index", "warp_in_block",
)  # fmt: skip


def kernels_of(run: Run, pattern: str, launch: int | None) -> list[KernelWarps]:
    """The warps of the kernels whose names `pattern` finds, those with most warps first.

    Launches of one kernel with the same grid and block, by one process on one GPU, are together. `launch`
    leaves only those of that id.
    """
    wanted = re.compile(pattern)
    kernels = [*_from_warps(run, wanted, launch)]
    kernels += [kernel for kernel in kernels_of_threads(run, launch) if wanted.search(kernel.kernel)]
    return sorted(kernels, key=lambda kernel: -kernel.launch.size)


def _from_warps(run: Run, wanted: re.Pattern[str], launch: int | None) -> Iterator[KernelWarps]:
    if not len(run.warp_table):
        return
    kernels, of_warp = run.warp_table.kernels()
    is_wanted = np.array([wanted.search(kernel["name"]) is not None for kernel in kernels], np.bool_)
    rows = np.flatnonzero(is_wanted[of_warp])
    warps = run.warp_table.frame(*_COLUMNS)
    if launch is not None:
        rows = rows[(warps["launch"] == launch).fill_null(False).to_numpy()[rows]]
    # A launch id may be used again: the same warp for the second time is of another launch.
    warps = warps.with_columns(pl.Series("kernel", of_warp)).with_columns(
        again=pl.int_range(pl.len()).over("launch", "warp", "kernel")
    )
    exits = run.exits
    # The exits of each kernel, in the order of its warps.
    of_exit = exits["warp_row"].to_numpy()
    by_kernel = np.lexsort((of_exit, of_warp[of_exit]))
    exits, of_exit = exits[by_kernel], of_exit[by_kernel]
    bounds = np.searchsorted(of_warp[of_exit], np.arange(len(kernels) + 1))
    parts = [(number, rows[places]) for number, places in grouped(of_warp[rows])]
    for number, own in sorted(parts, key=lambda part: int(part[1][0])):
        yield _of_records(kernels[number], warps[own], own, exits[bounds[number] : bounds[number + 1]])


def _of_records(kernel: dict[str, Any], warps: pl.DataFrame, rows: Ints, exits: pl.DataFrame) -> KernelWarps:
    """One kernel's warps, which stand at `rows`, of which `exits` has those that did not leave with all lanes
    at once, and others' of the kernel."""
    launch, ids = _launches(warps)
    of_exit = exits["warp_row"].to_numpy()
    several = np.searchsorted(rows, of_exit)
    own = rows[np.minimum(several, len(rows) - 1)] == of_exit
    several = several[own]
    told = np.zeros(len(warps), np.bool_)
    told[several] = True
    single = np.flatnonzero(~told & (warps["exits"].to_numpy() == 1))
    # Where masks were not recorded, how many lanes left at each exit is not known: none counts then.
    masks = exits["mask"].fill_null(0).to_numpy()[own]
    known = warps["block_index"].null_count() == 0
    linear = warps["warp"].to_numpy()
    return sort_warps(
        kernel["name"],
        _three(kernel["grid"]),
        launch=launch,
        block=warps["block_index"].to_numpy() if known else np.zeros(len(warps), np.int64),
        warp=warps["warp_in_block"].to_numpy() if known else linear,
        sm=_or_not_recorded(warps["sm"]),
        entry_ns=_or_not_recorded(warps["entry_ns"]),
        exit_warp=np.concatenate([single, several]),
        exit_ns=np.concatenate(
            [warps["last_exit_ns"].fill_null(0).to_numpy()[single], exits["exit_ns"].to_numpy()[own]]
        ),
        exit_mask=np.concatenate(
            [warps["entry_mask"].fill_null(FULL_MASK).to_numpy()[single].astype(np.int64), masks]
        ),
        blocks_known=known,
        launch_ids=ids,
    )


def _launches(frame: pl.DataFrame) -> tuple[Ints, tuple[int, ...]]:
    """The number of each row's launch, 0, 1, …, and what the recording calls each; -1 where it gives no
    id."""
    rank = pl.struct("launch", "again").rank("dense").cast(pl.Int64) - 1
    numbered = frame.select(pl.col("launch").fill_null(0), "again", nameless=pl.col("launch").is_null())
    number = numbered.select(rank.alias("n"))["n"].to_numpy()
    _, at = np.unique(number, return_index=True)
    rows = numbered[at.tolist()]
    ids = tuple(-1 if nameless else launch for launch, _, nameless in rows.iter_rows())
    return number, ids


def _or_not_recorded(column: pl.Series) -> Ints:
    return column.cast(pl.Int64).fill_null(NOT_RECORDED).to_numpy()


def _three(sizes: list[int] | None) -> tuple[int, int, int] | None:
    return (sizes[0], sizes[1], sizes[2]) if sizes and len(sizes) == 3 else None
