"""The work of each GPU as columns: kernels, copies, warps; when it was busy, and which call launched it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tracepipe.analyses.cuda_calls import launching, rows_by_effect
from tracepipe.analyses.launch_calls import LaunchCalls
from tracepipe.event.columns import NONE, Bools, Int64s, Ints, distinct
from tracepipe.event.groups import RowsByNumber, number_rows, run_starts
from tracepipe.event.intervals import Gaps, gaps_between
from tracepipe.store.run import Run, once_a_run

GPUS_MAX: Final = 4096
KERNEL, COPY, WARPS = range(3)
"""The kinds of work."""
_LAYER_OF: Final = {KERNEL: "gpu_kernel", COPY: "transfer"}


@dataclass(frozen=True, slots=True)
class Work:
    """Kernels and copies on GPUs, and the warps of launches without a kernel, as columns of shape `(rows,)`,
    sorted by GPU and start. Work without a length is left out.

    `row` is the row in the layer, or that of the first warp; `pid` is a number in the table of shapes. `call`
    is the row of the call that launched the work, NONE where it is not known. `by_order` flags work without a
    launch id, for which the last launch or copy before it is taken. `gpus` has the GPUs, 0 where it was not
    recorded, and `bounds` the first row of each, and the end of the last.
    """

    gpus: Int64s
    bounds: Ints
    what: Ints
    row: Ints
    pid: Ints
    start_ns: Int64s
    end_ns: Int64s
    call: Ints
    by_order: Bools

    def __len__(self) -> int:
        return len(self.row)

    def of_gpus(self) -> Iterator[tuple[int, slice]]:
        """Yield each GPU and the rows of its work; of more than GPUS_MAX, those with the most work."""
        shown = np.sort(np.argsort(-np.diff(self.bounds), kind="stable")[:GPUS_MAX])
        for gpu, first, end in zip(
            self.gpus[shown].tolist(),
            self.bounds[shown].tolist(),
            self.bounds[shown + 1].tolist(),
            strict=True,
        ):
            yield gpu, slice(first, end)

    def left_out(self) -> list[str]:
        """A note about GPUs beyond GPUS_MAX, if there are any."""
        more = len(self.gpus) - GPUS_MAX
        return [f"{more:,} more GPUs, with less work, are not analyzed"] if more > 0 else []

    def name(self, run: Run, place: int) -> str | None:
        """The name of the work at a row."""
        what, row = int(self.what[place]), self.row[place : place + 1]
        if what == WARPS:
            names, known = run.warp_table.column("name", row)
            return run.warp_table.launches.name(int(names[0])) if known[0] else None
        layer = run.layer(_LAYER_OF[what])
        return run.shapes.texts("name", layer.shape[row])[0]


@once_a_run
def gpu_work(run: Run) -> Work:
    """Return the work of the GPUs of a recording."""
    kernels = _of_layer(run, KERNEL)
    known = distinct(kernels["launch"][kernels["has_launch"]])
    found = [kernels, _of_layer(run, COPY), *_of_warps(run, known, has_kernels=len(kernels["row"]) > 0)]
    columns = {name: np.concatenate([one[name] for one in found]) for name in kernels}
    order = np.lexsort((columns["start_ns"], columns["gpu"]))
    columns = {name: column[order] for name, column in columns.items()}
    starts = run_starts(gpu := columns.pop("gpu"))
    gpus, bounds = gpu[starts], np.append(starts, len(gpu))
    has_launch, launch = columns.pop("has_launch"), columns.pop("launch")
    call = np.where(has_launch, LaunchCalls(run).last_before(launch, columns["start_ns"]), NONE)
    by_order = _by_order(run, columns, call, has_launch)
    return Work(gpus, bounds, **columns, call=call, by_order=by_order)


def _of_layer(run: Run, what: int) -> dict[str, Any]:
    """The kernels, or the copies on a GPU."""
    layer = run.layer(_LAYER_OF[what])
    shapes, every = run.shapes, np.arange(len(run.shapes), dtype=np.int32)
    on_gpu = shapes.column("gpu", every) != NONE if what == COPY else np.ones(len(every), np.bool_)
    rows = np.flatnonzero((layer.end_ns > layer.start_ns) & on_gpu[layer.shape])
    shape = layer.shape[rows]
    return {
        "gpu": shapes.numbers("gpu", shape, 0),
        "what": np.full(len(rows), what, np.uint8),
        "row": rows,
        "pid": shapes.column("pid", shape),
        "start_ns": layer.start_ns[rows],
        "end_ns": layer.end_ns[rows],
        "launch": np.zeros(len(rows), np.int64) if layer.launch is None else layer.launch[rows],
        "has_launch": shapes.has_launch(shape),
    }


def _of_warps(run: Run, known: Int64s, *, has_kernels: bool) -> Iterator[dict[str, Any]]:
    """The launches without a kernel, from the first entry to the last exit of their warps. Where there is no
    kernel at all, also the warps without a launch, one by one. `known` are the sorted launches of kernels.
    """
    table = run.warp_table
    if not len(table):
        return
    every = np.arange(len(table.launches), dtype=np.int32)
    columns = [table.launches.column(name, every) for name in ("gpu", "name", "pid", "launch")]
    of_group, _ = number_rows(*(column for both in columns for column in both))
    (gpu, has_gpu), _, (pid, has_pid), (launch, has_launch) = columns
    gpu, pid, launch = np.where(has_gpu, gpu, 0), np.where(has_pid, pid, NONE), launch.view(np.int64)
    wanted = np.where(has_launch, ~np.isin(launch, known), not has_kernels)
    start_ns, end_ns = table.times_ns(slice(None), run.facts.end_ns)
    of = table.launch_of(slice(None))
    rows = np.flatnonzero(wanted[of] & (end_ns > start_ns))

    def work(rows: Ints, start_ns: Int64s, end_ns: Int64s) -> dict[str, Any]:
        of_row = of[rows]
        return {
            "gpu": gpu[of_row], "what": np.full(len(rows), WARPS, np.uint8), "row": rows, "pid": pid[of_row],
            "start_ns": start_ns, "end_ns": end_ns, "launch": launch[of_row],
            "has_launch": has_launch[of_row],
        }  # fmt: skip

    named = rows[has_launch[of[rows]]]
    groups = RowsByNumber(of_group[of[named]], named)
    spans = [(own[0], start_ns[own].min(), end_ns[own].max()) for _, own in groups]
    # In the order of their first warps.
    columns_of_groups = np.array(sorted(spans), np.int64).reshape(-1, 3).T
    yield work(*columns_of_groups)
    alone = rows[~has_launch[of[rows]]]
    yield work(alone, start_ns[alone], end_ns[alone])


def _by_order(run: Run, work: dict[str, Any], call: Int64s, has_launch: Bools) -> Bools:
    """Fill in the calls of work without a launch id; return the flags of the work for which this was done."""
    is_without: Bools = (call == NONE) & ~has_launch
    is_copy = work["what"] == COPY
    if (of_kernels := is_without & ~is_copy).any():
        _last_before(run, work, np.flatnonzero(of_kernels), launching(run), call)
    if (of_copies := is_without & is_copy).any():
        _last_before(run, work, np.flatnonzero(of_copies), rows_by_effect(run)["transfer"], call)
    by_order: Bools = is_without & (call != NONE)
    return by_order


def _last_before(run: Run, work: dict[str, Any], rows: Ints, calls: Int64s, into: Int64s) -> None:
    """Write into `into`, for some rows of work, the last of `calls` of the same process that began before."""
    layer = run.layer("userspace")
    own = RowsByNumber(run.shapes.column("pid", layer.shape[calls]), calls)
    for pid, some in RowsByNumber(work["pid"][rows], rows):
        # For work of an unknown process, the last call of any process counts.
        of_pid = calls if pid == NONE else own.of(pid)
        if len(of_pid):
            at = np.searchsorted(layer.start_ns[of_pid], work["start_ns"][some], "right") - 1
            into[some] = np.where(at >= 0, of_pid[np.maximum(at, 0)], NONE)


@dataclass(frozen=True, slots=True)
class Idle:
    """The idle time of one GPU between its first work and its last. `rows` are the rows of its work. The
    indices in `gaps` are relative to the first of them, as is `last`, the work that ends last.
    """

    gpu: int
    rows: slice
    gaps: Gaps
    first_ns: int
    last_ns: int
    last: int

    @property
    def idle_ns(self) -> int:
        """The sum of the gaps."""
        return int((self.gaps.end_ns - self.gaps.start_ns).sum())


def idle_of(work: Work, gpu: int, rows: slice) -> Idle:
    """The idle time of one GPU, whose work is at these rows."""
    start_ns, end_ns = work.start_ns[rows], work.end_ns[rows]
    last = int(np.argmax(end_ns))
    return Idle(gpu, rows, gaps_between(start_ns, end_ns), int(start_ns[0]), int(end_ns[last]), last)


def outermost_rows(run: Run, rows: Ints) -> Int64s:
    """The rows of the outermost calls around some rows of calls, NONE for NONE. Shapes `(n,)`."""
    known = rows != NONE
    found = rows.astype(np.int64)
    found[known] = run.layer("userspace").rows(found[known], "top").top
    return found
