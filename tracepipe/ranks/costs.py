"""What slow ranks cost a job: how long its steps would be if a rank did as its peers, by a replay of all
ranks.

The program of the rank is replayed with the times of the same rows, of the host or of the GPU, in another
step of a peer. The steps of a mean would be shorter than real ones, as ranks wait for the latest of each
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tracepipe.analyses.gpu_work import COMPUTE, COPIES
from tracepipe.analyses.program import PLACES
from tracepipe.analyses.replay import Change, Replay
from tracepipe.event.columns import NONE, Int64s
from tracepipe.event.groups import number_rows
from tracepipe.libraries import np
from tracepipe.ranks.engine import Columns
from tracepipe.ranks.programs import Programs
from tracepipe.ranks.queries import COMPARED

_OF_WORK: Final = {"compute_ns": COMPUTE, "copies_ns": COPIES}
# GPUs of one kind, and their clocks by what they have to do, differ by up to so much. That is not what a rank
# does otherwise than its peers.
_SPEED_MOST: Final = 1.03
# A prime, so that a rank does not meet the same peer and step again and again.
_STRIDE: Final = 7_919


class Costs:
    """The times of the ranks of a job, and what it costs that they are as long as they are."""

    def __init__(self, programs: Programs, replay: Replay) -> None:
        self.programs, self.replay = programs, replay
        self.place = {rank: at for at, rank in enumerate(programs.ranks)}
        """The number of the program of each rank."""

    def times_ns(self, at: int, name: str) -> Int64s:
        """How long each row of a program takes of a time of COMPARED: work without interference, or the time
        of the host before a call. Shape `(rows,)`.
        """
        one = self.programs.programs[at]
        if name in _OF_WORK:
            alone_ns = self.replay.alone_ns[self.replay.rows(at)]
            return np.where(one.what == _OF_WORK[name], alone_ns, 0)
        loading_ns = self.programs.loading_ns[at]
        return loading_ns if name == "loading_ns" else one.call_ns - one.from_ns - loading_ns

    def own_times(self, ranks: Columns) -> Columns:
        """The columns of `queries.RANKS` about times of COMPARED, as far as the programs tell them: work
        without interference, and, where all have calls, the time of the host, whether its GPU is idle or not.
        """
        columns = dict(ranks)
        of_host = all(one.has_calls for one in self.programs.programs)
        for name in COMPARED if of_host else _OF_WORK:
            us, us2 = (name.replace("_ns", unit) for unit in ("_us", "_us2"))
            columns |= {key: columns[key].copy() for key in (name, us, us2)}
            for row, rank in enumerate(ranks["rank"].tolist()):
                if rank not in self.place:
                    continue
                at = self.place[rank]
                one = self.programs.programs[at]
                inside = one.step != NONE
                steps_ns = np.bincount(
                    one.step[inside], self.times_ns(at, name)[inside], len(one.numbers)
                ).astype(np.int64)
                columns[name][row] = steps_ns.sum()
                columns[us][row] = (steps_ns // 1_000).sum()
                columns[us2][row] = ((steps_ns // 1_000).astype(np.float64) ** 2).sum()
        return columns

    def saved_ns(self, rank: int, name: str, peers: Sequence[int]) -> Int64s:
        """By how much each step gets shorter if a rank's time of COMPARED is as that of its peers. Shape
        `(steps,)`, without any where the rank or its peers have no program.
        """
        if rank not in self.place or not any(one in self.place for one in peers):
            return np.zeros(0, np.int64)
        return self.replay.saved_ns({self.place[rank]: self.as_peers(rank, [name], peers)})

    def as_peers(self, rank: int, names: Sequence[str], peers: Sequence[int]) -> Change:
        """The change by which some of a rank's times of COMPARED are as those of its peers."""
        at, others = self.place[rank], [self.place[one] for one in peers if one in self.place]
        one, first = self.programs.programs[at], _bounds(self, at)
        work_ns, host_ns = self.replay.alone_ns[self.replay.rows(at)].copy(), one.call_ns - one.from_ns
        for name in names:
            own_ns, changed_ns = self.times_ns(at, name), work_ns if name in _OF_WORK else host_ns
            theirs = {other: (self.times_ns(other, name), _bounds(self, other)) for other in set(others)}
            for step in range(len(one.numbers)):
                turn = _STRIDE * (step + 1)
                other = others[turn % len(others)]
                of_peer, bounds = theirs[other]
                there = (step + 1 + turn // len(others)) % max(len(bounds) - 1, 1)
                mine, its = slice(*first[step : step + 2]), slice(*bounds[there : there + 2])
                its_ns = of_peer[its]
                if name == "compute_ns":
                    ratio = self.replay.speeds[at] / self.replay.speeds[other]
                    if 1 / _SPEED_MOST < ratio < _SPEED_MOST:
                        its_ns = (its_ns * ratio).astype(np.int64)
                found_ns = self._as_its(at, mine, own_ns[mine], other, its, its_ns)
                changed_ns[mine] += found_ns - own_ns[mine]
        return Change(host_ns=host_ns, work_ns=work_ns)

    def saved_by_links_ns(self, faster: Mapping[tuple[str, str], float]) -> Int64s:
        """By how much each step gets shorter if of the transfers of some operations and process groups only a
        share remains. Shape `(steps,)`.
        """
        groups = self.programs.groups
        share = [faster.get(groups[number], 1.0) for number in self.replay.collectives.tolist()]
        return self.replay.saved_ns({}, np.array(share))

    def _as_its(self, at: int, mine: slice, own_ns: Int64s, other: int, its: slice, its_ns: Int64s) -> Int64s:
        """The times of a rank's rows of a step, as those of a peer in one of its steps: of the same rows.
        What only the rank does takes no time, and what only its peer does is added where it would come.
        """
        ours, theirs = self.programs.programs[at], self.programs.programs[other]
        if not len(own_ns) or np.array_equal(ours.key[mine], theirs.key[its]):
            return its_ns
        keys, places = (
            np.concatenate([getattr(ours, name)[mine], getattr(theirs, name)[its]]) for name in ("key", "nth")
        )
        number, _ = number_rows(keys, places)
        _, in_ours, in_theirs = np.intersect1d(
            number[: len(own_ns)], number[len(own_ns) :], return_indices=True
        )
        found_ns = np.zeros_like(own_ns)
        found_ns[in_ours] = its_ns[in_theirs]
        more = np.ones(len(its_ns), np.bool_)
        more[in_theirs] = False
        # The rows are in the order of the collectives before them.
        place = np.searchsorted(ours.nth[mine] // PLACES, theirs.nth[its][more] // PLACES)
        np.add.at(found_ns, np.minimum(place, len(own_ns) - 1), its_ns[more])
        return found_ns


def _bounds(costs: Costs, at: int) -> list[int]:
    """The first row of each step of a program, and past the last."""
    one = costs.programs.programs[at]
    last = np.append(np.flatnonzero(one.step != NONE), NONE)[-2:].max() + 1
    steps = np.where(one.step == NONE, NONE, one.step)[:last]
    # Rows before the first step have none.
    found: list[int] = np.searchsorted(np.maximum.accumulate(steps), np.arange(len(one.numbers) + 1)).tolist()
    return found
