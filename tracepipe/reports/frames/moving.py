"""Reads spans in successive stretches of time: only those that touch a stretch are in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

from tracepipe.event.columns import Bools, Int64s, distinct
from tracepipe.event.model import TIME_LIMIT_NS
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.layers import Layer
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.spans import INSTANT
from tracepipe.reports.frames.stored import ROWS_AT_ONCE, parts, release


@dataclass(frozen=True, slots=True)
class Touching:
    """Spans that touch a stretch of time, clipped to it: their places in `Moving`, and their threads. Shapes
    `(n,)`.
    """

    place: Int64s
    thread: Int64s
    start_ns: Int64s
    end_ns: Int64s

    def take(self, some: Bools) -> Touching:
        """The spans with some indices or flags."""
        return Touching(self.place[some], self.thread[some], self.start_ns[some], self.end_ns[some])


class Moving:
    """The spans of a layer, or of some shapes or rows of it, in successive stretches of time. `thread` has
    the number of the thread of each shape, shape `(shapes,)`.
    """

    def __init__(
        self, layer: Layer, thread: Ints, *, shapes: Bools | None = None, rows: Ints | None = None
    ) -> None:
        self._layer, self._thread, self._shapes, self._rows = layer, thread, shapes, rows
        self._count = len(layer) if rows is None else len(rows)
        self._next = 0
        none = np.empty(0, np.int64)
        self._open = Touching(none, none, none, none)

    @overload
    def _row(self, place: Ints) -> Ints: ...
    @overload
    def _row(self, place: slice | int) -> Ints | slice | int: ...

    def _row(self, place: Ints | slice | int) -> Ints | slice | int:
        """The rows of the layer at some places."""
        return place if self._rows is None else self._rows[place]

    def starts_ns(self) -> Int64s:
        """Some of the starts, with few other starts between two of them. Shape `(n,)`."""
        starts_ns: Int64s = self._layer.start_ns[self._row(np.arange(0, self._count, ROWS_AT_ONCE))]
        return starts_ns

    def last_ns(self) -> int:
        """The last end; without spans, a time before all times."""
        ends_ns, before_ns = self._layer.end_ns, -TIME_LIMIT_NS
        every = parts(self._count)
        return max((int(ends_ns[self._row(part)].max()) for part in every), default=before_ns)

    def within(self, begin_ns: int, end_ns: int) -> Touching:
        """Return the spans that touch a stretch, without instants. The next stretch must begin at
        `end_ns`.
        """
        first, start_ns = self._next, self._layer.start_ns
        last = bisect_left(
            range(self._count), end_ns, first, key=lambda place: int(start_ns[self._row(place)])
        )
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
    """Yield successive stretches of time, from the first span to the last end of the wanted spans; few spans
    start in each.
    """
    last_ns = wanted.last_ns()
    starts_ns = distinct(np.concatenate([one.starts_ns() for one in (wanted, *others)]))
    for begin_ns, end_ns in pairwise([*starts_ns[starts_ns < last_ns].tolist(), last_ns]):
        yield begin_ns, end_ns
        release()
