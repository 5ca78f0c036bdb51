"""Names in events that more than one part of the program knows."""

from __future__ import annotations

import re
from typing import Final

from tracepipe.kernel_names import remembered

RUNNING: Final = "running"
"""A slice of the scheduler's layer: a thread has a processor."""
ON_CPU, OFF_CPU, PREEMPTED, SAMPLED = "on-CPU", "off-CPU", "preempted", "sampled"
"""The events of the layer `host_sample`: a thread was found running, a slice in which it waits, one in which
it could run on, but has no processor, and a thread was found in an unknown state."""
UNKNOWN_CODE: Final = "[unknown]"
"""In place of a file, in a frame that stands for native frames between which no frame pointers lead."""
WAKEUP: Final = "wakeup"
"""An instant of that layer: a thread that slept may run again."""
RUNNABLE: Final = "runnable"
"""Why a thread left its processor (`prev_state` of an end of `running`) where it could have run on."""
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
"""Why it left where it could not run on, by the bit of prev_state in sched_switch of kernels since 4.14."""
MEMORY_IN_USE: Final = "gpu_mem"
"""The event of the `memory` layer whose `total_bytes` is the memory in use on a GPU, by all processes."""
PYTHON_LAYERS: Final = frozenset({"python", "python_function"})
"""Layers of other tools' recordings whose calls are Python functions: values of `layer` of a hook."""
OPERATORS: Final = frozenset({"cpu_op", "xla"})
"""Domains of annotations that a framework's profiler makes for its own functions, thousands for each step."""
RANGES_ON_GPU: Final = "gpu_user_annotation"
"""The layer of the ranges that PyTorch's profiler has on GPUs: for each annotation, where its work ran."""
FIRST_SCREEN: Final = "tracepipe.first_screen"
"""The attribute of a Perfetto trace that names the part to show first."""
IS_FUNCTION: Final = re.compile(r"(__)?(cu|cuda|hip)[A-Z]").match
"""Matches the names of functions of CUDA and HIP. Other calls that launch have the name of their kernel."""
LAUNCHES: Final = "LaunchKernel"
"""Part of the name of every function that launches a kernel."""
KERNEL: Final = "kernel"
"""The key of the kernel's name in the arguments of such a call."""
ADDRESS_KEYS: Final = ("address", "ptr", "dptr", "devPtr")
"""Keys of the address in the arguments of a `memory` event, as different tools call it."""
SIZE_KEYS: Final = ("size_bytes", "size")
"""Keys of the size of a `memory` or `transfer` event, bytes, as different tools call it."""
COPY_KINDS: Final = ("HtoH", "HtoD", "DtoH", "DtoD", "default")
"""The direction of a copy by the number that the CUDA runtime has for it, cudaMemcpyKind."""
_WAY = re.compile(
    r"(?:cudaMemcpy)?(h|d|a|p|host|device|array|peer)(?:2|[ _-]?to[ _-]?|->)(h|d|a|p|host|device|array|peer)",
    re.IGNORECASE,
)


def state_text(prev_state: int) -> str:
    """Why a thread left its processor, by prev_state of sched_switch."""
    # Of several bits, the scheduler's own state letter shows the lowest.
    lowest = prev_state & -prev_state
    return LEFT_STATES.get(lowest, str(prev_state)) if prev_state else RUNNABLE


@remembered
def direction_named(text: str) -> str:
    """The name of a copy's direction: `HtoD` for `H2D`, `host_to_device` and cudaMemcpyHostToDevice.

    Other
    text is returned as it is.
    """
    found = _WAY.fullmatch(text)
    return f"{found[1][0].upper()}to{found[2][0].upper()}" if found else text
