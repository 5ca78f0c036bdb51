"""A graph of times: each node begins some time after others have ended.

What communicates on a GPU slows other work there meanwhile. So what communicates, and what it slows, take
place in the order of time, and everything else has its time as soon as it is known.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np

from tracepipe.event.columns import Bytes, Floats, Int32s, Int64s
from tracepipe.native import checked, library
from tracepipe.native.signatures import Graph

PLAIN, SLOWED, COMMUNICATES, COMES, LEAVES = range(5)
"""What a node is on its GPU: nothing of these; work that communication slows; work that communicates; the
begin of a rank's part in a collective, and its end."""
_FIRST, _LAST = -(1 << 63), (1 << 63) - 1
_BEGINS, _ENDS = range(2)
# A GPU runs so many kernels at once. More of them, which no GPU has, are as long as if nothing communicated.
_RUNNING_MOST: Final = 128


class WaitingGraph(NamedTuple):
    """The edges of node `n` are those from `first[n]` to `first[n + 1]`. Each leads to a node, `target`,
    which begins `lag_ns` after the end of this one or later. A node ends `weight_ns` after its begin. It
    `waits` for so many edges. It is on `gpu`, where it is slower by the share `slow` while anything
    communicates.
    """

    first: Int32s
    target: Int32s
    lag_ns: Int64s
    weight_ns: Int64s
    waits: Int32s
    role: Bytes
    gpu: Int32s
    slow: Floats

    def times(self) -> tuple[Int64s, Int64s] | None:
        """When each node begins and ends, None where some wait for themselves. Shapes `(nodes,)`."""
        nodes = len(self.weight_ns)
        begins_ns, ends_ns = (np.zeros(nodes, np.int64) for _ in range(2))
        if (core := library()) is not None:
            graph = Graph(*(column.ctypes.data for column in self))
            gpus, out = int(self.gpu.max(initial=0)) + 1, (begins_ns.ctypes.data, ends_ns.ctypes.data)
            made = checked(core.tp_replay(ctypes.byref(graph), nodes, gpus, *out))
        else:
            made = _find_times(self, begins_ns, ends_ns)
        return (begins_ns, ends_ns) if made == nodes else None


def _find_times(graph: WaitingGraph, begins_ns: Int64s, ends_ns: Int64s) -> int:
    """`tp_replay` of the native core in Python."""
    first, target, lag, weight, waits, role, gpu = (column.tolist() for column in graph[:-1])
    slow, nodes = graph.slow.tolist(), len(weight)
    begin, end = [_FIRST if count else 0 for count in waits], [0] * nodes
    ready, due = list[int](), list[tuple[int, int, int]]()
    active, running = Counter[int](), dict[int, list[int]]()
    since, rest = dict[int, int](), dict[int, float]()

    def start(node: int) -> None:
        if role[node] == PLAIN:
            end[node] = _later(begin[node], weight[node])
            ready.append(node)
        else:
            heappush(due, (begin[node], node, _BEGINS))

    def speed(node: int) -> float:
        return 1 - slow[node] if active[gpu[node]] else 1

    def plan_end(node: int, ts_ns: int) -> None:
        since[node] = ts_ns
        end[node] = _later(ts_ns, min(int(rest[node] / speed(node) + 0.5), _LAST))
        heappush(due, (end[node], node, _ENDS))

    def communicate(on: int, ts_ns: int, more: int) -> None:
        own = running.setdefault(on, [])
        if (active[on] == 0) == (active[on] + more == 0):
            active[on] += more
            return
        for node in own:
            rest[node] = max(rest[node] - (float(ts_ns) - float(since[node])) * speed(node), 0.0)
        active[on] += more
        for node in own:
            plan_end(node, ts_ns)

    def happen(ts_ns: int, node: int, what: int) -> None:
        own = running.setdefault(gpu[node], [])
        if role[node] == SLOWED and what == _ENDS:
            if ts_ns == end[node] and node in own:  # else it was planned anew
                own.remove(node)
                ready.append(node)
        elif role[node] == SLOWED and len(own) == _RUNNING_MOST:
            end[node] = _later(ts_ns, weight[node])
            ready.append(node)
        elif role[node] == SLOWED:
            rest[node] = float(weight[node])
            own.insert(0, node)
            plan_end(node, ts_ns)
        elif role[node] == COMMUNICATES and what == _BEGINS:
            end[node] = _later(ts_ns, weight[node])
            communicate(gpu[node], ts_ns, 1)
            heappush(due, (end[node], node, _ENDS))
        else:
            end[node] = ts_ns
            ready.append(node)
            communicate(gpu[node], ts_ns, 1 if role[node] == COMES else -1)

    for node in range(nodes):
        if not waits[node]:
            start(node)
    done = 0
    while ready or due:
        if not ready:
            happen(*heappop(due))
            continue
        node = ready.pop()
        done += 1
        for edge in range(first[node], first[node + 1]):
            after = target[edge]
            begin[after] = max(begin[after], _later(end[node], lag[edge]))
            waits[after] -= 1
            if not waits[after]:
                start(after)
    begins_ns[:], ends_ns[:] = begin, end
    return done


def _later(ts_ns: int, ns: int) -> int:
    """A time and so many ns later, the first or the last one where there is none so early or late."""
    return min(max(ts_ns + ns, _FIRST), _LAST)
