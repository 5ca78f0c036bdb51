"""Several recordings as one timeline: the parts of a capture give what the whole gives, others stay apart."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tracepipe.layout.merging
from tests.golden.merged import anchors_of, converted, written
from tests.support.cores import cores_here, running
from tests.support.perfetto_trace import INSTANT, TraceMade
from tests.support.recordings import GPU_CLOCK, HEADER, PAIR, event, span
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.clocks.common_events import NOTED_NS
from tracepipe.errors import ClockError, InputError

pytestmark = pytest.mark.usefixtures("core")

START = {"monotonic_ns": 1_000, "boottime_ns": 3_000, "realtime_ns": 1_700_000_000_000_001_000}
WHOLE: dict[str, Any] = HEADER | {
    "host": "node1",
    "boot": "b1",
    "start": START,
    "gpus": [{"index": 0, "name": "H200", "uuid": "GPU-0"}, {"index": 1, "name": "H200", "uuid": "GPU-1"}],
}
_FLOW = re.compile(r" ?([→←])(\d+)")
_OF_RECORDINGS = re.compile(r" +-?\d+ +(?:\+ *\d+ +)?(?:capture|clock \S+)(?: |$)")


def timeline(paths: list[str]) -> tuple[list[str], set[tuple[str, str]]]:
    """The lines of what is drawn, without what is stated of each recording, and the flows between slices."""
    lines, ends = [], defaultdict(lambda: ([], []))
    text = converted(paths)[0].decode()
    for line in text.splitlines()[1:-1]:
        if _OF_RECORDINGS.match(line):
            continue
        bare = _FLOW.sub("", line)
        lines.append(bare)
        for sign, number in _FLOW.findall(line):
            ends[number][sign == "←"].append(bare)
    flows = {(start, end) for starts, all_ends in ends.values() for start in starts for end in all_ends}
    return lines, flows


@st.composite
def records(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Calls, ioctls, kernels and losses of up to three processes, in the order of time."""
    made: list[dict[str, Any]] = []
    for pid in range(1, 1 + draw(st.integers(1, 3))):
        at_ns = 2_000
        who = {"pid": pid, "tid": pid, "cpu": pid}
        for launch in range(draw(st.integers(0, 4))):
            at_ns += draw(st.integers(1, 50))
            of_call = {"launch": 10 * launch + pid} if draw(st.booleans()) else {}
            args = {"args": {"size": draw(st.integers(0, 2))}}
            made.append(event("B", at_ns, "cuLaunchKernel", **who, **of_call, **args))
            made.append(span(at_ns + 1, at_ns + 4, "ioctl", "syscall", **who))
            made.append(event("E", at_ns + 9, "cuLaunchKernel", **who))
            if of_call:
                kernel = {"clock": GPU_CLOCK, "gpu": pid % 2, "stream": pid, "grid": [1, 1, 1]}
                length_ns = draw(st.integers(1, 8))
                on_gpu = 500_000 - 2_000 + at_ns + 20
                made.append(
                    span(on_gpu, on_gpu + length_ns, f"k{pid}", "gpu_kernel", **who | kernel | of_call)
                )
            at_ns += 40
        made.append({"type": "name", "pid": pid, "name": f"rank {pid}"})
    return made


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records(), st.sampled_from([2, 2048]))
def test_the_parts_of_a_capture_give_what_the_whole_gives(
    tmp_path: Path, made: list[dict[str, Any]], window_events: int
) -> None:
    made = sorted(made, key=lambda one: one.get("ts_ns", 0) % 498_000)
    head = [WHOLE | {"clocks": ["monotonic", GPU_CLOCK]}, PAIR]
    whole = written(tmp_path / "whole.jsonl", head + made)
    parts = [
        written(tmp_path / f"rank{pid}.jsonl", head + [one for one in made if one["pid"] == pid])
        for pid in sorted({one["pid"] for one in made})
    ]
    with mock.patch.object(tracepipe.layout.merging, "WINDOW_EVENTS", window_events):
        assert timeline(parts) == timeline([whole])


