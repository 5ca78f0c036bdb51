"""Times of warps finer than the steps of %globaltimer, from the cycles that their SM counted.

%globaltimer moves in steps of 32 ns or 1 µs; %clock64 counts every cycle of an SM, from an unknown start. A
line of ns over cycles, with one rate in a batch and an offset for each SM, must pass through the step of each
reading: many readings determine it well.

    ns │            ┌──▟──   a step is what was read, the line says where in the step
       │      ┌──▟──┘
       │   ▟──┘
       └───────────── cycles

No time is outside of the step that was read, so none contradicts the readings.

All numbers are 64-bit integers. `LIMIT` limits the input: results are at most 32 times as large.
`native/sm_clock.c` does the same in C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np

from tracepipe.event.columns import Bools, Bytes, Int64s, distinct
from tracepipe.native import checked, owned
from tracepipe.native.signatures import Batches


class WarpReadings(NamedTuple):
    """The readings of the warps of a batch: columns `(warps,)` or, of the exits, `(exits,)`."""

    entry_ns: Int64s
    exit_ns: Int64s
    sm: Int64s
    slot: Int64s | None
    entry_clk: Int64s
    exit_clk: Int64s
    exit_count: Int64s | None


# A rate is in ns per 2²⁸ cycles, as a short integer. Rounding it costs 0.4 ns over a batch of 0.1 s.
_RATE_BITS = 28
# ns (9 years) and cycles (4 years) of the input are at least -LIMIT and below LIMIT.
LIMIT = 1 << 58
SM_LIMIT, SLOT_BITS = 1 << 16, 12
BASE_LIMIT_NS, NO_TIME = 1 << 62, -(1 << 62)
# 17 s a cycle. A limit of a rate may be far above any rate, as that of two readings one cycle apart.
BOUND_LIMIT = 1 << 62
# The greatest common divisor of this many different readings is the step, except once in 2¹⁶ times.
READINGS_FOR_STEP = 16
# A line is accepted if at most one in this many readings of its SM is off it: a warp may be delayed between
# its two readings.
READINGS_PER_STRAY = 8
# The rate is narrowed by all readings of SMS_FOR_RATE SMs, in ROUNDS rounds.
SMS_FOR_RATE, ROUNDS = 16, 2
# Two readings nearer to each other than this part of the batch tell less about the rate than about the time
# between the reads of the two clocks.
NEAR = 8
# No slot is used again within this time after a warp has left it, as the SM sets up a block first.
SLOT_REST_NS = 64
# The two clocks are not read at the same time: readings of an SM may contradict each other by this part of a
# step.
APART = 4


@dataclass(slots=True)
class BySm:
    """Which warps, or which exits, each SM has."""

    order: Int64s
    """Their places in the batch, SM after SM; those of one SM in the order of the batch."""
    sms: Int64s
    """The SMs that have any, ascending."""
    start: Int64s
    """Where in `order` each SM begins."""
    count: Int64s

    @classmethod
    def of(cls, sm: Int64s) -> BySm:
        """Group by the SM of each warp or exit."""
        order = np.argsort(sm.astype(np.uint16), kind="stable")  # numpy sorts 16 bits in linear time
        ordered = sm[order]
        end = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, len(sm))[: len(sm)]
        start = np.append(0, end[:-1])[: len(sm)]
        return cls(order, ordered[start], start, end - start)

    def each(self, of_sm: Int64s) -> Int64s:
        """The value of its SM for each reading."""
        return np.repeat(of_sm, self.count)

    def first(self, wanted: Bools) -> Int64s:
        """Where in `order` the first wanted reading of each SM is; each SM must have one."""
        at = np.flatnonzero(wanted)
        return at[np.searchsorted(at, self.start)]

    def extremes(self, values: Int64s) -> tuple[Int64s, Int64s]:
        """The lowest and the highest of each SM."""
        return np.minimum.reduceat(values, self.start), np.maximum.reduceat(values, self.start)

    def medians(self, values: Int64s) -> Int64s:
        """The lower median of each SM."""
        order = np.argsort(values)
        order = order[np.argsort(self.each(np.arange(len(self.sms))).astype(np.uint16)[order], kind="stable")]
        medians: Int64s = values[order[self.start + (self.count - 1) // 2]]
        return medians


@dataclass(slots=True)
class Readings:
    """All entries or all exits of a batch, SM after SM: ns after its base, cycles."""

    ns: Int64s
    clk: Int64s
    by_sm: BySm

    @classmethod
    def of(cls, ns: Int64s, clk: Int64s, by_sm: BySm) -> Readings:
        """Make readings of the columns of a batch."""
        return cls(ns[by_sm.order], clk[by_sm.order], by_sm)

    def only(self, sms: Container[int]) -> Readings:
        """The readings of some SMs."""
        kept = np.array([sm in sms for sm in self.by_sm.sms.tolist()], np.bool_)
        at = np.flatnonzero(np.repeat(kept, self.by_sm.count))
        count = self.by_sm.count[kept]
        by_sm = BySm(self.by_sm.order[at], self.by_sm.sms[kept], np.cumsum(count) - count, count)
        return Readings(self.ns[at], self.clk[at], by_sm)

    def off_line(self, rate: int, from_clk: int) -> Int64s:
        """The height of each reading above a line of that rate that is at 0 ns at `from_clk`."""
        # In Python integers, as the product may have more than 64 bits.
        clk = (self.clk - from_clk).astype(object)
        return self.ns - (clk * rate >> _RATE_BITS).astype(np.int64)

    def tightest(self, rate: int) -> tuple[Int64s, Int64s]:
        """Cycles and ns between the two readings of each SM that are furthest from a line; 0 if too near."""
        start, count = self.by_sm.start, self.by_sm.count
        if not len(start):
            return start, start
        off = self.off_line(rate, 0)
        lowest, highest = (
            self.by_sm.first(off == self.by_sm.each(extreme)) for extreme in self.by_sm.extremes(off)
        )
        clk, ns = self.clk[highest] - self.clk[lowest], self.ns[highest] - self.ns[lowest]
        batch_clk = np.abs(self.clk[start + count - 1] - self.clk[start])
        clk[np.abs(clk) * NEAR < batch_clk] = 0
        return np.abs(clk), np.where(clk < 0, -ns, ns)


@dataclass(slots=True)
class Spans:
    """Lower and upper limits of the rate, a pair for each two readings."""

    low: Int64s
    high: Int64s

    @classmethod
    def of(cls, clk: Int64s, ns: Int64s, slack_ns: Int64s | int) -> Spans:
        """The limits of the rates of lines through two readings with these distances, each of which may be up
        to `slack_ns` off the line. None are added where the readings are at the same cycle.
        """
        apart = clk > 1
        least_ns, most_ns = (np.maximum(ns + slack, 0)[apart] for slack in (-slack_ns, slack_ns))
        clk = clk[apart]
        # A limit that is not an int64 is no limit.
        kept = most_ns // (clk - 1) < BOUND_LIMIT >> _RATE_BITS
        # In Python integers, as times half a minute from an earlier batch on need more than 64 bits.
        least_ns, most_ns, clk = (column[kept].astype(object) for column in (least_ns, most_ns, clk))
        low, high = (least_ns << _RATE_BITS) // (clk + 1), (most_ns << _RATE_BITS) // (clk - 1)
        return cls(low.astype(np.int64), high.astype(np.int64))

    def __add__(self, other: Spans) -> Spans:
        return Spans(np.concatenate((self.low, other.low)), np.concatenate((self.high, other.high)))

    def agreed(self) -> tuple[int, int, int]:
        """The lowest, best and highest rate that all limits allow, or between which they contradict."""
        low, high = int(self.low.max()), int(self.high.min())
        if low <= high:
            return low, (low + high) // 2, high
        closest = np.argsort(self.high - self.low, kind="stable")[: len(self.low) // 2 + 1]
        return high, _median_low((self.low[closest] + self.high[closest]) // 2), low


def _median_low(values: Int64s) -> int:
    middle = (len(values) - 1) // 2
    return int(np.partition(values, middle)[middle])


class SmClocks:
    """The clocks of one GPU's SMs. Each batch uses what earlier ones showed."""

    def __init__(self) -> None:
        self._step_ns = self._readings = 0
        self._origin_ns: int | None = None
        # The first reading of each SM since the rate last changed.
        self._has_first = np.zeros(SM_LIMIT, np.bool_)
        self._first_clk, self._first_ns = np.zeros((2, SM_LIMIT), np.int64)
        # When the last warp of each slot left, as read and as computed.
        self._slots: dict[int, int] = {}
        self._left_ns = np.zeros((2, 0), np.int64)

    def refine(self, base_ns: int, warps_read: WarpReadings) -> tuple[Int64s, Int64s] | None:
        """`entry_ns` and `exit_ns` of a batch, finer than they were read; None where they cannot be.

        No finer times are found for numbers outside of the limits
        above. Raises ValueError for columns whose lengths do not agree.
        """
        entry_ns, exit_ns, sm, slot, entry_clk, exit_clk, exit_count = warps_read
        columns = (entry_ns, sm, slot, entry_clk, exit_count), (exit_ns, exit_clk)
        lengths, exits_lengths = ({len(column) for column in some if column is not None} for some in columns)
        if len(lengths) != 1 or len(exits_lengths) != 1 or (exit_count is None and lengths != exits_lengths):
            raise ValueError("the columns of a batch have different lengths")
        count = len(exit_ns)
        # Each alone too: their sum could overflow.
        if exit_count is not None and not (
            _are_within(0, count + 1, exit_count) and exit_count.sum() == count
        ):
            raise ValueError("the counts of exits do not add up to the exits")
        if not (
            _are_within(-LIMIT, LIMIT, entry_ns, exit_ns, entry_clk, exit_clk)
            and _are_within(0, SM_LIMIT, sm)
            and _are_within(0, 1 << SLOT_BITS, slot)
            and 0 <= base_ns < BASE_LIMIT_NS
        ):
            return None
        warps = slice(None) if exit_count is None else np.repeat(np.arange(len(entry_ns)), exit_count)
        left_ns, left_clk = entry_ns[warps] + exit_ns, entry_clk[warps] + exit_clk
        step_ns = self._step(base_ns, entry_ns, left_ns)
        if not 1 < step_ns < LIMIT or not len(sm):
            return None
        by_sm = BySm.of(sm)
        entries = Readings.of(entry_ns, entry_clk, by_sm)
        exits = Readings.of(left_ns, left_clk, by_sm if exit_count is None else BySm.of(sm[warps]))
        rate = self._rate(base_ns, entries, exits, step_ns)
        if rate is None:
            return None
        entered, left = _on_lines(entries, exits, rate, step_ns)
        if slot is not None and step_ns > SLOT_REST_NS:
            rows = self._rows(sm, slot)
            # An entry is moved after the exit of the slot's warp in an earlier batch, within the same step.
            read, free = self._left_ns[:, rows]
            np.maximum(entered, free - base_ns, out=entered, where=read == entry_ns + base_ns)
            # The reading of the last exit from each slot is remembered, and the time found for it.
            slots, last = np.unique(rows[warps][::-1], return_index=True)
            self._left_ns[:, slots] = (np.stack((left_ns, left)) + base_ns)[:, ::-1][:, last]
        return entered, np.maximum(left - entered[warps], 0)

    def _step(self, base_ns: int, entry_ns: Int64s, left_ns: Int64s) -> int:
        """The step of %globaltimer that all readings so far show; 0 while there are too few."""
        if self._origin_ns is None:
            self._origin_ns = base_ns
        read_ns = np.concatenate((entry_ns, left_ns))
        step_ns = gcd(self._step_ns, base_ns - self._origin_ns)
        self._step_ns = int(np.gcd.reduce(read_ns, initial=step_ns))
        if self._readings < READINGS_FOR_STEP:
            self._readings += len(distinct(read_ns))
        return self._step_ns if self._readings >= READINGS_FOR_STEP else 0

    def _rate(self, base_ns: int, entries: Readings, exits: Readings, step_ns: int) -> int | None:
        """The rate of a batch, None where its readings do not show one. The rate since an earlier batch is
        the most precise: it is used as long as the batch's own readings allow it.
        """
        heads = np.argsort(entries.by_sm.order[entries.by_sm.start])  # SMs in the order of their first warps
        own = _own_spans(entries, exits, step_ns, heads)
        if not own.low.size:
            return None
        own += self._since(base_ns, entries, step_ns, heads, own)
        # No line may exceed the limits, whether it starts at 0 cycles or at the first reading, therefore
        # twice.
        longest_clk = 2 * max(int(np.abs(readings.clk).max(initial=0)) for readings in (entries, exits))
        limit = LIMIT // ((longest_clk >> _RATE_BITS) + 1)
        rate = own.agreed()[1]
        place = {sm: at for at, sm in enumerate(entries.by_sm.sms[heads[:SMS_FOR_RATE]].tolist())}
        some = entries.only(place), exits.only(place)
        places = [[place[sm] for sm in readings.by_sm.sms.tolist()] for readings in some]
        for _ in range(ROUNDS):
            if rate >= limit:
                return None
            # Entries and exits of each SM, SM after SM; 0 cycles where an SM has no exit.
            clk, ns = np.zeros((2, len(place), 2), np.int64)
            for at, readings in enumerate(some):
                clk[places[at], at], ns[places[at], at] = readings.tightest(rate)
            own += Spans.of(clk.ravel(), ns.ravel(), step_ns)
            rate = own.agreed()[1]
        return rate if rate < limit else None

    def _since(self, base_ns: int, entries: Readings, step_ns: int, heads: Int64s, own: Spans) -> Spans:
        """The limits from readings of earlier batches, where `own` allows them. Keeps first readings."""
        sms, start = entries.by_sm.sms[heads], entries.by_sm.start[heads]
        clk, ns = entries.clk[start], entries.ns[start] + base_ns
        met = self._has_first[sms]
        old = sms[met]
        since = Spans.of(clk[met] - self._first_clk[old], ns[met] - self._first_ns[old], step_ns)
        low, _, high = own.agreed()
        least, _, most = since.agreed() if since.low.size else (0, 0, 0)
        if least <= high and low <= most:
            sms, clk, ns = sms[~met], clk[~met], ns[~met]
        else:
            self._has_first[:] = False
            since = Spans(clk[:0], clk[:0])
        self._has_first[sms], self._first_clk[sms], self._first_ns[sms] = True, clk, ns
        return since

    def _rows(self, sm: Int64s, slot: Int64s) -> Int64s:
        """The row in `_left_ns` of each warp's slot."""
        slots = self._slots
        rows = [slots.setdefault(place, len(slots)) for place in (sm << SLOT_BITS | slot).tolist()]
        if len(slots) > self._left_ns.shape[1]:
            grown = np.full((2, 2 * len(slots)), NO_TIME)
            grown[:, : self._left_ns.shape[1]] = self._left_ns
            self._left_ns = grown
        return np.array(rows, np.int64)


