"""A clock whose rate changes, and pairs of its readings with the true time in them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction

from tracepipe.clocks.maps import ClockPair

SECOND_NS = 1_000_000_000


def ppm(value: float) -> Fraction:
    return Fraction(value) / 1_000_000


@dataclass(frozen=True)
class Rates:
    """A clock whose rate changes again and again: the host's time at each of the clock's, piece by piece."""

    source_ns: tuple[int, ...]
    host_ns: tuple[Fraction, ...]
    rates: tuple[Fraction, ...]

    @classmethod
    def of(cls, drift: float, wander: list[float], piece_ns: int) -> Rates:
        """Runs at 1 - `drift` - `wander` ppm for `piece_ns` each, the last one for ever."""
        at_ns, source_ns, host_ns, rates = Fraction(SECOND_NS), [0], [Fraction(SECOND_NS)], []
        for change in wander:
            rates.append(1 + ppm(drift) + ppm(change))
            at_ns += piece_ns * rates[-1]
            source_ns.append(source_ns[-1] + piece_ns)
            host_ns.append(at_ns)
        return cls(tuple(source_ns), tuple(host_ns), (*rates, rates[-1]))

    def host_at(self, source_ns: int) -> Fraction:
        """The host's clock when this one came to `source_ns`."""
        piece = bisect_right(self.source_ns, source_ns) - 1
        return self.host_ns[piece] + (source_ns - self.source_ns[piece]) * self.rates[piece]

    def pair(self, source_ns: int, before_ns: int, after_ns: int) -> ClockPair:
        """A pair whose interval has the true time in it, anywhere."""
        host_ns = self.host_at(source_ns)
        low, high = int(host_ns) - before_ns, -int(-host_ns // 1) + after_ns
        return ClockPair.of({"source_ns": source_ns, "host_lo_ns": low, "host_hi_ns": high})
