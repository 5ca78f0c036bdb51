"""Lanes of a warp that read the clock one after the other: an effect of the probe, not of the kernel.

Where each thread reads the clock, as in kernelretsnoop, the lanes of a warp run the probe in turn, some
nanoseconds apart. This order is subtracted before a lane is called late.
"""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.analyses.findings.kernel_warps import LANES
from tracepipe.reports.frames.arrays import Floats
from tracepipe.reports.frames.libraries import np

APART = 8
"""The distance of the lanes between which the step is measured. Over 8 lanes, a clock of 32 ns shows steps of
4 ns too, and lanes are compared with lanes of the same residue mod 8."""
MIN_PAIRS = 8
MOST_LEFT = 0.5
"""The largest share of the lanes' spread that may remain without the order. Where there is no order, nearly
all of it remains."""


class InTurn(NamedTuple):
    """Times of lanes, shape `(warps, 32)`, less the order of the probe: `step_ns` for each lane, 0 where the
    lanes do not read the clock in turn."""

    times: Floats
    step_ns: float


def without_order(times: Floats) -> InTurn:
    """Lane times, shape `(warps, 32)`, less the order of the probe, where that explains most of the
    spread.
    """
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
    """The median distance of all lanes from the median of their warp."""
    timed = ~np.isnan(times).all(axis=1)
    middle = np.nanmedian(times[timed], axis=1, keepdims=True)
    return float(np.nanmedian(np.abs(times[timed] - middle)))
