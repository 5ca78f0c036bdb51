"""Some of many rows, for tests that are sure with fewer."""

from __future__ import annotations

from typing import Any

from tracepipe.reports.frames.libraries import np

MAX_ROWS = 4096
"""Warps or blocks that a test looks at; more are sampled. The tests are sure with hundreds."""
MAX_BLOCKS = 1 << 17
"""The same where there are hundreds for each SM, or along the grid."""


def sample(indices: Any, most: int = MAX_ROWS) -> Any:
    """At most so many of `indices`, in their order, the same ones each time."""
    if indices.size <= most:
        return indices
    return np.sort(np.random.default_rng(0).choice(indices, most, replace=False))


def evenly(count: int, most: int) -> Any:
    """At most so many of as many rows, as far apart from each other."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)
