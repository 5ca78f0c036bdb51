"""Clock pairs, and maps of clocks through them, which turn source time into trace time.

A source clock is related to the host's by pairs (source, host, uncertainty). Between two pairs, the map is
the straight line through both. Before the first and after the last, it continues with the overall rate. Every
map states a bound: how far a placed time may be from the true one.

The true time is within a pair's interval, and a clock runs at a nearly constant rate. So each interval is
narrowed to the part that the clock can reach from the intervals of other pairs. Pairs that contradict the
others are left out. There may be many pairs, so they are columns, which are read a part at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from tracepipe.errors import ClockError
from tracepipe.event.columns import AnyArray, Bools, Int32s, Int64s, Ints
from tracepipe.event.model import TIME_LIMIT_NS, SourceNs, TraceNs

# Between and outside its pairs, a clock may change its rate by this much (with temperature) without being
# noticed.
WANDER_PPM = 1
# A rate that is measured less precisely than this is taken as 1. Crystals stay within 100 ppm.
CRYSTAL_PPM = 100
# Two pairs closer than this many times their uncertainties would bend durations by over 0.1%.
SPAN_PER_UNCERTAINTY = 1000
# A larger jump from one pair to the next is not drift: the clock was set.
JUMP_PPM = 1000
# The rate of a clock at a place is measured over this many pairs on each side, over which it changes by
# WANDER_PPM.
NEIGHBOURS = 16
_BILLION = 1_000_000_000
# This many pairs are processed at a time, which takes a MB.
PART = 1 << 13
# The sum of two numbers below this is within 64 bits.
_HALF = 1 << 62


class ClockPair(NamedTuple):
    """One instant on two clocks: source, and the middle and half width of the host's interval, ns."""

    source_ns: int
    host_ns: int
    uncertainty_ns: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> ClockPair:
        """The pair of a `clock` record."""
        low, high = record["host_lo_ns"], record["host_hi_ns"]
        return cls(record["source_ns"], (low + high) // 2, (high - low + 1) // 2)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Pairs of one clock in columns."""

    source_ns: Int64s
    host_ns: Int64s
    uncertainty_ns: Int64s

    @classmethod
    def of(cls, pairs: Iterable[ClockPair]) -> Pairs:
        """The columns of some pairs."""
        return cls(*np.array([*pairs], np.int64).reshape(-1, 3).T.copy())

    def __len__(self) -> int:
        return len(self.source_ns)

    def __getitem__(self, at: int) -> ClockPair:
        return ClockPair(int(self.source_ns[at]), int(self.host_ns[at]), int(self.uncertainty_ns[at]))

    def take(self, places: Ints | slice | array[int]) -> Pairs:
        """The pairs of some places, in that order."""
        return Pairs(self.source_ns[places], self.host_ns[places], self.uncertainty_ns[places])

    def in_order(self) -> Pairs:
        """The pairs in the order of the source clock; those with the same reading keep their order."""
        if bool((self.source_ns[1:] >= self.source_ns[:-1]).all()):
            return self
        return self.take(np.argsort(self.source_ns, kind="stable"))

    def parts(self) -> Iterator[Pairs]:
        """The pairs, `PART` of them at a time."""
        for start in range(0, len(self), PART):
            yield self.take(slice(start, start + PART))


class GrowingPairs:
    """Pairs of one clock that grow in number, 24 bytes each."""

    def __init__(self, pairs: Pairs | None = None) -> None:
        columns = (pairs.source_ns, pairs.host_ns, pairs.uncertainty_ns) if pairs else ((), (), ())
        self._columns = [array("q", column) for column in columns]

    def __len__(self) -> int:
        return len(self._columns[0])

    def append(self, pair: ClockPair) -> None:
        """Add a pair."""
        for column, number in zip(self._columns, pair, strict=True):
            column.append(number)

    def columns(self) -> Pairs:
        """The pairs so far. No more can be added while these columns are in use."""
        source_ns, host_ns, uncertainty_ns = (np.frombuffer(column, np.int64) for column in self._columns)
        return Pairs(source_ns, host_ns, uncertainty_ns)


def most(column: AnyArray | int) -> int:
    """The largest absolute value of a column or number."""
    if isinstance(column, int):
        return abs(column)
    return max(abs(int(column.min())), abs(int(column.max()))) if len(column) else 0


def scaled(column: AnyArray, by: AnyArray | int, per: AnyArray | int) -> AnyArray:
    """`column * by // per`, exact for all sizes: in Python integers where 64 bits are not enough."""
    if most(column) * most(by) < _HALF:
        return column * by // per
    exact = column.astype(object) * by // per
    return exact.astype(np.int64) if most(exact) < _HALF else exact


def _steps(pairs: Pairs, start: int, stop: int) -> tuple[Any, Any]:
    """The least and the most that the host's clock advances from each pair to the next."""
    at = np.arange(start, stop)
    a, b = np.maximum(0, at + 1 - NEIGHBOURS), np.minimum(len(pairs) - 1, at + NEIGHBOURS)
    source_ns, host_ns, uncertainty_ns = pairs.source_ns, pairs.host_ns, pairs.uncertainty_ns
    span_ns, noise_ns = source_ns[b] - source_ns[a], uncertainty_ns[a] + uncertainty_ns[b] + 1
    gain_ns: Any = host_ns[b] - host_ns[a] - span_ns
    if most(gain_ns) + most(noise_ns) >= _HALF:
        gain_ns = gain_ns.astype(object)
    wander, slowest, fastest = WANDER_PPM * 1_000, -CRYSTAL_PPM * 1_000, CRYSTAL_PPM * 1_000
    per_ns = np.maximum(1, span_ns)
    low = np.maximum(slowest, scaled(gain_ns - noise_ns, _BILLION, per_ns) - wander)
    high = np.minimum(fastest, -scaled(-gain_ns - noise_ns, _BILLION, per_ns) + wander)
    low, high = np.where(span_ns > 0, low, slowest), np.where(span_ns > 0, high, fastest)
    step_ns = source_ns[start + 1 : stop + 1] - source_ns[start:stop]
    least_ns, most_ns = step_ns + scaled(step_ns, low, _BILLION), step_ns - scaled(-step_ns, high, _BILLION)
    return least_ns.tolist(), most_ns.tolist()


def _reach_from_before(pairs: Pairs, are_joined: Bools) -> tuple[Int64s, Int64s, Bools]:
    """The ends of the part of each interval that the clock can reach from those before, or of all of it where
    there is no such part; and which steps are not near a step that is impossible for the clock. `are_joined`
    is whether the clock can get from one pair to the next.
    """
    steps, possible = len(are_joined), np.ones_like(are_joined)
    # A reading is an integer: the clock may have reached it up to 1 ns before.
    low_ns, high_ns = pairs.host_ns - pairs.uncertainty_ns - 1, pairs.host_ns + pairs.uncertainty_ns
    from_ns, to_ns = int(low_ns[0]), int(high_ns[0])
    for start in range(0, steps, PART):
        stop = min(start + PART, steps)
        part = slice(start + 1, stop + 1)
        lows_ns, highs_ns = low_ns[part].tolist(), high_ns[part].tolist()
        joined = are_joined[start:stop].tolist()
        rows = zip(lows_ns, highs_ns, *_steps(pairs, start, stop), joined, strict=True)
        for at, (least_ns, most_ns, least_step_ns, most_step_ns, is_joined) in enumerate(rows):
            from_ns, to_ns = from_ns + least_step_ns, to_ns + most_step_ns
            if from_ns > most_ns or to_ns < least_ns:
                possible[max(0, start + at - NEIGHBOURS) : start + at + NEIGHBOURS + 1] = False
            from_ns, to_ns = max(least_ns, from_ns), min(most_ns, to_ns)
            if not is_joined or from_ns > to_ns:
                from_ns, to_ns = least_ns, most_ns
            lows_ns[at], highs_ns[at] = from_ns, to_ns
        low_ns[part], high_ns[part] = lows_ns, highs_ns
    return low_ns, high_ns, possible


def cut(pairs: Pairs) -> Pairs:
    """Pairs in source order, with intervals that are narrowed by the other pairs.

    From the interval of one pair, the clock reaches the next only at possible rates. This is correct as long
    as the rate changes by no more than WANDER_PPM over NEIGHBOURS on both sides. If a pair cannot be reached,
    the rate has changed more, or the pair is wrong: around it, nothing is narrowed.
    """
    low_ns, high_ns, are_joined = _reach_from_before(pairs, np.ones(len(pairs) - 1, np.bool_))
    if not are_joined.all():
        low_ns, high_ns, _ = _reach_from_before(pairs, are_joined)
    # What is left of each interval is narrowed to the part that can be reached from those after.
    least_ns, most_ns = int(low_ns[-1]), int(high_ns[-1])
    for start in reversed(range(0, len(are_joined), PART)):
        part = slice(start, min(start + PART, len(are_joined)))
        lows_ns, highs_ns, joined = (column[part].tolist() for column in (low_ns, high_ns, are_joined))
        least_steps_ns, most_steps_ns = _steps(pairs, part.start, part.stop)
        for at in reversed(range(len(joined))):
            before = lows_ns[at], highs_ns[at]
            least_ns, most_ns = least_ns - most_steps_ns[at], most_ns - least_steps_ns[at]
            least_ns, most_ns = max(before[0], least_ns), min(before[1], most_ns)
            if not joined[at] or least_ns > most_ns:
                least_ns, most_ns = before
            lows_ns[at], highs_ns[at] = least_ns, most_ns
        low_ns[part], high_ns[part] = lows_ns, highs_ns
    high_ns += 1
    for start in range(0, len(pairs), PART):
        part = slice(start, start + PART)
        own_ns, uncertainty_ns = pairs.host_ns[part], pairs.uncertainty_ns[part]
        lows_ns = np.maximum(low_ns[part], own_ns - uncertainty_ns)
        highs_ns = np.minimum(high_ns[part], own_ns + uncertainty_ns)
        low_ns[part] = (lows_ns + highs_ns) // 2
        high_ns[part] = highs_ns - low_ns[part]
    return Pairs(pairs.source_ns, low_ns, high_ns)


def consistent(pairs: Pairs) -> Pairs:
    """Pairs in source order, without those too close to a better one and those that jump against the rest."""
    # The numbers of these views are quickly read one by one, as Python integers.
    sources_ns, hosts_ns = pairs.source_ns.data, pairs.host_ns.data
    uncertainties_ns = pairs.uncertainty_ns.data
    kept, count = np.empty(len(pairs), np.int64), 0
    places = kept.data
    for at in range(len(pairs)):
        source_ns, host_ns, uncertainty_ns = sources_ns[at], hosts_ns[at], uncertainties_ns[at]
        while count:
            last = places[count - 1]
            length_ns, went_ns = source_ns - sources_ns[last], host_ns - hosts_ns[last]
            noise_ns = uncertainty_ns + uncertainties_ns[last] + 1
            jumps = abs(went_ns - length_ns) > noise_ns + length_ns * JUMP_PPM // 1_000_000
            if length_ns >= SPAN_PER_UNCERTAINTY * noise_ns and not jumps:
                break
            if uncertainty_ns >= uncertainties_ns[last] or (jumps and count > 1):
                at = -1
                break
            count -= 1
        if at >= 0:
            places[count] = at
            count += 1
    return pairs if count == len(pairs) else pairs.take(kept[:count])


def _off_line_ns(pairs: Pairs, a: Ints, b: Ints, c: Ints) -> AnyArray:
    """The distances of the pairs at `b` from the lines through those at `a` and `c`; 0 where uncertainties
    explain them and, where `b` is not between the others, a change of the rate.
    """
    source_ns, host_ns, uncertainty_ns = pairs.source_ns, pairs.host_ns, pairs.uncertainty_ns
    from_ns, span_ns = source_ns[b] - source_ns[a], source_ns[c] - source_ns[a]
    beyond_ns = np.maximum(0, np.maximum(-from_ns, from_ns - span_ns))
    gain_ns = host_ns[c] - host_ns[a] - span_ns
    line_ns = host_ns[a] + from_ns + scaled(from_ns, gain_ns, span_ns)
    open_ns = np.maximum(uncertainty_ns[a], uncertainty_ns[c])
    for at in np.flatnonzero(beyond_ns).tolist():  # at the ends alone
        open_at, span_at, beyond_at = (int(column[at]) for column in (open_ns, span_ns, beyond_ns))
        rate = 2 * open_at * 1_000_000 + WANDER_PPM * span_at
        open_ns[at] -= -beyond_at * rate // (span_at * 1_000_000)
    # Readings and the line are rounded to integers: 2 ns.
    explained_ns = uncertainty_ns[b] + open_ns + 2
    off_ns = np.abs(host_ns[b] - line_ns)
    return np.where(off_ns > explained_ns, off_ns + explained_ns, 0)


def bends_ns(pairs: Pairs, start: int, stop: int) -> AnyArray:
    """The error that a bend of the clock may add around each of the pairs `start` to `stop`, in ns.

    The two neighbours of a pair show it. The first and the last pair are compared with the two next to them,
    as a pair at the end may be wrong.
    """
    last = len(pairs) - 1
    at = np.arange(start, stop)
    if last < 2:
        return np.zeros(len(at), np.int64)
    before = np.where(at == 0, 1, np.where(at == last, last - 2, at - 1))
    after = np.where(at == 0, 2, np.where(at == last, last - 1, at + 1))
    return _off_line_ns(pairs, before, at, after)


def jumps_ns(a: Pairs, b: Pairs) -> AnyArray:
    """The error of each of `a` and its successor in `b` where no clock can get from one to the other, else
    0.
    """
    length_ns, noise_ns = b.source_ns - a.source_ns, a.uncertainty_ns + b.uncertainty_ns + 1
    gain_ns = np.abs(b.host_ns - a.host_ns - length_ns)
    crystal_ns = scaled(length_ns, CRYSTAL_PPM, 1_000_000)
    return np.where(gain_ns > crystal_ns + noise_ns, gain_ns + crystal_ns, 0)


# The most pairs that are kept, of all clocks together. A pair takes some 64 bytes while it is fitted, then
# 24.
PAIRS_MAX = 1 << 17
# A machine has some GPUs with a clock each, but a file may name any number of clocks.
CLOCKS_MAX = 1 << 10


def thinned(pairs: Pairs) -> Pairs:
    """Half of some pairs, or up to three quarters where their distances differ much. Those closest to others
    are left out. Before that, the intervals of those that stay are narrowed by them.
    """
    pairs = cut(pairs.in_order())
    span_ns, count = int(pairs.source_ns[-1] - pairs.source_ns[0]), len(pairs)
    places = _spaced(pairs, 2 * span_ns // count)
    if len(places) > count * 3 // 4:
        places = _spaced(pairs, 4 * span_ns // count + 1)
    return pairs.take(places)


def _spaced(pairs: Pairs, spacing_ns: int) -> array[int]:
    """The places of the first pair, the last, and those between that are needed so that no two are more than
    `spacing_ns` apart. Of three consecutive ones, the outer two are further apart than that.
    """
    sources_ns = pairs.source_ns.data
    places = array("q", [0])
    last_ns = sources_ns[0]
    for at in range(1, len(pairs) - 1):
        if sources_ns[at + 1] - last_ns > spacing_ns:
            places.append(at)
            last_ns = sources_ns[at]
    places.append(len(pairs) - 1)
    return places


# The readings of `start` in a header are taken within this time.
SNAPSHOT_NS = 1000
_MILLION = 1_000_000


class Method(str, Enum):
    """How the times of a clock are put on the trace's clock."""

    SAME = "same"
    OFFSET = "offset"
    FIT = "fit"
    ASSUMED = "assumed"
    LAUNCHES = "launches"


@dataclass(frozen=True, slots=True, eq=False)
class ClockMap:
    """The map of one source clock.

    `source_ns` and `trace_ns` are the points between which it is straight, of the shape `(points,)`; a point
    takes 24 bytes with its bounds. There is a segment before each point and one after the last.
    `from_bound_ns` has the bound at the begin of each segment, or at the end of the first one; `to_bound_ns`
    has the bounds at the ends of those between two points. Of the pairs that were compared with it, `dropped`
    contradicted it, and `pairs` did not.
    """

    clock: str
    method: Method
    source_ns: Int64s
    trace_ns: Int64s
    from_bound_ns: Int64s | Int32s
    to_bound_ns: Int64s | Int32s
    rate: tuple[int, int] = (1, 1)
    """The rate of the host's clock per tick of this one, as a fraction, before the first point and after the
    last."""
    bound_ppm: tuple[int, int] = (0, 0)
    """What each ns of distance adds to the bound there, in millionths of a ns."""
    pairs: int = 0
    dropped: int = 0

    def place(self, source_ns: SourceNs) -> TraceNs:
        """The trace time of a source time."""
        return TraceNs(int(self.place_all(np.array([source_ns], np.int64))[0]))

    def place_all(self, source_ns: Int64s) -> Int64s:
        """The trace times of a column of source times, limited to the times that a trace can have."""
        if not len(source_ns):
            return source_ns
        at, to, length_ns = self._points(source_ns)
        from_ns, trace_ns = source_ns - self.source_ns[at], self.trace_ns[at]
        rate_num, rate_den = self.rate
        gain = np.where(length_ns > 0, self.trace_ns[to] - trace_ns - length_ns, rate_num - rate_den)
        more_ns: Any = (
            scaled(from_ns, gain, np.where(length_ns > 0, length_ns, rate_den)) if gain.any() else 0
        )
        if most(trace_ns) + most(from_ns) + most(more_ns) >= 1 << 62:
            exact = trace_ns.astype(object) + from_ns + more_ns
            limited_ns: Int64s = np.clip(exact, -TIME_LIMIT_NS, TIME_LIMIT_NS).astype(np.int64)
            return limited_ns
        placed_ns: Int64s = trace_ns + from_ns + more_ns
        return placed_ns

    def _points(self, source_ns: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """For each time the point from which it is placed, the next point, and the distance of the time.
        Before the first point and after the last, both points are the same.
        """
        after = self.source_ns.searchsorted(source_ns, "right")
        at, to = np.maximum(0, after - 1), np.minimum(after, len(self.source_ns) - 1)
        return at, to, self.source_ns[to] - self.source_ns[at]

    def bound_at(self, source_ns: int) -> int:
        """The bound of the error of `place(source_ns)`, ns."""
        return int(self.bounds_at(np.array([source_ns], np.int64))[0])

    def bounds_at(self, source_ns: Int64s) -> Int64s:
        """The bounds of a column of source times, of the same shape, limited to the times that a trace can
        have.

        Between two points it is the farthest that a clock can be from the line: its rate changes just there.
        """
        if not len(source_ns):
            return source_ns
        at, _, length_ns = self._points(source_ns)
        is_before = source_ns < self.source_ns[0]
        bound_ns, end_ns = self.from_bound_ns[at + ~is_before], self.to_bound_ns[at + ~is_before]
        away_ns = np.abs(source_ns - self.source_ns[at])
        inside_ns = np.where(length_ns > 0, away_ns, 0)
        rest_ns, longest_ns = length_ns - inside_ns, most(length_ns)
        widest_ns = most(bound_ns) + most(end_ns) + _MILLION + longest_ns // _MILLION
        if max(widest_ns * longest_ns, most(away_ns) * max(self.bound_ppm)) >= 1 << 62:
            columns = (bound_ns, end_ns, away_ns, inside_ns, rest_ns)
            bound_ns, end_ns, away_ns, inside_ns, rest_ns = (one.astype(object) for one in columns)
        # The product of two distances exceeds 64 bits after some seconds.
        wander = inside_ns // _MILLION * rest_ns + inside_ns % _MILLION * rest_ns // _MILLION
        line_ns = -(-(bound_ns * rest_ns + end_ns * inside_ns + wander) // np.maximum(1, length_ns))
        outside_ns = bound_ns - (-away_ns * np.where(is_before, *self.bound_ppm) // _MILLION)
        bounds_ns: AnyArray = np.minimum(np.where(length_ns > 0, line_ns, outside_ns), TIME_LIMIT_NS)
        return bounds_ns.astype(np.int64, copy=False)

    def allowing(self, pairs: Pairs) -> ClockMap:
        """The map with wider bounds where `pairs` contradict it, as it may be wrong there."""
        from_ns, to_ns = self.from_bound_ns.astype(np.int64), self.to_bound_ns.astype(np.int64)
        dropped = 0
        for part in pairs.parts():
            off_ns = np.abs(self.place_all(part.source_ns) - part.host_ns)
            wrong = off_ns > self.bounds_at(part.source_ns) + part.uncertainty_ns + 2
            dropped += int(wrong.sum())
            bounds_ns = np.minimum(off_ns[wrong], TIME_LIMIT_NS) + part.uncertainty_ns[wrong]
            segments = self.source_ns.searchsorted(part.source_ns[wrong], "right")
            for column in (from_ns, to_ns):
                np.maximum.at(column, segments, np.minimum(bounds_ns, TIME_LIMIT_NS))
        if len(self.source_ns) == 1:  # the bound is the same before and after it
            from_ns[:] = from_ns.max()
        return replace(
            self,
            from_bound_ns=_narrow(from_ns),
            to_bound_ns=_narrow(to_ns),
            pairs=self.pairs + len(pairs) - dropped,
            dropped=self.dropped + dropped,
        )

    @property
    def drift_ppm(self) -> float | None:
        """The rate by which the source clock is slower than the trace clock, in ppm; None if not known."""
        rate_num, rate_den = self.rate
        if self.bound_ppm[0] >= CRYSTAL_PPM and rate_num == rate_den:
            return None
        return (rate_num / rate_den - 1) * 1e6


def offset_map(clock: str, method: Method, offset_ns: int, bound_ns: int) -> ClockMap:
    point, bounds_ns = np.zeros(1, np.int64), np.full(2, bound_ns, np.int64)
    return ClockMap(clock, method, point, point + offset_ns, bounds_ns, bounds_ns)


def _narrow(bounds_ns: Int64s | Int32s) -> Int64s | Int32s:
    """The same bounds in half the memory, where none of them is over 2 s."""
    return bounds_ns.astype(np.int32) if most(bounds_ns) < 1 << 31 else bounds_ns


def fit(clock: str, pairs: Pairs) -> ClockMap:
    """The map through `pairs`, with bounds that allow for all of them. Raises ClockError without any."""
    return _through(clock, pairs).allowing(pairs)


def _through(clock: str, pairs: Pairs) -> ClockMap:
    """The piecewise-linear map through pairs of a clock. Raises ClockError without any.

    The bounds are true if the rate changes by no more than WANDER_PPM beyond what the pairs show. Between two
    pairs, the bound is the uncertainties of both, with such a change between them, plus the bend that the
    neighbours show. Outside, it is the uncertainty of the last pair, plus the distance times the uncertainty
    of the overall rate.
    """
    if not len(pairs):
        raise ClockError(f"clock {clock} has no clock pairs", f"Place it with --assume-offset {clock}=NS.")
    kept = consistent(cut(pairs.in_order()))
    rate, bound_ppm = _outside(kept)
    return ClockMap(clock, Method.FIT, kept.source_ns, kept.host_ns, *_bounds(kept), rate, bound_ppm)


def fit_all(records: Iterable[Mapping[str, Any]]) -> dict[str, ClockMap]:
    """The maps of the first `CLOCKS_MAX` clocks that `clock` records name. Where there are more pairs than
    are kept, `records` is read twice.
    """
    growing: dict[str, GrowingPairs] = {}
    kept, is_thinned = 0, False
    for record in records:
        if record["clock"] not in growing and len(growing) == CLOCKS_MAX:
            continue
        growing.setdefault(record["clock"], GrowingPairs()).append(ClockPair.of(record))
        kept += 1
        if kept >= PAIRS_MAX:
            clock, longest = max(growing.items(), key=lambda one: len(one[1]))
            growing[clock] = fewer = GrowingPairs(thinned(longest.columns()))
            kept -= len(longest) - len(fewer)
            is_thinned = True
    # Each clock's pairs are given up when it is fitted.
    clocks = (growing.popitem() for _ in range(len(growing)))
    if not is_thinned:
        return {clock: fit(clock, pairs.columns()) for clock, pairs in clocks}
    maps = {clock: _through(clock, pairs.columns()) for clock, pairs in clocks}
    all_pairs = ((one["clock"], ClockPair.of(one)) for one in records if one["clock"] in maps)
    while some := list(islice(all_pairs, PART)):
        by_clock: dict[str, list[ClockPair]] = {}
        for clock, pair in some:
            by_clock.setdefault(clock, []).append(pair)
        for clock, own in by_clock.items():
            maps[clock] = maps[clock].allowing(Pairs.of(own))
    return maps


def _bounds(kept: Pairs) -> tuple[Int64s, Int64s]:
    """The bounds at the begins and at the ends of segments, as a `ClockMap` has them."""
    count = len(kept)
    from_ns, to_ns = (np.full(count + 1, int(kept.uncertainty_ns[0]) + 1, np.int64) for _ in range(2))
    for start in range(0, count - 1, PART):
        stop = min(start + PART, count - 1)
        here, there = kept.take(slice(start, stop)), kept.take(slice(start + 1, stop + 1))
        bends = bends_ns(kept, start, stop + 1)
        more_ns = 1 + np.maximum(np.maximum(bends[:-1], bends[1:]), jumps_ns(here, there))
        from_ns[start + 1 : stop + 1] = np.minimum(here.uncertainty_ns + more_ns, TIME_LIMIT_NS)
        to_ns[start + 1 : stop + 1] = np.minimum(there.uncertainty_ns + more_ns, TIME_LIMIT_NS)
    if count > 1:
        from_ns[0], from_ns[-1] = from_ns[1], to_ns[-2]
    return from_ns, to_ns


def _outside(kept: Pairs) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rate before the first pair and after the last, and by how much it may be wrong there, in ppm."""
    first, last = kept[0], kept[-1]
    span_ns = last.source_ns - first.source_ns
    noise_ns = first.uncertainty_ns + last.uncertainty_ns + 1
    measured_ppm = -(-noise_ns * _MILLION // span_ns) + WANDER_PPM if span_ns else CRYSTAL_PPM
    if measured_ppm >= CRYSTAL_PPM:
        return (1, 1), (CRYSTAL_PPM, CRYSTAL_PPM)
    # If no crystal has that rate, one of the two pairs is wrong.
    jump_ns = int(jumps_ns(kept.take(slice(0, 1)), kept.take(slice(-1, None)))[0])
    measured_ppm += -(-jump_ns * _MILLION // span_ns)
    # The error of this rate before the first pair and after the last, as the pairs show it.
    ends, end = [0, 0], len(kept) - 1
    for start in range(1, end, PART):
        at = np.arange(start, min(start + PART, end))
        off_ns = _off_line_ns(kept, np.zeros_like(at), at, np.full_like(at, end))
        at, off_ns = at[off_ns > 0], off_ns[off_ns > 0]
        for side, place in enumerate((0, end)):
            away_ns = np.abs(kept.source_ns[place] - kept.source_ns[at])
            ends[side] = max(ends[side], -int(scaled(-off_ns, _MILLION, away_ns).min(initial=0)))
    return (last.host_ns - first.host_ns, span_ns), (measured_ppm + ends[0], measured_ppm + ends[1])
