"""The layer `alignment`: where each clock of a dataset goes on the common one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tracepipe.dataset.alignment import Alignment, align
from tracepipe.dataset.host_clocks import Recorded, related, relations
from tracepipe.dataset.meetings import Meetings
from tracepipe.dataset.places import RANKS, Dataset, asking, read_rows
from tracepipe.present.writing.table_formats import write_columns

ALIGNMENT: Final = "alignment"
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
    """What `write_alignment` found. `clocks` are the names of the clocks, by the numbers in `alignment`."""

    clocks: list[str]
    alignment: Alignment


def write_alignment(dataset: Dataset) -> Aligned:
    """Put all clocks of a dataset on one, and write how. Raises OutputError."""
    ranks = dataset.ranks()
    times = ["start_ns", "end_ns", "realtime_offset_ns", "last_at_ns", "last_realtime_offset_ns"]
    rows = [read_rows(dataset.part(RANKS, *one))[0] for one in ranks]
    clocks = sorted({row["clock"] for row in rows})
    numbers = {clock: number for number, clock in enumerate(clocks)}
    total = sum(row["collectives"] for row in rows)
    one_of = 1
    while total > COLLECTIVES_MAX * one_of:
        one_of *= 2
    parts = list(
        _ends(dataset, [(*one, numbers[row["clock"]]) for one, row in zip(ranks, rows, strict=True)], one_of)
    )
    columns = (
        [np.concatenate(column) for column in zip(*parts, strict=True)]
        if parts
        else [np.zeros(0, np.int64)] * 4
    )
    _, collective = np.unique(columns[1], return_inverse=True)
    found = align(Meetings.of(columns[0], collective.astype(np.int64), columns[2], columns[3]), len(clocks))
    recorded = [Recorded(row["clock"], *(row[name] for name in times)) for row in rows]
    found = related(found, relations(recorded, clocks), clocks)
    with dataset.part_at(f"layer={ALIGNMENT}/part-0.parquet") as part:
        write_columns(_columns(clocks, found), SCHEMA, part)
    return Aligned(clocks, found)


def _ends(dataset: Dataset, ranks: list[tuple[str, int, int]], one_of: int) -> Iterator[tuple[Any, ...]]:
    """For each rank the columns clock, collective (a hash of what all ranks share), start and end."""
    for host, rank, clock in ranks:
        file = dataset.part("collectives", host, rank)
        if not file.is_file():
            continue
        with asking(file) as connection:
            found = connection.execute(_COMPARED.format(one_of=one_of)).fetchnumpy()
        yield (
            np.full(len(found["key"]), clock, np.int64),
            *(found[name] for name in ("key", "start_ns", "end_ns")),
        )


def _columns(clocks: list[str], found: Alignment) -> dict[str, list[Any]]:
    """The columns of SCHEMA, a row for each clock."""
    reference = clocks[found.reference] if clocks else None
    rows = []
    for number, clock in enumerate(clocks):
        one = found.placements.get(number)
        placed = (
            (one.line.at_ns, one.line.offset_ns, one.line.drift_ppb, one.bound_ns, one.early_ns, one.late_ns,
             one.residual_ns, one.shared, one.dropped, one.first_ns, one.last_ns, None)
            if one is not None
            else (*(None,) * 11, found.refused[number])
        )  # fmt: skip
        rows.append((clock, reference, *placed))
    return {name: [row[at] for row in rows] for at, name in enumerate(SCHEMA)}
