"""How many warps a GPU can have at a time, where its model is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracepipe.event.sm_limits import sm_limits


def warps_at_most(gpu: Mapping[str, Any]) -> int | None:
    """The limit of a GPU as described in a header; None where its model or its number of SMs is not known."""
    count, limits = gpu.get("sm_count", gpu.get("sms")), sm_limits(gpu)
    return count * limits.warps if limits is not None and type(count) is int and count > 0 else None
