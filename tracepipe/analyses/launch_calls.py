"""Finds the call that launched a piece of the GPU's work, by the launch id that both have."""

from __future__ import annotations

from collections.abc import Iterator

from tracepipe.event.columns import NONE, Int64s
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import Growing, parts, taken
from tracepipe.store.run import Layer, Run


class LaunchCalls:
    """The calls of a recording that have a launch id.

    An id may recur: its last call before the work counts, or the first one after it, where clocks are wrong.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        calls = run.layer("userspace")
        self._has_launch = run.shapes.has_launch(np.arange(len(run.shapes), dtype=np.int32))
        ids, rows = Growing(np.int64), Growing(np.int32)
        is_call = calls.is_call
        for part in parts(len(calls)):
            has = self._has_launch[calls.shape[part]] & is_call[part]
            some = np.flatnonzero(has) + part.start
            ids.extend(_launches(calls, some), len(some))
            rows.extend(some, len(some))
        self._starts_ns = calls.start_ns
        # Rows are sorted by start, and a stable sort keeps this order among equal ids.
        order = np.argsort(ids.whole(), kind="stable")
        self._ids, self._rows = taken(ids.whole(), order), taken(rows.whole(), order)

    def work(self, name: str) -> Iterator[tuple[Layer, Int64s]]:
        """Yield the rows of a layer that have a launch id and a length, a part at a time; of copies, only
        those on a GPU.
        """
        work, shapes = self._run.layer(name), self._has_launch
        if name == "transfer":
            every = np.arange(len(shapes), dtype=np.int32)
            shapes = shapes & (self._run.shapes.column("gpu", every) != NONE)
        has_length = work.has_length
        for part in parts(len(work)):
            yield work, np.flatnonzero(shapes[work.shape[part]] & has_length[part]) + part.start

    def find(self, work: Layer, rows: Int64s) -> Int64s:
        """For each of some rows of work, the row of the call that launched it, NONE where none was recorded.
        Shapes `(n,)`.
        """
        return self.last_before(_launches(work, rows), work.start_ns[rows])

    def last_before(self, ids: Ints, starts_ns: Int64s) -> Int64s:
        """Like `find`, for work with these launch ids and start times. Shapes `(n,)`."""
        low, end = np.searchsorted(self._ids, ids), np.searchsorted(self._ids, ids, "right")
        first, high = low.copy(), end.copy()
        # How many calls of the id are not after the work: a binary search for all ids in parallel.
        while len(open_ := np.flatnonzero(low < high)):
            middle = (low[open_] + high[open_]) // 2
            is_before = self._starts_ns[self._rows[middle]] <= starts_ns[open_]
            low[open_] = np.where(is_before, middle + 1, low[open_])
            high[open_] = np.where(is_before, high[open_], middle)
        at = np.where(low > first, low - 1, low)
        found: Int64s = np.full(len(ids), NONE, np.int64)
        found[first < end] = self._rows[at[first < end]]
        return found


def _launches(layer: Layer, rows: Int64s) -> Int64s:
    """The launch ids of rows that have one. Shapes `(n,)`."""
    return np.zeros(len(rows), np.int64) if layer.launch is None else layer.launch[rows]
