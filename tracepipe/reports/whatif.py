"""How long the steps would be without something, or with faster kernels, by a replay of the recorded ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Annotated, Any, Final

import numpy as np

from tracepipe.analyses.changes import Has, Most, Named, Recorded, Subject, asked, candidates, together
from tracepipe.analyses.distribution import median_within
from tracepipe.analyses.gpu_work import PURPOSES
from tracepipe.analyses.replay import WORKS, Ask, Changes, Outcome, Replay, Timeline, Window, whole
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import Bools, Floats, Int64s
from tracepipe.options import Option
from tracepipe.reports.report import Column, Report, Result, Table, not_listed
from tracepipe.store.run import Run
from tracepipe.units import duration_text

# The more the GPU is idle, the more the length of a step depends on the speed of the host. A change in the
# program also changes that speed, for example by its effect on caches, which a replay cannot know.
# `benchmarks/whatif_gpu.py` measured errors of up to this share of a step, where the host decides: as soon as
# the GPU is idle for half of it.
_HOST_BOUND: Final = 0.5
_HOST_ERROR: Final = 0.1
_BLOCKS: Final = 8
# Of how many steps the critical path is followed, and how much of it is shown.
_PATHS_MOST: Final = 16
_SHOWN: Final = 4


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe whatif`."""

    without: Annotated[
        str | Sequence[str],
        Option("Leave out the ranges, calls or kernels of this name, a shell pattern.", "NAME", repeats=True),
    ] = ()
    faster: Annotated[
        str | Sequence[str],
        Option("Make the kernels of this name, a shell pattern, N times as fast.", "KERNEL=N", repeats=True),
    ] = ()
    fuse: Annotated[
        str | Sequence[str],
        Option("Make one kernel of each chain like this one, which gaps lists.", "CHAIN", repeats=True),
    ] = ()
    overlap: Annotated[
        str | Sequence[str],
        Option(
            "Let only the end of the step wait for communication whose kernels have this name, a shell "
            "pattern.",
            "KERNEL",
            repeats=True,
        ),
    ] = ()
    launches: Annotated[
        str, Option("Launches that take the host no time, as in a CUDA graph.", choices=("recorded", "free"))
    ] = "recorded"
    like_peers: Annotated[
        int | None,
        Option("Have this rank do as those that do the same work; of a folder or a dataset.", "RANK"),
    ] = None
    top: Annotated[int, Option("Show the N changes that save most; 0: all.", "N")] = 10


def run(run: Run, options: Options) -> Result:
    """The length of the steps with a change, or with each of many changes."""
    if options.like_peers is not None:
        raise TracepipeError("A recording alone has no peers.", "Name a folder of recordings, or a dataset.")
    subject = Recorded(run)
    return answer(Replay(whole(subject.program)), lambda _: [subject], subject.has, subject.most, options)


