"""The states of a thread in stretches of time. Each ns counts once: off the CPU before driver before system
call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracepipe.analyses.breakdown import HOOKED, PARTS, hooked_title
from tracepipe.event.columns import NONE, Bools, Bytes, Int32s, Int64s, Ints
from tracepipe.event.groups import number_rows, sums_by
from tracepipe.event.intervals import Stretches
from tracepipe.event.vocabulary import RUNNING
from tracepipe.native import library
from tracepipe.native.signatures import Spent as NativeSpent
from tracepipe.store.run import Run
from tracepipe.store.schema import INSTANT, NO_BEGIN

IN_CALL, USER, ABSENT, UNKNOWN = "CUDA call", "user code", "not running", "unknown"
"""The states in addition to `PARTS[1:]`. IN_CALL: in a CUDA call, and in no layer below it. USER: in no
recorded function. ABSENT: before the thread first ran, or after it last did. UNKNOWN: the thread is not
known. `HOOKED` is a state too: in a function of a hook's own layer, and in no CUDA call."""
Thread = tuple[int | None, int | None]
Spent = dict[str, Ints]
"""The columns that `HostStates.of` returns, of one shape `(n,)`."""
_INNERMOST_FIRST = tuple(reversed([part for part in PARTS[1:] if part != HOOKED]))
STATES = (*_INNERMOST_FIRST, ABSENT, IN_CALL, HOOKED, USER, UNKNOWN)
_KINDS: Final = ("running", "driver", "syscalls", "calls", "hooks")
_IS_IOCTL, _IS_OUTERMOST = 1, 2
# The rows of an answer that are made at a time.
_ROOM: Final = 1 << 14
_NEVER: Final = -(1 << 63)


@dataclass(slots=True)
class _Spans:
    """The spans of one kind of a thread, sorted by start. `flags` says of system calls which are ioctls, and
    which are in no other.
    """

    start_ns: Int64s
    end_ns: Int64s
    name: Int32s
    flags: Bytes


class _ByThread:
    """The spans of one kind by thread; with `outermost`, without those inside others."""

    def __init__(self, run: Run, table: str, of_thread: Ints, shapes: Bools, *, outermost: bool) -> None:
        nobody = int(of_thread.max(initial=-1)) + 1
        narrow = np.uint16 if nobody < 1 << 16 else np.int32
        of_shape = np.where(shapes, of_thread, nobody).astype(narrow)
        names = run.shapes.column("name").astype(np.int32)

        def column(name: str) -> Ints:
            found: Ints = run.store.by_id(table, (name,))[name]
            return found

        # Columns are read one by one, as often as they are needed: all at once take much memory.
        thread, kind = of_shape[column("shape")], column("kind")
        thread[kind == INSTANT] = nobody
        self.any = bool((thread != nobody).any())
        if outermost:
            thread[(column("parent") != NONE) | (kind == NO_BEGIN)] = nobody
        # By thread; ids are in the order of starts, which a stable sort keeps.
        order = np.argsort(thread, kind="stable").astype(np.int32)
        thread = thread[order]
        count = int(np.searchsorted(thread, nobody))
        thread, order = thread[:count], order[:count]
        flags = ((column("parent") == NONE) & (kind != NO_BEGIN)).astype(np.uint8) * np.uint8(_IS_OUTERMOST)
        is_ioctl = (names == run.shapes.number_of("name", "ioctl"))[column("shape")]
        flags |= is_ioctl.astype(np.uint8) * np.uint8(_IS_IOCTL)
        self._columns = {"flags": flags[order]}
        del kind, flags, is_ioctl
        self._columns["name"] = names[column("shape")[order]]
        for key in ("start_ns", "end_ns"):
            self._columns[key] = column(key)[order]
        self._threads, self._first = np.unique(thread, return_index=True)
        self._first = np.append(self._first, len(thread))

    def of(self, thread: int) -> _Spans:
        """The spans of a thread."""
        at = int(np.searchsorted(self._threads, thread))
        is_there = at < len(self._threads) and self._threads[at] == thread
        own = slice(self._first[at], self._first[at + 1]) if is_there else slice(0, 0)
        return _Spans(*(self._columns[name][own] for name in ("start_ns", "end_ns", "name", "flags")))


