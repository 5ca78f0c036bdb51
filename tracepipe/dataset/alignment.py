"""Put the clocks of several hosts on one, by the ends of collectives that their ranks ran together.

A collective such as an all-reduce ends on no rank before every rank has started it, and the ranks leave it
nearly together: the data of the last rank arrives at all others during the transfer.

    host A  ├─ waits ──────────┬─ transfers ──┤ end
    host B                     ├─ transfers ──┤ end       nearly the same moment, on two clocks

The difference of two clocks at many such ends gives their offset and drift. On two H200s the ends of
transfers of 78 µs were 0.2 to 2.3 µs apart and those of 140 µs 9.6 to 13.1 µs, and the rank that came last
left last; so the shorter half of the transfers is used. How far their ends lie from the line is the bound.
A rank that comes last each time may leave later each time, which no distance shows: its bound has the
shortest transfer in addition. What holds in any case is stated too: no rank can have left before another
one came.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tracepipe.event.columns import Bools, Int64s

LEAST_SHARED: Final = 8
"""Collectives that two clocks must share: fewer cannot show which of them are wrong."""
CRYSTAL_PPM: Final = 100
DRIFT_MAX_PPM: Final = 500
"""Clocks of running hosts differ by less: their crystals by CRYSTAL_PPM, and NTP slews by up to 500."""
# Ends further from the line than this many times the median distance are taken for mistakes, as are
# collectives that a rank did not run. A line is never better than what a GPU's clock shows: about 1 µs.
_OUTLIERS: Final = 8
_LEAST_NOISE_NS: Final = 1_000
# No transfer has ranks leave this far from each other.
_SPREAD_MAX_NS: Final = 1_000_000
_BILLION: Final = 1_000_000_000
_REFINEMENTS: Final = 2
_OFTEN: Final = 0.4
"""If a clock comes last in this share of its collectives, they alone may decide its line."""
_ALWAYS: Final = 0.9
"""If a clock comes last in this share of its collectives, it counts as always last."""


@dataclass(frozen=True, slots=True, eq=False)
class Meetings:
    """What the ranks of each clock saw of collectives: columns of one length, a row for each clock and
    collective.

    `clock` and `collective` are numbers from 0; `arrived_ns` is the last start of a rank of this clock,
    `left_ns` the first end, and `end_ns` the mean of the ends, all on this clock. `transfer_ns` is how long
    the collective took the rank that took the least, of all clocks: the one that came last.
    """

    clock: Int64s
    collective: Int64s
    arrived_ns: Int64s
    left_ns: Int64s
    end_ns: Int64s
    transfer_ns: Int64s

    def __len__(self) -> int:
        return len(self.clock)

    @classmethod
    def of(cls, clock: Int64s, collective: Int64s, start_ns: Int64s, end_ns: Int64s) -> Meetings:
        """The meetings of some ranks' collectives: columns of one length, a row for each rank and
        collective, of those that all ranks leave together.
        """
        transfer_ns = np.full(int(collective.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(transfer_ns, collective, end_ns - start_ns)
        order = np.lexsort((collective, clock))
        clock, collective = clock[order], collective[order]
        start_ns, end_ns = start_ns[order], end_ns[order]
        is_first = np.ones(len(clock), np.bool_)
        is_first[1:] = (clock[1:] != clock[:-1]) | (collective[1:] != collective[:-1])
        first = np.flatnonzero(is_first)
        if not len(first):
            return cls(clock, collective, start_ns, end_ns, end_ns, end_ns)
        left_ns = np.minimum.reduceat(end_ns, first)
        # Ends of one host lie near to each other: their mean is the first one's and a mean of small numbers.
        after_ns = end_ns - np.repeat(left_ns, np.diff(np.append(first, len(clock))))
        count = np.diff(np.append(first, len(clock)))
        mean_ns = left_ns + np.add.reduceat(after_ns, first) // count
        arrived_ns, collective = np.maximum.reduceat(start_ns, first), collective[first]
        return cls(clock[first], collective, arrived_ns, left_ns, mean_ns, transfer_ns[collective])

    def take(self, rows: Bools) -> Meetings:
        """Some of the rows."""
        return Meetings(
            self.clock[rows],
            self.collective[rows],
            self.arrived_ns[rows],
            self.left_ns[rows],
            self.end_ns[rows],
            self.transfer_ns[rows],
        )

    def of_short_transfers(self) -> Meetings:
        """The half of the rows whose transfers are the shorter ones; all of them where they are few."""
        if len(self.transfer_ns) < 2 * LEAST_SHARED:
            return self
        return self.take(self.transfer_ns <= np.median(self.transfer_ns))


@dataclass(frozen=True, slots=True)
class Line:
    """Puts a clock on the reference: `ns + offset_ns + (ns - at_ns) * drift_ppb / 10⁹`."""

    at_ns: int = 0
    offset_ns: int = 0
    drift_ppb: int = 0

    def place(self, ns: int) -> int:
        """A time on the reference clock, to the ns below."""
        return ns + self.offset_ns + (ns - self.at_ns) * self.drift_ppb // _BILLION

    def first_at(self, reference_ns: int) -> int:
        """The first time that is not before a time of the reference clock."""
        after_ns = reference_ns - self.offset_ns - self.at_ns
        ns = self.at_ns + after_ns * _BILLION // (_BILLION + self.drift_ppb)
        while self.place(ns) >= reference_ns:
            ns -= 1
        while self.place(ns) < reference_ns:
            ns += 1
        return ns

    def place_all(self, ns: Int64s) -> Int64s:
        """Times on the reference clock, to the ns below."""
        # In steps, as the product of a day and 500 ppm has more than 64 bits.
        away_ns = ns - self.at_ns
        whole, rest = np.divmod(away_ns, 1_000_000)
        drift = whole * self.drift_ppb + rest * self.drift_ppb // 1_000_000
        placed: Int64s = ns + self.offset_ns + drift // 1_000
        return placed


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one clock goes, and how sure that is.

    `bound_ns`: of the collectives used, no end is further from the common end, between `first_ns` and
    `last_ns` of the reference clock. `early_ns` and `late_ns`: how far the clock could be moved, to earlier
    and to later, before a rank would leave a collective that another one has not come to; None of the only
    clock. `shared` collectives were compared, of which `dropped` do not fit.
    """

    line: Line
    bound_ns: int
    shared: int = 0
    dropped: int = 0
    first_ns: int = 0
    last_ns: int = 0
    early_ns: int | None = None
    late_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Alignment:
    """The clocks that go on the reference clock, by number, and why others do not."""

    reference: int
    placements: dict[int, Placement]
    refused: dict[int, str]


