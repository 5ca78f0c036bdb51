"""What is known of a job as a whole: small tables, whichever engine made them of the dataset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from tracepipe.analyses.replay import refused
from tracepipe.dataset.clocks_table import Aligned, read_alignment
from tracepipe.dataset.places import RANKS, Dataset
from tracepipe.errors import InputError, TracepipeError
from tracepipe.libraries import np
from tracepipe.ranks import queries
from tracepipe.ranks.costs import Costs
from tracepipe.ranks.engine import Columns, Engine, rows
from tracepipe.ranks.path import Done, Paths
from tracepipe.ranks.places import Places
from tracepipe.ranks.programs import Programs
from tracepipe.ranks.stragglers import (
    MORE_CALLS,
    SEQUENCE,
    SLOWER,
    Straggler,
    Suspect,
    behaviours,
    once_each,
    slow_links,
    slower_places,
    slower_ranks,
    stragglers,
)


def _answer(sql: str) -> cached_property[Columns]:
    """The answer to a query, which is asked once."""
    return cached_property(lambda job: job.engine.columns(sql))


@dataclass
class Job:
    """The ranks of a dataset, as an engine tells. Raises InputError where no rank used a GPU. `step` is that
    of `path`: critical paths are followed if there is one.
    """

    engine: Engine
    dataset: Dataset
    step: int | None = None

    def __post_init__(self) -> None:
        if not {"steps", RANKS} <= set(self.dataset.layers()):
            raise InputError(
                "no rank of it used a GPU",
                "Record what the GPUs do: capture --gpu kernels.",
                path=str(self.dataset.folder),
            )
        self._paths: Paths | None = None

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
        suspects: Iterable[Suspect] = slower_ranks(self.times)
        if self._places is not None and MORE_CALLS in self.times:
            suspects = chain(suspects, slower_places(self.times, self._places.table))
        suspects = chain(suspects, slow_links(self.groups, self.members))
        found = once_each(stragglers(suspects, costs.saved_ns if costs else lambda some: [none] * len(some)))
        if costs:
            found = (replace(one, everywhere=costs.everywhere(one)) for one in found)
        found = (one if one.everywhere else replace(one, at=self._where(one)) for one in found)
        return sorted(found, key=lambda one: (-(one.costs_ns or 0), one.ranks, one.slow))

    @cached_property
    def _places(self) -> Places | None:
        """The places in the programs, None where these are not known."""
        return Places(self.dataset, self.ranks) if self._programs[0] else None

    def _where(self, one: Straggler) -> str:
        """Where in its program a rank is slow, "" if that is not known, or at many places."""
        name = {SLOWER[name]: name for name in ("compute_ns", "host_ns")}.get(one.slow)
        if self._places is None or name is None:
            return ""
        (rank,), ranks, sequence = one.ranks, self.times, self._places.sequence
        own = ranks["rank"] == rank
        alike = (ranks["behaviour"] == ranks["behaviour"][own]) & ~own
        same = alike & [sequence.get(other) == sequence.get(rank) for other in ranks["rank"].tolist()]
        alike = same if same.any() else alike
        own_ns = np.where(alike, ranks[name] / ranks["steps"].clip(1), np.inf)
        # The peer of median time, of two the faster one.
        peer = int(ranks["rank"][np.argsort(own_ns, kind="stable")[(alike.sum() - 1) // 2]])
        if name == "compute_ns":
            return self._places.kernel(rank, peer, one.excess_ns)
        return self._places.call(rank, peer, one.excess_ns, self.hosts[rank], one.places)

    @property
    def costs(self) -> Costs:
        """The programs of all ranks, and what their replay tells. Raises TracepipeError without programs."""
        costs, error = self._programs
        if costs is None:
            raise error or AssertionError
        return costs

    @property
    def replayed(self) -> Costs | None:
        """The same, None where a replay would say nothing, or something wrong."""
        return None if self._refusal else self._programs[0]

    @property
    def not_replayed(self) -> str:
        """Why the steps cannot be replayed, "" where they can."""
        return f"{self._refusal.message} {self._refusal.hint}" if self._refusal else ""

    @cached_property
    def _refusal(self) -> TracepipeError | None:
        costs, error = self._programs
        if costs is not None and error is None:
            try:
                costs.replay.refuse_what_misleads()
            except TracepipeError as e:
                return e
        return error

    @cached_property
    def _programs(self) -> tuple[Costs | None, TracepipeError | None]:
        clocks, costs = dict(rows(self.ranks, "rank", "clock")), None
        try:
            programs = Programs(self.dataset, self.aligned, clocks)
            if self.step is not None:
                self._paths = Paths(self.dataset, self.hosts, programs, self.step)
            costs = Costs(programs, self._paths.follow if self._paths else None)
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
        if costs is None:
            return self.ranks
        times = costs.own_times(self.ranks, is_replayed=not self._refusal)
        if self._places is not None:
            ranks, places = times["rank"].tolist(), self._places
            if self.replayed and costs.programs.has_calls:
                times[MORE_CALLS] = np.array([places.more_ns.get(rank, 0) for rank in ranks])
            else:  # the time of the host is that of the idle GPU, and stages of a pipeline idle differently
                times[SEQUENCE] = np.array([places.sequence.get(rank, -1 - rank) for rank in ranks])
        return times

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

    @property
    def _followed(self) -> Paths | None:
        """The critical paths, which the replay without a change follows."""
        _, error = self._programs
        return None if error else self._paths

    @property
    def led(self) -> dict[int, dict[int, int]]:
        """For each of at most PATHS_MOST steps, how long each rank is on its critical path, in ns, without
        transfers.
        """
        return paths.led if (paths := self._followed) else {}

    @property
    def path(self) -> list[Done]:
        """What the ranks did on the critical path of the step, nothing where not all ranks have the step."""
        return paths.path if (paths := self._followed) else []
