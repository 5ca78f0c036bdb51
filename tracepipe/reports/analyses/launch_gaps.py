"""What calls alone tell of a GPU's idle time: the time between launches, and that after a synchronise call.

    launch ──▶ …  cuCtxSynchronize ──────┤ all work that was asked for is done │ launch ──▶
                                          └────── surely idle ─────────────────┘

Between two launches a GPU may still work. After a call that waits for all of it, none of the process's work
is on it until the next call that asks for some, if no other thread asked meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tracepipe.event.columns import Int64s
from tracepipe.reports.analyses.cuda_calls import calls_named, launching, outermost_named
from tracepipe.reports.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.reports.frames.layers import Layer
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run
from tracepipe.reports.report import Column, Table

_VARIANT = r"(_v\d+)?(_ptsz|_ptds)?"
_SYNCHRONISE = re.compile(r"cu(Ctx|daDevice|daThread)Synchronize" + _VARIANT)
# More than launches: whatever may put work on a GPU, so that idle is not claimed where it was not.
_WORK = re.compile(
    r"(__)?cu\w*(Launch|Memcpy|Memset|Prefetch|GraphUpload|BatchMemOp|WriteValue|MemMap|Discard)\w*"
)
_OF_DEVICES = re.compile(r"cudaSetDevice|cuCtxCreate" + _VARIANT)
_CREATES = re.compile(r"cuCtxCreate.*")
# Options of a capture that leave calls out.
_LEAVING_OUT = ("only", "exclude", "min_duration_ns", "sample")


@dataclass(frozen=True, slots=True)
class _Idle:
    """Stretches in which a process surely had nothing on its GPU: `after` and `before` are rows of calls."""

    start_ns: Int64s
    end_ns: Int64s
    after: Int64s
    before: Int64s


def launch_tables(run: Run, top: int, least_ns: int) -> tuple[list[Table], list[str]]:
    """Tables of the time between launches and of that after synchronise calls, and what must be known of
    them; nothing where no launch was recorded.
    """
    calls = run.layer("userspace")
    launches = np.flatnonzero(launching(run))
    if not len(launches):
        return [], []
    pids = run.shapes.column("pid", calls.shape)
    tables, notes = [_between_launches(run, launches, pids)], list(_notes(run))
    if not any(run.facts.header.get("options", {}).get(name) for name in _LEAVING_OUT):
        found, unsure = _idle_by_process(run, launches, pids)
        notes += unsure
        tables += [table for table in _idle_tables(run, found, top, least_ns) if table.rows]
    return tables, notes


def _between_launches(run: Run, launches: Int64s, pids: Any) -> Table:
    """From the return of each launch to the next one, and from launch to launch, by process."""
    calls, rows = run.layer("userspace"), []
    for pid in dict.fromkeys(pids[launches].tolist()):
        own = launches[pids[launches] == pid]
        start_ns, end_ns = calls.start_ns[own], calls.end_ns[own]
        free_ns = start_ns[1:] - np.maximum.accumulate(end_ns)[:-1]
        process = _process(run, pid)
        rows += [
            (process, "return to launch", len(own), *of_values(free_ns[free_ns >= 0])),
            (process, "launch to launch", len(own), *of_values(np.diff(start_ns))),
        ]
    columns = (
        Column("process", "from"),
        Column("measure", "measure"),
        Column("launches", "launches", "count"),
        *LENGTH_COLUMNS,
    )
    note = "The GPU may work in that time: a kernel runs after its launch has returned."
    return Table("launch_gaps", "Time between launches", columns, rows, note, grouped=True)


def _idle_by_process(run: Run, launches: Int64s, pids: Any) -> tuple[dict[int, _Idle], list[str]]:
    """The stretches of each process, and why some have none."""
    work = np.union1d(calls_named(run, _WORK), launches)
    waits = outermost_named(run, _SYNCHRONISE)
    found, notes = {}, []
    if not len(waits):
        notes.append("no call that waits for the whole GPU (cudaDeviceSynchronize) was recorded")
    for pid in dict.fromkeys(pids[waits].tolist()):
        if _has_several_devices(run, pid, pids):
            who = _process(run, pid)
            notes.append(f"{who} uses several GPUs or contexts: a synchronise call waits for one of them")
            continue
        own_work, own_waits = work[pids[work] == pid], waits[pids[waits] == pid]
        found[pid] = _idle_of(run.layer("userspace"), own_work, _succeeded(run, own_waits))
    return found, notes


def _has_several_devices(run: Run, pid: int, pids: Any) -> bool:
    calls, rows = run.layer("userspace"), calls_named(run, _OF_DEVICES)
    rows = rows[pids[rows] == pid]
    devices = {text for text in run.args.texts_of("device", calls.args[rows]) if text is not None}
    created = calls_named(run, _CREATES)
    return len(devices) > 1 or bool(np.count_nonzero(pids[created] == pid) > 1)


def _succeeded(run: Run, rows: Int64s) -> Int64s:
    calls = run.layer("userspace")
    results, known = run.args.result(calls.args[rows], calls.end_args[rows])
    ended: Int64s = rows[calls.has_length[rows] & (~known | (results == 0))]
    return ended


def _idle_of(calls: Layer, work: Int64s, waits: Int64s) -> _Idle:
    """From the end of each wait that no other work came into, to the next work."""
    work_start_ns = calls.start_ns[work]
    until_ns = np.maximum.accumulate(np.append(0, calls.end_ns[work]))
    start_ns, end_ns = calls.start_ns[waits], calls.end_ns[waits]
    before = np.searchsorted(work_start_ns, start_ns, "left")
    after = np.searchsorted(work_start_ns, end_ns, "left")
    # A call that another thread is in, or begins, meanwhile may ask for work that the wait does not cover.
    sure = (before == after) & (until_ns[before] <= start_ns) & (before > 0) & (after < len(work))
    waits, after = waits[sure], after[sure]
    # Of several waits before one piece of work the first to end counts.
    order = np.lexsort((calls.end_ns[waits], after))
    _, first = np.unique(after[order], return_index=True)
    waits, after = waits[order][first], after[order][first]
    return _Idle(calls.end_ns[waits], work_start_ns[after], waits, work[after])


def _idle_tables(run: Run, found: dict[int, _Idle], top: int, least_ns: int) -> Iterator[Table]:
    rows, longest = [], []
    calls = run.layer("userspace")
    for pid, idle in found.items():
        lengths_ns = idle.end_ns - idle.start_ns
        kept = np.flatnonzero((lengths_ns >= least_ns) & (lengths_ns > 0))
        if not len(kept):
            continue
        rows.append((_process(run, pid), len(kept), *of_values(lengths_ns[kept])))
        for at in kept[np.argsort(-lengths_ns[kept], kind="stable")][: top or None].tolist():
            after, before = (_call(run, int(rows_of[at])) for rows_of in (idle.after, idle.before))
            at_ns = int(idle.start_ns[at]) - run.facts.start_ns
            tid = run.shapes.value("tid", int(run.shapes.column("tid", calls.shape[idle.before[at]])))
            longest.append((at_ns, int(lengths_ns[at]), after, before, tid))
    columns = (Column("process", "process"), Column("gaps", "gaps", "count"), *LENGTH_COLUMNS)
    note = (
        "From the end of a call that waits for the whole GPU to the next call that may give it work, where "
        "no other thread gave it any meanwhile: nothing of this process was on it. Idle time that no such "
        "call precedes is not among it."
    )
    yield Table("surely_idle", "Surely idle", columns, rows, note)
    longest.sort(key=lambda row: (-row[1], row[0]))
    yield Table(
        "gaps",
        "The longest",
        (
            Column("at_ns", "at", "at"),
            Column("dur_ns", "length", "ns"),
            Column("previous", "after"),
            Column("ended_by", "ended by"),
            Column("tid", "thread", "id"),
        ),
        longest[: top or None],
    )


def _call(run: Run, row: int) -> str:
    calls = run.layer("userspace")
    name: str = run.shapes.value("name", int(run.shapes.column("name", calls.shape[row])))
    return name


def _process(run: Run, pid: int) -> str:
    """Name and id of a process, whose id has this number."""
    own = run.shapes.value("pid", pid)
    return run.process_name(own) if own is None else f"{run.process_name(own)} {own}"


def _notes(run: Run) -> Iterator[str]:
    asked = run.facts.header.get("options", {})
    if left_out := [name for name in _LEAVING_OUT if asked.get(name)]:
        options = ", ".join(left_out)
        yield f"calls were left out ({options}): it is not known when the GPU surely had no work"
    if lost := run.facts.losses["userspace"] + run.facts.losses["unknown layer"]:
        yield f"{lost} events of calls were lost: the GPU may have got work where it counts as surely idle"
