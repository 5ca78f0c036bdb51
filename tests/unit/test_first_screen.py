"""What the UI is asked to show first: stated by the trace's last packet, read by `open`."""

from __future__ import annotations

import json
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from tests.golden.both import converted
from tests.golden.cases import FIXTURES
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.event.vocabulary import FIRST_SCREEN
from tracepipe.recording.convert import ConversionOptions
from tracepipe.ui.serve import first_screen

HEADER = {
    "type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"],
    "start": {"monotonic_ns": 0},
}  # fmt: skip
WORK = """
select min(ts), max(ts + dur) from slice join track on track.id = track_id
where track.name glob 'stream *' or track.name glob 'slot *'"""


def asked(trace: bytes, folder: Path) -> dict[str, Any]:
    """The parameters for a trace; commands by their names."""
    path = folder / "run.pftrace"
    path.write_bytes(trace)
    parameters: dict[str, Any] = {
        key: one for key, (one,) in urllib.parse.parse_qs(first_screen(path)).items()
    }
    if "startupCommands" in parameters:
        for one in json.loads(parameters.pop("startupCommands")):
            parameters.setdefault(one["id"].removeprefix("dev.perfetto."), []).extend(one["args"])
    return parameters


def pinned(records: list[dict[str, Any]], folder: Path) -> list[str]:
    """The expressions for the tracks that are pinned."""
    found: list[str] = asked(of_records(records, folder), folder)["PinTracksByRegex"]
    return found


def of_records(records: list[dict[str, Any]], folder: Path) -> bytes:
    """The trace of records after a header."""
    path = folder / "input.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [HEADER, *records]))
    return converted(path, "perfetto")[0]


def call(ts_ns: int, tid: int, **more: Any) -> dict[str, Any]:
    """A call of a library."""
    record = {
        "ts_ns": ts_ns,
        "type": "userspace",
        "name": "f",
        "phase": "X",
        "dur_ns": 1,
        "pid": 7,
        "tid": tid,
    }
    return record | more


def kernel(ts_ns: int, gpu: int = 0, stream: int = 3, **more: Any) -> dict[str, Any]:
    """A kernel of 50 ns."""
    record = {"ts_ns": ts_ns, "type": "gpu_kernel", "name": "k", "phase": "X", "dur_ns": 50}
    return record | {"gpu": gpu, "stream": stream} | more


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("case", ["capture-h200", "capture-h200-pytorch", "warps-slots"])
def test_the_work_of_the_gpus_is_in_sight(case: str, compress: bool, tmp_path: Path) -> None:
    path = FIXTURES / case / "input.jsonl"
    trace, _ = converted(path, "perfetto", ConversionOptions(compress=compress))
    parameters = asked(trace, tmp_path)
    with RealTraceProcessor(trace) as tp:
        assert tp.problems() == []
        start_ns, end_ns = tp.rows(WORK)[0].values()
    margin_ns = int((end_ns - start_ns) * 0.02) + 1
    assert (int(parameters["visStart"]), int(parameters["visEnd"])) == (
        start_ns - margin_ns,
        end_ns + margin_ns,
    )
    assert parameters["CollapseTracksByRegex"] == ["^CPU Scheduling$"]


def test_threads_that_launch_are_pinned_and_not_those_that_wait(tmp_path: Path) -> None:
    records = [call(at, 70) for at in range(90)]
    records += [call(100 + at, 71, launch=at + 1) for at in range(20)]
    records += [call(200, 72, launch=90), kernel(300, launch=1), kernel(400, stream=4)]
    assert pinned(records, tmp_path) == [r"^CUDA API \(71\)$", "^GPU busy$", "^stream 3$", "^stream 4$"]


@pytest.mark.slow
def test_calls_after_the_last_work_were_none_for_it(tmp_path: Path) -> None:
    """The GPU's work was recorded for a part of the time."""
    records = [call(10, 71, launch=1), kernel(20, launch=1)]
    records += [call(100 + at, 72, launch=at + 2) for at in range(9_000)]
    assert pinned(records, tmp_path) == [r"^CUDA API \(71\)$", "^GPU busy$", "^stream 3$"]


def test_the_processors_of_one_process_are_pinned(tmp_path: Path) -> None:
    def runs(pid: int) -> list[dict[str, Any]]:
        of = {"type": "scheduler", "name": "running", "pid": pid, "tid": pid, "cpu": 0}
        return [{"ts_ns": 100, "phase": "B"} | of, {"ts_ns": 110, "phase": "E"} | of]

    assert pinned([kernel(50), *runs(7)], tmp_path) == ["^GPU busy$", "^stream 3$", "^CPU use$"]
    assert pinned([kernel(50), *runs(7), *runs(8)], tmp_path) == ["^GPU busy$", "^stream 3$"]


