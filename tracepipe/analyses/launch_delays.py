"""The delay from a launch to the start of its work on the GPU, and the number of launches that wait."""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.analyses.gpu_work import Work, outermost_rows
from tracepipe.event.columns import NONE, Int64s
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import Growing, made, parts
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
    has_length, is_counted = calls.has_length, np.zeros(len(calls), np.bool_)
    called_ns, returned_ns, started_ns = (Growing(np.int64) for _ in range(3))
    for part in parts(rows.stop - rows.start):
        own = np.flatnonzero((tops[part] != NONE) & ~work.by_order[rows][part])
        own = own[has_length[tops[part][own]]]
        _, first = np.unique(tops[part][own], return_index=True)
        own = np.sort(own[first])
        own = own[~is_counted[tops[part][own]]]
        call = tops[part][own]
        is_counted[call] = True
        called_ns.extend(calls.start_ns[call], len(call))
        returned_ns.extend(calls.end_ns[call], len(call))
        started_ns.extend(work.start_ns[rows][part][own], len(call))
    asked_ns, back_ns, began_ns = called_ns.whole(), returned_ns.whole(), started_ns.whole()
    delay_ns = made(len(began_ns), np.int64, lambda part: np.maximum(began_ns[part] - back_ns[part], 0))
    asked_ns = np.sort(asked_ns)

    def depth(part: slice) -> Int64s:
        # Work that starts before its call, by an error of the clocks, would make the queue shorter than 1.
        waiting = np.arange(part.start + 1, part.stop + 1) - np.searchsorted(began_ns, asked_ns[part])
        return np.maximum(waiting, 1)

    return Delays(delay_ns, made(len(asked_ns), np.int64, depth))
