"""Reads exports of Nsight Systems' reports, written by `nsys export --type sqlite`.

CUPTI_ACTIVITY_KIND_KERNEL, …_GRAPH_TRACE     gpu_kernel X      launch, grid, block, stream
…_MEMCPY, …_MEMSET                            transfer X        HtoD, …, set: gpu, stream, size, launch
…_RUNTIME (calls of the driver too)           userspace X       result; launch, where they asked for work
CUDA_GPU_MEMORY_USAGE_EVENTS                  memory I          alloc, free: size, address
SCHED_EVENTS                                  scheduler B, E    running
GPU_METRICS                                   hook C            counters of each GPU
OSRT_API, synchronisation, CUDA events, …     hook              a layer each
NVTX_EVENTS                                   annotation B E X  ranges of threads and processes, marks, names

Tables and columns exist only if they have data, so each is looked up. Times are nanoseconds since the
session's start, which TARGET_INFO_SESSION_START_TIME has on two clocks. A row of NVTX_EVENTS is a whole
range, which becomes a begin and an end. A range that crosses another one of its thread stays whole, as only
ends of ranges that nest can be matched with their begins.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, BinaryIO, Final, cast

import orjson

from tracepipe.event.columns import NONE, SourceBatch
from tracepipe.event.model import (
    COUNTS,
    INDEX_LIMIT,
    MONOTONIC,
    RANGE_LIMIT,
    TIME_LIMIT_NS,
    Header,
    HostInstant,
    Problem,
    Record,
    new_header,
)
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, Tables
from tracepipe.event.vocabulary import RUNNING
from tracepipe.kernel_names import short_kernel_name
from tracepipe.readers.event_rows import EventRows, Place, Take, Values, cut_text
from tracepipe.readers.ids import Launches
from tracepipe.readers.recording import Recording
from tracepipe.readers.sqlite_tables import BROKEN, Database, Strings, unreadable
from tracepipe.units import agree, counted

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


_NVTX: Final = "NVTX_EVENTS"
_NVTX_COLUMNS: Final = (
    "start", "end", "eventType", "category", "color", "text", "globalTid", "endGlobalTid", "textId",
    "domainId", "uint64Value", "int64Value", "doubleValue", "uint32Value", "int32Value", "floatValue",
    "jsonTextId", "jsonText", "binaryData",
)  # fmt: skip
# ENUM_NSYS_EVENT_TYPE. Types with two numbers have an older one too.
_CATEGORY, _DOMAIN = 33, 75
_MARKS: Final = frozenset({34, 65})
_OF_THREADS: Final = frozenset({35, 59, 66, 70})
_OF_PROCESSES: Final = frozenset({37, 60, 68, 71})
_THREAD_NAMES: Final = frozenset({39, 72})
_DEFINITIONS: Final = frozenset({_CATEGORY, 64, _DOMAIN, 76})
_DOMAINS_MAX: Final = 1 << 12
_U64: Final = (1 << 64) - 1
_PAYLOADS: Final = 10
"""Where the payload's columns begin: there is one for each type, and one of them has a value."""


@dataclass(slots=True)
class _Open:
    """Numbers of the open ranges of a process and a domain. The lowest free number is taken next."""

    free: list[int] = field(default_factory=list)
    count: int = 0

    def take(self) -> int | None:
        if self.free:
            return heapq.heappop(self.free)
        if self.count > RANGE_LIMIT:
            return None
        self.count += 1
        return self.count - 1

    def give_back(self, number: int) -> None:
        heapq.heappush(self.free, number)


