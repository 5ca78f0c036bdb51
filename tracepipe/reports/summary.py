"""What a recording holds: calls, launches, memory, copies, ioctls, kernels and warps, and where time goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from tracepipe.event.model import LAYERS
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.analyses.cuda_calls import MEMORY_EFFECTS, effects_of_calls, launches
from tracepipe.reports.analyses.distribution import LENGTH_COLUMNS, lengths, percentile, total
from tracepipe.reports.frames.libraries import pl
from tracepipe.reports.frames.nesting import outermost
from tracepipe.reports.frames.run import Run
from tracepipe.reports.report import Column, Option, Report, Result, Table

SORTS = ("total", "count", "mean", "p50", "p95", "p99", "max", "name")
_COUNT = Column("count", "count", "count")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe summary`."""

    top: Annotated[int, Option("How many functions and processes; 0: all.", "N")] = 20
    sort: Annotated[str, Option("Functions in the order of this.", choices=SORTS)] = "total"


def run(run: Run, options: Options) -> Result:
    """The summary of one recording."""
    result = Result("TRACE SUMMARY")
    result.parts += [_layers(run), _activities(run)]
    if (moved := _moved(run)).rows:
        result.parts.append(moved)
    for table, left_out in (_processes(run, options), _functions(run, options)):
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
    return Table("layers", "Events", columns, rows)


def _activities(run: Run) -> Table:
    rows = [row for row in _each_activity(run) if row[1]]
    columns = (Column("activity", ""), _COUNT, *LENGTH_COLUMNS)
    note = "Calls inside others are part of them; lengths include whatever a call waits for."
    return Table("activities", "Activity", columns, rows, note)


def _each_activity(run: Run) -> Iterator[tuple[Any, ...]]:
    def row(title: str, frame: pl.DataFrame) -> tuple[Any, ...]:
        return (title, len(frame), *frame.select(lengths()).row(0))

    calls = run.calls.filter(pl.col("kind") != "no_begin")
    yield row("CUDA API calls", outermost(calls))
    yield ("  calls inside those", calls["parent"].count(), *_NO_LENGTHS)
    yield row("kernel launches", launches(run))
    syscalls = run.syscalls.filter(pl.col("kind") != "no_begin")
    yield row("system calls", syscalls)
    yield row("  ioctl", syscalls.filter(pl.col("name") == "ioctl"))
    driver = run.driver.filter(pl.col("kind") != "no_begin")
    yield row("driver functions", outermost(driver))
    scheduling = driver.filter(pl.col("layer") == "scheduler")
    events = run.scheduler.filter(pl.col("kind") == "instant")
    yield row("scheduler calls", scheduling)
    yield ("scheduler events", len(events), *_NO_LENGTHS)
    yield row("threads running", run.scheduler.filter(pl.col("name") == RUNNING))
    yield row("GPU kernels", run.kernels)
    stay_ns = (pl.col("last_exit_ns") - pl.col("entry_ns")).alias("dur_ns")
    yield row("GPU warps", run.warps.select(stay_ns))
    yield ("GPU thread events", len(run.gpu_threads), *_NO_LENGTHS)


_NO_LENGTHS = (None,) * len(LENGTH_COLUMNS)


