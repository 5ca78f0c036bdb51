"""Times of warps finer than the steps of %globaltimer, by the cycles that their SM counted.

%globaltimer moves in steps of 32 ns or 1 µs; %clock64 counts every cycle of an SM, from no known time on. A
line of ns over cycles, of one rate in a batch and an offset for each SM, must lead through the step of each
reading: many readings leave it little room.

    ns │            ┌──▟──   a step is what was read, the line says where in it
       │      ┌──▟──┘
       │   ▟──┘
       └───────────── cycles

No time leaves the step that was read, so that none contradicts the readings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from statistics import median_low
from typing import Any

# A rate is in ns for 2²⁸ cycles, so that it is a short integer: over 0.1 s of a batch that rounds off 0.4 ns.
_RATE_BITS = 28
# The greatest common divisor of so many different readings is the step, but for one time in 2¹⁶.
READINGS_FOR_STEP = 16
# A line stands where at most one in so many readings of its SM is beside it: a warp may be held up between
# reading ns and reading cycles.
READINGS_PER_STRAY = 8
# For the rate all readings of so many SMs are looked through, so many times.
SMS_FOR_RATE, ROUNDS = 16, 2
# Two readings nearer to each other than such a part of the batch say less of the rate than of how far apart
# their clocks were read.
NEAR = 8
# No slot is taken again as soon as this after a warp has left it: the SM sets up a block first.
SLOT_REST_NS = 64
# The two clocks are not read at once: by such a part of a step readings of an SM may contradict each other.
APART = 4

Reading = tuple[int, int]
"""Cycles, ns."""
Offs = dict[int, list[int]]
"""How far the readings of each SM are above a line, ns."""
Span = tuple[int, int]
"""At least, at most."""
Slot = tuple[int, int]
"""SM, slot."""
Found = tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]
"""Entries and exits, each as found and as read, ns after the base."""


@dataclass(slots=True)
class Readings:
    """All entries or all exits of a batch: ns after its base, cycles, and which of them each SM has."""

    ns: Sequence[int]
    clk: Sequence[int]
    sms: Sequence[int]
    of_sm: dict[int, list[int]]

    def at(self, index: int) -> Reading:
        """One of them."""
        return self.clk[index], self.ns[index]

    def off_line(self, rate: int, from_clk: int) -> list[int]:
        """How far each is above a line of that rate that is at 0 ns at `from_clk`."""
        return [
            ns - ((clk - from_clk) * rate >> _RATE_BITS) for ns, clk in zip(self.ns, self.clk, strict=True)
        ]

    def tightest(self, sm: int, rate: int, step_ns: int) -> list[Span]:
        """The rates that the two of an SM's readings allow that are furthest off a line of that rate."""
        ats = self.of_sm.get(sm, [])
        if len(ats) < 2:
            return []
        off = [self.ns[at] - (self.clk[at] * rate >> _RATE_BITS) for at in ats]
        ends = [self.at(ats[off.index(end)]) for end in (min(off), max(off))]
        if abs(ends[0][0] - ends[1][0]) * NEAR < abs(self.clk[ats[0]] - self.clk[ats[-1]]):
            return []
        return _rates(min(ends), max(ends), step_ns)


def _by_sm(sms: Iterable[int]) -> dict[int, list[int]]:
    of_sm: dict[int, list[int]] = {}
    for at, sm in enumerate(sms):
        if sm in of_sm:
            of_sm[sm].append(at)
        else:
            of_sm[sm] = [at]
    return of_sm


