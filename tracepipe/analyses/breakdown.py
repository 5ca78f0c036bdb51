"""Splits the time of calls by layer: ioctls, the driver, off the processor, and on the GPU."""

from __future__ import annotations

from tracepipe.analyses.gpu_work import LaunchCalls
from tracepipe.analyses.nesting import nearest_of_some
from tracepipe.event.columns import NONE, Int64s, Ints, distinct
from tracepipe.event.groups import RowsByNumber, sorted_rows
from tracepipe.event.intervals import Stretches, nothing
from tracepipe.event.origins import is_process
from tracepipe.event.vocabulary import PYTHON_LAYERS, RUNNING
from tracepipe.libraries import np
from tracepipe.store.run import Run
from tracepipe.store.schema import INSTANT

HOOKED, PYTHON_FUNCTIONS = "hooked functions", "Python functions"
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
# The longest line of threads: its positions are integers of 64 bits.
_LINE_NS = 1 << 62


def hooked_title(run: Run) -> str:
    """The name of hooked functions: "Python functions" where another tool recorded those of processes."""
    layers, pids = run.shapes.column("layer"), run.shapes.column("pid")
    numbers = distinct(layers[(layers < 0) & (pids != NONE) & is_process(pids)])
    own = {run.shapes.value("layer", number) for number in numbers.tolist()}
    return HOOKED if own.isdisjoint(PYTHON_LAYERS) else PYTHON_FUNCTIONS


