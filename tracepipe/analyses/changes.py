"""The differences between the recordings of two sides, and which exceed those between recordings of
one side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import nsmallest
from typing import Any, NamedTuple

from tracepipe.analyses.comparison import Comparison, middle
from tracepipe.event.columns import Bools, Int64s
from tracepipe.reports.frames.arrays import Floats, Ints, Rows
from tracepipe.reports.frames.grouping import each, greatest
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.numbered import Numbered
from tracepipe.reports.frames.samples import (
    DECIDED_BY_PROGRAM,
    EXITS,
    KINDS,
    LAYER_OF,
    MEASURES,
    Key,
    Kind,
    Measured,
)
from tracepipe.reports.frames.stored import Growing, empty, flagged, made, parts, taken, touched
from tracepipe.reports.frames.text_order import in_text_order

# The bytes that are read to decode a name.
_NAME_BYTES = 64
# The names whose figures are computed at a time.
_ROWS_AT_ONCE = 1 << 12
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
    """One name on both sides: its figures by the names of `MEASURES`, and which of them differ."""

    key: Key
    figures: dict[str, Difference]
    length_changed: bool
    tail_changed: bool
    count_changed: bool

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
        self._texts: dict[Kind, Numbered] = {}
        self._added: dict[Kind, list[tuple[int, Any, dict[str, Any]]]] = {}
        # The first row of each kind; the rows of a kind follow those of the kind before.
        self._starts: list[int] = []
        self._columns: dict[tuple[str, int], Growing[Any]] = {
            (name, recording): Growing(np.float64) for name in MEASURES for recording in range(sum(sizes))
        }
        self._scores: dict[str, Any] = {}

    def add(self, recording: int, found: dict[Kind, Measured]) -> None:
        """Add the names of a recording, which may be dropped afterwards. Raises OutputError."""
        for kind, of in found.items():
            texts = self._texts.setdefault(kind, Numbered())
            rows = made(len(of.numbers), np.int32, partial(_numbers, texts, of))
            self._added.setdefault(kind, []).append((recording, rows, of.values))

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
        for kind in KINDS:
            self._starts.append(len(self))
            if kind[0] not in left_out:
                self._lay_out(kind)
        self._added.clear()
        of_totals = np.array([values for _, values in totals], np.float64)
        known = ~np.isnan(of_totals).any(axis=1) & np.array(
            [not lost[layer] for layer, _ in totals], np.bool_
        )
        scores = np.zeros(len(totals))
        some = of_totals[known]
        scores[known] = self.comparison.add(some, self._floors(some))
        for name in _TESTED:
            self._scores[name] = made(len(self), np.float64, partial(self._compared, name, lost))
        return [
            self._difference(row, score if is_known else None)
            for row, score, is_known in zip(of_totals, scores.tolist(), known.tolist(), strict=True)
        ]

    def _lay_out(self, kind: Kind) -> None:
        """Write the figures of a kind of all recordings into the columns."""
        count, first = len(self._texts.get(kind, ())), len(self)
        for (name, _), column in self._columns.items():
            column.extend(np.nan if name.startswith("p") else 0, count)
        for recording, rows, values in self._added.get(kind, ()):
            for part in parts(len(rows)):
                for name in MEASURES:
                    values_so_far = self._columns[name, recording].so_far(first + count)
                    values_so_far[first + rows[part]] = values[name][part]
        if kind in self._texts:
            self._texts[kind].put_away()

    def _values(self, name: str, rows: Rows | list[int]) -> Floats:
        """A figure of some rows, shape `(rows, recordings)`."""
        columns = [self._columns[name, recording].so_far(len(self)) for recording in range(sum(self.sizes))]
        return np.stack([column[rows] for column in columns], axis=1)

    def _medians(self, name: str, rows: Rows) -> tuple[Floats, Floats]:
        """The medians of a figure of some rows in A and in B. Shapes `(rows,)`."""
        values = self._values(name, rows)
        return middle(values[:, : self.sizes.a])[0], middle(values[:, self.sizes.a :])[0]

    def _floors(self, values: Floats) -> Floats:
        """The least spread that is assumed for rows: no smaller difference is reported. Shape `(rows,)`."""
        return np.maximum(np.abs(middle(values)[0]) * self._least / 100, _LEAST_NS)

    def _compared(self, name: str, lost: Counter[str], part: slice) -> Floats:
        """The scores of a part of the rows in one figure."""
        values = self._values(name, part)
        if name != "count":
            known = ~np.isnan(values).any(axis=1)
            scores = np.zeros(len(values))
            scores[known] = self.comparison.add(values[known], self._floors(values[known]))
            return scores
        levels = middle(values)[0]
        floors = levels * self._least / 100
        for layer, record_layer in LAYER_OF.items():
            rows = self.is_of((layer,))[part]
            if layer in EXITS:
                floors[rows] = np.inf  # these counts follow from that of the kernel, which is compared
            elif layer not in DECIDED_BY_PROGRAM:
                # The spread of counts of independent events (Poisson).
                floors[rows] = np.maximum(floors[rows], np.sqrt(2 * levels[rows]))
            floors[rows] += lost[record_layer]
        return self.comparison.add(values, floors)

    def __len__(self) -> int:
        return self._columns["count", 0].count

    def _differs(self, name: str) -> Bools:
        """Flags the rows that differ in a figure by more than the spread; where enough recordings allow it,
        only those that do not differ by chance.
        """
        scores = self._scores[name]
        differing: Bools = np.zeros(len(self), np.bool_)
        for part in parts(len(self)):
            differing[part] = scores[part] > 1
            if self.can_claim:
                differing[part] &= self.comparison.p(scores[part]) <= self._alpha
        return differing

    @property
    def can_claim(self) -> bool:
        """Whether there are enough recordings to distinguish a change from chance."""
        return self.comparison.has_spread and self.comparison.least_p <= self._alpha

    @cached_property
    def length_changed(self) -> Bools:
        """Flags the rows whose median lengths differ."""
        return self._differs("p50_ns")

    @cached_property
    def tail_changed(self) -> Bools:
        """Flags the rows whose tails differ, but not their medians."""
        return self._differs("p95_ns") & ~self.length_changed

    @cached_property
    def count_changed(self) -> Bools:
        """Flags the rows whose counts differ."""
        return self._differs("count")

    @cached_property
    def totals_ns(self) -> tuple[Int64s, Int64s]:
        """The medians of the total time of each name in A and in B, in ns."""

        before_ns, after_ns = empty(len(self), np.int64), empty(len(self), np.int64)
        for part in parts(len(self)):
            before_ns[part], after_ns[part] = self._medians("total_ns", part)
        return before_ns, after_ns

    @cached_property
    def total_ns(self) -> Int64s:
        """The change of the total time of each name in ns."""
        before_ns, after_ns = self.totals_ns
        change_ns: Int64s = made(len(self), np.int64, lambda part: after_ns[part] - before_ns[part])
        return change_ns

    @cached_property
    def is_in_both(self) -> Bools:
        """Flags the names that both sides have."""
        both: Bools = np.zeros(len(self), np.bool_)
        for part in parts(len(self)):
            counts = self._values("count", part) > 0
            both[part] = counts[:, : self.sizes.a].any(axis=1) & counts[:, self.sizes.a :].any(axis=1)
        return both

    @cached_property
    def is_compared(self) -> Bools:
        """Flags the rows that have lengths in every recording."""
        every: Bools = np.zeros(len(self), np.bool_)
        for part in parts(len(self)):
            every[part] = ~np.isnan(self._values("p50_ns", part)).any(axis=1)
        return every

    @property
    def has_tail(self) -> int:
        """How many rows have tails in every recording."""
        return sum(
            int(np.count_nonzero(~np.isnan(self._values("p95_ns", part)).any(axis=1)))
            for part in parts(len(self))
        )

    @property
    def is_reported(self) -> Bools:
        """Flags the rows that differ in any figure."""
        reported: Bools = self.length_changed | self.tail_changed | self.count_changed
        return reported

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
        flags = zip(_TESTED, (self.length_changed, self.tail_changed, self.count_changed), strict=True)
        of = {name: np.flatnonzero(flag) for name, flag in flags}
        conflicts = np.zeros(len(self), np.bool_)
        for name, rows in of.items():
            for part in parts(len(rows)):
                before, after = self._medians(name, rows[part])
                signs = np.sign(after - before).astype(np.int8)
                conflicts[rows[part]] |= signs * which[rows[part]] < 0
                which[rows[part]] = signs
        which[conflicts] = np.sign(self.total_ns[conflicts])
        return which

    def first(self, flags: Bools, most: int = 0) -> Iterator[Change]:
        """The flagged rows with the largest changes of the total time: the first `most`, or all for 0. Raises
        OutputError.
        """
        if most <= 0:
            kept = flagged(len(self), lambda part: flags[part])
            text = self._text_of(kept)
            return map(self.__getitem__, each(taken(kept, in_text_order(text, -self._sizes_ns(kept)))))
        kept = np.zeros(0, np.int64)
        for part in parts(len(self)):
            kept = np.concatenate([kept, np.flatnonzero(flags[part]) + part.start])
            if most < len(kept):
                surely, perhaps = greatest(self._sizes_ns(kept), np.arange(len(kept)), most)
                # Equal changes are sorted by name.
                named = nsmallest(most - len(surely), kept[perhaps].tolist(), self._key)
                kept = np.concatenate([kept[surely], np.array(named, np.int64)])
        sizes_ns = dict(zip(kept.tolist(), self._sizes_ns(kept).tolist(), strict=True))
        return map(self.__getitem__, sorted(sizes_ns, key=lambda row: (-sizes_ns[row], self._key(row))))

    def _text_of(self, rows: Ints) -> Callable[[int], str]:
        """A function that returns the sort key of a row (layer and name) by its index in `rows`."""
        return lambda at: "\0".join(self._key(int(rows[at])))

    def __iter__(self) -> Iterator[Change]:
        for part in parts(len(self), _ROWS_AT_ONCE):
            values = {name: self._values(name, part) for name in MEASURES}
            for at, row in enumerate(range(part.start, part.stop)):
                yield self._change(row, {name: of[at] for name, of in values.items()})

    def _sizes_ns(self, rows: Ints) -> Int64s:
        """The absolute change of the total time of some rows. Shapes `(n,)`."""
        return np.abs(self.total_ns[rows])

    def _key(self, row: int) -> Key:
        touched(_NAME_BYTES)
        at = int(np.searchsorted(self._starts, row, "right")) - 1
        kind = KINDS[at]
        text = self._texts[kind][row - self._starts[at]].decode("utf-8", "surrogatepass")
        return kind[0], text + kind[1]

    def __getitem__(self, row: int) -> Change:
        return self._change(row, {name: self._values(name, [row])[0] for name in MEASURES})

    def _change(self, row: int, values: dict[str, Any]) -> Change:
        figures = {
            name: self._difference(of, float(self._scores[name][row]) if name in _TESTED else None)
            for name, of in values.items()
        }
        flags = (self.length_changed, self.tail_changed, self.count_changed)
        return Change(self._key(row), figures, *(bool(flag[row]) for flag in flags))

    def _difference(self, values: Floats, score: float | None) -> Difference:
        p = None
        if score is not None and score > 1 and self.comparison.has_spread:
            p = float(self.comparison.p(np.asarray(score)))
        return Difference(values[: self.sizes.a], values[self.sizes.a :], score, p)


def _numbers(texts: Numbered, of: Measured, part: slice) -> list[int]:
    """The numbers, among all names, of a part of a recording's names."""
    touched(_NAME_BYTES * (part.stop - part.start))
    return [texts.number(of.texts[number]) for number in of.numbers[part].tolist()]