def _moved(run: Run) -> Table:
    """Allocations and copies: how many, how large, how fast."""
    wanted = ("what", "size_bytes", "dur_ns")
    on_gpu = pl.when(pl.col("gpu").is_not_null()).then(pl.lit(" (GPU)")).otherwise(pl.lit(""))
    memory = run.memory.with_columns(pl.col("name").alias("what")).select(wanted)
    copies = run.transfers.with_columns((pl.col("name") + on_gpu).alias("what")).select(wanted)
    note = "Rate: bytes copied by the time of the call, of “(GPU)” by that of the copy on the GPU."
    if not len(memory) and len(run.calls):
        from_calls = (
            effects_of_calls(run)
            .filter(~pl.col("failed"))
            .with_columns(
                pl.when(pl.col("effect") == "transfer").then("direction").otherwise("effect").alias("what")
            )
        )
        of_copies = pl.col("effect") == "transfer"
        memory = from_calls.filter(~of_copies).select(wanted)
        copies = copies if len(copies) else from_calls.filter(of_copies).select(wanted)
        note += " The recording has no events of memory: told by the calls that succeeded."
    moved = pl.concat([memory, copies]).with_row_index("at")
    # To allocate much takes no longer than to allocate little.
    timed = (
        (pl.col("dur_ns") > 0) & pl.col("size_bytes").is_not_null() & ~pl.col("what").is_in(MEMORY_EFFECTS)
    )
    rate = pl.col("size_bytes") / pl.col("dur_ns") * 1e9
    sizes = pl.col("size_bytes")
    rows = (
        moved.group_by("what")
        .agg(
            pl.col("at").min(),
            pl.len().alias("count"),
            total(sizes).alias("total_bytes"),
            percentile(sizes, 50).alias("p50_bytes"),
            sizes.max().alias("max_bytes"),
            total(pl.col("dur_ns")).alias("total_ns"),
            (sizes.filter(timed).sum() * 1e9 / pl.col("dur_ns").filter(timed).sum()).alias("rate"),
            percentile(rate.filter(timed), 50).alias("p50_rate"),
        )
        .sort("at")
        .drop("at")
        .with_columns(pl.col("rate", "p50_rate").fill_nan(None))
        .rows()
    )
    columns = (
        Column("what", ""),
        _COUNT,
        Column("total_bytes", "bytes", "bytes"),
        Column("p50_bytes", "p50", "bytes"),
        Column("max_bytes", "largest", "bytes"),
        Column("total_ns", "time", "ns"),
        Column("bytes_per_s", "rate", "bytes_per_s"),
        Column("p50_bytes_per_s", "p50", "bytes_per_s"),
    )
    return Table("memory", "Memory and copies", columns, rows, note)


def _processes(run: Run, options: Options) -> tuple[Table, int]:
    """The processes in the order of their ids, and how many with fewer events are left out."""
    counted = {
        "calls": outermost(run.calls.filter(pl.col("kind") != "no_begin")),
        "ioctls": run.syscalls.filter((pl.col("name") == "ioctl") & (pl.col("kind") != "no_begin")),
        "kernels": run.kernels,
        "running": run.scheduler.filter(pl.col("name") == RUNNING),
    }
    frames = (run.calls, run.syscalls, run.driver, run.scheduler, run.memory, run.kernels)
    of_host = pl.concat([frame.select("pid", "tid") for frame in frames[:-1]]).unique()
    busiest = pl.concat([frame.select("pid") for frame in frames]).group_by("pid").len().sort("len", "pid")
    shown = busiest.tail(options.top) if options.top > 0 else busiest
    pids = shown.sort("pid", nulls_last=True)["pid"]
    threads = dict(of_host.drop_nulls("tid").group_by("pid").len().iter_rows())
    sums: dict[str, dict[int | None, tuple[int, int | None]]] = {
        name: {
            pid: (count, total_ns)
            for pid, count, total_ns in frame.group_by("pid")
            .agg(pl.len(), total(pl.col("dur_ns")))
            .iter_rows()
        }
        for name, frame in counted.items()
    }
    rows = [
        (
            run.process_name(pid),
            pid,
            threads.get(pid),
            *(value for name in ("calls", "ioctls", "kernels") for value in sums[name].get(pid, (0, None))),
            sums["running"].get(pid, (0, None))[1],
        )
        for pid in pids
    ]
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


def _functions(run: Run, options: Options) -> tuple[Table, int]:
    """The functions that count most, and how many are left out."""
    frames = (run.calls, run.syscalls, run.driver, run.scheduler, run.kernels)
    spans = pl.concat([frame.select("layer", "name", "kind", "dur_ns") for frame in frames])
    functions = (
        spans.filter((pl.col("kind") != "no_begin") & (pl.col("name") != RUNNING))
        .group_by("layer", "name")
        .agg(pl.len().alias("count"), *lengths())
    )
    key = options.sort if options.sort in ("name", "count") else f"{options.sort}_ns"
    ordered = functions.sort(
        [key, "count", "layer", "name"],
        descending=[key != "name", True, False, False],
        nulls_last=True,
    )
    shown = ordered.head(options.top) if options.top > 0 else ordered
    order = ["name", "layer", "count", *(column.key for column in LENGTH_COLUMNS)]
    columns = (Column("name", "function"), Column("layer", "layer", spare=True), _COUNT, *LENGTH_COLUMNS)
    table = Table("functions", f"Functions by {options.sort}", columns, shown.select(order).rows())
    return table, len(ordered) - len(shown)


REPORT = Report(
    "summary",
    "Counts, times and sizes of a recording: calls, launches, memory, copies, ioctls, kernels, warps.",
    Options,
    run,
)
