"""What is called on random input: a function for each function of the core, or for some together.

Each takes the core and the random numbers of its case. A sanitizer ends the process where memory or
arithmetic is misused; a wrong result fails an assertion.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from random import Random
from typing import Any

from tests.native import (
    chrome,
    clocks,
    convert,
    layered,
    nesting,
    objects,
    packets,
    perfetto,
    reading,
    records,
    replaying,
    ring,
    sorting,
    trace_events,
    warps,
)

TARGETS: dict[str, Callable[[ctypes.CDLL, Random], Any]] = {
    "read_lines": reading.read_lines,
    "layered_read": layered.layered_read,
    "batch_read": reading.batch_read,
    "nest_events": nesting.nest_events,
    "order": warps.order,
    "sm_clocks_refine": clocks.sm_clocks_refine,
    "records": records.sieve,
    "replay": replaying.replay,
    "ring": ring.ring,
    "objects": objects.objects,
    "sorted_rows": sorting.sorted_rows,
    "events_take": trace_events.events_take,
    "packets_take": packets.packets_take,
    "ranges_nest": warps.ranges_nest,
    "warps_take": warps.warps_take,
    "warps_running": warps.warps_running,
    "perfetto_args": perfetto.perfetto_args,
    "perfetto_write": perfetto.perfetto_write,
    "perfetto_warps": perfetto.perfetto_warps,
    "perfetto_switches": perfetto.perfetto_switches,
    "chrome_write": chrome.chrome_write,
    "chrome_warps": chrome.chrome_warps,
    "convert": convert.convert,
}
