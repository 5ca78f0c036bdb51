"""The occupancy that the launches of each kernel allow, by what the recording has of them and of the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import prod
from typing import Any, Final, NamedTuple

from tracepipe.analyses.theoretical_occupancy import Occupancy, Resources, occupancy_of
from tracepipe.event.columns import NONE
from tracepipe.event.groups import RowsByNumber, number_rows
from tracepipe.event.sm_limits import sm_limits
from tracepipe.reports.frames.gpus import about_gpus
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run
from tracepipe.reports.report import Column, Table

_EXAMINED: Final = 8
"""How many launches of a kernel with one size of blocks are examined: the first ones."""
# So many more are examined than are listed, as some may not say what they need.
_SPARE: Final = 4
_COLUMNS: Final = (
    Column("name", "kernel"),
    Column("gpu", "GPU", "id", spare=True),
    Column("launches", "launches", "count", spare=True),
    Column("block_threads", "threads", "count"),
    Column("registers", "regs", "count"),
    Column("shared_bytes", "shared", "bytes"),
    Column("blocks_per_sm", "blocks/SM", "number", spare=True),
    Column("warps_per_sm", "warps/SM", "number"),
    Column("max_warps_per_sm", "of", "count", spare=True),
    Column("occupancy_percent", "occup.", "percent"),
    Column("limited_by", "limited by"),
)
_NOTE: Final = (
    "Threads, shared memory: of a block. Registers: of a thread. Warps/SM: the most warps of such a launch "
    "that an SM can hold; occup.: their share of the warps that an SM can hold at all. A row is computed "
    "from the first launches of a kernel with that block size."
)


class KernelOccupancy(NamedTuple):
    """The occupancy of a kernel's launches on one GPU with blocks of one size."""

    name: str
    gpu: int
    launches: int
    needs: Resources
    occupancy: Occupancy

    @property
    def limited_by(self) -> str | None:
        """The limits of the occupancy, None if an SM can be full."""
        return ", ".join(self.occupancy.limits) or None


def occupancy_table(run: Run, top: int) -> Table:
    """The kernels that ran longest, `top` of them or all for 0."""
    rows = [
        (
            one.name,
            one.gpu,
            one.launches,
            one.needs.threads,
            one.needs.registers,
            one.needs.shared_bytes,
            one.occupancy.blocks,
            one.occupancy.warps,
            one.occupancy.most,
            one.occupancy.percent,
            one.limited_by,
        )
        for one in islice(kernel_occupancies(run, top), top if top > 0 else None)
    ]
    return Table("occupancy", "Occupancy that the launches allow", _COLUMNS, rows, _NOTE)


def kernel_occupancies(
    run: Run, top: int = 0, only: Iterable[str] | None = None
) -> Iterator[KernelOccupancy]:
    """The occupancy of each kernel, GPU and size of block, those that ran longest first. With `top`, of the
    first ones only; with `only`, of the kernels with these names.
    """
    gpus = about_gpus(run)
    limits = {gpu: known for gpu, about in gpus.items() if (known := sm_limits(about))}
    layer = run.layer("gpu_kernel")
    if not limits or not len(layer):
        return
    every = np.arange(len(run.shapes), dtype=np.int32)
    of_gpu = np.where((gpu := run.shapes.column("gpu", every)) == NONE, 0, gpu)
    threads, names = run.shapes.block_threads(every), run.shapes.column("name", every)
    of_shape, first = number_rows(names, of_gpu, threads)
    of_row, total_ns = of_shape[layer.shape], np.zeros(len(first), np.int64)
    launches = np.bincount(of_row, minlength=len(first))
    np.add.at(total_ns, of_row[layer.has_length], (layer.end_ns - layer.start_ns)[layer.has_length])
    is_there = (launches > 0) & (threads[first] > 0) & np.isin(of_gpu[first], list(limits))
    if only is not None:
        is_there &= np.isin(names[first], [run.shapes.number_of("name", name) for name in only])
    there = np.flatnonzero(is_there)
    order = there[np.lexsort((-launches[there], -total_ns[there]))]
    wanted = order[: top * _SPARE] if top > 0 else order
    some = np.flatnonzero(np.isin(of_row, wanted))
    args_of = RowsByNumber(of_row[some], layer.args[some])
    for key in wanted.tolist():
        shape, number = first[key], int(of_gpu[first[key]])
        needs = _usual(run, args_of.of(key)[:_EXAMINED].tolist(), int(threads[shape]))
        sm_count = gpus[number].get("sm_count")
        occupancy = needs and occupancy_of(
            needs, limits[number], sm_count if isinstance(sm_count, int) else None
        )
        if needs and occupancy:
            name = run.shapes.value("name", int(names[shape]))
            yield KernelOccupancy(name, number, int(launches[key]), needs, occupancy)


def _usual(run: Run, numbers: list[int], threads: int) -> Resources | None:
    """What most of these launches need, by their arguments; None where these do not say it."""
    counted = Counter(needs for number in numbers if (needs := resources(run.args.args(number), threads)))
    return counted.most_common(1)[0][0] if counted else None


def resources(args: Mapping[str, Any], threads: int) -> Resources | None:
    """What a launch needs, by the arguments of its kernel; None where they do not say it."""
    registers, shared_bytes = _number(args.get("registers")), _number(args.get("shared_bytes"))
    if registers is None or shared_bytes is None:
        return None
    cluster = args.get("cluster")
    is_known = isinstance(cluster, list | tuple) and all(_number(size) is not None for size in cluster)
    return Resources(
        threads,
        registers,
        shared_bytes,
        _number(args.get("shared_config_bytes")) or 0,
        max(prod(cluster), 1) if is_known and cluster else 1,
        _number(args.get("max_active_clusters")) or 0,
    )


def _number(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 32 else None
