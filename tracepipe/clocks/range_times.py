"""Computes the times of warps' ranges, on the straight line between their warp's entry and its last exit.

Ranges are recorded only in cycles of their SM. A warp has both clocks at its entry and its exits, so its own
life is the scale: no range is outside of it, and ranges that nest in cycles also nest in ns.
"""

from __future__ import annotations

import numpy as np

from tracepipe.event.columns import Int64s
from tracepipe.event.warps import PlacedWarps

# Numbers are split into halves of this many bits, so that products are below 2⁶².
_HALF_BITS = 20
_BITS = 2 * _HALF_BITS


def place_ranges(warps: PlacedWarps) -> None:
    """Set the times of the ranges of a batch, whose warps have theirs."""
    if warps.range_clk is None or warps.range_dur_clk is None or not len(warps.range_clk):
        return
    assert warps.exit_clk is not None  # without it a batch has no ranges
    of = warps.of_ranges()
    life_ns, life_clk = (warps.last_of_exits(column)[of] for column in (warps.exit_ns, warps.exit_clk))
    begin_ns, end_ns = (
        _share(clk, life_clk, np.maximum(life_ns, 0))
        for clk in (warps.range_clk, warps.range_clk + warps.range_dur_clk)
    )
    warps.range_ns, warps.range_dur_ns = begin_ns, end_ns - begin_ns


def _share(clk: Int64s, life_clk: Int64s, life_ns: Int64s) -> Int64s:
    """`life_ns` × `clk` ÷ `life_clk`, rounded down; `clk` is `life_clk` at most.

    It is exact below 2⁴⁰ cycles, nine minutes. Beyond that, the last bits of the cycles are ignored.
    """
    whole_ns, rest_ns = np.divmod(life_ns, np.maximum(life_clk, 1))
    shift = np.maximum(np.frexp(life_clk.astype(np.float64))[1] - _BITS, 0).astype(np.int64)
    of, rest, part = np.maximum(life_clk >> shift, 1), rest_ns >> shift, clk >> shift
    high, low = part >> _HALF_BITS, part & ((1 << _HALF_BITS) - 1)
    quotient, remainder = np.divmod(high * rest, of)
    share_ns = (quotient << _HALF_BITS) + ((remainder << _HALF_BITS) + low * rest) // of
    shared: Int64s = clk * whole_ns + (share_ns << shift)
    return shared
