"""Byte strings by number, each stored once, with an overhead of some twenty bytes each."""

from __future__ import annotations

from array import array

from tracepipe.event.columns import NONE

_HASH = (1 << 32) - 1
_SLOTS_AT_FIRST = 1 << 6


class Numbered:
    """Assigns the numbers 0, 1, … to byte strings, in the order of their first occurrences.

    A dict would take ten times the memory: a recording may have a million names.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        """All strings, one after the other."""
        self._ends, self._hashes = array("q"), array("I")
        # Open addressing: a number is at the first free place from its hash on.
        self._slots = array("i", [NONE]) * _SLOTS_AT_FIRST

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, number: int) -> bytes:
        return bytes(self._data[self._ends[number - 1] if number else 0 : self._ends[number]])

    def data(self) -> bytes:
        """All strings, one after the other."""
        return bytes(self._data)

    def number(self, text: bytes) -> int:
        """The number of a string; a new string gets the next number."""
        code = hash(text) & _HASH
        at = self._place(text, code)
        number = self._slots[at]
        if number == NONE:
            number = self._slots[at] = len(self._hashes)
            self._data += text
            self._hashes.append(code)
            self._ends.append(len(self._data))
            if 3 * len(self._hashes) > 2 * len(self._slots):
                self._widen()
        return number

    def _place(self, text: bytes, code: int) -> int:
        """The place of a string, or the free place for it."""
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
