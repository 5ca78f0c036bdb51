"""The warps of a run by kernel: from warp records, and from threads that were timed one by one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from tracepipe.analyses.findings.kernel_warps import (
    LANES,
    NOT_RECORDED,
    KernelWarps,
    sort_warps,
)
from tracepipe.event.columns import Bools, Int32s, Int64s, Ints, distinct
from tracepipe.event.groups import RowsByNumber, count_earlier, number_rows
from tracepipe.libraries import np
from tracepipe.options import regex
from tracepipe.store.run import Run

FULL_MASK = (1 << LANES) - 1
MOST_REPEATED = 0.25
"""The largest share of thread indices that may recur in an input without blocks; with more, its warps count
as mixed."""
_PATCHES = "sanitizer"
"""The engine that patches the code of kernels, as headers call it."""
_ENTRY, _EXIT, _OTHER = 0, 1, 2
_EVENTS = {"entry": _ENTRY, "exit": _EXIT}
_LATEST_NS = (1 << 63) - 1
# What stands for values that are not known.
_UNKNOWN = {
    "warp": 0, "sm": NOT_RECORDED, "entry_ns": NOT_RECORDED, "last_exit_ns": 0, "exits": 0,
    "entry_mask": FULL_MASK, "warp_in_block": NOT_RECORDED,
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
    """Return the warps of the kernels whose names match `pattern`, a regular expression. Raises
    TracepipeError where it is none.

    Launches of one kernel with the same grid and block, by one process on one GPU, are one item. With
    `launch`, only warps of launches with that id are taken. Launches that were recorded both warp by warp and
    thread by thread are taken once.
    """
    wanted = regex(pattern)
    return Kernels([*_from_warps(run, wanted, launch), *_from_threads(run, wanted, launch)])


def wanted_warps(run: Run, wanted: re.Pattern[str], launch: int | None) -> Bools:
    """Flags the warps of kernels whose names match, with `launch` only that launch's. Shape `(warps,)`."""
    table = run.warp_table
    is_wanted = table.launches.flags_by_names(lambda name: wanted.search(name) is not None)
    if launch is not None:
        launches, has_launch = table.launches.column("launch", np.arange(len(table.launches)))
        is_wanted &= has_launch & (launches == launch)
    found: Bools = is_wanted[table.launch_of(slice(None))]
    return found


def _from_warps(run: Run, wanted: re.Pattern[str], launch: int | None) -> Iterator[_Source]:
    table = run.warp_table
    if not len(table):
        return
    kernels, of_warp = table.kernels()
    is_wanted = wanted_warps(run, wanted, launch)
    rows_of = RowsByNumber(of_warp[is_wanted], np.flatnonzero(is_wanted))
    exits_of, exited = RowsByNumber(of_warp[table.exit_columns()[0]]), table.column("exits")[0]
    for number, rows in sorted(rows_of, key=lambda one: int(one[1][0])):
        # Warps without an exit do not count, unless no warp has one.
        count = int(np.count_nonzero(exited[rows])) or len(rows)
        make = partial(_of_records, run, kernels[number], rows, exits_of.of(number))
        yield _Source(count, kernels[number]["name"], make)


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


def _of_records(run: Run, kernel: dict[str, Any], rows: Ints, exit_rows: Ints) -> KernelWarps:
    """The warps of one kernel: those at `rows`, and the exits, at `exit_rows`, of those whose lanes did not
    exit together.
    """
    table = run.warp_table
    sm_count = run.facts.gpus().get(kernel["gpu"] or 0, {}).get("sm_count")

    def column(name: str) -> Ints:
        values, known = table.column(name, rows)
        found: Ints = values.astype(np.int64)
        found[~known] = _UNKNOWN[name]
        return found

    of_exit, exit_ns, exit_mask = (of[exit_rows] for of in table.exit_columns())
    several = np.minimum(np.searchsorted(rows, of_exit), len(rows) - 1)
    is_here = rows[several] == of_exit
    several = several[is_here]
    one_by_one = np.zeros(len(rows), np.bool_)
    one_by_one[several] = True
    single = np.flatnonzero(~one_by_one & (column("exits") == 1))
    launch, has_launch = table.column("launch", rows)
    launch = np.where(has_launch, launch, 0)
    # A launch id may be reused: the second occurrence of a warp belongs to another launch.
    warp = column("warp")
    number, first = number_rows(launch, count_earlier(launch, has_launch, warp))
    block, has_block = table.column("block_index", rows)
    blocks_known = bool(has_block.all())
    unsorted = KernelWarps(
        kernel["name"],
        _three(kernel["grid"]),
        launch=number,
        block=block.astype(np.int64) if blocks_known else np.zeros(len(rows), np.int64),
        warp=column("warp_in_block") if blocks_known else warp,
        sm=column("sm"),
        entry_ns=column("entry_ns"),
        exit_warp=np.concatenate([single, several]),
        exit_ns=np.concatenate([column("last_exit_ns")[single], exit_ns[is_here]]),
        # Where masks were not recorded, the number of lanes of each exit is not known: it counts as none.
        exit_mask=np.concatenate([column("entry_mask")[single], np.maximum(exit_mask[is_here], 0)]),
        blocks_known=blocks_known,
        launch_ids=np.where(has_launch[first], launch[first].astype(object), -1),
        gpu=kernel["gpu"] or 0,
        block_size=_three(kernel["block"]),
        sm_count=sm_count if type(sm_count) is int else None,
        cluster_of=partial(_blocks_of_cluster, run, kernel),
        is_patched=_PATCHES in run.facts.header.engine.split(", "),
    )
    return sort_warps(unsorted)


