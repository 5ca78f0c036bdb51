"""Which calls are open while events are written, so that an end can have the length of its call."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

# Beyond these, the outermost calls of a thread, and the threads that came first, are forgotten.
_DEPTH_MAX = 512
_THREADS_MAX = 1 << 14


@dataclass(slots=True)
class OpenCall:
    """An open call. `depth` is how many calls of its thread are around it. `pending` is what its writer has
    still to write for it.
    """

    name: str
    ts_ns: int
    depth: int
    pending: Any = None


class OpenCalls:
    """The open calls of threads, separately for each layer."""

    def __init__(self) -> None:
        self._stacks: dict[Hashable, list[OpenCall]] = {}

    def begin(self, thread: Hashable, name: str, ts_ns: int) -> OpenCall:
        """Note that a thread enters a call."""
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
        """End a call of a thread, and the calls inside it. Return it, or None where its begin is not
        known.
        """
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
        """Forget all calls after a loss, as their ends may be lost."""
        self._stacks.clear()
