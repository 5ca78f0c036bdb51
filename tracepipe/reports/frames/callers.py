"""Depths of spans, and their callers where the nesting of events did not find them."""

from __future__ import annotations

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.event.nesting import OVERLAP_ROWS_MAX
from tracepipe.reports.frames.libraries import np


def depths(parent: Int32s) -> Int32s:
    """How many spans are around each one. `parent` has the row of the innermost one, or NONE.
    Shapes `(n,)`.
    """
    count = len(parent)
    # The last place is for "no caller". Each round doubles the distance, so a deep recursion needs few
    # rounds.
    above = np.append(np.where(parent == NONE, count, parent), count).astype(np.int32)
    depth: Int32s = (above != count).astype(np.int32)
    while bool((more := depth[above]).any()):
        depth += more
        above = above[above]
    inner: Int32s = depth[:-1]
    return inner


def callers_by_time(start_ns: Int64s, end_ns: Int64s, lasts: Bools) -> Int64s:
    """For each span the innermost of the last `BESIDE_MAX` open spans that encloses it, else NONE.

    Spans are sorted by start, the longer first; `lasts` flags those that can be callers. Shapes `(n,)`.
    """
    parent = np.full(len(start_ns), NONE, np.int64)
    starts, ends, may_call = start_ns.tolist(), end_ns.tolist(), lasts.tolist()
    around: list[int] = []
    for at, (begin_ns, until_ns, calls) in enumerate(zip(starts, ends, may_call, strict=True)):
        while around and ends[around[-1]] <= begin_ns:
            around.pop()
        for one in around[: -OVERLAP_ROWS_MAX - 1 : -1]:
            if ends[one] >= until_ns and ends[one] > begin_ns:
                parent[at] = one
                break
        if calls:
            around.append(at)
    return parent
