"""The collectives of one rank: what its GPUs ran to exchange data with other ranks.

PyTorch's profiler names the operation, the process group and the number of each. In other recordings the
name of a kernel states the operation, NCCL's calls state the group, and
the order of its kernels is the number.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tracepipe.analyses.cuda_calls import values_by_names
from tracepipe.analyses.gpu_shares import communicates
from tracepipe.dataset.communicators import Asked, communicated
from tracepipe.event.columns import Int64s
from tracepipe.event.intervals import Stretches
from tracepipe.kernel_names import short_kernel_name
from tracepipe.store.run import Run

SCHEMA: Final = {
    "row": "Int64", "start_ns": "Int64", "end_ns": "Int64", "gpu": "Int64", "stream": "Int64",
    "name": "String",
    "operation": "String", "process_group": "String", "group_size": "Int64", "seq": "Int64", "nth": "Int64",
    "elements": "Int64", "exposed_ns": "Int64", "leaves_together": "Boolean", "step": "Int64",
    "work_ns": "Int64",
}  # fmt: skip
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
UNKNOWN: Final = "not known"
"""The process group of a kernel of which only that is known that others of the rank have another one."""
TOGETHER: Final = frozenset({"reduce_scatter", "all_reduce", "all_gather", "all_to_all", "barrier"})
"""Operations in which each rank needs something of every other, so that none leaves before all have come."""


def operation_of(name: str) -> str:
    """The operation that a name tells, "" where it tells none."""
    return next((operation for operation, form in _OPERATIONS.items() if form.search(name)), "")


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of a rank, as columns of SCHEMA. `remarks` say which of their process groups are not
    known.
    """

    columns: dict[str, Any]
    remarks: list[str]


def collectives_of(run: Run, compute: dict[int, Stretches], steps: dict[str, Any]) -> Collectives:
    """A row for each collective's kernel, by its start.

    `compute` is when each GPU computed: `exposed_ns` is the rest of a collective's time. `row` is that in
    `kernels`; `nth` counts from 0 the kernels of an operation and process group, by GPU. `step` is the one in
    which it starts, of those of `steps_of`. `work_ns` is how long before it no collective ran that ranks
    leave together, None where none did before.
    """
    of_shape, moves_data = values_by_names(run, "gpu_kernel", communicates)
    layer = run.layer("gpu_kernel")
    rows = np.flatnonzero(np.array(moves_data, np.bool_)[of_shape][layer.shape])
    of = run.values("gpu_kernel", rows, "gpu", "stream", "name")
    start_ns, end_ns = layer.start_ns[rows], layer.end_ns[rows]
    gpus = [gpu or 0 for gpu in of["gpu"]]
    given = {key: run.args.texts_of(arg, layer.args[rows]) for key, arg in _ARGS.items()}
    operations = _operations(given["operation"], of["name"])
    groups = _groups(given["group"], given["members"])
    sizes, seq, elements = (_integers(given[key]) for key in ("group_size", "seq", "elements"))
    remarks = _add_communicators(run, rows, operations, groups, sizes, elements)
    together = [
        operation in TOGETHER and group != UNKNOWN
        for operation, group in zip(operations, groups, strict=True)
    ]
    counts: Counter[tuple[int, str, str]] = Counter()
    nth, work_ns, last_ns = [], [], dict[int, int]()
    for at, key in enumerate(zip(gpus, operations, groups, strict=True)):
        nth.append(counts[key])
        counts[key] += 1
        gpu, before_ns = key[0], last_ns.get(key[0])
        work_ns.append(None if before_ns is None else max(int(start_ns[at]) - before_ns, 0))
        if together[at]:
            ended_ns = int(end_ns[at])
            last_ns[gpu] = ended_ns if before_ns is None else max(before_ns, ended_ns)
    exposed_ns = end_ns - start_ns
    for number, busy in compute.items():
        own = np.flatnonzero(np.array(gpus) == number)
        exposed_ns[own] -= busy.covered_ns(start_ns[own], end_ns[own])
    columns = {
        "row": rows, "start_ns": start_ns, "end_ns": end_ns, "gpu": gpus, "stream": of["stream"],
        "name": of["name"], "operation": operations, "process_group": groups, "group_size": sizes, "seq": seq,
        "nth": nth, "elements": elements, "exposed_ns": exposed_ns, "leaves_together": together,
        "step": _steps(start_ns, steps), "work_ns": work_ns,
    }  # fmt: skip
    return Collectives(columns, remarks)


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


def _steps(start_ns: Int64s, steps: dict[str, Any]) -> list[int | None]:
    """The number of the step at each time, None between steps."""
    starts_ns, first = np.unique(steps["start_ns"], return_index=True)
    if not len(starts_ns):
        return [None] * len(start_ns)
    at = np.searchsorted(starts_ns, start_ns, "right") - 1
    of = first[at.clip(0)]
    is_inside = (at >= 0) & (start_ns <= steps["end_ns"][of])
    return [
        step if inside else None
        for step, inside in zip(steps["step"][of].tolist(), is_inside.tolist(), strict=True)
    ]


def _operations(given: list[str | None], names: list[str | None]) -> list[str]:
    known: dict[str, str] = {}
    found = []
    for stated, name in zip(given, names, strict=True):
        text = stated or short_kernel_name(name or "")
        if text not in known:
            known[text] = operation_of(text)
        found.append(known[text])
    return found


def _groups(names: list[str | None], members: list[str | None]) -> list[str]:
    """Names that distinguish groups: on different ranks, groups of one name may have different members."""
    return [f"{name or ''} {ranks or ''}".strip() for name, ranks in zip(names, members, strict=True)]


def _integers(texts: list[str | None]) -> list[int | None]:
    known: dict[str | None, int | None] = {None: None}
    for text in texts:
        if text not in known:
            known[text] = int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None
    return [known[text] for text in texts]
