"""The critical path of a step across ranks: the sections that follow each other without waiting.

From the end of the step back: before it, the rank that ended last worked since it left its last collective.
That one lasted from when the last rank came to it; before that, this rank worked since the collective before,
and so on to the start of the step. A shorter section makes the step shorter, until another path is the
longest.

Each section lies on one rank, so its times are those of that rank's clock. Only the end needs the common one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from tracepipe.analyses.gpu_work import COPIES, PURPOSES
from tracepipe.analyses.steps import is_loading, is_step
from tracepipe.event.columns import Bools, Int64s
from tracepipe.event.intervals import Stretches, nothing
from tracepipe.libraries import np
from tracepipe.ranks.engine import Columns, rows

WORKS, TRANSFERS = "works", "transfers"
LOADS, IDLES = "loads data", "GPU idle"
# A kernel communicates that moves data, but is not one that all wait for: a send, or one of another stream.
_DOES: Final = dict(zip(PURPOSES, ("computes", "communicates", "copies"), strict=True))


class Bounds(NamedTuple):
    """When a step begins and ends on one rank's clock, and when it ends on the common one, None if that is
    not known.
    """

    start_ns: int
    end_ns: int
    aligned_end_ns: int | None


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the path, on one rank and its clock. `collective` names what is transferred, else empty."""

    rank: int
    what: str
    start_ns: int
    end_ns: int
    collective: str = ""


class Done(NamedTuple):
    """What a rank did in a section, with the name of the kernel, copy, range or collective."""

    rank: int
    what: str
    name: str
    ns: int


def critical_path(bounds: Mapping[int, Bounds], members: Columns) -> list[Section]:
    """The sections of one step, in the order of time. `bounds` has each rank of the step, and `members` the
    columns of `queries.members_of`.

    No rank is followed to a collective twice, nor to a later one than before, whatever the times say.
    """
    if not bounds:
        return []
    placed = {number: one.aligned_end_ns for number, one in bounds.items() if one.aligned_end_ns is not None}
    rank = min(placed or bounds, key=lambda number: (-placed.get(number, 0), number))
    start_ns, end_ns, meeting, last = (members[name] for name in ("start_ns", "end_ns", "meeting", "last"))
    ranks, firsts = np.unique(members["rank"], return_index=True)
    first = dict(zip(ranks.tolist(), firsts.tolist(), strict=True))
    # The rows of each rank that may still be followed end here.
    ends = np.searchsorted(members["rank"], ranks, "right")
    before = dict(zip(ranks.tolist(), ends.tolist(), strict=True))
    until_ns, met, path = bounds[rank].end_ns, set[int](), list[Section]()
    while True:
        low, begin_ns = first.get(rank, 0), bounds[rank].start_ns
        rows = slice(low, before.get(rank, 0))
        at = low + int(np.searchsorted(end_ns[rows], until_ns, "right")) - 1
        while at >= low and int(meeting[at]) in met:
            at -= 1
        worked_ns = int(end_ns[at]) if at >= low and end_ns[at] > begin_ns else begin_ns
        if until_ns > worked_ns:
            path.append(Section(rank, WORKS, worked_ns, until_ns))
        if worked_ns == begin_ns:
            return path[::-1]
        before[rank] = at
        met.add(int(meeting[at]))
        row = int(last[at])
        rank, until_ns = int(members["rank"][row]), int(start_ns[row])
        before[rank] = min(before[rank], row)
        left_ns = max(int(end_ns[row]), until_ns)
        path.append(Section(rank, TRANSFERS, until_ns, left_ns, str(members["operation"][row])))


def done_in(sections: Iterable[Section], work: Columns, ranges: Columns) -> Iterator[Done]:
    """What one rank did in the sections of a path.

    `work` and `ranges` have `name`, `start_ns` and `end_ns` of the GPU's work, with its `purpose`, and of
    what the program marked on its threads, by start and with the longer first. A copy counts while no kernel
    runs. The GPU is idle while neither runs, as in the layer `steps`.
    """
    loads, marks = _by_name(is_loading, ranges), _by_name(lambda name: not is_step(name), ranges)
    ranges = ranges | {"loads": loads, "marks": marks & ~loads}
    until_ns = [np.maximum.accumulate(columns["end_ns"]) for columns in (work, ranges)]
    for section in sections:
        rank = section.rank
        if section.what == TRANSFERS:
            yield Done(rank, TRANSFERS, section.collective, section.end_ns - section.start_ns)
            continue
        inside, busy = _within(section, work, until_ns[0]), nothing()
        copies = inside["purpose"] == PURPOSES[COPIES]
        for some in (~copies, copies):
            own = {name: column[some] for name, column in inside.items()}
            start_ns, end_ns = own["start_ns"], own["end_ns"]
            # Each ns counts for the work that began first.
            begun_ns = np.maximum(
                start_ns, np.concatenate((start_ns[:1], np.maximum.accumulate(end_ns)[:-1]))
            )
            spent_ns = busy.uncovered_ns(begun_ns, np.maximum(begun_ns, end_ns)).tolist()
            sums = Counter[tuple[str, str]]()
            for key, ns in zip(rows(own, "purpose", "name"), spent_ns, strict=True):
                sums[key] += ns
            yield from (Done(rank, _DOES[purpose], name, ns) for (purpose, name), ns in sums.items() if ns)
            busy = busy.joined(Stretches(start_ns, end_ns))
        own = _within(section, ranges, until_ns[1])
        names, starts_ns, ends_ns = own["name"], own["start_ns"], own["end_ns"]
        loading = Stretches(starts_ns[own["loads"]], ends_ns[own["loads"]])
        loads_ns = busy.joined(loading).total_ns - busy.total_ns
        if loads_ns:
            often = Counter(names[own["loads"]].tolist())
            yield Done(rank, LOADS, min(often, key=lambda name: (-often[name], name)), loads_ns)
        idle_ns = section.end_ns - section.start_ns - busy.total_ns - loads_ns
        if idle_ns:
            # The range in which the GPU idled longest: of several the innermost, which began last.
            inside_ns = np.where(own["marks"], busy.uncovered_ns(starts_ns, ends_ns), 0)[::-1]
            at = int(inside_ns.argmax()) if inside_ns.any() else None
            yield Done(rank, IDLES, "" if at is None else str(names[::-1][at]), idle_ns)


def _by_name(matches: Callable[[str], bool], columns: Columns) -> Bools:
    names = columns["name"].tolist()
    answers = {name: matches(name) for name in set(names)}
    return np.array([answers[name] for name in names], np.bool_)


def _within(section: Section, columns: Columns, until_ns: Int64s) -> Columns:
    """The rows that overlap a section, cut to it. `until_ns` are the latest ends so far."""
    first = int(np.searchsorted(until_ns, section.start_ns, "right"))
    before = slice(first, max(first, int(np.searchsorted(columns["start_ns"], section.end_ns))))
    some = first + np.flatnonzero(columns["end_ns"][before] > section.start_ns)
    inside = {name: column[some] for name, column in columns.items()}
    inside["start_ns"] = inside["start_ns"].clip(section.start_ns)
    inside["end_ns"] = inside["end_ns"].clip(None, section.end_ns)
    return inside
