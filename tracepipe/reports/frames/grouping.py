"""Rows by a number that they have."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from tracepipe.event.columns import Int64s
from tracepipe.reports.frames.libraries import np


def grouped(numbers: Any) -> Iterator[tuple[int, Int64s]]:
    """Each number from 0 on that there is, in order, and its places, in theirs."""
    if not len(numbers):
        return
    # Sorting by two bytes takes a twentieth of the time.
    narrow = numbers.astype(np.uint16) if int(numbers.max()) < 1 << 16 else numbers
    order = np.argsort(narrow, kind="stable")
    ordered = narrow[order]
    bounds = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(ordered)]
    for first, last in pairwise(bounds):
        yield int(ordered[first]), order[first:last]
