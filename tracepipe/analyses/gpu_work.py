"""The work of each GPU as columns: kernels, copies, warps; which call launched it, and how long before; when
the GPU was busy, and with what: compute, communication and copies, and how much of these overlap.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from tracepipe.analyses.cuda_calls import launching, rows_by_effect, values_by_names
from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, Ints, distinct
from tracepipe.event.groups import RowsByNumber, number_rows, run_starts
from tracepipe.event.intervals import Gaps, Stretches, gaps_between, pieces
from tracepipe.store.run import Layer, Run, once_a_run

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
    launch id, for which the last launch or copy before it counts. `gpus` has the GPUs, 0 where it was not
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
        bounds = self.bounds.tolist()
        for at in shown.tolist():
            yield int(self.gpus[at]), slice(bounds[at], bounds[at + 1])

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
    # For work without a launch id: the last call before it that may have launched it.
    by_order = (call == NONE) & ~has_launch
    is_copy = columns["what"] == COPY
    for rows, calls_of in (
        (np.flatnonzero(by_order & ~is_copy), launching),
        (np.flatnonzero(by_order & is_copy), lambda run: rows_by_effect(run)["transfer"]),
    ):
        if len(rows):
            call[rows] = _last_before(run, columns["pid"][rows], columns["start_ns"][rows], calls_of(run))
    return Work(gpus, bounds, **columns, call=call, by_order=by_order & (call != NONE))


def shapes_of(run: Run, work: Work) -> Int64s:
    """The shape of each row of work, NONE for warps. Shape `(rows,)`."""
    found = np.full(len(work), NONE, np.int64)
    for what, layer in _LAYER_OF.items():
        own = np.flatnonzero(work.what == what)
        found[own] = run.layer(layer).shape[work.row[own]]
    return found


def streams_of(run: Run, work: Work) -> Int64s:
    """The number of the stream of each row of work in the table of shapes, NONE where it is not known. Shape
    `(rows,)`.
    """
    shape, found = shapes_of(run, work), np.full(len(work), NONE, np.int64)
    known = shape != NONE
    found[known] = run.shapes.column("stream", shape[known])
    return found


def _of_layer(run: Run, what: int) -> dict[str, Any]:
    """The kernels, or the copies on a GPU."""
    layer = run.layer(_LAYER_OF[what])
    shapes = run.shapes
    on_gpu = shapes.column("gpu") != NONE if what == COPY else np.ones(len(shapes), np.bool_)
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


def _last_before(run: Run, pids: Ints, starts_ns: Int64s, calls: Int64s) -> Int64s:
    """For work of some processes, the last of `calls` of the same process that began before, or NONE. Shapes
    `(n,)`.
    """
    layer = run.layer("userspace")
    own = RowsByNumber(run.shapes.column("pid", layer.shape[calls]), calls)
    found = own.last_before(layer.start_ns, pids, starts_ns, "right")
    # For work of an unknown process, the last call of any process counts.
    unknown = pids == NONE
    at = np.searchsorted(layer.start_ns[calls], starts_ns[unknown], "right")
    found[unknown] = np.append(NONE, calls)[at]
    return found


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

    def within(self, spans: Stretches) -> Idle:
        """The gaps' parts that are inside some stretches; the first and the last work stay."""
        rows, start_ns, end_ns = pieces(spans.start_ns, spans.end_ns, self.gaps.start_ns, self.gaps.end_ns)
        gaps = Gaps(start_ns, end_ns, self.gaps.previous[rows], self.gaps.following[rows])
        return replace(self, gaps=gaps)


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


WORK_LAYERS: Final = ("gpu_kernel", "transfer")
"""The layers with the work that calls launch."""


