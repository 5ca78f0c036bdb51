"""GPUs' counters: their metrics, as whom they are sampled, and which samples are kept, losses or refused."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tracepipe.errors import CaptureUnavailable
from tracepipe.event.counters import DRAM_READ, GPU_COUNTERS, SM_ACTIVE, SM_CLOCK
from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.gpu.build.driver import Driver, Gpu, Owner
from tracepipe.tracer.gpu.build.toolchain import Compiler, Part, Parts, Toolchain, find_parts
from tracepipe.tracer.gpu.engines import counters
from tracepipe.tracer.gpu.engines.annotations import AnnotationStream
from tracepipe.tracer.gpu.engines.channel import MALFORMED, RECORD, Kind, whole_bytes
from tracepipe.tracer.gpu.engines.counters import (
    COUNTERS,
    CounterStream,
    NotPermitted,
    OrderedSamples,
    Overflow,
    Sample,
    Sampled,
    SampleDecoder,
    Sampler,
    Stretches,
    Used,
    build_sampler,
    listed,
    start_counters,
)
from tracepipe.tracer.gpu.engines.kernels import KernelDecoder
from tracepipe.tracer.gpu.engines.streams import GpuEngine, GpuRenderer, ProcessDecoder
from tracepipe.tracer.gpu.sampling_lock import SamplingLock
from tracepipe.tracer.records.record import Loss

INTERVAL_NS = 100
LATE_NS = 10**9
KEY = 7


class Sent:
    """A sampler that has sent what the test says."""

    def __init__(self, *items: Sample | Overflow, index: int = 0) -> None:
        self.gpu = index
        self.sampled = [Sampled(counter, next(iter(counter.metrics)), None) for counter in COUNTERS[:2]]
        self.items = list(items)
        self.is_over = self.is_whole = self.is_closed = False
        self.why = ""
        self.used: Used | None = None

    def read(self) -> Iterator[Sample | Overflow]:
        items, self.items = self.items, []
        yield from items

    def stop(self) -> None:
        self.is_over = self.is_whole = True

    def close(self) -> None:
        self.is_closed = True


def sample(number: int) -> Sample:
    return Sample(number * INTERVAL_NS, (number + 1) * INTERVAL_NS, (float(number), 0.5))


def recorded(*turns: int) -> Stretches:
    """Stretches that begin and end at these times."""
    stretches = Stretches()
    for place, ts_ns in enumerate(turns):
        stretches.append(Turn(ts_ns, begins=place % 2 == 0))
    return stretches


def taken(sent: Sent, stretches: Stretches, now_ns: int = 10**6) -> tuple[list[int], list[Loss]]:
    """The numbers of the samples that are kept, and the losses."""
    stream, losses = OrderedSamples(sent, INTERVAL_NS), list[Loss]()  # type: ignore[arg-type]
    stream.read(now_ns)
    kept = [one.start_ns // INTERVAL_NS for one in stream.recorded(now_ns, stretches, losses)]
    return kept, losses + list(stream.end(now_ns, stretches))


def whole(*items: Sample | Overflow) -> Sent:
    sent = Sent(*items)
    sent.stop()
    return sent


def test_an_impossible_value_is_a_loss_and_the_others_of_its_sample_stay() -> None:
    many = Sample(0, INTERVAL_NS, (5123.4, 97.2)), Sample(INTERVAL_NS, 2 * INTERVAL_NS, (101.2, 0.0))
    sent = whole(*many)
    sent.sampled = [Sampled(counter, next(iter(counter.metrics)), 100.0) for counter in COUNTERS[:2]]
    stream, losses = OrderedSamples(sent, INTERVAL_NS), list[Loss]()  # type: ignore[arg-type]
    stream.read(10**6)
    first, second = stream.recorded(10**6, recorded(0), losses)
    assert (math.isnan(first.values[0]), first.values[1], second) == (True, 97.2, many[1])
    reason = f"GPU 0: an impossible value of {COUNTERS[0].name}"
    assert losses == [Loss(GPU_COUNTERS, 1, 0, INTERVAL_NS, reason)]


CLOCKS = [1979.0, 1980.0, 31.1, 1979.5, 1979.0, 1910.0, 1981.0, 1600.0, 1500.0, 345.0, 345.0, 1979.0, 31.1]
"""MHz of samples of which the third and the sixth have not counted their SMs for the whole time. The GPU
slows down in the others, and then idles; what the last one did is unknown."""


def of_clocks(*megahertz: float) -> Sent:
    """A sampler of SMs, DRAM and the SMs' clock."""
    sent = Sent(
        *(Sample(at * 100, at * 100 + 100, (99.0, 5e9, mhz * 1e6)) for at, mhz in enumerate(megahertz))
    )
    chosen = (SM_ACTIVE, DRAM_READ, SM_CLOCK)
    of_names = {counter.name: counter for counter in COUNTERS}
    sent.sampled = [Sampled(of_names[name], next(iter(of_names[name].metrics)), None) for name in chosen]
    return sent


