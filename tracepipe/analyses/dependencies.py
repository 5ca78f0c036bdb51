"""Which calls order the work of streams, or make the host wait for it: events, waits and polling.

    cudaEventRecord on stream 7 ──▶ event 5 ──▶ cudaStreamWaitEvent: stream 13 waits
                                            └─▶ cudaEventSynchronize: the host waits

Calls state streams and events as numbers (CUPTI, Nsight Systems, PyTorch) or as handles (probes). The work
that was launched on a handle says which stream it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracepipe.analyses.cuda_calls import values_by_names
from tracepipe.analyses.gpu_work import Work, streams_of
from tracepipe.event.columns import NONE, AnyArray, Bools, Int64s, Ints, distinct
from tracepipe.event.groups import run_starts, sorted_runs
from tracepipe.event.tables import Args
from tracepipe.store.run import Run
from tracepipe.store.schema import NO_BEGIN

NOTHING, RECORDS, STREAM_WAITS, WAITS_DEVICE, WAITS_STREAM, WAITS_EVENT, POLLS = range(7)
"""The kinds of calls."""
# The groups are the kinds, in order.
_CALLS: Final = re.compile(
    r"(?:cuda|cu|hip)(?:(EventRecord(?:WithFlags)?)|(StreamWaitEvent)|((?:Device|Thread|Ctx)Synchronize)"
    r"|(StreamSynchronize)|(EventSynchronize)|(EventQuery)|(StreamQuery))(?:_v\d+)?(?:_ptsz|_ptds|_spt)?"
)
_EVENT_QUERY, _STREAM_QUERY = 6, 7
# CU_STREAM_LEGACY is the same as 0. CU_STREAM_PER_THREAD is another stream in each thread, and is what 0
# means in functions with these names.
_LEGACY, _PER_THREAD = 1, 2
_OF_THREAD: Final = re.compile(r"\w+(_ptsz|_ptds|_spt)")
# CUDA_ERROR_NOT_READY, and HIP's.
_NOT_READY: Final = 600
_INT64_MAX: Final = (1 << 63) - 1
_DIGITS_MOST: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class Dependencies:
    """How calls order work, or wait for it, as columns of shape `(calls,)`.

    `what` is the kind of each. `stream` is the stream on which an event is recorded, which waits or for which
    the host waits, as `streams_of` numbers it: NONE where it is not known or has no work. `record` is the
    index, among these calls, of the last one that recorded the event for which a call waits: NONE where none
    did.

    Queries that are repeated until one succeeds are a wait: the last one waits, for an event or a stream, and
    those before it are POLLS. Other queries are NOTHING. `missing` counts the waits whose stream or event the
    recording does not state.
    """

    what: Ints
    stream: Int64s
    record: Int64s
    missing: int


def dependencies_of(run: Run, work: Work, rows: Int64s) -> Dependencies:
    """Find what some calls wait for. `rows` are rows of the layer `userspace`, in the order of their starts.
    A call inside one of them, as the driver's in the runtime's, counts as that one.
    """
    calls = run.layer("userspace")
    of, kinds = values_by_names(run, "userspace", _kind_of)
    kind_of = np.array([kind or NOTHING for kind in kinds], np.int8)[of]
    inner = np.flatnonzero((kind_of[calls.shape] != NOTHING) & (calls.kind != NO_BEGIN))
    at = _given_around(calls.parent, rows, inner)
    inner, at = inner[at != NONE], at[at != NONE]
    what = np.zeros(len(rows), np.int8)
    # The outermost call comes first, so it is the last that is written.
    what[at[::-1]] = kind_of[calls.shape[inner[::-1]]]
    differs = kind_of[calls.shape[inner]] != what[at]
    missing = int(differs.sum())
    inner, at = inner[~differs], at[~differs]
    # From here on, columns have the shape `(found,)`.
    found = distinct(at)
    own, kind = rows[found], what[found]
    values = np.array(run.args.values(calls.args[inner], _stated), np.int64).reshape(-1, 3)
    stream, event, context = (np.full(len(found), NONE, np.int64) for _ in range(3))
    for column, of_inner in zip((stream, event, context), values.T, strict=True):
        known = np.flatnonzero(of_inner != NONE)[::-1]
        column[np.searchsorted(found, at[known])] = of_inner[known]
    if (kind >= _EVENT_QUERY).any():
        kind = _with_waits(run, rows, found, kind, stream, event, context)
    records = kind == RECORDS
    pid = run.shapes.column("pid", calls.shape[own])
    record = _last_before(records, pid, event, context)
    # A wait may state another context than that of its event.
    record = np.where(record == NONE, _last_before(records, pid, event), record)
    for_event = np.isin(kind, (STREAM_WAITS, WAITS_EVENT)) | ((kind == POLLS) & (event != NONE))
    record[~for_event | (event == NONE)] = NONE
    on_stream = np.isin(kind, (STREAM_WAITS, WAITS_STREAM))
    missing += int(np.count_nonzero((for_event & (event == NONE)) | (on_stream & (stream == NONE))))
    what[found] = kind
    streams, recorded = (np.full(len(rows), NONE, np.int64) for _ in range(2))
    streams[found] = _numbers_of(run, work, own, stream)
    recorded[found] = np.append(found, NONE)[record]
    return Dependencies(what, streams, recorded, missing)


def _kind_of(name: str) -> int | None:
    found = _CALLS.fullmatch(name)
    return found and found.lastindex


def _stated(args: Args) -> tuple[int, int, int]:
    """The stream, the event and the context among arguments."""
    return _number(args.get("stream")), _number(args.get("event")), _number(args.get("context"))


def _number(value: object) -> int:
    """A number or a handle, which may be written as text; NONE for anything else."""
    if isinstance(value, str):
        try:
            value = int(value[:_DIGITS_MOST], 0)
        except ValueError:
            return NONE
    return value if type(value) is int and 0 <= value <= _INT64_MAX else NONE


def _given_around(parent: Ints, rows: Int64s, inner: Int64s) -> Int64s:
    """The index of the given row that is a call or around it, NONE where there is none."""
    place = np.full(len(parent) + 1, NONE, np.int64)
    place[rows] = np.arange(len(rows))
    around, at = inner.copy(), place[inner]
    while len(outside := np.flatnonzero((at == NONE) & (around != NONE))):
        around[outside] = parent[around[outside]]
        at[outside] = place[around[outside]]
    return at


def _last_before(counts: Bools, *keys: AnyArray) -> Int64s:
    """For each row, the last one up to it that counts and has the same keys, NONE without one."""
    order, starts = sorted_runs(*keys)
    last = np.maximum.accumulate(np.where(counts[order], np.arange(len(order)), NONE))
    is_known = last >= np.repeat(starts, np.diff(starts, append=len(order)))
    found = np.full(len(order), NONE, np.int64)
    found[order[is_known]] = order[last[is_known]]
    return found


def _with_waits(run: Run, rows: Int64s, found: Int64s, kind: Ints, *of: Int64s) -> Ints:
    """The kinds of the found calls, in which queries that succeed at last are waits. They follow each other
    in their thread, and the columns `of` are equal.
    """
    shapes, calls = run.shapes, run.layer("userspace")
    thread = shapes.threads[0][calls.shape[rows]]
    in_thread = np.empty(len(rows), np.int64)
    in_thread[np.argsort(thread, kind="stable")] = np.arange(len(rows))
    order = np.argsort(in_thread[found])
    own, kinds = rows[found[order]], kind[order]
    result, is_known = run.args.result(calls.args[own], calls.end_args[own])
    skipped = in_thread[found[order]] - np.arange(len(order))
    begins = np.zeros(len(order), np.bool_)
    begins[run_starts(thread[found[order]], skipped, kinds, *(column[order] for column in of))] = True
    succeeds = is_known & (result == 0)
    begins[1:] |= succeeds[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(order)) - 1
    not_ready = np.add.reduceat((is_known & (result == _NOT_READY)).astype(np.int64), first)
    is_query = kinds >= _EVENT_QUERY
    waits = is_query[first] & succeeds[last] & (last > first) & (not_ready == last - first)
    last_kinds = np.where(kinds[last] == _EVENT_QUERY, WAITS_EVENT, WAITS_STREAM)
    polls = np.repeat(np.where(waits, POLLS, NOTHING), last - first + 1)
    polls[last[waits]] = last_kinds[waits]
    changed = kind.copy()
    changed[order] = np.where(is_query, polls, kinds)
    return changed


def _numbers_of(run: Run, work: Work, rows: Int64s, stated: Int64s) -> Int64s:
    """The numbers of the streams that calls state, which are handles where no work has such a number."""
    calls, streams = run.layer("userspace"), streams_of(run, work)
    unknown = np.flatnonzero((stated != NONE) & ~np.isin(stated, streams))
    found = stated.copy()
    if not len(unknown):
        return found
    launched = np.flatnonzero((work.call != NONE) & (streams != NONE))
    launching, first, works = np.unique(work.call[launched], return_index=True, return_counts=True)
    # The kernels of a graph may be on other streams.
    launching, first = launching[works == 1], first[works == 1]
    handles = np.array(run.args.values(calls.args[launching], _stated), np.int64).reshape(-1, 3)[:, 0]
    both = np.concatenate([launching, rows[unknown]])
    shape, handle = calls.shape[both], np.concatenate([handles, stated[unknown]])
    own_default, of = values_by_names(run, "userspace", lambda name: _OF_THREAD.fullmatch(name) is not None)
    is_own = np.array(of, np.bool_)[own_default][shape] & (handle == 0)
    handle = np.where(is_own, _PER_THREAD, np.where(handle == _LEGACY, 0, handle))
    thread = np.where(handle == _PER_THREAD, run.shapes.threads[0][shape], NONE)
    order = np.argsort(both, kind="stable")
    keys = [column[order] for column in (run.shapes.column("pid", shape), handle, thread)]
    is_launch = (np.arange(len(both)) < len(launching))[order]
    number = np.concatenate([streams[launched[first]], np.full(len(unknown), NONE)])[order]
    before = _last_before(is_launch, *keys)
    # A handle may be in use for long before its next launch.
    after = len(both) - 1 - _last_before(is_launch[::-1], *(key[::-1] for key in keys))[::-1]
    at = np.where(before != NONE, before, np.where(after < len(both), after, NONE))
    answer = np.empty(len(both), np.int64)
    answer[order] = np.append(number, NONE)[at]
    found[unknown] = answer[len(launching) :]
    return found
