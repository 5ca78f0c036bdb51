"""The threads of warps: when each lane entered its kernel and left it."""

from __future__ import annotations

from collections.abc import Iterator

from tracepipe.event.columns import Three
from tracepipe.event.warps import PlacedWarps, Warps
from tracepipe.layout.timeline import FULL_MASK, WARP_LANES


def unflatten(number: int, size: list[int]) -> Three:
    """x, y, z of a linear index in a box of `size`, x fastest."""
    x, y, _ = size
    return number % x, number // x % y, number // (x * y)


def has_indices(batch: Warps | PlacedWarps) -> bool:
    """Whether the blocks and threads of warps are known, as the sizes of their grid and block are."""
    return all(batch.launched.get(name) and 0 not in batch.launched[name] for name in ("grid", "block"))


def threads_of(batch: Warps | PlacedWarps) -> Iterator[tuple[int, Three, Three, bool]]:
    """Time, block, thread and whether it is an exit, of each entry and exit of a lane, warp by warp."""
    grid, block = batch.launched["grid"], batch.launched["block"]
    threads = block[0] * block[1] * block[2]
    warps_a_block = -(-threads // WARP_LANES)
    full, exits = [FULL_MASK] * len(batch), batch.exit_ns.tolist()
    masks = full if batch.entry_mask is None else batch.entry_mask.tolist()
    counts = [1] * len(batch) if batch.exit_count is None else batch.exit_count.tolist()
    left = None if batch.exit_mask is None else batch.exit_mask.tolist()
    exit_at = 0
    for number, after_ns, mask, count in zip(
        batch.warp.tolist(), batch.entry_ns.tolist(), masks, counts, strict=True
    ):
        block_number, warp = divmod(number, warps_a_block)
        where = unflatten(block_number, grid)
        first = warp * WARP_LANES
        lanes = [
            unflatten(first + lane, block) if first + lane < threads else None for lane in range(WARP_LANES)
        ]
        entry_ns = batch.ts_ns + after_ns
        for thread in _of(mask, lanes):
            yield entry_ns, where, thread, False
        for k in range(exit_at, exit_at + count):
            for thread in _of(left[k] if left else mask, lanes):
                yield entry_ns + exits[k], where, thread, True
        exit_at += count


def _of(mask: int, lanes: list[Three | None]) -> list[Three]:
    """The threads of the lanes in a mask."""
    return [thread for lane, thread in enumerate(lanes) if mask >> lane & 1 and thread is not None]
