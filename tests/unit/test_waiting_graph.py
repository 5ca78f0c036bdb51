"""Graphs of times: the native core finds the same ones as Python, whatever the graph."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.replaying import some_graph
from tests.support.cores import CORES, cores_here, running
from tracepipe.analyses.waiting_graph import COMMUNICATES, PLAIN, SLOWED, WaitingGraph


def alone(role: list[int], weight_ns: list[int], slow: float = 0.5) -> WaitingGraph:
    """Nodes of one GPU without an edge."""
    nodes = len(role)
    return WaitingGraph(
        np.zeros(nodes + 1, np.int32),
        np.zeros(0, np.int32),
        np.zeros(0, np.int64),
        np.array(weight_ns, np.int64),
        np.zeros(nodes, np.int32),
        np.array(role, np.uint8),
        np.zeros(nodes, np.int32),
        np.full(nodes, slow),
    )


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 30))
def test_the_core_finds_what_python_finds(rng: Random, nodes: int) -> None:
    graph = some_graph(rng, nodes)
    found: list[Any] = []
    for core in cores_here():
        with running(core):
            times = graph.times()
        found.append(times and [column.tolist() for column in times])
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("core", CORES)
def test_work_is_slower_while_its_gpu_communicates(core: str) -> None:
    graph = alone([SLOWED, COMMUNICATES, PLAIN], [100, 60, 100])
    with running(core):
        times = graph.times()
        # A GPU does not run so many kernels at once, so the last one is not slowed.
        many = alone([SLOWED] * 129 + [COMMUNICATES], [100] * 130).times()
    assert times is not None
    assert times[1].tolist() == [130, 60, 100]
    assert many is not None
    assert sorted(set(many[1].tolist())) == [100, 150]


@pytest.mark.parametrize("core", CORES)
def test_what_waits_for_itself_has_no_times(core: str) -> None:
    graph = alone([PLAIN, PLAIN], [1, 1])._replace(
        first=np.array([0, 1, 2], np.int32),
        target=np.array([1, 0], np.int32),
        lag_ns=np.zeros(2, np.int64),
        waits=np.ones(2, np.int32),
    )
    with running(core):
        assert graph.times() is None
