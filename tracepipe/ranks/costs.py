"""What slow ranks cost a job: how long its steps would be if a rank did as its peers, by a replay of all
ranks.

The program of the rank is replayed with the times of the same rows, of the host or of the GPU, in another
step of a peer. The steps of a mean would be shorter than real ones, as ranks wait for the latest of each
step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tracepipe.analyses.gpu_work import COMPUTE, COPIES
from tracepipe.analyses.program import PLACES
from tracepipe.analyses.replay import Ask, Change, Follow, Replay, Timeline, Window, joined
from tracepipe.event.columns import NONE, Floats, Int64s
from tracepipe.event.groups import number_rows
from tracepipe.libraries import np
from tracepipe.ranks.engine import Columns
from tracepipe.ranks.programs import Programs
from tracepipe.ranks.queries import COMPARED
from tracepipe.ranks.stragglers import SLOWER, Place, Straggler, Suspect

_OF_WORK: Final = {"compute_ns": COMPUTE, "copies_ns": COPIES}
# GPUs of one kind, and their clocks by what they have to do, differ by up to so much. That is not what a rank
# does otherwise than its peers.
_SPEED_MOST: Final = 1.03
# A prime, so that a rank does not meet the same peer and step again and again.
_STRIDE: Final = 7_919
# How many times as long a row of a rank may take as that of a peer, in parts of about 1%.
_RATIOS: Final = np.geomspace(0.25, 8, 351)
_EVERYWHERE: Final = (SLOWER["compute_ns"], SLOWER["host_ns"])
# A rank is slower everywhere if the median of these explains so much of the difference.
_EXPLAINED: Final = 0.5


class Costs:
    """The times of the ranks of a job, and what it costs that they are as long as they are. `follow` gets the
    windows of the replay without a change.
    """

    def __init__(self, programs: Programs, follow: Follow | None = None) -> None:
        self.programs, self._follow = programs, follow
        self.replay = Replay(programs.source, self._watch)
        self.place = {rank: at for at, rank in enumerate(programs.ranks)}
        """The number of the program of each rank."""
        self._sums = {
            name: np.zeros((3, len(programs.ranks)))
            for name in (COMPARED if programs.has_calls else _OF_WORK)
        }
        self._ratios: dict[tuple[int, str, Collection[Place]], Floats] = {}

    def _watch(self, window: Window, timeline: Timeline | None) -> None:
        """Add the times of the steps of a window: in ns, in whole µs, and their squares."""
        if timeline is not None and self._follow is not None:
            self._follow(window, timeline)
        inside = np.flatnonzero(window.step != NONE)
        at = window.steps_at[window.number[inside]] + window.step[inside]
        for name, sums in self._sums.items():
            times_ns = _times_ns(window, name)[inside]
            steps_ns = np.bincount(at, times_ns, int(window.steps_at[-1])).astype(np.int64)
            us = steps_ns // 1_000
            for row, values in enumerate((steps_ns, us, us.astype(np.float64) ** 2)):
                sums[row] += np.add.reduceat(values, window.steps_at[:-1])

    def own_times(self, ranks: Columns, *, is_replayed: bool) -> Columns:
        """The columns of `queries.RANKS` about times of COMPARED, as far as the programs tell them: work
        without interference, and, where all have calls, the time of the host, whether its GPU is idle or not.
        Only a replay tells what of that the GPU hides: without one, that is the time of the idle GPU.
        """
        columns = dict(ranks)
        places = [self.place.get(rank, NONE) for rank in ranks["rank"].tolist()]
        known = np.flatnonzero(np.array(places) != NONE)
        for name, sums in self._sums.items():
            if not is_replayed and name not in _OF_WORK:
                continue
            for key, values in zip(
                (name, *(name.replace("_ns", unit) for unit in ("_us", "_us2"))), sums, strict=True
            ):
                columns[key] = columns[key].copy()
                columns[key][known] = values[np.array(places)[known]]
        return columns

    def saved_ns(self, suspects: Sequence[Suspect]) -> list[Int64s]:
        """By how much each step gets shorter without the slowness of each of some ranks. Shapes `(steps,)`,
        without any where the rank or its peers have no program.
        """
        asked = {at: ask for at, one in enumerate(suspects) if (ask := self._ask(one)) is not None}
        outcomes = dict(zip(asked, self.replay.outcomes([*asked.values()]), strict=True))
        none = np.zeros(0, np.int64)
        return [self.replay.saved_ns(outcomes[at]) if at in outcomes else none for at in range(len(suspects))]

    def _ask(self, suspect: Suspect) -> Ask | None:
        if suspect.faster:
            return lambda window: ({}, self._links(window, suspect.faster))
        (rank,) = suspect.straggler.ranks
        if rank not in self.place or not any(one in self.place for one in suspect.peers):
            return None
        at, name, places = self.place[rank], suspect.name, suspect.straggler.places
        # Weighed by the times of the peers.
        ratios = self._ratios[rank, SLOWER[name], places] = np.zeros(len(_RATIOS) - 1)

        def as_peers(window: Window) -> tuple[dict[int, Change], Floats | None]:
            change, rows = self.as_peers(window, rank, [name], suspect.peers, places), window.rows(at)
            own_ns = _times_ns(window, name)[rows]
            before_ns, after_ns = (
                (window.alone_ns, change.work_ns) if name in _OF_WORK else (window.host_ns, change.host_ns)
            )
            assert after_ns is not None
            peers_ns = own_ns + after_ns - before_ns[rows]
            is_both = (window.step[rows] != NONE) & (own_ns > 0) & (peers_ns > 0)
            own_ns, peers_ns = own_ns[is_both], peers_ns[is_both]
            ratio = np.clip(own_ns / peers_ns, _RATIOS[0], _RATIOS[-1])
            ratios[:] += np.histogram(ratio, _RATIOS, weights=peers_ns)[0]
            return {at: change}, None

        return as_peers

    def everywhere(self, one: Straggler) -> float | None:
        """How many times as long half of a slow rank's kernels or of its program takes at least, by time.
        None if something else makes it slow, such as a long kernel, or one place in the program.
        """
        ratios = self._ratios.get((one.ranks[0], one.slow, one.places))
        if one.slow not in _EVERYWHERE or ratios is None or not ratios.any():
            return None
        ratio = float(_RATIOS[np.searchsorted(np.cumsum(ratios), ratios.sum() / 2)])
        return ratio if (ratio - 1) * one.usual_ns > _EXPLAINED * one.excess_ns else None

    def _links(self, window: Window, faster: Mapping[tuple[str, str], float]) -> Floats:
        """How much remains of the transfer of each collective."""
        share = np.array([faster.get(group, 1.0) for group in self.programs.groups])
        found: Floats = share[joined(window.programs, "group")[window.collectives]]
        return found

    def as_peers(
        self,
        window: Window,
        rank: int,
        names: Sequence[str],
        peers: Sequence[int],
        places: Collection[Place] = (),
    ) -> Change:
        """The change by which some of a rank's times of COMPARED are as those of its peers, in its whole
        program or at some places.
        """
        at, others = self.place[rank], [self.place[one] for one in peers if one in self.place]
        rows, first, speeds = window.rows(at), int(window.part.first[at]), self.replay.learned.speeds
        work_ns, host_ns = window.alone_ns[rows].copy(), window.host_ns[rows].copy()
        key, nth = (joined(window.programs, name) for name in ("key", "nth"))
        stays = np.full(len(key), bool(places))
        for of_key, of_nth in places:
            stays &= (key != of_key) | (nth != of_nth)
        for name in names:
            times_ns, changed_ns = _times_ns(window, name), work_ns if name in _OF_WORK else host_ns
            for step in range(len(window.programs[at].numbers)):
                turn = _STRIDE * (first + step + 1)
                other = others[turn % len(others)]
                there = (step + 1 + turn // len(others)) % max(len(window.programs[other].numbers), 1)
                mine = window.by_step.of(int(window.steps_at[at]) + step)
                its = window.by_step.of(int(window.steps_at[other]) + there)
                if not len(mine):
                    continue
                its_ns, ratio = times_ns[its], speeds[at] / speeds[other]
                if name == "compute_ns" and 1 / _SPEED_MOST < ratio < _SPEED_MOST:
                    its_ns = (its_ns * ratio).astype(np.int64)
                found_ns = _as_its(key, nth, mine, its, its_ns, is_host=name == "host_ns")
                changed_ns[mine - rows.start] += np.where(stays[mine], 0, found_ns - times_ns[mine])
        return Change(host_ns=host_ns, work_ns=work_ns)


def _times_ns(window: Window, name: str) -> Int64s:
    """How long each row of a window takes of a time of COMPARED: work without interference, or the time of
    the host before a call. Shape `(rows,)`.
    """
    if name in _OF_WORK:
        return np.where(window.what == _OF_WORK[name], window.alone_ns, 0)
    loading_ns = joined(window.programs, "loading_ns")
    return loading_ns if name == "loading_ns" else window.host_ns - loading_ns


def _as_its(key: Int64s, nth: Int64s, mine: Int64s, its: Int64s, its_ns: Int64s, *, is_host: bool) -> Int64s:
    """The times of a rank's rows of a step, as those of a peer in one of its steps: of the same rows.

    Work that only the rank has takes no time, and what only its peer has is added where it would come. Before
    a call that only the rank makes, the host takes what it takes its peer before such calls, or any call.
    """
    if np.array_equal(key[mine], key[its]):
        return its_ns
    both = np.concatenate([mine, its])
    number, _ = number_rows(key[both], nth[both])
    _, in_ours, in_theirs = np.intersect1d(number[: len(mine)], number[len(mine) :], return_indices=True)
    found_ns = _usual_ns(key, mine, its, its_ns) if is_host and len(its) else np.zeros(len(mine), np.int64)
    found_ns[in_ours] = its_ns[in_theirs]
    if is_host:
        return found_ns
    more = np.ones(len(its_ns), np.bool_)
    more[in_theirs] = False
    # The rows are in the order of the collectives before them.
    place = np.searchsorted(nth[mine] // PLACES, nth[its][more] // PLACES)
    np.add.at(found_ns, np.minimum(place, len(mine) - 1), its_ns[more])
    return found_ns


def _usual_ns(key: Int64s, mine: Int64s, its: Int64s, its_ns: Int64s) -> Int64s:
    """The mean time of a peer's host before calls such as those of a rank's rows, or before any."""
    keys, kind = np.unique(key[np.concatenate([mine, its])], return_inverse=True)
    sums_ns, counts = (np.bincount(kind[len(mine) :], of, len(keys)) for of in (its_ns, None))
    usual_ns = np.where(counts > 0, sums_ns / counts.clip(1), its_ns.mean()).astype(np.int64)
    found_ns: Int64s = usual_ns[kind[: len(mine)]]
    return found_ns