def _from_threads(run: Run, wanted: re.Pattern[str], launch: int | None) -> Iterator[_Source]:
    """The kernels by name, GPU and process, in the order of their first events."""
    layer = run.layer("gpu_thread")
    if layer.index is None:
        return
    of_phase = np.full(128, _OTHER, np.uint8)
    of_phase[[ord("B"), ord("E")]] = _ENTRY, _EXIT
    event = of_phase[run.shapes.column("phase", layer.shape)]
    by_args = np.flatnonzero(event == _OTHER)
    texts = run.args.texts_of("event", layer.args[by_args])
    event[by_args] = [_EVENTS.get(text or "", _OTHER) for text in texts]
    has_launch = run.shapes.has_launch(layer.shape)
    launches = np.zeros(len(layer), np.uint64) if layer.launch is None else layer.launch.view(np.uint64)
    launches = np.where(has_launch, launches, 0)
    of_warps, known = run.warp_table.column("launch")
    # Launches that were also recorded warp by warp repeat the same exits.
    is_repeated = has_launch & np.isin(launches, distinct(of_warps[known]))
    is_wanted = (layer.index[:, 3] >= 0) & (event != _OTHER) & ~is_repeated
    if launch is not None:
        is_wanted &= has_launch & (launches == launch)
    rows = np.flatnonzero(is_wanted)
    every = np.arange(len(run.shapes), dtype=np.int32)
    of_shape, _ = number_rows(*(run.shapes.column(name, every) for name in ("name", "gpu", "pid")))
    for _, own in sorted(RowsByNumber(of_shape[layer.shape[rows]], rows), key=lambda one: int(one[1][0])):
        name = run.shapes.value("name", int(run.shapes.column("name", layer.shape[own[0]])))
        if wanted.search(name):
            of_events = (layer.start_ns[own], layer.index[own], event[own], launches[own], has_launch[own])
            kernel = _of_threads(name, *of_events)
            yield _Source(kernel.launch.size, name, partial(lambda made: made, kernel))


def _of_threads(
    name: str, ts_ns: Int64s, index: Int32s, event: Ints, ids: Ints, has_id: Bools
) -> KernelWarps:
    """The warps of one kernel's threads, from their entries and exits: times, indices of block and thread,
    _ENTRY or _EXIT, and the ids of launches that have one. Where launches have no ids, the n-th event of a
    thread belongs to the n-th launch. Shapes `(events,)`, that of `index` `(events, 6)`.
    """
    blocks_named = bool((index[:, 0] >= 0).all())
    thread, _ = _linear(index[:, 3:])
    block, grid = _linear(index[:, :3]) if blocks_named else (np.zeros(len(index), np.int32), (1, 1, 1))
    launch, first = number_rows(has_id, ids, count_earlier(has_id, ids, event, block, thread))
    launch_ids = np.where(has_id[first], ids[first].astype(object), -1)
    # Threads of several blocks cannot be distinguished if an index recurs before all others have occurred
    # once.
    counts = np.bincount(launch)
    first_ns, last_ns = (np.full(len(counts), sign * _LATEST_NS) for sign in (1, -1))
    np.minimum.at(first_ns, launch, ts_ns)
    np.maximum.at(last_ns, launch, ts_ns)
    in_turn = bool((first_ns[1:] > last_ns[:-1]).all())
    mixed = not blocks_named and not in_turn and int(counts[1:].sum()) > MOST_REPEATED * int(counts[0])
    of, first = number_rows(launch, block, thread // LANES)
    entered, left = event == _ENTRY, event == _EXIT
    entry_ns = np.full(len(first), _LATEST_NS)
    np.minimum.at(entry_ns, of[entered], ts_ns[entered])
    entry_ns[entry_ns == _LATEST_NS] = NOT_RECORDED
    unsorted = KernelWarps(
        name,
        grid,
        launch=launch[first].astype(np.int64),
        block=block[first].astype(np.int64),
        warp=(thread[first] // LANES).astype(np.int64),
        sm=np.full(len(first), NOT_RECORDED),
        entry_ns=entry_ns,
        exit_warp=of[left].astype(np.int64),
        exit_ns=ts_ns[left],
        exit_mask=np.left_shift(np.int64(1), thread[left] % LANES),
        lanes_timed=True,
        blocks_known=not mixed,
        rows_mixed=mixed,
        launch_ids=launch_ids,
    )
    return sort_warps(unsorted)


def _linear(index: Ints) -> tuple[Any, tuple[int, int, int]]:
    """The linear index x + y·width + z·width·height of each row, and the sizes: the largest index that
    occurs, plus one. `index` has the shape `(rows, 3)`.
    """
    x, y, z = index.T
    sizes = (int(x.max()) + 1, int(y.max()) + 1, int(z.max()) + 1)
    if sizes[0] * sizes[1] * sizes[2] >= 1 << 31:
        x, y, z = (one.astype(np.int64) for one in (x, y, z))
    return x + sizes[0] * (y + sizes[1] * z), sizes


def _three(sizes: list[int] | None) -> tuple[int, int, int] | None:
    return (sizes[0], sizes[1], sizes[2]) if sizes and len(sizes) == 3 else None
