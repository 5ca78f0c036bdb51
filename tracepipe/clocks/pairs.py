"""Clock pairs: one instant on a source clock and on the host's, and what pairs say of each other.

A pair's interval is certain, and a clock runs at nearly one rate: what it cannot reach from the intervals of
the other pairs is cut off from each, and what contradicts them all is told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Between and outside its pairs a clock may change its rate (temperature) by this much unseen.
WANDER_PPM = 1
# A rate that is not measured well enough to beat this is taken as 1. Crystals stay within 100 ppm.
CRYSTAL_PPM = 100
# Two pairs closer than this many times their uncertainties would bend durations by over 0.1%.
SPAN_PER_UNCERTAINTY = 1000
# A jump beyond this against a neighbour is no drift but a clock that was set.
JUMP_PPM = 1000
# So many pairs on each side tell how fast a clock runs at a place: over them its rate changes by WANDER_PPM.
NEIGHBOURS = 16
_BILLION = 1_000_000_000
# What the host's clock can show at a place, or how far it can go: at least and at most, ns.
Reach = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ClockPair:
    """One instant on two clocks: source, and the middle and half width of the host's interval, ns."""

    source_ns: int
    host_ns: int
    uncertainty_ns: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> ClockPair:
        """The pair of a `clock` record."""
        low, high = record["host_lo_ns"], record["host_hi_ns"]
        return cls(record["source_ns"], (low + high) // 2, (high - low + 1) // 2)


def _step(pairs: Sequence[ClockPair], at: int) -> Reach:
    """How far the host's clock goes, at least and at most, from pair `at` to the next."""
    a, b = pairs[max(0, at + 1 - NEIGHBOURS)], pairs[min(len(pairs) - 1, at + NEIGHBOURS)]
    span_ns, noise_ns = b.source_ns - a.source_ns, a.uncertainty_ns + b.uncertainty_ns + 1
    gain_ns = b.host_ns - a.host_ns - span_ns
    wander, slowest, fastest = WANDER_PPM * 1_000, -CRYSTAL_PPM * 1_000, CRYSTAL_PPM * 1_000
    if span_ns:
        slowest = max(slowest, (gain_ns - noise_ns) * _BILLION // span_ns - wander)
        fastest = min(fastest, -(-(gain_ns + noise_ns) * _BILLION // span_ns) + wander)
    step_ns = pairs[at + 1].source_ns - pairs[at].source_ns
    return step_ns + step_ns * slowest // _BILLION, step_ns - (-step_ns * fastest // _BILLION)


def _reached(own: Sequence[Reach], steps: Sequence[Reach], joined: Sequence[bool]) -> list[Reach]:
    """Of each interval what the clock can reach from those before; all of it where that is nothing."""
    reached = list(own[:1])
    for (low_ns, high_ns), (least_ns, most_ns), is_joined in zip(own[1:], steps, joined, strict=True):
        from_ns, to_ns = max(low_ns, reached[-1][0] + least_ns), min(high_ns, reached[-1][1] + most_ns)
        reached.append((from_ns, to_ns) if is_joined and from_ns <= to_ns else (low_ns, high_ns))
    return reached


def cut(pairs: Sequence[ClockPair]) -> list[ClockPair]:
    """Pairs in source order, their intervals less what the others rule out.

    From the interval of one pair the clock reaches the next only at the rates that it can have. No cut is
    wrong while the rate changes by no more than WANDER_PPM over NEIGHBOURS on both sides. Where a pair cannot
    be reached it has, or the pair is wrong: around there nothing is cut.
    """
    # A reading is a whole number: the clock passed it up to 1 ns before.
    own = [(pair.host_ns - pair.uncertainty_ns - 1, pair.host_ns + pair.uncertainty_ns) for pair in pairs]
    steps = [_step(pairs, at) for at in range(len(pairs) - 1)]
    joined = [True] * len(steps)
    reached = _reached(own, steps, joined)
    for at, (least_ns, most_ns) in enumerate(steps):
        (from_ns, to_ns), (low_ns, high_ns) = reached[at], own[at + 1]
        if from_ns + least_ns > high_ns or to_ns + most_ns < low_ns:
            around = range(max(0, at - NEIGHBOURS), min(len(steps), at + NEIGHBOURS + 1))
            joined[around.start : around.stop] = [False] * len(around)
    forward = _reached(own, steps, joined)
    back = [(-high_ns, -low_ns) for low_ns, high_ns in reversed(forward)]
    back = _reached(back, steps[::-1], joined[::-1])
    cut = []
    for pair, (after_ns, before_ns) in zip(pairs, reversed(back), strict=True):
        low_ns = max(-before_ns, pair.host_ns - pair.uncertainty_ns)
        high_ns = min(1 - after_ns, pair.host_ns + pair.uncertainty_ns)
        middle_ns = (low_ns + high_ns) // 2
        cut.append(ClockPair(pair.source_ns, middle_ns, high_ns - middle_ns))
    return cut


def consistent(pairs: Sequence[ClockPair]) -> list[ClockPair]:
    """Pairs in source order, less those too close to a better one and those that jump against the rest."""
    kept: list[ClockPair] = []
    for pair in pairs:
        while kept:
            last = kept[-1]
            source_ns, host_ns = pair.source_ns - last.source_ns, pair.host_ns - last.host_ns
            noise_ns = pair.uncertainty_ns + last.uncertainty_ns + 1
            jumps = abs(host_ns - source_ns) > noise_ns + source_ns * JUMP_PPM // 1_000_000
            if source_ns >= SPAN_PER_UNCERTAINTY * noise_ns and not jumps:
                kept.append(pair)
            elif pair.uncertainty_ns < last.uncertainty_ns and not (jumps and len(kept) > 1):
                kept.pop()
                continue
            break
        else:
            kept.append(pair)
    return kept


def _off_line_ns(a: ClockPair, b: ClockPair, c: ClockPair) -> int:
    """How far `b` may lie off the line through `a` and `c`; 0 where that is explained: by their uncertainties
    and, where `b` is not between them, by the rate on its way there.
    """
    from_ns, span_ns = b.source_ns - a.source_ns, c.source_ns - a.source_ns
    beyond_ns = max(0, -from_ns, from_ns - span_ns)
    line_ns = a.host_ns + from_ns * (c.host_ns - a.host_ns) // span_ns
    open_ns = max(a.uncertainty_ns, c.uncertainty_ns)
    open_ns -= -beyond_ns * (2 * open_ns * 1_000_000 + WANDER_PPM * span_ns) // (span_ns * 1_000_000)
    # Readings and the line are whole numbers: 2 ns.
    explained_ns = b.uncertainty_ns + open_ns + 2
    off_ns = abs(b.host_ns - line_ns)
    return off_ns + explained_ns if off_ns > explained_ns else 0


def bend_ns(pairs: Sequence[ClockPair], at: int) -> int:
    """What a bend of the clock may add to the error beside pair `at`, as its neighbours show it. At an end
    they are the next two: it may be that pair which is wrong.
    """
    if len(pairs) < 3:
        return 0
    a, b, c = pairs[(middle := min(max(1, at), len(pairs) - 2)) - 1 : middle + 2]
    if at < middle:
        return _off_line_ns(b, a, c)
    return _off_line_ns(a, c, b) if at > middle else _off_line_ns(a, b, c)


def jump_ns(a: ClockPair, b: ClockPair) -> int:
    """How far `a` and `b` may be off where no clock goes from one to the other; 0 where one does."""
    length_ns, noise_ns = b.source_ns - a.source_ns, a.uncertainty_ns + b.uncertainty_ns + 1
    gain_ns, crystal_ns = abs(b.host_ns - a.host_ns - length_ns), length_ns * CRYSTAL_PPM // 1_000_000
    return gain_ns + crystal_ns if gain_ns > crystal_ns + noise_ns else 0


def bend_ppm(pairs: Sequence[ClockPair], end: ClockPair) -> int:
    """How far the rate at one end may be off the overall rate, as the pairs between the ends show it."""
    first, last = pairs[0], pairs[-1]
    return max(
        (
            -(-_off_line_ns(first, pair, last) * 1_000_000 // abs(end.source_ns - pair.source_ns))
            for pair in pairs[1:-1]
        ),
        default=0,
    )
