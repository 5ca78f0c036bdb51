"""Byte strings by number, each stored once, with an overhead of some twenty bytes each."""

from __future__ import annotations

from array import array
from typing import Any

from tracepipe.event.columns import NONE, Int64s
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import Growing, put_away, touched

_HASH = (1 << 32) - 1
_SLOTS_AT_FIRST = 1 << 6
# The bytes of new strings that are collected before they are appended to the column.
_LATE_BYTES = 1 << 16
# The bytes of the column that are touched to read one string.
_PAGE_BYTES = 1 << 12


class Numbered:
    """Assigns the numbers 0, 1, … to byte strings, in the order of their first occurrences. `width` is the
    length of all strings, or 0 where lengths differ.
    """

    def __init__(self, width: int = 0) -> None:
        # All strings, one after the other: a column, and the new ones.
        self._column, self._late = Growing(np.uint8), bytearray()
        self._kept = memoryview(b"")
        self._width = width
        self._ends: Any = array("q")
        self._hashes: Any = array("I")
        # Open addressing: a number is at the first free place from its hash on.
        self._slots: Any = array("i", [NONE]) * _SLOTS_AT_FIRST

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, number: int) -> bytes:
        if self._width:
            first, last = number * self._width, (number + 1) * self._width
        else:
            first, last = self._ends[number - 1] if number else 0, self._ends[number]
        kept = len(self._kept)
        if first >= kept:
            return bytes(self._late[first - kept : last - kept])
        touched(_PAGE_BYTES)
        return bytes(self._kept[first:last])

    @property
    def data(self) -> memoryview:
        """All strings, one after the other. Raises OutputError."""
        self._keep()
        return self._kept

    def _keep(self) -> None:
        """Append the new strings to the column."""
        if self._late:
            self._column.extend(np.frombuffer(self._late, np.uint8), len(self._late))
            self._late = bytearray()
            self._kept = self._column.so_far(self._column.count).data

    def sizes(self, numbers: Ints) -> Int64s:
        """The lengths of some strings, shapes `(n,)`; only where lengths differ."""
        ends = np.frombuffer(self._ends or array("q", [0]), np.int64)
        return ends[numbers] - np.where(numbers > 0, ends[numbers - 1], 0)

    def find(self, text: bytes) -> int:
        """The number of a string, NONE where it has none."""
        number: int = self._slots[self._place(text, hash(text) & _HASH)]
        return number

    def number(self, text: bytes) -> int:
        """The number of a string; a new string gets the next number. Raises OutputError."""
        code = hash(text) & _HASH
        at = self._place(text, code)
        number: int = self._slots[at]
        if number == NONE:
            number = self._slots[at] = len(self._hashes)
            self._late += text
            self._hashes.append(code)
            if not self._width:
                self._ends.append(len(self._kept) + len(self._late))
            if len(self._late) > _LATE_BYTES:
                self._keep()
            if 3 * len(self._hashes) > 2 * len(self._slots):
                self._widen()
        return number

    def put_away(self) -> None:
        """Move everything to files, where there is much. No string may get a new number afterwards. Raises
        OutputError.
        """
        self._keep()
        self._ends, self._hashes, self._slots = map(put_away, (self._ends, self._hashes, self._slots))

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
