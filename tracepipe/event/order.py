"""The order in which events are nested."""

from __future__ import annotations

import numpy as np

from tracepipe.event.columns import Bools, Int64s, TraceColumns
from tracepipe.event.tables import Tables


def in_order(events: TraceColumns, tables: Tables) -> TraceColumns:
    """Events in the order of time, then of the file; an X before those it encloses."""
    order = order_of(events.ts_ns, events.dur_ns, tables.are_whole()[events.shape])
    return events if order is None else events.take(order)


def order_of(ts_ns: Int64s, dur_ns: Int64s, whole: Bools) -> Int64s | None:
    """The places of events in that order, None where they are in it already; `whole` is which are X."""
    if not bool((ts_ns[1:] < ts_ns[:-1]).any()):
        at = np.flatnonzero(whole)
        together = ts_ns[at[1:]] == ts_ns[at[:-1]]
        if not bool((together & (dur_ns[at[1:]] > dur_ns[at[:-1]])).any()):
            return None
    order = np.argsort(ts_ns, kind="stable")
    places = np.flatnonzero(whole[order])
    if len(places) > 1:
        of = order[places]
        order[places] = of[np.lexsort((-dur_ns[of], ts_ns[of]))]
    return order
