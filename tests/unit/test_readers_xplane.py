"""XSpaces of XLA's profiler: planes and lines, times in picoseconds, and damage that costs its line only."""

from __future__ import annotations

import errno
import io
from typing import Any

import pytest

from tests.golden.cases import FIXTURES
from tests.support.batches import read_all
from tests.support.xplane import delimited, event, line, number, plane, space, stat, unsigned_stat
from tracepipe.errors import InputError
from tracepipe.event.model import Header, Problem, Record
from tracepipe.readers import recognise, xplane
from tracepipe.recording.reading import open_recording

TASK = plane("Task Environment", stats=["profile_start_time"], own=[stat(1, 1_700_000_000_000_000_000)])
STATS = ["correlation_id", "kernel_details", " regs:16 static_shared:8 grid:2,1,1 block:64,1,1 occ_pct:50.5"]


def read(data: bytes) -> tuple[Header, list[Record], list[Problem]]:
    recording = xplane.read(io.BytesIO(data))
    records, problems = read_all(recording)
    return recording.header, records, problems


def events(*planes: bytes) -> list[Record]:
    _, records, problems = read(space(*planes))
    assert problems == []
    return [record for record in records if record["type"] != "name"]


def gpu(*some: bytes, stats: list[str] = STATS, events: Any = ("k",)) -> bytes:
    return plane("/device:GPU:1", line(9, "Stream #9(Kernel)", 100, *some), events=events, stats=stats)


def host(*some: bytes, name: str = "/host:CPU", **more: Any) -> bytes:
    return plane(name, line(77, "python", 100, *some), **more)


def test_a_kernel_is_on_its_stream_with_its_launch_and_size() -> None:
    (record,) = events(gpu(event(1, 2_000_400, 3_000_000, stat(1, 5), stat(2, ref=3))))
    assert record == {
        "type": "gpu_kernel", "name": "k", "phase": "X", "ts_ns": 2100, "dur_ns": 3000, "gpu": 1, "stream": 9,
        "grid": [2, 1, 1], "block": [64, 1, 1], "launch": 5,
        "args": {"correlation_id": 5, "registers": 16, "shared_bytes": 8, "occ_pct": "50.5"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "details", "type_", "called", "args"),
    [
        ("MemcpyH2D", "memcpy_details", "transfer", "HtoD", {"kind_src": "pageable", "size": 64}),
        ("Memset", "Memset_details", "transfer", "memset", {"size": 64}),
        ("MemoryAlloc", "memalloc_details", "memory", "alloc", {"size": 64}),
        ("MemoryFree", "MemFree_details", "memory", "free", {"size": 64}),
    ],
)
def test_details_state_what_is_not_a_kernel(
    name: str, details: str, type_: str, called: str, args: dict[str, Any]
) -> None:
    words = " ".join(f"{'num_bytes' if key == 'size' else key}:{value}" for key, value in args.items())
    (record,) = events(gpu(event(1, 0, 1000, stat(1, words)), stats=[details], events=[name]))
    assert (record["type"], record["name"], record["gpu"]) == (type_, called, 1)
    assert record["args"] == args


def test_details_that_are_not_sizes_stay_text() -> None:
    (record,) = events(gpu(event(1, 0, 1000, stat(1, "grid:1,²,3 regs:²")), stats=["kernel_details"]))
    assert (record.get("grid"), record["args"]) == (None, {"grid": "1,²,3", "registers": "²"})


@pytest.mark.parametrize(("number", "launch"), [((1 << 63) - 1, (1 << 63) - 1), ((1 << 64) - 1, None)])
def test_launches_have_numbers_of_63_bits(number: int, launch: int | None) -> None:
    (record,) = events(gpu(event(1, 0, 1000, unsigned_stat(1, number))))
    assert record.get("launch") == launch


