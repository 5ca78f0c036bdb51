"""What a call costs at each layer: in itself, in ioctls, in the driver, off the processor, on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from tracepipe.errors import TracepipeError
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.analyses.breakdown import GPU, PARTS, HostTime, breakdown, numbered, on_gpu
from tracepipe.reports.analyses.call_tree import tree_of
from tracepipe.reports.analyses.distribution import LENGTH_COLUMNS, of_values
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.nesting import NOBODY, first_of_their_kind, outermost
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.spans import INSTANT
from tracepipe.reports.report import Column, Option, Report, Result, Table

_EXCLUSIVE = (
    "Each ns of a call counts once, for the innermost: off-CPU before driver before system call before the "
    "call itself; “with inner” is all the time in a layer. “calls” spent time there; percentiles are over "
    "all calls, 0 for the others. The GPU works beside and after a call: it is no part of it."
)
_SLOWEST = 5


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe layers`."""

    call: Annotated[
        str, Option("Calls of this name alone; or a number: the Nth outermost call in time.", "NAME|N")
    ] = ""
    top: Annotated[int, Option("How many names, and how many lines of one call; 0: all.", "N")] = 10


def run(run: Run, options: Options) -> Result:
    """Calls by layer: of every name, of one name, or a single call."""
    calls = numbered(run)
    top_calls = outermost(calls).filter(pl.col("kind") != "no_begin")
    if options.call.isdecimal():
        return _one(run, top_calls, int(options.call), options.top)
    host = HostTime(run)
    if options.call:
        flagged = (calls["name"] == options.call) & calls["kind"].is_in(["instant", "no_begin"]).not_()
        wanted = first_of_their_kind(calls, flagged.to_numpy())
        if not len(wanted):
            raise _no_such_call(run, options.call)
    else:
        wanted = top_calls
    timed = wanted.filter(pl.col("dur_ns").is_not_null())
    result = Result("TIME AT EACH LAYER")
    result.notes += _what_is_missing(run, host, len(wanted) - len(timed))
    names = (
        timed.group_by("name").agg(pl.col("dur_ns").sum()).sort("dur_ns", "name", descending=[True, False])
    )
    shown = names.head(options.top) if options.top > 0 else names
    # What is not shown is not split: a million calls take much.
    split = breakdown(run, timed.join(shown.select("name"), on="name", how="semi"), host)
    by_name = {str(name): part for (name,), part in split.partition_by("name", as_dict=True).items()}
    parts = [(name, by_name[name]) for name in shown["name"]]
    if parts:
        result.parts += [_shares(parts), _lengths(parts, host)]
    if options.call and len(timed):
        result.parts.append(_slowest(run, timed, top_calls))
    if len(names) > len(shown):
        result.notes.append(f"{len(names) - len(shown)} more calls are not listed: --top 0 lists all")
    return result


def _no_such_call(run: Run, name: str) -> TracepipeError:
    from difflib import get_close_matches

    near = get_close_matches(name, run.some("userspace", "name")["name"].unique().to_list(), 3)
    hint = f"did you mean {', '.join(near)}?" if near else "tracepipe summary --top 0 lists all functions"
    return TracepipeError(f"the recording has no call {name!r}", hint)


def _what_is_missing(run: Run, host: HostTime, unknown: int) -> list[str]:
    notes = []
    missing = [layer for layer in PARTS if layer not in host.recorded]
    if missing:
        notes.append(f"not recorded, so part of the layer around it: {', '.join(missing)}")
    asked_for = run.facts.header.get("layers", {}).get("missing", {})
    notes += [f"not recorded: {layer}: {reason}" for layer, reason in asked_for.items()]
    lengthless = int(np.count_nonzero(run.layer("syscall").kind == INSTANT))
    if lengthless:
        notes.append(f"{lengthless} system calls have no length in this recording: they count as no time")
    if unknown:
        notes.append(f"{unknown} calls have no known length: they are left out")
    asked, started = len(on_gpu(run)), len(run.layer("gpu_kernel"))
    if started and not asked:
        notes.append(f"no call carries the launch id of a kernel: {started} kernels belong to no call here")
    return notes


def _share(part: Any, total_ns: int) -> float | None:
    return 100 * float(part) / total_ns if part is not None and total_ns else None


