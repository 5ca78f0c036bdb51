"""Two runs of one program compared: what got faster or slower by more than chance, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tracepipe.errors import TracepipeError
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.analyses.changes import Change, Changes, changes
from tracepipe.reports.analyses.distribution import PERCENTS, of_values
from tracepipe.reports.frames.layers import Layer
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.samples import (
    DECIDED_BY_PROGRAM,
    EXITS,
    LAYER_OF,
    Sample,
    is_recorded,
    samples,
)
from tracepipe.reports.report import Column, Drawing, Option, Report, Result, Table
from tracepipe.reports.writing.verdict import verdict

_NAMED_AT_MOST = 3
_LAYER = Column("layer", "layer", spare=True)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe diff`."""

    top: Annotated[int, Option("How many rows of each table, the largest changes; 0: all.", "N")] = 10
    alpha: Annotated[
        float, Option("Share of what is reported as changed that may be chance; 1 less it: confidence.", "P")
    ] = 0.05
    min_change: Annotated[
        float, Option("Lengths that change by less than this are not reported, even if certain.", "PERCENT")
    ] = 1.0


def run(a: Run, b: Run, options: Options) -> Result:
    """Compare two recordings."""
    if not 0 < options.alpha < 1:
        raise TracepipeError(f"--alpha {options.alpha:g} is no probability", "between 0 and 1, such as 0.05")
    windows = tuple((one.facts.start_ns, one.facts.end_ns) for one in (a, b))
    from tracepipe.reports.findings.exit_samples import exit_samples

    of_a, of_b = samples(a), samples(b)
    for both, exits in zip((of_a, of_b), exit_samples(a, b), strict=True):
        both |= exits
    left_out = [layer for layer in LAYER_OF if not (is_recorded(a, layer) and is_recorded(b, layer))]
    for both in (of_a, of_b):
        for key in [key for key in both if key[0] in left_out]:
            del both[key]
    found = changes(of_a, of_b, (windows[0], windows[1]), options.alpha, options.min_change)
    lengths_ns = tuple(end_ns - start_ns for start_ns, end_ns in windows)
    says = verdict(found, (lengths_ns[0], lengths_ns[1]), options.alpha, options.min_change)
    result = Result(says)
    result.parts.append(_totals(a, b))
    reported, in_both = found.is_reported, found.is_in_both
    for what, table, which in (
        ("lengths that changed", _lengths, found.length_changed),
        ("tails that changed", _tails, found.tail_changed),
        ("counts that changed", _counts, found.count_changed & in_both),
        ("things that are in one run alone", _alone, reported & ~in_both),
        ("exits", _exits, found.is_of(EXITS)),
    ):
        count = int(np.count_nonzero(which))
        if 0 < options.top < count:
            result.notes.append(f"{count - options.top} more {what} are not listed: --top 0")
        if count:
            result.parts.append(table(list(found.first(which, options.top))))
    result.parts.append(_compared(found))
    result.notes += _notes(found, a, b, options)
    for name, one, other in (("A", a, b), ("B", b, a)):
        alone = [layer for layer in left_out if is_recorded(one, layer) and not is_recorded(other, layer)]
        if alone:
            result.notes.append(f"recorded in {name} alone, so not compared: {', '.join(alone)}")
    return result


def _percent_of(change: float, of: float | None) -> float | None:
    return 100 * change / of if of else None


def _totals(a: Run, b: Run) -> Table:
    """The whole of both runs: a single value each, so that nothing says how much of it is chance."""
    rows = []
    for title, of in (
        ("recording", lambda run: run.facts.end_ns - run.facts.start_ns),
        ("CUDA API calls", lambda run: _sum(run.layer("userspace"), run.layer("userspace").is_outermost)),
        ("GPU kernels", lambda run: _sum(run.layer("gpu_kernel"))),
        (
            "copies on the GPU",
            lambda run: _sum(run.layer("transfer"), ~run.has("gpu", None, run.layer("transfer"))),
        ),
        (
            "threads running",
            lambda run: _sum(run.layer("scheduler"), run.has("name", RUNNING, run.layer("scheduler"))),
        ),
    ):
        of_a, of_b = of(a), of(b)
        if of_a is not None or of_b is not None:
            change = None if of_a is None or of_b is None else of_b - of_a
            percent = None if change is None else _percent_of(change, of_a)
            rows.append((title, of_a, of_b, change, percent))
    columns = (
        Column("what", ""),
        Column("a_ns", "A", "ns"),
        Column("b_ns", "B", "ns"),
        Column("change_ns", "change", "ns"),
        Column("change_percent", "change", "percent"),
    )
    note = "All threads and streams added up. One value each: no test says what chance makes of them."
    return Table("totals", "In all", columns, rows, note)


