"""Perfetto's traces of a system: when threads run, stages of GPUs, and what the trace lacks."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

import tracepipe
from tests.support.batches import read_all
from tests.support.perfetto_trace import BEGIN, CLEARED, END, INSTANT, MONOTONIC, NEEDS, TraceMade
from tracepipe.event.checks import first_fault
from tracepipe.event.model import Problem, Record
from tracepipe.readers import perfetto, perfetto_lives, perfetto_packets
from tracepipe.reports import gaps, summary
from tracepipe.store.run import load_run

RUNNABLE, RUNNING, SLEEPS, WAITS = 2, 3, 4, 5


def read(trace: TraceMade) -> tuple[list[Record], list[Problem]]:
    records, problems = read_all(perfetto.read(io.BytesIO(trace.bytes)))
    assert [fault for record in records if (fault := first_fault(record))] == []
    return records, problems


def good(trace: TraceMade) -> list[Record]:
    records, problems = read(trace)
    assert problems == []
    return [record for record in records if record["type"] != "name"]


def rows_of(records: list[Record]) -> list[tuple[Any, ...]]:
    """Time, processor, thread, phase and arguments."""
    return [(one["ts_ns"], one["cpu"], one["tid"], one["phase"], one.get("args", {})) for one in records]


def with_thread() -> TraceMade:
    trace = TraceMade()
    trace.thread(pid=7, tid=9)
    return trace


def bundle(trace: TraceMade, cpu: int = 1) -> Any:
    ftrace = trace.packet().ftrace_events
    ftrace.cpu = cpu
    return ftrace


def switch(ftrace: Any, ts_ns: int, prev: int, prev_state: int, following: int) -> None:
    event = ftrace.event.add(timestamp=ts_ns, pid=prev).sched_switch
    event.prev_pid, event.prev_state = prev, prev_state
    event.next_comm, event.next_pid, event.next_prio = f"thread {following}", following, 120


# Scheduling ---------------------------------------------------------------------------------------------


def test_a_switch_is_the_end_of_one_run_and_the_begin_of_another() -> None:
    trace = with_thread()
    ftrace = bundle(trace)
    switch(ftrace, 10, 0, 0, 9)
    switch(ftrace, 20, 9, 1, 11)
    switch(ftrace, 30, 11, 0x102, 0)
    records = good(trace)
    assert rows_of(records) == [
        (10, 1, 9, "B", {"prio": 120}),
        (20, 1, 9, "E", {"prev_state": "sleeping"}),
        (20, 1, 11, "B", {"prio": 120}),
        (30, 1, 11, "E", {"prev_state": "disk"}),
    ]
    assert {one["name"] for one in records} == {"running"}
    assert [(one.get("pid"), one.get("comm")) for one in records[:3]] == [
        (7, "thread 9"), (7, None), (None, "thread 11"),
    ]  # fmt: skip


def test_marks_of_atrace_are_slices_instants_and_counters() -> None:
    trace = with_thread()
    ftrace = bundle(trace)
    for ts_ns, (tid, marked) in enumerate(
        ((9, "B|7|a|b\n"), (9, "I|7|now"), (9, "E"), (9, "S|7|io|3"), (8, "F|7|io|3"), (9, "C|7|depth|-5"),
         (4, "B|no pid|x"), (4, "free text"), (4, "C|4|x|y"), (4, "B|4"))
    ):  # fmt: skip
        ftrace.event.add(timestamp=ts_ns, pid=tid).print.buf = marked
    records, problems = read(trace)
    found = [
        (one["ts_ns"], one["phase"], one["name"], one["pid"], one.get("tid", one.get("args")))
        for one in records if one["type"] == "hook"
    ]  # fmt: skip
    io = found[3][4]
    assert found == [
        (0, "B", "a|b", 7, 9), (1, "I", "now", 7, 9), (2, "E", "a|b", 7, 9), (3, "B", "io", 7, io),
        (4, "E", "io", 7, io), (5, "C", "depth", 7, {"value": -5}), (6, "B", "x", 4, 4),
    ]  # fmt: skip
    assert [one.message for one in problems] == [
        "3 events of ftrace are not of a kind that is read: they are left out"
    ]


def reused() -> tuple[TraceMade, Any]:
    """Process 9 runs at 10, ends at 20 and comes again at 30."""
    trace = TraceMade()
    ftrace = bundle(trace)
    switch(ftrace, 10, 0, 0, 9)
    switch(ftrace, 15, 9, 1, 0)
    ftrace.event.add(timestamp=20, pid=9).sched_process_free.pid = 9
    new = ftrace.event.add(timestamp=30, pid=1).task_newtask
    new.pid, new.comm = 9, "again"
    return trace, ftrace


def test_marks_and_wakings_are_of_the_process_that_had_the_pid_then() -> None:
    trace, ftrace = reused()
    for ts_ns in (12, 40):
        for more, mark in enumerate(("C|9|load|5", "S|9|job|1", "F|9|job|1")):
            ftrace.event.add(timestamp=ts_ns + more, pid=9).print.buf = mark
        woken = ftrace.event.add(timestamp=ts_ns, pid=9).sched_waking
        woken.pid, woken.target_cpu = 7, 1
    again, first = 1069999999, 9
    records = [one for one in good(trace) if one["type"] == "hook"]
    assert [one["pid"] for one in records] == [first] * 3 + [again] * 3
    found = [one["args"]["by_tid"] for one in good(trace) if one["name"] == "wakeup"]
    assert found == [first, again]
    titles = {(one["pid"], one.get("tid")): one["name"] for one in read(trace)[0] if one["type"] == "name"}
    assert titles[again, None] == "again (pid 9, number 2)"


def test_tasks_beyond_those_that_can_be_kept_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto_lives, "_NOTED_MAX", 1)
    trace, _ = reused()
    (problem,) = read(trace)[1]
    assert problem.message == ("1 begin, end or name of tasks is left out: there are more than can be kept")


def test_threads_without_a_process_keep_their_names_when_they_are_written_and_read_again(
    tmp_path: Path,
) -> None:
    trace = TraceMade()
    switch(bundle(trace), 100, 0, 0, 9)
    first, again = tmp_path / "first.pftrace", tmp_path / "again.pftrace"
    first.write_bytes(trace.bytes)
    tracepipe.convert(first, again)
    assert again.read_bytes().count(b"thread 9") >= 1
    (run,) = [one for one in read_all(perfetto.read(io.BytesIO(again.read_bytes())))[0] if "cpu" in one]
    assert (run["tid"], run["comm"]) == (9, "thread 9")


def test_triggers_are_instants() -> None:
    trace = TraceMade()
    trigger = trace.packet(timestamp=7).trigger
    trigger.trigger_name, trigger.producer_name, trigger.trusted_producer_uid = "slow frame", "app", 1000
    (one,) = good(trace)
    assert (one["ts_ns"], one["name"]) == (7, "slow frame")
    assert one["args"] == {"producer_name": "app", "trusted_producer_uid": 1000}


def test_machines_have_processors_threads_and_gpus_of_their_own() -> None:
    trace = with_thread()
    for machine, ts_ns in ((0, 100), (12, 150)):
        switch(bundle(trace), ts_ns, 0, 0, 9)
        trace.trace.packet[-1].machine_id = machine
        trace.packet(timestamp=10, machine_id=machine).gpu_render_stage_event.MergeFrom(
            pb.GpuRenderStageEvent(stage_id=1, event_id=3, duration=5)
        )
    switch(bundle(trace), 300, 9, 1, 0)
    records, _ = read(trace)
    found = [
        (one["ts_ns"], one["pid"], one["tid"], one["cpu"], one["phase"]) for one in records if "cpu" in one
    ]
    (other,) = [one["pid"] for one in records if one["name"] == "processes on machine 12"]
    assert found == [(100, 7, 9, 1, "B"), (150, other, 10_000_009, 3, "B"), (300, 7, 9, 1, "E")]
    stages = [(one["gpu"], one["launch"]) for one in records if "gpu" in one]
    assert [gpu for gpu, _ in stages] == [0, 1] and stages[0][1] == 3 != stages[1][1]
    assert perfetto.read(io.BytesIO(trace.bytes)).header.gpus == [
        {"index": 1, "name": "(GPU 0 on machine 12)"}
    ]


def test_who_wakes_whom_and_what_is_lost_are_of_their_machine() -> None:
    trace = with_thread()
    ftrace = bundle(trace, cpu=1)
    event = ftrace.event.add(timestamp=5, pid=4).sched_waking
    event.pid, event.target_cpu = 9, 3
    ftrace = bundle(trace, cpu=0)
    trace.on_machine(12)
    ftrace.lost_events = True
    event = ftrace.event.add(timestamp=10, pid=4).sched_waking
    event.pid, event.target_cpu = 9, 1
    trace.packet(machine_id=12).ftrace_stats.cpu_stats.add(cpu=1, overrun=2)
    records, _ = read(trace)
    woken = [(one["cpu"], one["tid"], one["args"]) for one in records if one["type"] == "scheduler"]
    assert woken == [
        (1, 9, {"by_tid": 4, "target_cpu": 3}), (4, 10_000_009, {"by_tid": 10_000_004, "target_cpu": 5}),
    ]  # fmt: skip
    assert [(one["cpu"], one["count"]) for one in records if one["type"] == "loss"] == [(5, 2), (4, 1)]


def test_switches_of_one_time_are_in_the_order_of_their_processor() -> None:
    trace = with_thread()
    second, first = bundle(trace, cpu=2), bundle(trace, cpu=1)
    switch(second, 100, 0, 0, 9)  # comes from the other processor, whose events are behind in the file
    switch(second, 200, 9, 1, 8)
    switch(second, 200, 8, 1, 9)
    switch(second, 200, 9, 1, 0)
    switch(first, 50, 0, 0, 9)
    switch(first, 100, 9, 0, 0)
    found = [(one["ts_ns"], one["cpu"], one["tid"], one["phase"]) for one in good(trace)]
    assert found == [
        (50, 1, 9, "B"), (100, 1, 9, "E"), (100, 2, 9, "B"), (200, 2, 9, "E"), (200, 2, 8, "B"),
        (200, 2, 8, "E"), (200, 2, 9, "B"), (200, 2, 9, "E"),
    ]  # fmt: skip


def test_compact_switches_and_wakings_are_the_same_as_whole_ones() -> None:
    trace = with_thread()
    for cpu in (1, 2):
        compact = bundle(trace, cpu).compact_sched
        compact.intern_table.extend(["python", "swapper"])
        compact.switch_timestamp.extend([100, 10, 10])
        compact.switch_prev_state.extend([0, 1, 0])
        compact.switch_next_pid.extend([9 * cpu, 0, 9 * cpu])
        compact.switch_next_prio.extend([120] * 3)
        compact.switch_next_comm_index.extend([0, 1, 0])
        compact.waking_timestamp.extend([105])
        compact.waking_pid.extend([50])
        compact.waking_target_cpu.extend([3])
    records = [one for one in good(trace) if one["cpu"] == 2]
    assert rows_of(records) == [
        (100, 2, 18, "B", {"prio": 120}),
        (105, 2, 50, "I", {"by_tid": 18, "target_cpu": 3}),
        (110, 2, 18, "E", {"prev_state": "sleeping"}),
        (120, 2, 18, "B", {"prio": 120}),
    ]
    assert records[0]["comm"] == "python"


def test_wakings_name_the_waker_and_wakeups_are_used_only_without_them() -> None:
    for has_waking in (True, False):
        trace = with_thread()
        ftrace = bundle(trace)
        if has_waking:
            waking = ftrace.event.add(timestamp=10, pid=5).sched_waking
            waking.pid, waking.target_cpu = 9, 4
        wakeup = ftrace.event.add(timestamp=11, pid=6).sched_wakeup
        wakeup.pid, wakeup.target_cpu = 9, 4
        new = ftrace.event.add(timestamp=12, pid=5).sched_wakeup_new
        new.pid, new.target_cpu = 10, 0
        args = [{"by_tid": 5 if has_waking else 6, "target_cpu": 4}]
        args.append({"by_tid": 5, "target_cpu": 0, "is_new": True})
        assert [one[4] for one in rows_of(good(trace))] == args


def test_times_of_ftrace_are_of_its_clock() -> None:
    trace = with_thread()
    trace.snapshot(primary=MONOTONIC, clock_3=1000, clock_6=5000)
    ftrace = bundle(trace)
    switch(ftrace, 5010, 0, 0, 9)
    other = bundle(trace)
    other.ftrace_clock, other.ftrace_timestamp, other.boot_timestamp = 2, 100, 5000
    switch(other, 120, 9, 1, 0)
    unrelated = bundle(trace)
    unrelated.ftrace_clock = 3
    records, problems = read(trace)
    assert [one["ts_ns"] for one in records if one["type"] == "scheduler"] == [1010, 1020]
    assert "1 bundle of ftrace is on a clock that is not related" in problems[0].message


def test_large_bundles_and_trees_are_read_as_small_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TraceMade()
    tree = trace.packet().process_tree
    for number in range(1, 40):
        tree.processes.add(pid=number, cmdline=[f"/bin/program-{number}"])
        tree.threads.add(tid=number + 100, tgid=number, name=f"thread {number}")
    for first in (100, 900):
        ftrace = bundle(trace)
        for at in range(60):
            switch(ftrace, first + at * 10, 101 + at % 20, 1, 101 + (at + 1) % 20)
        ftrace.lost_events = True
        ftrace.ftrace_clock, ftrace.ftrace_timestamp, ftrace.boot_timestamp = 2, 0, 5000
    whole = read(trace)
    monkeypatch.setattr(perfetto_packets, "AT_HAND_BYTES", 300)
    monkeypatch.setattr(perfetto_packets, "AT_HAND_BYTES", 300)
    monkeypatch.setattr(perfetto_packets, "_PART_BYTES", 100)
    assert read(trace) == whole
    assert sum(one["type"] == "loss" for one in whole[0]) == 2
    assert sum(one["type"] == "scheduler" for one in whole[0]) == 2 * 2 * 60


def test_states_of_threads_are_runs_and_wakeups() -> None:
    trace = with_thread()
    for ts_ns, state in enumerate((RUNNABLE, RUNNING, RUNNING, RUNNABLE, RUNNING, WAITS, SLEEPS)):
        packet = trace.packet(timestamp=ts_ns).generic_kernel_task_state_event
        packet.cpu, packet.tid, packet.state = 3, 9, state
    records, problems = read(trace)
    assert rows_of([one for one in records if one["type"] == "scheduler"]) == [
        (0, 3, 9, "I", {}),
        (1, 3, 9, "B", {}),
        (3, 3, 9, "E", {"prev_state": "runnable"}),
        (4, 3, 9, "B", {}),
        (5, 3, 9, "E", {"prev_state": "disk"}),
        (6, 3, 9, "E", {"prev_state": "sleeping"}),
    ]
    assert problems[0].message == ("1 state of threads changes nothing in a timeline: it is left out")


def test_a_thread_of_another_kernel_is_in_no_process_by_its_number() -> None:
    trace = TraceMade()
    tree = trace.packet(timestamp=1).generic_kernel_process_tree
    tree.processes.add(pid=5, cmdline="/bin/sh -c x")
    tree.threads.add(tid=9, pid=5, comm="main")
    for tid in (5, 9):
        state = trace.packet(timestamp=10).generic_kernel_task_state_event
        state.cpu, state.tid, state.state = 0, tid, RUNNING
    assert [(one.get("pid"), one["tid"]) for one in good(trace)] == [(None, 5), (5, 9)]
    assert {one["name"] for one in read(trace)[0] if one["type"] == "name"} == {"sh", "main"}


def test_impossible_records_of_the_scheduler_are_counted() -> None:
    trace = with_thread()
    ftrace = bundle(trace)
    switch(ftrace, 10, 0, 0, -4)
    ftrace.event.add(timestamp=1, pid=1).sched_process_exit.pid = 3
    bundle(trace, 1 << 20)
    state = trace.packet(timestamp=1).generic_kernel_task_state_event
    state.cpu, state.tid, state.state = -1, 1, RUNNING
    assert {problem.message.partition(":")[0] for problem in read(trace)[1]} == {
        "1 bundle of ftrace has an impossible processor",
        "1 event of ftrace is not of a kind that is read",
        "1 event of the scheduler has an impossible thread",
        "1 state of threads has an impossible processor or time",
    }


# GPUs ---------------------------------------------------------------------------------------------------


def stage(trace: TraceMade, ts_ns: int, **fields: Any) -> Any:
    packet = trace.packet(timestamp=ts_ns, sequence_flags=NEEDS)
    packet.gpu_render_stage_event.MergeFrom(pb.GpuRenderStageEvent(**fields))
    return packet.gpu_render_stage_event


def test_a_stage_is_a_kernel_on_the_queue_that_it_ran_on() -> None:
    trace = TraceMade()
    data = trace.packet(sequence_flags=CLEARED).interned_data
    for iid, name in ((1, "compute"), (2, "Kernel"), (3, "copy")):
        data.gpu_specifications.add(iid=iid, name=name)
    data.graphics_contexts.add(iid=1, pid=42)
    data.event_names.add(iid=5, name="matmul")
    first = stage(trace, 100, duration=50, hw_queue_iid=1, stage_iid=2, gpu_id=1, context=1, submission_id=8)
    first.name = "vectorAdd"
    first.extra_data.add(name="registers", value="16")
    first.launch.grid_size.x, first.launch.workgroup_size.x, first.launch.workgroup_size.y = 4, 64, 2
    stage(trace, 200, duration=5, hw_queue_iid=3, stage_iid=2, gpu_id=1, name_iid=5)
    stage(trace, 300, hw_queue_iid=1, stage_iid=2, gpu_id=1)
    one, two, three = good(trace)
    assert one == {
        "type": "gpu_kernel", "name": "vectorAdd", "phase": "X", "ts_ns": 100, "dur_ns": 50, "gpu": 1,
        "stream": 0, "pid": 42, "grid": [4, 1, 1], "block": [64, 2, 1],
        "args": {"queue": "compute", "stage": "Kernel", "registers": "16", "submission_id": 8},
    }  # fmt: skip
    assert (two["name"], two["stream"], two["args"]["queue"]) == ("matmul", 1, "copy")
    assert (three["name"], three["stream"], three["dur_ns"]) == ("Kernel", 0, 0)


def test_queues_with_numbers_below_0_are_streams_with_numbers_of_their_own() -> None:
    trace = TraceMade()
    data = trace.packet(sequence_flags=CLEARED).interned_data
    for iid, name in ((1, "Stream 18446744073709551615"), (2**64 - 1, "Stream 18446744073709551608")):
        data.gpu_specifications.add(iid=iid, name=name)
    for queue in ({"hw_queue_id": -1}, {"hw_queue_id": 0}, {"hw_queue_iid": 1}, {"hw_queue_iid": 2**64 - 1}):
        stage(trace, 9, stage_id=1, **queue)
    assert [one["stream"] for one in good(trace)] == [999_999_999, 0, 999_999_999, 999_999_992]


def test_queues_and_stages_have_the_names_of_their_numbers() -> None:
    trace = TraceMade()
    names = trace.packet(timestamp=1).gpu_render_stage_event.specifications
    names.hw_queue.add(name="graphics")
    names.stage.add(name="binning")
    stage(trace, 10, duration=1, hw_queue_id=0, stage_id=0)
    stage(trace, 20, duration=1, hw_queue_id=7, stage_id=3)
    for packet in trace.trace.packet:
        packet.sequence_flags = 0
    found = [(one["name"], one["stream"], one["args"]["queue"]) for one in good(trace)]
    assert found == [("binning", 0, "graphics"), ("render stage(3)", 7, "queue(7)")]


def submits(packet: Any, *ids: int, field: int = 1) -> None:
    """Add to an event which stages of GPUs it submitted, an extension that Perfetto's classes lack."""
    data = b"".join(bytes([field << 3, id]) for id in ids)
    packet.track_event.MergeFromString(bytes([0xC2, 0xBB, 0x01, len(data)]) + data)


