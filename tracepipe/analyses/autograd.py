"""Autograd's threads: which thread each works for, and of which forward operator it computes the gradient.

    thread 1   aten::mm [5] ├──┤ …   backward ├────────────────────────────────┤
    thread 2                           MmBackward0 [5] ├────┤ AccumulateGrad ├──┤

An operator of autograd has the sequence number of its forward operator: in the arguments of PyTorch's
profiler, or in the names of `emit_nvtx`. Operators before the forward one may have that number too: only one
that makes a node for the backward pass raises it.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from tracepipe.analyses.cuda_calls import values_by_names
from tracepipe.analyses.nesting import open_at
from tracepipe.event.columns import NONE, Bools, Int64s
from tracepipe.event.groups import RowsByNumber, run_starts
from tracepipe.store.run import Run, once_a_run
from tracepipe.store.schema import INSTANT, NO_BEGIN

# `aten::linear, seq = 5, op_id = 12`, a range of `emit_nvtx`.
_NAMED: Final = re.compile(r", seq ?= ?(\d{1,18})\b")
_IS_BACKWARD: Final = re.compile(r"autograd::|[^,]*Backward")
# The thread's names, of which the kernel keeps 15 characters.
_THREAD_NAME: Final = re.compile(r"pt_autograd_\d*")


class Autograd:
    """The operators of autograd in a recording, and their forward operators. Threads have the numbers of
    `ShapeTable.threads`, operators the rows of annotations.
    """

    def __init__(self, run: Run) -> None:
        # Nothing here refers to the run, which remembers this.
        self._ranges, self._calls = run.layer("annotation"), run.layer("userspace")
        self._thread, self._first = run.shapes.threads
        rows, number, is_backward = self._numbered(run)
        pid = run.shapes.column("pid")[self._ranges.shape[rows]]
        order = np.lexsort((is_backward, self._ranges.start_ns[rows], number, pid))
        rows, is_backward = rows[order], is_backward[order]
        starts = run_starts(number[order], pid[order])
        first = np.repeat(starts, np.diff(starts, append=len(rows)))
        # The last forward operator before each that has the same number in the same process.
        before = np.maximum.accumulate(np.where(is_backward, NONE, np.arange(len(rows))))
        self._forward = np.full(len(self._ranges), NONE, np.int64)
        self._forward[rows] = np.where(is_backward & (before >= first), rows[before], NONE)
        own = np.sort(rows[is_backward])
        self._of_thread = RowsByNumber(self._thread[self._ranges.shape[own]], own)

    def _numbered(self, run: Run) -> tuple[Int64s, Int64s, Bools]:
        """The operators that have sequence numbers, the numbers, and flags for those of autograd."""
        ranges = self._ranges
        of, texts = values_by_names(run, "annotation", _NAMED.search)
        number = np.array([NONE if one is None else int(one[1]) for one in texts])[of][ranges.shape]
        of, answers = values_by_names(run, "annotation", _IS_BACKWARD.match)
        is_backward = np.array([one is not None for one in answers])[of][ranges.shape]
        rows = np.flatnonzero(ranges.args != NONE)
        if len(rows):
            stated = run.args.whole_numbers("Sequence number")
            rows = rows[stated[ranges.args[rows]] != NONE]
            number[rows] = stated[ranges.args[rows]]
            is_backward[rows] = run.args.whole_numbers("Fwd thread id")[ranges.args[rows]] > 0
        rows = np.flatnonzero((number != NONE) & (ranges.kind != INSTANT) & (ranges.kind != NO_BEGIN))
        return rows, number[rows], is_backward[rows]

    def is_thread(self, run: Run, thread: int) -> bool:
        """Whether a thread is one of autograd's."""
        name = run.thread_name(*run.shapes.ids_of(int(self._first[thread])))
        return len(self._of_thread.of(thread)) > 0 or _THREAD_NAME.match(name or "") is not None

    def forward_of(self, calls: Int64s) -> Int64s:
        """For rows of calls, the forward operator whose gradient was being computed, NONE where it is not
        known. Shapes `(n,)`.
        """
        found = np.full(len(calls), NONE, np.int64)
        for thread, places in RowsByNumber(self._thread[self._calls.shape[calls]]):
            times_ns = self._calls.start_ns[calls[places]]
            for some, inside in open_at(self._ranges, self._of_thread.of(thread), times_ns):
                some = places[some]
                found[some] = np.where(found[some] == NONE, self._forward[inside], found[some])
        return found

    def served_by(self, calls: Int64s) -> Int64s:
        """For rows of calls on a thread of autograd, the thread it works for, else NONE: that of the last
        forward operator, as operators without a number follow those whose gradients they add up. Shapes
        `(n,)`.
        """
        found, of_row = np.full(len(calls), NONE, np.int64), self._thread[self._ranges.shape]
        for thread, places in RowsByNumber(self._thread[self._calls.shape[calls]]):
            operators = self._of_thread.of(thread)
            forward = self._forward[operators]
            is_linked = (forward != NONE) & (of_row[forward] != thread)
            if is_linked.any():
                starts_ns = self._ranges.start_ns[operators[is_linked]]
                at = np.searchsorted(starts_ns, self._calls.start_ns[calls[places]], "right") - 1
                found[places] = of_row[forward[is_linked]][np.maximum(at, 0)]
        return found

    def stacks(self, operators: Int64s) -> Int64s:
        """The stacks of operators: that of the operator itself, else that of the first call inside it, else
        NONE. Shapes `(n,)`.
        """
        found = np.full(len(operators), NONE, np.int64)
        if self._ranges.stack is not None:
            found[:] = self._ranges.stack[operators]
        if (stack := self._calls.stack) is None:
            return found
        stacked = np.flatnonzero(stack != NONE)
        calls_of = RowsByNumber(self._thread[self._calls.shape[stacked]], stacked)
        bare = np.flatnonzero(found == NONE)
        for thread, places in RowsByNumber(self._thread[self._ranges.shape[operators[bare]]], bare):
            calls, own = calls_of.of(thread), operators[places]
            at = np.searchsorted(self._calls.start_ns[calls], self._ranges.start_ns[own])
            has_one = at < len(calls)
            calls, own, places = calls[at[has_one]], own[has_one], places[has_one]
            is_inside = self._calls.start_ns[calls] < self._ranges.end_ns[own]
            found[places[is_inside]] = stack[calls[is_inside]]
        return found


autograd = once_a_run(Autograd)
"""The operators of autograd in a recording."""
