"""The layered JSON Lines reader: what users have reads whole, and what is broken costs its own line only."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import read_all
from tracepipe.event.checks import first_fault
from tracepipe.event.model import TIME_LIMIT_NS, Problem, Record
from tracepipe.readers import READERS, bpftrace_records, layered, naming_others, recognise, recording
from tracepipe.reports import memory, summary
from tracepipe.store.run import load_run

FIXTURES = Path(__file__).parents[2] / "fixtures"
GOOD = b'{"ts":1.0,"type":"userspace","name":"cuInit","phase":"B"}'
GOOD_AFTER = b'{"ts":2.0,"type":"userspace","name":"cuInit","phase":"E"}'


def read(data: bytes) -> tuple[list[Record], list[Problem]]:
    records, problems = read_all(layered.read(io.BytesIO(data)))
    assert [first_fault(record) for record in records] == [None] * len(records)
    return records, problems


def one(**fields: Any) -> Record:
    """The record of a single good line."""
    records, problems = read(json.dumps({"ts": 5, "type": "kernel", "name": "f", **fields}).encode() + b"\n")
    assert [problem for problem in problems if problem.skipped] == []
    assert len(records) == 1
    return records[0]


def read_fixture(case: str) -> tuple[list[Record], list[Problem]]:
    data = (FIXTURES / case / "input.jsonl").read_bytes()
    assert recognise(data).name == "layered"
    return read(data)


def test_readme_sample_reads_whole() -> None:
    records, problems = read_fixture("layered-bpftrace")
    assert problems == []
    assert [(r["type"], r["name"], r["phase"], r["ts_ns"]) for r in records] == [
        ("userspace", "cuInit", "B", 1_000),
        ("kernel", "nvidia_ioctl", "B", 3_000),
        ("scheduler", "nv_schedule_work", "I", 4_000),
        ("kernel", "nvidia_ioctl", "E", 5_000),
        ("userspace", "cuInit", "E", 6_000),
    ]


def test_launch_sample_takes_the_101_us_that_its_text_states() -> None:
    records, problems = read_fixture("layered-launch")
    assert problems == []
    begin, end = (r for r in records if r["name"] == "cuLaunchKernel")
    assert end["ts_ns"] - begin["ts_ns"] == 101_000
    assert [r for r in records if r["type"] == "syscall"] == [
        {
            "type": "syscall",
            "name": "ioctl",
            "phase": "I",
            "ts_ns": 10_502_000,
            "args": {
                "event_id": 101,
                "cmd": 3221766657,
                "dir": "read_write",
                "type": "B",
                "nr": 1,
                "size_bytes": 8,
            },
        }
    ]


def test_every_key_of_every_variant_is_kept() -> None:
    records, problems = read_fixture("layered-keys")
    assert [(p.line, p.field, p.skipped) for p in problems] == [
        (6, "duration_ms", False),
        (15, "ts", True),
        (16, "ts", True),
        (17, "ts", True),
    ]
    assert [(r["type"], r.get("name")) for r in records] == [
        ("userspace", "cuInit"),
        ("memory", "alloc"),
        ("transfer", "HtoD"),
        ("userspace", "launch"),
        ("kernel", "nvidia_ioctl"),
        ("kernel", "alloc"),
        ("kernel", "nv_mem_alloc"),
        ("loss", None),
        ("scheduler", "schedule_work"),
        ("scheduler", "nv_gpu_scheduler_schedule"),
    ]
    assert records[0]["dur_ns"] == 12_300
    assert records[1]["args"] == {"event_id": 8, "op": "alloc", "size": 4096, "total_allocated": 4096}
    assert records[3]["args"]["grid"] == [1, 1, 1]
    assert records[7] == {"type": "loss", "count": 12, "reason": "bpftrace's buffer was full"}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ({"name": "cuMemAlloc"}, "alloc"),
        ({"name": "cuMemAlloc_v2_ptsz", "retval": 0}, "alloc"),
        ({"name": "cudaMallocManaged"}, "alloc"),
        ({"op": "cudaMalloc"}, "alloc"),
        ({"name": "cudaFreeAsync"}, "free"),
        ({"name": "cuMemFreeHost"}, "free_host"),
        ({"name": "cuMemAlloc", "phase": "B"}, "alloc"),
        ({"name": "pool_take", "op": "alloc"}, "alloc"),
    ],
)
def test_a_call_of_memory_is_named_by_what_it_does(line: dict[str, Any], name: str) -> None:
    (record,), problems = read(json.dumps({"ts": 1, "type": "memory", "size": 4096, **line}).encode())
    assert (record["name"], record["args"]["size"]) == (name, 4096)
    assert record["args"]["call"] == line.get("name", line.get("op"))
    assert problems == []


@pytest.mark.parametrize(
    "line", [{"name": "cuMemAlloc", "retval": 2}, {"name": "cuInit"}, {"op": "alloc"}, {"name": "my_pool"}]
)
def test_other_lines_of_memory_keep_their_names(line: dict[str, Any]) -> None:
    record = one(type="memory", **{"name": line.get("op", ""), **line})
    assert record["name"] == line.get("name", line.get("op"))
    assert "call" not in record.get("args", {})


def test_allocations_by_name_are_in_the_report_of_memory(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"ts": 1, "type": "memory", "name": "cuMemAlloc", "size": 4096, "address": 16, "duration_us": 5},
        {"ts": 2, "type": "memory", "name": "cudaMalloc", "size_bytes": 8192, "address": 32},
        {"ts": 3, "type": "memory", "name": "cuMemFree_v2", "address": 16},
    ]
    file = tmp_path / "run.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    loaded = load_run(str(file))
    result = memory.run(loaded, memory.Options()).as_json()
    (process,) = result["processes"]
    assert (process["count"], process["total_bytes"], process["peak_bytes"]) == (2, 12_288, 12_288)
    assert [site["site"] for site in result["sites"]] == ["cudaMalloc", "cuMemAlloc"]
    moved = summary.run(loaded, summary.Options(all=True)).as_json()["memory"]
    assert [(row["what"], row["count"], row["bytes_per_s"]) for row in moved] == [
        ("alloc", 2, None),
        ("free", 1, None),
    ]


def test_exits_of_gpu_threads_are_a_layer() -> None:
    records, problems = read_fixture("layered-gpu-threads")
    assert problems == []
    exits = [record for record in records if record["type"] == "gpu_thread"]
    assert exits[0] == {
        "type": "gpu_thread", "name": "vectorAdd", "phase": "I", "ts_ns": 10_000, "gpu": 0,
        "block": [0, 0, 0], "thread": [0, 0, 0], "args": {"event_id": 7, "event": "exit"},
    }  # fmt: skip
    assert [(r["name"], r["ts_ns"], r["phase"], r.get("block"), r["thread"]) for r in exits[2:]] == [
        ("vectorAdd", 10_750, "I", [0, 0, 0], [31, 0, 0]),
        ("kernel", 11_000, "I", None, [5, 0, 0]),
        ("vectorAdd", 11_000, "B", [1, 0, 0], [0, 0, 0]),
        ("vectorAdd", 12_000, "E", [1, 0, 0], [0, 0, 0]),
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"thread": [1, 2]}, "thread"),
        ({"block": [0, 0, -1]}, "block"),
        ({"thread": [0, 0, 1 << 31]}, "thread"),
        ({"thread": "0"}, "thread"),
        ({"device": -1}, "device"),
        ({"device": True}, "device"),
        ({"kernel": 5}, "kernel"),
    ],
)
def test_a_gpu_thread_without_a_place_is_skipped(fields: dict[str, Any], field: str) -> None:
    line = json.dumps({"ts": 5, "type": "gpu_thread_exit", **fields}).encode() + b"\n"
    records, problems = read(line)
    assert (records, [(p.field, p.skipped) for p in problems]) == ([], [(field, True)])


def test_a_span_written_at_its_end_starts_its_duration_earlier() -> None:
    record = one(ts=1.4, type="scheduler", duration_us=3.2)
    assert (record["phase"], record["ts_ns"], record["dur_ns"]) == ("X", 1_396_800, 3_200)
    assert "args" not in record


def call(ts: float, **fields: Any) -> str:
    return json.dumps({"ts": ts, "tid": 7, "type": "scheduler", "name": "f", **fields})


def phases(*printed: str) -> list[tuple[str, int]]:
    records, problems = read("\n".join(printed).encode() + b"\n")
    assert problems == []
    return [(record["phase"], record["ts_ns"]) for record in records]


@pytest.mark.parametrize("entry", [{}, {"phase": "B"}])
@pytest.mark.parametrize("exit_", [{}, {"phase": "E"}])
def test_a_call_that_is_logged_at_entry_and_exit_is_one(entry: dict[str, Any], exit_: dict[str, Any]) -> None:
    # The script reads the clock once for the line, and once for the duration.
    lines = [call(1.0, **entry), call(1.1, duration_us=99.8, **exit_)]
    again = [call(2.0, **entry), call(2.1, duration_us=99.8, **exit_)]
    assert phases(*lines, *again) == [("B", 1_000_000), ("E", 1_100_000), ("B", 2_000_000), ("E", 2_100_000)]


def test_calls_in_each_other_and_on_other_threads_keep_their_exits() -> None:
    lines = [
        call(1.0),
        call(1.1),
        call(1.15, tid=8),
        call(1.2, duration_us=100),
        call(1.3, duration_us=300),
        call(1.35, tid=8, duration_us=200),
    ]
    assert [phase for phase, _ in phases(*lines)] == ["B", "B", "B", "E", "E", "E"]


def test_an_exit_is_not_taken_for_that_of_another_call() -> None:
    assert phases(call(1.0), call(5.0, duration_us=3)) == [("I", 1_000_000), ("X", 4_997_000)]
    assert phases(call(1.0), call(1.1, name="g", duration_us=100)) == [("I", 1_000_000), ("X", 1_000_000)]
    assert phases(call(1.0, phase="B"), call(1.1, phase="E"), call(1.1, duration_us=100)) == [
        ("B", 1_000_000),
        ("E", 1_100_000),
        ("X", 1_000_000),
    ]


def test_short_calls_whose_exits_a_script_leaves_out_stay_instants() -> None:
    calls = [(call(at), call(at + 0.5, duration_us=500)) for at in range(1, 20)]
    lines = [line for at, both in enumerate(calls) for line in (both if at % 3 == 1 else both[:1])]
    assert "".join(phase for phase, _ in phases(*lines)) == "IBEI" * 6 + "I"


def test_a_begin_whose_exit_comes_batches_later_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered.LayeredLines, "chunk_bytes", 400)
    others = [call(3.0 + at / 1000, tid=9, name="g") for at in range(40)]
    lines = [call(1.0), call(1.1, duration_us=100), call(2.0), *others, call(4.0, duration_us=2000)]
    assert "".join(phase for phase, _ in phases(*lines)) == "BEB" + "I" * 40 + "E"


def test_an_entry_far_before_its_exit_stays_an_instant_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered.LayeredLines, "chunk_bytes", 80)
    lines = [call(1.0), call(1.1, duration_us=100), call(2.0), call(2.1, duration_us=100)]
    records, problems = read("\n".join(lines).encode() + b"\n")
    assert [record["phase"] for record in records] == ["I", "X", "B", "E"]
    assert [(p.line, p.field, p.skipped) for p in problems] == [(2, "duration_us", False)]


def test_a_copy_that_is_logged_at_both_ends_has_a_known_place() -> None:
    copy = {"type": "transfer", "direction": "H2D"}
    lines = [call(1.0, **copy), call(1.1, duration_ms=0.1, **copy)]
    assert phases(*(line.replace('"name": "f", ', "") for line in lines)) == [
        ("B", 1_000_000),
        ("E", 1_100_000),
    ]


def test_a_span_from_before_the_start_is_cut_there_and_reported() -> None:
    records, problems = read(b'{"ts":0.001,"type":"scheduler","name":"f","duration_us":3.2}\n')
    assert (records[0]["ts_ns"], records[0]["dur_ns"]) == (0, 1_000)
    assert records[0]["args"] == {"duration_us": 3.2}
    assert problems == [
        Problem(
            1,
            "duration_us",
            "begins before the start of tracing; the slice is drawn from 0",
            skipped=False,
        )
    ]


def test_a_transfers_ambiguity_is_reported_once() -> None:
    line = b'{"ts":1.4,"type":"transfer","direction":"D2H","duration_ms":0.1}\n'
    records, problems = read(line * 3)
    assert [(r["phase"], r["ts_ns"], r["dur_ns"]) for r in records] == [("X", 1_300_000, 100_000)] * 3
    assert [(p.line, p.field, p.skipped) for p in problems] == [(1, "duration_ms", False)]


@pytest.mark.parametrize(
    ("fields", "layer", "name"),
    [
        ({"type": "kernel_memory", "op": "alloc"}, "kernel", "f"),
        ({"type": "kernel", "name": "cuLaunchKernel"}, "userspace", "cuLaunchKernel"),
        ({"type": "ioctl", "cmd": 1}, "syscall", "f"),
        ({"type": "gpu_complete"}, "kernel", "f"),
        ({"type": "gpu_mem"}, "memory", "f"),
    ],
)
def test_layer_and_name(fields: dict[str, Any], layer: str, name: str) -> None:
    record = one(**fields)
    assert (record["type"], record["name"]) == (layer, name)


def test_a_decoded_ioctl_with_a_time_is_an_instant() -> None:
    records, problems = read(b'{"ts":3,"type":"ioctl","cmd":7,"decoded":{"dir":3,"nr":1}}\n')
    assert problems == []
    assert records == [
        {
            "type": "syscall",
            "name": "ioctl",
            "phase": "I",
            "ts_ns": 3_000_000,
            "args": {
                "cmd": 7,
                "decoded": {"dir": 3, "nr": 1},
                "dir": "none",
                "type": 0,
                "nr": 7,
                "size_bytes": 0,
                "request": "UVM_SET_STREAM_STOPPED",
            },
        }
    ]


@pytest.mark.parametrize(
    ("fields", "request_"),
    [
        ({"name": "nvidia_ioctl", "ioctl_cmd": 0xC020462A}, "NV_ESC_RM_CONTROL"),
        ({"name": "nv_open", "ioctl_cmd": "0xC020462A"}, "NV_ESC_RM_CONTROL"),
        ({"type": "syscall", "name": "ioctl", "cmd": 0xC020462A, "phase": "B"}, "NV_ESC_RM_CONTROL"),
        ({"type": "ioctl", "cmd": 0xC0044601, "dir": 3}, None),
    ],
)
def test_the_command_of_an_ioctl_is_decoded(fields: dict[str, Any], request_: str | None) -> None:
    args = one(**fields)["args"]
    assert (args["type"], args.get("request")) == ("F", request_)
    assert args["dir"] == fields.get("dir", "read_write")
    assert {key: value for key, value in args.items() if key.endswith("cmd")} == {
        key: value for key, value in fields.items() if key.endswith("cmd")
    }


@pytest.mark.parametrize("fields", [{"ioctl_cmd": -1}, {"ioctl_cmd": "RM"}, {"cmd": 0xC020462A}])
def test_a_number_that_is_not_an_ioctls_command_is_kept_as_it_is(fields: dict[str, Any]) -> None:
    assert one(**fields)["args"] == fields


def test_lines_without_a_time_are_placed_between_their_neighbours() -> None:
    data = (FIXTURES / "layered-undated" / "input.jsonl").read_bytes()
    records, problems = read_all(layered.read(io.BytesIO(data), between=True))
    assert [first_fault(record) for record in records] == [None] * len(records)
    assert [(r["name"], r["ts_ns"], r.get("args", {}).get("placed")) for r in records] == [
        ("gpu_complete", 10_500_000, "between lines"),
        ("cuLaunchKernel", 10_500_000, None),
        ("ioctl", 10_600_000, "between lines"),
        ("gpu_complete", 10_700_000, "between lines"),
        ("gpu_mem", 10_800_000, "between lines"),
        ("cuLaunchKernel", 10_900_000, None),
        ("gpu_mem", 11_000_000, None),
        ("gpu_mem", 11_000_000, "between lines"),
    ]
    assert [(p.line, p.field, p.skipped) for p in problems] == [(1, "ts", False), (5, "total", False)]


def test_lines_without_a_time_are_skipped_by_default_and_the_option_is_named() -> None:
    _, problems = read_fixture("layered-undated")
    assert [p.line for p in problems if p.skipped] == [1, 3, 4, 5, 8]
    assert "--undated between" in problems[0].message


def test_a_line_that_goes_back_in_time_leaves_no_room_in_front() -> None:
    line = b'{"ts":%d,"type":"kernel","name":"f"}\n'
    data = line % 5 + b'{"type":"gpu_complete"}\n' + line % 4
    records, _ = read_all(layered.read(io.BytesIO(data), between=True))
    assert [record["ts_ns"] for record in records] == [5_000_000, 5_000_000, 4_000_000]


def test_many_lines_without_a_time_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpftrace_records, "_WAITING_MAX", 2)
    data = b'{"type":"gpu_complete"}\n' * 3 + GOOD + b"\n" + b'{"type":"gpu_complete"}\n' * 3
    records, problems = read_all(layered.read(io.BytesIO(data), between=True))
    assert [p.line for p in problems if p.skipped] == [1, 2]
    assert [record["ts_ns"] for record in records] == [1_000_000] * 5


def test_a_wrong_line_without_a_time_is_named_by_its_own_number() -> None:
    data = GOOD + b'\n{"type":"kernel"}\n' + GOOD_AFTER + b"\n"
    records, problems = read_all(layered.read(io.BytesIO(data), between=True))
    assert len(records) == 2
    assert [(p.line, p.field) for p in problems if p.skipped] == [(2, "name")]


@pytest.mark.parametrize(
    ("fields", "name", "direction"),
    [
        ({"direction": "H2D"}, "HtoD", "HtoD"),
        ({"direction": "DeviceToHost"}, "DtoH", "DtoH"),
        ({"name": "cuMemcpyHtoD_v2"}, "HtoD", None),
        ({"name": "cudaMemcpy", "kind": 2}, "DtoH", None),
        ({"name": "cudaMemcpyAsync", "direction": "d2d"}, "DtoD", "DtoD"),
        ({"name": "cudaMemcpy"}, "copy", None),
        ({"name": "cuMemcpyDtoH", "direction": 2}, "DtoH", 2),
        ({"name": "my copy"}, "my copy", None),
    ],
)
def test_copies_are_named_by_direction(fields: dict[str, Any], name: str, direction: object) -> None:
    (record,), _ = read(json.dumps({"ts": 5, "type": "transfer", "size": 1, **fields}).encode() + b"\n")
    assert (record["name"], record["args"].get("direction")) == (name, direction)
    assert record["args"].get("call") == (fields.get("name") if "cu" in fields.get("name", "") else None)


@pytest.mark.parametrize(
    ("fields", "total_bytes"),
    [
        ({"total": 3}, 3072),
        ({"total_mem_kb": 3}, 3072),
        ({"total_bytes": 3}, 3),
        ({"size": 3, "gpu_id": 1}, 3),
        ({"total": -1}, None),
        ({}, None),
    ],
)
def test_the_memory_in_use_is_in_bytes(fields: dict[str, Any], total_bytes: int | None) -> None:
    record = one(type="gpu_mem", **fields)
    assert record.get("args", {}).get("total_bytes") == total_bytes
    assert record.get("gpu") == fields.get("gpu_id")


def test_a_hook_has_a_layer_of_its_own() -> None:
    record = one(type="hook", layer="libpool.so", size=5)
    assert (record["type"], record["layer"], record["args"]) == ("hook", "libpool.so", {"size": 5})


def test_an_unknown_type_is_a_layer_of_its_own_and_is_reported_once() -> None:
    lines = [
        {"ts": 1, "type": "nvlink", "name": "send", "phase": "B", "pid": 7, "tid": 8, "lane": 3},
        {"ts": 2, "type": "nvlink", "name": "send", "phase": "E", "pid": 7, "tid": 8},
        {"ts": 3, "type": "rdma", "op": "post"},
    ]
    records, problems = read("".join(json.dumps(line) + "\n" for line in lines).encode())
    assert [(r["type"], r["layer"], r["name"], r["phase"]) for r in records] == [
        ("hook", "nvlink", "send", "B"),
        ("hook", "nvlink", "send", "E"),
        ("hook", "rdma", "post", "I"),
    ]
    assert records[0]["args"] == {"lane": 3}
    message = "'nvlink' is not known: each such type becomes a layer of that name"
    assert problems == [Problem(1, "type", message, skipped=False)]


def test_a_line_of_memory_may_state_its_size_twice_and_its_call_itself() -> None:
    line = b'{"ts":1,"type":"memory","op":"alloc","size":8,"size_bytes":8,"call":"cuMemAlloc_v2"}\n'
    ((record,), problems) = read(line)
    args = {"op": "alloc", "size": 8, "size_bytes": 8, "call": "cuMemAlloc_v2"}
    assert (record["name"], record["args"], problems) == ("alloc", args, [])


def test_a_call_named_by_its_probes_with_arguments_in_an_object_is_one_call() -> None:
    lines = [
        {
            "ts": 1,
            "tid": 7,
            "phase": "B",
            "name": "uprobe:/usr/lib/libcuda.so.1:cuInit",
            "args": {"flags": 1},
        },
        {
            "ts": 2,
            "tid": 7,
            "phase": "E",
            "name": "uretprobe:/usr/lib/libcuda.so.1:cuInit",
            "args": {"ret": 0},
        },
    ]
    records, problems = read(b"\n".join(orjson.dumps({"type": "userspace", **line}) for line in lines))
    assert problems == []
    assert [(one["name"], one["phase"], one["args"]) for one in records] == [
        ("cuInit", "B", {"flags": 1, "probe": "uprobe:/usr/lib/libcuda.so.1:cuInit"}),
        ("cuInit", "E", {"ret": 0}),
    ]


def test_identity_fields_are_fields_and_not_args() -> None:
    record = one(pid=1, tid=2, cpu=3, comm="python")
    assert {key: record[key] for key in ("pid", "tid", "cpu", "comm")} == {
        "pid": 1,
        "tid": 2,
        "cpu": 3,
        "comm": "python",
    }
    assert "args" not in record


@given(st.integers(0, 400 * 86_400 * 10**9))
def test_no_nanosecond_is_lost_up_to_400_days(ns: int) -> None:
    text = f"{ns // 10**6}.{ns % 10**6:06d}"
    line = b'{"x":{"ts":1.5},"ts":%b,"type":"kernel","name":"f"}\n' % text.encode()
    records, _ = read(line)
    assert records[0]["ts_ns"] == ns


def test_a_time_finer_than_a_nanosecond_is_kept_as_written() -> None:
    record = one(ts=1.0000004)
    assert (record["ts_ns"], record["args"]) == (1_000_000, {"source_ts_ms": 1.0000004})


def test_the_scripts_own_text_is_not_a_problem() -> None:
    text = b"""Attaching 3 probes...
