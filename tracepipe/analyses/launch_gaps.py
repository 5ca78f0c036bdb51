"""A GPU's idle time from calls alone: the time between launches, and the time after a synchronise call.

    launch ──▶ …  cuCtxSynchronize ──────┤ all work that was asked for is done │ launch ──▶
                                          └────── surely idle ─────────────────┘

Between two launches a GPU may still work. After a call that waits for all work, the process has no work on
the GPU until its next call that launches some, if no other thread launched any meanwhile.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from tracepipe.analyses.cuda_calls import calls_named, launching, outermost_named
from tracepipe.analyses.distribution import LENGTH_COLUMNS, cells_of, spread_of
from tracepipe.event.columns import Int64s, Ints
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


def launch_tables(run: Run, top: int, least_ns: int) -> tuple[list[Table], list[str]]:
    """Return tables of the time between launches and of the time after synchronise calls, and notes on them;
    both are empty where no launch was recorded.
    """
    launches = launching(run)
    if not len(launches):
        return [], []
    found = [_between_launches(run, launches, top)]
    notes = list(_notes(run))
    if not any(run.facts.header.options.get(name) for name in _LEAVING_OUT):
        idle, unsure = _surely_idle(run, launches, least_ns)
        notes += unsure
        found += [_idle_by_process(run, idle, top), (_longest(run, idle, top), 0)]
    if left_out := max(more for _, more in found):
        notes.append(counted(left_out, "more process|processes is|are not listed: --top 0 lists all"))
    return [table for table, _ in found if len(table.rows)], notes


def _pids(run: Run, rows: Ints) -> Int64s:
    """The numbers of the process ids of some rows of calls. Shapes `(n,)`."""
    pids: Int64s = run.shapes.column("pid", run.layer("userspace").rows(rows, "shape").shape)
    return pids


def _by_process(rows: list[tuple[Any, ...]], top: int) -> tuple[list[tuple[Any, ...]], int]:
    """The `top` processes with the highest counts, or all for 0, in the order of their first rows, and how
    many are left out. A row begins with the pid, the count and the first row.
    """
    busiest = sorted(rows, key=lambda row: (-row[1], row[2]))[: top if top > 0 else None]
    return sorted(busiest, key=lambda row: row[2]), len(rows) - len(busiest)


def _between_launches(run: Run, launches: Ints, top: int) -> tuple[Table, int]:
    """The time from the return of each launch to the next launch, and from launch to launch, by process; and
    how many processes are left out.
    """
    found = run.store.rows(
        f"""select pid, count(*), min(id), {spread_of("free_ns")}, {spread_of("next_ns")}
        from (select s.pid, x.id, x.start_ns - lag(x.start_ns) over before as next_ns,
                x.start_ns - max(x.end_ns) over (before rows between unbounded preceding and 1 preceding)
                as since_ns, if(since_ns >= 0, since_ns, null) as free_ns
            from store.userspace x join launches using (id) join store.shapes s using (shape)
            window before as (partition by s.pid order by x.id))
        group by pid""",
        launches={"id": launches},
    )
    processes, left_out = _by_process(found, top)
    rows: list[tuple[Any, ...]] = []
    for pid, count, _, *lengths in processes:
        rows.append((_process(run, pid), "return to launch", count, *cells_of(*lengths[:4])))
        rows.append((_process(run, pid), "launch to launch", count, *cells_of(*lengths[4:])))
    columns = (
        Column("process", "from"),
        Column("measure", "measure"),
        Column("launches", "launches", "count"),
        *LENGTH_COLUMNS,
    )
    note = "The GPU may work during this time: a kernel runs after its launch has returned."
    return Table("launch_gaps", "Time between launches", columns, rows, note, grouped=True), left_out


def _surely_idle(run: Run, launches: Ints, least_ns: int) -> tuple[dict[str, Any], list[str]]:
    """The stretches of at least some length in which a process surely had no work on its GPU, and notes on
    why some processes have none. A stretch is from the end of a wait, during which no other thread of the
    process launched work, to its next work.

    Columns have the shape `(n,)`, and are sorted by process and time: `pid`, the number of the process's id,
    `start_ns`, `end_ns`, and the rows of the calls around it, `after` and `before`.
    """
    calls, waits, notes = run.layer("userspace"), outermost_named(run, _SYNCHRONISE), list[str]()
    if not len(waits):
        notes.append("no calls that wait for all work of a GPU (cudaDeviceSynchronize) were recorded")
    several = np.array(_with_several_devices(run), np.int64)
    is_unsure = np.isin(_pids(run, waits), several)
    named = [*dict.fromkeys(_pids(run, waits[is_unsure]).tolist())]
    notes += [
        f"{_process(run, pid)} uses several GPUs or contexts, and a synchronise call waits for only one"
        for pid in named[:_NAMED_MAX]
    ]
    if len(named) > _NAMED_MAX:
        notes.append(
            counted(len(named) - _NAMED_MAX, "more process|processes uses|use several GPUs or contexts")
        )
    results, known = run.args.result(calls.args[waits], calls.end_args[waits])
    succeeded = waits[~is_unsure & calls.has_length[waits] & (~known | (results == 0))]
    # During the wait, a call of another thread may launch work that the wait does not cover. Of several waits
    # before the same work, the first to end counts.
    idle = run.store.columns(
        f"""with of_calls as (
            select s.pid, x.id, x.start_ns, x.end_ns
            from store.userspace x join store.shapes s using (shape)),
        work as (
            select pid, start_ns, min(id) as id,
                max(max(end_ns)) over (partition by pid order by start_ns) as until_ns
            from of_calls where id in (select id from work_ids) group by pid, start_ns)
        select w.pid, w.end_ns as start_ns, next.start_ns as end_ns, w.id as after, next.id as before
        from of_calls w asof join work last on last.pid = w.pid and last.start_ns < w.start_ns
        asof join work next on next.pid = w.pid and next.start_ns >= w.start_ns
        where w.id in (select id from wait_ids) and last.until_ns <= w.start_ns and next.start_ns >= w.end_ns
        qualify row_number() over (partition by next.id order by w.end_ns, w.id) = 1
            and next.start_ns - w.end_ns >= {max(least_ns, 1)}
        order by w.pid, end_ns""",
        work_ids={"id": np.union1d(calls_named(run, _WORK), launches)},
        wait_ids={"id": succeeded},
    )
    return idle, notes


def _with_several_devices(run: Run) -> list[int]:
    """The numbers of the ids of processes that choose several GPUs, or create several contexts."""
    rows = calls_named(run, _OF_DEVICES)
    texts = run.args.texts_of("device", run.layer("userspace").rows(rows, "args").args)
    devices = dict.fromkeys(zip(_pids(run, rows).tolist(), texts, strict=True))
    chosen = Counter(pid for pid, device in devices if device is not None)
    created = Counter(_pids(run, calls_named(run, _CREATES)).tolist())
    return [pid for pids in (chosen, created) for pid, count in pids.items() if count > 1]


def _idle_by_process(run: Run, idle: dict[str, Any], top: int) -> tuple[Table, int]:
    """How long each process surely had no work on its GPU, and how many processes are left out."""
    found = run.store.rows(
        f"select pid, count(*), min(pid), {spread_of('end_ns - start_ns')} from idle group by pid", idle=idle
    )
    processes, left_out = _by_process(found, top)
    rows = [(_process(run, pid), count, *cells_of(*lengths)) for pid, count, _, *lengths in processes]
    columns = (Column("process", "process"), Column("gaps", "gaps", "count"), *LENGTH_COLUMNS)
    note = (
        "From the end of a call that waits for all work of the GPU to the next call that may give it work, "
        "where no other thread did so meanwhile: this process then had no work on the GPU. Idle time that "
        "does not follow such a call is not included."
    )
    return Table("surely_idle", "Surely idle", columns, rows, note), left_out


def _longest(run: Run, idle: dict[str, Any], top: int) -> Table:
    """The longest stretches, one by one."""
    shown = np.lexsort((idle["start_ns"], idle["start_ns"] - idle["end_ns"]))[: top or None]
    start_ns, end_ns, after, before = (
        idle[name][shown] for name in ("start_ns", "end_ns", "after", "before")
    )
    names = (run.values("userspace", rows, "name")["name"] for rows in (after, before))
    tids = run.values("userspace", before, "tid")["tid"]
    at_ns, lengths_ns = (start_ns - run.facts.start_ns).tolist(), (end_ns - start_ns).tolist()
    columns = (
        Column("at_ns", "at", "at"),
        Column("dur_ns", "length", "ns"),
        Column("previous", "after"),
        Column("ended_by", "ended by"),
        Column("tid", "thread", "pid"),
    )
    rows = [*zip(at_ns, lengths_ns, *names, tids, strict=True)]
    return Table("gaps", "The longest gaps", columns, rows)


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
