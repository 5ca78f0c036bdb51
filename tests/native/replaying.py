"""Graphs of times: the core finds the same ones as Python, and all of them where no node waits for itself."""

from __future__ import annotations

import ctypes
from random import Random

import numpy as np

from tracepipe.analyses.waiting_graph import WaitingGraph, _find_times
from tracepipe.native.signatures import Graph

_NEVER = -(1 << 61)


def some_graph(rng: Random, nodes: int) -> WaitingGraph:
    """A random graph. Most have edges to later nodes only, and the rest cycles."""
    gpus, has_cycles = rng.choice((1, 1, 3)), rng.random() < 0.2
    huge = rng.random() < 0.1
    edges = []
    for _ in range(rng.randrange(3 * nodes + 1) if nodes else 0):
        a, b = rng.randrange(nodes), rng.randrange(nodes)
        if a != b or has_cycles:
            edges.append((a, b) if has_cycles else (min(a, b), max(a, b)))
    source = np.array(sorted(a for a, _ in edges), np.int64)
    target = np.array([b for _, b in sorted(edges)], np.int32)
    roles = rng.choice(((0,), (0, 1, 2), (1, 2), (0, 1, 3, 4), (0, 1, 2, 3, 4)))

    def ns() -> int:
        return rng.choice((0, 1, rng.randrange(90), rng.randrange(9_000), huge and rng.getrandbits(63)))

    def lag_ns() -> int:
        return rng.choice((ns(), ns(), -rng.randrange(90), _NEVER))

    return WaitingGraph(
        np.searchsorted(source, np.arange(nodes + 1)).astype(np.int32),
        target,
        np.array([lag_ns() for _ in edges], np.int64),
        np.array([ns() for _ in range(nodes)], np.int64),
        np.bincount(target, minlength=nodes).astype(np.int32),
        np.array([rng.choice(roles) for _ in range(nodes)], np.uint8),
        np.array([rng.randrange(gpus) for _ in range(nodes)], np.int32),
        np.array([rng.choice((0, 0.3, 0.95, rng.random() * 0.95)) for _ in range(nodes)]),
    )


def replay(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_replay`."""
    graph = some_graph(rng, rng.choice((0, 1, 5, 40, 40, 400)))
    nodes, gpus = len(graph.role), int(graph.gpu.max(initial=0)) + 1
    begins_ns, ends_ns, *other = (np.zeros(nodes, np.int64) for _ in range(4))
    made = core.tp_replay(
        ctypes.byref(Graph(*(column.ctypes.data for column in graph))),
        nodes,
        gpus,
        begins_ns.ctypes.data,
        ends_ns.ctypes.data,
    )
    assert made == _find_times(graph, *other)
    if made == nodes:
        assert (begins_ns == other[0]).all()
        assert (ends_ns == other[1]).all()