Tracing \xe2\x80\x94 hit Ctrl-C
%b
# Heartbeat: 3 events, 2 s

=== TRACE SUMMARY ===

USERSPACE (libcuda.so):
  Total CUDA API calls: 847
%b
@calls[kprobe:nvidia_ioctl]: 12
[1, 2)                 5 |@@@@@@@@@@@@@                       |
""" % (GOOD, GOOD_AFTER)
    records, problems = read(text)
    assert (len(records), problems) == (2, [])


def test_output_of_the_program_between_the_events_is_counted() -> None:
    text = b"\n".join([GOOD, b"Scheduled!", b"[123] kprobe:nv_x", b"Scheduled!", b"Done!", GOOD_AFTER, b""])
    recording = layered.read(io.BytesIO(text))
    recording.batches = naming_others(recording.batches, READERS["layered"])
    records, problems = read_all(recording)
    assert len(records) == 2
    assert problems == [
        Problem(3, "", "is not layered's: --from bpftrace reads it"),
        Problem(
            2,
            "",
            "3 lines are text that the script or the traced program printed, not events: "
            "b'Scheduled!' (2 times), b'Done!'",
            skipped=False,
        ),
    ]


@pytest.mark.parametrize(
    "line", [b"Lost 7 events", b'{"type":"lost_events","data":{"events":7}}', b"Lost 7 events\r"]
)
def test_losses_of_bpftrace_are_losses(line: bytes) -> None:
    records, problems = read(GOOD + b"\n" + line + b"\n" + GOOD_AFTER + b"\n")
    assert problems == []
    assert records[1] == {"type": "loss", "count": 7, "reason": "bpftrace's buffer was full"}


BROKEN = [
    (
        b'{"ts":1.0,"type":"kernel","name":"f","x":' + b"[" * 300 + b"]" * 300 + b"}",
        "",
        "nests deeper than 200 levels",
    ),
    (b'{"ts":1.0,"type":"userspa', "", "is not JSON: unexpected end of data at column"),
    (b'"name":"cuInit","phase":"B"}', "", "is neither JSON nor a script's text: b'\"name"),
    (b'vice"}', "", "is neither JSON nor a script's text: b'vice\"}'"),
    (b'{"ts":1.0,"type":"userspace","name":"a\x00b"}', "", "is not JSON: unexpected control character"),
    (b"\x00\x00\x00\x00", "", "is neither JSON nor a script's text"),
    (b'{"ts":1.0,"type":"userspace","name":"\xff\xfe"}', "", "is not JSON: "),
    (b'{"ts":NaN,"type":"userspace","name":"f"}', "", "is not JSON: "),
    (b'{"ts":1e999,"type":"userspace","name":"f"}', "", "is not JSON: number is infinity"),
    (b'{"ts":"1.0","type":"userspace","name":"f"}', "ts", "must be a number, not '1.0'"),
    (b'{"ts":true,"type":"userspace","name":"f"}', "ts", "must be a number, not True"),
    (b'{"ts":null,"type":"userspace","name":"f"}', "ts", "must be a number, not None"),
    (b'{"ts":-0.5,"type":"userspace","name":"f"}', "ts", "must not be negative, but is -0.5"),
    (b'{"ts":1e300,"type":"userspace","name":"f"}', "ts", "must be at most 4611686018427, not 1e+300"),
    (b'{"ts":99999999999999999999999,"type":"userspace","name":"f"}', "ts", "must be at most 4611686018427"),
    (b'{"type":"gpu_complete","fence":"nvidia"}', "ts", "is missing: the line has no place in time"),
    (b'{"ts":1.0,"name":"f"}', "type", "is missing"),
    (b'{"ts":1.0,"type":"","name":"f"}', "type", "must be the name of a layer, not ''"),
    (b'{"ts":1.0,"type":"' + b"g" * 257 + b'","name":"f"}', "type", "must be the name of a layer, not 'gg"),
    (b'{"ts":1.0,"type":["kernel"],"name":"f"}', "type", "must be the name of a layer, not ['kernel']"),
    (b'{"ts":1.0,"type":"kernel"}', "name", "is missing, and so is op"),
    (b'{"ts":1.0,"type":"kernel","name":3}', "name", "must be a string, not 3"),
    (b'{"ts":1.0,"type":"memory","op":null}', "op", "must be a string, not None"),
    (b'{"ts":1.0,"type":"kernel","name":"f","phase":"X"}', "phase", "must be B, E or I or absent, not 'X'"),
    (b'{"ts":1.0,"type":"kernel","name":"f","phase":{}}', "phase", "must be B, E or I or absent, not {}"),
    (
        b'{"ts":1.0,"type":"kernel","name":"f","pid":"7"}',
        "pid",
        "must be an integer from 0 to 2147483647, not '7'",
    ),
    (
        b'{"ts":1.0,"type":"kernel","name":"f","tid":-7}',
        "tid",
        "must be an integer from 0 to 2147483647, not -7",
    ),
    (
        b'{"ts":1.0,"type":"kernel","name":"f","pid":2147483648}',
        "pid",
        "must be an integer from 0 to 2147483647",
    ),
    (
        b'{"ts":1.0,"type":"kernel","name":"f","cpu":true}',
        "cpu",
        "must be an integer from 0 to 2147483647, not True",
    ),
    (b'{"ts":1.0,"type":"kernel","name":"f","comm":[]}', "comm", "must be a string, not []"),
    (
        b'{"ts":1.0,"type":"kernel","name":"f","duration_us":"3"}',
        "duration_us",
        "must be a number, not '3'",
    ),
    (
        b'{"ts":1.0,"type":"kernel","name":"f","phase":"E","duration_us":-3}',
        "duration_us",
        "must not be negative, but is -3",
    ),
    (
        b'{"type":"lost_events","data":{"events":-1}}',
        "data.events",
        "must be an integer of at least 0, not -1",
    ),
    (b'{"ts":1.0,"type":"kernel","name":' + b"[" * 150 + b"]" * 150 + b"}", "name", "must be a string, not "),
    (b'{"a":' * 2000 + b"1" + b"}" * 2000, "", "is not JSON: depth limit exceeded"),
    (b'{"ts":1,"type":"kernel","name":"f"}{"ts":2', "", "is not JSON: unexpected content after document"),
]


@pytest.mark.parametrize(("line", "field", "message"), BROKEN)
def test_only_the_broken_line_is_lost(line: bytes, field: str, message: str) -> None:
    records, problems = read(GOOD + b"\n" + line + b"\n" + GOOD_AFTER + b"\n")
    assert [record["ts_ns"] for record in records] == [1_000_000, 2_000_000]
    assert [(p.line, p.field, p.skipped) for p in problems] == [(2, field, True)]
    assert message in problems[0].message
    assert len(problems[0].message) < 250


def test_a_second_recording_behind_the_first_is_reported_once() -> None:
    first = [b'{"ts":%d,"type":"kernel","name":"f"}' % ms for ms in (1, 900, 5000, 4001, 5001)]
    second = [b'{"ts":%d,"type":"kernel","name":"f"}' % ms for ms in (1, 800, 1, 2)]
    records, problems = read(b"\n".join(first + second) + b"\n")
    assert len(records) == 9
    message = "goes back by 5000 ms: times may count from another start from here on"
    assert problems == [Problem(6, "ts", message, skipped=False)]


def test_what_nests_to_the_limit_is_kept_and_can_be_written() -> None:
    line = b'{"ts":1,"type":"kernel","name":"f","x":' + b"[[],[]," * 150 + b"1" + b"]" * 150 + b"}"
    records, problems = read(line)
    assert (len(records), problems) == (1, [])
    assert orjson.dumps(records[0])


def test_a_last_line_without_its_end_was_cut_off() -> None:
    records, problems = read(GOOD + b"\n" + GOOD_AFTER[:20])
    assert (len(records), problems) == (1, [Problem(2, "", "was cut off in the middle of the line")])


def test_a_last_line_that_lacks_only_its_newline_is_read() -> None:
    records, problems = read(GOOD + b"\n" + GOOD_AFTER)
    assert (len(records), problems) == (2, [])


STATISTICS = b"""=== TRACE SUMMARY ===

