"""Sorts the warps of a kernel by launch, block and warp, and their exits by time."""

from __future__ import annotations

from tracepipe.analyses.findings.kernel_warps import KernelWarps, WarpColumns
from tracepipe.event.groups import sorted_runs
from tracepipe.reports.frames.libraries import np


def sort_warps(warps: WarpColumns) -> KernelWarps:
    """Return the warps of a kernel, sorted. Where exits were recorded at all, warps without one are left out
    and counted in `still_running`.
    """
    launch, exit_warp = warps.launch, warps.exit_warp
    has_exit = np.full(launch.size, not exit_warp.size)
    has_exit[exit_warp] = True
    order, _ = sorted_runs(launch, warps.block, warps.warp)
    order = order[has_exit[order]]
    place = np.full(launch.size, -1)
    place[order] = np.arange(order.size)
    exits = np.lexsort((warps.exit_ns, place[exit_warp]))
    return KernelWarps(
        warps.kernel,
        warps.grid,
        launch[order],
        warps.block[order],
        warps.warp[order],
        warps.sm[order],
        warps.entry_ns[order],
        place[exit_warp[exits]],
        warps.exit_ns[exits],
        warps.exit_mask[exits],
        warps.lanes_timed,
        warps.blocks_known,
        warps.rows_mixed,
        warps.launch_ids,
        warps.gpu,
        warps.block_size,
        warps.sm_count,
        warps.cluster_of,
        int(launch.size - order.size),
    )
