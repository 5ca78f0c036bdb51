"""The warps of pictures, as columns of `frames/stored.py`: a million of them take little memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tracepipe.reports.frames.arrays import Bools, Int64s, Ints
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.stored import Growing, flagged, parts, taken

NOT_RECORDED = -1
"""The value of an unknown SM, of an unknown name, and of a launch id where `has_launch` is False."""
_NARROW = {"sm": "int32", "gpu": "int64", "name": "int32", "has_launch": "bool"}
_OF_TABLE = ("gpu", "launch", "name", "sm", "entry_ns", "last_exit_ns")


@dataclass(frozen=True, slots=True)
class DrawnWarps:
    """Columns of shape `(warps,)`, in the order of the file. `name` is an index into `names`. `end_ns` is the
    end of the run for a warp that never exited.
    """

    sm: Ints
    entry_ns: Int64s
    end_ns: Int64s
    gpu: Ints
    launch: Ints
    has_launch: Bools
    name: Ints
    names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.sm)

    def those(self, which: Callable[[slice], Bools]) -> DrawnWarps:
        """The warps that `which` flags; it is called with slices of the rows."""
        rows = flagged(len(self), which)
        if len(rows) == len(self):
            return self
        columns: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "names"
        }
        some: dict[str, Any] = {name: taken(column, rows) for name, column in columns.items()}
        return replace(self, **some)

    def launches(self) -> int:
        """How many different launches they belong to, by id and name."""
        found = pl.DataFrame(schema={"launch": pl.UInt64(), "has_launch": pl.Boolean(), "name": pl.Int32()})
        for part in parts(len(self)):
            more = pl.DataFrame({name: getattr(self, name)[part] for name in found.columns}).unique()
            found = pl.concat([found, more]).unique()
        return len(found)

    def counts(self, column: str) -> dict[int, int]:
        """How many warps have each value of a column."""
        values, of = self.present(column), getattr(self, column)
        counts = np.zeros(len(values), np.int64)
        for part in parts(len(self)):
            counts += np.bincount(np.searchsorted(values, of[part]), minlength=len(values))
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    def present(self, column: str) -> Ints:
        """The distinct values of a column, sorted. Shape `(n,)`."""
        values = getattr(self, column)
        found = np.empty(0, values.dtype)
        for part in parts(len(self)):
            found = np.union1d(found, values[part])
        return found


def drawn_warps(run: Run, kernel: str, start_ns: int, end_ns: int) -> DrawnWarps:
    """The warps that touch a window, of kernels whose names match `kernel`. Raises OutputError."""
    table = run.warp_table
    names = sorted({one["name"] for one in table.kernels()[0] if one["name"] is not None})
    # Names are numbers here, as there are few names and many warps.
    number = pl.col("name").cast(pl.Enum(names)).to_physical().cast(pl.Int32)
    end = pl.col("last_exit_ns").fill_null(run.facts.end_ns)
    is_drawn = (pl.col("entry_ns") <= end_ns) & (pl.col("end_ns") >= start_ns)
    if kernel:
        wanted = re.compile(kernel)
        is_drawn &= pl.col("name").is_in([at for at, one in enumerate(names) if wanted.search(one)])
    columns: dict[str, Growing[Any]] = {
        field.name: Growing(_NARROW.get(field.name, "uint64" if field.name == "launch" else "int64"))
        for field in fields(DrawnWarps)
        if field.name != "names"
    }
    for frame in table.frames(*_OF_TABLE):
        drawn = frame.select(
            pl.col("sm").fill_null(NOT_RECORDED), "entry_ns", end.alias("end_ns"), pl.col("gpu").fill_null(0),
            pl.col("launch").fill_null(0), pl.col("launch").is_not_null().alias("has_launch"),
            number.alias("name"),
        ).filter(is_drawn)  # fmt: skip
        for name, column in columns.items():
            column.extend(drawn[name].fill_null(NOT_RECORDED).to_numpy(), len(drawn))
    return DrawnWarps(**{name: column.whole() for name, column in columns.items()}, names=names)
