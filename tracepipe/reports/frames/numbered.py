"""Byte strings by number, each once, with some twenty bytes for each besides its own."""

from __future__ import annotations

from array import array
from typing import Any

from tracepipe.event.columns import NONE
from tracepipe.reports.frames.stored import put_away

_HASH = (1 << 32) - 1
_SLOTS_AT_FIRST = 1 << 6


class Numbered:
    """Gives byte strings numbers from 0 on, in the order in which they are met. `width` is the length of all
    of them, 0 where they differ in it.
    """

    def __init__(self, width: int = 0) -> None:
        self.data: Any = bytearray()
        """All of them, one after the other."""
        self._width = width
        self._ends: Any = array("q")
        self._hashes: Any = array("I")
        # Open addressing: a number stands at the first free place from its hash on.
        self._slots: Any = array("i", [NONE]) * _SLOTS_AT_FIRST

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, number: int) -> bytes:
        if self._width:
            return bytes(self.data[number * self._width : (number + 1) * self._width])
        return bytes(self.data[self._ends[number - 1] if number else 0 : self._ends[number]])

    def find(self, text: bytes) -> int:
        """The number of one, NONE where it was not met."""
        number: int = self._slots[self._place(text, hash(text) & _HASH)]
        return number

    def number(self, text: bytes) -> int:
        """The number of one, which is given one if it has none."""
        code = hash(text) & _HASH
        at = self._place(text, code)
        number: int = self._slots[at]
        if number == NONE:
            number = self._slots[at] = len(self._hashes)
            self.data += text
            self._hashes.append(code)
            if not self._width:
                self._ends.append(len(self.data))
            if 3 * len(self._hashes) > 2 * len(self._slots):
                self._widen()
        return number

    def put_away(self) -> None:
        """Keep all of them out of memory, where they are many. No more are given numbers then. Raises
        OutputError.
        """
        self.data, self._ends, self._hashes, self._slots = map(
            put_away, (self.data, self._ends, self._hashes, self._slots)
        )

    def _place(self, text: bytes, code: int) -> int:
        """The place of one, or the free one where it would stand."""
        slots, hashes, mask = self._slots, self._hashes, len(self._slots) - 1
        at = code & mask
        while (number := slots[at]) != NONE and (hashes[number] != code or self[number] != text):
            at = (at + 1) & mask
        return at

    def _widen(self) -> None:
        slots = array("i", [NONE]) * (2 * len(self._slots))
        mask = len(slots) - 1
        for number, code in enumerate(self._hashes):
            at = code & mask
            while slots[at] != NONE:
                at = (at + 1) & mask
            slots[at] = number
        self._slots = slots
