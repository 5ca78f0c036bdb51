"""The engine of counters: what the hardware of the GPUs counts, sampled by processes of our own.

    capture ─┬─▶ Sampler of GPU 0 ──▶ SampleStream ─┐
             ├─▶ Sampler of GPU 1 ──▶ SampleStream ─┼─▶ records in the chunks of the engine for GPUs ──▶ lines
             …                                     ─┘

Nothing is loaded into the command, and nothing of it is waited for. A sampler that ends leaves a loss.

Record of a sample, after the head that `transport` has:

    0      8     12    16           24         32
    | key  | gpu | 0   | start_ns   | end_ns   | value f64 of each counter …

The key is a secret of this capture: a process of the command that writes such records has them refused.
"""

from __future__ import annotations

import math
import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Final

from tracepipe.capture.engines.engine import Turn
from tracepipe.capture.gpu.engines.carries import ChannelCarry, SamplesCarry
from tracepipe.capture.gpu.engines.channel_engine import ChannelEngine
from tracepipe.capture.gpu.engines.channel_renderer import ChannelRenderer
from tracepipe.capture.gpu.engines.counter_metrics import Counter, listed
from tracepipe.capture.gpu.engines.over import EngineOver, RendererOver
from tracepipe.capture.gpu.engines.sample_stream import SampleStream, Stretches
from tracepipe.capture.gpu.engines.sampler import Sample, Sampler
from tracepipe.capture.gpu.engines.spans import ChannelSpans
from tracepipe.capture.gpu.engines.transport import KIND_SAMPLE, RECORD, GpuRecord, whole_bytes
from tracepipe.capture.gpu.engines.untrusted import Malformed
from tracepipe.capture.gpu.sampling_lock import SamplingLock
from tracepipe.capture.records.counter_names import GPU_COUNTERS
from tracepipe.capture.records.line import Lines
from tracepipe.capture.records.loss import Loss
from tracepipe.capture.records.spans import Wanted

_EVENT: Final = "hook"
_SAMPLE: Final = struct.Struct("<QI4xQQ")
# How long it may take until it is known that a window has begun or ended: a sample is kept or left out then.
_HOLD_NS: Final = 250_000_000
_EVER_NS: Final = 1 << 63


class CountersEngine(EngineOver):
    """The counters of GPUs that are being sampled, around an engine for a command's GPUs."""

    def __init__(
        self, device: ChannelEngine, samplers: Sequence[Sampler], lock: SamplingLock, interval_ns: int
    ) -> None:
        """`samplers` have begun, and are ended with the engine, as is the lock of their GPUs."""
        self._key = secrets.randbits(64)
        self._samplers, self._lock = samplers, lock
        self._streams = [SampleStream(sampler, interval_ns) for sampler in samplers]
        self._stretches = Stretches()
        self._hold_ns = 0
        self._losses: list[Loss] = []
        of_gpus = {sampler.gpu.index: [one.counter for one in sampler.sampled] for sampler in samplers}
        super().__init__(
            device,
            CountersRenderer(device.renderer(), self._key, of_gpus),
            name="pm sampling",
            layers=frozenset({_EVENT}),
        )
        self.counters = [
            one for sampler in samplers for one in listed(sampler.gpu.index, interval_ns, sampler.sampled)
        ]

    def expect_windows(self, waited_for: Mapping[str, str]) -> None:
        """Events are recorded in windows alone: samples wait until those are known."""
        self._hold_ns = _HOLD_NS
        super().expect_windows(waited_for)

    def turned(self, turn: Turn) -> None:
        """Samples are kept from a begin on, until the end after it."""
        self._stretches.turn(turn)
        super().turned(turn)

    def collect(self, *, is_final: bool = False) -> bytes:
        """Whole records since the last call; never waits. `is_final`: no more comes."""
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
            if stream.news:
                self._renderer.news.append(stream.news)
                stream.news = ""
        self._stretches.forget_before(before_ns - _HOLD_NS)
        return b"".join(made)

    def lost(self) -> list[Loss]:
        """Losses since the last call: gaps, and what the inner engine lost."""
        losses, self._losses = self._losses, []
        return super().lost() + losses

    def stop(self) -> None:
        """Ask the samplers and the processes to send what they have yet, and to record no more."""
        for sampler in self._samplers:
            sampler.stop()
        super().stop()

    def is_over(self) -> bool:
        """Whether all of them have, or are gone."""
        return super().is_over() and all(sampler.is_over for sampler in self._samplers)

    def close(self) -> None:
        """End the samplers and let others sample the GPUs; give the channel back."""
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
    """Turns samples into lines, and other records by the renderer of the engine for GPUs."""

    def __init__(self, device: ChannelRenderer, key: int, counters: Mapping[int, Sequence[Counter]]) -> None:
        """`counters`: those of each GPU, in the order of a sample's values."""
        super().__init__(device)
        self._key, self._counters = key, counters
        self._values = {gpu: struct.Struct(f"<{len(own)}d") for gpu, own in counters.items()}

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """The layer of a record's events, and how many it has."""
        return (_EVENT, 1) if self.is_own(record) else self._device.counted(record)

    def spans(self, wanted: Wanted) -> ChannelSpans:
        """What finds calls and kernels among the records of the inner engine."""
        return self._device.spans(wanted)

    def anew(self) -> CountersRenderer:
        """A renderer like this one that has taken nothing."""
        return CountersRenderer(self._device.anew(), self._key, self._counters)

    def carry(self) -> ChannelCarry:
        """What keeps of dropped records what such a renderer needs of them: of samples nothing."""
        return SamplesCarry(self._device.carry())

    def is_own(self, record: GpuRecord) -> bool:
        """Whether it is a sample."""
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