def _rates(first: Reading, last: Reading, slack_ns: int) -> list[Span]:
    """The rates of lines through both, each of which may stand up to `slack_ns` beside the other's line; none
    where they are not apart.
    """
    clk, ns = last[0] - first[0], last[1] - first[1]
    if clk <= 1:
        return []
    least_ns, most_ns = max(0, ns - slack_ns), max(0, ns + slack_ns)
    return [((least_ns << _RATE_BITS) // (clk + 1), (most_ns << _RATE_BITS) // (clk - 1))]


def _agreed(spans: Sequence[Span]) -> tuple[int, int, int]:
    """At least, best, at most: what all allow, or between what they contradict each other about."""
    low, high = max(span[0] for span in spans), min(span[1] for span in spans)
    if low <= high:
        return low, (low + high) // 2, high
    closest = sorted(spans, key=lambda span: span[1] - span[0])[: len(spans) // 2 + 1]
    return high, median_low((low + high) // 2 for low, high in closest), low


class SmClocks:
    """The clocks of one GPU's SMs. Batches come one after the other: what one shows serves the next."""

    def __init__(self) -> None:
        self._step_ns = self._readings = 0
        self._origin_ns: int | None = None
        self._first: dict[int, Reading] = {}
        self._left: tuple[dict[Slot, int], dict[Slot, int]] = ({}, {})

    def refine(self, base_ns: int, batch: dict[str, Any]) -> tuple[list[int], list[int]] | None:
        """`entry_ns` and `exit_ns` of a batch, finer than they were read; None where they cannot be."""
        sms, entry_clk, exit_clk = (batch.get(name) for name in ("sm", "entry_clk", "exit_clk"))
        if sms is None or entry_clk is None or exit_clk is None:
            return None
        entry_ns, counts = batch["entry_ns"], batch.get("exit_count")
        warps: Sequence[int] = range(len(entry_ns))
        if counts is not None:
            warps = [at for at, count in enumerate(counts) for _ in range(count)]
        left_ns = [entry_ns[at] + ns for at, ns in zip(warps, batch["exit_ns"], strict=True)]
        step_ns = self._step(base_ns, entry_ns, left_ns)
        if step_ns <= 1:
            return None
        left_clk = [entry_clk[at] + clk for at, clk in zip(warps, exit_clk, strict=True)]
        entries = Readings(entry_ns, entry_clk, sms, _by_sm(sms))
        exits = Readings(left_ns, left_clk, sms, entries.of_sm)
        if counts is not None:
            exits.sms = [sms[at] for at in warps]
            exits.of_sm = _by_sm(exits.sms)
        rate = self._rate(base_ns, entries, exits, step_ns)
        if rate is None:
            return None
        entered, left = _on_lines(entries, exits, rate, step_ns)
        if "slot" in batch and step_ns > SLOT_REST_NS:
            self._take_turns(base_ns, batch, ((entered, entry_ns), (left, left_ns)), warps)
        from_ns = entered if counts is None else [entered[at] for at in warps]
        return entered, [to - since if to > since else 0 for to, since in zip(left, from_ns, strict=True)]

    def _step(self, base_ns: int, entry_ns: Sequence[int], left_ns: Sequence[int]) -> int:
        """The step of %globaltimer, as all readings so far show it; 0 while they are too few."""
        if self._origin_ns is None:
            self._origin_ns = base_ns
        self._step_ns = gcd(self._step_ns, base_ns - self._origin_ns, *entry_ns, *left_ns)
        if self._readings < READINGS_FOR_STEP:
            self._readings += len(set(entry_ns).union(left_ns))
        return self._step_ns if self._readings >= READINGS_FOR_STEP else 0

    def _rate(self, base_ns: int, entries: Readings, exits: Readings, step_ns: int) -> int | None:
        """The rate of a batch, None where it shows none. That since an earlier batch is known best: it counts
        as long as the batch's own readings allow it.
        """
        own: list[Span] = []
        since: list[Span] = []
        firsts: dict[int, Reading] = {}
        for sm, entered in entries.of_sm.items():
            first, left = entries.at(entered[0]), exits.of_sm.get(sm, [])
            own += _rates(first, entries.at(entered[-1]), step_ns)
            if left:
                own += _rates(exits.at(left[0]), exits.at(left[-1]), step_ns)
                # An exit may read its two clocks in another order than an entry.
                own += _rates(first, exits.at(left[-1]), 2 * step_ns)
            firsts[sm] = first[0], first[1] + base_ns
            if sm in self._first:
                since += _rates(self._first[sm], firsts[sm], step_ns)
        if not own:
            return None
        low, _, high = _agreed(own)
        least, _, most = _agreed(since) if since else (0, 0, 0)
        if least <= high and low <= most:
            self._first = firsts | self._first
            own += since
        else:
            self._first = firsts
        rate = _agreed(own)[1]
        for _ in range(ROUNDS):
            for sm in list(entries.of_sm)[:SMS_FOR_RATE]:
                own += entries.tightest(sm, rate, step_ns) + exits.tightest(sm, rate, step_ns)
            rate = _agreed(own)[1]
        return rate

    def _take_turns(self, base_ns: int, batch: dict[str, Any], found: Found, warps: Sequence[int]) -> None:
        """Let no warp enter before the one left that an earlier batch has in its slot, in the same step."""
        (entered, entry_ns), (left, left_ns) = found
        slots = list(zip(batch["sm"], batch["slot"], strict=True))
        read_of, free_of = self._left
        read_at = map(read_of.get, slots)
        for at, (ns, read) in enumerate(zip(entry_ns, read_at, strict=True)):
            if read == ns + base_ns:
                entered[at] = max(entered[at], free_of[slots[at]] - base_ns)
        if not isinstance(warps, range):
            slots = [slots[at] for at in warps]
        read_of.update(zip(slots, [ns + base_ns for ns in left_ns], strict=True))
        free_of.update(zip(slots, [ns + base_ns for ns in left], strict=True))


def _lag(entered: Offs, left: Offs, step_ns: int) -> int:
    """How much later than an entry an exit reads %globaltimer after its SM's clock; 0 where that can be."""
    sms = [sm for sm in entered if sm in left]
    if not sms:
        return 0
    low = max(max(left[sm]) - min(entered[sm]) for sm in sms) - step_ns
    high = min(min(left[sm]) - max(entered[sm]) for sm in sms) + step_ns
    if low - high <= step_ns // APART:
        return max(min(low, high), min(0, max(low, high)))
    return median_low(median_low(left[sm]) - median_low(entered[sm]) for sm in sms)


def _on_lines(entries: Readings, exits: Readings, rate: int, step_ns: int) -> tuple[list[int], list[int]]:
    """Times of entries and exits on the lines of their SMs, each in its step; as read where no line fits."""
    from_clk = min(entries.clk)
    offs = [readings.off_line(rate, from_clk) for readings in (entries, exits)]
    own = [
        {sm: [off[at] for at in ats] for sm, ats in readings.of_sm.items()}
        for readings, off in zip((entries, exits), offs, strict=True)
    ]
    lag_ns = _lag(own[0], own[1], step_ns)
    lines: dict[int, int] = {}
    for sm, off in own[0].items():
        off += [late - lag_ns for late in own[1].get(sm, ())]
        low, high = min(off), max(off)
        fits = high - low < step_ns + step_ns // APART
        lines[sm] = (low + high + step_ns - 1) // 2 if fits else _median_line(off, step_ns)
    exit_lines = {sm: line_ns + lag_ns for sm, line_ns in lines.items()} if lag_ns else lines
    return _put(entries, offs[0], lines, step_ns), _put(exits, offs[1], exit_lines, step_ns)


def _put(readings: Readings, off: list[int], lines: dict[int, int], step_ns: int) -> list[int]:
    """Readings moved up to the lines of their SMs, and not out of their steps."""
    line_of = map(lines.__getitem__, readings.sms)
    return [
        ns + (more if 0 <= (more := line_ns - off_ns) < step_ns else 0 if more < 0 else step_ns - 1)
        for ns, off_ns, line_ns in zip(readings.ns, off, line_of, strict=True)
    ]


def _median_line(off: list[int], step_ns: int) -> int:
    """Where a line leads through the steps of most of an SM's readings; below them all if of too few."""
    line_ns = median_low(off) + step_ns // 2
    strays = sum(not 0 <= line_ns - ns < step_ns for ns in off)
    return line_ns if strays * READINGS_PER_STRAY <= len(off) else min(off) - step_ns
