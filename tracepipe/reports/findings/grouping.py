"""The warps of a run, kernel by kernel: from warp records, and from threads that were timed one by one."""

from __future__ import annotations

import re
from typing import Any

from tracepipe.reports.findings.kernel_warps import LANES, NOT_RECORDED, Flags, Ints, KernelWarps, sort_warps
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run

FULL_MASK = (1 << LANES) - 1
_KERNEL = ("name", "gpu", "pid", "grid", "block")
MOST_REPEATED = 0.25
"""Of the thread indices that may come again in an input without blocks, before its warps are taken to be
mixed."""


def kernels_of(run: Run, pattern: str, launch: int | None) -> list[KernelWarps]:
    """The warps of the kernels whose names `pattern` finds, those with most warps first.

    Launches of one kernel with the same grid and block, by one process on one GPU, are together. `launch`
    leaves only those of that id.
    """
    wanted = re.compile(pattern)
    kernels = _from_warps(run, launch) + _from_threads(run, launch)
    kernels = [kernel for kernel in kernels if wanted.search(kernel.kernel)]
    return sorted(kernels, key=lambda kernel: -kernel.launch.size)


def _from_warps(run: Run, launch: int | None) -> list[KernelWarps]:
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


def _from_threads(run: Run, launch: int | None) -> list[KernelWarps]:
    """Kernels of which single threads were timed: entries, exits or both, with or without their block."""
    threads = run.gpu_threads.filter(pl.col("thread").is_not_null())
    if launch is not None:
        threads = threads.filter(pl.col("launch") == launch)
    event = pl.col("args").str.json_path_match("$.event")
    threads = threads.with_columns(
        pl.when(pl.col("phase") == "B").then(pl.lit("entry")).when(pl.col("phase") ==
        "E").then(pl.lit("exit")) .otherwise(event).alias("event"),
    ).filter(pl.col("event").is_in(["entry", "exit"]))  # fmt: skip
    by = ("name", "gpu", "pid")
    return [_of_threads(part) for part in threads.partition_by(by, maintain_order=True)]


def _of_threads(threads: pl.DataFrame) -> KernelWarps:
    """One kernel's threads; the n-th time that a thread comes is of the n-th launch, where none is named."""
    named = threads["block"].null_count() == 0
    thread, _ = _linear(threads["thread"])
    block, grid = _linear(threads["block"]) if named else (np.zeros(len(threads), np.int64), (1, 1, 1))
    each = threads.select("launch", "event", "start_ns").with_columns(
        thread=pl.Series(thread), block=pl.Series(block)
    )
    again = pl.int_range(pl.len()).over("launch", "event", "block", "thread").alias("again")
    each = each.sort("start_ns", maintain_order=True).with_columns(again)
    launch, ids = _launches(each)
    each = each.with_columns(number=pl.Series(launch))
    mixed = not named and _are_mixed(each)
    warps = (
        each.group_by("number", "block", pl.col("thread") // LANES, maintain_order=True)
        .agg(pl.col("start_ns").filter(pl.col("event") == "entry").min().alias("entry_ns"))
        .with_row_index("row")
    )
    exits = (
        each.filter(pl.col("event") == "exit")
        .with_columns(lane=pl.col("thread") % LANES, thread=pl.col("thread") // LANES)
        .join(warps, on=["number", "block", "thread"], how="left")
    )
    return sort_warps(
        threads["name"][0],
        grid,
        launch=warps["number"].to_numpy(),
        block=warps["block"].to_numpy(),
        warp=warps["thread"].to_numpy(),
        sm=np.full(len(warps), NOT_RECORDED),
        entry_ns=_or_not_recorded(warps["entry_ns"]),
        exit_warp=exits["row"].to_numpy().astype(np.int64),
        exit_ns=exits["start_ns"].to_numpy(),
        exit_mask=np.left_shift(1, exits["lane"].to_numpy()),
        lanes_timed=True,
        blocks_known=not mixed,
        rows_mixed=mixed,
        launch_ids=ids,
    )


def _linear(indices: pl.Series) -> tuple[Ints, tuple[int, int, int]]:
    """x + y·width + z·width·height of each index, and the sizes: the largest index that was seen, and one."""
    x, y, z = (indices.arr.get(axis).to_numpy() for axis in range(3))
    sizes = (int(x.max()) + 1, int(y.max()) + 1, int(z.max()) + 1)
    return x + sizes[0] * (y + sizes[1] * z), sizes


def _are_mixed(each: pl.DataFrame) -> bool:
    """Whether threads of several blocks cannot be told apart: the same index again, before all others had
    come once."""
    spans: Any = each.group_by("number").agg(
        pl.col("start_ns").min().alias("first"), pl.col("start_ns").max().alias("last"),
        pl.len().alias("threads")
    ).sort("number")  # fmt: skip
    apart: Flags = spans["first"].to_numpy()[1:] > spans["last"].to_numpy()[:-1]
    again = int(spans["threads"][1:].sum())
    return not bool(apart.all()) and again > MOST_REPEATED * int(spans["threads"][0])
