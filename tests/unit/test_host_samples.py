"""What threads executed, from samples and from the stacks where they left their processors."""

from __future__ import annotations

import dis
import io
import json
import random
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest

from tests.support.recordings import Load, loader, span, write
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.analyses.host_samples import HostSamples, place_of
from tracepipe.analyses.steps import loading_of
from tracepipe.api.convert import convert
from tracepipe.event.columns import NONE
from tracepipe.event.stacks import Frame, Stacks
from tracepipe.reports.flame import Options, run
from tracepipe.reports.gaps import Options as GapsOptions
from tracepipe.reports.gaps import run as gaps
from tracepipe.tracer.engines.host_stacks import line_by_entries, line_by_pairs

Record = dict[str, Any]
LIBC, PYTHON = "/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/libpython3.12.so.1.0"
STEP = {"function": "step", "file": "/home/me/train.py", "line": 31}
LOADS = {"function": "loads", "file": "/usr/lib/python3.12/json/__init__.py", "line": 346}
SLEEP = {"function": "clock_nanosleep", "file": LIBC}
UNKNOWN = {"function": "unknown", "file": "[unknown]"}
NEXT = {"function": "_BaseDataLoaderIter.__next__", "file": "/v/torch/utils/data/dataloader.py", "line": 740}
COLLECTING = {"function": "visit_decref", "file": PYTHON}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def sample(ts_ns: int, stack: int | None, tid: int = 1) -> Record:
    of = {
        "ts_ns": ts_ns,
        "type": "host_sample",
        "name": "on-CPU",
        "phase": "I",
        "pid": 1,
        "tid": tid,
        "cpu": 0,
    }
    return of if stack is None else of | {"stack": stack}


def off(start_ns: int, end_ns: int, stack: int, name: str = "off-CPU", tid: int = 1) -> Record:
    return span(start_ns, end_ns, name, "host_sample", pid=1, tid=tid, cpu=0, stack=stack)


def stack(number: int, *frames: Record) -> Record:
    return {"type": "stack", "id": number, "frames": list(frames)}


def codes_of(code: CodeType) -> list[CodeType]:
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [code, *(found for one in inner for found in codes_of(one))]


def test_lines_are_those_that_python_knows() -> None:
    compared = 0
    for module in (dis, json, random, ElementTree):
        assert module.__file__
        source = Path(module.__file__).read_text()
        for code in codes_of(compile(source, module.__file__, "exec")):
            table, first = code.co_linetable, code.co_firstlineno
            for start, end, line in code.co_lines():
                for at in range(start, end, 2):
                    decode = line_by_entries if sys.version_info >= (3, 11) else line_by_pairs
                    assert decode(table, first, at) == (line or 0)
                    compared += 1
    assert compared > 10_000


@pytest.mark.parametrize("seed", range(8))
def test_each_nanosecond_has_the_stack_of_the_nearest_sample(load: Load, seed: int) -> None:
    source = random.Random(seed)
    # A period of 50 ns would be 20 MHz: times here are in units of 100 µs.
    unit, period = 100_000, 50
    records, numbers, offs, samples, at = [], list(range(12)), [], [], 0
    while at < 1500:
        ran = source.randrange(1, 160)
        samples += [one for one in range(at, at + ran) if source.random() < 0.02]
        start, end = at + ran, at + ran + source.randrange(1, 120)
        offs.append((start, end, source.choice(numbers), source.choice(["off-CPU", "preempted"])))
        at = end
    records += [stack(number, {"function": f"f{number}", "file": "a.py", "line": 1}) for number in numbers]
    of_sample = {one: source.choice(numbers) for one in samples}
    records += [off(start * unit, end * unit, number, name) for start, end, number, name in offs]
    records += [sample(one * unit, number) for one, number in of_sample.items()]
    records.sort(key=lambda one: (one["type"] == "stack") * -1 or one.get("ts_ns", 0))
    loaded = load(*records)
    found = HostSamples(loaded)
    assert found.period_ns == round(1e9 / 199)
    edges = sorted(source.sample(range(at), 12))
    stretches = list(zip(edges[::2], edges[1::2], strict=True))
    pieces = found.pieces(
        int(found.threads[0]), *(np.array([one[side] * unit for one in stretches]) for side in (0, 1))
    )
    assert int((pieces.end_ns - pieces.start_ns).sum()) == sum(end - start for start, end in stretches) * unit
    # Each piece is asked in its middle, away from where two samples are equally near.
    for stretch, start_ns, end_ns, number, waits in zip(*(one.tolist() for one in pieces), strict=True):
        middle = (start_ns + end_ns) / 2 / unit
        first, last = stretches[stretch]
        around = [one for one in offs if one[0] <= middle < one[1]]
        inside = [one for one in samples if first <= one < last]
        if around:
            expected: int = around[0][2]
        elif inside:
            expected = of_sample[min(inside, key=lambda one: abs(one - middle))]
        else:
            apart = min(
                (max(start_ns / unit - one, one - end_ns / unit, 0), abs(one - middle), one)
                for one in samples
            )
            later = [one for one in offs if one[0] >= middle]
            is_near = apart[0] <= period + 0.26
            is_leaving = later and later[0][0] * unit - start_ns <= found.period_ns
            expected = of_sample[apart[2]] if is_near else later[0][2] if is_leaving else NONE
        assert number == expected
        assert waits == bool(around and around[0][3] == "off-CPU")


