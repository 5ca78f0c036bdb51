"""The driver's layer in a virtual machine: one process from the CUDA call down to the driver's own thread.

The machine runs Debian's kernels and the stand-ins for CUDA and for the NVIDIA driver.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vm.image import Unobtainable, build
from tests.integration.vm.machine import boot, find_emulator
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.converters import CONVERTERS
from tracepipe.recording.convert import Conversion, ConversionOptions

# The machine may take a quarter of an hour, where others use the processors.
pytestmark = [pytest.mark.vm, pytest.mark.timeout(1800)]

CALLS = ("cuLaunchKernel", "cuCtxSynchronize")
# What happens on one thread inside each of them, as depth and name, in the order of begins.
INSIDE = [
    ("syscall", 0, "ioctl"),
    ("kernel", 0, "nvidia_unlocked_ioctl"),
    ("kernel", 1, "nv_mem_alloc"),
    ("kernel", 1, "nv_schedule_work"),
    ("kernel", 2, "nv_kthread_q_schedule_q_item"),
    ("kernel", 1, "nv_mem_free"),
]
ITERATIONS = 3
# Debian 12's own kernel. It was built without multi-kprobes: each function's entry and return is a link.
KERNEL = "linux-image-cloud-amd64"


class Captured:
    """The recording of the guest, its records, and the outcome that the guest states."""

    def __init__(self, sent: str, folder: Path) -> None:
        *lines, outcome = sent.splitlines(keepends=True)
        self.path = folder / "run.jsonl"
        self.path.write_text("".join(lines))
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.header, self.footer = self.records[0], self.records[-1]
        self.kernel = [record for record in self.records if record["type"] == "kernel"]
        # Functions of the driver, whatever their layer.
        self.driver = [record for record in self.records if "nv" in record.get("name", "")]
        self.outcome: dict[str, Any] = json.loads(outcome)
        self.paths = {"bcc": self.path, "bpftrace": folder / "bpftrace.jsonl"}
        self.paths["bpftrace"].write_text("\n".join(self.outcome["bpftrace"]) + "\n")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    folder = tmp_path_factory.mktemp("vm")
    try:
        emulator = find_emulator()
        return Captured(boot(emulator, build(KERNEL), folder), folder)
    except Unobtainable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module", params=["bcc", "bpftrace"])
def trace(captured: Captured, request: pytest.FixtureRequest) -> Iterator[RealTraceProcessor]:
    source = captured.paths[request.param]
    path = source.with_suffix(".pftrace")
    with path.open("wb") as out:
        Conversion(str(source), CONVERTERS["perfetto"], ConversionOptions()).run(out, None)
    with RealTraceProcessor(path) as processor:
        yield processor


def test_the_layer_is_there_and_nothing_is_lost(captured: Captured) -> None:
    layers = captured.header["layers"]
    assert layers == {
        "asked": ["userspace", "syscall", "kernel", "scheduler", "host_sample"],
        "got": ["userspace", "syscall", "kernel", "scheduler", "host_sample"],
        "missing": {},
    }
    assert captured.outcome["messages"] == []
    assert captured.outcome["losses"] == captured.footer["losses"] == {}
    assert captured.footer["counts"]["kernel"] == len(captured.kernel)
    phases = Counter((event["name"], event["phase"]) for event in captured.kernel)
    assert all(phases[name, "B"] == phases[name, "E"] for name, _ in phases)


def test_every_function_has_its_two_links(captured: Captured) -> None:
    functions = {event["name"] for event in captured.driver}
    assert captured.outcome["links"] == {"multi": 0, "single": 2 * len(functions)}
    print(f"detached in {captured.outcome['detach_ns'] / 1e6:.1f} ms")


def test_only_the_targets_part_of_the_drivers_work(captured: Captured) -> None:
    """The same command again, while another program keeps the driver busy and the kernel hides addresses."""
    functions = {event["name"] for event in captured.driver}
    # Without addresses they are probed by name, one by one; without its layer the scheduling is the driver's.
    assert captured.outcome["again"] == {
        "counts": {"kernel": len(captured.driver)},
        "links": {"single": 2 * len(functions)},
    }


def test_arguments_and_results_of_the_driver(captured: Captured) -> None:
    entries = [event for event in captured.kernel if event["name"] == "nvidia_unlocked_ioctl"]
    commands = [event["args"]["request"] for event in entries if event["phase"] == "B"]
    ioctls = [
        record["args"]["request"]
        for record in captured.records
        if record.get("name") == "ioctl" and record["phase"] == "B" and "request" in record["args"]
    ]
    assert commands == ioctls
    assert {event["args"]["result"] for event in entries if event["phase"] == "E"} == {0}
    allocations = [event for event in captured.kernel if event["name"] == "nv_mem_alloc"]
    assert {event["args"]["size_bytes"] for event in allocations if event["phase"] == "B"} == {4096}


@pytest.mark.parametrize("name", CALLS)
def test_from_the_call_to_the_driver_in_nested_order(trace: RealTraceProcessor, name: str) -> None:
    calls = trace.rows(f"select ts, ts + dur as end_ts from slice where name = '{name}' order by ts")
    assert len(calls) == ITERATIONS
    for call in calls:
        inside = trace.rows(
            f"""
            select s.category, s.depth, s.name, s.ts, s.ts + s.dur as end_ts
            from slice s join thread_track on thread_track.id = s.track_id join thread using (utid)
            where s.ts between {call["ts"]} and {call["end_ts"]} and s.name != 'futex'
              and thread.name = 'vec_add' and s.category in ('userspace', 'syscall', 'kernel')
            order by s.ts, s.depth"""
        )
        found = [(row["category"], row["depth"], row["name"]) for row in inside]
        assert found == [("userspace", 0, name), *INSIDE]
        outer = inside[:3]
        for above, below in pairwise(outer):
            assert above["ts"] < below["ts"] < below["end_ts"] < above["end_ts"]
        _, _, ioctl, *work = inside
        assert all(ioctl["ts"] < row["ts"] <= row["end_ts"] < ioctl["end_ts"] for row in work)


def test_arrows_lead_from_the_call_to_the_driver(trace: RealTraceProcessor) -> None:
    arrows = trace.rows(
        """
        select o.name as origin, i.name as target, count(*) as n
        from flow f join slice o on o.id = f.slice_out join slice i on i.id = f.slice_in
        where o.name in ('cuLaunchKernel', 'cuCtxSynchronize', 'ioctl') group by 1, 2 order by 1"""
    )
    entries = trace.rows("select count(*) as n from slice where name = 'nvidia_unlocked_ioctl'")[0]["n"]
    assert arrows == [
        {"origin": "cuCtxSynchronize", "target": "ioctl", "n": ITERATIONS},
        {"origin": "cuLaunchKernel", "target": "ioctl", "n": ITERATIONS},
        {"origin": "ioctl", "target": "nvidia_unlocked_ioctl", "n": entries},
    ]
    assert trace.problems() == []


def test_hooks_are_recorded_alone(captured: Captured) -> None:
    phases = Counter(event["name"] for event in captured.driver)
    hooked = {name: count for name, count in phases.items() if "sched" in name}
    assert hooked.keys() == {"nv_schedule_work", "nv_kthread_q_schedule_q_item"}
    assert captured.outcome["hooked"] == hooked
    assert "nvidia_unlocked_ioctl" in captured.outcome["mistaken"]


def test_the_drivers_own_thread_works_for_the_process(captured: Captured, trace: RealTraceProcessor) -> None:
    process = next(event["pid"] for event in captured.kernel if event["name"] == "nvidia_unlocked_ioctl")
    items = [event for event in captured.kernel if event["name"] == "nv_execute_work"]
    assert {event["args"]["for_pid"] for event in items} == {process}
    assert process not in {event["pid"] for event in items}
    # Each item runs after it was queued and before the ioctl that waits for it returns.
    within = trace.rows(
        """
        select w.id, count(*) as ioctls
        from slice w join slice q on q.name = 'nv_kthread_q_schedule_q_item' and q.ts < w.ts
        join slice i on i.name = 'nvidia_unlocked_ioctl' and i.ts < q.ts and w.ts < i.ts + i.dur
        where w.name = 'nv_execute_work' group by 1"""
    )
    assert [row["ioctls"] for row in within] == [1] * (len(items) // 2)
    queued = [event for event in captured.driver if event["name"] == "nv_kthread_q_schedule_q_item"]
    assert len(items) == len(queued) > 2 * 2 * ITERATIONS


def test_both_methods_give_the_same_picture(captured: Captured) -> None:
    """bpftrace's functions are fewer, as its probes take an emulated processor long."""
    other = [json.loads(line) for line in captured.outcome["bpftrace"]]
    assert [*other[0]["layers"]["got"], "host_sample"] == captured.header["layers"]["got"]
    assert not other[-1]["losses"]
    for layer in ("userspace", "kernel"):
        names = {record["name"] for record in other if record["type"] == layer}
        mine = [record for record in captured.records if record["type"] == layer and record["name"] in names]
        assert steps(mine) == steps([record for record in other if record["type"] == layer])
        assert names >= {"userspace": {"cuCtxSynchronize"}, "kernel": {"nv_execute_work"}}[layer]


def test_bpftrace_knows_whom_a_worker_serves_where_addresses_are_hidden(captured: Captured) -> None:
    assert captured.outcome["hidden"] == captured.outcome["again"]["counts"]


def steps(events: list[dict[str, Any]]) -> dict[int, list[tuple[str, str, str]]]:
    """Thread, in the order in which they appear → what it did; addresses and ids left open."""
    ranks: dict[int, int] = {}
    found: dict[int, list[tuple[str, str, str]]] = {}
    for event in events:
        rank = ranks.setdefault(event["tid"], len(ranks))
        arguments = {
            name: "open" if isinstance(value, int) and (value > 1 << 26 or name.startswith("for_")) else value
            for name, value in event.get("args", {}).items()
        }
        found.setdefault(rank, []).append((event["name"], event["phase"], json.dumps(arguments)))
    return found
