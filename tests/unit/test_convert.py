"""A recording on its way through all stages: what is reported, what is drawn, what memory it takes."""

from __future__ import annotations

import gc
import gzip
import io
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recordings import write_mixed
from tracepipe.converters import CONVERTERS
from tracepipe.errors import FormatError, InputError
from tracepipe.event.model import (
    COLUMN_LIMIT,
    COUNT_LIMIT,
    ID_LIMIT,
    MASK_LIMIT,
    OFFSET_LIMIT_NS,
    SLOT_LIMIT,
    SM_LIMIT,
    TIME_LIMIT_NS,
    Footer,
)
from tracepipe.recording.account import PROBLEMS_KEPT, Account, account_lines
from tracepipe.recording.convert import Conversion, ConversionOptions, check
from tracepipe.recording.reading import clock_records, footer_notes

pytestmark = pytest.mark.usefixtures("core")

GPU = "globaltimer:0"
HEADER: dict[str, Any] = {
    "type": "header",
    "schema": "tracepipe/1",
    "clock": "monotonic",
    "clocks": ["monotonic", GPU],
    "start": {"monotonic_ns": 1_000, "realtime_ns": 9_000_000},
    "command": ["./vec_add"],
}
PAIR = {"type": "clock", "clock": GPU, "source_ns": 500_000, "host_lo_ns": 1_990, "host_hi_ns": 2_010}
FOOTER = {"type": "footer", "counts": {"kernel": 1, "gpu_kernel": 1}, "losses": {}}


def call(ts_ns: int, **fields: Any) -> dict[str, Any]:
    return {"type": "kernel", "name": "f", "phase": "I", "ts_ns": ts_ns, "pid": 1, "tid": 1, **fields}


def on_gpu(ts_ns: int) -> dict[str, Any]:
    return {"type": "gpu_kernel", "name": "k", "phase": "X", "ts_ns": ts_ns, "dur_ns": 50, "clock": GPU}


@pytest.fixture
def recording(tmp_path: Path) -> Any:
    """Writes lines, records or text, to a file, and returns its path."""

    def write(*given: dict[str, Any] | str) -> str:
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in given)
        path = tmp_path / "run.jsonl"
        path.write_text(text)
        return str(path)

    return write


def converted(path: str, **options: Any) -> tuple[Account, list[str]]:
    """The report, and the timeline as text without its indents."""
    out = io.BytesIO()
    report = Conversion(path, CONVERTERS["text"], ConversionOptions(**options)).run(out)
    return report, [" ".join(line.split()) for line in out.getvalue().decode().splitlines()]


def test_a_recording_is_counted_and_drawn(recording: Any) -> None:
    report, text = converted(recording(HEADER, call(1_500), PAIR, on_gpu(500_100), FOOTER))
    assert report.source == "tracepipe"
    # Clock pairs and the footer are about the recording, and no events of it.
    assert report.counts == {"kernel": 1, "gpu_kernel": 1}
    assert (report.skipped, report.ambiguous, report.notes, report.unplaced) == (0, 0, [], {})
    assert "500 f" in text
    assert "1100 + 50 k source_ns=500100" in text
    assert any(line.startswith("0 capture source_format=tracepipe") for line in text)


@pytest.mark.slow
def test_a_pair_at_the_end_places_events_before_it(recording: Any) -> None:
    _, text = converted(recording(HEADER, on_gpu(500_100), *(call(n) for n in range(2_000, 9_000)), PAIR))
    assert "1100 + 50 k source_ns=500100" in text


def test_pairs_may_stand_in_the_header(recording: Any) -> None:
    pair = {key: PAIR[key] for key in PAIR if key != "type"}
    broken = pair | {"host_hi_ns": 1}
    report, text = converted(recording(HEADER | {"clock_pairs": [pair, broken]}, on_gpu(500_100)))
    assert "1100 + 50 k source_ns=500100" in text
    (problem,) = report.problems
    assert problem.at("run") == "run:1: clock_pairs[1].host_hi_ns: is before host_lo_ns"


def test_bad_clock_records_place_nothing_and_are_counted_once(recording: Any) -> None:
    report, _ = converted(recording(HEADER, PAIR | {"host_hi_ns": 0}, on_gpu(500_100)))
    assert report.unplaced == {GPU: 1}
    assert [problem.line for problem in report.problems] == [2]


def test_a_clock_record_is_recognised_by_its_type_and_not_by_its_text(recording: Any) -> None:
    lookalike = call(1_200, args={"type": "clock", "note": '"type":"clock"'})
    report, _ = converted(recording(HEADER, lookalike, on_gpu(500_100)))
    assert report.unplaced == {GPU: 1}
    assert report.counts["kernel"] == 1


