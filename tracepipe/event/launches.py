"""Joins launch calls to kernels and warps by launch id: flows, and the check of cause before effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tracepipe.event.columns import Bytes, Int64s

# This many launches are remembered, then the oldest is forgotten: a capture that lost kernels must not fill
# the memory.
LAUNCHES_MAX: Final = 1 << 16


class Early(NamedTuple):
    """A kernel that started before its call, by more than the clocks' bound."""

    launch: int
    start_ns: int
    bound_ns: int
    call_ns: int


NO_LAUNCH, COUNTED, DRAWN, STARTS = range(4)
"""What is done with a batch of warps. Its launch is unknown, it is only counted, it is drawn, or it is drawn
and a flow may start at it."""


@dataclass(slots=True, eq=False)
class WarpStarts:
    """Batches of warps among events: the place of each there, its launch, the time at which its first warp
    enters, by how much that may be wrong, and what is done with it. `flow` is set to its flow, 0 for none.

    A flow may start only at a warp that is drawn now, with the events around it.
    """

    place: Int64s
    launch: Int64s
    ts_ns: Int64s
    bound_ns: Int64s
    done: Bytes
    flow: Int64s

    def columns(self) -> list[Any]:
        """The columns in the order of the fields."""
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def rows(self) -> Iterator[tuple[int, ...]]:
        """The columns of each batch but `flow`, as rows."""
        return zip(*(column.tolist() for column in self.columns()[:-1]), strict=True)


@dataclass(slots=True)
class _Launch:
    start_ns: int | None = None
    bound_ns: int = 0
    flow: int = 0
    called: bool = False
    drawn: bool = False


class Launches:
    """Calls and kernels come in the order of their times: a kernel that starts before its call comes
    first.
    """

    def __init__(self) -> None:
        self.early: list[Early] = []
        self._launches: dict[int, _Launch] = {}
        self._last_flow = 0

    def _of(self, launch: int) -> _Launch:
        one = self._launches.get(launch)
        if one is None:
            if len(self._launches) >= LAUNCHES_MAX:
                del self._launches[next(iter(self._launches))]
            one = self._launches[launch] = _Launch()
        return one

    def _flow_of(self, one: _Launch) -> int:
        """The flow of a launch: negative at its first use, where it starts, and positive from then on."""
        if one.flow:
            return one.flow
        # Even: the flows of calls through the layers are odd. It is not made from the launch id, which may
        # have 64 bits and may be used again.
        self._last_flow += 2
        one.flow = self._last_flow
        return -one.flow

    def call(self, launch: int, ts_ns: int) -> int:
        """Note a launch call and return its flow. An id that had a call before is a new launch now."""
        one = self._of(launch)
        if one.called:
            one.start_ns, one.drawn, one.flow = None, False, 0
        if one.start_ns is not None and one.start_ns + one.bound_ns < ts_ns:
            self.early.append(Early(launch, one.start_ns, one.bound_ns, ts_ns))
        one.start_ns, one.called = None, True
        return self._flow_of(one)

    def start(self, launch: int, ts_ns: int, bound_ns: int) -> None:
        """Note when a launch's work starts, within `bound_ns`, to compare that with the time of its call."""
        one = self._of(launch)
        if not one.called and one.start_ns is None:
            one.start_ns, one.bound_ns = ts_ns, bound_ns

    def kernel(self, launch: int, ts_ns: int, bound_ns: int) -> int:
        """Note a kernel's start, within `bound_ns`, and return the flow that ends at it."""
        self.start(launch, ts_ns, bound_ns)
        one = self._of(launch)
        one.drawn = True
        return self._flow_of(one)

    def warps(self, launch: int, ts_ns: int, bound_ns: int, done: int) -> int:
        """Note the first warp of a batch and return its flow: 0 if the flow ends at the launch's kernel, or
        if the warps are only counted.
        """
        if done == NO_LAUNCH:
            return 0
        one = self._of(launch)
        if done != COUNTED and one.drawn:
            return 0
        if done == STARTS or (done == DRAWN and one.flow):
            return self.kernel(launch, ts_ns, bound_ns)
        self.start(launch, ts_ns, bound_ns)
        return 0
