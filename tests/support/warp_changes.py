"""Changes of a GPU's warps, made of plain rows: for tests of what writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tracepipe.event.columns import NONE
from tracepipe.layout.timeline import Change, Kernel, Slices, Track, WarpChanges

KERNEL = Kernel("k", 0, 0, 0)


class Warp(NamedTuple):
    """A warp's slice; `row` is the number of its track."""

    number: int = 0
    row: int = 0
    kernel: int = 0
    flow: int = 0


def gpu_tracks(id: int, slots: int = 1) -> list[Track]:
    """The tracks of a GPU, whose ids follow this one: slots, and the count of running warps."""
    group = Track(id, None, "group", f"GPU {id}")
    inside = [
        Track(id + 1 + n, group, "slices", f"slot {n}", rank=n, category="gpu_warp") for n in range(slots)
    ]
    return [*inside, Track(id + 1 + slots, group, "counter", "active warps", unit="warps")]


def warp_changes(
    tracks: list[Track],
    warps: Sequence[Warp],
    changes: Sequence[Change],
    kernels: Sequence[Kernel] = (KERNEL,),
) -> WarpChanges:
    """Changes of the GPU that has these tracks, the last of which is its counter."""
    number, row, kernel, flow = (column.copy() for column in np.array(warps, np.int64).reshape(-1, 4).T)
    unknown = np.full(len(warps), NONE, np.int64)
    slices = Slices(
        row=row.astype(np.int32),
        kernel=kernel.astype(np.int32),
        number=number,
        source_ns=unknown,
        exits=unknown,
        cycles=unknown,
        lanes=unknown,
        flow=flow,
        unclosed=np.zeros(len(warps), np.uint8),
    )
    ts_ns, kind, of, value, mask = np.array(changes, np.int64).reshape(-1, 5).T
    return WarpChanges(
        tracks[0].id,
        tracks,
        list(kernels),
        len(tracks) - 1,
        0,
        ts_ns.copy(),
        kind.astype(np.uint8),
        of.astype(np.int32),
        value.copy(),
        mask.copy(),
        slices,
    )


def change(ts_ns: int, kind: int, slice: int = 0, value: int = NONE, mask: int = 0) -> Change:
    """One change."""
    return Change(ts_ns, kind, slice, value, mask)
