"""How the time of a GPU is split into parts that add up to it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.analyses.gpu_work import GpuTime, partition_of
from tracepipe.event.intervals import Stretches

LAST_NS = 40
_NS = st.integers(0, LAST_NS)
WORK = st.lists(st.tuples(_NS, _NS), max_size=4)


@given(WORK, WORK, WORK, st.lists(st.tuples(_NS, _NS).map(sorted), min_size=1, max_size=3))
def test_each_ns_is_in_one_part(
    computing: list[tuple[int, int]],
    communicating: list[tuple[int, int]],
    copying: list[tuple[int, int]],
    spans: list[list[int]],
) -> None:
    purposes = (computing, communicating, copying)
    time = GpuTime(0, slice(0), *(Stretches(*np.array(work, np.int64).reshape(-1, 2).T) for work in purposes))
    found = partition_of(time, *np.array(spans, np.int64).T)

    def part_at(ns: int) -> int:
        """The first purpose of which there is work, else the number of idle time."""
        running = (any(start <= ns < end for start, end in work) for work in purposes)
        return next((part for part, runs in enumerate(running) if runs), len(purposes))

    parts = [[part_at(ns) for ns in range(start, end)] for start, end in spans]
    expected = [[of.count(part) for of in parts] for part in range(len(found))]
    assert [part.tolist() for part in found] == expected
