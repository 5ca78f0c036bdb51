"""The bpftime text reader: all four tools' output among log lines, and broken lines cost themselves only."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracepipe
from tests.support.batches import read_all
from tracepipe.api.convert import account_lines
from tracepipe.event.checks import first_fault
from tracepipe.event.model import Header, Problem, Record
from tracepipe.layout.warps import ThreadLayout
from tracepipe.readers import bpftime, recognise, recording

FIXTURES = Path(__file__).parents[2] / "fixtures"
GOOD = b"[kernel_trace] ts=809635273301344 block=(0,0,0) thread=(0,0,0)"
GOOD_AFTER = b"[kernel_trace] ts=809635273301456 block=(0,0,0) thread=(1,0,0)"


def read(data: bytes) -> tuple[Header, list[Record], list[Problem]]:
    recording = bpftime.read(io.BytesIO(data))
    records, problems = read_all(recording)
    assert first_fault(recording.header.to_record()) is None
    assert [first_fault(record) for record in records] == [None] * len(records)
    return recording.header, records, problems


def read_fixture(case: str) -> tuple[Header, list[Record], list[Problem]]:
    data = (FIXTURES / case / "input.txt").read_bytes()
    assert recognise(data).name == "bpftime"
    return read(data)


def test_kernel_trace_sample() -> None:
    header, records, problems = read_fixture("bpftime-kernel_trace")
    assert (header.clock, header.clocks) == ("globaltimer:0", ["globaltimer:0"])
    assert problems == []
    assert records == [
        {
            "type": "gpu_thread",
            "name": "kernel",
            "phase": "I",
            "ts_ns": ts_ns,
            "gpu": 0,
            "block": [0, 0, 0],
            "thread": [x, 0, 0],
            "args": {"event": "entry"},
        }
        for ts_ns, x in ((809635273301344, 0), (809635273301456, 1))
    ] + [
        {
            "type": "loss",
            "count": 254,
            "layer": "gpu_thread",
            "reason": "kernel_trace counted 256 events, and the text has 2",
        }
    ]


def test_kernelretsnoop_sample_is_complete() -> None:
    _, records, problems = read_fixture("bpftime-kernelretsnoop")
    assert problems == []
    assert [(r["ts_ns"], r["thread"]) for r in records] == [
        (1749147474550023136, [0, 0, 0]),
        (1749147474550023140, [1, 0, 0]),
        (1749147474550023145, [2, 0, 0]),
        (1749147474550023150, [3, 0, 0]),
        (1749147474550023155, [4, 0, 0]),
    ]
    assert all("block" not in r and r["args"] == {"event": "exit", "occurrence": 0} for r in records)


def test_samples_with_remarks_skip_no_line_and_repeats_stay_apart() -> None:
    _, records, problems = read_fixture("bpftime-divergence")
    assert [(p.line, p.field, p.skipped) for p in problems] == [(6, "thread", False)]
    assert "prints no block" in problems[0].message
    firsts = [r for r in records if r["thread"] == [0, 0, 0]]
    assert [(r["ts_ns"], r["args"]["occurrence"]) for r in firsts] == [
        (1749147474550023136, 0),
        (1749147474550023140, 1),
        (1749147474550023000, 2),
    ]
    assert len(records) == 11


def test_a_sample_of_one_late_lane_keeps_its_times() -> None:
    _, records, problems = read_fixture("bpftime-late-lane")
    assert problems == []
    assert [(r["thread"][0], r["ts_ns"] - 1749147474550023136) for r in records] == [
        (0, 0), (1, 4), (2, 9), (31, 754),
    ]  # fmt: skip


def test_lines_of_whole_warps_are_their_exits() -> None:
    _, records, problems = read_fixture("bpftime-warp-order")
    assert problems == []
    assert [(r["thread"], r["ts_ns"] - 1749147474550023000, r["args"]) for r in records] == [
        ([32 * warp, 0, 0], 2_000 * warp, {
            "warp": warp, "threads": [32 * warp, 32 * warp + 31], "event": "exit", "occurrence": 0,
        })
        for warp in range(3)
    ]  # fmt: skip


def test_fields_that_a_user_added_are_arguments() -> None:
    _, records, problems = read_fixture("bpftime-added-fields")
    assert problems == []
    assert [r["args"] for r in records] == [
        {"a": 1.5, "out": 3, "event": "entry"},
        {"a": -2000.0, "out": "0x1f", "name": "tile[3]", "event": "entry"},
        {"out": 4, "event": "exit", "occurrence": 0},
    ]
    assert [r["thread"] for r in records] == [[0, 0, 0], [1, 0, 0], [1, 0, 0]]
    # A value that JSON cannot write as a number, or not exactly, stays text.
    _, records, _ = read(GOOD + b" a=nan b=1e999 c=1234567890123456789 d=x=1\n")
    assert records[0]["args"] == {
        "a": "nan", "b": "1e999", "c": "1234567890123456789", "d": "x=1", "event": "entry",
    }  # fmt: skip


def test_cuda_counter_exit_is_its_entry_plus_the_duration() -> None:
    _, records, problems = read_fixture("bpftime-cuda-counter")
    entry, leave = records
    assert entry["name"] == leave["name"] == "_Z9vectorAddPKfS0_Pf"
    assert leave["dur_ns"] == 6437888 == leave["ts_ns"] - entry["ts_ns"]
    assert [r["args"] for r in records] == [
        {"event": "entry", "block_x": 0},
        {"event": "exit", "block_x": 0},
    ]
    assert [(p.line, p.field, p.skipped) for p in problems] == [(2, "x", False)]


def test_launchlate_gives_the_clock_reading_and_no_events() -> None:
    header, records, problems = read_fixture("bpftime-launchlate")
    assert header.start == {"monotonic_ns": 3842123456789, "realtime_ns": 1625288743357889890}
    assert records == []
    assert [(p.line, p.field, p.skipped) for p in problems] == [(n, "ts", True) for n in range(9, 14)]


def test_a_calibration_that_contradicts_its_readings_is_not_used() -> None:
    header, _, problems = read(
        b"Clock calibration: REALTIME - MONOTONIC = 1625284901234 ns\n"
        b"  MONOTONIC: 3842.123456789\n  REALTIME:  1625288743.357890890\n"
    )
    assert not header.start
    assert [(p.line, p.field, p.skipped) for p in problems] == [(1, "start", False)]


def test_a_cumulative_total_reports_each_loss_once() -> None:
    total = b"[kernel_trace] total events: %d\n"
    data = GOOD + b"\n" + total % 1 + total % 3 + total % 3 + GOOD_AFTER + b"\n" + total % 6
    _, records, problems = read(data)
    assert [r["count"] for r in records if r["type"] == "loss"] == [2, 2]
    assert problems == []


def test_a_line_that_was_skipped_is_not_lost_as_well() -> None:
    index = b"ock=(0,0,0) thread=(%d,0,0)\n"
    two_in_one = b"[kernel_trace] ts=1 bl[kernel_trace] ts=2 bl" + index % 2 + index % 1
    beyond = b"[kernel_trace] ts=3 block=(0,0,0) thread=(1024,0,0)\n"
    data = GOOD + b"\n" + two_in_one + beyond + b"[kernel_trace] total events: %d\n"
    for total, lost in ((4, []), (7, [3])):
        _, records, problems = read(data % total)
        assert [r["count"] for r in records if r["type"] == "loss"] == lost
        assert [p.line for p in problems if p.skipped] == [2, 3, 4]
    _, records, problems = read(b"Thread (1, 0, 0) timestamp: x\nTotal events collected: 2\n")
    assert [r["count"] for r in records] == [1]
    assert [p.line for p in problems] == [1]


def test_drops_that_kernelretsnoop_counts_are_losses() -> None:
    _, records, _ = read(b"Total events collected: 0\nOOB drops: 0\nFull drops: 31\n")
    assert records == [
        {"type": "loss", "count": 31, "layer": "gpu_thread", "reason": "kernelretsnoop: Full drops: 31"}
    ]


def test_occurrences_are_those_of_one_index() -> None:
    indices = ["1, 0, 0", "0, 1, 0", "0, 0, 1", "1023, 0, 0", "0, 1023, 0", "1, 0, 0"]
    _, records, _ = read("".join(f"Thread ({index}) timestamp: 5\n" for index in indices).encode())
    assert [r["args"]["occurrence"] for r in records] == [0, 0, 0, 0, 0, 1]


def test_occurrences_stop_at_their_limit_and_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpftime, "OCCURRENCES_LIMIT", 1)
    line = b"Thread (%d, 0, 0) timestamp: 5\n"
    _, records, problems = read(line % 0 + line % 1 + line % 0)
    assert [r["args"].get("occurrence") for r in records] == [0, None, 1]
    assert [(p.line, p.skipped) for p in problems] == [(2, False), (3, False)]


def test_log_lines_and_the_programs_own_are_passed_over() -> None:
    log = b"[2025-06-05 18:17:54.512] [info] [syscall_context.hpp:86] manager constructed\n"
    data = log + GOOD + b"\n" + log + b"C[0] = 0 (expected 0)\n\n\xff\xfe\n" + GOOD_AFTER + b"\n" + log
    _, records, problems = read(data)
    assert (len(records), problems) == (2, [])


BROKEN = [
    (b"[kernel_trace] ts=8096352733", "", "is not a whole line of a bpftime tool"),
    (b"01344 block=(0,0,0) thread=(0,0,0)", "", "is not a whole line of a bpftime tool"),
    (GOOD + GOOD_AFTER, "", "is not a whole line of a bpftime tool"),
    (GOOD + b" ts=8 block=(0,0,0) thread=(1,0,0)", "", "is not a whole line of a bpftime tool"),
    (GOOD + b" a=", "", "is not a whole line of a bpftime tool"),
    (b"Warp 1 (threads 32-63):  finish around", "", "is not a whole line of a bpftime tool"),
    (b"[kernel_trace] ts=-5 block=(0,0,0) thread=(0,0,0)", "", "is not a whole line of a bpftime tool"),
    (b"[kernel_trace] ts=8 block=(0,0) thread=(0,0,0)", "", "is not a whole line of a bpftime tool"),
    (b"[kernel_trace] ts=8 block=(0,0,\x000) thread=(0,0,0)", "", "is not a whole line of a bpftime tool"),
    (b"[kernel_trace] ts=8 block=(0,0,\xff) thread=(0,0,0)", "", "is not a whole line of a bpftime tool"),
    (b"[kernel_trace] ts=%b block=(0,0,0) thread=(0,0,0)" % (b"9" * 5000), "", "is not a whole line"),
    (
        b"[kernel_trace] ts=18446744073709551615 block=(0,0,0) thread=(0,0,0)",
        "ts",
        "must be at most 4611686018427387903, not 18446744073709551615",
    ),
    (
        b"[kernel_trace] ts=8 block=(0,65535,0) thread=(0,0,0)",
        "block",
        "has y=65535, and CUDA's largest is 65534",
    ),
    (
        b"[kernel_trace] ts=8 block=(0,0,0) thread=(1024,0,0)",
        "thread",
        "has x=1024, and CUDA's largest is 1023",
    ),
    (b"Thread (0, 0, 64) timestamp: 5", "thread", "has z=64, and CUDA's largest is 63"),
    (b"Thread (0, 0) timestamp: 5", "", "is not a whole line of a bpftime tool"),
    (b"Thread (0, 0, 0) timestamp: ", "", "is not a whole line of a bpftime tool"),
    (b"Entered _Z9vectorAddPKfS0_Pf x=0, t", "", "is not a whole line of a bpftime tool"),
    (b"Entered f x=2147483647, ts=5", "x", "is 2147483647, and CUDA's largest block index is 2147483646"),
    (
        b"Exited (with tsp) f x=0 duration=18446744073709551000 tsp=5ns",
        "duration",
        "must be at most 4611686018427387903, not 18446744073709551000",
    ),
    (b"Exited (with tsp) f x=0 duration=5", "", "is not a whole line of a bpftime tool"),
    (b"Exited (without tsp) f x=0 ", "tsp", "is missing: the exit has no place in time"),
    (b"Total events collected: many", "", "is not a whole line of a bpftime tool"),
    (b"1-10us          : 234      |****", "ts", "is missing: a histogram row counts launches"),
]


@pytest.mark.parametrize(("line", "field", "message"), BROKEN)
def test_only_the_broken_line_is_lost(line: bytes, field: str, message: str) -> None:
    _, records, problems = read(GOOD + b"\n" + line + b"\n" + GOOD_AFTER + b"\n")
    assert [record["ts_ns"] for record in records] == [809635273301344, 809635273301456]
    assert [(p.line, p.field, p.skipped) for p in problems] == [(2, field, True)]
    assert message in problems[0].message
    assert len(problems[0].message) < 200


def test_a_time_that_ends_with_the_input_may_lack_digits() -> None:
    _, records, problems = read(b"Thread (0, 0, 0) timestamp: 17491474745500")
    assert [r["ts_ns"] for r in records] == [17491474745500]
    assert problems == [
        Problem(1, "ts", "ends with the input: digits of its time may be missing", skipped=False)
    ]


@pytest.mark.parametrize("data", [b"", b"\n \n", b"hello\n"])
def test_an_input_without_a_tools_line_is_reported(data: bytes) -> None:
    _, records, problems = read(data)
    assert records == []
    assert problems == [Problem(0, "", "has no line of a bpftime tool", skipped=False)]


def test_a_mark_and_line_ends_of_other_systems_are_read() -> None:
    data = b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD_AFTER + b"\r\n"
    assert bpftime.sniff(data)
    _, records, problems = read(data)
    assert (len(records), problems) == (2, [])


def test_a_line_over_the_limit_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LINE_LIMIT_BYTES", 1000)
    monkeypatch.setattr(bpftime.ToolLines, "chunk_bytes", 100)
    data = GOOD + b"\n[kernel_trace] ts=" + b"1" * 50_000 + b"\n" + GOOD_AFTER + b"\n"
    _, records, problems = read(data)
    assert len(records) == 2
    assert [(p.line, p.field) for p in problems] == [(2, "")]


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([GOOD, *(b[0] for b in BROKEN)]))))
def test_no_input_raises_and_each_line_gives_one_thing_at_most(parts: list[bytes]) -> None:
    data = b"\n".join(parts)
    _, records, problems = read(data)
    assert len(records) + sum(p.skipped for p in problems) <= data.count(b"\n") + 1


@pytest.mark.parametrize(
    "line",
    [
        GOOD,
        b"Thread (0, 0, 0) timestamp: 1749147474550023136",
        b"Warp 0 (threads 0-31):   finish around timestamp 1749147474550023000",
        GOOD + b" a=1.5 out=3",
        b"Entered _Z9vectorAddPKfS0_Pf x=0, ts=1749147474550023136",
        b"12:34:56 Launch Latency Distribution:",
        b"Total events collected: 0",
    ],
)
def test_each_tool_is_recognised_behind_a_log(line: bytes) -> None:
    assert recognise(b"[info] starting\n" * 1000 + line + b"\n").name == "bpftime"


@pytest.mark.parametrize("head", [b"", b"Thread (0, 0, 0) timest", b"a block=(0,0,0)\n", b"{}"])
def test_other_content_is_not_claimed(head: bytes) -> None:
    assert not bpftime.sniff(head)


def exits(rng: Random) -> Iterator[str]:
    for at in range(1500):
        yield f"Thread ({at % 256}, {rng.randrange(3)}, 0) timestamp: {10**18 + at // 64 * 32}"


def entries(rng: Random) -> Iterator[str]:
    for at in range(1500):
        place = f"block=({at // 96},0,{rng.randrange(2)}) thread=({at % 96},0,0)"
        yield f"[kernel_trace] ts={10**18 + at // 64 * 32} {place}"


ODD_LINES = (
    "", "hello", "Thread (5, 0, 0) timestamp: 17 // +4ns", "Thread (2000, 0, 0) timestamp: 5", "Thread (1",
    "Total events collected: 12", "Thread (1, 0, 0) timestamp: 1000000000000000000 a=18446744073709551616",
    "Thread (1, 0, 0) timestamp: 9999999999999999999",
    "[kernel_trace] ts=5 block=(9999999999,0,0) thread=(0,0,0)",
    "Warp 1 (threads 32-63):  finish around timestamp 1000000000000000000",
)  # fmt: skip


@pytest.mark.parametrize("lines", [exits, entries])
@pytest.mark.parametrize("odd", [0, 0.004])
def test_threads_at_once_give_what_each_alone_gives(
    lines: Callable[[Random], Iterator[str]], odd: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, path, written = Random(1), tmp_path / "threads.txt", []
    text = (rng.choice(ODD_LINES) if rng.random() < odd else one for one in lines(rng))
    path.write_text("\n".join(text) + "\n")
    monkeypatch.setattr(bpftime.ToolLines, "chunk_bytes", 1 << 14)
    for is_at_once in (True, False):
        monkeypatch.setattr(bpftime.ToolLines, "has_usual", is_at_once)
        if not is_at_once:
            monkeypatch.setattr(ThreadLayout, "place_all", lambda *_: False)
        for form in ("text", "perfetto"):
            account = tracepipe.convert(path, tmp_path / "out", form, force=True)
            written.append((form, (tmp_path / "out").read_bytes(), [*account_lines(account)]))
    assert written[:2] == written[2:]
    assert written[0][1].count(b"thread") > 1400