class Annotations:
    """Makes annotations of rows."""

    def __init__(self, rows: EventRows, names: Names, database: Database, problems: list[Problem]) -> None:
        self._rows, self._names = rows, names
        self._domains: dict[tuple[int | None, Any], str] = {}
        self._categories: dict[tuple[int | None, Any, Any], str] = {}
        self._open: dict[tuple[int | None, Any], _Open] = {}
        self._others: dict[str, int] = {}
        if _NVTX in database.tables:
            self._define(database, problems)

    def _define(self, database: Database, problems: list[Problem]) -> None:
        where = f"WHERE eventType IN ({_CATEGORY}, 64, {_DOMAIN})"
        columns = ("start", "eventType", "globalTid", "domainId", "category", "text", "textId")
        for count, row in enumerate(database.in_order(_NVTX, columns, problems, ("start",), where)):
            if count >= _DOMAINS_MAX:
                break
            _, _, kind, whole, domain, category, text, text_id = row
            name = text if type(text) is str else self._names.strings.get(text_id)
            if name is None:
                continue
            if kind == _DOMAIN:
                self._domains[_pid(whole), domain] = name
            else:
                self._categories[_pid(whole), domain, category] = name

    def take(self, at: Place, row: Values) -> None:
        """Make the events of a row."""
        kind, whole, text = row[2], row[6], row[5]
        name = text if type(text) is str else self._names.strings.get(row[8])
        if type(whole) is not int:
            self._rows.say(at, "globalTid is not an integer", skipped=True)
        elif kind in _DEFINITIONS:
            return
        elif kind in _MARKS:
            self._add(at, row, "I", name or "")
        elif kind in _THREAD_NAMES:
            shape = self._shape("thread name", "I", whole, None, None, comm=name)
            self._rows.add(at, row[0], self._rows.number_of(shape), {"thread": name or ""})
        elif kind in _OF_THREADS:
            self._thread_range(at, row, name or "")
        elif kind in _OF_PROCESSES:
            self._process_range(at, row, name or "")
        else:
            label = self._names.label("ENUM_NSYS_EVENT_TYPE", kind)
            self._others[label or "no type"] = self._others.get(label or "no type", 0) + 1

    def say_others(self) -> None:
        """Add a problem for the rows that are not read."""
        for label, count in self._others.items():
            self._rows.say(
                (_NVTX, -1), f"{counted(count, 'row|rows')} of {label} {agree(count, 'is|are')} not read"
            )

    def _thread_range(self, at: Place, row: Values, name: str) -> None:
        start, end, whole, domain = row[0], row[1], row[6], row[9]
        if type(end) is not int or end < start:
            if type(end) is int:
                self._rows.say(at, f"ends {start - end} ns before it starts: it is kept without an end")
                self._add(at, row, "B", name, ends_before_start_ns=start - end)
            else:
                self._add(at, row, "B", name)
            return
        if not self._rows.nests((whole, domain), start, end):
            self._add(at, row, "X", name, dur_ns=end - start)
            return
        shape = self._add(at, row, "B", name)
        self._end(end, shape, whole)

    def _process_range(self, at: Place, row: Values, name: str) -> None:
        start, end, whole, domain = row[0], row[1], row[6], row[9]
        open_ = self._open.setdefault((_pid(whole), domain), _Open())
        number = open_.take() if self._rows.has_room_for_ends else None
        is_known = type(end) is int and end >= start
        if number is None:
            self._add(at, row, "X", name, dur_ns=end - start if is_known else 0)
            return
        shape = self._add(at, row, "B", name, number=number)
        if is_known:
            self._end(end, shape, row[7] if type(row[7]) is int else whole, lambda: open_.give_back(number))
        elif type(end) is int:
            self._rows.say(at, f"ends {start - end} ns before it starts: it is kept without an end")

    def _end(self, end: int, begin: Shape, whole: int, then: Callable[[], None] | None = None) -> None:
        shape = Shape(
            begin.type, begin.name, "E", begin.pid, tid_of(whole), domain=begin.domain, range=begin.range
        )
        self._rows.end_later(end, shape, then=then)

    def _add(
        self, at: Place, row: Values, phase: str, name: str, *, dur_ns: int = 0, number: int | None = None,
        **marks: object,
    ) -> Shape:  # fmt: skip
        shape = self._shape(name, phase, row[6], row[9], number)
        args = self._args(row) | marks
        self._rows.add(at, row[0], self._rows.number_of(shape), args, dur_ns)
        return shape

    def _shape(
        self, name: str, phase: str, whole: int, domain: object, number: int | None, comm: str | None = None
    ) -> Shape:
        pid = pid_of(whole)
        own = None
        if domain:  # 0 is the default one
            own = self._domains.get((pid, domain)) or f"domain {domain}"
        return Shape(
            "annotation", cut_text(name), phase, pid, tid_of(whole), comm=comm, has_dur=phase == "X",
            domain=own, range=number,
        )  # fmt: skip

    def _args(self, row: Values) -> Args:
        category, color, whole, domain = row[3], row[4], row[6], row[9]
        args: Args = {}
        if category:
            args["category"] = self._categories.get((_pid(whole), domain, category), category)
        if type(color) is int:
            args["color"] = f"#{color & 0xFFFFFF:06x}"
        uint64, int64, double, uint32, int32, single, json_id, json, binary = row[_PAYLOADS:]
        if type(uint64) is int:
            args["payload"] = uint64 & _U64
        for value in (int64, double, uint32, int32, single):
            if isinstance(value, int | float):
                args["payload"] = value
        text = json if type(json) is str else self._names.strings.get(json_id)
        if text:
            args["payload"] = _parsed(text)
        if type(binary) is str and binary:
            args["payload_data"] = binary
        return args


