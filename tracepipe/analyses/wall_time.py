"""What the wall time of a recording consists of, as its GPUs spent it: in all, in its steps, and by range."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracepipe.analyses.glance import RANGES_MAX
from tracepipe.analyses.gpu_by_range import ranges_by_gpu_time
from tracepipe.analyses.gpu_work import gpu_times, gpu_work, idle_of, kinds_of, partition_of
from tracepipe.analyses.host_states import HostStates
from tracepipe.analyses.idle_gaps import BETWEEN, gaps_of
from tracepipe.analyses.idle_places import family, idle_places
from tracepipe.analyses.parts import Part
from tracepipe.analyses.steps import steps_of
from tracepipe.event.intervals import Stretches
from tracepipe.store.run import Run

PARTS: Final = (
    "compute", "exposed communication", "copies", "idle", "before the first work", "after the last work"
)  # fmt: skip
"""The parts of a wall time: those of `Partition` from the first work to the last, and what is outside."""
_IDLE: Final = PARTS.index("idle")
NO_RANGE: Final = "(no range)"


@dataclass(frozen=True, slots=True)
class WallTime:
    """The time of a recording in ns, split into PARTS, which add up to it: the means of its GPUs. There are
    none without a GPU.

    `step_ns` has the same parts of the mean of `steps`, outside of which is nothing. `median_step_ns` is the
    median length of the steps, and `median_parts_ns` the median of each part. `ranges` has the mean idle time
    of GPUs between their first work and their last while the program was in a range or a line, and the busy
    time of what was launched in the range.
    """

    wall_ns: int
    gpus: int = 0
    parts_ns: tuple[int, ...] = ()
    steps: int = 0
    step_ns: tuple[int, ...] = ()
    median_step_ns: int = 0
    median_parts_ns: tuple[int, ...] = ()
    ranges: dict[str, tuple[int, int]] | None = None
    has_communication: bool = False


def _means(sums_ns: list[int], count: int, whole_ns: int) -> tuple[int, ...]:
    """The means of parts; the idle time has what is lost by rounding them."""
    means = [sum_ns // count for sum_ns in sums_ns]
    means[_IDLE] += whole_ns - sum(means)
    return tuple(means)


def wall_time_of(run: Run, part: Part | None = None) -> WallTime:
    """Split the time of a recording, or of a part of it, which has no steps."""
    every = Stretches(np.array([run.facts.start_ns]), np.array([run.facts.end_ns]))
    spans = every if part is None else part.spans
    work, steps = gpu_work(run), steps_of(run)
    count = len(steps.number) if steps.are_marked and part is None else 0
    lengths_ns = steps.end_ns - steps.start_ns
    median_ns = int(np.median(lengths_ns)) if count else 0
    if not len(work):
        return WallTime(spans.total_ns, steps=count, median_step_ns=median_ns)
    times = list(gpu_times(work, kinds_of(run, work)))
    idle = [idle_of(work, time.gpu, time.rows) for time in times]
    sums_ns = [0] * len(PARTS)
    of_steps_ns = np.zeros((len(PARTS), len(steps.number)), np.int64)
    for time, one in zip(times, idle, strict=True):
        # Work may lie outside the recording, by an error of the clocks.
        begins_ns, ends_ns = (np.clip(ns, one.first_ns, one.last_ns) for ns in (spans.start_ns, spans.end_ns))
        within = partition_of(time, begins_ns, ends_ns)
        before_ns = np.maximum(np.minimum(spans.end_ns, one.first_ns) - spans.start_ns, 0)
        after_ns = np.maximum(spans.end_ns - np.maximum(spans.start_ns, one.last_ns), 0)
        parts_ns = [int(ns.sum()) for ns in (*within, before_ns, after_ns)]
        sums_ns = [sum_ns + ns for sum_ns, ns in zip(sums_ns, parts_ns, strict=True)]
        within = partition_of(time, steps.start_ns, steps.end_ns)
        of_steps_ns[: len(within)] += np.array([*within])
    whole_ns = int(lengths_ns.sum()) // max(count, 1)
    gaps = gaps_of(run, work, idle)
    gaps = gaps.select(np.flatnonzero(gaps.where == BETWEEN))
    gaps = gaps if part is None else gaps.within(part.spans.start_ns, part.spans.end_ns)
    places = idle_places(run, gaps, HostStates(run))
    idle_ns = defaultdict[str, int](int)
    for place in places.sums(run, np.arange(len(places.gap))):
        idle_ns[place.range or place.line or NO_RANGE] += place.idle_ns
    busy_ns = defaultdict[str, int](int)
    if len(run.layer("annotation")) <= RANGES_MAX:
        for name, *_, of_range_ns, _ in ranges_by_gpu_time(run, 0, holds=part.holds if part else None)[0]:
            busy_ns[family(name)] += of_range_ns or 0
    return WallTime(
        spans.total_ns,
        len(times),
        _means(sums_ns, len(times), spans.total_ns),
        count,
        _means(of_steps_ns.sum(axis=1).tolist(), len(times) * count, whole_ns) if count else (),
        median_ns,
        tuple(int(ns) for ns in np.median(of_steps_ns, axis=1) // len(times)) if count else (),
        {name: (ns // len(times), int(busy_ns[name])) for name, ns in idle_ns.items()},
        any(time.communication.total_ns for time in times),
    )
