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
import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tracepipe.event.counters import GPU_COUNTERS
from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.gpu.engines.carries import ChannelCarry, SamplesCarry
from tracepipe.tracer.gpu.engines.channel_engine import ChannelEngine
from tracepipe.tracer.gpu.engines.channel_renderer import ChannelRenderer
from tracepipe.tracer.gpu.engines.counter_metrics import Counter, listed
from tracepipe.tracer.gpu.engines.over import EngineOver, RendererOver
from tracepipe.tracer.gpu.engines.sample_stream import SampleStream, Stretches
from tracepipe.tracer.gpu.engines.sampler import Sample, Sampler, Used
from tracepipe.tracer.gpu.engines.spans import ChannelSpans
from tracepipe.tracer.gpu.engines.transport import KIND_SAMPLE, RECORD, GpuRecord, whole_bytes
from tracepipe.tracer.gpu.engines.untrusted import Malformed
from tracepipe.tracer.gpu.sampling_lock import SamplingLock
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.record import Loss
from tracepipe.tracer.records.unrendered import Wanted

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
