"""A permutation test between two sides of several recordings each: is a difference larger than the
differences between recordings of one side?

A recording is one observation, however many events it has: load, clocks and addresses differ between runs,
and affect all events of a run. The only assumption is that each recording could have been on either side if
the sides do not differ. All divisions of the recordings into two sides are then equally likely, and the
largest difference in each division shows how large it gets by chance (Westfall and Young's maximum
statistic).
"""

from __future__ import annotations

from itertools import combinations
from math import ceil, comb

from tracepipe.event.columns import Bools
from tracepipe.reports.frames.arrays import Floats
from tracepipe.reports.frames.libraries import np

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