def _parsed(text: str) -> object:
    """The value of a payload's JSON, or its text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


_CUPTI: Final = "CUPTI_ACTIVITY_KIND_"
# CUpti_ActivityMemcpyKind. The last three are for unified memory, which the driver moves.
_DIRECTIONS: Final = (
    "copy", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP",
    "HtoD", "DtoH", "DtoD",
)  # fmt: skip
_UNIFIED: Final = 11
_PINNED: Final = 1
_GPU_OF_METRICS: Final = 0xFF  # the part of a typeId that is the GPU's number
_SEVERE: Final = ("Warning", "Error")
_GRAPHS_WHOLE: Final = (
    "kernels of CUDA graphs are not recorded one by one; nsys profile --cuda-graph-trace=node records them"
)
_SAID_MAX: Final = 300  # the most characters of a message that are shown


_SPAN: Final = ("start", "end")
_OF_GPU: Final = (*_SPAN, "deviceId", "contextId", "streamId", "correlationId", "globalPid")
_SIZES: Final = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
_MEMORY: Final = "CUDA_GPU_MEMORY_USAGE_EVENTS"
_OWN_LAYERS: Final = {"OSRT_API": "OS runtime"}


@dataclass(slots=True)
class Source:
    """A table whose rows become events: its columns, the time first, and the function that takes a row."""

    table: str
    columns: tuple[str, ...]
    take: Take


class Events:
    """Makes events of rows."""

    def __init__(self, rows: EventRows, names: Names, launches: Launches, *, graphs_are_whole: bool) -> None:
        self._rows, self._names, self._launches = rows, names, launches
        self._graphs_are_whole = graphs_are_whole
        self._known: dict[str, tuple[tuple[str, ...], Take]] = {
            f"{_CUPTI}RUNTIME": (
                (*_SPAN, "globalTid", "correlationId", "nameId", "returnValue"),
                self._call,
            ),
            f"{_CUPTI}KERNEL": (
                (*_OF_GPU, "demangledName", "shortName", *_SIZES, "registersPerThread", "staticSharedMemory",
                 "dynamicSharedMemory", "graphId", "graphNodeId", "clusterX", "clusterY", "clusterZ"),
                self._kernel,
            ),
            f"{_CUPTI}GRAPH_TRACE": ((*_OF_GPU, "graphId", "graphExecId"), self._graph),
            f"{_CUPTI}MEMCPY": (
                (*_OF_GPU, "bytes", "copyKind", "srcKind", "dstKind", "dstDeviceId", "graphNodeId"),
                self._copy,
            ),
            f"{_CUPTI}MEMSET": ((*_OF_GPU, "bytes", "value", "memKind", "graphNodeId"), self._set),
            f"{_CUPTI}SYNCHRONIZATION": ((*_OF_GPU, "syncType", "eventId"), self._synchronization),
            f"{_CUPTI}CUDA_EVENT": (("timestamp", *_OF_GPU[2:], "eventId"), self._cuda_event),
            f"{_CUPTI}OVERHEAD": ((*_SPAN, "globalTid", "nameId", "overheadType"), self._overhead),
            "PROFILER_OVERHEAD": ((*_SPAN, "globalTid", "nameId", "overheadType"), self._overhead),
            _MEMORY: (
                ("start", "globalPid", "deviceId", "address", "bytes", "memKind", "memoryOperationType"),
                self._memory,
            ),
            "SCHED_EVENTS": (("start", "cpu", "isSchedIn", "globalTid", "threadState"), self._scheduling),
            "GPU_METRICS": (("timestamp", "typeId", "metricId", "value"), self._metric),
            "DIAGNOSTIC_EVENT": (
                ("timestamp", "timestampType", "source", "severity", "text", "globalPid"),
                self._diagnostic,
            ),
        }  # fmt: skip

    def sources(self, database: Database) -> Iterator[Source]:
        """The tables of the export, without that of NVTX."""
        calls = {*_SPAN, "globalTid", "nameId"}
        for table, here in database.tables.items():
            columns, take = self._known.get(table, ((), self._library_call))
            if columns and columns[0] in here:
                yield Source(table, columns, take)
            elif not columns and calls <= set(here):
                # Calls of other libraries have the form of OSRT_API: CUBLAS_EVENTS, CUDNN_EVENTS, …
                yield Source(table, (*_SPAN, "globalTid", "nameId", "returnValue"), take)

    # Calls ---------------------------------------------------------------------------------------------

    def _call(self, at: Place, row: Values) -> None:
        start, end, whole, correlation, name, result = row
        if type(whole) is not int:
            self._skip(at, "globalTid is not an integer")
            return
        args: Args = {"result": result} if type(result) is int else {}
        dur_ns = self._rows.length(at, start, end, args)
        launch = self._launches.of(process_of(whole), correlation, is_call=True)
        shape = self._rows.shape(("call", whole, name, launch is None), self._call_shape, whole, name, launch)
        self._rows.add(at, start, shape, args, dur_ns, launch or 0)

    def _call_shape(self, whole: int, name: object, launch: int | None) -> Shape:
        function = function_name(self._text(name))
        if self._graphs_are_whole and "GraphLaunch" in function:
            self._graphs_are_whole = False
            self._rows.say(("", NONE), _GRAPHS_WHOLE)
        return self._on_thread(whole, "userspace", function, has_launch=launch is not None)

    def _library_call(self, at: Place, row: Values) -> None:
        start, end, whole, name, result = row
        if type(whole) is not int:
            self._skip(at, "globalTid is not an integer")
            return
        args: Args = {"result": result} if type(result) is int else {}
        dur_ns = self._rows.length(at, start, end, args)
        shape = self._rows.shape((at[0], whole, name), self._library_shape, at[0], whole, name)
        self._rows.add(at, start, shape, args, dur_ns)

    def _library_shape(self, table: str, whole: int, name: object) -> Shape:
        return self._on_thread(whole, "hook", self._text(name), layer=_OWN_LAYERS.get(table, table))

    def _overhead(self, at: Place, row: Values) -> None:
        start, end, whole, name, kind = row
        args: Args = {}
        dur_ns = self._rows.length(at, start, end, args)
        if (text := self._names.strings.get(name)) is not None:
            args["of"] = text
        key = ("overhead", whole, kind)
        self._rows.add(at, start, self._rows.shape(key, self._overhead_shape, whole, kind), args, dur_ns)

    def _overhead_shape(self, whole: object, kind: object) -> Shape:
        name = self._names.label("ENUM_CUPTI_OVERHEAD_TYPE", kind) or "overhead"
        return self._on_thread(whole, "hook", name, layer="profiler overhead")

    def _on_thread(self, whole: object, kind: str, name: str, phase: str = "X", **more: Any) -> Shape:
        """A shape of events of a thread, or of no thread."""
        if type(whole) is int:
            more |= {"pid": pid_of(whole), "tid": tid_of(whole)}
        return Shape(kind, name, phase, has_dur=phase == "X", **more)

    # Work of GPUs --------------------------------------------------------------------------------------

    def _kernel(self, at: Place, row: Values) -> None:
        start, end, device, context, stream, correlation, whole, demangled, short, *more = row
        sizes, (registers, static, dynamic, graph, node, *cluster) = tuple(more[:6]), more[6:]
        if not all(type(size) is int and 0 <= size <= INDEX_LIMIT for size in sizes):
            sizes = ()
        launch = self._launches.of(process_of(whole), correlation, is_call=False)
        key = ("kernel", device, stream, whole, demangled, short, sizes, launch is None)
        shape = self._rows.shape(key, self._kernel_shape, *key[1:])
        args: Args = {"function": text} if (text := self._names.kernel(demangled)[1]) else {}
        args |= {"registers": registers} if type(registers) is int else {}
        if type(static) is int and type(dynamic) is int:
            args["shared_bytes"] = static + dynamic
        if all(type(size) is int for size in cluster) and any(cluster):
            args["cluster"] = cluster
        args |= _where(context, graph, node)
        self._rows.add(at, start, shape, args, self._rows.length(at, start, end, args), launch or 0)

    def _kernel_shape(
        self,
        device: object,
        stream: object,
        whole: object,
        demangled: object,
        short: object,
        sizes: tuple[int, ...],
        bare: bool,
    ) -> Shape:
        name = self._names.kernel(demangled)[0] or self._text(short)
        grid, block = (sizes[:3], sizes[3:]) if sizes else (None, None)
        return self._on_gpu("gpu_kernel", name, device, stream, whole, not bare, grid=grid, block=block)

    def _graph(self, at: Place, row: Values) -> None:
        graph, executed = row[7:]
        name = f"CUDA graph {executed if type(executed) is int else graph}"
        self._work(at, "gpu_kernel", name, row[:7], _where(row[3], graph, None))

    def _copy(self, at: Place, row: Values) -> None:
        size, kind, source, target, to, node = row[7:]
        is_known = type(kind) is int and 0 < kind < len(_DIRECTIONS)
        args: Args = {"size": size} if type(size) is int else {}
        for name, number in (("from", source), ("to", target)):
            if (label := self._names.label("ENUM_CUDA_MEM_KIND", number)) is not None:
                args[name] = label.lower()
        if is_known and kind >= _UNIFIED:
            args["by"] = "unified memory"
        if type(to) is int and to != row[2]:
            args["to_gpu"] = self._names.gpu(_pid(row[6]), to)
        args |= _where(row[3], None, node)
        self._work(at, "transfer", _DIRECTIONS[kind] if is_known else _DIRECTIONS[0], row[:7], args)

    def _set(self, at: Place, row: Values) -> None:
        size, value, kind, node = row[7:]
        args: Args = {"size": size} if type(size) is int else {}
        args |= {"value": value} if type(value) is int else {}
        if (label := self._names.label("ENUM_CUDA_MEM_KIND", kind)) is not None:
            args["to"] = label.lower()
        self._work(at, "transfer", "set", row[:7], args | _where(row[3], None, node))

    def _work(self, at: Place, kind: str, name: str, of_gpu: Values, args: Args) -> None:
        start, end, device, _, stream, correlation, whole = of_gpu
        launch = self._launches.of(process_of(whole), correlation, is_call=False)
        key = (kind, name, device, stream, whole, launch is not None)
        shape = self._rows.shape(key, self._on_gpu, *key)
        self._rows.add(at, start, shape, args, self._rows.length(at, start, end, args), launch or 0)

    def _on_gpu(
        self,
        kind: str,
        name: str,
        device: object,
        stream: object,
        whole: object,
        has_launch: bool,
        **sizes: Any,
    ) -> Shape:
        gpu = self._names.gpu(_pid(whole), device)
        return Shape(
            kind, name, "X", _pid(whole), gpu=0 if gpu is None else gpu, stream=_natural(stream),
            has_dur=True, has_launch=has_launch, **sizes,
        )  # fmt: skip

    def _synchronization(self, at: Place, row: Values) -> None:
        start, end, _, _, _, _, whole, kind, event = row
        args = self._of_event(row[2:7], event)
        name = self._names.label("ENUM_CUPTI_SYNC_TYPE", kind) or "synchronization"
        dur_ns = self._rows.length(at, start, end, args)
        shape = self._rows.shape(("sync", name, whole), self._of_process, whole, name, "X", "synchronization")
        self._rows.add(at, start, shape, args, dur_ns)

    def _cuda_event(self, at: Place, row: Values) -> None:
        time_ns, *of_gpu, event = row
        if not time_ns:
            self._skip(at, "the event has no time: nsys was not asked to record when events complete")
            return
        shape = self._rows.shape(
            ("event", of_gpu[4]), self._of_process, of_gpu[4], "event completes", "I", "CUDA events"
        )
        self._rows.add(at, time_ns, shape, self._of_event(tuple(of_gpu), event))

    def _of_event(self, of_gpu: Values, event: object) -> Args:
        device, context, stream, correlation, whole = of_gpu
        gpu = self._names.gpu(_pid(whole), device)
        values = {
            "gpu": gpu,
            "context": context,
            "stream": stream,
            "event": event,
            "correlation": correlation,
        }
        return {name: value for name, value in values.items() if type(value) is int}

    def _of_process(self, whole: object, name: str, phase: str, layer: str) -> Shape:
        return Shape("hook", name, phase, _pid(whole), has_dur=phase == "X", layer=layer)

    # The rest ------------------------------------------------------------------------------------------

    def _memory(self, at: Place, row: Values) -> None:
        start, whole, device, address, size, kind, operation = row
        name = ("free" if operation == 1 else "alloc") + ("_host" if kind == _PINNED else "")
        label = self._names.label("ENUM_CUDA_MEM_KIND", kind)
        args: Args = {"size": size} if type(size) is int else {}
        args |= {"address": address} if type(address) is int else {}
        args |= {"kind": label.lower()} if label else {}
        key = ("memory", name, whole, device)
        self._rows.add(at, start, self._rows.shape(key, self._memory_shape, *key[1:]), args)

    def _memory_shape(self, name: str, whole: object, device: object) -> Shape:
        return Shape("memory", name, "I", _pid(whole), gpu=self._names.gpu(_pid(whole), device))

    def _scheduling(self, at: Place, row: Values) -> None:
        start, cpu, is_in, whole, state = row
        if type(whole) is not int or is_in not in (0, 1):
            self._skip(at, "globalTid is not an integer, or isSchedIn is not 0 or 1")
            return
        args: Args = {}
        if not is_in and (label := self._names.label("ENUM_SAMPLING_THREAD_STATE", state)) is not None:
            args["prev_state"] = label
        key = ("running", whole, cpu, is_in)
        self._rows.add(at, start, self._rows.shape(key, self._running, *key[1:]), args)

    def _running(self, whole: int, cpu: object, is_in: int) -> Shape:
        return self._on_thread(whole, "scheduler", RUNNING, "B" if is_in else "E", cpu=_natural(cpu))

    def _metric(self, at: Place, row: Values) -> None:
        time_ns, kind, metric, value = row
        if type(kind) is not int or type(value) not in (int, float):
            self._skip(at, "typeId or value is not a number")
            return
        shape = self._rows.shape(("metric", kind, metric), self._metric_shape, kind, metric)
        self._rows.add(at, time_ns, shape, {"value": value})

    def _metric_shape(self, kind: int, metric: object) -> Shape:
        name = self._names.metric(kind, metric)
        return Shape("hook", name, COUNTS, gpu=kind & _GPU_OF_METRICS, layer="GPU metrics")

    def _diagnostic(self, at: Place, row: Values) -> None:
        time_ns, clock, source, severity, text, whole = row
        level = self._names.label("ENUM_DIAGNOSTIC_SEVERITY_LEVEL", severity) or "message"
        args: Args = {"text": text if type(text) is str else ""}
        for name, table, number in (("source", "SOURCE_TYPE", source), ("clock", "TIMESTAMP_SOURCE", clock)):
            if (label := self._names.label(f"ENUM_DIAGNOSTIC_{table}", number)) is not None:
                args[name] = label
        if level in _SEVERE:
            self._rows.say(at, f"{level}: {args['text'][:_SAID_MAX]}")
        shape = self._rows.shape(
            ("diagnostic", level, whole), self._of_process, whole, level, "I", "Nsight Systems"
        )
        self._rows.add(at, time_ns, shape, args)

    # What all have -------------------------------------------------------------------------------------

    def _skip(self, at: Place, text: str) -> None:
        self._rows.say(at, text, skipped=True)

    def _text(self, number: object) -> str:
        """The text of a number."""
        text = self._names.strings.get(number)
        return text if text is not None else f"text {number} (not in StringIds)"


def _pid(whole: object) -> int | None:
    return pid_of(whole) if type(whole) is int else None


def _natural(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _where(context: object, graph: object, node: object) -> Args:
    values = {"context": context, "graph": graph or None, "graph_node": node}
    return {name: value for name, value in values.items() if type(value) is int}


SESSION_CLOCK: Final = "nsys"
"""The clock of a file that does not state when the session began."""
_SESSION: Final = "TARGET_INFO_SESSION_START_TIME"
# Events may come at most this long before the session began. Earlier times are errors.
_OF_SM: Final = {
    "maxWarpsPerSm": "max_warps_per_sm",
    "maxBlocksPerSm": "max_blocks_per_sm",
    "maxRegistersPerSm": "registers_per_sm",
    "maxShmemPerSm": "shared_bytes_per_sm",
}
_EARLIEST_NS: Final = -3_600_000_000_000
_TABLES: Final = ("CUPTI_ACTIVITY_KIND_", "NVTX_EVENTS", "StringIds", "TARGET_INFO_", "META_DATA_EXPORT")
_NO_EVENTS: Final = (
    "ENUM_", "META_DATA_", "TARGET_INFO_", "ANALYSIS_", "NVTX_PAYLOAD_", "StringIds", "ThreadNames",
    "PROCESSES", "ProcessStreams", "EXPORT_",
)  # fmt: skip
_MONOTONIC_SAID: Final = (
    "times are placed by systemClockNs, taken for CLOCK_MONOTONIC, which NVIDIA does not state"
)
_REALTIME_SAID: Final = (
    "times count from utcEpochNs, the UTC time at the session's start, on the clock of Nsight Systems"
)
_NO_CLOCK_SAID: Final = "the file does not state when the session began: its times are on a separate clock"


def holds(file: BinaryIO) -> bool:
    """Whether a database has tables of Nsight Systems. Raises InputError."""
    with closing(Database(file)) as database:
        return any(name.startswith(_TABLES) for name in database.tables)


def read(stream: BinaryIO) -> Recording:
    """The recording in an export, which is a file. Raises InputError."""
    return _Export(Database(stream)).recording()


class _Export:
    """One file, as it is read."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tables = Tables()
        self._rows = EventRows(self._tables)
        self._problems = self._rows.problems
        self._names = Names(database, self._problems)
        self._capture = self._names.settings("META_DATA_CAPTURE")

    def recording(self) -> Recording:
        header = self._header()
        return Recording(header, self._batches(), self._tables)

    # What the file says of itself ----------------------------------------------------------------------

    def _header(self) -> Header:
        clock, start = self._clock()
        header = new_header(engine="Nsight Systems", clock=clock, clocks=[clock])
        export = self._names.settings("META_DATA_EXPORT")
        if version := export.get("EXPORT_PRODUCT_VERSION"):
            header["tool"] = f"Nsight Systems {version}"
        if start:
            header["start"] = start
        system = self._names.settings("TARGET_INFO_SYSTEM_ENV")
        for key, name in (
            ("host", "Hostname"),
            ("kernel", "SoftwareReleaseVersion"),
            ("machine", "CpuArchitecture"),
        ):
            if name in system:
                header[key] = system[name]  # type: ignore[literal-required]
        if command := self._command():
            header["command"] = command
        if gpus := self._gpus():
            header["gpus"] = gpus
        return header

    def _clock(self) -> tuple[str, HostInstant]:
        """The clock of the events, and the start. Sets the offset to add to their times."""
        found = self._database.texts(_SESSION, ("systemClockNs", "utcEpochNs"), 1, self._problems)
        system_ns, utc_ns = (
            value if type(value) is int and 0 < value < TIME_LIMIT_NS else None
            for value in (found[0] if found else (None, None))
        )
        start: dict[str, int] = {}
        if utc_ns is not None:
            start["realtime_ns"] = utc_ns
        clock, stated = SESSION_CLOCK, _NO_CLOCK_SAID
        if system_ns is not None:
            start["monotonic_ns"] = system_ns
            clock, stated, self._rows.base_ns = MONOTONIC, _MONOTONIC_SAID, system_ns
        elif utc_ns is not None:
            clock, stated, self._rows.base_ns = "realtime", _REALTIME_SAID, utc_ns
        self._say(stated)
        return clock, cast(HostInstant, start)

    def _command(self) -> list[str]:
        of, command = self._capture, "PROCESS_0:COMMAND"
        if command not in of:
            return []
        given = (of.get(f"PROCESS_0:ARGUMENT_{at}") for at in range(len(of)))
        return [of[command], *(one for one in given if one is not None)]

    def _gpus(self) -> list[dict[str, Any]]:
        columns = ("id", "name", "uuid", "smCount", "computeMajor", "computeMinor", *_OF_SM)
        rows = self._database.texts("TARGET_INFO_GPU", columns, 1 << 10, self._problems)
        gpus = []
        for index, name, uuid, count, major, minor, *limits in rows:
            if type(index) is int and index >= 0 and type(name) is str:
                gpu = {"index": index, "name": name}
                gpu |= {"uuid": f"GPU-{uuid}"} if type(uuid) is str and uuid else {}
                gpu |= {"sm_count": count} if type(count) is int else {}
                if type(major) is int and type(minor) is int:
                    gpu["compute_capability"] = f"{major}.{minor}"
                known = zip(_OF_SM.values(), limits, strict=True)
                gpus.append(gpu | {key: value for key, value in known if type(value) is int})
        return gpus

    def _longest_ns(self) -> int:
        found = self._database.texts("ANALYSIS_DETAILS", ("duration",), 1, self._problems)
        duration = found[0][0] if found else None
        return duration if type(duration) is int and duration > 0 else 0

    # Events --------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[SourceBatch]:
        try:
            yield from self._rows.batches(self._steps())
        finally:
            self._database.close()

    def _sources(self) -> Iterator[Source]:
        launches = launches_of(self._database, self._problems)
        self._rows.longest_ns = self._longest_ns() or self._rows.longest_ns
        whole = self._capture.get("CUDA_GRAPH_TRACE_OPTIONS:MODE") == "Graph"
        events = Events(self._rows, self._names, launches, graphs_are_whole=whole)
        self._annotations = Annotations(self._rows, self._names, self._database, self._problems)
        yield from events.sources(self._database)
        if "start" in self._database.tables.get(_NVTX, ()):
            yield Source(_NVTX, _NVTX_COLUMNS, self._annotations.take)

    def _steps(self) -> Iterator[None]:
        """Take rows of all tables in the order of time."""
        for record in self._names.records():
            self._rows.other(record)
        sources = list(self._sources())
        self._say_unread({source.table for source in sources})
        streams = [(source.table, self._in_order(source), source.take) for source in sources]
        yield from self._rows.steps(streams, self._begin)
        self._annotations.say_others()

    def _begin(self, first_ns: int) -> None:
        """If the separate clock began after the first event, let it begin there."""
        if self._rows.base_ns == 0 and _EARLIEST_NS < first_ns < 0:
            self._rows.base_ns = -first_ns

    def _in_order(self, source: Source) -> Iterator[Values]:
        order = tuple(one for one in (source.columns[0], "end DESC") if one.split()[0] in source.columns)
        return self._database.in_order(source.table, source.columns, self._problems, order)

    def _say_unread(self, read: set[str]) -> None:
        """Add a problem for each table with rows that are not read."""
        for table in self._database.tables:
            if table in read or table.startswith(_NO_EVENTS):
                continue
            try:
                count = self._database.count(table)
            except BROKEN as e:
                self._problems.append(Problem(0, table, f"cannot be read on: {unreadable(e)}"))
                continue
            if count:
                self._say(counted(count, "row|rows is|are not read"), table)

    def _say(self, text: str, table: str = "") -> None:
        self._rows.say((table, NONE), text)
