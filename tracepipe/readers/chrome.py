"""Reads Chrome's trace JSON, which PyTorch's profiler (Kineto) writes too.

    {"traceEvents": [{"ph":"X","cat":"kernel","name":"f","pid":0,"tid":7,"ts":1.234,"dur":5.6,"args":{…}}, …]}

The file is the object, or only the array, which may lack its end. `ts` and `dur` are microseconds, and become
nanoseconds by their digits. Events may be in any order. They are sorted by time, in temporary files without
names if there are many. Begins and ends become whole slices: those of a thread (B, E), and those of an id (b,
n, e), which nest, and may overlap those of other ids.

Versions of PyTorch wrote times as whole microseconds since the epoch, as these with three decimals, and as
microseconds after `baseTimeNanoseconds`. The members around the events show the clock:

PyTorch's profiler (Kineto)   CLOCK_REALTIME, often after `baseTimeNanoseconds`
VizTracer                     CLOCK_MONOTONIC; its `baseTimeNanoseconds` is how far CLOCK_REALTIME is ahead
others                        CLOCK_REALTIME where they state a base, else their own clock

The native core makes rows of the usual forms of events in `chrome_rows.c`:

X                 a row with its length
I i R P, C        a row without one
s t f             the same; those that may be inside of a slice are left to `FlowSlices`
N O D             the same: the life of an object
B E, b n e        a row for `ChromePairs`, which matches them
M                 names and places of processes and threads

The category of an event decides its layer, its row and its fields:

of PyTorch (Kineto)
 user_annotation                            annotation
 cpu_op                                     annotation of the domain cpu_op
 cuda_runtime, cuda_driver, xpu_runtime, …  userspace; launches by `correlation`
 kernel, gpu_memcpy, gpu_memset             gpu_kernel, transfer: on their stream, with `launch`
 ac2g                                       none: shows the process of work where there are several
 python_function and all others             hook: a layer of that name
of VizTracer: FEE, INSTANT and all others   hook, the layer `python`
of Triton Proton, with lanes as threads
 kernel: 200000 + GPU × 1000000 + stream    gpu_kernel of that stream; once, the lane was the stream
 scope, metric: a thread of the CPU         annotation
                100000 + stream             hook: the layer `graph`; scopes of a CUDA graph have no call stack
 flow s, f                                  flow from an annotation to a kernel
of XLA (JAX), with names of processes and threads as in an `xplane.pb`
 /device:GPU:N, Stream #S                   gpu_kernel, transfer: `launch` by `correlation_id`
                other lines                 hook: a layer by the line's name
 /host:…                                    as in an `xplane.pb`: userspace, annotation, or the layer `python`
of other tools: all categories              hook, the layer `events`: they nest in each other
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, BinaryIO, Final

import numpy as np
import orjson

from tracepipe.event.columns import EventColumns, Int64s, SourceBatch, Texts
from tracepipe.event.model import (
    COUNTS,
    FLOW_PHASES,
    HOST_LAYERS,
    ID_LIMIT,
    MONOTONIC,
    NAME_BYTES_MAX,
    RANGE_LIMIT,
    TIME_LIMIT_NS,
    Header,
    Problem,
    Record,
    cut_text,
)
from tracepipe.event.tables import LongNames, packed
from tracepipe.event.vocabulary import direction_named
from tracepipe.launchers import RANK_MAX
from tracepipe.mangled_names import demangled
from tracepipe.native import checked, library, owned, seed
from tracepipe.readers import ftrace_text, xla_events
from tracepipe.readers.ids import (
    LAUNCHES,
    NO_STREAMS,
    Ids,
    RangeNumbers,
    flow_number,
    flow_text,
    is_id,
    is_size,
    stream_number,
)
from tracepipe.readers.json_elements import (
    Elements,
    Fault,
    JsonElements,
    events_of,
    ns_of,
    ns_of_text,
)
from tracepipe.readers.merged_ranks import MergedRanks
from tracepipe.readers.perfetto_tracks import (
    RANGES,
    SUMMARIES_OF_PROCESSES,
    UNNAMED_PROCESS,
    Stream,
    kind_of,
    stream_of,
)
from tracepipe.readers.recording import (
    BOM,
    FirstProblems,
    Recording,
    Unusable,
    counted_problems,
)
from tracepipe.readers.sorted_rows import (
    FLOW,
    MARK,
    SHORT_BYTES,
    SLICE,
    Cache,
    KeptText,
    NativeSortedRows,
    Rows,
    SortedEvents,
    SortedRow,
    SortedRows,
    TextFile,
    batches_of,
    row_sorter,
)
from tracepipe.units import counted

EVENTS: Final = "events"
"""The layer of events that are neither from PyTorch nor from VizTracer."""
PYTHON: Final = "python"
"""The layer of VizTracer's events: calls of Python and C, and logs of the program."""
# The categories of its calls and logs. Newer versions write them in lower case when they run a program.
_OF_VIZTRACER: Final = frozenset({"FEE", "fee", "INSTANT", "instant"})
# Categories of PyTorch's profiler alone.
_OF_KINETO: Final = (
    *("cpu_op", "user_annotation", "python_function", "ac2g", "gpu_memcpy", "gpu_memset"),
    *("gpu_user_annotation", "cuda_runtime", "cuda_driver", "xpu_runtime", "mtia_runtime"),
    "privateuse1_runtime",
)
# Processes and threads of XLA: a GPU, the host; a stream, and other rows of a GPU.
_XLA_PROCESS = re.compile(r"(/device:GPU:\d|/host:).{0,100}")
_XLA_LINE = re.compile(r"(Stream #\d|XLA |Steps|Framework |TensorFlow |Source ).{0,300}")
_XLA_NAMES_MAX: Final = 1 << 12
_STREAM = re.compile(r"\D*(\d{1,20})")
_INDEX = re.compile(r"[0-9]{1,10}")
_COPY = re.compile(r"Memcpy (\w+)")
_GPU_COUNTERS = re.compile(r"GPU (\d{1,9})\b")
_RANK_SHIFT: Final = 40
# How the categories of calls of runtimes and drivers end, also of devices that PyTorch does not know.
_OF_RUNTIMES: Final = ("_runtime", "_driver")
# PyTorch's names of a GPU and of a stream, and the first of the places that it gives to 16 GPUs.
_GPU_NAME = re.compile(r"GPU \d+|stream \d+ ?")
_GPU_ORDER: Final = 5_000_000
_RENAMED: Final = {
    "bytes": "size",
    "registers per thread": "registers",
    "shared memory": "shared_bytes",
    # A dot in a name has a special meaning in Perfetto.
    "est. achieved occupancy %": "estimated occupancy %",
}


# As calls of `--gpu kernels` have it; the rest keeps PyTorch's names.
_OF_WAITS: Final = {"wait_on_cuda_event_id": "event", "event_id": "event"}

Rules = Mapping[str, str | None]
"""New names of arguments; None for those that fields have."""


@dataclass(slots=True)
class Kind:
    """All that is kept of an event but its time and length: fields of its record, and its arguments.

    It depends only on the event's `ph`, `cat`, `name`, `pid` and `tid`, on its arguments `device`, `stream`,
    `grid`, `block`, `Device Type` and `Device Id`, on whether `correlation` is the number of a launch, on
    whether `correlation_id` is there, and on whether `Bytes` is a number, and below 0. So the native core can
    read the next such event, unless there are `own_args` of an event that is not an allocation.
    """

    fields: dict[str, Any]
    launch: int | None = None
    rules: Rules = field(default_factory=dict)
    ahead: dict[str, Any] = field(default_factory=dict)
    """An argument that comes first, unless the event has it."""
    own_args: dict[str, Any] | None = None
    """The arguments, where they are not the event's own, renamed by `rules`."""
    is_allocation: bool = False
    """Whether `own_args` are those of an allocation of PyTorch."""
    flow: tuple[Any, ...] = ()
    """The parts of a flow's key before its id, which is the last part."""
    is_inside: bool = False
    """Whether it is the end of a flow that may be inside of its slice."""

    def args_of(self, args: dict[str, Any]) -> dict[str, Any]:
        """The arguments to keep of an event's arguments."""
        if self.own_args is not None:
            return self.own_args
        if rules := self.rules:
            args = {name: value for key, value in args.items() if (name := rules.get(key, key)) is not None}
        return {**self.ahead, **args} if self.ahead else args


def _is_of_gpu(stated: object) -> bool:
    """Whether a name or a place is one of a GPU's. Its process is its number, which may be a real pid too."""
    if type(stated) is str:
        return _GPU_NAME.fullmatch(stated) is not None
    return type(stated) is int and 0 <= stated - _GPU_ORDER < 1 << 10


def _stream(stated: object) -> int | None:
    """The number of a stream, which older versions wrote as a text."""
    stated = _whole(stated)
    if type(stated) is str and (found := _STREAM.fullmatch(stated)):
        stated = int(found[1])
    return stream_number(stated) if type(stated) is int else None


def _index(stated: object) -> int | None:
    """The index of a device, which may be a text."""
    index = int(stated) if type(stated) is str and _INDEX.fullmatch(stated) else _whole(stated)
    return index if is_id(index) else None


def _whole(number: object) -> object:
    """A number with nothing behind its point, as columns with gaps are written, as an integer."""
    return int(number) if type(number) is float and number.is_integer() else number


def _is_below_0(pid: object) -> bool:
    """Whether a process is one that PyTorch does not know."""
    return type(pid) is int and pid < 0


XlaNames = dict[tuple[int | None, int | None], str]
"""The names of processes, and of threads, whose second number is not None."""