def kernels_of_pytorch() -> TraceMade:
    """A call that launches two kernels, a copy, and a range of annotations."""
    trace = TraceMade()
    data = trace.packet(sequence_flags=CLEARED).interned_data
    for iid, name in ((1, "Kernel"), (2, "Memcpy"), (3, "Annotation"), (9, "stream 07"), (10, "copies")):
        data.gpu_specifications.add(iid=iid, name=name)
    kernel = pb.InternedComputeKernel(iid=1, name="_Z3add", demangled_name="add(int)", arch="sm_90")
    kernel.args.add(name="max_threads_per_block", uint_value=1024)
    argument = pb.InternedComputeArgName(iid=4, name="registers_per_thread")
    for head, message in ((b"\xc2\x3e", kernel), (b"\xca\x3e", argument)):
        inside = message.SerializeToString()
        data.MergeFromString(head + bytes([len(inside)]) + inside)
    trace.thread()
    submits(trace.event(10, BEGIN, "cudaGraphLaunch"), 5, 6)
    trace.event(20, END)
    submits(trace.event(70, BEGIN, "cudaEventSynchronize"), 6, field=2)
    trace.event(80, END)
    for ts_ns, id, waits in ((30, 5, []), (60, 6, [5, 99])):
        of = stage(trace, ts_ns, event_id=id, duration=9, hw_queue_iid=9, stage_iid=1, event_wait_ids=waits)
        of.kernel_iid = 1
        of.launch.args.add(name_iid=4, uint_value=32)
        of.launch.args.add(name="shared_mem_static", int_value=4096)
        of.launch.args.add(name="shared_mem_dynamic", int_value=1024)
        of.launch.args.add(name="waves", double_value=0.5)
    copy = stage(trace, 40, event_id=7, duration=3, hw_queue_iid=10, stage_iid=2)
    copy.extra_data.add(name="bytes", value="512")
    stage(trace, 25, duration=50, hw_queue_iid=9, stage_iid=3, name="step")
    return trace


