"""Ranks that do the same work, and those that are slower than these peers, and at what: computing, loading
data, the host, copies, the network.

Only ranks that do the same work can be compared. Stages of a pipeline run other kernels than each other, and
ranks that only receive run other collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

from numpy.typing import NDArray

from tracepipe.analyses.distribution import median_within
from tracepipe.libraries import np
from tracepipe.ranks.engine import Columns, rows
from tracepipe.ranks.queries import COMPARED

SLOWER: Final = {
    "compute_ns": "GPU",
    "loading_ns": "data loading",
    "host_ns": "host",
    "copies_ns": "copies",
}
"""A time of COMPARED → what is slow where it is longer than on peers."""
LINK: Final = "link"
MORE_CALLS: Final = "more_calls_ns"
"""The column with how much longer the host should take for what only this rank does."""
SEQUENCE: Final = "sequence"
"""The column with the same number for ranks that make the same calls between the same collectives."""
# Ranks that do the same work differ by less in how much of it they recorded.
_ALIKE: Final = 1.1
_IDLE: Final = ("loading_ns", "host_ns")
_WORK: Final = ("compute_ns", "copies_ns")
# A rank is slower where the difference is more than a share of the step, more than a share of what is usual,
# and far outside of what its own steps and its peers differ by.
_OF_STEP, _OF_USUAL = 0.02, 0.05
# Of many places some differ by chance.
_ERRORS_OF_PLACE: Final = 6.0
# Places explain a difference if they are so much of it, and of what it costs.
EXPLAINS, _EXPLAINS_COSTS = 0.5, 0.75
# The least share of a step by which steps must be longer for it.
_OF_STEP_COSTS: Final = 0.01
_ERRORS, _DEVIATIONS = 4.0, 8.0
# With fewer ranks of one step each, nothing shows how much they differ by chance.
_FEW_RANKS = 32
_POWER_MAX: Final = 50.0
# A normal distribution's standard deviation, divided by the median of the distances from the median.
_DEVIATION: Final = 1.4826
_SLOW_TRANSFER: Final = 1.25
_LEAST_GROUPS: Final = 2
# Groups with a smaller share of a rank's transfers, such as those of its start, say nothing about its link.
_OF_TRANSFERS: Final = 0.01


Place = tuple[int, int]
"""A row that each step has, by `key` and `nth` of `analyses.program.Program`."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than its peers. Times are means of one step.

    `own_ns` and `usual_ns` are the time of the rank and the median of its peers. For a link they are the
    length of a transfer in the rank's process groups and in similar ones. `costs_ns` is by how much a step
    would be shorter if it were not slower, within `bounds_ns` in 95 of 100 cases. `everywhere` is how many
    times as long half of its work or program takes at least, where that makes it slow. `at` is the kernel, or
    the call and its line, where most of the difference is, "" if it is at many. `ranks` are all ranks that
    may be meant.

    If the program takes longer at some places alone, the times are those of these `places`.
    """

    ranks: tuple[int, ...]
    slow: str
    own_ns: int
    usual_ns: int
    peers: int
    costs_ns: int | None = None
    bounds_ns: tuple[int, int] | None = None
    everywhere: float | None = None
    at: str = ""
    places: frozenset[Place] = frozenset()

    @property
    def excess_ns(self) -> int:
        """By how much it is slower."""
        return self.own_ns - self.usual_ns


def behaviours(ranks: Columns, members: Columns) -> NDArray[np.int64]:
    """For each rank the number of its group, from 0, the largest group first. `ranks` and `members` have the
    columns of `queries.RANKS` and `queries.MEMBERS_OF_GROUPS`.

    Ranks of one group run the same operations in process groups of the same sizes, about as often in a step,
    and about as many kernels.
    """
    kinds: dict[int, set[tuple[str, int]]] = {}
    for rank, *kind in rows(members, "rank", "operation", "group_size"):
        kinds.setdefault(rank, set()).add(tuple(kind))
    texts = [str(sorted(kinds.get(rank, ()))) for rank in ranks["rank"].tolist()]
    _, number = np.unique(np.array(texts), return_inverse=True)
    for column in ("kernels", "collectives"):
        # Groups in parts between which no value is nearly the next one.
        value = ranks[column] / ranks["steps"].clip(1)
        order = np.lexsort((value, number))
        apart = (np.diff(number[order]) > 0) | (value[order][1:] > value[order][:-1] * _ALIKE)
        number = np.empty_like(number)
        number[order] = np.concatenate(([0], np.cumsum(apart)))[: len(order)]
    _, first, sizes = np.unique(number, return_index=True, return_counts=True)
    # Of groups of one size, the one with the lowest rank first.
    place = np.argsort(np.lexsort((ranks["rank"][first], -sizes)))
    return place[number]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that is slower, whatever that costs. It is no straggler if its costs are known and not above
    `least_ns`. A replay tells them: with the rank's time of COMPARED called `name` as that of its `peers`, or
    with only a share of the transfers of the groups in `faster`.
    """

    straggler: Straggler
    least_ns: float = -math.inf
    name: str = ""
    peers: Sequence[int] = ()
    faster: dict[_Group, float] = field(default_factory=dict)


