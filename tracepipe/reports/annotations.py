"""The GPU's time for each range that the program marked (NVTX): how long it worked and waited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tracepipe.analyses.gpu_by_range import ranges_by_gpu_time
from tracepipe.analyses.parts import PartOptions, part_of, titled
from tracepipe.options import Option
from tracepipe.reports.report import Column, Report, Result, Table, not_listed
from tracepipe.store.run import Run

_NOTE = (
    "Wall: the length of the ranges. On GPU: from the start of the first kernel or copy "
    "that was launched in a range to the end of the last. Busy: the part of that time during which any of "
    "these ran, on any stream; idle: the rest. "
)


@dataclass(frozen=True, slots=True)
class Options(PartOptions):
    """Options of `tracepipe annotations`."""

    top: Annotated[int, Option("Show at most N names; 0: all.", "N")] = 20


def run(run: Run, options: Options) -> Result:
    """The ranges by name, with the GPU's time for each name."""
    part = part_of(run, options)
    result = Result(titled("ANNOTATIONS ON THE GPU", part))
    shown, count, rules = ranges_by_gpu_time(run, options.top, holds=part.holds if part else None)
    columns = (
        Column("name", "range"),
        Column("count", "count", "count"),
        Column("wall_ns", "wall", "ns"),
        Column("launches", "launches", "count"),
        Column("on_gpu_ns", "on GPU", "ns"),
        Column("busy_ns", "busy", "ns"),
        Column("idle_percent", "idle", "percent"),
    )
    table = Table(
        "ranges", "Ranges by the GPU's time", columns, shown, _NOTE + rules, empty="No ranges were recorded."
    )
    result.parts.append(table)
    result.notes += not_listed(count - len(shown), "name|names")
    return result


REPORT = Report("annotations", Options, run, suits=lambda run: len(run.layer("annotation")) > 0)
