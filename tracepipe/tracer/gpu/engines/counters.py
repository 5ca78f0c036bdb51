"""The counters of GPUs: hardware counters, sampled by processes of tracepipe.

    capture ─┬─▶ Sampler of GPU 0 ──▶ OrderedSamples ─┐
             ├─▶ Sampler of GPU 1 ──▶ OrderedSamples ─┼─▶ records beside those of the channel ──▶ lines
             …                                       ─┘

Nothing is loaded into the command, and it is never waited for. If a sampler ends early, that is a loss.

The record of a sample, after the head that `transport` describes:

    0      8     12    16           24         32
    | key  | gpu | 0   | start_ns   | end_ns   | value f64 of each counter …

The key is a secret of this capture: such records are refused if a process of the command writes them.
"""

from __future__ import annotations

import math
import os
import secrets
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from tracepipe.errors import CaptureUnavailable
from tracepipe.event.counters import GPU_COUNTERS
from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.gpu.build.cuda_parts import find_parts
from tracepipe.tracer.gpu.build.driver import Owner, driver_environment
from tracepipe.tracer.gpu.build.toolchain import INSTALL, NATIVE, Toolchain
from tracepipe.tracer.gpu.engines.counter_metrics import COUNTERS, listed
from tracepipe.tracer.gpu.engines.renderer import Decoder, MakeDecoder, Recording
from tracepipe.tracer.gpu.engines.sampler import (
    NotPermitted,
    OrderedSamples,
    Sample,
    SampledGpu,
    Sampler,
    Stretches,
)
from tracepipe.tracer.gpu.engines.streams import RecordStream
from tracepipe.tracer.gpu.engines.transport import RECORD, GpuRecord, Kind, Malformed, whole_bytes
from tracepipe.tracer.gpu.sampling_lock import SamplingLock
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.record import Loss
from tracepipe.tracer.request import Notify

_EVENT: Final = "hook"
_SAMPLE: Final = struct.Struct("<QI4xQQ")
# The longest time until a begin or end of a window is known. Only then is a sample kept or left out.
_HOLD_NS: Final = 250_000_000
_EVER_NS: Final = 1 << 63
_FIRST_CUPTI: Final = (12, 8)
"""The first version that keeps the latest samples when the hardware's buffer is full."""


class CounterStream(RecordStream):
    """The counters of GPUs that are being sampled."""

    name = "pm sampling"
    layers = frozenset({_EVENT})

    def __init__(self, samplers: Sequence[Sampler], lock: SamplingLock, interval_ns: int) -> None:
        """`samplers` have begun. `close` ends them, and releases the lock of their GPUs."""
        self._key = secrets.randbits(64)
        self._samplers, self._lock = samplers, lock
        self._samples = [OrderedSamples(sampler, interval_ns) for sampler in samplers]
        self._stretches = Stretches()
        self._hold_ns = 0
        self._losses: list[Loss] = []
        self.counters = [
            one for sampler in samplers for one in listed(sampler.gpu.index, interval_ns, sampler.sampled)
        ]

    @property
    def decoders(self) -> Sequence[MakeDecoder]:
        """That of samples."""
        return (partial(SampleDecoder, key=self._key, samplers=self._samplers),)

    def expect_windows(self) -> None:
        """Events are recorded only in windows: samples wait until those are known."""
        self._hold_ns = _HOLD_NS

    def turned(self, turn: Turn) -> None:
        """Samples are kept from a begin until the end after it."""
        self._stretches.turn(turn)

    def collect(self, news: list[str], *, is_final: bool) -> bytes:
        """The records of samples since the last call; never waits. `is_final`: no more follow."""
        now_ns = time.monotonic_ns()
        before_ns = now_ns - self._hold_ns
        made: list[bytes] = []
        for samples, sampler in zip(self._samples, self._samplers, strict=True):
            samples.read(now_ns)
            until_ns = _EVER_NS if is_final else before_ns
            recorded = samples.recorded(until_ns, self._stretches, self._losses)
            made += [_packed(self._key, sampler.gpu.index, sample) for sample in recorded]
            if is_final:
                self._losses += samples.end(now_ns, self._stretches)
            if samples.news:
                news.append(samples.news)
                samples.news = ""
        self._stretches.forget_before(before_ns - _HOLD_NS)
        return b"".join(made)

    def lost(self) -> list[Loss]:
        """The gaps since the last call."""
        losses, self._losses = self._losses, []
        return losses

    def stop(self) -> None:
        """Ask the samplers to send their remaining samples, and to end."""
        for sampler in self._samplers:
            sampler.stop()

    def is_over(self) -> bool:
        """Whether all of them have done so."""
        return all(sampler.is_over for sampler in self._samplers)

    def close(self) -> None:
        """End the samplers, and release the GPUs for others."""
        for sampler in self._samplers:
            sampler.close()
        self._lock.close()


