"""What differs between the samples of two runs, and which of it is more than chance."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.reports.analyses.comparison import (
    Shift,
    Tail,
    count_p,
    difference_p,
    discoveries,
    least_p,
    ranks_widening,
    shift,
    tail,
)
from tracepipe.reports.frames.grouping import greatest
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.samples import DECIDED_BY_PROGRAM, KINDS, Key, Kind, Named, Sample, no_names
from tracepipe.reports.frames.statistics import Ranks
from tracepipe.reports.frames.stored import Growing, made, parts, release, touched

Window = tuple[int, int]
# What is looked at to decode a name.
_NAME_BYTES = 64


@dataclass(frozen=True, slots=True)
class Change:
    """One name in both runs; `a` or `b` is None where it is not in that run.

    `length_p`, `tail_p` and `count_p` are adjusted for the number of tests, None where there is none: of
    `length` with under so many values that no difference could be significant. The verdicts are in `longer`
    and the flags: more than chance makes, and at least the least change that was asked for.
    """

    key: Key
    a: Sample | None
    b: Sample | None
    shift: Shift | None = None
    tail: Tail | None = None
    length_p: float | None = None
    tail_p: float | None = None
    count_p: float | None = None
    length_changed: bool = False
    tail_changed: bool = False
    count_changed: bool = False

    @property
    def total_ns(self) -> int:
        """By how much the time in all changed."""
        return _total_ns(self.b) - _total_ns(self.a)

    @property
    def is_in_one_alone(self) -> bool:
        """It is in one of the runs only."""
        return self.a is None or self.b is None

    @property
    def counts(self) -> tuple[int, int]:
        """How many there are in A, in B."""
        return _count(self.a), _count(self.b)

    @property
    def median_ns(self) -> float:
        """The median length in A."""
        return float(np.median(self.a.lengths_ns)) if self.a and len(self.a.lengths_ns) else 0.0

    @property
    def is_reported(self) -> bool:
        """Whether it is reported as a change: what only one run has is, where the program decides that."""
        alone = self.is_in_one_alone and self.key[0] in DECIDED_BY_PROGRAM
        return self.length_changed or self.tail_changed or self.count_changed or alone

    def percent(self, of_ns: float | None) -> float | None:
        """A difference in percent of the median in A."""
        return 100 * of_ns / self.median_ns if of_ns is not None and self.median_ns else None


def _count(sample: Sample | None) -> int:
    return len(sample.starts_ns) if sample else 0


def _total_ns(sample: Sample | None) -> int:
    return sample.total_ns if sample else 0


class _Tested:
    """What the names whose lengths were compared came to: `rows` of them, a column for each of `VALUES`."""

    VALUES = (
        "length_p", "tail_p", "estimate", "low", "high", "median_ns", "limit", "share_a", "share_b"
    )  # fmt: skip

    def __init__(self) -> None:
        self._rows, self._values = Growing(np.int32), Growing(np.float64, (len(self.VALUES),))

    def add(self, row: int, values: tuple[float | None, ...]) -> None:
        """Add one; None is what is not known, and NaN in its column."""
        self._rows.extend(row, 1)
        self._values.extend(np.array(values, np.float64), 1)

    @property
    def rows(self) -> Int32s:
        """Of the changes, in their order."""
        rows: Int32s = self._rows.so_far(self._rows.count)
        return rows

    def __getitem__(self, name: str) -> Any:
        return self._values.so_far(self._values.count)[:, self.VALUES.index(name)]

    def of(self, row: int) -> dict[str, float | None]:
        """What a row came to, by the names of the values; empty where it was not compared."""
        at = int(np.searchsorted(self.rows, row))
        if at == len(self.rows) or self.rows[at] != row:
            return {}
        values = self._values.so_far(self._values.count)[at].tolist()
        return {
            name: None if value != value else value for name, value in zip(self.VALUES, values, strict=True)
        }


class Changes:
    """Every name of two runs, a row in the columns for each; `Change` is made of those that are shown."""

    def __init__(self, a: dict[Kind, Named], b: dict[Kind, Named]) -> None:
        self._a, self._b = a, b
        # The rows of a kind follow those of the one before.
        self._starts: list[int] = []
        self._columns = {
            f"{name}_{run}": Growing(np.int32 if name == "place" else np.int64)
            for name in ("place", "count", "known", "total_ns")
            for run in "ab"
        }
        for kind in KINDS:
            self._starts.append(len(self))
            self._add(a.get(kind) or no_names(), b.get(kind) or no_names())
        before_ns, after_ns = self.column("total_ns_a"), self.column("total_ns_b")
        self.total_ns: Int64s = made(len(self), np.int64, lambda part: after_ns[part] - before_ns[part])
        """By how much the time in all changed."""
        self.tested = _Tested()
        self.count_p: Any = np.ones(0)
        self.length_changed: Bools = np.zeros(len(self), np.bool_)
        self.tail_changed, self.count_changed = self.length_changed.copy(), self.length_changed.copy()

    def __len__(self) -> int:
        return self._columns["place_a"].count

    def _add(self, a: Named, b: Named) -> None:
        """Add the names of a kind: those of A, then what is in B alone."""
        of_b = a.places_of(b)
        met, alone = np.flatnonzero(of_b != NONE), np.flatnonzero(of_b == NONE)
        places = {name: np.full(len(a) + len(alone), NONE, np.int32) for name in "ab"}
        places["a"][: len(a)] = np.arange(len(a))
        places["b"][of_b[met]], places["b"][len(a) :] = met, alone
        for name, of in (("a", a), ("b", b)):
            columns = {
                "count": np.diff(of.start_bounds),
                "known": np.diff(of.length_bounds),
                "total_ns": of.totals_ns(),
            }
            for part in parts(len(places[name])):
                at = places[name][part]
                self._columns[f"place_{name}"].extend(at, len(at))
                for key, values in columns.items():
                    # NONE is the last place, where there is any.
                    given = np.where(at == NONE, 0, values[at]) if len(values) else 0
                    self._columns[f"{key}_{name}"].extend(given, len(at))

    def column(self, name: str) -> Any:
        """Of each row: `count_a`, how many in A; `known_a`, of how many the length is known; `total_ns_a`,
        how long they took; and the same of B.
        """
        release()
        return self._columns[name].so_far(len(self))

    @property
    def is_in_both(self) -> Bools:
        """Which rows are of names that both runs have."""
        both: Bools = (self.column("place_a") != NONE) & (self.column("place_b") != NONE)
        return both

    @property
    def is_reported(self) -> Bools:
        """Which rows are reported as changes, as `Change.is_reported` has it."""
        alone = ~self.is_in_both & self.is_of(DECIDED_BY_PROGRAM)
        reported: Bools = self.length_changed | self.tail_changed | self.count_changed | alone
        return reported

    def is_of(self, layers: Collection[str]) -> Bools:
        """Which rows are of some layers of samples."""
        flags = np.zeros(len(self), np.bool_)
        for (what, _), first, last in zip(KINDS, self._starts, [*self._starts[1:], len(self)], strict=True):
            flags[first:last] = what in layers
        return flags

    def first(self, flags: Bools, most: int = 0) -> Iterator[Change]:
        """The flagged ones with the largest change of time, at most so many, or all where that is 0."""
        kept = np.zeros(0, np.int64)
        for part in parts(len(self)):
            kept = np.concatenate([kept, np.flatnonzero(flags[part]) + part.start])
            if 0 < most < len(kept):
                surely, perhaps = greatest(self._sizes_ns(kept), np.arange(len(kept)), most)
                # Of equal changes names decide.
                named = nsmallest(most - len(surely), kept[perhaps].tolist(), self._key)
                kept = np.concatenate([kept[surely], np.array(named, np.int64)])
        sizes_ns = dict(zip(kept.tolist(), self._sizes_ns(kept).tolist(), strict=True))
        return map(self.__getitem__, sorted(sizes_ns, key=lambda row: (-sizes_ns[row], self._key(row))))

    def _sizes_ns(self, rows: Int64s) -> Any:
        """By how much the time of some rows changed, up or down."""
        return np.abs(self.total_ns[rows])

    def _kind(self, row: int) -> int:
        """The place in `KINDS` of a row."""
        return int(np.searchsorted(self._starts, row, "right")) - 1

    def _places(self, row: int) -> tuple[int, int]:
        """Where a row stands in A and in B."""
        a, b = (self._columns[name].so_far(len(self))[row] for name in ("place_a", "place_b"))
        return int(a), int(b)

    def _key(self, row: int) -> Key:
        touched(_NAME_BYTES)
        (a, b), kind = self._places(row), KINDS[self._kind(row)]
        return kind[0], (self._b[kind].text(b) if a == NONE else self._a[kind].text(a)) + kind[1]

    def samples(self, row: int) -> tuple[Sample | None, Sample | None]:
        """All of a name in A, and in B."""
        (a, b), kind = self._places(row), KINDS[self._kind(row)]
        return (
            None if a == NONE else self._a[kind].sample(a),
            None if b == NONE else self._b[kind].sample(b),
        )

    def __getitem__(self, row: int) -> Change:
        found: Any = self.tested.of(row)
        return Change(
            self._key(row),
            *self.samples(row),
            Shift(found["estimate"], found["low"], found["high"]) if found else None,
            Tail(found["limit"], found["share_a"], found["share_b"], found["tail_p"])
            if found and found["tail_p"] is not None
            else None,
            found.get("length_p"),
            found.get("tail_p"),
            float(self.count_p[row]),
            bool(self.length_changed[row]),
            bool(self.tail_changed[row]),
            bool(self.count_changed[row]),
        )


def changes(
    a: dict[Kind, Named], b: dict[Kind, Named], windows: tuple[Window, Window], alpha: float, least: float
) -> Changes:
    """Compare every name of two runs, which lasted from and to `windows`.

    At most a share of `alpha` of what is reported as changed is chance, in the mean. Lengths have changed
    where their shift is at least `least` percent of the median, too.
    """
    found = Changes(a, b)
    tests, tested = _of_counts(found, windows), found.tested
    _compare_lengths(found, alpha)
    has_tail = ~np.isnan(tested["tail_p"])
    for more in (tested["length_p"], tested["tail_p"][has_tail]):
        tests.extend(more, len(more))
    adjusted = discoveries(tests.whole())
    last = len(found) + len(has_tail)
    found.count_p, tested["length_p"][:] = adjusted[: len(found)], adjusted[len(found) : last]
    tested["tail_p"][has_tail] = adjusted[last:]
    found.count_changed = found.count_p <= alpha
    percent = 100 * tested["estimate"] / np.where(tested["median_ns"], tested["median_ns"], np.nan)
    is_large = np.where(np.isnan(percent), tested["estimate"] != 0, np.abs(percent) >= least)
    is_longer = (tested["length_p"] <= alpha) & is_large
    found.length_changed[tested.rows] = is_longer
    found.tail_changed[tested.rows] = (tested["tail_p"] <= alpha) & ~is_longer
    return found


def _of_counts(found: Changes, windows: tuple[Window, Window]) -> Growing:
    """The p of each name's counts."""
    tests, nothing = Growing(np.float64), np.zeros(0, np.int64)
    count_a, count_b = found.column("count_a"), found.column("count_b")
    # Of a million names most are there once.
    of_one = [(a, b, count_p(np.zeros(a), np.zeros(b), *windows)) for a, b in ((0, 1), (1, 0)) if len(found)]
    for part in parts(len(found)):
        p = np.ones(part.stop - part.start)
        for a, b, value in of_one:
            p[(count_a[part] == a) & (count_b[part] == b)] = value
        several = (count_a[part] != count_b[part]) & (np.maximum(count_a[part], count_b[part]) > 1)
        for at in np.flatnonzero(several).tolist():
            samples = found.samples(part.start + at)
            a_ns, b_ns = (nothing if sample is None else sample.starts_ns for sample in samples)
            touched(2 * (a_ns.nbytes + b_ns.nbytes))
            p[at] = count_p(a_ns, b_ns, *windows)
        tests.extend(p, len(p))
    return tests


