"""Clock pairs: one instant on a source clock and on the host's, with an uncertainty.

The true time is within a pair's interval, and a clock runs at a nearly constant rate. So each interval is
narrowed to the part that the clock can reach from the intervals of other pairs. Pairs that contradict the
others are left out. There may be many pairs, so they are columns, which are read a part at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tracepipe.event.columns import AnyArray, Bools, Int64s, Ints

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
        growing = GrowingPairs()
        for pair in pairs:
            growing.append(pair)
        return growing.columns()

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


def numbers(column: Ints) -> memoryview:
    """A view of a column whose numbers are quickly read one by one, as Python integers."""
    return column.data


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


@dataclass(slots=True)
class _Reaching:
    """The parts of the pairs' intervals that the clock can reach, in the order of the source clock.

    `low_ns` and `high_ns` are the ends of these parts. `joined` is whether the clock can get from one pair to
    the next.
    """

    pairs: Pairs
    low_ns: Int64s
    high_ns: Int64s
    joined: Bools

    @classmethod
    def of(cls, pairs: Pairs) -> _Reaching:
        nothing = np.empty(len(pairs), np.int64)
        return cls(pairs, nothing, nothing.copy(), np.ones(len(pairs) - 1, np.bool_))

    def from_those_before(self) -> Bools:
        """Narrow each interval to the part that can be reached from those before, or not at all where there
        is no such part. Return which steps are not near a step that is impossible for the clock.
        """
        pairs, steps, joined = self.pairs, len(self.joined), np.ones_like(self.joined)
        # A reading is an integer: the clock may have reached it up to 1 ns before.
        np.subtract(pairs.host_ns, pairs.uncertainty_ns, out=self.low_ns)
        self.low_ns -= 1
        np.add(pairs.host_ns, pairs.uncertainty_ns, out=self.high_ns)
        from_ns, to_ns = int(self.low_ns[0]), int(self.high_ns[0])
        for start in range(0, steps, PART):
            stop = min(start + PART, steps)
            part = slice(start + 1, stop + 1)
            lows_ns, highs_ns = self.low_ns[part].tolist(), self.high_ns[part].tolist()
            are_joined = self.joined[start:stop].tolist()
            rows = zip(lows_ns, highs_ns, *_steps(pairs, start, stop), are_joined, strict=True)
            for at, (low_ns, high_ns, least_ns, most_ns, is_joined) in enumerate(rows):
                from_ns, to_ns = from_ns + least_ns, to_ns + most_ns
                if from_ns > high_ns or to_ns < low_ns:
                    joined[max(0, start + at - NEIGHBOURS) : start + at + NEIGHBOURS + 1] = False
                from_ns, to_ns = max(low_ns, from_ns), min(high_ns, to_ns)
                if not is_joined or from_ns > to_ns:
                    from_ns, to_ns = low_ns, high_ns
                lows_ns[at], highs_ns[at] = from_ns, to_ns
            self.low_ns[part], self.high_ns[part] = lows_ns, highs_ns
        return joined

    def from_those_after(self) -> None:
        """Narrow what is left of each interval to the part that can be reached from those after."""
        steps = len(self.joined)
        low_ns, high_ns = int(self.low_ns[-1]), int(self.high_ns[-1])
        for start in reversed(range(0, steps, PART)):
            stop = min(start + PART, steps)
            part = slice(start, stop)
            lows_ns, highs_ns = self.low_ns[part].tolist(), self.high_ns[part].tolist()
            least_ns, most_ns = _steps(self.pairs, start, stop)
            joined = self.joined[part].tolist()
            for at in reversed(range(stop - start)):
                before = lows_ns[at], highs_ns[at]
                low_ns, high_ns = max(before[0], low_ns - most_ns[at]), min(before[1], high_ns - least_ns[at])
                if not joined[at] or low_ns > high_ns:
                    low_ns, high_ns = before
                lows_ns[at], highs_ns[at] = low_ns, high_ns
            self.low_ns[part], self.high_ns[part] = lows_ns, highs_ns


def cut(pairs: Pairs) -> Pairs:
    """Pairs in source order, with intervals that are narrowed by the other pairs.

    From the interval of one pair, the clock reaches the next only at possible rates. This is correct as long
    as the rate changes by no more than WANDER_PPM over NEIGHBOURS on both sides. If a pair cannot be reached,
    the rate has changed more, or the pair is wrong: around it, nothing is narrowed.
    """
    reaching = _Reaching.of(pairs)
    reaching.joined = reaching.from_those_before()
    if not reaching.joined.all():
        reaching.from_those_before()
    reaching.from_those_after()
    low_ns, high_ns = reaching.low_ns, reaching.high_ns
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
    sources_ns, hosts_ns = numbers(pairs.source_ns), numbers(pairs.host_ns)
    uncertainties_ns = numbers(pairs.uncertainty_ns)
    kept, count = np.empty(len(pairs), np.int64), 0
    places = numbers(kept)
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


def bends_ppm(pairs: Pairs) -> tuple[int, int]:
    """The error of the overall rate before the first pair and after the last, as the pairs show it."""
    ends, last = [0, 0], len(pairs) - 1
    for start in range(1, last, PART):
        at = np.arange(start, min(start + PART, last))
        off_ns = _off_line_ns(pairs, np.zeros_like(at), at, np.full_like(at, last))
        at, off_ns = at[off_ns > 0], off_ns[off_ns > 0]
        for end, place in enumerate((0, last)):
            away_ns = np.abs(pairs.source_ns[place] - pairs.source_ns[at])
            ends[end] = max(ends[end], -int(scaled(-off_ns, 1_000_000, away_ns).min(initial=0)))
    return ends[0], ends[1]


# The most pairs that are kept, of all clocks together. A pair takes some 64 bytes while it is fitted, then
# 24.
PAIRS_MAX = 1 << 17
# A machine has some GPUs with a clock each, but a file may name any number of clocks.
CLOCKS_MAX = 1 << 10


class CollectedPairs:
    """Pairs by clock. `is_thinned` is whether some were not kept."""

    def __init__(self) -> None:
        self.is_thinned, self._count = False, 0
        self._growing: dict[str, GrowingPairs] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the pair of a `clock` record, if its clock is one of the first `CLOCKS_MAX`."""
        growing = self._growing.get(record["clock"])
        if growing is None:
            if len(self._growing) == CLOCKS_MAX:
                return
            growing = self._growing[record["clock"]] = GrowingPairs()
        growing.append(ClockPair.of(record))
        self._count += 1
        if self._count >= PAIRS_MAX:
            clock, growing = max(self._growing.items(), key=lambda one: len(one[1]))
            fewer = self._growing[clock] = GrowingPairs(thinned(growing.columns()))
            self._count -= len(growing) - len(fewer)
            self.is_thinned = True

    def pop_all(self) -> Iterator[tuple[str, Pairs]]:
        """Take out each clock with its pairs."""
        while self._growing:
            clock, growing = self._growing.popitem()
            yield clock, growing.columns()


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
    sources_ns = numbers(pairs.source_ns)
    places = array("q", [0])
    last_ns = sources_ns[0]
    for at in range(1, len(pairs) - 1):
        if sources_ns[at + 1] - last_ns > spacing_ns:
            places.append(at)
            last_ns = sources_ns[at]
    places.append(len(pairs) - 1)
    return places


def in_parts(records: Iterable[Mapping[str, Any]], clocks: Container[str]) -> Iterator[tuple[str, Pairs]]:
    """All pairs that `records` have of some clocks, a part at a time: a clock, and some of its pairs."""
    growing: dict[str, GrowingPairs] = {}
    for count, record in enumerate((one for one in records if one["clock"] in clocks), 1):
        growing.setdefault(record["clock"], GrowingPairs()).append(ClockPair.of(record))
        if count % PART == 0:
            yield from ((clock, pairs.columns()) for clock, pairs in growing.items())
            growing = {}
    yield from ((clock, pairs.columns()) for clock, pairs in growing.items())