def align(meetings: Meetings, clocks: int) -> Alignment:
    """Put `clocks` clocks, numbered from 0, on that which meets the others most often.

    A clock that shares LEAST_SHARED collectives with those that are placed is placed in turn, so that process
    groups need not span all hosts.
    """
    if not clocks:
        return Alignment(0, {}, {})
    reference = _most_met(meetings, clocks)
    lines = {reference: Line()}
    refused: dict[int, str] = {}
    while True:
        common = _common_ends(meetings, lines)
        new = {}
        for clock in range(clocks):
            if clock not in lines and clock not in refused:
                fitted = _fitted(meetings.take(meetings.clock == clock), common)
                if isinstance(fitted, Line):
                    new[clock] = fitted
                elif fitted:
                    refused[clock] = fitted
        if not new:
            break
        lines |= new
    for _ in range(_REFINEMENTS):
        common = _common_ends(meetings, lines)
        for clock in lines.keys() - {reference}:
            better = _fitted(meetings.take(meetings.clock == clock), common)
            if isinstance(better, Line):
                lines[clock] = better
    common = _common_ends(meetings, lines)
    fits = _fits(meetings, lines, common)
    placements = {
        clock: _placement(meetings, fits, clock, lines, common, reference) for clock in sorted(lines)
    }
    for clock in range(clocks):
        if clock not in lines:
            refused.setdefault(
                clock, f"shares fewer than {LEAST_SHARED} collectives with clocks that are placed"
            )
    return Alignment(reference, placements, dict(sorted(refused.items())))


