"""The work of GPUs for each range that a program marked, found by the launch calls inside the range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tracepipe.analyses.autograd import autograd
from tracepipe.analyses.cuda_calls import rows_named
from tracepipe.analyses.gpu_work import WORK_LAYERS, LaunchCalls
from tracepipe.analyses.nesting import open_at
from tracepipe.analyses.steps import is_step
from tracepipe.event.columns import NONE, Bools, Int64s, Ints, distinct
from tracepipe.event.groups import RowsByNumber, number_rows
from tracepipe.event.intervals import Stretches
from tracepipe.store.run import Run
from tracepipe.store.schema import INSTANT, IS_TIMED, NO_BEGIN

# The suffix that PyTorch's emit_nvtx adds to the name of an operator: `aten::linear, seq = 5, op_id = 12`.
MORE: Final = ", (seq|op_id|sizes|input_op_ids) ?= ?.*"
# Of the ranges of a process, those that begin while this many are open have no work here.
_OPEN_RANGES_MAX: Final = 64
_RULE: Final = (
    "A range includes what was launched in the ranges inside it, and a range of a process what any of its "
    "threads launched."
)
_RULE_OF_AUTOGRAD: Final = (
    " What a thread of autograd launched counts for the ranges of the thread that ran the forward operators, "
    "which have the same sequence numbers."
)
_RULE_OF_STEPS: Final = " A step includes all that its process launched during it."
Row = tuple[Any, ...]
"""Name, number of ranges, the sum of their lengths that are known, or None; number of launches inside them,
the time from the first work to the last, the busy part of it, and the idle part in percent; None for these
without a launch."""


def ranges_by_gpu_time(
    run: Run, top: int, *, own: bool = False, holds: Callable[[str, Int64s], Bools] | None = None
) -> tuple[list[Row], int, str]:
    """The ranges of threads and processes by name, those with the most busy time first: the first `top`, or
    all for 0, how many there are, and the rules that were used. With `own`, only those without a domain.
    `holds` returns which rows of a layer belong to the part of the recording that is shown.
    """
    work, rules = work_in_ranges(run)
    some = np.arange(len(run.layer("annotation")) if holds else 0)
    if holds:
        some = some[holds("annotation", some)]
        kept = np.zeros(len(work["row"]), np.bool_)
        for what, name in enumerate(WORK_LAYERS):
            of = np.flatnonzero(work["what"] == what)
            kept[of] = holds(name, work["row"][of])
        work = {name: column[kept] for name, column in work.items()}
    rows = run.store.rows(
        f"""with ranges as (
            select x.id, regexp_replace(n.text, '{MORE}', '', 'g') as name,
                if({IS_TIMED}, x.end_ns - x.start_ns, null) as wall_ns
            from store.annotation x join store.shapes s using (shape)
            join store.texts n on s.name_text = n.number
            where x.kind not in ({INSTANT}, {NO_BEGIN})
            {f"and s.domain_text = {NONE}" if own else ""}
            {"and x.id in (select id from of_part)" if holds else ""}),
        spent as (
            select range, count(*) as launches, max(end_ns) - min(start_ns) as span_ns,
                sum(greatest(end_ns - greatest(start_ns, until_ns), 0)) as busy_ns
            from (select *, max(end_ns) over (partition by range order by start_ns
                rows between unbounded preceding and 1 preceding) as until_ns from work)
            group by range)
        select name, count(*), sum(wall_ns) as total_ns, coalesce(sum(launches), 0), sum(span_ns) as whole_ns,
            sum(busy_ns) as worked_ns, 100 * (whole_ns - worked_ns) / nullif(whole_ns, 0), count(*) over ()
        from ranges left join spent on range = id group by name
        order by coalesce(worked_ns, 0) desc, total_ns desc nulls last, name
        {f"limit {top}" if top > 0 else ""}""",
        work=work,
        of_part={"id": some},
    )
    return [row[:-1] for row in rows], rows[0][-1] if rows else 0, rules


def work_in_ranges(run: Run) -> tuple[dict[str, Int64s], str]:
    """A row for each range, the row of the annotations, and each kernel or copy that was launched in it, with
    the index of its layer in WORK_LAYERS. And the rules that were used.
    """
    ranges, domain, (of_shape, _) = run.layer("annotation"), run.shapes.column("domain"), run.shapes.threads
    calls = run.layer("userspace")
    launched = [
        (call, calls.start_ns[call], work.start_ns[some], work.end_ns[some], some, np.full(len(some), what))
        for what, (work, some, call) in enumerate(LaunchCalls(run).launched())
    ]
    call, called_ns, start_ns, end_ns, row, what = (np.concatenate(of) for of in zip(*launched, strict=True))
    shapes, pids, numbers = ranges.shape, run.shapes.column("pid"), run.shapes.column("range")[ranges.shape]
    is_range = (ranges.kind != INSTANT) & (ranges.kind != NO_BEGIN)
    threads, served = of_shape[calls.shape[call]], autograd(run).served_by(call)
    steps = rows_named(run, "annotation", is_step)
    steps = steps[is_range[steps] & (numbers[steps] == NONE)]
    have_steps = distinct(of_shape[shapes[steps]])
    levels: list[tuple[Int64s, Int64s]] = [(shapes[:0].astype(np.int64),) * 2]

    def add(rows: Int64s, owners: Ints, launching: Ints, some: Int64s) -> None:
        """Add launches to the ranges around them, of these rows, that have the same owner."""
        of_owner = RowsByNumber(launching[some], some)
        group, first = number_rows(owners[shapes[rows]], domain[shapes[rows]], numbers[rows])
        for number, own in RowsByNumber(group, rows):
            inside = of_owner.of(int(owners[shapes[rows[first[number]]]]))
            levels.extend((row, inside[at]) for at, row in open_at(ranges, own, called_ns[inside]))

    every, rules = np.arange(len(call)), _RULE
    of_threads = np.flatnonzero(is_range & (numbers == NONE))
    add(of_threads, of_shape, threads, every)
    if (served != NONE).any():
        add(of_threads, of_shape, served, np.flatnonzero(served != NONE))
        rules += _RULE_OF_AUTOGRAD
    of_processes = np.flatnonzero(is_range & (numbers != NONE) & (numbers < _OPEN_RANGES_MAX))
    add(of_processes, pids, pids[calls.shape[call]], every)
    others = np.flatnonzero(~np.isin(threads, have_steps) & ~np.isin(served, have_steps))
    before = len(levels)
    for _, own in RowsByNumber(of_shape[shapes[steps]], steps):
        stepping = Stretches(ranges.start_ns[own], ranges.end_ns[own])
        is_inside = stepping.covered_ns(called_ns[others], called_ns[others] + 1) > 0
        add(own, pids, pids[calls.shape[call]], others[is_inside])
    if any(len(rows) for rows, _ in levels[before:]):
        rules += _RULE_OF_STEPS
    inside, some = (np.concatenate(of) for of in zip(*levels, strict=True))
    columns = {"start_ns": start_ns, "end_ns": end_ns, "row": row, "what": what}
    return {"range": inside} | {name: column[some] for name, column in columns.items()}, rules
