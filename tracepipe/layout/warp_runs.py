"""Batches of warps of one GPU that are laid out as one: there may be very many with a single warp each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tracepipe.event.columns import NONE, AnyArray, Bools, Int64s, signed
from tracepipe.event.nesting import COUNTED, DRAWN, NO_LAUNCH, STARTS, WarpStarts
from tracepipe.event.warps import AT_ONCE_MAX, SMALL_MAX, PlacedWarps, joined_column
from tracepipe.layout.changes import FULL_MASK, WARP_EXIT
from tracepipe.layout.slots import entry_order

# The values of columns that a batch lacks.
_MISSING: Final = {"sm": NONE, "slot": NONE, "exit_count": 1, "exit_clk": NONE, "entry_mask": FULL_MASK,
                   "exit_mask": FULL_MASK, "source_ns": NONE}  # fmt: skip


@dataclass(slots=True, eq=False)
class WarpBatches:
    """Batches of one GPU that can be laid out as one. `places` are their places among the current events."""

    gpu: int
    mode: str
    places: list[int] = field(default_factory=list)
    batches: list[PlacedWarps] = field(default_factory=list)
    size: int = 0

    def takes(self, batch: PlacedWarps, mode: str) -> bool:
        """Whether a batch can be added."""
        return (
            self.mode == mode
            and max(len(self.batches[0].warp), len(batch.warp)) <= SMALL_MAX
            and self.size + len(batch.warp) <= AT_ONCE_MAX
            and self.batches[0].offset_ns == batch.offset_ns
            and self.batches[0].range_ns is None
            and batch.range_ns is None
        )

    def add(self, place: int, batch: PlacedWarps) -> None:
        """Add a batch."""
        self.places.append(place)
        self.batches.append(batch)
        self.size += len(batch.warp)


class WarpRun:
    """Such batches as a single one, `warps`. By batch, `sizes` are how many warps each has, `first` is where
    they begin, and `bases_ns` are the times. `order` has the places of the warps batch after batch, each in
    the order of its entries. `stay_ns` are the times from entry to last exit, in the order of `warps`; NONE
    without an exit.
    """

    def __init__(self, of: WarpBatches) -> None:
        self.gpu, self.mode, self.batches = of.gpu, of.mode, of.batches
        self.warps = _joined(of.batches)
        self.sizes: Int64s = np.array([len(batch.warp) for batch in of.batches], np.int64)
        self.bases_ns: Int64s = np.array([batch.ts_ns for batch in of.batches], np.int64)
        self.first: Int64s = np.cumsum(self.sizes) - self.sizes
        self.order = self._order()
        self.stay_ns = self.warps.last_of_exits(self.warps.exit_ns)
        self.starts_at, self.starts = self._starts(of.places)

    def _order(self) -> Int64s:
        if len(self.batches) == 1:
            return entry_order(self.warps.entry_ns)
        if len(self.batches) == self.warps.warp.size:
            return np.arange(len(self.batches))
        batch = np.repeat(np.arange(len(self.batches)), self.sizes)
        order: Int64s = np.lexsort((self.warps.entry_ns, batch))
        return order

    def _starts(self, places: list[int]) -> tuple[Int64s, WarpStarts]:
        """By batch: the place in the order of the warp at which its launch's flow ends, and how the batch
        starts. That warp is the first one that left, or else the first one.
        """
        left = np.append(np.flatnonzero(self.stay_ns[self.order] >= 0), len(self.order))
        at = left[np.searchsorted(left, self.first)]
        has_left = at < self.first + self.sizes
        at = np.where(has_left, at, self.first)
        entered_ns = self.warps.ts_ns + self.warps.entry_ns[self.order[self.first]]
        now = has_left & (self.warps.ts_ns + self.warps.entry_ns[self.order[at]] == self.bases_ns)
        done = np.where(now, STARTS, DRAWN) if self.mode != "sm" else np.full(len(at), COUNTED)
        launches = [batch.launched.get("launch") for batch in self.batches]
        if None in launches:
            done[[at for at, launch in enumerate(launches) if launch is None]] = NO_LAUNCH
        return at, WarpStarts(
            np.array(places, np.int64),
            np.array([signed(launch or 0) for launch in launches], np.int64),
            entered_ns,
            np.array([batch.bound_ns for batch in self.batches], np.int64),
            done.astype(np.uint8),
            np.zeros(len(at), np.int64),
        )

    def with_exits(self, drawn: Bools, begin_ns: Int64s, columns: list[AnyArray]) -> list[AnyArray]:
        """The columns of changes with the exits of each drawn warp after its end."""
        warps, order = self.warps, self.order
        counts = warps.exit_count
        count = np.ones(len(order), np.int64) if counts is None else counts[order]
        count = np.where(drawn, count, 0)
        of = np.repeat(np.arange(len(order)), count)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        at = warps.first_exits()[order][of] + nth
        mask = np.full(len(of), FULL_MASK, np.int64) if warps.exit_mask is None else warps.exit_mask[at]
        more = (
            begin_ns[of] + warps.exit_ns[at],
            np.full(len(of), WARP_EXIT, np.uint8),
            of.astype(np.int32),
            np.zeros(len(of), np.int8),
            mask,
        )
        whole = [np.concatenate(pair) for pair in zip(columns, more, strict=True)]
        by_warp = np.argsort(whole[2], kind="stable")
        return [column[by_warp] for column in whole]

    def end_ns(self) -> int:
        """The end of the last warp."""
        entry_ns, left = self.warps.entry_ns, self.stay_ns >= 0
        last_ns = int(entry_ns.max())
        if left.any():
            last_ns = max(last_ns, int((entry_ns + self.stay_ns)[left].max()))
        return self.warps.ts_ns + last_ns


def _joined(batches: Sequence[PlacedWarps]) -> PlacedWarps:
    """The warps of batches as one batch, which has the first one's record of its launch."""
    first = batches[0]
    if len(batches) == 1:
        return first
    optional: dict[str, Any] = {
        name: joined_column(batches, name, missing) for name, missing in _MISSING.items()
    }
    return PlacedWarps(
        launched={},
        clock=first.clock,
        ts_ns=first.ts_ns,
        offset_ns=first.offset_ns,
        warp=np.concatenate([batch.warp for batch in batches]),
        entry_ns=np.concatenate([batch.entry_ns + (batch.ts_ns - first.ts_ns) for batch in batches]),
        exit_ns=np.concatenate([batch.exit_ns for batch in batches]),
        **optional,
    )


def joined_starts(runs: Sequence[WarpRun]) -> WarpStarts | None:
    """The starts of runs in the order of their places; None without runs."""
    if not runs:
        return None
    columns = zip(*(run.starts.columns() for run in runs), strict=True)
    joined = WarpStarts(*map(np.concatenate, columns))
    order = np.argsort(joined.place)
    return WarpStarts(*(column[order] for column in joined.columns()))
