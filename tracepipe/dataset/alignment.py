"""Put the clocks of several hosts on one, by the ends of collectives that their ranks ran together.

A collective such as an all-reduce ends on no rank before every rank has started it, and the ranks leave it
nearly together: the data of the last rank arrives at all others during the transfer.

    host A  ├─ waits ──────────┬─ transfers ──┤ end
    host B                     ├─ transfers ──┤ end       nearly the same moment, on two clocks

The difference of two clocks at many such ends gives their drift, and about their offset. Ranks need not leave
at one moment: some leave earlier by a part of the transfer each time, which no distance shows. On two H200s
the ends of transfers of 78 µs were 0.2 to 2.3 µs apart and those of 140 µs 9.6 to 13.1 µs; where NCCL sends
by sockets, those of 60 µs were 30 µs apart. So each clock is put in the middle of where it can be: that no
rank left before another one came is certain, and that ranks leave within a transfer of each other is likely.
The latter matters where one rank comes last each time.

    host A  ├─ came ───────────────┤ left
    host B            ├─ came ────────┤ left

B left after A had come, and A after B had come. So A's clock can be moved to later by at most the time from
A's coming to B's leaving, and to earlier by at most that from B's coming to A's leaving. Of many collectives
the shortest times count. Between three clocks these limits add up: where A can be moved against B, and B
against C, A can be moved against C by no more than both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tracepipe.event.columns import Bools, Int64s
from tracepipe.units import duration_text

LEAST_SHARED: Final = 8
"""Collectives that two clocks must share: fewer cannot show which of them are wrong."""
_BILLION: Final = 1_000_000_000
CRYSTAL_PPM: Final = 100
DRIFT_MAX_PPM: Final = 500
"""Clocks of running hosts differ by less: their crystals by CRYSTAL_PPM, and NTP slews by up to 500."""
# Ends further from the line than this many times the median distance are taken for mistakes, as are
# collectives that a rank did not run. A line is never better than what a GPU's clock shows: about 1 µs.
_OUTLIERS: Final = 8
_LEAST_NOISE_NS: Final = 1_000
# No transfer has ranks leave this far from each other.
_SPREAD_MAX_NS: Final = 1_000_000
_REFINEMENTS: Final = 2
_ALIKE: Final = 3
"""Transfers are alike if they differ by less than this factor."""
_PARTS: Final = 8
"""Parts of the time that a line is fitted to without, one after another."""


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
        return Meetings(*(getattr(self, field.name)[rows] for field in fields(self)))

    def of_short_transfers(self) -> Meetings:
        """The half of the rows whose transfers are the shorter ones; all of them where they are few."""
        if len(self.transfer_ns) < 2 * LEAST_SHARED:
            return self
        return self.take(self.transfer_ns <= np.median(self.transfer_ns))

    def of_alike_transfers(self) -> Meetings:
        """Those of short transfers that are neither far shorter nor far longer than most. Ranks leave these
        otherwise. A program often begins with some, which would turn a line.
        """
        some = self.of_short_transfers()
        ratio = some.transfer_ns / max(np.median(some.transfer_ns), 1) if len(some) else some.transfer_ns
        is_alike = (ratio >= 1 / _ALIKE) & (ratio <= _ALIKE)
        return some.take(is_alike) if np.count_nonzero(is_alike) >= LEAST_SHARED else some


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
        return place_each(ns, *map(np.asarray, astuple(self)))


def place_each(ns: Int64s, at_ns: Int64s, offset_ns: Int64s, drift_ppb: Int64s) -> Int64s:
    """Times on the reference clock by the values of a `Line` for each, or for all."""
    # In steps, as the product of a day and 500 ppm has more than 64 bits.
    away_ns: Int64s = ns - at_ns
    whole, rest = np.divmod(away_ns, 1_000_000)
    drift: Int64s = whole * drift_ppb + rest * drift_ppb // 1_000_000
    placed: Int64s = ns + offset_ns + drift // 1_000
    return placed


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one clock goes, and how sure that is.

    `bound_ns`: how far the clock can be off the reference clock, between `first_ns` and `last_ns` of that.
    `early_ns` and `late_ns`: how far the clock could be moved, to earlier and to later, before a rank would
    leave a collective that another one has not come to; None of the reference clock, and where nothing limits
    it. `residual_ns`: of the collectives used, no end is further from the common end. `shared` collectives
    were compared, of which `dropped` do not fit.
    """

    line: Line
    bound_ns: int
    shared: int = 0
    dropped: int = 0
    first_ns: int = 0
    last_ns: int = 0
    early_ns: int | None = None
    late_ns: int | None = None
    residual_ns: int | None = None

    def limit(self, start_ns: int, end_ns: int) -> tuple[bool, str]:
        """Whether the bound holds from one time of the reference clock to another; what holds where not."""
        away_ns = max(self.first_ns - start_ns, end_ns - self.last_ns)
        if away_ns <= 0 or not self.last_ns:  # the only clock there is
            return True, ""
        away = duration_text(away_ns)
        return False, f"{self.bound_ns} ns while collectives ran, not known up to {away} away from them"


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
    # The clock that has the most other clocks in its collectives, all together.
    sizes = np.bincount(meetings.collective, minlength=1)
    met = np.bincount(meetings.clock, sizes[meetings.collective] - 1, clocks)
    reference = int(met.argmax())
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
    placements = dict(_placements(meetings, lines, _common_ends(meetings, lines), reference))
    for clock in range(clocks):
        if clock not in lines:
            refused.setdefault(
                clock, f"shares fewer than {LEAST_SHARED} collectives with clocks that are placed"
            )
    return Alignment(reference, placements, dict(sorted(refused.items())))