def test_stages_of_pytorch_have_their_kernels_launches_and_waits() -> None:
    records, problems = read(kernels_of_pytorch())
    calls = [one for one in records if one["type"] == "userspace"]
    assert [(one["name"], one["phase"], one.get("launch")) for one in calls] == [
        ("cudaGraphLaunch", "B", 5), ("cudaGraphLaunch", "E", None),
    ]  # fmt: skip
    kernels = [one for one in records if one["type"] == "gpu_kernel" and one["phase"] == "X"]
    assert [(one["name"], one["gpu"], one["stream"], one["launch"]) for one in kernels] == [
        ("add(int)", 0, 7, 5), ("add(int)", 0, 7, 5),
    ]  # fmt: skip
    assert kernels[0]["args"] == {
        "queue": "stream 07", "stage": "Kernel", "arch": "sm_90", "max_threads_per_block": 1024,
        "registers": 32, "waves": 0.5, "shared_bytes": 5120,
    }  # fmt: skip
    flows = [(one["flow"], one["ts_ns"], one["phase"]) for one in records if "flow" in one]
    first, second = sorted({flow for flow, *_ in flows}, key=[flow for flow, *_ in flows].index)
    assert flows == [(first, 30, "s"), (second, 60, "s"), (first, 60, "f"), (second, 70, "f")]
    (copy,) = [one for one in records if one["type"] == "transfer"]
    assert (copy["name"], copy["stream"], copy["args"]["size"]) == ("memcpy", 1, 512)
    (step,) = [one for one in records if one["name"] == "step"]
    assert (step["type"], step["layer"], step["dur_ns"]) == ("hook", "gpu_user_annotation", 50)
    assert [problem.message for problem in problems] == [
        "1 flow ends without a begin: it is left out",
    ]


