"""The warps of a run by kernel: from warp records, and from threads that were timed one by one."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
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
from tracepipe.reports.frames.arrays import Int32s, Ints
from tracepipe.reports.frames.gpus import about_gpus
from tracepipe.reports.frames.grouping import equal, in_order, one_number, sorted_by, starts_of
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.stored import empty, flagged, joined, made, parts, stored, taken
from tracepipe.reports.frames.warp_columns import WarpTable

FULL_MASK = (1 << LANES) - 1
# The columns that are kept of each warp, and the values of those that are not known.
_UNKNOWN = {
    "launch": 0, "warp": 0, "sm": NOT_RECORDED, "entry_ns": NOT_RECORDED, "last_exit_ns": 0, "exits": 0,
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
    is_wanted = np.array([wanted.search(kernel["name"]) is not None for kernel in kernels], np.bool_)
    rows = _rows(table, is_wanted[of_warp], launch)
    if not len(rows):
        return
    order, bounds = sorted_by(of_warp[rows])
    rows = taken(rows, order)
    del order
    columns = _columns(table, rows)
    exits, gpus = _ExitRows(table, of_warp, len(kernels)), about_gpus(run)

    def warps_of(number: int, first: int, last: int) -> KernelWarps:
        kernel, some = kernels[number], {name: column[first:last] for name, column in columns.items()}
        sm_count = gpus.get(kernel["gpu"] or 0, {}).get("sm_count")
        found = _of_records(kernel, some, *exits.of(number, rows[first:last]))
        return replace(
            found,
            sm_count=sm_count if type(sm_count) is int else None,
            cluster_of=partial(_blocks_of_cluster, run, kernel),
        )

    for first, last in sorted(pairwise(bounds.tolist()), key=lambda ends: int(rows[ends[0]])):
        # Warps without an exit do not count, unless no warp has one.
        left = sum(int(np.count_nonzero(columns["exits"][first:last][part])) for part in parts(last - first))
        number = int(of_warp[rows[first]])
        yield _Source(left or last - first, kernels[number]["name"], partial(warps_of, number, first, last))


def _blocks_of_cluster(run: Run, kernel: dict[str, Any], launch: int) -> int:
    """How many blocks a cluster of a launch of this kernel has; 1 where that was not recorded."""
    layer = run.layer("gpu_kernel")
    if layer.launch is None:
        return 1
    rows = np.flatnonzero(layer.launch == launch)
    for row in run.part("gpu_kernel", rows, "name", "gpu", "pid", "args").iter_rows(named=True):
        if all(row[of] == kernel[of] for of in ("name", "gpu", "pid")) and row["args"]:
            sizes = json.loads(row["args"]).get("cluster")
            if isinstance(sizes, list) and sizes and all(type(size) is int and size > 0 for size in sizes):
                return math.prod(sizes)
    return 1


def _rows(table: WarpTable, wanted: Flags, launch: int | None) -> Ints:
    """The rows of the wanted warps; with `launch`, only those of launches with that id."""
    if launch is not None:
        frames = table.frames("launch")
        of_launch = [(frame["launch"] == launch).fill_null(False).to_numpy() for frame in frames]
        wanted = wanted & np.concatenate(of_launch)
    column: Ints = flagged(len(table), lambda part: wanted[part])
    return column


def _columns(table: WarpTable, rows: Ints) -> dict[str, Any]:
    """The columns of these warps, and `nameless`: whether their launch has no id."""
    columns: dict[str, Any] = {name: empty(len(rows), np.int64) for name in _UNKNOWN}
    columns["launch"], columns["nameless"] = empty(len(rows), np.uint64), empty(len(rows), np.bool_)
    at = 0
    for frame in table.frames(*_UNKNOWN, rows=rows):
        part = slice(at, at + len(frame))
        for name, unknown in _UNKNOWN.items():
            columns[name][part] = frame[name].fill_null(unknown).to_numpy()
        columns["nameless"][part] = frame["launch"].is_null().to_numpy()
        at = part.stop
    return columns


class _ExitRows:
    """The exits of warps whose lanes did not exit together, by kernel and in the order of warps."""

    def __init__(self, table: WarpTable, of_warp: Ints, kernels: int) -> None:
        self._of, self._exit_ns, self._mask = table.exit_columns()
        self._order, self._bounds = np.empty(0, np.int64), np.zeros(kernels + 1, np.int64)
        if len(self._of):
            of_kernel = made(len(self._of), np.int32, lambda part: of_warp[self._of[part]])
            order, bounds = sorted_by(of_kernel)
            self._order = stored(order)
            present = of_kernel[self._order[bounds[:-1]]]
            self._bounds = bounds[np.searchsorted(present, np.arange(kernels + 1))]

    def of(self, number: int, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """The exits of a kernel's warps that are at `rows`: the index into `rows`, time and mask of each."""
        own = self._order[self._bounds[number] : self._bounds[number + 1]]

        def is_here(part: slice) -> Flags:
            of = self._of[own[part]].astype(rows.dtype)
            flags: Flags = rows[np.minimum(np.searchsorted(rows, of), len(rows) - 1)] == of
            return flags

        own = taken(own, flagged(len(own), is_here))
        of = made(
            len(own), np.int64, lambda part: np.searchsorted(rows, self._of[own[part]].astype(rows.dtype))
        )
        # Where masks were not recorded, the number of lanes of each exit is not known: it counts as none.
        masks = made(len(own), np.int64, lambda part: np.maximum(self._mask[own[part]], 0))
        return of, taken(self._exit_ns, own), masks