def test_no_more_streams_are_pinned_than_fit(tmp_path: Path) -> None:
    records = [kernel(100 * at, 0, at % 20) for at in range(190)]
    assert len(pinned(records, tmp_path)) == 10


def test_rows_with_the_kernels_of_several_gpus_are_pinned(tmp_path: Path) -> None:
    """Their streams and counters have the same names."""
    records = [call(5 + at, 70 + at, launch=at + 1) for at in range(6)]
    records += [kernel(100 * at + gpu, gpu) for at in range(3) for gpu in (3, 10, 2)]
    calls = [rf"^CUDA API \({tid}\)$" for tid in (70, 71, 72, 73)]
    assert pinned(records, tmp_path) == [*calls, "^GPU 2$", "^GPU 3$", "^GPU 10$"]
    records += [kernel(600 + gpu, gpu) for gpu in range(12)]
    assert pinned(records, tmp_path) == [calls[0], *(f"^GPU {gpu}$" for gpu in range(9))]


def host(ts_ns: int, type: str, name: str = "f", **more: Any) -> dict[str, Any]:
    """An event of the host, 100 ns long."""
    return call(ts_ns, 7) | {"type": type, "name": name, "dur_ns": 100} | more


@pytest.mark.parametrize(
    ("records", "begin_ns", "end_ns", "pins"),
    [
        ([host(2000, "userspace"), host(1000, "hook", layer="x")], 2000, 2100, ["CUDA API"]),
        (
            [host(5000, "annotation"), host(1000, "hook", layer="python_function")],
            1000,
            5100,
            ["annotations", "python_function"],
        ),
        ([], 200, 300, ["syscalls"]),
    ],
    ids=["calls", "ranges and functions", "system calls"],
)
def test_without_work_of_a_gpu_that_of_the_host_is_in_sight(
    records: list[dict[str, Any]], begin_ns: int, end_ns: int, pins: list[str], tmp_path: Path
) -> None:
    """The scheduler's events begin long before, and system calls."""
    switches = [
        host(at, "scheduler", "running", phase=phase, cpu=0) for at, phase in ((1, "B"), (9_000, "E"))
    ]
    before = host(200, "syscall", "read")
    parameters = asked(of_records([switches[0], before, *records, switches[1]], tmp_path), tmp_path)
    margin_ns = int((end_ns - begin_ns) * 0.02) + 1
    seen = int(parameters["visStart"]) + margin_ns, int(parameters["visEnd"]) - margin_ns
    assert seen == (begin_ns, end_ns)
    assert parameters["PinTracksByRegex"] == [*(rf"^{name} \(7\)$" for name in pins), "^CPU use$"]


def test_a_trace_with_context_switches_alone_asks_for_nothing(tmp_path: Path) -> None:
    switches = [host(at, "scheduler", "running", phase=phase, cpu=0) for at, phase in ((1, "B"), (9, "E"))]
    assert asked(of_records(switches, tmp_path), tmp_path) == {}


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b"{",
        b'{"start_ns":1}',
        b'{"start_ns":9,"end_ns":1,"pins":[]}',
        b'{"start_ns":"1","end_ns":2,"pins":[]}',
        b'{"start_ns":true,"end_ns":true,"pins":[]}',
        b'{"start_ns":1,"end_ns":99999999999999999999,"pins":[]}',
        b'{"start_ns":1,"end_ns":2,"pins":[1]}',
        b'{"start_ns":1,"end_ns":2,"pins":["' + b"x" * 200 + b'"]}',
        b'{"start_ns":1,"end_ns":2,"pins":5}',
        b"{\xff}",
        b"[" * 3000 + b"{" + b'"a":[' * 900,
    ],
)
def test_a_tail_that_states_nothing_of_that_is_passed_over(tail: bytes, tmp_path: Path) -> None:
    assert asked(b"\x0a\x02xx" + FIRST_SCREEN.encode() + tail, tmp_path) == {}
    assert asked(b"\x0a\x02xx" + tail, tmp_path) == {}


def test_names_are_taken_as_they_are(tmp_path: Path) -> None:
    request = json.dumps({"start_ns": 100, "end_ns": 300, "pins": ["a.b (1)", "c|d"]}).encode()
    parameters = asked(FIRST_SCREEN.encode() + request + b"\x00more", tmp_path)
    assert parameters["PinTracksByRegex"] == [r"^a\.b \(1\)$", r"^c\|d$"]
    assert (parameters["visStart"], parameters["visEnd"]) == ("95", "305")
