"""The time of calls at each layer: in themselves, in ioctls, in the driver, off the processor, on the GPU.
Of one call, everything that happened in it, as a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from tracepipe.analyses.breakdown import GPU, HOOKED, PARTS, Breakdown
from tracepipe.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.analyses.functions import names_by_time
from tracepipe.analyses.gpu_work import LaunchCalls, outermost_rows
from tracepipe.analyses.nesting import first_flagged, nearest_of_some
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import Bools, Int32s, Int64s, Ints, distinct
from tracepipe.event.groups import RowsByNumber
from tracepipe.event.intervals import Stretches
from tracepipe.event.model import TIME_LIMIT_NS
from tracepipe.event.vocabulary import RUNNING
from tracepipe.hooks.names import near_names
from tracepipe.libraries import np
from tracepipe.options import Option
from tracepipe.reports.report import Column, Report, Result, Table, not_listed
from tracepipe.store.run import Run
from tracepipe.store.schema import INSTANT
from tracepipe.units import counted

_EXCLUSIVE = (
    "Each ns of a call counts once, for the innermost layer. From the innermost: off-CPU, driver, system "
    "call, the call itself. With inner: all the time in a layer, including the layers inside it. Calls: how "
    "many spent time there; percentiles are over all calls, with 0 for the others. GPU: the work that a call "
    "launched runs during and after the call, so it is not part of the call's time."
)
_SLOWEST = 5


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe layers`."""

    call: Annotated[
        str,
        Option("Show only calls of this name; or, by a number, the Nth outermost call in time.", "NAME|N"),
    ] = ""
    top: Annotated[int, Option("Show at most N names, and N lines of one call; 0: all.", "N")] = 10


def run(run: Run, options: Options) -> Result:
    """Calls by layer: of all names, of one name, or a single call."""
    calls = run.layer("userspace")
    top_calls = np.flatnonzero(calls.is_outermost & calls.is_call).astype(np.int32)
    if options.call.isdecimal() and len(options.call) < 10:
        return _one(run, top_calls, int(options.call), options.top)
    of_shape: Int32s = run.shapes.column("name")
    wanted = top_calls
    if options.call:
        # Without those inside another call of that name.
        flags = (of_shape == run.shapes.number_of("name", options.call))[calls.shape]
        flags &= (calls.kind != INSTANT) & calls.is_call
        wanted = np.flatnonzero(first_flagged(calls.parent, flags)).astype(np.int32)
    if options.call and not len(wanted):
        numbers = distinct(of_shape[run.used_shapes("userspace")])
        near = near_names(options.call, [run.shapes.text(number) for number in numbers.tolist()])
        hint = f"Did you mean {' or '.join(near)}?" if near else ""
        hint = hint or "tracepipe summary --top 0 lists all functions."
        raise TracepipeError(f"The recording has no call {options.call!r}.", hint)
    timed = wanted[calls.has_length[wanted]]
    result = Result("TIME AT EACH LAYER")
    shown, count = names_by_time(run, calls, timed, options.top)
    # Only calls that are shown are split: splitting a million calls takes long.
    rows = timed[np.isin(of_shape, shown)[calls.shape[timed]]]
    split = Breakdown(run, rows)
    result.notes += _what_is_missing(run, split, len(wanted) - len(timed))
    by_name = RowsByNumber(of_shape[calls.shape[rows]])
    named = [(run.shapes.text(name), by_name.of(name)) for name in shown]
    if named:
        result.parts += [_shares(split, named), _lengths(split, named)]
    if options.call and len(timed):
        result.parts.append(_slowest(run, timed, top_calls))
    result.notes += not_listed(count - len(shown), "call|calls")
    return result