def test_two_hosts_are_kept_apart(tmp_path: Path) -> None:
    call = event("B", 2_000, "cuLaunchKernel", launch=1, cpu=3), event("E", 2_010, "cuLaunchKernel")
    kernel = span(2_020, 2_030, "k", "gpu_kernel", gpu=0, stream=7, launch=1)
    of_first = WHOLE | {"clocks": ["monotonic"], "command": ["python", "train.py"]}
    # It was booted 500 ns before the other.
    start = START | {"monotonic_ns": START["monotonic_ns"] + 500}
    of_second = of_first | {"host": "node2", "boot": "b2", "start": start, "gpus": []}
    paths = [
        written(tmp_path / "rank0.jsonl", [of_first, *call, kernel]),
        written(tmp_path / "rank1.jsonl", [of_second, *call, kernel]),
    ]
    lines, flows = timeline(paths)
    assert [line for line in lines if not line.startswith(" ")] == [
        "GPU 0 H200 on node1",
        "GPU 0 on node2",
        "process python on node2 10000001",
        "process python on node1 1",
        "tracepipe",
    ]
    assert [line.strip() for line in lines if "thread" in line] == [
        "thread python 10000001",
        "thread python 1",
    ]
    assert [line.split()[4] for line in lines if "cuLaunchKernel" in line] == ["cpu=7", "cpu=3"]
    assert len(flows) == 2
    assert [line.split() for line in lines if "launch=" in line] == [
        ["1020", "+", "10", "k", "launch=1"],
        ["520", "+", "10", "k", "launch=1000001"],
    ]
    _, account = converted(paths)
    assert [(part.anchor or {}).get("by") for part in account.parts] == [
        "its clock is the common one", "CLOCK_REALTIME of two hosts",
    ]  # fmt: skip
    assert (account.parts[1].anchor or {})["bound"].startswith("as good as NTP")
    assert account.counts["gpu_kernel"] == 2


def test_processes_of_two_hosts_without_a_pid_are_two(tmp_path: Path) -> None:
    call = {"ts_ns": 2_000, "type": "userspace", "name": "f", "phase": "X", "dur_ns": 5}
    paths = [
        written(tmp_path / f"{host}.jsonl", [WHOLE | {"host": host, "boot": host, "command": []}, call])
        for host in ("node1", "node2")
    ]
    lines, _ = timeline(paths)
    assert [line for line in lines if line.startswith("process")] == [
        "process process (pid not recorded) on node1",
        "process process on node2 10000000",
    ]


def test_a_recording_of_two_hosts_has_a_range_of_ids_for_each(tmp_path: Path) -> None:
    trace = TraceMade()
    trace.snapshot(clock_6=1, clock_3=2, clock_1=3)
    trace.packet().system_info.machine_name = "node1"
    for machine in (0, 7):
        trace.thread(1, 5, 6, "worker")
        trace.on_machine(machine)
        trace.event(2_000, INSTANT, "x", machine=machine)
    (tmp_path / "two.pftrace").write_bytes(trace.bytes)
    call = event("B", 2_000, "f", pid=5, tid=6), event("E", 2_010, "f", pid=5, tid=6)
    other = written(tmp_path / "other.jsonl", [WHOLE | {"host": "node3"}, *call])
    lines, _ = timeline([str(tmp_path / "two.pftrace"), other])
    assert [line.split()[-1] for line in lines if line.startswith("process")] == ["5", "10000005", "20000005"]


