"""The process groups of kernels that NCCL's calls launched, in recordings with the hooks `nccl`.

ncclAllReduce(comm) ── group 9f21… ─┐        ncclGroupStart()
  cuLaunchKernelEx ── launch 7 ─────┤        ncclAllReduce(comm)   ncclAllGather(other)
                      kernel ───────┘        ncclGroupEnd()
                                               cuLaunchKernelEx ── which one? by the operation
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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


class _Distinct:
    """Different values, each with a number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Hashable) -> int:
        """The number of a value, which is new or not."""
        found = self._numbers.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


def communicated(run: Run, rows: Int64s, operations: list[str], named: Callable[[str], str]) -> Communicated:
    """The calls that launched some kernels: rows of their layer, by their start, with the operations that the
    names of the kernels state. `named` returns the operation of a function's name without `nccl`.
    """
    found = rows_named(run, "userspace", lambda name: _CALL.fullmatch(name) is not None)
    if not len(found):
        return Communicated(np.zeros(len(rows), np.int64), [None])
    requests = _Requests(named)
    asked = requests.of(run, found)
    layer = run.layer("userspace")
    is_call = np.zeros(len(layer), np.bool_)
    is_call[found[asked >= 0]] = True
    of_kernel = _launches(run, rows)
    launched = np.flatnonzero(of_kernel != NONE)
    around = nearest_of_some(layer.parent, is_call, of_kernel[launched])
    inside = around != NOBODY
    place, distinct = np.zeros(len(rows), np.int64), _Distinct()
    distinct.number(None)
    known: dict[tuple[int, str], int] = {}
    numbers = asked[np.searchsorted(found, around[inside])].tolist()
    for kernel, number in zip(launched[inside].tolist(), numbers, strict=True):
        key = number, operations[kernel]
        if key not in known:
            known[key] = distinct.number(_one(requests.distinct.values[number], key[1]))
        place[kernel] = known[key]
    return Communicated(place, distinct.values, requests.unknown)


class _Requests:
    """The requests of calls that may launch kernels: a collective, or the end of a group of calls. Each
    request is the number of a tuple in `distinct`.
    """

    def __init__(self, named: Callable[[str], str]) -> None:
        self.distinct = _Distinct()
        self.unknown = 0
        self._named = named
        self._groups: dict[int | None, list[list[Asked]]] = {}

    def of(self, run: Run, rows: Int64s) -> Int64s:
        """The numbers of calls of NCCL, by their start; -1 of others. Shapes `(n,)`."""
        numbers, layer = np.full(len(rows), -1, np.int64), run.layer("userspace")
        found = run.values("userspace", rows, "name", "tid")
        calls = zip(found["name"], found["tid"], layer.args[rows].tolist(), strict=True)
        for at, (name, tid, args) in enumerate(calls):
            asked = self._asked(name, tid, run.args.args(args) if args != NONE else {})
            if asked is not None:
                numbers[at] = self.distinct.number(asked)
        return numbers

    def _asked(self, name: str, tid: int | None, args: Mapping[str, Any]) -> tuple[Asked, ...] | None:
        function, of_thread = name[name.index("nccl") + 4 :], self._groups.setdefault(tid, [])
        if function == _BEGINS:
            of_thread.append([])
        elif function == _ENDS:
            # The end of the outermost one launches.
            inner = of_thread.pop() if of_thread else []
            if not of_thread:
                return tuple(inner)
            of_thread[-1] += inner
        elif "comm" in args and (operation := self._named(function)):
            group, size, count = (args.get(key) for key in ("group", "group_ranks", "count"))
            group = group if isinstance(group, str) else ""
            one = Asked(operation, group, _number(size), _number(count))
            self.unknown += not group
            if of_thread:
                of_thread[-1].append(one)
            return (one,)
        return None


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