def frames_of(*frames: Record) -> Stacks:
    found = Stacks()
    assert found.put([Frame(one["function"], one.get("file"), one.get("line")) for one in frames]) == 0
    return found


@pytest.mark.parametrize(
    ("frames", "waits", "text"),
    [
        ((STEP,), False, "me/train.py:31 step"),
        ((LOADS, STEP), False, "json.loads at me/train.py:31 step"),
        ((SLEEP, UNKNOWN, STEP), True, "libc.so.6: clock_nanosleep at me/train.py:31 step"),
        ((SLEEP, UNKNOWN, STEP), False, "native code at me/train.py:31 step"),
        (({"function": "encode", "file": "/x/tok.so"}, STEP), False, "tok.so: encode at me/train.py:31 step"),
        (({"function": "PyDict_New", "file": PYTHON}, STEP), False, "me/train.py:31 step"),
        (
            ({"function": "visit_decref", "file": PYTHON}, STEP),
            False,
            "garbage collection at me/train.py:31 step",
        ),
        (({"function": "unknown", "file": LIBC}, UNKNOWN, STEP), True, "libc.so.6 at me/train.py:31 step"),
        (({"function": "work", "file": "/home/me/program"}, SLEEP), False, "me/program work"),
    ],
)
def test_what_a_stack_executes(frames: tuple[Record, ...], waits: bool, text: str) -> None:
    assert place_of(frames_of(*frames), 0, waits=waits) == text


MS = 1_000_000
# The GPU is idle from 10 to 40 ms: the thread parses until 20 ms, and sleeps until it launches again.
RECORDING = [
    stack(1, LOADS, STEP),
    stack(2, SLEEP, UNKNOWN, STEP | {"line": 33}),
    span(0, 10_000, "cuLaunchKernel", pid=1, tid=1, launch=1),
    span(0, 10 * MS, "k", "gpu_kernel", pid=1, gpu=0, stream=7, launch=1),
    sample(11 * MS, 1),
    sample(16 * MS, 1),
    off(20 * MS, 39 * MS, 2),
    span(39 * MS, 40 * MS, "cuLaunchKernel", pid=1, tid=1, launch=2),
    span(40 * MS, 50 * MS, "k", "gpu_kernel", pid=1, gpu=0, stream=7, launch=2),
]


def test_idle_time_by_what_the_stacks_execute(load: Load) -> None:
    rows = gaps(load(*RECORDING), GapsOptions()).as_json()["places"]
    assert {row["line"]: row["idle_ns"] for row in rows} == {
        "json.loads at me/train.py:31 step": 11 * MS,  # 10 ms, and the one in which it launches
        "libc.so.6: clock_nanosleep at me/train.py:33 step": 19 * MS,
    }


def test_the_longest_gap_says_where_the_thread_waited(load: Load) -> None:
    ran = [span(0, 20 * MS, "running", "scheduler"), span(39 * MS, 50 * MS, "running", "scheduler")]
    (row,) = gaps(load(*RECORDING, *ran), GapsOptions()).as_json()["gaps"]
    assert row["cause"] == "off-CPU: libc.so.6: clock_nanosleep at me/train.py:33 step"
    assert row["cause_percent"] == pytest.approx(100 * 19 / 30)


