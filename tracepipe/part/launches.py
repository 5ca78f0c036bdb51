"""Launches whose call or work is in a part: the part gets both, so the flow between them has two ends."""

from __future__ import annotations

from typing import Final

import numpy as np

from tracepipe.event.columns import NONE, Bools, Int64s

# A power of two. Launch ids are successive numbers, so each of the last ones has a separate place.
PLACES: Final = 1 << 16


class Joined:
    """Begins that later events refer to by an id: calls by their launch ids, flows by their flow ids.

    For the last ids it has the rows of their begins and ends, and whether the part has them. Columns have the
    shape `(n,)`.
    """

    def __init__(self) -> None:
        self._ids: Int64s = np.zeros(PLACES, np.int64)
        self._begins: Int64s = np.full(PLACES, NONE, np.int64)
        self._ends: Int64s = np.full(PLACES, NONE, np.int64)
        self._kept: Bools = np.zeros(PLACES, np.bool_)

    def begin(self, ids: Int64s, rows: Int64s) -> None:
        """Add the rows at which some ids begin."""
        at = ids & (PLACES - 1)
        self._ids[at], self._begins[at], self._ends[at], self._kept[at] = ids, rows, NONE, False

    def end(self, ids: Int64s, rows: Int64s) -> None:
        """Add the rows at which some ids end."""
        at, known = self._known(ids)
        self._ends[at[known]] = rows[known]

    def are_kept(self, ids: Int64s) -> Bools:
        """Flags the ids that the part has."""
        at, known = self._known(ids)
        return known & self._kept[at]

    def keep(self, ids: Int64s) -> Int64s:
        """Mark ids as in the part. Return the known rows of their begins and ends."""
        at, known = self._known(ids)
        at = at[known]
        self._kept[at] = True
        return np.concatenate([self._begins[at], self._ends[at]])

    def _known(self, ids: Int64s) -> tuple[Int64s, Bools]:
        at = ids & (PLACES - 1)
        return at, (self._begins[at] != NONE) & (self._ids[at] == ids)
