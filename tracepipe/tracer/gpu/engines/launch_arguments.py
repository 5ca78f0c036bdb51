"""Takes the arguments of launch calls from the kernels that they started, as CUPTI reports none for calls.

A call and its kernel have the same number and come in any order, the kernel when it has run. So the event of
a call waits for the kernel for a while.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

WAIT_NS: Final = 1_000_000_000
"""If a kernel is queued or runs for longer, its call has no arguments."""
HELD_MAX: Final = 1 << 14
KNOWN_MAX: Final = 1 << 12
"""Kernels that are remembered for calls that come later, or calls of the other API."""
_OF_ONE_KERNEL: Final = re.compile(r"(?:__)?(?:cu|cuda)Launch(?!HostFunc)")

Event = dict[str, Any]


class LaunchArguments:
    """The launches of a process."""

    __slots__ = ("_held", "_known")

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, list[Event]]] = {}
        """Number of the launch → until when its calls wait, and the calls; in order of arrival."""
        self._known: dict[int, dict[str, Any]] = {}

    def call(self, correlation: int, event: Event, now_ns: int) -> Iterator[Event]:
        """Take a call, and return the events that are complete now."""
        result = event["args"]["result"]
        if result or not _OF_ONE_KERNEL.match(event["name"]):
            yield event
        elif correlation in self._known:
            event["args"] = self._known[correlation]
            yield event
        else:
            if correlation not in self._held and len(self._held) >= HELD_MAX:
                yield from self._held.pop(next(iter(self._held)))[1]
            self._held.setdefault(correlation, (now_ns + WAIT_NS, []))[1].append(event)

    def kernel(self, correlation: int, args: dict[str, Any]) -> list[Event]:
        """Take a kernel with its launch's arguments, and return the calls that are complete now."""
        if len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[correlation] = args
        _, calls = self._held.pop(correlation, (0, []))
        for call in calls:
            call["args"] = args
        return calls

    def late(self, now_ns: int | None = None) -> list[Event]:
        """The calls that have waited long enough, or all; they have no arguments."""
        late: list[Event] = []
        while self._held:
            correlation, (until_ns, calls) = next(iter(self._held.items()))
            if now_ns is not None and now_ns < until_ns:
                break
            late += calls
            del self._held[correlation]
        return late
