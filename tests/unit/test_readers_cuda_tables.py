"""The reader of CUDA event tables: rows of both tools, what cannot be known of them, and broken rows."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import read_all
from tracepipe.event.checks import first_fault
from tracepipe.event.model import Problem, Record
from tracepipe.readers import cuda_tables, recognise

FIXTURES = Path(__file__).parents[2] / "fixtures"
WHOLE_MS = "is in whole milliseconds: the length of a call is known to 1 ms only"
S, MS, US = 10**9, 10**6, 10**3


def read(data: bytes) -> tuple[str, list[Record], list[Problem]]:
    """The clock, the records and the problems of a table."""
    recording = cuda_tables.read(io.BytesIO(data))
    records, problems = read_all(recording)
    assert [first_fault(record) for record in records] == [None] * len(records)
    return recording.header.clock, records, problems


def by_ms(ms: int, name: str, details: str = "", comm: str = "app", pid: int = 7) -> bytes:
    """A row as cuda_events.bt prints it."""
    return f"{ms:<12} {comm:<16} {pid:<12} {name:<20} {details}\n".encode()


def tagged(time: str, name: str, tag: str, details: str = "", comm: str = "app", pid: int = 7) -> bytes:
    """A row as the libbpf tool prints it."""
    prefix = f"{time:<8} " if time else ""
    return f"{prefix}{comm:<16} {pid:<7} {name:<20} {f'[{tag}]':>8} {details}\n".encode()


def call(ms: int, name: str = "cudaFree", pid: int = 7) -> bytes:
    return by_ms(ms, name, "ptr=0x1", pid=pid) + by_ms(ms + 1, name, "returned=0 (success)", pid=pid)


def shape(records: list[Record]) -> list[tuple[str, str, int]]:
    return [(r["name"], r["phase"], r["ts_ns"]) for r in records]


def test_the_sample_of_the_documentation() -> None:
    data = (FIXTURES / "cuda-table-sample" / "input.txt").read_bytes()
    assert recognise(data).name == "cuda-table"
    clock, records, problems = read(data)
    who = {"type": "userspace", "pid": 12345, "comm": "my_cuda_app"}
    assert clock == "trace"
    assert records[2:] == [
        {**who, "name": "cudaMemcpy", "phase": "B", "ts_ns": 1236 * MS,
         "args": {"size_bytes": 1048576, "kind": 1, "direction": "HtoD"}},
        {**who, "name": "cudaMemcpy", "phase": "E", "ts_ns": 1237 * MS, "args": {"result": 0}},
        {**who, "name": "cudaLaunchKernel", "phase": "B", "ts_ns": 1240 * MS,
         "args": {"function": "0x7f8b3c4d2a00"}},
        {**who, "name": "cudaLaunchKernel", "phase": "E", "ts_ns": 1241 * MS, "args": {"result": 0}},
    ]  # fmt: skip
    assert problems == [Problem(2, "TIME(ms)", WHOLE_MS, skipped=False)]


@pytest.mark.parametrize("case", ["cuda-table-bpftrace", "cuda-table-threads"])
def test_recordings_of_the_script_read_whole(case: str) -> None:
    data = (FIXTURES / case / "input.txt").read_bytes()
    assert recognise(data).name == "cuda-table"
    _, records, problems = read(data)
    rows = data.count(b" my_cuda_app ")
    whole = sum(r["phase"] == "X" for r in records)
    assert len(records) + whole == rows
    assert not any(p.skipped for p in problems)
    messages = [p.field for p in problems]
    assert messages.count("size") == 1
    assert ("PID" in messages) == (case == "cuda-table-threads")


def test_calls_of_two_threads_keep_their_lengths() -> None:
    _, records, _ = read((FIXTURES / "cuda-table-threads" / "input.txt").read_bytes())
    lengths = [r["dur_ns"] for r in records if r["phase"] == "X" and r["name"] == "cudaLaunchKernel"]
    begins = [r["ts_ns"] for r in records if r["phase"] == "B" and r["name"] == "cudaLaunchKernel"]
    ends = [r["ts_ns"] for r in records if r["phase"] == "E" and r["name"] == "cudaLaunchKernel"]
    lengths += [end - begin for begin, end in zip(begins, ends, strict=True)]
    assert lengths == [2 * MS] * 6


def test_a_copys_size_that_may_be_its_kind_is_imported_and_reported_once() -> None:
    rows = b"".join(
        by_ms(1, "cudaMemcpy", f"size={n} bytes, kind=1") + by_ms(2, "cudaMemcpy", "returned=0 (success)")
        for n in (4, 0, 5)
    )
    _, records, problems = read(rows)
    assert [r["args"] for r in records if r["phase"] == "B"] == [
        {"size_bytes": 4, "kind": 1},
        {"size_bytes": 0, "kind": 1},
        {"size_bytes": 5, "kind": 1, "direction": "HtoD"},
    ]
    assert [(p.line, p.skipped) for p in problems if p.field == "size"] == [(1, False)]


def test_the_libbpf_tools_small_copy_is_a_small_copy() -> None:
    _, records, problems = read(tagged("10:00:00", "cudaMemcpy", "ENTER", "size=4 bytes, kind=2"))
    assert records[0]["args"] == {"size_bytes": 4, "kind": 2, "direction": "DtoH", "placed_by": "order"}
    assert [p.field for p in problems] == ["TIME"]


@pytest.mark.parametrize(
    ("details", "args"),
    [
        ("size=10 bytes, kind=4", {"size_bytes": 10, "kind": 4, "direction": "default"}),
        ("size=10 bytes, kind=-7", {"size_bytes": 10, "kind": -7}),
        ("func=0xab", {"function": "0xab"}),
        ("handle=(nil)", {"handle": "0x0"}),
        ("device=-1", {"device": -1}),
        ("threads=256, name=vec add", {"threads": 256, "name": "vec add"}),
    ],
)
def test_details_of_entries(details: str, args: dict[str, object]) -> None:
    _, records, problems = read(by_ms(1, "cudaMemcpy", details))
    assert (records[0]["phase"], records[0]["args"]) == ("B", args)
    assert [p.message for p in problems] == [WHOLE_MS]


@pytest.mark.parametrize(
    ("data", "args", "message"),
    [
        (by_ms(1, "cudaFree", "returned=-1 (error)"), {"result": -1}, []),
        (tagged("1:1", "cudaFree", "EXIT", "returned=Success")[4:], {"result": 0}, []),
        (tagged("", "cudaFree", "EXIT", "returned=OutOfMemory"), {"result_name": "OutOfMemory"}, []),
        (tagged("", "cudaFree", "EXIT", "returned=Unknown"), {"result_name": "Unknown"}, ["returned"]),
        (by_ms(1, "cudaFree", "returned=0 (suc"), {"details": "returned=0 (suc"}, ["returned"]),
        (tagged("", "cudaFree", "EXIT"), {}, ["returned"]),
    ],
)
def test_results(data: bytes, args: dict[str, object], message: list[str]) -> None:
    _, records, problems = read(data)
    assert records[0]["phase"] == "E"
    got = records[0].get("args", {})
    got.pop("placed_by", None)
    assert got == args
    assert [p.field for p in problems if "TIME" not in p.field] == message


def test_rows_of_a_second_keep_their_order_and_stay_in_it() -> None:
    times = ["23:59:58", "23:59:58", "23:59:59", "00:00:00", "00:00:00", "00:00:07"]
    rows = b"".join(tagged(t, "cudaFree", tag) for t, tag in zip(times, ["ENTER", "EXIT"] * 3, strict=True))
    clock, records, problems = read(rows)
    last, midnight = 86_398 * S, 86_400 * S
    assert clock == "localtime"
    assert [r["ts_ns"] for r in records] == [
        last, last + US, last + S, midnight, midnight + US, midnight + 7 * S
    ]  # fmt: skip
    assert {r["args"]["placed_by"] for r in records} == {"order"}
    assert [(p.field, p.skipped) for p in problems if p.field == "TIME"] == [("TIME", False)]


def test_a_wall_clock_that_is_set_back_keeps_the_order() -> None:
    rows = [tagged(t, "cudaFree", tag) for t, tag in (("03:00:00", "ENTER"), ("02:00:00", "EXIT"))]
    _, records, problems = read(b"".join(rows))
    assert [r["ts_ns"] for r in records] == [3 * 3600 * S, 3 * 3600 * S + US]
    assert any("goes back" in p.message and not p.skipped for p in problems)


def test_more_rows_in_a_second_than_have_room_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_tables, "STEP_NS", S // 10)
    rows = (tagged("00:00:00", "cudaFree", "ENTER") + tagged("00:00:00", "cudaFree", "EXIT")) * 6
    _, records, _ = read(rows + tagged("00:00:01", "cudaFree", "ENTER"))
    assert [r["ts_ns"] for r in records] == [n * S // 10 for n in range(13)]


def test_without_times_rows_are_placed_by_order_alone() -> None:
    rows = tagged("", "cudaFree", "ENTER", "ptr=0x1") + tagged("", "cudaFree", "EXIT", "returned=Success")
    clock, records, problems = read(rows)
    assert (clock, shape(records)) == ("order", [("cudaFree", "B", 0), ("cudaFree", "E", US)])
    assert [p.message[:10] for p in problems] == ["is missing"]


def test_without_exits_calls_are_instants() -> None:
    rows = b"".join(tagged("10:00:00", name, "ENTER") for name in ("cudaGetDevice", "cudaStreamCreate"))
    _, records, problems = read(rows)
    assert [r["phase"] for r in records] == ["I", "I"]
    assert [p.field for p in problems if "no exits" in p.message] == ["EVENT"]


def test_one_call_that_never_returned_has_begun() -> None:
    _, records, _ = read(by_ms(5, "cudaStreamSynchronize", "stream=0x0"))
    assert shape(records) == [("cudaStreamSynchronize", "B", 5 * MS)]


def test_a_call_that_overlaps_another_of_its_process_is_kept_whole_and_reported() -> None:
    rows = [
        by_ms(1, "cudaMalloc", "size=9 bytes"),
        by_ms(2, "cudaFree", "ptr=0x1"),
        by_ms(2, "cudaFree", "ptr=0x2", pid=8),
        by_ms(3, "cudaMalloc", "returned=0 (success)"),
        by_ms(5, "cudaFree", "returned=1 (error)"),
        by_ms(6, "cudaFree", "returned=0 (success)", pid=8),
    ]
    _, records, problems = read(b"".join(rows))
    assert shape(records) == [
        ("cudaMalloc", "B", 1 * MS),
        ("cudaFree", "B", 2 * MS),
        ("cudaMalloc", "E", 3 * MS),
        ("cudaFree", "X", 2 * MS),
        ("cudaFree", "E", 6 * MS),
    ]
    assert (records[3]["dur_ns"], records[3]["args"]) == (3 * MS, {"ptr": "0x1", "result": 1})
    assert [(p.line, p.skipped) for p in problems if p.field == "PID"] == [(2, False)]


def test_the_threads_name_decides_which_of_two_equal_calls_ended() -> None:
    rows = [
        by_ms(1, "cudaFree", "ptr=0x1", comm="one"),
        by_ms(2, "cudaFree", "ptr=0x2", comm="two"),
        by_ms(3, "cudaFree", "returned=0 (success)", comm="two"),
        by_ms(9, "cudaFree", "returned=0 (success)", comm="one"),
    ]
    _, records, _ = read(b"".join(rows))
    assert [(r["phase"], r["comm"], r.get("dur_ns")) for r in records] == [
        ("B", "one", None),
        ("X", "two", 1 * MS),
        ("E", "one", None),
    ]


def test_after_a_loss_an_exit_ends_the_last_call_of_its_name() -> None:
    lost_exit = by_ms(1, "cudaFree", "ptr=0x1") + b"Lost 3 events\n"
    _, records, problems = read(lost_exit + call(2) + call(4))
    assert records[1] == {"type": "loss", "count": 3, "reason": "bpftrace's buffer was full"}
    assert [(r["ts_ns"], r["dur_ns"]) for r in records if r.get("phase") == "X"] == [
        (2 * MS, 1 * MS),
        (4 * MS, 1 * MS),
    ]
    assert not any(p.skipped for p in problems)


def test_calls_without_exits_do_not_fill_the_memory() -> None:
    rows = call(0) + b"".join(by_ms(n, "cudaFree", f"ptr=0x{n:x}") for n in range(2, 2002))
    _, records, _ = read(rows)
    assert sorted(r["ts_ns"] // MS for r in records if r["phase"] == "B") == [0, *range(2, 2002)]
    *batches, last = cuda_tables.read(io.BytesIO(rows)).batches
    assert len(last.events) < cuda_tables.OPEN_MAX < sum(len(batch.events) for batch in batches)


def test_an_entry_that_was_held_back_is_written_at_the_end() -> None:
    _, records, _ = read(by_ms(1, "cudaFree", "ptr=0x1") + by_ms(2, "cudaFree", "ptr=0x2") + call(3, pid=8))
    assert sorted((r["pid"], r["ts_ns"]) for r in records if r["phase"] == "B") == [
        (7, 1 * MS),
        (7, 2 * MS),
        (8, 3 * MS),
    ]


@pytest.mark.parametrize(
    "comm", ["python3 -m train", "a 5 b", "x" * 40, "", "=", "\N{SNOWMAN}", "[7]", "cudaMalloc"]
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_names_of_all_kinds(comm: str, end: bytes) -> None:
    for row in (by_ms(1, "cudaFree", "ptr=0x1", comm), tagged("00:00:01", "cudaFree", "ENTER", "", comm)):
        _, records, problems = read(row.replace(b"\n", end))
        assert (records[0].get("comm", ""), records[0]["pid"], records[0]["name"]) == (comm, 7, "cudaFree")
        assert not any(p.skipped for p in problems)


BROKEN = [
    (by_ms(3, "cudaMall")[:-14].rstrip() + b"\n", "EVENT"),
    (b"3            app              7   \n", ""),
    (b"3            app\n", ""),
    (b"    size=10 bytes, kind=1\n", ""),
    (b"app     7    cudaFree   ptr=0x1\n", ""),
    (by_ms(3, "cudaFree", "ptr=0x")[:-1] + by_ms(3, "cudaFree", "ptr=0x1"), "PROCESS"),
    (by_ms(99_999_999_999_999, "cudaFree", "ptr=0x1"), "TIME(ms)"),
    (b"3            app              2147483648   cudaFree             ptr=0x1\n", "PID"),
    (tagged("00:00:01", "cudaFree", "ENTER"), "TIME"),
    (tagged("", "cudaFree", "ENTER"), "TIME"),
    (b"3            app              7            cudaFree   " + b"x" * 3000 + b"=1\n", ""),
]


@pytest.mark.parametrize(("row", "field"), BROKEN)
def test_only_the_broken_row_is_lost(row: bytes, field: str) -> None:
    _, records, problems = read(call(1) + row + call(4))
    assert [r["ts_ns"] // MS for r in records] == [1, 2, 4, 5]
    assert [(p.line, p.field) for p in problems if p.skipped] == [(3, field)]


@pytest.mark.parametrize(
    "row", [b"24:00:00 app 7 cudaFree [EXIT] returned=Success\n", tagged("", "f", "EXIT")]
)
def test_only_the_row_of_a_broken_time_is_lost(row: bytes) -> None:
    good = tagged("10:00:00", "cudaFree", "ENTER", "ptr=0x1")
    _, records, problems = read(good + row + good.replace(b"[ENTER]", b" [EXIT]"))
    assert [r["phase"] for r in records] == ["B", "E"]
    assert [(p.line, p.field) for p in problems if p.skipped] == [(2, "TIME")]


@pytest.mark.parametrize(
    "text",
    [
        "Attaching 24 probes...", "Tracing CUDA events... Hit Ctrl-C to end.", "Tracing complete.", "",
        "Using CUDA library: /usr/local/cuda-12.6/lib64/libcudart.so", "loading 3 of 12 shards",
        "Filtering for PID: 12", "17:35:41 INFO loaded 12 files", "cudaMalloc failed: out of memory",
    ],
)  # fmt: skip
def test_text_between_the_rows_is_passed_over(text: str) -> None:
    _, records, problems = read(call(1) + text.encode() + b"\n" + call(4))
    assert (len(records), [p.message for p in problems]) == (4, [WHOLE_MS])


def test_an_end_in_the_middle_of_a_row_is_reported() -> None:
    rows = call(1) + by_ms(3, "cudaFree", "ptr=0x7f00")
    for bytes_short, field, skipped in ((3, "DETAILS", False), (14, "DETAILS", False), (40, "", True)):
        _, _, problems = read(rows[:-bytes_short])
        assert [(p.line, p.field, p.skipped) for p in problems[1:]] == [(3, field, skipped)]
    row = tagged("", "cudaFree", "ENTER", "ptr=0x1") + tagged("", "cudaFree", "EXIT", "returned=Success")
    assert [(p.line, p.field) for p in read(row[:-3])[2][1:]] == [(2, "returned")]


def test_a_second_table_and_a_time_that_goes_far_back_are_reported() -> None:
    title = b"TIME(ms)     PROCESS          PID          EVENT                DETAILS\n"
    _, records, problems = read(title + call(9000) + call(8500) + call(5000) + title + call(1))
    assert len(records) == 8
    assert [(p.line, p.field, p.skipped) for p in problems[1:]] == [
        (6, "TIME(ms)", False),
        (7, "TIME(ms)", False),
        (8, "TIME", False),
    ]


@pytest.mark.parametrize("data", [b"", b"hello\n", b"3 of 4 done\n", b'{"ts":1}\n', b"x" * 5000])
def test_other_content_is_not_claimed(data: bytes) -> None:
    assert not cuda_tables.sniff(data)
    assert read(data)[1] == []
    assert Problem(0, "", "has no row of a CUDA event table", skipped=False) in read(data)[2]


@pytest.mark.parametrize("row", [call(1), tagged("10:00:00", "f", "EXIT"), tagged("", "f", "ENTER")])
def test_recognised_without_a_title_behind_whatever_stands_before(row: bytes) -> None:
    assert recognise(b"\xef\xbb\xbfsome banner\n" * 3 + row).name == "cuda-table"


ROW = st.sampled_from(
    [call(1), tagged("10:00:00", "f", "EXIT"), tagged("", "f", "ENTER"), by_ms(1, "cuInit")]
)


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60), ROW, ROW.flatmap(lambda row: st.integers(0, 90).map(lambda n: row[:n]))
        )
    )
)
def test_no_input_raises_and_no_line_gives_two_events(parts: list[bytes]) -> None:
    data = b"".join(parts)
    _, records, problems = read(data)
    assert len(records) + sum(p.skipped for p in problems) <= data.count(b"\n") + 1