def test_events_without_a_place_in_time_are_reported_in_the_trace(recording: Any) -> None:
    report, text = converted(recording(HEADER, on_gpu(5), on_gpu(6), call(1_500)))
    assert report.unplaced == {GPU: 2}
    assert "0 not placed in time clock=globaltimer:0 events=2 reason=no clock pairs" in text


def test_an_assumed_offset_places_them(recording: Any) -> None:
    report, text = converted(recording(HEADER, on_gpu(5), call(1_500)), assumed={GPU: 2_000})
    assert report.unplaced == {}
    assert "1005 + 50 k source_ns=5" in text


def test_without_a_start_times_count_from_the_first_event(recording: Any) -> None:
    header = {key: HEADER[key] for key in HEADER if key != "start"} | {"clocks": ["monotonic"]}
    _, text = converted(recording(header, call(70_000), call(69_000)))
    assert text[0] == "trace clock monotonic, start 69000 ns"


def test_bad_lines_are_counted_all_and_kept_some(recording: Any) -> None:
    report, text = converted(recording(HEADER, *["nonsense"] * 33, call(1_500)))
    assert report.skipped == 33
    assert len(report.problems) == PROBLEMS_KEPT
    assert sum("skipped line" in line for line in text) == 16
    assert "0 17 more lines" in text
    assert "500 f" in text


def test_strict_stops_at_the_first_bad_line(recording: Any) -> None:
    path = recording(HEADER, call(1_500), call(-4), "nonsense")
    with pytest.raises(InputError) as caught:
        converted(path, strict=True)
    assert caught.value.message == f"{path}:3: ts_ns: must be at least 0, not -4"
    assert (caught.value.line, caught.value.field) == (3, "ts_ns")


def test_strict_is_content_with_a_good_file(recording: Any) -> None:
    report, _ = converted(recording(HEADER, call(1_500), PAIR, on_gpu(500_100), FOOTER), strict=True)
    assert report.skipped == 0


def test_a_footer_that_counts_otherwise_is_a_note(recording: Any) -> None:
    report, _ = converted(recording(HEADER, PAIR, call(1_500), FOOTER))
    assert report.notes == ["the footer counts 1 gpu_kernel event, the file has 0"]
    assert footer_notes(Footer(), report.counts) == ["the file has no footer: the capture was cut off"]


def test_what_stands_after_the_footer_is_a_note(recording: Any) -> None:
    report, _ = converted(recording(HEADER, PAIR, call(1_500), on_gpu(500_001), FOOTER, call(1_600)))
    assert report.notes == [
        "1 record comes after the footer",
        "the footer counts 1 kernel event, the file has 2",
    ]


def test_an_input_format_without_a_footer_needs_none(tmp_path: Path) -> None:
    path = tmp_path / "run.txt"
    path.write_text('{"ts":1.0,"type":"userspace","name":"cuInit","phase":"B"}\n')
    report, _ = converted(str(path))
    assert (report.source, report.notes) == ("layered", [])


