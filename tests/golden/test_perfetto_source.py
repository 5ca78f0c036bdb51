"""Traces of Perfetto: what the trace processor sees in one, it sees in the timeline that is made of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

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