def test_a_flow_of_one_file_ends_in_it(tmp_path: Path) -> None:
    ends = [event("B", 10, "a"), event("s", 10, "flow", flow=5), event("E", 20, "a")]
    ends += [event("B", 30, "b"), event("f", 30, "flow", flow=5), event("E", 40, "b")]
    first = WHOLE | {"clocks": ["monotonic"]}
    moved = {"start": {key: ns + 1 for key, ns in START.items()}}
    paths = [
        written(tmp_path / "one.jsonl", [first, *ends]),
        written(tmp_path / "two.jsonl", [first | moved, *({**one, "pid": 2, "tid": 2} for one in ends)]),
    ]
    trace, _ = converted(paths, "perfetto")
    with RealTraceProcessor(trace) as asked:
        rows = asked.rows(
            "select a.name as start, b.name as end, a.track_id = b.track_id as is_one from flow "
            "join slice a on a.id = flow.slice_out join slice b on b.id = flow.slice_in"
        )
        assert asked.problems() == []
    assert rows == [{"start": "a", "end": "b", "is_one": 1}] * 2


def test_losses_problems_and_windows_name_their_file(tmp_path: Path) -> None:
    loss = {"type": "loss", "ts_ns": 5_000, "count": 3, "layer": "syscall"}
    window = {"type": "window", "phase": "B", "ts_ns": 2_000, "window": 1}
    other = WHOLE | {"start": {key: ns + 9 for key, ns in START.items()}}
    paths = [
        written(tmp_path / "one.jsonl", [WHOLE, window, span(2_000, 3_000, "f"), loss]),
        written(
            tmp_path / "two.jsonl", [other, window | {"ts_ns": 2_500}, span(3_000, 4_000, "f"), {"type": 1}]
        ),
    ]
    text = converted(paths)[0].decode()
    assert "lost 3 events count=3 layer=syscall file=one.jsonl" in text
    assert re.search(r"skipped line .*file=two.jsonl", text)
    assert [line.strip() for line in text.splitlines() if "windows of" in line] == [
        "windows of one.jsonl", "windows of two.jsonl",
    ]  # fmt: skip


def test_both_cores_write_the_same(tmp_path: Path) -> None:
    made = [span(ns, ns + 5, "f", pid=ns % 2 + 1, args={"at": ns}) for ns in range(2_000, 2_600, 7)]
    parts = [
        written(tmp_path / f"{pid}.jsonl", [WHOLE | {"host": f"node{pid}", "boot": f"{pid}"}, *made])
        for pid in (1, 2)
    ]
    outputs = set()
    for core in cores_here():
        with running(core):
            outputs |= {converted(parts, "perfetto")[0]}
    assert len(outputs) == 1


# What two tools saw ------------------------------------------------------------------------------------


def of_kineto(path: Path, ahead_ns: int, rank: int = 0, pid: int = 1, count: int = 12) -> str:
    """A file of PyTorch's profiler: launches and the kernels of collectives, whose times are ahead of
    CLOCK_REALTIME.
    """
    base_ns = START["realtime_ns"] - START["monotonic_ns"] + ahead_ns
    made: list[dict[str, Any]] = []
    for at in range(1, count + 1):
        start_ns = base_ns + 100_000 * at
        runtime = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": pid, "tid": pid}
        made.append(runtime | {"ts": start_ns + 400, "dur": 3_000, "args": {"correlation": at, "cbid": 211}})
        args = {"correlation": at, "stream": 7, "device": rank, "Collective name": "allreduce", "Seq": at}
        args |= {"Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
        # The last one does not wait: all end at one time.
        length_ns = 40_000 - 10_000 * rank
        kernel = {"cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": rank, "tid": 7, "args": args}
        made.append(kernel | {"ts": start_ns + 60_000 - length_ns, "dur": length_ns})
    for one in made:
        one |= {"ph": "X", "ts": (one["ts"] - base_ns + 1_000) / 1_000, "dur": one["dur"] / 1_000}
    trace = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": base_ns - 1_000,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "deviceProperties": [{"id": rank, "name": "H200"}],
        "traceEvents": made,
    }
    path.write_text(json.dumps(trace))
    return str(path)


