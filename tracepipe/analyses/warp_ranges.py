"""How the warps of a kernel spend their time, by the ranges that its source marks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run
from tracepipe.reports.report import Column, Table

_COLUMNS = (
    Column("kernel", "kernel"),
    Column("range", "range"),
    Column("grid", "grid", spare=True),
    Column("life_percent", "share", "percent"),
    Column("count", "ranges", "count"),
    Column("warps", "warps", "count", spare=True),
    Column("p50_ns", "p50", "ns"),
    Column("p95_ns", "p95", "ns", spare=True),
    Column("max_ns", "max", "ns"),
    Column("warp_p50_ns", "per warp", "ns"),
    Column("skew_p50_ns", "skew p50", "ns"),
    Column("skew_max_ns", "max", "ns"),
)
_NOTE = (
    "Share: of the lifetimes of all warps of the kernel, without the ranges inside. p50, p95, max: of one "
    "range. Per warp: the sum of a warp's ranges of that name (median). Skew of a block: the difference of "
    "these sums between its warps with the most and the least."
)
NO_RANGE = "(none)"


def ranges_table(run: Run, pattern: str, launch: int | None, top: int) -> Table | None:
    """The ranges of the kernels that match `pattern`, those with the most warps first: `top` kernels, or all
    for 0. With `launch`, only of launches with that id. None where no warp has a range.
    """
    table = run.warp_table.ranges
    ranges = table.numbers("warp_row", "name", "dur_ns", "self_ns")
    if ranges.is_empty():
        return None
    names = table.names
    kernels, of_warp = run.warp_table.kernels()
    found = re.compile(pattern)
    wanted = np.array([found.search(kernel["name"]) is not None for kernel in kernels], np.bool_)[of_warp]
    warps = run.warp_table.frame("launch", "block_index", "entry_ns", "last_exit_ns")
    if launch is not None:
        wanted &= (warps["launch"] == launch).fill_null(False).to_numpy()
    lives = pl.DataFrame({"kernel": of_warp, "life_ns": warps["last_exit_ns"] - warps["entry_ns"]})
    lives = lives.filter(wanted).group_by("kernel").agg(pl.len(), pl.col("life_ns").sum())
    lives = lives.sort("len", "kernel", descending=[True, False])
    blocks, rows, of_range = warps.select("launch", "block_index"), [], ranges["warp_row"].to_numpy()
    for number, _, life_ns in lives.head(top or len(lives)).iter_rows():
        own = ranges.filter((wanted & (of_warp == number))[of_range])
        if own.is_empty():
            continue
        kernel = kernels[number]
        grid = "×".join(map(str, kernel["grid"])) if kernel["grid"] else None
        outside_ns = max(life_ns - own["self_ns"].sum(), 0)
        for name, *row in _rows(own, blocks, life_ns):
            rows.append((kernel["name"], names[name], grid, *row))
        rows.append((kernel["name"], NO_RANGE, grid, _percent(outside_ns, life_ns), *(None,) * 8))
    return Table("ranges", "Ranges", _COLUMNS, rows, _NOTE, grouped=True)


def _percent(part_ns: int, life_ns: int) -> float | None:
    return 100 * part_ns / life_ns if life_ns else None


def _rows(ranges: pl.DataFrame, blocks: pl.DataFrame, life_ns: int) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each name of one kernel's ranges (as its number), most time first. `blocks` has the
    launch and the block of all warps.
    """
    lengths = ranges.group_by("name").agg(
        pl.col("self_ns").sum(),
        count=pl.len(),
        p50=pl.col("dur_ns").quantile(0.5),
        p95=pl.col("dur_ns").quantile(0.95),
        most=pl.col("dur_ns").max(),
    )
    a_warp = ranges.group_by("name", "warp_row").agg(pl.col("dur_ns").sum())
    a_warp = a_warp.hstack(blocks[a_warp["warp_row"]])
    spread = pl.col("dur_ns").max() - pl.col("dur_ns").min()
    a_block = a_warp.group_by("name", "launch", "block_index").agg(skew_ns=spread)
    of_warps = a_warp.group_by("name").agg(warps=pl.len(), warp_p50=pl.col("dur_ns").quantile(0.5))
    skews = a_block.group_by("name").agg(
        skew_p50=pl.col("skew_ns").quantile(0.5), skew_max=pl.col("skew_ns").max()
    )
    whole = lengths.join(of_warps, on="name").join(skews, on="name")
    for row in whole.sort("self_ns", "name", descending=[True, False]).iter_rows(named=True):
        yield (
            row["name"], _percent(row["self_ns"], life_ns), row["count"], row["warps"], round(row["p50"]),
            round(row["p95"]), row["most"], round(row["warp_p50"]), round(row["skew_p50"]), row["skew_max"],
        )  # fmt: skip
