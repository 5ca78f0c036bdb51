"""How a GPU spends its time: compute, communication, copies and idle, and how much of these overlap."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from tracepipe.analyses.cuda_calls import values_by_names
from tracepipe.analyses.gpu_work import COPY, KERNEL, WARPS, Work, idle_of, outermost_rows
from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, Ints, distinct
from tracepipe.event.intervals import Stretches
from tracepipe.libraries import np
from tracepipe.store.run import Run

COMPUTE, COMMUNICATION, COPIES = range(3)
"""The purposes of work."""
PURPOSES: Final = ("compute", "communication", "copies")
"""Their names."""
# Kernels of NCCL and RCCL, MSCCL, NVSHMEM and DeepEP, and those of frameworks that replace them. The template
# arguments of a name are not searched.
_COMMUNICATES = re.compile(
    r"(^|[: ])((ms|n)ccl\w*Kernel|nvshmem|deep_ep::|cross_device_reduce|"
    r"\w*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all))",
    re.IGNORECASE,
)


class Spent(NamedTuple):
    """What a GPU did in some spans of time, in ns. Shapes `(spans,)`.

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
        """What it did in some spans."""
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


def kinds_of(run: Run, work: Work) -> Ints:
    """The purpose of each row of work, shape `(rows,)`."""
    of_shape, answers = values_by_names(run, "gpu_kernel", communicates)
    shapes: Bools = np.array(answers, np.bool_)[of_shape]
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
        yield GpuTime(gpu, rows, *(_stretches(work, kinds, rows, kind) for kind in range(len(PURPOSES))))


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


def _stretches(work: Work, kinds: Ints, rows: slice, kind: int) -> Stretches:
    """The stretches in which any work with a purpose ran."""
    some = rows_of(kinds, rows, kind)
    return Stretches(work.start_ns[rows][some], work.end_ns[rows][some])
