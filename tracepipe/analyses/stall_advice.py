"""Advice on stall reasons: what each means, its usual causes, and what usually helps.

It follows the descriptions of the reasons in the documentation of Nsight Compute (Kernel Profiling Guide,
"Warp Stall Reasons").
"""

from __future__ import annotations

from typing import Final

_TENSOR: Final = "warps wait for the tensor cores. This is expected of a matrix product."
_ADVICE: Final = {
    "long_scoreboard": "warps wait for data from global or local memory (L1, L2, DRAM) or a texture. "
    "Usual causes: loads that are not coalesced, data that is loaded again, too few loads in flight. "
    "Load more per thread before the first use, stage data in shared memory, raise occupancy.",
    "short_scoreboard": "warps wait for shared memory, a special function or another slow operation of "
    "the SM. Usual causes: bank conflicts, and many sin, exp or rsqrt. Change the layout in shared "
    "memory, or use fewer such operations.",
    "lg_throttle": "the queue for loads and stores of global and local memory is full. Usual causes: "
    "many narrow accesses, and registers that spill. Use wider ones (float4), and look for spills.",
    "mio_throttle": "the queue for shared memory and special functions is full. Use fewer and wider "
    "accesses to shared memory.",
    "tex_throttle": "the queue for textures is full. Use fewer texture fetches, or plain loads for some.",
    "drain": "warps have exited and wait for their stores. Usual cause: many stores at the end that are "
    "not coalesced.",
    "imc_miss": "warps wait for a constant that is not in the cache. Usual cause: indices into constant "
    "memory that differ within a warp.",
    "barrier": "warps wait at __syncthreads() for others of their block. Usual causes: work that "
    "differs between the warps of a block, and large blocks of which only one or two fit an SM. Divide work "
    "more evenly, or use smaller blocks.",
    "membar": "warps wait for a memory fence. Use fewer fences, or of a narrower scope.",
    "math_pipe_throttle": "the arithmetic unit is busy with other warps. This is expected of a kernel "
    "bound by arithmetic; less arithmetic, or tensor cores, makes it faster.",
    "gmma": _TENSOR,
    "warpgroup_arrive": _TENSOR,
    "wait": "warps wait for an instruction of fixed latency. More independent work per thread, or more "
    "warps, hides it.",
    "not_selected": "warps are ready, but another warp is issued. There are enough warps; fewer warps "
    "with more registers each may do as well.",
    "dispatch_stall": "the dispatcher holds warps back. Usual cause: conflicts in the register file.",
    "no_instructions": "warps wait for their code. Usual causes: a kernel that is longer than the "
    "instruction cache, jumps, or a launch that has just begun. Unroll less.",
    "branch_resolving": "warps wait for the target of a branch. Usual cause: many short branches. Use "
    "fewer, or predicated code.",
    "sleeping": "all threads of the warps sleep or have yielded, as __nanosleep() does.",
}


def advice_on(reason: str) -> str:
    """Return a few sentences on a stall reason."""
    return _ADVICE.get(reason, "see the warp stall reasons in the documentation of Nsight Compute.")