def _are_within(least: int, limit: int, *columns: Int64s | None) -> bool:
    return all(
        column is None or not len(column) or (least <= column.min() and column.max() < limit)
        for column in columns
    )


def _own_spans(entries: Readings, exits: Readings, step_ns: int, heads: Int64s) -> Spans:
    """The limits from the first and the last readings of each SM, SM after SM."""
    start, count = entries.by_sm.start, entries.by_sm.count
    entry = np.stack((entries.clk, entries.ns))
    first, last = entry[:, start], entry[:, start + count - 1]
    # SMs without an exit get readings that are not apart.
    first_exit, last_exit = first.copy(), first.copy()
    where = np.searchsorted(entries.by_sm.sms, exits.by_sm.sms)
    left, start, count = np.stack((exits.clk, exits.ns)), exits.by_sm.start, exits.by_sm.count
    first_exit[:, where], last_exit[:, where] = left[:, start], left[:, start + count - 1]
    # An exit may read its two clocks in a different order than an entry, therefore twice the slack.
    clk, ns = np.stack((last - first, last_exit - first_exit, last_exit - first), axis=2)[:, heads]
    slack_ns = np.tile(np.array([1, 1, 2]) * step_ns, len(heads))
    return Spans.of(clk.ravel(), ns.ravel(), slack_ns)