USERSPACE (libcuda.so):
  Total CUDA API calls: 847
"""


@pytest.mark.parametrize("data", [b"", b"\n\n  \n", b"Attaching 3 probes...\n", STATISTICS])
def test_an_input_without_json_is_reported(data: bytes) -> None:
    assert read(data) == ([], [Problem(0, "", "has no JSON line", skipped=False)])


def test_a_mark_and_line_ends_of_other_systems_are_read() -> None:
    data = b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD_AFTER + b"\r\n"
    assert layered.sniff(data)
    records, problems = read(data)
    assert (len(records), problems) == (2, [])


def test_a_line_over_the_limit_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LINE_LIMIT_BYTES", 1000)
    monkeypatch.setattr(layered.LayeredLines, "chunk_bytes", 100)
    long = b'{"ts":1.5,"type":"kernel","name":"' + b"x" * 50_000 + b'"}'
    records, problems = read(GOOD + b"\n" + long + b"\n" + GOOD_AFTER + b"\n")
    assert [record["ts_ns"] for record in records] == [1_000_000, 2_000_000]
    assert [(p.line, p.field) for p in problems] == [(2, "")]


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([GOOD, *(b[0] for b in BROKEN)]))))
def test_no_input_raises_and_each_line_gives_one_thing_at_most(parts: list[bytes]) -> None:
    data = b"\n".join(parts)
    for between in (False, True):
        records, problems = read_all(layered.read(io.BytesIO(data), between=between))
        assert [first_fault(record) for record in records] == [None] * len(records)
        assert len(records) + sum(p.skipped for p in problems) <= data.count(b"\n") + 1


def test_the_largest_time_and_duration_fit_the_model() -> None:
    limit_ms = TIME_LIMIT_NS // 10**6
    record = one(ts=limit_ms, duration_ms=limit_ms)
    assert (record["ts_ns"], record["dur_ns"]) == (0, limit_ms * 10**6)


def printed(*texts: str) -> bytes:
    """What bpftrace -f json writes of these printf calls."""
    return b"".join(json.dumps({"type": "printf", "data": text}).encode() + b"\n" for text in texts)


CALL = '{"ts":1.0,"type":"userspace","name":"cuInit","phase":"B"}'
RETURN = '{"ts":2.0,"type":"userspace","name":"cuInit","phase":"E"}'


def test_a_recording_of_bpftrace_in_json_reads_whole() -> None:
    records, problems = read_fixture("layered-bpftrace-json")
    assert problems == []
    calls = ["cuMemAlloc_v2"] * 3 + ["cuLaunchKernel"] * 2
    assert [(r["name"], r["phase"]) for r in records if r["type"] == "userspace"] == [
        (name, phase) for name in calls for phase in "BE"
    ]
    assert [r["args"]["event_id"] for r in records if r["type"] == "userspace"] == list(range(10))
    assert [r["count"] for r in records if r["type"] == "loss"] == [12]


@pytest.mark.parametrize(
    "texts",
    [
        (f"{CALL}\n", f"{RETURN}\n"),
        (f"{CALL}\n{RETURN}\n",),
        (f"{CALL}\n{RETURN[:9]}", f"{RETURN[9:]}\n"),
        tuple(f"{CALL}\n{RETURN}\n"),
        (CALL, RETURN),
        ("Tracing... ", f"{CALL}\n", "# Heartbeat: 1", f"{RETURN}\n"),
        (f"=== SUMMARY ===\n  Calls: 2\n{CALL}\r\n", f"\n\n{RETURN}\r\n"),
        (f"{CALL}\n", "=== SUMMARY ===\n", "  Calls: 2\n", f"{RETURN}\n"),
    ],
)
def test_printed_lines_are_put_together(texts: tuple[str, ...]) -> None:
    data = printed(*texts)
    assert recognise(data).name == "layered"
    records, problems = read(data)
    assert ([r["ts_ns"] for r in records], problems) == ([1_000_000, 2_000_000], [])


def test_a_line_between_the_pieces_of_another_is_whole_and_so_is_the_other() -> None:
    records, problems = read(printed(RETURN[:20], f"{CALL}\n", f"{RETURN[20:]}\n"))
    assert ([r["ts_ns"] for r in records], problems) == ([1_000_000, 2_000_000], [])


@pytest.mark.parametrize("kind", ["attached_probes", "map", "hist", "lhist", "stats", "value", "time", "cat"])
@pytest.mark.parametrize("data", [{"@x": 1}, {"@h": [{"min": 0, "max": 1, "count": 4}]}, "12:34:56\n", 3])
def test_other_records_of_bpftrace_are_passed_over(kind: str, data: Any) -> None:
    line = json.dumps({"type": kind, "data": data}).encode()
    records, problems = read(printed(CALL[:9]) + line + b"\n" + printed(CALL[9:] + "\n"))
    assert ([r["ts_ns"] for r in records], problems) == ([1_000_000], [])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"type":"printf","data":7}\n', Problem(1, "data", "must be a string, not 7")),
        (
            b'{"type":"lost_events","data":{}}\n',
            Problem(1, "data.events", "must be an integer of at least 0, not None"),
        ),
        (
            b"\n" + printed("{broken}\n"),
            Problem(2, "", "is not JSON: unexpected character, expected a string key at column 2"),
        ),
        (printed(f"{CALL}\n", CALL[:9]), Problem(2, "", "was cut off in the middle of the line")),
        (printed(CALL + "\n")[:-9], Problem(1, "", "was cut off in the middle of the line")),
        (printed("{", '"ts":', '"x",', '"type":"kernel"}\n'), Problem(1, "ts", "must be a number, not 'x'")),
    ],
)
def test_a_broken_record_of_bpftrace_names_its_line(data: bytes, problem: Problem) -> None:
    _, problems = read(data)
    assert [p for p in problems if p.line] == [problem]


def test_a_printed_line_without_end_does_not_fill_the_memory() -> None:
    records, problems = read(printed("{", *["x" * 1000] * 100, "\n", f"{CALL}\n"))
    assert [r["ts_ns"] for r in records] == [1_000_000]
    assert problems[0].message.startswith("is not JSON: ")
    assert len(problems) < 10


@pytest.mark.parametrize("data", [printed("hello\n"), b'{"type":"map","data":{"@x":1}}\n'])
def test_json_of_other_bpftrace_scripts_is_not_claimed(data: bytes) -> None:
    assert not layered.sniff(data)


@pytest.mark.parametrize(
    "head",
    [
        b"\n".join([b"Attaching 3 probes..."] * 2000) + b"\n" + GOOD,
        b'{"ts":1.0,"type":"kern\n' + GOOD,
        b'{"type":"gpu_mem","total":1024}\n',
    ],
)
def test_recognised_behind_whatever_stands_before(head: bytes) -> None:
    assert recognise(head).name == "layered"


@pytest.mark.parametrize(
    "head", [b"", b"hello\n", b'{"traceEvents":[]}', b'{"type":"kernel","name":"no time"}', b"{}", b"[1]"]
)
def test_other_content_is_not_claimed(head: bytes) -> None:
    assert not layered.sniff(head)


def test_a_machine_without_memory_is_not_reported_as_a_bad_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: bytes) -> None:
        raise orjson.JSONDecodeError("Not enough memory to allocate buffer for parsing", "", 0)

    monkeypatch.setattr(layered.orjson, "loads", refused)
    with pytest.raises(MemoryError):
        list(layered.read(io.BytesIO(b'{"ts":1e0,"type":"userspace","name":"cuInit","phase":"B"}\n')).batches)
