"""Places the tracks of a Perfetto trace in processes, threads and layers.

    TrackDescriptor     1 uuid  5 parent  2 name (10 static, 13 atrace)  3 process  4 thread  8 counter
                        11 child_ordering  12 sibling_order_rank
    ProcessDescriptor   1 pid  2 cmdline…  6 name      ThreadDescriptor   1 pid  2 tid  5 name
    CounterDescriptor   1 type  3 unit  4 unit_multiplier  5 is_incremental  6 unit_name

a track that is         becomes
of a thread             the layer `events` of that thread
under a thread's        a layer by its name, and those of the tracks between
under a process's       a thread of that process by the name of the first, a layer by those of the others
under none              a process by the name of the first, a thread by that of the second, and so on

A process is identified by its machine, its pid and the uuid of its track: if a pid appears again with a new
uuid, that is another process. A thread is identified in the same way by its tid, but a new uuid means another
thread only if the name differs too. The first keeps the number. The others get numbers that the system does
not use, and names with the pid. Tracks, flows, processors and GPUs belong to their machine.

Each machine is a host, as in recordings that are merged: ids of processes and threads have a range for each,
the numbers of processors and GPUs continue from those of the machine before, and names of processes contain
the machine. Its name is stated by SystemInfo (17 machine_name, 1 utsname {3 release  4 machine}).

A counter belongs to its process, with the names of the tracks between. Groups that are not processes or
threads get numbers that the system does not use.

In traces that tracepipe wrote, slices on streams of GPUs become kernels and copies again. Such a trace has a
group `tracepipe` with the track `capture`. A GPU is a group `GPU N NAME`. The slices on that group, those on
a group `SM N` in it, the counter of how busy the GPU is, and the `CPU use` of a process are summaries of
other tracks. `stream N` is a track in a GPU. `stream N (overlap M)` is an overlap track: it becomes a
separate stream, so that each slice keeps its end.

Source: protos/perfetto/trace/track_event/track_descriptor.proto, process_descriptor.proto,
thread_descriptor.proto, counter_descriptor.proto.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, NamedTuple

import orjson

from tracepipe.event.counters import COUNTERS, SUMMARY
from tracepipe.event.model import (
    ID_LIMIT,
    RANGE_LIMIT,
    TIME_LIMIT_NS,
    Header,
    Problem,
    Record,
    cut_text,
)
from tracepipe.event.origins import IDS_PER_HOST, id_on
from tracepipe.event.tables import LongNames
from tracepipe.readers.ids import Ids, flow_number, is_size
from tracepipe.readers.perfetto_lives import TRACK, TREE_PROCESS, TREE_THREAD, Lives, Noted, Process, Thread
from tracepipe.readers.wire_fields import BYTES, signed, tagged, text
from tracepipe.units import MADE_UP

OWN: Final = ("tracepipe", "capture")
"""The names of the group, and of its track."""
_GPU = re.compile(r"GPU (\d{1,4})( .*)?")
_STREAM = re.compile(r"stream (\d{1,19})(?: \(overlap (\d{1,4})\))?")
_SUMMARIES = [counter for counter in COUNTERS if counter.category == SUMMARY]
_SUMMARIES_OF_GPUS: Final = {one.name for one in _SUMMARIES if one.owner == "gpu"}
_UNITS_OF_SUMMARIES: Final = {(one.name, one.unit) for one in _SUMMARIES if one.owner == "process"}
SUMMARIES_OF_PROCESSES: Final = {name for name, _ in _UNITS_OF_SUMMARIES}
_SM = re.compile(r"SM \d{1,18}")
RANGES = re.compile(r"ranges(?:: (.+?))?(?: \((\d{1,9})\))?")
_COPY = re.compile(r"[HDAP]to[HDAP]|memset|set|default")
# This is added to the numbers of streams for their overlap tracks.
_OVERLAPS_APART: Final = 1_000_000


class Stream(NamedTuple):
    """A stream, by the number of its GPU and its own. The number of a summary is -1."""

    gpu: int
    number: int

    @property
    def is_summary(self) -> bool:
        """Whether it only summarizes other tracks."""
        return self.number < 0


def stream_of(names: tuple[str, ...]) -> Stream | None:
    """The stream of a track with these names from the top down; None where it is not a stream."""
    gpu = _GPU.fullmatch(names[0]) if 0 < len(names) < 3 else None
    if gpu is None:
        return None
    if len(names) == 1 or names[1] in _SUMMARIES_OF_GPUS or _SM.fullmatch(names[1]):
        return Stream(int(gpu[1]), -1)
    found = _STREAM.fullmatch(names[1])
    if found is None:
        return None
    number = int(found[1]) + int(found[2] or 0) * _OVERLAPS_APART
    return Stream(int(gpu[1]), number) if number < 1 << 63 else None


def kernel_name(name: str, second: bytes) -> str:
    """The whole name of a slice of a stream, which is in its arguments if its own is shorter."""
    whole = orjson.loads(second).get("kernel") if b'"kernel":' in second else None
    return cut_text(whole) if type(whole) is str and whole else name


def begun(fields: Record, second: bytes) -> tuple[bytes, bytes]:
    """The record of a slice of a stream with these fields, and its arguments without those in the record."""
    args: dict[str, Any] = orjson.loads(second) if second else {}
    record = {**fields, "type": kind_of(fields["name"])}
    args.pop("kernel", None)
    for key in ("grid", "block"):
        if is_size(args.get(key)):
            record[key] = args.pop(key)
    first, rest = (bytes(memoryview(orjson.dumps(one))) if one else b"" for one in (record, args))
    return first, rest


def kind_of(name: str) -> str:
    """Whether a slice of a stream of that name is a copy or a kernel."""
    return "transfer" if _COPY.fullmatch(name) else "gpu_kernel"


UNNAMED_PROCESS: Final = "process"
"""The name of the group of a thread without a name, in a process without one."""
EVENTS: Final = "events"
"""The layer of events on the track of a thread itself."""
GLOBAL: Final = 0
"""The track of events that name no track."""
_UUID, _PARENT, _ORDERING, _RANK = 1 << 3, 5 << 3, 11 << 3, 12 << 3
_NAMES: Final = (2 << 3 | BYTES, 10 << 3 | BYTES, 13 << 3 | BYTES)
_PROCESS, _THREAD, _COUNTER = 3 << 3 | BYTES, 4 << 3 | BYTES, 8 << 3 | BYTES
_PID, _TID, _THREAD_NAME = 1 << 3, 2 << 3, 5 << 3 | BYTES
_CMDLINE, _PROCESS_NAME = 2 << 3 | BYTES, 6 << 3 | BYTES
_KIND, _UNIT, _MULTIPLIER, _IS_INCREMENTAL, _UNIT_NAME = 1 << 3, 3 << 3, 4 << 3, 5 << 3, 6 << 3 | BYTES
_UNITS: Final = {1: "ns", 2: "", 3: "bytes"}
_UNITS_MAX: Final = 1 << 10
_THREAD_COUNTERS: Final = (1, 2)
_EXPLICIT: Final = 3
_TRACKS_MAX: Final = 1 << 17
_THREADS_MAX: Final = 1 << 16
# In a damaged trace, a track may be its own ancestor.
_ANCESTORS_MAX: Final = 32


class Life(NamedTuple):
    """A process or thread whose id of the system cannot be its number: the place of its machine, its kind
    (pid or tid) and id, and which one it is of those that had the id.
    """

    machine: int
    kind: str
    id: int
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.id}" + (f", number {self.nth}" if self.nth > 1 else "")


Pid = int | Life
"""The number of a process or a thread, in the range of its machine, or what identifies it otherwise."""
# The most machines that are distinguished, and the distance between their numbers of processors and of GPUs
# while packets are read.
_MACHINES_MAX: Final = 64
CPUS_MAX: Final = 1 << 12
GPUS_MAX: Final = 1 << 10


@dataclass(slots=True)
class Counter:
    """How to read the values of a counter. `of_thread`: they are a thread's time or instructions."""

    unit: str = ""
    multiplier: int = 1
    is_incremental: bool = False
    of_thread: bool = False


