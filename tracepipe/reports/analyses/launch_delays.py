"""How long work waits after its launch until it starts on the GPU, and how much of it waits at one time."""

from __future__ import annotations

from typing import Any, NamedTuple

from tracepipe.event.columns import NONE
from tracepipe.reports.analyses.gpu_work import Work, outermost_rows
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.stored import Growing, made, parts


class Delays(NamedTuple):
    """Of the launches of one GPU, as columns."""

    delay_ns: Any
    """From the return of the call to the start of what it asked for; 0 where that began earlier."""
    depth: Any
    """How many launches had not started on the GPU when a call began, itself counted."""


def delays_of(run: Run, work: Work, rows: slice) -> Delays:
    """The delays of a GPU, whose work stands at these rows. Of a launch of a graph the first kernel counts;
    work whose call is not known by its launch id does not.
    """
    calls = run.layer("userspace")
    tops = outermost_rows(run, work.call[rows])
    has_length, is_met = calls.has_length, np.zeros(len(calls), np.bool_)
    called_ns, returned_ns, started_ns = (Growing(np.int64) for _ in range(3))
    for part in parts(rows.stop - rows.start):
        own = np.flatnonzero((tops[part] != NONE) & ~work.by_order[rows][part])
        own = own[has_length[tops[part][own]]]
        _, first = np.unique(tops[part][own], return_index=True)
        own = np.sort(own[first])
        own = own[~is_met[tops[part][own]]]
        call = tops[part][own]
        is_met[call] = True
        called_ns.extend(calls.start_ns[call], len(call))
        returned_ns.extend(calls.end_ns[call], len(call))
        started_ns.extend(work.start_ns[rows][part][own], len(call))
    asked_ns, back_ns, began_ns = called_ns.whole(), returned_ns.whole(), started_ns.whole()
    delay_ns = made(len(began_ns), np.int64, lambda part: np.maximum(began_ns[part] - back_ns[part], 0))
    asked_ns = np.sort(asked_ns)

    def depth(part: slice) -> Any:
        # What starts before its call, as clocks are off, would make the queue shorter than the call itself.
        waiting = np.arange(part.start + 1, part.stop + 1) - np.searchsorted(began_ns, asked_ns[part])
        return np.maximum(waiting, 1)

    return Delays(delay_ns, made(len(asked_ns), np.int64, depth))
