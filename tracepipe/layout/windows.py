"""Puts events in order over a window, and merges those of several recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tracepipe.event.columns import NONE, SPECIAL, Int32s, TraceColumns, joined
from tracepipe.event.order import in_order
from tracepipe.event.origins import Origins
from tracepipe.event.tables import Tables
from tracepipe.layout.doubles import GONE, SLACK_NS, Doubles

# Events are put in order over this many. A capture writes them out of order by less.
WINDOW_EVENTS = 2048
_EVER_NS = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class _Ready:
    """Events in order. Those before `done` were given out."""

    events: TraceColumns
    done: int = 0


@dataclass(slots=True, eq=False)
class _Source:
    """The events of one source that wait. Others may still come before those in `window`. Those in `ready`
    are in order and wait for the other sources. No more events are expected from before `front_ns`.
    """

    window: list[TraceColumns] = field(default_factory=list)
    ready: list[_Ready] = field(default_factory=list)
    weight: int = 0
    front_ns: int = -_EVER_NS

    def parts(self) -> Iterator[TraceColumns]:
        """All events that wait."""
        yield from self.window
        yield from (one.events for one in self.ready)

    def take_until(self, ts_ns: int) -> list[TraceColumns]:
        """Take the ready events up to a time."""
        taken = []
        for one in self.ready:
            to = int(one.events.ts_ns.searchsorted(ts_ns, "right"))
            if to > one.done:
                taken.append(one.events.take(slice(one.done, to)))
                one.done = to
        self.ready = [one for one in self.ready if one.done < len(one.events)]
        return taken


class Windows:
    """Takes the events of each source in their order, and gives the events of all sources in order. `heavy`
    returns how many events take as much memory as a row that is not an event. `doubles` merges events that
    two sources have; None where no two sources may have the same.
    """

    def __init__(self, tables: Tables, origins: Origins, heavy: Callable[[int], int]) -> None:
        self._tables, self._heavy = tables, heavy
        self._sources = [_Source() for _ in range(origins.count)]
        self.doubles = Doubles(tables, origins) if origins.doubles else None

    def turn(self) -> int | None:
        """The source that the others wait for, which must be read next; None when all have ended."""
        front_ns, at = min((source.front_ns, at) for at, source in enumerate(self._sources))
        return None if front_ns == _EVER_NS else at

    def put(self, events: TraceColumns, weight: int, at: int) -> None:
        """Add events of a source, which take as much memory as `weight` events."""
        source = self._sources[at]
        source.weight += weight
        if len(events):
            source.window.append(events)
        if source.weight >= 2 * WINDOW_EVENTS:
            self._advance(source, at)

    def _advance(self, source: _Source, at: int) -> None:
        """Make all but the newest events of a window ready."""
        whole = in_order(joined(source.window), self._tables)
        end = len(whole) - max(1, len(whole) * WINDOW_EVENTS // source.weight)
        # Events of one time stay together, unless that is all of them: an end of a flow belongs to a slice
        # that begins then.
        end = int(whole.ts_ns.searchsorted(whole.ts_ns[end])) or end
        ready, kept = whole.take(slice(None, end)), whole.take(slice(end, None))
        source.window = [kept]
        source.weight = len(kept) + sum(map(self._heavy, kept.args[kept.shape == SPECIAL].tolist()))
        if len(ready):
            self._make_ready(ready, at)
            source.front_ns = max(source.front_ns, int(ready.ts_ns[-1]))

    def _make_ready(self, events: TraceColumns, at: int) -> None:
        if self.doubles is not None:
            self.doubles.take(events, at)
        self._sources[at].ready.append(_Ready(events))

    def end(self, at: int) -> None:
        """Note that a source has ended."""
        source = self._sources[at]
        if source.window:
            self._make_ready(in_order(joined(source.window), self._tables), at)
        source.window, source.weight, source.front_ns = [], 0, _EVER_NS

    def take(self) -> TraceColumns | None:
        """Take the events that are in order now; None where there are none."""
        first_ns = min(source.front_ns for source in self._sources)
        slack_ns = 0 if self.doubles is None else SLACK_NS
        return self._taken(max(-_EVER_NS, first_ns - slack_ns))

    def take_all(self) -> TraceColumns | None:
        """Take all that is left, in order; None where nothing is."""
        for at, source in enumerate(self._sources):
            if source.front_ns != _EVER_NS:
                self.end(at)
        return self._taken(_EVER_NS)

    def _taken(self, until_ns: int) -> TraceColumns | None:
        if self.doubles is not None:
            self.doubles.decide(until_ns)
        parts = []
        for at, source in enumerate(self._sources):
            for part in source.take_until(until_ns):
                parts.append(part if self.doubles is None else self.doubles.renamed(part, at))
        return in_order(joined(parts), self._tables) if parts else None

    def forget(self) -> None:
        """Make the tables forget what no waiting event has."""
        parts = [part for source in self._sources for part in source.parts()]
        args = [_args_of(part) for part in parts]
        empty = np.empty(0, np.int32)
        to_shapes, to_args = self._tables.keep(
            np.concatenate([empty, *(part.shape for part in parts)]), np.concatenate([empty, *args])
        )
        for part, of in zip(parts, args, strict=True):
            part.args = np.where(part.shape == SPECIAL, part.args, to_args[of]).astype(np.int32)
            part.shape = to_shapes[part.shape]
        if self.doubles is not None:
            self.doubles.forget_shapes()


def _args_of(part: TraceColumns) -> Int32s:
    """The numbers of arguments in a column that has places of `others` too."""
    return np.where((part.shape == SPECIAL) | (part.shape == GONE), NONE, part.args).astype(np.int32)
