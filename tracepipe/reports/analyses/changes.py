"""What differs between the samples of two runs, and which of it is more than chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.samples import DECIDED_BY_PROGRAM, Key, Sample
from tracepipe.reports.frames.stored import touched

Window = tuple[int, int]


@dataclass(slots=True)
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
        """Whether it is told as a change: what only one run has is, where the program decides that."""
        alone = self.is_in_one_alone and self.key[0] in DECIDED_BY_PROGRAM
        return self.length_changed or self.tail_changed or self.count_changed or alone

    def percent(self, of_ns: float | None) -> float | None:
        """A difference in percent of the median in A."""
        return 100 * of_ns / self.median_ns if of_ns is not None and self.median_ns else None


def _count(sample: Sample | None) -> int:
    return len(sample.starts_ns) if sample else 0


def _total_ns(sample: Sample | None) -> int:
    return sample.total_ns if sample else 0


def changes(
    a: dict[Key, Sample], b: dict[Key, Sample], windows: tuple[Window, Window], alpha: float, least: float
) -> list[Change]:
    """Compare every name of two runs, which lasted from and to `windows`; largest change of time first.

    At most a share of `alpha` of what is told as changed is chance, in the mean. Lengths have changed where
    their shift is at least `least` percent of the median, too.
    """
    found = [Change(key, a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b])]
    tests: list[tuple[Change, str, float]] = []
    widenings: dict[Key, float] = {}
    nothing = np.zeros(0, np.int64)
    for one in found:
        starts = [sample.starts_ns if sample else nothing for sample in (one.a, one.b)]
        touched(2 * sum(ts_ns.nbytes for ts_ns in starts))
        tests.append((one, "count_p", count_p(starts[0], starts[1], *windows)))
        if one.a is None or one.b is None:
            continue
        of_a, of_b = one.a.lengths_ns, one.b.lengths_ns
        if least_p(len(of_a), len(of_b)) > alpha:
            continue
        widenings[one.key] = ranks_widening(of_a, of_b)
        tests.append((one, "length_p", difference_p(of_a, of_b, widenings[one.key])))
        one.tail = tail(of_a, of_b)
        if one.tail is not None:
            tests.append((one, "tail_p", one.tail.p))
    adjusted = discoveries(np.array([p for _, _, p in tests]))
    for (one, name, _), p in zip(tests, adjusted, strict=True):
        setattr(one, name, float(p))
    for one in found:
        _decide(one, alpha, least, widenings.get(one.key, 1.0))
    return sorted(found, key=lambda one: (-abs(one.total_ns), one.key))


def _decide(one: Change, alpha: float, least: float, widening: float) -> None:
    one.count_changed = one.count_p is not None and one.count_p <= alpha
    if one.length_p is None or one.a is None or one.b is None:
        return
    one.shift = shift(one.a.lengths_ns, one.b.lengths_ns, 1 - alpha, widening)
    percent: Any = one.percent(one.shift.estimate)
    is_large = abs(percent) >= least if percent is not None else one.shift.estimate != 0
    one.length_changed = one.length_p <= alpha and is_large
    one.tail_changed = one.tail_p is not None and one.tail_p <= alpha and not one.length_changed
