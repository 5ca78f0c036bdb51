"""Replays the steps of one process: how long they would take if something in them were not there, or faster.

    host    ─call─┤ time ├─call─────┤ time ├─wait────────┤
                 ↓latency      ↓                        ↑return
    stream        ├─kernel──┤gap├─kernel───────────────┤

The host's calls follow each other with the recorded time between them. Work on a stream begins when its
launch has reached the GPU and the work before it has ended; of these two, a recording shows only the later
one, so typical values, the medians of the recording, stand for both. A call that waits for the GPU ends when
the GPU's work has ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracepipe.analyses.gpu_work import (
    COMMUNICATION,
    COPY,
    delays_of,
    gpu_work,
    kinds_of,
    outermost_rows,
    streams_of,
)
from tracepipe.analyses.steps import step_of_work, steps_of
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import NONE, Bools, Floats, Int64s
from tracepipe.event.intervals import Stretches
from tracepipe.store.run import Run
from tracepipe.store.schema import SPAN

# If a stream is idle for longer between two kernels, the second one waited for its launch.
_GAP_MOST_NS: Final = 15_000
_WAITS: Final = re.compile(r"(cu|cuda|hip)\w*Synchronize(_ptsz|_ptds)?")
_NEVER: Final = -(1 << 62)
# The most by which unchanged steps may come out longer or shorter, and the most of the GPU's time whose order
# may be unknown.
_ERROR_MOST: Final = 0.02
_SHARE_MOST: Final = 0.05
# The driver takes about 1,024 launches before it makes the host wait.
_QUEUE_MOST: Final = 1_000
_STEPS_LEAST: Final = 5


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What is different in a replay.

    `removed` is time of the host that passes in no time, without the calls that begin in it. `calls` flags
    calls that are not made, and so launch nothing. `left` is how much of each row of work remains. With
    `free`, launches take no time of the host.
    """

    removed: Stretches | None = None
    calls: Bools | None = None
    left: Floats | None = None
    free: bool = False


