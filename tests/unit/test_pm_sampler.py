"""The program that samples a GPU, with a CUPTI that samples no hardware: what it sends, to the byte."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.compiled import compiled
from tests.support.gpu_libraries import FLAGS, NATIVE, build_sampling, include_flags
from tests.support.waiting import wait_until

INTERVAL_NS: Final = 1_000_000
UUID: Final = "0" * 32
CHOSEN, READY, SAMPLE, OVERFLOW, FAILED, END = range(1, 7)

_STARTS = """
import subprocess, sys
sampler = subprocess.Popen(sys.argv[1:], stdin=0, stdout=subprocess.PIPE)
print(sampler.pid, flush=True)
sampler.stdout.read()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampler")
    cupti = build_sampling(folder)
    linked = [str(NATIVE / "pm_sampler.cpp"), str(cupti), "-Wl,-rpath,$ORIGIN", "-ldl"]
    return compiled(["g++", *FLAGS, *include_flags(), *linked], folder / "pm_sampler")


def sampled(
    program: Path, behaviour: str, *choices: str, uuid: str = UUID, until: int = 5
) -> tuple[bytes, int]:
    """What the program sent, asked to end after so many samples or later, and its exit code."""
    (program.parent / "behaviour").write_text(behaviour)
    command = [str(program), "0", uuid, str(INTERVAL_NS), *choices]
    sent = b""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while samples(sent) < until and (piece := os.read(process.stdout.fileno(), 1 << 16)):
            sent += piece
        rest, _ = process.communicate()
        return sent + rest, process.returncode


