"""Finds gaps in one GPU's samples, and leaves out samples outside of windows.

    sampler ──▶ checked ──▶ waits until windows ──▶ in a window: kept; a gap there: a loss
                            are known              outside: left out

The hardware silently overwrites samples that are not read from its buffer in time. Each sample begins where
the one before it ends, so a gap shows in the times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tracepipe.capture.engines.engine import Turn
from tracepipe.capture.gpu.engines.sampler import Overflow, Sample, Sampler
from tracepipe.capture.gpu.engines.untrusted import MALFORMED
from tracepipe.capture.records.bounds import COUNT_LIMIT, TIME_LIMIT_NS
from tracepipe.capture.records.counter_names import GPU_COUNTERS
from tracepipe.capture.records.loss import Loss

_SOON_NS: Final = 10**9  # a sample may end so far in the future, as clocks differ a little
_MUCH: Final = 1.25
"""A value may be so many times the greatest: the begin and the end of a sample are not the same instants for
all units. Rates of a short sample were up to 1.01 times the greatest (H200)."""


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
        self._waiting: deque[Sample | _Gap] = deque()
        self._until_ns: int | None = None
        """The end of the last sample."""
        self._reason = ""
        self._refused = 0
        self._limits = [
            _MUCH * one.greatest * one.counter.scale if one.greatest else math.inf for one in sampler.sampled
        ]
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
        if self._sampler.is_over and not self._is_over:
            self._is_over = True
            if not self._sampler.is_whole:
                self.news = f"GPU {self._sampler.gpu.index} is no longer sampled: {self._sampler.why}"

    def _can_be(self, sample: Sample, now_ns: int) -> bool:
        """Whether a sample is plausible: it follows those before it, and is not in the future."""
        before_ns = -1 if self._until_ns is None else self._until_ns - self._interval_ns // 2
        return before_ns <= sample.start_ns < sample.end_ns <= min(now_ns + _SOON_NS, TIME_LIMIT_NS)

    def _take(self, sample: Sample) -> None:
        until_ns = self._until_ns
        if until_ns is not None and sample.start_ns - until_ns > self._interval_ns // 2:
            self._waiting.append(
                _Gap(until_ns, sample.start_ns, self._reason or "the hardware returned no sample")
            )
        self._reason = ""
        self._waiting.append(sample)
        self._until_ns = sample.end_ns

    def end(self, now_ns: int, stretches: Stretches) -> Iterator[Loss]:
        """End the stream: what a sampler that failed did not send is a loss."""
        if not self._sampler.is_whole:
            why = self._sampler.why or "its sampler did not answer"
            yield from self._lost(_Gap(self._until_ns or 0, now_ns, why), stretches)

    def kept(self, before_ns: int, stretches: Stretches, losses: list[Loss]) -> Iterator[Sample]:
        """The samples that ended before an instant and began in a stretch; gaps are added to `losses`."""
        while self._waiting and self._waiting[0].end_ns <= before_ns:
            item = self._waiting.popleft()
            if isinstance(item, _Gap):
                losses += self._lost(item, stretches)
            elif any(stretches.parts(item.start_ns, item.start_ns + 1)):
                yield self._possible(item, losses)
        if self._refused:
            losses.append(Loss(GPU_COUNTERS, self._refused, before_ns, before_ns, MALFORMED))
            self._refused = 0

    def _possible(self, sample: Sample, losses: list[Loss]) -> Sample:
        """The sample without values that cannot be."""
        possible = tuple(
            value if value <= limit else math.nan
            for value, limit in zip(sample.values, self._limits, strict=True)
        )
        for one, value, kept in zip(self._sampler.sampled, sample.values, possible, strict=True):
            if math.isnan(kept) and not math.isnan(value):
                reason = f"GPU {self._sampler.gpu.index}: an impossible value of {one.counter.name}"
                losses.append(Loss(GPU_COUNTERS, 1, sample.start_ns, sample.end_ns, reason))
        return sample._replace(values=possible)

    def _lost(self, gap: _Gap, stretches: Stretches) -> Iterator[Loss]:
        reason = f"GPU {self._sampler.gpu.index}: {gap.reason}"
        for start_ns, end_ns in stretches.parts(gap.start_ns, gap.end_ns):
            count = min(math.ceil((end_ns - start_ns) / self._interval_ns - 0.5), COUNT_LIMIT)
            if count > 0:
                yield Loss(GPU_COUNTERS, count, start_ns, end_ns, reason)
