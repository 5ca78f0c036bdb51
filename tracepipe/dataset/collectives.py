"""The collectives of one rank: what its GPUs ran to exchange data with other ranks.

PyTorch's profiler names the operation, the process group and the number of each. In other recordings the name
of a kernel states the operation, and the order of its kernels is the number. The calls of NCCL that launched
them state the group, in recordings with the hooks `nccl`:

    ncclAllReduce(comm) ── group 9f21… ─┐        ncclGroupStart()
      cuLaunchKernelEx ── launch 7 ─────┤        ncclAllReduce(comm)   ncclAllGather(other)
                          kernel ───────┘        ncclGroupEnd()
                                                   cuLaunchKernelEx ── which one? by the operation
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np

from tracepipe.analyses.cuda_calls import rows_named, values_by_names
from tracepipe.analyses.gpu_work import KERNEL, GpuTime, communicates, gpu_work
from tracepipe.analyses.nesting import nearest_of_some
from tracepipe.analyses.steps import Steps
from tracepipe.event.columns import NONE, Int64s
from tracepipe.kernel_names import remembered, short_kernel_name
from tracepipe.store.run import Run
from tracepipe.store.tables import object_column

SCHEMA: Final = {
    "row": "bigint", "start_ns": "bigint", "end_ns": "bigint", "gpu": "bigint", "stream": "bigint",
    "name": "string", "operation": "string", "process_group": "string", "group_size": "bigint",
    "seq": "bigint", "nth": "bigint", "elements": "bigint", "exposed_ns": "bigint",
    "leaves_together": "boolean", "step": "bigint", "work_ns": "bigint",
}  # fmt: skip
_NUMBERED: Final = """
with ended as (
    select *, max(case when leaves_together then end_ns end) over (
        partition by gpu order by row rows between unbounded preceding and 1 preceding
    ) as left_ns
    from given
)
select * exclude left_ns replace (nullif(step, -1) as step),
    row_number() over (partition by gpu, operation, process_group order by row) - 1 as nth,
    case when left_ns is not null then greatest(start_ns - left_ns, 0) end as work_ns
