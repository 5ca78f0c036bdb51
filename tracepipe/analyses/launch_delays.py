"""The delay from a launch to the start of its work on the GPU, and the number of launches that wait."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tracepipe.analyses.gpu_work import Work, outermost_rows
from tracepipe.event.columns import NONE, Int64s, Ints
from tracepipe.store.run import Run


class Delays(NamedTuple):
    """The delays of the launches on one GPU, as columns of shape `(launches,)`."""

    delay_ns: Int64s
    """From the return of the call to the start of its work; 0 where the work started earlier."""
    depth: Ints
    """How many launches had not started on the GPU when a call began, including its own."""


def delays_of(run: Run, work: Work, rows: slice) -> Delays:
    """The delays of a GPU, whose work is at these rows. For the launch of a graph, its first kernel counts.
    Work whose call was not found by its launch id is left out.
    """
    calls = run.layer("userspace")
    tops = outermost_rows(run, work.call[rows])
    own = np.flatnonzero((tops != NONE) & ~work.by_order[rows])
    own = own[calls.rows(tops[own], "kind").has_length]
    # The first work of each call, in the order of the work.
    own = np.sort(own[np.unique(tops[own], return_index=True)[1]])
    asking = calls.rows(tops[own], "start_ns", "end_ns")
    began_ns, asked_ns = work.start_ns[rows][own], np.sort(asking.start_ns)
    # Work that starts before its call, by an error of the clocks, would make the queue shorter than 1.
    depth = np.maximum(np.arange(1, len(own) + 1) - np.searchsorted(began_ns, asked_ns), 1)
    return Delays(np.maximum(began_ns - asking.end_ns, 0), depth)
