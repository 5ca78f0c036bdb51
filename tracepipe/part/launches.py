"""Launches whose call or whose work is in a part: it has both, so that an arrow has its two ends."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tracepipe.event.columns import NONE, Bools, Int64s

# A power of two. Ids of launches are counted: so many of the last ones have a place each.
PLACES: Final = 1 << 16


class Joined:
    """What begins something by a number that comes again: calls by their launches, arrows by their flows.

    Of the last ones it has the rows, and whether the part has them.
    """

    def __init__(self) -> None:
        self._ids: Int64s = np.zeros(PLACES, np.int64)
        self._begins: Int64s = np.full(PLACES, NONE, np.int64)
        self._ends: Int64s = np.full(PLACES, NONE, np.int64)
        self._kept: Bools = np.zeros(PLACES, np.bool_)

    def begin(self, ids: Int64s, rows: Int64s) -> None:
        """Note where some begin."""
        at = ids & (PLACES - 1)
        self._ids[at], self._begins[at], self._ends[at], self._kept[at] = ids, rows, NONE, False

    def end(self, ids: Int64s, rows: Int64s) -> None:
        """Note where some end."""
        at, known = self._known(ids)
        self._ends[at[known]] = rows[known]

    def are_kept(self, ids: Int64s) -> Bools:
        """Which of these the part has."""
        at, known = self._known(ids)
        return known & self._kept[at]

    def keep(self, ids: Int64s) -> Any:
        """The part has these: the rows where they begin and end, as far as they are known."""
        at, known = self._known(ids)
        at = at[known]
        self._kept[at] = True
        return np.concatenate([self._begins[at], self._ends[at]])

    def _known(self, ids: Int64s) -> tuple[Int64s, Bools]:
        at = ids & (PLACES - 1)
        return at, (self._begins[at] != NONE) & (self._ids[at] == ids)
