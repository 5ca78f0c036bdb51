"""The process groups of kernels that NCCL's calls launched, in recordings with the hooks `nccl`.

ncclAllReduce(comm) ── group 9f21… ─┐        ncclGroupStart()
  cuLaunchKernelEx ── launch 7 ─────┤        ncclAllReduce(comm)   ncclAllGather(other)
                      kernel ───────┘        ncclGroupEnd()
                                               cuLaunchKernelEx ── which one? by the operation
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tracepipe.event.columns import NONE, Int64s
from tracepipe.reports.analyses.cuda_calls import rows_named
from tracepipe.reports.analyses.gpu_work import KERNEL, gpu_work
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.nesting import NOBODY, nearest_of_some
from tracepipe.reports.frames.run import Run

_CALL: Final = re.compile(r"p?nccl([A-Z]\w*)")
_BEGINS, _ENDS = "GroupStart", "GroupEnd"


class Asked(NamedTuple):
    """What a call of NCCL asked for. `group` is "" where its communicator is not known."""

    operation: str
    group: str
    size: int | None
    elements: int | None


@dataclass(frozen=True, slots=True)
class Communicated:
    """Of each of some kernels, the one call that it is of; None where several may be meant, or none is known.

    `has_calls`: calls of NCCL launched some of them; `unknown` is how many calls were made of communicators
    that are not known.
    """

    calls: list[Asked | None]
    has_calls: bool = False
    unknown: int = 0


def communicated(run: Run, rows: Int64s, operations: list[str], named: Callable[[str], str]) -> Communicated:
    """Of some kernels (rows of their layer, by their start), with the operations that their names tell.
    `named` tells that of a function's name without `nccl`.
    """
    found = rows_named(run, "userspace", lambda name: _CALL.fullmatch(name) is not None)
    if not len(found):
        return Communicated([None] * len(rows))
    asked, unknown = _asked(run, found, named)
    layer = run.layer("userspace")
    is_call = np.zeros(len(layer), np.bool_)
    is_call[np.array(sorted(asked), np.int64)] = True
    of_kernel = _launches(run, rows)
    launched = np.flatnonzero(of_kernel != NONE)
    around = np.full(len(rows), NOBODY, np.int64)
    around[launched] = nearest_of_some(layer.parent, is_call, of_kernel[launched])
    calls = [
        _one(asked.get(call, []), operation)
        for call, operation in zip(around.tolist(), operations, strict=True)
    ]
    return Communicated(calls, bool((around != NOBODY).any()), unknown)


def _asked(run: Run, rows: Int64s, named: Callable[[str], str]) -> tuple[dict[int, list[Asked]], int]:
    """What each call that may launch kernels was asked for: a collective, or the end of a group of them; and
    how many collectives have a communicator that is not known.
    """
    frame = run.rows("userspace", rows, "name", "tid")
    args = run.layer("userspace").args[rows]
    texts = [run.args.texts_of(key, args) for key in ("comm", "group", "group_ranks", "count")]
    found: dict[int, list[Asked]] = {}
    groups: dict[Any, list[list[Asked]]] = {}
    unknown = 0
    for row, name, tid, comm, group, size, count in zip(
        rows.tolist(), frame["name"].to_list(), frame["tid"].to_list(), *texts, strict=True
    ):
        function, of_thread = name[name.index("nccl") + 4 :], groups.setdefault(tid, [])
        if function == _BEGINS:
            of_thread.append([])
        elif function == _ENDS:
            # The end of the outermost one launches.
            inner = of_thread.pop() if of_thread else []
            if of_thread:
                of_thread[-1] += inner
            else:
                found[row] = inner
        elif comm is not None and (operation := named(function)):
            one = Asked(operation, group or "", _number(size), _number(count))
            unknown += not one.group
            found[row] = [one]
            if of_thread:
                of_thread[-1].append(one)
    return found, unknown


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _launches(run: Run, rows: Int64s) -> Int64s:
    """The call that launched each of some kernels, NONE where it is not known."""
    work = gpu_work(run)
    of_row = np.full(len(run.layer("gpu_kernel")), NONE, np.int64)
    kernels = work.what == KERNEL
    of_row[work.row[kernels]] = np.where(work.by_order[kernels], NONE, work.call[kernels])
    found: Int64s = of_row[rows]
    return found


def _one(asked: list[Asked], operation: str) -> Asked | None:
    """The one that a kernel is of: all have its group, or those with its operation have."""
    for some in (asked, [one for one in asked if one.operation == operation]):
        groups = {one.group for one in some}
        if len(groups) == 1 and "" not in groups:
            return some[0] if len(some) == 1 else some[0]._replace(elements=None)
    return None