def our_launches(path: Path, count: int = 12, launches: int | None = 0, *, kernels: bool = False) -> str:
    """A capture of the same launches, whose numbers are by `launches` higher, or which have none."""
    made = []
    for at in range(1, count + 1):
        number = {} if launches is None else {"launch": at + launches}
        made.append(event("B", 100_000 * at, "cudaLaunchKernel", **number, args={"grid": [at, 1, 1]}))
        made.append(event("E", 100_000 * at + 4_000, "cudaLaunchKernel"))
        if kernels:
            length = {"dur_ns": 40_000, "gpu": 0, "stream": 7, "args": {"warps": 4}}
            name = "ncclDevKernel_AllReduce"
            made.append(event("X", 100_000 * at + 20_000, name, "gpu_kernel", **number | length))
    return written(path, [WHOLE | {"clocks": ["monotonic"]}, *made])


def test_launches_that_two_tools_recorded_put_their_clocks_together(tmp_path: Path) -> None:
    paths = [our_launches(tmp_path / "run.jsonl"), of_kineto(tmp_path / "torch.json", 250_000)]
    _, account = converted(paths)
    ours, torch = anchors_of(account)
    assert ours == (0, 0, "its clock is the common one")
    moved_ns = START["monotonic_ns"] - START["realtime_ns"] - 250_400
    # PyTorch's profiler notes them 400 ns later, which the bound holds.
    assert torch[:2] == (moved_ns, NOTED_NS)
    assert torch[2].startswith("12 launches that run.jsonl recorded too, 250400 ns from where CLOCK_REALTIME")


