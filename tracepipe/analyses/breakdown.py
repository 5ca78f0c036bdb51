"""Splits the time of calls by layer: ioctls, the driver, off the processor, and on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tracepipe.analyses.launch_calls import LaunchCalls
from tracepipe.event.columns import NONE, Bools, Int64s, distinct
from tracepipe.event.vocabulary import PIDS_MAX, PYTHON_LAYERS, RUNNING
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.grouping import equal
from tracepipe.reports.frames.intervals import Stretches, nothing
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.moving import Moving, Touching, stretches_of
from tracepipe.reports.frames.nesting import nearest_of_some
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.spans import INSTANT
from tracepipe.reports.frames.stored import made, parts

if TYPE_CHECKING:
    from tracepipe.reports.frames.layers import Layer

HOOKED = "hooked functions"
PARTS = ("itself", HOOKED, "ioctl", "other system calls", "driver", "off-CPU")
"""The parts of a call, outermost first. Where they overlap, the time counts for the innermost: a thread that
sleeps in an ioctl is off the CPU. Hooked functions only count inside the call, not around it."""
GPU = "GPU"
OFF_CPU = "off-CPU"
_LAYER_OF = {
    HOOKED: "hook",
    "ioctl": "syscall",
    "other system calls": "syscall",
    "driver": "kernel",
    OFF_CPU: "scheduler",
}
# The longest `_Line`: its positions are integers of 64 bits.
_LINE_NS = 1 << 62


def hooked_title(run: Run) -> str:
    """The name of hooked functions: "Python functions" where all those of processes are Python's."""
    every = np.arange(len(run.shapes), dtype=np.int32)
    layers, pids = run.shapes.column("layer", every), run.shapes.column("pid", every)
    numbers = distinct(layers[(layers < 0) & (pids != NONE) & (pids <= PIDS_MAX)])
    own = {run.shapes.value("layer", number) for number in numbers.tolist()}
    return "Python functions" if own and own <= PYTHON_LAYERS else HOOKED


