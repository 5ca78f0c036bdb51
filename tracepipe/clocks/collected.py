"""The clock pairs of a recording: all of them, or as many as memory allows."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from tracepipe.clocks.pairs import PART, ClockPair, GrowingPairs, Pairs, cut, numbers

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
            self._thin()

    def _thin(self) -> None:
        clock, growing = max(self._growing.items(), key=lambda one: len(one[1]))
        kept = GrowingPairs(thinned(growing.columns()))
        self._count -= len(growing) - len(kept)
        self._growing[clock] = kept
        self.is_thinned = True

    def take(self) -> Iterator[tuple[str, Pairs]]:
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
