"""Changes of the warps of one GPU in the order of time, and their slices, both as columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from tracepipe.event.columns import NONE, Bytes, Int32s, Int64s, Rows
from tracepipe.event.tables import Args
from tracepipe.kernel_names import kernel_title
from tracepipe.layout.tracks import Track

WARP_BEGIN, WARP_END, WARP_EXIT, WARP_COUNT = 1, 2, 3, 4
"""Kinds of changes: the slice of a warp or a range begins, ends or has an exit, or a warp without a slice is
counted."""
ONLY_NAME: Final = -1
WARP_LANES: Final = 32
FULL_MASK: Final = (1 << WARP_LANES) - 1


class Kernel(NamedTuple):
    """A kernel with one size of its grid, or the name of ranges of warps, whose `warps` are ONLY_NAME.
    `warps` is how many a block has, 0 where that is not known. `grid_x` and `grid_y` are 0 where blocks are
    numbered in one dimension.
    """

    name: str
    warps: int
    grid_x: int
    grid_y: int

    def place(self, number: int) -> str:
        """The text for the block and the warp of a warp's number in the grid."""
        if not self.warps:
            return f"warp {number}"
        block, warp = divmod(number, self.warps)
        if not self.grid_x:
            return f"block {block} warp {warp}"
        x, y = self.grid_x, self.grid_y
        return f"block ({block % x},{block // x % y},{block // x // y}) warp {warp}"

    def title(self, number: int) -> str:
        """The name of a slice."""
        return self.name if self.warps == ONLY_NAME else f"{self.name} {self.place(number)}"


@lru_cache(maxsize=256)
def kernel_of(name: str, grid: tuple[int, ...], block: tuple[int, ...]) -> Kernel:
    """The kernel of a launch; `grid` and `block` are empty where they are not known."""
    threads = 1
    for size in block:
        threads *= size
    warps = -(-threads // WARP_LANES) if block else 0
    flat = not grid or grid[1:] == (1, 1) or 0 in grid
    # Sizes above the largest number of a warp have the same effect as that.
    most = (1 << 63) - 1
    return Kernel(
        kernel_title(name),
        min(warps, most),
        0 if flat else min(grid[0], most),
        0 if flat else min(grid[1], most),
    )


class Change(NamedTuple):
    """A change. `value` is how many warps run from then on, NONE where that does not change. `slice` is a
    place in the columns of slices, and `mask` has the lanes of an exit.
    """

    ts_ns: int
    kind: int
    slice: int
    value: int
    mask: int


@dataclass(slots=True)
class Slices:
    """Slices as columns, of the shape `(slices,)` each. `source_ns`, `exits`, `cycles` and `lanes` are NONE
    where they are not known or need not be shown. `flow` is a flow or 0. `row` is the number of a track of
    the GPU.
    """

    row: Int32s
    kernel: Int32s
    number: Int64s
    source_ns: Int64s
    exits: Int64s
    cycles: Int64s
    lanes: Int64s
    flow: Int64s
    unclosed: Bytes

    def __len__(self) -> int:
        return len(self.row)

    def columns(self) -> list[Any]:
        """The columns in the order of the fields."""
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def take(self, places: Rows | list[int]) -> Slices:
        """The slices of some places, in that order."""
        return Slices(*(column[places] for column in self.columns()))


def joined_slices(parts: list[Slices]) -> Slices:
    """The slices of several parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Slices(*map(np.concatenate, zip(*(part.columns() for part in parts), strict=True)))


@dataclass(slots=True, eq=False)
class WarpChanges:
    """Changes of one GPU, which has an `id`. `tracks` are by the rows of slices; the one at `counter_row` is
    the `counter` of running warps. A reading of the GPU's timer is the time of its slice, plus `offset_ns`,
    plus a small difference that is usually not negative.
    """

    id: int
    tracks: list[Track]
    kernels: list[Kernel]
    counter_row: int
    offset_ns: int
    ts_ns: Int64s
    kind: Bytes
    slice: Int32s
    value: Int64s
    mask: Int64s
    slices: Slices

    @property
    def counter(self) -> Track:
        """The track that counts running warps."""
        return self.tracks[self.counter_row]

    def rows(self) -> Iterator[Change]:
        """The changes one by one."""
        columns = (self.ts_ns, self.kind, self.slice, self.value, self.mask)
        yield from map(Change._make, zip(*(column.tolist() for column in columns), strict=True))

    def take(self, places: Rows) -> WarpChanges:
        """The changes of some places, in that order."""
        return replace(
            self,
            ts_ns=self.ts_ns[places],
            kind=self.kind[places],
            slice=self.slice[places],
            value=self.value[places],
            mask=self.mask[places],
        )

    def track(self, at: int) -> Track:
        """The track of a slice."""
        return self.tracks[int(self.slices.row[at])]

    def name(self, at: int) -> str:
        """The name of a slice: kernel, block and warp, or its range."""
        return self.kernels[int(self.slices.kernel[at])].title(int(self.slices.number[at]))

    def flow(self, at: int) -> int:
        """The flow of a slice, 0 without one."""
        return int(self.slices.flow[at])

    def args(self, at: int) -> Args:
        """The arguments of the slice of a warp or a range."""
        slices = self.slices
        known = {"source_ns": slices.source_ns, "exits": slices.exits, "cycles": slices.cycles,
                 "lanes": slices.lanes}  # fmt: skip
        args: Args = {name: int(column[at]) for name, column in known.items() if column[at] != NONE}
        return args | {"unclosed": True} if slices.unclosed[at] else args
