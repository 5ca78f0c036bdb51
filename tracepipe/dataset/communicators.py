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
from typing import Final, NamedTuple

from tracepipe.analyses.cuda_calls import rows_named
from tracepipe.analyses.gpu_work import KERNEL, gpu_work
from tracepipe.analyses.nesting import NOBODY, nearest_of_some
from tracepipe.event.columns import NONE, Int64s
from tracepipe.libraries import np
from tracepipe.store.run import Run

_CALL: Final = re.compile(r"p?nccl([A-Z]\w*)")
_BEGINS, _ENDS = "GroupStart", "GroupEnd"


class Asked(NamedTuple):
    """The request of a call of NCCL. `group` is "" if its communicator is not known."""

    operation: str
    group: str
    size: int | None
    elements: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Communicated:
    """For each of some kernels, the call that it belongs to, as a place in `asked`. The place holds None if
    several calls may be meant or none is known. `unknown` is the number of calls whose communicator is not
    known.
    """

    place: Int64s
    asked: list[Asked | None]
    unknown: int = 0


def communicated(run: Run, rows: Int64s, operations: list[str], named: Callable[[str], str]) -> Communicated:
    """The calls that launched some kernels: rows of their layer, by their start, with the operations that the
    names of the kernels state. `named` returns the operation of a function's name without `nccl`.
    """
    found = rows_named(run, "userspace", lambda name: _CALL.fullmatch(name) is not None)
    if not len(found):
        return Communicated(np.zeros(len(rows), np.int64), [None])
    asked, unknown = _requests(run, found, named)
    layer = run.layer("userspace")
    is_call = np.zeros(len(layer), np.bool_)
    is_call[found[[request is not None for request in asked]]] = True
    of_kernel = _launches(run, rows)
    launched = np.flatnonzero(of_kernel != NONE)
    around = nearest_of_some(layer.parent, is_call, of_kernel[launched])
    inside = around != NOBODY
    place, distinct = np.zeros(len(rows), np.int64), dict[Asked | None, int]({None: 0})
    known: dict[tuple[int, str], int] = {}
    calls = np.searchsorted(found, around[inside]).tolist()
    for kernel, call in zip(launched[inside].tolist(), calls, strict=True):
        request, operation = asked[call] or (), operations[kernel]
        key = id(request), operation  # equal requests are one object
        if key not in known:
            known[key] = distinct.setdefault(_one(request, operation), len(distinct))
        place[kernel] = known[key]
    return Communicated(place, list(distinct), unknown)


def _requests(
    run: Run, rows: Int64s, named: Callable[[str], str]
) -> tuple[list[tuple[Asked, ...] | None], int]:
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
        elif "comm" in args and (operation := named(function)):
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


def _launches(run: Run, rows: Int64s) -> Int64s:
    """The call that launched each of some kernels, NONE where it is not known."""
    work = gpu_work(run)
    of_row = np.full(len(run.layer("gpu_kernel")), NONE, np.int64)
    kernels = work.what == KERNEL
    of_row[work.row[kernels]] = np.where(work.by_order[kernels], NONE, work.call[kernels])
    found: Int64s = of_row[rows]
    return found


def _one(asked: tuple[Asked, ...], operation: str) -> Asked | None:
    """The one that a kernel is of: all have its group, or those with its operation have."""
    for some in (asked, tuple(one for one in asked if one.operation == operation)):
        groups = {one.group for one in some}
        if len(groups) == 1 and "" not in groups:
            return some[0] if len(some) == 1 else some[0]._replace(elements=None)
    return None
