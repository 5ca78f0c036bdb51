"""The counters of GPUs: hardware counters, sampled by processes of tracepipe.

    capture ─┬─▶ Sampler of GPU 0 ──▶ OrderedSamples ─┐
             ├─▶ Sampler of GPU 1 ──▶ OrderedSamples ─┼─▶ records beside those of the channel ──▶ lines
             …                                       ─┘

Nothing is loaded into the command, and it is never waited for. If a sampler ends early, that is a loss.

The record of a sample, after the head that `channel.RECORD` reads:

    0      8     12    16           24         32
    | key  | gpu | 0   | start_ns   | end_ns   | value f64 of each counter …

The key is a secret of this capture: such records are refused if a process of the command writes them.
"""

from __future__ import annotations

import bisect
import fcntl
import math
import os
import secrets
import select
import signal
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from tracepipe.errors import CaptureUnavailable
from tracepipe.event.counters import (
    DRAM_READ,
    DRAM_READ_SHARE,
    DRAM_WRITE,
    DRAM_WRITE_SHARE,
    GPU_COUNTERS,
    SM_ACTIVE,
    SM_CLOCK,
    TENSOR_ACTIVE,
)
from tracepipe.event.model import COUNT_LIMIT, TIME_LIMIT_NS
from tracepipe.printable import printable
from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.gpu.build.driver import Owner, driver_environment
from tracepipe.tracer.gpu.build.toolchain import INSTALL, NATIVE, Toolchain, find_parts
from tracepipe.tracer.gpu.engines.channel import MALFORMED, RECORD, GpuRecord, Kind, Malformed, whole_bytes
from tracepipe.tracer.gpu.engines.streams import Decoder, Recording, RecordStream
from tracepipe.tracer.gpu.sampling_lock import SamplingLock
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.record import Loss
from tracepipe.tracer.request import Notify

MEMORY_PEAK: Final = "memory"
"""The bytes per second that the GPU's memory can carry by its clock and width. CUPTI's own metric for it gave
no usable value while the GPU was idle (H200, CUPTI 13.0)."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter as the file has it: a metric's value divided by `scale` is in `unit`. `metrics` are
    CUPTI's, each with the metric of its greatest possible value, or MEMORY_PEAK; "" if there is none.
    `greatest` is the counter's greatest possible value; None if only the GPU knows it, or if it is not known.
    """

    name: str
    unit: str
    metrics: dict[str, str]
    scale: float = 1.0
    greatest: float | None = None


def _counter(name: str, unit: str, *counted: str, peak: str = "") -> Counter:
    """A counter of a usual unit. A percentage is of the hardware's peak over all of the time, busy or not."""
    ending, scale, greatest = {
        "%": (".pct_of_peak_sustained_elapsed", 1.0, 100.0),
        "MHz": (".avg.per_second", 1e6, None),
    }.get(unit, (".sum.per_second", 1e9, None))
    return Counter(name, unit, {f"{one}{ending}": peak for one in counted}, scale, greatest)


