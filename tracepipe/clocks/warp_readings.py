"""The readings from which finer times of warps are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tracepipe.event.columns import Int64s


class WarpReadings(NamedTuple):
    """What the warps of a batch read: columns as in a `gpu_warp` record, `(warps,)` or, of the exits,
    `(exits,)`.
    """

    entry_ns: Int64s
    exit_ns: Int64s
    sm: Int64s
    slot: Int64s | None
    entry_clk: Int64s
    exit_clk: Int64s
    exit_count: Int64s | None
