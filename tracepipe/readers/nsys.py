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

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import PurePath
from typing import Any, BinaryIO, Final, cast

import orjson

from tracepipe.event.model import (
    COUNTS,
    INDEX_LIMIT,
    MONOTONIC,
    TIME_LIMIT_NS,
    Header,
    HostInstant,
    Problem,
    Record,
    cut_text,
)
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, LongNames
from tracepipe.event.vocabulary import RUNNING
from tracepipe.kernel_names import short_kernel_name
from tracepipe.readers.ids import Launches, RangeNumbers
from tracepipe.readers.recording import Recording
from tracepipe.readers.sorted_rows import Cache
from tracepipe.readers.sqlite_tables import (
    BROKEN,
    AddRow,
    Database,
    EventRows,
    Strings,
    Values,
    integers,
    unreadable,
)
from tracepipe.units import agree, counted

SESSION_CLOCK: Final = "nsys"
"""The clock of a file that does not state when the session began."""
_SESSION: Final = "TARGET_INFO_SESSION_START_TIME"
_OF_SM: Final = {
    "maxWarpsPerSm": "max_warps_per_sm",
    "maxBlocksPerSm": "max_blocks_per_sm",
    "maxRegistersPerSm": "registers_per_sm",
    "maxShmemPerSm": "shared_bytes_per_sm",
}
# Events may come at most this long before the session began. Earlier times are errors.
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
_GRAPHS_WHOLE: Final = (
    "kernels of CUDA graphs are not recorded one by one; nsys profile --cuda-graph-trace=node records them"
)
# The most threads and processes whose names are kept.
_NAMES_MAX: Final = 1 << 14
# The most rows of small tables (GPUs, labels, settings).
_FEW_MAX: Final = 1 << 10
_SAID_MAX: Final = 300  # the most characters of a message that are shown
_ID_BITS, _ID_MASK = 24, (1 << 24) - 1
_VERSION: Final = re.compile(r"_v\d{4,5}$")

_CUPTI: Final = "CUPTI_ACTIVITY_KIND_"
_CALLS: Final = f"{_CUPTI}RUNTIME"
_WAITS: Final = tuple(f"{_CUPTI}{kind}" for kind in ("SYNCHRONIZATION", "CUDA_EVENT"))
_OF_WAIT: Final = ("contextId", "streamId", "eventId")
_NONE: Final = 0xFFFFFFFF
_WORK: Final = tuple(f"{_CUPTI}{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"))
# CUpti_ActivityMemcpyKind. The last three are for unified memory, which the driver moves.
_DIRECTIONS: Final = (
    "copy", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP",
    "HtoD", "DtoH", "DtoD",
)  # fmt: skip
_UNIFIED: Final = 11
_PINNED: Final = 1
_GPU_OF_METRICS: Final = 0xFF  # the part of a typeId that is the GPU's number
_SPAN: Final = ("start", "end")
_OF_GPU: Final = (*_SPAN, "deviceId", "contextId", "streamId", "correlationId", "globalPid")
_SIZES: Final = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
_CALL: Final = (*_SPAN, "globalTid", "nameId")

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


def _pid(whole: object) -> int | None:
    """The process of a globalPid or globalTid; None where it has none."""
    return (whole >> _ID_BITS & _ID_MASK or None) if type(whole) is int else None


def _process(whole: object) -> int:
    """The process of a globalPid or globalTid, with its machine."""
    return whole >> _ID_BITS if type(whole) is int else 0