from ended order by row
"""
_ARGS: Final = {
    "operation": "Collective name",
    "group": "Process Group Name",
    "members": "Process Group Ranks",
    "group_size": "Group size",
    "seq": "Seq",
    "elements": "In msg nelems",
}
# As frameworks and kernels write them: "_allgather_base", "ncclDevKernel_ReduceScatter_Sum_f32". vLLM's
# cross_device_reduce is an all-reduce.
_OPERATIONS: Final = {
    "reduce_scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "all_reduce": re.compile(r"all_?reduce|cross_device_reduce", re.IGNORECASE),
    "all_gather": re.compile(r"all_?gather", re.IGNORECASE),
    "all_to_all": re.compile(r"all_?to_?all", re.IGNORECASE),
    "barrier": re.compile(r"barrier", re.IGNORECASE),
    "broadcast": re.compile(r"broadcast|bcast", re.IGNORECASE),
    "send_recv": re.compile(r"send_?recv|(^|_)(send|recv)", re.IGNORECASE),
    "reduce": re.compile(r"reduce", re.IGNORECASE),
    "gather": re.compile(r"gather", re.IGNORECASE),
    "scatter": re.compile(r"scatter", re.IGNORECASE),
}
_CALL: Final = re.compile(r"p?nccl([A-Z]\w*)")
_BEGINS, _ENDS = "GroupStart", "GroupEnd"
UNKNOWN: Final = "not known"
"""The process group of a kernel of which only that is known that others of the rank have another one."""
TOGETHER: Final = frozenset({"reduce_scatter", "all_reduce", "all_gather", "all_to_all", "barrier"})
"""Operations in which each rank needs something of every other, so that none leaves before all have come."""


class Asked(NamedTuple):
    """The request of a call of NCCL. `group` is "" if its communicator is not known."""

    operation: str
    group: str
    size: int | None
    elements: int | None


@remembered
def operation_of(name: str) -> str:
    """The operation that a name tells, "" where it tells none."""
    return next((operation for operation, form in _OPERATIONS.items() if form.search(name)), "")


def put_collectives(run: Run, times: Iterable[GpuTime], steps: Steps) -> list[str]:
    """Write a row of SCHEMA for each collective's kernel into the table `dataset.collectives`, by its start.
    Return remarks about process groups that are not known.

    `exposed_ns` is the time of a collective in which its GPU does not compute. `row` is that in `kernels`;
    `nth` counts from 0 the kernels of an operation and process group, by GPU. `step` is the one in which it
    starts. `work_ns` is how long before it no collective ran that ranks leave together, null where none did
    before.
    """
    of_shape, moves_data = values_by_names(run, "gpu_kernel", communicates)
    layer = run.layer("gpu_kernel")
    rows = np.flatnonzero(np.array(moves_data, np.bool_)[of_shape][layer.shape])
    of = run.values("gpu_kernel", rows, "gpu", "stream", "name")
    start_ns, end_ns = layer.start_ns[rows], layer.end_ns[rows]
    gpus = np.array([gpu or 0 for gpu in of["gpu"]], np.int64)
    given = {key: run.args.texts_of(arg, layer.args[rows]) for key, arg in _ARGS.items()}
    operations = [
        operation_of(stated or short_kernel_name(name or ""))
        for stated, name in zip(given["operation"], of["name"], strict=True)
    ]
    # On different ranks, groups of one name may have different members.
    names = zip(given["group"], given["members"], strict=True)
    groups = [f"{name or ''} {members or ''}".strip() for name, members in names]
    sizes, seq, elements = (list(map(_integer, given[key])) for key in ("group_size", "seq", "elements"))
    remarks = _add_communicators(run, rows, operations, groups, sizes, elements)
    together = [
        operation in TOGETHER and group != UNKNOWN
        for operation, group in zip(operations, groups, strict=True)
    ]
    exposed_ns = end_ns - start_ns
    for time in times:
        own = np.flatnonzero(gpus == time.gpu)
        exposed_ns[own] = time.compute.uncovered_ns(start_ns[own], end_ns[own])
    at = np.searchsorted(steps.start_ns, start_ns, "right") - 1
    is_inside = (at >= 0) & (start_ns <= steps.end_ns[at])
    columns: dict[str, Any] = {
        "row": rows, "start_ns": start_ns, "end_ns": end_ns, "gpu": gpus, "stream": of["stream"],
        "name": of["name"], "operation": operations, "process_group": groups, "group_size": sizes, "seq": seq,
        "elements": elements, "exposed_ns": exposed_ns, "leaves_together": np.array(together, np.bool_),
        "step": np.where(is_inside, steps.number[at], NONE),
    }  # fmt: skip
    run.connection.register("given", {name: object_column(column) for name, column in columns.items()})
    run.connection.execute(f"insert into dataset.collectives by name {_NUMBERED}")
    return remarks


def _add_communicators(
    run: Run,
    rows: Int64s,
    operations: list[str],
    groups: list[str],
    sizes: list[int | None],
    elements: list[int | None],
) -> list[str]:
    """Add what the calls of NCCL tell of kernels that name no group themselves; return what they do not."""
    if "" not in groups:
        return []
    calls, unknown = _communicated(run, rows, operations)
    remarks = []
    if unknown:
        remarks.append(
            f"calls of NCCL whose process groups are not known: {unknown:,}. Record from before their "
            "communicators are made."
        )
    if not any(calls):
        return remarks  # as if all ranks were in one group
    for at, call in enumerate(calls):
        asked = call or Asked("", UNKNOWN, None, None)
        groups[at] = groups[at] or asked.group
        sizes[at] = asked.size if sizes[at] is None else sizes[at]
        elements[at] = asked.elements if elements[at] is None else elements[at]
    return remarks


def _communicated(run: Run, rows: Int64s, operations: list[str]) -> tuple[list[Asked | None], int]:
    """For each of some kernels the call that it belongs to, None if several calls may be meant or none is
    known; and the number of calls whose communicator is not known. The kernels are rows of their layer, by
    their start, with the operations that their names state.
    """
    calls: list[Asked | None] = [None] * len(rows)
    found = rows_named(run, "userspace", lambda name: _CALL.fullmatch(name) is not None)
    if not len(found):
        return calls, 0
    asked, unknown = _requests(run, found)
    layer = run.layer("userspace")
    is_call = np.zeros(len(layer), np.bool_)
    is_call[found[[request is not None for request in asked]]] = True
    # The call that launched each kernel, NONE where it is not known.
    work = gpu_work(run)
    of_row = np.full(len(run.layer("gpu_kernel")), NONE, np.int64)
    kernels = work.what == KERNEL
    of_row[work.row[kernels]] = np.where(work.by_order[kernels], NONE, work.call[kernels])
    of_kernel = of_row[rows]
    launched = np.flatnonzero(of_kernel != NONE)
    around = nearest_of_some(layer.parent, is_call, of_kernel[launched])
    inside = around != NONE
    known: dict[tuple[int, str], Asked | None] = {}
    places = np.searchsorted(found, around[inside]).tolist()
    for kernel, place in zip(launched[inside].tolist(), places, strict=True):
        request, operation = asked[place] or (), operations[kernel]
        key = id(request), operation  # equal requests are one object
        if key not in known:
            known[key] = _one(request, operation)
        calls[kernel] = known[key]
    return calls, unknown


def _requests(run: Run, rows: Int64s) -> tuple[list[tuple[Asked, ...] | None], int]:
    """The requests of calls of NCCL that may launch kernels, by their start: a collective, or the end of a
    group of calls; None of others. Equal requests are one object. And the number of calls whose communicator
    is not known.
    """
    layer, groups = run.layer("userspace"), dict[int | None, list[list[Asked]]]()
    requests: list[tuple[Asked, ...] | None] = []
    same: dict[tuple[Asked, ...], tuple[Asked, ...]] = {}
    unknown, of = 0, run.values("userspace", rows, "name", "tid")
    for name, tid, number in zip(of["name"], of["tid"], layer.args[rows].tolist(), strict=True):
        function, of_thread = name[name.index("nccl") + 4 :], groups.setdefault(tid, [])
        args = run.args.args(number) if number != NONE else {}
        request: tuple[Asked, ...] | None = None
        if function == _BEGINS:
            of_thread.append([])
        elif function == _ENDS:
            # The end of the outermost one launches.
            inner = of_thread.pop() if of_thread else []
            if of_thread:
                of_thread[-1] += inner
            else:
                request = tuple(inner)
        elif "comm" in args and (operation := operation_of(function)):
            group = args.get("group")
            group = group if isinstance(group, str) else ""
            one = Asked(operation, group, _number(args.get("group_ranks")), _number(args.get("count")))
            unknown += not group
            if of_thread:
                of_thread[-1].append(one)
            request = (one,)
        requests.append(None if request is None else same.setdefault(request, request))
    return requests, unknown


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else None


def _one(asked: tuple[Asked, ...], operation: str) -> Asked | None:
    """The one that a kernel is of: all have its group, or those with its operation have."""
    for some in (asked, tuple(one for one in asked if one.operation == operation)):
        groups = {one.group for one in some}
        if len(groups) == 1 and "" not in groups:
            return some[0] if len(some) == 1 else some[0]._replace(elements=None)
    return None


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None
