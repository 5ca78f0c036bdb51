"""Collects the ranges of warps as columns, with a row for each range."""

from __future__ import annotations

from typing import Any

from tracepipe.event.columns import distinct
from tracepipe.event.warps import PlacedWarps, nested
from tracepipe.reports.frames.arrays import AnyArray
from tracepipe.reports.frames.eager import picked
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.numbered import Numbered
from tracepipe.reports.frames.stored import Growing

_KINDS = {
    "warp_row": "int32", "name": "int32", "start_ns": "int64", "dur_ns": "int64", "self_ns": "int64",
    "cycles": "int64", "open": "bool",
}  # fmt: skip


class RangeTable:
    """The ranges of warps on the trace clock. Columns have the shape `(ranges,)`."""

    def __init__(self) -> None:
        self._names = Numbered()
        self._columns: dict[str, Growing[Any]] = {name: Growing(kind) for name, kind in _KINDS.items()}

    def add(self, warps: PlacedWarps, first_row: int) -> None:
        """Add the ranges of a batch whose first warp has the row `first_row`. Raises OutputError."""
        if warps.range_ns is None or warps.range_name is None or warps.range_dur_ns is None:
            return
        of = warps.of_ranges()
        numbers = [self._names.number(name.encode("utf-8", "surrogatepass")) for name in warps.ranges]
        self_ns, inside = warps.range_dur_ns.copy(), nested(warps).inside
        inner = inside >= 0
        np.subtract.at(self_ns, inside[inner], warps.range_dur_ns[inner])
        values: dict[str, Any] = {
            "warp_row": of + first_row,
            "name": np.array(numbers, np.int32)[warps.range_name],
            "start_ns": warps.ts_ns + warps.entry_ns[of] + warps.range_ns,
            "dur_ns": warps.range_dur_ns,
            "self_ns": self_ns,
            "cycles": warps.range_dur_clk,
            "open": False if warps.range_open is None else warps.range_open == 1,
        }
        for name, column in self._columns.items():
            column.extend(values[name], len(of))

    def __len__(self) -> int:
        return self._columns["name"].count

    @property
    def names(self) -> list[str]:
        """The names of ranges by their numbers."""
        return [self._names[at].decode("utf-8", "replace") for at in range(len(self._names))]

    def column(self, name: str) -> AnyArray:
        """A column of `frame` as numpy array, with the numbers of names instead of names."""
        column: AnyArray = self._columns[name].so_far(len(self))
        return column

    def numbers(self, *columns: str, rows: slice = slice(None)) -> pl.DataFrame:
        """A few columns of `frame`, with the numbers of names instead of names."""
        return pl.DataFrame({name: self._columns[name].so_far(len(self))[rows] for name in columns})

    def text_bytes(self, rows: slice) -> int:
        """How many bytes the names of some ranges have, each name counted once."""
        return int(self._names.sizes(distinct(self._columns["name"].so_far(len(self))[rows])).sum())

    def frame(self, rows: slice = slice(None)) -> pl.DataFrame:
        """A row for each range, in the order of the file: warp_row (in `warps`), name, start_ns, dur_ns,
        self_ns (without the ranges inside it), cycles, open (its end is not known, and is assumed to be the
        warp's last exit).
        """
        frame = self.numbers(*_KINDS, rows=rows)
        numbers, places = np.unique(frame["name"].to_numpy(), return_inverse=True)
        texts = [self._names[at].decode("utf-8", "replace") for at in numbers.tolist()]
        names = picked(pl.Series("name", texts, pl.String()), places)
        return frame.with_columns(names, pl.col("warp_row").cast(pl.Int64))
