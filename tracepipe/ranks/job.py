"""What is known of a job as a whole: small tables, whichever engine made them of the dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from tracepipe.analyses.replay import TRANSFERS, Piece, refused
from tracepipe.dataset.clocks_table import Aligned, read_alignment
from tracepipe.dataset.places import RANKS, Dataset
from tracepipe.errors import InputError, TracepipeError
from tracepipe.libraries import np
from tracepipe.ranks import queries
from tracepipe.ranks.costs import Costs
from tracepipe.ranks.engine import Columns, Engine, rows
from tracepipe.ranks.path import Done, done_on
from tracepipe.ranks.programs import programs_of
from tracepipe.ranks.stragglers import Straggler, behaviours, slow_links, stragglers

PATHS_MOST: Final = 64
"""Of how many steps the critical path is followed, to tell which ranks are on it."""


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

    @cached_property
    def stragglers(self) -> list[Straggler]:
        """Ranks that are slower than their peers, those that cost most first."""
        costs, none = self.replayed, np.zeros(0, np.int64)
        found = [
            *stragglers(self.times, costs.saved_ns if costs else lambda *_: none),
            *slow_links(self.groups, self.members, costs.saved_by_links_ns if costs else lambda _: none),
        ]
        return sorted(found, key=lambda one: (-(one.costs_ns or 0), one.ranks, one.slow))

    @property
    def costs(self) -> Costs:
        """The programs of all ranks, and what their replay tells. Raises TracepipeError without programs."""
        costs, error = self._programs
        if costs is None:
            raise error or AssertionError
        return costs

    @property
    def replayed(self) -> Costs | None:
        """The same, None where the steps cannot be replayed."""
        costs, error = self._programs
        return None if error else costs

    @property
    def not_replayed(self) -> str:
        """Why the steps cannot be replayed, "" where they can."""
        error = self._programs[1]
        return f"{error.message} {error.hint}" if error else ""

    @cached_property
    def _programs(self) -> tuple[Costs | None, TracepipeError | None]:
        clocks, costs = dict(rows(self.ranks, "rank", "clock")), None
        try:
            programs = programs_of(self.dataset)
            costs = Costs(programs, programs.replay(self.aligned, clocks))
            if not len(costs.replay.steps_ns(costs.replay.unchanged_ns)):
                raise refused("the ranks have none in common", "Record the same steps on all ranks.")
        except InputError:
            raise
        except TracepipeError as e:
            return costs, e
        return costs, None

    @cached_property
    def times(self) -> Columns:
        """The columns of `ranks`, with the own times of the ranks that are compared."""
        costs = self._programs[0]
        return costs.own_times(self.ranks) if costs else self.ranks

    @cached_property
    def aligned(self) -> Aligned:
        """Where the clocks go."""
        return read_alignment(self.dataset)

    def usual_step(self) -> int:
        """The step of median length, of those that most ranks have."""
        most = self.steps["ranks"] == self.steps["ranks"].max()
        steps = {name: column[most] for name, column in self.steps.items()}
        order = np.lexsort((steps["step"], steps["step_ns"] // steps["ranks"]))
        return int(steps["step"][order[(len(order) - 1) // 2]])

    @cached_property
    def led(self) -> dict[int, dict[int, int]]:
        """For each of at most PATHS_MOST steps, how long each rank is on its critical path, in ns, without
        transfers.
        """
        costs, numbers = self.replayed, [*dict.fromkeys(self._numbers)]
        found: dict[int, dict[int, int]] = {}
        if costs is None:
            return found
        some = numbers[:: -(-len(numbers) // PATHS_MOST) or 1]
        paths = costs.replay.paths(costs.replay.unchanged, map(self._numbers.index, some))
        for step, path in zip(some, paths, strict=True):
            of_rank = found.setdefault(step, {})
            for piece in path:
                rank = costs.programs.ranks[piece.number]
                of_rank[rank] = of_rank.get(rank, 0) + (piece.ns if piece.what != TRANSFERS else 0)
        return found

    def path(self, step: int) -> list[Piece]:
        """The critical path of a step, empty where not all ranks have the step."""
        costs, numbers = self.replayed, self._numbers
        if costs is None or step not in numbers:
            return []
        (path,) = costs.replay.paths(costs.replay.unchanged, [numbers.index(step)])
        return path

    @cached_property
    def _numbers(self) -> list[int]:
        """The numbers of the steps that all ranks have."""
        costs = self.replayed
        return costs.programs.programs[0].numbers[costs.replay.common[0]].tolist() if costs else []

    def done(self, path: list[Piece]) -> Iterator[Done]:
        """What the ranks did on a path."""
        return done_on(path, self.costs.programs, self.dataset, self.hosts) if path else iter(())
