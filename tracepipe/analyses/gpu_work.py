"""The work of each GPU as columns: kernels, copies, warps; when it was busy, and which call launched it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tracepipe.analyses.cuda_calls import launching, rows_by_effect
from tracepipe.analyses.launch_calls import LaunchCalls
from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.grouping import Grouped, distinct, equal, in_order, numbered
from tracepipe.reports.frames.intervals import Gaps, gaps_between
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.nesting import NOBODY, nearest_of_some
from tracepipe.reports.frames.stored import Growing, empty, flagged, made, parts, taken
from tracepipe.store.run import Run

GPUS_MAX: Final = 4096
KERNEL, COPY, WARPS = range(3)
"""The kinds of work."""
_LAYER_OF: Final = {KERNEL: "gpu_kernel", COPY: "transfer"}
_LARGE: Final = 1 << 31
_KINDS: Final = {
    "gpu": "i8", "what": "u1", "row": "i4", "pid": "i4", "start_ns": "i8", "end_ns": "i8", "launch": "i8",
    "has_launch": "?",
}  # fmt: skip


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


def gpu_work(run: Run) -> Work:
    """Return the work of the GPUs of a recording."""
    found: dict[str, Growing[Any]] = {name: Growing(kind) for name, kind in _KINDS.items()}
    _add_layer(run, KERNEL, found)
    ids = found["launch"].so_far(found["launch"].count)
    has_launch = found["has_launch"].so_far(len(ids))
    known = distinct(taken(ids, flagged(len(ids), lambda part: has_launch[part])))
    has_kernels = len(ids) > 0
    _add_layer(run, COPY, found)
    _add_warps(run, found, known, has_kernels=has_kernels)
    columns = {name: column.whole() for name, column in found.items()}
    gpus, of_gpu = numbered(columns.pop("gpu"))
    start_ns = columns["start_ns"]
    first_ns = min((int(start_ns[part].min()) for part in parts(len(start_ns))), default=0)
    order = in_order(of_gpu, made(len(start_ns), np.int64, lambda part: start_ns[part] - first_ns))
    columns = {name: taken(column, order) for name, column in columns.items()}
    bounds = np.searchsorted(taken(of_gpu, order), np.arange(len(gpus) + 1))
    has_launch, launch = columns.pop("has_launch"), columns.pop("launch")
    call = _by_id(run, columns["start_ns"], launch, has_launch)
    by_order = _by_order(run, columns, call, has_launch)
    return Work(gpus, bounds, **columns, call=call, by_order=by_order)


def _add_layer(run: Run, what: int, found: dict[str, Growing[Any]]) -> None:
    """Add the kernels, or the copies on a GPU."""
    layer = run.layer(_LAYER_OF[what])
    shapes, every = run.shapes, np.arange(len(run.shapes), dtype=np.int32)
    on_gpu = shapes.column("gpu", every) != NONE if what == COPY else np.ones(len(every), np.bool_)
    gpu = shapes.numbers("gpu", every, 0)
    for part in parts(len(layer)):
        lasts = (layer.end_ns[part] > layer.start_ns[part]) & on_gpu[layer.shape[part]]
        rows = np.flatnonzero(lasts) + part.start
        shape = layer.shape[rows]
        values = {
            "gpu": gpu[shape],
            "what": what,
            "row": rows,
            "pid": shapes.column("pid", shape),
            "start_ns": layer.start_ns[rows],
            "end_ns": layer.end_ns[rows],
            "launch": 0 if layer.launch is None else layer.launch[rows],
            "has_launch": shapes.has_launch(shape),
        }
        for name, column in found.items():
            column.extend(values[name], len(rows))


def _add_warps(run: Run, found: dict[str, Growing[Any]], known: Int64s, *, has_kernels: bool) -> None:
    """Add the launches without a kernel, from the first entry to the last exit of their warps. Where there is
    no kernel at all, also add the warps without a launch, one by one.
    """
    table = run.warp_table
    if not len(table):
        return
    every = np.arange(len(table.launches), dtype=np.int32)
    columns = [table.launches.column(name, every) for name in ("gpu", "name", "pid", "launch")]
    of_group, first = equal(*(column for both in columns for column in both))
    (gpu, has_gpu), _, (pid, has_pid), (launch, has_launch) = columns
    gpu, pid, launch = np.where(has_gpu, gpu, 0), np.where(has_pid, pid, NONE), launch.view(np.int64)
    wanted = np.where(has_launch, ~_is_in(known, launch), not has_kernels)
    span = _Spans(len(first))
    for part in parts(len(table)):
        start_ns, end_ns = table.times_ns(part, run.facts.end_ns)
        of = table.launch_of(part)
        kept = wanted[of] & (end_ns > start_ns)
        rows, of = np.arange(part.start, part.stop)[kept], of[kept]
        start_ns, end_ns = start_ns[kept], end_ns[kept]
        named = has_launch[of]
        span.add(of_group[of[named]], rows[named], start_ns[named], end_ns[named])
        alone = ~named
        _add(found, of[alone], (gpu, pid, launch, has_launch), rows[alone], start_ns[alone], end_ns[alone])
    groups = span.with_warps()
    for part in parts(len(groups)):
        some = groups[part]
        of_launch = first[some]
        _add(
            found,
            of_launch,
            (gpu, pid, launch, has_launch),
            span.row[some],
            span.start_ns[some],
            span.end_ns[some],
        )


def _is_in(known: Int64s, values: Int64s) -> Bools:
    """Flags the values that are among sorted ones. Shapes `(n,)`."""
    if not len(known):
        return np.zeros(len(values), np.bool_)
    found: Bools = known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values
    return found


def _add(
    found: dict[str, Growing[Any]],
    of: Ints,
    columns: tuple[Any, ...],
    rows: Ints,
    start_ns: Int64s,
    end_ns: Int64s,
) -> None:
    """Add the work of warps; `of` has the launch of each."""
    gpu, pid, launch, has_launch = (column[of] for column in columns)
    values = {
        "gpu": gpu, "what": WARPS, "row": rows, "pid": pid, "start_ns": start_ns, "end_ns": end_ns,
        "launch": launch, "has_launch": has_launch,
    }  # fmt: skip
    for name, column in found.items():
        column.extend(values[name], len(rows))


class _Spans:
    """The begins and ends of groups of warps, and the first row of each. Shapes `(groups,)`."""

    def __init__(self, count: int) -> None:
        self.start_ns, self.end_ns = empty(count, np.int64), empty(count, np.int64)
        self.row = empty(count, np.int32)
        for part in parts(count):
            self.start_ns[part], self.end_ns[part] = (1 << 63) - 1, -(1 << 63)
            self.row[part] = (1 << 31) - 1

    def add(self, groups: Ints, rows: Ints, start_ns: Int64s, end_ns: Int64s) -> None:
        """Add warps by their groups. Shapes `(n,)`."""
        if not len(groups):
            return
        # Warps of one launch are neighbours.
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        of = groups[starts]
        np.minimum.at(self.start_ns, of, np.minimum.reduceat(start_ns, starts))
        np.maximum.at(self.end_ns, of, np.maximum.reduceat(end_ns, starts))
        np.minimum.at(self.row, of, rows[starts])

    def with_warps(self) -> Int32s:
        """The groups that have warps, in the order of their first warps. Shape `(n,)`."""
        groups = flagged(len(self.row), lambda part: self.row[part] < (1 << 31) - 1)
        return taken(groups, in_order(taken(self.row, groups)))


def _by_id(run: Run, start_ns: Int64s, launch: Ints, has_launch: Bools) -> Int32s:
    """The call with the launch id of each row of work: the last one before it, as an id may recur. Shape
    `(rows,)`.
    """
    launches = LaunchCalls(run)

    def found(part: slice) -> Int64s:
        rows = launches.last_before(launch[part], start_ns[part])
        return np.where(has_launch[part], rows, NONE)

    return made(len(start_ns), np.int32, found)


def _by_order(run: Run, work: dict[str, Any], call: Ints, has_launch: Bools) -> Bools:
    """Fill in the calls of work without a launch id; return the flags of the work for which this was done."""
    what = work["what"]
    by_order = made(len(call), np.bool_, lambda part: np.zeros(part.stop - part.start, np.bool_))
    without = flagged(len(call), lambda part: (call[part] == NONE) & ~has_launch[part])
    if not len(without):
        return by_order
    is_copy = what[without] == COPY
    for rows, calls in (
        (without[~is_copy], lambda: np.flatnonzero(launching(run))),
        (without[is_copy], lambda: rows_by_effect(run)["transfer"]),
    ):
        if len(rows):
            _last_before(run, work, rows, calls(), call)
    for part in parts(len(without)):
        by_order[without[part]] = call[without[part]] != NONE
    return by_order


def _last_before(run: Run, work: dict[str, Any], rows: Ints, calls: Int64s, into: Ints) -> None:
    """Write into `into`, for some rows of work, the last of `calls` of the same process that began before."""
    layer = run.layer("userspace")
    # Numbers of process ids may be negative.
    own = Grouped(run.shapes.column("pid", layer.shape[calls]).astype(np.int64) + _LARGE, calls)
    for key, some in Grouped(work["pid"][rows].astype(np.int64) + _LARGE, rows):
        # For work of an unknown process, the last call of any process counts.
        of_pid = calls if key == NONE + _LARGE else own.of(key)
        if not len(of_pid):
            continue
        starts_ns = layer.start_ns[of_pid]
        for part in parts(len(some)):
            at = np.searchsorted(starts_ns, work["start_ns"][some[part]], "right") - 1
            into[some[part]] = np.where(at >= 0, of_pid[np.maximum(at, 0)], NONE)


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
        every = parts(len(self.gaps.start_ns))
        return sum(int((self.gaps.end_ns[part] - self.gaps.start_ns[part]).sum()) for part in every)


def idle_of(work: Work, gpu: int, rows: slice) -> Idle:
    """The idle time of one GPU, whose work is at these rows."""
    start_ns, end_ns = work.start_ns[rows], work.end_ns[rows]
    last = int(np.argmax(end_ns))
    return Idle(gpu, rows, gaps_between(start_ns, end_ns), int(start_ns[0]), int(end_ns[last]), last)


def outermost_rows(run: Run, rows: Ints) -> Int64s:
    """The rows of the outermost calls around some rows of calls, NONE for NONE. Shapes `(n,)`."""
    parents = run.layer("userspace").parent
    is_outermost = made(len(parents), np.bool_, lambda part: parents[part] == NOBODY)

    def tops(part: slice) -> Int64s:
        found = rows[part].astype(np.int64)
        known = found != NONE
        found[known] = nearest_of_some(parents, is_outermost, found[known])
        return found

    return made(len(rows), np.int64, tops)