Saved = Callable[[Sequence[Suspect]], Sequence[NDArray[np.int64]]]
"""By how much each step gets shorter without the slowness of each of some ranks, none where it is not known.
"""


def stragglers(suspects: Iterable[Suspect], saved_ns: Saved) -> Iterator[Straggler]:
    """Those of some ranks by which steps are longer, where a replay tells."""
    some = [*suspects]
    for one, steps_ns in zip(some, saved_ns(some), strict=True):
        costs_ns, bounds_ns = _costs(steps_ns)
        if costs_ns is None or costs_ns > one.least_ns:
            yield replace(one.straggler, costs_ns=costs_ns, bounds_ns=bounds_ns)


def slower_ranks(ranks: Columns) -> Iterator[Suspect]:
    """Ranks with a longer time of COMPARED than the others of their behaviour. `ranks` has the columns of
    `queries.RANKS`, `behaviour`, and one of these, if they are known: `more_calls_ns`, how much longer the
    host should take for what only this rank does, or `sequence`, so that only hosts of the same one are
    compared.
    """
    of_host = SEQUENCE if SEQUENCE in ranks else "behaviour"
    compared = [(peers, name) for peers in _peers(ranks) for name in COMPARED if name != "host_ns"]
    compared += [(peers, "host_ns") for peers in _peers(ranks, of_host)]
    for peers, name in compared:
        if peers.are_judged:
            slower = peers.are_slower(name)
            others = peers.ranks[~slower].tolist()
            for at in np.flatnonzero(slower).tolist():
                least_ns = _OF_STEP_COSTS * peers.step_ns
                yield Suspect(peers.straggler(at, name), least_ns, name, others)


def slower_places(ranks: Columns, places: Columns) -> Iterator[Suspect]:
    """Ranks whose host takes longer at some places than the others that have the same places. `ranks` has
    the columns of `queries.RANKS`, and `places` those of `places.Places.table`.
    """
    found: dict[int, list[tuple[Place, Suspect]]] = {}
    keys = zip(*(places[name].tolist() for name in ("sequence", "key", "nth")), strict=True)
    for (_, *place), rows_of in groupby(enumerate(keys), key=lambda row: row[1]):
        own = [row for row, _ in rows_of]
        at = np.searchsorted(ranks["rank"], places["rank"][own])
        columns = {name: column[at] for name, column in ranks.items() if name != MORE_CALLS}
        peers = _Peers(columns | {f"host_{unit}": places[unit][own] for unit in ("ns", "us", "us2")})
        if peers.steps.max() == 1:  # nothing tells how much steps differ at this place
            continue
        slower = peers.are_slower("host_ns", _ERRORS_OF_PLACE)
        others, least_ns = peers.ranks[~slower].tolist(), _OF_STEP_COSTS * peers.step_ns
        for number in np.flatnonzero(slower).tolist():
            one = Suspect(peers.straggler(number, "host_ns"), least_ns, "host_ns", others)
            found.setdefault(one.straggler.ranks[0], []).append(((place[0], place[1]), one))
    for slow in found.values():
        _, most = max(slow, key=lambda of: of[1].straggler.excess_ns)
        own_ns, usual_ns = (
            sum(getattr(one.straggler, name) for _, one in slow) for name in ("own_ns", "usual_ns")
        )
        at_places = frozenset(place for place, _ in slow)
        yield replace(
            most, straggler=replace(most.straggler, own_ns=own_ns, usual_ns=usual_ns, places=at_places)
        )


def once_each(found: Iterable[Straggler]) -> Iterator[Straggler]:
    """Each slow host once: by its places, if they explain most of what it takes longer and of what that
    costs, or as a whole.
    """
    every = [*found]
    hosts = {one.ranks: one for one in every if one.slow == SLOWER["host_ns"] and not one.places}
    places = {one.ranks: one for one in every if one.places}
    left_out = []
    for ranks in hosts.keys() & places.keys():
        whole, some = hosts[ranks], places[ranks]
        explain = some.excess_ns >= EXPLAINS * whole.excess_ns
        explain &= (some.costs_ns or 0) >= _EXPLAINS_COSTS * (whole.costs_ns or 0)
        left_out.append(whole if explain else some)
    return (one for one in every if one not in left_out)


