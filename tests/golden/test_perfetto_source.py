"""Traces of Perfetto: what the trace processor sees in one, it sees in the timeline that is made of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.golden.both import converted
from tests.golden.cases import FIXTURES, Case, with_sample
from tests.support.perfetto_trace import BOOTTIME, INSTANT, MONOTONIC, TraceMade
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.store.run import load_run

# The row of a GPU repeats what its streams have.
_SLICES = "select name, ts, dur from slice where coalesce(category, '') != 'summary'"
# A unit is part of a name here.
_COUNTERS = """
select case when instr(t.name, ' (') then substr(t.name, 1, instr(t.name, ' (') - 1) else t.name end as name,
  ts, value from counter c join track t on t.id = c.track_id
where t.name not in ('thread_time', 'thread_instruction_count')"""
_RUNS = """
select ts, dur, tid, cpu from thread_state join thread using (utid)
where state = 'Running' and tid != 0"""
_FLOWS = """
select f.ts as start_ns, t.ts as end_ns from flow
join slice f on f.id = slice_out join slice t on t.id = slice_in"""
# What a timeline says of the recording that it is made of.
_OF_ITSELF = frozenset({"capture", "ambiguous", "clock trace"})
_WRITTEN = [
    Case(FIXTURES / name) for name in (
        "annotations", "capture-h200-pytorch", "capture-standin", "causality", "chrome-forms",
        "counters-and-arrows",
        "cuda-table-threads", "device-memory", "flows", "host-layers", "host-nesting", "kineto-b200-overlaps",
        "kineto-mi250", "losses", "nsys", "proton-warps", "python-stacks", "rocprof-mi350", "viztracer",
        "warps-ranges", "warps-slots", "wprof", "xplane-mi300",
    )
]  # fmt: skip
_TAKEN = ("perfetto-callstacks", "perfetto-counters", "perfetto-sched", "perfetto-tracks")
Facts = tuple[Counter[object], ...]


def facts(trace: bytes) -> Facts:
    """Every slice and instant, value of a counter, flow, and run of a thread."""
    with RealTraceProcessor(trace) as tp:
        return tuple(
            Counter(tuple(row.values()) for row in tp.rows(sql))
            for sql in (_SLICES, _COUNTERS, _FLOWS, _RUNS)
        )


def assert_same_facts(trace: bytes, folder: Path) -> None:
    path = folder / "trace.pftrace"
    path.write_bytes(trace)
    again, account = converted(path, "perfetto")
    assert account.skipped == 0
    for before, after in zip(facts(trace), facts(again), strict=True):
        assert before - after == Counter()
        assert {name for name, *_ in (after - before)} <= _OF_ITSELF, "more than there was"


@pytest.mark.parametrize("case", with_sample(_WRITTEN), ids=lambda case: case.name)
def test_all_that_was_written_is_read(case: Case, tmp_path: Path) -> None:
    trace, _ = case.convert("perfetto")
    assert_same_facts(trace, tmp_path)


@pytest.mark.parametrize("name", _TAKEN)
def test_all_that_others_wrote_is_read(name: str, tmp_path: Path) -> None:
    assert_same_facts(Case(FIXTURES / name).input.read_bytes(), tmp_path)


_CLONED = 0x10000
_FIRST = ("new", 5, 1, 9, "first", 0)
# What ftrace and the process tree say of tasks: runs of threads (begin, end, tid, name), new tasks (time, by
# whom, id, name, flags), ends and names of tasks, marks, and lines of the tree (time, pid, tid, name).
_LIVES: dict[str, list[tuple[Any, ...]]] = {
    "fork of a known id": [
        ("run", 10, 20, 9, "first"), ("run", 30, 50, 5, "other"), ("new", 40, 5, 9, "new", 0),
        ("run", 50, 60, 9, "new"),
    ],
    "thread of its maker": [
        _FIRST, ("run", 10, 20, 9, "first"), ("new", 12, 9, 10, "b", _CLONED), ("run", 20, 30, 10, "b"),
    ],
    "thread of another process": [
        _FIRST, ("new", 6, 9, 10, "a", _CLONED), ("run", 10, 20, 10, "a"), ("end", 25, 10),
        ("new", 30, 1, 11, "other", 0), ("new", 31, 11, 10, "b", _CLONED), ("run", 40, 50, 10, "b"),
        ("run", 50, 60, 11, "other"),
    ],
    "renamed": [_FIRST, ("run", 10, 20, 9, "python"), ("name", 15, 9, "python")],
    "ended without a new task": [("run", 10, 20, 9, "a"), ("end", 25, 9), ("run", 30, 40, 9, "b")],
    "trees": [
        ("tree", 1, 9, None, "/bin/nine"), ("tree", 1, 9, 9, "main"), ("tree", 1, 9, 10, "a"),
        ("run", 10, 20, 10, "a"), ("end", 21, 10), ("end", 22, 9), ("new", 30, 1, 9, "new", 0),
        ("new", 31, 9, 10, "b", _CLONED), ("run", 32, 40, 10, "b"), ("run", 40, 50, 9, "new"),
        ("tree", 35, 9, None, "/bin/other"),
    ],
    "marks": [
        _FIRST, ("mark", 10, 9, "B|9|m"), ("mark", 12, 9, "E|9"), ("end", 15, 9), ("new", 20, 1, 9, "new", 0),
        ("mark", 30, 9, "B|9|m"), ("mark", 32, 9, "E|9"),
    ],
    "maker known later": [
        ("new", 5, 50, 51, "a", _CLONED), ("run", 10, 20, 51, "a"), ("run", 20, 30, 50, "b"),
        ("tree", 40, 50, None, "/bin/fifty"),
    ],
    "main thread without an entry": [("tree", 1, 9, None, "/bin/nine"), ("run", 10, 20, 9, "main")],
    "a task of another kernel that is dead": [
        ("other tree", 1, 5, None, "sh -c x"), ("other tree", 1, 5, 9, "a"), ("state", 10, 9, 3, "a"),
        ("state", 20, 9, 7, "a"), ("other tree", 25, 6, None, "b"), ("other tree", 25, 6, 9, "b"),
        ("state", 30, 9, 3, "b"), ("state", 40, 9, 4, "b"),
    ],
    "another processor first": [
        ("new", 100, 1, 9, "b", 0), ("run", 110, 120, 9, "b"), ("cpu", 1), ("run", 10, 20, 9, "a"),
    ],
}  # fmt: skip


def of_lives(facts: list[tuple[Any, ...]]) -> TraceMade:
    trace = TraceMade()
    ftrace = trace.packet().ftrace_events
    ftrace.cpu = 0
    for kind, *of in facts:
        if kind == "cpu":
            ftrace = trace.packet().ftrace_events
            ftrace.cpu = of[0]
        elif kind == "state":
            state = trace.packet(timestamp=of[0]).generic_kernel_task_state_event
            state.cpu, (state.tid, state.state, state.comm) = 0, of[1:]
        elif kind == "other tree":
            ts_ns, pid, tid, name = of
            other = trace.packet(timestamp=ts_ns).generic_kernel_process_tree
            if tid is None:
                other.processes.add(pid=pid, cmdline=name)
            else:
                other.threads.add(tid=tid, pid=pid, comm=name)
        elif kind == "tree":
            ts_ns, pid, tid, name = of
            tree = trace.packet(timestamp=ts_ns).process_tree
            if tid is None:
                tree.processes.add(pid=pid, cmdline=[name])
            else:
                tree.threads.add(tid=tid, tgid=pid, name=name)
        elif kind == "run":
            begin_ns, end_ns, tid, name = of
            begins, ends = (
                ftrace.event.add(timestamp=ts_ns, pid=by).sched_switch
                for ts_ns, by in ((begin_ns, 0), (end_ns, tid))
            )
            begins.prev_pid, begins.next_pid, begins.next_comm = 0, tid, name
            ends.prev_pid, ends.prev_comm, ends.prev_state, ends.next_pid = tid, name, 1, 0
        elif kind == "new":
            new = ftrace.event.add(timestamp=of[0], pid=of[1]).task_newtask
            new.pid, new.comm, new.clone_flags = of[2:]
        else:
            event = ftrace.event.add(timestamp=of[0], pid=of[1])
            if kind == "end":
                event.sched_process_free.pid = of[1]
            elif kind == "name":
                event.task_rename.pid, event.task_rename.newcomm = of[1:]
            else:
                event.print.buf = of[2]
    return trace


def identities(trace: bytes) -> list[tuple[Any, ...]]:
    """The runs and slices of threads, each with its thread and process by the order of their first ones, and
    with their names.
    """
    sql = """
    select ts, dur, utid, upid, t.name as thread, p.name as process from
      (select ts, dur, utid from thread_state where state = 'Running'
      union all select ts, dur, utid from slice s join thread_track k on k.id = s.track_id)
    join thread t using (utid) left join process p using (upid) where t.tid != 0 order by ts, dur"""
    with RealTraceProcessor(trace) as tp:
        rows = tp.rows(sql)
    numbers: list[dict[Any, int]] = [{}, {None: -1}]
    return [
        (
            row["ts"], row["dur"],
            *(of.setdefault(row[key], len(of)) for key, of in zip(("utid", "upid"), numbers, strict=True)),
            *((row[key] or "").partition(" (pid ")[0].rpartition("/")[2] for key in ("thread", "process")),
        )
        for row in rows
    ]  # fmt: skip


@pytest.mark.parametrize("name", _LIVES)
def test_tasks_with_one_id_are_told_apart_as_by_the_trace_processor(name: str, tmp_path: Path) -> None:
    trace = of_lives(_LIVES[name]).bytes
    (tmp_path / "trace.pftrace").write_bytes(trace)
    before, after = identities(trace), identities(converted(tmp_path / "trace.pftrace", "perfetto")[0])
    assert after == before and before


def of_machines(case: str) -> TraceMade:
    """A trace of the host and of machine 7, whose clock is related or not."""
    trace, clock = TraceMade(), BOOTTIME
    trace.snapshot(clock_6=100, clock_3=50, clock_1=10**18)
    if case == "late":
        trace.event(120_000, INSTANT, "early", track_uuid=0, machine=7, clock=clock)
    if case == "primary":
        clock = MONOTONIC
        trace.snapshot(clock_6=1, clock_3=1, primary=MONOTONIC)
        trace.on_machine(7)
    if case == "behind":
        trace.sync(7, (10_000, 120_000), (30_003, 140_000))
    elif case == "rounds":  # the last two are too far apart
        trace.sync(7, (1_000, 900), (1_011, 917), (1_100, 904), (1 << 40, 5))
    elif case != "unrelated":
        trace.sync(7, (120_000, 10_000), (140_000, 30_003), clocks=(BOOTTIME, MONOTONIC))
    if case == "sequences":
        for machine, own_ns in ((0, 0), (7, 1_000)):
            trace.snapshot(5, clock_64=own_ns, clock_6=150_000)
            trace.on_machine(machine)
            trace.event(10, INSTANT, f"of {machine}", 5, track_uuid=0, machine=machine, clock=64)
    for name, of in (("clock", clock), ("none", 0), ("other", MONOTONIC)):
        for machine in (0, 7):
            trace.event(130_000, INSTANT, f"{name} {machine}", track_uuid=0, machine=machine, clock=of)
    return trace


@pytest.mark.parametrize(
    "case", ["synchronised", "late", "primary", "behind", "rounds", "sequences", "unrelated"]
)
def test_times_of_machines_are_those_of_the_trace_processor(case: str, tmp_path: Path) -> None:
    trace = of_machines(case)
    assert_same_facts(trace.bytes, tmp_path)
    text, _ = converted(tmp_path / "trace.pftrace", "text")
    assert (b"its clock is not related" in text) == (case in ("late", "unrelated"))


def test_a_trace_that_is_packed_is_the_same(tmp_path: Path) -> None:
    case = Case(FIXTURES / "capture-standin")
    plain, packed = (case.convert("perfetto", compress=compress)[0] for compress in (False, True))
    (tmp_path / "plain.pftrace").write_bytes(plain)
    (tmp_path / "packed.pftrace").write_bytes(packed)
    one, two = (converted(tmp_path / f"{name}.pftrace", "text")[0] for name in ("plain", "packed"))
    assert len(packed) < len(plain) and one == two


@pytest.mark.parametrize("name", ["capture-h200", "kineto-b200-overlaps", "nsys-h100"])
def test_reports_of_gpus_give_the_same_of_a_written_trace(name: str, tmp_path: Path) -> None:
    case = Case(FIXTURES / name)
    (tmp_path / "trace.pftrace").write_bytes(case.convert("perfetto")[0])
    before, after = (load_run(str(path)).kernels for path in (case.input, tmp_path / "trace.pftrace"))
    columns = "name, gpu, start_ns, dur_ns"
    rows = [sorted(kernels.select(columns).fetchall()) for kernels in (before, after)]
    assert rows[0] == rows[1] and rows[0]