def answer(
    replay: Replay,
    subjects: Callable[[Window], Sequence[Subject]],
    has: Has,
    most: Callable[[], Most],
    options: Options,
    others: Iterable[Named] = (),
    ranks: Sequence[int] = (),
) -> Result:
    """The answer for the ranks of a job. `subjects` are those of a window, and `has` and `most` are about all
    windows: `most` returns the names that are tried where no change is asked. `others` are changes besides
    those that the options describe, and `ranks` the numbers of the ranks.
    """
    replay.refuse_what_is_not_known()
    result = Result("WHAT IF")
    named = (options.without, options.faster, options.fuse, options.overlap)
    given = ([one] if isinstance(one, str) else one for one in named)
    without, faster, chains, overlapping = ([name for name in names if name] for names in given)
    changes = [*others, *asked(has, without, faster, chains, overlapping, free=options.launches == "free")]
    spent = Counter[str]()
    if changes:
        missing = {at for at, one in enumerate(changes) if one.missing}

        def ask(window: Window) -> tuple[Changes, Floats | None]:
            found = [one.made(window, subjects(window)) for one in changes]
            missing.difference_update([at for at, some in enumerate(found) if some])
            return reduce(together, found), None

        def follow(window: Window, timeline: Timeline) -> None:
            spent.update(_on_paths(window, timeline, len(replay.common[0]), ranks))

        names = [", ".join(one.name for one in changes)]
        outcomes = replay.outcomes([ask], follow)
        for at in sorted(missing):
            raise changes[at].missing or AssertionError
    else:
        tried = [*candidates(has, most())]
        names = [one.name for one in tried]
        outcomes = replay.outcomes([_ask(one, subjects) for one in tried])
    rows = [_row(replay, name, found) for name, found in zip(names, outcomes, strict=True)]
    if not changes:
        rows = sorted((row for row in rows if row[2]), key=lambda row: -row[5])
        shown = rows[: options.top or None]
        result.notes += not_listed(len(rows) - len(shown), "change|changes")
        rows = shown
    columns = (
        Column("change", "change"), Column("step_ns", "step", "ns"), Column("steps", "steps", "count"),
        Column("new_ns", "then", "ns"), Column("saves_percent", "saves", "percent"),
        Column("saves_ns", "saves", "ns"), Column("low_ns", "at least", "ns"),
        Column("high_ns", "at most", "ns"),
    )  # fmt: skip
    note = (
        "Step: the median of the steps that the change concerns, and how many these are. Then: their median "
        "with the change. At least, at most: what it saves, by the spread of the steps and the error of the "
        "replay."
    )
    result.parts.append(
        Table("changes", "The steps, replayed", columns, rows, note, empty="Nothing to change.")
    )
    if changes:
        shares = ((what, round(100 * ns / spent.total())) for what, ns in spent.most_common(_SHOWN) if ns)
        path = ", ".join(f"{what} {share}%" for what, share in shares if share)
        result.notes.append(f"the critical path then: {path or 'not known'}")
    recorded_ns = replay.steps_ns(replay.recorded_ns)
    median = duration_text(float(np.median(recorded_ns)))
    result.notes.append(
        f"replayed unchanged, the median of {len(recorded_ns)} steps ({median}) comes out "
        f"{100 * replay.error:+.2f}% off"
    )
    idle = replay.idle
    note = "this is about the captured program: a capture makes calls of the host longer"
    if idle > _HOST_BOUND:
        note += f"; the GPU is idle for {100 * idle:.0f}% of the steps, so the host's own speed decides"
    result.notes.append(note)
    return result


def _ask(one: Named, subjects: Callable[[Window], Sequence[Subject]]) -> Ask:
    return lambda window: (one.made(window, subjects(window)), None)


def _row(replay: Replay, name: str, found: Outcome) -> tuple[Any, ...]:
    recorded_ns = replay.steps_ns(replay.recorded_ns)
    saved_ns, is_own = replay.saved_ns(found), found.concerned
    if not is_own.any():
        return name, None, 0, None, None, 0, None, None
    step_ns = float(np.median(recorded_ns[is_own]))
    new_ns = float(np.median((recorded_ns - saved_ns)[is_own]))
    low_ns, high_ns = median_within(saved_ns[is_own])
    of_host = _HOST_ERROR * min(replay.idle / _HOST_BOUND, 1)
    error_ns = abs(replay.error) * new_ns + max(of_host * new_ns, _drift_ns(recorded_ns, is_own))
    saves_ns = round(step_ns - new_ns)
    return (
        name, round(step_ns), int(is_own.sum()), round(new_ns), 100 * saves_ns / step_ns, saves_ns,
        round(min(low_ns, saves_ns) - error_ns), round(max(high_ns, saves_ns) + error_ns),
    )  # fmt: skip


def _on_paths(window: Window, timeline: Timeline, count: int, ranks: Sequence[int]) -> Counter[str]:
    """What is on the critical path then, of some of the steps of a window that a change concerns. There are
    `count` steps in all windows.
    """
    steps, spent = np.flatnonzero(timeline.concerned), Counter[str]()
    most = -(-_PATHS_MOST * len(timeline.concerned) // count)
    some = steps[:: -(-len(steps) // most) or 1].tolist()
    for piece in chain.from_iterable(window.paths(timeline, some)):
        what = piece.what
        if what == WORKS:
            what = PURPOSES[int(window.programs[piece.number].what[piece.row])]
        spent[f"rank {ranks[piece.number]} {what}" if len(ranks) > 1 else what] += piece.ns
    return spent


def _drift_ns(recorded_ns: Int64s, is_own: Bools) -> float:
    """By how much the medians of successive blocks of steps lie around their middle: of the steps that a
    change does not concern, if they are enough.
    """
    others = recorded_ns[~is_own]
    steps = others if len(others) >= 2 * _BLOCKS else recorded_ns
    medians = [float(np.median(block)) for block in np.array_split(steps, min(_BLOCKS, len(steps)))]
    return (max(medians) - min(medians)) / 2


REPORT = Report("whatif", Options, run, suits=lambda run: False)
