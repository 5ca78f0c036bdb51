"""The layer `alignment`: where each clock of a dataset goes on the common one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tracepipe.dataset.alignment import Alignment, align
from tracepipe.dataset.host_clocks import Recorded, related, relations
from tracepipe.dataset.meetings import Meetings
from tracepipe.dataset.places import RANKS, Dataset, read_part
from tracepipe.present.writing.table_formats import write_table
from tracepipe.reports.frames.libraries import np, pl

ALIGNMENT: Final = "alignment"
SCHEMA: Final = {
    "clock": "String", "reference": "String", "at_ns": "Int64", "offset_ns": "Int64", "drift_ppb": "Int64",
    "bound_ns": "Int64", "early_ns": "Int64", "late_ns": "Int64",
    "residual_ns": "Int64", "shared": "Int64", "dropped": "Int64",
    "first_ns": "Int64", "last_ns": "Int64", "refused": "String",
}  # fmt: skip
COLLECTIVES_MAX: Final = 1 << 21
"""Collectives of all ranks together that are compared: of more, a half, a quarter, and so on."""
_KEY: Final = ("operation", "process_group", "seq", "nth")


@dataclass(frozen=True, slots=True)
class Aligned:
    """What `write_alignment` found. `clocks` are the names of the clocks, by the numbers in `alignment`."""

    clocks: list[str]
    alignment: Alignment


def write_alignment(dataset: Dataset) -> Aligned:
    """Put all clocks of a dataset on one, and write how. Raises OutputError."""
    ranks = dataset.ranks()
    times = ["start_ns", "end_ns", "realtime_offset_ns", "last_at_ns", "last_realtime_offset_ns"]
    rows = [read_part(dataset.part(RANKS, *one)).row(0, named=True) for one in ranks]
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
    with dataset.part_at(f"layer={ALIGNMENT}/part-0.parquet") as part, part.open("wb") as out:
        table = _table(clocks, found)
        write_table(table.schema, iter([table]), out, "parquet")
    return Aligned(clocks, found)


def _ends(dataset: Dataset, ranks: list[tuple[str, int, int]], one_of: int) -> Iterator[tuple[Any, ...]]:
    """For each rank the columns clock, collective (a hash of what all ranks share), start and end."""
    for host, rank, clock in ranks:
        file = dataset.part("collectives", host, rank)
        if not file.is_file():
            continue
        frame = read_part(file, [*_KEY, "start_ns", "end_ns", "leaves_together"])
        numbered = pl.col("seq").is_not_null()
        key = pl.struct(
            "operation",
            "process_group",
            pl.when(numbered).then(pl.col("seq")).otherwise(pl.col("nth")),
            numbered.alias("is_numbered"),
        ).hash()
        frame = frame.filter("leaves_together").select("start_ns", "end_ns", key=key)
        frame = frame.filter(pl.col("key") % one_of == 0).unique("key", keep="first", maintain_order=True)
        yield (
            np.full(len(frame), clock, np.int64),
            frame["key"].to_numpy(),
            frame["start_ns"].to_numpy(),
            frame["end_ns"].to_numpy(),
        )


def _table(clocks: list[str], found: Alignment) -> pl.DataFrame:
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
    return pl.DataFrame(rows, schema={name: getattr(pl, kind) for name, kind in SCHEMA.items()}, orient="row")
