"""Triton Proton's timelines: of kernels, which is Chrome's trace JSON, and inside of kernels."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.support.batches import read_all
from tracepipe.errors import FormatError
from tracepipe.event.model import Header, Problem, Record
from tracepipe.readers import chrome, proton, recognise

STACK = {"call_stack": ["ROOT", "step"]}
KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "k",
    "pid": 0,
    "tid": 200007,
    "ts": 1.5,
    "dur": 2,
    "args": STACK,
}
ARGS = {"Frequency (MHz)": 1000.0, "Init Time (ns)": 50, **STACK}
SCOPE = {
    "ph": "X", "cat": "k", "name": "load", "pid": "k Core3 CTA2", "tid": "warp 1 (line 0)", "ts": 0.1,
    "dur": 0.02, "args": ARGS,
}  # fmt: skip


def kernels(*events: dict[str, Any]) -> list[Record]:
    text = json.dumps({"displayTimeUnit": "us", "traceEvents": [KERNEL, *events]}).encode()
    assert recognise(text).name == "chrome"
    recording = chrome.read(io.BytesIO(text))
    assert recording.header.engine == "Triton Proton"
    records, problems = read_all(recording)
    assert problems == []
    return [record for record in records if record["type"] != "name"]


def inside(*events: dict[str, Any] | str) -> tuple[Header, list[Record], list[Problem]]:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    text = b'{"displayTimeUnit":"ns","traceEvents":[%b]}' % ",\n".join(texts).encode()
    recording = proton.read(io.BytesIO(text))
    return recording.header, *read_all(recording)


@pytest.mark.parametrize(("lane", "place"), [(200007, (0, 7)), (1200013, (1, 13)), (7, (0, 7))])
def test_kernels_are_on_the_stream_of_their_lane(lane: int, place: tuple[int, int]) -> None:
    records = kernels(KERNEL | {"tid": lane, "ts": 9})
    assert [(record["type"], record["name"]) for record in records] == [("gpu_kernel", "k")] * 2
    assert (records[1]["gpu"], records[1]["stream"], records[1]["args"]) == (*place, STACK)


def test_scopes_are_annotations_and_those_of_a_graph_a_layer() -> None:
    scope = KERNEL | {"cat": "scope", "name": "s", "tid": 4711}
    records = kernels(scope, scope | {"tid": 100007, "ts": 2, "args": {}})
    assert sorted((record["type"], record.get("layer", ""), record.get("tid", 0)) for record in records) == [
        ("annotation", "", 4711),
        ("gpu_kernel", "", 0),
        ("hook", "graph", 100007),
    ]


def test_a_flow_leads_from_a_scope_to_a_kernel() -> None:
    ends = [{"ph": ph, "cat": "flow", "name": "launch->kernel", "id": 3, "pid": 0} for ph in "sf"]
    records = kernels(ends[0] | {"tid": 4711, "ts": 1}, ends[1] | {"tid": 200007, "ts": 1.5})
    assert [
        (r["type"], r["phase"], r.get("tid"), r.get("stream")) for r in records if r["phase"] in "sf"
    ] == [
        ("annotation", "s", 4711, None),
        ("gpu_kernel", "f", None, 7),
    ]


def test_objects_of_streams_that_follow_each_other_are_all_read() -> None:
    text = b"".join(
        json.dumps({"displayTimeUnit": "us", "traceEvents": [KERNEL | {"tid": tid, "ts": tid}]}).encode()
        + b"\n"
        for tid in (1, 2, 3)
    )
    records, problems = read_all(chrome.read(io.BytesIO(text)))
    assert [record["stream"] for record in records if record["type"] == "gpu_kernel"] == [1, 2, 3]
    assert problems == []


def test_another_trace_behind_a_more_detailed_one_is_stated() -> None:
    text = json.dumps({"baseTimeNanoseconds": 5, "traceEvents": [KERNEL]}).encode()
    records, problems = read_all(chrome.read(io.BytesIO(text + text)))
    assert len(records) == 1
    assert [problem.message for problem in problems] == [
        "another trace follows the first one: 1 event is not read"
    ]


def test_scopes_are_ranges_of_their_warps_in_cycles() -> None:
    other = SCOPE | {"tid": "warp 3 (line 0)", "ts": 0.05, "dur": 0.4, "name": "mma"}
    header, records, problems = inside(SCOPE, SCOPE | {"ts": 0.11, "dur": 0.004, "name": "wait"}, other)
    assert header.clock == "cycles"
    (warps,) = records
    assert (warps["name"], warps["ts_ns"], warps["block"], warps["ranges"]) == (
        "k", 50, [128, 1, 1], ["mma", "load", "wait"],
    )  # fmt: skip
    assert (warps["warp"], warps["sm"], warps["entry_ns"], warps["exit_ns"]) == (
        [11, 9],
        [3, 3],
        [0, 50],
        [400, 20],
    )
    assert (warps["range_count"], warps["range_clk"], warps["range_dur_clk"]) == (
        [1, 2],
        [0, 0, 10],
        [400, 20, 4],
    )
    assert [(problem.field, problem.skipped) for problem in problems] == [("ts", False)]


@pytest.mark.parametrize("again", [{"args": {**ARGS, "Init Time (ns)": 900}}, {"tid": "warp 0 (line 0)"}])
def test_a_block_of_another_launch_is_another_life_of_its_warps(again: dict[str, Any]) -> None:
    _, records, _ = inside(SCOPE, SCOPE | {"ts": 5} | again)
    lives = [
        (record["ts_ns"] + entry_ns, exit_ns, count)
        for record in records
        for entry_ns, exit_ns, count in zip(
            record["entry_ns"], record["exit_ns"], record["range_count"], strict=True
        )
    ]
    assert lives == [(100, 20, 1), (5000, 20, 1)]


def test_asynchronous_work_belongs_to_the_block_before_it() -> None:
    async_ = SCOPE | {"cat": "async", "tid": "warp 0 (line 1)", "args": STACK, "ts": 0.3}
    flow = async_ | {"cat": "flow", "dur": 0, "flow_out": True, "bind_id": 1}
    _, records, problems = inside(SCOPE, async_, flow)
    (warps,) = records
    assert (warps["warp"], warps["range_count"]) == ([5, 4], [1, 2])
    assert [problem.message for problem in problems][1] == "1 flow between warps is not drawn"


def test_without_a_frequency_times_are_the_globaltimers() -> None:
    header, _, problems = inside(SCOPE | {"args": {"Init Time (ns)": 5}})
    assert header.clock == "globaltimer:0"
    assert problems == []


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"ph": "B"}, "ph: 'B' is not a phase that is read inside kernels"),
        ({"pid": "k"}, "pid: is not a kernel with its SM and block"),
        ({"pid": "k Core99999 CTA1"}, "pid: is not a kernel with its SM and block"),
        ({"tid": 7}, "tid: is not a warp"),
        ({"ts": "soon"}, "ts: is not a time that a trace can have"),
        ({"dur": -1}, "dur: is not a time that a trace can have"),
        ({"name": None}, "name: is missing, or is not a string"),
    ],
)
def test_only_what_is_broken_is_lost(broken: dict[str, Any], message: str) -> None:
    _, records, problems = inside(SCOPE, SCOPE | broken, SCOPE | {"name": "store", "ts": 0.2})
    assert records[0]["ranges"] == ["load", "store"]
    assert [(one.line, one.message.partition(" (at")[0]) for one in problems if one.skipped] == [(2, message)]


def test_a_line_that_is_not_json_is_a_bad_line() -> None:
    _, records, problems = inside(SCOPE, '{"ph":"X","dur":nothing}', SCOPE | {"name": "store", "ts": 0.2})
    assert records[0]["ranges"] == ["load", "store"]
    assert [one.line for one in problems if one.skipped] == [2]


def test_times_below_0_are_moved_to_0() -> None:
    _, records, problems = inside(SCOPE | {"ts": -0.25})
    assert records[0]["ts_ns"] == 0
    assert "times begin 250 ns before 0: this is added to all of them" in [one.message for one in problems]


def test_many_scopes_of_one_launch_are_given_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proton, "_BATCH_BYTES", 100)
    scopes = [SCOPE | {"tid": f"warp {warp} (line 0)"} for warp in range(4) for _ in range(8)]
    _, records, _ = inside(*scopes)
    assert [record["warp"] for record in records] == [[8], [9], [10], [11]]
    assert [record["range_count"] for record in records] == [[8]] * 4


@pytest.mark.parametrize(("limit", "value"), [("_EVENTS_MAX", 2), ("_NAMES_MAX", 8)])
def test_a_block_of_more_than_fits_is_several_lives_of_its_warps(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proton, limit, value)
    _, records, problems = inside(*(SCOPE | {"ts": at} for at in (1, 2, 3)))
    assert not [one for one in problems if one.skipped]
    assert [one["range_count"] for one in records if one["type"] == "gpu_warp"] == [[2, 1]]


def test_the_form_is_known_by_its_warps() -> None:
    assert recognise(json.dumps({"traceEvents": [SCOPE]}, sort_keys=True).encode()).name == "proton"


def test_a_tree_without_times_is_refused_with_what_to_do() -> None:
    leaf = {"children": [], "frame": {"name": "k", "type": "function"}, "metrics": {"time (ns)": 5}}
    tree = [{"children": [leaf], "frame": {"name": "ROOT", "type": "function"}, "metrics": {}}, {"CUDA": {}}]
    with pytest.raises(FormatError, match="has only sums") as caught:
        recognise(json.dumps(tree, indent=2).encode())
    assert "data=" in caught.value.hint


def test_what_is_joined_with_a_broken_scope_or_not_unicode_is_read() -> None:
    whole, deep = json.dumps(SCOPE), json.loads("[" * 300 + "]" * 300)
    _, (warps,), problems = inside(
        whole[:-1] + whole + "}", SCOPE | {"name": "\ud800"}, SCOPE | {"args": {"deep": deep}}
    )
    assert warps["ranges"] == ["load", "?"]
    assert [problem.message.partition(" (")[0] for problem in problems if problem.skipped] == [
        "is not JSON",
        "nests deeper than 200 levels",
    ]