class LaunchCalls:
    """The calls of a recording that have a launch id.

    An id may recur: its last call before the work counts, or the first one after it, where clocks are wrong.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        found = run.store.columns(
            """select id, launch, start_ns from store.userspace x join store.shapes s using (shape)
            where s.has_launch and x.kind <> 2 order by launch, id"""
        )
        self._ids, self._rows, self._starts_ns = found["launch"], found["id"], found["start_ns"]

    def launched(self) -> Iterator[tuple[Layer, Int64s, Int64s]]:
        """Yield the kernels, then the copies on GPUs, whose length and whose call are known: their layer,
        their rows, and the rows of the calls. Shapes `(n,)`.
        """
        shapes = self._run.shapes
        for name in WORK_LAYERS:
            work, flags = self._run.layer(name), shapes.column("has_launch")
            if name == "transfer":
                flags = flags & (shapes.column("gpu") != NONE)
            rows = np.flatnonzero(flags[work.shape] & work.has_length)
            calls = self.find(work, rows)
            yield work, rows[calls != NONE], calls[calls != NONE]

    def find(self, work: Layer, rows: Int64s) -> Int64s:
        """For each of some rows of work, the row of the call that launched it, NONE where none was recorded.
        Shapes `(n,)`.
        """
        launches = np.zeros(len(rows), np.int64) if work.launch is None else work.launch[rows]
        return self.last_before(launches, work.start_ns[rows])

    def last_before(self, ids: Ints, starts_ns: Int64s) -> Int64s:
        """Like `find`, for work with these launch ids and start times. Shapes `(n,)`."""
        low, end = np.searchsorted(self._ids, ids), np.searchsorted(self._ids, ids, "right")
        first, high = low.copy(), end.copy()
        # How many calls of the id are not after the work: a binary search for all ids in parallel.
        while len(open_ := np.flatnonzero(low < high)):
            middle = (low[open_] + high[open_]) // 2
            is_before = self._starts_ns[middle] <= starts_ns[open_]
            low[open_] = np.where(is_before, middle + 1, low[open_])
            high[open_] = np.where(is_before, high[open_], middle)
        at = np.where(low > first, low - 1, low)
        found: Int64s = np.full(len(ids), NONE, np.int64)
        found[first < end] = self._rows[at[first < end]]
        return found


class Delays(NamedTuple):
    """The delays of the launches on one GPU, as columns of shape `(launches,)`."""

    delay_ns: Int64s
    """From the return of the call to the start of its work; 0 where the work started earlier."""
    depth: Ints
    """How many launches had not started on the GPU when a call began, including its own."""


def delays_of(run: Run, work: Work, rows: slice) -> Delays:
    """The delays of a GPU, whose work is at these rows. For the launch of a graph, its first kernel counts.
    Work whose call was not found by its launch id is left out.
    """
    calls = run.layer("userspace")
    tops = outermost_rows(run, work.call[rows])
    own = np.flatnonzero((tops != NONE) & ~work.by_order[rows])
    own = own[calls.rows(tops[own], "kind").has_length]
    # The first work of each call, in the order of the work.
    own = np.sort(own[np.unique(tops[own], return_index=True)[1]])
    asking = calls.rows(tops[own], "start_ns", "end_ns")
    began_ns, asked_ns = work.start_ns[rows][own], np.sort(asking.start_ns)
    # Work that starts before its call, by an error of the clocks, would make the queue shorter than 1.
    depth = np.maximum(np.arange(1, len(own) + 1) - np.searchsorted(began_ns, asked_ns), 1)
    return Delays(np.maximum(began_ns - asking.end_ns, 0), depth)


COMPUTE, COMMUNICATION, COPIES = range(3)
"""The purposes of work."""
PURPOSES: Final = ("compute", "communication", "copies")
"""Their names."""
# Kernels of NCCL and RCCL, MSCCL, NVSHMEM and DeepEP, and those of frameworks that replace them. The template
# arguments of a name are not searched. In a mangled name, digits are before each part.
_COMMUNICATES = re.compile(
    r"(^|[: ]|^_Z\w*?\d)((ms|n)ccl\w*Kernel|nvshmem|deep_ep::|cross_device_reduce|"
    r"\w*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all))",
    re.IGNORECASE,
)


_AMD_COPIES: Final = ("__amd_rocclr_copy", "__amd_rocclr_fill")


class Spent(NamedTuple):
    """The time of a GPU in some spans by purpose, in ns. Shapes `(spans,)`.

    `exposed_ns` is the time of communication without compute at the same time, and `idle_ns` the time without
    any work.
    """

    busy_ns: Int64s
    compute_ns: Int64s
    communication_ns: Int64s
    exposed_ns: Int64s
    copies_ns: Int64s
    idle_ns: Int64s


@dataclass(frozen=True)
class GpuTime:
    """When one GPU computed, communicated and copied. `rows` are the rows of its work."""

    gpu: int
    rows: slice
    compute: Stretches
    communication: Stretches
    copies: Stretches

    @cached_property
    def kernels(self) -> Stretches:
        """When it computed or communicated."""
        return self.compute.joined(self.communication)

    @cached_property
    def busy(self) -> Stretches:
        """When it did anything."""
        return self.kernels.joined(self.copies)

    def spent(self, start_ns: Int64s, end_ns: Int64s) -> Spent:
        """Its time in some spans by purpose."""
        compute_ns = self.compute.covered_ns(start_ns, end_ns)
        return Spent(
            self.busy.covered_ns(start_ns, end_ns),
            compute_ns,
            self.communication.covered_ns(start_ns, end_ns),
            self.kernels.covered_ns(start_ns, end_ns) - compute_ns,
            self.copies.covered_ns(start_ns, end_ns),
            self.busy.uncovered_ns(start_ns, end_ns),
        )

    def idle_inside_ns(self, other: Stretches, start_ns: Int64s, end_ns: Int64s) -> Int64s:
        """How long it was idle in some spans while something else was the case, such as loading data."""
        return self.busy.uncovered_ns(start_ns, end_ns) - self.busy.joined(other).uncovered_ns(
            start_ns, end_ns
        )


class Partition(NamedTuple):
    """Spans of a GPU's time split without overlap, in ns, so that the parts add up to the spans: it computed;
    it communicated and did not compute; it only copied; it was idle. Shapes `(spans,)`.
    """

    compute_ns: Int64s
    exposed_ns: Int64s
    lone_copies_ns: Int64s
    idle_ns: Int64s


def partition_of(time: GpuTime, start_ns: Int64s, end_ns: Int64s) -> Partition:
    """Split some spans of a GPU's time. Shapes `(spans,)`."""
    spent = time.spent(start_ns, end_ns)
    lone_copies_ns = spent.busy_ns - spent.compute_ns - spent.exposed_ns
    return Partition(spent.compute_ns, spent.exposed_ns, lone_copies_ns, spent.idle_ns)


