"""Slices of the ranges in a batch of warps, inside those of their warps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.event.nesting import NO_ROW
from tracepipe.event.warps import CROSSING, PlacedWarps, nested
from tracepipe.layout.changes import ONLY_NAME, WARP_BEGIN, WARP_END, Kernel, Slices, joined_slices

OverlapRow = Callable[[int, int, int], int]
"""Returns the overlap row of a row that takes a slice with that begin and end, NO_ROW where none does."""


def with_ranges(
    batch: PlacedWarps,
    order: Int64s,
    drawn: Bools,
    slices: Slices,
    columns: list[Any],
    number_of: Callable[[Kernel], int],
    overlap_row: OverlapRow,
) -> tuple[Slices, list[Any]]:
    """Add the slices of ranges to those of a batch's warps, which come in an `order` and some of which are
    `drawn`.

    Return all slices, those of ranges last, and the columns of all changes. The changes of ranges are between
    the begin and the end of their warp.
    """
    assert batch.range_ns is not None and batch.range_dur_ns is not None
    inside, steps = nested(batch)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    warp = rank[batch.of_ranges()]
    begin_ns = batch.ts_ns + batch.entry_ns[order][warp] + batch.range_ns
    end_ns = begin_ns + batch.range_dur_ns
    row = np.where(drawn[warp], slices.row[warp], NO_ROW).astype(np.int32)
    crossing = np.flatnonzero((inside == CROSSING) & (row != NO_ROW))
    for at in crossing.tolist():
        row[at] = overlap_row(int(row[at]), int(begin_ns[at]), int(end_ns[at]))
    steps = np.concatenate([steps, np.stack([2 * crossing, 2 * crossing + 1], 1).reshape(-1)])
    steps = steps[row[steps >> 1] != NO_ROW]
    of, is_end = steps >> 1, steps & 1 == 1
    changes = (
        np.where(is_end, end_ns[of], begin_ns[of]),
        np.where(is_end, WARP_END, WARP_BEGIN).astype(np.uint8),
        (of + len(slices)).astype(np.int32),
        np.zeros(len(of), np.int8),
        np.zeros(len(of), np.int64),
    )
    # The order is a warp's begin, its ranges, its end and its exits, also where they are at the same time.
    _, kind, slice_, _, _ = columns
    keys = np.concatenate([3 * slice_.astype(np.int64) + 2 * (kind != WARP_BEGIN), 3 * warp[of] + 1])
    by_warp = np.argsort(keys, kind="stable")
    whole = [np.concatenate(pair)[by_warp] for pair in zip(columns, changes, strict=True)]
    return joined_slices([slices, _slices(batch, row, number_of)]), whole


def _slices(batch: PlacedWarps, row: Int32s, number_of: Callable[[Kernel], int]) -> Slices:
    assert batch.range_name is not None and batch.range_dur_clk is not None
    count = len(row)
    numbers = [number_of(Kernel(name, ONLY_NAME, 0, 0)) for name in batch.ranges]
    unknown = np.full(count, NONE, np.int64)
    is_open = np.zeros(count, np.uint8) if batch.range_open is None else batch.range_open.astype(np.uint8)
    return Slices(
        row=row,
        kernel=np.array(numbers, np.int32)[batch.range_name],
        number=np.zeros(count, np.int64),
        source_ns=unknown,
        exits=unknown,
        cycles=batch.range_dur_clk,
        lanes=unknown,
        flow=np.zeros(count, np.int64),
        unclosed=is_open,
    )
