"""Writes the JSON Lines of layered CUDA tracers on bpftrace and BCC, for the scripts that read those.

    {"event_id":1,"ts":0.001000,"type":"userspace","name":"cuMemAlloc_v2","phase":"B","pid":7,"tid":7,…}
    {"event_id":2,"ts":0.004500,"type":"userspace","name":"cuMemAlloc_v2","phase":"E",…,"duration_us":3.5}
    {"event_id":3,"ts":0.004500,"type":"memory","op":"alloc","pid":7,"tid":7,"size":4096,"size_bytes":4096}
    {"event_id":4,"ts":0.104500,"type":"transfer","direction":"H2D",…,"duration_ms":0.1,"start_ts":0.0045}
    {"event_id":5,"ts":0.200000,"type":"userspace","name":"cuLaunchKernel","phase":"B",…,"grid":[64,1,1],…}
    {"event_id":6,"ts":0.200000,"type":"kernel","op":"launch","name":"cuLaunchKernel",…,"of_event":5}
    {"event_id":7,"ts":0.210750,"type":"gpu_thread_exit","kernel":"k","device":0,"block":[…],"thread":[31,0,0]}

`ts` is milliseconds since the start of the trace. Arguments are among the other keys. A line without a phase
is an instant, or has the length and the start of what ends at its time. A launch has an additional line, as
those tools print one; its `of_event` refers to the begin that it repeats. A warp has a line for the entry and
the exit of each of its lanes. Losses are lines as in `bpftrace -f json`.
"""

from __future__ import annotations

import math
from typing import Any, BinaryIO, Final

from tracepipe.converters.lanes import has_indices, threads_of
from tracepipe.converters.line_writer import LineWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.event.columns import Three, TraceBatch
from tracepipe.event.model import HOST_LAYERS
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, Tables
from tracepipe.event.vocabulary import MEMORY_IN_USE, SIZE_KEYS
from tracepipe.event.warps import PlacedWarps
from tracepipe.printable import json_text

# Arguments must not have these names, which the format uses for something else.
_OWN_KEYS: Final = frozenset(
    {
        "event_id", "ts", "type", "name", "phase", "pid", "tid", "cpu", "comm", "op", "duration_us",
        "duration_ms", "of_event", "start_ts",
    }
)  # fmt: skip
_OWN_KEYS_AND_LAYER: Final = _OWN_KEYS | {"layer"}
_WHO: Final = ("pid", "tid", "cpu", "comm")
_NO_ALLOCATIONS: Final = ("free", "free_host", "set")
_SHORT_WAYS: Final = {f"{a}to{b}": f"{a}2{b}" for a in "HDAP" for b in "HDAP"}


