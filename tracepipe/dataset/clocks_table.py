"""The layer `alignment`: where each clock of a dataset goes on the common one, by collectives or through the
other clock of its host.

Recordings of a host are on two clocks: CLOCK_REALTIME, and one that counts since boot. The header and the
footer of a capture each have both at one instant. CLOCK_REALTIME may be slewed by NTP by up to 500 ppm, so
the relation is the less sure the further from the nearer of the two a time is. A recording whose two instants
differ by more than that is not used: the clock was set.

    since boot  ── header ────┤ events ├── footer ──
    realtime    ── header ────┤ events ├── footer ──     the difference there, ± 500 ppm of the distance
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from tracepipe.dataset.alignment import DRIFT_MAX_PPM, Alignment, Line, Meetings, Placement, align
from tracepipe.dataset.places import Dataset, Rank, asking, read_rows
from tracepipe.errors import InputError
from tracepipe.present.writing.table_formats import write_columns
from tracepipe.units import duration_text

_PLACE: Final = "layer=alignment/part-0.parquet"
SCHEMA: Final = {
    "clock": "string", "reference": "string", "at_ns": "bigint", "offset_ns": "bigint", "drift_ppb": "bigint",
    "bound_ns": "bigint", "early_ns": "bigint", "late_ns": "bigint",
    "residual_ns": "bigint", "shared": "bigint", "dropped": "bigint",
    "first_ns": "bigint", "last_ns": "bigint", "refused": "string",
}  # fmt: skip
COLLECTIVES_MAX: Final = 1 << 21
"""Collectives of all ranks together that are compared: of more, a half, a quarter, and so on."""
# A collective by a hash of what all ranks share, which comes once.
_COMPARED: Final = """
with ends as (
    select hash(operation, process_group, coalesce(seq, nth), seq is not null) as key, start_ns, end_ns, row
    from part where leaves_together
)
select key, first(start_ns order by row) as start_ns, first(end_ns order by row) as end_ns
from ends where key % {one_of} = 0 group by key order by min(row)
"""


# Reading both clocks takes up to 1 µs, and a tool whose times are on CLOCK_REALTIME converts them from
# another clock, with an error of up to 4 µs (docs/merge.md).
_ERROR_NS: Final = 5_000
_REALTIME: Final = ": realtime"


@dataclass(frozen=True, slots=True)
class Relation:
    """A clock of a host shows `ahead_ns` more than another one, within `bound_ns` while it was recorded on,
    which is from `start_ns` to `end_ns`. Clocks are numbers.
    """

    clock: int
    other: int
    ahead_ns: int
    bound_ns: int
    start_ns: int
    end_ns: int

    def through(self, other: Placement) -> Placement:
        """Where the clock goes, if the other one goes there."""
        line = other.line
        through = Line(line.at_ns + self.ahead_ns, line.offset_ns - self.ahead_ns, line.drift_ppb)
        first_ns, last_ns = through.place(self.start_ns), through.place(self.end_ns)
        if line != Line():  # not the reference: its own bound holds while its collectives ran
            first_ns, last_ns = max(first_ns, other.first_ns), min(last_ns, other.last_ns)
        return Placement(through, other.bound_ns + self.bound_ns, 0, 0, first_ns, last_ns)

    def away_ns(self, own: Placement, other: Placement) -> int:
        """By how much two placements contradict the relation, beyond what all bounds allow."""
        allowed_ns = own.bound_ns + other.bound_ns + self.bound_ns
        there_ns = self.through(other).line
        middle_ns = (self.start_ns + self.end_ns) // 2
        return abs(own.line.place(middle_ns) - there_ns.place(middle_ns)) - allowed_ns


def _instants(rank: Rank) -> list[tuple[int, int]]:
    """Instants of a rank's clock, and how far CLOCK_REALTIME was ahead then; none if it was set between."""
    if rank.realtime_offset_ns is None:
        return []
    found = [(rank.start_ns, rank.realtime_offset_ns)]
    if rank.last_at_ns is not None and rank.last_realtime_offset_ns is not None:
        slewed_ns = abs(rank.last_realtime_offset_ns - rank.realtime_offset_ns)
        if slewed_ns > _bound_ns(rank.start_ns, rank.last_at_ns, rank.last_at_ns):
            return []
        found.append((rank.last_at_ns, rank.last_realtime_offset_ns))
    return found


def relations(ranks: Iterable[Rank], clocks: list[str]) -> Iterator[Relation]:
    """How the clocks of each host are related, both ways. `clocks` has their names, by number."""
    numbers = {clock: number for number, clock in enumerate(clocks)}
    of_clock: dict[str, list[Rank]] = {}
    for one in ranks:
        of_clock.setdefault(one.clock, []).append(one)
    for clock, some in of_clock.items():
        real = clock.rpartition(": ")[0] + _REALTIME
        instants = [instant for one in some for instant in _instants(one)]
        if real == clock or real not in of_clock or not instants:
            continue
        for own, own_ns, sign in ((clock, some, -1), (real, of_clock[real], 1)):
            start_ns, end_ns = min(one.start_ns for one in own_ns), max(one.end_ns for one in own_ns)
            # The instant that is nearest to all of it.
            bound_ns, ahead_ns = min(
                (_bound_ns(at_ns + (ahead_ns if sign > 0 else 0), start_ns, end_ns), ahead_ns)
                for at_ns, ahead_ns in instants
            )
            other = real if own == clock else clock
            yield Relation(numbers[own], numbers[other], sign * ahead_ns, bound_ns, start_ns, end_ns)


