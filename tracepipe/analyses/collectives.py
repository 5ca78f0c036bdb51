"""Which GPU is last in each collective: the others wait for it in their kernels, then all transfer.

GPU 0  ├─ waits ──────────┬─ transfers ──┤
GPU 1                     ├─ transfers ──┤
"""

from __future__ import annotations

from dataclasses import dataclass

from tracepipe.analyses.gpu_work import COMMUNICATION, KERNEL, WARPS, Work, rows_of
from tracepipe.event.columns import Int64s, Ints
from tracepipe.event.groups import RowsByNumber
from tracepipe.libraries import np
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


def collectives_of(run: Run, work: Work, kinds: Ints) -> tuple[list[Collective], int]:
    """The collectives of a recording of several GPUs, and the number of kernels that could not be matched
    with those of other GPUs.

    The nth kernel of a name on one GPU belongs to the nth on the others, if all GPUs have the same number of
    them, and those that belong together overlap in time.
    """
    if len(work.gpus) < 2:
        return [], 0
    table, kernels = run.warp_table, run.layer("gpu_kernel")
    by_name: dict[str, dict[int, list[Int64s]]] = {}
    for gpu, own in work.of_gpus():
        rows = rows_of(kinds, own, COMMUNICATION)[:KERNELS_MAX] + own.start
        for what in (KERNEL, WARPS):
            some = rows[work.what[rows] == what]
            if not len(some):
                continue
            if what == KERNEL:
                numbers = run.shapes.column("name", kernels.shape[work.row[some]])
            else:
                numbers, _ = table.launches.column("name", table.launch_of(work.row[some]))
            for _, named in RowsByNumber(numbers, some):
                name = work.name(run, int(named[0])) or ""
                by_name.setdefault(name, {}).setdefault(gpu, []).append(named)
    found, unmatched = [], 0
    for name, of_gpus in by_name.items():
        of_gpu = [np.sort(np.concatenate(pieces)) for pieces in of_gpus.values()]
        unmatched += sum(map(len, of_gpu))
        if len(of_gpu) < 2 or len(set(map(len, of_gpu))) > 1:
            continue
        together: Int64s = np.stack(of_gpu)
        overlap = work.start_ns[together].max(axis=0) < work.end_ns[together].min(axis=0)
        unmatched -= len(of_gpu) * int(np.count_nonzero(overlap))
        if overlap.any():
            found.append(_collective(name, [*of_gpus], work, together[:, overlap]))
    found.sort(key=lambda one: (-sum(of.waiting_ns + of.transfer_ns for of in one.members), one.name))
    return found, unmatched


def _collective(name: str, gpus: list[int], work: Work, rows: Int64s) -> Collective:
    """The collectives of one name from the rows of their kernels, shape `(gpus, collectives)`."""
    start_ns, end_ns = work.start_ns[rows], work.end_ns[rows]
    last_start_ns = start_ns.max(axis=0)
    waiting_ns, last = last_start_ns - start_ns, start_ns.argmax(axis=0)
    transfer_ns, waited_ns = end_ns - last_start_ns, waiting_ns.sum(axis=0)
    columns = (
        [
            np.count_nonzero(last == at),
            waiting_ns[at].sum(),
            transfer_ns[at].sum(),
            waited_ns[last == at].sum(),
        ]
        for at in range(len(gpus))
    )
    members = [Member(gpu, *map(int, sums)) for gpu, sums in zip(gpus, columns, strict=True)]
    return Collective(name, rows.shape[1], members)
