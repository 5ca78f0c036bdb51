"""Captures of a machine whose GPUs' counters are sampled, by a stand-in for CUPTI, as a user makes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.gpu_libraries import build_sampling
from tests.support.sampled_machine import UUIDS
from tests.support.waiting import wait_until
from tracepipe.event.counters import GPU_COUNTERS
from tracepipe.tracer.gpu.engines.counters import COUNTERS
from tracepipe.tracer.gpu.sampling_lock import SamplingLock

pytestmark = pytest.mark.slow
INTERVAL_NS: Final = 1_000_000
ALONE: Final = ("--gpu", "off", "--layers", "none", "--gpu-counters", "1ms")
Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machine")
    build_sampling(folder)
    return folder


def started(
    machine: Path, output: Path, *options: str, behaviour: str = "", gpus: int = 1
) -> subprocess.Popen[str]:
    (machine / "behaviour").write_text(behaviour)
    command = [sys.executable, "-m", "tests.support.sampled_machine", str(machine), "capture"]
    command += ["-o", str(output), *options]
    settings = {**os.environ, "STANDIN_GPUS": str(gpus)}
    return subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True)


def captured(
    machine: Path, output: Path, *options: str, behaviour: str = "", gpus: int = 1
) -> tuple[Records, int, str]:
    """The records, the exit code, and the messages."""
    with started(machine, output, *options, behaviour=behaviour, gpus=gpus) as process:
        _, errors = process.communicate()
    lines = output.read_text().splitlines() if output.exists() else []
    return [json.loads(line) for line in lines], process.returncode, errors


def samples(records: Records, gpu: int = 0) -> Records:
    return [
        one for one in records if one.get("layer") == GPU_COUNTERS and one.get("gpu") == gpu and "name" in one
    ]


def number(sample: dict[str, Any]) -> int:
    """Which sample of the stand-in's it is: `SM active %` is the first metric."""
    return round(sample["args"]["SM active %"] * 1000)


def losses(records: Records) -> Records:
    return [one for one in records if one["type"] == "loss"]


def test_samples_stand_where_they_were_taken(machine: Path, tmp_path: Path) -> None:
    records, code, errors = captured(machine, tmp_path / "a.jsonl", *ALONE, "--", "sleep", "0.2")
    assert code == 0, errors
    header, taken = records[0], samples(records)
    first, footer = taken[0], records[-1]
    for place, sample in enumerate(taken):
        assert sample["ts_ns"] == first["ts_ns"] + place * INTERVAL_NS
        assert sample["dur_ns"] == INTERVAL_NS
        assert number(sample) == number(first) + place
    assert 0 <= first["ts_ns"] - header["start"]["monotonic_ns"] < INTERVAL_NS
    assert len(taken) >= 200
    assert taken[-1]["ts_ns"] < footer["end"]["monotonic_ns"]
    assert footer["counts"] == {"hook": len(taken)}
    (used,) = footer["sampling"]
    assert used["gpu"] == 0
    assert 0 <= used["cpu_ns"] < used["elapsed_ns"] < footer["end"]["monotonic_ns"]
    assert first["args"] == {
        counter.name: round((place + number(first) / 1000) / counter.scale, 3)
        for place, counter in enumerate(COUNTERS)
    }
    assert [one["name"] for one in header["counters"]] == [counter.name for counter in COUNTERS]
    assert header["counters"][2] == {
        "gpu": 0, "name": "DRAM read GB/s", "unit": "GB/s", "max": 4000.0, "interval_ns": INTERVAL_NS,
        "metric": "dram__bytes_read.sum.per_second",
    }  # fmt: skip
    assert header["options"]["gpu_counters_ns"] == INTERVAL_NS


def test_each_gpu_is_sampled_by_a_process_of_its_own(machine: Path, tmp_path: Path) -> None:
    records, code, _ = captured(machine, tmp_path / "a.jsonl", *ALONE, "--", "sleep", "0.05", gpus=2)
    assert code == 0
    assert samples(records, 0) and samples(records, 1)
    assert {one["gpu"] for one in records[0]["counters"]} == {0, 1}


def test_without_a_command_the_machine_is_sampled(machine: Path, tmp_path: Path) -> None:
    options = ("--layers", "none", "--gpu-counters", "1ms", "--system", "--duration", "0.1s")
    records, code, errors = captured(machine, tmp_path / "a.jsonl", *options)
    assert code == 0, errors
    assert len(samples(records)) >= 100


