"""Decides the layer, the row and the fields of events of Chrome's trace format, by category.

of PyTorch (Kineto)                         here
user_annotation                             annotation
cpu_op                                      annotation of the domain cpu_op
cuda_runtime, cuda_driver                   userspace; launches by `correlation`
kernel, gpu_memcpy, gpu_memset              gpu_kernel, transfer: on their stream, with `launch`
python_function and all others              hook: a layer of that name
of VizTracer: FEE, INSTANT and all others   hook, the layer `python`
of other tools: all categories              hook, the layer `events`: they nest in each other
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from tracepipe.event.model import ID_LIMIT
from tracepipe.event.vocabulary import direction_named
from tracepipe.readers.chrome_numbers import Ids

EVENTS: Final = "events"
"""The layer of events that are neither from PyTorch nor from VizTracer."""
PYTHON: Final = "python"
"""The layer of VizTracer's events: calls of Python and C, and logs of the program."""
# The categories of its calls and logs. Newer versions write them in lower case when they run a program.
_OF_VIZTRACER: Final = frozenset({"FEE", "fee", "INSTANT", "instant"})
_CALLS: Final = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime"})
_KERNELS: Final = frozenset({"kernel"})
_COPIES: Final = frozenset({"gpu_memcpy", "memcpy"})
_SETS: Final = frozenset({"gpu_memset", "memset"})
_ON_GPU: Final = frozenset({"gpu_user_annotation", "cuda_sync", "cuda_event"})
LAUNCHES = re.compile(r"Launch|[Mm]emcpy|[Mm]emset|MemPrefetch")
"""Calls that put work on a stream."""
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
    """What is kept of an event but its time and length: fields of its record, and its arguments.

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


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= ID_LIMIT


def _size(value: object) -> tuple[int, ...] | None:
    """A grid or a block."""
    if type(value) is not list or len(value) != 3 or not all(map(_is_id, value)):
        return None
    return tuple(value)


@cache
def _rules_of_work(stated: frozenset[str]) -> Rules:
    """The rules for work on a GPU, some of whose arguments are fields of its record."""
    return {**_RENAMED, **dict.fromkeys(stated)}


class Kinds:
    """Decides the kinds of events from PyTorch (`is_kineto`, with this `rank`), VizTracer or another tool."""

    def __init__(
        self, ids: Ids, *, is_kineto: bool = False, is_viztracer: bool = False, rank: int = 0
    ) -> None:
        self._ids, self._is_kineto = ids, is_kineto
        self.launch_bits = rank << _RANK_SHIFT
        """The bits of a launch's number above its correlation."""
        self._layer = PYTHON if is_viztracer else EVENTS
        self._of: Mapping[str, Callable[[dict[str, Any], str, dict[str, Any]], Kind]] = (
            {
                **dict.fromkeys(_CALLS, self._call),
                **dict.fromkeys(_KERNELS, self._kernel),
                **dict.fromkeys(_COPIES, self._copy),
                **dict.fromkeys(_SETS, self._copy),
                **dict.fromkeys(_ON_GPU, self._of_gpu),
                "user_annotation": self._annotation,
                "cpu_op": self._operator,
                "operator": self._operator,
                "fwdbwd": self._operator,
                "cpu_instant_event": self._instant,
            }
            if is_kineto
            else {}
        )

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

    def _annotation(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        return Kind(self._thread(event, type="annotation"))

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

    def _kernel(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        return self._work(event, category, args, {"type": "gpu_kernel"})

    def _copy(self, event: dict[str, Any], category: str, args: dict[str, Any]) -> Kind:
        name = str(event.get("name"))
        found = _COPY.match(name)
        called = direction_named(found[1]) if found else "memset" if name.startswith("Memset") else name
        kind = self._work(event, category, args, {"type": "transfer", "name": called})
        kind.ahead |= {"operation": name} if called != name else {}
        return kind

    def _work(
        self, event: dict[str, Any], category: str, args: dict[str, Any], fields: dict[str, Any]
    ) -> Kind:
        place = self._place(event, args)
        if place is None:
            return self._other(event, category, args)
        fields["gpu"], fields["stream"] = place
        launch = self._launch(args)
        stated = {"device", "stream", "correlation"} if launch is not None else {"device", "stream"}
        for key in ("grid", "block"):
            if (size := _size(args.get(key))) is not None:
                fields[key] = size
                stated.add(key)
        return Kind(fields, launch, _rules_of_work(frozenset(stated)))

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
