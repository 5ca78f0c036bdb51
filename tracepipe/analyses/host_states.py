"""The states of a thread in stretches of time. Each ns counts once: off the CPU before driver before system
call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tracepipe.analyses.breakdown import HOOKED, PARTS, hooked_title
from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, distinct
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.grouping import Grouped, equal, runs
from tracepipe.reports.frames.intervals import Stretches
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.nesting import NOBODY
from tracepipe.reports.frames.stored import Growing, parts, taken
from tracepipe.store.run import Layer, Run
from tracepipe.store.spans import INSTANT, NO_BEGIN

IN_CALL, USER, ABSENT, UNKNOWN = "CUDA call", "user code", "not running", "unknown"
"""The states in addition to `PARTS[1:]`. IN_CALL: in a CUDA call, and in no layer below it. USER: in no
recorded function. ABSENT: before the thread first ran, or after it last did. UNKNOWN: the thread is not
known. `HOOKED` is a state too: in a function of a hook's own layer, and in no CUDA call."""
OFF_CPU = "off-CPU"
Thread = tuple[int | None, int | None]
Spent = dict[str, Ints]
"""The columns that `HostStates.of` yields, of one shape `(n,)`."""
_INNERMOST_FIRST = tuple(reversed([part for part in PARTS[1:] if part != HOOKED]))
STATES = (*_INNERMOST_FIRST, ABSENT, IN_CALL, HOOKED, USER, UNKNOWN)


class _Spans:
    """The spans of one thread, sorted by time."""

    def __init__(self, run: Run, layer: Layer, rows: Ints) -> None:
        self._shapes = run.shapes
        self.start_ns, self.end_ns = taken(layer.start_ns, rows), taken(layer.end_ns, rows)
        self._shape = taken(layer.shape, rows)

    def at(self, ts_ns: Int64s) -> Int64s:
        """The index of the span that contains each time, -1 for none. The spans do not overlap."""
        place = np.searchsorted(self.start_ns, ts_ns, "right") - 1
        inside = (place >= 0) & (ts_ns < self.end_ns.take(place, mode="clip")) if len(self._shape) else False
        return np.where(inside, place, -1)

    def outermost(self) -> _Spans:
        """Keep the spans that begin in no other one: spans of several layers may overlap."""
        before_ns = np.maximum.accumulate(self.end_ns)[:-1]
        kept = np.concatenate([np.ones(len(self.start_ns[:1]), np.bool_), self.start_ns[1:] >= before_ns])
        self.start_ns, self.end_ns = self.start_ns[kept], self.end_ns[kept]
        self._shape = self._shape[kept]
        return self

    def names(self, places: Ints) -> Int32s:
        """The numbers of the names of the spans at some indices, NONE for -1."""
        if not len(self._shape):
            return np.full(len(places), NONE, np.int32)
        numbers = self._shapes.column("name", self._shape[np.maximum(places, 0)])
        return np.where(places >= 0, numbers, np.int32(NONE))


class _ByThread:
    """The spans of some shapes by thread; with `outermost`, only those inside no other of their layer."""

    def __init__(
        self, run: Run, name: str, of_thread: Ints, shapes: Bools, *, outermost: bool = False
    ) -> None:
        self._run, self._layer = run, run.layer(name)
        layer, threads, rows = self._layer, Growing(np.int32), Growing(np.int32)
        for part in parts(len(layer)):
            some = (layer.kind[part] != INSTANT) & shapes[layer.shape[part]]
            if outermost:
                some &= (layer.parent[part] == NOBODY) & (layer.kind[part] != NO_BEGIN)
            own = np.flatnonzero(some) + part.start
            threads.extend(of_thread[layer.shape[own]], len(own))
            rows.extend(own, len(own))
        self._rows = Grouped(threads.whole(), rows.whole())
        self.any = rows.count > 0

    def of(self, thread: int) -> _Spans:
        """The spans of a thread."""
        return _Spans(self._run, self._layer, self._rows.of(thread))


