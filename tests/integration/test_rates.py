"""Events kept and lost add up to the calls that a program counted, at rates from 10⁵ calls a second on."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import held_reader
from tests.support.standin import why_not
from tracepipe.tracer import ENGINES, CaptureRequest, CaptureSummary, capture

SMALLEST_RING = 4096
THREADS = 2
# bpftrace detaches one probe after the other, a tenth of a second each: as few functions as the tests need.
FUNCTIONS = ("cuCtxGetCurrent", "cuMemGetInfo_v2")

# Where bpftrace's own buffer is full, it does not say on which processor, nor whose events it lost.
UNKNOWN, KNOWS_PROCESSORS = "unknown", {"bcc"}

pytestmark = [pytest.mark.ebpf, pytest.mark.alone]


# `prebuilt` attaches the same programs as `bcc`.
@pytest.fixture(scope="module", params=[name for name in ENGINES if name != "prebuilt"])
def method(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    reason = why_not(name)
    if reason:
        pytest.skip(reason)
    return name


@dataclass
class Run:
    """A capture of a program that counts its calls, and what the program printed."""

    path: Path
    summary: CaptureSummary
    made: list[int]
    calls_a_second: int

    def records(self) -> Iterator[dict[str, Any]]:
        with self.path.open() as lines:
            for line in lines:
                yield json.loads(line)

    def count(self, layer: str) -> int:
        return self.summary.counts.get(layer, 0)

    def lost(self, layer: str) -> int:
        return self.summary.losses.get(layer, 0) + self.summary.losses.get(UNKNOWN, 0)


class Runner:
    """Captures `vec_add` at a rate."""

    def __init__(self, vec_add: str, method: str, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._vec_add, self._method, self._path, self._capfd = vec_add, method, path, capfd

    def __call__(self, calls: int, rate: int, call: str = "cuCtxGetCurrent", **options: Any) -> Run:
        command = [self._vec_add, "-n", "100", "--threads", str(THREADS), "--call", call]
        command += ["--spin", str(calls // THREADS), "--rate", str(rate)]
        if self._method == "bpftrace" and "ring_bytes" in options:
            # Its reader is a process of its own, and may be fast enough to lose nothing.
            command = [sys.executable, held_reader.__file__, *command]
            options["libraries"] = (str(Path(self._vec_add).with_name("libcuda.so.1")),)
        layers = options.pop("layers", ("userspace",))
        request = CaptureRequest(command, layers=layers, method=self._method, only=FUNCTIONS, **options)
        self._capfd.readouterr()
        with self._path.open("wb") as sink:
            summary = capture(request, sink, notify=print)
        output, errors = self._capfd.readouterr()
        made = [int(n) for n in re.findall(r"^thread \d+: (\d+) calls$", output, re.MULTILINE)]
        achieved = re.search(r"(\d+) calls/s", errors)
        assert achieved is not None
        with self._capfd.disabled():
            kept, lost = summary.counts.get("userspace", 0), sum(summary.losses.values())
            print(f"\n{self._method}: {achieved[1]} of {rate} calls/s; {kept} kept, {lost} lost")
        return Run(self._path, summary, made, int(achieved[1]))


@pytest.fixture
def run(vec_add: str, method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Runner:
    return Runner(vec_add, method, tmp_path / "run.jsonl", capfd)


def test_at_100_000_calls_a_second_every_call_of_every_thread_is_there(run: Runner) -> None:
    seen = run(calls=40_000, rate=100_000)
    assert sum(seen.made) == 40_000
    assert seen.summary.losses == {}
    phases = Counter(
        (record["tid"], record["phase"])
        for record in seen.records()
        if record["type"] == "userspace" and record["name"] == "cuCtxGetCurrent"
    )
    assert sorted(phases.values()) == sorted(seen.made * 2)  # a begin and an end each
    assert seen.count("userspace") == 2 * sum(seen.made)


def test_at_a_million_calls_a_second_kept_and_lost_are_all_that_were_made(run: Runner) -> None:
    seen = run(calls=100_000, rate=1_000_000)
    assert seen.count("userspace") + seen.lost("userspace") == 2 * sum(seen.made)


@pytest.mark.parametrize("rate", [100_000, 1_000_000])
def test_losses_of_a_small_ring_are_counted_by_processor_and_interval(
    run: Runner, rate: int, method: str
) -> None:
    seen = run(calls=40_000, rate=rate, ring_bytes=SMALLEST_RING)
    lost = seen.lost("userspace")
    assert lost > 0
    assert seen.count("userspace") + lost == 2 * sum(seen.made)
    if method in KNOWS_PROCESSORS:
        assert sum(seen.summary.cpu_losses["userspace"].values()) == lost
    losses = [record for record in seen.records() if record["type"] == "loss"]
    assert sum(loss["count"] for loss in losses) == lost
    assert all(loss["dur_ns"] > 0 for loss in losses)


def test_each_layer_counts_its_own(run: Runner, method: str) -> None:
    if method not in KNOWS_PROCESSORS:
        pytest.skip(f"{method} does not say whose events it lost")
    layers = ("userspace", "syscall")
    ring_bytes = 16 * SMALLEST_RING  # room for what the program does before its threads start
    seen = run(calls=40_000, rate=100_000, call="cuMemGetInfo_v2", layers=layers, ring_bytes=ring_bytes)
    made = 2 * sum(seen.made)
    assert seen.count("userspace") + seen.lost("userspace") == made
    ioctls = sum(record["type"] == "syscall" and record["name"] == "ioctl" for record in seen.records())
    others = seen.count("syscall") - ioctls
    # The program's other 17 ioctls, and what else it does at its end, are few.
    assert made <= ioctls + seen.lost("syscall") <= made + 2 * 17 + others
