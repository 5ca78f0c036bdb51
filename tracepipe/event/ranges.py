"""How the ranges of warps lie in each other: the reference of `ranges.c`.

A range of a warp lies in another one, or after it; where it begins in one and ends behind it, it crosses it,
as in a loop that loads what its next round takes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from tracepipe.event.columns import Int32s, Int64s
from tracepipe.event.warps import EACH_RANGE, WarpColumns
from tracepipe.native import library

OUTER: Final = -1
CROSSING: Final = -2
DEPTH_MAX: Final = 64
"""A range in so many others counts as crossing them."""


class Nested(NamedTuple):
    """Of the ranges of a batch, by their places: `inside` is the range that each is in, OUTER in none, or
    CROSSING. `steps` are the begins and ends of all but those that cross, in the order in which they were
    passed, warp after warp: twice the range's place, and 1 more at its end.
    """

    inside: Int32s
    steps: Int64s


def nested(warps: WarpColumns) -> Nested:
    """How the ranges of a batch lie in each other."""
    assert warps.range_count is not None and warps.range_clk is not None and warps.range_dur_clk is not None
    counts, begin, dur = warps.range_count, warps.range_clk, warps.range_dur_clk
    core = library()
    if core is None:
        return _nested(counts.tolist(), begin.tolist(), dur.tolist())
    inside, steps = np.empty(len(begin), np.int32), np.empty(2 * len(begin), np.int64)
    pointers = (column.ctypes.data for column in (counts, begin, dur, inside, steps))
    count = core.tp_ranges_nest(len(counts), *pointers)
    return Nested(inside, steps[:count])


def _nested(counts: list[int], begin: list[int], dur: list[int]) -> Nested:
    inside: list[int] = []
    steps: list[int] = []
    for count in counts:
        around: list[int] = []
        for at in range(len(inside), len(inside) + count):
            while around and begin[around[-1]] + dur[around[-1]] <= begin[at]:
                steps.append(2 * around.pop() + 1)
            is_beyond = around and begin[around[-1]] + dur[around[-1]] < begin[at] + dur[at]
            if is_beyond or len(around) == DEPTH_MAX:
                inside.append(CROSSING)
                continue
            inside.append(around[-1] if around else OUTER)
            around.append(at)
            steps.append(2 * at)
        steps += (2 * one + 1 for one in reversed(around))
    return Nested(np.array(inside, np.int32), np.array(steps, np.int64))


def ranges_agree(warps: WarpColumns) -> bool:
    """Whether the columns of ranges are as `checks` wants them."""
    counts = warps.range_count
    count = 0 if counts is None else int(counts.sum())
    columns = {name: getattr(warps, name) for name in EACH_RANGE}
    if any(column is not None and len(column) != count for column in columns.values()):
        return False
    if not count:
        return True
    name, clk, dur_clk = columns["range_name"], columns["range_clk"], columns["range_dur_clk"]
    if name is None or clk is None or dur_clk is None or warps.exit_clk is None:
        return False
    of = warps.of_ranges()
    last_clk = warps.last_of_exits(warps.exit_clk)[of]
    is_within = (clk <= last_clk) & (dur_clk <= last_clk - clk)
    is_in_order = (np.diff(clk) >= 0) | (np.diff(of) != 0)
    return int(name.max()) < len(warps.ranges) and bool(is_within.all()) and bool(is_in_order.all())
