"""What calls alone show of a GPU's idle time, and what they do not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import HEADER, Load, event, loader, span, write
from tracepipe.reports.gaps import Options, run
from tracepipe.store.run import load_run

LAUNCH, SYNCHRONISE = "cuLaunchKernel", "cuCtxSynchronize"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def longest(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Start, length, and the calls around each stretch."""
    return [tuple(row.values())[:4] for row in found.get("gaps", [])]


def test_time_between_launches_by_process(load: Load) -> None:
    result = run(
        load(
            span(1_000, 1_010, LAUNCH),
            span(1_100, 1_140, "cudaLaunchKernel"),
            span(1_110, 1_130, LAUNCH),  # inside: no launch of its own
            span(1_120, 1_200, LAUNCH, tid=2),  # overlaps: no time between them
            span(1_500, 1_510, LAUNCH),
            span(1_000, 1_010, LAUNCH, pid=9, tid=9),
            span(1_040, 1_050, LAUNCH, pid=9, tid=9),
        ),
        Options(),
    ).as_json()
    rows = [(row["launches"], row["total_ns"], row["max_ns"]) for row in result["launch_gaps"]]
    assert rows == [(4, 90 + 300, 300), (4, 500, 380), (2, 30, 30), (2, 40, 40)]
    assert result["notes"][0].endswith("recorded, these figures are from calls alone")
    assert "surely_idle" not in result


def test_after_a_synchronise_call_the_gpu_is_idle_until_it_gets_work(load: Load) -> None:
    found = run(
        load(
            span(1_000, 1_010, LAUNCH),
            span(1_020, 1_100, "cudaDeviceSynchronize"),
            span(1_030, 1_090, SYNCHRONISE),  # inside
            span(1_110, 1_120, SYNCHRONISE),  # the GPU was idle before
            span(1_300, 1_310, "cuMemcpyHtoD_v2"),
            span(1_400, 1_410, "cudaStreamSynchronize"),  # waits for one stream alone
            span(1_500, 1_510, LAUNCH),
            span(1_600, 1_700, SYNCHRONISE, args={"result": 700}),  # failed
            span(1_800, 1_810, LAUNCH),
            span(1_820, 1_900, SYNCHRONISE),
            span(1_950, 1_960, "cuMemFree_v2"),
        ),
        Options(),
    ).as_json()
    assert longest(found) == [(100, 200, "cudaDeviceSynchronize", "cuMemcpyHtoD_v2")]
    (row,) = found["surely_idle"]
    assert (row["process"], row["gaps"], row["total_ns"]) == ("vec_add 1", 1, 200)


def test_work_that_another_thread_asks_for_meanwhile_makes_it_uncertain(load: Load) -> None:
    began_before = span(1_050, 1_150, "cudaMemcpyAsync", tid=2)
    began_meanwhile = span(1_150, 1_160, LAUNCH, tid=2)
    of_another_process = span(1_150, 1_160, LAUNCH, pid=2, tid=2)
    never_returned = event("B", 1_050, LAUNCH, tid=2)
    around = [span(1_000, 1_010, LAUNCH), span(1_100, 1_200, SYNCHRONISE), span(1_300, 1_310, LAUNCH)]
    for other in (began_before, began_meanwhile, never_returned):
        assert longest(run(load(*around, other), Options()).as_json()) == []
    assert longest(run(load(*around, of_another_process), Options()).as_json()) == [
        (200, 100, SYNCHRONISE, LAUNCH)
    ]


@pytest.mark.parametrize(
    "calls",
    [
        [span(1_001, 1_002, "cudaSetDevice", args={"device": device}) for device in (0, 1)],
        [span(1_001, 1_002, "cuCtxCreate_v2"), span(1_003, 1_004, "cuCtxCreate_v2")],
    ],
)
def test_nothing_is_claimed_about_several_gpus(calls: list[dict[str, Any]], load: Load) -> None:
    around = [span(1_010, 1_020, LAUNCH), span(1_100, 1_200, SYNCHRONISE), span(1_300, 1_310, LAUNCH)]
    found = run(load(*calls, *around), Options()).as_json()
    assert "gaps" not in found
    assert (
        "vec_add 1 uses several GPUs or contexts, and a synchronise call waits for only one" in found["notes"]
    )
    assert longest(run(load(calls[0], *around), Options()).as_json()) == [(200, 100, SYNCHRONISE, LAUNCH)]


def test_nothing_is_certain_where_calls_were_left_out(tmp_path: Path) -> None:
    around = [span(1_010, 1_020, LAUNCH), span(1_100, 1_200, SYNCHRONISE), span(1_300, 1_310, LAUNCH)]
    path = write(tmp_path / "run.jsonl", *around)
    text = path.read_text().replace('"command"', '"options": {"only": ["cuLaunch*"]}, "command"', 1)
    assert HEADER["command"] and "options" in text
    path.write_text(text)
    found = run(load_run(str(path)), Options()).as_json()
    assert "gaps" not in found
    assert found["notes"][1] == "calls were left out (only): it is not known when the GPU surely had no work"


def test_losses_of_calls_are_reported(load: Load) -> None:
    loss = {"type": "loss", "layer": "userspace", "count": 7, "ts_ns": 1_500}
    found = run(load(span(1_010, 1_020, LAUNCH), loss), Options()).as_json()
    assert found["notes"][1].startswith("7 events of calls were lost")


def test_short_stretches_and_long_lists_are_left_out(load: Load) -> None:
    calls = []
    for at in range(6):
        calls += [span(1_000 + at * 100, 1_010 + at * 100, LAUNCH)]
        calls += [span(1_020 + at * 100, 1_030 + at * 100 + at, SYNCHRONISE)]
    found = run(load(*calls), Options(top=2, min="68ns")).as_json()
    assert [row["dur_ns"] for row in found["gaps"]] == [70, 69]
    assert found["surely_idle"][0]["gaps"] == 3


@pytest.mark.parametrize("seed", range(20))
def test_a_gpu_is_idle_where_no_call_can_have_given_it_work(seed: int, load: Load) -> None:
    dice = random.Random(seed)
    events, ends = [], {1: 1_000, 2: 1_000}
    for _ in range(14):
        tid = dice.choice([1, 2])
        start_ns = ends[tid] + dice.randrange(1, 40)
        ends[tid] = start_ns + dice.randrange(1, 30)
        name = dice.choice([LAUNCH, SYNCHRONISE, "cuMemAlloc_v2", "cuMemcpyDtoH_v2"])
        events.append(span(start_ns, ends[tid], name, tid=tid))
    events.append(span(900, 901, LAUNCH))
    work = [
        (e["ts_ns"], e["ts_ns"] + e["dur_ns"]) for e in events if "Launch" in e["name"] or "cpy" in e["name"]
    ]
    expected: dict[int, int] = {}
    for wait in (e for e in events if e["name"] == SYNCHRONISE):
        start_ns, end_ns = wait["ts_ns"], wait["ts_ns"] + wait["dur_ns"]
        later = [begin_ns for begin_ns, _ in work if begin_ns >= end_ns]
        meets = any(begin_ns < end_ns and until_ns > start_ns for begin_ns, until_ns in work)
        if later and not meets and min(later) > end_ns:
            expected[min(later)] = min(expected.get(min(later), end_ns), end_ns)
    found = run(load(*events), Options(top=0)).as_json()
    stretches = {at_ns + 1_000 + dur_ns: at_ns + 1_000 for at_ns, dur_ns, _, _ in longest(found)}
    assert stretches == expected
