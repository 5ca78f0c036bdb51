"""Programs that use NVTX are recorded as they are: no root, no GPU, no change of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiled import compiled
from tests.support.program import PYTHONPATH
from tests.support.waiting import wait_until
from tracepipe.tracer.gpu.build.toolchain import find_parts

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FOLDERS = [folder for part in find_parts().cupti for folder in part.include]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/gpu/annotated.cpp, which holds our copy of what NVTX fixes against its headers too."""
    compiler = shutil.which("g++")
    headers = [folder for folder in FOLDERS if (folder / "nvtx3/nvToolsExt.h").exists()]
    if compiler is None or not headers:
        pytest.skip("there is no g++, or no header of NVTX (pip install 'nvidia-nvtx==13.0.*')")
    made = tmp_path_factory.mktemp("nvtx") / "annotated"
    include = [f"-I{ROOT / 'tracepipe/tracer/gpu/native'}", f"-isystem{headers[0]}"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    source = ROOT / "tests/gpu/annotated.cpp"
    command = [compiler, *flags, *include, str(source), "-ldl"]
    compiled([*command, "-shared", "-fPIC"], made.with_suffix(".so"))
    return compiled(command, made)


def captured(
    folder: Path, program: Path, *arguments: str, options: tuple[str, ...] = ()
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """The lines of a recording, and how the command went."""
    output = folder / "run.jsonl"
    command = [sys.executable, "-m", "tracepipe", "capture", "--layers", "annotation", "-o", str(output)]
    environment = {name: value for name, value in os.environ.items() if name != "NVTX_INJECTION64_PATH"}
    done = subprocess.run(
        [*command, *options, "--", str(program), *arguments],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": PYTHONPATH},
        check=True,
    )
    return [json.loads(line) for line in output.read_text().splitlines()], done


def shown(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The events without what differs from run to run."""
    keys = ("phase", "name", "domain", "range", "args")
    return [tuple(line.get(key) for key in keys) for line in lines if line["type"] == "annotation"]


def test_all_annotations_of_a_program_are_recorded(program: Path, tmp_path: Path) -> None:
    lines, done = captured(tmp_path, program, "all")
    fixture = (ROOT / "fixtures/annotations/input.jsonl").read_text().splitlines()
    assert shown(lines) == shown([json.loads(line) for line in fixture])
    assert lines[-1]["losses"] == {}
    # NVTX says how deep its ranges are, and that there was none to end.
    assert done.stdout == "0 1 1 0 none\n"
    assert lines[0]["engine"] == "none, nvtx"


def test_ranges_that_end_with_a_payload_end(program: Path, tmp_path: Path) -> None:
    """NVTX has an extension for payloads. NCCL ends the range of ncclCommInitRank with it."""
    lines, done = captured(tmp_path, program, "payloads")
    name = "pushed with a name"
    assert shown(lines) == [
        ("B", name, "data", None, None),
        ("B", "unnamed", "data", None, None),
        ("I", "unnamed", "data", None, None),
        ("E", "unnamed", "data", None, None),
        ("E", name, "data", None, None),
        ("B", "unnamed", "data", 0, None),
        ("E", "unnamed", "data", 0, None),
        ("I", name, "data", None, None),
    ]
    assert done.stdout == "1 0\n"
    without = subprocess.run([program, "payloads"], capture_output=True, text=True, check=True)
    assert without.stdout == "-2 -2\n"  # NVTX_NO_PUSH_POP_TRACKING


def test_annotations_of_a_python_program_say_where_they_were_made(program: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    loading = f"library = ctypes.CDLL({str(program.with_suffix('.so'))!r})"
    script.write_text(
        f"import ctypes, os, threading\n{loading}\n"
        "def step(name):\n"
        "    library.say(name)\n"
        "def forward():\n"
        "    step(b'forward')\n"
        "    step(b'again')\n"
        "forward()\n"
        "if os.fork() == 0:\n"
        "    step(b'child'), os._exit(0)\n"
        "os.wait()\n"
        "for _ in range(2): step(b'loop')\n"
    )
    lines, _ = captured(tmp_path, Path(sys.executable), str(script))
    where = f"{tmp_path.name}/train.py"
    assert [(line["name"], line["args"]["python"]) for line in lines if line["type"] == "annotation"] == [
        ("forward", f"{where}:4 step, {where}:6 forward, {where}:8 <module>"),
        ("again", f"{where}:4 step, {where}:7 forward, {where}:8 <module>"),
        ("child", f"{where}:4 step, {where}:10 <module>"),
        *[("loop", f"{where}:4 step, {where}:12 <module>")] * 2,
    ]


def test_ranges_of_many_threads_nest_on_each(program: Path, tmp_path: Path) -> None:
    lines, _ = captured(tmp_path, program, "many", "5000")
    events = [line for line in lines if line["type"] == "annotation"]
    lost = sum(lines[-1]["losses"].values())
    assert len(events) + lost == 4 * 5000 * 4
    if not lost:
        cycle = [("B", "outer"), ("B", "inner"), ("E", "inner"), ("E", "outer")]
        for tid in {event["tid"] for event in events}:
            mine = [(event["phase"], event["name"]) for event in events if event["tid"] == tid]
            assert mine == cycle * 5000


def test_a_flight_recorder_is_written_when_a_range_took_long(program: Path, tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"
    options = ["--layers", "annotation", "--last", "2s", "--when", "nvtx:step* > 100ms", "-o", str(output)]
    with subprocess.Popen(
        [sys.executable, "-m", "tracepipe", "capture", *options, "--", str(program), "slow_ms", "200"],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    ) as capture:
        wait_until(output.exists)
    assert capture.returncode == 0
    *_, footer = [json.loads(line) for line in output.read_text().splitlines()]
    assert footer["ended_by"].startswith("nvtx:step* > 100ms: step 2 took 2")


def test_a_fork_has_ranges_of_its_own(program: Path, tmp_path: Path) -> None:
    lines, _ = captured(tmp_path, program, "fork")
    events = [line for line in lines if line["type"] == "annotation"]
    assert all(event["tid"] == event["pid"] for event in events)
    parent = events[0]["pid"]
    assert Counter((event["name"], event.get("domain"), event["pid"] == parent) for event in events) == {
        ("over the fork", None, True): 2,
        ("in the parent", "data", True): 2,
        ("in the child", "data", False): 2,
    }


def test_a_program_continues_when_the_recording_ends(program: Path, tmp_path: Path) -> None:
    lines, done = captured(tmp_path, program, "for_ms", "1500", options=("--duration", "300ms"))
    steps = sum(line["type"] == "annotation" and line["phase"] == "B" for line in lines)
    assert 0 < steps < int(done.stdout)
    assert lines[-1]["ended_by"] == "duration"
    assert "continues" in done.stderr


def test_a_recording_has_its_name_while_the_program_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    options = ["--layers", "annotation", "--duration", "100ms", "-o", str(path), "--", "cat"]
    with subprocess.Popen(
        [sys.executable, "-m", "tracepipe", "capture", *options],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        text=True,
    ) as process:
        assert process.stderr is not None
        messages = next(line for line in process.stderr if "continues" in line)
        footer = json.loads(path.read_text().splitlines()[-1])
        assert process.poll() is None
        assert not path.with_name("run.jsonl.part").exists()
        errors = process.communicate("")[1]
    assert messages.startswith("the recording is complete; cat continues")
    assert footer["ended_by"] == "duration"
    assert (process.returncode, "run.jsonl: no events" in errors) == (0, True), errors


def test_ranges_begin_and_end_windows(program: Path, tmp_path: Path) -> None:
    windows = ("--start-on", "nvtx:step 3", "--stop-on", "nvtx:step 4")
    lines, done = captured(tmp_path, program, "steps", "8", options=windows)
    turns = [(line["phase"], line["cause"]) for line in lines if line["type"] == "window"]
    assert turns == [("B", "nvtx:step 3"), ("E", "nvtx:step 4")]
    before = {"began": "before the window"}
    events = shown(lines)
    of_thread = [event for event in events if event[3] is None]
    step = [("I", "in it"), ("E", "step {}"), ("I", "after it")]
    assert [(phase, name) for phase, name, *_ in of_thread] == [
        ("B", "outer"),
        *[(phase, name.format(n)) for n in (3, 4) for phase, name in [("B", "step {}"), *step]][:-1],
        ("E", "outer"),
    ]
    assert of_thread[0][4] == before
    assert [event for event in events if event[3] == 0] == [
        ("B", "all", None, 0, before), ("E", "all", None, 0, None)
    ]  # fmt: skip
    assert "note: in a window of" in done.stderr


def test_windows_follow_each_other_where_the_capture_comes_later_than_they_are_long(
    program: Path, tmp_path: Path
) -> None:
    """It is held for 30 ms at a time, as on a busy machine. Its library records no more than windows then."""
    output = tmp_path / "run.jsonl"
    options = ["--layers", "annotation", "--start-on", "nvtx:step", "--stop-on", "signal"]
    options += ["--duration", "5ms", "--repeat", "10", "-o", str(output)]
    capture = [sys.executable, "-m", "tracepipe", "capture", *options]
    with subprocess.Popen(
        [*capture, "--", str(program), "for_ms", "4000"],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        part = output.with_name("run.jsonl.part")
        wait_until(lambda: part.exists() or output.exists())
        while not output.exists() and process.poll() is None:
            for number, seconds in ((signal.SIGSTOP, 0.03), (signal.SIGCONT, 0.005)):
                process.send_signal(number)
                time.sleep(seconds)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["type"] for line in lines].count("window") == 20
    assert (lines[-1]["ended_by"], lines[-1]["losses"]) == ("duration", {})


def test_a_range_ends_the_window_that_it_began_unless_another_end_is_named(
    program: Path, tmp_path: Path
) -> None:
    lines, _ = captured(
        tmp_path, program, "many", "3", options=("--start-on", "nvtx:inner#2", "--repeat", "2")
    )
    windows = [line["window"] for line in lines if line["type"] == "window"]
    assert windows == [1, 1, 2, 2]