def test_stats_beyond_what_is_kept_of_an_event_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracepipe.readers.xplane._STATS_MAX", 2)
    _, records, problems = read(space(host(event(1, 0, 0, *(stat(id, id) for id in range(1, 6))))))
    assert [one["args"] for one in records if "args" in one] == [{"stat 1": 1, "stat 2": 2}]
    assert [(one.message[:21], one.skipped) for one in problems] == [("3 stats are left out:", False)]


def test_both_ends_of_an_event_are_rounded() -> None:
    outer, inner = event(1, 400, 2_100), event(1, 1_400, 1_100)
    records = events(host(outer, inner, events=["f"]))
    assert [(record["ts_ns"], record["dur_ns"]) for record in records] == [(100, 3), (101, 2)]


def test_times_count_from_the_start_of_the_profile() -> None:
    header, records, _ = read(space(host(event(1, 5000, 0), events=["f"]), TASK))
    assert header.clock == "realtime"
    assert [one["ts_ns"] for one in records if one["type"] != "name"] == [1_700_000_000_000_000_105]


@pytest.mark.parametrize("start_ns", [(1 << 64) - 1, (1 << 63) - 1])
def test_a_start_that_no_trace_can_hold_is_not_used(start_ns: int) -> None:
    task = plane("Task Environment", stats=["profile_start_time"], own=[unsigned_stat(1, start_ns)])
    header, records, problems = read(space(host(event(1, 5000, 0), events=["f"]), task))
    assert header.clock == "trace"
    assert [one["ts_ns"] for one in records if one["type"] != "name"] == [105]
    assert [one.message for one in problems] == [
        "Task Environment: profile_start_time is not a time that a trace can have"
    ]


def test_times_that_are_absolute_are_those_of_the_wall() -> None:
    absolute = plane("/host:CPU", line(7, "t", 1_700_000_000_000_000_001, event(1, 0, 0)), events=["f"])
    header, records, _ = read(space(absolute, TASK))
    assert header.clock == "realtime"
    assert [one["ts_ns"] for one in records if one["type"] != "name"] == [1_700_000_000_000_000_001]


def test_without_a_start_times_are_on_a_clock_of_their_own() -> None:
    assert read(space(host(event(1, 0, 0), events=["f"])))[0].clock == "trace"


def test_the_states_of_a_host_thread_are_distinguished() -> None:
    names = ["cuLaunchKernel", "$net.py:3 forward", "step", "cuMalloc"]
    some = (event(at + 1, at * 1000, 10, *([stat(1, 5 + at)] if at in (0, 3) else [])) for at in range(4))
    records = events(host(*some, events=names, stats=["correlation_id"]))
    assert [(r["type"], r["name"], r.get("layer"), r.get("domain"), r.get("launch")) for r in records] == [
        ("userspace", "cuLaunchKernel", None, None, 5),
        ("hook", "net.py:3 forward", "python", None, None),
        ("annotation", "step", None, "xla", None),
        ("userspace", "cuMalloc", None, None, None),
    ]


def test_a_producer_and_its_consumer_are_joined_by_a_flow() -> None:
    made = event(1, 0, None, stat(1, 3), stat(2, 8))
    used = event(1, 9000, 10, stat(3, 3), stat(4, 8))
    records = events(host(made, used, events=["f"], stats=["_pt", "_p", "_ct", "_c"]))
    ends = [record for record in records if record["phase"] in "sf"]
    assert [(end["phase"], end["ts_ns"]) for end in ends] == [("s", 100), ("f", 109)]
    assert ends[0]["flow"] == ends[1]["flow"]
    # A flow needs a slice, which what has no length is not.
    assert [record["phase"] for record in records if record["phase"] not in "sf"] == ["X", "X"]


def test_an_event_without_a_length_is_an_instant() -> None:
    (record,) = events(host(event(1, 0, None), events=["f"]))
    assert record["phase"] == "I"


