"""Counts text between events that a script or the traced program printed, and reports it once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tracepipe.event.checks import shown
from tracepipe.event.columns import SourceBatch, no_events
from tracepipe.event.model import Problem
from tracepipe.units import counted

_TEXTS_SHOWN: Final = 3


class Printed:
    """The printed lines of one input."""

    def __init__(self) -> None:
        self._count = 0
        self._first = 0
        self._texts: dict[bytes, int] = {}

    def add(self, number: int, text: bytes) -> None:
        """Count line `number`."""
        self._first = self._first or number
        self._count += 1
        if text in self._texts or len(self._texts) < _TEXTS_SHOWN:
            self._texts[text] = self._texts.get(text, 0) + 1

    def stated(self) -> Iterator[SourceBatch]:
        """A batch with the problem that counts them; none where there are none."""
        if not self._count:
            return
        texts = [
            shown(text) + (f" ({count} times)" if count > 1 else "") for text, count in self._texts.items()
        ]
        named = ", ".join(texts) + (", …" if sum(self._texts.values()) < self._count else "")
        lines = counted(self._count, "line|lines is|are")
        message = f"{lines} text that the script or the traced program printed, not events: {named}"
        yield SourceBatch(no_events(), problems=[Problem(self._first, "", message, skipped=False)])
