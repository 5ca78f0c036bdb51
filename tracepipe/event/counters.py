"""Every counter track that is drawn: its name, its unit, and where viewers show it.

A new one is a line here, and the code in `layout` that computes its values. This module imports nothing of
the package, so that captures may name the series that they sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

SUMMARY: Final = "summary"
"""The category of what is computed from other tracks. Queries leave it out of sums."""
RANK_OF_GPU: Final = 1
RANK_OF_PROCESS: Final = 1 << 21
"""The place of a counter under its owner: above the streams of a GPU, and below the threads of a process."""
RANK_OF_SM: Final = 100_000
"""The place of the first SM under its GPU."""


@dataclass(frozen=True, slots=True)
class CounterTrack:
    """A kind of counter tracks. `name` may have a number in it, which is then added to `rank`. `pin` is its
    place among the tracks that a viewer shows first, before or after the streams of a GPU; "" for no place.
    """

    name: str
    unit: str = ""
    owner: Literal["gpu", "process"] = "gpu"
    category: str = "gpu"
    rank: int = RANK_OF_GPU
    pin: Literal["", "before streams", "after streams"] = ""


GPU_BUSY: Final = CounterTrack("GPU busy", "%", category=SUMMARY, rank=0, pin="before streams")
"""The share of time in which anything is on a stream."""
ACTIVE_WARPS: Final = CounterTrack("active warps", "warps", pin="before streams")
SM_ACTIVE_WARPS: Final = CounterTrack("SM {} active warps", "warps", rank=RANK_OF_SM)
CPU_USE: Final = CounterTrack(
    "CPU use", "% of one CPU", "process", SUMMARY, RANK_OF_PROCESS, pin="after streams"
)
"""The processor time of the threads of a process."""
DEVICE_MEMORY: Final = CounterTrack("device memory", "bytes", "process", "memory", RANK_OF_PROCESS)
DEVICE_MEMORY_IN_USE: Final = CounterTrack(
    "device memory in use", "bytes", "process", "memory", RANK_OF_PROCESS
)
OF_GPU_EVENTS: Final = CounterTrack("", category="counter")
OF_PROCESS_EVENTS: Final = CounterTrack("", "", "process", "counter", RANK_OF_PROCESS)
"""Series whose values events have, with their own names and units."""
STALL_SAMPLES: Final = CounterTrack("samples", "samples")

COUNTERS: Final = (
    GPU_BUSY, ACTIVE_WARPS, SM_ACTIVE_WARPS, CPU_USE, DEVICE_MEMORY, DEVICE_MEMORY_IN_USE, OF_GPU_EVENTS,
    OF_PROCESS_EVENTS, STALL_SAMPLES,
)  # fmt: skip

# The series of GPUs' hardware counters that captures sample and reports read.
GPU_COUNTERS: Final = "gpu_counters"
"""The layer and the name of their samples."""
SM_ACTIVE: Final = "SM active %"
TENSOR_ACTIVE: Final = "SM tensor active %"
SM_CLOCK: Final = "SM clock MHz"
DRAM_READ: Final = "DRAM read GB/s"
DRAM_WRITE: Final = "DRAM write GB/s"
DRAM_READ_SHARE: Final = "DRAM read %"
DRAM_WRITE_SHARE: Final = "DRAM write %"

# Why a warp that was sampled did not issue an instruction. The names are those of NVIDIA's tools. A recording
# has them as CUPTI gives them, without their common prefix.
SELECTED: Final = "selected"
"""The warp issued an instruction: no stall."""

STALL_GROUPS: Final = {
    "memory": (
        "long_scoreboard",
        "short_scoreboard",
        "lg_throttle",
        "mio_throttle",
        "tex_throttle",
        "drain",
        "imc_miss",
        "tma",
    ),
    "barrier": ("barrier", "membar"),
    # `warpgroup_arrive` is what CUPTI's samples have for a wait for the tensor cores' asynchronous products:
    # of a matrix product on an H200, its share was that of `gmma` in Nsight Compute.
    "math pipe": ("math_pipe_throttle", "gmma", "warpgroup_arrive", "wait"),
    "issue": (SELECTED, "not_selected", "dispatch_stall"),
    "instruction fetch": ("no_instructions", "no_instruction", "branch_resolving"),
    "other": ("sleeping", "misc"),
}
"""Group → its reasons. A reason in none of them belongs to the group `other`."""

_GROUP_OF: Final = {reason: group for group, reasons in STALL_GROUPS.items() for reason in reasons}


def stall_group(reason: str) -> str:
    """The group of a stall reason."""
    return _GROUP_OF.get(reason, "other")