_UNKNOWN_NS: Final = -(1 << 63)


def _common_ends(meetings: Meetings, lines: dict[int, Line]) -> Int64s:
    """The median of the ends that placed clocks have of each collective, _UNKNOWN_NS where none has one."""
    end_ns = np.full(int(meetings.collective.max(initial=-1)) + 1, _UNKNOWN_NS)
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
    return end_ns


def _placed_ns(clock: Int64s, ns: Int64s, lines: dict[int, Line]) -> Int64s:
    """Times of several clocks on the reference clock."""
    every = range(int(clock.max(initial=-1)) + 1)
    of_clock = np.array([astuple(lines.get(number, Line())) for number in every], np.int64).reshape(-1, 3)
    return place_each(ns, *of_clock[clock].T)


def _fitted(own: Meetings, common_ns: Int64s) -> Line | str:
    """The line through the ends of one clock; why there is none, "" while it shares too few collectives."""
    shared = common_ns[own.collective] != _UNKNOWN_NS
    if np.count_nonzero(shared) < LEAST_SHARED:
        return ""
    own = own.take(shared).of_alike_transfers()
    at_ns = own.end_ns
    base_ns, ahead_ns = int(at_ns[0]), common_ns[own.collective] - at_ns
    first_ns = int(ahead_ns[0])
    away = (at_ns - base_ns).astype(np.float64)
    off = (ahead_ns - first_ns).astype(np.float64)
    slope, offset = _robust_line(away, off)
    distances_ns = off - offset - slope * away
    inside = _inliers(distances_ns)
    if 2 * np.count_nonzero(inside) < len(inside) or np.median(np.abs(distances_ns)) > _SPREAD_MAX_NS:
        return "the ends of its collectives lie on no line"
    # Before and after most of the points, the right ones are as far off the line as it may turn.
    outside = (away < away[inside].min()) | (away > away[inside].max())
    turn_ns = np.zeros(len(away))
    turn_ns[outside] = _line_errors_ns(away[inside], distances_ns[inside], away[outside])
    on_line = inside | _inliers(np.sign(distances_ns) * np.maximum(np.abs(distances_ns) - turn_ns, 0))
    on, on_ns = away[on_line], distances_ns[on_line] - np.median(distances_ns[on_line])
    error_ns = _ends_error_ns(on, on_ns, on, _pins_ns(on_ns, own.transfer_ns[on_line]))
    if error_ns * 2_000_000 >= CRYSTAL_PPM * np.ptp(on):
        slope = 0.0  # too short a stretch to measure a drift better than crystals keep to
    else:
        slope, inside = float(np.polyfit(on - on.mean(), off[on_line], 1)[0]), on_line
    offset = float(np.mean(off[inside] - slope * away[inside]))
    if abs(slope) * 1e6 > DRIFT_MAX_PPM:
        return f"its clock would drift by {slope * 1e6:.0f} ppm: these are not the same collectives"
    return Line(base_ns, first_ns + round(offset), round(slope * _BILLION))


