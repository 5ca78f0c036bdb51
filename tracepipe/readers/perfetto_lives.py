"""Tells the processes and threads apart that had one id of the system one after the other, by what ftrace and
the process tree of a Perfetto trace state.

    FtraceEvent   235 task_newtask {1 pid  2 comm  3 clone_flags}  236 task_rename {1 pid  3 newcomm}
                  240 sched_process_free {2 pid}

A new task is a thread of the process of the thread that made it, if it was cloned with CLONE_THREAD, or else
a new process with its main thread. After a thread is freed, a later one has its id. With a main thread, its
process has ended. The last name of a main thread or of the process tree is the name of a process. All facts
are read in the order of time, as by the trace processor (process_tracker.cc of v52).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

NEW_PROCESS, NEW_THREAD, END, RENAME, TREE_PROCESS, TREE_THREAD, TRACK = range(7)
_FROM_TREES: Final = frozenset({TREE_PROCESS, TREE_THREAD})
_NOTED_MAX: Final = 1 << 16
_BEFORE_ALL: Final = -1


class Noted(NamedTuple):
    """A fact about an id of a machine. `other` is the pid of a thread, or the thread that made a new one.
    `uuid` is the track of a process or thread that is described; None for one that is not.
    """

    ts_ns: int
    kind: int
    machine: int
    id: int
    other: int | None = None
    name: str = ""
    uuid: int | None = None
    has_main: bool = True
    """Whether the main thread of a process has its pid as its tid."""


@dataclass(slots=True, eq=False)
class Process:
    """A process. Its place among those with its pid is that of its main thread, if it has one."""

    machine: int
    pid: int
    begin_ns: int
    nth: int = 1
    name: str = ""
    described: str = ""
    uuid: int | None = None


@dataclass(slots=True, eq=False)
class Thread:
    """A thread, its place among those with its tid, and the thread that made it."""

    machine: int
    tid: int
    begin_ns: int
    nth: int
    process: Process | None = None
    by: Thread | None = None
    name: str = ""
    renamed_ns: int = _BEFORE_ALL
    stated: str = ""
    described: str = ""
    uuid: int | None = None
    has_ended: bool = False
    is_next: bool = False
    """Whether only the end of the thread before is known."""

    @property
    def is_main(self) -> bool:
        """Whether it is the main thread of its process."""
        return self.process is not None and self.process.pid == self.tid


class Lives:
    """Notes facts, and then tells who had an id at a time."""

    def __init__(self) -> None:
        self.left_out = 0
        self.processes: dict[tuple[int, int], list[Process]] = {}
        self.threads: dict[tuple[int, int], list[Thread]] = {}
        """By machine and id, in the order of time."""
        self.tracks: dict[int, tuple[Process, Thread | None]] = {}
        """The processes and threads of tracks that are described."""
        self._noted: list[Noted] = []
        self._told: set[tuple[int, int]] = set()
        """The ids of tasks that begin, end or get a name."""
        self._alive: dict[tuple[int, int], Process] = {}
        self._first_ns: dict[tuple[int, int], int] = {}

    def note(self, fact: Noted) -> None:
        """Note a fact."""
        if len(self._noted) < _NOTED_MAX:
            self._noted.append(fact)
            if fact.kind not in _FROM_TREES:
                self._told.add((fact.machine, fact.id))
        else:
            self.left_out += 1

    @property
    def is_told(self) -> bool:
        """Whether it is known of any task when it begins, ends or gets a name."""
        return bool(self._told)

    def are_told(self, machine: int, *ids: int | None) -> bool:
        """Whether that is known of one of some tasks."""
        return any((machine, id) in self._told for id in ids)

    def see(self, machine: int, tid: int, ts_ns: int) -> None:
        """Note that a thread had an event."""
        key = machine, tid
        if ts_ns < self._first_ns.get(key, ts_ns + 1) and (
            key in self._first_ns or len(self._first_ns) < _NOTED_MAX
        ):
            self._first_ns[key] = ts_ns

    def thread(self, machine: int, tid: int, ts_ns: int) -> Thread | None:
        """The thread that had a tid at a time; None where only its tid is known."""
        threads = self.threads.get((machine, tid))
        if threads is None:
            return None
        return threads[max(0, bisect_right(threads, ts_ns, key=attrgetter("begin_ns")) - 1)]

    def settle(self, tracks: Iterable[Noted]) -> None:
        """Read all facts in the order of time, with the first events of tracks."""
        for fact in sorted([*self._noted, *tracks], key=attrgetter("ts_ns")):
            self._add(fact)
        made = [thread for threads in self.threads.values() for thread in threads if thread.by is not None]
        made.sort(key=attrgetter("begin_ns"))
        for thread in (*reversed(made), *made):  # threads that made others are of the same process
            assert thread.by is not None
            thread.by.process = thread.by.process or thread.process
            thread.process = thread.process or thread.by.process
        self._noted.clear()
        self._first_ns.clear()

    def _add(self, fact: Noted) -> None:
        ts_ns, kind, machine, id, other, name, _, has_main = fact
        if kind in (NEW_PROCESS, NEW_THREAD):
            self._begin(fact)
        elif kind == END:
            thread = self._current(machine, id) or self._seen(machine, id, ts_ns)
            if thread is not None:
                thread.has_ended = True
                if thread.is_main:
                    self._alive.pop((machine, id), None)
                self._new(machine, id, ts_ns + 1).is_next = True
        elif kind == RENAME:
            thread = self._thread(machine, id, ts_ns)
            thread.name, thread.renamed_ns = name, ts_ns
            if thread.process is not None and thread.is_main:
                thread.process.name = name
        elif kind == TREE_PROCESS:
            process = self._process(machine, id, ts_ns, has_main)
            process.name = name or process.name
        elif kind == TREE_THREAD:
            assert other is not None
            thread = self._thread(machine, id, ts_ns, self._process(machine, other, ts_ns, has_main))
            thread.stated = name or thread.stated
        else:
            self._describe(fact)

    def _begin(self, fact: Noted) -> None:
        ts_ns, kind, machine, tid, by, name, *_ = fact
        self._seen(machine, tid, ts_ns - 1)
        maker = None if kind == NEW_PROCESS or by is None else self._thread(machine, by, ts_ns)
        threads = self.threads.get((machine, tid))
        thread = threads[-1] if threads and threads[-1].is_next else self._new(machine, tid, ts_ns)
        thread.name, thread.is_next, thread.by = name, False, maker
        if kind == NEW_PROCESS:
            self._start(thread, ts_ns).name = name
        elif maker is not None:
            thread.process = maker.process

    def _describe(self, fact: Noted) -> None:
        """Relate a track to its process or thread. A new uuid is another process, or a thread
        by another name.
        """
        ts_ns, _, machine, id, pid, name, uuid, _ = fact
        process = self._process(machine, id if pid is None else pid, ts_ns)
        if pid is None:
            if uuid is not None and process.uuid not in (None, uuid):
                process = self._start(self._new(machine, id, ts_ns), ts_ns)
            process.uuid, process.described = uuid or process.uuid, name or process.described
        thread = None if pid is None else self._thread(machine, id, ts_ns, process)
        if thread is not None:
            if uuid is not None and thread.uuid not in (None, uuid) and name and name != thread.described:
                thread = self._new(machine, id, ts_ns)
                thread.process = process
            thread.uuid, thread.described = uuid or thread.uuid, name or thread.described
        if uuid is not None:
            self.tracks[uuid] = process, thread

    def _start(self, main: Thread, ts_ns: int) -> Process:
        """Start a process with its main thread."""
        main.process = self._add_process(Process(main.machine, main.tid, ts_ns, main.nth))
        return main.process

    def _add_process(self, process: Process) -> Process:
        key = process.machine, process.pid
        self._alive[key] = process
        self.processes.setdefault(key, []).append(process)
        return process

    def _new(self, machine: int, tid: int, begin_ns: int) -> Thread:
        threads = self.threads.setdefault((machine, tid), [])
        threads.append(Thread(machine, tid, begin_ns, len(threads) + 1))
        return threads[-1]

    def _seen(self, machine: int, tid: int, ts_ns: int) -> Thread | None:
        """The first thread with a tid, of which only events until a time are known."""
        key = machine, tid
        if key in self.threads or self._first_ns.get(key, ts_ns + 1) > ts_ns:
            return None
        return self._new(machine, tid, _BEFORE_ALL)

    def _current(self, machine: int, tid: int) -> Thread | None:
        """The thread that has a tid now; None where none is known."""
        thread = next(reversed(self.threads.get((machine, tid), ())), None)
        if thread is None or thread.has_ended:
            return None
        process = thread.process
        is_alive = process is None or self._alive.get((machine, process.pid)) is process
        return thread if is_alive else None

    def _thread(self, machine: int, tid: int, ts_ns: int, process: Process | None = None) -> Thread:
        thread = self._current(machine, tid)
        if thread is None or (process is not None and thread.process not in (None, process)):
            thread = self._new(machine, tid, ts_ns if (machine, tid) in self.threads else _BEFORE_ALL)
        thread.is_next = False
        thread.process = thread.process or process
        return thread

    def _process(self, machine: int, pid: int, ts_ns: int, has_main: bool = True) -> Process:
        found = self._alive.get((machine, pid))
        if found is None and not has_main:
            before = len(self.processes.get((machine, pid), ()))
            found = self._add_process(Process(machine, pid, ts_ns if before else _BEFORE_ALL, before + 1))
        if found is None:
            main = self._current(machine, pid)
            if main is None or main.process is not None:
                main = self._new(machine, pid, ts_ns if (machine, pid) in self.threads else _BEFORE_ALL)
            main.is_next = False
            found = self._start(main, main.begin_ns)
        return found
