"""Calls sm_clock.c, which computes the same as `sm_clock` from the same columns."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tracepipe.native.signatures import Batches

if TYPE_CHECKING:
    import numpy.typing as npt

    from tracepipe.clocks.warp_readings import WarpReadings

    Column: TypeAlias = npt.NDArray[np.int64]

_REFINED, _BAD_LENGTHS, _NO_MEMORY = 1, -1, -2
_BASE_LIMIT_NS = 1 << 62
HAS_CLOCKS, HAS_SLOT, HAS_COUNTS = 1, 2, 4
"""Flags for the columns of a batch: those without which no finer times are found, slot, and exit_count."""


class NativeSmClocks:
    """The clocks of one GPU's SMs, as `SmClocks`. Only one thread may use it at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._refine, self._refine_all = library.tp_sm_clocks_refine, library.tp_sm_clocks_refine_all
        self._clocks = library.tp_sm_clocks_new()
        if not self._clocks:
            raise MemoryError
        weakref.finalize(self, library.tp_sm_clocks_free, self._clocks)

    def refine(self, base_ns: int, warps_read: WarpReadings) -> tuple[Column, Column] | None:
        """`entry_ns` and `exit_ns` of a batch, finer than they were read; None where they cannot be.

        Raises ValueError for columns whose lengths do not agree, TypeError for other than int64.
        """
        warps, exits = len(warps_read.entry_ns), len(warps_read.exit_ns)
        counts = (warps, exits, warps, warps, warps, exits, warps)
        addresses = [_address(column, count) for column, count in zip(warps_read, counts, strict=True)]
        if not 0 <= base_ns < _BASE_LIMIT_NS:
            base_ns = -1  # is rejected too, where ctypes would cut the value to 64 bits
        entered, stayed = np.empty(warps, np.int64), np.empty(exits, np.int64)
        done = self._refine(
            self._clocks, base_ns, warps, exits, *addresses, entered.ctypes.data, stayed.ctypes.data
        )
        if done == _BAD_LENGTHS:
            raise ValueError("the counts of exits do not add up to the exits")
        if done == _NO_MEMORY:
            raise MemoryError
        return (entered, stayed) if done == _REFINED else None

    def refine_all(
        self,
        base_ns: Column,
        warps: Column,
        exits: Column,
        has: npt.NDArray[np.uint8],
        columns: Sequence[Column | None],
    ) -> tuple[npt.NDArray[np.bool_], Column, Column]:
        """As `refine`, for several batches, with the number of warps and exits of each. Return which batches
        have finer times, and the entries and exits of all. `columns` are those of `refine`, batch after
        batch; `has` is which of them each batch has.
        """
        counts = (warps, exits, warps, warps, warps, exits, warps)
        sizes = [int(count.sum()) for count in counts]
        addresses = [_address(column, size) for column, size in zip(columns, sizes, strict=True)]
        entered, stayed = np.empty(sizes[0], np.int64), np.empty(sizes[1], np.int64)
        finer = np.empty(len(base_ns), np.bool_)
        of_batches = (column.ctypes.data for column in (base_ns, warps, exits, has))
        done = self._refine_all(
            self._clocks,
            len(base_ns),
            ctypes.byref(Batches(*of_batches, *addresses)),
            *(column.ctypes.data for column in (entered, stayed, finer)),
        )
        if done == _BAD_LENGTHS:
            raise ValueError("the counts of exits do not add up to the exits")
        if done == _NO_MEMORY:
            raise MemoryError
        return finer, entered, stayed


def _address(column: Column | None, count: int) -> int | None:
    if column is None:
        return None
    if column.dtype != np.int64 or not column.flags.c_contiguous:
        raise TypeError(f"a column is {column.dtype}, and must be contiguous int64")
    if column.shape != (count,):
        raise ValueError("the columns of a batch have different lengths")
    return column.ctypes.data
