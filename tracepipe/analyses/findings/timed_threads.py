"""Warps of kernels whose threads were timed one by one: entries, exits or both, with or without blocks."""

from __future__ import annotations

from typing import Any

from tracepipe.analyses.findings.kernel_warps import (
    LANES,
    NOT_RECORDED,
    Flags,
    KernelWarps,
    LaunchIds,
    WarpColumns,
)
from tracepipe.analyses.findings.warp_order import sort_warps
from tracepipe.event.columns import distinct
from tracepipe.event.groups import RowsByNumber, count_earlier, number_rows
from tracepipe.reports.frames.arrays import Bools, Int64s, Ints
from tracepipe.reports.frames.layers import Layer
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run

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
    launch, ids = _launches(run, layer, rows, event, block, thread)
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


def _launches(
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
