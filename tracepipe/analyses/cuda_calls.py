"""Classifies calls of the CUDA libraries by their names: launch, allocate, copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, distinct
from tracepipe.event.vocabulary import direction_named
from tracepipe.hooks.sets import MEMORY_EFFECTS, effect_of
from tracepipe.store.run import Run, once_a_run
from tracepipe.store.schema import NO_BEGIN

Value = TypeVar("Value")
# Launches, without cuLaunchHostFunc and similar ones, which run on the host.
LAUNCH = re.compile(
    r"(__)?(cu(da)?|hip(Ext|Module|ExtModule)?)(Launch(Cooperative)?Kernel(MultiDevice|Ex|ExC)?|LaunchGrid(Async)?|Launch|GraphLaunch)"
    r"(_v\d+)?(_ptsz|_ptds)?|urEnqueue(Cooperative)?KernelLaunch\w*|zeCommandListAppendLaunch(Cooperative)?Kernel"
)


def values_by_names(
    run: Run, layer: str, value_of: Callable[[str], Value | None]
) -> tuple[Int32s, list[Value | None]]:
    """Compute a value from the name of each shape of a layer, once for each name.

    Return an index into a list of values for each shape, shape `(shapes,)`, and that list. Shapes of other
    layers have the index of None, 0.
    """
    names = run.shapes.column("name")
    is_used = run.used_shapes(layer)
    values: dict[Value | None, int] = {None: 0}
    of_name = np.zeros(int(names.max(initial=-1)) + 1, np.int32)
    for number in distinct(names[is_used]).tolist():
        of_name[number] = values.setdefault(value_of(run.shapes.value("name", number)), len(values))
    return np.where(is_used, of_name[names], np.int32(0)), list(values)


def rows_named(run: Run, layer: str, matches: Callable[[str], bool]) -> Int64s:
    """The rows of a layer whose names match, without ends that have no begin. Shape `(n,)`."""
    of, answers = values_by_names(run, layer, matches)
    return _rows_of(run, layer, np.array(answers, np.bool_)[of])[0]


def _rows_of(run: Run, layer: str, shapes: Bools) -> tuple[Int64s, Int32s]:
    """The rows of a layer with some shapes, without ends that have no begin, and their callers.
    Shapes `(n,)`.
    """
    found = run.store.columns(
        f"""select id, parent from store."{layer}" where shape in (select shape from wanted)
        and kind <> {NO_BEGIN} order by id""",
        wanted={"shape": np.flatnonzero(shapes).astype(np.int32)},
    )
    return found["id"].astype(np.int64), found["parent"]


def _outermost_of(run: Run, shapes: Bools) -> Int64s:
    """The rows of the calls of some shapes. A runtime call and the driver's call inside it count once.
    Shape `(n,)`.
    """
    rows, above = _rows_of(run, "userspace", shapes)
    climbing = np.flatnonzero(above != NONE)
    is_inside = np.zeros(len(rows), np.bool_)
    while len(climbing):
        is_inside[climbing] = np.isin(above[climbing], rows)
        climbing = climbing[~is_inside[climbing]]
        above[climbing] = run.layer("userspace").rows(above[climbing], "parent").parent
        climbing = climbing[above[climbing] != NONE]
    return rows[~is_inside]


@once_a_run
def launching(run: Run) -> Int64s:
    """The rows of the calls that launch kernels. A runtime call and the driver's call inside it count once.
    Shape `(n,)`.
    """
    return outermost_named(run, LAUNCH)


def calls_named(run: Run, pattern: re.Pattern[str]) -> Int64s:
    """The rows of the calls whose whole names match a pattern, without ends that have no begin.
    Shape `(n,)`.
    """
    return rows_named(run, "userspace", lambda name: pattern.fullmatch(name) is not None)


def outermost_named(run: Run, pattern: re.Pattern[str]) -> Int64s:
    """The rows of the calls whose whole names match; a runtime call and the driver's call inside it count
    once. Shape `(n,)`.
    """
    of, answers = values_by_names(run, "userspace", lambda name: pattern.fullmatch(name) is not None)
    return _outermost_of(run, np.array(answers, np.bool_)[of])


@once_a_run
def rows_by_effect(run: Run) -> dict[str, Int64s]:
    """Effect on memory → rows of the calls that had it, shape `(n,)`. A runtime call and the driver's call
    inside it count once.
    """
    of, effects = values_by_names(run, "userspace", lambda name: effect_of(name)[0])
    return {
        effect: _outermost_of(run, of == (effects.index(effect) if effect in effects else NONE))
        for effect in (*MEMORY_EFFECTS, "transfer")
    }


def directions(run: Run, rows: Int64s) -> list[str]:
    """The directions in which calls copy, from their arguments, else from their names."""
    calls = run.layer("userspace")
    names = run.shapes.column("name", calls.shape[rows]).tolist()
    by_name = {number: effect_of(run.shapes.value("name", number))[1] or "copy" for number in set(names)}
    by_args = run.args.texts_of("direction", calls.args[rows])
    return [
        by_name[name] if text is None else direction_named(text)
        for text, name in zip(by_args, names, strict=True)
    ]