def test_other_planes_are_processes_of_their_names() -> None:
    tpu = plane("/device:TPU:0", line(2, "XLA Ops", 0, event(1, 0, 5000)), events=["fusion"])
    _, records, _ = read(space(tpu))
    (record,) = [one for one in records if one["type"] != "name"]
    assert (record["type"], record["layer"]) == ("hook", "XLA Ops")
    assert {one["name"] for one in records if one["type"] == "name"} == {"/device:TPU:0", "XLA Ops"}


def test_a_process_and_its_threads_have_their_names() -> None:
    _, records, _ = read(space(host(event(1, 0, 0), events=["f"], stats=["process_id"], own=[stat(1, 4711)])))
    assert [(one["pid"], one.get("tid"), one["name"]) for one in records if one["type"] == "name"] == [
        (4711, 77, "python")
    ]


def test_sums_without_times_are_counted() -> None:
    _, records, problems = read(space(host(event(1, None, 5), event(1, 0, 0), events=["f"])))
    assert len([one for one in records if one["type"] != "name"]) == 1
    assert [(one.field, one.skipped) for one in problems] == [("num_occurrences", False)]


def test_what_has_no_name_is_called_by_its_number() -> None:
    (record,) = events(host(event(4, 0, 0, stat(7, 1))))
    assert (record["name"], record["args"]) == ("event 4", {"stat 7": 1})


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (b"\x0b\x0b", "cannot be read"),
        (event(1, -5_000_000, 5), "is at a time that a trace cannot have"),
        (event(1, 0, -5_000_000), "is at a time that a trace cannot have"),
    ],
)
def test_only_the_broken_event_is_lost(broken: bytes, message: str) -> None:
    _, records, problems = read(space(host(event(1, 0, 0), broken, event(1, 9000, 0), events=["f"])))
    assert len([one for one in records if one["type"] != "name"]) == 2
    assert [one.message.startswith("/host:CPU: the event at byte") for one in problems] == [True]
    assert problems[0].message.endswith(message)


def test_a_file_that_is_cut_off_keeps_what_is_whole() -> None:
    data = space(gpu(event(1, 0, 1000), stats=[]), host(event(1, 0, 0), event(1, 5000, 0), events=["f"]))
    _, records, problems = read(data[:-40])
    assert [one["name"] for one in records if one["type"] == "gpu_kernel"] == ["k"]
    assert problems
    assert all("what follows in it is not read" in one.message for one in problems)


def test_names_beyond_what_is_kept_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracepipe.readers.xplane._TEXT_BYTES_MAX", 200)
    _, records, problems = read(space(host(event(1, 0, 0), event(2, 1000, 0), events=["f", "g"])))
    assert [one["name"] for one in records if one["type"] != "name"] == ["f", "event 2"]
    (problem,) = problems
    assert problem.message.startswith("1 name or stat by number is left out")


def test_the_bytes_of_a_program_are_not_among_what_is_left_out() -> None:
    program = delimited(5, number(1, 7) + delimited(6, b"module" * 20_000))
    module = delimited(4, number(1, 1) + delimited(2, number(1, 1) + delimited(2, b"jit") + program))
    metadata = plane("/host:metadata", line(1, "x", 0, event(1, 0, 0)))
    _, records, problems = read(space(metadata + module))
    assert ("jit" in {record["name"] for record in records}, problems) == (True, [])


@pytest.mark.parametrize("head", [b"", b"\n", b"\n\x05", b"\n\x05\x08\x01\x18", b"\n\x09\x12\x07perfett"])
def test_other_bytes_are_not_taken_for_a_profile(head: bytes) -> None:
    assert not xplane.sniff(head)


def test_a_profile_is_known_by_its_first_plane() -> None:
    assert recognise(space(host(event(1, 0, 0)), TASK)).name == "xplane"


def test_a_file_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with open_recording(str(FIXTURES / "xplane-cpu/input.pb")) as opened:
        assert sum(len(batch.events) for batch in opened.recording.batches) > 0


def test_a_disk_that_cannot_be_read_is_reported() -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(InputError, match="cannot be read: Input/output error"):
        xplane.read(Broken(space(TASK)))
