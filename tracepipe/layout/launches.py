"""Joins launch calls to kernels and warps by launch id: arrows, and the check of cause before effect."""

from __future__ import annotations

from typing import Any

from tracepipe.layout.rows import Outcomes
from tracepipe.layout.tree import Tree
from tracepipe.timeline import INSTANT, Flows

# Launches are remembered for their kernels; a capture that lost either must not fill the memory.
REMEMBERED = 1 << 16


class Launches:
    """Calls and kernels come in the order of their times, so that a kernel before its call is met first."""

    def __init__(self, tree: Tree, outcomes: Outcomes) -> None:
        self._tree, self._outcomes = tree, outcomes
        self._starts: dict[int, tuple[int, int]] = {}
        self._called: dict[int, None] = {}
        self._arrows: dict[int, None] = {}

    @staticmethod
    def flow(launch: int) -> int:
        """The flow id of a launch: even, where those of calls through the layers are odd."""
        return launch * 2 + 2

    def call(self, launch: int, ts_ns: int) -> int:
        """Note the launch call; returns its arrow."""
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
        return self.flow(launch) if start is not None else -self.flow(launch)

    def _start(self, launch: int, ts_ns: int, bound_ns: int) -> None:
        if launch not in self._called and launch not in self._starts:
            _remember(self._starts, launch, (ts_ns, bound_ns))

    def kernel(self, launch: int, ts_ns: int, bound_ns: int) -> Flows:
        """Note a kernel's start, within `bound_ns`; returns the arrow that ends at it."""
        self._start(launch, ts_ns, bound_ns)
        _remember(self._arrows, launch)
        return (self._step(launch),)

    def warps(self, launch: int, ts_ns: int, bound_ns: int) -> Flows | None:
        """Note the first warp of a batch; returns the arrow, if the launch has no kernel slice to end it."""
        if launch in self._arrows:
            return None
        return self.kernel(launch, ts_ns, bound_ns)

    def _step(self, launch: int) -> int:
        """The arrow goes on from its call, or starts here where the call was not recorded before."""
        return self.flow(launch) if launch in self._called else -self.flow(launch)


def _remember(table: dict[int, Any], launch: int, value: Any = None) -> None:
    if len(table) >= REMEMBERED and launch not in table:
        del table[next(iter(table))]
    table[launch] = value
