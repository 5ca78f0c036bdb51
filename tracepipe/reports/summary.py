"""What a recording holds: calls, launches, memory, copies, ioctls, kernels and warps, and where time goes.

It is what is asked first of a recording, and reckons with numpy: to load polars takes as long as to read
300 000 events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nsmallest
from typing import Annotated, Any

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.event.model import LAYERS
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.analyses.cuda_calls import launching
from tracepipe.reports.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.reports.analyses.moved import moved
from tracepipe.reports.analyses.slowest import slowest_calls
from tracepipe.reports.frames.grouping import equal, greatest, sort_within
from tracepipe.reports.frames.layers import Layer
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.nesting import NOBODY
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.spans import INSTANT
from tracepipe.reports.frames.stored import Growing, parts
from tracepipe.reports.report import Column, Option, Report, Result, Table

SORTS = ("total", "count", "mean", "p50", "p95", "p99", "max", "name")
_COUNT = Column("count", "count", "count")
# The layers whose events are called functions.
_CALLED = ("userspace", "hook", "syscall", "kernel", "scheduler", "gpu_kernel")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe summary`."""

    top: Annotated[int, Option("How many functions and processes; 0: all.", "N")] = 20
    sort: Annotated[str, Option("Functions in the order of this.", choices=SORTS)] = "total"
    slowest: Annotated[int, Option("How many of the slowest single calls; 0: none.", "N")] = 10


def run(run: Run, options: Options) -> Result:
    """The summary of one recording."""
    result = Result("TRACE SUMMARY")
    result.parts += [_layers(run), _activities(run)]
    tables = [
        *((table, 0) for table in moved(run)),
        *(of(run, options) for of in (_processes, _annotations, _functions)),
        (_slowest(run, options), 0),
    ]
    for table, left_out in tables:
        if table.rows:
            result.parts.append(table)
        if left_out:
            result.notes.append(f"{left_out} more {table.name} are not listed: --top 0 lists all")
    return result


def _layers(run: Run) -> Table:
    counts, losses = run.facts.counts, run.facts.losses
    layers = [layer for layer in LAYERS if counts[layer] or losses[layer]]
    layers += [layer for layer in losses if layer not in LAYERS]
    rows = [
        (layer, counts[layer], losses[layer], 100 * losses[layer] / max(1, losses[layer] + counts[layer]))
        for layer in layers
    ]
    columns = (
        Column("layer", "layer"),
        Column("events", "events", "count"),
        Column("lost", "lost", "count"),
        Column("lost_percent", "lost %", "percent"),
    )
    return Table("layers", "Events", columns, rows, empty="The recording holds no events.")


def _activities(run: Run) -> Table:
    rows = [row for row in _each_activity(run) if row[1]]
    columns = (Column("activity", ""), _COUNT, *LENGTH_COLUMNS)
    note = "Calls inside others are part of them; lengths include whatever a call waits for."
    nothing = "No call, system call, driver function, kernel or warp was recorded."
    return Table("activities", "Activity", columns, rows, note, empty=nothing)


def _each_activity(run: Run) -> Iterator[tuple[Any, ...]]:
    def row(title: str, layer: Layer, rows: Bools) -> tuple[Any, ...]:
        return (title, int(np.count_nonzero(rows)), *of_values(layer.lengths_ns(rows)))

    names = ("userspace", "hook", "syscall", "kernel", "scheduler")
    calls, hooks, syscalls, driver, scheduler = map(run.layer, names)
    kernels = run.layer("gpu_kernel")
    yield row("CUDA API calls", calls, calls.is_call & calls.is_outermost)
    inside = np.count_nonzero(calls.is_call & (calls.parent != NOBODY))
    yield ("  calls inside those", int(inside), *_NO_LENGTHS)
    yield row("kernel launches", calls, launching(run))
    yield row("hooked functions", hooks, hooks.is_call & hooks.is_outermost)
    yield row("system calls", syscalls, syscalls.is_call)
    yield row("  ioctl", syscalls, syscalls.is_call & run.has("name", "ioctl", syscalls))
    yield row("driver functions", driver, driver.is_call & driver.is_outermost)
    yield row("scheduler calls", driver, driver.is_call & run.has("layer", "scheduler", driver))
    events = np.count_nonzero(scheduler.kind == INSTANT)
    yield ("scheduler events", int(events), *_NO_LENGTHS)
    yield row("threads running", scheduler, run.has("name", RUNNING, scheduler))
    yield row("GPU kernels", kernels, np.ones(len(kernels), np.bool_))
    yield ("GPU warps", len(run.warp_table), *of_values(run.warp_table.stays_ns()))
    yield ("GPU thread events", len(run.layer("gpu_thread")), *_NO_LENGTHS)


