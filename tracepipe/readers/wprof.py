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

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final

import orjson

from tracepipe.event.columns import SourceBatch, no_events
from tracepipe.event.model import ID_LIMIT, MASK_LIMIT, TIME_LIMIT_NS, Problem, Record, new_header
from tracepipe.event.tables import packed
from tracepipe.event.vocabulary import RUNNING, WAKEUP, direction_named
from tracepipe.readers.ids import LAUNCHES
from tracepipe.readers.recording import (
    BOM,
    TOO_DEEP,
    Recording,
    chunks_of_lines,
    cut_text,
    is_too_deep,
    not_json,
)
from tracepipe.readers.sorted_events import RowColumns, SortedEvents, batches_of
from tracepipe.units import counted

_SECOND_NS: Final = 10**9
_NAMES_MAX: Final = 1 << 16
# The states as a capture writes them.
_STATES: Final = {
    "interruptible_sleep": "sleeping",
    "uninterruptible_sleep": "disk",
    "killable_sleep": "disk",
    "rtlock_wait": "disk",
    "exit_dead": "dead",
    "task_dead": "dead",
    "exit_zombie": "zombie",
}
_LAYERS: Final = {
    "timer": "samples",
    "pmu_event": "samples",
    "hardirq": "interrupts",
    "softirq": "interrupts",
    "ipi": "interrupts",
    "ipi_send": "interrupts",
    "wq": "workqueues",
    "scx_dsq": "sched_ext",
    "fork": "tasks",
    "exec": "tasks",
    "task_rename": "tasks",
    "task_exit": "tasks",
    "task_free": "tasks",
    "req_event": "requests",
    "req_task_event": "requests",
}
_CALLS: Final = ("pytrace", "pytorch", "utrace")
_LEAVES, _IS_WOKEN, _BEGINS = 0, 1, 2  # the order of events at the same time
_OF_ALL: Final = frozenset({"ts", "t", "task", "cpu", "dur", "start_ts", "name", "args"})
_OF_SWITCH: Final = _OF_ALL | {"prev", "next", "prev_state", "prev_prio", "next_prio", "pmus"}
_OF_WAKEUP: Final = _OF_ALL | {"waker", "wakee"}
_OF_WORK: Final = _OF_ALL | {"device_id", "stream_id", "corr_id"}
_NAMED_BY: Final = ("name", "action", "kind", "desc", "pmu", "filename", "insert_type")


