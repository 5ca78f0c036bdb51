"""Why a warp that was sampled did not issue an instruction: stall reasons by their names, in groups.

The names are those of NVIDIA's tools. A recording has them as CUPTI gives them, without their common prefix.
"""

from __future__ import annotations

from typing import Final

SELECTED: Final = "selected"
"""The warp issued an instruction: no stall."""

GROUPS: Final = {
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

_GROUP_OF: Final = {reason: group for group, reasons in GROUPS.items() for reason in reasons}


def group_of(reason: str) -> str:
    """The group of a stall reason."""
    return _GROUP_OF.get(reason, "other")