class HostStates:
    """The states of the threads of a recording. `recorded` has those of `PARTS` that were recorded."""

    def __init__(self, run: Run) -> None:
        self._run = run
        every = np.arange(len(run.shapes), dtype=np.int32)
        pids, tids, names = (run.shapes.column(key, every) for key in ("pid", "tid", "name"))
        of_thread, first = equal(pids, tids)
        # Threads are sorted by pid, then by tid.
        self._ids = pids[first], tids[first]
        is_ioctl = names == run.shapes.number_of("name", "ioctl")
        all_of = np.ones(len(every), np.bool_)
        shapes = {
            "off-CPU": ("scheduler", names == run.shapes.number_of("name", RUNNING)),
            "driver": ("kernel", all_of),
            "ioctl": ("syscall", is_ioctl),
            "other system calls": ("syscall", ~is_ioctl),
        }
        self._frames = {
            layer: _ByThread(run, name, of_thread, some) for layer, (name, some) in shapes.items()
        }
        self.recorded = {layer for layer, spans in self._frames.items() if spans.any}
        if self.recorded & {"ioctl", "other system calls"}:
            self.recorded |= {"ioctl", "other system calls"}
        self._calls = _ByThread(run, "userspace", of_thread, all_of, outermost=True)
        self._syscalls = _ByThread(run, "syscall", of_thread, all_of, outermost=True)
        self._hooks = _ByThread(run, "hook", of_thread, all_of, outermost=True)
        self.states = tuple(state for state in STATES[:-1] if state != HOOKED or self._hooks.any)
        """The states that a thread of this recording can be in."""
        self.hooked = hooked_title(run)
        """The name of `HOOKED`."""

    def _number(self, thread: Thread) -> int:
        """The number of a thread, NONE where it has no shape."""
        pid, tid = (self._run.shapes.number_of(*one) for one in zip(("pid", "tid"), thread, strict=True))
        pids, tids = self._ids
        first, last = np.searchsorted(pids, [pid, pid + 1])
        at = first + int(np.searchsorted(tids[first:last], tid))
        return int(at) if at < last and tids[at] == tid else NONE

    def _layer(self, thread: int, layer: str) -> Stretches:
        spans = self._frames[layer].of(thread)
        union = Stretches(spans.start_ns, spans.end_ns)
        return union.gaps() if layer == OFF_CPU else union

    def of(self, thread: Thread, start_ns: Int64s, end_ns: Int64s) -> Iterator[Spent]:
        """Yield how long a thread was in each state in each of some stretches, a part of them at a time. The
        stretches are sorted and do not overlap.

        The columns are `stretch`, its index; `state`, an index into `STATES`; `call`, the number of the name
        of the outermost CUDA call at that time, else of the outermost hooked function, or NONE; `syscall`,
        the same for the system call where it is in neither; and `dur_ns`. Names and states are numbers, as
        texts would take ten times as much memory.
        """
        number = self._number(thread)
        calls, syscalls = self._calls.of(number), self._syscalls.of(number)
        hooks = self._hooks.of(number).outermost()
        layers = [self._layer(number, layer) for layer in _INNERMOST_FIRST]
        running = self._frames[OFF_CPU].of(number)
        has_run = len(running.start_ns) > 0
        seen_ns = [int(running.start_ns.min()), int(running.end_ns.max())] if has_run else []
        lasting: tuple[Any, ...] = (calls, syscalls, hooks, *layers)
        edges = [edge for one in lasting for edge in (one.start_ns, one.end_ns)]
        edges.append(np.array(seen_ns, np.int64))
        open_: list[Spent] = []
        for left, right, stretch in _pieces(start_ns, end_ns, edges):
            call, syscall, hook = (of.at(left) for of in (calls, syscalls, hooks))
            state = np.where(hook >= 0, STATES.index(HOOKED), STATES.index(USER))
            state[call >= 0] = STATES.index(IN_CALL)
            for code in reversed(range(len(layers))):
                state[_is_in(layers[code], left)] = code
            if seen_ns:
                first_ns, last_ns = seen_ns
                # A thread that sleeps in a call until the end of the recording does not run again.
                waits = (call >= 0) | (syscall >= 0) | (hook >= 0)
                state[(left < first_ns) | (left >= last_ns)] = STATES.index(ABSENT)
                state[(left >= last_ns) & waits] = STATES.index(OFF_CPU)
            names = {"call": calls.names(call), "syscall": syscalls.names(syscall)}
            names["call"] = np.where(names["call"] == NONE, hooks.names(hook), names["call"])
            names["syscall"] = np.where(names["call"] == NONE, names["syscall"], NONE).astype(np.int32)
            columns = {"stretch": stretch, "state": state.astype(np.uint8), **names}
            # The last stretch may continue in the next piece.
            added = _added_up([*open_, {**columns, "dur_ns": right - left}])
            last = int(np.searchsorted(added["stretch"], added["stretch"][-1:].max(initial=0)))
            open_ = [{key: column[last:] for key, column in added.items()}]
            yield {key: column[:last] for key, column in added.items()}
        yield from open_

    def name(self, number: int) -> str | None:
        """The name with a number from the columns `call` and `syscall` of `of`."""
        return None if number == NONE else self._run.shapes.text(number)


def _pieces(start_ns: Int64s, end_ns: Int64s, edges: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the stretches, cut at the edges, a part at a time: starts, ends, indices of the stretches."""
    for some in [*parts(len(start_ns))] or [slice(0, 0)]:
        first_ns, last_ns = start_ns[some][:1], end_ns[some][-1:]
        within = [edge[(edge > first_ns) & (edge < last_ns)] for edge in edges if len(first_ns)]
        bounds = distinct(np.concatenate([start_ns[some], end_ns[some], *within]))
        left, right = bounds[:-1], bounds[1:]
        stretch = np.searchsorted(start_ns, left, "right") - 1
        kept = left < end_ns.take(stretch, mode="clip") if len(left) else left < left
        left, right, stretch = left[kept], right[kept], stretch[kept]
        # One stretch may have any number of edges.
        for part in [*parts(len(left))] or [slice(0, 0)]:
            yield left[part], right[part], stretch[part]


def _added_up(pieces: list[Spent]) -> Spent:
    """The sums of the time of each stretch, state, call and system call, in the order of their
    first pieces.
    """
    spent = {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}
    dur_ns = spent.pop("dur_ns")
    order, starts = runs(*spent.values())
    first = order[starts]
    by_first = np.argsort(first)
    sums = np.add.reduceat(dur_ns[order], starts) if len(starts) else dur_ns
    return {**{key: column[first[by_first]] for key, column in spent.items()}, "dur_ns": sums[by_first]}


def _is_in(stretches: Stretches, ts_ns: Int64s) -> Bools:
    if not len(stretches.start_ns):
        return np.zeros(len(ts_ns), bool)
    place = np.searchsorted(stretches.start_ns, ts_ns, "right") - 1
    return (place >= 0) & (ts_ns < stretches.end_ns.take(place, mode="clip"))
