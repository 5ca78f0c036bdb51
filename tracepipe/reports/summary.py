"""How the GPUs spent their time, and what a recording contains: calls, launches, memory, copies, ioctls,
warps.

This is the first report that a user asks for. It computes with numpy, except for the peak of memory: loading
polars takes as long as reading 300 000 events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from tracepipe.analyses.breakdown import hooked_title
from tracepipe.analyses.cuda_calls import launching
from tracepipe.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.analyses.functions import SORTS, functions_of
from tracepipe.analyses.glance import figures, glance_of, gpu_time, sentences
from tracepipe.analyses.kernel_counters import kernel_counters
from tracepipe.analyses.moved import moved
from tracepipe.analyses.occupancy import occupancy_table
from tracepipe.analyses.slowest import slowest_calls
from tracepipe.event.columns import NONE, Bools, Int64s
from tracepipe.event.model import LAYERS
from tracepipe.event.vocabulary import PIDS_MAX, RUNNING
from tracepipe.options import Option
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.grouping import equal
from tracepipe.reports.frames.kept_rows import kept_rows
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.nesting import NOBODY
from tracepipe.reports.frames.stored import parts
from tracepipe.reports.report import Column, Report, Result, Table
from tracepipe.store.run import Layer, Run
from tracepipe.store.spans import INSTANT
from tracepipe.units import counted

_COUNT = Column("count", "count", "count")
# The layers whose events are functions. Each has a separate table, so that a system call that waits all day
# is not ranked against a kernel.
_CALLED = {
    "userspace": ("CUDA calls", "calls"),
    "hook": ("Functions of hooks", "hooks"),
    "syscall": ("System calls", "syscalls"),
    "kernel": ("Driver functions", "driver"),
    "scheduler": ("Events of the scheduler", "scheduler"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe summary`."""

    top: Annotated[int, Option("Show at most N functions of each layer, and N processes; 0: all.", "N")] = 10
    sort: Annotated[str, Option("Order the functions by this.", choices=SORTS)] = "total"
    slowest: Annotated[int, Option("Show the N slowest single calls; 0: none.", "N")] = 10


def run(run: Run, options: Options) -> Result:
    """The summary of one recording."""
    result = Result("TRACE SUMMARY")
    seen = glance_of(run)
    tables = [
        *((table, 0) for table in (sentences(run, seen), gpu_time(seen))),
        _kernels(run, options),
        (occupancy_table(run, options.top), 0),
        kernel_counters(run, options.top),
        *((table, 0) for table in (*figures(run, seen), _layers(run), _activities(run), *moved(run))),
        *(_called(run, name, options) for name in _CALLED),
        _processes(run, options),
        _called(run, "annotation", options),
        (_slowest(run, options), 0),
    ]
    for table, left_out in tables:
        if table.rows or table.empty:
            result.parts.append(table)
        if left_out:
            result.notes.append(f"{left_out} more {table.name} are not listed: --top 0 lists all")
    result.notes += seen.notes
    return result


