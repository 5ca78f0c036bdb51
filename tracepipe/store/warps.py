"""Warps as columns: a row for each warp, and one for each exit of warps whose lanes did not exit together."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.event.model import Record
from tracepipe.store.warp_rows import FULL_MASK, WARP_LANES

if TYPE_CHECKING:
    from tracepipe.store.store import Store

    Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
    Rows = Ints | Bools | slice

__all__ = ["FULL_MASK", "OF_KERNEL", "OF_LAUNCH", "WARP_LANES", "LaunchTable", "WarpTable"]
OF_KERNEL: Final = ("name", "gpu", "pid", "grid", "block")
OF_LAUNCH: Final = ("launch", "stream", "warps_per_block", "bound_ns")


class LaunchTable:
    """Launches of warps and their kernels by number. A kernel is a name, GPU, process, grid and block."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self.kernel_of)

    @cached_property
    def _of_launch(self) -> dict[str, Any]:
        return self._store.columns("select * from store.warp_launches")

    @cached_property
    def _kernels(self) -> list[tuple[Any, ...]]:
        return self._store.rows("select * from store.warp_kernels")

    @property
    def kernel_of(self) -> Int32s:
        """The number of each launch's kernel. Shape `(launches,)`."""
        numbers: Int32s = self._of_launch["kernel"]
        return numbers

    @cached_property
    def _names(self) -> dict[str, int]:
        """Numbers of the names of kernels."""
        names = (name for name, *_ in self._kernels if name is not None)
        return {name: number for number, name in enumerate(dict.fromkeys(names))}

    def column(self, name: str, launches: Ints) -> tuple[Any, Any]:
        """A column of some launches (names as numbers), and flags for known values. Shapes `(n,)`; those of
        grid and block `(n, 3)`.
        """
        if name == "launch":
            return self._of_launch["launch"][launches].view(np.uint64), self._of_launch["has_launch"][
                launches
            ]
        if name in OF_LAUNCH:
            values = self._of_launch[name][launches]
            return values, values != NONE
        kernels = self.kernel_of[launches]
        if name in ("grid", "block"):
            first = 3 if name == "grid" else 6
            sides = np.array([row[first : first + 3] for row in self._kernels], np.int64).reshape(-1, 3)[
                kernels
            ]
            return np.maximum(sides, 0), sides[:, 0] != NONE
        at = OF_KERNEL.index(name)
        of_kernel = [self._names.get(row[at], NONE) if name == "name" else row[at] for row in self._kernels]
        known = np.array([value is not None and value != NONE for value in of_kernel], np.bool_)
        values = np.array([NONE if value is None else value for value in of_kernel], np.int64)
        return values[kernels], known[kernels]

    def name(self, number: int) -> str:
        """The name with a number."""
        return list(self._names)[number]

    def flags_by_names(self, matches: Callable[[str], bool]) -> Bools:
        """Flags the launches whose kernels have matching names. Shape `(launches,)`."""
        of_kernel = [name is not None and matches(name) for name, *_ in self._kernels]
        flags: Bools = np.array(of_kernel, np.bool_)[self.kernel_of]
        return flags

    def kernels(self) -> list[Record]:
        """The kernels by number, as records of `OF_KERNEL`; None where a value is not known."""
        found = []
        for name, gpu, pid, *sides in self._kernels:
            sizes = (None if three[0] == NONE else three for three in (sides[:3], sides[3:]))
            found.append(dict(zip(OF_KERNEL, (name, gpu, pid, *sizes), strict=True)))
        return found


class WarpTable:
    """The warps of a recording on the trace clock. Columns have the shape `(warps,)`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.launches = LaunchTable(store)
        self.first_ns: int | None = store.fact("first_warp_ns")
        """The first entry of any warp."""
        self.range_names: list[str] = store.fact("range_names")
        """The names of ranges by their numbers."""
        self._columns: dict[str, Any] = {}

    @cached_property
    def _count(self) -> int:
        return self._store.count("warps")

    def __len__(self) -> int:
        return self._count

    def _whole(self, name: str) -> Any:
        if name not in self._columns:
            self._columns[name] = self._store.column("warps", name)
        return self._columns[name]

    def stays_ns(self) -> Int64s:
        """The time from entry to exit of each warp that exited. Shape `(n,)`."""
        exited = self._whole("exits") > 0
        stays_ns: Int64s = self._whole("last_exit_ns")[exited] - self._whole("entry_ns")[exited]
        return stays_ns

    def times_ns(self, rows: Rows, end_ns: int) -> tuple[Int64s, Int64s]:
        """The entries and the last exits of some rows; `end_ns` for a warp that never exited."""
        entry_ns, last_ns, exits = (self._whole(name)[rows] for name in ("entry_ns", "last_exit_ns", "exits"))
        return entry_ns, np.where(exits > 0, last_ns, end_ns)

    def launch_of(self, rows: Rows) -> Int32s:
        """The number, in `launches`, of the launch of each of some rows. Shape `(n,)`."""
        of: Int32s = self._whole("launch_number")[rows]
        return of

    def column(self, name: str, rows: Rows = slice(None)) -> tuple[Any, Any]:
        """A column, and flags for known values. Shapes `(n,)`.

        launch, name, gpu, stream, pid, grid, block, bound_ns: of the launch, as in `LaunchTable.column`.
        warp: the linear index on the grid. block_index, warp_in_block: not known where the size of a block
        is not. entry_ns; first_exit_ns, last_exit_ns: not known for a warp that was running when the
        recording ended. exits: how many. cycles: of the SM's clock, from entry to the last exit. sm, slot,
        entry_mask.
        """
        if name in OF_KERNEL or name in OF_LAUNCH:
            return self.launches.column(name, self.launch_of(rows))
        if name in ("block_index", "warp_in_block"):
            size, known = self.launches.column("warps_per_block", self.launch_of(rows))
            known, size = known & (size > 0), np.maximum(size, 1)
            warp = self._whole("warp")[rows]
            return (warp // size if name == "block_index" else warp % size), known
        values = self._whole(name)[rows]
        if name.endswith("_exit_ns"):
            return values, self._whole("exits")[rows] > 0
        return values, values != NONE if name in ("cycles", "sm", "slot", "entry_mask") else np.ones(
            len(values), np.bool_
        )

    def kernels(self) -> tuple[list[Record], Int32s]:
        """The distinct kernels, as records of `OF_KERNEL`, and for each warp the index of its kernel."""
        of_warp: Int32s = self.launches.kernel_of[self.launch_of(slice(None))]
        return self.launches.kernels(), of_warp

    def exit_columns(self) -> tuple[Int64s, Int64s, Int64s]:
        """The exits of warps with several exits, or with one exit of not all lanes, sorted by warp: the row
        of the warp, the time, and the mask of lanes, which is negative where it was not recorded. Shapes
        `(exits,)`.
        """
        found = self._store.columns("select warp_row, exit_ns, mask from store.warp_exits")
        return found["warp_row"].astype(np.int64), found["exit_ns"], found["mask"]

    @cached_property
    def ranges(self) -> dict[str, Any]:
        """A row for each range of a warp, in the order of the file: warp_row, name (a number in
        `range_names`), start_ns, dur_ns, self_ns (without the ranges inside it), cycles, open (its end is not
        known, and is assumed to be the warp's last exit). Shapes `(ranges,)`.
        """
        columns = "warp_row, name_text as name, start_ns, dur_ns, self_ns, cycles, open"
        return self._store.columns(f"select {columns} from store.warp_ranges")
