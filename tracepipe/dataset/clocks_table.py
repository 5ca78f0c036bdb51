"""The layer `alignment`: where each clock of a dataset goes on the common one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from tracepipe.dataset.alignment import Line, Meetings, Placement, align
from tracepipe.dataset.host_clocks import related, relations
from tracepipe.dataset.places import Dataset, asking, read_rows
from tracepipe.errors import InputError
from tracepipe.present.writing.table_formats import write_columns

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
