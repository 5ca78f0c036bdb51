"""Joins launch calls to kernels and warps by launch id: arrows, and the check of cause before effect."""

from __future__ import annotations

from typing import Any

from tracepipe.event.outcomes import Outcomes
from tracepipe.layout.timeline import INSTANT, Flows
from tracepipe.layout.tree import Tree

# Launches are remembered for their kernels; a capture that lost either must not fill the memory.
REMEMBERED = 1 << 16


class Launches:
    """Calls and kernels come in the order of their times, so that a kernel before its call is met first."""

    def __init__(self, tree: Tree, outcomes: Outcomes) -> None:
        self._tree, self._outcomes = tree, outcomes
        self._starts: dict[int, tuple[int, int]] = {}
        self._called: dict[int, None] = {}
        self._drawn: dict[int, None] = {}
        self._flows: dict[int, int] = {}
        self._last_flow = 0

    def _arrow(self, launch: int) -> int:
        """The arrow of a launch: it starts where it is met first, and goes on from there."""
        flow = self._flows.get(launch)
        if flow is not None:
            return flow
        # Even, where those of calls through the layers are odd. Not made of the launch id, which may have
        # 64 bits of its own and may come again.
        self._last_flow += 2
        _remember(self._flows, launch, self._last_flow)
        return -self._last_flow

    def call(self, launch: int, ts_ns: int) -> int:
        """Note the launch call; returns its arrow. An id that was called before is another launch now."""
        if launch in self._called:
            for table in (self._starts, self._drawn, self._flows):
                table.pop(launch, None)
        start = self._starts.pop(launch, None)
        if start is not None:
            start_ns, bound_ns = start
            if start_ns + bound_ns < ts_ns:
                self._outcomes.causality += 1
                args: dict[str, Any] = {
                    "launch": launch,
                    "before_launch_ns": ts_ns - start_ns,
                    "bound_ns": bound_ns,
                }
                track = self._tree.child(self._tree.group("tracepipe"), "slices", "problems", 0, "tracepipe")
                self._tree.ops.append((INSTANT, track, start_ns, "starts before its launch", args, None))
        _remember(self._called, launch)
        return self._arrow(launch)

    def start(self, launch: int, ts_ns: int, bound_ns: int) -> None:
        """Note when something of a launch starts, within `bound_ns`, to hold it against its call."""
        if launch not in self._called and launch not in self._starts:
            _remember(self._starts, launch, (ts_ns, bound_ns))

    def kernel(self, launch: int, ts_ns: int, bound_ns: int) -> Flows:
        """Note a kernel's start, within `bound_ns`; returns the arrow that ends at it."""
        self.start(launch, ts_ns, bound_ns)
        _remember(self._drawn, launch)
        return (self._arrow(launch),)

    def warps(self, launch: int, ts_ns: int, bound_ns: int, *, may_start: bool) -> Flows | None:
        """Note the first warp of a batch; returns the arrow, if the launch has no kernel slice to end it.

        An arrow may start there only if the warp is drawn now, at the time of the events around it.
        """
        if launch in self._drawn:
            return None
        if may_start or launch in self._flows:
            return self.kernel(launch, ts_ns, bound_ns)
        self.start(launch, ts_ns, bound_ns)
        return None


def _remember(table: dict[int, Any], launch: int, value: Any = None) -> None:
    if len(table) >= REMEMBERED and launch not in table:
        del table[next(iter(table))]
    table[launch] = value
