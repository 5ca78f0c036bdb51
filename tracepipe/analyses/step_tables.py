"""How long the steps are, how the GPUs spent each as a table, and which steps are slow, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracepipe.analyses.gpu_work import Partition
from tracepipe.analyses.overview import Overview
from tracepipe.analyses.steps import GpuSteps, is_step
from tracepipe.event.columns import Int64s
from tracepipe.reports.report import Column, Table
from tracepipe.units import duration_text

# A step is slow if it takes longer than the median by this share and by this many of the usual distances.
_SLOW, _DEVIATIONS = 0.1, 4
# Of fewer steps it is not known what is usual.
_USUAL_LEAST = 3
_PARTS = {
    "compute_ns": "compute",
    "exposed_ns": "communication",
    "lone_copies_ns": "copies",
    "loading_ns": "loading data",
    "other_ns": "idle",
}


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that takes longer than usual: its index, by how much, and what of it takes longer."""

    at: int
    excess_ns: int
    parts: list[tuple[str, int]]
    place: str | None

    def text(self, name: str) -> str:
        """A sentence."""
        parts = ", ".join(f"{part} {'+' if ns > 0 else ''}{duration_text(ns)}" for part, ns in self.parts)
        place = f" in {self.place}" if self.place else ""
        return f"{name} is {duration_text(self.excess_ns)} longer than the median: {parts}{place}."


def wall_ns(found: Overview) -> Int64s:
    """The length of each step: of a GPU's where the program runs far ahead, the longest. Shape `(steps,)`."""
    if not found.of_gpus:
        return found.steps.end_ns - found.steps.start_ns
    lengths: Int64s = np.max([one.end_ns - one.start_ns for one in found.of_gpus], axis=0)
    return lengths


def step_names(found: Overview) -> list[str]:
    """How the steps are called: `#7`, with the name where they have several."""
    names, numbers = found.steps.names, [f"#{number}" for number in found.steps.number]
    if len({name.rstrip("0123456789 #:") for name in names}) == 1:
        return numbers
    return [f"{number} {name}" for number, name in zip(numbers, names, strict=True)]


def steps_table(found: Overview, shown: list[int], *, each: bool = True) -> Table:
    """A table of some steps; a row for each GPU, or, without `each`, for all of them. Without a GPU it has
    their lengths.
    """
    if not found.of_gpus:
        names, walls_ns = step_names(found), wall_ns(found)
        columns = [Column("step", "step"), Column("wall_ns", "wall", "ns")]
        return Table("steps", "Steps", columns, [(names[at], int(walls_ns[at])) for at in shown])
    of_gpus = found.of_gpus if each else [_all_of(found.of_gpus)]
    rows, names = [], step_names(found) if found.steps.are_marked else ["all"]
    for at in shown:
        for one in of_gpus:
            whole_ns = int(one.end_ns[at] - one.start_ns[at])
            parts = [int(part[at]) for part in one.parts]
            cells = (whole_ns - parts[-1], *parts, int(one.loading_ns[at]))
            wall = whole_ns if each else whole_ns // len(found.of_gpus)
            shares = (100 * cell / whole_ns if whole_ns else None for cell in cells)
            rows.append((names[at], one.gpu, wall, *shares))
    columns = [
        Column("step", "step"),
        Column("gpu", "GPU", "id"),
        Column("wall_ns", "wall", "ns"),
        *(
            Column(f"{key}_percent", title, "percent")
            for key, title in (
                ("busy", "GPU busy"), ("compute", "compute"), ("exposed", "comm."), ("lone_copies", "copies"),
                ("idle", "idle"), ("loading", "loading"),
            )
        ),
    ]  # fmt: skip
    if len(of_gpus) == 1:
        del columns[1]
        rows = [(row[0], *row[2:]) for row in rows]
    note = (
        "Compute, comm., copies and idle add up to the step. Comm.: communication while nothing computes. "
        "Copies: while no kernel runs. Loading: the part of idle in which the program loads data."
    )
    if found.is_late:
        note += (
            " The program runs far ahead of the GPU: a step is the time from the first work that was "
            "launched in it to that of the next step."
        )
    return Table("steps", "Steps", columns, rows, note if each else "")


def _all_of(of_gpus: list[GpuSteps]) -> GpuSteps:
    """The sums over all GPUs, as one GPU whose steps begin at 0."""
    whole_ns = np.sum([one.end_ns - one.start_ns for one in of_gpus], axis=0)
    parts = Partition(*(np.sum(part, axis=0) for part in zip(*(one.parts for one in of_gpus), strict=True)))
    loading_ns = np.sum([one.loading_ns for one in of_gpus], axis=0)
    return GpuSteps(-1, np.zeros_like(whole_ns), whole_ns, parts, loading_ns)


def slow_steps(found: Overview) -> Iterator[SlowStep]:
    """The steps that are slower than usual, the slowest first, and what takes longer in them."""
    walls_ns = wall_ns(found)
    if len(walls_ns) < _USUAL_LEAST:
        return
    usual_ns = _median(walls_ns)
    distance_ns = _median(np.abs(walls_ns - usual_ns))
    least_ns = max(_SLOW * usual_ns, _DEVIATIONS * distance_ns)
    whole = _all_of(found.of_gpus)
    count = len(found.of_gpus)
    columns = {**whole.parts._asdict(), "loading_ns": whole.loading_ns}
    columns["other_ns"] = columns.pop("idle_ns") - whole.loading_ns
    more_ns = {_PARTS[name]: (column - _median(column)) // count for name, column in columns.items()}
    for at in np.argsort(-walls_ns, kind="stable").tolist():
        if walls_ns[at] - usual_ns <= least_ns:
            return
        parts = sorted(((part, int(ns[at])) for part, ns in more_ns.items()), key=lambda one: -one[1])
        shown = [one for one in parts[:2] if one[1] > least_ns / 10] or parts[:1]
        places = found.places_of(at) if shown[0][0] == _PARTS["other_ns"] else ()
        named = (one.line or one.range for one in places if one.line or not is_step(one.range or ""))
        place = next(named, None)
        yield SlowStep(at, int(walls_ns[at] - usual_ns), shown, place)


def _median(values: Int64s) -> int:
    """The median; of an even number of values the lower one."""
    return int(np.partition(values, (len(values) - 1) // 2)[(len(values) - 1) // 2])
