"""Names of the hardware counters of GPUs that captures sample and reports read."""

from __future__ import annotations

from typing import Final

GPU_COUNTERS: Final = "gpu_counters"
"""The layer and the name of samples of GPUs' hardware counters. The series have other names."""
SM_ACTIVE: Final = "SM active %"
TENSOR_ACTIVE: Final = "SM tensor active %"
SM_CLOCK: Final = "SM clock MHz"
DRAM_READ: Final = "DRAM read GB/s"
DRAM_WRITE: Final = "DRAM write GB/s"
DRAM_READ_SHARE: Final = "DRAM read %"
DRAM_WRITE_SHARE: Final = "DRAM write %"
"""The series that reports read."""
