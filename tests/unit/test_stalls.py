"""Samples of what warps waited for: what is refused of their records, counters, and the report."""

from __future__ import annotations

from typing import Any

import pytest

from tracepipe.errors import TracepipeError
from tracepipe.event.checks import first_fault
from tracepipe.event.counters import STALL_GROUPS, stall_group
from tracepipe.reports import REPORTS
from tracepipe.reports.stalls import advice_on
from tracepipe.store.run import load_run
from tracepipe.store.stalls import StallTable

FIXTURE = "fixtures/gpu-stalls/input.jsonl"
GOOD: dict[str, Any] = {
    "type": "gpu_stall",
    "ts_ns": 1,
    "functions": ["f"],
    "reasons": ["barrier", "selected"],
    "function": [0, 0],
    "reason": [0, 1],
    "samples": [3, 4],
}
BY_INSTRUCTION = GOOD | {"type": "gpu_stall_pc", "offset": [0, 16], "lines": ["a.cu:1"], "line": [0, 1]}


@pytest.mark.parametrize("record", [GOOD, BY_INSTRUCTION])
def test_good_records(record: dict[str, Any]) -> None:
    assert first_fault(record) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"samples": [3]}, "function"),
        ({"reason": [0]}, "reason"),
        ({"reason": [0, 2]}, "reason"),
        ({"function": [0, 1]}, "function"),
        ({"functions": []}, "function"),
        ({"samples": [3, -1]}, "samples[1]"),
        ({"functions": ["f" * 17_000]}, "functions[0]"),
        ({"offset": [0]}, "offset"),
        ({"line": [0, 2]}, "line"),
        ({"modules": []}, "modules"),
        ({"lines": ["a" * 17_000]}, "lines[0]"),
    ],
)
def test_columns_that_do_not_agree_are_refused(changes: dict[str, Any], field: str) -> None:
    fault = first_fault(BY_INSTRUCTION | changes)
    assert fault is not None
    assert fault[0] == field


def test_every_reason_of_a_group_is_in_one_group() -> None:
    reasons = [reason for group in STALL_GROUPS.values() for reason in group]
    assert len(reasons) == len(set(reasons))
    assert {stall_group(reason) for reason in reasons} == set(STALL_GROUPS)
    assert stall_group("one of a later GPU") == "other"


def test_a_reason_without_advice_names_the_place_to_look() -> None:
    assert "Nsight Compute" in advice_on("one of a later GPU")


def report(**options: Any) -> dict[str, Any]:
    one = REPORTS["stalls"]
    return one.run(load_run(FIXTURE), one.options(**options)).as_json()


def test_shares_are_of_a_kernels_samples() -> None:
    found = report()
    matmul, reduce, scan = found["groups"]
    assert (matmul["kernel"], matmul["samples"], matmul["memory_percent"]) == ("matmul<float>", 1250, 80.0)
    assert (matmul["issue_percent"], matmul["barrier_percent"]) == (14.56, 5.44)
    assert (reduce["samples"], reduce["math_pipe_percent"], reduce["instruction_fetch_percent"]) == (
        200,
        75.0,
        25.0,
    )
    assert (scan["samples"], scan["other_percent"]) == (9, 100.0)


def test_instructions_are_those_at_which_warps_wait_with_their_lines() -> None:
    found = report()["instructions"]
    assert [(row["kernel"], row["offset"], row["line"], row["reason"], row["samples"]) for row in found] == [
        ("matmul<float>", "+0x110", "/src/matmul.cu:17", "long_scoreboard", 900),
        ("matmul<float>", "+0x130", "/src/matmul.cu:17", "long_scoreboard", 100),
        ("matmul<float>", "+0x200", "/src/matmul.cu:21", "barrier", 68),
        ("reduce", "+0x10", None, "math_pipe_throttle", 150),
        ("reduce", "+0x0", None, "no_instructions", 50),
    ]


def test_advice_is_given_where_there_are_samples_enough() -> None:
    found = report()
    assert [(one["kernel"], one["reason"]) for one in found["advice"]] == [
        ("matmul<float>", "long_scoreboard")
    ]
    assert any("fewer than 400 samples" in note and "reduce, scan" in note for note in found["notes"])


def test_kernels_can_be_chosen() -> None:
    assert [row["kernel"] for row in report(kernel="red")["groups"]] == ["reduce"]
    assert "2 more kernels are not listed: --top 0 lists all" in report(top=1)["notes"]
    with pytest.raises(TracepipeError, match="No kernel with samples"):
        report(kernel="nothing")
    with pytest.raises(TracepipeError, match="not a regular expression"):
        report(kernel="(")


def test_a_recording_without_samples_is_reported_with_how_to_have_them() -> None:
    one = REPORTS["stalls"]
    result = one.run(load_run("fixtures/device-memory/input.jsonl"), one.options())
    assert result.parts == []
    assert "--gpu-stalls" in result.notes[0]
    assert not one.suits(load_run("fixtures/device-memory/input.jsonl"))


def test_functions_beyond_those_that_are_distinguished_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracepipe.store.stalls._FUNCTIONS_MAX", 1)
    monkeypatch.setattr("tracepipe.store.stalls._INSTRUCTIONS_MAX", 1)
    table = StallTable()
    table.add(GOOD | {"functions": ["f", "g"], "function": [0, 1]})
    table.add(BY_INSTRUCTION)
    assert (len(table), table.left_out) == (1, 4 + 4)
