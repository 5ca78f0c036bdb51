"""Tells the GPUs and launches of ranks apart whose traces were merged into one file of PyTorch's profiler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby
from typing import Final

import numpy as np
import orjson

from tracepipe.event.bounded import put_bounded
from tracepipe.event.columns import Int64s
from tracepipe.event.tables import packed
from tracepipe.readers.sorted_rows import MARK, Rows, SortedRow, row_sorter

_PROCESS_SHIFT: Final = 32
_PROCESSES_MAX, _GPUS_MAX, _ROWS_MAX, _EARLY_MAX, _LAST_MAX = 1 << 8, 1 << 10, 1 << 14, 1 << 10, 1 << 15
_Row = bytes
"""The process of a GPU's row in the file, and the stream, as text."""


class MergedRanks:
    """The GPUs of a file, and the processes of its launches.

    In a file of PyTorch's profiler, the rows of a GPU have its number as their process, and as `device` too.
    Whoever merges files changes the processes, not `device`: rows of one device that have different processes
    are different GPUs. Each process counts its launches on its own. The work of a row is of the process from
    which the arrows of the file (`ac2g`) lead there, or else of the only process before it in the file, or
    else of the one that had such a launch last.
    """

    def __init__(self, *, follows_arrows: bool = False) -> None:
        self.follows_arrows = follows_arrows
        self._gpus: dict[tuple[int | None, int | None], int] = {}
        """The number of a GPU by process and `device`, None where that is not stated."""
        self._of_gpus: dict[int, int | None] = {}
        """The process of a GPU."""
        self._of_rows: dict[int | None, int] = {}
        """The first GPU of a process."""
        self._lowest = 0
        self._processes: dict[int, int] = {}
        """The number of each process that launches work."""
        self._arrows = row_sorter()
        """By id: the processes where arrows begin, and the rows and times where they end."""
        self._rows: dict[_Row, int | None] = {}
        """The process whose work a row has, None where it is not known."""
        self._others = row_sorter()
        """Work that is not of its row's process: its time, its process as the number, and its row."""
        self._shared: set[_Row] = set()
        """The rows that have such work."""
        self._in_order: Iterator[SortedRow] | None = None
        self._next: SortedRow | None = None
        self._near: dict[tuple[int, _Row], int] = {}
        """Such work at the time of the rows that are written."""
        self._last = OrderedDict[int, int]()
        """By the number of a launch, the process that had it last."""
        self._gpus_of: dict[tuple[int, int], int] = {}
        """The GPU of a process by its `device`."""

    @property
    def are_several(self) -> bool:
        """Whether there are calls of several processes."""
        return len(self._processes) > 1

    def gpu(self, process: int | None, device: int | None, index: int | None) -> int | None:
        """The number of the GPU of a row's process and its `device`, or else `index`, the id of the process,
        where they are stated.
        """
        if device is None and process in self._of_rows:
            return self._of_rows[process]
        number = self._gpus.get((process, device))
        if number is not None:
            return number
        number = index if device is None else device
        if number is None or len(self._gpus) >= _GPUS_MAX:
            return number
        if number in self._of_gpus and (stated := self._gpus.pop((process, None), None)) is not None:
            number = stated
        else:
            while number in self._of_gpus:
                number, self._lowest = self._lowest, self._lowest + 1
        self._gpus[process, device] = number
        self._of_gpus[number] = process
        self._of_rows.setdefault(process, number)
        return number

    def add_call(self, process: int | None) -> None:
        """Note a process that launches work."""
        if process is not None and len(self._processes) < _PROCESSES_MAX:
            self._processes.setdefault(process, len(self._processes))

    def add_work(self, gpu: int, stream: int) -> None:
        """Note a row that has work."""
        if len(self._rows) < _ROWS_MAX:
            self._rows.setdefault(self._row_of(gpu, stream), 0 if len(self._processes) == 1 else None)

    def _row_of(self, gpu: int, stream: int) -> _Row:
        return packed([self._of_gpus.get(gpu), stream])

    def begin_arrow(self, id: int, process: int | None) -> None:
        """Note where an arrow begins."""
        self.add_call(process)
        if process in self._processes:
            self._arrows.add(SortedRow(id, MARK, 0, self._processes[process], b"", b""))

    def end_arrow(self, id: int, process: int | None, stream: int, ts_ns: int) -> None:
        """Note where an arrow ends."""
        self._arrows.add(SortedRow(id, MARK, 0, ts_ns, packed([process, stream]), b""))

    def _follow_arrows(self) -> None:
        """Find the processes of rows. An end is that of the last begin of its id before it in the file, or
        else of the first. Begins of several processes that wait for an end at a time say nothing.
        """
        rows: dict[_Row, int] = {}
        arrows = (arrow for some in self._arrows.in_order() for arrow in some)
        for _, of_id in groupby(arrows, key=lambda arrow: arrow.ts_ns):
            process: int | None = None
            has_begun, has_end, early = False, False, list[SortedRow]()
            for arrow in of_id:
                ends = [arrow] if arrow.first else []
                if ends and not has_begun:
                    early += ends[: len(early) < _EARLY_MAX]
                    continue
                if not ends:
                    is_clear = not has_begun or has_end or process == arrow.number
                    process, has_end = arrow.number if is_clear else None, False
                    ends, early, has_begun = early, [], True
                has_end |= bool(ends)
                if process is None or len(rows) >= _ROWS_MAX:
                    continue
                for end in ends:
                    if process != rows.setdefault(end.first, process):
                        self._shared.add(end.first)
                        self._others.add(SortedRow(end.number, MARK, 0, process, end.first, b""))
        self._rows |= rows

    def set_processes(self, rows: Rows) -> None:
        """Put the processes of launches above their numbers, and the GPUs of processes into allocations.
        Rows come in the order of time.
        """
        self._find_others(int(rows.ts_ns[-1]))
        calls, works = dict[int, int](), dict[int, _Row]()
        for at, first in enumerate(rows.firsts):
            record = orjson.loads(first)
            if record["type"] == "memory" and "gpu" in record:
                gpu = self._gpus_of.get((record.get("pid", -1), record["gpu"]), record["gpu"])
                rows.firsts[at] = packed(record | {"gpu": gpu})
            elif "launch" in record and "stream" in record:
                works[at] = self._row_of(record["gpu"], record["stream"])
            elif "launch" in record:
                calls[at] = self._processes.get(record.get("pid", -1), 0)
        of_first = np.zeros(len(rows.firsts), np.int64)
        of_first[list(calls)] = list(calls.values())
        of_first[list(works)] = [self._rows.get(row) or 0 for row in works.values()]
        process: Int64s = of_first[rows.first]
        # Work one by one, where its row does not decide.
        single = {at for at, row in works.items() if row in self._shared or self._rows.get(row) is None}
        single |= calls.keys() if None in self._rows.values() else set()
        for at in np.flatnonzero(np.isin(rows.first, list(single))).tolist():
            of, number = int(rows.first[at]), int(rows.number[at])
            if of in works:
                of_row = self._rows.get(works[of])
                default = self._last.get(number, 0) if of_row is None else of_row
                process[at] = self._near.get((int(rows.ts_ns[at]), works[of]), default)
            else:
                put_bounded(self._last, number, calls[of], _LAST_MAX)
        # Rows of one time may be in two batches.
        self._near = {at: of for at, of in self._near.items() if at[0] == int(rows.ts_ns[-1])}
        has_launch = np.isin(rows.first, [*calls, *works]) & (rows.number > 0)
        rows.number = np.where(has_launch, rows.number | process << _PROCESS_SHIFT, rows.number)

    def _find_others(self, until_ns: int) -> None:
        """Find the work up to a time that is not of its row's process."""
        if self._in_order is None:
            self._follow_arrows()
            self._find_gpus()
            self._in_order = (row for rows in self._others.in_order() for row in rows)
            self._next = next(self._in_order, None)
        while self._next is not None and self._next.ts_ns <= until_ns:
            self._near[self._next.ts_ns, self._next.first] = self._next.number
            self._next = next(self._in_order, None)

    def _find_gpus(self) -> None:
        """Find the GPUs on which each process launches work, by `device`."""
        processes = list(self._processes)
        devices: dict[int | None, list[tuple[int, int]]] = {}
        for (process, device), gpu in self._gpus.items():
            if device is not None:
                devices.setdefault(process, []).append((device, gpu))
        for row, number in self._rows.items():
            for device, gpu in devices.get(orjson.loads(row)[0], ()) if number is not None else ():
                self._gpus_of.setdefault((processes[number or 0], device), gpu)

    def renumbered(self) -> dict[int, tuple[int | None, int]]:
        """The process and `device` of each GPU whose number is not that of its device."""
        return {
            number: (process, device)
            for (process, device), number in self._gpus.items()
            if device is not None and number != device
        }
