"""The occupancy that warps achieved, and the one that their launch allows."""

from __future__ import annotations

from math import prod
from typing import Any, Final, NamedTuple

from tracepipe.analyses.kernel_occupancy import kernel_occupancies
from tracepipe.event.sm_limits import sm_limits
from tracepipe.reports.frames.gpus import about_gpus
from tracepipe.reports.frames.run import Run
from tracepipe.reports.report import Column, Table

_COLUMNS: Final = (
    Column("kernel", "kernel"),
    Column("blocks_per_sm", "blocks/SM", "count"),
    Column("theoretical_blocks_per_sm", "allowed", "number"),
    Column("active_warps_per_sm", "warps/SM", "number"),
    Column("theoretical_warps_per_sm", "allowed", "number"),
    Column("achieved_percent", "achieved", "percent"),
    Column("theoretical_percent", "theoretical", "percent"),
    Column("limited_by", "limited by"),
)
_NOTE: Final = (
    "Achieved: the mean number of active warps over a launch's duration, on SMs that had any, as a share of "
    "the warps that an SM can hold. Theoretical: the share that the launch allows; limited by: what limits "
    "it. The achieved share is lower if the grid or its last wave is small, if blocks last for different "
    "times, or if the recording's own code in the kernel needs registers."
)


class Held(NamedTuple):
    """The occupancy of SMs by a kernel: the most blocks at a time, and the mean number of active warps."""

    kernel: str
    title: str
    gpu: int
    block_size: tuple[int, int, int] | None
    blocks_per_sm: int | None
    active_warps_per_sm: float


def achieved_table(run: Run, held: list[Held], other: Run | None = None) -> Table:
    """A row for each kernel on a GPU whose limits are known. Facts about a launch that `run` lacks are taken
    from `other`, a recording of the same kernels.
    """
    gpus, names = about_gpus(run), {one.kernel for one in held}
    allowed = {
        (one.name, one.gpu, one.needs.threads): one
        for some in filter(None, (other, run))
        for one in kernel_occupancies(some, only=names)
    }

    def row(one: Held) -> tuple[Any, ...] | None:
        limits = sm_limits(gpus.get(one.gpu, {}))
        if limits is None:
            return None
        known = allowed.get((one.kernel, one.gpu, prod(one.block_size or (0,))))
        seen, warps = one.blocks_per_sm, one.active_warps_per_sm
        achieved = 100 * warps / limits.warps
        if known is None:
            return one.title, seen, None, warps, None, achieved, None, None
        most = known.occupancy
        return one.title, seen, most.blocks, warps, most.warps, achieved, most.percent, known.limited_by

    rows = [cells for one in held if (cells := row(one))]
    return Table("achieved_occupancy", "Occupancy, achieved and theoretical", _COLUMNS, rows, _NOTE)