def _what_is_missing(run: Run, split: Breakdown, unknown: int) -> list[str]:
    notes = []
    missing = [layer for layer in PARTS if layer not in (*split.recorded, HOOKED)]
    if missing:
        notes.append(f"not recorded, so counted in the layer around it: {', '.join(missing)}")
    reasons = run.facts.header.layers.missing
    notes += [f"not recorded: {layer}: {reason}" for layer, reason in reasons.items()]
    lengthless = int(np.count_nonzero(run.layer("syscall").kind == INSTANT))
    if lengthless:
        notes.append(
            counted(
                lengthless,
                "system call|calls has|have no length in this recording: it|they counts|count as 0 ns",
            )
        )
    if unknown:
        notes.append(counted(unknown, "call|calls has|have no known length: it|they is|are left out"))
    started = len(run.layer("gpu_kernel"))
    if started and not split.launched:
        kernels = counted(started, "kernel|kernels is|are")
        notes.append(f"no call has the launch id of a kernel: {kernels} attributed to no call")
    return notes


def _share(part: int | None, total_ns: int) -> float | None:
    return 100 * float(part) / total_ns if part is not None and total_ns else None


def _known_sum(values: Int64s) -> int | None:
    return int(values.sum()) if len(values) else None


def _shares(split: Breakdown, named: Iterable[tuple[str, Any]]) -> Table:
    shown = [layer for layer in PARTS if layer != HOOKED or HOOKED in split.recorded]

    def row(name: str, calls: Ints) -> tuple[Any, ...]:
        total_ns = int(split.lengths_ns(calls).sum())
        shares = [_share(_known_sum(split.known_ns(layer, calls)), total_ns) for layer in shown]
        gpu_ns = _known_sum(split.known_ns(GPU, calls))
        return name, len(calls), total_ns, round(total_ns / len(calls)), *shares, gpu_ns

    rows = [row(*one) for one in named]
    titles = {HOOKED: "hooked", "other system calls": "syscalls"}
    columns = (
        Column("call", "call"),
        Column("count", "count", "count"),
        Column("total_ns", "total", "ns"),
        Column("mean_ns", "mean", "ns", spare=True),
        *(
            Column(f"{layer.replace(' ', '_')}_percent", titles.get(layer, layer), "percent")
            for layer in shown
        ),
        Column("gpu_ns", "on GPU", "ns"),
    )
    return Table("shares", "How calls spend their time", columns, rows)


def _lengths(split: Breakdown, named: Iterable[tuple[str, Any]]) -> Table:
    def rows(name: str, calls: Ints) -> Iterator[tuple[Any, ...]]:
        lengths = of_values(split.lengths_ns(calls))
        total_ns = lengths[0] or 0
        yield name, "call", len(calls), 100.0, None, *lengths
        for layer in (*split.recorded, GPU):
            known = split.known_ns(layer, calls)
            if not known.any():
                continue
            share, inclusive = (_share(known.sum(), total_ns) if layer != GPU else None), None
            if layer not in ("itself", GPU):
                inclusive = _known_sum(split.known_ns(f"{layer} inclusive", calls))
            yield name, layer, int(np.count_nonzero(known)), share, inclusive, *of_values(known)

    columns = (
        Column("call", "call"),
        Column("layer", "layer"),
        Column("count", "calls", "count"),
        Column("share_percent", "share", "percent"),
        Column("inclusive_ns", "with inner", "ns"),
        *(
            Column(column.key, column.title, "ns", spare=column.key in ("mean_ns", "max_ns"))
            for column in LENGTH_COLUMNS
        ),
    )
    every = [row for one in named for row in rows(*one)]
    return Table("layers", "Each layer of a call", columns, every, _EXCLUSIVE, grouped=True)


def _slowest(run: Run, timed: Ints, top_calls: Ints) -> Table:
    """The slowest calls of one name, with the numbers of the outermost calls around them."""
    calls = run.layer("userspace")
    lengths_ns = calls.end_ns[timed] - calls.start_ns[timed]
    slowest = timed[np.argsort(-lengths_ns, kind="stable")[:_SLOWEST]]
    top = outermost_rows(run, slowest)
    place = np.searchsorted(top_calls, top)
    rows = []
    for row, at, outer in zip(slowest.tolist(), place.tolist(), top.tolist(), strict=True):
        is_top = at < len(top_calls) and int(top_calls[at]) == outer
        _, tid = run.shapes.ids_of(int(calls.shape[row]))
        start_ns, end_ns = _ends(run, row)
        rows.append((at + 1 if is_top else None, tid, start_ns - run.facts.start_ns, end_ns - start_ns))
    number, thread = Column("number", "--call", "id"), Column("tid", "thread", "pid")
    columns = (number, thread, Column("at_ns", "at", "ns"), Column("dur_ns", "length", "ns"))
    title = "The slowest calls; tracepipe layers RUN --call N shows one in detail"
    return Table("slowest", title, columns, rows)


