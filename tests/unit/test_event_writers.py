"""Lines and rows that are written for the scripts of other tools' users, one by one."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tracepipe
from tests.golden.cases import FIXTURES
from tests.support.batches import read_all
from tests.support.recordings import event, span, write
from tracepipe.converters import CONVERTERS
from tracepipe.readers import READERS
from tracepipe.recording.convert import Conversion, ConversionOptions
from tracepipe.reports import warps
from tracepipe.store.run import load_run

SIZES = {"grid": [4, 2, 1], "block": [32, 1, 1]}
LOSS = {"type": "loss", "layer": "userspace", "count": 12, "ts_ns": 1_500}


def converted(to: str, folder: Path, *records: dict[str, Any]) -> tuple[str, list[str]]:
    """What is written of records whose trace starts at 1000 ns, and the notes."""
    out = io.BytesIO()
    path = write(folder / "run.jsonl", *records)
    account = Conversion(str(path), CONVERTERS[to], ConversionOptions()).run(out)
    return out.getvalue().decode(), [note for note in account.notes if "no footer" not in note]


@pytest.fixture
def layered(tmp_path: Path) -> Any:
    def lines(*records: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(line) for line in converted("layered", tmp_path, *records)[0].splitlines()]

    return lines


@pytest.fixture
def table(tmp_path: Path) -> Any:
    def rows(*records: dict[str, Any]) -> list[str]:
        return [line.rstrip() for line in converted("cuda-events", tmp_path, *records)[0].splitlines()[1:]]

    return rows


def picked(lines: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(line.get(key) for key in keys) for line in lines]


# JSON Lines --------------------------------------------------------------------------------------------


def test_calls_have_milliseconds_and_ends_their_lengths(tmp_path: Path) -> None:
    text, notes = converted(
        "layered",
        tmp_path,
        event("B", 1_002_000, "cuInit", cpu=3, comm="app", args={"flags": 0}),
        event("E", 1_014_300, "cuInit", args={"result": 0}),
        event("E", 1_020_000, "cuCtxGetCurrent"),
    )
    assert text.splitlines() == [
        '{"event_id":1,"ts":1.001000,"type":"userspace","name":"cuInit","phase":"B","pid":1,"tid":1,"cpu":3,'
        '"comm":"app","flags":0}',
        '{"event_id":2,"ts":1.013300,"type":"userspace","name":"cuInit","phase":"E","pid":1,"tid":1,"result":0,'
        '"retval":0,"duration_us":12.3}',
        '{"event_id":3,"ts":1.019000,"type":"userspace","name":"cuCtxGetCurrent","phase":"E","pid":1,"tid":1}',
    ]
    assert notes == []


def test_memory_and_copies_have_their_sizes_under_both_names(layered: Any) -> None:
    lines = layered(
        event("I", 1_000, "alloc", "memory", args={"size": 4096}),
        event("I", 1_000, "free", "memory", args={"address": 5}),
        event("I", 1_000, "set", "memory", args={"size": 7}),
        event("I", 1_000, "gpu_mem", "memory", gpu=1, args={"total_bytes": 7}),
        span(1_000, 101_000, "HtoD", "transfer", args={"size_bytes": 200_000, "direction": "HtoD"}),
        event("I", 2_000, "copy", "transfer", args={"size": 5}),
    )
    keys = ("type", "op", "direction", "size", "size_bytes", "duration_ms", "bandwidth_gbps")
    assert picked(lines, *keys) == [
        ("memory", "alloc", None, 4096, 4096, None, None),
        ("memory", "free", None, None, None, None, None),
        ("memory", "set", None, None, 7, None, None),
        ("gpu_mem", None, None, None, None, None, None),
        ("transfer", None, "H2D", 200_000, 200_000, 0.1, 2.0),
        ("transfer", None, "copy", 5, 5, None, None),
    ]
    assert (lines[3]["gpu_id"], lines[3]["total_bytes"], lines[4]["ts"]) == (1, 7, 0.1)


def test_threads_of_a_gpu_have_lines_that_are_read_again(layered: Any, tmp_path: Path) -> None:
    thread = {"gpu": 1, "block": [2, 0, 0], "thread": [31, 0, 0]}
    lines = layered(
        event("I", 1_500, "k", "gpu_thread", **thread, args={"event": "exit", "device": "x", "a": 1}),
        event("B", 1_600, "k", "gpu_thread", **thread),
        event("E", 1_700, "k", "gpu_thread", gpu=0),
    )
    assert lines == [
        {
            "event_id": 1, "ts": 0.0005, "type": "gpu_thread_exit", "kernel": "k", "device": 1,
            "pid": lines[0]["pid"], "block": [2, 0, 0], "thread": [31, 0, 0], "device_": "x", "a": 1,
        },
        {
            "event_id": 2, "ts": 0.0006, "type": "gpu_thread", "kernel": "k", "phase": "B", "device": 1,
            "pid": lines[1]["pid"], "block": [2, 0, 0], "thread": [31, 0, 0],
        },
        {
            "event_id": 3, "ts": 0.0007, "type": "gpu_thread", "kernel": "k", "phase": "E", "device": 0,
            "pid": lines[2]["pid"],
        },
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    records, problems = read_all(READERS["layered"].read(io.BytesIO(text)))
    assert problems == []
    assert [(r["type"], r["phase"], r["gpu"], r.get("thread")) for r in records] == [
        ("gpu_thread", "I", 1, [31, 0, 0]),
        ("gpu_thread", "B", 1, [31, 0, 0]),
        ("gpu_thread", "E", 0, None),
    ]


def test_the_warps_of_a_capture_have_lines_for_their_lanes(tmp_path: Path) -> None:
    """Reports on the lines say the same as those on the warps."""
    source, out = FIXTURES / "capture-h200" / "input.jsonl", tmp_path / "out.jsonl"
    tracepipe.convert(source, out, "layered")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = Counter(line["type"] for line in lines)
    known, found = (warps.run(load_run(str(path)), warps.Options()).as_json() for path in (source, out))
    assert (
        kinds["gpu_thread_exit"] == kinds["gpu_thread"] == 32 * sum(row["warps"] for row in known["kernels"])
    )
    keys = ("kernel", "launches", "blocks", "warps", "duration_p50_ns")
    assert picked(found["kernels"], *keys) == picked(known["kernels"], *keys)
    assert found["times"] == known["times"]


def test_a_launch_has_one_line_of_its_own(layered: Any) -> None:
    lines = layered(
        event("B", 1_000, "cudaLaunchKernel", args=SIZES),
        event("B", 1_100, "cuLaunchKernel", args=SIZES),
        event("E", 1_200, "cuLaunchKernel"),
        event("E", 1_300, "cudaLaunchKernel"),
        event("B", 1_400, "cudaLaunchKernel", args=SIZES),  # the driver's is not recorded
        event("E", 1_500, "cudaLaunchKernel"),
    )
    launches = [line for line in lines if line["type"] == "kernel"]
    assert picked(launches, "op", "name", "ts", "grid", "block", "threads", "of_event") == [
        ("launch", "cuLaunchKernel", 0.0001, [4, 2, 1], [32, 1, 1], 256, 2),
        ("launch", "cudaLaunchKernel", 0.0004, [4, 2, 1], [32, 1, 1], 256, 6),
    ]
    assert [line["event_id"] for line in lines] == list(range(1, 9))


def test_an_ioctl_has_its_command_apart(layered: Any) -> None:
    args = {"fd": 3, "cmd": 3221766657, "dir": "rw", "type": "F", "nr": 1, "size_bytes": 4}
    (line,) = layered(event("B", 1_000, "nvidia_ioctl", "kernel", args=args))
    assert (line["type"], line["cmd"], line["ioctl_cmd"]) == ("kernel", 3221766657, 3221766657)
    assert line["decoded"] == {"dir": "rw", "type": "F", "nr": 1, "size": 4}


def test_arguments_of_the_formats_own_names_have_others(layered: Any) -> None:
    (line,) = layered(event("I", 1_000, "f", args={"name": "x", "ts": 5, "huge": 1 << 70, "tid": 9}))
    assert (line["name"], line["name_"], line["ts"], line["ts_"], line["tid"]) == ("f", "x", 0, 5, 1)
    assert line["huge"] == 1 << 70


def test_a_loss_record_of_bpftrace_ends_what_was_open(layered: Any) -> None:
    lines = layered(event("B", 1_000, "f"), LOSS, event("E", 9_000, "f"))
    assert lines[1] == {"type": "lost_events", "data": {"events": 12}}
    assert "duration_us" not in lines[2]


@pytest.mark.parametrize("to", ["layered", "cuda-events"])
def test_events_from_before_the_start_and_without_a_form_are_reported(to: str, tmp_path: Path) -> None:
    _, notes = converted(
        to,
        tmp_path,
        event("B", 900, "cuInit"),
        event("E", 1_100, "cuInit"),
        span(2_000, 2_100, "kernel", "gpu_kernel", gpu=0),
        span(2_000, 2_100, "HtoD", "transfer", gpu=0),
    )
    what = "gpu_kernel event, 1 copy on a GPU" if to == "layered" else "transfer event, 1 gpu_kernel event"
    left_out = {f"1 {part}" if not part[0].isdigit() else part for part in what.split(", ")}
    reasons = notes[0].removeprefix("not written, as the format has no form for it: ")
    assert set(reasons.split(", ")) == left_out
    event_word = "event" if to == "layered" else "call"
    assert notes[1] == f"1 {event_word} before the start of the trace is written at 0"


# The table ---------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_script(table: Any) -> None:
    assert table(
        event("B", 1_234_001_000, "cudaMalloc", comm="my_cuda_app", args={"size_bytes": 1_048_576}),
        event("E", 1_235_001_000, "cudaMalloc", args={"result": 2, "address": 5}),
        event("B", 1_236_001_000, "cudaMemcpy", args={"size_bytes": 4096, "direction": "HtoD", "to": 255}),
        event("E", 1_237_001_000, "cudaMemcpy", args={"result": 0}),
        event("B", 1_238_001_000, "cudaFree", tid=2, args={"address": 16, "text": "a, b"}),
        event("E", 1_238_001_000, "cudaFree", tid=2),
    ) == [
        "1234         my_cuda_app      1            cudaMalloc           size=1048576 bytes",
        "1235         my_cuda_app      1            cudaMalloc           returned=2 (error)",
        "1236         my_cuda_app      1            cudaMemcpy           size=4096 bytes, kind=1, to=0xff",
        "1237         my_cuda_app      1            cudaMemcpy           returned=0 (success)",
        "1238         my_cuda_app      1            cudaFree             ptr=0x10, text=a,b",
        "1238         my_cuda_app      1            cudaFree             returned=?",
    ]


def test_calls_inside_others_and_other_libraries_are_left_out_and_counted(tmp_path: Path) -> None:
    text, notes = converted(
        "cuda-events",
        tmp_path,
        event("B", 2_000, "cudaMalloc"),
        event("B", 2_100, "cuMemAlloc_v2"),
        event("E", 2_200, "cuMemAlloc_v2"),
        span(2_210, 2_220, "cuCtxGetCurrent"),
        event("E", 2_300, "cudaMalloc"),
        event("B", 2_400, "ncclAllReduce"),
        event("E", 2_500, "ncclAllReduce"),
        event("I", 2_600, "cuMark"),
        span(3_000_000, 5_000_000, "cuCtxSynchronize"),
    )
    assert [line.split()[-2:] for line in text.splitlines()[1:]] == [
        ["1", "cudaMalloc"], ["cudaMalloc", "returned=?"],
        ["1", "cuCtxSynchronize"], ["cuCtxSynchronize", "returned=?"],
    ]  # fmt: skip
    assert notes == [
        "not written, as the format has no form for it: 2 calls inside others, "
        "1 call outside of CUDA's libraries, "
        "1 call without begin and end"
    ]


def test_after_a_loss_no_call_is_taken_for_inside_another(table: Any) -> None:
    rows = table(
        event("B", 1_100, "cudaMalloc"), LOSS, event("B", 2_000, "cuInit"), event("E", 2_100, "cuInit")
    )
    assert [row.split()[3] if "Lost" not in row else row for row in rows] == [
        "cudaMalloc", "Lost 12 events", "cuInit", "cuInit",
    ]  # fmt: skip


def test_where_no_threads_are_known_every_call_has_its_rows(table: Any) -> None:
    calls = [
        event(phase, ts_ns, name)
        for phase, ts_ns, name in (
            ("B", 1_000, "cudaFree"),
            ("B", 1_100, "cudaMalloc"),
            ("E", 1_200, "cudaFree"),
            ("E", 1_300, "cudaMalloc"),
        )
    ]
    for call in calls:
        del call["tid"]
    assert len(table(*calls)) == 4


def test_a_recording_without_calls_is_a_title(tmp_path: Path) -> None:
    assert converted("cuda-events", tmp_path)[0].split() == ["TIME(ms)", "PROCESS", "PID", "EVENT", "DETAILS"]
    assert converted("layered", tmp_path) == ("", [])


def test_a_layer_of_its_own_is_written_and_read_again(layered: Any) -> None:
    lines = layered(span(1_000, 2_000, "f", "hook", args={"layer": 3}) | {"layer": "python"})
    assert picked(lines, "type", "name", "layer", "layer_") == [("hook", "f", "python", 3)]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (record,), _ = read_all(READERS["layered"].read(io.BytesIO(text)))
    assert (record["type"], record["layer"], record["dur_ns"]) == ("hook", "python", 1000)
