"""How the ranges of warps nest: the reference of `ranges.c`.

A range of a warp is inside another one or after it. A range that begins inside another and ends after it
crosses it, as in a loop that loads the data of its next round.
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
"""A range inside this many others counts as crossing them."""


class Nested(NamedTuple):
    """How the ranges of a batch nest. `inside` has for each range the place of the one around it, OUTER for
    none, or CROSSING. `steps` are the begins and ends of all that do not cross, in their order, warp after
    warp: twice the range's place, plus 1 for its end.
    """

    inside: Int32s
    steps: Int64s


def nested(warps: WarpColumns) -> Nested:
    """How the ranges of a batch nest."""
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
    """Whether the columns of ranges pass the checks of `checks.py`."""
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
