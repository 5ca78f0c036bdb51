"""What the steps of a job would be with a change: the names that the ranks of a dataset have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from weakref import WeakKeyDictionary

from tracepipe.analyses.changes import Kind, Matches, Most, Named
from tracepipe.analyses.idle_places import is_operator
from tracepipe.analyses.program import Program
from tracepipe.analyses.replay import Window
from tracepipe.analyses.steps import is_step
from tracepipe.dataset.places import files_of
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import Bools, Int64s
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
# `wanted` are names of ranges and calls, by their numbers.
_OPEN: Final = f"""
create temp table open as
select rank, number, start_ns, end_ns from annotations join wanted using (name)
where wanted.of = 'ranges' and end_ns > start_ns
union all
select rank, number, start_ns, end_ns from calls join wanted using (name)
where wanted.of = 'calls' and {_OUTERMOST}
"""
_OPEN_IN_WINDOW: Final = """
select place, number, start_ns, end_ns from open join spans using (rank)
where end_ns > from_ns and start_ns < until_ns order by place, number, start_ns
"""


def whatif(job: Job, options: Options) -> Result:
    """The length of the steps of all ranks with a change, or with each of many changes."""
    job.has_paths = False
    costs = job.costs
    with TemporaryDirectory(prefix="tracepipe-ranks-") as folder:
        members = _Members(job, Path(folder))
        others = [] if options.like_peers is None else [_like_peers(job, options.like_peers)]
        return answer(
            costs.replay, members.of, members.has, members.most, options, others, costs.programs.ranks
        )


class _Member:
    """The subject that is a rank of a dataset, in a window. `open_ns` has when ranges and calls are open, by
    their names.
    """

    def __init__(
        self,
        program: RankProgram,
        are_kernels: Callable[[Matches], Bools],
        open_ns: Mapping[tuple[Kind, str], Int64s],
    ) -> None:
        self.program: Program = program
        self._name, self._are_kernels, self._open_ns = program.name, are_kernels, open_ns

    def ranges(self, matches: Matches) -> Stretches:
        return self._open("ranges", matches)

    def calls(self, matches: Matches) -> Stretches:
        return self._open("calls", matches)

    def kernels(self, matches: Matches) -> Bools:
        return self._are_kernels(matches)[self._name]

    def _open(self, kind: Kind, matches: Matches) -> Stretches:
        own = [ns for (one, name), ns in self._open_ns.items() if one == kind and matches(name)]
        times_ns = np.concatenate([np.zeros((0, 2), np.int64), *own])
        return Stretches(times_ns[:, 0], times_ns[:, 1])


class _Members:
    """The ranks of a job, and their names. Of ranges and calls those are kept that were asked for."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._programs = job.costs.programs
        self._found: WeakKeyDictionary[Window, list[_Member]] = WeakKeyDictionary()
        self._is_open = False
        self._connection = connect(":memory:", folder, memory_mb=_MEMORY_MB)
        for layer in ("annotations", "calls", "program"):
            has_layer = layer in job.dataset.layers()
            rows = f"select * from {files_of(job.dataset.layer(layer).absolute())}" if has_layer else _NOTHING
            self._connection.execute(f"create temp view {layer} as {rows}")
        self._spans(*self._programs.spans_ns)
        self._names = {kind: self._connection.execute(sql).fetchall() for kind, sql in _NAMES.items()}
        self._wanted: dict[tuple[Kind, str], None] = dict.fromkeys((kind, "") for kind in _NAMES)

    def _spans(self, from_ns: Int64s, until_ns: Int64s) -> None:
        ranks = np.array(self._programs.ranks)
        place = np.arange(len(ranks))
        self._connection.register(
            "spans", {"rank": ranks, "place": place, "from_ns": from_ns, "until_ns": until_ns}
        )

    def has(self, kind: Kind, matches: Matches) -> bool:
        found = dict.fromkeys((kind, name) for name, *_ in self._names[kind] if matches(name))
        self._wanted |= found
        return bool(found)

    def most(self) -> Most:
        """The names that take most time on all ranks together."""
        found = {kind: Counter[str]() for kind in self._names}
        for kind, names in self._names.items():
            for name, domain, ns in sorted(names, key=lambda one: one[:2]):
                is_other = kind == "ranges" and (is_step(name) or is_operator(name, domain))
                if name and ns is not None and not is_other:
                    found[kind][name] += int(ns)
        return Most(*([name for name, _ in of.most_common()] for of in found.values()))

    def of(self, window: Window) -> Sequence[_Member]:
        """The ranks in a window."""
        if window not in self._found:
            if not self._is_open:
                kinds, names = (np.array(column, object) for column in zip(*self._wanted, strict=True))
                wanted = {"of": kinds, "name": names, "number": np.arange(len(names))}
                self._connection.register("wanted", wanted)
                self._connection.execute(_OPEN)
                self._is_open = True
            self._found[window] = [*self._members(window)]
        return self._found[window]

    def _members(self, window: Window) -> Iterator[_Member]:
        @cache
        def are_kernels(matches: Matches) -> Bools:
            # The last flag is for rows without a name.
            return np.array([*map(matches, self._programs.names), False])

        ends_ns = [
            (int(one.from_ns[0]), int(one.call_ns[-1]) + 1) if len(one) else (0, 0) for one in window.programs
        ]
        self._spans(*np.array(ends_ns, np.int64).T)
        found = self._connection.execute(_OPEN_IN_WINDOW).fetchnumpy()
        times_ns, count = np.stack([found["start_ns"], found["end_ns"]], axis=1), len(self._wanted)
        bounds = np.searchsorted(
            found["place"] * count + found["number"], np.arange(len(window.programs) * count + 1)
        )
        for number, one in enumerate(window.programs):
            assert isinstance(one, RankProgram)
            own = pairwise(bounds[number * count : (number + 1) * count + 1].tolist())
            yield _Member(
                one, are_kernels, {key: times_ns[a:b] for key, (a, b) in zip(self._wanted, own, strict=True)}
            )


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
    return Named(f"rank {rank} as its peers", lambda window, _: costs.as_peers(window, rank, COMPARED, peers))
