"""Lanes of a warp that read the clock one after the other: an order of the probe's, and nothing to find.

Where each thread takes its own time, as in kernelretsnoop, the lanes of a warp run the probe in turn, some
nanoseconds apart. A lane that is late must be seen against that, not against the spread that it makes.
"""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.reports.findings.kernel_warps import LANES, Floats
from tracepipe.reports.frames.libraries import np

APART = 8
"""Lanes between which the step is taken: over so many, a clock of 32 ns shows steps of 4 ns too, and lanes of
one residue of 8 are compared with their like."""
MIN_PAIRS = 8
MOST_LEFT = 0.5
"""Of the spread of lanes, at most, may be left without the order; noise around none leaves nearly all."""


class InTurn(NamedTuple):
    """Times of lanes, an array of (warps, 32), without what each lane comes after the one before: `step_ns`,
    0 where lanes do not follow each other."""

    times: Floats
    step_ns: float


def without_order(times: Floats) -> InTurn:
    """Lane times less their order, where that explains most of their spread."""
    pairs = times[:, APART:] - times[:, :-APART]
    known = pairs[~np.isnan(pairs)]
    if known.size < MIN_PAIRS:
        return InTurn(times, 0.0)
    step = float(np.median(known)) / APART
    straight = times - step * np.arange(LANES)
    if not step or _spread(straight) > MOST_LEFT * _spread(times):
        return InTurn(times, 0.0)
    return InTurn(straight, step)


def _spread(times: Floats) -> float:
    """The median distance from the warp's median, of all lanes."""
    told = ~np.isnan(times).all(axis=1)
    middle = np.nanmedian(times[told], axis=1, keepdims=True)
    return float(np.nanmedian(np.abs(times[told] - middle)))
