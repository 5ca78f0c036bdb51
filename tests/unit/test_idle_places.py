"""The idle time of GPUs by range and line, against a reckoning for each nanosecond."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.recordings import Load, loader, span
from tracepipe.analyses.gpu_work import gpu_work, idle_of
from tracepipe.analyses.host_states import HostStates
from tracepipe.analyses.idle_gaps import BETWEEN, IdleGaps, gaps_of
from tracepipe.analyses.idle_places import IdlePlaces, idle_places
from tracepipe.store.run import Run

USER = "train.py({}): function"
LIBRARY = "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py({}): call"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def gaps_in(run: Run) -> IdleGaps:
    work = gpu_work(run)
    return gaps_of(run, work, [idle_of(work, gpu, rows) for gpu, rows in work.of_gpus()])


def places_in(run: Run, gaps: IdleGaps) -> IdlePlaces:
    return idle_places(run, gaps, HostStates(run))


def tree(source: random.Random, start: int, end: int, names: list[str], depth: int = 0) -> list[Any]:
    """Nested spans (start, end, name) in a stretch."""
    found, at = [], start
    while at < end - 4 and depth < 4:
        begin = at + source.randrange(0, 60)
        until = min(begin + source.randrange(2, 400), end)
        if begin < until:
            found.append((begin, until, source.choice(names)))
            found += tree(source, begin + 1, until - 1, names, depth + 1)
        at = until
    return found


@pytest.mark.parametrize("seed", range(12))
def test_each_nanosecond_is_at_its_innermost_place(load: Load, seed: int) -> None:
    source = random.Random(seed)
    ranges, functions, calls, kernels = dict[int, Any](), dict[int, Any](), [], []
    marked = ["forward", "optimizer", "data loading", "aten::add", "aten::mul, seq = 4", "AddBackward0"]
    for tid in (1, 2):
        ranges[tid] = tree(source, 1_100, 4_000, marked)
        functions[tid] = tree(source, 1_100, 4_000, [USER.format(1), USER.format(2), LIBRARY.format(7)])
    gpu_ns = 1_300
    for launch in range(1, 25):
        start = gpu_ns + source.randrange(0, 120)
        end = start + source.randrange(1, 60)
        at, tid = start - source.randrange(0, 150), source.choice((1, 2))
        calls.append((at, tid, launch))
        kernels.append((start, end, launch))
        gpu_ns = end
    records = [span(s, e, name, "annotation", tid=tid) for tid in ranges for s, e, name in ranges[tid]]
    records += [
        span(s, e, name, "hook", tid=tid) | {"layer": "python_function"}
        for tid in functions
        for s, e, name in functions[tid]
    ]
    records += [span(at, at + 1, "cudaLaunchKernel", tid=tid, launch=n) for at, tid, n in calls]
    records += [span(s, e, "k", "gpu_kernel", gpu=0, stream=7, launch=n) for s, e, n in kernels]
    if seed % 2:
        records += [span(1_050 + 900 * n, 1_940 + 900 * n, f"step {n}", "annotation") for n in range(3)]
        ranges[1] = [(1_050 + 900 * n, 1_940 + 900 * n, f"step {n}") for n in range(3)]
        records = [r for r in records if r["type"] != "annotation" or r["tid"] != 1 or "step" in r["name"]]
    run = load(*sorted(records, key=lambda record: record["ts_ns"]))

    def innermost(spans: list[Any], ns: int) -> list[str]:
        around = [(start, -end, at, name) for at, (start, end, name) in enumerate(spans) if start <= ns < end]
        return [name for *_, name in sorted(around, reverse=True)]

    wanted = Counter[tuple[str | None, str | None]]()
    for (_, end, _), (start, _, launch) in pairwise(kernels):
        at, tid, _ = calls[launch - 1]
        if seed % 2 and at + 1 <= end:
            tid = 1  # the thread of the steps
        for ns in range(end, start):
            own = [n for n in innermost(ranges[tid], ns) if "::" not in n and "Backward" not in n]
            if "data loading" in own:
                own = ["data loading"]
            files = innermost(functions[tid], ns)
            line = next((n for n in files if n.startswith("train")), files[0] if files else None)
            step = own[0].replace(own[0][-1], "…") if own and own[0].startswith("step") else None
            shown = None
            if line:
                shown = f"train.py:{line[9]} function" if line[0] == "t" else "modules/module.py:7 call"
            wanted[step or (own[0] if own else None), shown] += 1
    gaps = gaps_in(run)
    between = gaps.select(np.flatnonzero(gaps.where == BETWEEN))
    places = places_in(run, between)
    found = {(one.range, one.line): one.idle_ns for one in places.sums(run, np.arange(len(places.gap)))}
    assert found == wanted
    assert int(places.doing()["dur_ns"].sum()) == sum(wanted.values())


def test_without_functions_the_line_is_that_of_the_launch(load: Load) -> None:
    stack = {"type": "stack", "id": 1, "frames": [{"function": "f", "file": "a.py", "line": 3}]}
    run = load(
        stack,
        span(1_000, 1_010, "cudaLaunchKernel", launch=1),
        span(1_020, 1_030, "k", "gpu_kernel", gpu=0, launch=1),
        span(1_100, 1_110, "cudaLaunchKernel", launch=2, stack=1),
        span(1_130, 1_140, "k", "gpu_kernel", gpu=0, launch=2),
    )
    gaps = gaps_in(run)
    found = places_in(run, gaps.select(np.flatnonzero(gaps.where == BETWEEN)))
    assert found.sums(run, np.arange(len(found.gap))) == [(None, "a.py:3 f", 100)]


@pytest.mark.parametrize("seed", range(5))
def test_gaps_within_stretches(load: Load, seed: int) -> None:
    source = random.Random(seed)
    kernels = [(1_000 + 50 * n, 1_000 + 50 * n + source.randrange(1, 50)) for n in range(20)]
    run = load(*(span(start, end, "k", "gpu_kernel", gpu=0) for start, end in kernels))
    times = np.array(sorted(source.sample(range(900, 2_100), 8)))
    starts, ends = times[::2], times[1::2]
    gaps = gaps_in(run)
    inside = gaps.within(starts, ends)
    busy = {ns for start, end in kernels for ns in range(start, end)}
    first, last = kernels[0][0], max(end for _, end in kernels)
    wanted = {ns for s, e in zip(starts.tolist(), ends.tolist(), strict=True) for ns in range(s, e)}
    found = [
        ns
        for s, e in zip(inside.start_ns.tolist(), inside.end_ns.tolist(), strict=True)
        for ns in range(s, e)
    ]
    assert sorted(found) == sorted(ns for ns in wanted if first <= ns < last and ns not in busy)