_NO_LENGTHS = (None,) * len(LENGTH_COLUMNS)


def _processes(run: Run, options: Options) -> tuple[Table, int]:
    """The processes in the order of their ids, and how many with fewer events are left out."""
    calls, syscalls, scheduler = map(run.layer, ("userspace", "syscall", "scheduler"))
    kernels = run.layer("gpu_kernel")
    every = np.arange(len(run.shapes), dtype=np.int32)
    pids = run.shapes.column("pid", every)
    of_shape, first = equal(pids)
    counts, threads = _who(run, of_shape, len(first))
    # Processes are in the order of their ids, what has none before them all.
    busiest = np.argsort(counts, kind="stable")[np.count_nonzero(counts == 0) :]
    shown = np.sort(busiest[-options.top :] if options.top > 0 else busiest)
    shown = shown[np.argsort(pids[first[shown]] == NONE, kind="stable")]
    sums = [
        _cells(of_shape, shown, layer, rows)
        for layer, rows in (
            (calls, calls.is_call & calls.is_outermost),
            (syscalls, syscalls.is_call & run.has("name", "ioctl", syscalls)),
            (kernels, np.ones(len(kernels), np.bool_)),
            (scheduler, run.has("name", RUNNING, scheduler)),
        )
    ]
    rows = []
    for at, one in enumerate(shown.tolist()):
        pid = run.shapes.value("pid", int(pids[first[one]]))
        cells = [cell for of in sums for cell in of[at]]
        rows.append((run.process_name(pid), pid, int(threads[one]) or None, *cells[:-2], cells[-1]))
    columns = (
        Column("process", "process"),
        Column("pid", "pid", "id"),
        Column("threads", "threads", "count"),
        Column("calls", "calls", "count"),
        Column("calls_ns", "in calls", "ns"),
        Column("ioctls", "ioctls", "count"),
        Column("ioctls_ns", "in ioctl", "ns"),
        Column("kernels", "kernels", "count"),
        Column("kernels_ns", "on GPU", "ns"),
        Column("running_ns", "running", "ns"),
    )
    note = "Times of all threads and streams added up."
    return Table("processes", "Processes", columns, rows, note), len(busiest) - len(shown)


def _cells(of_shape: Any, shown: Any, layer: Layer, rows: Bools) -> list[tuple[int, int | None]]:
    """For each process that is shown: how many of `rows` it has, and the sum of their lengths in ns.

    The sum is None where no length is known.
    """
    has_length = layer.has_length
    # A process that is not shown counts in the last place.
    place = np.full(int(of_shape.max(initial=-1)) + 1, len(shown), np.int32)
    place[shown] = np.arange(len(shown), dtype=np.int32)
    count, known, sum_ns = np.zeros((3, len(shown) + 1), np.int64)
    for part in parts(len(layer)):
        of = place[of_shape[layer.shape[part]]]
        timed = rows[part] & has_length[part]
        np.add.at(count, of[rows[part]], 1)
        np.add.at(known, of[timed], 1)
        np.add.at(sum_ns, of[timed], (layer.end_ns[part] - layer.start_ns[part])[timed])
    columns = (count[:-1].tolist(), known[:-1].tolist(), sum_ns[:-1].tolist())
    return [(number, length if timed else None) for number, timed, length in zip(*columns, strict=True)]


