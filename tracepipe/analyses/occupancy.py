"""The occupancy that launches allow, and the one that their warps achieved.

An SM can hold so many warps of a launch at a time: each block needs registers, shared memory, warps and a
place, and an SM has so much of each (`event/sm_limits.py`). The rules are those of "Occupancy" in the CUDA
programming and best practices guides:

- Each warp gets its registers, rounded up to a unit, from one of the parts of the SM.
- Each block gets its shared memory, with what the system reserves in it, rounded up to a unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import prod
from typing import Any, Final, NamedTuple

from tracepipe.event.groups import number_rows, sums_by
from tracepipe.event.sm_limits import PARTITIONS, REGISTER_UNIT, WARP_THREADS, SmLimits, sm_limits
from tracepipe.libraries import np
from tracepipe.reports.report import Column, Table
from tracepipe.store.run import Run
from tracepipe.store.schema import IS_TIMED

_UNLIMITED: Final = 1 << 62


class Resources(NamedTuple):
    """The needs of a launch. `shared_bytes` is the static and dynamic shared memory of a block, and
    `shared_config_bytes` what the program has configured of an SM for it, 0 where the driver chooses.
    `cluster_blocks` is the size of a cluster, and `clusters` the most of them that the GPU holds at a time, 0
    where that is not known.
    """

    threads: int
    registers: int
    shared_bytes: int
    shared_config_bytes: int = 0
    cluster_blocks: int = 1
    clusters: int = 0


class Occupancy(NamedTuple):
    """`blocks` and `warps` of an SM, which may be fractions where clusters limit them; the `most` warps that
    an SM holds of any launch; and what limits them, nothing where that is the most.
    """

    blocks: float
    warps: float
    most: int
    limits: tuple[str, ...]

    @property
    def percent(self) -> float:
        """Warps by the most that an SM holds."""
        return 100 * self.warps / self.most


def occupancy_of(needs: Resources, limits: SmLimits, sm_count: int | None = None) -> Occupancy | None:
    """The occupancy of a launch on a GPU with these limits; None where no block fits, so that something of
    it is not as recorded.
    """
    warps = -(-needs.threads // WARP_THREADS)
    if warps <= 0:
        return None
    of_warp = _rounded_up(needs.registers * WARP_THREADS, REGISTER_UNIT)
    of_block = _rounded_up(needs.shared_bytes + limits.reserved_bytes, limits.shared_unit_bytes)
    of_sm = min(needs.shared_config_bytes or limits.shared_bytes, limits.shared_bytes)
    fitting = {
        "registers": limits.registers // PARTITIONS // of_warp * PARTITIONS // warps
        if of_warp > 0
        else _UNLIMITED,
        "shared memory": of_sm // of_block if of_block else _UNLIMITED,
        "block size": limits.warps // warps,
        "blocks per SM": limits.blocks,
    }
    blocks: float = min(fitting.values())
    if blocks <= 0:
        return None
    which = tuple(what for what, count in fitting.items() if count == blocks)
    if needs.clusters and needs.cluster_blocks > 1 and sm_count:
        in_clusters = needs.clusters * needs.cluster_blocks / sm_count
        if in_clusters < blocks:
            blocks, which = in_clusters, ("clusters",)
    at_once = blocks * warps
    return Occupancy(blocks, at_once, limits.warps, () if at_once == limits.warps else which)


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


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
            *one.needs[:3],
            *one.occupancy[:3],
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
    gpus = run.facts.gpus()
    limits = {gpu: known for gpu, about in gpus.items() if (known := sm_limits(about))}
    if not limits:
        return
    sums = run.store.columns(
        f"""select shape, sum(rows)::bigint as launches,
            coalesce(sum(total_ns) filter ({IS_TIMED}), 0)::bigint as total_ns
        from store.shape_sums x where layer = 'gpu_kernel' group by shape order by shape"""
    )
    shapes = sums["shape"]
    gpu, threads = run.shapes.numbers("gpu", shapes, 0), run.shapes.block_threads(shapes)
    names = run.shapes.column("name", shapes)
    of_shape, first = number_rows(names, gpu, threads)
    launches, total_ns = (sums_by(of_shape, sums[name], len(first)) for name in ("launches", "total_ns"))
    is_wanted = (threads[first] > 0) & np.isin(gpu[first], list(limits))
    if only is not None:
        is_wanted &= np.isin(names[first], [run.shapes.number_of("name", name) for name in only])
    wanted = np.flatnonzero(is_wanted)
    wanted = wanted[np.lexsort((-launches[wanted], -total_ns[wanted]))][: top * _SPARE if top > 0 else None]
    is_wanted = np.isin(of_shape, wanted)
    args = run.store.rows(
        f"""select number, args from store.gpu_kernel join wanted using (shape)
        qualify row_number() over (partition by number order by id) <= {_EXAMINED} order by number, id""",
        wanted={"shape": shapes[is_wanted], "number": of_shape[is_wanted]},
    )
    needs_of: dict[int, Counter[Resources]] = {}
    for number, args_number in args:
        needs = resources(run.args.args(args_number), int(threads[first[number]]))
        if needs:
            needs_of.setdefault(number, Counter())[needs] += 1
    for number in wanted.tolist():
        at = int(first[number])
        on = int(gpu[at])
        # The needs of most of these launches; nothing where none of them states its needs.
        for needs, _ in needs_of.get(number, Counter()).most_common(1):
            sm_count = gpus[on].get("sm_count")
            sm_count = sm_count if isinstance(sm_count, int) else None
            if occupancy := occupancy_of(needs, limits[on], sm_count):
                name = run.shapes.value("name", int(names[at]))
                yield KernelOccupancy(name, on, int(launches[number]), needs, occupancy)


def resources(args: Mapping[str, Any], threads: int) -> Resources | None:
    """The needs of a launch, by the arguments of its kernel; None where they do not say it."""
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


_ACHIEVED_COLUMNS: Final = (
    Column("kernel", "kernel"),
    Column("blocks_per_sm", "blocks/SM", "count"),
    Column("theoretical_blocks_per_sm", "allowed", "number"),
    Column("active_warps_per_sm", "warps/SM", "number"),
    Column("theoretical_warps_per_sm", "allowed", "number"),
    Column("achieved_percent", "achieved", "percent"),
    Column("theoretical_percent", "theoretical", "percent"),
    Column("limited_by", "limited by"),
)
_ACHIEVED_NOTE: Final = (
    "Achieved: the mean number of active warps over a launch's duration, on SMs that had any, as a share of "
    "the warps that an SM can hold. Theoretical: the share that the launch allows; limited by: what limits "
    "it. The achieved share is lower if the grid or its last wave is small, if blocks last for different "
    "times, or if the recording's own code in the kernel needs registers."
)


class Achieved(NamedTuple):
    """The occupancy of SMs by a kernel: the most blocks at a time, and the mean number of active warps."""

    kernel: str
    title: str
    gpu: int
    block_size: tuple[int, int, int] | None
    blocks_per_sm: int | None
    active_warps_per_sm: float


def achieved_table(run: Run, kernels: list[Achieved], other: Run | None = None) -> Table:
    """A row for each kernel on a GPU whose limits are known. Facts about a launch that `run` lacks are taken
    from `other`, a recording of the same kernels.
    """
    gpus, names = run.facts.gpus(), {one.kernel for one in kernels}
    allowed = {
        (one.name, one.gpu, one.needs.threads): one
        for some in filter(None, (other, run))
        for one in kernel_occupancies(some, only=names)
    }

    def row(one: Achieved) -> tuple[Any, ...] | None:
        limits = sm_limits(gpus.get(one.gpu, {}))
        if limits is None:
            return None
        known = allowed.get((one.kernel, one.gpu, prod(one.block_size or (0,))))
        blocks, warps = one.blocks_per_sm, one.active_warps_per_sm
        achieved = 100 * warps / limits.warps
        if known is None:
            return one.title, blocks, None, warps, None, achieved, None, None
        most = known.occupancy
        return one.title, blocks, most.blocks, warps, most.warps, achieved, most.percent, known.limited_by

    rows = [cells for one in kernels if (cells := row(one))]
    return Table(
        "achieved_occupancy", "Occupancy, achieved and theoretical", _ACHIEVED_COLUMNS, rows, _ACHIEVED_NOTE
    )
