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
    sort_warps,
)
from tracepipe.event.columns import distinct
from tracepipe.event.groups import RowsByNumber, count_earlier, number_rows
from tracepipe.reports.frames.arrays import Bools, Int64s, Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.store.run import Layer, Run
from tracepipe.store.warps import WarpTable

MOST_REPEATED = 0.25
"""The largest share of thread indices that may recur in an input without blocks; with more, its warps count
as mixed."""
_ENTRY, _EXIT, _OTHER = 0, 1, 2
_EVENTS = {"entry": _ENTRY, "exit": _EXIT}
_LATEST_NS = (1 << 63) - 1


def kernels_of_threads(run: Run, launch: int | None) -> list[KernelWarps]:
    """Return the kernels by name, GPU and process, in the order of their first events.

    Launches that were also recorded warp by warp are left out. With `launch`, only the launch with that id is
    taken.
    """
    layer = run.layer("gpu_thread")
    if layer.index is None:
        return []
    event = _events(run, layer)
    wanted = (layer.index[:, 3] >= 0) & (event != _OTHER) & ~_of_warps(run, layer)
    if launch is not None:
        known = _launch_ids(run, layer)
        wanted &= (known == launch) if known is not None else False
    rows = np.flatnonzero(wanted)
    every = np.arange(len(run.shapes), dtype=np.int32)
    of_shape, _ = number_rows(*(run.shapes.column(name, every) for name in ("name", "gpu", "pid")))
    groups = RowsByNumber(of_shape[layer.shape[rows]], rows)
    in_order = sorted((own for _, own in groups), key=lambda own: int(own[0]))
    return [_of_threads(run, layer, own, event[own]) for own in in_order]


def _of_warps(run: Run, layer: Layer) -> Bools:
    """Flags the rows whose launch was also recorded warp by warp: they repeat the same exits."""
    if layer.launch is None or not len(run.warp_table):
        return np.zeros(len(layer), np.bool_)
    launches, has_launch = run.warp_table.column("launch")
    recorded = distinct(launches[has_launch]).view(np.int64)
    return run.shapes.has_launch(layer.shape) & np.isin(layer.launch, recorded)


def _events(run: Run, layer: Layer) -> Ints:
    """For each row, _ENTRY, _EXIT or _OTHER, from its phase, else from its arguments."""
    of_phase = np.full(128, _OTHER, np.uint8)
    of_phase[[ord("B"), ord("E")]] = _ENTRY, _EXIT
    event: Ints = of_phase[run.shapes.column("phase", layer.shape)]
    by_args = np.flatnonzero(event == _OTHER)
    texts = run.args.texts_of("event", layer.args[by_args])
    event[by_args] = [_EVENTS.get(text or "", _OTHER) for text in texts]
    return event


def _launch_ids(run: Run, layer: Layer) -> Int64s | None:
    """The launch id of each row as a Python integer, -1 without one; None where no row has one."""
    has_launch = run.shapes.has_launch(layer.shape)
    if not has_launch.any():
        return None
    launch = np.zeros(len(layer), np.int64) if layer.launch is None else layer.launch
    return np.where(has_launch, launch.view(np.uint64).astype(object), -1)


def _of_threads(run: Run, layer: Layer, rows: Ints, event: Ints) -> KernelWarps:
    """The warps of one kernel's threads. Where launches have no ids, the n-th event of a thread belongs to
    the n-th launch.
    """
    index = layer.index
    assert index is not None
    named = bool((index[rows, 0] >= 0).all())
    thread, _ = _linear(index, rows, 3)
    block, grid = _linear(index, rows, 0) if named else (np.zeros(len(rows), np.int32), (1, 1, 1))
    launch, ids = _launches_of_threads(run, layer, rows, event, block, thread)
    mixed = not named and _are_mixed(launch, layer.start_ns[rows])
    of, first = number_rows(launch, block, thread // LANES)
    entered, left = np.flatnonzero(event == _ENTRY), np.flatnonzero(event == _EXIT)
    entry_ns = np.full(len(first), _LATEST_NS, np.int64)
    np.minimum.at(entry_ns, of[entered], layer.start_ns[rows[entered]])
    entry_ns[entry_ns == _LATEST_NS] = NOT_RECORDED
    name = run.shapes.value("name", int(run.shapes.column("name", layer.shape[rows[0]])))
    unsorted = WarpColumns(
        name,
        grid,
        launch=launch[first].astype(np.int64),
        block=block[first].astype(np.int64),
        warp=(thread[first] // LANES).astype(np.int64),
        sm=np.full(len(first), NOT_RECORDED),
        entry_ns=entry_ns,
        exit_warp=of[left].astype(np.int64),
        exit_ns=layer.start_ns[rows[left]],
        exit_mask=np.left_shift(np.int64(1), thread[left] % LANES),
        lanes_timed=True,
        blocks_known=not mixed,
        rows_mixed=mixed,
        launch_ids=ids,
    )
    return sort_warps(unsorted)


def _linear(index: Ints, rows: Ints, axis: int) -> tuple[Any, tuple[int, int, int]]:
    """The linear index x + y·width + z·width·height of each row, whose x is in the column `axis`, and the
    sizes: the largest index that was seen, plus one.
    """
    x, y, z = (index[rows, at] for at in range(axis, axis + 3))
    sizes = (int(x.max()) + 1, int(y.max()) + 1, int(z.max()) + 1)
    if sizes[0] * sizes[1] * sizes[2] >= 1 << 31:
        x, y, z = (one.astype(np.int64) for one in (x, y, z))
    return x + sizes[0] * (y + sizes[1] * z), sizes


def _launches_of_threads(
    run: Run, layer: Layer, rows: Ints, event: Ints, block: Ints, thread: Ints
) -> tuple[Any, LaunchIds]:
    """The number of each row's launch, 0, 1, …, and the launches' ids in the recording."""
    known = _launch_ids(run, layer)
    if known is None:
        ids, launch = [-1], np.zeros(len(rows), np.int32)
    else:
        ids = sorted(set(known[rows].tolist()))
        numbers = {one: number for number, one in enumerate(ids)}
        launch = np.array([numbers[one] for one in known[rows].tolist()], np.int32)
    again = count_earlier(launch, event, block, thread)
    if again.any():
        times = int(again.max()) + 1
        launch, ids = launch * np.int64(times) + again, [one for one in ids for _ in range(times)]
    is_used = np.bincount(launch, minlength=len(ids)) > 0
    used = [ids[at] for at in np.flatnonzero(is_used).tolist()]
    named = LaunchIds(
        np.array([max(0, one) for one in used], np.uint64), np.array([one < 0 for one in used], np.bool_)
    )
    return (np.cumsum(is_used, dtype=np.int32) - 1)[launch], named


def _are_mixed(launch: Ints, start_ns: Ints) -> bool:
    """Whether threads of several blocks cannot be distinguished: an index recurs before all others have
    occurred once."""
    counts = np.bincount(launch)
    first_ns, last_ns = (
        np.full(len(counts), _LATEST_NS, np.int64),
        np.full(len(counts), -_LATEST_NS, np.int64),
    )
    np.minimum.at(first_ns, launch, start_ns)
    np.maximum.at(last_ns, launch, start_ns)
    apart: Flags = first_ns[1:] > last_ns[:-1]
    return not bool(apart.all()) and int(counts[1:].sum()) > MOST_REPEATED * int(counts[0])


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
    exits_of, gpus = RowsByNumber(of_warp[table.exit_columns()[0]]), run.facts.gpus()
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
