"""The largest cause of what the steps take beyond the work of the GPU: which it is, how large, how it is
usually fixed, and what a step would be without it, by a replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from tracepipe.analyses.changes import Recorded, free_launches, without_stretches
from tracepipe.analyses.gpu_work import COPIES, gpu_work
from tracepipe.analyses.overview import SHORT_NS, Kind, Overview, Reason
from tracepipe.analyses.replay import STEPS_LEAST, Change, Replay, whole
from tracepipe.analyses.steps import loading_of
from tracepipe.errors import TracepipeError
from tracepipe.present.writing.rendering import elided
from tracepipe.store.run import Run
from tracepipe.units import duration_text

# A part of the time that is smaller is no cause.
LEAST_PERCENT = 10
# Of more work, a replay would take longer than the rest of the screen.
_WORK_MOST: Final = 1 << 19
_TRIED: Final = 4
COLUMNS: Final = 80
_CAUSES: Final = {
    Kind.LOADING: (
        "the program waits for its data loader",
        "Usual fix: worker processes (num_workers), pinned memory",
    ),
    Kind.QUEUED: (
        "the next work waits on the GPU",
        "Usual fix: fewer dependencies between streams, CUDA graphs",
    ),
    Kind.WAITS: ("the CPU waits in {call}", "Usual fix: fewer synchronizing calls (.item(), .cpu())"),
    Kind.LAUNCHES: (
        "launching takes longer than the kernels",
        "Usual fix: CUDA graphs, torch.compile, larger batches",
    ),
    Kind.CALL: ("the CPU is in {call}", ""),
    Kind.OFF_CPU: ("the launching thread does not run", ""),
    Kind.HOST: (
        "the CPU runs the program's own code",
        "Usual fix: launch first, or do this work in another process",
    ),
    Kind.UNKNOWN: ("it is not known what the CPU did", "Record the CUDA calls too"),
}
# Calls that are longer on average initialize the GPU or load code, whatever they are called.
_LONG_CALL_NS: Final = 100_000_000
_WARM_UP: Final = "Usual fix: warm up, as the first calls initialize the GPU"
_FIXES: Final = {
    "Load": "Usual fix: load modules before the loop, or CUDA_MODULE_LOADING=EAGER",
    "Launch": "Usual fix: warm up, as the first launch of a kernel loads it",
    "Malloc": "Usual fix: allocate before the loop, or cudaMallocAsync",
    "Free": "Usual fix: free after the loop, or cudaFreeAsync",
}


class Saved(NamedTuple):
    """The median length of the steps, and what it would be without a cause."""

    step_ns: int
    then_ns: int


class _Cause(NamedTuple):
    """Communication ("exposed") or copies while nothing else runs, or a reason of idle time; how long that is
    in all steps, and what it costs, None where that is not known.
    """

    what: str
    part_ns: int
    reason: Reason | None = None
    saved: Saved | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """By what causes are compared."""
        return (self.saved.step_ns - self.saved.then_ns if self.saved else 0), self.part_ns


def cause_lines(run: Run, found: Overview) -> Iterator[str]:
    """The largest cause in some lines of at most 80 columns: the one without which steps would be shortest,
    or, where they cannot be replayed, that of most time.
    """
    whole_ns = found.whole_ns
    if found.first_ns > whole_ns and not found.steps.are_marked:
        yield f"The first work of a GPU begins {duration_text(found.first_ns)} after the start."
    causes = [
        _Cause("exposed", found.exposed_ns),
        _Cause("copies", found.lone_copies_ns),
        *(_Cause("idle", one.idle_ns, one) for one in found.reasons[:_TRIED]),
    ]
    causes = [one for one in causes if 100 * one.part_ns >= LEAST_PERCENT * whole_ns]
    if not causes:
        share = 100 * found.compute_ns / whole_ns
        yield f"The GPU computes for {share:.1f}% of the time: its kernels decide."
        return
    largest = max(_with_savings(run, found, causes), key=lambda one: one.rank)
    part_ns = largest.part_ns
    part = f"({duration_text(part_ns)} of {duration_text(whole_ns)})"
    fix, evidence = "", "gaps"
    if largest.what == "exposed":
        yield f"Largest cause: communication while nothing computes {part}."
        fix, evidence = "Usual fix: overlap it with computation", "ranks"
    elif largest.what == "copies":
        yield f"Largest cause: only copies run for {100 * part_ns / whole_ns:.0f}% of the time {part}."
        fix, evidence = "Usual fix: pinned memory, copies on their own stream", "summary --all"
    elif (reason := largest.reason) is not None:
        words, fix = _CAUSES[reason.kind]
        if reason.kind is Kind.HOST and not len(run.layer("scheduler")):
            words = "the program runs its own code or waits"
        if reason.kind is Kind.CALL and reason.call:
            fix = next((text for name, text in _FIXES.items() if name in reason.call), "")
            fix = _WARM_UP if reason.idle_ns >= _LONG_CALL_NS * reason.gaps else fix
        yield f"Largest cause: {words.format(call=reason.call)} {part}."
        place = reason.place.line or reason.place.range
        if not place and reason.kind is Kind.HOST and run.facts.source == "tracepipe":
            fix = "capture --stacks python records the line of Python"
        if place and reason.kind is not Kind.LOADING:
            text = f"  {100 * reason.place.idle_ns / reason.idle_ns:.0f}% of that in "
            yield text + elided(place, COLUMNS - len(text))
    if largest.saved is not None:
        step_ns, then_ns = largest.saved
        yield (
            f"  Without it, a step would take {duration_text(then_ns)} instead of {duration_text(step_ns)} "
            "(whatif)."
        )
    yield f"  {f'{fix}. ' if fix else ''}Evidence: {evidence}"


def _with_savings(run: Run, found: Overview, causes: list[_Cause]) -> list[_Cause]:
    """The causes, with what they cost where the steps can be replayed."""
    # The first two conditions are those that a replay refuses, too.
    if len(found.steps.number) < STEPS_LEAST or not found.steps.are_marked or len(gpu_work(run)) > _WORK_MOST:
        return causes
    subject = Recorded(run)
    replay = Replay(whole(subject.program))
    try:
        replay.refuse_what_is_not_known()
    except TracepipeError:
        return causes
    changes = [_without(run, subject, one) for one in causes]
    return [
        one if change is None else one._replace(saved=_saved(replay, change))
        for one, change in zip(causes, changes, strict=True)
    ]


def _saved(replay: Replay, change: Change) -> Saved:
    recorded_ns = replay.steps_ns(replay.recorded_ns)
    (outcome,) = replay.outcomes([lambda _: ({0: change}, None)])
    then_ns = float(np.median(recorded_ns - replay.saved_ns(outcome)))
    return Saved(round(float(np.median(recorded_ns))), round(then_ns))


def _without(run: Run, subject: Recorded, cause: _Cause) -> Change | None:
    """The change that removes a cause, None where none does."""
    one = subject.program
    if cause.what == "copies":
        return Change(left=np.where(one.what == COPIES, 0.0, 1.0))
    if cause.reason is None:
        return None
    kind, call = cause.reason.kind, cause.reason.call
    if kind is Kind.LOADING:
        return without_stretches(one, loading_of(run))
    if kind is Kind.LAUNCHES:
        return free_launches(one)
    if kind in (Kind.WAITS, Kind.CALL) and call:
        return without_stretches(one, subject.calls(lambda name: name == call))
    if kind in (Kind.HOST, Kind.OFF_CPU):
        # Between two calls, where that takes long and no data is loaded.
        host_ns = one.call_ns - one.from_ns
        own_ns = host_ns - loading_of(run).covered_ns(one.from_ns, one.call_ns)
        return Change(host_ns=np.where(own_ns > SHORT_NS, host_ns - own_ns, host_ns))
    return None