def record(kind: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IHH", len(payload), kind, 0) + payload


def records(sent: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 8 <= len(sent):
        length, kind, _ = struct.unpack_from("<IHH", sent, at)
        yield kind, sent[at + 8 : at + 8 + length]
        at += 8 + length


def chosen(choice: int, metric: int, peak: float = 0) -> bytes:
    return record(CHOSEN, struct.pack("<IId", choice, metric, peak))


def sample(number: int, first_ns: int, metrics: int) -> bytes:
    start_ns = first_ns + number * INTERVAL_NS
    values = [place + number / 1000 for place in range(metrics)]
    return record(SAMPLE, struct.pack(f"<QQ{metrics}d", start_ns, start_ns + INTERVAL_NS, *values))


def first_ns(sent: bytes) -> int:
    start_ns: int = struct.unpack_from(
        "<Q", next(payload for kind, payload in records(sent) if kind == SAMPLE)
    )[0]
    return start_ns


def samples(sent: bytes) -> int:
    return sum(kind == SAMPLE for kind, _ in records(sent))


def test_samples_come_as_cupti_has_them(program: Path) -> None:
    before_ns = time.monotonic_ns()
    sent, code = sampled(program, "", "a,b", "c=c.peak_sustained", "d")
    assert before_ns < first_ns(sent) < time.monotonic_ns()
    expected = chosen(0, 0) + chosen(1, 0, 4e12) + chosen(2, 0) + record(READY)
    expected += b"".join(sample(number, first_ns(sent), 3) for number in range(samples(sent)))
    assert sent == expected + record(END)
    assert (code, samples(sent) > 0) == (0, True)


def test_the_first_metric_that_is_compatible_with_those_before_it_is_chosen(program: Path) -> None:
    behaviour = "missing a\npasses c\nmissing d\nmissing e"
    sent, _ = sampled(program, behaviour, "a,b", "c,f", "d,e", "g", until=0)
    expected = chosen(0, 1) + chosen(1, 1) + chosen(3, 0) + record(READY)
    assert sent.startswith(expected)


def test_a_gap_shows_in_the_times(program: Path) -> None:
    sent, code = sampled(program, "gap 1 7", "a")
    start_ns = first_ns(sent)
    numbers = [0, 1, *range(9, samples(sent) + 7)]
    assert sent.endswith(b"".join(sample(number, start_ns, 1) for number in numbers) + record(END))
    assert code == 0


def test_an_overflow_is_reported_and_sampling_begins_again(program: Path) -> None:
    sent, code = sampled(program, "overflow 40 20", "a", until=45)
    kinds = [kind for kind, _ in records(sent)]
    before = kinds.index(OVERFLOW) - kinds.index(SAMPLE)
    assert before == 40
    whole = record(OVERFLOW) + sample(60, first_ns(sent), 1) + sample(61, first_ns(sent), 1)
    assert whole in sent
    assert (kinds[-1], code) == (END, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("cuptiActivityRegisterTimestampCallback 999", "choosing the clock"),
        ("cuptiProfilerInitialize 999", "preparing the profiler"),
        ("cuptiProfilerDeviceSupported 999", "asking whether the GPU can be sampled"),
        ("cuptiDeviceGetChipName 999", "asking for the chip's name"),
        ("cuptiPmSamplingGetCounterAvailability 35", "asking which counters there are"),
        ("cuptiPmSamplingGetCounterAvailability 999 2", "asking which counters there are"),
        ("cuptiProfilerHostInitialize 999", "preparing metrics"),
        ("cuptiProfilerHostDeinitialize 999", "giving metrics back"),
        ("cuptiPmSamplingEnable 26", "enabling sampling"),
        ("cuptiPmSamplingSetConfig 1", "setting the interval and the counters"),
        ("cuptiPmSamplingGetCounterDataSize 999", "asking how long samples are"),
        ("cuptiPmSamplingCounterDataImageInitialize 999", "making room for samples"),
        ("cuptiPmSamplingStart 999", "starting to sample"),
        ("cuptiPmSamplingDecodeData 999", "decoding samples"),
        ("cuptiPmSamplingDecodeData 999 4", "decoding samples"),
        ("cuptiPmSamplingGetCounterDataInfo 999", "counting samples"),
        ("cuptiPmSamplingCounterDataGetSampleInfo 999", "asking when a sample was"),
        ("cuptiProfilerHostEvaluateToGpuValues 999 9", "evaluating a sample"),
        ("cuptiPmSamplingStop 999", "stopping to sample"),
    ],
)
def test_each_call_that_fails_is_named(program: Path, call: str, words: str) -> None:
    result = int(call.split()[1])
    sent, code = sampled(program, f"fail {call}", "a", until=1000)
    name = "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" if result == 35 else "CUPTI_ERROR_OF_STANDIN"
    assert sent.endswith(record(FAILED, struct.pack("<I", result) + f"{words}: {name}".encode()))
    assert code == 1


@pytest.mark.parametrize(
    ("behaviour", "uuid", "words"),
    [
        ("missing a", UUID, b"it has none of the counters"),
        ("fail cuptiProfilerHostGetNumOfPasses 999", UUID, b"it has none of the counters"),
        ("fail cuptiProfilerHostGetConfigImage 999", UUID, b"it has none of the counters"),
        ("fail cuptiProfilerHostGetConfigImageSize 999", UUID, b"it has none of the counters"),
        ("unsupported", UUID, b"its driver or setup has profiling switched off"),
        ("", "1" * 32, b"the driver counts its GPUs in another order here"),
    ],
)
def test_a_gpu_that_cannot_be_sampled_is_refused(
    program: Path, behaviour: str, uuid: str, words: bytes
) -> None:
    assert sampled(program, behaviour, "a", uuid=uuid) == (record(FAILED, b"\0" * 4 + words), 1)


def test_a_peak_that_cannot_be_had_is_not_known(program: Path) -> None:
    sent, _ = sampled(program, "fail cuptiProfilerHostEvaluateToGpuValues 999", "a=a.peak_sustained")
    assert sent.startswith(chosen(0, 0, 0))


def test_it_ends_with_the_process_that_started_it(program: Path) -> None:
    (program.parent / "behaviour").write_text("")
    reading, writing = os.pipe()  # whose end does not come
    command = [sys.executable, "-c", _STARTS, str(program), "0", UUID, str(INTERVAL_NS), "a"]
    with subprocess.Popen(command, stdin=reading, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        sampler = Path("/proc", starter.stdout.readline().decode().strip())
        starter.kill()
    try:
        wait_until(lambda: not sampler.exists() or "(zombie)" in (sampler / "status").read_text())
    finally:
        os.close(reading)
        os.close(writing)