def _known_sum(values: pl.Series) -> int | None:
    return int(values.sum()) if values.count() else None


def _shares(parts: list[tuple[str, pl.DataFrame]]) -> Table:
    rows = []
    for name, calls in parts:
        total_ns = int(calls["dur_ns"].sum())
        shares = [_share(_known_sum(calls[layer]), total_ns) for layer in PARTS]
        rows.append(
            (name, len(calls), total_ns, round(total_ns / len(calls)), *shares, _known_sum(calls[GPU]))
        )
    titles = ("itself", "ioctl", "syscalls", "driver", "off-CPU")
    columns = (
        Column("call", "call"),
        Column("count", "count", "count"),
        Column("total_ns", "total", "ns"),
        Column("mean_ns", "mean", "ns", spare=True),
        *(
            Column(f"{layer.replace(' ', '_')}_percent", title, "percent")
            for layer, title in zip(PARTS, titles, strict=True)
        ),
        Column("gpu_ns", "on GPU", "ns"),
    )
    return Table("shares", "Where the time of calls goes", columns, rows)


def _lengths(parts: list[tuple[str, pl.DataFrame]], host: HostTime) -> Table:
    rows: list[tuple[Any, ...]] = []
    for name, calls in parts:
        total_ns = int(calls["dur_ns"].sum())
        lengths = of_values(calls["dur_ns"].to_numpy())
        rows.append((name, "call", len(calls), 100.0, None, *lengths))
        for layer in (*host.recorded, GPU):
            known = calls[layer].drop_nulls()
            if not len(known) or not known.sum():
                continue
            lengths = of_values(known.to_numpy())
            share = _share(known.sum(), total_ns) if layer != GPU else None
            inclusive = None if layer in ("itself", GPU) else _known_sum(calls[f"{layer} inclusive"])
            rows.append((name, layer, int(np.count_nonzero(known)), share, inclusive, *lengths))
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
    return Table("layers", "Each layer of a call", columns, rows, _EXCLUSIVE, grouped=True)


def _slowest(run: Run, calls: pl.DataFrame, top_calls: pl.DataFrame) -> Table:
    """The slowest calls of one name, and the numbers of the calls that they are in."""
    place = {row: number for number, row in enumerate(top_calls["row"], 1)}
    parents = run.layer("userspace").parent.tolist()
    rows = []
    slowest = calls.sort("dur_ns", descending=True).head(_SLOWEST)
    for row, start_ns, dur_ns, tid in slowest.select("row", "start_ns", "dur_ns", "tid").iter_rows():
        at = row
        while (above := parents[at]) != NOBODY:
            at = above
        rows.append((place.get(at), tid, start_ns - run.facts.start_ns, dur_ns))
    columns = (
        Column("number", "--call", "id"),
        Column("tid", "thread", "id"),
        Column("at_ns", "at", "ns"),
        Column("dur_ns", "length", "ns"),
    )
    return Table("slowest", "The slowest; tracepipe layers RUN --call N takes one apart", columns, rows)


def _one(run: Run, top_calls: pl.DataFrame, number: int, top: int) -> Result:
    """A single call, with all that happened in it."""
    if not 1 <= number <= len(top_calls):
        raise TracepipeError(
            f"the recording has {len(top_calls)} outermost calls, and no call {number}",
            "they are numbered from 1 in the order of their starts",
        )
    call = top_calls.row(number - 1, named=True)
    host = HostTime(run)
    split = breakdown(run, top_calls[number - 1 : number].filter(pl.col("dur_ns").is_not_null()), host)
    at_ns = call["start_ns"] - run.facts.start_ns
    result = Result(f"CALL {number} OF {len(top_calls)}: {call['name']}, {at_ns:,} ns after the start")
    if len(split):
        result.parts.append(_lengths([(call["name"], split)], host))
    tree, left_out = tree_of(run, call, bool(run.has("name", RUNNING, run.layer("scheduler")).any()), top)
    result.parts.append(tree)
    if left_out:
        result.notes.append(f"{left_out} more lines are not listed: --top 0 lists all")
    result.notes += _what_is_missing(run, host, int(not len(split)))
    return result


REPORT = Report(
    "layers",
    Options,
    run,
)
