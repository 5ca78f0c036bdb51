"""Spans in stretches of time, one after the other: what touches a stretch is looked at, and nothing else."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tracepipe.event.columns import Bools, Int64s
from tracepipe.event.model import TIME_LIMIT_NS
from tracepipe.reports.frames.layers import Layer
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.spans import INSTANT
from tracepipe.reports.frames.stored import ROWS_AT_ONCE, parts, release


@dataclass(frozen=True, slots=True)
class Touching:
    """Spans that touch a stretch of time, cut to it: their places among those that are looked at, and their
    threads."""

    place: Int64s
    thread: Int64s
    start_ns: Int64s
    end_ns: Int64s

    def take(self, some: Any) -> Touching:
        """Some of them."""
        return Touching(self.place[some], self.thread[some], self.start_ns[some], self.end_ns[some])


class Moving:
    """The spans of a layer, of some shapes or of some rows, in stretches of time that follow each other.
    `thread` is the number of each shape's.
    """

    def __init__(self, layer: Layer, thread: Any, *, shapes: Bools | None = None, rows: Any = None) -> None:
        self._layer, self._thread, self._shapes, self._rows = layer, thread, shapes, rows
        self._count = len(layer) if rows is None else len(rows)
        self._next = 0
        none = np.empty(0, np.int64)
        self._open = Touching(none, none, none, none)

    def _row(self, place: Any) -> Any:
        """The rows in the layer of some places."""
        return place if self._rows is None else self._rows[place]

    def starts_ns(self) -> Int64s:
        """The starts of some, so that not many start between two of them."""
        starts_ns: Int64s = self._layer.start_ns[self._row(np.arange(0, self._count, ROWS_AT_ONCE))]
        return starts_ns

    def last_ns(self) -> int:
        """The last end, or a time before all of them."""
        ends_ns, before_ns = self._layer.end_ns, -TIME_LIMIT_NS
        every = parts(self._count)
        return max((int(ends_ns[self._row(part)].max()) for part in every), default=before_ns)

    def within(self, begin_ns: int, end_ns: int) -> Touching:
        """Those that lie in a stretch, longer than no time. The next stretch begins where this one ends."""
        first, start_ns = self._next, self._layer.start_ns
        last = bisect_left(range(self._count), end_ns, first, key=lambda place: start_ns[self._row(place)])
        self._next = last
        place = np.arange(first, last)
        rows = self._row(place)
        lasts = (self._layer.end_ns[rows] > start_ns[rows]) & (self._layer.kind[rows] != INSTANT)
        if self._shapes is not None:
            lasts &= self._shapes[self._layer.shape[rows]]
        place, rows = place[lasts], rows[lasts]
        of = self._thread[self._layer.shape[rows]]
        new = Touching(place, of, start_ns[rows], self._layer.end_ns[rows])
        names = ("place", "thread", "start_ns", "end_ns")
        here = Touching(*(np.concatenate((getattr(self._open, name), getattr(new, name))) for name in names))
        self._open = here.take(here.end_ns > end_ns)
        starts_ns, ends_ns = np.maximum(here.start_ns, begin_ns), np.minimum(here.end_ns, end_ns)
        return Touching(here.place, here.thread, starts_ns, ends_ns)


def stretches_of(wanted: Moving, *others: Moving) -> Iterator[tuple[int, int]]:
    """Stretches of time that follow each other, from the first span to the last end of those wanted; in each
    of them few spans start.
    """
    last_ns = wanted.last_ns()
    starts_ns = np.unique(np.concatenate([one.starts_ns() for one in (wanted, *others)]))
    for begin_ns, end_ns in pairwise([*starts_ns[starts_ns < last_ns].tolist(), last_ns]):
        yield begin_ns, end_ns
        release()
