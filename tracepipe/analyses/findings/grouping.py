"""The warps of a run by kernel: from warp records, and from threads that were timed one by one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tracepipe.analyses.findings.kernel_warps import (
    LANES,
    NOT_RECORDED,
    Flags,
    KernelWarps,
    LaunchIds,
    WarpColumns,
)
from tracepipe.analyses.findings.timed_threads import kernels_of_threads
from tracepipe.analyses.findings.warp_order import sort_warps
from tracepipe.event.groups import RowsByNumber, count_earlier, number_rows
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.gpus import about_gpus
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.warp_columns import WarpTable

FULL_MASK = (1 << LANES) - 1
# What stands for values that are not known.
_UNKNOWN = {
    "warp": 0, "sm": NOT_RECORDED, "entry_ns": NOT_RECORDED, "last_exit_ns": 0, "exits": 0,
    "entry_mask": FULL_MASK, "block_index": NOT_RECORDED, "warp_in_block": NOT_RECORDED,
}  # fmt: skip


class _Source(NamedTuple):
    """How many warps a kernel has, its name, and the function that sorts them."""

    warps: int
    name: str
    make: Callable[[], KernelWarps]


class Kernels:
    """The warps of some kernels, those with the most warps first. The iteration sorts the warps of each
    kernel when it reaches the kernel, and keeps only the last one.
    """

    def __init__(self, made_of: list[_Source]) -> None:
        self._made_of = sorted(made_of, key=lambda one: -one.warps)
        self._last: tuple[int, KernelWarps] | None = None

    def __len__(self) -> int:
        return len(self._made_of)

    def __iter__(self) -> Iterator[KernelWarps]:
        for at, source in enumerate(self._made_of):
            if self._last is None or self._last[0] != at:
                self._last = None
                self._last = at, source.make()
            yield self._last[1]

    def names(self) -> Counter[str]:
        """How many kernels have each name; no warps are sorted for that."""
        return Counter(source.name for source in self._made_of)

    def first(self, count: int) -> Kernels:
        """The first `count` kernels, or all for 0."""
        return Kernels(self._made_of[:count] if count > 0 else self._made_of)


def kernels_of(run: Run, pattern: str, launch: int | None) -> Kernels:
    """Return the warps of the kernels whose names match `pattern`, a regular expression.

    Launches of one kernel with the same grid and block, by one process on one GPU, are one item. With
    `launch`, only warps of launches with that id are taken.
    """
    wanted = re.compile(pattern)
    made_of = [*_from_warps(run, wanted, launch)]
    for kernel in kernels_of_threads(run, launch):
        if wanted.search(kernel.kernel):
            made_of.append(_Source(kernel.launch.size, kernel.kernel, partial(_itself, kernel)))
    return Kernels(made_of)


def _itself(kernel: KernelWarps) -> KernelWarps:
    return kernel


def _from_warps(run: Run, wanted: re.Pattern[str], launch: int | None) -> Iterator[_Source]:
    table = run.warp_table
    if not len(table):
        return
    kernels, of_warp = table.kernels()
    is_wanted = np.array([wanted.search(kernel["name"]) is not None for kernel in kernels], np.bool_)[of_warp]
    if launch is not None:
        launches, has_launch = table.column("launch")
        is_wanted &= has_launch & (launches == launch)
    rows_of = RowsByNumber(of_warp[is_wanted], np.flatnonzero(is_wanted))
    exits_of, gpus = RowsByNumber(of_warp[table.exit_columns()[0]]), about_gpus(run)
    exited = table.column("exits")[0]

    def warps_of(number: int, rows: Ints) -> KernelWarps:
        kernel = kernels[number]
        sm_count = gpus.get(kernel["gpu"] or 0, {}).get("sm_count")
        return replace(
            _of_records(table, kernel, rows, exits_of.of(number)),
            sm_count=sm_count if type(sm_count) is int else None,
            cluster_of=partial(_blocks_of_cluster, run, kernel),
        )

    for number, rows in sorted(rows_of, key=lambda one: int(one[1][0])):
        # Warps without an exit do not count, unless no warp has one.
        count = int(np.count_nonzero(exited[rows])) or len(rows)
        yield _Source(count, kernels[number]["name"], partial(warps_of, number, rows))


def _blocks_of_cluster(run: Run, kernel: dict[str, Any], launch: int) -> int:
    """How many blocks a cluster of a launch of this kernel has; 1 where that was not recorded."""
    layer = run.layer("gpu_kernel")
    if layer.launch is None:
        return 1
    rows = np.flatnonzero(layer.launch == launch)
    for name in ("name", "gpu", "pid"):
        own = run.shapes.column(name, layer.shape[rows]) == run.shapes.number_of(name, kernel[name])
        rows = rows[own]
    for args in layer.args[rows].tolist():
        sizes = run.args.args(args).get("cluster")
        if isinstance(sizes, list) and sizes and all(type(size) is int and size > 0 for size in sizes):
            return math.prod(sizes)
    return 1


def _of_records(table: WarpTable, kernel: dict[str, Any], rows: Ints, exit_rows: Ints) -> KernelWarps:
    """The warps of one kernel: those at `rows`, and the exits, at `exit_rows`, of those whose lanes did not
    exit together.
    """

    def column(name: str) -> Ints:
        values, known = table.column(name, rows)
        found: Ints = np.where(known, values.astype(np.int64), _UNKNOWN[name])
        return found

    of_exit, exit_ns, exit_mask = (of[exit_rows] for of in table.exit_columns())
    several = np.minimum(np.searchsorted(rows, of_exit), len(rows) - 1)
    is_here = rows[several] == of_exit
    several = several[is_here]
    one_by_one = np.zeros(len(rows), np.bool_)
    one_by_one[several] = True
    single = np.flatnonzero(~one_by_one & (column("exits") == 1))
    launch, has_launch = table.column("launch", rows)
    number, ids = _launches(np.where(has_launch, launch, 0), ~has_launch, column("warp"))
    blocks_known = bool(table.column("block_index", rows)[1].all())
    unsorted = WarpColumns(
        kernel["name"],
        _three(kernel["grid"]),
        launch=number,
        block=column("block_index") if blocks_known else np.zeros(len(rows), np.int64),
        warp=column("warp_in_block" if blocks_known else "warp"),
        sm=column("sm"),
        entry_ns=column("entry_ns"),
        exit_warp=np.concatenate([single, several]),
        exit_ns=np.concatenate([column("last_exit_ns")[single], exit_ns[is_here]]),
        # Where masks were not recorded, the number of lanes of each exit is not known: it counts as none.
        exit_mask=np.concatenate([column("entry_mask")[single], np.maximum(exit_mask[is_here], 0)]),
        blocks_known=blocks_known,
        launch_ids=ids,
        gpu=kernel["gpu"] or 0,
        block_size=_three(kernel["block"]),
    )
    return sort_warps(unsorted)


def _launches(launch: Ints, nameless: Flags, warp: Ints) -> tuple[Ints, LaunchIds]:
    """The number of each row's launch, 0, 1, …, and the launches' ids in the recording. A launch id may be
    reused: the second occurrence of a warp belongs to another launch."""
    number, first = number_rows(launch, count_earlier(launch, nameless, warp))
    return number, LaunchIds(launch[first], nameless[first])


def _three(sizes: list[int] | None) -> tuple[int, int, int] | None:
    return (sizes[0], sizes[1], sizes[2]) if sizes and len(sizes) == 3 else None