class HostTime:
    """The time of a recording's threads by layer. `recorded` lists the parts that were recorded."""

    def __init__(self, run: Run) -> None:
        self._run = run
        every = np.arange(len(run.shapes), dtype=np.int32)
        self._thread, first = equal(run.shapes.column("pid", every), run.shapes.column("tid", every))
        names = run.shapes.column("name", every)
        is_ioctl = names == run.shapes.number_of("name", "ioctl")
        self._shapes = {
            HOOKED: np.ones(len(every), np.bool_),
            "ioctl": is_ioctl,
            "other system calls": ~is_ioctl,
            "driver": np.ones(len(every), np.bool_),
            OFF_CPU: names == run.shapes.number_of("name", RUNNING),
        }
        layers = {layer for layer in _LAYER_OF if self._has(layer)}
        has_syscalls = bool(layers & {"ioctl", "other system calls"})
        self.recorded = [
            layer
            for layer in PARTS
            if layer in layers or layer == "itself" or (_LAYER_OF[layer] == "syscall" and has_syscalls)
        ]
        self._seen_ns, self._is_scheduled = self._running(len(first))

    def _parts_of(self, layer: str) -> Iterator[tuple[Layer, Int64s]]:
        """Yield the rows of a layer that are not instants, a part at a time."""
        of, shapes = self._run.layer(_LAYER_OF[layer]), self._shapes[layer]
        for part in parts(len(of)):
            yield of, np.flatnonzero((of.kind[part] != INSTANT) & shapes[of.shape[part]]) + part.start

    def _has(self, layer: str) -> bool:
        return any(len(rows) for _, rows in self._parts_of(layer))

    def _running(self, threads: int) -> tuple[Int64s, Bools]:
        """For each thread the first and the last time at which it ran, shape `(2, threads)`, and whether it
        ever ran, shape `(threads,)`.
        """
        seen_ns = np.zeros((2, threads), np.int64)
        seen_ns[0], seen_ns[1] = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        is_scheduled = np.zeros(threads, np.bool_)
        for of, rows in self._parts_of(OFF_CPU):
            is_scheduled[self._thread[of.shape[rows]]] = True
            rows = rows[of.end_ns[rows] > of.start_ns[rows]]
            thread = self._thread[of.shape[rows]]
            np.minimum.at(seen_ns[0], thread, of.start_ns[rows])
            np.maximum.at(seen_ns[1], thread, of.end_ns[rows])
        return seen_ns, is_scheduled

    def is_scheduled(self, rows: Ints) -> Bools:
        """For rows of calls, whether a scheduler event shows their threads running. Shapes `(n,)`."""
        scheduled: Bools = self._is_scheduled[self._thread[self._run.layer("userspace").shape[rows]]]
        return scheduled

    def split(self, rows: Ints) -> dict[str, Int64s]:
        """The time of calls in ns, as columns of shape `(rows,)`: for each of `PARTS` without inner parts,
        and as "… inclusive" with them. `rows` are sorted; the exclusive times add up to the lengths of the
        calls.

        The recording is processed in stretches of time, whose results are added.
        """
        calls = Moving(self._run.layer("userspace"), self._thread, rows=rows)
        names = [name for layer in PARTS[1:] for name in (layer, f"{layer} inclusive")]
        found = {name: made(len(rows), np.int64, lambda part: 0) for name in names}
        moving = {
            layer: Moving(self._run.layer(_LAYER_OF[layer]), self._thread, shapes=self._shapes[layer])
            for layer in PARTS[1:]
            if layer != HOOKED
        }
        moving[HOOKED] = Moving(self._run.layer("hook"), self._thread, rows=self._hooked(rows))
        for begin_ns, end_ns in stretches_of(calls, *moving.values()):
            here = calls.within(begin_ns, end_ns)
            spans = {layer: one.within(begin_ns, end_ns) for layer, one in moving.items()}
            threads = distinct(here.thread)
            at_once = max(1, _LINE_NS // (end_ns - begin_ns + 2))
            for first in range(0, len(threads), at_once):
                line = _Line(begin_ns, end_ns, threads[first : first + at_once])
                self._split(line, here, spans, found)
        starts_ns, ends_ns = self._run.layer("userspace").start_ns, self._run.layer("userspace").end_ns
        found["itself"] = made(
            len(rows),
            np.int64,
            lambda part: (
                ends_ns[rows[part]] - starts_ns[rows[part]] - sum(found[layer][part] for layer in PARTS[1:])
            ),
        )
        return found

    def _hooked(self, rows: Ints) -> Int64s:
        """The rows of hooked functions inside some calls, which do not overlap. Shape `(n,)`."""
        calls, hooks = self._run.layer("userspace"), self._run.layer("hook")
        if not len(hooks):
            return np.empty(0, np.int64)
        threads, inside = self._thread[calls.shape[rows]], np.zeros(len(hooks), np.bool_)
        of_hooks = self._thread[hooks.shape]
        for thread in distinct(of_hooks):
            own, some = rows[threads == thread], np.flatnonzero(of_hooks == thread)
            at = np.searchsorted(calls.start_ns[own], hooks.start_ns[some], "right") - 1
            some, at = some[at >= 0], at[at >= 0]
            inside[some] = hooks.end_ns[some] <= calls.end_ns[own[at]]
        return np.flatnonzero(inside)

    def _split(
        self, line: _Line, here: Touching, spans: dict[str, Touching], found: dict[str, Int64s]
    ) -> None:
        """Add the times of the calls on a line to `found`."""
        calls, start, end = line.placed(here)
        covered, inside_ns = nothing(), np.zeros(len(start), np.int64)
        for layer in reversed(PARTS[1:]):
            _, *ends = line.placed(spans[layer])
            stretches = Stretches(*ends)
            if layer == OFF_CPU:
                stretches = stretches.joined(line.outside(*self._seen_ns)).gaps()
            covered = covered.joined(stretches)
            now_ns = covered.covered_ns(start, end)
            found[layer][calls] += now_ns - inside_ns
            found[f"{layer} inclusive"][calls] += stretches.covered_ns(start, end)
            inside_ns = now_ns


class _Line:
    """Threads in a stretch of time, laid one after the other on a line, so one search serves all of them. A
    gap of 1 ns at both ends of each thread separates them.
    """

    def __init__(self, begin_ns: int, end_ns: int, threads: Int64s) -> None:
        self._begin_ns, self._end_ns, self._threads = begin_ns, end_ns, threads
        self._starts = np.arange(len(threads), dtype=np.int64) * (end_ns - begin_ns + 2)

    def placed(self, spans: Touching) -> tuple[Int64s, Int64s, Int64s]:
        """The places of the spans that belong to the threads, and their starts and ends on the line."""
        at = np.minimum(np.searchsorted(self._threads, spans.thread), len(self._threads) - 1)
        some = np.flatnonzero(self._threads[at] == spans.thread)
        first = self._starts[at[some]] + 1 - self._begin_ns
        return spans.place[some], first + spans.start_ns[some], first + spans.end_ns[some]

    def outside(self, from_ns: Int64s, until_ns: Int64s) -> Stretches:
        """The stretches before each thread's first time, and after its last; arguments are by thread."""
        begin_ns, end_ns = self._begin_ns, self._end_ns
        # For a thread without times, everything is before the first.
        first = np.clip(from_ns[self._threads], begin_ns, end_ns) - begin_ns
        last = np.clip(until_ns[self._threads], begin_ns, end_ns) - begin_ns
        before = Stretches(self._starts, self._starts + 1 + first)
        return before.joined(Stretches(self._starts + 1 + last, self._starts + (end_ns - begin_ns + 2)))


class Breakdown:
    """The time of calls of known length by layer: `PARTS`, each also with its inner parts (`… inclusive`),
    and `GPU`.

    `rows` are the calls' rows in the `userspace` layer, sorted. Kernels and copies that a call launched run
    during the call and after it.
    """

    def __init__(self, run: Run, rows: Ints, host: HostTime) -> None:
        self._layer, self._rows, self._host = run.layer("userspace"), rows, host
        self._ns = host.split(rows)
        self._ns[GPU] = made(len(rows), np.int64, lambda part: 0)
        self._has_gpu = np.zeros(len(rows), np.bool_)
        self.launched = 0
        """How many kernels and copies on a GPU were launched by a call, of these rows or others."""
        self._add_gpu(LaunchCalls(run))

    def _add_gpu(self, launches: LaunchCalls) -> None:
        wanted = np.zeros(len(self._layer), np.bool_)
        for part in parts(len(self._rows)):
            wanted[self._rows[part]] = True
        for name in ("gpu_kernel", "transfer"):
            for work, rows in launches.work(name):
                call = launches.find(work, rows)
                self.launched += int(np.count_nonzero(call != NONE))
                rows, call = rows[call != NONE], call[call != NONE]
                around = nearest_of_some(self._layer.parent, wanted, call)
                rows, around = rows[around != NONE], around[around != NONE]
                at = np.searchsorted(self._rows, around)
                np.add.at(self._ns[GPU], at, work.end_ns[rows] - work.start_ns[rows])
                self._has_gpu[at] = True

    def lengths_ns(self, some: Ints) -> Int64s:
        """The lengths of the calls at some places. Shapes `(n,)`."""
        rows = self._rows[some]
        lengths_ns: Int64s = self._layer.end_ns[rows] - self._layer.start_ns[rows]
        return lengths_ns

    def known_ns(self, what: str, some: Ints) -> Int64s:
        """How long the calls at some places were in a layer, without those of which it is not known. The
        shape is `(n,)` with fewer or equally many items.
        """
        layer = what.removesuffix(" inclusive")
        if layer == GPU:
            some = some[self._has_gpu[some]]
        elif layer == OFF_CPU:
            some = some[self._host.is_scheduled(self._rows[some])]
        elif layer not in self._host.recorded:
            some = some[:0]
        known_ns: Int64s = self._ns[what][some]
        return known_ns
