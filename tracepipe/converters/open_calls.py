"""Which calls are open while events are written one after the other: an end has the length of its begin."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

# What is beyond has lost its end: the outermost calls of a thread, and the threads that were met first.
_DEPTH_MAX = 512
_THREADS_MAX = 1 << 14


@dataclass(slots=True)
class OpenCall:
    """A call that has begun, `depth` calls deep in others of its thread. `pending` is what its writer has
    still to write of it.
    """

    name: str
    ts_ns: int
    depth: int
    pending: Any = None


class OpenCalls:
    """The calls that threads are in, those of each layer apart."""

    def __init__(self) -> None:
        self._stacks: dict[Hashable, list[OpenCall]] = {}

    def begin(self, thread: Hashable, name: str, ts_ns: int) -> OpenCall:
        """A thread enters a call."""
        stack = self._stacks.get(thread)
        if stack is None:
            if len(self._stacks) >= _THREADS_MAX:
                del self._stacks[next(iter(self._stacks))]
            stack = self._stacks[thread] = []
        elif len(stack) >= _DEPTH_MAX:
            del stack[0]
        stack.append(call := OpenCall(name, ts_ns, len(stack)))
        return call

    def end(self, thread: Hashable, name: str) -> OpenCall | None:
        """The call that a thread leaves; None where its begin is not known. Those inside it have ended."""
        stack = self._stacks.get(thread, [])
        for place in range(len(stack) - 1, -1, -1):
            if stack[place].name == name:
                call = stack[place]
                del stack[place:]
                if not stack:
                    del self._stacks[thread]
                return call
        return None

    def around(self, thread: Hashable) -> OpenCall | None:
        """The innermost call that a thread is in."""
        stack = self._stacks.get(thread)
        return stack[-1] if stack else None

    def forget(self) -> None:
        """After a loss: what was open may have ended unseen."""
        self._stacks.clear()