@dataclass(frozen=True, slots=True)
class Shares:
    """The time of one GPU from its first work to its last, in ns. `pid` is the process of its work, None
    where there are several, or it is not known.

    `communication_hidden_ns` is the time of communication during which a kernel computed, `copies_hidden_ns`
    the time of copies during which any kernel ran. `unasked_ns` is the idle time before the begin of the call
    that launched the next work, out of `idle_known_ns`, the idle time for which that call is known.
    """

    gpu: int
    pid: int | None
    first_ns: int
    last_ns: int
    compute_ns: int
    communication_ns: int
    copies_ns: int
    idle_ns: int
    communication_hidden_ns: int
    copies_hidden_ns: int
    unasked_ns: int
    idle_known_ns: int

    @property
    def span_ns(self) -> int:
        """The time from the first work to the last."""
        return self.last_ns - self.first_ns

    def percent(self, part_ns: int, whole_ns: int | None = None) -> float | None:
        """A part of the span, or of another whole, in percent; None where the whole is 0."""
        whole_ns = self.span_ns if whole_ns is None else whole_ns
        return 100 * part_ns / whole_ns if whole_ns else None


def communicates(name: str) -> bool:
    """Whether a kernel with that short name moves data between GPUs, also where it reduces them."""
    return _COMMUNICATES.search(name.partition("<")[0]) is not None


def purpose_of(name: str) -> int:
    """The purpose of a kernel with that short name. AMD's runtime copies and fills memory with kernels."""
    return COPIES if name.startswith(_AMD_COPIES) else COMMUNICATION if communicates(name) else COMPUTE


def kinds_of(run: Run, work: Work) -> Ints:
    """The purpose of each row of work, shape `(rows,)`."""
    of_shape, purposes = values_by_names(run, "gpu_kernel", purpose_of)
    shapes = np.array([purpose or COMPUTE for purpose in purposes], np.uint8)[of_shape]
    kinds: Ints = np.where(work.what == COPY, COPIES, COMPUTE).astype(np.uint8)
    own = np.flatnonzero(work.what == KERNEL)
    kinds[own] = shapes[run.layer("gpu_kernel").shape[work.row[own]]]
    own = np.flatnonzero(work.what == WARPS)
    if len(own):
        launches = run.warp_table.launches.flags_by_names(communicates)
        kinds[own] = launches[run.warp_table.launch_of(work.row[own])]
    return kinds


def gpu_times(work: Work, kinds: Ints) -> Iterator[GpuTime]:
    """When each GPU did what. `kinds` has the purpose of each row of work."""
    for gpu, rows in work.of_gpus():
        of_kinds = (rows_of(kinds, rows, kind) + rows.start for kind in range(len(PURPOSES)))
        yield GpuTime(gpu, rows, *(Stretches(work.start_ns[of], work.end_ns[of]) for of in of_kinds))


def shares_of(run: Run, work: Work, kinds: Ints) -> list[Shares]:
    """How each GPU spent its time."""
    calls, found = run.layer("userspace"), []
    for time in gpu_times(work, kinds):
        rows = time.rows
        idle = idle_of(work, time.gpu, rows)
        spent = time.spent(np.array([idle.first_ns]), np.array([idle.last_ns]))
        call = work.call[rows]
        of_calls = run.shapes.column("pid", calls.rows(call[call != NONE], "shape").shape)
        pids = {*distinct(of_calls).tolist(), *distinct(work.pid[rows]).tolist()} - {NONE}
        # The gaps for which the call that launched the next work is known.
        following = idle.gaps.following + rows.start
        tops = outermost_rows(run, work.call[following])
        known = np.flatnonzero((tops != NONE) & ~work.by_order[following])
        start_ns, end_ns = idle.gaps.start_ns[known], idle.gaps.end_ns[known]
        asked_ns = np.clip(calls.rows(tops[known], "start_ns").start_ns, start_ns, end_ns)
        found.append(
            Shares(
                time.gpu,
                run.shapes.value("pid", pids.pop()) if len(pids) == 1 else None,
                idle.first_ns,
                idle.last_ns,
                int(spent.compute_ns[0]),
                int(spent.communication_ns[0]),
                int(spent.copies_ns[0]),
                int(spent.idle_ns[0]),
                int(spent.communication_ns[0] - spent.exposed_ns[0]),
                time.copies.overlap_ns(time.kernels),
                int((asked_ns - start_ns).sum()),
                int((end_ns - start_ns).sum()),
            )
        )
    return found


def rows_of(kinds: Ints, rows: slice, kind: int) -> Int32s:
    """The indices, within some rows of work, of those with a purpose. Shape `(n,)`."""
    return np.flatnonzero(kinds[rows] == kind).astype(np.int32)
