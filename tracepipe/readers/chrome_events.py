"""Turns events of Chrome's trace format into rows, which are sorted later. The native core does the same for
their usual forms in `chrome_rows.c`.

X                 a row with its length
I i R P, C, s t f a row without one
N O D             the same: the life of an object
B E, b n e        a row for `ChromePairs`, which matches them
M                 names and places of processes and threads

The category of an event decides its layer, its row and its fields:

of PyTorch (Kineto)
 user_annotation                            annotation
 cpu_op                                     annotation of the domain cpu_op
 cuda_runtime, cuda_driver                  userspace; launches by `correlation`
 kernel, gpu_memcpy, gpu_memset             gpu_kernel, transfer: on their stream, with `launch`
 python_function and all others             hook: a layer of that name
of VizTracer: FEE, INSTANT and all others   hook, the layer `python`
of Triton Proton, with lanes as threads
 kernel: 200000 + GPU × 1000000 + stream    gpu_kernel of that stream; once, the lane was the stream
 scope, metric: a thread of the CPU         annotation
                100000 + stream             hook: the layer `graph`; scopes of a CUDA graph have no call stack
 flow s, f                                  flow from an annotation to a kernel
of other tools: all categories              hook, the layer `events`: they nest in each other
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeGuard

import numpy as np
import orjson

from tracepipe.event.model import (
    COUNTS,
    FLOW_PHASES,
    ID_LIMIT,
    NAME_BYTES_MAX,
    TIME_LIMIT_NS,
    Problem,
    Record,
)
from tracepipe.event.tables import packed
from tracepipe.event.vocabulary import direction_named
from tracepipe.native import library
from tracepipe.readers.ids import LAUNCHES, Ids, flow_number, flow_text
from tracepipe.readers.json_elements import Elements, Fault, events_in
from tracepipe.readers.recording import TOO_DEEP, Unusable, is_too_deep
from tracepipe.readers.sorted_events import Cache
from tracepipe.readers.sorted_rows import FLOW, MARK, SLICE, NativeSortedRows, SortedRow, row_sorter

_PLAIN = re.compile(r"(-?)(\d{1,18})(?:\.(\d+))?")
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?\s*")
_OF_KEY = {key: re.compile(rb'"%b"\s*:\s*(-?[0-9][0-9.eE+-]*)' % key.encode()) for key in ("ts", "dur")}
_THREE_DECIMALS = {
    key: re.compile(rb'"%b"\s*:\s*([0-9]{1,16})\.([0-9]{3})[,}\s]' % key.encode()) for key in ("ts", "dur")
}
# Below this, two neighbouring doubles differ by less than a quarter of a nanosecond.
_EXACT_US: Final = 1 << 40


def ns_of_text(text: str) -> int | None:
    """Nanoseconds of microseconds in digits, rounded to the nearest; None where the text is not a number, or
    beyond the times of a trace.
    """
    plain = _PLAIN.fullmatch(text)
    if plain:
        sign, whole, fraction = plain[1], plain[2], plain[3] or ""
        ns = int(whole) * 1000 + int(fraction[:3].ljust(3, "0")) + (fraction[3:4] >= "5")
        ns = -ns if sign else ns
    else:
        if not _NUMBER.fullmatch(text):
            return None
        try:
            ns = round(Decimal(text.strip()) * 1000)
        except InvalidOperation:
            return None
    return ns if abs(ns) <= TIME_LIMIT_NS else None


def ns_of(value: object, key: str, event: bytes) -> int | None:
    """Nanoseconds of the microseconds that an event has at `key`, by the digits of its text."""
    if type(value) is int:
        return value * 1000 if abs(value) <= TIME_LIMIT_NS // 1000 else None
    if type(value) is str:
        return ns_of_text(value)
    if type(value) is not float:
        return None
    if abs(value) < _EXACT_US:
        return round(value * 1000)
    # PyTorch writes three decimals. No text before may look like the key.
    found = _THREE_DECIMALS[key].search(event)
    if found:
        ns = int(found[1]) * 1000 + int(found[2])
        if float(b"%b.%b" % found.groups()) == value and ns <= TIME_LIMIT_NS:
            return ns
    for found in _OF_KEY[key].finditer(event):
        if float(found[1]) == value:
            return ns_of_text(found[1].decode())
    # The key has an escape.
    texts = json.loads(event.decode("utf-8", "replace"), parse_float=str)
    return ns_of_text(texts[key]) if type(texts.get(key)) is str else None


EVENTS: Final = "events"
"""The layer of events that are neither from PyTorch nor from VizTracer."""
PYTHON: Final = "python"
"""The layer of VizTracer's events: calls of Python and C, and logs of the program."""
# The categories of its calls and logs. Newer versions write them in lower case when they run a program.
_OF_VIZTRACER: Final = frozenset({"FEE", "fee", "INSTANT", "instant"})
_STREAM = re.compile(r"\D*(\d{1,18})")
_INDEX = re.compile(r"[0-9]{1,10}")
_COPY = re.compile(r"Memcpy (\w+)")
_GPU_COUNTERS = re.compile(r"GPU (\d{1,9})\b")
_RANK_SHIFT: Final = 40
_RENAMED: Final = {
    "bytes": "size",
    "registers per thread": "registers",
    "shared memory": "shared_bytes",
    # A dot in a name has a special meaning in Perfetto.
    "est. achieved occupancy %": "estimated occupancy %",
}


