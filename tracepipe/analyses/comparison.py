"""The differences between the recordings of two sides, and which exceed those between recordings of one side.

The permutation test: a recording is one observation, however many events it has, as load, clocks and
addresses differ between runs, and affect all events of a run. The only assumption is that each recording
could have been on either side if the sides do not differ. All divisions of the recordings into two sides are
then equally likely, and the largest difference in each division shows how large it gets by chance (Westfall
and Young's maximum statistic).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import ceil, comb
from typing import Any, NamedTuple

from tracepipe.analyses.measures import (
    DECIDED_BY_PROGRAM,
    EXITS,
    KINDS,
    LAYER_OF,
    MEASURES,
    Key,
    Kind,
    Measured,
)
from tracepipe.event.columns import Bools, Floats, Int64s, Ints
from tracepipe.event.groups import largest
from tracepipe.libraries import np

# The most divisions of the recordings that are tried; of more, a random sample is.
_WAYS_MAX = 500
_SEED = 1
# Scores that differ by less than this share are equal: they differ by rounding.
_ROUNDING = 1e-9


def ways(count_a: int, count_b: int) -> int:
    """The number of ways to divide the recordings into two sides, which are interchangeable."""
    every = comb(count_a + count_b, count_a)
    return every // 2 if count_a == count_b else every


def enough(alpha: float) -> int:
    """The least number of recordings of each side with which p can be as small as `alpha`."""
    count = 2
    while ways(count, count) * alpha < 1:
        count += 1
    return count


def _divisions(count_a: int, count_b: int, alpha: float) -> Bools:
    """For each division, which recordings are on the first side, shape `(divisions, recordings)`. The first
    division is the real one.
    """
    count = count_a + count_b
    most = max(_WAYS_MAX, ceil(1 / alpha))
    if (every := ways(count_a, count_b)) <= most:
        divided: Bools = np.zeros((every, count), np.bool_)
        for division, some in zip(divided, combinations(range(count), count_a), strict=False):
            division[list(some)] = True
        return divided
    draw = np.random.default_rng(_SEED)
    recorded = np.arange(count) < count_a
    return np.array([recorded, *(draw.permutation(recorded) for _ in range(most - 1))])


def middle(values: Floats) -> tuple[Floats, Floats]:
    """The median of each row, and the mean distance of its values from the median. `values` has the shape
    `(rows, recordings)`, the results `(rows,)`.
    """
    ordered = np.sort(values, axis=1)
    count = ordered.shape[1]
    medians = (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2
    return medians, np.abs(ordered - medians[:, None]).mean(axis=1)


def _scores(a: Floats, b: Floats, floors: Floats) -> Floats:
    """The difference of the medians divided by the spread, row by row. Shape `(rows,)`."""
    (median_a, spread_a), (median_b, spread_b) = middle(a), middle(b)
    differences = np.abs(median_b - median_a)
    spreads = np.maximum(spread_a + spread_b, floors)
    found = np.zeros(len(differences))
    np.divide(differences, spreads, out=found, where=spreads > 0)
    found[(spreads == 0) & (differences > 0)] = np.inf
    return found


class Comparison:
    """All comparisons between two sides, as one family of tests: `add` all values, then ask for `p`."""

    def __init__(self, count_a: int, count_b: int, alpha: float) -> None:
        self.has_spread = count_a + count_b > 2
        """Whether a side has several recordings. With one each, nothing shows what chance causes."""
        self._divisions = _divisions(count_a, count_b, alpha)
        # For each division, the largest score of all values that were added.
        self._largest = np.zeros(len(self._divisions))

    @property
    def least_p(self) -> float:
        """The smallest p that any difference can have."""
        return 1 / len(self._divisions)

    def add(self, values: Floats, floors: Floats) -> Floats:
        """Add rows of values and return their scores: the difference of the medians of both sides, divided by
        the spread, or by the row's floor where that is larger.

        `values` has the shape `(rows, recordings)`, the recordings of A first; `floors` and the result have
        the shape `(rows,)`. The spread is the mean distance of the recordings from the median of their side,
        both sides added.
        """
        scores = np.zeros(len(values))
        # Where all recordings differ by less than the floor, no division has a score above 1.
        some = np.flatnonzero(np.ptp(values, axis=1) > floors)
        values, floors = values[some], floors[some]
        for at, first in enumerate(self._divisions if len(some) else ()):
            found = _scores(values[:, first], values[:, ~first], floors)
            self._largest[at] = max(self._largest[at], found.max())
            if at == 0:
                scores[some] = found
        return scores

    def p(self, scores: Floats) -> Floats:
        """The chance that the largest of all scores is at least this large, if the sides do not differ."""
        ordered = np.sort(self._largest)
        above = len(ordered) - np.searchsorted(ordered, np.asarray(scores) * (1 - _ROUNDING))
        return above / len(ordered)


# The figures of a name that are compared, and the least spread in ns that is assumed.
_TESTED = ("p50_ns", "p95_ns", "count")
_LEAST_NS = 1.0


class Sizes(NamedTuple):
    """The number of recordings of A and of B."""

    a: int
    b: int


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of both sides: a value for each recording, shapes `(recordings,)`, NaN where it is not
    known.

    `score` is the difference divided by the spread, None where it was not compared. `p` is the chance of such
    a score, None where the difference does not exceed the spread, or there is no spread.
    """

    a: Floats
    b: Floats
    score: float | None
    p: float | None

    @property
    def medians(self) -> tuple[float | None, float | None]:
        """The medians of A and of B."""
        return _median(self.a), _median(self.b)

    @property
    def change(self) -> float | None:
        """The median of B less that of A."""
        a, b = self.medians
        return None if a is None or b is None else b - a

    def percent(self, change: float | None) -> float | None:
        """A difference in percent of the median of A."""
        before = self.medians[0]
        return 100 * change / before if change is not None and before else None

    @property
    def percent_bounds(self) -> tuple[float | None, float | None]:
        """The least and the greatest change from a recording of A to one of B, in percent of the former."""
        if self.change is None or np.nanmin(self.a) <= 0:
            return None, None
        ratios = np.nanmin(self.b) / np.nanmax(self.a), np.nanmax(self.b) / np.nanmin(self.a)
        return float(100 * (ratios[0] - 1)), float(100 * (ratios[1] - 1))

    @property
    def spread(self) -> float | None:
        """The mean distance of the recordings from the median of their side, both sides added."""
        if self.change is None:
            return None
        return sum(float(middle(side[~np.isnan(side)][None])[1][0]) for side in (self.a, self.b))


