"""The critical path of a step across ranks: the sections that follow each other without waiting.

From the end of the step back: before it, the rank that ended last worked since it left its last collective.
That one lasted from when the last rank came to it; before that, this rank worked since the collective before,
and so on to the start of the step. A shorter section makes the step shorter, until another path is the
longest.

Each section lies on one rank, so its times are those of that rank's clock. Only the end needs the common one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from numpy.typing import NDArray

from tracepipe.libraries import np, pl

WORKS, TRANSFERS = "works", "transfers"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the path, on one rank and its clock. `collective` names what is transferred, else empty."""

    host: str
    rank: int
    what: str
    start_ns: int
    end_ns: int
    collective: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Rank:
    """The collectives of one rank, by their end: columns of shape `(n,)`, with the rows in those of all."""

    row: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    meeting: NDArray[np.int64]


def critical_path(steps: pl.DataFrame, members: pl.DataFrame) -> list[Section]:
    """The sections of one step, in the order of time.

    `steps` has a row for each rank with `host`, `rank`, `start_ns`, `end_ns` and `aligned_end_ns` (null where
    the clock is not placed); `members` the collectives of this step, with the columns of `members`.
    """
    if steps.is_empty():
        return []
    bounds = {row["rank"]: row for row in steps.sort("rank").iter_rows(named=True)}
    placed = steps.filter(pl.col("aligned_end_ns").is_not_null())
    last = (placed if len(placed) else steps).sort("aligned_end_ns", "rank", descending=[True, False])
    members = _numbered(members.filter(pl.col("rank").is_in(list(bounds))))
    return list(_back(bounds, _by_rank(members), _last_of(members), members, int(last["rank"][0])))[::-1]


def _numbered(members: pl.DataFrame) -> pl.DataFrame:
    """With `meeting`, a number for each collective. Where a rank has a key again, so have the others."""
    key = ["operation", "process_group", "is_numbered", "number"]
    by_end = members.sort("rank", "end_ns", "start_ns")
    again = by_end.with_columns(again=pl.int_range(pl.len()).over("rank", *key))
    return again.with_columns(meeting=pl.struct(*key, "again").rank("dense").cast(pl.Int64))


def _by_rank(members: pl.DataFrame) -> dict[int, _Rank]:
    names = ("row", "start_ns", "end_ns", "meeting")
    return {
        int(rank): _Rank(*(part[name].to_numpy() for name in names))
        for (rank,), part in members.with_row_index("row")
        .with_columns(pl.col("row").cast(pl.Int64))
        .group_by("rank", maintain_order=True)
    }


def _last_of(members: pl.DataFrame) -> NDArray[np.int64]:
    """For each meeting, by number, the row of the rank that came last: the one with the shortest kernel."""
    order = np.lexsort(tuple(members[name].to_numpy() for name in ("rank", "dur_ns", "meeting")))
    of, first = np.unique(members["meeting"].to_numpy()[order], return_index=True)
    last = np.zeros(int(of.max(initial=0)) + 1, np.int64)
    last[of] = order[first]
    return last


def _back(
    bounds: dict[int, dict[str, int]],
    ranks: dict[int, _Rank],
    last_of: NDArray[np.int64],
    members: pl.DataFrame,
    rank: int,
) -> Iterator[Section]:
    """The sections of the path back from the end of the step, at which `rank` ended.

    No rank is followed to a collective twice, nor to a later one than before, whatever the times say.
    """
    until_ns, seen = bounds[rank]["end_ns"], set[int]()
    before = {number: len(own.row) for number, own in ranks.items()}
    of_row, start_of, end_of = (members[name].to_numpy() for name in ("rank", "start_ns", "end_ns"))
    while True:
        host, start_ns = str(bounds[rank]["host"]), bounds[rank]["start_ns"]
        own = ranks.get(rank)
        at = min(int(np.searchsorted(own.end_ns, until_ns, "right")), before[rank]) - 1 if own else -1
        while own and at >= 0 and int(own.meeting[at]) in seen:
            at -= 1
        if own is None or at < 0 or own.end_ns[at] <= start_ns:
            if until_ns > start_ns:
                yield Section(host, rank, WORKS, start_ns, until_ns)
            return
        if until_ns > own.end_ns[at]:
            yield Section(host, rank, WORKS, int(own.end_ns[at]), until_ns)
        before[rank] = at
        seen.add(int(own.meeting[at]))
        row = int(last_of[own.meeting[at]])
        rank, until_ns = int(of_row[row]), int(start_of[row])
        before[rank] = min(before[rank], row - int(ranks[rank].row[0]))
        end_ns = max(int(end_of[row]), until_ns)
        yield Section(str(bounds[rank]["host"]), rank, TRANSFERS, until_ns, end_ns, members["operation"][row])
