"""Whether the lanes of single warps fall into groups that exited apart, where every thread was timed.

Noise alone spreads the lanes of a warp. A warp counts as split where its lanes form two to four groups, each
of two lanes or more and each narrow compared with the gaps between them. How often noise does that is found
by drawing warps from Student's t with two degrees of freedom: its variance is infinite, so its tails are
heavier than those of clocks and caches. A lane that is late alone has a separate null distribution, as such
noise often has one value far out: the lane must be very late, or late in many warps, which ranks show.
"""

from __future__ import annotations

from functools import lru_cache

from tracepipe.analyses.findings.kernel_warps import LANES
from tracepipe.reports.frames.arrays import Floats, Ints
from tracepipe.reports.frames.libraries import np

MOST_GROUPS = 4
DRAWS = 20_000
"""Warps drawn for the null distribution: it gives p values down to 1 in 20,000."""
SPLIT_P = 0.001
"""A warp with a smaller p value counts as split: one of a thousand noisy warps does."""
MIN_LANES = 4


def _scores(ordered: Floats, step: float) -> Floats:
    """For each row of sorted lane times, the gap between its groups divided by the widest group, for the best
    number of groups. Shapes `(rows, lanes)` and `(rows,)`."""
    rows, lanes = ordered.shape
    gaps = np.diff(ordered, axis=1)
    by_size = np.argsort(-gaps, axis=1, kind="stable")
    best = np.zeros(rows)
    for cuts in range(1, min(MOST_GROUPS, lanes // 2)):
        at = np.sort(by_size[:, :cuts], axis=1)
        first = np.concatenate([np.zeros((rows, 1), np.int64), at + 1], axis=1)
        last = np.concatenate([at, np.full((rows, 1), lanes - 1)], axis=1)
        widths = np.take_along_axis(ordered, last, 1) - np.take_along_axis(ordered, first, 1)
        gap = np.take_along_axis(gaps, by_size[:, cuts - 1 : cuts], 1)[:, 0]
        score = gap / np.maximum(widths.max(axis=1), step)
        best = np.maximum(best, np.where((last - first).min(axis=1) >= 1, score, 0))
    return best


def _lone_scores(ordered: Floats, step: float) -> Floats:
    """For each row, the gap below the last lane divided by the width of the others."""
    scores: Floats = (ordered[:, -1] - ordered[:, -2]) / np.maximum(ordered[:, -2] - ordered[:, 0], step)
    return scores


@lru_cache(maxsize=LANES)
def _nulls(lanes: int) -> tuple[Floats, Floats]:
    noise = np.sort(np.random.default_rng(lanes).standard_t(2, (DRAWS, lanes)), axis=1)
    return np.sort(_scores(noise, 0.0)), np.sort(_lone_scores(noise, 0.0))


def split_p_values(times: Floats, step: float) -> Floats:
    """The p value of each row of lane times: the chance that noise separates its lanes as much. It is 1 for a
    row with too few lanes.

    `times` has the shape `(rows, lanes)` and nan where a lane has no time; `step` is their resolution.
    """
    ordered = np.sort(times, axis=1)  # nan last
    present: Ints = (~np.isnan(times)).sum(axis=1)
    p_values = np.ones(times.shape[0])
    for lanes in np.unique(present[present >= MIN_LANES]):
        rows = present == lanes
        known = ordered[rows, : int(lanes)]
        scores = (_scores(known, step), _lone_scores(known, step))
        above = [
            DRAWS - np.searchsorted(null, score, side="left")
            for null, score in zip(_nulls(int(lanes)), scores, strict=True)
        ]
        p_values[rows] = np.minimum(1.0, 2 * (np.minimum(*above) + 1) / (DRAWS + 1))
    return p_values
