"""The state at the start of a part, as the earlier rows of the recording that describe it.

These are live allocations, the last values of counters, and whether each thread runs or sleeps. Some ten
thousand rows of each kind are kept, the last ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

from tracepipe.event.columns import NONE
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args
from tracepipe.event.vocabulary import ADDRESS_KEYS, MEMORY_IN_USE, RUNNING

_KEPT_MAX: Final = 1 << 15
_OVER: Final = ("dead", "zombie")
_TOTALS: Final = {MEMORY_IN_USE: "total_bytes"}


class State:
    """Takes the events before the part, sorted by time."""

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}
        """By counter, the row of its last value."""
        self._live: dict[Hashable, int] = {}
        """By process and address, the rows of live allocations; also allocations and frees without an
        address.
        """
        self._threads: dict[Hashable, list[int]] = {}
        """The last begin, end and wakeup of each thread that was scheduled."""

    def value(self, shape: Shape, args: Args, row: int) -> None:
        """Take an event that has values of counters."""
        self._put(self._last, (shape.type, shape.pid, shape.gpu, shape.name, *args), row)

    def memory(self, shape: Shape, args: Args, row: int) -> None:
        """Take an event of the layer `memory`."""
        if isinstance(args.get(_TOTALS.get(shape.name, "total_allocated")), int):
            in_use = shape.name == MEMORY_IN_USE
            self._put(self._last, (shape.type, shape.pid, shape.gpu if in_use else None, in_use), row)
        address = next((args[key] for key in ADDRESS_KEYS if isinstance(args.get(key), int | str)), None)
        if shape.name.startswith("alloc") or (address is None and shape.name.startswith("free")):
            self._put(self._live, (shape.pid, row if address is None else str(address)), row)
        elif shape.name.startswith("free"):
            self._live.pop((shape.pid, str(address)), None)

    def switch(self, shape: Shape, args: Args, row: int) -> None:
        """Take a scheduling event of a thread. The rows of a thread that has ended are dropped."""
        if args.get("prev_state") in _OVER:
            self._threads.pop((shape.pid, shape.tid), None)
            return
        thread = self._threads.get((shape.pid, shape.tid))
        if thread is None:
            thread = [NONE, NONE, NONE]
            self._put(self._threads, (shape.pid, shape.tid), thread)
        at = "BE".index(shape.phase) if shape.name == RUNNING else 2
        thread[at] = row
        if at == 0:
            thread[1] = thread[2] = NONE

    def rows(self) -> list[int]:
        """The rows that describe the state."""
        of_threads = [row for thread in self._threads.values() if thread[1] != NONE for row in thread]
        return [*self._last.values(), *self._live.values(), *of_threads]

    @staticmethod
    def _put(kept: dict[Any, Any], key: Hashable, value: object) -> None:
        """Store a value as the newest one; where there are too many, the oldest one is dropped."""
        kept.pop(key, None)
        if len(kept) >= _KEPT_MAX:
            del kept[next(iter(kept))]
        kept[key] = value