def _who(run: Run, of_shape: Any, processes: int) -> tuple[Int64s, Int64s]:
    """How many events each process has, and how many threads; `of_shape` are numbers of processes."""
    counts, seen = np.zeros(processes, np.int64), np.zeros(len(of_shape), np.bool_)
    layers = ("annotation", "userspace", "hook", "syscall", "kernel", "scheduler", "memory", "gpu_kernel")
    for name in layers:
        layer = run.layer(name)
        for part in parts(len(layer)):
            np.add.at(counts, of_shape[layer.shape[part]], 1)
            if name != "gpu_kernel":
                seen[layer.shape[part]] = True
    shapes = np.flatnonzero(seen)
    tids = run.shapes.column("tid", shapes)
    own = of_shape[shapes[tids != NONE]]
    _, first = equal(own, tids[tids != NONE])
    return counts, np.bincount(own[first], minlength=processes)


@dataclass(frozen=True, slots=True)
class _Functions:
    """The functions of a layer, a place in the columns for each: name and layer as shapes have them, how many
    calls, and the range of their lengths, which are in order.
    """

    name: Int32s
    layer: Int32s
    count: Int32s
    first: Int32s
    last: Int32s
    lengths_ns: Int64s

    def row(self, run: Run, at: int) -> tuple[Any, ...]:
        """Name, layer, count, lengths."""
        known = self.lengths_ns[self.first[at] : self.last[at]]
        return (*self.place(run, at), int(self.count[at]), *of_values(known))

    def place(self, run: Run, at: int) -> tuple[str, str]:
        """The name and the layer of one."""
        value = run.shapes.value
        return value("name", int(self.name[at])), value("layer", int(self.layer[at]))

    def measures(self, sort: str) -> Any:
        """By what they are sorted; NONE where that is not known."""
        known = self.last - self.first
        some = np.flatnonzero(known)
        measures = np.full(len(known), NONE, np.int64)
        if sort == "count":
            return self.count
        if sort in ("total", "mean") and len(some):
            measures[some] = np.add.reduceat(self.lengths_ns, self.first[some])
            if sort == "mean":
                measures[some] = np.rint(measures[some] / known[some])
        elif sort.startswith(("p", "max")):
            percent = 100 if sort == "max" else int(sort.removeprefix("p"))
            at = self.first[some] + np.maximum((known[some].astype(np.int64) * percent + 99) // 100 - 1, 0)
            measures[some] = self.lengths_ns[at]
        return measures


def _annotations(run: Run, options: Options) -> tuple[Table, int]:
    """The ranges and marks of programs that count most, and how many are left out."""
    rows, left_out = _called(run, options, ("annotation",))
    columns = (Column("name", "range"), _COUNT, *LENGTH_COLUMNS)
    shown = [(name, *cells) for name, _, *cells in rows]
    note = "Ranges inside others are part of them."
    return Table("annotations", f"Annotations by {options.sort}", columns, shown, note), left_out


def _functions(run: Run, options: Options) -> tuple[Table, int]:
    """The functions that count most, and how many are left out."""
    rows, left_out = _called(run, options, _CALLED)
    columns = (Column("name", "function"), Column("layer", "layer", spare=True), _COUNT, *LENGTH_COLUMNS)
    return Table("functions", f"Functions by {options.sort}", columns, rows), left_out


def _called(run: Run, options: Options, layers: tuple[str, ...]) -> tuple[list[tuple[Any, ...]], int]:
    """Name, layer, count and lengths of what counts most in some layers, and how many are left out."""
    every = np.arange(len(run.shapes), dtype=np.int32)
    names, of_layers = run.shapes.column("name", every), run.shapes.column("layer", every)
    of_shape, first = equal(of_layers, names)
    known = names[first], of_layers[first]
    found = [_functions_of(run, run.layer(name), of_shape, *known) for name in layers]
    shown = [of.row(run, at) for of, at in _first_ones(run, found, options)]
    return shown, sum(len(of.count) for of in found) - len(shown)


def _first_ones(run: Run, found: list[_Functions], options: Options) -> Iterator[tuple[_Functions, int]]:
    """The functions that are shown, in order. Of a million names few are looked at where numbers decide."""
    starts = np.cumsum([0, *(len(of.count) for of in found)])
    count = np.concatenate([of.count for of in found])
    measure = np.concatenate([of.measures(options.sort) for of in found])

    def function(at: Any) -> tuple[_Functions, int]:
        layer = int(np.searchsorted(starts, at, "right")) - 1
        return found[layer], int(at - starts[layer])

    def rank(at: Any) -> tuple[Any, ...]:
        of, place = function(at)
        name, layer = of.place(run, place)
        return name if options.sort == "name" else -int(measure[at]), -int(count[at]), layer, name

    if options.top <= 0:
        return map(function, sorted(range(len(count)), key=rank))
    surely, perhaps = np.empty(0, np.int32), np.arange(len(count), dtype=np.int32)
    for numbers in () if options.sort == "name" else (measure, count):
        more, perhaps = greatest(numbers, perhaps, options.top - len(surely))
        surely = np.concatenate([surely, more])
    return map(function, nsmallest(options.top, np.concatenate([surely, perhaps]), rank))


def _slowest(run: Run, options: Options) -> Table:
    """The calls that took longest, one by one: of the CUDA libraries, else of what was recorded instead."""
    found = ((name, slowest_calls(run.layer(name), options.slowest)) for name in _OF_LAYER)
    name, slowest = next((one for one in found if one[1]), ("userspace", []))
    layer, rows = run.layer(name), []
    for row in slowest:
        shape = int(layer.shape[row])
        values = {key: run.shapes.value(key, int(run.shapes.column(key, shape))) for key in _WHOSE}
        pid, tid = values["pid"], values["tid"]
        start_ns, end_ns = int(layer.start_ns[row]), int(layer.end_ns[row])
        thread = run.thread_name(pid, tid) or run.process_name(pid)
        rows.append((values["name"], start_ns - run.facts.start_ns, end_ns - start_ns, thread, pid, tid))
    columns = (
        Column("name", "call"),
        Column("at_ns", "at", "at"),
        Column("dur_ns", "length", "ns"),
        Column("thread", "thread"),
        Column("pid", "pid", "id", spare=True),
        Column("tid", "tid", "id"),
    )
    note = f"Single calls of the {_OF_LAYER[name]}, without those inside others."
    return Table("slowest", "The slowest calls", columns, rows, note)


_WHOSE = ("name", "pid", "tid")
_OF_LAYER = {"userspace": "CUDA libraries", "kernel": "driver", "syscall": "kernel", "gpu_kernel": "GPU"}


def _functions_of(run: Run, layer: Layer, of_shape: Any, names: Any, layers: Any) -> _Functions:
    """The functions of a layer; `of_shape` are their numbers, by which names and layers stand."""
    called = layer.is_call & ~run.has("name", RUNNING, layer)
    has_length, lengths_ns, numbers = layer.has_length, Growing(np.int64), Growing(np.int64)
    count, known = np.zeros((2, len(names)), np.int32)
    for part in parts(len(layer)):
        of = of_shape[layer.shape[part]]
        some = called[part] & has_length[part]
        np.add.at(count, of[called[part]], 1)
        np.add.at(known, of[some], 1)
        numbers.extend(of[some], int(np.count_nonzero(some)))
        lengths_ns.extend((layer.end_ns[part] - layer.start_ns[part])[some], int(np.count_nonzero(some)))
    there = np.flatnonzero(count)
    last = np.cumsum(known[there], dtype=np.int32)
    in_order = sort_within(numbers.whole(), lengths_ns.whole())
    return _Functions(names[there], layers[there], count[there], last - known[there], last, in_order)


REPORT = Report(
    "summary",
    Options,
    run,
)