def _on_lines(entries: Readings, exits: Readings, rate: int, step_ns: int) -> tuple[Int64s, Int64s]:
    """Times of entries and exits on the lines of their SMs, in their steps; as read where no line fits."""
    from_clk = int(entries.clk.min())
    entered, left = entries.off_line(rate, from_clk), exits.off_line(rate, from_clk)
    rows = np.searchsorted(entries.by_sm.sms, exits.by_sm.sms)
    (low, high), (low_left, high_left) = entries.by_sm.extremes(entered), exits.by_sm.extremes(left)
    lag_ns = 0
    if len(rows):
        # By this an exit reads %globaltimer later after its clock than an entry does; 0 where the readings
        # allow that.
        least_ns = int((high_left - low[rows] - step_ns).max())
        most_ns = int((low_left - high[rows] + step_ns).min())
        if least_ns - most_ns <= step_ns // APART:
            lag_ns = max(min(least_ns, most_ns), min(0, max(least_ns, most_ns)))
        else:  # the SMs contradict each other
            lag_ns = _median_low(exits.by_sm.medians(left) - entries.by_sm.medians(entered)[rows])
    low[rows] = np.minimum(low[rows], low_left - lag_ns)
    high[rows] = np.maximum(high[rows], high_left - lag_ns)
    lines = (low + high + step_ns - 1) // 2
    loose = high - low >= step_ns + step_ns // APART
    if loose.any():
        off = np.concatenate((entered, left - lag_ns))
        row = np.concatenate((entries.by_sm.each(np.arange(len(low))), exits.by_sm.each(rows)))
        kept = loose[row]
        lines[loose] = _median_lines(off[kept], row[kept], low[loose], step_ns)
    return _put(entries, entered, lines, step_ns), _put(exits, left, lines[rows] + lag_ns, step_ns)


