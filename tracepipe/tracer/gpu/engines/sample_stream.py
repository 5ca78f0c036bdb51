"""Finds gaps in one GPU's samples, and leaves out samples outside of windows.

    sampler ──▶ checked ──▶ in order ──▶ waits until windows ──▶ in a window: kept; a gap there: a loss
                                         are known              outside: left out

The hardware silently overwrites samples that are not read from its buffer in time. Each sample begins where
the one before it ends, so a gap shows in the times. Under load and at 200 µs, samples came up to half a
second after later ones (H200, CUPTI 13.0): those after a gap wait until it is filled, a second at most.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tracepipe.event.counters import GPU_COUNTERS, SM_CLOCK
from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.gpu.engines.sampler import Overflow, Sample, Sampler
from tracepipe.tracer.gpu.engines.untrusted import MALFORMED
from tracepipe.tracer.records.bounds import COUNT_LIMIT, TIME_LIMIT_NS
from tracepipe.tracer.records.record import Loss

_SOON_NS: Final = 10**9  # a sample may end so far in the future, as clocks differ a little
_LATE_NS: Final = 10**9  # the longest wait for a sample that comes after later ones
_MUCH: Final = 1.25
"""A value may be this many times the greatest: the begin and the end of a sample are not the same instants
for all units. Rates of a short sample were up to 1.01 times the greatest (H200).
"""
_STEADY: Final = 0.01  # how much the clocks of the samples beside one differ at most, as a share
_LOW_STEADY, _LOW = 0.97, 0.8  # of the lower one of these clocks: a sample with less is not complete
_OF_SMS: Final = "sm__"  # CUPTI's prefix of what SMs count


@dataclass
class Stretches:
    """The stretches of time that are recorded, in order of time."""

    _turns: deque[Turn] = field(default_factory=deque)

    def turn(self, turn: Turn) -> None:
        """Recording begins, or ends."""
        self._turns.append(turn)

    def parts(self, start_ns: int, end_ns: int) -> Iterator[tuple[int, int]]:
        """The parts of a stretch of time that are recorded."""
        begin_ns: int | None = None
        for turn in (*self._turns, Turn(end_ns, begins=False)):
            if turn.begins:
                begin_ns = turn.ts_ns
            elif begin_ns is not None:
                part = max(begin_ns, start_ns), min(turn.ts_ns, end_ns)
                if part[0] < part[1]:
                    yield part
                begin_ns = None

    def forget_before(self, now_ns: int) -> None:
        """Forget earlier stretches, which are not asked for again."""
        while len(self._turns) > 1 and self._turns[1].ts_ns <= now_ns:
            self._turns.popleft()


@dataclass(frozen=True, slots=True)
class _Gap:
    start_ns: int
    end_ns: int
    reason: str


class SampleStream:
    """The samples of one GPU, in order of time."""

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
        self.news = ""
        """A message for the user, shown once."""
        self._is_over = False

    def take(self, now_ns: int) -> None:
        """Take what the sampler sent; never waits."""
        for item in self._sampler.read():
            if isinstance(item, Overflow):
                self._reason = "the hardware's buffer was full"
            elif self._can_be(item, now_ns):
                self._take(item)
            else:
                self._refused += 1
        while self._after_gap and (self._sampler.is_over or self._after_gap[0].end_ns < now_ns - _LATE_NS):
            self._give_up()
        if self._sampler.is_over and not self._is_over:
            self._is_over = True
            if not self._sampler.is_whole:
                self.news = f"GPU {self._sampler.gpu.index} is no longer sampled: {self._sampler.why}"

    def _can_be(self, sample: Sample, now_ns: int) -> bool:
        """Whether a sample is plausible: it follows those before it, and is not in the future."""
        before_ns = -1 if self._until_ns is None else self._until_ns - self._interval_ns // 2
        return before_ns <= sample.start_ns < sample.end_ns <= min(now_ns + _SOON_NS, TIME_LIMIT_NS)

    def _take(self, sample: Sample) -> None:
        bisect.insort(self._after_gap, sample)
        self._accept()
        if not self._after_gap:
            self._reason = ""

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

    def _give_up(self) -> None:
        """Make the first gap a loss, and accept the samples up to the next one."""
        if self._until_ns is not None:
            reason = self._reason or "the hardware returned no sample"
            self._waiting.append(_Gap(self._until_ns, self._after_gap[0].start_ns, reason))
        self._reason, self._until_ns = "", None
        self._accept()

    def end(self, now_ns: int, stretches: Stretches) -> Iterator[Loss]:
        """End the stream: what a sampler that failed did not send is a loss."""
        if not self._sampler.is_whole:
            why = self._sampler.why or "its sampler did not answer"
            yield from self._lost(_Gap(self._until_ns or 0, now_ns, why), stretches)

    def kept(self, before_ns: int, stretches: Stretches, losses: list[Loss]) -> Iterator[Sample]:
        """The samples that ended before an instant and began in a stretch; gaps are added to `losses`."""
        while self._waiting and self._waiting[0].end_ns <= before_ns and self._can_be_judged():
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

    def _can_be_judged(self) -> bool:
        """Whether the sample that follows the first one is known, or none follows."""
        return self._clock is None or len(self._waiting) > 1 or self._is_over

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
            text = f"GPU {self._sampler.gpu.index}: {reason}"
            losses.append(Loss(GPU_COUNTERS, 1, sample.start_ns, sample.end_ns, text))
        return sample._replace(values=tuple(values)) if reasons else sample

    def _lost(self, gap: _Gap, stretches: Stretches) -> Iterator[Loss]:
        reason = f"GPU {self._sampler.gpu.index}: {gap.reason}"
        for start_ns, end_ns in stretches.parts(gap.start_ns, gap.end_ns):
            count = min(math.ceil((end_ns - start_ns) / self._interval_ns - 0.5), COUNT_LIMIT)
            if count > 0:
                yield Loss(GPU_COUNTERS, count, start_ns, end_ns, reason)