class HostStates:
    """The states of the threads of a recording. `recorded` has those of `PARTS` that were recorded."""

    def __init__(self, run: Run) -> None:
        self._run = run
        run.forget_columns()  # those below take much memory
        pids, tids, names = (run.shapes.column(key) for key in ("pid", "tid", "name"))
        of_thread, first = run.shapes.threads
        self._threads = {
            (pid, tid): number
            for number, (pid, tid) in enumerate(zip(pids[first].tolist(), tids[first].tolist(), strict=True))
        }
        running, all_of = names == run.shapes.number_of("name", RUNNING), np.ones(len(names), np.bool_)
        tables = ("scheduler", "kernel", "syscall", "userspace", "hook")
        self._spans = {
            kind: _ByThread(run, table, of_thread, shapes, outermost=kind in ("calls", "hooks"))
            for kind, table in zip(_KINDS, tables, strict=True)
            for shapes in (running if kind == "running" else all_of,)
        }
        is_there = {
            "off-CPU": "running",
            "driver": "driver",
            "ioctl": "syscalls",
            "other system calls": "syscalls",
        }
        self.recorded = {part for part, kind in is_there.items() if self._spans[kind].any}
        self.states = tuple(state for state in STATES[:-1] if state != HOOKED or self._spans["hooks"].any)
        """The states that a thread of this recording can be in."""
        self.hooked = hooked_title(run)
        """The name of `HOOKED`."""

    def of(self, thread: Thread, start_ns: Int64s, end_ns: Int64s) -> Spent:
        """How long a thread was in each state in each of some stretches, which are sorted and do not overlap.

        The columns are `stretch`, its index; `state`, an index into `STATES`; `call`, the number of the name
        of the outermost CUDA call at that time, else of the outermost hooked function, or NONE; `syscall`,
        the same for the system call where it is in neither; and `dur_ns`. The rows of a stretch are in the
        order in which the thread first was in them. Names and states are numbers, as texts would take ten
        times as much memory.
        """
        ids = tuple(self._run.shapes.number_of(*one) for one in zip(("pid", "tid"), thread, strict=True))
        number = self._threads.get((ids[0], ids[1]), NONE)
        spans = [self._spans[kind].of(number) for kind in _KINDS]
        runs = runs_of(spans[0])
        if (core := library()) is None:
            return _swept(spans, runs, start_ns, end_ns)
        return _swept_by(core, spans, runs, start_ns, end_ns)

    def name(self, number: int) -> str | None:
        """The name with a number from the columns `call` and `syscall` of `of`."""
        return None if number == NONE else self._run.shapes.text(number)


def runs_of(running: _Spans) -> Int64s:
    """Whether a thread is known to have run, from when to when, and from its first stretch of time on a
    processor to the end of its last. Shape `(5,)`.
    """
    lasts, has_run = running.end_ns > running.start_ns, len(running.start_ns) > 0
    return np.array(
        [
            has_run,
            running.start_ns.min() if has_run else 0,
            running.end_ns.max() if has_run else 0,
            running.start_ns[lasts].min(initial=(1 << 63) - 1),
            running.end_ns[lasts].max(initial=_NEVER),
        ],
        np.int64,
    )


_OF_SPENT: Final = {
    "stretch": np.int64,
    "state": np.uint8,
    "call": np.int32,
    "syscall": np.int32,
    "dur_ns": np.int64,
}