class Breakdown:
    """The time of calls of known length by layer: `PARTS`, each also with its inner parts (`… inclusive`),
    and `GPU`. `recorded` lists the parts that were recorded.

    `rows` are the calls' rows in the `userspace` layer, sorted. Kernels and copies that a call launched run
    during the call and after it.
    """

    def __init__(self, run: Run, rows: Ints) -> None:
        self._run, self._layer, self._rows = run, run.layer("userspace"), rows
        self._thread, first = run.shapes.threads
        names = run.shapes.column("name")
        is_ioctl = names == run.shapes.number_of("name", "ioctl")
        shapes = {
            HOOKED: np.ones(len(names), np.bool_),
            "ioctl": is_ioctl,
            "other system calls": ~is_ioctl,
            "driver": np.ones(len(names), np.bool_),
            OFF_CPU: names == run.shapes.number_of("name", RUNNING),
        }
        # The rows of each part that are not instants.
        rows_of = {
            layer: np.flatnonzero((of.kind != INSTANT) & shapes[layer][of.shape])
            for layer, table in _LAYER_OF.items()
            for of in (run.layer(table),)
        }
        layers = {layer for layer, of in rows_of.items() if len(of)}
        if layers & {"ioctl", "other system calls"}:
            layers |= {"ioctl", "other system calls"}
        self.recorded = [layer for layer in PARTS if layer == "itself" or layer in layers]
        # For each thread whether it ran, and the first and the last time at which it ran.
        running, ran = run.layer("scheduler"), rows_of[OFF_CPU]
        is_scheduled = np.zeros(len(first), np.bool_)
        is_scheduled[self._thread[running.shape[ran]]] = True
        ran = ran[running.end_ns[ran] > running.start_ns[ran]]
        thread = self._thread[running.shape[ran]]
        self._first_ns = np.full(len(first), np.iinfo(np.int64).max)
        self._last_ns = np.full(len(first), np.iinfo(np.int64).min)
        np.minimum.at(self._first_ns, thread, running.start_ns[ran])
        np.maximum.at(self._last_ns, thread, running.end_ns[ran])
        self._lengths_ns = self._layer.end_ns[rows] - self._layer.start_ns[rows]
        # For each call whether it is known when its thread ran.
        self._is_scheduled = is_scheduled[self._thread[self._layer.shape[rows]]]
        self._ns = self._split(rows_of)
        self._add_gpu()

    def _split(self, rows_of: dict[str, Int64s]) -> dict[str, Int64s]:
        """The time of the calls in ns, in columns of shape `(rows,)`: for each of `PARTS` without inner
        parts, and as "… inclusive" with them. The exclusive times add up to the lengths of the calls.
        """
        calls, rows = self._layer, self._rows
        names = [name for layer in PARTS[1:] for name in (layer, f"{layer} inclusive")]
        found = {name: np.zeros(len(rows), np.int64) for name in names}
        starts_ns, ends_ns = calls.start_ns[rows], calls.end_ns[rows]
        if not len(rows):
            return found | {"itself": starts_ns}
        begin_ns, end_ns = int(starts_ns.min()), int(ends_ns.max())
        of_calls = self._thread[calls.shape[rows]], starts_ns, ends_ns
        spans = {}
        for layer in PARTS[1:]:
            of = self._run.layer(_LAYER_OF[layer])
            some = rows_of[layer]
            some = self._hooked() if layer == HOOKED and len(some) else some
            some = some[(of.end_ns[some] > begin_ns) & (of.start_ns[some] < end_ns)]
            start, end = (np.clip(ns[some], begin_ns, end_ns) for ns in (of.start_ns, of.end_ns))
            spans[layer] = self._thread[of.shape[some]], start, end
        every = distinct(of_calls[0])
        # Threads are laid one after the other on a line, so one search serves all of them. A gap of 1 ns at
        # both ends of each thread separates them.
        distance = end_ns - begin_ns + 2
        at_once = max(1, _LINE_NS // distance)

        def on_line(threads: Ints, thread: Ints, *times_ns: Int64s) -> tuple[Int64s, ...]:
            """The indices of the spans of some threads, in their order on the line, and their times on it."""
            at = np.minimum(np.searchsorted(threads, thread), len(threads) - 1)
            some = np.flatnonzero(threads[at] == thread)
            some = some[sorted_rows(at[some])]
            return some, *(at[some] * distance + 1 + ns[some] - begin_ns for ns in times_ns)

        for first in range(0, len(every), at_once):
            threads = every[first : first + at_once]
            begins = np.arange(len(threads), dtype=np.int64) * distance
            places, start, end = on_line(threads, *of_calls)
            covered, inside_ns = nothing(), np.zeros(len(start), np.int64)
            for layer in reversed(PARTS[1:]):
                _, *ends = on_line(threads, *spans[layer])
                stretches = Stretches(*ends)
                if layer == OFF_CPU:
                    # Where it is not known that a thread was off the CPU: before it first ran, and after it
                    # last did; for a thread that never ran, all of the time.
                    ran = (np.clip(ns[threads], begin_ns, end_ns) for ns in (self._first_ns, self._last_ns))
                    _, from_, until = on_line(threads, threads, *ran)
                    before = Stretches(begins, from_)
                    stretches = stretches.joined(before).joined(Stretches(until, begins + distance)).gaps()
                if not len(stretches.start_ns):
                    continue
                now_ns = own_ns = stretches.covered_ns(start, end)
                if len(covered.start_ns):
                    stretches = covered.joined(stretches)
                    now_ns = stretches.covered_ns(start, end)
                covered = stretches
                found[layer][places] = now_ns - inside_ns
                found[f"{layer} inclusive"][places] = own_ns
                inside_ns = now_ns
        found["itself"] = self._lengths_ns - sum(found[layer] for layer in PARTS[1:])
        return found

    def _hooked(self) -> Int64s:
        """The rows of hooked functions inside the calls, which do not overlap. Shape `(n,)`."""
        calls, hooks, rows = self._layer, self._run.layer("hook"), self._rows
        calls_of = RowsByNumber(self._thread[calls.shape[rows]], rows)
        threads = self._thread[hooks.shape]
        call = calls_of.last_before(calls.start_ns, threads, hooks.start_ns, "right")
        some = np.flatnonzero((call != NONE) & (hooks.kind != INSTANT))
        return some[hooks.end_ns[some] <= calls.end_ns[call[some]]]

    def _add_gpu(self) -> None:
        """Add the time of the work that the calls launched."""
        rows, parents = self._rows, self._layer.parent
        self._ns[GPU] = np.zeros(len(rows), np.int64)
        self._has_gpu = np.zeros(len(rows), np.bool_)
        self.launched = 0
        """How many kernels and copies on a GPU were launched by a call, of these rows or others."""
        is_wanted = np.zeros(len(self._layer), np.bool_)
        is_wanted[rows] = True
        for work, done, call in LaunchCalls(self._run).launched():
            self.launched += len(call)
            around = nearest_of_some(parents, is_wanted, call)
            done, at = done[around != NONE], np.searchsorted(rows, around[around != NONE])
            np.add.at(self._ns[GPU], at, work.end_ns[done] - work.start_ns[done])
            self._has_gpu[at] = True

    def lengths_ns(self, some: Ints) -> Int64s:
        """The lengths of the calls at some places. Shapes `(n,)`."""
        lengths_ns: Int64s = self._lengths_ns[some]
        return lengths_ns

    def known_ns(self, what: str, some: Ints) -> Int64s:
        """How long the calls at some places were in a layer, without those of which it is not known. The
        shape is `(n,)` with fewer or equally many items.
        """
        layer = what.removesuffix(" inclusive")
        if layer == GPU:
            some = some[self._has_gpu[some]]
        elif layer == OFF_CPU:
            some = some[self._is_scheduled[some]]
        elif layer not in self.recorded:
            some = some[:0]
        known_ns: Int64s = self._ns[what][some]
        return known_ns
