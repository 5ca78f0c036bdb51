"""The engine of counters: hardware counters of the GPUs, sampled by processes of tracepipe.

    capture ─┬─▶ Sampler of GPU 0 ──▶ SampleStream ─┐
             ├─▶ Sampler of GPU 1 ──▶ SampleStream ─┼─▶ records in the chunks of the engine for GPUs ──▶ lines
             …                                     ─┘

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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tracepipe.errors import CaptureUnavailable
from tracepipe.event.counters import GPU_COUNTERS
from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.gpu.build.cuda_parts import find_parts
from tracepipe.tracer.gpu.build.driver import Owner, driver_environment
from tracepipe.tracer.gpu.build.toolchain import INSTALL, NATIVE, Toolchain
from tracepipe.tracer.gpu.engines.annotations import NoGpus
from tracepipe.tracer.gpu.engines.carries import ChannelCarry, SamplesCarry
from tracepipe.tracer.gpu.engines.channel_engine import ChannelEngine
from tracepipe.tracer.gpu.engines.channel_renderer import ChannelRenderer
from tracepipe.tracer.gpu.engines.counter_metrics import COUNTERS, Counter, listed
from tracepipe.tracer.gpu.engines.over import EngineOver, RendererOver
from tracepipe.tracer.gpu.engines.sampler import (
    NotPermitted,
    Sample,
    SampledGpu,
    Sampler,
    SampleStream,
    Stretches,
    Used,
)
from tracepipe.tracer.gpu.engines.spans import ChannelSpans
from tracepipe.tracer.gpu.engines.transport import KIND_SAMPLE, RECORD, GpuRecord, whole_bytes
from tracepipe.tracer.gpu.engines.untrusted import Malformed
from tracepipe.tracer.gpu.sampling_lock import SamplingLock
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.record import Loss
from tracepipe.tracer.records.unrendered import Wanted
from tracepipe.tracer.request import CaptureRequest, Notify

_EVENT: Final = "hook"
_SAMPLE: Final = struct.Struct("<QI4xQQ")
# The longest time until a begin or end of a window is known. Only then is a sample kept or left out.
_HOLD_NS: Final = 250_000_000
_EVER_NS: Final = 1 << 63


class CountersEngine(EngineOver):
    """The counters of GPUs that are being sampled, around an engine for a command's GPUs."""

    def __init__(
        self, device: ChannelEngine, samplers: Sequence[Sampler], lock: SamplingLock, interval_ns: int
    ) -> None:
        """`samplers` have begun. `close` ends them, and releases the lock of their GPUs."""
        self._key = secrets.randbits(64)
        self._samplers, self._lock = samplers, lock
        self._streams = [SampleStream(sampler, interval_ns) for sampler in samplers]
        self._stretches = Stretches()
        self._hold_ns = 0
        self._losses: list[Loss] = []
        of_gpus = {sampler.gpu.index: [one.counter for one in sampler.sampled] for sampler in samplers}
        self._used: dict[int, Used] = {}
        super().__init__(
            device,
            CountersRenderer(device.renderer(), self._key, of_gpus, self._used),
            name="pm sampling",
            layers=frozenset({_EVENT}),
        )
        self.counters = [
            one for sampler in samplers for one in listed(sampler.gpu.index, interval_ns, sampler.sampled)
        ]

    def expect_windows(self, waited_for: Mapping[str, str]) -> None:
        """Events are recorded only in windows: samples wait until those are known."""
        self._hold_ns = _HOLD_NS
        super().expect_windows(waited_for)

    def turned(self, turn: Turn) -> None:
        """Samples are kept from a begin until the end after it."""
        self._stretches.turn(turn)
        super().turned(turn)

    def collect(self, *, is_final: bool = False) -> bytes:
        """Complete records since the last call; never waits. `is_final`: no more records follow."""
        return super().collect(is_final=is_final) + self._collect(is_final=is_final)

    def _collect(self, *, is_final: bool) -> bytes:
        now_ns = time.monotonic_ns()
        before_ns = now_ns - self._hold_ns
        made: list[bytes] = []
        for stream, sampler in zip(self._streams, self._samplers, strict=True):
            stream.take(now_ns)
            until_ns = _EVER_NS if is_final else before_ns
            kept = stream.kept(until_ns, self._stretches, self._losses)
            made += [_packed(self._key, sampler.gpu.index, sample) for sample in kept]
            if is_final:
                self._losses += stream.end(now_ns, self._stretches)
            if used := sampler.used:
                self._used[sampler.gpu.index] = used
            if stream.news:
                self._renderer.news.append(stream.news)
                stream.news = ""
        self._stretches.forget_before(before_ns - _HOLD_NS)
        return b"".join(made)

    def lost(self) -> list[Loss]:
        """Losses since the last call: gaps, and the losses of the inner engine."""
        losses, self._losses = self._losses, []
        return super().lost() + losses

    def stop(self) -> None:
        """Ask the samplers and the processes to send their remaining records, and to record no more."""
        for sampler in self._samplers:
            sampler.stop()
        super().stop()

    def is_over(self) -> bool:
        """Whether all of them have done so, or have ended."""
        return super().is_over() and all(sampler.is_over for sampler in self._samplers)

    def close(self) -> None:
        """End the samplers, release the GPUs for others, and close the channel."""
        for sampler in self._samplers:
            sampler.close()
        self._lock.close()
        super().close()