def _layers(run: Run) -> Table:
    counts, losses = run.facts.counts, run.facts.losses
    layers = [layer for layer in LAYERS if counts[layer] or losses[layer]]
    layers += [layer for layer in losses if layer not in LAYERS]
    shares = (100 * losses[layer] / max(1, losses[layer] + counts[layer]) for layer in layers)
    # A loss that names no layer has no share: the events of the layers that it is from are not known.
    rows = [
        (layer, counts[layer], losses[layer], share if layer in LAYERS else None)
        for layer, share in zip(layers, shares, strict=True)
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
    note = "The length of a call includes the calls inside it, and the time for which it waits."
    nothing = "No calls, system calls, driver functions, kernels or warps were recorded."
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
    yield row(hooked_title(run), hooks, hooks.is_call & hooks.is_outermost)
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
    """The processes with the most events, in the order of their ids, and how many others there are."""
    calls, syscalls, scheduler = map(run.layer, ("userspace", "syscall", "scheduler"))
    kernels = run.layer("gpu_kernel")
    every = np.arange(len(run.shapes), dtype=np.int32)
    pids = run.shapes.column("pid", every)
    of_shape, first = equal(pids)
    counts, threads = _who(run, of_shape, len(first))
    # Processes are in the order of their ids; events without a process come before all of them.
    busiest = np.argsort(counts, kind="stable")[np.count_nonzero(counts == 0) :]
    shown = np.sort(busiest[-options.top :] if options.top > 0 else busiest)
    shown = shown[np.argsort(pids[first[shown]] == NONE, kind="stable")]
    sums = [
        _sums(of_shape, shown, layer, rows)
        for layer, rows in (
            (calls, calls.is_call & calls.is_outermost),
            (syscalls, syscalls.is_call & run.has("name", "ioctl", syscalls)),
            (kernels, np.ones(len(kernels), np.bool_)),
            (scheduler, run.has("name", RUNNING, scheduler)),
        )
    ]
    no_processes = 0

    def each() -> Iterator[tuple[Any, ...]]:
        nonlocal no_processes
        for at, one in enumerate(shown):
            pid = run.shapes.value("pid", int(pids[first[one]]))
            cells = [cell for of in sums for cell in _known(*of[:, at].tolist())]
            if pid is not None and pid > PIDS_MAX and not any(cells):
                no_processes += 1
                continue
            yield run.process_name(pid), pid, int(threads[one]) or None, *cells[:-2], cells[-1]

    rows = kept_rows(each())
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
    note = "Times are summed over all threads and streams of a process."
    if no_processes:
        groups = counted(
            no_processes, "group|groups of another tool's tracks that is|are not a_process|processes"
        )
        note += f" Not listed: {groups}."
    return Table("processes", "Processes", columns, rows, note), len(busiest) - len(shown)


def _known(count: int, known: int, sum_ns: int) -> tuple[int, int | None]:
    """The count and the sum of the lengths, None where no length is known."""
    return count, sum_ns if known else None


def _sums(of_shape: Ints, shown: Ints, layer: Layer, rows: Bools) -> Int64s:
    """For each process that is shown: how many of `rows` it has, how many of these have a known length, and
    the sum of these lengths in ns. The result has the shape `(3, shown)`; `of_shape` is the process of each
    shape, `rows` flags rows of the layer.
    """
    has_length = layer.has_length
    # Processes that are not shown are summed in the last place.
    place = np.full(int(of_shape.max(initial=-1)) + 1, len(shown), np.int32)
    place[shown] = np.arange(len(shown), dtype=np.int32)
    count, known, sum_ns = sums = np.zeros((3, len(shown) + 1), np.int64)
    for part in parts(len(layer)):
        of = place[of_shape[layer.shape[part]]]
        timed = rows[part] & has_length[part]
        np.add.at(count, of[rows[part]], 1)
        np.add.at(known, of[timed], 1)
        np.add.at(sum_ns, of[timed], (layer.end_ns[part] - layer.start_ns[part])[timed])
    return sums[:, :-1]


def _who(run: Run, of_shape: Ints, processes: int) -> tuple[Int64s, Int64s]:
    """How many events and how many threads each process has, shapes `(processes,)`. `of_shape` is the number
    of the process of each shape.
    """
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


def _called(run: Run, layer: str, options: Options) -> tuple[Table, int]:
    """The first functions of a layer in the chosen order, and how many are left out."""
    found = functions_of(run, layer)
    shown = found.ranked(run, options.sort, options.top)
    rows = (found.row(run, at) for at in shown)
    columns = (
        Column("name", "function"), Column("layer", "layer", spare=True), _COUNT, *LENGTH_COLUMNS
    )  # fmt: skip
    if layer == "annotation":
        note = "The length of a range includes the ranges inside it."
        columns, rows = (Column("name", "range"), *columns[2:]), ((row[0], *row[2:]) for row in rows)
        table = Table("annotations", f"Annotations by {options.sort}", columns, kept_rows(rows), note)
    else:
        title, name = _CALLED[layer]
        table = Table(name, f"{title} by {options.sort}", columns, kept_rows(rows))
    return table, len(found) - len(shown)


def _kernels(run: Run, options: Options) -> tuple[Table, int]:
    """The first kernels in the chosen order, with their shares of the time of all, and how many are
    left out.
    """
    found = functions_of(run, "gpu_kernel")
    shown, whole_ns = found.ranked(run, options.sort, options.top), int(found.lengths_ns.sum())

    def row(at: int) -> tuple[Any, ...]:
        name, _, count, total_ns, *spread = found.row(run, at)
        share = 100 * total_ns / whole_ns if whole_ns and total_ns is not None else None
        return name, share, count, total_ns, *spread

    # Names of kernels are long: they get the room of two percentiles on a narrow terminal.
    spread_of = (replace(column, spare=column.key in ("p50_ns", "p95_ns")) for column in LENGTH_COLUMNS)
    columns = (Column("name", "kernel"), Column("share_percent", "share", "percent"), _COUNT, *spread_of)
    note = "Share: of the sum of the lengths of all kernels."
    rows = kept_rows(map(row, shown))
    return Table("kernels", f"Kernels by {options.sort}", columns, rows, note), len(found) - len(shown)


def _slowest(run: Run, options: Options) -> Table:
    """The longest single calls: of the CUDA libraries, else of the first other layer that was recorded."""
    found = ((name, slowest_calls(run.layer(name), options.slowest)) for name in _OF_LAYER)
    name, slowest = next((one for one in found if one[1]), ("userspace", []))
    layer, rows = run.layer(name), []
    for row in slowest:
        shape = int(layer.shape[row])
        pid, tid = run.shapes.ids_of(shape)
        called = run.shapes.value("name", int(run.shapes.column("name", shape)))
        start_ns, end_ns = int(layer.start_ns[row]), int(layer.end_ns[row])
        thread = run.thread_name(pid, tid) or run.process_name(pid)
        rows.append((called, start_ns - run.facts.start_ns, end_ns - start_ns, thread, pid, tid))
    columns = (
        Column("name", "call"),
        Column("at_ns", "at", "at"),
        Column("dur_ns", "length", "ns"),
        Column("thread", "thread"),
        Column("pid", "pid", "id", spare=True),
        Column("tid", "tid", "id"),
    )
    note = f"Single calls of the {_OF_LAYER[name]}, without calls inside others."
    return Table("slowest", "The slowest calls", columns, rows, note)


_OF_LAYER = {"userspace": "CUDA libraries", "kernel": "driver", "syscall": "kernel", "gpu_kernel": "GPU"}


REPORT = Report(
    "summary",
    Options,
    run,
)
