"""Where Python programs make their calls: read in the process, and written once for each place.

The libraries of both engines are loaded into Pythons, with stand-ins of NVIDIA's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_channel import collected
from tests.support.gpu_libraries import SOURCES, build_library
from tests.support.gpu_records import kernel_renderer, pack_record, warp_renderer
from tests.support.pythons import VERSIONS, interpreter
from tracepipe.event.checks import first_fault
from tracepipe.tracer.gpu.engines.channel import NAME, Channel, Kind, records
from tracepipe.tracer.gpu.engines.kernels import CALL, KernelKind
from tracepipe.tracer.gpu.engines.streams import FRAME, STACK

PROGRAM, GRAPHS = SOURCES / "stacks_of_python.py", SOURCES / "graphs_of_python.py"
FRAMES_MAX = 128
STACKS_MAX = 1 << 16
DRIVER, LAUNCH_ID = 1, 307
Event = dict[str, Any]


@pytest.fixture
def libraries(kernels_library: Path, warps_library: Path) -> dict[str, Path]:
    """By engine."""
    return {"kernels": kernels_library, "warps": warps_library}


def _recorded(
    python: str, library: Path, program: Path = PROGRAM, *words: str, **more: str
) -> tuple[list[Event], list[list[list[Any]]]]:
    """The lines of a recording, and what the program printed about its launches."""
    channel = Channel(1 << 22)
    if "TRACEPIPE_WINDOW_BEGIN" in more:
        channel.expect_windows()
        channel.arm(1)
    environment = {"TRACEPIPE_GPU_PATCHES": str(library.parent / "patches"), **more}
    chunk, printed = collected(channel, [python, str(program), str(library), *words], environment)
    assert channel.losses({}) == []
    channel.close()
    renderer = warp_renderer() if library.stem == "warps" else kernel_renderer()
    lines = [json.loads(line) for line in (*renderer.render(chunk).texts, *renderer.last().texts)]
    return lines, json.loads(printed.splitlines()[-1])


def _launches(lines: list[Event]) -> list[Event]:
    calls = [line for line in lines if line.get("name") == "cuLaunchKernel" and line["phase"] != "E"]
    return sorted(calls, key=lambda call: int(call["ts_ns"]))


@pytest.mark.parametrize("engine", ["kernels", "warps"])
@pytest.mark.parametrize("version", VERSIONS)
def test_stacks_of_launches_are_those_that_python_has(
    libraries: dict[str, Path], version: str, engine: str
) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version}")
    lines, errors = _recorded(python, libraries[engine])
    assert [line for line in lines if line["type"] in ("loss", "note")] == []
    stacks: dict[int, Event] = {}
    launches = _launches(lines)
    assert len(launches) == len(errors) > 20
    for line in lines:  # a stack stands before the first event that names it
        if line["type"] == "stack":
            assert line["id"] not in stacks
            stacks[line["id"]] = line
        elif "stack" in line:
            assert line["stack"] in stacks
            assert list(line).index("stack") == len(line) - 1 - ("args" in line), "right before args"
    for launch, frames in zip(launches, errors, strict=True):
        stack = stacks[launch["stack"]]
        read = [
            [frame["file"], frame["line"], frame["function"].rpartition(".")[2]] for frame in stack["frames"]
        ]
        assert read == frames[:FRAMES_MAX]
        assert stack.get("omitted", 0) == max(0, len(frames) - FRAMES_MAX)
    # The loop of `often` makes three launches at one place.
    assert len(stacks) < len(launches)
    assert len({json.dumps(stack["frames"]) for stack in stacks.values()}) == len(stacks)


def test_kernels_of_graphs_have_the_stacks_that_captured_them(libraries: dict[str, Path]) -> None:
    """Of graphs that are instantiated twice, cloned, in another graph, updated, and captured by threads."""
    python = interpreter("3.12") or pytest.skip("there is no Python 3.12")
    lines, expected = _recorded(python, libraries["kernels"], GRAPHS)
    _assert_captured(lines, expected, 12 + 4 + 3 + 3 + 9)


def test_kernels_of_graphs_have_the_stacks_of_their_capture_with_warps(libraries: dict[str, Path]) -> None:
    """Known by their order: not if that differs, or if two streams are captured at a time."""
    python = interpreter("3.12") or pytest.skip("there is no Python 3.12")
    lines, expected = _recorded(python, libraries["warps"], SOURCES / "node_launches_of_python.py")
    stacks = {line["id"]: line["frames"] for line in lines if line["type"] == "stack"}
    kernels = [
        line for line in lines if line["type"] == "gpu_kernel" and line["args"].get("launched_by") == "graph"
    ]
    assert len(expected) == 3 + 3 + 2 + 3 + 1 + 1
    frames = [stacks[kernel["stack"]] for kernel in kernels]
    read = [
        [kernel["name"], of[-1]["line"] if len(of) > 1 else None]
        for kernel, of in zip(kernels, frames, strict=True)
    ]
    assert read == expected
    assert {of[0]["function"] for of in frames if len(of) == 1} == {"(capture not recorded)"}


def test_graphs_that_were_captured_before_a_window_have_stacks_in_it(libraries: dict[str, Path]) -> None:
    python = interpreter("3.12") or pytest.skip("there is no Python 3.12")
    library, begin = libraries["kernels"], {"TRACEPIPE_WINDOW_BEGIN": "1 profiler"}
    _assert_captured(*_recorded(python, library, GRAPHS, "late", **begin), 9)


def _assert_captured(lines: list[Event], expected: list[list[list[Any]]], count: int) -> None:
    stacks = {line["id"]: line["frames"] for line in lines if line["type"] == "stack"}
    kernels = [line for line in lines if line["type"] == "gpu_kernel"]
    assert len(kernels) == len(expected) == count
    for kernel, frames in zip(kernels, expected, strict=True):
        read = stacks[kernel["stack"]]
        assert [
            [frame["file"], frame["line"], frame["function"].rpartition(".")[2]] for frame in read
        ] == frames


def test_none_are_read_where_nobody_asked_for_them(libraries: dict[str, Path]) -> None:
    python = interpreter("3.11") or pytest.skip("there is no Python 3.11")
    for library in libraries.values():
        lines, errors = _recorded(python, library, TRACEPIPE_GPU_STACKS="off")
        assert len(_launches(lines)) == len(errors)
        assert [line for line in lines if line["type"] == "stack" or "stack" in line] == []


@pytest.mark.slow
def test_more_stacks_than_are_kept_are_none_and_counted(tmp_path: Path) -> None:
    library = build_library(tmp_path / "stacks.so", SOURCES / "python_stacks.cpp")
    channel = Channel(1 << 25)
    command = [sys.executable, str(SOURCES / "many_stacks.py"), str(library), "66000"]
    chunk, printed = collected(channel, command)
    numbers = json.loads(printed)
    # Frames are bounded as stacks are, and each stack has one of its own here.
    assert STACKS_MAX - 200 < numbers < STACKS_MAX
    (loss,) = channel.losses({})
    assert (loss.layer, loss.count) == ("stack", 66000 - numbers)
    assert loss.reason == "a process had more Python stacks than are kept"
    assert sum(record.kind == Kind.STACK for record in records(chunk)) == numbers
    channel.close()


def _stack(pid: int, number: int, function: str) -> bytes:
    """A stack of one frame, which is sent with it."""
    frame = FRAME.pack(number + 1, 41, len(function)) + function.encode() + b"train.py"
    stack = STACK.pack(number, 0, 1) + NAME.pack(number + 1)
    return pack_record(Kind.FRAME, pid, pid, 1, frame) + pack_record(Kind.STACK, pid, pid, 1, stack)


def _call(pid: int, number: int, correlation: int) -> bytes:
    place = (pid, correlation, 0, *[0xFFFFFFFF] * 3)
    call = CALL.pack(10 * correlation, 11 * correlation, number, DRIVER, LAUNCH_ID, *place)
    return pack_record(KernelKind.CALL, pid, pid, 2, call)


def test_numbers_of_processes_become_ids_of_the_file() -> None:
    renderer = kernel_renderer()
    chunk = (
        _stack(7, 55, "ours") + _stack(8, 55, "theirs") + _call(7, 55, 1) + _call(8, 55, 2) + _call(8, 66, 3)
    )
    lines = [json.loads(line) for line in renderer.render(chunk).texts]
    assert [line["frames"][0]["function"] for line in lines[:2]] == ["ours", "theirs"]
    assert [line.get("stack") for line in lines[2:]] == [lines[0]["id"], lines[1]["id"], None]
    assert lines[0] == {
        "type": "stack",
        "id": lines[0]["id"],
        "frames": [{"function": "ours", "file": "train.py", "line": 41}],
    }
    later = [json.loads(line) for line in renderer.render(_call(7, 55, 4)).texts]
    assert later[0]["stack"] == lines[0]["id"], "a stack is known from then on"
    (call,) = [json.loads(line) for line in renderer.render(_stack(9, 77, "ours") + _call(9, 77, 5)).texts]
    assert call["stack"] == lines[0]["id"], "the same frames are one stack"
    assert all(first_fault(line) is None for line in (*lines, *later))
    assert renderer.render(_stack(9, 88, "unused")).texts == []
    lost = pack_record(Kind.STACK, 9, 9, 1, STACK.pack(99, 0, 1) + NAME.pack(5))
    (call,) = [json.loads(line) for line in renderer.render(lost + _call(9, 99, 6)).texts]
    assert "stack" not in call, "the record of its frame was lost"


def test_a_stack_that_was_sent_before_what_is_kept_stands_in_the_file() -> None:
    """Of a recording of the last seconds, which begins with a decoder that has not seen it."""
    carry = kernel_renderer().carry()
    carry.add(_stack(7, 55, "ours") + _call(7, 55, 1))
    renderer = kernel_renderer()
    assert renderer.resume(carry.carried(), 5).texts == []
    stack, call = [json.loads(line) for line in renderer.render(_call(7, 55, 2)).texts]
    assert (stack["frames"][0]["function"], call["stack"]) == ("ours", stack["id"])
