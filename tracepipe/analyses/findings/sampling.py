"""Samples of many rows, for statistical tests that need only some hundreds."""

from __future__ import annotations

from tracepipe.reports.frames.arrays import Int64s, Ints
from tracepipe.reports.frames.libraries import np

MAX_ROWS = 4096
"""The most warps or blocks that a test uses; of more it takes a sample. The tests need only hundreds."""
MAX_BLOCKS = 1 << 17
"""The same where a test needs hundreds for each SM, or along the grid."""


def sample(indices: Ints, most: int = MAX_ROWS) -> Ints:
    """At most `most` of `indices`, in their order; the same ones each time. Shapes `(n,)`."""
    if indices.size <= most:
        return indices
    return np.sort(np.random.default_rng(0).choice(indices, most, replace=False))


def evenly(count: int, most: int) -> Int64s:
    """At most `most` of the row numbers 0…`count`-1, evenly spaced. Shape `(n,)`."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)
