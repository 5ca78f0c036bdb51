"""A part of a recording draws in its stretch of time what the whole draws there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tracepipe
from tests.golden import hostile
from tests.golden.cases import Case, cases, with_sample
from tests.support.in_stretch import in_stretch, seen_of
from tracepipe.recording.convert import check

pytestmark = pytest.mark.usefixtures("core")

START_NS, SPAN_NS = 5_000_000_000, 1_000
GPU, GPU_AHEAD_NS = "globaltimer:0", 7_000_000_000
HEADER = {
    "type": "header",
    "schema": "tracepipe/1",
    "clock": "monotonic",
    "clocks": ["monotonic", GPU],
    "start": {"monotonic_ns": START_NS, "realtime_ns": 1_800_000_000_000_000_000},
}
Lines = list[dict[str, Any]]


# Their warps are placed within a step of the GPU's timer by what the warps of an SM say of its cycles.
PLACED_BY_CYCLES = {"capture-h200", "capture-h200-pytorch", "gpu-h200"}
# One has a begin of an allocation, which counts as one, and the other threads that have names alone.
OTHERS = {"device-memory", "cuda-table-rows"}


def stretches(times: list[int]) -> Iterator[tuple[int, int]]:
    """Stretches between times at which something begins or ends; their edges are at these or next to them."""
    picked = sorted({times[at * (len(times) - 1) // 3] for at in range(4)})
    for start_ns, end_ns in pairwise(picked):
        yield start_ns, end_ns
        yield start_ns + 1, max(end_ns - 1, start_ns + 2)
    yield picked[0], picked[-1]


@pytest.mark.parametrize(
    "case",
    with_sample(one for one in cases() if one.name not in PLACED_BY_CYCLES | OTHERS),
    ids=lambda case: case.name,
)
def test_parts_of_every_format_draw_what_the_whole_draws(case: Case, tmp_path: Path) -> None:
    given = case.options()
    how = {"assumed": given.assumed, "layout": given.layout}
    whole = seen_of(case.input, undated=given.undated, **how)
    of_slices = [one for path, slices in whole.slices if path[0] != "tracepipe" for one in slices]
    times = {ns for one in of_slices for ns in (one.ts_ns, one.ts_ns + one.dur_ns) if ns >= 0}
    if len(times) < 2:
        pytest.skip("nothing happens between two times")
    for start_ns, end_ns in stretches(sorted(times)):
        out = tmp_path / "part.jsonl"
        reading = tracepipe.ReadOptions(assume_offset=given.assumed, undated=given.undated)
        tracepipe.cut(case.input, out, reading, start=f"@{start_ns}", end=f"@{end_ns}", force=True)
        part = in_stretch(seen_of(out, **how), start_ns, end_ns)
        assert part == in_stretch(whole, start_ns, end_ns)


@st.composite
def calls(draw: st.DrawFn, thread: dict[str, Any], layer: str) -> Lines:
    """What one thread does: calls in each other, with and without an end, and instants."""
    events: Lines = []
    now, stack = START_NS + draw(st.integers(0, 50)), list[str]()
    for _ in range(draw(st.integers(0, 12))):
        now += draw(st.integers(0, SPAN_NS // 8))
        event = {"ts_ns": now, "type": layer, **thread}
        what = draw(st.sampled_from("BBEEIX"))
        if what == "B" and len(stack) < 4:
            stack.append(draw(st.sampled_from(["cuInit", "cuMemcpy", "ioctl"])))
            events.append(event | {"name": stack[-1], "phase": "B"})
        elif what == "E" and stack:
            at = draw(st.sampled_from([-1, -1, -1, 0]))  # the first: others have returned without a line
            events.append(event | {"name": stack[at], "phase": "E", "args": {"result": len(events)}})
            del stack[at:]
        elif what == "I":
            events.append(event | {"name": "mark", "phase": "I"})
        elif what == "X":
            dur_ns = draw(st.integers(0, 30))
            events.append(event | {"name": "copy", "phase": "X", "dur_ns": dur_ns, "type": "hook"})
    if draw(st.booleans()):
        for name in reversed(stack):
            now += 1
            events.append({"ts_ns": now, "type": layer, **thread, "name": name, "phase": "E"})
    return events


@st.composite
def launches(draw: st.DrawFn) -> Lines:
    """Calls that launch, and what they launched, later, on the GPU's clock."""
    events: Lines = []
    call_ns, kernel_ns = START_NS, START_NS
    for launch in range(1, draw(st.integers(1, 8))):
        call_ns += draw(st.integers(1, 200))
        call: dict[str, Any] = {"type": "userspace", "name": "cuLaunchKernel", "pid": 9, "tid": 9}
        events.append(
            {
                "ts_ns": call_ns,
                **call,
                "phase": "B",
                "launch": launch,
                "args": {"size": launch},
                "stack": launch,
            }
        )
        call_ns += draw(st.integers(1, 9))
        events.append({"ts_ns": call_ns, **call, "phase": "E"})
        kernel_ns = max(kernel_ns, call_ns) + draw(st.integers(0, 300))
        work = {"clock": GPU, "gpu": 0, "stream": 3, "launch": launch, "name": f"kernel {launch}"}
        took_ns = draw(st.integers(1, 100))
        at = {"ts_ns": kernel_ns + GPU_AHEAD_NS}
        events.append({**at, "type": "gpu_kernel", "phase": "X", "dur_ns": took_ns, **work})
        warps = [{"warp": [0, 1], "sm": [0, 1], "slot": [0, 0], "entry_ns": [0, took_ns // 2]}]
        events += [
            {**at, "type": "gpu_warp", **work, **one, "exit_ns": [took_ns, took_ns - took_ns // 2]}
            for one in warps
        ]
        kernel_ns += took_ns
    return events


@st.composite
def states(draw: st.DrawFn) -> Lines:
    """Allocations and frees, values of counters, a thread that runs and sleeps, threads of a GPU, flows."""
    events: Lines = []
    live: list[int] = []
    now, flow = START_NS, 0
    thread = {"pid": 4, "tid": 4, "cpu": 0}
    for _ in range(draw(st.integers(0, 14))):
        now += draw(st.integers(1, SPAN_NS // 10))
        what = draw(st.sampled_from(["alloc", "free", "total", "count", "run", "enter", "flow", "loss"]))
        memory = {"ts_ns": now, "type": "memory", "phase": "I", "pid": 4, "tid": 4}
        if what == "alloc":
            live.append(now)
            events.append(memory | {"name": "alloc", "args": {"address": now, "size": now % 1000}})
        elif what == "free" and live:
            events.append(memory | {"name": "free", "args": {"address": live.pop(0)}})
        elif what == "total":
            args = {"total_bytes": now % 1000}
            events.append(memory | {"name": "gpu_mem", "gpu": draw(st.integers(0, 1)), "args": args})
        elif what == "count":
            series = draw(st.sampled_from(["value", "power"]))
            counter = {"type": "hook", "name": "watts", "phase": "C", "pid": 4, "args": {series: now % 1000}}
            events.append({"ts_ns": now, **counter})
        elif what == "run":
            run = {"type": "scheduler", "name": "running", **thread}
            events.append({"ts_ns": now, **run, "phase": "B"})
            now += draw(st.integers(1, 60))
            events.append({"ts_ns": now, **run, "phase": "E"})
        elif what == "enter":
            of = {"type": "gpu_thread", "name": "k", "gpu": 1, "block": [0, 0, 0], "thread": [now % 64, 0, 0]}
            events.append({"ts_ns": now, **of, "phase": "B"})
            events.append({"ts_ns": now + draw(st.integers(1, 300)), **of, "phase": "E"})
        elif what == "flow":
            flow += 1
            end = {"type": "hook", "name": "goes", "pid": 4, "tid": 5, "flow": flow}
            events.append({"ts_ns": now, **end, "phase": "s"})
            events.append({"ts_ns": now + draw(st.integers(1, 300)), **end, "phase": "f"})
        elif what == "loss":
            dated = {"ts_ns": now, "dur_ns": draw(st.integers(0, 99))}
            events.append({"type": "loss", "layer": "userspace", "count": now % 9 + 1, **dated})
    return events


@st.composite
def recordings(draw: st.DrawFn) -> Lines:
    """Lines in the order of time, as a file has them but for their clocks."""
    threads = [{"pid": 7, "tid": 7, "cpu": 1, "comm": "main"}, {"pid": 7, "tid": 8}]
    lines: Lines = []
    for thread in threads:
        for layer in ("userspace", "syscall"):
            lines += draw(calls(thread, layer))
    lines += draw(launches()) + draw(states())
    for window in range(1, draw(st.integers(1, 3))):
        begin_ns = START_NS + window * 300
        lines.append(
            {"ts_ns": begin_ns, "type": "window", "window": window, "phase": "B", "cause": "profiler"}
        )
        lines.append({"ts_ns": begin_ns + 200, "type": "window", "window": window, "phase": "E"})

    def trace_ns(line: dict[str, Any]) -> int:
        return int(line["ts_ns"]) - (GPU_AHEAD_NS if line.get("clock") == GPU else 0)

    frames = [{"type": "stack", "id": at, "frames": [{"function": f"f{at}"}]} for at in range(1, 9)]
    pair = {"type": "clock", "clock": GPU, "source_ns": START_NS + GPU_AHEAD_NS}
    pair |= {"host_lo_ns": START_NS, "host_hi_ns": START_NS}
    return [*frames, pair, *sorted(lines, key=trace_ns)]


@contextmanager
def recorded(lines: Lines) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in [HEADER, *lines]))
        yield path


TWO_WINDOWS = [
    {"ts_ns": START_NS + at, "type": "window", "window": number, "phase": phase}
    | ({"cause": "profiler"} if phase == "B" else {})
    for at, number, phase in ((300, 1, "B"), (500, 1, "E"), (600, 2, "B"), (800, 2, "E"))
]


@pytest.mark.slow
@settings(max_examples=20)
@example(TWO_WINDOWS, 0, 800)
@given(recordings(), st.integers(-50, SPAN_NS), st.integers(1, SPAN_NS))
def test_a_part_draws_what_the_whole_draws(lines: Lines, after_ns: int, length_ns: int) -> None:
    start_ns = START_NS + after_ns
    with recorded(lines) as path:
        out = path.with_name("part.jsonl.zst")
        tracepipe.cut(path, out, start=f"@{start_ns}", end=f"@{start_ns + length_ns}")
        whole, part = (in_stretch(seen_of(one), start_ns, start_ns + length_ns) for one in (path, out))
        assert part == whole
        twice = path.with_name("twice.jsonl")
        tracepipe.cut(out, twice, start=f"@{start_ns}", end=f"@{start_ns + length_ns}")
        assert in_stretch(seen_of(twice), start_ns, start_ns + length_ns) == whole


LAUNCHING_FLOW = {
    "ts_ns": 1_000_000,
    "type": "userspace",
    "name": "f",
    "phase": "s",
    "launch": (1 << 63) - 1,
}


@pytest.mark.slow
@settings(max_examples=20)
@example("\n".join(map(json.dumps, [hostile.HEADER, LAUNCHING_FLOW])).encode(), 0, 1)
@given(hostile.recordings(), st.integers(-20, 80), st.integers(1, 80))
def test_a_part_of_whatever_a_file_holds_is_a_good_file(data: bytes, after_ns: int, length_ns: int) -> None:
    start_ns = hostile.START_NS + after_ns
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "run.jsonl", Path(folder) / "part.jsonl"
        path.write_bytes(data)
        account = tracepipe.cut(
            path,
            out,
            tracepipe.ReadOptions(source_format="tracepipe"),
            start=f"@{start_ns}",
            end=f"@{start_ns + length_ns}",
        )
        problems: list[str] = []
        found = check(str(out), "tracepipe", problems.append)
        assert (problems, found.notes) == ([], [])
        assert +found.counts == +account.counts
