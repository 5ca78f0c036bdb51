"""What one process asked of its GPU, in order, as rows from which its steps can be replayed.

    host    ─call─┤ host_ns ├─call─────┤ host_ns ├─wait────────┤
                 ↓               ↓                            ↑ after
    stream        ├─kernel──┤     ├─kernel─────────────────────┤

A row is a piece of work of the GPU, at its place among the calls, or a call that waits for work. Where calls
are not recorded, the GPU's work alone is the program: whatever the GPU idles is time of the host.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracepipe.analyses.dependencies import (
    POLLS,
    STREAM_WAITS,
    WAITS_DEVICE,
    WAITS_EVENT,
    WAITS_STREAM,
    Dependencies,
    acting_calls,
    dependencies_of,
    given_around,
)
from tracepipe.analyses.gpu_work import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    Work,
    delays_of,
    gpu_work,
    kinds_of,
    shapes_of,
    streams_of,
)
from tracepipe.analyses.steps import Steps, run_far_ahead, steps_of
from tracepipe.event.columns import NONE, Bools, Int64s, Ints
from tracepipe.event.groups import RowsByNumber, count_earlier, number_rows, run_starts
from tracepipe.event.intervals import Stretches
from tracepipe.store.run import Run

WAIT: Final = 3
"""What a row is: COMPUTE, COMMUNICATION, COPIES, or a call that waits."""
LAUNCHES, GPUS, THREADS, QUEUE = "launches", "GPUs", "threads", "queue"
"""Of what a recording may not tell the order."""
TYPICAL: Final = -(1 << 62)
_UNKNOWN_STREAM: Final = -2
PLACES: Final = 1 << 20
"""What `Program.nth` counts the collectives in."""
# Where waits are not recorded: how much earlier a clock may show a begin than the end before it, how soon
# after that end the work begins that waited for it, and in how many steps it must.
_EARLY_NS: Final = 1_000
_TIGHT_NS: Final = 15_000
_TIGHT_LEAST: Final = 3
# Work that waits for room begins as long before the end of the other, give or take this share of its length,
# in more of the cases than this.
_TIGHT_SHARE: Final = 0.1
_TIGHT_MOST: Final = 0.8


@dataclass(slots=True, eq=False)
class Program:
    """The rows of one process, in the order of its calls. Columns have the shape `(rows,)`.

    `from_ns` to `call_ns` is the time of the host before a row: from the call before it, or from the end of
    that call if it waits. `step` is the index of the step in which the row was asked for, or NONE. Work lasts
    from `start_ns` to `end_ns`, on `stream`; a wait from its call to its return. `key` stands for a kernel's
    name and grid, and `nth` for its place in the step: how many collectives are before it, and how many rows
    of its key since the last of them. Row `after[i, 0]` waits for row `after[i, 1]`, besides the work before
    it on its stream.
    """

    what: Ints
    step: Int64s
    from_ns: Int64s
    call_ns: Int64s
    called_ns: Int64s
    start_ns: Int64s
    end_ns: Int64s
    stream: Int64s
    key: Int64s
    nth: Int64s
    after: Int64s
    lag_ns: Int64s
    """How long after its end, for each row of `after`: TYPICAL where that is to be learned."""
    work: Int64s
    """The row of the work in `gpu_work`, or that of the call that waits in its layer. Empty in a dataset."""
    numbers: Int64s
    """The number of each step."""
    has_steps: bool
    """Whether ranges of the program say where its steps are."""
    begins_ns: Int64s | None
    """When each step begins on the host, and when the last ends. Shape `(steps + 1,)`. None where the program
    runs so far ahead of its GPU that steps are taken as the GPU sees them.
    """
    has_calls: bool
    unknown: dict[str, float]
    """LAUNCHES: the share of the GPU's time whose launch is not known; GPUS: 1 if there are several; THREADS:
    the share of calls that begin before another one ends; QUEUE: the most launches that waited for the GPU at
    once.
    """

    def __len__(self) -> int:
        return len(self.what)


def program_of(run: Run) -> Program:
    """The program of a recording, in the steps of `steps_of`."""
    work, steps = gpu_work(run), steps_of(run)
    lengths_ns = work.end_ns - work.start_ns
    if 2 * int(lengths_ns[work.call != NONE].sum()) < int(lengths_ns.sum()):
        return _of_work_alone(run, work, steps)
    return _of_calls(run, work, steps)


def _of_calls(run: Run, work: Work, steps: Steps) -> Program:
    """The program of a recording with the calls that launched the work."""
    calls, threads = run.layer("userspace"), run.shapes.threads[0]
    rows = acting_calls(run)
    # Other threads, such as watchdogs and those that load data, ask nothing of the GPU.
    asking = np.append(threads[calls.shape[work.call[work.call != NONE]]], steps.thread)
    rows = rows[np.isin(threads[calls.shape[rows]], asking) & (len(work) > 0)]
    starts_ns, ends_ns = calls.start_ns[rows], calls.end_ns[rows]
    call_of_work = given_around(run, rows, work.call)
    found = dependencies_of(run, work, rows)
    asked = np.flatnonzero(call_of_work != NONE)
    # The host waits for a copy that has ended when its call returns.
    blocks = np.isin(found.what, (WAITS_DEVICE, WAITS_STREAM, WAITS_EVENT))
    blocking = (work.what[asked] == COPY) & (work.end_ns[asked] <= ends_ns[call_of_work[asked]])
    blocks[call_of_work[asked[blocking]]] = True
    waits = np.flatnonzero(blocks)
    # A row for each piece of work, and after those of its call one for its waiting.
    call, of = np.append(call_of_work[asked], waits), np.append(asked, waits)
    is_wait = np.arange(len(of)) >= len(asked)
    order = np.lexsort((np.append(work.start_ns[asked], ends_ns[waits]), is_wait, call))
    call, of, is_wait = call[order], of[order], is_wait[order]
    at_work = np.where(is_wait, 0, of)
    called_ns, returned_ns = starts_ns[call], ends_ns[call]
    called_ns = np.where(is_wait, _first_query_ns(found.what, starts_ns)[call], called_ns)
    left_ns = np.where(is_wait, returned_ns, called_ns)
    # The host comes to the first call from the begin of the first step, if that was before.
    from_ns = np.append(np.minimum(called_ns[:1], steps.start_ns[:1]), left_ns[:-1])
    stream = np.where(is_wait, NONE, _streams(run, work)[at_work])
    step = _step_of(steps, called_ns)
    key = np.where(is_wait, _call_keys(run, rows[call]), _keys(run, work)[at_work])
    first = np.searchsorted(call, np.arange(len(rows) + 1))
    last = _LastOn(stream)
    after = [_awaited(found, waits, first, last, is_wait, of)]
    ordering = np.flatnonzero((found.what == STREAM_WAITS) & (found.record != NONE))
    after.append(
        np.stack(
            [
                last.following(found.stream[ordering], first[ordering + 1]),
                last.before(found.stream[found.record[ordering]], first[found.record[ordering]]),
            ],
            axis=1,
        )
    )
    what = np.where(is_wait, WAIT, kinds_of(run, work)[at_work]).astype(np.uint8)
    program = Program(
        what,
        step if steps.are_marked else np.zeros(len(call), np.int64),
        np.minimum(from_ns, called_ns),
        called_ns,
        returned_ns,
        np.where(is_wait, called_ns, work.start_ns[at_work]),
        np.where(is_wait, returned_ns, work.end_ns[at_work]),
        stream,
        key,
        _nth(step, what, key),
        pairs := _pairs(after),
        np.full(len(pairs), TYPICAL),
        np.where(is_wait, rows[call], of),
        steps.number,
        steps.are_marked,
        _begins_ns(run, work, steps),
        True,
        {},
    )
    more, lags_ns = _inferred(program)
    program.lag_ns = np.concatenate([np.full(len(program.after), TYPICAL), lags_ns])
    program.after = np.concatenate([program.after, more])
    lengths_ns = work.end_ns - work.start_ns
    unknown = (call_of_work == NONE) | work.by_order
    during = Stretches(steps.start_ns[:1], steps.end_ns[-1:])
    lost_ns = int(during.covered_ns(work.start_ns[unknown], work.end_ns[unknown]).sum())
    program.unknown = {
        LAUNCHES: lost_ns / max(int(lengths_ns.sum()), 1),
        GPUS: float(len(work.gpus) > 1),
        THREADS: float((starts_ns[1:] < ends_ns[:-1]).mean()) if len(rows) > 1 else 0.0,
        QUEUE: float(delays_of(run, work, slice(0, len(work))).depth.max(initial=0)),
    }
    return program


def _of_work_alone(run: Run, work: Work, steps: Steps) -> Program:
    """The program of a recording without calls. Work begins some time after the work before it has begun, or
    after all work that has ended by then: the later of the two.
    """
    order = np.argsort(work.start_ns, kind="stable")
    starts_ns, ends_ns = work.start_ns[order], work.end_ns[order]
    by_end = np.argsort(ends_ns, kind="stable")
    # Each piece of work, and the end of all work.
    then_ns = np.append(starts_ns, ends_ns.max(initial=0))
    ended = np.searchsorted(ends_ns[by_end], then_ns, "right") - 1
    latest = by_end[np.maximum(ended, 0)] if len(order) else ended
    begun_ns = np.append(starts_ns[:1], starts_ns)[: len(then_ns)]
    waits = np.flatnonzero((ended >= 0) & (np.append(ends_ns, 0)[latest] >= begun_ns))
    # A row for each piece of work, and before it one for its waiting.
    is_wait = np.arange(len(waits) + len(order)) < len(waits)
    at = np.append(waits, np.arange(len(order)))
    rows = np.lexsort((~is_wait, at))
    is_wait, at = is_wait[rows], at[rows]
    after, at = latest[at[is_wait]], np.where(is_wait, 0, at)
    row_of = np.flatnonzero(~is_wait)
    called_ns, ended_ns = starts_ns[at], starts_ns[at]
    called_ns[is_wait], ended_ns[is_wait] = begun_ns[waits], ends_ns[after]
    left_ns = np.where(is_wait, ended_ns, called_ns)
    stream = np.where(is_wait, NONE, _streams(run, work)[order[at]])
    step = _step_of(steps, called_ns)
    key = np.where(is_wait, NONE, _keys(run, work)[order[at]])
    what = np.where(is_wait, WAIT, kinds_of(run, work)[order[at]]).astype(np.uint8)
    return Program(
        what,
        step if steps.are_marked else np.zeros(len(at), np.int64),
        np.append(np.minimum(called_ns[:1], steps.start_ns[:1]), left_ns[:-1]),
        called_ns,
        np.where(is_wait, ended_ns, called_ns),
        np.where(is_wait, called_ns, starts_ns[at]),
        np.where(is_wait, ended_ns, ends_ns[at]),
        stream,
        key,
        _nth(step, what, key),
        np.stack([np.flatnonzero(is_wait), row_of[after]], axis=1),
        np.full(int(is_wait.sum()), TYPICAL),
        np.where(is_wait, NONE, order[at]),
        steps.number,
        steps.are_marked,
        _begins_ns(run, work, steps),
        False,
        {LAUNCHES: 1.0, GPUS: float(len(work.gpus) > 1)},
    )


class _LastOn:
    """The rows of work by stream, to find the last before, or the first from, a place among the rows."""

    def __init__(self, stream: Int64s) -> None:
        rows = np.flatnonzero(stream != NONE)
        self.rows = RowsByNumber(stream[rows], rows)

    def before(self, streams: Ints, places: Int64s) -> Int64s:
        """The last row of a stream before a place, NONE without one. Shapes `(n,)`."""
        return self._found(streams, places, -1)

    def following(self, streams: Ints, places: Int64s) -> Int64s:
        """The first row of a stream from a place on, NONE without one. Shapes `(n,)`."""
        return self._found(streams, places, 0)

    def _found(self, streams: Ints, places: Int64s, shift: int) -> Int64s:
        found = np.full(len(streams), NONE, np.int64)
        for stream, asked in RowsByNumber(streams):
            own = self.rows.of(stream)
            at = np.searchsorted(own, places[asked]) + shift
            inside = (at >= 0) & (at < len(own))
            found[asked[inside]] = own[at[inside]]
        return found


def _awaited(
    found: Dependencies, waits: Int64s, first: Int64s, last: _LastOn, is_wait: Bools, of: Int64s
) -> Int64s:
    """Which rows of waiting wait for which rows of work. Shape `(pairs, 2)`."""
    row, what, stream = first[waits + 1] - 1, found.what[waits], found.stream[waits]
    record = found.record[waits]
    pairs = []
    for_event = (what == WAITS_EVENT) & (record != NONE)
    at = record[for_event]
    pairs.append((row[for_event], last.before(found.stream[at], first[at])))
    for_stream = (what == WAITS_STREAM) & (stream != NONE)
    pairs.append((row[for_stream], last.before(stream[for_stream], row[for_stream])))
    # A blocking copy comes just before its waiting.
    is_copy = ~np.isin(what, (WAITS_DEVICE, WAITS_STREAM, WAITS_EVENT))
    pairs.append((row[is_copy], row[is_copy] - 1))
    for_all = row[~for_event & ~for_stream & ~is_copy]
    for number in last.rows.numbers.tolist():
        pairs.append((for_all, last.before(np.full(len(for_all), number), for_all)))
    return np.concatenate([np.stack(pair, axis=1) for pair in pairs])


def _pairs(some: list[Int64s]) -> Int64s:
    """Pairs of rows, both of which are known, sorted and each once. Shape `(pairs, 2)`."""
    pairs = np.concatenate(some)
    found: Int64s = np.unique(pairs[(pairs != NONE).all(axis=1)], axis=0)
    return found


def _inferred(program: Program) -> tuple[Int64s, Int64s]:
    """Which work waits for which work of other streams though no call says it, and how long after its end it
    begins: shapes `(pairs, 2)` and `(pairs,)`.

    In several steps it begins late, always as long after, and in no step sooner. Such waits were not
    recorded; or the other work takes all of the GPU, until its last blocks leave room before its end.
    """
    rows = np.flatnonzero(program.what != WAIT)
    starts_ns, ends_ns, stream = program.start_ns[rows], program.end_ns[rows], program.stream[rows]
    ready_ns = program.call_ns[rows]
    for _, own in RowsByNumber(stream):
        ready_ns[own[1:]] = np.maximum(ready_ns[own[1:]], np.maximum.accumulate(ends_ns[own])[:-1])
    place = np.full(len(program), NONE)
    place[rows] = np.arange(len(rows))
    later, earlier = program.after[program.what[program.after[:, 0]] != WAIT].T
    np.maximum.at(ready_ns, place[later], program.end_ns[earlier])
    _, number = np.unique(
        np.stack([program.key[rows], program.nth[rows], stream]), axis=1, return_inverse=True
    )
    number, places = number.reshape(-1), np.arange(len(rows))
    computes, communicates = (program.what[rows] == what for what in (COMPUTE, COMMUNICATION))
    # A library of communication lets its stream wait for what was launched before, as PyTorch's does.
    before = np.maximum.accumulate(np.where(computes, places, NONE))
    after = np.flatnonzero(communicates & (before != NONE) & (stream[before] != stream))
    sooner = starts_ns[after] < ends_ns[before[after]] - _EARLY_NS
    after = after[~np.isin(number[after], number[after[sooner]])]
    given = np.stack([rows[after], rows[before[after]]], axis=1)
    ready_ns[after] = np.maximum(ready_ns[after], ends_ns[before[after]])
    is_late = (starts_ns - ready_ns > _TIGHT_NS) & (program.step[rows] != NONE)
    # The last work to end when each begins, and the last on another stream to begin.
    by_end, by_start = (np.argsort(times_ns, kind="stable") for times_ns in (ends_ns, starts_ns))
    last_end = by_end[np.maximum(np.searchsorted(ends_ns[by_end], starts_ns + _EARLY_NS, "right") - 1, 0)]
    last_start = np.empty(len(rows), np.int64)
    firsts = run_starts(stream[by_start])
    spread = np.repeat(firsts, np.diff(firsts, append=len(rows)))
    last_start[by_start] = by_start[np.maximum(spread - 1, 0)]
    step, of_number, explained = program.step[rows], RowsByNumber(number), set[int]()
    pairs, lags_ns = [given], [np.full(len(given), TYPICAL)]
    for at, is_near, for_room in (
        (last_end, (starts_ns - ends_ns[last_end] < _TIGHT_NS) & (last_end < places), False),
        (last_start, (starts_ns < ends_ns[last_start] + _TIGHT_NS) & computes & computes[last_start], True),
    ):
        is_waiting = is_late & is_near & (starts_ns[at] < starts_ns) & (stream[at] != stream)
        own = np.flatnonzero(is_waiting)
        kinds, counts = np.unique(np.stack([number[own], number[at[own]]]), axis=1, return_counts=True)
        for later, earlier in kinds[:, counts >= _TIGHT_LEAST].T.tolist():
            a, b = of_number.of(later), of_number.of(earlier)
            _, in_a, in_b = np.intersect1d(step[a], step[b], return_indices=True)
            a, b = a[in_a], b[in_b]
            since_ns, lag_ns, near_ns = starts_ns[a] - ends_ns[b], 0, float(_EARLY_NS)
            # It is so in most of the steps in which the work is late, and follows the other work more closely
            # than its own launch.
            near = is_waiting[a] & (at[a] == b) if for_room else is_late[a] & (since_ns < _TIGHT_NS)
            late_ns = starts_ns[a] - ready_ns[a]
            if 2 * near.sum() <= is_late[a].sum() or since_ns[near].var() >= late_ns[near].var():
                continue
            if for_room:
                # What comes first has the room.
                first = starts_ns[b] < starts_ns[a]
                if first.mean() < _TIGHT_MOST:
                    continue
                a, b, since_ns = a[first], b[first], since_ns[first]
                lag_ns = int(np.median(since_ns[is_waiting[a]]))
                near_ns = max(_TIGHT_NS, _TIGHT_SHARE * float(np.median(ends_ns[b] - starts_ns[b])))
                if (np.abs(since_ns - lag_ns)[is_late[a]] <= near_ns).mean() < _TIGHT_MOST:
                    continue
            if (
                later in explained
                or (starts_ns[b] >= starts_ns[a]).any()
                or (since_ns < lag_ns - near_ns).any()
            ):
                continue
            explained.add(later)
            pairs.append(np.stack([rows[a], rows[b]], axis=1))
            lags_ns.append(np.full(len(a), lag_ns if for_room else TYPICAL))
    return np.concatenate(pairs), np.concatenate(lags_ns)


def _begins_ns(run: Run, work: Work, steps: Steps) -> Int64s | None:
    if run_far_ahead(run, work, steps):
        return None
    return np.append(steps.start_ns, steps.end_ns[-1:])


def _step_of(steps: Steps, called_ns: Int64s) -> Int64s:
    """The index of the step in which each call is, NONE before and after them. Shape `(calls,)`."""
    found = np.searchsorted(steps.start_ns, called_ns, "right") - 1
    found[called_ns >= steps.end_ns[-1]] = NONE
    return found


def _first_query_ns(what: Ints, starts_ns: Int64s) -> Int64s:
    """When each call began, or the first of the queries just before it. Shape `(calls,)`."""
    places = np.arange(len(what))
    others = np.maximum.accumulate(np.where(what == POLLS, NONE, places))
    before = np.append(NONE, others[:-1])
    found: Int64s = starts_ns[np.minimum(before + 1, places)] if len(what) else starts_ns
    return found


def _nth(step: Int64s, what: Ints, key: Int64s) -> Int64s:
    """The place in the step of each row. Shape `(rows,)`."""
    before = np.cumsum(what == COMMUNICATION)
    starts = run_starts(step)
    before -= np.repeat(before[starts] - (what[starts] == COMMUNICATION), np.diff(starts, append=len(step)))
    return before * PLACES + np.minimum(count_earlier(step, before, key), PLACES - 1)


def _streams(run: Run, work: Work) -> Int64s:
    """The stream of each row of work; those of which it is not known have one. Shape `(rows,)`."""
    streams = streams_of(run, work)
    return np.where(streams == NONE, _UNKNOWN_STREAM, streams)


def _keys(run: Run, work: Work) -> Int64s:
    """A number for the name and the grid of each row of work, the same in all recordings. Shape `(rows,)`."""
    shape = shapes_of(run, work)
    of_row, firsts = number_rows(shape, work.what, np.where(shape == NONE, work.row, NONE))
    names = [work.name(run, at) for at in firsts.tolist()]
    grids = [None if one == NONE else run.shapes.values("grid", np.array([one]))[0] for one in shape[firsts]]
    found = np.array([_hashed(f"{name} {grid}") for name, grid in zip(names, grids, strict=True)], np.int64)
    return found[of_row] if len(found) else np.zeros(len(work), np.int64)


def _call_keys(run: Run, rows: Int64s) -> Int64s:
    """A number for the name of each of some calls, the same in all recordings. Shape `(n,)`."""
    names = run.shapes.column("name", run.layer("userspace").shape[rows])
    of_row, firsts = number_rows(names)
    found = np.array([_hashed(run.shapes.text(number)) for number in names[firsts].tolist()], np.int64)
    return found[of_row] if len(found) else np.zeros(len(rows), np.int64)


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
