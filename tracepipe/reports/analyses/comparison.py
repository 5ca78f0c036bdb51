"""Compares two sides of several recordings each: is a difference more than recordings of one side differ by.

A recording is one observation, however many events it has: load, clocks and addresses differ from run to run
and change all events of one. The test assumes one thing alone, that the recordings could have been of either
side if the sides do not differ. All ways to divide them are then as likely as the one that was recorded, and
how large the largest difference is in each is what chance makes (Westfall and Young's maximum statistic).
"""

from __future__ import annotations

from itertools import combinations
from math import ceil, comb
from typing import Any

from tracepipe.event.columns import Bools
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import made, parts

# Where there are more ways to divide the recordings, some are drawn.
_WAYS_MAX = 500
_SEED = 1
# Differences of numbers that differ by rounding alone are equal.
_ROUNDING = 1e-9
_ROWS_AT_ONCE = 1 << 12


def ways(count_a: int, count_b: int) -> int:
    """In how many ways recordings can be divided; which side is which does not matter."""
    every = comb(count_a + count_b, count_a)
    return every // 2 if count_a == count_b else every


def enough(alpha: float) -> int:
    """How many recordings of each side can have a p of `alpha`."""
    count = 2
    while ways(count, count) * alpha < 1:
        count += 1
    return count


def _divisions(count_a: int, count_b: int, alpha: float) -> Bools:
    """Which recordings each division has on the first side; the first one is that which was recorded."""
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


def middle(values: Any) -> tuple[Any, Any]:
    """The median of each row, and how far values are from it in the mean."""
    ordered = np.sort(values, axis=1)
    count = ordered.shape[1]
    medians = (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2
    return medians, np.abs(ordered - medians[:, None]).mean(axis=1)


def _scores(a: Any, b: Any, floors: Any) -> Any:
    """How many times the spread the difference is, row by row."""
    (median_a, spread_a), (median_b, spread_b) = middle(a), middle(b)
    differences = np.abs(median_b - median_a)
    spreads = np.maximum(spread_a + spread_b, floors)
    found = np.zeros(len(differences))
    np.divide(differences, spreads, out=found, where=spreads > 0)
    found[(spreads == 0) & (differences > 0)] = np.inf
    return found


class Comparison:
    """All that is compared between two sides, as one family of tests: `add` it, then ask for `p`."""

    def __init__(self, count_a: int, count_b: int, alpha: float) -> None:
        self.has_spread = count_a + count_b > 2
        """Whether a side has several recordings. Two alone say nothing of what chance makes."""
        self._divisions = _divisions(count_a, count_b, alpha)
        # Of each division, the largest score of all that was added.
        self._largest = np.zeros(len(self._divisions))

    @property
    def least_p(self) -> float:
        """The smallest p that any difference can have."""
        return 1 / len(self._divisions)

    def add(self, values: Any, floors: Any) -> Any:
        """The scores of rows, which have a value for each recording, those of A first: the difference of the
        medians of both sides by their spread, which counts at least as much as the row's floor.

        The spread is the distance of recordings from the median of their side, in the mean; of both sides
        together. A row in which a value is not known has no score, which is 0.
        """
        scores = made(len(values), np.float64, lambda part: np.zeros(part.stop - part.start))
        for part in parts(len(values), _ROWS_AT_ONCE):
            here, least = values[part], floors[part]
            # No division has a score above 1 where all recordings together differ by less.
            some = np.flatnonzero(np.ptp(here, axis=1) > least)
            here, least = here[some], least[some]
            for at, first in enumerate(self._divisions if len(some) else ()):
                found = _scores(here[:, first], here[:, ~first], least)
                self._largest[at] = max(self._largest[at], found.max())
                if at == 0:
                    scores[part][some] = found
        return scores

    def p(self, scores: Any) -> Any:
        """The chance that the largest of all scores is as large, where nothing differs between the sides."""
        ordered = np.sort(self._largest)
        above = len(ordered) - np.searchsorted(ordered, np.asarray(scores) * (1 - _ROUNDING))
        return above / len(ordered)
