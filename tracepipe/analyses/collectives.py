"""Which GPU is last in each collective: the others wait for it in their kernels, then all transfer.

GPU 0  ├─ waits ──────────┬─ transfers ──┤
GPU 1                     ├─ transfers ──┤
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tracepipe.analyses.gpu_shares import COMMUNICATION, rows_of
from tracepipe.analyses.gpu_work import KERNEL, WARPS, Work
from tracepipe.event.columns import Int32s, Int64s
from tracepipe.event.groups import RowsByNumber
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.store.run import Run

# The most collective kernels of each GPU that are analyzed.
KERNELS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """A GPU in the collectives of one kernel: how often it was last, how long it waited and transferred."""

    gpu: int
    last: int
    waiting_ns: int
    transfer_ns: int
    made_wait_ns: int
    """How long the others waited for it when it was last, summed."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A kernel that several GPUs run together, `count` times."""

    name: str
    count: int
    members: list[Member]


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives, and the number of kernels that could not be matched with those of other GPUs."""

    found: list[Collective]
    unmatched: int


def collectives_of(run: Run, work: Work, kinds: Ints) -> Collectives:
    """Return the collectives of a recording of several GPUs.

    The nth kernel of a name on one GPU belongs to the nth on the others, if all GPUs have the same number of
    them, and those that belong together overlap in time.
    """
    if len(work.gpus) < 2:
        return Collectives([], 0)
    names, by_name = _Names(run, work), dict[str, dict[int, Any]]()
    for gpu, own in work.of_gpus():
        rows = rows_of(kinds, own, COMMUNICATION)[:KERNELS_MAX].astype(np.int64) + own.start
        for name, of_name in names.of(rows):
            by_name.setdefault(name, {})[gpu] = of_name
    found, unmatched = [], 0
    for name, of_gpu in by_name.items():
        together = _together(work, list(of_gpu.values()))
        unmatched += sum(map(len, of_gpu.values())) - together.size
        if together.size:
            found.append(_collective(name, list(of_gpu), work, together))
    return Collectives(sorted(found, key=_weight), unmatched)


def _weight(collective: Collective) -> tuple[int, str]:
    return -sum(member.waiting_ns + member.transfer_ns for member in collective.members), collective.name


class _Names:
    """Groups kernels by name."""

    def __init__(self, run: Run, work: Work) -> None:
        self._run, self._work = run, work

    def of(self, rows: Int64s) -> Iterator[tuple[str, Int64s]]:
        """Yield each name with its rows, sorted. Shapes `(n,)`."""
        found: dict[str, list[Int64s]] = {}
        for what in (KERNEL, WARPS):
            own = rows[self._work.what[rows] == what]
            if not len(own):
                continue
            for _, some in RowsByNumber(self._numbers(what, self._work.row[own]), own):
                name = self._work.name(self._run, int(some[0])) or ""
                found.setdefault(name, []).append(some)
        for name, pieces in found.items():
            yield name, np.sort(np.concatenate(pieces))

    def _numbers(self, what: int, rows: Int64s) -> Int32s:
        if what == KERNEL:
            found: Int32s = self._run.shapes.column("name", self._run.layer("gpu_kernel").shape[rows])
            return found
        table = self._run.warp_table
        called: Int32s = table.launches.column("name", table.launch_of(rows))[0]
        return called


def _together(work: Work, of_gpus: list[Int64s]) -> Int64s:
    """The rows of the collectives of one name, shape `(gpus, collectives)`, without those whose kernels do
    not all overlap in time.
    """
    if len(of_gpus) < 2 or len({len(rows) for rows in of_gpus}) > 1:
        return np.zeros((len(of_gpus), 0), np.int64)
    rows: Int64s = np.stack(of_gpus)
    return rows[:, work.start_ns[rows].max(axis=0) < work.end_ns[rows].min(axis=0)]


def _collective(name: str, gpus: list[int], work: Work, rows: Int64s) -> Collective:
    """The collectives of one name from the rows of their kernels, shape `(gpus, collectives)`."""
    start_ns, end_ns = work.start_ns[rows], work.end_ns[rows]
    last_start_ns = start_ns.max(axis=0)
    waiting_ns, last = last_start_ns - start_ns, start_ns.argmax(axis=0)
    transfer_ns, waited_ns = end_ns - last_start_ns, waiting_ns.sum(axis=0)
    members = [
        Member(
            gpu,
            int(np.count_nonzero(last == at)),
            int(waiting_ns[at].sum()),
            int(transfer_ns[at].sum()),
            int(waited_ns[last == at].sum()),
        )
        for at, gpu in enumerate(gpus)
    ]
    return Collective(name, rows.shape[1], members)
