"""What the ranks did on the critical path of a step: names for the pieces that a replay finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from tracepipe.analyses.replay import HOST, LATENCY, RETURNS, TRANSFERS, Piece, Timeline, Window
from tracepipe.analyses.steps import is_loading, is_step
from tracepipe.dataset.places import Dataset, asking
from tracepipe.event.columns import AnyArray, Bools, Int64s
from tracepipe.libraries import np
from tracepipe.ranks.programs import Programs, RankProgram

PATHS_MOST: Final = 64
"""Of how many steps the critical path is followed, to tell which ranks are on it."""
LOADS, IDLES = "loads data", "GPU idle"
# By the purpose of the work.
_DOES: Final = ("computes", "communicates", "copies")


class Done(NamedTuple):
    """What a rank did for some time of a path, with the name of the kernel, copy, range, call or
    collective.
    """

    rank: int
    what: str
    name: str
    ns: int


class Paths:
    """The critical paths of some steps of a job, as the windows of its replay show them. `path` is what the
    ranks did on that of `step`. `led` is for each of at most PATHS_MOST steps how long each rank is on its
    path, in ns, without transfers.
    """

    def __init__(self, dataset: Dataset, hosts: dict[int, str], programs: Programs, step: int | None) -> None:
        self._dataset, self._hosts, self._programs, self._step = dataset, hosts, programs, step
        self._numbers = programs.source.numbers[0][programs.source.common[0]].tolist()
        every = [*dict.fromkeys(self._numbers)]
        self.led: dict[int, dict[int, int]] = {
            step: {} for step in every[:: -(-len(every) // PATHS_MOST) or 1]
        }
        self.path: list[Done] = []

    def follow(self, window: Window, timeline: Timeline) -> None:
        """Follow the paths of the steps of a window."""
        steps, wanted = window.part.common, {*self.led, self._step} & {*self._numbers}
        some = sorted(at for at in map(self._numbers.index, wanted) if steps.start <= at < steps.stop)
        for at, path in zip(some, window.paths(timeline, [at - steps.start for at in some]), strict=True):
            step = self._numbers[at]
            if step == self._step:
                self.path = [*done_on(path, window, self._programs, self._dataset, self._hosts)]
            if (of_rank := self.led.get(step)) is not None:
                for piece in path:
                    rank = self._programs.ranks[piece.number]
                    of_rank[rank] = of_rank.get(rank, 0) + (piece.ns if piece.what != TRANSFERS else 0)


def done_on(
    pieces: Iterable[Piece], window: Window, programs: Programs, dataset: Dataset, hosts: dict[int, str]
) -> Iterator[Done]:
    """What the ranks did in the pieces of a path. One rank's names are in memory at a time."""
    of_program: dict[int, list[Piece]] = {}
    for piece in pieces:
        of_program.setdefault(piece.number, []).append(piece)
    for number, own in of_program.items():
        rank, one = programs.ranks[number], window.programs[number]
        assert isinstance(one, RankProgram)
        rows = np.array([piece.row for piece in own])
        names = _names(dataset, hosts[rank], rank, one.place + rows)
        ranges = _Ranges(dataset, hosts[rank], rank)
        for piece, row in zip(own, rows.tolist(), strict=True):
            ns = piece.ns
            if piece.what == TRANSFERS:
                yield Done(rank, TRANSFERS, programs.groups[int(one.group[row])][0], ns)
            elif piece.what == HOST:
                gap = int(one.from_ns[row]), int(one.call_ns[row])
                loads_ns = min(ns, int(one.loading_ns[row]))
                if loads_ns:
                    yield Done(rank, LOADS, ranges.name(*gap, loading=True), loads_ns)
                if ns > loads_ns:
                    yield Done(rank, HOST if one.has_calls else IDLES, ranges.name(*gap), ns - loads_ns)
            elif piece.what in (LATENCY, RETURNS):
                yield Done(rank, piece.what, "", ns)
            else:
                yield Done(rank, _DOES[int(one.what[row])], names.get(one.place + row, ""), ns)


def _names(dataset: Dataset, host: str, rank: int, rows: Int64s) -> dict[int, str]:
    """The names of some rows of a rank's program."""
    with asking(dataset.part("program", host, rank)) as connection:
        connection.register("wanted", {"place": np.unique(rows)})
        found = connection.execute(
            "select place, coalesce(name, '') from part semi join wanted using (place)"
        )
        return dict(found.fetchall())


class _Ranges:
    """The ranges of one rank that are open at some time."""

    def __init__(self, dataset: Dataset, host: str, rank: int) -> None:
        file, found = dataset.part("annotations", host, rank), {}
        if file.is_file():
            with asking(file) as connection:
                found = connection.execute(
                    """select coalesce(name, '') as name, start_ns, end_ns from part where end_ns > start_ns
                    order by start_ns"""
                ).fetchnumpy()
        names = found.get("name", np.zeros(0, object))
        self._names, self._loads = names, _flags(is_loading, names)
        self._marks = _flags(lambda name: not is_step(name), names) & ~self._loads
        none = np.zeros(0, np.int64)
        self._start_ns, self._end_ns = found.get("start_ns", none), found.get("end_ns", none)

    def name(self, from_ns: int, to_ns: int, *, loading: bool = False) -> str:
        """The innermost range that is open for most of a time, "" without one."""
        last = int(np.searchsorted(self._start_ns, to_ns))
        wanted = (self._loads if loading else self._marks)[:last]
        open_ns = np.minimum(self._end_ns[:last], to_ns) - np.maximum(self._start_ns[:last], from_ns)
        found = np.flatnonzero(wanted & (2 * open_ns >= (0 if loading else to_ns - from_ns)) & (open_ns > 0))
        return str(self._names[found[-1]]) if len(found) else ""


def _flags(matches: Callable[[str], bool], names: AnyArray) -> Bools:
    answers = {name: matches(name) for name in set(names.tolist())}
    return np.array([answers[name] for name in names.tolist()], np.bool_)