def test_a_flame_graph_of_the_idle_time(load: Load) -> None:
    result = run(load(*RECORDING), Options(idle=True))
    rows = {row["function"]: row for row in result.as_json()["functions"]}
    assert rows["json/__init__.py:346 loads"]["own_ns"] == 11 * MS
    assert rows["clock_nanosleep libc.so.6"] == {
        "function": "clock_nanosleep libc.so.6",
        "own_ns": 19 * MS,
        "share_percent": pytest.approx(100 * 19 / 30),
        "off_ns": 19 * MS,
        "total_ns": 19 * MS,
    }
    assert rows["me/train.py:33 step"]["total_ns"] == 19 * MS
    svg, speedscope = io.BytesIO(), io.BytesIO()
    result.files[".svg"](svg)
    result.files[".json"](speedscope)
    boxes = ElementTree.fromstring(svg.getvalue()).findall(".//{*}g")
    tips = [box.findtext("{*}title") for box in boxes]
    assert "json/__init__.py:346 loads: 11.0 ms, 36.7%" in tips
    assert "off-CPU: 19.0 ms, 63.3%" in tips
    (profile,) = json.loads(speedscope.getvalue())["profiles"]
    frames = [one["name"] for one in json.loads(speedscope.getvalue())["shared"]["frames"]]
    assert sum(profile["weights"]) == profile["endValue"] == 30 * MS
    assert [frames[at] for at in profile["samples"][0]] == [
        "me/train.py:31 step",
        "json/__init__.py:346 loads",
    ]


def test_without_stacks_a_flame_graph_says_how_to_record_them(load: Load) -> None:
    work = [record for record in RECORDING if record["type"] in ("userspace", "gpu_kernel")]
    (table,) = run(load(*work), Options(idle=True)).parts
    assert not len(table.rows)  # type: ignore[union-attr]
    assert "host_sample" in table.empty  # type: ignore[union-attr]


def test_perfetto_has_the_samples_and_their_stacks(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", *RECORDING)
    convert(str(path), str(tmp_path / "run.pftrace"))
    with RealTraceProcessor(tmp_path / "run.pftrace") as trace:
        assert not trace.problems()
        rows = trace.rows(
            """with recursive up as (
                select p.ts, 0 as level, c.id, c.parent_id, c.frame_id
                from perf_sample p join stack_profile_callsite c on p.callsite_id = c.id
                union all select up.ts, level + 1, c.id, c.parent_id, c.frame_id
                from up join stack_profile_callsite c on c.id = up.parent_id)
            select f.name from up join stack_profile_frame f on f.id = frame_id order by ts, level"""
        )
        slices = trace.rows("select name, dur from slice where name = 'off-CPU'")
    names = ["loads (json/__init__.py:346)", "step (me/train.py:31)"]
    assert [row["name"] for row in rows] == names * 2
    assert [(row["name"], row["dur"]) for row in slices] == [("off-CPU", 19 * MS)]


@pytest.mark.parametrize("has_steps", [False, True])
def test_data_is_loaded_where_the_launching_thread_takes_a_batch(load: Load, *, has_steps: bool) -> None:
    """Also while it parses itself; not by another thread, nor in a stretch between calls without a sample."""
    steps = [span(0, 50_000_000, "step 1", "annotation", pid=1, tid=1)] if has_steps else []
    found = loading_of(
        load(
            stack(1, SLEEP, NEXT, STEP),
            stack(2, LOADS, NEXT, STEP),
            stack(3, STEP),
            *steps,
            span(1_000_000, 2_000_000, "cudaLaunchKernel", pid=1, tid=1, launch=1),
            off(2_500_000, 9_000_000, 1),
            off(3_000_000, 8_000_000, 1, tid=2),
            sample(12_000_000, 2),
            sample(16_000_000, 3),
            span(20_000_000, 21_000_000, "cudaLaunchKernel", pid=1, tid=1, launch=2),
            span(22_000_000, 23_000_000, "k", "gpu_kernel", gpu=0, stream=7, launch=2),
            span(30_000_000, 31_000_000, "cudaDeviceSynchronize", pid=1, tid=1),
            sample(40_000_000, 2, tid=2),
        )
    )
    # From the call on, as it leaves its processor soon; until halfway to the sample that does not load.
    assert (found.start_ns.tolist(), found.end_ns.tolist()) == ([2_000_000], [14_000_000])
