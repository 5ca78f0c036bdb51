"""How the warps of a kernel spend their time, by the ranges that its source marks."""

from __future__ import annotations

import re
from typing import Any

from tracepipe.event.columns import Int64s
from tracepipe.event.groups import RowsByNumber, number_rows
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.report import Column, Table
from tracepipe.store.run import Run

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
    table, ranges = run.warp_table, run.warp_table.ranges
    if not len(ranges["name"]):
        return None
    names = table.range_names
    kernels, of_warp = table.kernels()
    found = re.compile(pattern)
    wanted = np.array([found.search(kernel["name"]) is not None for kernel in kernels], np.bool_)[of_warp]
    launches, has_launch = table.column("launch")
    if launch is not None:
        wanted &= has_launch & (launches == launch)
    last_ns, has_exit = table.column("last_exit_ns")
    lives_ns = np.where(has_exit, last_ns - table.column("entry_ns")[0], 0)
    # The block of each warp, by number; warps without one are together.
    blocks, has_block = table.column("block_index")
    of_block, _ = number_rows(
        np.where(has_launch, launches, 0), has_launch, np.where(has_block, blocks, 0), has_block
    )
    ranges_of = RowsByNumber(of_warp[ranges["warp_row"]])
    rows: list[tuple[Any, ...]] = []
    warps_of = sorted(RowsByNumber(of_warp[wanted], np.flatnonzero(wanted)), key=lambda one: -len(one[1]))
    for number, warps in warps_of[: top or None]:
        is_wanted = wanted[ranges["warp_row"][ranges_of.of(number)]]
        own = ranges_of.of(number)[is_wanted]
        if not len(own):
            continue
        kernel, life_ns = kernels[number], int(lives_ns[warps].sum())
        grid = "×".join(map(str, kernel["grid"])) if kernel["grid"] else None
        called = RowsByNumber(ranges["name"][own], own)
        of_names = [(name, int(ranges["self_ns"][some].sum()), some) for name, some in called]
        for name, self_ns, some in sorted(of_names, key=lambda one: (-one[1], one[0])):
            times = _times(ranges["warp_row"][some], ranges["dur_ns"][some], of_block)
            rows.append((kernel["name"], names[name], grid, _percent(self_ns, life_ns), len(some), *times))
        outside_ns = max(life_ns - sum(self_ns for _, self_ns, _ in of_names), 0)
        rows.append((kernel["name"], NO_RANGE, grid, _percent(outside_ns, life_ns), *(None,) * 8))
    return Table("ranges", "Ranges", _COLUMNS, rows, _NOTE, grouped=True)


def _percent(part_ns: int, life_ns: int) -> float | None:
    return 100 * part_ns / life_ns if life_ns else None


def _times(warp: Ints, dur_ns: Int64s, of_block: Ints) -> tuple[int, ...]:
    """The cells of a row from `warps` on, of ranges in these warps, shapes `(n,)`. `of_block` has the block
    of each warp of the recording.
    """
    number, first = number_rows(warp)
    warps_ns = np.zeros(len(first), np.int64)
    np.add.at(warps_ns, number, dur_ns)
    block, first_of_block = number_rows(of_block[warp[first]])
    most_ns, least_ns = np.zeros(len(first_of_block), np.int64), np.full(len(first_of_block), 1 << 62)
    np.maximum.at(most_ns, block, warps_ns)
    np.minimum.at(least_ns, block, warps_ns)
    skews_ns = most_ns - least_ns
    return (
        len(first),
        _quantile(dur_ns, 0.5),
        _quantile(dur_ns, 0.95),
        int(dur_ns.max()),
        _quantile(warps_ns, 0.5),
        _quantile(skews_ns, 0.5),
        int(skews_ns.max()),
    )


def _quantile(values: Int64s, share: float) -> int:
    """The value that is nearest to a quantile."""
    return int(np.sort(values)[int((len(values) - 1) * share + 0.5)])
