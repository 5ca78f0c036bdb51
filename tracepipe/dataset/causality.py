"""How far clocks can be off, as no rank leaves a collective before another one has come to it.

    host A  ├─ came ───────────────┤ left
    host B            ├─ came ────────┤ left

B left after A had come, and A after B had come. So A's clock can be moved to later by at most the time from
A's coming to B's leaving, and to earlier by at most that from B's coming to A's leaving. Of many collectives
the shortest times count. Between three clocks these limits add up: where A can be moved against B, and B
against C, A can be moved against C by no more than both.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tracepipe.event.columns import Int64s

# The clock that came last to a collective limits the others most, and those shortly before it nearly as much.
_LAST: Final = 4
Limits = NDArray[np.float64]
"""By how many ns clock `i` can be moved to later against clock `j`, at `[i, j]`; inf where nothing limits."""


def certain_limits(
    clock: Int64s, collective: Int64s, arrived_ns: Int64s, left_ns: Int64s, clocks: int
) -> Limits:
    """The limits that collectives set to `clocks` clocks. The columns have a row for each clock and
    collective: its last start and its first end, all on one clock as far as that is known.
    """
    limits = np.full((clocks, clocks), np.inf)
    if not len(clock):
        return limits
    order = np.lexsort((-arrived_ns, collective))
    first = np.flatnonzero(np.diff(collective[order], prepend=-1))
    sizes = np.diff(first, append=len(order))
    for nth in range(_LAST):
        last = np.repeat(order[first + np.minimum(nth, sizes - 1)], sizes)
        pair, after_ns = (clock[last], clock[order]), left_ns[order] - arrived_ns[last]
        is_pair = pair[0] != pair[1]
        np.minimum.at(limits, (pair[0][is_pair], pair[1][is_pair]), after_ns[is_pair])
    return limits


def likely_limits(clock: Int64s, collective: Int64s, apart_ns: NDArray[np.float64], reference: int) -> Limits:
    """The limits that hold where two clocks that share collectives are no further apart than the sum of their
    `apart_ns`, of shape `(clocks,)`.
    """
    limits = np.full((len(apart_ns), len(apart_ns)), np.inf)
    order = np.lexsort((clock, clock != reference, collective))
    first = np.flatnonzero(np.diff(collective[order], prepend=-1))
    one, other = np.repeat(clock[order[first]], np.diff(first, append=len(order))), clock[order]
    limits[one, other] = limits[other, one] = apart_ns[one] + apart_ns[other]
    return limits


def against(limits: Limits, reference: int) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """How far each clock can be moved to earlier and to later against one of them, of shapes `(clocks,)`;
    None where limits contradict each other.
    """
    earlier_ns, later_ns = limits[reference].copy(), limits[:, reference].copy()
    earlier_ns[reference] = later_ns[reference] = 0
    for _ in range(len(limits)):
        through = np.minimum(earlier_ns, (earlier_ns[:, None] + limits).min(0))
        back = np.minimum(later_ns, (limits + later_ns).min(1))
        if np.array_equal(through, earlier_ns) and np.array_equal(back, later_ns):
            break
        earlier_ns, later_ns = through, back
    return None if (earlier_ns + later_ns < 0).any() else (earlier_ns, later_ns)