def test_a_sample_whose_sms_were_counted_for_a_part_lacks_what_they_counted() -> None:
    sent, losses = of_clocks(*CLOCKS), list[Loss]()
    stream = OrderedSamples(sent, INTERVAL_NS)  # type: ignore[arg-type]
    sent.stop()
    stream.read(10**6)
    kept = list(stream.recorded(10**6, recorded(0), losses))
    partial = [at for at, one in enumerate(kept) if math.isnan(one.values[0])]
    assert partial == [2, 5]
    assert all(math.isnan(kept[at].values[2]) for at in partial)
    assert {one.values[1] for one in kept} == {5e9}
    reason = "GPU 0: its SMs were counted for a part of the sample only"
    assert losses == [Loss(GPU_COUNTERS, 1, at * 100, at * 100 + 100, reason) for at in partial]


def test_samples_that_come_after_later_ones_fill_the_gap() -> None:
    kept, losses = taken(whole(*map(sample, (0, 1, 4, 5, 2, 7, 3, 6))), recorded(0))
    assert (kept, losses) == (list(range(8)), [])


def test_samples_after_a_gap_wait_for_those_that_are_missing() -> None:
    sent, losses = Sent(*map(sample, (0, 3, 4))), list[Loss]()
    stream = OrderedSamples(sent, INTERVAL_NS)  # type: ignore[arg-type]

    def kept_at(now_ns: int) -> list[int]:
        stream.read(now_ns)
        return [one.start_ns // INTERVAL_NS for one in stream.recorded(now_ns, recorded(0), losses)]

    assert kept_at(1000) == [0]
    sent.items = [sample(1)]
    assert kept_at(2000) == [1]
    sent.items = [sample(5)]
    assert (kept_at(LATE_NS), losses) == ([], [])
    assert kept_at(LATE_NS + 5 * INTERVAL_NS) == [3, 4, 5]
    reason = "GPU 0: the hardware returned no sample"
    assert losses == [Loss(GPU_COUNTERS, 1, 2 * INTERVAL_NS, 3 * INTERVAL_NS, reason)]
    sent.items = [sample(2)]  # too late
    assert kept_at(2 * LATE_NS) == []
    assert losses[1:] == [Loss(GPU_COUNTERS, 1, 2 * LATE_NS, 2 * LATE_NS, MALFORMED)]


def test_a_sample_waits_for_the_one_after_it() -> None:
    sent, losses = of_clocks(1979, 31, 1979), list[Loss]()
    stream, third = OrderedSamples(sent, INTERVAL_NS), sent.items.pop()  # type: ignore[arg-type]
    stream.read(10**6)
    assert [one.start_ns for one in stream.recorded(10**6, recorded(0), losses)] == [0]
    sent.items.append(third)
    stream.read(10**6)
    (second,) = stream.recorded(10**6, recorded(0), losses)
    assert (second.start_ns, math.isnan(second.values[0]), len(losses)) == (100, True, 1)


def test_samples_that_begin_in_a_stretch_are_kept() -> None:
    sent = whole(*map(sample, range(12)))
    assert taken(sent, recorded(200, 500, 700, 801)) == ([2, 3, 4, 7, 8], [])
    assert taken(whole(*map(sample, range(4))), recorded(150)) == ([2, 3], [])


def test_a_gap_is_a_loss_as_far_as_it_was_recorded() -> None:
    reason = "GPU 0: the hardware returned no sample"
    sent = whole(sample(0), sample(10))
    kept, losses = taken(sent, recorded(0, 300, 600))
    assert kept == [0, 10]
    assert losses == [Loss(GPU_COUNTERS, 2, 100, 300, reason), Loss(GPU_COUNTERS, 4, 600, 1000, reason)]
    assert taken(whole(sample(0), sample(10)), recorded(1000)) == ([10], [])


def test_an_overflow_is_the_reason_of_the_gap_after_it_alone() -> None:
    sent = whole(sample(0), Overflow(), sample(2), sample(4))
    _, losses = taken(sent, recorded(0))
    assert [loss.reason for loss in losses] == [
        "GPU 0: the hardware's buffer was full",
        "GPU 0: the hardware returned no sample",
    ]


def test_samples_that_were_not_sent_are_a_loss() -> None:
    silent, dead = Sent(sample(0)), Sent(sample(0))
    dead.is_over, dead.why = True, "its sampler ended with 1"
    assert taken(silent, recorded(0, 500)) == (
        [0],
        [Loss(GPU_COUNTERS, 4, 100, 500, "GPU 0: its sampler did not answer")],
    )
    assert taken(dead, recorded(0, 500))[1] == [
        Loss(GPU_COUNTERS, 4, 100, 500, "GPU 0: its sampler ended with 1")
    ]
    assert taken(Sent(), recorded(0, 500))[1][0].count == 5


@pytest.mark.parametrize(
    "bad",
    [
        Sample(300, 300, (0.0, 0.0)),
        Sample(300, 250, (0.0, 0.0)),
        Sample(100, 400, (0.0, 0.0)),
        Sample(300, 1 << 63, (0.0, 0.0)),
        Sample(300, 3 * 10**9, (0.0, 0.0)),
    ],
)
def test_samples_whose_times_cannot_be_are_counted(bad: Sample) -> None:
    kept, losses = taken(whole(sample(0), sample(1), sample(2), bad, sample(3)), recorded(0), 10**9)
    assert kept == [0, 1, 2, 3]
    assert [(loss.count, loss.reason) for loss in losses] == [(1, MALFORMED)]


def test_old_turns_are_forgotten_and_the_open_stretch_is_not() -> None:
    stretches = recorded(0, 100, 200)
    stretches.forget_before(150)
    assert list(stretches.parts(0, 300)) == [(200, 300)]
    stretches.forget_before(1000)
    assert list(stretches.parts(0, 300)) == [(200, 300)]


def record(payload: bytes, kind: int = Kind.SAMPLE) -> bytes:
    head = RECORD.pack(0, len(payload), kind, 0, 0, 5)
    return (head + payload).ljust(whole_bytes(len(payload)), b"\0")


def payload(*values: float, key: int = KEY, gpu: int = 0) -> bytes:
    return struct.pack(f"<QI4xQQ{len(values)}d", key, gpu, 1000, 1100, *values)


def rendered(content: bytes) -> list[dict[str, Any]]:
    other = Sent(index=3)
    other.sampled = [Sampled(COUNTERS[2], next(iter(COUNTERS[2].metrics)), None)]
    renderer = GpuRenderer([partial(SampleDecoder, key=KEY, samplers=[Sent(), other])])
    return [json.loads(text) for text in renderer.render(content).texts]


def test_a_sample_is_one_event_with_a_value_of_each_counter() -> None:
    (event,) = rendered(record(payload(12.3456, 0.0)))
    assert event == {
        "ts_ns": 1000, "type": "hook", "layer": GPU_COUNTERS, "name": GPU_COUNTERS, "phase": "C",
        "dur_ns": 100, "gpu": 0, "args": {"SM active %": 12.346, "SM tensor active %": 0.0},
    }  # fmt: skip
    (other,) = rendered(record(payload(2e9, gpu=3)))
    assert (other["gpu"], other["args"]) == (3, {"DRAM read GB/s": 2.0})


def test_a_value_that_is_none_is_left_out() -> None:
    (event,) = rendered(record(payload(math.nan, math.inf)))
    assert event["args"] == {}


@pytest.mark.parametrize(
    "content", [payload(1, 2, key=8), payload(1, 2, gpu=9), payload(1), payload(1, 2)[:20]]
)
def test_what_a_process_of_the_command_writes_as_samples_is_refused(content: bytes) -> None:
    (loss,) = rendered(record(content))
    assert (loss["type"], loss["count"], loss["reason"]) == ("loss", 1, MALFORMED)


def engine(*sent: Sent) -> GpuEngine:
    samplers: Iterable[Any] = sent
    return GpuEngine([CounterStream(list(samplers), SamplingLock([]), INTERVAL_NS)])


def test_samples_come_with_the_records_of_the_engines_around_them() -> None:
    now_ns = time.monotonic_ns()
    sent = Sent(Sample(now_ns - 100, now_ns, (1.0, 2.0)), index=1)
    made = engine(sent)
    made.add(AnnotationStream(Path("annotations.so")))
    try:
        made.turned(Turn(0, begins=True))
        assert made.name == "pm sampling, nvtx"
        assert {one["gpu"] for one in made.counters} == {1}
        (line,) = made.renderer().render(made.collect()).texts
        assert json.loads(line)["args"] == {"SM active %": 1.0, "SM tensor active %": 2.0}
        assert not made.is_over()
        made.stop()
        assert made.is_over()
        assert (made.collect(is_final=True), made.lost()) == (b"", [])
    finally:
        made.close()
    assert sent.is_closed


def test_with_windows_samples_wait_until_those_are_known() -> None:
    now_ns = time.monotonic_ns()
    made = engine(Sent(Sample(now_ns - 100, now_ns, (1.0, 2.0))))
    try:
        made.expect_windows({})
        assert made.collect() == b""
        made.turned(Turn(now_ns - 100, begins=True))
        made.stop()
        assert len(made.renderer().render(made.collect(is_final=True)).texts) == 1
    finally:
        made.close()


def test_samples_are_counted_and_carried_as_what_they_are() -> None:
    decoders = ProcessDecoder, KernelDecoder, partial(SampleDecoder, key=KEY, samplers=[Sent()])
    renderer = GpuRenderer(decoders)
    content = record(payload(1.0, 2.0))
    assert renderer.counts(content) == {"hook": 1}
    carry = renderer.carry()
    carry.add(content)
    assert (carry.carried().known, carry.carried().under_way) == (b"", b"")
    assert len(renderer.anew().render(content).texts) == 1


def writes(folder: Path, script: str) -> Sampler:
    """A sampler that is a script."""
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Sampler(program, 2, "GPU-00", 10**6, COUNTERS, run_as={}, environment={})


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo hello there", "its sampler wrote something that is not a record"),
        (r"printf '\1\0\0\0\11\0\0\0x'", "its sampler wrote something that is not a record"),
        (
            r"printf '\20\0\0\0\1\0\0\0\377\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'",
            "its sampler wrote something that is not a record",
        ),
        ("exit 3", "its sampler ended with 3"),
        ("kill -9 $$", r"its sampler ended with signal 9 \(SIGKILL\)"),
        (r"printf '\7\0\0\0\5\0\0\0\0\0\0\0a\33b'", r"a\\x1bb"),
    ],
)
def test_a_sampler_that_writes_no_samples_is_refused(tmp_path: Path, script: str, words: str) -> None:
    with pytest.raises(CaptureUnavailable, match=f"GPU 2 cannot be sampled: {words}"):
        writes(tmp_path, script).begin()


