"""The warps of a run, kernel by kernel: from warp records, and from threads that were timed one by one."""

from __future__ import annotations

import re

from tracepipe.reports.findings.kernel_warps import LANES, NOT_RECORDED, Ints, KernelWarps, sort_warps
from tracepipe.reports.findings.timed_threads import kernels_of_threads
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run

FULL_MASK = (1 << LANES) - 1
_KERNEL = ("name", "gpu", "pid", "grid", "block")


def kernels_of(run: Run, pattern: str, launch: int | None) -> list[KernelWarps]:
    """The warps of the kernels whose names `pattern` finds, those with most warps first.

    Launches of one kernel with the same grid and block, by one process on one GPU, are together. `launch`
    leaves only those of that id.
    """
    wanted = re.compile(pattern)
    kernels = _from_warps(run, launch) + kernels_of_threads(run, launch)
    kernels = [kernel for kernel in kernels if wanted.search(kernel.kernel)]
    return sorted(kernels, key=lambda kernel: -kernel.launch.size)


def _from_warps(run: Run, launch: int | None) -> list[KernelWarps]:
    if not len(run.warp_table):
        return []
    warps = run.warps.with_row_index("row")
    if launch is not None:
        warps = warps.filter(pl.col("launch") == launch)
    # A launch id may be used again: the same warp for the second time is of another launch.
    again = pl.int_range(pl.len()).over("launch", "warp", *_KERNEL).alias("again")
    warps = warps.with_columns(again)
    exits = run.exits
    return [_of_records(part, exits) for part in warps.partition_by(_KERNEL, maintain_order=True)]


def _of_records(warps: pl.DataFrame, exits: pl.DataFrame) -> KernelWarps:
    """One kernel's warps, of which `exits` has those that did not leave with all lanes at once."""
    first = warps.row(0, named=True)
    launch, ids = _launches(warps)
    place = np.full(int(warps["row"].max()) + 1, -1, np.int64)  # type: ignore[arg-type]
    place[warps["row"].to_numpy()] = np.arange(len(warps))
    of_exit = exits["warp_row"].to_numpy()
    own = (of_exit < place.size) & (place[np.minimum(of_exit, place.size - 1)] >= 0)
    several = place[of_exit[own]]
    told = np.zeros(len(warps), np.bool_)
    told[several] = True
    single = np.flatnonzero(~told & (warps["exits"].to_numpy() == 1))
    # Where masks were not recorded, how many lanes left at each exit is not known: none counts then.
    masks = exits["mask"].fill_null(0).to_numpy()[own]
    known = warps["block_index"].null_count() == 0
    linear = warps["warp"].to_numpy()
    return sort_warps(
        first["name"],
        _three(first["grid"]),
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
