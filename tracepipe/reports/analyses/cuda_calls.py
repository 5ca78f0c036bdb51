"""What calls of the CUDA libraries do, told by their names: launch, allocate, copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tracepipe.event.columns import Bools, Int32s, Int64s
from tracepipe.event.vocabulary import direction_named
from tracepipe.hooks.effects import MEMORY_EFFECTS, effect_of
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.nesting import first_flagged
from tracepipe.reports.frames.run import Run

# Not cuLaunchHostFunc and its like, which run on the host.
_LAUNCH = re.compile(
    r"(__)?cu(da)?(Launch(Cooperative)?Kernel(MultiDevice|Ex|ExC)?|LaunchGrid(Async)?|Launch|GraphLaunch)"
    r"(_v\d+)?(_ptsz|_ptds)?"
)


def is_launch(name: str) -> bool:
    """Whether a call of that name puts kernels, or a graph of them, on a stream."""
    return _LAUNCH.fullmatch(name) is not None


def _of_names(run: Run, told: Callable[[str], Any]) -> tuple[Int32s, list[Any]]:
    """What names tell of rows of `run.calls`: the place of each row's in a list."""
    numbers = run.shapes.column("name", run.layer("userspace").shape)
    used = np.flatnonzero(np.bincount(numbers))
    places = np.zeros(int(used.max(initial=0)) + 1, np.int32)
    places[used] = np.arange(len(used), dtype=np.int32)
    return places[numbers], [told(run.shapes.value("name", number)) for number in used.tolist()]


def _first(run: Run, flagged: Bools) -> Bools:
    """The flagged rows of `run.calls` but ends without a begin; a runtime's and the driver's in it once."""
    calls = run.layer("userspace")
    return first_flagged(calls.parent, flagged & calls.is_call)


def launching(run: Run) -> Bools:
    """Which rows of `run.calls` launch kernels."""
    own, launch = _of_names(run, is_launch)
    return _first(run, np.array(launch, np.bool_)[own])


def calls_named(run: Run, pattern: re.Pattern[str]) -> Int64s:
    """The rows of `run.calls` whose whole names match a pattern, but for ends without a begin."""
    own, matches = _of_names(run, lambda name: pattern.fullmatch(name) is not None)
    return np.flatnonzero(np.array(matches, np.bool_)[own] & run.layer("userspace").is_call)


def outermost_named(run: Run, pattern: re.Pattern[str]) -> Int64s:
    """The same rows, a runtime's call and the driver's inside it once."""
    own, matches = _of_names(run, lambda name: pattern.fullmatch(name) is not None)
    return np.flatnonzero(_first(run, np.array(matches, np.bool_)[own]))


def launches(run: Run) -> pl.DataFrame:
    """The calls that launch kernels, a runtime's call and the driver's inside it once."""
    return run.rows("userspace", np.flatnonzero(launching(run)))


def rows_by_effect(run: Run) -> dict[str, Int64s]:
    """What calls did to memory: effect → rows of `run.calls`, a runtime's and the driver's inside it once."""
    own, told = _of_names(run, effect_of)
    found = {}
    for effect in (*MEMORY_EFFECTS, "transfer"):
        has_it = np.array([one is not None and one[0] == effect for one in told], np.bool_)
        found[effect] = np.flatnonzero(_first(run, has_it[own]))
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


def effects_of_calls(run: Run) -> pl.DataFrame:
    """What calls did to memory: rows of `run.calls` with `effect`, `direction` and `failed`.

    A runtime's call and the driver's inside it count once. A call that failed did nothing.
    """
    found = rows_by_effect(run)
    rows = np.concatenate([*found.values()])
    effects = [effect for effect, some in found.items() for _ in range(len(some))]
    return run.rows("userspace", rows).with_columns(
        pl.Series("effect", effects, dtype=pl.String),
        pl.Series("direction", directions(run, rows), dtype=pl.String),
        (pl.col("result").fill_null(0) != 0).alias("failed"),
    )
