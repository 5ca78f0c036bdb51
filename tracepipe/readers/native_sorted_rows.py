"""Sorts rows by time with the native core (`sorted_rows.c`)."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator
from typing import Final

import numpy as np

from tracepipe.event.columns import Int64s, Texts
from tracepipe.native import library
from tracepipe.native.signatures import SortedColumns
from tracepipe.readers.sorted_rows import (
    GIVEN_BYTES,
    GIVEN_FIRSTS,
    GIVEN_ROWS,
    Rows,
    Run,
    RunFile,
    SortedRow,
    SortedRows,
)

# Rows and bytes of a run in memory; runs that are merged at a time, and the bytes of all of these in memory.
RUN_ROWS: Final = 1 << 16
RUN_BYTES: Final = (1 << 20) - (1 << 16)  # with one row more, whose size is seldom as much
FAN_IN: Final = 1 << 9
MERGED_BYTES: Final = 1 << 20
# Of each run.
_READ_BYTES_MAX: Final = 1 << 17
_NO_FILE: Final = -1
_NO_MEMORY: Final = -1


def sorted_rows() -> SortedRows:
    """Return a sorter of rows, with the native core where it is loaded."""
    core = library()
    return SortedRows() if core is None else NativeSortedRows(core)


class NativeSortedRows(SortedRows):
    """As `SortedRows`. `at` is the address of the core's rows, for its functions that add rows."""

    fan_in = FAN_IN

    def __init__(self, core: ctypes.CDLL) -> None:
        super().__init__()
        self._core = core
        self.at = core.tp_sorted_new(int.from_bytes(os.urandom(8), "little"), RUN_ROWS, RUN_BYTES)
        if not self.at:
            raise MemoryError
        weakref.finalize(self, core.tp_sorted_free, self.at)

    def add(self, row: SortedRow) -> None:
        """As `SortedRows` has it."""
        *numbers, first, second = row
        if self._good(self._core.tp_sorted_add(self.at, *numbers, first, len(first), second, len(second))):
            self.put_away()

    def put_away(self) -> None:
        """Make a run of the rows in memory, after the core's functions that add rows. Raises OutputError."""
        self._put_away()

    def _count(self) -> int:
        return int(self._core.tp_sorted_count(self.at))

    def _at_hand(self) -> Iterator[Rows]:
        if self._count():
            self._good(self._core.tp_sorted_run(self.at, _NO_FILE, 0))
            return self._given(_NO_FILE, [Run(0, 0)])
        return iter(())

    def _run(self, file: RunFile) -> Run:
        start = file.end
        file.end += self._good(self._core.tp_sorted_run(self.at, file.file.fileno(), start))
        return Run(start, file.end)

    def _folded(self, file: RunFile, runs: list[Run]) -> Run:
        self._merge(file.file.fileno(), runs)
        start = file.end
        file.end += self._good(self._core.tp_sorted_fold(self.at, start))
        return Run(start, file.end)

    def _merged(self, file: RunFile, runs: list[Run]) -> Iterator[Rows]:
        return self._given(file.file.fileno(), runs)

    def _merge(self, file: int, runs: list[Run]) -> None:
        """Begin to merge runs."""
        starts, ends = (np.array([getattr(run, of) for run in runs], np.int64) for of in ("start", "end"))
        read_bytes = min(_READ_BYTES_MAX, MERGED_BYTES // len(runs))
        self._good(
            self._core.tp_sorted_merge(
                self.at, file, starts.ctypes.data, ends.ctypes.data, len(runs), read_bytes
            )
        )

    def _given(self, file: int, runs: list[Run]) -> Iterator[Rows]:
        """The rows of runs as columns."""
        self._merge(file, runs)
        numbers = np.empty((6, GIVEN_ROWS), np.int64)
        first, made = np.empty(GIVEN_ROWS, np.int32), np.zeros(1, np.int64)
        columns = SortedColumns(*(column.ctypes.data for column in (*numbers, first)))
        view, limits = ctypes.byref(columns), (GIVEN_ROWS, GIVEN_FIRSTS, GIVEN_BYTES)
        while True:
            count = self._good(self._core.tp_sorted_next(self.at, view, *limits, made.ctypes.data))
            if not count:
                return
            ts_ns, rank, dur_ns, number, second_ends = numbers[:5, :count].copy()
            firsts = list(self._texts(0, numbers[5, : int(made[0])]))
            second = self._texts(1, second_ends)
            yield Rows(ts_ns, rank, dur_ns, number, first[:count].copy(), firsts, second)

    def _texts(self, which: int, ends: Int64s) -> Texts:
        there = ctypes.c_void_p()
        size = self._core.tp_sorted_texts(self.at, which, ctypes.byref(there))
        return Texts(ctypes.string_at(there, size) if size else b"", ends)

    @staticmethod
    def _good(result: int) -> int:
        """Return a result of the core. Raises MemoryError and OSError where it is an error."""
        if result == _NO_MEMORY:
            raise MemoryError
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result
