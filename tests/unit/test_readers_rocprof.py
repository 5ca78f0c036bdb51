"""The reader of rocprofv3's JSON: what becomes of records, and JSON that is broken or long."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.cases import FIXTURES
from tests.support.batches import read_all
from tracepipe.event.checks import first_fault
from tracepipe.event.model import Problem, Record
from tracepipe.readers import READERS, json_elements, recognise, rocprof_json
from tracepipe.readers.rocprof_json import JsonWalk, WalkError

KINDS = [
    {"kind": "NONE", "operations": []},
    {"kind": "HIP_RUNTIME_API", "operations": ["none", "hipLaunchKernel", "hipMemcpyAsync"]},
    {"kind": "KERNEL_DISPATCH", "operations": ["none", "enqueue", "complete"]},
    {"kind": "MEMORY_COPY", "operations": ["MEMORY_COPY_NONE", "MEMORY_COPY_HOST_TO_DEVICE"]},
    {
        "kind": "MEMORY_ALLOCATION",
        "operations": ["none", "MEMORY_ALLOCATION_ALLOCATE", "MEMORY_ALLOCATION_FREE"],
    },
    {"kind": "MARKER_CORE_API", "operations": ["none", "roctxRangePushA"]},
]


def record(kind: int, operation: int, start: int, end: int, correlation: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind, "operation": operation, "thread_id": 500,
        "correlation_id": {"internal": correlation, "external": 0},
        "start_timestamp": start, "end_timestamp": end, **more,
    }  # fmt: skip


def xyz(*sizes: int) -> dict[str, int]:
    return dict(zip("xyz", sizes, strict=True))


def whole() -> dict[str, Any]:
    """A recording of each kind of record."""
    info = {
        "agent_id": {"handle": 77}, "queue_id": {"handle": 4}, "kernel_id": 8, "dispatch_id": 1,
        "private_segment_size": 0, "group_segment_size": 16, "workgroup_size": xyz(64, 1, 1),
        "grid_size": xyz(128, 2, 1),
    }  # fmt: skip
    return {
        "rocprofiler-sdk-tool": [
            {
                "metadata": {"pid": 500, "command": ["./train", "2"], "node": {"hostname": "mi350"}},
                "agents": [
                    {"id": {"handle": 70}, "type": 1, "logical_node_type_id": 0, "name": "cpu"},
                    {"id": {"handle": 77}, "type": 2, "logical_node_type_id": 1, "product_name": "MI350X"},
                ],
                "strings": {"buffer_records": KINDS, "marker_api": [{"key": 3, "value": "step"}]},
                "kernel_symbols": [
                    {"kernel_id": 8, "kernel_name": "k.kd", "demangled_kernel_name": "void k<1>(int)"}
                ],
                "callback_records": {"counter_collection": [{"dispatch_data": {}}]},
                "buffer_records": {
                    "kernel_dispatch": [record(2, 2, 50, 60, 1, dispatch_info=info, stream_id={"handle": 9})],
                    "hip_api": [record(1, 2, 20, 24, 2), record(1, 1, 10, 14, 1)],
                    "memory_copy": [
                        record(
                            3,
                            1,
                            66,
                            67,
                            2,
                            bytes=4096,
                            dst_agent_id={"handle": 77},
                            src_agent_id={"handle": 70},
                        )
                    ],
                    "memory_allocation": [
                        record(4, 1, 5, 6, 4, address="0x10", allocation_size=64, agent_id={"handle": 77})
                    ],
                    "marker_api": [record(5, 1, 9, 90, 3)],
                },
            }
        ]
    }


def read(data: bytes) -> tuple[list[Record], list[Problem]]:
    assert recognise(data[: 1 << 16]).name == "rocprof"
    records, problems = read_all(rocprof_json.read(io.BytesIO(data)))
    assert [first_fault(one) for one in records] == [None] * len(records)
    return records, problems


def test_each_kind_of_record_is_read_in_the_order_of_time() -> None:
    records, problems = read(json.dumps(whole()).encode())
    events = [one for one in records if "ts_ns" in one]
    assert [(one["type"], one["name"], one["ts_ns"], one.get("launch")) for one in events] == [
        ("memory", "alloc", 5, None), ("annotation", "step", 9, None),
        ("userspace", "hipLaunchKernel", 10, 1), ("userspace", "hipMemcpyAsync", 20, 2),
        ("gpu_kernel", "k<1>", 50, 1), ("transfer", "HtoD", 66, 2),
        ("annotation", "step", 90, None),
    ]  # fmt: skip
    (kernel,) = [one for one in records if one["type"] == "gpu_kernel"]
    assert (kernel["gpu"], kernel["stream"], kernel["grid"], kernel["block"]) == (1, 9, [2, 2, 1], [64, 1, 1])
    assert [problem.at("") for problem in problems] == ["counter_collection: 1 record is not read"]


def test_every_kernel_of_a_real_file_is_there_at_its_nanosecond() -> None:
    data = (FIXTURES / "rocprof-mi350" / "input.json").read_bytes()
    records, _ = read(data)
    (source,) = json.loads(data)["rocprofiler-sdk-tool"]
    dispatches = source["buffer_records"]["kernel_dispatch"]
    wanted = [(one["start_timestamp"], one["end_timestamp"] - one["start_timestamp"]) for one in dispatches]
    assert [(one["ts_ns"], one["dur_ns"]) for one in records if one["type"] == "gpu_kernel"] == sorted(wanted)


@pytest.mark.parametrize("kept", [40, 400, 1200, 2000])
def test_a_file_that_was_cut_off_keeps_what_it_has(kept: int) -> None:
    data = json.dumps(whole()).encode()
    records, problems = read(data[:kept])
    assert any("what follows is not read" in problem.message for problem in problems)
    assert len(records) < len(read(data)[0])


def test_values_that_are_not_records_are_counted() -> None:
    content = whole()
    (process,) = content["rocprofiler-sdk-tool"]
    wrong: list[Any] = [None, 7, "x", [], {}, {"start_timestamp": None}, {"start_timestamp": 1 << 70}]
    process["buffer_records"] = {"kernel_dispatch": wrong, "hip_api": wrong, "hsa_api": {"not": "a list"}}
    records, problems = read(json.dumps(content).encode())
    assert [one["type"] for one in records] == ["name"]
    assert sum(problem.skipped for problem in problems) == 4
    assert "kernel_dispatch: 5 records are not read" in [problem.at("") for problem in problems]


# Walking ---------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


class Few(io.BytesIO):
    """A stream that gives a few bytes at a time."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(3)