def _median_lines(off: Int64s, row: Int64s, low: Int64s, step_ns: int) -> Int64s:
    """Lines through the steps of most of their SM's readings, or below all of them."""
    by_row = BySm.of(row)
    off = off[by_row.order]
    lines = by_row.medians(off) + step_ns // 2
    above = by_row.each(lines) - off
    strays = np.add.reduceat((above < 0) | (above >= step_ns), by_row.start, dtype=np.int64)
    return np.where(strays * READINGS_PER_STRAY <= by_row.count, lines, low - step_ns)


def _put(readings: Readings, off: Int64s, lines: Int64s, step_ns: int) -> Int64s:
    """Readings moved up to the lines of their SMs, but not out of their steps, in the order of the batch."""
    found = np.empty_like(readings.ns)
    above = readings.by_sm.each(lines) - off
    found[readings.by_sm.order] = readings.ns + np.clip(above, 0, step_ns - 1)
    return found


_BAD_LENGTHS = -1
HAS_CLOCKS, HAS_SLOT, HAS_COUNTS = 1, 2, 4
"""Flags for the columns of a batch: those without which no finer times are found, slot, and exit_count."""


class NativeSmClocks:
    """The clocks of one GPU's SMs, as `SmClocks`. Only one thread may use it at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._refine_all = library.tp_sm_clocks_refine_all
        self._clocks = owned(self, library.tp_sm_clocks_new(), library.tp_sm_clocks_free)

    def refine_all(
        self, base_ns: Int64s, warps: Int64s, exits: Int64s, has: Bytes, columns: Sequence[Int64s | None]
    ) -> tuple[Bools, Int64s, Int64s]:
        """Refine several batches, with the number of warps and exits of each. Return which batches
        have finer times, and the entries and exits of all. `columns` are those of `WarpReadings`, batch after
        batch; `has` is which of them each batch has. Raises ValueError for columns whose lengths do not
        agree, TypeError for other than int64.
        """
        counts = (warps, exits, warps, warps, warps, exits, warps)
        sizes = [int(count.sum()) for count in counts]
        addresses = [_address(column, size) for column, size in zip(columns, sizes, strict=True)]
        entered, stayed = np.empty(sizes[0], np.int64), np.empty(sizes[1], np.int64)
        finer = np.empty(len(base_ns), np.bool_)
        of_batches = (column.ctypes.data for column in (base_ns, warps, exits, has))
        done = self._refine_all(
            self._clocks,
            len(base_ns),
            ctypes.byref(Batches(*of_batches, *addresses)),
            *(column.ctypes.data for column in (entered, stayed, finer)),
        )
        if done == _BAD_LENGTHS:
            raise ValueError("the counts of exits do not add up to the exits")
        checked(done)
        return finer, entered, stayed


def _address(column: Int64s | None, count: int) -> int | None:
    if column is None:
        return None
    if column.dtype != np.int64 or not column.flags.c_contiguous:
        raise TypeError(f"a column is {column.dtype}, and must be contiguous int64")
    if column.shape != (count,):
        raise ValueError("the columns of a batch have different lengths")
    return column.ctypes.data
