"""The report on a job: which rank is slow, at what, and what others lose by it."""

from __future__ import annotations

from typing import Final

from tracepipe.errors import InputError
from tracepipe.libraries import pl
from tracepipe.ranks import tables
from tracepipe.ranks.job import Job
from tracepipe.ranks.stragglers import longest_unjudged
from tracepipe.reports.report import Result
from tracepipe.units import agree, counted, duration_text

_NAMES_MAX: Final = 8


def report(job: Job, top: int, step: int | None = None) -> Result:
    """The tables about a job, with `top` rows each at most, 0: all.

    `step` is that of the critical path, by default the one of median length. Raises InputError where no rank
    has such a step.
    """
    if step is not None and step not in job.steps["step"]:
        numbers = tables.rank_text(job.steps["step"])
        raise InputError(f"has no step {step}", f"Its steps: {numbers}.", path=str(job.dataset.folder))
    found = [
        tables.slow(job),
        tables.waited_for(job),
        tables.ranks(job),
        tables.collectives(job),
        tables.behaviours(job),
        tables.critical_path(job, job.usual_step() if step is None else step),
        tables.steps(job),
    ]
    notes = _notes(job)
    for table in found:
        rows = list(table.rows)
        if top and len(rows) > top:
            table.rows = rows[:top]
            notes.append(f"{table.name}: {counted(len(rows) - top, 'more row|rows')}; --top 0 lists all")
    return Result("RANKS", [*found], notes)


def _notes(job: Job) -> list[str]:
    """Notes about what the dataset lacks, or has in a wrong form."""
    ranks = job.ranks
    hosts = counted(ranks["host"].n_unique(), "host|hosts")
    notes = [f"{counted(len(ranks), 'rank|ranks')} of {hosts}"]
    world = ranks["world_size"].max()
    if isinstance(world, int) and world > len(ranks):
        absent = sorted(set(range(world)) - set(ranks["rank"]))
        names = tables.rank_text(absent[:_NAMES_MAX]) + " …" * (len(absent) > _NAMES_MAX)
        notes.append(f"not in the dataset: {len(absent)} of {world} ranks: {names}")
    lost = int(ranks["lost"].sum())
    if lost:
        notes.append(f"lost: {lost:,} {agree(lost, 'event|events happened and was|were not recorded')}")
    clocks = job.alignment
    unplaced = len(clocks.filter(pl.col("bound_ns").is_null()))
    if unplaced and len(clocks) > 1:
        notes.append(
            f"{unplaced} of {len(clocks)} clocks {agree(unplaced, 'is|are')} not placed on the common one"
        )
    return [*notes, *_unjudged(job)]


def _unjudged(job: Job) -> list[str]:
    """The note about ranks with one step each, which do not show who is slow."""
    if (longest := longest_unjudged(job.ranks)) is None:
        return []
    return [
        "with one step of few ranks it is not known how much steps differ, so no rank is called slow; "
        f"longest: rank {longest.ranks[0]}, {longest.slow}, {duration_text(longest.own_ns)}, usual "
        f"{duration_text(longest.usual_ns)}. Record more steps, each in a range that is called step"
    ]
