"""The names of GPU counters in an event file."""

from __future__ import annotations

from tracepipe.event.counter_names import (
    DRAM_READ,
    DRAM_READ_SHARE,
    DRAM_WRITE,
    DRAM_WRITE_SHARE,
    GPU_COUNTERS,
    SM_ACTIVE,
    SM_CLOCK,
    TENSOR_ACTIVE,
)

__all__ = [
    "DRAM_READ",
    "DRAM_READ_SHARE",
    "DRAM_WRITE",
    "DRAM_WRITE_SHARE",
    "GPU_COUNTERS",
    "SM_ACTIVE",
    "SM_CLOCK",
    "TENSOR_ACTIVE",
]
