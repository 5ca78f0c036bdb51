"""Replays the steps of a program, or of all ranks of a job: how long they would take if something were other.

Each row of a program is two times: when its call begins, and when its work ends, or the call that waits
returns. Each time is the latest of those that it depends on, each some time later. Of these a recording shows
only the latest, so typical values, the medians of the recording, stand for the lags of all. A collective ends
some time after its last rank has come. Work that overlaps communication on its GPU takes longer.

    call i  ──host──▶ call i + 1 ──host──▶ …
      │ latency         │ latency
      ▼                 ▼
    work i  ──gap───▶ work i + 1 (same stream) ──return──▶ a call that waits
      └────────cross──▶ work that waits for an event
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Final, NamedTuple

import numpy as np

from tracepipe.analyses.gpu_work import COMMUNICATION, COMPUTE, COPIES
from tracepipe.analyses.program import GPUS, LAUNCHES, QUEUE, THREADS, TYPICAL, WAIT, Program
from tracepipe.analyses.waiting_graph import COMES, COMMUNICATES, LEAVES, SLOWED, WaitingGraph
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import NONE, Bools, Bytes, Floats, Int32s, Int64s, Ints
from tracepipe.event.groups import RowsByNumber, count_earlier, number_rows
from tracepipe.event.intervals import Stretches

# If a stream is idle for longer between two kernels, the second one waited for its launch.
_GAP_MOST_NS: Final = 15_000
_NEVER: Final = -(1 << 61)
# The most by which unchanged steps may come out longer or shorter, and the most of the GPU's time whose order
# may be unknown.
_ERROR_MOST: Final = 0.02
_SHARE_MOST: Final = 0.05
# The most of the compute time that may overlap communication and was never seen alone.
_UNMEASURED_MOST: Final = 0.25
STEPS_LEAST: Final = 3
# A host whose steps are shorter than this share of those of its GPU runs far ahead.
_AHEAD: Final = 0.9
# How much earlier a rank must leave than another comes, to have left without it.
_EARLY_NS: Final = 50_000
# The driver takes about 1,024 launches before it makes the host wait.
_QUEUE_MOST: Final = 1_000
_REASONS: Final = (
    (LAUNCHES, _SHARE_MOST, "the launches of its work are not known", "Record the CUDA calls too."),
    (GPUS, 0, "it has work of several GPUs", "Name the recording of one rank."),
    (
        THREADS, _SHARE_MOST, "its threads call CUDA at the same time",
        "Record a process with one such thread.",
    ),
    (QUEUE, _QUEUE_MOST, "its launch queue was full at times", "Synchronize in each step."),
)  # fmt: skip
"""What is not known of a program, how much of it may be, the reason, and what to do."""
# Work that overlaps communication for less of its time is as long as if it did not, and no work gets so slow
# that less of its speed is left.
_ALONE: Final = 0.02
_SLOWED_MOST: Final = 0.95

_HOST, _CALL, _STREAM, _AFTER, _JOIN, _MEET, _SELF = range(7)
"""The kinds of edges: from call to call; to the work, or the return, of a call; from the work before on a
stream; from other work; from the start of a rank to its collective, from that to its end, and past it."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What is different in the program of a rank. Columns have the shape `(rows,)`.

    `removed` is time of the host that passes in no time, and `dropped` flags rows that are not there. `left`
    is how much of each row of work remains, or `work_ns` how long it takes without interference. `host_ns`
    is the time of the host before each row. `overlapped` flags work for which no other work waits, on other
    streams, but the last call that waits in its step.
    """

    removed: Stretches | None = None
    dropped: Bools | None = None
    left: Floats | None = None
    host_ns: Int64s | None = None
    work_ns: Int64s | None = None
    overlapped: Bools | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """When everything happens in a replay. Rows are those of all programs, one after the other."""

    start_ns: Int64s
    end_ns: Int64s
    call_ns: Int64s
    begins_ns: Int64s
    ends_ns: Int64s
    lag_ns: Int64s
    target: Int32s
    """When each node of the graph begins and ends, the lag of each edge, and where it leads."""


class Piece(NamedTuple):
    """A part of a critical path: `what` took `ns` in the program `number`, at its `row`."""

    number: int
    what: str
    row: int
    ns: int


WORKS, TRANSFERS, HOST, LATENCY, RETURNS = "works", "transfers", "host", "latency", "returns"
"""What a piece is: a row of work; the transfer of a collective, which is a row of the last rank to come; the
time of the host before a call; the time from a call, or from the work before, to the work; and that to the
return of a call that waits.
"""


class Replay:
    """The programs of some ranks, ready to be replayed. `meeting` has for each program the number of the
    collective that each row is, or NONE. `ahead_ns` is what to add to the times of each program to have them
    on one clock. `transfer_ns` is how long each collective takes when its last rank has come, by its number.
    `sends` are the numbers of those that are a send and its receive, on one clock: the sender may leave
    before the receiver has come.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        meeting: Sequence[Int64s] | None = None,
        ahead_ns: Sequence[int] | None = None,
        transfer_ns: Int64s | None = None,
        sends: Int64s | None = None,
    ) -> None:
        self.programs = programs
        self.bounds: Int64s = np.cumsum([0, *map(len, programs)])
        rows = int(self.bounds[-1])
        self._meeting = (
            np.full(rows, NONE) if meeting is None else np.concatenate([np.zeros(0, np.int64), *meeting])
        )
        self._ahead_ns = [0] * len(programs) if ahead_ns is None else list(ahead_ns)
        none = np.zeros(0, np.int64)
        self._transfer_ns = none if transfer_ns is None else transfer_ns
        self._sends = none if sends is None else sends
        self.what: Bytes = self._joined("what").astype(np.uint8)
        lengths_ns = self._joined("end_ns") - self._joined("start_ns")
        self._slowed, self.alone_ns, self.unmeasured = self._interference(lengths_ns)
        self.common = _common([one.numbers for one in programs])
        """The steps of each program that all programs have."""
        self._main = np.concatenate([_on_main_stream(one) for one in programs])
        self._build(lengths_ns)
        starts_ns, ends_ns, calls_ns = (self._joined(name) for name in ("start_ns", "end_ns", "call_ns"))
        none = np.zeros(0, np.int64)
        self.recorded_ns = self._lengths(
            Timeline(starts_ns, ends_ns, calls_ns, none, none, none, self._target)
        )
        """How long the steps of each program were. Shapes `(steps,)`."""
        self.hidden = max(self._hidden, default=0.0)
        """The largest share of a program's time for which work waits for something that was not recorded."""

    @cached_property
    def unchanged(self) -> Timeline:
        """The replay without a change. Raises TracepipeError where some work waits for itself."""
        return self.run()

    @cached_property
    def unchanged_ns(self) -> list[Int64s]:
        """How long the steps of each program are then. Shapes `(steps,)`."""
        return self._lengths(self.unchanged)

    @property
    def idle(self) -> float:
        """The share of the time of the steps for which the GPUs are idle."""
        idle_ns = whole_ns = 0
        for one in self.programs:
            own = np.flatnonzero((one.what != WAIT) & (one.step != NONE))
            if len(own):
                first_ns, last_ns = one.start_ns[own].min(keepdims=True), one.end_ns[own].max(keepdims=True)
                busy = Stretches(one.start_ns[own], one.end_ns[own])
                idle_ns += int(busy.uncovered_ns(first_ns, last_ns)[0])
                whole_ns += int((last_ns - first_ns)[0])
        return idle_ns / max(whole_ns, 1)

    @cached_property
    def error(self) -> float:
        """By what share the unchanged steps come out too long, in the median."""
        if not len(self.common[0]):
            return 0.0
        recorded_ns, found_ns = (
            float(np.median(self.steps_ns(some))) for some in (self.recorded_ns, self.unchanged_ns)
        )
        return found_ns / max(recorded_ns, 1) - 1

    def steps_ns(self, lengths_ns: Sequence[Int64s]) -> Int64s:
        """The mean over all programs of the length of each step that all have. Shape `(steps,)`."""
        own = [ns[some] for ns, some in zip(lengths_ns, self.common, strict=True)]
        found: Int64s = np.mean(own, axis=0).astype(np.int64)
        return found

    def refuse_what_is_not_known(self) -> None:
        """Raise TracepipeError, with the reason, where a replay would say nothing."""
        if len(self.common[0]) < STEPS_LEAST or not all(one.has_steps for one in self.programs):
            raise refused(
                f"it needs {STEPS_LEAST} steps with work of a GPU",
                "Record steps, each in a range: ProfilerStep, step …; capture --gpu kernels.",
            )
        for what, most, reason, hint in _REASONS:
            if max(one.unknown.get(what, 0.0) for one in self.programs) > most:
                raise refused(reason, hint)
        alone = (self.what == COMMUNICATION) & (self._meeting == NONE)
        lengths_ns = self._joined("end_ns") - self._joined("start_ns")
        if int(lengths_ns[alone].sum()) > _SHARE_MOST * int(lengths_ns[self.what != WAIT].sum()):
            raise refused(
                "its collectives wait for other ranks"
                if len(self.programs) == 1
                else "its collectives wait for ranks that are not there",
                "Name the recordings of all ranks: a folder, or a dataset.",
            )
        if self.hidden > _ERROR_MOST:
            raise refused(
                f"for {100 * self.hidden:.1f}% of the time work waits for something that was not recorded",
                "Record all CUDA calls of the process.",
            )
        if self.unmeasured > _UNMEASURED_MOST:
            raise refused(
                f"{100 * self.unmeasured:.0f}% of the compute time overlaps communication in all steps, so "
                "it is not known how long it takes alone",
                "Record more steps.",
            )
        if abs(self.error) > _ERROR_MOST:
            raise refused(
                f"its unchanged steps come out {100 * self.error:+.1f}% off: something decides that was not "
                "recorded",
                "Record all CUDA calls of the process, in steps that end with a synchronization.",
            )

    def _joined(self, name: str) -> Int64s:
        return np.concatenate([getattr(one, name) for one in self.programs])

    def rows(self, number: int) -> slice:
        """The rows of a program."""
        return slice(int(self.bounds[number]), int(self.bounds[number + 1]))

    def _interference(self, lengths_ns: Int64s) -> tuple[Floats, Int64s, float]:
        """By what share each row of work is slower while its GPU communicates, how long it takes alone, and
        the share of the compute time that overlaps communication and was never seen alone.
        """
        overlap_ns = np.concatenate(
            [_overlap_ns(one.what, one.start_ns, one.end_ns) for one in self.programs]
        )
        slowed = np.zeros(len(overlap_ns))
        self.speeds: Floats = np.ones(len(self.programs))
        """How long the work of each program takes alone, relative to that of the others."""
        whole_ns = max(int(lengths_ns[self.what == COMPUTE].sum()), 1)
        if int(overlap_ns.sum()) < _ALONE / 4 * whole_ns:
            return slowed, lengths_ns, 0.0
        rows = np.flatnonzero(self.what == COMPUTE)
        own_ns, over_ns = lengths_ns[rows], overlap_ns[rows]
        of, firsts = number_rows(self._joined("key")[rows], self._joined("nth")[rows])
        is_alone = over_ns <= _ALONE * own_ns
        alone = np.flatnonzero(is_alone)
        program = np.repeat(np.arange(len(self.programs)), np.diff(self.bounds))[rows]
        alone_ns = _medians(of[alone], own_ns[alone], len(firsts))
        # GPUs differ in speed, and so do their clocks.
        count = len(self.programs)
        spent_ns = np.bincount(program[alone], own_ns[alone], count)
        wanted_ns = np.bincount(program[alone], alone_ns[of[alone]], count)
        self.speeds = np.where(wanted_ns > 0, spent_ns / np.maximum(wanted_ns, 1), 1)
        alone_ns = _medians(of[alone], (own_ns / self.speeds[program])[alone], len(firsts))
        usual_ns = alone_ns[of] * self.speeds[program]
        more_ns = np.bincount(of, np.where(is_alone, 0, own_ns - usual_ns), len(firsts))
        during_ns = np.bincount(of, np.where(is_alone, 0, over_ns), len(firsts))
        share = np.clip(more_ns / np.maximum(during_ns, 1), 0, _SLOWED_MOST)
        is_known = ~np.isnan(alone_ns) & (during_ns > 0)
        # Work that never ran alone is slowed as the rest is.
        usual = float(np.sum((share * during_ns)[is_known])) / max(float(np.sum(during_ns[is_known])), 1.0)
        share = np.where(is_known, share, usual)
        unmeasured = float(np.sum(during_ns[np.isnan(alone_ns)]) / whole_ns)
        slowed[rows] = share[of]
        return slowed, np.maximum(lengths_ns - (slowed * overlap_ns).astype(np.int64), 0), unmeasured

    def _build(self, lengths_ns: Int64s) -> None:
        """Make the graph. Row i has the nodes 2 i, its call, and 2 i + 1, its end. Then come the starts of
        the members of collectives, and the collectives.
        """
        rows = int(self.bounds[-1])
        members = np.flatnonzero(self._meeting != NONE)
        number, first = number_rows(self._meeting[members])
        self.collectives: Int64s = self._meeting[members[first]]
        """The numbers of the collectives, sorted."""
        self._members, self._of_member = members, number
        self._starts_at = 2 * rows + np.arange(len(members))
        self._joins_at = 2 * rows + len(members) + np.arange(len(first))
        # Where the work of a row begins to be possible: a node of its own for members.
        begins = 2 * np.arange(rows, dtype=np.int32) + 1
        begins[members] = self._starts_at
        nodes = 2 * rows + len(members) + len(first)
        self._weight: Int64s = np.zeros(nodes, np.int64)
        self._weight[1 : 2 * rows : 2] = np.where(self.what == WAIT, 0, self.alone_ns)
        self._weight[2 * members + 1] = 0
        self._weight[self._joins_at] = self._transfer_ns[self.collectives]
        clocks_ns = np.repeat(np.array(self._ahead_ns, np.int64), np.diff(self.bounds))[members]
        came_ns = self._joined("start_ns")[members] + clocks_ns
        last_ns = np.full(len(first), _NEVER)
        np.maximum.at(last_ns, number, came_ns)
        leaves = came_ns + lengths_ns[members] < last_ns[number] - _EARLY_NS
        leaves &= np.isin(self._meeting[members], self._sends)
        edges: list[tuple[Ints, Ints, Int64s, int]] = [
            (self._joins_at[number], self._starts_at, np.zeros(len(members), np.int64), _JOIN),
            (2 * members + 1, self._joins_at[number], np.where(leaves, _NEVER, 0), _MEET),
            (2 * members + 1, self._starts_at, np.where(leaves, lengths_ns[members], _NEVER), _SELF),
        ]
        self._hidden: list[float] = []
        self._ready_ns: list[int] = []
        both = zip(self.programs, self._ahead_ns, strict=True)
        least_ns = min((int(one.from_ns[0]) + ahead_ns for one, ahead_ns in both if len(one)), default=0)
        for at, (one, ahead_ns) in enumerate(zip(self.programs, self._ahead_ns, strict=True)):
            if not len(one):
                self._ready_ns.append(0)
                continue
            base = int(self.bounds[at])
            own = base + np.arange(len(one), dtype=np.int32)
            self._weight[2 * own] = one.call_ns - one.from_ns
            self._ready_ns.append(int(one.from_ns[0]) + ahead_ns - least_ns)
            self._weight[2 * base] += self._ready_ns[-1]
            before = _before_on_stream(one)
            lags, hidden = _typical(one, before)
            self._hidden.append(hidden)
            is_wait = one.what == WAIT
            left = np.where(is_wait, 2 * own + 1, 2 * own)
            edges.append((2 * own[1:], left[:-1], np.zeros(len(one) - 1, np.int64), _HOST))
            edges.append((begins[own], 2 * own, lags.call_ns, _CALL))
            has = np.flatnonzero(before != NONE)
            edges.append((begins[own[has]], 2 * own[before[has]] + 1, lags.stream_ns[has], _STREAM))
            later, earlier = one.after.T
            lag_ns = np.where(is_wait, lags.return_ns, lags.cross_ns)[later]
            lag_ns = np.where(one.lag_ns == TYPICAL, lag_ns, one.lag_ns)
            edges.append((begins[own[later]], 2 * own[earlier] + 1, lag_ns, _AFTER))
        source = np.concatenate([one[1] for one in edges], dtype=np.int32)
        order = np.argsort(source, kind="stable")
        self._source: Int32s = source[order]
        self._target: Int32s = np.concatenate([one[0] for one in edges], dtype=np.int32)[order]
        self._lag: Int64s = np.concatenate([one[2] for one in edges])[order]
        kinds = [np.full(len(one[0]), one[3], np.uint8) for one in edges]
        del edges
        self._kind: Bytes = np.concatenate(kinds)[order]
        self._first: Int32s = np.zeros(nodes + 1, np.int32)
        np.cumsum(np.bincount(source, minlength=nodes), out=self._first[1:])
        self._waits = np.bincount(self._target, minlength=nodes).astype(np.int32)
        row_of = np.arange(nodes, dtype=np.int32) // 2
        row_of[self._starts_at] = members
        # The row that an edge is about: of a collective's, the member.
        joins = self._kind == _JOIN
        self._row: Int32s = row_of[np.where(joins, self._source, self._target)]
        self._role = np.zeros(nodes, np.uint8)
        self._slow = np.zeros(nodes)
        if self._slowed.any():
            ends = 2 * np.arange(rows) + 1
            self._slow[ends] = self._slowed
            self._role[ends[self._slowed > 0]] = SLOWED
            self._role[ends[self.what == COMMUNICATION]] = COMMUNICATES
            self._role[self._starts_at] = COMES
            self._role[ends[members]] = LEAVES
        self._gpu = np.zeros(nodes, np.int32)
        self._gpu[: 2 * rows] = np.repeat(np.arange(len(self.programs)), 2 * np.diff(self.bounds))
        self._gpu[self._starts_at] = self._gpu[2 * members]

    def run(self, changes: Mapping[int, Change] | None = None, transfers: Floats | None = None) -> Timeline:
        """Replay with changes of some programs, by their numbers. `transfers` is how much remains of the
        transfer of each of `collectives`.
        """
        rows = int(self.bounds[-1])
        weight, lag, alone_ns = self._weight.copy(), self._lag, self.alone_ns.copy()
        dropped, target, waits = np.zeros(rows, np.bool_), self._target, self._waits
        for number, change in (changes or {}).items():
            own = self.rows(number)
            weight[2 * own.start : 2 * own.stop : 2], alone_ns[own], dropped[own] = self._changed(
                number, change
            )
            if own.stop > own.start:
                weight[2 * own.start] += self._ready_ns[number]
        edges, instead = self._overlapping(changes or {})
        if len(edges):
            lag, target = lag.copy(), target.copy()
            lag[edges], target[edges] = 0, instead
            waits = np.bincount(target, minlength=len(waits)).astype(np.int32)
        if dropped.any():
            lag = lag.copy()
            gone = dropped[self._row]
            # What is not there does not wait, and nothing waits for it; what comes after it comes after what
            # was before it.
            lag[gone & np.isin(self._kind, (_AFTER, _JOIN, _MEET))] = _NEVER
            lag[gone & np.isin(self._kind, (_STREAM, _SELF))] = 0
            calls = gone & (self._kind == _CALL)
            lag[calls] = np.where(self.what[self._row[calls]] == WAIT, 0, _NEVER)
            alone_ns[dropped] = 0
        changed = alone_ns != self.alone_ns
        if changed[self._members].any():
            share = np.where(self.alone_ns > 0, alone_ns / np.maximum(self.alone_ns, 1), 1)[self._members]
            least = np.ones(len(self._joins_at))
            np.minimum.at(least, self._of_member, np.where(dropped[self._members], 1, share))
            weight[self._joins_at] = (weight[self._joins_at] * least).astype(np.int64)
        if transfers is not None:
            weight[self._joins_at] = (weight[self._joins_at] * transfers).astype(np.int64)
        weight[1 : 2 * rows : 2] = np.where((self.what == WAIT) | (self._meeting != NONE), 0, alone_ns)
        graph = WaitingGraph(self._first, target, lag, weight, waits, self._role, self._gpu, self._slow)
        if (found := graph.times()) is None:
            raise refused(
                "some work waits for itself, so collectives of different ranks are taken for one",
                "Record the process groups: capture --hook nccl.",
            )
        begins, ends = found
        starts_ns = begins[1 : 2 * rows : 2].copy()
        ends_ns, calls_ns = ends[1 : 2 * rows : 2], ends[: 2 * rows : 2]
        starts_ns[self._members] = ends[self._starts_at]
        return Timeline(starts_ns, ends_ns, calls_ns, begins, ends, lag, target)

    def _changed(self, number: int, change: Change) -> tuple[Int64s, Int64s, Bools]:
        """The host's time before each row of a program, how long its work takes, and which are not there."""
        one = self.programs[number]
        host_ns = one.call_ns - one.from_ns if change.host_ns is None else change.host_ns
        if change.removed is not None:
            host_ns = np.maximum(host_ns - change.removed.covered_ns(one.from_ns, one.call_ns), 0)
        work_ns = self.alone_ns[self.rows(number)] if change.work_ns is None else change.work_ns
        if change.left is not None:
            work_ns = (work_ns * change.left).astype(np.int64)
        return host_ns, work_ns, np.zeros(len(one), np.bool_) if change.dropped is None else change.dropped

    def _overlapping(self, changes: Mapping[int, Change]) -> tuple[Int64s, Int64s]:
        """The edges from overlapped work to other work of its step, and the nodes to which they lead then.
        Shapes `(n,)`.
        """
        rows = int(self.bounds[-1])
        late = np.full(rows, NONE)
        for number, change in changes.items():
            one, base = self.programs[number], int(self.bounds[number])
            if change.overlapped is not None:
                waits = np.flatnonzero((one.what == WAIT) & (one.step != NONE))
                last = np.full(len(one.numbers) + 1, NONE)
                last[one.step[waits]] = base + waits
                flagged = np.flatnonzero(change.overlapped & (one.step != NONE))
                late[base + flagged] = last[one.step[flagged]]
        edges = np.flatnonzero((self._kind == _AFTER) & (self._source < 2 * rows))
        wait, row = late[self._source[edges] // 2], self._row[edges]
        is_other = ~np.isin(self.what[row], (WAIT, COMMUNICATION)) & (row < wait)
        return edges[is_other], 2 * wait[is_other] + 1

    def concerned(self, changes: Mapping[int, Change]) -> Bools:
        """Flags the steps in which something is other. Shape `(steps,)`."""
        found = np.zeros(len(self.common[0]), np.bool_)
        for number, change in changes.items():
            one = self.programs[number]
            host_ns, work_ns, is_other = self._changed(number, change)
            is_other = is_other | (host_ns != one.call_ns - one.from_ns)
            is_other |= (work_ns != self.alone_ns[self.rows(number)]) & (one.what != WAIT)
            if change.overlapped is not None:
                is_other |= change.overlapped
            found |= np.isin(self.common[number], one.step[is_other])
        return found

    def saved_ns(self, changes: Mapping[int, Change], transfers: Floats | None = None) -> Int64s:
        """By how much each step gets shorter. Shape `(steps,)`. Where a program runs far ahead of its GPU
        then, the steps are those of the GPU.
        """
        found = self.run(changes, transfers)
        host, gpu = self._lengths(found), self._lengths(found, on_gpu=True)
        both = zip(host, gpu, strict=True)
        ahead = any(len(ns) and np.median(ns) < _AHEAD * np.median(seen_ns) for ns, seen_ns in both)
        before = self._lengths(self.unchanged, on_gpu=True) if ahead else self.unchanged_ns
        return self.steps_ns(before) - self.steps_ns(gpu if ahead else host)

    def paths(self, timeline: Timeline, steps: Iterable[int]) -> Iterator[list[Piece]]:
        """The critical path of each of some steps, indices of `common`: what follows each other without
        waiting, from its begin to its end on the program that ends it last.
        """
        edges = self._edges_to if timeline.target is self._target else self._by_target(timeline.target)
        bounds = [self._boundaries(timeline, number) for number in range(len(self.programs))]
        for step in steps:
            low_ns, last = [], (_NEVER, 0, 0)
            for number, (times_ns, nodes) in enumerate(bounds):
                at = int(self.common[number][step])
                low_ns.append(int(times_ns[at]))
                last = max(last, (int(times_ns[at + 1]), -number, int(nodes[at + 1])))
            yield self._path(timeline, edges, low_ns, last[0], last[2])

    def _path(
        self,
        timeline: Timeline,
        by_target: tuple[Int32s, Int32s],
        low_ns: list[int],
        until_ns: int,
        node: int,
    ) -> list[Piece]:
        """What ends at a node, back to when the step begins on each program."""
        edges, first = by_target
        rows, members, pieces = 2 * int(self.bounds[-1]), len(self._members), list[Piece]()

        def put(what: str, row: int, from_ns: int) -> bool:
            """Put the time until now that a row takes; whether the step began later."""
            nonlocal until_ns
            number = int(np.searchsorted(self.bounds, row, "right")) - 1
            begin_ns = max(from_ns, low_ns[number])
            if until_ns > begin_ns:
                pieces.append(Piece(number, what, row - int(self.bounds[number]), until_ns - begin_ns))
                until_ns = begin_ns
            return from_ns > low_ns[number]

        while True:
            some = edges[first[node] : first[node + 1]]
            if not len(some):
                put(HOST, node // 2, _NEVER)
                return pieces[::-1]
            ready_ns = timeline.ends_ns[self._source[some]] + timeline.lag_ns[some]
            edge = int(some[np.argmax(ready_ns)])
            source = int(self._source[edge])
            row = node // 2 if node < rows else int(self._row[edge])
            what = HOST if node % 2 == 0 else RETURNS if self.what[row] == WAIT else WORKS
            if node >= rows:
                what = TRANSFERS if node >= rows + members else WORKS
            if not put(what, row, int(timeline.begins_ns[node])):
                return pieces[::-1]
            lag = RETURNS if self.what[row] == WAIT else LATENCY
            if not put(lag, row, int(timeline.ends_ns[source])):
                return pieces[::-1]
            node = source

    @cached_property
    def _edges_to(self) -> tuple[Int32s, Int32s]:
        """The edges by the node that they lead to, and the first of each node, and past the last."""
        return self._by_target(self._target)

    def _by_target(self, target: Int32s) -> tuple[Int32s, Int32s]:
        order = np.argsort(target, kind="stable").astype(np.int32)
        counts = np.bincount(target, minlength=len(self._weight))
        return order, np.append(0, np.cumsum(counts)).astype(np.int32)

    def _lengths(self, timeline: Timeline, *, on_gpu: bool = False) -> list[Int64s]:
        """How long each step of each program is."""
        numbers = range(len(self.programs))
        return [np.diff(self._boundaries(timeline, number, on_gpu=on_gpu)[0]) for number in numbers]

    def _boundaries(self, timeline: Timeline, number: int, *, on_gpu: bool = False) -> tuple[Int64s, Int64s]:
        """When each step of a program begins and the last ends, and the node of the graph that ends then or
        later. Shapes `(steps + 1,)`. A step begins on the host, or, where that runs far ahead, with the first
        work on the main stream that is launched in it.
        """
        one, own, base = self.programs[number], self.rows(number), int(self.bounds[number])
        if not len(one):
            none = np.zeros(len(one.numbers) + 1, np.int64)
            return none, none
        starts_ns, ends_ns, calls_ns = timeline.start_ns[own], timeline.end_ns[own], timeline.call_ns[own]
        if one.begins_ns is None or on_gpu:
            last = int(np.argmax(ends_ns))
            firsts_ns, rows = (
                np.full(len(one.numbers) + 1, ends_ns[last]),
                np.full(len(one.numbers) + 1, last),
            )
            some = np.flatnonzero(self._main[own] & (one.step != NONE))
            some = some[np.argsort(-starts_ns[some], kind="stable")]
            firsts_ns[one.step[some]], rows[one.step[some]] = starts_ns[some], some
            # A step without work ends at once.
            least_ns = np.minimum.accumulate(firsts_ns[::-1])[::-1]
            return least_ns, 2 * (base + rows) + 1
        row = np.searchsorted(one.call_ns, one.begins_ns)
        # The host needs as long as it did from the begin of a step to its first call.
        is_wait = one.what[-1:] == WAIT
        left_ns = np.where(is_wait, one.end_ns[-1:], one.call_ns[-1:])
        call_ns = np.append(one.call_ns, np.maximum(left_ns, one.begins_ns[-1:]))
        from_ns = np.append(one.from_ns, left_ns)
        then_ns = np.append(calls_ns, np.where(is_wait, ends_ns[-1:], calls_ns[-1:]) + call_ns[-1] - left_ns)
        times_ns: Int64s = then_ns[row] - (call_ns[row] - np.maximum(one.begins_ns, from_ns[row]))
        nodes = np.where(row < len(one), 2 * (base + row), 2 * (base + len(one) - 1) + is_wait)
        return times_ns, nodes


def _common(numbers: Sequence[Int64s]) -> list[Int64s]:
    """The indices of the steps that all programs have, by the number and by how many steps before it have the
    same one, in the order of the first program.
    """
    keys, _ = number_rows(np.concatenate(numbers), np.concatenate([count_earlier(one) for one in numbers]))
    own = np.split(keys, np.cumsum([len(one) for one in numbers])[:-1])
    every = reduce(np.intersect1d, own)
    found = [np.intersect1d(one, every, return_indices=True)[1] for one in own]
    order = np.argsort(found[0])
    return [one[order] for one in found]


@dataclass(frozen=True, slots=True, eq=False)
class _Lags:
    """How long after what each row depends on it begins, or returns. Shapes `(rows,)`."""

    call_ns: Int64s
    stream_ns: Int64s
    cross_ns: Int64s
    return_ns: Int64s


def _typical(one: Program, before: Int64s) -> tuple[_Lags, float]:
    """The typical lags of a program, and the share of its time for which work waits for something unknown."""
    is_wait = one.what == WAIT
    if not one.has_calls:
        none = np.zeros(len(one), np.int64)
        return _Lags(none, np.full(len(one), _NEVER), none, none), 0.0
    before_ns = np.where(before == NONE, _NEVER, one.end_ns[before])
    after_ns = np.full(len(one), _NEVER)
    later, earlier = one.after.T
    given_ns = np.where(one.lag_ns == TYPICAL, 0, one.lag_ns)
    np.maximum.at(after_ns, later, one.end_ns[earlier] + given_ns)
    ready_ns = np.maximum(before_ns, after_ns)
    since_ns = one.start_ns - one.call_ns
    idle = ~is_wait & (ready_ns <= one.call_ns)
    call_ns = np.zeros(len(one), np.int64)
    for kinds in (one.what == COPIES, ~is_wait & (one.what != COPIES)):
        some = idle & kinds
        call_ns[kinds] = _median(since_ns[some if some.any() else idle])
    waited_ns = one.start_ns - ready_ns
    queued = ~is_wait & (ready_ns > one.call_ns + call_ns) & (waited_ns < _GAP_MOST_NS)
    gap_ns = _median(np.maximum(waited_ns[queued & (before_ns >= after_ns)], 0))
    crossing = queued & (after_ns > before_ns)
    cross_ns = _median(np.maximum(waited_ns[crossing], 0)) if crossing.any() else gap_ns
    expected_ns = np.maximum(one.call_ns + call_ns, np.maximum(before_ns + gap_ns, after_ns + cross_ns))
    late_ns = np.where(is_wait | idle | (one.step == NONE), 0, one.start_ns - expected_ns)
    whole_ns = max(int(one.called_ns.max(initial=0)) - int(one.call_ns.min(initial=0)), 1)
    hidden = int(late_ns[late_ns > _GAP_MOST_NS].sum()) / whole_ns
    return_ns = np.zeros(len(one), np.int64)
    for _, own in RowsByNumber(one.key[is_wait], np.flatnonzero(is_wait)):
        is_bound = after_ns[own] > one.call_ns[own]
        returns_ns = np.maximum(one.end_ns[own] - after_ns[own], 0)[is_bound]
        alone_ns = (one.end_ns[own] - one.call_ns[own])[~is_bound]
        return_ns[own] = _median(returns_ns)
        call_ns[own] = _median(alone_ns if len(alone_ns) else returns_ns)
    # What begins late in most steps, as it needs room on the GPU, does so in a replay.
    of, firsts = number_rows(one.key, one.nth)
    usual_ns = np.nan_to_num(_medians(of, late_ns, len(firsts)))[of].astype(np.int64)
    more_ns = np.where(usual_ns > _GAP_MOST_NS, usual_ns, 0)
    return _Lags(call_ns, gap_ns + more_ns, cross_ns + more_ns, return_ns), hidden


def _medians(numbers: Ints, values: Ints | Floats, count: int) -> Floats:
    """The median of the values of each number, NaN without any. Shape `(count,)`."""
    order = np.lexsort((values, numbers))
    sizes = np.bincount(numbers, minlength=count)
    firsts = np.cumsum(sizes) - sizes
    found = np.full(count, np.nan)
    some = np.flatnonzero(sizes)
    low, high = (values[order[firsts[some] + at]] for at in ((sizes[some] - 1) // 2, sizes[some] // 2))
    found[some] = (low + high) / 2
    return found


def _before_on_stream(one: Program) -> Int64s:
    """The row of the work before each row on its stream, NONE without one. Shape `(rows,)`."""
    before = np.full(len(one), NONE, np.int64)
    for stream, own in RowsByNumber(one.stream):
        if stream != NONE:
            before[own[1:]] = own[:-1]
    return before


def _on_main_stream(one: Program) -> Bools:
    """Flags the work on the stream that works longest. Shape `(rows,)`."""
    is_work = one.what != WAIT
    lengths_ns = np.where(is_work & (one.what != COMMUNICATION), one.end_ns - one.start_ns, 0)
    streams, of = np.unique(one.stream, return_inverse=True)
    if not len(streams):
        return np.zeros(0, np.bool_)
    found: Bools = is_work & (one.stream == streams[np.argmax(np.bincount(of.reshape(-1), lengths_ns))])
    return found


def _overlap_ns(what: Ints, start_ns: Int64s, end_ns: Int64s) -> Int64s:
    """For how long each row of compute overlaps communication. Shape `(rows,)`."""
    some = what == COMMUNICATION
    found = np.zeros(len(what), np.int64)
    if some.any():
        own = np.flatnonzero(what == COMPUTE)
        found[own] = Stretches(start_ns[some], end_ns[some]).covered_ns(start_ns[own], end_ns[own])
    return found


def _median(values: Int64s) -> int:
    return int(np.median(values)) if len(values) else 0


def refused(reason: str, hint: str) -> TracepipeError:
    """The error that says why steps cannot be replayed."""
    return TracepipeError(f"The steps cannot be replayed: {reason}.", hint)
