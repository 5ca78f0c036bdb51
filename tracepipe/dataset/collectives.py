"""The collectives of one rank: what its GPUs ran to exchange data with other ranks.

PyTorch's profiler names the operation, the process group and the number of each. In other recordings the
name of a kernel states the operation, NCCL's calls state the group, and
the order of its kernels is the number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import numpy as np

from tracepipe.analyses.cuda_calls import values_by_names
from tracepipe.analyses.gpu_work import GpuTime, communicates
from tracepipe.analyses.steps import Steps
from tracepipe.dataset.communicators import Asked, communicated
from tracepipe.event.columns import NONE, Int64s
from tracepipe.kernel_names import short_kernel_name
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
_REMEMBERED: Final = 1 << 12
UNKNOWN: Final = "not known"
"""The process group of a kernel of which only that is known that others of the rank have another one."""
TOGETHER: Final = frozenset({"reduce_scatter", "all_reduce", "all_gather", "all_to_all", "barrier"})
"""Operations in which each rank needs something of every other, so that none leaves before all have come."""


@lru_cache(_REMEMBERED)
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
    found = communicated(run, rows, operations, operation_of)
    remarks = []
    if found.unknown:
        remarks.append(
            f"calls of NCCL whose process groups are not known: {found.unknown:,}. Record from before their "
            "communicators are made."
        )
    if not any(found.asked):
        return remarks  # as if all ranks were in one group
    for at, place in enumerate(found.place.tolist()):
        asked = found.asked[place] or Asked("", UNKNOWN, None, None)
        groups[at] = groups[at] or asked.group
        sizes[at] = asked.size if sizes[at] is None else sizes[at]
        elements[at] = asked.elements if elements[at] is None else elements[at]
    return remarks


@lru_cache(_REMEMBERED)
def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None
