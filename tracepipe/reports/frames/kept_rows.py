"""Rows of a table, which are in a file where there are many."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import Growing, touched

# The rows that are in memory at a time.
_AT_ONCE = 1_000


class KeptRows:
    """Rows that are pickled in a column of bytes."""

    def __init__(self) -> None:
        self._bytes, self._ends, self._count = Growing(np.uint8), [0], 0

    def add(self, rows: list[Any]) -> None:
        """Append rows. Raises OutputError."""
        packed = np.frombuffer(pickle.dumps(rows, pickle.HIGHEST_PROTOCOL), np.uint8)
        self._bytes.extend(packed, len(packed))
        self._ends.append(self._bytes.count)
        self._count += len(rows)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for first, last in zip(self._ends, self._ends[1:], strict=False):
            touched(last - first)
            yield from pickle.loads(self._bytes.so_far(last)[first:].data)


def kept_rows(rows: Iterable[Any]) -> list[Any] | KeptRows:
    """The rows of an iterable as a sequence that can be iterated over again: a list, or `KeptRows` where
    there are many. Raises OutputError.
    """
    given = iter(rows)
    some = list(islice(given, _AT_ONCE))
    if len(some) < _AT_ONCE:
        return some
    kept = KeptRows()
    while some:
        kept.add(some)
        some = list(islice(given, _AT_ONCE))
    return kept
