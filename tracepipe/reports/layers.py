"""The time of calls at each layer: in themselves, in ioctls, in the driver, off the processor, on the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from tracepipe.analyses.breakdown import GPU, HOOKED, PARTS, Breakdown, HostTime
from tracepipe.analyses.call_tree import tree_of
from tracepipe.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import Int32s, Int64s, distinct
from tracepipe.event.groups import RowsByNumber, largest
from tracepipe.hooks.names import near_names
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.nesting import NOBODY, first_flagged, nearest_of_some
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.spans import INSTANT
from tracepipe.reports.report import Column, Option, Report, Result, Table
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
    if options.call.isdecimal():
        return _one(run, top_calls, int(options.call), options.top)
    host = HostTime(run)
    wanted = _called(run, options.call) if options.call else top_calls
    if options.call and not len(wanted):
        raise _no_such_call(run, options.call)
    timed = wanted[calls.has_length[wanted]]
    result = Result("TIME AT EACH LAYER")
    names = _by_time(run, timed, options.top)
    is_shown = np.zeros(len(run.shapes), np.bool_)
    is_shown[np.isin(_names(run), names.shown)] = True
    # Only calls that are shown are split: splitting a million calls takes long.
    rows = timed[is_shown[calls.shape[timed]]]
    split = Breakdown(run, rows, host)
    result.notes += _what_is_missing(run, host, split, len(wanted) - len(timed))
    by_name = RowsByNumber(_names(run)[calls.shape[rows]])
    named = [(run.shapes.text(name), by_name.of(name)) for name in names.shown.tolist()]
    if named:
        result.parts += [_shares(split, named, host), _lengths(split, named, host)]
    if options.call and len(timed):
        result.parts.append(_slowest(run, timed, top_calls))
    if names.count > len(names.shown):
        result.notes.append(
            counted(names.count - len(names.shown), "more call|calls is|are not listed: --top 0 lists all")
        )
    return result


def _names(run: Run) -> Int32s:
    """The number of each shape's name. Shape `(shapes,)`."""
    numbers: Int32s = run.shapes.column("name", np.arange(len(run.shapes), dtype=np.int32))
    return numbers


def _called(run: Run, name: str) -> Int32s:
    """The rows of the calls of a name, without those inside another call of that name. Shape `(n,)`."""
    calls, number = run.layer("userspace"), run.shapes.number_of("name", name)
    lasts = (calls.kind != INSTANT) & calls.is_call
    named = first_flagged(calls.parent, (_names(run) == number)[calls.shape] & lasts)
    return np.flatnonzero(named).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Names:
    """The numbers of the names that are shown, those with the most time first, and how many names
    there are.
    """

    shown: Ints
    count: int


def _by_time(run: Run, timed: Ints, top: int) -> _Names:
    calls, of_shape = run.layer("userspace"), _names(run)
    total_ns = np.zeros(int(of_shape.max(initial=-1)) + 1, np.int64)
    of_row = of_shape[calls.shape[timed]]
    np.add.at(total_ns, of_row, calls.end_ns[timed] - calls.start_ns[timed])
    names = distinct(of_row)
    some = np.concatenate(largest(total_ns, names, top)) if top > 0 else names
    # Equal times are sorted by name.
    shown = sorted(some.tolist(), key=lambda name: (-int(total_ns[name]), run.shapes.text(name)))
    return _Names(np.array(shown[: top if top > 0 else None], np.int64), len(names))


def _no_such_call(run: Run, name: str) -> TracepipeError:
    numbers = distinct(_names(run)[run.seen("userspace")])
    names = [run.shapes.text(number) for number in numbers.tolist()]
    near = near_names(name, names)
    hint = f"Did you mean {' or '.join(near)}?" if near else "tracepipe summary --top 0 lists all functions."
    return TracepipeError(f"The recording has no call {name!r}.", hint)


def _what_is_missing(run: Run, host: HostTime, split: Breakdown, unknown: int) -> list[str]:
    notes = []
    missing = [layer for layer in PARTS if layer not in (*host.recorded, HOOKED)]
    if missing:
        notes.append(f"not recorded, so counted in the layer around it: {', '.join(missing)}")
    reasons = run.facts.header.get("layers", {}).get("missing", {})
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


def _shares(split: Breakdown, named: Iterable[tuple[str, Any]], host: HostTime) -> Table:
    shown = [layer for layer in PARTS if layer != HOOKED or HOOKED in host.recorded]

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


def _lengths(split: Breakdown, named: Iterable[tuple[str, Any]], host: HostTime) -> Table:
    def rows(name: str, calls: Ints) -> Iterator[tuple[Any, ...]]:
        lengths = of_values(split.lengths_ns(calls))
        total_ns = lengths[0] or 0
        yield name, "call", len(calls), 100.0, None, *lengths
        for layer in (*host.recorded, GPU):
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
    top = nearest_of_some(calls.parent, calls.parent == NOBODY, slowest)
    place = np.searchsorted(top_calls, top)
    rows = []
    for row, at, outer in zip(slowest.tolist(), place.tolist(), top.tolist(), strict=True):
        is_top = at < len(top_calls) and int(top_calls[at]) == outer
        start_ns = int(calls.start_ns[row])
        _, tid = run.shapes.ids_of(int(calls.shape[row]))
        dur_ns = int(calls.end_ns[row]) - start_ns
        rows.append((at + 1 if is_top else None, tid, start_ns - run.facts.start_ns, dur_ns))
    columns = (
        Column("number", "--call", "id"),
        Column("tid", "thread", "id"),
        Column("at_ns", "at", "ns"),
        Column("dur_ns", "length", "ns"),
    )
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
    host = HostTime(run)
    split = Breakdown(run, row[calls.has_length[row]], host)
    known = bool(calls.has_length[row[0]])
    (name,) = run.shapes.texts("name", calls.shape[row])
    at_ns = int(calls.start_ns[row[0]]) - run.facts.start_ns
    result = Result(f"CALL {number} OF {len(top_calls)}: {name}, {at_ns:,} ns after the start")
    if known:
        result.parts.append(_lengths(split, [(name or "", np.zeros(1, np.int32))], host))
    tree, left_out = tree_of(run, int(row[0]), top)
    result.parts.append(tree)
    if left_out:
        result.notes.append(counted(left_out, "more line|lines is|are not listed: --top 0 lists all"))
    result.notes += _what_is_missing(run, host, split, int(not known))
    return result


REPORT = Report(
    "layers",
    Options,
    run,
)
