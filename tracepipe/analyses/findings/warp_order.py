"""Sorts the warps of a kernel by launch, block and warp, and their exits by time."""

from __future__ import annotations

from itertools import pairwise

from tracepipe.analyses.findings.kernel_warps import KernelWarps, WarpColumns
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.grouping import in_order
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import ROWS_AT_ONCE, flagged, made, parts, release, taken


def sort_warps(warps: WarpColumns) -> KernelWarps:
    """Return the warps of a kernel, sorted. Where exits were recorded at all, warps without one are left out
    and counted in `still_running`.
    """
    launch, exit_warp = warps.launch, warps.exit_warp
    has_exit = np.full(launch.size, not exit_warp.size)
    for part in parts(exit_warp.size):
        has_exit[exit_warp[part]] = True
    order = in_order(launch, warps.block, warps.warp)
    order = taken(order, flagged(order.size, lambda part: has_exit[order[part]]))
    place = np.full(launch.size, -1, np.int32)
    for part in parts(order.size):
        place[order[part]] = np.arange(part.start, part.stop)
    exits = _exits_in_order(
        made(exit_warp.size, np.int32, lambda part: place[exit_warp[part]]), warps.exit_ns
    )
    return KernelWarps(
        warps.kernel,
        warps.grid,
        taken(launch, order),
        taken(warps.block, order),
        taken(warps.warp, order),
        taken(warps.sm, order),
        taken(warps.entry_ns, order),
        made(exits.size, np.int64, lambda part: place[exit_warp[exits[part]]]),
        taken(warps.exit_ns, exits),
        made(exits.size, np.int64, lambda part: warps.exit_mask[exits[part]]),
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


def _exits_in_order(of: Ints, exit_ns: Ints) -> Ints:
    """The order of the exits by their warps `of`, then by time. Shapes `(exits,)`."""
    order = in_order(of)
    ordered = taken(of, order)
    bounds = np.searchsorted(ordered, np.arange(0, int(of.max(initial=-1)) + 1, ROWS_AT_ONCE, dtype=np.int32))
    for first, last in pairwise([*bounds.tolist(), of.size]):
        rows = order[first:last]
        order[first:last] = rows[np.lexsort((exit_ns[rows], ordered[first:last]))]
        release()
    column: Ints = order
    return column
