"""The functions of a layer: how often each ran, and how long; and the longest single calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tracepipe.analyses.distribution import cells_of
from tracepipe.event.columns import Ints, distinct
from tracepipe.event.groups import largest, sums_by
from tracepipe.event.vocabulary import RANGES_ON_GPU, RUNNING
from tracepipe.libraries import np
from tracepipe.store.run import Layer, Run
from tracepipe.store.schema import IS_CALL, IS_TIMED, LENGTHS
from tracepipe.store.views import LAYER_TEXT

SORTS: Final = ("total", "count", "mean", "p50", "p95", "p99", "max", "name")
_MEASURES: Final = {
    "total": "total_ns",
    "count": "calls",
    "mean": "round_even(total_ns / known, 0)",
    "p50": "percentiles[1]",
    "p95": "percentiles[2]",
    "p99": "percentiles[3]",
    "max": "max_ns",
}


@dataclass(frozen=True, slots=True)
class Functions:
    """The first functions of a layer in some order: name, layer, count, and the cells of
    `distribution.LENGTH_COLUMNS` of each. `left_out` is the number of others, and `whole_ns` the time of all.
    """

    rows: list[tuple[Any, ...]]
    left_out: int
    whole_ns: int


def functions_of(run: Run, table: str, sort: str, top: int) -> Functions:
    """The first `top` functions of a layer in the order of `sort`, one of SORTS, or all with 0. Equal ones
    are in the order of their counts, layers and names.
    """
    order = "name" if sort == "name" else f"coalesce({_MEASURES[sort]}, -1) desc"
    rows = run.store.rows(
        f"""select n.text as name, {LAYER_TEXT.replace("s.layer", "f.of_layer")} as layer, calls, known,
            total_ns, percentiles, max_ns, count(*) over () as functions, sum(total_ns) over () as whole_ns
        from store.lengths f join store.texts n on f.name_text = n.number
        left join store.texts l on -1 - f.of_layer = l.number
        where f.layer = '{table}' and n.text <> '{RUNNING}' and l.text is distinct from '{RANGES_ON_GPU}'
        order by {order}, calls desc, layer, name {f"limit {top}" if top > 0 else ""}"""
    )
    found = [(name, layer, calls, *cells_of(*spread)) for name, layer, calls, *spread, _, _ in rows]
    count, whole_ns = rows[0][-2:] if rows else (0, 0)
    return Functions(found, count - len(found), whole_ns or 0)


def activity_of(run: Run, table: str) -> tuple[Any, ...]:
    """How many calls of a layer there are in `schema.FUNCTIONS`, and the cells of
    `distribution.LENGTH_COLUMNS` of their known lengths.
    """
    ((calls, *spread),) = run.store.rows(
        f"select {', '.join(LENGTHS)} from store.lengths where layer = '{table}' and name_text is null"
    )
    return calls, *cells_of(*spread)


def calls_of(run: Run, table: str, shapes: str, rows: str = IS_CALL) -> tuple[Any, ...]:
    """How many rows `x` of a layer that fulfil `rows` have the shapes `s` that fulfil a condition, both in
    SQL, and the cells of `distribution.LENGTH_COLUMNS` of their known lengths.
    """
    ((calls, *spread),) = run.store.rows(
        f"""select {", ".join(LENGTHS.values())} from store."{table}" x
        where {rows} and x.shape in (select s.shape from store.shapes s where {shapes})"""
    )
    return calls, *cells_of(*spread)


def names_by_time(run: Run, layer: Layer, rows: Ints, top: int) -> tuple[list[int], int]:
    """The numbers of the names that some rows of a layer have, at most `top`, or all with 0, those with the
    most time first; and how many names there are.
    """
    of_row = run.shapes.column("name", layer.shape[rows])
    lengths_ns = layer.end_ns[rows] - layer.start_ns[rows]
    total_ns, names = sums_by(of_row, lengths_ns, int(of_row.max(initial=-1)) + 1), distinct(of_row)
    some = np.concatenate(largest(total_ns, names, top)) if top > 0 else names
    # Equal times are sorted by name.
    shown = sorted(some.tolist(), key=lambda name: (-int(total_ns[name]), run.shapes.text(name)))
    return shown[: top if top > 0 else None], len(names)


def slowest_calls(run: Run, table: str, most: int) -> list[tuple[Any, ...]]:
    """The `most` longest outermost calls of a layer: name, start, length, pid and tid, the longest first;
    among equal ones, the earliest first.
    """
    return run.store.rows(
        f"""select n.text, start_ns, end_ns - start_ns as dur_ns, s.pid, s.tid from (
            select id, start_ns, end_ns, shape from store."{table}" x where {IS_TIMED} and x.parent = -1
            order by end_ns - start_ns desc, id limit {most})
        join store.shapes s using (shape) join store.texts n on s.name_text = n.number
        order by dur_ns desc, id"""
    )