def _one(run: Run, top_calls: Ints, number: int, top: int) -> Result:
    """A single call, with everything that happened in it."""
    if not 1 <= number <= len(top_calls):
        raise TracepipeError(
            f"The recording has {counted(len(top_calls), 'outermost call|calls')}, and no call {number}.",
            "Calls are numbered from 1 in the order of their starts.",
        )
    calls, row = run.layer("userspace"), top_calls[number - 1 : number]
    split = Breakdown(run, row[calls.has_length[row]])
    known = bool(calls.has_length[row[0]])
    (name,) = run.shapes.texts("name", calls.shape[row])
    at_ns = int(calls.start_ns[row[0]]) - run.facts.start_ns
    result = Result(f"CALL {number} OF {len(top_calls)}: {name}, {at_ns:,} ns after the start")
    if known:
        result.parts.append(_lengths(split, [(name or "", np.zeros(1, np.int32))]))
    tree, left_out = tree_of(run, int(row[0]), top)
    result.parts.append(tree)
    result.notes += not_listed(left_out, "line|lines")
    result.notes += _what_is_missing(run, split, int(not known))
    return result


# The layers, outermost first: of two events that start together, the first layer's encloses the other.
_RANKS = {"call": 0, "hook": 1, "syscall": 2, "driver": 3, "off-CPU": 4, "scheduler": 5, "GPU": 6}
_LAYER_OF = {
    "call": "userspace",
    "hook": "hook",
    "syscall": "syscall",
    "driver": "kernel",
    "scheduler": "scheduler",
}
Item = tuple[int, int | None, str, str]
"""Start, end (None for an instant), layer, name."""


def tree_of(run: Run, row: int, top: int) -> tuple[Table, int]:
    """The tree of a row of calls with at most `top` lines, or all for 0, and how many lines are left out."""
    begin_ns = int(run.layer("userspace").start_ns[row])
    items = _on_thread(run, row) + _off_cpu(run, row)
    items.sort(key=lambda item: (item[0], _RANKS[item[2]], -(item[1] or item[0])))
    lines = _lines(items, begin_ns)
    for name, start_ns, end_ns, gpu, stream in _on_gpu(run, row):
        length_ns = end_ns - start_ns
        where = f"{name} (GPU {gpu} stream {stream})"
        lines.append((where, "GPU", start_ns - begin_ns, length_ns, length_ns, 0))
    shown = lines[:top] if top > 0 else lines
    columns = (
        Column("name", "what"),
        Column("layer", "layer"),
        Column("at_ns", "at", "ns"),
        Column("dur_ns", "length", "ns"),
        Column("itself_ns", "itself", "ns"),
        Column("depth", "depth", "count", spare=True),
    )
    rows = [("  " * depth + name, *rest, depth) for name, *rest, depth in shown]
    note = "At: after the start of the call. Itself: the length without the lines inside it."
    return Table("tree", "In this call", columns, rows, note), len(lines) - len(shown)


def _of_thread(run: Run, row: int, *, running: bool) -> Bools:
    """Flags the shapes of the call's thread, shape `(shapes,)`: with `running`, those of the stretches in
    which it ran, else all others.
    """
    every, shape = np.arange(len(run.shapes), dtype=np.int32), int(run.layer("userspace").shape[row])
    same = (run.shapes.column("name", every) == run.shapes.number_of("name", RUNNING)) == running
    for key in ("pid", "tid"):
        same &= run.shapes.column(key, every) == run.shapes.column(key, shape)
    own: Bools = same
    return own