def _packed(key: int, gpu: int, sample: Sample) -> bytes:
    values = struct.pack(f"<{len(sample.values)}d", *sample.values)
    payload = _SAMPLE.pack(key, gpu, sample.start_ns, sample.end_ns) + values
    head = RECORD.pack(0, len(payload), Kind.SAMPLE, 0, 0, sample.end_ns)
    return (head + payload).ljust(whole_bytes(len(payload)), b"\0")


class SampleDecoder(Decoder):
    """Makes lines of samples. Nothing of them is needed later."""

    kinds = frozenset({Kind.SAMPLE})

    def __init__(self, recording: Recording, key: int, samplers: Sequence[Sampler]) -> None:
        """`samplers` have begun; a sample has the values of its GPU's counters in their order."""
        super().__init__(recording)
        self._key, self._samplers = key, samplers
        self._counters = {sampler.gpu.index: [one.counter for one in sampler.sampled] for sampler in samplers}

    @property
    def sampling(self) -> list[dict[str, Any]]:
        """The processor time that the samplers took, in the form of a footer."""
        used = [(sampler.gpu.index, sampler.used) for sampler in self._samplers]
        return [{"gpu": gpu, **one._asdict()} for gpu, one in sorted(used) if one is not None]

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """The layer of a record's events, and how many it has."""
        return _EVENT, 1

    def add(self, lines: Lines, record: GpuRecord) -> None:
        """Add the event of a sample. Raises one of REFUSALS."""
        key, gpu, start_ns, end_ns = _SAMPLE.unpack_from(record.payload)
        if key != self._key or gpu not in self._counters:
            raise Malformed
        counters = self._counters[gpu]
        values = struct.unpack_from(f"<{len(counters)}d", record.payload, _SAMPLE.size)
        args = {
            counter.name: round(value / counter.scale, 3)
            for counter, value in zip(counters, values, strict=True)
            if math.isfinite(value)
        }
        event = {"ts_ns": start_ns, "type": _EVENT, "layer": GPU_COUNTERS, "name": GPU_COUNTERS, "phase": "C"}
        lines.record({**event, "dur_ns": end_ns - start_ns, "gpu": gpu, "args": args})


def start_counters(interval_ns: int, toolchain: Toolchain, notify: Notify) -> CounterStream:
    """Start sampling the counters of all GPUs that CUDA sees. Raises CaptureUnavailable."""
    toolchain.architectures()  # raises without a GPU
    gpus = [SampledGpu(index, gpu.uuid) for index, gpu in enumerate(toolchain.driver.gpus)]
    program = build_sampler(toolchain)
    with ExitStack() as started:
        lock = started.enter_context(SamplingLock(gpu.uuid for gpu in gpus))
        try:
            samplers = _begun(started, interval_ns, gpus, program, toolchain.owner)
        except NotPermitted:
            if os.geteuid() != 0 or toolchain.owner.uid == 0:
                raise
            # Root does not run what its caller compiled, and has a separate build.
            root = Owner(0, 0, Path("/root"))
            own = replace(toolchain, parts=find_parts(user=root), owner=root)
            samplers = _begun(started, interval_ns, gpus, build_sampler(own), root)
            notify("gpu counters: sampled as root, as the driver lets only administrators profile")
        for sampler in samplers:
            taken = {one.counter.name for one in sampler.sampled}
            missing = [counter.name for counter in COUNTERS if counter.name not in taken]
            if missing:
                notify(f"gpu counters: GPU {sampler.gpu.index} does not give {', '.join(missing)}")
        started.pop_all()
        return CounterStream(samplers, lock, interval_ns)


def build_sampler(toolchain: Toolchain) -> Path:
    """The program that samples a GPU, built if it is not in the cache. Raises CaptureUnavailable."""
    cupti = toolchain.part("cupti")
    if cupti.version is not None and cupti.version < _FIRST_CUPTI:
        raise CaptureUnavailable(
            f"CUPTI of CUDA {cupti.version[0]}.{cupti.version[1]} is too old to sample counters: "
            f"{_FIRST_CUPTI[0]}.{_FIRST_CUPTI[1]} is the first that can.",
            f"Run {INSTALL} with a driver at least as new, or leave out --gpu-counters.",
        )
    return toolchain.build_program("pm_sampler", [NATIVE / "pm_sampler.cpp"], ["cupti"])


def _begun(
    started: ExitStack, interval_ns: int, gpus: list[SampledGpu], program: Path, user: Owner
) -> list[Sampler]:
    """Start a sampler for each GPU, and wait until all sample; their setups run at the same time."""
    environment = driver_environment()
    if user.uid == 0 and os.environ.get("SUDO_UID"):
        environment.pop("LD_LIBRARY_PATH", None)  # it is the caller's, and root loads none of their libraries
    samplers = []
    for gpu in gpus:
        sampler = Sampler(program, gpu, interval_ns, COUNTERS, run_as=user.run_as, environment=environment)
        started.callback(sampler.close)
        samplers.append(sampler)
    for sampler in samplers:
        sampler.begin()
    return samplers
