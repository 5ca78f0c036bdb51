"""Warps written thread by thread, in bpftime's form."""

from __future__ import annotations

import io
import re

import pytest

from tests.support.batches import read_all, source_batch
from tests.support.cores import new_tables
from tracepipe.converters.lanes import unflatten
from tracepipe.converters.threads import ThreadWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.event.model import Record
from tracepipe.readers import bpftime
from tracepipe.recording.convert import SortedLines

pytestmark = pytest.mark.usefixtures("core")

WARP = {
    "type": "gpu_warp", "name": "k", "ts_ns": 1000, "grid": [2, 2, 1], "block": [20, 2, 1],
    "warp": [0, 1, 7], "entry_ns": [0, 32, 64], "entry_mask": [0xFFFFFFFF, 0xFF, 0xFF],
    "exit_count": [2, 1, 0], "exit_ns": [100, 200, 300], "exit_mask": [0x3, 0xFFFFFFFC, 0xFF],
}  # fmt: skip


def written(*records: Record) -> tuple[list[str], int]:
    out = io.BytesIO()
    writer = ThreadWriter(out, TraceInfo("globaltimer:0", new_sorter=SortedLines))
    tables = new_tables()
    writer.write_events(source_batch(records, tables), tables)
    writer.finish()
    # 12 warps or threads are not written: …
    messages = [int(line.split()[0]) for line in writer.remarks()]
    return out.getvalue().decode().splitlines(), sum(messages)


def test_a_warp_is_a_line_for_each_lane_at_entry_and_at_each_exit() -> None:
    lines, unwritten = written(WARP)
    entries = [line for line in lines if line.startswith("[kernel_trace] ts=")]
    exits = [line for line in lines if line.startswith("Thread (")]
    # 40 threads a block: the second warp has 8 of them, and the third, the last block's second, too.
    assert len(entries) == 32 + 8 + 8
    assert entries[0] == "[kernel_trace] ts=1000 block=(0,0,0) thread=(0,0,0)"
    assert entries[20] == "[kernel_trace] ts=1000 block=(0,0,0) thread=(0,1,0)"
    assert entries[32] == "[kernel_trace] ts=1032 block=(0,0,0) thread=(12,1,0)"
    assert entries[40] == "[kernel_trace] ts=1064 block=(1,1,0) thread=(12,1,0)"
    assert exits[:3] == [
        "Thread (0, 0, 0) timestamp: 1100",
        "Thread (1, 0, 0) timestamp: 1100",
        "Thread (2, 0, 0) timestamp: 1200",
    ]
    assert (len(exits), exits[-1]) == (32 + 8, "Thread (19, 1, 0) timestamp: 1332")
    assert lines[-2:] == ["[kernel_trace] total events: 48", "Total events collected: 40"]
    assert unwritten == 0


def test_lines_are_in_the_order_of_time() -> None:
    thread = {"type": "gpu_thread", "name": "k", "thread": [1, 2, 3], "gpu": 0, "phase": "I"}
    lines, _ = written(
        WARP, *({**thread, "ts_ns": ts_ns, "args": {"event": "exit"}} for ts_ns in (1_050, 7, 9))
    )
    times_ns = [int(found[1]) for line in lines if (found := re.search(r"(?:ts=|timestamp: )(\d+)", line))]
    assert times_ns == sorted(times_ns)
    assert (len(times_ns), times_ns[:3]) == (48 + 40 + 3, [7, 9, 1_000])


def test_lanes_that_a_block_does_not_have_are_not_written() -> None:
    whole = {key: value for key, value in WARP.items() if "mask" not in key and key != "exit_count"}
    lines, _ = written(whole)
    assert sum(line.startswith("[kernel_trace] ts=") for line in lines) == 32 + 8 + 8


def test_warps_without_their_grid_are_counted() -> None:
    lines, unwritten = written({key: value for key, value in WARP.items() if key != "grid"})
    assert (lines, unwritten) == ([], 3)


def test_threads_and_losses_are_written() -> None:
    thread = {"type": "gpu_thread", "name": "k", "ts_ns": 5, "thread": [1, 2, 3], "gpu": 0}
    lines, unwritten = written(
        {**thread, "phase": "B", "block": [4, 5, 6]},
        {**thread, "phase": "I", "args": {"event": "exit"}},
        {**thread, "phase": "B"},
        {"type": "loss", "count": 7},
    )
    assert lines == [
        "[kernel_trace] ts=5 block=(4,5,6) thread=(1,2,3)",
        "Thread (1, 2, 3) timestamp: 5",
        "[kernel_trace] total events: 1",
        "Total events collected: 1",
        "Full drops: 7",
    ]
    assert unwritten == 1


def test_threads_of_a_launch_that_is_there_as_warps_are_written_once() -> None:
    launch = {**WARP, "launch": 7}
    thread = {"type": "gpu_thread", "name": "k", "ts_ns": 5, "thread": [1, 2, 3], "gpu": 0, "phase": "I"}
    exits = {**thread, "args": {"event": "exit"}}
    assert written(launch, {**exits, "launch": 7}) == written(launch)
    assert len(written(launch, {**exits, "launch": 8})[0]) == len(written(launch)[0]) + 1


def test_what_is_written_is_read_again() -> None:
    lines, _ = written(WARP)
    events, _ = read_all(bpftime.read(io.BytesIO(("\n".join(lines) + "\n").encode())))
    entries = [(event["ts_ns"], event["thread"]) for event in events if "block" in event]
    assert (len(events), len(entries)) == (48 + 40, 48)
    assert entries[32] == (1032, [12, 1, 0])


def test_a_linear_index_counts_x_first() -> None:
    assert [unflatten(n, [3, 2, 2]) for n in (0, 1, 3, 6, 11)] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 1, 1),
    ]  # fmt: skip
