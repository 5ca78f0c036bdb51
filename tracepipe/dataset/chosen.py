"""Some ranks of a dataset: their recordings, if these are still what was read, and where they go in time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from tracepipe.dataset.clocks_table import ALIGNMENT
from tracepipe.dataset.identity import UNKNOWN_HOST
from tracepipe.dataset.meetings import Line
from tracepipe.dataset.places import RANKS, Dataset, read_rows
from tracepipe.dataset.rank_tables import Source
from tracepipe.errors import ClockError, InputError
from tracepipe.units import counted, duration_text

_AGAIN: Final = "Build the dataset again, from where the recordings are now: tracepipe dataset build."
_SHOWN_MAX: Final = 10


@dataclass(frozen=True, slots=True)
class Place:
    """Where a clock goes on the reference clock. `bound_ns` holds between `first_ns` and `last_ns` of that,
    where `shared` collectives ran. Without any, the other clock of its host places it.
    """

    line: Line
    bound_ns: int
    shared: int
    first_ns: int
    last_ns: int

    def limit(self, start_ns: int, end_ns: int) -> tuple[bool, str]:
        """Whether the bound holds from one time of the reference clock to another; what holds where not."""
        away_ns = max(self.first_ns - start_ns, end_ns - self.last_ns)
        if away_ns <= 0 or not self.last_ns:  # the only clock there is
            return True, ""
        away = duration_text(away_ns)
        return False, f"{self.bound_ns} ns while collectives ran, not known up to {away} away from them"


@dataclass(frozen=True, slots=True)
class ChosenRank:
    """One rank. Its times are on `clock`, from `start_ns` to `end_ns`."""

    host: str
    rank: int
    world_size: int | None
    source: Source
    source_format: str
    clock: str
    start_ns: int
    end_ns: int
    place: Place

    @property
    def header(self) -> dict[str, Any]:
        """The facts in the dataset about a recording, in the form of its header."""
        host = {} if self.host == UNKNOWN_HOST else {"host": self.host}
        size = {} if self.world_size is None else {"world_size": self.world_size}
        return {**host, "rank": self.rank, **size}


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
    there = {rank: host for host, rank in dataset.ranks()}
    wanted = sorted(set(numbers)) or sorted(there)
    if missing := [rank for rank in wanted if rank not in there]:
        known = f"It has {counted(len(there), 'rank|ranks')}" + (
            f", {min(there)} to {max(there)}." if there else "."
        )
        names = ", ".join(map(str, missing[:_SHOWN_MAX])) + (", …" if len(missing) > _SHOWN_MAX else "")
        raise InputError(f"has no rank {names}", known, path=str(dataset.folder))
    places, refused, reference = _places(dataset)
    rows = {rank: read_rows(dataset.part(RANKS, host, rank))[0] for rank, host in there.items()}
    starts = [
        places[row["clock"]].line.place(row["start_ns"]) for row in rows.values() if row["clock"] in places
    ]
    ranks = []
    for rank in wanted:
        row = rows[rank]
        if row["clock"] not in places:
            why = refused.get(row["clock"]) or "nothing places its clock"
            raise ClockError(
                f"rank {rank} is not on the clock of the others: {why}", "Leave it out of --ranks."
            )
        source = _unchanged(
            Source(row["source"], row["source_bytes"], row["source_mtime_ns"], row["source_version"])
        )
        ranks.append(
            ChosenRank(
                there[rank], rank, row["world_size"], source, row["source_format"], row["clock"],
                row["start_ns"], row["end_ns"], places[row["clock"]],
            )
        )  # fmt: skip
    return Chosen(ranks, reference, min(starts, default=0))


def _places(dataset: Dataset) -> tuple[dict[str, Place], dict[str, str], str]:
    """The place of each clock, why others have none, and the reference clock."""
    file = dataset.layer(ALIGNMENT) / "part-0.parquet"
    if not file.is_file():
        raise InputError("has no layer alignment", _AGAIN, path=str(dataset.folder))
    places, refused, reference = {}, {}, ""
    for row in read_rows(file):
        reference = row["reference"]
        if row["offset_ns"] is None:
            refused[row["clock"]] = row["refused"]
        else:
            line = Line(row["at_ns"], row["offset_ns"], row["drift_ppb"])
            places[row["clock"]] = Place(
                line, row["bound_ns"], row["shared"], row["first_ns"], row["last_ns"]
            )
    return places, refused, reference


def _unchanged(known: Source) -> Source:
    """The recording, if it is the one that the dataset is made of. Raises InputError."""
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
        return known
    raise InputError(f"is not the recording that the dataset was made of: {what}", _AGAIN, path=known.path)