def _costs(steps_ns: NDArray[np.int64]) -> tuple[int | None, tuple[int, int] | None]:
    """By how much the median step gets shorter, and within what; None without steps that were replayed."""
    return (round(float(np.median(steps_ns))), median_within(steps_ns)) if len(steps_ns) else (None, None)


def longest_unjudged(ranks: Columns) -> Straggler | None:
    """The rank that is longest beyond its peers, among ranks that are not judged; it may be chance. None if
    no rank exceeds its peers by enough to mention it.
    """
    found = []
    for peers in _peers(ranks):
        for name in () if peers.are_judged else COMPARED:
            own_ns = peers.means_ns(name)
            at, usual_ns = int(own_ns.argmax()), _median(own_ns)
            if own_ns[at] - usual_ns > max(_OF_STEP * peers.step_ns, _OF_USUAL * usual_ns):
                found.append(peers.straggler(at, name))
    return max(found, key=lambda one: one.excess_ns, default=None)


def _peers(ranks: Columns, same: str = "behaviour") -> Iterator[_Peers]:
    """Ranks that do the same work, where there are several."""
    for number in np.unique(ranks[same]):
        own = np.flatnonzero(ranks[same] == number)
        if len(own) > 1:
            yield _Peers({name: column[own] for name, column in ranks.items()})


