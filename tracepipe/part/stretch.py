"""A window of a recording's time: its options, and which events are in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracepipe.errors import TracepipeError
from tracepipe.event.columns import Bools, Ints
from tracepipe.event.model import TIME_LIMIT_NS
from tracepipe.units import duration_ns

ABSOLUTE: Final = "@"
_NS: Final = re.compile(r"[0-9]{1,19}")
OPEN_NS: Final = (1 << 63) - 1
"""The end of a slice without one."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A time as an option gives it: ns after the start of the recording, or on the trace's clock."""

    ns: int
    is_absolute: bool = False

    def on_trace(self, base_ns: int) -> int:
        """The time on the trace's clock, on which the recording starts at `base_ns`."""
        return self.ns if self.is_absolute else base_ns + self.ns


def moment_of(text: str) -> Moment:
    """Parse `1.5ms` (after the start), or `@22137070527` (on the trace's clock). Raises TracepipeError."""
    text = text.strip()
    if not text.startswith(ABSOLUTE):
        return Moment(min(duration_ns(text), TIME_LIMIT_NS))
    digits = text[len(ABSOLUTE) :].removesuffix("ns")
    if not _NS.fullmatch(digits) or int(digits) > TIME_LIMIT_NS:
        raise TracepipeError(
            f"{text!r} is not a time.",
            "Write a time after the start (1.5s), or @ and ns on the trace's clock.",
        )
    return Moment(int(digits), is_absolute=True)


@dataclass(frozen=True, slots=True)
class Stretch:
    """The window [`start_ns`, `end_ns`) on the trace's clock."""

    start_ns: int = -TIME_LIMIT_NS
    end_ns: int = TIME_LIMIT_NS

    def touches(self, begin_ns: Ints | int, end_ns: Ints | int) -> Bools:
        """Whether slices overlap the window. Times, or columns of shape `(n,)`; an instant ends where it
        begins.
        """
        reaches = np.logical_or(end_ns > self.start_ns, begin_ns >= self.start_ns)
        overlaps: Bools = np.logical_and(begin_ns < self.end_ns, reaches)
        return overlaps