@dataclass(slots=True)
class Descriptor:
    """A track of a thread, of a process, or of neither. `parent` is 0 where it has none."""

    name: str = ""
    parent: int = 0
    pid: Pid | None = None
    tid: Pid | None = None
    counter: Counter | None = None
    rank: int = 0
    is_ordered: bool = False
    """Whether its children are ordered by their ranks."""
    machine: int = 0


class Place(NamedTuple):
    """The process, thread and layer of a track's events, and the name of a counter."""

    pid: int
    tid: int | None
    layer: str
    counter: str = ""
    stream: Stream | None = None
    range: tuple[str, int] | None = None
    """The domain and the number of the ranges of a process."""

    @property
    def fields(self) -> dict[str, Any]:
        """The place as fields of a record."""
        if self.stream is not None:
            return {"type": "gpu_kernel", "gpu": self.stream.gpu, "stream": self.stream.number}
        if self.range is not None:
            domain, number = self.range
            of_domain = {"domain": domain} if domain else {}
            return {"type": "annotation", "pid": self.pid, **of_domain, "range": number}
        thread = {} if self.tid is None else {"tid": self.tid}
        return {"type": "hook", "pid": self.pid, **thread, "layer": self.layer}


@dataclass(slots=True)
class Tracks:
    """Reads descriptors, and then gives the places of their tracks. `used` are the tracks that have events,
    in the order of their first ones, with the times of these.
    """

    long_names: LongNames
    used: dict[int, int] = field(default_factory=dict)
    left_out: int = 0
    unknown: int = 0
    """Tracks with events and without a descriptor."""
    lives: Lives = field(default_factory=Lives)
    machine: int = 0
    """The place of the current packet's machine among all machines."""
    _machines: dict[int, int] = field(default_factory=dict)
    _systems: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    """By the place of a machine: its name, its kernel's release and its architecture."""
    _cpus: dict[int, int] = field(default_factory=dict)
    """By the place of a machine: the lowest number above those of its processors."""
    _gpus: dict[int, int] = field(default_factory=dict)
    """The numbers of GPUs by those that they have while packets are read."""
    _hosts: list[str] = field(default_factory=list)
    """By the place of a machine: the text that follows names of its processes."""
    _all: dict[int, Descriptor] = field(default_factory=dict)
    _processes: dict[Pid, str] = field(default_factory=dict)
    _lives: dict[tuple[Pid | None, Pid], tuple[int, int, Pid]] = field(default_factory=dict)
    """By process and tid, without a process by pid: the uuid of what has the number now, how many had it, and
    its key."""
    _process_of: dict[tuple[int, int], Pid] = field(default_factory=dict)
    """By machine and tid."""
    _threads: dict[tuple[Pid, Pid], str] = field(default_factory=dict)
    """The names of threads, by process and thread."""
    _tasks: dict[tuple[int, int], str] = field(default_factory=dict)
    """The names of threads by machine and tid."""
    _without: dict[tuple[Pid, Pid | None], int] = field(default_factory=dict)
    """The tracks of threads without a descriptor."""
    _ids: Ids = field(default_factory=Ids)
    _names: dict[tuple[int, int | None], Record] = field(default_factory=dict)
    _taken: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _places: dict[int, Place] = field(default_factory=dict)
    _units: dict[str, str] = field(default_factory=dict)
    """The units of counters by their names."""
    _of_gpus: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By the number of a group: its GPU, and its name."""
    _globals: dict[int, int] = field(default_factory=dict)
    """The machines of the tracks of their events without a track."""
    _named: set[int] = field(default_factory=set)
    """The numbers of processes whose names are stated."""
    _mains: dict[int, str] = field(default_factory=dict)
    _parts: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """By track: when its parts begin, and their tracks."""
    is_own: bool = False
    """Whether tracepipe wrote the trace."""

    # Taking ---------------------------------------------------------------------------------------------

    def enter(self, machine: int) -> None:
        """Note the machine of the packets that follow."""
        found = self._machines.get(machine)
        if found is None:
            found = min(len(self._machines), _MACHINES_MAX - 1)
            if len(self._machines) < _MACHINES_MAX:
                self._machines[machine] = found
            else:
                self.left_out += 1
        self.machine = found

    @property
    def host_place(self) -> int:
        """The place of the machine whose clock is the trace's."""
        return self._machines.get(0, 0)

    @property
    def are_several(self) -> bool:
        """Whether the trace has packets of several machines."""
        return len(self._machines) > 1

    def note_system(self, data: bytes) -> None:
        """Note the SystemInfo of the current machine. Raises WireError."""
        of = dict(tagged(data))
        kernel = dict(tagged(of.get(1 << 3 | BYTES, b"")))
        stated = of.get(17 << 3 | BYTES, b""), *(kernel.get(field << 3 | BYTES, b"") for field in (3, 4))
        name, release, architecture = map(self._kept, stated)
        self._systems[self.machine] = name, release, architecture

    def own_cpu(self, cpu: int) -> int:
        """The number of a processor of the current machine while packets are read."""
        self._cpus[self.machine] = max(self._cpus.get(self.machine, 0), cpu + 1)
        return cpu + self.machine * CPUS_MAX

    def cpu(self, own: int) -> int:
        """The number of a processor, when all packets were read."""
        machine, cpu = divmod(own, CPUS_MAX)
        return cpu + sum(self._cpus.get(place, 0) for place in range(machine))

    def own_gpu(self, gpu: int) -> int:
        """The number of a GPU of the current machine while packets are read."""
        gpu += self.machine * GPUS_MAX
        self._gpus[gpu] = gpu
        return gpu

    def gpu(self, own: int) -> int:
        """The number of a GPU, when all packets were read."""
        return self._gpus.get(own, own)

    def own(self, uuid: int) -> int:
        """The number of a track of the current machine."""
        return -(1 << 60) - self.own_flow(uuid, "track") if self.machine and uuid != GLOBAL else uuid

    def default(self) -> int:
        """The track of the current machine's events that name no track."""
        if not self.machine:
            return GLOBAL
        uuid = -(1 << 32) - self.machine
        self._globals[uuid] = self.machine
        return uuid

    def own_flow(self, id: int, kind: str = "flow") -> int:
        """The number of a flow of the current machine by its id."""
        return flow_number(kind, self.machine, id) if self.machine else id

    def _own_id(self, kind: str, id: int, machine: int | None = None) -> Pid:
        """The key of what had a pid or tid of a machine, or of the current one, first."""
        machine = self.machine if machine is None else machine
        if not machine:
            return id
        return id_on(machine, id) if 0 <= id < IDS_PER_HOST else Life(machine, kind, id)

    def _process(self, pid: int, uuid: int | None = None) -> Pid:
        """The process that has a pid on the current machine, whose track has this uuid."""
        if uuid is not None and uuid in self._all and (known := self._all[uuid].pid) is not None:
            return known
        return self._life((None, self._own_id("pid", pid)), uuid)

    def _life(self, place: tuple[Pid | None, Pid], uuid: int | None) -> Pid:
        """The key of what has a pid or tid now, if it is described by this uuid."""
        first = place[1]
        current, count, key = self._lives.get(place, (GLOBAL, 1, first))
        if uuid is None or uuid in (GLOBAL, current):
            return key
        if place not in self._lives and len(self._lives) >= _THREADS_MAX:
            self.left_out += 1
            return key
        if current != GLOBAL:
            count += 1
            id = first.id if isinstance(first, Life) else first - self.machine * IDS_PER_HOST
            key = Life(self.machine, "pid" if place[0] is None else "tid", id, count)
        self._lives[place] = uuid, count, key
        return key

    def describe(self, data: bytes) -> int | None:
        """Note a TrackDescriptor. Return the number of the track, if it is a thread's. Raises WireError."""
        of = dict(tagged(data))
        name = next((self._kept(of[tag]) for tag in _NAMES if tag in of), "")
        made = Descriptor(name, self.own(of.get(_PARENT, 0)), machine=self.machine)
        uuid = self.own(of.get(_UUID, GLOBAL))
        if _THREAD in of:
            self.describe_thread(of[_THREAD], made, uuid)
        elif _PROCESS in of:
            self.describe_process(of[_PROCESS], made, uuid)
        if _COUNTER in of:
            counter = dict(tagged(of[_COUNTER]))
            made.counter = Counter(
                unit=self._kept(counter.get(_UNIT_NAME, b"")) or _UNITS.get(counter.get(_UNIT, 0), ""),
                multiplier=max(0, signed(counter.get(_MULTIPLIER, 0))) or 1,
                is_incremental=bool(counter.get(_IS_INCREMENTAL, 0)),
                of_thread=counter.get(_KIND, 0) in _THREAD_COUNTERS,
            )
        made.rank = signed(of.get(_RANK, 0))
        made.is_ordered = of.get(_ORDERING) == _EXPLICIT
        if uuid in self._all and not made.name:
            made.name = self._all[uuid].name
        self._keep(uuid, made)
        return uuid if made.tid is not None else None

    def _kept(self, data: bytes) -> str:
        """A name that is kept."""
        return self.long_names.cut(text(data))

    def _keep(self, uuid: int, made: Descriptor) -> None:
        if uuid not in self._all and len(self._all) >= _TRACKS_MAX:
            self.left_out += 1
            return
        self._all[uuid] = made

    def describe_thread(self, data: bytes, made: Descriptor, uuid: int | None = None) -> None:
        """Note a ThreadDescriptor. Raises WireError."""
        of = dict(tagged(data))
        made.name = self._kept(of.get(_THREAD_NAME, b"")) or made.name
        known = None if uuid is None else self._all.get(uuid)
        if known is not None and known.pid is not None and known.tid is not None:
            pid, key = known.pid, known.tid
        else:
            pid = self._process(signed(of.get(_PID, 0)))
            place = (pid, self._own_id("tid", signed(of.get(_TID, 0))))
            before = self._threads.get((pid, self._life(place, None)), "")
            is_same = place in self._lives and not (made.name and before and made.name != before)
            key = self._life(place, None if is_same else uuid)
        made.pid, made.tid = pid, key
        self._name_thread(pid, key, made.name)

    def describe_process(self, data: bytes, made: Descriptor, uuid: int | None = None) -> None:
        """Note a ProcessDescriptor. Raises WireError."""
        of = tagged(data)
        made.pid = self._process(signed(next((value for tag, value in of if tag == _PID), 0)), uuid)
        names = [value for tag, value in of if tag == _PROCESS_NAME]
        names += [value for tag, value in of if tag == _CMDLINE]
        made.name = self._kept(names[0]) if names else made.name
        self._name_process(made.pid, made.name)
        self._name_main(made.pid)

    def name_process(self, pid: int, name: str, ts_ns: int, *, has_main: bool) -> None:
        """Note the name of the process that has a pid at a time, and whether its main thread has that tid."""
        self.note(ts_ns, TREE_PROCESS, pid, name=name, has_main=has_main)
        self._name_process(self._process(pid), name)
        if has_main:
            self._name_main(self._process(pid))

    def _name_main(self, pid: Pid) -> None:
        """Note that the main thread of a process belongs to it, where no other process of it is known."""
        if len(self._process_of) < _THREADS_MAX:
            self._process_of.setdefault((self.machine, _system_id(pid)), pid)

    def note(
        self,
        ts_ns: int,
        kind: int,
        id: int,
        other: int | None = None,
        name: str = "",
        *,
        has_main: bool = True,
    ) -> None:
        """Note a fact about a process or thread of the current machine."""
        name = self.long_names.shortened(name)
        self.lives.note(Noted(ts_ns, kind, self.machine, id, other, name, has_main=has_main))

    def name_thread(self, pid: int, tid: int, name: str, ts_ns: int, *, has_main: bool) -> None:
        """Note the process of a thread at a time, and its name if it has one."""
        self.note(ts_ns, TREE_THREAD, tid, pid, name, has_main=has_main)
        self._name_thread(self._process(pid), self._own_id("tid", tid), name)

    def _name_process(self, pid: Pid, name: str) -> None:
        if name and pid not in self._processes and len(self._processes) >= _THREADS_MAX:
            self.left_out += 1
        elif name:
            self._processes[pid] = self.long_names.shortened(name)

    def _name_thread(self, pid: Pid, tid: Pid, name: str) -> None:
        if (pid, tid) not in self._threads and len(self._threads) >= _THREADS_MAX:
            self.left_out += 1
            return
        if not isinstance(tid, Life):
            self._process_of[self.machine, tid - self.machine * IDS_PER_HOST] = pid
        self._threads[pid, tid] = self.long_names.shortened(name) or self._threads.get((pid, tid), "")

    def thread(self, pid: Pid, tid: Pid | None) -> int:
        """The track of a thread, or of a process, whether it has a descriptor or not."""
        place = (None, pid) if tid is None else (pid, tid)
        described, _, key = self._lives.get(place, (GLOBAL, 1, place[1]))
        if described != GLOBAL and key == place[1]:
            return described
        # No other track has its number.
        uuid = self._without.get((pid, tid), -1 - len(self._without))
        self._keep(uuid, Descriptor(pid=pid, tid=tid, machine=self.machine))
        if uuid in self._all:
            self._without[pid, tid] = uuid
        return uuid

    def number_of(self, pid: int) -> int | None:
        """The number of the process that has a pid on the current machine."""
        return self._ids.number(self._process(pid))

    def thread_on(self, pid: int | None, tid: int | None, default_track: int | None = None) -> int:
        """The track of the thread or the process that has these numbers on the current machine. Without a
        pid, the process is that of `default_track`, or else the one that the thread is known to have.
        """
        known = None
        if pid is None and tid is not None:
            known = (
                self._process_of.get((self.machine, tid))
                if default_track is None
                else self._of(default_track).pid
            )
        process = self._process(pid or tid or 0) if known is None else known
        if tid is None:
            return self.thread(process, None)
        self._name_thread(process, self._own_id("tid", tid), "")
        return self.thread(process, self._own_id("tid", tid))

    def process_track(self, uuid: int) -> int:
        """The track of the process of a thread's track; the track itself where it is no thread's."""
        pid = self._of(uuid).pid
        return uuid if pid is None else self.thread(pid, None)

    def counter_of(self, pid: int, name: str) -> int:
        """The track of a counter of a process that has no descriptor."""
        process = self._process(pid)
        uuid = -(1 << 33) - flow_number("counter", process, name)
        parent = self.thread(process, None)
        name = self.long_names.shortened(name)
        self._keep(uuid, Descriptor(name, parent, counter=Counter(), machine=self.machine))
        return uuid

    def asynchronous(self, number: int, parent: int, name: str) -> int:
        """The track of events with the same kind and id. `number` is above those of threads."""
        uuid = -(1 << 33) - self.own_flow(number, "asynchronous")
        self._keep(uuid, Descriptor(self.long_names.shortened(name), parent, machine=self.machine))
        return uuid

    def counter(self, uuid: int) -> Counter | None:
        """The counter of a track; None where it is not known to be one."""
        found = self._all.get(uuid)
        return None if found is None else found.counter

    def use(self, uuid: int, ts_ns: int) -> bool:
        """Note that a track has an event at a time. Return whether there is room for it."""
        if uuid not in self.used:
            if len(self.used) >= _TRACKS_MAX:
                return False
            self.used[uuid] = ts_ns
        return True

    # Places ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Decide the places of the used tracks. No descriptors are taken any more."""
        names = [self._systems.get(place, ("",))[0] for place in range(len(self._machines))]
        self._hosts = [
            f" on {name or f'machine {id}'}" + (f" (machine {id})" if name and names.count(name) > 1 else "")
            if len(names) > 1 and (name or id)
            else ""
            for id, name in zip(self._machines, names, strict=True)
        ]
        numbers: set[int] = set()
        for own in sorted(self._gpus):
            gpu = own % GPUS_MAX
            self._gpus[own] = max(numbers) + 1 if gpu in numbers else gpu
            numbers.add(self._gpus[own])

        self._distinguish()

        def order(uuid: int) -> tuple[str, int, str]:
            """Rank and name of the topmost ancestor of a track, and of the next one."""
            chain = self._chain(uuid)
            top, second = self._of(chain[-1]), self._of(chain[max(0, len(chain) - 2)])
            return top.name, second.rank if top.is_ordered else 0, second.name

        # A trace of tracepipe has such numbers already.
        ids = (id for of in self._all.values() for id in (of.pid, of.tid))
        self._ids.stay_below(
            min((id for id in ids if type(id) is int and id > MADE_UP), default=ID_LIMIT + 1)
        )
        # In one that was converted again, the track of the group's events is below.
        forms = OWN, (*OWN, EVENTS)
        self.is_own = any(self._names_of(self._chain(uuid)) in forms for uuid in self.used)
        known = self._all.keys() | self._globals.keys() | {GLOBAL}
        self.unknown = sum(uuid not in known for uuid in self.used)
        # A number that is given later is lower, and comes before the others.
        for uuid in sorted(self.used, key=order, reverse=True):
            stream = self._stream_of(uuid)
            if stream is None:
                self._thread_of(uuid, self._chain(uuid))
            else:
                self._places[uuid] = Place(0, None, "gpu", stream=stream)
        for uuid in self.used:
            if uuid not in self._places:
                self._places[uuid] = self._place_of(uuid, self._chain(uuid))
        self._taken.clear()

    def _distinguish(self) -> None:
        """Relate tracks to the processes and threads that had their ids when they had events."""
        if not self.lives.is_told:
            return
        undescribed, facts = set(self._without.values()), list[Noted]()
        roots = {uuid: self._chain(uuid)[-1] for uuid in self.used}
        told: dict[int, tuple[int, int | None]] = {}
        for root, uuid in {root: uuid for uuid, root in reversed(roots.items())}.items():
            of = self._of(root)
            if of.pid is None:
                continue
            pid, tid = _system_id(of.pid), None if of.tid is None else _system_id(of.tid)
            if self.lives.are_told(of.machine, pid, tid):
                told[root] = pid, tid
            id, other = (pid, None) if tid is None else (tid, pid)
            described = root if root in told and root not in undescribed else None
            facts.append(Noted(self.used[uuid], TRACK, of.machine, id, other, of.name, described))
        self.lives.settle(facts)
        for root, (process, thread) in self.lives.tracks.items():
            of = self._all[root]
            of.pid, of.tid = self._key(process), None if thread is None else self._key(thread)
        self._rename()
        for uuid, root in roots.items():
            if root in told and root in undescribed:
                self._split(uuid, *told[root])

    def _rename(self) -> None:
        """Name the processes and threads of which is known when they began and ended."""
        for processes in self.lives.processes.values():
            for process in processes:
                if name := process.name or process.described:
                    self._processes[self._key(process)] = name
                elif len(processes) > 1:
                    self._processes.pop(self._key(process), None)
        for thread in chain.from_iterable(self.lives.threads.values()):
            if thread.process is not None:
                key = self._key(thread.process), self._key(thread)
                before = self._threads.get(key, "")
                self._threads[key] = thread.described or thread.stated or thread.name or before

    def _key(self, of: Process | Thread) -> Pid:
        """The key of a process or thread. A main thread has that of its process."""
        if isinstance(of, Thread) and of.process is not None and of.is_main and of.nth == of.process.nth:
            of = of.process
        kind, id = ("pid", of.pid) if isinstance(of, Process) else ("tid", of.tid)
        return Life(of.machine, kind, id, of.nth) if of.nth > 1 else self._own_id(kind, id, of.machine)

    def _split(self, uuid: int, pid: int, tid: int | None) -> None:
        """Give a track that is not described a part for each process or thread that had its ids."""
        way = self._chain(uuid)
        root = self._all[way[-1]]
        owners: Sequence[Process | Thread] = self.lives.processes.get((root.machine, pid), ())
        if tid is not None:
            owners = self.lives.threads.get((root.machine, tid), owners)
        if len(self._all) + len(owners) * len(way) > _TRACKS_MAX:
            self.left_out += 1
            return
        starts, parts = list[int](), list[int]()
        for owner in owners:
            process = owner if isinstance(owner, Process) else owner.process
            key = root.pid if process is None else self._key(process)
            of = replace(root, pid=key, tid=self._key(owner) if isinstance(owner, Thread) else root.tid)
            if len(owners) == 1:
                self._all[way[-1]] = of
                return
            part = 0
            for one in reversed(way):
                of = of if one == way[-1] else replace(self._all[one], parent=part)
                part = -(1 << 32) - _MACHINES_MAX - len(self._all)
                self._keep(part, of)
            starts.append(owner.begin_ns)
            parts.append(part)
            self.used[part] = self.used[uuid]
        if parts:
            self._parts[uuid] = starts, parts
            del self.used[uuid]

    def at(self, uuid: int, ts_ns: int) -> int:
        """The track of an event: that of the process or thread that had its ids at that time."""
        found = self._parts.get(uuid)
        return uuid if found is None else found[1][max(0, bisect_right(found[0], ts_ns) - 1)]

    def until(self, uuid: int, ts_ns: int) -> int:
        """The time at which the track of an event changes next."""
        starts = self._parts[uuid][0] if uuid in self._parts else []
        next = bisect_right(starts, ts_ns) or 1
        return starts[next] if next < len(starts) else TIME_LIMIT_NS + 1

    def _path(self, chain: list[int]) -> tuple[str, ...]:
        """The names of tracks without a process from the top down; empty for those with a process."""
        return () if self._of(chain[-1]).pid is not None else tuple(self._of(one).name for one in chain[::-1])

    def _names_of(self, chain: list[int]) -> tuple[str, ...]:
        """The same, and for a group that is shown as a process, as of a trace that was converted again, the
        names of the process and the thread.
        """
        root = self._of(chain[-1])
        if type(root.pid) is int and root.pid > MADE_UP and root.tid is not None:
            return self._processes.get(root.pid, ""), root.name
        return self._path(chain)

    def _stream_of(self, uuid: int) -> Stream | None:
        """The stream of a track, in a trace that tracepipe wrote."""
        if not self.is_own:
            return None
        counter = self._of(uuid).counter
        if counter is not None and (self._of(uuid).name, counter.unit) in _UNITS_OF_SUMMARIES:
            return Stream(0, -1)
        stream = stream_of(self._path(self._chain(uuid)))
        return None if stream and counter is not None and not stream.is_summary else stream

    def _chain(self, uuid: int) -> list[int]:
        """A track and its ancestors, up to a thread or a process."""
        chain: list[int] = []
        while len(chain) < _ANCESTORS_MAX and uuid not in chain:
            chain.append(uuid)
            found = self._all.get(uuid)
            if found is None or found.pid is not None or not found.parent:
                break
            uuid = found.parent
        return chain

    def _of(self, uuid: int) -> Descriptor:
        found = self._all.get(uuid)
        if found is None:
            machine = self._globals.get(uuid, 0)
            is_global = uuid == GLOBAL or machine > 0
            return Descriptor("events without a track" if is_global else f"track {uuid:x}", machine=machine)
        return found

    def _name(self, uuid: int) -> str:
        return self._of(uuid).name or "track"

    def _thread_of(self, uuid: int, chain: list[int]) -> tuple[int, int | None, list[str]]:
        """The process and the thread of a track, and the names of the tracks below."""
        root = self._of(chain[-1])
        below = chain[-2::-1]
        if root.tid is not None:
            thread = self.thread_fields(root.pid or 0, root.tid)
            # The tracks of a thread are in a group with its name.
            shown = root.name or self._processes.get(root.pid or 0) or UNNAMED_PROCESS
            if len(below) > 1 and self._name(below[0]) == shown:
                below = below[1:]
            return thread["pid"], thread["tid"], [self._name(one) for one in below]
        is_counter = self._of(uuid).counter is not None
        if root.pid is not None:
            pid = self._ids.thread({"pid": root.pid}, {})["pid"]
        elif is_counter and not below:
            group = "counters" + self.host(root.machine)
            return self._made_up((group,), group), None, [self._name(uuid)]
        else:
            pid = self._made_up((chain[-1],), self._name(chain[-1]) + self.host(root.machine))
            below = below or chain[-1:]
        if is_counter:
            return pid, None, [self._name(one) for one in below]
        name = self._name(below[0]) if below else EVENTS
        tid = self._made_up((pid, below[0] if below else EVENTS), name, pid)
        return pid, tid, [self._name(one) for one in below[1:]]

    def _made_up(self, key: tuple[Any, ...], name: str, pid: int | None = None) -> int:
        """The number for a group that is shown as a process, or as a thread of `pid`."""
        number = self._ids.number_for(str(key))
        of = (number, None) if pid is None else (pid, number)
        if of not in self._names and len(self._names) < _TRACKS_MAX:
            record: Record = {"type": "name", "pid": of[0], "name": name}
            self._names[of] = record if pid is None else record | {"tid": number}
        return number

    def _place_of(self, uuid: int, chain: list[int]) -> Place:
        root, found = self._of(chain[-1]), RANGES.fullmatch(self._name(uuid)) if self.is_own else None
        if found and len(chain) == 2 and root.pid is not None and root.tid is None:
            pid, number = self._ids.thread({"pid": root.pid}, {})["pid"], int(found[2] or 1) - 1
            return Place(pid, None, "annotation", range=(found[1] or "", max(0, min(number, RANGE_LIMIT))))
        pid, tid, names = self._thread_of(uuid, chain)
        name = self.long_names.cut(" / ".join(names)) or EVENTS
        counter = self._of(uuid).counter
        if counter is None:
            return Place(pid, tid, self._own((pid, tid, name), name))
        if tid is not None:
            root = self._of(chain[-1])
            id = root.tid - root.machine * IDS_PER_HOST if type(root.tid) is int else root.tid
            name = f"{root.name} {id} {name}".lstrip()
        own = self._own((pid, "counter", name), name)
        if counter.unit and not self._state_unit(own, counter.unit):
            name = f"{name} ({counter.unit})"
            own = self._own((pid, "counter", name), name)
        return Place(pid, None, EVENTS, own)

    def _state_unit(self, name: str, unit: str) -> bool:
        """State the unit of counters of this name. Return whether they have no other one."""
        if name not in self._units and len(self._units) >= _UNITS_MAX:
            return False
        return self._units.setdefault(name, unit) == unit

    def _own(self, key: tuple[Any, ...], name: str) -> str:
        """A name that no other track of the same thread has."""
        count = self._taken[key] = self._taken.get(key, 0) + 1
        return name if count == 1 else f"{name} ({count})"

    def place(self, uuid: int) -> Place:
        """The place of the events of a used track."""
        return self._places[uuid]

    def thread_fields(self, pid: Pid, tid: Pid) -> dict[str, int]:
        """The numbers of a process and a thread."""
        return self._ids.thread({"pid": pid, "tid": tid}, {})

    def group(self, gpu: int, name: str) -> int:
        """The number of a group of a GPU that is shown as a process."""
        number = self._made_up((gpu, name), name)
        self._of_gpus[number] = gpu, name
        return number

    def host(self, machine: int) -> str:
        """The text that follows the names of processes of a machine."""
        return self._hosts[machine] if machine < len(self._hosts) else ""

    def state(self, header: Header) -> None:
        """Add what is known of the machines, and the units of counters, to a header."""
        header.host, header.kernel, header.machine = self._systems.get(self.host_place, ("", "", ""))
        header.gpus = [
            {"index": number, "name": f"(GPU {own % GPUS_MAX}{host})"}
            for own, number in sorted(self._gpus.items())
            if (host := self.host(own // GPUS_MAX))
        ]
        header.counters = [{"name": name, "unit": unit} for name, unit in self._units.items()]

    def describe_task(self, data: bytes) -> None:
        """Note the name of a thread whose process is not known: {1 tid  2 name}. Raises WireError."""
        of = dict(tagged(data))
        key = self.machine, signed(of.get(1 << 3, 0))
        if key in self._tasks or len(self._tasks) < _THREADS_MAX:
            self._tasks[key] = self._kept(of.get(2 << 3 | BYTES, b""))
        else:
            self.left_out += 1

    def task(self, machine: int, tid: int) -> str:
        """The name of such a thread of a machine; empty where it is not known."""
        return self._tasks.get((machine, tid), "")

    def scheduled(self, machine: int, tid: int, thread: Thread | None) -> dict[str, int]:
        """The numbers of a thread of a machine and of its process, if that is known."""
        known = self._process_of.get((machine, tid))
        process: Pid | None = id_on(machine, 0) if machine else None
        if thread is not None and thread.process is not None and not isinstance(known, Life):
            process = self._key(thread.process)
        elif known is not None and (thread is None or thread.nth == 1):
            process = known
        number = id_on(machine, tid) if thread is None else self._key(thread)
        fields = self._ids.thread({"tid": number}, {})
        return fields if process is None else self.thread_fields(process, number)

    def named_apart(self, fields: dict[str, int], comm: str) -> bool:
        """Whether a main thread, with the numbers of `scheduled`, has a process whose name is stated. Such a
        thread gets its name here, as the names that events have for it would name its process too.
        """
        pid = fields.get("pid")
        if pid is None or pid != fields["tid"] or pid not in self._named:
            return False
        self._mains[pid] = comm
        return True

    def main_records(self) -> list[Record]:
        """The names of main threads whose processes have other names, when all events were read."""
        return [{"type": "name", "pid": pid, "tid": pid, "name": name} for pid, name in self._mains.items()]

    def waker(self, machine: int, tid: int, ts_ns: int) -> int:
        """The number of a thread that wakes another one, 0 for none."""
        thread = self.lives.thread(machine, tid, ts_ns) if tid > 0 else None
        return self.scheduled(machine, tid, thread)["tid"] if tid > 0 else 0

    def problems(self) -> Iterator[Problem]:
        """The problems of groups that are shown as processes and threads."""
        return self._ids.problems()

    def name_records(self) -> list[Record]:
        """The names of processes and threads."""
        for number, (gpu, name) in self._of_gpus.items():
            name = f"GPU {self.gpu(gpu)}: {name}{self.host(gpu // GPUS_MAX)}"
            self._names[number, None] = {"type": "name", "pid": number, "name": name}
        records = list(self._names.values())
        known = [of.pid for of in self._all.values() if of.pid is not None]
        known += [pid for pid, _ in self._threads]
        unknown: list[Pid] = [id_on(machine, 0) for machine in range(1, len(self._machines))]
        for pid in dict.fromkeys([*self._processes, *known, *unknown]):
            name = _title(self._processes.get(pid, ""), pid)
            own = (pid.machine, pid.id) if isinstance(pid, Life) else divmod(max(0, pid), IDS_PER_HOST)
            if (host := self.host(own[0])) and not name:
                name = f"pid {own[1]}" if own[1] else "processes"
            if name and (process := self._ids.number(pid)) is not None:
                records.append({"type": "name", "pid": process, "name": name + host})
                if self._processes.get(pid):
                    self._named.add(process)
        for (pid, tid), name in self._threads.items():
            if name := _title(name, tid):
                records.append({"type": "name", **self.thread_fields(pid, tid), "name": name})
        return records


def _system_id(key: Pid) -> int:
    """The id that the system gave to a process or thread."""
    return key.id if isinstance(key, Life) else key % IDS_PER_HOST


def _title(name: str, id: Pid) -> str:
    """The name of a process or thread, with what distinguishes it from others with its id."""
    if not isinstance(id, Life):
        return name
    return f"{name} ({id})" if name else str(id)