def walked(walk: JsonWalk) -> Any:
    if walk.sees(b"{"):
        return {key: walked(walk) for key in walk.members()}
    if walk.sees(b"["):
        return [walked(walk) for _ in walk.elements()]
    return walk.value()


@given(values, st.booleans())
def test_walking_finds_what_is_there(value: Any, indented: bool) -> None:
    text = json.dumps(value, indent=2 if indented else None, ensure_ascii=indented).encode()
    assert walked(JsonWalk(Few(text))) == value
    assert JsonWalk(Few(text)).value() == value
    if isinstance(value, list):
        assert list(JsonWalk(Few(text)).values()) == value


@given(values)
def test_what_is_passed_over_is_passed_over_whole(value: Any) -> None:
    walk = JsonWalk(Few(json.dumps([value, 1]).encode()))
    elements: Iterator[None] = walk.elements()
    next(elements)
    walk.skip()
    next(elements)
    assert walk.value() == 1
    assert next(elements, "end") == "end"


@pytest.mark.parametrize(
    "text", ["", "{", '{"a"', '{"a":', '{"a":1', '{"a":1,', "[1 2]", "[1,]", "{1:2}", "nul", '"x', "[" * 9999]
)
def test_broken_text_is_reported_with_its_place(text: str) -> None:
    with pytest.raises(WalkError, match="at byte"):
        walked(JsonWalk(io.BytesIO(text.encode()))) if len(text) < 99 else JsonWalk(
            io.BytesIO(text.encode())
        ).value()


def test_a_value_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_elements, "LINE_LIMIT_BYTES", 1000)
    stream = io.BytesIO(b'["' + b"x" * (1 << 20))
    walk = JsonWalk(stream)
    next(walk.elements())
    with pytest.raises(WalkError, match="longer than a value may be"):
        walk.value()
    assert stream.tell() < 1 << 18


def test_it_is_recognised_by_its_first_key() -> None:
    assert not rocprof_json.sniff(b'{"traceEvents":[{"name":"rocprofiler-sdk-tool"}]}')
    assert READERS["rocprof"].sniff(b'\xef\xbb\xbf \n{\n "rocprofiler-sdk-tool": [')


def test_other_files_do_not_become_it(tmp_path: Path) -> None:
    assert (
        recognise(b'{"ts":1.0,"type":"userspace","name":"rocprofiler-sdk-tool","phase":"B"}\n').name
        != "rocprof"
    )
