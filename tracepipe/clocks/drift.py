"""Places the times of a recording on another's clock, by one offset, or by a map if the two drift apart.

What both recordings have in each part of a long time gives a pair of the two clocks, like those of a GPU's
clock. The map through these pairs removes the drift. If one offset is within the bounds of all pairs, no
drift is visible: the offset is used, with a bound that includes the uncertainty of the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tracepipe.clocks.maps import ClockMap, fit
from tracepipe.clocks.pairs import CRYSTAL_PPM, WANDER_PPM, Pairs, most
from tracepipe.clocks.sightings import Agreement
from tracepipe.event.columns import Int64s
from tracepipe.event.model import SourceNs


@dataclass(frozen=True, slots=True)
class Way:
    """Puts times on another clock: by adding `offset_ns`, or by `drift`, which moves the first time by that
    much.
    """

    offset_ns: int
    drift: ClockMap | None = None

    def place_all(self, ns: Int64s) -> Int64s:
        """The times of a column on the other clock, of the same shape."""
        return ns + self.offset_ns if self.drift is None else self.drift.place_all(ns)

    def of_ahead(self, ahead_ns: int, first_ns: int) -> Way:
        """The way of a clock that is ahead of this one's source clock, and whose first time is `first_ns`."""
        if self.drift is None:
            return Way(self.offset_ns - ahead_ns)
        return _along(replace(self.drift, source_ns=self.drift.source_ns + ahead_ns), first_ns)


def _along(drift: ClockMap, first_ns: int) -> Way:
    return Way(drift.place(SourceNs(first_ns)) - first_ns, drift)


def way_by(found: Agreement, other: Way, span: tuple[int, int]) -> tuple[Way, int] | None:
    """The way of a recording with times in `span`, by what it and another recording have, which goes the
    `other` way; and its bound. None where they do not agree.
    """
    even = other.of_ahead(found.ahead_ns, span[0])
    pairs = found.pairs
    drift = None if pairs is None else _fitted(pairs, other)
    if pairs is None or drift is None:
        return (even, found.bound_ns) if found.is_even else None
    is_seen = (
        np.abs(drift.place_all(pairs.source_ns) - even.place_all(pairs.source_ns)) > pairs.uncertainty_ns
    )
    if is_seen.any() or not found.is_even:
        return _along(drift, span[0]), _most_ns(drift, span)
    ns = np.concatenate([pairs.source_ns, np.array(span, np.int64)])
    away_ns = most(drift.place_all(ns) - even.place_all(ns))
    return even, max(found.bound_ns, int(pairs.uncertainty_ns.max()) + away_ns)


def _fitted(pairs: Pairs, other: Way) -> ClockMap | None:
    """The map through pairs of a clock and of one that goes the `other` way. None where clocks do not drift
    like that: these are two runs of one program.
    """
    drift = fit("", Pairs(pairs.source_ns, other.place_all(pairs.host_ns), pairs.uncertainty_ns))
    is_clock = drift.drift_ppm is not None and abs(drift.drift_ppm) <= CRYSTAL_PPM
    return drift if is_clock and 10 * drift.dropped <= drift.pairs else None


def _most_ns(drift: ClockMap, span: tuple[int, int]) -> int:
    """The largest error of a map in a span, also between its pairs."""
    # The rate may change between two pairs, which has most effect in the middle.
    wander_ns = np.diff(drift.source_ns) * WANDER_PPM // 4_000_000 + 1
    inside_ns = np.maximum(drift.from_bound_ns, drift.to_bound_ns)[1:-1] + wander_ns
    return max(most(inside_ns), most(drift.bounds_at(np.array(span, np.int64))))