# Architectures differ in their metrics, and in what they can count in one pass. So each counter has metrics
# in order of preference, and the sampler takes the first that can be combined with the metrics chosen before
# it. The most important counters come first.
COUNTERS: Final = (
    _counter(SM_ACTIVE, "%", "sm__cycles_active.avg"),
    # On an H200, one of 30 samples of `…_realtime`, which fits beside more metrics, was a multiple of 100%.
    _counter(
        TENSOR_ACTIVE, "%", "sm__pipe_tensor_cycles_active.avg", "sm__pipe_tensor_cycles_active_realtime.avg"
    ),
    _counter(DRAM_READ, "GB/s", "dram__bytes_read", peak=MEMORY_PEAK),
    _counter(DRAM_WRITE, "GB/s", "dram__bytes_write", peak=MEMORY_PEAK),
    _counter(DRAM_READ_SHARE, "%", "dram__bytes_read.sum", "dram__read_throughput.avg"),
    _counter(DRAM_WRITE_SHARE, "%", "dram__bytes_write.sum", "dram__write_throughput.avg"),
    _counter(SM_CLOCK, "MHz", "sm__cycles_elapsed"),
    _counter("SM warps active %", "%", "sm__warps_active_realtime.avg", "sm__warps_active.avg"),
    Counter(
        "SM instructions per cycle",
        "warp instructions",
        {
            f"{one}.avg.per_cycle_elapsed": f"{one}.avg.peak_sustained"
            for one in ("sm__inst_executed", "sm__inst_executed_realtime")
        },
    ),
    _counter("GR active %", "%", "gr__cycles_active.avg"),
    _counter("L2 sectors G/s", "G/s", "lts__t_sectors"),
    _counter("PCIe read GB/s", "GB/s", "pcie__read_bytes"),
    _counter("PCIe write GB/s", "GB/s", "pcie__write_bytes"),
    _counter("system clock MHz", "MHz", "sys__cycles_elapsed"),
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled counter of a GPU, its metric, and its greatest possible value if that is known."""

    counter: Counter
    metric: str
    greatest: float | None


def listed(gpu: int, interval_ns: int, sampled: Sequence[Sampled]) -> list[dict[str, Any]]:
    """The counters of a GPU in the form of a header."""
    return [
        {
            "gpu": gpu,
            "name": one.counter.name,
            "unit": one.counter.unit,
            "metric": one.metric,
            "interval_ns": interval_ns,
            **({} if one.greatest is None else {"max": round(one.greatest, 3)}),
        }
        for one in sampled
    ]


_BEGIN_S: Final = 60  # CUPTI's setup took below a second; a machine of eight GPUs that slept takes longer
# The usual limit for users without privileges. It has room for seconds of samples, while probes are attached.
_PIPE_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 18
_TEXT_MAX: Final = 300
_HEAD: Final = struct.Struct("<IHH")
_RECORD_MAX: Final = 4096
_CHOSEN: Final = struct.Struct("<IId")
_TIMES: Final = struct.Struct("<QQ")
_RESULT: Final = struct.Struct("<I")
_KIND_CHOSEN, _KIND_READY, _KIND_SAMPLE, _KIND_OVERFLOW, _KIND_FAILED, _KIND_END = range(1, 7)
_TICK_NS: Final = 10**9 // os.sysconf("SC_CLK_TCK")
_CLOCK_NS: Final = 10 * 10**9  # the greatest error of a sample's time that is on CLOCK_MONOTONIC

# CUptiResult → what the user can do. 35 and 40 are CUPTI_ERROR_INSUFFICIENT_PRIVILEGES and its counterpart on
# virtual machines, 26 is CUPTI_ERROR_HARDWARE_BUSY, and 27 is of machines whose setup has no sampling.
_PRIVILEGE: Final = frozenset({35, 40})
ADMIN_ONLY_HINT: Final = (
    "Run it with sudo, or set this driver option: options nvidia NVreg_RestrictProfilingToAdminUsers=0 "
    "in a file of /etc/modprobe.d, then reload the driver."
)
_HINTS: Final = {
    **dict.fromkeys(_PRIVILEGE, ADMIN_ONLY_HINT),
    26: "End the other profiler that uses the GPU's hardware (Nsight, DCGM's profiling metrics).",
    27: "Use a GPU of compute capability 8.6 or later, and not a MIG instance.",
}
_HINT: Final = "Leave --gpu-counters out to record the rest."


class NotPermitted(CaptureUnavailable):
    """The driver lets only administrators sample."""


class Sample(NamedTuple):
    """The means of the counters between two instants, on CLOCK_MONOTONIC."""

    start_ns: int
    end_ns: int
    values: tuple[float, ...]


class Used(NamedTuple):
    """The processor time that the process took, in ns, and the time for which it ran until then."""

    cpu_ns: int
    elapsed_ns: int


class Overflow(NamedTuple):
    """The hardware's buffer was full: samples are missing at this place."""


class Sampler:
    """The process that samples one GPU's counters, `native/pm_sampler.cpp`. It ends with this process, or
    when `stop` is called.

    The program is tracepipe's, but it loads NVIDIA's libraries, and it runs as the command's user where that
    user may sample. So its output is treated as untrusted: it is bounded and checked.
    """

    def __init__(
        self,
        program: Path,
        gpu: int,
        uuid: str,
        interval_ns: int,
        counters: Sequence[Counter],
        *,
        run_as: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        """Start the process; `begin` waits for its setup. Raises CaptureUnavailable."""
        self.gpu, self._counters = gpu, counters
        self.sampled: list[Sampled] = []
        self.why = ""
        """Why it ended before `stop` was called."""
        self.is_over = False
        """Whether all of its output has been read."""
        self.is_whole = False
        """Whether the output has all samples."""
        self.used: Used | None = None
        """As of the last samples that were read; its setup is left out. None: before that."""
        self._ready_ns = self._ready_cpu_ns = 0
        self._failure = 0
        self._values: struct.Struct | None = None
        """The values of a sample; None until it samples."""
        self._pending = bytearray()
        self._items: list[Sample | Overflow] = []
        digits = uuid.removeprefix("GPU-").replace("-", "")
        choices = (
            ",".join(f"{name}={peak}" if peak else name for name, peak in counter.metrics.items())
            for counter in counters
        )
        try:
            self._process = subprocess.Popen(
                [str(program), str(gpu), digits, str(interval_ns), *choices],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is for the capture alone
                **run_as,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise CaptureUnavailable(
                f"The sampler of GPU counters cannot be started: {error}.", _HINT
            ) from None
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        with suppress(OSError):  # an administrator may allow less
            fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def begin(self) -> None:
        """Wait until it samples; `sampled` has the counters then. Raises CaptureUnavailable, NotPermitted."""
        ends_s = time.monotonic() + _BEGIN_S
        while self._values is None and not self.is_over and time.monotonic() < ends_s:
            select.select([self._output], [], [], 1.0)
            self._fill()
        if self._values is None:
            why = self.why or f"it did not start within {_BEGIN_S} s"
        else:
            self._ready_ns, self._ready_cpu_ns = time.monotonic_ns(), self._cpu_ns() or 0
            first = self._items[0] if self._items else None
            if not isinstance(first, Sample) or abs(time.monotonic_ns() - first.end_ns) <= _CLOCK_NS:
                return
            why = "CUPTI's times are not of CLOCK_MONOTONIC"
        self.close()
        kind = CaptureUnavailable
        if self._failure in _PRIVILEGE:
            kind, why = NotPermitted, f"the driver lets only administrators profile ({why})"
        raise kind(
            f"The counters of GPU {self.gpu} cannot be sampled: {why}.",
            _HINTS.get(self._failure, _HINT),
        )

    def read(self) -> list[Sample | Overflow]:
        """The samples since the last call; never waits."""
        self._fill()
        if self._items and (cpu_ns := self._cpu_ns()) is not None:
            self.used = Used(cpu_ns - self._ready_cpu_ns, time.monotonic_ns() - self._ready_ns)
        items, self._items = self._items, []
        return items

    def stop(self) -> None:
        """Ask it to send its remaining samples and to end; never waits."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()

    def close(self) -> None:
        """Kill the process if it still runs."""
        self.stop()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self.is_over = True

    def _cpu_ns(self) -> int | None:
        """The processor time of the process until now; None if it has ended."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return None
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) * _TICK_NS

    def _fill(self) -> None:
        """Read and take the records that are there. At the end of the output, set `is_over` and `why`."""
        while not self.is_over and len(self._pending) < _PIECE_BYTES:
            try:
                piece = os.read(self._output, _PIECE_BYTES)
            except BlockingIOError:
                break
            self._pending += piece
            if not piece:
                self.is_over = True
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=1.0)
                code = self._process.returncode
                how = "closed its output" if code is None else f"ended with {code}"
                if code is not None and code < 0:
                    known = {number.value: number.name for number in signal.Signals}
                    how = f"ended with signal {-code} ({known.get(-code, 'a real-time signal')})"
                self.why = self.why or f"its sampler {how}"
        at, is_valid = 0, True
        while len(self._pending) >= at + _HEAD.size:
            length, kind, _ = _HEAD.unpack_from(self._pending, at)
            is_valid, end = length <= _RECORD_MAX, at + _HEAD.size + length
            if not is_valid or len(self._pending) < end:
                break
            is_valid = self._take(kind, bytes(self._pending[at + _HEAD.size : end]))
            if not is_valid:
                break
            at = end
        del self._pending[:at]
        if not is_valid:  # read no more
            self.why = "its sampler wrote something that is not a record"
            self._pending.clear()
            self.is_over = True

    def _take(self, kind: int, payload: bytes) -> bool:
        """Take a record: of the setup until it samples, then of samples. False if it is not valid."""
        values = self._values
        if kind == _KIND_FAILED:
            if len(payload) >= _RESULT.size:
                (self._failure,) = _RESULT.unpack_from(payload)
                self.why = printable(payload[_RESULT.size :].decode(errors="replace"))[:_TEXT_MAX]
        elif values is None and kind == _KIND_CHOSEN and len(payload) == _CHOSEN.size:
            choice, metric, peak = _CHOSEN.unpack(payload)
            if choice >= len(self._counters) or metric >= len(self._counters[choice].metrics):
                return False
            counter = self._counters[choice]
            known = peak / counter.scale if math.isfinite(peak) and peak > 0 else None
            self.sampled.append(Sampled(counter, list(counter.metrics)[metric], counter.greatest or known))
        elif values is None and kind == _KIND_READY and self.sampled:
            self._values = struct.Struct(f"<{len(self.sampled)}d")
        elif values and kind == _KIND_SAMPLE and len(payload) == _TIMES.size + values.size:
            start_ns, end_ns = _TIMES.unpack_from(payload)
            self._items.append(Sample(start_ns, end_ns, values.unpack_from(payload, _TIMES.size)))
        elif values and kind == _KIND_OVERFLOW:
            self._items.append(Overflow())
        elif values and kind == _KIND_END:
            self.is_whole = True
        else:
            return False
        return True


_SOON_NS: Final = 10**9  # a sample may end so far in the future, as clocks differ a little
_LATE_NS: Final = 10**9  # the longest wait for a sample that comes after later ones
_MUCH: Final = 1.25
"""A value may be this many times the greatest: the begin and the end of a sample are not the same instants
for all units. Rates of a short sample were up to 1.01 times the greatest (H200).
"""
_STEADY: Final = 0.01  # how much the clocks of the samples beside one differ at most, as a share
_LOW_STEADY, _LOW = 0.97, 0.8  # of the lower one of these clocks: a sample with less is not complete
_OF_SMS: Final = "sm__"  # CUPTI's prefix of what SMs count


class Stretches(deque[Turn]):
    """The stretches of time that are recorded, as their begins and ends in order of time."""

    def parts(self, start_ns: int, end_ns: int) -> Iterator[tuple[int, int]]:
        """The parts of a stretch of time that are recorded."""
        begin_ns: int | None = None
        for turn in (*self, Turn(end_ns, begins=False)):
            if turn.begins:
                begin_ns = turn.ts_ns
            elif begin_ns is not None:
                part = max(begin_ns, start_ns), min(turn.ts_ns, end_ns)
                if part[0] < part[1]:
                    yield part
                begin_ns = None

    def forget_before(self, now_ns: int) -> None:
        """Forget earlier stretches, which are not asked for again."""
        while len(self) > 1 and self[1].ts_ns <= now_ns:
            self.popleft()


@dataclass(frozen=True, slots=True)
class _Gap:
    start_ns: int
    end_ns: int
    reason: str


class OrderedSamples:
    """The samples of one GPU, in order of time: finds gaps, and leaves out samples outside of windows.

    sampler ──▶ checked ──▶ in order ──▶ waits until windows ──▶ in a window: returned; a gap there: a loss
                                         are known              outside: left out

    The hardware silently overwrites samples that are not read from its buffer in time. Each sample begins
    where the one before it ends, so a gap shows in the times. Under load and at 200 µs, samples came up to
    half a second after later ones (H200, CUPTI 13.0): those after a gap wait until it is filled, a second at
    most.
    """

    def __init__(self, sampler: Sampler, interval_ns: int) -> None:
        """`sampler` has begun."""
        self._sampler, self._interval_ns = sampler, interval_ns
        self._after_gap: list[Sample] = []
        """In order of time."""
        self._waiting: deque[Sample | _Gap] = deque()
        self._until_ns: int | None = None
        """The end of the last sample before the first gap."""
        self._reason = ""
        self._refused = 0
        self._limits = [
            _MUCH * one.greatest * one.counter.scale if one.greatest else math.inf for one in sampler.sampled
        ]
        self._of_sms = [one.metric.startswith(_OF_SMS) for one in sampler.sampled]
        self._clock = next(
            (at for at, one in enumerate(sampler.sampled) if one.counter.name == SM_CLOCK), None
        )
        self._clock_before = math.nan
        """The SMs' clock in the last complete sample."""
        self._is_over = False

    def read(self, now_ns: int) -> str:
        """Read what the sampler sent; never waits. Returns a message for the user, or ""."""
        for item in self._sampler.read():
            if isinstance(item, Overflow):
                self._reason = "the hardware's buffer was full"
                continue
            # A sample follows those before it, and is not in the future.
            before_ns = -1 if self._until_ns is None else self._until_ns - self._interval_ns // 2
            if before_ns <= item.start_ns < item.end_ns <= min(now_ns + _SOON_NS, TIME_LIMIT_NS):
                bisect.insort(self._after_gap, item)
                self._accept()
                if not self._after_gap:
                    self._reason = ""
            else:
                self._refused += 1
        while self._after_gap and (self._sampler.is_over or self._after_gap[0].end_ns < now_ns - _LATE_NS):
            if self._until_ns is not None:  # the first gap stays
                reason = self._reason or "the hardware returned no sample"
                self._waiting.append(_Gap(self._until_ns, self._after_gap[0].start_ns, reason))
            self._reason, self._until_ns = "", None
            self._accept()
        if self._sampler.is_over and not self._is_over:
            self._is_over = True
            if not self._sampler.is_whole:
                return f"GPU {self._sampler.gpu} is no longer sampled: {self._sampler.why}"
        return ""

    def _accept(self) -> None:
        """Accept the samples before the first gap. One that begins long before the end of another is none."""
        taken = 0
        for sample in self._after_gap:
            ahead_ns = 0 if self._until_ns is None else sample.start_ns - self._until_ns
            if ahead_ns > self._interval_ns // 2:
                break
            taken += 1
            if ahead_ns < -self._interval_ns // 2:
                self._refused += 1
            else:
                self._waiting.append(sample)
                self._until_ns = sample.end_ns
        del self._after_gap[:taken]

    def end(self, now_ns: int, stretches: Stretches) -> Iterator[Loss]:
        """End the stream: what a sampler that failed did not send is a loss."""
        if not self._sampler.is_whole:
            why = self._sampler.why or "its sampler did not answer"
            yield from self._lost(_Gap(self._until_ns or 0, now_ns, why), stretches)

    def recorded(self, before_ns: int, stretches: Stretches, losses: list[Loss]) -> Iterator[Sample]:
        """The samples that ended before an instant and began in a stretch; gaps are added to `losses`."""
        while self._waiting and self._waiting[0].end_ns <= before_ns:
            if self._clock is not None and len(self._waiting) == 1 and not self._is_over:
                break  # it can be judged when the sample that follows it is known
            item = self._waiting.popleft()
            if isinstance(item, _Gap):
                losses += self._lost(item, stretches)
                continue
            is_complete = self._is_complete(item)
            if any(stretches.parts(item.start_ns, item.start_ns + 1)):
                yield self._measured(item, is_complete, losses)
        if self._refused:
            losses.append(Loss(GPU_COUNTERS, self._refused, before_ns, before_ns, MALFORMED))
            self._refused = 0

    def _is_complete(self, sample: Sample) -> bool:
        """Whether its SMs were counted for the whole time."""
        following = self._waiting[0] if self._waiting else None
        if self._clock is None:
            return True
        clock, before = sample.values[self._clock], self._clock_before
        if isinstance(following, Sample):
            after = following.values[self._clock]
            lower = min(before, after)
            low = _LOW_STEADY if abs(before - after) <= _STEADY * lower else _LOW
            if clock < low * lower:  # never of the first one, as its `before` is not a number
                return False
        self._clock_before = clock
        return True

    def _measured(self, sample: Sample, is_complete: bool, losses: list[Loss]) -> Sample:
        """The sample without values that are no measurements."""
        values, reasons = list(sample.values), list[str]()
        for at, one in enumerate(self._sampler.sampled):
            if self._of_sms[at] and not is_complete:
                values[at] = math.nan
            elif values[at] > self._limits[at]:
                values[at] = math.nan
                reasons.append(f"an impossible value of {one.counter.name}")
        if not is_complete:
            reasons.append("its SMs were counted for a part of the sample only")
        for reason in reasons:
            text = f"GPU {self._sampler.gpu}: {reason}"
            losses.append(Loss(GPU_COUNTERS, 1, sample.start_ns, sample.end_ns, text))
        return sample._replace(values=tuple(values)) if reasons else sample

    def _lost(self, gap: _Gap, stretches: Stretches) -> Iterator[Loss]:
        reason = f"GPU {self._sampler.gpu}: {gap.reason}"
        for start_ns, end_ns in stretches.parts(gap.start_ns, gap.end_ns):
            count = min(math.ceil((end_ns - start_ns) / self._interval_ns - 0.5), COUNT_LIMIT)
            if count > 0:
                yield Loss(GPU_COUNTERS, count, start_ns, end_ns, reason)


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
        self.decoders = (partial(SampleDecoder, key=self._key, samplers=samplers),)
        self.counters = [
            one for sampler in samplers for one in listed(sampler.gpu, interval_ns, sampler.sampled)
        ]

    def expect_windows(self) -> None:
        self._hold_ns = _HOLD_NS

    def turned(self, turn: Turn) -> None:
        """Samples are kept from a begin until the end after it."""
        self._stretches.append(turn)

    def collect(self, news: list[str], *, is_final: bool) -> bytes:
        now_ns = time.monotonic_ns()
        before_ns = now_ns - self._hold_ns
        made: list[bytes] = []
        for samples, sampler in zip(self._samples, self._samplers, strict=True):
            if message := samples.read(now_ns):
                news.append(message)
            until_ns = _EVER_NS if is_final else before_ns
            recorded = samples.recorded(until_ns, self._stretches, self._losses)
            for sample in recorded:
                payload = _SAMPLE.pack(self._key, sampler.gpu, sample.start_ns, sample.end_ns)
                payload += struct.pack(f"<{len(sample.values)}d", *sample.values)
                head = RECORD.pack(0, len(payload), Kind.SAMPLE, 0, 0, sample.end_ns)
                made.append((head + payload).ljust(whole_bytes(len(payload)), b"\0"))
            if is_final:
                self._losses += samples.end(now_ns, self._stretches)
        self._stretches.forget_before(before_ns - _HOLD_NS)
        return b"".join(made)

    def lost(self) -> list[Loss]:
        losses, self._losses = self._losses, []
        return losses

    def stop(self) -> None:
        for sampler in self._samplers:
            sampler.stop()

    def is_over(self) -> bool:
        return all(sampler.is_over for sampler in self._samplers)

    def close(self) -> None:
        for sampler in self._samplers:
            sampler.close()
        self._lock.close()


class SampleDecoder(Decoder):
    """Makes lines of samples. Nothing of them is needed later."""

    kinds = frozenset({Kind.SAMPLE})
    layers: ClassVar[Mapping[int, str]] = {Kind.SAMPLE: _EVENT}

    def __init__(self, recording: Recording, key: int, samplers: Sequence[Sampler]) -> None:
        """`samplers` have begun; a sample has the values of its GPU's counters in their order."""
        super().__init__(recording)
        self._key, self._samplers = key, samplers
        self._counters = {sampler.gpu: [one.counter for one in sampler.sampled] for sampler in samplers}

    @property
    def sampling(self) -> list[dict[str, Any]]:
        used = [(sampler.gpu, sampler.used) for sampler in self._samplers]
        return [{"gpu": gpu, **one._asdict()} for gpu, one in sorted(used) if one is not None]

    def add(self, lines: Lines, record: GpuRecord) -> None:
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
    uuids = [gpu.uuid for gpu in toolchain.driver.gpus]
    program = build_sampler(toolchain)
    with ExitStack() as started:
        lock = started.enter_context(SamplingLock(uuids))
        try:
            samplers = _begun(started, interval_ns, uuids, program, toolchain.owner)
        except NotPermitted:
            if os.geteuid() != 0 or toolchain.owner.uid == 0:
                raise
            # Root does not run what its caller compiled, and has a separate build.
            root = Owner(0, 0, Path("/root"))
            own = replace(toolchain, parts=find_parts(user=root), owner=root)
            samplers = _begun(started, interval_ns, uuids, build_sampler(own), root)
            notify("gpu counters: sampled as root, as the driver lets only administrators profile")
        for sampler in samplers:
            taken = {one.counter.name for one in sampler.sampled}
            missing = [counter.name for counter in COUNTERS if counter.name not in taken]
            if missing:
                notify(f"gpu counters: GPU {sampler.gpu} does not give {', '.join(missing)}")
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
    return toolchain.build_host(NATIVE / "pm_sampler.cpp", ["cupti"], is_program=True)


def _begun(
    started: ExitStack, interval_ns: int, uuids: list[str], program: Path, user: Owner
) -> list[Sampler]:
    """Start a sampler for each GPU, and wait until all sample; their setups run at the same time."""
    environment = driver_environment()
    if user.uid == 0 and os.environ.get("SUDO_UID"):
        environment.pop("LD_LIBRARY_PATH", None)  # it is the caller's, and root loads none of their libraries
    samplers = []
    for gpu, uuid in enumerate(uuids):
        sampler = Sampler(
            program, gpu, uuid, interval_ns, COUNTERS, run_as=user.run_as, environment=environment
        )
        started.callback(sampler.close)
        samplers.append(sampler)
    for sampler in samplers:
        sampler.begin()
    return samplers