def _sum(layer: Layer, rows: Any = None) -> int | None:
    lengths_ns = layer.lengths_ns(np.ones(len(layer), np.bool_) if rows is None else rows)
    return int(lengths_ns.sum()) if len(lengths_ns) else None


def _spread(sample: Sample | None) -> tuple[int | None, ...]:
    """p50, p95 and p99 of the lengths."""
    lengths = sample.lengths_ns if sample else np.zeros(0, np.int64)
    return of_values(lengths)[2 : 2 + len(PERCENTS)]


def _lengths(found: Sequence[Change]) -> Table:
    rows = []
    for one in found:
        of_a, of_b = _spread(one.a), _spread(one.b)
        assert one.shift is not None
        rows.append(
            (
                one.key[1],
                one.key[0],
                *one.counts,
                *(value for pair in zip(of_a, of_b, strict=True) for value in pair),
                round(one.shift.estimate),
                one.percent(one.shift.estimate),
                one.percent(one.shift.low),
                one.percent(one.shift.high),
                one.length_p,
                one.total_ns,
            )
        )
    columns = (
        Column("name", "name"),
        _LAYER,
        Column("a_count", "A", "count", spare=True),
        Column("b_count", "B", "count", spare=True),
        *(
            Column(f"{run}_p{percent}_ns", f"{run.upper()} p{percent}", "ns", spare=percent != 50)
            for percent in PERCENTS
            for run in "ab"
        ),
        Column("shift_ns", "shift", "ns", spare=True),
        Column("shift_percent", "shift", "percent"),
        Column("low_percent", "from", "percent"),
        Column("high_percent", "to", "percent"),
        Column("p", "p", "p"),
        Column("total_change_ns", "in all", "ns"),
    )
    note = (
        "Shift: the median of all differences between a length in B and one in A, in percent of A's median, "
        "and its confidence bounds. p: Mann–Whitney U, widened where lengths depend on those before them, "
        "adjusted for the number of tests. In all: change of the time that all took. A call inside another "
        "is in the time of both."
    )
    return Table("lengths", "Lengths that changed", columns, rows, note)


def _tails(found: Sequence[Change]) -> Table:
    rows = []
    for one in found:
        assert one.tail is not None
        shares = (100 * one.tail.share_a, 100 * one.tail.share_b)
        p99 = [_spread(sample)[-1] for sample in (one.a, one.b)]
        rows.append((*reversed(one.key), round(one.tail.limit), *shares, *p99, one.tail_p, one.total_ns))
    columns = (
        Column("name", "name"),
        _LAYER,
        Column("limit_ns", "over", "ns"),
        Column("a_percent", "A", "percent"),
        Column("b_percent", "B", "percent"),
        Column("a_p99_ns", "A p99", "ns"),
        Column("b_p99_ns", "B p99", "ns"),
        Column("p", "p", "p"),
        Column("total_change_ns", "in all", "ns"),
    )
    note = "Over: 95 of 100 lengths of both runs are no longer; A, B: which share of theirs is."
    return Table("tails", "Tails that changed, where the typical length did not", columns, rows, note)


def _counts(found: Sequence[Change]) -> Table:
    rows = [
        (
            *reversed(one.key),
            *one.counts,
            _percent_of(one.counts[1] - one.counts[0], one.counts[0]),
            one.count_p,
            one.total_ns,
        )
        for one in found
    ]
    columns = (
        Column("name", "name"),
        Column("layer", "layer"),
        Column("a_count", "A", "count"),
        Column("b_count", "B", "count"),
        Column("change_percent", "change", "percent"),
        Column("p", "p", "p"),
        Column("total_change_ns", "in all", "ns"),
    )
    note = "p: that as many fall to either run by chance, bunched as they are; adjusted like the others."
    return Table("counts", "Counts that changed", columns, rows, note)


