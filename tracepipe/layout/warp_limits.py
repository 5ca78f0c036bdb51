"""How many warps a GPU can have at a time, where its model is known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

# Resident warps per SM, from the table of compute capabilities in the CUDA programming guide.
_OF_SM: Final = {
    64: "V100 A100 A800 A30 H100 H200 H800 H20 GH200 B100 B200 B300 GB200 GB300",
    48: "A2 A10 A10G A16 A40 L4 L20 L40 L40S",
    32: "T4",
}
_OF_MODEL: Final = {model: warps for warps, models in _OF_SM.items() for model in models.split()}


def warps_at_most(gpu: Mapping[str, Any]) -> int | None:
    """The limit of a GPU as described in a header; None where its model or its number of SMs is not known."""
    count = gpu.get("sm_count", gpu.get("sms"))
    words = re.split(r"[\s-]+", str(gpu.get("name", "")))
    per_sm = next((_OF_MODEL[word] for word in words if word in _OF_MODEL), None)
    return count * per_sm if per_sm is not None and type(count) is int and count > 0 else None
