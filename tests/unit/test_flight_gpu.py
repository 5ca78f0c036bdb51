"""A flight recorder with the engines for GPUs: what was sent once is known to recordings of later times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tracepipe.api.record import Files, NumberedOutputs
from tracepipe.tracer.engines.engine import Listeners, NoProbes
from tracepipe.tracer.gpu.engines.kernels import KernelStream
from tracepipe.tracer.gpu.engines.streams import GpuEngine
from tracepipe.tracer.gpu.engines.warps import WarpStream
from tracepipe.tracer.request import CaptureRequest, Last, Notify
from tracepipe.tracer.session import run_session

Line = dict[str, Any]


def recorded(
    folder: Path,
    engine: GpuEngine,
    program: Path,
    order: str,
    last: Last,
    notify: Notify = print,
    script: str = "for i in 0 1 2 3 4 5 6 7 8 9; do echo {order}; sleep 0.05; done",
) -> dict[str, list[Line]]:
    """The recordings of the stand-in's program, which does ten times what it is asked for."""
    script = f"{script.format(order=order)}; echo quit"
    command = ["sh", "-c", f"({script}) | {program}"]
    request = CaptureRequest(command, ("userspace",), gpu="kernels", last=last)
    with NumberedOutputs(str(folder / "run.jsonl"), Files(print), force=False) as outputs:
        try:
            run_session(NoProbes(), "", request, outputs, Listeners(notify), engine)
        finally:
            engine.close()
    texts = {path.name: path.read_text() for path in folder.glob("run*.jsonl")}
    return {name: [json.loads(line) for line in text.splitlines()] for name, text in texts.items()}


def of(lines: list[Line], layer: str) -> list[Line]:
    return [line for line in lines if line["type"] == layer]


@pytest.mark.slow
def test_kernels_and_their_calls_have_names_when_these_have_left_memory(
    tmp_path: Path, kernels_library: Path
) -> None:
    program, engine = kernels_library.parent / "program", GpuEngine([KernelStream(kernels_library)])
    last = Last(60 * 10**9, 30_000)  # about three of ten times 50 launches
    recordings = recorded(tmp_path, engine, program, "launch 50", last)
    *lines, footer = recordings["run.jsonl"]
    kernels, calls = of(lines, "gpu_kernel"), of(lines, "userspace")
    assert footer["evicted"]["gpu_kernel"] + len(kernels) == 500
    assert footer["evicted"]["userspace"] + len(calls) == 500 > len(calls)
    assert {kernel["name"] for kernel in kernels} == {"f"}
    assert {call["name"] for call in calls} == {"cuLaunchKernel"}
    assert footer["losses"] == {}


@pytest.mark.slow
def test_warps_have_the_names_of_their_kernels_when_these_have_left_memory(
    tmp_path: Path, warps_library: Path
) -> None:
    engine = GpuEngine([WarpStream(warps_library, warps_library.parent / "patches", CaptureRequest())])
    last = Last(60 * 10**9, 2000)
    lines = recorded(tmp_path, engine, warps_library.parent / "program", "kernel:scale", last)["run.jsonl"]
    warps = of(lines, "gpu_warp")
    assert warps
    assert {line["name"] for line in (*warps, *of(lines, "gpu_kernel"))} == {"scale"}
    assert lines[-1]["evicted"]["gpu_warp"]


@pytest.mark.slow
def test_that_no_kernel_fits_is_reported_where_none_does(tmp_path: Path, warps_library: Path) -> None:
    for pattern, is_noted in (("scale", False), ("conv", True)):
        stream = WarpStream(
            warps_library, warps_library.parent / "patches", CaptureRequest(gpu_kernels=pattern)
        )
        engine = GpuEngine([stream])
        folder, messages = tmp_path / pattern, list[str]()
        folder.mkdir()
        last = Last(60 * 10**9)
        program = warps_library.parent / "program"
        recorded(folder, engine, program, "kernel:scale", last, messages.append)
        assert any("no kernel fits --kernel" in note for note in messages) == is_noted


@pytest.mark.parametrize(
    ("engine", "short", "long", "condition"),
    [
        ("kernels", "launch 3", "slow 30", "kernel:^f$ > 20ms"),
        # A launch waits for the memory on the GPU. What is recorded then takes 1 µs by the stand-in's clock.
        ("warps", "launch", "kernel:scale", "kernel:scale > 500ns"),
    ],
)
def test_a_kernel_that_takes_long_has_the_last_seconds_written(
    engine: str, short: str, long: str, condition: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    library = request.getfixturevalue(f"{engine}_library")
    made = GpuEngine(
        [
            KernelStream(library)
            if engine == "kernels"
            else WarpStream(library, library.parent / "patches", CaptureRequest())
        ]
    )
    is_written = f"[ -e {tmp_path}/run.jsonl ]"
    waits = f"n=0; until {is_written} || [ $((n+=1)) -gt 3000 ]; do sleep 0.01; done"
    script = f"echo {short}; echo {{order}}; {waits}"
    last = Last(400_000_000, when=(condition,))
    recordings = recorded(tmp_path, made, library.parent / "program", long, last, script=script)
    ended_by = {name: lines[-1]["ended_by"] for name, lines in recordings.items()}
    assert re.fullmatch(rf"{re.escape(condition)}: (f|scale) took [\d.]+ .s", ended_by["run.jsonl"])
    assert ended_by["run-2.jsonl"] == "exit 0"
    names = {kernel["name"] for kernel in of(recordings["run.jsonl"], "gpu_kernel")}
    assert names <= {"f", "add", "scale"}
    assert names & {"f", "scale"}