def test_a_sampler_that_cannot_be_started_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureUnavailable, match="cannot be started"):
        Sampler(tmp_path / "none", 0, "", 1, COUNTERS, run_as={}, environment={})


def planned(chip: str) -> list[list[str]]:
    """Counter, metric and what is amiss, of each counter on a chip."""
    cupti = find_parts().cupti
    if not cupti or cupti[0].version != (13, 0):
        pytest.skip("CUPTI of CUDA 13.0 is not installed")
    command = [sys.executable, "-m", "tests.support.cupti_metrics", str(cupti[0].library), chip]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.mark.parametrize("chip", ["GH100", "GA102", "AD102"])
def test_all_counters_are_counted_in_one_pass(chip: str) -> None:
    assert [(name, amiss) for name, metric, amiss in planned(chip) if metric != "-"] == [
        (counter.name, "") for counter in COUNTERS
    ]


def test_a_chip_that_lacks_some_has_the_others() -> None:
    missing = {name for name, metric, _ in planned("GB100") if metric == "-"}
    assert missing == {"PCIe read GB/s", "PCIe write GB/s"}


def test_a_header_has_what_is_known_of_each_counter() -> None:
    read, clock = (one for one in COUNTERS if one.name in ("DRAM read GB/s", "SM clock MHz"))
    some = [Sampled(read, "a", 4812.3456), Sampled(clock, "b", None)]
    assert listed(2, 1000, some) == [
        {"gpu": 2, "name": read.name, "unit": "GB/s", "metric": "a", "interval_ns": 1000, "max": 4812.346},
        {"gpu": 2, "name": clock.name, "unit": "MHz", "metric": "b", "interval_ns": 1000},
    ]


