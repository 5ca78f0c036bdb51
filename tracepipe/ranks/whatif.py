"""What the steps of a job would be with a change: the names that the ranks of a dataset have."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from tracepipe.analyses.changes import Kind, Matches, Most, Named
from tracepipe.analyses.idle_places import is_operator
from tracepipe.analyses.replay import Window
from tracepipe.analyses.steps import is_step
from tracepipe.dataset.places import files_of
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import Bools
from tracepipe.event.intervals import Stretches
from tracepipe.libraries import np
from tracepipe.ranks.engine import rows
from tracepipe.ranks.job import Job
from tracepipe.ranks.programs import RankProgram
from tracepipe.ranks.queries import COMPARED
from tracepipe.reports.report import Result
from tracepipe.reports.whatif import Options, answer
from tracepipe.store.tables import connect

_MEMORY_MB: Final = 200
_NOTHING: Final = """
select null::bigint as rank, '' as kind, '' as name, '' as domain, 0 as tid, 0 as launch,
    0 as parent_row, 0 as start_ns, 0 as end_ns where false
"""
_SUM: Final = "sum(end_ns - start_ns)"
# The time in `most` is that which may be tried, and the whole time that which may be named.
_RANGES: Final = f"""
select name, coalesce(domain, ''), {_SUM} filter (
    tid is not null and end_ns > spans.from_ns and start_ns < spans.until_ns
) from annotations join spans using (rank) where end_ns > start_ns and name is not null group by all
"""
_OUTERMOST: Final = "kind = 'span' and parent_row is null and end_ns > start_ns"
_CALLS: Final = f"""
select name, '', {_SUM} filter (launch is null) from calls
where {_OUTERMOST} and name is not null group by all
"""
_KERNELS: Final = f"""
select name, '', {_SUM} from program where kernel_row <> -1 and name is not null group by all
"""
_NAMES: Final[dict[Kind, str]] = {"ranges": _RANGES, "calls": _CALLS, "kernels": _KERNELS}
_OPEN: Final[dict[Kind, str]] = {
    "ranges": "annotations semi join spans using (rank) where end_ns > start_ns",
    "calls": f"calls semi join spans using (rank) where {_OUTERMOST}",
}  # fmt: skip


def whatif(job: Job, options: Options) -> Result:
    """The length of the steps of all ranks with a change, or with each of many changes."""
    costs = job.costs
    with TemporaryDirectory(prefix="tracepipe-ranks-") as folder:
        names = _Names(job, Path(folder))
        others = [] if options.like_peers is None else [_like_peers(job, options.like_peers)]
        ranks = costs.programs.ranks
        return answer(costs.replay, names.subjects, names.has, names.most, options, others, ranks)


class _Member(NamedTuple):
    """The subject that is a rank of a dataset, by its number, in a window."""

    names: _Names
    number: int
    program: RankProgram

    def ranges(self, matches: Matches) -> Stretches:
        return self.names.open("ranges", matches)[self.number]

    def calls(self, matches: Matches) -> Stretches:
        return self.names.open("calls", matches)[self.number]

    def kernels(self, matches: Matches) -> Bools:
        return self.names.are_kernels(matches)[self.program.name]


class _Names:
    """The names of what the ranks of a job do, and when it runs. A name that was asked for is kept."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._programs = job.costs.programs
        self._connection = connect(":memory:", folder, memory_mb=_MEMORY_MB)
        for layer in ("annotations", "calls", "program"):
            has_layer = layer in job.dataset.layers()
            rows = f"select * from {files_of(job.dataset.layer(layer).absolute())}" if has_layer else _NOTHING
            self._connection.execute(f"create temp view {layer} as {rows}")
        from_ns, until_ns = self._programs.spans_ns.T
        spans = {"rank": np.array(self._programs.ranks), "from_ns": from_ns, "until_ns": until_ns}
        self._connection.register("spans", spans)
        self._names = {kind: self._connection.execute(sql).fetchall() for kind, sql in _NAMES.items()}
        self.open, self.are_kernels = cache(self._open), cache(self._are_kernels)

    def subjects(self, window: Window) -> list[_Member]:
        """The ranks in a window."""
        programs = (one for one in window.programs if isinstance(one, RankProgram))
        return [_Member(self, number, one) for number, one in enumerate(programs)]

    def has(self, kind: Kind, matches: Matches) -> bool:
        return any(matches(name) for name, *_ in self._names[kind])

    def most(self) -> Most:
        """The names that take most time on all ranks together."""
        found = {kind: Counter[str]() for kind in self._names}
        for kind, names in self._names.items():
            for name, domain, ns in sorted(names, key=lambda one: one[:2]):
                is_other = kind == "ranges" and (is_step(name) or is_operator(name, domain))
                if name and ns is not None and not is_other:
                    found[kind][name] += int(ns)
        return Most(*([name for name, _ in of.most_common()] for of in found.values()))

    def _open(self, kind: Kind, matches: Matches) -> list[Stretches]:
        """When ranges or calls with some names are open on each rank."""
        names = [*{name for name, *_ in self._names[kind] if matches(name)}]
        sql = f"select rank, start_ns, end_ns from {_OPEN[kind]} and name in ? order by rank, start_ns"
        found = self._connection.execute(sql, [names]).fetchnumpy()
        ranks = self._programs.ranks
        bounds = np.searchsorted(found["rank"], [*ranks, ranks[-1] + 1]).tolist()
        return [Stretches(found["start_ns"][a:b], found["end_ns"][a:b]) for a, b in pairwise(bounds)]

    def _are_kernels(self, matches: Matches) -> Bools:
        # The last flag is for rows without a name.
        return np.array([*map(matches, self._programs.names), False])


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
    at = costs.place[rank]
    return Named(
        f"rank {rank} as its peers",
        lambda window, number, _: costs.as_peers(window, rank, COMPARED, peers) if number == at else None,
    )