class _Peers:
    """Ranks that do the same work, how many `steps` each has, and how long one usually is. Columns have the
    shape `(peers,)`.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self.ranks: NDArray[np.int64] = columns["rank"]
        self.steps: NDArray[np.int64] = columns["steps"].clip(1)
        self.step_ns = _median(self.means_ns("step_ns"))

    @property
    def are_judged(self) -> bool:
        """Whether their steps, or their number, tell how much times differ without a reason."""
        return len(self.steps) >= _FEW_RANKS or bool(self.steps.max() != 1)

    def means_ns(self, name: str) -> NDArray[np.float64]:
        """The mean time of one step."""
        means_ns: NDArray[np.float64] = self._columns[name] / self.steps
        return means_ns

    def straggler(self, at: int, name: str) -> Straggler:
        """One of them, by a time of COMPARED."""
        own_ns, usual_ns = self.means_ns(name), self._usual_ns(name)
        return Straggler(
            (int(self.ranks[at]),), SLOWER[name], round(own_ns[at]), round(usual_ns[at]), len(self.steps)
        )

    def _usual_ns(self, name: str) -> NDArray[np.float64]:
        """What is usual for each of them: the median, and that of the host longer for what only it does."""
        usual_ns = np.full(len(self.steps), _median(self.means_ns(name)))
        if name == "host_ns" and MORE_CALLS in self._columns:
            usual_ns += self.means_ns(MORE_CALLS).clip(0)
        return usual_ns

    def are_slower(self, name: str, errors: float = _ERRORS) -> NDArray[np.bool_]:
        """Which of them have a longer time of COMPARED than the others, by more than some errors."""
        own_ns, hidden_ns = self.means_ns(name), np.zeros(len(self.steps))
        if name in _IDLE:
            # While a GPU works, it hides what the host does. If one rank's GPU is slow, the GPUs of its peers
            # idle longer than its own, and no host is slow. Of two ranks, the slower counts.
            work_ns = np.sum([self.means_ns(of) for of in _WORK], axis=0)
            hidden_ns = np.maximum(-_median(-work_ns) - work_ns, 0)
        usual_ns = self._usual_ns(name)
        more_ns = own_ns - usual_ns
        deviation_ns = _DEVIATION * _median(np.abs(own_ns - _median(own_ns)))
        least_ns = np.maximum(_OF_USUAL * usual_ns, max(_OF_STEP * self.step_ns, _DEVIATIONS * deviation_ns))
        is_slower: NDArray[np.bool_] = more_ns - hidden_ns > np.maximum(
            least_ns, self._errors_ns(name, errors)
        )
        return is_slower

    def _errors_ns(self, name: str, errors: float) -> NDArray[np.float64]:
        """How far the difference of each from the others may be chance.

        Sums of few steps say little, and the less the smaller they are. So the variance of all peers is a
        lower limit for each, and Student's distribution gives the limit of a difference.
        """
        steps, own_ns = self.steps, self.means_ns(name)
        us, us2 = (self._columns[name.replace("_ns", unit)] for unit in ("_us", "_us2"))
        squares = np.maximum(us2 - us / steps * us, 0) * 1e6  # sums of squared distances from the mean
        free = int((steps - 1).sum())
        if not free:
            # Only peers tell how much one step differs from others, and long ones do by more than short ones.
            least_ns, usual_ns = _OF_STEP * self.step_ns, _median(own_ns)
            ratios = np.log((own_ns + least_ns) / (usual_ns + least_ns))
            limit = min(_DEVIATIONS * _DEVIATION * _median(np.abs(ratios)), _POWER_MAX)
            return np.full(len(steps), math.expm1(limit) * (usual_ns + least_ns))
        variance = np.maximum(squares.sum() / free, squares / np.maximum(steps - 1, 1))
        # The usual time is as uncertain as a single rank's, if it is one rank. A µs is added, as squares are
        # of whole µs.
        error_ns = np.sqrt(variance / steps * (1 + 2 / len(steps))) + 1_000
        # Wallace's approximation of that distribution, which is finite for any number that is free.
        power = min((errors * (8 * free + 3) / (8 * free + 1)) ** 2 / free, _POWER_MAX)
        limit_ns: NDArray[np.float64] = np.sqrt(free * np.expm1(power)) * error_ns
        return limit_ns


def slow_links(groups: Columns, members: Columns) -> Iterator[Suspect]:
    """Ranks whose process groups all transfer slower than similar groups. `groups` and `members` have the
    columns of `queries.GROUPS` and `queries.MEMBERS_OF_GROUPS`.

    Groups are similar if they run one operation on equally many ranks and elements. Their median transfers
    are compared; the shortest ones, if the last rank of a collective may not be recorded, as a transfer then
    seems longer than it is. A slow link slows every group that its rank is in. Other ranks of these groups
    are in faster ones too, unless each is in one group alone, or there are several slow links:
    ranks that cannot be distinguished are named together.
    """
    alike: dict[tuple[str, int, int], list[_Transfers]] = {}
    names = ("operation", "process_group", "group_size", "elements", "collectives", "usual_ns")
    for operation, group, size, elements, count, own_ns in rows(groups, *names):
        one = _Transfers((operation, group), own_ns, count)
        alike.setdefault((operation, size, round(elements / count)), []).append(one)
    for some in alike.values():
        every_ns = sorted(one.own_ns for one in some)
        for one in some:
            one.usual_ns, one.peers = every_ns[(len(some) - 1) // 2], len(some)
    # No group is similar to the group of all ranks.
    compared = {one.group: one for some in alike.values() for one in some if one.peers >= _LEAST_GROUPS}
    of_rank: dict[int, dict[_Group, _Transfers]] = {}
    for rank, *key in rows(members, "rank", "operation", "process_group"):
        if (own := compared.get((key[0], key[1]))) is not None:
            of_rank.setdefault(rank, {})[own.group] = own
    for rank, of in of_rank.items():
        least_ns = _OF_TRANSFERS * max(one.sum_ns for one in of.values())
        of_rank[rank] = {group: one for group, one in of.items() if one.sum_ns >= least_ns}
    slow = {rank: own for rank, own in of_rank.items() if all(one.is_slow for one in own.values())}
    for ranks in _together({rank: set(own) for rank, own in slow.items()}):
        shown, rank = min(
            ((one, rank) for rank in ranks for one in slow[rank].values()),
            key=lambda pair: (pair[0].ratio, pair[0].group[1], pair[1]),
        )
        faster = {one.group: one.usual_ns / max(one.own_ns, 1) for one in slow[rank].values()}
        found = Straggler(tuple(ranks), LINK, shown.own_ns, shown.usual_ns, shown.peers)
        yield Suspect(found, faster=faster)


_Group = tuple[str, str]
"""An operation and a process group."""


@dataclass(slots=True)
class _Transfers:
    """The usual one of `count` transfers of a group, and that of so many similar groups."""

    group: _Group
    own_ns: int
    count: int
    usual_ns: int = 0
    peers: int = 0

    @property
    def sum_ns(self) -> int:
        return self.own_ns * self.count

    @property
    def ratio(self) -> float:
        return self.own_ns / self.usual_ns if self.usual_ns else math.inf

    @property
    def is_slow(self) -> bool:
        return self.own_ns > _SLOW_TRANSFER * self.usual_ns


def _together(left: dict[int, set[_Group]]) -> Iterator[list[int]]:
    """Ranks that explain all slow groups, those in most of them first.

    Ranks in as many of the same groups cannot be distinguished. Ranks whose slow groups have an explanation
    already are left out: the other groups that would show them to be fast may not have been recorded.
    """
    while left:
        most = max(map(len, left.values()))
        alike = {rank for rank, groups in left.items() if len(groups) == most}
        ranks, groups = {min(alike)}, set(left[min(alike)])
        while more := {rank for rank in alike - ranks if left[rank] & groups}:
            ranks |= more
            groups.update(*(left[rank] for rank in more))
        yield sorted(ranks)
        left = {rank: rest for rank, of in left.items() if (rest := of - groups)}


def _median(values: NDArray[np.float64]) -> float:
    """The median; of an even number of values the lower one, so the faster one of two ranks."""
    return float(np.partition(values, (len(values) - 1) // 2)[(len(values) - 1) // 2])