class Kinds:
    """Decides the kinds of events from PyTorch (`is_kineto`), VizTracer or another tool."""

    is_own = False
    """Whether tracepipe wrote the file."""

    def __init__(
        self,
        ids: Ids,
        ranks: MergedRanks,
        xla: XlaNames | None = None,
        *,
        is_kineto: bool = False,
        is_viztracer: bool = False,
    ) -> None:
        self._ids, self.ranks, self.is_kineto = ids, ranks, is_kineto
        self.sees_kineto = is_kineto
        self.thread_names: dict[tuple[int, int], str] = {}
        """The names of threads that are in the names of tracks."""
        self.xla = dict(xla or {})
        """The names of XLA's processes and threads that have any meaning here."""
        self.has_gpu_of_xla = any(map(xla_events.GPU.match, self.xla.values()))
        self.has_late_names = self._has_kinds = False
        self._layer = PYTHON if is_viztracer else EVENTS
        self._processes = set[int | None]()
        """The processes with annotations or calls, at most two of them."""
        self._of: Mapping[str, Callable[[dict[str, Any], str, dict[str, Any]], Kind]] = {}
        if is_kineto:
            self._of = {
                **dict.fromkeys(("runtime", "driver"), self._call),
                "kernel": lambda event, category, args: self._work(event, category, args, type="gpu_kernel"),
                **dict.fromkeys(("gpu_memcpy", "memcpy", "gpu_memset", "memset"), self._copy),
                **dict.fromkeys(("gpu_user_annotation", "cuda_sync", "cuda_event"), self._of_gpu),
                "user_annotation": lambda event, *_: Kind(self._thread(event, type="annotation")),
                **dict.fromkeys(
                    ("cpu_op", "operator", "fwdbwd"),
                    lambda event, *_: Kind(self._thread(event, type="annotation", domain="cpu_op")),
                ),
                "cpu_instant_event": self._instant,
            }

    def is_repeated(self, event: dict[str, Any]) -> bool:
        """Whether an event only repeats what others show."""
        return False

    @property
    def only_process(self) -> int | None:
        """The process of all events for which PyTorch states none; None where there may be several."""
        return next(iter(self._processes)) if self.is_kineto and len(self._processes) == 1 else None

    def is_known_otherwise(self, category: str) -> bool:
        """Whether flows of a category join the same events as `launch`. These often lack an end."""
        return self.is_kineto and category in ("ac2g", "async_cpu_to_gpu")

    def follow(self, event: dict[str, Any], id: tuple[Any, ...], ts_ns: int) -> None:
        """Note an end of such a flow, where it shows which process launched work."""
        if not self.ranks.follows_arrows:
            return
        process = self._ids.number(event.get("pid"))
        if event["ph"] == "s":
            self.ranks.begin_arrow(flow_number(*id), None if _is_below_0(event.get("pid")) else process)
        elif (stream := _stream(event.get("tid"))) is not None:
            self.ranks.end_arrow(flow_number(*id), process, stream, ts_ns)

    def kind(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        """The kind of an event with these arguments."""
        self.sees_kineto |= category in _OF_KINETO
        self._has_kinds = True
        if self.xla and not self.is_kineto and (kind := self._of_xla(event, args)) is not None:
            return kind
        of = self._of.get(category.lower() if self.is_kineto else category, self._other)
        if of == self._other and self.is_kineto and category.endswith(_OF_RUNTIMES):
            of = self._call
        return of(event, category, args)

    def name_row(self, pid: int, tid: int | None, name: str) -> None:
        """Note the name of a process or a thread, which may be one of XLA's."""
        form = _XLA_PROCESS if tid is None else _XLA_LINE
        if form.fullmatch(name) and self.xla.get((pid, tid)) != name and len(self.xla) < _XLA_NAMES_MAX:
            self.xla[pid, tid] = name
            self.has_gpu_of_xla |= xla_events.GPU.match(name) is not None
            self.has_late_names |= self._has_kinds

    def _of_xla(self, event: dict[str, Any], args: dict[str, Any]) -> Kind | None:
        """The kind of an event of XLA, None for one of another process."""
        pid, name = self._ids.number(event.get("pid")), str(event.get("name"))
        process = self.xla.get((pid, None), "")
        if type(args.get("correlation_id")) is str and _INDEX.fullmatch(args["correlation_id"]):
            args = args | {"correlation_id": int(args["correlation_id"])}
        if gpu := xla_events.GPU.match(process):
            line = self.xla.get((pid, self._ids.number(event.get("tid"))), "")
            if stream := xla_events.STREAM.match(line):
                args = dict(args)
                fields = xla_events.work_fields(name, args)
                fields |= {"gpu": int(gpu[1]), "stream": int(stream[1])}
                if fields["type"] == "memory":
                    return Kind(self._thread(event, **fields), own_args=args)
                return Kind(fields, xla_events.launch_of(args), own_args=args)
            return Kind(self._thread(event, type="hook", layer=line or EVENTS))
        if not process or not self.has_gpu_of_xla:
            return None
        if "correlation_id" in args:
            launch = xla_events.launch_of(args) if xla_events.launches(name) else None
            return Kind(self._thread(event, type="userspace"), launch, own_args=args)
        return Kind(self._thread(event, **xla_events.call_fields(name)))

    def _thread(self, event: dict[str, Any], **fields: object) -> dict[str, Any]:
        pid = event.get("pid")
        # PyTorch writes 0, -1 or nothing for a process that it does not know: GPU 0 has that number too.
        if self.is_kineto and (_is_below_0(pid) or pid == "" or (pid == 0 and event.get("tid") == 0)):
            return fields
        found = self._ids.thread(event, fields)
        if found.get("type") in ("annotation", "userspace") and len(self._processes) <= 1:
            self._processes.add(found.get("pid"))
        return found

    def _launch(self, args: dict[str, Any]) -> int | None:
        correlation = _whole(args.get("correlation"))
        if type(correlation) is not int or not 0 < correlation <= ID_LIMIT:
            return None
        return correlation

    # By category ----------------------------------------------------------------------------------------

    def _other(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        if category in _OF_VIZTRACER and (self.is_kineto or self._layer == PYTHON):
            return Kind(self._thread(event, type="hook", layer=PYTHON))
        if self.is_kineto:
            return Kind(self._thread(event, type="hook", layer=category or EVENTS))
        ahead = {"cat": category} if category else {}
        return Kind(self._thread(event, type="hook", layer=self._layer), ahead=ahead)

    def _call(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        launch = self._launch(args) if LAUNCHES.search(str(event.get("name"))) else None
        fields = self._thread(event, type="userspace")
        if launch is not None and not _is_below_0(event.get("pid")):
            self.ranks.add_call(fields.get("pid"))
        return Kind(fields, launch)

    def _place(self, event: dict[str, Any], args: dict[str, Any]) -> tuple[int, int] | None:
        """GPU and stream."""
        stream, index = _stream(args.get("stream", event.get("tid"))), _index(event.get("pid"))
        device = _index(args.get("device"))
        if stream is None or ("device" in args and device is None):
            return None
        gpu = self.ranks.gpu(self._ids.number(event.get("pid")), device, index)
        return None if gpu is None else (gpu, stream)

    def _copy(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        name = str(event.get("name"))
        found = _COPY.match(name)
        called = direction_named(found[1]) if found else "memset" if name.startswith("Memset") else name
        kind = self._work(event, category, args, type="transfer", name=called)
        kind.ahead |= {"operation": name} if called != name else {}
        return kind

    def _work(self, event: dict[str, Any], category: str, args: dict[str, Any], **fields: Any) -> Kind:
        place = self._place(event, args)
        if place is None:
            return self._other(event, category, args)
        fields["gpu"], fields["stream"] = place
        if (name := str(event.get("name"))).startswith("_Z"):
            fields.setdefault("name", demangled(name))
        launch = self._launch(args)
        self.ranks.add_work(*place)
        stated = {"device", "stream", "correlation"} if launch is not None else {"device", "stream"}
        if type(args.get("stream")) is int and args["stream"] != fields["stream"]:
            stated.discard("stream")
        for key in ("grid", "block"):
            if is_size(size := args.get(key)):
                fields[key] = tuple(size)
                stated.add(key)
        return Kind(fields, launch, {**_RENAMED, **dict.fromkeys(sorted(stated))})

    def _of_gpu(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        # Their pid is the number of a GPU, which may be a process's pid too.
        place = self._place(event, args)
        if place is None:
            return self._other(event, category, args)
        fields = {"type": "hook", "layer": category, "gpu": place[0]}
        return Kind(fields if place[1] in NO_STREAMS else {**fields, "stream": place[1]}, rules=_OF_WAITS)

    def _instant(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        size, kind = args.get("Bytes"), args.get("Device Type")
        if event.get("name") != "[memory]":
            return self._other(event, category, args)
        if type(size) is not int or type(kind) is not int:
            return Kind(self._other(event, category, args).fields, own_args=args)
        # 0 is the processor's own memory.
        name = ("alloc" if size >= 0 else "free") + ("_host" if kind == 0 else "")
        args = {**args, "size": abs(size)}
        del args["Bytes"]
        if type(address := args.pop("Addr", None)) is int:
            args["address"] = address
        if kind != 0 and type(total := args.get("Total Allocated")) is int:
            args["total_allocated"] = total
        device = args.get("Device Id")
        on_gpu = {"gpu": device} if kind != 0 and is_id(device) else {}
        return Kind(
            self._thread(event, type="memory", name=name, **on_gpu), own_args=args, is_allocation=True
        )

    def counter(self, event: dict[str, Any], category: str) -> Kind:
        """The kind of a counter: of a GPU, if its process has such a name, or else of the process."""
        found = _GPU_COUNTERS.match(pid) if type(pid := event.get("pid")) is str else None
        if found and self.is_kineto:
            return Kind({"type": "hook", "layer": category or EVENTS, "gpu": int(found[1])})
        fields = self._thread(event, type="hook", layer=category or self._layer)
        fields.pop("tid", None)
        return Kind(fields)


_OWN_THREAD = re.compile(r"(.*?) (\d{1,10}) / (.+)", re.DOTALL)
# Processes with these ids are groups. Further groups get ids that tracepipe has not given before.
_GROUPS: Final = range(1 << 23, (1 << 23) + (1 << 18))
_MADE_UP_AGAIN: Final = ID_LIMIT // 4 * 3
# The most characters of all names of tracks.
_OWN_NAMES_MAX: Final = 1 << 22


class OwnKinds(Kinds):
    """Decides the kinds of events of a file that tracepipe wrote. Each of its threads is a track, whose name
    has those of the thread and the layer. A process beyond those of Linux is a group.
    """

    is_own = True

    def __init__(self, ids: Ids) -> None:
        super().__init__(ids, MergedRanks())
        ids.stay_below(_MADE_UP_AGAIN)
        self._names: dict[tuple[int, int | None], str] = {}
        self._room = _OWN_NAMES_MAX

    def name_row(self, pid: int, tid: int | None, name: str) -> None:
        """Note the name of a process or a track."""
        if len(name) > self._room:
            return
        self._room -= len(name)
        self._names[pid, tid] = name
        found = _OWN_THREAD.fullmatch(name) if tid is not None and pid not in _GROUPS else None
        if found and found[1] not in (UNNAMED_PROCESS, self._names.get((pid, None))):
            self.thread_names[pid, int(found[2])] = found[1]

    def _name(self, event: dict[str, Any]) -> tuple[int | None, str]:
        """The process of an event, and the name of its track; None where they are not known."""
        pid, tid = event.get("pid"), event.get("tid")
        if type(pid) is not int or type(tid) is not int:
            return None, ""
        return pid, self._names.get((pid, tid), "")

    def is_repeated(self, event: dict[str, Any]) -> bool:
        """Whether an event only repeats what others show."""
        pid, track = self._name(event)
        is_counter, name = event.get("ph") == COUNTS, str(event.get("name"))
        if pid is None or pid not in _GROUPS:
            return is_counter and name in SUMMARIES_OF_PROCESSES
        stream = self._stream(pid, name if is_counter else track)
        return stream is not None and stream.is_summary

    def _stream(self, pid: int, track: str) -> Stream | None:
        group = self._names.get((pid, None), "")
        return stream_of((group,) if track == group else (group, track))

    def kind(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        """The kind of an event."""
        pid, track = self._name(event)
        fields: dict[str, Any]
        if pid is None or not track:
            return super().kind(event, category, args)
        if pid in _GROUPS:
            if stream := self._stream(pid, track):
                name = args.get("kernel", event.get("name"))
                of_stream = {"gpu": stream.gpu, "stream": stream.number}
                kernel = {"type": kind_of(str(name)), "name": str(name), **of_stream}
                return Kind(kernel, rules={"kernel": None})
            group = {"pid": self._names.get((pid, None), ""), "tid": track}
            fields = self._ids.thread(group, {"type": "hook", "layer": EVENTS})
        elif found := RANGES.fullmatch(track):
            domain = {"domain": found[1]} if found[1] else {}
            number = max(0, min(int(found[2] or 1) - 1, RANGE_LIMIT))
            fields = {"type": "annotation", "pid": pid, **domain, "range": number}
        elif found := _OWN_THREAD.fullmatch(track):
            fields = self._ids.thread({"pid": pid, "tid": int(found[2])}, {"type": "hook", "layer": found[3]})
        else:
            fields = {"type": "hook", "pid": pid, "layer": track.rpartition(" / ")[2]}
        ahead = {"cat": category} if category and category != fields.get("layer", "annotation") else {}
        return Kind(fields, ahead=ahead)

    def counter(self, event: dict[str, Any], category: str) -> Kind:
        """The kind of a counter."""
        pid = event.get("pid")
        process = self._names.get((pid, None), "") if type(pid) is int and pid in _GROUPS else pid
        return Kind(self._ids.thread({"pid": process}, {"type": "hook", "layer": EVENTS}))


GRAPH: Final = "graph"
_GPU_LANES, _OF_GPU = 200_000, 1_000_000


class ProtonKinds(Kinds):
    """Decides the kinds of events."""

    def kind(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        """The kind of an event."""
        if category == "kernel" or (category == "flow" and event.get("ph") == "f"):
            lane = event.get("tid")
            if is_id(lane):
                gpu, stream = divmod(lane - _GPU_LANES, _OF_GPU) if lane >= _GPU_LANES else (0, lane)
                return Kind({"type": "gpu_kernel", "gpu": gpu, "stream": stream})
        elif category == "flow" or (category in ("scope", "metric") and "call_stack" in args):
            return Kind(self._thread(event, type="annotation"), own_args=args)
        elif category in ("scope", "metric"):
            return Kind(self._thread(event, type="hook", layer=GRAPH), own_args=args)
        return super().kind(event, category, args)


_INSTANTS = frozenset("iIRP")
_OF_OBJECTS = {"N": "created", "O": "snapshot", "D": "destroyed"}
_PAIRED = frozenset("BEbne")
_SHOWN_GPUS: Final = 8
_KNOWN = frozenset({"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"})
_OF_ASYNC = _KNOWN | {"id", "id2", "scope"}
_OF_FLOWS = _OF_ASYNC | {"bp"}
_OF_SCHEDULER = ("name", "phase", "tid", "cpu", "comm")
# A year: no slice of a trace is that long.
_LONG_NS: Final = 365 * 24 * 3600 * 10**9
_NAMES_MAX: Final = 1 << 16
_NO_NAME: Final = "no name"
_KEY_BYTES_MAX: Final = 1 << 9
_HEXADECIMAL = re.compile(r"-?(?:0[xX])?[0-9a-fA-F]{1,16}", re.ASCII)
_DIGITS = re.compile(r"[-+]?(?:[0-9]{1,18}(\.[0-9]{0,18})?|(\.[0-9]{1,18}))([eE][-+]?[0-9]{1,2})?")


def id_of(event: dict[str, Any]) -> tuple[Any, ...] | None:
    """The id that distinguishes an asynchronous event or a flow from others of its category; None without
    one.
    """
    id2 = event.get("id2")
    if type(id2) is dict:
        if "global" in id2:
            return event.get("scope"), id2["global"]
        if "local" in id2:
            return event.get("scope"), event.get("pid"), id2["local"]
    return (event.get("scope"), event["id"]) if "id" in event else None


def flow_id(id: object) -> str:
    """The id of a flow. Texts are hexadecimal numbers, so that "0x7" is 7, unless they cannot be."""
    text = str(id)
    return str(int(text, 16)) if type(id) is str and _HEXADECIMAL.fullmatch(text) else text


class ChromeEvents:
    """Adds events to `rows`, if they are complete in themselves, and begins and ends to `paired`."""

    def __init__(self, kinds: Kinds, ids: Ids) -> None:
        self.kinds, self._ids, self.ranks = kinds, ids, kinds.ranks
        self.rows, self.paired, self.flows = row_sorter(), row_sorter(), row_sorter()
        self.has_flows, self.alone = False, 0
        """Whether there are `flows`: ends of flows that belong to a slice around them, or to the next one."""
        self.first_ns, self.last_ns = TIME_LIMIT_NS, 0
        """The first and the last time, without 0."""
        self.least_ns = TIME_LIMIT_NS
        """The first time, which may be below 0."""
        self.negative = self.impossible = self.cut = self.names_left_out = self.no_numbers = 0
        self._names: dict[tuple[int, int | None], Record] = {}
        self.long_names = LongNames()

    def add_all(self, batch: Elements) -> list[Problem]:
        """Add events, and return the problems of events and of the text between them."""
        faults = batch.faults + self._add_all(batch)
        return [batch.problem(fault) for fault in sorted(faults)]

    def _add_all(self, batch: Elements) -> list[Fault]:
        """Add events one by one, and return the places and texts of what is wrong."""
        return [(place + at, message) for place, text in batch.texts() for at, message in self._event(text)]

    def _event(self, text: bytes) -> list[Fault]:
        """Add an event, and return the places and texts of what is wrong."""
        wrong: list[Fault] = []
        for at, whole, event in events_of(text):
            try:
                if type(event) is str:
                    wrong.append((at, event))
                elif event:
                    self._add_event(event, whole)
            except Unusable as e:
                wrong.append((at, f"{e.field}: {e.message}"))
        return wrong

    def _add_event(self, event: dict[str, Any], text: bytes) -> None:
        phase = event.get("ph")
        if type(phase) is not str or not phase:
            raise Unusable("ph", "is missing, or is not a string")
        if len(phase) > 1:  # other viewers read the first letter
            phase = event["ph"] = phase[0]
        if phase == "M":
            self._add_name(event)
            return
        ts_ns = ns_of(event.get("ts"), "ts", text)
        if ts_ns is None:
            raise Unusable("ts", "is missing" if "ts" not in event else "is not a time that a trace can have")
        category = event.get("cat")
        category = self._shortened(category) if type(category) is str else ""
        if self.kinds.is_own and self.kinds.is_repeated(event):
            return
        if phase == "X":
            self._add_slice(event, ts_ns, category, text)
        elif phase in _INSTANTS or phase in _OF_OBJECTS:
            if event.get("s") == "t":  # of its thread, as all are
                del event["s"]
            args = {"object": _OF_OBJECTS[phase]} if phase in _OF_OBJECTS else {}
            self._add_whole(event, ts_ns, category, "I", args | _args_of(event, _KNOWN))
        elif phase == COUNTS:
            self._add_counter(event, ts_ns, category)
        elif phase in FLOW_PHASES:
            self._add_flow(event, ts_ns, category)
        elif phase in _PAIRED:
            self._add_paired(event, ts_ns, category)
        else:
            raise Unusable("ph", f"{phase!r} is not a phase that is read")

    def _note_time(self, ts_ns: int, dur_ns: int) -> None:
        if ts_ns > 0:
            self.first_ns = min(self.first_ns, ts_ns)
        self.least_ns = min(self.least_ns, ts_ns)
        self.last_ns = max(self.last_ns, ts_ns + dur_ns)

    def _shortened(self, name: str) -> str:
        kept = cut_text(name)
        self.cut += kept != name
        return kept

    # Rows -----------------------------------------------------------------------------------------------

    def _add_slice(self, event: dict[str, Any], ts_ns: int, category: str, text: bytes) -> None:
        args = _args_of(event, _KNOWN)
        dur_ns = ns_of(event.get("dur"), "dur", text)
        if dur_ns is None:
            args["no_duration" if "dur" not in event else "impossible_duration"] = event.get("dur", True)
            self.impossible += "dur" in event
            dur_ns = 0
        elif dur_ns < 0 or dur_ns > _LONG_NS:
            args["negative_duration_ns" if dur_ns < 0 else "impossible_duration_ns"] = dur_ns
            self.negative += dur_ns < 0
            self.impossible += dur_ns > 0
            dur_ns = 0
        self._add_whole(event, ts_ns, category, "X", args, dur_ns)

    def mark(self, name: str, ts_ns: int) -> None:
        """Add an instant of the process that is named first."""
        process = next(({"pid": pid} for pid, _ in self._names), {})
        self._add_whole({"name": name, **process}, ts_ns, "", "I", {})

    def _add_whole(
        self,
        event: dict[str, Any],
        ts_ns: int,
        category: str,
        phase: str,
        args: dict[str, Any],
        dur_ns: int = 0,
    ) -> None:
        """Add the row of a slice or an instant, and that of its flow."""
        kind = self.kinds.kind(event, category, args)
        self._note_time(ts_ns, dur_ns)
        first = self._first(kind.fields, event, phase, kind.launch is not None)
        rank, second = SLICE if phase == "X" else MARK, _dumped(kind.args_of(args))
        self._add(SortedRow(ts_ns, rank, dur_ns, kind.launch or 0, first, second), kind)
        if phase == "X" and (flow := self._bound(event, kind)):
            self.add_bound(SortedRow(ts_ns, SLICE, dur_ns, *flow, b""))

    def _bound(self, event: dict[str, Any], kind: Kind) -> tuple[int, bytes] | None:
        """The flow that a slice states itself, and its record; None without one."""
        goes_in, goes_out = event.get("flow_in"), event.get("flow_out")
        if "bind_id" not in event or not (goes_in or goes_out):
            return None
        phase = "s" if not goes_in else "t" if goes_out else "f"
        first = self._first({**kind.fields, "flow": 0}, event, phase, False)
        return flow_number("bind_id", flow_id(event["bind_id"])), first

    def add_bound(self, row: SortedRow) -> None:
        """Add an end of a flow that is stated by its slice, which has the same time and length."""
        self.has_flows = True
        self.flows.add(row)

    def _add(self, row: SortedRow, kind: Kind) -> None:
        """Add the row of an event of a kind."""
        (self.flows if kind.is_inside else self.rows).add(row)

    def bind_flows(self) -> None:
        """Add the flows between the slices to which their ends belong."""
        if not self.has_flows:
            return
        bound = row_sorter()
        slices = FlowSlices(bound, by_layer=self.kinds.is_own)
        flows = (row for rows in self.flows.in_order() for row in rows)
        flow = next(flows, None)
        for rows in self.rows.in_order(again=True):
            for row in rows:
                if row.rank != SLICE and not (self.kinds.is_own and row.rank == MARK):
                    continue
                while flow is not None and flow.ts_ns < row.ts_ns:
                    slices.add_flow(flow)
                    flow = next(flows, None)
                if row.rank == SLICE:
                    slices.add(row)
                else:
                    slices.add_mark(row)
        while flow is not None:
            slices.add_flow(flow)
            flow = next(flows, None)
        slices.end()
        self.alone = slices.alone
        for rows in bound.in_order():
            for row in rows:
                self.rows.add(row)

    def _first(self, fields: dict[str, Any], event: dict[str, Any], phase: str, has_launch: bool) -> bytes:
        """The record without time and arguments, and with 0 for its length and launch."""
        name = fields.get("name", event.get("name"))
        text = name if type(name) is str else str(name)
        record = {**fields, "name": self._shortened(_NO_NAME if name is None else text), "phase": phase}
        if phase == "X":
            record["dur_ns"] = 0
        if has_launch:
            record["launch"] = 0
        return _dumped(record)

    def _add_counter(self, event: dict[str, Any], ts_ns: int, category: str) -> None:
        args = event.get("args")
        args = args if type(args) is dict else {}
        values = {key: number for key, value in args.items() if (number := _value(value)) is not None}
        if not values:
            raise Unusable("args", "are without numbers, which a counter needs")
        self.no_numbers += len(args) - len(values)
        kind = self.kinds.counter(event, category)
        id = id_of(event)
        name = f"{event.get('name', _NO_NAME)}" + (f" id: {id[-1]}" if id else "")
        self._note_time(ts_ns, 0)
        first = self._first({**kind.fields, "name": name}, event, COUNTS, False)
        self._add(SortedRow(ts_ns, MARK, 0, 0, first, _dumped(values)), kind)

    def _add_flow(self, event: dict[str, Any], ts_ns: int, category: str) -> None:
        id = id_of(event)
        if id is None:
            raise Unusable("id", "is missing")
        if self.kinds.is_known_otherwise(category):
            self.kinds.follow(event, id, ts_ns)
            return
        kind = self.kinds.kind(event, category, {})
        kind.flow = (category, event.get("name"), *id[:-1])
        number = flow_number(*kind.flow, flow_id(id[-1]))
        self._note_time(ts_ns, 0)
        fields = {**kind.fields, "flow": 0}
        kind.is_inside = category != "fwdbwd"  # these are at the begins of their slices
        if kind.is_inside:
            self.has_flows = True
            fields["is_next"] = event["ph"] == "f" and event.get("bp") != "e"
        first = self._first(fields, event, event["ph"], False)
        self._add(SortedRow(ts_ns, FLOW, 0, number, first, _dumped(_args_of(event, _OF_FLOWS))), kind)

    def _add_paired(self, event: dict[str, Any], ts_ns: int, category: str) -> None:
        phase = event["ph"]
        self._note_time(ts_ns, 0)
        if phase in "BE":
            args = _args_of(event, _KNOWN)
            kind = self.kinds.kind(event, category if phase == "B" else "", args)
            of = event if self.kinds.is_own else kind.fields
            key: list[Any] = ["", of.get("pid"), of.get("tid")]
            flow = self._bound(event, kind) if phase == "B" else None
        else:
            id = id_of(event)
            if id is None:
                raise Unusable("id", "is missing")
            args = _args_of(event, _OF_ASYNC)
            domain = self.long_names.shortened(category)
            kind = Kind({"type": "annotation"} | ({"domain": domain} if domain else {}))
            pid = self._ids.thread({"pid": event.get("pid")}, kind.fields).get("pid")
            # With a global id, the process does not matter.
            is_shared = type(event.get("id2")) is dict and "global" in event["id2"]
            key = [category, None if is_shared else pid, *map(str, id)]
            if len(flow_text(*key)) > _KEY_BYTES_MAX:
                key = [flow_number(*key)]
            flow = None
        stated: dict[str, Any] = {
            "phase": phase, "key": key, "fields": kind.fields, "launch": kind.launch,
        }  # fmt: skip
        if flow is not None:
            stated["flow"] = flow[0], flow[1].decode()
        if (name := event.get("name")) is not None:
            stated["name"] = self._shortened(str(name))
        self.paired.add(SortedRow(ts_ns, 0, 0, 0, _dumped(stated), _dumped(kind.args_of(args))))

    def add_ftrace(self, text: str) -> int:
        """Add the events of ftrace's text, and return how many of its lines are not read."""
        lines = [line for line in text.split("\n") if line.strip() and not line.startswith("#")]
        processes = dict(filter(None, map(ftrace_text.process_of, lines)))
        unread = 0
        for line in lines:
            count = 0
            for event in ftrace_text.events_of(line):
                count += 1
                process = processes.get(event["tid"], self._ids.process_of.get(event["tid"]))
                if event["ph"] != "scheduler":
                    self._add_event(event, b"")
                elif (ts_ns := ns_of_text(event["ts"])) is not None and 0 < event["tid"] <= ID_LIMIT:
                    record: Record = {key: event[key] for key in _OF_SCHEDULER if key in event}
                    if process is not None:  # with that name, a main thread would name its process too
                        thread = record["pid"], _ = process, record["tid"]
                        if len(self._names) < _NAMES_MAX and "comm" in record:
                            self._names.setdefault(thread, {})["name"] = record.pop("comm")
                    self._note_time(ts_ns, 0)
                    first = packed({"type": "scheduler", **record})
                    self.rows.add(SortedRow(ts_ns, MARK, 0, 0, first, packed(event["args"])))
            unread += not count
        return unread

    # Names ----------------------------------------------------------------------------------------------

    def _add_name(self, event: dict[str, Any]) -> None:
        what, args = event.get("name"), event.get("args")
        if type(args) is not dict or type(what) is not str:
            raise Unusable("args", "are missing, which a name needs")
        pid, tid = self._ids.number(event.get("pid")), self._ids.number(event.get("tid"))
        of, _, kind = what.partition("_")
        if pid is None or of not in ("process", "thread") or (of == "thread" and tid is None):
            return
        key = (pid, tid if of == "thread" else None)
        if key not in self._names and len(self._names) >= _NAMES_MAX:
            self.names_left_out += 1
            return
        record, stated = self._names.setdefault(key, {}), args.get(kind)
        is_of_gpu = self.kinds.is_kineto and _is_of_gpu(stated)
        if is_of_gpu and kind == "labels":
            record["has_labels_of_gpu"] = True
        keep = record.setdefault if is_of_gpu else record.__setitem__
        if kind == "name" and type(stated) is str:
            self.kinds.name_row(*key, stated)
        if kind in ("name", "labels") and type(stated) is str:
            keep(kind, self.long_names.shortened(self._shortened(stated)))
        elif kind == "sort_index" and type(stated) in (int, float):
            keep("order", stated)

    def process_name(self, pid: int | None) -> str:
        """The name of a process in messages."""
        name = None if pid is None else self._names.get((pid, None), {}).get("name")
        return f"process {self._ids.text(pid)}" + (f" ({name})" if name else "")

    def name_records(self) -> list[Record]:
        """Names and places of processes and threads, as records."""
        self._names |= {key: {"name": name} for key, name in self.kinds.thread_names.items()}
        for key, name in self._ids.named():
            self._names.setdefault(key, {}).setdefault("name", self._shortened(name))
        orders = sorted({record["order"] for record in self._names.values() if "order" in record})
        rank_of = {order: at for at, order in enumerate(orders)}
        records = []
        for (pid, tid), known in self._names.items():
            record: Record = {"type": "name", "pid": pid}
            if tid is not None:
                record["tid"] = tid
            shown = ("name",) if "has_labels_of_gpu" in known else ("name", "labels")
            words = [known[key] for key in shown if known.get(key)]
            if words:
                record["name"] = self._shortened(", ".join(words))
            if "order" in known:
                record["order"] = rank_of[known["order"]]
            records.append(record)
        return records


def _in_process(first: bytes, pid: int) -> bytes:
    """The record of an event, in this process if it is not a GPU's and states none."""
    if b'"pid":' in first:
        return first
    record = orjson.loads(first)
    is_of_gpu = "gpu" in record and record["type"] != "memory"
    return first if is_of_gpu or record["type"] not in HOST_LAYERS else packed({"pid": pid, **record})


def _dumped(value: dict[str, Any]) -> bytes:
    return packed(value) if value else b""


def _args_of(event: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """All members of an event but the known fields."""
    args = event.get("args")
    args = args if type(args) is dict else {} if args is None else {"args": args}
    if len(event) > len(known) or not event.keys() <= known:
        more = {key: value for key, value in event.items() if key not in known}
        args = {**more, **args}
    return args


def _value(value: object) -> int | float | None:
    """The value of a counter, which may be given as a string."""
    if type(value) is int or type(value) is float:
        return value
    digits = _DIGITS.fullmatch(value) if type(value) is str else None
    if digits is None:
        return None
    return float(digits[0]) if any(digits.groups()) else int(digits[0])


# Why the core returned, and what is done with the events of a key, as in chrome_rows.c.
_NEW, _FULL = 2, 3
_PASSED_OVER, _LEFT_TO_PYTHON, _ROW, _ALLOCATION = range(4)
_KINDS_MAX: Final = 1 << 12
_KIND_BYTES_MAX: Final = 1 << 21
_NO_TEXTS: Final = (b"", b"", b"")


def chrome_events(kinds: Kinds, ids: Ids) -> ChromeEvents:
    """Return a reader of events, with the native core where it is loaded."""
    core = library()
    return ChromeEvents(kinds, ids) if core is None else NativeChromeEvents(core, kinds, ids)


class NativeChromeEvents(ChromeEvents):
    """Adds events by the core, except those of new kinds and of unusual forms."""

    def __init__(self, core: ctypes.CDLL, kinds: Kinds, ids: Ids) -> None:
        super().__init__(kinds, ids)
        self._core = core
        self._sorted = NativeSortedRows(core)
        self.rows = self._sorted
        self._known = owned(self, core.tp_events_new(seed()), core.tp_events_free)
        self._kinds_count = 0
        self._rules: dict[tuple[tuple[str, str | None], ...], tuple[int, int]] = {}
        """The first place of some rules, and the place after them."""
        self._rules_count = 0
        self._times = np.array([TIME_LIMIT_NS, TIME_LIMIT_NS, 0], np.int64)
        self._last: tuple[SortedRow, Kind] | None = None

    def _add_all(self, batch: Elements) -> list[Fault]:
        if self._kinds_count > _KINDS_MAX or self._core.tp_events_bytes(self._known) > _KIND_BYTES_MAX:
            self._core.tp_events_forget(self._known)
            self._kinds_count = 0
        faults: list[Fault] = []
        starts, ends = batch.starts.ctypes.data, batch.ends.ctypes.data
        why = np.zeros(1, np.int64)
        to = self._times.ctypes.data, why.ctypes.data
        at, count = 0, len(batch.starts)
        while True:
            refs = self._known, self._sorted.at, batch.text, starts, ends, at, count, *to
            at = checked(self._core.tp_events_take(*refs))
            if at == count:
                break
            if why[0] == _FULL:
                self._sorted.put_away()
                continue
            start, before, self._last = int(batch.starts[at]), self.cut, None
            wrong = self._event(batch.text[start : int(batch.ends[at])])
            faults += [(batch.bytes_before + start + inside, message) for inside, message in wrong]
            if why[0] == _NEW:
                self._learn(is_usual=not wrong and self.cut == before)
            at += 1
        first_ns, least_ns, last_ns = self._times.tolist()
        self.first_ns, self.least_ns = min(self.first_ns, first_ns), min(self.least_ns, least_ns)
        self.last_ns = max(self.last_ns, last_ns)
        return faults

    def _add(self, row: SortedRow, kind: Kind) -> None:
        self._last = row, kind
        super()._add(row, kind)

    def _learn(self, *, is_usual: bool) -> None:
        """Tell the core what to do with events like the last one."""
        what, has_launch, rules, texts = _LEFT_TO_PYTHON, False, (0, 0), _NO_TEXTS
        if is_usual and self._last is None and not self.ranks.follows_arrows:
            what = _PASSED_OVER
        elif is_usual and self._last is not None:
            row, kind = self._last
            if (kind.own_args is None or kind.is_allocation) and not kind.is_inside:
                what = _ALLOCATION if kind.is_allocation else _ROW
                has_launch = kind.launch is not None
                rules = self._places_of(kind.rules)
                # The id of a flow goes between the quotes at the end.
                flow = flow_text(*kind.flow, "")[:-2] if kind.flow else b""
                texts = row.first, packed(kind.ahead)[1:-1], flow
        sizes = (ctypes.c_int64 * len(texts))(*map(len, texts))
        pointers = (ctypes.c_char_p * len(texts))(*texts)
        checked(self._core.tp_events_kind(self._known, what, has_launch, *rules, pointers, sizes))
        self._kinds_count += 1

    def _places_of(self, rules: Rules) -> tuple[int, int]:
        key = tuple(rules.items())
        places = self._rules.get(key)
        if places is None:
            start = self._rules_count
            for old, new in key:
                texts = packed(old), packed(new) if new is not None else b""
                sized = (part for text in texts for part in (text, len(text)))
                self._rules_count = checked(self._core.tp_events_rule(self._known, *sized))
            places = self._rules[key] = start, self._rules_count
        return places


CLOCK: Final = "trace"
BASE: Final = "baseTimeNanoseconds"
_OTHER: Final = "otherData"
_OF_OWN, _OWN_CLOCKS = {"trace_clock", "base_ns"}, ("monotonic", "boottime", "realtime")
OF_KINETO: Final = frozenset({"schemaVersion", "deviceProperties", "distributedInfo"})
VIZTRACER: Final = "viztracer_metadata"
_KINETO_EVENT = re.compile(f'"cat"\\s*:\\s*"(?:{"|".join(_OF_KINETO)})"'.encode())
_VIZTRACER_EVENT = re.compile(rb'"cat"\s*:\s*"(?:FEE|fee)"')
_PROTON_EVENT = re.compile(rb'"call_stack"\s*:\s*\[\s*"ROOT"')
_EVENT = re.compile(rb'"ph"\s*:\s*"')
_MEMBER = re.compile(rb'\{\s*(?:"[^"\\]{0,64}"\s*:|\})')
_LIST = re.compile(rb"\[[\s,]*(?:\{|\]|$)")
_OF_AMD = re.compile(r"AMD|Radeon|Instinct|gfx", re.IGNORECASE)
_OF_SM: Final = {
    "regsPerMultiprocessor": "registers_per_sm",
    "sharedMemPerMultiprocessor": "shared_bytes_per_sm",
}
_SHOWN = ("schemaVersion", "traceName", "trace_id", "cuda_runtime_version", "cuda_driver_version")
_OVERFLOWN: Final = "VizTracer's buffer was full: the first events are missing, their number is not known"
# An event at 0 has no time, if all others are more than a day later.
_DAY_NS: Final = 24 * 3600 * 10**9
# At most this many begins may be open. Further ones become instants.
_OPEN_MAX: Final = 1 << 15
_STACK_LENGTH_MAX: Final = 1 << 12
# The most text of the places of slices that may be around the end of a flow, and of ends that wait.
_AROUND_BYTES_MAX: Final = 1 << 21
# The last instants of this many threads are known.
_MARKS_MAX: Final = 1 << 8
# At most this many flows are followed, with texts of so many bytes.
_STARTS_MAX, _STARTS_BYTES_MAX = 1 << 14, 1 << 22
_Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Origin:
    """What decides how the events of a trace are read."""

    is_kineto: bool = False
    is_viztracer: bool = False
    follows_arrows: bool = False
    xla: XlaNames = field(default_factory=dict)


class _Members:
    """The meaning of the members around the events, as far as they were read. `origin` is what an earlier
    reading of the trace found.
    """

    def __init__(self, elements: JsonElements, origin: _Origin) -> None:
        self._members = elements.members
        has_kineto, has_viztracer = not OF_KINETO.isdisjoint(elements.members), VIZTRACER in elements.members
        is_kineto = origin.is_kineto or has_kineto or elements.sees(_KINETO_EVENT)
        is_viztracer = origin.is_viztracer or has_viztracer or elements.sees(_VIZTRACER_EVENT)
        self.origin = replace(origin, is_kineto=is_kineto, is_viztracer=is_viztracer)
        self.is_kineto, self.is_viztracer = is_kineto, is_viztracer
        self.is_proton = not is_kineto and elements.sees(_PROTON_EVENT)
        self.is_own = self._member(_OTHER).keys() >= _OF_OWN

    def found(self, kinds: Kinds) -> _Origin:
        """What is known of the trace after its events were read."""
        before = self.origin
        return _Origin(
            before.is_kineto or not OF_KINETO.isdisjoint(self._members) or kinds.sees_kineto,
            before.is_viztracer or VIZTRACER in self._members,
            before.follows_arrows or kinds.ranks.are_several,
            kinds.xla if kinds.has_late_names and kinds.has_gpu_of_xla else before.xla,
        )

    def _member(self, name: str) -> dict[str, Any]:
        """A member that is an object, empty where it is not there."""
        member = self._members.get(name)
        return member if type(member) is dict else {}

    @property
    def is_overflown(self) -> bool:
        """Whether VizTracer's buffer was full, so that it has only the last events."""
        return self._member(VIZTRACER).get("overflow") is True

    @property
    def marker_ns(self) -> int | None:
        """When the program set VizTracer's marker."""
        marker = self._member(VIZTRACER).get("sync_marker")
        return ns_of_text(repr(marker)) if type(marker) in (int, float) else None

    @property
    def _base_ns(self) -> int:
        base = self._members.get(BASE, self._member(VIZTRACER).get(BASE))
        return base if type(base) is int and 0 < base < 1 << 62 else 0

    @property
    def _place(self) -> dict[str, int]:
        """The rank of the process among those that train together, and how many they are."""
        info = self._member("distributedInfo")
        bounds = (("rank", 0, RANK_MAX), ("world_size", 1, RANK_MAX + 1))
        return {
            key: info[key]
            for key, low, high in bounds
            if type(info.get(key)) is int and low <= info[key] <= high
        }

    def kinds(self, ids: Ids) -> Kinds:
        """The kinds of its events."""
        if self.is_own:
            return OwnKinds(ids)
        if self.is_proton:
            return ProtonKinds(ids, MergedRanks())
        ranks = MergedRanks(follows_arrows=self.origin.follows_arrows)
        xla = self.origin.xla
        return Kinds(ids, ranks, xla, is_kineto=self.is_kineto, is_viztracer=self.is_viztracer)

    def stack(self, frame: object) -> list[str]:
        """The names of a frame of `stackFrames` and of its callers, innermost first."""
        frames, names = self._member("stackFrames"), []
        size = 0
        while type(known := frames.get(str(frame))) is dict and size < _STACK_LENGTH_MAX:
            names.append(cut_text(str(known.get("name", _NO_NAME))))
            size += len(names[-1]) + 1
            frame = known.get("parent")
        return names

    @property
    def has_stacks(self) -> bool:
        """Whether there are frames to which the events' `sf` may refer."""
        return bool(self._member("stackFrames"))

    @property
    def ftrace(self) -> str:
        """The kernel's own trace, as text."""
        text = self._members.get("systemTraceEvents")
        return text if type(text) is str else ""

    @property
    def launch_bits(self) -> int:
        """The bits of a launch's number above its correlation."""
        return self._place.get("rank", 0) << _RANK_SHIFT if self.is_kineto else 0

    def clock(self, events: ChromeEvents) -> str:
        """The clock of the times."""
        if self.is_own:
            clock = self._member(_OTHER).get("trace_clock")
            return clock if clock in _OWN_CLOCKS else CLOCK
        if self.is_viztracer:
            # In files that were combined by their starts or markers, times count from there.
            is_aligned = events.least_ns <= 0 or events.last_ns < (self.marker_ns or 0) // 2
            return CLOCK if is_aligned else MONOTONIC
        return "realtime" if self.is_kineto or self._base_ns else CLOCK

    def ahead_ns(self, events: ChromeEvents, clock: str) -> int:
        """The offset to add to each time, ns."""
        if self.is_own:
            base_ns = self._member(_OTHER).get("base_ns")
            return base_ns if type(base_ns) is int and 0 <= base_ns < 1 << 62 else 0
        if clock == CLOCK:
            return max(0, -events.least_ns)
        base_ns = 0 if clock == MONOTONIC else self._base_ns
        # Times that count from the base are far below it. These are absolute.
        return 0 if base_ns // 2 <= events.first_ns < TIME_LIMIT_NS else base_ns

    def header(self, events: ChromeEvents, clock: str) -> Header:
        """The header of the recording."""
        members = self._members
        header = Header(clock=clock, clocks=[clock])
        header.rank, header.world_size = self._place.get("rank"), self._place.get("world_size")
        first_ns, base_ns = events.first_ns, self._base_ns
        if clock == MONOTONIC and base_ns and first_ns + base_ns < TIME_LIMIT_NS:
            header.start = {"monotonic_ns": first_ns, "realtime_ns": first_ns + base_ns}
        if type(members.get("host_name")) is str:
            header.host = members["host_name"]
        gpus = members.get("deviceProperties")
        if type(gpus) is list and gpus:
            stated = {gpu["id"]: _gpu(gpu) for gpu in gpus if type(gpu) is dict and is_id(gpu.get("id"))}
            others = events.ranks.renumbered().items()
            more = {at: stated[device] | {"index": at} for at, (_, device) in others if device in stated}
            header.gpus = list((stated | more).values())
        header.options = {key: members[key] for key in _SHOWN if type(members.get(key)) in (str, int)}
        if "backend" in (info := self._member("distributedInfo")):
            header.options["backend"] = info["backend"]
        if self.is_viztracer:
            header.engine = f"VizTracer {self._member(VIZTRACER).get('version', '')}".rstrip()
        elif self.is_kineto or self.is_proton:
            header.engine = "PyTorch's profiler (Kineto)" if self.is_kineto else "Triton Proton"
        elif events.kinds.has_gpu_of_xla:
            header.engine = "XLA's profiler"
        return header


def _gpu(stated: dict[str, Any]) -> dict[str, Any]:
    """A GPU in the form of a header. Of AMD's, the numbers of compute capabilities mean something else."""
    gpu = {"index": stated["id"], "name": str(stated.get("name", "")), "sm_count": stated.get("numSms")}
    if not gpu["name"] or _OF_AMD.search(gpu["name"]):
        return gpu
    capability = stated.get("computeMajor"), stated.get("computeMinor")
    if all(type(number) is int for number in capability):
        gpu["compute_capability"] = "{}.{}".format(*capability)
    return gpu | {new: stated[old] for old, new in _OF_SM.items() if type(stated.get(old)) is int}


@dataclass(slots=True)
class _Begin:
    """A begin that waits for its end. `name` is what tells its name from others; `until_ns` is when a begin
    around it ended.
    """

    ts_ns: int
    name: _Name
    stated: KeptText
    args: KeptText
    until_ns: int = 0
    inside: list[SortedRow] = field(default_factory=list)
    """The slices inside that began at the same time, and are to follow it."""


_Name = str | int | None


def _name_of(stated: dict[str, Any]) -> _Name:
    """The name of a begin or an end, or a number for a long one; None where it has none."""
    name = stated.get("name")
    return name if name is None or len(name) <= SHORT_BYTES else flow_number(name)


@dataclass(slots=True)
class _Opened:
    """The begins of a thread or an id that wait for their ends, outermost first; how many have each name; and
    how many are set aside, as a begin around them ended.
    """

    begins: list[_Begin] = field(default_factory=list)
    names: Counter[_Name] = field(default_factory=Counter)
    aside: int = 0

    def add(self, begin: _Begin) -> None:
        """Add the innermost begin."""
        self.begins.append(begin)
        self.names[begin.name] += 1

    def pop(self) -> _Begin:
        """Remove the innermost begin."""
        begin = self.begins.pop()
        if self.names[begin.name] == 1:
            del self.names[begin.name]
        else:
            self.names[begin.name] -= 1
        return begin

    def has(self, name: _Name) -> bool:
        """Whether an end of this name ends one of the begins. A begin without a name is of any name."""
        return bool(self.begins) and (name is None or self.names[name] > 0 or self.names[None] > 0)


class ChromePairs:
    """Adds slices made of begins and ends to `rows`.

        B E      of a thread; an E ends the innermost B of its name, or the innermost one where it has none
                 B in that one wait for ends of their own, and else last as long
        b n e    of an id: they nest, and may overlap those of other ids: ranges of a process

    They come in the order of time. A begin without an end lasts to the end of the trace, marked `unclosed`.
    An end without a begin is an instant, marked `no_begin`.
    """

    def __init__(self, rows: SortedRows, add_bound: Callable[[SortedRow], None]) -> None:
        self._rows, self._add_bound = rows, add_bound
        self._open: dict[_Key, _Opened] = {}
        self._aside = OrderedDict[tuple[_Key, _Name], list[_Begin]]()
        self._count = 0
        self._ranges: dict[_Key, RangeNumbers] = {}
        self._range_of: dict[_Key, tuple[int, RangeNumbers]] = {}
        self._stated = Cache[bytes, dict[str, Any]](lambda text: (orjson.loads(text), len(text)))
        self._texts = TextFile()
        self.unclosed = self.no_begin = 0

    def add(self, paired: Iterable[Rows], last_ns: int) -> None:
        """Add the slices of all begins and ends, in order; `last_ns` is the end of the trace."""
        for rows in paired:
            for row in rows:
                self._add(row)
        for key, opened in list(self._open.items()):
            while opened.begins:
                self._end(key, opened.pop(), max(last_ns, 0), b"", unclosed=True)
        while self._aside:
            self._end_aside()

    def _end_aside(self) -> None:
        """End the first begin that was set aside, which has no end of its own."""
        place, begins = next(iter(self._aside.items()))
        begin = begins.pop(0)
        if not begins:
            del self._aside[place]
        key = place[0]
        self._end(key, begin, begin.until_ns, b"", unclosed=True)
        opened = self._open[key]
        opened.aside -= 1
        self._close(key, opened)

    def _close(self, key: _Key, opened: _Opened) -> None:
        """Forget a thread or an id of which nothing waits."""
        if not opened.begins and not opened.aside:
            del self._open[key]
            if key in self._range_of:
                number, ranges = self._range_of.pop(key)
                ranges.free(number)

    def _add(self, row: SortedRow) -> None:
        ts_ns, stated, args = row.ts_ns, self._stated[row.first], row.second
        key, phase, name = tuple(stated["key"]), stated["phase"], _name_of(stated)
        opened = self._open.setdefault(key, _Opened())
        if phase in "Bb":
            if self._count >= _OPEN_MAX and self._aside:
                self._end_aside()
            if self._count >= _OPEN_MAX:
                self._instant(ts_ns, key, stated, args, "unclosed")
                self._close(key, opened)
                return
            if phase == "b" and key not in self._range_of:
                self._range_of[key] = self._free_range(stated["fields"])
            self._count += 1
            opened.add(_Begin(ts_ns, name, self._texts.keep(row.first), self._texts.keep(args)))
        elif phase == "n":
            self._instant(ts_ns, key, stated, args, "")
        elif opened.has(name):
            begin = opened.pop()
            while name is not None and begin.name not in (name, None):
                begin.until_ns = ts_ns
                self._aside.setdefault((key, begin.name), []).append(begin)
                opened.aside += 1
                begin = opened.pop()
            self._end(key, begin, ts_ns, args, unclosed=False)
        elif (key, name) in self._aside:
            begins = self._aside[key, name]
            self._end(key, begins.pop(), ts_ns, args, unclosed=False)
            opened.aside -= 1
            if not begins:
                del self._aside[key, name]
        else:
            self._instant(ts_ns, key, stated, args, "no_begin")
        self._close(key, opened)

    def _end(self, key: _Key, begin: _Begin, end_ns: int, args: bytes, *, unclosed: bool) -> None:
        """Add a slice from a begin to its end."""
        self._count -= 1
        self.unclosed += unclosed
        stated = self._stated[self._texts.text(begin.stated)]
        fields, launch = stated["fields"], stated["launch"]
        record = {**fields, "name": fields.get("name") or stated.get("name", "no name")}
        if key in self._range_of:
            record["range"] = self._range_of[key][0]
        record |= {"phase": "X", "dur_ns": 0}
        if launch is not None:
            record["launch"] = 0
        joined = _joined(self._texts.text(begin.args), args, "unclosed" if unclosed else "")
        dur_ns = max(0, end_ns - begin.ts_ns)
        row = SortedRow(begin.ts_ns, SLICE, dur_ns, launch or 0, orjson.dumps(record), joined)
        around = self._open[key].begins
        if dur_ns and around and around[-1].ts_ns == begin.ts_ns:
            around[-1].inside += [row, *begin.inside]
        else:
            for one in (row, *begin.inside):
                self._rows.add(one)
        if "flow" in stated:
            number, first = stated["flow"]
            self._add_bound(SortedRow(begin.ts_ns, SLICE, dur_ns, number, first.encode(), b""))

    def _free_range(self, fields: dict[str, Any]) -> tuple[int, RangeNumbers]:
        """The number of a range of its process and category that is not open, which is used from now on."""
        ranges = self._ranges.setdefault((fields.get("pid"), fields.get("domain")), RangeNumbers())
        number = ranges.lowest()
        return RANGE_LIMIT if number is None else number, ranges

    def _instant(self, ts_ns: int, key: _Key, stated: dict[str, Any], args: bytes, mark: str) -> None:
        self.no_begin += mark == "no_begin"
        self.unclosed += mark == "unclosed"
        record = {**stated["fields"], "name": stated.get("name", "no name"), "phase": "I"}
        if stated["phase"] in "bne":
            if key in self._range_of:
                record["range"] = self._range_of[key][0]
            else:  # it must be in none of the ranges that are open
                record["range"], ranges = self._free_range(stated["fields"])
                ranges.free(record["range"])
        self._rows.add(SortedRow(ts_ns, MARK, 0, 0, orjson.dumps(record), _joined(args, b"", mark)))


def _joined(first: bytes, second: bytes, mark: str) -> bytes:
    """The arguments of a begin and of its end, merged, and a mark."""
    if not second and not mark:
        return first
    args = _merged(orjson.loads(first) if first else {}, orjson.loads(second) if second else {})
    return orjson.dumps(args | {mark: True} if mark else args) if args or mark else b""


def _merged(one: Any, other: Any) -> Any:
    """Both objects, merged in depth, or both arrays, or else the second value."""
    if type(one) is dict and type(other) is dict:
        return one | {key: _merged(one[key], value) if key in one else value for key, value in other.items()}
    return one + other if type(one) is list and type(other) is list else other


@dataclass(frozen=True, slots=True)
class _Around:
    """A slice in which the end of a flow may be, and its place in the drawing."""

    ts_ns: int
    dur_ns: int
    place: bytes

    @property
    def end_ns(self) -> int:
        """The end of the slice."""
        return self.ts_ns + self.dur_ns


@dataclass(slots=True)
class _FlowEnd:
    """An end of a flow, and its slice, if it is in one. `used`: it is drawn."""

    row: SortedRow
    around: _Around | None
    used: bool = False
    name: str = ""
    """The name of the instant that has it; empty for the flow's own name."""

    @property
    def size_bytes(self) -> int:
        """How many bytes its texts have."""
        return len(self.row.first) + len(self.row.second)


_Thread = tuple[Any, ...]
_PLACE: Final = ("type", "layer", "domain", "pid", "tid", "gpu", "stream", "range")


def _place_of(first: bytes, of_thread: tuple[str, ...]) -> tuple[tuple[_Thread, bytes, str, bool], int]:
    """The thread of a record, its place, its phase, and whether it belongs to the next slice."""
    record = orjson.loads(first)
    thread = tuple(map(record.get, of_thread))
    place = packed({key: record[key] for key in _PLACE if key in record})
    return (thread, place, record["phase"], record.get("is_next", False)), len(first)


class FlowSlices:
    """Adds to `bound` a flow for each two ends that belong together. An end belongs to the innermost slice
    that is open at that time, or to the next one of the thread, or of the layer with `by_layer`. Both come
    in the order of time. Ends that are in no slice become instants.

        s    the flow starts here, unless it has
        t    a flow from where it was last, and on from here
        f    a flow from where it was last
    """

    def __init__(self, bound: SortedRows, *, by_layer: bool) -> None:
        self._bound = bound
        of_thread = ("pid", "tid", "gpu", "stream") + (("layer", "domain", "range") if by_layer else ())
        self._places = Cache[bytes, tuple[_Thread, bytes, str, bool]](
            lambda first: _place_of(first, of_thread)
        )
        self._open: dict[_Thread, list[_Around]] = {}
        self._waiting: dict[_Thread, list[tuple[SortedRow, _FlowEnd | None]]] = {}
        """The ends that wait for the next slice of a thread, and where their flows were last."""
        self._bytes = self._waiting_bytes = self._starts_bytes = 0
        self._marks: dict[_Thread, tuple[int, str]] = {}
        """The time and the name of the last instant of a thread."""
        self._starts = OrderedDict[int, _FlowEnd]()
        """Where flows were last, by their numbers; those that were used last are at the end."""
        self._count = 0
        self.alone = 0
        """Ends in slices that have no other end: nothing is drawn of them."""

    def add(self, row: SortedRow) -> None:
        """Add a slice."""
        thread, place, _, _ = self._places[row.first]
        around = _Around(row.ts_ns, row.dur_ns, place)
        for flow, start in self._waiting.pop(thread, ()):
            self._waiting_bytes -= len(flow.first) + len(flow.second)
            self._join(start, _FlowEnd(flow, around))
        # All that is forgotten is a slice that may have been around the end of a flow.
        if self._bytes > _AROUND_BYTES_MAX:
            self._open.clear()
            self._bytes = 0
        self._opened(thread, row.ts_ns)
        self._open.setdefault(thread, []).append(around)
        self._bytes += len(place)

    def add_mark(self, row: SortedRow) -> None:
        """Add an instant, to which flows of the same time belong."""
        thread, _, _, _ = self._places[row.first]
        if len(self._marks) >= _MARKS_MAX:
            self._marks.clear()
        self._marks[thread] = row.ts_ns, orjson.loads(row.first)["name"]

    def _opened(self, thread: _Thread, ts_ns: int) -> _Around | None:
        """The innermost slice of a thread that is open at a time."""
        opened = self._open.get(thread, [])
        while opened and opened[-1].end_ns < ts_ns:
            self._bytes -= len(opened.pop().place)
        if not opened:
            self._open.pop(thread, None)
        return opened[-1] if opened else None

    def add_flow(self, row: SortedRow) -> None:
        """Add the end of a flow. If it has a length, it is that of its slice."""
        thread, place, _, is_next = self._places[row.first]
        if row.rank == SLICE:
            self._add_end(_FlowEnd(row, _Around(row.ts_ns, row.dur_ns, place)))
            return
        around = self._opened(thread, row.ts_ns)
        size = len(row.first) + len(row.second)
        begins = around is not None and around.ts_ns == row.ts_ns
        marked_ns, name = self._marks.get(thread, (None, ""))
        if marked_ns == row.ts_ns and not begins:
            self._add_end(_FlowEnd(row, None, name=name))
            return
        if is_next and not begins and self._waiting_bytes + size <= _AROUND_BYTES_MAX:
            self._waiting.setdefault(thread, []).append((row, self._starts.get(row.number)))
            self._waiting_bytes += size
        else:
            self._add_end(_FlowEnd(row, around))

    def end(self) -> None:
        """Draw the ends after which no slice begins, and the flows that have no second end."""
        for waiting in self._waiting.values():
            for row, start in waiting:
                self._join(start, _FlowEnd(row, None))
        for end in self._starts.values():
            self._leave(end)

    def _add_end(self, end: _FlowEnd) -> None:
        number, (_, _, phase, _) = end.row.number, self._places[end.row.first]
        start = self._starts.pop(number, None)
        self._starts_bytes -= 0 if start is None else start.size_bytes
        if phase == "s" and start is not None:
            self._leave(end)
        elif phase != "s":
            self._join(start, end)
        last = end if (start is None and phase == "s") or (start is not None and phase == "t") else start
        if last is not None:
            self._starts[number] = last
            self._starts_bytes += last.size_bytes
        while len(self._starts) > _STARTS_MAX or self._starts_bytes > _STARTS_BYTES_MAX:
            _, first = self._starts.popitem(last=False)
            self._starts_bytes -= first.size_bytes
            self._leave(first)

    def _join(self, start: _FlowEnd | None, end: _FlowEnd) -> None:
        """Draw a flow between two ends, unless they are the same slice."""
        if start is None:
            self._leave(end)
        elif start.around != end.around or end.around is None:
            self._count += 1
            flow = flow_number("bound", self._count)
            self._draw(start, "s", flow)
            self._draw(end, "f", flow)

    def _leave(self, end: _FlowEnd) -> None:
        """Draw an end without a second one, unless it is in a slice, and count it then."""
        self.alone += end.around is not None and not end.used
        if end.around is None and not end.used:
            self._count += 1
            self._draw(end, self._places[end.row.first][2], flow_number("bound", self._count))

    def _draw(self, end: _FlowEnd, phase: str, flow: int) -> None:
        """Add a row for the end of a flow. It follows that of its slice."""
        row, around = end.row, end.around
        record = {key: value for key, value in orjson.loads(row.first).items() if key != "is_next"}
        record |= {"phase": phase, "name": end.name or record["name"]}
        second = b"" if end.used else row.second
        end.used = True
        if around is None:
            self._bound.add(SortedRow(row.ts_ns, FLOW, 0, flow, packed(record), second))
            return
        kept = {key: value for key, value in record.items() if key not in _PLACE}
        first = packed(orjson.loads(around.place) | kept)
        self._bound.add(SortedRow(around.ts_ns, SLICE, around.dur_ns, flow, first, b""))


def _again(stream: Any) -> AbstractContextManager[BinaryIO] | None:
    """The same input from its start; None where it can be read only once."""
    if not hasattr(stream, "again"):
        stream.seek(0)
        return nullcontext(stream)
    again: AbstractContextManager[BinaryIO] | None = stream.again() if stream.size_bytes else None
    return again


class _Trace:
    """Turns one trace into batches."""

    def __init__(self, stream: BinaryIO) -> None:
        found = self._read(stream, _Origin())
        # What decides how events are read may come after them.
        while found != self._around.origin and (again := _again(stream)) is not None:
            with again as other:
                found = self._read(other, found)
        self._clock = self._around.clock(self._events)

    def recording(self) -> Recording:
        """The recording."""
        header = self._around.header(self._events, self._clock)
        states_itself = self._around.is_own
        return Recording(header, self._batches(), self._sorted.tables, states_itself=states_itself)

    def _read(self, stream: BinaryIO, origin: _Origin) -> _Origin:
        """Read all events, and return what is known of the trace then. Members may stand after the events:
        the rank, the clock.
        """
        self._elements = elements = JsonElements(stream)
        has_array = elements.begin()
        self._around = around = _Members(elements, origin)
        self._ids = ids = Ids()
        kinds = around.kinds(ids)
        self._events = chrome_events(kinds, ids)
        self._sorted = SortedEvents(self._events.rows)
        self._sorted.tables.long_names = self._events.long_names
        self._undated = 0
        self._problems = FirstProblems()
        if not has_array:
            self._problems.add(Problem(0, "", "has no array of events", skipped=False))
        for batch in elements.batches() if has_array else ():
            self._problems.add(*self._events.add_all(batch))
        if has_array and elements.rest:
            self._problems.add(Problem(0, "", elements.rest))
        self._ftrace_unread = self._events.add_ftrace(around.ftrace)
        return around.found(kinds)

    def _batches(self) -> Iterator[SourceBatch]:
        """Batches of the events in the order of time."""
        events, around = self._events, self._around
        if self._clock == MONOTONIC and around.marker_ns is not None:
            events.mark("sync marker", around.marker_ns)
        pairs = ChromePairs(events.rows, events.add_bound)
        pairs.add(events.paired.in_order(), events.last_ns)
        events.bind_flows()
        ahead_ns = around.ahead_ns(events, self._clock)
        # They come with the first events, whose time is the start of the trace.
        others: list[Record] = events.name_records()
        if around.is_overflown and events.first_ns < TIME_LIMIT_NS:
            loss = {"type": "loss", "layer": "hook", "count": 1, "ts_ns": events.first_ns + ahead_ns}
            others.append({**loss, "reason": _OVERFLOWN})
        columns = (self._columns(rows, ahead_ns) for rows in events.rows.in_order())
        yield from batches_of(columns, others, self._problems.pop(), self._last_problems(pairs))

    def _columns(self, rows: Rows, ahead_ns: int) -> EventColumns:
        """Rows as columns of events. Rows at time 0, far before all others, get the first of these times."""
        ts_ns: Int64s = rows.ts_ns
        if _DAY_NS < self._events.first_ns < TIME_LIMIT_NS and bool((ts_ns == 0).any()):
            undated = ts_ns == 0
            self._undated += int(undated.sum())
            texts = list(rows.second)
            for at in np.flatnonzero(undated).tolist():
                args = orjson.loads(texts[at]) if texts[at] else {}
                texts[at] = orjson.dumps(args | {"time_not_known": True})
            rows.second = Texts.of(texts)
            ts_ns = np.where(undated, self._events.first_ns, ts_ns)
        if self._around.has_stacks:
            rows.second = Texts.of(
                [self._with_stack(text) if b'"sf":' in text else text for text in rows.second]
            )
        if self._events.ranks.are_several:
            self._events.ranks.set_processes(rows)
        elif (pid := self._events.kinds.only_process) is not None:
            rows.firsts = [_in_process(first, pid) for first in rows.firsts]
        if bits := self._around.launch_bits:
            has_launch = np.array([first.endswith(b'"launch":0}') for first in rows.firsts], bool)[rows.first]
            rows.number = np.where(has_launch & (rows.number > 0), rows.number | bits, rows.number)
        return self._sorted.columns(rows, ts_ns + ahead_ns)

    def _with_stack(self, text: bytes) -> bytes:
        args = orjson.loads(text)
        stack = self._around.stack(args["sf"]) if "sf" in args and "stack" not in args else []
        return orjson.dumps(args | {"stack": stack}) if stack else text

    def _last_problems(self, pairs: ChromePairs) -> Iterator[Problem]:
        """The problems of the whole trace."""
        events = self._events
        if events.alone:
            words = "end|ends of flows in slices has|have no other end: it_is|they_are not drawn"
            yield Problem(0, "", counted(events.alone, words), skipped=False)
        if self._around.is_overflown:
            yield Problem(0, "viztracer_metadata.overflow", f"{_OVERFLOWN}: counted as one", skipped=False)
        if others := events.ranks.renumbered():
            shown = [
                f"GPU {at} is device {device} of {events.process_name(process)}"
                for at, (process, device) in islice(others.items(), _SHOWN_GPUS)
            ]
            words = "devices of one number belong to several processes, as ranks were merged"
            more = f" and {len(others) - len(shown)} more" if len(others) > len(shown) else ""
            yield Problem(0, "device", f"{words}: {', '.join(shown)}{more}", skipped=False)
        if self._clock == CLOCK and events.least_ns < 0:
            words = f"times begin {-events.least_ns} ns before 0: this is added to all of them"
            yield Problem(0, "ts", words, skipped=False)
        yield from self._problems.rest("object|objects cannot be read")
        yield from self._ids.problems()
        drawn = "slice|slices has|have {0} duration: drawn without one (args.{1}_duration_ns)"
        yield from counted_problems(
            {
                drawn.format("a negative", "negative"): events.negative,
                drawn.format("an impossible", "impossible"): events.impossible,
                f"name|names is|are longer than {NAME_BYTES_MAX} bytes and was|were cut": events.cut,
                "event|events is|are at time 0, far before all others: drawn at the first of these "
                "(args.time_not_known)": self._undated,
                "name|names of processes and threads is|are left out: there are more than can be kept": (
                    events.names_left_out
                ),
                "value|values of counters is|are left out: they are not numbers": events.no_numbers,
                "line|lines of systemTraceEvents is|are not read": self._ftrace_unread,
                "member|members around the events is|are not read: there is more text than can be kept": (
                    self._elements.members_left_out
                ),
                "begin|begins has|have no end: drawn to that of the caller, or the trace (args.unclosed)": (
                    pairs.unclosed
                ),
                "end|ends has|have no begin: drawn as an_instant|instants (args.no_begin)": pairs.no_begin,
            }
        )


def read(stream: BinaryIO) -> Recording:
    """The recording in such a stream."""
    return _Trace(stream).recording()


def sniff(head: bytes) -> bool:
    """Whether the content is an object with members, or an array of objects, with an event in it."""
    text = head.removeprefix(BOM).lstrip()
    if text.startswith(b"["):
        return _LIST.match(text) is not None and (_EVENT.search(text) is not None)
    if not text.startswith(b"{") or not _MEMBER.match(text):
        return False
    first = text.partition(b"\n")[0]
    is_line = first.rstrip().endswith(b"}") and len(first) + 1 < len(text) and b'"traceEvents"' not in first
    return not is_line and (b'"traceEvents"' in text or any(f'"{key}"'.encode() in text for key in OF_KINETO))
