"""The limits of an SM: warps, blocks, registers, shared memory.

The figures are those of "Technical Specifications per Compute Capability" and "Occupancy" in NVIDIA's CUDA
programming guide. What the driver reports of a GPU, and a header has, comes before them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

WARP_THREADS: Final = 32
REGISTER_UNIT: Final = 256
"""Registers are allocated to a warp in units of this many."""
PARTITIONS: Final = 4
"""An SM has this many parts with equal shares of its registers; a warp's registers are in one of them."""
_KIB: Final = 1024


class SmLimits(NamedTuple):
    """`reserved_bytes` is the shared memory that each block has for the system, `shared_unit_bytes` the unit
    in which shared memory is allocated to a block.
    """

    warps: int
    blocks: int
    registers: int
    shared_bytes: int
    reserved_bytes: int
    shared_unit_bytes: int


_REGISTERS: Final = 1 << 16
# Compute capability → warps, blocks, KiB of shared memory.
_OF_CAPABILITY: Final = {
    "7.0": (64, 32, 96),
    "7.2": (64, 32, 96),
    "7.5": (32, 16, 64),
    "8.0": (64, 32, 164),
    "8.6": (48, 16, 100),
    "8.7": (48, 16, 164),
    "8.9": (48, 24, 100),
    "9.0": (64, 32, 228),
    "10.0": (64, 32, 228),
    "10.3": (64, 32, 228),
    "11.0": (48, 24, 228),
    "12.0": (48, 24, 100),
    "12.1": (48, 24, 100),
}
_CAPABILITY_OF: Final = {
    "7.0": "V100",
    "7.5": "T4",
    "8.0": "A100 A800 A30",
    "8.6": "A2 A10 A10G A16 A40",
    "8.9": "L4 L20 L40 L40S",
    "9.0": "H100 H200 H800 H20 GH200",
    "10.0": "B100 B200 GB200",
    "10.3": "B300 GB300",
}
_OF_MODEL: Final = {model: of for of, models in _CAPABILITY_OF.items() for model in models.split()}
_REPORTED: Final = {
    "warps": "max_warps_per_sm",
    "blocks": "max_blocks_per_sm",
    "registers": "registers_per_sm",
    "shared_bytes": "shared_bytes_per_sm",
    "reserved_bytes": "reserved_shared_bytes",
}
"""Field → key of a GPU in a header."""


def sm_limits(gpu: Mapping[str, Any]) -> SmLimits | None:
    """The limits of a GPU as described in a header; None where its compute capability is not known."""
    words = re.split(r"[\s-]+", str(gpu.get("name", "")))
    by_model = next((_OF_MODEL[word] for word in words if word in _OF_MODEL), None)
    known = _OF_CAPABILITY.get(str(gpu.get("compute_capability", by_model)))
    if known is None:
        return None
    warps, blocks, shared_kib = known
    is_recent = str(gpu.get("compute_capability", by_model)).partition(".")[0] != "7"
    limits = SmLimits(
        warps,
        blocks,
        _REGISTERS,
        shared_kib * _KIB,
        reserved_bytes=_KIB if is_recent else 0,
        shared_unit_bytes=128 if is_recent else 256,
    )
    reported = {field: gpu.get(key) for field, key in _REPORTED.items()}
    return limits._replace(**{field: n for field, n in reported.items() if type(n) is int and n > 0})
