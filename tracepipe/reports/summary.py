"""What a recording holds: calls, launches, memory, copies, ioctls, kernels and warps, and where time goes.

It is what is asked first of a recording, and reckons with numpy: to load polars takes as long as to read
300 000 events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from tracepipe.event.columns import Bools, Int64s
from tracepipe.event.model import LAYERS
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.analyses.cuda_calls import MEMORY_EFFECTS, directions, launching, rows_by_effect
from tracepipe.reports.analyses.distribution import LENGTH_COLUMNS, of_values, rank
from tracepipe.reports.frames.grouping import grouped
from tracepipe.reports.frames.layers import Layer
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.nesting import NOBODY
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.spans import INSTANT
from tracepipe.reports.report import Column, Option, Report, Result, Table

SORTS = ("total", "count", "mean", "p50", "p95", "p99", "max", "name")
_COUNT = Column("count", "count", "count")
# The layers whose events are called functions.
_CALLED = ("userspace", "syscall", "kernel", "scheduler", "gpu_kernel")


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
    def row(title: str, layer: Layer, rows: Bools) -> tuple[Any, ...]:
        return (title, int(np.count_nonzero(rows)), *of_values(layer.lengths_ns(rows)))

    calls, syscalls, driver, scheduler = map(run.layer, ("userspace", "syscall", "kernel", "scheduler"))
    kernels = run.layer("gpu_kernel")
    yield row("CUDA API calls", calls, calls.is_call & calls.is_outermost)
    inside = np.count_nonzero(calls.is_call & (calls.parent != NOBODY))
    yield ("  calls inside those", int(inside), *_NO_LENGTHS)
    yield row("kernel launches", calls, launching(run))
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


Pieces = dict[str, list[tuple[Layer, Int64s]]]
"""What was done to memory → rows of layers that did it."""


def _all_of(run: Run, name: str, found: Pieces) -> None:
    """Add all events of a layer, those on a GPU apart."""
    layer = run.layer(name)
    names, known = run.shapes.numbered("name")
    on_gpu = ~run.has("gpu", None, layer) if name == "transfer" else np.zeros(len(layer), np.bool_)
    kinds = grouped(names[layer.shape] * 2 + on_gpu)
    for number, rows in sorted(kinds, key=lambda kind: int(kind[1][0])):
        what = f"{known[number // 2]} (GPU)" if number % 2 else known[number // 2]
        found.setdefault(what, []).append((layer, rows))


def _of_calls(run: Run, found: Pieces, *, copies: bool) -> None:
    """Add what calls allocated and released that succeeded, and what they copied."""
    calls = run.layer("userspace")
    for effect, rows in rows_by_effect(run).items():
        results, known = run.args.result(calls.args[rows], calls.end_args[rows])
        rows = rows[~known | (results == 0)]
        if effect != "transfer" and len(rows):
            found.setdefault(effect, []).append((calls, rows))
        elif copies and len(rows):
            told = directions(run, rows)
            for direction in dict.fromkeys(told):
                of_one = np.array([one == direction for one in told], np.bool_)
                found.setdefault(direction, []).append((calls, rows[of_one]))


def _moved(run: Run) -> Table:
    """Allocations and copies: how many, how large, how fast."""
    note = "Rate: bytes copied by the time of the call, of “(GPU)” by that of the copy on the GPU."
    found: Pieces = {}
    _all_of(run, "memory", found)
    from_calls = not found and len(run.layer("userspace")) > 0
    if from_calls:
        _of_calls(run, found, copies=not len(run.layer("transfer")))
        note += " The recording has no events of memory: told by the calls that succeeded."
    _all_of(run, "transfer", found)
    rows = [_moved_row(run, what, pieces) for what, pieces in found.items()]
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


def _moved_row(run: Run, what: str, pieces: list[tuple[Layer, Int64s]]) -> tuple[Any, ...]:
    columns = [
        (
            *run.args.size_bytes(layer.args[rows], layer.end_args[rows]),
            layer.end_ns[rows] - layer.start_ns[rows],
            layer.has_length[rows],
        )
        for layer, rows in pieces
    ]
    size_bytes, is_sized, dur_ns, has_length = (
        np.concatenate(column) for column in zip(*columns, strict=True)
    )
    known_bytes, known_ns = size_bytes[is_sized], dur_ns[has_length]
    # To allocate much takes no longer than to allocate little.
    timed = is_sized & has_length & (dur_ns > 0) & (what not in MEMORY_EFFECTS)
    moved_bytes, took_ns = size_bytes[timed], dur_ns[timed]
    return (
        what,
        len(dur_ns),
        int(known_bytes.sum()) if len(known_bytes) else None,
        rank(known_bytes, 50),
        rank(known_bytes, 100),
        int(known_ns.sum()) if len(known_ns) else None,
        float(moved_bytes.sum() * 1e9 / took_ns.sum()) if len(took_ns) else None,
        rank(moved_bytes / took_ns * 1e9, 50),
    )


def _processes(run: Run, options: Options) -> tuple[Table, int]:
    """The processes in the order of their ids, and how many with fewer events are left out."""
    calls, syscalls, scheduler = map(run.layer, ("userspace", "syscall", "scheduler"))
    kernels = run.layer("gpu_kernel")
    sums = {
        "calls": _by_process(run, calls, calls.is_call & calls.is_outermost),
        "ioctls": _by_process(run, syscalls, syscalls.is_call & run.has("name", "ioctl", syscalls)),
        "kernels": _by_process(run, kernels, np.ones(len(kernels), np.bool_)),
        "running": _by_process(run, scheduler, run.has("name", RUNNING, scheduler)),
    }
    counts, threads = _who(run)
    busiest = sorted(counts, key=lambda pid: (counts[pid], pid is not None, pid or 0))
    shown = busiest[-options.top :] if options.top > 0 else busiest
    rows = [
        (
            run.process_name(pid),
            pid,
            threads.get(pid),
            *(value for name in ("calls", "ioctls", "kernels") for value in sums[name].get(pid, (0, None))),
            sums["running"].get(pid, (0, None))[1],
        )
        for pid in sorted(shown, key=lambda pid: (pid is None, pid or 0))
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


def _by_process(run: Run, layer: Layer, rows: Bools) -> dict[int | None, tuple[int, int | None]]:
    """Process → how many of some rows are its, and how long they took, as far as that is known."""
    numbers, pids = run.shapes.numbered("pid")
    of, length_ns = numbers[layer.shape[rows]], layer.end_ns[rows] - layer.start_ns[rows]
    known = layer.has_length[rows]
    found: dict[int | None, tuple[int, int | None]] = {}
    for number in np.flatnonzero(np.bincount(of)).tolist():
        own = of == number
        timed = length_ns[own & known]
        found[pids[number]] = int(np.count_nonzero(own)), int(timed.sum()) if len(timed) else None
    return found


def _who(run: Run) -> tuple[Counter[int | None], Counter[int | None]]:
    """How many events each process has, and how many threads."""
    counts, threads = Counter[int | None](), Counter[int | None]()
    seen: set[tuple[int | None, int]] = set()
    for name in ("userspace", "syscall", "kernel", "scheduler", "memory", "gpu_kernel"):
        of_shapes = np.bincount(run.layer(name).shape)
        for number in np.flatnonzero(of_shapes).tolist():
            shape = run.shapes.shapes[number]
            assert shape is not None
            counts[shape.pid] += int(of_shapes[number])
            if name != "gpu_kernel" and shape.tid is not None and (shape.pid, shape.tid) not in seen:
                seen.add((shape.pid, shape.tid))
                threads[shape.pid] += 1
    return counts, threads


def _functions(run: Run, options: Options) -> tuple[Table, int]:
    """The functions that count most, and how many are left out."""
    found = [row for name in _CALLED for row in _functions_of(run, run.layer(name))]
    order = ["name", "layer", "count", *(column.key for column in LENGTH_COLUMNS)]
    by = order.index(options.sort if options.sort in ("name", "count") else f"{options.sort}_ns")

    def place(row: tuple[Any, ...]) -> tuple[Any, ...]:
        name, layer, count = row[:3]
        first = name if options.sort == "name" else -(row[by] or 0)
        return row[by] is None, first, -count, layer, name

    found.sort(key=place)
    shown = found[: options.top] if options.top > 0 else found
    columns = (Column("name", "function"), Column("layer", "layer", spare=True), _COUNT, *LENGTH_COLUMNS)
    table = Table("functions", f"Functions by {options.sort}", columns, shown)
    return table, len(found) - len(shown)


def _functions_of(run: Run, layer: Layer) -> Iterator[tuple[Any, ...]]:
    """The functions of a layer: name, layer, count, lengths."""
    rows = np.flatnonzero(layer.is_call & ~run.has("name", RUNNING, layer))
    names, known_names = run.shapes.numbered("name")
    layers, known_layers = run.shapes.numbered("layer")
    both = layers.astype(np.int64) * len(known_names) + names
    for number, places in grouped(both[layer.shape[rows]]):
        of_layer, of_name = divmod(number, len(known_names))
        own = rows[places]
        yield known_names[of_name], known_layers[of_layer], len(own), *of_values(layer.lengths_ns(own))


REPORT = Report(
    "summary",
    Options,
    run,
)
