"""Some ranks of a dataset: their recordings, if these are still what was read, and where they go in time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tracepipe.dataset.alignment import Placement
from tracepipe.dataset.clocks_table import read_alignment
from tracepipe.dataset.identity import UNKNOWN_HOST
from tracepipe.dataset.places import Dataset, Rank, Source
from tracepipe.errors import ClockError, InputError
from tracepipe.units import counted, duration_text

_AGAIN: Final = "Build the dataset again, from where the recordings are now: tracepipe dataset build."
_SHOWN_MAX: Final = 10


class ChosenRank(NamedTuple):
    """A rank, and where its clock goes."""

    row: Rank
    place: Placement

    @property
    def header(self) -> dict[str, Any]:
        """The facts in the dataset about the recording, in the form of its header."""
        host = {} if self.row.host == UNKNOWN_HOST else {"host": self.row.host}
        size = {} if self.row.world_size is None else {"world_size": self.row.world_size}
        return {**host, "rank": self.row.rank, **size}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The ranks that were asked for. The first of the job begins at `start_ns` on the clock `reference`."""

    ranks: list[ChosenRank]
    reference: str
    start_ns: int

    @property
    def clock(self) -> str:
        """The name of the reference clock on its host."""
        return self.reference.rpartition(": ")[2].partition(" since ")[0]


def chosen(dataset: Dataset, numbers: Iterable[int]) -> Chosen:
    """The named ranks of a dataset by number, or all of them if none is named.

    Raises InputError for a rank that is not there, and for a recording that is gone or has changed;
    ClockError for a rank whose clock is not placed.
    """
    there = {one.rank: one for one in dataset.rank_rows()}
    wanted = sorted(set(numbers)) or sorted(there)
    if missing := [rank for rank in wanted if rank not in there]:
        known = f"It has {counted(len(there), 'rank|ranks')}" + (
            f", {min(there)} to {max(there)}." if there else "."
        )
        names = ", ".join(map(str, missing[:_SHOWN_MAX])) + (", …" if len(missing) > _SHOWN_MAX else "")
        raise InputError(f"has no rank {names}", known, path=str(dataset.folder))
    aligned = read_alignment(dataset)
    starts_ns = [
        aligned.placements[one.clock].line.place(one.start_ns)
        for one in there.values()
        if one.clock in aligned.placements
    ]
    ranks = []
    for rank in wanted:
        row = there[rank]
        if row.clock not in aligned.placements:
            why = aligned.refused.get(row.clock) or "nothing places its clock"
            raise ClockError(
                f"rank {rank} is not on the clock of the others: {why}", "Leave it out of --ranks."
            )
        _check_unchanged(row.recording)
        ranks.append(ChosenRank(row, aligned.placements[row.clock]))
    return Chosen(ranks, aligned.reference, min(starts_ns, default=0))


def _check_unchanged(known: Source) -> None:
    """Raise InputError if the recording is not the one that the dataset is made of."""
    try:
        now = Source.of(known.path)
    except OSError as e:
        raise InputError(f"cannot be read: {e.strerror}", _AGAIN, path=known.path) from e
    if now.size_bytes != known.size_bytes:
        what = f"it had {known.size_bytes:,} bytes, and has {now.size_bytes:,}"
    elif now.version != known.version:
        what = f"it was version {known.version}, and is {now.version}"
    elif now.mtime_ns is not None and known.mtime_ns is not None and now.mtime_ns != known.mtime_ns:
        later = "later" if now.mtime_ns > known.mtime_ns else "earlier"
        what = f"it was changed {duration_text(abs(now.mtime_ns - known.mtime_ns))} {later} than the one read"
    else:
        return
    raise InputError(f"is not the recording that the dataset was made of: {what}", _AGAIN, path=known.path)