@pytest.mark.parametrize("content", ["", " \n\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_input_is_an_error(content: str, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    with pytest.raises(InputError, match="is empty"):
        converted(str(path))


def test_an_unknown_input_is_an_error_that_names_the_formats(tmp_path: Path) -> None:
    path = tmp_path / "photo"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    with pytest.raises(FormatError) as caught:
        converted(str(path))
    assert "tracepipe" in caught.value.hint


def test_a_bad_header_is_named_with_its_line_and_field(recording: Any) -> None:
    path = recording(HEADER | {"clock": 5})
    with pytest.raises(InputError) as caught:
        converted(path)
    assert caught.value.message == f"{path}:1: clock: must be a string, not 5"


@pytest.mark.parametrize(
    ("cut_bytes", "rest", "words"),
    [
        (2_000, b"", "was cut off in the middle of a gzip member"),
        (8, bytes(8), "the data is damaged from here on: Error -3"),
    ],
    ids=["cut", "wrong checksum"],
)
def test_damage_keeps_what_came_before_and_is_drawn(
    cut_bytes: int, rest: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.gz"
    text = "\n".join(json.dumps(line) for line in (HEADER, PAIR, *(call(n) for n in range(2_000, 4_000))))
    some, more = gzip.compress(text[:90_000].encode()), gzip.compress(text[90_000:].encode())
    path.write_bytes(some + more[:-cut_bytes] + rest)
    report, drawn = converted(str(path))
    assert 100 < report.counts["kernel"] < 2_000
    assert report.problems[-1].message.startswith(words)
    assert any(words in line for line in drawn)
    with pytest.raises(InputError, match="was cut off"):
        converted(str(path), strict=True)
    messages: list[str] = []
    assert check(str(path), "", messages.append).skipped >= 1
    assert any(words in line for line in messages)


@pytest.mark.slow
def test_progress_shows_bytes_read_of_bytes_in_all(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_mixed(path, 60_000)
    seen: list[tuple[int, int]] = []
    Conversion(str(path), CONVERTERS["perfetto"], ConversionOptions()).run(
        io.BytesIO(), lambda done, total: seen.append((done, total))
    )
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    assert {total for _, total in seen} == {path.stat().st_size}


def test_the_cycle_collector_runs_again_afterwards(recording: Any) -> None:
    assert gc.isenabled()
    converted(recording(HEADER, call(1_500)))
    assert gc.isenabled()
    with pytest.raises(InputError):
        converted(recording(HEADER, "nonsense"), strict=True)
    assert gc.isenabled()


def test_check_names_every_bad_line_and_draws_nothing(recording: Any) -> None:
    path = recording(HEADER, call(1_500), call(1, phase="Q"), "{", call(2, tid="x"), FOOTER)
    messages: list[str] = []
    report = check(path, "", messages.append)
    assert [line.removeprefix(path) for line in messages] == [
        ":3: phase: must be one of B, E, I, X, C, s, t, f, not 'Q'",
        ":4: is not JSON: unexpected end of data at column 2",
        ":5: tid: must be an integer, not 'x'",
    ]
    assert (report.skipped, dict(report.counts)) == (3, {"kernel": 1})
    assert report.notes == ["the footer counts 1 gpu_kernel event, the file has 0"]


def test_check_counts_warps_and_not_batches(recording: Any) -> None:
    batch = {
        "type": "gpu_warp",
        "name": "k",
        "ts_ns": 3,
        "warp": [0, 1],
        "entry_ns": [0, 0],
        "exit_ns": [1, 1],
    }
    assert check(recording(HEADER, batch), "", print).counts["gpu_warp"] == 2
    report, _ = converted(recording(HEADER, batch))
    assert report.counts["gpu_warp"] == 2


def test_clock_records_are_found_without_parsing_the_rest() -> None:
    text = b"\n".join([b"nonsense", b'{"type" : "clock"', json.dumps(PAIR).encode(), b'{"x":"clock"}'])
    assert list(clock_records(io.BytesIO(text))) == [PAIR]


# What a person reads -----------------------------------------------------------------------------------


def test_the_report_states_all_irregularities(recording: Any) -> None:
    warp = {"type": "gpu_warp", "name": "k", "ts_ns": 1, "clock": "globaltimer:1"}
    path = recording(
        HEADER,
        PAIR,
        PAIR | {"source_ns": 1_000_500_000, "host_lo_ns": 1_000_011_990, "host_hi_ns": 1_000_012_010},
        call(1_500, phase="B"),
        call(1_600, phase="E", name="g"),
        call(1_700, phase="X", dur_ns=100, tid=2),
        call(1_750, phase="X", dur_ns=100, tid=2),
        on_gpu(500_000),
        warp | {"warp": [0, 1], "entry_ns": [0, 0], "exit_ns": [1, 1]},
        {"type": "loss", "count": 7, "layer": "syscall"},
        "nonsense",
    )
    report, _ = converted(path)
    lines = [line.replace(path, "run") for line in account_lines(report)]
    assert lines[1].startswith("skipped: run:11: is not JSON: ")
    del lines[1]
    assert lines == [
        "run: tracepipe, 4 kernel, 1 gpu_kernel",
        "note: 1 call had no end: drawn to the end and marked unclosed",
        "note: 1 end had no begin: drawn as an instant and marked no_begin",
        "note: 1 slice overlaps others on its track: drawn on an overlap track",
        "note: the file has no footer: the capture was cut off",
        "clock globaltimer:0: 2 pairs, drift +10.000 ppm, within 11 ns",
        "not drawn: 2 events on globaltimer:1, which has no clock pairs; "
        "--assume-offset globaltimer:1=NS places them",
        "lost: 7 syscall events happened and were not recorded",
    ]


def test_the_report_states_how_many_bad_lines_it_does_not_show(recording: Any) -> None:
    report, _ = converted(recording(HEADER, *["nonsense"] * 25))
    assert "… and 5 more: 25 lines skipped in all" in list(account_lines(report))


def test_the_report_of_an_empty_recording(recording: Any) -> None:
    path = recording(HEADER, {"type": "footer", "counts": {}, "losses": {}})
    report, _ = converted(path, assumed={GPU: 5})
    assert list(account_lines(report)) == [f"{path}: tracepipe, no events"]


def test_the_report_states_that_an_offset_was_assumed(recording: Any) -> None:
    report, _ = converted(recording(HEADER, on_gpu(5)), assumed={GPU: 5})
    assert "clock globaltimer:0: placed by an assumed offset, error unknown" in list(account_lines(report))


def test_a_clock_that_was_set_while_recording_has_that_in_its_bound(recording: Any) -> None:
    header = HEADER | {"clocks": ["monotonic", "realtime"]}
    for set_ns, stated in ((0, []), (5_000_000_000, ["set or slept while recording, within 5000001000 ns"])):
        end = {"monotonic_ns": 2_000, "realtime_ns": 9_001_000 + set_ns}
        footer = {"type": "footer", "counts": {}, "losses": {}, "end": end}
        report, _ = converted(recording(header, call(9_000_100, clock="realtime"), footer))
        assert report.clocks[0]["bound_ns"] == 1_000 + set_ns
        assert [
            line.partition("was ")[2] for line in account_lines(report) if line.startswith("clock")
        ] == stated


# Memory ------------------------------------------------------------------------------------------------

MEASURE = r"""
import re, sys
from tracepipe.recording.convert import Conversion, ConversionOptions
from tracepipe.converters import CONVERTERS
with open(sys.argv[2], "wb") as out:
    Conversion(sys.argv[1], CONVERTERS[sys.argv[3]], ConversionOptions()).run(out)
# Not ru_maxrss, which is never below that of the process that forked this one.
print(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])
"""


def peak_mb(source: Path, output_format: str) -> float:
    """Peak memory of a process that converts `source` and does nothing else."""
    command = [sys.executable, "-c", MEASURE, str(source), "/dev/null", output_format]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024


@pytest.mark.slow
@pytest.mark.parametrize("output_format", ["perfetto", "chrome"])
def test_memory_does_not_grow_with_the_recording(output_format: str, tmp_path: Path) -> None:
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    write_mixed(small, 50_000)
    write_mixed(large, 150_000)
    before_mb, after_mb = peak_mb(small, output_format), peak_mb(large, output_format)
    assert after_mb < 64
    # 40 bytes an event at most: an event that stayed would be hundreds.
    assert after_mb - before_mb < 4


LINES_OF = {
    "bpftrace": "[123456789] kprobe:nv_bind_context",
    "bpftime": "Thread (0, 0, 0) timestamp: 1749147474550023136",
    "cuda-table": "1234       my_cuda_app     12345      cudaFree             ptr=0x1",
    "layered": '{"ts":1.0,"type":"userspace","name":"cuInit","phase":"B"}',
    "tracepipe": json.dumps(HEADER),
}


# Of each format's lines among those of one other; of all others in the slow tests.
NEIGHBOURS = [*itertools.pairwise([*LINES_OF, *LINES_OF][:-1])]
MIXED = [
    pytest.param(own, other, marks=() if (own, other) in NEIGHBOURS else pytest.mark.slow)
    for own, other in itertools.permutations(LINES_OF, 2)
    if own != "tracepipe"
]


@pytest.mark.parametrize(("own", "other"), MIXED)
def test_lines_of_another_format_are_named_and_not_lost(recording: Any, own: str, other: str) -> None:
    # Before the format's own lines and long after them, where no second format is searched for.
    log = ["# a log's line"] * 6_000
    path = recording(LINES_OF[other], LINES_OF[own], *log, LINES_OF[other])
    report = check(path, own, lambda _: None)
    assert sum(report.counts.values()) == 1
    assert [p.line for p in report.problems if p.skipped] == [1, 6003]
    with pytest.raises(InputError, match=r"run.jsonl:1: "):
        converted(path, source_format=own, strict=True)


def test_a_line_of_many_chunks_is_read(recording: Any) -> None:
    count = 300_000
    times = {"warp": [*range(count)], "entry_ns": [0] * count, "exit_ns": [9] * count}
    line = {"type": "gpu_warp", "name": "k", "ts_ns": 1_000, "gpu": 0, "launch": 1} | times
    report = check(recording(HEADER, line), "tracepipe", lambda _: None)
    assert (report.counts, report.skipped) == ({"gpu_warp": count}, 0)


def test_the_largest_numbers_that_a_line_may_have_are_drawn_by_every_format(recording: Any) -> None:
    ids, any_number = {"pid": ID_LIMIT, "tid": ID_LIMIT}, (1 << 64) - 1
    columns: dict[str, Any] = {
        "warp": [COLUMN_LIMIT],
        "sm": [SM_LIMIT],
        "slot": [SLOT_LIMIT],
        "entry_ns": [OFFSET_LIMIT_NS],
        "exit_ns": [OFFSET_LIMIT_NS],
        "entry_clk": [COLUMN_LIMIT],
        "exit_clk": [COLUMN_LIMIT],
        "exit_mask": [MASK_LIMIT],
    }
    start = dict.fromkeys(("monotonic_ns", "boottime_ns", "realtime_ns"), TIME_LIMIT_NS)
    path = recording(
        HEADER | {"start": start, "clocks": ["monotonic"]},
        call(TIME_LIMIT_NS, phase="X", dur_ns=TIME_LIMIT_NS, cpu=any_number, launch=any_number, **ids),
        call(TIME_LIMIT_NS, phase="B", pid=1, tid=ID_LIMIT),
        {"type": "gpu_warp", "name": "k", "ts_ns": TIME_LIMIT_NS, "gpu": any_number, **columns},
        {"type": "loss", "count": COUNT_LIMIT, "ts_ns": TIME_LIMIT_NS, "dur_ns": TIME_LIMIT_NS},
    )
    for form in CONVERTERS.values():
        report = Conversion(path, form, ConversionOptions()).run(io.BytesIO())
        assert (report.skipped, report.counts["kernel"], report.counts["gpu_warp"]) == (0, 2, 1)


def test_times_that_their_clock_puts_beyond_a_trace_are_drawn_by_every_format(recording: Any) -> None:
    late_ns = TIME_LIMIT_NS - 10**12
    pairs = [
        {"type": "clock", "clock": GPU, "source_ns": at, "host_lo_ns": host_ns, "host_hi_ns": host_ns}
        for at, host_ns in ((0, late_ns), (10**11, late_ns + 10**11 + 10**6))
    ]
    warp = {"type": "gpu_warp", "name": "k", "ts_ns": TIME_LIMIT_NS, "clock": GPU, "warp": [0]}
    path = recording(
        HEADER,
        *pairs,
        on_gpu(5) | {"dur_ns": TIME_LIMIT_NS},
        on_gpu(TIME_LIMIT_NS) | {"dur_ns": TIME_LIMIT_NS},
        warp | {"entry_ns": [OFFSET_LIMIT_NS], "exit_ns": [OFFSET_LIMIT_NS]},
        {"type": "loss", "count": 3, "clock": GPU, "ts_ns": TIME_LIMIT_NS, "dur_ns": TIME_LIMIT_NS},
    )
    for form in CONVERTERS.values():
        report = Conversion(path, form, ConversionOptions()).run(io.BytesIO())
        assert (report.skipped, report.counts) == (0, {"gpu_kernel": 2, "gpu_warp": 1})
    _, text = converted(path)
    drawn = re.findall(r"^(\d+) \+ ?(\d+) k source_ns=(\d+)$", "\n".join(text), re.MULTILINE)
    (start_ns, dur_ns, early_ns), last = (tuple(map(int, one)) for one in drawn)
    last_ns = TIME_LIMIT_NS - HEADER["start"]["monotonic_ns"]
    assert early_ns == 5
    assert abs(start_ns - (last_ns - 10**12 + 5)) <= 1
    assert start_ns + dur_ns == last_ns
    assert last == (last_ns, 0, TIME_LIMIT_NS)


def test_megabytes_without_an_event(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    header = b'{"type":"header","schema":"tracepipe/1","clock":"monotonic","clocks":["monotonic"]}\n'
    path.write_bytes(header + (b" " * 1000 + b"\n") * 6000)
    account = Conversion(str(path), CONVERTERS["text"], ConversionOptions()).run(io.BytesIO())
    assert (account.skipped, +account.counts) == (0, {})


def test_a_slot_that_no_table_has_room_for_keeps_its_track(tmp_path: Path) -> None:
    batches = [(10, [0], [0]), (1000, [50, 1000], [3, 600]), (2000, [50], [3])]
    records: list[Any] = [
        {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"]}
    ]
    for ts_ns, sm, slot in batches:
        times = {"entry_ns": [0] * len(sm), "exit_ns": [5] * len(sm)}
        place = {"gpu": 0, "warp": [*range(len(sm))], "sm": sm, "slot": slot}
        records.append({"type": "gpu_warp", "name": "k", "ts_ns": ts_ns, **place, **times})
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    drawn = io.BytesIO()
    Conversion(str(path), CONVERTERS["text"], ConversionOptions()).run(drawn)
    assert drawn.getvalue().decode().count("slot 3\n") == 1