def test_launches_are_joined_however_long_clocks_have_drifted_apart(tmp_path: Path) -> None:
    run, torch = tmp_path / "run.jsonl", tmp_path / "torch.json"
    paths = [our_launches(run, count=200), of_kineto(torch, 0, count=200)]
    # A launch every three seconds, and 20 ppm: 12 ms in the end.
    lines = [json.loads(line) for line in run.read_text().splitlines()]
    for at, line in enumerate(lines[1:]):
        line["ts_ns"] += (at // 2) * 3 * 10**9
    trace = json.loads(torch.read_text())
    for at, one in enumerate(trace["traceEvents"]):
        one["ts"] += (at // 2) * 3e6 * (1 + 20e-6)
    written(run, lines)
    torch.write_text(json.dumps(trace))
    _, account = converted(paths)
    assert account.notes == ["200 calls, kernels or copies are in two recordings and drawn once"]
    anchor = account.parts[1].anchor or {}
    assert anchor["by"].startswith("200 launches that run.jsonl recorded too, ")
    assert abs(anchor["drift_ppm"] + 20) < 0.01
    assert anchor["bound_ns"] < 100_000


def test_collectives_put_two_ranks_together(tmp_path: Path) -> None:
    paths = [of_kineto(tmp_path / f"rank{rank}.json", 90_000 * rank, rank, rank + 1) for rank in (0, 1)]
    _, account = converted(paths)
    assert anchors_of(account)[1][:2] == (-90_000, 0)
    lines, _ = timeline(paths)
    assert [line for line in lines if not line.startswith(" ")][:2] == [
        "GPU 0 H200 of rank 0", "GPU 1 H200 of rank 1",
    ]  # fmt: skip


@pytest.mark.parametrize("window_events", [2, 2048])
def test_a_launch_that_two_tools_recorded_is_one_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_events: int
) -> None:
    monkeypatch.setattr(tracepipe.layout.merging, "WINDOW_EVENTS", window_events)
    paths = [of_kineto(tmp_path / "torch.json", 250_000), our_launches(tmp_path / "run.jsonl")]
    lines, flows = timeline(paths)
    calls = [line.split() for line in lines if "cudaLaunchKernel" in line]
    assert len(calls) == 12
    start, _, length, name, *args = calls[2]
    assert (start, length, name) == ("299000", "4000", "cudaLaunchKernel")
    assert {"grid=[3,1,1]", "correlation=3", "after_ns", "dur_ns"} <= set(args)
    # Of our call to the kernel that the other tool alone recorded.
    assert len(flows) == 12
    assert all("cudaLaunchKernel" in start and "AllReduce" in end for start, end in flows)
    _, account = converted(paths)
    assert account.notes == ["12 calls, kernels or copies are in two recordings and drawn once"]


@pytest.mark.parametrize("launches", [500, None])
def test_a_flow_goes_from_the_call_of_one_tool_to_the_kernel_of_another(
    tmp_path: Path, launches: int | None
) -> None:
    # Numbers that are not CUPTI's put no clocks together, and calls need them not to be one.
    paths = [our_launches(tmp_path / "run.jsonl", launches=launches), of_kineto(tmp_path / "torch.json", 0)]
    _, account = converted(paths)
    assert account.parts[1].anchor is not None
    assert "CLOCK_REALTIME" in account.parts[1].anchor["by"]
    lines, flows = timeline(paths)
    assert len([line for line in lines if "cudaLaunchKernel" in line]) == 12
    assert len(flows) == 12
    assert all("grid=" in start and "AllReduce" in end for start, end in flows)


def test_a_kernel_that_two_tools_recorded_is_one_slice(tmp_path: Path) -> None:
    paths = [our_launches(tmp_path / "run.jsonl", kernels=True), of_kineto(tmp_path / "torch.json", 700)]
    lines, flows = timeline(paths)
    kernels = [line for line in lines if "AllReduce" in line]
    assert len(kernels) == 12
    assert all("warps=4" in line and "Collective name=allreduce" in line for line in kernels)
    assert len(flows) == 12
    _, account = converted(paths)
    assert account.notes[0].startswith("24 calls")
    with RealTraceProcessor(converted(paths, "perfetto")[0]) as asked:
        (row,) = asked.rows("select count(*) as slices from slice where name = 'ncclDevKernel_AllReduce'")
        assert asked.problems() == []
    assert row["slices"] == 24  # on the stream, and in the row of its GPU that is shown closed


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_launch_that_three_tools_recorded_is_one_slice(tmp_path: Path, order: tuple[int, ...]) -> None:
    third: list[dict[str, Any]] = []
    for at in range(1, 13):
        start_ns, launch = 100_000 * at, {"launch": at + 900}
        third.append(span(start_ns + 300, start_ns + 3_700, "cudaLaunchKernel", **launch, args={"third": at}))
        kernel = {"gpu": 0, "stream": 7, "args": {"registers": at}} | launch
        third.append(
            span(start_ns + 20_100, start_ns + 59_900, "ncclDevKernel_AllReduce", "gpu_kernel", **kernel)
        )
    start = {"start": {key: ns + 5 for key, ns in START.items()}}
    paths = [
        our_launches(tmp_path / "run.jsonl", launches=500),
        of_kineto(tmp_path / "torch.json", 0),
        written(tmp_path / "third.jsonl", [WHOLE | {"clocks": ["monotonic"]} | start, *third]),
    ]
    lines, flows = timeline([paths[at] for at in order])
    calls = [line for line in lines if "cudaLaunchKernel" in line]
    assert calls[2].split()[:4] == ["299000", "+", "4000", "cudaLaunchKernel"]
    args = ["grid=[3,1,1]", "third=3", "correlation=3", "cbid=211"]
    args += [f"{key} ({file})={ns}" for key, file, ns in (
        ("after_ns", "third.jsonl", 300), ("dur_ns", "third.jsonl", 3_400),
        ("after_ns", "torch.json", 400), ("dur_ns", "torch.json", 3_000),
    )]  # fmt: skip
    assert [arg for arg in args if arg not in calls[2]] == []
    assert calls[2].count("=") == len(args)
    kernels = [line for line in lines if "AllReduce" in line]
    assert (len(calls), len(kernels), len(flows)) == (12, 12, 12)
    assert all("registers=" in kernel and "Collective name=" in kernel for kernel in kernels)
    assert all("grid=" in start and "registers=" in end for start, end in flows)


def test_one_profiler_may_run_twice_in_a_process(tmp_path: Path) -> None:
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    tops = {}
    for later_ns in (10**9, 0):
        paths = [of_kineto(first, 0), of_kineto(again, later_ns)]
        for path in (first, again):  # the profiler of one process numbers no collectives of others
            path.write_text(path.read_text().replace("allreduce", "broadcast"))
        lines, _ = timeline(paths)
        tops[later_ns] = [line for line in lines if not line.startswith(" ")]
    assert tops[10**9] == ["GPU 0 H200", "process process 1", "tracepipe"]
    # At one time it cannot: these are two processes of two hosts.
    assert tops[0] == [
        "GPU 0 H200 of first.json",
        "GPU 0 H200 of again.json",
        "process process of first.json 1",
        "process process of again.json 10000001",
        "tracepipe",
    ]


# What is refused, and what is not ----------------------------------------------------------------------


@pytest.mark.parametrize("host", [{}, {"host_name": "node1"}], ids=["no host", "one host"])
def test_tracks_without_a_process_are_those_of_their_file(tmp_path: Path, host: dict[str, str]) -> None:
    paths = []
    for rank, group in enumerate(("Spans", "Traces")):
        path = tmp_path / f"rank{rank}.json"
        trace = json.loads(Path(of_kineto(path, 0, rank, pid=rank + 1)).read_text()) | host
        trace["traceEvents"].append({"ph": "X", "name": "step", "pid": group, "tid": 1, "ts": 9, "dur": 1})
        paths.append(written(path, [trace]))
    lines, _ = timeline(paths)
    assert sorted(line for line in lines if line.startswith("process")) == [
        "process Spans", "process Traces", "process rank 0: process 1", "process rank 1: process 2",
    ]  # fmt: skip


def test_warps_alone_are_placed_by_the_clock_pairs_of_another(tmp_path: Path) -> None:
    pairs = [PAIR, PAIR | {"source_ns": 600_000, "host_lo_ns": 101_990, "host_hi_ns": 102_010}]
    warps = {
        "ts_ns": 500_100, "type": "gpu_warp", "name": "k", "warp": [0], "entry_ns": [0], "exit_ns": [10],
        "exit_count": [1],
    }  # fmt: skip
    of_gpu = {"type": "header", "schema": "tracepipe/1", "clock": GPU_CLOCK, "host": "node1"}
    late = warps | {"ts_ns": 500_100 + 4_000_000_000_000}
    paths = [written(tmp_path / "host.jsonl", [WHOLE, event("I", 2_000, "a"), *pairs])]
    _, account = converted([*paths, written(tmp_path / "warps.jsonl", [of_gpu, warps])])
    assert anchors_of(account)[1] == (-498_000, 12, f"{GPU_CLOCK}, of which host.jsonl has clock pairs")
    with pytest.raises(ClockError, match="cannot be put on the clock of"):
        converted([*paths, written(tmp_path / "late.jsonl", [of_gpu, late])])


def test_a_time_before_the_clock_of_all_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", [WHOLE, event("I", 2_000, "a")])
    assert b" 0 " in converted([path], offsets={"run.jsonl": -2_000})[0]
    with pytest.raises(ClockError, match="begins 1 ns before the common clock is 0"):
        converted([path], offsets={"run.jsonl": -2_001})


@pytest.mark.parametrize("to", ["chrome", "perfetto", "text"])
def test_the_name_of_a_file_need_not_be_text(tmp_path: Path, to: str) -> None:
    one = written(tmp_path / "one.jsonl", [WHOLE, event("I", 2_000, "a")])
    other = Path(os.fsdecode(bytes(tmp_path) + b"/\xff.jsonl"))
    made, _ = converted([one, written(other, [WHOLE, event("I", 2_000, "b")])], to, offsets={other.name: 5})
    assert "\ufffd.jsonl".encode() in made


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    one = written(tmp_path / "one.jsonl", [WHOLE, event("I", 2_000, "a")])
    with pytest.raises(InputError, match="is a pipe"):
        converted([one, "-"])
    (tmp_path / "again.jsonl").symlink_to(one)
    with pytest.raises(InputError, match="named twice"):
        converted([one, str(tmp_path / "again.jsonl")])
