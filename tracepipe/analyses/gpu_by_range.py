"""The work of GPUs for each range that a program marked, found by the launch calls inside the range."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tracepipe.analyses.gpu_work import LaunchCalls
from tracepipe.event.columns import NONE, Int64s
from tracepipe.event.groups import RowsByNumber, number_rows
from tracepipe.store.run import Run
from tracepipe.store.schema import INSTANT, IS_TIMED, NO_BEGIN

# The suffix that PyTorch's emit_nvtx adds to the name of an operator: `aten::linear, seq = 5, op_id = 12`.
_MORE: Final = ", (seq|op_id|sizes|input_op_ids) ?= ?.*"
# Of the ranges of a process, those that begin while this many are open have no work here.
_OPEN_RANGES_MAX: Final = 64
Row = tuple[Any, ...]
"""Name, number of ranges, the sum of their lengths that are known, or None; number of launches inside them,
the time from the first work to the last, the busy part of it, and the idle part in percent; None for these
without a launch."""


def ranges_by_gpu_time(run: Run, top: int, *, own: bool = False) -> tuple[list[Row], int]:
    """The ranges of threads and processes by name, those with the most busy time first: the first `top`, or
    all for 0, and how many there are. With `own`, only those without a domain.
    """
    rows = run.store.rows(
        f"""with ranges as (
            select x.id, regexp_replace(n.text, '{_MORE}', '', 'g') as name,
                if({IS_TIMED}, x.end_ns - x.start_ns, null) as wall_ns
            from store.annotation x join store.shapes s using (shape)
            join store.texts n on s.name_text = n.number
            where x.kind not in ({INSTANT}, {NO_BEGIN})
            {f"and s.domain_text = {NONE}" if own else ""}),
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
        work=_work_in_ranges(run),
    )
    return [row[:-1] for row in rows], rows[0][-1] if rows else 0


def _work_in_ranges(run: Run) -> dict[str, Int64s]:
    """A row for each range, the row of the annotations, and each kernel or copy that was launched in it."""
    ranges, domain, (of_shape, _) = run.layer("annotation"), run.shapes.column("domain"), run.shapes.threads
    calls = run.layer("userspace")
    launched = [
        (calls.shape[call], calls.start_ns[call], work.start_ns[some], work.end_ns[some])
        for work, some, call in LaunchCalls(run).launched()
    ]
    shape, called_ns, start_ns, end_ns = (np.concatenate(of) for of in zip(*launched, strict=True))
    shapes, pids, numbers = ranges.shape, run.shapes.column("pid"), run.shapes.column("range")[ranges.shape]
    is_range = (ranges.kind != INSTANT) & (ranges.kind != NO_BEGIN)
    levels: list[tuple[Int64s, Int64s]] = [(shapes[:0].astype(np.int64),) * 2]
    # A range of a thread has what this thread launched, that of a process what any thread of it did.
    for owners, is_own in (
        (of_shape, numbers == NONE),
        (pids, (numbers != NONE) & (numbers < _OPEN_RANGES_MAX)),
    ):
        by_owner = RowsByNumber(owners[shape])
        rows = np.flatnonzero(is_range & is_own)
        group, first = number_rows(owners[shapes[rows]], domain[shapes[rows]], numbers[rows])
        for number, own in RowsByNumber(group, rows):
            some = by_owner.of(int(owners[shapes[rows[first[number]]]]))
            # The last range that began before the call, and those around it that had not ended.
            at = np.searchsorted(ranges.start_ns[own], called_ns[some], "right") - 1
            some, inside = some[at >= 0], own[at[at >= 0]]
            while len(some):
                is_open = ranges.end_ns[inside] > called_ns[some]
                levels.append((inside[is_open], some[is_open]))
                inside = ranges.parent[inside].astype(np.int64)
                some, inside = some[inside != NONE], inside[inside != NONE]
    inside, some = (np.concatenate(of) for of in zip(*levels, strict=True))
    return {"range": inside, "start_ns": start_ns[some], "end_ns": end_ns[some]}
