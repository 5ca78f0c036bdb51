"""Records as the columns that the stages pass, and the way back: what a test states, and what it looks at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import tracepipe.readers.recording
from tracepipe.event.checks import first_fault
from tracepipe.event.columns import (
    NONE,
    SPECIAL,
    UNDATED_NS,
    Row,
    SourceBatch,
    TraceBatch,
    TraceColumns,
    event_columns,
    unsigned,
)
from tracepipe.event.model import FLOW_PHASES, Problem, Record
from tracepipe.event.tables import Tables
from tracepipe.event.warps import WARP_COLUMNS, Others, PlacedWarps, WarpColumns, Warps
from tracepipe.readers.recording import Recording, row_of


def read_all(recording: Recording) -> tuple[list[Record], list[Problem]]:
    """The records and problems of a recording, in the file's order. What readers of text make up is good."""
    records: list[Record] = []
    problems: list[Problem] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracepipe.readers.recording, "row_of", _row_of_good)
        for batch in recording.batches:
            records += records_of(batch, recording.tables)
            problems += batch.problems
    return records, problems


def _row_of_good(record: Record, tables: Tables, others: Others[Warps]) -> Row:
    assert first_fault(record) is None
    return row_of(record, tables, others)


def records_of(batch: SourceBatch | TraceBatch, tables: Tables) -> list[Record]:
    """What the rows of a batch say, as records of the event file. Empty arguments are left out."""
    return [_record(batch, tables, at) for at in range(len(batch.events))]


def _record(batch: SourceBatch | TraceBatch, tables: Tables, at: int) -> Record:
    events = batch.events
    ts_ns, number, args = int(events.ts_ns[at]), int(events.shape[at]), int(events.args[at])
    if number == SPECIAL:
        other = batch.others[args]
        if isinstance(other, WarpColumns):
            return record_of_warps(other)
        # A record that has no time has none here either.
        return other if isinstance(batch, TraceBatch) or ts_ns != UNDATED_NS else _undated(other)
    shape = tables.shapes[number]
    assert shape is not None
    record: Record = {"type": shape.type, "name": shape.name, "phase": shape.phase, "ts_ns": ts_ns}
    for name in ("pid", "tid", "cpu", "comm", "clock", "gpu", "stream", "layer", "domain", "range"):
        if (value := getattr(shape, name)) is not None:
            record[name] = value
    block, thread = events.thread_of(at)
    for name, size in (("grid", shape.grid), ("block", shape.block or block), ("thread", thread)):
        if size is not None:
            record[name] = list(size)
    if shape.has_dur:
        record["dur_ns"] = int(events.dur_ns[at])
    if shape.has_launch:
        record["launch"] = unsigned(int(events.launch[at]))
    if shape.phase in FLOW_PHASES:
        record["flow"] = int(events.launch[at])
    if args != NONE:
        record["args"] = tables.args(args)
    return record


def _undated(record: Record) -> Record:
    assert "ts_ns" not in record
    return record


def record_of_warps(warps: WarpColumns) -> Record:
    """A batch of warps as its record."""
    assert isinstance(warps, Warps | PlacedWarps)
    columns = {name: getattr(warps, name) for name in WARP_COLUMNS}
    return (
        warps.launched
        | {"ts_ns": warps.ts_ns}
        | ({"ranges": warps.ranges} if warps.ranges else {})
        | {name: column.tolist() for name, column in columns.items() if column is not None}
    )


def source_batch(records: Iterable[Record], tables: Tables) -> SourceBatch:
    """Records as a reader gives them."""
    others = Others[Warps]()
    rows = [row_of(dict(record), tables, others) for record in records]
    return SourceBatch(event_columns(rows), others)


def trace_batch(records: Iterable[Record], tables: Tables) -> TraceBatch:
    """Records as they are on the trace's clock, where `source_ns` is what another clock showed and `bound_ns`
    by how much the time may be wrong.
    """
    source_ns: list[int] = []
    bound_ns: list[int] = []
    plain = []
    for record in records:
        plain.append(dict(record))
        source_ns.append(plain[-1].pop("source_ns", NONE))
        bound_ns.append(plain[-1].pop("bound_ns", 0))
    batch = source_batch(plain, tables)
    events = batch.events
    others = Others[PlacedWarps]()
    warps_at = np.flatnonzero(events.shape == SPECIAL).tolist()
    for at, other in zip(warps_at, batch.others, strict=True):
        others.append(_placed(other, source_ns[at], bound_ns[at]) if isinstance(other, Warps) else other)
    columns: list[Any] = [events.ts_ns, events.shape, events.args, events.dur_ns, events.launch]
    index = events.index
    readings = np.array(source_ns, np.int64) if set(source_ns) - {NONE} else None
    bounds = np.array(bound_ns, np.int64) if any(bound_ns) else None
    return TraceBatch(TraceColumns(*columns, readings, bounds, index=index), others)


def _placed(warps: Warps, source_ns: int, bound_ns: int) -> PlacedWarps:
    columns = {name: getattr(warps, name) for name in WARP_COLUMNS}
    return PlacedWarps(
        launched=warps.launched,
        ts_ns=warps.ts_ns,
        clock=warps.launched.get("clock", "monotonic"),
        bound_ns=bound_ns,
        source_ns=None if source_ns == NONE else source_ns + warps.entry_ns,
        offset_ns=0 if source_ns == NONE else source_ns - warps.ts_ns,
        **columns,
    )
