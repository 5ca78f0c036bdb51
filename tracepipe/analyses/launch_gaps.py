"""A GPU's idle time from calls alone: the time between launches, and the time after a synchronise call.

    launch ──▶ …  cuCtxSynchronize ──────┤ all work that was asked for is done │ launch ──▶
                                          └────── surely idle ─────────────────┘

Between two launches a GPU may still work. After a call that waits for all work, the process has no work on
the GPU until its next call that launches some, if no other thread launched any meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracepipe.analyses.cuda_calls import calls_named, launching, outermost_named
from tracepipe.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.event.columns import NONE, Int32s, Int64s, Ints
from tracepipe.event.groups import RowsByNumber, number_rows
from tracepipe.reports.report import Column, Table
from tracepipe.store.run import Run
from tracepipe.units import agree, counted

_VARIANT = r"(_v\d+)?(_ptsz|_ptds)?"
_SYNCHRONISE = re.compile(r"cu(Ctx|daDevice|daThread)Synchronize" + _VARIANT)
# All calls that may give work to a GPU, not only launches: idle time must not be claimed wrongly.
_WORK = re.compile(
    r"(__)?cu\w*(Launch|Memcpy|Memset|Prefetch|GraphUpload|BatchMemOp|WriteValue|MemMap|Discard)\w*"
)
_OF_DEVICES = re.compile(r"cudaSetDevice|cuCtxCreate" + _VARIANT)
_CREATES = re.compile(r"cuCtxCreate.*")
# The most processes that are named in notes.
_NAMED_MAX = 20
# The options of a capture that leave calls out.
_LEAVING_OUT = ("only", "exclude", "min_duration_ns", "sample")


@dataclass(frozen=True, slots=True)
class _Idle:
    """Stretches in which a process surely had no work on its GPU, as columns of shape `(n,)`, sorted by
    process and time. `pid` is the number of the process's id; `after` and `before` are rows of calls.
    """

    pid: Ints
    start_ns: Int64s
    end_ns: Int64s
    after: Ints
    before: Ints


def launch_tables(run: Run, top: int, least_ns: int) -> tuple[list[Table], list[str]]:
    """Return tables of the time between launches and of the time after synchronise calls, and notes on them;
    both are empty where no launch was recorded.
    """
    launches = launching(run).astype(np.int32)
    if not len(launches):
        return [], []
    tables, left_out = [], 0
    found = [_between_launches(run, launches, top)]
    notes = list(_notes(run))
    if not any(run.facts.header.options.get(name) for name in _LEAVING_OUT):
        idle, unsure = _surely_idle(run, launches)
        notes += unsure
        lengths_ns = idle.end_ns - idle.start_ns
        long = np.flatnonzero((lengths_ns >= least_ns) & (lengths_ns > 0)).astype(np.int32)
        found += [_idle_by_process(run, idle, long, top), (_longest(run, idle, long, top), 0)]
    for table, more in found:
        left_out = max(left_out, more)
        if len(table.rows):
            tables.append(table)
    if left_out:
        notes.append(counted(left_out, "more process|processes is|are not listed: --top 0 lists all"))
    return tables, notes


class _Processes:
    """Rows by process, for the `top` processes with the most rows, or all for 0, in the order of their first
    rows. `pids` has the number of the process id of each row, shape `(rows,)`; `left_out` is the number of
    other processes.
    """

    def __init__(self, pids: Ints, rows: Ints, top: int) -> None:
        of, first = number_rows(pids)
        counts = np.bincount(of, minlength=len(first))
        busiest = np.argsort(-counts, kind="stable")
        shown = busiest[:top] if top > 0 else busiest
        self._shown, self._pids, self._rows = (
            shown[np.argsort(first[shown])],
            pids[first],
            RowsByNumber(of, rows),
        )
        self.left_out = len(first) - len(shown)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for number in self._shown.tolist():
            yield int(self._pids[number]), self._rows.of(number)


def _pids(run: Run, rows: Ints) -> Int32s:
    """The numbers of the process ids of some rows of calls. Shapes `(n,)`."""
    pids: Int32s = run.shapes.column("pid", run.layer("userspace").shape[rows])
    return pids


def _between_launches(run: Run, launches: Ints, top: int) -> tuple[Table, int]:
    """The time from the return of each launch to the next launch, and from launch to launch, by process; and
    how many processes are left out.
    """
    calls, processes = run.layer("userspace"), _Processes(_pids(run, launches), launches, top)

    def rows() -> Iterator[tuple[Any, ...]]:
        for pid, own in processes:
            start_ns, end_ns = calls.start_ns[own], calls.end_ns[own]
            free_ns = start_ns[1:] - np.maximum.accumulate(end_ns)[:-1]
            process = _process(run, pid)
            yield process, "return to launch", len(own), *of_values(free_ns[free_ns >= 0])
            yield process, "launch to launch", len(own), *of_values(np.diff(start_ns))

    columns = (
        Column("process", "from"),
        Column("measure", "measure"),
        Column("launches", "launches", "count"),
        *LENGTH_COLUMNS,
    )
    note = "The GPU may work during this time: a kernel runs after its launch has returned."
    table = Table("launch_gaps", "Time between launches", columns, [*rows()], note, grouped=True)
    return table, processes.left_out


def _surely_idle(run: Run, launches: Ints) -> tuple[_Idle, list[str]]:
    """The surely idle stretches of all processes, and notes on why some processes have none."""
    waits = outermost_named(run, _SYNCHRONISE).astype(np.int32)
    notes = []
    if not len(waits):
        notes.append("no calls that wait for all work of a GPU (cudaDeviceSynchronize) were recorded")
    several = _with_several_devices(run)
    unsure = waits[np.isin(_pids(run, waits), several)]
    found = _pids(run, unsure)
    named = found[np.sort(np.unique(found, return_index=True)[1])]
    notes += [
        f"{_process(run, pid)} uses several GPUs or contexts, and a synchronise call waits for only one"
        for pid in named[:_NAMED_MAX].tolist()
    ]
    if len(named) > _NAMED_MAX:
        notes.append(
            counted(len(named) - _NAMED_MAX, "more process|processes uses|use several GPUs or contexts")
        )
    work = np.union1d(calls_named(run, _WORK), launches).astype(np.int32)
    return _idle_of(run, work, _succeeded(run, waits[~np.isin(_pids(run, waits), several)])), notes


def _with_several_devices(run: Run) -> Int32s:
    """The numbers of the ids of processes that choose several GPUs, or create several contexts."""
    calls, rows = run.layer("userspace"), calls_named(run, _OF_DEVICES)
    known: dict[str | None, int] = {None: NONE}
    texts = run.args.texts_of("device", calls.args[rows])
    devices = np.array([known.setdefault(text, len(known)) for text in texts], np.int32)
    chosen = np.flatnonzero(devices != NONE)
    _, first = number_rows(_pids(run, rows[chosen]), devices[chosen])
    created = calls_named(run, _CREATES)
    found = []
    for of in (_pids(run, rows[chosen[first]]), _pids(run, created)):
        pids, counts = np.unique(of, return_counts=True)
        found.append(pids[counts > 1])
    return np.concatenate(found)


def _succeeded(run: Run, rows: Ints) -> Ints:
    calls = run.layer("userspace")
    results, known = run.args.result(calls.args[rows], calls.end_args[rows])
    found: Ints = rows[calls.has_length[rows] & (~known | (results == 0))]
    return found


def _idle_of(run: Run, work: Ints, waits: Ints) -> _Idle:
    """The stretches from the end of each wait to the next work of its process, for waits during which no
    other thread of the process launched work.
    """
    calls = run.layer("userspace")
    # By process; the rows of calls are in the order of their starts.
    work, count = work[np.argsort(_pids(run, work), kind="stable")], len(work)
    # Process and time in one number, so one search serves all processes.
    rows = np.concatenate((work, work, waits, waits))
    starts = slice(0, count), slice(2 * count, 2 * count + len(waits))
    times_ns = calls.end_ns[rows]
    for some in starts:
        times_ns[some] = calls.start_ns[rows[some]]
    numbers, _ = number_rows(_pids(run, rows), times_ns)
    begun, ended, start, end = (
        numbers[part] for part in (starts[0], slice(count, 2 * count), starts[1], slice(starts[1].stop, None))
    )
    until = np.maximum.accumulate(ended)
    before, after = np.searchsorted(begun, start, "left"), np.searchsorted(begun, end, "left")
    # During the wait, a call of another thread may launch work that the wait does not cover.
    sure = np.flatnonzero((before == after) & (before > 0) & (after < count))
    sure = sure[until[before[sure] - 1] <= start[sure]]
    of_work, of_wait = _pids(run, work), _pids(run, waits)
    sure = sure[(of_work[before[sure] - 1] == of_wait[sure]) & (of_work[after[sure]] == of_wait[sure])]
    # Of several waits before the same work, the first to end counts.
    sure = sure[np.lexsort((end[sure], after[sure]))]
    sure = sure[np.unique(after[sure], return_index=True)[1]]
    waits, work = waits[sure], work[after[sure]]
    return _Idle(of_wait[sure], calls.end_ns[waits], calls.start_ns[work], waits, work)


def _idle_by_process(run: Run, idle: _Idle, kept: Ints, top: int) -> tuple[Table, int]:
    """How long each process surely had no work on its GPU, and how many processes are left out."""
    processes = _Processes(idle.pid[kept], kept, top)
    rows = (
        (_process(run, pid), len(own), *of_values(idle.end_ns[own] - idle.start_ns[own]))
        for pid, own in processes
    )
    columns = (Column("process", "process"), Column("gaps", "gaps", "count"), *LENGTH_COLUMNS)
    note = (
        "From the end of a call that waits for all work of the GPU to the next call that may give it work, "
        "where no other thread did so meanwhile: this process then had no work on the GPU. Idle time that "
        "does not follow such a call is not included."
    )
    return Table("surely_idle", "Surely idle", columns, [*rows], note), processes.left_out


def _longest(run: Run, idle: _Idle, kept: Ints, top: int) -> Table:
    """The longest stretches, one by one."""
    calls, lengths_ns = run.layer("userspace"), idle.end_ns[kept] - idle.start_ns[kept]
    shown = kept[np.lexsort((idle.start_ns[kept], -lengths_ns))][: top or None]

    def row(at: int) -> tuple[Any, ...]:
        after, before = (_call(run, int(rows_of[at])) for rows_of in (idle.after, idle.before))
        at_ns = int(idle.start_ns[at]) - run.facts.start_ns
        tid = run.shapes.value("tid", int(run.shapes.column("tid", calls.shape[idle.before[at]])))
        return at_ns, int(idle.end_ns[at] - idle.start_ns[at]), after, before, tid

    columns = (
        Column("at_ns", "at", "at"),
        Column("dur_ns", "length", "ns"),
        Column("previous", "after"),
        Column("ended_by", "ended by"),
        Column("tid", "thread", "id"),
    )
    return Table("gaps", "The longest gaps", columns, [*map(row, shown.tolist())])


def _call(run: Run, row: int) -> str:
    calls = run.layer("userspace")
    return run.shapes.value("name", int(run.shapes.column("name", calls.shape[row])))


def _process(run: Run, pid: int) -> str:
    """The name and the id of a process, from the number of its id."""
    own = run.shapes.value("pid", pid)
    return run.process_name(own) if own is None else f"{run.process_name(own)} {own}"


def _notes(run: Run) -> Iterator[str]:
    options = run.facts.header.options
    if left_out := ", ".join(name for name in _LEAVING_OUT if options.get(name)):
        yield f"calls were left out ({left_out}): it is not known when the GPU surely had no work"
    if lost := run.facts.losses["userspace"] + run.facts.losses["unknown layer"]:
        words = agree(lost, "event|events of calls was|were")
        yield f"{lost} {words} lost: the GPU may have had work where it counts as surely idle"
