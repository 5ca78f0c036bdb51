"""Where the time of the GPUs goes: how much they compute, communicate, copy and idle in the steps, and what
the program did while they were idle, by cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np

from tracepipe.analyses.breakdown import HOOKED, OFF_CPU
from tracepipe.analyses.cuda_calls import LAUNCH
from tracepipe.analyses.gpu_work import gpu_work, idle_of, kinds_of
from tracepipe.analyses.host_states import ABSENT, STATES, UNKNOWN, USER, HostStates
from tracepipe.analyses.idle_gaps import LAST, IdleGaps, gaps_of
from tracepipe.analyses.idle_places import IdlePlaces, Place, idle_places
from tracepipe.analyses.steps import GpuSteps, Steps, gpu_steps, is_loading, steps_of
from tracepipe.event.columns import NONE, Bools, Ints, distinct
from tracepipe.event.groups import RowsByNumber
from tracepipe.store.run import Run

# Calls that wait for the GPU. Those of HIP have the same words.
_WAITS: Final = re.compile(r"\w+Synchronize\w*|\w+Memcpy(?!\w*Async)\w*")
# A gap of this length is one between two launches of a program that does nothing but launch.
SHORT_NS: Final = 50_000
# A launch that keeps an idle GPU waiting for longer loads or compiles code.
_LONG_LAUNCH_NS: Final = 1_000_000


class Kind(Enum):
    """Why a GPU was idle."""

    LOADING = "loading"
    QUEUED = "queued"
    WAITS = "waits"
    LAUNCHES = "launches"
    CALL = "call"
    OFF_CPU = "off-CPU"
    HOST = "host"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reason:
    """Idle time of one kind: of CALL and WAITS that in one call. `place` has the most of it."""

    kind: Kind
    idle_ns: int
    gaps: int
    call: str | None
    place: Place


@dataclass(slots=True)
class Overview:
    """The time of the GPUs in the steps. All sums are over all GPUs, and `compute_ns`, `exposed_ns`,
    `lone_copies_ns` and `idle_ns`, as in `Partition`, add up to `whole_ns`.

    `reasons` and `places` each add up to `idle_ns`; the longest come first. `late_ns` is the part of the idle
    time before the begin of the call that launched the next work, and after the last work. It is known for
    `known_ns` of the idle time. `first_ns` is the time from the start of the recording to the first work of a
    GPU.
    """

    steps: Steps
    of_gpus: list[GpuSteps] = field(default_factory=list)
    is_late: bool = False
    compute_ns: int = 0
    exposed_ns: int = 0
    lone_copies_ns: int = 0
    idle_ns: int = 0
    late_ns: int = 0
    known_ns: int = 0
    first_ns: int = 0
    places: list[Place] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    places_of: Callable[[int], list[Place]] = lambda step: []
    """The places of the step with an index."""

    @property
    def whole_ns(self) -> int:
        """The time of the steps on all GPUs."""
        return self.compute_ns + self.exposed_ns + self.lone_copies_ns + self.idle_ns


def overview_of(run: Run) -> Overview:
    """Where the time goes. All is 0 where no work of a GPU was recorded."""
    work, found = gpu_work(run), Overview(steps_of(run))
    if not len(work):
        return found
    found.of_gpus, found.is_late = gpu_steps(run, work, kinds_of(run, work))
    for one in found.of_gpus:
        for name, part_ns in one.parts._asdict().items():
            setattr(found, name, getattr(found, name) + int(part_ns.sum()))
    idle = [idle_of(work, gpu, rows) for gpu, rows in work.of_gpus()]
    found.first_ns = max(0, min(one.first_ns for one in idle) - run.facts.start_ns)
    gaps, step = _in_steps(gaps_of(run, work, idle), found.of_gpus)
    if not len(gaps):
        return found
    calls = run.layer("userspace")
    called = calls.rows(np.maximum(gaps.call, 0), "start_ns", "end_ns") if len(calls) else None
    is_last = gaps.where == LAST
    is_known = (gaps.call != NONE) & ~gaps.by_order & ~is_last
    begins_ns, returns_ns = (called.start_ns, called.end_ns) if called else (gaps.end_ns, gaps.end_ns)
    late_ns = np.clip(np.where(is_last, gaps.end_ns, begins_ns), gaps.start_ns, gaps.end_ns) - gaps.start_ns
    found.late_ns = int(late_ns[is_known | is_last].sum())
    found.known_ns = int(gaps.dur_ns()[is_known | is_last].sum())
    places = idle_places(run, gaps, HostStates(run))
    found.places = places.sums(run, np.arange(len(places.gap)))
    found.reasons = _reasons(run, gaps, places, is_known & (returns_ns <= gaps.start_ns))
    of_step = RowsByNumber(step[places.gap])
    found.places_of = lambda step: places.sums(run, of_step.of(step))
    return found


def _in_steps(gaps: IdleGaps, of_gpus: list[GpuSteps]) -> tuple[IdleGaps, Ints]:
    """The idle time inside the steps of each GPU, cut where a step ends, and the index of the step of each
    part.
    """
    parts = [
        gaps.select(np.flatnonzero(gaps.gpu == number)).within(one.start_ns, one.end_ns)
        for number, one in enumerate(of_gpus)
    ]
    steps = [
        np.searchsorted(one.start_ns, part.start_ns, "right") - 1
        for one, part in zip(of_gpus, parts, strict=True)
    ]
    return IdleGaps.joined(parts), np.concatenate(steps)


def _reasons(run: Run, gaps: IdleGaps, places: IdlePlaces, queued: Bools) -> list[Reason]:
    kinds = _kinds(run, gaps, places, queued)
    calls = np.where(places.call == NONE, places.syscall, places.call)
    found = []
    for at, kind in enumerate(Kind):
        of_kind = np.flatnonzero(kinds == at)
        by_call = kind in (Kind.WAITS, Kind.CALL)
        for number in distinct(calls[of_kind]).tolist() if by_call else [NONE] * (len(of_kind) > 0):
            rows = of_kind[calls[of_kind] == number] if by_call else of_kind
            sum_ns, count = int(places.dur_ns[rows].sum()), len(distinct(places.gap[rows]))
            name = None if number == NONE else run.shapes.text(number)
            found.append(Reason(kind, sum_ns, count, name, places.sums(run, rows)[0]))
    return sorted(found, key=lambda one: -one.idle_ns)


def _kinds(run: Run, gaps: IdleGaps, places: IdlePlaces, queued: Bools) -> Ints:
    """The kind of each piece, as its index. Shape `(pieces,)`. `queued` flags gaps whose next work was
    launched before them.
    """

    def named(numbers: Ints, matches: Callable[[str], object]) -> Bools:
        known = distinct(numbers[numbers != NONE]).tolist()
        return np.isin(numbers, [number for number in known if matches(run.shapes.text(number))])

    def is_state(*states: str) -> Bools:
        return np.isin(places.state, [STATES.index(state) for state in states])

    short, own = gaps.dur_ns() < SHORT_NS, is_state(USER, HOOKED)
    launches = named(places.call, LAUNCH.fullmatch) & (places.dur_ns < _LONG_LAUNCH_NS)
    order = {
        Kind.LOADING: named(places.range, is_loading) | places.loads,
        Kind.QUEUED: queued[places.gap],
        Kind.UNKNOWN: is_state(UNKNOWN),
        Kind.LAUNCHES: launches | (own & short[places.gap]),
        Kind.WAITS: named(places.call, _WAITS.fullmatch),
        Kind.CALL: (places.call != NONE) & ~own,
        Kind.OFF_CPU: is_state(OFF_CPU, ABSENT),
    }
    numbers = {kind: number for number, kind in enumerate(Kind)}
    return np.select(list(order.values()), [numbers[kind] for kind in order], numbers[Kind.HOST])
