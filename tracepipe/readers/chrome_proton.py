"""Decides the kinds of events of Triton Proton's trace of kernels: Chrome's trace JSON with lanes as threads.

category         lane                                             here
kernel           200000 + GPU × 1000000 + stream; once: stream    gpu_kernel of that stream
scope, metric    a thread of the CPU                              annotation
                 100000 + stream: scopes of a CUDA graph          hook: the layer `graph`
flow s, f        a thread of the CPU, the kernel's                flow from an annotation to a kernel

A scope of a graph has no call stack.
"""

from __future__ import annotations

from typing import Any, Final

from tracepipe.event.model import ID_LIMIT
from tracepipe.readers.chrome_kinds import Kind, Kinds

GRAPH: Final = "graph"
_GPU_LANES, _OF_GPU = 200_000, 1_000_000


class ProtonKinds(Kinds):
    """Decides the kinds of events."""

    def kind(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        """The kind of an event."""
        if category == "kernel" or (category == "flow" and event.get("ph") == "f"):
            place = _place(event.get("tid"))
            if place is not None:
                return Kind({"type": "gpu_kernel", "gpu": place[0], "stream": place[1]})
        elif category == "flow" or (category in ("scope", "metric") and "call_stack" in args):
            return Kind(self._thread(event, type="annotation"), own_args=args)
        elif category in ("scope", "metric"):
            return Kind(self._thread(event, type="hook", layer=GRAPH), own_args=args)
        return super().kind(event, category, args)


def _place(lane: object) -> tuple[int, int] | None:
    """GPU and stream of a kernel's lane."""
    if type(lane) is not int or not 0 <= lane <= ID_LIMIT:
        return None
    return divmod(lane - _GPU_LANES, _OF_GPU) if lane >= _GPU_LANES else (0, lane)
