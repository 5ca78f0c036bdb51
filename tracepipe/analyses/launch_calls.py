"""Finds the call that launched a piece of the GPU's work, by the launch id that both have."""

from __future__ import annotations

import numpy as np

from tracepipe.event.columns import NONE, Int64s, Ints
from tracepipe.store.run import Layer, Run


class LaunchCalls:
    """The calls of a recording that have a launch id.

    An id may recur: its last call before the work counts, or the first one after it, where clocks are wrong.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        found = run.store.columns(
            """select id, launch, start_ns from store.userspace x join store.shapes s using (shape)
            where s.has_launch and x.kind <> 2 order by launch, id"""
        )
        self._ids, self._rows, self._starts_ns = found["launch"], found["id"], found["start_ns"]

    def work(self, name: str) -> tuple[Layer, Int64s]:
        """A layer of work, and its rows that have a launch id and a length; of copies, only those on a
        GPU."""
        work, shapes = self._run.layer(name), self._run.shapes
        every = np.arange(len(shapes), dtype=np.int32)
        flags = shapes.has_launch(every)
        if name == "transfer":
            flags = flags & (shapes.column("gpu", every) != NONE)
        return work, np.flatnonzero(flags[work.shape] & work.has_length)

    def find(self, work: Layer, rows: Int64s) -> Int64s:
        """For each of some rows of work, the row of the call that launched it, NONE where none was recorded.
        Shapes `(n,)`.
        """
        launches = np.zeros(len(rows), np.int64) if work.launch is None else work.launch[rows]
        return self.last_before(launches, work.start_ns[rows])

    def last_before(self, ids: Ints, starts_ns: Int64s) -> Int64s:
        """Like `find`, for work with these launch ids and start times. Shapes `(n,)`."""
        low, end = np.searchsorted(self._ids, ids), np.searchsorted(self._ids, ids, "right")
        first, high = low.copy(), end.copy()
        # How many calls of the id are not after the work: a binary search for all ids in parallel.
        while len(open_ := np.flatnonzero(low < high)):
            middle = (low[open_] + high[open_]) // 2
            is_before = self._starts_ns[middle] <= starts_ns[open_]
            low[open_] = np.where(is_before, middle + 1, low[open_])
            high[open_] = np.where(is_before, high[open_], middle)
        at = np.where(low > first, low - 1, low)
        found: Int64s = np.full(len(ids), NONE, np.int64)
        found[first < end] = self._rows[at[first < end]]
        return found
