"""Reads the JSON Lines of wprof (`--json-trace`).

    {"version":"3.1","dur":1.000000000,"timer_freq_hz":997,…,"stack_cnt":42,"pmus":["cycles"]}
    {"id":42,"frames":["[U] main+0x1a","[K] schedule+0x8e"],"srcs":["main.c:42",""]}      stack_cnt of them
    {"ts":0.500123456,"t":"switch","prev":{…},"next":{…},"cpu":3,…}                       in the order of `ts`

switch                        scheduler: one thread's `running` ends, another's begins
waking, wakeup_new            scheduler I: `wakeup`
timer, pmu_event              hook I, the layer `samples`
hardirq, softirq, ipi         hook X, the layer `interrupts`; ipi_send I
wq, scx_dsq                   hook X, the layers `workqueues`, `sched_ext`
fork, exec, task_…            hook I, the layer `tasks`
req_event, req_task_event     hook I, the layer `requests`
cuda_api                      userspace X with `launch`
cuda_kernel                   gpu_kernel X with `launch`
cuda_memcpy, cuda_memset      transfer X with `launch`
cuda_sync, cuda_overhead      hook X, layers of these names
pytrace_entry, _exit          hook B, E, the layer `python`
pytorch_entry, _exit          annotation B, E of the domain `cpu_op`
utrace_entry, _exit, _instant hook B, E, I, the layer `utrace`
others                        hook, the layer of that name: X where they have a length, else I

Times are seconds since the start of the session, on a clock that the header does not name. `ts` of a slice is
its end, so events are sorted by their starts, in temporary files without names if there are many. An idle
task belongs to a processor: process 0, with the number of the processor as thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final

import orjson

from tracepipe.event.columns import SourceBatch
from tracepipe.event.model import MASK_LIMIT, TIME_LIMIT_NS, Record
from tracepipe.event.tables import packed
from tracepipe.event.vocabulary import RUNNING, WAKEUP, direction_named
from tracepipe.readers.ids import LAUNCHES, is_id, is_size
from tracepipe.readers.recording import (
    BOM,
    TOO_DEEP,
    LineReader,
    Recording,
    Unusable,
    counted_problems,
    is_too_deep,
    not_json,
)
from tracepipe.readers.sorted_rows import SortedEvents, batches_of

CLOCK: Final = "trace"
# The most bytes of stacks that are kept. A session has some thousand stacks of some 2 KB.
_STACK_BYTES_MAX: Final = 4 << 20
_FRAMES_MAX: Final = 128
_NAMES_MAX: Final = 1 << 16
_KEYS: Final = (b'"timer_freq_hz"', b'"stack_cnt"')
_SECOND_NS: Final = 10**9
# The states as a capture writes them.
_STATES: Final = {
    "interruptible_sleep": "sleeping", "uninterruptible_sleep": "disk", "killable_sleep": "disk",
    "rtlock_wait": "disk", "exit_dead": "dead", "task_dead": "dead", "exit_zombie": "zombie",
}  # fmt: skip
_LAYERS: Final = {
    **dict.fromkeys(("timer", "pmu_event"), "samples"),
    **dict.fromkeys(("hardirq", "softirq", "ipi", "ipi_send"), "interrupts"),
    "wq": "workqueues",
    "scx_dsq": "sched_ext",
    **dict.fromkeys(("fork", "exec", "task_rename", "task_exit", "task_free"), "tasks"),
    **dict.fromkeys(("req_event", "req_task_event"), "requests"),
    "utrace_instant": "utrace",
}
_CALLS: Final = ("pytrace", "pytorch", "utrace")
_LEAVES, _IS_WOKEN, _BEGINS = 0, 1, 2  # the order of events at the same time
_OF_ALL: Final = frozenset({"ts", "t", "task", "cpu", "dur", "start_ts", "name", "args"})
_OF_SWITCH: Final = _OF_ALL | {"prev", "next", "prev_state", "prev_prio", "next_prio", "pmus"}
_OF_WAKEUP: Final = _OF_ALL | {"waker", "wakee"}
_OF_WORK: Final = _OF_ALL | {"device_id", "stream_id", "corr_id"}
_NAMED_BY: Final = ("name", "action", "kind", "desc", "pmu", "filename", "insert_type")
_NO_STACK: Final = "event|events refers|refer to a stack that is missing"
_STACKS_LEFT_OUT: Final = "stack|stacks is|are left out: there are more than can be kept"
_NAMES_LEFT_OUT: Final = "task|tasks has|have a name that is left out: there are more than can be kept"
_EARLY: Final = "slice|slices began before the session: drawn from there (args.began_before_ns)"


def _whole(value: object) -> int | None:
    return value if is_id(value) else None


def ns_of_seconds(value: object) -> int | None:
    """Nanoseconds of seconds with nine decimals; None where a trace cannot have such a time."""
    if not (type(value) is int or type(value) is float) or not abs(value) < TIME_LIMIT_NS // _SECOND_NS:
        return None
    ns: int = round(value * _SECOND_NS)
    return ns


def _name(event: dict[str, Any], without: str) -> str:
    """The name of an event, or `without` where it has none."""
    name = event.get("name")
    return name if type(name) is str and name else without


class _Session(LineReader):
    """Reads one session."""

    chunk_bytes = 1 << 18

    def __init__(self) -> None:
        super().__init__()
        self.has_lines = True  # there is the header
        self._events = SortedEvents()
        self.tables = self._events.tables
        self._pmus: list[Any] = []
        """The names of counters, in the order of an event's values."""
        self._stacks: dict[int, bytes] = {}
        """The frames of stacks by id, as JSON."""
        self._stack_bytes = 0
        self._names: dict[tuple[int, int | None], str] = {}
        self._counted = Counter({_NO_STACK: 0, _STACKS_LEFT_OUT: 0, _NAMES_LEFT_OUT: 0, _EARLY: 0})
        self._of_type: dict[str, Callable[[str, dict[str, Any], int], None]] = {
            "switch": self._switch,
            "waking": self._waking,
            "wakeup_new": self._waking,
            "cuda_api": self._call,
            "cuda_kernel": self._work,
            "cuda_memcpy": self._work,
            "cuda_memset": self._work,
            **{f"{what}_{end}": self._end for what in _CALLS for end in ("entry", "exit")},
        }

    def batches(self, stream: BinaryIO) -> Iterator[SourceBatch]:
        """Batches with problems while lines are read, and then the events in the order of their starts."""
        yield from super().batches(stream)
        names: list[Record] = [
            {"type": "name", "pid": pid, "name": name} | ({} if tid is None else {"tid": tid})
            for (pid, tid), name in self._names.items()
        ]
        columns = (self._events.columns(rows, rows.ts_ns) for rows in self._events.rows.in_order())
        yield from batches_of(columns, [*names], [], counted_problems(self._counted))

    def read_line(self, text: bytes, is_cut: bool) -> None:
        """Read a line. Raises Unusable."""
        text = text.removeprefix(BOM).strip()
        if not text:
            return
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError as e:
            wrong = not_json(e)
            raise Unusable("", "was cut off in the middle of the line" if is_cut else wrong) from e
        if type(line) is not dict:
            raise Unusable("", "is not a JSON object")
        if is_too_deep(text, line):
            raise Unusable("", TOO_DEEP)
        if "t" not in line and "timer_freq_hz" in line:
            pmus = line.get("pmus")
            self._pmus = pmus if type(pmus) is list else []
            return
        if "t" not in line and "frames" in line:
            self._read_stack(line, len(text))
            return
        kind = line.get("t")
        if type(kind) is not str or not kind:
            raise Unusable("t", "is missing, or not a string")
        ts_ns = ns_of_seconds(line.get("ts"))
        if ts_ns is None or ts_ns < 0:
            raise Unusable("ts", "is missing" if "ts" not in line else "is not a time that a trace can have")
        self._of_type.get(kind, self._other)(kind, line, ts_ns)

    def _read_stack(self, line: dict[str, Any], size_bytes: int) -> None:
        id, frames, sources = line.get("id"), line.get("frames"), line.get("srcs")
        if type(id) is not int:
            raise Unusable("id", "is not an integer")
        if type(frames) is not list or not all(type(frame) is str for frame in frames):
            raise Unusable("frames", "is not a list of strings")
        if self._stack_bytes + size_bytes > _STACK_BYTES_MAX:
            self._counted[_STACKS_LEFT_OUT] += 1
            return
        self._stack_bytes += size_bytes
        if type(sources) is list and len(sources) == len(frames):
            both = zip(frames, sources, strict=True)
            frames = [f"{frame} {source}" if source else frame for frame, source in both]
        self._stacks[id] = packed(frames[-_FRAMES_MAX:])

    # What many have -------------------------------------------------------------------------------------

    def _task(self, event: dict[str, Any], key: str) -> dict[str, Any]:
        """The process and the thread of a task."""
        task = event.get(key)
        if type(task) is not dict:
            raise Unusable(key, "is missing, or not a task")
        pid, tid = _whole(task.get("pid")), _whole(task.get("tid"))
        if pid is None:
            raise Unusable(f"{key}.pid", "is not a process id")
        if tid is None and pid == 0:
            tid = _whole(event.get("cpu"))
        for id, name in ((tid, task.get("comm")), (None, task.get("pcomm"))):
            if type(name) is str and (id is not None or key == "task"):
                if (pid, id) in self._names or len(self._names) < _NAMES_MAX:
                    self._names[pid, id] = self.tables.long_names.cut(name)
                else:
                    self._counted[_NAMES_LEFT_OUT] += 1
        return {"pid": pid} if tid is None else {"pid": pid, "tid": tid}

    def _args(self, event: dict[str, Any], known: frozenset[str] = _OF_ALL) -> dict[str, Any]:
        """All members of an event but the known fields."""
        args = {key: value for key, value in event.items() if key not in known}
        if type(event.get("args")) is dict:
            args |= event["args"]
        values = args.get("pmus")
        if type(values) is list and len(values) == len(self._pmus):
            del args["pmus"]
            args |= {str(name): value for name, value in zip(self._pmus, values, strict=True)}
        for key in ("stack_id", "offcpu_stack_id", "waker_stack_id"):
            if key in args:
                frames = self._stacks.get(args[key]) if type(args[key]) is int else None
                self._counted[_NO_STACK] += frames is None
                if frames is not None:
                    args[key.removesuffix("_id")] = orjson.Fragment(frames)
        return args

    def _add_slice(
        self,
        event: dict[str, Any],
        ts_ns: int,
        record: dict[str, Any],
        args: dict[str, Any],
        launch: int | None = None,
    ) -> None:
        """Add a slice that ended at a time."""
        dur_ns = ns_of_seconds(event.get("dur"))
        if dur_ns is None or dur_ns < 0:
            raise Unusable("dur", "is missing" if "dur" not in event else "is not a duration")
        start_ns = ts_ns - dur_ns
        if start_ns < 0:
            # It began before the session. Its length is known, but a trace begins at 0.
            args["began_before_ns"] = -start_ns
            self._counted[_EARLY] += 1
            start_ns, dur_ns = 0, ts_ns
        record["phase"] = "X"
        self._events.add(start_ns, record, args, rank=_BEGINS, dur_ns=dur_ns, launch=launch)

    # By type --------------------------------------------------------------------------------------------

    def _switch(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        cpu = _whole(event.get("cpu"))
        if cpu is None:
            raise Unusable("cpu", "is missing, or not a processor number")
        leaving, beginning = self._task(event, "prev"), self._task(event, "next")
        state = event.get("prev_state")
        left = {
            "prev_state": _STATES.get(state, state) if type(state) is str else state,
            "prio": event.get("prev_prio"),
            **({"pmus": event["pmus"]} if "pmus" in event else {}),
        }
        begun = {"prio": event.get("next_prio"), **self._args(event, _OF_SWITCH)}
        for task, args, phase, rank in (
            (leaving, self._args(left), "E", _LEAVES),
            (beginning, begun, "B", _BEGINS),
        ):
            if task["pid"] != 0:  # an idle processor runs nothing
                record = {"type": "scheduler", "name": RUNNING, "phase": phase, "cpu": cpu, **task}
                args = {key: value for key, value in args.items() if value is not None}
                self._events.add(ts_ns, record, args, rank=rank)

    def _waking(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        task, waker = self._task(event, "wakee"), self._task(event, "waker")
        args = {"by_tid": waker.get("tid", 0) if waker["pid"] else 0, **self._args(event, _OF_WAKEUP)}
        if kind != "waking":
            args["is_new"] = True
        record = {"type": "scheduler", "name": WAKEUP, "phase": "I", **task}
        if (cpu := _whole(event.get("cpu"))) is not None:
            record["cpu"] = cpu
        self._events.add(ts_ns, record, args, rank=_IS_WOKEN)

    def _launch(self, event: dict[str, Any], pid: int) -> int | None:
        number = event.get("corr_id")
        return pid << 32 | number if type(number) is int and 0 < number <= MASK_LIMIT else None

    def _call(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        task, args, name = self._task(event, "task"), self._args(event), _name(event, kind)
        launch = self._launch(event, task["pid"]) if LAUNCHES.search(name) else None
        self._add_slice(event, ts_ns, {"type": "userspace", "name": name, **task}, args, launch)

    def _work(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        pid = self._task(event, "task")["pid"]
        gpu, stream = _whole(event.get("device_id")), _whole(event.get("stream_id"))
        if gpu is None or stream is None:
            raise Unusable("device_id" if gpu is None else "stream_id", "is missing, or not an integer")
        args = self._args(event, _OF_WORK)
        if "byte_cnt" in args:
            args["size"] = args.pop("byte_cnt")
        record: dict[str, Any] = {"pid": pid, "gpu": gpu, "stream": stream}
        if kind == "cuda_kernel":
            record |= {"type": "gpu_kernel", "name": _name(event, kind)}
            for key in ("grid", "block"):
                if is_size(args.get(key)):
                    record[key] = args.pop(key)
        else:
            name = direction_named(str(event.get("kind"))) if kind == "cuda_memcpy" else "memset"
            record |= {"type": "transfer", "name": name}
        self._add_slice(event, ts_ns, record, args, self._launch(event, pid))

    def _end(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        what, _, end = kind.partition("_")
        record: dict[str, Any] = {
            "name": _name(event, what),
            "phase": "B" if end == "entry" else "E",
            **self._task(event, "task"),
        }
        if what == "pytorch":
            record |= {"type": "annotation", "domain": "cpu_op"}
        else:
            record |= {"type": "hook", "layer": "python" if what == "pytrace" else "utrace"}
        self._events.add(ts_ns, record, self._args(event), rank=_BEGINS)

    def _other(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        args = self._args(event)
        layer = _LAYERS.get(kind, kind)
        name = next((event[key] for key in _NAMED_BY if type(event.get(key)) is str), kind)
        if type(event.get("event")) is str:
            name = f"{event['event']} {event.get('req_name', '')}".rstrip()
        if layer == "tasks":
            name = kind
        elif layer == "interrupts" and kind != "hardirq":
            name = f"{kind} {name}"
        record = {"type": "hook", "name": name, "layer": layer, **self._task(event, "task")}
        if "dur" in event:
            self._add_slice(event, ts_ns, record, args)
        else:
            self._events.add(ts_ns, record | {"phase": "I"}, args, rank=_IS_WOKEN)


def sniff(head: bytes) -> bool:
    """Whether the first line is the header of wprof."""
    first = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    return first.startswith(b"{") and all(key in first for key in _KEYS)


def read(stream: BinaryIO) -> Recording:
    """The recording in such a stream."""
    return _Session().recording(CLOCK, stream, engine="wprof")
