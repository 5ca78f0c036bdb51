"""How long the steps would be without something, or with faster kernels, by a replay of the recorded ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final

import numpy as np

from tracepipe.analyses.cuda_calls import rows_named
from tracepipe.analyses.functions import names_by_time
from tracepipe.analyses.gpu_work import KERNEL
from tracepipe.analyses.idle_places import operators
from tracepipe.analyses.replay import Change, Replay
from tracepipe.analyses.steps import is_step
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import NONE, Bools, Int64s, Ints
from tracepipe.event.intervals import Stretches
from tracepipe.kernel_names import kernel_title
from tracepipe.options import Option
from tracepipe.reports.report import Column, Report, Result, Table, not_listed
from tracepipe.store.run import Layer, Run
from tracepipe.units import duration_text

# A smaller difference is an error of rounding.
_LEAST_NS: Final = 1_000
_RANGES, _KERNELS, _CALLS = 8, 5, 4
_FACTOR: Final = 2.0
# If the GPU is idle for most of the time, the length of a step depends on the speed of the host. A change in
# the program also changes that speed, for example by its effect on caches, which a replay cannot know.
# `benchmarks/whatif_gpu.py` measured errors of up to this share of a step.
_HOST_BOUND: Final = 0.5
_HOST_ERROR: Final = 0.1


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
    launches: Annotated[
        str, Option("Launches that take the host no time, as in a CUDA graph.", choices=("recorded", "free"))
    ] = "recorded"
    top: Annotated[int, Option("Show the N changes that save most; 0: all.", "N")] = 10


def run(run: Run, options: Options) -> Result:
    """The length of the steps with a change, or with each of many changes."""
    replay = Replay(run)
    result = Result("WHAT IF")
    asked = _asked(replay, options)
    changes = [asked] if asked else [*_candidates(replay)]
    rows = [_row(replay, name, change) for name, change in changes]
    if not asked:
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
    median = duration_text(float(np.median(replay.recorded_ns)))
    result.notes.append(
        f"replayed unchanged, the median of {len(replay.recorded_ns)} steps ({median}) comes out "
        f"{100 * replay.error:+.2f}% off"
    )
    note = "this is about the captured program: a capture makes calls of the host longer"
    if replay.idle > _HOST_BOUND:
        note += (
            f"; the GPU is idle for {100 * replay.idle:.0f}% of the steps, so the host's own speed decides"
        )
    result.notes.append(note)
    return result


_Named = tuple[str, Change]


def _row(replay: Replay, name: str, change: Change) -> tuple[Any, ...]:
    saved_ns = replay.unchanged_ns - replay.lengths_ns(change)
    own = np.flatnonzero(np.abs(saved_ns) > _LEAST_NS)
    if not len(own):
        return name, None, 0, None, None, 0, None, None
    step_ns = float(np.median(replay.recorded_ns[own]))
    new_ns = float(np.median(replay.recorded_ns[own] - saved_ns[own]))
    low_ns, high_ns = _interval(saved_ns[own])
    error_ns = (abs(replay.error) + (_HOST_ERROR if replay.idle > _HOST_BOUND else 0)) * new_ns
    saves_ns = round(step_ns - new_ns)
    return (
        name, round(step_ns), len(own), round(new_ns), 100 * saves_ns / step_ns, saves_ns,
        round(min(low_ns, saves_ns) - error_ns), round(max(high_ns, saves_ns) + error_ns),
    )  # fmt: skip


def _interval(values: Int64s) -> tuple[float, float]:
    """Where the median of such values lies in 95 of 100 cases, by their order."""
    ordered, half = np.sort(values), 0.98 * math.sqrt(len(values))
    low, high = math.floor(len(values) / 2 - half), math.ceil(len(values) / 2 + half)
    return float(ordered[max(low, 0)]), float(ordered[min(high, len(values) - 1)])


def _asked(replay: Replay, options: Options) -> _Named | None:
    """The change that the options describe. Raises TracepipeError for a name that nothing has."""
    without = [options.without] if isinstance(options.without, str) else [*options.without]
    faster = [options.faster] if isinstance(options.faster, str) else [*options.faster]
    without, faster = [one for one in without if one], [one for one in faster if one]
    if not without and not faster and options.launches == "recorded":
        return None
    changes = [_without(replay, pattern) for pattern in without]
    for text in faster:
        pattern, _, factor = text.rpartition("=")
        try:
            times = float(factor)
        except ValueError:
            times = 0
        if not pattern or not 0 < times < math.inf:
            raise TracepipeError(
                f"{text!r} is not KERNEL=N.",
                "Write 'gemm*=2'.",
            )
        changes.append(_faster(replay, pattern, times))
    if options.launches == "free":
        changes.append(("free launches", Change(free=True)))
    name = ", ".join(name for name, _ in changes)
    every = [change for _, change in changes]
    calls = [one.calls for one in every if one.calls is not None]
    left = [one.left for one in every if one.left is not None]
    removed = [one.removed for one in every if one.removed is not None]
    joined = removed[0] if removed else None
    for one in removed[1:]:
        joined = one.joined(joined) if joined is not None else one
    return name, Change(
        joined,
        np.logical_or.reduce(calls) if calls else None,
        np.multiply.reduce(left) if left else None,
        any(one.free for one in every),
    )


def _without(replay: Replay, pattern: str) -> _Named:
    def matches(name: str) -> bool:
        return fnmatchcase(name, pattern)

    rows = rows_named(replay.run, "annotation", matches)
    if len(rows):
        layer = replay.run.layer("annotation")
        return f"without {pattern}", Change(Stretches(layer.start_ns[rows], layer.end_ns[rows]))
    calls = np.array([matches(name) for name in replay.names], np.bool_)
    if calls.any():
        return f"without {pattern}", Change(calls=calls)
    kernels = _kernels(replay, matches)
    if not kernels.any():
        raise TracepipeError(
            f"No range, call or kernel is called {pattern}.", "whatif without options lists some."
        )
    # A launch of other kernels too, such as that of a graph, is still made.
    launched = np.bincount(replay.call[replay.call != NONE], minlength=len(replay.names))
    own = np.bincount(replay.call[(replay.call != NONE) & kernels], minlength=len(replay.names))
    return f"without {pattern}", Change(calls=(own > 0) & (own == launched), left=np.where(kernels, 0.0, 1.0))


def _kernels(replay: Replay, matches: Callable[[str], bool]) -> Bools:
    """Flags the work that is a kernel with such a name, whole or as it is shown."""
    work, run = replay.work, replay.run
    rows = rows_named(run, "gpu_kernel", lambda name: matches(name) or matches(kernel_title(name)))
    found: Bools = np.isin(work.row, rows) & (work.what == KERNEL)
    return found


def _faster(replay: Replay, pattern: str, times: float) -> _Named:
    kernels = _kernels(replay, lambda name: fnmatchcase(name, pattern))
    if not kernels.any():
        raise TracepipeError(f"No kernel is called {pattern}.", "summary --all lists the kernels.")
    return f"{pattern} {times:g} times as fast", Change(left=np.where(kernels, 1 / times, 1.0))


def _candidates(replay: Replay) -> Iterator[_Named]:
    """Changes that are worth a look: ranges, calls that wait or take long, kernels, launches."""
    run = replay.run

    def by_time(layer: Layer, rows: Ints) -> tuple[Ints, list[int]]:
        """The numbers of the names of some rows, and the different ones, those with the most time first."""
        return run.shapes.column("name", layer.shape[rows]), names_by_time(run, layer, rows, 0)[0]

    ranges, calls, kernels = (run.layer(name) for name in ("annotation", "userspace", "gpu_kernel"))
    inside = Stretches(replay.steps.start_ns[:1], replay.steps.end_ns[-1:])
    rows = np.flatnonzero(~operators(run)[ranges.shape] & (run.shapes.column("gpu")[ranges.shape] == NONE))
    rows = rows[inside.covered_ns(ranges.start_ns[rows], ranges.end_ns[rows]) > 0]
    of_row, names = by_time(ranges, rows)
    for number in [one for one in names if not is_step(run.shapes.text(one))][:_RANGES]:
        own = rows[of_row == number]
        removed = Stretches(ranges.start_ns[own], ranges.end_ns[own])
        yield f"without {run.shapes.text(number)}", Change(removed)
    of_row, names = by_time(calls, replay.rows)
    launching = set(of_row[replay.call[replay.call != NONE]].tolist())
    for number in [one for one in names if one not in launching][:_CALLS]:
        yield f"without {run.shapes.text(number)}", Change(calls=of_row == number)
    yield "free launches", Change(free=True)
    work = np.flatnonzero(replay.work.what == KERNEL)
    of_row, names = by_time(kernels, replay.work.row[work])
    for number in names[:_KERNELS]:
        left = np.ones(len(replay.work))
        left[work[of_row == number]] = 1 / _FACTOR
        yield f"{kernel_title(run.shapes.text(number))} {_FACTOR:g} times as fast", Change(left=left)


REPORT = Report("whatif", Options, run, suits=lambda run: False)
