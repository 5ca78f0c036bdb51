"""The memory of a conversion has the bounds that docs/tracks.md states, whatever it reads."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard

from tests.golden.cases import FIXTURES
from tests.support.cores import running
from tests.support.perfetto_trace import CLEARED, INSTANT, TraceMade
from tests.support.program import PYTHONPATH
from tracepipe.native import PURE

pytestmark = pytest.mark.slow

# The peak of the process alone: getrusage counts what its parent had before.
PROGRAM = """
import sys
from tracepipe.cli import main
sys.argv[0] = "tracepipe"
try:
    main()
finally:
    status = open("/proc/self/status").read()
    print(status.split("VmHWM:")[1].split()[0], file=sys.stderr)
"""
GPU = "globaltimer:0"
# A recording is searched for pairs of clocks where it names another clock than the host's.
HEADER = {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic", GPU]}
BOUND_MB = 64
TRACK_KB = 1
LINE_MB = 30
FURTHER_MB = 16
LONG_NAMES_MB = 8
PYTHON_MB = 30
Lines = Iterator[dict[str, Any]]


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    """The bounds are those of the native core."""
    with running("native"):
        yield


def event(at: int, **more: Any) -> dict[str, Any]:
    return {
        "ts_ns": at * 10,
        "type": "userspace",
        "name": "f",
        "phase": "X",
        "dur_ns": 5,
        "pid": 1,
        "tid": 1,
    } | more


def names() -> Lines:
    return (event(at, name=f"function number {at}") for at in range(60_000))


def long_names() -> Lines:
    return (event(at, name=f"{at} " + "x" * 400_000) for at in range(60))


def names_of_templates() -> Lines:
    return (event(at, name=f"{at} " + "x" * 2_000) for at in range(8_000))


def names_of_16_kilobytes() -> Lines:
    """As long as names may be."""
    return (event(at, name=f"{at} " + "x" * 16_000) for at in range(4_000))


LONG = "x" * 16_000
LONGER = "x" * 900_000


def long_texts() -> list[Any]:
    """Long texts, all different, of all that is kept until the end or until something ends."""
    kernel = {"type": "gpu_kernel", "gpu": 0, "stream": 7}
    ranges = {"type": "annotation", "phase": "B"}
    counter = {"type": "hook", "layer": "c", "phase": "C", "name": "c"}
    forms: dict[str, Callable[[int], dict[str, Any]]] = {
        "threads": lambda at: event(at, tid=at, comm=f"{at} {LONG}"),
        "layers": lambda at: event(at, type="hook", layer=f"{at} {LONG}"),
        "domains": lambda at: event(at, type="annotation", domain=f"{at} {LONG}"),
        "open calls": lambda at: event(at, phase="B", tid=at % 50, name=f"{at} {LONG}"),
        "open ranges": lambda at: event(at, range=at, name=f"{at} {LONG}", **ranges),
        "series": lambda at: event(at, args={f"{at} {LONG}": 1}, **counter),
        "kernels": lambda at: event(at, name=f"{at} {LONG}", **kernel),
        "names": lambda at: {"type": "name", "pid": at, "name": f"{at} {LONG}"},
    }
    return [pytest.param(form, id=name) for name, form in forms.items()]


def long_keys() -> Lines:
    return (event(at, args={f"{at} " + "x" * 200_000: at}) for at in range(200))


def arguments_of_some_kilobytes() -> Lines:
    return (event(at, args={"text": f"{at} " + "x" * 3_000}) for at in range(5_000))


def arguments_of_64_kilobytes() -> Lines:
    return (event(at, args={"text": f"{at} " + "x" * 65_000}) for at in range(700))


def long_arguments() -> Lines:
    return (event(at, args={"text": f"{at} " + "x" * 900_000}) for at in range(60))


def slices_that_end_later() -> Lines:
    return (event(1, tid=at % 3) for at in range(100_000))


def open_calls() -> Lines:
    return (event(at, phase="B", tid=at % 50) for at in range(300_000))


def threads_names() -> Lines:
    return (event(at, comm=f"name {at}") for at in range(60_000))


def launches() -> Lines:
    kernel = {"type": "gpu_kernel", "gpu": 0, "stream": 7, "name": "k"}
    return (event(at, **kernel, launch=at) for at in range(200_000))


def losses() -> Lines:
    """Of many layers, reasons and sizes."""
    loss = {"type": "loss", "cpu": 0}
    return (
        loss | {"layer": f"layer {at}", "reason": f"reason {at}", "count": at, "ts_ns": at * 10}
        for at in range(40_000)
    )


def windows() -> Lines:
    window = {"type": "window", "cause": "profiler"}
    return (window | {"phase": "BE"[at % 2], "window": at // 2 + 1, "ts_ns": at * 10} for at in range(40_000))


def clocks() -> Lines:
    pair = {"type": "clock", "source_ns": 1, "host_lo_ns": 1, "host_hi_ns": 2}
    return (pair | {"clock": f"clock {at}"} for at in range(20_000))


def pairs(count: int = 150_000) -> Lines:
    """More readings than are kept, of three clocks."""
    pair = {"type": "clock", "source_ns": 0, "host_lo_ns": 0, "host_hi_ns": 0}
    for at in range(count):
        host_ns, clock = at * 10**8, f"globaltimer:{at % 3}"
        pair |= {"host_lo_ns": host_ns, "host_hi_ns": host_ns + 700 + at % 900}
        yield pair | {"clock": clock, "source_ns": 5 * 10**17 + host_ns + host_ns // 10**5 + 500}


def pairs_and_events() -> Lines:
    """As many pairs as are kept, some of which contradict, and events on their clock."""
    for pair in pairs(130_000):
        wrong_ns = 10**5 if pair["source_ns"] % 7 == 0 else 0
        yield pair | {"clock": GPU, "source_ns": pair["source_ns"] + wrong_ns}
    for at in range(40_000):
        yield event(at, clock=GPU) | {"ts_ns": 5 * 10**17 + at * 10**8}


def stacks() -> Lines:
    """More stacks than are kept, of frames that all differ, deep ones, and names that are cut."""
    for at in range(50_000):
        frames = [{"function": f"f{at} " + "x" * 200, "file": f"/home/ann/{at}.py", "line": at}] * 4
        if at % 1_000 == 0:
            frames = [{"function": "f", "file": "a.py", "line": line} for line in range(2_000)]
        if at % 5_000 == 1:
            frames = [{"function": "g" * 400_000}]
        yield {"type": "stack", "id": at, "frames": frames}
        yield event(at, stack=at, launch=at, args={"flags": at})


def annotated() -> Lines:
    """Ranges in others, and launches in each, of which half have no work."""
    for at in range(30_000):
        thread = {"type": "annotation", "tid": 1 + at % 3}
        if at < 900:
            yield event(at, phase="B", name="stays open", **thread)
        yield event(at, phase="B", name=f"range {at % 1_000}", **thread)
        yield event(at, tid=1 + at % 3, launch=at)
        yield event(at, phase="E", name=f"range {at % 1_000}", **thread)
        if at % 2:
            yield event(at, type="gpu_kernel", gpu=0, stream=at % 4, launch=at)


def threads() -> Lines:
    return (event(at, pid=at % 100, tid=at) for at in range(15_000))


def streams() -> Lines:
    return (event(at, type="gpu_kernel", gpu=at % 8, stream=at) for at in range(30_000))


def gpus() -> Lines:
    """Warps of GPUs that all differ, on SMs and slots that no hardware has."""
    for at in range(5_000):
        where = {"gpu": at, "sm": [at * 13 % 65_536], "slot": [at % 4_096]}
        warp = {"warp": [0], "entry_ns": [0], "exit_ns": [9], "launch": at}
        yield {"ts_ns": at * 10, "type": "gpu_warp", "name": "k", **where, **warp}


def warps_that_wait() -> Lines:
    """Warps of lines that all begin with the first of their launch."""
    for first in range(0, 100_000, 1_000):
        places = range(first, first + 1_000)
        sms, slots = [at % 132 for at in places], [at // 132 % 64 for at in places]
        columns = {"warp": [*places], "sm": sms, "slot": slots}
        times = {"entry_ns": [at * 20 for at in places], "exit_ns": [900] * 1_000}
        launch = {"launch": 1, "gpu": 0, "grid": [100_000, 1, 1], "block": [32, 1, 1]}
        yield {"ts_ns": 1_000, "type": "gpu_warp", "name": "k", **launch, **columns, **times}


def recorded(path: Path, lines: Lines, **of_header: Any) -> Path:
    """A recording of these."""
    with path.open("wb") as file:
        file.writelines(orjson.dumps(line) + b"\n" for line in chain([HEADER | of_header], lines))
    return path


def peak_mb(*arguments: str, core: str = "0") -> float:
    """What a command takes at most."""
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, PURE: core}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "Traceback" not in done.stderr, done.stderr
    return int(done.stderr.split()[-1]) / 1024


@pytest.mark.parametrize(
    "lines",
    [
        names,
        long_names,
        names_of_templates,
        names_of_16_kilobytes,
        gpus,
        arguments_of_some_kilobytes,
        threads_names,
        launches,
        stacks,
        annotated,
        losses,
        windows,
        clocks,
    ],
    ids=lambda one: one.__name__,
)
def test_whatever_a_recording_holds(lines: Callable[[], Lines], tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", lines())
    for to in ("perfetto", "chrome"):
        assert peak_mb("convert", str(path), "-o", str(tmp_path / to), "-f", to) < BOUND_MB


@pytest.mark.parametrize("form", long_texts())
def test_long_texts_that_are_kept(form: Callable[[int], dict[str, Any]], tmp_path: Path) -> None:
    count = 1_500
    path = recorded(tmp_path / "run.jsonl", map(form, range(count)))
    found_mb = peak_mb("convert", str(path), "-o", str(tmp_path / "out"), "-f", "chrome")
    assert found_mb < BOUND_MB + LONG_NAMES_MB + count * 1.3 / 1024


@pytest.mark.parametrize("lines", [names, stacks, annotated], ids=lambda one: one.__name__)
def test_a_further_recording_takes_some_megabytes(lines: Callable[[], Lines], tmp_path: Path) -> None:
    paths = [
        recorded(tmp_path / host, lines(), host=host, start={"monotonic_ns": at, "realtime_ns": 10**18})
        for at, host in enumerate(("node1", "node2"))
    ]
    found_mb = peak_mb("convert", *map(str, paths), "-o", str(tmp_path / "out"))
    assert found_mb < BOUND_MB + FURTHER_MB


@pytest.mark.parametrize("lines", [names, stacks], ids=lambda one: one.__name__)
def test_recordings_of_an_archive_take_no_more_than_one(lines: Callable[[], Lines], tmp_path: Path) -> None:
    paths = [
        recorded(tmp_path / host, lines(), host=host, start={"monotonic_ns": at, "realtime_ns": 10**18})
        for at, host in enumerate(("node1", "node2"))
    ]
    assert peak_mb("convert", *map(str, paths), "--archive", str(tmp_path / "out")) < BOUND_MB


@pytest.mark.parametrize("lines", [pairs, pairs_and_events], ids=lambda one: one.__name__)
def test_pairs_of_clocks_whatever_their_number(lines: Callable[[], Lines], tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", lines())
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out")) < BOUND_MB


def test_a_trace_of_pytorch_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [{}')
        for at in range(40_000):
            args = {"External id": at, "Input Dims": [[at, 8], []], "text": "x" * 200}
            one = {
                "ph": "X",
                "cat": "cpu_op",
                "name": f"aten::op{at}",
                "pid": 7,
                "tid": 7,
                "dur": 0.5,
                "args": args,
            }
            file.write(",\n" + json.dumps(one | {"ts": at * 7919 % 40_000 + 0.25}))
        file.write("]}")
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out")) < BOUND_MB


@pytest.mark.parametrize(
    ("wide", "core"),
    [
        ({"args": {"text": LONGER}}, "0"),
        ({"args": {"text": LONGER}}, "1"),
        ({"name": LONG}, "0"),
        ({"cat": LONG, "ph": "b", "id": LONG}, "0"),
    ],
    ids=["arguments", "arguments, Python alone", "names", "ids"],
)
def test_begins_that_wait_in_a_trace_of_chrome(wide: dict[str, Any], core: str, tmp_path: Path) -> None:
    count, path = 60 if "args" in wide else 1_500, tmp_path / "trace.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [{}')
        for at in range(count):
            one = {"ph": "B", "name": "f", "pid": 7, "tid": 7, "ts": at} | wide
            file.write(",\n" + json.dumps(one).replace("xxx", f"{at} xxx", 1))
        file.write("]}")
    found_mb = peak_mb("convert", str(path), "-o", str(tmp_path / "out"), core=core)
    assert found_mb < BOUND_MB + PYTHON_MB * int(core) + LONG_NAMES_MB + count * 2 / 1024


@pytest.mark.parametrize("table", ["kernels", "ranges", "threads", "domains"])
def test_long_texts_of_nsight_systems(table: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    shutil.copy(FIXTURES / "nsys" / "input.sqlite", path)
    with closing(sqlite3.connect(path)) as db, db:
        for at in range(70):
            text, number = f"{at} {LONGER}", 10_000 + at
            db.execute("INSERT INTO StringIds VALUES (?, ?)", (number, text))
            columns, change = {
                "kernels": ("CUPTI_ACTIVITY_KIND_KERNEL", {"start": at, "demangledName": number}),
                "ranges": ("NVTX_EVENTS WHERE eventType = 59", {"start": at, "text": text}),
                "threads": ("ThreadNames", {"globalTid": number << 24 | at, "nameId": number}),
                "domains": ("NVTX_EVENTS", {"eventType": 75, "domainId": number, "text": text}),
            }[table]
            found = db.execute(f"SELECT * FROM {columns} LIMIT 1")
            row = dict(zip([one[0] for one in found.description], found.fetchone(), strict=True)) | change
            marks = ", ".join("?" * len(row))
            db.execute(f"INSERT INTO {columns.split()[0]} VALUES ({marks})", [*row.values()])
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out")) < BOUND_MB + LONG_NAMES_MB


def test_long_texts_of_rocprof(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    trace = json.loads((FIXTURES / "rocprof-mi350" / "input.json").read_bytes())
    strings = trace["rocprofiler-sdk-tool"][0]["strings"]
    names = [{"kind": f"{at} {LONG}", "operations": [f"{at} {LONG}"] * 9} for at in range(100)]
    strings["marker_api"] = [{"key": at, "value": f"{at} {LONGER}"} for at in range(50)]
    strings["buffer_records"] += names
    path.write_text(json.dumps(trace))
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out")) < BOUND_MB


def test_a_trace_of_perfetto(tmp_path: Path) -> None:
    path, trace = tmp_path / "run.jsonl", tmp_path / "run.pftrace"
    lines = (
        event(at, name=f"f{at % 1_000}", tid=at % 50, args={"text": f"{at} " + "x" * 300})
        for at in range(60_000)
    )
    peak_mb("convert", str(recorded(path, lines)), "-o", str(trace))
    assert peak_mb("convert", str(trace), "-o", str(tmp_path / "out")) < BOUND_MB


def test_a_large_packet_of_perfetto_is_read_in_parts(tmp_path: Path) -> None:
    trace = TraceMade()
    event = trace.event(1, INSTANT, "with a picture").track_event
    event.debug_annotations.add(name="png", string_value="x" * (48 << 20))
    names = trace.packet(sequence_flags=CLEARED).interned_data.event_names
    for iid in range(1, 100_000):
        names.add(iid=iid, name=f"name {iid}")
    path = tmp_path / "run.pftrace"
    path.write_bytes(trace.bytes)
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out")) < BOUND_MB


@pytest.mark.parametrize("form", ["chrome", "perfetto", "layered"])
@pytest.mark.parametrize(
    "lines", [names_of_templates, arguments_of_64_kilobytes], ids=lambda one: one.__name__
)
def test_long_texts_in_other_formats(lines: Callable[[], Lines], form: str, tmp_path: Path) -> None:
    path, trace = recorded(tmp_path / "run.jsonl", lines()), str(tmp_path / "trace")
    peak_mb("convert", str(path), "-o", trace, "-f", form)
    assert peak_mb("convert", trace, "-o", str(tmp_path / "out"), "-f", "perfetto") < BOUND_MB + LONG_NAMES_MB


def test_text_has_the_timeline_in_a_file(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", names())
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out"), "-f", "text") < BOUND_MB


@pytest.mark.parametrize("to", ["layered", "cuda-events"])
def test_events_that_are_written_as_they_come(to: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", threads_names())
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out"), "-f", to) < BOUND_MB


@pytest.mark.parametrize(
    "lines", [names_of_templates, launches, pairs_and_events, threads], ids=lambda one: one.__name__
)
def test_a_part_of_a_recording(lines: Callable[[], Lines], tmp_path: Path) -> None:
    path, out = recorded(tmp_path / "run.jsonl", lines()), str(tmp_path / "out")
    assert peak_mb("cut", str(path), "--from", "100us", "-o", out) < BOUND_MB


def test_calls_that_are_open_in_a_part_take_an_eighth_of_a_kilobyte(tmp_path: Path) -> None:
    path, out = recorded(tmp_path / "run.jsonl", open_calls()), str(tmp_path / "out")
    assert peak_mb("cut", str(path), "--from", "100us", "-o", out) < BOUND_MB + 300_000 / 8 / 1024


def test_long_lines_take_some_times_their_length(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", long_arguments())
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out")) < BOUND_MB + LINE_MB


def test_keys_of_arguments_are_not_kept_where_they_are_long(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", long_keys())
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out")) < BOUND_MB + LINE_MB / 5


def test_open_calls_take_a_tenth_of_a_kilobyte(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", open_calls())
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out")) < BOUND_MB + 300_000 * 0.1 / 1024


@pytest.mark.parametrize("to", ["perfetto", "chrome"])
def test_slices_that_end_later_take_a_fifth_of_a_kilobyte(to: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", slices_that_end_later())
    bound_mb = BOUND_MB + 100_000 * 0.2 / 1024
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out"), "-f", to) < bound_mb


@pytest.mark.parametrize(("lines", "tracks"), [(threads, 30_000), (streams, 30_000)])
def test_each_track_takes_a_kilobyte(lines: Callable[[], Lines], tracks: int, tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", lines())
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out")) < BOUND_MB + tracks * TRACK_KB / 1024


def test_warps_wait_for_lines_that_begin_before_them(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", warps_that_wait())
    assert peak_mb("convert", str(path), "-o", str(tmp_path / "out")) < BOUND_MB + 100_000 * 0.4 / 1024


def test_compressed_data_that_unfolds_to_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.zst"
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    with path.open("wb") as file:
        file.write(compressor.compress(json.dumps(HEADER).encode() + b"\n"))
        for _ in range(64):
            file.write(compressor.compress(bytes(1 << 24)))
        file.write(compressor.flush())
    assert path.stat().st_size < 1 << 17
    assert peak_mb("validate", str(path)) < BOUND_MB
