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

A job may have more rows than fit into memory. So the graph is that of some steps of all programs at a time, a
window, in which the last rows of the window before have the times that they had there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Final, NamedTuple

import numpy as np

from tracepipe.analyses.gpu_work import COMMUNICATION, COMPUTE, COPIES
from tracepipe.analyses.program import GPUS, LAUNCHES, QUEUE, THREADS, TYPICAL, WAIT, Program
from tracepipe.analyses.waiting_graph import COMES, COMMUNICATES, LEAVES, SLOWED, WaitingGraph
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import NONE, AnyArray, Bools, Bytes, Floats, Int32s, Int64s, Ints
from tracepipe.event.groups import RowsByNumber, count_earlier, number_rows
from tracepipe.event.intervals import Stretches

# If a stream is idle for longer between two kernels, the second one waited for its launch.
_GAP_MOST_NS: Final = 15_000
_NEVER: Final = -(1 << 61)
# The most by which unchanged steps may come out longer or shorter, and the most of the GPU's time whose order
# may be unknown.
_ERROR_MOST: Final = 0.02
# The most of the steps for which work waits for something unknown. With the waits of streams for events, up
# to 6% were seen, where answers were right, and without them 35 to 57%.
_HIDDEN_MOST: Final = 0.1
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
    concerned: Bools
    """Flags the steps of a window that all programs have in which something is other. Shape `(steps,)`."""


class Piece(NamedTuple):
    """A part of a critical path: `what` took `ns` in the program `number`, at its `row` in the window."""

    number: int
    what: str
    row: int
    ns: int


WORKS, TRANSFERS, HOST, LATENCY, RETURNS = "works", "transfers", "host", "latency", "returns"
"""What a piece is: a row of work; the transfer of a collective, which is a row of the last rank to come; the
time of the host before a call; the time from a call, or from the work before, to the work; and that to the
return of a call that waits.
"""


@dataclass(slots=True, eq=False)
class Part:
    """The rows of all programs in some of their steps. The first rows of each, `over`, are of steps before,
    and others wait for them. The last ones, `then`, are over in the next part. `first` is the index of the
    first step of each program, and `common` are the steps that all have, as indices of `Source.common`.

    `meeting` has for the rows of all programs, one after the other, the number of the collective that each
    is, or NONE. `transfer_ns` is how long that takes when its last rank has come. `sends` flags a send and
    its receive, on one clock: the sender may leave before the receiver has come. Shapes `(rows,)`.
    """

    programs: Sequence[Program]
    over: Int64s
    then: Int64s
    first: Int64s
    common: slice
    meeting: Int64s
    transfer_ns: Int64s
    sends: Bools


@dataclass(slots=True, eq=False)
class Source:
    """The programs of some ranks, of which some steps are read at a time."""

    numbers: list[Int64s]
    """The number of each step of each program."""
    common: list[Int64s]
    """The steps of each program that all programs have."""
    has_steps: bool
    unknown: list[dict[str, float]]
    """What is not known of each program."""
    ahead_ns: Int64s
    """What to add to the times of each program to have them on one clock. Shape `(programs,)`."""
    ready_ns: Int64s
    """How long after the first program each begins. Shape `(programs,)`."""
    parts: int
    part: Callable[[int], Part]
    """One of the parts. Each begins where the one before it ends."""
    sample: Callable[[], Sequence[Program]]
    """The programs, or enough of their steps to learn what is typical of them."""


