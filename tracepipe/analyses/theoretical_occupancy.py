"""The occupancy that a launch allows: how many warps an SM can hold at a time, and what limits them.

Each block needs registers, shared memory, warps and a place, and an SM has so much of each: see
`event/sm_limits.py`. The rules are those of "Occupancy" in the CUDA programming and best practices guides:

- Each warp gets its registers, rounded up to a unit, from one of the parts of the SM.
- Each block gets its shared memory, with what the system reserves in it, rounded up to a unit.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tracepipe.event.sm_limits import PARTITIONS, REGISTER_UNIT, WARP_THREADS, SmLimits

_UNLIMITED: Final = 1 << 62


class Resources(NamedTuple):
    """What a launch needs. `shared_bytes` is the static and dynamic shared memory of a block, and
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
    fitting = {
        "registers": _by_registers(needs.registers, warps, limits),
        "shared memory": _by_shared_memory(needs, limits),
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
    held = blocks * warps
    return Occupancy(blocks, held, limits.warps, () if held == limits.warps else which)


def _by_registers(registers: int, warps: int, limits: SmLimits) -> int:
    if registers <= 0:
        return _UNLIMITED
    of_warp = _rounded_up(registers * WARP_THREADS, REGISTER_UNIT)
    return limits.registers // PARTITIONS // of_warp * PARTITIONS // warps


def _by_shared_memory(needs: Resources, limits: SmLimits) -> int:
    of_block = _rounded_up(needs.shared_bytes + limits.reserved_bytes, limits.shared_unit_bytes)
    of_sm = min(needs.shared_config_bytes or limits.shared_bytes, limits.shared_bytes)
    return of_sm // of_block if of_block else _UNLIMITED


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
