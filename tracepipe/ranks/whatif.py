"""What the steps of a job would be with a change: the names that the ranks of a dataset have."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Final

from tracepipe.analyses.changes import Matches, Most, Named
from tracepipe.analyses.idle_places import is_operator
from tracepipe.analyses.program import Program
from tracepipe.analyses.steps import is_step
from tracepipe.dataset.places import Dataset, asking
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import NONE, Bools
from tracepipe.event.intervals import Stretches
from tracepipe.libraries import np
from tracepipe.ranks.engine import rows
from tracepipe.ranks.job import Job
from tracepipe.ranks.queries import COMPARED
from tracepipe.reports.report import Result
from tracepipe.reports.whatif import Options, answer

_OUTERMOST: Final = "kind = 'span' and parent_row is null"
_RANGES: Final = """
select name, domain, sum(end_ns - start_ns) from part
where tid is not null and end_ns > ? and start_ns < ? group by name, domain
"""
_CALLS: Final = f"""
select name, sum(end_ns - start_ns) from part where {_OUTERMOST} and launch is null group by name
"""
_KERNEL: Final = f"kernel_row <> {NONE}"
_KERNELS: Final = f"select name, sum(end_ns - start_ns) from part where {_KERNEL} group by name"


def whatif(job: Job, options: Options) -> Result:
    """The length of the steps of all ranks with a change, or with each of many changes."""
    programs = job.costs.programs
    both = zip(programs.ranks, programs.programs, strict=True)
    members = [Member(job.dataset, job.hosts[rank], rank, one) for rank, one in both]
    others = [] if options.like_peers is None else [_like_peers(job, options.like_peers)]
    return answer(members, job.costs.replay, partial(_most, members), options, others, programs.ranks)


class Member:
    """The subject that is a rank of a dataset. Nothing is read that is not asked for."""

    def __init__(self, dataset: Dataset, host: str, rank: int, program: Program) -> None:
        self.program = program
        self._part = partial(dataset.part, host=host, rank=rank)

    def rows(self, layer: str, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """The answer to a question about its part of a layer, nothing where it has none."""
        if not (file := self._part(layer)).is_file():
            return []
        with asking(file) as connection:
            found: list[tuple[Any, ...]] = connection.execute(sql, values).fetchall()
        return found

    def ranges(self, matches: Matches) -> Stretches:
        return self._open("annotations", "end_ns > start_ns", matches)

    def calls(self, matches: Matches) -> Stretches:
        return self._open("calls", _OUTERMOST, matches)

    def kernels(self, matches: Matches) -> Bools:
        names = self._names("program", _KERNEL, matches)
        found = np.zeros(len(self.program), np.bool_)
        rows = self.rows("program", f"select place from part where {_KERNEL} and name in ?", names)
        found[[place for (place,) in rows]] = True
        return found

    def _open(self, layer: str, which: str, matches: Matches) -> Stretches:
        names = self._names(layer, which, matches)
        sql = f"select start_ns, end_ns from part where {which} and name in ?"
        times = np.array(self.rows(layer, sql, names) if names else [], np.int64).reshape(-1, 2)
        return Stretches(times[:, 0], times[:, 1])

    def _names(self, layer: str, which: str, matches: Matches) -> list[str]:
        sql = f"select distinct name from part where {which} and name is not null"
        return [name for (name,) in self.rows(layer, sql) if matches(name)]


def _like_peers(job: Job, rank: int) -> Named:
    """The change by which a rank does as its peers: on its GPU, on the host, loading data and copying."""
    place, costs = dict(rows(job.ranks, "rank", "behaviour")), job.costs
    if rank not in costs.place:
        raise TracepipeError(f"There is no rank {rank}.", "ranks --top 0 lists the ranks.")
    peers = [one for one in costs.place if one != rank and place.get(one) == place[rank]]
    if not peers:
        raise TracepipeError(
            f"No other rank does the same work as rank {rank}.", "ranks lists the ranks that do."
        )
    return f"rank {rank} as its peers", {costs.place[rank]: costs.as_peers(rank, COMPARED, peers)}


def _most(members: list[Member]) -> Most:
    """The names that take most time on all ranks together."""
    ranges, calls, kernels = (Counter[str]() for _ in range(3))
    for one in members:
        program = one.program
        if not len(program):
            continue
        ends_ns = int(program.from_ns[0]), int(program.called_ns[-1])
        for name, domain, ns in one.rows("annotations", _RANGES, *ends_ns):
            if name and not is_step(name) and not is_operator(name, domain or ""):
                ranges[name] += ns
        for found, layer, sql in ((calls, "calls", _CALLS), (kernels, "program", _KERNELS)):
            found.update({name: int(ns) for name, ns in one.rows(layer, sql) if name})
    return Most(*([name for name, _ in found.most_common()] for found in (ranges, calls, kernels)))
