"""The rows of a recording that a part has: a bit for each, so a million rows take 125 KB."""

from __future__ import annotations

import numpy as np

from tracepipe.event.columns import NONE, Bools, Bytes, Ints, grown


class Marks:
    """A bit for each row. Rows are numbered over the whole recording, in the order in which its reader yields
    them.
    """

    def __init__(self) -> None:
        self._bits: Bytes = np.zeros(0, np.uint8)
        self.last = NONE
        """The last row that is marked."""

    def add(self, rows: Ints) -> None:
        """Mark rows, shape `(n,)`; NONE among them is ignored."""
        rows = rows[rows != NONE]
        if not len(rows):
            return
        self.last = max(self.last, int(rows.max()))
        self._bits = grown(self._bits, (self.last >> 3) + 1, 0)
        np.bitwise_or.at(self._bits, rows >> 3, (1 << (rows & 7)).astype(np.uint8))

    def of(self, first: int, count: int) -> Bools:
        """Flags the marked rows among `count` rows from `first` on. Shape `(count,)`."""
        held = self._bits[first >> 3 : (first + count + 7) >> 3]
        bits = np.unpackbits(held, bitorder="little")[first & 7 :][:count]
        return np.concatenate([bits, np.zeros(count - len(bits), np.uint8)]).astype(np.bool_)
