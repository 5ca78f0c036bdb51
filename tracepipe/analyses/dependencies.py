"""Which calls order the work of streams, or make the host wait for it: events, waits and polling.

    cudaEventRecord on stream 7 ──▶ event 5 ──▶ cudaStreamWaitEvent: stream 13 waits
                                            └─▶ cudaEventSynchronize: the host waits

Calls state streams and events as numbers (CUPTI, Nsight Systems, PyTorch) or as handles (probes). The work
that was launched on a handle says which stream it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracepipe.analyses.cuda_calls import outermost_named, values_by_names
from tracepipe.analyses.gpu_work import Work, outermost_rows, streams_of
from tracepipe.event.columns import NONE, AnyArray, Bools, Int64s, Ints, distinct
from tracepipe.event.groups import run_starts, sorted_runs
from tracepipe.store.run import Run
from tracepipe.store.schema import NO_BEGIN, SPAN

NOTHING, RECORDS, STREAM_WAITS, WAITS_DEVICE, WAITS_STREAM, WAITS_EVENT, POLLS = range(7)
"""The kinds of calls."""
_DEVICE: Final = re.compile(r"(cuda|cu|hip)[A-Z]\w*")
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
# CUPTI's number of no stream and no event, and the largest number of a column.
_UNKNOWN, _INT64_MAX = (1 << 32) - 1, (1 << 63) - 1
_DIGITS_MOST: Final = 32
_STATED: Final = ("stream", "event", "context", "correlation")
# PyTorch states them on rows of the GPU, for the call with the same correlation. Of an event, it states which
# call recorded it on which stream.
_OF_PYTORCH: Final = ("cuda_sync", "cuda_event")
_OF_RECORD: Final = ("wait_on_stream", "event", "context", "wait_on_cuda_event_record_corr_id")


@dataclass(frozen=True, slots=True, eq=False)
class Dependencies:
    """How calls order work, or wait for it, as columns of shape `(calls,)`.

    `what` is the kind of each. `stream` is the stream on which an event is recorded, which waits or for which
    the host waits, as `streams_of` numbers it: NONE where it is not known or has no work. `record` is the
    index, among these calls, of the last one that recorded the event for which a call waits: NONE where none
    did.

    Queries that are repeated until one succeeds are a wait: the last one waits, for an event or a stream, and
    those before it are POLLS. Other queries are NOTHING.
    """

    what: Ints
    stream: Int64s
    record: Int64s


def acting_calls(run: Run) -> Int64s:
    """The rows of the calls that act one after the other, by start: the outermost calls. A call of another
    library counts as the calls of CUDA inside it, as ncclAllReduce waits for events, launches and records.
    Shape `(calls,)`.
    """
    calls = run.layer("userspace")
    of_device = outermost_named(run, _DEVICE)
    outermost = np.flatnonzero((calls.parent == NONE) & (calls.kind == SPAN))
    alone = outermost[~np.isin(outermost, outermost_rows(run, of_device))]
    return np.sort(np.concatenate([alone, of_device[calls.kind[of_device] == SPAN]]))


def dependencies_of(run: Run, work: Work, rows: Int64s) -> Dependencies:
    """Find what some calls wait for. `rows` are rows of calls by start, such as those of `acting_calls`. A
    call inside one of them, as the driver's in the runtime's, counts as that one.
    """
    calls = run.layer("userspace")
    of, kinds = values_by_names(run, "userspace", _kind_of)
    kind_of = np.array([kind or NOTHING for kind in kinds], np.int8)[of]
    inner = np.flatnonzero((kind_of[calls.shape] != NOTHING) & (calls.kind != NO_BEGIN))
    at = given_around(run, rows, inner)
    inner, at = inner[at != NONE], at[at != NONE]
    what = np.zeros(len(rows), np.int8)
    # The outermost call comes first, so it is the last that is written.
    what[at[::-1]] = kind_of[calls.shape[inner[::-1]]]
    is_same = kind_of[calls.shape[inner]] == what[at]
    inner, at = inner[is_same], at[is_same]
    # From here on, columns have the shape `(found,)`.
    found = distinct(at)
    own, kind = rows[found], what[found]
    stated = np.full((len(_STATED), len(found)), NONE, np.int64)
    for column, of_inner in zip(stated, _numbers(run, calls.args[inner], _STATED), strict=True):
        known = np.flatnonzero(of_inner != NONE)[::-1]
        column[np.searchsorted(found, at[known])] = of_inner[known]
    layers = [run.shapes.number_of("layer", name) for name in _OF_PYTORCH]
    hooks = np.flatnonzero(np.isin(run.shapes.column("layer"), layers)[run.layer("hook").shape])
    for keys in (_STATED, _OF_RECORD):
        _add_stated(run, own, stated, hooks, keys)
    stream, event, context, _ = stated
    if (kind >= _EVENT_QUERY).any():
        kind = _with_waits(run, rows, found, kind, stream, event, context)
    records = kind == RECORDS
    pid = run.shapes.column("pid", calls.shape[own])
    record = _last_before(records, pid, event, context)
    # A wait may state another context than that of its event.
    record = np.where(record == NONE, _last_before(records, pid, event), record)
    for_event = np.isin(kind, (STREAM_WAITS, WAITS_EVENT)) | ((kind == POLLS) & (event != NONE))
    record[~for_event | (event == NONE)] = NONE
    what[found] = kind
    streams, recorded = (np.full(len(rows), NONE, np.int64) for _ in range(2))
    streams[found] = _numbers_of(run, work, own, stream)
    recorded[found] = np.append(found, NONE)[record]
    return Dependencies(what, streams, recorded)


def given_around(run: Run, rows: Int64s, inner: Ints) -> Int64s:
    """The index of the one of `rows` that is a call, or is around it; NONE where none is, and for NONE. Shape
    `(inner,)`.
    """
    parent = run.layer("userspace").parent
    place = np.full(len(parent) + 1, NONE, np.int64)
    place[rows] = np.arange(len(rows))
    around, at = inner.astype(np.int64), place[inner]
    while len(outside := np.flatnonzero((at == NONE) & (around != NONE))):
        around[outside] = parent[around[outside]]
        at[outside] = place[around[outside]]
    return at


def _kind_of(name: str) -> int | None:
    found = _CALLS.fullmatch(name)
    return found and found.lastindex


def _numbers(run: Run, args: Ints, keys: Sequence[str]) -> Int64s:
    """Numbers or handles among some arguments, NONE where there is none. Shape `(keys, args)`."""
    found = run.args.values(args, lambda one: tuple(_number(one.get(key)) for key in keys))
    return np.array(found, np.int64).reshape(-1, len(keys)).T


def _add_stated(run: Run, rows: Int64s, stated: Int64s, hooks: Int64s, keys: Sequence[str]) -> None:
    """Add what rows of PyTorch state of the calls at `rows`. The last key is the correlation of the call."""
    values = _numbers(run, run.layer("hook").args[hooks], keys)
    starts = [run.layer("userspace").start_ns[rows], run.layer("hook").start_ns[hooks]]
    # The row of a call begins during it.
    order = np.argsort(np.concatenate(starts), kind="stable")
    is_call = (np.arange(len(order)) < len(rows))[order]
    call = np.empty(len(order), np.int64)
    call[order] = np.append(order, len(order))[
        _last_before(is_call, np.concatenate([stated[-1], values[-1]])[order])
    ]
    of_hook = call[len(rows) :]
    known = (values[-1] != NONE) & (of_hook < len(rows))
    for column, more in zip(stated[:-1], values[:-1], strict=True):
        adds = np.flatnonzero(known & (more != NONE))
        column[of_hook[adds]] = more[adds]


def _number(value: object) -> int:
    """A number or a handle, which may be written as text; NONE for anything else."""
    if isinstance(value, str):
        try:
            value = int(value[:_DIGITS_MOST], 0)
        except ValueError:
            return NONE
    return value if type(value) is int and 0 <= value <= _INT64_MAX and value != _UNKNOWN else NONE


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
    calls, streams, shapes = run.layer("userspace"), streams_of(run, work), run.shapes
    names, of = values_by_names(run, "userspace", lambda name: _OF_THREAD.fullmatch(name) is not None)
    is_of_thread = np.array(of, np.bool_)[names]
    is_number = np.isin(stated, streams) & ~(is_of_thread[calls.shape[rows]] & (stated == 0))
    unknown = np.flatnonzero((stated != NONE) & ~is_number)
    found = stated.copy()
    if not len(unknown):
        return found
    launched = np.flatnonzero((work.call != NONE) & (streams != NONE))
    launching, first, works = np.unique(work.call[launched], return_index=True, return_counts=True)
    # The kernels of a graph may be on other streams.
    launching, first = launching[works == 1], first[works == 1]
    (handles,) = _numbers(run, calls.args[launching], ("stream",))
    both = np.concatenate([launching, rows[unknown]])
    shape, handle = calls.shape[both], np.concatenate([handles, stated[unknown]])
    is_own = is_of_thread[shape] & (handle == 0)
    handle = np.where(is_own, _PER_THREAD, np.where(handle == _LEGACY, 0, handle))
    thread = np.where(handle == _PER_THREAD, shapes.threads[0][shape], NONE)
    order = np.argsort(both, kind="stable")
    keys = [column[order] for column in (shapes.column("pid", shape), handle, thread)]
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