class LayeredWriter(LineWriter):
    """Writes events as they come."""

    loss = b'{"type":"lost_events","data":{"events":%d}}\n'
    what = "event|events"

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        super().__init__(out, info)
        self._event_id = 0

    def write_events(self, batch: TraceBatch, tables: Tables) -> None:
        """Write the events of a batch, on the trace's clock."""
        for at, ts_ns, dur_ns, shape, args in self._rows(batch, tables):
            if self._left_out(shape):
                continue
            if shape.type == "gpu_thread":
                self._thread(ts_ns, shape, batch.events.thread_of(at), tables.args(args))
            else:
                self._event(ts_ns, dur_ns if shape.has_dur else None, shape, tables.args(args))
        self._flush()

    def _warps(self, batch: PlacedWarps) -> bool:
        """Write the entries and exits of the lanes of warps."""
        if not has_indices(batch):
            return False
        launched = batch.launched
        line = {"kernel": launched.get("name", "kernel"), "device": launched.get("gpu", 0)}
        line |= {"pid": launched["pid"]} if "pid" in launched else {}
        for ts_ns, block, thread, is_exit in sorted(threads_of(batch)):
            where = line | {"block": list(block), "thread": list(thread)}
            kind = "gpu_thread_exit" if is_exit else "gpu_thread"
            self._line(ts_ns, {"type": kind} | where | ({} if is_exit else {"event": "entry"}))
        return True

    def _left_out(self, shape: Shape) -> str:
        if shape.type in HOST_LAYERS:
            return "copy|copies on a GPU" if shape.on_stream else ""
        return "" if shape.type == "gpu_thread" and shape.phase != "X" else f"{shape.type} event|events"

    def _thread(self, ts_ns: int, shape: Shape, of: tuple[Three | None, Three | None], args: Args) -> None:
        """Write an entry or exit of a GPU thread."""
        is_exit = shape.phase == "I" and args.get("event") == "exit"
        line: dict[str, Any] = {"type": "gpu_thread_exit" if is_exit else "gpu_thread", "kernel": shape.name}
        if is_exit:
            del args["event"]
        elif shape.phase != "I":
            line["phase"] = shape.phase
        line |= {"device": shape.gpu or 0} | ({} if shape.pid is None else {"pid": shape.pid})
        line |= {
            name: list(index)
            for name, index in zip(("block", "thread"), of, strict=True)
            if index is not None
        }
        more = self._arguments(shape, args)
        self._line(ts_ns, line | {f"{key}_" if key in line else key: value for key, value in more.items()})

    def _event(self, ts_ns: int, dur_ns: int | None, shape: Shape, args: Args) -> None:
        """Write an event, and the second line of a launch."""
        line: dict[str, Any] = {"phase": shape.phase} if shape.phase in "BE" else {}
        who = {key: value for key in _WHO if (value := getattr(shape, key)) is not None}
        line = self._named(shape) | line | who | self._arguments(shape, args)
        if shape.phase == "B":
            self._begin(ts_ns, shape, who, line)
            return
        pending = None
        if shape.phase == "E":
            begun = self._calls.end(_thread_of(shape), shape.name)
            if begun is not None:
                dur_ns, pending = ts_ns - begun.ts_ns, begun.pending
            if "result" in args:
                line["retval"] = args["result"]
        elif shape.phase == "X" and dur_ns is not None:
            line["start_ts"] = max(0, ts_ns - self._start_ns) / 1e6
            ts_ns += dur_ns
        if dur_ns is not None and dur_ns >= 0 and shape.phase in "EX":
            is_copy = shape.type == "transfer"
            line["duration_ms" if is_copy else "duration_us"] = dur_ns / (1e6 if is_copy else 1e3)
            if is_copy and isinstance(line.get("size"), int) and dur_ns > 0:
                line["bandwidth_gbps"] = line["size"] / dur_ns  # GB/s
        self._line(ts_ns, line)
        if pending is not None:
            self._line(*pending)

    def _begin(self, ts_ns: int, shape: Shape, who: dict[str, Any], line: dict[str, Any]) -> None:
        """Write a begin, and the second line of a launch by the driver API. That of a launch by the runtime
        is written at its end, if it had no launch by the driver API inside.
        """
        thread = _thread_of(shape)
        around = self._calls.around(thread)
        begun = self._calls.begin(thread, shape.name, ts_ns)
        event_id = self._line(ts_ns, line)
        if shape.type != "userspace" or not (_is_size(line.get("grid")) and _is_size(line.get("block"))):
            return
        sizes = {key: line[key] for key in ("grid", "block")}
        launch = {"type": "kernel", "op": "launch", "name": shape.name} | who | sizes
        launch |= {"threads": math.prod(line["grid"] + line["block"]), "of_event": event_id}
        if shape.name.startswith("cuda"):
            begun.pending = ts_ns, launch
            return
        self._line(ts_ns, launch)
        if around is not None:
            around.pending = None

    def _line(self, ts_ns: int, line: dict[str, Any]) -> int:
        """Write a line and return its number."""
        self._event_id += 1
        ms, ns = divmod(self._after_start_ns(ts_ns), 1_000_000)
        self._lines.append(
            b'{"event_id":%d,"ts":%d.%06d,' % (self._event_id, ms, ns) + json_text(line)[1:].encode() + b"\n"
        )
        return self._event_id

    def _named(self, shape: Shape) -> dict[str, Any]:
        """The keys for the type and the name of an event."""
        if shape.type == "memory" and shape.name == MEMORY_IN_USE:
            return {"type": MEMORY_IN_USE} | ({} if shape.gpu is None else {"gpu_id": shape.gpu})
        if shape.type == "memory":
            return {"type": "memory", "op": shape.name}
        if shape.type == "transfer":
            return {"type": "transfer", "direction": _SHORT_WAYS.get(shape.name, shape.name)}
        layer = {} if shape.layer is None else {"layer": shape.layer}
        return {"type": shape.type, "name": shape.name} | layer

    def _arguments(self, shape: Shape, args: Args) -> dict[str, Any]:
        """The arguments. Those with names that the format uses get other names."""
        if shape.type == "transfer":
            args.pop("direction", None)
        if "cmd" in args and isinstance(args.get("type"), str):  # an ioctl's command, taken apart
            args["decoded"] = {key: args.get(key) for key in ("dir", "type", "nr")} | {
                "size": args.get("size_bytes")
            }
            del args["type"]
            if shape.type == "kernel":
                args["ioctl_cmd"] = args["cmd"]
        if shape.type in ("memory", "transfer"):
            size = next((args[key] for key in SIZE_KEYS if key in args), None)
            args = args | ({} if size is None else {"size": size, "size_bytes": size})
            if shape.type == "memory" and shape.name in _NO_ALLOCATIONS:
                args.pop("size", None)  # scripts add the sizes of all lines of this type
        own = _OWN_KEYS if shape.layer is None else _OWN_KEYS_AND_LAYER
        return {f"{key}_" if key in own else key: value for key, value in args.items()}


def _thread_of(shape: Shape) -> tuple[Any, ...]:
    return shape.drawn_layer, shape.pid, shape.tid


def _is_size(value: object) -> bool:
    """Whether an argument is the size of a grid or a block."""
    return isinstance(value, list) and len(value) == 3 and all(isinstance(one, int) for one in value)
