"""Gives the stack of a launch call to the work that it launched."""

from __future__ import annotations

import numpy as np

from tracepipe.event.columns import NONE, Bools, Bytes, EventColumns, Int64s
from tracepipe.event.tables import Tables

# A power of two. Ids of launches are consecutive numbers: this many of the last ones have a place each.
PLACES = 1 << 16
_NEITHER, _CALL, _WORK = range(3)


class LaunchStacks:
    """Remembers the stacks of the last launches. In the file, a call comes before its work."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._launches: Int64s = np.zeros(0, np.int64)
        self._stacks: Int64s = np.zeros(0, np.int64)
        """Indexed by the lower bits of a launch's id; empty until the first stack is read."""
        self._rounds = 0
        self._parts: Bytes = np.zeros(0, np.uint8)
        """By the number of a shape: whether its events are a launch's call, its work or neither."""

    def give(self, events: EventColumns) -> None:
        """Set the stacks of the kernels and copies of a batch."""
        if events.stack is None and not len(self._stacks):
            return
        part = np.full(len(events), _NEITHER, np.uint8)
        shaped = events.shape >= 0
        part[shaped] = self._parts_of()[events.shape[shaped]]
        at = np.flatnonzero(part)
        if not len(at):
            return
        if not len(self._stacks):
            self._launches, self._stacks = np.zeros(PLACES, np.int64), np.full(PLACES, NONE, np.int64)
        stack = np.full(len(events), NONE, np.int64) if events.stack is None else events.stack.copy()
        calls = part[at] == _CALL
        found = self._last(events.launch[at], calls, stack[at])
        is_bare = ~calls & (stack[at] == NONE)
        stack[at[is_bare]] = found[is_bare]
        events.stack = stack

    def _last(self, launches: Int64s, calls: Bools, stacks: Int64s) -> Int64s:
        """The stack of the last call with the same id before each event. The last calls are remembered."""
        places = launches & (PLACES - 1)
        order = np.argsort(places, kind="stable")
        launches, calls, stacks, places = launches[order], calls[order], stacks[order], places[order]
        every = np.arange(len(order))
        last = np.maximum.accumulate(np.where(calls, every, NONE))
        is_first = np.diff(places, prepend=NONE) != 0
        last[last < np.maximum.accumulate(np.where(is_first, every, 0))] = NONE
        id = np.where(last == NONE, self._launches[places], launches[last])
        of_last = np.where(last == NONE, self._stacks[places], stacks[last])
        found = np.empty_like(of_last)
        found[order] = np.where(id == launches, of_last, NONE)
        ends = np.append(is_first[1:], True) & (last != NONE)
        self._launches[places[ends]], self._stacks[places[ends]] = id[ends], of_last[ends]
        return found

    def _parts_of(self) -> Bytes:
        tables = self._tables
        if self._rounds != tables.rounds:
            self._rounds, self._parts = tables.rounds, self._parts[:0]
        new = [
            (_WORK if shape.on_stream else _CALL)
            if shape is not None and shape.has_launch and shape.phase != "E"
            else _NEITHER
            for shape in tables.shapes[len(self._parts) :]
        ]
        if new:
            self._parts = np.concatenate([self._parts, np.array(new, np.uint8)])
        return self._parts