_Floats = NDArray[np.float64]


def _line_errors_ns(at_ns: _Floats, off_ns: _Floats, ends_ns: _Floats) -> _Floats:
    """How far a line through ends of collectives may be off at some times, from their distances to it: three
    standard errors, or three of the jackknife (Quenouille, Tukey) that leaves out an eighth of the time each,
    whichever is more. Shape `(times,)`.

    The latter is for ends that are not independent: they lie otherwise when another rank comes last, or when
    a link is slower for a while.
    """
    middle_ns, span_ns = at_ns.mean(), max(float(np.ptp(at_ns)), 1.0)
    x, at = (at_ns - middle_ns) / span_ns, (ends_ns - middle_ns) / span_ns
    leverage = 1 / len(x) + at**2 / max(x @ x, 1 / len(x))
    standard_ns = 3 * np.sqrt(float(off_ns @ off_ns) / max(len(x) - 2, 1) * leverage)
    part = np.minimum(((x - x.min()) * _PARTS).astype(np.int64), _PARTS - 1)
    columns = (np.ones_like(x), x, off_ns, x * x, x * off_ns)
    of_part = np.array([np.bincount(part, column, _PARTS) for column in columns])
    every = of_part.sum(1, keepdims=True)
    rest = (every - of_part)[:, of_part[0] > 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        turned_ns = np.abs(_heights(rest, at[:, None]) - _heights(every, at[:, None]))
    # Without all the others, a line says nothing but what crystals keep to.
    most_ns = CRYSTAL_PPM * (np.ptp(np.append(x, at)) * span_ns) / 1_000_000
    turned_ns = np.where(np.isfinite(turned_ns), np.minimum(turned_ns, most_ns), most_ns)
    count = turned_ns.shape[1]
    errors_ns: _Floats = np.maximum(standard_ns, 3 * np.sqrt((turned_ns**2).sum(1) * (count - 1) / count))
    return errors_ns


def _heights(sums: _Floats, at: _Floats) -> _Floats:
    """Of the least squares' lines at some x of shape `(x, 1)`, not finite where there is none. `sums` has
    those of the points, of x, y, x² and x·y, a column for each line. Shape `(x, lines)`.
    """
    count, x, y, xx, xy = sums
    slope = (count * xy - x * y) / (count * xx - x * x)
    heights: _Floats = (y - slope * x) / count + slope * at
    return heights


def _pins_ns(off_ns: _Floats, transfer_ns: Int64s) -> _Floats:
    """How far a line may be off at ends of collectives, as ranks leave within a transfer of each other. The
    common end of two clocks is in the middle between both.
    """
    pins_ns: _Floats = 2 * np.abs(off_ns) + np.maximum(transfer_ns, 1)
    return pins_ns


def _pinned_ns(at_ns: _Floats, pins_ns: _Floats, middle_ns: float, ends_ns: _Floats) -> _Floats:
    """How far a line that turns about the middle may be off at some times, as it is off by no more than
    `pins_ns` at others. Shape `(times,)`.
    """
    of_end_ns = (ends_ns - middle_ns)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        farther = of_end_ns / (at_ns - middle_ns)
    pinned_ns: _Floats = np.where(farther > 0, np.maximum(farther, 1) * pins_ns, np.inf).min(1)
    return pinned_ns


def _ends_error_ns(at_ns: _Floats, off_ns: _Floats, kept_ns: _Floats, pins_ns: _Floats) -> float:
    """How far a line through ends of collectives may be off at the first or the last of `kept_ns`, where it
    is off by no more than `pins_ns`.
    """
    ends_ns = np.array([kept_ns.min(), kept_ns.max()])
    pinned_ns = _pinned_ns(kept_ns, pins_ns, float(at_ns.mean()), ends_ns)
    return float(np.minimum(_line_errors_ns(at_ns, off_ns, ends_ns), pinned_ns).max())


def _level_error_ns(off_ns: NDArray[np.float64]) -> float:
    """Three standard errors of the mean of some distances."""
    return 3 * math.sqrt(float(off_ns @ off_ns) / (max(len(off_ns) - 2, 1) * len(off_ns)))


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


def _spread(
    own: Meetings, line: Line, common_ns: Int64s, *, is_reference: bool
) -> tuple[Placement, float, float]:
    """How near the ends of the collectives that a clock shares with others are to the common ends: a
    placement without a bound, by how many ns its line may be off at either end, and the median transfer.
    """
    alike = own.of_alike_transfers()
    own = own.of_short_transfers()
    end_ns = line.place_all(own.end_ns)
    off_ns = end_ns - common_ns[own.collective]
    near = _inliers((off_ns - np.median(off_ns)).astype(np.float64))
    # Ends that are no further than a transfer are no mistakes: there its ranks came last, or did not.
    is_dropped = ~near & (np.abs(off_ns) > own.transfer_ns)
    kept_ns, dropped = end_ns[~is_dropped], int(np.count_nonzero(is_dropped))
    times_ns = int(kept_ns.min()), int(kept_ns.max())
    furthest_ns = math.ceil(np.abs(off_ns[near]).max())
    placement = Placement(line, 0, len(own), dropped, *times_ns, residual_ns=furthest_ns)
    drift_ns = 0.0
    if not is_reference:
        pins_ns = _pins_ns(off_ns[~is_dropped].astype(np.float64), own.transfer_ns[~is_dropped])
        drift_ns = _drift_error_ns(alike, line, common_ns, kept_ns, pins_ns)
    return placement, drift_ns, float(np.median(own.transfer_ns))


def _drift_error_ns(own: Meetings, line: Line, common_ns: Int64s, kept_ns: Int64s, pins_ns: _Floats) -> float:
    """By how many ns the line of a clock through some ends may be off at the first or the last of `kept_ns`,
    where it is off by no more than `pins_ns`.
    """
    first_ns, span_ns = int(kept_ns.min()), float(np.ptp(kept_ns))
    end_ns = line.place_all(own.end_ns)
    off_ns = (end_ns - common_ns[own.collective]).astype(np.float64)
    near = _inliers(off_ns - np.median(off_ns))
    at_ns, after_ns = ((ns - first_ns).astype(np.float64) for ns in (end_ns[near], kept_ns))
    error_ns = _ends_error_ns(at_ns, off_ns[near], after_ns, pins_ns)
    if not line.drift_ppb and error_ns * 2_000_000 > CRYSTAL_PPM * span_ns:
        return 2 * _level_error_ns(off_ns[near]) + CRYSTAL_PPM * span_ns / 2_000_000
    return error_ns


def _placements(
    meetings: Meetings, lines: dict[int, Line], common_ns: Int64s, reference: int
) -> Iterator[tuple[int, Placement]]:
    """Each clock in the middle of where it can be."""
    # Which meetings of placed clocks are those of the same collective, by how far they are from its end.
    fits = np.zeros(len(meetings.clock), np.bool_)
    for clock, line in lines.items():
        rows = np.flatnonzero(meetings.clock == clock)
        off_ns = line.place_all(meetings.end_ns[rows]) - common_ns[meetings.collective[rows]]
        inside = _inliers((off_ns - np.median(off_ns)).astype(np.float64)) if len(rows) else off_ns > 0
        fits[rows] = inside | (np.abs(off_ns) <= meetings.transfer_ns[rows])
    fitting = np.bincount(meetings.collective, fits, len(common_ns))
    is_placed = np.isin(meetings.clock, list(lines))
    # Where half of the clocks do not fit, the common end may be as wrong as theirs.
    present = np.bincount(meetings.collective, is_placed, len(common_ns))
    is_common, is_met = 2 * fitting > present, is_placed & (fitting[meetings.collective] - fits > 0)
    of_clock = np.bincount(meetings.clock, is_met & is_common[meetings.collective], max(lines) + 1)
    is_met &= is_common[meetings.collective] | (of_clock[meetings.clock] == 0)
    fits &= is_common[meetings.collective]
    met = meetings.take(is_met)
    spreads = {
        clock: _spread(met.take(met.clock == clock), line, common_ns, is_reference=clock == reference)
        for clock, line in lines.items()
        if (met.clock == clock).any()
    }
    sure = meetings.take(fits)
    clocks = max(lines) + 1
    arrived_ns, left_ns = (_placed_ns(sure.clock, ns, lines) for ns in (sure.arrived_ns, sure.left_ns))
    certain = certain_limits(sure.clock, sure.collective, arrived_ns, left_ns, clocks)
    # They hold where their collectives are, which may be at the other end of a line.
    turns_ns = np.array(
        [spreads[clock][1] if clock in spreads and clock != reference else 0 for clock in range(clocks)]
    )
    certain += turns_ns[:, None] + turns_ns
    apart_ns = np.zeros(clocks)
    for clock, (found, drift_ns, transfer_ns) in spreads.items():
        apart_ns[clock] = (found.residual_ns or 0) + drift_ns + transfer_ns / 2
    likely = likely_limits(met.clock, met.collective, apart_ns, reference)
    sides = against(certain, reference)
    both = against(np.minimum(certain, likely), reference) or against(likely, reference)
    for clock, line in sorted(lines.items()):
        if clock not in spreads or both is None:
            yield clock, Placement(line, 0)
            continue
        (found, drift_ns, _), (early_ns, late_ns) = spreads[clock], (float(side[clock]) for side in both)
        ahead_ns = round((late_ns - early_ns) / 2)
        found = replace(
            found,
            line=replace(line, offset_ns=line.offset_ns + ahead_ns),
            first_ns=found.first_ns + ahead_ns,
            last_ns=found.last_ns + ahead_ns,
        )
        if clock != reference:
            half_ns = (late_ns + early_ns) / 2 + drift_ns
            # How far it can still be moved, after it was moved to later.
            moves_ns = [] if sides is None else [sides[0][clock] + ahead_ns, sides[1][clock] - ahead_ns]
            early, late = (math.ceil(ns) if math.isfinite(ns) else None for ns in moves_ns or [math.inf] * 2)
            bound_ns = math.ceil(half_ns) + 2 * _LEAST_NOISE_NS
            found = replace(found, bound_ns=bound_ns, early_ns=early, late_ns=late)
        yield clock, found


# The clock that came last to a collective limits the others most, and those shortly before it nearly as much.
_LAST: Final = 4
Limits = NDArray[np.float64]
"""By how many ns clock `i` can be moved to later against clock `j`, at `[i, j]`; inf where nothing limits."""


def certain_limits(
    clock: Int64s, collective: Int64s, arrived_ns: Int64s, left_ns: Int64s, clocks: int
) -> Limits:
    """The limits that collectives set to `clocks` clocks. The columns have a row for each clock and
    collective: its last start and its first end, all on one clock as far as that is known.
    """
    limits = np.full((clocks, clocks), np.inf)
    if not len(clock):
        return limits
    order = np.lexsort((-arrived_ns, collective))
    first = np.flatnonzero(np.diff(collective[order], prepend=-1))
    sizes = np.diff(first, append=len(order))
    for nth in range(_LAST):
        last = np.repeat(order[first + np.minimum(nth, sizes - 1)], sizes)
        pair, after_ns = (clock[last], clock[order]), left_ns[order] - arrived_ns[last]
        is_pair = pair[0] != pair[1]
        np.minimum.at(limits, (pair[0][is_pair], pair[1][is_pair]), after_ns[is_pair])
    return limits


def likely_limits(clock: Int64s, collective: Int64s, apart_ns: NDArray[np.float64], reference: int) -> Limits:
    """The limits that hold where two clocks that share collectives are no further apart than the sum of their
    `apart_ns`, of shape `(clocks,)`.
    """
    limits = np.full((len(apart_ns), len(apart_ns)), np.inf)
    order = np.lexsort((clock, clock != reference, collective))
    first = np.flatnonzero(np.diff(collective[order], prepend=-1))
    one, other = np.repeat(clock[order[first]], np.diff(first, append=len(order))), clock[order]
    limits[one, other] = limits[other, one] = apart_ns[one] + apart_ns[other]
    return limits


def against(limits: Limits, reference: int) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """How far each clock can be moved to earlier and to later against one of them, of shapes `(clocks,)`;
    None where limits contradict each other.
    """
    earlier_ns, later_ns = limits[reference].copy(), limits[:, reference].copy()
    earlier_ns[reference] = later_ns[reference] = 0
    for _ in range(len(limits)):
        through = np.minimum(earlier_ns, (earlier_ns[:, None] + limits).min(0))
        back = np.minimum(later_ns, (limits + later_ns).min(1))
        if np.array_equal(through, earlier_ns) and np.array_equal(back, later_ns):
            break
        earlier_ns, later_ns = through, back
    return None if (earlier_ns + later_ns < 0).any() else (earlier_ns, later_ns)