class Unusable(Exception):
    """An event cannot be used, because of a field and what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field, self.message = field, message


def _whole(value: object) -> int | None:
    return int(value) if type(value) is int and 0 <= value <= ID_LIMIT else None


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


class WprofEvents:
    """Takes events. `pmus` are the names of counters, in the order of an event's values."""

    def __init__(self) -> None:
        self.sorted = SortedEvents()
        self.pmus: list[Any] = []
        self.stacks: dict[int, bytes] = {}
        """The frames of stacks by id, as JSON."""
        self.names: dict[tuple[int, int | None], str] = {}
        self.without_stack = self.early = self.names_left_out = 0
        self._of: dict[str, Callable[[str, dict[str, Any], int], None]] = {
            "switch": self._switch,
            "waking": self._waking,
            "wakeup_new": self._waking,
            "cuda_api": self._call,
            "cuda_kernel": self._work,
            "cuda_memcpy": self._work,
            "cuda_memset": self._work,
            **{f"{what}_{end}": self._end for what in _CALLS for end in ("entry", "exit")},
        }

    def take(self, event: dict[str, Any]) -> None:
        """Take an event. Raises Unusable."""
        kind = event.get("t")
        if type(kind) is not str or not kind:
            raise Unusable("t", "is missing, or not a string")
        ts_ns = ns_of_seconds(event.get("ts"))
        if ts_ns is None or ts_ns < 0:
            raise Unusable("ts", "is missing" if "ts" not in event else "is not a time that a trace can have")
        self._of.get(kind, self._other)(kind, event, ts_ns)

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
        fields = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
        for id, name in ((tid, task.get("comm")), (None, task.get("pcomm"))):
            of = (pid, id)
            if type(name) is str and (id is not None or key == "task"):
                if of in self.names or len(self.names) < _NAMES_MAX:
                    self.names[of] = cut_text(name)
                else:
                    self.names_left_out += 1
        return fields

    def _args(self, event: dict[str, Any], known: frozenset[str] = _OF_ALL) -> dict[str, Any]:
        """All members of an event but the known fields."""
        args = {key: value for key, value in event.items() if key not in known}
        if type(event.get("args")) is dict:
            args |= event["args"]
        values = args.get("pmus")
        if type(values) is list and len(values) == len(self.pmus):
            del args["pmus"]
            args |= {str(name): value for name, value in zip(self.pmus, values, strict=True)}
        for key in ("stack_id", "offcpu_stack_id", "waker_stack_id"):
            if key in args:
                frames = self.stacks.get(args[key]) if type(args[key]) is int else None
                self.without_stack += frames is None
                if frames is not None:
                    args[key.removesuffix("_id")] = orjson.Fragment(frames)
        return args

    def _span(self, event: dict[str, Any], ts_ns: int, args: dict[str, Any]) -> tuple[int, int]:
        """Start and length of a slice that ended at a time."""
        dur_ns = ns_of_seconds(event.get("dur"))
        if dur_ns is None or dur_ns < 0:
            raise Unusable("dur", "is missing" if "dur" not in event else "is not a duration")
        start_ns = ts_ns - dur_ns
        if start_ns < 0:
            # It began before the session. Its length is known, but a trace begins at 0.
            args["began_before_ns"] = -start_ns
            self.early += 1
            return 0, ts_ns
        return start_ns, dur_ns

    # By type --------------------------------------------------------------------------------------------

    def _switch(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        cpu = _whole(event.get("cpu"))
        if cpu is None:
            raise Unusable("cpu", "is missing, or not a processor number")
        parts = self._task(event, "prev"), self._task(event, "next")
        state = event.get("prev_state")
        left = {
            "prev_state": _STATES.get(state, state) if type(state) is str else state,
            "prio": event.get("prev_prio"),
            **({"pmus": event["pmus"]} if "pmus" in event else {}),
        }
        begun = {"prio": event.get("next_prio"), **self._args(event, _OF_SWITCH)}
        for fields, args, phase, rank in (
            (parts[0], self._args(left), "E", _LEAVES),
            (parts[1], begun, "B", _BEGINS),
        ):
            if fields["pid"] == 0:
                continue  # an idle processor runs nothing
            record = {"type": "scheduler", "name": RUNNING, "phase": phase, "cpu": cpu, **fields}
            self.sorted.add(
                ts_ns, record, {key: value for key, value in args.items() if value is not None}, rank=rank
            )

    def _waking(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        fields, waker = self._task(event, "wakee"), self._task(event, "waker")
        args = {
            "by_tid": waker.get("tid", 0) if waker["pid"] else 0,
            **self._args(event, _OF_WAKEUP),
        }
        if kind != "waking":
            args["is_new"] = True
        record = {"type": "scheduler", "name": WAKEUP, "phase": "I", **fields}
        if (cpu := _whole(event.get("cpu"))) is not None:
            record["cpu"] = cpu
        self.sorted.add(ts_ns, record, args, rank=_IS_WOKEN)

    def _launch(self, event: dict[str, Any], pid: int) -> int | None:
        number = event.get("corr_id")
        return pid << 32 | number if type(number) is int and 0 < number <= MASK_LIMIT else None

    def _call(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        fields, args, name = self._task(event, "task"), self._args(event), _name(event, kind)
        start_ns, dur_ns = self._span(event, ts_ns, args)
        launch = self._launch(event, fields["pid"]) if LAUNCHES.search(name) else None
        record = {"type": "userspace", "name": name, "phase": "X", **fields}
        self.sorted.add(start_ns, record, args, rank=_BEGINS, dur_ns=dur_ns, launch=launch)

    def _work(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        pid = self._task(event, "task")["pid"]
        gpu, stream = _whole(event.get("device_id")), _whole(event.get("stream_id"))
        if gpu is None or stream is None:
            raise Unusable("device_id" if gpu is None else "stream_id", "is missing, or not an integer")
        args = self._args(event, _OF_WORK)
        if "byte_cnt" in args:
            args["size"] = args.pop("byte_cnt")
        record: dict[str, Any] = {"phase": "X", "pid": pid, "gpu": gpu, "stream": stream}
        if kind == "cuda_kernel":
            record |= {"type": "gpu_kernel", "name": _name(event, kind)}
            for key in ("grid", "block"):
                size = args.get(key)
                if type(size) is list and len(size) == 3 and all(_whole(one) is not None for one in size):
                    record[key] = args.pop(key)
        else:
            name = direction_named(str(event.get("kind"))) if kind == "cuda_memcpy" else "memset"
            record |= {"type": "transfer", "name": name}
        start_ns, dur_ns = self._span(event, ts_ns, args)
        self.sorted.add(start_ns, record, args, rank=_BEGINS, dur_ns=dur_ns, launch=self._launch(event, pid))

    def _end(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        what, _, end = kind.partition("_")
        is_torch = what == "pytorch"
        record: dict[str, Any] = {
            "type": "annotation" if is_torch else "hook",
            "name": _name(event, what),
            "phase": "B" if end == "entry" else "E",
            **self._task(event, "task"),
            **({"domain": "cpu_op"} if is_torch else {"layer": "python" if what == "pytrace" else "utrace"}),
        }
        self.sorted.add(ts_ns, record, self._args(event), rank=_BEGINS)

    def _other(self, kind: str, event: dict[str, Any], ts_ns: int) -> None:
        args = self._args(event)
        layer = _LAYERS.get(kind, "utrace" if kind == "utrace_instant" else kind)
        named = next((event[key] for key in _NAMED_BY if type(event.get(key)) is str), kind)
        name = (
            f"{event['event']} {event.get('req_name', '')}".rstrip()
            if type(event.get("event")) is str
            else named
        )
        if layer == "tasks":
            name = kind
        elif layer == "interrupts" and kind != "hardirq":
            name = f"{kind} {name}"
        record = {"type": "hook", "name": name, "layer": layer, **self._task(event, "task")}
        if "dur" in event:
            start_ns, dur_ns = self._span(event, ts_ns, args)
            self.sorted.add(start_ns, record | {"phase": "X"}, args, rank=_BEGINS, dur_ns=dur_ns)
        else:
            self.sorted.add(ts_ns, record | {"phase": "I"}, args, rank=_IS_WOKEN)


CLOCK: Final = "trace"
_CHUNK_BYTES: Final = 1 << 18
# The most bytes of stacks that are kept. A session has some thousand stacks of some 2 KB.
_STACK_BYTES_MAX: Final = 4 << 20
_FRAMES_MAX: Final = 128
_KEYS: Final = (b'"timer_freq_hz"', b'"stack_cnt"')


class _Trace:
    """Turns one session into batches."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._in_columns = RowColumns()
        self.tables = self._in_columns.tables
        self._events = WprofEvents()
        self._stack_bytes = self._stacks_left_out = 0

    def batches(self) -> Iterator[SourceBatch]:
        """Batches with problems while lines are read, and then the events in the order of their starts."""
        for number, lines, offset_bytes, cut in chunks_of_lines(self._stream, _CHUNK_BYTES):
            problems = [
                Problem(at, *fault)
                for at, text in enumerate(lines, number)
                if (
                    fault := self._line(
                        at, text.removeprefix(BOM).strip(), cut and at == number + len(lines) - 1
                    )
                )
            ]
            yield SourceBatch(no_events(), problems=problems, offset_bytes=offset_bytes)
        in_order = self._events.sorted.rows.in_order()
        columns = (self._in_columns.columns(rows, rows.ts_ns) for rows in in_order)
        yield from batches_of(columns, [*self._names()], [], self._stated())

    def _line(self, number: int, text: bytes, cut: bool) -> tuple[str, str] | None:
        """Take a line. Return the field and what is wrong with it, or None."""
        if not text:
            return None
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError as e:
            return "", "was cut off in the middle of the line" if cut else not_json(e)
        if type(line) is not dict:
            return "", "is not a JSON object"
        if is_too_deep(text, line):
            return "", TOO_DEEP
        if "t" not in line and "timer_freq_hz" in line:
            pmus = line.get("pmus")
            self._events.pmus = pmus if type(pmus) is list else []
            return None
        if "t" not in line and "frames" in line:
            return self._stack(line, len(text))
        try:
            self._events.take(line)
        except Unusable as e:
            return e.field, e.message
        return None

    def _stack(self, line: dict[str, Any], size_bytes: int) -> tuple[str, str] | None:
        id, frames, places = line.get("id"), line.get("frames"), line.get("srcs")
        if type(id) is not int:
            return "id", "is not an integer"
        if type(frames) is not list or not all(type(frame) is str for frame in frames):
            return "frames", "is not a list of strings"
        if self._stack_bytes + size_bytes > _STACK_BYTES_MAX:
            self._stacks_left_out += 1
            return None
        self._stack_bytes += size_bytes
        if type(places) is list and len(places) == len(frames):
            frames = [
                f"{frame} {place}" if place else frame for frame, place in zip(frames, places, strict=True)
            ]
        self._events.stacks[id] = packed(frames[-_FRAMES_MAX:])
        return None

    def _names(self) -> Iterator[Record]:
        for (pid, tid), name in self._events.names.items():
            yield {"type": "name", "pid": pid, "name": name} | ({} if tid is None else {"tid": tid})

    def _stated(self) -> Iterator[Problem]:
        stated = {
            "event|events refers|refer to a stack that is missing": self._events.without_stack,
            "stack|stacks is|are left out: there are more than can be kept": self._stacks_left_out,
            "task|tasks has|have a name that is left out: there are more than can be kept": (
                self._events.names_left_out
            ),
            "slice|slices began before the session: drawn from there (args.began_before_ns)": (
                self._events.early
            ),
        }
        for words, count in stated.items():
            if count:
                yield Problem(0, "", counted(count, words), skipped=False)


def sniff(head: bytes) -> bool:
    """Whether the first line is the header of wprof."""
    first = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    return first.startswith(b"{") and all(key in first for key in _KEYS)


def read(stream: BinaryIO) -> Recording:
    """Header and batches of such a stream."""
    trace = _Trace(stream)
    header = new_header(clock=CLOCK, clocks=[CLOCK], engine="wprof")
    return Recording(header, trace.batches(), trace.tables)
