"""What is known of a job as a whole: small tables, whichever engine made them of the dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Final

from tracepipe.dataset.clocks_table import Aligned, read_alignment
from tracepipe.dataset.places import RANKS, Dataset, asking
from tracepipe.errors import InputError
from tracepipe.libraries import np
from tracepipe.ranks import queries
from tracepipe.ranks.costs import Costs
from tracepipe.ranks.engine import Columns, Engine, rows
from tracepipe.ranks.path import Bounds, Done, Section, critical_path, done_in
from tracepipe.ranks.programs import programs_of
from tracepipe.ranks.stragglers import Straggler, behaviours, slow_links, stragglers

PATH_MAX: Final = 1 << 20
"""The most rows of collectives of one step for which a path is made. A step has more if a run has no steps.
"""


def _answer(sql: str) -> cached_property[Columns]:
    """The answer to a query, which is asked once."""
    return cached_property(lambda job: job.engine.columns(sql))


@dataclass
class Job:
    """The ranks of a dataset, as an engine tells. Raises InputError where no rank used a GPU."""

    engine: Engine
    dataset: Dataset

    def __post_init__(self) -> None:
        if not {"steps", RANKS} <= set(self.dataset.layers()):
            raise InputError(
                "no rank of it used a GPU",
                "Record what the GPUs do: capture --gpu kernels.",
                path=str(self.dataset.folder),
            )

    @cached_property
    def ranks(self) -> Columns:
        """The columns of `queries.RANKS`, and `behaviour`; by rank."""
        found = self.engine.columns(queries.RANKS)
        return found | {"behaviour": behaviours(found, self.members)}

    @cached_property
    def hosts(self) -> dict[int, str]:
        """The host of each rank."""
        return dict(rows(self.ranks, "rank", "host"))

    steps = _answer(queries.BY_STEP)
    groups = _answer(queries.GROUPS)
    members = _answer(queries.MEMBERS_OF_GROUPS)
    waited_for = _answer(queries.WAITED_FOR)

    @cached_property
    def stragglers(self) -> list[Straggler]:
        """Ranks that are slower than their peers, those that cost most first."""
        costs = self.costs
        found = [
            *stragglers(self.times, costs.saved_ns),
            *slow_links(self.groups, self.members, costs.saved_by_links_ns),
        ]
        return sorted(found, key=lambda one: (-(one.costs_ns or 0), one.ranks, one.slow))

    @cached_property
    def costs(self) -> Costs:
        """The replay of all ranks, and what it tells."""
        programs = programs_of(self.dataset)
        clocks = dict(rows(self.ranks, "rank", "clock"))
        return Costs(programs, programs.replay(self.aligned, clocks))

    @cached_property
    def times(self) -> Columns:
        """The columns of `ranks`, with the own times of the ranks that are compared."""
        return self.costs.own_times(self.ranks)

    @cached_property
    def aligned(self) -> Aligned:
        """Where the clocks go."""
        return read_alignment(self.dataset)

    def usual_step(self) -> int:
        """The step of median length."""
        steps = self.steps
        order = np.lexsort((steps["step"], steps["step_ns"] // steps["ranks"]))
        return int(steps["step"][order[(len(order) - 1) // 2]])

    def path(self, step: int) -> list[Section]:
        """The critical path of a step, empty where the recordings show none."""
        members = f"select count(*) as rows from members where step = {step}"
        if self.engine.columns(members)["rows"][0] > PATH_MAX:
            return []
        bounds, found = {}, self.engine.columns(queries.bounds(step))
        for rank, start_ns, end_ns, clock in rows(found, "rank", "start_ns", "end_ns", "clock"):
            place = self.aligned.placements.get(clock)
            bounds[rank] = Bounds(start_ns, end_ns, None if place is None else place.line.place(end_ns))
        return critical_path(bounds, self.engine.columns(queries.members_of(step)))

    def done(self, path: list[Section]) -> Iterator[Done]:
        """What the ranks did in the sections of a path. One rank's work is in memory at a time."""
        by_rank = attrgetter("rank")
        for rank, sections in groupby(sorted(path, key=by_rank), by_rank):
            own = list(sections)
            # One rank's work in the step is in memory at a time.
            work = self._between(rank, own, "work", "purpose")
            yield from done_in(own, work, self._between(rank, own, "annotations"))

    def _between(self, rank: int, sections: list[Section], layer: str, *more: str) -> Columns:
        """Names, times and more columns of a rank's rows in a layer, around some sections."""
        names = ("name", "start_ns", "end_ns", *more)
        file = self.dataset.part(layer, self.hosts[rank], rank)
        if not file.is_file():
            return {name: np.zeros(0, np.int64 if "_ns" in name else object) for name in names}
        with asking(file) as connection:
            found: Columns = connection.execute(
                f"""select * replace (coalesce(name, '') as name) from (select {", ".join(names)} from part)
                where start_ns < {max(one.end_ns for one in sections)}
                and end_ns > {min(one.start_ns for one in sections)}
                order by start_ns, end_ns desc, name"""
            ).fetchnumpy()
        return found