def test_samples_outside_of_windows_are_left_out(machine: Path, tmp_path: Path) -> None:
    options = (*ALONE, "--delay", "0.1s", "--duration", "0.05s", "--repeat", "2")
    records, code, errors = captured(machine, tmp_path / "a.jsonl", *options, "--", "sleep", "1.5")
    assert code == 0, errors
    turns = [one["ts_ns"] for one in records if one["type"] == "window"]
    assert len(turns) == 4
    for begin_ns, end_ns in (turns[:2], turns[2:]):
        inside = [one for one in samples(records) if begin_ns <= one["ts_ns"] < end_ns]
        # Two begin or end outside, and the recording ends with the last window, in the middle of a sample.
        assert abs(len(inside) - (end_ns - begin_ns) // INTERVAL_NS) <= 1
        turns_of = [number(one) for one in inside]
        assert turns_of == list(range(turns_of[0], turns_of[0] + len(inside)))
        records = [one for one in records if one not in inside]
    assert not samples(records)


def test_a_flight_recorder_keeps_the_last_samples(machine: Path, tmp_path: Path) -> None:
    records, code, errors = captured(
        machine, tmp_path / "a.jsonl", *ALONE, "--last", "0.1s", "--", "sleep", "0.5"
    )
    assert code == 0, errors
    end_ns = records[-1]["end"]["monotonic_ns"]
    assert all(one["ts_ns"] >= end_ns - 150 * INTERVAL_NS for one in samples(records))
    # A busy machine notices the command's end late: so much less of what came before is among the last.
    assert len(samples(records)) >= 40


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("gap 1000 7", "the hardware returned no sample"),
        ("overflow 1001 7", "the hardware's buffer was full"),
    ],
)
def test_samples_that_are_missing_are_a_loss(
    machine: Path, tmp_path: Path, behaviour: str, reason: str
) -> None:
    records, code, errors = captured(
        machine, tmp_path / "a.jsonl", *ALONE, "--", "sleep", "1.6", behaviour=behaviour
    )
    (loss,) = losses(records)
    assert (loss["layer"], loss["count"], loss["reason"]) == (GPU_COUNTERS, 7, f"GPU 0: {reason}")
    assert loss["dur_ns"] == 7 * INTERVAL_NS
    (after,) = [one for one in samples(records) if one["ts_ns"] == loss["ts_ns"] + loss["dur_ns"]]
    assert number(after) == 1008
    assert (code, records[-1]["losses"]) == (0, {GPU_COUNTERS: 7})
    assert f"lost: 7 {GPU_COUNTERS} events" in errors


def test_a_sampler_that_dies_is_a_loss_and_the_recording_continues(machine: Path, tmp_path: Path) -> None:
    records, _, errors = captured(
        machine, tmp_path / "a.jsonl", *ALONE, "--", "sleep", "1.6", behaviour="die 1000"
    )
    (loss,) = losses(records)
    why = "its sampler ended with signal 9 (SIGKILL)"
    assert (loss["layer"], loss["reason"]) == (GPU_COUNTERS, f"GPU 0: {why}")
    assert f"GPU 0 is no longer sampled: {why}" in errors
    assert loss["ts_ns"] == samples(records)[-1]["ts_ns"] + INTERVAL_NS
    missing_ns = records[-1]["end"]["monotonic_ns"] - loss["ts_ns"]
    assert abs(loss["count"] * INTERVAL_NS - missing_ns) < 500 * INTERVAL_NS
    assert records[-1]["ended_by"] == "exit 0"


REFUSED: Final = [
    ("fail cuptiPmSamplingEnable 35", "NVreg_RestrictProfilingToAdminUsers=0"),
    ("fail cuptiPmSamplingEnable 26", "End the other profiler that uses the GPU's hardware"),
    ("die 0", "its sampler ended with signal 9 (SIGKILL)"),
    ("early", "CUPTI's times are not of CLOCK_MONOTONIC"),
    ("unsupported", "profiling switched off"),
]


@pytest.mark.parametrize(("behaviour", "words"), REFUSED)
def test_what_cannot_be_sampled_is_reported_before_the_command_runs(
    machine: Path, tmp_path: Path, behaviour: str, words: str
) -> None:
    touched = tmp_path / "touched"
    records, code, errors = captured(
        machine, tmp_path / "a.jsonl", *ALONE, "--", "touch", str(touched), behaviour=behaviour
    )
    assert (records, code) == ([], 3)
    assert words in errors
    assert not touched.exists()


def test_a_gpu_that_another_process_samples_is_refused(machine: Path, tmp_path: Path) -> None:
    with SamplingLock([UUIDS[0]]):
        _, code, errors = captured(machine, tmp_path / "a.jsonl", *ALONE, "--", "true")
    assert code == 3
    assert f"sampled by process {os.getpid()}" in errors


def test_a_killed_capture_leaves_no_sampler(machine: Path, tmp_path: Path) -> None:
    with started(machine, tmp_path / "a.jsonl", *ALONE, "--", "sleep", "30") as capture:
        try:
            wait_until(lambda: bool(_children(capture.pid, "sleep")))
            (sampler,) = _children(capture.pid, "pm_sampler")
            (command,) = _children(capture.pid, "sleep")
        finally:
            capture.kill()
    wait_until(lambda: not Path("/proc", str(sampler)).exists())
    assert Path("/proc", str(command)).exists()
    os.kill(command, signal.SIGKILL)
    SamplingLock([UUIDS[0]]).close()


def _children(pid: int, name: str) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with suppress(OSError):  # it has ended
                if Path(f"/proc/{child}/comm").read_text().startswith(name):
                    found.append(int(child))
    return found