ANN = Owner(1000, 1000, Path("/home/ann"))


def machine(cuda: tuple[int, int] = (13, 0), owner: Owner = ANN) -> Toolchain:
    compiler, part = Compiler(Path("/c"), (13, 0), ""), Part((), Path("/l.so"), cuda)
    gpus = (Gpu("NVIDIA H200", "sm_90", f"GPU-of-test-{os.getpid()}"),)
    return Toolchain(Driver((13, 0), gpus), Parts([compiler], [compiler], [part], [part]), owner)


class Starts:
    """What is built and started, and by which user; only root may sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, euid: int) -> None:
        self.built: list[int] = []
        self.ran: list[int] = []
        monkeypatch.setattr(os, "geteuid", lambda: euid)
        monkeypatch.setattr(counters, "find_parts", lambda user: Parts())
        monkeypatch.setattr(counters, "build_sampler", self._build)
        monkeypatch.setattr(counters, "_begun", self._begin)

    def _build(self, toolchain: Toolchain) -> Path:
        self.built.append(toolchain.owner.uid)
        return Path(f"/cache/{toolchain.owner.uid}/pm_sampler")

    def _begin(self, _: Any, __: int, ___: Any, program: Path, user: Owner) -> list[Any]:
        assert program == Path(f"/cache/{user.uid}/pm_sampler")
        self.ran.append(user.uid)
        if user.uid != 0:
            raise NotPermitted("The driver refuses.", "")
        return []


def test_root_samples_what_its_caller_may_not_with_a_build_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts, messages = Starts(monkeypatch, euid=0), list[str]()
    start_counters(10**6, machine(), messages.append).close()
    assert (starts.built, starts.ran) == ([1000, 0], [1000, 0])
    assert messages == ["gpu counters: sampled as root, as the driver lets only administrators profile"]


def test_a_user_other_than_root_is_refused_and_the_gpus_stay_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        starts = Starts(monkeypatch, euid=1000)
        with pytest.raises(NotPermitted):
            start_counters(10**6, machine(), print)
        assert starts.ran == [1000]


def test_a_cupti_that_is_too_old_is_refused() -> None:
    with pytest.raises(CaptureUnavailable, match=r"CUPTI of CUDA 12.6 is too old .* 12.8 is the first"):
        build_sampler(machine((12, 6)))