def _swept_by(
    core: ctypes.CDLL, spans: list[_Spans], runs: Int64s, start_ns: Int64s, end_ns: Int64s
) -> Spent:
    """Sweep over the spans in the native core (`states.c`)."""
    keep = [
        tuple(np.ascontiguousarray(column) for column in (one.start_ns, one.end_ns, one.name, one.flags))
        for one in spans
    ]
    pointers = np.array(
        [[*(column.ctypes.data for column in columns), len(columns[0])] for columns in keep], np.uint64
    )
    starts_ns, ends_ns = np.ascontiguousarray(start_ns), np.ascontiguousarray(end_ns)
    found: list[Spent] = []
    first, room, done = 0, _ROOM, ctypes.c_int64()
    while first < len(starts_ns):
        out = {name: np.empty(room, kind) for name, kind in _OF_SPENT.items()}
        order = ("stretch", "dur_ns", "call", "syscall", "state")
        count = core.tp_states(
            pointers.ctypes.data,
            runs.ctypes.data,
            len(starts_ns) - first,
            starts_ns[first:].ctypes.data,
            ends_ns[first:].ctypes.data,
            ctypes.byref(NativeSpent(*(out[name].ctypes.data for name in order))),
            room,
            ctypes.byref(done),
        )
        out["stretch"] += first
        found.append({name: column[:count] for name, column in out.items()})
        room = room if done.value else 2 * room
        first += done.value
    if not found:
        return {name: np.empty(0, kind) for name, kind in _OF_SPENT.items()}
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


def _swept(spans: list[_Spans], runs: Int64s, start_ns: Int64s, end_ns: Int64s) -> Spent:
    """The sweep over the spans in Python."""
    has_run, first_ns, last_ns, on_ns, off_ns = runs.tolist()
    running, driver, syscalls, calls, hooks = spans
    is_ioctl = syscalls.flags & _IS_IOCTL != 0
    unions = [
        Stretches(of.start_ns[some], of.end_ns[some])
        for of, some in (
            (running, slice(None)), (driver, slice(None)), (syscalls, ~is_ioctl), (syscalls, is_ioctl)
        )
    ]  # fmt: skip
    before_ns = np.maximum.accumulate(hooks.end_ns)
    is_first = np.append(np.ones(len(before_ns[:1]), np.bool_), hooks.start_ns[1:] >= before_ns[:-1])
    named = [
        (of.start_ns[some], of.end_ns[some], of.name[some])
        for of, some in (
            (calls, slice(None)), (hooks, is_first), (syscalls, syscalls.flags & _IS_OUTERMOST != 0)
        )
    ]  # fmt: skip
    times = [times for one in unions for times in (one.start_ns, one.end_ns)]
    times += [times for one in named for times in one[:2]]
    edges = np.unique(np.concatenate([[first_ns, last_ns], start_ns, end_ns, *times]))
    # The parts of the stretches between two edges, in which nothing changes.
    stretch = np.searchsorted(start_ns, edges, "right") - 1
    some = np.flatnonzero((stretch >= 0) & (edges < np.append(end_ns, _NEVER)[stretch]))
    at, stretch, dur_ns = edges[some], stretch[some], np.diff(edges, append=0)[some]

    def name_of(start_ns: Int64s, end_ns: Int64s, name: Int32s) -> Int32s:
        """The name of the last span that started, where that has not ended; else NONE."""
        last = np.searchsorted(start_ns, at, "right") - 1
        is_open = at < np.append(end_ns, _NEVER)[last]
        return np.where(is_open, np.append(name, np.int32(NONE))[last], np.int32(NONE))

    call, hook, syscall = (name_of(*one) for one in named)
    is_called, is_hooked = call != NONE, hook != NONE
    outer = STATES.index(IN_CALL), np.where(is_hooked, STATES.index(HOOKED), STATES.index(USER))
    state = np.where(is_called, *outer).astype(np.uint8)
    for code in (3, 2, 1):
        state[unions[code].covered_ns(at, at + 1) > 0] = code
    if has_run:
        state[(unions[0].covered_ns(at, at + 1) == 0) & (on_ns <= at) & (at < off_ns)] = 0
        state[(at < first_ns) | (at >= last_ns)] = STATES.index(ABSENT)
        state[(at >= last_ns) & (is_called | is_hooked | (syscall != NONE))] = 0
    name = np.where(is_called, call, hook)
    columns = stretch, state, name, np.where(name == NONE, syscall, np.int32(NONE))
    of, first = number_rows(*columns)
    order = np.argsort(first)
    sums_ns = sums_by(of, dur_ns, len(first))[order]
    return dict(zip(_OF_SPENT, (*(column[first[order]] for column in columns), sums_ns), strict=True))
