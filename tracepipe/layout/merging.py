"""Puts events in order over a window, and merges those of several recordings.

A call, kernel or copy that two recordings have becomes one slice with the arguments of both. Calls of one
name on one thread follow each other, and so do, usually, kernels of one name on a stream. The two that begin
nearest to each other, one of each recording, are the same. XLA names a launch after its kernel, and records
no id of its thread: such a call is the same as a function's call that has that kernel among its arguments, if
all calls near it are of one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, takewhile
from typing import Any, Final

import numpy as np

from tracepipe.event.bounded import put_bounded
from tracepipe.event.columns import NONE, SPECIAL, Ints, TraceColumns, distinct, joined
from tracepipe.event.origins import Origins
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Tables, in_order
from tracepipe.event.vocabulary import IS_FUNCTION, KERNEL, LAUNCHES

MERGED: Final = -3
"""The shape of an event that was merged into another."""
APART_NS: Final = 50_000
"""The begins that two tools record for one event differ by less."""
SLACK_NS: Final = 2 * APART_NS
"""Events are held back this long, so that the events to compare them with are there."""
_BY_KERNEL: Final = "launch of a kernel"
# The most launches whose numbers in another recording are remembered.
_LAUNCHES_MAX: Final = 1 << 16


@dataclass(slots=True, eq=False)
class _One:
    """An event that other recordings may have too, merged with an event of each of those in `stands_for`."""

    ts_ns: int
    source: int
    shape: Shape
    events: TraceColumns
    place: int
    stands_for: tuple[int, ...] = ()

    @property
    def is_gone(self) -> bool:
        """Whether it was merged into another event."""
        return int(self.events.shape[self.place]) == MERGED

    def args(self, tables: Tables) -> dict[str, Any]:
        """Its arguments."""
        return tables.args(int(self.events.args[self.place]))


class Doubles:
    """Finds events that several recordings have, and decides about them when those of all are there."""

    def __init__(self, tables: Tables, origins: Origins) -> None:
        self.count = 0
        """How many events were merged into others."""
        self._tables, self._two, self._files = tables, origins.doubles, origins.files
        self._waiting: dict[tuple[object, ...], dict[int, list[_One]]] = {}
        """By the key that equal events share, and by recording: the events that wait for a decision."""
        self._keys: dict[int, tuple[object, ...] | None] = {}
        self._launches = [OrderedDict[int, int]() for _ in origins.files]
        """By recording: the new numbers of launches that another recording has too."""

    def forget_shapes(self) -> None:
        """Forget all shapes: they have new numbers now."""
        self._keys.clear()

    def _key(self, number: int) -> tuple[object, ...] | None:
        """The key of a shape, which equal events share; None for events that no other recording can have."""
        if number not in self._keys:
            shape, key = self._tables.shapes[number], None
            if shape is not None and shape.on_stream and shape.phase == "X":
                key = shape.type, shape.gpu, shape.stream, shape.name
            elif shape is not None and not shape.on_stream and shape.type == "userspace":
                is_known = shape.phase in ("B", "X") and shape.tid is not None
                key = (shape.type, shape.pid, shape.tid, shape.name) if is_known else None
            self._keys[number] = key
        return self._keys[number]

    def add(self, events: TraceColumns, source: int) -> None:
        """Take events of a recording. They may be changed until `renamed` gives them out."""
        if all(source not in both for both in self._two):
            return
        events.shape, events.args = events.shape.copy(), events.args.copy()
        events.launch = events.launch.copy()
        numbers = distinct(events.shape[events.shape >= 0]).tolist()
        wanted = np.isin(events.shape, [number for number in numbers if self._key(number)])
        for place in np.flatnonzero(wanted).tolist():
            number = int(events.shape[place])
            key, shape = self._key(number), self._tables.shapes[number]
            assert key is not None and shape is not None
            one = _One(int(events.ts_ns[place]), source, shape, events, place)
            self._wait(key, one)
            if shape.type == "userspace":
                # The kernel that a call launches: an argument of a function, or the name that XLA gives it.
                kernel = None
                if shape.phase == "B" and LAUNCHES in shape.name:
                    kernel = one.args(self._tables).get(KERNEL)
                elif shape.phase == "X" and shape.has_launch and not IS_FUNCTION(shape.name):
                    kernel = shape.name
                if isinstance(kernel, str):
                    self._wait((_BY_KERNEL, shape.pid, kernel), one)

    def _wait(self, key: tuple[object, ...], one: _One) -> None:
        self._waiting.setdefault(key, {}).setdefault(one.source, []).append(one)

    def decide(self, until_ns: int) -> None:
        """Decide about the events up to a time. All that begin up to `SLACK_NS` later must be there."""
        for key in list(self._waiting):
            of_key = self._waiting[key]
            if all(ones[0].ts_ns > until_ns for ones in of_key.values()):
                continue
            # An event with a separate end is kept. The others become arguments, with their distance in
            # time.
            in_turn = sorted(of_key, key=lambda at: (of_key[at][0].shape.phase != "B", at))
            for both in combinations(in_turn, 2):
                if both in self._two or both[::-1] in self._two:
                    ones, others = (
                        _near(of_key[at], until_ns + SLACK_NS, other) for at, other in (both, both[::-1])
                    )
                    if key[0] == _BY_KERNEL and not (_are_of_a_thread(ones) and _are_of_a_thread(others)):
                        continue
                    for one, other in _pairs(ones, others):
                        if min(one.ts_ns, other.ts_ns) <= until_ns:
                            self._join(one, other)
            rest = {
                source: left
                for source, ones in of_key.items()
                if (left := [one for one in ones if one.ts_ns > until_ns and not one.is_gone])
            }
            if rest:
                self._waiting[key] = rest
            else:
                del self._waiting[key]

    def _join(self, one: _One, other: _One) -> None:
        """Merge one of two events into the other, unless both have a separate end event."""
        if one.shape.phase == other.shape.phase == "B":
            return
        kept, gone = (other, one) if other.shape.phase == "B" else (one, other)
        events, place, tables = kept.events, kept.place, self._tables
        launch = int(gone.events.launch[gone.place])
        if gone.shape.has_launch and kept.shape.has_launch:
            put_bounded(self._launches[gone.source], launch, int(events.launch[place]), _LAUNCHES_MAX)
        elif gone.shape.has_launch:
            events.launch[place] = launch
            events.shape[place] = tables.number_of(replace(kept.shape, has_launch=True))
        file, args = self._files[gone.source], kept.args(tables)
        for key, value in gone.args(tables).items():
            if args.setdefault(key, value) != value:
                args[f"{key} ({file})"] = value
        args[f"after_ns ({file})"] = gone.ts_ns - kept.ts_ns
        args[f"dur_ns ({file})"] = int(gone.events.dur_ns[gone.place])
        events.args[place] = tables.args_number(args)
        if events.stack is None and gone.events.stack is not None:
            events.stack = np.full(len(events), NONE, np.int64)
        if gone.events.stack is not None and events.stack is not None and events.stack[place] == NONE:
            events.stack[place] = gone.events.stack[gone.place]
        gone.events.shape[gone.place] = MERGED
        kept.stands_for += (gone.source,)
        self.count += 1

    def renamed(self, events: TraceColumns, source: int) -> TraceColumns:
        """Events after the decision, with the launch numbers of all recordings, without merged ones."""
        known = self._launches[source]
        for place in np.flatnonzero((events.launch != 0) & (events.shape >= 0)).tolist() if known else ():
            shape = self._tables.shapes[int(events.shape[place])]
            if shape is not None and shape.has_launch and shape.on_stream:
                launch = int(events.launch[place])
                events.launch[place] = known.get(launch, launch)
        gone = events.shape == MERGED
        return events.take(~gone) if gone.any() else events


def _are_of_a_thread(ones: Sequence[_One]) -> bool:
    """Whether calls are of one thread, where their order distinguishes them."""
    return len({one.shape.tid for one in ones}) < 2


def _near(ones: Sequence[_One], until_ns: int, other: int) -> list[_One]:
    """The events up to a time that are neither merged into others nor with one of the other recording."""
    near = takewhile(lambda one: one.ts_ns <= until_ns, ones)
    return [one for one in near if not one.is_gone and other not in one.stands_for]


def _pairs(ones: Sequence[_One], others: Sequence[_One]) -> list[tuple[_One, _One]]:
    """Pairs of events that begin nearest to each other, in order."""
    pairs = []
    at = to = 0
    while at < len(ones) and to < len(others):
        apart_ns = abs(others[to].ts_ns - ones[at].ts_ns)
        if at + 1 < len(ones) and abs(others[to].ts_ns - ones[at + 1].ts_ns) < apart_ns:
            at += 1
        elif to + 1 < len(others) and abs(others[to + 1].ts_ns - ones[at].ts_ns) < apart_ns:
            to += 1
        else:
            if apart_ns <= APART_NS:
                pairs.append((ones[at], others[to]))
                at, to = at + 1, to + 1
            elif ones[at].ts_ns < others[to].ts_ns:
                at += 1
            else:
                to += 1
    return pairs


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

    def pop_until(self, ts_ns: int) -> list[TraceColumns]:
        """Take the ready events up to a time."""
        taken = []
        for one in self.ready:
            to = int(one.events.ts_ns.searchsorted(ts_ns, "right"))
            if to > one.done:
                taken.append(one.events.take(slice(one.done, to)))
                one.done = to
        self.ready = [one for one in self.ready if one.done < len(one.events)]
        return taken


class EventQueue:
    """Takes the events of each source in their order, and gives the events of all sources in order. `heavy`
    returns how many further events would take as much memory as some rows that are not events. `doubles`
    merges events that two sources have; None where no two sources may have the same.
    """

    def __init__(self, tables: Tables, origins: Origins, heavy: Callable[[Ints], int]) -> None:
        self._tables, self._heavy = tables, heavy
        self._sources = [_Source() for _ in range(origins.count)]
        self.doubles = Doubles(tables, origins) if origins.doubles else None

    def turn(self) -> int | None:
        """The source that the others wait for, which must be read next; None when all have ended."""
        front_ns, at = min((source.front_ns, at) for at, source in enumerate(self._sources))
        return None if front_ns == _EVER_NS else at

    def push(self, events: TraceColumns, weight: int, at: int) -> None:
        """Add events of a source, which take as much memory as `weight` events."""
        source = self._sources[at]
        source.weight += weight
        if len(events):
            source.window.append(events)
        if source.weight >= 2 * WINDOW_EVENTS:
            # All but the newest events of the window are ready.
            whole = in_order(joined(source.window), self._tables)
            end = len(whole) - max(1, len(whole) * WINDOW_EVENTS // source.weight)
            # Events of one time stay together, unless that is all of them: an end of a flow belongs to a
            # slice that begins then.
            end = int(whole.ts_ns.searchsorted(whole.ts_ns[end])) or end
            ready, kept = whole.take(slice(None, end)), whole.take(slice(end, None))
            source.window = [kept]
            source.weight = len(kept) + self._heavy(kept.args[kept.shape == SPECIAL])
            if len(ready):
                self._make_ready(ready, at)
                source.front_ns = max(source.front_ns, int(ready.ts_ns[-1]))

    def _make_ready(self, events: TraceColumns, at: int) -> None:
        if self.doubles is not None:
            self.doubles.add(events, at)
        self._sources[at].ready.append(_Ready(events))

    def end(self, at: int) -> None:
        """Note that a source has ended."""
        source = self._sources[at]
        if source.window:
            self._make_ready(in_order(joined(source.window), self._tables), at)
        source.window, source.weight, source.front_ns = [], 0, _EVER_NS

    def pop(self) -> TraceColumns | None:
        """Take out the events that are in order now; None where there are none."""
        first_ns = min(source.front_ns for source in self._sources)
        slack_ns = 0 if self.doubles is None else SLACK_NS
        return self._pop_until(max(-_EVER_NS, first_ns - slack_ns))

    def pop_all(self) -> TraceColumns | None:
        """Take out all that is left, in order; None where nothing is."""
        for at, source in enumerate(self._sources):
            if source.front_ns != _EVER_NS:
                self.end(at)
        return self._pop_until(_EVER_NS)

    def _pop_until(self, until_ns: int) -> TraceColumns | None:
        if self.doubles is not None:
            self.doubles.decide(until_ns)
        parts = []
        for at, source in enumerate(self._sources):
            for part in source.pop_until(until_ns):
                parts.append(part if self.doubles is None else self.doubles.renamed(part, at))
        return in_order(joined(parts), self._tables) if parts else None

    def forget(self) -> None:
        """Make the tables forget what no waiting event has."""
        parts = [part for source in self._sources for part in source.parts()]
        # A column of arguments has places of `others` too.
        args = [
            np.where((part.shape == SPECIAL) | (part.shape == MERGED), NONE, part.args).astype(np.int32)
            for part in parts
        ]
        empty = np.empty(0, np.int32)
        to_shapes, to_args = self._tables.relieve(
            np.concatenate([empty, *(part.shape for part in parts)]), np.concatenate([empty, *args])
        )
        for part, of in zip(parts, args, strict=True):
            part.args = np.where(part.shape == SPECIAL, part.args, to_args[of]).astype(np.int32)
            part.shape = to_shapes[part.shape]
        if self.doubles is not None:
            self.doubles.forget_shapes()
