"""What calls of the CUDA libraries do, by their names: launch, allocate, copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tracepipe.event.columns import Bools, Int32s, Int64s
from tracepipe.event.vocabulary import direction_named
from tracepipe.hooks.effects import MEMORY_EFFECTS, effect_of
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.nesting import first_flagged
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.stored import parts

# Not cuLaunchHostFunc and its like, which run on the host.
_LAUNCH = re.compile(
    r"(__)?(cu(da)?|hip(Ext|Module|ExtModule)?)(Launch(Cooperative)?Kernel(MultiDevice|Ex|ExC)?|LaunchGrid(Async)?|Launch|GraphLaunch)"
    r"(_v\d+)?(_ptsz|_ptds)?"
)


def is_launch(name: str) -> bool:
    """Whether a call of that name puts kernels, or a graph of them, on a stream."""
    return _LAUNCH.fullmatch(name) is not None


def told_by_names(run: Run, layer: str, told: Callable[[str], Any]) -> tuple[Int32s, list[Any]]:
    """What names tell of the shapes of a layer: for each shape the place in a list, others that of None."""
    names = run.shapes.column("name", np.arange(len(run.shapes), dtype=np.int32))
    seen = run.seen(layer)
    answers: dict[Any, int] = {None: 0}
    of_name = np.zeros(int(names.max(initial=-1)) + 1, np.int32)
    used = np.unique(names[seen])
    for part in parts(len(used)):
        for number in used[part].tolist():
            of_name[number] = answers.setdefault(told(run.shapes.value("name", number)), len(answers))
    return np.where(seen, of_name[names], np.int32(0)), list(answers)


def _that_match(run: Run, layer: str, matches: Callable[[str], bool]) -> Bools:
    """The shapes of a layer whose names match."""
    of, answers = told_by_names(run, layer, matches)
    found: Bools = np.array(answers, np.bool_)[of]
    return found


def _first(run: Run, shapes: Bools) -> Bools:
    """The rows of `run.calls` of some shapes, but ends without a begin; a runtime's and the driver's in it
    once.
    """
    calls = run.layer("userspace")
    return first_flagged(calls.parent, shapes[calls.shape] & calls.is_call)


def launching(run: Run) -> Bools:
    """Which rows of `run.calls` launch kernels."""
    return _first(run, _that_match(run, "userspace", is_launch))


def calls_named(run: Run, pattern: re.Pattern[str]) -> Int64s:
    """The rows of `run.calls` whose whole names match a pattern, but for ends without a begin."""
    return rows_named(run, "userspace", lambda name: pattern.fullmatch(name) is not None)


def outermost_named(run: Run, pattern: re.Pattern[str]) -> Int64s:
    """The rows of `run.calls` whose whole names match, a runtime's call and the driver's inside it once."""
    shapes = _that_match(run, "userspace", lambda name: pattern.fullmatch(name) is not None)
    return np.flatnonzero(_first(run, shapes))


def rows_named(run: Run, layer: str, matches: Callable[[str], bool]) -> Int64s:
    """The rows of a layer whose names match, but for ends without a begin."""
    shapes, of = _that_match(run, layer, matches), run.layer(layer)
    return np.flatnonzero(shapes[of.shape] & of.is_call) if shapes.any() else np.empty(0, np.int64)


def rows_by_effect(run: Run) -> dict[str, Int64s]:
    """What calls did to memory: effect → rows of `run.calls`, a runtime's and the driver's inside it once."""
    of, told = told_by_names(run, "userspace", effect_of)
    found = {}
    for effect in (*MEMORY_EFFECTS, "transfer"):
        has_it = np.array([one is not None and one[0] == effect for one in told], np.bool_)[of]
        found[effect] = np.flatnonzero(_first(run, has_it)) if has_it.any() else np.empty(0, np.int64)
    return found


def directions(run: Run, rows: Int64s) -> list[str]:
    """Where rows of `run.calls` copy to, as their arguments say, else their names."""
    calls = run.layer("userspace")
    names = run.shapes.column("name", calls.shape[rows]).tolist()
    told = {number: effect_of(run.shapes.value("name", number))[1] or "copy" for number in set(names)}
    given = run.args.texts_of("direction", calls.args[rows])
    return [
        told[name] if text is None else direction_named(text) for text, name in zip(given, names, strict=True)
    ]
