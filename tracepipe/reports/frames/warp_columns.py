"""Collects warp batches as columns: one row for each warp, and one for each exit that tells more."""

from __future__ import annotations

from typing import Any

from tracepipe.event.columns import Int64s
from tracepipe.event.model import Record
from tracepipe.event.warps import PlacedWarps
from tracepipe.reports.frames.collected import Growing
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.shapes import series, three, where

WARP_LANES = 32
FULL_MASK = (1 << WARP_LANES) - 1
_LARGEST_NS = 1 << 61
# As narrow as the columns of the frame.
_ALWAYS = {
    "warp": "int64", "entry_ns": "int64", "first_exit_ns": "int64", "last_exit_ns": "int64", "exits": "int32",
    "batch": "int32",
}  # fmt: skip
_NARROW = {"sm": "int32", "slot": "int32", "entry_mask": "uint32"}
_OPTIONAL = {**_NARROW, "cycles": "int64"}
"""What not every batch has."""
_EXITS = {"warp_row": "int64", "exit_ns": "int64", "mask": "int64"}


class WarpTable:
    """Batches on the trace clock. Call `add` with each, then `finish`, then the rest."""

    def __init__(self, trace_clock: str) -> None:
        self._trace_clock = trace_clock
        self._batches: list[dict[str, Any]] = []
        self._columns: dict[str, Any] = {}
        self._exits: dict[str, Any] = {}
        self._growing = {name: Growing(dtype) for name, dtype in (_ALWAYS | _OPTIONAL).items()}
        self._growing_exits = {name: Growing(dtype) for name, dtype in _EXITS.items()}
        self.first_ns: int | None = None
        """The first entry of a warp."""

    def __len__(self) -> int:
        return self._growing["warp"].count if self._growing else len(self._columns["warp"])

    def add(self, warps: PlacedWarps) -> int:
        """Take one batch; returns the end of its last warp. Raises OverflowError on too large numbers."""
        count, after_ns = len(warps), warps.exit_ns
        if (
            count
            and max(int(warps.entry_ns.max()), int(after_ns.max(initial=0)), abs(warps.ts_ns)) > _LARGEST_NS
        ):
            raise OverflowError
        for name, dtype in _NARROW.items():
            values = getattr(warps, name)
            if values is not None and count and int(values.max()) > np.iinfo(dtype).max:
                raise OverflowError
        exits = np.ones(count, np.int64) if warps.exit_count is None else warps.exit_count
        first, left = warps.first_exits(), exits > 0
        entry_ns = warps.entry_ns + warps.ts_ns
        # A warp's exits stand one after the other, so that its first place to the next warp's is its range.
        first_ns, last_ns = (
            np.where(left, entry_ns + _reduced(reduce, after_ns, first, left), -1)
            for reduce in (np.minimum, np.maximum)
        )
        cycles = None if warps.exit_clk is None else _reduced(np.maximum, warps.exit_clk, first, left)
        optional = {name: getattr(warps, name) for name in _NARROW} | {"cycles": cycles}
        self._add_exits(warps, exits, entry_ns)
        always = (warps.warp, entry_ns, first_ns, last_ns, exits, len(self._batches))
        for name, values in (*zip(_ALWAYS, always, strict=True), *optional.items()):
            self._growing[name].extend(0 if values is None else values, count)
        lacks = [name for name, values in optional.items() if values is None]
        # On its own clock a time is as right as it was recorded.
        bound_ns = None if warps.clock == self._trace_clock else warps.bound_ns
        self._batches.append(_launch(warps) | {"bound_ns": bound_ns, "lacks": lacks})
        if count:
            began_ns = int(entry_ns.min())
            self.first_ns = began_ns if self.first_ns is None else min(began_ns, self.first_ns)
        return int(max(entry_ns.max(initial=warps.ts_ns), last_ns.max(initial=warps.ts_ns)))

    def _add_exits(self, warps: PlacedWarps, exits: Int64s, entry_ns: Int64s) -> None:
        """Keep the exits of warps that left in several steps, or not with all their lanes."""
        masks, several = warps.exit_mask, exits > 1
        if masks is not None:
            one = _reduced(np.maximum, masks, warps.first_exits(), exits > 0)
            several = several | ((exits == 1) & (one != FULL_MASK))
        if not several.any():
            return
        of_exit = np.repeat(np.arange(len(exits)), exits)
        kept = several[of_exit]
        values = (of_exit[kept] + len(self), (entry_ns[of_exit] + warps.exit_ns)[kept])
        mask = -1 if masks is None else masks[kept]
        for name, part in zip(_EXITS, (*values, mask), strict=True):
            self._growing_exits[name].extend(part, int(kept.sum()))

    def finish(self) -> None:
        """No batch comes any more."""
        self._columns = {name: column.whole() for name, column in self._growing.items()}
        self._exits = {name: column.whole() for name, column in self._growing_exits.items()}
        self._growing, self._growing_exits = {}, {}

    def stays_ns(self) -> Int64s:
        """How long each warp was there that left."""
        left = self._columns["exits"] > 0
        stays_ns: Int64s = (self._columns["last_exit_ns"] - self._columns["entry_ns"])[left]
        return stays_ns

    def warps(self) -> pl.DataFrame:
        """A row for each warp, in the order of the file.

        launch, name, gpu, stream, pid, grid, block, bound_ns: of the launch. warp: linear index on the grid;
        block_index, warp_in_block: null where the size of a block is not known. sm, slot, entry_mask: null
        where not recorded. entry_ns; first_exit_ns, last_exit_ns: null for a warp that was running when the
        record ended. exits: how many. cycles: of the SM's clock from entry to the last exit.
        """
        batch = self._series("batch")
        each = [self._series(name) for name in _ALWAYS if name != "batch"] + [
            self._known(name, batch) for name in ("cycles", *_NARROW)
        ]
        launches = pl.DataFrame(
            {
                name: series(name, [batch[name] for batch in self._batches], dtype)
                for name, dtype in _launch_schema().items()
            }
        )
        whole = pl.concat([launches[batch], pl.DataFrame(each)], how="horizontal")
        left = pl.col("exits") > 0
        known = pl.when(pl.col("warps_per_block") > 0)
        return whole.with_columns(
            pl.when(left).then("first_exit_ns").alias("first_exit_ns"),
            pl.when(left).then("last_exit_ns").alias("last_exit_ns"),
            known.then(pl.col("warp") // pl.col("warps_per_block")).alias("block_index"),
            known.then(pl.col("warp") % pl.col("warps_per_block")).alias("warp_in_block"),
        )

    def _series(self, name: str) -> pl.Series:
        """A column, which is one and the same for numpy from here on."""
        made = pl.Series(name, self._columns[name])
        self._columns[name] = made.to_numpy()
        return made

    def _known(self, name: str, batch: pl.Series) -> pl.Series:
        """A column that some batches lack; null there."""
        lacks = [name in one["lacks"] for one in self._batches]
        if not any(lacks):
            return self._series(name)
        return where(pl.Series(lacks).gather(batch).not_(), self._series(name))

    def exits(self) -> pl.DataFrame:
        """A row for each exit of warps with several, or one of not all lanes: warp_row (in `warps`), exit_ns,
        mask (null where not recorded).
        """
        frame = pl.DataFrame(self._exits)
        return frame.with_columns(pl.when(pl.col("mask") >= 0).then("mask").alias("mask"))


def _reduced(reduce: Any, values: Int64s, first: Int64s, left: Any) -> Int64s:
    """The least or the largest of each warp's values; of a warp without any, 0."""
    out = np.zeros(len(first), np.int64)
    if left.any():
        out[left] = reduce.reduceat(values, first[left])
    return out


def _launch_schema() -> dict[str, Any]:
    number = pl.Int64()
    return {
        "launch": pl.UInt64(), "name": pl.String(), "gpu": number, "stream": number, "pid": number,
        "grid": three(), "block": three(), "warps_per_block": number, "bound_ns": number,
    }  # fmt: skip


def _launch(warps: PlacedWarps) -> Record:
    """What all warps of a batch share."""
    launch = {name: warps.launched.get(name) for name in _launch_schema()}
    block = launch["block"]
    if block:
        launch["warps_per_block"] = -(-block[0] * block[1] * block[2] // WARP_LANES)
    return launch