Rules = Mapping[str, str | None]
"""New names of arguments; None for those that fields have."""


@dataclass(slots=True)
class Kind:
    """All that is kept of an event but its time and length: fields of its record, and its arguments.

    It depends only on the event's `ph`, `cat`, `name`, `pid` and `tid`, on its arguments `device`, `stream`,
    `grid`, `block` and `Device Type`, on whether `correlation` is the number of a launch, and on whether
    `Bytes` is a number, and below 0. So the native core can read the next such event, unless there are
    `own_args` of an event that is not an allocation.
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

    def args_of(self, args: dict[str, Any]) -> dict[str, Any]:
        """The arguments to keep of an event's arguments."""
        if self.own_args is not None:
            return self.own_args
        if rules := self.rules:
            args = {name: value for key, value in args.items() if (name := rules.get(key, key)) is not None}
        return {**self.ahead, **args} if self.ahead else args


def _is_id(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= ID_LIMIT


class Kinds:
    """Decides the kinds of events from PyTorch (`is_kineto`, with this `rank`), VizTracer or another tool."""

    def __init__(
        self, ids: Ids, *, is_kineto: bool = False, is_viztracer: bool = False, rank: int = 0
    ) -> None:
        self._ids, self._is_kineto = ids, is_kineto
        self.launch_bits = rank << _RANK_SHIFT
        """The bits of a launch's number above its correlation."""
        self._layer = PYTHON if is_viztracer else EVENTS
        self._of: Mapping[str, Callable[[dict[str, Any], str, dict[str, Any]], Kind]] = {}
        if is_kineto:
            self._of = {
                **dict.fromkeys(
                    ("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime"), self._call
                ),
                "kernel": lambda event, category, args: self._work(event, category, args, type="gpu_kernel"),
                **dict.fromkeys(("gpu_memcpy", "memcpy", "gpu_memset", "memset"), self._copy),
                **dict.fromkeys(("gpu_user_annotation", "cuda_sync", "cuda_event"), self._of_gpu),
                "user_annotation": lambda event, *_: Kind(self._thread(event, type="annotation")),
                **dict.fromkeys(("cpu_op", "operator", "fwdbwd"), self._operator),
                "cpu_instant_event": self._instant,
            }

    def is_known_otherwise(self, category: str) -> bool:
        """Whether flows of a category join the same events as `launch`. These often lack an end."""
        return self._is_kineto and category in ("ac2g", "async_cpu_to_gpu")

    def kind(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        """The kind of an event with these arguments."""
        of = self._of.get(category.lower() if self._is_kineto else category, self._other)
        return of(event, category, args)

    def _thread(self, event: dict[str, Any], **fields: object) -> dict[str, Any]:
        # PyTorch writes 0 for a thread that it does not know: GPU 0 has that number too.
        if self._is_kineto and event.get("pid") == 0 and event.get("tid") == 0:
            return fields
        return self._ids.thread(event, fields)

    def _launch(self, args: dict[str, Any]) -> int | None:
        correlation = args.get("correlation")
        if type(correlation) is not int or not 0 < correlation <= ID_LIMIT:
            return None
        return correlation | self.launch_bits

    # By category ----------------------------------------------------------------------------------------

    def _other(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        if category in _OF_VIZTRACER and (self._is_kineto or self._layer == PYTHON):
            return Kind(self._thread(event, type="hook", layer=PYTHON))
        if self._is_kineto:
            return Kind(self._thread(event, type="hook", layer=category or EVENTS))
        ahead = {"cat": category} if category else {}
        return Kind(self._thread(event, type="hook", layer=self._layer), ahead=ahead)

    def _operator(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        return Kind(self._thread(event, type="annotation", domain="cpu_op"))

    def _call(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        launch = self._launch(args) if LAUNCHES.search(str(event.get("name"))) else None
        return Kind(self._thread(event, type="userspace"), launch)

    def _place(self, event: dict[str, Any], args: dict[str, Any]) -> tuple[int, int] | None:
        """GPU and stream."""
        gpu, stream = args.get("device", event.get("pid")), args.get("stream", event.get("tid"))
        if type(stream) is str and (found := _STREAM.fullmatch(stream)):
            stream = int(found[1])
        if type(gpu) is str and _INDEX.fullmatch(gpu):
            gpu = int(gpu)
        if type(gpu) is not int or type(stream) is not int:
            return None
        if not (0 <= gpu <= ID_LIMIT and 0 <= stream < 1 << 62):
            return None
        return gpu, stream

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
        launch = self._launch(args)
        stated = {"device", "stream", "correlation"} if launch is not None else {"device", "stream"}
        for key in ("grid", "block"):
            size = args.get(key)
            if type(size) is list and len(size) == 3 and all(map(_is_id, size)):
                fields[key] = tuple(size)
                stated.add(key)
        return Kind(fields, launch, {**_RENAMED, **dict.fromkeys(sorted(stated))})

    def _of_gpu(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        # Their pid is the number of a GPU, which may be a process's pid too.
        place = self._place(event, args)
        if place is None:
            return self._other(event, category, args)
        gpu, stream = place
        fields = {"type": "hook", "layer": category}
        process = {"pid": f"GPU {gpu}: {category}", "tid": stream if _is_id(stream) else str(stream)}
        return Kind(self._ids.thread(process, fields))

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
        return Kind(self._thread(event, type="memory", name=name), own_args=args, is_allocation=True)

    def counter(self, event: dict[str, Any], category: str) -> Kind:
        """The kind of a counter: of a GPU, if its process has such a name, or else of the process."""
        found = _GPU_COUNTERS.match(pid) if type(pid := event.get("pid")) is str else None
        if found and self._is_kineto:
            return Kind({"type": "hook", "layer": category or EVENTS, "gpu": int(found[1])})
        fields = self._thread(event, type="hook", layer=category or self._layer)
        fields.pop("tid", None)
        return Kind(fields)


GRAPH: Final = "graph"
_GPU_LANES, _OF_GPU = 200_000, 1_000_000


class ProtonKinds(Kinds):
    """Decides the kinds of events."""

    def kind(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        """The kind of an event."""
        if category == "kernel" or (category == "flow" and event.get("ph") == "f"):
            lane = event.get("tid")
            if _is_id(lane):
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
_KNOWN = frozenset({"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"})
_OF_ASYNC = _KNOWN | {"id", "id2", "scope"}
_OF_FLOWS = _OF_ASYNC | {"bp"}
# A year: no slice of a trace is that long.
_LONG_NS: Final = 365 * 24 * 3600 * 10**9
_NAMES_MAX: Final = 1 << 16
_NO_NAME: Final = "no name"
_DIGITS = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")


def _parsed(text: bytes) -> Any:
    """The value of JSON, in which invalid UTF-8 and invalid numbers are replaced. Raises ValueError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        value = json.loads(text.decode("utf-8", "replace"), parse_constant=str)
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def id_of(event: dict[str, Any]) -> tuple[Any, ...] | None:
    """The id that distinguishes an asynchronous event or a flow from others of its category; None without
    one.
    """
    id2 = event.get("id2")
    if type(id2) is dict:
        if "global" in id2:
            return event.get("scope"), str(id2["global"])
        if "local" in id2:
            return event.get("scope"), event.get("pid"), str(id2["local"])
    return (event.get("scope"), str(event["id"])) if "id" in event else None


class ChromeEvents:
    """Adds events to `rows`, if they are complete in themselves, and begins and ends to `paired`."""

    def __init__(self, kinds: Kinds, ids: Ids) -> None:
        self._kinds, self._ids = kinds, ids
        self.rows, self.paired = row_sorter(), row_sorter()
        self.first_ns, self.last_ns = TIME_LIMIT_NS, 0
        """The first and the last time, without 0."""
        self.least_ns = TIME_LIMIT_NS
        """The first time, which may be below 0."""
        self.negative = self.impossible = self.cut = self.names_left_out = 0
        self._firsts = Cache[tuple[Any, ...], tuple[bytes, int]]()
        self._names: dict[tuple[int, int | None], Record] = {}

    def add_all(self, batch: Elements) -> list[Problem]:
        """Add events, and return the problems of events and of the text between them."""
        faults = batch.faults + self._add_all(batch)
        return [batch.problem(fault) for fault in sorted(faults)]

    def _add_all(self, batch: Elements) -> list[Fault]:
        """Add events one by one, and return the places and texts of what is wrong."""
        return [(place + at, message) for place, text in batch.texts() for at, message in self._event(text)]

    def _event(self, text: bytes) -> list[Fault]:
        """Add an event, and return the places and texts of what is wrong."""
        try:
            event = _parsed(text)
            if is_too_deep(text, event):
                return [(0, TOO_DEEP)]
            if event:
                self._add_event(event, text)
            return []
        except Unusable as e:
            return [(0, f"{e.field}: {e.message}")]
        except (ValueError, RecursionError):
            # A missing bracket or quote may have joined it with valid events.
            wrong = [(0, "is not JSON")]
            for start, end in events_in(text, 1):
                wrong += [(start + at, message) for at, message in self._event(text[start:end])]
            return wrong

    def _add_event(self, event: dict[str, Any], text: bytes) -> None:
        phase = event.get("ph")
        if type(phase) is not str:
            raise Unusable("ph", "is missing, or is not a string")
        if phase == "M":
            self._add_name(event)
            return
        ts_ns = ns_of(event.get("ts"), "ts", text)
        if ts_ns is None:
            raise Unusable("ts", "is missing" if "ts" not in event else "is not a time that a trace can have")
        category = event.get("cat")
        category = self._shortened(category) if type(category) is str else ""
        if phase == "X":
            self._add_slice(event, ts_ns, category, text)
        elif phase in _INSTANTS or phase in _OF_OBJECTS:
            args = {"object": _OF_OBJECTS[phase]} if phase in _OF_OBJECTS else {}
            self._add_whole(event, ts_ns, category, "I", args | _args_of(event, _KNOWN))
        elif phase == COUNTS:
            self._add_counter(event, ts_ns, category)
        elif phase in FLOW_PHASES:
            self._add_flow(event, ts_ns, category)
        elif phase in _PAIRED:
            self._add_paired(event, ts_ns, category)
        else:
            raise Unusable("ph", f"{phase[:8]!r} is not a phase that is read")

    def _note_time(self, ts_ns: int, dur_ns: int) -> None:
        if ts_ns > 0:
            self.first_ns = min(self.first_ns, ts_ns)
        self.least_ns = min(self.least_ns, ts_ns)
        self.last_ns = max(self.last_ns, ts_ns + dur_ns)

    def _shortened(self, name: str) -> str:
        if len(name) <= NAME_BYTES_MAX // 4:
            return name
        whole = name.encode("utf-8", "replace")
        self.cut += len(whole) > NAME_BYTES_MAX
        return whole[:NAME_BYTES_MAX].decode("utf-8", "ignore")

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
        """Add the row of a slice or an instant."""
        kind = self._kinds.kind(event, category, args)
        self._note_time(ts_ns, dur_ns)
        first = self._first(kind.fields, event, phase, kind.launch is not None)
        rank, second = SLICE if phase == "X" else MARK, _dumped(kind.args_of(args))
        self._add(SortedRow(ts_ns, rank, dur_ns, kind.launch or 0, first, second), kind)

    def _add(self, row: SortedRow, kind: Kind) -> None:
        """Add the row of an event of a kind."""
        self.rows.add(row)

    def _first(self, fields: dict[str, Any], event: dict[str, Any], phase: str, has_launch: bool) -> bytes:
        """The record without time and arguments, and with 0 for its length and launch."""
        name = fields.get("name", event.get("name"))
        text = name if type(name) is str else str(name)
        key = (phase, has_launch, text, *fields.values())
        known = self._firsts.get(key)
        if known is None:
            before, record = self.cut, dict(fields)
            record["name"] = self._shortened(_NO_NAME if name is None else text)
            record["phase"] = phase
            if phase == "X":
                record["dur_ns"] = 0
            if has_launch:
                record["launch"] = 0
            known = _dumped(record), self.cut - before
            self._firsts.keep(key, known, len(text) + len(known[0]))
            self.cut = before
        first, cut = known
        self.cut += cut
        return first

    def _add_counter(self, event: dict[str, Any], ts_ns: int, category: str) -> None:
        args = event.get("args")
        values = {key: _value(value) for key, value in args.items()} if type(args) is dict else {}
        if not values or None in values.values():
            raise Unusable("args", "are without numbers, which a counter needs")
        kind = self._kinds.counter(event, category)
        id = id_of(event)
        name = f"{event.get('name', _NO_NAME)}" + (f"[{id[-1]}]" if id else "")
        self._note_time(ts_ns, 0)
        first = self._first({**kind.fields, "name": name}, event, COUNTS, False)
        self._add(SortedRow(ts_ns, MARK, 0, 0, first, _dumped(values)), kind)

    def _add_flow(self, event: dict[str, Any], ts_ns: int, category: str) -> None:
        id = id_of(event)
        if id is None:
            raise Unusable("id", "is missing")
        if self._kinds.is_known_otherwise(category):
            return
        kind = self._kinds.kind(event, category, {})
        kind.flow = (category, event.get("name"), *id[:-1])
        number = flow_number(*kind.flow, id[-1])
        self._note_time(ts_ns, 0)
        first = self._first({**kind.fields, "flow": 0}, event, event["ph"], False)
        self._add(SortedRow(ts_ns, FLOW, 0, number, first, _dumped(_args_of(event, _OF_FLOWS))), kind)

    def _add_paired(self, event: dict[str, Any], ts_ns: int, category: str) -> None:
        phase = event["ph"]
        self._note_time(ts_ns, 0)
        if phase in "BE":
            args = _args_of(event, _KNOWN)
            kind = self._kinds.kind(event, category if phase == "B" else "", args)
            key: list[Any] = ["", kind.fields.get("pid"), kind.fields.get("tid")]
        else:
            id = id_of(event)
            if id is None:
                raise Unusable("id", "is missing")
            args = _args_of(event, _OF_ASYNC)
            kind = Kind({"type": "annotation"} | ({"domain": category} if category else {}))
            pid = self._ids.thread({"pid": event.get("pid")}, kind.fields).get("pid")
            # With a global id, the process does not matter.
            is_shared = type(event.get("id2")) is dict and "global" in event["id2"]
            key = [category, None if is_shared else pid, *map(str, id)]
        stated = {"phase": phase, "key": key, "fields": kind.fields, "launch": kind.launch}
        if (name := event.get("name")) is not None:
            stated["name"] = self._shortened(str(name))
        self.paired.add(SortedRow(ts_ns, 0, 0, 0, _dumped(stated), _dumped(kind.args_of(args))))

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
        record = self._names.setdefault(key, {})
        if kind in ("name", "labels") and type(args.get(kind)) is str:
            record[kind] = self._shortened(args[kind])
        elif kind == "sort_index" and type(args.get(kind)) in (int, float):
            record["order"] = args[kind]

    def name_records(self) -> list[Record]:
        """Names and places of processes and threads, as records."""
        for key, name in self._ids.named():
            self._names.setdefault(key, {}).setdefault("name", self._shortened(name))
        orders = sorted({record["order"] for record in self._names.values() if "order" in record})
        rank_of = {order: at for at, order in enumerate(orders)}
        records = []
        for (pid, tid), known in self._names.items():
            record: Record = {"type": "name", "pid": pid}
            if tid is not None:
                record["tid"] = tid
            words = [known[key] for key in ("name", "labels") if known.get(key)]
            if words:
                record["name"] = self._shortened(", ".join(words))
            if "order" in known:
                record["order"] = rank_of[known["order"]]
            records.append(record)
        return records


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
    if type(value) is not str or not _DIGITS.fullmatch(value):
        return None
    return int(value) if value.lstrip("-").isdigit() else float(value)


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
        self._known = core.tp_events_new(int.from_bytes(os.urandom(8), "little"), kinds.launch_bits)
        if not self._known:
            raise MemoryError
        weakref.finalize(self, core.tp_events_free, self._known)
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
            at = self._core.tp_events_take(
                self._known, self._sorted.at, batch.text, starts, ends, at, count, *to
            )
            if at < 0:
                raise MemoryError
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
        if is_usual and self._last is None:
            what = _PASSED_OVER
        elif is_usual and self._last is not None:
            row, kind = self._last
            if kind.own_args is None or kind.is_allocation:
                what = _ALLOCATION if kind.is_allocation else _ROW
                has_launch = kind.launch is not None
                rules = self._places_of(kind.rules)
                # The id of a flow goes between the quotes at the end.
                flow = flow_text(*kind.flow, "")[:-2] if kind.flow else b""
                texts = row.first, packed(kind.ahead)[1:-1], flow
        sizes = (ctypes.c_int64 * len(texts))(*map(len, texts))
        pointers = (ctypes.c_char_p * len(texts))(*texts)
        if self._core.tp_events_kind(self._known, what, has_launch, *rules, pointers, sizes) < 0:
            raise MemoryError
        self._kinds_count += 1

    def _places_of(self, rules: Rules) -> tuple[int, int]:
        key = tuple(rules.items())
        places = self._rules.get(key)
        if places is None:
            start = self._rules_count
            for old, new in key:
                texts = packed(old), packed(new) if new is not None else b""
                sized = (part for text in texts for part in (text, len(text)))
                self._rules_count = self._core.tp_events_rule(self._known, *sized)
                if self._rules_count < 0:
                    raise MemoryError
            places = self._rules[key] = start, self._rules_count
        return places
