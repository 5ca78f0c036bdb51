"""One screen that says what was recorded, where the GPUs' time goes and why, which is the first report that a
user asks for; and all tables on calls, launches, memory, copies, ioctls, warps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from tracepipe.analyses.breakdown import HOOKED, PYTHON_FUNCTIONS, hooked_title
from tracepipe.analyses.cuda_calls import launching
from tracepipe.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.analyses.functions import (
    SORTS,
    activity_of,
    calls_of,
    functions_of,
    slowest_calls,
)  # fmt: skip
from tracepipe.analyses.glance import figures, glance_of, gpu_time, sentences
from tracepipe.analyses.kernel_counters import kernel_counters
from tracepipe.analyses.memory_traffic import memory_traffic
from tracepipe.analyses.occupancy import occupancy_table
from tracepipe.event.columns import NONE
from tracepipe.event.model import LAYERS
from tracepipe.event.origins import is_process
from tracepipe.event.vocabulary import PYTHON_LAYERS, RUNNING
from tracepipe.options import Option
from tracepipe.reports.first_screen import cuda_errors, screen
from tracepipe.reports.report import COUNT, SHARE, Column, Report, Result, Table
from tracepipe.store.run import Run
from tracepipe.store.schema import FUNCTIONS, INSTANT, IS_CALL, IS_TIMED
from tracepipe.units import counted

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

    all: Annotated[bool, Option("Show all tables. The options below show them too.")] = False
    top: Annotated[int, Option("Show at most N functions of each layer, and N processes; 0: all.", "N")] = 10
    sort: Annotated[str, Option("Order the functions by this.", choices=SORTS)] = "total"
    slowest: Annotated[int, Option("Show the N slowest single calls; 0: none.", "N")] = 10


def run(run: Run, options: Options) -> Result:
    """The summary of one recording."""
    return screen(run) if options == Options() else _everything(run, options)


def _everything(run: Run, options: Options) -> Result:
    """All tables."""
    result = Result("TRACE SUMMARY")
    seen = glance_of(run)
    run.forget_columns()  # the rest is asked of the tables
    tables = [
        *((table, 0) for table in cuda_errors(run)),
        *((table, 0) for table in (sentences(run, seen), gpu_time(seen))),
        _kernels(run, options),
        (occupancy_table(run, options.top), 0),
        kernel_counters(run, options.top),
        *(
            (table, 0)
            for table in (*figures(run, seen), _layers(run), _activities(run), *memory_traffic(run))
        ),
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
    columns = (Column("activity", ""), COUNT, *LENGTH_COLUMNS)
    note = "The length of a call includes the calls inside it, and the time for which it waits."
    nothing = "No calls, system calls, driver functions, kernels or warps were recorded."
    return Table("activities", "Activity", columns, rows, note, empty=nothing)


def _each_activity(run: Run) -> Iterator[tuple[Any, ...]]:
    def whole(title: str, table: str) -> tuple[Any, ...]:
        return (title, *activity_of(run, table))

    def some(title: str, table: str, shapes: str) -> tuple[Any, ...]:
        return (title, *calls_of(run, table, shapes))

    def named(name: str) -> str:
        return f"s.name_text = {run.shapes.number_of('name', name)}"

    ((inside, events),) = run.store.rows(
        f"""select coalesce(sum(rows) filter (layer = 'userspace' and {IS_CALL} and not is_outermost), 0),
        coalesce(sum(rows) filter (layer = 'scheduler' and kind = {INSTANT}), 0) from store.shape_sums x"""
    )
    yield whole("CUDA API calls", "userspace")
    yield ("  calls inside those", inside, *_NO_LENGTHS)
    launches = launching(run)
    yield ("kernel launches", len(launches), *of_values(run.layer("userspace").lengths_ns(launches)))
    python = ", ".join(str(run.shapes.number_of("layer", name)) for name in sorted(PYTHON_LAYERS))
    other = HOOKED if hooked_title(run) == HOOKED else "other functions"
    for title, are_python in ((PYTHON_FUNCTIONS, ""), (other, "not")):
        of_processes = f"s.gpu = {NONE} and s.layer {are_python} in ({python})"
        yield (title, *calls_of(run, "hook", of_processes, FUNCTIONS["hook"]))
    yield whole("system calls", "syscall")
    yield some("  ioctl", "syscall", named("ioctl"))
    yield whole("driver functions", "kernel")
    yield some("scheduler calls", "kernel", f"s.layer = {LAYERS.index('scheduler')}")
    yield ("scheduler events", events, *_NO_LENGTHS)
    yield some("threads running", "scheduler", named(RUNNING))
    yield whole("GPU kernels", "gpu_kernel")
    yield ("GPU warps", len(run.warp_table), *of_values(run.warp_table.stays_ns()))
    yield ("GPU thread events", run.store.count("gpu_thread"), *_NO_LENGTHS)


_NO_LENGTHS = (None,) * len(LENGTH_COLUMNS)
_OF_PROCESSES = (
    "annotation", "userspace", "hook", "syscall", "kernel", "scheduler", "memory", "gpu_kernel",
)  # fmt: skip


def _processes(run: Run, options: Options) -> tuple[Table, int]:
    """The processes with the most events, in the order of their ids, and how many others there are."""
    ioctl, running = (run.shapes.number_of("name", name) for name in ("ioctl", RUNNING))
    conditions = (
        f"x.layer = 'userspace' and {IS_CALL} and x.is_outermost",
        f"x.layer = 'syscall' and {IS_CALL} and s.name_text = {ioctl}",
        f"x.layer = 'gpu_kernel' and {IS_CALL}",
        f"x.layer = 'scheduler' and s.name_text = {running}",
    )
    sums = ", ".join(
        f"""coalesce(sum(rows) filter ({which}), 0)::bigint,
        sum(total_ns) filter ({which} and {IS_TIMED})"""
        for which in conditions
    )
    found = run.store.rows(
        f"""select s.pid, count(distinct s.tid) filter (x.layer <> 'gpu_kernel' and s.tid <> -1), {sums},
        count(*) over () from store.shape_sums x join store.shapes s using (shape)
        where x.layer in {_OF_PROCESSES} group by s.pid
        order by sum(rows) desc, s.pid desc {f"limit {options.top}" if options.top > 0 else ""}"""
    )
    rows, no_processes = [], 0
    # Processes are in the order of their ids; events without a process come after all of them.
    for number, threads, *cells, _ in sorted(found, key=lambda one: (one[0] == NONE, one[0])):
        pid = run.shapes.value("pid", number)
        if pid is not None and not is_process(pid) and not any(cells):
            no_processes += 1
            continue
        rows.append((run.process_name(pid), pid, threads or None, *cells[:-2], cells[-1]))
    columns = (
        Column("process", "process"),
        Column("pid", "pid", "pid"),
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
    left_out = found[0][-1] - len(found) if found else 0
    return Table("processes", "Processes", columns, rows, note), left_out


def _called(run: Run, layer: str, options: Options) -> tuple[Table, int]:
    """The first functions of a layer in the chosen order, and how many are left out."""
    found = functions_of(run, layer, options.sort, options.top)
    columns = (Column("name", "function"), Column("layer", "layer", spare=True), COUNT, *LENGTH_COLUMNS)
    if layer == "annotation":
        note = "The length of a range includes the ranges inside it."
        columns, rows = (Column("name", "range"), *columns[2:]), [(row[0], *row[2:]) for row in found.rows]
        table = Table("annotations", f"Annotations by {options.sort}", columns, rows, note)
    else:
        title, name = _CALLED[layer]
        table = Table(name, f"{title} by {options.sort}", columns, found.rows)
    return table, found.left_out


def _kernels(run: Run, options: Options) -> tuple[Table, int]:
    """The first kernels in the chosen order, with their shares of all time, and how many are left out."""
    found = functions_of(run, "gpu_kernel", options.sort, options.top)

    def row(name: str, _: str, count: int, total_ns: int | None, *spread: int | None) -> tuple[Any, ...]:
        share = 100 * total_ns / found.whole_ns if found.whole_ns and total_ns is not None else None
        return name, share, count, total_ns, *spread

    # Names of kernels are long: they get the room of two percentiles on a narrow terminal.
    spread_of = (replace(column, spare=column.key in ("p50_ns", "p95_ns")) for column in LENGTH_COLUMNS)
    columns = (Column("name", "kernel"), SHARE, COUNT, *spread_of)
    note = "Share: of the sum of the lengths of all kernels."
    rows = [row(*one) for one in found.rows]
    return Table("kernels", f"Kernels by {options.sort}", columns, rows, note), found.left_out


def _slowest(run: Run, options: Options) -> Table:
    """The longest single calls: of the CUDA libraries, else of the first other layer that was recorded."""
    found = ((name, slowest_calls(run, name, max(options.slowest, 0))) for name in _OF_LAYER)
    name, slowest = next((one for one in found if one[1]), ("userspace", []))
    rows = []
    for called, start_ns, dur_ns, *numbers in slowest:
        pid, tid = (run.shapes.value("pid", number) for number in numbers)
        thread = run.thread_name(pid, tid) or run.process_name(pid)
        rows.append((called, start_ns - run.facts.start_ns, dur_ns, thread, pid, tid))
    columns = (
        Column("name", "call"),
        Column("at_ns", "at", "at"),
        Column("dur_ns", "length", "ns"),
        Column("thread", "thread"),
        Column("pid", "pid", "pid", spare=True),
        Column("tid", "tid", "pid"),
    )
    note = f"Single calls of the {_OF_LAYER[name]}, without calls inside others."
    return Table("slowest", "The slowest calls", columns, rows, note)


_OF_LAYER = {"userspace": "CUDA libraries", "kernel": "driver", "syscall": "kernel", "gpu_kernel": "GPU"}


REPORT = Report("summary", Options, run)