def _median(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


@dataclass(frozen=True, slots=True)
class Change:
    """One name on both sides: its figures by the names of `MEASURES`, and the names of those that differ."""

    key: Key
    figures: dict[str, Difference]
    differs: frozenset[str]

    @property
    def total_ns(self) -> int:
        """The change of the total time in ns."""
        return round(self.figures["total_ns"].change or 0)

    @property
    def counts(self) -> tuple[float, float]:
        """The median counts of A and of B."""
        a, b = self.figures["count"].medians
        return a or 0, b or 0

    @property
    def only_in(self) -> str:
        """The only side whose recordings have the name; empty where both sides have it."""
        count = self.figures["count"]
        return "B" if not count.a.any() else "A" if not count.b.any() else ""


class Changes:
    """All names of the recordings, each a row of columns. A `Change` is made only of those that are shown.

    Call `add` for each recording, then `compare`. Flags and columns have the shape `(rows,)`.
    """

    def __init__(self, sizes: Sizes, alpha: float, least: float) -> None:
        self.sizes, self._alpha, self._least = sizes, alpha, least
        self.comparison = Comparison(*sizes, alpha)
        # The names of each kind, with their numbers.
        self._names: dict[Kind, dict[str, int]] = {kind: {} for kind in KINDS}
        self._added: list[tuple[Sequence[int], Kind, list[int], dict[str, Any]]] = []
        # The first row of each kind; the rows of a kind follow those of the kind before.
        self._starts: list[int] = []
        self._keys: list[Key] = []
        self._figures: dict[str, Floats] = {}
        """The figures by the names of `MEASURES`, shapes `(rows, recordings)`."""
        self._scores: dict[str, Floats] = {}
        self.differs: dict[str, Bools] = {}
        """For the median length, the tail and the count, by the names of `MEASURES`, flags for the rows that
        differ by more than the spread; where enough recordings allow it, only those that do not differ by
        chance. The tail of a row is only flagged where its median is not."""

    def add(self, recordings: Sequence[int], found: dict[Kind, Measured]) -> None:
        """Add the names of a recording, which may be dropped afterwards. It is at each of these places."""
        for kind, of in found.items():
            numbers = self._names[kind]
            rows = [numbers.setdefault(name, len(numbers)) for name in of.names]
            self._added.append((recordings, kind, rows, of.values))

    def compare(
        self,
        left_out: Collection[str],
        lost: Counter[str],
        totals: Sequence[tuple[str, Sequence[int | None]]],
    ) -> list[Difference]:
        """Compare all names, except those of the layers in `left_out`, and the totals, each given as a layer
        of records and one value for each recording. Return the differences of the totals.

        `lost` has the most events of each layer of records that a recording lost: no smaller difference
        between counts is reported, and none between totals.
        """
        for kind, names in self._names.items():
            self._starts.append(len(self._keys))
            layer, suffix = kind
            if layer not in left_out:
                self._keys += [(layer, name + suffix) for name in names]
        shape = len(self), sum(self.sizes)
        self._figures = {name: np.full(shape, np.nan if name[0] == "p" else 0.0) for name in MEASURES}
        for recordings, kind, rows, values in self._added:
            if kind[0] not in left_out:
                places = np.array(rows, np.int64)[:, None] + self._starts[KINDS.index(kind)]
                for name in MEASURES:
                    self._figures[name][places, recordings] = values[name][:, None]
        self._added.clear()
        of_totals = np.array([values for _, values in totals], np.float64)
        known = ~np.isnan(of_totals).any(axis=1) & np.array(
            [not lost[layer] for layer, _ in totals], np.bool_
        )
        scores = np.zeros(len(totals))
        some = of_totals[known]
        scores[known] = self.comparison.add(some, self._floors(some))
        for name in _TESTED:
            self._scores[name] = self._compared(name, lost)
        for name, found in self._scores.items():
            self.differs[name] = found > 1
            if self.can_claim:
                self.differs[name] &= self.comparison.p(found) <= self._alpha
        self.differs["p95_ns"] &= ~self.differs["p50_ns"]
        return [
            self._difference(row, score if is_known else None)
            for row, score, is_known in zip(of_totals, scores.tolist(), known.tolist(), strict=True)
        ]

    def _medians(self, name: str) -> tuple[Floats, Floats]:
        """The medians of a figure in A and in B. Shapes `(rows,)`."""
        values = self._figures[name]
        return middle(values[:, : self.sizes.a])[0], middle(values[:, self.sizes.a :])[0]

    def _floors(self, values: Floats) -> Floats:
        """The least spread that is assumed for rows: no smaller difference is reported. Shape `(rows,)`."""
        return np.maximum(np.abs(middle(values)[0]) * self._least / 100, _LEAST_NS)

    def _compared(self, name: str, lost: Counter[str]) -> Floats:
        """The scores of all rows in one figure."""
        values = self._figures[name]
        if name != "count":
            known = ~np.isnan(values).any(axis=1)
            scores = np.zeros(len(values))
            scores[known] = self.comparison.add(values[known], self._floors(values[known]))
            return scores
        levels = middle(values)[0]
        floors = levels * self._least / 100
        for layer, record_layer in LAYER_OF.items():
            rows = self.is_of((layer,))
            if layer in EXITS:
                floors[rows] = np.inf  # these counts follow from that of the kernel, which is compared
            elif layer not in DECIDED_BY_PROGRAM:
                # The spread of counts of independent events (Poisson).
                floors[rows] = np.maximum(floors[rows], np.sqrt(2 * levels[rows]))
            floors[rows] += lost[record_layer]
        return self.comparison.add(values, floors)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def can_claim(self) -> bool:
        """Whether there are enough recordings to distinguish a change from chance."""
        return self.comparison.has_spread and self.comparison.least_p <= self._alpha

    @cached_property
    def totals_ns(self) -> tuple[Int64s, Int64s]:
        """The medians of the total time of each name in A and in B, in ns."""
        before_ns, after_ns = self._medians("total_ns")
        return before_ns.astype(np.int64), after_ns.astype(np.int64)

    @cached_property
    def total_ns(self) -> Int64s:
        """The change of the total time of each name in ns."""
        before_ns, after_ns = self.totals_ns
        return after_ns - before_ns

    @cached_property
    def is_in_both(self) -> Bools:
        """Flags the names that both sides have."""
        is_there = self._figures["count"] > 0
        return np.asarray(is_there[:, : self.sizes.a].any(axis=1) & is_there[:, self.sizes.a :].any(axis=1))

    @cached_property
    def is_compared(self) -> Bools:
        """Flags the rows that have lengths in every recording."""
        return np.asarray(~np.isnan(self._figures["p50_ns"]).any(axis=1))

    @property
    def has_tail(self) -> int:
        """How many rows have tails in every recording."""
        return int(np.count_nonzero(~np.isnan(self._figures["p95_ns"]).any(axis=1)))

    @property
    def is_reported(self) -> Bools:
        """Flags the rows that differ in any figure."""
        return np.asarray(np.any([*self.differs.values()], axis=0))

    def is_of(self, layers: Collection[str]) -> Bools:
        """Flags the rows of some layers of samples."""
        flags = np.zeros(len(self), np.bool_)
        for (what, _), first, last in zip(KINDS, self._starts, [*self._starts[1:], len(self)], strict=True):
            flags[first:last] = what in layers
        return flags

    def directions(self) -> Ints:
        """For each row a negative number where the differing figures are less in B, a positive one where they
        are more. Where figures disagree, the total time decides.
        """
        which = np.zeros(len(self), np.int8)
        conflicts = np.zeros(len(self), np.bool_)
        for name, flags in self.differs.items():
            rows = np.flatnonzero(flags)
            before, after = self._medians(name)
            signs = np.sign(after[rows] - before[rows]).astype(np.int8)
            conflicts[rows] |= signs * which[rows] < 0
            which[rows] = signs
        which[conflicts] = np.sign(self.total_ns[conflicts])
        return which

    def first(self, flags: Bools, most: int = 0) -> Iterator[Change]:
        """The flagged rows with the largest changes of the total time: the first `most`, or all for 0."""
        sizes_ns, rows = np.abs(self.total_ns), np.flatnonzero(flags)
        if most > 0:
            rows = np.concatenate(largest(sizes_ns, rows, most))
        # Equal changes are sorted by name.
        ordered = sorted(rows.tolist(), key=lambda row: (-int(sizes_ns[row]), self._keys[row]))
        return map(self._change, ordered[: most if most > 0 else None])

    def __iter__(self) -> Iterator[Change]:
        return map(self._change, range(len(self)))

    def _change(self, row: int) -> Change:
        figures = {
            name: self._difference(values[row], float(self._scores[name][row]) if name in _TESTED else None)
            for name, values in self._figures.items()
        }
        return Change(
            self._keys[row], figures, frozenset(name for name in _TESTED if self.differs[name][row])
        )

    def _difference(self, values: Floats, score: float | None) -> Difference:
        p = None
        if score is not None and score > 1 and self.comparison.has_spread:
            p = float(self.comparison.p(np.asarray(score)))
        return Difference(values[: self.sizes.a], values[self.sizes.a :], score, p)
