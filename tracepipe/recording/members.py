"""Recordings that are read as one, and whose places on the common clock are known before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracepipe.clocks.anchors import Anchor
from tracepipe.clocks.maps import ClockMap
from tracepipe.event.model import SourceNs
from tracepipe.recording.survey import Survey

_BILLION = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One of several recordings. `name` is its name among them, and `header` has what is known of it besides
    its own. `clock` is the name of the common clock, on which `drift` puts its times, as `how` says, within
    `bound_ns`, or as `bound` says where that is not a number.
    """

    name: str
    header: Mapping[str, Any]
    clock: str
    drift: ClockMap
    how: str
    bound_ns: int | None
    bound: str = ""

    def anchor(self, survey: Survey) -> Anchor:
        """Its place, by its first time."""
        first_ns = survey.first_ns if survey.is_begun else int(self.drift.source_ns[0])
        offset_ns = self.drift.place(SourceNs(first_ns)) - first_ns
        drift = None if self.drift.rate == (_BILLION, _BILLION) else self.drift
        return Anchor(offset_ns, self.bound_ns, self.how, self.bound, drift)


def line_map(at_ns: int, offset_ns: int, drift_ppb: int, bound_ns: int) -> ClockMap:
    """The map of a clock by `ns + offset_ns + (ns - at_ns) * drift_ppb / 10⁹`, to the ns below."""
    point, bounds_ns = np.full(1, at_ns, np.int64), np.full(2, bound_ns, np.int64)
    rate = _BILLION + drift_ppb, _BILLION
    return ClockMap("", "assumed", point, point + offset_ns, bounds_ns, bounds_ns, rate)