def _bound_ns(at_ns: int, start_ns: int, end_ns: int) -> int:
    away_ns = max(abs(at_ns - start_ns), abs(end_ns - at_ns))
    return _ERROR_NS + -(-away_ns * DRIFT_MAX_PPM // 1_000_000)


def related(found: Alignment, relations: Iterable[Relation], clocks: list[str]) -> Alignment:
    """Place clocks that collectives do not place through the other clock of their host; refuse those whose
    collectives contradict it.
    """
    placements, refused = dict(found.placements), dict(found.refused)
    all_of_them = sorted(relations, key=lambda one: one.bound_ns)
    for one in all_of_them:
        own, other = placements.get(one.clock), placements.get(one.other)
        if own is None or other is None or one.clock == found.reference:
            continue
        if one.other != found.reference and own.shared > other.shared:
            continue  # of two clocks, the one with fewer collectives is wrong
        away_ns = one.away_ns(own, other)
        if away_ns > 0:
            del placements[one.clock]
            refused[one.clock] = (
                f"its collectives contradict what the header of a capture says of {clocks[one.other]}, by "
                f"{duration_text(away_ns)} more than all bounds: these are not the same collectives, or "
                "CLOCK_REALTIME was set"
            )
    for one in all_of_them:
        if one.clock in refused and one.clock not in found.placements and one.other in placements:
            through = one.through(placements[one.other])
            if through.first_ns <= through.last_ns:
                placements[one.clock] = through
                del refused[one.clock]
    return Alignment(found.reference, dict(sorted(placements.items())), dict(sorted(refused.items())))


@dataclass(frozen=True, slots=True)
class Aligned:
    """Where clocks go, by their names, and why others go nowhere. `reference` is "" if there is no clock."""

    reference: str
    placements: dict[str, Placement]
    refused: dict[str, str]


def write_alignment(dataset: Dataset) -> Aligned:
    """Put all clocks of a dataset on one, and write how. Raises OutputError."""
    ranks = dataset.rank_rows()
    clocks = sorted({one.clock for one in ranks})
    one_of = 1
    while sum(one.collectives for one in ranks) > COLLECTIVES_MAX * one_of:
        one_of *= 2
    # For each rank the columns clock, collective (a hash of what all ranks share), start and end.
    parts: list[tuple[Any, ...]] = [
        tuple(np.zeros(0, kind) for kind in (np.int64, np.uint64, np.int64, np.int64))
    ]
    for one in ranks:
        file = dataset.part("collectives", one.host, one.rank)
        if file.is_file():
            with asking(file) as connection:
                found = connection.execute(_COMPARED.format(one_of=one_of)).fetchnumpy()
            clock = np.full(len(found["key"]), clocks.index(one.clock))
            parts.append((clock, found["key"], found["start_ns"], found["end_ns"]))
    clock, key, start_ns, end_ns = (np.concatenate(column) for column in zip(*parts, strict=True))
    collective = np.unique(key, return_inverse=True)[1].astype(np.int64)
    placed = align(Meetings.of(clock, collective, start_ns, end_ns), len(clocks))
    placed = related(placed, relations(ranks, clocks), clocks)
    aligned = Aligned(
        clocks[placed.reference] if clocks else "",
        {clocks[number]: one for number, one in placed.placements.items()},
        {clocks[number]: reason for number, reason in placed.refused.items()},
    )
    rows = []
    for name in clocks:
        row: dict[str, Any] = {"clock": name, "reference": aligned.reference}
        if (place := aligned.placements.get(name)) is None:
            row["refused"] = aligned.refused[name]
        else:
            row |= asdict(place.line) | asdict(place)
        rows.append(row)
    columns = {name: (kind, [row.get(name) for row in rows]) for name, kind in SCHEMA.items()}
    with dataset.part_at(_PLACE) as part, part.open("wb") as out:
        write_columns(columns, out, "parquet")
    return aligned


def read_alignment(dataset: Dataset) -> Aligned:
    """What `write_alignment` wrote. Raises InputError where there is none."""
    file = dataset.folder / _PLACE
    if not file.is_file():
        hint = "Build the dataset again: tracepipe dataset build."
        raise InputError("has no layer alignment", hint, path=str(dataset.folder))
    aligned = Aligned("", {}, {})
    for row in read_rows(file):
        clock, reference, *line = (row.pop(name) for name in ("clock", "reference", *Line.__slots__))
        aligned, refused = replace(aligned, reference=reference), row.pop("refused")
        if None in line:
            aligned.refused[clock] = refused
        else:
            aligned.placements[clock] = Placement(Line(*line), **row)
    return aligned
