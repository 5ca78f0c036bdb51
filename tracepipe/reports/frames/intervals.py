"""Stretches of time as sorted columns: their union, the gaps between them, how much of a span they cover."""

from __future__ import annotations

from typing import Any

from tracepipe.reports.frames.libraries import np


class Stretches:
    """The union of half-open stretches [start, end), numpy integers, ns."""

    def __init__(self, start_ns: Any, end_ns: Any) -> None:
        some = end_ns > start_ns
        start_ns, end_ns = start_ns[some], end_ns[some]
        order = np.argsort(start_ns, kind="stable")
        start_ns, end_ns = start_ns[order], np.maximum.accumulate(end_ns[order])
        # A stretch that starts after all before it have ended starts a new one.
        first = np.ones(len(start_ns), bool)
        first[1:] = start_ns[1:] > end_ns[:-1]
        last = np.append(first[1:], True)[: len(first)]
        self.start_ns, self.end_ns = start_ns[first], end_ns[last]
        self._before_ns = np.concatenate(([0], np.cumsum(self.end_ns - self.start_ns)))

    def gaps(self) -> Stretches:
        """The stretches between those of this union."""
        return Stretches(self.end_ns[:-1], self.start_ns[1:])

    def joined(self, other: Stretches) -> Stretches:
        """The union of both."""
        return Stretches(
            np.concatenate((self.start_ns, other.start_ns)), np.concatenate((self.end_ns, other.end_ns))
        )

    def covered_ns(self, start_ns: Any, end_ns: Any) -> Any:
        """How much of each span [start, end) lies in the union."""
        return self._until(end_ns) - self._until(start_ns)

    def _until(self, ts_ns: Any) -> Any:
        """The length of what lies before each time."""
        if not len(self.start_ns):
            return np.zeros(len(ts_ns), np.int64)
        at = np.searchsorted(self.start_ns, ts_ns, "right")
        last = np.maximum(at - 1, 0)
        inside = np.minimum(ts_ns, self.end_ns[last]) - self.start_ns[last]
        return np.where(at == 0, 0, self._before_ns[last] + inside)


def nothing() -> Stretches:
    """No stretch at all."""
    return Stretches(np.zeros(0, np.int64), np.zeros(0, np.int64))