def _packed(key: int, gpu: int, sample: Sample) -> bytes:
    values = struct.pack(f"<{len(sample.values)}d", *sample.values)
    payload = _SAMPLE.pack(key, gpu, sample.start_ns, sample.end_ns) + values
    head = RECORD.pack(0, len(payload), KIND_SAMPLE, 0, 0, sample.end_ns)
    return (head + payload).ljust(whole_bytes(len(payload)), b"\0")


class CountersRenderer(RendererOver):
    """Turns samples into lines; the renderer of the GPU engine does the same with other records."""

    def __init__(
        self,
        device: ChannelRenderer,
        key: int,
        counters: Mapping[int, Sequence[Counter]],
        used: Mapping[int, Used],
    ) -> None:
        """`counters`: those of each GPU, in the order of a sample's values; `used`: what its sampler took so
        far.
        """
        super().__init__(device)
        self._key, self._counters, self._used = key, counters, used
        self._values = {gpu: struct.Struct(f"<{len(own)}d") for gpu, own in counters.items()}

    @property
    def sampling(self) -> list[dict[str, Any]]:
        """The processor time that the samplers took, in the form of a footer."""
        return [{"gpu": gpu, **used._asdict()} for gpu, used in sorted(self._used.items())]

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """The layer of a record's events, and how many it has."""
        return (_EVENT, 1) if self.is_own(record) else self._device.counted(record)

    def spans(self, wanted: Wanted) -> ChannelSpans:
        """A finder of calls and kernels among the records of the inner engine."""
        return self._device.spans(wanted)

    def anew(self) -> CountersRenderer:
        """A renderer like this one that has taken nothing."""
        return CountersRenderer(self._device.anew(), self._key, self._counters, self._used)

    def carry(self) -> ChannelCarry:
        """A keeper of what renderers need from evicted records, which is nothing of samples."""
        return SamplesCarry(self._device.carry())

    def is_own(self, record: GpuRecord) -> bool:
        """Whether the record is a sample."""
        return record.kind == KIND_SAMPLE

    def add(self, lines: Lines, record: GpuRecord) -> None:
        """Add the event of a sample. Raises one of REFUSALS."""
        key, gpu, start_ns, end_ns = _SAMPLE.unpack_from(record.payload)
        if key != self._key or gpu not in self._counters:
            raise Malformed
        values = self._values[gpu].unpack_from(record.payload, _SAMPLE.size)
        args = {
            counter.name: round(value / counter.scale, 3)
            for counter, value in zip(self._counters[gpu], values, strict=True)
            if math.isfinite(value)
        }
        event = {"ts_ns": start_ns, "type": _EVENT, "layer": GPU_COUNTERS, "name": GPU_COUNTERS, "phase": "C"}
        lines.record({**event, "dur_ns": end_ns - start_ns, "gpu": gpu, "args": args})


_FIRST_CUPTI: Final = (12, 8)
"""The first version that keeps the latest samples when the hardware's buffer is full."""


def start_counters(
    request: CaptureRequest, device: ChannelEngine | None, toolchain: Toolchain, notify: Notify
) -> CountersEngine:
    """Start sampling the counters of all GPUs that CUDA sees, and add them to the GPU engine, if any.

    Raises CaptureUnavailable.
    """
    assert request.gpu_counters_ns is not None
    toolchain.architectures()  # raises without a GPU
    gpus = [SampledGpu(index, gpu.uuid) for index, gpu in enumerate(toolchain.driver.gpus)]
    program = build_sampler(toolchain)
    with ExitStack() as started:
        lock = started.enter_context(SamplingLock(gpu.uuid for gpu in gpus))
        try:
            samplers = _begun(started, request.gpu_counters_ns, gpus, program, toolchain.owner)
        except NotPermitted:
            if os.geteuid() != 0 or toolchain.owner.uid == 0:
                raise
            # Root does not run what its caller compiled, and has a separate build.
            root = Owner(0, 0, Path("/root"))
            own = replace(toolchain, parts=find_parts(user=root), owner=root)
            samplers = _begun(started, request.gpu_counters_ns, gpus, build_sampler(own), root)
            notify("gpu counters: sampled as root, as the driver lets only administrators profile")
        for sampler in samplers:
            taken = {one.counter.name for one in sampler.sampled}
            missing = [counter.name for counter in COUNTERS if counter.name not in taken]
            if missing:
                notify(f"gpu counters: GPU {sampler.gpu.index} does not give {', '.join(missing)}")
        if device is None:
            owner = toolchain.owner.uid, toolchain.owner.gid
            device = NoGpus(owner, stacks=request.stacks)
            device.gpus = toolchain.driver.listed
        started.pop_all()
        return CountersEngine(device, samplers, lock, request.gpu_counters_ns)


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
