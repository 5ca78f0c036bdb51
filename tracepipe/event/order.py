"""The order in which events are nested."""

from __future__ import annotations

import numpy as np

from tracepipe.event.columns import TraceColumns
from tracepipe.event.tables import Tables


def in_order(events: TraceColumns, tables: Tables) -> TraceColumns:
    """Events in the order of time, the file's at one time; an X before those it encloses."""
    order = np.argsort(events.ts_ns, kind="stable")
    places = np.flatnonzero(tables.are_whole()[events.shape[order]])
    if len(places) > 1:
        of = order[places]
        order[places] = of[np.lexsort((-events.dur_ns[of], events.ts_ns[of]))]
    return events.take(order)
