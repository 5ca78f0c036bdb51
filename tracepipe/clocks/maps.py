"""Turns source time into trace time by maps of clocks.

A source clock is related to the host's by pairs (source, host, uncertainty). Between two pairs, the map is
the straight line through both. Before the first and after the last, it continues with the overall rate. Every
map states a bound: how far a placed time may be from the true one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tracepipe.clocks.pairs import (
    CRYSTAL_PPM,
    PART,
    WANDER_PPM,
    Pairs,
    bends_ns,
    bends_ppm,
    consistent,
    cut,
    jumps_ns,
    most,
    scaled,
)
from tracepipe.errors import ClockError
from tracepipe.event.columns import Int32s, Int64s
from tracepipe.event.model import TIME_LIMIT_NS, SourceNs, TraceNs

# The readings of `start` in a header are taken within this time.
SNAPSHOT_NS = 1000
_MILLION = 1_000_000
_INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Segment:
    """trace = trace_ns + (source - source_ns) * rate_num // rate_den."""

    source_ns: int
    trace_ns: int
    rate_num: int
    rate_den: int
    bound_ns: int
    bound_ppm: int
    """What each ns of distance from source_ns adds to the bound, in millionths of a ns."""
    length_ns: int = 0
    """The distance of the two pairs; 0 before the first and after the last."""
    end_bound_ns: int = 0
    """The bound at the second pair."""

    def place(self, source_ns: int) -> int:
        """The trace time of a source time, limited to the times that a trace can have."""
        placed_ns = self.trace_ns + (source_ns - self.source_ns) * self.rate_num // self.rate_den
        return max(-TIME_LIMIT_NS, min(placed_ns, TIME_LIMIT_NS))

    def bound_at(self, source_ns: int) -> int:
        """The distance of the clock from the line there, ns, limited to the times that a trace can have."""
        away_ns, length_ns = abs(source_ns - self.source_ns), self.length_ns
        if not length_ns:
            return min(self.bound_ns - (-away_ns * self.bound_ppm // _MILLION), TIME_LIMIT_NS)
        # The farthest that a clock can be from the line between two points: its rate changes just here.
        rest_ns = length_ns - away_ns
        wander = away_ns * rest_ns * WANDER_PPM // _MILLION
        bound_ns = -(-(self.bound_ns * rest_ns + self.end_bound_ns * away_ns + wander) // length_ns)
        return min(bound_ns, TIME_LIMIT_NS)


@dataclass(frozen=True, slots=True, eq=False)
class ClockMap:
    """The map of one source clock. `method`: same, offset, fit or assumed.

    `source_ns` and `trace_ns` are the points between which it is straight, of the shape `(points,)`; a point
    takes 24 bytes with its bounds. There is a segment before each point and one after the last.
    `from_bound_ns` has the bound at the begin of each segment, or at the end of the first one; `to_bound_ns`
    has the bounds at the ends of those between two points.
    """

    clock: str
    method: str
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

    def segment(self, source_ns: int) -> Segment:
        """The segment that places a source time."""
        after = int(self.source_ns.searchsorted(min(source_ns, _INT64_MAX), "right"))
        at, last = max(0, after - 1), len(self.source_ns)
        point = int(self.source_ns[at]), int(self.trace_ns[at])
        bound_ns = int(self.from_bound_ns[after])
        if after in (0, last):
            return Segment(*point, *self.rate, bound_ns, self.bound_ppm[after > 0])
        length_ns = int(self.source_ns[after]) - point[0]
        rate = int(self.trace_ns[after]) - point[1], length_ns
        return Segment(*point, *rate, bound_ns, 0, length_ns, int(self.to_bound_ns[after]))

    def place(self, source_ns: SourceNs) -> TraceNs:
        """The trace time of a source time."""
        return TraceNs(self.segment(source_ns).place(source_ns))

    def place_all(self, source_ns: Int64s) -> Int64s:
        """The trace times of a column of source times: the results of `Segment.place`."""
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
            return np.array([self.place(SourceNs(ns)) for ns in source_ns.tolist()], np.int64)
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
        return self.segment(source_ns).bound_at(source_ns)

    def bounds_at(self, source_ns: Int64s) -> Int64s:
        """The bounds of a column of source times, of the same shape: the results of `Segment.bound_at`."""
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
            return np.array([self.bound_at(ns) for ns in source_ns.tolist()], np.int64)
        # The product of two distances exceeds 64 bits after some seconds.
        wander = inside_ns // _MILLION * rest_ns + inside_ns % _MILLION * rest_ns // _MILLION
        line_ns = -(-(bound_ns * rest_ns + end_ns * inside_ns + wander) // np.maximum(1, length_ns))
        outside_ns = bound_ns - (-away_ns * np.where(is_before, *self.bound_ppm) // _MILLION)
        bounds_ns: Int64s = np.minimum(np.where(length_ns > 0, line_ns, outside_ns), TIME_LIMIT_NS)
        return bounds_ns

    @property
    def drift_ppm(self) -> float | None:
        """The rate by which the source clock is slower than the trace clock, in ppm; None if not known."""
        rate_num, rate_den = self.rate
        if self.bound_ppm[0] >= CRYSTAL_PPM and rate_num == rate_den:
            return None
        return (rate_num / rate_den - 1) * 1e6


def offset_map(clock: str, method: str, offset_ns: int, bound_ns: int) -> ClockMap:
    point, bounds_ns = np.zeros(1, np.int64), np.full(2, bound_ns, np.int64)
    return ClockMap(clock, method, point, point + offset_ns, bounds_ns, bounds_ns)


class Fit:
    """The piecewise-linear map through pairs of a clock, and how far other pairs contradict it.

    The bounds are true if the rate changes by no more than WANDER_PPM beyond what the pairs show. Between two
    pairs, the bound is the uncertainties of both, with such a change between them, plus the bend that the
    neighbours show. Outside, it is the uncertainty of the last pair, plus the distance times the uncertainty
    of the overall rate.
    """

    def __init__(self, clock: str, pairs: Pairs) -> None:
        """Raises ClockError without any pair."""
        if not len(pairs):
            raise ClockError(
                f"clock {clock} has no clock pairs", f"Place it with --assume-offset {clock}=NS."
            )
        kept = consistent(cut(pairs.in_order()))
        rate, bound_ppm = _outside(kept)
        self._map = ClockMap(clock, "fit", kept.source_ns, kept.host_ns, *_bounds(kept), rate, bound_ppm)
        self._from_bound_ns, self._to_bound_ns = self._map.from_bound_ns, self._map.to_bound_ns
        self._pairs = self._dropped = 0

    def allow(self, pairs: Pairs) -> None:
        """Widen the bounds where `pairs` contradict the map, as it may be wrong there."""
        for part in pairs.parts():
            off_ns = np.abs(self._map.place_all(part.source_ns) - part.host_ns)
            wrong = off_ns > self._map.bounds_at(part.source_ns) + part.uncertainty_ns + 2
            self._pairs += len(part)
            if wrong.any():
                self._widen(part.source_ns[wrong], off_ns[wrong], part.uncertainty_ns[wrong])

    def _widen(self, source_ns: Int64s, off_ns: Int64s, uncertainty_ns: Int64s) -> None:
        if not self._dropped:
            self._from_bound_ns, self._to_bound_ns = self._from_bound_ns.copy(), self._to_bound_ns.copy()
        self._dropped += len(source_ns)
        bounds_ns = np.minimum(np.minimum(off_ns, TIME_LIMIT_NS) + uncertainty_ns, TIME_LIMIT_NS)
        segments = self._map.source_ns.searchsorted(source_ns, "right")
        for column in (self._from_bound_ns, self._to_bound_ns):
            np.maximum.at(column, segments, bounds_ns)
        if len(self._map.source_ns) == 1:  # the bound is the same before and after it
            self._from_bound_ns[:] = self._from_bound_ns.max()

    def map(self) -> ClockMap:
        """The map, with bounds that allow for all pairs that were given."""
        return replace(
            self._map,
            from_bound_ns=_narrow(self._from_bound_ns),
            to_bound_ns=_narrow(self._to_bound_ns),
            pairs=self._pairs - self._dropped,
            dropped=self._dropped,
        )


def _narrow(bounds_ns: Int64s | Int32s) -> Int64s | Int32s:
    """The same bounds in half the memory, where none of them is over 2 s."""
    return bounds_ns.astype(np.int32) if most(bounds_ns) < 1 << 31 else bounds_ns


def fit(clock: str, pairs: Pairs) -> ClockMap:
    """The map through `pairs`, with bounds that allow for all of them. Raises ClockError without any."""
    fitted = Fit(clock, pairs)
    fitted.allow(pairs)
    return fitted.map()


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
    before_ppm, after_ppm = bends_ppm(kept)
    return (last.host_ns - first.host_ns, span_ns), (measured_ppm + before_ppm, measured_ppm + after_ppm)
