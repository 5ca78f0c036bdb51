"""The steps of a program: how the GPUs spent each, and what made the slow ones slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from tracepipe.analyses.overview import overview_of
from tracepipe.analyses.step_tables import slow_steps, step_names, steps_table, wall_ns
from tracepipe.options import Option
from tracepipe.reports.largest_cause import cause_lines
from tracepipe.reports.report import Column, Report, Result, Table, not_listed
from tracepipe.store.run import Run
from tracepipe.units import steps_text


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe steps`."""

    top: Annotated[int, Option("Show the N longest steps; 0: all, in their order.", "N")] = 0


def run(run: Run, options: Options) -> Result:
    """How the GPUs spent each step."""
    result, found = Result("STEPS"), overview_of(run)
    if not found.of_gpus:
        result.notes.append("no work of a GPU was recorded, so it is not known how the GPUs spent the steps")
        if not found.steps.are_marked:
            return result
    order = np.arange(len(found.steps.number))
    walls_ns = wall_ns(found)
    if found.steps.are_marked:
        result.title = f"STEPS: {steps_text(walls_ns.tolist())}"
    if 0 < options.top < len(order):
        order = np.sort(np.argsort(-walls_ns, kind="stable")[: options.top])
    result.parts.append(steps_table(found, order.tolist()))
    if found.of_gpus and found.steps.are_marked:
        names = step_names(found)
        rows = [(one.text(names[one.at]),) for one in slow_steps(found)]
        if rows:
            result.parts.append(Table("slow", "Slow steps", (Column("says", ""),), rows))
        causes = [(line,) for line in cause_lines(run, found)]
        result.parts.append(Table("cause", "", (Column("says", ""),), causes))
    elif found.of_gpus:
        result.notes.append("no range is called a step: all of the recording counts as one")
    result.notes += not_listed(len(walls_ns) - len(order), "step|steps")
    return result


REPORT = Report("steps", Options, run)