def test_the_reports_of_one_run_are_those_of_its_json(tmp_path: Path) -> None:
    """PyTorch's profiler writes a run as JSON or as a Perfetto trace: figures of both are equal."""
    rng, trace, events, at_ns, free_ns = Random(4), TraceMade(), list[dict[str, Any]](), 1_000, [0, 0]
    data = trace.packet(sequence_flags=CLEARED).interned_data
    for iid, name in ((1, "Kernel"), (7, "stream 7"), (8, "stream 8")):
        data.gpu_specifications.add(iid=iid, name=name)
    trace.thread()

    def add(name: str, category: str, start_ns: int, dur_ns: int, tid: int, pid: int, **args: int) -> None:
        event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "args": args}
        events.append(event | {"ts": f"{start_ns / 1000:.3f}", "dur": f"{dur_ns / 1000:.3f}"})

    worker = {"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "args": {"name": "worker"}}
    for id in range(1, 120):
        at_ns, length_ns, stream = at_ns + rng.randrange(400), rng.randrange(1, 900), rng.randrange(2)
        submits(trace.event(at_ns, BEGIN, "cudaLaunchKernel"), id)
        trace.event(at_ns + length_ns, END)
        add("cudaLaunchKernel", "cuda_runtime", at_ns, length_ns, 7, 7, correlation=id)
        start_ns, dur_ns = max(at_ns + rng.randrange(2_000), free_ns[stream]), rng.randrange(1, 1_500)
        name = rng.choice(("gemm", "add", "ncclDevKernel_AllReduce"))
        of = stage(
            trace, start_ns, event_id=id, duration=dur_ns, hw_queue_iid=7 + stream, stage_iid=1, name=name
        )
        of.launch.grid_size.x, of.launch.workgroup_size.x = id, 32
        add(name, "kernel", start_ns, dur_ns, 7 + stream, 0, correlation=id, device=0, stream=7 + stream)
        at_ns, free_ns[stream] = at_ns + length_ns, start_ns + dur_ns
    written = {
        "run.pftrace": trace.bytes,
        "run.json": json.dumps({"schemaVersion": 1, "traceEvents": [worker, *events]}),
    }
    for name, content in written.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for report in (summary, gaps):
        one, other = (
            report.run(load_run(str(tmp_path / name)), report.Options()).as_json() for name in written
        )
        one.pop("layers", None), other.pop("layers", None)  # a call has two records in a Perfetto trace
        assert one == other


def test_counters_of_gpus_have_the_names_of_their_descriptors() -> None:
    trace = TraceMade()
    named = trace.packet(sequence_flags=CLEARED).interned_data.gpu_counter_descriptors.add(iid=3)
    named.counter_descriptor.specs.add(counter_id=1, name="clock")
    for ts_ns, iid, gpu, value in (
        (10, 0, 0, {"int_value": -5}), (20, 0, 1, {"double_value": 2.5}), (30, 3, 1, {"int_value": 7}),
        (40, 0, 0, {"double_value": math.nan}),
    ):  # fmt: skip
        counters = trace.packet(timestamp=ts_ns).gpu_counter_event
        counters.gpu_id = gpu
        counters.counters.add(counter_id=1, **value)
        if iid:
            counters.counter_descriptor_iid = iid
        elif ts_ns == 10:
            counters.counter_descriptor.specs.add(counter_id=1, name="SM active")
            counters.counters.add(counter_id=2, int_value=1)
    trace.packet(timestamp=50).gpu_counter_event.gpu_id = -1
    records, problems = read(trace)
    assert [(one["ts_ns"], one["gpu"], one["name"], one["args"]["value"]) for one in records] == [
        (10, 0, "SM active", -5), (20, 1, "SM active", 2.5), (30, 1, "clock", 7),
    ]  # fmt: skip
    assert sorted(problem.message for problem in problems) == [
        "1 value of counters has an impossible GPU or time: it is left out",
        "2 values of counters of GPUs without a name, or not numeric: they are left out",
    ]


def test_stages_of_no_gpu_that_can_be_are_counted() -> None:
    trace = TraceMade()
    trace.packet(timestamp=1).gpu_render_stage_event.MergeFrom(pb.GpuRenderStageEvent(stage_id=1, gpu_id=-1))
    trace.packet(timestamp=0).gpu_render_stage_event.MergeFrom(
        pb.GpuRenderStageEvent(stage_id=1, duration=(1 << 64) - 1)
    )
    assert read(trace)[1][0].message.startswith("2 stages have an impossible GPU or time")


def own_trace() -> TraceMade:
    """As tracepipe writes it: with a GPU, a stream, and one for what overlaps."""
    trace = TraceMade()
    for uuid, name, parent in (
        (1, "tracepipe", 0), (2, "capture", 1), (3, "GPU 1 H200", 0), (4, "stream 7", 3),
        (5, "stream 7 (overlap 2)", 3), (6, "stream 8: annotations of thread 9", 3),
    ):  # fmt: skip
        trace.track(uuid, name, parent)
    trace.event(1, INSTANT, "capture", track_uuid=2)
    return trace


def test_streams_of_tracepipe_s_own_traces_are_streams_again() -> None:
    trace = own_trace()
    trace.event(9, BEGIN, "f<int>", track_uuid=3, categories=["summary"])
    kernel = trace.event(10, BEGIN, "f<int>", track_uuid=4, flow_ids=[4]).track_event.debug_annotations
    kernel.add(name="kernel", string_value="void ns::f<int>(int)")
    kernel.add(name="grid", string_value="no size")
    for _ in range(3):
        block = next((one for one in kernel if one.name == "block"), None) or kernel.add(name="block")
        block.array_values.add(int_value=2)
    kernel.add(name="launch", int_value=3)
    trace.event(12, BEGIN, "HtoD", track_uuid=5)
    trace.event(13, END, track_uuid=5)
    trace.event(20, END, track_uuid=4)
    trace.event(21, END, track_uuid=3)
    trace.event(22, INSTANT, "x", track_uuid=6)
    _, first, arrow, second, ended, last, other = good(trace)
    of = {"type": "gpu_kernel", "name": "void ns::f<int>(int)", "gpu": 1, "stream": 7}
    assert first == of | {
        "phase": "B", "ts_ns": 10, "block": [2, 2, 2], "args": {"grid": "no size", "launch": 3},
    }  # fmt: skip
    assert arrow == of | {"name": "f<int>", "phase": "s", "ts_ns": 10, "flow": 4}
    assert last == of | {"phase": "E", "ts_ns": 20}
    assert [(one["type"], one["phase"], one["stream"]) for one in (second, ended)] == [
        ("transfer", "B", 2_000_007), ("transfer", "E", 2_000_007),
    ]  # fmt: skip
    assert other["type"] == "hook"


@pytest.mark.parametrize("stream", [1 << 31, (1 << 62) - 1])
def test_streams_with_high_numbers_are_streams_again(stream: int) -> None:
    trace = own_trace()
    for uuid, name in ((7, f"stream {stream}"), (8, f"stream {stream} (overlap 1)")):
        trace.track(uuid, name, 3)
        trace.event(20, BEGIN, "f", track_uuid=uuid)
    assert [one["stream"] for one in good(trace) if "stream" in one] == [stream, stream + 1_000_000]


def test_a_track_of_that_name_in_another_tools_trace_is_a_plain_track() -> None:
    trace = TraceMade()
    trace.track(3, "GPU 1")
    trace.track(4, "stream 7", 3)
    trace.event(10, INSTANT, "x", track_uuid=4)
    (one,) = good(trace)
    assert one["type"] == "hook"


# Losses -------------------------------------------------------------------------------------------------


def losses(trace: TraceMade) -> list[Record]:
    return [one for one in read(trace)[0] if one["type"] == "loss"]


def test_packets_that_were_dropped_are_a_loss_since_the_last_of_their_sequence() -> None:
    trace = with_thread()
    trace.event(10, INSTANT, "first of its sequence", sequence=2).previous_packet_dropped = 1
    trace.event(15, INSTANT, "of another")
    trace.event(20, INSTANT, "after", sequence=2).previous_packet_dropped = 1
    assert losses(trace) == [
        {
            "type": "loss", "count": 1, "ts_ns": 10, "dur_ns": 5,
            "reason": "packets of sequence 2 were dropped: how many is not known",
        }
    ]  # fmt: skip


def test_events_that_ftrace_lost_are_a_loss_of_their_processor() -> None:
    trace = with_thread()
    switch(bundle(trace), 10, 0, 0, 9)
    after = bundle(trace)
    after.lost_events = True
    switch(after, 30, 9, 1, 0)
    (loss,) = losses(trace)
    assert (loss["ts_ns"], loss["dur_ns"], loss["layer"], loss["cpu"]) == (10, 20, "scheduler", 1)


def test_statistics_of_a_trace_are_losses_without_a_time() -> None:
    trace = with_thread()
    trace.event(10, INSTANT, "x")
    for factor in (1, 2):
        buffers = trace.packet().trace_stats.buffer_stats
        buffers.add(chunks_overwritten=3 * factor)
        buffers.add(trace_writer_packet_loss=factor, chunks_discarded=factor)
        stats = trace.packet().ftrace_stats
        stats.phase = factor
        stats.cpu_stats.add(cpu=0, overrun=10 * factor, dropped_events=1)
        stats.cpu_stats.add(cpu=1, overrun=5)
    found = {(one["count"], one["reason"], one.get("cpu")) for one in losses(trace)}
    assert found == {
        (6, "chunks of a full buffer were overwritten before they were read (buffer 0)", None),
        (2, "chunks were discarded, as a buffer was full (buffer 1)", None),
        (2, "times a program that was traced had no room for packets (buffer 1)", None),
        (10, "ftrace's buffer was full", 0),
    }