class Replay:
    """The calls and the work of a recording, ready to be replayed. Columns of calls have the shape
    `(calls,)`, those of work `(rows,)`, and those of steps `(steps,)`. Raises TracepipeError, with the
    reason, where a replay would say nothing.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.work, self.steps = run, gpu_work(run), steps_of(run)
        if not self.steps.are_marked or len(self.steps.number) < _STEPS_LEAST or not len(self.work):
            raise _refused(
                f"it needs {_STEPS_LEAST} steps with work of a GPU",
                "Record steps, each in a range: ProfilerStep, step …; capture --gpu kernels.",
            )
        calls = run.layer("userspace")
        rows = np.flatnonzero((calls.parent == NONE) & (calls.kind == SPAN))
        rows = rows[np.argsort(calls.start_ns[rows], kind="stable")]
        self.rows = rows
        """The rows of the calls in their layer, in the order in which they begin."""
        self.start_ns, self.end_ns = calls.start_ns[rows], calls.end_ns[rows]
        self.names = np.array(run.shapes.values("name", calls.shape[rows]), object)
        place = np.full(len(calls) + 1, NONE, np.int64)
        place[rows] = np.arange(len(rows))
        self.call: Int64s = place[outermost_rows(run, self.work.call)]
        """The call that launched each row of work."""
        self._step = step_of_work(run, self.steps, self.work)
        self.kinds = kinds_of(run, self.work)
        self._refuse_what_is_not_known()
        whole = self.steps.start_ns[:1], self.steps.end_ns[-1:]
        busy = Stretches(self.work.start_ns, self.work.end_ns)
        self.idle = float(busy.uncovered_ns(*whole)[0] / (whole[1] - whole[0])[0])
        """The share of the time of the steps for which the GPU was idle."""
        self._learn()
        self.recorded_ns = self._lengths_ns(self.work.start_ns[self._order], int(self.work.end_ns.max()))
        self.unchanged_ns = self.lengths_ns(Change())
        self.error = float(np.median(self.unchanged_ns) / max(float(np.median(self.recorded_ns)), 1)) - 1
        """By what share the unchanged steps come out too long."""
        if abs(self.error) > _ERROR_MOST:
            raise _refused(
                f"its unchanged steps come out {100 * self.error:+.1f}% off: something decides that was not "
                "recorded",
                "Record all CUDA calls of the process, in steps that end with a synchronization.",
            )

    def _refuse_what_is_not_known(self) -> None:
        """Raise TracepipeError where the order of work or calls is not known from the recording."""
        work, run = self.work, self.run
        lengths_ns = work.end_ns - work.start_ns
        inside = self._step != NONE
        whole_ns = max(int(lengths_ns[inside].sum()), 1)
        unknown = (self.call == NONE) | work.by_order
        during = Stretches(self.steps.start_ns[:1], self.steps.end_ns[-1:])
        lost_ns = int(during.covered_ns(work.start_ns[unknown], work.end_ns[unknown]).sum())
        if lost_ns > _SHARE_MOST * whole_ns:
            raise _refused("the launches of its work are not known", "Record the CUDA calls too.")
        if len(work.gpus) > 1:
            raise _refused("it has work of several GPUs", "Name the recording of one rank.")
        if int(lengths_ns[inside & (self.kinds == COMMUNICATION)].sum()) > _SHARE_MOST * whole_ns:
            raise _refused("its collectives wait for other ranks", "tracepipe ranks compares ranks.")
        _, self._stream = np.unique(streams_of(run, work), return_inverse=True)
        sums_ns = np.bincount(self._stream[inside], lengths_ns[inside])
        if sums_ns.sum() - sums_ns.max(initial=0) > _SHARE_MOST * whole_ns:
            raise _refused(
                "its work is on several streams, whose waits for each other are not replayed",
                "Record a program that uses one stream.",
            )
        if len(self.start_ns) > 1 and (self.start_ns[1:] < self.end_ns[:-1]).mean() > _SHARE_MOST:
            raise _refused("its threads call CUDA at the same time", "Record a process with one such thread.")
        if int(delays_of(run, work, slice(0, len(work))).depth.max(initial=0)) > _QUEUE_MOST:
            raise _refused("its launch queue was full at times", "Synchronize in each step.")

    def _learn(self) -> None:
        """Find the typical times between calls and work, and which calls wait."""
        work = self.work
        order = np.lexsort((work.start_ns, self.call))
        order = order[self.call[order] != NONE]
        self._bounds: list[int] = np.searchsorted(self.call[order], np.arange(len(self.names) + 1)).tolist()
        self._order = order
        copies = (work.what[order] == COPY) & (work.end_ns[order] <= self.end_ns[self.call[order]])
        self._waits = np.array([_WAITS.fullmatch(name) is not None for name in self.names], np.bool_)
        self._waits[self.call[order[copies]]] = True  # a blocking copy
        starts_ns, ends_ns, stream = work.start_ns[order], work.end_ns[order], self._stream[order]
        called_ns = self.start_ns[self.call[order]]
        before_ns = np.full(len(order), _NEVER)
        for number in range(int(stream.max(initial=-1)) + 1):
            own = np.flatnonzero(stream == number)
            before_ns[own[1:]] = np.maximum.accumulate(ends_ns[own])[:-1]
        # Work waited for its launch alone where the stream was idle, and for the stream alone where its
        # launch was there in time.
        waited_ns, idle = starts_ns - before_ns, before_ns <= called_ns
        self._latency_ns = _median((starts_ns - called_ns)[idle])
        queued = (before_ns > called_ns + self._latency_ns) & (waited_ns < _GAP_MOST_NS)
        self._gap_ns = _median(np.maximum(waited_ns[queued], 0))
        expected_ns = np.maximum(called_ns + self._latency_ns, before_ns + self._gap_ns)
        late_ns = np.where(self._step[order] == NONE, 0, starts_ns - expected_ns)
        hidden_ns = int(late_ns[(late_ns > _GAP_MOST_NS) & ~idle].sum())
        whole_ns = int(self.steps.end_ns[-1] - self.steps.start_ns[0])
        if hidden_ns > _ERROR_MOST * whole_ns:
            raise _refused(
                f"for {100 * hidden_ns / whole_ns:.1f}% of the time work waits for something that was not "
                "recorded",
                "Record all CUDA calls of the process.",
            )
        done_ns = np.append(np.maximum.accumulate(ends_ns), _NEVER)[np.array(self._bounds[1:]) - 1]
        self._owns, self._returns = (np.zeros(len(self.names), np.int64) for _ in range(2))
        for name in set(self.names[self._waits].tolist()):
            own = np.flatnonzero(self._waits & (self.names == name))
            is_bound = done_ns[own] > self.start_ns[own]
            returns_ns = np.maximum(self.end_ns - done_ns, 0)[own[is_bound]]
            alone_ns = (self.end_ns - self.start_ns)[own[~is_bound]]
            self._returns[own] = _median(returns_ns)
            self._owns[own] = _median(alone_ns) if len(alone_ns) else _median(returns_ns)

    def _lengths_ns(self, starts_ns: Int64s, last_ns: int) -> Int64s:
        """How long each step is on the GPU, whose work begins at some times, in the order of calls: from the
        first work that is launched in it to the first of the next step.
        """
        step = self._step[self._order]
        firsts_ns = np.full(len(self.steps.number), last_ns)
        np.minimum.at(firsts_ns, step[step != NONE], starts_ns[step != NONE])
        found: Int64s = np.diff(np.minimum.accumulate(firsts_ns[::-1])[::-1], append=last_ns)
        return found

    def lengths_ns(self, change: Change) -> Int64s:
        """How long each step takes on the GPU with a change."""
        removed = change.removed
        inside = np.zeros(len(self.names), np.bool_)
        if removed is not None:
            inside = removed.covered_ns(self.start_ns, self.start_ns + 1) > 0
        calls = np.flatnonzero(~inside if change.calls is None else ~inside & ~change.calls)
        lengths_ns = self.end_ns - self.start_ns
        if change.free:
            launches = np.diff(self._bounds) > 0
            lengths_ns = np.where(launches & ~self._waits, 0, lengths_ns)
        # The time of the host from one kept call to the next, without that of calls in between.
        from_ns = np.concatenate([self.start_ns[:1], self.end_ns[calls][:-1]])[: len(calls)]
        gaps_ns = self.start_ns[calls] - from_ns
        if removed is not None:
            gaps_ns -= removed.covered_ns(from_ns, self.start_ns[calls])
        if change.calls is not None:
            outside = change.calls & ~inside
            gone_ns = np.concatenate([[0], np.cumsum(np.where(outside, self.end_ns - self.start_ns, 0))])
            gaps_ns -= np.diff(gone_ns[calls], prepend=0)
        gaps_ns = np.maximum(gaps_ns, 0)
        return self._lengths_ns(*self._pass(calls, gaps_ns, lengths_ns, change.left))

    def _pass(
        self, calls: Int64s, gaps_ns: Int64s, lengths_ns: Int64s, left: Floats | None
    ) -> tuple[Int64s, int]:
        """Make some calls one after the other: when work begins, in the order of calls, and when the last of
        it ends. Work that is not launched has the time of the last before it.
        """
        work, order = self.work, self._order
        needs_ns = (work.end_ns - work.start_ns)[order]
        if left is not None:
            needs_ns = (needs_ns * left[order]).astype(np.int64)
        needs, streams, bounds = needs_ns.tolist(), self._stream[order].tolist(), self._bounds
        waits, lengths = self._waits.tolist(), lengths_ns.tolist()
        owns, returns = self._owns.tolist(), self._returns.tolist()
        until = [_NEVER] * (max(streams, default=0) + 1)
        works = [_NEVER] * len(needs)
        now = int(self.start_ns[0]) if len(self.start_ns) else 0
        latency_ns, gap_ns = self._latency_ns, self._gap_ns
        for at, passed in zip(calls.tolist(), gaps_ns.tolist(), strict=True):
            now += passed
            for place in range(bounds[at], bounds[at + 1]):
                stream = streams[place]
                begins = max(now + latency_ns, until[stream] + gap_ns)
                works[place], until[stream] = begins, begins + needs[place]
            if waits[at]:
                done = max(until)
                now = max(now + owns[at], done + returns[at]) if done > now else now + owns[at]
            else:
                now += lengths[at]
        return np.maximum.accumulate(np.array(works, np.int64)), max(until)


def _median(values: Int64s) -> int:
    return int(np.median(values)) if len(values) else 0


def _refused(reason: str, hint: str) -> TracepipeError:
    return TracepipeError(f"The steps cannot be replayed: {reason}.", hint)
