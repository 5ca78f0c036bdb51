"""Turns source time into trace time: the one place that relates two clocks.

A source clock is related to the host's by pairs (source, host, uncertainty). Between two pairs the map is the
straight line through both; outside them it goes on with the overall rate. Every map states a bound: how
far a placed time may be from the true one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracepipe.clocks.pairs import (
    CRYSTAL_PPM,
    WANDER_PPM,
    ClockPair,
    bend_ns,
    bend_ppm,
    consistent,
    cut,
    jump_ns,
)
from tracepipe.errors import ClockError
from tracepipe.event.columns import Int64s, distinct
from tracepipe.event.model import TIME_LIMIT_NS, SourceNs, TraceNs

# The readings of `start` in a header follow each other within this time.
SNAPSHOT_NS = 1000


@dataclass(frozen=True, slots=True)
class Segment:
    """trace = trace_ns + (source - source_ns) * rate_num // rate_den, from `start_ns` on."""

    start_ns: int
    source_ns: int
    trace_ns: int
    rate_num: int
    rate_den: int
    bound_ns: int
    bound_ppm: int
    """What each ns of distance from source_ns adds to the bound, in millionths."""
    length_ns: int = 0
    """Between two pairs: their distance. 0 before the first and after the last."""
    end_bound_ns: int = 0
    """The bound at the second of them."""

    def place(self, source_ns: int) -> int:
        """The trace time of a source time: at an end of what a trace can hold if it is beyond."""
        placed_ns = self.trace_ns + (source_ns - self.source_ns) * self.rate_num // self.rate_den
        return max(-TIME_LIMIT_NS, min(placed_ns, TIME_LIMIT_NS))

    def bound_at(self, source_ns: int) -> int:
        """How far off the line the clock may be there, ns."""
        away_ns, length_ns = abs(source_ns - self.source_ns), self.length_ns
        if not length_ns:
            return self.bound_ns - (-away_ns * self.bound_ppm // 1_000_000)
        # The farthest that a clock gets from the line between two points, when its rate changes just here.
        rest_ns = length_ns - away_ns
        wander = away_ns * rest_ns * WANDER_PPM // 1_000_000
        return -(-(self.bound_ns * rest_ns + self.end_bound_ns * away_ns + wander) // length_ns)


@dataclass(frozen=True, slots=True)
class ClockMap:
    """The map of one source clock. `method`: same, offset, fit or assumed."""

    clock: str
    method: str
    segments: tuple[Segment, ...]
    pairs: int = 0
    dropped: int = 0

    def segment_index(self, source_ns: int) -> int:
        """Which segment places a source time."""
        return max(0, bisect_right(self.segments, source_ns, key=lambda segment: segment.start_ns) - 1)

    def place(self, source_ns: SourceNs) -> TraceNs:
        """The trace time of a source time."""
        return TraceNs(self.segments[self.segment_index(source_ns)].place(source_ns))

    def place_all(self, source_ns: Int64s) -> Int64s:
        """The trace times of a column of source times."""
        return self._by_segment(source_ns, _place_column)

    def bound_at(self, source_ns: int) -> int:
        """How far `place(source_ns)` may be from the true time, ns."""
        return self.segments[self.segment_index(source_ns)].bound_at(source_ns)

    def bounds_at(self, source_ns: Int64s) -> Int64s:
        """The bounds of a column of source times."""
        return self._by_segment(
            source_ns,
            lambda segment, column: np.array([segment.bound_at(ns) for ns in column.tolist()], np.int64),
        )

    def _by_segment(self, source_ns: Int64s, made: Callable[[Segment, Int64s], Int64s]) -> Int64s:
        if len(self.segments) == 1 or not len(source_ns):
            return made(self.segments[0], source_ns)
        starts = np.array([segment.start_ns for segment in self.segments], np.int64)
        of = np.maximum(np.searchsorted(starts, source_ns, side="right") - 1, 0)
        out = np.empty_like(source_ns)
        for at in distinct(of).tolist():
            mine = of == at
            out[mine] = made(self.segments[at], source_ns[mine])
        return out

    @property
    def drift_ppm(self) -> float | None:
        """How much slower the source clock runs than the trace clock over all pairs, in millionths; None
        where that is not known.
        """
        first = self.segments[0]
        if first.bound_ppm >= CRYSTAL_PPM and first.rate_num == first.rate_den:
            return None
        return (first.rate_num / first.rate_den - 1) * 1e6


def _place_column(s: Segment, source_ns: Int64s) -> Int64s:
    """What `Segment.place` does, with the rate as 1 and the rest of it, which is small."""
    if not len(source_ns):
        return source_ns
    more = s.rate_num - s.rate_den
    longest_ns = max(abs(int(end) - s.source_ns) for end in (source_ns.min(), source_ns.max()))
    if longest_ns + abs(s.trace_ns) + longest_ns * abs(more) >= 1 << 62:
        return np.array([s.place(ns) for ns in source_ns.tolist()], np.int64)
    after = source_ns - s.source_ns
    return after + s.trace_ns + (after * more // s.rate_den if more else 0)


def offset_map(clock: str, method: str, offset_ns: int, bound_ns: int) -> ClockMap:
    return ClockMap(clock, method, (Segment(0, 0, offset_ns, 1, 1, bound_ns, 0),))


def fit(clock: str, pairs: Sequence[ClockPair]) -> ClockMap:
    """The piecewise-linear map through `pairs`. Raises ClockError without any.

    The bounds hold if the rate changes by no more than WANDER_PPM beyond what the pairs show. Inside: the
    uncertainties of the two ends, with such a change on the way, plus what the neighbours show of a bend.
    Outside: that of the end, plus the distance times the uncertainty of the overall rate.
    """
    if not pairs:
        raise ClockError(f"clock {clock} has no clock pairs", f"--assume-offset {clock}=NS places it")
    pairs = sorted(pairs, key=lambda pair: pair.source_ns)
    kept = consistent(cut(pairs))
    inside = [_between(kept, at) for at in range(len(kept) - 1)]
    alone_ns = kept[0].uncertainty_ns + 1
    first_ns, last_ns = (inside[0].bound_ns, inside[-1].end_bound_ns) if inside else (alone_ns, alone_ns)
    rate, before_ppm, after_ppm = _outside(kept)
    (source_ns, host_ns), end = ((pair.source_ns, pair.host_ns) for pair in (kept[0], kept[-1]))
    segments = [Segment(0, source_ns, host_ns, *rate, first_ns, before_ppm), *inside]
    if inside:
        segments.append(Segment(end[0], *end, *rate, last_ns, after_ppm))
    return _allowing(ClockMap(clock, "fit", tuple(segments)), pairs)


def _between(kept: Sequence[ClockPair], at: int) -> Segment:
    """The segment from pair `at` to the next."""
    a, b = kept[at : at + 2]
    more_ns = 1 + max(bend_ns(kept, at), bend_ns(kept, at + 1), jump_ns(a, b))
    start_ns, end_ns = (pair.uncertainty_ns + more_ns for pair in (a, b))
    rate = (b.host_ns - a.host_ns, b.source_ns - a.source_ns)
    return Segment(a.source_ns, a.source_ns, a.host_ns, *rate, start_ns, 0, rate[1], end_ns)


def _outside(kept: Sequence[ClockPair]) -> tuple[tuple[int, int], int, int]:
    """The rate before the first pair and after the last, and by how much it may be wrong there, in ppm."""
    first, last = kept[0], kept[-1]
    span_ns = last.source_ns - first.source_ns
    noise_ns = first.uncertainty_ns + last.uncertainty_ns + 1
    measured_ppm = -(-noise_ns * 1_000_000 // span_ns) + WANDER_PPM if span_ns else CRYSTAL_PPM
    if measured_ppm >= CRYSTAL_PPM:
        return (1, 1), CRYSTAL_PPM, CRYSTAL_PPM
    # At a rate that no crystal has, one of the two is wrong.
    measured_ppm += -(-jump_ns(first, last) * 1_000_000 // span_ns)
    before_ppm, after_ppm = (measured_ppm + bend_ppm(kept, end) for end in (first, last))
    return (last.host_ns - first.host_ns, span_ns), before_ppm, after_ppm


def _allowing(clock_map: ClockMap, pairs: Sequence[ClockPair]) -> ClockMap:
    """The map with bounds that allow for the pairs it contradicts: it may be wrong where they stand."""
    segments, dropped = list(clock_map.segments), 0
    for pair in pairs:
        off_ns = abs(clock_map.place(SourceNs(pair.source_ns)) - pair.host_ns)
        if off_ns > clock_map.bound_at(pair.source_ns) + pair.uncertainty_ns + 2:
            at = clock_map.segment_index(pair.source_ns)
            bounds_ns = (
                max(bound_ns, off_ns + pair.uncertainty_ns)
                for bound_ns in (segments[at].bound_ns, segments[at].end_bound_ns)
            )
            segments[at] = replace(segments[at], bound_ns=next(bounds_ns), end_bound_ns=next(bounds_ns))
            dropped += 1
    return replace(clock_map, segments=tuple(segments), pairs=len(pairs) - dropped, dropped=dropped)