def _natural(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def function_name(symbol: str) -> str:
    """The name of a runtime function without CUPTI's ending: cudaMalloc for cudaMalloc_v3020."""
    return _VERSION.sub("", symbol)


def _kernel(whole: str) -> tuple[tuple[str, str | None], int]:
    name = short_kernel_name(whole)
    return (name, whole if whole != name else None), len(whole)


class _Names:
    """Looks up numbers: processes, threads, GPUs, texts. The problems of their tables are added to
    `problems`.
    """

    def __init__(self, database: Database, problems: list[Problem], long_names: LongNames) -> None:
        self._database, self._problems, self._long_names = database, problems, long_names
        self.strings = strings = Strings(database, "StringIds", "id", "value", problems)
        self.kernels = Cache[Any, tuple[str, str | None]](lambda number: _kernel(strings.get(number) or ""))
        """By its number: a kernel's name, "" if it is not known, and its whole name if that is longer."""
        self._metrics: dict[tuple[Any, Any], str] | None = None
        self._labels: dict[str, dict[int, str]] = {}
        rows = self.rows("TARGET_INFO_CUDA_DEVICE", "pid", "cudaId", "gpuId")
        self._gpus: dict[tuple[int | None, int], int] = {
            (pid, cuda): gpu
            for pid, cuda, gpu in rows
            if type(pid) is int and type(cuda) is int and type(gpu) is int and gpu >= 0
        }

    def rows(self, table: str, *columns: str, most: int = _FEW_MAX) -> list[Values]:
        """The rows of a small table."""
        return self._database.texts(table, columns, most, self._problems)

    def records(self) -> Iterator[Record]:
        """The names of processes and threads."""
        for whole, name in self.rows("PROCESSES", "globalPid", "name", most=_NAMES_MAX):
            if type(name) is str and name and (pid := _pid(whole)):
                yield {"type": "name", "pid": pid, "name": cut_text(PurePath(name).name or name)}
        threads: dict[int, tuple[int, str]] = {}
        for whole, name_id, priority in self.rows(
            "ThreadNames", "globalTid", "nameId", "priority", most=_NAMES_MAX
        ):
            name, rank = self.strings.get(name_id), priority if type(priority) is int else 0
            if type(whole) is int and name and (whole not in threads or threads[whole][0] <= rank):
                threads[whole] = rank, self._long_names.cut(name)
        for whole, (_, name) in threads.items():
            if pid := _pid(whole):
                yield {"type": "name", "pid": pid, "tid": whole & _ID_MASK, "name": name}

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
            self._labels[table] = {
                key: text
                for key, label, name in self.rows(table, "id", "label", "name")
                if type(key) is int and (text := label if type(label) is str else name)
            }
        return self._labels[table].get(number, str(number))

    def labels(self, table: str, **numbers: object) -> Args:
        """The labels of some numbers, in lower case."""
        found = {name: self.label(table, number) for name, number in numbers.items()}
        return {name: label.lower() for name, label in found.items() if label is not None}

    def metric(self, kind: int, number: object) -> str:
        """The name of a counter of a GPU."""
        if self._metrics is None:
            columns = ("typeId", "metricId", "metricName")
            rows = self.rows("TARGET_INFO_GPU_METRICS", *columns, most=_NAMES_MAX)
            self._metrics = {(of, at): name for of, at, name in rows if type(name) is str}
        return self._metrics.get((kind, number), f"metric {number}")

    def settings(self, table: str) -> dict[str, str]:
        """A small table of names and values."""
        rows = self.rows(table, "name", "value")
        return {name: value for name, value in rows if type(name) is str and type(value) is str}

    def text(self, number: object) -> str:
        """The text of a number, or its number."""
        text = self.strings.get(number)
        return text if text is not None else f"text {number} (not in StringIds)"


class _Annotations:
    """Makes annotations of the rows of NVTX_EVENTS."""

    def __init__(self, rows: EventRows, names: _Names, database: Database) -> None:
        self._rows, self._names = rows, names
        self._domains: dict[tuple[int | None, Any], str] = {}
        self._categories: dict[tuple[int | None, Any, Any], str] = {}
        self._ranges: dict[tuple[int | None, Any], RangeNumbers] = {}
        self._unread: Counter[str] = Counter()
        if _NVTX not in database.tables:
            return
        where = f"WHERE eventType IN ({_CATEGORY}, 64, {_DOMAIN})"
        columns = ("start", "eventType", "globalTid", "domainId", "category", "text", "textId")
        for count, row in enumerate(database.in_order(_NVTX, columns, rows.problems, ("start",), where)):
            if count >= _DOMAINS_MAX:
                break
            _, _, kind, whole, domain, category, text, text_id = row
            name = text if type(text) is str else names.strings.get(text_id)
            if name is None:
                continue
            name = rows.tables.long_names.cut(name)
            if kind == _DOMAIN:
                self._domains[_pid(whole), domain] = name
            else:
                self._categories[_pid(whole), domain, category] = name

    def add(self, row: Values) -> None:
        """Add the events of a row."""
        start, end, kind, text, whole, domain = row[0], row[1], row[2], row[5], row[6], row[9]
        known = text if type(text) is str else self._names.strings.get(row[8])
        name = known or ""
        if type(whole) is not int:
            self._rows.say("globalTid is not an integer", skipped=True)
        elif kind in _DEFINITIONS:
            return
        elif kind in _MARKS:
            self._add(row, "I", name)
        elif kind in _THREAD_NAMES:
            shape = self._shape("thread name", "I", whole, None, comm=known)
            self._rows.add(start, self._rows.tables.number_of(shape), {"thread": name})
        elif kind not in _OF_THREADS | _OF_PROCESSES:
            self._unread[self._names.label("ENUM_NSYS_EVENT_TYPE", kind) or "no type"] += 1
        elif kind in _OF_PROCESSES:
            self._process_range(row, name)
        elif type(end) is int and end >= start:
            shape = self._shape(name, "B", whole, domain)
            if self._rows.nests((shape.pid, shape.tid, shape.domain), start, end):
                self._end(end, self._add(row, "B", name), whole)
            else:
                self._add(row, "X", name, dur_ns=end - start)
        else:
            backwards = {"ends_before_start_ns": start - end} if type(end) is int else {}
            if backwards:
                self._rows.say(f"ends {start - end} ns before it starts: it is kept without an end")
            self._add(row, "B", name, **backwards)

    def say_unread(self) -> None:
        """Add a problem for the rows that are not read."""
        for label, count in self._unread.items():
            words = f"{counted(count, 'row|rows')} of {label} {agree(count, 'is|are')} not read"
            self._rows.say(words, table=_NVTX)

    def _process_range(self, row: Values, name: str) -> None:
        start, end, whole, domain = row[0], row[1], row[6], row[9]
        ranges = self._ranges.setdefault((_pid(whole), domain), RangeNumbers())
        is_known = type(end) is int and end >= start
        number = ranges.lowest() if self._rows.can_end(start, end if is_known else start) else None
        if number is None:
            self._add(row, "X", name, dur_ns=end - start if is_known else 0)
            return
        shape = self._add(row, "B", name, number)
        if is_known:
            self._end(end, shape, row[7] if type(row[7]) is int else whole, lambda: ranges.free(number))
        elif type(end) is int:
            self._rows.say(f"ends {start - end} ns before it starts: it is kept without an end")

    def _end(self, end: int, begin: Shape, whole: int, then: Callable[[], None] | None = None) -> None:
        tid = whole & _ID_MASK
        shape = Shape(begin.type, begin.name, "E", begin.pid, tid, domain=begin.domain, range=begin.range)
        self._rows.end_later(end, shape, then=then)

    def _add(
        self, row: Values, phase: str, name: str, number: int | None = None, dur_ns: int = 0, **marks: object
    ) -> Shape:
        shape = self._shape(name, phase, row[6], row[9], range=number)
        self._rows.add(row[0], self._rows.tables.number_of(shape), self._args(row) | marks, dur_ns)
        return shape

    def _shape(self, name: str, phase: str, whole: int, domain: object, **fields: Any) -> Shape:
        own = None
        if domain:  # 0 is the default one
            own = self._domains.get((_pid(whole), domain)) or f"domain {domain}"
        pid, tid = _pid(whole), whole & _ID_MASK
        more = {"domain": own, "has_dur": phase == "X", **fields}
        return Shape("annotation", cut_text(name), phase, pid, tid, **more)

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
            try:
                args["payload"] = orjson.loads(text)
            except orjson.JSONDecodeError:
                args["payload"] = text
        if type(binary) is str and binary:
            args["payload_data"] = binary
        return args


class _Events:
    """Makes events of the rows of the other tables."""

    def __init__(self, rows: EventRows, names: _Names, launches: Launches, *, graphs_are_whole: bool) -> None:
        self._rows, self._names, self._launches = rows, names, launches
        self._graphs_are_whole = graphs_are_whole
        self._of_table: dict[str, tuple[tuple[str, ...], AddRow]] = {
            _CALLS: (
                (*_SPAN, "globalTid", "correlationId", "nameId", "returnValue"), self._call,
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
            f"{_CUPTI}OVERHEAD": ((*_CALL, "overheadType"), self._overhead),
            "PROFILER_OVERHEAD": ((*_CALL, "overheadType"), self._overhead),
            "CUDA_GPU_MEMORY_USAGE_EVENTS": (
                ("start", "globalPid", "deviceId", "address", "bytes", "memKind", "memoryOperationType"),
                self._memory,
            ),
            "SCHED_EVENTS": (("start", "cpu", "isSchedIn", "globalTid", "threadState"), self._scheduling),
            "GPU_METRICS": (("timestamp", "typeId", "metricId", "value"), self._metric),
            "DIAGNOSTIC_EVENT": (
                ("timestamp", "timestampType", "source", "severity", "text", "globalPid"), self._diagnostic,
            ),
        }  # fmt: skip

    def columns(self, table: str, here: tuple[str, ...]) -> tuple[tuple[str, ...], AddRow] | None:
        """The columns of a table that are read, the time first, and what adds a row; None where it has no
        events.
        """
        columns, add = self._of_table.get(table, ((), self._library_call))
        if not columns and {*_CALL} <= set(here):
            # Calls of other libraries have the form of OSRT_API: CUBLAS_EVENTS, CUDNN_EVENTS, …
            return (*_CALL, "returnValue"), add
        return (columns, add) if columns and columns[0] in here else None

    # Calls ---------------------------------------------------------------------------------------------

    def _call(self, row: Values) -> None:
        start, end, whole, correlation, name, result, *of_wait = row
        if type(whole) is not int:
            self._rows.say("globalTid is not an integer", skipped=True)
            return
        args = integers(result=result)
        if of_wait:
            context, stream, event = (None if number == _NONE else number for number in of_wait)
            args |= integers(context=context, stream=stream, event=event)
        dur_ns = self._rows.length(start, end, args)
        launch = self._launches.launch(_process(whole), correlation, is_call=True)
        key = ("call", whole, name, launch is None)
        shape = self._rows.shape(key, lambda: self._call_shape(whole, name, launch is not None))
        self._rows.add(start, shape, args, dur_ns, launch or 0)

    def _call_shape(self, whole: int, name: object, has_launch: bool) -> Shape:
        function = function_name(self._names.text(name))
        if self._graphs_are_whole and "GraphLaunch" in function:
            self._graphs_are_whole = False
            self._rows.problems.append(Problem(0, "", _GRAPHS_WHOLE, skipped=False))
        return _on_thread(whole, "userspace", function, has_launch=has_launch)

    def _library_call(self, row: Values) -> None:
        start, end, whole, name, result = row
        if type(whole) is not int:
            self._rows.say("globalTid is not an integer", skipped=True)
            return
        table, args = self._rows.table, integers(result=result)
        dur_ns = self._rows.length(start, end, args)
        layer = "OS runtime" if table == "OSRT_API" else table
        shape = self._rows.shape(
            (table, whole, name), lambda: _on_thread(whole, "hook", self._names.text(name), layer=layer)
        )
        self._rows.add(start, shape, args, dur_ns)

    def _overhead(self, row: Values) -> None:
        start, end, whole, name, kind = row
        args: Args = {}
        dur_ns = self._rows.length(start, end, args)
        if (text := self._names.strings.get(name)) is not None:
            args["of"] = text
        called = self._names.label("ENUM_CUPTI_OVERHEAD_TYPE", kind) or "overhead"
        shape = self._rows.shape(
            ("overhead", whole, kind), lambda: _on_thread(whole, "hook", called, layer="profiler overhead")
        )
        self._rows.add(start, shape, args, dur_ns)

    # Work of GPUs --------------------------------------------------------------------------------------

    def _kernel(self, row: Values) -> None:
        demangled, short, *more = row[7:]
        sizes, (registers, static, dynamic, graph, node, *cluster) = tuple(more[:6]), more[6:]
        if not all(type(size) is int and 0 <= size <= INDEX_LIMIT for size in sizes):
            sizes = ()
        name, whole = self._names.kernels[demangled]
        args: Args = {"function": whole} if whole else {}
        args |= integers(registers=registers)
        if type(static) is int and type(dynamic) is int:
            args["shared_bytes"] = static + dynamic
        if all(type(size) is int for size in cluster) and any(cluster):
            args["cluster"] = cluster
        args |= integers(context=row[3], graph=graph or None, graph_node=node)
        self._work("gpu_kernel", name or self._names.text(short), row, args, sizes)

    def _graph(self, row: Values) -> None:
        graph, executed = row[7:]
        name = f"CUDA graph {executed if type(executed) is int else graph}"
        self._work("gpu_kernel", name, row, integers(context=row[3], graph=graph or None))

    def _copy(self, row: Values) -> None:
        size, kind, source, target, to, node = row[7:]
        is_known = type(kind) is int and 0 < kind < len(_DIRECTIONS)
        args = integers(size=size) | self._names.labels(
            "ENUM_CUDA_MEM_KIND", **{"from": source, "to": target}
        )
        if is_known and kind >= _UNIFIED:
            args["by"] = "unified memory"
        if type(to) is int and to != row[2]:
            args["to_gpu"] = self._names.gpu(_pid(row[6]), to)
        args |= integers(context=row[3], graph_node=node)
        self._work("transfer", _DIRECTIONS[kind] if is_known else _DIRECTIONS[0], row, args)

    def _set(self, row: Values) -> None:
        size, value, kind, node = row[7:]
        args = integers(size=size, value=value) | self._names.labels("ENUM_CUDA_MEM_KIND", to=kind)
        self._work("transfer", "set", row, args | integers(context=row[3], graph_node=node))

    def _work(self, kind: str, name: str, row: Values, args: Args, sizes: tuple[int, ...] = ()) -> None:
        start, end, device, _, stream, correlation, whole = row[:7]
        launch = self._launches.launch(_process(whole), correlation, is_call=False)
        pid = _pid(whole)
        shape = self._rows.shape(
            (kind, name, device, stream, whole, sizes, launch is not None),
            lambda: Shape(
                kind, name, "X", pid, gpu=self._names.gpu(pid, device) or 0, stream=_natural(stream),
                grid=cast(Any, sizes[:3] or None), block=cast(Any, sizes[3:] or None),
                has_dur=True, has_launch=launch is not None,
            ),
        )  # fmt: skip
        self._rows.add(start, shape, args, self._rows.length(start, end, args), launch or 0)

    def _synchronization(self, row: Values) -> None:
        start, end, _, _, _, _, whole, kind, event = row
        args = self._of_event(row[2:7], event)
        name = self._names.label("ENUM_CUPTI_SYNC_TYPE", kind) or "synchronization"
        dur_ns = self._rows.length(start, end, args)
        self._rows.add(start, self._of_process(whole, name, "X", "synchronization"), args, dur_ns)

    def _cuda_event(self, row: Values) -> None:
        time_ns, *of_gpu, event = row
        if not time_ns:
            stated = "the event has no time: nsys was not asked to record when events complete"
            self._rows.say(stated, skipped=True)
            return
        shape = self._of_process(of_gpu[4], "event completes", "I", "CUDA events")
        self._rows.add(time_ns, shape, self._of_event(tuple(of_gpu), event))

    def _of_event(self, of_gpu: Values, event: object) -> Args:
        device, context, stream, correlation, whole = of_gpu
        gpu = self._names.gpu(_pid(whole), device)
        return integers(gpu=gpu, context=context, stream=stream, event=event, correlation=correlation)

    # The rest ------------------------------------------------------------------------------------------

    def _memory(self, row: Values) -> None:
        start, whole, device, address, size, kind, operation = row
        name = ("free" if operation == 1 else "alloc") + ("_host" if kind == _PINNED else "")
        args = integers(size=size, address=address) | self._names.labels("ENUM_CUDA_MEM_KIND", kind=kind)
        pid = _pid(whole)
        shape = self._rows.shape(
            ("memory", name, whole, device),
            lambda: Shape("memory", name, "I", pid, gpu=self._names.gpu(pid, device)),
        )
        self._rows.add(start, shape, args)

    def _scheduling(self, row: Values) -> None:
        start, cpu, is_in, whole, state = row
        if type(whole) is not int or is_in not in (0, 1):
            self._rows.say("globalTid is not an integer, or isSchedIn is not 0 or 1", skipped=True)
            return
        args: Args = {}
        if not is_in and (label := self._names.label("ENUM_SAMPLING_THREAD_STATE", state)) is not None:
            args["prev_state"] = label
        phase = "B" if is_in else "E"
        shape = self._rows.shape(
            ("running", whole, cpu, is_in),
            lambda: _on_thread(whole, "scheduler", RUNNING, phase, cpu=_natural(cpu)),
        )
        self._rows.add(start, shape, args)

    def _metric(self, row: Values) -> None:
        time_ns, kind, metric, value = row
        if type(kind) is not int or type(value) not in (int, float):
            self._rows.say("typeId or value is not a number", skipped=True)
            return
        name = self._names.metric(kind, metric)
        shape = self._rows.shape(
            ("metric", kind, metric),
            lambda: Shape("hook", name, COUNTS, gpu=kind & _GPU_OF_METRICS, layer="GPU metrics"),
        )
        self._rows.add(time_ns, shape, {"value": value})

    def _diagnostic(self, row: Values) -> None:
        time_ns, clock, source, severity, text, whole = row
        level = self._names.label("ENUM_DIAGNOSTIC_SEVERITY_LEVEL", severity) or "message"
        args: Args = {"text": text if type(text) is str else ""}
        for name, table, number in (("source", "SOURCE_TYPE", source), ("clock", "TIMESTAMP_SOURCE", clock)):
            if (label := self._names.label(f"ENUM_DIAGNOSTIC_{table}", number)) is not None:
                args[name] = label
        if level in ("Warning", "Error"):
            self._rows.say(f"{level}: {args['text'][:_SAID_MAX]}")
        self._rows.add(time_ns, self._of_process(whole, level, "I", "Nsight Systems"), args)

    def _of_process(self, whole: object, name: str, phase: str, layer: str) -> int:
        """The number of the shape of an event of a process."""
        return self._rows.shape(
            (layer, name, whole),
            lambda: Shape("hook", name, phase, _pid(whole), has_dur=phase == "X", layer=layer),
        )


def _on_thread(whole: object, kind: str, name: str, phase: str = "X", **more: Any) -> Shape:
    """A shape of events of a thread, or of no thread."""
    if type(whole) is int:
        more |= {"pid": _pid(whole), "tid": whole & _ID_MASK}
    return Shape(kind, name, phase, has_dur=phase == "X", **more)


class _Export:
    """One file, as it is read."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rows = EventRows(database, [])
        self._names = _Names(database, self._rows.problems, self._rows.tables.long_names)
        self._capture = self._names.settings("META_DATA_CAPTURE")

    def recording(self) -> Recording:
        return Recording(self._header(), self._rows.batches(self._steps()), self._rows.tables)

    # What the file says of itself ----------------------------------------------------------------------

    def _header(self) -> Header:
        clock, start = self._clock()
        header = Header(engine="Nsight Systems", clock=clock, clocks=[clock], start=start)
        export = self._names.settings("META_DATA_EXPORT")
        if version := export.get("EXPORT_PRODUCT_VERSION"):
            header.tool = f"Nsight Systems {version}"
        system = self._names.settings("TARGET_INFO_SYSTEM_ENV")
        header.host = system.get("Hostname", "")
        header.kernel = system.get("SoftwareReleaseVersion", "")
        header.machine = system.get("CpuArchitecture", "")
        if "PROCESS_0:COMMAND" in self._capture:
            given = (self._capture.get(f"PROCESS_0:ARGUMENT_{at}") for at in range(len(self._capture)))
            arguments = [one for one in given if one is not None]
            header.command = [self._capture["PROCESS_0:COMMAND"], *arguments]
        header.gpus = self._gpus()
        return header

    def _clock(self) -> tuple[str, HostInstant]:
        """The clock of the events, and the start. Sets the offset to add to their times."""
        found = self._names.rows(_SESSION, "systemClockNs", "utcEpochNs", most=1)
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
        self._rows.say(stated)
        return clock, cast(HostInstant, start)

    def _gpus(self) -> list[dict[str, Any]]:
        columns = ("id", "name", "uuid", "smCount", "computeMajor", "computeMinor", *_OF_SM)
        gpus = []
        for index, name, uuid, count, major, minor, *limits in self._names.rows("TARGET_INFO_GPU", *columns):
            if type(index) is int and index >= 0 and type(name) is str:
                gpu = {"index": index, "name": name}
                gpu |= {"uuid": f"GPU-{uuid}"} if type(uuid) is str and uuid else {}
                gpu |= integers(sm_count=count)
                if type(major) is int and type(minor) is int:
                    gpu["compute_capability"] = f"{major}.{minor}"
                gpus.append(gpu | integers(**dict(zip(_OF_SM.values(), limits, strict=True))))
        return gpus

    # Events --------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[None]:
        """Add the rows of all tables in the order of time."""
        for record in self._names.records():
            self._rows.add_record(record)
        launches = self._launches()
        durations = self._names.rows("ANALYSIS_DETAILS", "duration", most=1)
        if durations and type(durations[0][0]) is int and durations[0][0] > 0:
            self._rows.longest_ns = durations[0][0]
        whole = self._capture.get("CUDA_GRAPH_TRACE_OPTIONS:MODE") == "Graph"
        events = _Events(self._rows, self._names, launches, graphs_are_whole=whole)
        annotations = _Annotations(self._rows, self._names, self._database)
        sources = []
        for table, here in self._database.tables.items():
            if found := events.columns(table, here):
                sources.append((table, self._in_order(table, found[0]), found[1]))
        if "start" in self._database.tables.get(_NVTX, ()):
            sources.append((_NVTX, self._in_order(_NVTX, _NVTX_COLUMNS), annotations.add))
        read = {table for table, _, _ in sources}
        self._rows.say_unread(lambda table: table in read or table.startswith(_NO_EVENTS))
        yield from self._rows.steps(sources, self._begin)
        annotations.say_unread()

    def _launches(self) -> Launches:
        """The calls that launched work."""
        tables = [table for table in _WORK if table in self._database.tables]
        launches = Launches(by_process=all("globalPid" in self._database.tables[table] for table in tables))
        for table in tables:
            try:
                for whole, correlation in self._database.select(table, ("globalPid", "correlationId")):
                    launches.note(_process(whole), correlation)
            except BROKEN as e:
                self._rows.problems.append(Problem(0, table, f"cannot be read on: {unreadable(e)}"))
        return launches

    def _begin(self, first_ns: int) -> None:
        """If the separate clock began after the first event, let it begin there."""
        if self._rows.base_ns == 0 and _EARLIEST_NS < first_ns < 0:
            self._rows.base_ns = -first_ns

    def _in_order(self, table: str, columns: tuple[str, ...]) -> Iterator[Values]:
        order = tuple(one for one in (columns[0], "end DESC") if one.split()[0] in columns)
        waits = [
            f"SELECT globalPid >> {_ID_BITS} AS process, correlationId AS number, {', '.join(_OF_WAIT)}"
            f" FROM {wait} NOT INDEXED"
            for wait in _WAITS
            if {"globalPid", "correlationId", *_OF_WAIT} <= {*self._database.tables.get(wait, ())}
        ]
        if table != _CALLS or not waits:
            return self._database.in_order(table, columns, self._rows.problems, order)
        joined = (  # by a group, as a call must stay one row
            f"LEFT JOIN (SELECT * FROM ({' UNION ALL '.join(waits)}) GROUP BY process, number) AS w"
            f" ON w.number = r.correlationId AND w.process = r.globalTid >> {_ID_BITS}"
        )
        of_waits = [f"w.{one}" for one in _OF_WAIT]
        return self._database.in_order(
            table, columns, self._rows.problems, order, joined=joined, of_joined=of_waits
        )


def holds(file: BinaryIO) -> bool:
    """Whether a database has tables of Nsight Systems. Raises InputError."""
    with closing(Database(file)) as database:
        return any(name.startswith(_TABLES) for name in database.tables)


def read(stream: BinaryIO) -> Recording:
    """The recording in an export, which is a file. Raises InputError."""
    return _Export(Database(stream)).recording()
