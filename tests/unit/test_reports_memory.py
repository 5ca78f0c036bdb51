"""What became of allocations: peaks, leaks, double frees, and what a recording cannot show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import HEADER, Load, event, loader, span
from tracepipe.present.writing.rendering import report_lines
from tracepipe.reports.memory import Options, run
from tracepipe.store.run import load_run


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def did(name: str, ts_ns: int, address: Any = None, size: int | None = None, **fields: Any) -> dict[str, Any]:
    call = fields.pop("call", {"alloc": "cuMemAlloc_v2", "free": "cuMemFree_v2"}.get(name))
    given = {"size": size, "address": address, "call": call}
    args = {key: value for key, value in given.items() if value is not None}
    return event("I", ts_ns, name, "memory", args=args | fields.pop("args", {}), **fields)


def rows(result: Any, table: str, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in columns) for row in result.as_json().get(table, [])]


def test_bytes_over_time_their_peak_and_what_is_never_freed(load: Load) -> None:
    result = run(
        load(
            did("alloc", 1_100, 0x10, 100),
            did("alloc", 1_200, 0x20, 300),
            did("free", 1_300, 0x10),
            did("alloc", 1_400, 0x10, 50),  # the same address, once more
            did("free", 1_500, 0x10),
            event("I", 2_000, "last"),
        ),
        Options(),
    )
    (place,) = result.as_json()["processes"]
    assert (place["count"], place["total_bytes"], place["peak_bytes"], place["peak_at_ns"]) == (
        3,
        450,
        400,
        200,
    )
    assert (place["last_bytes"], place["never_freed"], place["never_freed_bytes"]) == (300, 1, 300)
    assert (place["reused"], place["unmatched"], place["certainty"]) == (1, 0, "exact")
    (chart,) = result.as_json()["over_time"]
    assert [(step["at_ns"], step["total_bytes"]) for step in chart["steps"]] == [
        (100, 100), (200, 400), (300, 300), (400, 350), (500, 300),
    ]  # fmt: skip
    assert rows(result, "never_freed", "address", "size_bytes", "at_ns", "age_ns") == [
        ("0x20", 300, 200, 800)
    ]
    assert rows(result, "sites", "count", "p50_lived_ns", "p99_lived_ns", "p50_bytes") == [(3, 100, 200, 100)]
    assert rows(result, "faults", "what") == []


def test_faults_are_distinguished(load: Load) -> None:
    result = run(
        load(
            did("alloc", 1_100, 0x10, 100),
            did("free", 1_200, 0x10),
            did("free", 1_300, 0x10),  # once more
            did("free", 1_400, "0x99"),  # never allocated here
            did("alloc", 1_500, "0x10", 20),
            did("alloc", 1_600, 16, 30),  # the free in between was not recorded
            span(1_700, 1_710, "cudaMalloc", args={"size_bytes": 1 << 40, "result": 2}),
            # cudaFree refuses a second free, and the driver's call inside it does too.
            span(1_800, 1_850, "cudaFree", args={"address": 0x77, "result": 1}),
            span(1_810, 1_840, "cuMemFree_v2", args={"address": 0x77, "result": 1}),
            span(1_900, 1_910, "cudaFree", args={"address": 0, "result": 0}),
        ),
        Options(),
    )
    assert rows(result, "faults", "what", "site", "address", "at_ns", "before_ns", "size_bytes") == [
        ("address given again while in use", "cuMemAlloc_v2", "0x10", 600, 500, 20),
        ("allocation failed", "cudaMalloc", None, 710, None, 1 << 40),
        ("double free", "cuMemFree_v2", "0x10", 300, 200, None),
        ("free of an unknown address", "cuMemFree_v2", "0x99", 400, None, None),
        ("free of an unknown address", "cudaFree", "0x77", 850, None, None),
    ]
    (place,) = result.as_json()["processes"]
    assert (place["peak_bytes"], place["last_bytes"], place["never_freed"]) == (100, 30, 1)
    assert (place["reused"], place["total_bytes"]) == (1, 150)
    assert any(
        note.startswith("1 allocation ends when its address was allocated again") for note in result.notes
    )


def test_a_double_free_that_cuda_refused_is_one(load: Load) -> None:
    result = run(
        load(
            did("alloc", 1_100, 0x10, 100),
            did("free", 1_200, 0x10),
            span(1_300, 1_310, "cudaFree", args={"address": 0x10, "result": 1}),
        ),
        Options(),
    )
    assert rows(result, "faults", "what", "at_ns", "before_ns") == [("double free", 310, 200)]


def test_kinds_gpus_and_processes_are_apart(load: Load) -> None:
    result = run(
        load(
            span(1_010, 1_020, "cudaSetDevice", args={"device": 1}),
            did("alloc", 1_100, 0x10, 1),
            span(1_110, 1_120, "cudaSetDevice", args={"device": 2, "result": 10}),  # refused
            did("alloc", 1_130, 0x20, 2),
            did("alloc", 1_140, 0x10, 4, tid=2),  # chose no device; the address is in use by the process
            did("alloc_host", 1_150, 0x10, 8, call="cuMemHostAlloc"),
            did("alloc", 1_160, 0x30, 16, call="cuMemAllocManaged"),
            did("free", 1_170, 0x30),
            did("alloc", 1_180, 0x10, 32, pid=2, tid=5),
            did("free_host", 1_190, 0x10, call="cuMemFreeHost"),
        ),
        Options(),
    )
    assert rows(result, "processes", "process", "gpu", "kind", "peak_bytes", "last_bytes") == [
        ("vec_add 1", 1, "device", 3, 2),
        ("vec_add 1", 0, "device", 4, 4),
        ("vec_add 1", None, "host", 8, 0),
        ("vec_add 1", 1, "managed", 16, 0),
        ("vec_add 2", 0, "device", 32, 32),
    ]


def test_call_sites_are_the_outermost_call_and_the_one_inside(load: Load) -> None:
    result = run(
        load(
            span(1_000, 1_200, "cublasCreate_v2"),
            span(1_050, 1_150, "cudaMalloc"),
            span(1_060, 1_140, "cuMemAlloc_v2"),
            did("alloc", 1_140, 0x10, 7),
            did("alloc", 1_200, 0x20, 8, tid=2),
            did("alloc", 1_300, 0x30, 9),
        ),
        Options(),
    )
    assert rows(result, "sites", "site", "tid", "never_freed_bytes") == [
        ("cuMemAlloc_v2", 1, 9),
        ("cuMemAlloc_v2", 2, 8),
        ("cublasCreate_v2 > cuMemAlloc_v2", 1, 7),
    ]


@pytest.mark.parametrize(
    ("records", "until"),
    [
        ([{"type": "footer", "counts": {}, "losses": {}, "ended_by": "exit 0"}], "process end"),
        ([{"type": "footer", "counts": {}, "losses": {}, "ended_by": "duration"}], "recording end"),
        ([], "cut off"),
        ([event("B", 1_500, "exit_group", "syscall")], "process end"),
        (
            [
                event("B", 1_500, "running", "scheduler"),
                event("E", 1_600, "running", "scheduler", args={"prev_state": "dead"}),
            ],
            "process end",
        ),
    ],
)
def test_never_freed_states_until_when(load: Load, records: list[dict[str, Any]], until: str) -> None:
    result = run(load(did("alloc", 1_100, 0x10, 1), *records), Options())
    assert rows(result, "never_freed", "until") == [(until,)]


def test_calls_are_used_where_there_are_no_events_of_memory(load: Load) -> None:
    result = run(
        load(
            event("B", 1_100, "cudaMalloc", args={"size_bytes": 64}),
            event("B", 1_110, "cuMemAlloc_v2", args={"size_bytes": 64}),
            event("E", 1_150, "cuMemAlloc_v2", args={"result": 0, "address": 16}),
            event("E", 1_160, "cudaMalloc", args={"result": 0, "address": 16}),
            span(1_200, 1_210, "cudaFree", args={"address": 16, "result": 0}),
            span(1_300, 1_310, "cuMemAlloc_v2", args={"size_bytes": 5}),  # its address is not known
            event("B", 1_400, "cudaMalloc", args={"size_bytes": 99}),  # has not returned
        ),
        Options(),
    )
    assert rows(result, "processes", "count", "peak_bytes", "last_bytes", "never_freed", "unmatched") == [
        (2, 64, 5, 0, 1)
    ]
    assert (
        "the recording has no memory events: allocations are those of the calls that succeeded"
        in result.notes
    )


def test_what_is_not_known_is_not_0(load: Load) -> None:
    result = run(load(span(1_100, 1_110, "cudaMalloc"), span(1_200, 1_210, "cudaFree")), Options())
    columns = ("count", "total_bytes", "peak_bytes", "last_bytes", "never_freed", "never_freed_bytes")
    assert rows(result, "processes", *columns) == [(1, None, None, None, None, None)]
    assert "1 allocation has no size: it is counted with 0 bytes" in result.notes


def test_frees_of_unknown_addresses_may_be_of_allocations_without_one(load: Load) -> None:
    result = run(
        load(
            did("free", 50, address=1),  # before any allocation
            did("alloc", 100, size=10),
            did("alloc", 110, size=30),
            did("alloc", 120, size=20),
            did("free", 200, address=2),
            did("free", 210),
        ),
        Options(),
    )
    assert rows(result, "faults", "what", "address") == [("free of an unknown address", "0x1")]
    said = (
        "of 3 allocations without an address, which 2 frees may be of, at least 1 was not freed: 10 B or more"
    )
    assert said in result.notes


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([did("alloc", 50, address=1), did("free", 60)], id="of another allocation"),
        pytest.param(
            [
                did("alloc", 50, address=1),
                did("alloc", 60),
                did("free", 70),
                did("free", 80, address=2),
            ],
            id="that seemed to be unknown",
        ),
    ],
)
def test_a_free_without_an_address_may_give_one_to_an_allocation_without_one(
    before: list[dict[str, Any]], load: Load
) -> None:
    result = run(load(*before, did("alloc", 100, size=10), did("free", 200, address=1)), Options())
    assert any("at least 0 were not freed: 0 B or more" in note for note in result.notes)


def test_with_losses_the_figures_are_bounds(load: Load) -> None:
    loss = {"type": "loss", "layer": "userspace", "count": 12}
    result = run(load(did("alloc", 1_100, 0x10, 1), loss), Options())
    assert rows(result, "processes", "certainty") == [("bound",)]
    assert any(note.startswith("12 userspace events were lost or filtered") for note in result.notes)
    footer = {"type": "footer", "counts": {}, "losses": {}, "filtered": {"userspace": 3}}
    filtered = run(load(did("alloc", 1_100, 0x10, 1), footer), Options())
    assert any(note.startswith("3 userspace events were lost or filtered") for note in filtered.notes)


def test_a_context_that_ends_takes_its_allocations(load: Load) -> None:
    ended = span(1_200, 1_300, "cudaDeviceReset")
    result = run(load(did("alloc", 1_100, 0x10, 1024), ended, did("alloc", 1_400, 0x20, 1)), Options())
    assert [note for note in result.notes if "ended a context" in note] == [
        "cudaDeviceReset at 300 ns ended a context while 1 allocation (1.00 KiB) was live: the driver "
        "freed those of that context"
    ]


def test_a_total_that_the_tracer_knew_counts(load: Load) -> None:
    result = run(load(did("alloc", 1_100, None, 64, args={"total_allocated": 4096})), Options())
    assert rows(result, "processes", "peak_bytes", "never_freed") == [(4096, None)]


def test_the_chart_shows_the_most_of_each_cell(load: Load, tmp_path: Path) -> None:
    records = [
        {**HEADER, "start": {"monotonic_ns": 0}},
        did("alloc", 0, 0x10, 100),
        did("alloc", 500, 0x20, 100),
        did("free", 501, 0x20),
        event("I", 1_000, "last"),
    ]
    path = tmp_path / "chart.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    loaded = load_run(str(path))
    text = list(report_lines([loaded.facts], run(loaded, Options()), width=30, ascii_only=True))
    at = text.index("vec_add 1, device") + 1
    # 20 cells of 50 ns: half of the peak everywhere, and all of it in the one of 500 ns.
    assert text[at : at + 4] == [
        "    200 B           #",
        "                    #",
        "          ####################",
        "      0 B ####################",
    ]


def test_processes_with_the_highest_peaks_are_listed_where_there_are_many(load: Load) -> None:
    records = [did("alloc", 1_000 + at, 0x10, 1_000 + at, pid=at, tid=at) for at in range(100)]
    result = run(load(*records), Options())
    assert rows(result, "processes", "peak_bytes") == [(1_000 + at,) for at in range(36, 100)]
    assert [len(chart["steps"]) for chart in result.as_json()["over_time"]] == [1] * 64
    assert (
        "36 more processes or kinds of memory, with lower peaks, are not listed: --top 0 lists all"
        in result.notes
    )
    assert len(rows(run(load(*records), Options(top=0)), "processes", "peak_bytes")) == 100


def test_contexts_that_are_ended_again_and_again_are_counted(load: Load) -> None:
    ended = [span(at, at + 1, "cudaDeviceReset") for at in range(1_200, 1_300, 2)]
    notes = run(load(did("alloc", 1_100, 0x10, 1024), *ended), Options()).notes
    assert sum(note.startswith("cudaDeviceReset at") for note in notes) == 20
    assert "30 more calls ended a context while allocations were live" in notes


def test_sizes_that_add_up_beyond_64_bits_and_null_addresses(load: Load) -> None:
    sizes = [
        did("alloc", 1_100 + at, address, 1 << 62) for at, address in enumerate(("0xzz", "-1", hex(1 << 70)))
    ]
    result = run(load(*sizes, did("free", 1_200, "0xzz"), did("alloc", 1_300, "0x1", -5)), Options())
    assert rows(result, "processes", "total_bytes", "peak_bytes") == [(3 << 62, (1 << 63) - 1)]
    assert rows(result, "never_freed", "address", "size_bytes") == [
        ("-0x1", 1 << 62), (hex(1 << 70), 1 << 62), ("0x1", None),
    ]  # fmt: skip


def test_a_total_of_thousands_of_digits_is_not_known(load: Load) -> None:
    result = run(load(did("alloc", 1_100, 0x10, 8, args={"total_allocated": "9" * 5_000})), Options())
    assert rows(result, "processes", "total_bytes", "peak_bytes") == [(8, 8)]


def test_top_limits_rows_and_the_rest_is_counted(load: Load) -> None:
    result = run(load(*(did("alloc", 1_100 + at, at + 1, at) for at in range(1, 6))), Options(top=2))
    assert rows(result, "never_freed", "size_bytes") == [(5,), (4,)]
    assert "3 more allocations that were never freed are not listed: --top 0 lists all" in result.notes
    assert len(run(load(did("alloc", 1_100, 1, 1)), Options(top=0)).as_json()["never_freed"]) == 1
