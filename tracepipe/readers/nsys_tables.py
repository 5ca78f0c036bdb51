"""Makes events of the tables of an export of Nsight Systems.

CUPTI_ACTIVITY_KIND_KERNEL, …_GRAPH_TRACE     gpu_kernel X    launch, grid, block, stream
…_MEMCPY, …_MEMSET                            transfer X      HtoD, …, set: gpu, stream, size, launch
…_RUNTIME (calls of the driver too)           userspace X     result; launch, where they asked for work
CUDA_GPU_MEMORY_USAGE_EVENTS                  memory I        alloc, free: size, address
SCHED_EVENTS                                  scheduler B, E  running
GPU_METRICS                                   hook C          counters of each GPU
OSRT_API, synchronisation, CUDA events, …     hook            a layer each
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tracepipe.event.columns import NONE
from tracepipe.event.model import COUNTS, INDEX_LIMIT
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args
from tracepipe.event.vocabulary import RUNNING
from tracepipe.readers.event_rows import EventRows, Place, Take, Values
from tracepipe.readers.launch_numbers import Launches
from tracepipe.readers.nsys_names import Names, function_name, pid_of, process_of, tid_of
from tracepipe.readers.sqlite_tables import Database

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