def _on_thread(run: Run, row: int) -> list[Item]:
    """The events that began in the call, on its thread; they are cut at the end of the call."""
    first_ns, end_ns = _ends(run, row)
    shapes = _of_thread(run, row, running=False)
    items: list[Item] = []
    for layer, name in _LAYER_OF.items():
        of = run.layer(name)
        first, last = np.searchsorted(of.start_ns, [first_ns, end_ns + 1])
        rows = first + np.flatnonzero((of.is_call & shapes[of.shape])[first:last])
        if layer == "call":
            rows = rows[_is_inside(run, row, rows)]
        ends: list[int | None] = np.minimum(of.end_ns[rows], end_ns).tolist()
        ends = [None if kind == INSTANT else end for kind, end in zip(of.kind[rows], ends, strict=True)]
        names = run.shapes.texts("name", of.shape[rows])
        for start, end, called in zip(of.start_ns[rows].tolist(), ends, names, strict=True):
            items.append((start, end, layer, called or ""))
    return items


def _ends(run: Run, row: int) -> tuple[int, int]:
    calls = run.layer("userspace")
    return int(calls.start_ns[row]), int(calls.end_ns[row])


def _is_inside(run: Run, row: int, rows: Ints) -> Bools:
    """Flags the rows of calls that are `row` or inside it. Shapes `(n,)`."""
    parents = run.layer("userspace").parent
    wanted = np.zeros(len(parents), np.bool_)
    wanted[row] = True
    inside: Bools = nearest_of_some(parents, wanted, rows) == row
    return inside


def _off_cpu(run: Run, row: int) -> list[Item]:
    first_ns, last_ns = _ends(run, row)
    shapes, of = _of_thread(run, row, running=True), run.layer("scheduler")
    some = shapes[of.shape] & (of.end_ns > of.start_ns)
    start_ns, end_ns = of.start_ns[some], of.end_ns[some]
    before_ns = int(end_ns[end_ns <= first_ns].max(initial=-TIME_LIMIT_NS))
    after_ns = int(start_ns[start_ns >= last_ns].min(initial=TIME_LIMIT_NS))
    inside = (end_ns > first_ns) & (start_ns < last_ns)
    # A thread is off the processor between two stretches in which it runs; outside them it is not known.
    around = [ts_ns for ts_ns in (before_ns, after_ns) if abs(ts_ns) < TIME_LIMIT_NS]
    edges = np.array(around, np.int64)
    gaps = Stretches(
        np.concatenate([start_ns[inside], edges - (edges <= first_ns)]),
        np.concatenate([end_ns[inside], edges + (edges > first_ns)]),
    ).gaps()
    items: list[Item] = []
    for left_ns, right_ns in zip(gaps.start_ns.tolist(), gaps.end_ns.tolist(), strict=True):
        if max(left_ns, first_ns) < min(right_ns, last_ns):
            items.append((max(left_ns, first_ns), min(right_ns, last_ns), "off-CPU", "off-CPU"))
    return items


def _on_gpu(run: Run, row: int) -> list[tuple[Any, ...]]:
    """The kernels and copies that a call, or one inside it, launched."""
    found: list[tuple[Any, ...]] = []
    for work, rows, calls in LaunchCalls(run).launched():
        own = rows[_is_inside(run, row, calls)]
        shape = work.shape[own]
        numbers = (run.shapes.numbers(key, shape, 0) for key in ("gpu", "stream"))
        columns = (column.tolist() for column in (work.start_ns[own], work.end_ns[own], *numbers))
        found += zip(run.shapes.texts("name", shape), *columns, strict=True)
    return sorted(found, key=lambda one: one[1])


def _lines(items: list[Item], base_ns: int) -> list[tuple[Any, ...]]:
    """A line for each item: name, layer, start, length, length without inner items, depth."""
    lines: list[list[Any]] = []
    around: list[tuple[int, int]] = []  # end and line of those that are open
    for start_ns, end_ns, layer, name in items:
        while around and around[-1][0] <= start_ns:
            around.pop()
        length_ns = None if end_ns is None else end_ns - start_ns
        if around and length_ns is not None:
            # A thread may sleep beyond the end of the call in which it fell asleep.
            lines[around[-1][1]][4] -= min(end_ns or 0, around[-1][0]) - start_ns
        lines.append([name, layer, start_ns - base_ns, length_ns, length_ns, len(around)])
        if end_ns is not None:
            around.append((end_ns if not around else min(end_ns, around[-1][0]), len(lines) - 1))
    return [tuple(line) for line in lines]


REPORT = Report("layers", Options, run)