def _most_met(meetings: Meetings, clocks: int) -> int:
    """The clock that has the most other clocks in its collectives, all together."""
    of_collective = np.bincount(meetings.collective) if len(meetings.collective) else np.zeros(0, np.int64)
    met = np.bincount(
        meetings.clock, weights=of_collective[meetings.collective] - 1, minlength=max(clocks, 1)
    )
    return int(met.argmax())


@dataclass(frozen=True, slots=True, eq=False)
class _Common:
    """By collective, its end on the reference clock, and whether a placed clock tells it."""

    end_ns: Int64s
    is_known: Bools


def _common_ends(meetings: Meetings, lines: dict[int, Line]) -> _Common:
    """The median of the ends that the placed clocks have of each collective."""
    count = int(meetings.collective.max(initial=-1)) + 1
    known, end_ns = np.zeros(count, np.bool_), np.zeros(count, np.int64)
    placed = np.isin(meetings.clock, list(lines))
    some = meetings.take(placed)
    ns = _placed_ns(some.clock, some.end_ns, lines)
    order = np.lexsort((ns, some.collective))
    collective, ns = some.collective[order], ns[order]
    if len(collective):
        first = np.flatnonzero(np.append(True, collective[1:] != collective[:-1]))
        last = np.append(first[1:], len(collective)) - 1
        low, high = ns[(first + last) // 2], ns[(first + last + 1) // 2]
        end_ns[collective[first]] = low + (high - low) // 2
        known[collective[first]] = True
    return _Common(end_ns, known)


def _placed_ns(clock: Int64s, ns: Int64s, lines: dict[int, Line]) -> Int64s:
    """Times of several clocks on the reference clock."""
    placed = ns.copy()
    order = np.argsort(clock, kind="stable")
    numbers, first = np.unique(clock[order], return_index=True)
    for number, start, end in zip(numbers.tolist(), first, [*first[1:], len(order)], strict=False):
        rows = order[start:end]
        placed[rows] = lines[number].place_all(ns[rows])
    return placed


def _fitted(own: Meetings, common: _Common) -> Line | str:
    """The line through the ends of one clock; why there is none, "" while it shares too few collectives."""
    shared = common.is_known[own.collective] if len(own.collective) else np.zeros(0, np.bool_)
    if np.count_nonzero(shared) < LEAST_SHARED:
        return ""
    own = own.take(shared).of_short_transfers()
    at_ns = own.end_ns
    base_ns, ahead_ns = int(at_ns[0]), common.end_ns[own.collective] - at_ns
    first_ns = int(ahead_ns[0])
    away = (at_ns - base_ns).astype(np.float64)
    off = (ahead_ns - first_ns).astype(np.float64)
    slope, offset = _robust_line(away, off)
    inside = _inliers(off - offset - slope * away)
    away_ns = float(np.median(np.abs(off - offset - slope * away)))
    if 2 * np.count_nonzero(inside) < len(inside) or away_ns > _SPREAD_MAX_NS:
        return "the ends of its collectives lie on no line"
    middle, span_ns = away[inside].mean(), np.ptp(away[inside])
    if _is_short(span_ns, off[inside] - slope * away[inside]):
        slope = 0.0
    else:
        slope = float(np.polyfit(away[inside] - middle, off[inside], 1)[0])
    offset = float(np.mean(off[inside] - slope * away[inside]))
    if abs(slope) * 1e6 > DRIFT_MAX_PPM:
        return f"its clock would drift by {slope * 1e6:.0f} ppm: these are not the same collectives"
    return Line(base_ns, first_ns + round(offset), round(slope * _BILLION))


def _is_short(span_ns: float, off_ns: NDArray[np.float64]) -> bool:
    """Whether a stretch is too short to measure a drift better than crystals keep to."""
    return _line_error_ns(off_ns - np.median(off_ns)) * 2_000_000 > CRYSTAL_PPM * span_ns


def _line_error_ns(off_ns: NDArray[np.float64]) -> float:
    """How far a line through points may be off at either end, from their distances to it: three standard
    errors of a line through points that are spread evenly.
    """
    count = len(off_ns)
    deviation_ns = math.sqrt(float(off_ns @ off_ns) / max(count - 2, 1))
    return 3 * deviation_ns * math.sqrt(4 / count)


def _robust_line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Slope and height at 0 of a line that a third of wrong points does not move: the median of the slopes
    between points half of all apart (Theil and Sen; Kendall's selection), then the median height.
    """
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    half = len(x) // 2
    run = x[half:] - x[: len(x) - half]
    rise = y[half:] - y[: len(y) - half]
    slopes = rise[run > 0] / run[run > 0]
    slope = float(np.median(slopes)) if len(slopes) else 0.0
    return slope, float(np.median(y - slope * x))


def _inliers(off_ns: NDArray[np.float64]) -> Bools:
    """Which distances from a line are those of the same collective."""
    spread_ns = max(float(np.median(np.abs(off_ns))), _LEAST_NOISE_NS)
    inside: Bools = np.abs(off_ns) <= _OUTLIERS * spread_ns
    return inside


def _fits(meetings: Meetings, lines: dict[int, Line], common: _Common) -> Bools:
    """Which meetings of placed clocks are those of the same collective, by how far they are from its end."""
    fits = np.zeros(len(meetings.clock), np.bool_)
    for clock, line in lines.items():
        rows = np.flatnonzero(meetings.clock == clock)
        off_ns = line.place_all(meetings.end_ns[rows]) - common.end_ns[meetings.collective[rows]]
        inside = _inliers((off_ns - np.median(off_ns)).astype(np.float64)) if len(rows) else off_ns > 0
        fits[rows] = inside | (np.abs(off_ns) <= meetings.transfer_ns[rows])
    return fits


def _placement(
    meetings: Meetings, fits: Bools, clock: int, lines: dict[int, Line], common: _Common, reference: int
) -> Placement:
    """How well a clock is placed, by what all others say."""
    line, own = lines[clock], meetings.take(meetings.clock == clock)
    is_certain = fits[meetings.clock == clock]
    others = meetings.take((meetings.clock != clock) & fits)
    count = len(common.end_ns)
    arrived_ns = np.full(count, np.iinfo(np.int64).min)
    left_ns = np.full(count, np.iinfo(np.int64).max)
    np.maximum.at(arrived_ns, others.collective, _placed_ns(others.clock, others.arrived_ns, lines))
    np.minimum.at(left_ns, others.collective, _placed_ns(others.clock, others.left_ns, lines))
    met = left_ns[own.collective] < np.iinfo(np.int64).max
    if not met.any():
        return Placement(line, 0)
    sure, own = own.take(met & is_certain), own.take(met)
    early_ns = int((line.place_all(sure.left_ns) - arrived_ns[sure.collective]).min()) if len(sure) else None
    late_ns = int((left_ns[sure.collective] - line.place_all(sure.arrived_ns)).min()) if len(sure) else None
    own = own.of_short_transfers()
    is_last = line.place_all(own.arrived_ns) >= arrived_ns[own.collective]
    end_ns = line.place_all(own.end_ns)
    off_ns = end_ns - common.end_ns[own.collective]
    inside = _inliers((off_ns - np.median(off_ns)).astype(np.float64))
    is_last_often = is_last.mean() >= _OFTEN or len(lines) == 2
    if is_last_often:
        # Its line may be one through the ends at which it left late. Its other ends are far from it, but no
        # further than a transfer, and are no mistakes.
        inside |= np.abs(off_ns) <= own.transfer_ns
    # With two clocks, the common end lies between them, and is as wrong as the end of the clock that comes
    # last.
    distances_ns: NDArray[np.float64] = off_ns[inside].astype(np.float64)
    bound_ns = float(np.abs(distances_ns).max()) + _line_error_ns(distances_ns)
    if not line.drift_ppb and clock != reference:
        bound_ns += CRYSTAL_PPM * float(np.ptp(end_ns[inside])) / 2_000_000
    is_always_last = is_last.mean() >= _ALWAYS or (len(lines) == 2 and is_last.mean() <= 1 - _ALWAYS)
    return Placement(
        line,
        bound_ns=math.ceil(bound_ns) + (int(own.transfer_ns.min()) if is_always_last else 0),
        shared=len(inside),
        dropped=len(inside) - int(np.count_nonzero(inside)),
        first_ns=int(end_ns[inside].min()),
        last_ns=int(end_ns[inside].max()),
        early_ns=early_ns,
        late_ns=late_ns,
    )