def _compare_lengths(found: Changes, alpha: float) -> None:
    """Test the lengths of the names that have enough of them."""
    known_a, known_b = found.column("known_a"), found.column("known_b")
    for part in parts(len(found)):
        some = np.flatnonzero((known_a[part] > 0) & (known_b[part] > 0)) + part.start
        counts = zip(known_a[some].tolist(), known_b[some].tolist(), strict=True)
        for row, (of_a, of_b) in zip(some.tolist(), counts, strict=True):
            if least_p(of_a, of_b) <= alpha:
                _compare(found, row, alpha)


def _compare(found: Changes, row: int, alpha: float) -> None:
    one = found.samples(row)
    assert one[0] is not None and one[1] is not None
    a, b = one[0].lengths_ns, one[1].lengths_ns
    touched(2 * (a.nbytes + b.nbytes))
    ranks = Ranks(a, b)
    widening = ranks_widening(ranks)
    p, longest = difference_p(ranks, widening), tail(a, b, ranks)
    del ranks
    by = shift(a, b, 1 - alpha, widening)
    of_tail = (longest.p, longest.limit, longest.share_a, longest.share_b) if longest else (None,) * 4
    median_ns = float(np.median(a))
    found.tested.add(row, (p, of_tail[0], by.estimate, by.low, by.high, median_ns, *of_tail[1:]))