def whole(program: Program) -> Source:
    """The source that is one program."""
    common, none = common_steps([program.numbers]), np.zeros(1, np.int64)
    rows = len(program)
    part = Part(
        [program], none, none, none, slice(0, len(common[0])), np.full(rows, NONE), np.zeros(rows, np.int64),
        np.zeros(rows, np.bool_),
    )  # fmt: skip
    return Source(
        [program.numbers], common, program.has_steps, [program.unknown], none, none, 1, lambda _: part,
        lambda: [program],
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class Outcome:
    """What a replay of all windows finds: when the steps of each program begin and the last ends, on the host
    or, where that runs far ahead, on the GPU; the same on all GPUs; and which of the steps that all have are
    concerned. Times are those of all programs, one after the other.
    """

    begins_ns: Int64s
    on_gpu_ns: Int64s
    concerned: Bools


Changes = dict[int, Change]
"""By the number of the program."""
Ask = Callable[["Window"], tuple[Changes, Floats | None]]
"""What is different in a window: changes of some programs, and how much remains of the transfer of each of
its `collectives`, None for all of it.
"""
Follow = Callable[["Window", Timeline], None]
"""Gets each window with its times."""
Over = tuple[Int64s, Int64s]
"""When rows were called, and when they ended."""


class Replay:
    """The programs of some ranks, ready to be replayed. `watch` gets each window with its times in a replay
    without a change, or None where it cannot be replayed.
    """

    def __init__(
        self, source: Source, watch: Callable[[Window, Timeline | None], None] | None = None
    ) -> None:
        self.source, self.common, self._watch = source, source.common, watch
        self.learned = _Learned(source.sample())
        self._steps_at = np.cumsum([0, *(len(one) + 1 for one in source.numbers)])
        # A job of one window makes it once.
        self._window = lru_cache(1)(lambda at: Window(source.part(at), self.learned, source))

    def windows(self) -> Iterator[Window]:
        """All windows, in order."""
        return map(self._window, range(self.source.parts))

    @cached_property
    def _unchanged(self) -> _Unchanged:
        found, over = _Unchanged(self._outcome(), self._outcome()), None
        until_ns = np.full(len(self.common), _NEVER)
        for window in self.windows():
            found.add_shares(window, until_ns)
            self._note(window, window.recorded, found.recorded)
            timeline = None
            if len(self.common[0]) and found.error is None:
                try:
                    timeline = window.run(over=over)
                    over = self._note(window, timeline, found.replayed)
                except TracepipeError as e:
                    found.error = e
            if self._watch is not None:
                self._watch(window, timeline)
        return found

    def outcomes(self, asked: Sequence[Ask], follow: Follow | None = None) -> list[Outcome]:
        """What is found with each of some changes. All of them are replayed in a window before the next one
        is read.
        """
        found: list[Outcome] = [self._outcome() for _ in asked]
        over: list[Over | None] = [None for _ in asked]
        for window in self.windows() if asked else ():
            for at, ask in enumerate(asked):
                timeline = window.run(*ask(window), over[at])
                over[at] = self._note(window, timeline, found[at])
                if follow is not None:
                    follow(window, timeline)
        return found

    def _outcome(self) -> Outcome:
        begins_ns, on_gpu_ns = np.zeros((2, int(self._steps_at[-1])), np.int64)
        return Outcome(begins_ns, on_gpu_ns, np.zeros(len(self.common[0]), np.bool_))

    def _note(self, window: Window, timeline: Timeline, outcome: Outcome) -> Over:
        """Write when the steps of a window begin and the last ends, which the next window knows better.
        Return when the rows were called, and ended, that are over there.
        """
        shift = self._steps_at[:-1] + window.part.first - window.steps_at[:-1]
        at = np.arange(int(window.steps_at[-1])) + np.repeat(shift, np.diff(window.steps_at))
        outcome.begins_ns[at], outcome.on_gpu_ns[at] = window.begins_ns(timeline)
        outcome.concerned[window.part.common] = timeline.concerned
        return timeline.call_ns[window.then], timeline.end_ns[window.then]

    def _lengths(self, begins_ns: Int64s) -> list[Int64s]:
        """How long each step of each program is. A step without work of the GPU ends at once."""
        own = np.split(begins_ns, self._steps_at[1:-1])
        return [np.diff(np.minimum.accumulate(ns[::-1])[::-1]) for ns in own]

    @property
    def recorded_ns(self) -> list[Int64s]:
        """How long the steps of each program were. Shapes `(steps,)`."""
        return self._lengths(self._unchanged.recorded.begins_ns)

    @cached_property
    def unchanged_ns(self) -> list[Int64s]:
        """How long the steps of each program are, replayed without a change. Shapes `(steps,)`. Raises
        TracepipeError where some work waits for itself.
        """
        if self._unchanged.error is not None:
            raise self._unchanged.error
        return self._lengths(self._unchanged.replayed.begins_ns)

    @property
    def idle(self) -> float:
        """The share of the time of the steps for which the GPUs are idle."""
        return self._unchanged.idle_ns / max(self._unchanged.whole_ns, 1)

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
        if len(self.common[0]) < STEPS_LEAST or not self.source.has_steps:
            raise refused(
                f"it needs {STEPS_LEAST} steps with work of a GPU",
                "Record steps, each in a range: ProfilerStep, step …; capture --gpu kernels.",
            )
        for what, most, reason, hint in _REASONS:
            if max(one.get(what, 0.0) for one in self.source.unknown) > most:
                raise refused(reason, hint)
        unmeasured, unchanged = self.learned.unmeasured, self._unchanged
        if unchanged.alone_ns > _SHARE_MOST * unchanged.work_ns:
            raise refused(
                "its collectives wait for other ranks"
                if len(self.common) == 1
                else "its collectives wait for ranks that are not there",
                "Name the recordings of all ranks: a folder, or a dataset.",
            )
        if unmeasured > _UNMEASURED_MOST:
            raise refused(
                f"{100 * unmeasured:.0f}% of the compute time overlaps communication in all steps, "
                "so it is not known how long it takes alone",
                "Record more steps.",
            )
        self.refuse_what_misleads()

    def refuse_what_misleads(self) -> None:
        """Raise TracepipeError, with the reason, where a replay would say something wrong."""
        learned = self.learned
        if learned.hidden > _HIDDEN_MOST:
            raise refused(
                f"for {100 * learned.hidden:.1f}% of the time work waits for something that was not recorded",
                "Record all CUDA calls of the process.",
            )
        if abs(self.error) > _ERROR_MOST:
            raise refused(
                f"its unchanged steps come out {100 * self.error:+.1f}% off: something decides that was not "
                "recorded",
                "Record all CUDA calls of the process, in steps that end with a synchronization.",
            )

    def saved_ns(self, found: Outcome) -> Int64s:
        """By how much each step gets shorter. Shape `(steps,)`. Where a program runs far ahead of its GPU
        then, the steps are those of the GPU.
        """
        host, gpu = self._lengths(found.begins_ns), self._lengths(found.on_gpu_ns)
        both = zip(host, gpu, strict=True)
        ahead = any(len(ns) and np.median(ns) < _AHEAD * np.median(seen_ns) for ns, seen_ns in both)
        before = self._lengths(self._unchanged.replayed.on_gpu_ns) if ahead else self.unchanged_ns
        return self.steps_ns(before) - self.steps_ns(gpu if ahead else host)


@dataclass(slots=True, eq=False)
class _Unchanged:
    """The steps as they were, and replayed without a change, or why they cannot be."""

    recorded: Outcome
    replayed: Outcome
    error: TracepipeError | None = None
    idle_ns: int = 0
    whole_ns: int = 0
    alone_ns: int = 0
    """The time of communication whose other ranks are not there."""
    work_ns: int = 0

    def add_shares(self, window: Window, until_ns: Int64s) -> None:
        """Add how the time of the GPUs is spent in a window. `until_ns` is when the work of each program
        ended in the windows before.
        """
        for number, one in enumerate(window.programs):
            own = np.flatnonzero((one.what != WAIT) & (one.step != NONE))
            if len(own):
                first_ns, last_ns = one.start_ns[own].min(keepdims=True), one.end_ns[own].max(keepdims=True)
                busy = Stretches(one.start_ns[own], one.end_ns[own])
                if until_ns[number] != _NEVER:
                    first_ns[0] = until_ns[number]
                last_ns = np.maximum(first_ns, last_ns)
                self.idle_ns += int(busy.uncovered_ns(first_ns, last_ns)[0])
                self.whole_ns += int((last_ns - first_ns)[0])
                until_ns[number] = last_ns[0]
        is_work = (window.what != WAIT) & ~window.is_over
        alone = is_work & (window.what == COMMUNICATION) & (window.meeting == NONE)
        self.alone_ns += int(window.lengths_ns[alone].sum())
        self.work_ns += int(window.lengths_ns[is_work].sum())


class _Learned:
    """What is typical of some programs, by their numbers, and of all their work, by its key and place in a
    step.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.main_stream = np.array([_main_stream(one) for one in programs], np.int64)
        """The stream of each program that works longest."""
        self.speeds: Floats = np.ones(len(programs))
        """How long the work of each program takes alone, relative to that of the others."""
        self.unmeasured = 0.0
        """The share of the compute time that overlaps communication and was never seen alone."""
        self._slowed, self._usual = self._interference(programs)
        self._find_lags(programs)

    def _find_lags(self, programs: Sequence[Program]) -> None:
        count, number = len(programs), _numbers(programs)
        what, step, stream, key, nth = (
            joined(programs, name) for name in ("what", "step", "stream", "key", "nth")
        )
        call_ns, start_ns, end_ns = (joined(programs, name) for name in ("call_ns", "start_ns", "end_ns"))
        of_calls = np.array([one.has_calls for one in programs])
        has_calls, is_wait = of_calls[number], what == WAIT
        before_ns, after_ns = np.full((2, len(number)), _NEVER)
        later, earlier = _on_streams(number, stream)
        before_ns[later] = end_ns[earlier]
        later, earlier, lag_ns = _awaited(programs)
        np.maximum.at(after_ns, later, end_ns[earlier] + np.where(lag_ns == TYPICAL, 0, lag_ns))
        ready_ns = np.maximum(before_ns, after_ns)
        # From a call to its work, or to a copy.
        idle = has_calls & ~is_wait & (ready_ns <= call_ns)
        kind, since_ns = 2 * number + (what == COPIES), (start_ns - call_ns)[idle]
        any_ns = np.repeat(_medians(number[idle], since_ns, count, 0), 2)
        self._call_ns = _medians(kind[idle], since_ns, 2 * count, any_ns).astype(np.int64)
        called_ns = call_ns + self._call_ns[kind]
        # From work to the next of its stream, and of another one.
        waited_ns = start_ns - ready_ns
        queued = has_calls & ~is_wait & (ready_ns > called_ns) & (waited_ns < _GAP_MOST_NS)
        waited_ns = np.maximum(waited_ns, 0)
        next_one, crossing = queued & (before_ns >= after_ns), queued & (after_ns > before_ns)
        gap_ns = _medians(number[next_one], waited_ns[next_one], count, 0)
        cross_ns = _medians(number[crossing], waited_ns[crossing], count, gap_ns).astype(np.int64)
        self._cross_ns, self._gap_ns = cross_ns, np.where(of_calls, gap_ns, _NEVER).astype(np.int64)
        # How much later work of some keys and places begins. What does so in most steps, as it needs room on
        # the GPU, does so in a replay.
        expected_ns = np.maximum(before_ns + self._gap_ns[number], after_ns + cross_ns[number])
        is_known = has_calls & ~is_wait & ~idle & (step != NONE)
        late_ns = np.where(is_known, start_ns - np.maximum(called_ns, expected_ns), 0)
        of, firsts = number_rows(number, key, nth)
        usual_ns = _medians(of, late_ns, len(firsts), 0).astype(np.int64)
        late = usual_ns > _GAP_MOST_NS
        self._late = _Table(usual_ns[late], *(column[firsts[late]] for column in (number, key, nth)))
        inside, until_ns, from_ns = step != NONE, np.full(count, _NEVER), np.full(count, -_NEVER)
        np.maximum.at(until_ns, number[inside], end_ns[inside])
        np.minimum.at(from_ns, number[inside], call_ns[inside])
        hidden_ns = np.bincount(number, np.where(late_ns > _GAP_MOST_NS, late_ns, 0), count)
        self.hidden = float((hidden_ns / np.maximum(until_ns - from_ns, 1)).max(initial=0))
        """The largest share of the steps of a program for which work waits for something that was not
        recorded.
        """
        # For each key of calls that wait, from the call to its return, and from the end of what it waits for.
        waits = np.flatnonzero(has_calls & is_wait)
        of, firsts = number_rows(number[waits], key[waits])
        is_bound, rows = (after_ns > call_ns)[waits], waits[firsts]
        bound, alone = waits[is_bound], waits[~is_bound]
        return_ns = _medians(of[is_bound], np.maximum(end_ns - after_ns, 0)[bound], len(rows), 0)
        alone_ns = _medians(of[~is_bound], (end_ns - call_ns)[alone], len(rows), return_ns)
        self._called, self._returns = (
            _Table(ns.astype(np.int64), number[rows], key[rows]) for ns in (alone_ns, return_ns)
        )

    def lags(self, number: Ints, what: Ints, key: Int64s, nth: Int64s) -> tuple[Int64s, ...]:
        """How long after what each row depends on it begins, or returns: after its call, the work before on
        its stream, other work, and what it waits for. Shapes `(rows,)`.
        """
        call_ns, return_ns = self._call_ns[2 * number + (what == COPIES)], np.zeros(len(what), np.int64)
        waits = np.flatnonzero(what == WAIT)
        call_ns[waits] = self._called.of(number[waits], key[waits])
        return_ns[waits] = self._returns.of(number[waits], key[waits])
        late_ns = self._late.of(number, key, nth)
        return call_ns, self._gap_ns[number] + late_ns, self._cross_ns[number] + late_ns, return_ns

    def alone_ns(self, programs: Sequence[Program]) -> tuple[Floats, Int64s]:
        """By what share each row of work is slower while its GPU communicates, and how long it takes alone.
        Rows are those of all programs, one after the other.
        """
        lengths_ns = joined(programs, "end_ns") - joined(programs, "start_ns")
        slowed = np.zeros(len(lengths_ns))
        if self._slowed is None:
            return slowed, lengths_ns
        rows = np.flatnonzero(joined(programs, "what") == COMPUTE)
        key, nth = (joined(programs, name)[rows] for name in ("key", "nth"))
        slowed[rows] = self._slowed.of(key, nth, unknown=self._usual)
        overlap_ns = np.concatenate([_overlap_ns(one) for one in programs])
        return slowed, np.maximum(lengths_ns - (slowed * overlap_ns).astype(np.int64), 0)

    def _interference(self, programs: Sequence[Program]) -> tuple[_Table | None, float]:
        """By what share each work is slower while its GPU communicates, and all work in the mean."""
        lengths_ns = joined(programs, "end_ns") - joined(programs, "start_ns")
        overlap_ns = np.concatenate([_overlap_ns(one) for one in programs])
        is_compute = joined(programs, "what") == COMPUTE
        whole_ns = max(int(lengths_ns[is_compute].sum()), 1)
        if int(overlap_ns.sum()) < _ALONE / 4 * whole_ns:
            return None, 0.0
        rows = np.flatnonzero(is_compute)
        own_ns, over_ns = lengths_ns[rows], overlap_ns[rows]
        key, nth = (joined(programs, name)[rows] for name in ("key", "nth"))
        of, firsts = number_rows(key, nth)
        is_alone = over_ns <= _ALONE * own_ns
        alone = np.flatnonzero(is_alone)
        count = len(programs)
        program = _numbers(programs)[rows]
        alone_ns = _medians(of[alone], own_ns[alone], len(firsts))
        # GPUs differ in speed, and so do their clocks.
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
        self.unmeasured = float(np.sum(during_ns[np.isnan(alone_ns)]) / whole_ns)
        return _Table(np.where(is_known, share, usual), key[firsts], nth[firsts]), usual


class _Table:
    """A value for each row of some columns."""

    def __init__(self, values: AnyArray, *columns: AnyArray) -> None:
        hashes = _mixed(*columns)
        order = np.argsort(hashes)
        self._hashes, self._values = hashes[order], values[order]

    def of(self, *columns: AnyArray, unknown: float = 0) -> AnyArray:
        """The values of some rows."""
        if not len(self._hashes):
            return np.full(len(columns[0]), unknown, self._values.dtype)
        hashes = _mixed(*columns)
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return np.where(self._hashes[at] == hashes, self._values[at], unknown).astype(self._values.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """The edges of a window, by the node that they come from, and its nodes: see `Window`."""

    source: Int32s
    target: Int32s
    lag_ns: Int64s
    kind: Bytes
    row: Int32s
    """The row that an edge is about: of a collective's, the member."""
    first: Int32s
    waits: Int32s
    weight_ns: Int64s
    role: Bytes
    gpu: Int32s
    slow: Floats


class Window:
    """The graph of the rows of a part, ready to be replayed. Row i has the nodes 2 i, its call, and 2 i + 1,
    its end. Then come the starts of the members of collectives, and the collectives. Rows that are over begin
    at 0 and last until their times.
    """

    def __init__(self, part: Part, learned: _Learned, source: Source) -> None:
        self.part, self.programs, self.meeting, self._learned = part, part.programs, part.meeting, learned
        self.bounds: Int64s = np.cumsum([0, *map(len, part.programs)])
        self.number = _numbers(part.programs)
        """The program of each row."""
        self.is_over: Bools = np.arange(len(self.number)) < (self.bounds[:-1] + part.over)[self.number]
        self.then = np.flatnonzero(np.arange(len(self.number)) >= (self.bounds[1:] - part.then)[self.number])
        """The rows that are over in the next window."""
        self.common = [own[part.common] - first for own, first in zip(source.common, part.first, strict=True)]
        """The steps of each program that all programs have, as indices of its steps in the window."""
        # The host begins with the first row.
        self._ready_ns, self._ahead_ns = np.where(part.over == 0, source.ready_ns, 0), source.ahead_ns
        self.what: Bytes = joined(part.programs, "what").astype(np.uint8)
        starts_ns, ends_ns, calls_ns = (
            joined(part.programs, name) for name in ("start_ns", "end_ns", "call_ns")
        )
        none, concerned = np.zeros(0, np.int64), np.zeros(len(self.common[0]), np.bool_)
        self.recorded = Timeline(
            starts_ns, ends_ns, calls_ns, none, none, none, none.astype(np.int32), concerned
        )
        self.lengths_ns = ends_ns - starts_ns
        self.host_ns: Int64s = calls_ns - joined(part.programs, "from_ns")
        self.slowed, self.alone_ns = learned.alone_ns(part.programs)
        self.step = joined(part.programs, "step")
        self.steps_at: Int64s = np.cumsum([0, *(len(one.numbers) + 1 for one in part.programs)])
        """Where the steps of each program begin among those of all, with the end of the last."""
        is_main = joined(part.programs, "stream") == learned.main_stream[self.number]
        self._main = np.flatnonzero((self.what != WAIT) & is_main & (self.step != NONE))
        self._main_step = self.steps_at[self.number[self._main]] + self.step[self._main]
        self._members = np.flatnonzero(self.meeting != NONE)
        self._of_member, first = number_rows(self.meeting[self._members])
        self.collectives: Int64s = self._members[first]
        """The first row of each collective."""
        rows = len(self.number)
        self._starts_at = 2 * rows + np.arange(len(self._members))
        self._joins_at = 2 * rows + len(self._members) + np.arange(len(first))

    def rows(self, number: int) -> slice:
        """The rows of a program."""
        return slice(int(self.bounds[number]), int(self.bounds[number + 1]))

    @cached_property
    def by_step(self) -> RowsByNumber:
        """The rows by the place of their step among those of all programs, as `steps_at` counts."""
        inside = np.flatnonzero(self.step != NONE)
        return RowsByNumber(self.steps_at[self.number[inside]] + self.step[inside], inside)

    @cached_property
    def graph(self) -> _Graph:
        rows, members, number = len(self.number), self._members, self._of_member
        own = np.arange(rows, dtype=np.int32)
        is_wait, is_new = self.what == WAIT, ~self.is_over
        # Where the work of a row begins to be possible: a node of its own for members.
        begins = 2 * own + 1
        begins[members] = self._starts_at
        nodes = 2 * rows + len(members) + len(self._joins_at)
        weight_ns = np.zeros(nodes, np.int64)
        weight_ns[self._joins_at] = self.part.transfer_ns[self.collectives]
        weight_ns[: 2 * rows : 2] = self.host_ns
        came_ns = self.recorded.start_ns[members] + self._ahead_ns[self.number[members]]
        last_ns = np.full(len(self._joins_at), _NEVER)
        np.maximum.at(last_ns, number, came_ns)
        leaves = came_ns + self.lengths_ns[members] < last_ns[number] - _EARLY_NS
        leaves &= self.part.sends[members]
        key, nth, stream = (joined(self.programs, name) for name in ("key", "nth", "stream"))
        call_ns, stream_ns, cross_ns, return_ns = self._learned.lags(self.number, self.what, key, nth)
        left = np.where(is_wait, 2 * own + 1, 2 * own)
        next_one = np.flatnonzero(is_new[1:] & (self.number[1:] == self.number[:-1])) + 1
        after, before = _on_streams(self.number, stream)
        after, before = after[is_new[after]], before[is_new[after]]
        later, earlier, given_ns = _awaited(self.programs)
        later, earlier, given_ns = (some[is_new[later]] for some in (later, earlier, given_ns))
        lag_ns = np.where(given_ns == TYPICAL, np.where(is_wait, return_ns, cross_ns)[later], given_ns)
        new = np.flatnonzero(is_new)
        edges: tuple[tuple[Ints, Ints, Int64s, int], ...] = (
            (self._joins_at[number], self._starts_at, np.zeros(len(members), np.int64), _JOIN),
            (2 * members + 1, self._joins_at[number], np.where(leaves, _NEVER, 0), _MEET),
            (2 * members + 1, self._starts_at, np.where(leaves, self.lengths_ns[members], _NEVER), _SELF),
            (2 * own[next_one], left[next_one - 1], np.zeros(len(next_one), np.int64), _HOST),
            (begins[new], 2 * own[new], call_ns[new], _CALL),
            (begins[after], 2 * own[before] + 1, stream_ns[after], _STREAM),
            (begins[later], 2 * own[earlier] + 1, lag_ns, _AFTER),
        )
        source = np.concatenate([one[1] for one in edges], dtype=np.int32)
        order = np.argsort(source, kind="stable")
        first = np.zeros(nodes + 1, np.int32)
        np.cumsum(np.bincount(source, minlength=nodes), out=first[1:])
        source = source[order]
        target = np.concatenate([one[0] for one in edges], dtype=np.int32)[order]
        kind = np.repeat(np.arange(len(edges), dtype=np.uint8), [len(one[0]) for one in edges])
        kind = np.array([one[3] for one in edges], np.uint8)[kind][order]
        row_of = np.arange(nodes, dtype=np.int32) // 2
        row_of[self._starts_at] = members
        role, slow = np.zeros(nodes, np.uint8), np.zeros(nodes)
        if self.slowed.any():
            ends = 2 * new + 1
            slow[ends] = self.slowed[new]
            role[ends[self.slowed[new] > 0]] = SLOWED
            role[ends[self.what[new] == COMMUNICATION]] = COMMUNICATES
            role[self._starts_at] = COMES
            role[2 * members + 1] = LEAVES
        gpu = np.zeros(nodes, np.int32)
        gpu[: 2 * rows] = np.repeat(self.number, 2)
        gpu[self._starts_at] = self.number[members]
        return _Graph(
            source,
            target,
            np.concatenate([one[2] for one in edges])[order],
            kind,
            row_of[np.where(kind == _JOIN, source, target)],
            first,
            np.bincount(target, minlength=nodes).astype(np.int32),
            weight_ns,
            role,
            gpu,
            slow,
        )

    def run(
        self, changes: Changes | None = None, transfers: Floats | None = None, over: Over | None = None
    ) -> Timeline:
        """Replay with changes of some programs, by their numbers. `transfers` is how much remains of the
        transfer of each of `collectives`, and `over` when the rows were called and ended that are over.
        Raises TracepipeError where some work waits for itself.
        """
        graph, rows = self.graph, len(self.number)
        weight, lag, alone_ns = graph.weight_ns.copy(), graph.lag_ns, self.alone_ns.copy()
        dropped, target, waits = np.zeros(rows, np.bool_), graph.target, graph.waits
        is_other = np.zeros(rows, np.bool_)
        for number, change in (changes or {}).items():
            own = self.rows(number)
            weight[2 * own.start : 2 * own.stop : 2], alone_ns[own], dropped[own] = self._changed(
                number, change
            )
            if change.overlapped is not None:
                is_other[own] = change.overlapped
        is_other |= dropped | (weight[: 2 * rows : 2] != self.host_ns)
        is_other |= (alone_ns != self.alone_ns) & (self.what != WAIT)
        has_rows = np.flatnonzero(np.diff(self.bounds))
        weight[2 * self.bounds[has_rows]] += self._ready_ns[has_rows]
        edges, instead = self._overlapping(changes or {})
        if len(edges):
            lag, target = lag.copy(), target.copy()
            lag[edges], target[edges] = 0, instead
            waits = np.bincount(target, minlength=len(waits)).astype(np.int32)
        if dropped.any():
            lag = lag.copy()
            gone = dropped[graph.row]
            # What is not there does not wait, and nothing waits for it; what comes after it comes after what
            # was before it.
            lag[gone & ((graph.kind == _AFTER) | (graph.kind == _JOIN) | (graph.kind == _MEET))] = _NEVER
            lag[gone & ((graph.kind == _STREAM) | (graph.kind == _SELF))] = 0
            calls = gone & (graph.kind == _CALL)
            lag[calls] = np.where(self.what[graph.row[calls]] == WAIT, 0, _NEVER)
            alone_ns[dropped] = 0
        changed = alone_ns != self.alone_ns
        if changed[self._members].any():
            share = np.where(self.alone_ns > 0, alone_ns / np.maximum(self.alone_ns, 1), 1)[self._members]
            least = np.ones(len(self._joins_at))
            np.minimum.at(least, self._of_member, np.where(dropped[self._members], 1, share))
            weight[self._joins_at] = (weight[self._joins_at] * least).astype(np.int64)
        if transfers is not None:
            weight[self._joins_at] = (weight[self._joins_at] * transfers).astype(np.int64)
        weight[1 : 2 * rows : 2] = np.where((self.what == WAIT) | (self.meeting != NONE), 0, alone_ns)
        if over is not None:
            past = np.flatnonzero(self.is_over)
            weight[2 * past], weight[2 * past + 1] = over
        found = WaitingGraph(
            graph.first, target, lag, weight, waits, graph.role, graph.gpu, graph.slow
        ).times()
        if found is None:
            raise refused(
                "some work waits for itself, so collectives of different ranks are taken for one",
                "Record the process groups: capture --hook nccl.",
            )
        begins, ends = found
        starts_ns = begins[1 : 2 * rows : 2].copy()
        ends_ns, calls_ns = ends[1 : 2 * rows : 2], ends[: 2 * rows : 2]
        starts_ns[self._members] = ends[self._starts_at]
        return Timeline(starts_ns, ends_ns, calls_ns, begins, ends, lag, target, self._concerned(is_other))

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

    def _overlapping(self, changes: Changes) -> tuple[Int64s, Int64s]:
        """The edges from overlapped work to other work of its step, and the nodes to which they lead then.
        Shapes `(n,)`.
        """
        graph, rows = self.graph, len(self.number)
        late = np.full(rows, NONE)
        for number, change in changes.items():
            one, base = self.programs[number], int(self.bounds[number])
            if change.overlapped is not None:
                waits = np.flatnonzero((one.what == WAIT) & (one.step != NONE))
                last = np.full(len(one.numbers) + 1, NONE)
                last[one.step[waits]] = base + waits
                flagged = np.flatnonzero(change.overlapped & (one.step != NONE))
                late[base + flagged] = last[one.step[flagged]]
        edges = np.flatnonzero((graph.kind == _AFTER) & (graph.source < 2 * rows))
        wait, row = late[graph.source[edges] // 2], graph.row[edges]
        is_other = ~np.isin(self.what[row], (WAIT, COMMUNICATION)) & (row < wait)
        return edges[is_other], 2 * wait[is_other] + 1

    def _concerned(self, rows: Bools) -> Bools:
        """Flags the steps that all programs have in which some rows are. Shape `(steps,)`."""
        own = np.flatnonzero(rows & (self.step != NONE))
        found = np.zeros(int(self.steps_at[-1]), np.bool_)
        found[self.steps_at[self.number[own]] + self.step[own]] = True
        flags: Bools = found[self.steps_at[:-1, None] + np.stack(self.common)].any(axis=0)
        return flags

    @cached_property
    def _on_host(self) -> tuple[Bools, Int64s, Bools, Int64s]:
        """For the begin of each step of each program, and the end of the last: whether that is on the host;
        the first row that is called then or later, or the last row; whether it follows the end of that row,
        or its call; and how long after. Shapes `(steps + 1,)` of all programs, one after the other.
        """
        on_host, follows_end = np.zeros((2, int(self.steps_at[-1])), np.bool_)
        row, since_ns = np.zeros((2, int(self.steps_at[-1])), np.int64)
        for number, one in enumerate(self.programs):
            if not len(one) or one.begins_ns is None:
                continue
            steps = slice(int(self.steps_at[number]), int(self.steps_at[number + 1]))
            at = np.searchsorted(one.call_ns, one.begins_ns)
            inside, at = at < len(one), np.minimum(at, len(one) - 1)
            is_wait = one.what[-1] == WAIT
            left_ns = one.end_ns[-1] if is_wait else one.call_ns[-1]
            # The host needs as long as it did from the begin of a step to its first call.
            before_ns = np.maximum(one.begins_ns, one.from_ns[at]) - one.call_ns[at]
            since_ns[steps] = np.where(inside, before_ns, np.maximum(one.begins_ns - left_ns, 0))
            on_host[steps], follows_end[steps], row[steps] = True, ~inside & is_wait, self.bounds[number] + at
        return on_host, row, follows_end, since_ns

    def begins_ns(self, timeline: Timeline) -> tuple[Int64s, Int64s]:
        """When each step of each program begins and the last ends: on the host, or on the GPU where the host
        runs far ahead; and on the GPU, with the first work on the main stream that is launched in it. Without
        any, that is as late as the end of all work. Shapes as those of `_on_host`.
        """
        on_host, row, follows_end, since_ns = self._on_host
        ends_ns = np.full(len(self.programs), _NEVER)
        np.maximum.at(ends_ns, self.number, timeline.end_ns)
        # What has no rows yet begins in a later window.
        gpu_ns = np.repeat(np.where(np.diff(self.bounds) > 0, ends_ns, -_NEVER), np.diff(self.steps_at))
        is_there = timeline.start_ns[self._main] > _NEVER // 2  # what is dropped may have waited for nothing
        np.minimum.at(gpu_ns, self._main_step[is_there], timeline.start_ns[self._main[is_there]])
        if not on_host.any():
            return gpu_ns, gpu_ns
        host_ns = np.where(follows_end, timeline.end_ns[row], timeline.call_ns[row]) + since_ns
        if len(timeline.begins_ns):
            # With less time of the host before its first call, a step begins when the host gets there.
            host_ns = np.maximum(host_ns, timeline.begins_ns[2 * row])
        return np.where(on_host, host_ns, gpu_ns), gpu_ns

    def paths(self, timeline: Timeline, steps: Iterable[int]) -> Iterator[list[Piece]]:
        """The critical path of each of some steps, indices of `common`: what follows each other without
        waiting, from its begin to its end on the program that ends it last. What is over has no path.
        """
        edges, begins_ns = self._by_target(timeline.target), self.begins_ns(timeline)[0]
        on_host, row, follows_end, _ = self._on_host
        work, has_rows = np.zeros(len(begins_ns), np.int64), np.diff(self.bounds) > 0
        for number in np.flatnonzero(has_rows).tolist():
            own, its = self.rows(number), slice(*self.steps_at[number : number + 2].tolist())
            work[its] = own.start + int(np.argmax(timeline.end_ns[own]))
            if not on_host[its.start]:
                # A step without work ends at once.
                begins_ns[its] = np.minimum.accumulate(begins_ns[its][::-1])[::-1]
        order = np.argsort(-timeline.start_ns[self._main], kind="stable")
        work[self._main_step[order]] = self._main[order]
        nodes = np.where(on_host, 2 * row + follows_end, 2 * work + 1)
        for step in steps:
            at = self.steps_at[:-1] + [int(own[step]) for own in self.common]
            ends_ns = np.where(has_rows, begins_ns[at + 1], _NEVER)
            # Of those that end last, the first program.
            last = int(np.argmax(ends_ns))
            yield self._path(timeline, edges, begins_ns[at], int(ends_ns[last]), int(nodes[at + 1][last]))

    def _path(
        self, timeline: Timeline, by_target: tuple[Int32s, Int32s], low_ns: Int64s, until_ns: int, node: int
    ) -> list[Piece]:
        """What ends at a node, back to when the step begins on each program."""
        edges, first = by_target
        graph = self.graph
        rows, members, pieces = 2 * len(self.number), len(self._members), list[Piece]()

        def put(what: str, row: int, from_ns: int) -> bool:
            """Put the time until now that a row takes; whether the step began later."""
            nonlocal until_ns
            number = int(self.number[row])
            least_ns = int(low_ns[number])
            begin_ns = max(from_ns, least_ns)
            if until_ns > begin_ns:
                pieces.append(Piece(number, what, row - int(self.bounds[number]), until_ns - begin_ns))
                until_ns = begin_ns
            return from_ns > least_ns

        while True:
            some = edges[first[node] : first[node + 1]]
            if not len(some):
                put(HOST, node // 2, _NEVER)
                return pieces[::-1]
            ready_ns = timeline.ends_ns[graph.source[some]] + timeline.lag_ns[some]
            edge = int(some[np.argmax(ready_ns)])
            source = int(graph.source[edge])
            row = node // 2 if node < rows else int(graph.row[edge])
            what = HOST if node % 2 == 0 else RETURNS if self.what[row] == WAIT else WORKS
            if node >= rows:
                what = TRANSFERS if node >= rows + members else WORKS
            if not put(what, row, int(timeline.begins_ns[node])):
                return pieces[::-1]
            lag = RETURNS if self.what[row] == WAIT else LATENCY
            if not put(lag, row, int(timeline.ends_ns[source])):
                return pieces[::-1]
            node = source

    def _by_target(self, target: Int32s) -> tuple[Int32s, Int32s]:
        """The edges by the node that they lead to, and the first of each node, and past the last."""
        order = np.argsort(target, kind="stable").astype(np.int32)
        counts = np.bincount(target, minlength=len(self.graph.waits))
        return order, np.append(0, np.cumsum(counts)).astype(np.int32)


def common_steps(numbers: Sequence[Int64s]) -> list[Int64s]:
    """The indices of the steps that all programs have, by the number and by how many steps before it have the
    same one, in the order of the first program.
    """
    keys, _ = number_rows(np.concatenate(numbers), np.concatenate([count_earlier(one) for one in numbers]))
    own = np.split(keys, np.cumsum([len(one) for one in numbers])[:-1])
    every = reduce(np.intersect1d, own)
    found = [np.intersect1d(one, every, return_indices=True)[1] for one in own]
    order = np.argsort(found[0])
    return [one[order] for one in found]


def _mixed(*columns: AnyArray) -> AnyArray:
    """A number of 64 bits for each row, the same for equal rows alone, but for one case in billions."""
    found = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        found = (found ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(32)
    return found


def joined(programs: Sequence[Program], name: str) -> AnyArray:
    """A column of all programs, one after the other."""
    return np.concatenate([getattr(one, name) for one in programs])


def _numbers(programs: Sequence[Program]) -> Int32s:
    """The number of the program of each row."""
    return np.repeat(np.arange(len(programs), dtype=np.int32), [len(one) for one in programs])


def _on_streams(number: Ints, stream: Int64s) -> tuple[Int64s, Int64s]:
    """Rows of work, and those before them on the stream of their program. Shapes `(n,)`."""
    order = np.lexsort((stream, number))
    earlier, later = order[:-1], order[1:]
    is_same = (stream[later] == stream[earlier]) & (number[later] == number[earlier])
    is_same &= stream[later] != NONE
    return later[is_same], earlier[is_same]


def _awaited(programs: Sequence[Program]) -> tuple[Int64s, Int64s, Int64s]:
    """Rows that wait for others, these, and how long after them they begin. Shapes `(n,)`."""
    bounds = np.cumsum([0, *map(len, programs)])
    later, earlier = joined(programs, "after").T + np.repeat(
        bounds[:-1], [len(one.after) for one in programs]
    )
    return later, earlier, joined(programs, "lag_ns")


def _medians(numbers: Ints, values: Ints | Floats, count: int, unknown: float | Floats = np.nan) -> Floats:
    """The median of the values of each number, `unknown` without any. Shape `(count,)`."""
    order = np.lexsort((values, numbers))
    sizes = np.bincount(numbers, minlength=count)
    firsts = np.cumsum(sizes) - sizes
    found: Floats = np.broadcast_to(unknown, count).astype(np.float64)
    some = np.flatnonzero(sizes)
    low, high = (values[order[firsts[some] + at]] for at in ((sizes[some] - 1) // 2, sizes[some] // 2))
    found[some] = (low + high) / 2
    return found


def _main_stream(one: Program) -> int:
    """The stream that works longest, NONE without work."""
    is_work = one.what != WAIT
    lengths_ns = np.where(is_work & (one.what != COMMUNICATION), one.end_ns - one.start_ns, 0)
    streams, of = np.unique(one.stream, return_inverse=True)
    return int(streams[np.argmax(np.bincount(of.reshape(-1), lengths_ns))]) if len(streams) else NONE


def _overlap_ns(one: Program) -> Int64s:
    """For how long each row of compute overlaps communication. Shape `(rows,)`."""
    some = one.what == COMMUNICATION
    found = np.zeros(len(one), np.int64)
    if some.any():
        own = np.flatnonzero(one.what == COMPUTE)
        found[own] = Stretches(one.start_ns[some], one.end_ns[some]).covered_ns(
            one.start_ns[own], one.end_ns[own]
        )
    return found


def refused(reason: str, hint: str) -> TracepipeError:
    """The error that says why steps cannot be replayed."""
    return TracepipeError(f"The steps cannot be replayed: {reason}.", hint)
