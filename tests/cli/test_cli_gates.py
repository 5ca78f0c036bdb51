"""`tracepipe diff --gate`: the exit codes, the sentences and the XML of JUnit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cli.test_cli import Run, run
from tests.support.recordings import span, write

__all__ = ["run"]


def recording(path: Path, step_ns: int, idle_ns: int) -> str:
    """Five steps, in which a GPU computes for all but `idle_ns`. The first takes ten times as long."""
    records, at_ns = list[dict[str, Any]](), 2_000
    for number in range(5):
        length_ns = step_ns * (10 if number == 0 else 1)
        records.append(span(at_ns, at_ns + length_ns, f"step {number}", "annotation"))
        records.append(span(at_ns, at_ns + length_ns - idle_ns, "k", "gpu_kernel", gpu=0, stream=7))
        at_ns += length_ns
    return str(write(path, *records))


@pytest.fixture
def sides(tmp_path: Path) -> list[str]:
    """Five recordings of each side: B's steps are 5% longer, by idle time that is three times as long."""
    of_a = [recording(tmp_path / f"a{at}.jsonl", 100_000 + 100 * at, 2_500) for at in range(5)]
    of_b = [recording(tmp_path / f"b{at}.jsonl", 105_000 + 100 * at, 7_500) for at in range(5)]
    return ["--a", *of_a, "--b", *of_b]


ANSWERS = {
    "step<=+3%": "broken",
    "step<=+6%": "held",
    "step<=+5%": "cannot tell",
    "step<=+4us": "broken",
    "idle<=+4%": "broken",
    "idle<=+6%": "held",
    "compute<=+1%": "held",
    "step<=-1%": "broken",
    "wall<=+6%": "held",
    "copies<=+0%": "held",
}


def test_each_gate_has_its_answer(run: Run, sides: list[str]) -> None:
    _, out, _ = run("diff", *sides, *(word for gate in ANSWERS for word in ("--gate", gate)), "--json")
    assert {row["gate"]: row["answer"] for row in json.loads(out)["gates"]} == ANSWERS


@pytest.mark.parametrize(
    ("gates", "code"),
    [
        (["step<=+6%", "idle<=+6%"], 0),
        (["step<=+6%", "step<=+3%", "step<=+5%"], 4),
        (["step<=+6%", "step<=+5%"], 5),
    ],
)
def test_the_exit_code_says_whether_a_gate_is_broken(
    run: Run, sides: list[str], gates: list[str], code: int
) -> None:
    assert run("diff", *sides, *(word for gate in gates for word in ("--gate", gate)))[0] == code


def test_what_is_broken_comes_first_and_then_why(run: Run, sides: list[str]) -> None:
    code, out, _ = run("diff", *sides, "--gate", "step<=+6%", "--gate", "idle<=+3%")
    assert code == 4
    says = " ".join(out.split())
    assert "Broken: idle<=+3%. idle changes by +5.0% (from +5.0% to +5.0%). Held: step<=+6%." in says
    assert "The run takes 1.40 ms in A and 1.47 ms in B" in says, "the causes follow"


def test_two_recordings_are_not_enough_and_that_is_an_answer(run: Run, sides: list[str]) -> None:
    few = [*sides[:3], *sides[6:9]]
    code, out, _ = run("diff", *few, "--gate", "step<=+3%")
    assert code == 5
    assert "Not enough recordings to tell step<=+3%" in " ".join(out.split())
    assert "Record at least 3 of each side" in " ".join(out.split())


def test_how_many_recordings_would_tell_comes_with_the_cause(run: Run, sides: list[str]) -> None:
    says = " ".join(run("diff", *sides, "--gate", "step<=+5%")[1].split())
    assert "of each side would, as those of one side differ by so much: on a quieter machine" in says


def test_gates_are_printed_for_ci_systems(run: Run, sides: list[str]) -> None:
    given = ["--gate", "step<=+3%", "--gate", "step<=+5%", "--gate", "wall<=+9%", "--junit"]
    code, out, _ = run("diff", *sides, *given)
    suite = ElementTree.fromstring(out)
    assert (code, suite.get("tests"), suite.get("failures"), suite.get("skipped")) == (4, "3", "1", "1")
    assert [(case.get("name"), case[0].tag) for case in suite] == [
        ("step<=+3%", "failure"),
        ("step<=+5%", "skipped"),
        ("wall<=+9%", "system-out"),
    ]


def test_a_recording_without_what_a_gate_compares_is_named(
    run: Run, tmp_path: Path, sides: list[str]
) -> None:
    bare = str(write(tmp_path / "bare.jsonl", span(2_000, 3_000, "cudaMalloc")))
    for gate, lacks in (("step<=+3%", "has no steps"), ("idle<=+3%", "has no work of a GPU")):
        code, _, err = run("diff", "--a", bare, "--b", sides[1], "--gate", gate)
        assert code == 1
        assert "bare.jsonl" in err
        assert lacks in err
    code, _, err = run("diff", *sides, "--gate", "communication<=+2%")
    assert (code, "No recording has communication" in err) == (1, True)
    code, _, err = run("diff", *sides[:6], "--b", sides[7], sides[1], "--gate", "step<=+3%")
    assert (code, "a0.jsonl is on both sides" in err) == (1, True)
    code, _, err = run("diff", *sides, "--junit")
    assert (code, "--gate" in err) == (1, True)


def test_the_median_step_of_a_program_without_a_gpu_is_shown(run: Run, tmp_path: Path) -> None:
    ends_ns = (102_000, 212_000, 302_000)
    starts_ns = (2_000, *ends_ns)
    steps = [span(starts_ns[at], end_ns, f"step {at}", "annotation") for at, end_ns in enumerate(ends_ns)]
    path = str(write(tmp_path / "cpu.jsonl", *steps))
    for report in ("steps", "summary"):
        assert "3 steps (median 100 µs)" in run(report, path)[1]
    _, out, _ = run("steps", path, "--top", "2", "--json")
    assert [(row["step"], row["wall_ns"]) for row in json.loads(out)["steps"]] == [
        ("#0", 100_000),
        ("#1", 110_000),
    ]