def _of_records(
    kernel: dict[str, Any], warps: dict[str, Any], several: Ints, exit_ns: Ints, exit_mask: Ints
) -> KernelWarps:
    """One kernel's warps. `several` are those whose lanes did not exit together, one item for each exit, with
    its time and mask.
    """
    count = len(warps["warp"])
    number, ids = _launches(warps["launch"], warps["nameless"], warps["warp"])
    one_by_one = np.zeros(count, np.bool_)
    for part in parts(len(several)):
        one_by_one[several[part]] = True
    single = flagged(count, lambda part: ~one_by_one[part] & (warps["exits"][part] == 1))
    known = bool((warps["block_index"] != NOT_RECORDED).all())
    unsorted = WarpColumns(
        kernel["name"],
        _three(kernel["grid"]),
        launch=number,
        block=warps["block_index"] if known else np.broadcast_to(np.int64(0), count),
        warp=warps["warp_in_block"] if known else warps["warp"],
        sm=warps["sm"],
        entry_ns=warps["entry_ns"],
        exit_warp=joined([single, several], np.int64),
        exit_ns=joined([taken(warps["last_exit_ns"], single), exit_ns], np.int64),
        exit_mask=joined([taken(warps["entry_mask"], single), exit_mask], np.int64),
        blocks_known=known,
        launch_ids=ids,
        gpu=kernel["gpu"] or 0,
        block_size=_three(kernel["block"]),
    )
    return sort_warps(unsorted)


def _launches(launch: Ints, nameless: Flags, warp: Ints) -> tuple[Ints, LaunchIds]:
    """The number of each row's launch, 0, 1, …, and the launches' ids in the recording. A launch id may be
    reused: the second occurrence of a warp belongs to another launch."""
    starts = starts_of(launch, nameless)
    counts = np.diff(starts, append=np.int32(len(launch)))
    _, of_run = np.unique(launch[starts], return_inverse=True)
    number = stored(np.repeat(of_run.astype(np.int32), counts))
    again = _again(
        one_number(made(len(number), np.int32, lambda part: number[part] * 2 + nameless[part]), warp)
    )
    if again is not None:
        number = stored(equal(number, again)[0])
    first = np.empty(int(number.max()) + 1, np.int64)
    # In reverse, the first row of each number is written last, and stays.
    first[number[::-1]] = np.arange(len(number) - 1, -1, -1)
    return number, LaunchIds(launch[first], nameless[first])


def _again(numbers: Ints) -> Int32s | None:
    """How often the number of each row occurs before it; None where no number recurs."""
    order = in_order(numbers)

    def is_same(part: slice) -> Flags:
        before = numbers[order[max(part.start - 1, 0) : part.stop]]
        same: Flags = np.diff(before) == 0
        return same if part.start else np.r_[False, same]

    if not len(flagged(len(order), is_same)):
        return None
    starts = flagged(len(order), lambda part: ~is_same(part))
    counts = np.diff(starts, append=np.int32(len(order)))
    again = np.empty(len(order), np.int32)
    again[order] = np.arange(len(order), dtype=np.int32) - np.repeat(starts, counts)
    return again


def _three(sizes: list[int] | None) -> tuple[int, int, int] | None:
    return (sizes[0], sizes[1], sizes[2]) if sizes and len(sizes) == 3 else None
