"""The collectives of one rank: what its GPUs ran to exchange data with other ranks.

PyTorch's profiler names the operation, the process group and the number of each. In other recordings the
name of a kernel states the operation, NCCL's calls state the group, and
the order of its kernels is the number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from tracepipe.analyses.cuda_calls import values_by_names
from tracepipe.analyses.gpu_shares import communicates
from tracepipe.dataset.communicators import Asked, communicated
from tracepipe.event.columns import Int64s
from tracepipe.kernel_names import short_kernel_name
from tracepipe.reports.frames.intervals import Stretches
from tracepipe.reports.frames.libraries import np, pl
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
    """The collectives of a rank. `remarks` say which of their process groups are not known."""

    frame: pl.DataFrame
    remarks: list[str]


def collectives_of(run: Run, compute: dict[int, Stretches], steps: pl.DataFrame) -> Collectives:
    """A row for each collective's kernel, by its start, with the columns of SCHEMA.

    `compute` is when each GPU computed: `exposed_ns` is the rest of a collective's time. `row` is that in
    `kernels`; `nth` counts from 0 the kernels of an operation and process group, by GPU. `step` is the one in
    which it starts, of those of `steps_of`. `work_ns` is how long before it no collective ran that ranks
    leave together, null where none did before.
    """
    of_shape, moves_data = values_by_names(run, "gpu_kernel", communicates)
    layer = run.layer("gpu_kernel")
    rows = np.flatnonzero(np.array(moves_data, np.bool_)[of_shape][layer.shape])
    kinds = {
        name: pl.String if name == "name" else pl.Int64
        for name in ("start_ns", "end_ns", "gpu", "stream", "name")
    }
    frame = pl.DataFrame(run.values("gpu_kernel", rows, *kinds), kinds)
    given = {key: run.args.texts_of(arg, layer.args[rows]) for key, arg in _ARGS.items()}
    operations = _operations(given["operation"], frame["name"].to_list())
    frame = frame.with_columns(
        row=pl.Series(rows, dtype=pl.Int64),
        gpu=pl.col("gpu").fill_null(0),
        operation=pl.Series(operations, dtype=pl.String),
        process_group=pl.Series(_groups(given["group"], given["members"]), dtype=pl.String),
        **{key: _integers(given[key]) for key in ("group_size", "seq", "elements")},
    )
    frame, remarks = _with_communicators(run, rows, frame)
    nth = pl.int_range(pl.len(), dtype=pl.Int64).over("gpu", "operation", "process_group")
    leaves_together = pl.col("operation").is_in(sorted(TOGETHER)) & (pl.col("process_group") != UNKNOWN)
    ends_ns = pl.when(leaves_together).then("end_ns").cum_max().forward_fill().shift(1).over("gpu")
    frame = frame.with_columns(
        nth=nth,
        exposed_ns=_exposed_ns(frame, compute),
        leaves_together=leaves_together,
        work_ns=(pl.col("start_ns") - ends_ns).clip(0),
        step=_steps(frame["start_ns"], steps),
    )
    frame = frame.select(pl.col(name).cast(getattr(pl, kind)) for name, kind in SCHEMA.items())
    return Collectives(frame, remarks)


def _with_communicators(run: Run, rows: Int64s, frame: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Fill in what the calls of NCCL tell of kernels that name no group themselves; and what they do not."""
    is_unnamed = frame["process_group"] == ""
    if not is_unnamed.any():
        return frame, []
    found = communicated(run, rows, frame["operation"].to_list(), operation_of)
    remarks = []
    if found.unknown:
        remarks.append(
            f"calls of NCCL whose process groups are not known: {found.unknown:,}. Record from before their "
            "communicators are made."
        )
    if not any(found.asked):
        return frame, remarks  # as if all ranks were in one group
    asked = [one or Asked("", UNKNOWN, None, None) for one in found.asked]
    schema = {"group": pl.String, "size": pl.Int64, "count": pl.Int64}
    known = pl.DataFrame([(one.group, one.size, one.elements) for one in asked], schema, orient="row")[
        found.place
    ]
    frame = frame.with_columns(
        process_group=pl.when(is_unnamed).then(known["group"]).otherwise("process_group"),
        group_size=pl.col("group_size").fill_null(known["size"]),
        elements=pl.col("elements").fill_null(known["count"]),
    )
    return frame, remarks


def _steps(start_ns: pl.Series, steps: pl.DataFrame) -> pl.Series:
    """The number of the step at each time, null between steps."""
    bounds = steps.unique("start_ns", keep="first").sort("start_ns")
    if bounds.is_empty():
        return pl.Series([None] * len(start_ns), dtype=pl.Int64)
    at = bounds["start_ns"].search_sorted(start_ns, "right").cast(pl.Int64) - 1
    of = bounds[at.clip(0)]
    return of.select(step=pl.when((at >= 0) & (start_ns <= of["end_ns"])).then("step")).to_series()


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


def _integers(texts: list[str | None]) -> pl.Series:
    known: dict[str | None, int | None] = {None: None}
    for text in texts:
        if text not in known:
            known[text] = int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None
    return pl.Series([known[text] for text in texts], dtype=pl.Int64)


def _exposed_ns(frame: pl.DataFrame, compute: dict[int, Stretches]) -> pl.Series:
    exposed_ns = (frame["end_ns"] - frame["start_ns"]).to_numpy().copy()
    gpu: Any = frame["gpu"].to_numpy()
    for number, busy in compute.items():
        own = np.flatnonzero(gpu == number)
        some = frame[own]
        exposed_ns[own] -= busy.covered_ns(some["start_ns"].to_numpy(), some["end_ns"].to_numpy())
    return pl.Series(exposed_ns, dtype=pl.Int64)
