"""Collects warp batches as columns: one row for each warp, and one for each exit that tells more."""

from __future__ import annotations

from typing import Any

from tracepipe.event.model import Record
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.shapes import series, three

WARP_LANES = 32
FULL_MASK = (1 << WARP_LANES) - 1
_NARROW = {"sm": "int32", "slot": "int32", "entry_mask": "uint32"}


class WarpColumns:
    """Batches on the trace clock. Call `add` with each, then `warps` and `exits`."""

    def __init__(self) -> None:
        self._batches: list[dict[str, Any]] = []
        self._parts: list[dict[str, Any]] = []
        self._exits: list[dict[str, Any]] = []
        self._count = 0
        self.first_ns: int | None = None
        """The first entry of a warp."""

    def add(self, ts_ns: int, record: Record) -> int:
        """Take one batch; returns the end of its last warp. Raises OverflowError on too large numbers."""
        warp, entry = _column(record["warp"]), _column(record["entry_ns"])
        count = len(warp)
        after_ns = _column(record["exit_ns"])
        if count and max(int(entry.max()), int(after_ns.max(initial=0)), abs(ts_ns)) > 1 << 61:
            raise OverflowError
        exits = _column(record["exit_count"]) if "exit_count" in record else np.ones(count, np.int64)
        first = np.concatenate(([0], np.cumsum(exits)))[:-1]
        left = exits > 0
        entry = entry + ts_ns
        # A warp's exits stand one after the other, so that its first place to the next warp's is its range.
        first_ns, last_ns = (
            np.where(left, entry + _reduced(reduce, after_ns, first, left), -1)
            for reduce in (np.minimum, np.maximum)
        )
        part = {"warp": warp, "entry_ns": entry, "first_exit_ns": first_ns, "last_exit_ns": last_ns}
        part |= {"exits": exits.astype(np.int32), "batch": np.full(count, len(self._batches), np.int32)}
        for name, dtype in _NARROW.items():
            values = _column(record[name]) if name in record else None
            if values is not None and count and int(values.max()) > np.iinfo(dtype).max:
                raise OverflowError
            part[name] = None if values is None else values.astype(dtype)
        cycles = _column(record["exit_clk"]) if "exit_clk" in record else None
        part["cycles"] = None if cycles is None else _reduced(np.maximum, cycles, first, left)
        self._add_exits(record, entry, exits, first, after_ns)
        self._batches.append(_launch(record))
        self._parts.append(part)
        self._count += count
        if count:
            began_ns = int(entry.min())
            self.first_ns = began_ns if self.first_ns is None else min(began_ns, self.first_ns)
        return int(max(entry.max(initial=ts_ns), last_ns.max(initial=ts_ns)))

    def _add_exits(self, record: Record, entry: Any, exits: Any, first: Any, after_ns: Any) -> None:
        """Keep the exits of warps that left in several steps, or not with all their lanes."""
        masks = _column(record["exit_mask"]) if "exit_mask" in record else None
        several = exits > 1
        if masks is not None:
            partial = (exits == 1) & (_reduced(np.maximum, masks, first, exits > 0) != FULL_MASK)
            several = several | partial
        if not several.any():
            return
        of_exit = np.repeat(np.arange(len(exits)), exits)
        kept = several[of_exit]
        part = {"warp_row": of_exit[kept] + self._count, "exit_ns": (entry[of_exit] + after_ns)[kept]}
        part["mask"] = None if masks is None else masks[kept]
        self._exits.append(part)

    def warps(self) -> pl.DataFrame:
        """A row for each warp, in the order of the file.

        launch, name, gpu, stream, pid, grid, block, bound_ns: of the launch. warp: linear index on the grid;
        block_index, warp_in_block: null where the size of a block is not known. sm, slot, entry_mask: null
        where not recorded. entry_ns; first_exit_ns, last_exit_ns: null for a warp that was running when the
        record ended. exits: how many. cycles: of the SM's clock from entry to the last exit.
        """
        number = pl.Int64()
        kinds: dict[str, Any] = dict.fromkeys(("warp", "entry_ns", "first_exit_ns", "last_exit_ns"), number)
        kinds |= {"exits": pl.Int32(), "batch": pl.Int32(), "cycles": number}
        kinds |= {"sm": pl.Int32(), "slot": pl.Int32(), "entry_mask": pl.UInt32()}
        each = pl.DataFrame({name: _joined(self._parts, name, dtype) for name, dtype in kinds.items()})
        launches = pl.DataFrame(
            {
                name: series(name, [batch[name] for batch in self._batches], dtype)
                for name, dtype in _launch_schema().items()
            }
        )
        whole = pl.concat([launches[each["batch"]], each.drop("batch")], how="horizontal")
        left = pl.col("exits") > 0
        known = pl.when(pl.col("warps_per_block") > 0)
        return whole.with_columns(
            pl.when(left).then("first_exit_ns").alias("first_exit_ns"),
            pl.when(left).then("last_exit_ns").alias("last_exit_ns"),
            known.then(pl.col("warp") // pl.col("warps_per_block")).alias("block_index"),
            known.then(pl.col("warp") % pl.col("warps_per_block")).alias("warp_in_block"),
        )

    def exits(self) -> pl.DataFrame:
        """A row for each exit of warps with several, or one of not all lanes: warp_row (in `warps`), exit_ns,
        mask (null where not recorded).
        """
        kinds = {"warp_row": pl.Int64(), "exit_ns": pl.Int64(), "mask": pl.Int64()}
        return pl.DataFrame({name: _joined(self._exits, name, dtype) for name, dtype in kinds.items()})


def _column(values: list[int]) -> Any:
    return np.array(values, np.int64)


def _reduced(reduce: Any, values: Any, first: Any, left: Any) -> Any:
    """The least or the largest of each warp's values; of a warp without any, 0."""
    out = np.zeros(len(first), np.int64)
    if left.any():
        out[left] = reduce.reduceat(values, first[left])
    return out


def _joined(parts: list[dict[str, Any]], name: str, dtype: Any) -> pl.Series:
    """One column of all parts; null where a part lacks it."""
    size = next(iter(parts[0])) if parts else ""
    series = [
        pl.Series(name, part[name], dtype=dtype)
        if part[name] is not None
        else pl.repeat(None, len(part[size]), dtype=dtype, eager=True).alias(name)
        for part in parts
    ]
    return pl.concat(series) if series else pl.Series(name, [], dtype=dtype)


def _launch_schema() -> dict[str, Any]:
    number = pl.Int64()
    return {
        "launch": pl.UInt64(), "name": pl.String(), "gpu": number, "stream": number, "pid": number,
        "grid": three(), "block": three(), "warps_per_block": number, "bound_ns": number,
    }  # fmt: skip


def _launch(record: Record) -> dict[str, Any]:
    """What all warps of a batch share."""
    launch = {name: record.get(name) for name in _launch_schema()}
    block = record.get("block")
    if block:
        launch["warps_per_block"] = -(-block[0] * block[1] * block[2] // WARP_LANES)
    return launch