def _alone(found: Sequence[Change]) -> Table:
    rows = [
        (*reversed(one.key), "B" if one.a is None else "A", sum(one.counts), abs(one.total_ns))
        for one in found
    ]
    columns = (
        Column("name", "name"),
        Column("layer", "layer"),
        Column("run", "only in"),
        Column("count", "count", "count"),
        Column("total_ns", "in all", "ns"),
    )
    return Table("only", "In one run alone", columns, rows)


def _exits(found: Sequence[Change]) -> Table:
    """How far apart threads leave in each run, changed or not: also where too few are there for a test."""
    rows = []
    for one in found:
        (a_p50, a_p95, _), (b_p50, b_p95, _) = (_spread(sample) for sample in (one.a, one.b))
        change = None if a_p50 is None or b_p50 is None else _percent_of(b_p50 - a_p50, a_p50)
        rows.append((one.key[1], one.key[0], *one.counts, a_p50, b_p50, a_p95, b_p95, change))
    columns = (
        Column("name", "name"),
        _LAYER,
        Column("a_count", "A", "count"),
        Column("b_count", "B", "count"),
        Column("a_p50_ns", "A p50", "ns"),
        Column("b_p50_ns", "B p50", "ns"),
        Column("a_p95_ns", "A p95", "ns", spare=True),
        Column("b_p95_ns", "B p95", "ns", spare=True),
        Column("change_percent", "change", "percent"),
    )
    note = (
        "Skew: from a block's first warp that leaves to the last; spread: from a warp's first lane to the "
        "last; delay: how much later those threads leave than the others. Change: of p50, certain or not."
    )
    return Table("exits", "Exits", columns, rows, note)


def _compared(found: Changes) -> Drawing:
    """How much was compared; and as data all of it, changed or not."""
    lengths, tails = len(found.tested.rows), np.count_nonzero(~np.isnan(found.tested["tail_p"]))

    def draw(columns: int, ascii_only: bool) -> Iterator[str]:
        yield f"Compared: {len(found)} names by count, {lengths} by length, {tails} by tail."

    def data() -> Iterator[dict[str, Any]]:
        return (
            {
                "layer": one.key[0],
                "name": one.key[1],
                "a_count": one.counts[0],
                "b_count": one.counts[1],
                "shift_ns": one.shift.estimate if one.shift else None,
                "low_ns": one.shift.low if one.shift else None,
                "high_ns": one.shift.high if one.shift else None,
                "length_p": one.length_p,
                "tail_p": one.tail_p,
                "count_p": one.count_p,
                "total_change_ns": one.total_ns,
                "changed": one.is_reported,
            }
            for one in found.first(np.ones(len(found), np.bool_))
        )

    return Drawing("compared", draw, data)


def _notes(found: Changes, a: Run, b: Run, options: Options) -> Iterator[str]:
    tested = found.tested
    if few := int(np.count_nonzero(found.is_in_both)) - len(tested.rows):
        yield (
            f"{few} names have too few lengths in one run for any difference to be significant: "
            "record more of them, or longer"
        )
    small = np.count_nonzero((tested["length_p"] <= options.alpha) & ~found.length_changed[tested.rows])
    if small:
        yield f"{small} lengths changed by less than --min-change {options.min_change:g}%: not reported"
    others = (found.column("count_a") != found.column("count_b")) & ~found.is_reported
    if others.any():
        ours = others & found.is_of(DECIDED_BY_PROGRAM)
        some = found.first(ours if ours.any() else others, _NAMED_AT_MOST)
        names = ", ".join(f"{o.key[1]} {o.counts[0]} → {o.counts[1]}" for o in some)
        yield (
            f"{np.count_nonzero(others)} counts differ by no more than chance may make it: {names} …; "
            "--json has all"
        )
    yield (
        "one run each: what differs from run to run (clocks of the GPU, other load) is reported as a change "
        "too; compare two runs of the same program to see how much that is"
    )
    for name, run in (("A", a), ("B", b)):
        if lost := sum(run.facts.losses.values()):
            yield f"{lost} events of {name} were lost: its counts and sums are at least so much"


REPORT = Report(
    "diff",
    Options,
    run,
    inputs=("A", "B"),
)
