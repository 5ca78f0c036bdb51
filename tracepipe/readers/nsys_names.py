"""Looks up numbers of an export of Nsight Systems: processes, threads, GPUs, texts, launches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Final

from tracepipe.event.model import Problem, Record
from tracepipe.kernel_names import short_kernel_name
from tracepipe.readers.event_rows import cut_text
from tracepipe.readers.launch_numbers import Launches
from tracepipe.readers.sqlite_tables import BROKEN, Database, Strings, unreadable

# The most threads and processes whose names are kept.
_NAMES_MAX: Final = 1 << 14
# The most rows of small tables (GPUs, labels, settings), and the most kernels whose short names are kept.
_FEW_MAX: Final = 1 << 10
_ID_BITS, _ID_MASK = 24, (1 << 24) - 1
_WORK: Final = tuple(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"))


def pid_of(whole: int) -> int | None:
    """The process of a globalPid or globalTid; None where it has none."""
    return whole >> _ID_BITS & _ID_MASK or None


def tid_of(whole: int) -> int:
    """The thread of a globalTid."""
    return whole & _ID_MASK


class Names:
    """Looks up names. The problems of their tables are added to `problems`."""

    def __init__(self, database: Database, problems: list[Problem]) -> None:
        self._database, self._problems = database, problems
        self.strings = Strings(database, "StringIds", "id", "value", problems)
        self._kernels: dict[Any, tuple[str, str | None]] = {}
        self._metrics: dict[tuple[Any, Any], str] | None = None
        self._labels: dict[str, dict[int, str]] = {}
        self._gpus: dict[tuple[int | None, int], int] = {
            (pid, cuda): gpu
            for pid, cuda, gpu in database.texts(
                "TARGET_INFO_CUDA_DEVICE", ("pid", "cudaId", "gpuId"), _FEW_MAX, problems
            )
            if type(pid) is int and type(cuda) is int and type(gpu) is int and gpu >= 0
        }

    def kernel(self, number: object) -> tuple[str, str | None]:
        """A kernel's name, "" if it is not known, and its whole name if that is longer."""
        known = self._kernels.get(number)
        if known is None:
            whole = self.strings.get(number) or ""
            name = short_kernel_name(whole)
            known = name, whole if whole != name else None
            if len(self._kernels) >= _FEW_MAX:
                self._kernels.clear()
            self._kernels[number] = known
        return known

    def records(self) -> Iterator[Record]:
        """The names of processes and threads."""
        rows = self._database.texts("PROCESSES", ("globalPid", "name"), _NAMES_MAX, self._problems)
        for whole, name in rows:
            if type(whole) is int and type(name) is str and name and (pid := pid_of(whole)):
                yield {"type": "name", "pid": pid, "name": cut_text(PurePath(name).name or name)}
        for whole, name in self._thread_names().items():
            if pid := pid_of(whole):
                yield {"type": "name", "pid": pid, "tid": tid_of(whole), "name": cut_text(name)}

    def _thread_names(self) -> dict[int, str]:
        rows = self._database.texts(
            "ThreadNames", ("globalTid", "nameId", "priority"), _NAMES_MAX, self._problems
        )
        found: dict[int, tuple[int, str]] = {}
        for whole, name_id, priority in rows:
            name = self.strings.get(name_id)
            if type(whole) is not int or not name:
                continue
            rank = priority if type(priority) is int else 0
            if whole not in found or found[whole][0] <= rank:
                found[whole] = rank, name
        return {whole: name for whole, (_, name) in found.items()}

    def gpu(self, pid: int | None, device: object) -> int | None:
        """The number of a GPU in the machine by its number in a process."""
        if type(device) is not int or device < 0:
            return None
        return self._gpus.get((pid, device), device)

    def label(self, table: str, number: object) -> str | None:
        """The label of a number in a table of labels, ENUM_…; the number itself where it has none."""
        if type(number) is not int:
            return None
        if table not in self._labels:
            rows = self._database.texts(table, ("id", "label", "name"), _FEW_MAX, self._problems)
            self._labels[table] = {
                key: text
                for key, label, name in rows
                if type(key) is int and (text := label if type(label) is str else name)
            }
        return self._labels[table].get(number, str(number))

    def metric(self, kind: int, number: object) -> str:
        """The name of a counter of a GPU."""
        if self._metrics is None:
            columns = ("typeId", "metricId", "metricName")
            rows = self._database.texts("TARGET_INFO_GPU_METRICS", columns, _NAMES_MAX, self._problems)
            self._metrics = {(of, at): name for of, at, name in rows if type(name) is str}
        return self._metrics.get((kind, number), f"metric {number}")

    def settings(self, table: str) -> dict[str, str]:
        """A small table of names and values."""
        rows = self._database.texts(table, ("name", "value"), _FEW_MAX, self._problems)
        return {name: value for name, value in rows if type(name) is str and type(value) is str}


def launches_of(database: Database, problems: list[Problem]) -> Launches:
    """The launches of an export: the calls that launched work."""
    tables = [table for table in _WORK if table in database.tables]
    launches = Launches(by_process=all("globalPid" in database.tables[table] for table in tables))
    for table in tables:
        try:
            for whole, correlation in database.select(table, ("globalPid", "correlationId")):
                launches.note(process_of(whole), correlation)
        except BROKEN as e:
            problems.append(Problem(0, table, f"cannot be read on: {unreadable(e)}"))
    return launches


def process_of(whole: object) -> int:
    """The process of a globalPid or globalTid, with its machine."""
    return whole >> _ID_BITS if type(whole) is int else 0


_VERSION: Final = re.compile(r"_v\d{4,5}$")


def function_name(symbol: str) -> str:
    """The name of a runtime function without CUPTI's ending: cudaMalloc for cudaMalloc_v3020."""
    return _VERSION.sub("", symbol)
