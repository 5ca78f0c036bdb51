"""Names in events that mean something to more than one room."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

RUNNING: Final = "running"
"""The slice of the scheduler's own layer: a thread has a processor."""
WAKEUP: Final = "wakeup"
"""The instant of that layer at which a thread that sleeps may run again."""
RUNNABLE: Final = "runnable"
"""Why a thread left its processor, `prev_state` of an end of `running`, where it might have gone on."""
LEFT_STATES: Final = {
    0x1: "sleeping",
    0x2: "disk",
    0x4: "stopped",
    0x8: "traced",
    0x10: "dead",
    0x20: "zombie",
    0x40: "parked",
    0x80: "idle",
    0x100: "preempted",
}
"""The same where it could not, by the bit of prev_state that kernels since 4.14 report in sched_switch."""
MEMORY_IN_USE: Final = "gpu_mem"
"""The event of the `memory` layer that says with `total_bytes` what is in use on a GPU, by whomever."""
PYTHON_LAYERS: Final = frozenset({"python", "python_function"})
"""Layers of other tools' recordings whose calls are functions of Python, as `layer` of a hook has them."""
OPERATORS: Final = frozenset({"cpu_op", "xla"})
"""Domains of annotations that a framework's profiler makes of its own functions, thousands for a step."""
RANGES_ON_GPU: Final = "gpu_user_annotation"
"""The layer of the ranges that PyTorch's profiler has on GPUs: of each annotation, where its work ran."""
PIDS_MAX: Final = 1 << 22
"""Linux gives no process a higher number: other tools' groups of tracks that are no processes stand above."""
GPU_BUSY: Final = "GPU busy"
"""The counter of the share of time in which a GPU does anything, in timelines that have such summaries."""
CPU_USE: Final = "CPU use"
CPU_USE_UNIT: Final = "% of one CPU"
"""The counter of how much of processors the threads of a process take, likewise, and its unit."""
FIRST_SCREEN: Final = "tracepipe.first_screen"
"""The attribute of a Perfetto trace that says where its work is."""
IS_FUNCTION: Final = re.compile(r"(__)?(cu|cuda|hip)[A-Z]").match
"""Whether a call is a function of CUDA's or HIP's, by its name; others that launch are called as a kernel."""
LAUNCHES: Final = "LaunchKernel"
"""A part of the name of each function that launches a kernel."""
KERNEL: Final = "kernel"
"""The key of the kernel's name in the arguments of such a call."""
ADDRESS_KEYS: Final = ("address", "ptr", "dptr", "devPtr")
"""Keys of the address in the arguments of a `memory` event, as the sources of recordings call it."""
SIZE_KEYS: Final = ("size_bytes", "size")
"""Keys of what a `memory` or `transfer` event is about, bytes, likewise."""
COPY_KINDS: Final = ("HtoH", "HtoD", "DtoH", "DtoD", "default")
"""The direction of a copy by the number that the CUDA runtime has for it, cudaMemcpyKind."""
_WAY = re.compile(
    r"(?:cudaMemcpy)?(h|d|a|p|host|device|array|peer)(?:2|[ _-]?to[ _-]?|->)(h|d|a|p|host|device|array|peer)",
    re.IGNORECASE,
)


def state_text(prev_state: int) -> str:
    """Why a thread left its processor, by prev_state of sched_switch."""
    # More than one bit: the lowest is what the scheduler's own state letter shows.
    lowest = prev_state & -prev_state
    return LEFT_STATES.get(lowest, str(prev_state)) if prev_state else RUNNABLE


@lru_cache(maxsize=256)
def direction_named(text: str) -> str:
    """A direction as it is called here: `HtoD` of `H2D`, `host_to_device` and cudaMemcpyHostToDevice.

    Other text is itself.
    """
    found = _WAY.fullmatch(text)
    return f"{found[1][0].upper()}to{found[2][0].upper()}" if found else text
